package placement

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
)

func TestPodsAreGatedThatAPersistentPodStateIsForAndThatAreNotAnnotated(t *testing.T) {
	of := func(name, apiVersion, kind, target string) kruisev1alpha1.PersistentPodState {
		s := object(name, 0)
		s.Spec.TargetReference = kruisev1alpha1.TargetReference{APIVersion: apiVersion, Kind: kind, Name: target}
		return s
	}
	long := strings.Repeat("x", 250)
	all := []kruisev1alpha1.PersistentPodState{
		of("a", "apps/v1", "StatefulSet", "web"), of("b", "apps/v1", "StatefulSet", "web"), // in conflict: one key
		of("c", "apps/v1", "StatefulSet", "annotated"), of("d", "apps.kruise.io/v1beta1", "StatefulSet", "web"),
		of("e", "example.com/v1", "Game", "g"), of("f", "apps/v1", "StatefulSet", long),
	}
	keys := gateKeys(all, func(ref workloadRef) bool { return ref.name == "annotated" })
	want := []string{"Game.example.com.g", "StatefulSet.apps.kruise.io.web", "StatefulSet.apps.web"}
	if got := slices.Sorted(maps.Keys(keys)); !slices.Equal(got, want) {
		t.Errorf("the keys are %v, want %v", got, want)
	}
	if keys := gateKeys(all[2:3], func(workloadRef) bool { return true }); keys != nil {
		t.Errorf("the keys are %v, want none, so that the ConfigMap goes", keys)
	}
}

func TestWhatAConfigMapSaysIsNotBelievedForEver(t *testing.T) {
	g := &gating{}
	g.remember("ns", map[string]string{"k": ""})
	if known := g.said["ns"]; time.Until(known.until) <= 0 || time.Until(known.until) > gateEvery {
		t.Errorf("it is believed until %s", known.until)
	}
	g.forget("ns")
	if len(g.said) != 0 {
		t.Error("it is not forgotten")
	}
}
