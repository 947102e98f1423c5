package podstate

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// Indexes of PersistentPodStates in the cache, within their namespace.
const (
	statesByTarget     = "target" // indexKey of the target
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

// statesOf returns the objects for a workload, the obeyed one first. They are the cache's own and must not be changed.
func statesOf(ctx context.Context, from client.Reader, ref home.Ref) ([]*kruisev1alpha1.PersistentPodState, error) {
	var list kruisev1alpha1.PersistentPodStateList
	err := from.List(ctx, &list, client.InNamespace(ref.Namespace), client.MatchingFields{statesByTarget: indexKey(ref)},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the PersistentPodStates for %s: %w", ref, err)
	}
	return home.ByAge(list.Items), nil
}

// targetsOfKind returns the workloads of a kind that have a PersistentPodState.
func targetsOfKind(ctx context.Context, from client.Reader, gk schema.GroupKind) []home.Ref {
	return slices.DeleteFunc(everyState(ctx, from, home.TargetOf),
		func(ref home.Ref) bool { return ref.GroupKind() != gk })
}

// targetsOfPod returns the workloads with a PersistentPodState that a pod belongs to or, as an orphan, may have
// belonged to.
func targetsOfPod(ctx context.Context, from client.Reader, pod *cluster.Pod) []home.Ref {
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
	in := client.InNamespace(pod.GetNamespace())
	if err := from.List(ctx, &list, in, field, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Cannot list PersistentPodStates", "pod", client.ObjectKeyFromObject(pod))
	}
	var refs []home.Ref
	for i := range list.Items {
		if ref := home.TargetOf(&list.Items[i]); !slices.Contains(refs, ref) {
			refs = append(refs, ref)
		}
	}
	return refs
}

// orLater turns the error of a write to a changed object into a retry once the cache has caught up. In a namespace that
// is being deleted there is nothing left to do.
func orLater(err error) (reconcile.Result, error) {
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return reconcile.Result{RequeueAfter: cluster.CacheLag}, nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, err
}

// everyState returns a request for each PersistentPodState.
func everyState[request comparable](ctx context.Context, from client.Reader,
	of func(*kruisev1alpha1.PersistentPodState) request) []request {
	var list kruisev1alpha1.PersistentPodStateList
	if err := from.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Cannot list PersistentPodStates")
	}
	all := make([]request, len(list.Items))
	for i := range list.Items {
		all[i] = of(&list.Items[i])
	}
	return all
}
