package placement

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/placement/podip"
	"github.com/stayput/stayput/pkg/placement/podstate"
)

// placementWorkers is how many pods are placed at a time: placing one is a write, which waits for etcd's disk.
const placementWorkers = 32

// placer decides where gated pods go. It follows a pod from its creation to its binding.
type placer struct {
	client  client.Client
	cache   client.Reader // has Pods
	live    client.Reader // past the cache
	cached  func() bool   // whether the cache has the RetainedIPs
	records *podstate.Records
	memory  *memory
	events  events.EventRecorder
	metrics *placementMetrics
	now     func() time.Time
	// nominates says that the controller may nominate nodes for pods.
	nominates bool
	// pools has the addresses of pools, nil if there are none.
	pools *podip.Claimer
	// uninstalling reports whether stayput is being uninstalled: then no pod waits.
	uninstalling func() bool
	// lag is until a pod is placed again that has changed: ever longer, since an API server that was away needs seconds
	// until its watches bring what has changed meanwhile.
	lag workqueue.TypedRateLimiter[reconcile.Request]
}

func (p *placer) setUp(mgr ctrl.Manager) error {
	b := ctrl.NewControllerManagedBy(mgr).
		Named("placement").
		WatchesRawSource(source.Func(p.enqueueUndecided)).
		WatchesRawSource(p.pools.Pods()).
		WatchesRawSource(whenSynced{source.Kind[client.Object](mgr.GetCache(), &cluster.Pod{},
			&handler.EnqueueRequestForObject{}, undecidedPods)}).
		Watches(&corev1.Node{}, p.ofNodes(), builder.WithPredicates(nodeMoved)).
		WatchesRawSource(whenSynced{source.Kind[client.Object](mgr.GetCache(), &stayputv1alpha1.RetainedIP{},
			handler.EnqueueRequestsFromMapFunc(p.waitingIn), homeGoes)}).
		WithOptions(controller.Options{MaxConcurrentReconciles: placementWorkers,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](5*time.Millisecond,
				cluster.LongestRetry)})
	if p.records != nil {
		b = b.Watches(&kruisev1alpha1.PersistentPodState{}, handler.EnqueueRequestsFromMapFunc(p.waitingIn),
			builder.WithPredicates(homeGoes))
	}
	return b.Complete(p)
}

// whenSynced is a source for which the controller does not wait: its events begin once the cache has its objects, one
// for each of them.
type whenSynced struct{ source.Source }

// podsUndecided is an index of pods.
const podsUndecided = "undecided"

func indexUndecided(ctx context.Context, indexer client.FieldIndexer) error {
	return indexer.IndexField(ctx, &cluster.Pod{}, podsUndecided, func(o client.Object) []string {
		if undecided(o) {
			return []string{"true"}
		}
		return nil
	})
}

// enqueueUndecided enqueues the pods that wait when this replica begins to lead, so that they need not wait for the
// events of all others.
func (p *placer) enqueueUndecided(ctx context.Context,
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	var list cluster.PodList
	if err := p.cache.List(ctx, &list, client.MatchingFields{podsUndecided: "true"}); err != nil {
		return fmt.Errorf("listing waiting pods: %w", err)
	}
	for i := range list.Items {
		queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return nil
}

// ofNodes enqueues the pods whose wait a change of a node can end.
func (p *placer) ofNodes() handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	changed := func(ctx context.Context, was, is client.Object, q queue) {
		before, _ := was.(*corev1.Node)
		after, _ := is.(*corev1.Node)
		for _, key := range p.waitEnded(ctx, before, after) {
			q.Add(reconcile.Request{NamespacedName: key})
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { changed(ctx, nil, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { changed(ctx, e.ObjectOld, e.ObjectNew, q) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { changed(ctx, e.Object, nil, q) },
	}
}

// waitEnded returns the pods whose wait the change of a node may have ended: those that wait for this very node, and of
// those that wait for any of several, such as a zone's, the ones for which this one makes a difference. The others need
// not look at the whole zone again. was or is is nil if there was, or is, no such node.
func (p *placer) waitEnded(ctx context.Context, was, is *corev1.Node) (all []types.NamespacedName) {
	of := map[string]struct{}{}
	for _, node := range []*corev1.Node{was, is} {
		if node != nil {
			all = p.memory.waitingFor(node.Name)
			for _, label := range cluster.NodeLabels(node) {
				of[label] = struct{}{}
			}
		}
	}
	with := func(node *corev1.Node, label string) *corev1.Node {
		if node != nil && slices.Contains(cluster.NodeLabels(node), label) {
			return node
		}
		return nil
	}
	for label := range of {
		for _, key := range p.memory.waitingFor(label) {
			var pod cluster.Pod
			err := p.cache.Get(ctx, key, &pod)
			if err != nil || home.EndsWait(with(was, label), with(is, label), pod.Core()) {
				all = append(all, key)
			}
		}
	}
	return all
}

// waitingIn returns the pods that wait in the namespace of an object.
func (p *placer) waitingIn(_ context.Context, o client.Object) []reconcile.Request {
	return p.memory.waitingIn(o.GetNamespace())
}

// homeGoes picks the changes that can end a wait early: a home that is released, deleted or recorded again.
var homeGoes = predicate.Funcs{
	CreateFunc: func(event.CreateEvent) bool { return false },
	UpdateFunc: func(e event.UpdateEvent) bool { return e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() },
}

// undecided reports whether a pod has no node and is, or was, ours to place.
func undecided(o client.Object) bool {
	p, ok := o.(*cluster.Pod)
	if !ok || p.Node() != "" {
		return false
	}
	return p.Gated() || p.Pinned()
}

// undecidedPods includes the change by which a pod becomes decided.
var undecidedPods = predicate.Funcs{
	CreateFunc:  func(e event.CreateEvent) bool { return undecided(e.Object) },
	UpdateFunc:  func(e event.UpdateEvent) bool { return undecided(e.ObjectOld) || undecided(e.ObjectNew) },
	DeleteFunc:  func(e event.DeleteEvent) bool { return undecided(e.Object) },
	GenericFunc: func(event.GenericEvent) bool { return false },
}

// nodeMoved picks the changes of a node that can decide whether it takes a pod, not its heartbeats.
var nodeMoved = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	was, okWas := e.ObjectOld.(*corev1.Node)
	is, okIs := e.ObjectNew.(*corev1.Node)
	return !okWas || !okIs || home.NodeReady(was) != home.NodeReady(is) ||
		was.Spec.Unschedulable != is.Spec.Unschedulable || was.DeletionTimestamp.IsZero() != is.DeletionTimestamp.IsZero() ||
		!slices.EqualFunc(was.Spec.Taints, is.Spec.Taints,
			func(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }) ||
		!labels.Equals(was.Labels, is.Labels)
}}

// longestLag is the longest pause between two tries: the watch that brings the change triggers a try at once.
const longestLag = time.Second

// refusedAgain is the longest pause before a pod is tried again that the API server refuses with its home.
const refusedAgain = 10 * time.Second

// newLag returns the pauses before a pod is placed again that has changed.
func newLag() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](cluster.CacheLag, longestLag)
}

// Reconcile places one pod. What fails is tried again, and said once it has failed for a while.
func (p *placer) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	result, err := p.reconcile(ctx, req)
	if err == nil {
		p.memory.succeeds(req.NamespacedName)
		p.lag.Forget(req)
		return result, nil
	}
	p.sayFailure(ctx, req.NamespacedName, err)
	switch {
	case errors.Is(err, podip.ErrUnknown): // it is woken once that is known, and else to say so
		return reconcile.Result{RequeueAfter: cluster.SayFailureAfter}, nil
	case gate.Refused(err) && result.RequeueAfter > 0: // until then it is tried with its home
		return reconcile.Result{RequeueAfter: min(result.RequeueAfter, refusedAgain)}, nil
	case podip.Changed(err): // another pod by now, or a changed one
		log.FromContext(ctx).V(1).Info("Pod changed, retrying its placement", "pod", req, "err", err)
		return reconcile.Result{RequeueAfter: p.lag.When(req)}, nil
	}
	return reconcile.Result{}, err
}

// sayFailure reports on a gated pod that it cannot be placed, if that has lasted.
func (p *placer) sayFailure(ctx context.Context, key types.NamespacedName, err error) {
	var cached cluster.Pod
	if p.cache.Get(ctx, key, &cached) != nil || !undecided(&cached) {
		return // without the pod there is none to tell, and what failed is logged
	}
	pod := cached.Brief()
	if lasts := p.memory.fails(pod); lasts >= cluster.SayFailureAfter {
		p.say(pod, corev1.EventTypeWarning, home.ReasonNotPlaced, cluster.NotPlaced(err))
	}
}

func (p *placer) reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var cached cluster.Pod
	if err := p.cache.Get(ctx, req.NamespacedName, &cached); err != nil {
		p.memory.decided(req.NamespacedName)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	pod := cached.Core()
	if p.memory.WasUngated(pod) {
		return reconcile.Result{}, nil // the cache is behind
	}
	if p.uninstalling() {
		return reconcile.Result{}, p.ungate(ctx, pod)
	}
	if home.Gated(pod) && !home.LastGate(pod) {
		return reconcile.Result{}, nil // the end of another gate wakes it
	}
	if !pod.DeletionTimestamp.IsZero() {
		p.memory.decided(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	claim, err := p.pools.Claim(ctx, &cached)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("claiming addresses of pools for pod %s: %w", req, err)
	}
	if claim != nil && claim.Note != nil {
		p.say(pod, claim.Note.Kind, claim.Note.Reason, claim.Note.Text)
	}
	switch {
	case !undecided(&cached):
		p.memory.decided(req.NamespacedName)
		return p.give(ctx, pod, claim)
	case claim != nil && !claim.Ready:
		p.memory.waitsForAddress(pod)
		return reconcile.Result{RequeueAfter: claim.Retry}, nil
	case claim == nil && cached.TooLong():
		return reconcile.Result{}, p.ungateTooLong(ctx, pod)
	}
	return p.decide(ctx, pod, claim)
}

// give gives a pod that is not gated the addresses that it lacks.
func (p *placer) give(ctx context.Context, pod *corev1.Pod, claim *podip.Claim) (reconcile.Result, error) {
	switch {
	case claim == nil:
		return reconcile.Result{}, nil
	case !claim.Ready:
		return reconcile.Result{RequeueAfter: claim.Retry}, nil
	}
	return reconcile.Result{}, claim.CarryOut(ctx, pod, gate.Placement{})
}

// decide does what the rules say of a pod that waits for its placement, which gets what it claims of pools in the same
// write. claim is nil if it asks for no address of a pool.
func (p *placer) decide(ctx context.Context, pod *corev1.Pod, claim *podip.Claim) (reconcile.Result, error) {
	req := client.ObjectKeyFromObject(pod)
	nodes := cluster.NewNodes(ctx, p.client)
	s, err := p.situation(ctx, pod, nodes, claim)
	if err != nil {
		claim.Drop()
		return reconcile.Result{}, fmt.Errorf("looking up the home of pod %s: %w", req, err)
	}
	d := home.Decide(s)
	if nodes.Err != nil {
		claim.Drop()
		return reconcile.Result{}, fmt.Errorf("looking up the nodes for pod %s: %w", req, nodes.Err)
	}
	for _, note := range d.Notes {
		p.say(pod, corev1.EventTypeWarning, home.ReasonHomeIgnored, note)
	}
	switch {
	case d.Outcome == home.OutcomeWait:
		claim.Drop()
		p.wait(pod, d)
	case d.Outcome == home.OutcomeEvict:
		err = p.evict(ctx, pod, d)
	case home.Gated(pod):
		if err = p.place(ctx, pod, s, d, claim); err != nil && d.Patience > 0 && !d.Affinity.Empty() {
			d.Retry = d.Patience // then it may go without its home
		}
	}
	if d.Outcome == home.OutcomeWait && (d.Retry == 0 || d.Retry > cluster.SayAgainAfter) {
		d.Retry = cluster.SayAgainAfter
	}
	return reconcile.Result{RequeueAfter: d.Retry}, err
}

// ungateTooLong ungates a pod of which the caches do not keep what decides where it may go.
func (p *placer) ungateTooLong(ctx context.Context, pod *corev1.Pod) error {
	if !home.Gated(pod) {
		return nil
	}
	if err := p.ungate(ctx, pod); err != nil {
		return err
	}
	p.say(pod, corev1.EventTypeWarning, home.ReasonPodTooLong, cluster.TooLongNote+
		": the pod was ungated without its home")
	return nil
}

// ungate removes the gate of a pod, if it has one, and gives it nothing.
func (p *placer) ungate(ctx context.Context, pod *corev1.Pod) error {
	if !home.Gated(pod) {
		return nil
	}
	if err := gate.Remove(ctx, p.client, pod); err != nil {
		return fmt.Errorf("ungating pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	p.memory.Ungated(pod)
	p.memory.decided(client.ObjectKeyFromObject(pod))
	return nil
}

// situation gathers what the placement of a pod depends on. An address of a pool belongs to the pod on any node: only
// the annotation stayput.io/home has the pod go where it was last.
func (p *placer) situation(ctx context.Context, pod *corev1.Pod, nodes home.Nodes, claim *podip.Claim) (
	home.Situation, error) {
	s := home.Situation{Now: p.now(), Pod: pod, GivenUp: p.memory.gaveUp(pod), Since: p.memory.waitsSince(pod),
		Waited: p.memory.waited(pod), Rejections: p.memory.rejectionsOf(pod), Pooled: claim != nil, Nodes: nodes}
	_, pooled := pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	_, pulled := pod.Annotations[stayputv1alpha1.AnnotationHome]
	var err error
	switch {
	case claim != nil && pulled:
		s.Address.Node = claim.Last
	case claim == nil && home.Annotated(pod.Annotations) && !pooled:
		err = p.findAddress(ctx, &s)
	}
	if err != nil {
		return s, err
	}
	s.Record, err = p.records.Of(ctx, pod)
	return s, err
}

// findAddress finds the node that keeps the addresses of a pod.
func (p *placer) findAddress(ctx context.Context, s *home.Situation) error {
	identity := s.Pod.Annotations[stayputv1alpha1.AnnotationIdentity]
	field := client.MatchingFields{retainedByPod: s.Pod.Name}
	if identity != "" {
		field = client.MatchingFields{retainedByIdentity: identity}
	}
	list, err := p.retained(ctx, s.Pod.Namespace, field)
	if err != nil {
		return err
	}
	var kept []*stayputv1alpha1.RetainedIP
	for i := range list.Items {
		// A pod of that name may have shared some.
		if r := &list.Items[i]; r.Spec.Identity == identity && p.memory.scheduled(r, nil) {
			kept = append(kept, r)
		}
	}
	if identity != "" {
		kept = slices.DeleteFunc(kept, func(r *stayputv1alpha1.RetainedIP) bool { return !p.left(ctx, r, s.Nodes) })
		assigned, full := p.memory.assign(s.Pod, kept, s.Now)
		s.Address, s.GivenUp = home.AddressIn(assigned, s.Pod), s.GivenUp || full
	} else {
		s.Address = home.AddressOf(s.Pod, kept, p.memory.ended(client.ObjectKeyFromObject(s.Pod)), s.Nodes, s.Now)
	}
	return nil
}

// left reports whether the pod that had addresses has left them: their node says so, or is about to, since the pod has
// ended or is gone. A Deployment makes the next pod that soon. If the pod's sandbox outlives it, the next one gets
// another address there.
func (p *placer) left(ctx context.Context, r *stayputv1alpha1.RetainedIP, nodes home.Nodes) bool {
	if r.Status.Phase == stayputv1alpha1.PhaseRetained {
		return true
	}
	node := nodes.Node(r.Spec.NodeName)
	if r.Status.Phase != stayputv1alpha1.PhaseBound || node == nil || !home.NodeReady(node) {
		return false
	}
	pod, err := cluster.PodNamed(ctx, p.cache, p.live, types.NamespacedName{Namespace: r.Namespace, Name: r.Spec.PodName})
	if err != nil || pod == nil {
		return err == nil
	}
	phase := pod.Brief().Status.Phase
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed ||
		r.Status.PodUID != "" && string(pod.UID) != r.Status.PodUID
}

// retained lists RetainedIPs by a field of the cache's indexes: from the cache if it has them, else from the API
// server, which can select by the same fields, so that no pod waits until all are read.
func (p *placer) retained(ctx context.Context, namespace string, field client.MatchingFields) (
	list stayputv1alpha1.RetainedIPList, err error) {
	if !p.cached() {
		err = p.live.List(ctx, &list, client.InNamespace(namespace), field)
		return list, err
	}
	err = p.client.List(ctx, &list, client.InNamespace(namespace), field, client.UnsafeDisableDeepCopy)
	return list, err
}

// wait reports once that a pod waits, and why. A change of what it waits for wakes it.
func (p *placer) wait(pod *corev1.Pod, d home.Decision) {
	at := d.Node
	if at == "" {
		for _, key := range slices.Sorted(maps.Keys(d.Labels)) {
			at = cluster.NodeLabel(key, d.Labels)
		}
	}
	news := p.memory.waits(pod, d.Home, at, d.Reason)
	if p.memory.first(pod, home.ReasonHomeWait+d.Home+d.Reason) || news {
		until := "until it can"
		if d.Retry > 0 {
			until = "at most " + duration.HumanDuration(d.Retry.Round(time.Second))
		}
		regarding(p.events, pod, corev1.EventTypeNormal, home.ReasonHomeWait,
			fmt.Sprintf("its home, %s, %s: the pod waits %s", d.Home, d.Reason, until))
	}
}

// place pins a gated pod to where it was decided to go, gives it what it claims of pools, and ungates it.
func (p *placer) place(ctx context.Context, pod *corev1.Pod, s home.Situation, d home.Decision,
	claim *podip.Claim) error {
	var homeless error
	to := placement(s.Record, d)
	to.Missing = func(part gate.Part, why error) {
		if part == gate.PartHome {
			homeless = why
			return
		}
		p.say(pod, corev1.EventTypeWarning, home.ReasonNotPassedOn, fmt.Sprintf("PersistentPodState %s: the pod "+
			"starts without the annotations of its predecessor, because the API server rejects it with them: %s",
			s.Record.Object.Name, why))
	}
	var err error
	if claim == nil { // else it would be a write of its own, which the addresses are not bound to
		if pod, err = p.nominate(ctx, pod, d.Nominate); err != nil {
			return fmt.Errorf("nominating node %s for pod %s/%s: %w", d.Nominate, pod.Namespace, pod.Name, err)
		}
		err = gate.Place(ctx, p.client, pod, to)
	} else {
		d.Nominate, s.Address = "", home.Address{}
		err = claim.CarryOut(ctx, pod, to)
	}
	if err != nil {
		return fmt.Errorf("placing pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	if homeless != nil {
		d.Home = cmp.Or(d.Home, to.Pinned)
		d.Outcome, d.Reason = home.OutcomeElsewhere, "cannot be in the pod's node affinity: "+homeless.Error()
	}
	p.placed(ctx, pod, s, d)
	return nil
}

// placed notes that a pod was placed, and tells its owner what that means.
func (p *placer) placed(ctx context.Context, pod *corev1.Pod, s home.Situation, d home.Decision) {
	p.memory.Ungated(pod)
	p.metrics.placed(d.Outcome, p.now().Sub(s.Since), s.Waited != "")
	if d.Lost != "" {
		to := "anywhere"
		if d.Outcome == home.OutcomeHome {
			to = "to " + d.Home
		}
		p.say(pod, corev1.EventTypeWarning, home.ReasonHomeGivenUp,
			fmt.Sprintf("%s, for which it waited, is no longer its home: the pod goes %s", d.Lost, to))
	}
	if d.Outcome == home.OutcomeElsewhere {
		note := fmt.Sprintf("its home, %s, %s: the pod goes elsewhere", d.Home, d.Reason)
		if d.Nominate != "" {
			note += " unless there is room by then"
		}
		if s.Address.Node != "" {
			note += "; its address there still expires as scheduled"
		}
		p.say(pod, corev1.EventTypeWarning, home.ReasonHomeGivenUp, note)
	}
	p.memory.decided(client.ObjectKeyFromObject(pod))
	log.FromContext(ctx).Info("Placed pod", "outcome", d.Outcome, "home", d.Home, "reason", d.Reason)
}

// placement returns what a pod is given by a decision.
func placement(r *home.Record, d home.Decision) gate.Placement {
	to := gate.Placement{Home: d.Affinity, HomeOptional: d.Patience <= 0, Recorded: r.Annotations()}
	switch {
	case d.Affinity.Requires():
		to.Pinned = d.Home
	case len(d.Affinity.Without) > 0:
		// If the scheduler finds no room elsewhere, as when that node has come back, it counts again.
		to.Pinned = home.NotNodes(d.Affinity.Without)
	}
	return to
}

// nominate asks the scheduler to try a node first, if that is allowed. Once the scheduler has tried, the nomination is
// gone. nominate returns the pod as it is after the patch.
func (p *placer) nominate(ctx context.Context, pod *corev1.Pod, node string) (*corev1.Pod, error) {
	if node == "" || !p.nominates || pod.Status.NominatedNodeName == node {
		return pod, nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": pod.ResourceVersion},
		"status":   map[string]any{"nominatedNodeName": node},
	})
	if err != nil {
		return pod, err
	}
	nominated := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}
	err = p.client.Status().Patch(ctx, nominated, client.RawPatch(types.MergePatchType, patch),
		client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
	if apierrors.IsForbidden(err) { // the pod is ungated without a nomination
		log.FromContext(ctx).Error(err, "Cannot nominate node", "pod", client.ObjectKeyFromObject(pod), "node", node)
		return pod, nil
	}
	if err != nil {
		return pod, err
	}
	return nominated, nil
}

// evict deletes a pod that is pinned to a home without room: a required term of an ungated pod cannot be taken back
// (KEP-3838). The pod never ran, and its successor goes elsewhere. A pod without a controller is left.
func (p *placer) evict(ctx context.Context, pod *corev1.Pod, d home.Decision) error {
	if metav1.GetControllerOf(pod) == nil {
		p.say(pod, corev1.EventTypeWarning, home.ReasonHomeFull, fmt.Sprintf(
			"its home, %s, %s, and no controller would re-create the pod: delete it and create one that goes elsewhere",
			d.Home, d.Reason))
		return nil
	}
	key := client.ObjectKeyFromObject(pod)
	p.memory.giveUp(pod, d.Home)
	err := p.client.Delete(ctx, pod, client.Preconditions{UID: &pod.UID, ResourceVersion: &pod.ResourceVersion},
		client.GracePeriodSeconds(0))
	if client.IgnoreNotFound(err) != nil {
		p.memory.keepHome(pod, d.Home)
		return fmt.Errorf("deleting pod %s: %w", key, err)
	}
	p.metrics.placed(home.OutcomeEvict, 0, true)
	p.say(pod, corev1.EventTypeWarning, home.ReasonHomeFull, fmt.Sprintf(
		"its home, %s, %s: the pod was deleted so that its successor goes elsewhere", d.Home, d.Reason))
	return nil
}

// say reports an Event, and again only if it still holds after a while.
func (p *placer) say(pod *corev1.Pod, kind, reason, note string) {
	if p.memory.first(pod, reason+note) {
		regarding(p.events, pod, kind, reason, note)
	}
}
