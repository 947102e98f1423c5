package podip

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestWhoeverAsksAgainAndAgainKeepsTheMachineBusyForAFifthOfTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f fresh[time.Time]
		looks := 0
		for begin := time.Now(); time.Since(begin) < 10*time.Second; {
			asked := time.Now()
			at, err := f.get(t.Context(), func() (time.Time, error) {
				now := time.Now()
				time.Sleep(10 * time.Millisecond)
				looks++
				return now, nil
			})
			if err != nil || at.Before(asked) {
				t.Fatalf("asked at %s, the answer is of %s: %v", asked, at, err)
			}
		}
		if most := 10*100/5 + 1; looks > most {
			t.Errorf("it looked %d times in 10 s, for 10 ms each: expected at most %d", looks, most)
		}
	})
}

func TestAPodWhoseSandboxRunsIsLookedAtOnceTheRuntimeStopsIt(t *testing.T) {
	runs, gone := presence{sandboxes: []string{"c1"}}, presence{entries: []bound{{}}}
	for _, c := range []struct {
		name  string
		stops bool
		at    presence
		want  verdict
	}{
		{"it runs", false, runs, running},
		{"the runtime stops it, and lists it as running still", true, runs, soon},
		{"it runs no more, and its network is there", false, gone, soon},
	} {
		if got := (&subject{stops: c.stops}).ends(c.at); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
