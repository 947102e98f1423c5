package home

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Foresee returns the decision for a pod: for a gated pod as it is, for any other as if it were created now and, if it
// has a node, had just ended there. The second result is the node that keeps its addresses, empty if none does. kept
// are the RetainedIPs of the pod's identity, state is its PersistentPodState (nil if it has none), all are the
// cluster's nodes.
func Foresee(now time.Time, pod *corev1.Pod, kept []*stayputv1alpha1.RetainedIP,
	state *kruisev1alpha1.PersistentPodState, all []corev1.Node) (Decision, string) {
	pod = pod.DeepCopy()
	last := pod.Spec.NodeName
	if !Gated(pod) {
		pod.CreationTimestamp, pod.DeletionTimestamp, pod.Spec.NodeName = metav1.NewTime(now), nil, ""
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}
	}
	s := Situation{Now: now, Pod: pod, Nodes: nodeList(all)}
	if !LastGate(pod) {
		s.Since = now // at the earliest
	}
	if Annotated(pod.Annotations) {
		kept = slices.DeleteFunc(slices.Clone(kept), func(r *stayputv1alpha1.RetainedIP) bool {
			return !Scheduled(r) && r.Spec.NodeName != last
		})
		s.Address = AddressIn(newestOf(kept, last, now), pod)
	}
	if state != nil {
		s.Record = RecordIn(state, pod.Name)
	}
	return Decide(s), s.Address.Node
}

// nodeList is Nodes over a plain list.
type nodeList []corev1.Node

func (l nodeList) Node(name string) *corev1.Node {
	if i := slices.IndexFunc(l, func(n corev1.Node) bool { return n.Name == name }); i >= 0 {
		return &l[i]
	}
	return nil
}

func (l nodeList) Labelled(want map[string]string) (all []*corev1.Node) {
	for i := range l {
		if hasLabels(&l[i], want) {
			all = append(all, &l[i])
		}
	}
	return all
}
