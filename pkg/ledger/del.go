package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/stayput/stayput/pkg/retention"
)

// DelRequest ends an attachment. Pod and Policy serve if its ADD was not ours, Netns if that recorded none.
type DelRequest struct {
	Attachment Attachment
	Pod        Pod
	Netns      Netns
	Policy     *retention.Policy
	// Seen says that an address file was seen to name the attachment. If the index does not know the attachment, the index
	// is completed first, even if its stamp says that it is complete: what was written without the lock may be missing.
	Seen bool
}

// Del ends an attachment: its addresses become retained or free. An attachment without an address is none of our
// business, and no error. It takes the lock.
//
// After an error, which is ErrNewer or the disk's, nothing that is promised was given away; a later command or the
// agent finishes.
func (l *Ledger) Del(req DelRequest) (*Result, error) {
	return l.run(func(t *decision) error {
		if req.Seen {
			return t.del(req, t.holder)
		}
		return t.del(req, t.entry)
	})
}

// Reclaim ends an attachment that leaked, as its DEL would: what is promised becomes retained, the rest free. It
// takes the lock. An attachment without an address is no error; the errors are Del's.
func (l *Ledger) Reclaim(att Attachment) (*Result, error) {
	return l.Del(DelRequest{Attachment: att, Seen: true})
}

// Collect ends every attachment that is not in valid, as its DEL would (CNI SPEC 1.1, GC). Retained addresses stay.
// It takes the lock for each that it ends. The failure of one does not keep the others: the errors are joined.
func (l *Ledger) Collect(valid []Attachment) error {
	p, _, err := l.sweep()
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range p.entries {
		if slices.ContainsFunc(valid, func(a Attachment) bool {
			return a == e.att || a.ContainerID == e.att.ContainerID && e.att.IfName == ""
		}) {
			continue
		}
		if _, err := l.Reclaim(e.att); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.att, err))
		}
	}
	return errors.Join(errs...)
}

// del ends an attachment: its addresses become retained if a claim says so, else free.
//
// DEL decides nothing that ADD or the agent has decided; only an attachment that is still open (host-local made it, or
// the runtime hands ADD no annotations) takes its policy now. The index entry goes last: killed before, a repeated DEL
// finds the rest.
func (t *decision) del(req DelRequest, find func(Attachment) (*entry, error)) error {
	e, err := find(req.Attachment)
	if err == nil && e == nil && req.Attachment.IfName != "" {
		e, err = find(Attachment{ContainerID: req.Attachment.ContainerID}) // host-local before 0.8
	}
	if err != nil || e == nil {
		return err
	}
	mine, files, err := boundTo(t, e)
	if err != nil {
		return err
	}
	var cl *Claim
	if len(mine) > 0 {
		t.out.do(tellFreeing{mine})
		if cl, err = t.claimAtEnd(req, e, mine); err != nil {
			return err
		}
	}
	ns := e.netns
	if ns.Path == "" {
		ns = req.Netns
	}
	if cl != nil && e.claim == "" {
		// Only this call knew the policy: killed behind it, the next one has to find the claim.
		next := *e
		next.claim, next.open, next.netns = cl.Key.hash(), false, ns
		t.out.do(putEntry{&next, e})
	}
	if cl != nil && cl.Policy.Retention > 0 {
		t.out.do(noteEnd{cl.Policy.Duration()})
	}
	for i, a := range mine {
		if cl != nil && slices.Contains(cl.Addrs, a) {
			r := retainedOf(cl, t.now, ns)
			if r.Bound, err = t.written(a); err != nil {
				return err
			}
			t.out.do(putSlot{a, r.encode(), files[i]})
			t.out.addrs = append(t.out.addrs, a)
		} else {
			t.out.do(freeSlot{a, files[i]})
		}
	}
	t.out.do(dropEntry{e})
	return nil
}

// claimAtEnd returns the claim under which the attachment's addresses are retained, nil if they become free.
func (t *decision) claimAtEnd(req DelRequest, e *entry, mine []netip.Addr) (*Claim, error) {
	pod, asked := req.Pod, valueOf(req.Policy)
	p, clamped := asked.Clamp(t.net.LongestRetention)
	ifname := e.att.IfName
	if ifname == "" {
		ifname = req.Attachment.IfName
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
	key := NewKey(t.net.Name, pod, p, ifname)
	cl, err := t.promise(key, p, mine)
	if cl != nil && clamped && !p.WhileOwned {
		t.out.events = append(t.out.events, clampedEvent(key, asked, p))
	}
	for i := range t.out.events {
		ev := &t.out.events[i]
		ev.Pod, ev.ContainerID, ev.Netns, ev.Addrs, ev.Time = pod, e.att.ContainerID, e.netns.Path, mine, t.now.Wall
	}
	return cl, err
}
