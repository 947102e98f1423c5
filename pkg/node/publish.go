package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/retainedip"
)

// Publisher tells the world outside the node. Its methods are called from several goroutines and must not
// block: who writes to a network queues.
type Publisher interface {
	// PublishClaims is given what is promised whenever that has changed. It may keep but not change that.
	PublishClaims(retainedip.Promises)
	// PublishEvent is given what the owner of a pod should hear of, once.
	PublishEvent(ledger.Event)
}

// publishers publish to all of them.
type publishers []Publisher

func (all publishers) PublishClaims(p retainedip.Promises) {
	for _, to := range all {
		to.PublishClaims(p)
	}
}

func (all publishers) PublishEvent(e ledger.Event) {
	for _, to := range all {
		to.PublishEvent(e)
	}
}

// LogPublisher writes it all into the log.
type LogPublisher struct{ Log *slog.Logger }

func (p LogPublisher) PublishClaims(all retainedip.Promises) {
	for _, c := range all.Claims {
		p.Log.Debug("Claim", "key", c.Key.String(), "network", c.Key.Network, "addrs", c.Addrs,
			"phase", c.Phase, "expires", c.Expires)
	}
}

func (p LogPublisher) PublishEvent(e ledger.Event) {
	level := slog.LevelInfo
	switch e.Reason {
	case ledger.EventNotRestored, ledger.EventRefused, ledger.EventNamespaceRefused, ledger.EventConflict,
		retainedip.EventInvalidAnnotation, retainedip.EventNotConfigured, retainedip.EventReclaimed,
		retainedip.EventAnnotationsUnknown, cniconf.EventNotConfigured:
		level = slog.LevelWarn
	}
	pod := e.Pod.String()
	if e.Pod.Name == "" && e.Key.Pod != "" {
		pod = e.Key.Namespace() + "/" + e.Key.Pod
	}
	p.Log.Log(context.Background(), level, string(e.Reason), "pod", pod, "sandbox", e.ContainerID, "addrs", e.Addrs,
		"network", e.Key.Network, "message", e.Message)
}

// news is what the agent tells: it counts what happened and publishes it.
type news struct {
	publisher Publisher
	clock     ledger.Clock
	metrics   *metrics
}

// publish publishes an event of now, unless it has a time.
func (n *news) publish(e ledger.Event) {
	if e.Time.IsZero() {
		e.Time = wall(n.clock)
	}
	n.publisher.PublishEvent(e)
}

// report counts an event of the ledger and publishes it.
func (n *news) report(e ledger.Event) {
	network := e.Key.Network
	switch e.Reason {
	case ledger.EventRestored:
		n.metrics.restores.WithLabelValues(network).Inc()
	case ledger.EventNotRestored:
		n.metrics.misses.WithLabelValues(network, e.Miss.String()).Inc()
	case ledger.EventRefused, ledger.EventNamespaceRefused:
		n.metrics.refused.WithLabelValues(network).Inc()
	case ledger.EventClamped:
		n.metrics.clamped.WithLabelValues(network).Inc()
	}
	n.publish(e)
}

// wall is the time for people.
func wall(c ledger.Clock) time.Time {
	if now, err := c.Now(); err == nil {
		return now.Wall
	}
	return time.Now()
}
