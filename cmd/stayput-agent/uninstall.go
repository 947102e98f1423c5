package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/uninstall"
)

func uninstallCommand(o *options) *cobra.Command {
	var root string
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Restore this node to its state before stayput",
		Long: `Remove Stayput's CNI configuration, free the retained addresses of every network, and remove the plugin and
Stayput's records. The daemon does the same when stayput is uninstalled from the cluster; this command is for a
node whose agent did not run then. Running pods keep their addresses; host-local frees them when they end. Run it
after the daemon has ended; it may be run more than once. In a container that sees the node's processes, use
--root=/proc/1/root.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			netns := ""
			if root != "" {
				if err := chroot(root); err != nil {
					return fmt.Errorf("--root: %w", err)
				}
				netns = "/proc/1/ns/net"
			}
			out := slog.New(slog.NewTextHandler(cmd.OutOrStdout(), &slog.HandlerOptions{ReplaceAttr: withoutTime}))
			return uninstall.Node(cmd.Context(), uninstall.Options{
				Ledgers:    ledger.Options{StateDir: o.node.StateDir},
				CNIConfDir: o.node.CNIConfDir, CNIBinDir: o.node.CNIBinDir, CNICacheDir: o.node.CNICacheDir,
				Netns: netns, Log: out,
			})
		},
	}
	cmd.Flags().StringVar(&root, "root", "", "root directory of the node, if not that of this process")
	return cmd
}

func chroot(dir string) error {
	if err := unix.Chroot(dir); err != nil {
		return &os.PathError{Op: "chroot", Path: dir, Err: err}
	}
	return os.Chdir("/")
}

// withoutTime omits time and level, for a terminal.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
		return slog.Attr{}
	}
	return a
}
