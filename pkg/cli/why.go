package cli

import (
	"github.com/spf13/cobra"
)

func whyCommand(s *settings) *cobra.Command {
	var format documentFormat
	cmd := &cobra.Command{
		Use:   "why POD",
		Short: "Explain a pod's IP address and node, and what happens if the pod is deleted now",
		Long: `Explain a pod's IP address and node: what its annotations request, what is
promised, which nodes keep addresses for it, what happened to it as far as Events
reach back (an hour by default), and what happens if it is deleted now.

A deleted pod can be explained as long as an address is kept for it.`,
		Example:           "  kubectl stayput why web-0",
		Args:              exactlyOne("POD", "the name of a pod"),
		ValidArgsFunction: s.complete(anyPods, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := names(args)
			if err != nil {
				return err
			}
			c, err := s.connect()
			if err != nil {
				return err
			}
			line := newProgress(cmd.ErrOrStderr())
			line.say("reading pod %s and its node ...", name[0])
			f, err := gather(cmd.Context(), c, name[0])
			line.done()
			if err != nil {
				return err
			}
			story, out := f.story(), cmd.OutOrStdout()
			return format.print(out, story, func() error { return story.write(out, f.now) })
		},
	}
	format.addFlags(cmd)
	return cmd
}
