package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestTwelvePodsDeletedAtOnceComeHomeThreeTimesInARow(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 12, Annotations: retain("10m")})
	for range 3 {
		deletePods(t, c, ns, "web")
		after := places(t, c, ns, "web", 12, before)
		cameHome(t, before, after)
		before = after
	}
}

// Nobody has to edit the pod template.
func TestPodsRetainTheirAddressesByDefaultOfTheirNamespace(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	kubectl(t, c, "annotate", "namespace", ns, retainIP+"=10m")
	deploy(t, c, ns, lab.Workload{Name: "not", Replicas: 1, Annotations: map[string]string{retainIP: "none"}})
	ready(t, c, ns, "not-0") // and the API server has seen the annotation
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 3})
	deletePods(t, c, ns, "web")
	comeHome(t, c, ns, "web", before)
	for pod, want := range map[string]string{
		"web-0": retainIP + ": 10m", "not-0": "it has the annotation " + retainIP + ": none",
	} {
		if says := works(t, c, ns, "why", pod); !strings.Contains(says, want) {
			t.Errorf("why %s does not say %q:\n%s", pod, want, says)
		}
	}
}

func TestPodsThatPreferTheirHomeComeHomeThoughOtherNodesAreEmptier(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 12, Annotations: retain("10m", "stayput.io/home", "Preferred"),
	})
	for range 3 {
		deletePods(t, c, ns, "web")
		after := places(t, c, ns, "web", 12, before)
		cameHome(t, before, after)
		for _, pod := range after {
			if a := pod.Spec.Affinity; a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
				t.Errorf("%s is held at its home: %+v", pod.Name, a.NodeAffinity)
			}
		}
		before = after
	}
}

func TestAPodThatPrefersAFullHomeGoesElsewhereAtOnce(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home", "Preferred"),
		Pod: corev1.PodSpec{Affinity: &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{apartFrom("guest")},
		}}},
	})["web-0"]
	scale(t, c, ns, "web", 0)
	until(t, "web-0 to end", func(context.Context) bool { return getPod(t, c, ns, "web-0") == nil })
	deploy(t, c, ns, lab.Workload{Name: "guest", Replicas: 1, Node: before.Spec.NodeName})
	ready(t, c, ns, "guest-0")
	scale(t, c, ns, "web", 1)
	after := ready(t, c, ns, "web-0")
	if after.Spec.NodeName == before.Spec.NodeName || after.Status.NominatedNodeName != "" {
		t.Errorf("it is on %s, nominated for %q", after.Spec.NodeName, after.Status.NominatedNodeName)
	}
}

func TestARolloutKeepsNodesAndAddresses(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 3, Annotations: map[string]string{"io.kubernetes.cri/reserved-ip-duration": "10"},
	})
	kubectl(t, c, "set", "env", "statefulset/web", "ROLLED=yes", "-n", ns)
	cameHome(t, before, places(t, c, ns, "web", 3, before))
}

func TestAPodThatWasNeverReadyComesHome(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	kubectl(t, c, "cordon", "node-3")
	deploy(t, c, ns, lab.Workload{
		Name: "crash", Replicas: 4, Annotations: retain("10m"),
		Container: corev1.Container{Command: []string{"/nosuchfile"}},
	})
	started := func(before map[string]*corev1.Pod) map[string]*corev1.Pod {
		pods := map[string]*corev1.Pod{}
		for i := range 4 {
			name := fmt.Sprintf("crash-%d", i)
			until(t, name+" to have an address", func(context.Context) bool {
				pods[name] = getPod(t, c, ns, name)
				return pods[name] != nil && pods[name].Status.PodIP != "" &&
					(before[name] == nil || before[name].UID != pods[name].UID)
			})
		}
		return pods
	}
	before := started(nil)
	kubectl(t, c, "uncordon", "node-3")
	deletePods(t, c, ns, "crash")
	cameHome(t, before, started(before))
}

func TestNodeAffinityJoinsThatOfThePodAndOfAnotherPolicy(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	// With four pods on two nodes, the anti-affinity would rather move at least two of them.
	onLinux := corev1.NodeSelectorRequirement{
		Key: corev1.LabelOSStable, Operator: corev1.NodeSelectorOpIn, Values: []string{"linux"},
	}
	labelled := corev1.NodeSelectorRequirement{Key: "nosuchlabel", Operator: corev1.NodeSelectorOpExists}
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 4, Annotations: retain("10m"),
		Pod: corev1.PodSpec{Affinity: &corev1.Affinity{
			PodAntiAffinity: &corev1.PodAntiAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{
					Weight: 100, PodAffinityTerm: apartFrom("web"),
				}},
			},
			NodeAffinity: &corev1.NodeAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: rather(100, "node-3"),
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
					NodeSelectorTerms: []corev1.NodeSelectorTerm{
						{MatchExpressions: []corev1.NodeSelectorRequirement{onLinux}},
						{MatchExpressions: []corev1.NodeSelectorRequirement{labelled}},
					},
				},
			},
		}},
	})
	_, err := c.Kubectl(testContext(t), fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: %[1]s}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %[1]s}}
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >-
        (has(object.metadata.labels) ? [] : [JSONPatch{op: "add", path: "/metadata/labels", value: {"a": "b"}}]) +
        (has(object.spec.tolerations) ? [] : [JSONPatch{op: "add", path: "/spec/tolerations", value: []}]) +
        (has(object.spec.schedulingGates) ? [] : [JSONPatch{op: "add", path: "/spec/schedulingGates", value: []}]) +
        (!has(object.spec.affinity) ? [] : [JSONPatch{op: "add", path: "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution/-",
        value: {"weight": dyn(50), "preference": dyn({"matchFields": [{"key": dyn("metadata.name"), "operator": dyn("In"), "values": dyn(["node-3"])}]})}}]) +
        [JSONPatch{op: "add", path: "/metadata/labels/added", value: "too"},
        JSONPatch{op: "add", path: "/spec/schedulingGates/-", value: {"name": "example.com/added"}},
        JSONPatch{op: "add", path: "/spec/tolerations/-", value: Object.spec.tolerations{key: "added", operator: "Exists"}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: %[1]s}
spec: {policyName: %[1]s}
`, ns), "apply", "-f", "-")
	must.Do(t, err)
	atEnd(t, c, "delete", "mutatingadmissionpolicy,mutatingadmissionpolicybinding", ns)
	until(t, "the other policy to be in force", func(ctx context.Context) bool {
		pod, err := c.Client().CoreV1().Pods(ns).Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "probe"},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
		}, metav1.CreateOptions{DryRun: []string{"All"}})
		return err == nil && pod.Labels["added"] == "too"
	})
	deletePods(t, c, ns, "web")
	for name, was := range before {
		var pod *corev1.Pod
		until(t, name+" to have both gates", func(context.Context) bool {
			pod = getPod(t, c, ns, name)
			return pod != nil && pod.UID != was.UID && isGated(pod) && len(pod.Spec.SchedulingGates) == 2
		})
		other := slices.IndexFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
			return g.Name == "example.com/added"
		})
		kubectl(t, c, "patch", "pod", name, "-n", ns, "--type=json", "-p",
			fmt.Sprintf(`[{"op": "remove", "path": "/spec/schedulingGates/%d"}]`, other))
	}
	after := places(t, c, ns, "web", 4, before)
	cameHome(t, before, after)
	for name, pod := range after {
		want := before[name].Spec.Affinity.DeepCopy()
		for i := range want.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			term := &want.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[i]
			term.MatchFields = append(term.MatchFields, named(before[name].Spec.NodeName))
		}
		preferred := &want.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
		*preferred = append(*preferred, corev1.PreferredSchedulingTerm{
			Weight: 50, Preference: corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{named("node-3")}},
		})
		if !equality.Semantic.DeepEqual(pod.Spec.Affinity, want) {
			t.Errorf("%s has the affinity\n%+v\nwant\n%+v", name, pod.Spec.Affinity, want)
		}
		added := func(o corev1.Toleration) bool { return o.Key == "added" }
		if pod.Labels["added"] != "too" || !slices.ContainsFunc(pod.Spec.Tolerations, added) {
			t.Errorf("%s has lost what the other policy adds", name)
		}
	}
}

func named(node string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{
		Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
	}
}

func TestAConflictingNodeSelectorIsReportedNotOverwritten(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m")})["web-0"]
	kubectl(t, c, "patch", "statefulset", "web", "-n", ns, "-p",
		`{"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "node-3"}}}}}`)
	after := successor(t, c, before)
	if after.Spec.NodeName != "node-3" || after.Spec.NodeSelector["kubernetes.io/hostname"] != "node-3" {
		t.Errorf("it is on %s with the selector %v", after.Spec.NodeName, after.Spec.NodeSelector)
	}
	for _, about := range []string{"Pod web-0", "StatefulSet web"} {
		kind, name, _ := strings.Cut(about, " ")
		message := saysOf(t, c, ns, kind, name, "HomeGivenUp")
		if !strings.Contains(message, "node "+before.Spec.NodeName) || !strings.Contains(message, "node selector") {
			t.Errorf("the Event about %s says %q", about, message)
		}
	}
}

func TestAPodWaitsForAHomeThatComesBackInTime(t *testing.T) {
	for _, away := range []struct {
		name, why string
		leave     []string // arguments of kubectl, with NODE for the node
		back      []string
	}{
		{"cordoned", "is cordoned", []string{"cordon", "NODE"}, []string{"uncordon", "NODE"}},
		{
			"tainted", "has the taint dedicated=batch:NoSchedule",
			[]string{"taint", "node", "NODE", "dedicated=batch:NoSchedule"},
			[]string{"taint", "node", "NODE", "dedicated-"},
		},
		{
			"drained", "is cordoned",
			[]string{
				"drain", "NODE", "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--pod-selector=app=web",
			},
			[]string{"uncordon", "NODE"},
		},
	} {
		t.Run(away.name, func(t *testing.T) {
			c := installed(t)
			ns := namespace(t, c)
			before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m")})
			was := before["web-0"]
			run := func(args []string) {
				args = slices.Clone(args)
				args[slices.Index(args, "NODE")] = was.Spec.NodeName
				kubectl(t, c, args...)
			}
			run(away.leave)
			back := once(func() { run(away.back) })
			defer back()
			deletePods(t, c, ns, "web")
			waiting := waitsFor(t, c, was, away.why)
			back()
			after := places(t, c, ns, "web", 1, before)
			cameHome(t, before, after)
			if after["web-0"].UID != waiting.UID {
				t.Error("it is not the pod that waited")
			}
		})
	}
}

func TestAPodGoesElsewhereAfterWaitingForItsHome(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait", "5s"),
	})["web-0"]
	kubectl(t, c, "cordon", before.Spec.NodeName)
	defer kubectl(t, c, "uncordon", before.Spec.NodeName)
	deletePods(t, c, ns, "web")
	waitsFor(t, c, before, "is cordoned")
	atHome := shows(t, c, ns, "web-0", before.Spec.NodeName, "retained", retained)
	after := wentElsewhere(t, c, before, "is cordoned")
	// The address at the old home keeps its expiry.
	keepsItsExpiry := func(when string) {
		t.Helper()
		old := retainedIP(t, c, ns, "web-0", before.Spec.NodeName)
		if old == nil || !retained(old) || old.Status.IPs[0] != before.Status.PodIP ||
			!old.Status.Expires.Equal(atHome.Status.Expires) {
			t.Errorf("%s, the address at the old home is %+v, was %+v", when, old, atHome.Status)
		}
	}
	keepsItsExpiry("after the move")
	// And the new node is home from now on.
	shows(t, c, ns, "web-0", after.Spec.NodeName, "bound", boundTo(after))
	deletePods(t, c, ns, "web")
	again := successor(t, c, after)
	cameHome(t, map[string]*corev1.Pod{"web-0": after}, map[string]*corev1.Pod{"web-0": again})
	shows(t, c, ns, "web-0", again.Spec.NodeName, "bound", boundTo(again))
	keepsItsExpiry("after the deletion at the new home")
}

func TestAnAddressExpiresOnTimeAfterItsPodWentElsewhere(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("15s", "stayput.io/home-wait", "5s"),
	})["web-0"]
	kubectl(t, c, "taint", "node", before.Spec.NodeName, "dedicated=batch:NoSchedule")
	defer kubectl(t, c, "taint", "node", before.Spec.NodeName, "dedicated-")
	deletePods(t, c, ns, "web")
	waitsFor(t, c, before, "has the taint dedicated=batch:NoSchedule")
	atHome := shows(t, c, ns, "web-0", before.Spec.NodeName, "retained", retained)
	after := wentElsewhere(t, c, before, "has the taint dedicated=batch:NoSchedule")
	vanishes(t, c, atHome)
	freed(t, c.Node(before.Spec.NodeName), atHome)
	if expires := atHome.Status.Expires; expires == nil || time.Now().Before(expires.Time) {
		t.Errorf("the address was freed before %s", atHome.Status.Expires)
	}
	shows(t, c, ns, "web-0", after.Spec.NodeName, "bound", boundTo(after))
}

func TestAHomeWithoutRoomIsGivenUp(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	seat := corev1.ResourceList{"example.com/seat": resource.MustParse("1")}
	web := lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait", "10m"),
		Container: corev1.Container{Resources: corev1.ResourceRequirements{Requests: seat, Limits: seat}},
	}
	for _, node := range []string{"node-1", "node-2"} { // one seat each
		kubectl(t, c, "patch", "node", node, "--subresource=status", "--type=merge", "-p",
			`{"status": {"capacity": {"example.com/seat": "1"}}}`)
	}
	deploy(t, c, ns, web)
	before := ready(t, c, ns, "web-0")
	t.Cleanup(func() {
		for _, node := range []string{"node-1", "node-2"} {
			_, err := c.Kubectl(context.Background(), "", "patch", "node", node, "--subresource=status", "--type=merge",
				"-p", `{"status": {"capacity": {"example.com/seat": null}}}`)
			must.Do(t, err)
		}
	})
	taker := web
	taker.Name, taker.Replicas, taker.Node = "taker", 0, before.Spec.NodeName
	deploy(t, c, ns, taker)
	// takeSeat gives the seat at home to another pod while web-0 is away.
	takeSeat := func() (waiting *corev1.Pod) {
		t.Helper()
		scale(t, c, ns, "web", 0)
		until(t, "web-0 to end", func(context.Context) bool { return getPod(t, c, ns, "web-0") == nil })
		scale(t, c, ns, "taker", 1)
		ready(t, c, ns, "taker-0")
		scale(t, c, ns, "web", 1)
		until(t, "web-0 to find no room", func(context.Context) bool {
			waiting = getPod(t, c, ns, "web-0")
			return waiting != nil && waiting.UID != before.UID &&
				slices.ContainsFunc(waiting.Status.Conditions, func(c corev1.PodCondition) bool {
					return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable
				})
		})
		return waiting
	}

	// The other pod ends in time.
	waiting := takeSeat()
	message := saysOf(t, c, ns, "Pod", "web-0", "WaitingForHome")
	if !strings.Contains(message, before.Spec.NodeName+", has no room for the pod") {
		t.Errorf("the Event says %q", message)
	}
	scale(t, c, ns, "taker", 0)
	after := ready(t, c, ns, "web-0")
	if after.UID != waiting.UID {
		t.Error("it is not the pod that waited")
	}
	cameHome(t, map[string]*corev1.Pod{"web-0": before}, map[string]*corev1.Pod{"web-0": after})

	// The other pod stays.
	scale(t, c, ns, "web", 0)
	kubectl(t, c, "patch", "statefulset", "web", "-n", ns, "-p",
		`{"spec": {"template": {"metadata": {"annotations": {"stayput.io/home-wait": "5s"}}}}}`)
	before = after
	waiting = takeSeat()
	after = successor(t, c, waiting)
	if after.Spec.NodeName == before.Spec.NodeName {
		t.Fatal("there is room at home after all")
	}
	if waited := after.CreationTimestamp.Sub(waiting.CreationTimestamp.Time); waited < 4*time.Second || waited > soon {
		t.Errorf("it waited for %s", waited)
	}
	if message := saysOf(t, c, ns, "StatefulSet", "web", "HomeHasNoRoom"); !strings.Contains(message, "no room") {
		t.Errorf("the Event says %q", message)
	}
}

func TestPodsNeitherAnnotatedNorRecordedAreLeftAlone(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "plain", Replicas: 2})
	before := places(t, c, ns, "plain", 2, nil)
	deletePods(t, c, ns, "plain")
	for name, pod := range places(t, c, ns, "plain", 2, before) {
		if pod.Spec.Affinity != nil || len(pod.Spec.SchedulingGates) > 0 {
			t.Errorf("%s has %+v", name, pod.Spec.Affinity)
		}
	}
	if all := calls(t, c, ns); len(all) > 0 {
		t.Errorf("%d requests for these pods: %q", len(all), all)
	}
	// The log does show requests.
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m")})
	ready(t, c, ns, "web-0")
	if all := calls(t, c, ns); !slices.Contains(all, "patch pods  web-0") {
		t.Errorf("the log of a gated pod has %q", all)
	}
}

func TestAWaitingPodIsPlacedOnceItsAddressIsReleased(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 1, Annotations: retain("while-owned", "stayput.io/home-wait", "retention"),
	})["web-0"]
	shows(t, c, ns, before.Name, before.Spec.NodeName, "bound", boundTo(before))
	kubectl(t, c, "cordon", before.Spec.NodeName)
	defer kubectl(t, c, "uncordon", before.Spec.NodeName)
	deletePods(t, c, ns, "web")
	waitsFor(t, c, before, "is cordoned")
	setRelease(t, c, shows(t, c, ns, before.Name, before.Spec.NodeName, "retained", retained))
	if after := successor(t, c, before); after.Spec.NodeName == before.Spec.NodeName {
		t.Error("it is at home, which is cordoned")
	}
}
