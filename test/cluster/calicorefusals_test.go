//go:build calico

package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// native are Calico's definitions as native ones have them from 3.32 on: in the other API group, with one other name.
// Those themselves are not in the version that the lab builds.
func native(definitions string) string {
	return strings.NewReplacer("crd.projectcalico.org", "projectcalico.org", "  - name: v1\n", "  - name: v3\n",
		"IPAMConfig", "IPAMConfiguration", "ipamconfig", "ipamconfiguration").Replace(definitions)
}

// calicoObjects are what Calico has in an API group: its pool, whether it may be used, and a pod that it has given an
// address of the block to.
func calicoObjects(group string, ready bool, pod string) string {
	free := "0"
	for i := 2; i < 64; i++ {
		free += fmt.Sprintf(", %d", i)
	}
	return fmt.Sprintf(`
apiVersion: %[1]s
kind: IPPool
metadata: {name: default-ipv4-ippool}
spec: {cidr: 10.244.0.0/16, blockSize: 26}
---
apiVersion: %[1]s
kind: ClusterInformation
metadata: {name: default}
spec: {datastoreReady: %[2]t}
---
apiVersion: %[1]s
kind: IPAMBlock
metadata: {name: 10-244-240-0-26}
spec:
  cidr: 10.244.240.0/26
  strictAffinity: false
  deleted: false
  allocations: [null, 0%[4]s]
  unallocated: [%[5]s]
  attributes: [{handle_id: k8s-pod-network.aa, secondary: {namespace: default, node: node-1, pod: %[3]s}}]
`, group, ready, pod, strings.Repeat(", null", 62), free)
}

// Calico's definitions and objects without Calico: what it does is not asked for here.
func TestCalicoIPAMThatCannotServeGivesNothingAndIsSaid(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{Nodes: 1})
	logIfFailed(t, c)
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: calicoOn}))
	ns := namespace(t, c)
	const v1, v3 = "crd.projectcalico.org/v1", "projectcalico.org/v3"
	definitions, err := lab.CalicoDefinitions(testContext(t))
	must.Do(t, err)
	have := func(yaml string) {
		t.Helper()
		_, err := c.Kubectl(testContext(t), yaml, "apply", "--server-side", "--force-conflicts", "-f", "-")
		must.Do(t, err)
		must.Do(t, c.WaitForCRDs(testContext(t)))
	}
	crowds, given := 0, 0
	refuses := func(text string) {
		t.Helper()
		poolSays(t, c, "blue", "False", text)
		name := fmt.Sprintf("asks%d", crowds)
		crowd(t, c, ns, name, "blue", 0, 1)
		saysOf(t, c, ns, "Pod", name+"-0", "WaitingForAddress", text)
		if has := len(podIPs(t, c)); has != given {
			t.Errorf("%d PodIPs, %d before", has, given)
		}
		crowds++
	}
	goesOn := func() {
		t.Helper()
		poolSays(t, c, "blue", "True", "")
		until(t, "all pods to have addresses", func(context.Context) bool {
			for i := range crowds {
				if has, _ := letGo(t, c, ns, fmt.Sprintf("asks%d", i)); len(has) != 1 {
					return false
				}
			}
			return len(podIPs(t, c)) == crowds
		})
		given = crowds
		for addr := range podIPs(t, c) {
			if addr == "10.244.240.1" || !strings.HasPrefix(addr, "10.244.240.") {
				t.Errorf("%s was given", addr)
			}
		}
	}
	// The pool has no more addresses than pods that ask, and the one that Calico has given.
	apply(t, c, ns, `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue}
spec: {mode: Calico, subnet: 10.244.240.0/26, addresses: [10.244.240.1-10.244.240.5]}
`)

	// 1. An API server without Calico's objects: they are in an etcd of its own.
	refuses("keeps its data in an etcd of its own, which is not supported")

	// 2. Without the right to read them.
	const role = "stayput-controller-pools-calico"
	may := func(rules string) {
		t.Helper()
		kubectl(t, c, "patch", "clusterrole", role, "--type=json", "-p",
			`[{"op": "replace", "path": "/rules", "value": `+rules+`}]`)
	}
	all := kubectl(t, c, "get", "clusterrole", role, "-o", "jsonpath={.rules}")
	may("[]")
	have(definitions)
	have(calicoObjects(v1, true, "ordinary"))
	refuses("install stayput with pools.calico=true")
	may(all)
	goesOn()

	// 3. Locked, as Calico's own migration does.
	lock := func(group string, locked bool) {
		t.Helper()
		kubectl(t, c, "patch", "clusterinformation."+group, "default", "--type=merge", "-p",
			fmt.Sprintf(`{"spec": {"datastoreReady": %t}}`, !locked))
	}
	lock("crd.projectcalico.org", true)
	refuses("datastore is locked")
	lock("crd.projectcalico.org", false)
	goesOn()

	// 4. Moved to the other API group: both are locked while the objects are copied, the first one until it is deleted.
	lock("crd.projectcalico.org", true)
	have(native(definitions))
	have(calicoObjects(v3, false, "ordinary"))
	refuses("datastore is locked")
	lock("projectcalico.org", false)
	kubectl(t, c, "get", "crd", "ipamblocks.crd.projectcalico.org")
	goesOn()
	kubectl(t, c, "get", "ipreservation.projectcalico.org", "stayput-blue")
	for name := range strings.FieldsSeq(kubectl(t, c, "get", "crd", "-o", "name")) {
		if strings.HasSuffix(name, ".crd.projectcalico.org") {
			kubectl(t, c, "delete", name)
		}
	}
	stays(t, "the pool is Ready", looks, func() bool {
		return strings.HasPrefix(readiness(t, c, "blue"), "True")
	})
	kubectl(t, c, "delete", "pod", "asks0-0", "-n", ns) // its address is free at once: it never had a node
	crowd(t, c, ns, fmt.Sprintf("asks%d", crowds), "blue", 0, 1)
	until(t, "the next pod to have its address", func(context.Context) bool {
		has, _ := letGo(t, c, ns, fmt.Sprintf("asks%d", crowds))
		return len(has) == 1
	})

	// 5. Gone at all.
	kubectl(t, c, "delete", "crd", "ipamblocks.projectcalico.org")
	poolSays(t, c, "blue", "False", "keeps its data in an etcd of its own")
}
