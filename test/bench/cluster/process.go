package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/lab"
)

// cpuTime returns a process's CPU time. It reads the process's own clock, which counts nanoseconds; /proc counts ticks
// of 10 ms.
func cpuTime(p *lab.Process) (time.Duration, error) { return cpuTimeOf(p.Pid) }

func cpuTimeOf(pid int) (time.Duration, error) {
	const cpuclockSched = 2 // of the whole process; see MAKE_PROCESS_CPUCLOCK in the kernel
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|cpuclockSched), &ts); err != nil {
		return 0, fmt.Errorf("the CPU clock of process %d: %w", pid, err)
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
		limit = 15 * time.Minute // an API server with 5,000 new watches takes about five
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

// usage is the CPU time of processes by their program, in milliseconds. What a program waited for, such as a CNI plugin
// or a runc, is in its programs, except for orphans: those are in the ones of the machine's first process.
type usage map[string]float64

// process is one of the machine's, with its CPU time and that of its programs that have ended, in milliseconds.
type process struct {
	name        string
	parent      int
	self, ended float64
}

// descendants returns the processes that a process started, directly or not.
func descendants(of int) (map[int]process, error) {
	const tick = 10 // ms, USER_HZ
	all := map[int]process{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	for _, file := range stats {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended, and its parent counts it
		}
		before, rest, _ := strings.Cut(string(data), " (")
		end := strings.LastIndex(rest, ") ")
		pid, err := strconv.Atoi(before)
		if err != nil || end < 0 {
			return nil, fmt.Errorf("%s: %q", file, data)
		}
		p := process{name: rest[:end]}
		fields := strings.Fields(rest[end+2:]) // from the third on, see proc(5)
		if _, err := fmt.Sscan(fields[1], &p.parent); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for i, to := range []*float64{&p.self, &p.self, &p.ended, &p.ended} {
			ticks, err := strconv.ParseFloat(fields[11+i], 64)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			*to += ticks * tick
		}
		all[pid] = p
	}
	started := map[int]process{}
	for pid, p := range all {
		at := pid
		for at != of && at != 0 {
			at = all[at].parent
		}
		if at != 0 && pid != at {
			started[pid] = p
		}
	}
	return started, nil
}

// usageOfAll returns the usage of all that this process started, directly or not.
func usageOfAll() (usage, error) {
	all, err := descendants(os.Getpid())
	u := usage{}
	for _, p := range all {
		u[p.name] += p.self
		u[p.name+"'s programs"] += p.ended
	}
	return u, err
}

// sub takes away what was used before.
func (u usage) sub(before usage) usage {
	d := maps.Clone(u)
	for name, t := range before {
		d[name] -= t
	}
	return d
}

func (u usage) sum() (sum float64) {
	for _, t := range u {
		sum += t
	}
	return sum
}
