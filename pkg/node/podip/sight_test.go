package podip

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stayput/stayput/pkg/node/hostnet"
)

func TestWhoeverAsksAgainAndAgainKeepsTheMachineBusyForAFifthOfTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		f := fresh[time.Time]{
			watched: func(_ string, work func()) { work() },
			take: func(context.Context, hostnet.Question) (time.Time, error) {
				now := time.Now()
				time.Sleep(10 * time.Millisecond)
				looks++
				return now, nil
			},
		}
		for begin := time.Now(); time.Since(begin) < 10*time.Second; {
			asked := time.Now()
			at, err := f.get(t.Context(), hostnet.Question{})
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

// A file of a pod, or the runtime, may never answer. Nobody waits for that, and once it ends all goes on.
func TestALookThatDoesNotEndHoldsUpNobodyForever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs, looks, at := make(chan struct{}), 0, ""
		var about []netip.Addr
		f := fresh[int]{
			name: "pools",
			watched: func(loop string, work func()) {
				at = loop
				work()
				at = ""
			},
			take: func(_ context.Context, q hostnet.Question) (int, error) {
				looks++
				about = q.Addrs
				<-hangs
				return looks, nil
			},
		}
		var wg sync.WaitGroup
		for n := range 3 {
			wg.Go(func() {
				if _, err := f.get(t.Context(), hostnet.Question{Addrs: []netip.Addr{addr(n)}}); !errors.Is(err, errLooks) {
					t.Errorf("asker %d: %v", n, err)
				}
			})
			synctest.Wait()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if _, err := f.get(ctx, hostnet.Question{}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("an asker whose time is over: %v", err)
		}
		cancel()
		wg.Wait()
		if looks != 1 || at != "pools" || len(about) != 1 {
			t.Errorf("%d looks, about %v, at %q", looks, about, at)
		}
		close(hangs)
		if _, err := f.get(t.Context(), hostnet.Question{}); err != nil {
			t.Errorf("afterwards: %v", err)
		}
		if at != "" {
			t.Errorf("at %q", at)
		}
	})
}
