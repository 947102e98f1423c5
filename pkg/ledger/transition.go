package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"
)

// settle is how long after a DEL its namespace may keep the address: macvlan and ptp call the IPAM plugin
// before they delete the link. Longer is a namespace that somebody keeps for another reason.
const settle = 3 * time.Second

// book is what a transition reads. Absence is a fact: a missing record is nil without an error, and an
// error means unknown, which ends the transition without a step.
type book interface {
	slot(netip.Addr) (slot, error)
	ours(netip.Addr) (bool, error)     // whether stayput wrote the address file
	claim(hash string) (*Claim, error) // ErrCorrupt where it does not parse
	entry(Attachment) (*entry, error)
	holder(Attachment) (*entry, error) // entry of an attachment that an address file names
	mark(containerID string) (*Mark, error)
	setClaims(Key) ([]*Claim, error)              // every claim of the key's shared identity and interface
	holders(claim string) ([]*entry, error)       // attachments whose entries name the claim; slow
	retainedFor(Key) (*Retained, error)           // the retained slot of a key found by its content; slow
	countClaims() (int, error)                    // how many claims the network has
	countPromised(RangeSet, Instant) (int, error) // how many live ones lie in a range set; slow
	last(rangeSet int) netip.Addr
	liveness(ns Netns, boot string) Liveness
}

// The steps that a transition returns. They are carried out in their order, each atomic by itself: the order
// is the crash argument, given where the steps are made.
type (
	putEntry struct {
		entry *entry
		// again says that there is an entry already: it must not be torn, since it knows the netns.
		again bool
	}
	dropEntry struct{ was *entry }
	// putSlot replaces an address file; was is what it said.
	putSlot struct {
		addr netip.Addr
		data []byte
		was  slot
	}
	freeSlot struct {
		addr netip.Addr
		was  slot
	}
	// putClaim and dropClaim are durable when they return. was is nil for a new claim.
	putClaim  struct{ claim, was *Claim }
	dropClaim struct{ was *Claim }
	// confirmClaim makes sure that a claim that stays as it is became durable: whoever wrote it may have been
	// killed in between.
	confirmClaim struct{ claim *Claim }
	// setLast writes host-local's last_reserved_ip.N.
	setLast struct {
		rangeSet int
		addr     netip.Addr
	}
	// syncSlots makes durable which address files there are. Without it a power loss could bring back an
	// older file in the place of a bound one: a retained record that has been running out ever since, or one
	// of a claim that has ended.
	syncSlots struct{}
	// adoptSlot marks an address file of host-local as known to stayput.
	adoptSlot struct{ addr netip.Addr }
)

type step any

// outcome is what a transition decided.
type outcome struct {
	steps    []step
	addrs    []netip.Addr
	restored bool
	promised bool // fresh addresses
	// waitFor is set instead of steps where a predecessor must go first; soft where its DEL has come and
	// only its namespace lingers.
	waitFor *Attachment
	soft    bool
	events  []Event
}

func (o *outcome) do(s ...step) { o.steps = append(o.steps, s...) }

// command is the input of a transition.
type command interface{ isCommand() }

type (
	addCommand struct{ AddRequest }
	delCommand struct{ DelRequest }
	// policyCommand sets the policy of an attachment whose ADD did not know it.
	policyCommand struct {
		att    Attachment
		pod    Pod
		policy Policy
		netns  Netns
	}
	// moveCommand gives the addresses of an attachment to the one that really has them, and promises them.
	moveCommand struct {
		from Attachment
		to   AddRequest
	}
	expireCommand  struct{ claim *Claim }
	releaseCommand struct{ claim *Claim }
	// orphanCommand frees a retained address whose claim no longer exists or lists other addresses: between
	// two rebuilds that is what a killed expiry, release or supersede has left.
	orphanCommand struct{ addr netip.Addr }
)

func (addCommand) isCommand()     {}
func (delCommand) isCommand()     {}
func (policyCommand) isCommand()  {}
func (moveCommand) isCommand()    {}
func (expireCommand) isCommand()  {}
func (releaseCommand) isCommand() {}
func (orphanCommand) isCommand()  {}

// transition owns every change of the ledger but the rebuild. It reads the book, decides, and changes
// nothing: equal books give equal outcomes.
func transition(b book, n *Network, now Instant, cmd command) (*outcome, error) {
	t := &decision{book: b, net: n, now: now, out: &outcome{}}
	var err error
	switch c := cmd.(type) {
	case addCommand:
		err = t.add(c)
	case delCommand:
		err = t.del(c)
	case policyCommand:
		err = t.policy(c)
	case moveCommand:
		err = t.move(c)
	case expireCommand:
		err = t.expire(c.claim)
	case releaseCommand:
		err = t.release(c.claim)
	case orphanCommand:
		err = t.orphan(c)
	}
	if err != nil {
		return nil, err
	}
	return t.out, nil
}

type decision struct {
	book
	net *Network
	now Instant
	out *outcome
	// repair says that the claim of the command's key does not parse and was put together again.
	repair bool
}

func (t *decision) alive(e *entry) bool { return t.liveness(e.netns, e.boot) != Dead }

// add gives the pod its retained addresses back, or allocates.
//
// Steps of a fresh allocation: index entry, address files, then the claim, durable, and the names of the
// address files, durable. Killed before the claim is there, nothing was promised, and the entry lets the runtime's DEL undo
// the rest in O(1). The claim comes after the address files, since a claim on an address that is still free
// could see it given to somebody else before the next ADD of its owner.
//
// Steps of a restore: entry, address files, durable; the claim stays as it is. Killed in between, each address is
// either still retained or bound by an attachment whose entry names the claim: its DEL, its death or the
// retry of the owner make it whole.
func (t *decision) add(c addCommand) error {
	if _, err := t.newcomer(c.Attachment); err != nil {
		return err
	}
	if c.Pod.Name == "" {
		return t.allocate(c, nil, nil)
	}

	var policy *Policy
	if c.Policy != nil {
		p, clamped := c.Policy.clamp(t.net.LongestRetention)
		if clamped && !p.WhileOwned {
			t.event(c, EventClamped, fmt.Sprintf("retention %s is longer than the network's longest, %s", c.Policy.Duration(), p.Duration()))
		}
		policy = &p
	}
	key := NewKey(t.net.Name, c.Pod, valueOf(policy), c.Attachment.IfName)
	own, err := t.claimOf(key)
	if err != nil {
		return err
	}
	if own != nil {
		h, err := t.assess(own, c)
		if err != nil {
			return err
		}
		switch {
		case h.lost == "" && h.predecessor == nil:
			t.restore(c, policy, own, h)
			return nil
		case h.lost == "" && !(valueOf(policy).AllocateNew && !h.soft):
			t.out.waitFor, t.out.soft = h.predecessor, h.soft
			return nil
		case h.lost == "":
			h.lost = "its predecessor is still running and stayput.io/when-in-use is AllocateNew"
		}
		t.event(c, EventNotRestored, fmt.Sprintf("%v: %s", own.Addrs, h.lost))
	}
	if key.shared() {
		siblings, err := t.setClaims(key)
		if err != nil {
			return err
		}
		for _, s := range siblings {
			if s.Key == key {
				continue
			}
			h, err := t.assess(s, c)
			if err != nil {
				return err
			}
			if h.lost == "" && h.predecessor == nil && h.retained() {
				t.takeOver(c, *policy, key, own, s, h)
				return nil
			}
		}
	}
	return t.allocate(c, policy, own)
}

// newcomer returns the entry that an attachment without addresses may still have; with one it is ErrDuplicate.
func (t *decision) newcomer(att Attachment) (*entry, error) {
	e, err := t.entry(att)
	if err != nil || e == nil {
		return nil, err
	}
	mine, err := t.boundTo(e)
	if err == nil && len(mine) > 0 {
		err = fmt.Errorf("%w: %s has %s", ErrDuplicate, att, mine[0])
	}
	return e, err
}

// known returns the entry of an attachment and the addresses that are bound to it; without an entry it is
// ErrUnknownAttachment.
func (t *decision) known(att Attachment) (*entry, []netip.Addr, error) {
	e, err := t.entry(att)
	if err == nil && e == nil {
		err = fmt.Errorf("%w: %s", ErrUnknownAttachment, att)
	}
	if err != nil {
		return nil, nil, err
	}
	mine, err := t.boundTo(e)
	return e, mine, err
}

func valueOf(p *Policy) Policy {
	if p == nil {
		return Policy{}
	}
	return *p
}

// claimOf is the claim of a key. One that does not parse is put together again from what the address files say.
func (t *decision) claimOf(key Key) (*Claim, error) {
	c, err := t.claim(key.hash())
	if !errors.Is(err, ErrCorrupt) {
		return c, err
	}
	t.repair = true
	if r, err := t.retainedFor(key); err != nil {
		return nil, err
	} else if r != nil {
		return r.claim(), nil
	}
	holders, err := t.holders(key.hash())
	if err != nil {
		return nil, err
	}
	for _, e := range holders {
		if mine, err := t.boundTo(e); err != nil {
			return nil, err
		} else if len(mine) == len(e.addrs) {
			return &Claim{Version: recordVersion, Key: key, Addrs: e.addrs, Policy: t.lostPolicy()}, nil
		}
	}
	return nil, nil
}

// lostPolicy stands for a policy whose record was lost: the longest that the network allows, since too long
// costs an address and too short breaks a promise.
func (t *decision) lostPolicy() Policy {
	p, _ := Policy{WhileOwned: true}.clamp(t.net.LongestRetention)
	return p
}

// boundTo returns the addresses of e whose files agree that e's attachment has them.
func (t *decision) boundTo(e *entry) ([]netip.Addr, error) {
	var mine []netip.Addr
	for _, a := range e.addrs {
		s, err := t.slot(a)
		if err != nil {
			return nil, err
		}
		if s.boundTo(e.att) {
			mine = append(mine, a)
		}
	}
	return mine, nil
}

// holding is what stands behind a claim.
type holding struct {
	lost        string // why the claim's addresses cannot be given back, or ""
	predecessor *Attachment
	soft        bool
	slots       []slot
	ended       []*entry // attachments that are dead but have not been DELed
}

// retained says whether all addresses are kept for the claim and nobody uses them.
func (h *holding) retained() bool {
	for _, s := range h.slots {
		if s.state == slotFree || s.state == slotGarbage {
			return false
		}
	}
	return true
}

// assess finds out whether the claim's addresses can be given to the attachment of c.
func (t *decision) assess(cl *Claim, c addCommand) (*holding, error) {
	h := &holding{}
	if len(cl.Addrs) != len(t.net.Ranges) {
		h.lost = fmt.Sprintf("the network now has %d range sets", len(t.net.Ranges))
	}
	for i, a := range cl.Addrs {
		if h.lost == "" && !t.net.Ranges[i].allocatable(a) {
			h.lost = fmt.Sprintf("%s is outside the network's ranges (%s)", a, t.net.Ranges[i])
		}
	}
	for _, a := range c.Requested {
		if h.lost == "" && !slices.Contains(cl.Addrs, a) {
			h.lost = fmt.Sprintf("the runtime requested %s", a)
		}
	}
	hash := cl.Key.hash()
	for _, a := range cl.Addrs {
		s, err := t.slot(a)
		if err != nil {
			return nil, err
		}
		h.slots = append(h.slots, s)
		switch s.state {
		case slotRetained:
			if k := s.retained.Key.hash(); k != hash && k != cl.From {
				h.lost = fmt.Sprintf("%s is retained for %s", a, s.retained.Key)
				continue
			}
			r := s.retained
			d, sameBoot := r.At.elapsed(t.now)
			if sameBoot && d < settle && !r.Netns.same(c.Netns) && t.liveness(r.Netns, r.At.Boot) == Alive {
				h.predecessor, h.soft = &Attachment{IfName: cl.Key.IfName}, true
			}
		case slotBound:
			e, err := t.holder(s.att)
			if err != nil {
				return nil, err
			}
			switch {
			case e == nil || e.claim != hash && (e.claim != "" || t.alive(e)):
				h.lost = fmt.Sprintf("%s is in use by %s", a, s.att)
			case t.alive(e):
				h.predecessor, h.soft = &s.att, false
			default:
				h.ended = append(h.ended, e)
			}
		case slotNewer:
			return nil, t.newer(a, s)
		case slotGarbage:
			// The claim is the authority on the promise, but the file no longer says who has the address.
			holders, err := t.holders(hash)
			if err != nil {
				return nil, err
			}
			for _, e := range holders {
				if t.alive(e) {
					h.predecessor, h.soft = &e.att, false
				} else {
					h.ended = append(h.ended, e)
				}
			}
		}
	}
	return h, nil
}

// newer is why nothing is decided about the claim of an address.
func (t *decision) newer(a netip.Addr, s slot) error {
	return newerError(filepath.Join(t.net.DataDir, t.net.Name, a.String()), s.retained.Version)
}

func (t *decision) newEntry(c addCommand, claim string, addrs []netip.Addr, decided bool) *entry {
	return &entry{att: c.Attachment, boot: t.now.BootID, open: !decided, claim: claim, addrs: addrs, netns: c.Netns, pod: c.Pod}
}

func (t *decision) bind(c addCommand, addrs []netip.Addr, slots []slot) {
	for i, a := range addrs {
		t.out.do(putSlot{a, encodeBound(c.Attachment), slots[i]})
	}
	t.out.addrs = addrs
}

func (t *decision) dropEnded(h *holding) {
	for _, e := range h.ended {
		t.out.do(dropEntry{e})
	}
}

// restore gives a claim's addresses to the attachment. A policy that is not known leaves the promise as it is.
func (t *decision) restore(c addCommand, policy *Policy, cl *Claim, h *holding) {
	t.out.restored = true
	t.event(c, EventRestored, fmt.Sprint(cl.Addrs))
	if policy != nil && !policy.Retains() {
		// The template asks for nothing any more: the pod has its address once more, as an ordinary one.
		t.out.do(putEntry{entry: t.newEntry(c, "", cl.Addrs, true)})
		t.bind(c, cl.Addrs, h.slots)
		t.out.do(dropClaim{cl})
		t.out.do(syncSlots{})
		t.dropEnded(h)
		return
	}
	t.out.do(putEntry{entry: t.newEntry(c, cl.Key.hash(), cl.Addrs, policy != nil)})
	t.bind(c, cl.Addrs, h.slots)
	next := *cl
	if policy != nil {
		next.Policy = *policy
	}
	if next.Policy != cl.Policy || t.repair {
		t.out.do(putClaim{&next, cl})
	} else {
		t.out.do(confirmClaim{cl})
	}
	t.out.do(syncSlots{})
	t.dropEnded(h)
}

// takeOver gives a sibling's retained addresses to another pod of the shared identity. The new claim is made
// before the address files change, and names the old one in From: killed in between, the files still say the
// old key and the owner of either can restore.
func (t *decision) takeOver(c addCommand, policy Policy, key Key, own, sibling *Claim, h *holding) {
	t.out.restored = true
	t.event(c, EventRestored, fmt.Sprint(sibling.Addrs))
	next := &Claim{Version: recordVersion, Key: key, Addrs: sibling.Addrs, Policy: policy, From: sibling.Key.hash()}
	t.out.do(putEntry{entry: t.newEntry(c, key.hash(), next.Addrs, true)}, putClaim{next, own})
	t.bind(c, next.Addrs, h.slots)
	t.out.do(dropClaim{sibling})
	t.out.do(syncSlots{})
	t.dropEnded(h)
}

// allocate takes addresses as host-local does and promises them where the policy says so. own is a claim
// that could not be restored: the newest wins, so it now promises these addresses and lets the older ones go.
func (t *decision) allocate(c addCommand, policy *Policy, own *Claim) error {
	requested := slices.Clone(c.Requested)
	var addrs []netip.Addr
	var slots []slot
	for i, set := range t.net.Ranges {
		a, s, err := t.pick(i, set, &requested, own)
		if err != nil {
			return err
		}
		addrs, slots = append(addrs, a), append(slots, s)
	}
	if len(requested) > 0 {
		return fmt.Errorf("%w: %v in no range of the network", ErrNotAvailable, requested)
	}

	promise := valueOf(policy)
	if policy == nil && own != nil {
		promise = own.Policy
	}
	key := NewKey(t.net.Name, c.Pod, promise, c.Attachment.IfName)
	if own == nil && promise.Retains() {
		refused, err := t.refuse()
		if err != nil {
			return err
		}
		if refused != "" {
			t.event(c, EventRefused, refused)
			promise = Policy{}
		}
	}

	claim := ""
	if promise.Retains() {
		claim, t.out.promised = key.hash(), true
	}
	var expired []*Claim
	for _, s := range slots {
		if s.state != slotRetained || own != nil && s.retained.Key == own.Key {
			continue
		}
		victim := s.retained.claim()
		if !slices.ContainsFunc(expired, func(v *Claim) bool { return v.Key == victim.Key }) {
			expired = append(expired, victim)
		}
	}
	for _, v := range expired {
		if err := t.dropPromise(v, addrs); err != nil {
			return err
		}
	}
	t.out.do(putEntry{entry: t.newEntry(c, claim, addrs, policy != nil)})
	t.bind(c, addrs, slots)
	for i, a := range addrs {
		t.out.do(setLast{i, a})
	}
	switch {
	case claim != "":
		t.out.do(putClaim{&Claim{Version: recordVersion, Key: key, Addrs: addrs, Policy: promise}, own})
	case own != nil:
		t.out.do(dropClaim{own})
	}
	if own != nil {
		if err := t.freeAddrs(own, addrs); err != nil {
			return err
		}
	}
	if claim != "" {
		t.out.do(syncSlots{})
	}
	return nil
}

// pick finds the address of one range set: the requested one, else the next free one, else, in a full
// range, the one whose retention has been over for the longest.
func (t *decision) pick(i int, set RangeSet, requested *[]netip.Addr, own *Claim) (netip.Addr, slot, error) {
	for j, a := range *requested {
		r, ok := set.find(a)
		if !ok {
			continue
		}
		if set[r].Gateway == a {
			return a, slot{}, fmt.Errorf("%w: requested %s is the gateway of %s", ErrNotAvailable, a, set[r].Subnet)
		}
		s, err := t.slot(a)
		if err != nil {
			return a, s, err
		}
		if s.state != slotFree && !(s.state == slotRetained && own != nil && s.retained.Key == own.Key) {
			return a, s, fmt.Errorf("%w: requested %s is taken", ErrNotAvailable, a)
		}
		*requested = slices.Delete(slices.Clone(*requested), j, j+1)
		return a, s, nil
	}
	var found, oldest netip.Addr
	var oldestSlot slot
	var overdue time.Duration
	var walkErr error
	set.walk(t.last(i), func(a netip.Addr) bool {
		s, err := t.slot(a)
		if err != nil {
			walkErr = err
			return false
		}
		switch s.state {
		case slotFree:
			found = a
			return false
		case slotRetained:
			if left, ends := s.retained.Expires(t.now); ends && left <= overdue {
				if _, err := t.claim(s.retained.Key.hash()); errors.Is(err, ErrNewer) {
					return true // which may have another end
				}
				oldest, oldestSlot, overdue = a, s, left
			}
		}
		return true
	})
	switch {
	case walkErr != nil:
		return found, slot{}, walkErr
	case found.IsValid():
		return found, slot{}, nil
	case oldest.IsValid():
		return oldest, oldestSlot, nil
	}
	return found, slot{}, fmt.Errorf("%w: range set %d: %s", ErrFull, i, set)
}

// refuse says why no new promise can be made, or "".
func (t *decision) refuse() (string, error) {
	n, err := t.countClaims()
	if err != nil {
		return "", err
	}
	for _, set := range t.net.Ranges {
		most := t.net.MostPromised(set)
		if int64(n) < most {
			continue
		}
		// The quick count includes claims outside the range and over their time.
		exact, err := t.countPromised(set, t.now)
		if err != nil {
			return "", err
		}
		if int64(exact) >= most {
			return fmt.Sprintf("%d addresses of %s are promised, of at most %d: the pod keeps an ordinary address", exact, set, most), nil
		}
	}
	return "", nil
}

// del ends an attachment: its addresses become retained where a claim says so, else free.
//
// DEL decides nothing that ADD or a mark has decided; only an attachment that nobody has yet decided on
// (host-local made it, or the runtime hands on no annotations) takes its policy now. The index entry goes
// last: killed before, a repeated DEL finds the rest.
func (t *decision) del(c delCommand) error {
	e, err := t.entry(c.Attachment)
	if err != nil {
		return err
	}
	if e == nil && c.Attachment.IfName != "" {
		e, err = t.entry(Attachment{ContainerID: c.Attachment.ContainerID}) // host-local before 0.8
	}
	if err != nil || e == nil {
		return err
	}
	mine, err := t.boundTo(e)
	if err != nil {
		return err
	}
	var cl *Claim
	if len(mine) > 0 {
		if cl, err = t.claimAtEnd(c, e, mine); err != nil {
			return err
		}
	}
	ns := e.netns
	if ns.Path == "" {
		ns = c.Netns
	}
	if cl != nil && e.claim == "" {
		// Only this call knew the policy: killed behind it, the next one has to find the claim.
		next := *e
		next.claim, next.open, next.netns = cl.Key.hash(), false, ns
		t.out.do(putEntry{&next, true})
	}
	for _, a := range mine {
		s, err := t.slot(a)
		if err != nil {
			return err
		}
		if cl != nil && slices.Contains(cl.Addrs, a) {
			t.out.do(putSlot{a, retainedOf(cl, t.now, ns).encode(), s})
			t.out.addrs = append(t.out.addrs, a)
		} else {
			t.out.do(freeSlot{a, s})
		}
	}
	t.out.do(dropEntry{e})
	return nil
}

// claimAtEnd is the claim under which the attachment's addresses are retained, nil where they become free.
func (t *decision) claimAtEnd(c delCommand, e *entry, mine []netip.Addr) (*Claim, error) {
	pod, p := c.Pod, valueOf(c.Policy)
	if !p.Retains() {
		m, err := t.mark(e.att.ContainerID)
		if errors.Is(err, ErrNewer) && (e.claim != "" || !e.open) {
			err = nil // it was decided without the mark
		}
		if err != nil {
			return nil, err
		}
		if m != nil {
			pod, p = m.pod(), m.Policy
		}
	}
	p, _ = p.clamp(t.net.LongestRetention)
	ifname := e.att.IfName
	if ifname == "" {
		ifname = c.Attachment.IfName
	}
	if e.claim != "" {
		cl, err := t.claim(e.claim)
		if !errors.Is(err, ErrCorrupt) {
			return cl, err
		}
		if pod.Name == "" {
			pod = e.pod
		}
		if !p.Retains() {
			p = t.lostPolicy()
		}
		key := NewKey(t.net.Name, pod, p, ifname)
		if key.hash() != e.claim {
			return nil, err
		}
		next := &Claim{Version: recordVersion, Key: key, Addrs: e.addrs, Policy: p}
		t.out.do(putClaim{next, nil})
		return next, nil
	}
	if !e.open || pod.Name == "" || !p.Retains() {
		return nil, nil
	}
	return t.promise(NewKey(t.net.Name, pod, p, ifname), p, mine)
}

// promise makes a claim on addresses that an attachment has already, if that is allowed; else nil.
func (t *decision) promise(key Key, p Policy, mine []netip.Addr) (*Claim, error) {
	was, err := t.claimOf(key)
	if err != nil {
		return nil, err
	}
	if was != nil && slices.Equal(was.Addrs, mine) && was.Policy == p {
		t.out.do(confirmClaim{was})
		return was, nil
	}
	if was != nil && !slices.Equal(was.Addrs, mine) {
		// Whoever was ADDed last holds the claim. If that is another attachment that is bound, this one is
		// the late predecessor.
		for _, a := range was.Addrs {
			s, err := t.slot(a)
			if err != nil {
				return nil, err
			}
			if s.state != slotBound {
				continue
			}
			if e, err := t.holder(s.att); err != nil {
				return nil, err
			} else if e != nil && e.claim == key.hash() {
				return nil, nil
			}
		}
	}
	if was == nil {
		if refused, err := t.refuse(); err != nil || refused != "" {
			if refused != "" {
				t.out.events = append(t.out.events, Event{Reason: EventRefused, Key: key, Message: refused})
			}
			return nil, err
		}
	}
	next := &Claim{Version: recordVersion, Key: key, Addrs: mine, Policy: p}
	t.out.do(putClaim{next, was})
	if was != nil {
		return next, t.freeAddrs(was, mine)
	}
	return next, nil
}

// policy applies a mark to an attachment that is open.
func (t *decision) policy(c policyCommand) error {
	e, mine, err := t.known(c.att)
	if err != nil {
		return err
	}
	if len(mine) == 0 {
		return fmt.Errorf("%w: %s has no address", ErrUnknownAttachment, c.att)
	}
	t.out.addrs = mine
	next := *e
	next.addrs = mine
	if next.netns.Path == "" {
		next.netns = c.netns
	}
	if next.pod.Name == "" {
		next.pod = c.pod
	}
	if !e.open {
		if next.netns != e.netns || next.pod != e.pod {
			t.out.do(putEntry{&next, true})
		}
		return nil
	}
	p, clamped := c.policy.clamp(t.net.LongestRetention)
	key := NewKey(t.net.Name, c.pod, p, c.att.IfName)
	next.open = false
	var held *Claim // the claim restored under the pod's own name before the policy was known
	if e.claim != "" {
		if held, err = t.claim(e.claim); err != nil {
			return err
		}
		if held != nil && !slices.Equal(held.Addrs, mine) {
			held = nil // superseded since by a newer attachment of the pod
		}
	}
	var cl *Claim
	if p.Retains() {
		if cl, err = t.promise(key, p, mine); err != nil {
			return err
		}
	}
	next.claim = ""
	if cl != nil {
		next.claim = key.hash()
		if clamped && !p.WhileOwned {
			t.out.events = append(t.out.events, Event{Reason: EventClamped, Key: key, Addrs: mine,
				Message: fmt.Sprintf("retention %s is longer than the network's longest, %s", c.policy.Duration(), p.Duration())})
		}
	}
	for _, a := range mine {
		if ours, err := t.ours(a); err != nil {
			return err
		} else if !ours {
			t.out.do(adoptSlot{a})
		}
	}
	t.out.do(putEntry{&next, true})
	if held != nil && held.Key.hash() != next.claim {
		t.out.do(dropClaim{held})
	}
	return nil
}

// move gives the addresses of an attachment that is over to the one that really has them, and promises them.
//
// They are bound at every moment. Steps: the claim, the old entry, which names it and the namespace that lives, the
// new entry, the address files, durable; the old entry goes last. Killed in between, each address is bound by one
// of two attachments that hold the claim: the DEL of either, their death or the owner's next ADD make it whole.
func (t *decision) move(c moveCommand) error {
	e, mine, err := t.known(c.from)
	if err != nil {
		return err
	}
	if len(mine) != len(t.net.Ranges) || len(mine) != len(c.to.Requested) ||
		slices.ContainsFunc(c.to.Requested, func(a netip.Addr) bool { return !slices.Contains(mine, a) }) {
		return fmt.Errorf("%w: of %v %s has %v", ErrUnknownAttachment, c.to.Requested, c.from, mine)
	}
	if e.netns.Path != "" && !e.netns.same(c.to.Netns) && t.alive(e) {
		return fmt.Errorf("%w: %s, which has %v, still runs", ErrInUse, c.from, mine)
	}
	was, err := t.newcomer(c.to.Attachment)
	if err != nil {
		return err
	}
	p, _ := valueOf(c.to.Policy).clamp(t.net.LongestRetention)
	key := NewKey(t.net.Name, c.to.Pod, p, c.to.Attachment.IfName)
	cl, err := t.promise(key, p, mine)
	if err != nil || cl == nil {
		return err
	}
	old := *e
	old.claim, old.open, old.boot, old.netns = key.hash(), false, t.now.BootID, c.to.Netns
	t.out.do(putEntry{&old, true}, putEntry{t.newEntry(addCommand{c.to}, key.hash(), mine, true), was != nil})
	var slots []slot
	for _, a := range mine {
		s, err := t.slot(a)
		if err != nil {
			return err
		}
		slots = append(slots, s)
	}
	t.bind(addCommand{c.to}, mine, slots)
	t.out.do(syncSlots{}, dropEntry{&old})
	return nil
}

// expire drops a claim whose retention is over, or behind which no address stands any more.
func (t *decision) expire(cl *Claim) error {
	hash := cl.Key.hash()
	for _, a := range cl.Addrs {
		s, err := t.slot(a)
		if err != nil {
			return err
		}
		switch s.state {
		case slotRetained:
			if k := s.retained.Key.hash(); (k == hash || k == cl.From) && !s.retained.expired(t.now) {
				return nil
			}
		case slotBound:
			if e, err := t.holder(s.att); err != nil || e == nil || e.claim == hash {
				return err
			}
		case slotGarbage, slotNewer:
			return nil
		}
	}
	t.out.addrs = cl.Addrs
	return t.end(cl)
}

// end drops a promise for good.
func (t *decision) end(cl *Claim) error {
	err := t.dropPromise(cl, nil)
	t.out.do(syncSlots{})
	return err
}

// release ends a promise on purpose. Bound addresses stay with their attachment until its DEL, which then
// frees them.
func (t *decision) release(cl *Claim) error {
	holders, err := t.holders(cl.Key.hash())
	if err != nil {
		return err
	}
	for _, e := range holders {
		next := *e
		next.claim, next.open = "", false
		t.out.do(putEntry{&next, true})
	}
	t.out.addrs = cl.Addrs
	return t.end(cl)
}

// dropPromise drops a claim and frees what is retained for it, but for the addresses in keep. The claim
// goes first and durably: a power loss must not bring a promise back for an address that was given away.
// Killed in between, the retained records still hold the addresses, and are due.
func (t *decision) dropPromise(cl *Claim, keep []netip.Addr) error {
	cur, err := t.claim(cl.Key.hash())
	if err != nil && !errors.Is(err, ErrCorrupt) {
		return err
	}
	if errors.Is(err, ErrCorrupt) || cur != nil && slices.Equal(cur.Addrs, cl.Addrs) {
		t.out.do(dropClaim{cl})
	}
	return t.freeAddrs(cl, keep)
}

// freeAddrs frees what is retained for a claim, and what its dead attachments left behind, but for keep.
func (t *decision) freeAddrs(cl *Claim, keep []netip.Addr) error {
	hash := cl.Key.hash()
	for _, a := range cl.Addrs {
		if slices.Contains(keep, a) {
			continue
		}
		s, err := t.slot(a)
		if err != nil {
			return err
		}
		switch s.state {
		case slotRetained:
			if s.retained.Key.hash() == hash {
				t.out.do(freeSlot{a, s})
			}
		case slotBound:
			e, err := t.holder(s.att)
			if err != nil {
				return err
			}
			if e != nil && e.claim == hash && !t.alive(e) {
				t.out.do(freeSlot{a, s}, dropEntry{e})
			}
		}
	}
	return nil
}

// orphan frees a retained address without a claim.
func (t *decision) orphan(c orphanCommand) error {
	s, err := t.slot(c.addr)
	if err != nil || s.state != slotRetained {
		return err
	}
	cl, err := t.claim(s.retained.Key.hash())
	if err != nil {
		return err
	}
	if cl != nil && slices.Contains(cl.Addrs, c.addr) {
		return nil
	}
	t.out.addrs = []netip.Addr{c.addr}
	t.out.do(freeSlot{c.addr, s}, syncSlots{})
	return nil
}

func (t *decision) event(c addCommand, reason EventReason, message string) {
	key := NewKey(t.net.Name, c.Pod, valueOf(c.Policy), c.Attachment.IfName)
	t.out.events = append(t.out.events, Event{
		Reason: reason, Key: key, Pod: c.Pod, ContainerID: c.Attachment.ContainerID, Netns: c.Netns.Path, Message: message, Time: t.now.Wall,
	})
}
