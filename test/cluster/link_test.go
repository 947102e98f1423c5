package cluster

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func macOf(t *testing.T, m *lab.Machine) string {
	t.Helper()
	mac, err := m.MAC()
	must.Do(t, err)
	return mac
}

func TestAnAddressThatAnotherMachineHasIsGivenToNobody(t *testing.T) {
	c := ownPools(t)
	ns := namespace(t, c)
	taken := []string{"10.6.168.101", "10.6.168.102", "10.6.168.103", "10.6.168.104"}
	foreign := machine(t, c, taken...)
	mac := macOf(t, foreign)

	// 1. New addresses: neither pod starts, and people are told. They take them out of the pool and make the pods again.
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: pools("blue"), Unprobed: true})
	conflicts := map[string]string{} // the address of a pod
	until(t, "both conflicts", func(context.Context) bool {
		for name, ip := range podIPs(t, c) {
			if ip.Status.Conflict == mac {
				conflicts[ip.Spec.PodName] = name
			}
		}
		return len(conflicts) == 2
	})
	const first = "web-0"
	for name, conflict := range conflicts {
		if !slices.Contains(taken, conflict) {
			t.Errorf("%s of %s is said to be another machine's", conflict, name)
		}
		saysOf(t, c, ns, "Pod", name, "IPConflict", conflict, mac)
	}
	kubectl(t, c, "patch", "podippool", "blue", "--type=merge", "-p",
		`{"spec": {"excludedAddresses": ["10.6.168.101-10.6.168.104"]}}`)
	for _, conflict := range conflicts {
		kubectl(t, c, "delete", "podip", conflict, "--wait=false")
	}
	deletePods(t, c, ns, "web")
	var pods map[string]*corev1.Pod
	until(t, "both pods to be Ready with other addresses", func(ctx context.Context) bool {
		pods = map[string]*corev1.Pod{}
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false
		}
		for i := range list.Items {
			pod := &list.Items[i]
			if lab.Ready(pod) && pod.DeletionTimestamp == nil && !slices.Contains(taken, pod.Status.PodIP) {
				pods[pod.Name] = pod
			}
		}
		return len(pods) == 2
	})
	holdTheirAddresses(t, c, pods)
	for _, addr := range taken {
		if at := holders(t, c, addr); len(at) > 0 {
			t.Errorf("%s is at %v", addr, at)
		}
		if said := foreign.Heard(netip.MustParseAddr(addr), time.Time{}); len(said) > 0 {
			t.Errorf("that they have %s said %v", addr, said)
		}
	}

	// 2. One that the pod had before: it waits until the other machine has gone.
	was := pods[first]
	must.Do(t, foreign.SetAddrs(prefixes(append(taken, was.Status.PodIP))...))
	kubectl(t, c, "cordon", was.Spec.NodeName)
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), first, metav1.DeleteOptions{}))
	saysOf(t, c, ns, "Pod", first, "IPConflict", was.Status.PodIP, mac)
	until(t, "the PodIP to say so", func(context.Context) bool {
		return podIPs(t, c)[was.Status.PodIP].Status.Conflict == mac
	})
	waits := getPod(t, c, ns, first)
	if ip := podIPs(t, c)[was.Status.PodIP]; ip.Spec.PodUID != string(waits.UID) ||
		ip.Status.NodeName != waits.Spec.NodeName {
		t.Errorf("%+v", ip)
	}
	must.Do(t, foreign.SetAddrs())
	is := ready(t, c, ns, first)
	if is.UID != waits.UID || is.Status.PodIP != was.Status.PodIP || is.Spec.NodeName == was.Spec.NodeName {
		t.Errorf("%s was %s with %s on %s and is %s with %s on %s", first, waits.UID, was.Status.PodIP, was.Spec.NodeName,
			is.UID, is.Status.PodIP, is.Spec.NodeName)
	}
	holdTheirAddresses(t, c, map[string]*corev1.Pod{first: is})
	if ip := podIPs(t, c)[was.Status.PodIP]; ip.Status.Conflict != "" {
		t.Errorf("%+v", ip.Status)
	}
}

// The link is that of all nodes, whatever connects their pods to it: macvlan on the first node, and on the others a
// bridge that has the node's own link as a port.
func TestNeighboursOfAPodThatMovesLearnItsNewPlaceAtOnce(t *testing.T) {
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	for _, n := range c.Nodes[1:] {
		bridge := bridgeUplink(t, n)
		must.Do(t, n.SetNetworks(testContext(t), lab.Network{Bridge: bridge, Annotations: true,
			IPAM: lab.RangeIPAM("host-local", n.Pods.String())}))
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	ns := namespace(t, c)
	third := machine(t, c, "10.6.0.9")
	apply(t, c, ns, pool)
	cordoned := map[string]bool{}
	only := func(node string) {
		t.Helper()
		for _, n := range c.Nodes {
			if is := n.Name != node; is != cordoned[n.Name] {
				kubectl(t, c, map[bool]string{true: "cordon", false: "uncordon"}[is], n.Name)
				cordoned[n.Name] = is
			}
		}
	}
	only(c.Nodes[1].Name)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: pools("blue"), Unprobed: true})
	pod := ready(t, c, ns, "web-0")
	addr := ip(t, pod)
	for _, to := range []int{2, 1, 0, 2} { // from bridge to bridge and back, to macvlan, and to a bridge
		old := knows(t, third, addr)
		only(c.Nodes[to].Name)
		must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-0", metav1.DeleteOptions{}))
		is := successor(t, c, pod)
		if ip(t, is) != addr || is.Spec.NodeName != c.Nodes[to].Name {
			t.Fatalf("the successor has %v on %s", is.Status.PodIP, is.Spec.NodeName)
		}
		// It has asked nobody since. What it knows, the new pod has told it.
		mac, err := third.Neighbour(addr)
		if must.Do(t, err); mac == old || mac == "" {
			t.Errorf("the pod is Ready on %s, and its neighbour knows it as %q; before as %q", is.Spec.NodeName, mac, old)
		}
		said := third.Heard(addr, time.Time{})
		if i := slices.Index(said, mac); i < 0 || i != len(said)-1 {
			t.Errorf("said by %v, known as %s", said, mac)
		}
		ctx, cancel := context.WithTimeout(testContext(t), patience)
		answer, err := third.Get(ctx, addr)
		cancel()
		if must.Do(t, err); answer.Name != "web-0" {
			t.Errorf("%s answers", answer.Name)
		}
		holdTheirAddresses(t, c, map[string]*corev1.Pod{"web-0": is})
		pod = is
	}
}

// bridgeUplink makes the node's link the port of a bridge, which has the node's address from now on, and returns the
// bridge. Pods on the bridge are on the nodes' link.
func bridgeUplink(t *testing.T, n *lab.ClusterNode) (bridge string) {
	t.Helper()
	_, err := n.Run(testContext(t), "/bin/sh", "-ec", `PATH=/sbin:/usr/sbin:$PATH; up=`+lab.Uplink+`
routes=$(ip -o route show dev $up | grep via)
ip link add link0 type bridge
ip link set link0 address $(cat /sys/class/net/$up/address)
ip addr flush dev $up
ip link set $up master link0
ip link set link0 up
ip addr add `+n.IP.String()+`/24 dev link0
echo "$routes" | while read route; do ip route add $route dev link0; done`)
	must.Do(t, err)
	return "link0"
}
