package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
)

// bookLoop follows what the ledgers say. It is woken by inotify on the address files, so that a retention
// which began without us hearing of it is known, and by the clock at the next expiry.
func (a *Agent) bookLoop(ctx context.Context) {
	beat := a.health.loop("book")
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.bookNow:
		case <-timer.C:
		}
		beat.begin()
		again := a.endReleased()
		next, ends := a.refresh()
		if ends && next <= 0 || a.sweep.Swap(false) {
			next, ends = a.expire()
		}
		beat.end()
		timer.Stop()
		if again && (!ends || next > releaseRetry) {
			next, ends = releaseRetry, true
		}
		if ends {
			// Never at once again: what cannot be expired is in the log once a second at most.
			timer.Reset(max(next, minPause))
		}
		if !pause(ctx, minPause) {
			return
		}
	}
}

// refresh counts and publishes what is bound and retained. left is until the next retention ends, if ends.
func (a *Agent) refresh() (left time.Duration, ends bool) {
	ledgers, opened := a.networks()
	books, whole := a.read(ledgers)
	a.watch.follow(ledgers) // reading makes a directory that is missing
	for _, b := range books {
		a.metrics.know(b.ledger.Network().Name)
		for _, ad := range b.addrs {
			if ad.State == ledger.StateRetained && ad.Ends && (!ends || ad.Left < left) {
				left, ends = ad.Left, true
			}
		}
	}
	a.noteNewer(books)
	wall := a.wall()
	a.metrics.books.set(books, wall)
	if !opened || !whole {
		return left, ends // half a picture would take the other half's claims away
	}
	now := retainedip.Promises{Claims: claimsOf(books, wall), Settled: a.settled(books)}
	if a.ended || !sameClaims(now.Claims, a.published.Claims) || !slices.Equal(now.Settled, a.published.Settled) {
		a.published, a.ended = now, false
		a.o.Publisher.PublishClaims(retainedip.Promises{Claims: slices.Clone(now.Claims), Settled: slices.Clone(now.Settled)})
	}
	return left, ends
}

// newer is one of the addresses' records that a newer version of stayput wrote; nil: there is none.
func (b book) newer() error {
	for _, ad := range b.addrs {
		if ad.Newer != nil {
			return ad.Newer
		}
	}
	return nil
}

// noteNewer keeps for /readyz, and says once, what only a newer version can read.
func (a *Agent) noteNewer(books []book) {
	said, n := "", 0
	for _, b := range books {
		for _, ad := range b.addrs {
			if ad.Newer != nil {
				said = ad.Newer.Error()
				n++
			}
		}
	}
	if n > 0 {
		said = fmt.Sprintf("%d addresses are left alone, one of them: %s", n, said)
	}
	if was := a.newer.Swap(&said); said != "" && (was == nil || *was != said) {
		a.log.Error("A newer version of stayput ran on this node", "err", said)
	}
}

// settled names those of the networks that have been reconciled with the runtime, and of which every record can be
// read.
func (a *Agent) settled(books []book) (names []string) {
	a.agreed.mu.Lock()
	defer a.agreed.mu.Unlock()
	open := map[string]bool{}
	for _, b := range books {
		if !a.agreed.dirs[directory(b.ledger)] || b.newer() != nil {
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

// agreement is which networks were found to agree with the runtime, by the directories of their addresses. It is
// void when something appears or vanishes in the state directory: a ledger whose state was wiped knows what is
// retained, but not yet what is bound and promised.
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

// reached tells that these networks agreed, as seen since epoch.
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

// releaseRetry is between two attempts at a release that a ledger could not carry out.
const releaseRetry = 5 * time.Second

// releases are the promises that somebody wants ended. The book loop ends them, so that what it publishes next
// was read after that.
type releases struct {
	mu    sync.Mutex
	asked map[retainedip.Name]releaseAsked
}

type releaseAsked struct {
	claims []ledger.Key
	done   func()
}

// release ends claims and then calls done. Asking again before that changes nothing.
func (a *Agent) release(key retainedip.Name, claims []ledger.Key, done func()) {
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	if a.releases.asked == nil {
		a.releases.asked = map[retainedip.Name]releaseAsked{}
	}
	a.releases.asked[key] = releaseAsked{claims, done}
	a.bookNow.up()
}

// endReleased carries out what was asked for. again says that some of it must be tried again.
func (a *Agent) endReleased() (again bool) {
	a.releases.mu.Lock()
	asked := a.releases.asked
	a.releases.asked = nil
	a.releases.mu.Unlock()
	if len(asked) == 0 {
		return false
	}
	ledgers, opened := a.networks()
	for key, r := range asked {
		if err := a.endClaims(ledgers, opened, r.claims); err != nil {
			again = true
			a.metrics.releaseErrors.Inc()
			a.log.Error("Cannot release addresses, trying again", "object", key.String(), "err", err)
			a.releases.mu.Lock()
			if a.releases.asked == nil {
				a.releases.asked = map[retainedip.Name]releaseAsked{}
			}
			if _, newer := a.releases.asked[key]; !newer {
				a.releases.asked[key] = r
			}
			a.releases.mu.Unlock()
			continue
		}
		a.ended = true
		r.done()
	}
	return again
}

// endClaims ends the claims of one pod. One that is no more is no error.
func (a *Agent) endClaims(ledgers []*ledger.Ledger, opened bool, keys []ledger.Key) error {
	for _, k := range keys {
		var c retainedip.Claim
		if i := slices.IndexFunc(a.published.Claims, func(c retainedip.Claim) bool { return c.Key == k }); i >= 0 {
			c = a.published.Claims[i]
		}
		tried, ended := false, false
		for _, l := range ledgers {
			if l.Network().Name != k.Network {
				continue
			}
			tried = true
			switch err := l.Release(k); {
			case err == nil:
				ended = true
			case !errors.Is(err, ledger.ErrUnknownClaim):
				return fmt.Errorf("network %s: %w", k.Network, err)
			}
		}
		if !tried && !opened {
			return fmt.Errorf("network %s cannot be opened", k.Network)
		}
		if !ended {
			continue
		}
		a.metrics.released.WithLabelValues(k.Network).Inc()
		e := ledger.Event{Reason: retainedip.EventReleased, Key: k, Pod: c.Pod, ContainerID: c.ContainerID, Addrs: c.Addrs, Time: a.wall(),
			Message: fmt.Sprintf("%v of network %s is free again, as was asked for", c.Addrs, k.Network)}
		if c.Phase == retainedip.PhaseBound {
			e.Message = fmt.Sprintf("%v of network %s becomes free when its pod ends, as was asked for", c.Addrs, k.Network)
		}
		a.publish(e)
	}
	return nil
}

// expire ends what is due in every network, and what has no address behind it any more.
func (a *Agent) expire() (next time.Duration, ends bool) {
	ledgers, _ := a.networks()
	for _, l := range ledgers {
		network := l.Network().Name
		expired, _, err := l.Expire()
		if err != nil {
			a.metrics.expireErrors.Inc()
			a.log.Error("Cannot expire everything that is due", "network", network, "err", err)
		}
		for _, e := range expired {
			a.metrics.expired.WithLabelValues(network).Inc()
			a.publish(ledger.Event{
				Reason: retainedip.EventExpired, Key: e.Key, Pod: ledger.Pod{Namespace: e.Key.Namespace(), Name: e.Key.Pod}, Addrs: e.Addrs,
				Message: fmt.Sprintf("%v of network %s is no longer retained: its time was over", e.Addrs, network), Time: a.wall(),
			})
		}
	}
	return a.refresh()
}
