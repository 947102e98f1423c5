package podip

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
)

// This file ends pods that have addresses, and no node. They never ran, and their controllers create them again.

// refusedMost is how long a pod that the scheduler has no room for keeps an address that other pods wait for: longer
// than most clusters take to add a node for it.
const refusedMost = 10 * time.Minute

// endBarren ends a pod if its successor may do better: it was kept from a node because that was lost, and the node is
// back, or no node has had room for it while other pods wait for its address. A pod that its home keeps from a node, as
// the annotation pinned says, is the placer's to end.
func (c *Claimer) endBarren(ctx context.Context, s *session, pod *corev1.Pod, known *pool.Pod) (*Claim, error) {
	if metav1.GetControllerOf(pod) == nil {
		return nil, nil
	}
	for _, a := range known.Assigned {
		c.mu.Lock()
		back := slices.Contains(s.book.Barren(a.Last), known.UID)
		c.unlock()
		if back && home.KeptFrom(pod, a.Last) && pod.Annotations[stayputv1alpha1.AnnotationPinned] == "" {
			return c.endUnscheduled(ctx, s, pod, known, nil, fmt.Sprintf(
				"node %s was lost when the pod was placed, and is back: the pod was deleted so that its successor may go there",
				a.Last))
		}
	}
	_, refused := home.Refused(pod)
	wanted, retry := s.takeBack(known, refused, c.now())
	switch {
	case retry > 0:
		return &Claim{Retry: retry}, nil
	case wanted == nil:
		return nil, nil
	}
	return c.endUnscheduled(ctx, s, pod, known, wanted, fmt.Sprintf("no node has had room for the pod for %s, and other "+
		"pods wait for an address of pool %s: the pod was deleted so that one of them gets %s, and its successor waits for "+
		"another", refusedMost, wanted.Pool, wanted.Prefix.Addr()))
}

// endUnscheduled ends a pod, and releases an address that is not nil. The order matters: a pod that is bound to a node
// by now keeps its address.
func (c *Claimer) endUnscheduled(ctx context.Context, s *session, pod *corev1.Pod, known *pool.Pod, a *pool.Address,
	why string) (*Claim, error) {
	plan := pool.Plan{Reason: why, Writes: []pool.Write{pool.EndPod{UID: known.UID, Namespace: known.Namespace,
		Name: known.Name, If: []pool.Check{{There: known}}}}}
	if a != nil {
		c.mu.Lock()
		if p := s.book.PodIP(a.Prefix.Addr()); p != nil && p.Keep != (pool.Keep{}) {
			released := *p
			released.Release = true
			plan.Writes = append(plan.Writes, pool.UpdateIP{PodIP: released})
		}
		c.unlock()
	}
	if err := c.carryOut(ctx, s, plan, c.now(), pod, gate.Placement{}); err != nil {
		return nil, err
	}
	return &Claim{Note: &Note{corev1.EventTypeNormal, home.ReasonAddressWait, why}}, nil
}

// takeBack returns the address that a pod without a node is to give to another pod, nil if there is none, and when to
// look again, zero if only once the pod has changed. It records whether the scheduler has no room for the pod.
func (s *session) takeBack(pod *pool.Pod, refused bool, now time.Time) (a *pool.Address, retry time.Duration) {
	s.c.mu.Lock()
	defer s.c.unlock()
	if !refused {
		delete(s.refused, pod.UID)
		return nil, 0
	}
	since, noted := s.refused[pod.UID]
	if !noted {
		since = now
		s.refused[pod.UID] = now
	}
	if left := refusedMost - now.Sub(since); left > 0 {
		return nil, left
	}
	for i, a := range pod.Assigned {
		if !s.isWantedLocked(pod, a, now) {
			continue
		}
		// A pool takes back one address at a time: the pod that waits has it before the next one.
		if left := s.tookBack[a.Pool].Add(ordinaryWait).Sub(now); left > 0 {
			return nil, left
		}
		s.tookBack[a.Pool] = now
		return &pod.Assigned[i], 0
	}
	return nil, cluster.SayAgainAfter
}

// isWantedLocked reports whether other pods wait for a pod's address, and nothing promises it to this one: no pod has
// had it, or it has no retention.
func (s *session) isWantedLocked(pod *pool.Pod, a pool.Address, now time.Time) bool {
	p := s.book.PodIP(a.Prefix.Addr())
	if p == nil || p.PodUID != pod.UID || a.Last != "" && p.Keep != (pool.Keep{}) {
		return false
	}
	return s.book.Count(a.Pool, now).Free == 0 && len(s.book.Waiting(a.Pool)) > 0
}
