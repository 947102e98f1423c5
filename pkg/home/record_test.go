package home

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
)

func TestTheOldestObjectForATargetIsObeyedThenTheFirstByName(t *testing.T) {
	object := func(name string, age time.Duration) kruisev1alpha1.PersistentPodState {
		return kruisev1alpha1.PersistentPodState{ObjectMeta: metav1.ObjectMeta{Name: name,
			CreationTimestamp: metav1.NewTime(noon.Add(-age))}}
	}
	deleted := object("deleted", time.Hour)
	deleted.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	all := []kruisev1alpha1.PersistentPodState{object("young", 0), object("z", time.Minute), object("a", time.Minute),
		deleted}
	for range 2 {
		var names []string
		for _, s := range ByAge(all) {
			names = append(names, s.Name)
		}
		if want := []string{"a", "z", "young"}; !slices.Equal(names, want) {
			t.Errorf("the order is %v, want %v", names, want)
		}
		slices.Reverse(all)
	}
}
