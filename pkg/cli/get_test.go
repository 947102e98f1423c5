package cli

import (
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/cli-runtime/pkg/printers"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// aRetainedIP is of pod web-2 of StatefulSet web, kept until five minutes past noon.
func aRetainedIP(change ...func(*stayputv1alpha1.RetainedIP)) *stayputv1alpha1.RetainedIP {
	r := &stayputv1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-2.node-1", UID: "u", ResourceVersion: "7"},
		Spec: stayputv1alpha1.RetainedIPSpec{
			NodeName: "node-1", PodName: "web-2", Scheduled: "pod/web-2", Retention: "10m", WhenScaled: "Retain", WhenDeleted: "Retain",
			Workload: &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "w"},
		},
		Status: stayputv1alpha1.RetainedIPStatus{
			Phase: stayputv1alpha1.PhaseRetained, IPs: []string{"10.1.0.9"}, PodUID: "p",
			Since: &metav1.Time{Time: noon.Add(-5 * time.Minute)}, Expires: &metav1.Time{Time: noon.Add(5 * time.Minute)},
			Addresses: []stayputv1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0", IPs: []string{"10.1.0.9"}}},
		},
	}
	for _, f := range change {
		f(r)
	}
	return r
}

func isBound(r *stayputv1alpha1.RetainedIP) {
	r.Status.Phase, r.Status.Expires = stayputv1alpha1.PhaseBound, nil
}

func whileOwned(r *stayputv1alpha1.RetainedIP) {
	r.Spec.Retention, r.Spec.WhenScaled, r.Spec.WhenDeleted = "while-owned", "Release", "Release"
	r.Status.Expires = nil
}

func retainedWhenScaled(r *stayputv1alpha1.RetainedIP) { r.Spec.WhenScaled = "Retain" }

// aSet is StatefulSet web.
func aSet(spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apps/v1", "kind": "StatefulSet",
		"metadata": map[string]any{"name": "web", "namespace": "default", "uid": "w"}, "spec": spec,
	}}
}

func TestTheReasonIsInWords(t *testing.T) {
	three, one := workloads{"w": aSet(map[string]any{"replicas": int64(3)})},
		workloads{"w": aSet(map[string]any{"replicas": int64(1)})}
	for _, test := range []struct {
		r    *stayputv1alpha1.RetainedIP
		all  workloads
		want string
	}{
		{aRetainedIP(), three, "10m after the pod stopped"},
		{aRetainedIP(isBound), three, "10m after the pod stops"},
		{aRetainedIP(whileOwned), three, "while owned by StatefulSet web, ordinal 2 wanted"},
		{aRetainedIP(whileOwned), one, "while owned by StatefulSet web, ordinal 2 not wanted"},
		{
			aRetainedIP(whileOwned, retainedWhenScaled), one,
			"while owned by StatefulSet web, ordinal 2 not wanted, when-scaled is Retain",
		},
		{
			aRetainedIP(whileOwned), workloads{"w": aSet(map[string]any{"replicas": int64(2), "reserveOrdinals": []any{"0-1"}})},
			"while owned by StatefulSet web, ordinal 2 wanted",
		},
		{
			aRetainedIP(whileOwned), workloads{"w": aSet(map[string]any{"reserveOrdinals": []any{"x"}})},
			"while owned by StatefulSet web",
		},
		{aRetainedIP(whileOwned), workloads{"w": nil}, "while owned by StatefulSet web, which is deleted"},
		{aRetainedIP(whileOwned), workloads{}, "while owned by StatefulSet web"},
		{
			aRetainedIP(whileOwned, func(r *stayputv1alpha1.RetainedIP) { r.Spec.Workload = nil }), nil,
			"while owned by a workload, not known yet",
		},
		{aRetainedIP(func(r *stayputv1alpha1.RetainedIP) { r.Spec.Release = stayputv1alpha1.ReleaseNow }), three, "being released"},
	} {
		if got := keptOf(test.r).why(test.all); got != test.want {
			t.Errorf("%+v: %q, expected %q", test.r.Spec, got, test.want)
		}
	}
}

func TestOrdinalsAreWantedByTheirWorkload(t *testing.T) {
	for _, test := range []struct {
		spec          map[string]any
		pod           string
		wanted, known bool
	}{
		{map[string]any{"replicas": int64(3)}, "web-2", true, true},
		{map[string]any{"replicas": int64(2)}, "web-2", false, true},
		{map[string]any{}, "web-0", true, true},
		{map[string]any{}, "web-1", false, true},
		{map[string]any{"replicas": int64(1), "ordinals": map[string]any{"start": int64(5)}}, "web-5", true, true},
		{map[string]any{"replicas": int64(1), "ordinals": map[string]any{"start": int64(5)}}, "web-0", false, true},
		{map[string]any{"replicas": int64(2), "reserveOrdinals": []any{int64(0)}}, "web-2", true, true},
		{map[string]any{"replicas": int64(2), "reserveOrdinals": []any{int64(0)}}, "web-0", false, true},
		{map[string]any{"replicas": int64(2), "reserveOrdinals": []any{"0"}}, "web-2", true, true},
		{map[string]any{"replicas": int64(2), "reserveOrdinals": []any{"0-3"}}, "web-0", false, true},
		{map[string]any{"replicas": int64(2), "reserveOrdinals": []any{"0-3"}}, "web-5", true, true},
		{map[string]any{"replicas": int64(2), "reserveOrdinals": []any{"many"}}, "web-0", false, false},
		{map[string]any{"replicas": int64(2)}, "web-01", false, false},
		{map[string]any{"replicas": int64(2)}, "other-0", false, false},
		{map[string]any{"replicas": int64(2)}, "web", false, false},
	} {
		if wanted, known := wants(aSet(test.spec), test.pod); wanted != test.wanted || known != test.known {
			t.Errorf("%v wants %s: %v, known %v", test.spec, test.pod, wanted, known)
		}
	}
}

const theTable = `NAMESPACE   POD     IP             NODE     PHASE       UNTIL                  LEFT     WHY                                     NETWORK   IDENTITY   WORKLOAD          POD UID
default     web-2   10.1.0.9       node-1   Retained    2026-01-02T12:05:00Z   5m       10m after the pod stopped               pods      <none>     StatefulSet/web   p
default     web-2   10.1.0.9       node-1   Bound       <none>                 <none>   10m after the pod stops                 pods      <none>     StatefulSet/web   p
default     web-2   10.6.168.101   <none>   Allocated   <none>                 <none>   of pool blue, 10m after the pod stops   <none>    <none>     StatefulSet/web   next
`

func TestTheTableHasAColumnForEachQuestion(t *testing.T) {
	var b strings.Builder
	kept := []*keptIP{keptOf(aRetainedIP()), keptOf(aRetainedIP(isBound)), keptOf(aPodIP(podIPGiven))}
	if err := printTable(&b, tableOf(kept, nil, noon), printers.PrintOptions{WithNamespace: true, Wide: true}); err != nil {
		t.Fatal(err)
	}
	if b.String() != theTable {
		t.Errorf("printed is\n%s", b.String())
	}
}

func TestWhatIsNamedIsListedInTheOrderOfTheNames(t *testing.T) {
	all := []*keptIP{keptOf(aRetainedIP()), keptOf(aPodIP()),
		keptOf(aPodIP(func(p *stayputv1alpha1.PodIP) { p.Name, p.Spec.PodName = "10.6.168.102", "web-3" }))}
	picked, missing := pick(all, []string{"web-3", "web-7", "web-2.node-1", "web-2"})
	if !slices.Equal(picked, []*keptIP{all[2], all[0], all[1]}) || !slices.Equal(missing, []string{"web-7"}) {
		t.Errorf("picked are %+v, and %q are missing", picked, missing)
	}
	if picked, _ := pick(all, nil); len(picked) != len(all) {
		t.Errorf("without names picked are %+v", picked)
	}
}

func TestPodsAreSortedByTheirOrdinals(t *testing.T) {
	if comparePods("web-2", "web-10") >= 0 || comparePods("db-9", "web-0") >= 0 || comparePods("a", "b") >= 0 {
		t.Error("web-2, web-10 or db-9, web-0 or a, b are in another order")
	}
}

func TestThatNothingIsKeptIsSaidOfWhatWasSeen(t *testing.T) {
	for want, got := range map[string]string{
		"No addresses are kept in namespace shop.":    noneKept("shop", true),
		"No addresses are kept in any namespace.":     noneKept("", true),
		"No node keeps an address in namespace shop.": noneKept("shop", false),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestADurationHasNoZeros(t *testing.T) {
	for text, want := range map[string]string{"10m0s": "10m", "1h0m0s": "1h", "1h30m0s": "1h30m", "1h0m5s": "1h0m5s",
		"90s": "90s", "10s": "10s", "10m": "10m", "0s": "0s", "while-owned": "while-owned", "": ""} {
		if got := shortDuration(text); got != want {
			t.Errorf("%q is written %q, want %q", text, got, want)
		}
	}
}
