package crash

import (
	"fmt"
	"slices"
	"testing"
)

func TestKilledAtAnySystemCallTheNextCommandsFindEveryPromiseKept(t *testing.T) {
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w, victim, template := s.begin(t)
			found := newComplaints(t)
			defer found.print()
			points, start, o := w.trace(victim)
			if o.code != 0 {
				t.Fatalf("%s fails undisturbed: %s", victim, o.stdout)
			}

			kills, explorer := 0, &explorer{scenario: s, victim: victim, found: found, seen: map[string]bool{}}
			for _, name := range names(points) {
				for nth := 1; ; nth++ {
					v := w.clone()
					v.rewind(template)
					o := v.strace(victim, []string{name}, "-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", name, nth))
					i := slices.IndexFunc(points, func(p point) bool { return p.name == name && p.nth == nth })
					if !o.killed {
						if i >= 0 || o.code != 0 {
							t.Fatalf("the kill at %s number %d was not hit: code %d: %s", name, nth, o.code, o.stdout)
						}
						break
					}
					kills++
					if i < 0 {
						t.Fatalf("%s number %d happens only at times: the sweep is not deterministic", name, nth)
					}
					how := "killed at " + points[i].String()
					v.after(victim, o)
					if i >= start {
						explorer.from(v, how)
					} else if fingerprint(w.n.save(t)) != fingerprint(template) {
						t.Errorf("%s: the disk has changed before the configuration was read", how)
					}
				}
			}
			t.Logf("%d kill points, %d different states", kills, len(explorer.seen))
		})
	}
}
