package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// AddRequest asks for an attachment's addresses.
type AddRequest struct {
	Attachment Attachment
	Pod        Pod   // zero: no pod of Kubernetes, nothing is promised
	Netns      Netns // zero: unknown
	// Policy is what the pod's annotations say: nil if they did not reach us, the zero Policy if they ask for nothing.
	Policy *retention.Policy
	// Requested are addresses that the result must have, at most one per range set.
	Requested []netip.Addr
	// Pool are addresses of pools, which the cluster has given to the pod: the attachment gets these and no others, in the
	// ranges or not, and nothing is promised. PoolText is the text that says so, of the annotation or the agent's file.
	Pool     []netip.Addr
	PoolText string
}

// patience is the longest that an ADD waits for its predecessor: a longer wait can hold up the runtime's other
// calls, and kubelet tries again every 12 to 14 s.
const patience = 3 * time.Second

// pause is between two tries of a waiting ADD.
const pause = 50 * time.Millisecond

// Add gives the attachment one address per range set: those retained for its identity, else fresh ones. It takes the
// lock, but not while it waits for a predecessor that still has the addresses, at most 3 s. A promise is durable when
// Add returns. After an error nothing is allocated.
//
// Errors: ErrInUse if the predecessor did not go in time; ErrFull; ErrNotAvailable for a requested address;
// ErrDuplicate; ErrNetnsGone; ErrNewer; with addresses of pools ErrBarred and ErrUnseen. Any other is the disk's.
func (l *Ledger) Add(req AddRequest) (*Result, error) {
	var waited time.Duration
	for {
		r, wait, err := l.tryAdd(req, waited >= l.patience)
		if !wait {
			return r, err
		}
		l.sleep(pause)
		waited += pause
	}
}

// tryAdd is one try. wait asks for another one, unless this is the last.
func (l *Ledger) tryAdd(req AddRequest, last bool) (r *Result, wait bool, err error) {
	s, err := l.begin()
	if err != nil {
		return nil, false, err
	}
	defer s.end()
	if len(req.Pool) > 0 {
		if err := s.admit(&req); err != nil {
			return nil, false, err
		}
	}
	out, err := s.decide(func(t *decision) error { return t.add(req) })
	if err != nil {
		return nil, false, err
	}
	if p := out.waitFor; p != nil {
		switch {
		case !last:
			return nil, true, nil
		case !out.soft:
			return nil, false, fmt.Errorf("%w: %s is bound to container %s", ErrInUse, req.Pod, p.ContainerID)
		}
		// settleTime runs on the clock of the DEL; a clock that stands still must not stop a pod.
		return nil, false, fmt.Errorf("%w: %s: its network namespace is still there", ErrInUse, req.Pod)
	}
	if req.Netns.Ino != 0 {
		if live := liveness(l.netns, req.Netns, "", s.now); live == Dead {
			return nil, false, fmt.Errorf("%w: %s", ErrNetnsGone, req.Netns.Path)
		}
	}
	if err := s.apply(out.steps, true); err != nil {
		return nil, false, err
	}
	for i := range out.events {
		out.events[i].Addrs = out.addrs
	}
	return out.result(), false, nil
}

// adding is the decision of one ADD.
type adding struct {
	*decision
	AddRequest
	policy *retention.Policy // as far as the network allows it, nil if it is not known
	key    Key               // of the pod's claim
	own    *Claim            // under that key, nil if there is none
	// was is the entry that the attachment has already, and has its addresses, which are of other ranges.
	was *entry
	has []netip.Addr
}

// add gives the pod its retained addresses back, or allocates.
//
// Steps of a fresh allocation: index entry, address files, then the claim, durable, and the names of the address
// files, durable. Killed before the claim is there, nothing was promised, and the entry lets the runtime's DEL undo
// the rest in O(1). The claim comes after the address files, since a claim on an address that is still free could
// see it given to another pod before the next ADD of its owner.
//
// Steps of a restore: entry, address files, durable; the claim stays as it is. Killed in between, each address is
// either still retained or bound by an attachment whose entry names the claim: its DEL, its death or the retry of
// the owner make it whole. If the ranges have changed, the claim that says so comes after the address files, as of a
// fresh allocation; until then the entry's own ones are ordinary.
func (t *decision) add(req AddRequest) error {
	a := &adding{decision: t, AddRequest: req}
	var err error
	if a.was, a.has, err = t.newcomer(req.Attachment); err != nil {
		return err
	}
	// As host-local: one address of each range set, and others may have been of other ranges.
	for _, addr := range a.has {
		if slices.ContainsFunc(a.net.Ranges, func(s RangeSet) bool { return s.allocatable(addr) }) {
			return duplicate(req.Attachment, addr)
		}
	}
	t.own = req.Netns
	if a.Pod.Name == "" && len(a.Pool) == 0 {
		return a.allocate()
	}
	if a.Policy != nil {
		p, clamped := a.Policy.Clamp(a.net.LongestRetention)
		if clamped && !p.WhileOwned && len(a.Pool) == 0 {
			a.event(clampedEvent(Key{}, *a.Policy, p))
		}
		a.policy = &p
	}
	a.key = NewKey(a.net.Name, a.Pod, valueOf(a.policy), a.Attachment.IfName)
	if a.own, err = a.claimOf(a.key); err != nil {
		return err
	}
	if len(a.Pool) > 0 {
		return a.addPooled()
	}
	if a.own != nil {
		h, err := a.assess(a.own)
		if err != nil {
			return err
		}
		switch {
		case h.lost == nil && h.predecessor == nil:
			return a.restore(h)
		case h.lost == nil && !(valueOf(a.policy).AllocateNew && !h.soft):
			a.out.waitFor, a.out.soft = h.predecessor, h.soft
			return nil
		case h.lost == nil:
			h.lose(MissAllocateNew, "its predecessor is still running and stayput.io/when-in-use is AllocateNew")
		}
		a.event(Event{Reason: EventNotRestored, Miss: h.lost.miss, Message: fmt.Sprintf("%v: %s", a.own.Addrs, h.lost.why)})
	}
	if a.key.shared() {
		siblings, err := a.setClaims(a.key)
		if err != nil {
			return err
		}
		for _, s := range siblings {
			if s.Key == a.key {
				continue
			}
			h, err := a.assess(s)
			if err != nil {
				return err
			}
			if h.lost == nil && h.predecessor == nil && h.retained() {
				return a.takeOver(s, h)
			}
		}
	}
	return a.allocate()
}

// newcomer returns the entry that an attachment may have already, and the addresses that it has.
func (t *decision) newcomer(att Attachment) (*entry, []netip.Addr, error) {
	e, err := t.entry(att)
	if err != nil || e == nil {
		return nil, nil, err
	}
	mine, err := t.boundTo(e)
	return e, mine, err
}

func duplicate(att Attachment, has netip.Addr) error {
	return fmt.Errorf("%w: %s has %s", ErrDuplicate, att, has)
}

// holding is what stands behind a claim.
type holding struct {
	lost        *loss // why the claim's addresses cannot be given back, nil if they can
	predecessor *Attachment
	soft        bool
	// addrs are those of the claim by range set, zero where it has none, and slots what their files say.
	addrs   []netip.Addr
	slots   []slot
	outside []netip.Addr // what else the claim has
	ended   []*entry     // attachments that are dead but have not been DELed
}

// kept returns the addresses of the claim that are in the ranges.
func (h *holding) kept() []netip.Addr {
	return slices.DeleteFunc(slices.Clone(h.addrs), invalidAddr)
}

// nothing is what stands behind no claim.
func (a *adding) nothing() *holding {
	n := len(a.net.Ranges)
	return &holding{addrs: make([]netip.Addr, n), slots: make([]slot, n)}
}

type loss struct {
	miss Miss
	why  string
}

func (h *holding) lose(m Miss, format string, args ...any) {
	h.lost = &loss{m, fmt.Sprintf(format, args...)}
}

// retained reports whether the addresses are kept for the claim and nothing uses them.
func (h *holding) retained() bool {
	for i, addr := range h.addrs {
		if state := h.slots[i].state; addr.IsValid() && (state == slotFree || state == slotGarbage) {
			return false
		}
	}
	return true
}

// assess finds out whether a claim's addresses can be given to the attachment. Those that are outside the ranges, as
// those of a family that the network no longer has, do not keep it from the others.
func (a *adding) assess(cl *Claim) (*holding, error) {
	h := a.nothing()
	for _, addr := range cl.Addrs {
		i := slices.IndexFunc(a.net.Ranges, func(s RangeSet) bool { return s.allocatable(addr) })
		if i < 0 || h.addrs[i].IsValid() {
			h.outside = append(h.outside, addr)
			continue
		}
		h.addrs[i] = addr
	}
	if len(h.outside) == len(cl.Addrs) {
		h.lose(MissRangeChanged, "%s is outside the network's ranges (%s)", h.outside[0], a.net.Ranges)
	}
	for _, addr := range a.Requested {
		i := slices.IndexFunc(a.net.Ranges, func(s RangeSet) bool { return s.allocatable(addr) })
		if h.lost == nil && (i < 0 || h.addrs[i].IsValid() && h.addrs[i] != addr) {
			h.lose(MissOtherRequested, "the runtime requested %s", addr)
		}
	}
	for i, addr := range h.addrs {
		if !addr.IsValid() {
			continue
		}
		s, err := a.slot(addr)
		if err == nil {
			h.slots[i] = s
			err = a.assessSlot(h, cl, addr, s)
		}
		if err != nil {
			return nil, err
		}
	}
	return h, nil
}

// assessSlot adds to h what stands behind one address of a claim.
func (a *adding) assessSlot(h *holding, cl *Claim, addr netip.Addr, s slot) error {
	hash := cl.Key.hash()
	switch s.state {
	case slotRetained:
		if k := s.retained.Key.hash(); k != hash && k != cl.From {
			h.lose(MissRetainedForOther, "%s is retained for %s", addr, s.retained.Key)
			return nil
		}
		r := s.retained
		d, sameBoot := r.At.elapsed(a.now)
		if sameBoot && d < settleTime && !r.Netns.same(a.Netns) && a.liveness(r.Netns, r.At.Boot) == Alive {
			h.predecessor, h.soft = &Attachment{IfName: cl.Key.IfName}, true
		}
	case slotBound:
		e, err := a.holder(s.att)
		switch {
		case err != nil:
			return err
		case e == nil || e.claim != hash && (e.claim != "" || a.alive(e)):
			h.lose(MissInUse, "%s is in use by %s", addr, s.att)
		case a.alive(e):
			h.predecessor, h.soft = &s.att, false
		default:
			h.ended = append(h.ended, e)
		}
	case slotNewer:
		return a.newer(addr, s)
	case slotGarbage:
		// The claim is the authority on the promise, but the file no longer says who has the address.
		holders, err := a.holders(hash)
		if err != nil {
			return err
		}
		for _, e := range holders {
			if a.alive(e) {
				h.predecessor, h.soft = &e.att, false
			} else {
				h.ended = append(h.ended, e)
			}
		}
	}
	return nil
}

// newEntry returns the attachment's entry. Unless the policy is decided, the agent or its DEL may still set it.
func (a *adding) newEntry(claim string, addrs []netip.Addr, decided bool) *entry {
	return &entry{
		att: a.Attachment, boot: a.now.BootID, open: !decided, claim: claim, addrs: slices.Concat(addrs, a.has),
		netns: a.Netns, pod: a.Pod,
	}
}

// enter makes the attachment's entry the first step.
func (a *adding) enter(claim string, addrs []netip.Addr, decided bool) {
	st := putEntry{entry: a.newEntry(claim, addrs, decided)}
	if len(a.has) > 0 {
		st.was = a.was
	}
	a.out.do(st)
}

func (a *adding) bind(addr netip.Addr, s slot) { a.out.do(putSlot{addr, encodeBound(a.Attachment), s}) }

// grant is what an attachment gets: an address of each range set.
type grant struct {
	addrs []netip.Addr
	slots []slot // what their files say
	fresh []bool // which of them it has not from the claim
}

// complete adds fresh addresses to what stands behind a claim, and ends the expired claims that they are taken from.
func (a *adding) complete(h *holding) (g grant, err error) {
	if len(a.net.Ranges) == 0 {
		return g, fmt.Errorf("%w: the network has no ranges, only addresses of pools", ErrNotAvailable)
	}
	requested := slices.DeleteFunc(slices.Clone(a.Requested), func(addr netip.Addr) bool {
		return slices.Contains(h.addrs, addr)
	})
	var overdue []slot
	for i, set := range a.net.Ranges {
		addr, s, fresh := h.addrs[i], h.slots[i], false
		if !addr.IsValid() {
			if addr, s, err = a.pick(i, set, &requested); err != nil {
				return g, err
			}
			fresh, overdue = true, append(overdue, s)
		}
		g.addrs, g.slots, g.fresh = append(g.addrs, addr), append(g.slots, s), append(g.fresh, fresh)
	}
	if len(requested) > 0 {
		addr := requested[0]
		i := slices.IndexFunc(a.net.Ranges, func(s RangeSet) bool { _, in := s.find(addr); return in })
		if i < 0 {
			return g, fmt.Errorf("%w: %v in no range of the network", ErrNotAvailable, requested)
		}
		return g, fmt.Errorf("%w: requested %s is of range set %d, of which the pod has %s: each gives one address",
			ErrNotAvailable, addr, i, g.addrs[i])
	}
	a.out.addrs = g.addrs
	return g, a.dropExpired(overdue, g.addrs)
}

// bindEach binds the fresh addresses or the others.
func (a *adding) bindEach(g grant, fresh bool) {
	for i, addr := range g.addrs {
		if g.fresh[i] == fresh {
			a.bind(addr, g.slots[i])
		}
	}
	for i, addr := range g.addrs {
		if fresh && g.fresh[i] {
			a.out.do(setLast{i, addr})
		}
	}
}

// restored says that addresses of a claim were given back, and which could not be.
func (a *adding) restored(h *holding) {
	a.out.restored = true
	if len(h.outside) > 0 {
		a.event(Event{Reason: EventNotRestored, Miss: MissRangeChanged,
			Message: fmt.Sprintf("%v: outside the network's ranges (%s)", h.outside, a.net.Ranges)})
	}
	a.event(Event{Reason: EventRestored, Message: fmt.Sprint(h.kept())})
}

func (a *adding) dropEnded(h *holding) {
	for _, e := range h.ended {
		a.out.do(dropEntry{e})
	}
}

// restore gives the own claim's addresses to the attachment, and fresh ones of the range sets that it has none of. A
// policy that is not known leaves the promise as it is.
func (a *adding) restore(h *holding) error {
	cl := a.own
	g, err := a.complete(h)
	if err != nil {
		return err
	}
	a.restored(h)
	next := *cl
	next.Addrs = g.addrs
	if a.policy != nil {
		next.Policy = *a.policy
	}
	hash := ""
	if next.Policy.Retains() {
		hash = cl.Key.hash()
	}
	a.enter(hash, g.addrs, a.policy != nil)
	a.bindEach(g, true)
	a.bindEach(g, false)
	switch {
	case hash == "":
		// The template no longer asks for anything: the pod has its address once more, as an ordinary one.
		a.out.do(dropClaim{cl})
	case next.Policy != cl.Policy || !slices.Equal(next.Addrs, cl.Addrs) || a.repair:
		a.out.do(putClaim{&next, cl})
	default:
		a.out.do(confirmClaim{cl})
	}
	if err := a.freeAddrs(cl, g.addrs); err != nil {
		return err
	}
	a.out.do(syncSlots{})
	a.dropEnded(h)
	return nil
}

// takeOver gives a sibling's retained addresses to another pod of the shared identity. The new claim is made before
// the address files change, and names the old one in From: killed in between, the files still say the old key and
// the owner of either can restore. Fresh addresses, of range sets that the sibling has none of, are bound before it, as
// in allocate. What an own claim that could not be restored still holds goes, as there.
func (a *adding) takeOver(sibling *Claim, h *holding) error {
	g, err := a.complete(h)
	if err != nil {
		return err
	}
	a.restored(h)
	next := &Claim{Version: recordVersion, Key: a.key, Addrs: g.addrs, Policy: *a.policy, From: sibling.Key.hash()}
	a.enter(a.key.hash(), next.Addrs, true)
	a.bindEach(g, true)
	a.out.do(putClaim{next, a.own})
	a.bindEach(g, false)
	a.out.do(dropClaim{sibling})
	for _, cl := range []*Claim{a.own, sibling} {
		if cl == nil {
			continue
		}
		if err := a.freeAddrs(cl, next.Addrs); err != nil {
			return err
		}
	}
	a.out.do(syncSlots{})
	a.dropEnded(h)
	return nil
}

// allocate takes addresses as host-local does and promises them if the policy says so. An own claim could not be
// restored: the newest wins, so it now promises these addresses and lets the older ones go.
func (a *adding) allocate() error {
	g, err := a.complete(a.nothing())
	if err != nil {
		return err
	}
	promise := valueOf(a.policy)
	if a.policy == nil && a.own != nil {
		promise = a.own.Policy
	}
	key := NewKey(a.net.Name, a.Pod, promise, a.Attachment.IfName)
	if a.own == nil && promise.Retains() {
		refused, err := a.refuse(key)
		if err != nil {
			return err
		}
		if refused != nil {
			a.event(*refused)
			promise = retention.Policy{}
		}
	}
	claim := ""
	if promise.Retains() {
		claim, a.out.promised = key.hash(), true
	}

	a.enter(claim, g.addrs, a.policy != nil)
	a.bindEach(g, true)
	switch {
	case claim != "":
		a.out.do(putClaim{&Claim{Version: recordVersion, Key: key, Addrs: g.addrs, Policy: promise}, a.own})
	case a.own != nil:
		a.out.do(dropClaim{a.own})
	}
	if a.own != nil {
		if err := a.freeAddrs(a.own, g.addrs); err != nil {
			return err
		}
	}
	overdue := slices.ContainsFunc(g.slots, func(s slot) bool { return s.state == slotRetained })
	if claim != "" || a.own != nil || overdue { // a record that a power loss brought back would be a promise again
		a.out.do(syncSlots{})
	}
	return nil
}

// dropExpired ends the expired claims whose addresses are in slots.
func (a *adding) dropExpired(slots []slot, picked []netip.Addr) error {
	seen := map[Key]bool{}
	for _, s := range slots {
		if s.state != slotRetained || a.isOwn(s) || seen[s.retained.Key] {
			continue
		}
		seen[s.retained.Key] = true
		if err := a.dropPromise(s.retained.claim(), picked); err != nil {
			return err
		}
	}
	return nil
}

// isOwn reports whether an address is retained for the own claim.
func (a *adding) isOwn(s slot) bool {
	return s.state == slotRetained && a.own != nil && s.retained.Key == a.own.Key
}

// pick finds the address of one range set: the requested one, else the next free one, else, in a full range, the one
// whose retention has been over for the longest.
func (a *adding) pick(i int, set RangeSet, requested *[]netip.Addr) (netip.Addr, slot, error) {
	for j, addr := range *requested {
		r, ok := set.find(addr)
		if !ok {
			continue
		}
		if set[r].Gateway == addr {
			return addr, slot{}, fmt.Errorf("%w: requested %s is the gateway of %s", ErrNotAvailable, addr, set[r].Subnet)
		}
		s, err := a.slot(addr)
		if err == nil && s.state != slotFree && !a.isOwn(s) {
			if _, over := a.overdue(s); !over {
				err = fmt.Errorf("%w: requested %s is %s", ErrNotAvailable, addr, a.taken(s))
			}
		}
		*requested = slices.Delete(slices.Clone(*requested), j, j+1)
		return addr, s, err
	}
	var found, oldest netip.Addr
	var oldestSlot slot
	var overdue time.Duration
	var failed error
	set.walk(a.last(i), func(addr netip.Addr) bool {
		s, err := a.slot(addr)
		if err != nil {
			failed = err
			return false
		}
		switch s.state {
		case slotFree:
			found = addr
			return false
		case slotRetained:
			if left, over := a.overdue(s); over && left <= overdue {
				oldest, oldestSlot, overdue = addr, s, left
			}
		}
		return true
	})
	switch {
	case failed != nil:
		return found, slot{}, failed
	case found.IsValid():
		return found, slot{}, nil
	case oldest.IsValid():
		return oldest, oldestSlot, nil
	}
	return found, slot{}, fmt.Errorf("%w: range set %d: %s", ErrFull, i, set)
}

// taken says whose an address is that cannot be had. Pods of other namespaces are not named: whoever may ask for
// addresses may not therefore know them.
func (a *adding) taken(s slot) string {
	who := func(namespace, name string) string {
		if namespace != a.Pod.Namespace {
			return "a pod of another namespace"
		}
		return "pod " + name
	}
	switch s.state {
	case slotRetained:
		return "retained for " + who(s.retained.Key.Namespace(), s.retained.Key.Pod)
	case slotBound:
		if e, err := a.entry(s.att); err == nil && e != nil && e.pod.Name != "" {
			return "taken by " + who(e.pod.Namespace, e.pod.Name)
		}
		return "taken by container " + s.att.ContainerID
	}
	return "taken"
}

// overdue reports whether an address is retained for longer than it was promised, and for how long, as a negative
// duration: another pod may have it.
func (a *adding) overdue(s slot) (left time.Duration, over bool) {
	if s.state != slotRetained || !s.retained.expired(a.now) {
		return 0, false
	}
	if _, err := a.claim(s.retained.Key.hash()); errors.Is(err, ErrNewer) {
		return 0, false // it may have another end
	}
	left, _ = s.retained.Expires(a.now)
	return left, true
}

// event adds what the event of an ADD says of it.
func (a *adding) event(e Event) {
	e.Key = NewKey(a.net.Name, a.Pod, valueOf(a.Policy), a.Attachment.IfName)
	e.Pod, e.ContainerID, e.Netns, e.Time = a.Pod, a.Attachment.ContainerID, a.Netns.Path, a.now.Wall
	a.out.events = append(a.out.events, e)
}
