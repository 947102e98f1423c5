package cluster

import (
	"fmt"
	"testing"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

// openKruise is OpenKruise's definition of PersistentPodStates as its releases have it: in the older ones v1alpha1 is
// all there is, in the newer ones it is converted to v1beta1, where the topology keys have another name, by
// OpenKruise's webhook. It has no conditions, and its status must have an observedGeneration.
func openKruise(newer bool) string {
	version := func(name, keys string, storage bool) string {
		topology := fmt.Sprintf("{type: object, required: [%[1]s], properties: {%[1]s: {type: array, items: {type: string}}}}", keys)
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
	if !newer {
		return crd + version("v1alpha1", "nodeTopologyKeys", true)
	}
	return crd + version("v1alpha1", "nodeTopologyKeys", false) + version("v1beta1", "keys", true) + `
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: {service: {name: kruise-webhook-service, namespace: kruise-system, path: /convert}}`
}

func TestOpenKruisesDefinitionMayBeThereOrComeLaterWithItsControllerOrWithout(t *testing.T) {
	c := ownCluster(t, &lab.ClusterOptions{})
	_, err := c.Kubectl(testContext(t), openKruise(false), "apply", "-f", "-")
	check(t, err)
	definition := func() string {
		return kubectl(t, c, "get", "crd", "persistentpodstates.apps.kruise.io", "-o", "jsonpath={.metadata.uid} {.metadata.generation} {.metadata.labels}")
	}
	theirs := definition()
	check(t, c.Install(testContext(t), lab.InstallOptions{}))
	if now := definition(); now != theirs {
		t.Fatalf("OpenKruise's definition was %s and is %s", theirs, now)
	}
	ns := namespace(t, c)

	// It is recorded in what their definition has room for, and not written to again and again for what it lacks.
	apply(t, c, ns, statefulSet("db", 3, nil))
	apply(t, c, ns, `
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata: {name: db}
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: db}
  preferredPersistentTopology: [{weight: 100, preference: {nodeTopologyKeys: [kubernetes.io/hostname]}}]
`)
	recorded := comesTo(t, c, ns, "db", "recorded", func(s *kruisev1alpha1.PersistentPodState) bool { return len(s.Status.PodStates) == 3 })
	comes := func(name string) {
		t.Helper()
		apply(t, c, ns, statefulSet(name, 2, map[string]string{retainIP: "1h"}))
		before := places(t, c, ns, name, 2, nil)
		deletePods(t, c, ns, name)
		cameHome(t, before, places(t, c, ns, name, 2, before))
	}
	comes("first")
	if now := stateOf(t, c, ns, "db"); now.ResourceVersion != recorded.ResourceVersion {
		t.Errorf("the record was written again: %+v was %+v", now.Status, recorded.Status)
	}

	// OpenKruise is upgraded, and its webhook does not answer: nobody can read a PersistentPodState any more. Pods that
	// ask for their address know nothing of that, whoever leads.
	_, err = c.Kubectl(testContext(t), openKruise(true), "apply", "-f", "-")
	check(t, err)
	comes("second")
	check(t, c.Controllers.Kill(testContext(t)))
	check(t, c.Controllers.Start(testContext(t)))
	comes("third")

	theirs = definition()
	_, err = c.Helm(testContext(t), "uninstall", lab.Release, "--namespace="+lab.SystemNamespace, "--wait")
	check(t, err)
	if now := definition(); now != theirs {
		t.Errorf("OpenKruise's definition was %s and is %s", theirs, now)
	}
}
