package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

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
