//go:build calico

package cluster

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// forget kills the containerd of a node, which knows nothing of its pods from then on: they go on.
func forget(t *testing.T, n *lab.ClusterNode) {
	t.Helper()
	must.Do(t, n.KillContainerd())
	for _, dir := range []string{"/var/lib/containerd", "/run/containerd/io.containerd.runtime.v2.task"} {
		must.Do(t, os.Rename(n.Path(dir), n.Path(dir+time.Now().Format(".150405"))))
	}
}

// Calico frees an address late, or though a pod answers at it. A pod waits for it that would have it at once: the pool
// has no other.
func TestCalicoIPAMLateOrMistakenAboutAnAddressGivesItToNoOtherPod(t *testing.T) {
	alone(t)
	c := withCalico(t, lab.CalicoOptions{LeakGracePeriod: 10 * time.Minute})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: calicoOn}))
	ns := namespace(t, c)
	apply(t, c, ns, `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: one}
spec: {mode: Calico, subnet: 10.244.241.0/26, addresses: [10.244.241.5]}
`)
	m := newMoving(t, c, ns, "one")
	deploy(t, c, ns, lab.Workload{Name: "heir", Replicas: 1, Annotations: pools("one"), Unprobed: true})
	saysOf(t, c, ns, "Pod", "heir-0", "WaitingForAddress", "pool one has no free address, of 1")
	heirWaits := func(what string, long time.Duration) {
		t.Helper()
		stays(t, what+": heir-0 is gated", long, func() bool { return isGated(getPod(t, c, ns, "heir-0")) })
	}

	// 1. The runtime has lost the pod, and the address is freed by hand: while the pod exists it is the pod's, which takes
	// it back as soon as it can.
	n := m.node()
	must.Do(t, n.Kubelet.Stop())
	forget(t, n)
	freeByHand(t, c, m.addr)
	heirWaits("the pod exists", 40*time.Second)
	if is := holder(t, c, m.addr); is != "" {
		t.Errorf("%s is that of %s", m.addr, is)
	}
	m.answersOn(n.Name)
	must.Do(t, n.StartContainerd(testContext(t)))
	must.Do(t, n.Kubelet.Start(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), n))
	isHeldBy(t, c, m.addr, m.pod)
	clients(t, c, ns)
	m.who.reached(t, m.pod)
	heldOn(t, c, m.pod)

	// 2. The same on a node that is cut off, with the pod deleted: its successor waits as well, until the node is back.
	n = m.node()
	mend := cutOff(t, n)
	must.Do(t, c.WaitNotReady(testContext(t), n))
	forget(t, n)
	freeByHand(t, c, m.addr)
	forceDelete(t, c, m.pod)
	m.stillGated("which is not Ready", 20*time.Second)
	m.answersOn(n.Name)
	must.Do(t, n.StartContainerd(testContext(t))) // kubelet makes another sandbox, whose ADD does not reach the API server
	m.stillGated("which is not Ready", 30*time.Second)
	if is := holder(t, c, m.addr); is != "" {
		t.Errorf("%s is that of %s", m.addr, is)
	}
	mend()
	must.Do(t, c.WaitReady(testContext(t), n))
	m.moved("the runtime had lost the pod")
	heirWaits("the pod has moved", time.Second)

	// 3. The garbage collection is minutes behind: the address of a node that is lost is freed here.
	n = m.node()
	cutOff(t, n)
	must.Do(t, c.WaitNotReady(testContext(t), n))
	forceDelete(t, c, m.pod)
	was := holder(t, c, m.addr)
	m.stillGated("may still run on node "+n.Name, 20*time.Second)
	if is := holder(t, c, m.addr); is != was || is == "" {
		t.Errorf("%s was that of %q and is that of %q", m.addr, was, is)
	}
	must.Do(t, n.PowerLoss())
	kubectl(t, c, "delete", "node", n.Name)
	m.moved("the Node is deleted", n.Name)
	must.Do(t, n.Boot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), n))
	m.who.reached(t, m.pod)
	heirWaits("the node is back", time.Second)
	m.who.end(t)

	// 4. Nothing has leaked: once the address is released, the pod that waits has it. While kubelet waits for a volume, an
	// allocation is made as one ADD leaves it that loses the API server before it has noted its sandbox on the pod, and
	// whose DEL is lost, too: it is freed once no ADD can be under way.
	kubectl(t, c, "patch", "statefulset", "heir", "-n", ns, "--type=json", "-p", `[
		{"op": "add", "path": "/spec/template/spec/volumes", "value": [{"name": "v", "configMap": {"name": "late"}}]},
		{"op": "add", "path": "/spec/template/spec/containers/0/volumeMounts", "value": [{"name": "v", "mountPath": "/v"}]}]`)
	kubectl(t, c, "delete", "pod", "heir-0", "-n", ns)
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	kubectl(t, c, "patch", "podip", m.addr.String(), "--type=merge", "-p", `{"spec": {"release": "Now"}}`)
	saysOf(t, c, ns, "Pod", "heir-0", "FailedMount", `"late" not found`)
	heir := getPod(t, c, ns, "heir-0")
	const lost = "k8s-pod-network.0123abcd"
	b := blockOf(t, c, m.addr)
	b.allocate(m.addr, ipamAttributes{lost, map[string]string{"namespace": ns, "pod": "heir-0", "node": heir.Spec.NodeName}})
	must.Do(t, b.put(testContext(t), c))
	kubectl(t, c, "create", "configmap", "late", "-n", ns)
	saysOf(t, c, ns, "Pod", "heir-0", "FailedCreatePodSandBox", "already exists")
	must.Within(t, 14*time.Minute, "the allocation to be freed", func() bool {
		is := blockOf(t, c, m.addr).of(m.addr)
		return is == nil || is.Handle != lost
	})
	if is := ready(t, c, ns, "heir-0"); is.UID != heir.UID || ip(t, is) != m.addr {
		t.Errorf("heir-0 has %s", is.Status.PodIP)
	} else {
		heldOn(t, c, is)
	}
}

// answersOn checks that the pod before still answers on its node.
func (m *moving) answersOn(node string) {
	m.t.Helper()
	asked := time.Now()
	until(m.t, "the old sandbox to answer to "+node, func(context.Context) bool {
		return m.who.lastly()[node].asked.After(asked)
	})
}
