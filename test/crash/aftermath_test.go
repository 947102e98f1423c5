package crash

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

// aftermath is one way to continue after the crash. olds are the containers that the runtime now removes: the victim's
// and the owner's.
type aftermath struct {
	name string
	run  func(w *world, s scenario, olds []string)
}

var aftermaths = []aftermath{
	{"DELs with netns, the owner comes back, late DELs", func(w *world, s scenario, olds []string) {
		for _, ctr := range olds {
			w.del(ctr)
		}
		w.comeBack(s.owner)
		w.lateDELs(olds)
	}},
	{"DELs without netns, others come first", func(w *world, s scenario, olds []string) {
		for _, ctr := range olds {
			w.delDead(ctr)
		}
		w.fill()
		w.comeBack(s.owner)
	}},
	{"no DEL, the owner comes back, late DELs", func(w *world, s scenario, olds []string) {
		w.die(olds)
		w.comeBack(s.owner)
		w.lateDELs(olds)
	}},
	{"no DEL, others come first", func(w *world, s scenario, olds []string) {
		w.die(olds)
		w.fill()
		w.comeBack(s.owner)
	}},
	{"a reboot, others come first, late DELs", func(w *world, s scenario, olds []string) {
		w.reboot()
		w.fill()
		w.comeBack(s.owner)
		w.lateDELs(olds)
	}},
	{"a reboot, DELs, the owner comes back", func(w *world, s scenario, olds []string) {
		w.reboot()
		for _, ctr := range olds {
			w.delDead(ctr)
		}
		w.comeBack(s.owner)
		w.fill()
	}},
	{"the next ADD is killed too, DELs, the owner comes back", func(w *world, s scenario, olds []string) {
		w.die(olds)
		second := command{verb: "ADD", ctr: w.fresh(s.owner), pod: s.owner}
		w.before(second)
		renames := []string{"?rename", "?renameat", "?renameat2"}
		when := 1 + len(w.n.save(w.t))%3
		w.after(second, w.strace(second, renames, "-e",
			fmt.Sprintf("inject=%s:signal=KILL:when=%d", strings.Join(renames, ","), when)))
		olds = append(olds, second.ctr)
		w.die(olds)
		w.lateDELs(olds)
		w.comeBack(s.owner)
	}},
}

// besidePredecessor goes on with a predecessor that keeps running, which only AllocateNew allows.
var besidePredecessor = aftermath{"the owner comes back beside its predecessor",
	func(w *world, s scenario, olds []string) {
		var rest []string
		for _, ctr := range olds {
			if w.alive(ctr) {
				rest = append(rest, ctr)
			} else {
				w.delDead(ctr)
			}
		}
		w.comeBack(s.owner)
		for _, ctr := range rest {
			w.del(ctr)
		}
		w.lateDELs(olds)
	}}

// revoked goes on with an agent that revokes the pod's grant, while what the victim gave may be in use.
var revoked = aftermath{"the grant is revoked, the owner comes back, then it is granted again",
	func(w *world, s scenario, olds []string) {
		w.revoke()
		w.die(olds)
		late := command{verb: "ADD", ctr: w.fresh(s.owner), pod: s.owner}
		w.before(late)
		w.revoke()
		env, stdin := w.call(late)
		o, err := w.n.exec(env, stdin, plugin)
		must.Do(w.t, err)
		w.after(late, o)
		if o.code == 0 || !strings.Contains(o.stdout, `"code":11`) || !strings.Contains(o.stdout, "is granted no address") {
			w.violates("ADD of %s without a grant: code %d: %s", s.owner.name, o.code, o.stdout)
		}
		w.undone(late)
		w.comeBack(s.owner)
		w.lateDELs(append(olds, late.ctr))
	}}

func (s scenario) aftermaths() []aftermath {
	if s.owner.given() != "" {
		return append(slices.Clone(aftermaths), revoked)
	}
	if s.owner.annotations[retention.AnnotationWhenInUse] == "AllocateNew" {
		return append(slices.Clone(aftermaths), besidePredecessor)
	}
	return aftermaths
}

// olds returns the containers of the owner, and the victim's.
func (w *world) olds(s scenario, victim command) []string {
	var out []string
	for _, ctr := range slices.Sorted(maps.Keys(w.containers)) {
		if a := w.containers[ctr]; a.pod.name == s.owner.name && !(a.ended && a.addrs != nil) || ctr == victim.ctr {
			out = append(out, ctr)
		}
	}
	return out
}

func (w *world) die(ctrs []string) {
	for _, ctr := range ctrs {
		w.note("%s dies", ctr)
		w.dropNetns(ctr)
	}
}

func (w *world) lateDELs(ctrs []string) {
	for range 2 {
		for _, ctr := range ctrs {
			w.delDead(ctr)
		}
	}
}

// goOn runs an aftermath, lets every other pod with a promise come back, and ends it all.
func (w *world) goOn(s scenario, victim command, a aftermath) {
	w.t.Helper()
	w.note("aftermath: %s", a.name)
	a.run(w, s, w.olds(s, victim))
	for _, id := range slices.Sorted(maps.Keys(w.promises)) {
		if len(w.due(id)) > 0 {
			w.comeBack(w.promises[id].pod)
		}
	}
	w.audit()
	w.settle()
}

// rewind restores node and disk.
func (w *world) rewind(disk []file) {
	w.t.Helper()
	w.n.restore(w.t, disk)
	w.n.reboot(w.t, w.boot)
}

// explorer continues from every crash state that it has not seen.
type explorer struct {
	scenario
	victim command
	found  *complaints
	seen   map[string]bool
	// brief goes on in two ways only, by turns, also from a state that is new.
	brief bool
	turn  int
}

// from goes on from the disk as it is: from a state that is new in every way there is, from one that differs
// from another only in files with temporary names in one way, by turns.
func (e *explorer) from(w *world, how string) {
	w.t.Helper()
	e.found.take(w, how)
	disk := w.n.save(w.t)
	known := w.knows()
	whole, core := fingerprint(disk)+known, fingerprint(slices.DeleteFunc(slices.Clone(disk), temporary))+known
	if e.seen[whole] {
		return
	}
	ways := e.aftermaths()
	e.turn++
	switch one, other := ways[e.turn%len(ways)], ways[(e.turn+3)%len(ways)]; {
	case e.seen[core]:
		ways = []aftermath{one}
	case e.brief:
		ways = []aftermath{one, other}
	}
	e.seen[whole], e.seen[core] = true, true
	for _, a := range ways {
		v := w.clone()
		v.rewind(disk)
		v.goOn(e.scenario, e.victim, a)
		e.found.take(v, how+", "+a.name)
	}
}

func temporary(f file) bool {
	return strings.HasSuffix(f.path, ".tmp") || strings.HasPrefix(f.path, "/state/spool/")
}
