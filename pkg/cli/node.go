package cli

import (
	"github.com/spf13/cobra"
)

func nodeCommand(c *cluster) *cobra.Command {
	var d document
	cmd := &cobra.Command{
		Use:   "node NODE",
		Short: "Draw a node's address ranges: what is free, bound, retained",
		Long: "Draw a node's address ranges, one character an address, by network and range set, with totals and the share that may be\n" +
			"promised. It asks the node's agent.\n\n" +
			"With -o json or yaml it is what `stayput-agent inspect` prints on the node (Go: pkg/api/inspection, Node).",
		Args:              exactlyOne("NODE", "the name of a node"),
		ValidArgsFunction: c.complete(clusterObjects("Node"), 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			reach, err := c.agents()
			if err != nil {
				return err
			}
			n, err := inspect(cmd.Context(), reach, args[0])
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if d.asked() {
				return d.print(out, n)
			}
			return drawNode(out, n, width(out), painting(out))
		},
	}
	d.addFlags(cmd)
	return cmd
}

func (d *document) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&d.format, "output", "o", "", "json or yaml instead of text")
	if err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"json", "yaml"}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}
