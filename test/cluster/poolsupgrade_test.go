//go:build long

package cluster

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

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
