package main

import (
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/node"
)

func uninstallCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "uninstall",
		Short: "Put this node back as it was before stayput",
		Long: "Take stayput's CNI configuration away, free what is retained in every network, and remove the plugin and\n" +
			"stayput's records: what the daemon does when stayput is uninstalled from the cluster, for a node that it\n" +
			"did not run on at that time. Pods that run keep their addresses, which host-local frees when they end.\n" +
			"To be run once the daemon has ended; it may be run again.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := slog.New(slog.NewTextHandler(cmd.OutOrStdout(), &slog.HandlerOptions{ReplaceAttr: withoutTime}))
			return node.Uninstall(cmd.Context(), o.node, out)
		},
	}
}

// withoutTime is for people who watch.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
		return slog.Attr{}
	}
	return a
}
