package main

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/cmd/internal/program"
	"github.com/stayput/stayput/pkg/node/inspect"
)

func inspectCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect",
		Short: "Print what this node's ledgers, CNI configuration, runtime and agent say, as JSON",
		Long: "Print what this node's ledgers, CNI configuration, runtime and agent say, as JSON. It changes nothing. It " +
			"accepts the\n" +
			"flags of the daemon and must be given the same values; kubectl stayput runs it that way in the agent's pod.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printJSON(cmd, inspect.Node(cmd.Context(), inspect.Options{
				Version: program.Version(), Listen: o.listen,
				StateDir: o.node.StateDir, CNIConfDir: o.node.CNIConfDir, CNIBinDir: o.node.CNIBinDir, CRISocket: o.node.CRISocket,
				InstallCNI: o.node.InstallCNI, PluginBinary: o.node.PluginBinary, GracePeriod: o.node.GracePeriod,
			}))
		},
	}
	o.addFlags(cmd)
	return cmd
}

// printJSON prints what a command found, for kubectl stayput and for people.
func printJSON(cmd *cobra.Command, v any) error {
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetIndent("", "  ")
	return e.Encode(v)
}
