package podstate

import (
	"reflect"
	"strings"
	"testing"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

func TestAnnotationsOfAWorkloadAreReadForgivingly(t *testing.T) {
	const (
		auto, required   = kruisev1alpha1.AnnotationAutoGenerate, kruisev1alpha1.AnnotationRequiredTopology
		preferred, notes = kruisev1alpha1.AnnotationPreferredTopology, kruisev1alpha1.AnnotationPodAnnotations
	)
	for name, c := range map[string]struct {
		annotations map[string]string
		want        wish
		wanted      bool
		problem     string
	}{
		"nothing":  {nil, wish{}, false, ""},
		"false":    {map[string]string{auto: "false", required: "a"}, wish{}, false, ""},
		"neither":  {map[string]string{auto: "yes", required: "a"}, wish{}, true, home.ReasonInvalidAnnotation},
		"required": {map[string]string{auto: "true", required: "a"}, wish{required: []string{"a"}}, true, ""},
		"blanks, none, twice": {map[string]string{auto: "true", preferred: " a, b ,,a,"}, wish{preferred: []string{"a", "b"}},
			true, ""},
		"all": {map[string]string{auto: "true", required: "x.io/a", preferred: "b", notes: "X.io/N, m"},
			wish{required: []string{"x.io/a"}, preferred: []string{"b"}, annotations: []string{"X.io/N", "m"}}, true, ""},
		"no topology": {map[string]string{auto: "true", notes: "n"}, wish{annotations: []string{"n"}}, true,
			reasonTopologyMissing},
		"only blanks": {map[string]string{auto: "true", required: " , "}, wish{}, true, reasonTopologyMissing},
		"ours": {map[string]string{auto: "true", required: "a", notes: "stayput.io/addresses, m"},
			wish{required: []string{"a"}, annotations: []string{"m"}, refused: "stayput.io/addresses"}, true, ""},
		"not a key": {map[string]string{auto: "true", required: "a b"}, wish{}, true, home.ReasonInvalidAnnotation},
		"not an annotation": {map[string]string{auto: "true", required: "a", notes: "/x"}, wish{required: []string{"a"}},
			true, home.ReasonInvalidAnnotation},
	} {
		if c.want.by = stayputv1alpha1.GeneratedByWorkload; !c.wanted {
			c.want.by = ""
		}
		got, wanted, problem := wishOf(c.annotations, nil)
		if !reflect.DeepEqual(got, c.want) || wanted != c.wanted || problem.reason != c.problem ||
			(problem.message == "") != (c.problem == "") {
			t.Errorf("%s: %+v, %v, %v, want %+v, %v, %s", name, got, wanted, problem, c.want, c.wanted, c.problem)
		}
	}
}

func TestPodsThatWantTheirNodeBackWithoutAnAddressAreRecorded(t *testing.T) {
	const at = stayputv1alpha1.AnnotationHome
	required := wish{required: []string{hostname}, by: stayputv1alpha1.GeneratedByHome}
	preferred := wish{preferred: []string{hostname}, by: stayputv1alpha1.GeneratedByHome}
	for name, c := range map[string]struct {
		annotations, template map[string]string
		want                  wish
		wanted                bool
	}{
		"required":  {nil, map[string]string{at: "Required"}, required, true},
		"preferred": {nil, map[string]string{at: "Preferred"}, preferred, true},
		"neither":   {nil, map[string]string{at: "required"}, required, true},
		"their address says where they were": {nil,
			map[string]string{at: "Required", stayputv1alpha1.AnnotationRetainIP: "10m"}, wish{}, false},
		"and so does OpenKruise's": {nil,
			map[string]string{at: "Required", stayputv1alpha1.AnnotationReservedIPDuration: "10"}, wish{}, false},
		"and that of a pool": {nil,
			map[string]string{at: "Required", stayputv1alpha1.AnnotationPools: "blue"}, wish{}, false},
		"not that of none": {nil,
			map[string]string{at: "Required", stayputv1alpha1.AnnotationPools: ""}, required, true},
		"what the workload asks for itself comes first": {
			map[string]string{kruisev1alpha1.AnnotationAutoGenerate: "true", kruisev1alpha1.AnnotationRequiredTopology: zone},
			map[string]string{at: "Required"}, wish{required: []string{zone}, by: stayputv1alpha1.GeneratedByWorkload}, true},
	} {
		got, wanted, problem := wishOf(c.annotations, c.template)
		if !reflect.DeepEqual(got, c.want) || wanted != c.wanted || problem.reason != "" {
			t.Errorf("%s: %+v, %v, %v, want %+v, %v", name, got, wanted, problem, c.want, c.wanted)
		}
	}
}

func TestWhatPeopleMadeIsNeverTakenOver(t *testing.T) {
	asked := func(required string, annotations ...string) *home.Workload {
		w := web(1)
		w.Annotations = map[string]string{
			kruisev1alpha1.AnnotationAutoGenerate: "true", kruisev1alpha1.AnnotationPreferredTopology: hostname,
			kruisev1alpha1.AnnotationRequiredTopology: required,
			kruisev1alpha1.AnnotationPodAnnotations:   strings.Join(annotations, ","),
		}
		return w
	}
	hand, handOther, ours, oursOther := object("web", 0), object("mine", 0), object("web", 0), object("web", 0)
	newer := *hand.DeepCopy()
	newer.Spec.PreferredPersistentTopology[0].Preference = kruisev1alpha1.NodeTopologyTerm{Keys: []string{hostname}}
	ours.Labels = map[string]string{stayputv1alpha1.LabelGenerated: stayputv1alpha1.GeneratedByWorkload}
	byHome := *ours.DeepCopy()
	byHome.Labels = map[string]string{stayputv1alpha1.LabelGenerated: stayputv1alpha1.GeneratedByHome}
	oursOther.Labels = ours.Labels
	oursOther.Spec.TargetReference.APIVersion = "apps.kruise.io/v1beta1"
	type objects = []*kruisev1alpha1.PersistentPodState
	for name, c := range map[string]struct {
		w             *home.Workload
		named         *kruisev1alpha1.PersistentPodState
		all           objects
		apply, delete bool
		problem       string
	}{
		"asked for":                        {asked(""), nil, nil, true, false, ""},
		"there already":                    {asked(""), &ours, objects{&ours}, false, false, ""},
		"there, for the annotation home":   {asked(""), &byHome, objects{&byHome}, true, false, ""},
		"there, and says something else":   {asked(zone), &ours, objects{&ours}, true, false, ""},
		"there, with a second one by hand": {asked(zone), &ours, objects{&handOther, &ours}, true, false, ""},
		"not asked for":                    {web(1), nil, nil, false, false, ""},
		"not asked for any more":           {web(1), &ours, objects{&ours}, false, true, ""},
		"not asked for, by hand":           {web(1), &hand, objects{&hand}, false, false, ""},
		"not asked for, another kind's":    {web(1), &oursOther, nil, false, false, ""},
		"by hand under its name":           {asked(zone), &hand, objects{&hand}, false, false, reasonNotGenerated},
		"by hand, saying the same":         {asked(""), &hand, objects{&hand}, false, false, ""},
		"by hand, saying so in v1beta1":    {asked(""), &newer, objects{&newer}, false, false, ""},
		"by hand, else in v1beta1":         {asked(zone), &newer, objects{&newer}, false, false, reasonNotGenerated},
		"by hand under another name":       {asked(""), nil, objects{&handOther}, false, false, reasonNotGenerated},
		"another kind's under its name":    {asked(""), &oursOther, nil, false, false, reasonNotGenerated},
		"asked for wrongly":                {asked("no key"), nil, nil, false, false, home.ReasonInvalidAnnotation},
		"with an annotation that is ours": {asked("", "stayput.io/addresses"), nil, nil, true, false,
			home.ReasonInvalidAnnotation},
		"there, with an annotation that is ours": {asked("", "stayput.io/addresses"), &ours, objects{&ours}, false, false,
			home.ReasonInvalidAnnotation},
		"asked for wrongly, it is left alone": {asked("no key"), &ours, objects{&ours}, false, false,
			home.ReasonInvalidAnnotation},
	} {
		p := planFor(c.w, c.named, c.all)
		if (p.apply != nil) != c.apply || (p.delete != nil) != c.delete || p.problem.reason != c.problem {
			t.Errorf("%s: %+v, want apply %v, delete %v, problem %q", name, p, c.apply, c.delete, c.problem)
		}
		if p.delete != nil && !generated(p.delete) {
			t.Errorf("%s: deletes %v", name, p.delete)
		}
	}
}

func TestWhatTheUserAddsToAGeneratedSpecIsLeftAlone(t *testing.T) {
	shared, w := object("web", 0), wish{preferred: []string{hostname}}
	s := shared.DeepCopy()
	s.Spec.PersistentPodStateRetentionPolicy = kruisev1alpha1.RetentionWhenDeleted
	if !w.in(&s.Spec) {
		t.Error("the retention policy counts as a difference")
	}
	s.Spec.PreferredPersistentTopology[0].Weight = 1
	if w.in(&s.Spec) {
		t.Error("another weight does not count as a difference")
	}
}

func TestBesideOpenKruiseOnlyWhatItDoesNotKnowIsGenerated(t *testing.T) {
	by := func(label string) *kruisev1alpha1.PersistentPodState {
		s := object("web", 0)
		s.Labels = map[string]string{stayputv1alpha1.LabelGenerated: label}
		return &s
	}
	home, workload := stayputv1alpha1.GeneratedByHome, stayputv1alpha1.GeneratedByWorkload
	for name, c := range map[string]struct {
		plan, left plan
	}{
		"a home":           {plan{apply: &wish{by: home}}, plan{apply: &wish{by: home}}},
		"a home taken off": {plan{delete: by(home)}, plan{delete: by(home)}},
		"its annotations":  {plan{apply: &wish{by: workload}}, plan{}},
		"these taken off":  {plan{delete: by(workload)}, plan{}},
		"a problem":        {plan{problem: finding{reason: reasonTopologyMissing}}, plan{}},
	} {
		if left := c.plan.besideKruise(); !reflect.DeepEqual(left, c.left) {
			t.Errorf("%s: %+v, want %+v", name, left, c.left)
		}
	}
}

func TestPreferredKeysAreOneTermAsOpenKruiseWritesIt(t *testing.T) {
	w := wish{preferred: []string{hostname, zone}}
	terms := w.spec(web(1)).PreferredPersistentTopology
	if len(terms) != 1 || *terms[0].Weight != 100 ||
		!reflect.DeepEqual(terms[0].Preference.NodeTopologyKeys, w.preferred) {
		t.Errorf("%+v", terms)
	}
	is := kruisev1alpha1.PersistentPodStateSpec{PreferredPersistentTopology: []kruisev1alpha1.PreferredTopologyTerm{
		{Weight: 100, Preference: kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: w.preferred}},
	}}
	if !w.in(&is) {
		t.Error("what OpenKruise wrote counts as a difference")
	}
}
