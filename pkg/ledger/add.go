package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// AddRequest asks for an attachment's addresses.
type AddRequest struct {
	Attachment Attachment
	Pod        Pod   // zero: no pod of Kubernetes, nothing is promised
	Netns      Netns // zero: unknown
	// Policy is what the pod's annotations say; nil where they did not reach us, the zero Policy where they
	// ask for nothing.
	Policy    *Policy
	Requested []netip.Addr
}

// patience is the longest that an ADD waits for its predecessor: a longer wait can hold up the runtime's
// other calls, and kubelet tries again every 12 to 14 s.
const patience = 3 * time.Second

// pause is how often a waiting ADD looks again.
const pause = 50 * time.Millisecond

// Add gives the attachment one address per range set: those retained for its identity, else fresh ones. It
// waits for a predecessor that still has them, at most 3 s, and then fails with ErrInUse. A promise is durable
// when Add returns. After an error nothing is allocated.
func (l *Ledger) Add(req AddRequest) (*Result, error) {
	var waited time.Duration
	for {
		r, again, err := l.tryAdd(req, waited >= l.patience)
		if !again {
			return r, err
		}
		l.sleep(pause)
		waited += pause
	}
}

func (l *Ledger) tryAdd(req AddRequest, lastTry bool) (r *Result, again bool, err error) {
	s, err := l.begin()
	if err != nil {
		return nil, false, err
	}
	defer s.end()
	out, err := transition(s, l.net, s.now, addCommand{req})
	if err != nil {
		return nil, false, err
	}
	if p := out.waitFor; p != nil {
		if !lastTry {
			return nil, true, nil
		}
		if !out.soft {
			return nil, false, fmt.Errorf("%w: %s is bound to container %s", ErrInUse, req.Pod, p.ContainerID)
		}
		// The settle time is counted on the clock of the DEL; a clock that stands still must not stop a pod.
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
		case h.lost == nil && h.predecessor == nil:
			t.restore(c, policy, own, h)
			return nil
		case h.lost == nil && !(valueOf(policy).AllocateNew && !h.soft):
			t.out.waitFor, t.out.soft = h.predecessor, h.soft
			return nil
		case h.lost == nil:
			h.lose(MissAllocateNew, "its predecessor is still running and stayput.io/when-in-use is AllocateNew")
		}
		t.event(c, EventNotRestored, fmt.Sprintf("%v: %s", own.Addrs, h.lost.why))
		t.out.events[len(t.out.events)-1].Miss = h.lost.miss
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
			if h.lost == nil && h.predecessor == nil && h.retained() {
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

// holding is what stands behind a claim.
type holding struct {
	lost        *loss // why the claim's addresses cannot be given back; nil: they can
	predecessor *Attachment
	soft        bool
	slots       []slot
	ended       []*entry // attachments that are dead but have not been DELed
}

type loss struct {
	miss Miss
	why  string
}

func (h *holding) lose(m Miss, format string, args ...any) {
	h.lost = &loss{m, fmt.Sprintf(format, args...)}
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
		h.lose(MissRangeChanged, "the network now has %d range sets", len(t.net.Ranges))
	}
	for i, a := range cl.Addrs {
		if h.lost == nil && !t.net.Ranges[i].allocatable(a) {
			h.lose(MissRangeChanged, "%s is outside the network's ranges (%s)", a, t.net.Ranges[i])
		}
	}
	for _, a := range c.Requested {
		if h.lost == nil && !slices.Contains(cl.Addrs, a) {
			h.lose(MissOtherRequested, "the runtime requested %s", a)
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
				h.lose(MissRetainedForOther, "%s is retained for %s", a, s.retained.Key)
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
				h.lose(MissInUse, "%s is in use by %s", a, s.att)
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
