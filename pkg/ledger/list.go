package ledger

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// This file reads for those who change nothing: no file is written or removed for them. They see what the next
// command would make of the files before it does its own work.

// State is what an address is.
type State string

const (
	StateBound    State = "Bound"
	StateRetained State = "Retained"
	// StateUnreadable is an address file that says nothing: taken, though it is unknown by whom.
	StateUnreadable State = "Unreadable"
	// StateNewer is an address retained by a newer version of stayput: taken, and not to be touched.
	StateNewer State = "Newer"
)

// Address is one address that is not free.
type Address struct {
	Addr  netip.Addr
	State State
	// Attachment, Pod, Netns and Boot are of a bound address; all but the first may be unknown. Boot is the
	// boot in which it was bound.
	Attachment Attachment
	Pod        Pod
	Netns      Netns
	Boot       string
	// Key and Policy are of the claim, if there is one.
	Key    *Key
	Policy retention.Policy
	// Bound is when the address was bound for the last time, zero if it is not known.
	Bound time.Time
	// Since and Left are of a retained address; unless Ends it has no end.
	Since time.Time
	Left  time.Duration
	Ends  bool
	// Newer is set, and satisfies errors.Is with ErrNewer, if a newer version of stayput has decided about the
	// address. What is known of it then is not enough to act on.
	Newer error
}

// List returns every address that is not free, sorted. It takes the lock, but reads the files after giving it back
// unless a rebuild is due or the index is incomplete. So commands that run meanwhile may tear the picture: a command
// that acts on it is told what was seen, and reads for itself. ErrNewer is of a record that says too little even to be
// listed; any other error is the disk's.
func (l *Ledger) List() ([]Address, error) {
	p, now, err := l.view()
	if err != nil {
		return nil, err
	}
	return p.addresses(l, now), nil
}

// view returns the picture with every attachment that has an address in its index.
func (l *Ledger) view() (p *picture, now Instant, err error) {
	for _, locked := range []bool{false, true} {
		s, err := l.beginRead()
		if err != nil {
			return nil, Instant{}, err
		}
		if locked = locked || s.due || !s.trusted; !locked {
			s.unlock()
		}
		p, err = s.picture()
		if locked {
			if err == nil {
				p.complete(s.net, s.now, s.liveness)
			}
			s.unlock()
		}
		// What is hidden was DELed in between, or changed without the lock while a command ran that stamped it.
		if now = s.now; err != nil || locked || !p.hides() {
			return p, now, err
		}
	}
	return p, now, err
}

func (p *picture) addresses(l *Ledger, now Instant) (out []Address) {
	entries, known := p.entriesByAttachment(), p.claimsByHash()
	newer := map[string]error{}
	newerOn := map[netip.Addr]error{}
	for _, c := range p.newerClaims {
		hash := c.Key.hash()
		newer[hash] = newerError(l.inState(claimsDir, hash), c.Version)
		for _, a := range c.Addrs {
			newerOn[a] = newer[hash]
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(p.slots), netip.Addr.Compare) {
		ad := Address{Addr: a}
		switch sl := p.slots[a]; sl.state {
		case slotRetained:
			r := sl.retained
			if ad.Newer = newer[r.Key.hash()]; ad.Newer != nil {
				ad.State = StateNewer
				break
			}
			ad.State, ad.Key, ad.Policy, ad.Netns = StateRetained, &r.Key, r.Policy, r.Netns
			ad.Bound, ad.Since = r.Bound, r.Since
			ad.Left, ad.Ends = r.Expires(now)
		case slotBound:
			ad.State, ad.Attachment, ad.Bound = StateBound, sl.att, sl.written
			e := entries[sl.att]
			if e == nil {
				ad.Newer = p.newerEntries[sl.att.hash()]
				break
			}
			ad.Pod, ad.Netns, ad.Boot, ad.Newer = e.pod, e.netns, e.boot, newer[e.claim]
			if c := known[e.claim]; c != nil {
				ad.Key, ad.Policy = &c.Key, c.Policy
			}
		case slotNewer:
			ad.State, ad.Newer = StateNewer, newerError(l.slotPath(a), sl.retained.Version)
		default:
			ad.State = StateUnreadable
			if ad.Newer = newerOn[a]; ad.Newer != nil {
				ad.State = StateNewer
			}
		}
		out = append(out, ad)
	}
	return out
}

// Find returns the addresses of an attachment, in the order of the range sets; none, or not all, is
// ErrUnknownAttachment. It takes the lock.
func (l *Ledger) Find(att Attachment) ([]netip.Addr, error) {
	s, err := l.beginRead()
	if err != nil {
		return nil, err
	}
	defer s.unlock()
	if !s.due {
		addrs, err := find(s, att)
		if !errors.Is(err, errIncomplete) {
			return addrs, err
		}
	}
	p, err := s.picture()
	if err != nil {
		return nil, err
	}
	p.complete(s.net, s.now, s.liveness)
	return find(p, att)
}

func find(b interface {
	slot(netip.Addr) (slot, error)
	entry(Attachment) (*entry, error)
}, att Attachment) ([]netip.Addr, error) {
	e, err := b.entry(att)
	if err == nil && e == nil {
		e, err = b.entry(Attachment{ContainerID: att.ContainerID})
	}
	if err != nil {
		return nil, err
	}
	if e == nil {
		return nil, fmt.Errorf("%w: %s", ErrUnknownAttachment, att)
	}
	mine, _, err := boundTo(b, e)
	switch {
	case err != nil:
		return nil, err
	case len(mine) == 0:
		return nil, fmt.Errorf("%w: %s", ErrUnknownAttachment, att)
	case len(mine) < len(e.addrs):
		return nil, fmt.Errorf("%w: expected %v, but %s has only %v", ErrUnknownAttachment, e.addrs, att, mine)
	}
	return mine, nil
}

// Prepare does what every command does before its own work, so that what is read next is in the files: it makes the
// directories of the network, rebuilds if that is due, and completes the index. It takes the lock. ErrNewer means
// that the whole network is a newer version's; any other error is the disk's.
func (l *Ledger) Prepare() error { return l.prepare(false) }

func (l *Ledger) prepare(scan bool) error {
	s, err := l.begin()
	if err != nil {
		return err
	}
	defer s.end()
	if s.trusted && !scan {
		return nil
	}
	return s.scan()
}

// sweep returns the view for a command that ends what is over, and rids the index of what does not parse: a kill may
// have torn the entry of an attachment that no DEL ever names.
func (l *Ledger) sweep() (*picture, Instant, error) {
	p, now, err := l.view()
	if err == nil && len(p.corruptEntries) > 0 {
		err = l.prepare(true) // a torn entry may also be an entry that is being written: only the lock can tell
	}
	return p, now, err
}
