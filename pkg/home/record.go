package home

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Record is what a PersistentPodState records of one pod.
type Record struct {
	Object types.NamespacedName
	Spec   kruisev1alpha1.PersistentPodStateSpec
	State  kruisev1alpha1.PodState
	// ByName says that the node itself is the home, whatever its labels say: the object was generated because a pod
	// template has stayput.io/home. That a node's kubernetes.io/hostname is its name, or its alone, nothing guarantees.
	ByName bool
}

// RecordIn returns what a PersistentPodState records of a pod, nil if that is nothing.
func RecordIn(s *kruisev1alpha1.PersistentPodState, pod string) *Record {
	state, ok := s.Status.PodStates[pod]
	if !ok {
		return nil
	}
	return &Record{types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s.Spec, state,
		s.Labels[stayputv1alpha1.LabelGenerated] == stayputv1alpha1.GeneratedByHome}
}

// unrecorded are the prefixes of annotations that a pod never passes on to its successor: by them a pod asks for its
// addresses or is told them, and what its predecessor was told may be another pod's by now.
var unrecorded = []string{"stayput.io/", "ipam.spidernet.io/", "io.kubernetes.cri/", "cni.projectcalico.org/"}

// Recordable reports whether a PersistentPodState may pass an annotation on to the successor of a pod.
func Recordable(key string) bool {
	return !slices.ContainsFunc(unrecorded, func(prefix string) bool { return strings.HasPrefix(key, prefix) })
}

// recordedMost is how much is recorded of the annotations of one pod, in bytes: every controller keeps all records.
const recordedMost = 4 << 10

// BoundRecorded returns the annotations with these keys that a PersistentPodState records of a pod, in this order, as
// long as there is room. It is nil if there are none.
func BoundRecorded(from map[string]string, keys []string) (all map[string]string) {
	left := recordedMost
	for _, key := range keys {
		value, ok := from[key]
		if size := len(key) + len(value); !ok || size > left {
			continue
		} else if left -= size; all == nil {
			all = map[string]string{}
		}
		all[key] = value
	}
	return all
}

// Annotations returns what the successor of a pod is given; also of what was recorded in a former version, or by
// another program.
func (r *Record) Annotations() map[string]string {
	if r == nil {
		return nil
	}
	all := maps.Clone(r.State.Annotations)
	maps.DeleteFunc(all, func(key, _ string) bool { return !Recordable(key) })
	return all
}

// TargetOf returns the workload that a PersistentPodState is for.
func TargetOf(s *kruisev1alpha1.PersistentPodState) Ref {
	t := s.Spec.TargetReference
	return RefOf(t.APIVersion, t.Kind, s.Namespace, t.Name)
}

// ByAge sorts the PersistentPodStates for one target: the first, which is the oldest, is obeyed. Those that are being
// deleted are left out.
func ByAge(all []kruisev1alpha1.PersistentPodState) []*kruisev1alpha1.PersistentPodState {
	var sorted []*kruisev1alpha1.PersistentPodState
	for i := range all {
		if all[i].DeletionTimestamp.IsZero() {
			sorted = append(sorted, &all[i])
		}
	}
	slices.SortFunc(sorted, func(a, b *kruisev1alpha1.PersistentPodState) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	return sorted
}

// affinity returns the node labels that a record requires, and the node affinity for all that it asks for. A label that
// is not in the record (none is from a number of pods on) has the value that the recorded node has now.
func (r *Record) affinity(nodes Nodes) (required map[string]string, a Affinity) {
	if r == nil || r.ByName {
		return nil, a
	}
	node := nodes.Node(r.State.NodeName)
	label := func(key string) (corev1.NodeSelectorRequirement, bool) {
		value, ok := r.State.NodeTopologyLabels[key]
		if !ok && node != nil {
			value, ok = node.Labels[key]
		}
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}, ok
	}
	if term := r.Spec.RequiredPersistentTopology; term != nil {
		for _, key := range term.Labels() {
			if req, ok := label(key); ok {
				if required == nil {
					required = map[string]string{}
				}
				required[key] = req.Values[0]
				a.Required = and(a.Required, req)
			}
		}
	}
	for _, term := range r.Spec.PreferredPersistentTopology {
		var preference corev1.NodeSelectorTerm
		for _, key := range term.Preference.Labels() {
			if req, ok := label(key); ok {
				preference.MatchExpressions = and(preference.MatchExpressions, req)
			}
		}
		if len(preference.MatchExpressions) > 0 { // an empty preference matches every node
			a.Preferred = append(a.Preferred, corev1.PreferredSchedulingTerm{Weight: term.Weight, Preference: preference})
		}
	}
	return required, a
}

// drawnTo returns the node that a record prefers by its name, perhaps among other labels, empty if there is none.
func (r *Record) drawnTo() string {
	if r == nil {
		return ""
	}
	for _, t := range r.Spec.PreferredPersistentTopology {
		if slices.Contains(t.Preference.Labels(), corev1.LabelHostname) {
			return r.State.NodeName
		}
	}
	return ""
}

// lost reports whether it is no longer known what a record requires: the record has no labels, and its node is gone.
func (r *Record) lost(nodes Nodes) bool {
	return r != nil && !r.ByName && r.Spec.RequiredPersistentTopology != nil && len(r.State.NodeTopologyLabels) == 0 &&
		nodes.Node(r.State.NodeName) == nil
}
