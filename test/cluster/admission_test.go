package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// An attempt is a request, and how admission should answer it.
type attempt struct {
	name string
	as   func(*guard) *rest.Config
	do   try
	// refusal is part of the policy's message; if empty, the request is accepted.
	refusal string
}

func asAdmin(g *guard) *rest.Config      { return g.admin }
func asController(g *guard) *rest.Config { return g.controller }
func asAgent(g *guard) *rest.Config      { return g.agent } // of node-1

// asMaker is the controller that makes the pods of StatefulSets.
func asMaker(g *guard) *rest.Config {
	return g.c.RESTConfigAs("system:serviceaccount:kube-system:statefulset-controller")
}

// asNamesake is an account that has the name of that controller's, in another namespace.
func asNamesake(g *guard) *rest.Config {
	return g.c.RESTConfigAs("system:serviceaccount:guarded:statefulset-controller", "system:masters")
}

func asStray(g *guard) *rest.Config { return g.stray } // the agent's account with a token that names no node

const (
	podKind       = "Pod.v1."
	namespaceKind = "Namespace.v1."
	retipKind     = "RetainedIP.v1alpha1.stayput.io"
	ppsKind       = "PersistentPodState.v1alpha1.apps.kruise.io"
	cmKind        = "ConfigMap.v1."
	secretKind    = "Secret.v1."
	poolKind      = "PodIPPool.v1alpha1.stayput.io"
	podIPKind     = "PodIP.v1alpha1.stayput.io"
	auditKind     = "PodIPAudit.v1alpha1.stayput.io"
	reportKind    = "PodIPReport.v1alpha1.stayput.io"
	stsKind       = "StatefulSet.v1.apps"
	newPod        = "apiVersion: v1\nkind: Pod\nmetadata: {name: new, annotations: {%s}}\n" +
		"spec: {containers: [{name: c, image: i}]}"
	newRetp = "apiVersion: stayput.io/v1alpha1\nkind: RetainedIP\nmetadata: {name: web-2.%[1]s}\n" +
		"spec: {nodeName: %[1]s, podName: web-2, retention: 10m%[2]s}\nstatus: {phase: Bound}"
	newBinding = `{apiVersion: v1, kind: Binding, metadata: {name: %s, annotations: {%s}}, target: {kind: Node, name: node-1}}`
	newReport  = `{apiVersion: stayput.io/v1alpha1, kind: PodIPReport, metadata: {name: %s}, spec: {epoch: "2026-01-01T00:00:00.000001Z"}}`
	// told are addresses by annotation.
	told = `stayput.io/addresses: "[{}]"`
)

// ownRetp is a RetainedIP of node-1 with more metadata.
func ownRetp(metadata string) string {
	return strings.Replace(fmt.Sprintf(newRetp, "node-1", ""), "{name: web-2.node-1}",
		"{name: web-2.node-1, "+metadata+"}", 1)
}

// retpNamed is a RetainedIP of node-1 by another name.
func retpNamed(name string) string {
	return strings.Replace(fmt.Sprintf(newRetp, "node-1", ""), "{name: web-2.node-1}", "{name: "+name+"}", 1)
}

func newPool(spec string) string {
	return "{apiVersion: stayput.io/v1alpha1, kind: PodIPPool, metadata: {name: new}, spec: {" + spec + "}}"
}

func newPodIP(name string) string {
	return fmt.Sprintf(`{apiVersion: stayput.io/v1alpha1, kind: PodIP, metadata: {name: %q},
spec: {pool: blue, mode: L2, namespace: guarded, podName: web-5, podUID: five, interface: eth0}}`, name)
}

func newState(name, target string) string {
	return fmt.Sprintf(`{apiVersion: apps.kruise.io/v1alpha1, kind: PersistentPodState, metadata: {name: %s},
spec: {targetRef: %s, preferredPersistentTopology: [{weight: 1, preference: {nodeTopologyKeys: [zone]}}]}}`, name, target)
}

// template returns a workload of a kind whose pod template has the annotations.
func template(apiVersion, kind, annotations string) string {
	pods := fmt.Sprintf(`{metadata: {labels: {a: b}, annotations: {%s}}, spec: {restartPolicy: %s, containers: [{name: c, image: i}]}}`,
		annotations, map[bool]string{true: "Never", false: "Always"}[strings.HasSuffix(kind, "Job")])
	var spec string
	switch kind {
	case "Job":
		spec = `{template: ` + pods + `}`
	case "CronJob":
		spec = `{schedule: "0 0 1 1 *", jobTemplate: {spec: {template: ` + pods + `}}}`
	case "ReplicationController":
		spec = `{selector: {a: b}, template: ` + pods + `}`
	default:
		spec = `{selector: {matchLabels: {a: b}}, template: ` + pods + `}`
	}
	return fmt.Sprintf("{apiVersion: %s, kind: %s, metadata: {name: new}, spec: %s}", apiVersion, kind, spec)
}

// reports writes the status of a PodIP.
func reports(podIP, status string) try {
	return merge(podIPKind, podIP, "{status: {"+status+"}}", "status")
}

// attempts cover what the policies decide; RBAC allows all of them.
var attempts = func() []attempt {
	const onlyTheController = "only Stayput's controller may write the annotation stayput.io/addresses"
	const onlyOneLabelled = "only the ConfigMap stayput-gated-workloads may have the label stayput.io/gated-workloads"
	const onlyItsLabel = "Stayput's controller may change only its label, stayput.io/default-pools, of a namespace"
	const onlyRelease = "of a RetainedIP only spec.release, labels and annotations may be changed"
	many := ""
	for i := range 65 {
		many += fmt.Sprintf("label-%d: x, ", i)
	}
	const notValid = `stayput.io/retain-ip: "true" is not valid: expected a duration above 0 in h, m and s of at most ` +
		`2562047h, ` +
		`such as 10m, or 168h for 7 days; while-owned; or none`
	all := []attempt{
		// The controller, on pods.
		{"the controller sets node affinity, node selector and annotations of a pod and removes our gate", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{metadata: {annotations: {seen: "yes"}}, spec: {
				nodeSelector: {zone: a}, schedulingGates: [{$patch: delete, name: stayput.io/placement}],
				affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: Exists}]}]}}}}}`), ""},
		{"the controller applies node affinity", asController,
			patch(podKind, "waiting", types.ApplyPatchType, `{apiVersion: v1, kind: Pod, metadata: {name: waiting, annotations: {seen: 'yes'}}, spec: {
				affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, preference: {matchExpressions: [{key: zone, operator: Exists}]}}]}}}}`), ""},
		{"the controller changes the image of a pod", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller changes the image of a running pod", asController,
			patch(podKind, "placed", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller changes a deadline of a pod", asController,
			merge(podKind, "waiting", `{spec: {activeDeadlineSeconds: 5}}`), "may change only the annotations, node affinity, "},
		{"the controller adds a toleration to a pod", asController,
			patch(podKind, "waiting", types.JSONPatchType, `[{op: add, path: /spec/tolerations/-, value: {key: k, operator: Exists}}]`),
			"may change only the annotations, node affinity, "},
		{"the controller changes a label of a pod", asController,
			merge(podKind, "waiting", `{metadata: {labels: {a: c}}}`), "may change only the annotations, node affinity, "},
		{"the controller labels a pod as Stayput's", asController,
			merge(podKind, "waiting", `{metadata: {labels: {stayput.io/managed: "true"}}}`), ""},
		{"the controller removes a label of a pod", asController,
			merge(podKind, "waiting", `{metadata: {labels: {a: null}}}`), "may change only the annotations, node affinity, "},
		// Not the ordinary write, which the policy does not look at further.
		{"the controller removes our gate and changes the image of a pod", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}],
				schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller removes our gate and a label of a pod", asController,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{metadata: {labels: {a: null}},
				spec: {schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller adds a finalizer to a pod", asController,
			merge(podKind, "waiting", `{metadata: {finalizers: [example.com/x]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller gives a pod an owner", asController,
			merge(podKind, "waiting", `{metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: other, uid: u}]}}`),
			"may change only the annotations, node affinity, "},
		{"the controller removes a foreign gate", asController,
			merge(podKind, "waiting", `{spec: {schedulingGates: [{name: stayput.io/placement}]}}`),
			"may remove only the scheduling gate"},
		{"the controller nominates a node for a gated pod", asController,
			merge(podKind, "waiting", `{status: {nominatedNodeName: node-1}}`, "status"), ""},
		{"the controller nominates a node for a pod that has one", asController,
			merge(podKind, "placed", `{status: {nominatedNodeName: ""}}`, "status"), "may change only nominatedNodeName"},
		{"the controller gives a pod an address", asController,
			merge(podKind, "waiting", `{status: {podIP: 192.0.2.7, podIPs: [{ip: 192.0.2.7}]}}`, "status"),
			"may change only nominatedNodeName"},
		{"the controller annotates a pod by its status", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {seen: "yes"}}, status: {nominatedNodeName: node-1}}`, "status"),
			"may change only nominatedNodeName"},
		{"the controller removes all gates", asController,
			merge(podKind, "waiting", `{spec: {schedulingGates: null}}`), "may remove only the scheduling gate"},
		{"the controller deletes a pod that has no node", asController, remove(podKind, "waiting"), ""},
		{"the controller deletes a pod that has a node", asController,
			remove(podKind, "placed"), "may not delete a pod that has a node"},

		{"the controller annotates a pod that has a node", asController,
			merge(podKind, "placed", `{metadata: {annotations: {seen: "yes"}}}`), "may not change a pod that has a node"},

		// The controller, on pods of pools.
		{"the controller tells a gated pod its addresses and removes our gate", asController,
			patch(podKind, "asking", types.StrategicMergePatchType, `{metadata: {annotations: {`+told+`}},
				spec: {schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`), ""},
		{"the controller tells a pod of a namespace with pools its addresses", asController,
			merge(podKind, "pooled/asking", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod its addresses that asks in Spiderpool's words", asController,
			merge(podKind, "theirs", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod its addresses whose namespace asks in Spiderpool's words", asController,
			merge(podKind, "theirs/asking", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod addresses that asks for none, whatever its words of Spiderpool", asController,
			merge(podKind, "neither", `{metadata: {annotations: {`+told+`}}}`), "on a pod that asks for addresses"},
		{"the controller has a pod ask for addresses in Spiderpool's words", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {ipam.spidernet.io/ippool: "{}", `+told+`}}}`),
			"and never those by which it asks"},
		{"the controller tells a pod that has a node its addresses", asController,
			merge(podKind, "late", `{metadata: {annotations: {`+told+`}}}`), ""},
		{"the controller tells a pod that has a node its addresses and something else", asController,
			merge(podKind, "late", `{metadata: {annotations: {seen: "yes", `+told+`}}}`),
			"may not change a pod that has a node"},
		{"the controller deletes a pod that has a node and addresses of pools", asController,
			remove(podKind, "served"), ""},
		{"the controller deletes a pod that has a node and only asks", asController,
			remove(podKind, "late"), "may not delete a pod that has a node"},
		{"the controller changes the addresses of a pod", asController,
			merge(podKind, "served", `{metadata: {annotations: {`+told+`}}}`), "may write the annotation stayput.io/addresses only once"},
		{"the controller takes the addresses of a pod back", asController,
			merge(podKind, "served", `{metadata: {annotations: {stayput.io/addresses: null}}}`),
			"may write the annotation stayput.io/addresses only once"},
		{"the controller tells a pod addresses that asks for none", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {`+told+`}}}`), "on a pod that asks for addresses"},
		{"the controller has a pod ask for addresses", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {stayput.io/pools: blue}}}`), "and never those by which it asks"},
		{"the controller has a pod ask for addresses that it tells it", asController,
			merge(podKind, "waiting", `{metadata: {annotations: {stayput.io/pools: blue, `+told+`}}}`),
			"and never those by which it asks"},

		// Others, on pods of pools.
		{"a new pod has addresses", asAdmin, create(fmt.Sprintf(newPod, "stayput.io/pools: blue, "+told)), onlyTheController},
		{"a user tells a pod its addresses", asAdmin,
			merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`), onlyTheController},
		{"a user changes the addresses of a pod", asAdmin,
			merge(podKind, "served", `{metadata: {annotations: {`+told+`}}}`), onlyTheController},
		{"a user takes the addresses of a pod", asAdmin,
			merge(podKind, "served", `{metadata: {annotations: {stayput.io/addresses: null}}}`), onlyTheController},
		{"a user tells a pod its addresses by its status", asAdmin,
			merge(podKind, "asking", `{metadata: {annotations: {`+told+`}}}`, "status"), onlyTheController},
		{"a user binds a pod with addresses", asAdmin, bind("unbound", told), onlyTheController},
		{"a user binds a pod with addresses by the older way", asAdmin,
			create(fmt.Sprintf(newBinding, "unbound", told)), onlyTheController},
		{"a user binds a pod", asAdmin, bind("unbound", `seen: "yes"`), ""},
		{"a user annotates a pod that has addresses", asAdmin,
			merge(podKind, "served", `{metadata: {annotations: {seen: "yes", stayput.io/pools: green}}}`), ""},
		{"a user changes the status of a pod that has addresses", asAdmin,
			merge(podKind, "served", `{status: {message: hello}}`, "status"), ""},
		{"a template with addresses stays as it is", asAdmin,
			merge(stsKind, "told", `{spec: {template: {metadata: {annotations: {seen: "yes"}}}}}`), ""},
		{"a template gets other addresses", asAdmin,
			merge(stsKind, "told", `{spec: {template: {metadata: {annotations: {`+told+`}}}}}`),
			"stayput.io/addresses is not for pod templates"},
		{"a namespace with pools", asAdmin, merge(namespaceKind, "pooled", `{metadata: {annotations: {stayput.io/pools: "green,blue"}}}`), ""},
		{"a namespace with a bad value", asAdmin,
			merge(namespaceKind, "pooled", `{metadata: {annotations: {stayput.io/pools: "green blue"}}}`),
			`stayput.io/pools: "green blue" is not valid: expected names of pools`},

		// The controller, on other objects.
		{"the controller says which pools there are", asController, merge(cmKind, lab.SystemNamespace+"/stayput-installation",
			`{metadata: {annotations: {stayput.io/pools: "true", stayput.io/routed-pools: "true"}}}`), ""},
		{"the controller says that Stayput is being uninstalled", asController,
			merge(cmKind, lab.SystemNamespace+"/stayput-installation", `{metadata: {annotations: {stayput.io/uninstall: "true"}}}`),
			"may write only the ConfigMap stayput-gated-workloads, and whether there are pools"},
		{"the controller changes the installation", asController,
			merge(cmKind, lab.SystemNamespace+"/stayput-installation", `{data: {version: x}}`),
			"may write only the ConfigMap stayput-gated-workloads, and whether there are pools"},
		{"the controller labels a namespace", asController,
			merge(namespaceKind, "pooled", `{metadata: {labels: {stayput.io/default-pools: ""}}}`), ""},
		{"the controller labels a namespace otherwise", asController,
			merge(namespaceKind, "pooled", `{metadata: {labels: {pod-security.kubernetes.io/enforce: privileged}}}`),
			onlyItsLabel},
		{"the controller changes a label of a namespace", asController,
			merge(namespaceKind, "pooled", `{metadata: {labels: {team: null}}}`), onlyItsLabel},
		{"the controller annotates a namespace", asController,
			merge(namespaceKind, "pooled", `{metadata: {annotations: {stayput.io/pools: green}}}`), onlyItsLabel},
		{"the controller adds a finalizer to a namespace", asController,
			merge(namespaceKind, "pooled", `{metadata: {finalizers: [example.com/x]}}`), onlyItsLabel},
		{"a pod by a template from before the policies", asMaker,
			create(fmt.Sprintf(newPod, `stayput.io/retain-ip: "true", stayput.io/pools: "blue@"`)), ""},
		{"a pod with addresses by such a template", asMaker, create(fmt.Sprintf(newPod, told)), onlyTheController},
		{"a pod of a controller that only has that one's name", asNamesake,
			create(fmt.Sprintf(newPod, `stayput.io/retain-ip: "true"`)), notValid},
		{"the controller holds a pool", asController,
			merge(poolKind, "blue", `{metadata: {finalizers: [stayput.io/in-use]}}`), ""},
		{"the controller adds a foreign finalizer to a pool", asController,
			merge(poolKind, "blue", `{metadata: {finalizers: [example.com/x]}}`), "may change only its finalizer"},
		{"the controller changes a pool", asController, merge(poolKind, "blue", `{spec: {allocation: Disabled}}`),
			"may change only its finalizer"},
		{"the controller changes a pool of Spiderpool", asController,
			merge("SpiderIPPool.v2beta1.spiderpool.spidernet.io", "green", `{spec: {disable: true}}`), "may change only its finalizer"},
		{"the controller counts the addresses of a pool of Spiderpool", asController,
			merge("SpiderIPPool.v2beta1.spiderpool.spidernet.io", "green", `{status: {totalIPCount: 1}}`, "status"), ""},
		{"the controller writes its ConfigMap", asController,
			merge(cmKind, "stayput-gated-workloads", `{data: {workloads: "\n"}}`), ""},
		{"the controller applies its ConfigMap in a namespace without it", asController,
			patch(cmKind, "elsewhere/stayput-gated-workloads", types.ApplyPatchType,
				`{apiVersion: v1, kind: ConfigMap, metadata: {name: stayput-gated-workloads, labels: {stayput.io/gated-workloads: ''}},
				data: {workloads: "\n"}}`), ""},
		{"the controller deletes its ConfigMap", asController, remove(cmKind, "stayput-gated-workloads"), ""},
		{"the controller creates another ConfigMap", asController,
			create(`{apiVersion: v1, kind: ConfigMap, metadata: {name: other}}`), "may write only the ConfigMap"},

		// Parameters of the gate.
		{"a user labels a ConfigMap as the gate's", asAdmin,
			merge(cmKind, "settings", `{metadata: {labels: {stayput.io/gated-workloads: "x"}}}`), onlyOneLabelled},
		{"a user creates a ConfigMap labelled as the gate's", asAdmin,
			create(`{apiVersion: v1, kind: ConfigMap, metadata: {name: new, labels: {stayput.io/gated-workloads: ""}}}`),
			onlyOneLabelled},
		{"a user takes that label off", asAdmin,
			merge(cmKind, "theirs/labelled", `{metadata: {labels: {stayput.io/gated-workloads: null}}}`), ""},
		{"a user creates a ConfigMap with other labels", asAdmin,
			create(`{apiVersion: v1, kind: ConfigMap, metadata: {name: new, labels: {a: b}}}`), ""},
		{"the controller sets the workload of a RetainedIP, that its pod was scheduled, and releases it", asController,
			patch(retipKind, "web-1.node-2", types.ApplyPatchType, `{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-1.node-2},
				spec: {release: Now, scheduled: pod/web-1, workload: {apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}}}`), ""},
		{"the controller withdraws a release", asController,
			merge(retipKind, "web-0.node-1", `{spec: {release: null}}`), ""},
		{"the controller changes a retention", asController,
			merge(retipKind, "web-0.node-1", `{spec: {retention: 1h}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller removes a field", asController,
			merge(retipKind, "web-0.node-1", `{spec: {podName: other}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller changes a status", asController,
			merge(retipKind, "web-0.node-1", `{status: {ips: ["10.0.0.1"]}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller changes metadata", asController,
			merge(retipKind, "web-0.node-1", `{metadata: {labels: {a: b}}}`), "may change only spec.workload, spec.scheduled and spec.release"},
		{"the controller annotates a RetainedIP", asController,
			merge(retipKind, "web-0.node-1", `{metadata: {annotations: {a: b}}}`),
			"may change only spec.workload, spec.scheduled and spec.release"},

		{"the controller deletes a RetainedIP that no node owns", asController, remove(retipKind, "web-0.node-1"), ""},
		{"the controller deletes a RetainedIP of a node", asController, remove(retipKind, "elsewhere/web-7.node-1"),
			"and delete only one without an owner"},

		// Users, on RetainedIPs.
		{"an editor releases an address", asEditor, merge(retipKind, "web-1.node-2", `{spec: {release: Now}}`), ""},
		{"an editor withdraws a release", asEditor, merge(retipKind, "web-0.node-1", `{spec: {release: null}}`), ""},
		{"an editor labels and annotates a RetainedIP", asEditor,
			merge(retipKind, "web-0.node-1", `{metadata: {labels: {a: b}, annotations: {a: b}}}`), ""},
		{"an editor applies a release", asEditor, patch(retipKind, "web-1.node-2", types.ApplyPatchType,
			`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-1.node-2}, spec: {release: Now}}`), ""},
		{"an editor changes a status", asEditor, merge(retipKind, "web-0.node-1", `{status: {ips: ["10.0.0.1"]}}`), onlyRelease},
		{"an editor removes a status", asEditor, merge(retipKind, "web-0.node-1", `{status: null}`), onlyRelease},
		{"an editor says that a pod was scheduled to a node", asEditor,
			merge(retipKind, "web-0.node-1", `{spec: {scheduled: pod/web-0}}`), onlyRelease},
		{"an editor changes a workload", asEditor, merge(retipKind, "web-0.node-1", `{spec: {workload: {uid: v}}}`), onlyRelease},
		{"an editor removes a workload", asEditor, merge(retipKind, "web-0.node-1", `{spec: {workload: null}}`), onlyRelease},
		{"an editor changes a retention and releases the address", asEditor,
			merge(retipKind, "web-1.node-2", `{spec: {retention: 1h, release: Now}}`), onlyRelease},
		{"an editor adds a finalizer", asEditor,
			merge(retipKind, "web-0.node-1", `{metadata: {finalizers: [example.com/x]}}`), "takes no finalizers"},
		{"an editor adds an owner", asEditor, merge(retipKind, "web-0.node-1",
			`{metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]}}`), "takes no finalizers"},
		{"an editor writes a long annotation", asEditor, merge(retipKind, "web-0.node-1",
			`{metadata: {annotations: {a: `+strings.Repeat("x", 17<<10)+`}}}`), "metadata.annotations: expected at most 16 KiB"},
		{"an editor writes many labels", asEditor, merge(retipKind, "web-0.node-1", `{metadata: {labels: {`+many+`}}}`),
			"expected at most 64 labels"},
		{"an editor writes a long annotation of a PersistentPodState", asEditor, merge(ppsKind, "web",
			`{metadata: {annotations: {a: `+strings.Repeat("x", 17<<10)+`}}}`), "metadata.annotations: expected at most 16 KiB"},
		{"an editor writes many labels of a PersistentPodState", asEditor, merge(ppsKind, "web",
			`{metadata: {labels: {`+many+`}}}`), "expected at most 64 labels"},
		{"an administrator says that a pod was scheduled to a node", asAdmin,
			merge(retipKind, "web-0.node-1", `{spec: {scheduled: pod/web-0}}`), ""},

		// The agent of node-1.
		{"an agent creates an object of its node", asAgent, create(fmt.Sprintf(newRetp, "node-1", "")), ""},
		{"an agent applies an object of its node", asAgent, patch(retipKind, "web-3.node-1", types.ApplyPatchType,
			`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-3.node-1}, spec: {nodeName: node-1, podName: web-3, retention: 10m}, status: {phase: Bound}}`), ""},
		{"an agent applies a change to an object of its node, without release and workload", asAgent,
			patch(retipKind, "web-0.node-1", types.ApplyPatchType,
				`{apiVersion: stayput.io/v1alpha1, kind: RetainedIP, metadata: {name: web-0.node-1}, spec: {nodeName: node-1, podName: web-0, retention: 1h}, status: {phase: Bound}}`), ""},
		{"an agent withdraws a release", asAgent, merge(retipKind, "web-0.node-1", `{spec: {release: null}}`), ""},
		{"an agent deletes an object of its node", asAgent, remove(retipKind, "web-0.node-1"), ""},
		{"an agent creates an object of another node", asAgent,
			create(fmt.Sprintf(newRetp, "node-2", "")), "the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent takes the name of an object of another node", asAgent, create(retpNamed("db-0.node-2")),
			"may not write the RetainedIP db-0.node-2: expected the name POD.node-1"},
		{"an agent takes the name of an object of a node whose name ends like its own", asAgent,
			create(retpNamed("db-0.other.node-1")), "may not write the RetainedIP db-0.other.node-1"},
		{"an agent takes a name of no node", asAgent, create(retpNamed("db-0")), "may not write the RetainedIP db-0"},
		{"an agent takes the name of its node alone", asAgent, create(retpNamed("node-1")), "may not write the RetainedIP node-1"},
		{"an agent creates an object of a pod with a dot", asAgent,
			create(retpNamed(v1alpha1.RetainedIPName("db.0", "node-1"))), ""},
		{"an agent creates an object of a pod with a long name", asAgent,
			create(retpNamed(v1alpha1.RetainedIPName(strings.Repeat("d", 250), "node-1"))), ""},
		{"an agent changes what it wrote under the name of another node", asAgent,
			merge(retipKind, "db-9.node-2", `{status: {phase: Retained}}`), "may not write the RetainedIP db-9.node-2"},
		{"an agent deletes what it wrote under the name of another node", asAgent, remove(retipKind, "db-9.node-2"), ""},
		{"an agent changes what another node wrote under its name", asAgent,
			merge(retipKind, "elsewhere/db-8.node-1", `{status: {phase: Retained}}`),
			"the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent deletes what another node wrote under its name", asAgent, remove(retipKind, "elsewhere/db-8.node-1"), ""},
		{"an agent changes an object of another node", asAgent,
			merge(retipKind, "web-1.node-2", `{status: {phase: Retained}}`),
			"the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent deletes an object of another node", asAgent,
			remove(retipKind, "web-1.node-2"), "the agent of node node-1 may not write a RetainedIP of node node-2"},
		{"an agent creates an object with spec.release", asAgent,
			create(fmt.Sprintf(newRetp, "node-1", ", release: Now")), "may not set spec.release"},
		{"an agent creates an object with a workload", asAgent,
			create(fmt.Sprintf(newRetp, "node-1", ", workload: {apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}")),
			"may not write spec.workload and spec.scheduled"},
		{"an agent changes the workload", asAgent,
			merge(retipKind, "web-0.node-1", `{spec: {workload: {name: other}}}`), "may not write spec.workload and spec.scheduled"},
		{"an agent removes the workload", asAgent,
			merge(retipKind, "web-0.node-1", `{spec: {workload: null}}`), "may not write spec.workload and spec.scheduled"},
		{"an agent creates an object that says that its pod was scheduled", asAgent,
			create(fmt.Sprintf(newRetp, "node-1", ", scheduled: pod/web-2")), "may not write spec.workload and spec.scheduled"},
		{"an agent says that a pod was scheduled to its node", asAgent,
			merge(retipKind, "web-0.node-1", `{spec: {scheduled: pod/web-0}}`), "may not write spec.workload and spec.scheduled"},
		{"an agent creates an object with a finalizer", asAgent,
			create(ownRetp(`finalizers: [example.com/x]`)), "may not write finalizers"},
		{"an agent adds a finalizer", asAgent,
			merge(retipKind, "web-0.node-1", `{metadata: {finalizers: [example.com/x]}}`), "may not write finalizers"},
		{"an agent creates an object with a label", asAgent, create(ownRetp(`labels: {a: b}`)), "may not write labels"},
		{"an agent adds a label", asAgent,
			merge(retipKind, "web-0.node-1", `{metadata: {labels: {a: b}}}`), "may not write labels"},
		{"an agent names its node as the owner", asAgent,
			create(ownRetp(`ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]`)), ""},
		{"an agent names another owner", asAgent,
			create(ownRetp(`ownerReferences: [{apiVersion: v1, kind: Node, name: node-2, uid: u}]`)),
			"may name no other owner than its node"},
		{"an agent adds an owner", asAgent, merge(retipKind, "web-0.node-1",
			`{metadata: {ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}]}}`),
			"may name no other owner than its node"},
		{"a token without a node creates an object", asStray, create(fmt.Sprintf(newRetp, "node-1", "")), "names no node"},
		{"a token without a node changes an object", asStray,
			merge(retipKind, "web-0.node-1", `{status: {phase: Bound}}`), "names no node"},
		{"a token without a node deletes an object", asStray, remove(retipKind, "web-0.node-1"), "names no node"},

		// The agent of node-1, on addresses of pools.
		{"an agent has a pod of which no node has spoken", asAgent,
			reports("10.6.168.101", "phase: Bound, podUID: one, nodeName: node-1"), ""},
		{"an agent has a pod whose predecessor was on another node", asAgent,
			reports("10.6.168.104", "phase: Bound, podUID: next, nodeName: node-1"), ""},
		{"an agent has a pod that was adopted on another node", asAgent,
			reports("10.6.168.108", "phase: Bound, podUID: found, nodeName: node-1"),
			"the agent of node node-1 may not write the status of a PodIP whose pod is on node node-2"},
		{"an agent has a pod that was adopted on its node", asAgent,
			reports("10.6.168.109", "phase: Bound, podUID: own, nodeName: node-1"), ""},
		{"an agent says that its pod is gone", asAgent,
			reports("10.6.168.102", "phase: Retained, podUID: two, nodeName: node-1"), ""},
		{"an agent says that the pod of another node is gone", asAgent,
			reports("10.6.168.103", "phase: Retained, podUID: three, nodeName: node-1"),
			"the agent of node node-1 may not write the status of a PodIP whose pod is on node node-2"},
		{"an agent speaks for another node", asAgent,
			reports("10.6.168.101", "phase: Bound, podUID: one, nodeName: node-2"), "may write of a PodIP only that"},
		{"an agent says that the pod was on no node", asAgent,
			reports("10.6.168.102", "phase: Retained, podUID: two, nodeName: null"), "may write of a PodIP only that"},
		{"an agent speaks of an earlier pod", asAgent,
			reports("10.6.168.104", "phase: Retained, podUID: last, nodeName: node-1"), "may write of a PodIP only that"},
		{"an agent allocates an address", asAgent,
			reports("10.6.168.101", "phase: Allocated, podUID: one, nodeName: node-1"), "may write of a PodIP only that"},
		{"an agent says that another machine has an address", asAgent,
			reports("10.6.168.101", "phase: Bound, podUID: one, nodeName: node-1, conflict: '02:00:00:00:00:01'"), ""},
		{"an agent says so of a pod that is gone", asAgent,
			reports("10.6.168.102", "phase: Retained, podUID: two, nodeName: node-1, conflict: '02:00:00:00:00:01'"),
			"may write status.conflict only of a pod that may use the address"},
		{"an agent says how to route to its pod", asAgent, reports("10.8.168.101",
			"phase: Bound, podUID: far, nodeName: node-1, podCIDR: 10.244.1.0/24"), ""},
		{"an agent says how to route to a pod of another node", asAgent, reports("10.8.168.102",
			"phase: Bound, podUID: away, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"the agent of node node-1 may not write the status of a PodIP whose pod is on node node-2"},
		{"an agent says how to route to another node", asAgent, reports("10.8.168.101",
			"phase: Bound, podUID: far, nodeName: node-2, podCIDR: 10.244.2.0/24"), "may write of a PodIP only that"},
		{"an agent says how to route to an earlier pod", asAgent, reports("10.8.168.101",
			"phase: Bound, podUID: last, nodeName: node-1, podCIDR: 10.244.1.0/24"), "may write of a PodIP only that"},
		{"an agent says how to route to a pod that is gone", asAgent, reports("10.8.168.101",
			"phase: Retained, podUID: far, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"may write status.podCIDR only of an address of mode Routed"},
		{"an agent says how to route to a pod of a link", asAgent, reports("10.6.168.101",
			"phase: Bound, podUID: one, nodeName: node-1, podCIDR: 10.244.1.0/24"),
			"may write status.podCIDR only of an address of mode Routed"},
		{"an agent allocates an address of a link", asAgent, reports("10.6.168.101",
			"phase: Allocated, podUID: one, nodeName: node-1, podCIDR: 10.244.1.0/24"), "may write of a PodIP only that"},
		{"an agent says when an address becomes free", asAgent,
			reports("10.6.168.102", `phase: Retained, podUID: two, nodeName: node-1, expires: "2042-11-21T07:12:55Z"`),
			"may not write status.expires"},
		{"an agent answers", asAgent, merge(reportKind, "node-1", `{spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`), ""},
		{"an agent applies its answer", asAgent, patch(reportKind, "node-1", types.ApplyPatchType,
			`{apiVersion: stayput.io/v1alpha1, kind: PodIPReport, metadata: {name: node-1, ownerReferences: [{apiVersion: v1, kind: Node, name: node-1, uid: u}]}, spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`), ""},
		{"an agent answers for another node", asAgent, merge(reportKind, "node-2", `{spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`),
			"the agent of node node-1 may not write the PodIPReport node-2"},
		{"an agent answers for a node that has not answered", asAgent, create(fmt.Sprintf(newReport, "node-3")),
			"the agent of node node-1 may not write the PodIPReport node-3"},
		{"an agent adds a finalizer to its answer", asAgent,
			merge(reportKind, "node-1", `{metadata: {finalizers: [example.com/x]}}`), "may not write finalizers and labels"},
		{"an agent labels its answer", asAgent,
			merge(reportKind, "node-1", `{metadata: {labels: {a: b}}}`), "may not write finalizers and labels"},
		{"an agent names another owner of its answer", asAgent, merge(reportKind, "node-1",
			`{metadata: {ownerReferences: [{apiVersion: v1, kind: Node, name: node-2, uid: u}]}}`),
			"may name no other owner than its node"},
		{"a token without a node answers", asStray, merge(reportKind, "node-1", `{spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`), "names no node"},
		{"a token without a node says that a pod is gone", asStray,
			reports("10.6.168.102", "phase: Retained, podUID: two"), "names no node"},

		// PersistentPodStates.
		{"a second PersistentPodState for a workload", asAdmin,
			create(newState("second", "{apiVersion: apps/v1, kind: StatefulSet, name: web}")),
			"StatefulSet web already has a PersistentPodState: web"},
		{"a second PersistentPodState by another version of the group", asAdmin,
			create(newState("second", "{apiVersion: apps/v1beta2, kind: StatefulSet, name: web}")),
			"already has a PersistentPodState: web"},
		{"a PersistentPodState for another workload", asAdmin,
			create(newState("second", "{apiVersion: apps/v1, kind: StatefulSet, name: db}")), ""},
		{"a PersistentPodState for a workload of another group", asAdmin,
			create(newState("second", "{apiVersion: apps.kruise.io/v1beta1, kind: StatefulSet, name: web}")), ""},
		{"a PersistentPodState for a workload of another kind", asAdmin,
			create(newState("second", "{apiVersion: apps/v1, kind: Other, name: web}")), ""},
		{"a PersistentPodState for a workload of the same name in another namespace", asAdmin,
			create(strings.Replace(newState("second", "{apiVersion: apps/v1, kind: StatefulSet, name: web}"),
				"metadata: {", "metadata: {namespace: elsewhere, ", 1)), ""},

		// The objects whose annotations are checked. For the values, see TestAdmissionAndThePluginAgreeOnEveryValue.
		{"a pod", asAdmin, create(fmt.Sprintf(newPod, `stayput.io/retain-ip: "true"`)), notValid},
		{"a pod with a label and owner as of a StatefulSet's pods", asAdmin,
			create(labelled(ownedPod("guarded", "apps/v1", "StatefulSet", "bad", `stayput.io/retain-ip: "true"`, ""))),
			notValid},
		{"a pod with such a label asks for bad pools", asAdmin,
			create(labelled(ownedPod("guarded", "apps/v1", "StatefulSet", "bad", `stayput.io/pools: "blue,blue"`, ""))),
			`stayput.io/pools: "blue,blue" is not valid`},
		{"a pod with such a label and addresses", asAdmin,
			create(labelled(ownedPod("guarded", "apps/v1", "StatefulSet", "bad", "stayput.io/pools: blue, "+told, ""))),
			onlyTheController},
		{"a ReplicaSet with a label as of a Deployment's", asAdmin, create(strings.Replace(
			template("apps/v1", "ReplicaSet", `stayput.io/retain-ip: "true"`),
			"metadata: {name: new}", "metadata: {name: new, labels: {pod-template-hash: x}}", 1)), notValid},
		{"a pod gets a bad annotation by its status", asAdmin,
			merge(podKind, "placed", `{metadata: {annotations: {stayput.io/retain-ip: "true"}}}`, "status"), notValid},
		{"a user binds a pod with a bad annotation", asAdmin, bind("unbound", `stayput.io/retain-ip: "true"`), notValid},
		{"a pod of a kind that the policy does not check", asAdmin,
			create(ownedPod("guarded", "example.com/v1", "StatefulSet", "bad", `stayput.io/retain-ip: "true"`, "")), notValid},
		{"a pod gets a bad annotation later", asAdmin,
			merge(podKind, "placed", `{metadata: {annotations: {stayput.io/retain-ip: "true"}}}`), notValid},
		{"a bad object stays as it is", asAdmin,
			merge(stsKind, "bad", `{spec: {replicas: 1, template: {metadata: {annotations: {restarted: now}}}}}`), ""},
		{"a bad object is changed and stays bad", asAdmin,
			merge(stsKind, "bad", `{spec: {template: {metadata: {annotations: {stayput.io/identity: x}}}}}`), notValid},
		{"a bad object is fixed", asAdmin,
			merge(stsKind, "bad", `{spec: {template: {metadata: {annotations: {stayput.io/retain-ip: 10m}}}}}`), ""},
		{"several bad values are reported together", asAdmin,
			create(template("apps/v1", "StatefulSet", `stayput.io/retain-ip: "true", stayput.io/home-wait: soon`)),
			notValid + `; stayput.io/home-wait: "soon" is not valid: expected a duration above 0 in h, m and s such as 60s or ` +
				`10m, or retention`},
		{"a workload's own annotations are its own", asAdmin,
			create(strings.Replace(template("apps/v1", "StatefulSet", ""), "metadata: {name: new}",
				`metadata: {name: new, annotations: {stayput.io/retain-ip: "true"}}`, 1)), ""},
	}
	for _, kind := range [][2]string{
		{"apps/v1", "Deployment"}, {"apps/v1", "ReplicaSet"}, {"apps/v1", "StatefulSet"}, {"apps/v1", "DaemonSet"},
		{"batch/v1", "Job"}, {"batch/v1", "CronJob"}, {"v1", "ReplicationController"},
		{"apps.kruise.io/v1beta1", "StatefulSet"}, {"apps.kruise.io/v1beta1", "CloneSet"},
		{"apps.kruise.io/v1beta1", "DaemonSet"},
	} {
		all = append(all,
			attempt{"a good " + kind[1] + " of " + kind[0], asAdmin,
				create(template(kind[0], kind[1], `stayput.io/retain-ip: 10m`)), ""},
			attempt{"a bad " + kind[1] + " of " + kind[0], asAdmin,
				create(template(kind[0], kind[1], `stayput.io/retain-ip: "true"`)), notValid},
			attempt{"a " + kind[1] + " of " + kind[0] + " that asks for pools", asAdmin,
				create(template(kind[0], kind[1], `stayput.io/pools: "blue,green@net1"`)), ""},
			attempt{"a " + kind[1] + " of " + kind[0] + " that asks for bad pools", asAdmin,
				create(template(kind[0], kind[1], `stayput.io/pools: "blue,blue"`)), `stayput.io/pools: "blue,blue" is not valid`},
			attempt{"a " + kind[1] + " of " + kind[0] + " with addresses", asAdmin,
				create(template(kind[0], kind[1], told)), "stayput.io/addresses is not for pod templates"})
	}
	return all
}()

// refused reports whether an admission policy refused a request with this message.
func refused(err error, why string) bool {
	return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy") && strings.Contains(err.Error(), why)
}

// It runs first, and shows that what the policies refuse is refused by nothing else.
func TestWithoutThePoliciesEveryAttemptIsAccepted(t *testing.T) {
	g := guardedWith(t, false)
	for _, a := range attempts {
		t.Run(a.name, func(t *testing.T) {
			// The API server caches RBAC.
			until(t, "the attempt to be accepted", func(ctx context.Context) bool {
				_, err := a.do(ctx, g, a.as(g))
				if err != nil && !apierrors.IsForbidden(err) {
					t.Fatal(err)
				}
				return err == nil
			})
		})
	}
	for _, p := range gateAttempts {
		if p.gates != nil && !slices.Contains(p.gates, "stayput.io/placement") {
			continue
		}
		made, err := create(p.pod)(testContext(t), g, g.admin)
		must.Do(t, err)
		if gates := gatesOf(made); slices.Contains(gates, "stayput.io/placement") &&
			!strings.Contains(p.pod, "stayput.io/placement") {
			t.Errorf("%s: gated without a policy: %v", p.name, gates)
		}
	}
}

func TestThePoliciesRefuseWhatTheyShouldAndNothingElse(t *testing.T) {
	g := guardedWith(t, true)
	for _, a := range attempts {
		if a.refusal == "" {
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			// A policy takes effect a second or two after it is applied.
			var err error
			until(t, "the refusal", func(ctx context.Context) bool {
				_, err = a.do(ctx, g, a.as(g))
				return err != nil
			})
			if !refused(err, a.refusal) {
				t.Errorf("%v, want a refusal with %q", err, a.refusal)
			}
		})
	}
	for _, a := range attempts {
		if a.refusal != "" {
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			_, err := a.do(testContext(t), g, a.as(g))
			must.Do(t, err)
		})
	}
}
