package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/inspection"
)

// errNamespace: the addresses of its pods have objects, which are the way to release them.
var errNamespace = errors.New("the namespace exists")

// runOn releases what a node retains for the pods of a namespace that is gone, with all its RetainedIPs.
func (o *release) runOn(cmd *cobra.Command, c *cluster) error {
	ctx, out := cmd.Context(), cmd.OutOrStdout()
	kept, err := releaseOn(ctx, c, o.node, false)
	if err != nil {
		return err
	}
	if len(kept.Items) == 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "Node %s retains nothing for namespace %s.\n", o.node, c.namespace)
		return nil
	}
	err = o.ask(cmd, "Release them?", func() error {
		var b strings.Builder
		fmt.Fprintf(&b, "Node %s will release these addresses of the deleted namespace %s:\n", o.node, c.namespace)
		for _, i := range kept.Items {
			fmt.Fprintf(&b, "  %s\n", printable(fmt.Sprintf("%s  %s  network %s", i.Pod, i.IP, i.Network)))
		}
		_, err := io.WriteString(cmd.ErrOrStderr(), b.String())
		return err
	})
	if err == nil && !o.dry() {
		kept, err = releaseOn(ctx, c, o.node, true)
	}
	if err != nil {
		return err
	}
	for _, i := range kept.Items {
		fmt.Fprintln(out, printable(fmt.Sprintf("%s/%s released%s: %s of node %s", i.Namespace, i.Pod, o.note(), i.IP,
			o.node)))
	}
	return nil
}

// releaseOn has the agent of a node say what it retains for the namespace, or release it. The namespace must be gone.
func releaseOn(ctx context.Context, c *cluster, node string, act bool) (all inspection.Release, err error) {
	switch err := c.Get(ctx, types.NamespacedName{Name: c.namespace}, &corev1.Namespace{}); {
	case err == nil:
		return all, fmt.Errorf("--namespace: %s: %w: release its addresses without --node", c.namespace, errNamespace)
	case !apierrors.IsNotFound(err):
		return all, fmt.Errorf("looking up namespace %s: %w", c.namespace, rightTo("get namespaces", err))
	}
	args := []string{"release", c.namespace}
	if act {
		args = append(args, "--act")
	}
	return ask[inspection.Release](ctx, c.agents, node, nil, args...)
}
