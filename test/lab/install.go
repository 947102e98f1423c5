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

// The chart's names of its parts.
const (
	SystemNamespace   = "stayput-system"
	AgentAccount      = "stayput-agent"
	ControllerAccount = "stayput-controller"

	agentWorkload, agentComponent           = "stayput-agent", "agent" // the container's name too
	controllerWorkload, controllerComponent = "stayput-controller", "controller"
)

// InstallOptions configure the product's installation.
type InstallOptions struct {
	// Values are chart values that override those of [Cluster.Values].
	Values map[string]any
	// Chart is the path of another version's chart; empty for the repository's.
	Chart string
	// Product is another version than the cluster's.
	Product *Product
	// Manifests applies the manifests in deploy/ unchanged with kubectl, without values.
	Manifests bool
	// By installs in place of all of that; an image that is not published is loaded by then.
	By func(context.Context) error
}

// Install installs stayput from the image of the cluster's Product, with Helm unless the options say otherwise, and
// waits until agents and controllers are ready and the nodes' pods get their addresses from stayput. It first makes the
// control plane's machine a node: Values place the controllers there.
func (c *Cluster) Install(ctx context.Context, o InstallOptions) error {
	if c.ControlNode == nil {
		if err := c.startControlNode(ctx); err != nil {
			return err
		}
	}
	if o.Chart == "" {
		var err error
		if o.Chart, err = c.chart(ctx); err != nil {
			return err
		}
	}
	if o.Chart != c.Published {
		if err := c.loadProduct(ctx, o); err != nil {
			return err
		}
	}
	var err error
	switch {
	case o.By != nil:
		err = o.By(ctx)
	case o.Manifests:
		err = c.applyManifests(ctx)
	default:
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

// chart returns the chart that Install installs by default, and that Upgrade upgrades to.
func (c *Cluster) chart(ctx context.Context) (string, error) {
	if c.Published != "" {
		return c.Published, nil
	}
	return Chart(ctx)
}

// loadProduct loads the image that the chart of the options names.
func (c *Cluster) loadProduct(ctx context.Context, o InstallOptions) error {
	version, err := ChartVersion(o.Chart)
	if err != nil {
		return err
	}
	product := c.options.Product
	if o.Product != nil {
		product = *o.Product
	}
	image, err := BuildImage(product, version)
	if err != nil {
		return err
	}
	c.image = image
	return c.LoadImage(ctx, image)
}

// Upgrade upgrades Install's Helm release to the repository's chart, whose image must be loaded, and waits as Install
// does. values override the current ones.
func (c *Cluster) Upgrade(ctx context.Context, values map[string]any) error {
	return c.upgrade(ctx, values)
}

// Reinstate restores changed or deleted objects of Install's Helm release.
func (c *Cluster) Reinstate(ctx context.Context) error {
	return c.upgrade(ctx, nil, "--force-conflicts")
}

// Uninstall uninstalls Install's Helm release and returns helm's output, which includes the log of the chart's hook.
func (c *Cluster) Uninstall(ctx context.Context) (string, error) {
	out, said, err := c.helm(ctx, "uninstall", Release, "--namespace="+SystemNamespace, "--wait")
	return string(out) + string(said), err
}

func (c *Cluster) upgrade(ctx context.Context, values map[string]any, args ...string) error {
	chart, err := c.chart(ctx)
	if err != nil {
		return err
	}
	c.values = merged(c.values, values)
	if err := c.release(ctx, chart, "upgrade", args...); err != nil {
		return err
	}
	return c.WaitInstalled(ctx)
}

// WaitInstalled waits until agents and controllers match their specs and are ready, and containerd gets pod addresses
// from stayput, unless Calico's IPAM gives them. Without agents (agent.enabled=false) it is the controllers alone.
func (c *Cluster) WaitInstalled(ctx context.Context) error {
	d, err := c.client.AppsV1().Deployments(SystemNamespace).Get(ctx, controllerWorkload, metav1.GetOptions{})
	if err != nil {
		return err
	}
	c.Controllers = &Controllers{cluster: c, replicas: *d.Spec.Replicas}
	agent, _ := c.values["agent"].(map[string]any)
	if agent["enabled"] == false {
		return c.Controllers.WaitReady(ctx)
	}
	if err := c.WaitAgents(ctx); err != nil {
		return err
	}
	if err := c.Controllers.WaitReady(ctx); err != nil || c.options.Calico != nil {
		return err // Calico's IPAM keeps giving the addresses
	}
	nodes := c.allNodes()
	return together(len(nodes), func(i int) error { return nodes[i].waitStayput(ctx) })
}

// waitStayput waits until containerd has loaded a configuration that names stayput. multus in front must be restarted
// for that.
func (n *ClusterNode) waitStayput(ctx context.Context) error {
	if n.Multus != nil {
		return n.waitOwnConf(ctx)
	}
	err := Until(ctx, "stayput in the CNI configuration of "+n.Name, func() (bool, error) {
		lists, err := n.cniConfigs()
		return err == nil && len(lists) > 0 && bytes.Contains([]byte(lists[0]), []byte(`"stayput"`)), err
	})
	if err != nil {
		return err
	}
	return n.waitCNI(ctx)
}

// Values are the chart values for a lab cluster: controllers where tests break nothing, agents that can be kept off a
// node, and debug logs. If the nodes' IPAM plugin is already stayput, the agent leaves their CNI configuration alone.
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
	if chart == c.Published {
		args = append(args, "--plain-http", "--set=image.pullPolicy=Always")
	}
	_, err = c.Helm(ctx, append([]string{verb, Release, chart, "--namespace=" + SystemNamespace, "--values=" + file},
		args...)...)
	return err
}

// merged returns a overridden by b, key by key, as Helm merges values.
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

// applyManifests applies the manifests for users without Helm.
func (c *Cluster) applyManifests(ctx context.Context) error {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	for _, name := range []string{"crds.yaml", "persistentpodstates.yaml", "install.yaml", "gate-policies.yaml"} {
		if _, err := c.Kubectl(ctx, "", "apply", "--server-side", "-f", filepath.Join(root, "deploy", name)); err != nil {
			return err
		}
	}
	return nil
}

// ChartVersion returns the product version that a chart installs: its image tag.
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

// AccountToken returns a service account's token. With a node, the token is bound to a pod of that account on that node
// and names it, as in such a pod; the pod is created if there is none.
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

// placeholder returns a stand-in for a DaemonSet's pod on the node. It takes no pod address.
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
