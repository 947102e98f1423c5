package ledger

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
			Policy{Retention: duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "720h"},
			Policy{Retention: duration(720 * time.Hour), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "while-owned"},
			Policy{WhileOwned: true, WhenScaled: "Release", WhenDeleted: "Release", WhenMoved: "Release"}},
		{map[string]string{AnnotationRetainIP: "while-owned", AnnotationWhenScaled: "Retain",
			AnnotationWhenDeleted: "Delete"},
			Policy{WhileOwned: true, WhenScaled: "Retain", WhenDeleted: "Release", WhenMoved: "Release"}},
		{map[string]string{AnnotationRetainIP: "while-owned", AnnotationWhenMoved: "Retain"},
			Policy{WhileOwned: true, WhenScaled: "Release", WhenDeleted: "Release", WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "10m", AnnotationWhenMoved: "Delete"},
			Policy{Retention: duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Release"}},
		{map[string]string{AnnotationReservedIPDuration: "10"},
			Policy{Retention: duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationReservedIPDuration: "10", AnnotationRetainIP: "1h"},
			Policy{Retention: duration(time.Hour), WhenScaled: "Retain", WhenDeleted: "Retain",
				WhenMoved: "Retain"}},
		{map[string]string{AnnotationRetainIP: "1h", AnnotationIdentity: "db", AnnotationWhenInUse: "AllocateNew"},
			Policy{Retention: duration(time.Hour), WhenScaled: "Retain", WhenDeleted: "Retain", WhenMoved: "Retain",
				Identity: "db", AllocateNew: true}},
	} {
		p, answers, err := ParseAnnotations(c.annotations)
		if err != nil || !answers || p != c.want {
			t.Errorf("%v: %+v %t %v, want %+v", c.annotations, p, answers, err, c.want)
		}
	}
}

func TestAnnotationsOfOthersDoNotAnswer(t *testing.T) {
	for _, m := range []map[string]string{nil, {"a": "b"}, {"stayput.io/home-wait": "60s"}} {
		if p, answers, err := ParseAnnotations(m); answers || err != nil || p.Retains() {
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
			p, answers, err := ParseAnnotations(m)
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
		_, _, err := ParseAnnotations(map[string]string{key: value})
		if err == nil || !strings.Contains(err.Error(), AnnotationRetainIP) {
			t.Errorf("%s alone: %v", key, err)
		}
	}
}

func TestTheLongestRetentionClamps(t *testing.T) {
	for _, c := range []struct {
		p       Policy
		longest time.Duration
		want    time.Duration
		clamped bool
	}{
		{*tenMinutes, time.Hour, 10 * time.Minute, false},
		{*tenMinutes, time.Minute, time.Minute, true},
		{*tenMinutes, 0, 10 * time.Minute, false},
		{*forever, time.Hour, time.Hour, true},
		{*forever, 0, 0, false},
		{*ordinary, time.Hour, 0, false},
	} {
		if got, clamped := c.p.clamp(c.longest); got.Duration() != c.want || clamped != c.clamped {
			t.Errorf("%+v under %s: %s %t", c.p, c.longest, got.Duration(), clamped)
		}
	}
}

func TestAWholeIPv6NetworkMayBePromised(t *testing.T) {
	w := newWorld(t, testNetwork("fd00::/64", ""))
	w.net.PromisedShare = 1
	for _, pod := range []string{"web-0", "web-1", "web-2"} {
		w.add(pod, tenMinutes)
	}
	if len(w.promises) != 3 {
		w.failf("%d promises, want 3", len(w.promises))
	}
}

// The pod asks for nothing any more, and its address is outside the ranges by now.
func TestAPromiseThatAPodGivesUpDoesNotComeBackWithAPowerLoss(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	w.fs.lose("all", nil) // nothing: it is durable from now on
	w.net.Ranges = testNetwork("10.2.0.0/28", "").Ranges
	w.add("web-0", ordinary)
	w.losePower(0)
	w.check()
	w.explained()
}

// An ordinary pod gets an address that is promised for longer than it should be, since there is no other.
func TestAnOverduePromiseDoesNotComeBackWithAPowerLossOnceItsAddressIsAnothers(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/30", ""))
	stopped(w, "web-0", tenMinutes)
	w.fs.lose("all", nil) // nothing: it is durable from now on
	w.advance(11 * time.Minute)
	w.add("job", ordinary)
	w.losePower(0)
	w.check()
	w.explained()
}
