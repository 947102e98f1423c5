package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stayput/stayput/pkg/ledger"
)

// metrics are what the node exports: stayput_ is about addresses, stayput_agent_ about the agent's own work.
// Labels are few by design: a network's name and words from a fixed list, never a pod or an address.
type metrics struct {
	registry *prometheus.Registry

	addresses       *prometheus.GaugeVec
	restores        *prometheus.CounterVec
	restoreDuration prometheus.Histogram
	misses          *prometheus.CounterVec
	refused         *prometheus.CounterVec
	clamped         *prometheus.CounterVec
	expired         *prometheus.CounterVec
	released        *prometheus.CounterVec
	reclaimed       *prometheus.CounterVec
	nextExpiry      prometheus.Gauge

	badAnnotations prometheus.Counter
	verifyFailures prometheus.Counter

	nriConnected      prometheus.Gauge
	nriConnections    prometheus.Counter
	criUp             prometheus.Gauge
	reconcileDuration prometheus.Histogram
	reconcileErrors   prometheus.Counter
	queueDropped      prometheus.Counter
	suspects          prometheus.Gauge
	leftovers         prometheus.Counter
	markErrors        prometheus.Counter
	policyErrors      prometheus.Counter
	networkErrors     prometheus.Counter
	expireErrors      prometheus.Counter
	releaseErrors     prometheus.Counter
	spoolErrors       prometheus.Counter
	announced         prometheus.Counter
	connections       prometheus.Counter
	peerErrors        prometheus.Counter
	cniConfig         *prometheus.GaugeVec
	cniWrites         prometheus.Counter
	cniErrors         prometheus.Counter
}

func newMetrics(r *prometheus.Registry) *metrics {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		r.MustRegister(c)
		return c
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		r.MustRegister(c)
		return c
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		r.MustRegister(g)
		return g
	}
	histogram := func(name, help string, buckets ...float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
		r.MustRegister(h)
		return h
	}
	m := &metrics{
		registry: r,
		addresses: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stayput_addresses", Help: "Addresses that are not free, by state: bound, retained, or unreadable.",
		}, []string{"network", "state"}),
		restores:        counters("stayput_restores_total", "Pods that got the addresses back that were retained for them.", "network"),
		restoreDuration: histogram("stayput_restore_duration_seconds", "Time the plugin took to give retained addresses back, waiting included.", .001, .0025, .005, .01, .025, .05, .1, .5, 1, 3, 10),
		misses:          counters("stayput_restore_misses_total", "Pods that were promised addresses and got others, by reason.", "network", "reason"),
		refused:         counters("stayput_retentions_refused_total", "Pods whose addresses are not retained because too many are promised already.", "network"),
		clamped:         counters("stayput_retentions_clamped_total", "Retentions that were shortened to the network's longest.", "network"),
		expired:         counters("stayput_retentions_expired_total", "Retentions that ended by time.", "network"),
		released:        counters("stayput_retentions_released_total", "Retentions that ended because somebody asked for it.", "network"),
		reclaimed:       counters("stayput_addresses_reclaimed_total", "Addresses that leaked and were taken back.", "network"),
		nextExpiry:      gauge("stayput_next_expiry_timestamp_seconds", "When the next retention ends, in seconds since the epoch; 0 if none does."),

		badAnnotations: counter("stayput_invalid_annotations_total", "Running pods seen with annotations that cannot be honoured."),
		verifyFailures: counter("stayput_verify_failures_total", "Pods in which an address was not configured that is bound to them."),

		nriConnected:      gauge("stayput_agent_nri_connected", "Whether the NRI connection stands."),
		nriConnections:    counter("stayput_agent_nri_connections_total", "NRI connections made; beyond the first these are reconnects."),
		criUp:             gauge("stayput_agent_cri_up", "Whether the last call of the container runtime succeeded."),
		reconcileDuration: histogram("stayput_agent_reconcile_duration_seconds", "Time one reconciliation took.", .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 30),
		reconcileErrors:   counter("stayput_agent_reconcile_errors_total", "Reconciliations that failed, whole or in part."),
		queueDropped:      counter("stayput_agent_queue_dropped_total", "Sandboxes that did not fit into the queue and were left to a reconciliation."),
		suspects:          gauge("stayput_agent_leak_suspects", "Attachments and unreadable files with an address that no listed sandbox explains."),
		leftovers:         counter("stayput_agent_leftover_namespaces_removed_total", "Network namespaces removed that a gone runtime had left behind."),
		markErrors:        counter("stayput_agent_mark_errors_total", "Policy marks that could not be written."),
		policyErrors:      counter("stayput_agent_policy_errors_total", "Policies that could not be set."),
		networkErrors:     counter("stayput_agent_network_errors_total", "Networks that could not be read."),
		expireErrors:      counter("stayput_agent_expire_errors_total", "Sweeps that could not end everything that was due."),
		releaseErrors:     counter("stayput_agent_release_errors_total", "Releases that could not be carried out yet."),
		spoolErrors:       counter("stayput_agent_spool_errors_total", "Reports of the plugin that could not be read."),
		announced:         counter("stayput_agent_announcements_total", "Announcements of restored addresses to their peers."),
		connections:       counter("stayput_agent_connections_flushed_total", "Tracked connections of former pods that were flushed."),
		peerErrors:        counter("stayput_agent_peer_errors_total", "Failures to tell the peers of a restored address."),
		cniConfig: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stayput_agent_cni_config", Help: "How the node's CNI configuration stands: 1 for the state it is in, 0 for all others.",
		}, []string{"state"}),
		cniWrites: counter("stayput_agent_cni_config_writes_total", "Times the agent wrote or removed its CNI configuration, each of which makes the runtime load it."),
		cniErrors: counter("stayput_agent_cni_config_errors_total", "Looks at the CNI configuration or the plugin's binary that failed, whole or in part."),
	}
	r.MustRegister(m.addresses, m.cniConfig)
	return m
}

// apiMetrics are of a node in a cluster.
type apiMetrics struct {
	up            prometheus.Gauge
	writes        *prometheus.CounterVec
	eventsSent    prometheus.Counter
	eventsDropped prometheus.Counter
}

func newAPIMetrics(r *prometheus.Registry) *apiMetrics {
	m := &apiMetrics{
		up: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stayput_agent_api_up", Help: "Whether the API server is followed; while it is not no object is written.",
		}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stayput_agent_api_writes_total", Help: "Writes of RetainedIPs, by verb and by how the API server answered.",
		}, []string{"verb", "result"}),
		eventsSent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_events_sent_total", Help: "Kubernetes Events sent.",
		}),
		eventsDropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_events_dropped_total", Help: "Kubernetes Events that were too many, too old, or refused.",
		}),
	}
	r.MustRegister(m.up, m.writes, m.eventsSent, m.eventsDropped)
	return m
}

// observeQueue exports the depth of the queue.
func (m *metrics) observeQueue(depth func() float64) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stayput_agent_queue_depth", Help: "Sandboxes that wait for their policy to be set and their addresses to be verified.",
	}, depth))
}

func (m *metrics) setNextExpiry(now time.Time, left time.Duration, ends bool) {
	if !ends {
		m.nextExpiry.Set(0)
		return
	}
	m.nextExpiry.Set(float64(now.Add(left).Unix()))
}

func stateLabel(s ledger.State) string {
	switch s {
	case ledger.StateBound:
		return "bound"
	case ledger.StateRetained:
		return "retained"
	}
	return "unreadable"
}
