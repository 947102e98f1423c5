package cluster

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// kept lists sets of annotations, and whether they keep the addresses of pods that their workload does not want for a
// while: because it is scaled down or to zero, or deleted.
var kept = []struct {
	name            string
	annotations     map[string]string
	scaled, deleted bool // whether they are kept
}{
	{"a duration", retain("10m"), true, true},
	{"a duration, released when scaled",
		retain("10m", "stayput.io/when-scaled", "Release"), false, true},
	{"a duration, released when deleted",
		retain("10m", "stayput.io/when-deleted", "Delete"), true, false},
	{"while owned", retain("while-owned"), false, false},
	{"while owned, retained when scaled",
		retain("while-owned", "stayput.io/when-scaled", "Retain"), true, false},
	{"while owned, retained when deleted",
		retain("while-owned", "stayput.io/when-deleted", "Retain"), false, true},
}

// freedOrKept checks that the addresses of ended pods are freed or kept.
func freedOrKept(t *testing.T, c *lab.Cluster, ns string, pods []*corev1.Pod, keep bool) {
	t.Helper()
	become(t, c, ns, pods, keep)
	if keep {
		stayKept(t, c, ns, pods)
	}
}

// become waits until the addresses of ended pods are freed or retained.
func become(t *testing.T, c *lab.Cluster, ns string, pods []*corev1.Pod, keep bool) {
	t.Helper()
	for _, pod := range pods {
		if keep {
			shows(t, c, ns, pod.Name, pod.Spec.NodeName, "retained", retained)
			continue
		}
		until(t, "the RetainedIP of "+pod.Name+" to be deleted", func(context.Context) bool {
			return retainedIP(t, c, ns, pod.Name, pod.Spec.NodeName) == nil
		})
		freed(t, c.Node(pod.Spec.NodeName), &v1alpha1.RetainedIP{Status: v1alpha1.RetainedIPStatus{
			IPs: []string{pod.Status.PodIP}, Addresses: []v1alpha1.NetworkAddresses{{Network: "pods"}},
		}})
	}
}

// stayKept checks that retained addresses are not released, which may come late.
func stayKept(t *testing.T, c *lab.Cluster, ns string, pods []*corev1.Pod) {
	t.Helper()
	time.Sleep(2 * time.Second)
	for _, pod := range pods {
		if r := retainedIP(t, c, ns, pod.Name, pod.Spec.NodeName); r == nil || r.Spec.Release != "" {
			t.Errorf("the address of %s is released", pod.Name)
		}
	}
}

func values(pods map[string]*corev1.Pod) (all []*corev1.Pod) {
	for _, pod := range pods {
		all = append(all, pod)
	}
	return all
}

// The workloads of all policies go through each step together.
func TestAddressesOfUnwantedPodsFollowTheirPolicy(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	pods := make([]map[string]*corev1.Pod, len(kept)) // of each workload
	set := func(i int) string { return strings.NewReplacer(",", "", " ", "-").Replace(kept[i].name) }
	// each does something for every workload.
	each := func(do func(i int, set string)) {
		t.Helper()
		for i := range kept {
			do(i, set(i))
		}
	}
	run := func(home func(policy int) bool) {
		t.Helper()
		each(func(i int, set string) {
			after := places(t, c, ns, set, 2, pods[i])
			if home(i) {
				cameHome(t, pods[i], after)
			}
			pods[i] = after
			for _, pod := range after {
				shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound", boundTo(pod))
			}
		})
	}
	// follow checks what becomes of the addresses of pods from the first ordinal on.
	follow := func(first int, keep func(policy int) bool) {
		t.Helper()
		var all []*corev1.Pod
		each(func(i int, set string) {
			ended := values(pods[i])
			if first == 1 {
				ended = []*corev1.Pod{pods[i][set+"-1"]}
			}
			become(t, c, ns, ended, keep(i))
			if keep(i) {
				all = append(all, ended...)
			}
		})
		stayKept(t, c, ns, all)
	}
	scaled := func(i int) bool { return kept[i].scaled }
	deleted := func(i int) bool { return kept[i].deleted }
	start := func() {
		each(func(i int, set string) {
			deploy(t, c, ns, lab.Workload{
				Name: set, Replicas: 2, Annotations: kept[i].annotations,
			})
		})
	}

	kubectl(t, c, "cordon", "node-3") // later the emptiest node
	start()
	run(func(int) bool { return false })
	kubectl(t, c, "uncordon", "node-3")

	each(func(_ int, set string) { scale(t, c, ns, set, 1) })
	follow(1, scaled)
	each(func(_ int, set string) { scale(t, c, ns, set, 0) })
	follow(0, scaled)
	each(func(_ int, set string) { scale(t, c, ns, set, 2) })
	run(scaled)

	each(func(_ int, set string) { kubectl(t, c, "delete", "statefulset", set, "-n", ns) })
	follow(0, deleted)
	start()
	run(deleted)
}

func TestAnAddressWhoseObjectWasDeletedIsFreedWithItsWorkload(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("while-owned", "stayput.io/when-scaled", "Retain"),
	})
	pod := ready(t, c, ns, "web-0")
	shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound", boundTo(pod))
	scale(t, c, ns, "web", 0)
	was := shows(t, c, ns, pod.Name, pod.Spec.NodeName, "retained", retained)
	kubectl(t, c, "delete", "retainedip", was.Name, "-n", ns)
	shows(t, c, ns, pod.Name, pod.Spec.NodeName, "published again, with its workload", func(r *v1alpha1.RetainedIP) bool {
		return r.UID != was.UID && retained(r) && r.Spec.Release == "" && r.Spec.Workload != nil &&
			r.Spec.Workload.Name == "web"
	})
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	freedOrKept(t, c, ns, []*corev1.Pod{pod}, false)
}

func TestOrphansKeepTheirAddresses(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("while-owned")})
	for _, pod := range before {
		shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound", boundTo(pod))
	}
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns, "--cascade=orphan")
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-1", metav1.DeleteOptions{}))
	freedOrKept(t, c, ns, []*corev1.Pod{before["web-1"]}, true) // web-0 is there
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Annotations: retain("while-owned")})
	after := places(t, c, ns, "web", 2, map[string]*corev1.Pod{"web-1": before["web-1"]})
	cameHome(t, before, after)
	if after["web-0"].UID != before["web-0"].UID {
		t.Error("web-0 was not adopted")
	}
}

func TestPodsOfASharedIdentityComeBackToItsAddresses(t *testing.T) {
	goOn := later(t)
	c := installed(t)
	ns := namespace(t, c)
	kubectl(t, c, "cordon", "node-3")
	deploy(t, c, ns, lab.Workload{
		Kind: "Deployment", Name: "front", Replicas: 3, Annotations: retain("while-owned", "stayput.io/identity", "front"),
	})
	before := deployed(t, c, ns, "front", 3, nil)
	kubectl(t, c, "uncordon", "node-3")
	// The controller learns the Deployment from the pod's ReplicaSet, which must still exist then.
	belong := func(pods []*corev1.Pod) {
		for _, pod := range pods {
			r := shows(t, c, ns, pod.Name, pod.Spec.NodeName, "bound, with its Deployment", func(r *v1alpha1.RetainedIP) bool {
				return bound(r) && r.Spec.Workload != nil
			})
			if r.Spec.Identity != "front" || r.Spec.Workload.Kind != "Deployment" || r.Spec.Workload.Name != "front" {
				t.Errorf("%s belongs to %+v", r.Name, r.Spec)
			}
		}
	}
	belong(before)
	scaleDeployment := func(replicas string) {
		kubectl(t, c, "scale", "deployment/front", "--replicas="+replicas, "-n", ns)
	}
	scaleDeployment("0")
	for _, pod := range before {
		shows(t, c, ns, pod.Name, pod.Spec.NodeName, "retained", retained)
	}
	scaleDeployment("3")
	after := deployed(t, c, ns, "front", 3, before)
	sameTogether(t, before, after)
	belong(after)
	kubectl(t, c, "delete", "deployment", "front", "-n", ns)
	goOn() // the controller asks for a Deployment once a minute
	freedOrKept(t, c, ns, after, false)
}

func TestWhileOwnedNeedsPodsThatKeepTheirNames(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Kind: "Deployment", Name: "front", Replicas: 1, Annotations: retain("while-owned")})
	pod := deployed(t, c, ns, "front", 1, nil)[0]
	message := saysOf(t, c, ns, "Pod", pod.Name, "WhileOwnedWithoutOrdinal")
	if !strings.Contains(message, "stayput.io/identity") {
		t.Errorf("the Event says %q", message)
	}
	kubectl(t, c, "delete", "deployment", "front", "-n", ns)
	freedOrKept(t, c, ns, []*corev1.Pod{pod}, false)
}
