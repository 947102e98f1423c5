package pool

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// fencing is an address of mode Calico whose pod web-0 ended on node-1 a second ago, and is free since then.
func fencing(change ...func(*Situation)) Situation {
	s := Situation{
		Now:   noon,
		Nodes: map[string]Node{"node-1": {Name: "node-1", Ready: true, ReadySince: noon.Add(-time.Hour), Foreign: true}},
		IP: &PodIP{Addr: netip.MustParseAddr("10.244.240.1"), Mode: Calico, Namespace: "default", PodName: "web-0",
			PodUID: "old", StatusUID: "old", Phase: Bound, Node: "node-1"},
		End:        &End{Node: "node-1", Final: true, Started: true, At: noon.Add(-time.Second)},
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
	late := func(s *Situation) { s.End.At = noon.Add(-time.Minute) }
	unseen := func(s *Situation) { s.End = nil }
	unstarted := func(s *Situation) { s.End.Started, s.IP.Phase, s.IP.StatusUID = false, "", "" }
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
		"free at once":                    {nil, Yes, false, "has freed the address"},
		"not asked":                       {with{unasked}, Wait, false, "not been asked"},
		"asked long ago":                  {with{stale}, Wait, false, "not been asked"},
		"the pod exists, and failed":      {with{failed}, Wait, false, "still exists"},
		"free, and the node is lost":      {with{lost}, Never, false, "Calico may have freed"},
		"free, and the node is off":       {with{off}, Yes, false, "out of service"},
		"free, and deleted":               {with{deleted}, Yes, false, "is deleted"},
		"free, but it predates a restore": {with{restored}, Wait, false, "has to be in contact"},
		"free late":                       {with{late}, Wait, false, "has to be in contact"},
		"free late, contact before": {with{late, since(20 * time.Second), contacted(30 * time.Second)},
			Wait, false, "in contact"},
		"free late, contact since": {with{late, since(20 * time.Second), contacted(10 * time.Second)},
			Yes, false, "is in contact"},
		"the same, Ready just now": {with{late, since(20 * time.Second), contacted(10 * time.Second),
			node(func(n *Node) { n.ReadySince = noon.Add(-30 * time.Second) })}, Wait, false, "in contact"},
		"its end was not seen": {with{unseen, since(20 * time.Second), contacted(10 * time.Second)},
			Yes, false, "is in contact"},
		"it had not started": {with{unstarted}, Wait, false, "before it had started"},
		"it had not started, long ago": {with{unstarted, late, since(3 * time.Minute), contacted(30 * time.Second)},
			Yes, false, "is in contact"},
		"never had a node":     {with{unstarted, nowhere}, Yes, false, "never had a node"},
		"its own":              {with{is("web-0", "node-1")}, Wait, false, "has not freed"},
		"its own, and lost":    {with{is("web-0", "node-1"), lost}, Never, false, "may still run"},
		"its own, and off":     {with{is("web-0", "node-1"), off}, Wait, true, "out of service"},
		"its own, and deleted": {with{is("web-0", "node-1"), deleted}, Wait, true, "is deleted"},
		"its own, and abandoned": {with{is("web-0", "node-1"), since(3 * time.Minute), contacted(time.Minute)},
			Wait, true, "has not freed"},
		"its own, without contact":  {with{is("web-0", "node-1"), since(3 * time.Minute)}, Wait, false, "has not freed"},
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
	b.SetPod(Pod{UID: "u", Namespace: "default", Name: "web-0", Node: "node-1", ReportedIP: a, Created: noon})
	b.RemovePod("u", true, noon)
	if f := b.Fence(b.PodIP(a), noon); f.Verdict == Yes || !b.ToObserve(a) {
		t.Errorf("%+v", f)
	}
	b.SetAllocation(a, Allocation{At: noon})
	if f := b.Fence(b.PodIP(a), noon); f.Verdict != Yes {
		t.Errorf("asked since: %+v", f)
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
			pod.Node, pod.ReportedIP = "n1", a
			b.SetPod(pod)
			p := *b.PodIP(a)
			p.Phase, p.StatusUID, p.Node, p.Version = Bound, pod.UID, "n1", "2"
			b.SetPodIP(p)
			b.RemovePod(pod.UID, true, ended)
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
