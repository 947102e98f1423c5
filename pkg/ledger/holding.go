package ledger

import (
	"fmt"
	"net/netip"
	"slices"
)

// holding is what stands behind a claim.
type holding struct {
	lost        *loss // why the claim's addresses cannot be given back, nil if they can
	predecessor *Attachment
	soft        bool
	// addrs are those of the claim by range set, zero where it has none, and slots what their files say.
	addrs   []netip.Addr
	slots   []slot
	outside []netip.Addr // what else the claim has
	ended   []*entry     // attachments that are dead but have not been DELed
}

// kept returns the addresses of the claim that are in the ranges.
func (h *holding) kept() []netip.Addr {
	return slices.DeleteFunc(slices.Clone(h.addrs), invalidAddr)
}

// nothing is what stands behind no claim, in so many range sets.
func nothing(sets int) *holding {
	return &holding{addrs: make([]netip.Addr, sets), slots: make([]slot, sets)}
}

type loss struct {
	miss Miss
	why  string
}

func (h *holding) lose(m Miss, format string, args ...any) {
	h.lost = &loss{m, fmt.Sprintf(format, args...)}
}

// retained reports whether the addresses are kept for the claim and nothing uses them.
func (h *holding) retained() bool {
	for i, addr := range h.addrs {
		if state := h.slots[i].state; addr.IsValid() && (state == slotFree || state == slotGarbage) {
			return false
		}
	}
	return true
}

// assess finds out whether a claim's addresses can be given to the attachment. Those that are outside the ranges, as
// those of a family that the network no longer has, do not keep it from the others.
func (a *adding) assess(cl *Claim) (*holding, error) {
	h := nothing(len(a.net.Ranges))
	for _, addr := range cl.Addrs {
		i := slices.IndexFunc(a.net.Ranges, func(s RangeSet) bool { return s.allocatable(addr) })
		if i < 0 || h.addrs[i].IsValid() {
			h.outside = append(h.outside, addr)
			continue
		}
		h.addrs[i] = addr
	}
	if len(h.outside) == len(cl.Addrs) {
		h.lose(MissRangeChanged, "%s is outside the network's ranges (%s)", h.outside[0], a.net.Ranges)
	}
	for _, addr := range a.Requested {
		i := slices.IndexFunc(a.net.Ranges, func(s RangeSet) bool { return s.allocatable(addr) })
		if h.lost == nil && (i < 0 || h.addrs[i].IsValid() && h.addrs[i] != addr) {
			h.lose(MissOtherRequested, "the runtime requested %s", addr)
		}
	}
	for i, addr := range h.addrs {
		if !addr.IsValid() {
			continue
		}
		s, err := a.slot(addr)
		if err == nil {
			h.slots[i] = s
			err = a.assessSlot(h, cl, addr, s)
		}
		if err != nil {
			return nil, err
		}
	}
	return h, nil
}

// assessSlot adds to h what stands behind one address of a claim.
func (a *adding) assessSlot(h *holding, cl *Claim, addr netip.Addr, s slot) error {
	hash := cl.Key.hash()
	switch s.state {
	case slotRetained:
		if k := s.retained.Key.hash(); k != hash && k != cl.From {
			h.lose(MissRetainedForOther, "%s is retained for %s", addr, s.retained.Key)
			return nil
		}
		r := s.retained
		d, sameBoot := r.At.elapsed(a.now)
		if sameBoot && d < settleTime && !r.Netns.same(a.Netns) && a.liveness(r.Netns, r.At.Boot) == Alive {
			h.predecessor, h.soft = &Attachment{IfName: cl.Key.IfName}, true
		}
	case slotBound:
		e, err := a.holder(s.att)
		switch {
		case err != nil:
			return err
		case e == nil || e.claim != hash && (e.claim != "" || a.alive(e)):
			h.lose(MissInUse, "%s is in use by %s", addr, s.att)
		case a.alive(e):
			h.predecessor, h.soft = &s.att, false
		default:
			h.ended = append(h.ended, e)
		}
	case slotNewer:
		return a.newer(addr, s)
	case slotGarbage:
		// The claim is the authority on the promise, but the file no longer says who has the address.
		holders, err := a.holders(hash)
		if err != nil {
			return err
		}
		for _, e := range holders {
			if a.alive(e) {
				h.predecessor, h.soft = &e.att, false
			} else {
				h.ended = append(h.ended, e)
			}
		}
	}
	return nil
}
