package ledger

import (
	"testing"
	"time"
)

func TestARetentionRunsOnBoottimeWithinABootAndOnTheWallClockAcrossBoots(t *testing.T) {
	at := Instant{Wall: time.Unix(1_700_000_000, 0), Boot: time.Hour, BootID: "a"}
	a := anchorAt(at, 10*time.Minute)
	later := func(wall, boot time.Duration, id string) Instant {
		return Instant{Wall: at.Wall.Add(wall), Boot: boot, BootID: id}
	}
	// A minute after the first command of another boot, which came three minutes after the anchor.
	inBoot := func(wall time.Duration) Instant {
		now := later(wall, 90*time.Second, "b")
		now.first = reading{at.Wall.Add(3 * time.Minute), 30 * time.Second}
		return now
	}
	for _, c := range []struct {
		why  string
		now  Instant
		want time.Duration
	}{
		{"at once", at, 10 * time.Minute},
		{"four minutes later", later(4*time.Minute, at.Boot+4*time.Minute, "a"), 6 * time.Minute},
		{"the wall clock jumped ahead", later(1000*time.Hour, at.Boot+time.Minute, "a"), 9 * time.Minute},
		{"the wall clock was set back", later(-1000*time.Hour, at.Boot+time.Minute, "a"), 9 * time.Minute},
		{"over", later(0, at.Boot+11*time.Minute, "a"), -time.Minute},
		{"after a boot", later(3*time.Minute, time.Second, "b"), 7 * time.Minute},
		{"after a boot, the wall clock set back", later(-time.Hour, time.Second, "b"), 10 * time.Minute},
		{"a minute into a boot", inBoot(4 * time.Minute), 6 * time.Minute},
		{"a minute into a boot, the wall clock jumped ahead", inBoot(1000 * time.Hour), 6 * time.Minute},
		{"a minute into a boot, the wall clock was set back", inBoot(-1000 * time.Hour), 6 * time.Minute},
	} {
		if got := a.remaining(c.now); got != c.want {
			t.Errorf("%s: %s left, want %s", c.why, got, c.want)
		}
	}
}

func TestSeveralBootsCountEachOnce(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	for range 3 {
		w.boot(2 * time.Minute)
		w.del(Attachment{"unknown", "eth0"}) // the first command of the boot
		w.advance(time.Minute)
	}
	addrs, err := w.ledger().List()
	if err != nil || len(addrs) != 1 || addrs[0].Left.Round(time.Second) != time.Minute {
		t.Fatalf("%+v %v, want one minute left of ten", addrs, err)
	}
}

// left returns what is left of the one retained address.
func left(w *world) time.Duration {
	w.t.Helper()
	addrs, err := w.ledger().List()
	if err != nil || len(addrs) != 1 || addrs[0].State != StateRetained {
		w.t.Fatalf("%+v %v, want one retained address", addrs, err)
	}
	return addrs[0].Left.Round(time.Second)
}

func TestAWallClockThatJumpsAfterABootChangesNoRetention(t *testing.T) {
	for _, jump := range []time.Duration{1000 * time.Hour, -1000 * time.Hour} {
		w := newWorld(t, testNetwork("10.1.0.0/28", ""))
		stopped(w, "web-0", tenMinutes)
		w.boot(2 * time.Minute)
		w.del(Attachment{"unknown", "eth0"}) // the first command of the boot
		w.clock.now.Wall = w.clock.now.Wall.Add(jump)
		w.advance(time.Minute)
		if got := left(w); got != 7*time.Minute {
			t.Errorf("a jump by %s leaves %s of ten minutes, want 7m", jump, got)
		}
	}
}

func TestAWallClockSetBackAcrossABootCountsFromThereOn(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	w.boot(-time.Hour)
	w.del(Attachment{"unknown", "eth0"})
	w.boot(2 * time.Minute)
	if got := left(w); got != 8*time.Minute {
		t.Errorf("%s left of ten minutes, want 8m", got)
	}
}

func TestABootWritesNoRetainedRecordAnew(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	w.boot(2 * time.Minute)
	c := &counted{FS: w.fs}
	l := New(w.net, Options{StateDir: "/state", FS: c, Clock: w.clock, Netns: w.netns, Sleep: w.pass})
	if _, err := l.Del(DelRequest{Attachment: Attachment{"unknown", "eth0"}}); err != nil || len(c.calls) == 0 {
		t.Fatalf("%v, calls %q", err, c.calls)
	}
	temporary, written := "write "+w.net.Name+"/"+tempName, 0
	for _, call := range c.calls {
		if call == temporary {
			written++
		}
	}
	if written != 1 { // the marker
		t.Errorf("%d files of the network were written, want the marker alone: %q", written, c.calls)
	}
	if got := left(w); got != 8*time.Minute {
		t.Errorf("%s left of ten minutes, want 8m", got)
	}
}
