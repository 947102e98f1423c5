package uninstall

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

const (
	// page is how many objects are listed at a time, writers how many are written at a time.
	page    = 500
	writers = 64
)

// Ungate removes the placement gate from every pod that has it, calls say with a line for each, and returns how many
// there were. After a pod that it cannot ungate it goes on with the others, and returns the error. c must read from the
// API server, not from a cache.
func Ungate(ctx context.Context, c client.Client, say func(line string)) (found int, err error) {
	var mu sync.Mutex
	err = each(ctx, c, "pods", &corev1.PodList{}, func(o client.Object) func() error {
		pod := o.(*corev1.Pod)
		if !home.Gated(pod) {
			return nil
		}
		found++
		return func() error {
			err := removeGate(ctx, c, pod)
			if err != nil {
				return fmt.Errorf("ungating pod %s/%s: %w", pod.Namespace, pod.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			say(fmt.Sprintf("pod/%s ungated in namespace %s", pod.Name, pod.Namespace))
			return nil
		}
	}, client.MatchingFields{"spec.nodeName": ""})
	return found, err
}

// removeGate does nothing if the pod has lost the gate meanwhile, or is gone.
func removeGate(ctx context.Context, c client.Client, pod *corev1.Pod) error {
	patch := fmt.Appendf(nil, `{"metadata":{"uid":%q},"spec":{"schedulingGates":[{"$patch":"delete","name":%q}]}}`,
		pod.UID, v1alpha1.PlacementGate)
	err := c.Patch(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}},
		client.RawPatch(types.StrategicMergePatchType, patch))
	if apierrors.IsConflict(err) { // another pod of that name: the next list has it
		return nil
	}
	return client.IgnoreNotFound(err)
}

// deleteGatedWorkloads deletes the ConfigMaps that say which recorded pods are gated.
func (r *removal) deleteGatedWorkloads(ctx context.Context) error {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	return each(ctx, r.Client, "the ConfigMaps "+home.GatedWorkloads, list, func(o client.Object) func() error {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName()}}
		return func() error { return client.IgnoreNotFound(r.Delete(ctx, cm)) }
	}, client.MatchingFields{metav1.ObjectNameField: home.GatedWorkloads})
}

// removeFinalizers removes our finalizer from all PodIPs, PodIPPools and SpiderIPPools, and returns how many had it.
// Nothing else would, and neither they nor their definitions could be deleted. They stay for the next installation,
// whose controllers put the finalizers back.
func (r *removal) removeFinalizers(ctx context.Context) (found int, err error) {
	var errs []error
	for _, list := range []client.ObjectList{
		&v1alpha1.PodIPList{}, &v1alpha1.PodIPPoolList{}, &spiderpoolv2beta1.SpiderIPPoolList{},
	} {
		errs = append(errs, each(ctx, r.Client, "PodIPs and pools", list, func(o client.Object) func() error {
			if !slices.Contains(o.GetFinalizers(), v1alpha1.FinalizerInUse) {
				return nil
			}
			found++
			return func() error { return r.unhold(ctx, o) }
		}))
	}
	return found, errors.Join(errs...)
}

// unhold takes the finalizer off an object, unless it has changed meanwhile.
func (r *removal) unhold(ctx context.Context, o client.Object) error {
	others := slices.DeleteFunc(slices.Clone(o.GetFinalizers()),
		func(f string) bool { return f == v1alpha1.FinalizerInUse })
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": o.GetUID(), "resourceVersion": o.GetResourceVersion(), "finalizers": others,
	}})
	if err != nil {
		return err
	}
	name := o.GetName()
	err = r.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch))
	if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing the finalizer %s from %s: %w", v1alpha1.FinalizerInUse, name, err)
	}
	return nil
}

// each lists the objects of a kind, if it is served, and carries out what write returns for them, many at a time.
func each(ctx context.Context, c client.Client, what string, list client.ObjectList,
	write func(client.Object) func() error, options ...client.ListOption) error {
	for first := true; first || list.GetContinue() != ""; first = false {
		err := c.List(ctx, list, append(options, client.Limit(page), client.Continue(list.GetContinue()))...)
		if missing(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing %s: %w", what, err)
		}
		var all errgroup.Group
		all.SetLimit(writers)
		err = meta.EachListItem(list, func(o runtime.Object) error {
			if do := write(o.(client.Object)); do != nil {
				all.Go(do)
			}
			return nil
		})
		if err = errors.Join(err, all.Wait()); err != nil {
			return err
		}
	}
	return nil
}
