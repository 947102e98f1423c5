// Command stayput-controller is the cluster controller: see pkg/placement for what it promises. Its subcommands
// uninstall and ungate are for the end.
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
		Use:          "stayput-controller",
		Short:        "The cluster controller of stayput: brings re-created pods home",
		Version:      program.Version(),
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE:         func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), o, cmd.ErrOrStderr()) },
	}
	o.addFlags(cmd)
	cmd.AddCommand(ungateCommand(&o), uninstallCommand(&o))
	return cmd
}
