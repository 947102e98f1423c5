package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// What deploy/chart says, and where the lab puts it.
const (
	SystemNamespace   = "stayput-system"
	AgentAccount      = "stayput-agent"
	ControllerAccount = "stayput-controller"

	agentFile        = "/opt/stayput/stayput-agent"
	controllerFile   = "/opt/stayput/stayput-controller"
	productToken     = "/etc/stayput/token"
	productConfig    = "/etc/stayput/kubeconfig"
	agentHealth      = "http://127.0.0.1:9463/healthz"
	controllerHealth = "http://127.0.0.1:8081/healthz"
)

// InstallOptions say how the product runs.
type InstallOptions struct {
	// Controllers is how many controllers run; one of them leads.
	Controllers int
	// More flags.
	AgentArgs, ControllerArgs []string
}

// Install applies the chart but for its workloads, and runs the agents and controllers as processes of the nodes and
// of machines of their own, each with the service account that its workload would have.
func (c *Cluster) Install(ctx context.Context, o InstallOptions) error {
	if err := c.ApplyManifests(ctx); err != nil {
		return err
	}
	if c.options.Product.Agent != "" {
		err := together(len(c.Nodes), func(i int) error { return c.Nodes[i].StartAgent(ctx, o.AgentArgs...) })
		if err != nil {
			return err
		}
	}
	for range o.Controllers {
		if _, err := c.StartController(ctx, o.ControllerArgs...); err != nil {
			return err
		}
	}
	return nil
}

// ApplyManifests applies deploy/crds.yaml and deploy/install.yaml by server-side apply, but for the workloads.
func (c *Cluster) ApplyManifests(ctx context.Context) error {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	for _, name := range []string{"crds.yaml", "install.yaml"} {
		data, err := os.ReadFile(filepath.Join(root, "deploy", name))
		if err != nil {
			return err
		}
		var rest strings.Builder
		for doc := range strings.SplitSeq(string(data), "\n---") {
			var object struct{ Kind string }
			if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			switch object.Kind {
			case "", "Deployment", "DaemonSet":
			default:
				fmt.Fprintf(&rest, "---\n%s\n", doc)
			}
		}
		if _, err := c.Kubectl(ctx, rest.String(), "apply", "--server-side", "--force-conflicts", "-f", "-"); err != nil {
			return err
		}
	}
	_, err = c.Kubectl(ctx, "", "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
	return err
}

// AccountToken returns a token of a service account. With a node it is bound to a pod of that account on that
// node, and says so, as the token in such a pod does; the pod is made if there is none.
func (c *Cluster) AccountToken(ctx context.Context, namespace, account, node string) (string, error) {
	seconds := int64(24 * 60 * 60) // longer than any cluster
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
	if node != "" {
		pod, err := c.placeholder(ctx, namespace, account, node)
		if err != nil {
			return "", err
		}
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
		}
	}
	answer, err := c.client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of %s/%s: %w", namespace, account, err)
	}
	return answer.Status.Token, nil
}

// placeholder stands for the pod of a DaemonSet on the node. It takes no pod address.
func (c *Cluster) placeholder(ctx context.Context, namespace, account, node string) (*corev1.Pod, error) {
	pods := c.client.CoreV1().Pods(namespace)
	name := account + "-" + node
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.PodSpec{
			NodeName: node, HostNetwork: true, ServiceAccountName: account,
			Containers:  []corev1.Container{{Name: "placeholder", Image: WebImage, ImagePullPolicy: corev1.PullNever}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return pods.Get(ctx, name, metav1.GetOptions{})
	}
	return pod, err
}

// writeAccount writes a token of a service account and a kubeconfig with it to a machine of the cluster.
func (c *Cluster) writeAccount(ctx context.Context, machine *Node, account, node string) error {
	token, err := c.AccountToken(ctx, SystemNamespace, account, node)
	if err != nil {
		return err
	}
	config := c.credentials.kubeconfig(serverURL, map[string]any{"tokenFile": productToken})
	return errors.Join(machine.WriteFile(productToken, []byte(token)), machine.WriteFile(productConfig, config))
}

// StartAgent starts stayput-agent on the node and waits until it answers. n.Agent stops and restarts it.
func (n *ClusterNode) StartAgent(ctx context.Context, args ...string) error {
	if n.cluster.options.Product.Agent == "" {
		return errors.New("the cluster was started without Product.Agent")
	}
	if n.Agent != nil {
		if err := n.Agent.Stop(); err != nil {
			return err
		}
	}
	if err := n.cluster.writeAccount(ctx, n.Node, AgentAccount, n.Name); err != nil {
		return err
	}
	n.Agent = &Service{node: n.Node, name: "agent", ready: getFrom(n.Node, agentHealth), argv: append([]string{
		agentFile, "--kubeconfig=" + productConfig, "--node-name=" + n.Name, "--log-level=debug",
	}, args...)}
	return n.Agent.Start(ctx)
}

// Controller is one stayput-controller. Its machine has nothing else on it, so that controllers do not share
// ports, and stands for the node that its pod would be on.
type Controller struct {
	*Service
	Node *Node
}

// StartController starts one more stayput-controller.
func (c *Cluster) StartController(ctx context.Context, args ...string) (*Controller, error) {
	if c.options.Product.Controller == "" {
		return nil, errors.New("the cluster was started without Product.Controller")
	}
	number := len(c.Controllers) + 1
	name := fmt.Sprintf("controller-%d", number)
	machine, err := startNode(ctx, c.bin.Bin, NodeOptions{
		Name: name, Networks: []Network{}, Idle: true,
		connect: func(pid int) error { return plug(c.Control.Pid(), pid, name, controllerIP(number), c.options.Nodes, 0) },
	})
	if err != nil {
		return nil, err
	}
	controller := &Controller{Node: machine, Service: &Service{
		node: machine, name: "controller", ready: getFrom(machine, controllerHealth), argv: append([]string{
			controllerFile, "--kubeconfig=" + productConfig, "--leader-election-namespace=" + SystemNamespace, "--log-level=debug",
		}, args...),
	}}
	c.Controllers = append(c.Controllers, controller)
	if err := machine.Install(c.options.Product.Controller, controllerFile); err != nil {
		return nil, err
	}
	if err := c.writeAccount(ctx, machine, ControllerAccount, ""); err != nil {
		return nil, err
	}
	return controller, controller.Start(ctx)
}
