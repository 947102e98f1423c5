package node

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/retention"
)

// retained is an address that was web-0's.
func (w *world) retained(id string) netip.Addr {
	w.t.Helper()
	s := w.sandbox(id, "web-0", ten)
	policy, _, err := retention.Parse(ten)
	check(w.t, err)
	addr := w.addOn(w.ledger, s, "eth0", &policy)[0]
	w.del(s)
	w.want(addr, ledger.StateRetained)
	return addr
}

func TestARetentionEndsAtItsTimeAndNotBefore(t *testing.T) {
	w := newWorld(t)
	addr := w.retained("c1")
	left, ends := w.a.book.refresh()
	if !ends || left != 10*time.Minute {
		t.Errorf("next expiry in %s, %t", left, ends)
	}
	w.clock.Pass(left - time.Second)
	w.a.book.expire()
	w.want(addr, ledger.StateRetained)
	w.wantSaid()
	w.clock.Pass(time.Second)
	if _, ends := w.a.book.expire(); ends {
		t.Error("something is left to expire")
	}
	w.want(addr, "")
	w.wantSaid(retainedip.EventExpired)
	if n := testutil.ToFloat64(w.a.metrics.expired.WithLabelValues("pods")); n != 1 {
		t.Errorf("counted %v", n)
	}
}

func TestTheRunningAgentExpiresWhatItDidNotSeeBegin(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { w.a.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	eventually(t, "reconciled", w.a.reconciler.tried.Load)

	// No hook is called: the plugin alone sees the pod come and go. The agent hears of it by inotify.
	addr := w.retained("c1")
	eventually(t, "the agent knows of the retention", func() bool {
		w.said.mu.Lock()
		defer w.said.mu.Unlock()
		n := len(w.said.claims)
		return n > 0 && len(w.said.claims[n-1]) == 1 && w.said.claims[n-1][0].Phase == retainedip.PhaseRetained
	})
	w.clock.Pass(time.Hour)
	w.a.StopPodSandbox(Sandbox{}) // any wake-up will do: the timer runs on the machine's clock, not on this one
	eventually(t, "it is free", func() bool { return w.state(addr) == "" })
}

func TestClaimsArePublishedWhenTheyChangeAndOnlyThen(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	policy, _, err := retention.Parse(ten)
	check(t, err)
	addr := w.addOn(w.ledger, s, "eth0", &policy)[0]
	w.add(w.sandbox("c2", "ordinary", nil))
	last := func() []retainedip.Claim { return w.said.claims[len(w.said.claims)-1] }

	w.a.book.refresh()
	w.a.book.refresh()
	if n := len(w.said.claims); n != 1 {
		t.Fatalf("published %d times", n)
	}
	c := last()
	if len(c) != 1 || c[0].Phase != retainedip.PhaseBound || c[0].Pod != s.Pod || c[0].ContainerID != "c1" ||
		c[0].Addrs[0] != addr || !c[0].Expires.IsZero() {
		t.Errorf("bound: %+v", c)
	}
	w.del(s)
	w.a.book.refresh()
	w.clock.Pass(time.Minute)
	w.a.book.refresh()
	if n := len(w.said.claims); n != 2 {
		t.Fatalf("published %d times", n)
	}
	now, _ := w.clock.Now()
	c = last()
	if len(c) != 1 || c[0].Phase != retainedip.PhaseRetained || c[0].ContainerID != "" ||
		!c[0].Expires.Equal(now.Wall.Add(9*time.Minute)) {
		t.Errorf("retained: %+v", c)
	}
	check(t, w.ledger.Release(c[0].Key))
	w.a.book.refresh()
	if c := last(); len(c) != 0 {
		t.Errorf("released: %+v", c)
	}
}

func TestANetworkIsAdoptedAtItsFirstCommand(t *testing.T) {
	w := newWorld(t)
	old := w.sandbox("c1", "web-0", ten)
	w.hostLocal("192.0.2.9", "c1")
	w.runs(old)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { w.a.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	eventually(t, "reconciled", w.a.reconciler.tried.Load)
	w.add(w.sandbox("c2", "other", nil))
	eventually(t, "adopted", func() bool {
		addrs, err := w.ledger.List()
		check(t, err)
		for _, a := range addrs {
			if a.Attachment.ContainerID == "c1" && a.Key != nil {
				return true
			}
		}
		return false
	})
}

func TestAWallClockThatIsSetMovesWhenClaimsExpire(t *testing.T) {
	w := newWorld(t)
	w.retained("c1")
	w.a.book.refresh()
	w.clock.SetWall(w.clock.Wall().Add(time.Hour)) // what is left is counted by the other clock
	w.a.book.refresh()
	if n := len(w.said.claims); n != 2 {
		t.Fatalf("published %d times", n)
	}
	if moved := w.said.claims[1][0].Expires.Sub(w.said.claims[0][0].Expires); moved != time.Hour {
		t.Errorf("moved by %s", moved)
	}
}

func TestNoClaimIsTakenBackWhileANetworkCannotBeRead(t *testing.T) {
	w := newWorld(t)
	w.retained("c1")
	w.a.book.refresh()
	w.corrupt()
	w.a.book.refresh()
	if n := len(w.said.claims); n != 1 {
		t.Errorf("published %d times: %v", n, w.said.claims)
	}
}

// corrupt makes the network's description unreadable.
func (w *world) corrupt() {
	w.t.Helper()
	paths, err := filepath.Glob(filepath.Join(w.a.o.StateDir, "pods-*", "network"))
	check(w.t, err)
	if len(paths) != 1 {
		w.t.Fatalf("descriptions: %v", paths)
	}
	check(w.t, os.WriteFile(paths[0], []byte("{"), 0o644))
}

func TestANetworksDescriptionAsksForAReconciliationWhenItIsThere(t *testing.T) {
	w := newWorld(t)
	for name, asks := range map[string]bool{
		"pods-0123/network": true, "latency-0123": true, "latency.pods-0123": true, "spool-0123": true,
		"spool/7": false, "spool": false, "latency": false, "latency.tmp": false,
	} {
		w.a.watch.see(fsnotify.Event{Name: filepath.Join(w.a.o.StateDir, name), Op: fsnotify.Create})
		select {
		case <-w.a.reconciler.now:
			if !asks {
				t.Errorf("%s asks for one", name)
			}
		default:
			if asks {
				t.Errorf("%s does not ask for one", name)
			}
		}
	}
}

func TestWithoutInotifyTheLoopsAreWokenByTheClock(t *testing.T) {
	w := newWorld(t)
	w.a.watch.close()
	w.a.watch.fs = nil // as where every instance is taken, which a test must not do to its machine
	w.a.watch.follow(nil)
	for _, pending := range []wake.Signal{w.a.book.now, w.a.spool.now} {
		select {
		case <-pending:
		default:
		}
	}
	go w.a.watch.run(t.Context())
	for name, woken := range map[string]wake.Signal{"book": w.a.book.now, "spool": w.a.spool.now} {
		select {
		case <-woken:
		case <-time.After(time.Minute): // bounds a test that hangs
			t.Errorf("the %s loop is not woken", name)
		}
	}
}
