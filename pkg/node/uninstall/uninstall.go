// Package uninstall puts a node back as it was before stayput: the agent does so as soon as stayput is uninstalled from
// the cluster ([Uninstaller]), and a command does it on a node without an agent ([Node]).
package uninstall

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/uninstall"
)

// ErrInstalledAgain is returned by Run if stayput is installed again after the node was put back: the agent must be
// restarted.
var ErrInstalledAgain = errors.New("stayput was installed again")

const (
	// askTimeout bounds the wait for the API server to say whether the installation still exists, when an interrupted
	// uninstallation is found at the start, and when the agent is told to end.
	askTimeout = 3 * time.Second
	// retryAfter is the pause between two passes until one is complete; recheckAfter between those that check that
	// nothing has come back.
	retryAfter   = time.Second
	recheckAfter = 30 * time.Second
	// lastWords is how long an agent that was told to end goes on with the uninstallation. Kubernetes kills it after
	// 30 s.
	lastWords = 20 * time.Second
)

// RecordFile is a file of the state directory with a record. By it an agent notices an uninstallation that happened
// while it was away, and completes an uninstallation that it was killed in:
//
//	{"uid":"…","version":"…","leaving":true}
const RecordFile = "installation"

// record is what the node remembers of the installation.
type record struct {
	uninstall.Object
	// Begun is true from the beginning of the node's uninstallation until stayput is installed again.
	Begun bool `json:"leaving,omitempty"`
}

// Uninstaller waits until stayput is uninstalled from the cluster, and then puts the node back. An agent that has never
// observed the installation's ConfigMap never does. A nil Uninstaller waits for nothing.
type Uninstaller struct {
	// Confirm is how long the installation must have been deleted: kubectl replace --force deletes it for a moment.
	// After that the API server is not asked again, since the rights may be gone. New sets it; change it before Run.
	Confirm time.Duration
	// Hold is how long promises outlive the installation. A ConfigMap that was pruned or is being restored comes back
	// in that time. They end at once if its deletion was confirmed, or if the agent is deleted too, that is, told to
	// end. New sets it; change it before Run.
	Hold time.Duration
	// Pools is told what the installation says of the cluster's pools, empty if there are none, and whether any is of mode
	// Routed; nil if nothing uses them. It is not called while that is not known. Set it before Run.
	Pools func(pools string, routed bool)
	Options

	signal *uninstall.Signal
	path   string
	record record // as it is in the file, of Run
	status atomic.Pointer[string]
}

// New returns an Uninstaller for stayput in a namespace of the cluster of config.
func New(config *rest.Config, namespace string, o Options) (*Uninstaller, error) {
	o.setDefaults()
	u := &Uninstaller{Confirm: 2 * time.Second, Hold: 10 * time.Minute, Options: o, path: o.recordPath()}
	b, err := os.ReadFile(u.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil && json.Unmarshal(b, &u.record) != nil {
		u.Log.Warn("Cannot read the installation record, an uninstallation while the agent is down goes unnoticed",
			"file", u.path)
		u.record = record{}
	}
	u.signal, err = uninstall.NewSignal(config, namespace, u.record.Object, o.Log)
	return u, err
}

// Status returns how far the uninstallation is, in a line for people; empty if none has begun.
func (u *Uninstaller) Status() string {
	if u == nil {
		return ""
	}
	if s := u.status.Load(); s != nil {
		return *s
	}
	return ""
}

func (u *Uninstaller) setStatus(s string) { u.status.Store(&s) }

// Run calls work, with a context that ends when stayput is uninstalled or ctx is done. After an uninstallation it puts
// the node back, and then idles until ctx is done. Its error is ErrInstalledAgain, or what kept it from completing the
// uninstallation.
func (u *Uninstaller) Run(ctx context.Context, work func(context.Context)) error {
	if u == nil {
		work(ctx)
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	observing, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { u.signal.Run(observing) })
	if !u.interrupted(ctx) {
		var worker sync.WaitGroup
		working, end := context.WithCancel(ctx)
		defer end()
		worker.Go(func() { work(working) })
		uninstalled := u.await(ctx)
		if uninstalled {
			u.setStatus("uninstalling") // before work ends: hooks check it
		}
		end()
		worker.Wait()
		if !uninstalled {
			return nil
		}
	}
	u.setStatus("uninstalling")
	return u.putBack(ctx)
}

// interrupted reports whether an earlier agent was killed during the uninstallation and stayput is not known to be
// installed again.
func (u *Uninstaller) interrupted(ctx context.Context) bool {
	if !u.record.Begun {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for u.signal.Status().State == uninstall.Unknown && ctx.Err() == nil {
		select {
		case <-u.signal.Changed():
		case <-ctx.Done():
		}
	}
	return u.signal.Status().State != uninstall.Present
}

// await returns true once stayput is uninstalled for good, false if ctx is done before.
func (u *Uninstaller) await(ctx context.Context) bool {
	var confirmed <-chan time.Time
	for {
		switch status := u.signal.Status(); {
		case status.State == uninstall.Deleted:
			if confirmed == nil {
				confirmed = time.After(u.Confirm)
			}
		case status.State == uninstall.Present:
			confirmed = nil
			if err := u.save(record{Object: status.Object}); err != nil {
				u.Log.Warn("An uninstallation while the agent is down will go unnoticed", "err", err)
			}
			if u.Pools != nil {
				u.Pools(status.Object.Pools, status.Object.Routed)
			}
		case status.Object.UID == "" && u.record.UID != "": // the API server was restored from a backup without it
			confirmed = nil
			u.record = record{}
			if err := os.Remove(u.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				u.Log.Warn("Cannot remove the record of an installation that the API server does not know", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			if u.signal.Status().State == uninstall.Deleted {
				return true
			}
			// The installation may have been deleted together with this pod.
			if u.record.UID == "" {
				return false
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
			defer cancel()
			return u.signal.Ask(ctx).State == uninstall.Deleted
		case <-confirmed:
			return true
		case <-u.signal.Changed():
		}
	}
}

// putBack puts the node back, and then idles until ctx is done.
func (u *Uninstaller) putBack(ctx context.Context) error {
	u.Log.Info("Uninstalling: restoring this node")
	object := u.record.Object
	object.Confirmed = object.Confirmed || u.signal.Status().Object.Confirmed
	if err := u.save(record{Object: object, Begun: true}); err != nil {
		u.Log.Warn("If this process is killed, the next one may not complete the uninstallation", "err", err)
	}
	c := &cleanup{Options: u.Options}
	if !object.Confirmed {
		c.hold = time.Now().Add(u.Hold)
		u.Log.Warn("The installation's ConfigMap was deleted without the annotation "+uninstall.AnnotationConfirmed+
			": host-local takes over at once, promises end later", "configmap", uninstall.ConfigMap, "end", c.hold)
	}
	working, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastWords, cancel) })()
	logged := ""
	for {
		if ctx.Err() != nil {
			c.hold = time.Time{}
		}
		clean, complete, err := c.pass(working)
		switch {
		case err == nil && c.held():
			u.setStatus("uninstalling: ConfigMap " + uninstall.ConfigMap + " is gone; promises end at " +
				c.hold.UTC().Format(time.RFC3339) + " unless it is created again")
		case complete:
			status := "uninstalled: stayput was removed from this node"
			if c.leftPlugin {
				status += " except the plugin's binary, which the agent may not remove"
			}
			u.setStatus(status)
		case err != nil:
			u.setStatus("uninstalling: degraded: " + strings.ReplaceAll(err.Error(), "\n", "; "))
		}
		if err != nil && err.Error() != logged {
			logged = err.Error()
			u.Log.Warn("Cannot complete the uninstallation, retrying", "err", err)
		}
		if clean && ctx.Err() != nil {
			return c.forget()
		}
		if working.Err() != nil {
			return fmt.Errorf("the uninstallation is not complete, run stayput-agent uninstall: %w",
				errors.Join(err, working.Err()))
		}
		pause, end := min(retryAfter, u.Reload), working.Done()
		if complete {
			u.Log.Info("Uninstalled: stayput was removed from this node")
			pause, end = recheckAfter, ctx.Done()
		}
		select {
		case <-end:
		case <-time.After(pause):
		case <-u.signal.Changed():
			if status := u.signal.Status(); status.State == uninstall.Present {
				return errors.Join(u.save(record{Object: status.Object}), ErrInstalledAgain)
			}
		}
	}
}

// save makes r the record. A newer resource version alone is not worth a write.
func (u *Uninstaller) save(r record) error {
	if r.UID == u.record.UID && r.Begun == u.record.Begun {
		return nil
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := (atomicfile.File{Path: u.path, Mode: 0o600}).Write(bytes.NewReader(append(b, '\n'))); err != nil {
		return fmt.Errorf("recording the installation: %w", err)
	}
	u.record = r
	return nil
}

func (o *Options) recordPath() string { return filepath.Join(o.Ledgers.StateDir, RecordFile) }
