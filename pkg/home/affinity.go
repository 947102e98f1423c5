package home

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Affinity is the node affinity that brings a pod home. The zero value asks for nothing.
type Affinity struct {
	Required  []corev1.NodeSelectorRequirement // of node labels
	Node      string                           // required by name
	Without   []string                         // nodes by name that are ruled out
	Preferred []corev1.PreferredSchedulingTerm
}

// Requires reports whether a pod with this affinity can start at its home only.
func (a Affinity) Requires() bool { return a.Node != "" || len(a.Required) > 0 }

// Empty reports whether there is nothing to merge.
func (a Affinity) Empty() bool { return !a.narrows() && len(a.Preferred) == 0 }

// narrows reports whether there is a node on which a pod could do without this affinity, and cannot start with it.
func (a Affinity) narrows() bool { return a.Requires() || len(a.Without) > 0 }

// And returns what asks for both.
func (a Affinity) And(b Affinity) Affinity {
	return Affinity{Required: slices.Concat(a.Required, b.Required), Node: cmp.Or(a.Node, b.Node),
		Without: slices.Concat(a.Without, b.Without), Preferred: slices.Concat(a.Preferred, b.Preferred)}
}

// In reports whether a pod has all of this affinity, so that [Affinity.Merge] would add nothing.
func (a Affinity) In(pod *corev1.Pod) bool {
	if a.Empty() {
		return true
	}
	own := NodeAffinityOf(pod)
	return own != nil && equality.Semantic.DeepEqual(own, a.Merge(own))
}

// NodeAffinityOf returns a pod's own node affinity, nil if it has none.
func NodeAffinityOf(pod *corev1.Pod) *corev1.NodeAffinity {
	if pod.Spec.Affinity == nil {
		return nil
	}
	return pod.Spec.Affinity.NodeAffinity
}

// Merge returns a pod's own node affinity (nil if it has none) with this one added. own is left alone, nothing of it is
// lost, and merging again adds nothing: a pod whose gate could not be removed is merged twice.
//
// The API server accepts that each required term of a gated pod becomes narrower, but no further term (KEP-3838).
// Terms are ORed, so every term gets the requirements. A term without requirements matches no node and would begin to
// match if it got one: it stays as it is.
func (a Affinity) Merge(own *corev1.NodeAffinity) *corev1.NodeAffinity {
	merged := own.DeepCopy()
	if merged == nil {
		merged = &corev1.NodeAffinity{}
	}
	if a.narrows() {
		if merged.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			merged.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{}
		}
		required := merged.RequiredDuringSchedulingIgnoredDuringExecution
		if len(required.NodeSelectorTerms) == 0 {
			required.NodeSelectorTerms = []corev1.NodeSelectorTerm{{}}
			a.narrow(&required.NodeSelectorTerms[0])
		}
		for i := range required.NodeSelectorTerms {
			if t := &required.NodeSelectorTerms[i]; len(t.MatchExpressions)+len(t.MatchFields) > 0 {
				a.narrow(t)
			}
		}
	}
	preferred := &merged.PreferredDuringSchedulingIgnoredDuringExecution
	for _, term := range a.Preferred {
		there := slices.ContainsFunc(*preferred, func(t corev1.PreferredSchedulingTerm) bool {
			return t.Weight == term.Weight &&
				sameRequirements(t.Preference.MatchFields, term.Preference.MatchFields) &&
				sameRequirements(t.Preference.MatchExpressions, term.Preference.MatchExpressions)
		})
		if !there {
			*preferred = append(*preferred, term)
		}
	}
	return merged
}

// narrow ANDs the requirements into a term.
func (a Affinity) narrow(t *corev1.NodeSelectorTerm) {
	if a.Node != "" {
		t.MatchFields = and(t.MatchFields, byName(corev1.NodeSelectorOpIn, a.Node))
	}
	for _, node := range a.Without {
		t.MatchFields = and(t.MatchFields, byName(corev1.NodeSelectorOpNotIn, node))
	}
	for _, r := range a.Required {
		t.MatchExpressions = and(t.MatchExpressions, r)
	}
}

// Unpinned returns the required terms of a pod without what the controller added to them as it pinned the pod to a
// home, as [stayputv1alpha1.AnnotationPinned] says. Of a copy of the pod the managed fields do not tell. A requirement
// that the pod itself had as well is taken for ours. A term that has nothing else was ours as a whole.
func Unpinned(terms []corev1.NodeSelectorTerm, pinned string) (own []corev1.NodeSelectorTerm) {
	listed := func(prefix, separator, item string) bool {
		items, ok := strings.CutPrefix(pinned, prefix)
		return ok && slices.Contains(strings.Split(items, separator), item)
	}
	for _, t := range terms {
		t.MatchFields = slices.DeleteFunc(slices.Clone(t.MatchFields), func(r corev1.NodeSelectorRequirement) bool {
			return len(r.Values) == 1 && (r.Operator == corev1.NodeSelectorOpIn && pinned == NodeHome(r.Values[0]) ||
				r.Operator == corev1.NodeSelectorOpNotIn && listed(nodesBut, ", ", r.Values[0]))
		})
		t.MatchExpressions = slices.DeleteFunc(slices.Clone(t.MatchExpressions), func(r corev1.NodeSelectorRequirement) bool {
			return r.Operator == corev1.NodeSelectorOpIn && len(r.Values) == 1 && listed(nodesWith, ",", r.Key+"="+r.Values[0])
		})
		if len(t.MatchFields)+len(t.MatchExpressions) > 0 {
			own = append(own, t)
		}
	}
	return own
}

// byName requires one node, or rules it out, regardless of its labels: such a requirement has one value. If a node is
// required, the scheduler filters this one alone, however many there are.
func byName(operator corev1.NodeSelectorOperator, node string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: operator, Values: []string{node}}
}

// KeptFrom reports whether a pod rules a node out by its name, in each required term.
func KeptFrom(pod *corev1.Pod, node string) bool {
	own := NodeAffinityOf(pod)
	if own == nil || own.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return false
	}
	terms := own.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	return len(terms) > 0 && !slices.ContainsFunc(terms, func(t corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(t.MatchFields, func(r corev1.NodeSelectorRequirement) bool {
			return sameRequirement(r, byName(corev1.NodeSelectorOpNotIn, node))
		})
	})
}

func and(all []corev1.NodeSelectorRequirement, r corev1.NodeSelectorRequirement) []corev1.NodeSelectorRequirement {
	if slices.ContainsFunc(all, func(o corev1.NodeSelectorRequirement) bool { return sameRequirement(o, r) }) {
		return all
	}
	return append(all, r)
}

func sameRequirement(a, b corev1.NodeSelectorRequirement) bool {
	return a.Key == b.Key && a.Operator == b.Operator && slices.Equal(a.Values, b.Values)
}

func sameRequirements(a, b []corev1.NodeSelectorRequirement) bool {
	return slices.EqualFunc(a, b, sameRequirement)
}
