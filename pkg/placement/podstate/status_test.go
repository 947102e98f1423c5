package podstate

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

func object(name string, age time.Duration) kruisev1alpha1.PersistentPodState {
	return kruisev1alpha1.PersistentPodState{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Generation: 3,
			CreationTimestamp: metav1.NewTime(time.Unix(1000, 0).Add(-age))},
		Spec: kruisev1alpha1.PersistentPodStateSpec{
			TargetReference:             kruisev1alpha1.TargetReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web"},
			PreferredPersistentTopology: byHostname.PreferredPersistentTopology,
		},
	}
}

func TestConditionsSayWhatIsWrongWhileItIsSoAndThatItIsNotAnyMore(t *testing.T) {
	s := object("web", 0)
	s.Status.Conditions = []metav1.Condition{{Type: "Somebody's", Status: metav1.ConditionTrue, Reason: "R"}}
	is := func(kind string, want metav1.ConditionStatus, reason string, at time.Time) {
		t.Helper()
		c := meta.FindStatusCondition(s.Status.Conditions, kind)
		if want == "" {
			if c != nil {
				t.Errorf("%s: %v, want none", kind, c)
			}
			return
		}
		if c == nil || c.Status != want || c.Reason != reason || !c.LastTransitionTime.Equal(&metav1.Time{Time: at}) ||
			c.ObservedGeneration != 3 {
			t.Errorf("%s: %+v, want %s because of %s since %s", kind, c, want, reason, at)
		}
	}
	now := func(i int) time.Time { return time.Unix(int64(2000+i), 0) }

	s.Status = statusOf(&s, verdict{of: web(1), recorded: finding{reasonPodsNotReady, ""}}, now(0))
	is(conditionRecorded, metav1.ConditionFalse, reasonPodsNotReady, now(0))
	is(conditionDegraded, "", "", now(0))
	is(conditionConflict, "", "", now(0))
	is("Somebody's", "", "", now(0)) // is not ours to apply

	s.Status = statusOf(&s, verdict{of: web(1), degraded: finding{reasonTooManyPods, "many"}}, now(1))
	is(conditionRecorded, metav1.ConditionTrue, reasonAllRecorded, now(1))
	is(conditionDegraded, metav1.ConditionTrue, reasonTooManyPods, now(1))

	s.Status = statusOf(&s, verdict{of: web(1), degraded: finding{reasonTooManyPods, "more"}}, now(2))
	is(conditionDegraded, metav1.ConditionTrue, reasonTooManyPods, now(1)) // since its status changed

	s.Status = statusOf(&s, verdict{degraded: finding{reasonPermissionMissing, ""}}, now(3))
	is(conditionRecorded, metav1.ConditionTrue, reasonAllRecorded, now(1)) // not known to be otherwise
	is(conditionDegraded, metav1.ConditionTrue, reasonPermissionMissing, now(1))

	s.Status = statusOf(&s, verdict{conflict: "other"}, now(4))
	is(conditionConflict, metav1.ConditionTrue, reasonOlderObject, now(4))
	is(conditionDegraded, metav1.ConditionFalse, reasonAsExpected, now(4))
	is(conditionRecorded, "", "", now(4))

	s.Status = statusOf(&s, verdict{of: web(1)}, now(5))
	is(conditionConflict, metav1.ConditionFalse, reasonObeyed, now(5))
}

func TestAnObjectIsWrittenAtMostOnceASecond(t *testing.T) {
	var p pace
	ref, now := web(1).Ref, time.Unix(1000, 0)
	if left := p.left(ref, now); left != 0 {
		t.Errorf("before the first write: %s", left)
	}
	p.wrote(ref, 5, now)
	if left := p.left(ref, now.Add(300*time.Millisecond)); left != 700*time.Millisecond {
		t.Errorf("0.3 s after a write: %s", left)
	}
	if left := p.left(home.Ref{Name: "other"}, now); left != 0 {
		t.Errorf("for another workload: %s", left)
	}
	p.wrote(home.Ref{Name: "big"}, 3000, now)
	if left := p.left(home.Ref{Name: "big"}, now); left != 4*time.Second {
		t.Errorf("after a write of 3,000 records: %s", left)
	}
	p.left(home.Ref{Name: "big"}, now.Add(time.Minute))
	if left := p.left(ref, now.Add(time.Second)); left != 0 || len(p.next) != 0 {
		t.Errorf("1 s after a write: %s, and %d are remembered", left, len(p.next))
	}
}
