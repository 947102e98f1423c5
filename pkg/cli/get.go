package cli

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// listing is what the user asked for.
type listing struct {
	all, noHeaders bool
	selector       string
}

func getCommand(s *settings) *cobra.Command {
	var o listing
	format := newObjectFormat("", true)
	cmd := &cobra.Command{
		Use:   "get [POD...]",
		Short: "List the addresses that nodes and pools keep: where, why and until when",
		Long: `List the addresses that nodes and pools keep for pods: where, why and until when. A
bound address is in use by its pod, a retained one waits for the pod to come back,
and a pool address is allocated until the node of its pod has reported that it is
bound. Without names it lists the addresses of the namespace.

With -o json or yaml it prints a List of RetainedIPs and PodIPs, even for a single
one.`,
		Example: `  kubectl stayput get
  kubectl stayput get web-0 -o wide
  kubectl stayput get -A -l app=web
  kubectl stayput get -o jsonpath='{.items[*].spec.podName}'`,
		ValidArgsFunction: s.complete(keptPods, 0),
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, s, format, args) },
	}
	f := cmd.Flags()
	f.BoolVarP(&o.all, "all-namespaces", "A", false, "List the addresses of all namespaces")
	f.StringVarP(&o.selector, "selector", "l", "",
		"Label selector on the pod or, if it was deleted, on its workload's pod template, for example app=web")
	f.BoolVar(&o.noHeaders, "no-headers", false, "Print no column headers")
	format.addFlags(cmd)
	return cmd
}

func (o *listing) run(cmd *cobra.Command, s *settings, format *objectFormat, args []string) error {
	wanted, err := names(args)
	if err != nil {
		return err
	}
	if len(wanted) > 0 && (o.all || o.selector != "") {
		return errors.New("POD: names cannot be combined with --all-namespaces or --selector")
	}
	print, err := format.printer()
	if err != nil {
		return err
	}
	c, err := s.connect()
	if err != nil {
		return err
	}
	if o.all {
		c.namespace = ""
	}
	ctx, out := cmd.Context(), cmd.OutOrStdout()
	kept, missing, unseen, err := c.kept(ctx, wanted, o.selector)
	if err != nil {
		return err
	}
	if unseen != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "Pool addresses are not shown: %v\n", printableError{unseen})
	}
	switch {
	case print != nil:
		err = print.PrintObj(listOf(kept), out)
	case len(kept) > 0:
		err = printTable(out, tableOf(kept, workloadsOf(ctx, c, kept), time.Now()),
			printers.PrintOptions{WithNamespace: o.all, NoHeaders: o.noHeaders, Wide: format.wide()})
	case len(wanted) == 0 && len(missing) == 0:
		fmt.Fprintln(cmd.ErrOrStderr(), noneKept(c.namespace, unseen == nil))
	}
	return errors.Join(append(missing, err)...)
}

// noneKept says that nothing is kept in a namespace, or in none if that is empty, of pools only if they were seen.
func noneKept(namespace string, pools bool) string {
	where, none := "namespace "+namespace, "No addresses are kept"
	if namespace == "" {
		where = "any namespace"
	}
	if !pools {
		none = "No node keeps an address"
	}
	return none + " in " + where + "."
}

var columns = func() []metav1.TableColumnDefinition {
	all := columnsOf("Pod", "IP", "Node", "Phase", "Until", "Left", "Why", "Network", "Identity", "Workload", "Pod UID")
	for i := range all[7:] {
		all[7+i].Priority = 1 // with -o wide
	}
	return all
}()

func tableOf(kept []*keptIP, all workloads, now time.Time) *metav1.Table {
	table := &metav1.Table{ColumnDefinitions: columns}
	for _, k := range kept {
		o, workload := k.Object, none
		if k.podIP() != nil { // of no namespace: the column is for the pod's
			o = k.DeepCopyObject().(client.Object)
			o.SetNamespace(printable(k.namespace))
		}
		if w := k.workload; w != nil {
			workload = w.Kind + "/" + w.Name
		}
		at, left := k.until(now)
		table.Rows = append(table.Rows, metav1.TableRow{
			Object: runtime.RawExtension{Object: o},
			Cells: []any{
				k.pod, orNone(strings.Join(k.ips, ",")), orNone(k.node), orNone(k.phase), at, left, k.why(all),
				orNone(strings.Join(k.networks, ",")), orNone(k.identity), workload, orNone(k.podUID),
			},
		})
	}
	return table
}

// listOf is what kubectl prints for several objects, so that what reads it need not know how many there were.
func listOf(kept []*keptIP) runtime.Object {
	list := &unstructured.UnstructuredList{Object: map[string]any{
		"apiVersion": "v1", "kind": "List", "metadata": map[string]any{"resourceVersion": ""},
	}}
	for _, k := range kept {
		o, err := runtime.DefaultUnstructuredConverter.ToUnstructured(k.Object)
		if err != nil {
			panic(err) // a type of ours
		}
		list.Items = append(list.Items, unstructured.Unstructured{Object: o})
	}
	return list
}
