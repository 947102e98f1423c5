package node

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/spool"
)

// minPause is between two runs of a loop, however often it is woken.
const minPause = time.Second

// reconciler brings the ledgers and the runtime into agreement: at the start, when it is woken, when a suspect is due,
// and at the interval.
type reconciler struct {
	interval  time.Duration
	now       wake.Signal
	cri       *cri.Client
	networks  *networks
	policies  *policies
	reclaimer *reclaimer
	agreed    *agreement
	spool     spool.Dir
	source    *annotationSource
	book      *bookKeeper
	after     []wake.Signal // are up after every reconciliation
	clock     ledger.Clock
	beat      *beat
	metrics   *metrics
	log       *slog.Logger

	tried  atomic.Bool            // a reconciliation was, with or without success
	criErr atomic.Pointer[string] // why the runtime does not answer, nil if never asked, empty if it answered
}

func (r *reconciler) run(ctx context.Context) {
	r.now.Loop(ctx, minPause, func(bool) (time.Duration, bool) {
		r.beat.begin()
		next := r.reconcileAndReport(ctx)
		r.beat.end()
		r.book.sweep.Store(true) // what has no address behind it has no time at which it would be noticed
		for _, now := range r.after {
			now.Up()
		}
		// Jittered, so that the nodes of a cluster that came up together do not work in step.
		wait := r.interval*9/10 + rand.N(r.interval/5+1)
		if next > 0 {
			wait = min(wait, max(next, minPause))
		}
		return wait, true
	})
}

func (r *reconciler) reconcileAndReport(ctx context.Context) (next time.Duration) {
	start := time.Now()
	countCommands(r.spool, r.log)
	next, err := r.reconcile(ctx)
	if ctx.Err() != nil {
		return 0
	}
	r.metrics.reconcileDuration.Observe(time.Since(start).Seconds())
	if err != nil {
		r.metrics.reconcileErrors.Inc()
		r.log.Error("Reconciliation failed", "err", err)
	}
	r.tried.Store(true)
	return next
}

// reconcile brings the ledgers and the runtime into agreement: running sandboxes have their policy, and what leaked is
// reclaimed. next is when a suspect is due.
func (r *reconciler) reconcile(ctx context.Context) (next time.Duration, err error) {
	now, err := r.clock.Now()
	if err != nil {
		return 0, err
	}
	epoch := r.agreed.now()
	// Addresses before sandboxes: what a sandbox that the runtime lists has, was there before.
	served, allOpened := r.networks.open()
	books, allRead := r.networks.read(served)
	list, err := r.sandboxes(ctx)
	if err != nil {
		return 0, err
	}
	ready, adopted := r.adopt(ctx, served, books, list)
	if allOpened && allRead && adopted {
		r.agreed.reached(epoch, served)
	}
	r.networks.forget(books)
	due, next := r.reclaimer.suspectAll(books, list, now.Boot)
	if len(due) > 0 {
		err = r.reclaimer.reclaim(ctx, due, ready)
		next = r.reclaimer.grace // those that stayed are looked at again
	}
	return next, err
}

// adopt makes every running sandbox known to the ledgers: those that host-local gave an address before stayput came,
// and those that started while the agent was away. It returns the namespaces of those that have one; whole says that
// every policy was set.
func (r *reconciler) adopt(ctx context.Context, served []*ledger.Ledger, books []book,
	list map[string]cri.Sandbox) (ready []ledger.Netns, whole bool) {
	// Reading describes the network as its first command does, and makes its directories: without that the cluster would
	// learn of the homes of its pods only when the first of them comes or goes.
	unserved, _ := r.networks.read(r.networks.configured(served))
	bound := boundTo(slices.Concat(books, unserved))
	whole = true
	for id, s := range list {
		if ctx.Err() != nil {
			return ready, false
		}
		if !s.Ready {
			continue
		}
		o := observe(Sandbox{ID: s.ID, Pod: s.Pod, Annotations: s.Annotations})
		for _, at := range bound[id] {
			ns := at.address.Netns
			if ns.Path == "" {
				ns = r.netnsOf(ctx, o.sandbox)
			}
			if ns.Path != "" {
				ready = append(ready, ns)
			}
			if ns.Ino == 0 {
				ns = ledger.Netns{} // never recorded: a path alone would pass for any later namespace there
			}
			if at.ledger.Undecided(at.address.Attachment) {
				r.source.noteListed(at.address)
			}
			if _, ok := r.policies.set(attached{at.ledger, at.address.Attachment}, o, ns); !ok {
				whole = false
			}
		}
	}
	return ready, whole
}

// netnsOf returns the network namespace of a running sandbox; without an inode if it cannot be seen, zero if the
// runtime does not say.
func (r *reconciler) netnsOf(ctx context.Context, s Sandbox) ledger.Netns {
	path, err := r.cri.Netns(ctx, s.ID)
	if err != nil || path == "" {
		r.log.Warn("Cannot get the pod's network namespace from the runtime", s.attrs("err", err)...)
		return ledger.Netns{}
	}
	ns, ok, err := ledger.SystemNetns{}.Identify(path)
	if err != nil || !ok {
		return ledger.Netns{Path: path}
	}
	return ns
}

// boundAddress is one attachment as its first address has it.
type boundAddress struct {
	ledger  *ledger.Ledger
	address ledger.Address
}

// boundTo lists the attachments that have an address, by container ID.
func boundTo(books []book) map[string][]boundAddress {
	bound := map[string][]boundAddress{}
	for _, b := range books {
		seen := map[ledger.Attachment]bool{}
		for _, addr := range b.addrs {
			if addr.State != ledger.StateBound || seen[addr.Attachment] {
				continue
			}
			seen[addr.Attachment] = true
			id := addr.Attachment.ContainerID
			bound[id] = append(bound[id], boundAddress{b.ledger, addr})
		}
	}
	return bound
}

// sandboxes asks the runtime for its list.
func (r *reconciler) sandboxes(ctx context.Context) (map[string]cri.Sandbox, error) {
	list, err := r.cri.Sandboxes(ctx)
	r.criAnswered(err)
	return list, err
}

// criAnswered keeps for /readyz and the metrics how the last call of the runtime went.
func (r *reconciler) criAnswered(err error) {
	said := ""
	r.metrics.criUp.Set(1)
	if err != nil {
		said = err.Error()
		r.metrics.criUp.Set(0)
	}
	r.criErr.Store(&said)
}
