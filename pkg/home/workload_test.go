package home

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	statefulSet         = appsv1.SchemeGroupVersion.WithKind("StatefulSet")
	advancedStatefulSet = schema.GroupVersionKind{Group: "apps.kruise.io", Version: "v1beta1", Kind: "StatefulSet"}
)

// wantedOf are the ordinals below 20 that a workload wants.
func wantedOf(w *Workload) []int64 {
	var all []int64
	for o := range int64(20) {
		if w.wantsOrdinal(o) {
			all = append(all, o)
		}
	}
	return all
}

func TestAWorkloadWantsAsManyOrdinalsAsReplicasFromItsStartOn(t *testing.T) {
	two, five := int32(2), int32(5)
	for name, c := range map[string]struct {
		spec appsv1.StatefulSetSpec
		want []int64
	}{
		"no replicas given": {appsv1.StatefulSetSpec{}, []int64{0}},
		"two":               {appsv1.StatefulSetSpec{Replicas: &two}, []int64{0, 1}},
		"from five on": {appsv1.StatefulSetSpec{Replicas: &two, Ordinals: &appsv1.StatefulSetOrdinals{Start: five}},
			[]int64{5, 6}},
		"none": {appsv1.StatefulSetSpec{Replicas: new(int32)}, nil},
	} {
		w, err := WorkloadOf(statefulSet, &appsv1.StatefulSet{Spec: c.spec})
		if err != nil || !slices.Equal(wantedOf(w), c.want) {
			t.Errorf("%s: %v, %v, want %v", name, wantedOf(w), err, c.want)
		}
	}
}

func TestAnAdvancedStatefulSetSkipsReservedOrdinals(t *testing.T) {
	for name, c := range map[string]struct {
		start    int64
		reserved []any
		want     []int64
	}{
		"none":                     {0, nil, []int64{0, 1, 2}},
		"one":                      {0, []any{int64(1)}, []int64{0, 2, 3}},
		"the first, as a string":   {0, []any{"0"}, []int64{1, 2, 3}},
		"a range":                  {0, []any{"1-3"}, []int64{0, 4, 5}},
		"ranges that overlap":      {0, []any{"2-4", int64(3), "1 - 2"}, []int64{0, 5, 6}},
		"below the start":          {5, []any{"0-3"}, []int64{5, 6, 7}},
		"across the start":         {5, []any{"3-6"}, []int64{7, 8, 9}},
		"beyond all that is there": {0, []any{"10-2000000000"}, []int64{0, 1, 2}},
	} {
		spec := map[string]any{"replicas": int64(3), "ordinals": map[string]any{"start": c.start}}
		if c.reserved != nil {
			spec["reserveOrdinals"] = c.reserved
		}
		w, err := WorkloadOf(advancedStatefulSet, &unstructured.Unstructured{Object: map[string]any{"spec": spec}})
		if err != nil || !slices.Equal(wantedOf(w), c.want) {
			t.Errorf("%s: %v, %v, want %v", name, wantedOf(w), err, c.want)
		}
	}
	_, err := parseReserved([]any{"many"})
	if err == nil {
		t.Error("a reserved ordinal that is no number is no error: not to know it is no reason to drop anything")
	}
}

func TestOrdinalsAreReadFromNamesAsStatefulSetWritesThem(t *testing.T) {
	for pod, want := range map[string]int64{"web-0": 0, "web-12": 12, "web-01": -1, "web--1": -1, "web-": -1, "web": -1,
		"web-x": -1, "other-1": -1, "web-a-1": -1} {
		workload, o, ok := SplitOrdinal(pod)
		if ok = ok && workload == "web"; ok != (want >= 0) || ok && o != want {
			t.Errorf("%s: %s, %d, %v, want %d", pod, workload, o, ok, want)
		}
	}
}

func TestTheControllerOfAPodIsNamedByGroupWhateverTheVersion(t *testing.T) {
	yes := true
	for version, group := range map[string]string{"apps/v1": "apps", "apps/v1beta2": "apps", "v1": "",
		"game.example.com/v1": "game.example.com"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "ConfigMap", Name: "not-the-controller"},
			{APIVersion: version, Kind: "Set", Name: "web", UID: "1", Controller: &yes},
		}}}
		ref, uid, ok := OwnerOf(pod)
		if want := (Ref{group, "Set", "ns", "web"}); ref != want || uid != "1" || !ok {
			t.Errorf("%s: %v, %s, %v, want %v", version, ref, uid, ok, want)
		}
	}
	if ref, _, ok := OwnerOf(&corev1.Pod{}); ok {
		t.Errorf("a pod without controller has %v", ref)
	}
}
