package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// world is a cluster in memory: an API server, two controllers that both believe to lead, and nodes with kubelet, agent
// and sandboxes. The controllers and agents run this package; all else is what Kubernetes does, on its bad days.
type world struct {
	t   testing.TB
	r   *rand.Rand
	now time.Time
	n   int // for names
	// foreign has machines on the link that are no pod's, by the addresses that they have taken, nil if there never are
	// any.
	foreign   map[netip.Addr]bool
	conflicts int     // pods that were ended because of one
	calico    *calico // the pools are of mode Calico, nil if they are not

	api
	restored    bool
	inflight    []func()  // writes that were given up and still come
	sent        time.Time // when the write at hand was decided, zero if just now
	backup      *api
	backupAt    time.Time
	controllers []*controller
	nodes       []*node
	workloads   map[string]*workload
	// told are pods that had addresses by the backup from which the API server was restored. Kubelet starts them without
	// asking anybody. lost are pods that ran and were not in the backup, or not their addresses.
	told, lost map[UID]bool
	placed     map[placement]bool // which pods were told of which addresses
	bound      map[UID]string     // the node that each pod was bound to, also in a future that was lost
	ended      map[UID]bool       // by the status that this node wrote, also in a future that was lost
	log        []func() string
	bad        string // what the oracle found
	scratch    []answering
	calm       bool // nothing breaks any more
	places     int  // pods that got their addresses
	hands      int  // addresses that changed hands
	adopts     bool // pods that another program has started are adopted
	adopted    int
	routed     bool          // the pools are of mode Routed
	early      int           // pods that nodes routed to before they started
	slow       bool          // a sandbox is there before its ADD, and an ADD takes time
	hasty      int           // restores that took seconds
	wiped      int           // state directories that were emptied under pods, and of which the agent noticed that
	refused    int           // pods that were barred, or not vouched for, when their sandboxes had been created
	unnoticed  int64         // since a hasty restore: the Term that the controllers must leave, 0 if there is none
	clocks     bool          // those of controllers differ and jump
	ahead      time.Duration // the most by which one was plainly ahead
	skew       time.Duration // of the clock of the controller that acts
	// liar is a node whose agent lies, until everything is healed, nil if all are honest.
	liar  *node
	lies  int
	epoch int64  // the highest that there ever was
	lied  string // the node that had a liar
	// unseen are pods of which the liar's word was taken, since the controller did not know which node they had.
	unseen map[UID]bool
	known  int // addresses that a backup gave to a pod, and the cluster it replaced to another one
}

// api is what the API server stores.
type api struct {
	restores int // how often it was restored
	rev      int
	ips      store[PodIP]
	pods     store[Pod]
	pools    store[modelPool]
	hosts    store[Node]
	said     store[Report]
	audit    Audit
	blocks   map[netip.Addr]Allocation // of Calico's IPAM
}

// store has the objects of a kind, and what has happened to them.
type store[T any] struct {
	objs   map[string]T
	sorted []string // their keys; never changed in place
	log    []happening[T]
}

type happening[T any] struct {
	key    string
	obj    *T   // nil: deleted
	relist bool // a watch ends here
	// version is that of the deletion of a pod.
	version string
}

func (s *store[T]) put(key string, o T) {
	if s.objs == nil {
		s.objs = map[string]T{}
	}
	s.objs[key] = o
	if i, found := slices.BinarySearch(s.sorted, key); !found {
		s.sorted = slices.Concat(s.sorted[:i], []string{key}, s.sorted[i:])
	}
	s.log = append(s.log, happening[T]{key: key, obj: &o})
}

func (s *store[T]) del(key string) {
	delete(s.objs, key)
	if i, found := slices.BinarySearch(s.sorted, key); found {
		s.sorted = slices.Concat(s.sorted[:i], s.sorted[i+1:])
	}
	s.log = append(s.log, happening[T]{key: key})
}

// delPod deletes a pod's object.
func (w *world) delPod(key string) {
	if w.pods.del(key); w.calico != nil {
		w.pods.log[len(w.pods.log)-1].version = w.version()
	}
}

func (s *store[T]) keys() []string { return s.sorted }

// back restores the objects of a backup.
func (s *store[T]) back(from store[T]) {
	s.objs, s.sorted = maps.Clone(from.objs), from.sorted
	s.log = append(s.log, happening[T]{relist: true})
}

type modelPool struct {
	Spec     Spec
	Version  string
	Disabled bool
	Deleting bool
	Held     bool
	Only     string // the only namespace that it serves
}

type workload struct {
	name     string
	replicas int // of a StatefulSet
	gone     bool
	identity string
	keep     Keep
	wants    []Want
	loose    bool // its pods have no stable names
	fresh    bool
	ordinary bool      // its pods do not ask for addresses
	scaled   time.Time // last
}

// node is a machine.
type node struct {
	name    string
	on      bool
	kubelet bool // reaches the API server
	agent   bool // runs and reaches the API server
	data    bool
	// lied: by the word of an operator it is off, and it is not. Until that is taken back, and its agent has seen to it,
	// its pods are not held against anybody, but for those of which its agent has heard that the cluster deleted them.
	lied  bool
	heard map[UID]bool

	view      map[UID]Pod // of kubelet
	sandboxes map[UID]*sandbox
	owners    map[UID]Pod
	grants    map[UID][]Address // gone with a boot
	ended     map[UID]bool      // what the agent has ended since it runs
	// audit is the PodIPAudit as the agent has it, newest the newest that it has seen since it runs.
	audit, newest Audit
	// orphan: the node's report is that of an earlier Node, and is about to be deleted with it.
	orphan bool
	// starting are sandboxes that were created for a pod as kubelet saw it then, before their ADD.
	starting map[UID]Pod

	renewed time.Time // the Lease
	dels    []string  // the handles of sandboxes that have ended, and whose DEL Calico has not had
	adds    []reading // ADDs under way
	notes   []noting  // those of them that have allocated addresses

	found map[UID]netip.Addr // what somebody else has

	sees  map[UID]Pod // the agent's watch
	known map[UID]bool
}

type sandbox struct {
	uid UID
	has []Address
	up  bool
	// pending: the node's book has the addresses, and the interface is not there yet.
	pending  bool
	unbooked bool   // the node's book has lost it
	handle   string // of Calico's IPAM
	ending   bool   // the DEL of one of Calico's has begun, and its pod has not ended
	// collected: Calico has given its address, an ordinary one, to another pod, while it answers on.
	collected bool
}

// controller is one that believes to lead.
type controller struct {
	name string
	// clock is how far its clock is ahead.
	clock time.Duration
	book  *Book
	at    [5]int // of each log
	// stuck are watches that bring nothing for a while.
	stuck [5]bool
	jobs  []*job
	// due are the pods that were woken and not placed since, by name.
	due map[string]bool
}

// job is a plan under way.
type job struct {
	what   string
	pod    string // the name of the pod that it is for, empty if it is for none
	writes []Write
	at     time.Time // when it was decided
}

var errConflict = errors.New("conflict")

func newWorld(t testing.TB, r *rand.Rand, broken rules) *world {
	brokenRules = broken
	w := &world{t: t, r: r, now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), told: map[UID]bool{},
		lost: map[UID]bool{}, placed: map[placement]bool{}, bound: map[UID]string{}, ended: map[UID]bool{},
		unseen:    map[UID]bool{},
		workloads: map[string]*workload{}}
	w.rev = 1
	w.pools.put("a4", modelPool{Version: "1", Spec: Spec{Mode: L2, Subnet: "10.6.0.0/16",
		Addresses: []string{"10.6.0.1-10.6.0.4"}}})
	w.pools.put("b4", modelPool{Version: "1", Spec: Spec{Mode: L2, Subnet: "10.7.0.0/16",
		Addresses: []string{"10.7.0.1-10.7.0.2"}}})
	w.pools.put("c6", modelPool{Version: "1", Spec: Spec{Mode: L2, Subnet: "fd00::/64",
		Addresses: []string{"fd00::1-fd00::4"}}})
	for i := range 2 + r.IntN(2) {
		n := &node{name: fmt.Sprintf("n%d", i+1), on: true, kubelet: true, agent: true, data: true,
			view: map[UID]Pod{}, sandboxes: map[UID]*sandbox{}, grants: map[UID][]Address{}, owners: map[UID]Pod{},
			ended: map[UID]bool{}, found: map[UID]netip.Addr{}, sees: map[UID]Pod{}, known: map[UID]bool{},
			starting: map[UID]Pod{}}
		w.nodes = append(w.nodes, n)
		w.hosts.put(n.name, Node{Name: n.name, Ready: true})
	}
	owned := Keep{WhileOwned: true, Scaled: true, Deleted: true}
	v4, dual := []Want{{"net", "eth0", []string{"a4", "b4"}}}, []Want{{"net", "eth0", []string{"a4", "c6"}}}
	w.workloads["web"] = &workload{name: "web", replicas: 2, keep: owned, wants: v4}
	w.workloads["db"] = &workload{name: "db", replicas: 1, keep: Keep{For: 5 * time.Minute}, wants: dual,
		fresh: r.IntN(4) == 0}
	w.workloads["job"] = &workload{name: "job", replicas: 1, wants: v4, loose: true}
	w.workloads["api"] = &workload{name: "api", replicas: 1 + r.IntN(2), identity: "api", keep: Keep{For: time.Hour},
		wants: []Want{{"net", "eth0", []string{"b4", "c6"}}}, loose: true}
	for _, name := range []string{"c1", "c2"} {
		w.controllers = append(w.controllers, &controller{name: name})
	}
	return w
}

func (w *world) mode() Mode {
	switch {
	case w.routed:
		return Routed
	case w.calico != nil:
		return Calico
	}
	return L2
}

func (w *world) logf(format string, args ...any) {
	at := w.now
	w.log = append(w.log, func() string {
		return at.Format("15:04:05 ") + fmt.Sprintf(format, args...)
	})
}

func (w *world) failf(format string, args ...any) {
	if w.bad == "" {
		w.bad = fmt.Sprintf(format, args...)
		w.logf("VIOLATION: %s", w.bad)
	}
}

func (w *world) story() string {
	var s strings.Builder
	for _, line := range w.log {
		s.WriteString(line() + "\n")
	}
	return s.String()
}

func (w *world) some(percent int) bool { return w.r.IntN(100) < percent }

func (w *world) version() string {
	w.rev++
	return strconv.Itoa(w.rev)
}

// Live, past all caches.

func (w *world) Pod(_ context.Context, _, name string) (*Pod, error) {
	if p, ok := w.pods.objs[name]; ok {
		return &p, nil
	}
	return nil, nil
}

func (w *world) Node(_ context.Context, name string) (*Node, error) {
	if n, ok := w.hosts.objs[name]; ok {
		return &n, nil
	}
	return nil, nil
}

func (w *world) PodIP(_ context.Context, a netip.Addr) (*PodIP, error) {
	if p, ok := w.ips.objs[a.String()]; ok {
		return &p, nil
	}
	return nil, nil
}

func (w *world) Nodes(context.Context) ([]string, error) { return w.hosts.keys(), nil }
func (w *world) Audit(context.Context) (Audit, error)    { return w.audit, nil }
func (w *world) Now() time.Time                          { return w.now.Add(w.skew) }

// apply carries out a write as an API server does.
func (w *world) apply(by string, wr Write) error {
	err := w.applied(wr)
	w.logf("%s: %s -> %v", by, describe(wr), err)
	return err
}

// agentStatus is the status of a PodIP that an agent writes.
type agentStatus struct {
	StatusIP
	node string
}

var errForbidden = errors.New("forbidden")

func (w *world) applied(wr Write) error {
	if said, ok := wr.(agentStatus); ok { // the policy of agents
		is := w.ips.objs[said.PodIP.Addr.String()]
		if is.StatusUID == is.PodUID && is.Node != "" && is.Node != said.node || said.PodIP.StatusUID != is.PodUID {
			return errForbidden
		}
		wr = said.StatusIP
	}
	current := func(p PodIP) (PodIP, error) {
		is, ok := w.ips.objs[p.Addr.String()]
		if !ok || is.UID != p.UID || is.Version != p.Version && !broken(versionsMatter) {
			return is, errConflict
		}
		return is, nil
	}
	switch wr := wr.(type) {
	case CreateIP:
		if _, exists := w.ips.objs[wr.PodIP.Addr.String()]; exists {
			return errConflict
		}
		p := wr.PodIP
		p.Version, p.Created = w.version(), w.now
		p.UID = "ip-" + p.Version
		w.ips.put(p.Addr.String(), p)
	case UpdateIP:
		is, err := current(wr.PodIP)
		if err != nil {
			return err
		}
		p := wr.PodIP
		p.Phase, p.StatusUID, p.Node, p.Since, p.Deleting = is.Phase, is.StatusUID, is.Node, is.Since, is.Deleting
		p.Conflict, p.PodCIDR = is.Conflict, is.PodCIDR
		p.Version = w.version()
		if p.PodUID != is.PodUID {
			w.hands++
		}
		if p.Deleting && !p.Held {
			w.ips.del(p.Addr.String())
			return nil
		}
		w.ips.put(p.Addr.String(), p)
	case StatusIP:
		is, err := current(wr.PodIP)
		if err != nil {
			return err
		}
		is.Phase, is.StatusUID, is.Node, is.Since = wr.PodIP.Phase, wr.PodIP.StatusUID, wr.PodIP.Node, wr.PodIP.Since
		if is.PodCIDR = wr.PodIP.PodCIDR; is.Phase == Bound && is.PodCIDR.IsValid() && !w.runs(is.PodUID) {
			w.early++
		}
		if is.Conflict = wr.PodIP.Conflict; is.Conflict != "" {
			w.conflicts++
		}
		is.Version = w.version()
		w.ips.put(is.Addr.String(), is)
		if is.adopted() && is.Mode == Calico && is.Phase == Bound { // from now on it is promised
			w.placed[placement{is.Addr, is.PodUID}] = true
			w.calico.confirmed++
		}
		if is.gone() && is.Node == w.bound[is.PodUID] {
			w.ended[is.PodUID] = true
		}
	case DeleteIP:
		is, err := current(wr.PodIP)
		if err != nil {
			return err
		}
		w.mayEnd(is)
		w.deleteIP(is)
	case PlacePod:
		is, ok := w.pods.objs[wr.Name]
		if !ok || is.UID != wr.UID || is.Version != wr.Version && !broken(versionsMatter) {
			return errConflict
		}
		is.Assigned, is.Gated, is.Version = wr.Addresses, false, w.version()
		w.pods.put(wr.Name, is)
		w.places++
		for _, a := range wr.Addresses {
			w.placed[placement{a.Prefix.Addr(), wr.UID}] = true
		}
	case EndPod:
		is, ok := w.pods.objs[wr.Name]
		if !ok || is.UID != wr.UID {
			return errConflict
		}
		// After a restore a pod may be known without the node that it was bound to, or its end: what was decided before is
		// right.
		if w.liar != nil && !w.told[is.UID] && !w.ended[is.UID] && is.Node != w.liar.name && w.bound[is.UID] != w.liar.name &&
			is.Created.After(time.Unix(0, w.epoch).Add(2*Skew)) {
			w.failf("pod %s %s is ended, on node %q, and no node but %s can have said anything of it", is.Name, is.UID, is.Node,
				w.liar.name)
		}
		w.deletePod(is)
	case FreeAllocation:
		is := w.blocks[wr.Addr]
		if is.Handle != wr.Allocation.Handle || is.Version != wr.Allocation.Version && !broken(versionsMatter) {
			return errConflict
		}
		delete(w.blocks, wr.Addr)
		w.calico.freed++
		if len(wr.If) > 0 && wr.If[0].Starting != nil {
			w.calico.unblocked++
		}
	case HoldPool:
		is, ok := w.pools.objs[wr.Name]
		if !ok || is.Version != wr.Version {
			return errConflict
		}
		is.Held, is.Version = wr.Held, w.version()
		if is.Deleting && !is.Held {
			w.pools.del(wr.Name)
			return nil
		}
		w.pools.put(wr.Name, is)
	case WriteAudit:
		if wr.Audit.Version != w.audit.Version {
			return errConflict
		}
		w.audit, w.epoch = wr.Audit, max(w.epoch, wr.Audit.Epoch)
		w.audit.Version = w.version()
	default:
		panic(wr)
	}
	return nil
}

// replaced reports whether the pod's name has a newer address in the place of this one.
func (w *world) replaced(old PodIP) bool {
	for _, ip := range w.ips.objs {
		if ip.owner() == old.owner() && old.Identity == "" && ip.Interface == old.Interface && ip.Addr != old.Addr &&
			ip.Addr.Is4() == old.Addr.Is4() && ip.PodUID != old.PodUID && ip.Created.After(old.Created) {
			return true
		}
	}
	return false
}

// mayEnd checks that no address is given up that is kept for a pod. After a restore, pods that the backup lacks count.
func (w *world) mayEnd(is PodIP) {
	wl := w.workloads[is.Workload.Name]
	next, there := w.pods.objs[is.PodName]
	switch {
	case wl == nil || wl.gone, w.restored:
	case !is.Keep.WhileOwned, is.StatusUID == "", is.Release, w.wanted(&is) > Wants:
	case there && next.Assigned != nil && !next.has(is.Addr):
	case w.now.Sub(wl.scaled) < time.Minute, !w.sent.IsZero() && w.sent.Sub(wl.scaled) < time.Minute:
		// It was unwanted when that was decided.
	case !w.placed[placement{is.Addr, is.PodUID}]: // its pod was never told of it
	case w.replaced(is): // a later pod of the name had another address when that was decided, and may be gone since
	default:
		w.failf("%s is given up, and pod %s may want it: %+v", is.Addr, is.PodName, is)
	}
}

func (w *world) deleteIP(is PodIP) {
	if !is.Held {
		w.ips.del(is.Addr.String())
		return
	}
	is.Deleting, is.Version = true, w.version()
	w.ips.put(is.Addr.String(), is)
}

// deletePod is a graceful deletion. One of a pod without a node takes no time, but may be seen.
func (w *world) deletePod(is Pod) {
	if is.Node == "" && (w.calm || w.some(50)) {
		w.delPod(is.Name)
		return
	}
	is.Ending, is.Version = true, w.version()
	w.pods.put(is.Name, is)
}

// send carries out a write over a network that may lose, delay or repeat it, or lose the report.
func (w *world) send(by string, wr Write) error {
	if w.calm {
		return w.apply(by, wr)
	}
	switch k := w.r.IntN(20); k {
	case 0:
		w.logf("%s: %s is lost", by, describe(wr))
		return errors.New("lost")
	case 1:
		w.logf("%s: %s is late", by, describe(wr))
		sent := w.now
		if !w.sent.IsZero() {
			sent = w.sent
		}
		w.inflight = append(w.inflight, func() {
			w.sent = sent
			defer func() { w.sent = time.Time{} }()
			_ = w.apply("late, of "+by, wr)
		})
		return errors.New("timeout")
	case 2:
		_ = w.apply(by, wr)
		return errors.New("timeout")
	case 3:
		_ = w.apply(by, wr)
		return w.apply(by, wr)
	}
	return w.apply(by, wr)
}

func describe(wr Write) string {
	switch wr := wr.(type) {
	case agentStatus:
		return describe(wr.StatusIP)
	case CreateIP:
		return fmt.Sprintf("create %s for %s %s", wr.PodIP.Addr, wr.PodIP.PodName, wr.PodIP.PodUID)
	case UpdateIP:
		return fmt.Sprintf("update %s@%s: %s %s, held %t", wr.PodIP.Addr, wr.PodIP.Version, wr.PodIP.PodName,
			wr.PodIP.PodUID, wr.PodIP.Held)
	case StatusIP:
		return fmt.Sprintf("status %s@%s: %s %s on %s", wr.PodIP.Addr, wr.PodIP.Version, wr.PodIP.Phase, wr.PodIP.StatusUID,
			wr.PodIP.Node)
	case DeleteIP:
		return fmt.Sprintf("delete %s@%s of %s", wr.PodIP.Addr, wr.PodIP.Version, wr.PodIP.PodUID)
	case PlacePod:
		var all []string
		for _, a := range wr.Addresses {
			all = append(all, a.Prefix.Addr().String())
		}
		return fmt.Sprintf("place %s %s: %v", wr.Name, wr.UID, all)
	case EndPod:
		return fmt.Sprintf("end %s %s", wr.Name, wr.UID)
	case WriteAudit:
		return fmt.Sprintf("audit@%s: epoch %d, recalling %t", wr.Audit.Version, wr.Audit.Epoch%1e12, wr.Audit.Recalling)
	}
	return fmt.Sprintf("%T%+v", wr, wr)
}

// placement is a pod that was told of an address.
type placement struct {
	addr netip.Addr
	uid  UID
}

// answering is a pod that answers for an address.
type answering struct {
	addr netip.Addr
	uid  UID
	node string
}

// oracle: at no moment may two pods answer for one address, nor nodes route to another pod than the one that answers.
//
// It excuses a pod that had its address by a backup and one that this lacks, a pod on a node that is wrongly said to be
// off, and what an agent that lies does to others by its own node: that a pod which is there answers for an address
// that is not its own any more, since on a shared link any node can answer for any address, and that nodes route there.
// Also what it says of a pod that was bound and deleted before the controller that decides could see where: one that
// has just begun, or whose watch was interrupted.
//
// Of a sandbox between its creation, its ADD and its first answer it excuses nothing but that the agent of a node which
// is wrongly said to be off takes one down once its interfaces are there. Of restores it knows those alone that are
// noticed: that took longer than [MarkLost], or before which the controllers, which ran on, had set the mark.
func (w *world) oracle() {
	all := w.scratch[:0]
	for _, n := range w.nodes {
		if !n.on {
			continue
		}
		for uid, s := range n.sandboxes {
			if n.lied && !n.heard[uid] || s.collected {
				continue
			}
			for _, a := range s.has {
				if s.up {
					all = append(all, answering{a.Prefix.Addr(), uid, n.name})
				}
			}
		}
	}
	w.scratch = all
	for i, x := range all {
		p := w.ips.objs[x.addr.String()]
		lies := func(x answering) bool {
			return x.uid != p.PodUID && (w.liar != nil && x.node == w.liar.name || w.unseen[x.uid])
		}
		if w.routed && w.lied == "" && (w.liar == nil || p.Node != w.liar.name && x.node != w.liar.name) &&
			p.PodCIDR.IsValid() && p.StatusUID == p.PodUID &&
			(p.StatusUID != x.uid || p.Node != x.node) && !w.told[x.uid] && !w.lost[x.uid] &&
			!w.told[p.StatusUID] && !w.lost[p.StatusUID] {
			w.failf("%s on %s answers for %s, and nodes route it to %s on %s", x.uid, x.node, x.addr, p.StatusUID, p.Node)
		}
		// After a restore a liar can deny a pod of its own that the backup has without a node.
		denied := func(x, y answering) bool {
			liar := w.liar != nil && x.node == w.liar.name || w.unseen[x.uid] && x.node == w.lied
			return liar && w.restores > 0 && (x.uid == y.uid || w.nodeOf(x.uid) != x.node)
		}
		for _, y := range all[:i] {
			if x.addr != y.addr || w.told[x.uid] && (w.lost[y.uid] || x.uid == y.uid) || w.told[y.uid] && w.lost[x.uid] ||
				lies(x) || lies(y) || denied(x, y) || denied(y, x) {
				continue
			}
			w.failf("%s is doubled: %s on %s and %s on %s", x.addr, y.uid, y.node, x.uid, x.node)
		}
	}
}

// runs reports whether a pod has a sandbox.
func (w *world) runs(uid UID) bool {
	return slices.ContainsFunc(w.nodes, func(n *node) bool { return n.sandboxes[uid] != nil })
}

// nodeOf returns the node that a pod has in the cluster, empty if it has none, or does not exist.
func (w *world) nodeOf(uid UID) string {
	for _, p := range w.pods.objs {
		if p.UID == uid {
			return p.Node
		}
	}
	return ""
}

// live is the API server to a controller with a Book.
type live struct {
	*world
	book *Book
}

func (l live) Seen() Audit { return l.book.audit }

// Controllers.

// start is a controller that begins to lead: it notes whether anything was forgotten, then lists.
func (w *world) start(c *controller) {
	c.jobs, c.book, c.stuck, c.due = nil, nil, [5]bool{}, map[string]bool{}
	next := Lead(w.audit, Audit{}, w.Now())
	if w.send(c.name, WriteAudit{Audit: next}) != nil {
		return
	}
	c.book = NewBook(w.audit)
	w.relistAll(c)
}

func (w *world) relistAll(c *controller) {
	for k := range 5 {
		w.relist(c, k)
	}
}

// relist has a watch begin again: what happened in between is not seen.
func (w *world) relist(c *controller, kind int) {
	b := c.book
	c.stuck[kind] = false
	switch kind {
	case 0:
		for _, key := range w.pools.keys() {
			b.SetPool(w.poolOf(key))
		}
		for _, name := range slices.Sorted(maps.Keys(b.pools)) {
			if _, ok := w.pools.objs[name]; !ok {
				b.RemovePool(name)
			}
		}
		c.at[0] = len(w.pools.log)
	case 1:
		for _, key := range w.ips.keys() {
			b.SetPodIP(w.ips.objs[key])
		}
		for _, a := range slices.SortedFunc(maps.Keys(b.ips), netip.Addr.Compare) {
			if _, ok := w.ips.objs[a.String()]; !ok {
				b.RemovePodIP(a)
			}
		}
		c.at[1] = len(w.ips.log)
	case 2:
		exist := map[UID]bool{}
		for _, key := range w.pods.keys() {
			is := w.pods.objs[key]
			exist[is.UID] = true
			if !Placed(b.pods[is.UID], is.Version) {
				b.SetPod(is)
			}
		}
		for _, uid := range slices.Sorted(maps.Keys(b.pods)) {
			if !exist[uid] {
				b.RemovePod(uid, "", w.Now())
			}
		}
		c.at[2] = len(w.pods.log)
	case 3:
		for _, key := range w.hosts.keys() {
			b.SetNode(w.hosts.objs[key])
		}
		for _, name := range slices.Sorted(maps.Keys(b.nodes)) {
			if _, ok := w.hosts.objs[name]; !ok {
				b.RemoveNode(name)
			}
		}
		c.at[3] = len(w.hosts.log)
	case 4:
		for _, key := range w.said.keys() {
			b.SetReport(w.said.objs[key])
		}
		for _, name := range slices.Sorted(maps.Keys(b.reports)) {
			if _, ok := w.said.objs[name]; !ok {
				b.RemoveReport(name)
			}
		}
		c.at[4] = len(w.said.log)
	}
}

func (w *world) poolOf(name string) Pool {
	is := w.pools.objs[name]
	r, err := Parse(is.Spec)
	p := Pool{Name: name, Version: is.Version, Revision: fmt.Sprint(is.Spec, is.Disabled, is.Only), Range: r,
		Invalid: err, Disabled: is.Disabled, Deleting: is.Deleting, Held: is.Held}
	if is.Only != "" {
		p.Serves = func(labels map[string]string) bool { return labels["name"] == is.Only }
	}
	return p
}

// watch brings the next events of a kind to a controller; each kind lags behind by itself.
func (w *world) watch(c *controller, kind, most int) {
	b := c.book
	if c.stuck[kind] && w.calm {
		c.stuck[kind] = false
	}
	for ; most > 0; most-- {
		i := c.at[kind]
		switch kind {
		case 0:
			if i == len(w.pools.log) {
				return
			}
			e := w.pools.log[i]
			if _, exists := w.pools.objs[e.key]; e.relist || e.obj != nil && !exists {
				w.relist(c, kind)
				return
			}
			if e.obj == nil {
				b.RemovePool(e.key)
			} else {
				b.SetPool(w.poolOf(e.key))
			}
		case 1:
			if i == len(w.ips.log) {
				return
			}
			e := w.ips.log[i]
			if e.relist {
				w.relist(c, kind)
				return
			}
			switch is := b.ips[netip.MustParseAddr(e.key)]; {
			case e.obj == nil && is != nil && !is.Created.After(w.now) && w.newer(is, i):
			case e.obj == nil:
				b.RemovePodIP(netip.MustParseAddr(e.key))
			case is != nil && number(is.Version) >= number(e.obj.Version):
			default:
				b.SetPodIP(*e.obj)
			}
		case 2:
			if i == len(w.pods.log) {
				return
			}
			e := w.pods.log[i]
			if e.relist {
				w.relist(c, kind)
				return
			}
			if e.obj != nil {
				if !Placed(b.pods[e.obj.UID], e.obj.Version) {
					b.SetPod(*e.obj)
				}
			} else {
				for _, uid := range slices.Sorted(maps.Keys(b.pods)) {
					if b.pods[uid].Name == e.key {
						b.RemovePod(uid, cmp.Or(e.version, "1"), w.Now())
					}
				}
			}
		case 3:
			if i == len(w.hosts.log) {
				return
			}
			e := w.hosts.log[i]
			if e.relist {
				w.relist(c, kind)
				return
			}
			if e.obj == nil {
				b.RemoveNode(e.key)
			} else {
				b.SetNode(*e.obj)
			}
		case 4:
			if i == len(w.said.log) {
				return
			}
			e := w.said.log[i]
			if e.relist {
				w.relist(c, kind)
				return
			}
			if e.obj == nil {
				b.RemoveReport(e.key)
			} else {
				b.SetReport(*e.obj)
			}
		}
		c.at[kind]++
	}
}

// newer reports whether an object that a write returned came after the deletion at this place of the log.
func (w *world) newer(is *PodIP, at int) bool {
	for _, e := range w.ips.log[at+1:] {
		if e.obj != nil && e.obj.Version == is.Version {
			return true
		}
	}
	return false
}

func number(version string) int {
	n, err := strconv.Atoi(version)
	if err != nil {
		panic(err)
	}
	return n
}

// wanted is what the controller finds out about a workload, past its caches.
func (w *world) wanted(p *PodIP) Wanted {
	wl := w.workloads[p.Workload.Name]
	switch {
	case wl == nil:
		return Unknown
	case wl.gone:
		for _, key := range w.pods.keys() {
			if w.pods.objs[key].Workload.Name == wl.name {
				return Unknown
			}
		}
		return Abandoned
	case wl.loose:
		return Wants
	}
	_, digits, _ := strings.Cut(p.PodName, "-")
	if i, _ := strconv.Atoi(digits); i >= wl.replicas {
		return Scaled
	}
	return Wants
}

// turn is one step of a controller.
func (w *world) turn(c *controller) {
	w.skew = c.clock
	defer func() { w.skew = 0 }()
	if c.book == nil {
		w.start(c)
		return
	}
	if c.book.Stale() {
		if w.send(c.name, c.book.Lead(w.audit, w.Now())) == nil {
			w.start(c)
		}
		return
	}
	if w.some(10) {
		if w.send(c.name, c.book.Lead(w.audit, w.Now())) == nil {
			c.book.SetAudit(w.audit)
		}
	}
	w.dates(c)
	for kind := range 5 {
		if c.stuck[kind] = c.stuck[kind] && !w.some(3); c.stuck[kind] {
			continue
		}
		switch w.r.IntN(4) {
		case 0:
		case 1:
			w.watch(c, kind, 1+w.r.IntN(3))
		default:
			w.watch(c, kind, 10_000)
		}
	}
	if w.calico != nil && w.calico.reserved != nil && w.some(30) {
		w.reserves(c)
	}
	for range 1 + w.r.IntN(8) {
		if len(c.jobs) > 0 && w.some(60) {
			w.work(c, w.r.IntN(len(c.jobs)))
			continue
		}
		w.decide(c)
	}
}

// decide has a controller look at something.
func (w *world) decide(c *controller) {
	var plan Plan
	var what, pod string
	switch k := w.r.IntN(10); {
	case k == 0:
		plan, what = c.book.Recall(w.Now()), "recall"
	case k == 1 && len(c.book.pools) > 0:
		name := pickOne(w.r, slices.Sorted(maps.Keys(c.book.pools)))
		plan, what = c.book.ReviewPool(name), "pool "+name
	case k < 6 && len(c.book.pods) > 0:
		uid := pickOne(w.r, slices.Sorted(maps.Keys(c.book.pods)))
		w.drain(c)
		pod = c.book.pods[uid].Name
		delete(c.due, pod)
		plan, what = c.book.Place(uid, w.Now()), "place "+string(uid)
		if pod := c.book.pods[uid]; pod.Gated && !pod.Ending && plan.Writes == nil && plan.Reason == "" {
			w.failf("pod %s %s waits for no reason", pod.Name, uid)
		}
	default:
		if all := c.book.Addresses(); len(all) > 0 {
			a := pickOne(w.r, all)
			w.observe(c, a)
			plan, what = c.book.Review(a, w.Now(), w.wanted), "review "+a.String()
		}
	}
	w.contacts(c, plan.Contact)
	for _, wr := range plan.Writes {
		if about, ok := podIPOf(wr); ok && w.liar != nil && c.book.ips[about] != nil {
			p := c.book.ips[about]
			if _, known := c.book.situation(p, w.Now()).known(); !known && p.saidOn() == w.liar.name {
				w.unseen[p.PodUID] = true
			}
		}
	}
	j := &job{what, pod, plan.Writes, w.now}
	switch {
	case plan.Writes == nil:
	case len(c.jobs) < 4:
		c.jobs = append(c.jobs, j)
	default:
		c.drop(j)
	}
}

// drain notes which pods are woken.
func (w *world) drain(c *controller) {
	for _, k := range c.book.Woken(w.Now()) {
		if k.Kind == KeyPod {
			c.due[k.Name] = true
		}
	}
}

// drop gives up what is left of a job. Its pod is placed again.
func (c *controller) drop(j *job) {
	for _, wr := range j.writes {
		if create, ok := wr.(CreateIP); ok {
			c.book.Unreserve(create.PodIP.Addr)
		}
	}
	if j.pod != "" {
		c.due[j.pod] = true
	}
}

// podIPOf returns the address of the PodIP that a write is about.
func podIPOf(wr Write) (a netip.Addr, ok bool) {
	switch wr := wr.(type) {
	case CreateIP:
		return wr.PodIP.Addr, true
	case UpdateIP:
		return wr.PodIP.Addr, true
	case StatusIP:
		return wr.PodIP.Addr, true
	case DeleteIP:
		return wr.PodIP.Addr, true
	}
	return a, false
}

// work makes the next write of a job.
func (w *world) work(c *controller, i int) {
	j := c.jobs[i]
	wr := j.writes[0]
	err := Holds(context.Background(), wr, live{w, c.book})
	if err == nil {
		w.sent = j.at
		err = w.send(c.name, wr)
		w.sent = time.Time{}
	} else {
		w.logf("%s: %s is not made: %v", c.name, describe(wr), err)
	}
	if err != nil {
		if about, ok := podIPOf(wr); ok && w.calico != nil { // as it is read again
			is, _ := w.Allocation(context.Background(), about)
			c.book.SetAllocation(about, is)
		}
		c.drop(j)
		c.book.SetAudit(w.audit)
		c.jobs = slices.Delete(c.jobs, i, i+1)
		return
	}
	switch wr := wr.(type) { // what the write returned
	case CreateIP:
		if is, ok := w.ips.objs[wr.PodIP.Addr.String()]; ok && is.PodUID == wr.PodIP.PodUID {
			c.book.SetPodIP(is)
		}
	case UpdateIP:
		if is, ok := w.ips.objs[wr.PodIP.Addr.String()]; ok && is.UID == wr.PodIP.UID {
			c.book.SetPodIP(is)
		}
	case FreeAllocation:
		c.book.SetAllocation(wr.Addr, Allocation{At: w.Now()})
	case PlacePod:
		wr.NoteIn(c.book)
	case WriteAudit:
		c.book.SetAudit(w.audit)
	}
	if j.writes = j.writes[1:]; len(j.writes) == 0 {
		c.jobs = slices.Delete(c.jobs, i, i+1)
	}
}

func pickOne[T any](r *rand.Rand, from []T) (one T) {
	if len(from) == 0 {
		return one
	}
	return from[r.IntN(len(from))]
}
