package podip

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stayput/stayput/pkg/pool"
)

// metrics are about pools and their addresses. Only who leads has any, and only while there is a pool.
type metrics struct {
	c      *state
	placed *prometheus.HistogramVec

	total, used, free, waiting *prometheus.Desc
	held, oldest, conflicts    *prometheus.Desc
	recalling, unanswered      *prometheus.Desc
}

func newMetrics(c *state) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help+" Leader only.", labels, nil)
	}
	return &metrics{
		c: c,
		placed: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "stayput_controller_pool_gate_duration_seconds",
			Help: "Time from when the controller saw that only its gate holds a pod that asks for addresses of pools, or " +
				"from the creation of a pod that was older by then, to its ungating with them, by whether it waited for them.",
			Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 2, 5, 10, 30, 60, 300, 1800},
		}, []string{"waited"}),
		total: desc("stayput_controller_pool_addresses", "Addresses in a pool.", "pool"),
		used: desc("stayput_controller_pool_used_addresses",
			"Addresses of a pool that are in use or kept.", "pool"),
		free: desc("stayput_controller_pool_free_addresses", "Addresses of a pool that are free.", "pool"),
		waiting: desc("stayput_controller_pool_waiting_pods",
			"Pods that wait because a pool has no free address. A pod may wait for several pools.", "pool"),
		held: desc("stayput_controller_pool_held_addresses",
			"Addresses of pools whose pod is deleted and may still answer, by whether only an operator can end that.",
			"operator"),
		oldest: desc("stayput_controller_pool_oldest_held_address_age_seconds",
			"Time for which the controller has known of the longest held address, 0 without any, by whether only an "+
				"operator can end that.", "operator"),
		conflicts: desc("stayput_controller_pool_conflicting_addresses",
			"Addresses of pools for which another machine answers, so that their pods cannot start."),
		recalling: desc("stayput_controller_pool_recalling",
			"Whether pools assign and free no address until every node has reported which ones it has."),
		unanswered: desc("stayput_controller_pool_unanswered_nodes",
			"Nodes that have not reported yet for the epoch that is open."),
	}
}

func (m *metrics) descs() []*prometheus.Desc {
	return []*prometheus.Desc{m.total, m.used, m.free, m.waiting, m.held, m.oldest, m.conflicts, m.recalling,
		m.unanswered}
}

func (m *metrics) Describe(c chan<- *prometheus.Desc) {
	m.placed.Describe(c)
	for _, d := range m.descs() {
		c <- d
	}
}

func (m *metrics) Collect(c chan<- prometheus.Metric) {
	all := m.now()
	if all == nil {
		return
	}
	m.placed.Collect(c)
	for _, metric := range all {
		c <- metric
	}
}

// now returns what the Book says, nil if there is none, or no pool.
func (m *metrics) now() (all []prometheus.Metric) {
	m.c.mu.Lock()
	defer m.c.unlock()
	s := m.c.session
	if s == nil || !s.ready || len(m.c.pools) == 0 {
		return nil
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		all = append(all, prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...))
	}
	now := m.c.now()
	for _, name := range slices.Sorted(maps.Keys(m.c.pools)) {
		count := s.book.Count(name, now)
		gauge(m.total, float64(count.Total), name)
		gauge(m.used, float64(count.Used), name)
		gauge(m.free, float64(count.Free), name)
		gauge(m.waiting, float64(len(s.book.Waiting(name))), name)
	}
	held, oldest := map[bool]int{}, map[bool]time.Duration{}
	s.book.Unproven(func(since time.Time, operator bool) {
		held[operator]++
		oldest[operator] = max(oldest[operator], now.Sub(since))
	})
	for _, operator := range []bool{false, true} {
		gauge(m.held, float64(held[operator]), strconv.FormatBool(operator))
		gauge(m.oldest, oldest[operator].Seconds(), strconv.FormatBool(operator))
	}
	gauge(m.conflicts, float64(s.book.Conflicts()))
	recalling := 0.0
	if s.book.Audit().Recalling {
		recalling = 1
	}
	gauge(m.recalling, recalling)
	gauge(m.unanswered, float64(len(s.book.Unanswered())))
	return all
}

// serves starts the counters at 0, so that rate() sees the first increment.
func (m *metrics) serves() {
	for _, waited := range []bool{false, true} {
		m.placed.WithLabelValues(strconv.FormatBool(waited))
	}
}

// wait is what is noted of a gated pod that asks for addresses of pools.
type wait struct {
	since  time.Time
	waited bool
}

// old is an age at which the creation of a pod, in whole seconds, says more than when it was seen.
const old = 2 * time.Second

// noteGateLocked notes since when only our gate has held a pod: last reports whether it does. news: the pod was not
// known.
func (s *session) noteGateLocked(p *pool.Pod, last, news bool, now time.Time) {
	switch {
	case !last || p.Ending:
		delete(s.gated, p.UID)
	case s.gated[p.UID] != nil:
	case news && now.Sub(p.Created) >= old:
		s.gated[p.UID] = &wait{since: p.Created}
	default:
		s.gated[p.UID] = &wait{since: now}
	}
}

// observeGate counts a pod that was ungated with its addresses, nil if it was not gated.
func (m *metrics) observeGate(w *wait) {
	if w != nil {
		m.placed.WithLabelValues(strconv.FormatBool(w.waited)).Observe(max(0, m.c.now().Sub(w.since).Seconds()))
	}
}
