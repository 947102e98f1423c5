package ledger

import (
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"strings"
)

// Range is a stretch of one subnet that addresses are allocated from, with host-local's rules for what is
// not said (plugins/ipam/host-local/backend/allocator/range.go).
type Range struct {
	Subnet  netip.Prefix `json:"subnet"`
	Start   netip.Addr   `json:"start"`   // inclusive
	End     netip.Addr   `json:"end"`     // inclusive
	Gateway netip.Addr   `json:"gateway"` // never allocated
}

// RangeSet is several ranges. A pod gets one address of them.
type RangeSet []Range

// NewRange completes and validates a range; start, end and gateway may be the zero Addr. Its errors begin with the
// field of the configuration.
func NewRange(subnet netip.Prefix, start, end, gateway netip.Addr) (Range, error) {
	r := Range{Subnet: subnet, Start: start, End: end, Gateway: gateway}
	if !subnet.IsValid() {
		return r, fmt.Errorf("subnet: expected an address with a prefix length such as 10.244.1.0/24")
	}
	if subnet.Addr().Is4In6() {
		return r, fmt.Errorf("subnet: %s is an IPv4 network in IPv6 form: expected one such as 10.244.1.0/24", subnet)
	}
	if subnet.Bits() > subnet.Addr().BitLen()-2 {
		return r, fmt.Errorf("subnet: network %s is too small to allocate from: expected /%d or larger",
			subnet, subnet.Addr().BitLen()-2)
	}
	if subnet.Masked() != subnet {
		return r, fmt.Errorf("subnet: %s has host bits set: the network address is %s", subnet, subnet.Masked())
	}
	if !gateway.IsValid() {
		r.Gateway = subnet.Addr().Next()
	}
	if !start.IsValid() {
		r.Start = subnet.Addr().Next()
	} else if !subnet.Contains(start) {
		return r, fmt.Errorf("rangeStart: %s is not in subnet %s", start, subnet)
	}
	if !end.IsValid() {
		r.End = lastAddr(subnet)
	} else if !subnet.Contains(end) {
		return r, fmt.Errorf("rangeEnd: %s is not in subnet %s", end, subnet)
	}
	switch {
	case r.End.Less(r.Start):
		return r, fmt.Errorf("rangeStart: %s is after the end of the range, %s", r.Start, r.End)
	case r.size() == 0:
		return r, fmt.Errorf("rangeStart: the range has no address except the gateway %s", r.Gateway)
	}
	return r, nil
}

// lastAddr is the last address of p, without the broadcast address of IPv4.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	if p.Addr().Is4() {
		b[3]--
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Contains reports whether a lies in r, from Start to End. The gateway may lie there too.
func (r Range) Contains(a netip.Addr) bool {
	return a.BitLen() == r.Start.BitLen() && !a.Less(r.Start) && !r.End.Less(a)
}

func (r Range) overlaps(o Range) bool {
	return r.Contains(o.Start) || r.Contains(o.End) || o.Contains(r.Start) || o.Contains(r.End)
}

// size is the number of addresses that r can give, at most math.MaxInt64.
func (r Range) size() int64 {
	a, b := new(big.Int).SetBytes(r.Start.AsSlice()), new(big.Int).SetBytes(r.End.AsSlice())
	n := b.Sub(b, a)
	if !n.IsInt64() || n.Int64() == math.MaxInt64 {
		return math.MaxInt64
	}
	size := n.Int64() + 1
	if r.Contains(r.Gateway) {
		size--
	}
	return size
}

func (r Range) String() string { return r.Start.String() + "-" + r.End.String() }

// find returns the range of s that contains a.
func (s RangeSet) find(a netip.Addr) (int, bool) {
	for i, r := range s {
		if r.Contains(a) {
			return i, true
		}
	}
	return 0, false
}

// allocatable reports whether a is in s and no gateway.
func (s RangeSet) allocatable(a netip.Addr) bool {
	i, ok := s.find(a)
	return ok && s[i].Gateway != a
}

// Size returns the number of addresses that s can give, at most math.MaxInt64.
func (s RangeSet) Size() int64 {
	var n int64
	for _, r := range s {
		if n += r.size(); n < 0 {
			return math.MaxInt64
		}
	}
	return n
}

func (s RangeSet) String() string {
	out := make([]string, len(s))
	for i, r := range s {
		out[i] = r.String()
	}
	return strings.Join(out, ",")
}

// ValidateRangeSets returns an error for what cannot be allocated from: empty sets, mixed families in a set, overlaps.
func ValidateRangeSets(sets []RangeSet) error {
	if len(sets) == 0 {
		return fmt.Errorf("no IP ranges specified: expected ipam.subnet or ipam.ranges")
	}
	type placed struct {
		set int
		r   Range
	}
	var seen []placed
	for i, s := range sets {
		if len(s) == 0 {
			return fmt.Errorf("ranges[%d]: empty range set", i)
		}
		for _, r := range s {
			if r.Start.Is4() != s[0].Start.Is4() {
				return fmt.Errorf("ranges[%d]: mixed address families", i)
			}
			for _, p := range seen {
				if p.r.overlaps(r) {
					return fmt.Errorf("ranges[%d]: %s overlaps %s of ranges[%d]", i, r, p.r, p.set)
				}
			}
			seen = append(seen, placed{i, r})
		}
	}
	return nil
}

// walk calls yield with the candidates of s in host-local's order, round robin beginning behind last, each
// once, without gateways.
func (s RangeSet) walk(last netip.Addr, yield func(netip.Addr) bool) {
	cur := s[0].Start
	idx, inSet := s.find(last)
	if inSet {
		idx, cur = s.after(idx, last)
	}
	first := cur
	for {
		if cur != s[idx].Gateway && !yield(cur) {
			return
		}
		if idx, cur = s.after(idx, cur); cur == first {
			return
		}
	}
}

func (s RangeSet) after(idx int, a netip.Addr) (int, netip.Addr) {
	if a == s[idx].End {
		idx = (idx + 1) % len(s)
		return idx, s[idx].Start
	}
	return idx, a.Next()
}
