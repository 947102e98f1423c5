//go:build multus

package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestPodsBehindThinMultusKeepTheAddressesOfBothInterfaces(t *testing.T) {
	keepThroughMultus(t, false)
}

func TestPodsBehindThickMultusKeepTheAddressesOfBothInterfaces(t *testing.T) {
	keepThroughMultus(t, true)
}

// secondNetworks are one of which each node has a range of its own, in a file of its own, and one from which pods ask
// for the addresses that they name.
const secondNetworks = `
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: lan}
---
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: fixed}
spec:
  config: '{"cniVersion": "1.0.0", "type": "macvlan", "master": "uplink0", "capabilities": {"ips": true},
    "ipam": {"type": "stayput", "subnet": "10.8.0.0/16"}}'
`

// setLan writes a node's part of the network lan, as its administrator does.
func setLan(t *testing.T, n *lab.ClusterNode, ipam string) {
	t.Helper()
	number := n.Pods.Addr().As4()[2]
	must.Do(t, n.WriteFile(lab.MultusNetworks+"/lan.conf", fmt.Appendf(nil, `{"cniVersion": "1.0.0", "name": "lan",
		"type": "macvlan", "master": %q, "ipam": {"type": %q, "ranges": [[
			{"subnet": "10.7.0.0/16", "rangeStart": "10.7.%[3]d.1", "rangeEnd": "10.7.%[3]d.200"}]]}}`,
		lab.Uplink, ipam, number)))
}

// keepThroughMultus has pods with two interfaces, each with an address of a node's range: first with multus there
// before stayput, then, once stayput has been removed, with stayput there before multus.
func keepThroughMultus(t *testing.T, thick bool) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	for _, n := range c.Nodes {
		ipam := lab.RangeIPAM("host-local", n.Pods.String())
		ipam["routes"] = []any{map[string]any{"dst": "0.0.0.0/0"}}
		// Before CNI 1.0.0 the file of thin multus, too, is 00-multus.conf.
		must.Do(t, n.SetNetworks(testContext(t), lab.Network{CNIVersion: "0.3.1", IPAM: ipam}))
		setLan(t, n, "host-local")
	}
	must.Do(t, c.InstallMultus(testContext(t), thick))
	ns := namespace(t, c)
	apply(t, c, ns, strings.Replace(secondNetworks, "uplink0", lab.Uplink, 1))
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: retain("1h", podNetworks, "lan")})
	web := places(t, c, ns, "web", 3, nil)

	// 1. Stayput comes under pods that run, and is theirs once multus has been restarted.
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	for _, n := range c.Nodes {
		until(t, n.Name+" to say what is missing", func(context.Context) bool {
			return strings.Contains(ask(t, n, "/readyz"), "restart its pod on this node")
		})
		setLan(t, n, "stayput")
		must.Do(t, n.RestartMultus(testContext(t)))
		until(t, n.Name+" to be content", func(context.Context) bool {
			return strings.Contains(ask(t, n, "/readyz"), "active: ")
		})
	}
	untouched(t, c, web)
	promised(t, c, web)
	web = replaced(t, c, ns, web, "eth0") // of the other network they are Stayput's from now on

	// 2. Both are kept while the pods are gone, and nobody else has them.
	had := interfaces(t, c, web)
	scale(t, c, ns, "web", 0)
	for name, pod := range web {
		r := shows(t, c, ns, name, pod.Spec.NodeName, "retained", retained)
		if want := []string{had[name]["eth0"].String(), had[name]["net1"].String()}; !slices.Equal(r.Status.IPs, want) {
			t.Errorf("of %s are kept %v, and it had %v", name, r.Status.IPs, want)
		}
	}
	deploy(t, c, ns, lab.Workload{Name: "other", Replicas: 3, Annotations: map[string]string{podNetworks: "lan"}})
	for name, has := range interfaces(t, c, places(t, c, ns, "other", 3, nil)) {
		for _, kept := range had {
			if has["eth0"] == kept["eth0"] || has["net1"] == kept["net1"] {
				t.Errorf("%s has %v, of which something is kept: %v", name, has, had)
			}
		}
	}
	scale(t, c, ns, "web", 3)
	web = places(t, c, ns, "web", 3, web)
	sameInterfaces(t, had, interfaces(t, c, web), "eth0", "net1")
	// And over a rollout.
	kubectl(t, c, "rollout", "restart", "statefulset/web", "-n", ns)
	web = places(t, c, ns, "web", 3, web)
	sameInterfaces(t, had, interfaces(t, c, web), "eth0", "net1")
	reachesAt(t, c, web["web-0"], web["web-1"], had["web-1"]["net1"])

	// 3. Pods have the addresses that they ask for.
	askForAddresses(t, c, ns)

	// 4. Stayput is removed: host-local has it all again, and still has when multus restarts.
	for _, n := range c.Nodes {
		setLan(t, n, "host-local")
	}
	_, err := c.Uninstall(testContext(t))
	must.Do(t, err)
	untouched(t, c, web)
	withoutStayput := func() {
		t.Helper()
		for _, n := range c.Nodes {
			conf, err := n.MultusConf()
			must.Do(t, err)
			if strings.Contains(string(conf), "stayput") {
				t.Errorf("multus has %s on %s", conf, n.Name)
			}
			hostLocalAlone(t, c, n)
		}
	}
	withoutStayput()
	deletePods(t, c, ns, "web") // the DELs are host-local's
	web = places(t, c, ns, "web", 3, web)
	withoutStayput()
	for _, n := range c.Nodes {
		must.Do(t, n.RestartMultus(testContext(t)))
	}
	withoutStayput()
	deploy(t, c, ns, lab.Workload{Name: "late", Replicas: 3, Annotations: map[string]string{podNetworks: "lan"}})
	late := places(t, c, ns, "late", 3, nil)
	reachesAt(t, c, web["web-0"], late["late-1"], interfaces(t, c, late)["late-1"]["net1"])

	// 5. The other way round: multus comes when stayput is there.
	for _, n := range c.Nodes {
		must.Do(t, n.StopMultus(testContext(t)))
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	for _, n := range c.Nodes {
		setLan(t, n, "stayput")
	}
	must.Do(t, c.InstallMultus(testContext(t), thick))
	promised(t, c, web)
	web = replaced(t, c, ns, web, "eth0")
	replaced(t, c, ns, web, "eth0", "net1")
}

// interfaces returns the addresses of pods with two interfaces, each with one address.
func interfaces(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) map[string]map[string]netip.Addr {
	t.Helper()
	all := map[string]map[string]netip.Addr{}
	for name, pod := range pods {
		configured, err := c.Node(pod.Spec.NodeName).Addresses(sandbox(t, c, pod).NetNS)
		must.Do(t, err)
		all[name] = map[string]netip.Addr{}
		for _, ifname := range []string{"eth0", "net1"} {
			if len(configured[ifname]) != 1 {
				t.Fatalf("%s has %v", name, configured)
			}
			all[name][ifname] = configured[ifname][0].Addr()
		}
		if all[name]["eth0"] != ip(t, pod) {
			t.Errorf("%s has %v, and its address is %s", name, all[name], pod.Status.PodIP)
		}
	}
	return all
}

func sameInterfaces(t *testing.T, had, has map[string]map[string]netip.Addr, ifnames ...string) {
	t.Helper()
	for name := range had {
		for _, ifname := range ifnames {
			if had[name][ifname] != has[name][ifname] {
				t.Errorf("%s had %v and has %v", name, had[name], has[name])
			}
		}
	}
}

// replaced deletes the pods of web, and checks that their successors have the same nodes, and on these interfaces the
// same addresses. It returns them once both addresses are promised.
func replaced(t *testing.T, c *lab.Cluster, ns string, web map[string]*corev1.Pod, ifnames ...string,
) map[string]*corev1.Pod {
	t.Helper()
	had := interfaces(t, c, web)
	deletePods(t, c, ns, "web")
	after := places(t, c, ns, "web", len(web), web)
	cameHome(t, web, after)
	sameInterfaces(t, had, interfaces(t, c, after), ifnames...)
	for name, pod := range after {
		shows(t, c, ns, name, pod.Spec.NodeName, "bound with two addresses", func(r *v1alpha1.RetainedIP) bool {
			return boundTo(pod)(r) && len(r.Status.IPs) == 2
		})
	}
	return after
}

// askForAddresses has pods ask for addresses by multus' annotation.
func askForAddresses(t *testing.T, c *lab.Cluster, ns string) {
	t.Helper()
	const kept, ordinary = "10.8.0.50", "10.8.0.60"
	deploy(t, c, ns, lab.Workload{Name: "fixed", Replicas: 1, Annotations: map[string]string{
		retainIP: "1h", podNetworks: `[{"name": "fixed", "ips": ["` + kept + `/16"]}]`,
	}})
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 1, Annotations: map[string]string{
		podNetworks: `[{"name": "fixed", "cni-args": {"ips": ["` + ordinary + `"]}}]`,
	}})
	both := func(before map[string]*corev1.Pod) map[string]*corev1.Pod {
		t.Helper()
		pods := places(t, c, ns, "fixed", 1, before)
		maps.Copy(pods, places(t, c, ns, "plain", 1, before))
		has := interfaces(t, c, pods)
		for name, want := range map[string]string{"fixed-0": kept, "plain-0": ordinary} {
			if has[name]["net1"].String() != want {
				t.Errorf("%s asks for %s and has %v", name, want, has[name])
			}
		}
		return pods
	}
	pods := both(nil)
	for _, name := range []string{"fixed", "plain"} {
		deletePods(t, c, ns, name)
	}
	pods = both(pods)

	// What cannot be had is said to whoever asks.
	node := pods["fixed-0"].Spec.NodeName
	refused := func(name, asks, says string) {
		t.Helper()
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: 1, Annotations: map[string]string{
			podNetworks: `[{"name": "fixed", "ips": ["` + asks + `"]}]`,
		}, Node: node})
		saysOf(t, c, ns, "Pod", name+"-0", "FailedCreatePodSandBox", says)
	}
	refused("same", kept+"/16", kept+" is taken by pod fixed-0")
	refused("outside", "10.9.0.1/16", "10.9.0.1] in no range of the network")
	scale(t, c, ns, "fixed", 0)
	shows(t, c, ns, "fixed-0", node, "retained", retained)
	refused("later", kept+"/16", kept+" is retained for pod fixed-0")
	scale(t, c, ns, "fixed", 1)
	both(map[string]*corev1.Pod{"fixed-0": pods["fixed-0"]})

	kubectl(t, c, "delete", "statefulset", "fixed", "plain", "same", "outside", "later", "-n", ns)
	kubectl(t, c, "wait", "--for=delete", "pod", "-l", "app in (fixed, plain, same, outside, later)", "-n", ns)
}
