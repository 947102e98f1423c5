// Command stayput-controller is the cluster controller: see pkg/placement for what it promises. Its subcommands
// uninstall and ungate are for the end.
package main

import (
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/cmd/internal/program"
)

func main() { os.Exit(program.Run(command())) }

func command() *cobra.Command {
	var o options
	cmd := program.Daemon("stayput-controller", "The cluster controller of stayput: brings re-created pods home",
		func(ctx context.Context, stderr io.Writer) error { return serve(ctx, o, stderr) })
	o.addFlags(cmd)
	cmd.AddCommand(ungateCommand(&o), uninstallCommand(&o))
	return cmd
}
