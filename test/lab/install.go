package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// What the chart calls its parts.
const (
	SystemNamespace   = "stayput-system"
	AgentAccount      = "stayput-agent"
	ControllerAccount = "stayput-controller"

	agentWorkload, agentComponent           = "stayput-agent", "agent" // and the container
	controllerWorkload, controllerComponent = "stayput-controller", "controller"
)

// InstallOptions say how the product is installed.
type InstallOptions struct {
	// Values are for the chart, over those of [Cluster.Values].
	Values map[string]any
	// Chart is the folder of a chart of another version; empty: the repository's.
	Chart string
	// Manifests has kubectl apply the manifests in deploy/ as they are. There are no values then.
	Manifests bool
}

// Install installs stayput from the image of the cluster's Product, by Helm or as the options say, and waits until
// agents and controllers are ready and the nodes' pods get their addresses from stayput. Before that it makes the
// control plane's machine a node, where the controllers are by Values.
func (c *Cluster) Install(ctx context.Context, o InstallOptions) error {
	if c.ControlNode == nil {
		if err := c.startControlNode(ctx); err != nil {
			return err
		}
	}
	if o.Chart == "" {
		var err error
		if o.Chart, err = Chart(ctx); err != nil {
			return err
		}
	}
	version, err := ChartVersion(o.Chart)
	if err != nil {
		return err
	}
	image, err := BuildImage(ctx, c.options.Product, version)
	if err != nil {
		return err
	}
	if err := c.LoadImage(ctx, image); err != nil {
		return err
	}
	if o.Manifests {
		err = c.applyManifests(ctx)
	} else {
		c.values = merged(c.Values(), o.Values)
		err = c.release(ctx, o.Chart, "install", "--create-namespace")
	}
	if err != nil {
		return err
	}
	for _, n := range c.allNodes() {
		n.Agent = &Agent{n}
	}
	return c.WaitInstalled(ctx)
}

// Upgrade upgrades what Install has installed by Helm to the chart of the repository, whose image was loaded, and
// waits as Install does. values are over those it has.
func (c *Cluster) Upgrade(ctx context.Context, values map[string]any) error {
	return c.upgrade(ctx, values)
}

// Reinstate makes good what somebody has changed or deleted of what Install has installed by Helm.
func (c *Cluster) Reinstate(ctx context.Context) error {
	return c.upgrade(ctx, nil, "--force-conflicts")
}

// Uninstall has Helm uninstall what Install has installed, and returns what it says, to which belongs the log of the
// chart's hook.
func (c *Cluster) Uninstall(ctx context.Context) (string, error) {
	out, said, err := c.helm(ctx, "uninstall", Release, "--namespace="+SystemNamespace, "--wait")
	return string(out) + string(said), err
}

func (c *Cluster) upgrade(ctx context.Context, values map[string]any, args ...string) error {
	chart, err := Chart(ctx)
	if err != nil {
		return err
	}
	c.values = merged(c.values, values)
	if err := c.release(ctx, chart, "upgrade", args...); err != nil {
		return err
	}
	return c.WaitInstalled(ctx)
}

// WaitInstalled waits until agents and controllers are as the API server has them, and ready, and until containerd
// asks stayput for the addresses of pods.
func (c *Cluster) WaitInstalled(ctx context.Context) error {
	d, err := c.client.AppsV1().Deployments(SystemNamespace).Get(ctx, controllerWorkload, metav1.GetOptions{})
	if err != nil {
		return err
	}
	c.Controllers = &Controllers{cluster: c, replicas: *d.Spec.Replicas}
	if err := c.waitAgents(ctx); err != nil {
		return err
	}
	if err := c.Controllers.WaitReady(ctx); err != nil {
		return err
	}
	nodes := c.allNodes()
	return together(len(nodes), func(i int) error { return nodes[i].waitStayput(ctx) })
}

// waitStayput waits until containerd has loaded a configuration with stayput.
func (n *ClusterNode) waitStayput(ctx context.Context) error {
	err := Until(ctx, "stayput in the CNI configuration of "+n.Name, func() (bool, error) {
		lists, err := n.cniConfigs()
		return err == nil && len(lists) > 0 && bytes.Contains([]byte(lists[0]), []byte(`"stayput"`)), err
	})
	if err != nil {
		return err
	}
	return n.waitCNI(ctx)
}

// Values are what a cluster of the lab needs: its controllers are where tests break nothing, its agents can be kept
// from a node, and there is more to read when something fails. Where the nodes have stayput as their IPAM plugin
// already, the agent leaves their configuration alone.
func (c *Cluster) Values() map[string]any {
	term := map[string]any{"matchExpressions": []any{map[string]any{"key": noAgent, "operator": "DoesNotExist"}}}
	return map[string]any{
		"image": map[string]any{"pullPolicy": "Never"},
		"agent": map[string]any{
			"logLevel": "debug",
			"cni":      map[string]any{"install": c.options.IPAM != "stayput"},
			"affinity": map[string]any{"nodeAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": map[string]any{
				"nodeSelectorTerms": []any{term},
			}}},
		},
		"controller": map[string]any{"logLevel": "debug", "nodeSelector": map[string]any{controlPlaneTaint: ""}},
	}
}

// release runs helm install or upgrade.
func (c *Cluster) release(ctx context.Context, chart, verb string, args ...string) error {
	data, err := json.Marshal(c.values)
	if err != nil {
		return err
	}
	file := filepath.Join(c.Dir, "values.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return err
	}
	_, err = c.Helm(ctx, append([]string{verb, Release, chart, "--namespace=" + SystemNamespace, "--values=" + file},
		args...)...)
	return err
}

// merged is a with b over it, key by key, as Helm merges values.
func merged(a, b map[string]any) map[string]any {
	all := maps.Clone(a)
	for key, value := range b {
		if inner, ok := value.(map[string]any); ok {
			if under, ok := all[key].(map[string]any); ok {
				value = merged(under, inner)
			}
		}
		all[key] = value
	}
	return all
}

// applyManifests applies what is for those who do not use Helm.
func (c *Cluster) applyManifests(ctx context.Context) error {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	for _, name := range []string{"crds.yaml", "persistentpodstates.yaml", "install.yaml"} {
		if _, err := c.Kubectl(ctx, "", "apply", "--server-side", "-f", filepath.Join(root, "deploy", name)); err != nil {
			return err
		}
	}
	return nil
}

// ChartVersion is the version of the product that a chart installs: the tag of its image.
func ChartVersion(chart string) (string, error) {
	file := filepath.Join(chart, "Chart.yaml")
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	var is struct{ AppVersion string }
	if err := yaml.Unmarshal(data, &is); err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	if is.AppVersion == "" {
		return "", errors.New(file + " has no appVersion")
	}
	return is.AppVersion, nil
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
