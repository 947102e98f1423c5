//go:build flannel

package cluster

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// Routed pools beside what they meet in clusters: flanneld and kube-proxy. The tests take long, and are run by make
// flannel only.

// liberal has kube-proxy forward packets of connections of which it has seen one direction only.
const liberal = "--conntrack-tcp-be-liberal"

// networks are the combinations that are tried: each backend, and each way to masquerade and to serve Services.
var networks = map[string]lab.ClusterOptions{
	"host-gw, iptables": {Flannel: &lab.FlannelOptions{Backend: "host-gw"}, Proxy: "iptables"},
	"vxlan, nftables": {Flannel: &lab.FlannelOptions{Backend: "vxlan", NFTables: true}, Proxy: "nftables",
		ProxyArgs: []string{liberal}},
}

// nearPool lies in flannel's network, which is the cluster CIDR; far, of routedPool, does not.
var nearPool = strings.NewReplacer("far", "near", "10.50.0.0/16", "10.244.200.0/24", "10.50.0.1-10.50.0.80",
	"10.244.200.1-10.244.200.80").Replace(routedPool)

// withFlannel returns a cluster of its own with the pools, a namespace, and a client on each node.
func withFlannel(t *testing.T, o lab.ClusterOptions) (*lab.Cluster, string) {
	t.Helper()
	c := ownCluster(t, &o)
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range c.Nodes {
				t.Logf("%s routes\n%s", n.Name, inNode(t, n, "ip route; ip -d link; nft list ruleset | grep -v counter"))
			}
		}
	})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	ns := namespace(t, c)
	apply(t, c, ns, routedPool+"---"+nearPool)
	deploy(t, c, ns, everywhere("client"))
	clients(t, c, ns)
	return c, ns
}

// inNode runs a command in a node and returns its output, also if it fails.
func inNode(t *testing.T, n *lab.ClusterNode, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	out, err := n.Run(ctx, "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; "+command)
	if err != nil {
		return string(out) + err.Error()
	}
	return string(out)
}

// port is where peers are told from which address they come.
const port = "7777"

type dial func(ctx context.Context, network, address string) (net.Conn, error)

// tells has a listener tell who asks from which address they come.
func tells(t *testing.T, l net.Listener, err error) {
	t.Helper()
	must.Do(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed
			}
			fmt.Fprint(conn, conn.RemoteAddr())
			conn.Close()
		}
	}()
}

// source asks from which address it comes.
func source(ctx context.Context, dial dial, to string) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := dial(ctx, "tcp", to)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return netip.Addr{}, err
	}
	b, err := io.ReadAll(conn)
	if err != nil {
		return netip.Addr{}, err
	}
	from, err := netip.ParseAddrPort(string(b))
	return from.Addr().Unmap(), err
}

// publish creates a pod on a node, with a hostPort, and its Service.
func publish(
	t *testing.T, c *lab.Cluster, ns, name, node string, annotations map[string]string, hostPort int32,
) {
	t.Helper()
	listens, err := strconv.ParseInt(port, 10, 32)
	must.Do(t, err)
	deploy(t, c, ns, lab.Workload{
		Kind: "Pod", Name: name, Node: node, Annotations: annotations, Unprobed: true,
		Container: corev1.Container{Ports: []corev1.ContainerPort{{ContainerPort: int32(listens), HostPort: hostPort}}},
	})
	apply(t, c, ns, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec:
  selector: {app: %[1]s}
  ports: [{port: 80, targetPort: %[2]s}]
`, name, port))
}

// ordinary says which source is seen when an ordinary pod is asked, and when it asks: that of the peer or pod itself,
// or the address of a node. "Its node" is the pod's.
var ordinary = map[string]string{
	"sees beside": "itself", "sees away": "itself", "sees its node": "its node", "sees another node": "another node",
	"sees outside": "itself",

	"by its Service sees beside": "itself", "by its Service sees away": "itself",
	"by its Service sees its node": "its node", "by its Service sees another node": "another node",
	"by its Service sees itself": "its node",

	"by its hostPort sees beside": "its node", "by its hostPort sees away": "another node",
	"by its hostPort sees its node": "its node", "by its hostPort sees another node": "another node",
	"by its hostPort sees outside": "itself",

	"is seen by beside": "itself", "is seen by away": "itself", "is seen by its node": "itself",
	"is seen by another node": "its node", "is seen by outside": "its node",
	"is seen by near2": "itself", "is seen by the Service of near2": "itself",
	"is seen by the Service of beside": "itself",
	"is seen by far2":                  "its node", "is seen by the Service of far2": "its node",
}

// unlike says what is different with addresses of pools.
var unlike = map[string]map[string]string{
	"plain": {},
	// Of the same node: portmap masquerades what is of one subnet only.
	"near": {"by its hostPort sees beside": "itself"},
	"far": {
		"by its hostPort sees beside": "itself",
		// Flannel masquerades what its network's pods send to anything else, and nothing of what others send.
		"sees away": "another node", "by its Service sees away": "another node",
		"is seen by another node": "itself", "is seen by outside": "itself", "is seen by far2": "itself",
		// To kube-proxy a source outside of the cluster CIDR is one from outside.
		"is seen by the Service of near2": "its node", "is seen by the Service of beside": "its node",
	},
}

// Beside flannel and kube-proxy the addresses of pools in flannel's network are seen as those of ordinary pods are.
func TestSourcesOfRoutedPods(t *testing.T) {
	for name, o := range networks {
		t.Run(name, func(t *testing.T) { sourcesOfRoutedPods(t, o) })
	}
}

func sourcesOfRoutedPods(t *testing.T, o lab.ClusterOptions) {
	c, ns := withFlannel(t, o)
	here, there := c.Nodes[0], c.Nodes[1]
	client := clients(t, c, ns)
	publish(t, c, ns, "plain", here.Name, nil, 7700)
	publish(t, c, ns, "other", here.Name, nil, 7705)
	publish(t, c, ns, "far", here.Name, pools("far"), 7701)
	publish(t, c, ns, "near", here.Name, pools("near"), 7702)
	publish(t, c, ns, "far2", there.Name, pools("far"), 7703)
	publish(t, c, ns, "near2", there.Name, pools("near"), 7704)
	outside := machine(t, c, "172.30.0.9")
	const outsideIP = "172.30.0.9"
	pods, dials := map[string]*corev1.Pod{}, map[string]dial{}
	own := map[string]netip.Addr{}
	in := func(name string, pod *corev1.Pod) {
		s, n := sandbox(t, c, pod), c.Node(pod.Spec.NodeName)
		l, err := n.ListenIn(t.Context(), s, "tcp", ":"+port)
		tells(t, l, err)
		pods[name], own[name] = pod, ip(t, pod)
		dials[name] = func(ctx context.Context, network, address string) (net.Conn, error) {
			return n.DialFrom(ctx, s, network, address)
		}
	}
	for _, name := range []string{"plain", "other", "far", "near", "far2", "near2"} {
		in(name, ready(t, c, ns, name))
	}
	in("beside", client[here.Name])
	in("away", client[there.Name])
	for name, n := range map[string]*lab.ClusterNode{"its node": here, "another node": there} {
		l, err := n.Listen(t.Context(), "tcp", ":"+port)
		tells(t, l, err)
		dials[name], own[name] = n.Dial, n.IP
	}
	l, err := outside.Listen(t.Context(), "tcp", ":"+port)
	tells(t, l, err)
	dials["outside"], own["outside"] = outside.Dial, netip.MustParseAddr(outsideIP)
	for _, to := range []string{"10.244.0.0/16", "10.50.0.0/16"} {
		must.Do(t, outside.SetRoute(netip.MustParsePrefix(to), here.IP))
	}

	service := func(name string) string {
		return kubectl(t, c, "get", "service", name, "-n", ns, "-o", "jsonpath={.spec.clusterIP}") + ":80"
	}
	at := func(name string) string { return net.JoinHostPort(own[name].String(), port) }
	nodes := map[netip.Addr]string{}
	for _, n := range c.Nodes {
		name := map[*lab.ClusterNode]string{here: "its node", there: "another node"}[n]
		nodes[n.IP] = name
		nodes[n.Pods.Addr().Next()], nodes[n.Pods.Addr()] = name, name // of its bridge, and of flannel.1
	}
	// sees asks until somebody answers: kube-proxy may be about to write its rules.
	sees := func(from, to string) string {
		var is netip.Addr
		var err error
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if lab.Until(ctx, "", func() (bool, error) {
			is, err = source(ctx, dials[from], to)
			return err == nil, err
		}) != nil {
			return "nobody"
		}
		switch {
		case pods[from] != nil && is == own[from], from == "outside" && is == own[from]:
			return "itself"
		case nodes[is] != "":
			return nodes[is]
		}
		return is.String()
	}

	got := map[string]string{}
	for _, pod := range []string{"plain", "far", "near"} {
		for _, peer := range []string{"beside", "away", "its node", "another node", "outside"} {
			got[pod+" sees "+peer] = sees(peer, at(pod))
			if peer != "outside" {
				got[pod+" by its Service sees "+peer] = sees(peer, service(pod))
			}
			got[pod+" by its hostPort sees "+peer] = sees(peer, net.JoinHostPort(here.IP.String(),
				map[string]string{"plain": "7700", "far": "7701", "near": "7702"}[pod]))
			got[pod+" is seen by "+peer] = sees(pod, at(peer))
		}
		got[pod+" by its Service sees itself"] = sees(pod, service(pod))
		for _, other := range []string{"far2", "near2"} {
			got[pod+" is seen by "+other] = sees(pod, at(other))
			got[pod+" is seen by the Service of "+other] = sees(pod, service(other))
		}
		got[pod+" is seen by the Service of beside"] = sees(pod, service("other"))
	}
	// A router may send what is for a pod to any node. The answers come from the pod's own.
	must.Do(t, outside.IgnoreRedirects())
	must.Do(t, outside.SetRoute(netip.MustParsePrefix("10.50.0.0/16"), there.IP))
	by := "nobody"
	if slices.Contains(o.ProxyArgs, liberal) {
		by = "itself"
	}
	if is := sees("outside", at("far")); is != by {
		t.Errorf("far is asked from outside by another node than its own, and sees %s, want %s", is, by)
	}

	for _, what := range slices.Sorted(maps.Keys(got)) {
		pod, does, _ := strings.Cut(what, " ")
		want, ok := unlike[pod][does]
		if !ok {
			want = ordinary[does]
		}
		t.Logf("%-45s %s", what, got[what])
		if got[what] != want {
			t.Errorf("%s: %s, want %s", what, got[what], want)
		}
	}
}

// While flanneld is killed, is away, is given another lease, or loses its device, pods go on, and move.
func TestRoutedAddressesOutliveFlanneld(t *testing.T) {
	for name, o := range networks {
		t.Run(name, func(t *testing.T) { outlivesFlanneld(t, o) })
	}
}

func outlivesFlanneld(t *testing.T, o lab.ClusterOptions) {
	c, ns := withFlannel(t, o)
	all := around{t, c, ns, machine(t, c, "172.30.0.9"), true}
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: pools("far"), Unprobed: true})
	pod := ready(t, c, ns, "web-0")
	all.reach(pod, "")
	load := askAlways(t, c, ns, "web-0", ip(t, pod), 50*time.Millisecond)
	move := func() {
		t.Helper()
		node := pod.Spec.NodeName
		kubectl(t, c, "drain", node, "--ignore-daemonsets", "--pod-selector=app=web", "--timeout=60s")
		was := pod
		if pod = successor(t, c, pod); pod.Status.PodIP != was.Status.PodIP || pod.Spec.NodeName == node {
			t.Fatalf("web-0 had %s on %s and has %s on %s", was.Status.PodIP, node, pod.Status.PodIP, pod.Spec.NodeName)
		}
		kubectl(t, c, "uncordon", node)
	}
	everywhere := func(do func(*lab.ClusterNode)) func() {
		return func() {
			for _, n := range c.Nodes {
				do(n)
			}
		}
	}
	kill := func(n *lab.ClusterNode) {
		if p := n.Flanneld.Process(); p != nil { // it comes back after a second
			must.Do(t, p.Kill())
		}
	}
	stop := func(n *lab.ClusterNode) { must.Do(t, n.Flanneld.Kill()) }
	start := func(n *lab.ClusterNode) { must.Do(t, n.Flanneld.Start(testContext(t))) }
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"flanneld is killed on each node", everywhere(kill)},
		{"the pod moves", move},
		{"flanneld is killed, and the pod moves", func() { everywhere(kill)(); move() }},
		{"the pod moves while there is no flanneld", func() { everywhere(stop)(); move(); everywhere(start)() }},
		{"the pod's node gets its lease again", func() {
			n := c.Node(pod.Spec.NodeName)
			must.Do(t, n.Lease(testContext(t)))
			start(n)
		}},
		{"all get their leases again, and the pod moves", func() {
			everywhere(func(n *lab.ClusterNode) { must.Do(t, n.Lease(testContext(t))) })()
			everywhere(start)()
			move()
		}},
		{"the devices go, and come back with flanneld", func() {
			everywhere(func(n *lab.ClusterNode) {
				inNode(t, n, "ip link del flannel.1") // vxlan has it
				kill(n)
			})()
		}},
		{"flannel's routes go, and come back with flanneld", func() {
			everywhere(func(n *lab.ClusterNode) {
				for _, to := range c.Nodes {
					if to != n {
						inNode(t, n, "ip route del "+to.Pods.String())
					}
				}
				kill(n)
			})()
		}},
		{"kube-proxy is killed, and the pod moves", func() {
			for _, n := range c.Nodes {
				if p := n.Proxy.Process(); p != nil {
					must.Do(t, p.Kill())
				}
			}
			move()
		}},
	} {
		load.longest()
		step.do()
		all.reach(pod, "")
		who, gap := load.longest()
		t.Logf("%-50s %v without an answer (%s)", step.name, gap.Round(10*time.Millisecond), who)
	}
	load.end(t)
}

func TestSixtyPodsLeaveANodeAtOnce(t *testing.T) {
	c, ns := withFlannel(t, networks["vxlan, nftables"])
	all := around{t, c, ns, machine(t, c, "172.30.0.9"), true}
	const sixty = 60
	for _, n := range c.Nodes[1:] {
		kubectl(t, c, "cordon", n.Name)
	}
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: sixty, Annotations: pools("far"), Unprobed: true})
	before := places(t, c, ns, "web", sixty, nil)
	for _, n := range c.Nodes[1:] {
		kubectl(t, c, "uncordon", n.Name)
	}
	left, began := c.Nodes[0], time.Now()
	kubectl(t, c, "drain", left.Name, "--ignore-daemonsets", "--pod-selector=app=web", "--timeout=110s")
	t.Logf("%d pods have left %s after %v", sixty, left.Name, time.Since(began).Round(time.Second))
	after := places(t, c, ns, "web", sixty, before)
	t.Logf("and are Ready elsewhere after %v", time.Since(began).Round(time.Second))
	keptAddresses(t, before, after)
	for name, pod := range after {
		if pod.Spec.NodeName == left.Name {
			t.Errorf("%s is on %s again", name, left.Name)
		}
		all.reach(pod, "")
	}
}

// All nodes are replaced one after the other, as an upgrade of nodes does: each is drained, its Node is deleted, and it
// is switched off; then there is a new one, with another name and another podCIDR.
func TestRoutedAddressesOutliveAllNodes(t *testing.T) {
	for name, o := range networks {
		t.Run(name, func(t *testing.T) { outlivesAllNodes(t, o) })
	}
}

func outlivesAllNodes(t *testing.T, o lab.ClusterOptions) {
	c, ns := withFlannel(t, o)
	outside := machine(t, c, "172.30.0.9")
	const each = 8
	both := []string{"far", "near"}
	for _, name := range both {
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: each, Annotations: pools(name), Unprobed: true})
	}
	all := func() map[string]*corev1.Pod {
		pods := map[string]*corev1.Pod{}
		for _, name := range both {
			maps.Copy(pods, places(t, c, ns, name, each, nil))
		}
		return pods
	}
	first := all()
	// Pods that start on a node before its agent have another address until that has them made again.
	kept := func() (pods map[string]*corev1.Pod) {
		until(t, "each pod to have its address", func(context.Context) bool {
			pods = all()
			for name, pod := range pods {
				if pod.Status.PodIP != first[name].Status.PodIP {
					return false
				}
			}
			return true
		})
		return pods
	}
	load := askAlways(t, c, ns, "far-0", ip(t, first["far-0"]), 50*time.Millisecond)
	var removed []*lab.ClusterNode
	for _, old := range slices.Clone(c.Nodes) {
		began := time.Now()
		kubectl(t, c, "drain", old.Name, "--ignore-daemonsets", "--timeout=110s")
		kubectl(t, c, "delete", "node", old.Name)
		must.Do(t, old.PowerLoss())
		must.Do(t, c.RemoveNode(testContext(t), old))
		removed = append(removed, old)
		all()
		t.Logf("%s is gone and its pods are Ready elsewhere after %v", old.Name, time.Since(began).Round(time.Second))
		kept()
		t.Logf("all have their addresses after %v", time.Since(began).Round(time.Second))
		fresh, err := c.AddNode(testContext(t))
		must.Do(t, err)
		t.Logf("%s is Ready after %v", fresh.Name, time.Since(began).Round(time.Second))
	}
	must.Do(t, c.WaitAgents(testContext(t)))
	until(t, "clients on the nodes that are there, and no others", func(ctx context.Context) bool {
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=client"})
		return err == nil && len(list.Items) == len(c.Nodes)+1 && !slices.ContainsFunc(list.Items, func(p corev1.Pod) bool {
			return !lab.Ready(&p) || c.Node(p.Spec.NodeName) == nil
		})
	})
	for _, n := range c.Nodes[:2] { // the last node is empty
		kubectl(t, c, "drain", n.Name, "--ignore-daemonsets", "--timeout=110s")
		kubectl(t, c, "uncordon", n.Name)
	}
	last := kept()
	load.end(t)

	served := map[netip.Addr]netip.Prefix{}
	on := map[string]int{}
	for _, pod := range last {
		n := c.Node(pod.Spec.NodeName)
		served[ip(t, pod)] = n.Pods
		on[n.Name]++
		must.Do(t, outside.SetRoute(netip.MustParsePrefix("10.244.200.0/24"), n.IP)) // reach routes the other pool
		around{t, c, ns, outside, true}.reach(pod, "")
	}
	t.Logf("pods by node: %v", on)
	for _, n := range append(slices.Clone(c.Nodes), c.ControlNode) {
		var wrong []string
		until(t, "routes of "+n.Name+" to be right", func(context.Context) bool {
			routes, err := n.Routes()
			must.Do(t, err)
			wrong = lab.Misrouted(routes, n.Pods, served)
			for _, r := range routes {
				for _, gone := range removed {
					if r.Gateway == gone.IP || gone.Pods.Contains(r.Gateway) || gone.Pods.Contains(r.To.Addr()) {
						wrong = append(wrong, fmt.Sprintf("%+v leads to %s", r, gone.Name))
					}
				}
			}
			return len(wrong) == 0
		})
	}
	events, err := c.Client().CoreV1().Events(ns).List(testContext(t), metav1.ListOptions{})
	must.Do(t, err)
	said := map[string]int{}
	for _, e := range events.Items {
		if e.InvolvedObject.Kind == "Pod" && !strings.HasPrefix(e.InvolvedObject.Name, "client-") {
			said[e.Reason]++
		}
	}
	t.Logf("%d pods started on a node before its agent did, and were made again there; %d waited 5 s for their address",
		said["SandboxChanged"], said["WaitingForAddress"])
}
