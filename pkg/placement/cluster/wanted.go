package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/pool"
)

// Wants reports whether a workload wants a pod of this name, and whether [WatchWorkloads] tells if that changes. A
// workload of the same name that came after another UID counts: the pod's name, and so its identity, is wanted. Of
// kinds whose pods do not keep their names it is known only whether the workload exists.
//
// That it wants the pod may be what the cache says or, of a kind that is not watched, what the API server said a moment
// ago, for another pod perhaps. Everything else is what it says now.
func (t *Workloads) Wants(ctx context.Context, namespace string, of stayputv1alpha1.WorkloadReference, pod string) (
	wanted, watched bool, err error) {
	gv, err := schema.ParseGroupVersion(of.APIVersion)
	if err != nil {
		return false, false, fmt.Errorf("workload %s %s/%s: %w", of.Kind, namespace, of.Name, err)
	}
	ref := home.Ref{Group: gv.Group, Kind: of.Kind, Namespace: namespace, Name: of.Name}
	k, err := t.kind(ref.GroupKind())
	if errors.Is(err, ErrNotTarget) {
		err := t.poll(ctx, gv.WithKind(of.Kind), ref)
		return err == nil, false, err
	}
	if err != nil {
		return false, false, fmt.Errorf("reading %s: %w", ref, err)
	}
	for _, from := range []client.Reader{t.cache, t.live} {
		var w *home.Workload
		if w, err = t.read(ctx, from, k, ref); err != nil {
			continue
		}
		in, numbered := w.Wants(pod)
		if wanted = in || !numbered; wanted {
			break
		}
	}
	return wanted && err == nil, true, err
}

// Recheck is when to ask again about workloads of a kind that the controller does not watch. recheckLeft is the same
// while the workload is gone but other pods of it are left, which are mostly about to end.
const (
	Recheck     = time.Minute
	recheckLeft = 5 * time.Second
)

// Wanted reports whether a workload wants a pod that is gone, whose addresses are kept like this, and returns when to
// ask again, zero if only once the workload changes. An error says why it is unknown. It also is while a pod of that
// name exists or, if the workload is gone, one of the siblings: orphans may be adopted, with their addresses.
func (t *Workloads) Wanted(ctx context.Context, namespace string, of stayputv1alpha1.WorkloadReference, pod string,
	keep pool.Keep, siblings func() (Siblings, error)) (is pool.Wanted, retry time.Duration, err error) {
	wants, watched, err := t.Wants(ctx, namespace, of, pod)
	if !watched {
		retry = Recheck
	}
	switch {
	case errors.Is(err, ErrGone):
		is = pool.Abandoned
	case err != nil:
		return pool.Unknown, Recheck, err
	case wants:
		return pool.Wants, retry, nil
	default:
		is = pool.Scaled
	}
	if is == pool.Abandoned && !keep.Deleted || is == pool.Scaled && !keep.Scaled {
		return is, retry, nil // it does not matter
	}
	if is == pool.Abandoned {
		left, err := t.left(ctx, namespace, siblings)
		if err != nil || left {
			return pool.Unknown, recheckLeft, err
		}
	}
	// The caches do not move in step: the API server may know a pod of that name that is not in ours yet.
	live := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
	switch err := t.live.Get(ctx, types.NamespacedName{Namespace: namespace, Name: pod}, live); {
	case err == nil:
		return pool.Unknown, Recheck, nil
	case !apierrors.IsNotFound(err):
		return pool.Unknown, Recheck, fmt.Errorf("looking up pod %s/%s: %w", namespace, pod, err)
	}
	return is, retry, nil
}

// Siblings names the pods that have addresses of one workload: All of them, and those whose addresses are Bound, which
// may run.
type Siblings struct{ All, Bound []string }

// left reports whether one of the siblings exists. That the cache lacks a pod does not tell.
func (t *Workloads) left(ctx context.Context, namespace string, siblings func() (Siblings, error)) (bool, error) {
	of, err := siblings()
	if err != nil {
		return false, err
	}
	for _, name := range of.All {
		err := t.cache.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &Pod{})
		if !apierrors.IsNotFound(err) {
			return true, err
		}
	}
	for _, name := range of.Bound {
		live := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}}
		err := t.live.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, live)
		if !apierrors.IsNotFound(err) {
			return true, err
		}
	}
	return false, nil
}

// WantedByName is Wanted for a pod whose workload was not noted: it is the workload that the pod is named after, of a
// kind whose pods keep their names. If no such kind has a workload of that name, the workload is gone.
func (t *Workloads) WantedByName(ctx context.Context, namespace, pod string, keep pool.Keep,
	siblings func() (Siblings, error)) (is pool.Wanted, retry time.Duration, err error) {
	stem, _, numbered := home.SplitOrdinal(pod)
	if !numbered {
		return pool.Unknown, 0, nil
	}
	t.mu.Lock()
	kinds := make([]kindState, 0, len(t.kinds))
	for _, k := range t.kinds {
		kinds = append(kinds, *k)
	}
	t.mu.Unlock()
	of := referenceTo(statefulSets.GVK, stem)
	found := 0
	for _, k := range kinds {
		if errors.Is(k.problem, ErrNotServed) {
			continue
		}
		ref := home.Ref{Group: k.GVK.Group, Kind: k.GVK.Kind, Namespace: namespace, Name: stem}
		switch _, err := t.Get(ctx, ref); {
		case err == nil:
			of = referenceTo(k.GVK, stem)
			found++
		case !errors.Is(err, ErrGone):
			return pool.Unknown, Recheck, fmt.Errorf("looking for the workload of pod %s/%s: %w", namespace, pod, err)
		}
	}
	if found > 1 {
		return pool.Unknown, Recheck, nil
	}
	is, retry, err = t.Wanted(ctx, namespace, of, pod, keep, siblings)
	return is, cmp.Or(retry, Recheck), err
}

func referenceTo(kind schema.GroupVersionKind, name string) stayputv1alpha1.WorkloadReference {
	return stayputv1alpha1.WorkloadReference{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Name: name}
}

// poll returns nil if a workload of a kind that is not watched exists.
func (t *Workloads) poll(ctx context.Context, kind schema.GroupVersionKind, ref home.Ref) error {
	if said, ok := t.polled.Get(ref); ok {
		return said.(polled).err
	}
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(kind)
	err := t.live.Get(ctx, ref.Key(), o)
	switch {
	case Absent(err):
		return ErrGone
	case err != nil:
		err = fmt.Errorf("reading %s: %w", ref, err)
	}
	if err == nil || apierrors.IsForbidden(err) {
		t.polled.Set(ref, polled{err}, pollEvery)
	}
	return err
}

// Maker returns the workload that makes pods of this stem, told by the name alone: of a kind whose pods keep their
// names, and with a template that asks for addresses under the pods' own names. It is nil if there is none, or if more
// than one could be it. An error means that it is not known.
func (t *Workloads) Maker(ctx context.Context, namespace, stem string) (*stayputv1alpha1.WorkloadReference, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupWithin)
	defer cancel()
	t.mu.Lock()
	var kinds []kindState
	for _, k := range t.kinds {
		kinds = append(kinds, *k)
	}
	t.mu.Unlock()
	key := types.NamespacedName{Namespace: namespace, Name: stem}
	var of []schema.GroupVersionKind
	var found client.Object
	for _, k := range kinds {
		if errors.Is(k.problem, ErrNotServed) {
			continue
		}
		if k.problem != nil {
			return nil, fmt.Errorf("looking for %s of kind %s: %w", key, k.GVK.GroupKind(), k.problem)
		}
		o := k.object()
		switch err := t.cache.Get(ctx, key, o, client.UnsafeDisableDeepCopy); {
		case err == nil:
			of, found = append(of, k.GVK), o
		case !Absent(err):
			return nil, fmt.Errorf("looking for %s of kind %s: %w", key, k.GVK.GroupKind(), err)
		}
	}
	if len(of) != 1 {
		return nil, nil
	}
	ref := home.Ref{Group: of[0].Group, Kind: of[0].Kind, Namespace: namespace, Name: stem}
	version := otherMaker{found.GetUID(), found.GetGeneration()}
	if known, ok := t.others.Get(ref); ok && known == version {
		return nil, nil
	}
	o := &unstructured.Unstructured{} // the cache does not have its template
	o.SetGroupVersionKind(of[0])
	if err := t.live.Get(ctx, key, o); err != nil {
		if Absent(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("reading %s %s: %w", of[0].GroupKind(), key, err)
	}
	asks, _, err := unstructured.NestedStringMap(o.Object, "spec", "template", "metadata", "annotations")
	if err != nil || !home.Annotated(asks) || asks[stayputv1alpha1.AnnotationIdentity] != "" {
		if version.generation > 0 {
			t.others.Set(ref, otherMaker{o.GetUID(), o.GetGeneration()}, keptFor)
		}
		return nil, nil // its pods ask for nothing, so that it is not theirs, or it has no template
	}
	return &stayputv1alpha1.WorkloadReference{APIVersion: o.GetAPIVersion(), Kind: o.GetKind(), Name: stem,
		UID: string(o.GetUID())}, nil
}
