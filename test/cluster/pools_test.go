package cluster

import (
	"context"
	"fmt"
	"net/netip"
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

	// 7. A deletion of the pool takes no address from a pod.
	kubectl(t, c, "delete", "podippool", "blue", "--wait=false")
	deletePods(t, c, ns, "web")
	after = places(t, c, ns, "web", 3, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	pods = after

	// 8. With the workload gone, the pool goes too, and nothing is left.
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
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
		if ip.Status.Conflict != "" || ip.Spec.PodName != "web-0" && ip.Spec.PodName != "web-1" {
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
	says("get", works(t, c, ns, "get"), addr, node, "Bound", "of pool blue, 1h after the pod stops")
	says("get by name", works(t, c, ns, "get", "pip/"+addr, "-o", "name"), "podip.stayput.io/"+addr)
	says("why", works(t, c, ns, "why", "web-0"), "stayput.io/pools: blue",
		addr+" of pool blue is assigned to it on any node", "PodIP "+addr+": Bound", "Node: any node that its pools select",
		"IP: "+addr+" of pool blue")
	says("node", works(t, c, ns, "node", node), "Pool addresses", addr, ns+"/web-0")
	says("check", works(t, c, ns, "check", "--verbose"), "all admission policies are in place",
		"pools: 1 pool, 2 of 10 addresses in use or kept")

	// Pools that share addresses say so, until one of them has gone.
	apply(t, c, ns, strings.NewReplacer("blue", "green", "101-10.6.168.110", "110-10.6.168.119").Replace(pool))
	for name, other := range map[string]string{"blue": "green", "green": "blue"} {
		until(t, "pool "+name+" to say that it overlaps", func(context.Context) bool {
			return kubectl(t, c, "get", "pippool", name, "-o", `jsonpath={.status.conditions[?(@.type=="Overlaps")].message}`) ==
				"it shares addresses with pool "+other
		})
	}
	says("check", stayput(t, c, ns, "check").out, "PodIPPool blue: it shares addresses with pool green")
	kubectl(t, c, "delete", "pippool", "green")
	until(t, "pool blue to say that it no longer overlaps", func(context.Context) bool {
		return kubectl(t, c, "get", "pippool", "blue", "-o",
			`jsonpath={.status.conditions[?(@.type=="Overlaps")].status}`) == "False"
	})

	s := stayput(t, c, ns, "release", "web-0", "--yes")
	if s.code == 0 || !strings.Contains(s.err, "the address is in use") {
		t.Errorf("release of a bound address: %+v", s)
	}
	kubectl(t, c, "scale", "statefulset", "web", "-n", ns, "--replicas=1")
	other := pods["web-1"].Status.PodIP
	until(t, "the address of web-1 to be retained until then", func(context.Context) bool {
		return podIPs(t, c)[other].Status.Expires != nil
	})
	says("why of a pod that is gone", works(t, c, ns, "why", "web-1"), other+" of pool blue is kept until")
	says("release", works(t, c, ns, "release", "web-1", "--yes"),
		"podip.stayput.io/"+other+" released: "+other+" of pool blue")
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
		"it requests pool addresses (blue) and has been assigned none")
}

// No workload creates these pods again under their names, so nothing keeps their addresses.
// The DaemonSet comes to a controller that leads already and has a pool: it sees the pods by their label alone.
func TestAddressesOfPodsThatAreNotMadeAgainAreFreeAtOnce(t *testing.T) {
	c := withPools(t)
	ns := namespace(t, c)
	apply(t, c, ns, pool)
	until(t, "the pool to be in use", func(context.Context) bool {
		return kubectl(t, c, "get", "pippool", "blue", "-o", "jsonpath={.status.conditions}") != ""
	})
	const pod = `{containers: [{name: web, image: ` + lab.WebImage + `, imagePullPolicy: Never}]`
	const asks = `annotations: {stayput.io/pools: blue}`
	apply(t, c, ns, `
apiVersion: v1
kind: Pod
metadata: {name: bare, `+asks+`}
spec: `+pod+`}
---
apiVersion: batch/v1
kind: Job
metadata: {name: once}
spec:
  backoffLimit: 0
  template: {metadata: {labels: {app: once}, `+asks+`}, spec: `+pod+`, restartPolicy: Never}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: each}
spec:
  selector: {matchLabels: {app: each}}
  template: {metadata: {labels: {app: each}, `+asks+`}, spec: `+pod+`}}
`)
	having := func() (names []string) {
		for _, ip := range podIPs(t, c) {
			if ip.Spec.Namespace == ns {
				names = append(names, ip.Spec.PodName)
			}
		}
		return names
	}
	until(t, "all pods to run with addresses of the pool", func(ctx context.Context) bool {
		all, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		return err == nil && len(all.Items) == 2+len(c.Nodes) && len(having()) == len(all.Items) &&
			!slices.ContainsFunc(all.Items, func(p corev1.Pod) bool { return !lab.Ready(&p) })
	})
	kubectl(t, c, "delete", "pod/bare", "job/once", "daemonset/each", "-n", ns)
	until(t, "their addresses to be free", func(context.Context) bool { return len(having()) == 0 })
}
