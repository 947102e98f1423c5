package home

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

func in(key string, values ...string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}
}

func TestMergingLosesNothingOfThePodsOwnAffinity(t *testing.T) {
	own := &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{in("disk", "ssd")}},
			{MatchFields: []corev1.NodeSelectorRequirement{in("metadata.name", "node-9")}},
			{}, // matches nothing, and must not begin to
		}},
		PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{
			{Weight: 1, Preference: corev1.NodeSelectorTerm{
				MatchExpressions: []corev1.NodeSelectorRequirement{in("rack", "r1")}}},
		},
	}
	before := own.DeepCopy()
	p := Affinity{
		Node: "node-1", Required: []corev1.NodeSelectorRequirement{in("zone", "a")},
		Preferred: []corev1.PreferredSchedulingTerm{{Weight: 50,
			Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{in("host", "h")}}}},
	}
	want := &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{in("disk", "ssd"), in("zone", "a")},
				MatchFields: []corev1.NodeSelectorRequirement{in("metadata.name", "node-1")}},
			{MatchExpressions: []corev1.NodeSelectorRequirement{in("zone", "a")},
				MatchFields: []corev1.NodeSelectorRequirement{in("metadata.name", "node-9"), in("metadata.name", "node-1")}},
			{},
		}},
		PreferredDuringSchedulingIgnoredDuringExecution: append(
			before.DeepCopy().PreferredDuringSchedulingIgnoredDuringExecution, p.Preferred...),
	}
	merged := p.Merge(own)
	if !equality.Semantic.DeepEqual(merged, want) {
		t.Errorf("merged into\n%+v\nnot\n%+v", merged, want)
	}
	if !equality.Semantic.DeepEqual(own, before) {
		t.Error("the pod itself was changed")
	}
	if again := p.Merge(merged); !equality.Semantic.DeepEqual(again, merged) {
		t.Errorf("merged twice it is\n%+v", again)
	}
}

func TestAPodWithoutAffinityGetsOneTerm(t *testing.T) {
	merged := Affinity{Node: "node-1"}.Merge(nil)
	terms := merged.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(terms) != 1 || len(terms[0].MatchExpressions) != 0 ||
		!sameRequirements(terms[0].MatchFields, []corev1.NodeSelectorRequirement{in("metadata.name", "node-1")}) {
		t.Errorf("merged into %+v", merged)
	}
	if merged := (Affinity{}).Merge(nil); merged.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		t.Errorf("an empty affinity requires %+v", merged)
	}
}

func TestNodesAreRuledOutInEveryTerm(t *testing.T) {
	without := Affinity{Without: []string{"node-1", "node-2"}}
	if without.Empty() || without.Requires() {
		t.Errorf("empty %t, requires %t", without.Empty(), without.Requires())
	}
	want := []corev1.NodeSelectorRequirement{
		{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"node-1"}},
		{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"node-2"}},
	}
	own := &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{in("disk", "ssd")}},
			{MatchExpressions: []corev1.NodeSelectorRequirement{in("disk", "nvme")}},
		}}}
	for _, own := range []*corev1.NodeAffinity{nil, own} {
		merged := without.Merge(without.Merge(own))
		for _, term := range merged.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			if !sameRequirements(term.MatchFields, want) {
				t.Errorf("merged into %+v", term)
			}
		}
	}
}

// A backup of objects brings back pods with what the controller added to them, and without their managed fields.
func TestACopyOfAPinnedPodIsUnpinned(t *testing.T) {
	term := func(requirements ...corev1.NodeSelectorRequirement) (t corev1.NodeSelectorTerm) {
		for _, r := range requirements {
			if r.Key == "metadata.name" {
				t.MatchFields = append(t.MatchFields, r)
			} else {
				t.MatchExpressions = append(t.MatchExpressions, r)
			}
		}
		return t
	}
	ssd, away := in("disk", "ssd"), byName(corev1.NodeSelectorOpNotIn, "node-2")
	for pinned, a := range map[string]Affinity{
		NodeHome("node-1"):                     {Node: "node-1"},
		NotNodes([]string{"node-1", "node-3"}): {Without: []string{"node-1", "node-3"}},
		nodesWith + "rack=r1,zone=a":           {Required: []corev1.NodeSelectorRequirement{in("rack", "r1"), in("zone", "a")}},
	} {
		for _, own := range [][]corev1.NodeSelectorTerm{
			nil, {term(ssd)}, {term(ssd, away), term(in("zone", "a", "b"))}, {term(in("rack", "r2")),
				term(in("metadata.name", "node-9"))},
		} {
			was := &corev1.NodeAffinity{}
			if own != nil {
				was.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{NodeSelectorTerms: own}
			}
			merged := a.Merge(was).RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
			before := slices.Clone(merged)
			if is := Unpinned(merged, pinned); !equality.Semantic.DeepEqual(is, own) {
				t.Errorf("pinned to %s: %+v, want %+v", pinned, is, own)
			}
			if is := Unpinned(merged, NodeHome("node-7")); !equality.Semantic.DeepEqual(is, before) {
				t.Errorf("pinned to another node: %+v, want %+v", is, before)
			}
		}
	}
}
