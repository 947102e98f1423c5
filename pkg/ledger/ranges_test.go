package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/retention"
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
		{p("::ffff:10.1.0.0/120"), none, none, none},
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

func TestTheUseOfARangeSaysWhenPromisesAreRefused(t *testing.T) {
	dir := t.TempDir()
	n := &Network{Name: "pods", DataDir: dir + "/networks"}
	for _, subnet := range []string{"192.0.2.0/28", "2001:db8::/64"} {
		r, err := NewRange(netip.MustParsePrefix(subnet), netip.Addr{}, netip.Addr{}, netip.Addr{})
		if err != nil {
			t.Fatal(err)
		}
		n.Ranges = append(n.Ranges, RangeSet{r})
	}
	l := New(n, Options{StateDir: dir + "/state"})
	use := func() []RangeUse {
		addrs, err := l.List()
		if err != nil {
			t.Fatal(err)
		}
		return n.Use(addrs)
	}
	policy := &retention.Policy{Retention: retention.Duration(time.Hour)}
	pods := 0
	for {
		u := use()[0]
		r, err := l.Add(AddRequest{
			Attachment: Attachment{ContainerID: fmt.Sprint("c", pods), IfName: "eth0"},
			Pod:        Pod{Namespace: "default", Name: fmt.Sprint("web-", pods)}, Policy: policy,
		})
		if err != nil {
			t.Fatal(err)
		}
		pods++
		if want := int64(u.Promised) < u.Promisable; r.Promised != want {
			t.Fatalf("with %d of %d promised pod %d is promised its address: %v", u.Promised, u.Promisable, pods, r.Promised)
		}
		if !r.Promised {
			break
		}
	}
	if u := use()[0]; u.Addresses != 13 || u.Promisable != 6 || u.Promised != 6 || u.Taken != pods {
		t.Errorf("after %d pods %+v", pods, u)
	}
	if u := use()[1]; u.Promised != 6 || u.Taken != pods {
		t.Errorf("of the other family after %d pods %+v", pods, u)
	}
	if _, err := l.Del(DelRequest{Attachment: Attachment{ContainerID: "c0", IfName: "eth0"}}); err != nil {
		t.Fatal(err)
	}
	if u := use()[0]; u.Promised != 6 || u.Taken != pods {
		t.Errorf("a retained address counts as well: %+v", u)
	}
}
