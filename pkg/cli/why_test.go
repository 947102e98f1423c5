package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/inspection"
	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

func aNode(name string, change ...func(*corev1.Node)) corev1.Node {
	n := corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name}},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, f := range change {
		f(&n)
	}
	return n
}

// someFacts are of web-2, which runs on node-1 and is promised 10.1.0.9 there.
func someFacts(change ...func(*facts)) *facts {
	annotations := map[string]string{stayputv1alpha1.AnnotationRetainIP: "10m"}
	f := &facts{
		now: noon, namespace: "default", name: "web-2",
		pod: &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: "web-2", UID: "p", Annotations: annotations,
				CreationTimestamp: metav1.NewTime(noon.Add(-3 * time.Hour)),
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "w",
					Controller: new(true)}},
			},
			Spec:   corev1.PodSpec{NodeName: "node-1"},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.1.0.9", PodIPs: []corev1.PodIP{{IP: "10.1.0.9"}}},
		},
		workload: aSet(map[string]any{"replicas": int64(3)}),
		template: &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}},
		kept:     []*keptIP{keptOf(aRetainedIP(isBound))},
		nodes:    []corev1.Node{aNode("node-1"), aNode("node-2")},
		looks: map[string]*inspection.Node{"node-1": {Networks: []inspection.Network{{
			Name: "pods",
			RangeSets: []inspection.RangeSet{{Ranges: []inspection.Range{rangeOf("10.1.0.0/27", "10.1.0.1", "10.1.0.20",
				"10.1.0.1")}, Size: 19, PromiseLimit: 9}},
			Addresses: []inspection.Address{{IP: addr("10.1.0.9"), State: inspection.Bound, ContainerID: "0123456789abcdef",
				Promise: &inspection.Promise{Identity: "pod:default/web-2"}}},
		}}}},
		lookErrors: map[string]error{},
	}
	f.workloads = workloads{"w": f.workload}
	for _, c := range change {
		c(f)
	}
	return f
}

func homeCordoned(f *facts) { f.nodes[0].Spec.Unschedulable = true }
func homeGone(f *facts)     { f.nodes = f.nodes[1:] }
func gone(f *facts) {
	f.pod = nil
	f.kept = []*keptIP{keptOf(aRetainedIP())}
}
func scaledDown(f *facts) {
	f.workload = aSet(map[string]any{"replicas": int64(1)})
	f.workloads = workloads{"w": f.workload}
}
func gatedSince(d time.Duration) func(*facts) {
	return func(f *facts) {
		f.pod.Spec.NodeName, f.pod.Status = "", corev1.PodStatus{Phase: corev1.PodPending}
		f.pod.CreationTimestamp = metav1.NewTime(noon.Add(-d))
		f.pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}
		f.kept = []*keptIP{keptOf(aRetainedIP())}
	}
}
func notAsked(f *facts) {
	f.pod.Annotations, f.template.Annotations, f.kept = nil, nil, nil
	f.looks["node-1"].Networks[0].Addresses[0].Promise = nil
}
func notPromised(f *facts) {
	f.kept = nil
	f.looks["node-1"].Networks[0].Addresses[0].Promise = nil
}
func byKind(kind string) func(*facts) {
	return func(f *facts) { f.workload.SetKind(kind) }
}
func recordedOn(node string) func(*facts) {
	return func(f *facts) {
		f.state = &kruisev1alpha1.PersistentPodState{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: kruisev1alpha1.PersistentPodStateSpec{PreferredPersistentTopology: []kruisev1alpha1.PreferredTopologyTerm{
				{Weight: 100, Preference: kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{"kubernetes.io/hostname"}}}}},
			Status: kruisev1alpha1.PersistentPodStateStatus{PodStates: map[string]kruisev1alpha1.PodState{
				"web-2": {NodeName: node, NodeTopologyLabels: map[string]string{"kubernetes.io/hostname": node}}}},
		}
	}
}

const theStory = `Pod default/web-2
  running on node node-1 for 3h, with 10.1.0.9, of StatefulSet web

What it requests
  stayput.io/retain-ip: 10m - its address is kept for 10m after the pod stops

What is promised
  10.1.0.9 on node node-1 is promised to it: kept 10m after the pod stops.
  RetainedIP web-2.node-1: Bound, 10.1.0.9
  ledger of node node-1: 10.1.0.9 is bound to sandbox 0123456789ab, promised to
    pod:default/web-2

If it is deleted now
  Node: node-1, and no other node as long as it can take the pod.
  IP: 10.1.0.9, kept for 10m after the pod stops.
  If its home is down, cordoned, tainted or full by then, or its kubelet rejects
    it, the new pod waits 60s for it (stayput.io/home-wait), then goes
    elsewhere with another IP.
`

func TestAStoryIsToldInWords(t *testing.T) {
	var b strings.Builder
	if err := someFacts().story().write(&b, noon); err != nil {
		t.Fatal(err)
	}
	if b.String() != theStory {
		t.Errorf("told is\n%s", b.String())
	}
}

func TestTheForecastFollowsFromTheFacts(t *testing.T) {
	for name, test := range map[string]struct {
		facts   *facts
		title   string
		outcome string
		node    string
		says    []string
	}{
		"a running pod": {someFacts(), "If it is deleted now", "home", "node-1", []string{
			"IP: 10.1.0.9, kept for 10m",
		}},
		"its home is cordoned": {someFacts(homeCordoned), "If it is deleted now", "wait", "node-1",
			[]string{"is cordoned: the new pod waits for it, gated, at most 60s", "10.1.0.9 if its home is back"}},
		"its home is gone": {someFacts(homeGone), "If it is deleted now", "elsewhere", "", []string{
			"no longer exists", "IP: another one",
		}},
		"it is gone": {someFacts(gone), "If it is created now", "home", "node-1", []string{
			"IP: 10.1.0.9, kept until 2026-01-02T12:05:00Z",
		}},
		"it is gone and not wanted": {someFacts(gone, scaledDown), "If it is created now", "none", "", []string{
			"does not want a pod with this ordinal", "stays kept until 2026-01-02T12:05:00Z (5m)",
		}},
		"it waits for a cordoned home": {someFacts(gatedSince(20*time.Second), homeCordoned), "As things are now",
			"wait", "node-1", []string{"the pod waits for it, gated, at most 40s"}},
		"it has waited long enough": {someFacts(gatedSince(2*time.Minute), homeCordoned), "As things are now",
			"elsewhere", "", []string{"is cordoned"}},
		"nothing is asked for": {someFacts(notAsked), "If it is deleted now", "free", "", []string{
			"Node: any.", "any free address",
		}},
		"only a record, which is preferred": {someFacts(notAsked, recordedOn("node-2")), "If it is deleted now", "home",
			"", []string{"Node: preferably node-2", "None is kept for it"}},
		"of a ReplicaSet without an identity": {someFacts(byKind("ReplicaSet")), "If it is deleted now", "none", "",
			[]string{"creates a pod with another name"}},
		"without a controller": {someFacts(
			func(f *facts) { f.workload, f.template, f.pod.OwnerReferences = nil, nil, nil }), "If it is deleted now", "none",
			"", []string{"it has no controller", "a pod of this name created within that time gets it"}},
		"the nodes cannot be listed": {someFacts(func(f *facts) { f.nodes = nil }), "If it is deleted now",
			"unknown", "", []string{"cannot be listed"}},
		"its address is outside the ranges now": {someFacts(
			func(f *facts) { f.looks["node-1"].Networks[0].RangeSets[0].Ranges[0].End = addr("10.1.0.5") }),
			"If it is deleted now", "home", "node-1", []string{"IP: another one. 10.1.0.9 is outside the current ranges"}},
		"no controller leads": {someFacts(func(f *facts) { f.lease = &coordinationv1.Lease{} }),
			"If it is deleted now", "home", "node-1", []string{"Before that it waits: no controller is the leader"}},
		"the template asks for nothing now": {someFacts(func(f *facts) { f.template = &corev1.PodTemplateSpec{} }),
			"If it is deleted now", "free", "", []string{"The pod template has changed since"}},
	} {
		fc := test.facts.story().IfDeleted
		if fc.Title != test.title || fc.Outcome != test.outcome || fc.Node != test.node {
			t.Errorf("%s: %+v", name, fc)
		}
		for _, want := range test.says {
			if !strings.Contains(strings.Join(fc.Lines, "\n"), want) {
				t.Errorf("%s: it does not say %q: %q", name, want, fc.Lines)
			}
		}
	}
}

func TestWhyNothingIsPromisedIsSaid(t *testing.T) {
	for name, test := range map[string]struct {
		facts *facts
		says  string
	}{
		"no annotation": {someFacts(notAsked), "no annotation stayput.io/retain-ip. Add it"},
		"a misspelt annotation": {someFacts(notAsked,
			func(f *facts) { f.pod.Annotations = map[string]string{"stayput.io/retainip": "10m"} }),
			"no annotation stayput.io/retain-ip, but stayput.io/retainip, which is unknown"},
		"the annotation of another domain": {someFacts(notAsked,
			func(f *facts) { f.pod.Annotations = map[string]string{"stay-put.io/retain-ip": "10m"} }),
			"no annotation stayput.io/retain-ip, but stay-put.io/retain-ip, which is unknown"},
		"an annotation of its workload": {someFacts(notAsked, func(f *facts) {
			f.workload.SetAnnotations(map[string]string{stayputv1alpha1.AnnotationRetainIP: "10m"})
		}), "but its StatefulSet has stayput.io/retain-ip in metadata.annotations, where it has no effect"},
		"a bad annotation": {someFacts(notPromised,
			func(f *facts) { f.pod.Annotations = map[string]string{stayputv1alpha1.AnnotationRetainIP: "true"} }),
			`annotation stayput.io/retain-ip: "true" is not valid: expected a duration above 0 in h, m and s of at most ` +
				`2562047h`},
		"the host's network": {someFacts(notPromised, func(f *facts) { f.pod.Spec.HostNetwork = true }),
			"uses the host network"},
		"no agent on its node": {someFacts(notPromised, func(f *facts) { f.looks, f.lookErrors["node-1"] = nil, ErrNoAgent }),
			"no Stayput agent is running on the node"},
		"the share is used up": {someFacts(notPromised,
			func(f *facts) { f.looks["node-1"].Networks[0].RangeSets[0].Promised = 9 }),
			"9 of at most 9 addresses of network"},
		"it came too late": {someFacts(notPromised), "without the annotation"},
		"another IPAM": {someFacts(notPromised, func(f *facts) {
			f.looks["node-1"].Networks, f.looks["node-1"].CNI.Message = nil, "10-calico.conflist: its IPAM is calico-ipam"
		}), "is not from Stayput. The CNI configuration of node node-1: 10-calico.conflist: its IPAM is calico-ipam"},
		"the node refused": {someFacts(notPromised, func(f *facts) {
			f.events = []corev1.Event{{InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "web-2", UID: "p"},
				Reason: "IPRetentionRefused", Message: "too many"}}
		}), "Nothing: too many"},
		"the API server was not told": {someFacts(
			func(f *facts) { f.kept = nil; f.looks["node-1"].Agent.API = "degraded: connection refused" }),
			"degraded: connection refused"},
	} {
		if p := test.facts.story().Promise; len(p) != 1 || !strings.Contains(p[0], test.says) {
			t.Errorf("%s: %q, expected %q", name, p, test.says)
		}
	}
}

func TestAnAnnotationThatIsUnknownIsNamedBesideTheOneThatItMisses(t *testing.T) {
	all := strings.Join(stayputv1alpha1.PodAnnotations, ", ")
	for key, want := range map[string]string{
		"stayput.io/retainip":            stayputv1alpha1.AnnotationRetainIP,
		"stayput.io/retain_ip":           stayputv1alpha1.AnnotationRetainIP,
		"stayput.io/Retain-IP":           stayputv1alpha1.AnnotationRetainIP,
		"stayputio/retain-ip":            stayputv1alpha1.AnnotationRetainIP,
		"retain-ip":                      stayputv1alpha1.AnnotationRetainIP,
		"stayput.io/homewait":            stayputv1alpha1.AnnotationHomeWait,
		"stayput.io/when_scaled":         stayputv1alpha1.AnnotationWhenScaled,
		"stayput.io/retention":           all,
		"stayput.io/pool":                all,
		stayputv1alpha1.AnnotationPools:  "",
		stayputv1alpha1.AnnotationPinned: "",
		"example.com/retain":             "",
	} {
		told := ""
		for _, a := range askedBy(map[string]string{key: "10m"}) {
			if _, meant, unknown := strings.Cut(a.Meaning, "unknown and without effect: expected "); unknown {
				told = meant
			}
		}
		if told != want {
			t.Errorf("%s: expected is %q, want %q", key, told, want)
		}
	}
}

func TestTheStorySaysWhatIsUnknown(t *testing.T) {
	f := someFacts(func(f *facts) {
		f.looks, f.lookErrors["node-1"] = nil, errors.New("pods/exec is forbidden")
		f.unknown = []string{"the ledger of node node-1: pods/exec is forbidden"}
	})
	var b strings.Builder
	if err := f.story().write(&b, noon); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "What could not be read\n  the ledger of node node-1: pods/exec is forbidden") ||
		!strings.Contains(b.String(), "IP: 10.1.0.9, kept for 10m") {
		t.Errorf("told is\n%s", b.String())
	}
}

func TestAnEventThatNamesThePodIsAboutIt(t *testing.T) {
	for text, want := range map[string]bool{
		"pod web-1: waits": true, "create Pod web-1 in StatefulSet web": true, "pod web-10: waits": false,
		"web-1.node-1": false, "web": false,
	} {
		if mentions(text, "web-1") != want {
			t.Errorf("%q names web-1: %v", text, !want)
		}
	}
}

func TestARecordIsOfTheWorkloadOfItsGroup(t *testing.T) {
	at := func(age time.Duration) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: age.String(), CreationTimestamp: metav1.NewTime(noon.Add(-age))}
	}
	of := func(apiVersion string, meta metav1.ObjectMeta) kruisev1alpha1.PersistentPodState {
		return kruisev1alpha1.PersistentPodState{ObjectMeta: meta, Spec: kruisev1alpha1.PersistentPodStateSpec{
			TargetReference: kruisev1alpha1.TargetReference{APIVersion: apiVersion, Kind: "StatefulSet", Name: "web"}}}
	}
	f := someFacts(func(f *facts) { f.workload.Object["metadata"].(map[string]any)["namespace"] = "" })
	f.namespace = ""
	all := []kruisev1alpha1.PersistentPodState{
		of("apps/v1", at(time.Minute)), of("apps.kruise.io/v1beta1", at(time.Hour)), of("apps/v1beta2", at(2*time.Minute)),
	}
	if s := f.recordAmong(all); s == nil || s.Name != "2m0s" {
		t.Errorf("the record of a StatefulSet of group apps is %+v", s)
	}
}

func TestWhatANodePromisesIsSaid(t *testing.T) {
	released := func(r *stayputv1alpha1.RetainedIP) { r.Spec.Release = stayputv1alpha1.ReleaseNow }
	elsewhere := func(r *stayputv1alpha1.RetainedIP) { r.Spec.NodeName = "node-2" }
	for _, test := range []struct {
		r    *stayputv1alpha1.RetainedIP
		says string
	}{
		{aRetainedIP(isBound), "10.1.0.9 on node node-1 is promised to it: kept 10m after the pod stops."},
		{aRetainedIP(released), "10.1.0.9 on node node-1 is being released: spec.release of its RetainedIP is set."},
		{aRetainedIP(), "10.1.0.9 is kept on node node-1 until 2026-01-02T12:05:00Z (5m)."},
		{aRetainedIP(whileOwned), "10.1.0.9 is kept on node node-1: while owned by StatefulSet web, ordinal 2 wanted."},
		{aRetainedIP(isBound, elsewhere), "Node node-2 still reports that a pod of this name uses 10.1.0.9: " +
			"the node or its agent may be down."},
	} {
		if promise := someFacts().promiseOf(keptOf(test.r)); promise != test.says {
			t.Errorf("said is %q, want %q", promise, test.says)
		}
	}
}
