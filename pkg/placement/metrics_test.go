package placement

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
)

// stateCache is a cache of PersistentPodStates.
type stateCache struct {
	client.Reader
	all []kruisev1alpha1.PersistentPodState
}

func (s *stateCache) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*kruisev1alpha1.PersistentPodStateList).Items = slices.Clone(s.all)
	return nil
}

// troubled is a PersistentPodState with these conditions, all of them true.
func troubled(conditions ...string) kruisev1alpha1.PersistentPodState {
	var s kruisev1alpha1.PersistentPodState
	for _, c := range conditions {
		s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{Type: c, Status: metav1.ConditionTrue})
	}
	return s
}

func TestTheMetricsFollowTheConventionsOfPrometheus(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	elected := make(chan struct{})
	close(elected)
	newPlacementMetrics(r, newMemory(time.Now), elected).placed(home.OutcomeHome, time.Second, true)
	r.MustRegister(newStateMetrics(&stateCache{}, elected))
	problems, err := testutil.GatherAndLint(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestTheLeaderCountsThePodsThatAreGatedAndForHowLongApartFromThoseThatWaitForHome(t *testing.T) {
	now := hometest.Noon
	m := newMemory(func() time.Time { return now })
	aged := func(name string, age time.Duration) *corev1.Pod {
		return hometest.Pod(func(p *corev1.Pod) {
			p.Name, p.UID, p.CreationTimestamp = name, types.UID(name), metav1.NewTime(hometest.Noon.Add(-age))
		})
	}
	events := m.handler()
	for _, p := range []*corev1.Pod{aged("fresh", time.Second), aged("late", time.Minute), aged("waits", time.Hour)} {
		events.OnAdd(p, true)
	}
	waiting := aged("waits", time.Hour)
	m.waits(waiting, "node-1", "is cordoned")
	if !m.waited(waiting) || m.waited(aged("late", time.Minute)) {
		t.Error("not the one that waits is said to wait")
	}

	elected := make(chan struct{})
	r := prometheus.NewPedanticRegistry()
	newPlacementMetrics(r, m, elected)
	names := []string{"stayput_controller_gated_pods", "stayput_controller_oldest_gated_pod_age_seconds", "stayput_controller_waiting_pods"}
	if n, err := testutil.GatherAndCount(r, names...); err != nil || n > 0 {
		t.Errorf("one that does not lead exports %d of them, %v", n, err)
	}
	close(elected)
	want := func(fresh, late string, waits string) {
		t.Helper()
		text := `
# HELP stayput_controller_gated_pods Pods that are gated, by whether they wait for their home; of the leader only.
# TYPE stayput_controller_gated_pods gauge
stayput_controller_gated_pods{waiting="false"} ` + fresh + `
stayput_controller_gated_pods{waiting="true"} ` + waits + `
# HELP stayput_controller_oldest_gated_pod_age_seconds Age of the pod that has been gated for the longest, 0 if none is, by whether it waits for its home; of the leader only.
# TYPE stayput_controller_oldest_gated_pod_age_seconds gauge
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
	events.OnUpdate(aged("late", time.Minute), ungated)
	want("1", "1", "1")
	events.OnDelete(aged("fresh", time.Second))
	events.OnDelete(waiting)
	want("0", "0", "0")
	if len(m.gated) > 0 {
		t.Errorf("remembered for ever: %v", m.gated)
	}
}

func TestPersistentPodStatesAreCountedByWhatIsWrongWithThem(t *testing.T) {
	elected := make(chan struct{})
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(newStateMetrics(&stateCache{all: []kruisev1alpha1.PersistentPodState{
		troubled(), troubled(conditionRecorded), troubled(conditionDegraded), troubled(conditionConflict), troubled(conditionConflict, conditionDegraded),
	}}, elected))
	if n, err := testutil.GatherAndCount(r); err != nil || n > 0 {
		t.Errorf("one that does not lead exports %d, %v", n, err)
	}
	close(elected)
	err := testutil.GatherAndCompare(r, strings.NewReader(`
# HELP stayput_controller_persistent_pod_states PersistentPodStates, by what is wrong with them: nothing, Conflict (another one for the same target is obeyed) or Degraded (nothing is recorded, or less than asked for); of the leader only.
# TYPE stayput_controller_persistent_pod_states gauge
stayput_controller_persistent_pod_states{condition="Conflict"} 2
stayput_controller_persistent_pod_states{condition="Degraded"} 1
stayput_controller_persistent_pod_states{condition="none"} 2
`))
	if err != nil {
		t.Error(err)
	}
}
