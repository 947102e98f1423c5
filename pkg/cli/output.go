package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/yaml"
)

func printTable(w io.Writer, table *metav1.Table, o printers.PrintOptions) error {
	tabs := printers.GetNewTabWriter(w)
	if err := printers.NewTablePrinter(o).PrintObj(table, tabs); err != nil {
		return err
	}
	return tabs.Flush()
}

// printing is the flag -o of kubectl.
type printing struct {
	flags *genericclioptions.PrintFlags
	table bool // without -o, or with wide, a table is printed
}

func newPrinting(operation string, table bool) *printing {
	return &printing{flags: genericclioptions.NewPrintFlags(operation).WithTypeSetter(scheme), table: table}
}

func (p *printing) addFlags(cmd *cobra.Command) {
	p.flags.AddFlags(cmd)
	if p.table {
		f := cmd.Flags().Lookup("output")
		f.Usage = strings.Replace(f.Usage, "One of: (", "One of: (wide, ", 1)
	}
}

func (p *printing) wide() bool { return p.table && *p.flags.OutputFormat == "wide" }

// printer is what -o asks for; nil for a table.
func (p *printing) printer() (printers.ResourcePrinter, error) {
	if p.table && (*p.flags.OutputFormat == "" || *p.flags.OutputFormat == "wide") {
		return nil, nil
	}
	print, err := p.flags.ToPrinter()
	if err != nil {
		return nil, fmt.Errorf("--output: %w", err)
	}
	return print, nil
}

// document is the flag -o of verbs that print something else than objects.
type document struct{ format string }

func (d *document) validate() error {
	switch d.format {
	case "", "json", "yaml":
		return nil
	}
	return fmt.Errorf("--output: %q is not valid: expected json or yaml", d.format)
}

func (d *document) asked() bool { return d.format != "" }

func (d *document) print(w io.Writer, v any) error {
	b, err := json.MarshalIndent(v, "", "    ")
	if err != nil {
		return err
	}
	if d.format == "yaml" {
		if b, err = yaml.JSONToYAML(b); err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

// exactlyOne wants one argument.
func exactlyOne(name, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 || args[0] == "" {
			return fmt.Errorf("%s: got %d arguments: expected %s", name, len(args), what)
		}
		return nil
	}
}

// none is what a column says that has nothing to say, as kubectl writes it.
const none = "<none>"

func orNone(s string) string {
	if s == "" {
		return none
	}
	return s
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func count2(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// firstOf shortens a list for people.
func firstOf(all []string, most int) []string {
	if len(all) <= most {
		return all
	}
	return append(slices.Clone(all[:most]), fmt.Sprintf("and %d more", len(all)-most))
}

// short writes 10m, not 10m0s.
func short(d time.Duration) string {
	s := d.Round(time.Second).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
