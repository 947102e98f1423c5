package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/lab"
)

// cpuTime returns a process's CPU time. It reads the process's own clock, which counts nanoseconds; /proc counts ticks
// of 10 ms.
func cpuTime(p *lab.Process) (time.Duration, error) {
	const cpuclockSched = 2 // of the whole process; see MAKE_PROCESS_CPUCLOCK in the kernel
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^p.Pid<<3|cpuclockSched), &ts); err != nil {
		return 0, fmt.Errorf("the CPU clock of process %d: %w", p.Pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// memory returns a line of /proc/PID/status in MiB.
func memory(p *lab.Process, name string) (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(status), name+":")
	var kib float64
	_, err = fmt.Sscan(rest, &kib)
	return kib / 1024, err
}

// settle waits until these processes together use little CPU for a second.
func settle(ctx context.Context, processes ...*lab.Process) error {
	return settleBelow(ctx, 0.1, processes...)
}

// settleBelow is settle for processes that use a share of a core, quiet, even when idle.
func settleBelow(ctx context.Context, quiet float64, processes ...*lab.Process) error {
	const (
		look  = 250 * time.Millisecond
		looks = 4
		limit = 5 * time.Minute
	)
	sum := func() (total time.Duration, err error) {
		for _, p := range processes {
			t, err := cpuTime(p)
			if err != nil {
				return 0, err
			}
			total += t
		}
		return total, nil
	}
	begin := time.Now()
	last, err := sum()
	for calm := 0; err == nil && calm < looks; {
		if time.Since(begin) > limit {
			return fmt.Errorf("the cluster was not idle within %v", limit)
		}
		if err := sleep(ctx, look); err != nil {
			return err
		}
		var now time.Duration
		if now, err = sum(); float64(now-last) < quiet*float64(look) {
			calm++
		} else {
			calm = 0
		}
		last = now
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
