package node

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/hostnet"
)

// A restored address, or one of a pool, comes back with another link-layer address, and the old pod's connections are
// still tracked. Without an announcement peers notice in seconds to minutes.
const (
	// announceAgain is when an announcement is repeated (RFC 5227 says twice; the first one may meet a bridge
	// port that does not forward yet).
	announceAgain = time.Second
	// configureTime is how long the main plugin may take, after the ledger has answered, until the address is up.
	configureTime = 10 * time.Second
	firstRetry    = 20 * time.Millisecond
	longestWait   = time.Second
	// stale is how old a report may be for the connections of its address to be taken for the old pod's: the
	// new one has no address yet, and no container for some time longer.
	stale = 2 * time.Second
)

// announcement is an address that is to be announced to its peers.
type announcement struct {
	event  ledger.Event
	wait   time.Duration // before the next try
	due    time.Time
	giveUp time.Time
	made   bool // once
}

// announcer tells the peers of restored addresses, and of those of pools.
type announcer struct {
	restored <-chan []ledger.Event
	clock    ledger.Clock
	beat     *beat
	metrics  *metrics
	log      *slog.Logger
}

func (a *announcer) run(ctx context.Context) {
	var pending []*announcement
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case events := <-a.restored:
			a.beat.begin()
			a.forgetConnections(events)
			now := time.Now()
			for _, e := range events {
				pending = append(pending, &announcement{event: e, wait: firstRetry, due: now, giveUp: now.Add(configureTime)})
			}
		case <-timer.C:
			a.beat.begin()
		}
		pending = a.announceDue(pending)
		a.beat.end()
		timer.Stop()
		if len(pending) > 0 {
			next := slices.MinFunc(pending, func(a, b *announcement) int { return a.due.Compare(b.due) })
			timer.Reset(time.Until(next.due))
		}
	}
}

// announceDue makes the announcements that are due, and returns those to be made later.
func (a *announcer) announceDue(pending []*announcement) (later []*announcement) {
	now := time.Now()
	mac := map[netip.Addr]net.HardwareAddr{}
	for _, p := range pending {
		if p.due.After(now) {
			later = append(later, p)
			continue
		}
		e := p.event
		hw, err := hostnet.Announce(e.Netns, e.Key.IfName, e.Addrs)
		taken := errors.Is(err, hostnet.ErrNoAddresses) // by a sandboxed runtime, or not configured yet
		attrs := []any{"pod", e.Pod.String(), "sandbox", e.ContainerID, "addrs", e.Addrs}
		if hw != nil {
			for _, addr := range e.Addrs {
				mac[addr] = hw
			}
		}
		switch {
		case err == nil:
			a.metrics.announced.Inc()
			a.log.Debug("Announced", append(attrs, "mac", hw.String())...)
			if !p.made {
				p.made, p.due = true, now.Add(announceAgain)
				later = append(later, p)
			}
		case taken && (p.made || now.After(p.giveUp)):
			a.metrics.announced.Inc()
			a.log.Debug("Announced for a sandboxed runtime", append(attrs, "mac", hw.String())...)
		case errors.Is(err, fs.ErrNotExist) || p.made:
			a.log.Debug("Skipped announcement, the pod has ended", append(attrs, "err", err)...)
		case now.After(p.giveUp):
			a.metrics.peerErrors.Inc()
			a.log.Warn("Cannot announce the pod's address to its peers", append(attrs, "err", err)...)
		default:
			p.due = now.Add(p.wait)
			p.wait = min(2*p.wait, longestWait)
			later = append(later, p)
		}
	}
	if len(mac) > 0 {
		if err := hostnet.ForgetNeighbours(mac); err != nil {
			a.metrics.peerErrors.Inc()
			a.log.Warn("Cannot refresh the node's neighbour table", "err", err)
		}
	}
	return later
}

// forgetConnections flushes the tracked connections of addresses that have just been restored, in one pass for all of
// them. It comes before the new pod has its address, so all connections that are tracked then were the old pod's. A
// report that is older than stale does not prove that.
func (a *announcer) forgetConnections(events []ledger.Event) {
	addrs := map[netip.Addr]bool{}
	wall := wall(a.clock)
	for _, e := range events {
		if wall.Sub(e.Time) > stale {
			a.log.Info("Skipped flushing the old pod's connections, too late",
				"pod", e.Pod.String(), "sandbox", e.ContainerID, "addrs", e.Addrs)
			continue
		}
		for _, addr := range e.Addrs {
			addrs[addr] = true
		}
	}
	if len(addrs) == 0 {
		return
	}
	if err := hostnet.FlushConntrack(addrs); err != nil {
		a.metrics.peerErrors.Inc()
		a.log.Warn("Cannot flush the old pods' connections", "err", err)
	}
}
