package podip

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are about the agent's half of pools. There are none while the cluster has no pool.
type metrics struct {
	k                      *Keeper
	failures               *prometheus.CounterVec
	unproven, oldest, owed *prometheus.Desc
	routes                 *prometheus.Desc
}

// The words of the label part: what failed.
const (
	partWatch  = "watch"  // of pods, PodIPs, or of the PodIPAudit
	partPod    = "pod"    // to check a pod: to read or write its PodIPs, to grant, to find out whether it is there
	partReport = "report" // to report what all nodes are asked for
	partBooks  = "books"  // to look through the node's own books
	partFiles  = "files"  // to sweep old files
	partRoutes = "routes" // to route addresses of pools of mode Routed
)

func newMetrics(k *Keeper) *metrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, nil, nil)
	}
	return &metrics{
		k: k,
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stayput_agent_pool_failures_total",
			Help: "Failures of the agent's pool operations by part: watch, pod, report, books, files or routes. " +
				"Each is retried.",
		}, []string{"part"}),
		unproven: desc("stayput_agent_pool_unproven_pods",
			"Ended pods with addresses of pools that the node has not yet proved and reported to be gone."),
		oldest: desc("stayput_agent_pool_oldest_unproven_pod_age_seconds",
			"Time since the agent has known that the oldest of them has ended, 0 without any."),
		owed: desc("stayput_agent_pool_report_owed", "Whether the node has not answered yet what all nodes are asked."),
		routes: desc("stayput_agent_pool_routes",
			"Routes of the node to addresses of pools that pods of other nodes have, including unreachable routes."),
	}
}

func (m *metrics) Describe(c chan<- *prometheus.Desc) {
	m.failures.Describe(c)
	for _, d := range []*prometheus.Desc{m.unproven, m.oldest, m.owed, m.routes} {
		c <- d
	}
}

func (m *metrics) Collect(c chan<- prometheus.Metric) {
	unproven, oldest, works := m.k.pods.unproven()
	if !works {
		return
	}
	m.failures.Collect(c)
	c <- prometheus.MustNewConstMetric(m.unproven, prometheus.GaugeValue, float64(unproven))
	c <- prometheus.MustNewConstMetric(m.oldest, prometheus.GaugeValue, oldest.Seconds())
	owed := 0.0
	if m.k.reporter.owes() {
		owed = 1
	}
	c <- prometheus.MustNewConstMetric(m.owed, prometheus.GaugeValue, owed)
	c <- prometheus.MustNewConstMetric(m.routes, prometheus.GaugeValue, float64(m.k.router.routes()))
}

// serves starts the counters at 0, so that rate() sees the first increment.
func (m *metrics) serves() {
	for _, part := range []string{partWatch, partPod, partReport, partBooks, partFiles, partRoutes} {
		m.failures.WithLabelValues(part)
	}
}

// failed counts a failure of a part of the work, as [troubles.note] names it.
func (m *metrics) failed(part string) {
	switch kind, _, _ := strings.Cut(part, " "); {
	case kind != part:
		part = partPod
	case strings.HasPrefix(part, "routes."), part == "podCIDR":
		part = partRoutes
	case part == "pods", part == "audit", part == "routed":
		part = partWatch
	}
	m.failures.WithLabelValues(part).Inc()
}
