package hostnet

import (
	"encoding/hex"
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestFramesAreWhatTheStandardsSay(t *testing.T) {
	mac := net.HardwareAddr{0x02, 0x42, 0xac, 0x11, 0x00, 0x02}
	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"RFC 5227 announcement", gratuitousARP(mac, netip.MustParseAddr("192.0.2.5")),
			"ffffffffffff 0242ac110002 0806 0001 0800 06 04 0001 0242ac110002 c0000205 000000000000 c0000205"},
		{"RFC 4861 unsolicited advertisement", unsolicitedNA(mac, netip.MustParseAddr("2001:db8::5")),
			"333300000001 0242ac110002 86dd 60000000 0020 3a ff 20010db8000000000000000000000005 " +
				"ff020000000000000000000000000001" +
				" 88 00 4cce 20000000 20010db8000000000000000000000005 02 01 0242ac110002"},
	} {
		if got, want := hex.EncodeToString(c.got), strings.ReplaceAll(c.want, " ", ""); got != want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, want)
		}
	}
}
