package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// untouched checks that pods were neither replaced nor restarted.
func untouched(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	for name, was := range pods {
		is := ready(t, c, was.Namespace, name)
		if is.UID != was.UID || is.Status.PodIP != was.Status.PodIP || is.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s was %s with %s and is %s with %s, restarted %d times",
				name, was.UID, was.Status.PodIP, is.UID, is.Status.PodIP, is.Status.ContainerStatuses[0].RestartCount)
		}
	}
}

// promised waits until each pod's address is promised on its node and nowhere else: agents installed again correct the
// objects that an uninstallation by kubectl left.
func promised(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	for name, pod := range pods {
		until(t, "the address of "+name+" to be promised", func(ctx context.Context) bool {
			var all v1alpha1.RetainedIPList
			if err := typed(t, c).List(ctx, &all, client.InNamespace(pod.Namespace)); err != nil {
				return false
			}
			of := slices.DeleteFunc(all.Items, func(r v1alpha1.RetainedIP) bool { return r.Spec.PodName != name })
			return len(of) == 1 && bound(&of[0]) && of[0].Spec.NodeName == pod.Spec.NodeName &&
				of[0].Status.IPs[0] == pod.Status.PodIP
		})
	}
}

func TestPodsOfHostLocalKeepTheirAddressesWhenStayputIsInstalled(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	ns := namespace(t, c)
	// The annotation may be set before stayput is installed: it is ignored.
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("1h")})
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 3})
	web, plain := places(t, c, ns, "web", 6, nil), places(t, c, ns, "plain", 3, nil)

	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	untouched(t, c, web)
	untouched(t, c, plain)
	promised(t, c, web)

	// From now on they come home.
	for range 2 {
		deletePods(t, c, ns, "web")
		after := places(t, c, ns, "web", 6, web)
		cameHome(t, web, after)
		web = after
	}
	untouched(t, c, plain)
	// Ordinary pods end as before.
	deletePods(t, c, ns, "plain")
	plain = places(t, c, ns, "plain", 3, plain)
	unique(t, c)

	// The way back.
	kubectl(t, c, "scale", "statefulset", "web", "--replicas=4", "-n", ns)
	until(t, "two addresses to be retained", func(ctx context.Context) bool {
		said, err := c.Kubectl(ctx, "", "get", "retainedips", "-n", ns, "-o", "jsonpath={.items[*].status.phase}")
		return err == nil && strings.Count(said, "Retained") == 2 && strings.Count(said, "Bound") == 4
	})
	_, err := c.Uninstall(testContext(t))
	must.Do(t, err)
	delete(web, "web-4")
	delete(web, "web-5")
	untouched(t, c, web)
	untouched(t, c, plain)
	for _, n := range c.Nodes {
		hostLocalAlone(t, c, n)
	}
	deletePods(t, c, ns, "web")
	kubectl(t, c, "scale", "statefulset", "web", "--replicas=6", "-n", ns)
	after := places(t, c, ns, "web", 6, web)
	for i := range 6 {
		reaches(t, c, after["web-0"], after[fmt.Sprintf("web-%d", i)])
	}
	unique(t, c)
	for _, n := range c.Nodes {
		hostLocalAlone(t, c, n)
	}
}
