package pool

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// rule is one on which safety rests. The model test breaks each in turn, and must notice. The package itself knows
// nothing of that: a test of the tests builds it with the source below in place of its own, by Go's -overlay.
type rule uint

type rules uint64

// brokenRules are those that the history at hand does without.
var brokenRules rules

// broken is what the source below asks.
func broken(one rule) bool { return brokenRules&(1<<one) != 0 }

const (
	forceDeleteIsNoProof rule = iota // that the pod is gone from the cluster proves nothing
	notReadyIsNoProof                // nor does a node that is not Ready
	nodeIsLookedUp                   // that its node is off, too
	readyIsNotOff                    // a node that is Ready is not off, whatever its taints
	nodeIsKnown                      // only the node that a pod has by the cluster may be named for it
	restoresAreNoticed               // after a restore, nodes know more than the cluster
	futureIsLost                     // also if the clock was ahead that set the mark
	restoresWaitForAll               // also those that do not answer
	placedSinceMark                  // a pod is ungated only if nothing was forgotten
	versionsMatter                   // a write is bound to what it was decided on
	releaseWaitsForFence             // an address that was released may be in use
	finalizerHolds                   // one that was deleted, too
	annotationsDecide                // an address that a pod has not been told of is surplus
	goneMeansForGood                 // an agent: a pod that may start again is not gone
	goneMeansNamespace               // an agent: a pod whose namespace exists is not gone
	recallsEnd                       // nor ends its word a pod, but for one from before all nodes were asked
	grantsCount                      // kubelet may start what the cluster has forgotten
	endedOnce                        // an agent: what it has ended it never grants again
	strangersGoDown                  // a pod that the cluster has given up must not answer
	offGoesDown                      // nor one that it has deleted on a node that it believes to be off
	foundCounts                      // an agent: nor one that another program has started, of which it never heard
	unusedIsFreed                    // nothing leaks: an address whose reason is gone
	surplusIsFreed                   // nor one that no pod was told of
	adoptedIsOwn                     // but for one that its pod had before
	newestMarkCounts                 // no pod gets an address that was claimed before a restore
	toldIsTaken                      // an address is not taken over that another pod was told
	roomWakes                        // no pod waits that could go on: an address becomes free
	sharersWake                      // its identity has one that no pod uses any more
	poolsWake                        // a pool gives again
	collectedIsNoProof               // Calico: a free address of a node that is cut off may be in use
	contactIsRecent                  // Calico: also if the node was in contact before it was free
	observedSinceEnd                 // Calico: what was read before the pod's end says nothing
	endsAreDated                     // Calico: a pod's end may be heard of long after it
	offIsFreed                       // Calico: only a node that is off has its allocations freed
	addsTakeTime                     // Calico: a pod that has not started may be about to
	forgottenEnds                    // Calico: after a restore nodes run what the cluster has forgotten
	importsAreConfirmed              // Calico: what was read of a pod may be over before its address is reserved
	laterPodsHaveIt                  // Calico: an allocation may be that of a later pod of the name
	addsEnd                          // Calico: a sandbox may be about to start that has the address
	startedIsLookedUp                // Calico: that it has not is read past the cache
	rulesEnd
)

// broke is how the package does without a rule: in a file, this for that, which is there once.
var broke = []struct{ file, is, becomes string }{
	{"fence.go", `	node := p.namedNode()
	n, exists`, `	if broken(forceDeleteIsNoProof) && s.Pod == nil {
		return Finding{}
	}
	node := p.namedNode()
	n, exists`},
	{"life.go", `return known && node != "" && said`, `return !broken(nodeIsKnown) && known && node != "" && said`},
	{"fence.go", `	return []Check{{Off: node}}`, `	if broken(nodeIsLookedUp) || broken(readyIsNotOff) {
		return nil
	}
	return []Check{{Off: node}}`},
	{"fence.go", `	if exists && !n.Ready {
`, `	if broken(notReadyIsNoProof) && exists && !n.Ready {
		return Finding{}
	}
	if exists && !n.Ready {
`},
	{"facts.go", `return pod == nil || pod.Node == node ||`,
		`return pod == nil || pod.Node == node || broken(recallsEnd) ||`},
	{"life.go", `&& !p.Held && !p.Deleting {`, `&& !p.Held && !p.Deleting && !broken(finalizerHolds) {`},
	{"life.go", `		return d.end("its pod has other addresses", nil)`, `		if broken(surplusIsFreed) {
			return Plan{}
		}
		return d.end("its pod has other addresses", nil)`},
	{"life.go", `	case pod.alive():
		return Plan{}`, `	case pod.alive() && (p.Release || p.Deleting) && broken(releaseWaitsForFence):
		return d.end("", nil)
	case pod.alive():
		return Plan{}`},
	{"life.go", `	if pod == nil || p.adopted() {`, `	if pod == nil || p.adopted() && !broken(adoptedIsOwn) {`},
	{"life.go", `	if pod.Assigned == nil && !pod.alive() {`, `	if broken(annotationsDecide) {
		return !pod.has(p.Addr)
	}
	if pod.Assigned == nil && !pod.alive() {`},
	{"life.go", `	if p.Deleting {
		again`, `	if broken(unusedIsFreed) {
		return Plan{}
	}
	if p.Deleting {
		again`},
	{"audit.go", `	if lost {
`, `	if broken(futureIsLost) && live.Mark.After(now) {
		lost = live.older(seen)
	}
	if lost && !broken(restoresAreNoticed) {
`},
	{"audit.go", `	if all.Verdict != Yes {`, `	if broken(restoresWaitForAll) {
		all.If = nil
	} else if all.Verdict != Yes {`},
	{"place.go", `	place.If = []Check{{Since: &known}}`, `	if !broken(placedSinceMark) {
		place.If = []Check{{Since: &known}}
	}`},
	{"place.go", `				create := CreateIP{PodIP: p}`, `				p.Held = !broken(finalizerHolds)
				create := CreateIP{PodIP: p}`},
	{"write.go", `is.older(live.Seen()) ||`, `is.older(live.Seen()) && !broken(newestMarkCounts) ||`},
	{"place.go", `case d.toldTo(p.Addr, p.PodUID):`,
		`case d.toldTo(p.Addr, p.PodUID) && !broken(toldIsTaken):`},
	{"node.go", `l.Ending || l.Terminal || l.Ended }`,
		`l.Ending || l.Terminal || l.Ended && !broken(endedOnce) || broken(goneMeansForGood) }`},
	{"node.go", `case l.Found && l.IP == nil:`, `case l.Found && (l.IP == nil || broken(foundCounts)):`},
	{"node.go", `case l.ends() && !l.Netns:`, `case l.ends() && (!l.Netns || broken(goneMeansNamespace)):`},
	{"node.go", `case l.Elsewhere, foreign,`, `case !broken(strangersGoDown) && (l.Elsewhere || foreign),`},
	{"node.go", `l.deleted() && l.Off:
`, `l.deleted() && l.Off && !broken(offGoesDown):
`},
	{"wake.go", `	for pool := range w.lines.stirred {
`, `	for pool := range w.lines.stirred {
		if broken(roomWakes) {
			continue
		}
`},
	{"wake.go", `&& !w.pods[p.PodUID].alive() {`, `&& !w.pods[p.PodUID].alive() && !broken(sharersWake) {`},
	{"wake.go", `	w.wakePlaces()
	w.wakePools()
`, `	if !broken(poolsWake) {
		w.wakePlaces()
	}
	w.wakePools()
`},
	{"calico.go", `	case !n.Ready:
		return Finding{Verdict: Never, Remedy: offRemedy, Reason: fmt.Sprintf("Calico may`, `	case broken(collectedIsNoProof):
		return Finding{}
	case !n.Ready:
		return Finding{Verdict: Never, Remedy: offRemedy, Reason: fmt.Sprintf("Calico may`},
	{"calico.go", `return !is.since.IsZero() && !is.since.Before(since)`,
		`return broken(contactIsRecent) || !is.since.IsZero() && !is.since.Before(since)`},
	{"calico.go", `	case !n.Ready:
		return Finding{Verdict: Never, Remedy: offRemedy,
			Reason: fmt.Sprintf("pod %s may still`, `	case !n.Ready && broken(offIsFreed):
		return Finding{Verdict: Wait, Frees: true}
	case !n.Ready:
		return Finding{Verdict: Never, Remedy: offRemedy,
			Reason: fmt.Sprintf("pod %s may still`},
	{"calico.go", `	return s.End != nil && !s.End.Predates &&`, `	if broken(endsAreDated) && s.End != nil {
		s.End.After = s.End.At
	}
	return s.End != nil && !s.End.Predates &&`},
	{"calico.go", `return !d.contacts[node].since.IsZero()`,
		`return broken(forgottenEnds) || !d.contacts[node].since.IsZero()`},
	{"calico.go", `		return s.IP.boundOn(s.IP.Node)`, `		return broken(addsTakeTime) || s.IP.boundOn(s.IP.Node)`},
	{"calico.go", `	return s.End.Started
`, `	return broken(addsTakeTime) || s.End.Started
`},
	{"book.go", `	for _, a := range b.given[uid] { //`, `	for _, a := range b.given[uid] {
		if broken(observedSinceEnd) {
			break
		} //`},
	{"objects.go", `p.adopted() && p.StatusUID != p.PodUID }`,
		`p.adopted() && p.StatusUID != p.PodUID && !broken(importsAreConfirmed) }`},
	{"write.go", `is.Node == c.Away.Node && (`, `is.Node == c.Away.Node && !broken(laterPodsHaveIt) && (`},
	{"calico.go", `const addGivenUp = 10 * time.Minute
`, `var addGivenUp = 10 * time.Minute

func givenUp() time.Duration {
	if broken(addsEnd) {
		return 0
	}
	return addGivenUp
}
`},
	{"life.go", `a.Since.Add(addGivenUp)`, `a.Since.Add(givenUp())`},
	{"write.go", `return !is.starting() || is.UID != c.Starting.UID ||`,
		`return !broken(startedIsLookedUp) && (!is.starting() || is.UID != c.Starting.UID) ||`},
	{"objects.go", `return n.Off && !n.Ready }`, `return n.Off && (!n.Ready || broken(readyIsNotOff)) }`},
}

var modelMutated = flag.Bool("model.mutated", false, "the package was built with the switches of its rules")

// withSwitches runs tests of this package again, built with the switches of its rules.
func withSwitches(t *testing.T, run string) {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	source := map[string]string{}
	for _, m := range broke {
		if source[m.file] == "" {
			b, err := os.ReadFile(m.file)
			if err != nil {
				t.Fatal(err)
			}
			source[m.file] = string(b)
		}
		if n := strings.Count(source[m.file], m.is); n != 1 {
			t.Fatalf("%s has %q %d times", m.file, m.is, n)
		}
		source[m.file] = strings.Replace(source[m.file], m.is, m.becomes, 1)
	}
	for file, text := range source {
		path := filepath.Join(t.TempDir(), file)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		overlay.Replace[filepath.Join(dir, file)] = path
	}
	b, err := json.Marshal(overlay)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "overlay.json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"test", "-count=1", "-timeout=0", "-vet=off", "-overlay=" + path, "-run=" + run}
	if testing.Verbose() {
		args = append(args, "-v")
	}
	args = append(args, ".", "-args", "-model.mutated")
	flag.Visit(func(f *flag.Flag) {
		if strings.HasPrefix(f.Name, "model.") {
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}
