package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
)

func releaseCommand(o *options) *cobra.Command {
	var act bool
	cmd := &cobra.Command{
		Use:   "release NAMESPACE",
		Short: "Release what this node retains for pods of a namespace that is gone",
		Long: `Release what this node retains for pods of a namespace that is gone, and print it as JSON.
Without --act it only prints what it would release. Bound addresses stay. It accepts the flags of the daemon and must
be given the same values; kubectl stayput release --node runs it in the agent's pod and verifies that the namespace
does not exist.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			done, err := release(ledger.Options{StateDir: o.node.StateDir}, args[0], act)
			return errors.Join(err, printJSON(cmd, done))
		},
	}
	o.addFlags(cmd)
	cmd.Flags().BoolVar(&act, "act", false, "carry out the changes instead of only printing them")
	return cmd
}

// release ends the promises to pods of a namespace that hold a retained address. The failure of one does not keep the
// others.
func release(o ledger.Options, namespace string, act bool) (*inspection.Release, error) {
	all := &inspection.Release{Items: []inspection.ReleaseItem{}}
	ledgers, err := ledger.Networks(o)
	if err != nil {
		return all, err
	}
	var errs []error
	for _, l := range ledgers {
		network := l.Network().Name
		addrs, err := l.List()
		if err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", network, err))
			continue
		}
		ended := map[ledger.Key]bool{}
		for _, a := range addrs {
			if a.State != ledger.StateRetained || a.Key.Namespace() != namespace {
				continue
			}
			if act && !ended[*a.Key] {
				if err := l.Release(*a.Key); err != nil && !errors.Is(err, ledger.ErrUnknownClaim) {
					errs = append(errs, fmt.Errorf("network %s: %s: %w", network, a.Key, err))
					continue
				}
				ended[*a.Key] = true
			}
			all.Items = append(all.Items,
				inspection.ReleaseItem{Namespace: namespace, Pod: a.Key.Pod, IP: a.Addr, Network: network, Done: act})
		}
	}
	return all, errors.Join(errs...)
}
