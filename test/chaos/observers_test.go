package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

// world is observers with a clock that tests move.
type world struct {
	t       *testing.T
	clock   *nodetest.Clock
	report  *report
	weather *weather
	lives   *lives
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, clock: nodetest.NewClock()}
	w.report = newReport(io.Discard, io.Discard, "a test")
	w.report.now = w.clock.Wall
	w.weather = &weather{now: w.clock.Wall}
	w.lives = newLives(w.report, w.weather)
	w.lives.nodes = []string{"node-1", "node-2"}
	return w
}

// pass lets time pass, second by second.
func (w *world) pass(d time.Duration) {
	for range d / time.Second {
		w.clock.Pass(time.Second)
		w.lives.tick()
	}
}

// says checks the violations.
func (w *world) says(want ...string) {
	w.t.Helper()
	got := w.report.violations
	for i, v := range got {
		if i >= len(want) || !strings.Contains(v, want[i]) {
			w.t.Errorf("violation %d: %q", i, v)
		}
	}
	if len(got) < len(want) {
		w.t.Errorf("%d violations, want %q", len(got), want)
	}
}

// pod is a state of a pod. An empty node means that it is gated.
func (w *world) pod(name, uid, node, ip string) *corev1.Pod {
	set, _, _ := strings.Cut(name, "-")
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(uid), Labels: map[string]string{"app": set},
			CreationTimestamp: metav1.NewTime(w.clock.Wall()),
		},
		Spec:   corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{PodIP: ip},
	}
	if node == "" {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: v1alpha1.PlacementGate}}
	}
	if ip != "" {
		p.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(w.clock.Wall()),
		}}
	}
	return p
}

// lived lets a pod live on a node and end.
func (w *world) lived(name, uid, node, ip string) {
	p := w.pod(name, uid, node, ip)
	w.lives.seePod(p)
	w.pass(20 * time.Second)
	w.lives.gonePod(p)
	w.pass(time.Second)
}

func TestAReturnToThePlaceBeforeIsHome(t *testing.T) {
	w := newWorld(t)
	w.lived("ten-0", "a", "node-1", "10.0.0.1")
	w.lived("ten-0", "b", "node-1", "10.0.0.1")
	w.says()
	if n := w.report.counts[tableReturns]["home"]; n != 1 {
		t.Errorf("%d returns were home", n)
	}
}

func TestAnotherAddressAtHomeIsAViolation(t *testing.T) {
	w := newWorld(t)
	w.lived("ten-0", "a", "node-1", "10.0.0.1")
	w.lived("ten-0", "b", "node-1", "10.0.0.2")
	w.says("ten-0 (b) on node-1 with 10.0.0.2 came home and lost its address")
}

func TestAnotherAddressOfTheSamePodIsAViolation(t *testing.T) {
	w := newWorld(t)
	p := w.pod("ten-0", "a", "node-1", "10.0.0.1")
	w.lives.seePod(p)
	p = p.DeepCopy()
	p.Status.PodIP = "10.0.0.2"
	w.lives.seePod(p)
	w.says("had 10.0.0.1, and started again with another address")
}

func TestASharedAddressMayGoToASibling(t *testing.T) {
	w := newWorld(t)
	p := w.pod("front-a", "a", "node-1", "10.0.0.1")
	w.lives.seePod(p)
	p = p.DeepCopy()
	p.Status.PodIP = "10.0.0.2"
	w.lives.seePod(p)
	w.says()
}

func TestAnAddressIsNotDueAfterItsTime(t *testing.T) {
	w := newWorld(t)
	w.lived("brief-0", "a", "node-1", "10.0.0.1")
	w.pass(30 * time.Second)
	w.lived("brief-0", "b", "node-1", "10.0.0.2")
	w.says()
	if n := w.report.counts[tableExcused]["the promise was over"]; n != 1 {
		t.Errorf("%v", w.report.counts)
	}
}

func TestAPodElsewhereNeedsAReason(t *testing.T) {
	for _, is := range []struct {
		name    string
		happens func(*world)
		excused string
	}{
		{"without", func(*world) {}, ""},
		{"not long enough", func(w *world) {
			w.weather.begins("node-1", "cordoned")
			w.lives.seePod(w.pod("ten-0", "b", "", ""))
			w.pass(defaultWait / 2)
		}, ""},
		{"nothing to wait for", func(w *world) {
			w.lives.seePod(w.pod("ten-0", "b", "", ""))
			w.pass(defaultWait)
		}, ""},
		{"waited", func(w *world) {
			w.weather.begins("node-1", "cordoned")
			w.lives.seePod(w.pod("ten-0", "b", "", ""))
			w.pass(defaultWait)
		}, "it waited for its home in vain"},
		{"deleted", func(w *world) {
			w.lives.goneNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
		}, "its home was deleted"},
		{"no room", func(w *world) {
			w.weather.begins("node-1", "cordoned")
			p := w.pod("ten-0", "evicted", "", "")
			p.Spec.SchedulingGates = nil
			w.lives.seePod(p)
			w.pass(defaultWait)
			w.lives.gonePod(p)
		}, "its home had no room in time"},
		{"unpublished", func(w *world) {
			w.weather.strikes(agentOf("node-1"), "was killed", time.Second)
		}, "its home was not published"},
		{"a silent predecessor", func(w *world) {
			p := w.pod("ten-0", "silent", "node-2", "")
			w.lives.seePod(p)
			w.lives.gonePod(p)
		}, "its predecessor may have had an address there"},
	} {
		t.Run(is.name, func(t *testing.T) {
			w := newWorld(t)
			w.lived("ten-0", "a", "node-1", "10.0.0.1")
			is.happens(w)
			w.lived("ten-0", "b", "node-2", "10.0.1.1")
			if is.excused == "" {
				w.says("did not come home to node-1")
				return
			}
			w.says()
			if n := w.report.counts[tableExcused][is.excused]; n != 1 {
				t.Errorf("excused are %v", w.report.counts[tableExcused])
			}
		})
	}
}

func TestAPublishedHomeExcusesNobody(t *testing.T) {
	w := newWorld(t)
	w.lived("ten-0", "a", "node-1", "10.0.0.1")
	w.lives.seeObject(object("ten-0", "node-1", "10m"))
	w.weather.strikes(agentOf("node-1"), "was killed", time.Second)
	w.lived("ten-0", "b", "node-2", "10.0.1.1")
	w.says("did not come home to node-1")
}

func object(pod, node, retention string) *v1alpha1.RetainedIP {
	return &v1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.RetainedIPName(pod, node)},
		Spec:       v1alpha1.RetainedIPSpec{PodName: pod, NodeName: node, Scheduled: "pod/" + pod, Retention: retention},
	}
}

func TestARecordedPodIsDueOnItsNodeOnly(t *testing.T) {
	w := newWorld(t)
	w.lives.records["recorded-0"] = "node-1"
	w.lived("recorded-0", "a", "node-1", "10.0.0.1")
	w.lived("recorded-0", "b", "node-1", "10.0.0.2")
	w.says()
	w.lived("recorded-0", "c", "node-2", "10.0.1.1")
	w.says("recorded-0 (c) on node-2 with 10.0.1.1 did not come home")
}

func TestARecordGoesOnlyWithThePodThatItIsFor(t *testing.T) {
	w := newWorld(t)
	set := setByName(t, "recorded")
	w.lives.scaled(set, set.replicas)
	state := &kruisev1alpha1.PersistentPodState{ObjectMeta: metav1.ObjectMeta{Name: set.name}}
	records := func(nodes map[string]string) {
		is := state.DeepCopy()
		is.Status.PodStates = map[string]kruisev1alpha1.PodState{}
		for pod, node := range nodes {
			is.Status.PodStates[pod] = kruisev1alpha1.PodState{NodeName: node}
		}
		w.lives.seeRecord(is)
	}
	records(map[string]string{"recorded-0": "node-1", "recorded-1": "node-1"})
	w.lived("recorded-1", "a", "node-1", "10.0.0.1")

	// Without its record a pod may go anywhere, also if its successor was created before the record was seen to go.
	w.lives.scaled(set, 1)
	next := w.pod("recorded-1", "b", "", "")
	w.lives.seePod(next)
	records(map[string]string{"recorded-0": "node-1"})
	w.lived("recorded-1", "b", "node-2", "10.0.1.1")
	w.says()
	if n := w.report.counts[tableExcused]["its record was dropped"]; n != 1 {
		t.Errorf("excused are %v", w.report.counts[tableExcused])
	}

	// The next record counts.
	records(map[string]string{"recorded-0": "node-1", "recorded-1": "node-2"})
	w.lived("recorded-1", "c", "node-1", "10.0.0.1")
	w.says("recorded-1 (c) on node-1 with 10.0.0.1 did not come home to node-2")

	w.lives.scaled(set, set.replicas)
	w.pass(3 * time.Minute)
	records(map[string]string{"recorded-1": "node-2"})
	w.says("did not come home", "the record of recorded-0, node-1, is dropped, but recorded wants the pod")
	w.lives.goneRecord(state)
	w.says("did not come home", "the record of recorded-0", "the record of recorded-1, node-2, is dropped")
}

func TestAGateThatStaysIsAViolation(t *testing.T) {
	w := newWorld(t)
	w.lives.seePod(w.pod("patient-0", "a", "", ""))
	w.pass(patience)
	w.says()
	w.pass(2 * time.Second)
	w.says("patient-0 (a) has been gated")
}

func TestAGateOutlastsTheWaitWhileTheHomeIsAway(t *testing.T) {
	w := newWorld(t)
	w.weather.begins("node-1", "cordoned")
	w.lives.seePod(w.pod("patient-0", "a", "", ""))
	w.lives.seePod(w.pod("ten-0", "b", "", ""))
	w.pass(defaultWait + patience)
	w.says()
	w.pass(2 * time.Second)
	w.says("ten-0 (b) has been gated") // the other one waits for ever
}

func TestTwoPodsWithOneIPAreAViolation(t *testing.T) {
	w := newWorld(t)
	w.lives.seePod(w.pod("ten-0", "a", "node-1", "10.0.0.1"))
	w.lives.seePod(w.pod("owned-0", "b", "node-1", "10.0.0.1"))
	w.pass(settled)
	w.says()
	w.pass(2 * time.Second)
	w.says("10.0.0.1 is the IP of both")
}

func TestAReleaseOfWhatIsWantedIsAViolation(t *testing.T) {
	release := func(pod, retention string) *v1alpha1.RetainedIP {
		r := object(pod, "node-1", retention)
		r.Spec.Release = v1alpha1.ReleaseNow
		return r
	}
	w := newWorld(t)
	wanted := setByName(t, "wanted")
	w.lives.scaled(wanted, wanted.replicas)
	w.lives.seeObject(release("wanted-0", "while-owned"))
	w.says("wanted wants the pod")
	w.lives.scaled(wanted, 1)
	w.lives.seeObject(release("wanted-1", "while-owned"))
	w.says("wanted wants the pod")
	w.lives.seeObject(release("ten-0", "10m"))
	w.says("wanted wants the pod", "they are kept for 10m")
}

func TestAnEarlierAddressMayGoOnceItsPodHasTakenRootElsewhere(t *testing.T) {
	for _, is := range []struct {
		whenMoved string
		ready     time.Duration
		says      []string
	}{
		{v1alpha1.PolicyRelease, rooted, nil},
		{v1alpha1.PolicyRelease, rooted / 2, []string{"owned wants the pod"}},
		{v1alpha1.PolicyRetain, rooted, []string{"owned wants the pod"}},
	} {
		w := newWorld(t)
		owned := setByName(t, "owned")
		w.lives.scaled(owned, owned.replicas)
		w.lives.seePod(w.pod("owned-0", "a", "node-2", "10.0.1.1"))
		w.pass(is.ready)
		r := object("owned-0", "node-1", v1alpha1.RetentionWhileOwned)
		r.Spec.Release, r.Spec.WhenMoved = v1alpha1.ReleaseNow, is.whenMoved
		w.lives.seeObject(r)
		w.says(is.says...)
	}
}

func setByName(t *testing.T, name string) *workload {
	t.Helper()
	for _, w := range sets {
		if w.name == name {
			return w
		}
	}
	t.Fatalf("no workload %s", name)
	return nil
}

func TestAnAddressInTwoNamespacesIsSeen(t *testing.T) {
	dir := t.TempDir()
	one := netip.MustParseAddr("10.0.0.1")
	nodetest.Configure(t, nodetest.Netns(t, dir, "a"), one)
	second := nodetest.Netns(t, dir, "b")
	a, r := newJudge(t)
	v := view{book: map[netip.Addr]ledger.Address{one: bound("a")}}
	both := func() {
		t.Helper()
		var err error
		v.configured, err = configured(dir)
		must.Do(t, err)
		a.judge(v)
		a.judge(v)
	}
	both()
	wantViolations(t, r)
	nodetest.Configure(t, second, one)
	both()
	wantViolations(t, r, "10.0.0.1 is configured in 2 namespaces", "10.0.0.1 is configured in /run/netns/b, and its file")
}

func newJudge(t *testing.T) (*addresses, *report) {
	t.Helper()
	r := newReport(io.Discard, io.Discard, "a test")
	return newAddresses("node-1", r), r
}

func wantViolations(t *testing.T, r *report, want ...string) {
	t.Helper()
	(&world{t: t, report: r}).says(want...)
}

func bound(netns string) ledger.Address {
	return ledger.Address{
		State: ledger.StateBound, Netns: ledger.Netns{Path: "/var" + netnsDir + "/" + netns},
		Attachment: ledger.Attachment{ContainerID: netns, IfName: "eth0"},
	}
}

// kept is an address that is promised to a pod.
func kept(pod string, state ledger.State, left time.Duration) ledger.Address {
	policy, _, err := retention.Parse(map[string]string{retention.AnnotationRetainIP: "10m"})
	if err != nil {
		panic(err)
	}
	key := ledger.NewKey("pods", ledger.Pod{Namespace: namespace, Name: pod}, policy, "eth0")
	return ledger.Address{State: state, Key: &key, Policy: policy, Left: left, Ends: state == ledger.StateRetained}
}

func TestWhatTheFilesSayOfALiveAddressIsChecked(t *testing.T) {
	one := netip.MustParseAddr("10.0.0.1")
	for _, is := range []struct {
		name string
		book map[netip.Addr]ledger.Address
		want []string
	}{
		{"its own", map[netip.Addr]ledger.Address{one: bound("a")}, nil},
		{"free", nil, []string{"its file says: free"}},
		{"another's", map[netip.Addr]ledger.Address{one: bound("b")}, []string{"its file says: Bound to b/eth0"}},
		{"retained", map[netip.Addr]ledger.Address{one: kept("ten-0", ledger.StateRetained, time.Minute)},
			[]string{"its file says: Retained"}},
	} {
		t.Run(is.name, func(t *testing.T) {
			a, r := newJudge(t)
			v := view{configured: map[netip.Addr][]string{one: {netnsDir + "/a"}}, book: is.book}
			a.judge(v)
			wantViolations(t, r) // it may be on its way
			a.judge(v)
			wantViolations(t, r, is.want...)
		})
	}
}

func TestFilesThatDisagreeAreAViolation(t *testing.T) {
	a, r := newJudge(t)
	v := view{at: time.Unix(0, 0), bad: []string{"I1: something"}}
	a.judge(v)
	v.at = v.at.Add(time.Second)
	a.judge(v)
	wantViolations(t, r)
	v.at = v.at.Add(settled)
	a.judge(v)
	wantViolations(t, r, "I1: something")
}

func TestAnAddressGivenAwayEarlyIsAViolation(t *testing.T) {
	one := netip.MustParseAddr("10.0.0.1")
	retained := map[netip.Addr]ledger.Address{one: kept("ten-0", ledger.StateRetained, time.Minute)}
	for _, is := range []struct {
		name     string
		then     map[netip.Addr]ledger.Address
		after    time.Duration
		released bool
		want     []string
	}{
		{"kept", retained, time.Second, false, nil},
		{"taken", map[netip.Addr]ledger.Address{one: kept("ten-0", ledger.StateBound, 0)}, time.Second, false, nil},
		{"freed", nil, time.Second, false, []string{"given away early: free"}},
		{"given to another", map[netip.Addr]ledger.Address{one: kept("ten-1", ledger.StateBound, 0)}, time.Second, false,
			[]string{"promised to pod:chaos/ten-1"}},
		{"given to a pod without promise", map[netip.Addr]ledger.Address{one: bound("b")}, time.Second, false,
			[]string{"Bound to b/eth0"}},
		{"freed in time", nil, time.Minute, false, nil},
		{"released", nil, time.Second, true, nil},
	} {
		t.Run(is.name, func(t *testing.T) {
			a, r := newJudge(t)
			at := time.Unix(1000, 0)
			a.released = func(promise) time.Time {
				if is.released {
					return at
				}
				return time.Time{}
			}
			a.judge(view{at: at.Add(-time.Second), book: retained})
			at = at.Add(is.after)
			for range 3 {
				a.judge(view{at: at, book: is.then})
				at = at.Add(time.Second)
			}
			wantViolations(t, r, is.want...)
		})
	}
}

func TestALeftoverIsUnexplained(t *testing.T) {
	sandboxes := map[string]sandbox{"runs": {true, "uid"}, "dead": {false, "uid"}, "orphan": {true, "other"}}
	book := map[netip.Addr]ledger.Address{}
	want := map[string]string{}
	for i, is := range []struct {
		address ledger.Address
		why     string
	}{
		{bound("runs"), ""},
		{bound("dead"), "the sandbox does not run"},
		{bound("orphan"), "the pod is gone"},
		{bound("unlisted"), "the runtime does not list the sandbox"},
		{kept("ten-0", ledger.StateRetained, time.Minute), ""},
		{kept("ten-0", ledger.StateRetained, time.Minute), "10.0.0.5 is kept for the same pod"},
		{kept("ten-1", ledger.StateRetained, -time.Second), "its retention is over"},
		{kept("ten-9", ledger.StateRetained, time.Minute), "no workload wants the pod"},
		{ledger.Address{State: ledger.StateUnreadable}, "it is nobody's"},
	} {
		ip := netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + i)})
		book[ip] = is.address
		if is.why != "" {
			want[ip.String()] = is.why
		}
	}
	all := unexplained(view{book: book}, sandboxes, func(uid string) bool { return uid == "uid" },
		func(k ledger.Key) bool { return k.Pod != "ten-9" })
	for _, what := range all {
		ip, _, _ := strings.Cut(what, " ")
		if why, ok := want[ip]; !ok || !strings.HasSuffix(what, ": "+why) {
			t.Errorf("%q, want %q", what, why)
		}
		delete(want, ip)
	}
	for ip, why := range want {
		t.Errorf("nothing about %s: %s", ip, why)
	}
}

func TestAWrongAnswerIsAViolation(t *testing.T) {
	for _, is := range []struct {
		name   string
		answer lab.Answer
		err    error
		want   []string
	}{
		{"the right pod", lab.Answer{Name: "ten-0", Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}, nil, nil},
		{"no answer", lab.Answer{}, fmt.Errorf("no route"), nil},
		{"another pod", lab.Answer{Name: "plain-x"}, nil, []string{"plain-x answers at the IP of ten-0"}},
		{"the right pod at a wrong address", lab.Answer{Name: "ten-0"}, nil, []string{"ten-0 answers at the IP of ten-0"}},
	} {
		t.Run(is.name, func(t *testing.T) {
			w := newWorld(t)
			w.lives.seePod(w.pod("ten-0", "a", "node-1", "10.0.0.1"))
			a := &asker{
				report: w.report, weather: w.weather, lives: w.lives, silent: map[string]time.Time{},
				ask: func(context.Context, netip.Addr) (lab.Answer, error) { return is.answer, is.err },
			}
			a.probe(t.Context(), w.lives.running()[0])
			w.says(is.want...)
		})
	}
}

func TestAPodThatIsNotHeardForLongIsAViolation(t *testing.T) {
	w := newWorld(t)
	w.lives.seePod(w.pod("ten-0", "a", "node-1", "10.0.0.1"))
	a := &asker{
		report: w.report, weather: w.weather, lives: w.lives, silent: map[string]time.Time{},
		ask: func(context.Context, netip.Addr) (lab.Answer, error) { return lab.Answer{}, fmt.Errorf("no route") },
	}
	pod := w.lives.running()[0]
	a.probe(t.Context(), pod)
	w.pass(longestSilence / 2)
	w.weather.strikes(pod.node, "was off", time.Second) // between two probes
	w.pass(longestSilence/2 + time.Second)
	a.probe(t.Context(), pod)
	w.pass(longestSilence)
	a.probe(t.Context(), pod)
	w.says()
	w.pass(2 * time.Second)
	a.probe(t.Context(), pod)
	w.says("has not answered for")
}
