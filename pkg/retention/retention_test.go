package retention

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestAnnotationsThatAreValidMakeAPolicy(t *testing.T) {
	for _, c := range []struct {
		annotations map[string]string
		want        Policy
	}{
		{map[string]string{AnnotationRetainIP: "10m"},
			Policy{Retention: Duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "720h"},
			Policy{Retention: Duration(720 * time.Hour), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "while-owned"},
			Policy{WhileOwned: true, WhenScaled: "Release", WhenDeleted: "Release", WhenMoved: "Release"}},
		{map[string]string{AnnotationRetainIP: "while-owned", AnnotationWhenScaled: "Retain",
			AnnotationWhenDeleted: "Delete"},
			Policy{WhileOwned: true, WhenScaled: "Retain", WhenDeleted: "Release", WhenMoved: "Release"}},
		{map[string]string{AnnotationRetainIP: "while-owned", AnnotationWhenMoved: "Retain"},
			Policy{WhileOwned: true, WhenScaled: "Release", WhenDeleted: "Release", WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "10m", AnnotationWhenMoved: "Delete"},
			Policy{Retention: Duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Release"}},
		{map[string]string{AnnotationReservedIPDuration: "10"},
			Policy{Retention: Duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationReservedIPDuration: "10", AnnotationRetainIP: "1h"},
			Policy{Retention: Duration(time.Hour), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "1h", AnnotationIdentity: "db", AnnotationWhenInUse: "AllocateNew"},
			Policy{Retention: Duration(time.Hour), WhenScaled: "Retain", WhenDeleted: "Retain", WhenMoved: "Retain",
				Identity: "db", AllocateNew: true}},
		{map[string]string{AnnotationRetainIP: "none"}, Policy{}},
		{map[string]string{AnnotationRetainIP: "none", AnnotationReservedIPDuration: "10", AnnotationWhenScaled: "Retain"},
			Policy{}},
	} {
		p, answers, err := Parse(c.annotations)
		if err != nil || !answers || p != c.want {
			t.Errorf("%v: %+v %t %v, want %+v", c.annotations, p, answers, err, c.want)
		}
	}
}

func TestAnnotationsOfOthersDoNotAnswer(t *testing.T) {
	for _, m := range []map[string]string{nil, {"a": "b"}, {"stayput.io/home-wait": "60s"}} {
		if p, answers, err := Parse(m); answers || err != nil || p.Retains() {
			t.Errorf("%v: %+v %t %v", m, p, answers, err)
		}
	}
}

func TestABadAnnotationIsAnErrorThatNamesItsKeyAndWhatWasExpected(t *testing.T) {
	for key, values := range map[string][]string{
		AnnotationRetainIP: {"-1", "1.5", "10x", "", strings.Repeat("9", 300), "true", "0s", "-10m", "10", " 10m"},
		AnnotationReservedIPDuration: {"-1", "1.5", "10x", "", strings.Repeat("9", 300), "true", "0", "+10", "10m",
			"9223372036854775807"},
		AnnotationWhenScaled:  {"", "retain", "Keep"},
		AnnotationWhenDeleted: {"", "release"},
		AnnotationWhenMoved:   {"", "delete", "Keep"},
		AnnotationIdentity:    {"", "a/b", "A", "-a", "a-", strings.Repeat("a", 64)},
		AnnotationWhenInUse:   {"", "wait"},
	} {
		for _, v := range values {
			m := map[string]string{AnnotationRetainIP: "10m"}
			m[key] = v
			p, answers, err := Parse(m)
			var bad *AnnotationError
			if !answers || !errors.As(err, &bad) || bad.Key != key || bad.Expected == "" || p.Retains() ||
				len(err.Error()) > 300 {
				t.Errorf("%s=%q: %+v %v", key, v, p, err)
			}
		}
	}
}

func TestAnAnnotationThatMeansNothingAloneIsNotSilentlyIgnored(t *testing.T) {
	for _, key := range []string{AnnotationIdentity, AnnotationWhenInUse, AnnotationWhenScaled,
		AnnotationWhenMoved} {
		value := map[string]string{AnnotationIdentity: "db", AnnotationWhenInUse: "Wait", AnnotationWhenScaled: "Retain",
			AnnotationWhenMoved: "Release"}[key]
		_, _, err := Parse(map[string]string{key: value})
		if err == nil || !strings.Contains(err.Error(), AnnotationRetainIP) {
			t.Errorf("%s alone: %v", key, err)
		}
	}
}

func TestTheLongestRetentionClamps(t *testing.T) {
	tenMinutes, whileOwned := Policy{Retention: Duration(10 * time.Minute)}, Policy{WhileOwned: true}
	for _, c := range []struct {
		p       Policy
		longest time.Duration
		want    time.Duration
		clamped bool
	}{
		{tenMinutes, time.Hour, 10 * time.Minute, false},
		{tenMinutes, time.Minute, time.Minute, true},
		{tenMinutes, 0, 10 * time.Minute, false},
		{whileOwned, time.Hour, time.Hour, true},
		{whileOwned, 0, 0, false},
		{Policy{}, time.Hour, 0, false},
	} {
		if got, clamped := c.p.Clamp(c.longest); got.Duration() != c.want || clamped != c.clamped {
			t.Errorf("%+v under %s: %s %t", c.p, c.longest, got.Duration(), clamped)
		}
	}
}

// A pod with addresses of pools is held to the same words; what it does not say depends on whether its name comes back.
func TestWhatAPodWithAddressesOfPoolsDoesNotSay(t *testing.T) {
	whileOwned := Policy{WhileOwned: true, WhenScaled: Release, WhenDeleted: Release, WhenMoved: Release}
	tenMinutes := Policy{Retention: Duration(10 * time.Minute), WhenScaled: Retain, WhenDeleted: Retain, WhenMoved: Retain}
	for _, c := range []struct {
		annotations     map[string]string
		back, neverBack Policy
	}{
		{nil, whileOwned, Policy{}},
		{map[string]string{"other/annotation": "true"}, whileOwned, Policy{}},
		{map[string]string{AnnotationRetainIP: "while-owned"}, whileOwned, Policy{}},
		{map[string]string{AnnotationRetainIP: "none"}, Policy{}, Policy{}},
		{map[string]string{AnnotationRetainIP: "10m"}, tenMinutes, tenMinutes},
		{map[string]string{AnnotationReservedIPDuration: "10"}, tenMinutes, tenMinutes},
		{
			map[string]string{
				AnnotationRetainIP: "while-owned", AnnotationWhenScaled: "Retain", AnnotationWhenInUse: "AllocateNew",
			},
			Policy{WhileOwned: true, WhenScaled: Retain, WhenDeleted: Release, WhenMoved: Release, AllocateNew: true},
			Policy{AllocateNew: true},
		},
	} {
		for comesBack, want := range map[bool]Policy{true: c.back, false: c.neverBack} {
			if got, err := ParsePooled(c.annotations, comesBack); err != nil || got != want {
				t.Errorf("%q, comes back %t: %+v %v, want %+v", c.annotations, comesBack, got, err, want)
			}
		}
	}
	for _, annotations := range []map[string]string{
		{AnnotationReservedIPDuration: "+10"}, {AnnotationWhenScaled: "Retain"}, {AnnotationIdentity: "db"},
		{AnnotationRetainIP: "10m", AnnotationWhenMoved: "Keep"}, {AnnotationRetainIP: "10m", AnnotationIdentity: "A"},
	} {
		_, _, want := Parse(annotations)
		if _, err := ParsePooled(annotations, true); err == nil || err.Error() != want.Error() {
			t.Errorf("%q: %v, want %v", annotations, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, v := range []string{"10m", "720h", "while-owned", "none", "-1", "1.5", "10x", "", "true", "10"} {
		f.Add(v, v, "web", "Wait", "Retain")
	}
	f.Fuzz(func(t *testing.T, retain, minutes, identity, inUse, scaled string) {
		p, answers, err := Parse(map[string]string{
			AnnotationRetainIP: retain, AnnotationReservedIPDuration: minutes, AnnotationIdentity: identity,
			AnnotationWhenInUse: inUse, AnnotationWhenScaled: scaled,
		})
		if !answers {
			t.Fatal("the annotations answer")
		}
		if err == nil && (p.Retains() == (retain == None) || p.Duration() < 0) {
			t.Fatalf("accepted, but retains what it does not ask for, or nothing: %+v", p)
		}
		if err != nil && p != (Policy{}) {
			t.Fatalf("%+v beside %v", p, err)
		}
	})
}

func TestAPolicyIsRecordedInItsOwnWords(t *testing.T) {
	for _, c := range []struct {
		retainIP string
		want     Policy
	}{
		{"", Policy{}},
		{"while-owned", Policy{WhileOwned: true, WhenScaled: Release, WhenDeleted: Retain}},
		{"10m", Policy{Retention: Duration(10 * time.Minute), WhenScaled: Release, WhenDeleted: Retain}},
		{"ten minutes", Policy{WhileOwned: true, WhenScaled: Release, WhenDeleted: Retain}}, // frees no address
		{"-10m", Policy{}},
	} {
		got := Recorded(c.retainIP, Release, Retain)
		if got != c.want {
			t.Errorf("%q is %+v", c.retainIP, got)
		}
		if again := Recorded(got.RetainIP(), got.WhenScaled, got.WhenDeleted); again != got {
			t.Errorf("%q is recorded as %q, which is %+v", c.retainIP, got.RetainIP(), again)
		}
	}
}
