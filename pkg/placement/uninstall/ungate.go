package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/gate"
)

const (
	// page is the number of pods per list request.
	page = 500
	// inForce is longer than the API server applies a policy after its binding was deleted.
	inForce = 3 * time.Second
	// ungaters is how many pods are ungated at a time: during an uninstallation the rights to do it may last for half
	// a second.
	ungaters = 64
)

// unscheduled selects the pods that can be gated.
var unscheduled = client.MatchingFields{"spec.nodeName": ""}

// UngateAll removes the placement gate from every pod of the cluster, until two passes with a pause between them find
// none, and writes a line for each pod to out. The bindings of the policies that add the gate must be deleted before.
// After a pod that it cannot ungate it goes on with the others, then returns that error. c must read from the API
// server, not from a cache.
func UngateAll(ctx context.Context, c client.Client, out io.Writer) error {
	var changed sync.Map // UIDs of pods that somebody changed since they were listed, such as a controller that ungates
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
		fmt.Fprintf(out, "pod/%s ungated in namespace %s\n", pod.Name, pod.Namespace)
		return nil
	}
	for quiet := false; ; {
		found, err := ungatePages(ctx, c, remove)
		if err != nil || found == 0 && quiet {
			return err
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

func ungatePages(ctx context.Context, c client.Reader, remove func(*corev1.Pod) error) (found int, err error) {
	var list corev1.PodList
	for first := true; first || list.Continue != ""; first = false {
		listErr := c.List(ctx, &list, unscheduled, client.Limit(page), client.Continue(list.Continue))
		if listErr != nil {
			return found, errors.Join(err, fmt.Errorf("listing pods: %w", listErr))
		}
		n, ungateErr := ungate(list.Items, home.Gated, remove)
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
