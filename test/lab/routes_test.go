package lab

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/link"
)

func TestAMisroutedAddressIsSeen(t *testing.T) {
	own, other := netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("10.244.2.0/24")
	here, there := netip.MustParseAddr("10.50.0.1"), netip.MustParseAddr("10.50.0.2")
	gateway := netip.MustParseAddr("10.244.2.0")
	served := map[netip.Addr]netip.Prefix{here: own, there: other}
	single := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, 32) }
	right := []Route{
		{To: own, Link: 4, Protocol: 2},
		{To: other, Gateway: gateway, Link: 3, OnLink: true, Protocol: 3},
		{To: single(here), Link: 4, Protocol: link.ProtocolPod},
		{To: single(there), Gateway: gateway, Link: 3, OnLink: true, Protocol: link.ProtocolAgent},
	}
	if wrong := Misrouted(right, own, served); len(wrong) > 0 {
		t.Errorf("right routes: %q", wrong)
	}
	const h, o = 2, 3
	for _, is := range []struct {
		name string
		do   func([]Route) []Route
		want string
	}{
		{"a pod of the node by another node", func(r []Route) []Route {
			r[h] = r[o]
			r[h].To = single(here)
			return r
		}, "10.50.0.1 is here"},
		{"no route", func(r []Route) []Route { return r[:o] }, "0 routes to 10.50.0.2"},
		{"two routes", func(r []Route) []Route { return append(r, r[h]) }, "2 routes to 10.50.0.1"},
		{"another next hop", func(r []Route) []Route {
			r[o].Gateway = r[o].Gateway.Next()
			return r
		}, "10.50.0.2, of the pods 10.244.2.0/24"},
		{"a device that is no more", func(r []Route) []Route { r[o].Link = 9; return r }, "10.50.0.2, of the pods"},
		{"refused", func(r []Route) []Route { r[o].Refuses = true; return r }, "10.50.0.2, of the pods"},
		{"no route to the node", func(r []Route) []Route { return slices.Delete(r, 1, 2) }, "10.50.0.2, of the pods"},
		{"nobody has it", func(r []Route) []Route {
			return append(r, Route{To: netip.MustParsePrefix("10.50.0.9/32"), Link: 4, Protocol: link.ProtocolPod})
		}, "nobody has 10.50.0.9"},
	} {
		wrong := Misrouted(is.do(slices.Clone(right)), own, served)
		if len(wrong) != 1 || !strings.Contains(wrong[0], is.want) {
			t.Errorf("%s: %q", is.name, wrong)
		}
	}
}
