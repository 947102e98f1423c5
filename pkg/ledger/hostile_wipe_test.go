package ledger

import (
	"fmt"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

// What comes between a wipe and the command that mends it, or before it. The model checks at each ADD that nothing
// is given away.
func TestAWipeGivesNothingAwayWhateverHappensAroundIt(t *testing.T) {
	wholly := func(w *world) { must.Do(w.t, disk.RemoveAll(w.fs, "/data/net")) }
	byGlob := func(w *world) { w.wipe("/data/net", glob) }
	tear := func(w *world) {
		for _, i := range []string{"0", "1"} {
			must.Do(w.t, w.fs.WriteFile("/data/net/"+lastPrefix+i, nil, modeHostLocal))
		}
	}
	for name, c := range map[string]struct{ before, wipe, after func(*world) }{
		"the first to look sees no namespace": {wipe: byGlob, after: func(w *world) { must.Do(w.t, w.blind().Prepare()) }},
		"a kill has torn the round robin": {wipe: byGlob, before: func(w *world) {
			tear(w)
			w.add("web-0", tenMinutes) // which takes nothing from it
		}},
		"a power loss has torn the round robin": {wipe: byGlob, before: func(w *world) {
			w.boot(time.Minute)
			tear(w)
			w.add("web-0", tenMinutes)
		}},
		"it is uninstalled": {wipe: wholly, after: func(w *world) {
			_, err := w.blind().Uninstall()
			must.Do(t, err)
			clear(w.promises)
			for _, l := range w.live {
				l.key = nil
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w, _, _, _ := inhabited(t)
			for _, f := range []func(*world){c.before, c.wipe, c.after} {
				if f != nil {
					f(w)
				}
			}
			for i := range 12 {
				w.add(fmt.Sprintf("other-%d", i), ordinary)
			}
			w.check()
		})
	}
}

// A killed ADD leaves an entry that names addresses which it never bound, and which others get.
func TestAWipeLeavesAnAddressToTheOneThatBoundIt(t *testing.T) {
	for n := range 100 { // the name decides in which order the entries are read
		w, _, promised, _ := inhabited(t)
		killed := Attachment{promised.ContainerID, fmt.Sprint("net", n)}
		w.killAt(n%20, func() { w.addAs(killed, w.live[promised].netns, "other", ordinary) })
		for i := range 3 {
			w.add(fmt.Sprintf("job-%d", i), ordinary)
		}
		must.Do(t, disk.RemoveAll(w.fs, "/data/net"))
		w.del(killed)
		for i := range 12 {
			w.add(fmt.Sprintf("other-%d", i), ordinary)
		}
		w.check()
	}
}
