package placement

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// placing is a placer with a clock of its own.
type placing struct {
	*placer
	said *events.FakeRecorder
	time time.Time
}

func testPlacer(c client.Client) *placing {
	p := &placing{said: events.NewFakeRecorder(10), time: hometest.Noon}
	now := func() time.Time { return p.time }
	m := newMemory(now)
	p.placer = &placer{client: c, cache: c, memory: m, events: p.said, now: now, uninstalling: func() bool { return false },
		metrics: newPlacementMetrics(prometheus.NewRegistry(), m, nil)}
	return p
}

// looksAt has the placer look at a pod and returns what has become of it: nil if it is gone.
func (p *placing) looksAt(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	key := client.ObjectKeyFromObject(pod)
	if _, err := p.Reconcile(t.Context(), reconcile.Request{NamespacedName: key}); err != nil {
		t.Fatal(err)
	}
	is := &corev1.Pod{}
	if err := p.client.Get(t.Context(), key, is); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		t.Fatal(err)
	}
	p.memory.seen(is)
	return is
}

// notes returns the Events since the last call.
func (p *placing) notes() (all []string) {
	for len(p.said.Events) > 0 {
		all = append(all, <-p.said.Events)
	}
	return all
}

// keptOn is what a node keeps for web-0.
func keptOn(node string, phase stayputv1alpha1.Phase, since time.Time) *stayputv1alpha1.RetainedIP {
	at := metav1.NewTime(since)
	return &stayputv1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0." + node},
		Spec:       stayputv1alpha1.RetainedIPSpec{NodeName: node, PodName: "web-0", Retention: "10m"},
		Status:     stayputv1alpha1.RetainedIPStatus{Phase: phase, Since: &at},
	}
}

func ownedBySet(p *corev1.Pod) {
	yes := true
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "of-web",
		Controller: &yes}}
}

// nodesOfPod returns the nodes that a pod is pinned to by name.
func nodesOfPod(pod *corev1.Pod) (names []string) {
	if a := pod.Spec.Affinity; a != nil && a.NodeAffinity != nil &&
		a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, f := range term.MatchFields {
				names = append(names, f.Values...)
			}
		}
	}
	return names
}

func TestAFullHomeIsLeftByPodsThatHaveAController(t *testing.T) {
	for name, made := range map[string]bool{"with a controller": true, "without a controller": false} {
		t.Run(name, func(t *testing.T) {
			pod := hometest.Pod()
			if made {
				ownedBySet(pod)
			}
			p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
				keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
			is := p.looksAt(t, pod)
			if home.Gated(is) || !slices.Equal(nodesOfPod(is), []string{"node-1"}) || !home.Pinned(is) {
				t.Fatalf("placed by %+v", is)
			}
			is.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
				Reason: corev1.PodReasonUnschedulable}}
			if err := p.client.Status().Update(t.Context(), is); err != nil {
				t.Fatal(err)
			}
			if notes := p.notes(); p.looksAt(t, pod) == nil || len(notes) > 0 {
				t.Fatalf("it is gone before its wait is over, or %q", notes)
			}
			p.notes()                          // that it waits
			p.time = time.Now().Add(time.Hour) // the API server has a clock of its own

			if is := p.looksAt(t, pod); (is == nil) != made {
				t.Fatalf("it is gone: %v", is == nil)
			}
			notes, want := p.notes(), 1
			if made {
				want = 2 // on the pod and on its controller
			}
			says := map[bool]string{true: "the pod was deleted so that its successor goes elsewhere",
				false: "no controller would create the pod again: delete it"}[made]
			if len(notes) != want || !strings.HasPrefix(notes[0], "Warning "+home.ReasonHomeFull+" ") ||
				!strings.Contains(notes[0], "node node-1") || !strings.Contains(notes[0], says) {
				t.Errorf("said %q", notes)
			}
			successor := hometest.Pod(func(p *corev1.Pod) {
				p.UID, p.CreationTimestamp = "successor", metav1.NewTime(time.Now().Add(time.Hour))
			})
			if p.memory.gaveUp(successor) != made {
				t.Errorf("its successor goes free: %v", !made)
			}
			if made {
				return
			}
			if p.looksAt(t, pod); len(p.notes()) > 0 {
				t.Error("it is said again")
			}
		})
	}
}

func TestWhatAPodAsksInVainIsSaidOnce(t *testing.T) {
	pod := hometest.Pod(ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "soon"))
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a", hometest.Cordoned),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	p.looksAt(t, pod)
	ignored := slices.DeleteFunc(p.notes(),
		func(n string) bool { return !strings.HasPrefix(n, "Warning "+home.ReasonHomeIgnored+" ") })
	if len(ignored) != 2 || !strings.Contains(ignored[0], `"soon" is not valid`) ||
		!strings.Contains(ignored[1], "pod web-0: ") {
		t.Errorf("said of the pod and its controller: %q", ignored)
	}
	if p.looksAt(t, pod); len(p.notes()) > 0 {
		t.Error("it is said again")
	}
}

func TestAPodGoesBackToItsLastNodeThoughAFormerOneReturned(t *testing.T) {
	for name, kept := range map[string][]client.Object{
		"its last node is silent": {keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon),
			keptOn("node-2", stayputv1alpha1.PhaseBound, hometest.Noon.Add(-time.Minute))},
		"its last node is yet to speak": {keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)},
	} {
		t.Run(name, func(t *testing.T) {
			pod := hometest.Pod()
			p := testPlacer(fakeAPI(t, append(kept, pod, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"))...))
			p.memory.deleted(hometest.Pod(hometest.RanOn("node-2")))
			if is := p.looksAt(t, pod); home.Gated(is) || !slices.Equal(nodesOfPod(is), []string{"node-2"}) {
				t.Errorf("gated: %v, pinned to %v", home.Gated(is), nodesOfPod(is))
			}
		})
	}
}

func TestTheCacheKeepsThatAPodIsPinned(t *testing.T) {
	applied := func(fields string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.ManagedFields[0].FieldsV1 = metav1.NewFieldsV1(fields) }
	}
	for name, c := range map[string]struct {
		pod    *corev1.Pod
		pinned bool
	}{
		"pinned":               {hometest.Pod(hometest.Pinned), true},
		"by a copied template": {hometest.Pod(hometest.Pinned, hometest.Copied), false},
		"not pinned":           {hometest.Pod(), false},
		"something else is ours": {hometest.Pod(hometest.Pinned,
			applied(`{"f:metadata":{"f:annotations":{"f:stayput.io/home-wait":{}}}}`)), false},
		"only ungated, by a patch": {hometest.Pod(hometest.Pinned,
			func(p *corev1.Pod) { p.ManagedFields[0].Operation = metav1.ManagedFieldsOperationUpdate }), false},
		"pinned and changed by many": {hometest.Pod(hometest.Pinned, func(p *corev1.Pod) {
			p.ManagedFields = append(p.ManagedFields, metav1.ManagedFieldsEntry{Manager: "kubelet"})
		}), true},
	} {
		cached := cluster.PodOf(c.pod)
		if is := cached.Core(); undecided(cached) != (c.pinned || home.Gated(c.pod)) || home.Pinned(is) != c.pinned ||
			len(is.ManagedFields) > 1 {
			t.Errorf("%s: pinned %v, with %v", name, home.Pinned(is), is.ManagedFields)
		}
	}
}

func TestTheCacheKeepsWhatTheSchedulerSaysOfAPodWithoutANode(t *testing.T) {
	const full = "0/3 nodes are available: 1 Insufficient cpu."
	never := corev1.PreemptNever
	said := func(p *corev1.Pod) {
		p.Spec.PreemptionPolicy = &never
		p.Status.NominatedNodeName, p.Status.Conditions[0].Message = "node-1", full
	}
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		kept bool
	}{
		"without a node": {hometest.Pod(hometest.Pinned, said), true},
		"with a node":    {hometest.Pod(hometest.Pinned, said, func(p *corev1.Pod) { p.Spec.NodeName = "node-1" }), false},
	} {
		pod := cluster.PodOf(c.pod).Core()
		if (pod.Status.NominatedNodeName == "node-1" && pod.Spec.PreemptionPolicy != nil &&
			pod.Status.Conditions[0].Message == full) != c.kept {
			t.Errorf("%s: kept %+v, %+v", name, pod.Spec, pod.Status)
		}
	}
}
