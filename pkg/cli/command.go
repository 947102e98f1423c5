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
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// DefaultNamespace is where stayput is installed unless somebody chose another namespace.
const DefaultNamespace = "stayput-system"

// Options of the command.
type Options struct {
	// Version is of the program.
	Version string
	// Agents replaces the way to the nodes, which otherwise leads through their agents' pods.
	Agents Agents
}

// New is kubectl stayput with all its verbs.
func New(o Options) *cobra.Command {
	c := &cluster{flags: genericclioptions.NewConfigFlags(true), reach: o.Agents}
	c.flags.WrapConfigFn = func(config *rest.Config) *rest.Config {
		config.UserAgent = "kubectl-stayput/" + o.Version
		config.QPS, config.Burst = 50, 300 // as kubectl has it
		return config
	}
	cmd := &cobra.Command{
		Use:   "kubectl-stayput",
		Short: "Addresses that are kept for pods: look, understand, release, diagnose",
		Long: "Addresses that are kept for pods: look, understand, release, diagnose.\n\n" +
			"What is kept is in the RetainedIPs of the cluster; verbs that look into a node run `stayput-agent inspect` in the\n" +
			"pod of its agent, which takes the right to list pods and to create pods/exec in the namespace of stayput.",
		Version:      o.Version,
		SilenceUsage: true,
		Annotations:  map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl stayput"},
	}
	f := cmd.PersistentFlags()
	c.flags.AddFlags(f)
	f.StringVar(&c.home, "stayput-namespace", DefaultNamespace, "namespace in which stayput is installed")
	cmd.AddCommand(getCommand(c), whyCommand(c), releaseCommand(c), nodeCommand(c), checkCommand(c), importCommand(c))
	c.completeFlags(cmd)
	return cmd
}

// cluster is what the verbs share: where the cluster is, and as whom.
type cluster struct {
	flags *genericclioptions.ConfigFlags
	home  string // namespace of stayput
	reach Agents
}

// scheme has what the verbs read by its type.
var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, coordinationv1.AddToScheme, admissionv1.AddToScheme,
		stayputv1alpha1.AddToScheme, kruisev1alpha1.AddToScheme,
	} {
		utilruntime.Must(add(s))
	}
	return s
}()

func (c *cluster) config() (*rest.Config, error) { return c.flags.ToRESTConfig() }

func (c *cluster) client() (client.Client, error) {
	config, err := c.config()
	if err != nil {
		return nil, err
	}
	mapper, err := c.flags.ToRESTMapper()
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
}

// namespace is the one that the user means; empty with all.
func (c *cluster) namespace(all bool) (string, error) {
	if all {
		return "", nil
	}
	ns, _, err := c.flags.ToRawKubeConfigLoader().Namespace()
	return ns, err
}

// ErrNotInstalled: the cluster does not know RetainedIPs.
var ErrNotInstalled = errors.New("stayput is not installed in this cluster: it has no CustomResourceDefinition retainedips.stayput.io")

// installed says what an error means where it means that.
func installed(err error) error {
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w (%v)", ErrNotInstalled, err)
	}
	return err
}

// names reads arguments such as web-0, pod/web-0 and retip/web-0.node-1.
func names(args []string) ([]string, error) {
	var all []string
	for _, arg := range args {
		kind, name, typed := strings.Cut(arg, "/")
		if !typed {
			kind, name = "pod", arg
		}
		switch strings.ToLower(kind) {
		case "pod", "pods", "po", "retip", "retainedip", "retainedips", "retainedip.stayput.io", "retainedips.stayput.io":
		default:
			return nil, fmt.Errorf("POD: %q is not valid: expected the name of a pod or of a RetainedIP", arg)
		}
		if name == "" || strings.Contains(name, "/") {
			return nil, fmt.Errorf("POD: %q is not valid: expected the name of a pod or of a RetainedIP", arg)
		}
		all = append(all, name)
	}
	return all, nil
}
