package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/uninstall"
)

// departure waits for the sign that stayput is being uninstalled.
//
// What it knows of the installation is in a file of the state directory, so that a deletion while the agent was away
// is known, and so that one who was killed while it left goes on with that:
//
//	<state>/installation  {"uid":"…","version":"…","leaving":true}
//
// An agent that has never seen the object, because somebody runs it without, never leaves.
type departure struct {
	signal *uninstall.Signal
	path   string
	memory memoryOfInstallation
	quiet  time.Duration
	log    func(msg string, args ...any)
}

type memoryOfInstallation struct {
	uninstall.Object
	// Leaving is set as soon as the uninstallation of the node begins. It goes on until the object is there again.
	Leaving bool `json:"leaving,omitempty"`
}

const installationFile = "installation"

const (
	// quiet is how long the object must have been deleted: it is away for a moment when somebody replaces it
	// (kubectl replace --force). It is not asked for again after that, since the right to ask may have gone.
	quiet = 2 * time.Second
	// answerTime is what the API server has, at the start of an agent that was leaving and at the end of any, to
	// say whether the object is there.
	answerTime = 3 * time.Second
)

func (a *Agent) newDeparture() (*departure, error) {
	d := &departure{path: filepath.Join(a.o.StateDir, installationFile), quiet: quiet, log: a.log.Warn}
	b, err := os.ReadFile(d.path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err == nil && json.Unmarshal(b, &d.memory) != nil {
		a.log.Warn("What was known of the installation cannot be read: an uninstallation while the agent was away is not noticed", "file", d.path)
		d.memory = memoryOfInstallation{}
	}
	d.signal, err = uninstall.NewSignal(a.o.API, a.o.Namespace, d.memory.Object, a.log)
	return d, err
}

// save writes the memory as it is to be.
func (d *departure) save(m memoryOfInstallation) error {
	if m.UID == d.memory.UID && m.Leaving == d.memory.Leaving {
		return nil
	}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	err = atomicfile.File{Path: d.path, Mode: 0o644}.Write(bytes.NewReader(append(b, '\n')))
	if err != nil {
		return fmt.Errorf("remembering the installation: %w", err)
	}
	d.memory = m
	return nil
}

// here says whether stayput is installed, as far as is known.
func (d *departure) here() bool { return d.signal.Status().State == uninstall.Present }

func (d *departure) gone() bool { return d.signal.Status().State == uninstall.Deleted }

// begin remembers that the node is being put back, and end that it is not any more.
func (d *departure) begin() error {
	m := d.memory
	m.Leaving = true
	return d.save(m)
}

func (d *departure) end() error {
	return d.save(memoryOfInstallation{Object: d.signal.Status().Object})
}

// wasLeaving says whether the agent before this one was killed while it left, and stayput is not known to be
// installed again.
func (d *departure) wasLeaving(ctx context.Context) bool {
	if !d.memory.Leaving {
		return false
	}
	late := time.NewTimer(answerTime)
	defer late.Stop()
	for !d.here() && !d.gone() {
		select {
		case <-d.signal.Changed():
			continue
		case <-late.C:
		case <-ctx.Done():
		}
		break
	}
	return !d.here()
}

// awaited returns true once stayput was uninstalled for good, and false when ctx has ended before.
func (d *departure) awaited(ctx context.Context) bool {
	var over <-chan time.Time
	for {
		switch status := d.signal.Status(); {
		case status.State == uninstall.Deleted:
			if over == nil {
				over = time.After(d.quiet)
			}
		case status.State == uninstall.Present:
			over = nil
			if err := d.save(memoryOfInstallation{Object: status.Object}); err != nil {
				d.log("An uninstallation while the agent is away will not be noticed", "err", err)
			}
		case status.Object.UID == "" && d.memory.UID != "": // the API server went back to before the installation
			over = nil
			d.memory = memoryOfInstallation{}
			if err := os.Remove(d.path); err != nil && !errors.Is(err, os.ErrNotExist) {
				d.log("Cannot forget an installation of which the API server knows nothing", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			if d.gone() {
				return true
			}
			// It may have been deleted in this moment, together with the pod that we run in.
			if d.memory.UID == "" {
				return false
			}
			ask, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
			defer cancel()
			return d.signal.Ask(ask).State == uninstall.Deleted
		case <-over:
			return true
		case <-d.signal.Changed():
		}
	}
}
