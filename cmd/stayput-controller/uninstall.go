package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/uninstall"
)

func uninstallCommand(o *options) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Prepare the cluster for the removal of stayput",
		Long: "Has no further pod gated, annotates the ConfigMap stayput-installation, which tells the agents to restore\n" +
			"their nodes, ungates every pod, removes the finalizers of PodIPs and pools, and waits until the agents are\n" +
			"done. Then all objects of stayput can be deleted. Helm runs this before it deletes a release; for people\n" +
			"there is kubectl stayput uninstall.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			namespace, err := o.namespace()
			if err != nil {
				return err
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			return uninstall.Run(cmd.Context(), c, namespace, timeout, printsTo(cmd))
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait for pods and agents")
	return cmd
}

func printsTo(cmd *cobra.Command) func(string) {
	return func(line string) { fmt.Fprintln(cmd.OutOrStdout(), line) }
}

func ungateCommand(o *options) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "ungate --all",
		Short: "Ungate every pod that waits for its placement",
		Long: `Ungate every pod that waits for its placement: the scheduler is free to place it. For use while no controller
runs, after the ClusterRoleBinding stayput-gate was deleted, without which no pod is gated. It may be run more than
once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !all {
				return errors.New("--all is required: it confirms that all gated pods of the cluster are to be ungated")
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			found, err := uninstall.Ungate(cmd.Context(), c, printsTo(cmd))
			if found == 0 && err == nil {
				fmt.Fprintln(cmd.OutOrStdout(), "no pod is gated")
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "ungate every gated pod of the cluster")
	return cmd
}
