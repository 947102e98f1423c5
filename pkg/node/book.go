package node

import (
	"context"
	"fmt"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
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
		next, ends := a.refresh()
		if ends && next <= 0 || a.sweep.Swap(false) {
			next, ends = a.expire()
		}
		beat.end()
		timer.Stop()
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
	ledgers, _ := a.networks()
	books, whole := a.read(ledgers)
	a.watch.follow(ledgers) // reading makes a directory that is missing
	type series struct {
		network string
		state   ledger.State
	}
	counts := map[series]int{}
	for _, b := range books {
		for _, state := range []ledger.State{ledger.StateBound, ledger.StateRetained, ledger.StateUnreadable} {
			counts[series{b.ledger.Network().Name, state}] += 0
		}
		for _, ad := range b.addrs {
			counts[series{b.ledger.Network().Name, ad.State}]++
			if ad.State == ledger.StateRetained && ad.Ends && (!ends || ad.Left < left) {
				left, ends = ad.Left, true
			}
		}
	}
	a.metrics.addresses.Reset()
	for s, n := range counts {
		a.metrics.addresses.WithLabelValues(s.network, stateLabel(s.state)).Set(float64(n))
	}
	wall := a.wall()
	a.metrics.setNextExpiry(wall, left, ends)
	if !whole {
		return left, ends // half a picture would take the other half's claims away
	}
	if claims := claimsOf(books, wall); !sameClaims(claims, a.claims) {
		a.claims = claims
		a.o.Publisher.PublishClaims(append([]Claim(nil), claims...))
	}
	return left, ends
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
				Reason: EventExpired, Key: e.Key, Pod: ledger.Pod{Namespace: e.Key.Namespace(), Name: e.Key.Pod}, Addrs: e.Addrs,
				Message: fmt.Sprintf("%v of network %s is no longer retained: its time was over", e.Addrs, network), Time: a.wall(),
			})
		}
	}
	return a.refresh()
}
