package node

import (
	"context"
	"slices"

	"github.com/stayput/stayput/pkg/ledger"
)

// spoolLoop takes the plugin's reports as soon as they are there.
func (a *Agent) spoolLoop(ctx context.Context) {
	beat := a.health.loop("spool")
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.spoolNow:
		}
		beat.begin()
		a.takeReports(ctx)
		beat.end()
	}
}

func (a *Agent) takeReports(ctx context.Context) {
	events, err := a.spool.Take()
	if err != nil {
		a.metrics.spoolErrors.Inc()
		a.log.Error("Cannot read every report of the plugin", "err", err)
	}
	slices.SortFunc(events, func(a, b ledger.Event) int { return a.Time.Compare(b.Time) })
	var restored []ledger.Event
	for _, e := range events {
		a.report(e)
		if e.Reason == ledger.EventRestored {
			restored = append(restored, e)
		}
	}
	if len(restored) == 0 {
		return
	}
	select {
	case a.restored <- restored:
	case <-ctx.Done():
	}
}

// report counts an event and passes it on.
func (a *Agent) report(e ledger.Event) {
	network := e.Key.Network
	switch e.Reason {
	case ledger.EventRestored:
		a.metrics.restores.WithLabelValues(network).Inc()
	case ledger.EventNotRestored:
		a.metrics.misses.WithLabelValues(network, e.Miss.String()).Inc()
	case ledger.EventRefused:
		a.metrics.refused.WithLabelValues(network).Inc()
	case ledger.EventClamped:
		a.metrics.clamped.WithLabelValues(network).Inc()
	}
	a.publish(e)
}
