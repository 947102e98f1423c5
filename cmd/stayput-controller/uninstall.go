package main

import (
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/placement"
)

func uninstallCommand(o *options) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Begin the uninstallation, and wait until nothing needs stayput any more",
		Long: "Delete the bindings that gate pods and the ConfigMap stayput-installation, let every gated pod go, and\n" +
			"wait until the agents that run have put their nodes back as they were. Then everything else of stayput can\n" +
			"be deleted. Helm runs it before it deletes a release; it may be run by hand, and again.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := o.config()
			if err != nil {
				return err
			}
			c, err := client.New(config, client.Options{Scheme: placement.Scheme})
			if err != nil {
				return err
			}
			return placement.Uninstall(cmd.Context(), c, o.namespace(), timeout, cmd.OutOrStdout())
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait for pods and agents")
	return cmd
}
