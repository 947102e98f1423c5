package uninstall

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/spool"
)

// Options say what is to be put back.
type Options struct {
	Ledgers               ledger.Options
	CNIConfDir, CNIBinDir string // of the runtime
	CNICacheDir           string // of libcni in the runtime
	// MayLeavePlugin lets the plugin's binary stay if it is not Stayput's, or cannot be removed: this agent has not
	// installed it.
	MayLeavePlugin bool
	// Netns is the node's network namespace, by default the process's own.
	Netns string
	// DeleteObjects deletes the node's RetainedIPs, nil if there is no API server.
	DeleteObjects func(context.Context) error
	// Reload is longer than the runtime needs to notice that a file of its CNI configuration is gone, and than most
	// CNI commands take that have begun by then. Default 2 s.
	Reload time.Duration
	Log    *slog.Logger
}

func (o *Options) setDefaults() {
	if o.Reload == 0 {
		o.Reload = 2 * time.Second
	}
}

// Node puts the node back, on a node whose agent does not run. It returns when that is done or fails, and may be run
// again.
func Node(ctx context.Context, o Options) error {
	o.setDefaults()
	c := &cleanup{Options: o}
	for tries := 0; ; tries++ {
		complete, err := c.pass(ctx)
		if complete || err != nil && tries > 1 {
			return err
		}
		select {
		case <-time.After(o.Reload):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}

// cleanup puts the node back in passes. Any pass may be interrupted:
//
//  1. It removes the agent's conflist: the runtime uses the file again that it was derived from, which names
//     host-local. Running pods keep their addresses, whose files are host-local's byte for byte, and so are their DELs.
//  2. It ends every promise, so that host-local has the whole range, and removes the agent's routes to addresses of
//     pools. Before that, multus delegates to that file again. Not earlier: what has to come back does so by itself.
//  3. It deletes the node's RetainedIPs.
//  4. Once the runtime has surely reloaded its configuration, it does all of that again, for an ADD that was under way,
//     and removes the plugin's binary and the state directory.
//
// It removes what is Stayput's even if this agent installs nothing: an earlier one may have.
type cleanup struct {
	Options
	objectsDeleted bool
	leftPlugin     bool      // the plugin's binary stays, which is logged
	switched       time.Time // when the runtime's configuration was last found to have changed
}

// pass does what can be done now. complete reports that nothing is left of the node's files and RetainedIPs. Until then
// another pass is due, with or without an error.
func (c *cleanup) pass(ctx context.Context) (complete bool, err error) {
	if err := c.handBack(); err != nil {
		return false, err
	}
	if err := errors.Join(c.handBackMultus(), c.endPromises(), c.removeRoutes()); err != nil {
		return false, err
	}
	if !c.objectsDeleted && c.DeleteObjects != nil {
		err = c.DeleteObjects(ctx)
	}
	c.objectsDeleted = err == nil
	clean, filesErr := c.removeFiles()
	return clean && c.objectsDeleted, errors.Join(err, filesErr)
}

// handBack puts host-local in charge.
func (c *cleanup) handBack() error {
	removed, err := cniconf.RemoveConflist(c.CNIConfDir, c.CNICacheDir)
	if err != nil {
		return fmt.Errorf("removing the CNI configuration: %w", err)
	}
	if removed {
		c.Log.Info("Removed the CNI configuration, host-local is used again", "file",
			filepath.Join(c.CNIConfDir, cniconf.ConflistName))
		if s := cniconf.Inspect(c.CNIConfDir, c.CNIBinDir); s.State == cniconf.StateBroken {
			c.Log.Warn("CNI configuration is broken without Stayput's", "state", s.State, "message", s.Message)
		}
	}
	if removed || c.switched.IsZero() {
		c.switched = time.Now()
	}
	return nil
}

// handBackMultus makes multus use the file again that the agent's was derived from.
func (c *cleanup) handBackMultus() error {
	changed, err := cniconf.HandBackMultus(c.CNIConfDir)
	if changed {
		c.Log.Info("Restored multus' configuration, host-local is used again")
		c.switched = time.Now()
	}
	if err != nil {
		return fmt.Errorf("restoring multus' configuration: %w", err)
	}
	return nil
}

// endPromises gives host-local the whole range. It goes on after an error: a network that cannot be read must not keep
// the others' addresses.
func (c *cleanup) endPromises() error {
	ledgers, err := ledger.Networks(c.Ledgers)
	errs := []error{err}
	known := map[string]bool{} // by the network's directory
	for _, l := range ledgers {
		known[directory(l)] = true
	}
	for _, n := range configured(c.CNIConfDir) {
		if l := ledger.Partial(n, c.Ledgers); !known[directory(l)] {
			known[directory(l)] = true
			ledgers = append(ledgers, l)
		}
	}
	for _, l := range ledgers {
		name := l.Network().Name
		freed, err := l.Uninstall()
		for _, a := range freed.Addrs {
			c.Log.Info("Freed", "network", name, "addr", a)
		}
		for _, a := range freed.InUse {
			c.Log.Info("Left bound address, it becomes free when its pod ends", "network", name, "addr", a)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// removeRoutes removes what the agent has the kernel do about routed addresses. On a node that never heard of pools the
// kernel is not asked: that may load modules.
func (c *cleanup) removeRoutes() error {
	name, err := c.Ledgers.Grants().Node()
	if err != nil || name == "" {
		return err
	}
	return route.Remove(route.Options{Netns: c.Netns})
}

func directory(l *ledger.Ledger) string { return filepath.Join(l.Network().DataDir, l.Network().Name) }

// configured returns the networks of all CNI configurations. Of most of them a ledger has a description; not if all
// pods of the network are older than stayput and the description was lost.
func configured(confDir string) (networks []*ledger.Network) {
	dir, _ := cniconf.ReadDir(confDir) // without it there is no network
	for _, f := range dir.Files {
		networks = append(networks, dir.Conf(f).Networks()...)
	}
	return networks
}

// errByHand says that a CNI configuration which is not the agent's uses the plugin.
var errByHand = errors.New("uses the plugin")

// removeFiles removes Stayput's files once the runtime cannot need them. clean reports that none is left.
func (c *cleanup) removeFiles() (clean bool, err error) {
	if time.Since(c.switched) < c.Reload {
		return false, nil
	}
	if s := cniconf.Inspect(c.CNIConfDir, c.CNIBinDir); s.State == cniconf.StateByHand ||
		s.State == cniconf.StateNoPlugin {
		return false, fmt.Errorf("%s %w: set ipam.type to host-local there, then run stayput-agent uninstall",
			filepath.Join(c.CNIConfDir, s.File), errByHand)
	}
	removed, err := cniconf.RemovePlugin(c.CNIConfDir, c.CNIBinDir, c.CNICacheDir)
	switch {
	case errors.Is(err, cniconf.ErrNotRemoved) && c.MayLeavePlugin: // no configuration names it now
		if !c.leftPlugin {
			c.Log.Warn("Left the plugin in place", "why", err)
		}
		c.leftPlugin = true
	case err != nil:
		return false, fmt.Errorf("removing the plugin: %w", err)
	case removed:
		c.Log.Info("Removed the plugin", "dir", c.CNIBinDir)
	}
	spoolErr := spool.Dir(c.Ledgers.StateDir).Remove()
	left, err := ledger.RemoveState(c.Ledgers)
	err = errors.Join(spoolErr, err)
	return err == nil && left == 0, err
}

// done says to people that a pass was complete.
func (c *cleanup) done() string {
	if c.leftPlugin {
		return "uninstalled: stayput was removed from this node except the plugin's binary, which the agent may not remove"
	}
	return "uninstalled: stayput was removed from this node"
}
