package node

import (
	"errors"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

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
	criUp             prometheus.Gauge
	reconcileDuration prometheus.Histogram
	reconcileErrors   prometheus.Counter
	queueDropped      prometheus.Counter
	suspects          prometheus.Gauge
	held              prometheus.Gauge
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
		registry:  r,
		books:     newBookMetrics(r),
		restores:  counters("stayput_restores_total", "Pods that got the addresses back that were retained for them.", "network"),
		misses:    counters("stayput_restore_misses_total", "Pods that were promised addresses and got others, by reason.", "network", "reason"),
		refused:   counters("stayput_retentions_refused_total", "Pods whose addresses are not retained because too many are promised already.", "network"),
		clamped:   counters("stayput_retentions_clamped_total", "Retentions that were shortened to the network's longest.", "network"),
		expired:   counters("stayput_retentions_expired_total", "Retentions that ended by time.", "network"),
		released:  counters("stayput_retentions_released_total", "Retentions that ended because somebody asked for it.", "network"),
		reclaimed: counters("stayput_addresses_reclaimed_total", "Addresses that leaked and were taken back.", "network"),

		badAnnotations: counter("stayput_invalid_annotations_total", "Running pods seen with annotations that cannot be honoured."),
		verifyFailures: counter("stayput_verify_failures_total", "Pods in which an address was not configured that is bound to them."),

		nriConnected:      gauge("stayput_agent_nri_connected", "Whether the NRI connection stands."),
		nriConnections:    counter("stayput_agent_nri_connections_total", "NRI connections made; beyond the first these are reconnects."),
		criUp:             gauge("stayput_agent_cri_up", "Whether the last call of the container runtime succeeded."),
		reconcileDuration: histogram("stayput_agent_reconcile_duration_seconds", "Time one reconciliation took.", .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 30),
		reconcileErrors:   counter("stayput_agent_reconcile_errors_total", "Reconciliations that failed, whole or in part."),
		queueDropped:      counter("stayput_agent_queue_dropped_total", "Sandboxes that did not fit into the queue and were left to a reconciliation."),
		suspects:          gauge("stayput_agent_leak_suspects", "Attachments and unreadable files with an address that no listed sandbox explains."),
		held:              gauge("stayput_agent_leak_suspects_held", "Suspects past their grace period that are kept because somebody may use their addresses, or that cannot be found out."),
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
	}
	return m
}

// know makes the counters of a network begin at 0: of one that begins at 1 nobody sees it rise.
func (m *metrics) know(network string) {
	for _, c := range []*prometheus.CounterVec{m.restores, m.refused, m.clamped, m.expired, m.released, m.reclaimed} {
		c.WithLabelValues(network)
	}
	for _, miss := range ledger.Misses() {
		m.misses.WithLabelValues(network, miss.String())
	}
}

// bookMetrics are what the ledgers say, as of the last look at them. They change together: no scrape sees a part.
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
		addresses:  desc("stayput_addresses", "Addresses that are not free, by state: bound, retained, or unreadable.", "state"),
		oldest:     desc("stayput_oldest_retained_timestamp_seconds", "Since when the address is retained that has been for the longest, in seconds since the epoch; missing where none is."),
		next:       desc("stayput_next_expiry_timestamp_seconds", "When the next retention ends, in seconds since the epoch; missing where none does."),
		size:       desc("stayput_range_addresses", "Addresses that a range set can give.", "range"),
		taken:      desc("stayput_range_taken_addresses", "Addresses of a range set that are not free.", "range"),
		promised:   desc("stayput_range_promised_addresses", "Addresses of a range set that are promised, bound and retained together.", "range"),
		promisable: desc("stayput_range_promisable_addresses", "The most addresses of a range set that may be promised.", "range"),
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

// latencyMetrics are what the plugin has counted, read at each scrape: nothing else has to wake up for it.
type latencyMetrics struct {
	dir  spool.Dir
	log  *slog.Logger
	desc *prometheus.Desc
}

func newLatencyMetrics(r *prometheus.Registry, dir spool.Dir, log *slog.Logger) {
	r.MustRegister(&latencyMetrics{dir: dir, log: log, desc: prometheus.NewDesc("stayput_plugin_duration_seconds",
		"Time that a command of the CNI plugin took, waiting included, by how it ended: an ADD with addresses that are ordinary, promised from now on, or restored, or with in_use, to be tried again; a DEL with addresses retained or freed.",
		[]string{"command", "result"}, nil)})
}

func (m *latencyMetrics) Describe(c chan<- *prometheus.Desc) { c <- m.desc }

func (m *latencyMetrics) Collect(c chan<- prometheus.Metric) {
	all, err := m.dir.Latencies()
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) { // the state was removed; the next reconciliation makes it again
			m.log.Warn("Cannot read what the plugin has counted", "err", err)
		}
		return
	}
	for _, l := range all {
		buckets := map[float64]uint64{}
		for i, bound := range spool.LatencyBuckets() {
			buckets[bound.Seconds()] = l.Buckets[i]
		}
		command, result := l.Ending.Words()
		c <- prometheus.MustNewConstHistogram(m.desc, l.Count, l.Sum.Seconds(), buckets, command, result)
	}
}

// observeQueue exports the depth of the queue.
func (m *metrics) observeQueue(depth func() float64) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stayput_agent_queue_depth", Help: "Sandboxes that wait for their policy to be set and their addresses to be verified.",
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
