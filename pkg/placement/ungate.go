package placement

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// page is how many pods are read at a time.
	page = 500
	// inForce is longer than the API server goes on with a policy whose binding was deleted.
	inForce = 3 * time.Second
	// ungaters let pods go at the same time: at an uninstallation the right to do that may last for half a second.
	ungaters = 64
)

// withoutNode selects the pods that can be gated: a gated pod has no node.
var withoutNode = client.MatchingFields{"spec.nodeName": ""}

// UngateAll removes the placement gate from every pod of the cluster that has it, until two passes with a pause
// between them find none, and writes a line for each to out. To be run once the bindings of the policies that add
// the gate are deleted: that is uninstalling. It goes on after a pod that it could not ungate and returns such an
// error. c must read from the API server.
func UngateAll(ctx context.Context, c client.Client, out io.Writer) error {
	for quiet := false; ; {
		found, err := ungatePass(ctx, c, out)
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

// ungatePass goes through the pods once.
func ungatePass(ctx context.Context, c client.Client, out io.Writer) (found int, err error) {
	list := &corev1.PodList{}
	for first := true; first || list.Continue != ""; first = false {
		if listErr := c.List(ctx, list, withoutNode, client.Limit(page), client.Continue(list.Continue)); listErr != nil {
			return found, errors.Join(err, fmt.Errorf("listing pods: %w", listErr))
		}
		var waiting []*corev1.Pod
		for i := range list.Items {
			if gated(&list.Items[i]) {
				waiting = append(waiting, &list.Items[i])
			}
		}
		found += len(waiting)
		err = errors.Join(err, ungate(waiting, func(pod *corev1.Pod) error {
			if err := client.IgnoreNotFound(removeGate(ctx, c, pod)); err != nil {
				return err
			}
			fmt.Fprintf(out, "pod/%s ungated in namespace %s\n", pod.Name, pod.Namespace)
			return nil
		}))
	}
	return found, err
}

// ungate lets pods go, many at a time. remove is called with each; of its errors one is returned.
func ungate(pods []*corev1.Pod, remove func(*corev1.Pod) error) error {
	next := make(chan *corev1.Pod)
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	for range min(ungaters, len(pods)) {
		wg.Go(func() {
			for pod := range next {
				if err := remove(pod); err != nil {
					mu.Lock()
					failed = fmt.Errorf("ungating pod %s/%s: %w", pod.Namespace, pod.Name, err)
					mu.Unlock()
				}
			}
		})
	}
	for _, pod := range pods {
		next <- pod
	}
	close(next)
	wg.Wait()
	return failed
}
