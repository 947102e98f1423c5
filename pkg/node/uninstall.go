package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/spool"
)

// This file puts a node back as it was before stayput. What it does may be interrupted anywhere and done again:
//
//  1. The agent's conflist goes, so that the runtime asks host-local again, by the file that the conflist was derived
//     from. Pods that run keep their addresses: their files are host-local's, byte for byte, and so are their DELs.
//  2. Every ledger ends its promises, so that host-local has the whole range.
//  3. The node's RetainedIPs go: the cluster knows by that how far it is.
//  4. Once the runtime has surely loaded its configuration anew: the plugin's binary and the state directory. Before
//     that, all of it once more, for an ADD that was under way.

// reloaded is longer than a runtime needs to notice that a file of its CNI configuration has gone, and than most of
// the commands take that it has begun by then.
const reloaded = 2 * time.Second

// uninstaller puts one node back. What is ours goes whether or not this agent is to install it: an earlier one may
// have been.
type uninstaller struct {
	o       Options
	ledgers ledger.Options
	log     *slog.Logger
	// objects deletes the node's RetainedIPs; nil: there is no API server, or it is done.
	objects func(context.Context) error
	// reloaded is how long the runtime may need to notice.
	reloaded time.Duration
	// switched is when the runtime's configuration was last found to have changed.
	switched time.Time
	// leftPlugin: it was said that the plugin's binary stays.
	leftPlugin bool
}

// pass does what can be done now. clean says that nothing is left on the node, and complete that its RetainedIPs are
// gone as well: a node is not left as it is for an API server that does not answer. Until it is complete another pass
// is due, after an error as without one.
func (u *uninstaller) pass(ctx context.Context) (clean, complete bool, err error) {
	if err := u.handBack(); err != nil {
		return false, false, err
	}
	if u.objects != nil {
		if err = u.objects(ctx); err == nil {
			u.objects = nil
		}
	}
	clean, left := u.removeFiles()
	return clean, clean && u.objects == nil, errors.Join(err, left)
}

// handBack puts host-local in charge, of the whole range.
func (u *uninstaller) handBack() error {
	removed, err := cniconf.RemoveConflist(u.o.CNIConfDir)
	if err != nil {
		return fmt.Errorf("removing the CNI configuration: %w", err)
	}
	if removed {
		u.log.Info("Removed the CNI configuration: host-local is in charge", "file", filepath.Join(u.o.CNIConfDir, cniconf.ConflistName))
		if s := cniconf.Inspect(u.o.CNIConfDir, u.o.CNIBinDir); s.State == cniconf.StateBroken {
			u.log.Warn("Without the CNI configuration of stayput", "state", s.State, "message", s.Message)
		}
	}
	if removed || u.switched.IsZero() {
		u.switched = time.Now()
	}
	return u.endPromises()
}

// removeFiles removes what is stayput's, once the runtime has no use for it. clean says that nothing is left.
func (u *uninstaller) removeFiles() (clean bool, err error) {
	if time.Since(u.switched) < u.reloaded {
		return false, nil
	}
	if s := cniconf.Inspect(u.o.CNIConfDir, u.o.CNIBinDir); s.State == cniconf.StateByHand || s.State == cniconf.StateNoPlugin {
		return false, fmt.Errorf("%s names the plugin: write host-local there, then run stayput-agent uninstall", filepath.Join(u.o.CNIConfDir, s.File))
	}
	removed, err := cniconf.RemovePlugin(u.o.CNIConfDir, u.o.CNIBinDir)
	switch {
	case errors.Is(err, cniconf.ErrNotRemoved) && !u.o.InstallCNI:
		// It is somebody else's, or in a place where only whoever put it there can write; nothing names it any more.
		if !u.leftPlugin {
			u.log.Warn("The plugin is left where it is", "why", err)
		}
		u.leftPlugin = true
	case err != nil:
		return false, fmt.Errorf("removing the plugin: %w", err)
	case removed:
		u.log.Info("Removed the plugin", "dir", u.o.CNIBinDir)
	}
	errs := spool.Dir(u.o.StateDir).Remove()
	left, err := ledger.RemoveState(u.ledgers)
	err = errors.Join(errs, err)
	return err == nil && left == 0, err
}

// endPromises goes on after an error: a network that cannot be read must not keep the others' addresses.
func (u *uninstaller) endPromises() error {
	ledgers, err := ledger.Networks(u.ledgers)
	errs := []error{err}
	known := map[string]bool{}
	for _, l := range ledgers {
		known[directory(l)] = true
	}
	for _, n := range named(u.o.CNIConfDir) {
		if l := ledger.Partial(n, u.ledgers); !known[directory(l)] {
			known[directory(l)] = true
			ledgers = append(ledgers, l)
		}
	}
	for _, l := range ledgers {
		name := l.Network().Name
		freed, err := l.Uninstall()
		for _, a := range freed.Addrs {
			u.log.Info("Freed", "network", name, "addr", a)
		}
		for _, a := range freed.InUse {
			u.log.Info("In use, becomes free when its pod ends", "network", name, "addr", a)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// named returns the networks that any CNI configuration names. Of most of them a ledger has a description; not of one
// whose pods were all there before stayput, and whose description was lost.
func named(confDir string) (networks []*ledger.Network) {
	dir, _ := netconf.ReadDir(confDir) // without it there is no network
	for _, f := range dir.Files {
		networks = append(networks, dir.Conf(f).Networks()...)
	}
	return networks
}

// Uninstall puts the node back, for somebody on a node without the agent. It returns when that is done or cannot be
// done, and may be run again.
func Uninstall(ctx context.Context, o Options, log *slog.Logger) error {
	o.setDefaults()
	o.InstallCNI = true // whoever runs this means all of it
	u := &uninstaller{o: o, ledgers: ledger.Options{StateDir: o.StateDir}, log: log, reloaded: reloaded}
	for tries := 0; ; tries++ {
		_, complete, err := u.pass(ctx)
		switch {
		case complete:
			return forget(o.StateDir)
		case err != nil && tries > 1:
			return err
		}
		if !pause(ctx, reloaded) {
			return errors.Join(err, ctx.Err())
		}
	}
}

// leaveRetry is between two passes that did not complete the uninstallation, and leaveAgain between those that look
// whether anything has come back.
const (
	leaveRetry = time.Second
	leaveAgain = 30 * time.Second
	// lastWords is how long the agent goes on after it was told to end, to complete the uninstallation. Kubernetes
	// waits for 30 s.
	lastWords = 20 * time.Second
)

// ErrInstalledAgain is returned by Run when stayput was uninstalled, and then installed again, under a running
// agent: it has to be started anew.
var ErrInstalledAgain = errors.New("stayput was installed again")

// leave uninstalls, and then idles until ctx is done. All loops have ended by then, and the hooks do nothing.
func (a *Agent) leave(ctx context.Context) error {
	a.log.Info("stayput was uninstalled from the cluster: this node is put back as it was")
	if err := a.departure.begin(); err != nil {
		a.log.Warn("Should this process be killed, the next one may not know that stayput was uninstalled", "err", err)
	}
	u := &uninstaller{o: a.o, ledgers: a.ledgers, log: a.log, objects: a.api.DeleteAll, reloaded: a.reloaded}
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastWords, cancel) })()
	said := ""
	for {
		clean, complete, err := u.pass(work)
		switch {
		case complete:
			last := "uninstalled: nothing of stayput is left on this node"
			if u.leftPlugin {
				last += " but the plugin's binary, which is for whoever put it there to remove"
			}
			a.leaving.Store(&last)
		case err != nil:
			a.leaving.Store(ptr("uninstalling: degraded: " + strings.ReplaceAll(err.Error(), "\n", "; ")))
		}
		if err != nil && err.Error() != said {
			said = err.Error()
			a.log.Warn("Cannot complete the uninstallation, trying again", "err", err)
		}
		if clean && ctx.Err() != nil {
			return forget(a.o.StateDir)
		}
		if work.Err() != nil {
			return fmt.Errorf("the uninstallation is not complete, run stayput-agent uninstall: %w", errors.Join(err, work.Err()))
		}
		wait := time.NewTimer(min(leaveRetry, u.reloaded))
		ended := work.Done()
		if complete {
			a.log.Info("Nothing of stayput is left on this node")
			wait.Reset(leaveAgain)
			ended = ctx.Done()
		}
		select {
		case <-ended:
		case <-wait.C:
		case <-a.departure.signal.Changed():
			if a.departure.here() {
				return errors.Join(a.departure.end(), ErrInstalledAgain)
			}
		}
		wait.Stop()
	}
}

func ptr(s string) *string { return &s }

// forget removes the memory of the installation, the last file of all, and the state directory with it. That is
// still there where it is a mount.
func forget(stateDir string) error {
	if err := os.Remove(filepath.Join(stateDir, installationFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := atomicfile.Sweep(stateDir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	_ = os.Remove(stateDir)
	return nil
}
