package ledger

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/retention"
)

// Instant is one reading of the clocks, with the network's own time. Within one boot only Boot counts: the wall clock
// may jump. Across boots the network's time is all there is.
type Instant struct {
	Wall   time.Time
	Boot   time.Duration // CLOCK_BOOTTIME: since this boot, time in suspend included
	BootID string        // /proc/sys/kernel/random/boot_id
	// time is the network's, in which retentions run: it begins as the wall clock, and goes on as [reading.timeAt] says.
	time time.Time
}

// reading is what the clocks read at a command, as the boot marker keeps it.
type reading struct {
	bootID string
	wall   time.Time
	boot   time.Duration
	time   time.Time
}

// timeAt returns the network's time at now, zero if it is not known. Within a boot it goes on by CLOCK_BOOTTIME. Across
// boots it goes on by what the wall clock is ahead of both the last reading and the network's time then, and never
// back: a clock that was behind in an earlier boot, and is right now, does not count its error, whether or not a
// command saw it being set right.
func (r reading) timeAt(now Instant) time.Time {
	switch {
	case r.bootID == now.BootID:
		return r.time.Add(max(0, now.Boot-r.boot))
	case r.bootID == "":
		return time.Time{}
	}
	return r.time.Add(max(0, now.Wall.Sub(later(r.time, r.wall))))
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// readingAfter is how much older a reading may be before a command that changes nothing writes another one.
const readingAfter = time.Hour

// outdated reports whether the marker needs another reading: the wall clock was set since, which must be known before
// the next boot is compared with it, or the reading is old. set says that it was set.
func (r reading) outdated(now Instant) (outdated, set bool) {
	if r.bootID != now.BootID {
		return true, false
	}
	since := now.Boot - r.boot
	set = (now.Wall.Sub(r.wall) - since).Abs() > time.Second
	return set || since > readingAfter, set
}

func (i Instant) reading() reading { return reading{i.BootID, i.Wall, i.Boot, i.time} }

// dated returns i with the network's time. If no marker tells it, no time has passed since the last record.
func (i Instant) dated(p *picture) Instant {
	if i.time.IsZero() {
		for _, s := range p.slots {
			if s.state == slotRetained {
				i.time = later(i.time, s.retained.Run.Time)
			}
		}
	}
	if i.time.IsZero() {
		i.time = i.Wall
	}
	return i
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
	Time     time.Time          `json:"wall"`     // the network's
	BootTime int64              `json:"boottime"` // nanoseconds of CLOCK_BOOTTIME
	Boot     string             `json:"boot"`
}

func anchorAt(now Instant, left time.Duration) anchor {
	return anchor{
		Left: retention.Duration(left), Time: now.time.UTC().Round(0), BootTime: int64(now.Boot), Boot: now.BootID,
	}
}

// remaining is what is left of the span at now; zero or less means that it is over. Only a wall clock that is ahead at
// the first command of a boot can end it early.
func (a anchor) remaining(now Instant) time.Duration {
	if passed, ok := a.elapsed(now); ok {
		return time.Duration(a.Left) - max(0, passed)
	}
	return time.Duration(a.Left) - max(0, now.time.Sub(a.Time))
}

// elapsed is the time since the anchor within one boot; ok is false across boots.
func (a anchor) elapsed(now Instant) (d time.Duration, ok bool) {
	return now.Boot - time.Duration(a.BootTime), a.Boot == now.BootID
}
