package node

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/stayput/stayput/pkg/ledger"
)

// networks opens the ledger of every network that the plugin has served. It is asked anew each time: it is
// one small file each, and a network that appears is there at once. What cannot be opened is in the log and
// makes whole false.
func (a *Agent) networks() (ledgers []*ledger.Ledger, whole bool) {
	ledgers, err := ledger.Networks(a.ledgers)
	if err != nil {
		a.metrics.networkErrors.Inc()
		a.log.Error("Cannot open every network", "err", err)
	}
	return ledgers, err == nil
}

// directory is where a network's address files are.
func directory(l *ledger.Ledger) string {
	return filepath.Join(l.Network().DataDir, l.Network().Name)
}

// book is what one network's ledger says.
type book struct {
	ledger *ledger.Ledger
	addrs  []ledger.Address
}

// read prepares every ledger and lists its addresses. What cannot be read is in the log and makes whole false.
func (a *Agent) read(ledgers []*ledger.Ledger) (books []book, whole bool) {
	whole = true
	for _, l := range ledgers {
		var addrs []ledger.Address
		err := l.Prepare()
		if err == nil {
			addrs, err = l.List()
		}
		if err != nil {
			whole = false
			a.metrics.networkErrors.Inc()
			a.log.Error("Cannot read the addresses of a network", "network", l.Network().Name, "err", err)
			continue
		}
		books = append(books, book{l, addrs})
	}
	return books, whole
}

// configured returns the networks that the runtime's configuration gives to stayput and that no command has
// been asked of yet: the pods in them are host-local's. Of these only name and data directory are told, which
// is enough for the marks; limits and ranges are the plugin's to read.
func (a *Agent) configured(served []*ledger.Ledger) (found []*ledger.Ledger, confs [][]byte) {
	entries, err := os.ReadDir(a.o.CNIConfDir)
	if err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			a.log.Warn("Cannot read the CNI configuration", "err", err)
		}
		return nil, nil
	}
	known := map[string]bool{}
	for _, l := range served {
		known[directory(l)] = true
	}
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json": // as libcni has it
		default:
			continue
		}
		data, err := os.ReadFile(filepath.Join(a.o.CNIConfDir, e.Name()))
		if err != nil {
			a.log.Warn("Cannot read a CNI configuration", "err", err)
			continue
		}
		n := a.networkOf(data)
		if n == nil {
			continue
		}
		if l := ledger.Partial(n, a.ledgers); !known[directory(l)] {
			known[directory(l)] = true
			found, confs = append(found, l), append(confs, data)
		}
	}
	return found, confs
}

// networkOf is the network in a configuration list or a configuration of one plugin; nil where its IPAM
// plugin is another one, or keeps its state elsewhere.
func (a *Agent) networkOf(data []byte) *ledger.Network {
	type plugin struct {
		IPAM struct{ Type, DataDir, StateDir string }
	}
	var conf struct {
		Name    string
		Plugins []plugin
		plugin
	}
	if json.Unmarshal(data, &conf) != nil || conf.Name == "" {
		return nil
	}
	for _, p := range append(conf.Plugins, conf.plugin) {
		if p.IPAM.Type != "stayput" {
			continue
		}
		if dir := p.IPAM.StateDir; dir != "" && filepath.Clean(dir) != filepath.Clean(a.o.StateDir) || dir == "" && filepath.Clean(a.o.StateDir) != ledger.DefaultStateDir {
			return nil
		}
		return &ledger.Network{Name: conf.Name, DataDir: p.IPAM.DataDir}
	}
	return nil
}
