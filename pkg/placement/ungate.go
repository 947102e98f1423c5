package placement

import (
	"context"
	"fmt"
	"io"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// page is how many pods are read at a time.
	page = 500
	// inForce is longer than the API server goes on with a policy whose binding was deleted.
	inForce = 3 * time.Second
)

// UngateAll removes the placement gate from every pod of the cluster that has it, until two passes with a pause
// between them find none, and writes a line for each to out. To be run once the bindings of the policies that add
// the gate are deleted: that is uninstalling. It goes on after a pod that it could not ungate and returns the last
// such error.
func UngateAll(ctx context.Context, c client.Client, out io.Writer) error {
	for quiet := false; ; {
		found, failed := 0, error(nil)
		list := &corev1.PodList{}
		for first := true; first || list.Continue != ""; first = false {
			if err := c.List(ctx, list, client.Limit(page), client.Continue(list.Continue)); err != nil {
				return fmt.Errorf("listing pods: %w", err)
			}
			for i := range list.Items {
				pod := &list.Items[i]
				if !gated(pod) {
					continue
				}
				found++
				switch err := client.IgnoreNotFound(removeGate(ctx, c, pod)); {
				case err != nil:
					failed = fmt.Errorf("ungating pod %s/%s: %w", pod.Namespace, pod.Name, err)
				default:
					fmt.Fprintf(out, "pod/%s ungated in namespace %s\n", pod.Name, pod.Namespace)
				}
			}
		}
		if failed != nil || found == 0 && quiet {
			return failed
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
