package hostnet

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// FlushConntrack deletes every tracked connection that has one of the addresses on either side, before or
// after translation, and returns how many. The table can have hundreds of thousands of entries, so it is
// read as a stream; netlink.ConntrackDeleteFilters would hold all of it.
func FlushConntrack(addrs map[netip.Addr]bool) (n int, err error) {
	var four, six bool
	for a := range addrs {
		four, six = four || a.Is4(), six || a.Is6()
	}
	var errs []error
	for _, family := range []struct {
		want bool
		af   uint8
	}{{four, unix.AF_INET}, {six, unix.AF_INET6}} {
		if !family.want {
			continue
		}
		stale, err := trackedConnections(family.af, addrs)
		if err != nil {
			errs = append(errs, err)
		}
		for _, conn := range stale {
			req := conntrackRequest(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, family.af)
			req.AddRawData(conn)
			switch _, err := req.Execute(unix.NETLINK_NETFILTER, 0); {
			case err == nil:
				n++
			case !errors.Is(err, unix.ENOENT): // the connection has ended meanwhile
				errs = append(errs, fmt.Errorf("deleting a tracked connection: %w", err))
			}
		}
	}
	return n, errors.Join(errs...)
}

func conntrackRequest(op, flags int, family uint8) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(int(netlink.ConntrackTable)<<8|op, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return req
}

// trackedConnections returns the attributes of the entries of the addresses.
func trackedConnections(family uint8, addrs map[netip.Addr]bool) (found [][]byte, err error) {
	req := conntrackRequest(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, family)
	err = req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		if len(msg) > nl.SizeofNfgenmsg && concerns(msg[nl.SizeofNfgenmsg:], addrs) {
			found = append(found, append([]byte(nil), msg[nl.SizeofNfgenmsg:]...))
		}
		return true
	})
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // what was listed is flushed
		return found, fmt.Errorf("listing tracked connections: %w", err)
	}
	return found, nil
}

// concerns looks for the addresses in both tuples of an entry:
//
//	CTA_TUPLE_ORIG, CTA_TUPLE_REPLY { CTA_TUPLE_IP { CTA_IP_V4_SRC … CTA_IP_V6_DST } }
func concerns(entry []byte, addrs map[netip.Addr]bool) bool {
	for _, tuple := range attrs(entry, nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY) {
		for _, ips := range attrs(tuple, nl.CTA_TUPLE_IP) {
			for _, ip := range attrs(ips, nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST) {
				if a, ok := netip.AddrFromSlice(ip); ok && addrs[a] {
					return true
				}
			}
		}
	}
	return false
}

// attrs returns the values of the attributes of these types.
func attrs(b []byte, types ...uint16) (values [][]byte) {
	for len(b) >= unix.SizeofNlAttr {
		length := int(nl.NativeEndian().Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			return values
		}
		kind := nl.NativeEndian().Uint16(b[2:]) & 0x3fff // without the flags for nested and byte order
		for _, t := range types {
			if kind == t {
				values = append(values, b[unix.SizeofNlAttr:length])
			}
		}
		b = b[min(len(b), (length+unix.NLA_ALIGNTO-1) & ^(unix.NLA_ALIGNTO-1)):]
	}
	return values
}
