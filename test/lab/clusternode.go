package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/test/lab/internal/cgroups"
)

const (
	kubeletConfigFile = "/etc/kubernetes/kubelet.json"
	kubeletKubeconfig = "/etc/kubernetes/kubelet.kubeconfig"
)

// ClusterNode is a node of a cluster: a [Node] with a kubelet.
type ClusterNode struct {
	*Node
	// Name is the host name and the name of the Node object.
	Name string
	// IP is the node's address in the fabric.
	IP netip.Addr
	// Pods is the subnet of its pods.
	Pods netip.Prefix
	// Kubelet is started by StartCluster and by Boot.
	Kubelet *Service
	// Agent is the pod of stayput-agent on the node, from [Cluster.Install] on.
	Agent *Agent
	// AgentProcess is stayput-agent without a pod; nil until [ClusterNode.StartAgent], then started by Boot as well.
	AgentProcess *Service

	cluster *Cluster
}

// podNetwork is the network of a node's pods, before anybody installs anything.
func (c *Cluster) podNetwork(pods netip.Prefix) Network {
	ipam := RangeIPAM(c.options.IPAM, pods.String())
	ipam["routes"] = []any{map[string]any{"dst": "0.0.0.0/0"}}
	return Network{IPAM: ipam, Annotations: !c.options.NoAnnotations}
}

// makeNode boots node m and starts its containerd, but no kubelet: that needs the API server.
func (c *Cluster) makeNode(ctx context.Context, m int) (*ClusterNode, error) {
	o := c.options
	n := &ClusterNode{Name: nodeName(m), IP: nodeIP(m), Pods: podSubnet(m), cluster: c}
	node, err := startNode(ctx, c.bin.Bin, NodeOptions{
		Name:       n.Name,
		Networks:   []Network{c.podNetwork(n.Pods)},
		CNIPlugins: c.cniPlugins(),
		Idle:       true,
		binds:      c.binds(),
		connect:    func(pid int) error { return plug(c.Control.Pid(), pid, n.Name, n.IP, o.Nodes, m) },
	})
	if err != nil {
		return nil, err
	}
	n.Node = node
	if err := n.addKubelet(); err != nil {
		return n, err
	}
	return n, n.StartContainerd(ctx)
}

// cniPlugins are those that the cluster's nodes have besides the stock ones.
func (c *Cluster) cniPlugins() []string {
	if c.options.IPAM != "stayput" {
		return nil
	}
	return []string{c.options.Product.Plugin}
}

// addKubelet lays out the kubelet of the node.
func (n *ClusterNode) addKubelet() error {
	config, err := json.Marshal(n.kubeletConfig())
	if err != nil {
		return err
	}
	files := map[string][]byte{
		kubeletConfigFile: config,
		kubeletKubeconfig: n.cluster.kubeconfigFor("system:node:" + n.Name),
		"/etc/machine-id": []byte(n.id + "\n"),
	}
	for name, data := range files {
		if err := n.WriteFile(name, data); err != nil {
			return err
		}
	}
	n.Kubelet = &Service{node: n.Node, name: "kubelet", ready: getFrom(n.Node, "http://127.0.0.1:10248/healthz"),
		argv: []string{
			labKubernetes + "kubelet", "--config=" + kubeletConfigFile, "--kubeconfig=" + kubeletKubeconfig,
			"--node-ip=" + n.IP.String(),
		}}
	return nil
}

// controlPlaneTaint keeps pods from the control plane's node that do not ask for it, as kubeadm has it. The label
// has the same name.
const controlPlaneTaint = "node-role.kubernetes.io/control-plane"

// startControlNode makes the control plane's machine a node for pods of the cluster's own, which tests that break
// nodes leave alone.
func (c *Cluster) startControlNode(ctx context.Context) error {
	n := &ClusterNode{Node: c.Control, Name: controlPlane, IP: serverIP, Pods: podSubnet(0), cluster: c}
	for _, plugin := range c.cniPlugins() {
		if err := n.Install(plugin, path.Join("/opt/cni/bin", filepath.Base(plugin))); err != nil {
			return err
		}
	}
	if err := n.addKubelet(); err != nil {
		return err
	}
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	if err := n.startKubelet(ctx); err != nil {
		return err
	}
	if err := c.WaitReady(ctx, n); err != nil {
		return err
	}
	// a kubelet must not give it to itself
	if _, err := c.Kubectl(ctx, "", "label", "node", n.Name, controlPlaneTaint+"="); err != nil {
		return err
	}
	c.ControlNode = n
	return nil
}

func nodeName(m int) string { return fmt.Sprintf("node-%d", m) }

// kubeletConfig is kubelet's default but for what a folder on a shared machine cannot do, and for what would
// make a test wait.
func (n *ClusterNode) kubeletConfig() map[string]any {
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",

		// Nothing from outside the fabric can reach a kubelet.
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false},
		},
		"authorization": map[string]any{"mode": "AlwaysAllow"},

		"containerRuntimeEndpoint": "unix://" + CRISocket,
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               "/" + n.id,
		"failCgroupV1":             false,
		"failSwapOn":               false,
		"oomScoreAdj":              0,                                // lowering it needs CAP_SYS_RESOURCE
		"volumePluginDir":          "/var/lib/kubelet/volumeplugins", // the default is in /usr
		// nobody is there, but its absence would be an event per pod
		"clusterDNS":    []string{"10.96.0.10"},
		"clusterDomain": "cluster.local",

		// A container that a test kills comes back within seconds, however often.
		"featureGates":     map[string]any{"KubeletCrashLoopBackOffMax": true},
		"crashLoopBackOff": map[string]any{"maxContainerRestartPeriod": "2s"},

		// The disk is the machine's, and how full that is must not matter.
		"imageGCHighThresholdPercent": 100,
		"evictionHard": map[string]any{
			"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%",
		},

		// The lease is renewed four times in its life, and the node is NotReady once that is over.
		"nodeLeaseDurationSeconds":  int(n.cluster.options.NodeMonitorGracePeriod.Seconds()),
		"nodeStatusUpdateFrequency": "1s",
	}
	if n.Name == controlPlane {
		config["registerWithTaints"] = []any{map[string]any{"key": controlPlaneTaint, "effect": "NoSchedule"}}
	}
	maps.Copy(config, n.cluster.options.KubeletConfig)
	return config
}

// startKubelet makes the cgroup of the node, which a power loss removes, and starts kubelet.
func (n *ClusterNode) startKubelet(ctx context.Context) error {
	if err := cgroups.Make(n.id); err != nil {
		return fmt.Errorf("making the cgroup of %s: %w", n.Name, err)
	}
	return n.Kubelet.Start(ctx)
}

// Boot switches a node on after a PowerLoss: containerd and kubelet, which starts the pods again, and the agent
// where it is no pod.
func (n *ClusterNode) Boot(ctx context.Context) error {
	if err := n.Node.Boot(ctx); err != nil {
		return err
	}
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	if err := n.startKubelet(ctx); err != nil {
		return err
	}
	if n.AgentProcess == nil {
		return nil
	}
	return n.AgentProcess.Start(ctx)
}

// Reboot is a power loss and a boot.
func (n *ClusterNode) Reboot(ctx context.Context) error {
	if err := n.PowerLoss(); err != nil {
		return err
	}
	return n.Boot(ctx)
}

// LoadImage loads a docker-archive, a file of this machine, into the node.
func (n *ClusterNode) LoadImage(ctx context.Context, archive string) error {
	const inside = "/var/tmp/image.tar"
	if err := copyFile(archive, n.Path(inside)); err != nil {
		return err
	}
	_, err := n.Run(ctx, "/opt/lab/containerd/ctr", "-n", "k8s.io", "images", "import", inside)
	return errors.Join(err, os.Remove(n.Path(inside)))
}

// Sandbox returns the running sandbox of a pod on the node, as containerd has it; of several the newest.
func (n *ClusterNode) Sandbox(ctx context.Context, namespace, name string) (Pod, error) {
	list, err := n.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY},
		LabelSelector: map[string]string{
			"io.kubernetes.pod.namespace": namespace, "io.kubernetes.pod.name": name,
		},
	}})
	if err != nil {
		return Pod{}, err
	}
	if len(list.Items) == 0 {
		return Pod{}, fmt.Errorf("no sandbox of %s/%s runs on %s", namespace, name, n.Name)
	}
	newest := slices.MaxFunc(list.Items, func(a, b *runtimeapi.PodSandbox) int {
		return cmp.Compare(a.CreatedAt, b.CreatedAt)
	})
	status, err := n.PodStatus(ctx, newest.Id)
	if err != nil {
		return Pod{}, err
	}
	ips, err := addressesOf(status)
	if err != nil {
		return Pod{}, err
	}
	ns, err := netNSOf(status)
	return Pod{
		PodSpec: PodSpec{
			Namespace: namespace, Name: name, UID: newest.Metadata.Uid, Attempt: newest.Metadata.Attempt,
			Annotations: newest.Annotations, Labels: newest.Labels,
		},
		ID: newest.Id, IPs: ips, NetNS: ns,
	}, err
}
