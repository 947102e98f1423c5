package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/ledger"
)

func uninstallCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "Free what is retained in every network and remove stayput's records",
		Long: "Free what is retained in every network and remove stayput's records, so that host-local can take over without\n" +
			"a leak. Pods that run keep their addresses. To be run after the CNI configuration says host-local again and\n" +
			"the daemon has ended; it may be run again.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return uninstall(ledger.Options{StateDir: o.node.StateDir}, cmd.OutOrStdout())
		},
	}
}

// uninstall goes on after an error: a network that cannot be read must not keep the others' addresses.
func uninstall(o ledger.Options, out io.Writer) error {
	ledgers, err := ledger.Networks(o)
	errs := []error{err}
	for _, l := range ledgers {
		name := l.Network().Name
		freed, err := l.Uninstall()
		for _, a := range freed.Addrs {
			fmt.Fprintf(out, "%s %s: freed\n", name, a)
		}
		for _, a := range freed.InUse {
			fmt.Fprintf(out, "%s %s: in use, becomes free when its pod ends\n", name, a)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
