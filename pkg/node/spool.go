package node

import (
	"context"
	"log/slog"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/spool"
)

// spoolReader takes the plugin's reports as soon as they are there.
type spoolReader struct {
	spool    spool.Dir
	now      wake.Signal
	news     *news
	restored chan<- []ledger.Event // to the announcer
	conflict func(ledger.Event)    // of an address of a pool
	beat     *beat
	metrics  *metrics
	log      *slog.Logger
}

func (r *spoolReader) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.now:
		}
		r.beat.begin()
		r.take(ctx)
		r.beat.end()
	}
}

func (r *spoolReader) take(ctx context.Context) {
	events, lost, err := r.spool.Take()
	if err != nil {
		r.metrics.spoolErrors.Inc()
		r.log.Error("Cannot read all plugin reports", "err", err)
	}
	if lost > 0 {
		r.metrics.reportsLost.Add(float64(lost))
		r.log.Warn("Lost plugin reports: the spool overflowed while the agent was not running", "lost", lost)
	}
	var restored []ledger.Event
	for _, e := range events {
		switch e.Reason {
		case ledger.EventPooled: // which is no news
			restored = append(restored, e)
			continue
		case ledger.EventRestored:
			restored = append(restored, e)
		case ledger.EventConflict:
			r.conflict(e)
		}
		r.news.report(e)
	}
	if len(restored) == 0 {
		return
	}
	select {
	case r.restored <- restored:
	case <-ctx.Done():
	}
}

// countCommands has the plugin count its commands. A failure keeps the agent from nothing.
func countCommands(d spool.Dir, log *slog.Logger) {
	if err := d.MakeLatencies(); err != nil {
		log.Warn("Cannot count the plugin's commands", "err", err)
	}
}
