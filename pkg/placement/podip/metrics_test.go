package podip

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/pool"
)

// exported returns the metrics by what is behind stayput_controller_pool_; of a histogram, how many it counted.
func (c *controlling) exported() map[string]float64 {
	c.t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c.metrics)
	families, err := r.Gather()
	if err != nil {
		c.t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := strings.TrimPrefix(f.GetName(), "stayput_controller_pool_")
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			if all[name] = m.GetGauge().GetValue(); m.Histogram != nil {
				all[name] = float64(m.Histogram.GetSampleCount())
			}
		}
	}
	return all
}

func (c *controlling) exports(want map[string]float64) {
	c.t.Helper()
	is := c.exported()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if value, ok := is[name]; !ok || value != want[name] {
			c.t.Errorf("%s is %v, want %v", name, value, want[name])
		}
	}
}

func TestWithoutPoolsThereAreNoMetricsOfThem(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"))
	c := control(t, a)
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c.metrics)
	problems, err := testutil.GatherAndLint(r)
	if err != nil || len(problems) > 0 || len(c.exported()) != 13 {
		t.Errorf("%v, %v, %v", problems, err, c.exported())
	}
	if err := a.Delete(t.Context(), aPool("blue", "")); err != nil {
		t.Fatal(err)
	}
	if c.works(); len(c.exported()) > 0 {
		t.Errorf("without a pool there is %v", c.exported())
	}
	c = control(t, newAPI(t))
	if c.works(); len(c.exported()) > 0 {
		t.Errorf("there never was a pool, and there is %v", c.exported())
	}
}

func TestPoolsAreCounted(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.102"),
		asking("web-0", "blue"), asking("web-1", "blue", made(time.Second)), asking("web-2", "blue", made(2*time.Second)))
	c := control(t, a)
	c.works()
	c.exports(map[string]float64{"addresses blue": 2, "used_addresses blue": 2, "free_addresses blue": 0,
		"waiting_pods blue": 1, "gate_duration_seconds false": 2, "gate_duration_seconds true": 0, "held_addresses false": 0,
		"held_addresses true": 0, "conflicting_addresses": 0, "recalling": 0, "unanswered_nodes": 0})
	web0, _ := a.pod(t, "web-0")
	if err := a.Delete(t.Context(), web0); err != nil { // it never had a node
		t.Fatal(err)
	}
	c.works()
	c.exports(map[string]float64{"waiting_pods blue": 0, "gate_duration_seconds false": 2,
		"gate_duration_seconds true": 1})
}

// The address of a pod that is gone waits for its node, and for an operator if that is lost.
func TestAddressesThatWaitForAProofAreCounted(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"),
		asking("web-0", "blue", hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")))
	c := control(t, a)
	c.works()
	pod := bound(t, a, "web-0", "node-1")
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(pod.UID), "node-1")
	c.works()
	if err := a.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	c.works()
	a.now = a.now.Add(5 * time.Second)
	c.exports(map[string]float64{"held_addresses false": 1, "oldest_held_address_age_seconds false": 5,
		"held_addresses true": 0, "oldest_held_address_age_seconds true": 0})

	var node corev1.Node
	if err := a.Get(t.Context(), types.NamespacedName{Name: "node-1"}, &node); err != nil {
		t.Fatal(err)
	}
	node.Status.Conditions[0].Status = corev1.ConditionUnknown
	if err := a.Status().Update(t.Context(), &node); err != nil {
		t.Fatal(err)
	}
	c.works()
	a.now = a.now.Add(time.Second)
	c.exports(map[string]float64{"held_addresses false": 0, "held_addresses true": 1,
		"oldest_held_address_age_seconds true": 6})

	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(pod.UID), "node-1")
	c.works()
	c.exports(map[string]float64{"held_addresses false": 0, "held_addresses true": 0,
		"oldest_held_address_age_seconds true": 0, "used_addresses blue": 1})
}

func TestConflictsAndRecallsAreCounted(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"), aPool("blue", "10.6.168.101-10.6.168.110"),
		asking("web-0", "blue"))
	c := control(t, a)
	c.works()
	pod := bound(t, a, "web-0", "node-1")
	ip := a.ips(t)["10.6.168.101"]
	ip.Status = stayputv1alpha1.PodIPStatus{Phase: stayputv1alpha1.PodIPBound, PodUID: string(pod.UID),
		NodeName: "node-1", Conflict: "02:00:00:00:00:01"}
	if err := a.Status().Update(t.Context(), &ip); err != nil {
		t.Fatal(err)
	}
	c.looks()
	c.exports(map[string]float64{"conflicting_addresses": 1, "recalling": 0})
	next := c.session.book.Audit()
	next.Recalling, next.Epoch = true, next.Epoch+1
	c.mu.Lock()
	c.session.book = pool.NewBook(next)
	for _, name := range []string{"node-1", "node-2"} {
		c.session.book.SetNode(pool.Node{Name: name, Ready: true})
	}
	c.session.book.SetReport(pool.Report{Node: "node-2", Epoch: next.Epoch})
	c.mu.Unlock()
	c.exports(map[string]float64{"recalling": 1, "unanswered_nodes": 1})
}
