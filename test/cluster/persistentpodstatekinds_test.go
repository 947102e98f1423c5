package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestAnUnknownWorkloadKindIsReported(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	apply(t, c, ns, strings.Replace(stateFor("x", "web", byHostname), "kind: StatefulSet,", "kind: DaemonSet,", 1))
	comesTo(t, c, ns, "x", "to say why", func(s *kruisev1alpha1.PersistentPodState) bool {
		return isTrue(s, "Degraded", "UnsupportedTarget") &&
			strings.Contains(meta.FindStatusCondition(s.Status.Conditions, "Degraded").Message, "--workload-kinds")
	})
}

// crd returns the YAML of a custom resource definition without a schema.
func crd(group, version, plural, kind, subresources string) string {
	return fmt.Sprintf(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[3]s.%[1]s}
spec:
  group: %[1]s
  scope: Namespaced
  names: {plural: %[3]s, singular: %[6]s, kind: %[4]s, listKind: %[4]sList}
  versions:
  - name: %[2]s
    served: true
    storage: true
    subresources: %[5]s
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`, group, version, plural, kind, subresources, strings.ToLower(kind))
}

// define applies a custom resource definition, and deletes it at the end of the test.
func define(t *testing.T, c *lab.Cluster, name, yaml string) {
	t.Helper()
	_, err := c.Kubectl(testContext(t), yaml, "apply", "-f", "-")
	must.Do(t, err)
	atEnd(t, c, "delete", "crd", name)
	must.Do(t, c.WaitForCRDs(testContext(t)))
}

// podBy creates a pod of a workload without a controller of its own, and waits until it is Ready.
func podBy(t *testing.T, c *lab.Cluster, ns, name, apiVersion, kind, owner, uid string) *corev1.Pod {
	t.Helper()
	controller := true
	_, err := c.Client().CoreV1().Pods(ns).Create(testContext(t), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: apiVersion, Kind: kind, Name: owner, UID: types.UID(uid), Controller: &controller},
		}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64),
			Containers: []corev1.Container{
				{Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever},
			},
		},
	}, metav1.CreateOptions{})
	must.Do(t, err)
	return ready(t, c, ns, name)
}

// uidOf returns the UID of any object.
func uidOf(t *testing.T, c *lab.Cluster, ns, what string) string {
	t.Helper()
	return kubectl(t, c, "get", what, "-n", ns, "-o", "jsonpath={.metadata.uid}")
}

func TestReservedOrdinalsOfAnAdvancedStatefulSetAreNotWanted(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	const target = "{apiVersion: apps.kruise.io/v1beta1, kind: StatefulSet, name: web}"
	apply(t, c, ns, strings.Replace(stateFor("by-hand", "web", byHostname),
		"{apiVersion: apps/v1, kind: StatefulSet, name: web}", target, 1))
	comesTo(t, c, ns, "by-hand", "to say that there is no such kind", func(s *kruisev1alpha1.PersistentPodState) bool {
		return isTrue(s, "Degraded", "TargetNotServed")
	})
	define(t, c, "statefulsets.apps.kruise.io",
		crd("apps.kruise.io", "v1beta1", "statefulsets", "StatefulSet", "{status: {}}"))
	set := func(spec string) {
		t.Helper()
		apply(t, c, ns, "apiVersion: apps.kruise.io/v1beta1\nkind: StatefulSet\nmetadata: {name: web}\nspec: "+spec)
	}
	set(`{replicas: 3, reserveOrdinals: [1, "3-4"]}`)
	uid := uidOf(t, c, ns, "statefulset.v1beta1.apps.kruise.io/web")
	for _, o := range []int{0, 2, 5} {
		podBy(t, c, ns, fmt.Sprintf("web-%d", o), "apps.kruise.io/v1beta1", "StatefulSet", "web", uid)
	}
	s := comesTo(t, c, ns, "by-hand", "to record three pods", recordsAll(3))
	if d := meta.FindStatusCondition(s.Status.Conditions, "Degraded"); d == nil || d.Status != metav1.ConditionFalse {
		t.Errorf("it is still %+v", d)
	}
	// Without its pod, a record stays as long as the ordinal is wanted.
	kubectl(t, c, "delete", "pod", "web-2", "-n", ns)
	caughtUp(t, c, ns)
	comesTo(t, c, ns, "by-hand", "to have three records", recordsAll(3))
	set(`{replicas: 3, reserveOrdinals: [1, 2, "3-4"]}`)
	s = comesTo(t, c, ns, "by-hand", "to have two records left", func(s *kruisev1alpha1.PersistentPodState) bool {
		return len(s.Status.PodStates) == 2
	})
	if _, ok := s.Status.PodStates["web-5"]; !ok {
		t.Errorf("recorded are %v", s.Status.PodStates)
	}
	pod := podBy(t, c, ns, "web-6", "apps.kruise.io/v1beta1", "StatefulSet", "web", uid)
	comesTo(t, c, ns, "by-hand", "to record three pods", recordsAll(3))

	// Its pods are gated and come home.
	kubectl(t, c, "delete", "pod", "web-6", "-n", ns)
	again := podBy(t, c, ns, "web-6", "apps.kruise.io/v1beta1", "StatefulSet", "web", uid)
	if again.Spec.NodeName != pod.Spec.NodeName || again.Spec.Affinity == nil {
		t.Errorf("it was on %s and is on %s with the affinity %+v",
			pod.Spec.NodeName, again.Spec.NodeName, again.Spec.Affinity)
	}
}

// customKind is a further workload kind of the shared cluster's controllers. Its resource is not the kind's, so that
// the permission is missing at first.
var customKind = map[string]any{"group": "test.stayput.io", "version": "v1", "kind": "Game", "resource": "boards"}

func TestACustomKindIsServedOnceThereIsPermission(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	define(t, c, "games.test.stayput.io",
		crd("test.stayput.io", "v1", "games", "Game",
			"{scale: {specReplicasPath: .spec.size, statusReplicasPath: .status.size}}"))
	game := func(size int) {
		t.Helper()
		apply(t, c, ns, fmt.Sprintf("apiVersion: test.stayput.io/v1\nkind: Game\n"+
			"metadata: {name: chess, annotations: {%s: \"true\", %s: %s}}\nspec: {size: %d}", auto, required, hostname, size))
	}
	apply(t, c, ns, strings.Replace(stateFor("by-hand", "go", byHostname), "apiVersion: apps/v1, kind: StatefulSet",
		"apiVersion: test.stayput.io/v1, kind: Game", 1))
	apply(t, c, ns, "apiVersion: test.stayput.io/v1\nkind: Game\nmetadata: {name: go}\nspec: {size: 0}")
	comesTo(t, c, ns, "by-hand", "to say what permission is missing", func(s *kruisev1alpha1.PersistentPodState) bool {
		return isTrue(s, "Degraded", "PermissionMissing") &&
			strings.Contains(meta.FindStatusCondition(s.Status.Conditions, "Degraded").Message, "get games/scale")
	})
	_, err := c.Kubectl(testContext(t), `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: test-games, labels: {rbac.stayput.io/aggregate-to-controller: "true"}}
rules:
- {apiGroups: [test.stayput.io], resources: [games], verbs: [get, list, watch]}
- {apiGroups: [test.stayput.io], resources: [games/scale], verbs: [get]}
`, "apply", "-f", "-")
	must.Do(t, err)
	atEnd(t, c, "delete", "clusterrole", "test-games", "--ignore-not-found")
	comesTo(t, c, ns, "by-hand", "to be fine with the permission", func(s *kruisev1alpha1.PersistentPodState) bool {
		d := meta.FindStatusCondition(s.Status.Conditions, "Degraded")
		return d != nil && d.Status == metav1.ConditionFalse && isTrue(s, "Recorded", "AllRecorded")
	})
	game(2)
	uid := uidOf(t, c, ns, "game/chess")
	// A pod that comes before the gate is not recorded: it has no label, and is not of a StatefulSet.
	until(t, "the gate for pods of chess", func(ctx context.Context) bool {
		gated, err := c.Client().CoreV1().ConfigMaps(ns).Get(ctx, "stayput-gated-workloads", metav1.GetOptions{})
		return err == nil && strings.Contains(gated.Data["workloads"], "chess")
	})
	first := podBy(t, c, ns, "chess-0", "test.stayput.io/v1", "Game", "chess", uid)
	podBy(t, c, ns, "chess-1", "test.stayput.io/v1", "Game", "chess", uid)
	comesTo(t, c, ns, "chess", "to record two pods", recordsAll(2))
	kubectl(t, c, "delete", "pod", "chess-0", "chess-1", "-n", ns)
	game(1)
	comesTo(t, c, ns, "chess", "to have one record left", recordsAll(1))
	again := podBy(t, c, ns, "chess-0", "test.stayput.io/v1", "Game", "chess", uid)
	if again.Spec.NodeName != first.Spec.NodeName || again.Spec.Affinity == nil {
		t.Errorf("it was on %s and is on %s with the affinity %+v",
			first.Spec.NodeName, again.Spec.NodeName, again.Spec.Affinity)
	}
	// Without the permission the workload is unknown, so no record is dropped.
	kubectl(t, c, "delete", "clusterrole", "test-games")
	kubectl(t, c, "delete", "pod", "chess-0", "-n", ns)
	comesTo(t, c, ns, "chess", "to say what permission is missing", func(s *kruisev1alpha1.PersistentPodState) bool {
		return isTrue(s, "Degraded", "PermissionMissing") && len(s.Status.PodStates) == 1
	})
}

func TestPersistentPodStatesAreLeftToARunningOpenKruise(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Own: requiresNode})
	apply(t, c, ns, stateFor("by-hand", "other", byHostname))
	was := ready(t, c, ns, "web-0")
	comesTo(t, c, ns, "web", "to record the pod", recordsAll(1))
	until(t, "the pods to be gated", func(context.Context) bool { return gates(t, c, ns, "StatefulSet.apps.web") })
	hand := stateOf(t, c, ns, "by-hand")

	_, err := c.Kubectl(testContext(t), `
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: kruise-mutating-webhook-configuration}
webhooks: []
`, "apply", "-f", "-")
	must.Do(t, err)
	restore := once(func() {
		ctx := context.Background()
		_, err := c.Kubectl(ctx, "", "delete", "mutatingwebhookconfiguration", "kruise-mutating-webhook-configuration")
		must.Do(t, err)
		must.Do(t, c.Reinstate(ctx))
	})
	defer restore()
	comesTo(t, c, ns, "web", "to say so", func(s *kruisev1alpha1.PersistentPodState) bool {
		return isTrue(s, "Degraded", "OpenKruise")
	})
	until(t, "the binding to be deleted", func(ctx context.Context) bool {
		_, unique := c.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Get(ctx,
			"stayput-unique-target", metav1.GetOptions{})
		return apierrors.IsNotFound(unique)
	})
	until(t, "the pods to be no longer gated", func(context.Context) bool {
		return !gates(t, c, ns, "StatefulSet.apps.web")
	})
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns, auto+"=false", "--overwrite")
	deploy(t, c, ns, lab.Workload{Name: "new", Own: requiresNode})
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns)
	if is := successor(t, c, was); is.Spec.Affinity != nil {
		t.Errorf("it was pinned: %+v", is.Spec.Affinity)
	}
	if stateOf(t, c, ns, "web") == nil || stateOf(t, c, ns, "new") != nil {
		t.Error("objects were generated or deleted")
	}
	if is := stateOf(t, c, ns, "by-hand"); is.ResourceVersion != hand.ResourceVersion {
		t.Errorf("a hand-written object was written: %+v", is)
	}

	// Annotated pods still come home.
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	before := tilted(t, c, ns, lab.Workload{Name: "kept", Replicas: 1, Annotations: retain("10m")})
	deletePods(t, c, ns, "kept")
	cameHome(t, before, places(t, c, ns, "kept", 1, before))

	restore()
	comesTo(t, c, ns, "new", "to be generated again", func(*kruisev1alpha1.PersistentPodState) bool { return true })
	untilDeleted(t, c, ns, "web")
}

func TestOpenKruisesCRDWithoutConditionsIsEnough(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	const name = "persistentpodstates.apps.kruise.io"
	data := kubectl(t, c, "get", "crd", name, "-o", "json")
	t.Cleanup(func() {
		must.Do(t, c.Reinstate(context.Background()))
		must.Do(t, c.Controllers.Restart(context.Background())) // they would rely on it for minutes
	})
	var definition map[string]any
	must.Do(t, json.Unmarshal([]byte(data), &definition))
	version := definition["spec"].(map[string]any)["versions"].([]any)[0].(map[string]any)
	delete(version, "additionalPrinterColumns")
	for _, field := range []string{"conditions", "pods", "recorded"} {
		unstructured.RemoveNestedField(version, "schema", "openAPIV3Schema", "properties", "status", "properties", field)
	}
	delete(definition["metadata"].(map[string]any), "managedFields")
	plain, err := json.Marshal(definition)
	must.Do(t, err)
	_, err = c.Kubectl(testContext(t), string(plain), "replace", "-f", "-")
	must.Do(t, err)

	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Own: requiresNode})
	before := places(t, c, ns, "web", 2, nil)
	s := comesTo(t, c, ns, "web", "to record two pods", func(s *kruisev1alpha1.PersistentPodState) bool {
		return len(s.Status.PodStates) == 2
	})
	if s.Status.Conditions != nil || s.Status.Pods != nil {
		t.Errorf("the test is wrong: the status is %+v", s.Status)
	}
	deletePods(t, c, ns, "web")
	for name, pod := range places(t, c, ns, "web", 2, before) {
		if pod.Spec.NodeName != before[name].Spec.NodeName {
			t.Errorf("%s was on %s and is on %s", name, before[name].Spec.NodeName, pod.Spec.NodeName)
		}
	}
}
