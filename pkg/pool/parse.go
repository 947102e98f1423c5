package pool

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// Mode is how packets find the pods of a pool.
type Mode = v1alpha1.PodIPPoolMode

// The modes: L2, all nodes are on one link; Routed, every node has a route to the node that serves the pod; Calico,
// Calico's IPAM gives the address, which it reserves for the pool.
const (
	L2     = v1alpha1.ModeL2
	Routed = v1alpha1.ModeRouted
	Calico = v1alpha1.ModeCalico
)

// Route is a route that pods of the pool get.
type Route struct {
	Dst netip.Prefix `json:"dst"`
	GW  netip.Addr   `json:"gw"`
}

// Range is what a pool gives, and what pods need to know of its link.
type Range struct {
	Mode    Mode
	Subnet  netip.Prefix
	Gateway netip.Addr // the zero Addr if there is none
	Routes  []Route
	Set     Set // the addresses that the pool may give
}

// FieldError is a field of a pool that cannot be honoured.
type FieldError struct{ Field, Value, Expected string }

func (e *FieldError) Error() string {
	return fmt.Sprintf("%s: %q is not valid: expected %s", e.Field, e.Value, e.Expected)
}

const onlyL2 = "nothing with mode %s: pods use the gateway of the node that they run on"

// Parse reads a pool. It reports every field that is wrong, each as a [*FieldError]. An address that no host can have
// is never in the set. The network's own and its broadcast address are in it only if spec.addresses names them.
func Parse(s v1alpha1.PodIPPoolSpec) (Range, error) {
	var errs []error
	wrong := func(field, value, expected string, args ...any) {
		errs = append(errs, &FieldError{field, value, fmt.Sprintf(expected, args...)})
	}
	r := Range{Mode: s.Mode}
	if s.Mode != L2 && s.Mode != Routed && s.Mode != Calico {
		wrong("spec.mode", string(s.Mode), "L2, Routed or Calico")
	}
	var err error
	if r.Subnet, err = netip.ParsePrefix(s.Subnet); err != nil || r.Subnet != r.Subnet.Masked() ||
		r.Subnet.Addr().Is4In6() || !unicast(r.Subnet.Addr()) {
		wrong("spec.subnet", s.Subnet, "a CIDR of unicast addresses without host bits, such as 10.6.0.0/16")
		return Range{}, errors.Join(errs...) // what the others mean depends on it
	}
	inSubnet := func(sp span) bool { return r.Subnet.Contains(sp.first) && r.Subnet.Contains(sp.last) }

	if s.Gateway != "" {
		if r.Gateway, err = netip.ParseAddr(s.Gateway); err != nil || !r.Subnet.Contains(r.Gateway) {
			wrong("spec.gateway", s.Gateway, "an address in spec.subnet, %s", r.Subnet)
			r.Gateway = netip.Addr{}
		} else if s.Mode != L2 {
			wrong("spec.gateway", s.Gateway, onlyL2, s.Mode)
		}
	}
	for i, route := range s.Routes {
		dst, errDst := netip.ParsePrefix(route.Destination)
		gw, errGW := netip.ParseAddr(route.Gateway)
		switch field := fmt.Sprintf("spec.routes[%d]", i); {
		case s.Mode != L2:
			wrong(field, route.Destination, onlyL2, s.Mode)
		case errDst != nil || dst != dst.Masked() || dst.Addr().Is4In6():
			wrong(field+".dst", route.Destination, "a CIDR without host bits, such as 10.9.0.0/16")
		case errGW != nil || gw.Is4() != dst.Addr().Is4() || !plain(gw):
			wrong(field+".gw", route.Gateway, "an address of the same family as dst, %s", route.Destination)
		case dst.Addr().Is4() != r.Subnet.Addr().Is4():
			wrong(field+".dst", route.Destination, "a CIDR of the same family as spec.subnet, %s", r.Subnet)
		default:
			r.Routes = append(r.Routes, Route{dst, gw})
		}
	}

	whole := span{r.Subnet.Addr(), lastOf(r.Subnet)}
	given := []span{whole}
	var not []span
	if len(s.Addresses) == 0 {
		if not = append(not, span{whole.first, whole.first}, span{whole.last, whole.last}); r.Subnet.IsSingleIP() {
			not = nil
		}
	} else {
		given = nil
		for i, text := range s.Addresses {
			sp, err := parseSpan(text)
			switch field := fmt.Sprintf("spec.addresses[%d]", i); {
			case err != nil:
				wrong(field, text, "%s", err.Error())
			case !inSubnet(sp):
				wrong(field, text, "addresses in spec.subnet, %s", r.Subnet)
			default:
				given = append(given, sp)
			}
		}
	}
	for i, text := range s.ExcludedAddresses {
		sp, err := parseSpan(text)
		if err != nil {
			wrong(fmt.Sprintf("spec.excludedAddresses[%d]", i), text, "%s", err.Error())
			continue
		}
		not = append(not, sp)
	}
	if r.Gateway.IsValid() {
		not = append(not, span{r.Gateway, r.Gateway})
	}
	if errs != nil {
		return Range{}, errors.Join(errs...)
	}
	r.Set = newSet(given).without(newSet(not))
	if len(r.Set.spans) == 0 {
		return Range{}, &FieldError{"spec.addresses", strings.Join(s.Addresses, ", "),
			"at least one address besides spec.excludedAddresses and spec.gateway"}
	}
	return r, nil
}

var errSpan = errors.New("an address, a range such as 10.6.168.101-10.6.168.110, or a CIDR without host bits")

// parseSpan reads an address, a range or a CIDR. The error says what was expected.
func parseSpan(text string) (span, error) {
	if strings.Contains(text, "/") {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.Addr().Is4In6() {
			return span{}, errSpan
		}
		return span{p.Addr(), lastOf(p)}, nil
	}
	from, to, isRange := strings.Cut(text, "-")
	if !isRange {
		to = from
	}
	first, err := netip.ParseAddr(strings.TrimSpace(from))
	last, errLast := netip.ParseAddr(strings.TrimSpace(to))
	switch {
	case err != nil || errLast != nil || !plain(first) || !plain(last):
		return span{}, errSpan
	case first.Is4() != last.Is4():
		return span{}, errors.New("a range of one family")
	case last.Less(first):
		return span{}, errors.New("a range whose first address is not after its last")
	}
	return span{first, last}, nil
}

// plain reports whether an address can be written in one way only.
func plain(a netip.Addr) bool { return a.Zone() == "" && !a.Is4In6() }

// unicast reports whether hosts may have an address.
func unicast(a netip.Addr) bool {
	return !a.IsMulticast() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsUnspecified()
}

// lastOf returns the last address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
