// Package cluster reads what the rules of package home need to know of the cluster: the nodes, a little of each pod,
// and the workloads of all kinds whose pods keep their names. It reads from the manager's cache, and past it where an
// old answer does harm.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/stayput/stayput/pkg/home"
)

// Why [Workloads.Get] returns no workload. Any other error means that it is not known.
var (
	// ErrGone means that, by the API server, there is no such workload.
	ErrGone = errors.New("workload not found")
	// ErrNotServed means that the API server does not serve the kind now. It may later.
	ErrNotServed = errors.New("the API server does not serve this kind")
	// ErrNotTarget means that pods of such a workload never come back under their name.
	ErrNotTarget = errors.New("pods of this kind do not keep their names")
	// ErrUnknown means that the API server has not been asked yet what it serves.
	ErrUnknown = errors.New("unknown yet whether the API server serves this kind")
)

// PermissionError says what the controller may not do, and how to grant it.
type PermissionError struct {
	kind    schema.GroupKind
	missing []string
}

func (e *PermissionError) Error() string {
	return fmt.Sprintf("the controller has no permission to %s for kind %s: grant it in a ClusterRole labelled %s: "+
		"\"true\"",
		strings.Join(e.missing, ", "), e.kind, aggregateLabel)
}

// aggregateLabel marks ClusterRoles whose rules the controller gets.
const aggregateLabel = "rbac.stayput.io/aggregate-to-controller"

// Unreadable reports whether an error means that a workload cannot be read until somebody grants it to the controller
// or has the API server serve its kind again.
func Unreadable(err error) bool {
	return apierrors.IsForbidden(err) || errors.As(err, new(*PermissionError)) || errors.Is(err, ErrNotServed) ||
		meta.IsNoMatchError(err)
}

// Kind is a kind of workload whose pods keep their names.
type Kind struct {
	GVK schema.GroupVersionKind
	// scaled: the replicas are read from the scale subresource, and the ordinals are 0 to n-1. Only the metadata of the
	// object itself is read.
	scaled bool
}

var (
	statefulSets         = Kind{GVK: appsv1.SchemeGroupVersion.WithKind("StatefulSet")}
	advancedStatefulSets = Kind{GVK: schema.GroupVersionKind{Group: "apps.kruise.io", Version: "v1beta1",
		Kind: "StatefulSet"}}
)

// object returns an empty object of the type under which the cache has the kind.
func (k Kind) object() client.Object {
	switch {
	case k.scaled:
		o := &metav1.PartialObjectMetadata{}
		o.SetGroupVersionKind(k.GVK)
		return o
	case k == statefulSets:
		return &appsv1.StatefulSet{}
	default:
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(k.GVK)
		return o
	}
}

// objects returns an empty list of such objects.
func (k Kind) objects() client.ObjectList {
	switch {
	case k.scaled:
		l := &metav1.PartialObjectMetadataList{}
		l.SetGroupVersionKind(k.GVK)
		return l
	case k == statefulSets:
		return &appsv1.StatefulSetList{}
	default:
		l := &unstructured.UnstructuredList{}
		l.SetGroupVersionKind(k.GVK)
		return l
	}
}

func (k Kind) RefOf(o client.Object) home.Ref {
	return home.Ref{Group: k.GVK.Group, Kind: k.GVK.Kind, Namespace: o.GetNamespace(), Name: o.GetName()}
}

// Workloads are the workloads of all kinds whose pods keep their names. Kinds other than StatefulSet come and go with
// their CRD and with the controller's permissions, which are looked up every [LookupEvery].
//
// Its methods are safe for concurrent use.
type Workloads struct {
	cache     cache.Cache
	live      client.Reader // past the cache
	client    client.Client
	discovery discovery.DiscoveryInterface
	every     time.Duration
	scales    *utilcache.Expiring // by home.Ref, a [scale]
	polled    *utilcache.Expiring // by home.Ref, a [polled]
	others    *utilcache.Expiring // by home.Ref, an [otherMaker]

	mu          sync.Mutex
	kinds       map[schema.GroupKind]*kindState
	watchers    []func(Kind) error
	subscribers []func(schema.GroupKind)
}

// keptFor is how long a [scale] and an [otherMaker] are kept, though they hold as long as their workload is the same:
// that it is gone is not always noticed.
const keptFor = time.Hour

// polled is what the API server said of a workload of a kind that is not watched: nil, that it exists.
type polled struct{ err error }

// pollEvery is how long that is good for: less than a minute, after which the addresses of its pods ask again.
const pollEvery = 30 * time.Second

// otherMaker is a version of a workload whose template asks for no addresses.
type otherMaker struct {
	uid        types.UID
	generation int64
}

type kindState struct {
	Kind
	problem error // nil if its workloads can be read
	watched bool
}

// scale is the answer of a scale subresource, valid until the object changes.
type scale struct {
	uid      types.UID
	version  string
	replicas int32
}

// LookupEvery is how often the API server is asked what it serves, lookupWithin how long anything that depends on a
// third party's kind may take.
const (
	LookupEvery  = 15 * time.Second
	lookupWithin = 10 * time.Second
)

// NewWorkloads returns the workloads of the cluster. Kinds other than StatefulSet are unknown until the manager runs.
func NewWorkloads(mgr ctrl.Manager, custom []schema.GroupVersionKind) (*Workloads, error) {
	d, err := discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return nil, err
	}
	t := Over(mgr.GetCache(), mgr.GetAPIReader(), mgr.GetClient(), d, custom...)
	return t, mgr.Add(t)
}

// Over returns the workloads that these show. live reads past the cache. Kinds other than StatefulSet are unknown until
// [Workloads.LookUp].
func Over(c cache.Cache, live client.Reader, cl client.Client, d discovery.DiscoveryInterface,
	custom ...schema.GroupVersionKind) *Workloads {
	t := &Workloads{
		cache: c, live: live, client: cl, discovery: d, every: LookupEvery,
		kinds: map[schema.GroupKind]*kindState{}, scales: utilcache.NewExpiring(), polled: utilcache.NewExpiring(),
		others: utilcache.NewExpiring(),
	}
	for _, gvk := range custom {
		t.kinds[gvk.GroupKind()] = &kindState{Kind: Kind{gvk, true}, problem: ErrUnknown}
	}
	t.kinds[advancedStatefulSets.GVK.GroupKind()] = &kindState{Kind: advancedStatefulSets, problem: ErrUnknown}
	t.kinds[statefulSets.GVK.GroupKind()] = &kindState{Kind: statefulSets, watched: true}
	return t
}

// Start looks kinds up until ctx ends.
func (t *Workloads) Start(ctx context.Context) error {
	tick := time.NewTicker(t.every)
	defer tick.Stop()
	for {
		t.LookUp(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// LookUp finds out which kinds can be read, and starts watching those that became so.
func (t *Workloads) LookUp(ctx context.Context) {
	t.mu.Lock()
	kinds := slices.Collect(maps.Values(t.kinds))
	t.mu.Unlock()
	for _, k := range kinds {
		if k.Kind == statefulSets {
			continue
		}
		problem := t.problem(ctx, k.Kind)
		if problem != nil && !errors.Is(problem, ErrNotServed) && !errors.As(problem, new(*PermissionError)) {
			log.FromContext(ctx).Error(problem, "Cannot look up workload kind", "kind", k.GVK.String())
			continue // what was known stays
		}
		t.mu.Lock()
		changed := fmt.Sprint(problem) != fmt.Sprint(k.problem)
		watch, unwatch := problem == nil && !k.watched, problem != nil && k.watched
		k.problem, k.watched = problem, problem == nil
		watchers, subscribers := slices.Clone(t.watchers), slices.Clone(t.subscribers)
		t.mu.Unlock()
		switch {
		case watch:
			for _, w := range watchers {
				if err := w(k.Kind); err != nil {
					log.FromContext(ctx).Error(err, "Cannot watch workloads", "kind", k.GVK.String())
				}
			}
		case unwatch:
			if err := t.cache.RemoveInformer(ctx, k.object()); err != nil {
				log.FromContext(ctx).Error(err, "Cannot stop watching workloads", "kind", k.GVK.String())
			}
		}
		if changed {
			log.FromContext(ctx).Info("Workload kind changed", "kind", k.GVK.String(), "readable", problem == nil,
				"reason", fmt.Sprint(problem))
			for _, changed := range subscribers {
				changed(k.GVK.GroupKind())
			}
		}
	}
}

// problem returns what keeps a kind from being read.
func (t *Workloads) problem(ctx context.Context, k Kind) error {
	ctx, cancel := context.WithTimeout(ctx, lookupWithin)
	defer cancel()
	resource, err := t.Served(k.GVK)
	switch {
	case apierrors.IsNotFound(err):
		return ErrNotServed
	case err != nil:
		return err
	}
	needs := []authorizationv1.ResourceAttributes{{Verb: "get"}, {Verb: "list"}, {Verb: "watch"}}
	if k.scaled {
		needs = append(needs, authorizationv1.ResourceAttributes{Verb: "get", Subresource: "scale"})
	}
	missing := &PermissionError{kind: k.GVK.GroupKind()}
	for _, need := range needs {
		need.Group, need.Version, need.Resource = k.GVK.Group, k.GVK.Version, resource
		review := &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &need},
		}
		if err := t.client.Create(ctx, review); err != nil {
			return fmt.Errorf("looking up permissions: %w", err)
		}
		if !review.Status.Allowed {
			what := resource
			if need.Subresource != "" {
				what += "/" + need.Subresource
			}
			missing.missing = append(missing.missing, need.Verb+" "+what)
		}
	}
	if missing.missing != nil {
		return missing
	}
	return nil
}

// Served returns the resource of a kind, or [ErrNotServed] if the API server serves others of its group and version. It
// is asked each time. Right after its start, an API server finds no custom kinds at all.
func (t *Workloads) Served(gvk schema.GroupVersionKind) (resource string, err error) {
	served, err := t.discovery.ServerResourcesForGroupVersion(gvk.GroupVersion().String())
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(served.APIResources, func(r metav1.APIResource) bool {
		return r.Kind == gvk.Kind && !strings.Contains(r.Name, "/")
	})
	if i < 0 {
		return "", ErrNotServed
	}
	return served.APIResources[i].Name, nil
}

// each calls watch with every kind that can be read, now or as soon as it can.
func (t *Workloads) each(watch func(Kind) error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.watchers = append(t.watchers, watch)
	return watch(statefulSets)
}

// Readable returns the kinds whose workloads can be read now.
func (t *Workloads) Readable() []Kind {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Kind
	for _, k := range t.kinds {
		if k.problem == nil {
			all = append(all, k.Kind)
		}
	}
	return all
}

// List names all workloads of a kind.
func (t *Workloads) List(ctx context.Context, k Kind) ([]home.Ref, error) {
	list := k.objects()
	if err := t.cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	var all []home.Ref
	err := meta.EachListItem(list, func(o runtime.Object) error {
		if o, ok := o.(client.Object); ok {
			all = append(all, k.RefOf(o))
		}
		return nil
	})
	return all, err
}

// kind returns how workloads of a kind are read, or why they cannot be.
func (t *Workloads) kind(gk schema.GroupKind) (Kind, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k, ok := t.kinds[gk]
	if !ok {
		return Kind{}, ErrNotTarget
	}
	return k.Kind, k.problem
}

// Of returns the controller of a pod if it is of a kind whose pods keep their names.
func (t *Workloads) Of(pod metav1.Object) (home.Ref, types.UID, bool) {
	ref, uid, ok := home.OwnerOf(pod)
	if !ok {
		return ref, uid, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok = t.kinds[ref.GroupKind()]
	return ref, uid, ok
}

// Numbers reports whether a pod has an ordinal, so that its workload can stop to want it.
func (t *Workloads) Numbers(pod *corev1.Pod) bool {
	if _, ok := pod.Labels[appsv1.PodIndexLabel]; ok {
		return true
	}
	ref, _, ok := t.Of(pod)
	if !ok {
		return false
	}
	workload, _, numbered := home.SplitOrdinal(pod.Name)
	return numbered && workload == ref.Name
}

// Get returns a workload, from the cache if it is there. Before it returns [ErrGone] it asks the API server.
func (t *Workloads) Get(ctx context.Context, ref home.Ref) (*home.Workload, error) {
	w, err := t.Cached(ctx, ref)
	if w != nil || err != nil {
		return w, err
	}
	k, err := t.kind(ref.GroupKind())
	if err != nil {
		return nil, err
	}
	return t.read(ctx, t.live, k, ref)
}

// Cached returns a workload from the cache, or nil.
func (t *Workloads) Cached(ctx context.Context, ref home.Ref) (*home.Workload, error) {
	k, err := t.kind(ref.GroupKind())
	if err != nil {
		return nil, err
	}
	w, err := t.read(ctx, t.cache, k, ref)
	if errors.Is(err, ErrGone) {
		return nil, nil
	}
	return w, err
}

// read reads a workload, within a time: a lost permission may keep a cache from ever filling.
func (t *Workloads) read(ctx context.Context, from client.Reader, k Kind, ref home.Ref) (*home.Workload, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupWithin)
	defer cancel()
	o := k.object()
	if err := from.Get(ctx, ref.Key(), o, client.UnsafeDisableDeepCopy); err != nil { // o is only read
		if Absent(err) {
			return nil, ErrGone
		}
		return nil, fmt.Errorf("reading %s: %w", ref, err)
	}
	w, err := home.WorkloadOf(k.GVK, o)
	if err == nil && k.scaled {
		w.Replicas, err = t.scaleOf(ctx, k, ref, o)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", ref, err)
	}
	return w, nil
}

// CacheLag is how long the news of a write may be on its way to the cache.
const CacheLag = 20 * time.Millisecond

// Absent reports whether an error means that an object does not exist. The 404 for a kind that is not served does not.
func Absent(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// scaleOf reads the scale subresource, once for each version of the object.
func (t *Workloads) scaleOf(ctx context.Context, k Kind, ref home.Ref, o client.Object) (int32, error) {
	version := o.GetResourceVersion()
	if g := o.GetGeneration(); g > 0 {
		version = strconv.FormatInt(g, 10)
	}
	if was, ok := t.scales.Get(ref); ok {
		if known := was.(scale); known.uid == o.GetUID() && known.version == version {
			return known.replicas, nil
		}
	}
	of, sub := &unstructured.Unstructured{}, &unstructured.Unstructured{}
	of.SetGroupVersionKind(k.GVK)
	of.SetNamespace(ref.Namespace)
	of.SetName(ref.Name)
	sub.SetGroupVersionKind(schema.GroupVersionKind{Group: "autoscaling", Version: "v1", Kind: "Scale"})
	err := t.client.SubResource("scale").Get(ctx, of, sub)
	switch {
	case apierrors.IsForbidden(err):
		return 0, &PermissionError{k.GVK.GroupKind(), []string{"get its subresource scale"}}
	case err != nil:
		return 0, fmt.Errorf("its subresource scale: %w", err)
	}
	replicas, _, err := unstructured.NestedInt64(sub.Object, "spec", "replicas")
	if err != nil {
		return 0, fmt.Errorf("its subresource scale: %w", err)
	}
	t.scales.Set(ref, scale{o.GetUID(), version, int32(replicas)}, keptFor)
	return int32(replicas), nil
}

// WatchWorkloads enqueues every workload that can be read when it comes, goes or changes.
func WatchWorkloads[request comparable](t *Workloads, c controller.TypedController[request],
	requests func(context.Context, home.Ref) []request) error {
	return t.each(func(k Kind) error {
		return c.Watch(source.TypedKind(t.cache, k.object(), handler.TypedEnqueueRequestsFromMapFunc(
			func(ctx context.Context, o client.Object) []request { return requests(ctx, k.RefOf(o)) }), workloadMoved))
	})
}

// WatchKinds enqueues these requests when a kind becomes readable or ceases to be.
func WatchKinds[request comparable](t *Workloads, c controller.TypedController[request],
	all func(context.Context, schema.GroupKind) []request) error {
	return c.Watch(source.TypedFunc[request](func(ctx context.Context,
		queue workqueue.TypedRateLimitingInterface[request]) error {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.subscribers = append(t.subscribers, func(gk schema.GroupKind) {
			for _, r := range all(ctx, gk) {
				queue.Add(r)
			}
		})
		return nil
	}))
}

// workloadMoved lets through what is not merely a new status.
var workloadMoved = predicate.TypedFuncs[client.Object]{UpdateFunc: func(e event.TypedUpdateEvent[client.Object]) bool {
	was, is := e.ObjectOld, e.ObjectNew
	return is.GetGeneration() == 0 || was.GetGeneration() != is.GetGeneration() || was.GetUID() != is.GetUID() ||
		!maps.Equal(was.GetAnnotations(), is.GetAnnotations())
}}
