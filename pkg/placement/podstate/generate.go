package podstate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	kruiseac "github.com/stayput/stayput/pkg/api/kruise/v1alpha1/applyconfiguration/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// Reasons of the Events on a workload whose PersistentPodState cannot be generated.
const (
	reasonTopologyMissing = "TopologyMissing"
	reasonNotGenerated    = "PersistentPodStateExists"
)

// generatedWeight is the weight of the one term that has all preferred keys, as in OpenKruise.
const generatedWeight = 100

// generated reports whether the controller made an object. Removing the label takes it over.
func generated(s *kruisev1alpha1.PersistentPodState) bool {
	by := s.Labels[stayputv1alpha1.LabelGenerated]
	return by == stayputv1alpha1.GeneratedByWorkload || by == stayputv1alpha1.GeneratedByHome
}

// wish is the PersistentPodState that a workload's annotations ask for.
type wish struct {
	required, preferred, annotations []string
	// by is why: the value of the label stayput.io/generated.
	by string
	// refused is an annotation that cannot be recorded; the rest of the wish is granted. Empty: there is none.
	refused string
}

// wishOf reads the annotations of a workload and those of its pod template. wanted is false if they ask for nothing. If
// they are not valid, problem says why, and the wish is void.
func wishOf(annotations, template map[string]string) (w wish, wanted bool, problem finding) {
	w.by = stayputv1alpha1.GeneratedByWorkload
	switch value := annotations[kruisev1alpha1.AnnotationAutoGenerate]; value {
	case "", "false":
		w, wanted = wishOfTemplate(template)
		return w, wanted, problem
	case "true":
	default:
		return w, true, finding{home.ReasonInvalidAnnotation,
			fmt.Sprintf("annotation %s: %q is not valid: expected \"true\" or \"false\"", kruisev1alpha1.AnnotationAutoGenerate,
				value)}
	}
	for _, list := range []struct {
		name string
		keys *[]string
	}{
		{kruisev1alpha1.AnnotationRequiredTopology, &w.required},
		{kruisev1alpha1.AnnotationPreferredTopology, &w.preferred},
		{kruisev1alpha1.AnnotationPodAnnotations, &w.annotations},
	} {
		for key := range strings.SplitSeq(annotations[list.name], ",") {
			if key = strings.TrimSpace(key); key == "" || slices.Contains(*list.keys, key) {
				continue
			}
			// Annotation keys may have capitals: see apimachinery's ValidateAnnotations.
			if wrong := validation.IsQualifiedName(strings.ToLower(key)); len(wrong) > 0 {
				return w, true, finding{home.ReasonInvalidAnnotation,
					fmt.Sprintf("annotation %s: %q is not a valid key: %s", list.name, key, wrong[0])}
			}
			if list.keys == &w.annotations && !home.Recordable(key) {
				w.refused = key
				continue
			}
			*list.keys = append(*list.keys, key)
		}
	}
	if len(w.required)+len(w.preferred) == 0 {
		problem = finding{reasonTopologyMissing, fmt.Sprintf(
			"annotation %s is \"true\", but neither %s nor %s names a node label such as kubernetes.io/hostname, so pods have "+
				"nothing to come back to",
			kruisev1alpha1.AnnotationAutoGenerate, kruisev1alpha1.AnnotationRequiredTopology,
			kruisev1alpha1.AnnotationPreferredTopology)}
	}
	return w, true, problem
}

// wishOfTemplate is for pods that want their nodes back without an address; of others the address says where they were.
// Of a value that is not valid, which counts as Required, each pod is told when it is placed.
func wishOfTemplate(annotations map[string]string) (w wish, wanted bool) {
	_, asks := annotations[stayputv1alpha1.AnnotationHome]
	if !asks || home.Annotated(annotations) || annotations[stayputv1alpha1.AnnotationPools] != "" {
		return w, false
	}
	w.by = stayputv1alpha1.GeneratedByHome
	hostname := []string{corev1.LabelHostname} // for OpenKruise, should it come to serve the object
	if prefers, _ := home.Prefers(annotations); prefers {
		w.preferred = hostname
	} else {
		w.required = hostname
	}
	return w, true
}

// in reports whether a spec says what is wished. The rest of it is the user's.
func (w wish) in(spec *kruisev1alpha1.PersistentPodStateSpec) bool {
	var is wish
	if spec.RequiredPersistentTopology != nil {
		is.required = spec.RequiredPersistentTopology.Labels()
	}
	for i, t := range spec.PreferredPersistentTopology {
		if i > 0 || t.Weight != generatedWeight {
			return false
		}
		is.preferred = t.Preference.Labels()
	}
	for _, a := range spec.PersistentPodAnnotations {
		is.annotations = append(is.annotations, a.Key)
	}
	return slices.Equal(is.required, w.required) && slices.Equal(is.preferred, w.preferred) &&
		slices.Equal(is.annotations, w.annotations)
}

// spec returns the wish as an apply configuration.
func (w wish) spec(of *home.Workload) *kruiseac.PersistentPodStateSpecApplyConfiguration {
	spec := kruiseac.PersistentPodStateSpec().WithTargetReference(
		kruiseac.TargetReference().WithAPIVersion(of.APIVersion).WithKind(of.Ref.Kind).WithName(of.Ref.Name))
	if len(w.required) > 0 {
		spec.WithRequiredPersistentTopology(kruiseac.NodeTopologyTerm().WithNodeTopologyKeys(w.required...))
	}
	if len(w.preferred) > 0 {
		spec.WithPreferredPersistentTopology(kruiseac.PreferredTopologyTerm().WithWeight(generatedWeight).
			WithPreference(kruiseac.NodeTopologyTerm().WithNodeTopologyKeys(w.preferred...)))
	}
	for _, key := range w.annotations {
		spec.WithPersistentPodAnnotations(kruiseac.PersistentPodAnnotation().WithKey(key))
	}
	return spec
}

// plan is what to do about the generated object of a workload. At most one of the first two is set.
type plan struct {
	apply  *wish
	delete *kruisev1alpha1.PersistentPodState
	// problem is reported on the workload.
	problem finding
}

// besideKruise returns what of a plan is left to do while OpenKruise runs, which generates objects from its own
// annotations and serves those of stayput.io/home, which it does not know.
func (p plan) besideKruise() (left plan) {
	if p.apply != nil && p.apply.by == stayputv1alpha1.GeneratedByHome {
		left.apply = p.apply
	}
	if p.delete != nil && p.delete.Labels[stayputv1alpha1.LabelGenerated] == stayputv1alpha1.GeneratedByHome {
		left.delete = p.delete
	}
	return left
}

// planFor decides about the generated object of a workload that exists. named is the object with the workload's name,
// if any; all are those for it. What people made is left alone and keeps anything from being generated.
func planFor(w *home.Workload, named *kruisev1alpha1.PersistentPodState,
	all []*kruisev1alpha1.PersistentPodState) plan {
	asked, wanted, problem := wishOf(w.Annotations, w.Template)
	ours := named != nil && generated(named) && home.TargetOf(named) == w.Ref
	var refused finding
	if asked.refused != "" {
		refused = finding{home.ReasonInvalidAnnotation,
			fmt.Sprintf("annotation %s: %s", kruisev1alpha1.AnnotationPodAnnotations, notRecordable(asked.refused))}
	}
	switch {
	case !wanted && ours:
		return plan{delete: named}
	case !wanted:
		return plan{}
	case problem.reason != "":
		return plan{problem: problem}
	case ours && asked.in(&named.Spec) && named.Labels[stayputv1alpha1.LabelGenerated] == asked.by:
		return plan{problem: refused}
	case ours:
		return plan{apply: &asked, problem: refused}
	case named != nil && home.TargetOf(named) == w.Ref && asked.in(&named.Spec):
		return plan{problem: refused} // it says the same already: OpenKruise may have generated it
	case named != nil:
		return plan{problem: finding{reasonNotGenerated, fmt.Sprintf(
			"PersistentPodState %s exists and was not generated for this workload: it is left unchanged, and none is generated",
			named.Name)}}
	case len(all) > 0:
		return plan{problem: finding{reasonNotGenerated, fmt.Sprintf(
			"PersistentPodState %s already targets this workload: none is generated", all[0].Name)}}
	}
	return plan{apply: &asked, problem: refused}
}

// generating creates, changes and deletes the PersistentPodStates that workloads ask for by annotation. They are known
// by label and have no owner, so that they outlive a workload that is deleted without its pods and created again.
type generating struct {
	client    client.Client
	cache     client.Reader // has Pods
	live      client.Reader
	workloads *cluster.Workloads
	kruise    *openKruise
	events    events.EventRecorder

	told sync.Map // types.UID of a workload: the finding that it was told last
}

func (g *generating) setUp(mgr ctrl.Manager) error {
	c, err := controller.NewTyped("generating", mgr,
		controller.TypedOptions[home.Ref]{Reconciler: g, MaxConcurrentReconciles: 4})
	if err != nil {
		return err
	}
	return errors.Join(
		cluster.WatchWorkloads(g.workloads, c, func(_ context.Context, ref home.Ref) []home.Ref { return []home.Ref{ref} }),
		c.Watch(source.TypedKind(mgr.GetCache(), &kruisev1alpha1.PersistentPodState{},
			handler.TypedEnqueueRequestsFromMapFunc(g.concerned), stateSpecMoved)),
		c.Watch(source.TypedKind(mgr.GetCache(), &cluster.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(ctx context.Context, pod *cluster.Pod) []home.Ref { return targetsOfPod(ctx, g.client, pod) }), podGone)),
		cluster.WatchKinds(g.workloads, c,
			func(ctx context.Context, gk schema.GroupKind) []home.Ref { return targetsOfKind(ctx, g.client, gk) }),
		watchKruise(g.kruise, c, g.everything),
	)
}

// concerned returns the workloads to which an object can matter: its target, and those of its name.
func (g *generating) concerned(_ context.Context, s *kruisev1alpha1.PersistentPodState) []home.Ref {
	refs := []home.Ref{home.TargetOf(s)}
	for _, k := range g.workloads.Readable() {
		refs = append(refs, home.Ref{Group: k.GVK.Group, Kind: k.GVK.Kind, Namespace: s.Namespace, Name: s.Name})
	}
	return refs
}

// everything returns the workloads to reconcile when OpenKruise has come or gone.
func (g *generating) everything(ctx context.Context) []home.Ref {
	all := everyState(ctx, g.client, home.TargetOf)
	for _, k := range g.workloads.Readable() {
		refs, err := g.workloads.List(ctx, k)
		if err != nil {
			log.FromContext(ctx).Error(err, "Cannot list workloads", "kind", k.GVK.String())
		}
		all = append(all, refs...)
	}
	return all
}

// stateSpecMoved filters changes of the mere status out.
var stateSpecMoved = predicate.TypedFuncs[*kruisev1alpha1.PersistentPodState]{
	UpdateFunc: func(e event.TypedUpdateEvent[*kruisev1alpha1.PersistentPodState]) bool {
		was, is := e.ObjectOld, e.ObjectNew
		return was.UID != is.UID || was.Generation != is.Generation || generated(was) != generated(is) ||
			was.DeletionTimestamp.IsZero() != is.DeletionTimestamp.IsZero()
	},
}

// podGone picks the end of a pod: with the last one ends what a deleted workload had.
var podGone = predicate.TypedFuncs[*cluster.Pod]{
	CreateFunc: func(event.TypedCreateEvent[*cluster.Pod]) bool { return false },
	UpdateFunc: func(event.TypedUpdateEvent[*cluster.Pod]) bool { return false },
}

// Reconcile brings the generated object of one workload up to date.
func (g *generating) Reconcile(ctx context.Context, ref home.Ref) (reconcile.Result, error) {
	runs, err := g.kruise.runs()
	if err != nil {
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	}
	all, err := statesOf(ctx, g.client, ref)
	if err != nil {
		return reconcile.Result{}, err
	}
	w, err := g.workloads.Cached(ctx, ref)
	switch {
	case errors.Is(err, cluster.ErrNotTarget), errors.Is(err, cluster.ErrNotServed), errors.Is(err, cluster.ErrUnknown),
		errors.As(err, new(*cluster.PermissionError)):
		return reconcile.Result{}, nil // recording says so on the object; watchKinds brings it back here
	case err != nil:
		return reconcile.Result{}, err
	case w == nil:
		return g.end(ctx, ref, all, runs)
	}
	named, err := g.named(ctx, g.client, ref)
	if err != nil {
		return reconcile.Result{}, err
	}
	p := planFor(w, named, all)
	if runs {
		p = p.besideKruise()
	}
	g.tell(w, p.problem)
	switch {
	case p.delete != nil:
		err = g.delete(ctx, p.delete)
	case p.apply != nil:
		err = g.apply(ctx, w, named, *p.apply)
	}
	return orLater(err)
}

// named returns the object with a workload's name, or nil. It may be the cache's own and must not be changed.
func (g *generating) named(ctx context.Context, from client.Reader, ref home.Ref) (
	*kruisev1alpha1.PersistentPodState, error) {
	s := &kruisev1alpha1.PersistentPodState{}
	if err := from.Get(ctx, ref.Key(), s, client.UnsafeDisableDeepCopy); err != nil {
		if cluster.Absent(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("looking up PersistentPodState %s: %w", ref.Key(), err)
	}
	return s, nil
}

// end deletes the generated object of a workload that is gone with all its pods.
func (g *generating) end(ctx context.Context, ref home.Ref, all []*kruisev1alpha1.PersistentPodState,
	kruise bool) (reconcile.Result, error) {
	i := slices.IndexFunc(all, generated)
	if i < 0 || kruise && (plan{delete: all[i]}).besideKruise().delete == nil {
		return reconcile.Result{}, nil
	}
	if _, err := g.workloads.Get(ctx, ref); !errors.Is(err, cluster.ErrGone) {
		return reconcile.Result{RequeueAfter: unknownPause}, err // the cache is behind
	}
	if left, err := leftOf(ctx, g.cache, g.live, ref); err != nil || left {
		return reconcile.Result{}, err
	}
	return orLater(g.delete(ctx, all[i]))
}

// delete deletes the very object that the decision was about.
func (g *generating) delete(ctx context.Context, s *kruisev1alpha1.PersistentPodState) error {
	err := g.client.Delete(ctx, &kruisev1alpha1.PersistentPodState{ObjectMeta: *s.ObjectMeta.DeepCopy()},
		client.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting PersistentPodState %s/%s: %w", s.Namespace, s.Name, err)
	}
	log.FromContext(ctx).Info("Deleted generated PersistentPodState", "namespace", s.Namespace, "name", s.Name)
	return nil
}

// apply creates the generated object or changes it to what is wished.
func (g *generating) apply(ctx context.Context, w *home.Workload, is *kruisev1alpha1.PersistentPodState,
	wished wish) error {
	object := kruiseac.PersistentPodState(w.Ref.Name, w.Ref.Namespace).
		WithLabels(map[string]string{stayputv1alpha1.LabelGenerated: wished.by}).WithSpec(wished.spec(w))
	options := []client.ApplyOption{client.FieldOwner(stayputv1alpha1.ControllerFieldManager)}
	if is != nil {
		object.WithUID(is.UID).WithResourceVersion(is.ResourceVersion)
		options = append(options, client.ForceOwnership)
	} else if made, err := g.named(ctx, g.live, w.Ref); err != nil || made != nil {
		// An apply cannot say "only if there is none": an object that is not in the cache yet is found here. What slips
		// through is refused unless it says the same.
		return err
	}
	if err := g.client.Apply(ctx, object, options...); err != nil {
		return fmt.Errorf("applying PersistentPodState %s: %w", w.Ref.Key(), err)
	}
	return nil
}

// tell reports a problem on a workload once.
func (g *generating) tell(w *home.Workload, problem finding) {
	if problem.reason == "" {
		g.told.Delete(w.UID)
		return
	}
	if before, ok := g.told.Swap(w.UID, problem); ok && before == problem {
		return
	}
	g.events.Eventf(w.Reference(), nil, corev1.EventTypeWarning, problem.reason, "Generating", "%s", problem.message)
}
