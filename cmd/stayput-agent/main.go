// Command stayput-agent is the node daemon beside the CNI IPAM plugin stayput: see pkg/node for what it
// promises. Its subcommand uninstall frees what is retained on the node.
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
	cmd := program.Daemon("stayput-agent", "The node daemon of stayput: policies, leaks, expiry, metrics",
		func(ctx context.Context, stderr io.Writer) error { return serve(ctx, o, stderr) })
	o.addFlags(cmd)
	cmd.AddCommand(uninstallCommand(&o), inspectCommand(&o), importCommand(&o), releaseCommand(&o))
	return cmd
}
