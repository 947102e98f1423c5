package main

import (
	"encoding/json"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

func TestStoredObjectsReadBackUnchanged(t *testing.T) {
	s := (&world{}).newStore()
	pod := plainPod("ns", "web-0", asked)
	pod.ResourceVersion = "17"
	set := lab.Workload{Name: "web", Replicas: 3, Annotations: asked}.StatefulSet("ns")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"a": "b"}}}
	ip := &stayputv1alpha1.RetainedIP{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web-0.node",
		ResourceVersion: "17"}, Status: retained("10.0.0.1")}
	for _, c := range []struct {
		object client.Object
		read   runtime.Object
		key    string
	}{
		{pod, &corev1.Pod{}, "/registry/pods/ns/web-0"},
		{set, &appsv1.StatefulSet{}, "/registry/statefulsets/ns/web"},
		{node, &corev1.Node{}, "/registry/minions/node"},
	} {
		p, err := s.pair(c.object)
		if err != nil {
			t.Fatal(err)
		}
		if string(p.Key) != c.key {
			t.Errorf("key %s, want %s", p.Key, c.key)
		}
		read, kind, err := serializer.NewCodecFactory(scheme).UniversalDeserializer().Decode(p.Value, nil, c.read)
		if err != nil {
			t.Fatal(err)
		}
		read.GetObjectKind().SetGroupVersionKind(c.object.GetObjectKind().GroupVersionKind())
		if !equality.Semantic.DeepEqual(read, c.object) {
			t.Errorf("%v: read %v, want %v", kind, read, c.object)
		}
		if c.object.GetResourceVersion() != "" {
			t.Errorf("%v: stored with a resource version", kind)
		}
	}
	p, err := s.pair(ip)
	if err != nil {
		t.Fatal(err)
	}
	var read struct {
		APIVersion, Kind string
		Metadata         struct{ Name, ResourceVersion string }
	}
	if err := json.Unmarshal(p.Value, &read); err != nil {
		t.Fatal(err)
	}
	if read.APIVersion != "stayput.io/v1alpha1" || read.Kind != "RetainedIP" || read.Metadata.Name != ip.Name ||
		read.Metadata.ResourceVersion != "" {
		t.Errorf("stored as %s", p.Value)
	}
	if string(p.Key) != "/registry/stayput.io/retainedips/ns/web-0.node" {
		t.Errorf("key %s", p.Key)
	}
}
