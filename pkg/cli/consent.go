package cli

import (
	"bufio"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// consent is how the user agrees to what a verb is about to change: by --yes beforehand, or on a terminal to the plan
// that the verb has shown. With --dry-run nothing is to be changed.
type consent struct {
	yes    bool
	dryRun string
	modes  []string // of --dry-run
}

// The values of kubectl's flag --dry-run.
const (
	dryRunNone   = "none"
	dryRunClient = "client"
	dryRunServer = "server"
)

var (
	errNoConsent = errors.New("standard input is not a terminal: confirm with --yes, or preview with " +
		"--dry-run=client")
	errUnchanged = errors.New("nothing was changed")
)

// addFlags adds the flags to a verb; what says in the help what the modes of --dry-run do.
func (a *consent) addFlags(cmd *cobra.Command, what string, modes ...string) {
	a.modes = modes
	f := cmd.Flags()
	f.BoolVarP(&a.yes, "yes", "y", false, "Do not ask for confirmation")
	f.StringVar(&a.dryRun, "dry-run", dryRunNone, fmt.Sprintf("One of: (%s). %s", strings.Join(modes, ", "), what))
	completeFlag(cmd, "dry-run", cobra.FixedCompletions(modes, cobra.ShellCompDirectiveNoFileComp))
}

// dry reports whether nothing is to be changed.
func (a *consent) dry() bool { return a.dryRun != dryRunNone }

// note follows a result in print: that it is a dry run's.
func (a *consent) note() string {
	switch a.dryRun {
	case dryRunClient:
		return " (dry run)"
	case dryRunServer:
		return " (server dry run)"
	}
	return ""
}

// validate returns errNoConsent if the user can never agree.
func (a *consent) validate(cmd *cobra.Command) error {
	switch {
	case !slices.Contains(a.modes, a.dryRun):
		last := len(a.modes) - 1
		return fmt.Errorf("--dry-run: %q is not valid: expected %s or %s", a.dryRun, strings.Join(a.modes[:last], ", "),
			a.modes[last])
	case !a.dry() && !a.yes && !interactive(cmd.InOrStdin()):
		return errNoConsent
	}
	return nil
}

// ask shows the plan and returns errUnchanged if the user does not agree to it. It does neither if the user has agreed
// beforehand or nothing is to be changed.
func (a *consent) ask(cmd *cobra.Command, question string, plan func() error) error {
	if a.dry() || a.yes {
		return nil
	}
	if err := plan(); err != nil {
		return err
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s (y/N) ", question)
	answers := make(chan string, 1)
	go func() { // reading cannot be interrupted
		answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n') // the end of the input is no consent
		answers <- strings.ToLower(strings.TrimSpace(answer))
	}()
	select {
	case <-cmd.Context().Done():
	case answer := <-answers:
		if answer == "y" || answer == "yes" {
			return nil
		}
	}
	return errUnchanged
}
