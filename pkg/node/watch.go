package node

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/spool"
)

// watcher turns changes of files into wake-ups. Nothing depends on it alone: a reconciliation wakes the same loops.
type watcher struct {
	fs       *fsnotify.Watcher // nil if the node has no inotify instance left: the clock wakes the loops then
	stateDir string
	reports  spool.Dir // what else the plugin keeps in stateDir is no news

	agreed                          *agreement
	reconcileNow, bookNow, spoolNow wake.Signal
	unseenNow                       wake.Signal // of an address that was taken
	log                             *slog.Logger
}

// start makes the directories that are watched, and begins.
func (w *watcher) start() error {
	dirs := []string{w.stateDir, w.reports.Events()}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	w.open(dirs)
	w.spoolNow.Up() // what came before
	return nil
}

// open begins to watch. Instances of inotify are few, and other programs of the node may have taken them all:
// that costs seconds, not the agent.
func (w *watcher) open(dirs []string) {
	fs, err := fsnotify.NewBufferedWatcher(64)
	for _, dir := range dirs {
		if err == nil {
			if err = fs.Add(dir); err != nil {
				fs.Close()
			}
		}
	}
	if err != nil {
		w.log.Warn("Polling files, inotify is unavailable: raise fs.inotify.max_user_instances",
			"every", pollEvery, "err", err)
		return
	}
	w.fs = fs
}

// pollEvery is how often the loops are woken without inotify.
const pollEvery = 2 * time.Second

// poll wakes the loops by the clock. What has appeared or vanished in between is not known: nothing counts as
// agreed meanwhile, so that nothing is deleted from the API server for not being in the ledgers.
func (w *watcher) poll(ctx context.Context) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.agreed.void()
			w.spoolNow.Up()
			w.bookNow.Up()
			w.unseenNow.Up()
		}
	}
}

func (w *watcher) close() {
	if w.fs != nil {
		w.fs.Close()
	}
}

// follow watches the address files of these networks, and of those that were already watched.
func (w *watcher) follow(ledgers []*ledger.Ledger) {
	if w.fs == nil {
		return
	}
	for _, l := range ledgers {
		// A directory that was removed and made again has lost its watch; adding one twice costs nothing.
		if err := w.fs.Add(directory(l)); err != nil {
			w.log.Warn("Cannot watch a network", "network", l.Network().Name, "err", err)
		}
	}
}

func (w *watcher) run(ctx context.Context) {
	if w.fs == nil {
		w.poll(ctx)
		return
	}
	defer w.close()
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-w.fs.Errors:
			// An overflow: anything may have been missed.
			w.log.Debug("Lost inotify events", "err", err)
			w.spoolNow.Up()
			w.bookNow.Up()
			w.unseenNow.Up()
		case e := <-w.fs.Events:
			w.see(e)
		}
	}
}

func (w *watcher) see(e fsnotify.Event) {
	dir, name := filepath.Split(e.Name)
	switch filepath.Clean(dir) {
	case w.reports.Events():
		if name != "" && name[0] != '.' && e.Has(fsnotify.Create) {
			w.spoolNow.Up()
		}
	case w.stateDir:
		// A network's first command. Its pods may have run before stayput came.
		if w.reports.Keeps(e.Name) || name == grants.Name {
			return
		}
		w.agreed.void()
		if e.Has(fsnotify.Create) {
			// Its description comes last.
			if err := w.fs.Add(e.Name); err != nil {
				w.log.Warn("Cannot watch a network", "err", err)
			}
			w.reconcileNow.Up()
		}
	default:
		if filepath.Dir(filepath.Clean(dir)) == w.stateDir {
			if e.Has(fsnotify.Create) || e.Has(fsnotify.Remove) {
				w.agreed.void()
				w.reconcileNow.Up()
			}
			return
		}
		// Beside the addresses are the lock and temporary files, which the agent writes, too.
		if _, err := netip.ParseAddr(name); err == nil {
			w.bookNow.Up()
			if e.Has(fsnotify.Create) {
				w.unseenNow.Up()
			}
		}
	}
}
