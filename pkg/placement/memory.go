package placement

import (
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// memory is what the placer remembers of pods between decisions. All of it can be lost: a new leader finds pods gated
// and decides anew. Each part says what its loss costs.
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
	// gated are the gated pods, since their creation. Every replica follows them.
	gated map[types.NamespacedName]gatedPod
	// ungated are the pods that were ungated though the cache still shows their gate.
	// Lost: the API server refuses a patch.
	ungated map[types.NamespacedName]types.UID
	// givenUp are pods that were deleted because their home had no room, until one of their name has a node.
	// Lost between the deletion and the successor's placement: the successor waits for its home once more.
	givenUp map[types.NamespacedName]givenUpHome
	// last is where annotated pods were deleted, for as long as their RetainedIP may be on its way or a successor is
	// gated; order has the same by age. Lost: a pod that was deleted within seconds of its first start has no home, and
	// of several nodes that keep addresses the newest counts.
	last  map[types.NamespacedName]endedPod
	order []endedKey
	// assigned are the addresses of a shared identity that are assigned to pods without a node; holds has the same by
	// pod. Lost: two pods may be pinned to one address, and one of them gets another.
	assigned map[types.NamespacedName]types.UID
	holds    map[types.UID]types.NamespacedName
}

type undecidedPod struct {
	uid     types.UID
	node    string
	waits   bool
	reason  string
	noticed map[string]struct{}
}

type givenUpHome struct {
	pod types.UID
	at  time.Time
}

type gatedPod struct {
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
		last:     map[types.NamespacedName]endedPod{},
		assigned: map[types.NamespacedName]types.UID{},
		ungated:  map[types.NamespacedName]types.UID{},
		gated:    map[types.NamespacedName]gatedPod{},
		holds:    map[types.UID]types.NamespacedName{},
	}
}

// handler follows the pods, on every replica.
func (m *memory) handler() cache.ResourceEventHandler {
	seen := func(is any) {
		if pod, ok := is.(*cluster.Pod); ok {
			m.seen(pod.Core())
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    seen,
		UpdateFunc: func(_, is any) { seen(is) },
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

func (m *memory) seen(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	if home.Gated(pod) {
		m.gated[key] = gatedPod{pod.UID, pod.CreationTimestamp.Time}
	} else {
		delete(m.ungated, key)
		delete(m.gated, key)
	}
	if pod.Spec.NodeName != "" {
		delete(m.givenUp, key)
		m.unassignLocked(pod.UID)
	}
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
	now := m.now()
	m.forgetLastLocked(now)
	// Without an IP it never had a claim.
	if pod.Spec.NodeName == "" || pod.Status.PodIP == "" || pod.Spec.HostNetwork || !home.Annotated(pod.Annotations) ||
		pod.Annotations[stayputv1alpha1.AnnotationIdentity] != "" {
		return
	}
	fresh := pod.Status.StartTime == nil || now.Sub(pod.Status.StartTime.Time) < home.Publishing
	m.last[key] = endedPod{home.Ended{Node: pod.Spec.NodeName, At: now, Fresh: fresh}, now}
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

// releases follows the RetainedIPs: a node that releases its address is no longer a home.
func (m *memory) releases() cache.ResourceEventHandler {
	forget := func(o any) {
		if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		if r, ok := o.(*stayputv1alpha1.RetainedIP); ok && r.Spec.Release {
			m.mu.Lock()
			defer m.mu.Unlock()
			if key := (types.NamespacedName{Namespace: r.Namespace, Name: r.Spec.PodName}); m.last[key].Node == r.Spec.NodeName {
				delete(m.last, key)
			}
		}
	}
	return cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, is any) { forget(is) }, DeleteFunc: forget}
}

// giveUp remembers that the successor of a pod does not go home.
func (m *memory) giveUp(pod types.NamespacedName, uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	maps.DeleteFunc(m.givenUp, func(of types.NamespacedName, g givenUpHome) bool {
		_, waits := m.gated[of]
		return !waits && now.Sub(g.at) > succession
	})
	m.givenUp[pod] = givenUpHome{uid, now}
}

func (m *memory) forgetGivenUp(pod types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.givenUp, pod)
}

// gaveUp reports whether a pod is the successor of one that gave its home up.
func (m *memory) gaveUp(pod *corev1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	g, ok := m.givenUp[client.ObjectKeyFromObject(pod)]
	return ok && g.pod != pod.UID && pod.CreationTimestamp.Sub(g.at) < succession
}

// assign returns one of the addresses of a shared identity that is neither in use nor assigned to another pod; nil:
// there is none. A pod that has one keeps it.
func (m *memory) assign(pod *corev1.Pod, kept []*stayputv1alpha1.RetainedIP, now time.Time) (
	free *stayputv1alpha1.RetainedIP) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range kept {
		if !home.Keeps(r, now) || r.Status.Phase != stayputv1alpha1.PhaseRetained {
			continue
		}
		switch owner, taken := m.assigned[client.ObjectKeyFromObject(r)]; {
		case taken && owner == pod.UID:
			return r
		case !taken && (free == nil || home.LastBound(r, now).After(home.LastBound(free, now))):
			free = r
		}
	}
	m.unassignLocked(pod.UID)
	if free != nil {
		key := client.ObjectKeyFromObject(free)
		m.assigned[key], m.holds[pod.UID] = pod.UID, key
	}
	return free
}

func (m *memory) unassignLocked(pod types.UID) {
	if key, ok := m.holds[pod]; ok {
		delete(m.assigned, key)
		delete(m.holds, pod)
	}
}

// waits notes that a pod waits for a node, or for nodes with a label, and reports whether that or the reason is news.
func (m *memory) waits(pod *corev1.Pod, node, reason string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := client.ObjectKeyFromObject(pod)
	u := m.podLocked(key, pod.UID)
	if u.waits && u.node == node && u.reason == reason {
		return false
	}
	m.leaveLocked(key, u)
	u.waits, u.node, u.reason = true, node, reason
	if m.waiting[node] == nil {
		m.waiting[node] = map[types.NamespacedName]struct{}{}
	}
	m.waiting[node][key] = struct{}{}
	return true
}

// waitingFor returns the pods that may wait for a node.
func (m *memory) waitingFor(node client.Object) []reconcile.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.waiting) == 0 {
		return nil
	}
	var all []reconcile.Request
	for _, at := range append(cluster.NodeLabels(node), node.GetName()) {
		for key := range m.waiting[at] {
			all = append(all, reconcile.Request{NamespacedName: key})
		}
	}
	return all
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

// waited reports whether a pod waits for its home.
func (m *memory) waited(pod *corev1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waitsLocked(client.ObjectKeyFromObject(pod), pod.UID)
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

// gatedPods counts the gated pods by whether they wait for their home.
func (m *memory) gatedPods() map[bool]gatedCount {
	m.mu.Lock()
	defer m.mu.Unlock()
	counts := map[bool]gatedCount{false: {}, true: {}}
	for key, g := range m.gated {
		waits := m.waitsLocked(key, g.uid)
		c := counts[waits]
		if c.pods == 0 || g.since.Before(c.oldest) {
			c.oldest = g.since
		}
		c.pods++
		counts[waits] = c
	}
	return counts
}

// first reports whether a text about a pod is news, and notes it.
func (m *memory) first(pod *corev1.Pod, text string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	u := m.podLocked(client.ObjectKeyFromObject(pod), pod.UID)
	_, said := u.noticed[text]
	u.noticed[text] = struct{}{}
	return !said
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
	m.pods[key] = &undecidedPod{uid: uid, noticed: map[string]struct{}{}}
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
