package ledger

import (
	"net/netip"
	"slices"
	"testing"
)

func TestARangeWalkVisitsEachAddressOnceBeginningBehindTheLast(t *testing.T) {
	a := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	r1, err := NewRange(netip.MustParsePrefix("10.0.0.0/29"), netip.Addr{}, netip.Addr{}, netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	r2, err := NewRange(netip.MustParsePrefix("10.0.1.0/24"), a("10.0.1.10"), a("10.0.1.12"), a("10.0.1.11"))
	if err != nil {
		t.Fatal(err)
	}
	set := RangeSet{r1, r2}
	for last, want := range map[netip.Addr][]string{
		{}:             {"10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.1.10", "10.0.1.12"},
		a("10.0.0.5"):  {"10.0.0.6", "10.0.1.10", "10.0.1.12", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"},
		a("10.0.1.12"): {"10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.1.10", "10.0.1.12"},
		a("10.0.1.10"): {"10.0.1.12", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.1.10"},
		a("192.0.2.1"): {"10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.1.10", "10.0.1.12"},
	} {
		var got []string
		set.walk(last, func(a netip.Addr) bool { got = append(got, a.String()); return true })
		if !slices.Equal(got, want) {
			t.Errorf("behind %s: %v, want %v", last, got, want)
		}
	}
	if set.Size() != 7 {
		t.Errorf("size %d", set.Size())
	}
}

func TestARangeThatCannotBeAllocatedFromIsRefused(t *testing.T) {
	p := netip.MustParsePrefix
	a := netip.MustParseAddr
	var none netip.Addr
	for _, c := range []struct {
		subnet              netip.Prefix
		start, end, gateway netip.Addr
	}{
		{netip.Prefix{}, none, none, none},
		{p("10.0.0.0/31"), none, none, none},
		{p("fd00::/127"), none, none, none},
		{p("10.0.0.1/24"), none, none, none},
		{p("10.0.0.0/24"), a("10.0.1.1"), none, none},
		{p("10.0.0.0/24"), none, a("10.0.1.1"), none},
		{p("10.0.0.0/24"), a("10.0.0.9"), a("10.0.0.8"), none},
		{p("10.0.0.0/24"), a("10.0.0.255"), none, none},
		{p("10.0.0.0/24"), a("10.0.0.9"), a("10.0.0.9"), a("10.0.0.9")},
	} {
		if r, err := NewRange(c.subnet, c.start, c.end, c.gateway); err == nil {
			t.Errorf("%+v was accepted as %s", c, r)
		}
	}
	if _, err := NewRange(p("fd00::/64"), none, none, none); err != nil {
		t.Error(err)
	}
}
