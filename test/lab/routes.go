package lab

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/link"
)

// Route is a route of a machine's main table.
type Route struct {
	To       netip.Prefix
	Gateway  netip.Addr // invalid: none
	Link     int        // the index of its device
	OnLink   bool       // the gateway is on the device's link, whatever its addresses say
	Protocol int
	Refuses  bool // it leads nowhere
}

// ours reports whether stayput has set it for an address of a pod, and which one.
func (r Route) ours() (netip.Addr, bool) {
	set := r.Protocol == link.ProtocolPod || r.Protocol == link.ProtocolAgent
	return r.To.Addr(), set && r.To.IsSingleIP()
}

// Routes returns the routes of IPv4.
func (n *Node) Routes() (all []Route, err error) {
	err = withNetlink(n.Pid(), func(h *netlink.Handle) error {
		found, err := h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN},
			netlink.RT_FILTER_TABLE)
		if err != nil {
			return fmt.Errorf("listing routes: %w", err)
		}
		for _, r := range found {
			is := Route{
				Link: r.LinkIndex, OnLink: r.Flags&unix.RTNH_F_ONLINK != 0, Protocol: int(r.Protocol),
				Refuses: r.Type != unix.RTN_UNICAST,
			}
			if r.Dst != nil {
				to, _ := netip.AddrFromSlice(r.Dst.IP)
				bits, _ := r.Dst.Mask.Size()
				is.To = netip.PrefixFrom(to.Unmap(), bits)
			}
			if gateway, ok := netip.AddrFromSlice(r.Gw); ok {
				is.Gateway = gateway.Unmap()
			}
			all = append(all, is)
		}
		return nil
	})
	return all, err
}

// Misrouted returns what is wrong with a node's routes to addresses of routed pools. served are all that pods have, by
// the prefix of the pods of the node that serves them; own is that of this node. No other address may have a route of
// stayput.
func Misrouted(routes []Route, own netip.Prefix, served map[netip.Addr]netip.Prefix) (wrong []string) {
	node, pod := map[netip.Prefix]Route{}, map[netip.Addr][]Route{}
	for _, r := range routes {
		if a, ours := r.ours(); ours {
			pod[a] = append(pod[a], r)
		} else {
			node[r.To] = r
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(served), netip.Addr.Compare) {
		pods, is := served[a], pod[a]
		delete(pod, a)
		if len(is) != 1 {
			wrong = append(wrong, fmt.Sprintf("%d routes to %s, of the pods %s", len(is), a, pods))
			continue
		}
		r := is[0]
		if pods == own {
			if r.Protocol != link.ProtocolPod || r.Refuses || r.Gateway.IsValid() {
				wrong = append(wrong, fmt.Sprintf("%s is here and has the route %+v", a, r))
			}
			continue
		}
		want, there := node[pods]
		want.To, want.Protocol = r.To, link.ProtocolAgent
		if !there || r != want {
			wrong = append(wrong, fmt.Sprintf("%s, of the pods %s, has the route %+v, and not %+v", a, pods, r, want))
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(pod), netip.Addr.Compare) {
		wrong = append(wrong, fmt.Sprintf("nobody has %s, and its route is %+v", a, pod[a]))
	}
	return wrong
}
