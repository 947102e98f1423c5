//go:build calico

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// Pools of mode Calico rest on what Calico does by itself. No test here has stayput.

const (
	// leakGrace is after how long Calico frees an address that it takes for leaked; it looks twice in that time.
	leakGrace = 40 * time.Second
	// leaked is longer than that takes.
	leaked = leakGrace + leakGrace/2 + 10*time.Second
	// often is how often who has an address is asked.
	often = 20 * time.Millisecond
)

// calicosPools are the pool that calico-node makes by itself, and a small one for the pods that name it.
const calicosPools = `
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: default-ipv4-ippool}
spec:
  cidr: 10.244.0.0/16
  blockSize: 26
  vxlanMode: Always
  ipipMode: Never
  natOutgoing: true
  nodeSelector: all()
  allowedUses: [Workload, Tunnel]
---
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: tight}
spec:
  cidr: 10.245.4.0/26
  blockSize: 28
  vxlanMode: Always
  ipipMode: Never
  natOutgoing: true
  nodeSelector: all()
  assignmentMode: Manual
  allowedUses: [Workload]
`

// reserved keeps ordinary pods out of a whole block and half a block of tight, and out of a part of the default pool.
const reserved = `
apiVersion: crd.projectcalico.org/v1
kind: IPReservation
metadata: {name: reserved}
spec: {reservedCIDRs: [10.245.4.32/28, 10.245.4.8/29, 10.244.240.0/24]}
`

// bare is the cluster of these tests, with a client on each node.
type bare struct {
	c  *lab.Cluster
	ns string
}

func TestWhatPoolsInCalicoIPAMRestOn(t *testing.T) {
	c := withCalico(t, lab.CalicoOptions{Objects: calicosPools, IPv6: true, LeakGracePeriod: leakGrace})
	b := bare{c, namespace(t, c)}
	deploy(t, c, b.ns, everywhere("client"))
	clients(t, c, b.ns)
	for _, is := range []struct {
		name string
		test func(*testing.T)
	}{
		{"a reservation keeps ordinary pods out", b.aReservationKeepsOthersOut},
		{"an address follows the pod that asks for it", b.anAddressFollows},
		{"a pod has the families that it asks for", b.families},
		{"Felix cuts off the sandbox of a deleted pod", b.felixCutsOff},
		{"an address of a lost node is freed by none but us", b.aLostNodesAddressStays},
		{"a node cut off goes on while its address is given away", b.aNodeCutOffGoesOn},
		{"a new sandbox takes the address that its pod names", b.aNewSandboxTakesItsAddress},
	} {
		if !t.Run(is.name, is.test) {
			t.FailNow() // it leaves the cluster as it is
		}
	}
}

// run makes a pod that asks for an address, and returns it once it is Ready.
func (b bare) run(t *testing.T, name string, addr netip.Addr, on *lab.ClusterNode) *corev1.Pod {
	t.Helper()
	deploy(t, b.c, b.ns, lab.Workload{Kind: "Pod", Name: name, Node: on.Name, Annotations: asksFor(addr)})
	return b.ready(t, name, addr, on)
}

func (b bare) ready(t *testing.T, name string, addr netip.Addr, on *lab.ClusterNode) *corev1.Pod {
	t.Helper()
	began := time.Now()
	pod := ready(t, b.c, b.ns, name)
	t.Logf("%s is Ready after %v on %s", name, time.Since(began).Round(time.Millisecond), on.Name)
	if ip(t, pod) != addr || pod.Spec.NodeName != on.Name {
		t.Fatalf("%s asked for %v on %s and has %v on %s", name, addr, on.Name, ip(t, pod), pod.Spec.NodeName)
	}
	isHeldBy(t, b.c, addr, pod)
	return pod
}

// gated makes a pod that asks for an address and may not start.
func (b bare) gated(t *testing.T, name string, addr netip.Addr, on *lab.ClusterNode) {
	t.Helper()
	deploy(t, b.c, b.ns, lab.Workload{
		Kind: "Pod", Name: name, Node: on.Name, Annotations: asksFor(addr),
		Pod: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: "lab.stayput.test/gate"}}},
	})
}

func (b bare) ungate(t *testing.T, name string) {
	t.Helper()
	_, err := b.c.Client().CoreV1().Pods(b.ns).Patch(testContext(t), name, types.JSONPatchType,
		[]byte(`[{"op": "remove", "path": "/spec/schedulingGates"}]`), metav1.PatchOptions{})
	must.Do(t, err)
}

// refused waits until a pod cannot have an address since another one has it.
func (b bare) refused(t *testing.T, name string, addr netip.Addr) {
	t.Helper()
	saysOf(t, b.c, b.ns, "Pod", name, "FailedCreatePodSandBox", "resource already exists: "+addr.String())
}

func (b bare) remove(t *testing.T, pods ...string) {
	t.Helper()
	kubectl(t, b.c, append([]string{"delete", "pod", "-n", b.ns, "--timeout=100s"}, pods...)...)
}

func (b bare) aReservationKeepsOthersOut(t *testing.T) {
	const (
		free  = 40 // addresses of the pool that are not reserved
		n     = free + 6
		which = "ordinary"
	)
	tight := netip.MustParsePrefix("10.245.4.0/26")
	inside := func(pods []*corev1.Pod) (all []string) {
		for _, pod := range pods {
			for _, cidr := range []string{"10.245.4.32/28", "10.245.4.8/29"} {
				if netip.MustParsePrefix(cidr).Contains(ip(t, pod)) {
					all = append(all, pod.Name+" "+pod.Status.PodIP)
				}
			}
			if !tight.Contains(ip(t, pod)) {
				t.Errorf("%s has %s", pod.Name, pod.Status.PodIP)
			}
		}
		return all
	}
	running := func(want int) (pods []*corev1.Pod) {
		t.Helper()
		until(t, fmt.Sprintf("%d ordinary pods", want), func(ctx context.Context) bool {
			list, err := b.c.Client().CoreV1().Pods(b.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + which})
			pods = nil
			for i := range list.Items {
				if lab.Ready(&list.Items[i]) {
					pods = append(pods, &list.Items[i])
				}
			}
			return err == nil && len(pods) == want
		})
		return pods
	}
	deploy(t, b.c, b.ns, lab.Workload{Name: which, Replicas: n, Unprobed: true,
		Annotations: map[string]string{"cni.projectcalico.org/ipv4pools": `["tight"]`}})
	without := inside(running(n))
	t.Logf("without a reservation %d of %d ordinary pods are inside", len(without), n)
	if len(without) < n-free {
		t.Errorf("without a reservation only %v are inside", without)
	}
	scale(t, b.c, b.ns, which, 0)
	until(t, "the addresses of the ordinary pods to be free", func(context.Context) bool {
		for _, block := range blocks(t, b.c) {
			if tight.Overlaps(block.Spec.CIDR) && len(block.Spec.Attributes) > 0 {
				return false
			}
		}
		return true
	})

	apply(t, b.c, b.ns, reserved)
	scale(t, b.c, b.ns, which, n)
	if with := inside(running(free)); len(with) > 0 {
		t.Errorf("with the reservation %v are inside", with)
	}
	unique(t, b.c)
	for i := range n {
		name := fmt.Sprintf("%s-%d", which, i)
		if pod := getPod(t, b.c, b.ns, name); pod == nil || pod.Status.PodIP == "" {
			saysOf(t, b.c, b.ns, "Pod", name, "FailedCreatePodSandBox", "No IPs available in pools: [10.245.4.0/26]")
		}
	}

	// It is no matter to a pod that asks.
	b.run(t, "asks", netip.MustParseAddr("10.245.4.40"), b.c.Nodes[0])
	scale(t, b.c, b.ns, which, 0)
	b.remove(t, "asks")
	until(t, "the ordinary pods to be gone", func(ctx context.Context) bool {
		list, err := b.c.Client().CoreV1().Pods(b.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + which})
		return err == nil && len(list.Items) == 0
	})
}

func (b bare) anAddressFollows(t *testing.T) {
	addr := netip.MustParseAddr("10.244.240.7")
	first, second, third := b.c.Nodes[0], b.c.Nodes[1], b.c.Nodes[2]
	load := askAlways(t, b.c, b.ns, "web", addr, often)
	for i, n := range []*lab.ClusterNode{first, second, third, first} {
		if i > 0 {
			b.remove(t, "web")
			until(t, "the address to be free", func(context.Context) bool { return holder(t, b.c, addr) == "" })
		}
		load.reached(t, b.run(t, "web", addr, n))
	}
	load.end(t)

	// Another one has it once that is gone, and not before.
	deploy(t, b.c, b.ns, lab.Workload{Kind: "Pod", Name: "second", Node: second.Name, Annotations: asksFor(addr)})
	b.refused(t, "second", addr)
	b.remove(t, "web")
	b.ready(t, "second", addr, second)
	b.remove(t, "second")
}

func (b bare) families(t *testing.T) {
	addr, v6 := netip.MustParseAddr("10.244.240.12"), netip.MustParseAddr("fd00:10:244:f0::12")
	n := b.c.Nodes[0]
	for name, asks := range map[string][]netip.Addr{"both": {addr, v6}, "one": {addr.Next()}} {
		deploy(t, b.c, b.ns, lab.Workload{Kind: "Pod", Name: name, Node: n.Name, Annotations: asksFor(asks...)})
		var has []netip.Addr
		for _, is := range ready(t, b.c, b.ns, name).Status.PodIPs {
			has = append(has, netip.MustParseAddr(is.IP))
		}
		if !slices.Equal(has, asks) {
			t.Errorf("%s asked for %v and has %v", name, asks, has)
		}
	}
	if client := clients(t, b.c, b.ns)[n.Name]; len(client.Status.PodIPs) != 2 {
		t.Errorf("an ordinary pod has %v", client.Status.PodIPs)
	}
	b.remove(t, "both", "one")
}

func (b bare) felixCutsOff(t *testing.T) {
	addr := netip.MustParseAddr("10.244.240.8")
	n, other := b.c.Nodes[0], b.c.Nodes[1]
	web := b.run(t, "web", addr, n)
	load := askAlways(t, b.c, b.ns, "web", addr, often)
	load.reached(t, web)

	// Without kubelet and Felix it goes on.
	must.Do(t, n.Felix.Stop())
	must.Do(t, n.Kubelet.Stop())
	forceDelete(t, b.c, web)
	time.Sleep(5 * time.Second)
	load.reached(t, web)
	must.Do(t, n.Felix.Start(testContext(t)))
	started := time.Now()
	lastly := func() (last time.Time) {
		for _, is := range load.lastly() {
			if is.asked.After(last) {
				last = is.asked
			}
		}
		return last
	}
	until(t, "nobody to be answered for 5 s", func(context.Context) bool { return time.Since(lastly()) > 5*time.Second })
	t.Logf("the last answer came %v after Felix was ready", lastly().Sub(started).Round(time.Millisecond))
	if at := holders(t, b.c, addr.String()); len(at) != 1 || !strings.HasPrefix(at[0], n.Name+" ") {
		t.Errorf("%v is configured at %v", addr, at) // the sandbox is still there
	}
	deploy(t, b.c, b.ns, lab.Workload{Kind: "Pod", Name: "web", Node: other.Name, Annotations: asksFor(addr)})
	b.refused(t, "web", addr)
	must.Do(t, n.Kubelet.Start(testContext(t)))
	load.reached(t, b.ready(t, "web", addr, other))
	load.end(t)
	must.Do(t, b.c.WaitReady(testContext(t), n))
	b.remove(t, "web")
}

func (b bare) aLostNodesAddressStays(t *testing.T) {
	addr := netip.MustParseAddr("10.244.240.9")
	other, lost := b.c.Nodes[1], b.c.Nodes[2]
	web := b.run(t, "web", addr, lost)
	load := askAlways(t, b.c, b.ns, "web", addr, often)
	load.reached(t, web)
	was := holder(t, b.c, addr)
	must.Do(t, lost.PowerLoss())
	kubectl(t, b.c, "delete", "node", lost.Name)
	forceDelete(t, b.c, web)
	b.gated(t, "web", addr, other)
	stays(t, "the address is that of "+was, leaked, func() bool { return holder(t, b.c, addr) == was })

	// It is freed by what was observed, and by nothing older.
	stale := blockOf(t, b.c, addr)
	handle := ipamHandle(t, b.c, stale.of(addr).Handle)
	stale.free(addr)
	kubectl(t, b.c, "annotate", "ipamblock", stale.Metadata.Name, "lab.stayput.test/written=meanwhile")
	if err := stale.put(testContext(t), b.c); !apierrors.IsConflict(err) {
		t.Errorf("a stale block is written: %v", err)
	}
	block := blockOf(t, b.c, addr)
	if is := block.of(addr); is == nil || is.String() != was {
		t.Fatalf("the address is that of %v", is)
	}
	block.free(addr)
	must.Do(t, block.put(testContext(t), b.c))
	err := deleteHandle(testContext(t), b.c, handle.Name, "another", handle.ResourceVersion)
	if !apierrors.IsConflict(err) {
		t.Errorf("another handle is deleted: %v", err)
	}
	must.Do(t, deleteHandle(testContext(t), b.c, handle.Name, handle.UID, handle.ResourceVersion))
	if is := holder(t, b.c, addr); is != "" {
		t.Errorf("the address is that of %s", is)
	}
	b.ungate(t, "web")
	web = b.ready(t, "web", addr, other)
	load.reached(t, web, lost.Name)

	// Calico frees the rest of the node.
	until(t, "the other addresses of the lost node to be free", func(context.Context) bool {
		for _, block := range blocks(t, b.c) {
			for _, is := range block.Spec.Attributes {
				if is.Secondary["node"] == lost.Name {
					return false
				}
			}
		}
		return true
	})

	// The node comes back, and does not take the address from its pod.
	must.Do(t, lost.Boot(testContext(t)))
	must.Do(t, b.c.WaitReady(testContext(t), lost))
	clients(t, b.c, b.ns)
	load.reached(t, web)
	isHeldBy(t, b.c, addr, web)
	load.end(t)
	b.remove(t, "web")
}

func (b bare) aNodeCutOffGoesOn(t *testing.T) {
	addr := netip.MustParseAddr("10.244.240.10")
	lost, other := b.c.Nodes[0], b.c.Nodes[1]
	web := b.run(t, "web", addr, lost)
	load := askAlways(t, b.c, b.ns, "web", addr, often)
	load.reached(t, web)
	was := holder(t, b.c, addr)
	mend := cutOff(t, lost)
	must.Do(t, b.c.WaitNotReady(testContext(t), lost))
	forceDelete(t, b.c, web)

	// While its successor is gated, the address is not freed. Once it may start, both answer.
	b.gated(t, "web", addr, other)
	stays(t, "the address is that of "+was, leaked, func() bool { return holder(t, b.c, addr) == was })
	b.ungate(t, "web")
	b.refused(t, "web", addr)
	next := b.ready(t, "web", addr, other)
	until(t, "both to answer", func(context.Context) bool {
		is := load.lastly()
		return is[lost.Name].Started.Before(next.CreationTimestamp.Time) &&
			is[lost.Name].asked.After(is[other.Name].Started) && !is[other.Name].Started.Before(next.CreationTimestamp.Time)
	})
	mend()
	must.Do(t, b.c.WaitReady(testContext(t), lost))
	load.reached(t, next)
	isHeldBy(t, b.c, addr, next)
	if wrong := load.stop(t); len(wrong) == 0 || !strings.Contains(wrong[0], "had started") {
		t.Errorf("it is not seen that both answered: %q", wrong)
	}
	b.remove(t, "web")
}

// A pod that was given its address by name releases it by name for a new sandbox, whoever has it.
func (b bare) aNewSandboxTakesItsAddress(t *testing.T) {
	addr := netip.MustParseAddr("10.244.240.11")
	lost, other := b.c.Nodes[0], b.c.Nodes[1]
	trap := b.run(t, "trap", addr, lost)
	must.Do(t, lost.PowerLoss())
	freeByHand(t, b.c, addr)
	b.run(t, "thief", addr, other)
	must.Do(t, os.RemoveAll(lost.Path("/var/lib/containerd")))
	must.Do(t, lost.Boot(testContext(t)))
	isHeldBy(t, b.c, addr, trap)
	until(t, "both to have the address", func(context.Context) bool { return len(holders(t, b.c, addr.String())) == 2 })
	b.remove(t, "trap", "thief")
	must.Do(t, b.c.WaitReady(testContext(t), lost))
}
