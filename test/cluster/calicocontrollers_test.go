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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// holdWrites has the API server refuse one kind of write to the controllers, until the returned function is called.
func holdWrites(t *testing.T, c *lab.Cluster, group, resource, operation string) (goOn func()) {
	t.Helper()
	apply(t, c, "default", fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: lab-held}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [%q], apiVersions: ["*"], resources: [%q], operations: [%q]}]
  matchConditions:
  - {name: controller, expression: "request.userInfo.username.endsWith(':stayput-controller')"}
  validations: [{expression: "false", message: held by the lab}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: lab-held}
spec: {policyName: lab-held, validationActions: [Deny]}
`, group, resource, operation))
	goOn = once(func() {
		kubectl(t, c, "delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", "lab-held")
	})
	time.Sleep(3 * time.Second) // the API server follows a moment later; whether it did, the controllers' logs tell
	return goOn
}

// twenty is a StatefulSet web of twenty pods of pool blue.
type twenty struct {
	t    *testing.T
	c    *lab.Cluster
	ns   string
	pods map[string]*corev1.Pod
}

const twentyPods = 20

// right waits until all pods run with the addresses that they have always had, as Calico and the cluster say, and
// nothing else has an address of the pool.
func (w *twenty) right(what string, before map[string]*corev1.Pod) {
	w.t.Helper()
	began := time.Now()
	is := places(w.t, w.c, w.ns, "web", twentyPods, before)
	keptAddresses(w.t, w.pods, is)
	for _, pod := range is {
		heldOn(w.t, w.c, pod)
	}
	noneGated(w.t, w.c)
	until(w.t, what+": nothing else to have an address of the pool", func(context.Context) bool {
		return w.allocated() == twentyPods && len(podIPs(w.t, w.c)) == twentyPods
	})
	unique(w.t, w.c)
	until(w.t, what+": each address to be configured on the node of its pod alone", func(context.Context) bool {
		at := configuredAt(w.t, w.c, "10.244.240.", "32")
		for _, pod := range is {
			if !slices.Equal(at[pod.Status.PodIP], []string{pod.Spec.NodeName}) {
				return false
			}
		}
		return len(at) == twentyPods
	})
	w.pods = is
	w.t.Logf("%s: all is right after %v", what, time.Since(began).Round(time.Second))
}

// allocated returns how many addresses of the pool are taken by Calico's blocks.
func (w *twenty) allocated() (n int) {
	for _, b := range blocks(w.t, w.c) {
		if netip.MustParsePrefix("10.244.240.0/24").Overlaps(b.Spec.CIDR) {
			n += len(b.Spec.Allocations) - len(b.Spec.Unallocated)
		}
	}
	return n
}

// killOnceHeld kills all controllers once one has been kept from writing. kubelet starts them again.
func (w *twenty) killOnceHeld() {
	w.t.Helper()
	until(w.t, "a controller to be kept from writing", func(context.Context) bool {
		return strings.Contains(kubectl(w.t, w.c, "logs", "-n", lab.SystemNamespace, "-l",
			"app.kubernetes.io/component=controller", "--tail=-1"), "held by the lab")
	})
	pods, err := w.c.Controllers.Pods(testContext(w.t))
	must.Do(w.t, err)
	for i := range pods {
		must.Do(w.t, w.c.Controllers.KillOne(testContext(w.t), i))
	}
}

// none waits until the pool has given no address.
func (w *twenty) none() {
	w.t.Helper()
	until(w.t, "no address to be given", func(context.Context) bool {
		return len(podIPs(w.t, w.c)) == 0 && w.allocated() == 0
	})
}

// newTwenty starts them in a cluster with agents. The pool has no other addresses.
func newTwenty(t *testing.T, c *lab.Cluster) *twenty {
	t.Helper()
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: map[string]any{
		"pools": map[string]any{"enabled": true, "calico": true},
	}}))
	w := &twenty{t: t, c: c, ns: namespace(t, c)}
	apply(t, c, w.ns, fmt.Sprintf(`
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue}
spec: {mode: Calico, subnet: 10.244.240.0/24, addresses: [10.244.240.1-10.244.240.%d]}
`, twentyPods))
	deploy(t, c, w.ns, everywhere("client"))
	deploy(t, c, w.ns, lab.Workload{Name: "web", Replicas: twentyPods, Unprobed: true,
		Annotations: retain("while-owned", v1alpha1.AnnotationPools, "blue")})
	poolSays(t, c, "blue", "True", "")
	w.right("the first start", nil)
	return w
}

func TestCalicoIPAMsAddressesOutliveKilledControllers(t *testing.T) {
	alone(t)
	c := withCalico(t, lab.CalicoOptions{LeakGracePeriod: 40 * time.Second})
	network := func(n *lab.ClusterNode) (files []string, text string) {
		t.Helper()
		list, err := os.ReadDir(n.Path("/etc/cni/net.d"))
		must.Do(t, err)
		for _, f := range list {
			files = append(files, f.Name())
		}
		data, err := os.ReadFile(n.Path("/etc/cni/net.d/10-calico.conflist"))
		must.Do(t, err)
		return files, string(data)
	}
	_, stock := network(c.Nodes[0])
	w := newTwenty(t, c)
	ns := w.ns
	deploy(t, c, ns, lab.Workload{Kind: "Deployment", Name: "beside", Replicas: 6, Unprobed: true,
		Annotations: map[string]string{retainIP: "10m"}})

	// 1. The agents run, and leave Calico's networks alone, and the addresses of its pods.
	must.Do(t, c.WaitAgents(testContext(t)))
	files, is := network(c.Nodes[0])
	if is != stock {
		t.Errorf("Calico's network was\n%s\nand is\n%s", stock, is)
	}
	t.Logf("the networks of %s are %v", c.Nodes[0].Name, files)
	for _, pod := range deployed(t, c, ns, "beside", 6, nil) {
		isHeldBy(t, c, ip(t, pod), pod)
	}
	client := clients(t, c, ns)[c.Nodes[0].Name]
	for _, pod := range w.pods {
		reaches(t, c, client, pod)
	}

	// 2. Between each two writes the controllers are killed.
	all := func() { deletePods(t, c, ns, "web") }
	down, up := func() { scale(t, c, ns, "web", 0) }, func() { scale(t, c, ns, "web", twentyPods) }
	for _, at := range []struct {
		what                       string
		group, resource, operation string
		first, do, then            func()
	}{
		{what: "an address is retained, or bound", group: "stayput.io", resource: "podips/status", operation: "UPDATE",
			do: all},
		{what: "it is the next pod's", group: "stayput.io", resource: "podips", operation: "UPDATE", do: all},
		{what: "the pod may start", resource: "pods", operation: "UPDATE", do: all},
		{what: "it is free", group: "stayput.io", resource: "podips", operation: "DELETE", do: down,
			then: func() { w.none(); up() }},
		{what: "it is claimed", group: "stayput.io", resource: "podips", operation: "CREATE",
			first: func() { down(); w.none() }, do: up},
	} {
		before := w.pods
		if at.first != nil {
			at.first()
		}
		goOn := holdWrites(t, c, at.group, at.resource, at.operation)
		at.do()
		w.killOnceHeld()
		goOn()
		if at.then != nil {
			at.then()
		}
		if at.operation != "UPDATE" { // the addresses were free for a while
			w.pods = nil
		}
		w.right("killed before it was written that "+at.what, before)
	}
	lost := c.Node(w.pods["web-0"].Spec.NodeName)
	before := map[string]*corev1.Pod{}
	for name, pod := range w.pods {
		if pod.Spec.NodeName == lost.Name {
			before[name] = pod
		}
	}
	must.Do(t, lost.PowerLoss())
	must.Do(t, c.WaitNotReady(testContext(t), lost))
	goOn := holdWrites(t, c, "crd.projectcalico.org", "ipamblocks", "UPDATE")
	kubectl(t, c, "delete", "node", lost.Name)
	for _, pod := range before {
		forceDelete(t, c, pod)
	}
	w.killOnceHeld()
	goOn()
	w.right("killed before it was freed", before)
	must.Do(t, lost.Boot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), lost))
	clients(t, c, ns)

	// 3. Two lead: one is frozen at work, and goes on once another one has taken over.
	for _, after := range []time.Duration{300 * time.Millisecond, time.Second, 2500 * time.Millisecond} {
		before := w.pods
		all()
		time.Sleep(after)
		w.freezeLeader()()
		w.right(fmt.Sprintf("frozen after %v", after), before)
	}
}

// Calico's blocks go back with the rest.
func TestCalicoIPAMsAddressesOutliveARestore(t *testing.T) {
	alone(t)
	c := withCalico(t, lab.CalicoOptions{LeakGracePeriod: 40 * time.Second})
	w := newTwenty(t, c)
	ns := w.ns
	all := func() { deletePods(t, c, ns, "web") }

	// A backup is restored: meanwhile half of the pods have gone, others have taken addresses of theirs, and the rest
	// have moved.
	backup := t.TempDir() + "/etcd.db"
	must.Do(t, c.SaveEtcd(testContext(t), backup))
	scale(t, c, ns, "web", twentyPods/2)
	until(t, "addresses to be free", func(context.Context) bool { return len(podIPs(t, c)) == twentyPods/2 })
	deploy(t, c, ns, lab.Workload{Name: "other", Replicas: twentyPods / 2, Annotations: pools("blue"), Unprobed: true})
	others := places(t, c, ns, "other", twentyPods/2, nil)
	taken := 0
	for _, addr := range addressesOf(w.pods) {
		if slices.ContainsFunc(values(others), func(p *corev1.Pod) bool { return p.Status.PodIP == addr }) {
			taken++
		}
	}
	if taken == 0 {
		t.Error("no pod has an address that a pod of the backup has")
	}
	before := w.pods
	all()
	for i := range twentyPods / 2 {
		successor(t, c, before[fmt.Sprintf("web-%d", i)])
	}
	must.Do(t, c.APIServer.Kill())
	must.Do(t, c.RestoreEtcd(testContext(t), backup, "--bump-revision=1000000000", "--mark-compacted"))
	until(t, "the others to be gone from the nodes", func(ctx context.Context) bool {
		for _, n := range c.Nodes {
			for i := range twentyPods / 2 {
				if _, err := n.Sandbox(ctx, ns, fmt.Sprintf("other-%d", i)); err == nil {
					return false
				}
			}
		}
		return true
	})
	w.right("restored", nil)
	for _, client := range clients(t, c, ns) {
		for _, pod := range w.pods {
			reaches(t, c, client, pod)
		}
	}
	before = w.pods
	all()
	w.right("deleted after the restore", before)
}

// freezeLeader stops the leading controller where it is, and waits until another one leads. The first one goes on once
// the returned function is called.
func (w *twenty) freezeLeader() (thaw func()) {
	w.t.Helper()
	leader := func() string {
		lease, err := w.c.Client().CoordinationV1().Leases(lab.SystemNamespace).Get(testContext(w.t), "stayput-controller",
			metav1.GetOptions{})
		must.Do(w.t, err)
		if lease.Spec.HolderIdentity == nil {
			return ""
		}
		name, _, _ := home.LeaderOf(*lease.Spec.HolderIdentity)
		return name
	}
	was := leader()
	pod := getPod(w.t, w.c, lab.SystemNamespace, was)
	n := w.c.Node(pod.Spec.NodeName)
	_, pid, err := n.Container(testContext(w.t), pod, "controller")
	must.Do(w.t, err)
	signal := func(name string) {
		_, err := n.Run(testContext(w.t), "/bin/sh", "-c", fmt.Sprintf("kill -%s %d", name, pid))
		must.Do(w.t, err)
	}
	signal("STOP")
	until(w.t, "another leader than "+was, func(context.Context) bool {
		is := leader()
		return is != "" && is != was
	})
	return func() { signal("CONT") }
}
