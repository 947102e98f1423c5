// Command stayput-controller is the cluster controller: see pkg/placement for what it promises. Its subcommand
// ungate lets gated pods go, for uninstalling.
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
		Use:          "stayput-controller",
		Short:        "The cluster controller of stayput: brings re-created pods home",
		Version:      version(),
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE:         func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), o, cmd.ErrOrStderr()) },
	}
	o.addFlags(cmd)
	cmd.AddCommand(ungateCommand(&o))
	return cmd
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
