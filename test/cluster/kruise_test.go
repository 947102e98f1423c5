//go:build long

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// openKruise returns OpenKruise's definition of PersistentPodStates: without a webhook that of older releases, with
// v1alpha1 alone; otherwise that of newer ones, which convert v1alpha1 to v1beta1, with another name for the topology
// keys, by the webhook of this clientConfig. Neither has conditions, and both require status.observedGeneration.
func openKruise(webhook string) string {
	version := func(name, keys string, storage bool) string {
		topology := fmt.Sprintf("{type: object, required: [%[1]s], "+
			"properties: {%[1]s: {type: array, items: {type: string}}}}", keys)
		return fmt.Sprintf(`
  - name: %s
    served: true
    storage: %t
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [targetRef]
            properties:
              targetRef: {type: object, required: [apiVersion, kind, name], properties: {apiVersion: {type: string}, kind: {type: string}, name: {type: string}}}
              persistentPodAnnotations: {type: array, items: {type: object, required: [key], properties: {key: {type: string}}}}
              persistentPodStateRetentionPolicy: {type: string}
              preferredPersistentTopology: {type: array, items: {type: object, required: [preference, weight], properties: {preference: %[3]s, weight: {type: integer, format: int32}}}}
              requiredPersistentTopology: %[3]s
          status:
            type: object
            required: [observedGeneration]
            properties:
              observedGeneration: {type: integer, format: int64}
              podStates: {type: object, additionalProperties: {type: object, properties: {
                nodeName: {type: string}, annotations: {type: object, additionalProperties: {type: string}},
                nodeTopologyLabels: {type: object, additionalProperties: {type: string}}}}}`, name, storage, topology)
	}
	crd := `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: persistentpodstates.apps.kruise.io}
spec:
  group: apps.kruise.io
  names: {kind: PersistentPodState, listKind: PersistentPodStateList, plural: persistentpodstates, singular: persistentpodstate}
  scope: Namespaced
  versions:`
	if webhook == "" {
		return crd + version("v1alpha1", "nodeTopologyKeys", true)
	}
	return crd + version("v1alpha1", "nodeTopologyKeys", false) + version("v1beta1", "keys", true) + `
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: ` + webhook
}

// serveConversion serves OpenKruise's conversion webhook to a cluster's API server, as OpenKruise's controller cannot
// run here. It returns the webhook's clientConfig; stop ends it.
func serveConversion(t *testing.T, c *lab.Cluster, address string) (clientConfig string, stop func()) {
	t.Helper()
	return serveWebhook(t, c, address, convert)
}

func convert(w http.ResponseWriter, r *http.Request) {
	var review conversionReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
		http.Error(w, fmt.Sprintf("a review without a request: %v", err), http.StatusBadRequest)
		return
	}
	review.Response.UID, review.Response.Result.Status = review.Request.UID, metav1.StatusSuccess
	for _, raw := range review.Request.Objects {
		object, err := converted(raw, review.Request.DesiredAPIVersion)
		if err != nil {
			review.Response.Result = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
			break
		}
		review.Response.ConvertedObjects = append(review.Response.ConvertedObjects, object)
	}
	review.Request = nil
	_ = json.NewEncoder(w).Encode(review) // the client may be gone
}

// converted returns a PersistentPodState in another version. As OpenKruise converts by way of its Go types, the result
// lacks all unknown fields and always has an observedGeneration.
func converted(raw []byte, version string) ([]byte, error) {
	var o map[string]any
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	from, to := "nodeTopologyKeys", "keys"
	switch version {
	case "apps.kruise.io/v1beta1":
	case "apps.kruise.io/v1alpha1":
		from, to = to, from
	default:
		return nil, fmt.Errorf("version %q", version)
	}
	rename := func(term any) {
		if t, ok := term.(map[string]any); ok && t[from] != nil {
			t[to] = t[from]
			delete(t, from)
		}
	}
	o["apiVersion"] = version
	if spec, ok := o["spec"].(map[string]any); ok {
		rename(spec["requiredPersistentTopology"])
		preferred, _ := spec["preferredPersistentTopology"].([]any)
		for _, p := range preferred {
			if p, ok := p.(map[string]any); ok {
				rename(p["preference"])
			}
		}
	}
	status := map[string]any{"observedGeneration": 0}
	if was, ok := o["status"].(map[string]any); ok {
		for _, field := range []string{"observedGeneration", "podStates"} {
			if was[field] != nil {
				status[field] = was[field]
			}
		}
	}
	o["status"] = status
	return json.Marshal(o)
}

// With OpenKruise's definition but no OpenKruise, stayput serves PersistentPodStates.
func TestEitherVersionOfOpenKruisesDefinitionMayComeFirstOrLater(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	_, err := c.Kubectl(testContext(t), openKruise(""), "apply", "-f", "-")
	must.Do(t, err)
	definition := func() string {
		return kubectl(t, c, "get", "crd", "persistentpodstates.apps.kruise.io", "-o",
			"jsonpath={.metadata.uid} {.metadata.generation} {.metadata.labels}")
	}
	theirs := definition()
	unchanged := func() {
		t.Helper()
		if now := definition(); now != theirs {
			t.Fatalf("OpenKruise's definition was %s and is %s", theirs, now)
		}
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	unchanged()
	ns := namespace(t, c)
	all := func(n int) func(*kruisev1alpha1.PersistentPodState) bool {
		return func(s *kruisev1alpha1.PersistentPodState) bool { return len(s.Status.PodStates) == n }
	}

	// The record has the fields of their definition, and is not written again and again for those that it lacks.
	deploy(t, c, ns, lab.Workload{Name: "db", Replicas: 3})
	apply(t, c, ns, `
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata: {name: db}
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: db}
  preferredPersistentTopology: [{weight: 100, preference: {nodeTopologyKeys: [kubernetes.io/hostname]}}]
`)
	recorded := comesTo(t, c, ns, "db", "recorded", all(3))
	comeHome := func(name string) {
		t.Helper()
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: 2, Annotations: retain("1h")})
		before := places(t, c, ns, name, 2, nil)
		deletePods(t, c, ns, name)
		cameHome(t, before, places(t, c, ns, name, 2, before))
	}
	comeHome("first")
	if now := stateOf(t, c, ns, "db"); now.ResourceVersion != recorded.ResourceVersion {
		t.Errorf("the record was written again: %+v, was %+v", now.Status, recorded.Status)
	}

	// An upgrade of OpenKruise under stayput: objects are stored in the newer version and written in either.
	const address = "127.0.0.1:9443"
	webhook, stop := serveConversion(t, c, address)
	_, err = c.Kubectl(testContext(t), openKruise(webhook), "apply", "-f", "-")
	must.Do(t, err)
	theirs = definition()
	placed := func(name, version, keys string) {
		t.Helper()
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: 2})
		before := places(t, c, ns, name, 2, nil)
		until(t, "the version "+version, func(ctx context.Context) bool { // it is served after a moment
			_, err = c.Kubectl(ctx, fmt.Sprintf(`
apiVersion: apps.kruise.io/%[2]s
kind: PersistentPodState
metadata: {name: %[1]s}
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: %[1]s}
  requiredPersistentTopology: {%[3]s: [kubernetes.io/hostname]}
`, name, version, keys), "apply", "-n", ns, "-f", "-")
			return err == nil
		})
		s := comesTo(t, c, ns, name, "recorded", all(2))
		if r := s.Spec.RequiredPersistentTopology; r == nil || len(r.NodeTopologyKeys) != 1 {
			t.Errorf("%s requires %+v", name, r)
		}
		gated := func() bool {
			cm, err := c.Client().CoreV1().ConfigMaps(ns).Get(testContext(t), "stayput-gated-workloads", metav1.GetOptions{})
			return err == nil && strings.Contains(cm.Data["workloads"], "\nStatefulSet.apps."+name+"\n")
		}
		until(t, "the gate for "+name, func(context.Context) bool { return gated() })
		deletePods(t, c, ns, name)
		for pod, is := range places(t, c, ns, name, 2, before) {
			home := before[pod].Spec.NodeName
			if is.Spec.NodeName != home || is.Spec.Affinity == nil || is.Spec.Affinity.NodeAffinity == nil {
				t.Errorf("%s was on %s and is on %s with %+v", pod, home, is.Spec.NodeName, is.Spec.Affinity)
			}
		}
	}
	placed("newer", "v1beta1", "keys")
	if now := stateOf(t, c, ns, "db"); now == nil ||
		!maps.EqualFunc(now.Status.PodStates, recorded.Status.PodStates, func(a, b kruisev1alpha1.PodState) bool {
			return a.NodeName == b.NodeName
		}) {
		t.Errorf("the record was %+v and is %+v", recorded, now)
	}

	// The webhook is down, so PersistentPodStates cannot be read. Pods that ask for their address are not affected,
	// even after a change of leader.
	stop()
	comeHome("second")
	must.Do(t, c.Controllers.Restart(testContext(t)))
	comeHome("third")
	uninstall := func() {
		t.Helper()
		_, err := c.Uninstall(testContext(t))
		must.Do(t, err)
		unchanged()
	}
	uninstall()

	// The newer definition, with its records, exists when stayput is installed.
	webhook, _ = serveConversion(t, c, address)
	_, err = c.Kubectl(testContext(t), openKruise(webhook), "apply", "-f", "-")
	must.Do(t, err)
	theirs = definition()
	// Otherwise, recorded pods would not be gated after a second installation (kubernetes/kubernetes#130887).
	must.Do(t, c.APIServer.Restart(testContext(t)))
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{}))
	unchanged()
	placed("older", "v1alpha1", "nodeTopologyKeys")
	comesTo(t, c, ns, "db", "still recorded", all(3))
	uninstall()
}
