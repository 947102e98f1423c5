package pool

import (
	"errors"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

type (
	Spec  = v1alpha1.PodIPPoolSpec
	route = v1alpha1.PodIPRoute
)

func TestAPoolIsWhatItsFieldsSay(t *testing.T) {
	for _, c := range []struct {
		name      string
		spec      Spec
		count     uint64
		has, lack []string
	}{
		{"ranges, addresses and CIDRs", Spec{Subnet: "10.6.0.0/16",
			Addresses: []string{"10.6.168.101-10.6.168.110", "10.6.1.1", "10.6.168.110-10.6.168.111", "10.6.2.0/30"}},
			16, []string{"10.6.168.101", "10.6.168.111", "10.6.1.1", "10.6.2.0", "10.6.2.3"},
			[]string{"10.6.168.100", "10.6.168.112", "10.6.2.4"}},
		{"nothing named: all but the first, the last and the gateway", Spec{Subnet: "10.6.0.0/24", Gateway: "10.6.0.9"}, 253,
			[]string{"10.6.0.1", "10.6.0.254"}, []string{"10.6.0.0", "10.6.0.255", "10.6.0.9", "10.6.1.1"}},
		{"what is excluded is not given", Spec{Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.0/28"},
			ExcludedAddresses: []string{"10.6.0.3-10.6.0.200", "192.168.0.0/16", "10.6.0.0"}}, 2,
			[]string{"10.6.0.1", "10.6.0.2"}, []string{"10.6.0.0", "10.6.0.3"}},
		{"the gateway is not given, though named", Spec{Subnet: "10.6.0.0/24", Addresses: []string{"10.6.0.1-10.6.0.2"},
			Gateway: "10.6.0.1"}, 1, []string{"10.6.0.2"}, []string{"10.6.0.1"}},
		{"one address", Spec{Subnet: "10.6.0.7/32"}, 1, []string{"10.6.0.7"}, nil},
		{"all of IPv6", Spec{Subnet: "2000::/3"}, math.MaxInt64, []string{"2001:db8::1"}, []string{"2000::", "10.6.0.1"}},
		{"a large subnet with one address less", Spec{Subnet: "fd00::/64", ExcludedAddresses: []string{"fd00::8"}},
			math.MaxInt64,
			[]string{"fd00::1", "fd00::ffff:ffff:ffff:fffe"}, []string{"fd00::", "fd00::8", "fd00::ffff:ffff:ffff:ffff"}},
	} {
		c.spec.Mode = L2
		r, err := Parse(c.spec)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := r.Set.Count(); got != c.count {
			t.Errorf("%s: %d addresses, want %d", c.name, got, c.count)
		}
		for _, a := range c.has {
			if !r.Set.Contains(netip.MustParseAddr(a)) {
				t.Errorf("%s: it lacks %s", c.name, a)
			}
		}
		for _, a := range c.lack {
			if r.Set.Contains(netip.MustParseAddr(a)) {
				t.Errorf("%s: it has %s", c.name, a)
			}
		}
	}
}

func TestABadFieldIsNamedWithWhatWasExpected(t *testing.T) {
	for _, c := range []struct {
		spec Spec
		says string
	}{
		{Spec{Mode: "l2", Subnet: "10.6.0.0/16"}, `spec.mode: "l2" is not valid: expected L2, Routed or Calico`},
		{Spec{Mode: L2}, `spec.subnet: "" is not valid: expected a CIDR`},
		{Spec{Mode: L2, Subnet: "10.6.0.1/16"}, `spec.subnet: "10.6.0.1/16" is not valid: expected a CIDR of unicast ` +
			`addresses without host bits, such as 10.6.0.0/16`},
		{Spec{Mode: L2, Subnet: "224.0.0.0/8"}, `spec.subnet: "224.0.0.0/8"`},
		{Spec{Mode: L2, Subnet: "::ffff:10.0.0.0/104"}, `spec.subnet: `},
		{Spec{Mode: L2, Subnet: "0.0.0.0/0"}, `spec.subnet: "0.0.0.0/0"`},
		{Spec{Mode: L2, Subnet: "fd00::/64", Routes: []route{{Destination: "::ffff:10.0.0.0/104", Gateway: "fd00::1"}}},
			`spec.routes[0].dst: "::ffff:10.0.0.0/104"`},
		{Spec{Mode: L2, Subnet: "fd00::/64", Routes: []route{{Destination: "fd09::/64", Gateway: "::ffff:10.0.0.1"}}},
			`spec.routes[0].gw: "::ffff:10.0.0.1"`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Gateway: "10.7.0.1"}, `spec.gateway: "10.7.0.1" is not valid: expected an ` +
			`address in spec.subnet, 10.6.0.0/16`},
		{Spec{Mode: Routed, Subnet: "10.6.0.0/16", Gateway: "10.6.0.1"}, `spec.gateway: "10.6.0.1" is not valid: expected ` +
			`nothing with mode Routed`},
		{Spec{Mode: Routed, Subnet: "10.6.0.0/16", Routes: []route{{Destination: "10.9.0.0/16", Gateway: "10.6.0.2"}}},
			`spec.routes[0]: "10.9.0.0/16" is not valid: expected nothing with mode Routed`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Routes: []route{
			{Destination: "10.9.0.0/16", Gateway: "10.6.0.2"}, {Destination: "10.9.0.1/16", Gateway: "10.6.0.2"}}},
			`spec.routes[1].dst: "10.9.0.1/16"`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Routes: []route{{Destination: "10.9.0.0/16", Gateway: "fd00::1"}}},
			`spec.routes[0].gw: "fd00::1"`},
		{Spec{Mode: L2, Subnet: "fd00::/64", Routes: []route{{Destination: "10.9.0.0/16", Gateway: "10.6.0.2"}}},
			`spec.routes[0].dst: "10.9.0.0/16" is not valid: expected a CIDR of the same family as spec.subnet, fd00::/64`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.1", "web"}},
			`spec.addresses[1]: "web" is not valid: ` +
				`expected an address, a range such as 10.6.168.101-10.6.168.110, or a CIDR without host bits`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.7.0.1"}},
			`spec.addresses[0]: "10.7.0.1" is not valid: expected addresses in spec.subnet, 10.6.0.0/16`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.9-10.6.0.1"}},
			`first address is not after its last`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.9-fd00::1"}}, `a range of one family`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.1/24"}}, `spec.addresses[0]: "10.6.0.1/24"`},
		{Spec{Mode: L2, Subnet: "fd00::/64", Addresses: []string{"fd00::1%eth0"}}, `spec.addresses[0]: "fd00::1%eth0"`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", ExcludedAddresses: []string{"10.6.0.x"}},
			`spec.excludedAddresses[0]: "10.6.0.x"`},
		{Spec{Mode: L2, Subnet: "10.6.0.0/16", Addresses: []string{"10.6.0.1"}, ExcludedAddresses: []string{"10.6.0.0/24"}},
			`expected at least one address besides`},
	} {
		_, err := Parse(c.spec)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %s", c.spec, err, c.says)
		}
		if err != nil && !errors.As(err, new(*FieldError)) {
			t.Errorf("%+v: %T", c.spec, err)
		}
	}
	_, err := Parse(Spec{Mode: L2, Subnet: "10.6.0.0/16", Gateway: "x", Addresses: []string{"y"},
		ExcludedAddresses: []string{"z"}})
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("not every field is reported: %v", err)
	}
}

// Against a map.
func TestASetIsWhatWasPutInLessWhatWasTakenOut(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 0))
	base := netip.MustParseAddr("10.0.0.0").As4()
	at := func(i int) netip.Addr {
		b := base
		b[3] = byte(i)
		return netip.AddrFrom4(b)
	}
	for range 300 {
		var s Set
		in := map[netip.Addr]bool{}
		for range 120 {
			a := at(r.IntN(40))
			if r.IntN(2) == 0 {
				s.add(a)
				in[a] = true
			} else if s.remove(a) != in[a] {
				t.Fatalf("remove(%s) is not %t", a, in[a])
			} else {
				delete(in, a)
			}
			if s.Count() != uint64(len(in)) {
				t.Fatalf("%v has %d, want %d", s, s.Count(), len(in))
			}
			for i := 1; i < len(s.spans); i++ {
				if joins(s.spans[i-1], s.spans[i]) || !s.spans[i-1].last.Less(s.spans[i].first) {
					t.Fatalf("%v is not in order", s)
				}
			}
		}
		var walked []netip.Addr
		for a := at(255); len(walked) < len(in); walked = append(walked, a) {
			a = s.Next(a)
		}
		for i := range 40 {
			if slices.Contains(walked, at(i)) != in[at(i)] || s.Contains(at(i)) != in[at(i)] {
				t.Fatalf("%v lacks %s, or has too much", s, at(i))
			}
		}
		var not []span
		for range r.IntN(4) {
			first := r.IntN(40)
			not = append(not, span{at(first), at(first + r.IntN(5))})
		}
		o := newSet(not)
		left := s.without(o)
		overlaps := false
		for i := range 50 {
			both := s.Contains(at(i)) && o.Contains(at(i))
			overlaps = overlaps || both
			if left.Contains(at(i)) != (s.Contains(at(i)) && !both) {
				t.Fatalf("%v without %v is %v", s, o, left)
			}
		}
		if s.Overlaps(o) != overlaps {
			t.Fatalf("%v and %v: %t", s, o, overlaps)
		}
	}
}

func TestTheEndOfAnAddressFamilyIsNoEndOfASet(t *testing.T) {
	all := newSet([]span{{netip.MustParseAddr("255.255.255.254"), netip.MustParseAddr("255.255.255.255")}})
	for _, c := range [][2]string{{"255.255.255.254", "255.255.255.255"}, {"255.255.255.255", "255.255.255.254"}} {
		if got := all.Next(netip.MustParseAddr(c[0])); got.String() != c[1] {
			t.Errorf("after %s comes %s", c[0], got)
		}
	}
	all.remove(netip.MustParseAddr("255.255.255.255"))
	if left := all.without(all); len(left.spans) != 0 || all.Count() != 1 {
		t.Errorf("%v, %v", left, all)
	}
	whole := newSet([]span{{netip.MustParseAddr("::"), lastOf(netip.MustParsePrefix("::/0"))}})
	if got := whole.without(whole); len(got.spans) != 0 {
		t.Errorf("all without all is %v", got)
	}
	if (Set{}).Next(netip.MustParseAddr("::")).IsValid() || (Set{}).Contains(netip.Addr{}) {
		t.Error("nothing has something")
	}
}

func TestAnAddressIsKeptByTheWordsOfRetention(t *testing.T) {
	since := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	owned := Keep{WhileOwned: true, Scaled: true, Deleted: true}
	for _, c := range []struct {
		name   string
		keep   Keep
		passed time.Duration
		wanted Wanted
		free   bool
	}{
		{"nothing asked", Keep{}, 0, Wants, true},
		{"a duration", Keep{For: time.Minute}, time.Minute - 1, Unknown, false},
		{"a duration that is over", Keep{For: time.Minute}, time.Minute, Wants, true},
		{"a duration, scaled", Keep{For: time.Minute}, 0, Scaled, false},
		{"a duration, scaled, by policy", Keep{For: time.Minute, Scaled: true}, 0, Scaled, true},
		{"owned", owned, 1e6 * time.Hour, Wants, false},
		{"owned by nobody knows whom", owned, 1e6 * time.Hour, Unknown, false},
		{"owned, scaled", owned, 0, Scaled, true},
		{"owned, deleted", owned, 0, Abandoned, true},
		{"owned, scaled, by policy", Keep{WhileOwned: true, Deleted: true}, 0, Scaled, false},
		{"owned, deleted, by policy", Keep{WhileOwned: true, Scaled: true}, 0, Abandoned, false},
	} {
		free, why, until := c.keep.Ends(since, since.Add(c.passed), c.wanted)
		if free != c.free || why == "" || until.IsZero() != (c.keep.For == 0 || c.wanted == Scaled && c.keep.Scaled) {
			t.Errorf("%s: %t, %q, %s", c.name, free, why, until)
		}
	}
}
