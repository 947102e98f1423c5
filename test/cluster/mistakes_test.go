package cluster

import (
	"context"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/lab"
)

// What the API server takes, with a warning or without, and shows to be wrong only once its pod runs.
func TestWhyNamesTheMistakeOfARunningPod(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	for name, m := range map[string]struct {
		pod, own map[string]string
		promise  string
	}{
		"misspelt": {pod: map[string]string{"stayput.io/retainip": "10m"},
			promise: "but stayput.io/retainip, which is unknown and has no effect"},
		"on-workload": {own: retain("10m"),
			promise: "but its StatefulSet has " + retainIP + " in metadata.annotations, where it has no effect"},
		"no-such-label": {own: map[string]string{auto: "true", required: "test.stayput.io/nowhere"},
			promise: "no annotation " + retainIP},
	} {
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: 1, Annotations: m.pod, Own: m.own})
		ready(t, c, ns, name+"-0")
		s := story(t, c, ns, name+"-0")
		if len(s.Promise) != 1 || !strings.Contains(s.Promise[0], m.promise) {
			t.Errorf("%s: %q, want %q", name, s.Promise, m.promise)
		}
	}
}

func TestARetentionBeyondTheLongestIsSaidToBeShortened(t *testing.T) {
	c := beside(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "clamped", Replicas: 1, Annotations: retain("99999h")})
	ready(t, c, ns, "clamped-0")
	if says := saysOf(t, c, ns, "Pod", "clamped-0", string(ledger.EventClamped)); !strings.Contains(says, "720h") {
		t.Errorf("the Event says %q", says)
	}
	kubectl(t, c, "delete", "pod", "clamped-0", "-n", ns, "--wait=false")
	until(t, "the promise in the story", func(ctx context.Context) bool {
		s := story(t, c, ns, "clamped-0")
		return len(s.Kept) > 0
	})
}
