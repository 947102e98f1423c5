package link_test

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

var served = []netip.Addr{netip.MustParseAddr("10.50.0.5"), netip.MustParseAddr("fd00:50::5")}

// node makes a node with two bridges, of which none has an address, and an uplink to other nodes.
func node(t *testing.T) (netns string) {
	t.Helper()
	netns = nodetest.Netns(t, t.TempDir(), "node")
	nodetest.In(t, netns, func() error {
		for _, name := range []string{"cni0", "cni1", "eth0"} {
			b := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
			if err := netlink.LinkAdd(b); err != nil {
				return err
			}
			if err := netlink.LinkSetUp(b); err != nil {
				return err
			}
		}
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, s := range []string{"10.0.0.1/24", "fd00::1/64"} {
			a, err := netlink.ParseAddr(s)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(eth0, a); err != nil {
				return err
			}
		}
		return nil
	})
	return netns
}

// routes returns the routes to single addresses of pools and the neighbours of them, one to a line.
func routes(t *testing.T, netns string) string {
	t.Helper()
	var lines []string
	nodetest.In(t, netns, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		names := map[int]string{}
		for _, l := range links {
			names[l.Attrs().Index] = l.Attrs().Name
		}
		all, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_MAIN},
			netlink.RT_FILTER_TABLE)
		if err != nil {
			return err
		}
		for _, r := range all {
			a, ok := netip.AddrFromSlice(r.Dst.IP)
			if bits, most := r.Dst.Mask.Size(); !ok || bits != most || !slices.Contains(served, a.Unmap()) {
				continue
			}
			s := fmt.Sprintf("%s proto %d dev %s", a.Unmap(), r.Protocol, names[r.LinkIndex])
			if r.Gw != nil {
				s += " via " + r.Gw.String()
			}
			if r.Type == unix.RTN_UNREACHABLE {
				s = fmt.Sprintf("%s proto %d unreachable", a.Unmap(), r.Protocol)
			}
			lines = append(lines, s)
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			for _, proxy := range []bool{false, true} {
				list := netlink.NeighList
				if proxy {
					list = netlink.NeighProxyList
				}
				neighbours, err := list(0, family)
				if err != nil {
					return err
				}
				for _, n := range neighbours {
					a, ok := netip.AddrFromSlice(n.IP)
					if ok && slices.Contains(served, a.Unmap()) && n.State&netlink.NUD_FAILED == 0 {
						lines = append(lines, fmt.Sprintf("%s neighbour on %s, proxy %t", a.Unmap(), names[n.LinkIndex], proxy))
					}
				}
			}
		}
		return nil
	})
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// The agent's routes to another node, as they are when the pod comes here.
func away(t *testing.T, netns string, unreachable bool) {
	t.Helper()
	nodetest.In(t, netns, func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, a := range served {
			r := &netlink.Route{Dst: netlink.NewIPNet(a.AsSlice()), Protocol: link.ProtocolAgent}
			gw := "10.0.0.2"
			if a.Is6() {
				gw = "fd00::2"
			}
			if unreachable {
				r.Type = unix.RTN_UNREACHABLE
			} else {
				r.LinkIndex, r.Gw = eth0.Attrs().Index, net.ParseIP(gw)
			}
			if err := netlink.RouteReplace(r); err != nil {
				return err
			}
		}
		return nil
	})
}

// To serve an address takes the place of whatever the node knew of it, and can be repeated; to serve it no more leaves
// what others have added since.
func TestAServedAddressIsOnItsBridgeAlone(t *testing.T) {
	const here = "10.50.0.5 proto 84 dev cni0\nfd00:50::5 proto 84 dev cni0"
	serve := func() error { return link.Serve("cni0", served) }
	unserve := func() error { return link.Unserve("cni0", served) }
	forget := func() error { return link.Forget("cni0", served) }
	stale := func(t *testing.T, netns string) {
		nodetest.In(t, netns, func() error {
			cni0, err := netlink.LinkByName("cni0")
			if err != nil {
				return err
			}
			for _, a := range served {
				for _, flags := range []int{0, netlink.NTF_PROXY} {
					n := &netlink.Neigh{LinkIndex: cni0.Attrs().Index, IP: a.AsSlice(), Flags: flags,
						State: netlink.NUD_PERMANENT}
					if flags == 0 {
						n.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, 9}
					}
					if err := netlink.NeighSet(n); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	for _, c := range []struct {
		name string
		had  func(t *testing.T, netns string)
		do   []func() error
		want string
	}{
		{"nothing was there", nil, []func() error{serve}, here},
		{"twice", nil, []func() error{serve, serve}, here},
		{"it was served by another node", func(t *testing.T, ns string) { away(t, ns, false) }, []func() error{serve}, here},
		{"nobody could be reached", func(t *testing.T, ns string) { away(t, ns, true) }, []func() error{serve}, here},
		{"neighbours of before", stale, []func() error{serve}, here},
		{"the end", nil, []func() error{serve, unserve}, ""},
		{"the end, twice", nil, []func() error{serve, unserve, unserve}, ""},
		{"the end without a beginning", nil, []func() error{unserve}, ""},
		{"the bridge is gone", nil, []func() error{func() error { return link.Unserve("none", served) }}, ""},
		{"it is served by another node meanwhile", func(t *testing.T, ns string) { away(t, ns, false) },
			[]func() error{unserve},
			"10.50.0.5 proto 85 dev eth0 via 10.0.0.2\nfd00:50::5 proto 85 dev eth0 via fd00::2"},
		{"it is on another bridge meanwhile", nil,
			[]func() error{serve, func() error { return link.Serve("cni1", served) }, unserve},
			"10.50.0.5 proto 84 dev cni1\nfd00:50::5 proto 84 dev cni1"},
		{"ptp's turn, here", nil, []func() error{serve, func() error { return link.Yield(served) }}, ""},
		{"ptp's turn, elsewhere", func(t *testing.T, ns string) { away(t, ns, false) },
			[]func() error{func() error { return link.Yield(served) }}, ""},
		{"ptp's turn, nobody could be reached", func(t *testing.T, ns string) { away(t, ns, true) },
			[]func() error{func() error { return link.Yield(served) }}, ""},
		{"neighbours are forgotten", stale, []func() error{forget, forget},
			"10.50.0.5 neighbour on cni0, proxy true\nfd00:50::5 neighbour on cni0, proxy true"},
		{"nothing is there to forget", nil, []func() error{forget}, ""},
		{"the bridge to forget them on is gone", nil,
			[]func() error{func() error { return link.Forget("none", served) }}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := node(t)
			if c.had != nil {
				c.had(t, ns)
				if routes(t, ns) == "" {
					t.Fatal("nothing is there before")
				}
			}
			for _, do := range c.do {
				nodetest.In(t, ns, do)
			}
			if got := routes(t, ns); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", cmp.Or(got, "nothing"), cmp.Or(c.want, "nothing"))
			}
			for _, a := range served {
				nodetest.In(t, ns, func() error {
					is, err := link.Served("cni0", a)
					if want := c.want == here; is != want {
						t.Errorf("%s is served: %t", a, is)
					}
					return err
				})
			}
		})
	}
}

// A default route or a network around the address is no route of the pod's own.
func TestANetworkAroundTheAddressDoesNotServeIt(t *testing.T) {
	ns := node(t)
	nodetest.In(t, ns, func() error {
		cni0, err := netlink.LinkByName("cni0")
		if err != nil {
			return err
		}
		for _, s := range []string{"10.50.0.0/24", "fd00:50::/64"} {
			_, dst, err := net.ParseCIDR(s)
			must.Do(t, err)
			r := &netlink.Route{Dst: dst, LinkIndex: cni0.Attrs().Index, Scope: unix.RT_SCOPE_LINK, Protocol: link.ProtocolPod}
			if err := netlink.RouteAdd(r); err != nil {
				return err
			}
		}
		for _, a := range served {
			if is, err := link.Served("cni0", a); is || err != nil {
				t.Errorf("%s is served: %t, %v", a, is, err)
			}
		}
		return nil
	})
}

func TestAnAddressOfTheNodeItselfIsLocal(t *testing.T) {
	ns := node(t)
	nodetest.In(t, ns, func() error {
		own, err := netlink.LinkByName("lo") // unlike a bridge without ports, it has a carrier
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(own); err != nil {
			return err
		}
		for _, s := range []string{"10.1.0.1/32", "fd01::1/128"} {
			a, err := netlink.ParseAddr(s)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(own, a); err != nil {
				return err
			}
		}
		must.Eventually(t, "a worker of the kernel's has made the route to the IPv6 address", func() bool {
			is, err := link.Local(netip.MustParseAddr("fd01::1"))
			return is || err != nil
		})
		_, none, err := net.ParseCIDR("203.0.113.0/24")
		if err != nil {
			return err
		}
		for _, kind := range []int{unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT} {
			r := &netlink.Route{Dst: none, Type: kind, Priority: kind}
			if err := netlink.RouteAdd(r); err != nil {
				return err
			}
			if is, err := link.Local(netip.MustParseAddr("203.0.113.7")); is || err != nil {
				t.Errorf("an address with a route of type %d: %t, %v", kind, is, err)
			}
			if err := netlink.RouteDel(r); err != nil {
				return err
			}
		}
		for a, want := range map[string]bool{
			"10.0.0.1": true, "10.1.0.1": true, "fd01::1": true,
			"10.0.0.2": false, "fd00::2": false, "10.0.0.255": false, // on the link
			"192.0.2.10": false, "fd02::1": false, // nowhere
		} {
			if is, err := link.Local(netip.MustParseAddr(a)); is != want || err != nil {
				t.Errorf("%s is local: %t, %v, want %t", a, is, err, want)
			}
		}
		return nil
	})
}

// The pod's interface is down and has no address when the plugin is asked; its caller's namespace stays as it is.
func TestAGatewayOfNoSubnetIsReached(t *testing.T) {
	ns, _ := wire(t, "veth")
	gateways := []netip.Addr{netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("fd00:10:244:1::1")}
	addrs := []netip.Prefix{netip.MustParsePrefix("10.50.0.5/24"), netip.MustParsePrefix("fd00:50::5/64")}
	own, err := os.Readlink("/proc/thread-self/ns/net")
	must.Do(t, err)
	nodetest.In(t, ns, func() error { // as a runtime may leave it
		return os.WriteFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", []byte("1"), 0)
	})
	for range 2 {
		must.Do(t, link.Reach(ns, "eth0", addrs, gateways))
	}
	if now, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || now != own {
		t.Errorf("the thread is in %s, %v; was in %s", now, err, own)
	}
	if is := attrs(t, ns, "eth0", nil); is.Flags&net.FlagUp == 0 {
		t.Error("the interface is down")
	}
	nodetest.In(t, ns, func() error {
		for _, gw := range gateways {
			all, err := netlink.RouteList(nil, map[bool]int{true: netlink.FAMILY_V4, false: netlink.FAMILY_V6}[gw.Is4()])
			if err != nil {
				return err
			}
			n := 0
			for _, r := range all {
				if r.Dst != nil && r.Dst.String() == netip.PrefixFrom(gw, gw.BitLen()).String() && r.Gw == nil {
					n++
				}
			}
			if n != 1 {
				t.Errorf("%d routes to %s: %v", n, gw, all)
			}
		}
		return nil
	})
	if err := link.Reach(ns, "none", addrs, gateways); err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("an interface that is not there: %v", err)
	}
	if err := link.Reach(ns+".gone", "eth0", addrs, gateways); err == nil {
		t.Error("a namespace that is not there")
	}
}

// The kernel takes the last address of an address's subnet for the broadcast address, which other pods may have.
func TestTheEdgesOfTheSubnetAreReachedByTheGateway(t *testing.T) {
	gateway := netip.MustParseAddr("10.244.1.1")
	for addr, edges := range map[string][]string{
		"10.50.0.5/24":   {"10.50.0.0", "10.50.0.255"},
		"10.50.0.0/24":   {"10.50.0.255"},
		"10.50.0.255/24": {"10.50.0.0"},
		"10.50.0.70/26":  {"10.50.0.64", "10.50.0.127"},
		"10.50.0.5/31":   nil,
		"10.50.0.5/32":   nil,
	} {
		ns, _ := wire(t, "veth")
		p := netip.MustParsePrefix(addr)
		must.Do(t, link.Reach(ns, "eth0", []netip.Prefix{p}, []netip.Addr{gateway}))
		nodetest.In(t, ns, func() error {
			eth0, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(eth0, a); err != nil { // as the main plugin does
				return err
			}
			if own, err := netlink.RouteGet(net.ParseIP(p.Addr().String())); err != nil || own[0].Type != unix.RTN_LOCAL {
				t.Errorf("%s is not its own: %v, %v", addr, own, err)
			}
			for _, edge := range edges {
				to, err := netlink.RouteGet(net.ParseIP(edge))
				if err != nil || to[0].Type != unix.RTN_UNICAST || to[0].Gw.String() != gateway.String() {
					t.Errorf("%s reaches %s by %v, %v; want by %s", addr, edge, to, err, gateway)
				}
			}
			all, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_LOCAL,
				Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
			if len(all) != len(edges) {
				t.Errorf("%s: %v, want %v", addr, all, edges)
			}
			return err
		})
	}
}
