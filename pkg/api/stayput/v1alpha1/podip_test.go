package v1alpha1

import (
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

func TestTheNameOfAPodIPIsItsAddress(t *testing.T) {
	for addr, name := range map[string]string{
		"10.6.168.105":       "10.6.168.105",
		"::":                 "0000-0000-0000-0000-0000-0000-0000-0000",
		"2001:db8::1:0:ABcd": "2001-0db8-0000-0000-0000-0001-0000-abcd",
		"::ffff:10.1.2.3":    "10.1.2.3",
	} {
		a := netip.MustParseAddr(addr)
		if got := PodIPName(a); got != name {
			t.Errorf("the PodIP of %s is %s, want %s", addr, got, name)
		}
		if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
			t.Errorf("%s: %v", name, errs)
		}
		if back, err := ParsePodIPName(name); err != nil || back != a.Unmap() {
			t.Errorf("%s is the PodIP of %s, %v", name, back, err)
		}
	}
}

func TestAnAddressHasOnePodIPOnly(t *testing.T) {
	for _, name := range []string{
		"", "web-0", "010.6.168.105", "10.6.168", "2001-db8-0-0-0-0-0-1", "2001-0db8--1",
		"2001-0DB8-0000-0000-0000-0000-0000-0001",
		"2001:0db8:0000:0000:0000:0000:0000:0001", "0000-0000-0000-0000-0000-ffff-0a01-0203", "fe80--1%eth0",
	} {
		if a, err := ParsePodIPName(name); err == nil {
			t.Errorf("%q was taken for the PodIP of %s", name, a)
		}
	}
}
