package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

func nodeCommand(s *settings) *cobra.Command {
	var format documentFormat
	cmd := &cobra.Command{
		Use:   "node NODE",
		Short: "List the addresses of a node: free, bound and retained",
		Long: `List the addresses of a node that are not free, by range. For each range set
it prints how many addresses are free, bound and retained, and how many more the node
may promise. It queries the node's agent. Pool addresses, which belong to no node, are
listed if pods on the node have them, or had them last.

With -o json or yaml it prints what stayput-agent inspect prints on the node
(Go: pkg/api/inspection, Node).`,
		Example:           "  kubectl stayput node node-1",
		Args:              exactlyOne("NODE", "the name of a node"),
		ValidArgsFunction: s.complete(clusterObjects("Node"), 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.connect()
			if err != nil {
				return err
			}
			n, err := inspect(cmd.Context(), c.agents, args[0])
			if errors.Is(err, ErrNoAgent) && nodeMissing(cmd.Context(), c, args[0]) {
				return fmt.Errorf("NODE: node %q does not exist", args[0])
			}
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			return format.print(out, n, func() error {
				if err := drawNode(out, n, width(out), painting(out)); err != nil {
					return err
				}
				return writePodIPs(cmd.Context(), c, out, args[0])
			})
		},
	}
	format.addFlags(cmd)
	return cmd
}

// nodeMissing reports whether there is no such Node, for certain.
func nodeMissing(ctx context.Context, k client.Client, name string) bool {
	return apierrors.IsNotFound(k.Get(ctx, client.ObjectKey{Name: name}, &corev1.Node{}))
}
