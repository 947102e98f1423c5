package home

import (
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
