package ipam

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/netconf"
)

// planned returns what is planned for routed addresses in a network.
func planned(t *testing.T, version, main, ipam string, addrs ...string) (*routed, *result, *Error) {
	t.Helper()
	conf, err := netconf.Parse(fmt.Appendf(nil, `{"cniVersion":%q,"name":"net",%s,"ipam":{"type":"stayput",%s}}`,
		version, main, ipam))
	if err != nil {
		t.Fatal(err)
	}
	n, err := conf.Network()
	if err != nil {
		t.Fatal(err)
	}
	r := &result{version: version}
	if r.routes, err = conf.Routes(); err != nil {
		t.Fatal(err)
	}
	var pool []netconf.PoolAddress
	for _, a := range addrs {
		addr := netip.MustParseAddr(a)
		pool = append(pool, netconf.PoolAddress{Prefix: netip.PrefixFrom(addr, addr.BitLen()), Routed: true})
	}
	way, cerr := (&call{conf: conf}).route(pool, n, r.routes)
	return way, r, cerr
}

const (
	bridge = `"type":"bridge","isGateway":true`
	ranges = `"ranges":[[{"subnet":"10.244.1.0/24"}],[{"subnet":"fd00:10:244:1::/64"}]]`
)

// What the main plugin makes of the answer is what the pod needs: see [routed].
func TestARoutedAddressIsSaidAsTheMainPluginNeedsIt(t *testing.T) {
	for _, c := range []struct {
		main, ipam string
		addrs      []string
		want       string
	}{
		{bridge, ranges + `,"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]`, []string{"10.50.0.5", "fd00:50::5"},
			`{"cniVersion":"1.0.0","ips":[{"address":"10.50.0.5/24","gateway":"10.244.1.1"},` +
				`{"address":"fd00:50::5/64","gateway":"fd00:10:244:1::1"}],` +
				`"routes":[{"dst":"0.0.0.0/0","gw":"10.244.1.1"},{"dst":"::/0","gw":"fd00:10:244:1::1"},` +
				`{"dst":"10.50.0.0/25","gw":"10.244.1.1"},{"dst":"10.50.0.128/25","gw":"10.244.1.1"},` +
				`{"dst":"10.244.1.0/24","gw":"10.244.1.1"},` +
				`{"dst":"fd00:50::/65","gw":"fd00:10:244:1::1"},{"dst":"fd00:50:0:0:8000::/65","gw":"fd00:10:244:1::1"},` +
				`{"dst":"fd00:10:244:1::/64","gw":"fd00:10:244:1::1"}]}`},
		{bridge, `"ranges":[[{"subnet":"10.244.1.0/24","gateway":"10.244.1.254"}]]`, []string{"10.50.0.5"},
			`{"cniVersion":"1.0.0","ips":[{"address":"10.50.0.5/24","gateway":"10.244.1.254"}],` +
				`"routes":[{"dst":"10.50.0.0/25","gw":"10.244.1.254"},{"dst":"10.50.0.128/25","gw":"10.244.1.254"},` +
				`{"dst":"10.244.1.0/24","gw":"10.244.1.254"}]}`},
		{`"type":"ptp"`, ranges + `,"routes":[{"dst":"0.0.0.0/0"}]`, []string{"10.50.0.5", "fd00:50::5"},
			`{"cniVersion":"1.0.0","ips":[{"address":"10.50.0.5/8","gateway":"10.244.1.1"},` +
				`{"address":"fd00:50::5/25","gateway":"fd00:10:244:1::1"}],` +
				`"routes":[{"dst":"0.0.0.0/0","gw":"10.244.1.1"}]}`},
	} {
		way, r, cerr := planned(t, "1.0.0", c.main, c.ipam, c.addrs...)
		if cerr != nil {
			t.Errorf("%s: %v", c.main, cerr)
			continue
		}
		r.addRouted(way)
		if got := string(r.encode()); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", c.main, got, c.want)
		}
	}
}

// What cannot work is an error that names the field, before anything is done.
func TestARoutedAddressThatCannotWorkIsRefused(t *testing.T) {
	for _, c := range []struct{ name, version, main, ipam, addr, want string }{
		{"an old version", "0.2.0", bridge, ranges, "10.50.0.5", "cniVersion"},
		{"another main plugin", "1.0.0", `"type":"macvlan"`, ranges, "10.50.0.5", "type"},
		{"no address of this family on the node", "1.0.0", bridge, `"ranges":[[{"subnet":"10.244.1.0/24"}]]`, "fd00:50::5",
			"ipam.ranges"},
		{"a route by a gateway that is not on the link", "1.0.0", bridge,
			ranges + `,"routes":[{"dst":"10.9.0.0/16","gw":"10.244.1.2"}]`, "10.50.0.5", "ipam.routes[0].gw"},
		{"nothing in common with the gateway", "1.0.0", `"type":"ptp"`, ranges, "192.0.2.5", "type"},
	} {
		_, _, cerr := planned(t, c.version, c.main, c.ipam, c.addr)
		if cerr == nil || !strings.Contains(cerr.Error(), c.want) || cerr.Code != codeInvalidConfig {
			t.Errorf("%s: %+v; want %s", c.name, cerr, c.want)
		}
	}
}
