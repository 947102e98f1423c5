package main

import (
	"errors"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/placement"
)

func ungateCommand(o *options) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "ungate --all",
		Short: "Let every pod go that waits for its placement",
		Long: "Let every pod go that waits for its placement, wherever the scheduler likes. To be run when stayput is\n" +
			"uninstalled, once the admission policies that gate pods are gone; it may be run again.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !all {
				return errors.New("--all is needed: it says that every gated pod of the cluster is meant")
			}
			config, err := o.config()
			if err != nil {
				return err
			}
			c, err := client.New(config, client.Options{Scheme: placement.Scheme})
			if err != nil {
				return err
			}
			return placement.UngateAll(cmd.Context(), c, cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "every gated pod of the cluster")
	return cmd
}
