package ipam

import (
	"net/netip"
	"testing"

	"github.com/stayput/stayput/pkg/netconf"
)

// Every version of CNI says an address of a pool, with or without a gateway.
func TestAnAddressOfAPoolIsSaidInEveryVersion(t *testing.T) {
	addrs := []netconf.PoolAddress{
		{Prefix: netip.MustParsePrefix("10.6.0.5/16"), Gateway: netip.MustParseAddr("10.6.0.1"),
			Routes: []map[string]any{{"dst": "10.9.0.0/16", "gw": "10.6.0.2"}}},
		{Prefix: netip.MustParsePrefix("fd06::5/64"), Routes: []map[string]any{{"dst": "fd09::/64"}}},
	}
	for version, want := range map[string]string{
		"0.2.0": `{"cniVersion":"0.2.0","ip4":{"ip":"10.6.0.5/16","gateway":"10.6.0.1","routes":` +
			`[{"dst":"10.9.0.0/16","gw":"10.6.0.2"}]},"ip6":{"ip":"fd06::5/64","routes":[{"dst":"fd09::/64"}]}}`,
		"0.4.0": `{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.6.0.5/16","gateway":"10.6.0.1"},` +
			`{"version":"6","address":"fd06::5/64"}],"routes":[{"dst":"10.9.0.0/16","gw":"10.6.0.2"},{"dst":"fd09::/64"}]}`,
		"1.1.0": `{"cniVersion":"1.1.0","ips":[{"address":"10.6.0.5/16","gateway":"10.6.0.1"},` +
			`{"address":"fd06::5/64"}],"routes":[{"dst":"10.9.0.0/16","gw":"10.6.0.2"},{"dst":"fd09::/64"}]}`,
	} {
		r := &result{version: version}
		r.addPooled(addrs)
		if got := string(r.encode()); got != want {
			t.Errorf("%s:\n%s, want\n%s", version, got, want)
		}
	}
}
