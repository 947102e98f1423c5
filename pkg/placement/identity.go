package placement

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// assignments are the addresses of shared identities that are assigned to pods.
type assignments struct {
	mu sync.Mutex
	// pods has the pod that each address is assigned to; holds has the same by pod. An assignment outlasts the pod's
	// binding, since only later does the node publish that the address is bound. Lost with the process: two pods may be
	// pinned to one address, and one of them gets another.
	pods  map[types.NamespacedName]types.UID
	holds map[types.UID]*stayputv1alpha1.RetainedIP
	// full are the homes that had no room for pods of a shared identity, whose successors have other names, since when.
	// Lost with the process: the next pod that gets an address there waits in vain once more.
	full map[sharedHome]time.Time
}

func newAssignments() *assignments {
	return &assignments{pods: map[types.NamespacedName]types.UID{}, holds: map[types.UID]*stayputv1alpha1.RetainedIP{},
		full: map[sharedHome]time.Time{}}
}

// sharedHome is a home of a shared identity.
type sharedHome struct{ namespace, identity, home string }

// assign returns an address that pods of a shared identity have left and that is not assigned to another pod, nil if
// there is none. A pod that has an address keeps it. An address whose home had no room lately is the last choice; full
// reports that it was chosen.
func (a *assignments) assign(pod *corev1.Pod, kept []*stayputv1alpha1.RetainedIP, now time.Time) (
	free *stayputv1alpha1.RetainedIP, full bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range kept {
		if !home.Keeps(r, now) {
			continue
		}
		since, wasFull := a.full[sharedHome{r.Namespace, r.Spec.Identity, home.NodeHome(r.Spec.NodeName)}]
		wasFull = wasFull && now.Sub(since) <= succession
		owner, taken := a.pods[client.ObjectKeyFromObject(r)]
		switch {
		case taken && owner != pod.UID:
		case taken && (!wasFull || !home.Gated(pod)):
			return r, wasFull
		case free == nil || full && !wasFull,
			full == wasFull && home.LastBound(r, now).After(home.LastBound(free, now)):
			free, full = r, wasFull
		}
	}
	a.unassignLocked(pod.UID)
	if free != nil {
		key := client.ObjectKeyFromObject(free)
		a.pods[key], a.holds[pod.UID] = pod.UID, free
	}
	return free, full
}

// unassignLocked forgets what a pod was assigned.
func (a *assignments) unassignLocked(pod types.UID) {
	if r := a.holds[pod]; r != nil {
		delete(a.pods, client.ObjectKeyFromObject(r))
		delete(a.holds, pod)
	}
}

// mayTake reports whether a pod may have or get the addresses of a RetainedIP that it was assigned.
func mayTake(pod *corev1.Pod, r *stayputv1alpha1.RetainedIP) bool {
	return pod.DeletionTimestamp.IsZero() && pod.Status.Phase != corev1.PodSucceeded &&
		pod.Status.Phase != corev1.PodFailed &&
		(pod.Spec.NodeName == "" || pod.Spec.NodeName == r.Spec.NodeName) &&
		(pod.Status.PodIP == "" || slices.Contains(r.Status.IPs, pod.Status.PodIP))
}

// unassign forgets what a pod was assigned.
func (a *assignments) unassign(pod types.UID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unassignLocked(pod)
}

// seen forgets what a pod was assigned once it may not take it any more.
func (a *assignments) seen(pod *corev1.Pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.holds[pod.UID]; r != nil && !mayTake(pod, r) {
		a.unassignLocked(pod.UID)
	}
}

// remembers reports whether a pod is assigned an address.
func (a *assignments) remembers(pod types.UID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.holds[pod] != nil
}

// fills notes that a home had no room for a pod of an identity.
func (a *assignments) fills(home sharedHome, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.full, func(_ sharedHome, since time.Time) bool { return now.Sub(since) > succession })
	a.full[home] = now
}

// empties forgets what fills noted.
func (a *assignments) empties(home sharedHome) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.full, home)
}
