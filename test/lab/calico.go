package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

// calicoComponent is Calico's CNI plugin and Felix, its daemon, which without C does all but eBPF. Each links as much
// as Kubernetes does.
var calicoComponent = component{
	name: "calico", dir: "build/calico", sources: []string{"build/calico"}, pkg: "tool", parallel: 2,
}

// BuildCalico builds Calico's CNI plugin and returns its path.
func BuildCalico(ctx context.Context) (string, error) { return buildProgram(ctx, calicoComponent) }

const (
	labCalico        = "/opt/lab/calico/"
	canalConflist    = cniDir + "/10-canal.conflist"
	calicoKubeconfig = cniDir + "/calico-kubeconfig"
	felixKubeconfig  = nodeConfigFolder + "felix.kubeconfig"
	calicoNodeName   = "/var/lib/calico/nodename" // the plugin waits for it
	calicoGateway    = "169.254.1.1"              // of every pod
	// The plugin's account too: the manifest sets CALICO_CNI_SERVICE_ACCOUNT.
	canalUser = "system:serviceaccount:kube-system:canal"
)

// canal is what a cluster takes of Calico's own manifests/canal.yaml, and its programs.
type canal struct {
	plugin, felix string // paths
	objects       string // all but its workloads: nodes run their programs as processes
	conflist      string // its template
}

func readCanal(ctx context.Context, programs string) (canal, error) {
	c := canal{plugin: filepath.Join(programs, "calico"), felix: filepath.Join(programs, "calico-felix")}
	daemon, err := moduleDir(ctx, calicoComponent.dir, "github.com/projectcalico/calico/felix/cmd/calico-felix")
	if err != nil {
		return c, err
	}
	file := filepath.Join(daemon, "../../../manifests/canal.yaml")
	manifest, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}
	for document := range strings.SplitSeq(string(manifest), "\n---\n") {
		var object struct {
			Kind string
			Data map[string]string
		}
		if err := yaml.Unmarshal([]byte(document), &object); err != nil {
			return c, fmt.Errorf("%s: %w", file, err)
		}
		switch object.Kind {
		case "DaemonSet", "Deployment":
			continue
		case "ConfigMap":
			c.conflist = object.Data["cni_network_config"]
		}
		c.objects += document + "\n---\n"
	}
	if c.conflist == "" {
		return c, fmt.Errorf("%s has no CNI configuration", file)
	}
	return c, nil
}

// calicoDefaults is what calico-node makes when it starts: Felix and the plugin wait until the datastore is ready.
const calicoDefaults = `
apiVersion: crd.projectcalico.org/v1
kind: ClusterInformation
metadata: {name: default}
spec: {clusterType: "k8s,canal,kdd", datastoreReady: true}
---
apiVersion: crd.projectcalico.org/v1
kind: Tier
metadata: {name: default}
spec: {order: 1000000, defaultAction: Deny}
---
apiVersion: crd.projectcalico.org/v1
kind: Tier
metadata: {name: adminnetworkpolicy}
spec: {order: 1000, defaultAction: Pass}
---
apiVersion: crd.projectcalico.org/v1
kind: Tier
metadata: {name: baselineadminnetworkpolicy}
spec: {order: 10000000, defaultAction: Pass}
`

// applyCanal makes canal's objects.
func (c *Cluster) applyCanal(ctx context.Context) error {
	if _, err := c.Kubectl(ctx, c.calico.objects, "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	if err := c.WaitForCRDs(ctx); err != nil {
		return err
	}
	_, err := c.Kubectl(ctx, calicoDefaults, "apply", "--server-side", "-f", "-")
	return err
}

// addCalico sets up the node's Felix, and returns the files of a node of canal: those that install-cni and calico-node
// write, as far as Felix and the plugin need them.
func (n *ClusterNode) addCalico() map[string][]byte {
	c := n.cluster
	n.Felix = &Service{node: n.Node, keep: true, name: "felix", ready: getFrom(n.Node, "http://127.0.0.1:9099/readiness"),
		argv: []string{"/bin/sh", "-c", "mkdir -p /run/calico && exec " + labCalico + "calico-felix"}, // gone at every boot
		env: []string{
			"KUBECONFIG=" + felixKubeconfig, "FELIX_DATASTORETYPE=kubernetes", "FELIX_FELIXHOSTNAME=" + n.Name,
			// As in canal.yaml.
			"FELIX_IPTABLESREFRESHINTERVAL=60", "FELIX_DEFAULTENDPOINTTOHOSTACTION=ACCEPT", "FELIX_IPV6SUPPORT=false",
			"FELIX_HEALTHENABLED=true",
			// As in calico-node's felix.cfg.
			"FELIX_LOGFILEPATH=none", "FELIX_LOGSEVERITYFILE=none", "FELIX_LOGSEVERITYSYS=none",
			// By default it takes interfaces of usual names only.
			"FELIX_MTUIFACEPATTERN=^(" + Uplink + "|" + fabricBridge + ")$",
			"FELIX_USAGEREPORTINGENABLED=false",
			// Without C it panics where it looks for remains of its eBPF.
			"FELIX_DebugSkipCTLBCleanup=true",
		}}
	conflist := strings.NewReplacer("__KUBERNETES_NODE_NAME__", n.Name, "__CNI_MTU__", "0",
		"__KUBECONFIG_FILEPATH__", calicoKubeconfig).Replace(c.calico.conflist)
	return map[string][]byte{
		canalConflist:    []byte(conflist),
		calicoKubeconfig: c.kubeconfigFor(canalUser),
		felixKubeconfig:  c.kubeconfigFor(canalUser),
		calicoNodeName:   []byte(n.Name),
	}
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
