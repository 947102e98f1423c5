package placement

import (
	"maps"
	"slices"
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
// and decides again. Each part says what its loss costs.
//
// Its methods are safe for concurrent use.
type memory struct {
	now func() time.Time

	*ends
	*assignments

	mu sync.Mutex
	// records has what is known of pods, by their names. One without anything is removed.
	records map[types.NamespacedName]podRecord
	// waiting are the pods that wait, by what they wait for: the name of a node or, as cluster.NodeLabel writes it, a
	// label of nodes. Lost: rebuilt by the next decisions.
	waiting map[string]map[types.NamespacedName]struct{}
}

// podRecord is what is remembered of the pods of one name. Parts that are empty say nothing.
type podRecord struct {
	// undecided is what is known of a pod that is to be placed, and what its owner was told already. Lost: rebuilt by the
	// next decisions.
	undecided *undecidedPod
	// gate is the wait of a gated pod, refused that of an ungated pod for which the scheduler finds no room. Every replica
	// follows them. Lost: their wait begins again, that of a gated pod at its creation.
	gate    gatedPod
	refused refusedPod
	// ungated is a pod that was ungated though the cache still shows its gate. Lost: the API server refuses a patch.
	ungated types.UID
	// gaveUp is a pod that was deleted because its home had no room, until one of its name has a node. Lost between the
	// deletion and the successor's placement: the successor waits for its home once more.
	gaveUp givenUpHome
}

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

// succession is how long after a pod was evicted another one of its name counts as its successor. A workload's
// controller creates the successor at once. A pod that is created later, such as by scaling up again, finds a different
// cluster and tries its home first.
const succession = 5 * time.Minute

func newMemory(now func() time.Time) *memory {
	m := &memory{
		now: now, records: map[types.NamespacedName]podRecord{}, waiting: map[string]map[types.NamespacedName]struct{}{},
		assignments: newAssignments(),
	}
	m.ends = newEnds(now, func(pod types.NamespacedName) bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.records[pod].gate.uid != ""
	})
	return m
}

// changeLocked changes the record of a pod.
func (m *memory) changeLocked(pod types.NamespacedName, change func(*podRecord)) {
	r := m.records[pod]
	change(&r)
	if m.records[pod] = r; r == (podRecord{}) {
		delete(m.records, pod)
	}
}

// handler follows the pods, on every replica.
func (m *memory) handler() cache.ResourceEventHandler {
	seen := func(is any) {
		if pod, ok := is.(*cluster.Pod); ok && (pod.Node() == "" || pod.Rejected() || m.remembers(pod)) {
			m.seen(pod.Brief())
		}
	}
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(is any, initial bool) {
			if pod, ok := is.(*cluster.Pod); ok && initial && pod.Rejected() {
				return // nobody knows when
			}
			seen(is)
		},
		UpdateFunc: func(o, is any) {
			was, okWas := o.(*cluster.Pod)
			pod, okIs := is.(*cluster.Pod)
			switch {
			case !okWas || !okIs:
			case was.GetUID() != pod.GetUID(): // it was deleted, and made again, while there was no watch
				m.deleted(was.Brief())
			case was.Rejected():
				return // that was seen
			}
			seen(is)
		},
		DeleteFunc: func(was any) {
			if gone, ok := was.(cache.DeletedFinalStateUnknown); ok {
				was = gone.Obj
			}
			if pod, ok := was.(*cluster.Pod); ok {
				m.deleted(pod.Brief())
			}
		},
	}
}

// remembers reports whether there is anything to forget about a pod that has a node. Of nearly all there is nothing,
// and to decode them all takes its time when the controller starts.
func (m *memory) remembers(pod *cluster.Pod) bool {
	m.mu.Lock()
	_, known := m.records[client.ObjectKeyFromObject(pod)]
	m.mu.Unlock()
	return known || m.assignments.remembers(pod.GetUID())
}

func (m *memory) seen(pod *corev1.Pod) {
	m.mu.Lock()
	m.changeLocked(client.ObjectKeyFromObject(pod), func(r *podRecord) { r.follow(pod, m.now()) })
	m.mu.Unlock()
	m.assignments.seen(pod)
	m.ends.rejected(pod)
}

// follow notes whether a pod is gated or refused, and since when.
func (r *podRecord) follow(pod *corev1.Pod, now time.Time) {
	if home.Gated(pod) {
		gate := gatedPod{pod.UID, pod.CreationTimestamp.Time, !home.LastGate(pod)}
		if was := r.gate; was.uid == pod.UID && !gate.held {
			gate.since = was.since
			if was.held {
				gate.since = now
			}
		}
		r.gate = gate
	} else {
		r.ungated, r.gate = "", gatedPod{}
	}
	switch _, refused := home.Refused(pod); {
	case !refused || pod.Spec.NodeName != "" || !home.Pinned(pod):
		r.refused = refusedPod{}
	case r.refused.uid != pod.UID:
		r.refused = refusedPod{pod.UID, now}
	}
	if pod.Spec.NodeName != "" {
		r.gaveUp = givenUpHome{}
	}
}

// waitsSince returns when the wait of a pod for its home began: for a gated pod when nothing but our gate held it any
// more, for a pinned pod when the scheduler first found no room. The condition that says so does not tell: it has been
// false since the pod's creation.
func (m *memory) waitsSince(pod *corev1.Pod) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	record := m.records[client.ObjectKeyFromObject(pod)]
	g, r := record.gate, record.refused
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
	m.changeLocked(client.ObjectKeyFromObject(pod), func(r *podRecord) { r.ungated = pod.UID })
}

// WasUngated reports whether a pod was ungated although the cache still shows its gate.
func (m *memory) WasUngated(pod *corev1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return home.Gated(pod) && m.records[client.ObjectKeyFromObject(pod)].ungated == pod.UID
}

func (m *memory) deleted(pod *corev1.Pod) {
	m.unassign(pod.UID)
	m.mu.Lock()
	m.changeLocked(client.ObjectKeyFromObject(pod), func(r *podRecord) {
		if r.ungated == pod.UID {
			r.ungated = ""
		}
		if r.gate.uid == pod.UID {
			r.gate = gatedPod{}
		}
		if r.refused.uid == pod.UID {
			r.refused = refusedPod{}
		}
	})
	m.mu.Unlock()
	m.ends.deleted(pod)
}

// giveUp remembers that a home had no room for a pod: its successor does not go there.
func (m *memory) giveUp(pod *corev1.Pod, at string) {
	now := m.now()
	if identity := pod.Annotations[stayputv1alpha1.AnnotationIdentity]; identity != "" {
		m.fills(sharedHome{pod.Namespace, identity, at}, now)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for of, r := range m.records {
		if r.gate.uid == "" && r.gaveUp.pod != "" && now.Sub(r.gaveUp.at) > succession {
			m.changeLocked(of, func(r *podRecord) { r.gaveUp = givenUpHome{} })
		}
	}
	m.changeLocked(client.ObjectKeyFromObject(pod), func(r *podRecord) { r.gaveUp = givenUpHome{pod.UID, now} })
}

// keepHome forgets what giveUp remembered.
func (m *memory) keepHome(pod *corev1.Pod, at string) {
	m.empties(sharedHome{pod.Namespace, pod.Annotations[stayputv1alpha1.AnnotationIdentity], at})
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changeLocked(client.ObjectKeyFromObject(pod), func(r *podRecord) { r.gaveUp = givenUpHome{} })
}

// gaveUp reports whether a pod is the successor of a pod that gave its home up.
func (m *memory) gaveUp(pod *corev1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.records[client.ObjectKeyFromObject(pod)].gaveUp
	return g.pod != "" && g.pod != pod.UID && pod.CreationTimestamp.Sub(g.at) < succession
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
		return m.records[key].undecided.home
	}
	return ""
}

func (m *memory) waitsLocked(key types.NamespacedName, uid types.UID) bool {
	u := m.records[key].undecided
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
	for _, r := range m.records {
		g, u := r.gate, r.undecided
		if g.uid == "" || g.held {
			continue
		}
		waiting := waitsForNothing
		switch {
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

// first notes a text about a pod, and reports whether it is to be written: it was not yet, or that was long enough ago.
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
	if u := m.records[key].undecided; u != nil {
		u.failing = time.Time{}
	}
}

// decided forgets a pod that is placed or gone.
func (m *memory) decided(key types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if u := m.records[key].undecided; u != nil {
		m.leaveLocked(key, u)
		m.changeLocked(key, func(r *podRecord) { r.undecided = nil })
	}
}

func (m *memory) podLocked(key types.NamespacedName, uid types.UID) *undecidedPod {
	u := m.records[key].undecided
	if u != nil && u.uid == uid {
		return u
	}
	if u != nil {
		m.leaveLocked(key, u)
	}
	u = &undecidedPod{uid: uid, noticed: map[string]time.Time{}}
	m.changeLocked(key, func(r *podRecord) { r.undecided = u })
	return u
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
