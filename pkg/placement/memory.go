package placement

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// memory is what the placer remembers of pods between decisions. All of it can be lost: a new leader finds pods gated
// and decides again. Each part says what its loss costs.
//
// Its methods are safe for concurrent use.
type memory struct {
	now func() time.Time

	mu sync.Mutex
	// waiting are the pods that wait, by what they wait for: the name of a node or, as cluster.NodeLabel writes it, a
	// label of nodes. pods has the same by pod, and what its owner was told already.
	// Lost: rebuilt by the next decisions.
	waiting map[string]map[types.NamespacedName]struct{}
	pods    map[types.NamespacedName]*undecidedPod
	// gated are the gated pods, refused those that were ungated and for which the scheduler finds no room. Every replica
	// follows them. Lost: their wait begins again, that of a gated pod at its creation.
	gated   map[types.NamespacedName]gatedPod
	refused map[types.NamespacedName]refusedPod
	// ungated are the pods that were ungated though the cache still shows their gate.
	// Lost: the API server refuses a patch.
	ungated map[types.NamespacedName]types.UID
	// givenUp are pods that were deleted because their home had no room, until one of their name has a node.
	// Lost between the deletion and the successor's placement: the successor waits for its home once more.
	givenUp map[types.NamespacedName]givenUpHome
	// full are the homes that had no room for pods of a shared identity, whose successors have other names, since when.
	// Lost: the next pod that gets an address there waits in vain once more.
	full map[sharedHome]time.Time
	// last is where annotated pods were deleted, and which RetainedIPs of theirs vanished, for as long as a RetainedIP may
	// be on its way or a successor is gated; order has the same by age. Lost: a pod that was deleted within seconds of its
	// first start, or whose RetainedIP vanished, has no home, and of several nodes that keep addresses the newest counts.
	last  map[types.NamespacedName]endedPod
	order []endedKey
	// bound are the pods and identities that ended on a node lately, or whose RetainedIP there was deleted after the
	// controller had noted them: by namespace, node and home.Bound. Lost: where they ran is no home, unless their
	// RetainedIP was noted and is still there.
	bound *utilcache.LRUExpireCache
	// assigned are the addresses of a shared identity that are assigned to pods; holds has the same by pod. It outlasts
	// the pod's binding, since only later does the node publish that the address is bound. Lost: two pods may be pinned
	// to one address, and one of them gets another.
	assigned map[types.NamespacedName]types.UID
	holds    map[types.UID]*stayputv1alpha1.RetainedIP
	// lost are the nodes that the cluster lost lately, by when. Every replica follows them. Lost: the scheduler may bind a
	// pod to the node that is gone.
	lost map[string]time.Time
}

// boundTo is a key of what was bound to a node.
type boundTo struct{ namespace, node, what string }

// boundKept is longer than a node is down in ordinary life, and boundMost more pods than end in that time.
const (
	boundKept = 24 * time.Hour
	boundMost = 20_000
)

type undecidedPod struct {
	uid     types.UID
	node    string
	waits   bool
	address bool // it waits for addresses of pools
	home    string
	reason  string
	noticed map[string]time.Time // what was said, when last
	failing time.Time            // since when each try fails, zero if the last one did not
}

type givenUpHome struct {
	pod types.UID
	at  time.Time
}

// sharedHome is a home of a shared identity.
type sharedHome struct{ namespace, identity, home string }

type gatedPod struct {
	uid types.UID
	// since is when the pod was created or, if it had other gates, lost the last of them; held: it still has some.
	since time.Time
	held  bool
}

type refusedPod struct {
	uid   types.UID
	since time.Time
}

// endedPod is where a pod was when it was deleted.
type endedPod struct {
	home.Ended
	renewed time.Time // when the entry was made, or found to be still needed
}

type endedKey struct {
	pod     types.NamespacedName
	renewed time.Time
}

// succession is how long after a pod was evicted another one of its name counts as its successor. A workload's
// controller creates that at once. One that is created later, such as by scaling up again, finds a different cluster
// and tries its home first.
const succession = 5 * time.Minute

func newMemory(now func() time.Time) *memory {
	return &memory{
		now:      now,
		waiting:  map[string]map[types.NamespacedName]struct{}{},
		pods:     map[types.NamespacedName]*undecidedPod{},
		givenUp:  map[types.NamespacedName]givenUpHome{},
		full:     map[sharedHome]time.Time{},
		last:     map[types.NamespacedName]endedPod{},
		bound:    utilcache.NewLRUExpireCache(boundMost),
		assigned: map[types.NamespacedName]types.UID{},
		ungated:  map[types.NamespacedName]types.UID{},
		gated:    map[types.NamespacedName]gatedPod{},
		refused:  map[types.NamespacedName]refusedPod{},
		holds:    map[types.UID]*stayputv1alpha1.RetainedIP{},
		lost:     map[string]time.Time{},
	}
}

// lostLately is for how long the scheduler may not know that a node is gone. It is short because a node that comes back
// under its name would be kept from a pod for good.
const lostLately = 10 * time.Second

// nodes follows the nodes, on every replica.
func (m *memory) nodes() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if node, ok := o.(*corev1.Node); ok {
				m.mu.Lock()
				defer m.mu.Unlock()
				delete(m.lost, node.Name)
			}
		},
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if node, ok := o.(*corev1.Node); ok {
				m.loses(node.Name)
			}
		},
	}
}

// loses notes that the cluster has lost a node. The one that wakes the pods that wait for it may hear of it first.
func (m *memory) loses(node string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	maps.DeleteFunc(m.lost, func(_ string, at time.Time) bool { return now.Sub(at) > lostLately })
	m.lost[node] = now
}

// lostNode reports whether the cluster has lost a node lately.
func (m *memory) lostNode(node string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	at, ok := m.lost[node]
	return ok && m.now().Sub(at) <= lostLately
}

// handler follows the pods, on every replica.
func (m *memory) handler() cache.ResourceEventHandler {
	seen := func(is any) {
		if pod, ok := is.(*cluster.Pod); ok && (pod.Node() == "" || m.remembers(pod)) {
			m.seen(pod.Core())
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc: seen,
		UpdateFunc: func(o, is any) {
			was, okWas := o.(*cluster.Pod)
			pod, okIs := is.(*cluster.Pod)
			if okWas && okIs && was.GetUID() != pod.GetUID() { // it was deleted, and made again, while there was no watch
				m.deleted(was.Core())
			}
			seen(is)
		},
		DeleteFunc: func(was any) {
			if gone, ok := was.(cache.DeletedFinalStateUnknown); ok {
				was = gone.Obj
			}
			if pod, ok := was.(*cluster.Pod); ok {
				m.deleted(pod.Core())
			}
		},
	}
}

// remembers reports whether there is anything to forget about a pod that has a node. Of nearly all there is nothing,
// and to decode them all takes its time when the controller starts.
func (m *memory) remembers(pod *cluster.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	_, ungated := m.ungated[key]
	_, gated := m.gated[key]
	_, refused := m.refused[key]
	_, gaveUp := m.givenUp[key]
	return ungated || gated || refused || gaveUp || m.holds[pod.GetUID()] != nil
}

func (m *memory) seen(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	m.followLocked(key, pod)
	if pod.Spec.NodeName != "" {
		delete(m.givenUp, key)
	}
	if r := m.holds[pod.UID]; r != nil && !mayTake(pod, r) {
		m.unassignLocked(pod.UID)
	}
}

// mayTake reports whether a pod may have or get the addresses of a RetainedIP that it was assigned.
func mayTake(pod *corev1.Pod, r *stayputv1alpha1.RetainedIP) bool {
	return pod.DeletionTimestamp.IsZero() && pod.Status.Phase != corev1.PodSucceeded &&
		pod.Status.Phase != corev1.PodFailed &&
		(pod.Spec.NodeName == "" || pod.Spec.NodeName == r.Spec.NodeName) &&
		(pod.Status.PodIP == "" || slices.Contains(r.Status.IPs, pod.Status.PodIP))
}

// followLocked notes whether a pod is gated or refused, and since when.
func (m *memory) followLocked(key types.NamespacedName, pod *corev1.Pod) {
	if home.Gated(pod) {
		is := gatedPod{pod.UID, pod.CreationTimestamp.Time, !home.LastGate(pod)}
		if was := m.gated[key]; was.uid == pod.UID && !is.held {
			is.since = was.since
			if was.held {
				is.since = m.now()
			}
		}
		m.gated[key] = is
	} else {
		delete(m.ungated, key)
		delete(m.gated, key)
	}
	switch _, refused := home.Refused(pod); {
	case !refused || pod.Spec.NodeName != "" || !home.Pinned(pod):
		delete(m.refused, key)
	case m.refused[key].uid != pod.UID:
		m.refused[key] = refusedPod{pod.UID, m.now()}
	}
}

// waitsSince returns when the wait of a pod for its home began: for a gated one when nothing but our gate held it any
// more, for a pinned one when the scheduler first found no room. The condition that says so does not tell: it has been
// false since the pod's creation.
func (m *memory) waitsSince(pod *corev1.Pod) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	g, r := m.gated[key], m.refused[key]
	switch {
	case home.Gated(pod) && g.uid == pod.UID && !g.held:
		return g.since
	case home.Gated(pod) && g.uid != pod.UID:
		return pod.CreationTimestamp.Time
	case !home.Gated(pod) && r.uid == pod.UID:
		return r.since
	}
	return m.now() // the cache is ahead of what was followed
}

// Ungated remembers that a pod was ungated.
func (m *memory) Ungated(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ungated[client.ObjectKeyFromObject(pod)] = pod.UID
}

// WasUngated reports whether a pod was ungated although the cache still shows its gate.
func (m *memory) WasUngated(pod *corev1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return home.Gated(pod) && m.ungated[client.ObjectKeyFromObject(pod)] == pod.UID
}

func (m *memory) deleted(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unassignLocked(pod.UID)
	key := client.ObjectKeyFromObject(pod)
	if m.ungated[key] == pod.UID {
		delete(m.ungated, key)
	}
	if m.gated[key].uid == pod.UID {
		delete(m.gated, key)
	}
	if m.refused[key].uid == pod.UID {
		delete(m.refused, key)
	}
	now := m.now()
	m.forgetLastLocked(now)
	what := home.Bound(pod)
	if what == "" || !home.Annotated(pod.Annotations) {
		return
	}
	m.bound.Add(boundTo{pod.Namespace, pod.Spec.NodeName, what}, nil, boundKept)
	if pod.Annotations[stayputv1alpha1.AnnotationIdentity] != "" {
		return
	}
	// Without an IP it may have had a claim or not: it was deleted before its kubelet had said.
	fresh := pod.Status.PodIP != "" &&
		(pod.Status.StartTime == nil || now.Sub(pod.Status.StartTime.Time) < home.Publishing)
	m.rememberLocked(key, home.Ended{
		Node: pod.Spec.NodeName, At: now, Fresh: fresh, Vanished: m.last[key].Vanished,
	}, now)
}

// rememberLocked remembers what became of the predecessor of a pod.
func (m *memory) rememberLocked(key types.NamespacedName, ended home.Ended, now time.Time) {
	m.last[key] = endedPod{ended, now}
	m.order = append(m.order, endedKey{key, now})
}

// forgetLastLocked forgets where pods ended, except for those with a gated successor: it may wait for that very node.
func (m *memory) forgetLastLocked(now time.Time) {
	for len(m.order) > 0 && now.Sub(m.order[0].renewed) > home.Publishing {
		old := m.order[0]
		m.order = m.order[1:]
		l, ok := m.last[old.pod]
		if !ok || !l.renewed.Equal(old.renewed) {
			continue
		}
		if _, waits := m.gated[old.pod]; waits {
			l.renewed = now
			m.last[old.pod] = l
			m.order = append(m.order, endedKey{old.pod, now})
			continue
		}
		delete(m.last, old.pod)
	}
}

// ended returns where the predecessor of a pod was deleted.
func (m *memory) ended(pod types.NamespacedName) home.Ended {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last[pod].Ended
}

// releases follows the RetainedIPs: a node that releases its address is no longer a home, one whose object was deleted
// still is.
func (m *memory) releases() cache.ResourceEventHandler {
	is := func(o any) { m.published(o, false) }
	return cache.ResourceEventHandlerFuncs{
		AddFunc: is, UpdateFunc: func(_, o any) { is(o) }, DeleteFunc: func(o any) { m.published(o, true) },
	}
}

func (m *memory) published(o any, deleted bool) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	r, ok := o.(*stayputv1alpha1.RetainedIP)
	if ok && deleted && home.Scheduled(r) {
		m.bound.Add(boundTo{r.Namespace, r.Spec.NodeName, home.Claimant(r)}, nil, boundKept)
	}
	if !ok || r.Spec.Identity != "" {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	key, now := types.NamespacedName{Namespace: r.Namespace, Name: r.Spec.PodName}, m.now()
	m.forgetLastLocked(now)
	was, known := m.last[key]
	ended := was.Ended
	if r.Spec.Release && ended.Node == r.Spec.NodeName {
		ended.Node, ended.At, ended.Fresh = "", time.Time{}, false
	}
	ended.Vanished = slices.DeleteFunc(slices.Clone(ended.Vanished),
		func(v home.Vanished) bool { return v.Spec.NodeName == r.Spec.NodeName })
	if deleted {
		vanished := r.DeepCopy()
		vanished.DeletionTimestamp = nil
		if home.Keeps(vanished, now) && m.scheduled(vanished, nil) {
			ended.Vanished = append(ended.Vanished, home.Vanished{RetainedIP: vanished, At: now})
			m.rememberLocked(key, ended, now)
			return
		}
	}
	switch {
	case known && ended.Node == "" && len(ended.Vanished) == 0:
		delete(m.last, key)
	case known:
		m.last[key] = endedPod{ended, was.renewed}
	}
}

// scheduled reports whether what a RetainedIP is for was bound to its node: it says so, or the pod is there now, or it
// ended there lately, or an earlier RetainedIP of the same said so. pod may be nil.
func (m *memory) scheduled(r *stayputv1alpha1.RetainedIP, pod *corev1.Pod) bool {
	if home.Scheduled(r) || pod != nil && pod.Spec.NodeName == r.Spec.NodeName && home.Bound(pod) == home.Claimant(r) {
		return true
	}
	_, known := m.bound.Get(boundTo{r.Namespace, r.Spec.NodeName, home.Claimant(r)})
	return known
}

// giveUp remembers that a home had no room for a pod: its successor does not go there.
func (m *memory) giveUp(pod *corev1.Pod, at string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key, now := client.ObjectKeyFromObject(pod), m.now()
	if identity := pod.Annotations[stayputv1alpha1.AnnotationIdentity]; identity != "" {
		maps.DeleteFunc(m.full, func(_ sharedHome, since time.Time) bool { return now.Sub(since) > succession })
		m.full[sharedHome{pod.Namespace, identity, at}] = now
	}
	maps.DeleteFunc(m.givenUp, func(of types.NamespacedName, g givenUpHome) bool {
		_, waits := m.gated[of]
		return !waits && now.Sub(g.at) > succession
	})
	m.givenUp[key] = givenUpHome{pod.UID, now}
}

// keepHome forgets what giveUp remembered.
func (m *memory) keepHome(pod *corev1.Pod, at string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.givenUp, client.ObjectKeyFromObject(pod))
	delete(m.full, sharedHome{pod.Namespace, pod.Annotations[stayputv1alpha1.AnnotationIdentity], at})
}

// gaveUp reports whether a pod is the successor of one that gave its home up.
func (m *memory) gaveUp(pod *corev1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	g, ok := m.givenUp[client.ObjectKeyFromObject(pod)]
	return ok && g.pod != pod.UID && pod.CreationTimestamp.Sub(g.at) < succession
}

// assign returns one of the addresses that pods of a shared identity have left, which is not assigned to another pod,
// nil if there is none. A pod that has one keeps it. One whose home had no room lately is the last choice, and then
// full.
func (m *memory) assign(pod *corev1.Pod, kept []*stayputv1alpha1.RetainedIP, now time.Time) (
	free *stayputv1alpha1.RetainedIP, full bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range kept {
		if !home.Keeps(r, now) {
			continue
		}
		since, wasFull := m.full[sharedHome{r.Namespace, r.Spec.Identity, home.NodeHome(r.Spec.NodeName)}]
		wasFull = wasFull && now.Sub(since) <= succession
		owner, taken := m.assigned[client.ObjectKeyFromObject(r)]
		switch {
		case taken && owner != pod.UID:
		case taken && (!wasFull || !home.Gated(pod)):
			return r, wasFull
		case free == nil || full && !wasFull,
			full == wasFull && home.LastBound(r, now).After(home.LastBound(free, now)):
			free, full = r, wasFull
		}
	}
	m.unassignLocked(pod.UID)
	if free != nil {
		key := client.ObjectKeyFromObject(free)
		m.assigned[key], m.holds[pod.UID] = pod.UID, free
	}
	return free, full
}

func (m *memory) unassignLocked(pod types.UID) {
	if r := m.holds[pod]; r != nil {
		delete(m.assigned, client.ObjectKeyFromObject(r))
		delete(m.holds, pod)
	}
}

// waits notes that a pod waits for its home, which is a node, or nodes with a label, and reports whether that or the
// reason is news.
func (m *memory) waits(pod *corev1.Pod, at, node, reason string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	u := m.podLocked(key, pod.UID)
	if u.waits && u.node == node && u.reason == reason {
		return false
	}
	m.leaveLocked(key, u)
	u.waits, u.address, u.home, u.node, u.reason = true, false, at, node, reason
	if m.waiting[node] == nil {
		m.waiting[node] = map[types.NamespacedName]struct{}{}
	}
	m.waiting[node][key] = struct{}{}
	return true
}

// waitingFor returns the pods that wait for a node or, as cluster.NodeLabel writes it, for nodes with a label.
func (m *memory) waitingFor(node string) []types.NamespacedName {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.waiting[node]))
}

// waitingIn returns the pods that wait in a namespace.
func (m *memory) waitingIn(namespace string) []reconcile.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []reconcile.Request
	for _, pods := range m.waiting {
		for key := range pods {
			if key.Namespace == namespace {
				all = append(all, reconcile.Request{NamespacedName: key})
			}
		}
	}
	return all
}

// waitingPods returns how many pods wait for their home.
func (m *memory) waitingPods() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, pods := range m.waiting {
		n += len(pods)
	}
	return float64(n)
}

// waited returns the home for which a pod waits, empty if for none.
func (m *memory) waited(pod *corev1.Pod) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if key := client.ObjectKeyFromObject(pod); m.waitsLocked(key, pod.UID) {
		return m.pods[key].home
	}
	return ""
}

func (m *memory) waitsLocked(key types.NamespacedName, uid types.UID) bool {
	u := m.pods[key]
	return u != nil && u.uid == uid && u.waits
}

// gatedCount is how many pods are gated, and since when the oldest is.
type gatedCount struct {
	pods   int
	oldest time.Time
}

// The words of the label waiting: what a gated pod waits for.
const (
	waitsForNothing = "false"
	waitsForHome    = "true"
	waitsForAddress = "address" // of a pool
)

// gatedPods counts the pods that only our gate holds by what they wait for.
func (m *memory) gatedPods() map[string]gatedCount {
	counts := map[string]gatedCount{waitsForNothing: {}, waitsForHome: {}, waitsForAddress: {}}
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, g := range m.gated {
		if g.held {
			continue
		}
		waiting := waitsForNothing
		switch u := m.pods[key]; {
		case u == nil || u.uid != g.uid:
		case u.waits:
			waiting = waitsForHome
		case u.address:
			waiting = waitsForAddress
		}
		c := counts[waiting]
		if c.pods == 0 || g.since.Before(c.oldest) {
			c.oldest = g.since
		}
		c.pods++
		counts[waiting] = c
	}
	return counts
}

// waitsForAddress notes that a gated pod waits for addresses of pools, and for no home meanwhile.
func (m *memory) waitsForAddress(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	u := m.podLocked(key, pod.UID)
	m.leaveLocked(key, u)
	u.address = true
}

// first reports whether a text about a pod is news, or was said so long ago that it is said again, and notes it.
func (m *memory) first(pod *corev1.Pod, text string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	u, now := m.podLocked(client.ObjectKeyFromObject(pod), pod.UID), m.now()
	if at, said := u.noticed[text]; said && now.Sub(at) < cluster.SayAgainAfter {
		return false
	}
	maps.DeleteFunc(u.noticed, func(_ string, at time.Time) bool { return now.Sub(at) >= cluster.SayAgainAfter })
	if len(u.noticed) < noticedMost {
		u.noticed[text] = now
	}
	return true
}

// noticedMost bounds what is remembered of what was said about a pod.
const noticedMost = 20

// fails notes that a try to place a pod failed, and returns for how long they all have.
func (m *memory) fails(pod *corev1.Pod) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	u, now := m.podLocked(client.ObjectKeyFromObject(pod), pod.UID), m.now()
	if u.failing.IsZero() {
		u.failing = now
	}
	return now.Sub(u.failing)
}

// succeeds notes that a try did not fail.
func (m *memory) succeeds(key types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if u := m.pods[key]; u != nil {
		u.failing = time.Time{}
	}
}

// decided forgets a pod that is placed or gone.
func (m *memory) decided(key types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if u := m.pods[key]; u != nil {
		m.leaveLocked(key, u)
		delete(m.pods, key)
	}
}

func (m *memory) podLocked(key types.NamespacedName, uid types.UID) *undecidedPod {
	u := m.pods[key]
	if u != nil && u.uid == uid {
		return u
	}
	if u != nil {
		m.leaveLocked(key, u)
	}
	m.pods[key] = &undecidedPod{uid: uid, noticed: map[string]time.Time{}}
	return m.pods[key]
}

func (m *memory) leaveLocked(key types.NamespacedName, u *undecidedPod) {
	if u.waits {
		delete(m.waiting[u.node], key)
		if len(m.waiting[u.node]) == 0 {
			delete(m.waiting, u.node)
		}
		u.waits = false
	}
}
