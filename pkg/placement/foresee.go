package placement

import (
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Prospect is what the controller would decide for a pod if it were created now.
type Prospect struct {
	// Outcome is free, home, wait or elsewhere.
	Outcome string
	// Node is the node that keeps the pod's addresses; empty: none does.
	Node string
	// Home is what the pod is drawn to, waits for or gives up, in words; Reason continues the sentence "home ...".
	Home, Reason string
	// Required says that the pod can start at its home only; else home is the scheduler's preference.
	Required bool
	// Wait is how long it would wait at most; zero: it would not, or without an end.
	Wait  time.Duration
	Notes []string
}

// Foresee decides as the controller does: for a gated pod as it is, for any other as if it were created now, after
// the pod on its node if it has one. kept are the RetainedIPs of the pod's identity, state its PersistentPodState, nil
// where there is none, and all the nodes of the cluster.
func Foresee(now time.Time, pod *corev1.Pod, kept []*stayputv1alpha1.RetainedIP, state *kruisev1alpha1.PersistentPodState, all []corev1.Node) Prospect {
	pod = pod.DeepCopy()
	last := pod.Spec.NodeName
	if !gated(pod) {
		pod.CreationTimestamp, pod.DeletionTimestamp, pod.Spec.NodeName = metav1.NewTime(now), nil, ""
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}
	}
	s := situation{now: now, pod: pod, nodes: listedNodes(all)}
	if annotated(pod.Annotations) {
		s.keptBy(newest(kept, last, now))
	}
	if state != nil {
		if of, ok := state.Status.PodStates[pod.Name]; ok {
			s.record = &record{spec: state.Spec, state: of}
			s.record.object.Namespace, s.record.object.Name = state.Namespace, state.Name
		}
	}
	d := decide(s)
	return Prospect{
		Outcome: string(d.outcome), Node: s.home, Home: d.home, Reason: d.reason, Required: d.pull.requires(), Wait: d.retry, Notes: d.notes,
	}
}

// listedNodes are nodes as a list has them.
type listedNodes []corev1.Node

func (l listedNodes) node(name string) *corev1.Node {
	if i := slices.IndexFunc(l, func(n corev1.Node) bool { return n.Name == name }); i >= 0 {
		return &l[i]
	}
	return nil
}

func (l listedNodes) labelled(want map[string]string) (all []*corev1.Node) {
	for i := range l {
		if labels.SelectorFromSet(maps.Clone(want)).Matches(labels.Set(l[i].Labels)) {
			all = append(all, &l[i])
		}
	}
	return all
}
