// Command stayput-agent is the node daemon beside the CNI IPAM plugin stayput: see pkg/node for what it
// promises. Its subcommand uninstall frees what is retained on the node.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/cmd/internal/program"
)

func main() { os.Exit(program.Run(command())) }

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:           "stayput-agent",
		Short:         "The node daemon of stayput: policies, leaks, expiry, metrics",
		Version:       program.Version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: false,
		RunE:          func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), o, cmd.ErrOrStderr()) },
	}
	o.addFlags(cmd)
	cmd.AddCommand(uninstallCommand(&o), inspectCommand(&o), importCommand(&o))
	return cmd
}
