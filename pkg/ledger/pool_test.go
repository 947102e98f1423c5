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
	"github.com/stayput/stayput/pkg/grants"
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
	if !w.revoked[uid] {
		w.grant(uid, "text")
	}
	r, err := w.ledger().Add(AddRequest{Attachment: att, Pod: p, Netns: ns, Policy: policy, Pool: addrs, PoolText: "text"})
	w.logf("ADD %s %s of pools %v -> %v %v", att, p, addrs, addrsOf(r), err)
	switch {
	case errors.Is(err, ErrNotGranted):
		if !w.revoked[uid] {
			w.failf("%s is granted its addresses", p)
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
	if w.revoked[uid] {
		w.failf("%s is granted nothing and got %v", p, r.Addrs)
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

// grant is an agent that grants a pod what a text says.
func (w *world) grant(uid int, text string) {
	w.t.Helper()
	defer func(before func(string, string) error) { w.fs.before = before }(w.fs.before)
	w.fs.before = nil // it is another process
	pending, err := w.options().Grants().Begin(uidOf(uid), text)
	must.Do(w.t, err)
	must.Do(w.t, pending.Finish())
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

// revokeSome is an agent that revokes a grant: from then on the pod gets no address, and what it has is told.
func (w *world) revokeSome(r *rand.Rand) {
	uid := r.IntN(6)
	if w.revoked == nil {
		w.revoked = map[int]bool{}
	}
	if r.IntN(2) == 0 {
		at := r.IntN(4)
		if w.killAt(at, func() { _, _ = Revoke(w.options(), uidOf(uid)) }) {
			w.logf("revocation of %d killed at %d", uid, at)
		}
	}
	_, err := Revoke(w.options(), uidOf(uid))
	w.logf("revoke %d -> %v", uid, err)
	if err != nil {
		w.failf("Revoke: %v", err)
	}
	w.revoked[uid] = true
	if len(w.revoked) == 6 { // other pods come
		clear(w.revoked)
	}
}

func (w *world) options() Options {
	return Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: w.netns}
}

func (w *world) addGranted(text string) error {
	_, err := w.ledger().Add(AddRequest{Attachment: w.newContainer(), Netns: w.newNetns(), Pool: pooledFirst,
		PoolText: text, Pod: Pod{Namespace: "default", Name: "web-0", UID: uidOf(1)}})
	return err
}

// What the agent reported must hold: no crash at any moment brings a revoked grant back.
func TestARevokedGrantStaysRevoked(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		for _, keep := range []string{"", "durable", "all", "torn", "mixed"} {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			w.add("job", ordinary)
			w.grant(1, "text")
			_, err := w.options().Grants().Begin(uidOf(1), "text")
			must.Do(t, err)
			told := false
			hit = w.killAt(n, func() {
				if has, err := Revoke(w.options(), uidOf(1)); err != nil || len(has) > 0 {
					w.failf("Revoke: %v, %v", has, err)
				}
				told = true
			})
			if keep != "" {
				w.fs.lose(keep, rand.New(rand.NewPCG(uint64(n), 0)))
				w.boot(time.Minute)
			}
			if err := w.addGranted("text"); !errors.Is(err, ErrNotGranted) && (told || keep != "" || err != nil) {
				w.failf("ADD after a revocation (told: %t): %v", told, err)
			}
		}
	}
}

func TestAnADDNeedsAGrantOfThisBootWithItsVeryText(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	w.add("job", ordinary)
	refused := func(what, text string) {
		t.Helper()
		if err := w.addGranted(text); !errors.Is(err, ErrNotGranted) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused("no grant", "")
	_, err := w.options().Grants().Begin(uidOf(1), "text")
	must.Do(t, err)
	refused("a grant that is not finished", "text")
	w.grant(1, "text")
	refused("another text", "other text")
	w.boot(time.Minute)
	refused("a grant of another boot", "text")
	w.grant(1, "text")
	must.Do(t, w.addGranted("text"))
}

func TestARevocationTellsWhatThePodHas(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	att := withPool(w, "web-0", pooledBoth)
	has, err := Revoke(w.options(), uidOf(1))
	if err != nil || len(has) != 2 || has[0].Attachment != att || has[0].Pod.UID != uidOf(1) {
		t.Fatalf("the revocation tells %+v, %v", has, err)
	}
	// And where it cannot know, it says so: what it cannot read is no reason.
	w.grant(1, "text")
	w.fs.before = func(string, string) error { return unix.EIO }
	if _, err := Revoke(w.options(), uidOf(1)); !errors.Is(err, unix.EIO) {
		t.Fatalf("Revoke on a broken disk: %v", err)
	}
	w.fs.before = nil
	if _, err := Revoke(w.options(), "../x"); err == nil || !strings.Contains(err.Error(), "K8S_POD_UID") {
		t.Fatalf("Revoke of a hostile UID: %v", err)
	}
}

// during calls a function once, before an ADD writes the first address file.
type during struct {
	disk.FS
	dir  string
	then func()
}

func (d *during) WriteFile(path string, data []byte, mode uint32) error {
	if strings.HasPrefix(path, d.dir) && d.then != nil {
		then := d.then
		d.then = nil
		then()
	}
	return d.FS.WriteFile(path, data, mode)
}

// An ADD that has read its grant, and not given the addresses yet, is waited for.
func TestARevocationWaitsForAnADDThatIsUnderWay(t *testing.T) {
	o := Options{StateDir: t.TempDir()}
	n := testNetwork("10.1.0.0/28", "")
	n.DataDir = t.TempDir()
	ledger := New(n, o)
	must.Do(t, ledger.Prepare())
	pending, err := o.Grants().Begin(uidOf(1), "text")
	must.Do(t, err)
	must.Do(t, pending.Finish())

	told := make(chan []Address, 1)
	adding := o
	adding.FS = &during{disk.Local{}, n.DataDir, func() {
		go func() {
			has, err := Revoke(o, uidOf(1))
			if err != nil {
				t.Errorf("Revoke: %v", err)
			}
			told <- has
		}()
		for text := "text"; text != ""; {
			var err error
			if text, err = o.Grants().Granted(uidOf(1)); err != nil {
				t.Errorf("Granted: %v", err)
				return
			}
		}
	}}
	_, err = New(n, adding).Add(AddRequest{Attachment: Attachment{"c-1", "eth0"}, Pool: pooledFirst, PoolText: "text",
		Pod: Pod{Namespace: "default", Name: "web-0", UID: uidOf(1)}})
	must.Do(t, err)
	if has := <-told; len(has) != 1 || has[0].Addr != pooledFirst[0] {
		t.Errorf("the revocation tells %+v, want %v", has, pooledFirst)
	}
}

// Who removes the description of a network hides its addresses: that a pod has none of them is not known then.
func TestARevocationIsNoAnswerWhereANetworkIsNotDescribed(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	withPool(w, "web-0", pooledFirst)
	info := w.ledger().inState(infoName)
	must.Do(t, w.fs.Remove(info))
	if _, err := Revoke(w.options(), uidOf(1)); !errors.Is(err, ErrUndescribed) {
		t.Errorf("Revoke: %v, want %v", err, ErrUndescribed)
	}
	must.Do(t, w.fs.Remove(w.ledger().marker())) // as the error says
	must.Do(t, w.ledger().Prepare())
	if _, err := Revoke(w.options(), uidOf(1)); err != nil {
		t.Error(err)
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
	if i := slices.IndexFunc(c.calls, func(s string) bool { return strings.Contains(s, grants.Name) }); i >= 0 {
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

// The last ledger gone, the grants go too.
func TestUninstallTakesTheFilesOfPools(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	withPool(w, "web-0", pooledBoth)
	if left, err := RemoveState(w.options()); err != nil || left != 1 {
		t.Fatalf("%d networks are left, %v", left, err)
	}
	if text, err := w.options().Grants().Granted(uidOf(1)); err != nil || text == "" {
		t.Fatalf("while a network is in use, the grant is %q, %v", text, err)
	}
	_, err := w.ledger().Uninstall()
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
