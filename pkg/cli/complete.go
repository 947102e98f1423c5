package cli

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// completeTimeout is how long somebody who pressed the tab key waits.
const completeTimeout = 3 * time.Second

// completion is a list of what an argument may be.
type completion func(ctx context.Context, k client.Client, namespace string) ([]string, error)

// complete completes an argument that has not been given yet. Errors are nobody's to see while they type.
func (c *cluster) complete(from completion, most int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
		defer cancel()
		ns, err := c.namespace(false)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		k, err := c.client()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		all, err := from(ctx, k, ns)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		all = slices.DeleteFunc(all, func(s string) bool { return !strings.HasPrefix(s, prefix) || slices.Contains(args, s) })
		slices.SortFunc(all, comparePods)
		return slices.Compact(all), cobra.ShellCompDirectiveNoFileComp
	}
}

// completePods completes the pods for which addresses are kept, of which some are gone.
func (c *cluster) completePods(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	return c.complete(keptPods, 0)(cmd, args, prefix)
}

func keptPods(ctx context.Context, k client.Client, namespace string) (all []string, err error) {
	ips, err := retainedIPs(ctx, k, namespace)
	for _, r := range ips {
		all = append(all, r.Spec.PodName)
	}
	return all, err
}

// anyPods are also those for which nothing is kept.
func anyPods(ctx context.Context, k client.Client, namespace string) ([]string, error) {
	all, err := keptPods(ctx, k, namespace)
	if err != nil {
		all = nil
	}
	var pods metav1.PartialObjectMetadataList
	pods.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PodList"))
	if err := k.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return nil, err
	}
	for _, p := range pods.Items {
		all = append(all, p.Name)
	}
	return all, nil
}

func clusterObjects(kind string) completion {
	return func(ctx context.Context, k client.Client, _ string) (all []string, err error) {
		var list metav1.PartialObjectMetadataList
		list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind + "List"))
		err = k.List(ctx, &list)
		for _, o := range list.Items {
			all = append(all, o.Name)
		}
		return all, err
	}
}

// completeFlags completes the values of the flags that every verb has.
func (c *cluster) completeFlags(cmd *cobra.Command) {
	namespaces := func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		return c.complete(clusterObjects("Namespace"), 0)(cmd, nil, prefix)
	}
	fromKubeconfig := func(pick func(contexts, clusters, users []string) []string) cobra.CompletionFunc {
		return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			raw, err := c.flags.ToRawKubeConfigLoader().RawConfig()
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			return pick(slices.Sorted(maps.Keys(raw.Contexts)), slices.Sorted(maps.Keys(raw.Clusters)), slices.Sorted(maps.Keys(raw.AuthInfos))), cobra.ShellCompDirectiveNoFileComp
		}
	}
	for flag, f := range map[string]cobra.CompletionFunc{
		"namespace": namespaces, "stayput-namespace": namespaces,
		"context": fromKubeconfig(func(contexts, _, _ []string) []string { return contexts }),
		"cluster": fromKubeconfig(func(_, clusters, _ []string) []string { return clusters }),
		"user":    fromKubeconfig(func(_, _, users []string) []string { return users }),
	} {
		if err := cmd.RegisterFlagCompletionFunc(flag, f); err != nil {
			panic(err) // a flag that is not there
		}
	}
}
