package ledger

import (
	"errors"
	"flag"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

var (
	modelSeed      = flag.Uint64("model.seed", 0, "replay one history of the model test")
	modelBase      = flag.Uint64("model.base", 1, "seed of the model test's first history; 0: of the clock")
	modelHistories = flag.Int("model.histories", 2000, "histories of the model test")
)

// Random histories of every command, kills, clock jumps and reboots, of host-local beside, new configurations, wiped
// files and processes that see no namespaces, against a plain map. A failure prints the seed and the history;
// -model.seed replays it. The same histories run each time; -model.base makes others, or new ones if it is 0.
func TestRandomHistoriesAgreeWithAMap(t *testing.T) {
	if *modelSeed != 0 {
		history(t, *modelSeed)
		return
	}
	base := *modelBase
	if base == 0 {
		base = uint64(time.Now().UnixNano())
	}
	t.Logf("seeds %d to %d", base, base+uint64(*modelHistories)-1)
	for i := range *modelHistories {
		history(t, base+uint64(i))
	}
}

// deeds are what can happen to a node, each as often as its weight says. What it may do to the promises is in the
// model, as docs/guarantees.md has it, not as the code does.
var deeds = []struct {
	weight int
	do     func(*world, *rand.Rand)
}{
	{36, func(w *world, r *rand.Rand) { w.addSomewhere(r) }},
	{22, func(w *world, r *rand.Rand) { w.stopSome(r) }},
	{5, func(w *world, r *rand.Rand) { // the runtime loses a sandbox without a DEL
		if l := w.live[pickOne(r, w.known)]; l != nil {
			w.logf("netns %s is gone", l.netns.Path)
			delete(w.netns, l.netns.Path)
		}
	}},
	{7, func(w *world, r *rand.Rand) { w.advance(time.Duration(r.IntN(8)) * time.Minute) }},
	{3, func(w *world, r *rand.Rand) {
		jump := time.Duration(r.IntN(200)-100) * time.Hour
		if r.IntN(2) == 0 {
			jump = -w.ahead // it is set right
		}
		w.jump(jump)
		if r.IntN(2) == 0 {
			w.prepare()
		}
	}},
	{4, func(w *world, r *rand.Rand) { w.expireBy(w.agent(r)) }},
	{3, func(w *world, r *rand.Rand) { w.collect(r) }},
	{4, func(w *world, r *rand.Rand) { w.setPolicy(pickOne(r, w.known), pickOne(r, policies)) }},
	{3, func(w *world, r *rand.Rand) { w.powerLoss(r) }},
	{6, func(w *world, r *rand.Rand) { w.killedADD(r, pickOne(r, pods)) }},
	{3, func(w *world, r *rand.Rand) { w.killedAndForgotten(r, pickOne(r, pods)) }},
	{3, func(w *world, r *rand.Rand) { w.reclaim(pickOne(r, w.known)) }},
	{2, func(w *world, r *rand.Rand) { w.release(r) }},
	{1, func(w *world, r *rand.Rand) { w.uninstall(w.agent(r)) }},
	{2, func(w *world, r *rand.Rand) { w.configure(r) }},
	{2, func(w *world, r *rand.Rand) { w.addAgain(pickOne(r, w.known)) }},
	{3, func(w *world, r *rand.Rand) { w.addBlindly(r) }},
	{8, func(w *world, r *rand.Rand) { w.addPooledSomewhere(r) }},
	{1, func(w *world, r *rand.Rand) { w.revokeSome(r) }},
	{4, func(w *world, r *rand.Rand) { w.wipeSome(r) }},
	{4, func(w *world, r *rand.Rand) { w.hostLocalAdd() }},
	{4, func(w *world, r *rand.Rand) { w.hostLocalDel(pickOne(r, w.known)) }},
}

var (
	pods     = []string{"web-0", "web-1", "web-2", "job", "web"}
	policies = []*retention.Policy{nil, ordinary, tenMinutes, tenMinutes, tenMinutes, forever, newOne, shared, shared}
)

// pickOne returns the zero value if there is nothing to pick from.
func pickOne[T any](r *rand.Rand, from []T) (one T) {
	if len(from) == 0 {
		return one
	}
	return from[r.IntN(len(from))]
}

func history(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 0))
	networks, most := configurations()[:2], 40
	if seed%4 == 3 { // so few addresses, and so many steps, that pods are always after each other's
		networks, most = tight(), 100
	}
	w := newWorld(t, pickOne(r, networks))
	w.net.PromisedShare = float64(r.IntN(2))
	w.net.PromisedSharePerNamespace = float64(r.IntN(2)) / 4
	w.logf("seed %d", seed)
	if seed%2 == 0 {
		w.prepare()
		w.time, w.begun = w.clock.now.Wall, w.clock.now.Wall
	}
	total := 0
	for _, d := range deeds {
		total += d.weight
	}
	for range 30 + r.IntN(most) {
		k := r.IntN(total)
		for _, d := range deeds {
			if k -= d.weight; k < 0 {
				d.do(w, r)
				break
			}
		}
		w.check()
		w.explained()
	}
	w.settle()
}

// addSomewhere ADDs a pod, or one more interface to a pod that runs. Of the interfaces one's name begins with
// another's.
func (w *world) addSomewhere(r *rand.Rand) {
	policy := pickOne(r, policies)
	if r.IntN(4) == 0 {
		if att, l := w.another(r); l != nil {
			w.addAs(att, l.netns, l.pod.Name, policy)
			w.known = append(w.known, att)
			return
		}
	}
	att, _, _ := w.add(pickOne(r, pods), policy)
	w.known = append(w.known, att)
}

// another is one more interface of a container that runs, nil if there is none.
func (w *world) another(r *rand.Rand) (Attachment, *liveAttachment) {
	att := pickOne(r, w.known)
	l := w.live[att]
	if l == nil || !w.alive(l.netns) {
		return att, nil
	}
	att.IfName = pickOne(r, interfaces)
	if slices.Contains(w.known, att) {
		return att, nil
	}
	return att, l
}

var interfaces = []string{"eth0", "net1", "net10"}

// stopSome is a DEL, or several: of a pod that runs, or a late one.
func (w *world) stopSome(r *rand.Rand) {
	att := pickOne(r, w.known)
	if att.ContainerID == "" {
		return
	}
	if l := w.live[att]; l != nil && r.IntN(4) > 0 {
		delete(w.netns, l.netns.Path)
	}
	for range 1 + r.IntN(2) {
		w.del(att)
	}
}

func (w *world) powerLoss(r *rand.Rand) {
	raw := w.raw
	if _, err := w.fs.Mode(w.ledger().marker()); err != nil {
		raw = true
	}
	if r.IntN(2) == 0 {
		keep := []string{"durable", "all", "torn", "mixed"}[r.IntN(4)]
		w.logf("power loss keeping %s", keep)
		if *modelSeed != 0 {
			w.t.Log(w.fs.dump())
		}
		if w.raw && w.fragile {
			for _, k := range w.keys() {
				w.forget(k)
			}
		}
		for k := range w.maybe {
			// Killed before it made its address files durable, an ADD has promised what a file of host-local's may have again.
			w.freed[k] = true
		}
		w.fs.lose(keep, r)
		if *modelSeed != 0 {
			w.t.Log(w.fs.dump())
		}
	}
	wrong := time.Duration(0)
	switch r.IntN(6) {
	case 0:
		wrong = time.Duration(r.IntN(200)-100) * time.Hour
	case 1:
		wrong = -w.ahead
	}
	w.bootWrong(time.Duration(r.IntN(5))*time.Minute, wrong)
	w.prepare() // as the agent does when it starts; until then the wall clock counts
	if raw {    // without a marker the files may be of this boot
		w.dropUnreadable()
		w.reclaimBound()
	}
}

// reclaimBound is an agent that has proved that nothing uses any address.
func (w *world) reclaimBound() {
	w.t.Helper()
	addrs, err := w.ledger().List()
	if err != nil {
		w.failf("List: %v", err)
	}
	for _, a := range addrs {
		if a.State != StateBound {
			continue
		}
		if _, err := w.ledger().Reclaim(a.Attachment); err != nil {
			w.failf("Reclaim: %v", err)
		}
	}
}

// dropUnreadable is an agent that has proved that nothing uses the addresses whose files say nothing.
func (w *world) dropUnreadable() {
	w.t.Helper()
	addrs, err := w.ledger().List()
	if err != nil {
		w.failf("List: %v", err)
	}
	for _, a := range addrs {
		if a.State != StateUnreadable {
			continue
		}
		if err := w.ledger().Drop(a.Addr); err != nil {
			w.failf("Drop: %v", err)
		}
	}
}

// agent returns the namespaces as an agent sees them: all, none, or none that it can tell anything of.
func (w *world) agent(r *rand.Rand) NetnsProber {
	switch r.IntN(4) {
	case 0:
		w.logf("the next one sees no namespace")
		return fakeNetns{}
	case 1:
		w.logf("the next one cannot tell namespaces")
		return sightless{}
	}
	return w.netns
}

type sightless struct{}

func (sightless) Identify(string) (Netns, bool, error) {
	return Netns{}, false, errors.New("cannot tell")
}

func (w *world) expire() { w.expireBy(w.netns) }

func (w *world) expireBy(sees NetnsProber) {
	expired, _, err := w.ledgerOf(sees).Expire()
	w.raw = false
	w.logf("expire -> %v %v", expired, err)
	if err != nil {
		w.failf("Expire: %v", err)
	}
	for _, e := range expired {
		if p := w.promises[e.Key]; p != nil && slices.Equal(p.addrs, e.Addrs) {
			if !w.expired(p) {
				w.failf("I2: %s expired with %s left", e.Key, p.left)
			}
			delete(w.promises, e.Key)
		}
	}
	for k, p := range w.promises {
		if w.expired(p) && !p.loose {
			delete(w.promises, k)
		}
	}
}

// collect is a GC that keeps a random part of the live attachments.
func (w *world) collect(r *rand.Rand) {
	var valid []Attachment
	var ended []Attachment
	for _, att := range w.attachments() {
		if r.IntN(4) > 0 {
			valid = append(valid, att)
		} else {
			ended = append(ended, att)
		}
	}
	err := w.ledger().Collect(valid)
	w.logf("GC keeps %v -> %v", valid, err)
	if err != nil {
		w.failf("GC: %v", err)
	}
	for _, att := range ended {
		delete(w.netns, w.live[att].netns.Path)
		w.ended(att)
	}
}

// setPolicy is the agent that hands in what ADD did not know, or what was lost with the index: then it is the same.
func (w *world) setPolicy(att Attachment, p *retention.Policy) {
	l := w.live[att]
	if l != nil && l.vague && l.policy != nil {
		p = l.policy
	} else if l != nil && l.policy != nil {
		return
	}
	if l == nil || p == nil || !w.alive(l.netns) {
		return
	}
	r, err := w.ledger().SetPolicy(att, l.pod, *p, l.netns)
	w.logf("SetPolicy %s %s -> %v %v", att, described{p}, r, err)
	if err != nil {
		w.failf("SetPolicy: %v", err)
	}
	l.foreign, l.vague = false, false
	l.policy = p
	if l.key != nil {
		if held := w.promises[*l.key]; held != nil && held.holder != nil && *held.holder == att {
			delete(w.promises, *l.key)
		}
		l.key = nil
	}
	key := NewKey(w.net.Name, l.pod, *p, att.IfName)
	if held := w.promises[key]; held != nil && held.holder != nil {
		return // a newer attachment of the pod holds the promise
	}
	if _, maybe := w.maybe[key]; maybe && w.predecessor(att, l.pod, func(other Attachment, _ *liveAttachment) bool {
		return other != att
	}) {
		w.forget(key) // another of the pod's attachments may hold it
		return
	}
	if p.Retains() && !slices.ContainsFunc(r.Events, isRefusal) {
		delete(w.maybe, key)
		w.promises[key] = &promise{addrs: l.addrs, policy: *p, holder: &att}
		l.key = &key
	}
}

// forget takes a promise for one that the ledger may still keep.
func (w *world) forget(key Key) {
	if p := w.promises[key]; p != nil {
		w.maybe[key] = p.policy
		delete(w.promises, key)
	}
	for _, l := range w.live {
		if l.key != nil && *l.key == key {
			l.key = nil
		}
	}
}

// killedADD is an ADD that is killed somewhere; half the time the runtime sends its DEL.
func (w *world) killedADD(r *rand.Rand, pod string) {
	att, ns := w.newContainer(), w.newNetns()
	at := r.IntN(25)
	policy := *tenMinutes // a policy that is new counts from the claim on, acknowledged or not: keep the old
	if p := w.promises[NewKey(w.net.Name, Pod{Namespace: "default", Name: pod}, policy, att.IfName)]; p != nil &&
		!p.policy.AllocateNew {
		policy = p.policy
	}
	if key := NewKey(w.net.Name, Pod{Namespace: "default", Name: pod}, policy, att.IfName); w.promises[key] != nil &&
		!w.inRanges(w.promises[key].addrs) {
		w.forget(key) // the kill may come before or after other addresses have taken the place of these
	}
	hit := w.killAt(at, func() { w.addAs(att, ns, pod, &policy) })
	// It may have taken the place of a dead predecessor; with its DEL the clock runs.
	if p := w.promises[NewKey(w.net.Name, Pod{Namespace: "default", Name: pod}, policy, att.IfName)]; hit && p != nil &&
		p.holder != nil && !w.alive(w.live[*p.holder].netns) {
		holder := *p.holder
		l := w.live[holder]
		w.ended(holder)
		w.limbo[holder] = l
		p.loose = true
	}
	w.logf("ADD %s %s killed at operation %d: %t", att, pod, at, hit)
	if hit {
		key := NewKey(w.net.Name, Pod{Namespace: "default", Name: pod}, policy, att.IfName)
		if p := w.promises[key]; p != nil {
			p.unsure = true
		}
		w.maybe[key] = policy // new, or with a retention begun again
		if r.IntN(2) == 0 {
			delete(w.netns, ns.Path)
		}
		w.del(att)
		delete(w.netns, ns.Path)
		w.expire() // an expiry that was killed half-way is finished by the agent
	}
}

// The newest wins, also if its promise is one that a killed ADD made.
func TestAPromiseRestoredByANewerAttachmentStaysWithIt(t *testing.T) {
	for n, hit := 0, true; hit; n++ {
		w := newWorld(t, testNetwork("10.1.0.0/28", ""))
		older, _, _ := w.add("web-0", nil)
		killed, ns := w.newContainer(), w.newNetns()
		if hit = w.killAt(n, func() { w.addAs(killed, ns, "web-0", tenMinutes) }); hit {
			w.maybe[NewKey("net", w.live[older].pod, *tenMinutes, "eth0")] = *tenMinutes
		}
		delete(w.netns, ns.Path)
		w.del(killed)
		newer, _, _ := w.add("web-0", nil)
		w.setPolicy(older, tenMinutes)
		for _, att := range []Attachment{newer, older} {
			delete(w.netns, w.live[att].netns.Path)
			w.del(att)
		}
		w.add("web-0", tenMinutes)
		w.settle()
	}
}

func FuzzDecodeSlot(f *testing.F) {
	f.Add([]byte("c1\r\neth0"))
	f.Add([]byte(`{"v":1,"key":{"identity":"pod:a/b"},"addrs":["10.0.0.1"]}`))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := decodeSlot(b)
		if s.state == slotFree {
			t.Fatal("a file that exists is not free")
		}
		if s.state == slotBound {
			again := decodeSlot(encodeBound(s.att))
			if again.state != slotBound || again.att != s.att {
				t.Fatalf("%q is bound to %v, which is written as %q", b, s.att, encodeBound(s.att))
			}
		}
		if s.state == slotRetained && decodeSlot(s.retained.encode()).state != slotRetained {
			t.Fatalf("%q does not survive being written again", b)
		}
	})
}

func FuzzDecodeEntry(f *testing.F) {
	f.Add((&entry{att: Attachment{"c", "eth0"}, boot: "b",
		addrs: testNetwork("10.0.0.0/24", "").Ranges[0].some()}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, err := decodeEntry(b, ""); err == nil {
			if _, err := decodeEntry(e.encode(), ""); err != nil {
				t.Fatalf("%q is written as %q: %v", b, e.encode(), err)
			}
		}
	})
}

func FuzzDecodeClaimAndStamp(f *testing.F) {
	c := &Claim{Version: 1, Key: Key{Identity: "pod:a/b", Pod: "b"},
		Addrs: testNetwork("10.0.0.0/24", "").Ranges[0].some()}
	f.Add(c.encode(), c.Key.hash())
	f.Add([]byte("boot\n12 10.0.0.1 -\nabc\n"), "")
	f.Fuzz(func(t *testing.T, b []byte, hash string) {
		if c, err := decodeClaim(b, hash); err == nil && (c.Key.hash() != hash || len(c.Addrs) == 0) {
			t.Fatalf("%q was taken for %s", b, hash)
		}
		s, err := decodeStamp(b, "")
		if err != nil && !errors.Is(err, ErrNewer) {
			t.Fatal(err)
		}
		if s.mtime >= 0 {
			if again, _ := decodeStamp(s.encode(), ""); again.boot != s.boot || again.mtime != s.mtime ||
				!slices.Equal(again.last, s.last) {
				t.Fatalf("%+v is written as %+v", s, again)
			}
		}
	})
}

func (s RangeSet) some() []netip.Addr { return []netip.Addr{s[0].Start.Next()} }
