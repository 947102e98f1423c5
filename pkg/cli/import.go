package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

// The sources of an import.
const (
	sourceOpenKruise = "openkruise"
	sourceSpiderpool = "spiderpool"
)

func importCommand(s *settings) *cobra.Command {
	var format documentFormat
	var yes bool
	var retain string
	cmd := &cobra.Command{
		Use:   "import (openkruise | spiderpool) [NODE...]",
		Short: "Take over the addresses that another program keeps, so that pods have today's",
		Long: "Take over the addresses that another program keeps, so that pods keep those that they have today. Without --yes it prints\n" +
			"the plan and changes nothing.\n\n" +
			"openkruise: what OpenKruise's patched host-local has reserved on the nodes. Pods that run without a reservation need no\n" +
			"import: the agent adopts the addresses of host-local by itself. Import within the agent's grace period (10 min) after\n" +
			"stayput was installed: by then the addresses of pods that are gone count as leaked.\n\n" +
			"spiderpool: the SpiderEndpoints of StatefulSets' pods. The networks' ranges must contain the addresses, and must have\n" +
			"been configured for stayput: nothing else can give them to pods any more.\n\n" +
			"A promise lasts only if the pod template asks for it: put " + stayputv1alpha1.AnnotationRetainIP + " there first.",
		Example: `  kubectl stayput import openkruise
  kubectl stayput import spiderpool node-1 --retain-ip=while-owned --yes`,
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return []string{sourceOpenKruise, sourceSpiderpool}, cobra.ShellCompDirectiveNoFileComp
			}
			return s.complete(clusterObjects("Node"), 0)(cmd, args, prefix)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || args[0] != sourceOpenKruise && args[0] != sourceSpiderpool {
				return fmt.Errorf("SOURCE: %q is not valid: expected openkruise or spiderpool", strings.Join(firstOf(args, 1), " "))
			}
			if _, _, err := ledger.ParseAnnotations(map[string]string{ledger.AnnotationRetainIP: retain}); err != nil {
				return fmt.Errorf("--retain-ip: %w", err)
			}
			c, err := s.connect()
			if err != nil {
				return err
			}
			done, failed, err := runImport(cmd.Context(), c, args[0], args[1:], retain, yes, newProgress(cmd.ErrOrStderr()))
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			err = format.print(out, done, func() error {
				if len(done.Items) == 0 {
					fmt.Fprintln(cmd.ErrOrStderr(), "There is nothing to import.")
					return nil
				}
				return printTable(out, importTable(done), printers.PrintOptions{})
			})
			if err == nil && !yes && slices.ContainsFunc(done.Items, willAct) {
				fmt.Fprintln(cmd.ErrOrStderr(), "This is a plan, nothing was changed. --yes carries it out.")
			}
			return errors.Join(err, failed)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&yes, "yes", "y", false, "carry it out")
	f.StringVar(&retain, "retain-ip", stayputv1alpha1.RetentionWhileOwned, "with spiderpool: how long the addresses of pods are kept whose template does not say it")
	format.addFlags(cmd)
	return cmd
}

func willAct(i inspection.ImportItem) bool {
	return i.Action == inspection.ActionBind || i.Action == inspection.ActionRetain
}

// runImport asks every node. failed are the nodes that did not answer: what the others say counts.
func runImport(ctx context.Context, c *cluster, source string, args []string, retain string, act bool, line *progress) (done *inspection.Import, failed, err error) {
	defer line.done()
	done = &inspection.Import{Items: []inspection.ImportItem{}}
	byNode := map[string][]inspection.ImportItem{}
	switch source {
	case sourceSpiderpool:
		line.say("reading SpiderEndpoints ...")
		items, err := spiderEndpoints(ctx, c, retain)
		if err != nil {
			return nil, nil, err
		}
		for _, i := range items {
			switch {
			case len(args) > 0 && !slices.Contains(args, i.Node):
			case i.Action != "":
				done.Items = append(done.Items, i)
			default:
				byNode[i.Node] = append(byNode[i.Node], i)
			}
		}
	default:
		nodes, err := nodesNamed(ctx, c, args)
		if err != nil {
			return nil, nil, err
		}
		for _, n := range nodes {
			byNode[n.Name] = nil
		}
	}

	nodes := slices.Sorted(maps.Keys(byNode))
	answers, errs := make([]*inspection.Import, len(nodes)), make([]error, len(nodes))
	askAll(ctx, nodes, line, func(ctx context.Context, i int) {
		answers[i], errs[i] = importOn(ctx, c.agents, nodes[i], byNode[nodes[i]], act)
	})
	for i, answer := range answers {
		if errs[i] != nil {
			continue
		}
		for _, item := range answer.Items {
			item.Node = nodes[i]
			done.Items = append(done.Items, item)
		}
	}
	slices.SortStableFunc(done.Items, func(a, b inspection.ImportItem) int {
		if d := strings.Compare(a.Namespace, b.Namespace); d != 0 {
			return d
		}
		return comparePods(a.Pod, b.Pod)
	})
	if act && slices.ContainsFunc(done.Items, func(i inspection.ImportItem) bool { return i.Action == inspection.ActionRefuse }) {
		errs = append(errs, errors.New("some addresses were refused"))
	}
	return done, errors.Join(errs...), nil
}

// importOn has one node take over these items; without items, what OpenKruise has left on it.
func importOn(ctx context.Context, reach Agents, node string, items []inspection.ImportItem, act bool) (*inspection.Import, error) {
	args := []string{"import", "openkruise"}
	var stdin []byte
	if items != nil {
		args[1] = "-"
		var err error
		if stdin, err = json.Marshal(inspection.Import{Items: items}); err != nil {
			return nil, err
		}
	}
	if act {
		args = append(args, "--act")
	}
	out, err := reach.Run(ctx, node, stdin, args...)
	if err != nil {
		return nil, err
	}
	var answer inspection.Import
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("node %s: what stayput-agent import printed: %w", node, err)
	}
	return &answer, nil
}

func importTable(done *inspection.Import) *metav1.Table {
	table := &metav1.Table{
		ColumnDefinitions: columnsOf("Namespace", "Pod", "Node", "IP", "Retention", "Action", "Done", "Why"),
	}
	for _, i := range done.Items {
		var ips []string
		for _, ip := range i.IPs {
			ips = append(ips, ip.String())
		}
		is := none
		switch {
		case i.Done:
			is = "yes"
		case willAct(i):
			is = "no"
		}
		table.Rows = append(table.Rows, metav1.TableRow{Cells: []any{
			i.Namespace, i.Pod, orNone(i.Node), orNone(strings.Join(ips, ",")), orNone(i.Retention), string(i.Action), is, i.Why,
		}})
	}
	return table
}
