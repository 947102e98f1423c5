package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

// wipe removes from a directory the entries that match.
func (w *world) wipe(dir string, match func(name string) bool) {
	w.t.Helper()
	names, err := w.fs.ReadDir(dir)
	must.Do(w.t, err)
	for _, name := range names {
		if match(name) {
			must.Do(w.t, disk.RemoveAll(w.fs, filepath.Join(dir, name)))
		}
	}
	w.logf("wiped %s", dir)
}

func all(string) bool { return true }

// glob is what * of a shell matches.
func glob(name string) bool { return !strings.HasPrefix(name, ".") }

// inhabited has one pod of each kind, and says what each address was.
func inhabited(t *testing.T) (w *world, retained []netip.Addr, promised, job Attachment) {
	w = newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
	w.net.PromisedShare = 1
	att, retained, err := w.add("web-0", tenMinutes)
	must.Do(t, err)
	delete(w.netns, w.live[att].netns.Path)
	w.del(att)
	promised, _, err = w.add("web-1", tenMinutes)
	must.Do(t, err)
	job, _, err = w.add("job", ordinary)
	must.Do(t, err)
	return w, retained, promised, job
}

// What was lost must cost nobody an address: neither what runs, nor what is promised. The model checks that at each
// ADD.
func TestAWipeGivesNoAddressAwayAndEndsNoPromise(t *testing.T) {
	state := newWorld(t, testNetwork("10.1.0.0/28", "")).ledger().state
	for name, wipe := range map[string]func(w *world){
		"the network directory":      func(w *world) { must.Do(w.t, disk.RemoveAll(w.fs, "/data/net")) },
		"the network directory's *":  func(w *world) { w.wipe("/data/net", glob) },
		"the marker":                 func(w *world) { must.Do(w.t, w.fs.Remove("/data/net/"+markerName)) },
		"the round robin":            func(w *world) { must.Do(w.t, w.fs.Remove("/data/net/"+lastPrefix+"0")) },
		"the index":                  func(w *world) { must.Do(w.t, disk.RemoveAll(w.fs, filepath.Join(state, indexDir))) },
		"the index's files":          func(w *world) { w.wipe(filepath.Join(state, indexDir), all) },
		"the claims of what stopped": wipeRetainedClaims,
		"the sets":                   func(w *world) { must.Do(w.t, disk.RemoveAll(w.fs, filepath.Join(state, setsDir))) },
		"the network directory's *, after a restore": func(w *world) {
			must.Do(w.t, disk.RemoveAll(w.fs, "/data/net"))
			w.prepare()
			w.wipe("/data/net", glob)
		},
	} {
		for _, first := range []string{"ADD", "DEL", "sweep", "reboot"} {
			t.Run(name+", then "+first, func(t *testing.T) {
				w, retained, promised, job := inhabited(t)
				wipe(w)
				switch first {
				case "DEL":
					for _, att := range []Attachment{promised, job} {
						delete(w.netns, w.live[att].netns.Path)
						w.del(att)
					}
				case "sweep":
					w.expire()
				case "reboot":
					w.boot(time.Minute)
				}
				for i := 0; ; i++ {
					if _, _, err := w.add(fmt.Sprintf("other-%d", i), ordinary); errors.Is(err, ErrFull) {
						break
					}
				}
				w.expire()
				w.check()
				if l := w.live[promised]; l != nil {
					delete(w.netns, l.netns.Path)
					w.del(promised)
				}
				if _, addrs, err := w.add("web-0", tenMinutes); err != nil || !slices.Equal(addrs, retained) {
					w.failf("web-0 had %v and got %v, %v", retained, addrs, err)
				}
				w.add("web-1", tenMinutes)
				w.settle()
			})
		}
	}
}

// A release that was killed has freed one family, which is another pod's by now. The record of the other family says
// that both are promised: that must not make the other pod the one that its owner waits for.
func TestALostIndexMakesNoOtherPodTheHolderOfWhatAKilledReleaseLeft(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		w := newWorld(t, testNetwork("10.1.0.0/29", "fd00::/125"))
		w.net.PromisedShare = 1
		stopped(w, "web-0", tenMinutes)
		key := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, "eth0")
		addrs := w.promises[key].addrs
		hit = w.killAt(n, func() { must.Do(t, w.ledger().Release(key)) })
		must.Do(t, w.ledger().Prepare())
		_, err := w.ledger().Add(AddRequest{Attachment: w.newContainer(), Pod: Pod{Namespace: "default", Name: "web-1"},
			Netns: w.newNetns(), Policy: newOne, Requested: addrs[:1]})
		if err != nil && !errors.Is(err, ErrNotAvailable) {
			t.Fatal(err)
		}
		w.wipe(w.ledger().inState(claimsDir), all)
		must.Do(t, w.ledger().Prepare())
		w.wipe(w.ledger().inState(indexDir), all)
		_, err = w.ledger().Add(AddRequest{Attachment: w.newContainer(), Pod: Pod{Namespace: "default", Name: "web-0"},
			Netns: w.newNetns(), Policy: tenMinutes})
		if err != nil {
			t.Errorf("killed at operation %d: %v", n, err)
		}
	}
}

// An attachment whose addresses were all outside the ranges has got others beside them, and only these are promised.
func TestALostIndexLeavesAPromiseWithTheOneThatHasOlderAddressesToo(t *testing.T) {
	for name, next := range map[string]func(w *world, att Attachment){
		"its pod comes again": func(w *world, att Attachment) { w.add("web-0", tenMinutes) },
		"a sweep":             func(w *world, att Attachment) { w.expire() },
		"its DEL":             func(w *world, att Attachment) { w.del(att) },
		"the agent hands in its policy": func(w *world, att Attachment) {
			w.live[att].policy = nil
			w.setPolicy(att, tenMinutes)
			w.expire()
			w.del(att)
		},
		"its pod asks for nothing any more": func(w *world, att Attachment) {
			w.live[att].policy = nil
			w.setPolicy(att, ordinary)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			att, _, _ := w.add("web-0", tenMinutes)
			w.net.Ranges = testNetwork("10.2.0.0/28", "").Ranges
			w.addAgain(att)
			must.Do(t, disk.RemoveAll(w.fs, w.ledger().inState(indexDir)))
			w.lostIndex()
			next(w, att)
			for i := range 14 { // which the model sees get nothing that is promised
				w.add(fmt.Sprintf("other-%d", i), ordinary)
			}
			w.check()
			w.explained()
			w.settle()
		})
	}
}

// The pods have come again without a promise: what a power loss brought back of it would be nobody's.
func TestAPromiseWhoseClaimWasWipedDoesNotComeBackWithAPowerLoss(t *testing.T) {
	for name, wiped := range map[string]string{"the claims": "", "the marker, too": markerName} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			att, _, _ := w.add("web-0", tenMinutes)
			w.wipe(w.ledger().inState(claimsDir), all)
			if wiped != "" {
				w.wipe(w.ledger().dir, func(name string) bool { return name == wiped })
			}
			w.lostClaims()
			delete(w.netns, w.live[att].netns.Path)
			w.del(att)
			w.add("web-0", ordinary)
			w.losePower(0)
			w.dropUnreadable()
			w.check()
			w.explained()
		})
	}
}

// wipeRetainedClaims removes the claim of every address that is retained.
func wipeRetainedClaims(w *world) {
	l := w.ledger()
	slots, err := l.allSlots()
	must.Do(w.t, err)
	for _, s := range slots {
		if s.state == slotRetained {
			must.Do(w.t, disk.RemoveAll(w.fs, l.inState(claimsDir, s.retained.Key.hash())))
		}
	}
}

// A shared identity's pod that cannot have its own old addresses takes another pod's, and leaves none behind.
func TestATakeOverLetsTheOlderAddressesGo(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-a", shared)
	other := w.promises[NewKey("net", Pod{Namespace: "default", Name: "web-a"}, *shared, "eth0")].addrs
	w.net.Ranges[0][0].Start = netip.MustParseAddr("10.1.0.8") // web-a's address is in the range no more
	stopped(w, "web-b", shared)
	clear(w.promises)
	w.add("web-a", shared)
	w.check()
	if s, err := w.ledger().slot(other[0]); err != nil || s.state != slotFree {
		w.failf("%s, which nobody is promised, says %q, %v", other[0], s.raw, err)
	}
	w.settle()
}

// The entry that a killed ADD left must not be taken for the owner's: not by a rebuild either, for which the
// address files are lost.
func TestAKilledADDsEntryNeverBeatsTheOwners(t *testing.T) {
	for _, fails := range []bool{false, true} {
		for n, hit := 0, true; hit; n++ {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			stopped(w, "web-0", tenMinutes)
			for range 6 { // of which one may come before the owner in the index
				victim, ns := w.newContainer(), w.newNetns() // which lives on
				run := func(w *world) { w.addAs(victim, ns, "job", ordinary) }
				if fails {
					hit = w.broken(n, run)
				} else {
					hit = w.killAt(n, func() { run(w) })
				}
			}
			for i := range 12 {
				w.add(fmt.Sprintf("other-%d", i), ordinary)
			}
			before := w.owners()
			must.Do(t, disk.RemoveAll(w.fs, "/data/net"))
			w.prepare()
			for a, att := range w.owners() {
				if was, there := before[a]; there && att != was {
					w.failf("at operation %d: %s was %s's and is %s's", n, a, was, att)
				}
			}
		}
	}
}

// What a network holds is nobody's business but root's: host-local's files are 0600 as well.
func TestOnlyRootReadsTheFiles(t *testing.T) {
	w, _, _, _ := inhabited(t)
	w.add("web-a", shared)
	w.fs.files(func(path string, mode uint32) {
		if mode&0o077 != 0 {
			t.Errorf("%s has mode %o", path, mode)
		}
	})
}

// broken runs a command on a disk that fails for good from its nth change on, but for the marker.
func (w *world) broken(n int, run func(*world)) (hit bool) {
	w.fs.before = func(op, path string) error {
		if n--; n < 0 && filepath.Base(path) != markerName {
			hit = true
			return unix.EIO
		}
		return nil
	}
	defer func() { w.fs.before = nil }()
	w.tolerant(run)
	return hit
}

// owners is who has which address.
func (w *world) owners() map[netip.Addr]Attachment {
	w.t.Helper()
	list, err := w.ledger().List()
	must.Do(w.t, err)
	owners := map[netip.Addr]Attachment{}
	for _, ad := range list {
		if ad.State == StateBound {
			owners[ad.Addr] = ad.Attachment
		}
	}
	return owners
}

// Stayput takes an attachment of host-local's over file by file. If a power loss comes in between, the boot frees one
// of its addresses and keeps the other.
func TestAnAddressThatABootFreesIsNoLongerItsFormerOwners(t *testing.T) {
	for n := range 20 { // the names decide in which order the entries are read
		w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
		for range n {
			w.newContainer()
		}
		w.add("web-0", ordinary)
		w.hostLocalAdd()
		former := w.known[len(w.known)-1]
		addrs := w.live[former].addrs
		must.Do(t, w.fs.Chmod("/data/net/"+addrs[0].String(), modeOurs))
		w.boot(time.Minute)
		w.prepare()
		for i := range 13 {
			w.add(fmt.Sprintf("other-%d", i), ordinary)
		}
		now := w.owners()
		if now[addrs[0]] == former || now[addrs[0]].ContainerID == "" || now[addrs[1]] != former {
			t.Fatalf("%s has %v, of %v: this test shows nothing", former, now, addrs)
		}
		must.Do(t, disk.RemoveAll(w.fs, "/data/net"))
		w.prepare()
		if after := w.owners()[addrs[0]]; after != now[addrs[0]] {
			t.Errorf("after a wipe %s is %s's, not %s's", addrs[0], after, now[addrs[0]])
		}
	}
}
