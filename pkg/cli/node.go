package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
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
				if err := writeNode(out, n); err != nil {
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

// writeNode lists the addresses of a node that are not free, by range.
func writeNode(w io.Writer, n *inspection.Node) error {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintln(&b, printable(fmt.Sprintf(format, args...))) }
	if n.NetworksError != "" {
		say("Some networks cannot be read: %s", n.NetworksError)
	} else if len(n.Networks) == 0 {
		say("Stayput has not assigned an address to any pod on this node yet.")
	}
	for i := range n.Networks {
		if i > 0 {
			say("")
		}
		sayNetwork(say, &n.Networks[i])
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func sayNetwork(say func(format string, args ...any), n *inspection.Network) {
	say("Network %s", n.Name)
	if n.Error != "" {
		say("  cannot be read: %s", n.Error)
		return
	}
	listed := map[netip.Addr]bool{}
	for i, set := range n.RangeSets {
		if len(n.RangeSets) > 1 {
			say("  Range set %d", i)
		}
		for _, r := range set.Ranges {
			say("  %s  %s - %s", r.Subnet, r.Start, r.End)
			for _, a := range n.Addresses {
				if r.Contains(a.IP) && !listed[a.IP] {
					listed[a.IP] = true
					say("    %s %s", a.IP, stateOf(&a))
				}
			}
		}
		states := map[inspection.State]int64{}
		var used int64
		for _, a := range n.Addresses {
			if set.Contains(a.IP) {
				states[a.State]++
				used++
			}
		}
		say("  %d addresses: %d free, %d bound, %d retained", set.Size, set.Size-used, states[inspection.Bound],
			states[inspection.Retained])
		say("  promised: %d of at most %d (%s)", set.Promised, set.PromiseLimit, promiseSetting(n, set))
	}
	for _, a := range n.Addresses {
		if !listed[a.IP] {
			say("  outside the current ranges: %s %s", a.IP, stateOf(&a))
		}
	}
}
