package podstate

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
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

func TestPersistentPodStatesAreCountedByWhatIsWrongWithThem(t *testing.T) {
	leads := false
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(newStateMetrics(&stateCache{all: []kruisev1alpha1.PersistentPodState{
		troubled(), troubled(conditionRecorded), troubled(conditionDegraded), troubled(conditionConflict),
		troubled(conditionConflict, conditionDegraded),
	}}, func() bool { return leads }))
	if n, err := testutil.GatherAndCount(r); err != nil || n > 0 {
		t.Errorf("one that does not lead exports %d, %v", n, err)
	}
	leads = true
	err := testutil.GatherAndCompare(r, strings.NewReader(`
# HELP stayput_controller_persistent_pod_states PersistentPodStates by problem: none, Conflict (another one for the same target is in effect), Degraded (nothing or less than requested is recorded). Leader only.
# TYPE stayput_controller_persistent_pod_states gauge
stayput_controller_persistent_pod_states{condition="Conflict"} 2
stayput_controller_persistent_pod_states{condition="Degraded"} 1
stayput_controller_persistent_pod_states{condition="none"} 2
`))
	if err != nil {
		t.Error(err)
	}
}
