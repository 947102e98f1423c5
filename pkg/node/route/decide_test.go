package route

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestWhatIsDoneAboutARoute(t *testing.T) {
	a := netip.MustParseAddr("10.244.200.5")
	two, three := netip.MustParsePrefix("10.244.2.0/24"), netip.MustParsePrefix("10.244.3.0/24")
	via := func(gw string) *netlink.Route {
		return &netlink.Route{LinkIndex: 7, Gw: net.ParseIP(gw).To4(), Type: unix.RTN_UNICAST, Protocol: 4}
	}
	gw2, gw3 := via("10.0.0.2"), via("10.0.0.3")
	is := func(r netlink.Route, serving netip.Prefix) *route { return &route{r, serving} }
	to2, to3, pod, refused := copyOf(a, *gw2), copyOf(a, *gw3), podRoute(a, 9), refusal(a)
	at2, at3, here := Place{PodCIDR: two}, Place{PodCIDR: three}, Place{Here: true, PodCIDR: two}
	for what, test := range map[string]struct {
		f    facts
		want deed
	}{
		"it was nobody's for long":    {facts{there: is(to2, two)}, deed{do: remove}},
		"it is nobody's":              {facts{there: is(to2, two), kept: true}, deed{}},
		"its pod has ended":           {facts{there: is(pod, two), kept: true}, deed{do: remove}},
		"a pod that nobody knows":     {facts{there: is(pod, two), bound: true, bridge: 9}, deed{}},
		"no address of a routed pool": {facts{bound: true, bridge: 9}, deed{}},
		"its node is not known":       {facts{placed: true, there: is(to2, two)}, deed{}},
		"it is elsewhere":             {facts{placed: true, place: at2, source: gw2}, deed{set, to2}},
		"it is there already":         {facts{placed: true, place: at2, source: gw2, there: is(to2, two)}, deed{}},
		"it has moved":                {facts{placed: true, place: at3, source: gw3, there: is(to2, two)}, deed{set, to3}},
		"it has moved out of reach":   {facts{placed: true, place: at3, there: is(to2, two)}, deed{set, refused}},
		"its node's route is away":    {facts{placed: true, place: at2, there: is(to2, two)}, deed{}},
		"the same after a restart":    {facts{placed: true, place: at2, there: &route{Route: to2}}, deed{}},
		"there is no way":             {facts{placed: true, place: at2}, deed{set, refused}},
		"the way is back": {
			facts{placed: true, place: at2, source: gw2, there: is(refused, two)}, deed{set, to2},
		},
		"it is about to start here":   {facts{placed: true, place: here, there: is(to3, three)}, deed{set, refused}},
		"it waits here":               {facts{placed: true, place: here, there: is(refused, two)}, deed{}},
		"it never was anywhere":       {facts{placed: true, place: here}, deed{}},
		"its last pod has ended here": {facts{placed: true, place: here, there: is(pod, two)}, deed{set, refused}},
		"it is here": {
			facts{placed: true, place: here, bound: true, bridge: 9, there: is(pod, two)}, deed{},
		},
		"its device went down and up": {facts{placed: true, place: here, bound: true, bridge: 9}, deed{set, pod}},
		"its device is down":          {facts{placed: true, place: here, bound: true}, deed{}},
		"it is on no bridge": {
			facts{placed: true, place: here, bound: true, there: is(to3, three)}, deed{do: remove},
		},
		"the API server is behind": {
			facts{placed: true, place: at3, source: gw3, bound: true, bridge: 9, there: is(pod, two)}, deed{},
		},
		"it was behind": {
			facts{placed: true, place: at3, source: gw3, bound: true, bridge: 9, there: is(to3, three)}, deed{set, pod},
		},
		"an old pod has ended": {facts{placed: true, place: at3, source: gw3, there: is(pod, two)}, deed{set, to3}},
	} {
		got := decide(a, test.f)
		if got.do != test.want.do || !got.route.Equal(test.want.route) {
			t.Errorf("%s: %v %v, want %v %v", what, got.do, got.route, test.want.do, test.want.route)
		}
	}
}

func TestPrefixesThatTouchAreOne(t *testing.T) {
	parse := func(all ...string) (out []netip.Prefix) {
		for _, s := range all {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	for _, test := range [][2][]netip.Prefix{
		{parse(), nil},
		{parse("10.1.1.0/24", "10.1.0.0/24"), parse("10.1.0.0/23")},
		{parse("10.1.1.0/24", "10.1.2.0/24", "10.1.3.0/24", "10.1.0.0/24"), parse("10.1.0.0/22")},
		{parse("10.1.1.0/24", "10.1.2.0/24", "10.1.0.0/16", "fd00::/64"), parse("10.1.0.0/16", "fd00::/64")},
		{parse("10.1.1.0/24", "10.1.2.0/24"), parse("10.1.1.0/24", "10.1.2.0/24")},
	} {
		if got := merge(test[0]); !slices.Equal(got, test[1]) {
			t.Errorf("%v became %v, want %v", test[0], got, test[1])
		}
	}
	if got := families[0].ranges(parse("10.1.1.0/24", "10.1.2.0/24", "255.255.255.0/24")); len(got) != 3 {
		t.Errorf("%v", got)
	}
}

func TestRoutesThatGoTheSameWayShareIt(t *testing.T) {
	table := New(Options{})
	two := netip.MustParsePrefix("10.244.2.0/24")
	via := func(gw string, mtu int) netlink.Route {
		return netlink.Route{LinkIndex: 7, Gw: net.ParseIP(gw).To4(), MTU: mtu}
	}
	hops := netlink.Route{MultiPath: []*netlink.NexthopInfo{{LinkIndex: 7, Gw: net.ParseIP("10.0.0.2").To4()}}}
	hold := func(addr string, r netlink.Route) held {
		t.Helper()
		a := netip.MustParseAddr(addr)
		want := copyOf(a, r)
		h := table.hold(want, two)
		is := *h.way
		is.Dst = hostNet(a)
		if !same(is, want) || h.protocol() != ProtocolAgent || h.serving != two {
			t.Errorf("of %v is held %v", want, is)
		}
		return h
	}
	first, second := hold("10.50.0.1", via("10.0.0.2", 0)), hold("10.50.0.2", via("10.0.0.2", 0))
	if first.way != second.way {
		t.Error("two routes by one gateway share nothing")
	}
	for what, other := range map[string]netlink.Route{
		"another gateway": via("10.0.0.3", 0), "another MTU": via("10.0.0.2", 1400), "several hops": hops,
	} {
		if hold("10.50.0.3", other).way == first.way {
			t.Errorf("%s is the same way", what)
		}
	}
	a := netip.MustParseAddr("10.50.0.4")
	if h := table.hold(refusal(a), netip.Prefix{}); h.way == first.way || h.way.Type != unix.RTN_UNREACHABLE {
		t.Errorf("a refusal is held as %v", h.way)
	}
	if (held{}).protocol() != 0 {
		t.Error("no route has a protocol")
	}
}
