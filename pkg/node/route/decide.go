package route

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// facts are what the route of an address depends on.
type facts struct {
	bound  bool // a pod of this node has it
	bridge int  // the index of the bridge that it is on, 0 if there is none
	placed bool // a pod has it, by the API server
	place  Place
	kept   bool           // no pod has it, for a short time so far
	there  *route         // nil if there is none
	source *netlink.Route // the node's own to the serving node's pods, nil if there is none
}

// deed is what is to be done about a route.
type deed struct {
	do    doing
	route netlink.Route
}

type doing int

const (
	leave doing = iota
	remove
	set // in place of the route that is there
)

// decide returns what is to be done about the route of an address.
func decide(a netip.Addr, f facts) deed {
	ours := f.there != nil && f.there.Protocol == ProtocolAgent
	pods := f.there != nil && f.there.Protocol == ProtocolPod
	refused := ours && f.there.Type == unix.RTN_UNREACHABLE
	switch {
	case f.bound && pods:
		return deed{}
	case f.bound && f.bridge != 0 && (f.placed || ours): // it was lost, or is about to be set
		return deed{set, podRoute(a, f.bridge)}
	case f.bound && ours:
		return deed{do: remove} // ptp does not add its own while there is another one
	case f.bound:
		return deed{}
	case !f.placed && (pods || ours && !f.kept):
		return deed{do: remove}
	case !f.placed:
		return deed{}
	case f.place.Here: // it has not started
		if f.there == nil || refused {
			return deed{}
		}
		return deed{set, refusal(a)}
	case !f.place.PodCIDR.IsValid():
		return deed{}
	case f.source == nil:
		if refused || ours && (!f.there.serving.IsValid() || f.there.serving == f.place.PodCIDR) {
			return deed{} // as it was: the node's own route may come back
		}
		return deed{set, refusal(a)}
	}
	want := copyOf(a, *f.source)
	if ours && same(f.there.Route, want) {
		return deed{}
	}
	return deed{set, want}
}

// podRoute is the route that the plugin sets.
func podRoute(a netip.Addr, bridge int) netlink.Route {
	return netlink.Route{
		Dst: hostNet(a), LinkIndex: bridge, Protocol: ProtocolPod, Scope: scopeOf(a), Type: unix.RTN_UNICAST,
		Table: unix.RT_TABLE_MAIN,
	}
}

// refusal tells senders at once that the address is unreachable.
func refusal(a netip.Addr) netlink.Route {
	return netlink.Route{
		Dst: hostNet(a), Protocol: ProtocolAgent, Type: unix.RTN_UNREACHABLE, Table: unix.RT_TABLE_MAIN,
	}
}

// copyOf goes where the source goes.
func copyOf(a netip.Addr, source netlink.Route) netlink.Route {
	r := netlink.Route{
		Dst: hostNet(a), Protocol: ProtocolAgent, Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN,
		LinkIndex: source.LinkIndex, Gw: source.Gw, Via: source.Via, Src: source.Src, MTU: source.MTU,
		Encap: source.Encap, Flags: source.Flags & unix.RTNH_F_ONLINK,
	}
	for _, n := range source.MultiPath {
		hop := *n
		hop.Flags &= unix.RTNH_F_ONLINK
		r.MultiPath = append(r.MultiPath, &hop)
	}
	if r.Gw == nil && r.Via == nil && len(r.MultiPath) == 0 {
		r.Scope = scopeOf(a)
	}
	return r
}

func scopeOf(a netip.Addr) netlink.Scope {
	if a.Is4() {
		return netlink.SCOPE_LINK
	}
	return netlink.SCOPE_UNIVERSE
}

// same reports whether a route of the kernel is the route that was asked for.
func same(is, want netlink.Route) bool {
	if is.Type != want.Type {
		return false
	}
	dst, _ := prefixOf(want.Dst)
	is = copyOf(dst.Addr(), is)
	want = copyOf(dst.Addr(), want)
	return is.Equal(want) && is.MTU == want.MTU
}

func hostNet(a netip.Addr) *net.IPNet { return netOf(netip.PrefixFrom(a, a.BitLen())) }

func netOf(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, size := n.Mask.Size()
	if !ok || size == 0 {
		return netip.Prefix{}, false
	}
	if size == 32 {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, bits), true
}
