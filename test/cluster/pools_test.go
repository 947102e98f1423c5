package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

var poolsOn = map[string]any{"pools": map[string]any{"enabled": true}}

// withPools returns the cluster of tests of pools, whose pods are on the nodes' own link, by macvlan. They run one
// after the other, in any order. A test restores what it breaks; its pods and pool blue are deleted when it ends.
func withPools(t *testing.T) *lab.Cluster {
	t.Helper()
	inTurn(t)
	c := pooled.get(t, "with pools", func() (*lab.Cluster, error) {
		return startProduct(lab.ClusterOptions{}, lab.InstallOptions{Values: poolsOn}, byMacvlan)
	})
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Kubectl(ctx, "", "delete", "podippool", "blue", "--ignore-not-found")
		must.Do(t, err)
	})
	return c
}

// ownPools is withPools for one test alone.
func ownPools(t *testing.T) *lab.Cluster {
	t.Helper()
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	return c
}

// onOneLink starts a cluster in which the nodes' pods are on the nodes' own link.
func onOneLink(t *testing.T, o lab.ClusterOptions) *lab.Cluster {
	t.Helper()
	c := ownCluster(t, &o)
	must.Do(t, byMacvlan(testContext(t), c))
	return c
}

func byMacvlan(ctx context.Context, c *lab.Cluster) error {
	for _, n := range c.Nodes {
		err := n.SetNetworks(ctx, lab.Network{
			Type: "macvlan", Annotations: true, IPAM: lab.RangeIPAM("host-local", n.Pods.String()),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

const pool = `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue}
spec:
  mode: L2
  subnet: 10.6.0.0/16
  addresses: [10.6.168.101-10.6.168.110]
`

// podIPs returns the PodIPs by name.
func podIPs(t *testing.T, c *lab.Cluster) map[string]v1alpha1.PodIP {
	t.Helper()
	var list v1alpha1.PodIPList
	must.Do(t, typed(t, c).List(testContext(t), &list))
	all := map[string]v1alpha1.PodIP{}
	for _, ip := range list.Items {
		all[ip.Name] = ip
	}
	return all
}

// holders returns where in the cluster an address is configured: node and network namespace.
func holders(t *testing.T, c *lab.Cluster, addr string) []string {
	t.Helper()
	return holdersAmong(t, c.Nodes, addr)
}

func holdersAmong(t *testing.T, nodes []*lab.ClusterNode, addr string) (all []string) {
	t.Helper()
	for _, n := range nodes {
		out, err := n.Run(testContext(t), "/bin/sh", "-c", "for ns in /run/netns/*; do "+
			"nsenter --net=$ns grep -q -- '|-- "+addr+"$' /proc/self/net/fib_trie && echo $ns; done; true")
		must.Do(t, err)
		for ns := range strings.FieldsSeq(string(out)) {
			all = append(all, n.Name+" "+ns)
		}
	}
	return all
}

// holdTheirAddresses checks that pods have addresses of the pool, that the cluster knows them, and that nobody else has
// one.
func holdTheirAddresses(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	unique(t, c)
	for name, pod := range pods {
		addr := pod.Status.PodIP
		if !strings.HasPrefix(addr, "10.6.168.1") {
			t.Errorf("%s has %s", name, addr)
		}
		until(t, "the PodIP of "+name+" to be bound", func(context.Context) bool {
			ip := podIPs(t, c)[addr]
			return ip.Spec.PodUID == string(pod.UID) && ip.Status.Phase == v1alpha1.PodIPBound &&
				ip.Status.NodeName == pod.Spec.NodeName && ip.Status.PodUID == string(pod.UID)
		})
		if at := holders(t, c, addr); len(at) != 1 || !strings.HasPrefix(at[0], pod.Spec.NodeName+" ") {
			t.Errorf("%s of %s on %s is configured at %v", addr, name, pod.Spec.NodeName, at)
		}
	}
}

func addressesOf(pods map[string]*corev1.Pod) map[string]string {
	all := map[string]string{}
	for name, pod := range pods {
		all[name] = pod.Status.PodIP
	}
	return all
}

func keptAddresses(t *testing.T, was, is map[string]*corev1.Pod) {
	t.Helper()
	for name, addr := range addressesOf(was) {
		if got := addressesOf(is)[name]; got != addr {
			t.Errorf("%s had %s and has %s", name, addr, got)
		}
	}
}

func TestAnAddressOfAPoolStaysWithItsPodOnAnyNode(t *testing.T) {
	c := withPools(t)
	ns := namespace(t, c)
	installation := func() string {
		return kubectl(t, c, "get", "configmap", "stayput-installation", "-n", lab.SystemNamespace, "-o",
			`jsonpath={.metadata.annotations.stayput\.io/pools}`)
	}

	// 1. A pool, and two pods with its addresses, which reach each other.
	apply(t, c, ns, pool)
	until(t, "the agents to be told", func(context.Context) bool { return strings.Contains(installation(), `"subnets"`) })
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: pools("blue"), Unprobed: true})
	pods := places(t, c, ns, "web", 2, nil)
	holdTheirAddresses(t, c, pods)
	reaches(t, c, pods["web-0"], pods["web-1"])

	// 2. They keep them when all are deleted, wherever they start.
	for range 2 {
		deletePods(t, c, ns, "web")
		after := places(t, c, ns, "web", 2, pods)
		keptAddresses(t, pods, after)
		holdTheirAddresses(t, c, after)
		pods = after
	}

	// 3. And on another node.
	from := pods["web-0"].Spec.NodeName
	kubectl(t, c, "cordon", from)
	deletePods(t, c, ns, "web")
	after := places(t, c, ns, "web", 2, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	if after["web-0"].Spec.NodeName == from {
		t.Errorf("web-0 is on the cordoned %s", from)
	}
	reaches(t, c, after["web-0"], after["web-1"])
	kubectl(t, c, "uncordon", from)
	pods = after

	// 4. The controllers are killed while they move.
	deletePods(t, c, ns, "web")
	for i := range 2 {
		must.Do(t, c.Controllers.KillOne(testContext(t), i))
	}
	after = places(t, c, ns, "web", 2, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	pods = after

	// 5. An agent is away while its pod ends: the successor waits for its word, and has the address then.
	node := c.Node(pods["web-0"].Spec.NodeName)
	must.Do(t, node.Agent.Stop(testContext(t)))
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-0", metav1.DeleteOptions{}))
	until(t, "the successor to wait", func(ctx context.Context) bool {
		pod, err := c.Client().CoreV1().Pods(ns).Get(ctx, "web-0", metav1.GetOptions{})
		return err == nil && pod.UID != pods["web-0"].UID && isGated(pod)
	})
	must.Do(t, node.Agent.Start(testContext(t)))
	after = places(t, c, ns, "web", 2, map[string]*corev1.Pod{"web-0": pods["web-0"]})
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	pods = after

	// 6. Scaled down, the last one's is free; up again, all have one.
	kubectl(t, c, "scale", "statefulset", "web", "-n", ns, "--replicas=1")
	until(t, "the address of web-1 to be free", func(context.Context) bool {
		_, is := podIPs(t, c)[pods["web-1"].Status.PodIP]
		return !is
	})
	kubectl(t, c, "scale", "statefulset", "web", "-n", ns, "--replicas=3")
	pods = places(t, c, ns, "web", 3, nil)
	holdTheirAddresses(t, c, pods)

	// 7. With workload and pool gone, nothing is left.
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	kubectl(t, c, "delete", "podippool", "blue", "--wait=false")
	until(t, "the pool to go", func(ctx context.Context) bool {
		_, err := c.Kubectl(ctx, "", "get", "podippool", "blue")
		return err != nil && strings.Contains(err.Error(), "NotFound")
	})
	if left := podIPs(t, c); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	until(t, "the agents to be told", func(context.Context) bool { return installation() == "" })
	for _, pod := range pods {
		until(t, pod.Name+" to go", func(ctx context.Context) bool {
			_, err := c.Client().CoreV1().Pods(ns).Get(ctx, pod.Name, metav1.GetOptions{})
			return apierrors.IsNotFound(err)
		})
		if at := holders(t, c, pod.Status.PodIP); len(at) > 0 {
			t.Errorf("%s of %s is still at %v", pod.Status.PodIP, pod.Name, at)
		}
	}
	for _, n := range c.Nodes {
		out, err := n.Run(testContext(t), "/bin/sh", "-c", "ls /var/lib/cni/networks/pods")
		must.Do(t, err)
		if strings.Contains(string(out), "10.6.") {
			t.Errorf("%s still has %s", n.Name, out)
		}
	}
}

// What Spiderpool's manual types (docs/usage/statefulset.md), but for the image.
const (
	spidersPool = `
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderIPPool
metadata:
  name: test-ippool
spec:
  subnet: 10.6.0.0/16
  ips:
    - 10.6.168.101-10.6.168.110
`
	spidersSet = `
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: test-sts
spec:
  replicas: 2
  selector:
    matchLabels:
      app: test-sts
  template:
    metadata:
      annotations:
        ipam.spidernet.io/ippool: |-
            {      
              "ipv4": ["test-ippool"]
            }
        v1.multus-cni.io/default-network: kube-system/macvlan-ens192
      labels:
        app: test-sts
    spec:
      containers:
        - name: test-sts
          image: nginx
          imagePullPolicy: IfNotPresent
`
)

func TestTheManualOfSpiderpoolsStatefulSet(t *testing.T) {
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{
		Values: map[string]any{"pools": map[string]any{"enabled": true, "spiderpool": true}},
	}))
	ns := namespace(t, c)
	counts := func(allocated, total string) {
		t.Helper()
		want := []string{"test-ippool", "10.6.0.0/16", allocated, total, "false"}
		until(t, fmt.Sprintf("kubectl get spiderippool to print %q", want), func(context.Context) bool {
			head, line, _ := strings.Cut(kubectl(t, c, "get", "spiderippool"), "\n")
			return strings.HasPrefix(head, "NAME") && slices.Equal(strings.Fields(line), want)
		})
	}
	deleteAll := func() {
		t.Helper()
		names := strings.Fields(kubectl(t, c, "get", "pod", "-n", ns, "-l", "app=test-sts", "-o", "name"))
		kubectl(t, c, append([]string{"delete", "-n", ns}, names...)...)
	}

	apply(t, c, ns, spidersPool)
	apply(t, c, ns, strings.Replace(spidersSet, "nginx", lab.WebImage, 1))
	pods := places(t, c, ns, "test-sts", 2, nil)
	holdTheirAddresses(t, c, pods)
	counts("2", "10")

	// All are deleted, and have their addresses again; also on other nodes.
	nodes := map[string]bool{}
	for _, pod := range pods {
		nodes[pod.Spec.NodeName] = true
	}
	for node := range nodes {
		kubectl(t, c, "cordon", node)
	}
	deleteAll()
	after := places(t, c, ns, "test-sts", 2, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	for name, pod := range after {
		if nodes[pod.Spec.NodeName] {
			t.Errorf("%s is on the cordoned %s", name, pod.Spec.NodeName)
		}
	}
	for node := range nodes {
		kubectl(t, c, "uncordon", node)
	}

	// Scaled up, all are deleted again.
	kubectl(t, c, "scale", "statefulset", "test-sts", "-n", ns, "--replicas", "3")
	pods = places(t, c, ns, "test-sts", 3, nil)
	keptAddresses(t, after, pods)
	counts("3", "10")
	deleteAll()
	after = places(t, c, ns, "test-sts", 3, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)

	// Scaled down, the last one's is free.
	kubectl(t, c, "scale", "sts", "test-sts", "-n", ns, "--replicas", "2")
	counts("2", "10")
	pods = places(t, c, ns, "test-sts", 2, nil)
	delete(after, "test-sts-2")
	keptAddresses(t, after, pods)

	// With the StatefulSet go its addresses, and the pool.
	kubectl(t, c, "delete", "statefulset", "test-sts", "-n", ns)
	counts("0", "10")
	if left := podIPs(t, c); len(left) > 0 {
		t.Errorf("left are %v", left)
	}

	// Another pod gets nothing while its words cannot be read.
	apply(t, c, ns, strings.NewReplacer("nginx", lab.WebImage, `["test-ippool"]`, `["test-*"]`,
		"replicas: 2", "replicas: 1").Replace(spidersSet))
	saysOf(t, c, ns, "Pod", "test-sts-0", "InvalidAnnotation", `wildcards such as "test-*" are not supported`)
	if pod := getPod(t, c, ns, "test-sts-0"); !isGated(pod) {
		t.Errorf("it does not wait: %+v", pod.Spec)
	}
	kubectl(t, c, "delete", "statefulset", "test-sts", "-n", ns)
	kubectl(t, c, "delete", "spiderippool", "test-ippool", "--timeout=60s")
}

// spiderIPPoolCRD is the part of Spiderpool's definition that an import reads.
const spiderIPPoolCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: spiderippools.spiderpool.spidernet.io}
spec:
  group: spiderpool.spidernet.io
  scope: Cluster
  names: {plural: spiderippools, kind: SpiderIPPool}
  versions:
  - name: v2beta1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

// Pods that run with addresses of Spiderpool, for which the lab has host-local, are taken over into pools: they run on,
// and have the same addresses when they are made again, on other nodes.
func TestPodsOfSpiderpoolMoveToPools(t *testing.T) {
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	ns := namespace(t, c)
	networks := func(ipam func(i int) map[string]any) {
		t.Helper()
		for i, n := range c.Nodes {
			must.Do(t, n.SetNetworks(testContext(t), lab.Network{Type: "macvlan", Annotations: true, IPAM: ipam(i)}))
		}
	}
	networks(func(i int) map[string]any {
		return map[string]any{"type": "host-local", "dataDir": "/var/lib/spiders", "ranges": []any{[]any{map[string]any{
			"subnet": "10.6.0.0/16", "rangeStart": fmt.Sprintf("10.6.168.%d", 101+3*i),
			"rangeEnd": fmt.Sprintf("10.6.168.%d", 103+3*i)}}}}
	})
	apply(t, c, ns, strings.Replace(spidersSet, "nginx", lab.WebImage, 1))
	pods := places(t, c, ns, "test-sts", 2, nil)
	apply(t, c, ns, spiderIPPoolCRD+"---"+spiderEndpointCRD)
	must.Do(t, c.WaitForCRDs(testContext(t)))
	apply(t, c, ns, spidersPool)
	for name, pod := range pods {
		apply(t, c, ns, fmt.Sprintf(`
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderEndpoint
metadata: {name: %s}
status:
  ownerControllerType: StatefulSet
  ownerControllerName: test-sts
  current:
    uid: %s
    node: %s
    ips: [{interface: eth0, ipv4: %s/16, ipv4Pool: test-ippool}]
`, name, pod.UID, pod.Spec.NodeName, pod.Status.PodIP))
	}

	// Their networks become Stayput's, their addresses those of pools; then their words count.
	networks(func(int) map[string]any { return map[string]any{"type": "stayput", "pools": []any{}} })
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	works(t, c, ns, "import", "spiderpool", "--pools", "--dry-run=client")
	if all := podIPs(t, c); len(all) > 0 {
		t.Errorf("a plan has made %v", all)
	}
	works(t, c, ns, "import", "spiderpool", "--pools", "--yes")
	for name, pod := range pods {
		if ip := podIPs(t, c)[pod.Status.PodIP]; !ip.Spec.Adopted || ip.Spec.PodUID != string(pod.UID) {
			t.Errorf("the PodIP of %s is %+v", name, ip.Spec)
		}
	}
	kubectl(t, c, "apply", "-f", "../../deploy/pools-spiderpool.yaml")
	holdTheirAddresses(t, c, pods)
	for name, pod := range pods {
		until(t, name+" to be told its address", func(context.Context) bool {
			is := getPod(t, c, ns, name)
			return is.UID == pod.UID && strings.Contains(is.Annotations[v1alpha1.AnnotationAddresses], pod.Status.PodIP+"/16")
		})
	}

	// Made again, they have them on other nodes.
	nodes := map[string]bool{}
	for _, pod := range pods {
		nodes[pod.Spec.NodeName] = true
	}
	for node := range nodes {
		kubectl(t, c, "cordon", node)
	}
	deletePods(t, c, ns, "test-sts")
	after := places(t, c, ns, "test-sts", 2, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	for name, ip := range podIPs(t, c) {
		if ip.Spec.Adopted {
			t.Errorf("PodIP %s is still adopted: %+v", name, ip.Spec)
		}
	}
}

// broken breaks something until the returned function is called, or the test ends.
func broken(t *testing.T, set func(ctx context.Context, broken bool) error) (mend func()) {
	t.Helper()
	do := func(broken bool) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		must.Do(t, set(ctx, broken))
	}
	do(true)
	mend = once(func() { do(false) })
	t.Cleanup(mend)
	return mend
}

// cutOff keeps a node from the control plane, and from nobody else, until the returned function is called. Without a
// route nothing is sent; without the filter, kubelet would still hear that its pods are deleted.
func cutOff(t *testing.T, n *lab.ClusterNode) (mend func()) {
	t.Helper()
	before, err := n.Run(testContext(t), "/bin/cat", "/proc/sys/net/ipv4/conf/all/rp_filter")
	must.Do(t, err)
	return broken(t, func(ctx context.Context, broken bool) error {
		verb, filter := "del", strings.TrimSpace(string(before))
		if broken {
			verb, filter = "add", "1"
		}
		_, err := n.Run(ctx, "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; for a in 172.30.0.1 10.96.0.1; do "+
			"ip route "+verb+" blackhole $a/32 || exit 1; done; "+
			"echo "+filter+" > /proc/sys/net/ipv4/conf/all/rp_filter && ip route flush cache")
		return err
	})
}

func TestAnAddressOfAPoolIsNeverDoubled(t *testing.T) {
	c := withPools(t)
	ns := namespace(t, c)
	witness := machine(t, c, "10.6.0.9")
	var all []netip.Addr
	for n := 101; n <= 110; n++ {
		all = append(all, netip.AddrFrom4([4]byte{10, 6, 168, byte(n)}))
	}
	witness.Asks(all...)
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: pools("blue"), Unprobed: true})
	pods := places(t, c, ns, "web", 2, nil)
	holdTheirAddresses(t, c, pods)

	// 1. The node is cut off and the pod deleted by force: the successor waits, though nobody hears of the old one.
	lost := c.Node(pods["web-0"].Spec.NodeName)
	addr := pods["web-0"].Status.PodIP
	mend := cutOff(t, lost)
	must.Do(t, c.WaitNotReady(testContext(t), lost))
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns, "--force", "--grace-period=0")
	saysOf(t, c, ns, "Pod", "web-0", "WaitingForAddress", "node "+lost.Name, "out-of-service")
	if pod := getPod(t, c, ns, "web-0"); !isGated(pod) || pod.UID == pods["web-0"].UID {
		t.Errorf("the successor does not wait: %+v", pod.Spec)
	}
	if at := holders(t, c, addr); len(at) != 1 || !strings.HasPrefix(at[0], lost.Name+" ") {
		t.Errorf("%s is configured at %v", addr, at)
	}

	// 2. By the word of the operator it moves. That was not true: the old pod still answers on the link, so that the new
	// one does not start before the node is back, and has seen to it.
	kubectl(t, c, "taint", "node", lost.Name, "node.kubernetes.io/out-of-service=:NoExecute")
	heard := witness.Heard(ip(t, pods["web-0"]), time.Time{})
	saysOf(t, c, ns, "Pod", "web-0", "IPConflict", addr, heard[len(heard)-1])
	if at := holders(t, c, addr); len(at) != 1 || !strings.HasPrefix(at[0], lost.Name+" ") {
		t.Errorf("%s is configured at %v", addr, at)
	}
	kubectl(t, c, "taint", "node", lost.Name, "node.kubernetes.io/out-of-service-")
	mend()
	moved := successor(t, c, pods["web-0"])
	if moved.Status.PodIP != addr || moved.Spec.NodeName == lost.Name {
		t.Errorf("the successor has %s on %s", moved.Status.PodIP, moved.Spec.NodeName)
	}
	until(t, "the old pod to be taken down", func(context.Context) bool {
		at := holders(t, c, addr)
		return len(at) == 1 && strings.HasPrefix(at[0], moved.Spec.NodeName+" ")
	})
	must.Do(t, c.WaitReady(testContext(t), lost))
	pods = places(t, c, ns, "web", 2, nil)
	holdTheirAddresses(t, c, pods)

	// 3. A backup of before all pods were made again is restored.
	backup := t.TempDir() + "/etcd.db"
	must.Do(t, c.SaveEtcd(testContext(t), backup))
	deletePods(t, c, ns, "web")
	after := places(t, c, ns, "web", 2, pods)
	keptAddresses(t, pods, after)
	kubectl(t, c, "scale", "statefulset", "web", "-n", ns, "--replicas=4")
	places(t, c, ns, "web", 4, nil)
	must.Do(t, c.APIServer.Kill())
	must.Do(t, c.RestoreEtcd(testContext(t), backup, "--bump-revision=1000000000", "--mark-compacted"))
	until(t, "every address to be at one place", func(ctx context.Context) bool {
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false
		}
		for i := range list.Items {
			pod := &list.Items[i]
			if pod.UID == pods[pod.Name].UID || !lab.Ready(pod) { // what the backup has, has ended
				return false
			}
		}
		return len(list.Items) == 2
	})
	pods = places(t, c, ns, "web", 2, nil)
	holdTheirAddresses(t, c, pods)
	for name, ip := range podIPs(t, c) {
		if ip.Spec.Quarantine != nil || ip.Spec.PodName != "web-0" && ip.Spec.PodName != "web-1" {
			t.Errorf("PodIP %s: %+v", name, ip.Spec)
		}
	}
	for _, addr := range all {
		if at := holders(t, c, addr.String()); len(at) > 1 {
			t.Errorf("%s is configured at %v", addr, at)
		}
	}

	// 4. So says a third machine, which has asked all the time: whoever answered for an address never did again once
	// another one had.
	for _, addr := range all {
		said := witness.Heard(addr, time.Time{})
		if slices.Sort(said); len(slices.Compact(slices.Clone(said))) != len(said) {
			t.Errorf("%s was that of %v", addr, witness.Heard(addr, time.Time{}))
		}
	}
}

func TestPodsOfPoolsStartWithoutTheGateAndAfterAReboot(t *testing.T) {
	c := withPools(t)
	ns := namespace(t, c)
	apply(t, c, ns, pool)
	list := func(app string) map[string]*corev1.Pod {
		pods := map[string]*corev1.Pod{}
		all, err := c.Client().CoreV1().Pods(ns).List(testContext(t), metav1.ListOptions{LabelSelector: "app=" + app})
		must.Do(t, err)
		for i := range all.Items {
			if pod := &all.Items[i]; pod.DeletionTimestamp == nil {
				pods[pod.Name] = pod
			}
		}
		return pods
	}

	// 1. No gate is on the pods of a DaemonSet: they get their addresses once they are bound.
	deploy(t, c, ns, lab.Workload{Kind: "DaemonSet", Name: "each", Annotations: pools("blue"), Unprobed: true})
	until(t, "three pods of the DaemonSet", func(context.Context) bool {
		pods := list("each")
		for _, pod := range pods {
			if !lab.Ready(pod) {
				return false
			}
		}
		return len(pods) == 3
	})
	each := list("each")
	holdTheirAddresses(t, c, each)

	// 2. A pod starts on a node whose agent is away. It has its address once the agent has seen it.
	node := c.Nodes[0]
	must.Do(t, node.Agent.Stop(testContext(t)))
	deploy(t, c, ns, lab.Workload{Kind: "Pod", Name: "late", Annotations: pools("blue"), Node: node.Name, Unprobed: true})
	until(t, "the pod to be bound", func(context.Context) bool {
		pod := getPod(t, c, ns, "late")
		return pod.Spec.NodeName == node.Name && pod.Annotations[v1alpha1.AnnotationAddresses] != ""
	})
	saysOf(t, c, ns, "Pod", "late", "FailedCreatePodSandBox")
	must.Do(t, node.Agent.Start(testContext(t)))
	late := ready(t, c, ns, "late")
	holdTheirAddresses(t, c, map[string]*corev1.Pod{"late": late})

	// 3. containerd is killed, and a pod is deleted before it is back.
	must.Do(t, node.KillContainerd())
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "late", metav1.DeleteOptions{}))
	must.Do(t, node.StartContainerd(testContext(t)))
	until(t, "the address to be free", func(context.Context) bool {
		_, is := podIPs(t, c)[late.Status.PodIP]
		return !is
	})
	if at := holders(t, c, late.Status.PodIP); len(at) > 0 {
		t.Errorf("%s is free, and configured at %v", late.Status.PodIP, at)
	}

	// 4. The node reboots: its pods start again, with their addresses.
	must.Do(t, node.Reboot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), node))
	for name, was := range each {
		until(t, name+" to run again", func(context.Context) bool {
			pod := list("each")[name]
			return pod != nil && lab.Ready(pod) && pod.Status.PodIP == was.Status.PodIP &&
				len(holders(t, c, was.Status.PodIP)) == 1
		})
	}
	holdTheirAddresses(t, c, list("each"))
	kubectl(t, c, "delete", "daemonset", "each", "-n", ns)
	until(t, "all addresses to be free", func(context.Context) bool { return len(podIPs(t, c)) == 0 })
}

func TestKubectlStayputKnowsAddressesOfPools(t *testing.T) {
	c := ownPools(t)
	ns := namespace(t, c)
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 2, Annotations: retain("1h", "stayput.io/pools", "blue"), Unprobed: true,
	})
	pods := places(t, c, ns, "web", 2, nil)
	holdTheirAddresses(t, c, pods)
	addr, node := pods["web-0"].Status.PodIP, pods["web-0"].Spec.NodeName
	says := func(what, text string, all ...string) {
		t.Helper()
		for _, want := range all {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not say %q:\n%s", what, want, text)
			}
		}
	}
	says("get", works(t, c, ns, "get"), addr, node, "Bound", "of pool blue, 1h0m0s after the pod stops")
	says("get by name", works(t, c, ns, "get", "pip/"+addr, "-o", "name"), "podip.stayput.io/"+addr)
	says("why", works(t, c, ns, "why", "web-0"), "stayput.io/pools: blue",
		addr+" of pool blue is its own on whichever node", "PodIP "+addr+": Bound", "Node: any that its pools are for",
		"IP: "+addr+" of pool blue")
	says("node", works(t, c, ns, "node", node), "Addresses of pools", addr, ns+"/web-0")
	says("check", works(t, c, ns, "check", "--verbose"), "all admission policies are in place",
		"pools: 1 pool, 2 of 10 addresses in use or kept")

	if s := stayput(t, c, ns, "release", "web-0", "--yes"); s.code == 0 || !strings.Contains(s.err, "the address is in use") {
		t.Errorf("release of a bound address: %+v", s)
	}
	kubectl(t, c, "scale", "statefulset", "web", "-n", ns, "--replicas=1")
	other := pods["web-1"].Status.PodIP
	until(t, "the address of web-1 to be retained until then", func(context.Context) bool {
		return podIPs(t, c)[other].Status.Expires != ""
	})
	says("why of a pod that is gone", works(t, c, ns, "why", "web-1"), other+" of pool blue is kept until")
	says("release", works(t, c, ns, "release", "web-1", "--yes"), "podip.stayput.io/"+other+" released: "+other+" of pool blue")
	if _, is := podIPs(t, c)[other]; is {
		t.Errorf("%s is released and still there", other)
	}

	// More pods than addresses: the pool says so, and check and why say it.
	kubectl(t, c, "scale", "statefulset", "web", "-n", ns, "--replicas=11")
	until(t, "a pod to wait", func(context.Context) bool {
		return strings.Contains(stayput(t, c, ns, "check").out, "1 pod waits for an address")
	})
	waits := ""
	for i := range 11 {
		name := fmt.Sprintf("web-%d", i)
		pod, err := c.Client().CoreV1().Pods(ns).Get(testContext(t), name, metav1.GetOptions{})
		if err == nil && isGated(pod) {
			waits = name
		}
	}
	// That it waits is an Event only after a while: most pods do not wait for long.
	until(t, "why to say that a pod waits", func(context.Context) bool {
		return strings.Contains(works(t, c, ns, "why", waits), "the pod waits for an address")
	})
	says("why of a pod that waits", works(t, c, ns, "why", waits),
		"it asks for addresses of pools (blue), and none is its own")
}

// held returns the PodIPs and pools that have a finalizer.
func held(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	return kubectl(t, c, "get", "podips,podippools", "-o",
		`jsonpath={range .items[?(@.metadata.finalizers)]}{.kind}/{.metadata.name} {end}`)
}

const poolKinds = "podippools.stayput.io podips.stayput.io podiprolls.stayput.io podipanswers.stayput.io"

// noDefinitionsOfPools waits until none is left.
func noDefinitionsOfPools(t *testing.T, c *lab.Cluster) {
	t.Helper()
	until(t, "the definitions of pools to go", func(ctx context.Context) bool {
		out, err := c.Kubectl(ctx, "", append([]string{"get", "crd", "--ignore-not-found", "-o", "name"},
			strings.Fields(poolKinds)...)...)
		return err == nil && out == ""
	})
}

func TestAnUninstallationKeepsAddressesOfPoolsAndNothingKeepsThem(t *testing.T) {
	c := ownPools(t)
	ns := namespace(t, c)
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: pools("blue"), Unprobed: true})
	deploy(t, c, ns, lab.Workload{
		Name: "kept", Replicas: 1, Annotations: retain("1h", "stayput.io/pools", "blue"), Unprobed: true,
	})
	web, kept := places(t, c, ns, "web", 2, nil), places(t, c, ns, "kept", 1, nil)
	holdTheirAddresses(t, c, web)
	kubectl(t, c, "scale", "statefulset", "kept", "-n", ns, "--replicas=0")
	keptAt := kept["kept-0"].Status.PodIP
	until(t, "the address of kept-0 to be retained", func(context.Context) bool {
		return podIPs(t, c)[keptAt].Status.Phase == v1alpha1.PodIPRetained
	})
	deploy(t, c, ns, lab.Workload{Name: "waits", Replicas: 1, Annotations: pools("green"), Unprobed: true})
	until(t, "waits-0 to wait", func(ctx context.Context) bool {
		pod, err := c.Client().CoreV1().Pods(ns).Get(ctx, "waits-0", metav1.GetOptions{})
		return err == nil && isGated(pod)
	})

	// 1. Uninstalled by Helm, nothing is gated or held, and addresses stay: of pods that run, and kept ones.
	out, err := c.Uninstall(testContext(t))
	t.Log(out)
	must.Do(t, err)
	ready(t, c, ns, "waits-0")
	noneGated(t, c)
	if left := held(t, c); left != "" {
		t.Errorf("held: %s", left)
	}
	if ips := podIPs(t, c); len(ips) != 3 {
		t.Errorf("the PodIPs are %v", ips)
	}
	untouched(t, c, web)
	// Pods come and go meanwhile.
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-1", metav1.DeleteOptions{}))
	if other := successor(t, c, web["web-1"]); strings.HasPrefix(other.Status.PodIP, "10.6.168.") {
		t.Errorf("nobody serves pools, and web-1 has %s", other.Status.PodIP)
	}

	// 2. Installed again, all is as before.
	values := map[string]any{"crds": map[string]any{"keep": false}}
	for key, value := range poolsOn {
		values[key] = value
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: values}))
	untouched(t, c, map[string]*corev1.Pod{"web-0": web["web-0"]})
	until(t, "what is used to be held again", func(context.Context) bool {
		return len(strings.Fields(held(t, c))) == 4
	})
	holdTheirAddresses(t, c, map[string]*corev1.Pod{"web-0": web["web-0"]})
	now := map[string]*corev1.Pod{"web-0": getPod(t, c, ns, "web-0"), "web-1": getPod(t, c, ns, "web-1")}
	deletePods(t, c, ns, "web")
	after := places(t, c, ns, "web", 2, now)
	keptAddresses(t, web, after)
	holdTheirAddresses(t, c, after)
	kubectl(t, c, "scale", "statefulset", "kept", "-n", ns, "--replicas=1")
	again := places(t, c, ns, "kept", 1, nil)
	keptAddresses(t, kept, again)

	// 3. Uninstalled with the definitions, nothing is left but the pods.
	out, err = c.Uninstall(testContext(t))
	t.Log(out)
	must.Do(t, err)
	noDefinitionsOfPools(t, c)
	untouched(t, c, after)
	untouched(t, c, again)

	// 4. If the rights go first, as by kubectl, the command that is there for it lets the definitions go.
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	kubectl(t, c, "apply", "--server-side", "-f", "../../deploy/pools-crds.yaml", "-f", "../../deploy/pools.yaml",
		"-f", "../../deploy/pools-gate-policies.yaml")
	apply(t, c, ns, pool)
	until(t, "the addresses of all pods to be known again", func(context.Context) bool {
		ips := podIPs(t, c)
		for _, pods := range []map[string]*corev1.Pod{after, again} {
			for _, pod := range pods {
				if ips[pod.Status.PodIP].Spec.PodUID != string(pod.UID) {
					return false
				}
			}
		}
		return len(ips) == 3
	})
	holdTheirAddresses(t, c, after)
	until(t, "all of it to be held again", func(context.Context) bool { // the pool a moment after its addresses
		return len(strings.Fields(held(t, c))) == 4
	})
	// The policies would be the first sign of an uninstallation, in which the controller lets go what it may.
	kubectl(t, c, "delete", "-f", "../../deploy/pools.yaml", "-f", "../../deploy/pools-gate-policies.yaml")
	_, err = c.Uninstall(testContext(t))
	must.Do(t, err)
	untouched(t, c, after)
	if n := len(strings.Fields(held(t, c))); n != 4 {
		t.Errorf("%d are held, want 4", n)
	}
	product, err := buildOnce(t.Context())
	must.Do(t, err)
	config, err := c.Kubeconfig()
	must.Do(t, err)
	said, err := exec.CommandContext(testContext(t), product.Controller, "uninstall",
		"--kubeconfig="+config).CombinedOutput()
	t.Logf("%s", said)
	must.Do(t, err)
	if left := held(t, c); left != "" {
		t.Errorf("held: %s", left)
	}
	kubectl(t, c, "delete", "-f", "../../deploy/pools-crds.yaml", "--wait=false")
	noDefinitionsOfPools(t, c)
	kubectl(t, c, "delete", "statefulset", "web", "kept", "-n", ns)
	for _, pod := range after {
		until(t, pod.Name+" to go", func(ctx context.Context) bool {
			_, err := c.Client().CoreV1().Pods(ns).Get(ctx, pod.Name, metav1.GetOptions{})
			return apierrors.IsNotFound(err)
		})
		if at := holders(t, c, pod.Status.PodIP); len(at) > 0 {
			t.Errorf("%s of %s is still at %v", pod.Status.PodIP, pod.Name, at)
		}
	}
}

func TestPoolsAreSwitchedOnAfterAnUpgradeFromTheVersionBefore(t *testing.T) {
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Chart: chartBefore(t)}))
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("1h"), Unprobed: true})
	deploy(t, c, ns, lab.Workload{Name: "kept", Replicas: 1, Annotations: retain("1h"), Unprobed: true})
	web, kept := places(t, c, ns, "web", 2, nil), places(t, c, ns, "kept", 1, nil)
	kubectl(t, c, "scale", "statefulset", "kept", "-n", ns, "--replicas=0")
	shows(t, c, ns, "kept-0", kept["kept-0"].Spec.NodeName, "to be retained", retained)
	deploy(t, c, ns, lab.Workload{Name: "recorded", Replicas: 2, Own: requiresNode, Unprobed: true})
	recorded := places(t, c, ns, "recorded", 2, nil)
	comesTo(t, c, ns, "recorded", "to record two pods", recordsAll(2))
	for _, pod := range web {
		shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound", boundTo(pod))
	}
	ids := uids(t, c, ns)

	_, _, image := builtImage(t)
	must.Do(t, c.LoadImage(testContext(t), image))
	must.Do(t, c.Upgrade(testContext(t), poolsOn))
	untouched(t, c, web)
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{Name: "pooled", Replicas: 2, Annotations: pools("blue"), Unprobed: true})
	inPool := places(t, c, ns, "pooled", 2, nil)
	holdTheirAddresses(t, c, inPool)
	if is := uids(t, c, ns); is != ids {
		t.Errorf("after the upgrade the RetainedIPs are\n%swant\n%s", is, ids)
	}

	// The version before has no identities.
	deploy(t, c, ns, lab.Workload{
		Kind: "Deployment", Name: "front", Replicas: 2, Annotations: retain("while-owned", "stayput.io/identity", "front"),
		Strategy: recreate, Unprobed: true,
	})
	front := deployed(t, c, ns, "front", 2, nil)
	identified := func() {
		t.Helper()
		for _, pod := range front {
			shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound, with its identity", func(r *v1alpha1.RetainedIP) bool {
				return boundTo(pod)(r) && r.Spec.Identity == "front"
			})
		}
	}
	identified()

	// Each has what it was promised when all are made again at once; those of an identity if the others have ended.
	againAll := func() {
		t.Helper()
		kubectl(t, c, "rollout", "restart", "deployment/front", "-n", ns)
		for _, name := range []string{"web", "pooled", "recorded"} {
			deletePods(t, c, ns, name)
		}
		is := places(t, c, ns, "web", 2, web)
		cameHome(t, web, is)
		web = is
		is = places(t, c, ns, "pooled", 2, inPool)
		keptAddresses(t, inPool, is)
		holdTheirAddresses(t, c, is)
		inPool = is
		is = places(t, c, ns, "recorded", 2, recorded)
		sameNodes(t, recorded, is)
		recorded = is
		now := deployed(t, c, ns, "front", 2, front)
		sameTogether(t, front, now)
		front = now
	}
	againAll()
	kubectl(t, c, "scale", "statefulset", "kept", "-n", ns, "--replicas=1")
	cameHome(t, kept, places(t, c, ns, "kept", 1, nil))

	// After a rollback all run on, and the addresses of pools stay; after another upgrade they are theirs as before.
	podIPIDs := func() string {
		t.Helper()
		return kubectl(t, c, "get", "podips", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}{"\n"}{end}`)
	}
	had := podIPIDs()
	_, err := c.Helm(testContext(t), "rollback", lab.Release, "1", "--namespace="+lab.SystemNamespace)
	must.Do(t, err)
	must.Do(t, c.WaitInstalled(testContext(t)))
	runOn := func() {
		t.Helper()
		shared := map[string]*corev1.Pod{}
		for _, pod := range front {
			shared[pod.Name] = pod
		}
		for _, pods := range []map[string]*corev1.Pod{web, inPool, recorded, shared} {
			untouched(t, c, pods)
		}
		if is := podIPIDs(); is != had {
			t.Errorf("the PodIPs were\n%sand are\n%s", had, is)
		}
	}
	runOn()
	must.Do(t, c.Upgrade(testContext(t), poolsOn))
	runOn()
	holdTheirAddresses(t, c, inPool)
	identified()
	againAll()
}
