package node

import (
	"context"
)

// queueLength is some minutes' worth of pods starting as fast as a node can; what does not fit is left to
// the reconciliation.
const queueLength = 1024

// queue is what follows the hooks: for each sandbox its policy and the verification of its addresses.
type queue struct {
	c        chan observation
	policies *policies
	beat     *beat
	metrics  *metrics
}

func newQueue(p *policies, b *beat, m *metrics) *queue {
	q := &queue{c: make(chan observation, queueLength), policies: p, beat: b, metrics: m}
	m.observeQueue(func() float64 { return float64(len(q.c)) })
	return q
}

// put never blocks; false means that there was no room.
func (q *queue) put(o observation) bool {
	select {
	case q.c <- o:
		return true
	default:
		q.metrics.queueDropped.Inc()
		return false
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
