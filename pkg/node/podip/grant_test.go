package podip

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/pool"
)

func TestThePluginIsToldWhetherThereArePools(t *testing.T) {
	inWorld(t, func(w *world) {
		want := func(want grants.Served) {
			t.Helper()
			want.Version = 1
			if is, err := w.ledgers.Grants().Served(); err != nil || is == nil || fmt.Sprint(*is) != fmt.Sprint(want) {
				t.Errorf("the plugin was told of %+v, %v, want %+v", is, err, want)
			}
		}
		want(grants.Served{More: true})
		w.k.SetPools(`{"spiderpool":true}`)
		w.pass(time.Second)
		want(grants.Served{Spiderpool: true})
		w.k.SetPools("")
		w.pass(time.Second)
		want(grants.Served{None: true})
		w.k.SetPools("true") // by a controller that says no more
		w.pass(time.Second)
		want(grants.Served{More: true})
		w.end()
		w.k.SetPools("") // too late
		w.k = newKeeper(w.o, w.c)
		want(grants.Served{More: true}) // an agent that has heard nothing tells nothing
	})
}

// Whoever writes the annotation gains nothing: the PodIPs say whose an address is.
func TestWhatThePodIPsDoNotSayIsNotGranted(t *testing.T) {
	for how, change := range map[string]func(w *world, ip *v1alpha1.PodIP){
		"another pod's":             func(_ *world, ip *v1alpha1.PodIP) { ip.Spec.PodUID = uid(7) },
		"of another mode":           func(_ *world, ip *v1alpha1.PodIP) { ip.Spec.Mode = v1alpha1.ModeRouted },
		"had by the pod on another": func(_ *world, ip *v1alpha1.PodIP) { ip.Spec.AdoptedOn = "n2" },
		"there is no PodIP":         func(w *world, _ *v1alpha1.PodIP) { delete(w.c.ips, addr(1).String()) },
		"its node is declared off":  func(w *world, _ *v1alpha1.PodIP) { w.c.off = true },
		"its node does not exist":   func(w *world, _ *v1alpha1.PodIP) { w.c.node = "" },
		"named is another node":     func(_ *world, ip *v1alpha1.PodIP) { ip.Status = saidOf("n2", v1alpha1.PodIPBound) },
		"ended here, as the PodIP is": func(_ *world, ip *v1alpha1.PodIP) {
			ip.Status = saidOf(node, v1alpha1.PodIPRetained)
		},
	} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.putIP(addr(1), uid(1), "web-1")
				w.c.mu.Lock()
				change(w, w.c.ips[addr(1).String()])
				w.c.mu.Unlock()
				w.c.put(w.pod(1))
				w.pass(time.Minute)
				w.wantGranted(1, false)
				if n := w.c.count("report"); n > 0 {
					t.Errorf("%d writes of its status", n)
				}
			})
		})
	}
}

// saidOf is a status about pod 1.
func saidOf(node string, phase v1alpha1.PodIPPhase) v1alpha1.PodIPStatus {
	return v1alpha1.PodIPStatus{Phase: phase, PodUID: uid(1), NodeName: node}
}

func TestNothingIsGrantedOnIgnorance(t *testing.T) {
	for how, c := range map[string]struct{ breaks, mends func(w *world) }{
		"the API server is away": {func(w *world) { w.c.fail(errDown) }, func(w *world) { w.c.fail(nil) }},
		"PodIPs cannot be read": {
			func(w *world) { w.c.mu.Lock(); defer w.c.mu.Unlock(); w.c.failIP = errDown },
			func(w *world) { w.c.mu.Lock(); defer w.c.mu.Unlock(); w.c.failIP = nil },
		},
		"the runtime is upset": {func(w *world) { w.r.fail(errors.New("upset")) }, func(w *world) { w.r.fail(nil) }},
		"no leader renews the mark": {
			func(w *world) { w.c.mu.Lock(); w.c.away = true; w.c.mu.Unlock(); w.pass(2 * pool.MarkLost) },
			func(w *world) { w.c.mu.Lock(); w.c.away = false; w.c.mu.Unlock() },
		},
		"an epoch is open": {
			func(w *world) { w.c.putAudit(audit(5, v1alpha1.PodIPAuditRecalling)); w.pass(time.Second) },
			func(w *world) { w.c.putAudit(audit(5, v1alpha1.PodIPAuditSettled)) },
		},
		"the audit is older than one before": {
			func(w *world) {
				w.c.mu.Lock()
				w.c.marks = 0
				w.c.mu.Unlock()
				w.c.putAudit(audit(1, v1alpha1.PodIPAuditSettled))
				w.pass(time.Second)
			},
			func(w *world) { w.c.putAudit(audit(6, v1alpha1.PodIPAuditSettled)) },
		},
	} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.pass(3 * pool.MarkEvery)
				c.breaks(w)
				w.given(1)
				w.pass(5 * time.Second)
				w.wantGranted(1, false)
				w.wantPhase(1, "")
				c.mends(w)
				w.pass(2 * time.Minute)
				w.wantGranted(1, true)
				w.wantPhase(1, v1alpha1.PodIPBound)
			})
		})
	}
}

// A pod of two addresses starts with both or not at all.
func TestAPodOfTwoAddressesHasOneGrant(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.pod(1)
		both := strings.TrimSuffix(text(1), "]") + "," + strings.TrimPrefix(text(2), "[")
		p.Annotations[v1alpha1.AnnotationAddresses] = both
		w.putIP(addr(1), uid(1), p.Name)
		w.c.put(p)
		w.pass(time.Minute)
		if got := w.file(1); got != "" || w.status(1).Phase != "" {
			t.Errorf("with one PodIP it is granted %q", got)
		}
		w.putIP(addr(2), uid(1), p.Name)
		w.pass(time.Minute)
		if got := w.file(1); got != both || w.status(1).NodeName != node || w.status(2).NodeName != node {
			t.Errorf("with both PodIPs it is granted %q; the statuses are %+v and %+v", got, w.status(1), w.status(2))
		}
		w.c.remove(uid(1))
		w.pass(time.Minute)
		if w.status(1).Phase != v1alpha1.PodIPRetained || w.status(2).Phase != v1alpha1.PodIPRetained {
			t.Errorf("gone, the statuses are %+v and %+v", w.status(1), w.status(2))
		}
	})
}

// Grants end with the boot, and with a wipe of the state directory: the PodIPs say who had one. Each grant has a write
// of its own, though the PodIP names the node already.
func TestWhatThePodIPsSayIsGrantedAgain(t *testing.T) {
	for how, lose := range map[string]func(w *world){
		"boot": func(w *world) { w.clock.boot = "boot-2" },
		"wipe": func(w *world) { check(w.t, os.RemoveAll(filepath.Join(w.ledgers.StateDir, "pools"))) },
	} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.given(1)
				w.pass(time.Second)
				w.given(2)
				w.pass(time.Second)
				w.end()
				lose(w)
				w.wantGranted(1, false)
				w.c.remove(uid(2)) // meanwhile
				w.c.mu.Lock()
				version := w.c.ips[addr(1).String()].ResourceVersion
				since := w.c.ips[addr(1).String()].Status.Since
				w.c.mu.Unlock()
				w.starts(-1)
				w.pass(time.Minute)
				w.wantGranted(1, true)
				w.wantGranted(2, false)
				w.wantPhase(2, v1alpha1.PodIPRetained)
				w.c.mu.Lock()
				defer w.c.mu.Unlock()
				if ip := w.c.ips[addr(1).String()]; ip.ResourceVersion == version || ip.Status.Since.Equal(since) {
					t.Errorf("the grant had no write of its own: %+v", ip)
				}
			})
		})
	}
}

// What people delete under a running agent is granted again: all of it at once, a single one by the next look.
func TestAGrantThatIsDeletedIsGivenAgain(t *testing.T) {
	for name, what := range map[string]struct {
		lost  func(w *world) string
		after time.Duration
	}{
		"all": {func(w *world) string { return filepath.Join(w.ledgers.StateDir, "pools") }, servedAgain + time.Second},
		"one": {func(w *world) string { return w.ledgers.Grants().Path(uid(1)) }, discoverEvery + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.given(1)
				w.pass(time.Minute)
				w.wantGranted(1, true)
				check(t, os.RemoveAll(what.lost(w)))
				w.wantGranted(1, false)
				w.pass(what.after)
				w.wantGranted(1, true)
			})
		})
	}
}

// An API server makes no new version of an object that stays as it is. So two writes within a second differ, too.
func TestEachNamingIsANewStatus(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.pass(time.Second)
		before := w.status(1).Since
		_, err := ledger.Revoke(w.ledgers, uid(1))
		check(t, err)
		w.c.mu.Lock()
		ahead := before.Add(time.Hour) // by a clock that was ahead
		w.c.ips[addr(1).String()].Status.Since.Time = ahead
		w.c.mu.Unlock()
		w.k.pods.enqueueAll()
		w.pass(time.Second)
		w.wantGranted(1, true)
		if got := w.status(1).Since; !got.After(ahead) {
			t.Errorf("since %s, want later than %s", got, ahead)
		}
	})
}

// What was read before a report for an epoch is not granted after it: it may be of before a restore.
func TestWhatWasReadBeforeAReportIsNotGrantedAfterIt(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.pass(time.Second)
		_, err := ledger.Revoke(w.ledgers, uid(1))
		check(t, err)
		for step, report := range map[string]func(c *podCheck){
			"after the read": func(*podCheck) {
				w.k.reporter.changed(func() { w.k.reporter.begun++ })
				check(t, w.ledgers.Grants().EndPending())
			},
		} {
			pod, _ := w.k.pods.get(uid(1))
			addrs, err := pod.addrs()
			check(t, err)
			c := &podCheck{checker: w.k.checker, pod: pod, addrs: addrs}
			c.doubt, c.begun = w.k.reporter.doubt()
			check(t, c.read(t.Context()))
			report(c)
			writes := w.c.count("report")
			if v, err := c.act(t.Context()); v != soon || err != nil {
				t.Errorf("%s: %v, %v", step, v, err)
			}
			if n := w.c.count("report") - writes; n > 0 || w.file(1) != "" {
				t.Errorf("%s: %d writes, granted %q", step, n, w.file(1))
			}
		}
		writes := w.c.count("report")
		w.c.wrote = func() { check(t, w.ledgers.Grants().EndPending()) } // a report between the write and the grant
		w.k.pods.enqueueAll()
		w.pass(10 * time.Millisecond)
		if n := w.c.count("report") - writes; n == 0 || w.file(1) != "" {
			t.Errorf("%d writes, granted %q", n, w.file(1))
		}
		w.c.wrote = func() {}
		w.pass(time.Minute)
		w.wantGranted(1, true)
	})
}

// A backup that is younger than the mark can tell brings a pod back that has ended here.
func TestAPodThatHasEndedHereIsNeverGrantedAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.given(1)
		w.runs(1)
		w.pass(time.Second)
		w.c.remove(uid(1))
		w.stops(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)

		w.c.mu.Lock()
		w.c.ips[addr(1).String()].Status = v1alpha1.PodIPStatus{}
		w.c.mu.Unlock()
		w.c.put(p)
		w.pass(time.Minute)
		w.wantGranted(1, false)
		w.wantPhase(1, v1alpha1.PodIPRetained)
	})
}

// A pod that had its address before a pool had it is named, too, and said to be gone, though nothing on the node tells
// that its address is of a pool.
func TestAnAdoptedPodIsNamedAndEnded(t *testing.T) {
	for how, ends := range map[string]func(w *world){
		"deleted":                       func(w *world) { w.c.remove(uid(1)) },
		"deleted while the agent is":    func(w *world) { w.end(); w.c.remove(uid(1)); w.starts(-1) },
		"deleted before it was noticed": nil,
	} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.takenOver()
				w.c.mu.Lock()
				w.c.ips[addr(1).String()].Spec.AdoptedOn = node
				w.c.mu.Unlock()
				if ends != nil {
					w.pass(2 * discoverEvery)
					w.wantPhase(1, v1alpha1.PodIPBound)
					if got := w.file(1); got != noAddresses {
						t.Errorf("it is granted %q", got)
					}
					ends(w)
				} else {
					w.c.remove(uid(1))
				}
				w.pass(2 * discoverEvery)
				if w.status(1).Phase == v1alpha1.PodIPRetained {
					t.Error("said to be gone while it runs")
				}
				w.unmount(1)
				w.r.mu.Lock()
				clear(w.r.sandboxes)
				w.r.mu.Unlock()
				w.pass(2 * discoverEvery)
				w.wantPhase(1, v1alpha1.PodIPRetained)
				if len(w.r.stopped) > 0 {
					t.Errorf("stopped %v", w.r.stopped)
				}
			})
		})
	}
}

// One report for an epoch: what is granted, and what runs.
func TestAReportSaysWhatIsGrantedAndWhatRuns(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.given(2)
		w.pass(time.Second)
		w.wantGranted(2, true)
		w.c.put(w.pod(3)) // without a PodIP
		running := func(want ...bool) {
			t.Helper()
			var is []bool
			for _, h := range w.c.report.Spec.Held {
				is = append(is, h.Running)
			}
			if !slices.Equal(is, want) {
				t.Errorf("running %v, want %v", is, want)
			}
		}
		w.c.putAudit(audit(5, v1alpha1.PodIPAuditRecalling))
		w.pass(time.Second)
		w.wantReport(5, 1, 2)
		running(true, false)
		if n := w.c.count("say"); n != 2 { // with that of the epoch before
			t.Errorf("%d reports, want 2", n)
		}

		// The backup lacks pod 2 and its PodIP: nothing but the grant tells of it.
		w.c.fail(errDown)
		w.c.mu.Lock()
		delete(w.c.pods, uid(2))
		delete(w.c.ips, addr(2).String())
		w.c.mu.Unlock()
		w.end()
		w.c.fail(nil)
		w.starts(-1)
		w.c.putAudit(audit(7, v1alpha1.PodIPAuditRecalling))
		w.pass(20 * time.Second)
		w.wantReport(7, 1)
		w.wantGranted(2, false)

		// Nothing is said while it is not known.
		for what, broken := range map[string]func(bool){
			"the runtime": func(is bool) { w.r.fail(map[bool]error{true: errors.New("upset")}[is]) },
			"the node": func(is bool) {
				w.c.mu.Lock()
				defer w.c.mu.Unlock()
				if w.c.node = "node-uid"; is {
					w.c.node = ""
				}
			},
		} {
			epoch := v1alpha1.EpochOf(&w.c.report.Spec.Epoch) / 1000
			broken(true)
			w.c.putAudit(audit(epoch+2, v1alpha1.PodIPAuditRecalling))
			w.pass(time.Minute)
			w.wantReport(epoch, 1)
			if w.k.Trouble() == "" {
				t.Errorf("nothing is said of %s", what)
			}
			broken(false)
			w.pass(time.Minute)
			w.wantReport(epoch+2, 1)
		}
	})
}
