package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// completeTimeout is how long a shell waits after the tab key.
const completeTimeout = 3 * time.Second

// completion lists what an argument may be.
type completion func(ctx context.Context, c *cluster) ([]string, error)

// complete completes arguments, at most so many, or any number of them if that is 0. It leaves out those that were
// given already. Errors are dropped: they would end up in the middle of a command line.
func (s *settings) complete(list completion, most int) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
		defer cancel()
		c, err := s.connect()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		all, err := list(ctx, c)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		all = slices.DeleteFunc(all, func(s string) bool {
			return !strings.HasPrefix(s, prefix) || slices.Contains(args, s) || s != printable(s)
		})
		slices.SortFunc(all, comparePods)
		return slices.Compact(all), cobra.ShellCompDirectiveNoFileComp
	}
}

// keptPods lists the pods for which addresses are kept, including pods that are gone.
func keptPods(ctx context.Context, c *cluster) ([]string, error) {
	return podsOf(ctx, c, func(*keptIP) bool { return true })
}

// retainedPods lists the pods whose addresses can be released.
func retainedPods(ctx context.Context, c *cluster) ([]string, error) {
	return podsOf(ctx, c, (*keptIP).retained)
}

func podsOf(ctx context.Context, c *cluster, has func(*keptIP) bool) (all []string, err error) {
	kept, _, err := keptIPs(ctx, c, c.namespace) // without those of pools the others will do
	for _, k := range kept {
		if has(k) {
			all = append(all, k.pod)
		}
	}
	return all, err
}

// anyPods lists all pods and those for which addresses are kept.
func anyPods(ctx context.Context, c *cluster) ([]string, error) {
	kept, _ := keptPods(ctx, c) // the others will do
	pods, err := objects(ctx, c, "Pod", client.InNamespace(c.namespace))
	return append(kept, pods...), err
}

// clusterObjects lists the objects of a core kind without namespace.
func clusterObjects(kind string) completion {
	return func(ctx context.Context, c *cluster) ([]string, error) { return objects(ctx, c, kind) }
}

// objects returns the names of the objects of a core kind.
func objects(ctx context.Context, k client.Client, kind string, o ...client.ListOption) (all []string, err error) {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind + "List"))
	err = k.List(ctx, &list, o...)
	for i := range list.Items {
		all = append(all, list.Items[i].Name)
	}
	return all, err
}

// completeFlags completes the values of the flags that every verb has.
func (s *settings) completeFlags(cmd *cobra.Command) {
	namespaces := func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		return s.complete(clusterObjects("Namespace"), 0)(cmd, nil, prefix)
	}
	completeFlag(cmd, "namespace", namespaces)
	completeFlag(cmd, "stayput-namespace", namespaces)
}

// completeFlag completes the values of a flag that the command has.
func completeFlag(cmd *cobra.Command, flag string, f cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
		panic(err) // there is no such flag
	}
}
