package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/installation"
)

// versions is what version -o json prints.
type versions struct {
	Client string `json:"clientVersion"`
	// Installed is the release whose chart or manifests were applied, empty if only the client's was asked for.
	Installed string `json:"installedVersion,omitempty"`
}

func versionCommand(s *settings, of string) *cobra.Command {
	var format documentFormat
	var clientOnly bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of this command and of what is installed in the cluster",
		Long: `Print the version of this command, and that of the chart or the manifests that are
installed in the cluster. This requires permission to get ConfigMaps in Stayput's
namespace. kubectl stayput check compares the versions of the agents.`,
		Example: `  kubectl stayput version
  kubectl stayput version --client -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{Client: of}
			var unknown error
			if !clientOnly {
				v.Installed, unknown = s.installedVersion(cmd.Context())
			}
			out := cmd.OutOrStdout()
			err := format.print(out, v, func() error {
				_, err := fmt.Fprintf(out, "Client Version: %s\n", v.Client)
				if err == nil && v.Installed != "" {
					_, err = fmt.Fprintf(out, "Installed Version: %s\n", printable(v.Installed))
				}
				return err
			})
			return errors.Join(err, unknown)
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "Print only the version of this command, without querying a cluster")
	format.addFlags(cmd)
	return cmd
}

// installedVersion asks the cluster for it.
func (s *settings) installedVersion(ctx context.Context) (string, error) {
	c, err := s.connect()
	if err != nil {
		return "", err
	}
	return installedVersion(ctx, c, c.installation)
}

// installedVersion is what the installation's ConfigMap says, which the chart labels as all that it makes.
func installedVersion(ctx context.Context, k client.Client, namespace string) (string, error) {
	var of corev1.ConfigMap
	err := k.Get(ctx, types.NamespacedName{Namespace: namespace, Name: installation.ConfigMap}, &of)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return "", rightTo("get ConfigMaps in namespace "+namespace, err)
	case err != nil:
		return "", fmt.Errorf("%w: ConfigMap %s/%s is missing: check --stayput-namespace",
			ErrNotInstalled, namespace, installation.ConfigMap)
	}
	return orNone(of.Labels["app.kubernetes.io/version"]), nil
}
