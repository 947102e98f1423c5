package ipam

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/netconf"
)

// A routed address is in no subnet of the node. The main plugins expect an address of the node's own, whose gateway is
// in its subnet, and the plugin answers so that they still do what is needed:
//
// ptp gets the longest prefix that has both the address and the node's gateway. It removes the route to that prefix
// itself, and adds the one from the node to the pod.
//
// bridge gets the node's own prefix length, so that the gateway, with it, is the address that the bridge has already.
// The gateway is outside of the pod's subnet then: bridge calls the plugin when the interface is in the pod, where the
// plugin adds the route to the gateway. The pod would look for the rest of its subnet on the bridge: two halves of it,
// by the gateway, hide that. The route from the node to the pod is the plugin's.
type routed struct {
	by       netconf.MainPlugin
	addrs    []netip.Addr
	prefixes []netip.Prefix // in the result, with the addresses
	gateways []netip.Addr
	subnets  []netip.Prefix // of the gateways
}

// route plans how the addresses get to the pod, nil if they are not routed. It changes nothing.
func (c *call) route(addrs []netconf.PoolAddress, n *ledger.Network, routes []map[string]any) (*routed, *Error) {
	switch {
	case len(addrs) == 0:
		return nil, nil
	case !addrs[0].Routed:
		if err := c.conf.OnLink(); err != nil {
			return nil, errorf(codeInvalidConfig, "%s is an address of mode L2: %v", addrs[0].Prefix.Addr(), err)
		}
		return nil, nil
	}
	if !atLeast(c.conf.CNIVersion, "0.3.0") {
		return nil, errorf(codeInvalidConfig, "cniVersion: %s is too old for the routed address %s: expected 0.3.0 or newer",
			c.conf.CNIVersion, addrs[0].Prefix.Addr())
	}
	by, err := c.conf.MainPlugin()
	if err != nil {
		return nil, errorf(codeInvalidConfig, "%v, because %s is a routed address", err, addrs[0].Prefix.Addr())
	}
	r := &routed{by: by}
	for _, p := range addrs {
		a := p.Prefix.Addr()
		own, ok := ownRange(n, a.Is4())
		if !ok {
			return nil, errorf(codeInvalidConfig, "ipam.ranges: no range of the family of the routed address %s: expected the "+
				"node's own range, which contains the gateway of its pods", a)
		}
		for i, route := range routes {
			via, there := route["gw"].(string)
			if there && isFor(route, a) && via != own.Gateway.String() {
				return nil, errorf(codeInvalidConfig, "ipam.routes[%d].gw: %s is not on the link of a pod with the routed address "+
					"%s: expected none, or the gateway %s", i, via, a, own.Gateway)
			}
		}
		prefix := netip.PrefixFrom(a, own.Subnet.Bits())
		if by.Bridge == "" {
			prefix = common(a, own.Gateway, own.Subnet.Bits())
			if net := prefix.Masked().Addr(); net.Is4() && net.As4()[0] == 0 || prefix.Bits() == 0 { // no route to such a subnet
				return nil, errorf(codeInvalidConfig, "type: ptp cannot route %s via the gateway %s: expected addresses with a "+
					"common prefix, or bridge", a, own.Gateway)
			}
		}
		r.addrs, r.prefixes = append(r.addrs, a), append(r.prefixes, prefix)
		r.gateways, r.subnets = append(r.gateways, own.Gateway), append(r.subnets, own.Subnet.Masked())
	}
	return r, nil
}

// ownRange returns the first range of a family that has a gateway.
func ownRange(n *ledger.Network, is4 bool) (ledger.Range, bool) {
	for _, set := range n.Ranges {
		for _, r := range set {
			if r.Subnet.Addr().Is4() == is4 && r.Gateway.IsValid() {
				return r, true
			}
		}
	}
	return ledger.Range{}, false
}

// common returns the first address with the longest prefix, of at most so many bits, that has both.
func common(a, b netip.Addr, most int) netip.Prefix {
	for bits := most; bits > 0; bits-- {
		if p := netip.PrefixFrom(a, bits); p.Masked().Contains(b) {
			return p
		}
	}
	return netip.PrefixFrom(a, 0)
}

// halves returns the two halves of an address's subnet; none if it is a single address.
func halves(p netip.Prefix) []netip.Prefix {
	bits := p.Bits()
	if bits == p.Addr().BitLen() {
		return nil
	}
	first := p.Masked().Addr()
	b := first.AsSlice()
	b[bits/8] |= 0x80 >> (bits % 8)
	second, _ := netip.AddrFromSlice(b)
	return []netip.Prefix{netip.PrefixFrom(first, bits+1), netip.PrefixFrom(second, bits+1)}
}

// addRouted appends the addresses. A pod has the routes that any other of the network has, all by its node, and by it
// also what the others find on the link.
func (r *result) addRouted(to *routed) {
	for i, p := range to.prefixes {
		gw := to.gateways[i]
		r.ips = append(r.ips, ipConfig{p, gw})
		for _, route := range r.routes {
			_, there := route["gw"]
			_, scoped := route["scope"]
			if !there && !scoped && isFor(route, gw) {
				route["gw"] = gw.String()
			}
		}
		if to.by.Bridge == "" {
			continue
		}
		for _, h := range halves(p) {
			r.routes = append(r.routes, map[string]any{"dst": h.String(), "gw": gw.String()})
		}
		if p.Masked() != to.subnets[i] {
			r.routes = append(r.routes, map[string]any{"dst": to.subnets[i].String(), "gw": gw.String()})
		}
	}
}

// isFor reports whether a route is of an address's family.
func isFor(route map[string]any, a netip.Addr) bool {
	dst, _ := route["dst"].(string)
	p, err := netip.ParsePrefix(dst)
	return err == nil && p.Addr().Unmap().Is4() == a.Is4()
}

// connect makes the way between node and pod, as far as the main plugin does not. The addresses are the attachment's.
func (c *call) connect(to *routed) error {
	if to.by.Bridge == "" {
		return link.Yield(to.addrs)
	}
	if err := link.Reach(c.netnsPath, c.att.IfName, to.prefixes, to.gateways); err != nil {
		return err
	}
	return link.Serve(to.by.Bridge, to.addrs)
}

// disconnect takes back what an ADD has added on the node, before the addresses can be in use elsewhere. It knows no
// mode: a DEL must work without the annotation of its ADD, and with a configuration of which only the bridge's name has
// to be as it was. Addresses of the node's own have no such routes.
func (c *call) disconnect(n *ledger.Network) func([]netip.Addr) error {
	bridge, err := c.conf.Bridge()
	if err != nil {
		return nil
	}
	return func(addrs []netip.Addr) error {
		pooled := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return inRanges(n, a) })
		if len(pooled) == 0 {
			return nil
		}
		if err := link.Unserve(bridge, pooled); err != nil {
			return fmt.Errorf("removing the routes of %s: %w", c.att, err)
		}
		return nil
	}
}

// connected is CHECK's: the routes are still there.
func (c *call) connected(addrs []netip.Addr) *Error {
	by, err := c.conf.MainPlugin()
	if err != nil || by.Bridge == "" { // none is routed, or by ptp's own
		return nil
	}
	given, err := c.given()
	if err != nil {
		return configError(err)
	}
	for _, p := range given {
		a := p.Prefix.Addr()
		if !p.Routed || !slices.Contains(addrs, a) {
			continue
		}
		there, err := link.Served(by.Bridge, a)
		switch {
		case err != nil:
			return errorf(codeTryAgain, "the route to %s: %v", a, err)
		case !there:
			return errorf(codeInternal, "%s has no route on %s", a, by.Bridge)
		}
	}
	return nil
}

// given returns the addresses of pools that the pod has by its annotation, else by its grant. That is gone with the
// pod, and may be earlier.
func (c *call) given() ([]netconf.PoolAddress, error) {
	said, err := c.conf.Pools()
	if err != nil || !said.Asked && !said.AskedSpiderpool && !said.Network {
		return nil, err
	}
	source, text := "annotation "+netconf.AnnotationAddresses, said.Text
	if text == "" {
		args, err := parseArgs(c.Getenv("CNI_ARGS"))
		if err != nil {
			return nil, err
		}
		if grants.ValidPodUID(args.pod.UID) != nil {
			return nil, nil // no pod of the API server's
		}
		source = c.grants().Path(args.pod.UID)
		if text, err = c.grants().Granted(args.pod.UID); err != nil || text == "" {
			return nil, err
		}
	}
	return netconf.ParsePoolAddresses(source, text, c.conf.Name, c.att.IfName)
}

// inRanges reports whether a network has an address of its own.
func inRanges(n *ledger.Network, a netip.Addr) bool {
	return slices.ContainsFunc(n.Ranges, func(s ledger.RangeSet) bool {
		return slices.ContainsFunc(s, func(r ledger.Range) bool { return r.Contains(a) })
	})
}
