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
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// rack is a topology label of every node in these tests; node-1 and node-2 share its value.
const rack = "test.stayput.io/rack"

// racks labels the nodes.
func racks(t *testing.T, c *lab.Cluster) {
	t.Helper()
	for node, r := range map[string]string{"node-1": "r1", "node-2": "r1", "node-3": "r2"} {
		kubectl(t, c, "label", "node", node, rack+"="+r, "--overwrite")
	}
}

// stateFor returns the YAML of a PersistentPodState for a StatefulSet; spec has further lines of its spec.
func stateFor(name, target, spec string) string {
	return fmt.Sprintf(`
apiVersion: apps.kruise.io/v1alpha1
kind: PersistentPodState
metadata: {name: %s}
spec:
  targetRef: {apiVersion: apps/v1, kind: StatefulSet, name: %s}
%s`, name, target, spec)
}

// followed collects every state of a PersistentPodState from now on. The returned function adds an annotation, waits
// until the watch has shown it, and returns all states up to then.
func followed(t *testing.T, c *lab.Cluster, ns, name string) func(why string) []*kruisev1alpha1.PersistentPodState {
	t.Helper()
	const last = "test.stayput.io/last"
	w, err := typed(t, c).Watch(testContext(t), &kruisev1alpha1.PersistentPodStateList{}, client.InNamespace(ns),
		client.MatchingFields{"metadata.name": name})
	must.Do(t, err)
	t.Cleanup(w.Stop)
	states := make(chan []*kruisev1alpha1.PersistentPodState, 1)
	go func() {
		var all []*kruisev1alpha1.PersistentPodState
		defer func() { states <- all }()
		for e := range w.ResultChan() {
			o, ok := e.Object.(*kruisev1alpha1.PersistentPodState)
			if !ok {
				return // an error
			}
			if all = append(all, o); o.Annotations[last] != "" {
				return
			}
		}
	}()
	return func(why string) []*kruisev1alpha1.PersistentPodState {
		t.Helper()
		kubectl(t, c, "annotate", "persistentpodstate", name, "-n", ns, last+"="+why)
		all := <-states // the watch ends when patience runs out
		if n := len(all); n < 2 || all[n-1].Annotations[last] != why {
			t.Fatalf("the watch ended too early, after %d states", n)
		}
		return all
	}
}

const byHostname = "  requiredPersistentTopology: {nodeTopologyKeys: [kubernetes.io/hostname]}\n"

func TestRecordsHoldTheNamedLabelsWhileTheirPodsAreWanted(t *testing.T) {
	c := beside(t)
	racks(t, c)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 5, Own: map[string]string{
		auto: "true", required: rack, preferred: hostname + ", " + rack + " ,",
	}})
	before := places(t, c, ns, "web", 5, nil)
	s := comesTo(t, c, ns, "web", "to record five pods", recordsAll(5))
	if s.Labels["stayput.io/generated"] != "true" || len(s.OwnerReferences) != 0 {
		t.Errorf("it has labels %v and owners %v", s.Labels, s.OwnerReferences)
	}
	if p := s.Spec.PreferredPersistentTopology; len(p) != 1 || p[0].Weight != 100 ||
		!slices.Equal(p[0].Preference.NodeTopologyKeys, []string{hostname, rack}) ||
		!slices.Equal(s.Spec.RequiredPersistentTopology.NodeTopologyKeys, []string{rack}) {
		t.Errorf("its spec is %+v", s.Spec)
	}
	for name, pod := range before {
		node, err := c.Client().CoreV1().Nodes().Get(testContext(t), pod.Spec.NodeName, metav1.GetOptions{})
		must.Do(t, err)
		want := kruisev1alpha1.PodState{
			NodeName:           node.Name,
			NodeTopologyLabels: map[string]string{hostname: node.Labels[hostname], rack: node.Labels[rack]},
		}
		if got := s.Status.PodStates[name]; !equality.Semantic.DeepEqual(got, want) {
			t.Errorf("%s is recorded as %+v, want %+v", name, got, want)
		}
	}
	out := strings.Fields(kubectl(t, c, "get", "persistentpodstates", "web", "-n", ns, "--no-headers"))
	if len(out) != 5 || !slices.Equal(out[:4], []string{"web", "web", "5", "5"}) {
		t.Errorf("kubectl shows %q", out)
	}

	// With another image, every pod is replaced on its node, and the record never changes.
	statesUntil := followed(t, c, ns, "web")
	kubectl(t, c, "patch", "statefulset", "web", "-n", ns, "--type=json", "-p", fmt.Sprintf(`[
		{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": %q},
		{"op": "add", "path": "/spec/template/spec/containers/0/command", "value": ["/podimage", ":80"]}]`, lab.PauseImage))
	after := places(t, c, ns, "web", 5, before)
	for name, was := range before {
		if is := after[name]; is.Spec.NodeName != was.Spec.NodeName || is.Spec.Containers[0].Image != lab.PauseImage {
			t.Errorf("%s was on %s and is on %s with the image %s",
				name, was.Spec.NodeName, is.Spec.NodeName, is.Spec.Containers[0].Image)
		}
	}
	caughtUp(t, c, ns)
	for _, o := range statesUntil("the rollout is over") {
		if !equality.Semantic.DeepEqual(o.Status.PodStates, s.Status.PodStates) {
			t.Errorf("during the rollout the record was %v", o.Status.PodStates)
		}
	}

	// Fewer topology keys.
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns, required+"-", preferred+"="+hostname, "--overwrite")
	comesTo(t, c, ns, "web", "to record one label for each pod", func(s *kruisev1alpha1.PersistentPodState) bool {
		for name, state := range s.Status.PodStates {
			if !maps.Equal(state.NodeTopologyLabels, map[string]string{hostname: after[name].Spec.NodeName}) {
				return false
			}
		}
		return recordsAll(5)(s)
	})
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns,
		required+"="+rack, preferred+"="+hostname+","+rack, "--overwrite")
	comesTo(t, c, ns, "web", "to record both labels again", func(is *kruisev1alpha1.PersistentPodState) bool {
		return equality.Semantic.DeepEqual(is.Status.PodStates, s.Status.PodStates)
	})

	// Scaled down and up.
	kubectl(t, c, "scale", "statefulset", "web", "--replicas=1", "-n", ns)
	comesTo(t, c, ns, "web", "to have one record left", recordsAll(1))
	kubectl(t, c, "scale", "statefulset", "web", "--replicas=5", "-n", ns)
	s = comesTo(t, c, ns, "web", "to record five pods again", recordsAll(5))

	// The annotation is removed, and added again.
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns, auto+"-")
	untilDeleted(t, c, ns, "web")
	caughtUp(t, c, ns)
	if stateOf(t, c, ns, "web") != nil {
		t.Error("it came back without the annotation")
	}
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns, auto+"=true")
	again := comesTo(t, c, ns, "web", "to record five pods again", recordsAll(5))
	if !equality.Semantic.DeepEqual(again.Status.PodStates, s.Status.PodStates) {
		t.Errorf("the records are %v, were %v", again.Status.PodStates, s.Status.PodStates)
	}
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns, auto+"=false", "--overwrite")
	untilDeleted(t, c, ns, "web")
	kubectl(t, c, "annotate", "statefulset", "web", "-n", ns, auto+"=true", "--overwrite")
	comesTo(t, c, ns, "web", "to record five pods once more", recordsAll(5))

	// Deleting the workload deletes everything.
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	untilDeleted(t, c, ns, "web")
	until(t, "the ConfigMap of the gate to be deleted", func(ctx context.Context) bool {
		_, err := c.Client().CoreV1().ConfigMaps(ns).Get(ctx, "stayput-gated-workloads", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
}

func TestRecordedPodsComeHomeAlthoughOtherNodesAreEmptier(t *testing.T) {
	c := installed(t)
	racks(t, c)
	ns := namespace(t, c)
	apply(t, c, ns, stateFor("by-hand", "web",
		byHostname+"  preferredPersistentTopology: [{weight: 7, preference: {nodeTopologyKeys: ["+rack+"]}}]\n"+
			"  persistentPodAnnotations: [{key: kept}]\n"))
	until(t, "the pods of the workload to be gated", func(ctx context.Context) bool {
		return gates(t, c, ns, "StatefulSet.apps.web")
	})
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 4, Annotations: map[string]string{"stayput.io/home-wait": "5s"},
		Pod: corev1.PodSpec{Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: rather(3, "node-3"),
		}}},
	})
	kubectl(t, c, "annotate", "pod", "web-0", "-n", ns, "kept=so", "dropped=so")
	comesTo(t, c, ns, "by-hand", "to record the annotation", func(s *kruisev1alpha1.PersistentPodState) bool {
		return recordsAll(4)(s) && maps.Equal(s.Status.PodStates["web-0"].Annotations, map[string]string{"kept": "so"})
	})
	deletePods(t, c, ns, "web")
	after := places(t, c, ns, "web", 4, before)
	labelled := func(key, value string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}},
		}}
	}
	for name, was := range before {
		is := after[name]
		if is.Spec.NodeName != was.Spec.NodeName {
			t.Errorf("%s was on %s and is on %s", name, was.Spec.NodeName, is.Spec.NodeName)
		}
		// The record's node affinity joins that of the template.
		want := &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{labelled(hostname, was.Spec.NodeName)},
			},
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{
				{Weight: 3, Preference: labelled(hostname, "node-3")}, {Weight: 7, Preference: labelled(rack, "r1")},
			},
		}}
		if !equality.Semantic.DeepEqual(is.Spec.Affinity, want) {
			t.Errorf("%s has the affinity\n%+v\nwant\n%+v", name, is.Spec.Affinity, want)
		}
	}
	if a := after["web-0"].Annotations; a["kept"] != "so" || a["dropped"] != "" {
		t.Errorf("the annotations of the new pod are %v", a)
	}

	// The pod waits for a cordoned node with the recorded labels, and then gives it up.
	home := after["web-0"]
	kubectl(t, c, "cordon", home.Spec.NodeName)
	defer kubectl(t, c, "uncordon", home.Spec.NodeName)
	must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), "web-0", metav1.DeleteOptions{}))
	waitsFor(t, c, home, hostname+"="+home.Spec.NodeName)
	wentElsewhere(t, c, home, "node "+home.Spec.NodeName+" is cordoned")
}

func TestTheGateFollowsTheObjects(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	is := func(what string, want bool) {
		t.Helper()
		until(t, what, func(context.Context) bool { return gates(t, c, ns, "StatefulSet.apps.web") == want })
	}
	deploy(t, c, ns, lab.Workload{Name: "web"})
	apply(t, c, ns, stateFor("a", "web", byHostname))
	is("the pods to be gated", true)
	apply(t, c, ns, stateFor("other", "other", byHostname))
	kubectl(t, c, "delete", "persistentpodstate", "a", "-n", ns)
	is("the pods to be no longer gated", false)
	if !gates(t, c, ns, "StatefulSet.apps.other") {
		t.Error("the pods of another workload are no longer gated")
	}
}

func TestTheRecordOutlivesAWorkloadDeletedWithoutItsPods(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	web := lab.Workload{Name: "web", Replicas: 3, Own: requiresNode}
	deploy(t, c, ns, web)
	before := places(t, c, ns, "web", 3, nil)
	s := comesTo(t, c, ns, "web", "to record three pods", recordsAll(3))
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns, "--cascade=orphan")
	caughtUp(t, c, ns)
	if is := stateOf(t, c, ns, "web"); is == nil || is.UID != s.UID ||
		!equality.Semantic.DeepEqual(is.Status.PodStates, s.Status.PodStates) {
		t.Fatalf("with orphaned pods, the object is %+v", is)
	}
	deploy(t, c, ns, web)
	until(t, "the pods to be adopted", func(context.Context) bool {
		pod := getPod(t, c, ns, "web-2")
		return pod != nil && metav1.GetControllerOf(pod) != nil
	})
	caughtUp(t, c, ns)
	if is := stateOf(t, c, ns, "web"); is == nil || is.UID != s.UID ||
		!equality.Semantic.DeepEqual(is.Status.PodStates, s.Status.PodStates) {
		t.Fatalf("after the adoption, the object is %+v", is)
	}
	deletePods(t, c, ns, "web")
	sameNodes(t, before, places(t, c, ns, "web", 3, before))

	// If the orphans end before they are adopted, the record is deleted.
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns, "--cascade=orphan")
	deletePods(t, c, ns, "web")
	untilDeleted(t, c, ns, "web")
}

func TestAHandWrittenObjectFollowsItsRetentionPolicy(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	apply(t, c, ns, stateFor("by-hand", "web", byHostname+"  persistentPodStateRetentionPolicy: WhenDeleted\n"))
	comesTo(t, c, ns, "by-hand", "to say that there is no such workload", func(s *kruisev1alpha1.PersistentPodState) bool {
		c := meta.FindStatusCondition(s.Status.Conditions, "Recorded")
		return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "TargetNotFound"
	})
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 5})
	comesTo(t, c, ns, "by-hand", "to record five pods", recordsAll(5))
	kubectl(t, c, "scale", "statefulset", "web", "--replicas=1", "-n", ns)
	until(t, "four pods to end", func(context.Context) bool {
		return getPod(t, c, ns, "web-1") == nil && getPod(t, c, ns, "web-4") == nil
	})
	caughtUp(t, c, ns)
	comesTo(t, c, ns, "by-hand", "to record five pods still", func(s *kruisev1alpha1.PersistentPodState) bool {
		return len(s.Status.PodStates) == 5 && *s.Status.Pods == 1
	})
	// Foreign records, as OpenKruise would leave them, are deleted, too.
	kubectl(t, c, "patch", "persistentpodstate", "by-hand", "-n", ns, "--type=merge", "-p",
		`{"spec": {"persistentPodStateRetentionPolicy": "WhenScaled"}}`)
	kubectl(t, c, "patch", "persistentpodstate", "by-hand", "-n", ns, "--subresource=status", "--type=merge", "-p",
		`{"status": {"podStates": {"web-7": {"nodeName": "node-1"}, "web-0": {"nodeTopologyLabels": {"other": "label"}}}}}`)
	comesTo(t, c, ns, "by-hand", "to have one record left", func(s *kruisev1alpha1.PersistentPodState) bool {
		return recordsAll(1)(s) && len(s.Status.PodStates["web-0"].NodeTopologyLabels) == 1
	})
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	comesTo(t, c, ns, "by-hand", "to be empty", func(s *kruisev1alpha1.PersistentPodState) bool {
		return len(s.Status.PodStates) == 0
	})
}

func TestAHandWrittenObjectIsNeverTakenOver(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	apply(t, c, ns, stateFor("web", "other", byHostname))
	apply(t, c, ns, stateFor("mine", "own", byHostname))
	for _, name := range []string{"web", "own"} {
		deploy(t, c, ns, lab.Workload{Name: name, Own: map[string]string{auto: "true", preferred: rack}})
		saysOf(t, c, ns, "StatefulSet", name, "PersistentPodStateExists")
	}
	caughtUp(t, c, ns)
	for name, target := range map[string]string{"web": "other", "mine": "own"} {
		s := stateOf(t, c, ns, name)
		if s == nil || len(s.Labels) != 0 || s.Spec.TargetReference.Name != target ||
			s.Spec.PreferredPersistentTopology != nil {
			t.Errorf("%s is now %+v", name, s)
		}
	}
	if s := stateOf(t, c, ns, "own"); s != nil {
		t.Errorf("%+v was generated besides it", s)
	}
	// It also survives the removal of the annotation and of the workload.
	kubectl(t, c, "annotate", "statefulset", "own", "-n", ns, auto+"-")
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	caughtUp(t, c, ns)
	if stateOf(t, c, ns, "web") == nil || stateOf(t, c, ns, "mine") == nil {
		t.Error("it was deleted")
	}
	// Once it is deleted, one is generated.
	kubectl(t, c, "delete", "persistentpodstate", "mine", "-n", ns)
	kubectl(t, c, "annotate", "statefulset", "own", "-n", ns, auto+"=true")
	comesTo(t, c, ns, "own", "to be generated", func(*kruisev1alpha1.PersistentPodState) bool { return true })
}

func TestInvalidAnnotationsAreReportedOnTheWorkload(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	for name, want := range map[string]struct {
		annotations map[string]string
		reason      string
		says        string
	}{
		"none":  {map[string]string{auto: "true"}, "TopologyMissing", required},
		"key":   {map[string]string{auto: "true", required: "no key"}, "InvalidAnnotation", `"no key"`},
		"wrong": {map[string]string{auto: "yes", required: hostname}, "InvalidAnnotation", `"yes"`},
	} {
		deploy(t, c, ns, lab.Workload{Name: name, Own: want.annotations})
		if message := saysOf(t, c, ns, "StatefulSet", name, want.reason); !strings.Contains(message, want.says) {
			t.Errorf("the Event says %q, not %s", message, want.says)
		}
		if s := stateOf(t, c, ns, name); s != nil {
			t.Errorf("%+v was generated", s.Spec)
		}
	}
}

func TestASecondObjectForAWorkloadIsRefusedOrIgnored(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1})
	pod := ready(t, c, ns, "web-0")
	apply(t, c, ns, stateFor("z-first", "web", byHostname))
	first := comesTo(t, c, ns, "z-first", "to record the pod", recordsAll(1))
	until(t, "a second one to be refused", func(ctx context.Context) bool {
		_, err := c.Kubectl(ctx, stateFor("a-second", "web", byHostname), "create", "--dry-run=server", "-n", ns, "-f", "-")
		return err != nil && strings.Contains(err.Error(), "z-first")
	})

	binding, err := c.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Get(testContext(t),
		"stayput-unique-target", metav1.GetOptions{})
	must.Do(t, err)
	kubectl(t, c, "delete", "validatingadmissionpolicybinding", binding.Name)
	t.Cleanup(func() {
		binding.ResourceVersion, binding.UID = "", ""
		_, err := c.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Create(context.Background(),
			binding, metav1.CreateOptions{})
		must.Do(t, err)
	})
	// Of two of the same second the first by name is the older one.
	until(t, "a second one to slip in", func(ctx context.Context) bool {
		if time.Since(first.CreationTimestamp.Time) < time.Second {
			return false
		}
		_, err := c.Kubectl(ctx, stateFor("a-second", "web",
			"  preferredPersistentTopology: [{weight: 1, preference: {nodeTopologyKeys: [kubernetes.io/hostname]}}]\n"),
			"create", "-n", ns, "-f", "-")
		return err == nil
	})
	comesTo(t, c, ns, "a-second", "to be in conflict", func(s *kruisev1alpha1.PersistentPodState) bool {
		return isTrue(s, "Conflict", "OlderObject") &&
			strings.Contains(meta.FindStatusCondition(s.Status.Conditions, "Conflict").Message, "z-first") &&
			len(s.Status.PodStates) == 0
	})
	comesTo(t, c, ns, "z-first", "to be obeyed", recordsAll(1))
	kubectl(t, c, "delete", "persistentpodstate", "z-first", "-n", ns)
	comesTo(t, c, ns, "a-second", "to take over", func(s *kruisev1alpha1.PersistentPodState) bool {
		conflict := meta.FindStatusCondition(s.Status.Conditions, "Conflict")
		return recordsAll(1)(s) && conflict != nil && conflict.Status == metav1.ConditionFalse &&
			s.Status.PodStates["web-0"].NodeName == pod.Spec.NodeName
	})
}

func TestAnInvalidPersistentPodStateIsRefused(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	ofKind := func(kind string) string {
		return strings.Replace(stateFor("x", "web", byHostname), "kind: StatefulSet", "kind: "+kind, 1)
	}
	const weight = "  preferredPersistentTopology: [{weight: %d, preference: {nodeTopologyKeys: [a]}}]\n"
	for name, yaml := range map[string]string{
		"a weight of 0":               stateFor("x", "web", fmt.Sprintf(weight, 0)),
		"a weight of 101":             stateFor("x", "web", fmt.Sprintf(weight, 101)),
		"an empty target":             stateFor("x", `""`, byHostname),
		"a target without kind":       strings.Replace(stateFor("x", "web", byHostname), "kind: StatefulSet, ", "", 1),
		"a Deployment":                ofKind("Deployment"),
		"a ReplicaSet":                ofKind("ReplicaSet"),
		"no topology":                 stateFor("x", "web", ""),
		"an empty topology":           stateFor("x", "web", "  requiredPersistentTopology: {nodeTopologyKeys: []}\n"),
		"no preferences":              stateFor("x", "web", "  preferredPersistentTopology: []\n"),
		"another retention":           stateFor("x", "web", byHostname+"  persistentPodStateRetentionPolicy: Never\n"),
		"an annotation without a key": stateFor("x", "web", byHostname+"  persistentPodAnnotations: [{}]\n"),
		"an annotation that tells a pod its addresses": stateFor("x", "web",
			byHostname+"  persistentPodAnnotations: [{key: a}, {key: stayput.io/addresses}]\n"),
		"an annotation that asks for addresses in Spiderpool's words": stateFor("x", "web",
			byHostname+"  persistentPodAnnotations: [{key: ipam.spidernet.io/ippool}]\n"),
		"an annotation that asks for addresses in OpenKruise's words": stateFor("x", "web",
			byHostname+"  persistentPodAnnotations: [{key: io.kubernetes.cri/reserved-ip-duration}]\n"),
	} {
		if out, err := c.Kubectl(testContext(t), yaml, "apply", "-n", ns, "-f", "-"); err == nil {
			t.Errorf("%s is accepted: %s", name, out)
		}
	}
	for _, w := range []int{1, 100} {
		apply(t, c, ns, stateFor("fine", "web", fmt.Sprintf(weight, w)))
	}
	_, err := c.Kubectl(testContext(t), stateFor("fine", "another", byHostname), "apply", "-n", ns, "-f", "-")
	if err == nil || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("another target: %v", err)
	}
}

func TestAPersistentPodStateInOpenKruisesNewerVersionBringsPodsHome(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	newer := func(name, spec string) string {
		return strings.Replace(stateFor(name, "web", spec), "/v1alpha1", "/v1beta1", 1)
	}
	const inNewer = "  requiredPersistentTopology: {keys: [kubernetes.io/hostname]}\n"
	apply(t, c, ns, newer("by-hand", inNewer))
	until(t, "the pods of the workload to be gated", func(context.Context) bool {
		return gates(t, c, ns, "StatefulSet.apps.web")
	})
	comeHome := func(before map[string]*corev1.Pod) map[string]*corev1.Pod {
		t.Helper()
		s := comesTo(t, c, ns, "by-hand", "to record the pods", recordsAll(4))
		deletePods(t, c, ns, "web")
		after := places(t, c, ns, "web", 4, before)
		for name, was := range before {
			if state := s.Status.PodStates[name]; state.NodeTopologyLabels[hostname] != was.Spec.NodeName {
				t.Errorf("%s was on %s and is recorded with %v", name, was.Spec.NodeName, state.NodeTopologyLabels)
			}
			if is := after[name]; is.Spec.NodeName != was.Spec.NodeName {
				t.Errorf("%s was on %s and is on %s", name, was.Spec.NodeName, is.Spec.NodeName)
			}
		}
		return after
	}
	pods := comeHome(tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 4}))

	// Both versions say the same, and each takes what the other was given.
	for _, version := range []string{"v1alpha1", "v1beta1"} {
		if keys := kubectl(t, c, "get", "persistentpodstates."+version+".apps.kruise.io", "by-hand", "-n", ns, "-o",
			"jsonpath={.spec.requiredPersistentTopology.keys}"); keys != `["kubernetes.io/hostname"]` {
			t.Errorf("as %s it requires %s", version, keys)
		}
	}
	if out, err := c.Kubectl(testContext(t), newer("a-second", inNewer), "apply", "-n", ns, "-f", "-"); err == nil ||
		!strings.Contains(err.Error(), "by-hand") {
		t.Errorf("a second one for the target: %s%v", out, err)
	}
	apply(t, c, ns, stateFor("by-hand", "web", byHostname))
	if s := stateOf(t, c, ns, "by-hand"); s.Spec.RequiredPersistentTopology.Keys != nil {
		t.Errorf("written in v1alpha1 it requires %+v", s.Spec.RequiredPersistentTopology)
	}
	comeHome(pods)
}

func TestTheStartOrdinalIsRespected(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Start: 5, Own: requiresNode})
	s := comesTo(t, c, ns, "web", "to record two pods", recordsAll(2))
	if got := slices.Sorted(maps.Keys(s.Status.PodStates)); !slices.Equal(got, []string{"web-5", "web-6"}) {
		t.Errorf("recorded are %v", got)
	}
	kubectl(t, c, "scale", "statefulset", "web", "--replicas=1", "-n", ns)
	s = comesTo(t, c, ns, "web", "to have one record left", recordsAll(1))
	if _, ok := s.Status.PodStates["web-5"]; !ok {
		t.Errorf("recorded are %v", s.Status.PodStates)
	}
}

// gate sets the condition of a pod's readiness gate.
func gate(t *testing.T, c *lab.Cluster, ns, pod string, is bool) {
	t.Helper()
	status := "False"
	if is {
		status = "True"
	}
	kubectl(t, c, "patch", "pod", pod, "-n", ns, "--subresource=status", "-p",
		fmt.Sprintf(`{"status": {"conditions": [{"type": "test.stayput.io/ready", "status": %q}]}}`, status))
}

func TestARecordStaysWhileItsPodIsNotReadyAndMovesWithIt(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	long := int64(300) // the pod ends only when it is killed
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Own: prefersNode,
		Pod: corev1.PodSpec{
			TerminationGracePeriodSeconds: &long,
			ReadinessGates:                []corev1.PodReadinessGate{{ConditionType: "test.stayput.io/ready"}},
		},
		Container: corev1.Container{Lifecycle: &corev1.Lifecycle{
			PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: long}},
		}},
	})
	started := func(uid types.UID) *corev1.Pod {
		var pod *corev1.Pod
		until(t, "web-0 to run", func(context.Context) bool {
			pod = getPod(t, c, ns, "web-0")
			return pod != nil && pod.UID != uid && pod.Status.Phase == corev1.PodRunning
		})
		return pod
	}
	stays := func(when string, node string, n int) {
		t.Helper()
		caughtUp(t, c, ns)
		if s := stateOf(t, c, ns, "web"); s == nil || len(s.Status.PodStates) != n ||
			s.Status.PodStates["web-0"].NodeName != node {
			t.Fatalf("%s, the object is %+v", when, s)
		}
	}
	first := started("")
	comesTo(t, c, ns, "web", "to wait for the pod", func(s *kruisev1alpha1.PersistentPodState) bool {
		return *s.Status.Pods == 1
	})
	stays("never Ready", "", 0)
	gate(t, c, ns, "web-0", true)
	comesTo(t, c, ns, "web", "to record the pod", recordsAll(1))
	home := first.Spec.NodeName
	gate(t, c, ns, "web-0", false)
	until(t, "web-0 not to be Ready", func(context.Context) bool { return !lab.Ready(getPod(t, c, ns, "web-0")) })
	stays("no longer Ready", home, 1)
	gate(t, c, ns, "web-0", true)
	ready(t, c, ns, "web-0")
	kubectl(t, c, "cordon", home)
	defer kubectl(t, c, "uncordon", home)
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns, "--wait=false")
	until(t, "web-0 to terminate", func(context.Context) bool {
		return getPod(t, c, ns, "web-0").DeletionTimestamp != nil
	})
	stays("terminating", home, 1)

	// It starts elsewhere, as its home is only preferred, and cordoned.
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns, "--grace-period=0", "--force")
	second := started(first.UID)
	if second.Spec.NodeName == home {
		t.Fatalf("it is on %s, which is cordoned", home)
	}
	stays("not Ready elsewhere", home, 1)
	gate(t, c, ns, "web-0", true)
	comesTo(t, c, ns, "web", "to move the record", func(s *kruisev1alpha1.PersistentPodState) bool {
		return s.Status.PodStates["web-0"].NodeName == second.Spec.NodeName &&
			s.Status.PodStates["web-0"].NodeTopologyLabels[hostname] == second.Spec.NodeName
	})
	if message := saysOf(t, c, ns, "StatefulSet", "web", "HomeMoved"); !strings.Contains(message, home) ||
		!strings.Contains(message, second.Spec.NodeName) {
		t.Errorf("the Event says %q", message)
	}
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns, "--grace-period=0", "--force", "--ignore-not-found")
}
