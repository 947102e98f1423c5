package hostnet

import (
	"encoding/binary"
	"net"
	"net/netip"
)

const (
	etherTypeARP  = 0x0806
	etherTypeIPv6 = 0x86dd
)

// gratuitousARP is an ARP announcement (RFC 5227): a broadcast request by the address for itself.
func gratuitousARP(hw net.HardwareAddr, addr netip.Addr) []byte {
	ip := addr.As4()
	f := ethernet(net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, hw, etherTypeARP)
	f = append(f, 0, 1, 0x08, 0x00, 6, 4, 0, 1) // Ethernet, IPv4, lengths, request
	f = append(f, hw...)
	f = append(f, ip[:]...)
	f = append(f, 0, 0, 0, 0, 0, 0)
	return append(f, ip[:]...)
}

// unsolicitedNA is a neighbour advertisement to all nodes that overrides what they know (RFC 4861, 7.2.6).
func unsolicitedNA(hw net.HardwareAddr, addr netip.Addr) []byte {
	ip := addr.As16()
	all := netip.MustParseAddr("ff02::1").As16()
	icmp := []byte{136, 0, 0, 0, 0x20, 0, 0, 0} // type, code, checksum; flags: override
	icmp = append(icmp, ip[:]...)
	icmp = append(icmp, 2, 1) // option: target link-layer address, in units of 8 bytes
	icmp = append(icmp, hw...)
	binary.BigEndian.PutUint16(icmp[2:], icmp6Checksum(ip, all, icmp))

	f := ethernet(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, hw, etherTypeIPv6)
	f = append(f, 0x60, 0, 0, 0, 0, byte(len(icmp)), 58, 255) // ICMPv6, hop limit 255: not forwarded
	f = append(f, ip[:]...)
	f = append(f, all[:]...)
	return append(f, icmp...)
}

func ethernet(dst, src net.HardwareAddr, etherType uint16) []byte {
	f := append([]byte(nil), dst...)
	f = append(f, src...)
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
