// Package spool carries what the plugin has to tell from its processes to the agent: events for people, and how long
// commands took. It is telemetry: no address depends on it, and its errors are for the log.
//
//	<stateDir>/spool/<nanoseconds>-<pid>-<n>  an event, one JSON record a file
//	<stateDir>/latency                        how long commands took: one file, a line each
//
// Both may be deleted at any time; what they held is lost, and nothing else happens.
package spool

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/ledger"
)

// Dir is the state directory of a node, in which spool and latencies lie beside the ledgers. The zero Dir is
// ledger.DefaultStateDir. Its methods take no lock and may be called from many processes at once.
type Dir string

var local disk.Local

const mode = 0o600 // of every file

func (d Dir) path(name string) string {
	if d == "" {
		d = ledger.DefaultStateDir
	}
	return filepath.Join(string(d), name)
}

// The spool holds the newest events: what comes when it is full takes the place of the oldest, which an agent that is
// away loses. Processes that report at the same moment may exceed the bound by one event each.
const (
	spoolName = "spool"
	most      = 512
)

// record is a file of the spool. Lost is how many events this one has taken the place of, with what those had: however
// often it happens, the sum stays right.
type record struct {
	ledger.Event
	Lost int `json:"lost,omitempty"`
}

// Events returns the directory that Report writes to.
func (d Dir) Events() string { return d.path(spoolName) }

// reported makes the names of one process' events differ.
var reported atomic.Uint64

// Report leaves events for the agent. It neither waits nor syncs. The errors of the disk are joined.
func (d Dir) Report(events []ledger.Event) error {
	dir := d.Events()
	lost, err := makeRoom(dir, len(events))
	errs := []error{err}
	for _, e := range events {
		b, err := json.Marshal(record{e, lost})
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%d-%d-%d", time.Now().UnixNano(), unix.Getpid(), reported.Add(1))
		tmp := filepath.Join(dir, "."+name)
		if err = disk.WriteFile(local, tmp, b, mode); err == nil {
			err = local.Rename(tmp, filepath.Join(dir, name))
		}
		if err == nil {
			lost = 0
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// makeRoom removes the oldest files until n more are within the bound, and returns how many events were lost with them.
func makeRoom(dir string, n int) (lost int, err error) {
	names, err := oldestFirst(dir)
	if err != nil || len(names)+n <= most {
		return 0, err
	}
	var errs []error
	for _, name := range names[:min(len(names)+n-most, len(names))] {
		path := filepath.Join(dir, name)
		b, err := local.ReadFile(path)
		var r record
		if err == nil {
			_ = json.Unmarshal(b, &r)
			err = local.Remove(path)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // another process was faster
		case err != nil:
			errs = append(errs, err)
		case name[0] != '.':
			lost += 1 + r.Lost
		}
	}
	return lost, errors.Join(errs...)
}

// oldestFirst lists the spool in the order in which it was written; a missing one is empty.
func oldestFirst(dir string) ([]string, error) {
	names, err := local.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(born(a), born(b)), strings.Compare(a, b)) })
	return names, err
}

// born returns when a file was written, in nanoseconds.
func born(name string) int64 {
	digits, _, _ := strings.Cut(strings.TrimPrefix(name, "."), "-")
	n, _ := strconv.ParseInt(digits, 10, 64)
	return n
}

// Take returns the events of the spool, the oldest first, and removes them; lost is how many more there were. A file
// that does not parse is removed too. The errors of the disk are joined; what could be read is returned beside them.
func (d Dir) Take() (events []ledger.Event, lost int, err error) {
	dir := d.Events()
	names, err := oldestFirst(dir)
	if err != nil {
		return nil, 0, err
	}
	var errs []error
	for _, name := range names {
		path := filepath.Join(dir, name)
		if name[0] == '.' {
			// It is being written, unless its process was killed.
			if time.Since(time.Unix(0, born(name))) > time.Minute {
				errs = append(errs, disk.RemoveAll(local, path))
			}
			continue
		}
		b, err := local.ReadFile(path)
		removed := local.Remove(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(removed, fs.ErrNotExist) {
			continue // a process that needed the room was faster, and counts it
		}
		var r record
		if err == nil && json.Unmarshal(b, &r) == nil {
			events = append(events, r.Event)
			lost += r.Lost
		}
		errs = append(errs, err, removed)
	}
	return events, lost, errors.Join(errs...)
}

// files are what is kept in the state directory itself. A network's directory there may begin with the same word.
func (d Dir) files() []string {
	return []string{d.Events(), d.LatencyFile(), d.LatencyFile() + tmpSuffix}
}

// Keeps reports whether path is one of the files of the state directory that this package keeps there.
func (d Dir) Keeps(path string) bool { return slices.Contains(d.files(), filepath.Clean(path)) }

// Remove removes the spool and the latencies. A missing state directory is no error.
func (d Dir) Remove() error {
	var errs []error
	for _, path := range d.files() {
		errs = append(errs, disk.RemoveAll(local, path))
	}
	return errors.Join(errs...)
}
