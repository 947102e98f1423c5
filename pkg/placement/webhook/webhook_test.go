package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/test/must"
)

func aPod(change ...func(*corev1.Pod)) *corev1.Pod {
	controls := true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-0", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", Controller: &controls},
		}},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

// gates returns the gates of a pod as the API server has it after a handler's answer.
func gates(t *testing.T, of *corev1.Pod, handle admission.HandlerFunc) (names []string) {
	t.Helper()
	raw, err := json.Marshal(of)
	must.Do(t, err)
	is := handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Namespace: of.Namespace, Object: runtime.RawExtension{Raw: raw},
	}})
	if !is.Allowed {
		t.Fatalf("it refuses the pod: %+v", is.Result)
	}
	if len(is.Patches) > 0 {
		ops, err := json.Marshal(is.Patches)
		must.Do(t, err)
		patch, err := jsonpatch.DecodePatch(ops)
		must.Do(t, err)
		raw, err = patch.Apply(raw)
		must.Do(t, err)
	}
	var pod corev1.Pod
	must.Do(t, json.Unmarshal(raw, &pod))
	for _, g := range pod.Spec.SchedulingGates {
		names = append(names, g.Name)
	}
	return names
}

func TestAPodIsGatedOnceAndOnlyIfItCanBe(t *testing.T) {
	gated := func(names ...string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			for _, n := range names {
				p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: n})
			}
		}
	}
	for name, c := range map[string]struct {
		pod          *corev1.Pod
		uninstalling bool
		want         []string
	}{
		"a pod":                          {pod: aPod(), want: []string{v1alpha1.PlacementGate}},
		"one with the gate":              {pod: aPod(gated(v1alpha1.PlacementGate)), want: []string{v1alpha1.PlacementGate}},
		"one with somebody else's":       {pod: aPod(gated("a/b")), want: []string{"a/b", v1alpha1.PlacementGate}},
		"one with a node":                {pod: aPod(func(p *corev1.Pod) { p.Spec.NodeName = "node-1" })},
		"a pod during an uninstallation": {pod: aPod(), uninstalling: true},
	} {
		g := &gater{uninstalling: func() bool { return c.uninstalling }}
		if is := gates(t, c.pod, g.always); !slices.Equal(is, c.want) {
			t.Errorf("%s has the gates %q, want %q", name, is, c.want)
		}
	}
}

func TestAPodIsGatedIfItsWorkloadIsRecorded(t *testing.T) {
	list := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: gate.Workloads},
		Data:       map[string]string{gate.WorkloadsKey: "\nGame.example.com.web\nStatefulSet.apps.web\n"},
	}
	reader := fake.NewClientBuilder().WithObjects(list).Build()
	owned := func(change func(*metav1.OwnerReference)) *corev1.Pod {
		return aPod(func(p *corev1.Pod) { change(&p.OwnerReferences[0]) })
	}
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"recorded":                        {aPod(), true},
		"of another version of its group": {owned(func(o *metav1.OwnerReference) { o.APIVersion = "apps/v2" }), true},
		"of another name":                 {owned(func(o *metav1.OwnerReference) { o.Name = "we" }), false},
		"of another group":                {owned(func(o *metav1.OwnerReference) { o.APIVersion = "a.io/v1" }), false},
		"of the core group":               {owned(func(o *metav1.OwnerReference) { o.APIVersion = "v1" }), false},
		"not controlled":                  {owned(func(o *metav1.OwnerReference) { o.Controller = nil }), false},
		"of another namespace":            {aPod(func(p *corev1.Pod) { p.Namespace = "other" }), false},
	} {
		g := &gater{reader: reader, uninstalling: func() bool { return false }}
		if is := gates(t, c.pod, g.ifRecorded); (len(is) == 1) != c.want {
			t.Errorf("a pod %s has the gates %q", name, is)
		}
	}
}

// The API server then lets the pod in: its failurePolicy is Ignore.
func TestWhatCannotBeReadIsAnError(t *testing.T) {
	broken := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{Get: func(context.Context, client.WithWatch,
		client.ObjectKey, client.Object, ...client.GetOption) error {
		return errors.New("away")
	}}).Build()
	raw, err := json.Marshal(aPod())
	must.Do(t, err)
	g := &gater{reader: broken, uninstalling: func() bool { return false }}
	for body, code := range map[string]int32{string(raw): http.StatusInternalServerError, "{": http.StatusBadRequest} {
		is := g.ifRecorded(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Object: runtime.RawExtension{Raw: []byte(body)},
		}})
		if is.Allowed || is.Result.Code != code {
			t.Errorf("%.20s is answered by %+v, want %d", body, is.Result, code)
		}
	}
}
