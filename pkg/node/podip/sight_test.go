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
		if got := (&record{stops: c.stops}).ends(c.at); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestAProcessIsAPodsByItsCgroup(t *testing.T) {
	const uid = "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e"
	for cgroups, want := range map[string]bool{
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6f1c6a5e_8f0e_4d3b_9a55_0d4f6a1c2b3e.slice/" +
			"cri-containerd-1.scope\n": true,
		"12:memory:/kubepods/besteffort/pod6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e/1\n": true,
		"0::/../../pod6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3f/1\n":                      false,
		"0::/system.slice/docker-1.scope\n":                                          false,
		"":                                                                           false,
	} {
		if is := inPodOf(cgroups, map[string]bool{"": true, uid: true}); is != want {
			t.Errorf("%q: %t, want %t", cgroups, is, want)
		}
	}
}
