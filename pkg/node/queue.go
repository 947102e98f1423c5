package node

import (
	"context"
	"log/slog"

	"github.com/stayput/stayput/pkg/node/wake"
)

// queueLength is some minutes' worth of pods starting as fast as a node can; what does not fit is left to
// the reconciliation.
const queueLength = 1024

// queue is what follows the hooks: for each sandbox its policy and the verification of its addresses.
type queue struct {
	c        chan observation
	policies *policies
	// reconcile is woken for what has no room.
	reconcile wake.Signal
	beat      *beat
	metrics   *metrics
	log       *slog.Logger
}

func newQueue(p *policies, reconcile wake.Signal, b *beat, m *metrics, log *slog.Logger) *queue {
	q := &queue{c: make(chan observation, queueLength), policies: p, reconcile: reconcile, beat: b, metrics: m, log: log}
	m.observeQueue(func() float64 { return float64(len(q.c)) })
	return q
}

// put never blocks: a reconciliation does the work of what has no room.
func (q *queue) put(o observation) {
	select {
	case q.c <- o:
	default:
		q.metrics.queueDropped.Inc()
		q.log.Warn("Queue full, deferred to reconciliation", o.sandbox.attrs()...)
		q.reconcile.Up()
	}
}

func (q *queue) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case o := <-q.c:
			q.beat.begin()
			q.policies.apply(o)
			q.beat.end()
		}
	}
}
