package placement

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

type placementMetrics struct {
	placements *prometheus.CounterVec
	gated      prometheus.Histogram
}

func newPlacementMetrics(m *memory) *placementMetrics {
	p := &placementMetrics{
		placements: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stayput_controller_placements_total",
			Help: "Pods placed, by outcome: free (had no home), home, elsewhere (the home was given up), evict (deleted, because the home had no room).",
		}, []string{"outcome"}),
		gated: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "stayput_controller_gated_seconds",
			Help:    "How long pods were gated, from their creation, which the API server gives in whole seconds.",
			Buckets: []float64{1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600},
		}),
	}
	for _, o := range []outcome{outcomeFree, outcomeHome, outcomeElsewhere, outcomeEvict} {
		p.placements.WithLabelValues(string(o))
	}
	waiting := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stayput_controller_waiting_pods",
		Help: "Pods that wait for a home that cannot take them now.",
	}, m.waitingPods)
	metrics.Registry.MustRegister(p.placements, p.gated, waiting)
	return p
}

// placed counts a pod that was gated for so long.
func (p *placementMetrics) placed(o outcome, gated time.Duration) {
	p.placements.WithLabelValues(string(o)).Inc()
	if o != outcomeEvict {
		p.gated.Observe(gated.Seconds())
	}
}
