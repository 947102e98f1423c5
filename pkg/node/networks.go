package node

import (
	"cmp"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// networks finds the ledgers of the node's networks.
type networks struct {
	ledgers ledger.Options
	confDir string // of the runtime
	metrics *metrics
	log     *slog.Logger
}

// open opens the ledger of every network that the plugin has served. They are opened again each time, one small file
// each, so that a network that appears is there at once. What cannot be opened is logged and makes whole false.
func (n *networks) open() (ledgers []*ledger.Ledger, whole bool) {
	ledgers, err := ledger.Networks(n.ledgers)
	if err != nil {
		n.metrics.networkErrors.Inc()
		n.log.Error("Cannot open all networks", "err", err)
	}
	return ledgers, err == nil
}

// directory returns the directory of a network's address files.
func directory(l *ledger.Ledger) string {
	return filepath.Join(l.Network().DataDir, l.Network().Name)
}

// book is what one network's ledger says.
type book struct {
	ledger *ledger.Ledger
	addrs  []ledger.Address
}

// read prepares every ledger and lists its addresses. What cannot be read is logged and makes whole false.
func (n *networks) read(ledgers []*ledger.Ledger) (books []book, whole bool) {
	whole = true
	for _, l := range ledgers {
		var addrs []ledger.Address
		err := l.Prepare()
		if err == nil {
			addrs, err = l.List()
		}
		if err != nil {
			whole = false
			n.metrics.networkErrors.Inc()
			n.log.Error("Cannot read the addresses of a network", "network", l.Network().Name, "err", err)
			continue
		}
		books = append(books, book{l, addrs})
	}
	return books, whole
}

// forgetAfter is how long a network must have had no address. A network that is used now and then, by multus for
// example, is not made again each time.
const forgetAfter = 24 * time.Hour

// forget forgets the networks that are no longer in the runtime's configuration and have had no address for long.
func (n *networks) forget(books []book) {
	empty := slices.DeleteFunc(slices.Clone(books), func(b book) bool { return len(b.addrs) > 0 })
	if len(empty) == 0 {
		return
	}
	configured := map[string]bool{}
	for _, l := range n.configured(nil) {
		configured[directory(l)] = true
	}
	for _, b := range empty {
		if configured[directory(b.ledger)] {
			continue
		}
		forgotten, err := b.ledger.Forget(forgetAfter)
		if err != nil {
			n.metrics.networkErrors.Inc()
			n.log.Error("Cannot forget a network", "network", b.ledger.Network().Name, "err", err)
		} else if forgotten {
			n.log.Info("Forgot a network: no configuration names it, and it has had no address for long",
				"network", b.ledger.Network().Name, "for", forgetAfter)
		}
	}
}

// configured returns the networks that the runtime's configuration gives to stayput and that no command has served yet:
// the pods in them are host-local's. They have the ranges and limits of the configuration, unless another plugin adds
// those at ADD, as flannel does.
func (n *networks) configured(served []*ledger.Ledger) (found []*ledger.Ledger) {
	dir, err := cniconf.ReadDir(n.confDir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			n.log.Warn("Cannot read the CNI configuration", "err", err)
		}
		return nil
	}
	known := map[string]bool{}
	for _, l := range served {
		known[directory(l)] = true
	}
	for _, f := range dir.Files {
		c, err := dir.Conf(f).Stayput()
		if err != nil {
			n.log.Warn("Cannot serve network", "err", err)
		}
		if c == nil || filepath.Clean(cmp.Or(c.StateDir, ledger.DefaultStateDir)) != filepath.Clean(n.ledgers.StateDir) {
			continue
		}
		l := ledger.Partial(c.Bare(), n.ledgers)
		if network, err := c.Network(); err == nil {
			l = ledger.New(network, n.ledgers)
		}
		if !known[directory(l)] {
			known[directory(l)] = true
			found = append(found, l)
		}
	}
	return found
}

// inUse returns the networks that have addresses which are not free, or an error if it does not know them all.
func (n *networks) inUse() (all []cniconf.Occupied, err error) {
	ledgers, whole := n.open()
	books, read := n.read(ledgers)
	if !whole || !read {
		return nil, errors.New("not every network of the node can be read, the agent's log says why")
	}
	for _, b := range books {
		o := cniconf.Occupied{Name: b.ledger.Network().Name, DataDir: b.ledger.Network().DataDir}
		for _, a := range b.addrs {
			o.Addrs = append(o.Addrs, a.Addr)
		}
		all = append(all, o)
	}
	return all, nil
}
