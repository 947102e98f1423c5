package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/fsnotify/fsnotify"

	"github.com/stayput/stayput/pkg/ledger"
)

// watcher turns changes of files into wake-ups. Nothing depends on it alone: the loops look by themselves at
// the interval of the reconciliation.
type watcher struct {
	a        *Agent
	fs       *fsnotify.Watcher
	stateDir string
	spool    string
}

func newWatcher(a *Agent) (*watcher, error) {
	fs, err := fsnotify.NewBufferedWatcher(64)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	w := &watcher{a: a, fs: fs, stateDir: filepath.Clean(a.o.StateDir), spool: ledger.SpoolDir(a.ledgers)}
	for _, dir := range []string{w.stateDir, w.spool} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			fs.Close()
			return nil, err
		}
		if err := fs.Add(dir); err != nil {
			fs.Close()
			return nil, fmt.Errorf("inotify on %s: %w", dir, err)
		}
	}
	a.spoolNow.up() // what came before
	return w, nil
}

// follow watches the address files of these networks, and of those that were already watched.
func (w *watcher) follow(ledgers []*ledger.Ledger) {
	for _, l := range ledgers {
		// A directory that was removed and made again has lost its watch; adding one twice costs nothing.
		if err := w.fs.Add(directory(l)); err != nil {
			w.a.log.Warn("Cannot watch a network", "network", l.Network().Name, "err", err)
		}
	}
}

func (w *watcher) run(ctx context.Context) {
	defer w.fs.Close()
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-w.fs.Errors:
			// An overflow: whatever was missed, look at everything.
			w.a.log.Debug("inotify", "err", err)
			w.a.spoolNow.up()
			w.a.bookNow.up()
		case e := <-w.fs.Events:
			w.see(e)
		}
	}
}

func (w *watcher) see(e fsnotify.Event) {
	dir, name := filepath.Split(e.Name)
	switch filepath.Clean(dir) {
	case w.spool:
		if name != "" && name[0] != '.' && e.Has(fsnotify.Create) {
			w.a.spoolNow.up()
		}
	case w.stateDir:
		// A network's first command. Its pods may have run before stayput came.
		if e.Name == w.spool {
			return
		}
		w.a.agreed.void()
		if e.Has(fsnotify.Create) {
			// Its description comes last.
			if err := w.fs.Add(e.Name); err != nil {
				w.a.log.Warn("Cannot watch a network", "err", err)
			}
			w.a.reconcileNow.up()
		}
	default:
		if filepath.Dir(filepath.Clean(dir)) == w.stateDir {
			if e.Has(fsnotify.Create) || e.Has(fsnotify.Remove) {
				w.a.agreed.void()
				w.a.reconcileNow.up()
			}
			return
		}
		// Beside the addresses there are the lock and temporary files, which we write as well.
		if _, err := netip.ParseAddr(name); err == nil {
			w.a.bookNow.up()
		}
	}
}
