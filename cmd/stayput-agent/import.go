package main

import (
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/importer"
)

func importCommand(o *options) *cobra.Command {
	var act bool
	var dataDirs []string
	cmd := &cobra.Command{
		Use:   "import (openkruise | -)",
		Short: "Take over addresses that another program has promised on this node",
		Long: `Take over addresses that another program has promised on this node. openkruise imports the reservations of its
patched host-local; - reads a list from standard input, in the format that this command prints. Without --act it
only prints what it would do. It accepts the flags of the daemon and must be given the same values; kubectl stayput
import runs it in the agent's pod.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var items []inspection.ImportItem
			switch args[0] {
			case "-":
				b, err := io.ReadAll(cmd.InOrStdin())
				if err != nil {
					return err
				}
				var in inspection.Import
				if err := json.Unmarshal(b, &in); err != nil {
					return fmt.Errorf("standard input: %w", err)
				}
				items = in.Items
			case "openkruise":
				dirs, err := importDirs(o.node.StateDir, dataDirs)
				if err != nil {
					return err
				}
				for _, dir := range dirs {
					found, err := importer.ReservedIPs(dir, time.Now())
					if err != nil {
						return err
					}
					items = append(items, found...)
				}
			default:
				return fmt.Errorf("source: %q is not valid: expected openkruise or -", args[0])
			}
			done, err := importer.Import(cmd.Context(), importer.Options{StateDir: o.node.StateDir, CRISocket: o.node.CRISocket},
				items, act)
			if err != nil {
				return err
			}
			return printJSON(cmd, done)
		},
	}
	o.addFlags(cmd)
	f := cmd.Flags()
	f.BoolVar(&act, "act", false, "carry out the changes instead of only printing them")
	f.StringSliceVar(&dataDirs, "data-dir", nil,
		"data directories of host-local, in addition to those of the networks that stayput serves and "+ledger.DefaultDataDir)
	return cmd
}

// importDirs are where host-local may have left something.
func importDirs(stateDir string, more []string) ([]string, error) {
	ledgers, err := ledger.Networks(ledger.Options{StateDir: stateDir})
	if err != nil {
		return nil, err
	}
	dirs := slices.Concat([]string{ledger.DefaultDataDir}, more)
	for _, l := range ledgers {
		dirs = append(dirs, l.Network().DataDir)
	}
	for i := range dirs {
		dirs[i] = filepath.Clean(dirs[i])
	}
	slices.Sort(dirs)
	return slices.Compact(dirs), nil
}
