package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/node/wake"
)

// bookKeeper publishes, counts and expires what the ledgers promise. It is woken by inotify on the address files, by
// releases, and by the clock at the next expiry.
type bookKeeper struct {
	now      wake.Signal
	networks *networks
	agreed   *agreement
	// follow watches the address files of these networks.
	follow  func([]*ledger.Ledger)
	news    *news
	beat    *beat
	metrics *metrics
	log     *slog.Logger

	releases  releases
	sweep     atomic.Bool            // expire is due, also before the clock says so
	newer     atomic.Pointer[string] // what only a newer version can read, nil if never read
	published retainedip.Promises    // as last published
	released  bool                   // a claim was released since
}

func (k *bookKeeper) run(ctx context.Context) {
	k.now.Loop(ctx, minPause, func(bool) (next time.Duration, ends bool) {
		k.beat.begin()
		defer k.beat.end()
		retry := k.endReleased()
		next, ends = k.refresh()
		if ends && next <= 0 || k.sweep.Swap(false) {
			next, ends = k.expire()
		}
		if retry && (!ends || next > releaseRetry) {
			next, ends = releaseRetry, true
		}
		return max(next, minPause), ends // never at once: what cannot be expired is logged once a second at most
	})
}

// refresh counts and publishes what is bound and retained. left is the time until the next expiry, if ends.
func (k *bookKeeper) refresh() (left time.Duration, ends bool) {
	ledgers, opened := k.networks.open()
	books, whole := k.networks.read(ledgers)
	k.follow(ledgers) // reading makes a directory that is missing
	for _, b := range books {
		k.metrics.know(b.ledger.Network().Name)
		for _, ad := range b.addrs {
			if ad.State == ledger.StateRetained && ad.Ends && (!ends || ad.Left < left) {
				left, ends = ad.Left, true
			}
		}
	}
	k.noteNewer(books)
	wall := wall(k.news.clock)
	k.metrics.books.set(books, wall)
	if !opened || !whole {
		return left, ends // a partial list would delete the claims that it lacks
	}
	claims, settled := claimsOf(books, wall), k.agreed.networks(books)
	if k.released || !sameClaims(claims, k.published.Claims) || !slices.Equal(settled, k.published.Settled) {
		k.published, k.released = retainedip.Promises{Claims: claims, Settled: settled}, false
		k.news.publisher.PublishClaims(retainedip.Promises{Claims: slices.Clone(claims), Settled: slices.Clone(settled)})
	}
	return left, ends
}

// newer is one of the addresses' records that a newer version of stayput wrote, nil if there is none.
func (b book) newer() error {
	for _, ad := range b.addrs {
		if ad.Newer != nil {
			return ad.Newer
		}
	}
	return nil
}

// noteNewer keeps for /readyz, and logs once, what only a newer version can read.
func (k *bookKeeper) noteNewer(books []book) {
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
		said = fmt.Sprintf("%d addresses are left unchanged, for example %s", n, said)
	}
	if was := k.newer.Swap(&said); said != "" && (was == nil || *was != said) {
		k.log.Error("Found records of a newer version of stayput", "err", said)
	}
}

// releaseRetry is between two attempts at a release that a ledger could not carry out.
const releaseRetry = 5 * time.Second

// releases are the promises to be ended on request. The book keeper ends them, so that what it publishes next was
// read after that.
type releases struct {
	mu    sync.Mutex
	asked map[retainedip.Name]releaseAsked
}

type releaseAsked struct {
	claims []ledger.Key
	done   func()
}

// release ends claims and then calls done. Another call before that changes nothing.
func (k *bookKeeper) release(key retainedip.Name, claims []ledger.Key, done func()) {
	k.releases.mu.Lock()
	defer k.releases.mu.Unlock()
	if k.releases.asked == nil {
		k.releases.asked = map[retainedip.Name]releaseAsked{}
	}
	k.releases.asked[key] = releaseAsked{claims, done}
	k.now.Up()
}

// endReleased carries out the releases. retry: some could not be.
func (k *bookKeeper) endReleased() (retry bool) {
	k.releases.mu.Lock()
	asked := k.releases.asked
	k.releases.asked = nil
	k.releases.mu.Unlock()
	if len(asked) == 0 {
		return false
	}
	ledgers, opened := k.networks.open()
	failed := map[retainedip.Name]releaseAsked{}
	for key, r := range asked {
		if err := k.endClaims(ledgers, opened, r.claims); err != nil {
			failed[key] = r
			k.metrics.releaseErrors.Inc()
			k.log.Error("Cannot release addresses, retrying", "object", key.String(), "err", err)
			continue
		}
		k.released = true
		r.done()
	}
	retry = len(failed) > 0
	k.releases.mu.Lock()
	defer k.releases.mu.Unlock()
	maps.Copy(failed, k.releases.asked) // what was asked meanwhile counts
	k.releases.asked = failed
	return retry
}

// endClaims ends the claims of one pod. A claim that has ended is no error.
func (k *bookKeeper) endClaims(ledgers []*ledger.Ledger, opened bool, keys []ledger.Key) error {
	for _, key := range keys {
		var c retainedip.Claim
		if i := slices.IndexFunc(k.published.Claims, func(c retainedip.Claim) bool { return c.Key == key }); i >= 0 {
			c = k.published.Claims[i]
		}
		tried, released := false, false
		for _, l := range ledgers {
			if l.Network().Name != key.Network {
				continue
			}
			tried = true
			switch err := l.Release(key); {
			case err == nil:
				released = true
			case !errors.Is(err, ledger.ErrUnknownClaim):
				return fmt.Errorf("network %s: %w", key.Network, err)
			}
		}
		if !tried && !opened {
			return fmt.Errorf("network %s cannot be opened", key.Network)
		}
		if !released {
			continue
		}
		k.metrics.released.WithLabelValues(key.Network).Inc()
		what := "was released on request"
		if c.Phase == retainedip.PhaseBound {
			what = "will be released when its pod ends, as requested"
		}
		k.news.publish(ledger.Event{
			Reason: retainedip.EventReleased, Key: key, Pod: c.Pod, ContainerID: c.ContainerID, Addrs: c.Addrs,
			Message: fmt.Sprintf("%v of network %s %s", c.Addrs, key.Network, what),
		})
	}
	return nil
}

// expire ends what is due in every network, and promises without an address behind them.
func (k *bookKeeper) expire() (next time.Duration, ends bool) {
	ledgers, _ := k.networks.open()
	for _, l := range ledgers {
		network := l.Network().Name
		expired, _, err := l.Expire()
		if err != nil {
			k.metrics.expireErrors.Inc()
			k.log.Error("Cannot expire all retentions", "network", network, "err", err)
		}
		for _, e := range expired {
			k.metrics.expired.WithLabelValues(network).Inc()
			k.news.publish(ledger.Event{
				Reason: retainedip.EventExpired, Key: e.Key, Addrs: e.Addrs,
				Pod:     ledger.Pod{Namespace: e.Key.Namespace(), Name: e.Key.Pod},
				Message: fmt.Sprintf("%v of network %s is no longer retained: its retention expired", e.Addrs, network),
			})
		}
	}
	return k.refresh()
}
