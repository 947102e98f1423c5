package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/retention"
)

// The sources of an import.
const (
	sourceOpenKruise = "openkruise"
	sourceSpiderpool = "spiderpool"
	sourceCalico     = "calico"
)

var sources = []string{sourceOpenKruise, sourceSpiderpool, sourceCalico}

// takeover is what the user asked for.
type takeover struct {
	consent
	intoPools bool
	retain    string
	source    string
	nodes     []string // those named, all if there is none
	sets      []string // with calico: the StatefulSets whose pods have the addresses
	into      []string // with calico: pools of mode Calico
}

func importCommand(s *settings) *cobra.Command {
	var o takeover
	var format documentFormat
	cmd := &cobra.Command{
		Use:   "import (openkruise | spiderpool [NODE...] | calico STATEFULSET...)",
		Short: "Take over the addresses that another program keeps for pods, or has given to them",
		Long: `Take over the addresses that another program keeps, so that pods keep their current
addresses. It shows what it will do and asks for confirmation, unless --yes is given.
If standard input is not a terminal, it takes over nothing without --yes.
--dry-run=client prints the plan and changes nothing.

openkruise: the reservations of OpenKruise's patched host-local on the nodes. Running
pods without a reservation need no import: the agent adopts them. Import within the
agent's grace period (10 min) after Stayput was installed. After that the addresses
of deleted pods count as leaked.

spiderpool: the SpiderEndpoints of the pods of StatefulSets. The networks' ranges
must contain the addresses, and must be configured for Stayput, so that no other
program assigns them to pods. With --pools: a PodIPPool for each SpiderIPPool, and a
PodIP for each address of a running pod. From then on no pod may get an address from
Spiderpool.

calico: the addresses that the running pods of StatefulSets have from Calico's IPAM.
They become PodIPs of the pools of mode Calico that --into names, one for each family
of addresses, also if they are not in the pools' subnets. It takes about two minutes,
until no other pod can get the addresses. No pod restarts. Annotate the pod template
with ` + stayputv1alpha1.AnnotationPools + ` after that.

Without --pools or --into, a promise lasts only if the pod template requests it:
first annotate the template with ` + stayputv1alpha1.AnnotationRetainIP + `.`,
		Example: `  kubectl stayput import openkruise --dry-run=client
  kubectl stayput import spiderpool node-1 --retain-ip=while-owned --yes
  kubectl stayput import spiderpool --pools
  kubectl stayput import calico -n shop statefulset/web --into=blue`,
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return sources, cobra.ShellCompDirectiveNoFileComp
			}
			return s.complete(clusterObjects("Node"), 0)(cmd, args, prefix)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || !slices.Contains(sources, args[0]) {
				return fmt.Errorf("SOURCE: %q is not valid: expected openkruise, spiderpool or calico",
					strings.Join(firstOf(args, 1), " "))
			}
			if o.intoPools && (args[0] != sourceSpiderpool || len(args) > 1 || cmd.Flags().Changed("retain-ip")) {
				return errors.New("--pools: expected the source spiderpool, and neither nodes nor --retain-ip: " +
					"a pool address belongs to no node, and the pod template sets how long it is kept")
			}
			if p, _, err := retention.Parse(map[string]string{retention.AnnotationRetainIP: o.retain}); err != nil {
				return fmt.Errorf("--retain-ip: %w", err)
			} else if !p.Retains() {
				return fmt.Errorf("--retain-ip: %q retains nothing: expected a duration such as 10m, or while-owned", o.retain)
			}
			if o.source, o.nodes = args[0], args[1:]; o.source == sourceCalico {
				var err error
				if o.sets, err = setsNamed(args[1:]); err != nil {
					return err
				}
			}
			if (o.source == sourceCalico) != (len(o.into) > 0) || len(o.into) > 0 && cmd.Flags().Changed("retain-ip") {
				return errors.New("--into: expected pools with the source calico and with no other, and no --retain-ip: " +
					"the pod template sets how long an address is kept")
			}
			return o.run(cmd, s, format)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.intoPools, "pools", false, "With spiderpool: take over into pools")
	f.StringSliceVar(&o.into, "into", nil, "With calico: the pools of mode Calico, one for each family of addresses")
	f.StringVar(&o.retain, "retain-ip", stayputv1alpha1.RetentionWhileOwned,
		"With spiderpool: how long to keep the addresses of pods whose template does not specify it")
	o.addFlags(cmd, "With client, only print what would be taken over", dryRunNone, dryRunClient)
	format.addFlags(cmd)
	return cmd
}

func (o *takeover) run(cmd *cobra.Command, s *settings, format documentFormat) error {
	if err := o.consent.validate(cmd); err != nil {
		return err
	}
	c, err := s.connect()
	if err != nil {
		return err
	}
	line, act := newProgress(cmd.ErrOrStderr()), o.yes && !o.dry()
	done, failed, err := o.carryOut(cmd.Context(), c, act, line)
	if err != nil {
		return err
	}
	if hasAction(done, willAct) && !act && !o.dry() {
		err := o.ask(cmd, "Take them over?", func() error {
			w := cmd.ErrOrStderr()
			if failed != nil {
				fmt.Fprintln(w, printableError{failed})
			}
			return writeImport(w, done)
		})
		if err != nil {
			return errors.Join(failed, err)
		}
		// What has changed since the plan was made is judged again.
		if done, failed, err = o.carryOut(cmd.Context(), c, true, line); err != nil {
			return err
		}
	}
	out := cmd.OutOrStdout()
	err = format.print(out, done, func() error {
		if len(done.Items)+len(done.Pools) == 0 {
			fmt.Fprintln(cmd.ErrOrStderr(), "Nothing to import.")
		}
		return writeImport(out, done)
	})
	if o.dry() {
		fmt.Fprintln(cmd.ErrOrStderr(), "This is a dry run: nothing was changed.")
		return errors.Join(err, failed)
	}
	return errors.Join(err, failed, refused(done))
}

// carryOut plans the import and, if it is to act, carries it out. failed is what was not done, or is not known; done
// is the rest.
func (o *takeover) carryOut(ctx context.Context, c *cluster, act bool, line *progress) (
	done *inspection.Import, failed, err error) {
	defer line.done()
	switch {
	case o.intoPools:
		return importIntoPools(ctx, c, act)
	case o.source == sourceCalico:
		return importFromCalico(ctx, c, o.sets, o.into, act, line)
	}
	return o.ontoNodes(ctx, c, act, line)
}

// writeImport writes the tables of pools and addresses.
func writeImport(w io.Writer, done *inspection.Import) error {
	pools := &metav1.Table{ColumnDefinitions: columnsOf("Pool", "Subnet", "Action", "Done", "Why")}
	for _, p := range done.Pools {
		pools.Rows = append(pools.Rows, metav1.TableRow{Cells: []any{
			p.Name, p.Subnet, string(p.Action), column(p.Done, p.Action), p.Why,
		}})
	}
	items := &metav1.Table{
		ColumnDefinitions: columnsOf("Namespace", "Pod", "Node", "IP", "Retention", "Action", "Done", "Why"),
	}
	for _, i := range done.Items {
		var ips []string
		for _, ip := range i.IPs {
			ips = append(ips, ip.String())
		}
		items.Rows = append(items.Rows, metav1.TableRow{Cells: []any{
			i.Namespace, i.Pod, orNone(i.Node), orNone(strings.Join(ips, ",")), orNone(i.Retention), string(i.Action),
			column(i.Done, i.Action), i.Why,
		}})
	}
	for n, table := range []*metav1.Table{pools, items} {
		if n > 0 && len(pools.Rows) > 0 && len(items.Rows) > 0 {
			fmt.Fprintln(w)
		}
		if len(table.Rows) == 0 {
			continue
		}
		if err := printTable(w, table, printers.PrintOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// refused returns an error if some of it cannot be taken over.
func refused(done *inspection.Import) error {
	if hasAction(done, func(a inspection.Action) bool { return a == inspection.ActionRefuse }) {
		return errors.New("some addresses or pools were refused")
	}
	return nil
}

func hasAction(done *inspection.Import, is func(inspection.Action) bool) bool {
	return slices.ContainsFunc(done.Items, func(i inspection.ImportItem) bool { return is(i.Action) }) ||
		slices.ContainsFunc(done.Pools, func(p inspection.ImportPool) bool { return is(p.Action) })
}

func willAct(a inspection.Action) bool {
	return a != inspection.ActionNone && a != inspection.ActionRefuse
}

// column is whether something was done, if it is to be.
func column(done bool, a inspection.Action) string {
	switch {
	case done:
		return "yes"
	case willAct(a):
		return "no"
	}
	return none
}

// ontoNodes has every node take its share over.
func (o *takeover) ontoNodes(ctx context.Context, c *cluster, act bool, line *progress) (
	done *inspection.Import, failed, err error) {
	byNode := map[string][]inspection.ImportItem{} // nil for what the node finds itself
	done = &inspection.Import{Items: []inspection.ImportItem{}}
	if o.source == sourceSpiderpool {
		line.say("reading SpiderEndpoints ...")
		items, err := spiderEndpoints(ctx, c, o.retain)
		if err != nil {
			return nil, nil, err
		}
		for _, i := range items {
			switch {
			case len(o.nodes) > 0 && !slices.Contains(o.nodes, i.Node):
			case i.Action != "":
				done.Items = append(done.Items, i)
			default:
				byNode[i.Node] = append(byNode[i.Node], i)
			}
		}
	} else {
		nodes, err := nodesNamed(ctx, c, o.nodes)
		if err != nil {
			return nil, nil, err
		}
		for i := range nodes {
			byNode[nodes[i].Name] = nil
		}
	}

	nodes := slices.Sorted(maps.Keys(byNode))
	answers, errs := make([]inspection.Import, len(nodes)), make([]error, len(nodes))
	askAll(ctx, nodes, line, func(ctx context.Context, i int) {
		answers[i], errs[i] = importOn(ctx, c.agents, nodes[i], byNode[nodes[i]], act)
	})
	for i, answer := range answers {
		for _, item := range answer.Items {
			item.Node = nodes[i]
			done.Items = append(done.Items, item)
		}
	}
	slices.SortStableFunc(done.Items, func(a, b inspection.ImportItem) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), comparePods(a.Pod, b.Pod))
	})
	line.say("looking up the pods ...")
	warnOfNoHome(ctx, c, done.Items)
	return done, errors.Join(errs...), nil
}

// warnOfNoHome adds to each address that is kept from now on that its node becomes no home of its pod, unless the API
// server has the pod bound to that node. What only the node says makes it no home: a node that was taken over would
// attract pods that never ran there. Of a pod that is bound the controller notes it.
func warnOfNoHome(ctx context.Context, k client.Client, items []inspection.ImportItem) {
	for n := range items {
		i := &items[n]
		if i.Action != inspection.ActionRetain && i.Action != inspection.ActionBind {
			continue
		}
		kept := stayputv1alpha1.RetainedIP{Spec: stayputv1alpha1.RetainedIPSpec{PodName: i.Pod, NodeName: i.Node}}
		var pod corev1.Pod
		err := k.Get(ctx, types.NamespacedName{Namespace: i.Namespace, Name: i.Pod}, &pod)
		switch {
		case client.IgnoreNotFound(err) != nil:
			i.Why += fmt.Sprintf("; unknown whether the pod is bound to node %s: %v", i.Node, err)
		case err != nil || pod.Spec.NodeName != i.Node || home.Bound(&pod) != home.Claimant(&kept):
			i.Why += fmt.Sprintf("; no pod of this name is bound to node %s: the node keeps the address, "+
				"but the pod is not placed on it", i.Node)
		}
	}
}

// importOn has a node take these items over or, if they are nil, what OpenKruise has reserved on it.
func importOn(ctx context.Context, reach Agents, node string, items []inspection.ImportItem, act bool) (
	answer inspection.Import, err error) {
	args := []string{"import", "openkruise"}
	var stdin []byte
	if items != nil {
		args[1] = "-"
		if stdin, err = json.Marshal(inspection.Import{Items: items}); err != nil {
			return answer, err
		}
	}
	if act {
		args = append(args, "--act")
	}
	return ask[inspection.Import](ctx, reach, node, stdin, args...)
}
