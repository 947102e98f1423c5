package pool

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// This file is the fence of addresses of mode Calico. No agent speaks of them: Calico's IPAM says who has an address,
// its Felix cuts a pod off that the cluster has no more, and the controller writes the status.
//
// Three things of Calico shape the rules; docs/design.md has where each was seen. Its garbage collection frees an
// address though the pod answers at it, on a node that is cut off; so a free address proves nothing of such a node. It
// frees no address while a pod of the same name has no address yet, not even on a node that is deleted; so such an
// address is freed here. And a pod whose sandbox is made again releases its addresses without a look at who has them;
// so none changes hands while its pod exists, whatever that pod's phase.

// Allocation is what Calico's IPAM says of an address, read past all caches.
type Allocation struct {
	// Handle names the allocation, empty if the address is free. The others but Reserved, At and Since are
	// empty then.
	Handle string
	// Namespace and Pod are those that it was made for, and Node where; empty if it was not made for a pod.
	Namespace, Pod, Node string
	// Version is that of the block which says so.
	Version string
	// Reserved says that when it was read the address had been reserved for so long that no other pod could get it.
	Reserved bool
	// At is when it was read, Since from when on it has been read to be the same: the Book notes that.
	At, Since time.Time
}

func (a Allocation) same(b Allocation) bool {
	return a.Handle == b.Handle && a.Namespace == b.Namespace && a.Pod == b.Pod && a.Node == b.Node
}

// isOf reports whether the allocation was made for the pod that a PodIP was given to, or one of the same name.
func (a Allocation) isOf(p *PodIP) bool { return a.Namespace == p.Namespace && a.Pod == p.PodName }

// contact is what is known of when a node reached the API server: the time that its Lease says, by the clock of the
// node, and when it was read. A node was in contact after a time if its Lease has changed between two reads, the first
// of them after that time.
type contact struct {
	renewed, read time.Time
	// since is when the Lease was read before it had changed, zero if it has not.
	since time.Time
}

// SetAllocation puts in what Calico's IPAM says of an address.
func (b *Book) SetAllocation(a netip.Addr, is Allocation) {
	was, known := b.allocations[a]
	if is.Since = is.At; known && was.same(is) {
		is.Since = was.Since
	}
	b.allocations[a] = is
	if b.ips[a] != nil {
		if known && !was.same(is) {
			b.wakeAddress(a)
		}
		return
	}
	for _, s := range b.pools {
		if is.Handle != "" {
			s.withhold(a)
		} else {
			s.restore(a)
		}
	}
	if is.Handle == "" {
		delete(b.allocations, a)
		if was.Handle != "" {
			b.stirPools(a)
		}
	}
}

// SetAllocations puts in who has addresses of a pool by Calico's IPAM, as all of its blocks said at a time. What all
// does not have is free.
func (b *Book) SetAllocations(pool string, all map[netip.Addr]Allocation, at time.Time) {
	for _, a := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
		b.SetAllocation(a, all[a])
	}
	s := b.pools[pool]
	if s == nil {
		return
	}
	for _, known := range []map[netip.Addr]bool{s.withheld, s.in} {
		for _, a := range slices.SortedFunc(maps.Keys(known), netip.Addr.Compare) {
			if _, taken := all[a]; !taken && b.allocations[a].Handle != "" {
				b.SetAllocation(a, Allocation{At: at})
			}
		}
	}
}

// CalicoPool is what is special about the addresses of a pool of mode Calico, each list sorted.
type CalicoPool struct {
	// Strangers are the addresses of its subnet that pods without a PodIP have.
	Strangers []netip.Addr
	// Outside are those that are not in its subnet: its pods had them before.
	Outside []netip.Addr
	// Unconfirmed are those that were imported, and of which Calico's IPAM has yet to say that their pods have them.
	Unconfirmed []netip.Addr
}

// CalicoPool returns that of a pool, the zero CalicoPool if the pool is unknown, or of another mode. It takes time by
// the number of the pool's PodIPs.
func (f *facts) CalicoPool(name string) (c CalicoPool) {
	s := f.pools[name]
	if s == nil || s.Range.Mode != Calico {
		return c
	}
	c.Strangers = slices.SortedFunc(maps.Keys(s.withheld), netip.Addr.Compare)
	for _, known := range []map[netip.Addr]bool{s.in, s.out} {
		for a := range known {
			if !s.Range.Subnet.Contains(a) {
				c.Outside = append(c.Outside, a)
			}
			if f.ips[a].unconfirmed() {
				c.Unconfirmed = append(c.Unconfirmed, a)
			}
		}
	}
	slices.SortFunc(c.Outside, netip.Addr.Compare)
	slices.SortFunc(c.Unconfirmed, netip.Addr.Compare)
	return c
}

// SetContact puts in when the Lease of a node was renewed, by the node's clock, as it was read now.
func (b *Book) SetContact(node string, renewed, now time.Time) {
	was, known := b.contacts[node]
	is := contact{renewed: renewed, read: now, since: was.since}
	if known && !was.renewed.Equal(renewed) {
		is.since = was.read
	}
	b.contacts[node] = is
}

// ToObserve reports whether Calico's IPAM is to be asked about an address before it is reviewed.
func (f *facts) ToObserve(a netip.Addr, now time.Time) bool {
	p := f.ips[a]
	if p == nil || p.Mode != Calico || p.unconfirmed() {
		return false
	}
	if pod := f.pods[p.PodUID]; pod != nil {
		return pod.starting() && !now.Before(pod.Created.Add(startsWithin))
	}
	return !p.gone() && !f.ends[p.PodUID].freed(a) || f.allocations[a].Handle != ""
}

// starting reports whether a pod has a node, and neither kubelet nor Calico's plugin reports that its sandbox has the
// address. Kubelet does only once it has the images.
func (p *Pod) starting() bool {
	return p.alive() && p.Node != "" && !p.Noted && (!p.ReportedIP.IsValid() || p.Sandboxless)
}

// startsWithin is how long a pod takes to start as a rule: Calico's IPAM is not asked about it earlier.
const startsWithin = time.Minute

// addGivenUp is how long an ADD that has allocated an address may still be under way. What it has to do then takes at
// most 90 s: it waits for the API server. containerd ends it with kubelet's request, after twice runtimeRequestTimeout,
// which is two minutes by default; CRI-O after up to nine minutes (networkStart in server/sandbox_network.go).
const addGivenUp = 10 * time.Minute

// observedGood is how long what Calico's IPAM has said is good for a decision.
const observedGood = 10 * time.Second

// deletedBy is how long after a pod's end its address can only have been freed by the DEL of its own node: no garbage
// collection of Calico's runs so soon. A grace period shorter than this makes Calico itself unsafe. It is counted from
// when the pod is known to have existed, since its end may be heard of late.
const deletedBy = 20 * time.Second

// DateEvery is how often the version of the cluster's pods is to be read while pods with addresses of mode Calico are
// being deleted: of one that takes longer to end than deletedBy, too, it is then known how long ago it existed.
const DateEvery = deletedBy / 4

// addWithin is how long an ADD may be under way that has read its pod before that was deleted: it waits for the
// plugin's lock, then up to 90 s for the API server. If it allocates the address once that is another pod's, and its
// node is cut off then, Calico's garbage collection frees the address of a pod that answers.
const addWithin = 2 * time.Minute

// felixGrace is how long a node must have been Ready until its Felix surely knows which pods it has: longer than that
// needs to reach the API server again.
const felixGrace = time.Minute

// stuckAfter is how long a node that is Ready may take to free an address before people are told.
const stuckAfter = 30 * time.Second

// abandonedAfter is how long a node that is Ready, and in contact, may keep the address of a pod that is gone: then its
// Felix has cut the pod off, and nothing will free the address. After a restore the allocations of the backup are back,
// and Calico's own garbage collection frees none while a pod of the same name waits for it.
const abandonedAfter = 2 * time.Minute

// contactEvery is how often a Lease is read that has to change: more often than kubelets renew theirs.
const contactEvery = 3 * time.Second

// contacted reports whether a node has reached the API server since a time.
func (s Situation) contacted(node string, since time.Time) bool {
	is := s.Contacts[node]
	return !is.since.IsZero() && !is.since.Before(since)
}

// fenceCalico is [Fence] for an address of mode Calico.
func fenceCalico(s Situation) Finding {
	p, name := s.IP, s.IP.Namespace+"/"+s.IP.PodName
	gone := p.gone() || s.Pod == nil && s.End != nil && s.End.freed(p.Addr)
	switch {
	case gone && s.Allocation != nil && s.Allocation.Handle != "" && !s.Allocation.isOf(p):
		return s.taken()
	case gone:
		return Finding{Reason: fmt.Sprintf("pod %s is gone", name)}
	case s.Pod != nil:
		return Finding{Verdict: Wait, Reason: fmt.Sprintf("pod %s still exists", name)}
	}
	a := s.Allocation
	if a == nil || s.Now.Sub(a.At) > observedGood {
		return Finding{Verdict: Wait, Reason: "Calico's IPAM has not been asked yet"}
	}
	node, known := s.known()
	if node == "" && !known {
		node = p.saidOn()
	}
	switch {
	case a.Handle != "" && !a.isOf(p):
		return s.taken()
	case a.Handle != "" && (known || node != "" || !s.namesake()):
		f := fenceAllocated(s, name)
		if f.Frees { // a later pod of the name, which was not gated, may have it
			f.If = append(f.If, Check{Away: &Pod{Namespace: p.Namespace, Name: p.PodName, Node: a.Node,
				ReportedIP: p.Addr}})
		}
		return f
	case node != "":
		return fenceFreed(s, name, node)
	case known && p.saidOn() == "":
		return Finding{Reason: fmt.Sprintf("pod %s never had a node", name), If: s.podGone()}
	}
	f := everyoneInContact(s.Nodes, s.Now, fmt.Sprintf("the node of pod %s is unknown", name), func(node string) bool {
		return s.Nodes[node].settled(s.Now) && s.contacted(node, a.Since.Add(addWithin))
	})
	switch {
	case f.Verdict == Yes && a.Handle != "":
		f.If = append(f.If, append(s.podGone(), Check{There: s.Holder})...)
		f.Reason = fmt.Sprintf("every node has been in contact since a later pod %s has its address", name)
	case f.Verdict == Yes:
		f.If = append(f.If, append(s.podGone(), Check{Free: p.Addr})...)
		f.Reason = fmt.Sprintf("every node has been in contact since the address of pod %s is free", name)
	}
	return f
}

// namesake reports whether the allocation is that of another pod of the name, which exists and was told of the address.
func (s Situation) namesake() bool {
	h := s.Holder
	return h.alive() && h.UID != s.IP.PodUID && h.Node == s.Allocation.Node && !h.Gated && h.has(s.IP.Addr)
}

// taken is for an address that another pod has by Calico's IPAM. If that pod has no node, its allocation is that of an
// earlier pod of its name, or comes from a backup. Calico frees none while such a pod waits.
func (s Situation) taken() Finding {
	if s.Holder.alive() && s.Holder.Node == "" {
		f := fenceAllocated(s, s.Allocation.Namespace+"/"+s.Allocation.Pod)
		if f.Frees {
			f.If = append(f.If, Check{There: s.Holder})
		}
		return f
	}
	return Finding{Verdict: Never, Reason: fmt.Sprintf("by Calico's IPAM %s has it", s.Allocation),
		Remedy: s.Allocation.remedy(), Until: s.Now.Add(stuckAfter)}
}

// ended returns when the pod of an address was seen to end, zero if it was not.
func (s Situation) ended() time.Time {
	if s.End == nil {
		return time.Time{}
	}
	return s.End.At
}

// started reports whether no ADD of the pod of an address is under way, as it had started and its sandbox was not being
// made again when it was seen last.
func (s Situation) started() bool {
	if s.End == nil || s.End.FoundEnding { // an earlier controller has written it
		return s.IP.boundOn(s.IP.Node)
	}
	return s.End.Started
}

// everyoneInContact is [everyone] for what the Leases of nodes tell. Each node counts, since every one can have
// addresses of Calico's.
func everyoneInContact(nodes map[string]Node, now time.Time, why string, contacted func(node string) bool) Finding {
	all := maps.Clone(nodes)
	for name, n := range all {
		n.Foreign = false
		all[name] = n
	}
	f := everyone(all, why, muteFor{}, contacted)
	if f.Verdict == Wait {
		f.Contact, f.Until = slices.Sorted(maps.Keys(nodes)), now.Add(contactEvery)
		f.Reason = strings.Replace(f.Reason, "has not answered", "has not been in contact", 1)
	}
	return f
}

// settled reports whether a node is Ready, and has been for so long that its Felix knows which pods it has.
func (n Node) settled(now time.Time) bool { return n.Ready && now.Sub(n.ReadySince) >= felixGrace }

// fenceAllocated is for an address that Calico's IPAM still has for the pod.
func fenceAllocated(s Situation, name string) Finding {
	a := s.Allocation
	n, exists := s.Nodes[a.Node]
	switch {
	case !exists:
		return Finding{Verdict: Wait, Frees: true, Reason: fmt.Sprintf("node %s is deleted, and its allocation is not yet",
			a.Node), If: append(s.podGone(), s.off(a.Node)...)}
	case n.off():
		return Finding{Verdict: Wait, Frees: true, Reason: fmt.Sprintf(
			"node %s is out of service, and its allocation has not been freed yet", a.Node),
			If: append(s.podGone(), s.off(a.Node)...)}
	case !n.Ready:
		return Finding{Verdict: Never, Remedy: offRemedy,
			Reason: fmt.Sprintf("pod %s may still run on node %s, which is not Ready", name, a.Node)}
	}
	f := Finding{Verdict: Wait, Reason: fmt.Sprintf("node %s has not freed the address of pod %s yet", a.Node, name)}
	waited := s.Now.Sub(a.Since)
	if end := s.ended(); !end.IsZero() {
		waited = max(waited, s.Now.Sub(end))
	}
	switch f.Until = s.Now.Add(min(max(waited, 500*time.Millisecond), stuckAfter)); {
	case s.Now.Sub(a.Since) >= abandonedAfter && n.settled(s.Now) && s.contacted(a.Node, a.Since):
		f.Frees, f.If = true, s.podGone()
	case waited >= stuckAfter:
		f.Contact = []string{a.Node}
		f.Remedy = fmt.Sprintf("see why the runtime of node %s does not remove the pod's sandbox: its log, and kubelet's",
			a.Node)
	}
	return f
}

// fenceFreed is for an address that is free by Calico's IPAM, and whose pod was on this node.
func fenceFreed(s Situation, name, node string) Finding {
	a := s.Allocation
	n, exists := s.Nodes[node]
	switch {
	case !exists, n.off():
		return offFinding(node, exists, append(s.podGone(), s.off(node)...))
	case !n.Ready:
		return Finding{Verdict: Never, Remedy: offRemedy, Reason: fmt.Sprintf("Calico may have freed the address of pod %s, "+
			"which may still run on node %s, which is not Ready", name, node)}
	case s.started() && s.deletedSoon() && n.ReadySince.Before(s.End.After):
		return Finding{Reason: fmt.Sprintf("node %s has freed the address of pod %s", node, name)}
	}
	since := a.Since
	if !s.started() {
		if since = since.Add(addWithin); s.Now.Before(since) {
			return Finding{Verdict: Wait, Until: since, Reason: fmt.Sprintf(
				"pod %s was deleted while it was being started, and node %s may be about to give it the address", name, node)}
		}
	}
	if n.settled(s.Now) && s.contacted(node, since) {
		return Finding{Reason: fmt.Sprintf("node %s is in contact, and the address of pod %s is free", node, name),
			If: append(s.podGone(), Check{Free: s.IP.Addr})}
	}
	return Finding{Verdict: Wait, Contact: []string{node}, Until: s.Now.Add(contactEvery), Reason: fmt.Sprintf(
		"the address of pod %s is free, and node %s has to be in contact until that counts", name, node)}
}

// deletedSoon reports whether the address was free so soon after the pod existed that its node must have freed it.
func (s Situation) deletedSoon() bool {
	return s.End != nil && !s.End.Predates && !s.End.After.IsZero() && s.Allocation.Since.Sub(s.End.After) < deletedBy
}

// takeoverWithin is how long a pod is waited for that takes over the address of one that has ended: then the end itself
// need not be written.
const takeoverWithin = time.Second

// noteFreed notes that the node of a pod that has ended has freed its address, and wakes the pods that wait for that.
// It is true for good, but could not be proven again if the node were lost.
func (b *Book) noteFreed(p *PodIP, now time.Time) {
	end, seen := b.ends[p.PodUID]
	if p.Mode != Calico || p.gone() || !seen || end.freed(p.Addr) {
		return
	}
	if f := b.Fence(p, now); f.Verdict == Yes && f.If == nil {
		end.Freed = append(slices.Clip(end.Freed), p.Addr)
		b.ends[p.PodUID] = end
		b.wakePods(maps.Keys(b.on[p.Addr]))
	}
}

// String says who has the address, for people.
func (a Allocation) String() string {
	if a.Pod == "" {
		return "handle " + a.Handle
	}
	return fmt.Sprintf("pod %s/%s", a.Namespace, a.Pod)
}

func (a Allocation) remedy() string {
	if a.Pod == "" {
		return "release it: calicoctl ipam release --ip"
	}
	return fmt.Sprintf("delete %s, or see what gave it the address", a)
}

// calicoSlot returns the first slot that is of mode Calico, nil if none is.
func calicoSlot(slots []slot) *slot {
	for i := range slots {
		if slots[i].pools[0].Range.Mode == Calico {
			return &slots[i]
		}
	}
	return nil
}

// unfit says why a pod cannot have the addresses that it asks for, as far as that is because of Calico; empty if it
// can.
func (d *placing) unfit(slots []slot) (reason, remedy string) {
	s := calicoSlot(slots)
	if s == nil {
		return "", ""
	}
	for _, other := range slots {
		for _, p := range other.pools {
			if other.iface == s.iface && p.Range.Mode != Calico {
				return fmt.Sprintf("pool %s of mode Calico cannot be asked for together with pool %s of mode %s for one interface",
					s.pools[0].Name, p.Name, p.Range.Mode), "name pools of one mode"
			}
		}
	}
	switch {
	case s.iface != DefaultInterface:
		return fmt.Sprintf("pool %s is of mode Calico, whose addresses are those of interface %s, not of %s", s.pools[0].Name,
			DefaultInterface, s.iface), "name the pool without @" + s.iface
	case !d.pod.Gated:
		return fmt.Sprintf("pool %s is of mode Calico, and the pod was not gated: it has started without the address",
			s.pools[0].Name), "delete the pod; pods of DaemonSets and with spec.nodeName cannot have such addresses"
	}
	return "", ""
}

// reached reports whether every node has been in contact since this Book was begun, if there are pools of mode Calico:
// no agent answers for their addresses, but kubelet and Felix end what the cluster has forgotten.
func (d recall) reached(why string) Finding {
	if !slices.ContainsFunc(slices.Collect(maps.Values(d.pools)), func(s *stock) bool { return s.Range.Mode == Calico }) {
		return Finding{}
	}
	return everyoneInContact(d.nodes, d.now, why, func(node string) bool { return !d.contacts[node].since.IsZero() })
}
