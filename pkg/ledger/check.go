package ledger

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/stayput/stayput/pkg/disk"
)

// Check holds the files of the network against the invariants that no single file can break, and returns an error for
// each violation, sorted. What a newer version wrote is among them, and satisfies errors.Is with ErrNewer. It takes the
// lock, reads everything under it, and changes nothing: what the rebuild or scan that is due will mend is no
// violation. Right
// after a crash it may find what the next command that touches it completes or undoes; after that command it finds
// nothing. Errors of Check itself: ErrNewer, or the disk's.
func (l *Ledger) Check() ([]error, error) {
	s, err := l.beginRead()
	if err != nil {
		return nil, err
	}
	defer s.unlock()
	p, err := s.picture()
	if err != nil {
		return nil, err
	}
	if !s.trusted {
		p.complete(s.net, s.now, s.liveness)
	}
	slots, byAtt := p.slots, p.entriesByAttachment()
	var bad []error
	say := func(format string, args ...any) { bad = append(bad, fmt.Errorf(format, args...)) }

	for _, c := range p.newerClaims {
		say("%w", newerError(s.inState(claimsDir, c.Key.hash()), c.Version))
	}
	for hash := range p.corrupt {
		say("claim %s cannot be read", hash)
	}
	for i := range len(s.net.Ranges) + 1 {
		path := s.marker()
		if i > 0 {
			path = s.lastPath(i - 1)
		}
		if _, err := s.fs.ReadFile(path); disk.Unreadable(err) {
			say("%w", err)
		}
	}
	if s.trusted && !s.due {
		n := p.count(s.net, s.now)
		if c, _ := s.readCounts(); c != nil && !(maps.Equal(c.of, n.of) && (c.due <= n.due || n.due <= s.now.Boot)) {
			say("counts: %v promises until %v, but the files show %v until %v", c.of, c.due, n.of, n.due)
		}
	}
	byKey := map[Key]*Claim{}
	owner := map[netip.Addr]*Claim{}
	for _, c := range p.claims {
		byKey[c.Key] = c
		for _, a := range c.Addrs {
			if heldBy(c.Key.hash(), slots[a], byAtt) {
				if o := owner[a]; o != nil {
					say("I2: %s is promised to both %s and %s", a, o.Key, c.Key)
				}
				owner[a] = c
			}
		}
	}
	for a, sl := range slots {
		switch sl.state {
		case slotGarbage:
			say("I5: the file of %s is unreadable", a)
		case slotNewer:
			say("%w", newerError(s.slotPath(a), sl.retained.Version))
		case slotRetained:
			c := byKey[sl.retained.Key]
			if c == nil || !slices.Contains(c.Addrs, a) {
				say("I5: %s is retained for %s, which has no claim to it", a, sl.retained.Key)
			}
			for _, b := range sl.retained.Addrs {
				if heldBy(sl.retained.Key.hash(), slots[b], byAtt) {
					continue
				}
				say("I6: %s is retained for %s, but %s of the same claim is not", a, sl.retained.Key, b)
			}
		case slotBound:
			e := byAtt[sl.att]
			if e == nil {
				if p.newerEntries[sl.att.hash()] == nil {
					say("index: no entry for %s, which has %s", sl.att, a)
				}
				continue
			}
			if !slices.Contains(e.addrs, a) {
				say("I1: %s has %s, but its index entry has %v", sl.att, a, e.addrs)
			}
			for _, b := range e.addrs {
				if o := slots[b]; (o.state != slotBound || o.att != sl.att) && !heldBy(e.claim, o, byAtt) {
					say("I6: %s has %s but not %s", sl.att, a, b)
				}
			}
		}
	}
	slices.SortFunc(bad, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return bad, nil
}

// heldBy reports whether an address file stands behind the claim of that hash.
func heldBy(claim string, sl slot, byAtt map[Attachment]*entry) bool {
	switch sl.state {
	case slotRetained:
		return sl.retained.Key.hash() == claim
	case slotBound:
		e := byAtt[sl.att]
		return e != nil && e.claim != "" && e.claim == claim
	}
	return false
}
