package podip

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/pkg/retention"
)

// This file serves the loop that places pods: which addresses a pod gets, and what it waits for.

// ErrUnknown says that it is not known yet whether a pod asks for addresses of pools: these have not been read. The pod
// is woken once they have.
var ErrUnknown = errors.New("pools and the defaults of namespaces have not been read yet")

// Claimer claims addresses of pools for pods. Its methods are safe for concurrent use.
type Claimer struct {
	*writer
	cache client.Reader // has Pods
}

// Pods delivers the pods that are to be placed because what they wait for in pools has changed.
func (c *Claimer) Pods() source.Source {
	return source.Func(func(_ context.Context, q podQueue) error {
		c.mu.Lock()
		defer c.unlock()
		c.pods = q
		c.wakeAllLocked()
		return nil
	})
}

// Claim is what pools have for a pod: the addresses that it gets, or why it waits. Either [Claim.CarryOut] or
// [Claim.Drop] ends it.
type Claim struct {
	c       *Claimer
	session *session
	plan    pool.Plan
	at      time.Time
	gated   *wait // since when only our gate has held the pod, nil if that is not so
	// Ready reports whether the pod can have its addresses now.
	Ready bool
	// Last is the node on which the first of the addresses was used last, empty if that is not known.
	Last string
	// Note is what people are to know of a pod that waits, nil if it is nothing, or too early.
	Note *Note
	// Retry is when to claim again, zero if only once the pod is woken.
	Retry time.Duration
}

// Note is an Event about a pod.
type Note struct{ Kind, Reason, Text string }

// waits is the Claim of a pod that waits and must be changed, or its cluster.
func waits(reason, text string) *Claim {
	return &Claim{Note: &Note{corev1.EventTypeWarning, reason, text}}
}

// Claim decides which addresses of pools a pod gets. The Claim is nil only if the pod asks for none, or is not gated
// and nothing is to be done about it. A gated pod must not be placed after an error.
func (c *Claimer) Claim(ctx context.Context, pod *cluster.Pod) (*Claim, error) {
	if c == nil {
		return nil, nil
	}
	core := pod.Core()
	gated := home.Gated(core)
	if gated {
		asks, err := c.asks(ctx, core)
		if err != nil || !asks {
			return nil, err
		}
		if why := c.lacking(); why != "" {
			return waits(home.ReasonAddressWait, why), nil
		}
	}
	s, known, problem := c.observe(ctx, pod)
	switch {
	case gated && problem != nil:
		return waits(home.ReasonInvalidAnnotation, problem.Error()), nil
	case known == nil, known.Ending, known.Terminal:
		if gated { // it is woken once there is a Book, or its end is seen
			return &Claim{}, nil
		}
		return nil, nil
	case !gated && known.Assigned != nil && known.Node == "":
		return c.endBarren(ctx, s, core, known)
	case !gated && (known.Assigned != nil || known.Node == ""): // the scheduler does not wait for the controller
		return nil, nil
	case problem != nil:
		return waits(home.ReasonInvalidAnnotation, problem.Error()), nil
	case !gated && static(core):
		return waits(home.ReasonInvalidAnnotation,
			"static pods cannot have addresses of pools, because their node starts them without the API server"), nil
	}
	if err := c.findDeployment(ctx, s, known); err != nil {
		return nil, err
	}
	return c.plan(ctx, s, core)
}

// asks reports whether a gated pod asks for addresses of pools. Without an annotation of its own it asks for none only
// if its namespace, read past the cache, has no default: the watch of namespaces may be behind that of pods.
func (c *Claimer) asks(ctx context.Context, pod *corev1.Pod) (bool, error) {
	if pod.Spec.HostNetwork {
		return false, nil
	}
	asks, byDefault, err := c.asksByCache(pod)
	if asks || !byDefault || err != nil {
		return asks, err
	}
	o := metadata("Namespace")
	switch err := c.live.Get(ctx, types.NamespacedName{Name: pod.Namespace}, o); {
	case apierrors.IsNotFound(err): // the pod is deleted with it
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading the default of namespace %s: %w", pod.Namespace, err)
	}
	c.mu.Lock()
	defer c.unlock()
	current := namespace{o.GetLabels(), pool.OfNamespace(o.GetAnnotations())}
	if asks = pool.AsksByDefault(current.asks, c.words == serving); asks && c.session != nil {
		c.setNamespaceLocked(c.session, pod.Namespace, current)
	}
	return asks, nil
}

// asksByCache is asks by the cache, and reports whether the default of the pod's namespace decides. A pod that is known
// and asks no longer waits for nothing.
func (c *Claimer) asksByCache(pod *corev1.Pod) (asks, byDefault bool, err error) {
	c.mu.Lock()
	defer c.unlock()
	spiderpool := c.words == serving
	asks, decides := pool.AsksItself(pod.Annotations, spiderpool)
	switch {
	case decides:
	case c.unknownLocked():
		c.unanswered[client.ObjectKeyFromObject(pod)] = struct{}{}
		return false, true, ErrUnknown
	case c.served == serving:
		asks, byDefault = pool.AsksByDefault(c.namespaces[pod.Namespace].asks, spiderpool), true
	}
	if s := c.session; !asks && s != nil && s.book.Pod(pod.UID) != nil {
		s.book.StopWaiting(pod.UID)
	}
	return asks, byDefault, nil
}

// lacking says why there can be no addresses at all, empty if there can.
func (c *Claimer) lacking() string {
	c.mu.Lock()
	defer c.unlock()
	switch c.served {
	case off:
		return "it requests pool addresses, but the cluster has no PodIPPools: install stayput with pools.enabled"
	case idle:
		return "it requests pool addresses, but there is no PodIPPool"
	}
	return ""
}

// observe puts a pod in as the cache has it, and returns what is known of it then and what of its annotations is not
// valid. The session is nil if nothing can be decided yet.
func (c *Claimer) observe(ctx context.Context, pod *cluster.Pod) (s *session, known *pool.Pod, problem error) {
	uid := pod.GetUID()
	c.mu.Lock()
	s = c.session
	if s == nil || !s.ready || s.book.Stale() {
		c.unlock()
		return nil, nil, nil
	}
	unseen := s.book.Pod(uid) == nil
	s.setPodLocked(pod, false)
	known, problem = s.book.Pod(uid), s.invalid[uid]
	c.unlock()
	if !unseen || known == nil {
		return s, known, problem
	}
	current, err := cluster.PodNamed(ctx, c.cache, c.live, client.ObjectKeyFromObject(pod))
	if err == nil && (current == nil || current.UID != pod.UID) { // its end was seen before
		s.removePod(uid, "", "")
		return s, nil, nil
	}
	return s, known, problem
}

// plan claims the addresses of a pod. What else is due, such as to ask the nodes, is done at once.
func (c *Claimer) plan(ctx context.Context, s *session, pod *corev1.Pod) (*Claim, error) {
	uid, gated := pod.UID, home.Gated(pod)
	claim := &Claim{c: c, session: s, at: c.now()}
	var node map[string]string
	var err error
	if !gated {
		if node, err = c.labelsOf(ctx, pod.Spec.NodeName); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	plan := s.book.PlaceOn(uid, node, claim.at)
	if claim.gated = s.gated[uid]; claim.gated != nil && plan.Reason != "" {
		claim.gated.waited = true
	}
	c.unlock()
	claim.plan, claim.Retry = plan, until(plan, claim.at)
	if plan.Reason == "" {
		claim.Ready, claim.Last = len(plan.Writes) > 0, lastOf(plan)
		return claim, nil
	}
	claim.Retry = sooner(claim.Retry, cluster.SayAgainAfter)
	if left := ordinaryWait - claim.at.Sub(pod.CreationTimestamp.Time); plan.Remedy != "" || left <= 0 {
		claim.Note = noteOf(plan)
	} else {
		claim.Retry = sooner(claim.Retry, min(left, ordinaryWait))
	}
	return claim, c.carryOut(ctx, s, plan, claim.at, pod, gate.Placement{})
}

// labelsOf returns the labels of a node, none if it does not exist.
func (c *Claimer) labelsOf(ctx context.Context, name string) (map[string]string, error) {
	node := corev1.Node{}
	if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &node); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading node %s: %w", name, err)
	}
	if node.Labels == nil {
		return map[string]string{}, nil
	}
	return node.Labels, nil
}

// lastOf returns the node on which the first of the addresses that a plan gives was used last.
func lastOf(plan pool.Plan) string {
	for _, w := range plan.Writes {
		if place, ok := w.(pool.PlacePod); ok {
			for _, a := range place.Addresses {
				if a.Last != "" {
					return a.Last
				}
			}
		}
	}
	return ""
}

// noteOf says why a pod waits.
func noteOf(plan pool.Plan) *Note {
	note := &Note{corev1.EventTypeNormal, home.ReasonAddressWait, "the pod waits for an address: " + plan.Reason}
	if plan.Remedy != "" {
		note.Kind, note.Text = corev1.EventTypeWarning, note.Text+": "+plan.Remedy
	}
	return note
}

// CarryOut claims the addresses and tells the pod, in one patch with all else that it is given. After an error for
// which [Changed] is true, claim again.
func (l *Claim) CarryOut(ctx context.Context, pod *corev1.Pod, to gate.Placement) error {
	if err := l.c.carryOut(ctx, l.session, l.plan, l.at, pod, to); err != nil {
		return err
	}
	l.c.metrics.observeGate(l.gated)
	l.c.sayClamped(pod)
	log.FromContext(ctx).Info("Gave pod its addresses", "pod", client.ObjectKeyFromObject(pod))
	return nil
}

// Drop gives back what was claimed.
func (l *Claim) Drop() {
	if l != nil && l.Ready {
		l.session.unreserve(l.plan.Writes)
	}
}

// Changed reports whether a write failed because what it was decided on has changed.
func Changed(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) ||
		errors.Is(err, pool.ErrStale) || errors.Is(err, errExpired)
}

// sayClamped reports on a pod that asks for a longer retention than there is, as the agents do for addresses of nodes.
func (c *Claimer) sayClamped(pod *corev1.Pod) {
	asked, _, err := retention.Parse(pod.Annotations)
	if given, clamped := asked.Clamp(c.longest); err == nil && clamped && !asked.WhileOwned {
		c.events.Eventf(pod, nil, corev1.EventTypeNormal, home.ReasonRetentionClamped, "Retaining",
			"retention %s exceeds the maximum, %s", asked.Duration(), given.Duration())
	}
}

// findDeployment has the addresses of a pod belong to the Deployment of its ReplicaSet, which outlives that.
func (c *Claimer) findDeployment(ctx context.Context, s *session, p *pool.Pod) error {
	if p.Workload.Kind != "ReplicaSet" || p.Keep == (pool.Keep{}) {
		return nil
	}
	set := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: p.Workload.APIVersion, Kind: "ReplicaSet"}}
	err := c.live.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: p.Workload.Name}, set)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	owner := metav1.GetControllerOf(set)
	if owner == nil || string(set.UID) != p.Workload.UID { // or the pod is another one's, whatever it says
		return nil
	}
	kept := cluster.OwnerOf(owner)
	above := pool.Workload{APIVersion: kept.APIVersion, Kind: kept.Kind, Name: kept.Name, UID: string(kept.UID)}
	c.mu.Lock()
	defer c.unlock()
	c.above.Add(ownerOf(p), above, aboveKept)
	if is := s.book.Pod(p.UID); is != nil {
		again := *is
		again.Workload = above
		s.book.SetPod(again)
	}
	return nil
}

// ordinaryWait is how long the controller writes no Event and no status about a wait that is as a rule soon over: a pod
// that is replaced waits until the node of its predecessor has reported that the predecessor is gone, and the address
// is unassigned for a moment. Two Events and two statuses for each such pod would cost more than its address.
const ordinaryWait = 5 * time.Second
