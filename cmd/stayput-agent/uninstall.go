package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/node"
)

func uninstallCommand(o *options) *cobra.Command {
	var root string
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Put this node back as it was before stayput",
		Long: "Take stayput's CNI configuration away, free what is retained in every network, and remove the plugin and\n" +
			"stayput's records: what the daemon does when stayput is uninstalled from the cluster, for a node that it\n" +
			"did not run on at that time. Pods that run keep their addresses, which host-local frees when they end.\n" +
			"To be run once the daemon has ended; it may be run again. In a container that sees the node's processes\n" +
			"it is given --root=/proc/1/root.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Not a mount of the node's files, which would not show the network namespaces of pods that start now:
			// without its namespace a pod counts as ended.
			if root != "" {
				if err := chroot(root); err != nil {
					return fmt.Errorf("--root: %w", err)
				}
			}
			out := slog.New(slog.NewTextHandler(cmd.OutOrStdout(), &slog.HandlerOptions{ReplaceAttr: withoutTime}))
			return node.Uninstall(cmd.Context(), o.node, out)
		},
	}
	cmd.Flags().StringVar(&root, "root", "", "root directory of the node, if it is not that of this process")
	return cmd
}

func chroot(dir string) error {
	if err := unix.Chroot(dir); err != nil {
		return &os.PathError{Op: "chroot", Path: dir, Err: err}
	}
	return os.Chdir("/")
}

// withoutTime is for people who watch.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
		return slog.Attr{}
	}
	return a
}
