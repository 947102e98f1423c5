package cluster

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// asKeeper has the role admin in a namespace.
func asKeeper(g *guard) *rest.Config { return g.c.RESTConfigAs("keeper") }

// writers are those who may write something of Stayput's.
var writers = map[string]func(*guard) *rest.Config{
	"view": asViewer, "edit": asEditor, "admin": asKeeper, "agent": asAgent, "controller": asController,
}

// mayWrite is what RBAC lets each of the writers write, by resource and group, and by name where the right is to one.
// Of people it is what Stayput adds to their roles. Beside the verbs it says what narrows them: the table fields below,
// a policy, whose attempts are in admission_test.go, or nothing: SECURITY.md says what that lets the account do.
var mayWrite = map[string]map[string][2]string{
	"view": {},
	"edit": {
		"retainedips stayput.io":             {"delete deletecollection patch update", "fields"},
		"persistentpodstates apps.kruise.io": {"create delete deletecollection patch update", "fields"},
	},
	"admin": {
		"retainedips stayput.io":             {"delete deletecollection patch update", "fields"},
		"persistentpodstates apps.kruise.io": {"create delete deletecollection patch update", "fields"},
	},
	"agent": {
		"retainedips stayput.io":   {"create delete patch", "fields"},
		"podips/status stayput.io": {"patch", "fields"},
		"podipreports stayput.io":  {"create patch", "fields"},
		"events events.k8s.io":     {"create", "nothing"},
	},
	"controller": {
		"pods":                                          {"delete patch", "a policy"},
		"pods/status":                                   {"patch", "a policy"},
		"configmaps":                                    {"create", "a policy"},
		"configmaps stayput-gated-workloads":            {"delete patch", "a policy"},
		"configmaps stayput-installation":               {"patch", "a policy"},
		"retainedips stayput.io":                        {"delete patch", "fields"},
		"persistentpodstates apps.kruise.io":            {"create delete patch", "fields"},
		"persistentpodstates/status apps.kruise.io":     {"patch", "fields"},
		"namespaces":                                    {"patch", "a policy"},
		"podippools stayput.io":                         {"patch", "fields"},
		"podippools/status stayput.io":                  {"patch", "fields"},
		"podips stayput.io":                             {"create delete patch update", "fields"},
		"podips/status stayput.io":                      {"patch", "fields"},
		"podipaudits stayput.io":                        {"create update", "fields"},
		"placements stayput.io":                         {"gate", "nothing"}, // no such resource exists
		"spiderippools spiderpool.spidernet.io":         {"patch", "a policy"},
		"spiderippools/status spiderpool.spidernet.io":  {"patch", "nothing"},
		"events events.k8s.io":                          {"create patch", "nothing"},
		"events":                                        {"create patch", "nothing"},
		"leases coordination.k8s.io":                    {"create", "nothing"},
		"leases coordination.k8s.io stayput-controller": {"update", "nothing"},
		"validatingadmissionpolicybindings admissionregistration.k8s.io stayput-unique-target": {"delete", "nothing"},
	},
}

func TestRBACLetsEachWriteWhatTheTableSays(t *testing.T) {
	g := guardedWith(t, true)
	for who, as := range writers {
		t.Run(who, func(t *testing.T) {
			client, err := kubernetes.NewForConfig(as(g))
			must.Do(t, err)
			want := map[string]bool{}
			for what, verbs := range mayWrite[who] {
				for verb := range strings.FieldsSeq(verbs[0]) {
					want[verb+" "+what] = true
				}
			}
			until(t, "the rights", func(context.Context) bool { // roles are aggregated after a moment
				got := writesOf(t, client, as(g).Impersonate.UserName != "")
				for right := range got {
					if !want[right] {
						t.Fatalf("it may %s, which is not in the table", right)
					}
				}
				return len(got) == len(want)
			})
		})
	}
}

// writesOf returns what an account may write, each as the verb and the resource as in mayWrite. Of a person it is what
// is of Stayput's groups.
func writesOf(t *testing.T, client kubernetes.Interface, person bool) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, namespace := range []string{"guarded", lab.SystemNamespace} {
		for _, r := range rulesIn(t, client, namespace) {
			for _, what := range resourcesOf(r) {
				for _, verb := range r.Verbs {
					if !slices.Contains([]string{"get", "list", "watch"}, verb) && (!person || ourGroup(r)) {
						all[verb+" "+what] = true
					}
				}
			}
		}
	}
	return all
}

// rulesIn returns the rights of an account, without those that everybody has.
func rulesIn(t *testing.T, client kubernetes.Interface, namespace string) []authorizationv1.ResourceRule {
	t.Helper()
	review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(testContext(t),
		&authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}},
		metav1.CreateOptions{})
	must.Do(t, err)
	return slices.DeleteFunc(review.Status.ResourceRules, func(r authorizationv1.ResourceRule) bool {
		return slices.ContainsFunc(r.APIGroups, func(group string) bool {
			return group == "authorization.k8s.io" || group == "authentication.k8s.io"
		})
	})
}

func ourGroup(r authorizationv1.ResourceRule) bool {
	return slices.ContainsFunc(r.APIGroups, func(group string) bool {
		return slices.Contains([]string{"*", "stayput.io", "apps.kruise.io", "spiderpool.spidernet.io"}, group)
	})
}

// resourcesOf returns the resources of a rule as they are written in mayWrite.
func resourcesOf(r authorizationv1.ResourceRule) (all []string) {
	names := r.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, group := range r.APIGroups {
		for _, resource := range r.Resources {
			for _, name := range names {
				all = append(all, strings.Join(strings.Fields(resource+" "+group+" "+name), " "))
			}
		}
	}
	return all
}

// A field is one of a definition, a change of it, as a merge patch, and which of the writers may make that.
type field struct{ path, change, writers string }

// fields are those of Stayput's definitions. The agent is that of node-1. What is below a field without a change of its
// own is changed with it.
var fields = []struct {
	kind, name string
	fields     []field
}{
	{retipKind, "web-0.node-1", []field{
		{"metadata.labels", `{a: b}`, "edit admin"},
		{"metadata.annotations", `{a: b}`, "edit admin agent"},
		{"metadata.finalizers", `[example.com/x]`, ""},
		{"metadata.ownerReferences", `[{apiVersion: v1, kind: Node, name: node-1, uid: u}]`, "agent"},
		{"spec.nodeName", `node-2`, ""},
		{"spec.podName", `other`, "agent"},
		{"spec.identity", `db`, "agent"},
		{"spec.retention", `1h`, "agent"},
		{"spec.whenScaled", `Release`, "agent"},
		{"spec.whenDeleted", `Release`, "agent"},
		{"spec.whenMoved", `Release`, "agent"},
		{"spec.release", `null`, "edit admin agent controller"}, // the agent may only withdraw one
		{"spec.workload", `null`, "controller"},
		{"spec.workload.apiVersion", `apps/v2`, "controller"},
		{"spec.workload.kind", `Other`, "controller"},
		{"spec.workload.name", `other`, "controller"},
		{"spec.workload.uid", `v`, "controller"},
		{"spec.scheduled", `pod/web-0`, "controller"},
		{"status.phase", `Bound`, "agent"},
		{"status.ips", `[192.0.2.1]`, "agent"},
		{"status.addresses", `[{network: red, interface: eth0, ips: [192.0.2.1]}]`, "agent"},
		{"status.addresses.network", "", ""}, {"status.addresses.interface", "", ""}, {"status.addresses.ips", "", ""},
		{"status.podUID", `v`, "agent"},
		{"status.since", `"2026-01-01T00:00:00Z"`, "agent"},
		{"status.lastBoundTime", `"2026-01-01T00:00:00Z"`, "agent"},
		{"status.expires", `"2043-01-01T00:00:00Z"`, "agent"},
	}},
	// It is of a pod of node-1. No one but the controller says which pod an address is for.
	{podIPKind, "10.6.168.102", []field{
		{"metadata.labels", `{a: b}`, "controller"},
		{"metadata.annotations", `{a: b}`, "controller"},
		{"metadata.finalizers", `[stayput.io/in-use]`, "controller"},
		{"metadata.ownerReferences", `[{apiVersion: v1, kind: Node, name: node-1, uid: u}]`, "controller"},
		{"spec.pool", `green`, ""},
		{"spec.mode", `Routed`, ""},
		{"spec.namespace", `elsewhere`, "controller"},
		{"spec.podName", `other`, "controller"},
		{"spec.podUID", `other`, "controller"},
		{"spec.identity", `db`, "controller"},
		{"spec.network", `red`, "controller"},
		{"spec.interface", `net1`, "controller"},
		{"spec.retention", `1h`, "controller"},
		{"spec.whenScaled", `Release`, "controller"},
		{"spec.whenDeleted", `Release`, "controller"},
		{"spec.workload", `{apiVersion: apps/v1, kind: StatefulSet, name: web, uid: u}`, "controller"},
		{"spec.workload.apiVersion", "", ""}, {"spec.workload.kind", "", ""}, {"spec.workload.name", "", ""},
		{"spec.workload.uid", "", ""},
		{"spec.release", `Now`, "controller"},
		{"spec.adoptedOn", `node-1`, "controller"},
		{"status.phase", `Retained`, "agent controller"},
		{"status.podUID", `other`, "controller"},
		{"status.nodeName", `node-2`, "controller"},
		{"status.since", `"2026-01-01T00:00:00Z"`, "agent controller"},
		{"status.conflict", `"02:00:00:00:00:01"`, "agent controller"},
		{"status.podCIDR", `10.244.1.0/24`, "controller"}, // the agent's only of an address of mode Routed
		{"status.expires", `"2043-01-01T00:00:00Z"`, "controller"},
	}},
	{poolKind, "blue", []field{
		{"metadata.labels", `{a: b}`, ""},
		{"metadata.annotations", `{a: b}`, ""},
		{"metadata.finalizers", `[stayput.io/in-use]`, "controller"},
		{"metadata.ownerReferences", `[{apiVersion: v1, kind: Node, name: node-1, uid: u}]`, ""},
		{"spec.mode", `Routed`, ""},
		{"spec.subnet", `10.0.0.0/8`, ""},
		{"spec.addresses", `[10.6.0.0/17]`, ""},
		{"spec.excludedAddresses", `[10.6.168.101]`, ""},
		{"spec.gateway", `10.6.0.2`, ""},
		{"spec.routes", `[{dst: 10.9.0.0/16, gw: 10.6.0.2}]`, ""},
		{"spec.routes.dst", "", ""}, {"spec.routes.gw", "", ""},
		{"spec.namespaceSelector", `{matchLabels: {a: b}, matchExpressions: [{key: a, operator: In, values: [b]}]}`, ""},
		{"spec.namespaceSelector.matchLabels", "", ""}, {"spec.namespaceSelector.matchExpressions", "", ""},
		{"spec.namespaceSelector.matchExpressions.key", "", ""},
		{"spec.namespaceSelector.matchExpressions.operator", "", ""},
		{"spec.namespaceSelector.matchExpressions.values", "", ""},
		{"spec.nodeSelector", `{matchLabels: {a: b}, matchExpressions: [{key: a, operator: In, values: [b]}]}`, ""},
		{"spec.nodeSelector.matchLabels", "", ""}, {"spec.nodeSelector.matchExpressions", "", ""},
		{"spec.nodeSelector.matchExpressions.key", "", ""}, {"spec.nodeSelector.matchExpressions.operator", "", ""},
		{"spec.nodeSelector.matchExpressions.values", "", ""},
		{"spec.allocation", `Disabled`, ""},
		{"status.addresses", `{total: 1, used: 2, free: 3, outOfRange: 4}`, "controller"},
		{"status.addresses.total", "", ""}, {"status.addresses.used", "", ""}, {"status.addresses.free", "", ""},
		{"status.addresses.outOfRange", "", ""},
		{"status.conditions", `[{type: Ready, status: "True", reason: R, message: m, lastTransitionTime: "2026-01-01T00:00:00Z"}]`,
			"controller"},
		{"status.conditions.type", "", ""}, {"status.conditions.status", "", ""}, {"status.conditions.reason", "", ""},
		{"status.conditions.message", "", ""}, {"status.conditions.lastTransitionTime", "", ""},
		{"status.conditions.observedGeneration", "", ""},
	}},
	{auditKind, "cluster", []field{
		{"metadata.labels", `{a: b}`, "controller"},
		{"metadata.annotations", `{a: b}`, "controller"},
		{"metadata.finalizers", `[example.com/x]`, "controller"},
		{"metadata.ownerReferences", `[{apiVersion: v1, kind: Node, name: node-1, uid: u}]`, "controller"},
		{"spec.epoch", `"2026-01-01T00:00:00.000002Z"`, "controller"},
		{"spec.phase", `Recalling`, "controller"},
		{"spec.term", `"2026-01-01T00:00:00.000002Z"`, "controller"},
		{"spec.mark", `"2026-02-01T00:00:00.000000Z"`, "controller"},
		{"spec.marks", `2`, "controller"},
	}},
	{reportKind, "node-1", []field{
		{"metadata.labels", `{a: b}`, ""},
		{"metadata.annotations", `{a: b}`, "agent"},
		{"metadata.finalizers", `[example.com/x]`, ""},
		{"metadata.ownerReferences", `[{apiVersion: v1, kind: Node, name: node-1, uid: u}]`, "agent"},
		{"spec.epoch", `"2026-01-01T00:00:00.000002Z"`, "agent"},
		{"spec.held", `[{address: 10.6.168.102, podUID: two, namespace: guarded, podName: web-2, pool: blue, mode: L2, interface: eth0}]`,
			"agent"},
		{"spec.held.address", "", ""}, {"spec.held.podUID", "", ""}, {"spec.held.namespace", "", ""},
		{"spec.held.podName", "", ""}, {"spec.held.pool", "", ""}, {"spec.held.mode", "", ""},
		{"spec.held.interface", "", ""}, {"spec.held.identity", "", ""}, {"spec.held.network", "", ""},
		{"spec.held.running", "", ""}, {"spec.held.retention", "", ""}, {"spec.held.whenScaled", "", ""}, {"spec.held.whenDeleted", "", ""},
		{"spec.cannotServe", `{Routed: why}`, "agent"},
	}},
	{ppsKind, "web", []field{
		{"metadata.labels", `{a: b}`, "edit admin controller"},
		{"metadata.annotations", `{a: b}`, "edit admin controller"},
		{"metadata.finalizers", `[example.com/x]`, "edit admin controller"},
		{"metadata.ownerReferences", `[{apiVersion: v1, kind: Node, name: node-1, uid: u}]`, "edit admin controller"},
		{"spec.targetRef", `{name: other}`, ""},
		{"spec.targetRef.apiVersion", "", ""}, {"spec.targetRef.kind", "", ""}, {"spec.targetRef.name", "", ""},
		{"spec.persistentPodAnnotations", `[{key: a}]`, "edit admin controller"},
		{"spec.persistentPodAnnotations.key", "", ""},
		{"spec.requiredPersistentTopology", `{nodeTopologyKeys: [a]}`, "edit admin controller"},
		{"spec.requiredPersistentTopology.nodeTopologyKeys", "", ""}, {"spec.requiredPersistentTopology.keys", "", ""},
		{"spec.preferredPersistentTopology", `[{weight: 1, preference: {nodeTopologyKeys: [a]}}]`, "edit admin controller"},
		{"spec.preferredPersistentTopology.weight", "", ""}, {"spec.preferredPersistentTopology.preference", "", ""},
		{"spec.preferredPersistentTopology.preference.nodeTopologyKeys", "", ""},
		{"spec.preferredPersistentTopology.preference.keys", "", ""},
		{"spec.persistentPodStateRetentionPolicy", `WhenDeleted`, "edit admin controller"},
		{"status.observedGeneration", `2`, "controller"},
		{"status.podStates", `{web-0: {nodeName: node-2, nodeTopologyLabels: {a: b}, annotations: {a: b}}}`, "controller"},
		{"status.podStates.nodeName", "", ""}, {"status.podStates.nodeTopologyLabels", "", ""},
		{"status.podStates.annotations", "", ""},
		{"status.pods", `2`, "controller"},
		{"status.recorded", `2`, "controller"},
		{"status.conditions", `[{type: Recorded, status: "True", reason: R, message: m, lastTransitionTime: "2026-01-01T00:00:00Z"}]`,
			"controller"},
		{"status.conditions.type", "", ""}, {"status.conditions.status", "", ""}, {"status.conditions.reason", "", ""},
		{"status.conditions.message", "", ""}, {"status.conditions.lastTransitionTime", "", ""},
		{"status.conditions.observedGeneration", "", ""},
	}},
}

// A field that is not in the table is one of which nobody has said who may write it.
func TestEachChangesTheFieldsThatTheTableSaysAndNoOthers(t *testing.T) {
	g := guardedWith(t, true)
	for _, of := range fields {
		kind, _, _ := strings.Cut(of.kind, ".")
		paths, subresource := schemaOf(t, g, kind)
		var listed []string
		for _, f := range of.fields {
			if !strings.HasPrefix(f.path, "metadata.") {
				listed = append(listed, f.path)
			}
		}
		slices.Sort(listed)
		if !slices.Equal(paths, listed) {
			t.Errorf("%s has the fields\n%q, and the table\n%q", kind, paths, listed)
		}
		before, err := get(of.kind, of.name)(testContext(t), g, g.admin)
		must.Do(t, err)
		for _, f := range of.fields {
			if f.change == "" {
				continue
			}
			change, names := f.change, strings.Split(f.path, ".")
			for _, name := range slices.Backward(names) {
				change = "{" + name + ": " + change + "}"
			}
			var by []string
			if subresource && names[0] == "status" {
				by = []string{"status"}
			}
			for who, as := range writers {
				want := slices.Contains(strings.Fields(f.writers), who)
				do := merge(of.kind, of.name, change, by...)
				if of.kind == auditKind && len(by) == 0 {
					do = replace(of.kind, of.name, change)
				}
				after, err := do(testContext(t), g, as(g))
				switch {
				case want && err != nil:
					t.Errorf("%s: %s may not change %s of %s: %v", who, who, f.path, kind, err)
				case want && !changed(before, after):
					t.Errorf("%s: %s changes nothing of %s", who, change, kind)
				case !want && err == nil && changed(before, after):
					t.Errorf("%s may change %s of %s", who, f.path, kind)
				}
			}
		}
	}
}

// replace writes an object with a change, by a writer who may neither read nor patch it.
func replace(kind, name, change string) try {
	return func(ctx context.Context, g *guard, as *rest.Config) (*unstructured.Unstructured, error) {
		object, err := merge(kind, name, change)(ctx, g, g.admin)
		if err != nil {
			return nil, err
		}
		client, err := g.resource(as, object.GroupVersionKind(), object.GetNamespace())
		if err != nil {
			return nil, err
		}
		return client.Update(ctx, object, metav1.UpdateOptions{DryRun: dryRun})
	}
}

// changed reports whether a write changed more than the bookkeeping of the API server.
func changed(before, after *unstructured.Unstructured) bool {
	of := func(o *unstructured.Unstructured) map[string]any {
		o = o.DeepCopy()
		for _, field := range []string{"managedFields", "resourceVersion", "generation"} {
			unstructured.RemoveNestedField(o.Object, "metadata", field)
		}
		return o.Object
	}
	return !equality.Semantic.DeepEqual(of(before), of(after))
}

// schemaOf returns the paths of all fields of spec and status, and whether status is a subresource.
func schemaOf(t *testing.T, g *guard, kind string) (paths []string, subresource bool) {
	t.Helper()
	var crds struct {
		Items []struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Storage      bool
					Subresources map[string]any
					Schema       struct{ OpenAPIV3Schema fieldSchema }
				}
			}
		}
	}
	text := kubectl(t, g.c, "get", "crd", "-l", "app.kubernetes.io/part-of=stayput", "-o", "json")
	must.Do(t, json.Unmarshal([]byte(text), &crds))
	for _, crd := range crds.Items {
		for _, v := range crd.Spec.Versions {
			if crd.Spec.Names.Kind == kind && v.Storage {
				_, subresource = v.Subresources["status"]
				for _, part := range []string{"spec", "status"} {
					if s, ok := v.Schema.OpenAPIV3Schema.Properties[part]; ok {
						paths = append(paths, s.fields(part)...)
					}
				}
			}
		}
	}
	if len(paths) == 0 {
		t.Fatalf("no definition of %s", kind)
	}
	slices.Sort(paths)
	return paths, subresource
}

// fieldSchema is as much of a definition's schema as has fields.
type fieldSchema struct {
	Properties           map[string]fieldSchema
	Items                *fieldSchema
	AdditionalProperties *fieldSchema
}

// fields returns the paths of the fields below path, also those of the items of lists and maps.
func (s fieldSchema) fields(path string) (all []string) {
	for name, property := range s.Properties {
		all = append(append(all, path+"."+name), property.fields(path+"."+name)...)
	}
	for _, below := range []*fieldSchema{s.Items, s.AdditionalProperties} {
		if below != nil {
			all = append(all, below.fields(path)...)
		}
	}
	return all
}
