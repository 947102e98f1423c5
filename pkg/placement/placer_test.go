package placement

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
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
	p.placer = &placer{client: c, cache: c, live: c, cached: func() bool { return true }, memory: m, events: p.said,
		now:          now,
		lag:          newLag(),
		uninstalling: func() bool { return false },
		metrics:      newPlacementMetrics(prometheus.NewRegistry(), m, nil)}
	return p
}

// looksAt has the placer look at a pod and returns what has become of it: nil if it is gone.
func (p *placing) looksAt(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	key := client.ObjectKeyFromObject(pod)
	before := &corev1.Pod{}
	if err := p.client.Get(t.Context(), key, before); err != nil {
		t.Fatal(err)
	}
	p.memory.seen(before)
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
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0." + node, OwnerReferences: byNode},
		Spec: stayputv1alpha1.RetainedIPSpec{NodeName: node, PodName: "web-0", Scheduled: "pod/web-0",
			Retention: "10m"},
		Status: stayputv1alpha1.RetainedIPStatus{Phase: phase, Since: &at},
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
			p.refuse(t, is)
			if notes := p.notes(); p.looksAt(t, pod) == nil || len(notes) > 0 {
				t.Fatalf("it is gone before its wait is over, or %q", notes)
			}
			p.notes() // that it waits
			p.time = p.time.Add(home.DefaultWait)

			if is := p.looksAt(t, pod); (is == nil) != made {
				t.Fatalf("it is gone: %v", is == nil)
			}
			notes, want := p.notes(), 1
			if made {
				want = 2 // on the pod and on its controller
			}
			says := map[bool]string{true: "the pod was deleted so that its successor goes elsewhere",
				false: "no controller would re-create the pod: delete it"}[made]
			if len(notes) != want || !strings.HasPrefix(notes[0], "Warning "+home.ReasonHomeFull+" ") ||
				!strings.Contains(notes[0], "node node-1") || !strings.Contains(notes[0], says) {
				t.Errorf("said %q", notes)
			}
			successor := hometest.Pod(func(p *corev1.Pod) {
				p.UID, p.CreationTimestamp = "successor", metav1.NewTime(hometest.Noon.Add(home.DefaultWait))
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

// refuse has the scheduler find no room for a pod.
func (p *placing) refuse(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available: 1 Insufficient cpu."}}
	if err := p.client.Status().Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

// A Deployment makes successors as soon as the old pods are gone: a moment before their nodes say so.
func TestWhatAPodOfASharedIdentityHasLeftIsForTheNextAtOnce(t *testing.T) {
	front := hometest.Annotation(stayputv1alpha1.AnnotationIdentity, "front")
	old := hometest.Pod(front, func(p *corev1.Pod) { p.Name, p.UID, p.Spec.NodeName = "front-a", "a", "node-1" })
	over := old.DeepCopy()
	over.Status.Phase = corev1.PodSucceeded
	again := old.DeepCopy()
	again.UID, again.Spec.NodeName = "again", ""
	down := hometest.Node("node-1", "a", func(n *corev1.Node) {
		n.Status.Conditions[0].Status = corev1.ConditionUnknown
	})
	up := hometest.Node("node-1", "a")
	for name, c := range map[string]struct {
		there []client.Object
		goes  []string
	}{
		"the pod is gone":                              {[]client.Object{up}, []string{"node-1"}},
		"another one has its name":                     {[]client.Object{up, again}, []string{"node-1"}},
		"the pod is there, and has ended":              {[]client.Object{up, over}, []string{"node-1"}},
		"the pod is there":                             {[]client.Object{up, old}, nil},
		"the pod is gone, and its node says no more":   {[]client.Object{down}, nil},
		"the pod is gone, and its node does not exist": {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			next := hometest.Pod(ownedBySet, front, func(p *corev1.Pod) { p.Name, p.UID = "front-b", "b" })
			r := keptOn("node-1", stayputv1alpha1.PhaseBound, hometest.Noon)
			r.Spec.PodName, r.Spec.Identity, r.Spec.Scheduled, r.Status.PodUID = "front-a", "front", "identity/front", "a"
			p := testPlacer(fakeAPI(t, append(c.there, next, r)...))
			if is := p.looksAt(t, next); home.Gated(is) || !slices.Equal(nodesOfPod(is), c.goes) {
				t.Errorf("gated %t, it goes to %v, want %v", home.Gated(is), nodesOfPod(is), c.goes)
			}
		})
	}
}

func TestAPodOfASharedIdentityDoesNotGoWhereAnotherFoundNoRoom(t *testing.T) {
	named := func(name string) *corev1.Pod {
		return hometest.Pod(ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationIdentity, "front"),
			func(p *corev1.Pod) { p.Name, p.UID = name, types.UID(name) })
	}
	kept := func(node string, since time.Time) *stayputv1alpha1.RetainedIP {
		r := keptOn(node, stayputv1alpha1.PhaseRetained, since)
		r.Spec.Identity, r.Spec.Scheduled = "front", "identity/front"
		return r
	}
	first, second, third := named("front-a"), named("front-b"), named("front-c")
	p := testPlacer(fakeAPI(t, first, second, third, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"),
		kept("node-1", hometest.Noon), kept("node-2", hometest.Noon.Add(-time.Minute))))
	p.nominates = true

	is := p.looksAt(t, first)
	if !slices.Equal(nodesOfPod(is), []string{"node-1"}) {
		t.Fatalf("it goes to %v", nodesOfPod(is))
	}
	p.refuse(t, is)
	if p.looksAt(t, first) == nil {
		t.Fatal("it is gone before its wait is over")
	}
	p.time = p.time.Add(home.DefaultWait)
	if p.looksAt(t, first) != nil {
		t.Fatal("it is still there")
	}
	p.memory.deleted(is)
	if is := p.looksAt(t, second); !slices.Equal(nodesOfPod(is), []string{"node-2"}) {
		t.Errorf("its successor goes to %v, though another home has an address for it", nodesOfPod(is))
	}
	p.notes()
	is = p.looksAt(t, third)
	if nodes := nodesOfPod(is); home.Gated(is) || len(nodes) > 0 || is.Status.NominatedNodeName != "node-1" {
		t.Errorf("another one is required on %v, nominated for %q", nodes, is.Status.NominatedNodeName)
	}
	if notes := p.notes(); len(notes) == 0 || !strings.Contains(notes[0], "had no room") {
		t.Errorf("said %q", notes)
	}

	p.time = p.time.Add(succession + time.Second)
	later := named("front-d")
	p.memory.deleted(third)
	if err := p.client.Create(t.Context(), later); err != nil {
		t.Fatal(err)
	}
	if is := p.looksAt(t, later); !slices.Equal(nodesOfPod(is), []string{"node-1"}) {
		t.Errorf("for ever: %v", nodesOfPod(is))
	}
}

func TestAPodIsPlacedOnceNoOtherGateHoldsIt(t *testing.T) {
	pod := hometest.Pod(ownedBySet, func(p *corev1.Pod) {
		p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "kueue.x-k8s.io/admission"})
	})
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a", hometest.Cordoned),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	p.time = hometest.Noon.Add(time.Hour)
	is := p.looksAt(t, pod)
	if len(is.Spec.SchedulingGates) != 2 || home.Pinned(is) || len(p.notes()) > 0 {
		t.Fatalf("it is placed while another gate holds it: %+v", is.Spec)
	}
	if p.memory.gatedPods()[waitsForNothing].pods > 0 {
		t.Error("it counts as a pod that only our gate holds")
	}
	is.Spec.SchedulingGates = is.Spec.SchedulingGates[:1]
	if err := p.client.Update(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	if is := p.looksAt(t, pod); !home.Gated(is) || len(p.notes()) == 0 {
		t.Error("it does not wait for its home, as if it had been its turn for an hour")
	}
	p.time = p.time.Add(home.DefaultWait)
	if is := p.looksAt(t, pod); home.Gated(is) {
		t.Error("it waits longer than it should")
	}
}

func TestDuringAnUninstallationNoPodWaitsOrGoesHome(t *testing.T) {
	pod := hometest.Pod(ownedBySet, func(p *corev1.Pod) {
		p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "kueue.x-k8s.io/admission"})
	})
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a", hometest.Cordoned),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	p.uninstalling = func() bool { return true }
	if is := p.looksAt(t, pod); home.Gated(is) || home.Pinned(is) || len(is.Spec.SchedulingGates) != 1 {
		t.Errorf("it is %+v", is.Spec)
	}
}

func TestARefusalThatComesLateIsNoReasonToDeleteThePodAtOnce(t *testing.T) {
	pod := hometest.Pod(ownedBySet)
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	is := p.looksAt(t, pod)
	p.time = p.time.Add(time.Hour) // without a scheduler
	p.refuse(t, is)
	if p.looksAt(t, pod) == nil {
		t.Error("it is deleted at the first refusal")
	}
}

func TestAHomeThatVanishedWhileItsPodWaitedIsNotForgotten(t *testing.T) {
	pod := hometest.Pod(ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationHomeWait, "10m"))
	off := hometest.Node("node-1", "a", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	kept := keptOn("node-1", stayputv1alpha1.PhaseBound, hometest.Noon)
	older := keptOn("node-2", stayputv1alpha1.PhaseRetained, hometest.Noon.Add(-time.Hour))
	p := testPlacer(fakeAPI(t, pod, off, hometest.Node("node-2", "a"), kept, older))
	p.looksAt(t, pod)
	if err := p.client.Delete(t.Context(), kept); err != nil {
		t.Fatal(err)
	}
	p.memory.releases().OnDelete(kept)
	p.notes()
	for range 3 {
		p.time = p.time.Add(home.Publishing + time.Second)
		if is := p.looksAt(t, pod); !home.Gated(is) {
			t.Fatalf("it is placed on %v", nodesOfPod(is))
		}
	}
	off.Status.Conditions[0].Status = corev1.ConditionTrue
	off.Status.Conditions[0].LastTransitionTime = metav1.NewTime(p.time)
	if err := p.client.Status().Update(t.Context(), off); err != nil {
		t.Fatal(err)
	}
	if is := p.looksAt(t, pod); !slices.Equal(nodesOfPod(is), []string{"node-1"}) {
		t.Errorf("it goes to %v when its home is back", nodesOfPod(is))
	}
}

func TestAPodThatWaitedIsToldThatItsHomeIsLost(t *testing.T) {
	for name, older := range map[string]bool{"and no other is left": false, "and an older one is left": true} {
		t.Run(name, func(t *testing.T) {
			pod := hometest.Pod(ownedBySet)
			kept := keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)
			objects := []client.Object{pod, kept, hometest.Node("node-1", "a", hometest.Cordoned), hometest.Node("node-2", "a")}
			if older {
				objects = append(objects, keptOn("node-2", stayputv1alpha1.PhaseRetained, hometest.Noon.Add(-time.Hour)))
			}
			p := testPlacer(fakeAPI(t, objects...))
			if is := p.looksAt(t, pod); !home.Gated(is) || len(p.notes()) == 0 {
				t.Fatal("it does not wait")
			}
			kept.Spec.Release = stayputv1alpha1.ReleaseNow
			if err := p.client.Update(t.Context(), kept); err != nil {
				t.Fatal(err)
			}
			is := p.looksAt(t, pod)
			want := map[bool]string{false: "anywhere", true: "to node node-2"}[older]
			notes := p.notes()
			if home.Gated(is) || len(notes) != 2 || !strings.HasPrefix(notes[0], "Warning "+home.ReasonHomeGivenUp+" ") ||
				!strings.Contains(notes[0], "node node-1, for which it waited, is no longer its home: the pod goes "+want) {
				t.Errorf("said %q of %+v", notes, is.Spec)
			}
		})
	}
}

// Its version counts the writes, as the fake makes versions.
func TestAPodIsPlacedByOneWriteIfItIsStillTheSame(t *testing.T) {
	pod := hometest.Pod(ownedBySet)
	p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
		keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
	version := func(pod *corev1.Pod) int {
		n, err := strconv.Atoi(pod.ResourceVersion)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	was := &corev1.Pod{}
	if err := p.client.Get(t.Context(), client.ObjectKeyFromObject(pod), was); err != nil {
		t.Fatal(err)
	}
	is := was.DeepCopy()
	is.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{}}
	if err := p.client.Update(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	home1 := home.Decision{Outcome: home.OutcomeHome, Home: "node node-1", Affinity: home.Affinity{Node: "node-1"}}
	if err := gate.Place(t.Context(), p.client, was, placement(nil, home1)); !apierrors.IsConflict(err) {
		t.Errorf("the decision on what it was is written: %v", err)
	}
	placed := p.looksAt(t, pod)
	if home.Gated(placed) || !home.Pinned(placed) || placed.Spec.Affinity.PodAntiAffinity == nil {
		t.Errorf("placed by %+v", placed.Spec)
	}
	if n := version(placed) - version(is); n != 1 {
		t.Errorf("%d writes", n)
	}
}

// By the label the admission policy finds the copies of a pod in a backup, also one whose template has the gate.
func TestWhatIsPinnedHasTheLabel(t *testing.T) {
	for _, value := range []string{"", "yes"} {
		pod := hometest.Pod(ownedBySet)
		pod.Labels = map[string]string{"app": "web"}
		want := map[string]string{"app": "web", gate.ManagedLabel: gate.Managed}
		if value != "" {
			pod.Labels[gate.ManagedLabel], want[gate.ManagedLabel] = value, value
		}
		p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"),
			keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
		if placed := p.looksAt(t, pod); !home.Pinned(placed) || !maps.Equal(placed.Labels, want) {
			t.Errorf("placed by %+v with %v, want %v", placed.Spec, placed.Labels, want)
		}
	}
}

func TestWhatIsRecordedOfAPredecessorIsFilteredWhoeverWroteIt(t *testing.T) {
	record := &home.Record{State: kruisev1alpha1.PodState{Annotations: map[string]string{
		"kept": "so", stayputv1alpha1.AnnotationAddresses: "victim's", stayputv1alpha1.AnnotationPinned: "node node-9",
		"ipam.spidernet.io/ippool": "x", stayputv1alpha1.AnnotationReservedIPDuration: "1",
		"cni.projectcalico.org/podIP": "x",
	}}}
	to := placement(record, home.Decision{Home: "node node-1", Affinity: home.Affinity{Node: "node-1"}})
	if !maps.Equal(to.Recorded, map[string]string{"kept": "so"}) ||
		to.Pinned != "node node-1" || len(to.Annotations) > 0 {
		t.Errorf("it is given %q and %v, and of its predecessor %v", to.Pinned, to.Annotations, to.Recorded)
	}
}

func TestAPodGoesWithoutRecordedAnnotationsThatAreRefused(t *testing.T) {
	for name, refusal := range map[string]error{
		"invalid": apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "web-0", field.ErrorList{
			field.Forbidden(field.NewPath("metadata", "annotations"), "kubernetes.io/config.mirror")}),
		"by another webhook": apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "web-0", errors.New("no")),
		"as too large":       apierrors.NewRequestEntityTooLargeError("no"),
		"in conflict":        apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, "web-0", errors.New("changed")),
		"while it is away":   apierrors.NewTimeoutError("no", 1),
	} {
		t.Run(name, func(t *testing.T) {
			pod := hometest.Pod()
			var api client.Client = fakeAPI(t, pod)
			writes := 0
			p := testPlacer(interceptor.NewClient(api.(client.WithWatch), interceptor.Funcs{Patch: func(ctx context.Context,
				c client.WithWatch, o client.Object, patch client.Patch, options ...client.PatchOption) error {
				writes++
				if text, err := patch.Data(o); err != nil || strings.Contains(string(text), "kept") {
					return errors.Join(refusal, err)
				}
				return c.Patch(ctx, o, patch, options...)
			}}))
			record := &home.Record{Object: types.NamespacedName{Namespace: "default", Name: "by-hand"},
				State: kruisev1alpha1.PodState{Annotations: map[string]string{"kept": "so"}}}
			d := home.Decision{Home: "node node-1", Affinity: home.Affinity{Node: "node-1"}}
			if err := p.client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
				t.Fatal(err)
			}
			err := p.place(t.Context(), pod, home.Situation{Record: record}, d, nil)
			final := name != "in conflict" && name != "while it is away"
			if (err == nil) != final || (writes == 2) != final {
				t.Fatalf("%d writes, %v", writes, err)
			}
			is := &corev1.Pod{}
			if err := p.client.Get(t.Context(), client.ObjectKeyFromObject(pod), is); err != nil {
				t.Fatal(err)
			}
			notes := p.notes()
			if home.Gated(is) == final || final != slices.ContainsFunc(notes, func(note string) bool {
				return strings.HasPrefix(note, "Warning "+home.ReasonNotPassedOn) &&
					strings.Contains(note, "PersistentPodState by-hand") && strings.Contains(note, refusal.Error())
			}) {
				t.Errorf("gated %t, said %q", home.Gated(is), notes)
			}
		})
	}
}

func TestAPodThatWaitedForANodeThatIsLostIsKeptOffItUntilThereIsNoOther(t *testing.T) {
	pod := hometest.Pod()
	ownedBySet(pod)
	node := hometest.Node("node-1", "a", hometest.Cordoned)
	api := fakeAPI(t, pod, node, hometest.Node("node-2", "a"), keptOn("node-1", stayputv1alpha1.PhaseBound, hometest.Noon))
	p := testPlacer(api)
	if is := p.looksAt(t, pod); !home.Gated(is) {
		t.Fatal("it does not wait")
	}
	if err := api.Delete(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	is := p.looksAt(t, pod)
	if home.Gated(is) || !slices.Equal(nodesOfPod(is), []string{"node-1"}) ||
		is.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].
			Operator != corev1.NodeSelectorOpNotIn {
		t.Fatalf("placed by %+v", is.Spec)
	}

	// It came back under its name, and is the only one with room.
	p.refuse(t, is)
	if p.looksAt(t, is) == nil {
		t.Fatal("it is gone at once")
	}
	p.time = p.time.Add(home.DefaultWait)
	if is := p.looksAt(t, is); is != nil {
		t.Errorf("it can start nowhere, and stays: %q", p.notes())
	}
}

func TestAPodThatPrefersItsHomeIsNominatedAndNotPinned(t *testing.T) {
	for name, allowed := range map[string]bool{"if the controller may": true, "if it may not": false} {
		t.Run(name, func(t *testing.T) {
			pod := hometest.Pod(ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationHome, stayputv1alpha1.HomePreferred))
			p := testPlacer(fakeAPI(t, pod, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"),
				keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)))
			p.nominates = allowed
			is := p.looksAt(t, pod)
			if home.Gated(is) || home.Pinned(is) || len(nodesOfPod(is)) > 0 ||
				(is.Status.NominatedNodeName == "node-1") != allowed {
				t.Errorf("placed by %+v, nominated for %q", is.Spec, is.Status.NominatedNodeName)
			}
			// An autoscaler that simulates its move finds another node that would take it.
			if ok, err := nodeaffinity.GetRequiredNodeAffinity(is).Match(hometest.Node("node-2", "a")); !ok || err != nil {
				t.Errorf("it could not be moved: %v", err)
			}
			p.refuse(t, is)
			p.time = p.time.Add(time.Hour)
			if p.looksAt(t, pod) == nil {
				t.Error("it is deleted for lack of room")
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

func TestANodeAttractsNoPodByItsWordAlone(t *testing.T) {
	front := hometest.Annotation(stayputv1alpha1.AnnotationIdentity, "front")
	ofNode := func(p *corev1.Pod) { p.OwnerReferences = controlledBy("v1", "Node", "node-1") }
	type retained = *stayputv1alpha1.RetainedIP
	says := func(scheduled string) retained {
		r := keptOn("node-1", stayputv1alpha1.PhaseRetained, hometest.Noon)
		r.Spec.Scheduled = scheduled
		return r
	}
	sharedSays := func(scheduled string) retained {
		r := says(scheduled)
		r.Spec.Identity = "front"
		return r
	}
	endedHere := hometest.Pod(hometest.RanOn("node-1"), front)
	onNode1, onNode3 := hometest.Pod(hometest.RanOn("node-1")), hometest.Pod(hometest.RanOn("node-3"))
	mirror := hometest.Pod(hometest.RanOn("node-1"), ofNode)
	for name, c := range map[string]struct {
		kept    retained
		ended   *corev1.Pod
		deleted retained
		pod     *corev1.Pod
		comes   bool
	}{
		"the controller saw it there":             {says("pod/web-0"), nil, nil, hometest.Pod(), true},
		"nobody saw it there":                     {says(""), nil, nil, hometest.Pod(), false},
		"another pod was there":                   {says("pod/web-1"), nil, nil, hometest.Pod(), false},
		"it ended there":                          {says(""), onNode1, nil, hometest.Pod(), true},
		"it ended elsewhere":                      {says(""), onNode3, nil, hometest.Pod(), false},
		"a static pod ended":                      {says(""), mirror, nil, hometest.Pod(), false},
		"a static pod ended, and nothing is kept": {nil, mirror, nil, hometest.Pod(), false},
		"what said so was deleted":                {says(""), nil, says("pod/web-0"), hometest.Pod(), true},
		"what said so was deleted just now":       {nil, nil, says("pod/web-0"), hometest.Pod(), true},
		"it was deleted, and nobody saw it":       {nil, nil, says(""), hometest.Pod(), false},
		"an identity that was seen there":         {sharedSays("identity/front"), nil, nil, hometest.Pod(front), true},
		"an identity that was not":                {sharedSays(""), nil, nil, hometest.Pod(front), false},
		"the pod was, without its identity":       {sharedSays("pod/web-0"), nil, nil, hometest.Pod(front), false},
		"its identity ended there":                {sharedSays(""), endedHere, nil, hometest.Pod(front), true},
		"the identity's was seen and deleted": {sharedSays(""), nil, sharedSays("identity/front"),
			hometest.Pod(front), true},
		"the identity, but not the pod itself": {says("identity/web-0"), nil, nil, hometest.Pod(), false},
	} {
		t.Run(name, func(t *testing.T) {
			objects := []client.Object{c.pod, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"),
				hometest.Node("node-3", "a")}
			if c.kept != nil {
				objects = append(objects, c.kept)
			}
			p := testPlacer(fakeAPI(t, objects...))
			if c.ended != nil {
				p.memory.deleted(c.ended)
			}
			if c.deleted != nil {
				p.memory.releases().OnDelete(c.deleted)
			}
			if c.kept != nil {
				p.memory.releases().OnAdd(c.kept, false)
			}
			if is := p.looksAt(t, c.pod); slices.Contains(nodesOfPod(is), "node-1") != c.comes {
				t.Errorf("it goes to %v", nodesOfPod(is))
			}
		})
	}
}

func TestTheCacheKeepsThatAPodIsPinned(t *testing.T) {
	owned := func(fields string) func(*corev1.Pod) {
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
			owned(`{"f:metadata":{"f:annotations":{"f:stayput.io/home-wait":{}}}}`)), false},
		"by a release that applied": {hometest.Pod(hometest.Pinned,
			func(p *corev1.Pod) { p.ManagedFields[0].Operation = metav1.ManagedFieldsOperationApply }), true},
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

// A zone may have thousands of nodes: a pod that waits for any of them must not look at all whenever one changes.
func TestAPodThatWaitsForAZoneIsWokenOnlyByANodeThatMakesADifference(t *testing.T) {
	cordoned := func(n *corev1.Node) { n.Spec.Unschedulable = true }
	changed := func(n *corev1.Node) { n.Labels["changed"] = "yes" }
	pod := hometest.Pod()
	p := testPlacer(fakeAPI(t, pod))
	p.memory.waits(pod, "nodes with zone a", corev1.LabelTopologyZone+"=a", "is cordoned")
	for name, c := range map[string]struct {
		was, is *corev1.Node
		woken   bool
	}{
		"it is cordoned still":  {hometest.Node("n", "a", cordoned), hometest.Node("n", "a", cordoned, changed), false},
		"it is uncordoned":      {hometest.Node("n", "a", cordoned), hometest.Node("n", "a"), true},
		"it comes, cordoned":    {nil, hometest.Node("n", "a", cordoned), false},
		"it comes":              {nil, hometest.Node("n", "a"), true},
		"it goes, perhaps last": {hometest.Node("n", "a", cordoned), nil, true},
		"it leaves the zone":    {hometest.Node("n", "a", cordoned), hometest.Node("n", "b"), true},
		"it enters, cordoned":   {hometest.Node("n", "b"), hometest.Node("n", "a", cordoned), false},
		"it is in another":      {hometest.Node("n", "b", cordoned), hometest.Node("n", "b"), false},
		"another goes":          {hometest.Node("n", "b"), nil, false},
	} {
		if woken := len(p.waitEnded(t.Context(), c.was, c.is)) > 0; woken != c.woken {
			t.Errorf("%s: woken %v", name, woken)
		}
	}
	p.memory.waits(pod, "node n", "n", "is cordoned")
	node := hometest.Node("n", "a", cordoned)
	if all := p.waitEnded(t.Context(), node, node); len(all) != 1 {
		t.Errorf("its own node wakes %v", all)
	}
}

// podsIndexed stands for the controller's cache, which has an index of pods.
type podsIndexed struct {
	client.Reader
	pods    []*corev1.Pod
	extract client.IndexerFunc
}

func (c *podsIndexed) IndexField(_ context.Context, _ client.Object, _ string, extract client.IndexerFunc) error {
	c.extract = extract
	return nil
}

func (c *podsIndexed) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	by := client.ListOptions{}
	by.ApplyOptions(options)
	if pods, ok := list.(*cluster.PodList); ok && by.FieldSelector.String() == podsUndecided+"=true" {
		for _, pod := range c.pods {
			if is := cluster.PodOf(pod); len(c.extract(is)) > 0 {
				pods.Items = append(pods.Items, *is)
			}
		}
	}
	return nil
}

func TestPodsThatWaitAtTheStartAreFoundAtOnce(t *testing.T) {
	named := func(name string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Name = name } }
	cache := &podsIndexed{pods: []*corev1.Pod{
		hometest.Pod(named("runs"), hometest.Ungated, hometest.RanOn("node-1")),
		hometest.Pod(named("gated")),
		hometest.Pod(named("goes-anywhere"), hometest.Ungated),
		hometest.Pod(named("pinned"), hometest.Pinned),
	}}
	if err := indexUndecided(t.Context(), cache); err != nil {
		t.Fatal(err)
	}
	p := &placer{cache: cache}
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer queue.ShutDown()
	if err := p.enqueueUndecided(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	var found []string
	for range queue.Len() {
		request, _ := queue.Get()
		found = append(found, request.Name)
	}
	if !slices.Equal(found, []string{"gated", "pinned"}) {
		t.Errorf("found %q", found)
	}
}
