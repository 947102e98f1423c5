package cluster

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestUninstallLeavesNoPodGatedAndNoNodeChanged(t *testing.T) {
	t.Parallel()
	folder, err := filepath.Abs("../../deploy")
	must.Do(t, err)
	install, gates := filepath.Join(folder, "install.yaml"), filepath.Join(folder, "gate-policies.yaml")
	definitions, ofOpenKruise := filepath.Join(folder, "crds.yaml"), filepath.Join(folder, "persistentpodstates.yaml")
	for _, how := range []struct {
		name           string
		install, again lab.InstallOptions
		uninstall      func(*testing.T, *lab.Cluster)
		// end uninstalls the second installation, with its definitions, under harder conditions.
		end func(*testing.T, *lab.Cluster)
	}{
		{"by Helm", lab.InstallOptions{}, lab.InstallOptions{Values: map[string]any{"crds": map[string]any{"keep": false}}},
			func(t *testing.T, c *lab.Cluster) {
				out, err := c.Uninstall(testContext(t))
				t.Log(out)
				must.Do(t, err)
				kubectl(t, c, "delete", "namespace", lab.SystemNamespace)
				if left := kubectl(t, c, "get", "retainedips", "-A", "-o", "name"); left != "" {
					t.Errorf("left: %s", left)
				}
			}, func(t *testing.T, c *lab.Cluster) {
				// A node without an agent is reported, and its RetainedIPs do not block the uninstallation.
				n := c.Nodes[1]
				must.Do(t, n.Agent.Stop(testContext(t)))
				out, err := c.Uninstall(testContext(t))
				t.Log(out)
				must.Do(t, err)
				want := "no agent is running on these nodes, which keep their promises: " + n.Name
				if !strings.Contains(out, want) {
					t.Errorf("Helm does not say %q", want)
				}
				if _, err := os.Stat(n.Path("/etc/cni/net.d/00-stayput.conflist")); err != nil {
					t.Errorf("the node without an agent: %v", err)
				}
				cleanByHand(t, c, n)
			}},
		{"by kubectl", lab.InstallOptions{Manifests: true}, lab.InstallOptions{Manifests: true},
			func(t *testing.T, c *lab.Cluster) {
				uninstallByHand(t, c)
				t.Log(kubectl(t, c, "delete", "-f", gates, "-f", install, "--ignore-not-found"))
			}, func(t *testing.T, c *lab.Cluster) {
				// In the wrong order, under running agents.
				if kubectl(t, c, "get", "retainedips", "-A", "-o", "name") == "" {
					t.Error("there are no RetainedIPs")
				}
				kubectl(t, c, "delete", "-f", definitions, "-f", ofOpenKruise, "--timeout=30s")
				uninstallByHand(t, c)
				kubectl(t, c, "delete", "-f", gates, "-f", install, "--ignore-not-found")
			}},
		{"by kubectl without a word", lab.InstallOptions{Manifests: true}, lab.InstallOptions{Manifests: true},
			func(t *testing.T, c *lab.Cluster) {
				kubectl(t, c, "delete", "-f", gates, "-f", install)
				if len(gatedPods(t, c)) == 0 {
					t.Error("the test is wrong: no pod is gated")
				}
				for _, n := range c.Nodes { // they go on as without an agent
					if _, err := os.Stat(n.Path("/etc/cni/net.d/00-stayput.conflist")); err != nil {
						t.Error(err)
					}
				}
				// Installed again, and removed in order.
				must.Do(t, c.Install(testContext(t), lab.InstallOptions{Manifests: true}))
				uninstallByHand(t, c)
				kubectl(t, c, "delete", "-f", gates, "-f", install, "--ignore-not-found")
			}, func(t *testing.T, c *lab.Cluster) {
				// Or cleared node by node. node-3 was cordoned as the last pods were placed.
				kubectl(t, c, "delete", "-f", gates, "-f", install)
				if said := uninstallByHand(t, c); !strings.Contains(said, "keep their promises: node-1, node-2\n") {
					t.Error("it does not name the nodes")
				}
				for _, n := range c.Nodes {
					cleanByHand(t, c, n)
				}
				kubectl(t, c, "delete", "-f", definitions, "-f", ofOpenKruise)
			}},
	} {
		t.Run(how.name, func(t *testing.T) {
			alone(t)
			c := ownCluster(t, &lab.ClusterOptions{})
			must.Do(t, c.Install(testContext(t), how.install))
			ns := namespace(t, c)

			// There are running pods, retained addresses, and pods that wait for a home that cannot take them.
			deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("1h")})
			deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 3})
			deploy(t, c, ns, lab.Workload{Name: "kept", Replicas: 3, Annotations: retain("1h")})
			web, plain := places(t, c, ns, "web", 6, nil), places(t, c, ns, "plain", 3, nil)
			places(t, c, ns, "kept", 3, nil)
			const waiting = 12
			kubectl(t, c, "cordon", "node-1")
			kubectl(t, c, "cordon", "node-2")
			deploy(t, c, ns, lab.Workload{
				Name: "waits", Replicas: waiting, Annotations: retain("1h", "stayput.io/home-wait", "1h"),
			})
			waits := places(t, c, ns, "waits", waiting, nil)
			kubectl(t, c, "uncordon", "node-1")
			kubectl(t, c, "uncordon", "node-2")
			kubectl(t, c, "cordon", "node-3")
			kubectl(t, c, "scale", "statefulset", "kept", "--replicas=0", "-n", ns)
			deletePods(t, c, ns, "waits")
			until(t, "all waiting pods to be gated", func(context.Context) bool {
				n := 0
				for _, name := range gatedPods(t, c) {
					if strings.HasPrefix(name, ns+"/waits-") {
						n++
					}
				}
				return n == waiting
			})
			end := stream(t, c, ns)
			until(t, "a stream of pods", func(context.Context) bool { return getPod(t, c, ns, "stream-20") != nil })

			start := time.Now()
			how.uninstall(t, c)
			t.Logf("uninstalled after %v, with %d pods created on the way", time.Since(start).Round(time.Millisecond), end())

			// No pod is gated, and none that ran was touched.
			var left []string
			until(t, "no pod to be gated", func(context.Context) bool {
				if now := gatedPods(t, c); !slices.Equal(now, left) {
					left = now
					t.Logf("gated: %v", left)
				}
				return len(left) == 0
			})
			moved := places(t, c, ns, "waits", waiting, waits)
			for name, pod := range moved {
				if pod.Spec.NodeName == "node-3" {
					t.Errorf("%s is on the cordoned node", name)
				}
			}
			untouched(t, c, web)
			untouched(t, c, plain)
			reaches(t, c, web["web-0"], moved["waits-0"])
			reaches(t, c, moved["waits-0"], web["web-1"])
			unique(t, c)

			// Only the definitions are left, as an uninstallation keeps them.
			for _, n := range c.Nodes {
				hostLocalAlone(t, c, n)
			}
			left = nil
			const kinds = "namespaces,configmaps,serviceaccounts,deployments,daemonsets,jobs,pods,poddisruptionbudgets," +
				"clusterroles,clusterrolebindings,roles,rolebindings," +
				"mutatingadmissionpolicies,mutatingadmissionpolicybindings," +
				"validatingadmissionpolicies,validatingadmissionpolicybindings"
			ours := kubectl(t, c, "get", "-A", "-o", "name", "-l", "app.kubernetes.io/part-of=stayput", kinds)
			for line := range strings.Lines(ours) {
				left = append(left, strings.TrimSpace(line))
			}
			if len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			kubectl(t, c, "get", "crd", "retainedips.stayput.io", "persistentpodstates.apps.kruise.io")
			// kubectl leaves the agents no time to delete them.
			t.Logf("RetainedIPs: %q", kubectl(t, c, "get", "retainedips", "-A", "-o", "name"))

			// host-local frees addresses that stayput allocated, and allocates the next ones.
			deletePods(t, c, ns, "web")
			again := places(t, c, ns, "web", 6, web)
			reaches(t, c, again["web-0"], moved["waits-0"])
			unique(t, c)
			for _, n := range c.Nodes {
				hostLocalAlone(t, c, n)
			}

			// Stayput can be installed again.
			kubectl(t, c, "uncordon", "node-3")
			must.Do(t, c.Install(testContext(t), how.again))
			promised(t, c, again)
			for _, pod := range again { // a node is a home once a controller has seen the pod there
				shows(t, c, ns, pod.Name, pod.Spec.NodeName, "to be a home", func(r *v1alpha1.RetainedIP) bool {
					return r.Spec.Scheduled != ""
				})
			}
			deletePods(t, c, ns, "web")
			last := places(t, c, ns, "web", 6, again)
			cameHome(t, again, last)

			how.end(t, c)
			for _, n := range c.Nodes {
				hostLocalAlone(t, c, n)
			}
			if left := kubectl(t, c, "get", "crd", "retainedips.stayput.io", "persistentpodstates.apps.kruise.io",
				"--ignore-not-found", "-o", "name"); left != "" {
				t.Errorf("left: %s", left)
			}
			untouched(t, c, last)
		})
	}
}

// uninstallByHand runs kubectl stayput uninstall and returns what it says.
func uninstallByHand(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	out := works(t, c, "default", "uninstall", "--yes")
	t.Log(out)
	return out
}

// cleanByHand cleans a node without an agent by the documented command.
func cleanByHand(t *testing.T, c *lab.Cluster, n *lab.ClusterNode) {
	t.Helper()
	version, err := lab.ChartVersion("../../deploy/chart")
	must.Do(t, err)
	t.Log(kubectl(t, c, "debug", "node/"+n.Name, "--attach", "--profile=sysadmin",
		"--image="+lab.ProductImage+":"+version, "--", "/stayput-agent", "uninstall", "--root=/proc/1/root"))
}
