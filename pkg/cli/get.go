package cli

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/printers"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

func getCommand(c *cluster) *cobra.Command {
	var all, noHeaders bool
	var selector string
	p := newPrinting("", true)
	cmd := &cobra.Command{
		Use:   "get [POD...]",
		Short: "List which addresses are kept where, why and until when",
		Long: "List which addresses are kept where, why and until when: bound ones are used by their pod, retained ones are kept for\n" +
			"one that is gone. Without names, all of the namespace.\n\n" +
			"With -o json or yaml it is a List of the RetainedIPs, also of a single one.",
		Example: `  kubectl stayput get
  kubectl stayput get web-0 -o wide
  kubectl stayput get -A -l app=web
  kubectl stayput get -o jsonpath='{.items[*].status.ips[0]}'`,
		ValidArgsFunction: c.completePods,
		RunE: func(cmd *cobra.Command, args []string) error {
			wanted, err := names(args)
			if err != nil {
				return err
			}
			if len(wanted) > 0 && (all || selector != "") {
				return fmt.Errorf("POD: names cannot be combined with --all-namespaces or --selector")
			}
			print, err := p.printer()
			if err != nil {
				return err
			}
			ns, err := c.namespace(all)
			if err != nil {
				return err
			}
			k, err := c.client()
			if err != nil {
				return err
			}
			ips, err := retainedIPs(cmd.Context(), k, ns)
			if err != nil {
				return err
			}
			if ips, err = matching(cmd.Context(), k, ips, ns, selector); err != nil {
				return err
			}
			ips, missing := pick(ips, wanted)
			switch {
			case print != nil:
				err = print.PrintObj(listOf(ips), cmd.OutOrStdout())
			case len(ips) > 0:
				err = printTable(cmd.OutOrStdout(), tableOf(ips, workloadsOf(cmd.Context(), k, ips), time.Now()),
					printers.PrintOptions{WithNamespace: all, NoHeaders: noHeaders, Wide: p.wide()})
			case len(wanted) == 0 && all:
				fmt.Fprintln(cmd.ErrOrStderr(), "No addresses are kept in any namespace.")
			case len(wanted) == 0:
				fmt.Fprintf(cmd.ErrOrStderr(), "No addresses are kept in namespace %s.\n", ns)
			}
			if err != nil || len(missing) == 0 {
				return err
			}
			return fmt.Errorf("no address is kept for %s in namespace %s", strings.Join(missing, ", "), ns)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&all, "all-namespaces", "A", false, "list those of all namespaces")
	f.StringVarP(&selector, "selector", "l", "", "labels of the pod, or where there is none of its workload's pod template; such as app=web")
	f.BoolVar(&noHeaders, "no-headers", false, "without the headers of the columns")
	p.addFlags(cmd)
	return cmd
}

// pick takes those that are named, by pod or by RetainedIP, in the order of the names; without names all.
func pick(ips []stayputv1alpha1.RetainedIP, names []string) (picked []stayputv1alpha1.RetainedIP, missing []string) {
	if len(names) == 0 {
		return ips, nil
	}
	seen := map[string]bool{}
	for _, name := range names {
		found := false
		for _, r := range ips {
			if r.Spec.PodName != name && r.Name != name {
				continue
			}
			found = true
			if !seen[r.Name] {
				picked = append(picked, r)
			}
			seen[r.Name] = true
		}
		if !found {
			missing = append(missing, name)
		}
	}
	return picked, missing
}

var columns = []metav1.TableColumnDefinition{
	{Name: "Pod", Type: "string"},
	{Name: "IP", Type: "string"},
	{Name: "Node", Type: "string"},
	{Name: "Phase", Type: "string"},
	{Name: "Until", Type: "string"},
	{Name: "Left", Type: "string"},
	{Name: "Why", Type: "string"},
	{Name: "Network", Type: "string", Priority: 1},
	{Name: "Identity", Type: "string", Priority: 1},
	{Name: "Workload", Type: "string", Priority: 1},
	{Name: "Pod UID", Type: "string", Priority: 1},
}

func tableOf(ips []stayputv1alpha1.RetainedIP, all workloads, now time.Time) *metav1.Table {
	table := &metav1.Table{ColumnDefinitions: columns}
	for i := range ips {
		r := &ips[i]
		var networks []string
		for _, a := range r.Status.Addresses {
			networks = append(networks, a.Network)
		}
		at, left := until(r, now)
		table.Rows = append(table.Rows, metav1.TableRow{
			Object: runtime.RawExtension{Object: r},
			Cells: []any{
				r.Spec.PodName, orNone(strings.Join(r.Status.IPs, ",")), r.Spec.NodeName, orNone(string(r.Status.Phase)), at, left, reason(r, all),
				orNone(strings.Join(networks, ",")), orNone(r.Spec.Identity), workloadName(r), orNone(r.Status.PodUID),
			},
		})
	}
	return table
}

// listOf is what kubectl prints for several objects, so that what reads it need not know how many there were.
func listOf(ips []stayputv1alpha1.RetainedIP) runtime.Object {
	list := &unstructured.UnstructuredList{Object: map[string]any{"apiVersion": "v1", "kind": "List", "metadata": map[string]any{"resourceVersion": ""}}}
	for i := range ips {
		o, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&ips[i])
		if err != nil {
			panic(err) // a type of ours
		}
		list.Items = append(list.Items, unstructured.Unstructured{Object: o})
	}
	return list
}
