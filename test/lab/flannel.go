package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// FlannelOptions configure the daemons of flannel. They run as those of its DaemonSet do, but as processes.
type FlannelOptions struct {
	// Backend is vxlan or host-gw.
	Backend string
	// NFTables has them masquerade by nftables; otherwise by iptables.
	NFTables bool
	// Calico has its CNI plugin connect the pods, and Felix enforce their policies: both together are canal.
	Calico bool
}

// podsNetwork is flannel's network, and the cluster CIDR: that of the pods of all nodes.
const podsNetwork = "10.244.0.0/16"

const (
	labFlanneld      = "/opt/lab/flanneld/"
	labProxy         = "/opt/lab/kubeproxy/"
	flannelUser      = "flannel"
	flannelConflist  = "/etc/cni/net.d/10-flannel.conflist"
	flannelNetConf   = "/etc/kube-flannel/net-conf.json" // flanneld's default
	flannelSubnet    = "/run/flannel/subnet.env"         // the same
	proxyUser        = "system:kube-proxy"               // Kubernetes binds its role to this name
	nodeConfigFolder = "/etc/kubernetes/"                // + user + ".kubeconfig"
)

// needs builds and installs what the nodes' network takes.
func (c *Cluster) needs(ctx context.Context) error {
	var packages []string
	f := c.options.Flannel
	if f != nil {
		dirs, err := buildAll(ctx, flanneldComponent)
		if err != nil {
			return err
		}
		c.flanneld = dirs[flanneldComponent.name]
		packages = append(packages, "iptables", "nftables")
	}
	switch {
	case c.options.Calico != nil || f != nil && f.Calico:
		if err := c.needCalico(ctx); err != nil {
			return err
		}
		packages = append(packages, "iptables", "nftables", "conntrack", "ipset")
	case f != nil:
		var err error
		if c.flannel, err = BuildFlannel(ctx); err != nil {
			return err
		}
	}
	if c.options.Proxy != "" {
		dirs, err := buildAll(ctx, proxyComponent)
		if err != nil {
			return err
		}
		c.proxy = dirs[proxyComponent.name]
		packages = append(packages, "iptables", "nftables", "conntrack")
	}
	slices.Sort(packages)
	return Need(ctx, slices.Compact(packages)...)
}

// addNetwork gives a machine of the cluster its share of the network, before its containerd starts: the network's
// configuration, as flannel's init container does, and the services flanneld and kube-proxy.
func (n *ClusterNode) addNetwork() error {
	c := n.cluster
	files := map[string][]byte{}
	iface := Uplink
	if n.Name == controlPlane {
		iface = fabricBridge
	}
	if c.calico.folder != "" {
		of, err := n.addCalico(iface)
		if err != nil {
			return err
		}
		maps.Copy(files, of)
		if n.Name == controlPlane {
			if err := n.routeGateway(); err != nil {
				return err
			}
		}
	}
	if f := c.options.Flannel; f != nil {
		conf, err := json.Marshal(map[string]any{
			"Network": podsNetwork, "EnableNFTables": f.NFTables, "Backend": map[string]any{"Type": f.Backend},
		})
		if err != nil {
			return err
		}
		files[flannelNetConf] = conf
		files[nodeConfigFolder+flannelUser+".kubeconfig"] = c.kubeconfigFor(flannelUser)
		if !f.Calico {
			files[flannelConflist] = []byte(`{"name": "cbr0", "cniVersion": "0.3.1", "plugins": [
  {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
`)
			if err := n.Install(c.flannel, "/opt/cni/bin/flannel"); err != nil {
				return err
			}
		}
		n.Flanneld = &Service{node: n.Node, keep: true, name: "flanneld", env: []string{"NODE_NAME=" + n.Name},
			ready: func(context.Context) error {
				_, err := os.Stat(n.Path(flannelSubnet))
				return err
			},
			argv: []string{labFlanneld + "flanneld", "--kube-subnet-mgr", "--ip-masq", "--iface=" + iface,
				"--kubeconfig-file=" + nodeConfigFolder + flannelUser + ".kubeconfig"}}
	}
	if mode := c.options.Proxy; mode != "" {
		files[nodeConfigFolder+proxyUser+".kubeconfig"] = c.kubeconfigFor(proxyUser)
		n.Proxy = &Service{node: n.Node, keep: true, name: "kube-proxy",
			ready: getFrom(n.Node, "http://127.0.0.1:10256/healthz"),
			argv: append([]string{labProxy + "kube-proxy", "--proxy-mode=" + mode, "--hostname-override=" + n.Name,
				"--cluster-cidr=" + podsNetwork, "--kubeconfig=" + nodeConfigFolder + proxyUser + ".kubeconfig",
				// These sysctls have no network namespace.
				"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s",
				"--conntrack-tcp-timeout-close-wait=0s",
			}, c.options.ProxyArgs...)}
	}
	if len(files) > 0 {
		if err := n.alternatives(); err != nil {
			return err
		}
	}
	for name, data := range files {
		if err := n.WriteFile(name, data); err != nil {
			return err
		}
	}
	return nil
}

// alternatives makes Debian's iptables work, whose names in /usr lead to /etc.
func (n *Node) alternatives() error {
	const dir = "/etc/alternatives"
	if err := os.MkdirAll(n.disk(dir), 0o755); err != nil {
		return err
	}
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			err := os.Symlink("/usr/sbin/"+program+"-nft"+suffix, n.disk(filepath.Join(dir, program+suffix)))
			if err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
		}
	}
	return nil
}

// startNetwork gives the Node its podCIDR, which flanneld waits for, and starts the services of the node's network.
func (n *ClusterNode) startNetwork(ctx context.Context) error {
	if n.Flanneld != nil {
		if err := n.SetPodCIDR(ctx); err != nil {
			return err
		}
	}
	return n.startServices(ctx)
}

// startServices starts flanneld, kube-proxy and calico-node, as far as the node has them, again if they run.
func (n *ClusterNode) startServices(ctx context.Context) error {
	if n.Felix != nil {
		if err := n.prepareCalico(ctx); err != nil {
			return err
		}
	}
	for _, s := range []*Service{n.Flanneld, n.Proxy, n.Felix, n.tunnels} {
		if s == nil {
			continue
		}
		if err := s.Restart(ctx); err != nil {
			return err
		}
	}
	return nil
}

// SetPodCIDR writes Pods to the Node once it is registered, as kube-controller-manager does.
func (n *ClusterNode) SetPodCIDR(ctx context.Context) error {
	patch := fmt.Appendf(nil, `{"spec": {"podCIDR": %q, "podCIDRs": [%[1]q]}}`, n.Pods)
	return Until(ctx, "the podCIDR of "+n.Name, func() (bool, error) {
		_, err := n.cluster.client.CoreV1().Nodes().Patch(ctx, n.Name, types.StrategicMergePatchType, patch,
			metav1.PatchOptions{})
		return err == nil, err
	})
}

// Lease takes away what flanneld has said of the node, and flanneld itself, as if the node were given another lease.
// flanneld says it again when it starts.
func (n *ClusterNode) Lease(ctx context.Context) error {
	if err := n.Flanneld.end(syscall.SIGKILL); err != nil {
		return err
	}
	var gone []map[string]any
	node, err := n.cluster.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, key := range []string{"backend-data", "backend-type", "kube-subnet-manager", "public-ip"} {
		if key = "flannel.alpha.coreos.com/" + key; node.Annotations[key] != "" {
			gone = append(gone, map[string]any{"op": "remove",
				"path": "/metadata/annotations/flannel.alpha.coreos.com~1" + key[len("flannel.alpha.coreos.com/"):]})
		}
	}
	patch, err := json.Marshal(gone)
	if err != nil {
		return err
	}
	_, err = n.cluster.client.CoreV1().Nodes().Patch(ctx, n.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
	return errors.Join(err, os.RemoveAll(n.Path(flannelSubnet)))
}

// AddNode adds a node with the next number, and so a podCIDR of its own, and waits until it is Ready. The cluster must
// have flannel or Calico: nobody else tells the other nodes.
func (c *Cluster) AddNode(ctx context.Context) (*ClusterNode, error) {
	if !c.daemons() {
		return nil, errors.New("only flannel and Calico route to a node that comes later")
	}
	c.made++
	n, err := c.makeNode(ctx, c.made)
	if n != nil {
		c.Nodes = append(c.Nodes, n)
	}
	if err != nil {
		return nil, err
	}
	if err := errors.Join(n.startKubelet(ctx), n.startNetwork(ctx), c.WaitReady(ctx, n)); err != nil {
		return nil, err
	}
	if c.image != "" {
		n.Agent = &Agent{n}
		err = n.LoadImage(ctx, c.image)
	}
	return n, err
}

// RemoveNode ends a node for good, with its disk and, if it is still there, its Node.
func (c *Cluster) RemoveNode(ctx context.Context, n *ClusterNode) error {
	if err := n.Close(); err != nil {
		return err
	}
	c.Nodes = slices.DeleteFunc(c.Nodes, func(other *ClusterNode) bool { return other == n })
	err := c.client.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// spare is how many nodes can be added to a cluster: the API server knows their tokens from its start.
const spare = 6
