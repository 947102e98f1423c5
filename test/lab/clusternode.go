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
	// Name is the host name and the Node object's name.
	Name string
	// IP is the node's address in the fabric.
	IP netip.Addr
	// Pods is its pods' subnet.
	Pods netip.Prefix
	// Kubelet is started by StartCluster and Boot.
	Kubelet *Service
	// Flanneld, Proxy and Felix are started as Kubelet is; nil without [ClusterOptions].Flannel, Proxy and Calico or
	// [FlannelOptions].Calico.
	Flanneld, Proxy, Felix *Service
	// Multus is what multus' pod runs; nil until [Cluster.InstallMultus].
	Multus *Service
	// Agent is the node's stayput-agent pod, from [Cluster.Install] on.
	Agent *Agent
	// AgentProcess is stayput-agent without a pod; nil until [ClusterNode.StartAgent], then started by Boot.
	AgentProcess *Service

	calicoEnv []string // of calico-node
	tunnels   *Service // keeps the addresses of Calico's tunnels
	cluster   *Cluster
}

// daemons reports whether flannel or Calico connects the pods and routes between the nodes.
func (c *Cluster) daemons() bool { return c.options.Flannel != nil || c.options.Calico != nil }

// podNetworks are the networks of a node's pods before an installation. That of daemons is a file of theirs.
func (c *Cluster) podNetworks(pods netip.Prefix) []Network {
	if c.daemons() {
		return []Network{}
	}
	ipam := RangeIPAM(c.options.IPAM, pods.String())
	ipam["routes"] = []any{map[string]any{"dst": "0.0.0.0/0"}}
	return []Network{{IPAM: ipam, Annotations: !c.options.NoAnnotations}}
}

// routedNodes is to how many nodes every machine has routes from the start.
func (c *Cluster) routedNodes() int {
	if c.daemons() {
		return 0
	}
	return c.options.Nodes
}

// makeNode boots node m and starts its containerd, but not its kubelet, which needs the API server.
func (c *Cluster) makeNode(ctx context.Context, m int) (*ClusterNode, error) {
	o := c.options
	n := &ClusterNode{Name: nodeName(m), IP: nodeIP(m), Pods: podSubnet(m), cluster: c}
	node, err := startNode(ctx, c.bin.Bin, NodeOptions{
		Name:       n.Name,
		Networks:   c.podNetworks(n.Pods),
		CNIPlugins: c.cniPlugins(),
		Idle:       true,
		NoNRI:      o.NoNRI,
		binds:      c.binds(),

		containerdConfig: o.Versions.containerdConfig(),
		connect: func(pid int) error {
			return plug(c.Control.Pid(), pid, n.Name, n.IP, c.routedNodes(), m)
		},
	})
	if err != nil {
		return nil, err
	}
	n.Node = node
	if err := errors.Join(n.addKubelet(), n.addNetwork()); err != nil {
		return n, err
	}
	return n, n.StartContainerd(ctx)
}

// cniPlugins are the cluster's CNI plugins besides the stock ones.
func (c *Cluster) cniPlugins() []string {
	if c.options.IPAM != "stayput" {
		return nil
	}
	return []string{c.options.Product.Plugin}
}

// addKubelet sets up the node's kubelet.
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

// controlPlaneTaint keeps pods that do not tolerate it off the control plane's node, as kubeadm does. The node's label
// has the same name.
const controlPlaneTaint = "node-role.kubernetes.io/control-plane"

// startControlNode makes the control plane's machine a node for the cluster's own pods, safe from tests that break
// nodes.
func (c *Cluster) startControlNode(ctx context.Context) error {
	n := &ClusterNode{Node: c.Control, Name: controlPlane, IP: serverIP, Pods: podSubnet(0), cluster: c}
	for _, plugin := range c.cniPlugins() {
		if err := n.Install(plugin, path.Join("/opt/cni/bin", filepath.Base(plugin))); err != nil {
			return err
		}
	}
	if err := errors.Join(n.addKubelet(), n.addNetwork()); err != nil {
		return err
	}
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	if err := n.startKubelet(ctx); err != nil {
		return err
	}
	if err := n.startNetwork(ctx); err != nil {
		return err
	}
	if err := c.WaitReady(ctx, n); err != nil {
		return err
	}
	// A kubelet may not set this label itself.
	if _, err := c.Kubectl(ctx, "", "label", "node", n.Name, controlPlaneTaint+"="); err != nil {
		return err
	}
	c.ControlNode = n
	return nil
}

func nodeName(m int) string { return fmt.Sprintf("node-%d", m) }

// kubeletConfig is kubelet's default, except for what a folder on a shared machine cannot do and what would make tests
// wait.
func (n *ClusterNode) kubeletConfig() map[string]any {
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",

		// A kubelet cannot be reached from outside the fabric.
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false},
		},
		"authorization": map[string]any{"mode": "AlwaysAllow"},

		"containerRuntimeEndpoint": "unix://" + n.criSocket(),
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               "/" + n.id,
		"failCgroupV1":             false,
		"failSwapOn":               false,
		"oomScoreAdj":              0,                                // lowering it needs CAP_SYS_RESOURCE
		"volumePluginDir":          "/var/lib/kubelet/volumeplugins", // the default is in /usr
		// Not served, but without an address every pod would have an Event.
		"clusterDNS":    []string{"10.96.0.10"},
		"clusterDomain": "cluster.local",

		// A container killed by a test is back within seconds, however often.
		"featureGates":     map[string]any{"KubeletCrashLoopBackOffMax": true},
		"crashLoopBackOff": map[string]any{"maxContainerRestartPeriod": "2s"},

		// The disk is the machine's: its usage must not matter.
		"imageGCHighThresholdPercent": 100,
		"evictionHard": map[string]any{
			"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%",
		},

		// The kubelet renews the lease four times within its duration; the node is NotReady once it expires.
		"nodeLeaseDurationSeconds":  int(n.cluster.options.NodeMonitorGracePeriod.Seconds()),
		"nodeStatusUpdateFrequency": "1s",
	}
	if n.Name == controlPlane {
		config["registerWithTaints"] = []any{map[string]any{"key": controlPlaneTaint, "effect": "NoSchedule"}}
	}
	maps.Copy(config, n.cluster.options.KubeletConfig)
	return config
}

// startKubelet makes the node's cgroup, which a power loss removes, and starts kubelet.
func (n *ClusterNode) startKubelet(ctx context.Context) error {
	if err := cgroups.Make(n.id); err != nil {
		return fmt.Errorf("making the cgroup of %s: %w", n.Name, err)
	}
	return n.Kubelet.Start(ctx)
}

// Boot powers the node on after a PowerLoss: containerd, kubelet, which restarts the pods, what its network needs, and
// the agent if it is a process.
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
	if err := n.startServices(ctx); err != nil {
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

// cutFile is there while the node is cut off, with the filter from before.
const cutFile = "/run/cut"

// IsCutOff reports whether CutOff keeps the node from the control plane.
func (n *ClusterNode) IsCutOff() bool { return exists(n.Path(cutFile)) }

// CutOff cuts the node off from the control plane alone, or ends that, as a power loss does. Without a route nothing is
// sent; without the filter, kubelet would still hear that its pods are deleted.
func (n *ClusterNode) CutOff(ctx context.Context, off bool) error {
	if n.Pid() == 0 {
		return nil
	}
	const filter = "/proc/sys/net/ipv4/conf/all/rp_filter"
	each := fmt.Sprintf("for a in %s %s; do ip route %%s blackhole $a/32 || exit 1; done; ", serverIP, serviceIP)
	script := "[ ! -e " + cutFile + " ] || { " + fmt.Sprintf(each, "del") +
		"cat " + cutFile + " > " + filter + " && rm " + cutFile + "; }"
	if off {
		script = "[ -e " + cutFile + " ] || { cat " + filter + " > " + cutFile + "; " + fmt.Sprintf(each, "add") +
			"echo 1 > " + filter + "; }"
	}
	_, err := n.Run(ctx, "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; "+script+" && ip route flush cache")
	return err
}

// LoadImage loads a docker-archive, a file of this machine, into the node.
func (n *ClusterNode) LoadImage(ctx context.Context, archive string) error {
	const inside = "/var/tmp/image.tar"
	if err := copyFile(archive, n.Path(inside)); err != nil {
		return err
	}
	refs, err := archiveRefs(archive)
	if err == nil {
		err = n.importImages(ctx, inside, refs)
	}
	return errors.Join(err, os.Remove(n.Path(inside)))
}

// Sandbox returns a pod's running sandbox on the node according to containerd: the newest if there are several.
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
