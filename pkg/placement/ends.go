package placement

import (
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// ends is where pods ended, for as long as that may be news to what else is known of them. Its lock is held while gated
// is called.
type ends struct {
	now   func() time.Time
	gated func(types.NamespacedName) bool // whether a pod of that name is

	mu sync.Mutex
	// last is where annotated pods were deleted, and which RetainedIPs of theirs vanished, for as long as a RetainedIP may
	// be on its way or a successor is gated; order has the same by age. Lost: a pod that was deleted within seconds of its
	// first start, or whose RetainedIP vanished, has no home, and of several nodes that keep addresses the newest counts.
	last  map[types.NamespacedName]endedPod
	order []endedKey
	// bound are the pods and identities that ended on a node lately, or whose RetainedIP there was deleted after the
	// controller had noted them: by namespace, node and home.Bound. Lost: where they ran is no home, unless their
	// RetainedIP was noted and is still there.
	bound *utilcache.LRUExpireCache
	// rejections are the series of pods that kubelets did not admit, by the pods' name or shared identity. A series is
	// over if none comes for so long, see [succession], as when the pod runs. Lost: the time that its successor waits for
	// its home begins again with the next rejection.
	rejections *utilcache.LRUExpireCache
}

// successors are the pods that come after one another: of a name, or of a shared identity. See home.SuccessorsOf.
type successors struct{ namespace, of string }

// rejection is a series of rejections and the pod of the last one.
type rejection struct {
	home.Rejections
	pod types.UID
}

// rejectionsMost is far more pods than kubelets reject in the time that it takes to give up a home.
const rejectionsMost = 20_000

// boundTo is a key of what was bound to a node.
type boundTo struct{ namespace, node, what string }

// boundKept is longer than a node is down in ordinary life, and boundMost more pods than end in that time.
const (
	boundKept = 24 * time.Hour
	boundMost = 20_000
)

// endedPod is where a pod was when it was deleted.
type endedPod struct {
	home.Ended
	renewed time.Time // when the entry was made, or found to be still needed
}

type endedKey struct {
	pod     types.NamespacedName
	renewed time.Time
}

func newEnds(now func() time.Time, gated func(types.NamespacedName) bool) *ends {
	return &ends{now: now, gated: gated, last: map[types.NamespacedName]endedPod{},
		bound:      utilcache.NewLRUExpireCache(boundMost),
		rejections: utilcache.NewLRUExpireCacheWithClock(rejectionsMost, clockOf(now))}
}

// clockOf is a clock for a cache.
type clockOf func() time.Time

// Now returns the time.
func (c clockOf) Now() time.Time { return c() }

// rejected notes once that the kubelet of a pod did not admit it.
func (e *ends) rejected(pod *corev1.Pod) {
	words, rejected := home.Rejected(pod)
	if !rejected {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	key := successors{pod.Namespace, home.SuccessorsOf(pod)}
	was := e.rejectionLocked(key)
	if was.pod != pod.UID {
		e.rejections.Add(key, rejection{was.With(pod.Spec.NodeName, words, e.now()), pod.UID}, succession)
	}
}

func (e *ends) rejectionLocked(key successors) rejection {
	value, _ := e.rejections.Get(key)
	r, _ := value.(rejection)
	return r
}

// rejectionsOf returns how the predecessors of a pod were rejected.
func (e *ends) rejectionsOf(pod *corev1.Pod) home.Rejections {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.rejectionLocked(successors{pod.Namespace, home.SuccessorsOf(pod)}).Rejections
}

// admittedLocked ends a series of rejections with a pod that a kubelet of the series had admitted.
func (e *ends) admittedLocked(pod *corev1.Pod) {
	key := successors{pod.Namespace, home.SuccessorsOf(pod)}
	if pod.Status.StartTime != nil && slices.Contains(e.rejectionLocked(key).Nodes, pod.Spec.NodeName) {
		e.rejections.Remove(key)
	}
}

// deleted remembers where an annotated pod ended.
func (e *ends) deleted(pod *corev1.Pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.now()
	e.forgetLastLocked(now)
	if _, rejected := home.Rejected(pod); rejected {
		return // it left nothing there
	}
	e.admittedLocked(pod)
	what := home.Bound(pod)
	if what == "" || !home.Annotated(pod.Annotations) {
		return
	}
	e.bound.Add(boundTo{pod.Namespace, pod.Spec.NodeName, what}, nil, boundKept)
	if pod.Annotations[stayputv1alpha1.AnnotationIdentity] != "" {
		return
	}
	// Without an IP it may have had a claim or not: it was deleted before its kubelet had said.
	fresh := pod.Status.PodIP != "" &&
		(pod.Status.StartTime == nil || now.Sub(pod.Status.StartTime.Time) < home.Publishing)
	key := client.ObjectKeyFromObject(pod)
	e.rememberLocked(key, home.Ended{
		Node: pod.Spec.NodeName, At: now, Fresh: fresh, Vanished: e.last[key].Vanished,
	}, now)
}

// rememberLocked remembers what became of the predecessor of a pod.
func (e *ends) rememberLocked(key types.NamespacedName, ended home.Ended, now time.Time) {
	e.last[key] = endedPod{ended, now}
	e.order = append(e.order, endedKey{key, now})
}

// forgetLastLocked forgets where pods ended, except for those with a gated successor: it may wait for that very node.
func (e *ends) forgetLastLocked(now time.Time) {
	for len(e.order) > 0 && now.Sub(e.order[0].renewed) > home.Publishing {
		old := e.order[0]
		e.order = e.order[1:]
		l, ok := e.last[old.pod]
		if !ok || !l.renewed.Equal(old.renewed) {
			continue
		}
		if e.gated(old.pod) {
			l.renewed = now
			e.last[old.pod] = l
			e.order = append(e.order, endedKey{old.pod, now})
			continue
		}
		delete(e.last, old.pod)
	}
}

// ended returns where the predecessor of a pod was deleted.
func (e *ends) ended(pod types.NamespacedName) home.Ended {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last[pod].Ended
}

// releases follows the RetainedIPs: a node that releases its address is no longer a home, a node whose object was
// deleted still is.
func (e *ends) releases() cache.ResourceEventHandler {
	is := func(o any) { e.published(o, false) }
	return cache.ResourceEventHandlerFuncs{
		AddFunc: is, UpdateFunc: func(_, o any) { is(o) }, DeleteFunc: func(o any) { e.published(o, true) },
	}
}

func (e *ends) published(o any, deleted bool) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	r, ok := o.(*stayputv1alpha1.RetainedIP)
	if ok && deleted && home.Scheduled(r) {
		e.bound.Add(boundTo{r.Namespace, r.Spec.NodeName, home.Claimant(r)}, nil, boundKept)
	}
	if !ok || r.Spec.Identity != "" {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	key, now := types.NamespacedName{Namespace: r.Namespace, Name: r.Spec.PodName}, e.now()
	e.forgetLastLocked(now)
	was, known := e.last[key]
	ended := was.Ended
	if r.Spec.Release != "" && ended.Node == r.Spec.NodeName {
		ended.Node, ended.At, ended.Fresh = "", time.Time{}, false
	}
	ended.Vanished = slices.DeleteFunc(slices.Clone(ended.Vanished),
		func(v home.Vanished) bool { return v.Spec.NodeName == r.Spec.NodeName })
	if deleted {
		vanished := r.DeepCopy()
		vanished.DeletionTimestamp = nil
		if home.Keeps(vanished, now) && e.scheduled(vanished, nil) {
			ended.Vanished = append(ended.Vanished, home.Vanished{RetainedIP: vanished, At: now})
			e.rememberLocked(key, ended, now)
			return
		}
	}
	switch {
	case known && ended.Node == "" && len(ended.Vanished) == 0:
		delete(e.last, key)
	case known:
		e.last[key] = endedPod{ended, was.renewed}
	}
}

// scheduled reports whether what a RetainedIP is for was bound to its node: it says so, or the pod is there now, or it
// ended there lately, or an earlier RetainedIP of the same said so. pod may be nil.
func (e *ends) scheduled(r *stayputv1alpha1.RetainedIP, pod *corev1.Pod) bool {
	if home.Scheduled(r) || pod != nil && pod.Spec.NodeName == r.Spec.NodeName && home.Bound(pod) == home.Claimant(r) {
		return true
	}
	_, known := e.bound.Get(boundTo{r.Namespace, r.Spec.NodeName, home.Claimant(r)})
	return known
}
