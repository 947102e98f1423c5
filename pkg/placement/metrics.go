package placement

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// placementMetrics are what the controller exports of pods. How long its loops take, its calls of the API server and
// whether it leads are controller-runtime's and client-go's metrics.
type placementMetrics struct {
	placements *prometheus.CounterVec
	gated      *prometheus.HistogramVec
}

// newPlacementMetrics registers with r. elected is closed when this replica leads.
func newPlacementMetrics(r prometheus.Registerer, m *memory, elected <-chan struct{}) *placementMetrics {
	p := &placementMetrics{
		placements: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stayput_controller_placements_total",
			Help: "Pods placed, by outcome: free (had no home), home, elsewhere (the home was given up), evict (deleted, because the home had no room).",
		}, []string{"outcome"}),
		gated: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "stayput_controller_gate_duration_seconds",
			Help:    "How long pods were gated, from their creation, which the API server gives in whole seconds, by whether they waited for their home.",
			Buckets: []float64{.1, .25, .5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600},
		}, []string{"waited"}),
	}
	for _, o := range []home.Outcome{home.OutcomeFree, home.OutcomeHome, home.OutcomeElsewhere, home.OutcomeEvict} {
		p.placements.WithLabelValues(string(o))
	}
	for _, waited := range []bool{false, true} {
		p.gated.WithLabelValues(yesNo(waited))
	}
	r.MustRegister(p.placements, p.gated, newGateMetrics(m, elected))
	return p
}

// placed counts a pod that was gated for so long.
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

// leading says whether the channel that is closed when this replica leads is closed.
func leading(elected <-chan struct{}) bool {
	select {
	case <-elected:
		return true
	default:
		return false
	}
}

// gateMetrics are of the pods that are gated now, as the leader has them: only it knows which of them wait.
type gateMetrics struct {
	memory        *memory
	elected       <-chan struct{}
	gated, oldest *prometheus.Desc
	waiting       *prometheus.Desc
}

func newGateMetrics(m *memory, elected <-chan struct{}) *gateMetrics {
	return &gateMetrics{
		memory: m, elected: elected,
		gated: prometheus.NewDesc("stayput_controller_gated_pods",
			"Pods that are gated, by whether they wait for their home; of the leader only.", []string{"waiting"}, nil),
		oldest: prometheus.NewDesc("stayput_controller_oldest_gated_pod_age_seconds",
			"Age of the pod that has been gated for the longest, 0 if none is, by whether it waits for its home; of the leader only.", []string{"waiting"}, nil),
		waiting: prometheus.NewDesc("stayput_controller_waiting_pods",
			"Pods that wait for a home that cannot take them now, gated or let go already; of the leader only.", nil, nil),
	}
}

func (g *gateMetrics) Describe(c chan<- *prometheus.Desc) {
	c <- g.gated
	c <- g.oldest
	c <- g.waiting
}

func (g *gateMetrics) Collect(c chan<- prometheus.Metric) {
	if !leading(g.elected) {
		return
	}
	now := g.memory.now()
	for waiting, s := range g.memory.gatedPods() {
		age := 0.0
		if s.pods > 0 {
			age = max(0, now.Sub(s.oldest).Seconds())
		}
		c <- prometheus.MustNewConstMetric(g.gated, prometheus.GaugeValue, float64(s.pods), yesNo(waiting))
		c <- prometheus.MustNewConstMetric(g.oldest, prometheus.GaugeValue, age, yesNo(waiting))
	}
	c <- prometheus.MustNewConstMetric(g.waiting, prometheus.GaugeValue, g.memory.waitingPods())
}

// stateMetrics are of the PersistentPodStates as the cache has them.
type stateMetrics struct {
	client  client.Reader
	elected <-chan struct{}
	desc    *prometheus.Desc
}

func newStateMetrics(c client.Reader, elected <-chan struct{}) *stateMetrics {
	return &stateMetrics{client: c, elected: elected, desc: prometheus.NewDesc("stayput_controller_persistent_pod_states",
		"PersistentPodStates, by what is wrong with them: nothing, Conflict (another one for the same target is obeyed) or Degraded (nothing is recorded, or less than asked for); of the leader only.",
		[]string{"condition"}, nil)}
}

func (s *stateMetrics) Describe(c chan<- *prometheus.Desc) { c <- s.desc }

func (s *stateMetrics) Collect(c chan<- prometheus.Metric) {
	if !leading(s.elected) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // of the cache, which is read by then
	defer cancel()
	var all kruisev1alpha1.PersistentPodStateList
	if err := s.client.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Cannot count the PersistentPodStates")
		return
	}
	const fine = "none"
	counts := map[string]int{fine: 0, conditionConflict: 0, conditionDegraded: 0}
	for i := range all.Items {
		conditions := all.Items[i].Status.Conditions
		switch {
		case meta.IsStatusConditionTrue(conditions, conditionConflict):
			counts[conditionConflict]++
		case meta.IsStatusConditionTrue(conditions, conditionDegraded):
			counts[conditionDegraded]++
		default:
			counts[fine]++
		}
	}
	for condition, n := range counts {
		c <- prometheus.MustNewConstMetric(s.desc, prometheus.GaugeValue, float64(n), condition)
	}
}
