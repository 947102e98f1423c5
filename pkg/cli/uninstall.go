package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/uninstall"
)

func uninstallCommand(s *settings) *cobra.Command {
	var agree consent
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Put nodes and pods back, before Stayput's objects are deleted",
		Long: `Put the nodes back as they were before Stayput, end all promises, and ungate every
pod. Then Stayput's objects can be deleted with kubectl. helm uninstall does the same
by itself.

Pods keep running, with their addresses. PodIPs and pools stay. It names the nodes that
no agent could put back. It may be run again, also after the objects were deleted, to
ungate pods and to remove the finalizers of PodIPs and pools.`,
		Example: `  kubectl stayput uninstall
  kubectl delete -f gate-policies.yaml -f install.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return fmt.Errorf("--timeout: %s is not valid: expected more than 0", timeout)
			}
			if err := agree.validate(cmd); err != nil {
				return err
			}
			c, err := s.connect()
			if err != nil {
				return err
			}
			plan := func(out io.Writer) error {
				_, err := fmt.Fprintf(out, "All nodes of the cluster at %s give up the addresses that they keep for "+
					"deleted pods, and pods no longer wait for theirs.\n", c.config.Host)
				return err
			}
			if agree.dry() {
				return plan(cmd.OutOrStdout())
			}
			if err := agree.ask(cmd, "Uninstall Stayput from this cluster?",
				func() error { return plan(cmd.ErrOrStderr()) }); err != nil {
				return err
			}
			return uninstall.Run(cmd.Context(), c.Client, c.installation, timeout,
				func(line string) { fmt.Fprintln(cmd.OutOrStdout(), printable(line)) })
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "How long to wait for pods and agents")
	agree.addFlags(cmd, "With client, only say what would be done", dryRunNone, dryRunClient)
	return cmd
}
