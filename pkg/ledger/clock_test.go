package ledger

import (
	"testing"
	"time"
)

func TestARetentionRunsOnBoottimeWithinABootAndOnTheWallClockAcrossBoots(t *testing.T) {
	at := Instant{Wall: time.Unix(1_700_000_000, 0), Boot: time.Hour, BootID: "a"}
	a := anchorAt(at, 10*time.Minute)
	for _, c := range []struct {
		why  string
		now  Instant
		want time.Duration
	}{
		{"at once", at, 10 * time.Minute},
		{"four minutes later", Instant{at.Wall.Add(4 * time.Minute), at.Boot + 4*time.Minute, "a"}, 6 * time.Minute},
		{"the wall clock jumped ahead", Instant{at.Wall.Add(1000 * time.Hour), at.Boot + time.Minute, "a"}, 9 * time.Minute},
		{"the wall clock was set back", Instant{at.Wall.Add(-1000 * time.Hour), at.Boot + time.Minute, "a"}, 9 * time.Minute},
		{"over", Instant{at.Wall, at.Boot + 11*time.Minute, "a"}, -time.Minute},
		{"after a boot", Instant{at.Wall.Add(3 * time.Minute), time.Second, "b"}, 7 * time.Minute},
		{"after a boot, the wall clock set back", Instant{at.Wall.Add(-time.Hour), time.Second, "b"}, 10 * time.Minute},
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
