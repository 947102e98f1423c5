package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/gate"
)

const (
	// page is the number of pods per list request.
	page = 500
	// ungaters is how many pods are ungated at a time: during an uninstallation the rights to do it may last for half
	// a second.
	ungaters = 64
)

// inForce is longer than the API server applies a policy after its binding was deleted. Tests shorten it.
var inForce = 3 * time.Second

// settled is how long after the bindings were deleted, in terms of inForce, no policy can have gated a pod that comes:
// its template has the gate.
const settled = 4

// unscheduled selects the pods that can be gated.
var unscheduled = client.MatchingFields{"spec.nodeName": ""}

// UngateAll removes the placement gate from every pod of the cluster, until two passes with a pause between them find
// none, and writes a line for each pod to out. The bindings of the policies that add the gate must be deleted before.
// Pods whose templates have the gate may be created all the time: once no policy can have gated a pod, it makes a last
// pass and says how many came after it. After a pod that it cannot ungate it goes on with the others, then returns that
// error. c must read from the API server, not from a cache.
func UngateAll(ctx context.Context, c client.Client, out io.Writer) error {
	start := time.Now()
	var changed sync.Map // UIDs of pods that were changed since they were listed, such as by a controller that ungates
	var ungated atomic.Int64
	remove := func(pod *corev1.Pod) error {
		err := client.IgnoreNotFound(gate.Remove(ctx, c, pod))
		if apierrors.IsInvalid(err) || apierrors.IsConflict(err) {
			if _, again := changed.LoadOrStore(pod.UID, true); !again {
				return nil // the next pass sees what it is now
			}
		}
		if err != nil {
			return err
		}
		ungated.Add(1)
		fmt.Fprintf(out, "pod/%s ungated in namespace %s\n", pod.Name, pod.Namespace)
		return nil
	}
	for quiet := false; ; {
		last := time.Since(start) > settled*inForce
		found, err := ungatePages(ctx, c, home.Gated, remove)
		switch {
		case err != nil:
			return err
		case found == 0 && quiet:
			fmt.Fprintln(out, "no pod is gated")
			return nil
		case found > 0 && last:
			again := func(pod *corev1.Pod) bool {
				_, ok := changed.Load(pod.UID)
				return ok && home.Gated(pod)
			}
			if _, err := ungatePages(ctx, c, again, remove); err != nil {
				return err
			}
			var example atomic.Pointer[corev1.Pod]
			left, err := ungatePages(ctx, c, home.Gated, func(pod *corev1.Pod) error { example.Store(pod); return nil })
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "pods are still created with the gate %s, which no policy adds anymore: %d have been ungated, ",
				v1alpha1.PlacementGate, ungated.Load())
			if pod := example.Load(); pod != nil {
				fmt.Fprintf(out, "%d remain, for example %s/%s; ", left, pod.Namespace, pod.Name)
			}
			fmt.Fprintln(out, "remove it from their pod templates, nothing else removes it")
			return nil
		}
		if quiet = found == 0; quiet {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(inForce):
			}
		}
	}
}

// ungatePages calls remove for each pod of the cluster that is gated, and returns how many those are.
func ungatePages(
	ctx context.Context, c client.Reader, gated func(*corev1.Pod) bool, remove func(*corev1.Pod) error,
) (found int, err error) {
	var list corev1.PodList
	for first := true; first || list.Continue != ""; first = false {
		listErr := c.List(ctx, &list, unscheduled, client.Limit(page), client.Continue(list.Continue))
		if listErr != nil {
			return found, errors.Join(err, fmt.Errorf("listing pods: %w", listErr))
		}
		n, ungateErr := ungate(list.Items, gated, remove)
		found, err = found+n, errors.Join(err, ungateErr)
	}
	return found, err
}

// ungate calls remove for each pod that is gated, many at a time, and returns how many those are. It goes on after an
// error, and returns the first.
func ungate(pods []corev1.Pod, gated func(*corev1.Pod) bool, remove func(*corev1.Pod) error) (found int, err error) {
	var all errgroup.Group
	all.SetLimit(ungaters)
	for i := range pods {
		pod := &pods[i]
		if !gated(pod) {
			continue
		}
		found++
		all.Go(func() error {
			if err := remove(pod); err != nil {
				return fmt.Errorf("ungating pod %s/%s: %w", pod.Namespace, pod.Name, err)
			}
			return nil
		})
	}
	return found, all.Wait()
}

// deleteGatedWorkloads deletes the ConfigMaps that say which recorded pods are gated.
func deleteGatedWorkloads(ctx context.Context, c client.Client) error {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	if err := c.List(ctx, &list, client.MatchingFields{metav1.ObjectNameField: gate.Workloads}); err != nil {
		return fmt.Errorf("listing the ConfigMaps %s: %w", gate.Workloads, err)
	}
	var errs []error
	for _, item := range list.Items {
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: item.Namespace, Name: item.Name}}
		if err := client.IgnoreNotFound(c.Delete(ctx, o)); err != nil {
			errs = append(errs, fmt.Errorf("deleting ConfigMap %s/%s: %w", o.Namespace, o.Name, err))
		}
	}
	return errors.Join(errs...)
}
