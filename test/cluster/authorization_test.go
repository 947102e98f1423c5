package cluster

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/test/chart"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// A right is a request, and whether RBAC allows it.
type right struct {
	name    string
	as      func(*guard) *rest.Config
	do      try
	allowed bool
}

const (
	nodeKind        = "Node.v1."
	leaseKind       = "Lease.v1.coordination.k8s.io"
	mapBindingKind  = "MutatingAdmissionPolicyBinding.v1.admissionregistration.k8s.io"
	vapBindingKind  = "ValidatingAdmissionPolicyBinding.v1.admissionregistration.k8s.io"
	vapPolicyKind   = "ValidatingAdmissionPolicy.v1.admissionregistration.k8s.io"
	webhookKind     = "MutatingWebhookConfiguration.v1.admissionregistration.k8s.io"
	validatingKind  = "ValidatingWebhookConfiguration.v1.admissionregistration.k8s.io"
	crdKind         = "CustomResourceDefinition.v1.apiextensions.k8s.io"
	clusterRoleKind = "ClusterRole.v1.rbac.authorization.k8s.io"
	accountKind     = "ServiceAccount.v1."

	clusterRoleBindingKind = "ClusterRoleBinding.v1.rbac.authorization.k8s.io"
)

func asViewer(g *guard) *rest.Config { return g.c.RESTConfigAs("viewer") }
func asEditor(g *guard) *rest.Config { return g.c.RESTConfigAs("editor") }

// asOverseer has the role edit in the whole cluster.
func asOverseer(g *guard) *rest.Config { return g.c.RESTConfigAs("overseer") }

// asUninstall is the account of the Job that helm uninstall runs.
func asUninstall(g *guard) *rest.Config {
	return g.c.RESTConfigAs("system:serviceaccount:" + lab.SystemNamespace + ":" + uninstallAccount)
}

const uninstallAccount = "stayput-uninstall"

// uninstallRights returns the objects that helm uninstall creates before it runs its Job.
func uninstallRights(ctx context.Context) (string, error) {
	objects, err := chart.Render(ctx, "--show-only=templates/50-uninstall.yaml", "--set=pools.enabled=true")
	if err != nil {
		return "", err
	}
	var all strings.Builder
	for _, o := range objects {
		if o.Kind != "Job" {
			fmt.Fprintf(&all, "---\n%s\n", o.Text)
		}
	}
	return all.String(), nil
}

// follow starts a watch, of all namespaces if namespace is empty, and stops it at once.
func follow(kind, namespace, fields string) try {
	return object(kind, namespace+"/",
		func(ctx context.Context, r dynamic.ResourceInterface, _ string) (*unstructured.Unstructured, error) {
			w, err := r.Watch(ctx, metav1.ListOptions{FieldSelector: fields})
			if err == nil {
				w.Stop()
			}
			return nil, err
		})
}

// makeToken creates a token of the controller.
func makeToken(ctx context.Context, _ *guard, as *rest.Config) (*unstructured.Unstructured, error) {
	client, err := kubernetes.NewForConfig(as)
	if err != nil {
		return nil, err
	}
	_, err = client.CoreV1().ServiceAccounts(lab.SystemNamespace).CreateToken(ctx, lab.ControllerAccount,
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	return nil, err
}

// update writes an object as it is read.
func update(kind, name string) try {
	return func(ctx context.Context, g *guard, as *rest.Config) (*unstructured.Unstructured, error) {
		is, err := get(kind, name)(ctx, g, as)
		if err != nil {
			return nil, err
		}
		return object(kind, name,
			func(ctx context.Context, r dynamic.ResourceInterface, _ string) (*unstructured.Unstructured, error) {
				return r.Update(ctx, is, metav1.UpdateOptions{DryRun: dryRun})
			})(ctx, g, as)
	}
}

// people bind users to the default roles view, edit and admin.
const people = `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: keeper, namespace: guarded}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: admin}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: keeper}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: overseer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: overseer}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: viewer, namespace: guarded}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: viewer}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: editor, namespace: guarded}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: editor}]
`

func newEvent(apiVersion, namespace string) string {
	const event = `{apiVersion: %s, kind: Event, metadata: {name: new, namespace: %s}, ` +
		`involvedObject: {namespace: %[2]s}, regarding: {namespace: %[2]s}, eventTime: "2026-01-01T00:00:00.000000Z", ` +
		`reportingController: test, reportingComponent: test, reportingInstance: test, ` +
		`action: Test, reason: Test, type: Normal}`
	return fmt.Sprintf(event, apiVersion, namespace)
}

// rights lists what the programs need and what they must not have. What RBAC allows and a policy refuses is in
// attempts.
var rights = func() []right {
	all := []right{
		{"watch its objects", asAgent, list(retipKind, "spec.nodeName=node-1", true), true},
		{"read its node", asAgent, get(nodeKind, "node-1"), true},
		{"create an Event", asAgent, create(newEvent("events.k8s.io/v1", "guarded")), true},
		{"change the spec of a pod", asAgent,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{spec: {containers: [{name: c, image: evil}]}}`), false},
		{"watch the pods of its node", asAgent, follow(podKind, "", "spec.nodeName=node-1"), true},
		{"look a pod up", asAgent, get(podKind, "waiting"), true},
		{"read a PodIP", asAgent, get(podIPKind, "10.6.168.102"), true},
		{"say that it has an address", asAgent,
			reports("10.6.168.102", "phase: Bound, podUID: two, nodeName: node-1"), true},
		{"watch the PodIPAudit", asAgent, follow(auditKind, "", ""), true},
		{"read its answer", asAgent, get(reportKind, "node-1"), true},
		{"answer", asAgent, create(fmt.Sprintf(newReport, "node-1")), true},
		{"answer again", asAgent, merge(reportKind, "node-1", `{spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`), true},
		{"change a PodIP", asAgent, merge(podIPKind, "10.6.168.102", `{spec: {release: Now}}`), false},
		{"claim an address", asAgent, create(newPodIP("10.6.168.105")), false},
		{"delete a PodIP", asAgent, remove(podIPKind, "10.6.168.102"), false},
		{"watch routed PodIPs", asAgent, follow(podIPKind, "", podip.RoutedSelector.String()), true},
		{"watch the PodIPs that name its node", asAgent, follow(podIPKind, "", "status.nodeName=node-1"), true},
		{"list answers", asAgent, list(reportKind, "", true), false},
		{"read a pool", asAgent, get(poolKind, "blue"), false},
		{"change a pool", asAgent, merge(poolKind, "blue", `{spec: {allocation: Disabled}}`), false},
		{"ask the nodes", asAgent, merge(auditKind, "cluster", `{spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`), false},
		{"delete its answer", asAgent, remove(reportKind, "node-1"), false},
		{"annotate a pod", asAgent, merge(podKind, "late", `{metadata: {annotations: {seen: "yes"}}}`), false},
		{"delete a pod", asAgent, remove(podKind, "waiting"), false},
		{"list nodes", asAgent, list(nodeKind, "", true), false},
		{"change its node", asAgent, merge(nodeKind, "node-1", `{metadata: {labels: {a: b}}}`), false},
		{"change the status of its node", asAgent, merge(nodeKind, "node-1", `{status: {phase: x}}`, "status"), false},
		{"read a PersistentPodState", asAgent, get(ppsKind, "web"), false},
		{"write a PersistentPodState", asAgent, merge(ppsKind, "web", `{metadata: {labels: {a: b}}}`), false},
		{"list workloads", asAgent, list(stsKind, "", true), false},
		{"read a ConfigMap", asAgent, get(cmKind, "settings"), false},
		{"read the ConfigMap of the gate", asAgent, get(cmKind, "stayput-gated-workloads"), false},

		{"read pods", asController, list(podKind, "", true), true},
		{"read nodes", asController, list(nodeKind, "", true), true},
		{"read workloads", asController, list(stsKind, "", true), true},
		{"read workloads of OpenKruise", asController, list("StatefulSet.v1beta1.apps.kruise.io", "", true), true},
		{"look up a Deployment", asController, get("Deployment.v1.apps", "none"), true},
		{"look up a ReplicaSet", asController, get("ReplicaSet.v1.apps", "none"), true},
		{"read RetainedIPs", asController, list(retipKind, "", true), true},
		{"read PersistentPodStates", asController, list(ppsKind, "", true), true},
		{"create a PersistentPodState", asController,
			create(newState("new", "{apiVersion: apps/v1, kind: StatefulSet, name: new}")), true},
		{"apply a PersistentPodState", asController, merge(ppsKind, "web", `{metadata: {labels: {a: b}}}`), true},
		{"delete a PersistentPodState", asController, remove(ppsKind, "web"), true},
		{"update the status of a PersistentPodState", asController, merge(ppsKind, "web", `{status: {pods: 1}}`, "status"), true},
		{"create an Event", asController, create(newEvent("events.k8s.io/v1", "guarded")), true},
		{"report the leader", asController, create(newEvent("v1", "stayput-system")), true},
		{"take the lease", asController,
			create(`{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: stayput-controller, namespace: stayput-system}}`),
			true},
		{"find the ConfigMaps of the gate", asController, list(cmKind, "metadata.name=stayput-gated-workloads", true), true},
		{"read the ConfigMap of the gate", asController, get(cmKind, "stayput-gated-workloads"), true},
		{"watch OpenKruise's mutating webhook", asController,
			follow(webhookKind, "", "metadata.name=kruise-mutating-webhook-configuration"), true},
		{"delete the binding that keeps targets unique", asController, remove(vapBindingKind, "stayput-unique-target"), true},

		{"read pools", asController, list(poolKind, "", true), true},
		{"hold a pool", asController, merge(poolKind, "blue", `{metadata: {finalizers: [stayput.io/in-use]}}`), true},
		{"count the addresses of a pool", asController,
			merge(poolKind, "blue", `{status: {addresses: {total: 10, used: 4, free: 6, outOfRange: 0}}}`, "status"), true},
		{"read PodIPs", asController, list(podIPKind, "", true), true},
		{"claim an address", asController, create(newPodIP("10.6.168.105")), true},
		{"give an address to the next pod", asController, merge(podIPKind, "10.6.168.102", `{spec: {podUID: next}}`), true},
		{"let a PodIP go", asController, update(podIPKind, "10.6.168.102"), true},
		{"say that a node is off", asController, reports("10.6.168.102", "phase: Retained"), true},
		{"free an address", asController, remove(podIPKind, "10.6.168.102"), true},
		{"mark the PodIPAudit", asController, update(auditKind, "cluster"), true},
		{"make the PodIPAudit", asController, create(`{apiVersion: stayput.io/v1alpha1, kind: PodIPAudit, metadata: {name: cluster},
			spec: {round: "2026-01-01T00:00:00.000001Z", phase: Settled, mark: "2026-01-01T00:00:00.000000Z"}}`), true},
		{"read the answers", asController, list(reportKind, "", true), true},
		{"read namespaces", asController, list("Namespace.v1.", "", true), true},
		{"look a namespace up", asController, get("Namespace.v1.", "guarded"), true},
		{"look a pod up", asController, get(podKind, "waiting"), true},
		{"look a node up", asController, get(nodeKind, "node-1"), true},
		{"read the addresses of Services", asController, list("ServiceCIDR.v1.networking.k8s.io", "", true), true},
		{"say that there are pools", asController,
			merge(cmKind, lab.SystemNamespace+"/stayput-installation", `{metadata: {annotations: {stayput.io/pools: "true"}}}`),
			true},
		{"create a pool", asController, create(newPool("mode: L2, subnet: 10.7.0.0/16")), false},
		{"delete a pool", asController, remove(poolKind, "blue"), false},
		{"delete the PodIPAudit", asController, remove(auditKind, "cluster"), false},
		{"answer for a node", asController, merge(reportKind, "node-1", `{spec: {epoch: "2026-01-01T00:00:00.000002Z"}}`), false},
		{"label a namespace", asController,
			merge(namespaceKind, "guarded", `{metadata: {labels: {stayput.io/default-pools: ""}}}`), true},
		{"create a namespace", asController,
			create(`{apiVersion: v1, kind: Namespace, metadata: {name: new}}`), false},
		{"delete a namespace", asController, remove(namespaceKind, "guarded"), false},
		{"change the status of a namespace", asController,
			merge(namespaceKind, "guarded", `{status: {phase: Terminating}}`, "status"), false},

		{"create a pod", asController, create(fmt.Sprintf(newPod, "")), false},
		{"bind a pod", asController,
			create(`{apiVersion: v1, kind: Binding, metadata: {name: waiting}, target: {kind: Node, name: node-1}}`), false},
		{"nominate a node for a pod", asController,
			merge(podKind, "waiting", `{status: {nominatedNodeName: node-1}}`, "status"), true},
		{"resize a pod", asController, merge(podKind, "placed", `{spec: {containers: []}}`, "resize"), false},
		{"change ephemeral containers of a pod", asController,
			merge(podKind, "placed", `{spec: {ephemeralContainers: []}}`, "ephemeralcontainers"), false},
		{"list Deployments", asController, list("Deployment.v1.apps", "", true), false},
		{"change a node", asController, merge(nodeKind, "node-1", `{spec: {unschedulable: true}}`), false},
		{"change a workload", asController, merge(stsKind, "bad", `{spec: {replicas: 1}}`), false},
		{"scale a workload", asController, merge(stsKind, "bad", `{spec: {replicas: 1}}`, "scale"), false},
		{"create a RetainedIP", asController, create(fmt.Sprintf(newRetp, "node-1", "")), false},
		{"delete a RetainedIP", asController, remove(retipKind, "web-0.node-1"), true},
		{"read another ConfigMap", asController, get(cmKind, "settings"), false},
		{"list ConfigMaps", asController, list(cmKind, "", true), false},
		{"change another ConfigMap", asController, merge(cmKind, "settings", `{data: {a: b}}`), false},
		{"delete another ConfigMap", asController, remove(cmKind, "settings"), false},
		{"create an Event by the core API", asController, create(newEvent("v1", "guarded")), false},
		{"read another lease", asController, get(leaseKind, "stayput-system/other"), false},
		{"take a lease in another namespace", asController,
			create(`{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: stayput-controller, namespace: kube-system}}`),
			false},
		{"watch the ConfigMaps of the gate", asController,
			follow(cmKind, "", "metadata.name=stayput-gated-workloads"), false},
		{"read the definition of PersistentPodStates", asController,
			get(crdKind, "persistentpodstates.apps.kruise.io"), false},
		{"list definitions", asController, list(crdKind, "", true), false},
		{"change the definition of PersistentPodStates", asController,
			merge(crdKind, "persistentpodstates.apps.kruise.io", `{metadata: {labels: {a: b}}}`), false},
		{"list webhooks", asController, list(webhookKind, "", true), false},
		{"list validating webhooks", asController, list(validatingKind, "", true), false},
		{"list OpenKruise's validating webhook", asController,
			list(validatingKind, "metadata.name=kruise-validating-webhook-configuration", true), false},
		{"delete the binding of its own policy", asController, remove(vapBindingKind, "stayput-controller"), false},
		{"delete the binding of the agents' policy", asController, remove(vapBindingKind, "stayput-agent"), false},
		{"delete the binding that gates recorded pods", asController, remove(mapBindingKind, "stayput-gate-recorded"), false},
		{"delete the binding that gates annotated pods", asController, remove(mapBindingKind, "stayput-gate-annotated"), false},
		{"change its own policy", asController,
			merge(vapPolicyKind, "stayput-controller", `{spec: {failurePolicy: Ignore}}`), false},
		{"create a binding", asController,
			create(`{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: new}, spec: {policyName: x, validationActions: [Deny]}}`),
			false},

		{"delete the permission to gate", asUninstall, remove(clusterRoleBindingKind, "stayput-gate"), true},
		{"say that Stayput is being uninstalled", asUninstall,
			merge(cmKind, lab.SystemNamespace+"/stayput-installation", `{metadata: {annotations: {stayput.io/uninstall: "true"}}}`),
			true},
		{"find gated pods", asUninstall, list(podKind, "spec.nodeName=", true), true},
		{"ungate a pod", asUninstall,
			patch(podKind, "waiting", types.StrategicMergePatchType, `{spec: {schedulingGates: [{$patch: delete, name: stayput.io/placement}]}}`),
			true},
		{"list RetainedIPs", asUninstall, list(retipKind, "", true), true},
		{"find the ConfigMaps of the gate", asUninstall, list(cmKind, "metadata.name=stayput-gated-workloads", true), true},
		{"delete the ConfigMap of the gate", asUninstall, remove(cmKind, "stayput-gated-workloads"), true},
		{"find what holds PodIPs", asUninstall, list(podIPKind, "", true), true},
		{"let a PodIP go", asUninstall, merge(podIPKind, "10.6.168.102", `{metadata: {finalizers: null}}`), true},

		{"delete a PodIP", asUninstall, remove(podIPKind, "10.6.168.102"), false},
		{"delete the installation", asUninstall, remove(cmKind, lab.SystemNamespace+"/stayput-installation"), false},
		{"delete another permission", asUninstall, remove(clusterRoleBindingKind, "stayput-agent"), false},
		{"delete the binding that gates annotated pods", asUninstall, remove(mapBindingKind, "stayput-gate-annotated"), false},
		{"claim an address", asUninstall, create(newPodIP("10.6.168.105")), false},
		{"delete a pod", asUninstall, remove(podKind, "waiting"), false},
		{"change the status of a pod", asUninstall, merge(podKind, "waiting", `{status: {phase: Failed}}`, "status"), false},
		{"resize a pod", asUninstall, merge(podKind, "placed", `{spec: {containers: []}}`, "resize"), false},
		{"bind a pod", asUninstall,
			create(`{apiVersion: v1, kind: Binding, metadata: {name: waiting}, target: {kind: Node, name: node-1}}`), false},
		{"list nodes", asUninstall, list(nodeKind, "", true), false},
		{"list workloads", asUninstall, list(stsKind, "", true), false},
		{"scale a workload", asUninstall, merge(stsKind, "bad", `{spec: {replicas: 1}}`, "scale"), false},
		{"release an address", asUninstall, merge(retipKind, "web-0.node-1", `{spec: {release: Now}}`), false},
		{"delete a RetainedIP", asUninstall, remove(retipKind, "web-0.node-1"), false},
		{"read a PersistentPodState", asUninstall, get(ppsKind, "web"), false},
		{"delete a PersistentPodState", asUninstall, remove(ppsKind, "web"), false},
		{"list ConfigMaps", asUninstall, list(cmKind, "", true), false},
		{"create a ConfigMap", asUninstall, create(`{apiVersion: v1, kind: ConfigMap, metadata: {name: other}}`), false},
		{"delete another ConfigMap", asUninstall, remove(cmKind, "settings"), false},
		{"delete another ConfigMap of its own namespace", asUninstall,
			remove(cmKind, lab.SystemNamespace+"/kube-root-ca.crt"), false},
		{"delete the binding of the controller's policy", asUninstall, remove(vapBindingKind, "stayput-controller"), false},
		{"change the controller's policy", asUninstall,
			merge(vapPolicyKind, "stayput-controller", `{spec: {failurePolicy: Ignore}}`), false},
		{"list definitions", asUninstall, list(crdKind, "", true), false},
		{"delete the definition of PersistentPodStates", asUninstall,
			remove(crdKind, "persistentpodstates.apps.kruise.io"), false},

		{"list RetainedIPs", asViewer, list(retipKind, "", false), true},
		{"list PersistentPodStates", asViewer, list(ppsKind, "", false), true},
		{"release an address", asViewer, merge(retipKind, "web-0.node-1", `{spec: {release: Now}}`), false},
		{"create a PersistentPodState", asViewer,
			create(newState("new", "{apiVersion: apps/v1, kind: StatefulSet, name: new}")), false},
		{"list RetainedIPs", asEditor, list(retipKind, "", false), true},
		{"release an address", asEditor, merge(retipKind, "web-0.node-1", `{spec: {release: Now}}`), true},
		{"create a PersistentPodState", asEditor,
			create(newState("new", "{apiVersion: apps/v1, kind: StatefulSet, name: new}")), true},
		{"create a RetainedIP", asEditor, create(fmt.Sprintf(newRetp, "node-1", "")), false},
		{"update the status of a PersistentPodState", asEditor, merge(ppsKind, "web", `{status: {pods: 1}}`, "status"), false},
		{"list RetainedIPs of all namespaces", asEditor, list(retipKind, "", true), false},
		{"list PodIPs", asEditor, list(podIPKind, "", true), false},
		{"list pools", asOverseer, list(poolKind, "", true), true},
		{"list PodIPs", asOverseer, list(podIPKind, "", true), true},
		{"release an address of a pool", asOverseer, merge(podIPKind, "10.6.168.102", `{spec: {release: Now}}`), false},
		{"create a pool", asOverseer, create(newPool("mode: L2, subnet: 10.7.0.0/16")), false},
	}
	// Where there are pools, the controller reads whether the installation has agents.
	for i, as := range []func(*guard) *rest.Config{asAgent, asController} {
		all = append(all,
			right{"watch the installation", as,
				follow(cmKind, lab.SystemNamespace, "metadata.name=stayput-installation"), true},
			right{"read the installation", as, get(cmKind, lab.SystemNamespace+"/stayput-installation"), i == 1},
			right{"delete the installation", as, remove(cmKind, lab.SystemNamespace+"/stayput-installation"), false},
		)
	}
	for _, as := range []func(*guard) *rest.Config{asAgent, asController, asUninstall} {
		all = append(all,
			right{"read a secret", as, get(secretKind, "password"), false},
			right{"list secrets", as, list(secretKind, "", true), false},
			right{"list secrets of its own namespace", as, list(secretKind, "", false), false},
			right{"write a secret", as, merge(secretKind, "password", `{stringData: {a: b}}`), false},
			right{"create a pod", as, create(fmt.Sprintf(newPod, "")), false},
			right{"read service accounts", as, list(accountKind, "", true), false},
			right{"create a token of its account", as, makeToken, false},
			right{"give itself rights", as, merge(clusterRoleKind, "stayput-agent", `{rules: []}`), false},
			right{"read roles", as, list(clusterRoleKind, "", true), false},
		)
	}
	return all
}()

func TestProgramsAndPeopleHaveTheRightsTheyNeedAndNoOthers(t *testing.T) {
	g := guardedWith(t, true)
	uninstall, err := uninstallRights(testContext(t))
	must.Do(t, err)
	_, err = g.c.Kubectl(testContext(t), uninstall, "apply", "--server-side", "-f", "-")
	must.Do(t, err)
	who := map[string]string{}
	for _, r := range rights {
		name := "the agent"
		switch as := r.as(g); {
		case as.Impersonate.UserName != "":
			_, account, _ := strings.Cut(as.Impersonate.UserName, lab.SystemNamespace+":")
			name = "the " + cmp.Or(account, as.Impersonate.UserName)
		case as == g.controller:
			name = "the controller"
		}
		who[name] = ""
		t.Run(name+" may or may not "+r.name, func(t *testing.T) {
			if !r.allowed {
				_, err := r.do(testContext(t), g, r.as(g))
				if !apierrors.IsForbidden(err) || refused(err, "") { // a policy must not be what refuses it
					t.Errorf("%v, want a refusal by RBAC", err)
				}
				return
			}
			var err error
			until(t, "the right", func(ctx context.Context) bool { // roles are aggregated after a moment
				_, err = r.do(ctx, g, r.as(g))
				return !apierrors.IsForbidden(err)
			})
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) {
				t.Error(err)
			}
		})
	}
	if len(who) != 6 {
		t.Errorf("tried by %v", who)
	}
}

// It shows that the requests refused above are valid.
func TestAnAdministratorMayDoWhatIsRefused(t *testing.T) {
	g := guardedWith(t, true)
	const lease = "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {name: other, namespace: " +
		lab.SystemNamespace + "}\n"
	_, err := g.c.Kubectl(testContext(t), lease, "apply", "--server-side", "-f", "-")
	must.Do(t, err)
	// These are impossible for these objects, which the API server reports only if everything else is right.
	answers := map[string]string{
		"change the status of a namespace": "may only be 'Active' if `deletionTimestamp` is empty",
		"bind a pod":                       "pod waiting has non-empty .spec.schedulingGates",
		"resize a pod":                     "containers may not be added or removed on resize",
	}
	for _, r := range rights {
		if r.allowed {
			continue
		}
		_, err := r.do(testContext(t), g, g.admin)
		want := answers[r.name]
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", r.name, err, want)
		}
	}
}

// RBAC knows no fields: the Job may ungate a pod, but change no more of it than the controller may.
func TestThePoliciesLimitTheUninstallJobLikeTheController(t *testing.T) {
	g := guardedWith(t, true)
	uninstall, err := uninstallRights(testContext(t))
	must.Do(t, err)
	_, err = g.c.Kubectl(testContext(t), uninstall, "apply", "--server-side", "-f", "-")
	must.Do(t, err)
	for change, why := range map[string]string{
		`{spec: {containers: [{name: c, image: evil}]}}`:                         "may change only the annotations, node affinity, ",
		`{metadata: {labels: {a: c}}}`:                                           "may change only the annotations, node affinity, ",
		`{spec: {schedulingGates: [{$patch: delete, name: example.com/quota}]}}`: "may remove only the scheduling gate",
	} {
		until(t, "the refusal of "+change, func(ctx context.Context) bool { // the rights take effect after a moment
			_, err = patch(podKind, "waiting", types.StrategicMergePatchType, change)(ctx, g, asUninstall(g))
			return !apierrors.IsForbidden(err) || refused(err, "")
		})
		if !refused(err, why) {
			t.Errorf("%s: %v, want a refusal by the policy", change, err)
		}
	}
}

// A label adds the rights for workloads of further kinds.
func TestTheControllerHasTheRightsOfALabelledClusterRole(t *testing.T) {
	g := guardedWith(t, true)
	const kind = "CloneSet.v1beta1.apps.kruise.io"
	if _, err := list(kind, "", true)(testContext(t), g, g.controller); !apierrors.IsForbidden(err) {
		t.Errorf("%v, want a refusal", err)
	}
	_, err := g.c.Kubectl(testContext(t), `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: clonesets, labels: {rbac.stayput.io/aggregate-to-controller: "true"}}
rules:
- {apiGroups: [apps.kruise.io], resources: [clonesets], verbs: [get, list, watch]}
`, "apply", "--server-side", "-f", "-")
	must.Do(t, err)
	until(t, "the right", func(ctx context.Context) bool {
		_, err := list(kind, "", true)(ctx, g, g.controller)
		return err == nil
	})
}
