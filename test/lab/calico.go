package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// calicoComponent is Calico's CNI plugin, calico-node, whose Felix does all but eBPF without C, and its controllers.
// Each links as much as Kubernetes does.
var calicoComponent = component{
	name: "calico", dir: "build/calico", sources: []string{"build/calico"}, pkg: "tool", parallel: 2,
}

// BuildCalico builds Calico and returns the path of its CNI plugin.
func BuildCalico(ctx context.Context) (string, error) { return buildProgram(ctx, calicoComponent) }

// CalicoOptions have Calico alone connect the pods: its IPAM, VXLAN and Felix, as its manifests/calico-vxlan.yaml does.
type CalicoOptions struct {
	// Objects are applied before calico-node starts. If there is no IPPool among them, calico-node makes its default, of
	// podsNetwork in blocks of 64.
	Objects string
	// IPv6 gives each pod an address of each family. Those of IPv6 are not routed between the nodes.
	IPv6 bool
	// LeakGracePeriod is after how long the controllers free an address that they take for leaked, which they look for
	// twice in that time; 15 min if 0.
	LeakGracePeriod time.Duration
}

const (
	labCalico        = "/opt/lab/calico/"
	calicoKubeconfig = cniDir + "/calico-kubeconfig"
	calicoConfig     = nodeConfigFolder + "calico-node.kubeconfig"
	calicoNodeName   = "/var/lib/calico/nodename" // the plugin waits for it
	calicoGateway    = "169.254.1.1"              // of every pod
	// calicoIPv6 is the pool of calico-node's for IPv6.
	calicoIPv6 = "fd00:10:244::/48"

	calicoAccount = "system:serviceaccount:kube-system:calico-"
	// The plugin's account too: the manifest sets CALICO_CNI_SERVICE_ACCOUNT.
	canalUser = "system:serviceaccount:kube-system:canal"
)

// calico is what a cluster takes of one of Calico's own manifests, and its programs.
type calico struct {
	folder   string // with the programs; empty if the cluster has no Calico
	objects  string // all but its workloads: machines run their programs as processes
	conflist string // its template

	file              string            // the conflist's name
	nodeUser, cniUser string            // the accounts of calico-node and of the plugin
	env               map[string]string // of calico-node, besides what is the same everywhere
}

// needCalico builds Calico, and reads what the cluster takes of its manifest.
func (c *Cluster) needCalico(ctx context.Context) error {
	var k calico
	var manifest string
	if o := c.options.Calico; o != nil {
		ipv6 := "none"
		if o.IPv6 {
			ipv6 = calicoIPv6
		}
		manifest = "calico-vxlan.yaml"
		k = calico{file: "10-calico.conflist", nodeUser: calicoAccount + "node", cniUser: calicoAccount + "cni-plugin",
			env: map[string]string{
				"CALICO_NETWORKING_BACKEND": "vxlan", "CLUSTER_TYPE": "k8s,bgp", "IP": "autodetect",
				"CALICO_IPV4POOL_CIDR": podsNetwork, "CALICO_IPV4POOL_IPIP": "Never", "CALICO_IPV4POOL_VXLAN": "Always",
				"CALICO_IPV6POOL_CIDR": ipv6, "FELIX_IPV6SUPPORT": strconv.FormatBool(o.IPv6),
			}}
	} else {
		manifest = "canal.yaml"
		k = calico{file: "10-canal.conflist", nodeUser: canalUser, cniUser: canalUser, env: map[string]string{
			"CALICO_NETWORKING_BACKEND": "none", "CLUSTER_TYPE": "k8s,canal", "IP": "", "NO_DEFAULT_POOLS": "true",
			"USE_POD_CIDR": "true", "FELIX_IPTABLESREFRESHINTERVAL": "60", "FELIX_IPV6SUPPORT": "false",
		}}
	}
	dirs, err := buildAll(ctx, calicoComponent)
	if err != nil {
		return err
	}
	k.folder = dirs[calicoComponent.name]
	manifests, err := calicoManifests(ctx)
	if err != nil {
		return err
	}
	if err := k.read(filepath.Join(manifests, manifest)); err != nil {
		return err
	}
	c.calico = k
	return nil
}

func (k *calico) read(file string) error {
	manifest, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for document := range strings.SplitSeq(string(manifest), "\n---\n") {
		var object struct {
			Kind string
			Data map[string]string
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		switch object.Kind {
		case "DaemonSet", "Deployment", "PodDisruptionBudget":
			continue
		case "ConfigMap":
			k.conflist = object.Data["cni_network_config"]
		}
		k.objects += document + "\n---\n"
	}
	if k.conflist == "" {
		return fmt.Errorf("%s has no CNI configuration", file)
	}
	return nil
}

// startCalico makes Calico's objects, and starts its controllers beside its own IPAM.
func (c *Cluster) startCalico(ctx context.Context) error {
	if _, err := c.Kubectl(ctx, c.calico.objects, "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	if err := c.WaitForCRDs(ctx); err != nil {
		return err
	}
	o := c.options.Calico
	if o == nil {
		return nil
	}
	objects := o.Objects
	if o.LeakGracePeriod != 0 {
		objects += fmt.Sprintf(`
---
apiVersion: crd.projectcalico.org/v1
kind: KubeControllersConfiguration
metadata: {name: default}
spec: {controllers: {node: {leakGracePeriod: %s, reconcilerPeriod: 5m}}}
`, o.LeakGracePeriod)
	}
	if objects != "" {
		if _, err := c.Kubectl(ctx, objects, "apply", "--server-side", "-f", "-"); err != nil {
			return err
		}
	}
	const config = nodeConfigFolder + "calico-kube-controllers.kubeconfig"
	err := errors.Join(c.Control.WriteFile(config, c.kubeconfigFor(calicoAccount+"kube-controllers")),
		os.MkdirAll(c.Control.disk("/status"), 0o755)) // it writes there how it is
	if err != nil {
		return err
	}
	c.CalicoControllers = &Service{node: c.Control, keep: true, name: "calico-kube-controllers",
		argv: []string{labCalico + "kube-controllers"},
		env:  []string{"KUBECONFIG=" + config, "DATASTORE_TYPE=kubernetes", "ENABLED_CONTROLLERS=node"},
	}
	return c.CalicoControllers.Start(ctx)
}

// addCalico sets up the node's part of calico-node, and returns the files that install-cni and calico-node write.
func (n *ClusterNode) addCalico(iface string) (map[string][]byte, error) {
	k := &n.cluster.calico
	n.calicoEnv = []string{
		"KUBECONFIG=" + calicoConfig, "DATASTORE_TYPE=kubernetes", "WAIT_FOR_DATASTORE=true", "NODENAME=" + n.Name,
		// By default it takes interfaces of usual names only.
		"IP_AUTODETECTION_METHOD=interface=" + iface, "FELIX_MTUIFACEPATTERN=^(" + iface + ")$",
		// As in the manifests, and in the image's script that starts Felix.
		"FELIX_DEFAULTENDPOINTTOHOSTACTION=ACCEPT", "FELIX_HEALTHENABLED=true",
		"FELIX_DATASTORETYPE=kubernetes", "FELIX_FELIXHOSTNAME=" + n.Name,
		"FELIX_USAGEREPORTINGENABLED=false",
		// Without C it panics where it looks for remains of its eBPF.
		"FELIX_DebugSkipCTLBCleanup=true",
	}
	for name, value := range k.env {
		n.calicoEnv = append(n.calicoEnv, name+"="+value)
	}
	n.Felix = &Service{node: n.Node, keep: true, name: "felix", ready: getFrom(n.Node, "http://127.0.0.1:9099/readiness"),
		// That folder is gone at every boot.
		argv: []string{"/bin/sh", "-c", "mkdir -p /run/calico && exec " + labCalico + "calico-node -felix"},
		env:  n.calicoEnv}
	n.tunnels = &Service{node: n.Node, keep: true, name: "calico-tunnels", env: n.calicoEnv,
		argv: []string{labCalico + "calico-node", "-allocate-tunnel-addrs"}}
	conflist := strings.NewReplacer("__KUBERNETES_NODE_NAME__", n.Name, "__CNI_MTU__", "0",
		"__KUBECONFIG_FILEPATH__", calicoKubeconfig).Replace(k.conflist)
	if o := n.cluster.options.Calico; o != nil && o.IPv6 {
		const ipam = `"type": "calico-ipam"`
		conflist = strings.Replace(conflist, ipam, ipam+`, "assign_ipv4": "true", "assign_ipv6": "true"`, 1)
	}
	var err error
	for _, name := range []string{"calico", "calico-ipam"} {
		err = errors.Join(err, n.Install(filepath.Join(k.folder, "calico"), "/opt/cni/bin/"+name))
	}
	return map[string][]byte{
		cniDir + "/" + k.file: []byte(conflist),
		calicoKubeconfig:      n.cluster.kubeconfigFor(k.cniUser),
		calicoConfig:          n.cluster.kubeconfigFor(k.nodeUser),
		// As in calico-node's image.
		"/etc/calico/felix.cfg": []byte("[global]\nMetadataAddr = None\nLogFilePath = None\nLogSeverityFile = None\n" +
			"LogSeveritySys = None\n"),
		calicoNodeName: []byte(n.Name),
	}, err
}

// prepareCalico does what calico-node does at every boot before Felix starts. The Node must exist: until then it fails.
func (n *ClusterNode) prepareCalico(ctx context.Context) error {
	for _, args := range [][]string{{"-startup"}, {"-allocate-tunnel-addrs", "-allocate-tunnel-addrs-run-once"}} {
		err := Until(ctx, "calico-node "+args[0]+" on "+n.Name, func() (bool, error) {
			ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			out, err := n.RunInput(ctx, n.calicoEnv, nil, append([]string{labCalico + "calico-node"}, args...)...)
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err == nil, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// routeGateway has the control plane's machine answer its pods for their gateway, by proxy ARP: it does only for what
// it has a route to. The other nodes have a default route.
func (n *ClusterNode) routeGateway() error {
	return withNetlink(n.Pid(), func(h *netlink.Handle) error {
		fabric, err := h.LinkByName(fabricBridge)
		if err != nil {
			return err
		}
		return h.RouteReplace(&netlink.Route{
			LinkIndex: fabric.Attrs().Index, Scope: unix.RT_SCOPE_LINK,
			Dst: network(netip.PrefixFrom(netip.MustParseAddr(calicoGateway), 32)),
		})
	})
}

// CalicoDefinitions returns the definitions of Calico's objects, as its manifests have them.
func CalicoDefinitions(ctx context.Context) (string, error) {
	folder, err := calicoManifests(ctx)
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(folder, "crds.yaml"))
	return string(text), err
}

// calicoManifests returns the folder of Calico's own manifests.
func calicoManifests(ctx context.Context) (string, error) {
	module, err := moduleDir(ctx, calicoComponent.dir, "github.com/projectcalico/calico/node/cmd/calico-node")
	return filepath.Join(module, "../../../manifests"), err
}
