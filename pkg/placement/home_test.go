package placement

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// fakeNodes are the nodes of a test.
type fakeNodes []*corev1.Node

func (f fakeNodes) node(name string) *corev1.Node {
	for _, n := range f {
		if n.Name == name {
			return n
		}
	}
	return nil
}

func (f fakeNodes) labelled(want map[string]string) (all []*corev1.Node) {
	for _, n := range f {
		if has(n, want) {
			all = append(all, n)
		}
	}
	return all
}

func testNode(name, zone string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelTopologyZone: zone}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	for _, c := range change {
		c(n)
	}
	return n
}

func cordoned(n *corev1.Node) {
	n.Spec.Unschedulable = true
	n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
}

func notReady(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }

func tainted(n *corev1.Node) {
	n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: "dedicated", Value: "batch", Effect: corev1.TaintEffectNoSchedule})
}

// gatedPod was created ten seconds before noon.
func gatedPod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web-0", UID: "new", CreationTimestamp: metav1.NewTime(noon.Add(-10 * time.Second)),
			Annotations: map[string]string{stayputv1alpha1.AnnotationRetainIP: "10m"},
		},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func annotation(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations[key] = value }
}

// drawnHome makes of a pod one that was drawn to node-1 when it was created and that the scheduler has no place for.
func drawnHome(p *corev1.Pod) {
	p.Spec.SchedulingGates = nil
	p.Annotations[stayputv1alpha1.AnnotationHome] = "node node-1"
	p.Spec.Affinity = &corev1.Affinity{NodeAffinity: pull{node: "node-1"}.merge(nil)}
	at := p.CreationTimestamp
	p.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: stayputv1alpha1.ControllerFieldManager, Operation: metav1.ManagedFieldsOperationApply, Time: &at,
		FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:stayput.io/home":{}}},"f:spec":{"f:affinity":{"f:nodeAffinity":{"f:requiredDuringSchedulingIgnoredDuringExecution":{}}}}}`)}}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
}

// copied makes of a drawn pod one of a template that was copied from it, with all that it says.
func copied(p *corev1.Pod) { p.ManagedFields[0].Manager = "kube-controller-manager" }

func recordWith(required, preferred []string) *record {
	r := &record{
		object: types.NamespacedName{Namespace: "default", Name: "web"},
		state: kruisev1alpha1.PodState{
			NodeName:           "node-1",
			NodeTopologyLabels: map[string]string{corev1.LabelHostname: "node-1", corev1.LabelTopologyZone: "a"},
		},
	}
	if required != nil {
		r.spec.RequiredPersistentTopology = &kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: required}
	}
	for _, key := range preferred {
		r.spec.PreferredPersistentTopology = append(r.spec.PreferredPersistentTopology,
			kruisev1alpha1.PreferredTopologyTerm{Weight: 7, Preference: kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{key}}})
	}
	return r
}

func TestWhereAPodGoes(t *testing.T) {
	healthy := fakeNodes{testNode("node-1", "a"), testNode("node-2", "a"), testNode("node-3", "b")}
	with := func(change ...func(*corev1.Node)) fakeNodes {
		return fakeNodes{testNode("node-1", "a", change...), testNode("node-2", "a"), testNode("node-3", "b")}
	}
	for _, c := range []struct {
		name      string
		s         situation
		outcome   outcome
		node      string
		required  []string
		preferred int
		retry     time.Duration
		says      string
	}{
		{name: "a pod without a home goes anywhere", s: situation{nodes: healthy}, outcome: outcomeFree},
		{name: "a healthy home takes its pod", s: situation{nodes: healthy, home: "node-1"}, outcome: outcomeHome, node: "node-1"},
		{name: "a cordoned home is waited for", s: situation{nodes: with(cordoned), home: "node-1"}, outcome: outcomeWait, retry: 50 * time.Second, says: "is cordoned"},
		{name: "a tolerated cordon is no reason to wait", s: situation{nodes: with(cordoned), home: "node-1", pod: gatedPod(func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists}}
		})}, outcome: outcomeHome, node: "node-1"},
		{name: "a home that is not Ready is waited for", s: situation{nodes: with(notReady), home: "node-1"}, outcome: outcomeWait, retry: 50 * time.Second, says: "is not Ready"},
		{name: "a tainted home is waited for", s: situation{nodes: with(tainted), home: "node-1"}, outcome: outcomeWait, retry: 50 * time.Second, says: "dedicated=batch:NoSchedule"},
		{name: "a wait ends", s: situation{nodes: with(cordoned), home: "node-1", now: noon.Add(50 * time.Second)}, outcome: outcomeElsewhere, says: "is cordoned"},
		{name: "a wait does not end early", s: situation{nodes: with(cordoned), home: "node-1", now: noon.Add(50*time.Second - 1)}, outcome: outcomeWait, retry: 1},
		{name: "home-wait of the template", s: situation{nodes: with(cordoned), home: "node-1", pod: gatedPod(annotation(stayputv1alpha1.AnnotationHomeWait, "5m"))}, outcome: outcomeWait, retry: 290 * time.Second},
		{name: "home-wait of zero does not wait", s: situation{nodes: with(cordoned), home: "node-1", pod: gatedPod(annotation(stayputv1alpha1.AnnotationHomeWait, "0s"))}, outcome: outcomeElsewhere},
		{name: "home-wait as long as the address is kept", s: situation{nodes: with(cordoned), home: "node-1", kept: noon.Add(time.Hour),
			pod: gatedPod(annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: outcomeWait, retry: time.Hour},
		{name: "home-wait as long as an address without an end", s: situation{nodes: with(cordoned), home: "node-1",
			pod: gatedPod(annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: outcomeWait},
		{name: "a home-wait that cannot be read is the default, and said", s: situation{nodes: with(cordoned), home: "node-1",
			pod: gatedPod(annotation(stayputv1alpha1.AnnotationHomeWait, "soon"))}, outcome: outcomeWait, retry: 50 * time.Second, says: `"soon" is not valid: expected a duration`},
		{name: "a guess is waited for until it is known", s: situation{nodes: with(cordoned), home: "node-1", guess: noon.Add(7 * time.Second),
			pod: gatedPod(annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: outcomeWait, retry: 7 * time.Second},
		{name: "a deleted home is not waited for", s: situation{nodes: healthy[1:], home: "node-1"}, outcome: outcomeElsewhere, says: "is gone"},
		{name: "a home that the pod's own selector excludes is reported, not enforced", s: situation{nodes: healthy, home: "node-1", pod: gatedPod(func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "node-2"}
		})}, outcome: outcomeElsewhere, says: "node selector"},
		{name: "a pod whose predecessor waited in vain goes free", s: situation{nodes: healthy, home: "node-1", givenUp: true}, outcome: outcomeElsewhere, says: "no room"},

		{name: "what is preferred holds nobody up", s: situation{nodes: with(cordoned), record: recordWith(nil, []string{corev1.LabelHostname})}, outcome: outcomeHome, preferred: 1},
		{name: "a required host", s: situation{nodes: healthy, record: recordWith([]string{corev1.LabelHostname}, nil)}, outcome: outcomeHome, required: []string{"kubernetes.io/hostname=node-1"}},
		{name: "a required host that is cordoned", s: situation{nodes: with(cordoned), record: recordWith([]string{corev1.LabelHostname}, nil)}, outcome: outcomeWait, retry: 50 * time.Second, says: "is cordoned"},
		{name: "a required host that is gone", s: situation{nodes: healthy[1:], record: recordWith([]string{corev1.LabelHostname}, []string{corev1.LabelTopologyZone})}, outcome: outcomeElsewhere, preferred: 1, says: "are gone"},
		{name: "a required zone takes another node of it", s: situation{nodes: with(cordoned), record: recordWith([]string{corev1.LabelTopologyZone}, nil)}, outcome: outcomeHome, required: []string{"topology.kubernetes.io/zone=a"}},
		{name: "a label that the node did not have draws nowhere", s: situation{nodes: healthy, record: recordWith([]string{"rack"}, []string{"rack"})}, outcome: outcomeFree},
		{name: "address and record together", s: situation{nodes: healthy, home: "node-1", record: recordWith([]string{corev1.LabelTopologyZone}, []string{corev1.LabelHostname})},
			outcome: outcomeHome, node: "node-1", required: []string{"topology.kubernetes.io/zone=a"}, preferred: 1},
		{name: "the address wins over a record of another place", s: situation{nodes: healthy, home: "node-3", record: recordWith([]string{corev1.LabelTopologyZone}, nil)},
			outcome: outcomeHome, node: "node-3", says: "the IP's node is taken"},

		{name: "an ungated pod is not ours until the scheduler has spoken", s: situation{nodes: healthy, home: "node-1", pod: gatedPod(drawnHome, func(p *corev1.Pod) { p.Status.Conditions = nil }), now: noon.Add(time.Hour)}, outcome: outcomeFree},
		{name: "a full home is waited for", s: situation{nodes: healthy, home: "node-1", pod: gatedPod(drawnHome)}, outcome: outcomeWait, retry: 50 * time.Second, says: "no room"},
		{name: "a home that stays full is given up", s: situation{nodes: healthy, home: "node-1", pod: gatedPod(drawnHome), now: noon.Add(50 * time.Second)}, outcome: outcomeEvict, says: "no room"},
		{name: "the wait for room begins when the pod is drawn, such as after an outage", s: situation{nodes: healthy, home: "node-1", pod: gatedPod(drawnHome, func(p *corev1.Pod) {
			p.CreationTimestamp = metav1.NewTime(noon.Add(-time.Hour))
		}), now: noon.Add(49 * time.Second)}, outcome: outcomeWait, retry: time.Second, says: "no room"},
		{name: "the wait for room as long as the address is kept", s: situation{nodes: healthy, home: "node-1", kept: noon.Add(time.Hour),
			pod: gatedPod(drawnHome, annotation(stayputv1alpha1.AnnotationHomeWait, "retention"))}, outcome: outcomeWait, retry: time.Hour},
		{name: "a pod that was not drawn is never evicted", s: situation{nodes: healthy, pod: gatedPod(drawnHome, func(p *corev1.Pod) { delete(p.Annotations, stayputv1alpha1.AnnotationHome) }), now: noon.Add(time.Hour)}, outcome: outcomeFree},
		{name: "nor one whose template was copied from a pod that was", s: situation{nodes: healthy, pod: gatedPod(drawnHome, copied), now: noon.Add(time.Hour)}, outcome: outcomeFree},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.s.now.IsZero() {
				c.s.now = noon
			}
			if c.s.pod == nil {
				c.s.pod = gatedPod()
			}
			d := decide(c.s)
			var required []string
			for _, r := range d.pull.required {
				required = append(required, r.Key+"="+strings.Join(r.Values, ","))
			}
			if d.outcome != c.outcome || d.pull.node != c.node || !slices.Equal(required, c.required) || len(d.pull.preferred) != c.preferred || d.retry != c.retry {
				t.Errorf("decided %+v", d)
			}
			if said := d.reason + " " + strings.Join(d.notes, " "); !strings.Contains(said, c.says) {
				t.Errorf("said %q, not %q", said, c.says)
			}
		})
	}
}

func TestOfAPodTheCacheKeepsThatItWasDrawn(t *testing.T) {
	applied := func(fields string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.ManagedFields[0].FieldsV1 = metav1.NewFieldsV1(fields) }
	}
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		drawn bool
	}{
		"drawn":                    {gatedPod(drawnHome), true},
		"by a copied template":     {gatedPod(drawnHome, copied), false},
		"not drawn":                {gatedPod(), false},
		"something else is ours":   {gatedPod(drawnHome, applied(`{"f:metadata":{"f:annotations":{"f:stayput.io/home-wait":{}}}}`)), false},
		"only ungated, by a patch": {gatedPod(drawnHome, func(p *corev1.Pod) { p.ManagedFields[0].Operation = metav1.ManagedFieldsOperationUpdate }), false},
		"drawn and changed by many": {gatedPod(drawnHome, func(p *corev1.Pod) {
			p.ManagedFields = append(p.ManagedFields, metav1.ManagedFieldsEntry{Manager: "kubelet"})
		}), true},
	} {
		o, err := stripPod(c.pod)
		if err != nil {
			t.Fatal(err)
		}
		if undecided(o.(*corev1.Pod)) != (c.drawn || gated(c.pod)) || drawn(o.(*corev1.Pod)) != c.drawn || len(o.(*corev1.Pod).ManagedFields) > 1 {
			t.Errorf("%s: drawn %v, with %v", name, drawn(o.(*corev1.Pod)), o.(*corev1.Pod).ManagedFields)
		}
	}
}

func TestAPodOfThousandsComesHomeByTheLabelsOfItsNode(t *testing.T) {
	spec := kruisev1alpha1.PersistentPodStateSpec{
		RequiredPersistentTopology:  &kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{zone, "absent"}},
		PreferredPersistentTopology: byHostname.PreferredPersistentTopology,
	}
	var pods []corev1.Pod
	for i := range tooManyPods {
		pods = append(pods, podOn("1", fmt.Sprintf("web-%d", i), "node-1", true))
	}
	nodes := fakeNodes{testNode("node-1", "a"), testNode("node-2", "b")}
	v := recordPods(&spec, web(tooManyPods), nil, pods, nodes)
	s := situation{now: noon, nodes: nodes, pod: gatedPod(), record: &record{spec: spec, state: v.states["web-7"]}}
	if len(s.record.state.NodeTopologyLabels) > 0 {
		t.Fatal("the labels are recorded: the test shows nothing")
	}

	d := decide(s)
	placed := d.pull.merge(nil)
	required := placed.RequiredDuringSchedulingIgnoredDuringExecution
	preferred := placed.PreferredDuringSchedulingIgnoredDuringExecution
	if d.outcome != outcomeHome || required == nil || len(required.NodeSelectorTerms) != 1 || len(preferred) != 1 ||
		!sameRequirements(required.NodeSelectorTerms[0].MatchExpressions, []corev1.NodeSelectorRequirement{in(zone, "a")}) ||
		!sameRequirements(preferred[0].Preference.MatchExpressions, []corev1.NodeSelectorRequirement{in(hostname, "node-1")}) {
		t.Errorf("decided %+v, by %+v", d, placed)
	}

	cordoned(nodes[0])
	if d := decide(s); d.outcome != outcomeWait || !strings.Contains(d.reason, "is cordoned") {
		t.Errorf("its node is cordoned: decided %+v", d)
	}
	s.nodes = nodes[1:]
	if d := decide(s); d.outcome != outcomeElsewhere || d.home != "node node-1" || d.reason != "is gone from the cluster" {
		t.Errorf("its node is gone: decided %+v", d)
	}
}

func TestTheHomeIsWhereThePodWasLast(t *testing.T) {
	at := func(node string, phase stayputv1alpha1.Phase, since time.Duration, expires string) *stayputv1alpha1.RetainedIP {
		when := metav1.NewTime(noon.Add(since))
		return &stayputv1alpha1.RetainedIP{
			Spec:   stayputv1alpha1.RetainedIPSpec{NodeName: node},
			Status: stayputv1alpha1.RetainedIPStatus{Phase: phase, Since: &when, Expires: expires},
		}
	}
	old := at("node-1", stayputv1alpha1.PhaseRetained, -time.Hour, "never")
	released := at("node-2", stayputv1alpha1.PhaseRetained, -time.Minute, "never")
	released.Spec.Release = true
	expired := at("node-3", stayputv1alpha1.PhaseRetained, -time.Minute, noon.Format(time.RFC3339))
	stale := at("node-4", stayputv1alpha1.PhaseBound, -time.Minute, "") // its agent is down: nobody says that the pod has ended
	// A node that lost its power came back, and noticed the end of the pod only then.
	back := at("node-5", stayputv1alpha1.PhaseRetained, -time.Second, "never")
	type kept = []*stayputv1alpha1.RetainedIP
	for _, c := range []struct {
		name  string
		kept  kept
		last  lastNode
		home  string
		guess bool
	}{
		{"nowhere", nil, lastNode{}, "", false},
		{"what is released or expired is no home", kept{old, released, expired}, lastNode{}, "node-1", false},
		{"unless it was seen, the newest, whatever its phase", kept{stale, old}, lastNode{}, "node-4", false},
		{"where it was seen, though another node says so later", kept{back, stale}, lastNode{node: "node-4", at: noon}, "node-4", false},
		{"where it was seen, however long ago", kept{back, stale}, lastNode{node: "node-4", at: noon.Add(-time.Hour)}, "node-4", false},
		{"where it was seen, though that is not published yet", kept{back}, lastNode{node: "node-4", at: noon, fresh: true}, "node-4", true},
		{"where it was seen, if nobody keeps anything", nil, lastNode{node: "node-4", at: noon}, "node-4", true},
		{"not where it was seen for so long that what is kept there would be published", kept{back}, lastNode{node: "node-4", at: noon}, "node-5", false},
		{"not where it was seen if nothing of it was published in time", kept{back}, lastNode{node: "node-4", at: noon.Add(-publishing), fresh: true}, "node-5", false},
		{"not where it was seen if that was released", kept{released, back}, lastNode{node: "node-2", at: noon, fresh: true}, "node-5", false},
		{"nor if that has expired, and nobody else keeps anything", kept{expired}, lastNode{node: "node-3", at: noon, fresh: true}, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := situation{now: noon, pod: gatedPod()}
			s.homeOf(c.kept, c.last)
			if s.home != c.home || s.guess.IsZero() == c.guess {
				t.Errorf("home %q, a guess until %v, not %q", s.home, s.guess, c.home)
			}
		})
	}

	running := gatedPod(ranOn("node-4"))
	if p := Foresee(noon, running, kept{back, stale}, nil, []corev1.Node{*testNode("node-4", "a"), *testNode("node-5", "a")}); p.Node != "node-4" {
		t.Errorf("foreseen for a pod that runs on node-4: %+v", p)
	}
}

func TestAPodCanCountOnItsAddressFromItsCreationIfItsNodeIsSilent(t *testing.T) {
	silent := &stayputv1alpha1.RetainedIP{
		Spec:   stayputv1alpha1.RetainedIPSpec{Retention: "10m"},
		Status: stayputv1alpha1.RetainedIPStatus{Phase: stayputv1alpha1.PhaseBound},
	}
	if until := keptFor(silent, gatedPod()); !until.Equal(noon.Add(10*time.Minute - 10*time.Second)) {
		t.Errorf("until %s", until)
	}
	silent.Spec.Retention = stayputv1alpha1.RetentionWhileOwned
	if until := keptFor(silent, gatedPod()); !until.IsZero() {
		t.Errorf("while owned until %s", until)
	}
	silent.Status.Phase, silent.Status.Expires = stayputv1alpha1.PhaseRetained, noon.Format(time.RFC3339)
	if until := keptFor(silent, gatedPod()); !until.Equal(noon) {
		t.Errorf("retained until %s", until)
	}
}
