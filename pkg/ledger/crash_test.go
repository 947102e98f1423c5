package ledger

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

// The sweeps of this file kill, tear and fail every operation of every command. test/crash does the same to
// the real binary with kill -9 and injected errors; only this seam can lose what was not fsynced.

// act is one command under test with the state that it needs.
type act struct {
	name    string
	prepare func(w *world)
	run     func(w *world)
}

var theAtt, theNs = Attachment{"victim", "eth0"}, Netns{Path: "/run/netns/victim", Dev: 4, Ino: 77}

// addVictim ADDs the victim. Where that ends an older promise of the pod (it asks for nothing any more, or it
// does not wait for its predecessor) the promise counts no more from the call on.
func addVictim(pod string, p *retention.Policy) func(*world) {
	return func(w *world) {
		if p == ordinary || p == newOne {
			delete(w.promises, NewKey("net", Pod{Namespace: "default", Name: pod}, *p, "eth0"))
		}
		w.netns[theNs.Path] = theNs
		w.addAs(theAtt, theNs, pod, p)
	}
}

// stopped is a pod that ran and was stopped.
func stopped(w *world, pod string, p *retention.Policy) {
	att, _, err := w.add(pod, p)
	if err != nil {
		w.failf("prepare: %v", err)
	}
	delete(w.netns, w.live[att].netns.Path)
	w.del(att)
}

func acts() []act {
	fill := func(w *world) {
		for i := 0; ; i++ {
			if _, _, err := w.add(fmt.Sprintf("filler-%d", i), ordinary); errors.Is(err, ErrFull) {
				return
			}
		}
	}
	return slices.Concat(poolActs(), []act{
		{"first ADD of a retained pod", func(*world) {}, addVictim("web-0", tenMinutes)},
		{"ADD of an ordinary pod", func(w *world) { stopped(w, "web-0", tenMinutes) }, addVictim("job", ordinary)},
		{"restore", func(w *world) { stopped(w, "web-0", tenMinutes) }, addVictim("web-0", tenMinutes)},
		{"restore with another policy", func(w *world) { stopped(w, "web-0", tenMinutes) }, addVictim("web-0", forever)},
		{"restore of a pod that asks for nothing any more", func(w *world) { stopped(w, "web-0", tenMinutes) },
			addVictim("web-0", ordinary)},
		{"restore over a dead predecessor", func(w *world) {
			att, _, _ := w.add("web-0", tenMinutes)
			delete(w.netns, w.live[att].netns.Path)
		}, addVictim("web-0", tenMinutes)},
		{"AllocateNew over a live predecessor", func(w *world) { w.add("web-0", newOne) }, addVictim("web-0", newOne)},
		{"supersede after the range moved", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.net = testNetwork("10.9.0.0/28", "fd09::/64")
			clear(w.promises) // what lies outside the ranges is not restored
		}, addVictim("web-0", tenMinutes)},
		{"restore after the network became dual-stack", func(w *world) {
			dual := w.net
			w.net = testNetwork("10.1.0.0/28", "")
			stopped(w, "web-0", tenMinutes)
			w.net = dual
		}, addVictim("web-0", tenMinutes)},
		{"restore after the network became single-stack", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.net = testNetwork("10.1.0.0/28", "")
		}, addVictim("web-0", tenMinutes)},
		{"take-over after the network became dual-stack", func(w *world) {
			dual := w.net
			w.net = testNetwork("10.1.0.0/28", "")
			stopped(w, "web-a", shared)
			w.net = dual
		}, addVictim("web-b", shared)},
		{"ADD of addresses that are overdue for another pod", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.advance(11 * time.Minute)
		}, func(w *world) {
			k := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, "eth0")
			w.netns[theNs.Path] = theNs
			pod := Pod{Namespace: "default", Name: "web-1"}
			r, err := w.ledger().Add(AddRequest{Attachment: theAtt, Pod: pod, Netns: theNs, Policy: tenMinutes,
				Requested: w.promises[k].addrs})
			w.logf("ADD %s %v -> %v %v", pod, w.promises[k].addrs, addrsOf(r), err)
			w.acknowledge(theAtt, theNs, pod, tenMinutes, r, err)
		}},
		{"second ADD of an attachment under other ranges", func(w *world) {
			addVictim("web-0", tenMinutes)(w)
			w.net = testNetwork("10.9.0.0/28", "fd09::/64")
			clear(w.promises) // what lies outside the ranges is not restored
		}, addVictim("web-0", tenMinutes)},
		{"take-over in a shared identity", func(w *world) { stopped(w, "web-a", shared) }, addVictim("web-b", shared)},
		{"DEL that retains", addVictim("web-0", tenMinutes), func(w *world) { w.del(theAtt) }},
		{"DEL that frees", addVictim("job", ordinary), func(w *world) { w.del(theAtt) }},
		{"lazy expiry in a full range", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.advance(11 * time.Minute)
			fill(w)
			for _, att := range w.attachments() { // one address is the expired one
				w.del(att)
				break
			}
			stopped(w, "web-1", tenMinutes)
			w.advance(11 * time.Minute)
		}, addVictim("job", ordinary)},
		{"expiry by the agent", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.advance(11 * time.Minute)
		}, func(w *world) {
			_, _, err := w.ledger().Expire()
			w.logf("expire -> %v", err)
		}},
		{"release", func(w *world) { stopped(w, "web-0", forever) }, func(w *world) {
			k := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *forever, "eth0")
			delete(w.promises, k) // from its call on, nothing is promised
			err := w.ledger().Release(k)
			w.logf("release -> %v", err)
		}},
		{"policy by the agent", func(w *world) {
			w.netns[theNs.Path] = theNs
			w.addAs(theAtt, theNs, "web-0", nil)
		}, func(w *world) {
			pod := Pod{Namespace: "default", Name: "web-0"}
			r, err := w.ledger().SetPolicy(theAtt, pod, *tenMinutes, theNs)
			w.logf("SetPolicy -> %v", err)
			if err == nil && w.live[theAtt] != nil {
				k := NewKey("net", pod, *tenMinutes, "eth0")
				w.promises[k] = &promise{addrs: r.Addrs, policy: *tenMinutes, holder: &theAtt}
				w.live[theAtt].key = &k
			}
		}},
		{"move from a container that is over", func(w *world) {
			att, addrs, _ := w.add("web-0", ordinary)
			delete(w.netns, w.live[att].netns.Path)
			delete(w.live, att)
			w.netns[theNs.Path] = theNs
			w.live[theAtt] = &liveAttachment{pod: Pod{Namespace: "default", Name: "web-0"}, addrs: addrs, netns: theNs}
		}, func(w *world) {
			l := w.live[theAtt]
			from, err := w.ledger().List()
			if err != nil {
				w.failf("List: %v", err)
			}
			r, err := w.ledger().Move(from[0].Attachment,
				AddRequest{Attachment: theAtt, Pod: l.pod, Netns: theNs, Policy: tenMinutes, Requested: l.addrs})
			w.logf("Move -> %v %v", addrsOf(r), err)
			if err == nil {
				k := NewKey("net", l.pod, *tenMinutes, "eth0")
				w.promises[k] = &promise{addrs: r.Addrs, policy: *tenMinutes, holder: &theAtt}
				l.key = &k
			}
		}},
		{"first command of a boot, without the claims", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			stopped(w, "web-1", forever)
			stopped(w, "web-a", shared)
			wipeRetainedClaims(w)
			w.fs.syncAll(w.fs.root) // or a power loss takes the records, too
			w.boot(time.Minute)
		}, addVictim("web-1", forever)},
		{"first ADD after the claims were lost", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			stopped(w, "web-1", forever)
			stopped(w, "web-a", shared)
			wipeRetainedClaims(w)
			w.fs.syncAll(w.fs.root) // or a power loss takes the records, too
		}, addVictim("web-b", shared)},
		{"first command after the directory was emptied", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.add("web-1", forever)
			w.add("job", ordinary)
			w.wipe("/data/net", glob)
		}, addVictim("web-0", tenMinutes)},
		{"first command of a boot", func(w *world) {
			stopped(w, "web-0", tenMinutes)
			w.add("web-1", forever)
			w.add("job", ordinary)
			w.boot(time.Minute)
		}, addVictim("web-1", forever)},
	})
}

// aftermath is what a node does next. It must find every promise kept and, at the end, nothing leaked.
func aftermath(w *world, r *rand.Rand) {
	w.t.Helper()
	if r.IntN(2) == 0 { // the runtime undoes the command that failed; often it never does
		w.del(theAtt)
	}
	if _, ok := w.netns[theNs.Path]; ok && r.IntN(2) == 0 && w.live[theAtt] == nil {
		delete(w.netns, theNs.Path)
	}
	for i := range 3 {
		w.add(fmt.Sprintf("other-%d", i), ordinary)
	}
	// Everybody comes back: with the namespaces of the dead gone each gets what it was promised.
	for _, att := range w.attachments() {
		if l := w.live[att]; l.key != nil {
			delete(w.netns, l.netns.Path)
			if r.IntN(2) == 0 {
				w.del(att)
			}
		}
	}
	delete(w.netns, theNs.Path)
	for _, pod := range []string{"web-0", "web-1"} {
		k := NewKey("net", Pod{Namespace: "default", Name: pod}, *tenMinutes, "eth0")
		if p := w.promises[k]; p != nil {
			if p.holder != nil {
				w.ended(*p.holder)
			}
			policy := p.policy
			if _, _, err := w.add(pod, &policy); err != nil && !(errors.Is(err, ErrFull) && w.expired(p)) {
				w.failf("%s does not come back: %v", pod, err)
			}
		} else {
			w.add(pod, tenMinutes)
		}
	}
	w.poolAftermath()
	w.settle()
}

func prepared(t *testing.T, a act) *world {
	w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
	a.prepare(w)
	return w
}

func TestKilledAtEveryOperationTheNextCommandsFindAllPromises(t *testing.T) {
	for _, a := range acts() {
		t.Run(a.name, func(t *testing.T) {
			points := 0
			for n := 0; ; n++ {
				hit := false
				for variant := range uint64(4) {
					w := prepared(t, a)
					w.logf("kill at operation %d, variant %d", n, variant)
					if hit = w.killAt(n, func() { a.run(w) }); !hit {
						break
					}
					aftermath(w, rand.New(rand.NewPCG(variant, uint64(n))))
				}
				if !hit {
					break
				}
				points++
			}
			if points == 0 {
				t.Fatal("the command changes nothing: the sweep proves nothing")
			}
		})
	}
}

func TestPowerLossAtEveryOperationKeepsWhatWasAcknowledged(t *testing.T) {
	for _, a := range acts() {
		t.Run(a.name, func(t *testing.T) {
			for n := 0; ; n++ {
				hit := false
				for variant := range uint64(24) {
					r := rand.New(rand.NewPCG(variant, uint64(n)))
					keep := []string{"durable", "all", "torn", "mixed"}[min(variant, 3)]
					w := prepared(t, a)
					w.logf("power loss at operation %d, keeping %s, variant %d", n, keep, variant)
					// Also behind the last operation: everything was acknowledged.
					hit = w.killAt(n, func() { a.run(w) })
					w.fs.lose(keep, r)
					w.boot(time.Duration(r.IntN(60)) * time.Second)
					aftermath(w, r)
				}
				if !hit {
					break
				}
			}
		})
	}
}

func TestEveryFailingOperationFailsCleanly(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EIO, unix.EROFS, unix.EMFILE} {
		for _, a := range acts() {
			for _, lasting := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%v/lasting=%t", a.name, errno, lasting), func(t *testing.T) {
					for n := 0; ; n++ {
						w := prepared(t, a)
						w.logf("%v at operation %d", errno, n)
						left, hit := n, false
						w.fs.before = func(op, path string) error {
							if left--; left == -1 || lasting && left < 0 {
								hit = true
								return errno
							}
							return nil
						}
						w.tolerant(a.run)
						w.fs.before = nil
						if !hit {
							break
						}
						aftermath(w, rand.New(rand.NewPCG(0, uint64(n))))
					}
				})
			}
		}
	}
}

// tolerant runs a command whose disk fails: its error is the right answer, and changes nothing in the model.
func (w *world) tolerant(run func(*world)) {
	defer func() {
		if p := recover(); p != nil && p != errTolerated {
			panic(p)
		}
	}()
	t := w.t
	w.t = tolerantTB{t}
	defer func() { w.t = t }()
	run(w)
}

var errTolerated = errors.New("tolerated")

type tolerantTB struct{ testing.TB }

func (tolerantTB) Fatalf(string, ...any) { panic(errTolerated) }

// Whatever a killed rebuild left, once a command has finished it the marker names this boot on the disk, too: else what
// a power loss tears of host-local's files would stay taken.
func TestAPowerLossAfterAKilledRebuildLeavesNoAddressTaken(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		for seed := range uint64(20) {
			w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
			w.hostLocalAdd()
			hit = w.killAt(n, w.prepare)
			w.prepare()
			w.logf("killed at operation %d, power loss %d", n, seed)
			w.fs.lose("mixed", rand.New(rand.NewPCG(seed, 0)))
			w.boot(time.Minute)
			w.prepare()
			w.check()
		}
	}
}

// A killed ADD has ended an overdue promise, and somebody was told so: what a power loss then brings back of it must
// not be a promise again, not even if the wall clock was set back, so that it has time left.
func TestAPowerLossBringsBackNoPromiseThatAKilledADDEnded(t *testing.T) {
	key := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, "eth0")
	for n, hit := 0, true; hit; n++ {
		for seed := range uint64(20) {
			w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
			stopped(w, "web-0", tenMinutes)
			addrs := w.promises[key].addrs
			w.fs.lose("all", nil) // nothing: the record is durable from now on
			w.advance(11 * time.Minute)
			w.netns[theNs.Path] = theNs
			hit = w.killAt(n, func() {
				_, err := w.ledger().Add(AddRequest{Attachment: theAtt, Pod: Pod{Namespace: "default", Name: "job"},
					Netns: theNs, Policy: ordinary, Requested: addrs[:1]}) // the other one stays behind
				must.Do(t, err)
			})
			ended := errors.Is(w.ledger().Release(key), ErrUnknownClaim)
			w.jump(-time.Hour)
			w.fs.lose("mixed", rand.New(rand.NewPCG(seed, 0)))
			w.boot(time.Minute)
			must.Do(t, w.ledger().Prepare())
			if err := w.ledger().Release(key); ended && !errors.Is(err, ErrUnknownClaim) {
				t.Fatalf("killed at operation %d, power loss %d: the promise is back: %v", n, seed, err)
			}
		}
	}
}

// A killed ADD leaves the record of the promise that it kept where the next one writes its own.
func TestAPowerLossTurnsNoFileIntoWhatAKilledADDLeft(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		for seed := range uint64(20) {
			w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
			stopped(w, "web-0", tenMinutes)
			w.fs.lose("all", nil) // nothing: the record is durable from now on
			w.netns[theNs.Path] = theNs
			hit = w.killAt(n, func() { w.addAs(theAtt, theNs, "web-0", tenMinutes) })
			w.add("web-1", tenMinutes)
			w.logf("killed at operation %d, power loss %d", n, seed)
			w.fs.lose("mixed", rand.New(rand.NewPCG(seed, 0)))
			w.boot(time.Minute)
			w.prepare()
			w.check()
		}
	}
}
