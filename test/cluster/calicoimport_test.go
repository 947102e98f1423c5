//go:build calico

package cluster

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// scarce is an IPPool of which a pool takes the second half: ordinary pods soon have all of the first.
const scarce = `
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: scarce}
spec:
  cidr: 10.244.0.0/25
  blockSize: 28
  vxlanMode: Always
  ipipMode: Never
  natOutgoing: true
  nodeSelector: all()
  allowedUses: [Workload, Tunnel]
`

// The addresses that running pods have of Calico become theirs for good, and none of them restarts. Beside them more
// ordinary pods want addresses than there are, and get none of theirs.
func TestCalicoIPAMImportsTheAddressesOfRunningPods(t *testing.T) {
	alone(t)
	c := withCalico(t, lab.CalicoOptions{Objects: scarce, LeakGracePeriod: 40 * time.Second})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: calicoOn}))
	ns := namespace(t, c)
	apply(t, c, ns, calicoPool("blue", "10.244.0.64/26"))
	deploy(t, c, ns, everywhere("client"))
	clients(t, c, ns)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Unprobed: true})
	deploy(t, c, ns, lab.Workload{Name: "short", Replicas: 1, Unprobed: true})
	was := places(t, c, ns, "web", 3, nil)
	short := ready(t, c, ns, "short-0")
	poolSays(t, c, "blue", "True", "")
	theirs := slices.Collect(maps.Values(addressesOf(was)))
	reserved := func(addr string) bool {
		t.Helper()
		return kubectl(t, c, "get", "ipreservation.crd.projectcalico.org", "stayput-ip-"+addr, "--ignore-not-found") != ""
	}

	// 1. A plan changes nothing.
	works(t, c, ns, "import", "calico", "statefulset/web", "--into=blue", "--dry-run=client")
	if all := podIPs(t, c); len(all) > 0 || reserved(theirs[0]) {
		t.Errorf("a plan has made %v", all)
	}

	// 2. A pod that ends before the import is complete takes its address along. That of the others is theirs.
	done := make(chan said, 1)
	within := pluginCommand(t, c, "stayput", "import", "calico", "sts/web", "sts/short", "--into=blue", "--yes", "-n", ns)
	cmd := exec.CommandContext(t.Context(), within.Path, within.Args[1:]...) // it takes longer than others
	cmd.Env = within.Env
	go func() { done <- says(t, cmd) }()
	until(t, "the addresses to be reserved", func(context.Context) bool {
		return !slices.ContainsFunc(append(theirs, short.Status.PodIP), func(a string) bool { return !reserved(a) })
	})
	kubectl(t, c, "delete", "pod", "short-0", "-n", ns)
	until(t, "the address of short-0 to be given back", func(context.Context) bool {
		_, there := podIPs(t, c)[short.Status.PodIP]
		return !there && !reserved(short.Status.PodIP)
	})
	if successor(t, c, short).Annotations[v1alpha1.AnnotationAddresses] != "" {
		t.Error("short-0 has an address of a pool")
	}
	is := <-done
	t.Logf("import: %d\n%s%s", is.code, is.out, is.err)
	if is.code != 1 || !strings.Contains(is.out, "the pod has ended") || strings.Count(is.out, "Adopt") != 3 {
		t.Error("it does not say what became of the addresses")
	}
	untouched(t, c, was)
	for _, pod := range was {
		heldOn(t, c, pod)
		if ip := podIPs(t, c)[pod.Status.PodIP]; ip.Spec.AdoptedOn != pod.Spec.NodeName || !reserved(pod.Status.PodIP) {
			t.Errorf("%s: %+v", pod.Name, ip)
		}
	}
	_, err := c.Client().CoreV1().Pods(ns).Create(testContext(t), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "thief",
		Annotations: map[string]string{"cni.projectcalico.org/ipAddrs": fmt.Sprintf("[%q]", theirs[0])}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}}}, metav1.CreateOptions{})
	if err == nil || !strings.Contains(err.Error(), "pods get addresses of pools by stayput.io/pools") {
		t.Errorf("an author of a pod asks for an address of web: %v", err)
	}

	// 3. Its template does not ask for the pool yet: a pod that is created again has an ordinary address, and its own one
	// stays. So it does while ordinary pods want more addresses than there are.
	kubectl(t, c, "delete", "pod", "web-2", "-n", ns)
	if again := successor(t, c, was["web-2"]); slices.Contains(theirs, again.Status.PodIP) {
		t.Errorf("web-2 has %s", again.Status.PodIP)
	}
	until(t, "the address of web-2 to be retained", func(context.Context) bool {
		return podIPs(t, c)[was["web-2"].Status.PodIP].Status.Phase == v1alpha1.PodIPRetained
	})
	const beside = 70 // of 64 addresses
	deploy(t, c, ns, lab.Workload{Kind: "Deployment", Name: "beside", Replicas: beside, Unprobed: true})
	ordinary := func() (ready int) {
		t.Helper()
		list, err := c.Client().CoreV1().Pods(ns).List(testContext(t), metav1.ListOptions{LabelSelector: "app=beside"})
		must.Do(t, err)
		for i := range list.Items {
			if slices.Contains(theirs, list.Items[i].Status.PodIP) {
				t.Errorf("%s has %s", list.Items[i].Name, list.Items[i].Status.PodIP)
			}
			if lab.Ready(&list.Items[i]) {
				ready++
			}
		}
		return ready
	}
	free := func() int {
		n := 64
		for _, b := range blocks(t, c) {
			for _, at := range b.Spec.Allocations {
				if at != nil {
					n--
				}
			}
		}
		return n
	}
	until(t, "half of the addresses to be taken", func(context.Context) bool { return free() <= 32 })
	until(t, "no address to be free but that of web-2", func(context.Context) bool { return free() == 1 })
	t.Logf("%d of %d ordinary pods run", ordinary(), beside)

	// 4. The template asks for the pool: each pod comes back with its address, also on another node.
	who := askAlways(t, c, ns, "web-0", ip(t, was["web-0"]), 20*time.Millisecond)
	who.reached(t, was["web-0"])
	kubectl(t, c, "cordon", was["web-0"].Spec.NodeName)
	now := map[string]*corev1.Pod{}
	for name := range was {
		now[name] = getPod(t, c, ns, name)
	}
	kubectl(t, c, "patch", "statefulset", "web", "-n", ns, "--type=merge", "-p",
		`{"spec": {"template": {"metadata": {"annotations": {"stayput.io/pools": "blue"}}}}}`)
	rolled := places(t, c, ns, "web", 3, now)
	keptAddresses(t, was, rolled)
	for _, pod := range rolled {
		heldOn(t, c, pod)
		if ip := podIPs(t, c)[pod.Status.PodIP]; ip.Spec.AdoptedOn != "" {
			t.Errorf("%s: %+v", pod.Name, ip)
		}
	}
	kubectl(t, c, "uncordon", was["web-0"].Spec.NodeName)
	who.reached(t, rolled["web-0"])
	who.end(t)
	ordinary()
	unique(t, c)

	// 5. A reservation that is deleted is made again. An address that is given up is Calico's again.
	web1 := rolled["web-1"].Status.PodIP
	kubectl(t, c, "delete", "ipreservation.crd.projectcalico.org", "stayput-ip-"+web1)
	until(t, "the reservation to be there again", func(context.Context) bool { return reserved(web1) })
	kubectl(t, c, "scale", "deployment/beside", "--replicas=0", "-n", ns)
	scale(t, c, ns, "web", 2)
	until(t, "the address of web-2 to be free", func(context.Context) bool {
		_, there := podIPs(t, c)[rolled["web-2"].Status.PodIP]
		return !there && !reserved(rolled["web-2"].Status.PodIP)
	})
}
