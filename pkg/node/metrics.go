package node

import (
	"errors"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/spool"
)

// metrics are what the node exports: stayput_ is about addresses, stayput_agent_ about the agent's own work.
// Labels are few by design: a network's name and ranges and words from a fixed list, never a pod or its address.
type metrics struct {
	registry *prometheus.Registry

	books     *bookMetrics
	restores  *prometheus.CounterVec
	misses    *prometheus.CounterVec
	refused   *prometheus.CounterVec
	clamped   *prometheus.CounterVec
	expired   *prometheus.CounterVec
	released  *prometheus.CounterVec
	reclaimed *prometheus.CounterVec

	badAnnotations prometheus.Counter
	verifyFailures prometheus.Counter

	nriConnected      prometheus.Gauge
	nriConnections    prometheus.Counter
	hookDuration      *prometheus.HistogramVec
	criUp             prometheus.Gauge
	reconcileDuration prometheus.Histogram
	queueDropped      prometheus.Counter
	suspects          prometheus.Gauge
	held              prometheus.Gauge
	leftovers         prometheus.Counter
	reportsLost       prometheus.Counter
	announced         prometheus.Counter

	reconcileErrors, policyErrors, networkErrors, expireErrors prometheus.Counter
	releaseErrors, spoolErrors, cniConfigErrors, peerErrors    prometheus.Counter
}

// newMetrics registers the metrics. Without NRI there is no metric of its connection: there is nothing to report.
func newMetrics(r *prometheus.Registry, nri bool) *metrics {
	register := promauto.With(r)
	counter := func(name, help string) prometheus.Counter {
		return register.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	perNetwork := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, append([]string{"network"}, labels...))
	}
	gauge := func(name, help string) prometheus.Gauge {
		return register.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	failures := register.NewCounterVec(prometheus.CounterOpts{
		Name: "stayput_agent_errors_total",
		Help: "Failures by operation: reconcile (in whole or in part), policy (to set a pod's), network (to read one), " +
			"expire (retentions that are due), release (addresses; retried), spool (to read a plugin report), cni_config " +
			"(to read or write it or the plugin's binary), peer (to announce an address or flush connections).",
	}, []string{"operation"})
	m := &metrics{
		registry: r,
		books:    newBookMetrics(r),
		restores: perNetwork("stayput_restores_total", "Pods that got their retained addresses back."),
		misses: perNetwork("stayput_restore_misses_total",
			"Pods that got addresses other than those promised, by reason.", "reason"),
		refused: perNetwork("stayput_retentions_refused_total",
			"Retentions refused because the limit of promised addresses was reached."),
		clamped:   perNetwork("stayput_retentions_clamped_total", "Retentions shortened to the network's maximum."),
		expired:   perNetwork("stayput_retentions_expired_total", "Retentions expired."),
		released:  perNetwork("stayput_retentions_released_total", "Retentions ended on request."),
		reclaimed: perNetwork("stayput_addresses_reclaimed_total", "Leaked addresses reclaimed."),

		badAnnotations: counter("stayput_invalid_annotations_total", "Running pods observed with invalid annotations."),
		verifyFailures: counter("stayput_verify_failures_total", "Pods on which a bound address is not configured."),

		nriConnected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stayput_agent_nri_connected",
			Help: "Whether the agent is connected to NRI; absent if NRI is disabled.",
		}),
		nriConnections: counter("stayput_agent_nri_connections_total",
			"NRI connections established, including reconnects."),
		hookDuration: register.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "stayput_agent_nri_hook_duration_seconds",
			Help:    "Duration of NRI hooks. The runtime disconnects an agent that takes more than 2 s.",
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2},
		}, []string{"hook"}),
		criUp: gauge("stayput_agent_cri_up", "Whether the last CRI call succeeded."),
		reconcileDuration: register.NewHistogram(prometheus.HistogramOpts{
			Name: "stayput_agent_reconcile_duration_seconds", Help: "Duration of reconciliations.",
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 30},
		}),
		queueDropped: counter("stayput_agent_queue_dropped_total",
			"Sandboxes dropped because the queue was full; the next reconciliation handles them."),
		suspects: gauge("stayput_agent_leak_suspects",
			"Attachments and unreadable files that hold an address without a sandbox in the runtime."),
		held: gauge("stayput_agent_leak_suspects_held",
			"Leak suspects not reclaimed after the grace period because their addresses are or may be in use."),
		leftovers: counter("stayput_agent_leftover_namespaces_removed_total", "Leftover network namespaces removed."),
		reportsLost: counter("stayput_agent_reports_lost_total",
			"Plugin reports lost because the spool overflowed while no agent was reading it."),
		announced: counter("stayput_agent_announcements_total", "Announcements of restored addresses."),

		reconcileErrors: failures.WithLabelValues("reconcile"),
		policyErrors:    failures.WithLabelValues("policy"),
		networkErrors:   failures.WithLabelValues("network"),
		expireErrors:    failures.WithLabelValues("expire"),
		releaseErrors:   failures.WithLabelValues("release"),
		spoolErrors:     failures.WithLabelValues("spool"),
		cniConfigErrors: failures.WithLabelValues("cni_config"),
		peerErrors:      failures.WithLabelValues("peer"),
	}
	if nri {
		r.MustRegister(m.nriConnected)
	}
	for _, hook := range []string{"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "Synchronize"} {
		m.hookDuration.WithLabelValues(hook)
	}
	return m
}

// know starts a network's counters at 0, so that rate() sees the first increment.
func (m *metrics) know(network string) {
	for _, c := range []*prometheus.CounterVec{m.restores, m.refused, m.clamped, m.expired, m.released, m.reclaimed} {
		c.WithLabelValues(network)
	}
	for _, miss := range ledger.Misses() {
		m.misses.WithLabelValues(network, miss.String())
	}
}

// bookMetrics are what the ledgers said when they were last read. They change together: no scrape sees a part.
type bookMetrics struct {
	addresses, oldest, next, size, taken, promised, promisable *prometheus.Desc

	mu  sync.Mutex
	now []prometheus.Metric
}

func newBookMetrics(r *prometheus.Registry) *bookMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, append([]string{"network"}, labels...), nil)
	}
	m := &bookMetrics{
		addresses: desc("stayput_addresses", "Addresses by state: bound, retained, newer or unreadable.", "state"),
		oldest: desc("stayput_oldest_retained_timestamp_seconds",
			"Unix time since which the longest retained address has been retained; absent if no address is retained."),
		next: desc("stayput_next_expiry_timestamp_seconds",
			"Unix time of the next expiry; absent if no retention expires."),
		size:  desc("stayput_range_addresses", "Addresses in a range set.", "range"),
		taken: desc("stayput_range_taken_addresses", "Addresses in a range set that are not free.", "range"),
		promised: desc("stayput_range_promised_addresses", "Promised addresses in a range set, bound or retained.",
			"range"),
		promisable: desc("stayput_range_promisable_addresses", "Maximum number of promised addresses in a range set.",
			"range"),
	}
	r.MustRegister(m)
	return m
}

func (m *bookMetrics) Describe(c chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.addresses, m.oldest, m.next, m.size, m.taken, m.promised, m.promisable} {
		c <- d
	}
}

func (m *bookMetrics) Collect(c chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, metric := range m.now {
		c <- metric
	}
}

// set takes the books as they are. Two of one network's name, with directories of their own, are one.
func (m *bookMetrics) set(books []book, wall time.Time) {
	type state struct {
		network string
		state   ledger.State
	}
	type rangeSet struct{ network, ranges string }
	states, ranges := map[state]int{}, map[rangeSet]ledger.RangeUse{}
	oldest, next := map[string]time.Time{}, map[string]time.Time{}
	for _, b := range books {
		n := b.ledger.Network()
		for _, s := range []ledger.State{ledger.StateBound, ledger.StateRetained, ledger.StateUnreadable} {
			states[state{n.Name, s}] += 0
		}
		for _, a := range b.addrs {
			states[state{n.Name, a.State}]++
			if a.State != ledger.StateRetained {
				continue
			}
			if was, ok := oldest[n.Name]; !ok || a.Since.Before(was) {
				oldest[n.Name] = a.Since
			}
			if end := wall.Add(a.Left); a.Ends {
				if was, ok := next[n.Name]; !ok || end.Before(was) {
					next[n.Name] = end
				}
			}
		}
		for _, u := range n.Use(b.addrs) {
			k := rangeSet{n.Name, u.RangeSet.String()}
			u.Taken, u.Promised = u.Taken+ranges[k].Taken, u.Promised+ranges[k].Promised
			ranges[k] = u
		}
	}
	var now []prometheus.Metric
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		now = append(now, prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...))
	}
	for k, n := range states {
		gauge(m.addresses, float64(n), k.network, stateLabel(k.state))
	}
	for network, t := range oldest {
		gauge(m.oldest, seconds(t), network)
	}
	for network, t := range next {
		gauge(m.next, seconds(t), network)
	}
	for k, u := range ranges {
		gauge(m.size, float64(u.Addresses), k.network, k.ranges)
		gauge(m.taken, float64(u.Taken), k.network, k.ranges)
		gauge(m.promised, float64(u.Promised), k.network, k.ranges)
		gauge(m.promisable, float64(u.Promisable), k.network, k.ranges)
	}
	m.mu.Lock()
	m.now = now
	m.mu.Unlock()
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1e3 }

// latencyMetrics are what the plugin has counted, taken at each scrape: nothing else has to wake up for it.
type latencyMetrics struct {
	dir spool.Dir
	log *slog.Logger

	mu   sync.Mutex // two scrapes must not take the same
	took *prometheus.HistogramVec
}

func newLatencyMetrics(r *prometheus.Registry, dir spool.Dir, log *slog.Logger) {
	m := &latencyMetrics{dir: dir, log: log, took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "stayput_plugin_duration_seconds",
		Help: "Duration of CNI plugin commands, including waits, by result. ADD: ordinary, promised, restored or in_use, " +
			"which is retried. DEL: retained or freed.",
		Buckets: []float64{
			.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60,
		},
	}, []string{"command", "result"})}
	for _, e := range spool.Endings() {
		command, result := e.Words()
		m.took.WithLabelValues(command, result)
	}
	r.MustRegister(m)
}

func (m *latencyMetrics) Describe(c chan<- *prometheus.Desc) { m.took.Describe(c) }

func (m *latencyMetrics) Collect(c chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all, err := m.dir.TakeLatencies()
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the state was removed; the next reconciliation makes it again
		m.log.Warn("Cannot take the plugin's latencies", "err", err)
	}
	for _, l := range all {
		command, result := l.Ending.Words()
		m.took.WithLabelValues(command, result).Observe(l.Took.Seconds())
	}
	m.took.Collect(c)
}

// observeQueue exports the depth of the queue.
func (m *metrics) observeQueue(depth func() float64) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stayput_agent_queue_depth", Help: "Sandboxes queued for policy and verification.",
	}, depth))
}

func stateLabel(s ledger.State) string {
	switch s {
	case ledger.StateBound:
		return "bound"
	case ledger.StateRetained:
		return "retained"
	case ledger.StateNewer:
		return "newer"
	}
	return "unreadable"
}
