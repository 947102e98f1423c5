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
	named := PodIP{Phase: Bound, StatusUID: "a", Node: "n1"}
	for _, c := range []struct {
		name    string
		ip      PodIP
		pod     *Pod
		end     *End
		node    string // n1, empty if it is deleted
		verdict Verdict
		says    string
		remedy  bool
		looks   int // conditions to be read past the caches
	}{
		{name: "its pod runs", ip: named, pod: &Pod{UID: "a", Node: "n1"}, node: ready, verdict: Wait,
			says: "pod ns/web-0 has it"},
		{name: "its pod runs on a node that is out of service", ip: named, pod: &Pod{UID: "a", Node: "n1"}, node: off,
			verdict: Wait},
		{name: "its pod is ending", ip: named, pod: &Pod{UID: "a", Node: "n1", Ending: true}, node: ready, verdict: Wait,
			says: "node n1 has not reported yet"},
		{name: "its pod is ending, and no node was named", pod: &Pod{UID: "a", Node: "n1", Ending: true}, node: ready,
			verdict: Wait, says: "is being deleted"},
		{name: "its pod is ending at the gate", pod: &Pod{UID: "a", Ending: true}, node: ready, verdict: Wait,
			says: "is being deleted"},
		{name: "its pod is over", ip: named, pod: &Pod{UID: "a", Node: "n1", Terminal: true}, node: ready, verdict: Wait,
			says: "node n1 has not reported yet"},
		{name: "its pod is over, and no node was named", pod: &Pod{UID: "a", Node: "n1", Terminal: true}, node: ready,
			verdict: Yes, says: "no node was named"},
		{name: "its pod is over, and the node says so", ip: PodIP{Phase: Retained, StatusUID: "a", Node: "n1"},
			pod: &Pod{UID: "a", Node: "n1", Terminal: true}, node: ready, verdict: Yes, says: "node n1 reports"},
		{name: "gone, as the node says", ip: PodIP{Phase: Retained, StatusUID: "a", Node: "n1"}, node: lost, verdict: Yes},
		{name: "gone, as the node said of an earlier pod", ip: PodIP{Phase: Retained, StatusUID: "b", Node: "n1"}, node: lost,
			end: &End{}, verdict: Yes, says: "no node was named"},
		{name: "deleted, no node was named, and its end was not seen", ip: PodIP{Phase: Bound, StatusUID: "b", Node: "n1"},
			node: lost, verdict: Yes, looks: 1},
		{name: "deleted by force", ip: named, end: &End{Node: "n1"}, node: ready, verdict: Wait,
			says: "node n1 has not reported yet"},
		{name: "deleted, its node not Ready", ip: named, node: lost, verdict: Never, says: "which is not Ready",
			remedy: true},
		{name: "deleted, its node out of service", ip: named, node: off, verdict: Yes, looks: 1},
		{name: "deleted, its node Ready, with a taint that was forgotten", ip: named, node: forgot, verdict: Wait,
			says: "has no effect while the node is Ready", remedy: true},
		{name: "deleted, its Node deleted", ip: named, verdict: Yes, looks: 1, says: "is deleted"},
		{name: "adopted and deleted", ip: PodIP{AdoptedOn: "n1"}, node: ready, verdict: Wait,
			says: "node n1 has not reported"},
		{name: "adopted and deleted, its node out of service", ip: PodIP{AdoptedOn: "n1"}, node: off, verdict: Yes, looks: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			ip := c.ip
			ip.Namespace, ip.PodName, ip.PodUID = "ns", "web-0", "a"
			nodes := map[string]Node{}
			if c.node != "" {
				nodes["n1"] = Node{Name: "n1", Ready: c.node == ready || c.node == forgot, Off: c.node == off || c.node == forgot}
			}
			f := Fence(Situation{Now: noon, IP: &ip, Pod: c.pod, End: c.end, Nodes: nodes})
			if f.Verdict != c.verdict || len(f.If) != c.looks || f.Reason == "" || !strings.Contains(f.Reason, c.says) ||
				(f.Remedy != "") != c.remedy {
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
	b.Woken(noon)
	b.RemovePod("u1", "100", noon)
	b.RemovePodIP(netip.MustParseAddr("10.6.0.1"))
	var woken []string
	for _, k := range b.Woken(noon) {
		if k.Kind == KeyPod && k.Name != "web-1" {
			woken = append(woken, k.Name)
		}
	}
	if !slices.Equal(woken, []string{"web-2"}) {
		t.Errorf("%v are woken for one address", woken)
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
	ip.AdoptedOn, ip.UID, ip.Version, ip.Release = "n1", "ip-1", "1", true
	b.SetPodIP(ip)
	if a, plan := place(t, b, old, noon); a != old.ReportedIP || len(plan.Writes) != 1 ||
		plan.Writes[0].(PlacePod).Addresses[0].Last != "n1" {
		t.Errorf("it is told %s: %+v", a, plan)
	}
	old.Keep = Keep{For: time.Hour} // which is the pod's to say
	if a, plan := place(t, b, old, noon); a != old.ReportedIP || len(plan.Writes) != 2 ||
		plan.Writes[0].(UpdateIP).PodIP.Keep != old.Keep || plan.Writes[0].(UpdateIP).PodIP.AdoptedOn == "" {
		t.Errorf("it is told %s: %+v", a, plan)
	}
	old.Ending = true
	b.SetPod(old)
	named, ok := b.Review(old.ReportedIP, noon, nil).Writes[0].(StatusIP)
	if !ok || !Names(&named.PodIP, old.UID, "n1") {
		t.Errorf("its node is not named: %+v", named)
	}
	b.SetPodIP(named.PodIP)
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
	if update, ok := plan.Writes[0].(UpdateIP); !ok || update.PodIP.AdoptedOn != "" || update.PodIP.PodUID != again.UID {
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
		b.SetAudit(Audit{Version: "1", Mark: noon, Recalling: true, Epoch: 1})
		b.SetReport(Report{Node: "n1", Epoch: 1, Held: []Held{held}})
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
		b.SetReport(Report{Node: "n1", Epoch: noon.UnixNano(),
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

// one is a cluster with one pod and one node, past all caches.
type one struct {
	ip    *PodIP
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
func (o one) PodIP(context.Context, netip.Addr) (*PodIP, error) { return o.ip, o.err }
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
		{"the address is another pod's", Check{There: a, Others: netip.MustParseAddr("10.0.0.1")},
			one{pod: a, ip: &PodIP{PodUID: "b"}}, nil},
		{"the address is its own", Check{There: a, Others: netip.MustParseAddr("10.0.0.1")},
			one{pod: a, ip: &PodIP{PodUID: "a"}}, ErrStale},
		{"there is no PodIP", Check{There: a, Others: netip.MustParseAddr("10.0.0.1")}, one{pod: a}, ErrStale},
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
		return Audit{Version: "1", Epoch: 5, Term: term, Mark: noon.Add(at), Marks: marks}
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
			known: func(b *Book) { b.SetReport(Report{Node: "n2", Epoch: 1}) }, after: muteAfter - 1},
		{name: "nor now, but the node has answered", foreign: true, waits: "node n2, where the agent is no longer scheduled",
			remedy: "run the agent there again",
			known:  func(b *Book) { b.SetReport(Report{Node: "n2", Epoch: 1}) }, after: muteAfter},
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
			audit := Audit{Version: "1", Mark: noon, Epoch: noon.UnixNano(), Recalling: true}
			b.SetAudit(audit)
			b.SetReport(Report{Node: "n1", Epoch: audit.Epoch})
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

// An agent that lies, or its stolen token, may name its node before the node of the pod does.
func TestANodeThatNamesItselfForAPodOfAnotherIsWrittenBack(t *testing.T) {
	for _, phase := range []Phase{Bound, Retained} {
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
			if is := again.PodIP; !ok || is.Phase != Allocated || is.StatusUID != "" || is.Node != "" || is.Conflict != "" {
				t.Fatalf("%s, %s: %+v", phase, state, plan)
			}
			// Its own agent may name itself again, and does.
			l := Local{UID: "u1", Node: "n1", Exists: true, IP: &again.PodIP}
			if got := NextAction(l); got != (Action{Grant: true, Report: Bound}) {
				t.Errorf("%s, %s: its agent: %+v", phase, state, got)
			}
		}
	}
}

// After a restore a pod may be bound a second time, while the PodIP names the node where it runs: it is ended.
func TestAPodFromABackupThatIsNamedElsewhereIsEnded(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	b.SetAudit(Audit{Version: "1", Mark: noon, Epoch: noon.UnixNano()})
	pod := gatedPod(1)
	pod.Created = noon.Add(-time.Hour)
	a, _ := place(t, b, pod, noon)
	pod = *b.Pod("u1")
	pod.Node = "n1"
	b.SetPod(pod)
	ip := *b.PodIP(a)
	ip.Phase, ip.StatusUID, ip.Node = Bound, "u1", "n2"
	b.SetPodIP(ip)
	plan := b.Review(a, noon, nil)
	if len(plan.Writes) != 1 {
		t.Fatalf("%+v", plan)
	}
	if end, ok := plan.Writes[0].(EndPod); !ok || end.UID != "u1" {
		t.Errorf("%+v", plan)
	}
}

// The reports of an epoch are what was, whatever the backup says.
func TestAnEpochMakesThePodIPsSayWhatTheReportsSay(t *testing.T) {
	a := netip.MustParseAddr("10.6.0.7")
	held := func(uid UID, running bool) Held {
		return Held{Addr: a, UID: uid, Namespace: "ns", PodName: "web-1", Pool: "p", Mode: L2, Interface: "eth0",
			Running: running}
	}
	of := func(pod, status UID, node string) *PodIP {
		return &PodIP{Addr: a, Version: "1", Pool: "p", Mode: L2, Namespace: "ns", PodName: "web-1", PodUID: pod,
			Phase: Bound, StatusUID: status, Node: node, Held: true}
	}
	for _, c := range []struct {
		name    string
		ip      *PodIP
		reports map[string][]Held
		want    string
	}{
		{"nobody has it", of("u1", "u1", "n1"), nil, "over"},
		{"as the PodIP says", of("u1", "u1", "n1"), map[string][]Held{"n1": {held("u1", true)}}, "over"},
		{"there is no PodIP", nil, map[string][]Held{"n1": {held("u1", true)}}, "create for u1"},
		{"the PodIP is an earlier pod's", of("u0", "u0", "n1"), map[string][]Held{"n1": {held("u1", true)}}, "give to u1"},
		{"the PodIP names another node", of("u1", "u1", "n2"), map[string][]Held{"n1": {held("u1", true)}}, "name n1 for u1"},
		{"the PodIP names none", of("u1", "", ""), map[string][]Held{"n1": {held("u1", false)}}, "name n1 for u1"},
		{"what runs counts before what has a grant", of("u0", "u0", "n2"),
			map[string][]Held{"n1": {held("u1", true)}, "n2": {held("u0", false)}}, "give to u1"},
		{"of two that run it is the one that is named", of("u0", "u0", "n2"),
			map[string][]Held{"n1": {held("u1", true)}, "n2": {held("u0", true)}}, "over"},
	} {
		b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
		b.SetNode(Node{Name: "n2", Ready: true})
		b.SetAudit(Audit{Version: "1", Mark: noon, Recalling: true, Epoch: 1})
		if c.ip != nil {
			b.SetPodIP(*c.ip)
		}
		for _, node := range []string{"n1", "n2"} {
			b.SetReport(Report{Node: node, Epoch: 1, Held: c.reports[node]})
		}
		plan := b.Recall(noon)
		if len(plan.Writes) != 1 {
			t.Errorf("%s: %+v", c.name, plan)
			continue
		}
		got := ""
		switch w := plan.Writes[0].(type) {
		case CreateIP:
			got = fmt.Sprintf("create for %s", w.PodIP.PodUID)
		case UpdateIP:
			got = fmt.Sprintf("give to %s", w.PodIP.PodUID)
		case StatusIP:
			got = fmt.Sprintf("name %s for %s", w.PodIP.Node, w.PodIP.StatusUID)
		case WriteAudit:
			got = "over"
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestAnAgentDoesWhatThePodIPSays(t *testing.T) {
	named := func(phase Phase, node string) *PodIP {
		return &PodIP{PodUID: "a", StatusUID: "a", Phase: phase, Node: node}
	}
	given, other := &PodIP{PodUID: "a", StatusUID: "before", Phase: Retained, Node: "n2"}, &PodIP{PodUID: "b"}
	cidr := netip.MustParsePrefix("10.244.1.0/24")
	grant, down := Action{Grant: true, Report: Bound}, Action{Revoke: true, Down: true}
	for _, c := range []struct {
		name string
		l    Local
		want Action
	}{
		{"it is to start", Local{Exists: true, IP: given}, grant},
		{"it is to start, and is named already, as after a boot", Local{Exists: true, IP: named(Bound, "n1")}, grant},
		{"it is to start, while an epoch is open", Local{Exists: true, IP: given, Doubt: Doubted}, Action{}},
		{"it is to start, and this node has not reported", Local{Exists: true, IP: given, Doubt: Unasked}, Action{}},
		{"it is named elsewhere, is here, and this node has not reported", Local{Exists: true, Granted: true, Netns: true,
			Doubt: Unasked, IP: named(Bound, "n2")}, down},
		{"it was ended here before, and the cluster has it again", Local{Exists: true, Ended: true, IP: given},
			Action{Revoke: true, Report: Retained}},
		{"it is to start, and the node is declared off", Local{Exists: true, IP: given, Off: true}, Action{}},
		{"it is to start, and there is no PodIP", Local{Exists: true}, Action{}},
		{"it is to start, and the address is another's", Local{Exists: true, IP: other}, Action{}},
		{"it is to start, and another node is named", Local{Exists: true, IP: named(Bound, "n2")}, Action{}},
		{"it is to start, and has ended here", Local{Exists: true, IP: named(Retained, "n1")}, Action{}},
		{"it was adopted here", Local{Exists: true, Netns: true, IP: &PodIP{PodUID: "a", AdoptedOn: "n1"}}, grant},
		{"it was adopted elsewhere", Local{Exists: true, IP: &PodIP{PodUID: "a", AdoptedOn: "n2"}}, Action{}},
		{"it runs", Local{Exists: true, Granted: true, Netns: true, IP: named(Bound, "n1")}, Action{}},
		{"it runs, and other nodes do not know where", Local{Exists: true, Granted: true, Netns: true, PodCIDR: cidr,
			IP: named(Bound, "n1")}, Action{Report: Bound}},
		{"another machine has the address", Local{Exists: true, Granted: true, Conflict: "02::", IP: named(Bound, "n1")},
			Action{Report: Bound}},
		{"another machine had it, and the pod runs", Local{Exists: true, Granted: true, Netns: true, Conflict: "02::",
			IP: named(Bound, "n1")}, Action{}},
		{"it has a grant and is not named, as after a restore", Local{Exists: true, Granted: true, Netns: true, IP: given},
			Action{Revoke: true, Grant: true, Report: Bound}},
		{"it is ending, and runs", Local{Exists: true, Ending: true, Granted: true, Netns: true, IP: named(Bound, "n1")},
			Action{}},
		{"it is ending, and its sandbox is gone", Local{Exists: true, Ending: true, Granted: true, IP: named(Bound, "n1")},
			Action{Revoke: true, Report: Retained}},
		{"it is over, while an epoch is open", Local{Exists: true, Terminal: true, Granted: true, Doubt: Doubted,
			IP: named(Bound, "n1")}, Action{Revoke: true, Report: Retained}},
		{"it is gone, and no grant is left", Local{IP: named(Bound, "n1")}, Action{Revoke: true, Report: Retained}},
		{"it is gone, and the PodIP says so", Local{IP: named(Retained, "n1")}, Action{}},
		{"it is gone, and another node is named", Local{Granted: true, IP: named(Bound, "n2")}, Action{Revoke: true}},
		{"it is gone from the cluster, and is here", Local{Granted: true, Netns: true, IP: named(Bound, "n1")}, Action{}},
		{"it is gone from the cluster, is here, and the node is declared off", Local{Granted: true, Netns: true, Off: true,
			IP: named(Bound, "n1")}, down},
		{"it is gone from the cluster, and its address is another's", Local{Granted: true, Netns: true, IP: other}, down},
		{"and an epoch is open", Local{Granted: true, Netns: true, IP: other, Doubt: Doubted}, Action{}},
		{"it is gone from the cluster, and so is the PodIP", Local{Granted: true, Netns: true}, down},
		{"it is here, and there is no PodIP", Local{Exists: true, Granted: true, Netns: true}, Action{}},
		{"the cluster has it elsewhere", Local{Granted: true, Netns: true, Elsewhere: true, IP: named(Bound, "n1")}, down},
		{"it is named elsewhere, and is here", Local{Exists: true, Granted: true, Netns: true, IP: named(Bound, "n2")}, down},
		{"another program's, of which no pool knows", Local{Netns: true, Found: true}, Action{}},
		{"another program's, and the address is another pod's", Local{Netns: true, Found: true, IP: other},
			Action{Down: true}},
	} {
		c.l.UID, c.l.Node = "a", "n1"
		if got := NextAction(c.l); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestAnAgentGrantsNothingWhileTheAuditMayBeFromABackup(t *testing.T) {
	good := Audit{Version: "1", Mark: noon.Add(-time.Minute), Epoch: 5, Term: 6, Marks: 9}
	for _, c := range []struct {
		name     string
		change   func(*Audit)
		seen     Audit
		reported int64
		want     Doubt
	}{
		{"it is good", func(*Audit) {}, good, 5, Sure},
		{"an epoch is open", func(r *Audit) { r.Recalling = true }, good, 5, Doubted},
		{"the node has not reported", func(*Audit) {}, good, 4, Unasked},
		{"the mark is old", func(r *Audit) { r.Mark = noon.Add(-MarkLost - 1) }, Audit{}, 5, Doubted},
		{"it was marked more often before", func(*Audit) {}, Audit{Marks: 10, Epoch: 5, Term: 6, Mark: good.Mark}, 5, Doubted},
	} {
		r := good
		c.change(&r)
		if got := DoubtOf(&r, c.seen, c.reported, noon); got != c.want {
			t.Errorf("%s: %d", c.name, got)
		}
	}
	if DoubtOf(nil, Audit{}, 0, noon) != Doubted {
		t.Error("without an audit it is open")
	}
}
