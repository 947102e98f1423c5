package podstate

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// indexKey names a workload in the indexes of the cache, which are by namespace.
func indexKey(r home.Ref) string { return r.Group + "/" + r.Kind + "/" + r.Name }

// Indexes of the cached pods, by namespace.
const (
	podsByOwner = "controller" // indexKey of the controller
	// podsOrphaned has the pods without a controller, by the name of the workload that their own name suggests, such as a
	// StatefulSet that was deleted with --cascade=orphan.
	podsOrphaned = "orphan"
)

func indexPods(ctx context.Context, indexer client.FieldIndexer) error {
	return errors.Join(
		indexer.IndexField(ctx, &cluster.Pod{}, podsByOwner, func(o client.Object) []string {
			ref, _, ok := home.OwnerOf(o)
			if !ok {
				return nil
			}
			return []string{indexKey(ref)}
		}),
		indexer.IndexField(ctx, &cluster.Pod{}, podsOrphaned, func(o client.Object) []string {
			stem, ok := orphanOf(o)
			if !ok {
				return nil
			}
			return []string{stem}
		}),
	)
}

// orphanOf returns the name of the workload that a pod without a controller may have belonged to.
func orphanOf(pod metav1.Object) (string, bool) {
	if metav1.GetControllerOf(pod) != nil {
		return "", false
	}
	stem, _, ok := home.SplitOrdinal(pod.GetName())
	return stem, ok
}

// podsOf returns the pods that name a workload as their controller, whichever UID they give it. They are the cache's
// own and must not be changed.
func podsOf(ctx context.Context, from client.Reader, ref home.Ref) ([]cluster.Pod, error) {
	var list cluster.PodList
	err := from.List(ctx, &list, client.InNamespace(ref.Namespace), client.MatchingFields{podsByOwner: indexKey(ref)},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the pods of %s: %w", ref, err)
	}
	return list.Items, nil
}

// leftOf reports whether a workload that is gone has pods left, by the cache or, since a pod may lack the labels by
// which the cache has it, by the API server. Orphans count: a new workload may adopt them.
func leftOf(ctx context.Context, from, live client.Reader, ref home.Ref) (bool, error) {
	pods, err := podsOf(ctx, from, ref)
	if err != nil || len(pods) > 0 {
		return true, err
	}
	var orphans cluster.PodList
	err = from.List(ctx, &orphans, client.InNamespace(ref.Namespace), client.MatchingFields{podsOrphaned: ref.Name},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return true, fmt.Errorf("listing the orphans of %s: %w", ref, err)
	}
	if len(orphans.Items) > 0 {
		return true, nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	for first := true; first || list.Continue != ""; first = false {
		if err := live.List(ctx, list, client.InNamespace(ref.Namespace), client.Limit(leftPage),
			client.Continue(list.Continue)); err != nil {
			return true, fmt.Errorf("listing the pods of namespace %s: %w", ref.Namespace, err)
		}
		for i := range list.Items {
			stem, orphan := orphanOf(&list.Items[i])
			of, _, owned := home.OwnerOf(&list.Items[i])
			if owned && of == ref || orphan && stem == ref.Name {
				return true, nil
			}
		}
	}
	return false, nil
}

// leftPage bounds what is in memory of a list: the metadata of a pod may take several MiB.
const leftPage = 10

// podMoved picks the changes of a pod that can change its record.
var podMoved = predicate.TypedFuncs[*cluster.Pod]{UpdateFunc: func(e event.TypedUpdateEvent[*cluster.Pod]) bool {
	was, is := e.ObjectOld, e.ObjectNew
	return was.GetUID() != is.GetUID() || was.Node() != is.Node() || podReady(was) != podReady(is) ||
		!home.SameOwner(metav1.GetControllerOf(was), metav1.GetControllerOf(is)) ||
		!was.AnnotationsEqual(is)
}}

// podReady reports whether a pod is Ready and not being deleted.
func podReady(pod *cluster.Pod) bool { return pod.GetDeletionTimestamp() == nil && pod.Ready() }
