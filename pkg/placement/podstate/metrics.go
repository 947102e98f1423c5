package podstate

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
)

// stateMetrics are of the PersistentPodStates as the cache has them.
type stateMetrics struct {
	client client.Reader
	leads  func() bool
	desc   *prometheus.Desc
}

func newStateMetrics(c client.Reader, leads func() bool) *stateMetrics {
	return &stateMetrics{client: c, leads: leads, desc: prometheus.NewDesc("stayput_controller_persistent_pod_states",
		"PersistentPodStates by problem: none, Conflict (another one for the same target is in effect), "+
			"Degraded (nothing or less than requested is recorded). Leader only.",
		[]string{"condition"}, nil)}
}

func (s *stateMetrics) Describe(c chan<- *prometheus.Desc) { c <- s.desc }

func (s *stateMetrics) Collect(c chan<- prometheus.Metric) {
	if !s.leads() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // of the cache, which is read by then
	defer cancel()
	var all kruisev1alpha1.PersistentPodStateList
	if err := s.client.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		log.FromContext(ctx).Error(err, "Cannot count PersistentPodStates")
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
