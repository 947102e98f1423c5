package placement

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// pull is what draws a pod to its home, in the words of node affinity. The zero value draws nowhere.
type pull struct {
	required  []corev1.NodeSelectorRequirement // of node labels
	node      string                           // required by name
	preferred []corev1.PreferredSchedulingTerm
}

func (p pull) requires() bool { return p.node != "" || len(p.required) > 0 }

func (p pull) empty() bool { return !p.requires() && len(p.preferred) == 0 }

// merge adds the pull to a pod's own node affinity, which is left alone: nil own is none. Nothing of the pod's
// own is lost, and merging again adds nothing: a pod whose gate could not be removed is merged twice.
//
// The API server accepts of a gated pod's required terms that each becomes narrower, not that one is added
// where there are some (KEP-3838); terms are ORed, so the pull has to be in each. A term without requirements
// matches no node and would begin to match if anything were added to it: it stays.
func (p pull) merge(own *corev1.NodeAffinity) *corev1.NodeAffinity {
	merged := own.DeepCopy()
	if merged == nil {
		merged = &corev1.NodeAffinity{}
	}
	if p.requires() {
		if merged.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			merged.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{}
		}
		required := merged.RequiredDuringSchedulingIgnoredDuringExecution
		if len(required.NodeSelectorTerms) == 0 {
			required.NodeSelectorTerms = []corev1.NodeSelectorTerm{{}}
			p.narrow(&required.NodeSelectorTerms[0])
		}
		for i := range required.NodeSelectorTerms {
			if t := &required.NodeSelectorTerms[i]; len(t.MatchExpressions)+len(t.MatchFields) > 0 {
				p.narrow(t)
			}
		}
	}
	for _, term := range p.preferred {
		if !slices.ContainsFunc(merged.PreferredDuringSchedulingIgnoredDuringExecution, func(t corev1.PreferredSchedulingTerm) bool {
			return t.Weight == term.Weight && sameRequirements(t.Preference.MatchExpressions, term.Preference.MatchExpressions) &&
				len(t.Preference.MatchFields) == 0
		}) {
			merged.PreferredDuringSchedulingIgnoredDuringExecution = append(merged.PreferredDuringSchedulingIgnoredDuringExecution, term)
		}
	}
	return merged
}

// narrow ANDs what the pull requires into a term.
func (p pull) narrow(t *corev1.NodeSelectorTerm) {
	if p.node != "" {
		t.MatchFields = and(t.MatchFields, byName(p.node))
	}
	for _, r := range p.required {
		t.MatchExpressions = and(t.MatchExpressions, r)
	}
}

// byName requires one node whatever its labels say. The scheduler then looks at this node alone, however many
// there are.
func byName(node string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}
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

// accepts says whether a pod's own node selector and required node affinity allow a node. Terms that cannot be
// parsed allow nothing, as in the scheduler.
func accepts(pod *corev1.Pod, node *corev1.Node) bool {
	ok, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	return ok && err == nil
}

// has says whether a node has all these labels.
func has(node *corev1.Node, want map[string]string) bool {
	return labels.SelectorFromSet(want).Matches(labels.Set(node.Labels))
}
