package podip

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/node/cri"
)

// planted is a pod whose author has written its annotation while nothing kept him from it.
func (w *world) planted(n int) *Pod {
	p := w.pod(n)
	p.Annotations[v1alpha1.AnnotationAddresses] = strings.ReplaceAll(text(n), "guard-1", "guard-0")
	w.c.put(p)
	return p
}

// wantServed wants that the plugin was told of pools, under a guard, empty if of none.
func (w *world) wantServed(guard string) {
	w.t.Helper()
	is, err := w.ledgers.Mailbox().Served()
	if err != nil || is == nil || is.None != (guard == "") || is.Guard != guard {
		w.t.Errorf("the plugin was told of %+v, %v, want guard %q", is, err, guard)
	}
}

func TestThePluginIsToldWhetherThereArePools(t *testing.T) {
	inWorld(t, func(w *world) {
		w.wantServed("guard-1")
		w.k.SetPools(strings.ReplaceAll(served, "guard-1", "guard-2"))
		w.pass(time.Second)
		w.wantServed("guard-2")
		w.k.SetPools("")
		w.pass(time.Second)
		w.wantServed("")
		w.k.SetPools("true") // by a controller that says no more
		w.pass(time.Second)
		if is, err := w.ledgers.Mailbox().Served(); err != nil || is.None || is.Guard != "" || !is.More {
			t.Errorf("the plugin was told of %+v, %v", is, err)
		}
		w.end()
		w.k.SetPools("") // too late
		w.k = newKeeper(w.o, w.c)
		if is, err := w.ledgers.Mailbox().Served(); err != nil || is.None {
			t.Errorf("an agent that has heard nothing told the plugin of %+v, %v", is, err)
		}
	})
}

func TestAnAnnotationThatNobodyVouchesForSaysNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.planted(1)
		w.putIP(addr(1), uid(7), "victim")
		w.planted(2) // there is no PodIP at all
		w.pass(time.Minute)
		for n := range 2 {
			if said := w.file(n + 1); said != "" {
				t.Errorf("the plugin was told %s", said)
			}
		}
		// It runs, with another address, and nodes are asked.
		w.netns(1)
		w.r.mu.Lock()
		w.r.sandboxes["c1"] = cri.Sandbox{ID: "c1", Ready: true, Pod: w.name(1), Annotations: p.Annotations}
		w.r.mu.Unlock()
		w.k.Look(w.name(1), p.Annotations, false)
		w.c.putAudit(audit(5, 0))
		w.pass(time.Minute)
		if a := w.c.report; a == nil || !a.Spec.Round.Equal(micro(5)) || len(a.Spec.Held) > 0 {
			t.Errorf("the node answers %+v", a)
		}
		w.wantPhase(1, "")
		if len(w.r.stopped) > 0 {
			t.Errorf("stopped %v", w.r.stopped)
		}
	})
}

// As of pods from before the guard was there, or was made again.
func TestAnAnnotationIsTrueIfThePodIPsAreThePods(t *testing.T) {
	inWorld(t, func(w *world) {
		w.planted(1)
		w.putIP(addr(1), uid(1), "web-1")
		w.pass(time.Second)
		want := strings.ReplaceAll(text(1), "guard-1", "guard-0")
		if said := w.file(1); said != want {
			t.Fatalf("the plugin was told %q", said)
		}
		// Also by another agent, which needs no API server for that, and of a pod that was told of under an earlier guard.
		w.end()
		w.putIP(addr(1), uid(9), "web-1")
		w.starts(-1)
		w.pass(time.Second)
		if said := w.file(1); said != want {
			t.Errorf("a second agent told %q", said)
		}
		path, err := w.ledgers.Mailbox().PodPath(uid(1))
		check(t, err)
		check(t, os.Chmod(path, 0o600)) // as an earlier version wrote it, of any pod
		if said, err := w.ledgers.Mailbox().Pod(uid(1)); err != nil || said != "" {
			t.Errorf("a file that nobody vouches for says %q, %v", said, err)
		}
	})
}

// The API server is away: it is not known whose the addresses are.
func TestNothingIsConfirmedOnIgnorance(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.mu.Lock()
		w.c.failIP = errDown
		w.c.mu.Unlock()
		w.planted(1)
		w.putIP(addr(1), uid(1), "web-1")
		w.pass(time.Minute)
		if said := w.file(1); said != "" {
			t.Errorf("the plugin was told %q", said)
		}
		w.c.mu.Lock()
		w.c.failIP = nil
		w.c.mu.Unlock()
		w.pass(time.Minute)
		if said := w.file(1); said == "" {
			t.Error("the plugin was told nothing")
		}
	})
}

// With the state directory the bars of pods that have ended are lost: until the next boot the plugin waits for the
// agent's word of each pod.
func TestAWipeHasThePluginWaitForTheAgentsWord(t *testing.T) {
	for name, away := range map[string]bool{"while the agent runs": false, "while it is away": true} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.c.putAudit(audit(5, 0))
				w.given(1)
				gone := w.given(2)
				w.runs(2)
				w.pass(time.Second)
				w.c.remove(string(gone.UID))
				w.stops(2)
				w.pass(time.Minute)
				w.wantBarred(2, true)
				if away {
					w.end()
				}
				check(t, os.RemoveAll(filepath.Join(w.ledgers.StateDir, mailbox.Dir)))
				if away {
					w.starts(-1)
				}
				w.pass(time.Minute)
				w.wantServed("guard-1")
				w.netns(2)
				if err := w.add(2); err == nil {
					t.Error("a pod that has ended starts again")
				}
				w.netns(1)
				check(t, w.add(1))
				w.del(1)
				w.end()
				w.clock.boot = "boot-2"
				w.planted(3) // no agent confirms it: the guard is named
				w.netns(3)
				check(t, w.add(3))
				w.starts(-1)
			})
		})
	}
}

// A pod that has ended here, and that a restored API server has again, or that another one bound here once more: its
// bar is lost with the state directory, and its PodIP still says that it has ended. So it is if the Node was deleted,
// too, and with it all that tells of the loss.
func TestAfterAWipeThePodIPTellsOfAPodThatHasEnded(t *testing.T) {
	for name, phase := range map[string]v1alpha1.PodIPPhase{"it has ended": v1alpha1.PodIPRetained,
		"it has not started": v1alpha1.PodIPAllocated} {
		for _, deleted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, Node deleted %t", name, deleted), func(t *testing.T) {
				inWorld(t, func(w *world) {
					w.c.putAudit(audit(5, 5))
					w.given(1) // or nothing was lost
					w.pass(time.Second)
					w.end()
					check(t, os.RemoveAll(filepath.Join(w.ledgers.StateDir, mailbox.Dir)))
					w.given(2)
					w.c.mu.Lock()
					w.c.ips[addr(2).String()].Status = v1alpha1.PodIPStatus{NodeName: node, PodUID: uid(2), Phase: phase}
					if deleted {
						w.c.report = nil
					}
					w.c.mu.Unlock()
					w.starts(-1)
					w.pass(time.Minute)
					w.wantBarred(2, phase == v1alpha1.PodIPRetained)
					w.netns(2)
					if err := w.add(2); (err == nil) != (phase == v1alpha1.PodIPAllocated) {
						t.Errorf("ADD: %v", err)
					}
				})
			})
		}
	}
}
