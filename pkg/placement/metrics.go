package placement

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stayput/stayput/pkg/home"
)

// placementMetrics are the metrics about pods. Those about the loops, API calls and leadership are controller-runtime's
// and client-go's.
type placementMetrics struct {
	placements *prometheus.CounterVec
	gated      *prometheus.HistogramVec
	gates      *gateMetrics
}

// newPlacementMetrics registers with r. leads reports whether this replica does.
func newPlacementMetrics(r prometheus.Registerer, m *memory, leads func() bool) *placementMetrics {
	gates := newGateMetrics(m, leads)
	p := &placementMetrics{
		gates: gates,
		placements: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stayput_controller_placements_total",
			Help: "Pods placed by outcome: free (had no home), home, elsewhere (gave up its home), evict (deleted because its " +
				"home had no room).",
		}, []string{"outcome"}),
		gated: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "stayput_controller_gate_duration_seconds",
			Help: "Time from the creation of a pod (in whole seconds), or the end of its other gates, to its ungating, by " +
				"whether it waited for its home.",
			Buckets: []float64{.1, .25, .5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600},
		}, []string{"waited"}),
	}
	for _, o := range []home.Outcome{home.OutcomeFree, home.OutcomeHome, home.OutcomeElsewhere, home.OutcomeEvict} {
		p.placements.WithLabelValues(string(o))
	}
	for _, waited := range []bool{false, true} {
		p.gated.WithLabelValues(yesNo(waited))
	}
	r.MustRegister(p.placements, p.gated, gates)
	return p
}

// placed counts a pod and how long it was gated.
func (p *placementMetrics) placed(o home.Outcome, gated time.Duration, waited bool) {
	p.placements.WithLabelValues(string(o)).Inc()
	if o != home.OutcomeEvict {
		p.gated.WithLabelValues(yesNo(waited)).Observe(gated.Seconds())
	}
}

func yesNo(b bool) string {
	if b {
		return "true"
	}
	return "false"
}

// gateMetrics are about the pods that are gated now. Only the leader knows which of them wait.
type gateMetrics struct {
	memory        *memory
	leads         func() bool
	gated, oldest *prometheus.Desc
	waiting       *prometheus.Desc
}

func newGateMetrics(m *memory, leads func() bool) *gateMetrics {
	return &gateMetrics{
		memory: m, leads: leads,
		gated: prometheus.NewDesc("stayput_controller_gated_pods",
			"Pods held only by Stayput's gate, by what they wait for: false (nothing), true (their home), address (of a "+
				"pool). Leader only.", []string{"waiting"}, nil),
		oldest: prometheus.NewDesc("stayput_controller_oldest_gated_pod_age_seconds",
			"Age of the oldest pod held only by Stayput's gate, 0 if there is none, by what it waits for: false (nothing), "+
				"true (its home), address (of a pool). Leader only.", []string{"waiting"}, nil),
		waiting: prometheus.NewDesc("stayput_controller_waiting_pods",
			"Pods waiting for a home that cannot take them now, gated or already ungated. Leader only.", nil, nil),
	}
}

func (g *gateMetrics) Describe(c chan<- *prometheus.Desc) {
	c <- g.gated
	c <- g.oldest
	c <- g.waiting
}

func (g *gateMetrics) Collect(c chan<- prometheus.Metric) {
	if !g.leads() {
		return
	}
	now := g.memory.now()
	for waiting, s := range g.memory.gatedPods() {
		age := 0.0
		if s.pods > 0 {
			age = max(0, now.Sub(s.oldest).Seconds())
		}
		c <- prometheus.MustNewConstMetric(g.gated, prometheus.GaugeValue, float64(s.pods), waiting)
		c <- prometheus.MustNewConstMetric(g.oldest, prometheus.GaugeValue, age, waiting)
	}
	c <- prometheus.MustNewConstMetric(g.waiting, prometheus.GaugeValue, g.memory.waitingPods())
}
