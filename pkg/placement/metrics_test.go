package placement

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

func TestTheMetricsFollowTheConventionsOfPrometheus(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	newPlacementMetrics(r, newMemory(time.Now), func() bool { return true }).placed(home.OutcomeHome, time.Second, true)
	problems, err := testutil.GatherAndLint(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestTheLeaderCountsGatedPodsByWhetherTheyWaitForTheirHome(t *testing.T) {
	now := hometest.Noon
	m := newMemory(func() time.Time { return now })
	aged := func(name string, age time.Duration) *corev1.Pod {
		return hometest.Pod(func(p *corev1.Pod) {
			p.Name, p.UID, p.CreationTimestamp = name, types.UID(name), metav1.NewTime(hometest.Noon.Add(-age))
		})
	}
	events := m.handler()
	for _, p := range []*corev1.Pod{aged("fresh", time.Second), aged("late", time.Minute), aged("waits", time.Hour)} {
		events.OnAdd(cluster.PodOf(p), true)
	}
	waiting := aged("waits", time.Hour)
	m.waits(waiting, "node node-1", "node-1", "is cordoned")
	if m.waited(waiting) == "" || m.waited(aged("late", time.Minute)) != "" {
		t.Error("not the one that waits is said to wait")
	}

	leads := false
	r := prometheus.NewPedanticRegistry()
	newPlacementMetrics(r, m, func() bool { return leads })
	names := []string{"stayput_controller_gated_pods", "stayput_controller_oldest_gated_pod_age_seconds",
		"stayput_controller_waiting_pods"}
	if n, err := testutil.GatherAndCount(r, names...); err != nil || n > 0 {
		t.Errorf("one that does not lead exports %d of them, %v", n, err)
	}
	leads = true
	want := func(fresh, late string, waits string) {
		t.Helper()
		text := `
# HELP stayput_controller_gated_pods Pods held only by Stayput's gate, by what they wait for: false (nothing), true (their home), address (of a pool). Leader only.
# TYPE stayput_controller_gated_pods gauge
stayput_controller_gated_pods{waiting="address"} 0
stayput_controller_gated_pods{waiting="false"} ` + fresh + `
stayput_controller_gated_pods{waiting="true"} ` + waits + `
# HELP stayput_controller_oldest_gated_pod_age_seconds Age of the oldest pod held only by Stayput's gate, 0 if there is none, by what it waits for: false (nothing), true (its home), address (of a pool). Leader only.
# TYPE stayput_controller_oldest_gated_pod_age_seconds gauge
stayput_controller_oldest_gated_pod_age_seconds{waiting="address"} 0
stayput_controller_oldest_gated_pod_age_seconds{waiting="false"} ` + late + `
stayput_controller_oldest_gated_pod_age_seconds{waiting="true"} 3600
`
		if waits == "0" {
			text = strings.Replace(text, " 3600\n", " 0\n", 1)
		}
		if err := testutil.GatherAndCompare(r, strings.NewReader(text), names[:2]...); err != nil {
			t.Error(err)
		}
	}
	want("2", "60", "1")
	ungated := aged("late", time.Minute)
	ungated.Spec.SchedulingGates = nil
	events.OnUpdate(cluster.PodOf(aged("late", time.Minute)), cluster.PodOf(ungated))
	want("1", "1", "1")
	events.OnDelete(cluster.PodOf(aged("fresh", time.Second)))
	events.OnDelete(cluster.PodOf(waiting))
	want("0", "0", "0")
	m.decided(client.ObjectKeyFromObject(waiting)) // as the placer does that finds it gone
	if len(m.records) > 0 {
		t.Errorf("remembered for ever: %v", m.records)
	}
}

// One that waits for an address of a pool is no pod that nobody decides about.
func TestPodsThatWaitForAnAddressAreCountedApart(t *testing.T) {
	now := hometest.Noon
	m := newMemory(func() time.Time { return now })
	for _, name := range []string{"ordinary", "waits", "has-waited"} {
		pod := hometest.Pod(func(p *corev1.Pod) { p.Name, p.UID = name, types.UID(name) })
		m.handler().OnAdd(cluster.PodOf(pod), true)
		if name != "ordinary" {
			m.waitsForAddress(pod)
		}
		if name == "has-waited" {
			m.waits(pod, "node node-1", "node-1", "is cordoned")
		}
	}
	counts := m.gatedPods()
	if counts[waitsForAddress].pods != 1 || counts[waitsForNothing].pods != 1 || counts[waitsForHome].pods != 1 {
		t.Errorf("%+v", counts)
	}
}
