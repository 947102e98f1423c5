package podstate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	kruiseac "github.com/stayput/stayput/pkg/api/kruise/v1alpha1/applyconfiguration/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// Conditions of a PersistentPodState, and why they are as they are.
const (
	conditionRecorded = "Recorded" // every pod that the workload wants is recorded
	conditionConflict = "Conflict" // another object for the same target is obeyed
	conditionDegraded = "Degraded" // nothing is recorded, or less than the spec asks for

	reasonAllRecorded       = "AllRecorded"
	reasonPodsNotReady      = "PodsNotReady"
	reasonTargetNotFound    = "TargetNotFound"
	reasonOlderObject       = "OlderObject"
	reasonObeyed            = "Obeyed"
	reasonUnsupportedTarget = "UnsupportedTarget"
	reasonTargetNotServed   = "TargetNotServed"
	reasonPermissionMissing = "PermissionMissing"
	reasonTooManyPods       = "TooManyPods"
	reasonOpenKruise        = "OpenKruise"
	reasonAsExpected        = "AsExpected"
)

// tooManyPods is from how many records on only the nodes' names are kept: an object of 5,000 full ones does not
// fit into etcd. What labels a pod is drawn by is then asked of its node, see recorded.
const tooManyPods = 3000

// recordEvery is the least time between two writes to one object. A rollout of many pods is many changes of it.
const recordEvery = time.Second

// Indexes of PersistentPodStates in the cache, within their namespace.
const (
	statesByTarget     = "target" // home.Ref.index of the target
	statesByTargetName = "spec.targetRef.Name"
)

func indexStates(ctx context.Context, indexer client.FieldIndexer) error {
	index := func(field string, value func(*kruisev1alpha1.PersistentPodState) string) error {
		return indexer.IndexField(ctx, &kruisev1alpha1.PersistentPodState{}, field, func(o client.Object) []string {
			s, ok := o.(*kruisev1alpha1.PersistentPodState)
			if !ok {
				return nil
			}
			return []string{value(s)}
		})
	}
	return errors.Join(
		index(statesByTarget, func(s *kruisev1alpha1.PersistentPodState) string { return indexKey(home.TargetOf(s)) }),
		index(statesByTargetName, func(s *kruisev1alpha1.PersistentPodState) string { return s.Spec.TargetReference.Name }),
	)
}

// statesOf returns the objects for a workload, the one that is obeyed first. They are the cache's own: they must
// not be changed.
func statesOf(ctx context.Context, from client.Reader, ref home.Ref) ([]*kruisev1alpha1.PersistentPodState, error) {
	var list kruisev1alpha1.PersistentPodStateList
	err := from.List(ctx, &list, client.InNamespace(ref.Namespace), client.MatchingFields{statesByTarget: indexKey(ref)}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the PersistentPodStates for %s: %w", ref, err)
	}
	return home.ByAge(list.Items), nil
}

// recording keeps the status of the PersistentPodStates of a workload.
type recording struct {
	client    client.Client
	workloads *cluster.Workloads
	kruise    *openKruise
	events    events.EventRecorder
	now       func() time.Time

	pace pace
	// plainUntil: the CRD is OpenKruise's own, which lacks what we add to the status; in nanoseconds.
	plainUntil atomic.Int64
}

// plainFor is how long it is believed that the CRD lacks our additions.
const plainFor = 10 * time.Minute

func (r *recording) setUp(mgr ctrl.Manager) error {
	c, err := controller.NewTyped("recording", mgr, controller.TypedOptions[home.Ref]{Reconciler: r, MaxConcurrentReconciles: 8})
	if err != nil {
		return err
	}
	itself := func(_ context.Context, ref home.Ref) []home.Ref { return []home.Ref{ref} }
	return errors.Join(
		cluster.WatchWorkloads(r.workloads, c, itself),
		c.Watch(source.TypedKind(mgr.GetCache(), &kruisev1alpha1.PersistentPodState{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(_ context.Context, s *kruisev1alpha1.PersistentPodState) []home.Ref {
				return []home.Ref{home.TargetOf(s)}
			}))),
		c.Watch(source.TypedKind(mgr.GetCache(), &corev1.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(ctx context.Context, pod *corev1.Pod) []home.Ref { return targetsOfPod(ctx, r.client, pod) }), podMoved)),
		cluster.WatchKinds(r.workloads, c, func(ctx context.Context, gk schema.GroupKind) []home.Ref { return targetsOfKind(ctx, r.client, gk) }),
		watchKruise(r.kruise, c, func(ctx context.Context) []home.Ref { return everyState(ctx, r.client, home.TargetOf) }),
	)
}

// targetsOfKind are the workloads of a kind that have a PersistentPodState.
func targetsOfKind(ctx context.Context, from client.Reader, gk schema.GroupKind) []home.Ref {
	return slices.DeleteFunc(everyState(ctx, from, home.TargetOf), func(ref home.Ref) bool { return ref.GroupKind() != gk })
}

// targetsOfPod are the workloads with a PersistentPodState that a pod belongs to or, an orphan, may have belonged to.
func targetsOfPod(ctx context.Context, from client.Reader, pod *corev1.Pod) []home.Ref {
	ref, _, owned := home.OwnerOf(pod)
	field := client.MatchingFields{statesByTarget: indexKey(ref)}
	if !owned {
		stem, ok := orphanOf(pod)
		if !ok {
			return nil
		}
		field = client.MatchingFields{statesByTargetName: stem}
	}
	var list kruisev1alpha1.PersistentPodStateList
	if err := from.List(ctx, &list, client.InNamespace(pod.Namespace), field, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Listing PersistentPodStates", "pod", client.ObjectKeyFromObject(pod))
	}
	var refs []home.Ref
	for i := range list.Items {
		if ref := home.TargetOf(&list.Items[i]); !slices.Contains(refs, ref) {
			refs = append(refs, ref)
		}
	}
	return refs
}

// Reconcile brings the status of all objects for one workload up to date.
func (r *recording) Reconcile(ctx context.Context, ref home.Ref) (reconcile.Result, error) {
	if wait := r.pace.left(ref, r.now()); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	all, err := statesOf(ctx, r.client, ref)
	if err != nil || len(all) == 0 {
		return reconcile.Result{}, err
	}
	runs, err := r.kruise.runs()
	if err != nil {
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	}
	if runs {
		return r.stepAside(ctx, ref, all)
	}
	for _, s := range all[1:] {
		if err := r.write(ctx, ref, s, verdict{conflict: all[0].Name}); err != nil {
			return orLater(err)
		}
	}
	v, err := r.look(ctx, ref, all[0])
	if err != nil || v == nil {
		return reconcile.Result{}, err
	}
	if err := r.write(ctx, ref, all[0], *v); err != nil {
		return orLater(err)
	}
	for _, m := range v.moved {
		r.events.Eventf(v.of.Reference(), m.pod, corev1.EventTypeNormal, home.ReasonHomeMoved, "Recording",
			"pod %s is Ready on node %s, which is its home from now on; it was node %s", m.pod.Name, m.pod.Spec.NodeName, m.from)
	}
	return reconcile.Result{RequeueAfter: v.retry}, nil
}

// orLater takes it as news on its way to the cache that an object has changed under a write. In a namespace that
// is being deleted there is nothing more to do.
func orLater(err error) (reconcile.Result, error) {
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return reconcile.Result{RequeueAfter: cluster.CacheLag}, nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, err
}

// look finds out what the status of the object that is obeyed is to say; nil: what it says, for nothing may
// change while pods without their workload are left.
func (r *recording) look(ctx context.Context, ref home.Ref, s *kruisev1alpha1.PersistentPodState) (*verdict, error) {
	kept := verdict{states: s.Status.PodStates, pods: s.Status.Pods}
	w, err := r.workloads.Get(ctx, ref)
	var missing *cluster.PermissionError
	switch {
	case errors.Is(err, cluster.ErrGone):
		left, err := leftOf(ctx, r.client, ref)
		if err != nil || left || generated(s) { // what was generated is deleted: see generating
			return nil, err
		}
		return &verdict{pods: new(int32), recorded: finding{reasonTargetNotFound, fmt.Sprintf("there is no %s", ref)}}, nil
	case errors.Is(err, cluster.ErrUnknown):
		return nil, nil // see watchKinds
	case errors.Is(err, cluster.ErrNotTarget):
		kept.degraded, kept.pods = finding{reasonUnsupportedTarget, unsupported(ref)}, nil
		return &kept, nil
	case errors.Is(err, cluster.ErrNotServed):
		kept.degraded = finding{reasonTargetNotServed, err.Error()}
		return &kept, nil
	case errors.As(err, &missing):
		kept.degraded, kept.retry = finding{reasonPermissionMissing, missing.Error()}, cluster.LookupEvery
		return &kept, nil
	case err != nil:
		return nil, err
	}
	pods, err := podsOf(ctx, r.client, ref)
	if err != nil {
		return nil, err
	}
	nodes := cluster.NewNodes(ctx, r.client)
	v := recordPods(&s.Spec, w, s.Status.PodStates, pods, nodes)
	return &v, nodes.Err
}

// unsupported says why there is nothing to record for a workload.
func unsupported(ref home.Ref) string {
	switch ref.Kind {
	case "Deployment", "ReplicaSet":
		return fmt.Sprintf("the pods of a %s get new names, so that none comes back as what it was. To keep addresses among them, use the annotation %s",
			ref.Kind, stayputv1alpha1.AnnotationIdentity)
	}
	return fmt.Sprintf("%s is not a kind that the controller is configured for: see its flag --workload-kinds", ref.GroupKind())
}

// verdict is what the status of an object is to say.
type verdict struct {
	states map[string]kruisev1alpha1.PodState
	pods   *int32
	// conflict is the object that is obeyed instead, if any.
	conflict string
	// recorded is why not every pod is recorded; degraded what is wrong. Empty: all is well.
	recorded, degraded finding

	of    *home.Workload
	moved []move
	retry time.Duration // zero: when something changes
}

// finding is why a condition is as it is.
type finding struct{ reason, message string }

// move is a pod that is Ready elsewhere than recorded.
type move struct {
	pod  *corev1.Pod
	from string
}

// nodePause is when to look again for a node that is not in the cache yet.
const nodePause = 2 * time.Second

// recordPods is what is recorded of a workload's pods, given what was. A pod is recorded where it is Ready. Until
// then, and when it is gone, its record stays as long as the retention policy says.
func recordPods(spec *kruisev1alpha1.PersistentPodStateSpec, w *home.Workload, was map[string]kruisev1alpha1.PodState, pods []corev1.Pod, nodes home.Nodes) verdict {
	v := verdict{of: w, pods: &w.Replicas, states: make(map[string]kruisev1alpha1.PodState, len(was))}
	topology, annotations := keysOf(spec)
	there := make(map[string]bool, len(pods))
	for i := range pods {
		pod := &pods[i]
		if owner := metav1.GetControllerOf(pod); owner == nil || owner.UID != w.UID {
			continue // of a workload that had this name before
		}
		there[pod.Name] = true
		if !podReady(pod) || pod.Spec.NodeName == "" {
			continue
		}
		node := nodes.Node(pod.Spec.NodeName)
		if node == nil {
			v.retry = nodePause
			continue
		}
		v.states[pod.Name] = kruisev1alpha1.PodState{
			NodeName: node.Name, NodeTopologyLabels: pick(node.Labels, topology), Annotations: pick(pod.Annotations, annotations),
		}
		if from := was[pod.Name].NodeName; from != "" && from != node.Name {
			v.moved = append(v.moved, move{pod, from})
		}
	}
	for name, state := range was {
		if _, ok := v.states[name]; ok || !there[name] && !keepsRecord(spec, w, name, len(there)) {
			continue
		}
		state.NodeTopologyLabels, state.Annotations = pick(state.NodeTopologyLabels, topology), pick(state.Annotations, annotations)
		v.states[name] = state
	}
	recorded := 0
	for name := range v.states {
		if wanted, numbered := w.Wants(name); wanted || !numbered {
			recorded++
		}
	}
	if recorded < int(w.Replicas) {
		v.recorded = finding{reasonPodsNotReady, "not every pod is recorded: a pod is when it is Ready for the first time"}
	}
	if len(v.states) >= tooManyPods {
		for name, state := range v.states {
			v.states[name] = kruisev1alpha1.PodState{NodeName: state.NodeName}
		}
		v.degraded = finding{reasonTooManyPods, fmt.Sprintf("from %d pods on only the name of each pod's node is recorded, because more does not fit: pods come back to the labels that their node has then, without their annotations", tooManyPods)}
	}
	return v
}

// keepsRecord says whether the record of a pod that is gone is kept. live is how many pods there are: where names
// do not tell what is wanted, a gone pod is not once all others are there.
func keepsRecord(spec *kruisev1alpha1.PersistentPodStateSpec, w *home.Workload, name string, live int) bool {
	if spec.PersistentPodStateRetentionPolicy == kruisev1alpha1.RetentionWhenDeleted {
		return true
	}
	wanted, numbered := w.Wants(name)
	return wanted || !numbered && live < int(w.Replicas)
}

// keysOf are the keys of the node labels and of the pod annotations that a spec names.
func keysOf(spec *kruisev1alpha1.PersistentPodStateSpec) (topology, annotations []string) {
	if spec.RequiredPersistentTopology != nil {
		topology = append(topology, spec.RequiredPersistentTopology.NodeTopologyKeys...)
	}
	for _, term := range spec.PreferredPersistentTopology {
		topology = append(topology, term.Preference.NodeTopologyKeys...)
	}
	for _, a := range spec.PersistentPodAnnotations {
		annotations = append(annotations, a.Key)
	}
	return topology, annotations
}

func pick(from map[string]string, keys []string) map[string]string {
	var picked map[string]string
	for _, k := range keys {
		if v, ok := from[k]; ok {
			if picked == nil {
				picked = map[string]string{}
			}
			picked[k] = v
		}
	}
	return picked
}

// stepAside says on the objects that we generated why nothing is recorded. The others are OpenKruise's alone.
func (r *recording) stepAside(ctx context.Context, ref home.Ref, all []*kruisev1alpha1.PersistentPodState) (reconcile.Result, error) {
	for _, s := range all {
		if !generated(s) || r.plain() {
			continue
		}
		err := r.write(ctx, ref, s, verdict{states: s.Status.PodStates, pods: s.Status.Pods, degraded: finding{
			reasonOpenKruise, "OpenKruise runs in this cluster: PersistentPodStates are left to it",
		}})
		if err != nil {
			return orLater(err)
		}
	}
	return reconcile.Result{}, nil
}

// statusOf is the status that says what was found.
func statusOf(s *kruisev1alpha1.PersistentPodState, v verdict, now time.Time) kruisev1alpha1.PersistentPodStateStatus {
	n := int32(len(v.states))
	status := kruisev1alpha1.PersistentPodStateStatus{
		ObservedGeneration: s.Generation, PodStates: v.states, Pods: v.pods, Recorded: &n, Conditions: ownConditions(s.Status.Conditions),
	}
	set := func(kind string, is metav1.ConditionStatus, f finding) {
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: kind, Status: is, Reason: f.reason, Message: f.message, ObservedGeneration: s.Generation, LastTransitionTime: metav1.NewTime(now),
		})
	}
	// What is wrong is said while it is so, and that it is not any more where it once was.
	wrong := func(kind string, f finding, fine string) {
		switch {
		case f.reason != "":
			set(kind, metav1.ConditionTrue, f)
		case meta.FindStatusCondition(status.Conditions, kind) != nil:
			set(kind, metav1.ConditionFalse, finding{fine, ""})
		}
	}
	var conflict finding
	if v.conflict != "" {
		conflict = finding{reasonOlderObject, fmt.Sprintf("PersistentPodState %s is for the same target and older: it is obeyed, this one is not", v.conflict)}
	}
	wrong(conditionConflict, conflict, reasonObeyed)
	wrong(conditionDegraded, v.degraded, reasonAsExpected)
	switch {
	case v.recorded.reason != "":
		set(conditionRecorded, metav1.ConditionFalse, v.recorded)
	case v.of != nil:
		set(conditionRecorded, metav1.ConditionTrue, finding{reasonAllRecorded, "every pod of the target is recorded"})
	case v.conflict != "":
		meta.RemoveStatusCondition(&status.Conditions, conditionRecorded)
	}
	return status
}

// ownConditions are copies of those conditions that are ours, in one order.
func ownConditions(all []metav1.Condition) []metav1.Condition {
	var own []metav1.Condition
	for _, kind := range []string{conditionConflict, conditionDegraded, conditionRecorded} {
		if c := meta.FindStatusCondition(all, kind); c != nil {
			own = append(own, *c)
		}
	}
	return own
}

// write applies a status where it differs.
func (r *recording) write(ctx context.Context, ref home.Ref, s *kruisev1alpha1.PersistentPodState, v verdict) error {
	is, want := s.Status, statusOf(s, v, r.now())
	is.Conditions, want.Conditions = ownConditions(is.Conditions), ownConditions(want.Conditions)
	if r.plain() {
		is, want = plain(is), plain(want)
	}
	if equality.Semantic.DeepEqual(is, want) {
		return nil
	}
	err := r.apply(ctx, s, want)
	if err != nil && strings.Contains(err.Error(), "field not declared in schema") && !r.plain() {
		log.FromContext(ctx).Info("The CRD of PersistentPodState is OpenKruise's: status.conditions, pods and recorded are left out", "reason", err.Error())
		r.plainUntil.Store(r.now().Add(plainFor).UnixNano())
		err = r.apply(ctx, s, plain(want))
	}
	if err != nil {
		return fmt.Errorf("applying the status of PersistentPodState %s/%s: %w", s.Namespace, s.Name, err)
	}
	r.pace.wrote(ref, len(want.PodStates), r.now())
	return nil
}

func (r *recording) plain() bool { return r.now().UnixNano() < r.plainUntil.Load() }

// plain leaves of a status what OpenKruise's CRD knows.
func plain(s kruisev1alpha1.PersistentPodStateStatus) kruisev1alpha1.PersistentPodStateStatus {
	return kruisev1alpha1.PersistentPodStateStatus{ObservedGeneration: s.ObservedGeneration, PodStates: s.PodStates}
}

func (r *recording) apply(ctx context.Context, s *kruisev1alpha1.PersistentPodState, want kruisev1alpha1.PersistentPodStateStatus) error {
	status := kruiseac.PersistentPodStateStatus().WithObservedGeneration(want.ObservedGeneration)
	status.Pods, status.Recorded = want.Pods, want.Recorded
	states := make(map[string]kruiseac.PodStateApplyConfiguration, len(want.PodStates))
	for name, state := range want.PodStates {
		states[name] = *kruiseac.PodState().WithNodeName(state.NodeName).WithNodeTopologyLabels(state.NodeTopologyLabels).WithAnnotations(state.Annotations)
	}
	status.WithPodStates(states)
	for _, c := range want.Conditions {
		status.WithConditions(metav1ac.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).WithMessage(c.Message).
			WithObservedGeneration(c.ObservedGeneration).WithLastTransitionTime(c.LastTransitionTime))
	}
	object := kruiseac.PersistentPodState(s.Name, s.Namespace).WithUID(s.UID).WithResourceVersion(s.ResourceVersion).WithStatus(status)
	err := r.client.Status().Apply(ctx, object, client.ForceOwnership, client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
	if err != nil {
		return err
	}
	// An apply does not take away what somebody else wrote, as OpenKruise did where it ran before.
	result, err := json.Marshal(object)
	if err != nil {
		return err
	}
	applied := &kruisev1alpha1.PersistentPodState{}
	if err := json.Unmarshal(result, applied); err != nil || equality.Semantic.DeepEqual(applied.Status.PodStates, want.PodStates) {
		return err
	}
	clean := applied.DeepCopy()
	clean.Status.PodStates = want.PodStates
	return r.client.Status().Patch(ctx, clean, client.MergeFromWithOptions(applied, client.MergeFromWithOptimisticLock{}),
		client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
}

// pace bounds how often the objects for one workload are written. The zero value is ready.
type pace struct {
	mu   sync.Mutex
	next map[home.Ref]time.Time
}

// left is how long to wait before the next write.
func (p *pace) left(ref home.Ref, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := p.next[ref].Sub(now); left > 0 {
		return left
	}
	delete(p.next, ref)
	return 0
}

// wrote notes a write of so many records: one of a thousand costs the API server a good part of a second.
func (p *pace) wrote(ref home.Ref, records int, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next == nil {
		p.next = map[home.Ref]time.Time{}
	}
	p.next[ref] = now.Add(recordEvery * time.Duration(1+records/1000))
}
