//go:build calico

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

// calicoOn are the chart's values for pools of mode Calico, without agents.
var calicoOn = map[string]any{
	"pools": map[string]any{"enabled": true, "calico": true}, "agent": map[string]any{"enabled": false},
}

// calicoPool is a pool inside the IPPool that calico-node makes.
func calicoPool(name, subnet string) string {
	return fmt.Sprintf(`
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: %s}
spec: {mode: Calico, subnet: %s}
`, name, subnet)
}

// looks is longer than it takes the controller to look at Calico's configuration again.
const looks = 20 * time.Second

// readiness returns the status of the condition Ready of a pool, and its message.
func readiness(t *testing.T, c *lab.Cluster, pool string) string {
	t.Helper()
	return kubectl(t, c, "get", "podippool", pool, "-o",
		`jsonpath={range .status.conditions[?(@.type=="Ready")]}{.status} {.message}{end}`)
}

// poolSays waits until the condition Ready of a pool has a status, and its message a text.
func poolSays(t *testing.T, c *lab.Cluster, name, status, text string) {
	t.Helper()
	is := ""
	defer func() {
		if t.Failed() {
			t.Logf("pool %s: %s", name, is)
		}
	}()
	const settles = 4 * time.Minute // a reservation does in less
	for began := time.Now(); time.Since(began) < settles; time.Sleep(time.Second) {
		is = readiness(t, c, name)
		if strings.HasPrefix(is, status) && strings.Contains(is, text) {
			return
		}
	}
	t.Fatalf("pool %s is not %s with %q: %s", name, status, text, is)
}

// heldOn waits until the PodIP and Calico's IPAM say that a pod has its address on its node.
func heldOn(t *testing.T, c *lab.Cluster, pod *corev1.Pod) {
	t.Helper()
	addr := ip(t, pod)
	until(t, "the PodIP of "+pod.Name+" to be bound", func(context.Context) bool {
		is := podIPs(t, c)[addr.String()]
		return is.Spec.PodUID == string(pod.UID) && is.Status.Phase == v1alpha1.PodIPBound &&
			is.Status.NodeName == pod.Spec.NodeName && is.Status.PodUID == string(pod.UID)
	})
	isHeldBy(t, c, addr, pod)
}

func TestCalicoIPAMGivesPodsOfAPoolTheirAddressesBack(t *testing.T) {
	alone(t)
	c := withCalico(t, lab.CalicoOptions{IPv6: true, LeakGracePeriod: 40 * time.Second})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: calicoOn}))
	ns := namespace(t, c)
	kept := retain("10m", v1alpha1.AnnotationPools, "blue")

	// 1. Ordinary pods have addresses of a subnet that becomes a pool's: they are left alone.
	deploy(t, c, ns, lab.Workload{Kind: "Deployment", Name: "before", Replicas: 6, Unprobed: true})
	before := deployed(t, c, ns, "before", 6, nil)
	used := blockOf(t, c, ip(t, before[0])).Spec.CIDR
	apply(t, c, ns, calicoPool("blue", "10.244.240.0/24")+"---"+calicoPool("old", used.String())+"---"+
		calicoPool("six", "fd00:10:244:f0::/120"))
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: kept, Unprobed: true})
	saysOf(t, c, ns, "Pod", "web-0", "WaitingForAddress", "blue")
	poolSays(t, c, "blue", "True", "")
	subnet := netip.MustParsePrefix("10.244.240.0/24")
	was := places(t, c, ns, "web", 3, nil)
	for _, pod := range was {
		if !subnet.Contains(ip(t, pod)) {
			t.Fatalf("%s has %s", pod.Name, pod.Status.PodIP)
		}
		heldOn(t, c, pod)
	}
	poolSays(t, c, "old", "True", "")
	in := 0
	for _, pod := range before {
		if used.Contains(ip(t, pod)) {
			in++
		}
	}
	until(t, "the pool to say how many ordinary pods have its addresses", func(context.Context) bool {
		return strings.Contains(kubectl(t, c, "get", "podippool", "old", "-o",
			`jsonpath={range .status.conditions[?(@.type=="Overlaps")]}{.message}{end}`),
			fmt.Sprintf("%d ordinary pods of Calico", in))
	})
	deploy(t, c, ns, lab.Workload{Name: "late", Replicas: 2, Annotations: pools("old"), Unprobed: true})
	late := places(t, c, ns, "late", 2, nil)
	for _, pod := range late {
		heldOn(t, c, pod)
		if !used.Contains(ip(t, pod)) {
			t.Errorf("%s has %s, which is not in %s", pod.Name, pod.Status.PodIP, used)
		}
		for _, other := range before {
			if other.Status.PodIP == pod.Status.PodIP {
				t.Errorf("%s has the address of %s", pod.Name, other.Name)
			}
		}
	}

	// 2. Sixty ordinary pods beside it get none of the pool's.
	deploy(t, c, ns, lab.Workload{Kind: "Deployment", Name: "beside", Replicas: 60, Unprobed: true})
	for _, pod := range deployed(t, c, ns, "beside", 60, nil) {
		if addr := ip(t, pod); subnet.Contains(addr) || used.Contains(addr) {
			t.Errorf("%s has %s", pod.Name, addr)
		}
	}
	kubectl(t, c, "scale", "deployment/beside", "--replicas=0", "-n", ns)

	// 3. The pods are deleted, rolled, scaled to nothing and back, drained, and their node restarts.
	deploy(t, c, ns, everywhere("client"))
	clients(t, c, ns)
	pod := was["web-0"]
	who := askAlways(t, c, ns, "web-0", ip(t, pod), 20*time.Millisecond)
	same := func(what string) {
		t.Helper()
		is := places(t, c, ns, "web", 3, was)
		for name, p := range is {
			if p.Status.PodIP != was[name].Status.PodIP {
				t.Errorf("%s: %s had %s and has %s", what, name, was[name].Status.PodIP, p.Status.PodIP)
			}
			heldOn(t, c, p)
		}
		was, pod = is, is["web-0"]
		who.reached(t, pod)
	}
	deletePods(t, c, ns, "web")
	same("deleted")
	kubectl(t, c, "rollout", "restart", "statefulset/web", "-n", ns)
	same("rolled")
	scale(t, c, ns, "web", 0)
	until(t, "no pod of web", func(context.Context) bool {
		return kubectl(t, c, "get", "pods", "-n", ns, "-l", "app=web", "-o", "name") == ""
	})
	scale(t, c, ns, "web", 3)
	same("scaled to nothing and back")
	node := pod.Spec.NodeName
	kubectl(t, c, "drain", node, "--ignore-daemonsets", "--pod-selector=app=web", "--timeout=60s")
	is := successor(t, c, pod)
	if is.Status.PodIP != pod.Status.PodIP || is.Spec.NodeName == node {
		t.Errorf("drained: web-0 had %s on %s and has %s on %s", pod.Status.PodIP, node, is.Status.PodIP, is.Spec.NodeName)
	}
	kubectl(t, c, "uncordon", node)
	pod = is
	heldOn(t, c, pod)
	who.reached(t, pod)
	was = places(t, c, ns, "web", 3, nil)
	rebooted := c.Node(pod.Spec.NodeName)
	must.Do(t, rebooted.Reboot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), rebooted))
	clients(t, c, ns)
	again := places(t, c, ns, "web", 3, nil)
	keptAddresses(t, was, again)
	for name, p := range again {
		if p.UID != was[name].UID {
			t.Errorf("%s was replaced when its node restarted", name)
		}
		heldOn(t, c, p)
	}
	who.reached(t, pod)
	deletePods(t, c, ns, "web")
	same("deleted after a restart of the node")
	bothFamilies(t, c, ns)

	// 4. An author of a pod asks Calico for an address of the pool, in one way or another.
	for name, annotation := range map[string]string{
		"ipAddrs":       `'["10.244.240.200"]'`,
		"ipAddrsNoIpam": `'["10.244.240.200"]'`,
	} {
		for kind, yaml := range map[string]string{
			"pod": "apiVersion: v1\nkind: Pod\nmetadata: {name: thief, annotations: {cni.projectcalico.org/%s: %s}}\n" +
				"spec: {containers: [{name: c, image: none}]}",
			"deployment": "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: thief}\nspec:\n  selector: {matchLabels: {a: b}}\n" +
				"  template:\n    metadata: {labels: {a: b}, annotations: {cni.projectcalico.org/%s: %s}}\n" +
				"    spec: {containers: [{name: c, image: none}]}",
		} {
			_, err := c.Kubectl(testContext(t), fmt.Sprintf(yaml, name, annotation), "apply", "-n", ns, "-f", "-")
			if err == nil || !strings.Contains(err.Error(), "pods get addresses of pools by stayput.io/pools") {
				t.Errorf("a %s with %s: %v", kind, name, err)
			}
		}
	}
	for _, hidden := range []string{`["10.244.240.\u0032\u0030\u0030"]`, `["::ffff:10.244.240.200"]`} {
		_, err := c.Client().CoreV1().Pods(ns).Create(testContext(t), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "thief",
			Annotations: map[string]string{"cni.projectcalico.org/ipAddrs": hidden}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}}}, metav1.CreateOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("a pod with %s: %v", hidden, err)
		}
	}
	who.end(t)

	// 5. What Calico is told meanwhile is said, and what runs is left alone.
	running := places(t, c, ns, "web", 3, nil)
	strict := func(is bool) {
		kubectl(t, c, "patch", "ipamconfig.crd.projectcalico.org", "default", "--type=merge", "-p",
			fmt.Sprintf(`{"spec": {"strictAffinity": %t}}`, is))
	}
	strict(true)
	poolSays(t, c, "blue", "False", "strictAffinity")
	strict(false)
	poolSays(t, c, "blue", "True", "")
	kubectl(t, c, "patch", "ippool.crd.projectcalico.org", "default-ipv4-ippool", "--type=merge", "-p",
		`{"spec": {"disabled": true}}`)
	poolSays(t, c, "blue", "False", "IPPool default-ipv4-ippool of Calico is disabled")
	kubectl(t, c, "patch", "ippool.crd.projectcalico.org", "default-ipv4-ippool", "--type=merge", "-p",
		`{"spec": {"disabled": false}}`)
	poolSays(t, c, "blue", "True", "")
	kubectl(t, c, "delete", "ipreservation.crd.projectcalico.org", "stayput-blue")
	poolSays(t, c, "blue", "False", "was reserved in Calico's IPAM just now")
	kubectl(t, c, "get", "ipreservation.crd.projectcalico.org", "stayput-blue")
	untouched(t, c, running)

	// 6. The reservation goes with the pool, and stays while a pod has one of its addresses.
	kubectl(t, c, "delete", "podippool", "blue", "--wait=false")
	stays(t, "the subnet is reserved", 20*time.Second, func() bool {
		_, err := c.Kubectl(testContext(t), "", "get", "ipreservation.crd.projectcalico.org", "stayput-blue")
		return err == nil
	})
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	for _, addr := range addressesOf(running) {
		kubectl(t, c, "patch", "podip", addr, "--type=merge", "-p", `{"spec": {"release": "Now"}}`)
	}
	until(t, "the reservation to go with the pool", func(context.Context) bool {
		return kubectl(t, c, "get", "ipreservation.crd.projectcalico.org", "stayput-blue", "--ignore-not-found") == ""
	})
}

// bothFamilies checks that a pod has an address of a pool of each family, and that it keeps both.
func bothFamilies(t *testing.T, c *lab.Cluster, ns string) {
	t.Helper()
	poolSays(t, c, "six", "True", "")
	deploy(t, c, ns, lab.Workload{Name: "both", Replicas: 2, Unprobed: true,
		Annotations: retain("10m", v1alpha1.AnnotationPools, "blue,six")})
	var was map[string]*corev1.Pod
	for range 3 {
		is := places(t, c, ns, "both", 2, was)
		for name, pod := range is {
			if len(pod.Status.PodIPs) != 2 || was != nil && !slices.Equal(pod.Status.PodIPs, was[name].Status.PodIPs) {
				t.Fatalf("%s has %v, and before %v", name, pod.Status.PodIPs, was[name])
			}
			v6 := netip.MustParseAddr(pod.Status.PodIPs[1].IP)
			if !netip.MustParsePrefix("fd00:10:244:f0::/120").Contains(v6) {
				t.Errorf("%s has %s", name, v6)
			}
			heldOn(t, c, pod)
			isHeldBy(t, c, v6, pod)
			until(t, "the PodIP of IPv6 to be bound", func(context.Context) bool {
				is := podIPs(t, c)[v1alpha1.PodIPName(v6)]
				return is.Spec.PodUID == string(pod.UID) && is.Status.Phase == v1alpha1.PodIPBound
			})
			for _, client := range clients(t, c, ns) {
				reaches(t, c, client, pod)
			}
		}
		was = is
		deletePods(t, c, ns, "both")
	}
	kubectl(t, c, "delete", "statefulset", "both", "-n", ns)
	for name, is := range podIPs(t, c) {
		if strings.HasPrefix(is.Spec.PodName, "both-") {
			kubectl(t, c, "patch", "podip", name, "--type=merge", "-p", `{"spec": {"release": "Now"}}`)
			until(t, "PodIP "+name+" to go", func(context.Context) bool {
				_, left := podIPs(t, c)[name]
				return !left
			})
		}
	}
}

// moving is a StatefulSet web of one pod that is asked for all the time, whatever happens to its nodes.
type moving struct {
	t    *testing.T
	c    *lab.Cluster
	ns   string
	pod  *corev1.Pod
	addr netip.Addr
	who  *asked
}

// newMoving starts it once the pool is ready.
func newMoving(t *testing.T, c *lab.Cluster, ns, pool string) *moving {
	t.Helper()
	deploy(t, c, ns, everywhere("client"))
	clients(t, c, ns)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m", v1alpha1.AnnotationPools, pool),
		Unprobed: true})
	poolSays(t, c, pool, "True", "")
	pod := ready(t, c, ns, "web-0")
	m := &moving{t, c, ns, pod, ip(t, pod), askAlways(t, c, ns, "web-0", ip(t, pod), 20*time.Millisecond)}
	m.who.reached(t, pod)
	return m
}

func (m *moving) node() *lab.ClusterNode { return m.c.Node(m.pod.Spec.NodeName) }

// moved waits for the pod's successor with its address, on none of the nodes that are lost.
func (m *moving) moved(what string, lost ...string) {
	m.t.Helper()
	is := successor(m.t, m.c, m.pod)
	if ip(m.t, is) != m.addr {
		m.t.Fatalf("%s: web-0 had %s and has %s", what, m.addr, is.Status.PodIP)
	}
	if slices.Contains(lost, is.Spec.NodeName) {
		m.t.Errorf("%s: web-0 is on %s again", what, is.Spec.NodeName)
	}
	m.pod = is
	heldOn(m.t, m.c, is)
	m.who.reached(m.t, is, lost...)
}

// stillGated checks that the pod's successor waits, and goes on waiting.
func (m *moving) stillGated(why string, long time.Duration) {
	m.t.Helper()
	until(m.t, "a successor that waits", func(context.Context) bool {
		is := getPod(m.t, m.c, m.ns, "web-0")
		return is != nil && is.UID != m.pod.UID && isGated(is)
	})
	saysOf(m.t, m.c, m.ns, "Pod", "web-0", "WaitingForAddress", why)
	stays(m.t, "web-0 is gated", long, func() bool { return isGated(getPod(m.t, m.c, m.ns, "web-0")) })
}

// The fence: who may have an address whose pod's node does not answer.
func TestCalicoIPAMsAddressesMoveOnlyOnceTheirPodsSurelyHaveThemNoMore(t *testing.T) {
	alone(t)
	c := withCalico(t, lab.CalicoOptions{LeakGracePeriod: 40 * time.Second})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: calicoOn}))
	ns := namespace(t, c)
	apply(t, c, ns, calicoPool("blue", "10.244.240.0/24"))
	m := newMoving(t, c, ns, "blue")

	// 1. Deleted by force, with kubelet alive.
	forceDelete(t, c, m.pod)
	m.moved("deleted by force")

	// 2. The same with kubelet stopped: the address stays where it is, until kubelet is back.
	n := m.node()
	must.Do(t, n.Kubelet.Stop())
	must.Do(t, c.WaitNotReady(testContext(t), n))
	forceDelete(t, c, m.pod)
	m.stillGated("may still run on node "+n.Name, 20*time.Second)
	must.Do(t, n.Kubelet.Start(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), n))
	m.moved("kubelet was stopped")

	// 3. The node is cut off in both directions, and the garbage collection of Calico frees the address: the pod answers
	// there still. Its successor waits until the node is back.
	n = m.node()
	mend := cutOff(t, n)
	must.Do(t, c.WaitNotReady(testContext(t), n))
	forceDelete(t, c, m.pod)
	m.stillGated("node "+n.Name, 90*time.Second)
	mend()
	must.Do(t, c.WaitReady(testContext(t), n))
	m.moved("the node was cut off")

	// 4. The node is off, and its Node deleted.
	n = m.node()
	must.Do(t, n.PowerLoss())
	must.Do(t, c.WaitNotReady(testContext(t), n))
	kubectl(t, c, "delete", "node", n.Name)
	m.moved("the Node is deleted", n.Name)
	must.Do(t, n.Boot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), n))

	// 5. The node is off, and out of service.
	n = m.node()
	must.Do(t, n.PowerLoss())
	must.Do(t, c.WaitNotReady(testContext(t), n))
	kubectl(t, c, "taint", "node", n.Name, "node.kubernetes.io/out-of-service=:NoExecute")
	m.moved("out of service", n.Name)
	must.Do(t, n.Boot(testContext(t)))
	kubectl(t, c, "taint", "node", n.Name, "node.kubernetes.io/out-of-service-")
	must.Do(t, c.WaitReady(testContext(t), n))
	m.who.reached(t, m.pod)
	m.who.end(t)
}
