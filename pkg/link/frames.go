package link

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"strings"
)

// MAC is an Ethernet address.
type MAC [6]byte

// String returns it as people write it.
func (m MAC) String() string {
	parts := make([]string, len(m))
	for i := range m {
		parts[i] = hex.EncodeToString(m[i : i+1])
	}
	return strings.Join(parts, ":")
}

const (
	etherTypeARP  = 0x0806
	etherTypeIPv6 = 0x86dd

	arpRequest     = 1
	nsType, naType = 135, 136 // neighbour solicitation and advertisement
)

var (
	broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodes  = netip.MustParseAddr("ff02::1")
)

// Announcement is a frame by which neighbours learn at once who has an address: a gratuitous ARP (RFC 5227), or an
// unsolicited neighbour advertisement that overrides what they know (RFC 4861, 7.2.6).
func Announcement(hw MAC, addr netip.Addr) []byte {
	if addr.Is4() {
		return arp(hw, addr, addr)
	}
	ip := addr.As16()
	icmp := []byte{naType, 0, 0, 0, 0x20, 0, 0, 0} // type, code, checksum; flags: override
	icmp = append(icmp, ip[:]...)
	icmp = append(icmp, 2, 1) // option: target link-layer address, in units of 8 bytes
	icmp = append(icmp, hw[:]...)
	return icmp6(hw, addr, allNodes, icmp)
}

// question asks which host has an address, on behalf of a host that has none yet, so that it changes no neighbour's
// table: an ARP probe (RFC 5227), or a solicitation for duplicate address detection (RFC 4862).
func question(hw MAC, addr netip.Addr) []byte {
	if addr.Is4() {
		return arp(hw, netip.IPv4Unspecified(), addr)
	}
	ip := addr.As16()
	icmp := append([]byte{nsType, 0, 0, 0, 0, 0, 0, 0}, ip[:]...)
	return icmp6(hw, netip.IPv6Unspecified(), solicitedNode(addr), icmp)
}

// solicitedNode is the group of those who may have an IPv6 address.
func solicitedNode(addr netip.Addr) netip.Addr {
	ip, group := addr.As16(), [16]byte{0: 0xff, 1: 0x02, 11: 1, 12: 0xff}
	copy(group[13:], ip[13:])
	return netip.AddrFrom16(group)
}

// groupMAC is where frames to an IPv6 group go.
func groupMAC(group netip.Addr) MAC {
	ip := group.As16()
	return MAC{0x33, 0x33, ip[12], ip[13], ip[14], ip[15]}
}

// arp is a broadcast request of sender for target.
func arp(hw MAC, sender, target netip.Addr) []byte {
	from, to := sender.As4(), target.As4()
	f := ethernet(broadcast, hw, etherTypeARP)
	f = append(f, 0, 1, 0x08, 0x00, 6, 4, 0, arpRequest) // Ethernet, IPv4, lengths, request
	f = append(f, hw[:]...)
	f = append(f, from[:]...)
	f = append(f, 0, 0, 0, 0, 0, 0)
	return append(f, to[:]...)
}

// icmp6 is a message, whose checksum is zero, to a group.
func icmp6(hw MAC, from, group netip.Addr, message []byte) []byte {
	src, dst := from.As16(), group.As16()
	binary.BigEndian.PutUint16(message[2:], icmp6Checksum(src, dst, message))
	f := ethernet(groupMAC(group), hw, etherTypeIPv6)
	f = append(f, 0x60, 0, 0, 0, 0, byte(len(message)), 58, 255) // ICMPv6, hop limit 255: not forwarded
	f = append(f, src[:]...)
	f = append(f, dst[:]...)
	return append(f, message...)
}

func ethernet(dst, src MAC, etherType uint16) []byte {
	f := append([]byte(nil), dst[:]...)
	f = append(f, src[:]...)
	return binary.BigEndian.AppendUint16(f, etherType)
}

// icmp6Checksum is over the pseudo-header of RFC 8200, 8.1, and the message with a zero checksum.
func icmp6Checksum(src, dst [16]byte, message []byte) uint16 {
	b := append(append([]byte(nil), src[:]...), dst[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(message)))
	b = append(b, 0, 0, 0, 58)
	b = append(b, message...)
	if len(b)%2 != 0 {
		b = append(b, 0)
	}
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// has returns the machine that has an address, as a frame shows. A frame of own shows nothing; nor does the question of
// another machine: some switches and scanners ask so for every address they see, and a machine that is about to take
// the address hears of the pod.
func has(frame []byte, own MAC, addr netip.Addr) (MAC, bool) {
	if len(frame) < 14 {
		return MAC{}, false
	}
	var from MAC
	var ok bool
	switch body := frame[14:]; binary.BigEndian.Uint16(frame[12:]) {
	case etherTypeARP:
		from, ok = hasARP(body, addr)
	case etherTypeIPv6:
		from, ok = advertises(body, MAC(frame[6:12]), addr)
	}
	return from, ok && from != own
}

func hasARP(b []byte, addr netip.Addr) (from MAC, ok bool) {
	if len(b) < 28 || !addr.Is4() || string(b[:6]) != "\x00\x01\x08\x00\x06\x04" {
		return from, false
	}
	return MAC(b[8:14]), netip.AddrFrom4([4]byte(b[14:18])) == addr
}

func advertises(b []byte, src MAC, addr netip.Addr) (from MAC, ok bool) {
	if len(b) < 64 || addr.Is4() || b[6] != 58 || b[40] != naType || netip.AddrFrom16([16]byte(b[48:64])) != addr {
		return from, false
	}
	if len(b) >= 72 && b[64] == 2 && b[65] == 1 {
		src = MAC(b[66:72])
	}
	return src, true
}
