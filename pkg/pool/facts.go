package pool

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// facts are what is known of the cluster, with its indexes. The Set and Remove methods of [Book] write them. All else
// only reads, but that a stock notes which addresses are reserved.
type facts struct {
	audit Audit
	stale bool

	pools      map[string]*stock
	ips        map[netip.Addr]*PodIP
	owned      map[Owner][]netip.Addr // sorted
	given      map[UID][]netip.Addr   // in the order in which they were put in
	byWorkload index[WorkloadKey, netip.Addr]
	conflicts  map[netip.Addr]struct{} // PodIPs whose address another machine has
	pods       map[UID]*Pod
	named      map[Owner]UID          // the newest pod of this name that exists
	told       index[netip.Addr, UID] // pods whose annotation has the address
	runs       index[netip.Addr, UID] // those that run with it and have no annotation
	unbound    map[UID]struct{}       // those that were placed and have no node yet
	ends       map[UID]End
	dated      dated
	nodes      map[string]Node
	used       map[string]int // how many PodIPs name a node
	reports    map[string]Report
	held       map[UID][]string // the nodes that say that they have the pod
	// allocations are what Calico's IPAM has said of addresses, contacts of what tells when nodes reached the API server.
	allocations map[netip.Addr]Allocation
	contacts    map[string]contact
}

// dated is a version of the cluster's pods, and a time before it was read.
type dated struct {
	version string
	before  time.Time
}

// Newer reports whether version a of an object, or of a list, is newer than b, if that can be told.
func Newer(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order > 0
}

// Pool returns what is known of a pool, nil if it is unknown.
func (f *facts) Pool(name string) *Pool {
	if s := f.pools[name]; s != nil {
		return &s.Pool
	}
	return nil
}

// PodIP returns what is known of an address, nil if it is unassigned.
func (f *facts) PodIP(a netip.Addr) *PodIP { return f.ips[a] }

// Given returns a PodIP of a pod, which may be unknown, nil if the pod has none.
func (f *facts) Given(uid UID) *PodIP {
	for _, a := range f.given[uid] {
		return f.ips[a]
	}
	return nil
}

// Addresses returns all addresses that [Book.Review] may have something to do with. It takes time by their number.
func (f *facts) Addresses() []netip.Addr {
	all := slices.AppendSeq(slices.Collect(maps.Keys(f.ips)), maps.Keys(f.told))
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// OfWorkload returns the addresses of the pods of a workload, sorted.
func (f *facts) OfWorkload(k WorkloadKey) []netip.Addr {
	return slices.SortedFunc(maps.Keys(f.byWorkload[k]), netip.Addr.Compare)
}

// About returns the addresses that a pod bears upon: its own, those it was told of, and those of its name or identity.
func (f *facts) About(p *Pod) []netip.Addr {
	all := slices.Concat(f.given[p.UID], f.owned[ownerOf(p.Namespace, p.Name, p.Identity)],
		f.owned[Owner{Namespace: p.Namespace, Pod: p.Name}])
	for _, h := range p.Assigned {
		all = append(all, h.Prefix.Addr())
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// Pod returns what is known of a pod, nil if it is unknown.
func (f *facts) Pod(uid UID) *Pod { return f.pods[uid] }

// Pods returns all pods, in no order.
func (f *facts) Pods() []UID { return slices.Collect(maps.Keys(f.pods)) }

// Barren returns the pods that were kept from a node, as it was lost, and have not got another one. The node is back:
// nothing can be taken back of what a pod requires, but its successor may go there.
func (f *facts) Barren(node string) (all []UID) {
	if n, exists := f.nodes[node]; !exists || !n.Ready || n.Off {
		return nil
	}
	for uid := range f.unbound {
		if slices.ContainsFunc(f.pods[uid].Assigned, func(h Address) bool { return h.Last == node }) {
			all = append(all, uid)
		}
	}
	return all
}

// Node reports whether there is a node.
func (f *facts) Node(name string) bool {
	_, there := f.nodes[name]
	return there
}

// Report returns the report of a node, the zero Report if there is none.
func (f *facts) Report(node string) Report { return f.reports[node] }

// holders returns the nodes that say that they have a pod, and whose word counts.
func (f *facts) holders(uid UID) (nodes []string) {
	for _, node := range f.held[uid] {
		if f.trusts(node, uid) {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// trusts reports whether it counts that a node says to have a pod. That a pod is elsewhere than by the cluster can be
// so only if a restore has made that forget its node. So of a pod that was made since the epoch, no other node's word
// counts: an agent may lie.
func (f *facts) trusts(node string, uid UID) bool {
	pod := f.pods[uid]
	return pod == nil || pod.Node == node || f.audit.predates(pod)
}

// hadAgent reports whether a node has ever answered, or had an address.
func (f *facts) hadAgent(node string) bool {
	_, answered := f.reports[node]
	return answered || f.used[node] > 0
}

// Audit returns the audit as it was put in last.
func (f *facts) Audit() Audit { return f.audit }

// Stale reports whether the API server has forgotten something since this Book was begun, or has been told it again: no
// further decision is made with it. Call Lead, then begin a new one with what the API server has now.
func (f *facts) Stale() bool { return f.stale }

// Unanswered returns the nodes whose report for the epoch is awaited, sorted. Those that are off, or can have no
// address, are not among them.
func (f *facts) Unanswered() (nodes []string) {
	if !f.audit.Recalling {
		return nil
	}
	for name, n := range f.nodes {
		if !(n.Foreign && !f.hadAgent(name)) && !n.off() && f.reports[name].Epoch < f.audit.Epoch {
			nodes = append(nodes, name)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// Settled reports whether an address waits for nothing that a node could say: its pod is there or known to be gone.
func (f *facts) Settled(a netip.Addr) bool {
	p := f.ips[a]
	if p == nil {
		return f.told[a] == nil
	}
	return p.gone() || f.pods[p.PodUID].alive()
}

// unproven reports whether the pod of an address is deleted and may still have it.
func (f *facts) unproven(a netip.Addr) bool {
	p := f.ips[a]
	return p != nil && f.pods[p.PodUID] == nil
}

// Conflicts returns how many addresses of PodIPs other machines answer for, so that their pods cannot start.
func (f *facts) Conflicts() int { return len(f.conflicts) }

// Count is how many addresses a pool has: status.addresses.
type Count struct{ Total, Used, Free, OutOfRange uint64 }

// Count counts the addresses of a pool.
func (f *facts) Count(pool string, now time.Time) Count {
	s := f.pools[pool]
	if s == nil {
		return Count{}
	}
	total, used := s.Range.Set.Count(), uint64(len(s.in))
	return Count{Total: total, Used: used, Free: s.left(now), OutOfRange: uint64(len(s.out))}
}

// index is a set of values for each key that has any.
type index[K, V comparable] map[K]map[V]struct{}

func (i index[K, V]) add(key K, value V) {
	if i[key] == nil {
		i[key] = map[V]struct{}{}
	}
	i[key][value] = struct{}{}
}

func (i index[K, V]) remove(key K, value V) {
	if delete(i[key], value); len(i[key]) == 0 {
		delete(i, key)
	}
}

// drop takes a value out of an index that keeps an order.
func drop[K, V comparable](index map[K][]V, key K, value V) {
	left := slices.DeleteFunc(index[key], func(v V) bool { return v == value })
	if index[key] = left; len(left) == 0 {
		delete(index, key)
	}
}
