package pool

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// slot is an address that a pod needs: of one family, on one interface.
type slot struct {
	network, iface string
	v4             bool
	pools          []*stock // of this family, in order
}

// rank returns which of the slot's pools a pool is, -1 if it is none of them.
func (s slot) rank(pool string) int {
	return slices.IndexFunc(s.pools, func(p *stock) bool { return p.Name == pool })
}

// fits reports whether an address can be that of the slot.
func (s slot) fits(p *PodIP) bool {
	return p.Interface == s.iface && p.Addr.Is4() == s.v4 && s.rank(p.Pool) >= 0
}

// choice is what becomes of a slot.
type choice struct {
	slot slot
	ip   PodIP
	last string // the node where the address was last
	wr   Write  // nil if the address is the pod's already
}

// Place gives a pod its addresses. It is for pods that are gated, and for those that could not be: they have no
// annotation. In the plan's order the addresses are claimed, then the pod is told and ungated. A pod that waits is in
// [Book.Waiting] of each pool that has none for it.
//
// For each address, Place takes the pod's own, or an address that the identity has and no pod uses; then an address
// that was never used, as far as is known; then the address that is free for the longest. All or none are taken.
func (b *Book) Place(uid UID, now time.Time) Plan { return b.PlaceOn(uid, nil, now) }

// PlaceOn is Place for a pod that could not be gated, and is on a node with these labels: new addresses come from pools
// that are for this node.
func (b *Book) PlaceOn(uid UID, node map[string]string, now time.Time) Plan {
	waited := b.lines.leave(uid)
	d := placing{facts: &b.facts, pod: b.pods[uid], node: node, now: now, taken: map[netip.Addr]bool{}}
	plan := d.plan()
	if d.full != nil {
		b.lines.join(uid, d.full)
	}
	b.noteWait(uid, plan)
	for _, name := range waited { // if it waits there again, nothing has changed for those behind it
		if !slices.Contains(d.full, name) {
			b.lines.stir(name)
		}
	}
	return plan
}

// placing is the decision about one pod. Of what it reads it changes nothing but what a pool has reserved.
type placing struct {
	*facts
	pod   *Pod              // nil if it is unknown
	node  map[string]string // the labels of its node, nil if it has none, or they do not matter
	now   time.Time
	all   []choice
	taken map[netip.Addr]bool // those of all
	full  []string            // the pools that the pod is to wait for
}

func (d *placing) plan() Plan {
	pod := d.pod
	if !pod.alive() || pod.Assigned != nil && !pod.Gated {
		return Plan{}
	}
	if wait := (recall{d.facts, d.now}).missing(); wait.Reason != "" {
		return wait
	}
	if node := d.elsewhere(); node != "" {
		return Plan{Writes: []Write{endPod(pod)},
			Reason: fmt.Sprintf("it has been running on node %s since before the API server's data were restored", node)}
	}
	if pod.Wants == nil && !pod.Gated { // it is here because it was given an address
		return Plan{}
	}
	slots, reason := d.slots()
	if reason != "" {
		return Plan{Reason: reason}
	}
	if reason, remedy := d.unfit(slots); reason != "" {
		return Plan{Reason: reason, Remedy: remedy}
	}
	for _, s := range slots {
		c, wait := d.choose(s)
		if wait.Reason != "" {
			return wait
		}
		d.taken[c.ip.Addr] = true
		d.all = append(d.all, c)
	}
	without, wait := d.without()
	if wait.Reason != "" {
		return wait
	}
	place := PlacePod{UID: pod.UID, Version: pod.Version, Namespace: pod.Namespace, Name: pod.Name,
		Without: append(without, d.lost()...)}
	known := d.audit
	place.If = []Check{{Since: &known}}
	var plan Plan
	held := map[string]bool{}
	for _, c := range d.all {
		s := d.pools[c.ip.Pool]
		if create, ok := c.wr.(CreateIP); ok {
			if !s.Held && !held[s.Name] {
				held[s.Name] = true
				plan.Writes = append(plan.Writes, HoldPool{Name: s.Name, Version: s.Version, Held: true})
			}
			s.reserved[create.PodIP.Addr] = d.now
		}
		if c.wr != nil {
			plan.Writes = append(plan.Writes, c.wr)
		}
		place.Addresses = append(place.Addresses, Address{
			Network: c.slot.network, Interface: c.slot.iface, Pool: s.Name, Mode: s.Range.Mode,
			Prefix: netip.PrefixFrom(c.ip.Addr, s.Range.Subnet.Bits()), Gateway: s.Range.Gateway, Routes: s.Range.Routes,
			Last: c.last,
		})
	}
	plan.Writes = append(plan.Writes, place)
	return plan
}

// lostLately is for how long after its end a pod's successor is kept from the lost node: longer than a scheduler takes
// to see what the controller has seen. [Book.Barren] ends a successor that found no other node.
const lostLately = 5 * time.Minute

// lost returns the nodes on which addresses were last, and which are deleted or declared off by an operator. The
// scheduler may not know that yet, and would bind the pod to such a node, where nothing starts it and Kubernetes ends
// it after a minute.
func (d *placing) lost() (nodes []string) {
	for _, c := range d.all {
		n, exists := d.nodes[c.last]
		known := exists && !n.Off || c.ip.Phase == Retained && d.now.Sub(c.ip.Since) > lostLately
		if c.last != "" && !known && !slices.Contains(nodes, c.last) {
			nodes = append(nodes, c.last)
		}
	}
	return nodes
}

// mostWithout bounds what is written into a pod. Where more nodes cannot serve a pool, it has a node selector.
const mostWithout = 100

// without returns the nodes that a pod is not to come to, since they have said that they cannot serve an address of it.
// It is to wait if none is left, or if the pod is on such a node and is not given the address yet. What nodes say is
// about the interface that every pod has.
func (d *placing) without() (nodes []string, wait Plan) {
	for _, c := range d.all {
		mode := string(d.pools[c.ip.Pool].Range.Mode)
		if c.slot.iface != DefaultInterface {
			continue
		}
		refuses := func(node, which string) Plan {
			return Plan{Reason: fmt.Sprintf("%s pool %s (mode %s): %s", which, c.ip.Pool, mode,
				d.reports[node].CannotServe[mode]), Remedy: "docs/pools.md says which network each mode needs"}
		}
		if pod := d.pod; pod.Node != "" {
			given := !slices.ContainsFunc(d.all, func(c choice) bool { return c.wr != nil && !c.ip.adopted() })
			if given || pod.ReportedIP.IsValid() || d.reports[pod.Node].CannotServe[mode] == "" {
				continue
			}
			return nil, refuses(pod.Node, fmt.Sprintf("its node %s cannot serve", pod.Node))
		}
		var unable []string
		for name, report := range d.reports {
			if report.CannotServe[mode] != "" {
				unable = append(unable, name)
			}
		}
		slices.Sort(unable)
		if len(unable) > 0 && len(unable) == len(d.reports) {
			return nil, refuses(unable[0], fmt.Sprintf("no node, such as %s, can serve", unable[0]))
		}
		nodes = append(nodes, unable...)
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	return nodes[:min(len(nodes), mostWithout)], Plan{}
}

// elsewhere returns a node that has a pod which has another one by the cluster, or none: it comes from a backup that
// was made before it got its node, and would start a second time. Only the reports tell, not the status of its PodIPs:
// after a restore, an agent reports of no pod that the cluster has elsewhere.
func (d *placing) elsewhere() string {
	for _, node := range d.holders(d.pod.UID) {
		if node != d.pod.Node {
			return node
		}
	}
	return ""
}

// slots returns the addresses that a pod needs, in an order that is the same for all pods, so that none can hold what
// another one waits for while it waits for what that one holds.
func (d *placing) slots() (slots []slot, reason string) {
	for _, w := range d.pod.Wants {
		its, wrong := d.slotsOf(w)
		if wrong != "" && !d.keeps(w, its) {
			return nil, wrong
		}
		slots = append(slots, its...)
	}
	if slots == nil {
		return nil, "the pod names no pool"
	}
	slices.SortStableFunc(slots, func(x, y slot) int {
		return cmp.Or(strings.Compare(x.pools[0].Name, y.pools[0].Name), strings.Compare(x.iface, y.iface))
	})
	return slots, ""
}

// slotsOf returns the addresses that a pod needs on one interface, by those of its pools that can be had, and what is
// wrong with another one.
func (d *placing) slotsOf(w Want) (slots []slot, wrong string) {
	v4 := slot{network: w.Network, iface: w.Interface, v4: true}
	v6 := slot{network: w.Network, iface: w.Interface}
	for _, name := range w.Pools {
		switch s := d.pools[name]; {
		case s == nil:
			wrong = cmp.Or(wrong, fmt.Sprintf("pool %s does not exist", name))
		case s.Invalid != nil:
			wrong = cmp.Or(wrong, fmt.Sprintf("pool %s is invalid: %v", name, s.Invalid))
		case s.Unready != "":
			wrong = cmp.Or(wrong, fmt.Sprintf("pool %s is not ready: %s", name, s.Unready))
		case s.Range.Subnet.Addr().Is4():
			v4.pools = append(v4.pools, s)
		default:
			v6.pools = append(v6.pools, s)
		}
	}
	return slices.DeleteFunc([]slot{v4, v6}, func(s slot) bool { return s.pools == nil }), wrong
}

// keeps reports whether all that a pod needs on an interface is kept for it: then a pool that cannot be had, such as a
// reserve that was deleted, keeps it from nothing. Which families such a pool has is not known. So what is kept must be
// of the other pools alone, and for each family of these.
func (d *placing) keeps(w Want, slots []slot) bool {
	has := make([]bool, len(slots))
	for _, a := range d.owned[ownerOf(d.pod.Namespace, d.pod.Name, d.pod.Identity)] {
		p := d.ips[a]
		if p.Interface != w.Interface {
			continue
		}
		i := slices.IndexFunc(slots, func(s slot) bool { return s.fits(p) })
		if i < 0 {
			return false
		}
		has[i] = true
	}
	return len(slots) > 0 && !slices.Contains(has, false)
}

// choose finds the address of a slot. If there is none, wait says why.
func (d *placing) choose(s slot) (c choice, wait Plan) {
	pod := d.pod
	if c, ok := d.chooseGiven(s, true); ok {
		return c, Plan{}
	}
	for _, h := range d.reports[pod.Node].Held { // it cannot be told another one than it runs with
		if h.UID == pod.UID && h.Interface == s.iface && h.Addr.Is4() == s.v4 && !d.taken[h.Addr] {
			return c, Plan{Reason: fmt.Sprintf("it runs with %s, which is not known to be its own", h.Addr),
				Addrs: []netip.Addr{h.Addr}}
		}
	}
	if c, ok := d.chooseGiven(s, false); ok {
		return c, Plan{}
	}
	if pod.Node != "" && pod.ReportedIP.IsValid() {
		return c, Plan{Reason: fmt.Sprintf("it runs with %s, which no pool assigned to it", pod.ReportedIP),
			Remedy: "take it over (kubectl stayput import spiderpool), or delete the pod", Addrs: []netip.Addr{pod.ReportedIP}}
	}
	own := d.own(s)
	for i, p := range own {
		if d.taken[p.Addr] {
			continue
		}
		switch f := d.Fence(p, d.now); {
		case !d.isFor(d.pools[p.Pool]) && !pod.takesAny():
			return c, Plan{Reason: "pool " + p.Pool + d.notHere()}
		case !d.isFor(d.pools[p.Pool]):
		case d.toldTo(p.Addr, p.PodUID): // the claim for that pod is forgotten: see Review
			if !pod.takesAny() {
				return c, Plan{Reason: fmt.Sprintf("its address %s was assigned to another pod, too", p.Addr),
					Addrs: []netip.Addr{p.Addr}}
			}
		case f.Verdict == Yes:
			return d.claim(s, p, f), Plan{}
		case pod.takesAny(): // never waits
		case i == len(own)-1:
			return c, Plan{Reason: fmt.Sprintf("its address %s is not free yet: %s", p.Addr, f.Reason), Remedy: f.Remedy,
				Addrs: []netip.Addr{p.Addr}}
		}
	}
	return d.allocate(s)
}

// chooseGiven finds an address of a slot that was given to the pod; if runs is true, only an address that the pod runs
// with.
func (d *placing) chooseGiven(s slot, runs bool) (c choice, ok bool) {
	pod := d.pod
	for _, a := range d.given[pod.UID] {
		p, running := d.ips[a], d.runsWith(a)
		usable := !p.Deleting && !p.Release || p.adopted() || running
		if runs && !running || !s.fits(p) || d.taken[a] || !usable {
			continue
		}
		c := choice{slot: s, ip: *p}
		if p.StatusUID != pod.UID { // claimed, and not told: the status is about an earlier pod
			c.last = p.Node
		}
		if p.adopted() { // who adopted it did not know how long it is kept
			c.last = pod.Node
			if p.Keep != pod.Keep || p.Workload != pod.Workload {
				c.ip.Keep, c.ip.Workload = pod.Keep, pod.Workload
				c.wr = UpdateIP{PodIP: c.ip}
			}
		}
		return c, true
	}
	return c, false
}

// runsWith reports whether a pod that has not been told of an address has it, as its node reports: it was told before
// the API server's data were restored.
func (d *placing) runsWith(a netip.Addr) bool {
	p, report := d.ips[a], d.reports[d.pod.Node]
	return p != nil && p.PodUID == d.pod.UID && p.boundOn(d.pod.Node) || d.pod.Node != "" && report.has(d.pod.UID, a)
}

// own returns the addresses of the pod's identity that can be the slot's, those of earlier pools first, and of a shared
// identity that which a pod of this name had last.
func (d *placing) own(s slot) (all []*PodIP) {
	pod := d.pod
	for _, a := range d.owned[ownerOf(pod.Namespace, pod.Name, pod.Identity)] {
		if p := d.ips[a]; s.fits(p) && p.PodUID != pod.UID && !p.Deleting && !p.Release && !p.unconfirmed() {
			all = append(all, p)
		}
	}
	rank := func(p *PodIP) int {
		r := 2 * s.rank(p.Pool)
		if p.PodName != pod.Name {
			r++
		}
		return r
	}
	slices.SortStableFunc(all, func(x, y *PodIP) int { return cmp.Compare(rank(x), rank(y)) })
	return all
}

// claim gives an address to the next pod of its identity.
func (d *placing) claim(s slot, p *PodIP, f Finding) choice {
	pod, again := d.pod, *p
	again.PodUID, again.PodName, again.Network, again.Interface = pod.UID, pod.Name, s.network, s.iface
	again.Keep, again.Workload, again.AdoptedOn = pod.Keep, pod.Workload, ""
	if p.Mode == Calico && !d.pools[p.Pool].Range.Subnet.Contains(p.Addr) { // its reservation may have been deleted
		f.If = append(f.If, Check{Free: p.Addr})
	}
	// It was last on p.Node also if a pod in between was given the address and never started.
	return choice{slot: s, ip: again, wr: UpdateIP{PodIP: again, If: f.If}, last: p.Node}
}

// allocate finds an address that is unassigned.
func (d *placing) allocate(s slot) (c choice, wait Plan) {
	pod := d.pod
	var why, full []string
	for _, st := range s.pools {
		text, waits := "", true
		switch {
		case st.Deleting:
			text, waits = "is being deleted", false
		case st.Disabled:
			text, waits = "is disabled", false
		case st.Serves != nil && !st.Serves(pod.Namespaced):
			text, waits = "is not available to namespace "+pod.Namespace, false
		case !d.isFor(st):
			text, waits = strings.TrimSpace(d.notHere()), false
		case st.left(d.now) == 0:
			text = st.empty()
		default:
			a, ok := st.next(func(a netip.Addr) bool { return d.taken[a] || d.toldTo(a, "") || len(d.runs[a]) > 0 })
			if ok {
				p := pod.made(Address{Network: s.network, Interface: s.iface, Pool: st.Name, Mode: st.Range.Mode,
					Prefix: netip.PrefixFrom(a, a.BitLen())})
				create := CreateIP{PodIP: p}
				if p.Mode == Calico {
					create.If = []Check{{Free: a}}
				}
				return choice{slot: s, ip: p, wr: create}, Plan{}
			}
			text = st.empty()
		}
		why = append(why, fmt.Sprintf("pool %s %s", st.Name, text))
		if waits {
			full = append(full, st.Name)
		}
	}
	d.full, wait.Reason = full, strings.Join(why, "; ")
	return c, wait
}

// isFor reports whether a pool is for the node that the pod has, if it has one.
func (d *placing) isFor(s *stock) bool { return d.node == nil || s.ForNode == nil || s.ForNode(d.node) }

func (d *placing) notHere() string {
	return fmt.Sprintf(" is not available on node %s, where the pod runs", d.pod.Node)
}

// empty says that a pool has no free address.
func (s *stock) empty() string { return fmt.Sprintf("has no free address, of %d", s.Range.Set.Count()) }

// toldTo reports whether a pod that may run was told to have an address, though according to the PodIP it is the
// owner's, or there is no PodIP: the claim for the pod was forgotten by a restore.
func (d *placing) toldTo(a netip.Addr, owner UID) bool {
	for uid := range d.told[a] {
		if pod := d.pods[uid]; uid != owner && !pod.Gated && !pod.Terminal {
			return true
		}
	}
	return false
}
