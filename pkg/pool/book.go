package pool

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Book is what a controller knows. It is filled from caches, and by what writes return.
//
// It is not safe for concurrent use: queries also mutate state. They take time by the addresses of a
// pod or identity, not by their number in the cluster, but for the few that say otherwise. What a Book returns may be
// read, not changed.
type Book struct{ waiting }

// endsMost is how many ends of pods are remembered. Without one, more nodes have to be asked.
const endsMost = 50_000

// NewBook begins a Book by the audit as it is past all caches. What is put in must have been listed later.
func NewBook(r Audit) *Book {
	return &Book{waiting{
		facts: facts{
			audit: r, pools: map[string]*stock{}, ips: map[netip.Addr]*PodIP{}, owned: map[Owner][]netip.Addr{},
			given: map[UID][]netip.Addr{}, byWorkload: index[WorkloadKey, netip.Addr]{}, conflicts: map[netip.Addr]struct{}{},
			pods: map[UID]*Pod{}, named: map[Owner]UID{}, told: index[netip.Addr, UID]{}, runs: index[netip.Addr, UID]{},
			unbound: map[UID]struct{}{}, ends: map[UID]End{}, nodes: map[string]Node{}, used: map[string]int{},
			reports: map[string]Report{}, held: map[UID][]string{}, allocations: map[netip.Addr]Allocation{},
			contacts: map[string]contact{},
		},
		lines:   lines{waiters: index[string, UID]{}, pools: map[UID][]string{}, stirred: map[string]bool{}},
		pending: map[Key]struct{}{}, waits: map[UID][]netip.Addr{}, on: index[netip.Addr, UID]{},
		takers: index[Owner, UID]{}, silent: map[netip.Addr]silence{},
	}}
}

// SetPool puts a pool in. It takes time by the number of PodIPs if the addresses of the pool have changed.
func (b *Book) SetPool(p Pool) {
	old := b.pools[p.Name]
	defer b.wake(KeyOfPool(p.Name))
	if old == nil || old.Revision != p.Revision || old.Deleting != p.Deleting || old.Unready != p.Unready ||
		(old.Invalid == nil) != (p.Invalid == nil) {
		defer b.wakeChanged()
	}
	if old != nil && slices.Equal(old.Range.Set.spans, p.Range.Set.spans) {
		old.Pool = p
		return
	}
	s := &stock{Pool: p, fresh: p.Range.Set.clone(), reserved: map[netip.Addr]time.Time{}, in: map[netip.Addr]bool{},
		out: map[netip.Addr]bool{}, withheld: map[netip.Addr]bool{}}
	if old != nil {
		s.last, s.lastAt = old.last, old.lastAt
	}
	b.pools[p.Name] = s
	for _, ip := range b.ips {
		s.take(ip)
	}
	for a, is := range b.allocations {
		if is.Handle != "" && b.ips[a] == nil {
			s.withhold(a)
		}
	}
	b.lines.stir(p.Name)
}

// RemovePool takes a pool out.
func (b *Book) RemovePool(name string) {
	delete(b.pools, name)
	b.wakeChanged()
}

// SetPodIP puts a PodIP in: from the cache, and what a write returned. The caller ensures that no older version
// of an object replaces a newer one.
func (b *Book) SetPodIP(p PodIP) {
	old := b.ips[p.Addr]
	if old != nil {
		b.unindex(old)
	}
	if old == nil || old.Version != p.Version {
		defer b.wakeMoved(&p)
	}
	if p.Workload != (Workload{}) {
		b.byWorkload.add(p.WorkloadKey(), p.Addr)
	}
	b.ips[p.Addr] = &p
	if p.Mode != Calico { // of which no agent knows
		b.used[p.Node]++
	}
	if p.conflicts() {
		b.conflicts[p.Addr] = struct{}{}
	}
	b.given[p.PodUID] = append(b.given[p.PodUID], p.Addr)
	owned := b.owned[p.owner()]
	if i, found := slices.BinarySearchFunc(owned, p.Addr, netip.Addr.Compare); !found {
		b.owned[p.owner()] = slices.Insert(owned, i, p.Addr)
	}
	if old == nil {
		for _, s := range b.pools {
			s.take(&p)
		}
	}
}

// RemovePodIP takes a PodIP out.
func (b *Book) RemovePodIP(a netip.Addr) {
	p := b.ips[a]
	if p == nil {
		return
	}
	b.unindex(p)
	delete(b.ips, a)
	delete(b.silent, a)
	delete(b.allocations, a)
	b.wakeMoved(p)
	for _, s := range b.pools {
		s.free(a)
	}
	b.stirPools(a)
}

// unindex forgets a PodIP everywhere but in ips.
func (b *Book) unindex(p *PodIP) {
	drop(b.given, p.PodUID, p.Addr)
	drop(b.owned, p.owner(), p.Addr)
	delete(b.conflicts, p.Addr)
	b.byWorkload.remove(p.WorkloadKey(), p.Addr)
	if p.Mode == Calico {
		return
	}
	if b.used[p.Node]--; b.used[p.Node] == 0 {
		delete(b.used, p.Node)
	}
}

// SetPod puts a pod in that asks for addresses of pools, has some, or was given some.
func (b *Book) SetPod(p Pod) {
	old := b.pods[p.UID]
	if old != nil {
		b.untell(old)
		if old.Identity != p.Identity { // it waits for addresses of another one
			b.StopWaiting(p.UID)
		}
		// Its DEL takes back what is noted. A pod that is being deleted has no other ADD.
		p.Noted = p.Noted || old.Noted && p.Ending
		p.foundEnding = old.foundEnding
	} else {
		p.foundEnding = p.Ending
	}
	b.pods[p.UID] = &p
	if delete(b.unbound, p.UID); p.isUnbound() {
		b.unbound[p.UID] = struct{}{}
	}
	name := Owner{Namespace: p.Namespace, Pod: p.Name}
	if other := b.pods[b.named[name]]; other == nil || !p.Created.Before(other.Created) {
		b.named[name] = p.UID
	}
	for _, a := range p.Assigned {
		b.told.add(a.Prefix.Addr(), p.UID)
	}
	if p.Assigned == nil && p.ReportedIP.IsValid() {
		b.runs.add(p.ReportedIP, p.UID)
	}
	if !p.changedSince(old) {
		return
	}
	if !p.Gated || p.Ending {
		b.StopWaiting(p.UID)
	}
	b.wake(p.Key())
	b.wakeBorne(&p)
}

// untell forgets what a pod was told, or runs with.
func (b *Book) untell(p *Pod) {
	forget := func(from index[netip.Addr, UID], a netip.Addr) {
		if from[a] == nil {
			return
		}
		if from.remove(a, p.UID); b.ips[a] == nil { // it is free now, perhaps
			b.stirPools(a)
		}
	}
	for _, a := range p.Assigned {
		forget(b.told, a.Prefix.Addr())
	}
	forget(b.runs, p.ReportedIP)
}

// DatePods notes a version of the cluster's pods that was read past the caches, and a time before that: a pod whose
// deletion is newer existed then. It matters to those with addresses of mode Calico: see [DateEvery].
func (b *Book) DatePods(version string, before time.Time) { b.dated = dated{version, before} }

// RemovePod takes out a pod that the cluster has no more. version is that of its deletion, empty if its watch was
// interrupted: then its last state need not be the one that was put in last.
func (b *Book) RemovePod(uid UID, version string, now time.Time) {
	p := b.pods[uid]
	if p == nil {
		return
	}
	b.untell(p)
	b.StopWaiting(uid)
	delete(b.pods, uid)
	for _, a := range b.given[uid] { // what was said of it before its end proves nothing
		delete(b.allocations, a)
	}
	if name := (Owner{Namespace: p.Namespace, Pod: p.Name}); b.named[name] == uid {
		delete(b.named, name)
	}
	delete(b.unbound, uid)
	b.wakeBorne(p)
	if len(b.ends) >= endsMost {
		oldest := slices.SortedFunc(maps.Keys(b.ends), func(x, y UID) int { return b.ends[x].At.Compare(b.ends[y].At) })
		for _, old := range oldest[:endsMost/2] {
			delete(b.ends, old)
		}
	}
	end := End{Node: p.Node, Final: version != "", Started: p.Terminal || p.Noted, FoundEnding: p.foundEnding,
		Predates: b.audit.predates(p), At: now}
	if end.Final && Newer(version, b.dated.version) {
		end.After = b.dated.before
	}
	b.ends[uid] = end
}

// SetNamespace puts the labels of a namespace in, for its pods that wait.
func (b *Book) SetNamespace(name string, labels map[string]string) {
	for uid := range b.waits {
		if p := b.pods[uid]; p.Namespace == name {
			again := *p
			again.Namespaced = labels
			b.pods[uid] = &again
			b.wake(p.Key())
		}
	}
}

// SetNode puts a node in, as the cache has it.
func (b *Book) SetNode(n Node) {
	old, known := b.nodes[n.Name]
	b.nodes[n.Name] = n
	if known && old == n {
		return
	}
	b.wakeSilent()
	b.wakePods(slices.Values(b.Barren(n.Name)))
}

// RemoveNode takes a node out.
func (b *Book) RemoveNode(name string) {
	delete(b.nodes, name)
	b.wakeSilent()
}

// SetReport puts the report of a node in, as the cache has it.
func (b *Book) SetReport(a Report) {
	old, known := b.reports[a.Node]
	b.forgetHeld(a.Node)
	b.reports[a.Node] = a
	b.wakeSilent()
	if !known || !maps.Equal(old.CannotServe, a.CannotServe) {
		b.wakePlaces()
	}
	for _, h := range a.Held {
		if !slices.Contains(b.held[h.UID], a.Node) {
			b.held[h.UID] = append(b.held[h.UID], a.Node)
		}
	}
}

// RemoveReport takes the report of a node out.
func (b *Book) RemoveReport(node string) {
	b.forgetHeld(node)
	if len(b.reports[node].CannotServe) > 0 {
		b.wakePlaces()
	}
	delete(b.reports, node)
}

// forgetHeld forgets which pods a node has said to have.
func (b *Book) forgetHeld(node string) {
	for _, h := range b.reports[node].Held {
		drop(b.held, h.UID, node)
	}
}
