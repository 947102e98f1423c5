package ledger

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/retention"
)

// Instant is one reading of the three clocks that a record keeps. Within one boot only Boot counts: the
// wall clock may jump. Across boots the wall clock is all there is.
type Instant struct {
	Wall   time.Time
	Boot   time.Duration // CLOCK_BOOTTIME: since this boot, time in suspend included
	BootID string        // /proc/sys/kernel/random/boot_id
	// first is what the clocks read at the first command of this boot; zero if that is now.
	first reading
}

// reading is what the clocks read in a boot.
type reading struct {
	wall time.Time
	boot time.Duration
}

// began returns what the clocks read at the first command of this boot. Until then a span of an earlier boot ran by the
// wall clock, and since then by CLOCK_BOOTTIME.
func (i Instant) began() reading {
	if i.first == (reading{}) {
		return reading{i.Wall, i.Boot}
	}
	return i.first
}

// Clock reads the time. An error means that the boot cannot be told, and nothing may be decided without it.
type Clock interface {
	Now() (Instant, error)
}

// SystemClock is the Clock of the machine.
type SystemClock struct{}

const bootIDFile = "/proc/sys/kernel/random/boot_id"

func (SystemClock) Now() (Instant, error) {
	id, err := disk.Local{}.ReadFile(bootIDFile)
	if err != nil {
		return Instant{}, err
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return Instant{}, err
	}
	// UTC: to show a local time would be to read the zone's file.
	return Instant{Wall: time.Now().UTC(), Boot: time.Duration(ts.Nano()), BootID: strings.TrimSpace(string(id))}, nil
}

// anchor is a time span that is running: what was left of it at one Instant.
//
//	{"left":"9m30s","wall":"2026-01-02T15:04:05Z","boottime":123456789,"boot":"8f0c…"}
type anchor struct {
	Left     retention.Duration `json:"left"`
	Wall     time.Time          `json:"wall"`
	BootTime int64              `json:"boottime"` // nanoseconds of CLOCK_BOOTTIME
	Boot     string             `json:"boot"`
}

func anchorAt(now Instant, left time.Duration) anchor {
	return anchor{
		Left: retention.Duration(left), Wall: now.Wall.UTC().Round(0), BootTime: int64(now.Boot), Boot: now.BootID,
	}
}

// remaining is what is left of the span at now; zero or less means that it is over. A wall clock that was set back
// across a boot counts as no time passed, so it can lengthen the span but never cut it; a clock that runs ahead across
// a boot can end it early. What the clock does after the first command of a boot means nothing.
func (a anchor) remaining(now Instant) time.Duration {
	if a.Boot == now.BootID {
		return time.Duration(a.Left) - max(0, now.Boot-time.Duration(a.BootTime))
	}
	first := now.began()
	return time.Duration(a.Left) - max(0, first.wall.Sub(a.Wall)) - max(0, now.Boot-first.boot)
}

// elapsed is the time since the anchor within one boot; ok is false across boots.
func (a anchor) elapsed(now Instant) (d time.Duration, ok bool) {
	return now.Boot - time.Duration(a.BootTime), a.Boot == now.BootID
}
