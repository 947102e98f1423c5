package pool

import (
	"encoding/binary"
	"math"
	"math/bits"
	"net/netip"
	"slices"
	"sort"
)

// span are the addresses from the first to the last, both included, of one family.
type span struct{ first, last netip.Addr }

// Set is a set of addresses. It holds spans, so that its size does not matter. The zero Set is empty.
type Set struct{ spans []span } // sorted, disjoint and not adjacent

// newSet returns the set of all addresses of these spans, which may overlap.
func newSet(spans []span) Set {
	spans = slices.Clone(spans)
	slices.SortFunc(spans, func(a, b span) int { return a.first.Compare(b.first) })
	var s Set
	for _, r := range spans {
		if n := len(s.spans); n > 0 && joins(s.spans[n-1], r) {
			if s.spans[n-1].last.Less(r.last) {
				s.spans[n-1].last = r.last
			}
			continue
		}
		s.spans = append(s.spans, r)
	}
	return s
}

// SetOf returns the set of all addresses of these prefixes.
func SetOf(prefixes ...netip.Prefix) Set {
	var spans []span
	for _, p := range prefixes {
		spans = append(spans, span{p.Masked().Addr(), lastOf(p)})
	}
	return newSet(spans)
}

// joins reports whether no address is between a and b, which begins later.
func joins(a, b span) bool {
	return a.first.BitLen() == b.first.BitLen() && (b.first.Compare(a.last) <= 0 || a.last.Next() == b.first)
}

// from returns the index of the first span that ends at a or later.
func (s Set) from(a netip.Addr) int {
	return sort.Search(len(s.spans), func(i int) bool { return a.Compare(s.spans[i].last) <= 0 })
}

// Contains reports whether the address is in the set.
func (s Set) Contains(a netip.Addr) bool {
	i := s.from(a)
	return i < len(s.spans) && s.spans[i].first.Compare(a) <= 0
}

// Next returns the first address of the set that comes after a, beginning again at the end; the zero Addr if the set is
// empty.
func (s Set) Next(a netip.Addr) netip.Addr {
	if len(s.spans) == 0 {
		return netip.Addr{}
	}
	if a = a.Next(); a.IsValid() {
		if i := s.from(a); i < len(s.spans) {
			if a.Less(s.spans[i].first) {
				return s.spans[i].first
			}
			return a
		}
	}
	return s.spans[0].first
}

// Count returns how many addresses there are, at most 2^63-1.
func (s Set) Count() (n uint64) {
	for _, r := range s.spans {
		hi, lo := minus(r.last, r.first)
		if hi != 0 || lo >= math.MaxInt64 {
			return math.MaxInt64
		}
		n = min(n+lo+1, math.MaxInt64)
	}
	return n
}

// minus returns a - b, of one family.
func minus(a, b netip.Addr) (hi, lo uint64) {
	x, y := a.As16(), b.As16()
	lo, borrow := bits.Sub64(binary.BigEndian.Uint64(x[8:]), binary.BigEndian.Uint64(y[8:]), 0)
	hi, _ = bits.Sub64(binary.BigEndian.Uint64(x[:8]), binary.BigEndian.Uint64(y[:8]), borrow)
	return hi, lo
}

// add puts an address in.
func (s *Set) add(a netip.Addr) {
	i := s.from(a)
	if i < len(s.spans) && s.spans[i].first.Compare(a) <= 0 {
		return
	}
	one := span{a, a}
	before := i > 0 && joins(s.spans[i-1], one)
	after := i < len(s.spans) && joins(one, s.spans[i])
	switch {
	case before && after:
		s.spans[i-1].last = s.spans[i].last
		s.spans = slices.Delete(s.spans, i, i+1)
	case before:
		s.spans[i-1].last = a
	case after:
		s.spans[i].first = a
	default:
		s.spans = slices.Insert(s.spans, i, one)
	}
}

// remove takes an address out, and reports whether it was in.
func (s *Set) remove(a netip.Addr) bool {
	i := s.from(a)
	if i == len(s.spans) || a.Less(s.spans[i].first) {
		return false
	}
	switch r := &s.spans[i]; {
	case r.first == a && r.last == a:
		s.spans = slices.Delete(s.spans, i, i+1)
	case r.first == a:
		r.first = a.Next()
	case r.last == a:
		r.last = a.Prev()
	default:
		rest := span{a.Next(), r.last}
		r.last = a.Prev()
		s.spans = slices.Insert(s.spans, i+1, rest)
	}
	return true
}

// without returns the set less all of another one.
func (s Set) without(o Set) Set {
	var left []span
	for _, r := range s.spans {
		for _, x := range o.spans[o.from(r.first):] {
			if r.last.Less(x.first) || x.first.BitLen() != r.first.BitLen() {
				break
			}
			if r.first.Less(x.first) {
				left = append(left, span{r.first, x.first.Prev()})
			}
			if r.first = x.last.Next(); !r.first.IsValid() || r.last.Less(r.first) {
				r.first = netip.Addr{}
				break
			}
		}
		if r.first.IsValid() {
			left = append(left, r)
		}
	}
	return Set{left}
}

// Overlaps reports whether the sets have an address in common.
func (s Set) Overlaps(o Set) bool {
	for _, r := range s.spans {
		if i := o.from(r.first); i < len(o.spans) && o.spans[i].first.Compare(r.last) <= 0 {
			return true
		}
	}
	return false
}

// clone returns a set that can be changed without the other one.
func (s Set) clone() Set { return Set{slices.Clone(s.spans)} }
