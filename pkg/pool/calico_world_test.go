package pool

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"time"
)

// This file is Calico in the world of the model: its IPAM, which is an actor with objects in the API server, its CNI
// plugin, Felix, and the garbage collection of its controllers. What they do is what real Calico was seen to do; see
// docs/design.md. An agent's connection stands for Felix's, kubelet's for that of the CNI plugin.

// gcGrace is the leakGracePeriod of the garbage collection: shorter than anybody sets it.
const gcGrace = deletedBy + 5*time.Second

// calico is what the world knows besides the allocations, which the API server has.
type calico struct {
	leaks map[netip.Addr]leak
	freed int // allocations that a controller freed
	gced  int // that the garbage collection did, of nodes that exist
	// reserved are addresses that are reserved one by one, and since when; nil if ordinary pods get no addresses.
	reserved  map[netip.Addr]time.Time
	confirmed int // addresses that were imported, and known to be their pods'
	unblocked int // allocations that a controller freed of pods that exist
}

// leak is an allocation that the garbage collection takes for a leak.
type leak struct {
	handle string
	since  time.Time
}

// becomeCalico makes all pools those of Calico.
func (w *world) becomeCalico() {
	w.calico = &calico{leaks: map[netip.Addr]leak{}}
	w.blocks = map[netip.Addr]Allocation{}
	for _, name := range w.pools.keys() {
		is := w.pools.objs[name]
		is.Spec.Mode = Calico
		w.pools.put(name, is)
	}
	for _, name := range w.hosts.keys() {
		host := w.hosts.objs[name]
		host.Foreign, host.ReadySince = true, w.now.Add(-time.Hour)
		w.hosts.put(name, host)
	}
}

// Allocation is a live read of a block.
func (w *world) Allocation(_ context.Context, a netip.Addr) (Allocation, error) {
	is := w.blocks[a]
	is.At = w.Now()
	return is, nil
}

// observe is what a controller reads before it reviews an address.
func (w *world) observe(c *controller, a netip.Addr) {
	if w.calico != nil && c.book.ToObserve(a, w.Now()) {
		is, _ := w.Allocation(context.Background(), a)
		c.book.SetAllocation(a, is)
	}
}

// dates is a controller that reads the version of the cluster's pods, now and then.
func (w *world) dates(c *controller) {
	if w.calico != nil && w.some(30) {
		c.book.DatePods(strconv.Itoa(w.rev), w.Now())
	}
}

// scan is what a controller reads of all blocks of its pools.
func (w *world) scan(c *controller) {
	if w.calico == nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(c.book.pools)) {
		all := map[netip.Addr]Allocation{}
		for a := range w.blocks {
			if c.book.pools[name].Range.Subnet.Contains(a) {
				all[a], _ = w.Allocation(context.Background(), a)
			}
		}
		c.book.SetAllocations(name, all, w.Now())
	}
}

// becomeImporting has ordinary pods, with addresses that are scarce, and of which some are imported.
func (w *world) becomeImporting() {
	w.becomeCalico()
	w.adopts, w.calico.reserved = true, map[netip.Addr]time.Time{}
	w.workloads["old"] = &workload{name: "old", replicas: 2, ordinary: true,
		keep: Keep{WhileOwned: true, Scaled: true, Deleted: true}, wants: []Want{{"net", "eth0", []string{"a4", "b4"}}}}
	w.workloads["plain"] = &workload{name: "plain", replicas: 1, ordinary: true, loose: true}
}

// importDeeds are what befalls a cluster besides: pods are imported, and their workload asks for the pool, or no more.
var importDeeds = []deed{
	{10, func(w *world) { w.imports() }},
	{6, func(w *world) { w.now = w.now.Add(time.Minute) }},
	{4, func(w *world) {
		old := w.workloads["old"]
		old.ordinary = !old.ordinary
		w.logf("the template of old asks: %t", !old.ordinary)
	}},
}

// imports is a user who reads with which address a pod runs, and makes its PodIP, sooner or later.
func (w *world) imports() {
	p, ok := w.pods.objs[fmt.Sprintf("old-%d", w.r.IntN(3))]
	if !ok || p.Assigned != nil || !p.ReportedIP.IsValid() || p.Ending {
		return
	}
	w.logf("pod %s %s is read, which runs with %s", p.Name, p.UID, p.ReportedIP)
	ip := p.made(Address{Interface: "eth0", Pool: "a4", Mode: Calico, Prefix: netip.PrefixFrom(p.ReportedIP, 32)})
	ip.AdoptedOn, ip.Keep = p.Node, w.workloads["old"].keep
	create := func() { _ = w.apply("import", CreateIP{PodIP: ip}) }
	if w.inflight = append(w.inflight, create); w.some(60) {
		w.inflight = w.inflight[:len(w.inflight)-1]
		create()
	}
}

// reserves is a controller that reserves the addresses outside of pools, and asks about those that were imported.
func (w *world) reserves(c *controller) {
	if w.calico == nil || w.calico.reserved == nil || c.book == nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(c.book.pools)) {
		for _, a := range c.book.CalicoPool(name).Outside {
			if _, is := w.calico.reserved[a]; !is {
				w.logf("%s: %s is reserved", c.name, a)
				w.calico.reserved[a] = w.now
			}
		}
		for _, a := range c.book.CalicoPool(name).Unconfirmed {
			if since, is := w.calico.reserved[a]; is && w.now.Sub(since) >= addWithin {
				said, _ := w.Allocation(context.Background(), a)
				said.Reserved = true
				c.book.SetAllocation(a, said)
			}
		}
	}
	for a := range w.calico.reserved {
		if _, is := w.ips.objs[a.String()]; c.book.PodIP(a) == nil && !is {
			delete(w.calico.reserved, a)
		}
	}
}

// contacts is what a controller reads of Leases.
func (w *world) contacts(c *controller, nodes []string) {
	for _, n := range w.nodes {
		if slices.Contains(nodes, n.name) && !n.renewed.IsZero() {
			c.book.SetContact(n.name, n.renewed, w.Now())
		}
	}
}

func (w *world) allocate(a netip.Addr, n *node, p Pod, handle string) {
	w.blocks[a] = Allocation{Handle: handle, Namespace: p.Namespace, Pod: p.Name, Node: n.name, Version: w.version()}
}

// handleOf is the handle of a pod's sandbox: each has another one.
func (w *world) handleOf(uid UID) string {
	w.n++
	return fmt.Sprintf("%s.%d", uid, w.n)
}

// reading is an ADD of Calico's plugin that has read a pod, and which addresses are reserved.
type reading struct {
	pod, is  Pod
	reserved map[netip.Addr]time.Time
	at       time.Time
}

// calicoAdds is an ADD of Calico's plugin. It reads the pod by its name, as the API server has it, and asks for the
// addresses of that pod. If an earlier ADD has noted addresses on the pod, the plugin releases these first, whichever
// pod has them.
func (w *world) calicoAdds(n *node, p Pod) {
	is, exists := w.pods.objs[p.Name]
	if !n.kubelet || !exists {
		return
	}
	if w.takesLong(is) && w.some(40) {
		w.logf("%s: an ADD of %s %s begins", n.name, p.Name, p.UID)
		n.adds = append(n.adds, reading{p, is, maps.Clone(w.calico.reserved), w.now})
		return
	}
	w.calicoAllocates(n, p, is, w.calico.reserved)
}

// takesLong reports whether an ADD of a pod may take its time. Left out is that a sandbox crashes and its pod is
// deleted by force before a controller hears of either: then the PodIP still says that the pod has the address.
func (w *world) takesLong(p Pod) bool {
	return !w.calm && !p.Noted && !slices.ContainsFunc(p.Assigned, func(a Address) bool {
		is := w.ips.objs[a.Prefix.Addr().String()]
		return is.PodUID == p.UID && is.boundOn(is.Node)
	})
}

// calicoGoesOn is an ADD that goes on, for as long as one can.
func (w *world) calicoGoesOn(n *node) {
	for _, add := range n.adds {
		late := w.calico.reserved != nil && w.now.Sub(add.at) >= addWithin
		if n.on && n.kubelet && n.sandboxes[add.pod.UID] == nil && !late {
			w.calicoAllocates(n, add.pod, add.is, add.reserved)
		}
	}
	n.adds = nil
}

// noting is an ADD of Calico's plugin that has allocated addresses and has yet to note the sandbox on its pod.
type noting struct {
	pod, is Pod
	handle  string
	at      time.Time
}

// calicoNotes is what becomes of ADDs that have allocated addresses: each notes its sandbox, and the pod answers, or it
// fails, as the API server is away. Then its DEL may come later, or never.
func (w *world) calicoNotes(n *node) {
	all := n.notes
	n.notes = nil
	for _, add := range all {
		now, exists := w.pods.objs[add.pod.Name]
		switch late := w.now.Sub(add.at) >= addGivenUp; {
		case !n.on:
		case !late && !w.calm && (!n.kubelet || w.some(30)):
			n.notes = append(n.notes, add)
		case late || !n.kubelet || w.some(40) || !exists || now.UID != add.pod.UID || n.sandboxes[add.pod.UID] != nil:
			w.logf("%s: the ADD %s fails", n.name, add.handle)
			if w.some(40) {
				n.dels = append(n.dels, add.handle)
			}
		default:
			w.calicoStarts(n, add.pod, add.is, add.handle)
		}
	}
}

// ordinary is an address for a pod that asks for none: one of few that is free and was not reserved.
func (w *world) ordinary(reserved map[netip.Addr]time.Time) []Address {
	from := w.r.IntN(3)
	for i := range 3 {
		a := netip.AddrFrom4([4]byte{10, 8, 0, byte(1 + (from+i)%3)})
		if _, ours := reserved[a]; !ours && w.blocks[a].Handle == "" {
			return []Address{{Interface: "eth0", Mode: Calico, Prefix: netip.PrefixFrom(a, 32)}}
		}
	}
	return nil
}

// isCollected notes that Calico gives away an address at which an ordinary pod may still answer: that is its own doing.
func (w *world) isCollected(a netip.Addr) {
	for _, n := range w.nodes {
		for uid, s := range n.sandboxes {
			if len(s.has) > 0 && s.has[0].Prefix.Addr() == a && !w.placed[placement{a, uid}] {
				s.collected = true
			}
		}
	}
}

// calicoAllocates is the rest of an ADD, for a pod as it was read, with the reservations that were.
func (w *world) calicoAllocates(n *node, p, is Pod, reserved map[netip.Addr]time.Time) {
	if is.UID != p.UID && w.told[is.UID] { // kubelet does not know yet that a backup has an earlier pod in its place
		w.told[p.UID] = true
	}
	if is.Assigned == nil && w.calico.reserved != nil {
		if is.Assigned = w.ordinary(reserved); is.Assigned == nil {
			return // it is tried again
		}
		w.isCollected(is.Assigned[0].Prefix.Addr())
	} else if is.Assigned == nil { // an ordinary address
		n.sandboxes[p.UID] = &sandbox{uid: p.UID}
		n.owners[p.UID] = p
		return
	} else if is.Node == n.name && is.Noted {
		for _, a := range is.Assigned {
			if held := w.blocks[a.Prefix.Addr()]; held.Handle != "" {
				w.logf("%s: ADD of %s %s releases %s, which %s has", n.name, p.Name, p.UID, a.Prefix.Addr(), held.Handle)
				delete(w.blocks, a.Prefix.Addr())
			}
		}
	}
	for _, a := range is.Assigned {
		if held := w.blocks[a.Prefix.Addr()]; held.Handle != "" {
			w.logf("%s: ADD of %s %s fails: %s has %s", n.name, p.Name, p.UID, held.Handle, a.Prefix.Addr())
			return
		}
	}
	handle := w.handleOf(p.UID)
	for _, a := range is.Assigned {
		w.allocate(a.Prefix.Addr(), n, p, handle)
	}
	if w.takesLong(is) && w.some(15) {
		w.logf("%s: the ADD %s of %s %s has %v", n.name, handle, p.Name, p.UID, is.Assigned[0].Prefix.Addr())
		n.notes = append(n.notes, noting{p, is, handle, w.now})
		return
	}
	w.calicoStarts(n, p, is, handle)
}

// calicoStarts is the end of an ADD: the sandbox is noted on its pod, which answers.
func (w *world) calicoStarts(n *node, p, is Pod, handle string) {
	for uid, other := range n.sandboxes { // of one name there is one interface
		if uid != p.UID && n.owners[uid].Name == p.Name {
			other.up = false
		}
	}
	n.sandboxes[p.UID] = &sandbox{uid: p.UID, has: is.Assigned, handle: handle, up: is.Node == n.name}
	n.owners[p.UID] = p
	w.logf("%s: sandbox of %s %s starts with %v", n.name, p.Name, p.UID, is.Assigned[0].Prefix.Addr())
	if now, exists := w.pods.objs[p.Name]; exists && now.UID == p.UID && now.Node == n.name {
		now.ReportedIP, now.Sandboxless, now.Noted = is.Assigned[0].Prefix.Addr(), false, true
		now.Version = w.version()
		w.pods.put(p.Name, now)
	}
}

// kubeletReports is kubelet that reports the address of a pod that runs, and that one has no sandbox: after a restore
// the cluster may say something else. It goes on reporting the address of an earlier sandbox, unless it restarts:
// getPodIPs in pkg/kubelet/pleg/generic.go.
func (w *world) kubeletReports(n *node, p *Pod) {
	if w.calico == nil || !p.alive() {
		return
	}
	s, is := n.sandboxes[p.UID], *p
	switch {
	case s == nil || s.ending:
		if is.Sandboxless = is.ReportedIP.IsValid(); w.some(20) {
			is.ReportedIP, is.Sandboxless = netip.Addr{}, false
		}
	case len(s.has) > 0 && reflect.DeepEqual(s.has, p.Assigned):
		is.ReportedIP, is.Sandboxless = s.has[0].Prefix.Addr(), false
	}
	if is.ReportedIP != p.ReportedIP || is.Sandboxless != p.Sandboxless {
		is.Version = w.version()
		w.pods.put(p.Name, is)
		*p = is
	}
}

// calicoDelBegins is how the DEL of a sandbox begins: it takes back what the ADD has noted, before the interface goes
// and the address is released.
func (w *world) calicoDelBegins(uid UID) bool {
	for _, key := range w.pods.keys() {
		if is := w.pods.objs[key]; is.UID == uid && is.Noted {
			w.logf("DEL of %s %s takes its address back", is.Name, uid)
			is.Noted, is.Version = false, w.version()
			w.pods.put(key, is)
			return true
		}
	}
	return false
}

// calicoDels is the DEL of a sandbox that has ended, which releases by its handle. Without the API server it fails, and
// comes later.
func (w *world) calicoDels(n *node, uid UID) {
	if w.calico == nil {
		return
	}
	if s := n.sandboxes[uid]; s != nil && s.handle != "" {
		w.calicoDelBegins(uid)
		n.dels = append(n.dels, s.handle)
	}
	w.lateDels(n)
}

// lateDels are the DELs that a node owes.
func (w *world) lateDels(n *node) {
	if !n.on || !n.kubelet || !(w.calm || w.some(70)) {
		return
	}
	for _, handle := range n.dels {
		for _, a := range slices.SortedFunc(maps.Keys(w.blocks), netip.Addr.Compare) {
			if w.blocks[a].Handle == handle {
				w.logf("%s: DEL of %s frees %s", n.name, handle, a)
				delete(w.blocks, a)
			}
		}
		maps.DeleteFunc(n.sandboxes, func(_ UID, s *sandbox) bool { return s.ending && s.handle == handle })
	}
	n.dels = nil
}

// felixActs is Felix, which has a pod answer while the API server has it on the node with this address, and no longer.
func (w *world) felixActs(n *node) {
	for _, uid := range slices.Sorted(maps.Keys(n.sandboxes)) {
		s := n.sandboxes[uid]
		is, exists := w.pods.objs[n.owners[uid].Name]
		up := exists && is.UID == uid && is.Node == n.name && !is.Terminal && len(s.has) > 0 &&
			is.ReportedIP == s.has[0].Prefix.Addr()
		if s.up && !up {
			w.logf("%s: Felix cuts %s off", n.name, uid)
		}
		s.up = up
	}
}

// renews is kubelet that renews its Lease. By then Felix knows what kubelet could know, or kubelet itself has ended
// what the cluster has no more: that a node is in contact whose Felix is dead for good, and whose kubelet ends nothing,
// is not excused by Calico either.
func (w *world) renews(n *node) {
	if !n.on || !n.kubelet {
		return
	}
	if !n.agent {
		for uid := range n.sandboxes {
			if w.nodeOf(uid) != n.name { // it is gone, or a restore has taken its node back
				return
			}
		}
	} else {
		w.felixActs(n)
	}
	n.renewed = w.now
}

// collects is a look of the garbage collection of Calico's controllers: allocationIsValid and checkAllocations of
// kube-controllers/pkg/controllers/node/ipam.go.
func (w *world) collects() {
	for _, a := range slices.SortedFunc(maps.Keys(w.blocks), netip.Addr.Compare) {
		is := w.blocks[a]
		pod, exists := w.pods.objs[is.Pod]
		_, host := w.hosts.objs[is.Node]
		valid := exists && (pod.Node == "" || !host || pod.Node == is.Node) &&
			(!pod.ReportedIP.IsValid() || pod.has(a) || pod.Assigned == nil && pod.ReportedIP == a)
		if valid {
			delete(w.calico.leaks, a)
			continue
		}
		known, seen := w.calico.leaks[a]
		if !seen || known.handle != is.Handle {
			known = leak{is.Handle, w.now}
			w.calico.leaks[a] = known
		}
		if host && w.now.Sub(known.since) < gcGrace {
			continue
		}
		w.logf("Calico collects %s, which %s had on %s", a, is.Handle, is.Node)
		delete(w.blocks, a)
		delete(w.calico.leaks, a)
		if host {
			w.calico.gced++
		}
	}
}

// homonym reports whether an ordinary pod of the name of another one, which has ended, has no address on its node.
func (w *world) homonym(p PodIP) bool {
	pod, exists := w.pods.objs[p.PodName]
	return exists && pod.UID != p.PodUID && !pod.Gated && pod.Assigned == nil && !pod.ReportedIP.IsValid() &&
		pod.Node == w.blocks[p.Addr].Node && pod.Node != ""
}

// blocked reports whether a pod cannot start because of an allocation that is not of its name and node: that of an ADD
// which was under way during a restore, for a pod that has not been placed since.
func (w *world) blocked(p Pod) bool {
	return w.calico != nil && !p.ReportedIP.IsValid() && w.restores > 0 &&
		slices.ContainsFunc(p.Assigned, func(a Address) bool {
			is := w.blocks[a.Prefix.Addr()]
			return is.Handle != "" && (is.Pod != p.Name || is.Node != p.Node)
		})
}
