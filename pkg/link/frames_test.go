package link

import (
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
)

func TestFramesAreWhatTheStandardsSay(t *testing.T) {
	mac := MAC{0x02, 0x42, 0xac, 0x11, 0x00, 0x02}
	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"RFC 5227 announcement", Announcement(mac, netip.MustParseAddr("192.0.2.5")),
			"ffffffffffff 0242ac110002 0806 0001 0800 06 04 0001 0242ac110002 c0000205 000000000000 c0000205"},
		{"RFC 4861 unsolicited advertisement", Announcement(mac, netip.MustParseAddr("2001:db8::5")),
			"333300000001 0242ac110002 86dd 60000000 0020 3a ff 20010db8000000000000000000000005 " +
				"ff020000000000000000000000000001" +
				" 88 00 4cce 20000000 20010db8000000000000000000000005 02 01 0242ac110002"},
		{"RFC 5227 probe", question(mac, netip.MustParseAddr("192.0.2.5")),
			"ffffffffffff 0242ac110002 0806 0001 0800 06 04 0001 0242ac110002 00000000 000000000000 c0000205"},
		{"RFC 4862 duplicate address detection", question(mac, netip.MustParseAddr("2001:db8::5")),
			"3333ff000005 0242ac110002 86dd 60000000 0018 3a ff 00000000000000000000000000000000" +
				" ff0200000000000000000001ff000005 87 00 4ce5 00000000 20010db8000000000000000000000005"},
	} {
		if got, want := hex.EncodeToString(c.got), strings.ReplaceAll(c.want, " ", ""); got != want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, want)
		}
	}
}

func TestAFrameShowsWhoHasAnAddress(t *testing.T) {
	own, other := MAC{2, 0, 0, 0, 0, 1}, MAC{2, 0, 0, 0, 0, 2}
	for _, text := range []string{"192.0.2.5", "2001:db8::5"} {
		addr := netip.MustParseAddr(text)
		for _, c := range []struct {
			name  string
			frame []byte
			want  bool
		}{
			{"who has it says so", Announcement(other, addr), true},
			{"of another address", Announcement(other, addr.Next()), false},
			{"the pod itself", Announcement(own, addr), false},
			{"another machine asks for it", question(other, addr), false},
		} {
			mac, ok := has(c.frame, own, addr)
			if ok != c.want || ok && mac != other {
				t.Errorf("%s, %s: %s, %t", c.name, addr, mac, ok)
			}
			for n := range c.frame { // cut short, it shows nothing but never fails
				if _, ok := has(c.frame[:n], own, addr); ok && n < 42 {
					t.Errorf("%s, %s: %d bytes are enough", c.name, addr, n)
				}
			}
		}
	}
}
