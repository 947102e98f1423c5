package podip

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/hostnet"
)

// exported returns the metrics by what is behind stayput_agent_pool_.
func (w *world) exported() map[string]float64 {
	w.t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(w.k.metrics)
	families, err := r.Gather()
	check(w.t, err)
	problems, err := testutil.GatherAndLint(r)
	check(w.t, err)
	for _, p := range problems {
		w.t.Errorf("%s: %s", p.Metric, p.Text)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := strings.TrimPrefix(f.GetName(), "stayput_agent_pool_")
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			all[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return all
}

func TestWhatFailsAndWhatIsOwedIsCounted(t *testing.T) {
	inWorld(t, func(w *world) {
		quiet := map[string]float64{"failures_total watch": 0, "failures_total pod": 0, "failures_total report": 0,
			"failures_total books": 0, "failures_total files": 0, "failures_total routes": 0, "unproven_pods": 0,
			"oldest_unproven_pod_age_seconds": 0, "report_owed": 0, "routes": 0}
		for n := range 2 {
			w.given(n + 1)
			w.runs(n + 1)
		}
		w.pass(time.Minute)
		if is := w.exported(); !maps.Equal(is, quiet) {
			t.Errorf("at first %v", is)
		}

		// The pod is gone, and the agent is blind: it does not see the other one either.
		see := w.k.machine.observe
		w.k.machine.observe = func(context.Context, hostnet.Question) (*hostnet.View, error) { return &hostnet.View{}, nil }
		w.c.remove(uid(1))
		w.stops(1)
		w.pass(time.Minute)
		is := w.exported()
		if is["failures_total pod"] < 4 || is["unproven_pods"] != 1 || is["oldest_unproven_pod_age_seconds"] != 60 {
			t.Errorf("with a pod of which nothing can be proved %v", is)
		}
		w.c.putAudit(audit(5, v1alpha1.PodIPAuditRecalling))
		w.pass(time.Minute)
		is = w.exported()
		if is["failures_total report"] < 4 || is["report_owed"] != 1 {
			t.Errorf("with a report owed %v", is)
		}

		// It is done.
		w.k.machine.observe = see
		w.pass(time.Minute)
		is = w.exported()
		if is["unproven_pods"] != 0 || is["oldest_unproven_pod_age_seconds"] != 0 || is["report_owed"] != 0 {
			t.Errorf("afterwards %v", is)
		}
		w.k.SetPools("")
		w.pass(time.Second)
		if is := w.exported(); len(is) > 0 {
			t.Errorf("without pools %v", is)
		}
	})
}
