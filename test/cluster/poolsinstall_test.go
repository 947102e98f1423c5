package cluster

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// held returns the PodIPs and pools that have a finalizer.
func held(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	return kubectl(t, c, "get", "podips,podippools", "-o",
		`jsonpath={range .items[?(@.metadata.finalizers)]}{.kind}/{.metadata.name} {end}`)
}

const poolKinds = "podippools.stayput.io podips.stayput.io podipaudits.stayput.io podipreports.stayput.io"

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

	// 4. If the rights go first, as by kubectl, kubectl stayput uninstall lets the definitions go.
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	early := namespace(t, c) // annotated before the policy is there that would label it
	kubectl(t, c, "annotate", "namespace", early, "stayput.io/pools=blue")
	kubectl(t, c, "apply", "--server-side", "-f", "../../deploy/pools-crds.yaml", "-f", "../../deploy/pools.yaml",
		"-f", "../../deploy/pools-gate-policies.yaml")
	until(t, "the controller to label the namespace", func(ctx context.Context) bool {
		is, err := c.Client().CoreV1().Namespaces().Get(ctx, early, metav1.GetOptions{})
		must.Do(t, err)
		_, ok := is.Labels[v1alpha1.LabelDefaultPools]
		return ok
	})
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
	kubectl(t, c, "delete", "-f", "../../deploy/pools.yaml", "-f", "../../deploy/pools-gate-policies.yaml")
	_, err = c.Helm(testContext(t), "uninstall", lab.Release, "--namespace="+lab.SystemNamespace, "--wait", "--no-hooks")
	must.Do(t, err)
	untouched(t, c, after)
	if n := len(strings.Fields(held(t, c))); n != 4 {
		t.Errorf("%d are held, want 4", n)
	}
	uninstallByHand(t, c)
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
