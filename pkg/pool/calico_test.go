package pool

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/must"
)

// fencing is an address of mode Calico whose pod web-0 ended on node-1 a second ago, and is free since then.
func fencing(change ...func(*Situation)) Situation {
	s := Situation{
		Now:   noon,
		Nodes: map[string]Node{"node-1": {Name: "node-1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true}},
		IP: &PodIP{Addr: netip.MustParseAddr("10.244.240.1"), Mode: Calico, Namespace: "default", PodName: "web-0",
			PodUID: "old", StatusUID: "old", Phase: Bound, Node: "node-1"},
		End: &End{Node: "node-1", Final: true, Started: true, After: noon.Add(-2 * time.Second),
			At: noon.Add(-time.Second)},
		Allocation: &Allocation{At: noon, Since: noon},
		Contacts:   map[string]contact{},
	}
	for _, f := range change {
		f(&s)
	}
	return s
}

// with are changes of a Situation.
type with []func(*Situation)

func TestCalicosWordCountsOnlyWithThatOfTheNode(t *testing.T) {
	is := func(pod, node string) func(*Situation) {
		return func(s *Situation) {
			s.Allocation.Handle, s.Allocation.Namespace, s.Allocation.Pod, s.Allocation.Node = "h", "default", pod, node
		}
	}
	node := func(change func(*Node)) func(*Situation) {
		return func(s *Situation) {
			n := s.Nodes["node-1"]
			change(&n)
			s.Nodes["node-1"] = n
		}
	}
	lost := node(func(n *Node) { n.Ready = false })
	off := node(func(n *Node) { n.Ready, n.Off = false, true })
	deleted := func(s *Situation) { delete(s.Nodes, "node-1") }
	unasked := func(s *Situation) { s.Allocation = nil }
	stale := func(s *Situation) { s.Allocation.At = noon.Add(-time.Minute) }
	failed := func(s *Situation) { s.Pod = &Pod{UID: "old", Terminal: true} }
	restored := func(s *Situation) { s.End.Predates = true }
	retained := func(s *Situation) { s.IP.Phase = Retained }
	nowhere := func(s *Situation) { s.End.Node, s.IP.Node = "", "" }
	late := func(s *Situation) { s.End.After, s.End.At = noon.Add(-time.Minute), noon.Add(-time.Minute) }
	heardLate := func(s *Situation) { s.End.After = noon.Add(-time.Minute) }
	undated := func(s *Situation) { s.End.After = time.Time{} }
	unseen := func(s *Situation) { s.End = nil }
	unstarted := func(s *Situation) { s.End.Started, s.IP.Phase, s.IP.StatusUID = false, "", "" }
	unknown := func(s *Situation) { s.IP.StatusUID = "" }
	namesake := func(s *Situation) {
		s.Holder = &Pod{UID: "later", Node: "node-1", Assigned: []Address{{Prefix: netip.PrefixFrom(s.IP.Addr, 32)}}}
	}
	since := func(d time.Duration) func(*Situation) {
		return func(s *Situation) { s.Allocation.Since = noon.Add(-d) }
	}
	contacted := func(d time.Duration) func(*Situation) {
		return func(s *Situation) { s.Contacts["node-1"] = contact{since: noon.Add(-d)} }
	}
	for name, c := range map[string]struct {
		in      with
		verdict Verdict
		frees   bool
		says    string
	}{
		"free at once":                            {nil, Yes, false, "has freed the address"},
		"not asked":                               {with{unasked}, Wait, false, "not been asked"},
		"asked long ago":                          {with{stale}, Wait, false, "not been asked"},
		"the pod exists, and failed":              {with{failed}, Wait, false, "still exists"},
		"free, and the node is lost":              {with{lost}, Never, false, "Calico may have freed"},
		"free, and the node is off":               {with{off}, Yes, false, "out of service"},
		"free, and deleted":                       {with{deleted}, Yes, false, "is deleted"},
		"free, but it predates a restore":         {with{restored}, Wait, false, "has to be in contact"},
		"free late":                               {with{late}, Wait, false, "has to be in contact"},
		"free late, and its end is heard of late": {with{heardLate}, Wait, false, "has to be in contact"},
		"and it is not known how late":            {with{undated}, Wait, false, "has to be in contact"},
		"free late, contact before": {with{late, since(20 * time.Second), contacted(30 * time.Second)},
			Wait, false, "in contact"},
		"free late, contact since": {with{late, since(20 * time.Second), contacted(10 * time.Second)},
			Yes, false, "is in contact"},
		"the same, Ready just now": {with{late, since(20 * time.Second), contacted(10 * time.Second),
			node(func(n *Node) { n.ReadySince = noon.Add(-30 * time.Second) })}, Wait, false, "in contact"},
		"its end was not seen": {with{unseen, since(20 * time.Second), contacted(10 * time.Second)},
			Yes, false, "is in contact"},
		"it had not started": {with{unstarted}, Wait, false, "while it was being started"},
		"it had not started, long ago": {with{unstarted, late, since(3 * time.Minute), contacted(30 * time.Second)},
			Yes, false, "is in contact"},
		"never had a node":     {with{unstarted, nowhere}, Yes, false, "never had a node"},
		"its own":              {with{is("web-0", "node-1")}, Wait, false, "has not freed"},
		"its own, and lost":    {with{is("web-0", "node-1"), lost}, Never, false, "may still run"},
		"its own, and off":     {with{is("web-0", "node-1"), off}, Wait, true, "out of service"},
		"its own, and deleted": {with{is("web-0", "node-1"), deleted}, Wait, true, "is deleted"},
		"its own, and abandoned": {with{is("web-0", "node-1"), since(3 * time.Minute), contacted(time.Minute)},
			Wait, true, "has not freed"},
		"its own, without contact": {with{is("web-0", "node-1"), since(3 * time.Minute)}, Wait, false, "has not freed"},
		"a later pod's of the name, no contact": {with{unseen, unknown, is("web-0", "node-1"), namesake}, Wait, false,
			"has not been in contact"},
		"a later pod's of the name, contact since": {with{unseen, unknown, is("web-0", "node-1"), namesake,
			since(3 * time.Minute), contacted(30 * time.Second)}, Yes, false, "since a later pod"},
		"a later pod's of the name on another node": {with{unseen, unknown, is("web-0", "node-2"), namesake,
			since(3 * time.Minute), contacted(30 * time.Second)}, Wait, true, "node-2 is deleted"},
		"another pod's":             {with{is("thief", "node-2")}, Never, false, "pod default/thief has it"},
		"another's, once it was ok": {with{is("thief", "node-2"), retained}, Never, false, "thief"},
	} {
		f := Fence(fencing(c.in...))
		if f.Verdict != c.verdict || f.Frees != c.frees || !strings.Contains(f.Reason, c.says) {
			t.Errorf("%s: %+v", name, f)
		}
		if f.Verdict == Never && f.Remedy == "" || f.Frees && len(f.If) == 0 {
			t.Errorf("%s: what is to be done is missing: %+v", name, f)
		}
	}
}

// Until a pod's end was seen, that its address is free says nothing: its ADD may come yet.
func TestWhatCalicoSaidBeforeThePodsEndSaysNothing(t *testing.T) {
	b := NewBook(Audit{Version: "1", Mark: noon})
	a := netip.MustParseAddr("10.244.240.1")
	b.SetNode(Node{Name: "node-1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true})
	b.SetPodIP(PodIP{Addr: a, Version: "1", Mode: Calico, Namespace: "default", PodName: "web-0", PodUID: "u"})
	b.SetAllocation(a, Allocation{At: noon})
	b.SetPod(Pod{UID: "u", Namespace: "default", Name: "web-0", Node: "node-1", ReportedIP: a, Noted: true, Created: noon})
	b.DatePods("99", noon)
	b.RemovePod("u", "100", noon)
	if f := b.Fence(b.PodIP(a), noon); f.Verdict == Yes || !b.ToObserve(a, noon) {
		t.Errorf("%+v", f)
	}
	b.SetAllocation(a, Allocation{At: noon})
	if f := b.Fence(b.PodIP(a), noon); f.Verdict != Yes {
		t.Errorf("asked since: %+v", f)
	}
}

// A controller may hear of a pod's end when Calico's garbage collection has long freed its address. When that was at
// the earliest, the version of its deletion tells.
func TestAPodsEndIsDatedByTheVersionOfItsDeletion(t *testing.T) {
	a, ended := netip.MustParseAddr("10.244.240.1"), noon.Add(time.Hour)
	for version, want := range map[string]Verdict{"": Wait, "99": Wait, "100": Wait, "101": Yes, "other": Wait} {
		b := NewBook(Audit{Version: "1", Mark: noon})
		b.SetNode(Node{Name: "node-1", Ready: true, ReadySince: noon, Foreign: true})
		b.SetPodIP(PodIP{Addr: a, Version: "1", Mode: Calico, Namespace: "default", PodName: "web-0", PodUID: "u"})
		pod := Pod{UID: "u", Namespace: "default", Name: "web-0", Node: "node-1", ReportedIP: a, Noted: true,
			Created: noon.Add(time.Minute), Assigned: []Address{{Mode: Calico, Prefix: netip.PrefixFrom(a, 32)}}}
		b.SetPod(pod)
		pod.Ending, pod.Noted = true, false // by its DEL
		b.SetPod(pod)
		b.DatePods("100", ended)
		b.RemovePod("u", version, ended.Add(time.Second))
		b.SetAllocation(a, Allocation{At: ended.Add(2 * time.Second)})
		if f := b.Fence(b.PodIP(a), ended.Add(2*time.Second)); f.Verdict != want {
			t.Errorf("deleted at version %q: %+v", version, f)
		}
	}
}

// The next pod of a name takes an address over before it is written that the one before has it no more. That its node
// has freed it is known from then on, also if the node is not Ready any more.
func TestTheEndOfAPodIsNotWrittenIfTheNextOneComesAtOnce(t *testing.T) {
	ended := noon.Add(time.Minute)
	for _, c := range []struct {
		name  string
		waits bool // the next pod is there already
		lost  bool // the node is not Ready any more as it comes
		after time.Duration
		takes bool
	}{
		{"it waits", true, false, 0, true},
		{"it comes", false, false, takeoverWithin / 2, true},
		{"it comes, and the node is lost", false, true, takeoverWithin / 2, true},
		{"it does not come", false, false, takeoverWithin, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: Calico, Subnet: "10.244.240.0/26"})
			node := Node{Name: "n1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true}
			b.SetNode(node)
			pod := gatedPod(1)
			pod.Keep = Keep{WhileOwned: true}
			a, _ := place(t, b, pod, noon)
			pod = *b.Pod(pod.UID)
			pod.Node, pod.ReportedIP, pod.Noted = "n1", a, true
			b.SetPod(pod)
			p := *b.PodIP(a)
			p.Phase, p.StatusUID, p.Node, p.Version = Bound, pod.UID, "n1", "2"
			b.SetPodIP(p)
			b.DatePods("99", ended)
			b.RemovePod(pod.UID, "100", ended)
			next := gatedPod(1)
			next.UID, next.Keep, next.Created = "next", pod.Keep, ended
			if c.waits {
				if got, plan := place(t, b, next, ended); got.IsValid() || plan.Reason == "" {
					t.Fatalf("before Calico was asked: %s, %+v", got, plan)
				}
			}
			b.Woken(ended)

			b.SetAllocation(a, Allocation{At: ended})
			b.RemoveNode("n1") // which is no proof without a look at it, and is written
			plan := b.Review(a, ended, func(*PodIP) Wanted { return Wants })
			if w, ok := plan.Writes[0].(StatusIP); !ok || w.If == nil {
				t.Errorf("its node is deleted: %+v", plan)
			}
			b.SetNode(node)
			b.Woken(ended)
			plan = b.Review(a, ended, func(*PodIP) Wanted { return Wants })
			if plan.Writes != nil || !plan.Until.Equal(ended.Add(takeoverWithin)) {
				t.Errorf("at the end: %+v", plan)
			}
			if woken := slices.Contains(b.Woken(ended), next.Key()); woken != c.waits {
				t.Errorf("woken: %t", woken)
			}
			node.Ready = !c.lost
			b.SetNode(node)
			now := ended.Add(c.after)
			if c.takes {
				if got, plan := place(t, b, next, now); got != a {
					t.Errorf("it has %s: %+v", got, plan)
				}
				return
			}
			plan = b.Review(a, now, func(*PodIP) Wanted { return Wants })
			if w, ok := plan.Writes[0].(StatusIP); !ok || w.PodIP.Phase != Retained || w.PodIP.Node != "n1" {
				t.Errorf("later: %+v", plan)
			}
		})
	}
}

// A sandbox that is made again has an ADD under way, though kubelet still reports the address of the earlier one. What
// frees the address meanwhile is the DEL of that.
func TestWhileASandboxIsMadeAgainAFreeAddressProvesNothing(t *testing.T) {
	const noted, cleared, ending, gone = "noted", "cleared", "ending", "gone"
	for name, c := range map[string]struct {
		before Phase // what an earlier controller wrote
		turns  []string
		want   Verdict
		writes Phase // before the pod is gone
	}{
		"deleted by force":                {"", []string{noted, gone}, Yes, Bound},
		"deleted, and its DEL":            {"", []string{noted, ending, cleared, gone}, Yes, ""},
		"crashed":                         {"", []string{noted, cleared, gone}, Wait, ""},
		"crashed, which was written":      {Bound, []string{noted, cleared, gone}, Wait, Allocated},
		"crashed, and made again":         {Bound, []string{noted, cleared, noted, gone}, Yes, ""},
		"crashed, and deleted":            {Bound, []string{noted, cleared, ending, gone}, Wait, ""},
		"never started":                   {"", []string{cleared, gone}, Wait, ""},
		"no controller saw its deletion":  {Bound, []string{ending, cleared, gone}, Yes, ""},
		"nor that its sandbox had failed": {Allocated, []string{ending, cleared, gone}, Wait, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: Calico, Subnet: "10.244.240.0/26"})
			a := netip.MustParseAddr("10.244.240.1")
			b.SetNode(Node{Name: "n1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true})
			is := PodIP{Addr: a, Version: "1", Pool: "p", Mode: Calico, Namespace: "default", PodName: "web-0", PodUID: "u",
				Keep: Keep{WhileOwned: true}, Held: true}
			if c.before != "" {
				is.Phase, is.StatusUID, is.Node = c.before, "u", "n1"
			}
			b.SetPodIP(is)
			pod := Pod{UID: "u", Namespace: "default", Name: "web-0", Node: "n1", ReportedIP: a, Created: noon,
				Assigned: []Address{{Pool: "p", Mode: Calico, Prefix: netip.PrefixFrom(a, 26)}}}
			now := noon.Add(time.Minute)
			for _, turn := range c.turns {
				switch turn {
				case noted:
					pod.Noted = true
				case cleared:
					pod.Noted = false
				case ending:
					pod.Ending, pod.Noted = true, false
				case gone:
					plan := b.Review(a, now, func(*PodIP) Wanted { return Wants })
					var wrote Phase
					if len(plan.Writes) > 0 {
						wrote = plan.Writes[0].(StatusIP).PodIP.Phase
					}
					if wrote != c.writes {
						t.Errorf("%q is written, want %q: %+v", wrote, c.writes, plan)
					}
					b.DatePods("99", now)
					b.RemovePod("u", "100", now)
					continue
				}
				b.SetPod(pod)
			}
			b.SetAllocation(a, Allocation{At: now})
			if f := b.Fence(b.PodIP(a), now); f.Verdict != c.want {
				t.Errorf("%+v", f)
			}
		})
	}
}

// A pod has an address of each family, and what is known of one says nothing of the other.
func TestThatOneAddressOfAPodIsFreedSaysNothingOfItsOtherOne(t *testing.T) {
	b := bookOf(t, Spec{Mode: Calico, Subnet: "10.244.240.0/26"})
	b.SetNode(Node{Name: "n1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true})
	both := []netip.Addr{netip.MustParseAddr("10.244.240.1"), netip.MustParseAddr("10.244.240.2")}
	for _, a := range both {
		b.SetPodIP(PodIP{Addr: a, Version: "1", Pool: "p", Mode: Calico, Namespace: "default", PodName: "web-0",
			PodUID: "old", Keep: Keep{WhileOwned: true}, Phase: Bound, StatusUID: "old", Node: "n1", Held: true})
	}
	b.SetPod(Pod{UID: "old", Namespace: "default", Name: "web-0", Node: "n1", ReportedIP: both[0], Noted: true,
		Created: noon.Add(time.Second)})
	now := noon.Add(time.Minute)
	b.DatePods("99", now)
	b.RemovePod("old", "100", now)
	b.SetAllocation(both[0], Allocation{At: now})
	b.SetAllocation(both[1], Allocation{Handle: "h", Namespace: "default", Pod: "web-0", Node: "n1", At: now})
	for n, want := range []Verdict{Yes, Wait} {
		plan := b.Review(both[n], now, func(*PodIP) Wanted { return Wants })
		if f := b.Fence(b.PodIP(both[n]), now); f.Verdict != want || plan.Writes != nil {
			t.Errorf("%s: %+v, %+v", both[n], f, plan)
		}
	}
}

// An allocation of the pod itself that outlasts every ADD keeps it from starting: it is freed, and nothing else is.
func TestAnAllocationThatKeepsItsPodFromStartingIsFreed(t *testing.T) {
	a := netip.MustParseAddr("10.244.240.1")
	held := Allocation{Handle: "net.1", Namespace: "default", Pod: "web-0", Node: "n1"}
	long := addGivenUp + time.Minute
	for name, c := range map[string]struct {
		pod     func(*Pod)
		is      func(*Allocation)
		node    func(*Node)
		seen    time.Duration // since it was allocated, by the first look
		contact time.Duration // after that, zero if there was none
		asks    bool
		frees   bool
	}{
		"it does":                      {seen: long, contact: long, asks: true, frees: true},
		"an ADD may be under way":      {seen: addGivenUp - 1, contact: 1, asks: true},
		"its kubelet was heard before": {seen: long, contact: addGivenUp - 1, asks: true},
		"its kubelet is silent":        {seen: long, asks: true},
		"it has started": {pod: func(p *Pod) { p.ReportedIP = a }, seen: long,
			contact: long},
		"it has none any more": {pod: func(p *Pod) { p.ReportedIP, p.Sandboxless = a, true }, seen: long, contact: long,
			asks: true, frees: true},
		"an ADD has noted its end": {pod: func(p *Pod) { p.Noted = true }, seen: long,
			contact: long},
		"it ends": {pod: func(p *Pod) { p.Ending = true }, seen: long, contact: long},
		"it has no node yet": {pod: func(p *Pod) { p.Node = "" }, seen: long,
			contact: long},
		"it is new": {pod: func(p *Pod) { p.Created = noon.Add(long - startsWithin + 1) }, seen: long,
			contact: long},
		"another pod has it": {is: func(a *Allocation) { a.Pod = "web-1" }, seen: long,
			contact: long, asks: true},
		"another node has it": {is: func(a *Allocation) { a.Node = "n2" }, seen: long,
			contact: long, asks: true},
		"it is free": {is: func(a *Allocation) { *a = Allocation{} }, seen: long,
			contact: long, asks: true},
		"its node is lost": {node: func(n *Node) { n.Ready = false }, seen: long,
			contact: long, asks: true},
		"its node is back just now": {node: func(n *Node) { n.ReadySince = noon.Add(long - felixGrace + 1) },
			seen: long, contact: long, asks: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: Calico, Subnet: "10.244.240.0/26"})
			b.SetPodIP(PodIP{Addr: a, Version: "1", Pool: "p", Mode: Calico, Namespace: "default", PodName: "web-0",
				PodUID: "u", Keep: Keep{WhileOwned: true}, Held: true})
			pod := Pod{UID: "u", Namespace: "default", Name: "web-0", Node: "n1", Created: noon.Add(-time.Hour), Assigned: []Address{
				{Interface: "eth0", Pool: "p", Mode: Calico, Prefix: netip.PrefixFrom(a, 32)}}}
			node := Node{Name: "n1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true}
			is := held
			if c.pod != nil {
				c.pod(&pod)
			}
			if c.is != nil {
				c.is(&is)
			}
			if c.node != nil {
				c.node(&node)
			}
			b.SetPod(pod)
			b.SetNode(node)
			is.At = noon
			b.SetAllocation(a, is)
			if c.contact > 0 {
				b.SetContact("n1", noon, noon.Add(c.contact))
				b.SetContact("n1", noon.Add(time.Second), noon.Add(c.contact+time.Second))
			}
			now := noon.Add(c.seen)
			is.At = now
			b.SetAllocation(a, is)
			plan := b.Review(a, now, nil)
			if asks := b.ToObserve(a, now); asks != c.asks {
				t.Errorf("Calico's IPAM is asked: %t", asks)
			}
			if c.asks && !c.frees && !plan.Until.After(now) {
				t.Errorf("it is not reviewed again: %+v", plan)
			}
			var frees bool
			for _, w := range plan.Writes {
				if w, ok := w.(FreeAllocation); ok {
					frees = w.Allocation == b.allocations[a] && w.If[0].Starting.Node == "n1" && w.If[0].Since != nil
				}
			}
			if frees != c.frees {
				t.Errorf("%+v", plan)
			}
		})
	}
}

// importing is a Book with an address that was imported with its pod, which runs with it, outside of its pool's subnet.
func importing(t *testing.T) (*Book, netip.Addr) {
	t.Helper()
	b := NewBook(Audit{Version: "1", Mark: noon})
	r, err := Parse(v1alpha1.PodIPPoolSpec{Mode: Calico, Subnet: "10.244.240.0/24"})
	must.Do(t, err)
	b.SetPool(Pool{Name: "blue", Version: "1", Range: r, Held: true})
	b.SetNode(Node{Name: "node-1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true})
	a := netip.MustParseAddr("10.244.1.5")
	b.SetPodIP(PodIP{Addr: a, Version: "1", Pool: "blue", Mode: Calico, Namespace: "default", PodName: "web-0",
		PodUID: "old", Interface: "eth0", Keep: Keep{WhileOwned: true}, AdoptedOn: "n1", Held: true})
	b.SetPod(Pod{UID: "old", Namespace: "default", Name: "web-0", Node: "node-1", ReportedIP: a, Noted: true,
		Created: noon.Add(-time.Hour)})
	is := b.CalicoPool("blue")
	if len(is.Outside) != 1 || is.Outside[0] != a || len(is.Unconfirmed) != 1 || b.ToObserve(a, noon) {
		t.Fatalf("%+v", is)
	}
	return b, a
}

// Until its address was reserved for long enough, a pod may have lost it to any other one: it is no pod's of a pool
// then. From then on it is as any other address.
func TestAnImportedAddressCountsOnceNoOtherPodCanGetIt(t *testing.T) {
	is := Allocation{Handle: "h", Namespace: "default", Pod: "web-0", Node: "node-1", Reserved: true, At: noon}
	ends := func(b *Book) { b.RemovePod("old", "100", noon) }
	released := func(b *Book) {
		p := *b.PodIP(b.CalicoPool("blue").Outside[0])
		p.Release = true
		b.SetPodIP(p)
	}
	for name, c := range map[string]struct {
		does func(*Book)
		said func(*Allocation) // nil: Calico's IPAM has not been asked
		want any               // the write, nil if there is none
	}{
		"not asked":      {nil, nil, nil},
		"not reserved":   {nil, func(a *Allocation) { a.Reserved = false }, nil},
		"asked long ago": {nil, func(a *Allocation) { a.At = noon.Add(-time.Minute) }, nil},
		"it has it":      {nil, func(*Allocation) {}, StatusIP{}},
		"another has it": {nil, func(a *Allocation) { a.Pod = "thief" }, DeleteIP{}},
		"one of its name elsewhere": {nil, func(a *Allocation) { a.Node = "node-2" },
			DeleteIP{}},
		"it is free":          {nil, func(a *Allocation) { *a = Allocation{Reserved: true, At: noon} }, DeleteIP{}},
		"the pod has ended":   {ends, nil, DeleteIP{}},
		"and has it, it says": {ends, func(*Allocation) {}, DeleteIP{}},
		"released":            {released, nil, DeleteIP{}},
	} {
		b, a := importing(t)
		if c.does != nil {
			c.does(b)
		}
		if c.said != nil {
			said := is
			c.said(&said)
			b.SetAllocation(a, said)
		}
		plan := b.Review(a, noon, nil)
		if len(plan.Writes) == 0 && c.want == nil && plan.Reason != "" {
			continue
		}
		if len(plan.Writes) != 1 || reflect.TypeOf(plan.Writes[0]) != reflect.TypeOf(c.want) {
			t.Errorf("%s: %+v", name, plan)
			continue
		}
		switch w := plan.Writes[0].(type) {
		case StatusIP:
			if w.PodIP.Phase != Bound || w.PodIP.Node != "node-1" || w.PodIP.StatusUID != "old" {
				t.Errorf("%s: %+v", name, w)
			}
		case DeleteIP: // only of a pod that is not known it has to be made sure
			if gone := len(w.If) == 1 && w.If[0].Gone != nil; gone != (b.Pod("old") == nil) {
				t.Errorf("%s: %+v", name, w.If)
			}
		}
	}
}

// The pod's successor has it, once it asks for the pool, and not before it is known to be its own.
func TestAnImportedAddressIsItsPodsOwn(t *testing.T) {
	b, a := importing(t)
	b.DatePods("99", noon)
	b.RemovePod("old", "100", noon)
	b.SetPod(Pod{UID: "new", Version: "1", Namespace: "default", Name: "web-0", Gated: true, Created: noon,
		Keep: Keep{For: time.Hour}, Wants: []Want{{Interface: "eth0", Pools: []string{"blue"}}}})
	gets := func() PodIP {
		t.Helper()
		plan := b.Place("new", noon)
		if len(plan.Writes) != 2 {
			t.Fatalf("%+v", plan)
		}
		switch w := plan.Writes[0].(type) {
		case CreateIP:
			b.Unreserve(w.PodIP.Addr)
			return w.PodIP
		case UpdateIP:
			if len(w.If) == 0 || w.If[len(w.If)-1].Free != a {
				t.Errorf("that it is free is not looked up: %+v", w.If)
			}
			return w.PodIP
		}
		t.Fatalf("%+v", plan)
		return PodIP{}
	}
	if is := gets(); is.Addr == a {
		t.Errorf("it is given %+v", is)
	}
	confirmed := *b.PodIP(a)
	confirmed.Version, confirmed.Phase, confirmed.StatusUID, confirmed.Node = "2", Bound, "old", "node-1"
	b.SetPodIP(confirmed)
	if !b.ToObserve(a, noon) || len(b.CalicoPool("blue").Unconfirmed) != 0 {
		t.Error("it is not asked about")
	}
	b.SetAllocation(a, Allocation{At: noon})
	if is := gets(); is.Addr != a || is.AdoptedOn != "" || is.PodUID != "new" || is.Keep.For != time.Hour {
		t.Errorf("it is given %+v", is)
	}

	// Another pod has it, since its reservation was gone for a while.
	b.SetAllocation(a, Allocation{Handle: "x", Namespace: "default", Pod: "thief", Node: "node-1", At: noon})
	if plan := b.Place("new", noon); plan.Writes != nil || !strings.Contains(plan.Reason, "pod default/thief has it") {
		t.Errorf("%+v", plan)
	}
}

// What a pod that was not gated has, under the name of one that is gone, is not freed.
func TestAnAllocationThatALaterPodOfTheNameMayHaveIsNotFreed(t *testing.T) {
	f := Fence(fencing(func(s *Situation) {
		*s.Allocation = Allocation{Handle: "h", Namespace: "default", Pod: "web-0", Node: "gone", At: noon, Since: noon}
	}))
	if !f.Frees {
		t.Fatalf("%+v", f)
	}
	told := func(a string) []Address { return []Address{{Prefix: netip.MustParsePrefix(a)}} }
	for _, c := range []struct {
		is    *Pod
		frees bool
	}{
		{nil, true}, {&Pod{UID: "new", Gated: true}, true}, {&Pod{UID: "new", Node: "node-1"}, true},
		{&Pod{UID: "new", Node: "gone"}, false},
		{&Pod{UID: "new", Node: "gone", Assigned: told("10.244.240.1/24")}, false},
		{&Pod{UID: "new", Node: "gone", Assigned: told("10.244.240.2/24")}, true},
	} {
		w := newWorld(t, rand.New(rand.NewPCG(1, 0)), 0)
		if c.is != nil {
			w.pods.put("web-0", *c.is)
		}
		err := Holds(t.Context(), FreeAllocation{If: f.If}, live{w, NewBook(Audit{})})
		if (err == nil) != c.frees {
			t.Errorf("with %+v: %v", c.is, err)
		}
	}
}
