package ledger

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/stayput/stayput/pkg/retention"
)

// SetPolicy applies a policy to an attachment whose ADD did not know it, and records its pod and netns if they were
// unknown. Decided attachments keep their policy. The zero Policy decides that nothing is retained. It takes the lock.
// Errors: ErrUnknownAttachment, ErrNewer, or the disk's.
func (l *Ledger) SetPolicy(att Attachment, pod Pod, policy retention.Policy, ns Netns) (*Result, error) {
	return l.run(func(t *decision) error { return t.setPolicy(att, pod, policy, ns) })
}

// Undecided reports whether the attachment has an entry that leaves its policy to SetPolicy. It takes no lock, and does
// not bring the index up to date; it reports true for what it cannot read, and SetPolicy decides.
func (l *Ledger) Undecided(att Attachment) bool {
	e, err := l.entry(att)
	return err != nil || e != nil && e.open
}

// setPolicy applies a policy to an attachment that is open.
func (t *decision) setPolicy(att Attachment, pod Pod, policy retention.Policy, ns Netns) error {
	e, mine, err := t.known(att)
	if err != nil {
		return err
	}
	if len(mine) == 0 {
		return fmt.Errorf("%w: %s has no address", ErrUnknownAttachment, att)
	}
	t.out.addrs = mine
	next := *e
	next.addrs = mine
	if next.netns.Path == "" {
		next.netns = ns
	}
	if next.pod.Name == "" {
		next.pod = pod
	}
	if !e.open {
		if next.netns != e.netns || next.pod != e.pod {
			t.out.do(putEntry{&next, e})
		}
		return nil
	}
	p, clamped := policy.Clamp(t.net.LongestRetention)
	key := NewKey(t.net.Name, pod, p, att.IfName)
	next.open = false
	var held *Claim // the claim restored under the pod's own name before the policy was known
	if e.claim != "" {
		if held, err = t.claim(e.claim); err != nil {
			return err
		}
		if held != nil && !within(held.Addrs, mine) {
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
			ev := clampedEvent(key, policy, p)
			ev.Addrs = mine
			t.out.events = append(t.out.events, ev)
		}
	}
	for _, a := range mine {
		if ours, err := t.ours(a); err != nil {
			return err
		} else if !ours {
			t.out.do(adoptSlot{a})
		}
	}
	t.out.do(putEntry{&next, e})
	if held != nil && held.Key.hash() != next.claim {
		t.out.do(dropClaim{held})
	}
	return nil
}

// Move gives the addresses of from to the attachment of to, which uses them though the ledger does not know it, and
// promises them to its pod. They are bound all the while, also if it fails. Requested is what was seen. Without Addrs
// in the result no promise could be made and nothing has changed; an event says why unless a newer attachment of the
// pod holds its promise. It takes the lock.
//
// Errors: ErrInUse while from's own network namespace lives; ErrUnknownAttachment if from has other addresses by now;
// ErrDuplicate if to has some; ErrNewer. Any other is the disk's.
func (l *Ledger) Move(from Attachment, to AddRequest) (*Result, error) {
	return l.run(func(t *decision) error { return t.move(from, to) })
}

// move gives the addresses of an attachment that is over to the attachment that really has them, and promises them.
//
// They are bound at every moment. Steps: the claim, the old entry, which names it and the namespace that lives, the
// new entry, the address files, durable; the old entry goes last. Killed in between, each address is bound by one
// of two attachments that hold the claim: the DEL of either, their death or the owner's next ADD make it whole.
func (t *decision) move(from Attachment, to AddRequest) error {
	t.own = to.Netns
	e, mine, err := t.known(from)
	if err != nil {
		return err
	}
	if len(mine) != len(t.net.Ranges) || len(mine) != len(to.Requested) ||
		slices.ContainsFunc(to.Requested, func(a netip.Addr) bool { return !slices.Contains(mine, a) }) {
		return fmt.Errorf("%w: requested %v, but %s has %v", ErrUnknownAttachment, to.Requested, from, mine)
	}
	if e.netns.Path != "" && !e.netns.same(to.Netns) && t.alive(e) {
		return fmt.Errorf("%w: %s, which has %v, is still running", ErrInUse, from, mine)
	}
	was, has, err := t.newcomer(to.Attachment)
	if err == nil && len(has) > 0 {
		err = duplicate(to.Attachment, has[0])
	}
	if err != nil {
		return err
	}
	p, _ := valueOf(to.Policy).Clamp(t.net.LongestRetention)
	key := NewKey(t.net.Name, to.Pod, p, to.Attachment.IfName)
	cl, err := t.promise(key, p, mine)
	if err != nil || cl == nil {
		return err
	}
	old := *e
	old.claim, old.open, old.boot, old.netns = key.hash(), false, t.now.BootID, to.Netns
	a := &adding{decision: t, AddRequest: to}
	t.out.do(putEntry{&old, e}, putEntry{a.newEntry(key.hash(), mine, true), was})
	for _, addr := range mine {
		s, err := t.slot(addr)
		if err != nil {
			return err
		}
		a.bind(addr, s)
	}
	t.out.addrs = mine
	t.out.do(syncSlots{}, dropEntry{&old})
	return nil
}
