// Package hometest makes the pods and nodes of tests.
package hometest

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Noon is when the tests play.
var Noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// Nodes are the nodes of a test.
type Nodes []*corev1.Node

// Node returns the node of that name, or nil.
func (n Nodes) Node(name string) *corev1.Node {
	for _, node := range n {
		if node.Name == name {
			return node
		}
	}
	return nil
}

// Labelled returns all nodes with these labels.
func (n Nodes) Labelled(want map[string]string) (all []*corev1.Node) {
	for _, node := range n {
		if labels.SelectorFromSet(want).Matches(labels.Set(node.Labels)) {
			all = append(all, node)
		}
	}
	return all
}

// Node makes a node that is Ready.
func Node(name, zone string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelTopologyZone: zone},
		},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, c := range change {
		c(n)
	}
	return n
}

// Cordoned cordons a node.
func Cordoned(n *corev1.Node) {
	n.Spec.Unschedulable = true
	n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{
		Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule,
	})
}

// Pod makes web-0, gated and annotated, created ten seconds before noon.
func Pod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web-0", UID: "new", CreationTimestamp: metav1.NewTime(Noon.Add(-10 * time.Second)),
			Annotations: map[string]string{stayputv1alpha1.AnnotationRetainIP: "10m"},
		},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

// Annotation annotates a pod.
func Annotation(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations[key] = value }
}

// Ungated takes the gates off a pod.
func Ungated(p *corev1.Pod) { p.Spec.SchedulingGates = nil }

// Pinned makes of a pod one that was pinned to node-1 when it was created, and for which the scheduler finds no room.
func Pinned(p *corev1.Pod) {
	Ungated(p)
	p.Annotations[stayputv1alpha1.AnnotationPinned] = "node node-1"
	p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
				{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{"node-1"}},
			}}},
		}}}
	at := p.CreationTimestamp
	p.ManagedFields = []metav1.ManagedFieldsEntry{{
		Manager: stayputv1alpha1.ControllerFieldManager, Operation: metav1.ManagedFieldsOperationUpdate, Time: &at,
		FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:stayput.io/pinned":{}}},` +
			`"f:spec":{"f:affinity":{"f:nodeAffinity":{"f:requiredDuringSchedulingIgnoredDuringExecution":{}}}}}`),
	}}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Reason: corev1.PodReasonUnschedulable}}
}

// Refused has the scheduler say why it finds no room for a pinned pod.
func Refused(message string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Conditions[0].Message = message }
}

// Copied makes of a pinned pod one whose template was copied from it, with all that it says.
func Copied(p *corev1.Pod) { p.ManagedFields[0].Manager = "kube-controller-manager" }

// RanOn makes of a pod its predecessor, which ran on a node.
func RanOn(node string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		Ungated(p)
		p.UID, p.Spec.NodeName, p.Status.PodIP = "old", node, "192.0.2.7"
	}
}
