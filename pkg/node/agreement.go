package node

import (
	"slices"
	"sync"

	"github.com/stayput/stayput/pkg/ledger"
)

// agreement is which networks were found to agree with the runtime, by the directories of their addresses. It is
// void when something appears or vanishes in the state directory: a ledger whose state was wiped knows what is
// retained, but not yet what is bound and promised. The reconciler reaches it, the watcher voids it, and the book
// keeper relies on it.
type agreement struct {
	mu   sync.Mutex
	dirs map[string]bool
	// epoch counts how often the agreement was void.
	epoch int
}

func (g *agreement) now() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.epoch
}

func (g *agreement) void() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.dirs = nil
	g.epoch++
}

// reached notes that these networks agreed, as seen since epoch.
func (g *agreement) reached(epoch int, ledgers []*ledger.Ledger) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if epoch != g.epoch {
		return
	}
	g.dirs = map[string]bool{}
	for _, l := range ledgers {
		g.dirs[directory(l)] = true
	}
}

// networks returns the names of those networks that have been reconciled with the runtime and whose every record can be
// read.
func (g *agreement) networks(books []book) (names []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	open := map[string]bool{}
	for _, b := range books {
		if !g.dirs[directory(b.ledger)] || b.newer() != nil {
			open[b.ledger.Network().Name] = true
		}
	}
	for _, b := range books {
		if name := b.ledger.Network().Name; !open[name] && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
