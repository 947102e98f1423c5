package lab

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab/internal/cgroups"
)

// Whatever a node leaves outside its namespaces, its folder and its cgroups, is named stayput-lab-<pid>-<start
// time>-<number>-<node>. Pid and start time are the owning process's, so that other processes can tell whether it
// lives.
const ownedPrefix = "stayput-lab-"

// owned returns a new name for something owned by this process.
func owned(name string) (string, error) {
	start, err := startTime(os.Getpid())
	if err != nil {
		return "", err
	}
	live.Lock()
	defer live.Unlock()
	live.number++
	return fmt.Sprintf("%s%d-%s-%d-%s", ownedPrefix, os.Getpid(), start, live.number, name), nil
}

// sweep removes what dead owners left behind. Their processes and mounts are gone: a node's pid 1 ends with its owner.
func sweep() {
	abandoned := func(path string) bool {
		parts := strings.SplitN(strings.TrimPrefix(filepath.Base(path), ownedPrefix), "-", 3)
		if len(parts) != 3 {
			return false
		}
		pid, err := strconv.Atoi(parts[0])
		if err != nil {
			return false
		}
		start, err := startTime(pid)
		return os.IsNotExist(err) || err == nil && start != parts[1]
	}
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), ownedPrefix+"*"))
	names := map[string]bool{}
	for _, path := range append(dirs, cgroups.Match(ownedPrefix+"*")...) {
		if abandoned(path) {
			names[filepath.Base(path)] = true
		}
	}
	for name := range names {
		// The folder last: a node's pid 1 that is still at it would lose its mounts below, and with them sight of its
		// cgroups. What cannot be removed yet, the next sweep tries again.
		if cgroups.Remove(name, time.Second) == nil {
			_ = os.RemoveAll(filepath.Join(os.TempDir(), name))
		}
	}
}

// startTime distinguishes a process from later ones with the same pid.
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The second field, the command in parentheses, may contain anything; the start time is field 22.
	_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return "", fmt.Errorf("cannot read /proc/%d/stat", pid)
	}
	return fields[19], nil
}

// TempDir makes a folder that is removed by remove, by a signal that ends this process or, if the process is killed, by
// the next [StartNode].
func TempDir(name string) (dir string, remove func() error, err error) {
	id, err := owned(name)
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(os.TempDir(), id)
	remove = atEnd(func() error { return os.RemoveAll(dir) })
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}

// live holds what to close when a signal ends this process.
var live struct {
	sync.Mutex
	closers map[int]func() error
	number  int
}

// atEnd registers f to be called when a signal ends this process. Callers use the returned function instead of f.
func atEnd(f func() error) (closer func() error) {
	live.Lock()
	defer live.Unlock()
	if live.closers == nil {
		live.closers = map[int]func() error{}
		closeOnSignal()
	}
	live.number++
	number := live.number
	live.closers[number] = f
	return func() error {
		err := f()
		live.Lock()
		defer live.Unlock()
		delete(live.closers, number)
		return err
	}
}

// closeOnSignal closes everything on SIGINT and SIGTERM, then lets the signal take its default effect. Without it the
// nodes would die too, but their folders would stay until the next run.
func closeOnSignal() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		sig := <-signals
		live.Lock()
		closers := maps.Clone(live.closers)
		live.Unlock()
		for _, f := range closers {
			_ = f()
		}
		signal.Reset(sig)
		_ = syscall.Kill(os.Getpid(), sig.(syscall.Signal))
	}()
}
