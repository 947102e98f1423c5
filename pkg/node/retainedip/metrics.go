package retainedip

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are of a node in a cluster.
type metrics struct {
	up            prometheus.Gauge
	writes        *prometheus.CounterVec
	eventsSent    prometheus.Counter
	eventsDropped prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		up: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stayput_agent_api_up",
			Help: "Whether the agent watches RetainedIPs; without the watch, it does not write them.",
		}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stayput_agent_api_writes_total", Help: "Writes of RetainedIPs by verb and result.",
		}, []string{"verb", "result"}),
		eventsSent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_events_sent_total", Help: "Kubernetes Events sent.",
		}),
		eventsDropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_events_dropped_total", Help: "Kubernetes Events dropped: too many, too old or refused.",
		}),
	}
	for _, verb := range []string{"apply", "delete"} {
		for _, result := range []string{"ok", "unreachable", "conflict", "forbidden", "not_found", "invalid", "error"} {
			m.writes.WithLabelValues(verb, result)
		}
	}
	r.MustRegister(m.up, m.writes, m.eventsSent, m.eventsDropped)
	return m
}
