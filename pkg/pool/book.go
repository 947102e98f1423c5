package pool

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Book is what a controller knows. It is filled from caches, and by what writes return; then it answers.
//
// It is not safe for concurrent use: also its questions note things down. Their answers take time by the addresses of a
// pod or identity, not by their number in the cluster, but for the few that say otherwise. What a Book returns may be
// read, not changed.
type Book struct {
	roll  Roll
	stale bool

	pools   map[string]*stock
	ips     map[netip.Addr]*PodIP
	owned   map[Owner][]netip.Addr // sorted
	given   map[UID][]netip.Addr
	pods    map[UID]*Pod
	named   map[Owner]UID               // the newest pod of this name that exists
	told    map[netip.Addr]map[UID]bool // pods whose annotation has the address
	runs    map[netip.Addr]map[UID]bool // those that run with it and have no annotation
	nodes   map[string]Node
	answers map[string]Answer
	held    map[UID][]string // the nodes that say that they have the pod
	used    map[string]int   // how many PodIPs name a node
	ends    map[UID]End
	lines   lines
	// disputed are the addresses in quarantine, and those that another machine has.
	disputed   map[netip.Addr]bool
	byWorkload map[WorkloadKey]map[netip.Addr]struct{}
	wakes      wakes
}

// endsMost is how many ends of pods are remembered. Without one, more nodes have to be asked.
const endsMost = 50_000

// stock is a pool and what is free of it.
type stock struct {
	Pool
	fresh Set // never used, as far as is known
	// freed are addresses that were in use and no longer are, the longest free first.
	freed []netip.Addr
	// last is the address that was taken last: allocation goes on behind it.
	last   netip.Addr
	lastAt time.Time
	// reserved are addresses for which a write is under way.
	reserved map[netip.Addr]time.Time
	in, out  map[netip.Addr]bool // of its PodIPs: those in range, and those that are not
}

// freedMost is how many freed addresses of a pool are told from those that were never used.
const freedMost = 10_000

// reservedFor is longer than a write can be under way.
const reservedFor = time.Minute

// NewBook begins a Book by the roll as it is past all caches. What is put in must have been listed later.
func NewBook(r Roll) *Book {
	return &Book{
		roll: r, pools: map[string]*stock{}, ips: map[netip.Addr]*PodIP{}, owned: map[Owner][]netip.Addr{},
		given: map[UID][]netip.Addr{}, pods: map[UID]*Pod{}, named: map[Owner]UID{},
		told: map[netip.Addr]map[UID]bool{}, runs: map[netip.Addr]map[UID]bool{}, nodes: map[string]Node{},
		answers: map[string]Answer{},
		held:    map[UID][]string{}, used: map[string]int{}, ends: map[UID]End{}, lines: newLines(),
		disputed: map[netip.Addr]bool{}, byWorkload: map[WorkloadKey]map[netip.Addr]struct{}{}, wakes: newWakes(),
	}
}

// SetPool puts a pool in. It takes time by the number of PodIPs if the addresses of the pool have changed.
func (b *Book) SetPool(p Pool) {
	s := b.pools[p.Name]
	defer b.wakes.wake(KeyOfPool(p.Name))
	if s == nil || s.Revision != p.Revision || s.Deleting != p.Deleting || (s.Invalid == nil) != (p.Invalid == nil) {
		defer b.wakeChanged(p.Name)
	}
	if s != nil && slices.Equal(s.Range.Set.spans, p.Range.Set.spans) {
		s.Pool = p
		return
	}
	s = &stock{Pool: p, fresh: p.Range.Set.clone(), reserved: map[netip.Addr]time.Time{}, in: map[netip.Addr]bool{},
		out: map[netip.Addr]bool{}}
	if was := b.pools[p.Name]; was != nil {
		s.last, s.lastAt = was.last, was.lastAt
	}
	b.pools[p.Name] = s
	for _, ip := range b.ips {
		s.take(ip)
	}
	b.lines.stir(p.Name)
}

// wakeChanged wakes what a pool bears upon: pods, its addresses if it is being deleted, and pools that it overlaps.
func (b *Book) wakeChanged(name string) {
	b.wakePlaces()
	b.wakePools()
	if s := b.pools[name]; s.Deleting {
		for _, in := range []map[netip.Addr]bool{s.in, s.out} {
			for a := range in {
				b.wakes.wake(KeyOfAddress(a))
			}
		}
	}
}

// RemovePool takes a pool out.
func (b *Book) RemovePool(name string) {
	delete(b.pools, name)
	b.wakePlaces()
	b.wakePools()
}

// take notes that an address is in use.
func (s *stock) take(p *PodIP) {
	if p.Pool == s.Name {
		if s.Range.Set.Contains(p.Addr) {
			s.in[p.Addr] = true
		} else {
			s.out[p.Addr] = true
		}
		if p.Created.After(s.lastAt) {
			s.last, s.lastAt = p.Addr, p.Created
		}
	}
	delete(s.reserved, p.Addr)
	if !s.fresh.remove(p.Addr) {
		if i := slices.Index(s.freed, p.Addr); i >= 0 {
			s.freed = slices.Delete(s.freed, i, i+1)
		}
	}
}

// free notes that an address is unassigned.
func (s *stock) free(a netip.Addr) {
	delete(s.in, a)
	delete(s.out, a)
	if !s.Range.Set.Contains(a) {
		return
	}
	if s.freed = append(s.freed, a); len(s.freed) > freedMost {
		s.fresh.add(s.freed[0])
		s.freed = slices.Delete(s.freed, 0, 1)
	}
}

// left returns how many addresses can be given.
func (s *stock) left(now time.Time) uint64 {
	for a, at := range s.reserved {
		if now.Sub(at) > reservedFor {
			delete(s.reserved, a)
		}
	}
	free := s.fresh.Count() + uint64(len(s.freed))
	return free - min(free, uint64(len(s.reserved)))
}

// next returns the address to give next: an address that was never used, the longest free one otherwise.
func (s *stock) next(not func(netip.Addr) bool) (netip.Addr, bool) {
	skip := func(a netip.Addr) bool {
		_, reserved := s.reserved[a]
		return reserved || not(a)
	}
	for a, first := s.fresh.Next(s.last), (netip.Addr{}); a.IsValid() && a != first; a = s.fresh.Next(a) {
		if !skip(a) {
			return a, true
		}
		if !first.IsValid() {
			first = a
		}
	}
	for _, a := range s.freed {
		if !skip(a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// SetPodIP puts a PodIP in: from the cache, and what a write returned. The caller ensures that no older version
// of an object replaces a newer one.
func (b *Book) SetPodIP(p PodIP) {
	was := b.ips[p.Addr]
	if was != nil {
		if was.machine() != p.machine() { // it may be what keeps the pool from new allocations
			b.lines.stir(p.Pool)
		}
		b.unindex(was)
	}
	if was == nil || was.Version != p.Version {
		defer b.wakeMoved(&p)
	}
	if was != nil && was.Conflict != "" && p.Conflict == "" {
		defer b.wakeDisputed(p.Pool)
	}
	if p.Workload != (Workload{}) {
		addTo(b.byWorkload, p.WorkloadKey(), p.Addr)
	}
	b.ips[p.Addr] = &p
	b.used[p.Node]++
	if p.Quarantine.Reason != "" || p.machine() != "" {
		b.disputed[p.Addr] = true
	}
	b.given[p.PodUID] = append(b.given[p.PodUID], p.Addr)
	owned := b.owned[p.owner()]
	if i, found := slices.BinarySearchFunc(owned, p.Addr, netip.Addr.Compare); !found {
		b.owned[p.owner()] = slices.Insert(owned, i, p.Addr)
	}
	if was == nil {
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
	delete(b.wakes.silent, a)
	if p.Conflict != "" {
		b.wakeDisputed(p.Pool)
	}
	b.wakeMoved(p)
	for _, s := range b.pools {
		s.free(a)
	}
	b.stirPools(a)
}

// stirPools notes that an address may be free.
func (b *Book) stirPools(a netip.Addr) {
	for name, s := range b.pools {
		if s.Range.Set.Contains(a) {
			b.lines.stir(name)
		}
	}
}

// unindex forgets a PodIP everywhere but in ips.
func (b *Book) unindex(p *PodIP) {
	drop(b.given, p.PodUID, p.Addr)
	drop(b.owned, p.owner(), p.Addr)
	delete(b.disputed, p.Addr)
	removeFrom(b.byWorkload, p.WorkloadKey(), p.Addr)
	if b.used[p.Node]--; b.used[p.Node] == 0 {
		delete(b.used, p.Node)
	}
}

// drop takes one of what an index has of a key out of it.
func drop[K, V comparable](of map[K][]V, key K, one V) {
	left := slices.DeleteFunc(of[key], func(o V) bool { return o == one })
	if of[key] = left; len(left) == 0 {
		delete(of, key)
	}
}

// PodIP returns what is known of an address, nil if it is unassigned.
func (b *Book) PodIP(a netip.Addr) *PodIP { return b.ips[a] }

// Pool returns what is known of a pool, nil if it is unknown.
func (b *Book) Pool(name string) *Pool {
	if s := b.pools[name]; s != nil {
		return &s.Pool
	}
	return nil
}

// Pod returns what is known of a pod, nil if it is unknown.
func (b *Book) Pod(uid UID) *Pod { return b.pods[uid] }

// Given returns a PodIP of a pod, which may be unknown, nil if the pod has none.
func (b *Book) Given(uid UID) *PodIP {
	for _, a := range b.given[uid] {
		return b.ips[a]
	}
	return nil
}

// Pods returns all pods, in no order.
func (b *Book) Pods() []UID { return slices.Collect(maps.Keys(b.pods)) }

// Roll returns the roll as it was put in last.
func (b *Book) Roll() Roll { return b.roll }

// About returns the addresses that a pod bears upon: its own, those it was told of, and those of its name or identity.
func (b *Book) About(p *Pod) []netip.Addr {
	all := slices.Concat(b.given[p.UID], b.owned[ownerOf(p.Namespace, p.Name, p.Identity)],
		b.owned[Owner{Namespace: p.Namespace, Pod: p.Name}])
	for _, h := range p.Has {
		all = append(all, h.Prefix.Addr())
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// SetPod puts a pod in that asks for addresses of pools, has some, or was given some.
func (b *Book) SetPod(p Pod) {
	was := b.pods[p.UID]
	if was != nil {
		b.untell(was)
		if was.Identity != p.Identity { // it waits for addresses of another one
			b.StopWaiting(p.UID)
		}
	}
	b.pods[p.UID] = &p
	if delete(b.wakes.unbound, p.UID); p.isUnbound() {
		b.wakes.unbound[p.UID] = struct{}{}
	}
	name := Owner{Namespace: p.Namespace, Pod: p.Name}
	if other := b.pods[b.named[name]]; other == nil || !p.Created.Before(other.Created) {
		b.named[name] = p.UID
	}
	note := func(in map[netip.Addr]map[UID]bool, a netip.Addr) {
		if in[a] == nil {
			in[a] = map[UID]bool{}
		}
		in[a][p.UID] = true
	}
	for _, a := range p.Has {
		note(b.told, a.Prefix.Addr())
	}
	if p.Has == nil && p.Runs.IsValid() {
		note(b.runs, p.Runs)
	}
	if !p.changedSince(was) {
		return
	}
	if !p.Gated || p.Ending {
		b.StopWaiting(p.UID)
	}
	b.wakePod(p.UID)
	b.wakeBorne(&p)
}

// untell forgets what a pod was told, or runs with.
func (b *Book) untell(p *Pod) {
	forget := func(from map[netip.Addr]map[UID]bool, a netip.Addr) {
		if from[a] == nil {
			return
		}
		if delete(from[a], p.UID); len(from[a]) == 0 {
			delete(from, a)
		}
		if b.ips[a] == nil { // it is free now, perhaps
			b.stirPools(a)
		}
	}
	for _, a := range p.Has {
		forget(b.told, a.Prefix.Addr())
	}
	forget(b.runs, p.Runs)
}

// RemovePod takes out a pod that the cluster has no more. final says that its last state is the state that was put in
// last.
func (b *Book) RemovePod(uid UID, final bool, now time.Time) {
	p := b.pods[uid]
	if p == nil {
		return
	}
	b.untell(p)
	b.StopWaiting(uid)
	delete(b.pods, uid)
	if name := (Owner{Namespace: p.Namespace, Pod: p.Name}); b.named[name] == uid {
		delete(b.named, name)
	}
	delete(b.wakes.unbound, uid)
	b.wakeBorne(p)
	if len(b.ends) >= endsMost {
		oldest := slices.SortedFunc(maps.Keys(b.ends), func(x, y UID) int { return b.ends[x].At.Compare(b.ends[y].At) })
		for _, old := range oldest[:endsMost/2] {
			delete(b.ends, old)
		}
	}
	b.ends[uid] = End{Node: p.Node, Final: final, At: now}
}

// SetNode puts a node in, as the cache has it.
func (b *Book) SetNode(n Node) {
	was, known := b.nodes[n.Name]
	b.nodes[n.Name] = n
	if known && was == n {
		return
	}
	b.wakeSilent()
	for _, uid := range b.Barren(n.Name) {
		b.wakePod(uid)
	}
}

// Node reports whether there is a node.
func (b *Book) Node(name string) bool {
	_, there := b.nodes[name]
	return there
}

// RemoveNode takes a node out.
func (b *Book) RemoveNode(name string) {
	delete(b.nodes, name)
	b.wakeSilent()
}

// SetAnswer puts the answer of a node in, as the cache has it.
func (b *Book) SetAnswer(a Answer) {
	was, known := b.answers[a.Node]
	b.RemoveAnswer(a.Node)
	b.answers[a.Node] = a
	b.wakeSilent()
	if !known || was.CannotRoute != a.CannotRoute {
		b.wakePlaces()
	}
	for _, h := range a.Held {
		if !slices.Contains(b.held[h.UID], a.Node) {
			b.held[h.UID] = append(b.held[h.UID], a.Node)
		}
	}
}

// Answer returns the answer of a node, the zero Answer if there is none.
func (b *Book) Answer(node string) Answer { return b.answers[node] }

// heeds reports whether it counts that a node says to have a pod. That a pod is elsewhere than by the cluster can be so
// only if a restore has made that forget its node. So of a pod that was made since all nodes were asked, no other
// node's word counts: an agent may lie.
func (b *Book) heeds(node string, uid UID) bool {
	pod := b.pods[uid]
	return pod == nil || pod.Node == node || b.predates(pod)
}

// predates reports whether a pod may have been made before all nodes were asked.
func (b *Book) predates(pod *Pod) bool {
	return pod.Created.Before(time.Unix(0, b.roll.Epoch).Add(Skew))
}

// holders returns the nodes that say that they have a pod, and whose word counts.
func (b *Book) holders(uid UID) (nodes []string) {
	for _, node := range b.held[uid] {
		if b.heeds(node, uid) {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// RemoveAnswer takes the answer of a node out.
func (b *Book) RemoveAnswer(node string) {
	for _, h := range b.answers[node].Held {
		drop(b.held, h.UID, node)
	}
	if b.answers[node].CannotRoute != "" {
		b.wakePlaces()
	}
	delete(b.answers, node)
}

// Fence returns what the fence says of an address.
func (b *Book) Fence(p *PodIP, now time.Time) Finding {
	return Fence(b.situation(p, now))
}

func (b *Book) situation(p *PodIP, now time.Time) Situation {
	s := Situation{
		Now: now, IP: p, Pod: b.pods[p.PodUID], Nodes: b.nodes, Answers: b.answers, Asked: b.roll.Asked[p.PodUID],
		Held: b.holders(p.PodUID), Agent: b.hadAgent,
	}
	if end, ok := b.ends[p.PodUID]; ok {
		s.End = &end
	}
	return s
}

// hadAgent reports whether a node has ever answered, or had an address.
func (b *Book) hadAgent(node string) bool {
	_, answered := b.answers[node]
	return answered || b.used[node] > 0
}

// Count is how many addresses a pool has: status.addresses.
type Count struct{ Total, Used, Free, OutOfRange uint64 }

// Count counts the addresses of a pool.
func (b *Book) Count(pool string, now time.Time) Count {
	s := b.pools[pool]
	if s == nil {
		return Count{}
	}
	total, used := s.Range.Set.Count(), uint64(len(s.in))
	return Count{Total: total, Used: used, Free: s.left(now), OutOfRange: uint64(len(s.out))}
}
