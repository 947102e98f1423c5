package ledger

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

// Addresses of pools: outside the ranges, and one that lies in them, as where a pool overlaps a network.
var (
	pooledBoth  = []netip.Addr{netip.MustParseAddr("10.6.0.5"), netip.MustParseAddr("fd06::5")}
	pooledOther = []netip.Addr{netip.MustParseAddr("10.6.0.6"), netip.MustParseAddr("fd06::5")}
	pooledFirst = []netip.Addr{netip.MustParseAddr("10.6.0.5")}
	pooledIn    = []netip.Addr{netip.MustParseAddr("10.1.0.6")}
)

func uidOf(n int) string { return fmt.Sprintf("6f1c6a5e-8f0e-4d3b-9a55-%012x", n) }

// addPooled is an ADD with addresses of pools. It must get these, or a good reason.
func (w *world) addPooled(
	att Attachment, ns Netns, pod string, uid int, policy *retention.Policy, addrs []netip.Addr,
) error {
	w.t.Helper()
	p := Pod{Namespace: "default", Name: pod, UID: uidOf(uid)}
	taken := slices.ContainsFunc(addrs, func(a netip.Addr) bool {
		s, err := w.ledger().slot(a)
		return err != nil || s.state != slotFree
	})
	holds := slices.ContainsFunc(addrs, func(a netip.Addr) bool { // somebody does who may be alive
		s, err := w.ledger().slot(a)
		l := w.live[s.att]
		return err != nil || w.raw || s.state == slotBound && (l == nil || l.foreign || l.vague || w.alive(l.netns))
	})
	r, err := w.ledger().Add(AddRequest{Attachment: att, Pod: p, Netns: ns, Policy: policy, Pool: addrs})
	w.logf("ADD %s %s of pools %v -> %v %v", att, p, addrs, addrsOf(r), err)
	switch {
	case errors.Is(err, ErrBarred):
		if !w.barred[uid] {
			w.failf("%s is not barred", p)
		}
		return err
	case errors.Is(err, ErrInUse):
		if !holds {
			w.failf("ADD of %s waits for nobody: %v", p, err)
		}
		return err
	case errors.Is(err, ErrNotAvailable):
		if !taken && !w.raw {
			w.failf("ADD of %s failed: %v", p, err)
		}
		return err
	case err != nil:
		w.failf("ADD of %s failed: %v", p, err)
	}
	w.raw = false
	if w.barred[uid] {
		w.failf("%s is barred and got %v", p, r.Addrs)
	}
	if !slices.Equal(r.Addrs, addrs) || r.Promised || r.Restored {
		w.failf("%s got %+v", p, r)
	}
	key := NewKey(w.net.Name, p, valueOf(policy), att.IfName)
	for _, a := range addrs {
		for other, l := range w.live {
			if w.alive(l.netns) && slices.Contains(l.addrs, a) {
				w.failf("I1: %s was given to %s while %s has it", a, att, other)
			}
		}
		for k, pr := range w.promises {
			if k != key && slices.Contains(pr.addrs, a) && !w.expired(pr) {
				w.failf("I2: %s is promised to %s and was given to %s", a, k, p)
			}
		}
	}
	for k, pr := range w.promises {
		if k == key || slices.ContainsFunc(addrs, func(a netip.Addr) bool { return slices.Contains(pr.addrs, a) }) {
			delete(w.promises, k)
		}
	}
	delete(w.maybe, key)
	delete(w.freed, key)
	w.live[att] = &liveAttachment{pod: Pod{Namespace: "default", Name: pod}, policy: ordinary, addrs: addrs, netns: ns}
	return nil
}

// addVictimPooled is an ADD of the victim, which ends what its pod was promised from the call on.
func addVictimPooled(pod string, addrs []netip.Addr) func(*world) {
	return func(w *world) {
		w.forget(NewKey("net", Pod{Namespace: "default", Name: pod}, *tenMinutes, "eth0"))
		w.pool = addrs
		w.netns[theNs.Path] = theNs
		_ = w.addPooled(theAtt, theNs, pod, 1, tenMinutes, addrs)
	}
}

func withPool(w *world, pod string, addrs []netip.Addr) Attachment {
	w.t.Helper()
	att, ns := w.newContainer(), w.newNetns()
	must.Do(w.t, w.addPooled(att, ns, pod, 1, tenMinutes, addrs))
	return att
}

func poolActs() []act {
	return []act{
		{"ADD of a pool's addresses", func(w *world) { stopped(w, "web-1", tenMinutes) },
			addVictimPooled("web-0", pooledBoth)},
		{"first ADD of a network without ranges", func(*world) {}, func(w *world) {
			ranges := w.net
			defer func() { w.net = ranges }() // in which others go on
			w.net = testNetwork("", "")
			addVictimPooled("web-0", pooledBoth)(w)
		}},
		{"ADD of a pool's addresses over a dead predecessor", func(w *world) {
			delete(w.netns, w.live[withPool(w, "web-0", pooledOther)].netns.Path)
		}, addVictimPooled("web-0", pooledBoth)},
		{"ADD of a pool's addresses that a dead pod of another name had", func(w *world) {
			delete(w.netns, w.live[withPool(w, "web-9", pooledBoth)].netns.Path)
		}, addVictimPooled("web-0", pooledFirst)},
		{"ADD of a pool's addresses by a pod with a promise", func(w *world) { stopped(w, "web-0", tenMinutes) },
			addVictimPooled("web-0", pooledBoth)},
		{"ADD of a pool's address that is the pod's own promise", func(w *world) {
			stopped(w, "web-0", tenMinutes)
		}, func(w *world) {
			k := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, "eth0")
			addVictimPooled("web-0", w.promises[k].addrs)(w)
		}},
		{"ADD of a pool's address that is overdue for another pod", func(w *world) {
			stopped(w, "web-1", tenMinutes)
			w.advance(11 * time.Minute)
		}, func(w *world) {
			k := NewKey("net", Pod{Namespace: "default", Name: "web-1"}, *tenMinutes, "eth0")
			addVictimPooled("web-0", w.promises[k].addrs[:1])(w)
		}},
		{"DEL of a pool's addresses", func(w *world) {
			w.netns[theNs.Path] = theNs
			w.pool = pooledBoth
			must.Do(w.t, w.addPooled(theAtt, theNs, "web-0", 1, tenMinutes, pooledBoth))
		}, func(w *world) { w.del(theAtt) }},
		{"first command of a boot, after pods of pools", func(w *world) {
			stopped(w, "web-1", forever)
			withPool(w, "web-0", pooledBoth)
			w.boot(time.Minute)
		}, addVictimPooled("web-0", pooledBoth)},
		{"first command after the directory was emptied under pods of pools", func(w *world) {
			w.add("job", ordinary)
			withPool(w, "web-2", pooledOther)
			w.wipe("/data/net", glob)
		}, addVictimPooled("web-0", pooledFirst)},
	}
}

// poolAftermath: what a pool's address was given for is over, so that the cluster gives it to another pod, which gets
// it on this node.
func (w *world) poolAftermath() {
	w.t.Helper()
	if w.pool == nil {
		return
	}
	for _, att := range w.attachments() {
		if l := w.live[att]; slices.ContainsFunc(l.addrs, func(a netip.Addr) bool { return slices.Contains(w.pool, a) }) {
			delete(w.netns, l.netns.Path)
		}
	}
	if slices.ContainsFunc(w.pool, w.gives) {
		return // also one of the ranges, which another pod may have by now
	}
	w.dropUnreadable()
	att, ns := w.newContainer(), w.newNetns()
	if err := w.addPooled(att, ns, "pool-next", 2, ordinary, w.pool); err != nil {
		w.failf("the next pod does not get %v: %v", w.pool, err)
	}
}

// addPooledSomewhere is what the cluster gives: an address that no other pod has by its own word, but now and then
// one that overlaps with the network's ranges.
func (w *world) addPooledSomewhere(r *rand.Rand) {
	att, ns, pod := w.newContainer(), w.newNetns(), pickOne(r, pods)
	if other, l := w.another(r); l != nil && r.IntN(3) == 0 {
		att, ns, pod = other, l.netns, l.pod.Name
		if pod == "" {
			return
		}
	}
	w.known = append(w.known, att)
	addrs := pickOne(r, [][]netip.Addr{pooledBoth, pooledOther, pooledFirst, pooledIn})
	if r.IntN(4) > 0 {
		_ = w.addPooled(att, ns, pod, r.IntN(6), pickOne(r, policies), addrs)
		return
	}
	// Killed, and with its DEL half of the time.
	policy := pickOne(r, []*retention.Policy{ordinary, tenMinutes})
	key := NewKey(w.net.Name, Pod{Namespace: "default", Name: pod}, *policy, att.IfName)
	if w.promises[key] != nil {
		w.forget(key)
	}
	claims, err := w.ledger().allClaims()
	must.Do(w.t, err)
	at := r.IntN(20)
	hit := w.killAt(at, func() { _ = w.addPooled(att, ns, pod, r.IntN(6), policy, addrs) })
	w.logf("ADD %s %s of pools %v killed at operation %d: %t", att, pod, addrs, at, hit)
	if !hit {
		return
	}
	w.freed[key] = true               // killed when one of the addresses that it was promised was freed
	for _, c := range claims.claims { // overdue ones may have lost some of their addresses
		if p := w.promises[c.Key]; p == nil || w.expired(p) {
			w.freed[c.Key] = true
		}
	}
	w.limbo[att] = &liveAttachment{pod: Pod{Namespace: "default", Name: pod}, policy: ordinary, netns: ns}
	if r.IntN(2) == 0 {
		delete(w.netns, ns.Path)
		w.del(att)
	}
	w.expire() // the agent makes the claim again of which only a record is left
}

// barSome is an agent that bars a pod: from then on it gets no address, and what it has is told.
func (w *world) barSome(r *rand.Rand) {
	uid := r.IntN(6)
	if w.barred == nil {
		w.barred = map[int]bool{}
	}
	if r.IntN(2) == 0 {
		at := r.IntN(8)
		if w.killAt(at, func() { _, _ = Bar(w.options(), uidOf(uid)) }) {
			w.logf("bar of %d killed at %d", uid, at)
		}
	}
	_, err := Bar(w.options(), uidOf(uid))
	w.logf("bar %d -> %v", uid, err)
	if err != nil {
		w.failf("Bar: %v", err)
	}
	w.barred[uid] = true
	if len(w.barred) == 6 { // other pods come
		for uid := range w.barred {
			must.Do(w.t, w.fs.Remove("/state/pools/"+uidOf(uid)+".barred"))
		}
		clear(w.barred)
		must.Do(w.t, w.fs.SyncDir("/state/pools"))
	}
}

func (w *world) options() Options {
	return Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: w.netns}
}

// What the agent reported must hold: no crash at any moment lifts a bar, and none lets an ADD slip by.
func TestABarHoldsFromTheMomentThatItIsToldOf(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		for _, keep := range []string{"", "durable", "all", "torn", "mixed"} {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			w.add("job", ordinary)
			told := false
			hit = w.killAt(n, func() {
				if has, err := Bar(w.options(), uidOf(1)); err != nil || len(has) > 0 {
					w.failf("Bar: %v, %v", has, err)
				}
				told = true
			})
			if keep != "" {
				w.fs.lose(keep, rand.New(rand.NewPCG(uint64(n), 0)))
				w.boot(time.Minute)
			}
			_, err := w.ledger().Add(AddRequest{Attachment: w.newContainer(), Netns: w.newNetns(), Pool: pooledFirst,
				Pod: Pod{Namespace: "default", Name: "web-0", UID: uidOf(1)}})
			if !errors.Is(err, ErrBarred) && (told || err != nil) {
				w.failf("ADD after the bar, of which the cluster was told (%t): %v", told, err)
			}
		}
	}
}

func (w *world) barPath(uid int) string { return "/state/pools/" + uidOf(uid) + ".barred" }

// An ADD that did not see the bar is seen by it.
func TestAnADDThatDidNotSeeTheBarIsTold(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	att := withPool(w, "web-0", pooledBoth)
	has, err := Bar(w.options(), uidOf(1))
	if err != nil || len(has) != 2 || has[0].Attachment != att || has[0].Pod.UID != uidOf(1) {
		t.Fatalf("the bar tells %+v, %v", has, err)
	}
	// And where the bar cannot know, it says so: what it cannot read is no reason.
	w.fs.before = func(string, string) error { return unix.EIO }
	if _, err := Bar(w.options(), uidOf(2)); !errors.Is(err, unix.EIO) {
		t.Fatalf("Bar on a broken disk: %v", err)
	}
	w.fs.before = nil
	if _, err := Bar(w.options(), "../x"); err == nil || !strings.Contains(err.Error(), "K8S_POD_UID") {
		t.Fatalf("Bar of a hostile UID: %v", err)
	}
}

// Who removes the description of a network hides its addresses: that a pod has none of them is not known then.
func TestABarIsNoAnswerWhereANetworkIsNotDescribed(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	withPool(w, "web-0", pooledFirst)
	info := w.ledger().inState(infoName)
	must.Do(t, w.fs.Remove(info))
	for what, err := range map[string]error{
		"a bar":    func() error { _, err := Bar(w.options(), uidOf(1)); return err }(),
		"an epoch": BeginEpoch(w.options(), 9, false),
	} {
		if !errors.Is(err, ErrUndescribed) {
			t.Errorf("%s: %v, want %v", what, err, ErrUndescribed)
		}
	}
	must.Do(t, w.fs.Remove(w.ledger().marker())) // as the error says
	must.Do(t, w.ledger().Prepare())
	if _, err := Bar(w.options(), uidOf(1)); err != nil {
		t.Error(err)
	}
}

// After a restore of the cluster an ADD needs the very text that the agent has seen since, until the next boot.
func TestAnEpochForgetsEveryFileFirst(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		w := newWorld(t, testNetwork("10.1.0.0/28", ""))
		must.Do(t, disk.MkdirAll(w.fs, "/state/pools"))
		must.Do(t, w.fs.WriteFile("/state/pools/"+uidOf(1), []byte("text"), modeState))
		done := false
		hit = w.killAt(n, func() {
			must.Do(t, BeginEpoch(w.options(), 9, n%2 == 0))
			done = true
		})
		epoch, lost, err := Epoch(w.options())
		must.Do(t, err)
		if done && (epoch != 9 || lost != (n%2 == 0)) {
			t.Fatalf("the epoch is %d, bars lost %t", epoch, lost)
		}
		if _, err := w.fs.Mode("/state/pools/" + uidOf(1)); epoch == 9 && err == nil {
			t.Fatal("a file from before the epoch is there in the epoch")
		}
		if !done {
			continue
		}
		add := func() error {
			att, ns := w.newContainer(), w.newNetns()
			_, err := w.ledger().Add(AddRequest{Attachment: att, Pod: Pod{"default", "web-0", uidOf(1)}, Netns: ns,
				Pool: pooledFirst, PoolText: "text"})
			return err
		}
		if err := add(); !errors.Is(err, ErrUnseen) {
			t.Fatalf("ADD of a pod that nobody has seen: %v", err)
		}
		must.Do(t, w.fs.WriteFile("/state/pools/"+uidOf(1), []byte("other text"), modeState))
		if err := add(); !errors.Is(err, ErrUnseen) {
			t.Fatalf("ADD of a pod that was seen with another text: %v", err)
		}
		must.Do(t, w.fs.Remove("/state/pools/"+uidOf(1)))
		w.boot(time.Minute)
		must.Do(t, add())
		if epoch, lost, err := Epoch(w.options()); err != nil || epoch != 0 || lost {
			t.Fatalf("the epoch of another boot is %d, bars lost %t, %v", epoch, lost, err)
		}
	}
}

// An ADD that nothing says of pools asks for none of their files.
func TestAnOrdinaryPodAsksForNothingOfPools(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/24", ""))
	w.add("warm", ordinary)
	c := &counted{FS: w.fs}
	l := New(w.net, Options{StateDir: "/state", FS: c, Clock: w.clock, Netns: w.netns, Sleep: w.pass})
	att, ns := w.newContainer(), w.newNetns()
	_, err := l.Add(AddRequest{Attachment: att, Pod: Pod{"default", "job", uidOf(1)}, Netns: ns, Policy: ordinary})
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(c.calls, func(s string) bool { return strings.Contains(s, mailbox.Dir) }); i >= 0 {
		t.Fatalf("it asks %s", c.calls[i])
	}
}

// A network without ranges gives nothing to a pod of no pool.
func TestWithoutRangesThereIsNoOrdinaryAddress(t *testing.T) {
	w := newWorld(t, testNetwork("", ""))
	att, ns := w.newContainer(), w.newNetns()
	r, err := w.ledger().Add(AddRequest{Attachment: att, Pod: Pod{Namespace: "default", Name: "job"}, Netns: ns,
		Policy: tenMinutes})
	if !errors.Is(err, ErrNotAvailable) {
		t.Fatalf("ADD -> %+v, %v", r, err)
	}
	w.check()
}

// The last ledger gone, what the agent said of pools goes too.
func TestUninstallTakesTheFilesOfPools(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	withPool(w, "web-0", pooledBoth)
	_, err := Bar(w.options(), uidOf(2))
	must.Do(t, err)
	if left, err := RemoveState(w.options()); err != nil || left != 1 {
		t.Fatalf("%d networks are left, %v", left, err)
	}
	if _, err := w.fs.Mode(w.barPath(2)); err != nil {
		t.Fatalf("the bar is gone while a network is in use: %v", err)
	}
	_, err = w.ledger().Uninstall()
	must.Do(t, err)
	if left, err := RemoveState(w.options()); err != nil || left != 0 {
		t.Fatalf("%d networks are left, %v", left, err)
	}
	if names, err := w.fs.ReadDir("/state"); err == nil {
		t.Fatalf("left: %v", names)
	}
	if s, err := w.ledger().slot(pooledBoth[0]); err != nil || s.state != slotBound {
		t.Fatalf("the pod's address: %+v, %v", s, err)
	}
}
