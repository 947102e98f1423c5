package placement

import (
	"context"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// page is how many pods are read at a time.
const page = 500

// UngateAll removes the placement gate from every pod of the cluster that has it, until a whole pass finds none,
// and writes a line for each to out. To be run once no policy adds the gate any more: that is uninstalling. It
// goes on after a pod that it could not ungate and returns the last such error.
func UngateAll(ctx context.Context, c client.Client, out io.Writer) error {
	for {
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
		if found == 0 || failed != nil {
			return failed
		}
	}
}
