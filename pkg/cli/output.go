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

// printTable prints a table, whose cells it makes printable.
func printTable(w io.Writer, table *metav1.Table, o printers.PrintOptions) error {
	for _, row := range table.Rows {
		for i, cell := range row.Cells {
			row.Cells[i] = printable(fmt.Sprint(cell))
		}
	}
	tabs := printers.GetNewTabWriter(w)
	if err := printers.NewTablePrinter(o).PrintObj(table, tabs); err != nil {
		return err
	}
	return tabs.Flush()
}

// columnsOf returns the columns of a table, all of them strings.
func columnsOf(names ...string) (all []metav1.TableColumnDefinition) {
	for _, n := range names {
		all = append(all, metav1.TableColumnDefinition{Name: n, Type: "string"})
	}
	return all
}

// objectFormat is kubectl's flag --output, for verbs that print objects.
type objectFormat struct {
	flags *genericclioptions.PrintFlags
	table bool // the default is a table; with wide it has all columns
}

func newObjectFormat(operation string, table bool) *objectFormat {
	return &objectFormat{flags: genericclioptions.NewPrintFlags(operation).WithTypeSetter(scheme), table: table}
}

func (o *objectFormat) addFlags(cmd *cobra.Command) {
	o.flags.AddFlags(cmd)
	if o.table {
		f := cmd.Flags().Lookup("output")
		f.Usage = strings.Replace(f.Usage, "One of: (", "One of: (wide, ", 1)
	}
	formats := o.flags.AllowedFormats()
	if o.table {
		formats = append(formats, "wide")
	}
	slices.Sort(formats)
	completeFlag(cmd, "output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

func (o *objectFormat) wide() bool { return o.table && *o.flags.OutputFormat == "wide" }

// printer returns the printer for the format, or nil for a table.
func (o *objectFormat) printer() (printers.ResourcePrinter, error) {
	if o.table && (*o.flags.OutputFormat == "" || o.wide()) {
		return nil, nil
	}
	print, err := o.flags.ToPrinter()
	if err != nil {
		return nil, fmt.Errorf("--output: %w", err)
	}
	return print, nil
}

// documentFormat is the flag --output of verbs that print something else than objects.
type documentFormat string

// addFlags adds the flag to a verb and has the verb check it first of all.
func (d *documentFormat) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVarP((*string)(d), "output", "o", "", "Output format. One of: (json, yaml). Text by default")
	completeFlag(cmd, "output", cobra.FixedCompletions([]string{"json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		switch *d {
		case "", "json", "yaml":
			return nil
		}
		return fmt.Errorf("--output: %q is not valid: expected json or yaml", *d)
	}
}

// print prints v as a document, or calls text if no format was chosen.
func (d documentFormat) print(w io.Writer, v any, text func() error) error {
	if d == "" {
		return text()
	}
	b, err := json.MarshalIndent(v, "", "    ")
	if err != nil {
		return err
	}
	if d == "yaml" {
		b, err = yaml.JSONToYAML(b)
	} else {
		b = append(b, '\n')
	}
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// none fills a column that has nothing to say, as kubectl writes it.
const none = "<none>"

func orNone(s string) string {
	if s == "" {
		return none
	}
	return s
}

// shortDuration writes a duration such as 10m0s as 10m. Other text stays as it is.
func shortDuration(text string) string {
	if d, err := time.ParseDuration(text); err != nil || d == 0 {
		return text
	}
	for _, zero := range []string{"0s", "0m"} {
		if rest, found := strings.CutSuffix(text, zero); found && strings.ContainsAny(rest[len(rest)-1:], "hm") {
			text = rest
		}
	}
	return text
}

// count writes a number with its noun.
func count(n int, one, many string) string {
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
