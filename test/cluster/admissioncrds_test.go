package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/must"
)

// overflows reports whether the value would be a Go duration if it were not longer than 292 years. The policy's pattern
// only catches much larger ones; for these, the API server reports an error of its own.
func overflows(value string) bool {
	return slices.Contains([]string{
		"2562048h", "2562047h48m", "9223372036854775808ns", "9223372037s", "153722868m", "9999999h",
	}, value)
}

func TestTheCRDsRefuseWhatMakesNoSense(t *testing.T) {
	g := guardedWith(t, true)
	target := "{apiVersion: apps/v1, kind: StatefulSet, name: new}"
	state := func(target, rest string) string {
		return fmt.Sprintf("{apiVersion: apps.kruise.io/v1alpha1, kind: PersistentPodState, metadata: {name: new}, "+
			"spec: {targetRef: %s%s}}", target, rest)
	}
	preferred := func(weight int) string {
		return fmt.Sprintf(", preferredPersistentTopology: [{weight: %d, preference: {nodeTopologyKeys: [zone]}}]", weight)
	}
	const required = ", requiredPersistentTopology: {nodeTopologyKeys: [zone]}"
	many := ""
	for i := range 65 {
		many += fmt.Sprintf("label-%d: x, ", i)
	}
	newer := func(yaml string) string { return strings.Replace(yaml, "/v1alpha1", "/v1beta1", 1) }
	for _, c := range []struct {
		name, refusal string
		do            try
	}{
		{"weight 0", "weight", create(state(target, preferred(0)))},
		{"weight 1", "", create(state(target, preferred(1)))},
		{"weight 100", "", create(state(target, preferred(100)))},
		{"weight 101", "weight", create(state(target, preferred(101)))},
		{"no target", "targetRef",
			create("{apiVersion: apps.kruise.io/v1alpha1, kind: PersistentPodState, metadata: {name: new}, " +
				"spec: {requiredPersistentTopology: {nodeTopologyKeys: [zone]}}}")},
		{"an empty target", "targetRef.name: Required", create(state("{}", required))},
		{"a target of empty strings", "at least 1 chars", create(state(`{apiVersion: "", kind: "", name: ""}`, required))},
		{"a target without a name", "targetRef.name: Required",
			create(state("{apiVersion: apps/v1, kind: StatefulSet}", required))},
		{"another target", "targetRef is immutable", merge(ppsKind, "web", "{spec: {targetRef: {name: other}}}")},
		{"a Deployment", "no stable names", create(state("{apiVersion: apps/v1, kind: Deployment, name: web}", required))},
		{"a ReplicaSet", "no stable names", create(state("{apiVersion: apps/v1, kind: ReplicaSet, name: web}", required))},
		{"a kind of the same name in another group", "",
			create(state("{apiVersion: example.com/v1, kind: Deployment, name: web}", required))},
		{"no topology", "at least one of", create(state(target, ""))},
		{"an empty list of topologies", "at least one of", create(state(target, ", preferredPersistentTopology: []"))},
		{"a topology without keys", "at least 1 items",
			create(state(target, ", requiredPersistentTopology: {nodeTopologyKeys: []}"))},
		{"keys by both names", "expected either keys",
			create(state(target, ", requiredPersistentTopology: {nodeTopologyKeys: [zone], keys: [zone]}"))},
		{"keys by no name", "expected either keys", create(state(target, ", requiredPersistentTopology: {}"))},
		{"keys by v1beta1's name", "", create(newer(state(target, ", requiredPersistentTopology: {keys: [zone]}")))},
		{"a preference by v1beta1's name", "",
			create(newer(state(target, ", preferredPersistentTopology: [{weight: 1, preference: {keys: [zone]}}]")))},
		{"no keys by v1beta1's name", "at least 1 items",
			create(newer(state(target, ", requiredPersistentTopology: {keys: []}")))},
		{"weight 0 in v1beta1", "weight", create(newer(state(target, preferred(0))))},
		{"another target in v1beta1", "targetRef is immutable",
			merge("PersistentPodState.v1beta1.apps.kruise.io", "web", "{spec: {targetRef: {name: other}}}")},
		{"an unknown retention policy", "persistentPodStateRetentionPolicy",
			create(state(target, required+", persistentPodStateRetentionPolicy: Never"))},
		{"the topology changes", "",
			merge(ppsKind, "web", "{spec: {requiredPersistentTopology: {nodeTopologyKeys: [kubernetes.io/hostname]}}}")},
		{"a RetainedIP moves to another node", "spec.nodeName is immutable",
			merge(retipKind, "web-0.node-1", "{spec: {nodeName: node-2}}")},
		{"a RetainedIP with an unknown phase", "status.phase", merge(retipKind, "web-0.node-1", "{status: {phase: Free}}")},
		{"a pool", "", create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.0.1-10.7.0.9, 10.7.1.0/24], gateway: 10.7.2.1`))},
		{"a pool of IPv6", "", create(newPool(`mode: Routed, subnet: "fd00:7::/64", addresses: ["fd00:7::1-fd00:7::9"]`))},
		{"a pool without a mode", "spec.mode", create(newPool(`subnet: 10.7.0.0/16`))},
		{"a pool of an unknown mode", "spec.mode", create(newPool(`mode: L3, subnet: 10.7.0.0/16`))},
		{"a pool without a subnet", "spec.subnet", create(newPool(`mode: L2`))},
		{"a pool whose subnet has host bits", "expected a CIDR without host bits", create(newPool(`mode: L2, subnet: 10.7.0.1/16`))},
		{"a pool of IPv4-mapped addresses", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::ffff:10.7.0.0/112"`))},
		{"a pool of them in capitals", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::FFFF:0a07:0/112"`))},
		{"a pool that contains them", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::/64"`))},
		{"a pool of all addresses", "IPv4-mapped addresses (::ffff:0:0/96)", create(newPool(`mode: L2, subnet: "::/0"`))},
		{"a pool with a mapped address", "expected an address, a range",
			create(newPool(`mode: L2, subnet: "fd00:7::/64", addresses: ["::ffff:10.7.0.1"]`))},
		{"a pool with many labels to select", "expected at most 64 labels and 64 expressions",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, nodeSelector: {matchLabels: {` + many + `}}`))},
		{"a RetainedIP of a long name", "Too long", merge(retipKind, "web-0.node-1", `{spec: {podName: `+strings.Repeat("x", 254)+`}}`)},
		{"a RetainedIP with many addresses", "must have at most 256 items",
			merge(retipKind, "web-0.node-1", `{status: {ips: [`+strings.Repeat("10.0.0.1, ", 257)+`]}}`)},
		{"a PersistentPodState with many keys", "must have at most 16 items",
			create(state(target, `, requiredPersistentTopology: {nodeTopologyKeys: [`+strings.Repeat("zone, ", 17)+`]}`))},
		{"a pool with an address outside", "addresses: expected addresses in subnet",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: [10.8.0.1]`))},
		{"a pool with an address of the other family", "addresses: expected addresses in subnet",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: ["fd00::1"]`))},
		{"a pool with no address", "expected an address, a range",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, addresses: [web]`))},
		{"a pool whose gateway is outside", "gateway: expected an address in subnet",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, gateway: 10.8.0.1`))},
		{"a routed pool with a gateway", "gateway and routes are for mode L2",
			create(newPool(`mode: Routed, subnet: 10.7.0.0/16, gateway: 10.7.0.1`))},
		{"a pool with a route without a destination", "spec.routes[0].dst",
			create(newPool(`mode: L2, subnet: 10.7.0.0/16, routes: [{dst: x, gw: 10.7.0.1}]`))},
		{"a pool moves", "spec.subnet is immutable", merge(poolKind, "blue", `{spec: {subnet: 10.0.0.0/8}}`)},
		{"a pool gets another mode", "spec.mode is immutable", merge(poolKind, "blue", `{spec: {mode: Routed, gateway: null}}`)},
		{"a pool grows", "", merge(poolKind, "blue", `{spec: {addresses: [10.6.0.0/17]}}`)},
		{"a PodIP", "", create(newPodIP("10.6.168.105"))},
		{"a PodIP of IPv6", "", create(newPodIP("fd00-0000-0000-0000-0000-0000-0000-0001"))},
		{"a PodIP of a short IPv6 address", "metadata.name: expected", create(newPodIP("fd00--1"))},
		{"a PodIP with a leading zero", "metadata.name: expected", create(newPodIP("010.6.168.105"))},
		{"a PodIP of a name", "metadata.name: expected", create(newPodIP("web.a"))},
		{"a PodIP whose node has no prefix", "status.podCIDR: expected a CIDR",
			merge(podIPKind, "10.8.168.102", `{status: {podCIDR: 10.244.2.1}}`, "status")},
		{"a PodIP changes its pool", "spec.pool is immutable", merge(podIPKind, "10.6.168.101", `{spec: {pool: green}}`)},
		{"a PodIP with a retention that is no duration", "spec.retention",
			create(`{apiVersion: stayput.io/v1alpha1, kind: PodIP, metadata: {name: 10.6.168.109}, spec: {pool: blue, mode: L2, namespace: guarded, podName: web-9, podUID: u, interface: eth0, retention: forever}}`)},
		{"a PodIPReport with an epoch that clients cannot read", "spec.epoch",
			create(`{apiVersion: stayput.io/v1alpha1, kind: PodIPReport, metadata: {name: node-9}, spec: {epoch: "2026-01-01T00:00:00Z"}}`)},
		{"a second PodIPAudit", "metadata.name: expected cluster",
			create(`{apiVersion: stayput.io/v1alpha1, kind: PodIPAudit, metadata: {name: other}, spec: {epoch: "2026-01-01T00:00:00.000001Z", phase: Settled, mark: "2026-01-01T00:00:00.000000Z"}}`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.do(testContext(t), g, g.admin)
			switch {
			case c.refusal == "":
				must.Do(t, err)
			case !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.refusal):
				t.Errorf("%v, want a refusal with %q", err, c.refusal)
			}
		})
	}
}

// The manifests of OpenKruise's manual, user-manuals/persistentpodstate, with other images, and one of the version that
// newer releases have.
const kruiseManual = `
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata:
  name: echoserver
  namespace: elsewhere
spec:
  targetRef:
    # Native k8s or kruise StatefulSet
    # only support StatefulSet
    apiVersion: apps.kruise.io/v1beta1
    kind: StatefulSet
    name: echoserver
  # required node affinity, as follows: Pod rebuild will force deployment to the same zone
  requiredPersistentTopology:
    nodeTopologyKeys:
      - failure-domain.beta.kubernetes.io/zone[,other node labels]
  # preferred node affinity, as follows: Pod rebuild will prefer deployment to the same node
  preferredPersistentTopology:
    - preference:
        nodeTopologyKeys:
          - kubernetes.io/hostname[,other node labels]
      # int [1 - 100]
      weight: 100
---
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata:
  name: game
  namespace: elsewhere
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: game}
  persistentPodAnnotations:
  - key: cni.projectcalico.org/podIP
  persistentPodStateRetentionPolicy: WhenScaled
  preferredPersistentTopology:
  - preference: {nodeTopologyKeys: [kubernetes.io/hostname]}
    weight: 100
---
apiVersion: apps.kruise.io/v1beta1
kind: PersistentPodState
metadata:
  name: newer
  namespace: elsewhere
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: newer}
  requiredPersistentTopology: {keys: [topology.kubernetes.io/zone]}
  preferredPersistentTopology:
  - preference: {keys: [kubernetes.io/hostname]}
    weight: 100
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: echoserver
  namespace: elsewhere
  annotations:
    kruise.io/auto-generate-persistent-pod-state: "true"
    kruise.io/preferred-persistent-topology: kubernetes.io/hostname[,other node labels]
    kruise.io/required-persistent-topology: failure-domain.beta.kubernetes.io/zone[,other node labels]
spec:
  serviceName: echoserver
  replicas: 0
  selector: {matchLabels: {app: echoserver}}
  template:
    metadata:
      labels: {app: echoserver}
      annotations:
        io.kubernetes.cri/reserved-ip-duration: "10"
    spec: {containers: [{name: echoserver, image: i}]}
`

func TestTheManifestsOfOpenKruisesManualApply(t *testing.T) {
	g := guardedWith(t, true)
	_, err := g.c.Kubectl(testContext(t), kruiseManual, "apply", "--server-side", "-f", "-")
	must.Do(t, err)
	_, err = g.c.Kubectl(testContext(t), kruiseManual, "apply", "-f", "-") // client-side, as most people do
	must.Do(t, err)
}

func TestKubectlShowsTheColumnsAndDescriptions(t *testing.T) {
	g := guardedWith(t, true)
	fields := func(args ...string) (rows [][]string) {
		for line := range strings.Lines(kubectl(t, g.c, append([]string{"-n", "guarded"}, args...)...)) {
			rows = append(rows, strings.Fields(line))
		}
		return rows
	}
	retips := fields("get", "retip")
	want := [][]string{
		{"NAME", "IP", "NODE", "PHASE", "EXPIRES", "AGE"},
		{"db-9.node-2", "10.244.1.9", "node-1", "Bound"},
		{"web-0.node-1", "10.244.1.5", "node-1", "Retained", "2042-11-21T07:12:55Z"},
		{"web-1.node-2", "10.244.2.5", "node-2", "Bound"},
	}
	for i, row := range want {
		if len(retips) != len(want) || !slices.Equal(retips[i][:len(row)], row) {
			t.Fatalf("get retip: %v, want %v", retips, want)
		}
	}
	wide := kubectl(t, g.c, "get", "retip", "-A", "-o", "wide")
	if !strings.Contains(wide, `["10.244.1.5","fd00::5"]`) || !strings.HasPrefix(wide, "NAMESPACE") {
		t.Errorf("get retip -o wide: %s", wide)
	}
	one := fields("get", "retip", "--field-selector", "spec.nodeName=node-2", "-o", "name")
	if len(one) != 1 || one[0][0] != "retainedip.stayput.io/web-1.node-2" {
		t.Errorf("by node: %v", one)
	}
	pools := fields("get", "pippool")
	if !slices.Equal(pools[0], []string{"NAME", "MODE", "SUBNET", "TOTAL", "USED", "FREE", "AGE"}) ||
		!slices.Equal(pools[1][:3], []string{"blue", "L2", "10.6.0.0/16"}) {
		t.Errorf("get pippool: %v", pools)
	}
	ips := fields("get", "pip", "--field-selector", "spec.pool=blue")
	if len(ips) != 7 || !slices.Equal(ips[0], []string{"NAME", "POOL", "NAMESPACE", "POD", "NODE", "PHASE", "EXPIRES", "AGE"}) ||
		!slices.Equal(ips[2][:6], []string{"10.6.168.102", "blue", "guarded", "web-2", "node-1", "Bound"}) {
		t.Errorf("get pip: %v", ips)
	}
	var kinds []string
	for _, line := range fields("get", "stayput", "-A", "--no-headers", "-o", "custom-columns=:kind") {
		kinds = append(kinds, line...)
	}
	slices.Sort(kinds)
	if kinds = slices.Compact(kinds); !slices.Equal(kinds, []string{"PodIP", "PodIPPool", "RetainedIP"}) {
		t.Errorf("get stayput: %v", kinds)
	}
	states := fields("get", "persistentpodstates")
	if !slices.Equal(states[0], []string{"NAME", "TARGET", "PODS", "RECORDED", "AGE"}) || states[1][1] != "web" {
		t.Errorf("get persistentpodstates: %v", states)
	}
	for _, field := range []string{
		"retainedips.spec", "retainedips.spec.release", "retainedips.status.expires", "retainedips.status.ips",
		"persistentpodstates.spec.targetRef", "persistentpodstates.spec.requiredPersistentTopology",
		"persistentpodstates.spec.preferredPersistentTopology.weight",
		"persistentpodstates.spec.persistentPodAnnotations.key",
		"persistentpodstates.spec.persistentPodStateRetentionPolicy", "persistentpodstates.status.podStates",
		"podippools.spec.addresses", "podippools.status.addresses.free", "podips.spec.adoptedOn",
		"podips.status.phase", "podips.status.podCIDR", "podipaudits.spec.mark", "podipreports.spec.held.address",
	} {
		text := kubectl(t, g.c, "explain", field)
		if !strings.Contains(text, "DESCRIPTION:") || strings.Contains(text, "<empty>") {
			t.Errorf("explain %s: %s", field, text)
		}
	}
}

// The admission plugins report compile errors only in the status of a policy.
func TestEveryPolicyIsBoundAndFreeOfWarnings(t *testing.T) {
	g := guardedWith(t, true)
	ctx := testContext(t)
	api := g.c.Client().AdmissionregistrationV1()
	ours := metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=stayput"}
	validating, err := api.ValidatingAdmissionPolicies().List(ctx, ours)
	must.Do(t, err)
	mutating, err := api.MutatingAdmissionPolicies().List(ctx, ours)
	must.Do(t, err)
	policies := map[string]bool{}
	for _, p := range validating.Items {
		policies[p.Name] = true
		until(t, "the type check of "+p.Name, func(ctx context.Context) bool {
			now, err := api.ValidatingAdmissionPolicies().Get(ctx, p.Name, metav1.GetOptions{})
			must.Do(t, err)
			if now.Status.TypeChecking == nil {
				return false
			}
			for _, w := range now.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", p.Name, w.FieldRef, w.Warning)
			}
			return true
		})
	}
	for _, p := range mutating.Items {
		policies[p.Name] = true
	}
	want := []string{
		"stayput-addresses", "stayput-advice", "stayput-agent", "stayput-agent-pools", "stayput-annotations",
		"stayput-controller", "stayput-default-pools", "stayput-default-retention", "stayput-gate-annotated",
		"stayput-gate-defaults", "stayput-gate-pools",
		"stayput-gate-recorded", "stayput-gated-workloads", "stayput-nominations", "stayput-restored",
		"stayput-unique-target",
		"stayput-users",
	}
	if got := slices.Sorted(maps.Keys(policies)); !slices.Equal(got, want) {
		t.Errorf("policies %v, want %v", got, want)
	}
	for name := range policies {
		_, validating := api.ValidatingAdmissionPolicyBindings().Get(ctx, name, metav1.GetOptions{})
		_, mutating := api.MutatingAdmissionPolicyBindings().Get(ctx, name, metav1.GetOptions{})
		if validating != nil && mutating != nil {
			t.Errorf("no binding of %s: %v, %v", name, validating, mutating)
		}
	}
}
