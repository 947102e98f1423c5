package ledger

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// State is what an address is.
type State string

const (
	StateBound    State = "Bound"
	StateRetained State = "Retained"
	// StateUnreadable is an address file that says nothing: taken, by nobody knows whom.
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
	// Key and Policy are of the claim, where there is one.
	Key    *Key
	Policy Policy
	// Since and Left are of a retained address; Ends is false where it has no end.
	Since time.Time
	Left  time.Duration
	Ends  bool
	// Newer is set, and satisfies errors.Is with ErrNewer, where a newer version of stayput has decided about
	// the address. What is known of it then is not enough to act on.
	Newer error
}

// List returns every address that is not free, sorted. It takes the lock only where a boot has to be rebuilt
// or the index completed; the picture may be torn by commands that run meanwhile, so whoever acts on it names
// what it saw, and the command that acts looks again.
//
// It also completes an index whose stamp hides what somebody changed without the lock while a command ran: every
// attachment that it lists can be acted on.
func (l *Ledger) List() ([]Address, error) {
	addrs, hidden, err := l.list(false)
	if err == nil && hidden {
		addrs, _, err = l.list(true)
	}
	return addrs, err
}

// list completes the index where it must or is told to. hidden says that the index does not know an attachment that
// has an address.
func (l *Ledger) list(complete bool) (out []Address, hidden bool, err error) {
	s, err := l.begin()
	if err != nil {
		return nil, false, err
	}
	if complete || !s.trusted {
		err = s.scan()
	}
	s.end()
	if err != nil {
		return nil, false, err
	}
	slots, err := s.allSlots()
	if err != nil {
		return nil, false, err
	}
	entries, newerEntries, err := s.allEntries()
	if err != nil {
		return nil, false, err
	}
	byAtt := map[Attachment]*entry{}
	for _, e := range entries {
		byAtt[e.att] = e
	}
	claims, err := s.allClaims()
	if err != nil {
		return nil, false, err
	}
	known, newer := map[string]*Claim{}, map[string]*Claim{}
	for _, c := range claims.known {
		known[c.Key.hash()] = c
	}
	newerOn := map[netip.Addr]*Claim{}
	for _, c := range claims.newer {
		newer[c.Key.hash()] = c
		for _, a := range c.Addrs {
			newerOn[a] = c
		}
	}
	newerClaim := func(c *Claim) error { return newerError(s.state(claimsDir, c.Key.hash()), c.Version) }
	for _, a := range slices.SortedFunc(maps.Keys(slots), netip.Addr.Compare) {
		switch sl := slots[a]; sl.state {
		case slotRetained:
			r := sl.retained
			if c := newer[r.Key.hash()]; c != nil {
				out = append(out, Address{Addr: a, State: StateNewer, Newer: newerClaim(c)})
				continue
			}
			ad := Address{Addr: a, State: StateRetained, Key: &r.Key, Policy: r.Policy, Since: r.Since, Netns: r.Netns}
			ad.Left, ad.Ends = r.Expires(s.now)
			out = append(out, ad)
		case slotBound:
			ad := Address{Addr: a, State: StateBound, Attachment: sl.att}
			if e := byAtt[sl.att]; e != nil {
				ad.Pod, ad.Netns, ad.Boot = e.pod, e.netns, e.boot
				if c := newer[e.claim]; c != nil {
					ad.Newer = newerClaim(c)
				} else if c := known[e.claim]; c != nil {
					ad.Key, ad.Policy = &c.Key, c.Policy
				}
			} else if hash := sl.att.hash(); newerEntries[hash] {
				_, ad.Newer = s.readEntry(hash)
			} else {
				hidden = true
			}
			out = append(out, ad)
		case slotNewer:
			out = append(out, Address{Addr: a, State: StateNewer, Newer: newerError(s.slotPath(a), sl.retained.Version)})
		default:
			ad := Address{Addr: a, State: StateUnreadable}
			if c := newerOn[a]; c != nil {
				ad.State, ad.Newer = StateNewer, newerClaim(c)
			}
			out = append(out, ad)
		}
	}
	return out, hidden, nil
}
