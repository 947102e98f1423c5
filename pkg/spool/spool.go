// Package spool carries what the plugin has to tell from its processes to the agent: events for people, and how long
// commands took. It is telemetry: no address depends on it, and its errors are for the log.
//
//	<stateDir>/spool/<slot>  a ring of events, one JSON record a file
//	<stateDir>/latency       how long commands took: one file of fixed size
//
// Both may be deleted at any time; what they held is lost, and nothing else happens.
package spool

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/stayput/stayput/pkg/ledger"
)

// Dir is the state directory of a node, in which spool and latencies lie beside the ledgers. The zero Dir is
// ledger.DefaultStateDir. Its methods take no lock and may be called from many processes at once.
type Dir string

var disk ledger.Disk

const mode = 0o644 // of every file

func (d Dir) path(name string) string {
	if d == "" {
		d = ledger.DefaultStateDir
	}
	return filepath.Join(string(d), name)
}

// The spool is a ring: the slot of an event is its time in microseconds modulo the slots. An agent that is away
// loses the oldest.
const (
	spoolName = "spool"
	slots     = 512
)

// Events returns the directory that Report writes to.
func (d Dir) Events() string { return d.path(spoolName) }

// Report leaves events for the agent. It neither waits nor syncs. The errors of the disk are joined.
func (d Dir) Report(events []ledger.Event) error {
	dir := d.Events()
	var errs []error
	for _, e := range events {
		b, err := json.Marshal(e)
		if err != nil {
			return err
		}
		slot := strconv.FormatInt((e.Time.UnixNano()/1000)%slots, 10)
		tmp := filepath.Join(dir, "."+slot) // two writers of one slot at once lose an event, no more
		err = disk.WriteFile(tmp, b, mode)
		if errors.Is(err, fs.ErrNotExist) {
			if err = ledger.MkdirAll(disk, dir); err == nil {
				err = disk.WriteFile(tmp, b, mode)
			}
		}
		if err == nil {
			err = disk.Rename(tmp, filepath.Join(dir, slot))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Take returns the events of the spool, in no order, and removes them. A file that does not parse is removed too.
// The errors of the disk are joined; what could be read is returned beside them.
func (d Dir) Take() ([]ledger.Event, error) {
	dir := d.Events()
	names, err := disk.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var events []ledger.Event
	var errs []error
	for _, name := range names {
		if name[0] == '.' {
			continue
		}
		path := filepath.Join(dir, name)
		b, err := disk.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var e ledger.Event
		if err == nil && json.Unmarshal(b, &e) == nil {
			events = append(events, e)
		}
		errs = append(errs, err, disk.Remove(path))
	}
	return events, errors.Join(errs...)
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
		errs = append(errs, ledger.RemoveAll(disk, path))
	}
	return errors.Join(errs...)
}
