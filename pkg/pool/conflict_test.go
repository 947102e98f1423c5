package pool

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// conflictOn has a pod find on node n1 that a machine has its address.
func conflictOn(b *Book, a netip.Addr, mac string) {
	ip := *b.PodIP(a)
	is := *b.Pod(ip.PodUID)
	is.Node = "n1"
	b.SetPod(is)
	ip.Phase, ip.StatusUID, ip.Node, ip.Conflict = Allocated, ip.PodUID, "n1", mac
	b.SetPodIP(ip)
}

// review carries out what is decided of an address, and reports whether its pod was ended.
func review(b *Book, a netip.Addr, now time.Time) (ended bool, plan Plan) {
	plan = b.Review(a, now, func(*PodIP) Wanted { return Wants })
	for _, w := range plan.Writes {
		switch w := w.(type) {
		case UpdateIP:
			b.SetPodIP(w.PodIP)
		case EndPod:
			b.RemovePod(w.UID, "100", now)
			ip := *b.PodIP(a)
			ip.Phase, ip.Conflict = Retained, ""
			b.SetPodIP(ip)
			ended = true
		}
	}
	return ended, plan
}

func ownedPod(n int) Pod {
	pod := gatedPod(n)
	pod.Workload = Workload{Kind: "StatefulSet", Name: fmt.Sprintf("set-%d", n)}
	return pod
}

func TestAMachineThatAnswersForAllEmptiesNoPool(t *testing.T) {
	const mac = "02:00:00:00:00:01"
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.1-10.6.0.200"}})
	now, ended, made := noon, 0, 0
	var last netip.Addr
	var plan Plan
	for n := range 300 { // a pod every minute, each with a workload of its own
		now = now.Add(time.Minute)
		var a netip.Addr
		if a, plan = place(t, b, ownedPod(n), now); !a.IsValid() {
			continue
		}
		made++
		conflictOn(b, a, mac)
		yes, what := review(b, a, now)
		if last = a; yes {
			ended++
		} else if !strings.Contains(what.Reason, mac) || what.Remedy == "" {
			t.Errorf("%+v", what)
		}
		text := (&placing{facts: &b.facts}).empty(b.pools["p"], 0)
		if !strings.Contains(text, fmt.Sprintf("(%d of 200 quarantined)", ended)) {
			t.Errorf("%s, after %d", text, ended)
		}
	}
	if ended != machineMost || made != machineMost+1 || b.Quarantined("p") != machineMost {
		t.Errorf("%d addresses were given, and %d pods ended", made, ended)
	}
	if !strings.Contains(plan.Reason, mac) || plan.Remedy == "" || plan.Writes != nil {
		t.Errorf("the next one is told %+v", plan)
	}
	// The one that waits on its node starts once the machine is gone; then there are addresses again.
	ip := *b.PodIP(last)
	ip.Phase, ip.Conflict = Bound, ""
	b.SetPodIP(ip)
	if reason, _ := b.HeldBy("p"); reason != "" {
		t.Error(reason)
	}
	if a, plan := place(t, b, ownedPod(301), now); a.IsValid() {
		t.Errorf("the youngest is first: %s", a)
	} else if !strings.Contains(plan.Reason, "waited longer") && plan.Reason != "" {
		t.Errorf("%+v", plan)
	}
	if a, plan := place(t, b, ownedPod(machineMost+1), now); !a.IsValid() {
		t.Errorf("%+v", plan)
	}
}

func TestAMachineWithAnotherMACAddressEachTimeEmptiesNoPool(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.1-10.6.0.200"}})
	now, ended := noon, 0
	var plan Plan
	for n := range 100 {
		now = now.Add(time.Second)
		var a netip.Addr
		if a, plan = place(t, b, ownedPod(n), now); !a.IsValid() {
			continue
		}
		conflictOn(b, a, fmt.Sprintf("02:00:00:00:00:%02x", n))
		if yes, what := review(b, a, now); yes {
			ended++
		} else if !strings.Contains(what.Reason, "other machines answer") || what.Remedy == "" {
			t.Errorf("%+v", what)
		}
	}
	if ended != machinesMost || b.Quarantined("p") != machinesMost {
		t.Errorf("%d pods were ended, and %d addresses are quarantined", ended, b.Quarantined("p"))
	}
	if reason, remedy := b.HeldBy("p"); !strings.Contains(reason, "MAC addresses") || remedy == "" ||
		!strings.Contains(plan.Reason, reason) || plan.Writes != nil {
		t.Errorf("%q, and the next pod is told %+v", reason, plan)
	}
}

func TestPodsOfAWorkloadAreEndedEverMoreSlowlyForConflicts(t *testing.T) {
	b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
	set := Workload{Kind: "StatefulSet", Name: "web"}
	var ends []time.Duration
	now := noon
	for n := range 9 {
		pod := gatedPod(n)
		pod.Workload = set
		a, _ := place(t, b, pod, now)
		conflictOn(b, a, fmt.Sprintf("02:00:00:00:00:%02d", n)) // each another machine
		ended, plan := review(b, a, now)
		if !ended {
			if other := ownedPod(100 + n); plan.Writes != nil || !plan.Until.After(now) || plan.Reason == "" {
				t.Errorf("%+v", plan)
			} else if a, _ := place(t, b, other, now); a.IsValid() { // pods of other workloads are ended at once
				conflictOn(b, a, fmt.Sprintf("02:00:00:00:01:%02d", n))
				if ended, plan := review(b, a, now); !ended {
					t.Errorf("%+v", plan)
				}
			}
			if early, _ := review(b, a, plan.Until.Add(-time.Second)); early {
				t.Error("it was ended before its time")
			}
			now = plan.Until
			ended, plan = review(b, a, now)
		}
		if !ended {
			t.Fatalf("%+v", plan)
		}
		ends = append(ends, now.Sub(noon))
	}
	for i := 2; i < len(ends); i++ {
		was, is := ends[i-1]-ends[i-2], ends[i]-ends[i-1]
		if is != min(2*was, endPauseMost) {
			t.Errorf("ended at %v", ends)
		}
	}
	if ends[1]-ends[0] != endPauseFirst {
		t.Errorf("ended at %v", ends)
	}
}

func TestAQuarantineWaitsForNoLostNodeThatHasNoPartInIt(t *testing.T) {
	const mac = "02:00:00:00:00:01"
	for _, c := range []struct {
		name   string
		lost   string // the node that is not Ready
		report *Report
		mac    string
		ends   bool
	}{
		{"a node that has answered before", "n2", &Report{Node: "n2", Round: 1}, mac, true},
		{"the node that found the machine", "n1", &Report{Node: "n1", Round: 1}, mac, false},
		{"a node that had the address when it answered", "n2", &Report{Node: "n2", Round: 1,
			Held: []Held{{Addr: netip.MustParseAddr("10.6.0.1"), UID: "x"}}}, mac, false},
		{"a node that has never answered", "n2", nil, mac, false},
		{"two pods have it", "n2", &Report{Node: "n2", Round: 1}, "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			b.SetNode(Node{Name: "n2", Ready: true})
			b.SetNode(Node{Name: "n3", Ready: true})
			a, _ := place(t, b, ownedPod(1), noon)
			conflictOn(b, a, mac)
			if ended, plan := review(b, a, noon); !ended || a.String() != "10.6.0.1" {
				t.Fatalf("%s: %+v", a, plan)
			}
			ip := *b.PodIP(a)
			ip.Quarantine.MAC = c.mac
			b.SetPodIP(ip)
			b.SetNode(Node{Name: c.lost})
			if c.report != nil {
				b.SetReport(*c.report)
			}
			later := noon.Add(quarantinedFor)
			plan := b.Review(a, later, nil)
			b.SetAudit(plan.Writes[0].(WriteAudit).Audit)
			for _, name := range []string{"n1", "n2", "n3"} {
				if plan := b.Review(a, later, nil); plan.Writes != nil {
					t.Errorf("it ends before a Ready node has answered: %+v", plan)
				}
				if name != c.lost {
					b.SetReport(Report{Node: name, Round: b.Audit().Round})
				}
			}
			plan = b.Review(a, later, nil)
			if ends := len(plan.Writes) == 1; ends != c.ends {
				t.Errorf("%+v", plan)
			}
		})
	}
}

// A controller that was behind, or whose API server was restored, claimed for a pod what another one was told, or runs
// with as its node says. The pod has not started, so no operator has to decide between them.
func TestAPodThatHasAnAddressKeepsItFromOneThatHasNotStarted(t *testing.T) {
	for _, forgotten := range []bool{false, true} {
		t.Run(map[bool]string{false: "told", true: "told before the backup"}[forgotten], func(t *testing.T) {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			runs := ownedPod(1)
			a, _ := place(t, b, runs, noon)
			runs = *b.Pod(runs.UID)
			runs.Gated, runs.Node = false, "n1"
			ip := *b.PodIP(a)
			if forgotten {
				recall := b.Audit()
				recall.Epoch = noon.UnixNano()
				b.SetAudit(recall)
				runs.Assigned = nil
				ip.Quarantine = Quarantine{Reason: "pod default/db-1 has it on node n1", Since: noon}
			}
			b.SetPod(runs)
			waits := ownedPod(2)
			b.SetPod(waits)
			ip.PodUID, ip.PodName = waits.UID, waits.Name
			b.SetPodIP(ip)

			report := func() {
				b.SetReport(Report{Node: "n1", Round: b.Audit().Round,
					Held: []Held{{Addr: a, UID: runs.UID, Interface: "eth0"}}})
			}
			if !forgotten {
				plan := b.Review(a, noon, nil)
				b.SetPodIP(plan.Writes[0].(UpdateIP).PodIP)
				if b.PodIP(a).Quarantine.Reason == "" {
					t.Fatalf("%+v", plan)
				}
			}
			plan := b.Review(a, noon, nil)
			b.SetAudit(plan.Writes[0].(WriteAudit).Audit)
			if plan := b.Review(a, noon, nil); plan.Writes != nil {
				t.Fatalf("before a node has answered: %+v", plan)
			}
			report()
			plan = b.Review(a, noon, nil)
			if len(plan.Writes) != 1 || plan.Writes[0].(EndPod).UID != waits.UID {
				t.Fatalf("%+v", plan)
			}
			b.RemovePod(waits.UID, "100", noon)
			for range 3 { // the fence asks for what is gone
				plan = b.Review(a, noon, nil)
				if w, asks := plan.Writes[0].(WriteAudit); asks {
					b.SetAudit(w.Audit)
					report()
				}
			}
			if w, is := plan.Writes[0].(UpdateIP); !is || w.PodIP.PodUID != runs.UID || w.PodIP.Quarantine.Reason != "" {
				t.Errorf("%+v", plan)
			}
		})
	}
}

// A node said, when it was asked, that a pod has an address in quarantine. The pod has ended since, and cannot become
// its owner: the node is asked again.
func TestAPodThatHasEndedIsNoHeir(t *testing.T) {
	for _, state := range []string{"succeeded", "is being deleted", "is deleted"} {
		t.Run(state, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			a, _ := place(t, b, ownedPod(1), noon)
			ip := *b.PodIP(a)
			ip.Phase, ip.StatusUID, ip.Node, ip.Since = Retained, ip.PodUID, "n1", noon
			ip.Quarantine = Quarantine{Reason: "pod default/db-2 has it, too", Since: noon}
			b.SetPodIP(ip)
			b.RemovePod("u1", "100", noon)
			ended := ownedPod(2)
			ended.Gated, ended.Node = false, "n1"
			ended.Terminal, ended.Ending = state == "succeeded", state == "is being deleted"
			if state != "is deleted" {
				b.SetPod(ended)
			}
			ask := func(now time.Time, held ...Held) {
				t.Helper()
				plan := b.Review(a, now, nil)
				w, asks := plan.Writes[0].(WriteAudit)
				if !asks {
					t.Fatalf("%+v", plan)
				}
				b.SetAudit(w.Audit)
				b.SetReport(Report{Node: "n1", Round: b.Audit().Round, Held: held})
			}
			ask(noon, Held{Addr: a, UID: ended.UID, Interface: "eth0"})
			if plan := b.Review(a, noon.Add(time.Second), nil); plan.Writes != nil || plan.Reason == "" {
				t.Fatalf("at once: %+v", plan)
			}
			ask(noon.Add(2 * askAfter))
			plan := b.Review(a, noon.Add(2*askAfter), nil)
			if w, is := plan.Writes[0].(UpdateIP); !is || w.PodIP.PodUID != "u1" || w.PodIP.Quarantine.Reason != "" {
				t.Errorf("%+v", plan)
			}
		})
	}
}

// A restore has made the API server forget that a pod claimed an address, and the pod was told of it all the same. By
// its PodIP the address is free for the next pod of its owner.
func TestAnAddressThatAnotherPodWasToldIsNotTakenOver(t *testing.T) {
	for _, identity := range []string{"", "shared"} {
		t.Run("identity "+identity, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			first := ownedPod(1)
			first.Identity = identity
			a, _ := place(t, b, first, noon)
			ip := *b.PodIP(a)
			ip.Phase, ip.StatusUID, ip.Node, ip.Since = Retained, ip.PodUID, "n1", noon
			b.SetPodIP(ip)
			b.RemovePod(first.UID, "100", noon)
			told := ownedPod(2)
			told.Identity, told.Gated, told.Node, told.Assigned = identity, false, "n1", []Address{{
				Network: "net", Interface: "eth0", Pool: "p", Mode: L2, Prefix: netip.PrefixFrom(a, 24)}}
			b.SetPod(told)
			next := ownedPod(3)
			next.Name, next.Identity = first.Name, identity
			got, plan := place(t, b, next, noon)
			assigned := "its address " + a.String() + " was assigned to another pod"
			if got == a || (identity == "") != strings.Contains(plan.Reason, assigned) {
				t.Errorf("it gets %s: %+v", got, plan)
			}
			b.RemovePod(told.UID, "100", noon)
			if identity == "" {
				if got, plan := place(t, b, next, noon); got != a {
					t.Errorf("once that pod is gone it gets %s: %+v", got, plan)
				}
			}
		})
	}
}
