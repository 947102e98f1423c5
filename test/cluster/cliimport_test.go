package cluster

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	types "github.com/containernetworking/cni/pkg/types/100"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/cli"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// imported returns what import reports for a pod, and the exit code. Without --yes it is a dry run.
func imported(t *testing.T, c *lab.Cluster, pod string, args ...string) (inspection.ImportItem, int) {
	t.Helper()
	if !slices.Contains(args, "--yes") {
		args = append(args, "--dry-run=client")
	}
	s := anywhere(t, c, append([]string{"import", "-o", "json"}, args...)...)
	var is inspection.Import
	if err := json.Unmarshal([]byte(s.out), &is); err != nil {
		t.Fatalf("%v: %+v", err, s)
	}
	for _, i := range is.Items {
		if i.Pod == pod {
			return i, s.code
		}
	}
	t.Fatalf("no report for %s: %+v", pod, s)
	return inspection.ImportItem{}, 0
}

// served starts a pod on a node, from which stayput learns the network's ranges.
func served(t *testing.T, c *lab.Cluster, ns, node string) {
	t.Helper()
	deploy(t, c, ns, lab.Workload{Name: "first", Replicas: 1, Node: node})
	ready(t, c, ns, "first-0")
}

// reserve writes a reservation as OpenKruise's host-local does, whose source is not available as a Go module: with
// types.IPConfig of the CNI library, in directories without permissions.
func reserve(t *testing.T, n *lab.ClusterNode, ns, pod, container, ip string, released *time.Time) {
	t.Helper()
	file := n.Path("/var/lib/cni/networks/reserved/" + ns + "/" + pod)
	must.Do(t, os.MkdirAll(filepath.Dir(file), os.ModeDir))
	t.Cleanup(func() { must.Do(t, os.RemoveAll(n.Path("/var/lib/cni/networks/reserved"))) })
	reserved := struct {
		ContainerID string          `json:"containerId"`
		IfName      string          `json:"ifName"`
		IPConf      *types.IPConfig `json:"IPConf"`
		Duration    time.Duration   `json:"duration"` // minutes
		ReleaseTime *time.Time      `json:"releaseTime,omitempty"`
	}{
		ContainerID: container,
		IfName:      "eth0",
		IPConf: &types.IPConfig{
			Address: net.IPNet{IP: net.ParseIP(ip), Mask: net.CIDRMask(24, 32)},
			Gateway: net.ParseIP("10.244.3.1"),
		},
		Duration:    10,
		ReleaseTime: released,
	}
	b, err := json.Marshal(reserved)
	must.Do(t, err)
	must.Do(t, os.WriteFile(file, b, 0o644))
}

func TestImportKeepsTheReservationsOfOpenKruisesHostLocal(t *testing.T) {
	c := installed(t)
	node := c.Node("node-3")
	ns := namespace(t, c)
	served(t, c, ns, "node-3")
	now := time.Now()
	// A deleted pod whose address file is still bound to its old container; one whose file is gone, too; one whose
	// time is over; and one outside of every ledger's ranges.
	bound := node.Path("/var/lib/cni/networks/pods/10.244.3.200")
	must.Do(t, os.WriteFile(bound, []byte("0123456789abcdef\r\neth0"), 0o600))
	reserve(t, node, ns, "web-0", "0123456789abcdef", "10.244.3.200", &now)
	reserve(t, node, ns, "web-1", "fedcba9876543210", "10.244.3.201", &now)
	old := now.Add(-time.Hour)
	reserve(t, node, ns, "web-2", "fedcba9876543211", "10.244.3.202", &old)
	reserve(t, node, ns, "web-3", "fedcba9876543212", "10.99.0.1", &now)

	for pod, want := range map[string]inspection.Action{
		"web-0": inspection.ActionRetain, "web-1": inspection.ActionRetain, "web-2": inspection.ActionNone,
		"web-3": inspection.ActionRefuse,
	} {
		i, code := imported(t, c, pod, "openkruise", "node-3")
		if i.Action != want || i.Done || code != 0 {
			t.Errorf("the plan for %s is %+v (%d)", pod, i, code)
		}
		if warns := strings.Contains(i.Why, "the pod is not placed on it"); warns != (want == inspection.ActionRetain) {
			t.Errorf("the plan for %s says %q", pod, i.Why)
		}
	}
	if b, err := os.ReadFile(bound); err != nil || string(b) != "0123456789abcdef\r\neth0" {
		t.Fatalf("a plan has changed the file: %q, %v", b, err)
	}
	if i, code := imported(t, c, "web-0", "openkruise", "node-3", "--yes"); !i.Done || code != 1 { // web-3 is refused
		t.Errorf("done is %+v (%d)", i, code)
	}
	for pod, ip := range map[string]string{"web-0": "10.244.3.200", "web-1": "10.244.3.201"} {
		r := shows(t, c, ns, pod, "node-3", "retained", retained)
		if r.Status.IPs[0] != ip || r.Spec.Retention != "10m" || r.Spec.Scheduled != "" {
			t.Errorf("for %s is kept %+v %+v", pod, r.Spec, r.Status)
		}
		if i, _ := imported(t, c, pod, "openkruise", "node-3", "--yes"); i.Action != inspection.ActionNone ||
			!strings.Contains(i.Why, "already") {
			t.Errorf("a second time: %+v", i)
		}
	}
	if r, code := checked(t, c, "node-3"); code != 0 || level(r, "node-3", "ledger") != cli.LevelOK {
		t.Errorf("check says %+v", r)
	}

	// They have their addresses again there, though the node alone says that they were there.
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 2, Annotations: map[string]string{"io.kubernetes.cri/reserved-ip-duration": "10"},
		Node: "node-3",
	})
	for pod, ip := range map[string]string{"web-0": "10.244.3.200", "web-1": "10.244.3.201"} {
		if p := ready(t, c, ns, pod); p.Spec.NodeName != "node-3" || p.Status.PodIP != ip {
			t.Errorf("%s came to %s with %s", pod, p.Spec.NodeName, p.Status.PodIP)
		}
	}
}

func TestImportPromisesARunningPodItsAddress(t *testing.T) {
	c := installed(t)
	node := c.Node("node-3")
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Node: "node-3"})
	pod := ready(t, c, ns, "web-0")
	// The patched host-local leaves the previous container in the address file after a restore.
	address := node.Path("/var/lib/cni/networks/pods/" + pod.Status.PodIP)
	must.Do(t, os.Remove(address)) // the ledger does not notice a file changed in place
	must.Do(t, os.WriteFile(address, []byte("0123456789abcdee\r\neth0"), 0o600))
	id := sandbox(t, c, pod).ID
	reserve(t, node, ns, "web-0", id, pod.Status.PodIP, nil)
	if i, code := imported(t, c, "web-0", "openkruise", "node-3"); i.Action != inspection.ActionBind || code != 0 {
		t.Errorf("the plan is %+v (%d)", i, code)
	}
	if i, code := imported(t, c, "web-0", "openkruise", "node-3", "--yes"); !i.Done || code != 0 {
		t.Errorf("done is %+v (%d)", i, code)
	}
	if b, err := os.ReadFile(address); err != nil || string(b) != id+"\r\neth0" {
		t.Errorf("the address file says %q, %v", b, err)
	}
	shows(t, c, ns, "web-0", "node-3", "bound to the pod", boundTo(pod))
	if answer, err := node.Get(testContext(t), ip(t, pod)); err != nil || answer.Name != pod.Name {
		t.Errorf("the pod answers %v, %v", answer, err)
	}
	if r, code := checked(t, c, "node-3"); code != 0 || level(r, "node-3", "ledger") != cli.LevelOK {
		t.Errorf("check says %+v", r)
	}
	stopped(t, c, pod)
}

// The part of Spiderpool's definition that import reads; the lab has no Spiderpool.
const spiderEndpointCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: spiderendpoints.spiderpool.spidernet.io}
spec:
  group: spiderpool.spidernet.io
  scope: Namespaced
  names: {kind: SpiderEndpoint, listKind: SpiderEndpointList, plural: spiderendpoints, singular: spiderendpoint, shortNames: [se]}
  versions:
  - name: v2beta1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          status: {type: object, x-kubernetes-preserve-unknown-fields: true}
`

func spiderEndpoint(pod, node, ip, owner string) string {
	return fmt.Sprintf(`
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderEndpoint
metadata: {name: %s}
status:
  ownerControllerType: %s
  ownerControllerName: web
  current: {uid: a-uid, node: %s, ips: [{interface: eth0, ipv4: %s/16, ipv4Pool: pool, vlan: 0}]}
`, pod, owner, node, ip)
}

func TestImportKeepsTheAddressesOfSpiderEndpoints(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	if s := anywhere(t, c, "import", "spiderpool", "--yes"); s.code != 1 ||
		!strings.Contains(s.err, "Spiderpool is not installed in this cluster") {
		t.Errorf("without Spiderpool: %+v", s)
	}
	served(t, c, ns, "node-3")
	apply(t, c, ns, spiderEndpointCRD)
	atEnd(t, c, "delete", "crd", "spiderendpoints.spiderpool.spidernet.io")
	must.Do(t, c.WaitForCRDs(testContext(t)))
	apply(t, c, ns, spiderEndpoint("web-0", "node-3", "10.244.3.210", "StatefulSet"))
	apply(t, c, ns, spiderEndpoint("web-1", "node-3", "10.6.0.10", "StatefulSet"))
	apply(t, c, ns, spiderEndpoint("web-5f7d-x2", "node-3", "10.244.3.211", "Deployment"))
	deploy(t, c, ns, lab.Workload{Name: "web", Node: "node-3"})

	for pod, why := range map[string]string{
		"web-1": "is not in the ranges of any network", "web-5f7d-x2": "no pod of this name will be created again",
	} {
		if i, _ := imported(t, c, pod, "spiderpool"); i.Action != inspection.ActionRefuse || !strings.Contains(i.Why, why) {
			t.Errorf("%s: %+v", pod, i)
		}
	}
	if i, _ := imported(t, c, "web-0", "spiderpool", "--yes", "--retain-ip=20m"); i.Action != inspection.ActionRetain ||
		!i.Done || i.Network != "pods" {
		t.Errorf("%+v", i)
	}
	r := shows(t, c, ns, "web-0", "node-3", "retained", retained)
	if r.Status.IPs[0] != "10.244.3.210" || r.Spec.Retention != "20m" {
		t.Errorf("kept is %+v %+v", r.Spec, r.Status)
	}
	works(t, c, ns, "release", "web-0", "--yes")
}
