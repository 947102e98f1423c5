package cli

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/api/inspection"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func rangeOf(subnet, start, end, gateway string) inspection.Range {
	return inspection.Range{
		Subnet: netip.MustParsePrefix(subnet), Start: addr(start), End: addr(end), Gateway: addr(gateway),
	}
}

// aNetwork has every state, and two families.
func aNetwork() inspection.Network {
	promise := &inspection.Promise{Identity: "pod:default/web-0", Retention: "10m"}
	return inspection.Network{
		Name: "pods", PromisedShare: 0.5, PromisedLimit: 1024,
		RangeSets: []inspection.RangeSet{
			{
				Ranges: []inspection.Range{rangeOf("10.1.0.0/27", "10.1.0.1", "10.1.0.20", "10.1.0.1")}, Size: 19, Promised: 2,
				PromiseLimit: 9,
			},
			{
				Ranges: []inspection.Range{rangeOf("fd00::/64", "fd00::1", "fd00::ffff:ffff:ffff:ffff", "fd00::1")}, Size: 1 << 62,
				Promised: 1, PromiseLimit: 1024,
			},
		},
		Addresses: []inspection.Address{
			{IP: addr("10.1.0.2"), State: inspection.Bound, ContainerID: "a", Promise: promise},
			{IP: addr("10.1.0.3"), State: inspection.Bound, ContainerID: "b"},
			{IP: addr("10.1.0.9"), State: inspection.Retained, Promise: promise},
			{IP: addr("10.1.0.10"), State: inspection.Newer},
			{IP: addr("10.1.0.20"), State: inspection.Unreadable},
			{IP: addr("10.9.0.1"), State: inspection.Bound, ContainerID: "c"},
			{IP: addr("fd00::5"), State: inspection.Retained, Promise: promise},
		},
	}
}

const theList = `Network pods
  Range set 0
  10.1.0.0/27  10.1.0.1 - 10.1.0.20
    10.1.0.2 is bound to sandbox a, promised to pod:default/web-0
    10.1.0.3 is bound to sandbox b, without a promise
    10.1.0.9 is retained for pod:default/web-0 indefinitely
    10.1.0.10 is kept by a version of Stayput newer than the agent
    10.1.0.20 has an unreadable file
  19 addresses: 14 free, 2 bound, 1 retained
  promised: 2 of at most 9 (promisedShare 0.5)
  Range set 1
  fd00::/64  fd00::1 - fd00::ffff:ffff:ffff:ffff
    fd00::5 is retained for pod:default/web-0 indefinitely
  4611686018427387904 addresses: 4611686018427387903 free, 0 bound, 1 retained
  promised: 1 of at most 1024 (promisedLimit 1024)
  outside the current ranges: 10.9.0.1 is bound to sandbox c, without a promise
`

func TestTheAddressesOfARangeThatAreNotFreeAreListed(t *testing.T) {
	var b strings.Builder
	if err := writeNode(&b, &inspection.Node{Networks: []inspection.Network{aNetwork()}}); err != nil {
		t.Fatal(err)
	}
	if b.String() != theList {
		t.Errorf("printed is\n%s", b.String())
	}
}

func TestANetworkThatCannotBeReadIsSaidToBe(t *testing.T) {
	var b strings.Builder
	n := &inspection.Node{
		NetworksError: "record is corrupt", Networks: []inspection.Network{{Name: "pods", Error: "input/output error"}},
	}
	if err := writeNode(&b, n); err != nil {
		t.Fatal(err)
	}
	if out := b.String(); !strings.Contains(out, "record is corrupt") || !strings.Contains(out, "input/output error") {
		t.Errorf("printed %q", out)
	}
}
