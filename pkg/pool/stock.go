package pool

import (
	"net/netip"
	"slices"
	"time"
)

// stock is a pool and what is free of it.
type stock struct {
	Pool
	fresh Set // never used, as far as is known
	// freed are addresses that were in use and no longer are, the longest free first.
	freed []netip.Addr
	// last is the address that was taken last: allocation goes on behind it.
	last   netip.Addr
	lastAt time.Time
	// reserved are addresses for which a write is under way.
	reserved map[netip.Addr]time.Time
	in, out  map[netip.Addr]bool // of its PodIPs: those in range, and those that are not
	// withheld are those that a pod without a PodIP has, by Calico's IPAM.
	withheld map[netip.Addr]bool
}

// freedMost is how many freed addresses of a pool are told from those that were never used.
const freedMost = 10_000

// reservedFor is longer than a write can be under way.
const reservedFor = time.Minute

// take notes that an address is in use.
func (s *stock) take(p *PodIP) {
	if p.Pool == s.Name {
		if s.Range.Set.Contains(p.Addr) {
			s.in[p.Addr] = true
		} else {
			s.out[p.Addr] = true
		}
		if p.Created.After(s.lastAt) {
			s.last, s.lastAt = p.Addr, p.Created
		}
	}
	delete(s.reserved, p.Addr)
	delete(s.withheld, p.Addr)
	s.remove(p.Addr)
}

// remove takes an address out of those that can be given.
func (s *stock) remove(a netip.Addr) {
	if !s.fresh.remove(a) {
		if i := slices.Index(s.freed, a); i >= 0 {
			s.freed = slices.Delete(s.freed, i, i+1)
		}
	}
}

// withhold notes that a pod has an address that has no PodIP, restore that none does any more.
func (s *stock) withhold(a netip.Addr) {
	if s.Range.Mode == Calico && s.Range.Set.Contains(a) && !s.withheld[a] {
		s.withheld[a] = true
		s.remove(a)
	}
}

func (s *stock) restore(a netip.Addr) {
	if s.withheld[a] {
		delete(s.withheld, a)
		s.free(a)
	}
}

// free notes that an address is unassigned.
func (s *stock) free(a netip.Addr) {
	delete(s.in, a)
	delete(s.out, a)
	if !s.Range.Set.Contains(a) {
		return
	}
	if s.freed = append(s.freed, a); len(s.freed) > freedMost {
		s.fresh.add(s.freed[0])
		s.freed = slices.Delete(s.freed, 0, 1)
	}
}

// left returns how many addresses can be given.
func (s *stock) left(now time.Time) uint64 {
	for a, at := range s.reserved {
		if now.Sub(at) > reservedFor {
			delete(s.reserved, a)
		}
	}
	free := s.fresh.Count() + uint64(len(s.freed))
	return free - min(free, uint64(len(s.reserved)))
}

// next returns the address to give next: an address that was never used, the longest free one otherwise.
func (s *stock) next(not func(netip.Addr) bool) (netip.Addr, bool) {
	skip := func(a netip.Addr) bool {
		_, reserved := s.reserved[a]
		return reserved || not(a)
	}
	for a, first := s.fresh.Next(s.last), (netip.Addr{}); a.IsValid() && a != first; a = s.fresh.Next(a) {
		if !skip(a) {
			return a, true
		}
		if !first.IsValid() {
			first = a
		}
	}
	for _, a := range s.freed {
		if !skip(a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}
