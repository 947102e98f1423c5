package pool

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func TestAnAddressChangesHandsOnlyUponProof(t *testing.T) {
	const ready, lost, off, forgot = "ready", "lost", "off", "forgot"
	nodes := func(states ...string) map[string]Node {
		all := map[string]Node{}
		for i, s := range states {
			if s != "" {
				name := fmt.Sprintf("n%d", i+1)
				all[name] = Node{Name: name, Ready: s == ready || s == forgot, Off: s == off || s == forgot}
			}
		}
		return all
	}
	says := func(round int64, node string, held ...UID) map[string]Report {
		a := Report{Node: node, Round: round}
		for _, uid := range held {
			a.Held = append(a.Held, Held{UID: uid})
		}
		return map[string]Report{node: a}
	}
	alive := &Pod{UID: "a", Node: "n1"}
	for _, c := range []struct {
		name    string
		phase   Phase
		of      UID
		pod     *Pod
		end     *End
		nodes   map[string]Node
		reports map[string]Report
		held    []string
		asked   int64
		verdict Verdict
		says    string
		ask     bool
		remedy  bool
		looks   int // conditions to be read past the caches
	}{
		{name: "its pod runs", phase: Bound, of: "a", pod: alive, nodes: nodes(ready), verdict: Wait,
			says: "pod ns/web-0 has it"},
		{name: "its pod runs on a node that is out of service", phase: Bound, of: "a", pod: alive, nodes: nodes(off),
			verdict: Wait},
		{name: "its pod is ending", phase: Bound, of: "a", pod: &Pod{UID: "a", Node: "n1", Ending: true}, nodes: nodes(ready),
			verdict: Wait, says: "node n1 has not reported yet"},
		{name: "its pod is over, and was not told of it", phase: Bound, of: "a",
			pod: &Pod{UID: "a", Node: "n1", Terminal: true}, nodes: nodes(ready), verdict: Wait, says: "has not reported yet",
			ask: true},
		{name: "its pod is over, and was told of it", phase: Bound, of: "a",
			pod:   &Pod{UID: "a", Node: "n1", Terminal: true, Assigned: []Address{}},
			nodes: nodes(ready), verdict: Wait, says: "has not reported yet"},
		{name: "its pod is over, was not told of it, and its node answers without it", phase: Bound, of: "a",
			pod: &Pod{UID: "a", Node: "n1", Terminal: true}, nodes: nodes(ready), asked: 7, reports: says(7, "n1"),
			verdict: Yes, says: "does not have pod", looks: 1},
		{name: "its pod is over, was not told of it, and its node answers with it", phase: Bound, of: "a",
			pod: &Pod{UID: "a", Node: "n1", Terminal: true}, nodes: nodes(ready), asked: 7, reports: says(7, "n1", "a"),
			verdict: Wait, says: "has not reported yet", ask: true},
		{name: "its pod is ending, was not told of it, and its node answered before", phase: Bound, of: "a",
			pod: &Pod{UID: "a", Node: "n1", Ending: true}, nodes: nodes(ready), asked: 7, reports: says(7, "n1"),
			verdict: Wait, says: "has not reported yet"},
		{name: "its pod is over, and the node says so", phase: Retained, of: "a",
			pod:   &Pod{UID: "a", Node: "n1", Terminal: true},
			nodes: nodes(ready), verdict: Yes, says: "node n1 reports"},
		{name: "the node says that it is gone", phase: Retained, of: "a", end: &End{Node: "n1", Final: true, At: noon},
			nodes: nodes(lost), verdict: Yes},
		{name: "the node says that it is gone, and its end was not seen", phase: Retained, of: "a", nodes: nodes(lost),
			verdict: Yes, looks: 1},
		{name: "another node than the pod's says that it is gone", phase: Retained, of: "a",
			pod: &Pod{UID: "a", Node: "n2", Ending: true}, nodes: nodes(ready, ready), verdict: Wait,
			says: "node n2 has not reported yet"},
		{name: "another node says that it is gone, and it has none yet", phase: Retained, of: "a",
			pod: &Pod{UID: "a", Ending: true}, nodes: nodes(ready, ready), verdict: Wait, says: "is being deleted"},
		{name: "deleted, and another node than its own says that it is gone", phase: Retained, of: "a",
			end: &End{Node: "n2", At: noon}, nodes: nodes(ready, ready), verdict: Wait, says: "node n2 has not reported yet"},
		{name: "deleted, and another node than its own had it, and has not", phase: Bound, of: "a",
			end: &End{Node: "n2", At: noon}, nodes: nodes(ready, ready), asked: noon.UnixNano(),
			reports: says(noon.UnixNano(), "n1"), verdict: Wait, says: "node n2 has not reported yet"},
		{name: "deleted, and another node than its own, which is off, had it", phase: Bound, of: "a",
			end: &End{Node: "n2", At: noon}, nodes: nodes(off, lost), verdict: Never, ask: true,
			says: "node n2, which is not Ready"},
		{name: "gone, as a node says, and another one has it", phase: Retained, of: "a", nodes: nodes(ready, ready),
			held: []string{"n2"}, verdict: Wait, ask: true, says: "the node of pod ns/web-0 is unknown"},
		{name: "its node is unknown, and a node that had it has not", held: []string{"n1"}, nodes: nodes(ready, ready), asked: 7,
			reports: says(7, "n1"), verdict: Wait, says: "node n2 has not answered"},
		{name: "deleted before it had a node, but a node had it before a restore", end: &End{Final: true, At: noon},
			nodes: nodes(ready), held: []string{"n1"}, verdict: Wait, ask: true},
		{name: "the node said so of an earlier pod", phase: Retained, of: "b", nodes: nodes(ready), verdict: Wait, ask: true,
			says: "the node of pod ns/web-0 is unknown"},
		{name: "deleted by force, its node Ready", phase: Bound, of: "a", end: &End{Node: "n1", Final: true, At: noon},
			nodes: nodes(ready), verdict: Wait, says: "node n1 has not reported yet"},
		{name: "and nothing comes", phase: Bound, of: "a", end: &End{Node: "n1", Final: true, At: noon.Add(-time.Hour)},
			nodes: nodes(ready), verdict: Wait, ask: true},
		{name: "deleted, its node not Ready", phase: Bound, of: "a", nodes: nodes(lost), verdict: Never, ask: true,
			says: "node n1, which is not Ready"},
		{name: "deleted, its node out of service", phase: Bound, of: "a", nodes: nodes(off), verdict: Yes, looks: 2},
		{name: "deleted, its node Ready, with a taint that was forgotten", phase: Bound, of: "a", nodes: nodes(forgot),
			verdict: Wait, ask: true, says: "has no effect while the node is Ready", remedy: true},
		{name: "its node is unknown, the other node Ready, with a taint that was forgotten", nodes: nodes(ready, forgot),
			asked: 7, reports: says(7, "n1"), verdict: Wait, says: "node n2 has not answered"},
		{name: "deleted, its Node deleted", phase: Bound, of: "a", nodes: nodes("", ready), verdict: Yes, looks: 2},
		{name: "deleted before it had a node", end: &End{Final: true, At: noon}, nodes: nodes(lost), verdict: Yes,
			says: "never had a node", looks: 1},
		{name: "deleted, as a watch that was interrupted says", end: &End{At: noon}, nodes: nodes(ready), verdict: Wait,
			ask: true},
		{name: "deleted before it had a node, but a node has it", end: &End{Final: true, At: noon}, phase: Bound, of: "a",
			nodes: nodes(ready), verdict: Wait, ask: true},
		{name: "its node unknown, one node silent", nodes: nodes(ready, ready), asked: 7, reports: says(7, "n1"),
			verdict: Wait, says: "node n2 has not answered"},
		{name: "its node unknown, one node lost", nodes: nodes(ready, lost), asked: 7, reports: says(7, "n1"),
			verdict: Never, says: "node n2 is not Ready"},
		{name: "its node unknown, the other node off", nodes: nodes(ready, off), asked: 7, reports: says(7, "n1"),
			verdict: Yes, looks: 3},
		{name: "its node unknown, all have reported", nodes: nodes(ready), asked: 7, reports: says(8, "n1", "b"),
			verdict: Yes, looks: 2},
		{name: "the report is older", nodes: nodes(ready), asked: 7, reports: says(6, "n1"), verdict: Wait},
		{name: "a known node answers, without it", phase: Bound, of: "a", nodes: nodes(ready), asked: 7,
			reports: says(7, "n1"), verdict: Yes},
		{name: "a known node answers, with it", phase: Bound, of: "a", nodes: nodes(ready), asked: noon.UnixNano(),
			reports: says(noon.UnixNano(), "n1", "a"), verdict: Wait},
	} {
		t.Run(c.name, func(t *testing.T) {
			ip := &PodIP{Namespace: "ns", PodName: "web-0", PodUID: "a", Phase: c.phase, StatusUID: c.of}
			if c.phase != "" {
				ip.Node = "n1"
			}
			f := Fence(Situation{Now: noon, IP: ip, Pod: c.pod, End: c.end, Nodes: c.nodes, Reports: c.reports, Asked: c.asked,
				Held: c.held})
			if f.Verdict != c.verdict || f.Ask != c.ask || len(f.If) != c.looks || f.Reason == "" ||
				!strings.Contains(f.Reason, c.says) || (f.Remedy != "") != (c.verdict == Never || c.remedy) {
				t.Errorf("found %+v", f)
			}
		})
	}
}

// bookOf is a cluster with one pool and two nodes.
func bookOf(t *testing.T, spec Spec) *Book {
	t.Helper()
	r, err := Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	b := NewBook(Audit{Version: "1", Mark: noon})
	b.SetPool(Pool{Name: "p", Version: "1", Range: r, Held: true})
	b.SetNode(Node{Name: "n1", Ready: true})
	return b
}

func gatedPod(n int) Pod {
	return Pod{UID: UID(fmt.Sprintf("u%d", n)), Version: "1", Namespace: "ns", Name: fmt.Sprintf("web-%d", n), Gated: true,
		Created: noon.Add(time.Duration(n) * time.Second), Wants: []Want{{"net", "eth0", []string{"p"}}}}
}

// place carries a plan out, as if nothing could fail, and returns the first address.
func place(t *testing.T, b *Book, pod Pod, now time.Time) (netip.Addr, Plan) {
	t.Helper()
	b.SetPod(pod)
	plan := b.Place(pod.UID, now)
	for _, w := range plan.Writes {
		switch w := w.(type) {
		case CreateIP:
			w.PodIP.Version, w.PodIP.Created = "1", now
			b.SetPodIP(w.PodIP)
		case UpdateIP:
			b.SetPodIP(w.PodIP)
		case PlacePod:
			pod.Assigned, pod.Gated = w.Addresses, false
			b.SetPod(pod)
			return w.Addresses[0].Prefix.Addr(), plan
		}
	}
	return netip.Addr{}, plan
}

func TestAddressesAreGivenRoundRobinAndTheLongestFreeOneLast(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.1-10.6.0.4"}})
	var got []string
	give := func(n int) {
		a, plan := place(t, b, gatedPod(n), noon.Add(time.Duration(n)*time.Second))
		if !a.IsValid() {
			t.Fatalf("pod %d gets nothing: %+v", n, plan)
		}
		got = append(got, a.String()[len("10.6.0."):])
	}
	give(1)
	give(2)
	for _, n := range []string{"2", "1"} {
		b.RemovePod(UID("u"+n), "100", noon)
		b.RemovePodIP(netip.MustParseAddr("10.6.0." + n))
	}
	for n := 3; n < 7; n++ {
		give(n)
	}
	if want := []string{"1", "2", "3", "4", "2", "1"}; !slices.Equal(got, want) {
		t.Errorf("given %v, want %v", got, want)
	}
}

func TestAPoolIsUsedUpBeforeTheNextIsTouched(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.1-10.6.0.3"}})
	next, err := Parse(Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.11-10.6.0.12"}})
	if err != nil {
		t.Fatal(err)
	}
	b.SetPool(Pool{Name: "next", Version: "1", Range: next, Held: true})
	var got []string
	for n := range 5 {
		pod := gatedPod(n)
		pod.Wants[0].Pools = []string{"p", "next"}
		a, plan := place(t, b, pod, noon)
		if !a.IsValid() {
			t.Fatalf("pod %d gets nothing: %+v", n, plan)
		}
		got = append(got, b.PodIP(a).Pool)
	}
	if want := []string{"p", "p", "p", "next", "next"}; !slices.Equal(got, want) {
		t.Errorf("given of %v, want %v", got, want)
	}
}

func TestAHugePoolGivesAtOnce(t *testing.T) {
	b := bookOf(t, Spec{Mode: Routed, Subnet: "fd00::/32"})
	for n := range 5000 {
		if a, plan := place(t, b, gatedPod(n), noon.Add(time.Duration(n)*time.Second)); !a.IsValid() {
			t.Fatalf("%+v", plan)
		}
	}
	if c := b.Count("p", noon); c.Used != 5000 || c.Free == 0 {
		t.Errorf("%+v", c)
	}
}

func TestPodsThatWaitGoOldestFirst(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.1"}})
	if a, _ := place(t, b, gatedPod(1), noon); !a.IsValid() {
		t.Fatal("the first pod gets nothing")
	}
	for _, n := range []int{3, 2, 4} {
		if _, plan := place(t, b, gatedPod(n), noon); !strings.Contains(plan.Reason, "pool p has no free address, of 1") {
			t.Errorf("pod %d: %+v", n, plan)
		}
	}
	if got := b.Waiting("p"); !slices.Equal(got, []UID{"u2", "u3", "u4"}) {
		t.Errorf("%v wait", got)
	}
	b.RemovePod("u1", "100", noon)
	b.RemovePodIP(netip.MustParseAddr("10.6.0.1"))
	if a, plan := place(t, b, gatedPod(3), noon); a.IsValid() ||
		!strings.Contains(plan.Reason, "1 pod has waited longer") {
		t.Errorf("a pod was overtaken: %+v", plan)
	}
	if a, plan := place(t, b, gatedPod(2), noon); !a.IsValid() {
		t.Errorf("the oldest gets nothing: %+v", plan)
	}
}

func TestAPodGetsItsOwnAddressBack(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24", Gateway: "10.6.0.254"})
	first, _ := place(t, b, gatedPod(1), noon)
	runs := *b.Pod("u1")
	runs.Node = "n1"
	b.SetPod(runs)
	b.RemovePod("u1", "100", noon)
	again := gatedPod(1)
	again.UID = "u1-again"
	ip := *b.PodIP(first)
	ip.Phase, ip.StatusUID, ip.Node = Bound, "u1", "n1"
	b.SetPodIP(ip)
	// The pool is disabled, serves others and has other addresses now: it is kept for who has it.
	r, err := Parse(Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.77"}})
	if err != nil {
		t.Fatal(err)
	}
	b.SetPool(Pool{Name: "p", Range: r, Disabled: true, Serves: func(map[string]string) bool { return false }, Held: true})
	if c := b.Count("p", noon); c.OutOfRange != 1 || c.Used != 0 || c.Total != 1 {
		t.Errorf("%+v", c)
	}
	_, plan := place(t, b, again, noon)
	if plan.Writes != nil || !strings.Contains(plan.Reason, first.String()+" is not free yet") {
		t.Errorf("%+v", plan)
	}
	ip = *b.PodIP(first)
	ip.Phase = Retained
	b.SetPodIP(ip)
	got, plan := place(t, b, again, noon)
	if got != first {
		t.Fatalf("got %s, want %s: %+v", got, first, plan)
	}
	told := plan.Writes[len(plan.Writes)-1].(PlacePod).Addresses[0]
	if told.Last != "n1" || told.Prefix.Bits() != 24 || told.Pool != "p" {
		t.Errorf("told %+v", told)
	}
	if other, plan := place(t, b, gatedPod(2), noon); other.IsValid() || !strings.Contains(plan.Reason, "is disabled") {
		t.Errorf("another pod got %s: %+v", other, plan)
	}
}

// Nobody here has given it the address with which it runs: neither may it get another one, nor anybody else this one.
func TestAPodThatRunsAlreadyKeepsWhatItRunsWith(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.1-10.6.0.2"}})
	old := gatedPod(1)
	old.Gated, old.Node, old.ReportedIP = false, "n1", netip.MustParseAddr("10.6.0.1")
	if a, plan := place(t, b, old, noon); a.IsValid() || !strings.Contains(plan.Reason, "it runs with 10.6.0.1") ||
		!strings.Contains(plan.Remedy, "import spiderpool") {
		t.Errorf("it is given %s: %+v", a, plan)
	}
	if a, plan := place(t, b, gatedPod(2), noon); a.String() != "10.6.0.2" {
		t.Errorf("another pod is given %s: %+v", a, plan)
	}
	if a, plan := place(t, b, gatedPod(3), noon); a.IsValid() {
		t.Errorf("a third pod is given %s: %+v", a, plan)
	}

	// Taken over, it is told, though the address was released; and it is not surplus, though the pod ends untold.
	h := Address{Interface: "eth0", Pool: "p", Mode: L2, Prefix: netip.PrefixFrom(old.ReportedIP, 24)}
	ip := old.made(h)
	ip.Adopted, ip.UID, ip.Version, ip.Release = true, "ip-1", "1", true
	b.SetPodIP(ip)
	if a, plan := place(t, b, old, noon); a != old.ReportedIP || len(plan.Writes) != 1 ||
		plan.Writes[0].(PlacePod).Addresses[0].Last != "n1" {
		t.Errorf("it is told %s: %+v", a, plan)
	}
	old.Keep = Keep{For: time.Hour} // which is the pod's to say
	if a, plan := place(t, b, old, noon); a != old.ReportedIP || len(plan.Writes) != 2 ||
		plan.Writes[0].(UpdateIP).PodIP.Keep != old.Keep || !plan.Writes[0].(UpdateIP).PodIP.Adopted {
		t.Errorf("it is told %s: %+v", a, plan)
	}
	old.Ending = true
	b.SetPod(old)
	if plan := b.Review(old.ReportedIP, noon, nil); plan.Writes != nil ||
		!strings.Contains(plan.Reason, "n1 has not reported") {
		t.Errorf("its address goes while it ends: %+v", plan)
	}
	b.RemovePod(old.UID, "100", noon)
	again := gatedPod(1)
	again.UID = "u1-again"
	ip.Release = false
	ip.Phase, ip.StatusUID, ip.Node = Retained, old.UID, "n1"
	b.SetPodIP(ip)
	_, plan := place(t, b, again, noon)
	if update, ok := plan.Writes[0].(UpdateIP); !ok || update.PodIP.Adopted || update.PodIP.PodUID != again.UID {
		t.Errorf("the successor's is still adopted: %+v", plan)
	}
}

// A status that does not say since when an address is retained ends no retention.
func TestARetentionBeginsOnceItIsNoted(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	pod := gatedPod(1)
	pod.Keep.For = time.Hour
	a, _ := place(t, b, pod, noon)
	b.RemovePod(pod.UID, "100", noon)
	ip := *b.PodIP(a)
	ip.Phase, ip.StatusUID, ip.Node = Retained, pod.UID, "n1"
	b.SetPodIP(ip)
	plan := b.Review(a, noon, nil)
	if len(plan.Writes) != 1 {
		t.Fatalf("%+v", plan)
	}
	if w, ok := plan.Writes[0].(StatusIP); !ok || !w.PodIP.Since.Equal(noon) || w.PodIP.Phase != Retained ||
		w.PodIP.Node != "n1" {
		t.Fatalf("%+v", plan.Writes[0])
	}
	ip.Since = noon
	b.SetPodIP(ip)
	if plan := b.Review(a, noon, nil); plan.Writes != nil || !plan.Until.Equal(noon.Add(time.Hour)) {
		t.Errorf("%+v", plan)
	}
	if plan := b.Review(a, noon.Add(time.Hour), nil); len(plan.Writes) != 1 {
		t.Errorf("%+v", plan)
	}
}

// An uninstallation takes the finalizers off, and the next installation puts them back.
func TestAFinalizerThatIsLostComesBack(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	a, _ := place(t, b, gatedPod(1), noon)
	p := *b.Pool("p")
	p.Held = false
	b.SetPool(p)
	ip := *b.PodIP(a)
	ip.Held, ip.Version = false, "2"
	b.SetPodIP(ip)
	plan := b.ReviewPool("p")
	if len(plan.Writes) != 1 || !plan.Writes[0].(HoldPool).Held || plan.Writes[0].(HoldPool).Version != "1" {
		t.Errorf("of the pool %+v", plan)
	}
	plan = b.Review(a, noon, nil)
	if len(plan.Writes) != 1 || !plan.Writes[0].(UpdateIP).PodIP.Held || plan.Writes[0].(UpdateIP).PodIP.Version != "2" {
		t.Errorf("of the address %+v", plan)
	}
	ip.Deleting = true
	b.SetPodIP(ip)
	if plan := b.Review(a, noon, nil); plan.Writes != nil {
		t.Errorf("of one that is deleted %+v", plan)
	}
	b.RemovePodIP(a)
	if plan := b.ReviewPool("p"); plan.Writes != nil {
		t.Errorf("of a pool that has nothing %+v", plan)
	}
}

// What a node says of an address is less than what its pod does, by which it ends with its workload.
func TestAfterARestoreAnAddressIsKeptAsItsPodSays(t *testing.T) {
	a := netip.MustParseAddr("10.6.0.7")
	held := Held{Addr: a, UID: "u1", Namespace: "ns", PodName: "web-1", Pool: "unknown", Mode: L2, Interface: "eth0",
		Keep: Keep{WhileOwned: true}}
	pod := gatedPod(1)
	pod.Gated, pod.Node, pod.Identity = false, "n1", "web"
	pod.Keep = Keep{WhileOwned: true, Scaled: true, Deleted: true}
	pod.Workload = Workload{Kind: "StatefulSet", Name: "web", UID: "of-web"}
	pod.Assigned = []Address{{Network: "net", Interface: "eth0", Pool: "p", Mode: L2, Prefix: netip.PrefixFrom(a, 24)}}
	for _, c := range []struct {
		name string
		pod  func(b *Book)
		want PodIP
	}{
		{"the cluster has the pod", func(b *Book) { b.SetPod(pod) },
			PodIP{Addr: a, Pool: "p", Mode: L2, Namespace: "ns", PodName: "web-1", Identity: "web", PodUID: "u1",
				Network: "net", Interface: "eth0", Keep: pod.Keep, Workload: pod.Workload, Held: true}},
		{"it has the pod, and not what it was told", func(b *Book) {
			untold := pod
			untold.Assigned = nil
			b.SetPod(untold)
		}, PodIP{Addr: a, Pool: "unknown", Mode: L2, Namespace: "ns", PodName: "web-1", Identity: "web", PodUID: "u1",
			Interface: "eth0", Keep: pod.Keep, Workload: pod.Workload, Held: true}},
		{"it has another pod of the name", func(b *Book) {
			other := pod
			other.UID, other.Assigned = "u2", nil
			b.SetPod(other)
		}, PodIP{Addr: a, Pool: "unknown", Mode: L2, Namespace: "ns", PodName: "web-1", PodUID: "u1", Interface: "eth0",
			Keep: held.Keep, Held: true}},
	} {
		b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
		b.SetAudit(Audit{Version: "1", Mark: noon, Recalling: true, Round: 1, Epoch: 1})
		b.SetReport(Report{Node: "n1", Round: 1, Held: []Held{held}})
		c.pod(b)
		plan := b.Recall(noon)
		if len(plan.Writes) != 1 {
			t.Errorf("%s: %+v", c.name, plan)
			continue
		}
		if is := plan.Writes[0].(CreateIP).PodIP; is != c.want {
			t.Errorf("%s:\n%+v, want\n%+v", c.name, is, c.want)
		}
	}
}

// A pod that cannot start, because another machine has its address, gets another one; one that had it before waits.
func TestAnAddressOfAnotherMachineIsQuarantined(t *testing.T) {
	sees := func(pod Pod, kept bool) (*Book, netip.Addr, Plan) {
		b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.1-10.6.0.2"}})
		if kept {
			was := pod
			was.UID = "earlier"
			a, _ := place(t, b, was, noon)
			b.RemovePod(was.UID, "100", noon)
			ip := *b.PodIP(a)
			ip.Phase, ip.StatusUID, ip.Node = Retained, was.UID, "n0"
			b.SetPodIP(ip)
		}
		a, _ := place(t, b, pod, noon)
		runs := *b.Pod(pod.UID)
		runs.Node = "n1"
		b.SetPod(runs)
		ip := *b.PodIP(a)
		ip.Phase, ip.StatusUID, ip.Node, ip.Conflict = Allocated, pod.UID, "n1", "02:00:00:00:00:01"
		b.SetPodIP(ip)
		return b, a, b.Review(a, noon, nil)
	}
	pod := gatedPod(1)
	pod.Workload, pod.Keep = Workload{Kind: "StatefulSet", Name: "web"}, Keep{WhileOwned: true, Scaled: true}
	shared := pod
	shared.Identity = "web"
	fresh := pod
	fresh.AllocateNew = true
	bare := pod
	bare.Workload = Workload{}
	for _, c := range []struct {
		name  string
		pod   Pod
		kept  bool
		waits string
	}{
		{"a new address", pod, false, ""},
		{"one that the pod had before", pod, true, "pod ns/web-1 keeps it, and waits"},
		{"one of a shared identity", shared, true, ""},
		{"one that the pod had before, of a pod that does not wait", fresh, true, ""},
		{"that of a pod which nobody makes again", bare, false, "delete pod ns/web-1 and create it again"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, a, plan := sees(c.pod, c.kept)
			if !strings.Contains(plan.Reason, "02:00:00:00:00:01") {
				t.Errorf("the MAC address is not named: %+v", plan)
			}
			if c.waits != "" {
				if plan.Writes != nil || !strings.Contains(plan.Remedy, c.waits) {
					t.Errorf("%+v", plan)
				}
				return
			}
			if len(plan.Writes) != 2 {
				t.Fatalf("%+v", plan)
			}
			held := plan.Writes[0].(UpdateIP).PodIP
			if held.PodUID != c.pod.UID || !held.Quarantine.Until.After(noon) || (held.Keep == Keep{}) == c.kept {
				t.Errorf("%+v", held)
			}
			if end := plan.Writes[1].(EndPod); end.UID != c.pod.UID || end.If == nil {
				t.Errorf("%+v", end)
			}
			b.SetPodIP(held)
			// Killed in between, the next one ends the pod.
			if plan := b.Review(a, noon, nil); len(plan.Writes) != 1 || plan.Writes[0].(EndPod).UID != c.pod.UID {
				t.Errorf("%+v", plan)
			}
			// The successor gets another address, and this one goes to nobody before the pod is gone and the time is up.
			b.RemovePod(c.pod.UID, "100", noon)
			next := c.pod
			next.UID, next.Created = "next", noon.Add(time.Minute)
			if got, plan := place(t, b, next, noon.Add(time.Minute)); !got.IsValid() || got == a {
				t.Errorf("got %s after %s: %+v", got, a, plan)
			}
			if plan := b.Review(a, noon.Add(time.Minute), nil); plan.Writes != nil || !plan.Until.Equal(held.Quarantine.Until) {
				t.Errorf("%+v", plan)
			}
			if other, plan := place(t, b, gatedPod(3), noon.Add(2*time.Minute)); other.IsValid() {
				t.Errorf("somebody got %s: %+v", other, plan)
			}
		})
	}
}

// A node has no say about pods of other nodes.
func TestAConflictIsForTheNodeOfThePodToReport(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	pod := gatedPod(1)
	pod.Workload = Workload{Kind: "StatefulSet", Name: "web"}
	a, _ := place(t, b, pod, noon)
	ip := *b.PodIP(a)
	ip.Phase, ip.StatusUID, ip.Node, ip.Conflict = Allocated, pod.UID, "n2", "02:00:00:00:00:01"
	b.SetPodIP(ip)
	for _, node := range []string{"", "n1"} {
		is := *b.Pod(pod.UID)
		is.Node = node
		b.SetPod(is)
		plan := b.Review(a, noon, nil)
		if node == "" && plan.Writes != nil {
			t.Errorf("on no node: %+v", plan)
		}
		if node == "" {
			continue
		}
		if len(plan.Writes) != 1 {
			t.Fatalf("on %s: %+v", node, plan)
		}
		if back, ok := plan.Writes[0].(StatusIP); !ok || back.PodIP.Conflict != "" || back.PodIP.Node != node {
			t.Errorf("on %s it is not taken back: %+v", node, plan)
		}
	}
}

// A controller was killed after it had claimed an address for the next pod: that it was used before is not forgotten.
func TestAnAddressThatWasClaimedAndNotToldIsStillKept(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	pod := gatedPod(1)
	b.SetPodIP(PodIP{Addr: netip.MustParseAddr("10.6.0.7"), Version: "2", Pool: "p", Mode: L2, Namespace: pod.Namespace,
		PodName: pod.Name, PodUID: pod.UID, Network: "net", Interface: "eth0", Phase: Retained, StatusUID: "earlier",
		Node: "n1"})
	_, plan := place(t, b, pod, noon)
	if told := plan.Writes[len(plan.Writes)-1].(PlacePod).Addresses[0]; told.Last != "n1" {
		t.Errorf("told %+v", told)
	}
}

// After a restore a pod may have been given an address before its node says with which one it runs.
func TestAPodIsToldTheAddressThatItRunsWith(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	pod := gatedPod(1)
	pod.Gated, pod.Node = false, "n1"
	claimed := pod.made(Address{Network: "net", Interface: "eth0", Pool: "p", Mode: L2,
		Prefix: netip.MustParsePrefix("10.6.0.1/24")})
	claimed.Version = "2"
	runs := claimed
	runs.Addr, runs.Phase, runs.StatusUID, runs.Node = netip.MustParseAddr("10.6.0.2"), Bound, pod.UID, "n1"
	b.SetPodIP(claimed)
	b.SetPodIP(runs)
	if a, plan := place(t, b, pod, noon); a != runs.Addr {
		t.Errorf("it runs with %s and is told %s: %+v", runs.Addr, a, plan)
	}

	// It waits while what its node says is another's.
	other := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	other.SetPodIP(claimed)
	other.SetReport(Report{Node: "n1", Held: []Held{{Addr: runs.Addr, UID: pod.UID, Interface: "eth0"}}})
	if a, plan := place(t, other, pod, noon); a.IsValid() || !strings.Contains(plan.Reason, "it runs with 10.6.0.2") {
		t.Errorf("it is told %s: %+v", a, plan)
	}
	over := pod
	over.Terminal = true
	other.SetPod(over)
	if plan := other.Review(claimed.Addr, noon, nil); plan.Writes == nil {
		t.Errorf("it has ended without %s, and that is kept: %+v", claimed.Addr, plan)
	}

	// If it was told the other one all the same, what it runs with is still nobody else's.
	pod.Assigned = []Address{{Network: "net", Interface: "eth0", Pool: "p", Mode: L2,
		Prefix: netip.PrefixFrom(claimed.Addr, 24)}}
	b.SetPod(pod)
	if plan := b.Review(runs.Addr, noon, nil); plan.Writes != nil {
		t.Errorf("what it runs with is freed: %+v", plan)
	}
	runs.Phase = Retained
	runs.Version = "3"
	b.SetPodIP(runs)
	if plan := b.Review(runs.Addr, noon, nil); plan.Writes == nil {
		t.Errorf("nothing runs with %s, and it is kept: %+v", runs.Addr, plan)
	}
}

// The taint manager deletes pods by name, and so the successor of the one it means, which waits at the gate.
func TestAPodThatIsDeletedBeforeItIsToldTakesNoAddressAlong(t *testing.T) {
	for _, deletion := range []string{"seen", "not seen"} {
		b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
		a := netip.MustParseAddr("10.6.0.7")
		between := gatedPod(1)
		between.Keep.WhileOwned = true
		b.SetPod(between)
		b.SetPodIP(PodIP{Addr: a, Version: "2", Pool: "p", Mode: L2, Namespace: between.Namespace, PodName: between.Name,
			PodUID: between.UID, Network: "net", Interface: "eth0", Keep: between.Keep, Held: true,
			Phase: Bound, StatusUID: "earlier", Node: "n1"})
		carryOut := func(plan Plan) {
			t.Helper()
			for _, w := range plan.Writes {
				switch w := w.(type) {
				case StatusIP:
					b.SetPodIP(w.PodIP)
				default:
					t.Fatalf("%s: %+v", deletion, w)
				}
			}
		}
		if deletion == "seen" {
			ending := between
			ending.Ending = true
			b.SetPod(ending)
			carryOut(b.Review(a, noon, nil))
		}
		b.RemovePod(between.UID, "100", noon)
		carryOut(b.Review(a, noon, nil))
		next := between
		next.UID = "next"
		got, plan := place(t, b, next, noon)
		if got != a {
			t.Fatalf("%s: the next pod has %v: %+v", deletion, got, plan)
		}
		if told := plan.Writes[len(plan.Writes)-1].(PlacePod).Addresses[0]; told.Last != "n1" {
			t.Errorf("%s: told %+v", deletion, told)
		}
	}
}

// An agent that lies, or its stolen token, may write the status of a PodIP before the node of its pod does.
func TestWhatAnotherNodeSaysOfAPodIsTakenBack(t *testing.T) {
	for _, phase := range []Phase{Bound, Retained, Allocated} {
		for _, state := range []string{"runs", "ends", "has ended"} {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			a, _ := place(t, b, gatedPod(1), noon)
			pod := *b.Pod("u1")
			pod.Node, pod.Ending = "n1", state == "ends"
			b.SetPod(pod)
			if state == "has ended" {
				b.RemovePod("u1", "", noon)
			}
			ip := *b.PodIP(a)
			ip.Phase, ip.StatusUID, ip.Node, ip.Conflict = phase, "u1", "n2", "02:00:00:00:00:02"
			b.SetPodIP(ip)
			plan := b.Review(a, noon, nil)
			if len(plan.Writes) != 1 {
				t.Fatalf("%s, %s: %+v", phase, state, plan)
			}
			again, ok := plan.Writes[0].(StatusIP)
			if is := again.PodIP; !ok || is.Phase != Allocated || is.StatusUID != "u1" || is.Node != "n1" || is.Conflict != "" {
				t.Fatalf("%s, %s: %+v", phase, state, plan)
			}
			b.SetPodIP(again.PodIP)
			if plan := b.Review(a, noon, nil); plan.Writes != nil {
				t.Errorf("%s, %s: and again: %+v", phase, state, plan)
			}
			// Its own agent may speak of it again, and does.
			l := Local{UID: "u1", Node: "n1", Exists: true, Netns: true, IP: &again.PodIP}
			if got := NextAction(l); got != (Action{Report: Bound}) {
				t.Errorf("%s, %s: its agent: %+v", phase, state, got)
			}
		}
	}
}

// That a pod is elsewhere than by the cluster can be so after a restore only.
func TestNoNodeEndsAPodByItsWordButOneFromBeforeARecall(t *testing.T) {
	for _, c := range []struct {
		name    string
		created time.Time
		ends    bool
	}{
		{"before it", noon.Add(-time.Hour), true},
		{"about as it began", noon.Add(Skew - 1), true},
		{"after it", noon.Add(Skew), false},
	} {
		b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
		b.SetAudit(Audit{Version: "1", Mark: noon, Epoch: noon.UnixNano()})
		pod := gatedPod(1)
		pod.Created = c.created
		b.SetPod(pod)
		b.SetReport(Report{Node: "n1", Round: noon.UnixNano(),
			Held: []Held{{UID: "u1", Addr: netip.MustParseAddr("10.6.0.9"), Interface: "eth0"}}})
		plan := b.Place("u1", noon.Add(time.Hour))
		ends := slices.ContainsFunc(plan.Writes, func(w Write) bool { _, ok := w.(EndPod); return ok })
		if placed := len(plan.Writes) > 1; ends != c.ends || placed == c.ends {
			t.Errorf("made %s: %+v", c.name, plan)
		}
		// Nor does its word in the status.
		b = bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
		b.SetPod(pod)
		ip := pod.made(Address{Network: "net", Interface: "eth0", Pool: "p", Mode: L2,
			Prefix: netip.MustParsePrefix("10.6.0.9/24")})
		ip.Version, ip.Phase, ip.StatusUID, ip.Node = "2", Bound, "u1", "n1"
		b.SetPodIP(ip)
		plan = b.Place("u1", noon)
		if len(plan.Writes) != 1 {
			t.Fatalf("made %s: %+v", c.name, plan)
		}
		if _, ok := plan.Writes[0].(PlacePod); !ok {
			t.Errorf("made %s: %+v", c.name, plan)
		}
	}
}

func TestAnAgentReportsAndBarsInThisOrder(t *testing.T) {
	mine := func(p Phase) *PodIP { return &PodIP{PodUID: "a", StatusUID: "a", Phase: p, Node: "n1"} }
	cidr, other := netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("10.244.2.0/24")
	placed := func(p Phase) *PodIP { return &PodIP{PodUID: "a", StatusUID: "a", Phase: p, Node: "n1", PodCIDR: cidr} }
	on := func(node string) *PodIP { return &PodIP{PodUID: "a", StatusUID: "a", Phase: Bound, Node: node} }
	for _, c := range []struct {
		name string
		l    Local
		want Action
	}{
		{"it runs", Local{UID: "a", Exists: true, Here: true, Netns: true, IP: mine("")}, Action{Report: Bound}},
		{"it runs, as reported", Local{UID: "a", Exists: true, Netns: true, IP: mine(Bound)}, Action{}},
		{"its sandbox crashed", Local{UID: "a", Exists: true, IP: mine(Bound)}, Action{}},
		{"it ends, and its namespace exists", Local{UID: "a", Exists: true, Ending: true, Netns: true, IP: mine(Bound)},
			Action{}},
		{"it ends, and its namespace is gone", Local{UID: "a", Exists: true, Ending: true, IP: mine(Bound)},
			Action{Bar: true, Report: Retained}},
		{"it succeeded", Local{UID: "a", Exists: true, Terminal: true, IP: mine(Bound)}, Action{Bar: true, Report: Retained}},
		{"deleted by force, its namespace exists", Local{UID: "a", Netns: true, IP: mine(Bound)}, Action{}},
		{"deleted by force", Local{UID: "a", IP: mine(Bound)}, Action{Bar: true, Report: Retained}},
		{"deleted, the address another pod's", Local{UID: "b", IP: mine(Bound)}, Action{Bar: true}},
		{"given up by the cluster, and it runs", Local{UID: "b", Netns: true, IP: mine(Bound)},
			Action{Down: true, Bar: true}},
		{"given up by the cluster with its address", Local{UID: "b", Netns: true}, Action{Down: true, Bar: true}},
		{"found with an address that is another pod's", Local{UID: "b", Found: true, Netns: true, IP: mine(Bound)},
			Action{Down: true, Bar: true}},
		{"found with an address that may be no pool's", Local{UID: "b", Found: true, Netns: true}, Action{}},
		{"found, an ordinary pod that the cluster has elsewhere", Local{UID: "b", Found: true, Netns: true, Elsewhere: true},
			Action{}},
		{"found with its own address, and its node off by somebody's word", Local{UID: "a", Found: true, Netns: true,
			Off: true, IP: &PodIP{PodUID: "a"}}, Action{Down: true, Bar: true}},
		{"found with its own address, and deleted by force", Local{UID: "a", Found: true, Netns: true,
			IP: &PodIP{PodUID: "a"}}, Action{}},
		{"deleted by force, its node off by somebody's word", Local{UID: "a", Netns: true, Off: true, IP: mine(Bound)},
			Action{Down: true, Bar: true}},
		{"its node off by somebody's word, and it exists",
			Local{UID: "a", Exists: true, Netns: true, Off: true, IP: mine(Bound)}, Action{}},
		{"its node off by somebody's word, and the watch behind",
			Local{UID: "a", Here: true, Netns: true, Off: true, IP: mine(Bound)}, Action{}},
		{"deleted by force, and it was never said that it was here", Local{UID: "a", IP: &PodIP{PodUID: "a"}},
			Action{Bar: true}},
		{"deleted by force, and another node had it", Local{UID: "a", Barred: true, IP: on("n2")}, Action{}},
		{"it runs, and another node has it", Local{UID: "a", Exists: true, Netns: true, IP: on("n2")}, Action{}},
		{"it ends, and never ran", Local{UID: "a", Exists: true, Here: true, Ending: true, IP: &PodIP{PodUID: "a"}},
			Action{Bar: true, Report: Retained}},
		{"the cluster has it elsewhere", Local{UID: "a", Elsewhere: true, Netns: true, IP: mine(Bound)},
			Action{Down: true, Bar: true}},
		{"the cluster has it elsewhere, and it is gone here", Local{UID: "a", Elsewhere: true, IP: mine(Bound)},
			Action{Bar: true}},
		{"another machine has the address", Local{UID: "a", Exists: true, Here: true, Conflict: "m", IP: mine("")},
			Action{Report: Allocated}},
		{"another machine has it, as reported", Local{UID: "a", Exists: true, Conflict: "m",
			IP: &PodIP{PodUID: "a", StatusUID: "a", Phase: Allocated, Node: "n1", Conflict: "m"}}, Action{}},
		{"another machine has it, and the pod was gone", Local{UID: "a", Exists: true, Conflict: "m", IP: mine(Retained)},
			Action{Bar: true}},
		{"another machine had it, and the pod runs", Local{UID: "a", Exists: true, Netns: true, Conflict: "m",
			IP: mine(Allocated)}, Action{Report: Bound}},
		{"another machine had it, and the pod ends", Local{UID: "a", Exists: true, Ending: true, Conflict: "m",
			IP: mine(Allocated)}, Action{Bar: true, Report: Retained}},
		{"another machine has the address of another pod", Local{UID: "b", Exists: true, Conflict: "m", IP: mine(Bound)},
			Action{}},
		{"nodes route to it, before it starts", Local{UID: "a", Exists: true, Here: true, PodCIDR: cidr,
			IP: &PodIP{PodUID: "a"}}, Action{Report: Allocated}},
		{"nodes route to it, after its predecessor", Local{UID: "a", Exists: true, Here: true, PodCIDR: cidr,
			IP: &PodIP{PodUID: "a", StatusUID: "0", Phase: Retained, Node: "n2", PodCIDR: other}}, Action{Report: Allocated}},
		{"nodes route to it, as reported", Local{UID: "a", Exists: true, PodCIDR: cidr, IP: placed(Allocated)}, Action{}},
		{"nodes route to it in another way by now", Local{UID: "a", Exists: true, PodCIDR: other, IP: placed(Allocated)},
			Action{Report: Allocated}},
		{"nodes route to it, and it runs", Local{UID: "a", Exists: true, Netns: true, PodCIDR: cidr, IP: placed(Allocated)},
			Action{Report: Bound}},
		{"it runs, and nodes are to route to it", Local{UID: "a", Exists: true, Netns: true, PodCIDR: cidr,
			IP: mine(Bound)}, Action{Report: Bound}},
		{"it runs, and nodes route to it", Local{UID: "a", Exists: true, Netns: true, PodCIDR: cidr, IP: placed(Bound)},
			Action{}},
		{"it runs, and it is not known how nodes route to it", Local{UID: "a", Exists: true, Netns: true,
			IP: placed(Bound)}, Action{}},
		{"nodes routed to it, and its sandbox crashed", Local{UID: "a", Exists: true, PodCIDR: cidr, IP: mine(Bound)},
			Action{}},
		{"nodes are to route to a pod that never comes", Local{UID: "a", Exists: true, Here: true, Barred: true,
			PodCIDR: cidr, IP: &PodIP{PodUID: "a"}}, Action{Report: Retained}},
		{"nodes are to route to a pod that was gone", Local{UID: "a", Exists: true, PodCIDR: cidr, IP: mine(Retained)},
			Action{Bar: true}},
		{"nodes are to route to a pod that is not known to be here", Local{UID: "a", Exists: true, PodCIDR: cidr,
			IP: &PodIP{PodUID: "a"}}, Action{}},
		{"nodes are to route to the pod of another address", Local{UID: "b", Exists: true, PodCIDR: cidr,
			IP: mine(Bound)}, Action{}},
		{"nodes routed to a pod that ends, and never ran", Local{UID: "a", Exists: true, Ending: true, PodCIDR: cidr,
			IP: placed(Allocated)}, Action{Bar: true, Report: Retained}},
		{"back from a backup", Local{UID: "a", Exists: true, Barred: true, IP: mine(Bound)}, Action{Report: Retained}},
		{"back from a backup, its bar lost", Local{UID: "a", Exists: true, IP: mine(Retained)}, Action{Bar: true}},
	} {
		c.l.Node = "n1"
		if got := NextAction(c.l); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
	for _, l := range []Local{{IP: on("n1")}, {Exists: true, IP: on("n2")}, {Exists: true, IP: &PodIP{PodUID: "a"}}} {
		if l.UID, l.Node = "a", "n1"; !l.LookUp() {
			t.Errorf("%+v is not looked up", l)
		}
	}
	if l := (Local{UID: "a", Node: "n1", Exists: true, IP: on("n1")}); l.LookUp() {
		t.Errorf("%+v is looked up", l)
	}
	for _, l := range []Local{{IP: on("n1")}, {Netns: true, Exists: true, IP: on("n1")},
		{Netns: true, Here: true, IP: on("n1")}, {Netns: true}, {Netns: true, Elsewhere: true, IP: on("n1")}} {
		if l.UID = "a"; l.LookUpNode() {
			t.Errorf("of %+v the node is looked up", l)
		}
	}
}

// one is a cluster with one pod and one node, past all caches.
type one struct {
	pod   *Pod
	node  *Node
	nodes []string
	audit Audit
	seen  Audit
	alloc Allocation
	err   error
}

func (o one) Pod(context.Context, string, string) (*Pod, error) { return o.pod, o.err }
func (o one) Node(context.Context, string) (*Node, error)       { return o.node, o.err }
func (o one) Nodes(context.Context) ([]string, error)           { return o.nodes, o.err }
func (o one) Seen() Audit                                       { return o.seen }
func (o one) Audit(context.Context) (Audit, error)              { return o.audit, o.err }
func (o one) Allocation(context.Context, netip.Addr) (Allocation, error) {
	return o.alloc, o.err
}
func (o one) Now() time.Time { return noon }

func TestWhatNoVersionCoversIsReadPastTheCaches(t *testing.T) {
	a, known := &Pod{UID: "a"}, &Audit{Version: "1", Mark: noon.Add(-time.Minute), Term: 7, Marks: 3}
	starting := &Pod{UID: "a", Node: "n1"}
	broken := errors.New("the API server is away")
	for _, c := range []struct {
		name  string
		check Check
		live  one
		want  error
	}{
		{"the pod is gone", Check{Gone: a}, one{}, nil},
		{"another pod has its name", Check{Gone: a}, one{pod: &Pod{UID: "b"}}, nil},
		{"the pod exists", Check{Gone: a}, one{pod: a}, ErrStale},
		{"whether it exists is unknown", Check{Gone: a}, one{err: broken}, broken},
		{"the pod must be over, and is gone", Check{Over: a}, one{}, nil},
		{"the pod must be over, and is", Check{Over: a}, one{pod: &Pod{UID: "a", Terminal: true}}, nil},
		{"the pod must be over, and ends", Check{Over: a}, one{pod: &Pod{UID: "a", Ending: true}}, ErrStale},
		{"the pod must be over, and another has its name", Check{Over: a}, one{pod: &Pod{UID: "b"}}, nil},
		{"the pod must be over, which is unknown", Check{Over: a}, one{err: broken}, broken},
		{"the pod must exist, and does", Check{There: a}, one{pod: a}, nil},
		{"the pod must exist, and has got a node", Check{There: a}, one{pod: &Pod{UID: "a", Node: "n1"}}, ErrStale},
		{"the pod must exist, and has the node that is known", Check{There: &Pod{UID: "a", Node: "n1"}},
			one{pod: &Pod{UID: "a", Node: "n1"}}, nil},
		{"the pod must exist, and ends", Check{There: a}, one{pod: &Pod{UID: "a", Ending: true}}, ErrStale},
		{"the pod must exist, and does not", Check{There: a}, one{}, ErrStale},
		{"the pod must not have started, and has not", Check{Starting: starting}, one{pod: &Pod{UID: "a", Node: "n1"}}, nil},
		{"its addresses are noted", Check{Starting: starting}, one{pod: &Pod{UID: "a", Node: "n1", Noted: true}}, ErrStale},
		{"it has started", Check{Starting: starting},
			one{pod: &Pod{UID: "a", Node: "n1", ReportedIP: netip.MustParseAddr("10.0.0.1")}}, ErrStale},
		{"it ends", Check{Starting: starting}, one{pod: &Pod{UID: "a", Node: "n1", Ending: true}}, ErrStale},
		{"it is on another node", Check{Starting: starting}, one{pod: &Pod{UID: "a", Node: "n2"}}, ErrStale},
		{"it is another pod", Check{Starting: starting}, one{pod: &Pod{UID: "b", Node: "n1"}}, ErrStale},
		{"it does not exist", Check{Starting: starting}, one{}, ErrStale},
		{"whether it has is unknown", Check{Starting: starting}, one{err: broken}, broken},
		{"the node is deleted", Check{Off: "n1"}, one{}, nil},
		{"the node is out of service", Check{Off: "n1"}, one{node: &Node{Off: true}}, nil},
		{"the node is out of service, and Ready", Check{Off: "n1"}, one{node: &Node{Off: true, Ready: true}}, ErrStale},
		{"the node is back", Check{Off: "n1"}, one{node: &Node{Ready: true}}, ErrStale},
		{"the node is not Ready", Check{Off: "n1"}, one{node: &Node{}}, ErrStale},
		{"whether the node exists is unknown", Check{Off: "n1"}, one{err: broken}, broken},
		{"the nodes are known", Check{Among: []string{"n1", ""}}, one{nodes: []string{"n1"}}, nil},
		{"a node is new", Check{Among: []string{""}}, one{nodes: []string{"n1"}}, ErrStale},
		{"nothing was forgotten", Check{Since: known}, one{audit: Audit{Version: "2", Mark: noon, Term: 7, Marks: 4}}, nil},
		{"the mark is older than the one known", Check{Since: known},
			one{audit: Audit{Version: "2", Mark: noon.Add(-61 * time.Second), Term: 7, Marks: 4}}, ErrStale},
		{"the mark was set less often than is known", Check{Since: known},
			one{audit: Audit{Version: "2", Mark: noon, Term: 7, Marks: 2}}, ErrStale},
		{"the mark was set meanwhile", Check{Since: known}, one{audit: Audit{Version: "2", Mark: noon, Term: 7, Marks: 5},
			seen: Audit{Mark: noon, Term: 7, Marks: 5}}, nil},
		{"the mark was set meanwhile, and is forgotten", Check{Since: known}, one{audit: Audit{Version: "2", Mark: noon,
			Term: 7, Marks: 4}, seen: Audit{Mark: noon, Term: 7, Marks: 5}}, ErrStale},
		{"the mark is of the future", Check{Since: known},
			one{audit: Audit{Version: "2", Mark: noon.Add(MarkEvery + 1), Term: 7, Marks: 4}}, ErrStale},
		{"there is no mark", Check{Since: &Audit{}}, one{audit: Audit{Mark: noon}}, ErrStale},
		{"the mark is old", Check{Since: &Audit{}}, one{audit: Audit{Version: "2", Mark: noon.Add(-MarkLost - 1)}}, ErrStale},
		{"nodes were asked meanwhile", Check{Since: known},
			one{audit: Audit{Version: "2", Mark: noon, Term: 8, Marks: 4}}, ErrStale},
		{"nodes are being asked", Check{Since: known}, one{audit: Audit{Version: "2", Mark: noon, Term: 7, Marks: 4,
			Recalling: true}}, ErrStale},
	} {
		err := Holds(t.Context(), CreateIP{If: []Check{{}, c.check}}, c.live)
		if !errors.Is(err, c.want) || (err != nil) != (c.want != nil) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestARestoreIsNoticedThoughAClockWasWrong(t *testing.T) {
	mark := func(at time.Duration, marks, term int64) Audit {
		return Audit{Version: "1", Round: 5, Epoch: 5, Term: term, Mark: noon.Add(at), Marks: marks}
	}
	for _, c := range []struct {
		name       string
		live, seen Audit
		lost       bool
	}{
		{"nothing has happened", mark(-MarkEvery, 9, 1), mark(-MarkEvery, 9, 1), false},
		{"another leader's clock is a little ahead", mark(MarkEvery, 9, 1), Audit{}, false},
		{"another leader's clock was ahead", mark(MarkEvery+1, 9, 1), Audit{}, true},
		{"this one's was, and it has seen that mark", mark(time.Hour, 9, 1), mark(time.Hour, 9, 1), true},
		{"the mark is old", mark(-MarkLost-1, 9, 1), Audit{}, true},
		{"a backup has the same mark, for the clock was behind it", mark(0, 8, 1), mark(0, 9, 1), true},
		{"a backup has an older mark, and was marked since", mark(-time.Second, 12, 1), mark(0, 9, 1), true},
		{"another leader has taken a mark of the future back", mark(0, 10, 2), mark(time.Hour, 9, 1), false},
	} {
		next := Lead(c.live, c.seen, noon)
		if next.Recalling != c.lost || (next.Term != c.live.Term) != c.lost {
			t.Errorf("%s: %+v", c.name, next)
		}
		if next.Marks <= c.live.Marks || next.Marks <= c.seen.Marks {
			t.Errorf("%s: marked %d times", c.name, next.Marks)
		}
		if again := Lead(next, next, noon); again.Term != next.Term {
			t.Errorf("%s: and again: %+v", c.name, again)
		}
		b := NewBook(c.seen)
		if b.SetAudit(c.live); c.seen.Version != "" && b.Stale() != (c.live.older(c.seen) || c.live.Term != c.seen.Term) {
			t.Errorf("%s: the Book is stale: %t", c.name, b.Stale())
		}
	}
	// An agent heeds an epoch that is lower than the last one, by a clock that is behind.
	if got := Respond(Audit{Round: 7, Epoch: 7}, func(UID) bool { return false }, 9); !got.Checked {
		t.Errorf("%+v", got)
	}
}

func TestAReportBarsWhatWasAskedForAndIsNotHere(t *testing.T) {
	r := Audit{Round: 9, Epoch: 5, Asked: map[UID]int64{"here": 7, "gone": 8}}
	here := func(uid UID) bool { return uid == "here" }
	if got := Respond(r, here, 4); !slices.Equal(got.Bar, []UID{"gone"}) || !got.Checked {
		t.Errorf("%+v", got)
	}
	if got := Respond(r, here, 5); got.Checked {
		t.Errorf("checked again: %+v", got)
	}
}

func TestAPodKeepsOffNodesThatCannotServeItsPool(t *testing.T) {
	const why = "isGateway: true is not valid"
	bound := func(n int, node string) Pod {
		pod := gatedPod(n)
		pod.Gated, pod.Node = false, node
		return pod
	}
	for _, c := range []struct {
		name    string
		mode    Mode
		cannot  []string // of n1, n2 and n3
		pod     Pod
		without []string
		reason  string
	}{
		{"all nodes can", Routed, nil, gatedPod(1), nil, ""},
		{"one cannot", Routed, []string{"n2"}, gatedPod(1), []string{"n2"}, ""},
		{"two cannot", Routed, []string{"n3", "n2"}, gatedPod(1), []string{"n2", "n3"}, ""},
		{"none can", Routed, []string{"n1", "n2", "n3"}, gatedPod(1), nil,
			"no node, such as n1, can serve pool p (mode Routed): " + why},
		{"all nodes can, and it is on the link", L2, nil, gatedPod(1), nil, ""},
		{"one is not on the link", L2, []string{"n2"}, gatedPod(1), []string{"n2"}, ""},
		{"none is on the link", L2, []string{"n1", "n2", "n3"}, gatedPod(1), nil,
			"no node, such as n1, can serve pool p (mode L2): " + why},
		{"the pod is on a node that is not", L2, []string{"n2"}, bound(2, "n2"), nil,
			"its node n2 cannot serve pool p (mode L2): " + why},
		{"the pod is on a node that can", Routed, []string{"n2"}, bound(2, "n1"), nil, ""},
		{"the pod is on a node that cannot", Routed, []string{"n2"}, bound(2, "n2"), nil,
			"its node n2 cannot serve pool p (mode Routed): " + why},
	} {
		b := bookOf(t, Spec{Mode: c.mode, Subnet: "10.50.0.0/24"})
		for _, node := range []string{"n1", "n2", "n3"} {
			a := Report{Node: node, CannotServe: map[string]v1alpha1.PodIPReportCause{"another mode": why}}
			if slices.Contains(c.cannot, node) {
				a.CannotServe[string(c.mode)] = why
			}
			b.SetReport(a)
		}
		b.SetPod(c.pod)
		plan := b.Place(c.pod.UID, noon)
		if plan.Reason != c.reason || (plan.Writes == nil) != (c.reason != "") {
			t.Errorf("%s: %+v", c.name, plan)
		} else if c.reason == "" {
			if got := plan.Writes[len(plan.Writes)-1].(PlacePod).Without; !slices.Equal(got, c.without) {
				t.Errorf("%s: without %v, want %v", c.name, got, c.without)
			}
		}
		if left := b.Count("p", noon); c.reason != "" && left.Used > 0 {
			t.Errorf("%s: it takes an address: %+v", c.name, left)
		}
	}

	// Of another interface's network a node says nothing.
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.50.0.0/24"})
	b.SetReport(Report{Node: "n1", CannotServe: map[string]v1alpha1.PodIPReportCause{string(L2): why}})
	second := gatedPod(4)
	second.Wants[0].Interface = "net1"
	if a, _ := place(t, b, second, noon); !a.IsValid() {
		t.Error("a second interface gets no address")
	}

	// What a pod has already it keeps: it runs there.
	b = bookOf(t, Spec{Mode: Routed, Subnet: "10.50.0.0/24"})
	has := gatedPod(3)
	if a, _ := place(t, b, has, noon); !a.IsValid() {
		t.Fatal("no address")
	}
	b.SetReport(Report{Node: "n1", CannotServe: map[string]v1alpha1.PodIPReportCause{string(Routed): why}})
	b.SetPod(bound(3, "n1"))
	if plan := b.Place("u3", noon); plan.Reason != "" || plan.Writes == nil {
		t.Errorf("a pod that was given its address is not told: %+v", plan)
	}
}

// Agents are not to run on every node. What never had one owes no report, and what did still owes it.
func TestANodeWithoutAnAgentOwesNoReportUnlessItHadOne(t *testing.T) {
	for _, c := range []struct {
		name    string
		foreign bool
		known   func(*Book)
		after   time.Duration // since all were asked
		waits   string        // what for, empty if for nothing
		remedy  string
	}{
		{name: "no agent is to run there", foreign: true},
		{name: "nor now, but the node has just answered", foreign: true, waits: "node n2 has not answered yet",
			known: func(b *Book) { b.SetReport(Report{Node: "n2", Round: 1}) }, after: muteAfter - 1},
		{name: "nor now, but the node has answered", foreign: true, waits: "node n2, where the agent is no longer scheduled",
			remedy: "run the agent there again",
			known:  func(b *Book) { b.SetReport(Report{Node: "n2", Round: 1}) }, after: muteAfter},
		{name: "nor now, but an address was there", foreign: true, waits: "node n2, where the agent is no longer scheduled",
			remedy: "run the agent there again",
			known: func(b *Book) {
				b.SetPodIP(PodIP{Addr: netip.MustParseAddr("10.6.0.9"), Pool: "p", PodUID: "x", StatusUID: "x",
					Phase: Bound, Node: "n2"})
			}, after: time.Hour},
		{name: "an agent is to run there", waits: "node n2 has not answered yet"},
		{name: "and has not answered for minutes", waits: "node n2 has never answered", after: muteAfter,
			remedy: "label the Node stayput.io/agent=none"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			b.SetNode(Node{Name: "n2", Ready: true, Foreign: c.foreign})
			audit := Audit{Version: "1", Mark: noon, Round: noon.UnixNano(), Epoch: noon.UnixNano(), Recalling: true}
			b.SetAudit(audit)
			b.SetReport(Report{Node: "n1", Round: audit.Round})
			if c.known != nil {
				c.known(b)
			}
			plan := b.Recall(noon.Add(c.after))
			if ends := len(plan.Writes) == 1; ends != (c.waits == "") || !strings.Contains(plan.Reason, c.waits) ||
				(plan.Remedy != "") != (c.remedy != "") || !strings.Contains(plan.Remedy, c.remedy) {
				t.Errorf("%+v", plan)
			}
			if owed := b.Unanswered(); (c.waits != "") != slices.Equal(owed, []string{"n2"}) {
				t.Errorf("%v owe a report", owed)
			}
		})
	}
}

// A node that was said to be off, and was not, comes back with a pod that was told of the address before a restore.
func TestAnAddressThatANodeReportsForAnotherPodIsQuarantined(t *testing.T) {
	round := roundAt(noon)
	b := NewBook(Audit{Version: "1", Mark: noon, Round: round, Asked: map[UID]int64{"gone": round}})
	a := netip.MustParseAddr("10.6.168.101")
	b.SetNode(Node{Name: "node-1", Ready: true})
	b.SetPodIP(PodIP{Addr: a, Version: "1", UID: "ip", Mode: L2, Namespace: "default", PodName: "web-0", PodUID: "gone",
		Keep: Keep{WhileOwned: true}, Held: true})
	other := Held{Addr: a, UID: "told", Namespace: "default", PodName: "web-1"}
	review := func(r Report) Plan {
		b.SetReport(r)
		return b.Review(a, noon, func(*PodIP) Wanted { return Wants })
	}
	plan := review(Report{Node: "node-1", Round: round, Held: []Held{other}})
	if len(plan.Writes) != 1 {
		t.Fatalf("%+v", plan)
	}
	is, ok := plan.Writes[0].(UpdateIP)
	if !ok || is.PodIP.Quarantine.Reason != "pod default/web-1 has it on node node-1" || is.PodIP.PodUID != "gone" {
		t.Errorf("%+v", plan.Writes[0])
	}
	plan = review(Report{Node: "node-1", Round: round})
	if len(plan.Writes) != 1 {
		t.Fatalf("%+v", plan)
	}
	if is, ok := plan.Writes[0].(StatusIP); !ok || is.PodIP.Phase != Retained {
		t.Errorf("once it has not: %+v", plan.Writes[0])
	}
}
