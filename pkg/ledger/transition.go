package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// settleTime is how long after a DEL its namespace may keep the address: macvlan and ptp call the IPAM plugin before
// they delete the link. A namespace that stays for longer is kept for another reason.
const settleTime = 3 * time.Second

// errIncomplete ends a decision that needs an attachment which the index does not know, though it may not know all.
var errIncomplete = errors.New("the index is incomplete")

// book is what a decision reads. Absence is a fact: a missing record is nil without an error. An error means
// unknown, and ends the decision without a step.
type book interface {
	slot(netip.Addr) (slot, error)
	ours(netip.Addr) (bool, error) // whether stayput wrote the address file
	written(netip.Addr) (time.Time, error)
	claim(hash string) (*Claim, error) // ErrCorrupt if it does not parse
	// entry and holder return errIncomplete for an attachment that is not in an incomplete index. entry believes the
	// stamp; holder is for an attachment that was seen to have an address, and believes only a scan.
	entry(Attachment) (*entry, error)
	holder(Attachment) (*entry, error)
	setClaims(Key) ([]*Claim, error)                    // every claim of the key's shared identity and interface
	holders(claim string) ([]*entry, error)             // attachments whose entries name the claim, or errIncomplete; slow
	retainedFor(Key) (*Retained, error)                 // the retained slot of a key, found by its content; slow
	counts() (*counts, error)                           // how many claims the network has, or errIncomplete
	promised(RangeSet, string) (all, of int, err error) // how many of a range set are not over, and a namespace's; slow
	last(rangeSet int) netip.Addr
	liveness(ns Netns, boot string) Liveness
}

// The steps of an outcome. They are carried out in their order, and each is atomic: the order is the crash argument,
// given beside the code that makes the steps.
type (
	putEntry struct {
		entry *entry
		// was is the entry that there is already, which must not be torn, since it knows the netns, nil if there is none.
		was *entry
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
	// confirmClaim makes a claim durable that stays as it is: its writer may have been killed in between.
	confirmClaim struct{ claim *Claim }
	// setLast writes host-local's last_reserved_ip.N.
	setLast struct {
		rangeSet int
		addr     netip.Addr
	}
	// syncSlots makes durable which address files there are. Without it a power loss could bring back an older file
	// in the place of a bound one: a retained record that has been running out ever since, or one of a claim that
	// has ended.
	syncSlots struct{}
	// tellFreeing comes before addresses of an attachment that has ended are free or another's: see Options.Freeing.
	tellFreeing struct{ addrs []netip.Addr }
	// noteEnd tells the counts that a retention ends so much later.
	noteEnd struct{ left time.Duration }
	// adoptSlot marks an address file of host-local as known to stayput.
	adoptSlot struct{ addr netip.Addr }
)

type step any

// outcome is what was decided.
type outcome struct {
	steps    []step
	addrs    []netip.Addr
	restored bool
	promised bool // fresh addresses
	// waitFor is set instead of steps if a predecessor must go first; soft if its DEL has come and only its
	// namespace lingers.
	waitFor *Attachment
	soft    bool
	events  []Event
}

func (o *outcome) do(s ...step) { o.steps = append(o.steps, s...) }

func (o *outcome) dropEntries(ended []*entry) {
	for _, e := range ended {
		o.do(dropEntry{e})
	}
}

func (o *outcome) result() *Result {
	return &Result{Addrs: o.addrs, Restored: o.restored, Promised: o.promised, Events: o.events}
}

// decide runs one decision: add, del, setPolicy, move, expire or release. These own every change of the
// ledger but the rebuild. A decision reads the book, changes nothing, and is the same for the same book.
func decide(b book, n *Network, now Instant, f func(*decision) error) (*outcome, error) {
	t := &decision{book: b, net: n, now: now, out: &outcome{}}
	if err := f(t); err != nil {
		return nil, err
	}
	return t.out, nil
}

// decision is a decision in the making.
type decision struct {
	book
	net *Network
	now Instant
	out *outcome
	// repair says that the claim of the command's key did not parse and was put together again.
	repair bool
	// own is the namespace of the command's own attachment, zero if it has none. That it is visible shows that others
	// would be, too.
	own Netns
}

// run makes a decision under the lock and carries it out.
func (l *Ledger) run(f func(*decision) error) (*Result, error) {
	s, err := l.begin()
	if err != nil {
		return nil, err
	}
	defer s.end()
	out, err := s.decide(f)
	if err != nil {
		return nil, err
	}
	return out.result(), s.apply(out.steps, false)
}

// What the decisions share.

// alive reports whether an attachment may still run. One of this boot has ended if its namespace is gone, but only in
// the eyes of those who would see it: an agent without mount propagation sees none of a pod that started after it.
func (t *decision) alive(e *entry) bool {
	return t.liveness(e.netns, e.boot) != Dead || e.boot == t.now.BootID && !t.sees()
}

func (t *decision) sees() bool { return t.own.Ino != 0 && t.liveness(t.own, "") == Alive }

func valueOf(p *retention.Policy) retention.Policy {
	if p == nil {
		return retention.Policy{}
	}
	return *p
}

// boundTo returns the addresses of e whose files agree that e's attachment has them.
func (t *decision) boundTo(e *entry) ([]netip.Addr, error) {
	mine, _, err := boundTo(t, e)
	return mine, err
}

func boundTo(b interface {
	slot(netip.Addr) (slot, error)
}, e *entry) (mine []netip.Addr, files []slot, err error) {
	for _, a := range e.addrs {
		s, err := b.slot(a)
		if err != nil {
			return nil, nil, err
		}
		if s.boundTo(e.att) {
			mine, files = append(mine, a), append(files, s)
		}
	}
	return mine, files, nil
}

// known returns the entry of an attachment that was seen to have addresses, and those that it has; without an entry
// it is ErrUnknownAttachment.
func (t *decision) known(att Attachment) (*entry, []netip.Addr, error) {
	e, err := t.holder(att)
	if err == nil && e == nil {
		err = fmt.Errorf("%w: %s", ErrUnknownAttachment, att)
	}
	if err != nil {
		return nil, nil, err
	}
	mine, err := t.boundTo(e)
	return e, mine, err
}

// claimOf returns the claim of a key. A claim that does not parse is put together again from what the address files
// say.
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

// lostPolicy stands for a policy whose record was lost: the longest that the network allows, since too long costs an
// address and too short breaks a promise.
func (t *decision) lostPolicy() retention.Policy {
	p, _ := retention.Policy{WhileOwned: true}.Clamp(t.net.LongestRetention)
	return p
}

// newer returns the error for an address that a newer version has retained.
func (t *decision) newer(a netip.Addr, s slot) error {
	return newerError(filepath.Join(t.net.DataDir, t.net.Name, a.String()), s.retained.Version)
}

// refuse returns the event that says why no new promise can be made, nil if one can.
func (t *decision) refuse(key Key) (*Event, error) {
	if len(t.net.Ranges) == 0 {
		return nil, nil // of a network that its first ADD will describe
	}
	c, err := t.counts()
	if err != nil {
		return nil, err
	}
	ns := key.Namespace()
	for _, set := range t.net.Ranges {
		most, mostOf := t.net.MostPromised(set), t.net.MostPromisedTo(set)
		all, of := c.all, c.of[ns]
		if int64(all) < most && int64(of) < mostOf {
			continue
		}
		if c.strays || t.now.Boot >= c.due {
			if all, of, err = t.promised(set, ns); err != nil {
				return nil, err
			}
		}
		switch {
		case int64(all) >= most:
			return &Event{Reason: EventRefused, Key: key, Message: fmt.Sprintf(
				"%d addresses of %s are promised, at most %d are allowed: the pod keeps an ordinary address", all, set, most)}, nil
		case int64(of) >= mostOf:
			return &Event{Reason: EventNamespaceRefused, Key: key, Message: fmt.Sprintf(
				"%d addresses of %s are promised to namespace %s, at most %d are allowed: the pod keeps an ordinary address",
				of, set, ns, mostOf)}, nil
		}
	}
	return nil, nil
}

// promise makes a claim on addresses that an attachment has already; nil if that is not allowed.
func (t *decision) promise(key Key, p retention.Policy, mine []netip.Addr) (*Claim, error) {
	was, err := t.claimOf(key)
	if err != nil {
		return nil, err
	}
	if was != nil && slices.Equal(was.Addrs, mine) && was.Policy == p {
		t.out.do(confirmClaim{was})
		return was, nil
	}
	if was != nil && !within(was.Addrs, mine) {
		// The last ADD holds the claim. If that was of another attachment that is bound, this one is the late
		// predecessor.
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
		if refused, err := t.refuse(key); err != nil || refused != nil {
			if refused != nil {
				t.out.events = append(t.out.events, *refused)
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

// within reports whether an attachment has every address of a claim. It may have others beside them, of older ranges.
func within(claimed, has []netip.Addr) bool {
	return !slices.ContainsFunc(claimed, func(a netip.Addr) bool { return !slices.Contains(has, a) })
}

// dropPromise drops a claim and frees what is retained for it, but for the addresses in keep. The claim goes first
// and durably: a power loss must not bring a promise back for an address that was given away. Killed in between, the
// retained records still hold the addresses, and are due.
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
