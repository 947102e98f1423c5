package placement

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unsafe"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/must"
)

func TestTheCacheKeepsOfARetainedIPWhatTheRulesAskForAndEqualTextsOnce(t *testing.T) {
	strip := retainedIPStripper()
	stripped := func() *stayputv1alpha1.RetainedIP {
		ip := owned(stayputv1alpha1.PolicyRelease)
		ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web",
			UID: string([]byte("of-web"))}
		ip.Spec.PodName = string([]byte(ip.Spec.PodName))
		want := ip.DeepCopy()
		want.OwnerReferences = nil
		ip.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "stayput-agent"}}
		ip.Status.Addresses = []stayputv1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0", IPs: ip.Status.IPs}}
		is, err := strip(ip)
		must.Do(t, err)
		if !equality.Semantic.DeepEqual(is, want) {
			t.Errorf("%+v, want\n%+v", is, want)
		}
		return is.(*stayputv1alpha1.RetainedIP)
	}
	a, b := stripped(), stripped()
	if unsafe.StringData(a.Spec.Workload.UID) != unsafe.StringData(b.Spec.Workload.UID) ||
		unsafe.StringData(a.Spec.PodName) != unsafe.StringData(a.Name) {
		t.Error("two hold the same text twice")
	}
}

// What the rules do not need is named here; all other fields are kept, those too that somebody adds.
func TestNoFieldOfOurOwnObjectsIsForgotten(t *testing.T) {
	var ip stayputv1alpha1.RetainedIP
	must.Fill(t, &ip.Spec, 1)
	must.Fill(t, &ip.Status, 1)
	want := ip.DeepCopy()
	want.Status.Addresses = nil
	_, err := retainedIPStripper()(&ip)
	must.Do(t, err)
	if !equality.Semantic.DeepEqual(ip.Spec, want.Spec) || !equality.Semantic.DeepEqual(ip.Status, want.Status) {
		t.Errorf("%+v, want\n%+v", ip, want)
	}
	var state kruisev1alpha1.PersistentPodState
	must.Fill(t, &state.Spec, 1)
	must.Fill(t, &state.Status, 1)
	kept := state.DeepCopy()
	_, err = stripState(&state)
	must.Do(t, err)
	if !equality.Semantic.DeepEqual(state.Spec, kept.Spec) || !equality.Semantic.DeepEqual(state.Status, kept.Status) {
		t.Errorf("%+v, want\n%+v", state, kept)
	}
}

// long has so many bytes that an API server takes no more of one object.
func long() string { return strings.Repeat("x", 1<<20) }

func many(value string, keys ...string) map[string]string {
	all := map[string]string{}
	for _, key := range keys {
		all[key] = value
	}
	for i := range 1000 {
		all[fmt.Sprintf("example.com/%d", i)] = strings.Repeat("x", 1000)
	}
	return all
}

// What is kept of an object is bounded, whatever its author writes: as many bytes as its text has.
func TestTheCacheKeepsLittleOfTheLongestObjects(t *testing.T) {
	meta := func(keys ...string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "1", Annotations: many(long(), keys...),
			Labels: many("x"), Finalizers: []string{long()}, OwnerReferences: []metav1.OwnerReference{{Name: long()}},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: long()}}}
	}
	template := meta(templateAnnotations...)
	var keys []string
	term := kruisev1alpha1.PreferredTopologyTerm{Weight: 1}
	var preferred []kruisev1alpha1.PreferredTopologyTerm
	var annotations []kruisev1alpha1.PersistentPodAnnotation
	for i := range 64 {
		keys = append(keys, fmt.Sprintf("%s%d", strings.Repeat("k", 300), i), long()[:4096])
		annotations = append(annotations, kruisev1alpha1.PersistentPodAnnotation{Key: keys[2*i]})
	}
	term.Preference.NodeTopologyKeys = keys
	for range 64 {
		preferred = append(preferred, term)
	}
	custom := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"replicas": int64(3),
		"template": map[string]any{"metadata": map[string]any{"annotations": func() map[string]any {
			all := map[string]any{}
			for key, value := range template.Annotations {
				all[key] = value
			}
			return all
		}()}, "spec": long()}, "reserveOrdinals": make([]any, 100_000)}}}
	custom.SetGroupVersionKind(schema.GroupVersionKind{Group: "apps.kruise.io", Version: "v1beta1", Kind: "StatefulSet"})
	custom.SetName("web")
	custom.SetAnnotations(many(long(), workloadAnnotations...))
	for name, c := range map[string]struct {
		object any
		strip  func(any) (any, error)
		most   int
	}{
		"a StatefulSet": {&appsv1.StatefulSet{ObjectMeta: meta(workloadAnnotations...), Spec: appsv1.StatefulSetSpec{
			ServiceName: long(), Selector: &metav1.LabelSelector{MatchLabels: many("x")},
			Template: corev1.PodTemplateSpec{ObjectMeta: template},
		}}, stripStatefulSet, 4 << 10},
		"metadata of a workload": {&metav1.PartialObjectMetadata{ObjectMeta: meta(workloadAnnotations...)}, stripRest,
			4 << 10},
		"an Advanced StatefulSet": {custom, stripRest, 4 << 10},
		"a PersistentPodState": {&kruisev1alpha1.PersistentPodState{ObjectMeta: meta(),
			Spec: kruisev1alpha1.PersistentPodStateSpec{
				TargetReference:             kruisev1alpha1.TargetReference{APIVersion: long(), Kind: long(), Name: long()},
				RequiredPersistentTopology:  &term.Preference,
				PreferredPersistentTopology: preferred, PersistentPodAnnotations: annotations,
			},
			Status: kruisev1alpha1.PersistentPodStateStatus{PodStates: map[string]kruisev1alpha1.PodState{
				"web-0": {NodeName: "node-1", Annotations: many(long(), "a")},
			}}}, stripRest, 80 << 10},
	} {
		is, err := c.strip(c.object)
		must.Do(t, err)
		text, err := json.Marshal(is)
		must.Do(t, err)
		if len(text) > c.most {
			t.Errorf("of %s %d bytes are kept, want %d", name, len(text), c.most)
		}
	}
	w, err := home.WorkloadOf(custom.GroupVersionKind(), custom)
	if err == nil {
		t.Errorf("of one that reserves too many ordinals it is known which pods it wants: %+v", w)
	}
}

func TestWhatTheRulesReadOfWorkloadsIsKept(t *testing.T) {
	const asks = kruisev1alpha1.AnnotationAutoGenerate
	custom := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apps.kruise.io/v1beta1", "kind": "StatefulSet",
		"metadata": map[string]any{"namespace": "default", "name": "web", "uid": "1", "resourceVersion": "7",
			"generation": int64(2), "annotations": map[string]any{asks: "true", "other": "x"}},
		"spec": map[string]any{"replicas": int64(3), "ordinals": map[string]any{"start": int64(1)},
			"reserveOrdinals": []any{int64(2)}, "serviceName": "web", "template": map[string]any{"metadata": map[string]any{
				"annotations": map[string]any{stayputv1alpha1.AnnotationHome: "Required", "other": "x"}}}},
	}}
	before, err := home.WorkloadOf(custom.GroupVersionKind(), custom.DeepCopy())
	must.Do(t, err)
	is, err := stripRest(custom)
	must.Do(t, err)
	after, err := home.WorkloadOf(custom.GroupVersionKind(), is.(*unstructured.Unstructured))
	must.Do(t, err)
	delete(before.Annotations, "other")
	delete(before.Template, "other")
	if !equality.Semantic.DeepEqual(fmt.Sprintf("%+v", before), fmt.Sprintf("%+v", after)) {
		t.Errorf("%+v\nwant %+v", after, before)
	}
	for _, pod := range []string{"web-0", "web-1", "web-2", "web-3", "web-4", "web-5"} {
		was, _ := before.Wants(pod)
		if now, _ := after.Wants(pod); now != was {
			t.Errorf("it wants %s: %t, want %t", pod, now, was)
		}
	}
	if o := is.(*unstructured.Unstructured); o.GetGeneration() != 2 || o.GetResourceVersion() != "7" || o.GetUID() != "1" {
		t.Errorf("%+v", o)
	}
}
