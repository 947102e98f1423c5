package ledger

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// rebuild returns the steps that bring the records into agreement: at the first command of a boot, and if the marker or
// the claims are missing (a data directory on tmpfs, a wiped directory, the first command after a switch from
// host-local). It leaves the picture as it is.
//
// newBoot: the marker names another boot, so that no attachment that stayput knew then can still live. Without a marker
// the boot of a file is unknown, and what is bound stays bound. A file that stayput did not write and the index does
// not know may be host-local's from this boot: it stays until its DEL, or until the agent reclaims it.
//
// No valid address file is replaced but a dead attachment's. Killed anywhere, the marker still says the old boot, and
// the next command begins again.
//
// What a newer version promised stays as it is, file by file. An address of such a claim that has no file gets one
// that says nothing, so that it is not given away.
func rebuild(from *picture, n *Network, now Instant, newBoot bool, live func(Netns, string) Liveness) []step {
	return newRebuilder(from, n, now, newBoot).run(live)
}

// scan returns the steps that complete the index and the claims from the address files. These it takes as they are, but
// for a retained record that its claim has left behind: the entry of an attachment that has no address is what a killed
// ADD left, and must go before the address is another's.
func scan(from *picture, n *Network, now Instant, live func(Netns, string) Liveness) []step {
	r := newRebuilder(from, n, now, false)
	r.scanning = true
	return slices.DeleteFunc(r.run(live), func(st step) bool {
		switch st := st.(type) {
		case putEntry, dropEntry, putClaim:
			return false
		case freeSlot:
			return st.was.state != slotRetained
		}
		return true
	})
}

func newRebuilder(from *picture, n *Network, now Instant, newBoot bool) *rebuilder {
	p := *from
	p.slots = maps.Clone(from.slots)
	r := &rebuilder{
		picture: &p, net: n, now: now, newBoot: newBoot,
		claims: p.claimsByHash(), promised: map[netip.Addr]string{}, bound: map[Attachment][]netip.Addr{},
		explained: map[netip.Addr]*entry{}, newer: map[netip.Addr]*Claim{},
	}
	for a, s := range p.slots {
		if s.state == slotBound {
			r.bound[s.att] = append(r.bound[s.att], a)
		}
	}
	return r
}

func (r *rebuilder) run(live func(Netns, string) Liveness) []step {
	p := r.picture
	for _, c := range p.newerClaims {
		for _, a := range c.Addrs {
			r.newer[a] = c
			if _, there := p.slots[a]; !there {
				r.lost = append(r.lost, a)
			}
		}
	}
	r.remake(live)
	for _, e := range p.entries {
		r.placeEntry(e)
	}
	addrs := slices.SortedFunc(maps.Keys(p.slots), netip.Addr.Compare)
	for _, a := range addrs {
		r.findClaim(a)
	}
	// A claim that took over another's addresses comes before it.
	inOrder := slices.SortedFunc(maps.Keys(r.claims), func(a, b string) int {
		if c := strings.Compare(r.claims[b].From, r.claims[a].From); c != 0 {
			return c
		}
		return strings.Compare(a, b)
	})
	for _, hash := range inOrder {
		r.placeClaim(hash, r.claims[hash])
	}
	for _, hash := range slices.Backward(inOrder) {
		for _, a := range r.claims[hash].Addrs {
			r.promised[a] = hash // in the end by the first
		}
	}
	for _, a := range addrs {
		r.placeSlot(a)
	}
	for _, e := range p.entries {
		if r.stale(e) {
			r.steps = append(r.steps, dropEntry{e})
		} else {
			r.trim(e)
		}
	}
	if len(p.newerClaims)+len(p.newerEntries) > 0 {
		r.leaveNewer()
	}
	return r.steps
}

type rebuilder struct {
	*picture
	net       *Network
	now       Instant
	newBoot   bool
	scanning  bool
	steps     []step
	claims    map[string]*Claim           // by hash
	promised  map[netip.Addr]string       // hash of a claim on the address
	bound     map[Attachment][]netip.Addr // as the address files said at first
	explained map[netip.Addr]*entry       // entry and file agree
	newer     map[netip.Addr]*Claim       // the newer claim that an address is promised by
	lost      []netip.Addr                // those of them that have no file
}

// saysNothing is an address file of no owner.
var saysNothing = []byte("{}\n")

// leaveNewer takes out every step that concerns what a newer version wrote.
func (r *rebuilder) leaveNewer() {
	claims := map[string]bool{}
	for _, c := range r.newerClaims {
		claims[c.Key.hash()] = true
	}
	keep := func(a netip.Addr, was slot) bool {
		return r.newer[a] != nil || was.state == slotBound && r.newerEntries[was.att.hash()] != nil
	}
	r.steps = slices.DeleteFunc(r.steps, func(s step) bool {
		switch s := s.(type) {
		case putSlot:
			return keep(s.addr, s.was)
		case freeSlot:
			return keep(s.addr, s.was)
		case putClaim:
			return claims[s.claim.Key.hash()]
		case putEntry:
			return r.newerEntries[s.entry.att.hash()] != nil
		}
		return false
	})
	for _, a := range r.lost {
		r.steps = append(r.steps, putSlot{a, saysNothing, slot{}})
	}
}

func (r *rebuilder) put(a netip.Addr, data []byte) {
	r.steps = append(r.steps, putSlot{a, data, r.slots[a]})
	s := decodeSlot(data)
	s.ours, s.written = true, r.now.Wall
	r.slots[a] = s
}

// remake makes the address files again that are missing under the attachments of this boot, or that the disk has lost:
// they were wiped, and their addresses would be given away. That a namespace is not to be seen proves nothing: it may
// be an agent's container that looks. But if two entries name one address, that of the namespace that is there counts.
func (r *rebuilder) remake(live func(Netns, string) Liveness) {
	if r.scanning {
		return
	}
	var unseen []*entry
	for _, e := range r.entries {
		switch {
		case e.boot != r.now.BootID || !slices.ContainsFunc(e.addrs, r.missing):
		case live(e.netns, e.boot) == Dead:
			unseen = append(unseen, e)
		default:
			r.bind(e)
		}
	}
	for _, e := range unseen {
		r.bind(e)
	}
}

func (r *rebuilder) missing(a netip.Addr) bool {
	s, there := r.slots[a]
	return !there || s.unread
}

// bind makes the missing address files of an attachment.
func (r *rebuilder) bind(e *entry) {
	for _, a := range e.addrs {
		if r.missing(a) {
			r.put(a, encodeBound(e.att))
			r.bound[e.att] = append(r.bound[e.att], a)
		}
	}
}

// placeEntry notes which addresses an entry explains.
func (r *rebuilder) placeEntry(e *entry) {
	for _, a := range e.addrs {
		if s := r.slots[a]; s.state == slotBound && s.att == e.att {
			r.explained[a] = e
		}
	}
}

// dead reports whether what is bound at a ended with an earlier boot.
func (r *rebuilder) dead(a netip.Addr) bool {
	if r.slots[a].state == slotNewer {
		return false
	}
	if e := r.explained[a]; e != nil {
		return e.boot != r.now.BootID
	}
	return r.newBoot && r.slots[a].ours
}

// findClaim makes the claim of a retained record whose claim was lost.
func (r *rebuilder) findClaim(a netip.Addr) {
	s := r.slots[a]
	if s.state != slotRetained {
		return
	}
	hash := s.retained.Key.hash()
	if r.claims[hash] == nil {
		r.claims[hash] = s.retained.claim()
		r.steps = append(r.steps, putClaim{r.claims[hash], nil})
	}
}

// boundTo returns the addresses that stay an attachment's, in the order of the range sets. An address that is freed
// must not be among them: it will be another attachment's, and after a wipe it would be this attachment's again.
func (r *rebuilder) boundTo(att Attachment) []netip.Addr {
	var addrs []netip.Addr
	for _, a := range r.bound[att] {
		if s := r.slots[a]; s.state == slotBound && s.att == att && !r.dead(a) {
			addrs = append(addrs, a)
		}
	}
	place := func(a netip.Addr) int {
		return slices.IndexFunc(r.net.Ranges, func(s RangeSet) bool { return s.allocatable(a) })
	}
	slices.SortFunc(addrs, func(a, b netip.Addr) int {
		if d := place(a) - place(b); d != 0 {
			return d
		}
		return a.Compare(b)
	})
	return addrs
}

// placeClaim makes the address files say what the claim promises, with one clock for all of them: a
// record that survived says since when, and what is left.
func (r *rebuilder) placeClaim(hash string, c *Claim) {
	fresh := retainedOf(c, r.now, Netns{})
	for _, a := range c.Addrs {
		if s := r.slots[a]; s.state == slotRetained && s.retained.Key == c.Key {
			fresh.Since = s.retained.Since
			if left, ends := s.retained.Expires(r.now); ends {
				fresh.Run = anchorAt(r.now, left)
			}
		}
	}
	for _, a := range c.Addrs {
		s, there := r.slots[a]
		var mine bool
		fresh.Bound = time.Time{}
		switch s.state {
		case slotFree:
			mine = !there
		case slotGarbage:
			mine = !r.scanning
		case slotBound:
			fresh.Bound = s.written
			mine = r.dead(a) && !r.promisedTo(r.explained[a], hash, c.From, a)
		case slotRetained:
			fresh.Bound = s.retained.Bound
			k := s.retained.Key.hash()
			mine = k == c.From
		}
		if mine {
			r.put(a, fresh.encode())
			delete(r.explained, a)
		}
	}
}

// promisedTo reports whether a dead attachment held the address by another claim than these two that is still there.
// What its entry alone says does not count: a power loss can bring back what was written of it.
func (r *rebuilder) promisedTo(e *entry, claim, from string, a netip.Addr) bool {
	if e == nil || e.claim == claim || e.claim == from {
		return false
	}
	other := r.claims[e.claim]
	return other != nil && slices.Contains(other.Addrs, a)
}

// placeSlot decides on an address file that no claim has placed.
func (r *rebuilder) placeSlot(a netip.Addr) {
	s := r.slots[a]
	switch s.state {
	case slotGarbage:
		// No sandbox outlives a boot; in the same boot it may still be in use. A file that the disk has lost may be
		// host-local's of this boot, or a promise.
		if r.newBoot && !s.unread {
			r.steps = append(r.steps, freeSlot{a, s})
		}
	case slotBound:
		e := r.explained[a]
		switch {
		case r.dead(a):
			if e == nil || !r.corrupt[e.claim] {
				r.steps = append(r.steps, freeSlot{a, s})
			}
		case e == nil:
			// Of this boot, but unknown: host-local's, or ours under an index that was lost.
			e = &entry{att: s.att, boot: r.now.BootID, open: true, addrs: r.boundTo(s.att)}
			for _, b := range e.addrs { // those in the ranges are last: its promise may be on these alone
				if hash := r.promised[b]; r.slots[b].ours && hash != "" && !r.contradicts(e.addrs, r.claims[hash]) {
					e.claim = hash
				} else if c := r.newer[b]; r.slots[b].ours && c != nil {
					e.claim = c.Key.hash()
				}
				r.explained[b] = e
			}
			r.steps = append(r.steps, putEntry{entry: e})
		}
	case slotRetained:
		// Left over if a supersede was killed: the claim has moved on.
		if c := r.claims[s.retained.Key.hash()]; c != nil && !slices.Contains(c.Addrs, a) {
			r.steps = append(r.steps, freeSlot{a, s})
		}
	}
}

// contradicts reports whether an attachment has another address in the place of one of a claim: it cannot be the
// claim's. A command that was killed has freed an address of the claim, and left the others.
func (r *rebuilder) contradicts(has []netip.Addr, c *Claim) bool {
	return !within(c.Addrs, has) && slices.ContainsFunc(r.net.Ranges, func(s RangeSet) bool {
		of := func(addrs []netip.Addr) int { return slices.IndexFunc(addrs, s.allocatable) }
		i, j := of(c.Addrs), of(has)
		return i >= 0 && j >= 0 && !slices.Contains(has, c.Addrs[i]) && !slices.Contains(c.Addrs, has[j])
	})
}

// stale reports whether an entry explains nothing any more.
func (r *rebuilder) stale(e *entry) bool {
	if r.corrupt[e.claim] || slices.ContainsFunc(r.newerClaims, func(c *Claim) bool { return c.Key.hash() == e.claim }) {
		return false
	}
	return e.boot != r.now.BootID || !slices.ContainsFunc(e.addrs, func(a netip.Addr) bool { return r.may(e, a) })
}

// may reports whether an address is an entry's, or may be, as its file says nothing.
func (r *rebuilder) may(e *entry, a netip.Addr) bool {
	return r.explained[a] == e || r.slots[a].state == slotGarbage
}

// trim takes from an entry what is not its attachment's: a killed ADD has named addresses that it never bound, and once
// they are another's a wipe must not make them this one's.
func (r *rebuilder) trim(e *entry) {
	if e.boot != r.now.BootID {
		return
	}
	next := *e
	next.addrs = slices.DeleteFunc(slices.Clone(e.addrs), func(a netip.Addr) bool { return !r.may(e, a) })
	if len(next.addrs) > 0 && len(next.addrs) < len(e.addrs) {
		r.steps = append(r.steps, putEntry{&next, e})
	}
}
