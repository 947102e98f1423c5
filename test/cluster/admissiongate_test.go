package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/must"
)

// The policy for the controller relies on it.
func TestOnlyTheNodeAffinityOfAPodCanBeChanged(t *testing.T) {
	g := guardedWith(t, true)
	for _, text := range []string{
		`{spec: {affinity: {podAntiAffinity: null}}}`,
		`{spec: {affinity: {podAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, podAffinityTerm: {topologyKey: zone}}]}}}}`,
	} {
		for _, as := range []*rest.Config{g.admin, g.controller} {
			if _, err := merge(podKind, "waiting", text)(testContext(t), g, as); !apierrors.IsInvalid(err) {
				t.Errorf("%s: %v", text, err)
			}
		}
	}
}

// A gateAttempt is a pod, and its gates once it has been created.
type gateAttempt struct {
	name  string
	pod   string
	gates []string
}

// labelled gives an owned pod the label of the pods of a StatefulSet.
func labelled(pod string) string {
	return strings.Replace(pod, "labels: {", "labels: {controller-revision-hash: bad-1, ", 1)
}

func ownedPod(namespace, apiVersion, kind, name, annotations, spec string) string {
	return fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: new-0, namespace: %s, labels: {statefulset.kubernetes.io/pod-name: new-0}, annotations: {%s}, ownerReferences: [
{apiVersion: %s, kind: %s, name: %s, uid: u, controller: true}]}, spec: {%s containers: [
{name: c, image: i, env: [{name: TWICE, value: a}, {name: TWICE, value: b}]}]}}`, namespace, annotations, apiVersion, kind, name, spec)
}

var gateAttempts = func() []gateAttempt {
	const (
		ours     = "stayput.io/placement"
		retain   = "stayput.io/retain-ip: 10m"
		reserved = `io.kubernetes.cri/reserved-ip-duration: "10"`
		pools    = "stayput.io/pools: blue"
		noPools  = `stayput.io/pools: ""`
		theirs   = `ipam.spidernet.io/ippool: "{}"`
	)
	sts := func(name, annotations, spec string) string {
		return ownedPod("guarded", "apps/v1", "StatefulSet", name, annotations, spec)
	}
	return []gateAttempt{
		{"a pod that asks for nothing", sts("web", "", ""), nil},
		{"a pod that asks for its address", sts("web", retain, ""), []string{ours}},
		{"a pod with OpenKruise's annotation", sts("web", reserved, ""), []string{ours}},
		{"a pod with both annotations", sts("web", retain+", "+reserved, ""), []string{ours}},
		{"a pod with other gates",
			sts("web", retain, "schedulingGates: [{name: a/b}, {name: c/d}],"), []string{"a/b", "c/d", ours}},
		{"a pod whose template has the gate",
			sts("web", retain, "schedulingGates: [{name: stayput.io/placement}, {name: a/b}],"), []string{ours, "a/b"}},
		{"a pod with a node", sts("web", retain, "nodeName: node-1,"), nil},
		{"a pod in the host network", sts("web", retain, "hostNetwork: true,"), nil},
		{"a pod of a DaemonSet", ownedPod("guarded", "apps/v1", "DaemonSet", "web", retain, ""), nil},
		{"a pod without an owner", fmt.Sprintf(newPod, retain), []string{ours}},
		{"a pod that only has another annotation of ours", sts("web", "stayput.io/home-wait: 10s", ""), nil},
		{"a pod of the system namespace", ownedPod("stayput-system", "apps/v1", "StatefulSet", "web", retain, ""), nil},

		{"a pod that asks for addresses of pools", sts("web", pools, ""), []string{ours}},
		{"a pod that asks for them, and to keep them", sts("web", retain+", "+pools, ""), []string{ours}},
		{"a pod that asks for them, with other gates",
			sts("web", pools, "schedulingGates: [{name: a/b}],"), []string{"a/b", ours}},
		{"a pod that asks for them, of a recorded workload", sts("db", pools, ""), []string{ours}},
		{"a pod that asks for none", sts("web", noPools, ""), nil},
		{"a pod that asks for them with a node", sts("web", pools, "nodeName: node-1,"), nil},
		{"a pod that asks for them in the host network", sts("web", pools, "hostNetwork: true,"), nil},
		{"a pod of a DaemonSet that asks for them",
			ownedPod("guarded", "apps/v1", "DaemonSet", "web", pools, ""), nil},
		{"a pod of a namespace with pools", ownedPod("pooled", "apps/v1", "StatefulSet", "web", "", ""), []string{ours}},
		{"a pod of a namespace with pools that asks for none",
			ownedPod("pooled", "apps/v1", "StatefulSet", "web", noPools, ""), nil},
		{"a pod of a namespace with pools that asks itself",
			ownedPod("pooled", "apps/v1", "StatefulSet", "web", retain+", "+pools, ""), []string{ours}},
		{"a pod of a namespace with pools that asks for its address",
			ownedPod("pooled", "apps/v1", "StatefulSet", "web", retain, ""), []string{ours}},
		{"a pod of a namespace with pools with a node",
			ownedPod("pooled", "apps/v1", "StatefulSet", "web", "", "nodeName: node-1,"), nil},

		{"a pod of a namespace that retains addresses", ownedPod("retaining", "apps/v1", "StatefulSet", "web", "", ""),
			[]string{ours}},
		{"a pod of a namespace that retains addresses, with other gates",
			ownedPod("retaining", "apps/v1", "StatefulSet", "web", "", "schedulingGates: [{name: a/b}],"), []string{"a/b", ours}},
		{"a pod of a namespace that retains addresses, but not its own",
			ownedPod("retaining", "apps/v1", "StatefulSet", "web", "stayput.io/retain-ip: none", ""), nil},
		{"a pod of a namespace that retains addresses in the host network",
			ownedPod("retaining", "apps/v1", "StatefulSet", "web", "", "hostNetwork: true,"), nil},
		{"a pod of a namespace that retains addresses with a node",
			ownedPod("retaining", "apps/v1", "StatefulSet", "web", "", "nodeName: node-1,"), nil},
		{"a pod of a Deployment in a namespace that retains addresses",
			strings.Replace(ownedPod("retaining", "apps/v1", "ReplicaSet", "web", "", ""),
				"statefulset.kubernetes.io/pod-name", "a", 1), nil},
		{"a pod that asks for nothing, and says so", sts("web", "stayput.io/retain-ip: none, "+reserved, ""), nil},

		{"a pod that asks in Spiderpool's words", sts("web", theirs, ""), []string{ours}},
		{"a pod that asks for several interfaces", sts("web", `ipam.spidernet.io/ippools: "?"`, ""), []string{ours}},
		{"a pod that asks for a subnet of Spiderpool", sts("web", `ipam.spidernet.io/subnet: "?"`, ""), []string{ours}},
		{"a pod whose words of Spiderpool are empty", sts("web", `ipam.spidernet.io/ippool: ""`, ""), nil},
		{"a pod that asks in Spiderpool's words, and for none", sts("web", theirs+", "+noPools, ""), nil},
		{"a pod of a namespace with Spiderpool's defaults", ownedPod("theirs", "apps/v1", "StatefulSet", "web", "", ""),
			[]string{ours}},
		{"a pod of a namespace with Spiderpool's defaults that asks for none",
			ownedPod("theirs", "apps/v1", "StatefulSet", "web", noPools, ""), nil},
		{"a pod of a namespace with Spiderpool's defaults and none of ours",
			ownedPod("unpooled", "apps/v1", "StatefulSet", "web", "", ""), nil},
		{"a pod of that namespace that asks in Spiderpool's words",
			ownedPod("unpooled", "apps/v1", "StatefulSet", "web", theirs, ""), []string{ours}},

		{"a pod of a recorded workload", sts("db", "", ""), []string{ours}},
		{"a pod of a recorded workload of another group",
			ownedPod("guarded", "apps.kruise.io/v1beta1", "StatefulSet", "queue", "", ""), []string{ours}},
		{"a pod of a recorded workload in the host network", sts("db", "", "hostNetwork: true,"), []string{ours}},
		{"a pod of a recorded workload with a node", sts("db", "", "nodeName: node-1,"), nil},
		{"a pod of a recorded workload with other gates",
			sts("db", "", "schedulingGates: [{name: a/b}],"), []string{"a/b", ours}},
		{"a pod of a recorded workload that asks for its address", sts("db", retain, ""), []string{ours}},
		{"a pod of a workload whose name begins like a recorded one", sts("d", "", ""), nil},
		{"a pod of a workload whose kind ends like a recorded one's",
			ownedPod("guarded", "apps/v1", "Set", "db", "", ""), nil},
		{"a pod of a workload of the same name in another group",
			ownedPod("guarded", "apps.kruise.io/v1beta1", "StatefulSet", "db", "", ""), nil},
		{"a pod of a workload of the same name and another kind",
			ownedPod("guarded", "apps/v1", "ReplicaSet", "db", "", ""), nil},
		{"a pod of a workload of the same name in another namespace",
			ownedPod("elsewhere", "apps/v1", "StatefulSet", "db", "", ""), nil},
		{"a pod of a recorded workload without the label of a StatefulSet's pods",
			strings.Replace(sts("db", "", ""), "statefulset.kubernetes.io/pod-name", "a", 1), nil},
		{"a pod that a recorded workload owns but does not control",
			strings.Replace(sts("db", "", ""), "controller: true", "controller: false", 1), nil},
	}
}()

func gatesOf(pod *unstructured.Unstructured) (names []string) {
	gates, _, _ := unstructured.NestedSlice(pod.Object, "spec", "schedulingGates")
	for _, g := range gates {
		name, _, _ := unstructured.NestedString(g.(map[string]any), "name")
		names = append(names, name)
	}
	return names
}

const managedLabel = "stayput.io/managed"

// The controller sees no other pods. Those that cannot be gated are labelled all the same.
func TestTheWriteThatGatesAPodLabelsIt(t *testing.T) {
	g := guardedWith(t, true)
	for name, pod := range map[string]string{
		"with labels":             ownedPod("guarded", "apps/v1", "StatefulSet", "web", "stayput.io/retain-ip: 10m", ""),
		"without labels":          fmt.Sprintf(newPod, "stayput.io/retain-ip: 10m"),
		"of a recorded workload":  ownedPod("guarded", "apps/v1", "StatefulSet", "db", "", ""),
		"of a namespace's pools":  ownedPod("pooled", "apps/v1", "StatefulSet", "web", "", ""),
		"with another value":      strings.Replace(fmt.Sprintf(newPod, "stayput.io/retain-ip: 10m"), "metadata: {", `metadata: {labels: {stayput.io/managed: "?"}, `, 1),
		"whose template is gated": ownedPod("guarded", "apps/v1", "StatefulSet", "web", "stayput.io/retain-ip: 10m", "schedulingGates: [{name: stayput.io/placement}],"),
	} {
		t.Run(name, func(t *testing.T) {
			until(t, "the label", func(ctx context.Context) bool { // policies take effect within seconds
				made, err := create(pod)(ctx, g, g.admin)
				must.Do(t, err)
				return made.GetLabels()[managedLabel] == "true" && slices.Contains(gatesOf(made), "stayput.io/placement")
			})
		})
	}
	const pools = "stayput.io/pools: blue"
	for _, c := range []struct {
		name, pod string
		labelled  bool
	}{
		{"with a node", ownedPod("guarded", "apps/v1", "StatefulSet", "web", pools, "nodeName: node-1,"), true},
		{"of a DaemonSet", ownedPod("guarded", "apps/v1", "DaemonSet", "web", pools, ""), true},
		{"in the host network", ownedPod("guarded", "apps/v1", "DaemonSet", "web", pools, "hostNetwork: true,"), false},
		{"that asks for nothing", ownedPod("guarded", "apps/v1", "StatefulSet", "web", "", ""), false},
	} {
		made, err := create(c.pod)(testContext(t), g, g.admin)
		must.Do(t, err)
		if _, is := made.GetLabels()[managedLabel]; is != c.labelled || len(gatesOf(made)) > 0 {
			t.Errorf("a pod %s has the labels %v and the gates %q", c.name, made.GetLabels(), gatesOf(made))
		}
	}
}

func TestOnlyPodsThatMayHaveAHomeAreGated(t *testing.T) {
	g := guardedWith(t, true)
	for _, p := range slices.SortedFunc(slices.Values(gateAttempts), func(a, b gateAttempt) int {
		return len(b.gates) - len(a.gates) // first the gated ones, which wait for the policies
	}) {
		gated := slices.Contains(p.gates, "stayput.io/placement")
		if ok := t.Run(p.name, func(t *testing.T) {
			var gates []string
			if gated {
				until(t, "the gate", func(ctx context.Context) bool {
					made, err := create(p.pod)(ctx, g, g.admin)
					must.Do(t, err)
					gates = gatesOf(made)
					return slices.Contains(gates, "stayput.io/placement")
				})
			} else {
				made, err := create(p.pod)(testContext(t), g, g.admin)
				must.Do(t, err)
				gates = gatesOf(made)
			}
			if !slices.Equal(gates, p.gates) {
				t.Errorf("gates %v, want %v", gates, p.gates)
			}
		}); gated && !ok {
			t.FailNow() // the others would wait as long
		}
	}

	// Spiderpool's words count by a right of the controller alone.
	rights, err := manifests(testContext(t), "34-*.yaml")
	must.Do(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		_, err := g.c.Kubectl(ctx, rights, "apply", "--server-side", "-f", "-")
		must.Do(t, err)
	})
	kubectl(t, g.c, "delete", "clusterrolebinding", "stayput-controller-pools-spiderpool")
	for _, pod := range []string{
		ownedPod("guarded", "apps/v1", "StatefulSet", "web", `ipam.spidernet.io/ippool: "{}"`, ""),
		ownedPod("theirs", "apps/v1", "StatefulSet", "web", "", ""),
	} {
		until(t, "Spiderpool's words not to count", func(ctx context.Context) bool {
			made, err := create(pod)(ctx, g, g.admin)
			must.Do(t, err)
			return len(gatesOf(made)) == 0
		})
	}
}

// By the label alone pods are gated for their namespace: it comes and goes with the annotation, in the same write.
func TestANamespaceIsLabelledAsItsAnnotationsSay(t *testing.T) {
	g := guardedWith(t, true)
	const pools, retention = "stayput.io/default-pools", "stayput.io/default-retention"
	made := func(metadata string) try {
		return create(`{apiVersion: v1, kind: Namespace, metadata: {` + metadata + `}}`)
	}
	changed := func(name, metadata string) try {
		return merge(namespaceKind, name, `{metadata: {`+metadata+`}}`)
	}
	const theirs = `ipam.spidernet.io/default-ipv4-ippool: '["blue"]'`
	until(t, "the policies", func(ctx context.Context) bool {
		n, err := made(`name: new, annotations: {stayput.io/pools: blue, stayput.io/retain-ip: 10m}`)(ctx, g, g.admin)
		must.Do(t, err)
		return len(n.GetLabels()) == 3 // one is Kubernetes' own
	})
	for _, c := range []struct {
		name   string
		do     try
		labels []string
	}{
		{"made without annotations", made(`name: new`), nil},
		{"made with a label of its own", made(`name: new, labels: {stayput.io/default-pools: "yes"}`), nil},
		{"made without a name", made(`generateName: new-, annotations: {stayput.io/pools: blue}`), []string{pools}},
		{"made with Spiderpool's default", made(`name: new, annotations: {` + theirs + `}`), []string{pools}},
		{"made with Spiderpool's default, and none of ours",
			made(`name: new, annotations: {stayput.io/pools: "", ` + theirs + `}`), nil},
		{"made with a retention", made(`name: new, annotations: {stayput.io/retain-ip: while-owned}`), []string{retention}},
		{"made with both", made(`name: new, annotations: {stayput.io/retain-ip: 10m, stayput.io/pools: blue}`),
			[]string{pools, retention}},
		{"made with no retention", made(`name: new, annotations: {stayput.io/retain-ip: none}`), nil},
		{"annotated", changed("guarded", `annotations: {stayput.io/pools: blue}`), []string{pools}},
		{"annotated by apply", patch(namespaceKind, "guarded", types.ApplyPatchType,
			`{apiVersion: v1, kind: Namespace, metadata: {name: guarded, annotations: {stayput.io/pools: blue}}}`),
			[]string{pools}},
		{"changed otherwise", changed("pooled", `labels: {a: b}`), []string{pools}},
		{"without its label", changed("pooled", `labels: {stayput.io/default-pools: null}`), []string{pools}},
		{"without any label", changed("pooled", `labels: null`), []string{pools}},
		{"without its annotation", changed("pooled", `annotations: null`), nil},
		{"without its retention", changed("retaining", `annotations: null`), nil},
		{"without the label of its retention", changed("retaining", `labels: {stayput.io/default-retention: null}`),
			[]string{retention}},
		{"with an empty annotation", changed("pooled", `annotations: {stayput.io/pools: ""}`), nil},
		{"labelled without an annotation", changed("guarded", `labels: {stayput.io/default-pools: ""}`), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := c.do(testContext(t), g, g.admin)
			must.Do(t, err)
			is := slices.DeleteFunc(slices.Sorted(maps.Keys(n.GetLabels())), func(l string) bool {
				return !strings.HasPrefix(l, "stayput.io/")
			})
			if !slices.Equal(is, c.labels) {
				t.Errorf("the labels are %v", n.GetLabels())
			}
		})
	}
}

// What a namespace says of its pods is theirs from their creation on, unless they say it themselves.
func TestAPodHasTheAnnotationsOfItsNamespace(t *testing.T) {
	g := guardedWith(t, true)
	of := func(annotations string) string {
		return ownedPod("retaining", "apps/v1", "StatefulSet", "web", annotations, "")
	}
	until(t, "the policy", func(ctx context.Context) bool {
		made, err := create(of(""))(ctx, g, g.admin)
		must.Do(t, err)
		return len(made.GetAnnotations()) > 0
	})
	for pod, want := range map[string]map[string]string{
		of(""):                           {"stayput.io/retain-ip": "1h", "stayput.io/home": "Preferred"},
		of("a: b"):                       {"stayput.io/retain-ip": "1h", "stayput.io/home": "Preferred", "a": "b"},
		of("stayput.io/home: Required"):  {"stayput.io/retain-ip": "1h", "stayput.io/home": "Required"},
		of("stayput.io/retain-ip: 10m"):  {"stayput.io/retain-ip": "10m"},
		of("stayput.io/retain-ip: none"): {"stayput.io/retain-ip": "none"},
		of(`io.kubernetes.cri/reserved-ip-duration: "10"`): {"io.kubernetes.cri/reserved-ip-duration": "10"},
		strings.Replace(of(""), "annotations: {}, ", "", 1): {
			"stayput.io/retain-ip": "1h", "stayput.io/home": "Preferred",
		},
	} {
		made, err := create(pod)(testContext(t), g, g.admin)
		must.Do(t, err)
		if is := made.GetAnnotations(); !maps.Equal(is, want) {
			t.Errorf("%s\nhas the annotations %v, want %v", pod, is, want)
		}
		_, none := want["stayput.io/home"]
		if _, is := made.GetLabels()[managedLabel]; none && !is {
			t.Errorf("%s\nhas the labels %v", pod, made.GetLabels())
		}
	}
}

// If the policy's parameter were a custom resource, it would be unknown for 30 s here, and pods would slip through.
func TestPodsAreGatedFromTheAPIServersFirstRequestOn(t *testing.T) {
	g := guardedWith(t, true)
	must.Do(t, g.c.APIServer.Kill())
	must.Do(t, g.c.APIServer.Start(testContext(t)))
	created := 0
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		for _, pod := range []string{
			ownedPod("guarded", "apps/v1", "StatefulSet", "web", "stayput.io/retain-ip: 10m", ""),
			ownedPod("guarded", "apps/v1", "StatefulSet", "db", "", ""),
		} {
			made, err := create(pod)(testContext(t), g, g.admin)
			if err != nil {
				continue // the API server is still starting
			}
			created++
			if !slices.Contains(gatesOf(made), "stayput.io/placement") {
				t.Fatalf("pod %d is not gated: %s", created, pod)
			}
		}
	}
	if created < 10 {
		t.Errorf("only %d pods were created", created)
	}
}

// What a backup of objects brings back, or kubectl replace --force makes again, is another pod.
func TestACopyOfAPodHasNothingThatStayputWroteOnIt(t *testing.T) {
	g := guardedWith(t, true)
	copied := func(labels, annotations, spec string) string {
		pod := ownedPod("guarded", "apps/v1", "StatefulSet", "web", annotations, spec)
		return strings.Replace(pod, "labels: {", "labels: {"+labels, 1)
	}
	const ours, retain = "stayput.io/managed: 'true', ", "stayput.io/retain-ip: 10m"
	const addresses = `stayput.io/pools: blue, stayput.io/addresses: '[{"interface":"eth0","pool":"blue","mode":"%s","address":"10.6.168.101/16"}]'`
	required := func(terms string) string {
		return "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" + terms + "]}}},"
	}
	named := func(operator string) string {
		return "matchFields: [{key: metadata.name, operator: " + operator + ", values: [old-7]}]"
	}
	in := func(key, value string) string { return "{key: " + key + ", operator: In, values: [" + value + "]}" }
	until(t, "the policies", func(ctx context.Context) bool {
		_, err := create(copied(ours, fmt.Sprintf(addresses, "L2"), ""))(ctx, g, g.admin)
		return err == nil
	})
	for _, c := range []struct {
		name, pod string
		gone      string // an annotation
		terms     string // what is required, as YAML
		gated     bool
	}{
		{"pinned to a node", copied(ours, retain+", stayput.io/pinned: node old-7", required("{"+named("In")+"}")),
			v1alpha1.AnnotationPinned, "", true},
		{"kept off a node", copied(ours, retain+", stayput.io/pinned: 'any node but old-6, old-7'", required("{"+named("NotIn")+"}")),
			v1alpha1.AnnotationPinned, "", true},
		{"pinned to a node beside affinity of its own", copied(ours, retain+", stayput.io/pinned: node old-7",
			required("{matchExpressions: ["+in("disk", "ssd")+"], "+named("In")+"}, {matchExpressions: ["+in("disk", "hdd")+"], "+named("In")+"}")),
			v1alpha1.AnnotationPinned, "[{matchExpressions: [" + in("disk", "ssd") + "]}, {matchExpressions: [" + in("disk", "hdd") + "]}]", true},
		{"pinned by labels", copied(ours, retain+", stayput.io/pinned: 'nodes with rack=r1,zone=a'",
			required("{matchExpressions: ["+in("disk", "ssd")+", "+in("rack", "r1")+", "+in("zone", "a")+"]}")),
			v1alpha1.AnnotationPinned, "[{matchExpressions: [" + in("disk", "ssd") + "]}]", true},
		{"with a node", copied(ours, fmt.Sprintf(addresses, "L2"), "nodeName: node-1,"), v1alpha1.AnnotationAddresses, "", false},
		{"with addresses of pools", copied(ours, fmt.Sprintf(addresses, "Routed"), ""), v1alpha1.AnnotationAddresses, "", true},
		{"with addresses of Calico's", copied(ours, fmt.Sprintf(addresses, "Calico")+`, cni.projectcalico.org/ipAddrs: '["10.6.168.101"]'`, ""),
			"cni.projectcalico.org/ipAddrs", "", true},
		{"with another affinity by name", copied(ours, retain+", stayput.io/pinned: node old-8", required("{"+named("In")+"}")),
			v1alpha1.AnnotationPinned, "[{" + named("In") + "}]", true},
		{"that Stayput did not write to", copied("", retain, required("{"+named("In")+"}")),
			v1alpha1.AnnotationPinned, "[{" + named("In") + "}]", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			made, err := create(c.pod)(testContext(t), g, g.admin)
			must.Do(t, err)
			if value, is := made.GetAnnotations()[c.gone]; is {
				t.Errorf("it has %s: %s", c.gone, value)
			}
			if gated := slices.Contains(gatesOf(made), v1alpha1.PlacementGate); gated != c.gated {
				t.Errorf("it is gated: %v, want %v", gated, c.gated)
			}
			var pod corev1.Pod
			must.Do(t, runtime.DefaultUnstructuredConverter.FromUnstructured(made.Object, &pod))
			var is, want []corev1.NodeSelectorTerm
			if a := pod.Spec.Affinity; a != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
				is = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
			}
			must.Do(t, yaml.Unmarshal([]byte(c.terms), &want))
			if !equality.Semantic.DeepEqual(is, want) {
				t.Errorf("it requires %+v, want %+v", is, want)
			}
		})
	}
}
