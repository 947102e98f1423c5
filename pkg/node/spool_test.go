package node

import (
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
)

func TestWhatThePluginReportsIsCountedAndPublished(t *testing.T) {
	w := newWorld(t)
	w.retained("c1")
	policy, _, err := retention.Parse(ten)
	check(t, err)
	again := w.sandbox("c2", "web-0", ten)
	w.clock.Pass(configureTime)
	w.addOn(w.ledger, again, "eth0", &policy)
	w.a.spool.take(t.Context())
	w.wantSaid(ledger.EventRestored)
	if n := testutil.ToFloat64(w.a.metrics.restores.WithLabelValues("pods")); n != 1 {
		t.Errorf("restores: %v", n)
	}
	select {
	case events := <-w.a.announcer.restored:
		if len(events) != 1 || events[0].Netns != again.Netns || len(events[0].Addrs) != 1 {
			t.Errorf("for the peers: %+v", events)
		}
	default:
		t.Error("the peers are not told")
	}
	w.a.spool.take(t.Context())
	w.wantSaid(ledger.EventRestored) // once
}

func TestWhatThePluginReportsOfPoolsReachesPeersAndPools(t *testing.T) {
	w := newWorld(t)
	var conflicts []ledger.Event
	w.a.spool.conflict = func(e ledger.Event) { conflicts = append(conflicts, e) }
	pod := ledger.Pod{Namespace: "default", Name: "web-0", UID: "u"}
	addrs := []netip.Addr{netip.MustParseAddr("10.6.168.105")}
	check(t, w.a.spool.spool.Report([]ledger.Event{
		{Reason: ledger.EventPooled, Pod: pod, Addrs: addrs, Netns: "/run/netns/a"},
		{Reason: ledger.EventConflict, Pod: pod, Addrs: addrs, MAC: "02:00:00:00:00:01"},
	}))
	w.a.spool.take(t.Context())
	w.wantSaid(ledger.EventConflict)
	if len(conflicts) != 1 || conflicts[0].MAC != "02:00:00:00:00:01" || !slices.Equal(conflicts[0].Addrs, addrs) {
		t.Errorf("conflicts: %+v", conflicts)
	}
	select {
	case events := <-w.a.announcer.restored:
		if len(events) != 1 || events[0].Reason != ledger.EventPooled || events[0].Netns != "/run/netns/a" {
			t.Errorf("for the peers: %+v", events)
		}
	default:
		t.Error("the peers are not told")
	}
}

func TestReportsThatTheSpoolCouldNotHoldAreCounted(t *testing.T) {
	w := newWorld(t)
	const many = 700
	for range many {
		check(t, w.a.spool.spool.Report([]ledger.Event{{Reason: ledger.EventRefused, Key: ledger.Key{Network: "pods"}}}))
	}
	w.a.spool.take(t.Context())
	told := testutil.ToFloat64(w.a.metrics.refused.WithLabelValues("pods"))
	lost := testutil.ToFloat64(w.a.metrics.reportsLost)
	if told == 0 || lost == 0 || told+lost != many {
		t.Errorf("of %d reports %v were told and %v lost", many, told, lost)
	}
}

func TestWhyAnAddressIsNotRestoredIsALabel(t *testing.T) {
	// The words are the ledger's own: it makes them here.
	for reason, miss := range map[string]func(*world, *retention.Policy) ledger.AddRequest{
		"range_changed": func(w *world, p *retention.Policy) ledger.AddRequest {
			w.ledger = ledger.New(network(w.t, "pods", filepath.Join(w.dir, "networks"), "198.51.100.0/24"), w.a.ledgers)
			return ledger.AddRequest{Policy: p}
		},
		"other_requested": func(_ *world, p *retention.Policy) ledger.AddRequest {
			return ledger.AddRequest{Policy: p, Requested: []netip.Addr{netip.MustParseAddr("192.0.2.200")}}
		},
	} {
		t.Run(reason, func(t *testing.T) {
			w := newWorld(t)
			w.retained("c1")
			w.clock.Pass(configureTime)
			policy, _, err := retention.Parse(ten)
			check(t, err)
			w.wantMiss(miss(w, &policy), reason)
		})
	}
	t.Run("allocate_new", func(t *testing.T) {
		w := newWorld(t)
		annotations := map[string]string{retention.AnnotationRetainIP: "10m", retention.AnnotationWhenInUse: "AllocateNew"}
		policy, _, err := retention.Parse(annotations)
		check(t, err)
		w.addOn(w.ledger, w.sandbox("c1", "web-0", annotations), "eth0", &policy)
		w.wantMiss(ledger.AddRequest{Policy: &policy}, "allocate_new")
	})
}

// wantMiss ADDs web-0 once more, which is not given its address.
func (w *world) wantMiss(req ledger.AddRequest, reason string) {
	w.t.Helper()
	s := w.sandbox("c9", "web-0", nil)
	ns, _, err := ledger.SystemNetns{}.Identify(s.Netns)
	check(w.t, err)
	req.Attachment, req.Pod, req.Netns = ledger.Attachment{ContainerID: s.ID, IfName: "eth0"}, s.Pod, ns
	r, err := w.ledger.Add(req)
	check(w.t, err)
	check(w.t, w.a.spool.spool.Report(r.Events))
	w.a.spool.take(w.t.Context())
	if n := testutil.ToFloat64(w.a.metrics.misses.WithLabelValues("pods", reason)); n != 1 {
		w.t.Errorf("counted %v, events %+v", n, r.Events)
	}
}
