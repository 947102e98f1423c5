package ledger

import (
	"slices"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

func TestARetentionRunsOnBoottimeWithinABootAndOnTheNetworksTimeAcrossBoots(t *testing.T) {
	at := Instant{Wall: time.Unix(1_700_000_000, 0), Boot: time.Hour, BootID: "a"}
	at.time = at.Wall.Add(-1000 * time.Hour) // the two have nothing in common
	a := anchorAt(at, 10*time.Minute)
	later := func(wall, boot time.Duration, id string) Instant {
		return Instant{Wall: at.Wall.Add(wall), Boot: boot, BootID: id, time: at.time}
	}
	// Another boot, in which the network's time is so much later.
	inBoot := func(wall, passed time.Duration) Instant {
		now := later(wall, 90*time.Second, "b")
		now.time = at.time.Add(passed)
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
		{"after a boot", inBoot(3*time.Minute, 3*time.Minute), 7 * time.Minute},
		{"after a boot, the wall clock jumped ahead", inBoot(1000*time.Hour, 4*time.Minute), 6 * time.Minute},
		{"after a boot, the wall clock was set back", inBoot(-1000*time.Hour, 4*time.Minute), 6 * time.Minute},
		{"after a marker was lost", inBoot(0, -time.Hour), 10 * time.Minute},
	} {
		if got := a.remaining(c.now); got != c.want {
			t.Errorf("%s: %s left, want %s", c.why, got, c.want)
		}
	}
}

func TestTheNetworksTimeGoesOnFromTheLastReadingAndNeverBack(t *testing.T) {
	epoch := time.Unix(1_700_000_000, 0)
	at := func(d time.Duration) time.Time { return epoch.Add(d) }
	for _, c := range []struct {
		why  string
		last reading
		now  Instant
		want time.Duration
	}{
		{"in the same boot", reading{"a", at(0), time.Hour, at(0)}, Instant{Wall: at(-time.Hour), Boot: 2 * time.Hour,
			BootID: "a"}, time.Hour},
		{"in the next boot", reading{"a", at(0), time.Hour, at(0)}, Instant{Wall: at(time.Minute), BootID: "b"}, time.Minute},
		{"the clock is behind", reading{"a", at(0), time.Hour, at(0)}, Instant{Wall: at(-time.Minute), BootID: "b"}, 0},
		{"the clock was behind, and was set right after the last reading",
			reading{"a", at(-30 * time.Hour), time.Hour, at(0)}, Instant{Wall: at(time.Minute), BootID: "b"}, time.Minute},
		{"the network's time is behind, the clock right", reading{"a", at(0), time.Hour, at(-30 * time.Hour)},
			Instant{Wall: at(time.Minute), BootID: "b"}, time.Minute - 30*time.Hour},
	} {
		if got := c.last.timeAt(c.now); !got.Equal(at(c.want)) {
			t.Errorf("%s: %s, want %s", c.why, got, at(c.want))
		}
	}
	if got := (reading{}).timeAt(Instant{Wall: epoch, BootID: "a"}); !got.IsZero() {
		t.Errorf("without a reading it is %s, want unknown", got)
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

// Until the clock has caught up no time is counted while the node is off, but all the time that it runs.
func TestAWallClockSetBackAcrossABootCountsWhileTheNodeRuns(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	w.boot(-time.Hour)
	w.prepare()
	w.advance(3 * time.Minute)
	w.add("job", ordinary)
	w.boot(2 * time.Minute)
	addrs, err := w.ledger().List()
	i := slices.IndexFunc(addrs, func(a Address) bool { return a.State == StateRetained })
	if err != nil || i < 0 || addrs[i].Left.Round(time.Second) != 7*time.Minute {
		t.Errorf("%+v %v, want 7 of ten minutes left", addrs, err)
	}
}

// The clock of a node without an RTC is behind when it boots, and right once NTP has set it.
func TestAClockThatWasBehindAtABootEndsNoRetentionEarly(t *testing.T) {
	day := &retention.Policy{Retention: retention.Duration(24 * time.Hour)}
	for _, c := range []struct {
		why    string
		behind time.Duration
		off    time.Duration // between the two boots
		inBoot bool          // the pod ends in the boot whose clock is behind
		read   bool          // a command runs once NTP has set the clock
	}{
		{"retained before, 55 years behind", 55 * 365 * 24 * time.Hour, time.Minute, false, false},
		{"retained before, 30 h behind", 30 * time.Hour, time.Minute, false, false},
		{"ended before NTP", 30 * time.Hour, time.Minute, true, false},
		{"ended before NTP, after 20 h off", 30 * time.Hour, 20 * time.Hour, true, true},
		{"ended before NTP, after 20 h off, the clock stood still", 20 * time.Hour, 20 * time.Hour, true, true},
	} {
		for _, keep := range []string{"all", "durable"} {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			if c.inBoot {
				w.add("web-0", day)
			} else {
				stopped(w, "web-0", day)
			}
			w.boot(c.off - c.behind)
			w.prepare()
			if c.inBoot {
				stopped(w, "web-0", day)
				w.fs.syncAll(w.fs.root)
			}
			w.clock.now.Wall = w.clock.now.Wall.Add(c.behind)
			if c.read {
				w.prepare()
			}
			w.advance(time.Hour)
			w.fs.lose(keep, nil)
			w.boot(time.Minute)
			if e, _, err := w.ledger().Expire(); len(e) > 0 || err != nil {
				t.Errorf("%s, keeping %s: after 1 h of 24 h %v expired, %v", c.why, keep, e, err)
			}
		}
	}
}

func TestAJumpWithinABootEndsNoRetentionEarlyAfterTheNext(t *testing.T) {
	day := &retention.Policy{Retention: retention.Duration(24 * time.Hour)}
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	att, _, err := w.add("web-0", day)
	must.Do(t, err)
	w.advance(time.Hour)
	w.clock.now.Wall = w.clock.now.Wall.Add(-48 * time.Hour) // for a moment, in which the pod ends
	w.del(att)
	w.clock.now.Wall = w.clock.now.Wall.Add(48 * time.Hour)
	w.boot(time.Hour)
	if got := left(w); got != 23*time.Hour {
		t.Errorf("%s left of 24 h after one, want 23h", got)
	}
}

// Whenever the first command after NTP is killed, and whatever a power loss keeps of it.
func TestARebuildThatIsKilledBeforeTheClockIsSetEndsNoRetentionEarly(t *testing.T) {
	day := &retention.Policy{Retention: retention.Duration(24 * time.Hour)}
	for n, hit := 0, true; hit; n++ {
		w := newWorld(t, testNetwork("10.1.0.0/28", ""))
		w.add("web-0", day) // it runs until the power fails, and has 24 h from the next boot on
		w.boot(0)           // 20 h later by a clock that stood still
		hit = w.killAt(n, func() { must.Do(t, w.ledger().Prepare()) })
		w.clock.now.Wall = w.clock.now.Wall.Add(20 * time.Hour)
		w.prepare()
		w.advance(time.Hour)
		w.boot(4 * time.Hour)
		if e, _, err := w.ledger().Expire(); len(e) > 0 || err != nil {
			t.Errorf("killed at operation %d: after 5 h of 24 h %v expired, %v", n, e, err)
		}
	}
}

// A marker that is lost tells no time, so none has passed.
func TestALostMarkerEndsNoRetentionEarly(t *testing.T) {
	day := &retention.Policy{Retention: retention.Duration(24 * time.Hour)}
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", day)
	must.Do(t, w.fs.Remove("/data/net/"+markerName))
	w.boot(30 * time.Hour)
	if got := left(w); got != 24*time.Hour {
		t.Errorf("%s left of 24 h, want all of them", got)
	}
	w.prepare()
	w.advance(time.Hour)
	w.del(Attachment{"unknown", "eth0"})
	w.boot(time.Hour)
	if got := left(w); got != 22*time.Hour {
		t.Errorf("%s left of 24 h after two, want 22h", got)
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
