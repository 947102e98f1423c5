package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// DefaultNamespace is the namespace in which Stayput is installed by default.
const DefaultNamespace = "stayput-system"

// Options of the command.
type Options struct {
	// Version of the program.
	Version string
	// Agents replaces the way to the nodes, which leads through their agents' pods by default.
	Agents Agents
}

// New returns the command kubectl stayput with all its verbs.
func New(o Options) *cobra.Command {
	s := &settings{flags: genericclioptions.NewConfigFlags(true), agents: o.Agents}
	s.flags.WrapConfigFn = func(config *rest.Config) *rest.Config {
		config.UserAgent = "kubectl-stayput/" + o.Version
		config.QPS, config.Burst = 50, 300 // as kubectl has it
		return config
	}
	cmd := &cobra.Command{
		Use:   "kubectl-stayput",
		Short: "Show, explain, release and check the IP addresses that nodes and pools keep for pods",
		Long: `Show, explain, release and check the IP addresses that nodes and pools keep for
pods.

The cluster's RetainedIPs and PodIPs show what is kept. To inspect a node, a command
runs stayput-agent inspect in the agent's pod there. This requires permission to list
pods and to create pods/exec in Stayput's namespace.`,
		Version:      o.Version,
		SilenceUsage: true,
		Annotations:  map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl stayput"},
	}
	cmd.Flags().Bool("version", false, "Print the version of this command") // cobra's own is -v too, which kubectl logs by
	f := cmd.PersistentFlags()
	s.flags.AddFlags(f)
	f.StringVar(&s.installation, "stayput-namespace", DefaultNamespace, "The namespace in which Stayput is installed")
	cmd.AddCommand(getCommand(s), whyCommand(s), releaseCommand(s), nodeCommand(s), checkCommand(s), importCommand(s),
		uninstallCommand(s), versionCommand(s, o.Version))
	for _, verb := range cmd.Commands() {
		run := verb.RunE
		verb.RunE = func(cmd *cobra.Command, args []string) error {
			err := run(cmd, args)
			if err != nil {
				err = printableError{err}
			}
			return err
		}
	}
	s.completeFlags(cmd)
	return cmd
}

// settings are what the user chose for every verb.
type settings struct {
	flags        *genericclioptions.ConfigFlags
	installation string // namespace
	agents       Agents
}

// cluster is what a verb works with, as the user that the kubeconfig names.
type cluster struct {
	client.Client
	config *rest.Config
	// namespace is what the user chose, installation where Stayput is.
	namespace, installation string
	agents                  Agents
}

// scheme has the types that the verbs read.
var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, coordinationv1.AddToScheme, admissionv1.AddToScheme,
		stayputv1alpha1.AddToScheme, kruisev1alpha1.AddToScheme, spiderpoolv2beta1.AddToScheme,
	} {
		utilruntime.Must(add(s))
	}
	return s
}()

// connect prepares the cluster. It sends no request.
func (s *settings) connect() (*cluster, error) {
	config, err := s.flags.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	if raw, err := s.flags.ToRawKubeConfigLoader().RawConfig(); err == nil && len(raw.Clusters) == 0 &&
		strings.HasSuffix(config.Host, "//localhost:8080") && *s.flags.APIServer == "" { // client-go's default
		return nil, errors.New("no cluster is configured: set the environment variable KUBECONFIG, --kubeconfig or --server")
	}
	mapper, err := s.flags.ToRESTMapper()
	if err != nil {
		return nil, err
	}
	namespace, _, err := s.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return nil, err
	}
	k, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, err
	}
	c := &cluster{k, config, namespace, s.installation, s.agents}
	if c.agents == nil {
		c.agents = &agentPodsOf{client: k, config: config, namespace: s.installation}
	}
	return c, nil
}

// ErrNotInstalled says that the cluster has no Stayput. What wraps it says what is missing.
var ErrNotInstalled = errors.New("stayput is not installed in this cluster")

// errRight means that the API server refuses what a verb cannot do without.
var errRight = errors.New("missing permission")

// rightTo names the right that an error is about, if it is about one.
func rightTo(what string, err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	return fmt.Errorf("%w to %s: %w", errRight, what, err)
}

// installed names the cause if the cluster does not know a kind.
func installed(err error) error {
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w: CustomResourceDefinition retainedips.stayput.io is missing (%v)", ErrNotInstalled, err)
	}
	return err
}

// names reads arguments such as web-0, pod/web-0, retip/web-0.node-1 and pip/10.6.168.101.
func names(args []string) ([]string, error) {
	var all []string
	for _, arg := range args {
		kind, name, typed := strings.Cut(arg, "/")
		if !typed {
			kind, name = "pod", arg
		}
		switch strings.ToLower(kind) {
		case "pod", "pods", "po",
			"retip", "retainedip", "retainedips", "retainedip.stayput.io", "retainedips.stayput.io",
			"pip", "podip", "podips", "podip.stayput.io", "podips.stayput.io":
		default:
			name = ""
		}
		if name == "" || strings.Contains(name, "/") {
			return nil, fmt.Errorf("POD: %q is not valid: expected the name of a pod, a RetainedIP or a PodIP", arg)
		}
		all = append(all, name)
	}
	return all, nil
}

// exactlyOne expects one argument.
func exactlyOne(name, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 || args[0] == "" {
			return fmt.Errorf("%s: got %d arguments: expected %s", name, len(args), what)
		}
		return nil
	}
}
