// Command stayput-agent is the node daemon beside the CNI IPAM plugin stayput: see pkg/node for what it
// promises. Its subcommand uninstall frees what is retained on the node.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		return 1
	}
	return 0
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:           "stayput-agent",
		Short:         "The node daemon of stayput: policies, leaks, expiry, metrics",
		Version:       version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: false,
		RunE:          func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), o, cmd.ErrOrStderr()) },
	}
	o.addFlags(cmd)
	cmd.AddCommand(uninstallCommand(&o))
	return cmd
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
