package ledger

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// world is one node in memory: its disk, clocks, namespaces and a ledger on them, and beside it the plain
// map that the ledger is held against.
type world struct {
	t     testing.TB
	fs    *memFS
	clock *fakeClock
	netns fakeNetns
	net   *Network
	n     int // for names and inodes
	boots int

	live     map[Attachment]*liveAttachment // ADD acknowledged, no DEL acknowledged
	promises map[Key]*promise
	// maybe is the policy of a promise that the ledger may still keep, though nothing demands it: its ADD was killed, or
	// its end is uncertain.
	maybe map[Key]retention.Policy
	// limbo are attachments that may have an address, though none is theirs by right: their ADD was killed, or all traces
	// of them were wiped. Nobody has DELed them yet.
	limbo map[Attachment]*liveAttachment
	// freed are the keys of claims of which some addresses may be free or another's: host-local's DEL has freed them, or
	// they are overdue and a killed ADD has taken them, or a power loss has left them to a file of host-local's. It harms
	// nobody: the next ADD of the owner completes the claim, and the sweep ends one that has no address.
	freed map[Key]bool
	log   []func() string

	known []Attachment // every attachment there ever was, for late DELs
	raw   bool         // files were wiped, and no command has made them again
	// fragile: claims were among them.
	fragile bool
	pool    []netip.Addr // what a test of pools is about

	// ahead is how far the wall clock is ahead of the true time, and read the least and the most of that at any reading
	// that the marker may have by now.
	ahead time.Duration
	read  [2]time.Duration
	// time is the earliest that the network's time can be, and begun that at the first command of the boot; zero if
	// nothing is known of it.
	time, begun time.Time
	revoked     map[int]bool // pods by number, whose grants are
	blindly     bool         // the command that runs sees no namespace, so that every predecessor may live
}

type liveAttachment struct {
	pod    Pod
	policy *retention.Policy
	addrs  []netip.Addr
	netns  Netns
	key    *Key // of the promise that it holds
	// foreign: host-local made it, and no agent has handed in its policy since.
	foreign bool
	// vague: its namespace is not recorded, so that its successor waits for its DEL though it has ended.
	vague bool
}

// promise is what the model demands of the ledger.
type promise struct {
	addrs  []netip.Addr
	policy retention.Policy
	holder *Attachment // nil while retained
	left   time.Duration
	// time is the latest that the network's time can be if it was world.time when the retention began to run.
	time   time.Time
	loose  bool // the clock may run later than the model's: a power loss set it back
	unsure bool // a killed restore may have begun the retention again, at another wall clock
}

func testNetwork(v4, v6 string) *Network {
	n := &Network{Name: "net", DataDir: "/data"}
	for _, s := range []string{v4, v6} {
		if s == "" {
			continue
		}
		r, err := NewRange(netip.MustParsePrefix(s), netip.Addr{}, netip.Addr{}, netip.Addr{})
		if err != nil {
			panic(err)
		}
		n.Ranges = append(n.Ranges, RangeSet{r})
	}
	return n
}

func newWorld(t testing.TB, n *Network) *world {
	clock := &fakeClock{Instant{Wall: time.Unix(1_700_000_000, 0), Boot: time.Hour, BootID: "boot-0"}}
	return &world{
		t: t, fs: newMemFS(clock), netns: fakeNetns{}, net: n, clock: clock,
		live:     map[Attachment]*liveAttachment{},
		promises: map[Key]*promise{},
		maybe:    map[Key]retention.Policy{},
		limbo:    map[Attachment]*liveAttachment{},
		freed:    map[Key]bool{},
	}
}

func (w *world) ledger() *Ledger { return w.ledgerOf(w.netns) }

// ledgerOf is the ledger as a process has it that sees these namespaces. It tries a waiting ADD less often than the
// real one, in the same time.
func (w *world) ledgerOf(ns NetnsProber) *Ledger {
	n := *w.net
	return New(&n, Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: ns,
		Sleep: func(d time.Duration) { w.pass(10 * d) }, Patience: Patience / 10})
}

func (w *world) logf(format string, args ...any) {
	w.log = append(w.log, func() string { return fmt.Sprintf(format, args...) })
}

func (w *world) failf(format string, args ...any) {
	w.t.Helper()
	var log strings.Builder
	for _, line := range w.log {
		log.WriteString("\n  " + line())
	}
	w.t.Fatalf("%s\nhistory:%s\nfiles:\n%s", fmt.Sprintf(format, args...), log.String(), w.fs.dump())
}

func (w *world) newNetns() Netns {
	w.n++
	ns := Netns{Path: fmt.Sprintf("/run/netns/%d", w.n), Dev: 4, Ino: uint64(1000 + w.n)}
	w.netns[ns.Path] = ns
	return ns
}

func (w *world) newContainer() Attachment {
	w.n++
	return Attachment{fmt.Sprintf("c%d", w.n), "eth0"}
}

func (w *world) alive(ns Netns) bool { _, ok := w.netns[ns.Path]; return ok }

// add runs an ADD and holds its answer against the model. attachments is what it was told.
func (w *world) add(pod string, policy *retention.Policy) (Attachment, []netip.Addr, error) {
	w.t.Helper()
	att, ns := w.newContainer(), w.newNetns()
	addrs, err := w.addAs(att, ns, pod, policy)
	return att, addrs, err
}

func (w *world) addAs(att Attachment, ns Netns, pod string, policy *retention.Policy) ([]netip.Addr, error) {
	w.t.Helper()
	p := Pod{Namespace: "default", Name: pod}
	r, err := w.ledger().Add(AddRequest{Attachment: att, Pod: p, Netns: ns, Policy: policy})
	w.logf("ADD %s %s %s -> %v %v", att, pod, described{policy}, addrsOf(r), err)
	w.acknowledge(att, ns, p, policy, r, err)
	return addrsOf(r), err
}

type described struct{ *retention.Policy }

func (d described) String() string {
	if d.Policy == nil {
		return "unknown"
	}
	return fmt.Sprintf("%+v", *d.Policy)
}

func addrsOf(r *Result) []netip.Addr {
	if r == nil {
		return nil
	}
	return r.Addrs
}

// acknowledge checks an ADD's answer and takes it into the model.
func (w *world) acknowledge(att Attachment, ns Netns, pod Pod, policy *retention.Policy, r *Result, err error) {
	w.t.Helper()
	key := NewKey(w.net.Name, pod, valueOf(policy), att.IfName)
	pr := w.promises[key]
	if err != nil {
		if errors.Is(err, ErrFull) {
			return
		}
		if errors.Is(err, ErrInUse) && w.predecessor(att, pod, func(_ Attachment, l *liveAttachment) bool {
			return w.blindly || l.vague || w.alive(l.netns)
		}) {
			return
		}
		w.failf("ADD of %s failed: %v", pod, err)
	}
	w.raw = false
	if len(r.Addrs) != len(w.net.Ranges) {
		w.failf("I6: ADD of %s gave %v", pod, r.Addrs)
	}
	for i, a := range r.Addrs {
		if !w.net.Ranges[i].allocatable(a) {
			w.failf("%s is outside the range %s", a, w.net.Ranges[i])
		}
		for other, l := range w.live {
			if w.alive(l.netns) && slices.Contains(l.addrs, a) {
				w.failf("I1: %s was given to %s while %s has it", a, att, other)
			}
		}
		for k, p := range w.promises {
			sameSet := k.shared() && k.setHash() == key.setHash()
			if k != key && !sameSet && slices.Contains(p.addrs, a) && !w.expired(p) {
				w.failf("I2: %s is promised to %s and was given to %s", a, k, key)
			}
		}
	}
	superseded := pr != nil && valueOf(policy).AllocateNew &&
		w.predecessor(att, pod, func(other Attachment, l *liveAttachment) bool {
			return (w.blindly || l.vague || w.alive(l.netns)) && w.has(other, pr.addrs)
		})
	if pr != nil && !superseded && !w.expired(pr) && !w.holds(r.Addrs, pr.addrs) {
		w.failf("I4: %s was promised %v and got %v", key, pr.addrs, r.Addrs)
	}
	l := &liveAttachment{pod: pod, policy: policy, addrs: r.Addrs, netns: ns}
	w.live[att] = l
	// The promise that these addresses were under ends or passes to this attachment.
	for k, p := range w.promises {
		switch {
		case k != key && !slices.ContainsFunc(r.Addrs, func(a netip.Addr) bool { return slices.Contains(p.addrs, a) }):
		case k != key && w.freed[k]:
			w.forget(k) // a killed ADD had begun to end it: the sweep goes on
		default:
			delete(w.promises, k)
		}
	}
	refused := slices.ContainsFunc(r.Events, isRefusal)
	if refused && pr != nil && !w.expired(pr) {
		w.failf("the promise of %v to %s was taken back for space", pr.addrs, key)
	}
	promised := valueOf(policy)
	asPromised := r.Restored || r.Promised // without that an overdue promise has ended
	if policy == nil && pr != nil && (asPromised || !w.expired(pr)) {
		promised = pr.policy
	} else if policy == nil && asPromised {
		kept, ok := w.maybe[key]
		if !ok {
			w.failf("%s was promised nothing and got %v as promised", key, r.Addrs)
		}
		promised = kept
	}
	delete(w.maybe, key) // this ADD has completed or undone it
	delete(w.freed, key)
	if promised.Retains() && !refused {
		w.promises[key] = &promise{addrs: r.Addrs, policy: promised, holder: &att}
		l.key = &key
	}
}

// predecessor reports whether there is an attachment of the same pod and interface that may keep att waiting.
func (w *world) predecessor(att Attachment, pod Pod, may func(Attachment, *liveAttachment) bool) bool {
	for _, there := range []map[Attachment]*liveAttachment{w.live, w.limbo} {
		for other, l := range there {
			if l.pod == pod && other.IfName == att.IfName && may(other, l) {
				return true
			}
		}
	}
	return false
}

// has reports whether the file of one of the addresses says that the attachment has it.
func (w *world) has(att Attachment, addrs []netip.Addr) bool {
	return slices.ContainsFunc(addrs, func(a netip.Addr) bool {
		s, err := w.ledger().slot(a)
		if err != nil {
			w.failf("reading %s: %v", a, err)
		}
		return s.boundTo(att)
	})
}

// inRanges reports whether the network as it is now can give these addresses to a pod.
func (w *world) inRanges(addrs []netip.Addr) bool {
	if len(addrs) != len(w.net.Ranges) {
		return false
	}
	for i, a := range addrs {
		if !w.net.Ranges[i].allocatable(a) {
			return false
		}
	}
	return true
}

// holds reports whether an ADD gave what was promised, as far as the network still has it. It may add a family.
func (w *world) holds(given, promised []netip.Addr) bool {
	return !slices.ContainsFunc(promised, func(a netip.Addr) bool { return w.gives(a) && !slices.Contains(given, a) })
}

// gives reports whether the network as it is now can give an address to a pod.
func (w *world) gives(a netip.Addr) bool {
	return slices.ContainsFunc(w.net.Ranges, func(s RangeSet) bool { return s.allocatable(a) })
}

func (w *world) expired(p *promise) bool {
	return p.holder == nil && p.policy.Retention > 0 && p.left <= 0
}

func (w *world) del(att Attachment) {
	w.t.Helper()
	_, err := w.ledger().Del(DelRequest{Attachment: att})
	w.logf("DEL %s -> %v", att, err)
	if err != nil {
		w.failf("DEL failed: %v", err)
	}
	w.raw = w.raw && !w.whole()
	w.ended(att)
}

// whole reports whether the ledger has made again what was wiped. The DEL of an attachment that the index knows, and
// that holds no promise, need not.
func (w *world) whole() bool {
	s, err := w.ledger().beginRead()
	if err != nil {
		w.failf("reading: %v", err)
	}
	s.unlock()
	return s.trusted && !s.due
}

// ended takes the end of an attachment into the model.
func (w *world) ended(att Attachment) {
	delete(w.limbo, att)
	l := w.live[att]
	if l == nil {
		return
	}
	delete(w.live, att)
	if l.key == nil {
		return
	}
	if p := w.promises[*l.key]; p != nil && p.holder != nil && *p.holder == att {
		p.holder, p.left, p.time = nil, p.policy.Duration(), w.time
	}
}

// attachments lists the live ones in the same order for every run.
func (w *world) attachments() []Attachment {
	return slices.SortedFunc(maps.Keys(w.live),
		func(a, b Attachment) int { return strings.Compare(a.String(), b.String()) })
}

// keys lists what is promised in the same order for every run.
func (w *world) keys() []Key {
	return slices.SortedFunc(maps.Keys(w.promises), func(a, b Key) int { return strings.Compare(a.String(), b.String()) })
}

func (w *world) advance(d time.Duration) {
	w.logf("advance %s", d)
	w.pass(d)
}

func (w *world) pass(d time.Duration) {
	w.clock.advance(d)
	if !w.time.IsZero() {
		w.time = w.time.Add(d)
	}
	for _, p := range w.promises {
		if p.holder == nil {
			p.left -= d
			p.time = p.time.Add(d)
		}
	}
}

// jump sets the wall clock. The next command may read it, or not.
func (w *world) jump(d time.Duration) {
	w.logf("the wall clock jumps by %s", d)
	w.clock.now.Wall = w.clock.now.Wall.Add(d)
	w.ahead += d
	w.read = [2]time.Duration{min(w.read[0], w.ahead), max(w.read[1], w.ahead)}
}

// forgetTime is about a marker that is lost: of the network's time is known only that it counts no more than the wall
// clock passes between two readings.
func (w *world) forgetTime() {
	w.time, w.begun = time.Time{}, time.Time{}
	for _, p := range w.promises {
		p.time = time.Time{}
	}
}

// boot is a power loss or reboot: every namespace is gone, every attachment dead.
func (w *world) boot(off time.Duration) { w.bootWrong(off, 0) }

// bootWrong is a boot after which the wall clock is wrong by so much more than before.
func (w *world) bootWrong(off, jump time.Duration) {
	w.boots++
	w.logf("boot after %s, the clock jumps by %s", off, jump)
	truth := w.clock.now.Wall.Add(-w.ahead)
	first, last := truth.Add(w.read[0]), truth.Add(w.read[1])
	w.clock.now = Instant{Wall: w.clock.now.Wall.Add(off + jump), Boot: time.Second,
		BootID: fmt.Sprintf("boot-%d", w.boots)}
	w.ahead += jump
	w.read = [2]time.Duration{w.ahead, w.ahead}
	if b, err := w.fs.ReadFile(w.ledger().marker()); err != nil || !strings.Contains(string(b), "\nboot-") {
		w.forgetTime()
	}
	wall := w.clock.now.Wall
	for _, p := range w.promises {
		if p.holder == nil && !w.expired(p) {
			passed := max(0, wall.Sub(later(p.time, first)))
			p.left -= passed
			p.time = p.time.Add(passed)
		}
	}
	if !w.time.IsZero() {
		if last.After(w.time) {
			wall = w.time.Add(wall.Sub(last))
		}
		w.time = later(w.begun, wall)
		w.begun = w.time
	}
	clear(w.netns)
	for _, att := range w.attachments() {
		w.ended(att)
	}
	for k, p := range w.promises {
		if w.expired(p) || p.unsure { // whatever the wall clock says afterwards
			delete(w.promises, k)
			w.maybe[k] = p.policy
			continue
		}
		p.loose = true
	}
}

func (w *world) prepare() {
	w.t.Helper()
	if err := w.ledger().Prepare(); err != nil {
		w.failf("Prepare: %v", err)
	}
	w.raw = false
	w.read = [2]time.Duration{w.ahead, w.ahead}
}

// losePower is a power loss that takes all that was not made durable, and the agent's start after it.
func (w *world) losePower(off time.Duration) {
	w.t.Helper()
	w.fs.lose("durable", nil)
	w.boot(off)
	w.prepare()
}

// check holds the files against the invariants.
func (w *world) check() {
	w.t.Helper()
	bad, err := w.ledger().Check()
	if err != nil {
		w.failf("Check: %v", err)
	}
	bad = slices.DeleteFunc(bad, func(err error) bool {
		for k := range w.freed {
			if strings.Contains(err.Error(), "is retained for "+k.String()+", but") {
				return true // killed when one family was bound again, with nothing behind the other
			}
		}
		att, _, ok := strings.Cut(strings.TrimPrefix(err.Error(), "I6: "), " has ")
		// What a kill or a power loss left of an attachment stays half-way until its DEL.
		return ok && !slices.ContainsFunc(w.attachments(), func(l Attachment) bool {
			return l.String() == att && w.alive(w.live[l].netns)
		})
	})
	if len(bad) > 0 {
		w.failf("Check: %v", errors.Join(bad...))
	}
}

// explained demands that nothing is promised for which the model knows no reason.
func (w *world) explained() {
	w.t.Helper()
	claims, err := w.ledger().allClaims()
	if err != nil {
		w.failf("claims: %v", err)
	}
	if !w.raw { // else a claim or a record may be made again
		slots, err := w.ledger().allSlots()
		if err != nil {
			w.failf("address files: %v", err)
		}
		left := map[Key]bool{}
		for _, c := range claims.claims {
			left[c.Key] = true
		}
		for _, s := range slots {
			if s.state == slotRetained {
				left[s.retained.Key] = true
			}
		}
		maps.DeleteFunc(w.freed, func(k Key, _ bool) bool { return !left[k] })
	}
	for _, c := range claims.claims {
		if _, maybe := w.maybe[c.Key]; !maybe && w.promises[c.Key] == nil {
			w.failf("I5: %v is promised to %s for no reason", c.Addrs, c.Key)
		}
	}
}

// settle ends everything and demands that nothing stays taken: the leaks of commands that were killed are
// reclaimed as the agent would.
func (w *world) settle() {
	w.t.Helper()
	for _, att := range w.attachments() {
		w.del(att)
	}
	clear(w.netns)
	w.prepare()
	w.reclaimBound()
	w.dropUnreadable()
	w.advance(10_000 * time.Hour)
	l := w.ledger()
	if _, _, err := l.Expire(); err != nil {
		w.failf("Expire: %v", err)
	}
	addrs, err := l.List()
	if err != nil {
		w.failf("List: %v", err)
	}
	for _, a := range addrs {
		if a.State != StateRetained || a.Ends {
			w.failf("I5: leaked %+v", a)
		}
	}
	if err := l.Collect(nil); err != nil { // entries of attachments that got no address and no DEL
		w.failf("GC: %v", err)
	}
	if index, err := w.ledger().names(w.ledger().inState(indexDir)); err != nil || len(index) > 0 {
		w.failf("I5: left in the index: %v, %v", index, err)
	}
	w.check()
}

// killed is the panic of a kill -9.
type killed struct{}

// killAt runs f and kills it before its nth change of the disk. It reports whether f got there.
func (w *world) killAt(n int, f func()) (hit bool) {
	w.fs.before = func(op, path string) error {
		if n--; n < 0 {
			panic(killed{})
		}
		return nil
	}
	defer func() {
		w.fs.before = nil
		w.fs.locked = false
		if p := recover(); p != nil {
			if _, ok := p.(killed); !ok {
				panic(p)
			}
			hit = true
		}
	}()
	f()
	return false
}

var (
	tenMinutes = &retention.Policy{
		Retention: retention.Duration(10 * time.Minute), WhenScaled: "Retain", WhenDeleted: "Retain",
	}
	forever  = &retention.Policy{WhileOwned: true, WhenScaled: "Release", WhenDeleted: "Release"}
	newOne   = &retention.Policy{Retention: retention.Duration(10 * time.Minute), AllocateNew: true}
	shared   = &retention.Policy{Retention: retention.Duration(10 * time.Minute), Identity: "web"}
	ordinary = &retention.Policy{}
)

func isRefusal(e Event) bool { return e.Reason == EventRefused || e.Reason == EventNamespaceRefused }
