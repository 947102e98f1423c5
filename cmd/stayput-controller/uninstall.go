package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/placement/uninstall"
)

func uninstallCommand(o *options) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Prepare the cluster for the removal of stayput",
		Long: "Delete the bindings that gate pods and the ConfigMap stayput-installation, ungate every pod, remove the\n" +
			"finalizers of PodIPs and PodIPPools, and wait until the running agents have restored their nodes. Then\n" +
			"all other objects of stayput can be deleted. Helm runs this before it deletes a release. It may be run by hand\n" +
			"and repeatedly.",
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
			return uninstall.Run(cmd.Context(), c, namespace, timeout, cmd.OutOrStdout())
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait for pods and agents")
	return cmd
}

func ungateCommand(o *options) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "ungate --all",
		Short: "Ungate every pod that waits for its placement",
		Long: `Ungate every pod that waits for its placement: the scheduler is free to place it. For use during an
uninstallation, after the admission policies that gate pods are gone. It may be run more than once.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !all {
				return errors.New("--all is required: it confirms that all gated pods of the cluster are to be ungated")
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			return uninstall.UngateAll(cmd.Context(), c, cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "ungate every gated pod of the cluster")
	return cmd
}
