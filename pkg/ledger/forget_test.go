package ledger

import (
	"testing"
	"time"

	"github.com/stayput/stayput/test/must"
)

// forget returns whether the network was forgotten, and demands that nothing else has happened.
func forget(w *world, unused time.Duration) bool {
	w.t.Helper()
	forgotten, err := w.ledger().Forget(unused)
	must.Do(w.t, err)
	known, err := Networks(Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: w.netns})
	must.Do(w.t, err)
	if forgotten == (len(known) > 0) {
		w.failf("forgotten %t, but known are %v", forgotten, known)
	}
	return forgotten
}

func TestANetworkIsForgottenOnceItHasHadNoAddressForLong(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(w *world)
		want    bool
	}{
		"empty":         {func(w *world) { att, _, _ := w.add("job", ordinary); w.del(att) }, true},
		"a pod runs":    {func(w *world) { w.add("job", ordinary) }, false},
		"a pod is kept": {func(w *world) { stopped(w, "web-0", forever) }, false},
		"a file says nothing": {func(w *world) { must.Do(w.t, w.fs.WriteFile("/data/net/10.1.0.9", nil, modeHostLocal)) },
			false},
	} {
		w := newWorld(t, testNetwork("10.1.0.0/28", ""))
		w.prepare()
		c.prepare(w)
		w.prepare()
		changed, err := w.fs.ChangeTime("/data/net")
		must.Do(t, err)
		w.clock.now.Wall = time.Unix(0, changed).Add(23 * time.Hour)
		if forget(w, 24*time.Hour) {
			t.Errorf("%s: forgotten after 23 h", name)
		}
		w.clock.now.Wall = time.Unix(0, changed).Add(25 * time.Hour)
		if got := forget(w, 24*time.Hour); got != c.want {
			t.Errorf("%s: forgotten %t, want %t", name, got, c.want)
		}
	}
}

func TestANetworkThatIsBeingForgottenServesTheNextPodWhereverThatIsKilled(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		w := newWorld(t, testNetwork("10.1.0.0/28", ""))
		att, _, _ := w.add("job", ordinary)
		w.del(att)
		hit = w.killAt(n, func() { forget(w, -time.Duration(1<<62)) })
		stopped(w, "web-0", tenMinutes)
		w.add("web-0", tenMinutes)
		w.settle()
	}
}
