package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// AddRequest asks for an attachment's addresses.
type AddRequest struct {
	Attachment Attachment
	Pod        Pod   // zero for no pod of Kubernetes: nothing is promised
	Netns      Netns // zero if unknown
	// Policy is what the pod's annotations say: nil if they did not reach us, the zero Policy if they ask for nothing.
	Policy *retention.Policy
	// Requested are addresses that the result must have, at most one per range set.
	Requested []netip.Addr
	// Pool are addresses of pools, which the cluster has given to the pod: the attachment gets these and no others, in the
	// ranges or not, and nothing is promised. PoolText is the grant that says so: it must be there, with the very text.
	Pool     []netip.Addr
	PoolText string
}

// Patience is the longest that an ADD waits, in all, for its predecessor and for the agent to grant its addresses: a
// longer wait can hold up the runtime's other calls, and kubelet tries again every 12 to 14 s.
const Patience = 3 * time.Second

// Pause is between two tries of a waiting ADD.
const Pause = 50 * time.Millisecond

// Add gives the attachment one address per range set: those retained for its identity, else fresh ones. It takes the
// lock, but not while it waits for a predecessor that still has the addresses, at most for [Patience]. A promise is
// durable when Add returns. After an error nothing is allocated.
//
// Errors: ErrInUse if the predecessor did not go in time; ErrFull; ErrNotAvailable for a requested address;
// ErrDuplicate; ErrNetnsGone; ErrNewer; with addresses of pools ErrNotGranted. Any other is the disk's.
func (l *Ledger) Add(req AddRequest) (*Result, error) {
	var waited time.Duration
	for {
		r, wait, err := l.tryAdd(req, waited >= l.patience)
		if !wait {
			return r, err
		}
		l.sleep(Pause)
		waited += Pause
	}
}

// tryAdd is one try. wait asks for another one, unless this is the last.
func (l *Ledger) tryAdd(req AddRequest, last bool) (r *Result, wait bool, err error) {
	// 1. Take the lock.
	s, err := l.begin()
	if err != nil {
		return nil, false, err
	}
	defer s.end()
	// 2. Addresses of pools need a grant.
	if len(req.Pool) > 0 {
		if err := admit(req, s.grants); err != nil {
			return nil, false, err
		}
	}
	// 3. Decide.
	out, err := s.decide(func(t *decision) error { return t.add(req) })
	switch {
	case err != nil:
		return nil, false, err
	case out.waitFor != nil && !last:
		return nil, true, nil
	case out.waitFor != nil:
		return nil, false, out.inUse(req.Pod)
	}
	// 4. Give nothing to an attachment that has gone while it waited.
	if req.Netns.Ino != 0 && liveness(l.netns, req.Netns, "", s.now) == Dead {
		return nil, false, fmt.Errorf("%w: %s", ErrNetnsGone, req.Netns.Path)
	}
	// 5. Carry it out.
	if err := s.apply(out.steps, true); err != nil {
		return nil, false, err
	}
	for i := range out.events {
		out.events[i].Addrs = out.addrs
	}
	return out.result(), false, nil
}

// inUse is the error of an ADD that has waited for its predecessor in vain.
func (o *outcome) inUse(pod Pod) error {
	if !o.soft {
		return fmt.Errorf("%w: %s is bound to container %s", ErrInUse, pod, o.waitFor.ContainerID)
	}
	// settleTime runs on the clock of the DEL; a clock that stands still must not stop a pod.
	return fmt.Errorf("%w: %s: its network namespace still exists", ErrInUse, pod)
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

// add decides what the attachment gets. Each way to an address gives the order of its steps.
func (t *decision) add(req AddRequest) error {
	a := &adding{decision: t, AddRequest: req}
	t.own = req.Netns
	// 1. An attachment is added once.
	if err := a.refuseDuplicate(); err != nil {
		return err
	}
	// 2. What is no pod of Kubernetes is promised nothing.
	if a.Pod.Name == "" && len(a.Pool) == 0 {
		return a.allocate()
	}
	// 3. The pod's claim is under its key, which its policy is part of.
	if err := a.identify(); err != nil {
		return err
	}
	// 4. A pod of a pool gets what the cluster has given to it.
	if len(a.Pool) > 0 {
		return a.addPooled()
	}
	// 5. A pod gets back what it was promised. If its predecessor has that, it waits.
	if decided, err := a.restoreOwn(); decided || err != nil {
		return err
	}
	// 6. A pod of a shared identity takes what is retained for another one. It never waits.
	if decided, err := a.restoreShared(); decided || err != nil {
		return err
	}
	// 7. Any other gets fresh addresses.
	return a.allocate()
}

// refuseDuplicate returns ErrDuplicate as host-local does: an attachment has one address of each range set, and others
// may have been of other ranges.
func (a *adding) refuseDuplicate() (err error) {
	if a.was, a.has, err = a.newcomer(a.Attachment); err != nil {
		return err
	}
	for _, addr := range a.has {
		if slices.ContainsFunc(a.net.Ranges, func(s RangeSet) bool { return s.allocatable(addr) }) {
			return duplicate(a.Attachment, addr)
		}
	}
	return nil
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

// identify sets the policy that the network allows, and reads the pod's claim.
func (a *adding) identify() (err error) {
	if a.Policy != nil {
		p, clamped := a.Policy.Clamp(a.net.LongestRetention)
		if clamped && !p.WhileOwned && len(a.Pool) == 0 {
			a.event(clampedEvent(Key{}, *a.Policy, p))
		}
		a.policy = &p
	}
	a.key = NewKey(a.net.Name, a.Pod, valueOf(a.policy), a.Attachment.IfName)
	a.own, err = a.claimOf(a.key)
	return err
}

// restoreOwn gives back what the pod was promised, or waits for its predecessor. decided is false if there is nothing
// that can be given back.
func (a *adding) restoreOwn() (decided bool, err error) {
	if a.own == nil {
		return false, nil
	}
	h, err := a.assess(a.own)
	if err != nil {
		return false, err
	}
	switch {
	case h.lost == nil && h.predecessor == nil:
		return true, a.restore(h)
	case h.lost == nil && !(valueOf(a.policy).AllocateNew && !h.soft):
		a.out.waitFor, a.out.soft = h.predecessor, h.soft
		return true, nil
	case h.lost == nil:
		h.lose(MissAllocateNew, "its predecessor is still running and stayput.io/when-in-use is AllocateNew")
	}
	a.event(Event{Reason: EventNotRestored, Miss: h.lost.miss, Message: fmt.Sprintf("%v: %s", a.own.Addrs, h.lost.why)})
	return false, nil
}

// restoreShared takes over the first claim of the pod's shared identity whose addresses are retained. decided is false
// if there is none.
func (a *adding) restoreShared() (decided bool, err error) {
	if !a.key.shared() {
		return false, nil
	}
	siblings, err := a.setClaims(a.key)
	if err != nil {
		return false, err
	}
	for _, s := range siblings {
		if s.Key == a.key {
			continue
		}
		h, err := a.assess(s)
		if err != nil {
			return false, err
		}
		if h.lost == nil && h.predecessor == nil && h.retained() {
			return true, a.takeOver(s, h)
		}
	}
	return false, nil
}

// restore gives the own claim's addresses to the attachment, and fresh ones of the range sets that it has none of. A
// policy that is not known leaves the promise as it is.
//
// Steps: index entry, address files, durable; the claim stays as it is. Killed in between, each address is either still
// retained or bound by an attachment whose entry names the claim: its DEL, its death or the retry of the owner make it
// whole. If the ranges have changed, the claim that says so comes after the address files, as of a fresh allocation;
// until then the entry's own ones are ordinary.
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
	a.out.dropEntries(h.ended)
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
	a.out.dropEntries(h.ended)
	return nil
}

// allocate takes addresses as host-local does and promises them if the policy says so. An own claim could not be
// restored: the newest wins, so it now promises these addresses and lets the older ones go.
//
// Steps: index entry, address files, then the claim, durable, and the names of the address files, durable. Killed
// before the claim is there, nothing was promised, and the entry lets the runtime's DEL undo the rest in O(1). The
// claim comes after the address files, since a claim on an address that is still free could see it given to another pod
// before the next ADD of its owner.
func (a *adding) allocate() error {
	g, err := a.complete(nothing(len(a.net.Ranges)))
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

// grant is what an attachment gets: an address of each range set.
type grant struct {
	addrs []netip.Addr
	slots []slot // what their files say
	fresh []bool // which of them it has not from the claim
}

// complete adds fresh addresses to what stands behind a claim, and ends the expired claims that they are taken from.
func (a *adding) complete(h *holding) (g grant, err error) {
	if len(a.net.Ranges) == 0 {
		return g, fmt.Errorf("%w: the network has no ranges, only pool addresses", ErrNotAvailable)
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
			return g, fmt.Errorf("%w: %v are not in any range of the network", ErrNotAvailable, requested)
		}
		return g, fmt.Errorf("%w: requested %s is in range set %d, from which the pod already has %s: "+
			"expected one address per range set", ErrNotAvailable, addr, i, g.addrs[i])
	}
	a.out.addrs = g.addrs
	return g, a.dropExpired(overdue, g.addrs)
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

// event adds what the event of an ADD says of it.
func (a *adding) event(e Event) {
	e.Key = NewKey(a.net.Name, a.Pod, valueOf(a.Policy), a.Attachment.IfName)
	e.Pod, e.ContainerID, e.Netns, e.Time = a.Pod, a.Attachment.ContainerID, a.Netns.Path, a.now.Wall
	a.out.events = append(a.out.events, e)
}
