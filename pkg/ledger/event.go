package ledger

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strconv"
	"time"
)

// EventReason is a word for what happened, in the form of the reason of a Kubernetes Event.
type EventReason string

const (
	EventRestored    EventReason = "IPRestored"
	EventNotRestored EventReason = "IPNotRestored"
	EventRefused     EventReason = "IPRetentionRefused"
	EventClamped     EventReason = "IPRetentionClamped"
)

// Event is something that the people who own the pod should hear of.
type Event struct {
	Reason      EventReason  `json:"reason"`
	Key         Key          `json:"key"`
	Pod         Pod          `json:"pod"`
	ContainerID string       `json:"containerID,omitempty"`
	Netns       string       `json:"netns,omitempty"`
	Addrs       []netip.Addr `json:"addrs,omitempty"`
	Message     string       `json:"message,omitempty"`
	Time        time.Time    `json:"time"`
}

// The spool is a ring of files, <stateDir>/spool/<slot>, each one Event: the plugin writes and never waits,
// the agent reads and removes. An agent that is away loses the oldest.
const (
	spoolDir   = "spool"
	spoolSlots = 512
)

// Report puts events into the spool. Nothing depends on it: an error is for the log.
func Report(o Options, events []Event) error {
	fsys, dir := spool(o)
	var errs []error
	for _, e := range events {
		b, err := json.Marshal(e)
		if err != nil {
			return err
		}
		slot := strconv.FormatInt((e.Time.UnixNano()/1000)%spoolSlots, 10)
		tmp := filepath.Join(dir, "."+slot) // two writers of one slot at once lose an event, no more
		err = fsys.WriteFile(tmp, b, modeState)
		if errors.Is(err, fs.ErrNotExist) {
			if err = mkdirAll(fsys, dir); err == nil {
				err = fsys.WriteFile(tmp, b, modeState)
			}
		}
		if err == nil {
			err = fsys.Rename(tmp, filepath.Join(dir, slot))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// TakeReports reads the spool and empties it.
func TakeReports(o Options) ([]Event, error) {
	fsys, dir := spool(o)
	names, err := fsys.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var events []Event
	var errs []error
	for _, name := range names {
		if name[0] == '.' {
			continue
		}
		path := filepath.Join(dir, name)
		b, err := fsys.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var e Event
		if err == nil && json.Unmarshal(b, &e) == nil {
			events = append(events, e)
		}
		errs = append(errs, err, fsys.Remove(path))
	}
	return events, errors.Join(errs...)
}

// SpoolDir is where Report puts events, to be watched.
func SpoolDir(o Options) string {
	_, dir := spool(o)
	return dir
}

func spool(o Options) (FileSystem, string) {
	if o.FS == nil {
		o.FS = Disk{}
	}
	if o.StateDir == "" {
		o.StateDir = DefaultStateDir
	}
	return o.FS, filepath.Join(o.StateDir, spoolDir)
}
