package ledger

import (
	"fmt"
	"net/netip"
	"slices"
)

// SetPolicy applies a policy to an attachment whose ADD did not know it, and records its pod and netns where
// they were unknown. Decided attachments keep their policy. The zero Policy decides that nothing is retained.
func (l *Ledger) SetPolicy(att Attachment, pod Pod, policy Policy, ns Netns) (*Result, error) {
	return l.run(policyCommand{att, pod, policy, ns})
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

// Move gives the addresses of from to the attachment of to, which uses them though the ledger does not know it, and
// promises them to its pod. They are bound all the while, also where it fails. from must be over: while its own
// network namespace lives it is ErrInUse. Requested is what was seen; where from has other addresses by now it is
// ErrUnknownAttachment. Without Addrs in the result no promise could be made and nothing has changed; an event says
// why unless a newer attachment of the pod holds its promise.
func (l *Ledger) Move(from Attachment, to AddRequest) (*Result, error) {
	return l.run(moveCommand{from, to})
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
