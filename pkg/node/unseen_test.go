package node

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/nodetest"
)

func TestWithoutNRIAPodIsPromisedItsAddressOnceTheRuntimeListsIt(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	if !w.a.unseen.look(t.Context()) {
		t.Error("it does not wait for a sandbox that is being created")
	}
	w.runs(s)
	if w.a.unseen.look(t.Context()) {
		t.Error("it waits for something else")
	}
	w.wantSaid()
	w.del(s)
	w.want(addr, ledger.StateRetained)
	if got := w.a.unseen.status(); got != inspection.AnnotationsListed {
		t.Errorf("of annotations it says %q", got)
	}
}

func TestWithoutNRIAReconciliationKnowsThatCNIHandsOnNoAnnotations(t *testing.T) {
	for _, nri := range []bool{false, true} {
		w := newWorld(t)
		s := w.sandbox("c1", "web-0", ten)
		w.add(s)
		w.runs(s)
		w.a.Connected(nri)
		check(t, w.reconcile())
		want := inspection.AnnotationsListed
		if nri {
			want = "ok"
		}
		if got := w.a.unseen.status(); got != want {
			t.Errorf("with NRI %t it says %q", nri, got)
		}
		w.a.Connected(false)
		if got := w.a.unseen.status(); got != want {
			t.Errorf("with NRI %t, then without, it says %q", nri, got)
		}
	}
}

// Pods of host-local, whose annotations nobody has asked for, and containers that are no pods.
func TestWithoutNRIOnlyPodsOfStayputsSayWhatCNIHandsOn(t *testing.T) {
	w := newWorld(t)
	w.addOn(w.ledger, w.sandbox("c0", "other", nil), "eth0", &retention.Policy{}) // the network is known
	s := w.sandbox("c1", "web-0", ten)
	addr := netip.MustParseAddr("192.0.2.9")
	w.hostLocal(addr.String(), "c1")
	w.runs(s)
	alone := Sandbox{ID: "c2", Netns: w.netns("c2")}
	w.add(alone)
	check(t, w.reconcile())
	w.a.unseen.look(t.Context())
	if got := w.a.unseen.status(); got != "ok" {
		t.Errorf("of annotations it says %q", got)
	}
	w.del(s)
	w.want(addr, ledger.StateRetained)
}

func TestWithoutNRIAnAddressIsVerifiedToo(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	nodetest.Configure(t, s.Netns, w.add(s).Next())
	w.runs(s)
	w.a.unseen.look(t.Context())
	w.settle()
	w.wantSaid(retainedip.EventNotConfigured)
}

func TestWithoutNRIABadAnnotationIsReportedOnce(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", map[string]string{retention.AnnotationRetainIP: "true"})
	nodetest.Configure(t, s.Netns, w.add(s))
	w.runs(s)
	for range 2 {
		w.a.unseen.look(t.Context())
		w.settle()
	}
	w.wantSaid(retainedip.EventInvalidAnnotation)
}

func TestWithoutNRIADelBeforeTheListKeepsAnEarlierPromise(t *testing.T) {
	w := newWorld(t)
	first := w.sandbox("c1", "web-0", ten)
	addr := w.add(first)
	w.runs(first)
	w.a.unseen.look(t.Context())
	w.del(first)
	w.runtime.Forget("c1")

	second := w.sandbox("c2", "web-0", ten)
	w.clock.Pass(configureTime)
	if got := w.add(second); got != addr {
		t.Fatalf("got %s, want %s back", got, addr)
	}
	w.a.unseen.look(t.Context())
	w.del(second)
	w.want(addr, ledger.StateRetained)
}

func TestWithNRITheListIsNotAsked(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	w.runs(s)
	w.a.Connected(true)
	if w.a.unseen.look(t.Context()) || w.a.unseen.status() != "ok" {
		t.Error("it looks all the same")
	}
	w.del(s)
	w.want(addr, "")

	// The connection is lost: what started unseen meanwhile is caught up with.
	again := w.sandbox("c2", "web-0", ten)
	w.add(again)
	w.runs(again)
	w.a.Connected(false)
	select {
	case <-w.a.unseen.now:
	default:
		t.Error("a lost connection wakes nobody")
	}
}

func TestAPodWhoseAnnotationsCameThroughCNINeedsNoList(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", nil)
	w.addOn(w.ledger, s, "eth0", &retention.Policy{})
	w.runtime.Fail(nodetest.ErrRuntime)
	if w.a.unseen.look(t.Context()) || w.a.unseen.status() != "ok" {
		t.Errorf("it looks for it: %s", w.a.unseen.status())
	}
}

func TestAnnotationsThatComeFromNowhereAreAnEventOnceThatLasts(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	w.runtime.Fail(nodetest.ErrRuntime)
	u := w.a.unseen
	if !u.look(t.Context()) {
		t.Error("it gives up")
	}
	w.wantSaid()
	w.a.reconciler.reconcileAndReport(t.Context())
	if _, body := w.get("/readyz"); !strings.Contains(body, "annotations: degraded: ") ||
		!strings.Contains(body, nodetest.ErrRuntime.Error()) {
		t.Errorf("/readyz says %s", body)
	}
	u.blind = time.Now().Add(-blindFor)
	for range 2 {
		u.look(t.Context())
	}
	w.wantSaid(retainedip.EventAnnotationsUnknown)
	if e := w.said.events[0]; e.Pod.Name != "" || !strings.Contains(e.Message, nodetest.ErrRuntime.Error()) {
		t.Errorf("the event is %+v", e)
	}
	w.runtime.Fail(nil)
	w.runs(s)
	u.look(t.Context())
	if got := u.status(); got != inspection.AnnotationsListed {
		t.Errorf("with the runtime back it says %q", got)
	}
	w.del(s)
	w.want(addr, ledger.StateRetained)
}

func TestWhatNeedsNoNRIMissesNone(t *testing.T) {
	w := newWorld(t)
	w.noNRI = true
	w.a = w.newAgent()
	w.a.reconciler.reconcileAndReport(t.Context())
	if _, body := w.get("/readyz"); !strings.Contains(body, "nri: off\n") || strings.Contains(body, degraded) {
		t.Errorf("/readyz says %s", body)
	}
	if n, err := testutil.GatherAndCount(w.a.o.Registry, "stayput_agent_nri_connected"); err != nil || n != 0 {
		t.Errorf("%d metrics say whether it is connected: %v", n, err)
	}
}

// Its loop is woken by the file of an address that is taken, and asks until the sandbox is listed.
func TestWithoutNRIThePodsOfARunningAgentArePromised(t *testing.T) {
	w := newWorld(t)
	w.add(w.sandbox("c0", "other", nil)) // the network is known
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.a.Run(ctx) }()
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	w.runs(s)
	eventually(t, "the promise", func() bool {
		addrs, err := w.ledger.List()
		check(t, err)
		for _, a := range addrs {
			if a.Addr == addr {
				return a.Key != nil
			}
		}
		return false
	})
	cancel()
	check(t, <-done)
}
