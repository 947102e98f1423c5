package cli

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// aPool gives addresses.
func aPool(change ...func(*stayputv1alpha1.PodIPPool)) *stayputv1alpha1.PodIPPool {
	p := &stayputv1alpha1.PodIPPool{
		ObjectMeta: metav1.ObjectMeta{Name: "blue", CreationTimestamp: metav1.NewTime(noon.Add(-time.Hour))},
		Spec:       stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeL2, Subnet: "10.6.0.0/16"},
		Status: stayputv1alpha1.PodIPPoolStatus{
			Addresses: stayputv1alpha1.PodIPPoolAddresses{Total: 10, Used: 2, Free: 8},
			Conditions: []metav1.Condition{{Type: stayputv1alpha1.ConditionReady, Status: metav1.ConditionTrue,
				Reason: "Ready"}},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func condition(kind string, status metav1.ConditionStatus, reason, message string) func(*stayputv1alpha1.PodIPPool) {
	return func(p *stayputv1alpha1.PodIPPool) {
		if kind == stayputv1alpha1.ConditionReady {
			p.Status.Conditions = nil
		}
		p.Status.Conditions = append(p.Status.Conditions,
			metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message})
	}
}

// aPodIP is of pod web-2 of StatefulSet web, which runs on node-1.
func aPodIP(change ...func(*stayputv1alpha1.PodIP)) *stayputv1alpha1.PodIP {
	p := &stayputv1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.101", UID: "ip", ResourceVersion: "7"},
		Spec: stayputv1alpha1.PodIPSpec{
			Pool: "blue", Mode: stayputv1alpha1.ModeL2, Namespace: "default", PodName: "web-2", PodUID: "p",
			Interface: "eth0", Retention: "10m0s", WhenScaled: "Retain", WhenDeleted: "Retain",
			Workload: &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "w"},
		},
		Status: stayputv1alpha1.PodIPStatus{Phase: stayputv1alpha1.PodIPBound, PodUID: "p", NodeName: "node-1"},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func podIPRetained(p *stayputv1alpha1.PodIP) {
	p.Status.Phase, p.Status.Expires = stayputv1alpha1.PodIPRetained, &metav1.Time{Time: noon.Add(5 * time.Minute)}
}
func podIPFreed(p *stayputv1alpha1.PodIP)    { p.Spec.Retention = "" }
func podIPReleased(p *stayputv1alpha1.PodIP) { p.Spec.Release = stayputv1alpha1.ReleaseNow }
func podIPGiven(p *stayputv1alpha1.PodIP)    { podIPRetained(p); p.Spec.PodUID = "next" }
func conflicting(p *stayputv1alpha1.PodIP)   { p.Status.Conflict = "02:00:00:00:00:01" }

func TestWhyAnAddressOfAPoolIsKeptIsInWords(t *testing.T) {
	for _, test := range []struct {
		ip                            *stayputv1alpha1.PodIP
		phase, node, until, left, why string
	}{
		{aPodIP(), "Bound", "node-1", none, none, "of pool blue, 10m after the pod stops"},
		{aPodIP(podIPRetained), "Retained", "node-1", "2026-01-02T12:05:00Z", "5m",
			"of pool blue, 10m after the pod stopped"},
		{aPodIP(podIPFreed), "Bound", "node-1", none, none, "of pool blue, until the pod is gone"},
		{aPodIP(podIPGiven), "Allocated", "", none, none, "of pool blue, 10m after the pod stops"},
		{aPodIP(conflicting), "Bound", "node-1", none, none, "of pool blue, in use by another machine on the link " +
			"of node node-1, with MAC address 02:00:00:00:00:01"},
		{aPodIP(podIPFreed, podIPReleased), "Bound", "node-1", none, none,
			"of pool blue, being released"},
	} {
		k := keptOf(test.ip)
		at, left := k.until(noon)
		if why := k.why(nil); k.phase != test.phase || k.node != test.node || at != test.until || left != test.left ||
			why != test.why {
			t.Errorf("%s on %q until %s, %s: %q, want %+v", k.phase, k.node, at, left, why, test)
		}
	}
}

func TestWhatIsWrongWithPoolsIsFound(t *testing.T) {
	invalid := condition(stayputv1alpha1.ConditionReady, metav1.ConditionFalse, "Invalid", "spec.subnet: no")
	epoch := stayputv1alpha1.EpochTime(7000)
	recalling := &stayputv1alpha1.PodIPAudit{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPAuditName},
		Spec: stayputv1alpha1.PodIPAuditSpec{Epoch: &epoch,
			Phase: stayputv1alpha1.PodIPAuditRecalling, Mark: metav1.NewMicroTime(noon)}}
	answer := func(node string, epoch int64) *stayputv1alpha1.PodIPReport {
		return &stayputv1alpha1.PodIPReport{ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec: stayputv1alpha1.PodIPReportSpec{Epoch: stayputv1alpha1.EpochTime(1000 * epoch)}}
	}
	node := func(name string) *corev1.Node { n := aNode(name); return &n }
	fargate := node("fargate")
	fargate.Labels = map[string]string{"eks.amazonaws.com/compute-type": "fargate"}
	for name, test := range map[string]struct {
		objects []client.Object
		level   Level // empty: nothing is said
		says    string
	}{
		"no pool":         {nil, "", ""},
		"a pool":          {[]client.Object{aPool(), aPodIP()}, LevelOK, "1 pool, 2 of 10 addresses in use or kept"},
		"an invalid pool": {[]client.Object{aPool(invalid)}, LevelFail, "PodIPPool blue: spec.subnet: no"},
		"a disabled pool": {[]client.Object{aPool(condition(stayputv1alpha1.ConditionReady, metav1.ConditionFalse,
			"Disabled", "spec.allocation"))}, LevelWarn, "allocates no addresses: spec.allocation"},
		"a pool without a controller": {[]client.Object{aPool(func(p *stayputv1alpha1.PodIPPool) {
			p.Status = stayputv1alpha1.PodIPPoolStatus{}
		})}, LevelFail, "no controller has reconciled it"},
		"a new pool": {[]client.Object{aPool(func(p *stayputv1alpha1.PodIPPool) {
			p.Status, p.CreationTimestamp = stayputv1alpha1.PodIPPoolStatus{}, metav1.NewTime(noon.Add(-poolSlack))
		})}, LevelOK, "1 pool"},
		"an overlap": {[]client.Object{aPool(condition(stayputv1alpha1.ConditionOverlaps, metav1.ConditionTrue,
			"Overlaps", "it shares addresses with pool green"))}, LevelWarn, "it shares addresses with pool green"},
		"an exhausted pool": {[]client.Object{aPool(condition(stayputv1alpha1.ConditionExhausted, metav1.ConditionTrue,
			"PodsWaiting", "3 pods wait for an address"))}, LevelWarn, "3 pods wait"},
		"another machine": {[]client.Object{aPool(), aPodIP(conflicting)}, LevelWarn, "pod default/web-2 cannot start: " +
			"10.6.168.101 of pool blue is in use by another machine on the link of node node-1"},
		"a recall": {[]client.Object{aPool(), recalling, node("node-1"), node("node-2"), fargate, answer("node-1", 7),
			answer("node-2", 6)}, LevelFail, "missing: node-2"},
	} {
		all := checkPools(t.Context(), aCluster(nothing, test.objects...), noon)
		if test.level == "" && len(all) == 0 {
			continue
		}
		if len(all) != 1 || all[0].Level != test.level || !strings.Contains(all[0].Text, test.says) ||
			(all[0].Todo == "") != (test.level == LevelOK) {
			t.Errorf("%s: %+v, want %s %q", name, all, test.level, test.says)
		}
	}
}

// ofPools are the facts of web-2 if it asks for addresses of pool blue.
func ofPools(ips ...*stayputv1alpha1.PodIP) func(*facts) {
	return func(f *facts) {
		notAsked(f)
		f.pod.Annotations = map[string]string{stayputv1alpha1.AnnotationPools: "blue",
			stayputv1alpha1.AnnotationAddresses: "[]"}
		f.template.Annotations = map[string]string{stayputv1alpha1.AnnotationPools: "blue"}
		f.asksPools = "blue"
		for _, p := range ips {
			f.kept = append(f.kept, keptOf(p))
		}
	}
}

const theStoryOfPools = `Pod default/web-2
  running on node node-1 for 3h, with 10.1.0.9, of StatefulSet web

What it requests
  stayput.io/pools: blue - its addresses come from these pools, on any node
  stayput.io/addresses: [] - set by Stayput: its pool addresses, for its node

What is promised
  10.6.168.101 of pool blue is assigned to it on any node: kept 10m after the
    pod stops.
  PodIP 10.6.168.101: Bound, 10.6.168.101, eth0, node node-1

If it is deleted now
  Node: any node that its pools select.
  IP: 10.6.168.101 of pool blue, once the node of its predecessor has reported
    that it is gone.
`

func TestAStoryOfAPodOfPoolsIsToldInWords(t *testing.T) {
	var b strings.Builder
	if err := someFacts(ofPools(aPodIP())).story().write(&b, noon); err != nil {
		t.Fatal(err)
	}
	if b.String() != theStoryOfPools {
		t.Errorf("told is\n%s", b.String())
	}
}

func TestWhatPoolsPromiseIsSaid(t *testing.T) {
	waits := func(f *facts) {
		gatedSince(time.Minute)(f)
		delete(f.pod.Annotations, stayputv1alpha1.AnnotationAddresses)
		f.kept = nil
		f.events = []corev1.Event{{InvolvedObject: corev1.ObjectReference{Kind: "Pod", UID: f.pod.UID},
			Reason: home.ReasonAddressWait, Message: "the pod waits for an address: pool blue has no free address"}}
	}
	held := func(f *facts) {
		f.events = []corev1.Event{{InvolvedObject: corev1.ObjectReference{Kind: "PodIP", Name: "10.6.168.101"},
			Reason: home.ReasonAddressHeld, Message: "bring node-1 back"}}
	}
	for name, test := range map[string]struct {
		facts          *facts
		promise, fore  string
		ip, held, node string
	}{
		"a retained one": {someFacts(ofPools(aPodIP(podIPRetained)), func(f *facts) { f.pod = nil }),
			"10.6.168.101 of pool blue is kept until 2026-01-02T12:05:00Z (5m), on any node.",
			"IP: 10.6.168.101 of pool blue", "10.6.168.101", "", "node-1"},
		"not kept": {someFacts(ofPools(aPodIP(podIPFreed))),
			"10.6.168.101 of pool blue is assigned to it until it is gone.",
			"IP: any free address. 10.6.168.101 is freed", "", "", "node-1"},
		"in use by another machine": {someFacts(ofPools(aPodIP(conflicting))),
			"02:00:00:00:00:01: the pod waits until that machine has given it up.",
			"IP: 10.6.168.101", "10.6.168.101", "", "node-1"},
		"one that waits for an operator": {someFacts(ofPools(aPodIP()), held),
			"is assigned to it on any node", "IP: 10.6.168.101", "10.6.168.101", "bring node-1 back", "node-1"},
		"one of a pod that is not wanted": {someFacts(ofPools(aPodIP()), scaledDown), "is assigned to it on any node",
			"10.6.168.101 of pool blue is kept for 10m: a pod of this name", "", "", "node-1"},
		"a released one of a pod that is not wanted": {someFacts(ofPools(aPodIP(podIPRetained, podIPReleased)), scaledDown),
			"10.6.168.101 of pool blue is being released.", "10.6.168.101 of pool blue is being released.", "", "", "node-1"},
		"none, while it waits": {someFacts(ofPools(), waits),
			"has been assigned none: the pod waits for an address: pool blue has no free address",
			"IP: any free address of its pools, blue.", "", "", ""},
		"none of a pod that began without": {someFacts(ofPools()),
			"Nothing: it requests pool addresses (blue) and has been assigned none.",
			"IP: any free address of its pools", "", "", ""},
	} {
		s := test.facts.story()
		if promise := strings.Join(s.Promise, "\n"); !strings.Contains(promise, test.promise) {
			t.Errorf("%s: promised is %q", name, promise)
		}
		if fore := strings.Join(s.IfDeleted.Lines, "\n"); !strings.Contains(fore, test.fore) ||
			strings.Join(s.IfDeleted.IPs, ",") != test.ip {
			t.Errorf("%s: foretold is %q with %v", name, fore, s.IfDeleted.IPs)
		}
		if len(s.Kept) > 0 && (s.Kept[0].Held != test.held || s.Kept[0].Node != test.node) ||
			len(s.Kept) == 0 && test.node != "" {
			t.Errorf("%s: %+v", name, s.Kept)
		}
	}
}

func TestAPodIsFoundByItsPodIP(t *testing.T) {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{stayputv1alpha1.AnnotationPools: "blue"}}}
	other := aPodIP(func(p *stayputv1alpha1.PodIP) { p.Name, p.Spec.Namespace = "10.6.168.102", "other" })
	event := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "e"}, Reason: home.ReasonAddressHeld,
		InvolvedObject: corev1.ObjectReference{Kind: "PodIP", Name: "10.6.168.101"}, Message: "bring node-1 back"}
	k := aCluster(nothing, aPool(), aPodIP(), other, space, event, aSet(map[string]any{"replicas": int64(3),
		"template": map[string]any{"metadata": map[string]any{}}}))
	for _, name := range []string{"web-2", "10.6.168.101"} {
		f, err := gather(t.Context(), &cluster{Client: k, agents: unreachable{}, namespace: "default",
			installation: DefaultNamespace}, name)
		if err != nil {
			t.Fatal(err)
		}
		s := f.story()
		if s.Pod != "web-2" || s.Workload != "StatefulSet/web" || f.asksPools != "blue" || len(s.Kept) != 1 ||
			s.Kept[0].Held != "bring node-1 back" {
			t.Errorf("%s: %+v, asks for %q", name, s, f.asksPools)
		}
	}
}

func TestAPodAsksInSpiderpoolsWordsIfTheyCount(t *testing.T) {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{annotationDefaultV4: `["blue"]`, annotationDefaultV6: `["red"]`}}}
	for value, pods := range map[string]map[string]any{
		`["blue"] ["red"]`:  {},
		`{"ipv4":["blue"]}`: {"annotations": map[string]any{annotationIPPool: "{  \n \"ipv4\": [\"blue\"]\n}"}},
		`[]`:                {"annotations": map[string]any{annotationIPPool: "{}", annotationIPPools: "[]"}},
		"green":             {"annotations": map[string]any{annotationIPPool: "{}", stayputv1alpha1.AnnotationPools: "green"}},
	} {
		set := aSet(map[string]any{"replicas": int64(3), "template": map[string]any{"metadata": pods}})
		f, err := gather(t.Context(), &cluster{Client: aCluster(nothing, aPodIP(), aPool(), space, set),
			agents: unreachable{}, namespace: "default", installation: DefaultNamespace}, "web-2")
		if err != nil || f.asksPools != value {
			t.Errorf("asks for %q, want %q (%v)", f.asksPools, value, err)
		}
	}
	f := &facts{pod: &corev1.Pod{}}
	if f.countsSpiderpool() {
		t.Error("they count for a pod that has nothing of ours")
	}
	f.pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}
	if !f.countsSpiderpool() {
		t.Error("they do not count for a pod that waits")
	}
	both := map[string]string{annotationIPPool: "{}", annotationIPPools: "[]"}
	if all := askedBy(both); len(all) != 2 || !strings.Contains(all[0].Meaning, "pools.spiderpool") ||
		all[1].Meaning != "ignored, because of "+annotationIPPools {
		t.Errorf("%+v", all)
	}
}

func TestAddressesOfPoolsAreReleasedIfNoPodHasThem(t *testing.T) {
	named := func(name, pod string) func(*stayputv1alpha1.PodIP) {
		return func(p *stayputv1alpha1.PodIP) { p.Name, p.UID, p.Spec.PodName = name, types.UID(name), pod }
	}
	objects := []client.Object{aPodIP(named("10.6.168.101", "web-1")), aRetainedIP(),
		aPodIP(named("10.6.168.102", "web-2"), podIPRetained), aPodIP(named("10.6.168.103", "web-3"), podIPGiven)}
	c := &cluster{Client: aCluster(nothing, objects...), namespace: "default"}
	o := &release{all: true}
	chosen, errs, err := o.choose(t.Context(), c, nil)
	if err != nil || len(errs) > 0 || len(chosen) != 2 || chosen[1].GetName() != "10.6.168.102" {
		t.Errorf("all: %+v, %v, %v", chosen, errs, err)
	}
	o = &release{}
	chosen, errs, err = o.choose(t.Context(), c, []string{"10.6.168.102", "web-1", "web-3", "web-7"})
	if err != nil || len(chosen) != 1 || len(errs) != 3 {
		t.Fatalf("by names: %+v, %v, %v", chosen, errs, err)
	}
	for i, says := range []string{"no address is kept for web-7", "is bound for pod web-1: scale StatefulSet web down",
		"is allocated for pod web-3"} {
		if i < len(errs) && !strings.Contains(errs[i].Error(), says) {
			t.Errorf("%v, want %q", errs[i], says)
		}
	}
	if err := o.request(t.Context(), c, chosen[0]); err != nil ||
		chosen[0].podIP().Spec.Release != stayputv1alpha1.ReleaseNow {
		t.Errorf("asked for: %+v, %v", chosen[0].Object, err)
	}
	older := aPodIP(named("10.6.168.101", "web-1"))
	older.ResourceVersion = "6"
	if err := o.request(t.Context(), c, keptOf(older)); err == nil ||
		!strings.Contains(err.Error(), "PodIP 10.6.168.101 has changed since it was read") {
		t.Errorf("of an older version: %v", err)
	}

	seen := func(list client.ObjectList) bool { _, ok := list.(*stayputv1alpha1.PodIPList); return ok }
	c = &cluster{Client: aCluster(seen, objects...), namespace: "default"}
	o = &release{all: true}
	chosen, errs, err = o.choose(t.Context(), c, nil)
	if !errors.Is(err, errRight) || len(chosen) > 0 || !strings.Contains(err.Error(), "nothing is released") {
		t.Errorf("without the right to list PodIPs: %+v, %v, %v", chosen, errs, err)
	}
	_, missing, unseen, err := c.kept(t.Context(), []string{"web-1"}, "")
	if err != nil || unseen == nil || len(missing) != 1 || !strings.Contains(missing[0].Error(), "is unknown") {
		t.Errorf("of a pod whose addresses cannot be seen: %v, %v, %v", missing, unseen, err)
	}
}

func TestAReleasedAddressOfAPoolIsFreeOnceItsPodIPIsGone(t *testing.T) {
	asked := func(p *stayputv1alpha1.PodIP) { podIPRetained(p); podIPReleased(p) }
	for name, test := range map[string]struct {
		now  *stayputv1alpha1.PodIP
		free bool
		err  error
	}{
		"it is still asked for": {aPodIP(asked), false, nil},
		"it is given again":     {aPodIP(func(p *stayputv1alpha1.PodIP) { p.UID = "another" }), true, nil},
		"its pod came back":     {aPodIP(asked, podIPGiven), false, errBound},
		"it was unset":          {aPodIP(podIPRetained), false, errKept},
		"it is being deleted": {aPodIP(podIPRetained, func(p *stayputv1alpha1.PodIP) {
			p.DeletionTimestamp = &metav1.Time{Time: noon}
		}), false, nil},
	} {
		free, err := keptOf(aPodIP(asked)).isFreeBy(keptOf(test.now))
		if free != test.free || !errors.Is(err, test.err) || err != nil && test.err == nil {
			t.Errorf("%s: free %v, error %v", name, free, err)
		}
	}
}

func TestTheAddressesOfPoolsOnANodeAreListed(t *testing.T) {
	elsewhere := aPodIP(func(p *stayputv1alpha1.PodIP) { p.Name, p.Status.NodeName = "10.6.168.102", "node-2" })
	given := aPodIP(podIPGiven, func(p *stayputv1alpha1.PodIP) { p.Name, p.Spec.PodName = "10.6.168.103", "web-3" })
	var b strings.Builder
	if err := writePodIPs(t.Context(), aCluster(nothing, aPodIP(), elsewhere, given), &b, "node-1"); err != nil {
		t.Fatal(err)
	}
	const want = `
Pool addresses
  10.6.168.101  default/web-2  eth0  pool blue, bound
  10.6.168.103  default/web-3  eth0  pool blue, assigned to a later pod
`
	if b.String() != want {
		t.Errorf("printed is\n%s", b.String())
	}
	b.Reset()
	if err := writePodIPs(t.Context(), aCluster(nothing), &b, "node-1"); err != nil || b.Len() > 0 {
		t.Errorf("without any: %q, %v", b.String(), err)
	}
}

// The controller publishes the expiry of a PodIP some seconds after its phase.
func TestAnExpiryThatIsNotPublishedYetIsNotNever(t *testing.T) {
	p := &stayputv1alpha1.PodIP{Spec: stayputv1alpha1.PodIPSpec{PodUID: "p", Retention: "10m"},
		Status: stayputv1alpha1.PodIPStatus{Phase: stayputv1alpha1.PodIPRetained, PodUID: "p"}}
	if is := keptOf(p).expiry(); is != "" {
		t.Errorf("with a retention it expires %q", is)
	}
	p.Spec.Retention = stayputv1alpha1.RetentionWhileOwned
	if is := keptOf(p).expiry(); is != expiresNever {
		t.Errorf("while owned it expires %q", is)
	}
}

func TestAPodThatRequestsAPoolThatDoesNotExistIsFound(t *testing.T) {
	gated := func(name, pools string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}}}
		if pools != "" {
			p.Annotations = map[string]string{stayputv1alpha1.AnnotationPools: pools}
		}
		return p
	}
	running := gated("web-2", "nosuch")
	running.Spec.SchedulingGates = nil
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{stayputv1alpha1.AnnotationPools: "green"}}}
	k := aCluster(nothing, ns, aPool(), theirPool("theirs"))
	var got []string
	for _, f := range checkAskedPools(t.Context(), k, corev1.PodList{Items: []corev1.Pod{
		*gated("web-0", "blue"), *gated("web-1", "nosuch"), *running, *gated("web-3", "theirs"), *gated("web-4", ""),
	}}) {
		got = append(got, string(f.Level)+" "+f.Text)
	}
	want := []string{"FAIL pod default/web-1 waits for addresses of PodIPPool nosuch, which does not exist",
		"FAIL pod default/web-4 waits for addresses of PodIPPool green, which does not exist"}
	if !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}
