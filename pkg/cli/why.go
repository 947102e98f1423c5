package cli

import (
	"github.com/spf13/cobra"
)

func whyCommand(c *cluster) *cobra.Command {
	var d document
	cmd := &cobra.Command{
		Use:   "why POD",
		Short: "Tell the story of a pod's address and node, and what happens if it is deleted now",
		Long: "Tell the story of a pod's address and node: what its annotations ask for, what is kept for it where, what is recorded,\n" +
			"Events, what the ledger of its node says, and what happens if it is deleted now. A pod that is gone has a story\n" +
			"as long as something is kept for it.",
		Example:           "  kubectl stayput why web-0",
		Args:              exactlyOne("POD", "the name of a pod"),
		ValidArgsFunction: c.complete(anyPods, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			name, err := names(args)
			if err != nil {
				return err
			}
			ns, err := c.namespace(false)
			if err != nil {
				return err
			}
			k, err := c.client()
			if err != nil {
				return err
			}
			reach, err := c.agents()
			if err != nil {
				return err
			}
			line := newProgress(cmd.ErrOrStderr())
			line.say("looking up pod %s and its node ...", name[0])
			f, err := gather(cmd.Context(), k, reach, c.home, ns, name[0])
			line.done()
			if err != nil {
				return err
			}
			s := f.story()
			if d.asked() {
				return d.print(cmd.OutOrStdout(), s)
			}
			return s.write(cmd.OutOrStdout(), f.now)
		},
	}
	d.addFlags(cmd)
	return cmd
}
