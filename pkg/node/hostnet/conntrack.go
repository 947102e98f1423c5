package hostnet

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attributes of a request for those connections alone whose tuple has an address as its source; see CTA_FILTER in
// linux/netfilter/nfnetlink_conntrack.h. Kernels before 5.8 do not know them and tell of all connections.
const (
	ctaFilter     = 25
	filterSource  = 1 << 0
	filterMembers = 2 // CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS: they have the numbers of the tuples
)

// bucketsPerEntry is how many empty buckets of its table the kernel walks in the time in which it tells of a
// connection, and this reads it.
const bucketsPerEntry = 64

// flushMost is the most addresses whose connections the kernel is asked to flush itself. It walks its whole table twice
// for each of them. With 262,144 buckets a walk takes 0.3 ms, and a list of the table 10 ms.
const flushMost = 8

// FlushConntrack deletes every tracked connection that has one of the addresses as its source, or as that of its
// replies. So it has those to the addresses, too, after translation. The table can have hundreds of thousands of
// entries, so the kernel chooses, or it is read as a stream; netlink.ConntrackDeleteFilters would hold all of it.
func FlushConntrack(addrs map[netip.Addr]bool) error {
	entries, err := conntrackSize("count")
	if errors.Is(err, fs.ErrNotExist) || err == nil && entries == 0 { // nothing is tracked
		return nil
	}
	var failed error
	if len(addrs) <= flushMost {
		addrs, failed = flushBySource(addrs)
	}
	return errors.Join(failed, flushListed(entries, addrs))
}

// flushBySource has the kernel flush the connections of each address, and returns the addresses that it left.
// From Linux 6.11 on it does so by a filter of IPv4 (ctnetlink_del_conntrack in net/netfilter/nf_conntrack_netlink.c).
// Before, it takes the tuple for that of one connection, which lacks its ports, and refuses it. A filter of IPv6 it
// would read as its opposite, see [trackedConnections].
func flushBySource(addrs map[netip.Addr]bool) (left map[netip.Addr]bool, err error) {
	left = maps.Clone(addrs)
	for a := range addrs {
		if a.Is6() {
			continue
		}
		for _, tuple := range []int{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY} {
			_, err := conntrackOf(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, a, tuple).Execute(unix.NETLINK_NETFILTER, 0)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
				return left, nil
			}
			if err != nil {
				return left, fmt.Errorf("flushing the tracked connections of %s: %w", a, err)
			}
		}
		delete(left, a)
	}
	return left, nil
}

// flushListed flushes the connections of the addresses one by one. entries is how many there are at all, 0 if that is
// not known.
func flushListed(entries int, addrs map[netip.Addr]bool) error {
	stale, err := trackedConnections(entries, addrs)
	errs := []error{err}
	for _, conn := range stale {
		req := conntrackRequest(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, conn[0]) // its family
		req.AddRawData(conn[nl.SizeofNfgenmsg:])
		_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
		if err != nil && !errors.Is(err, unix.ENOENT) { // the connection has ended meanwhile
			errs = append(errs, fmt.Errorf("deleting a tracked connection: %w", err))
		}
	}
	return errors.Join(errs...)
}

func conntrackRequest(op, flags int, family uint8) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(int(netlink.ConntrackTable)<<8|op, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return req
}

// trackedConnections returns the messages about the connections of the addresses. The kernel walks its whole table for
// each request. So one for all connections is cheaper than one for each address and tuple, unless there are many
// connections.
func trackedConnections(entries int, addrs map[netip.Addr]bool) (found [][]byte, err error) {
	if len(addrs) == 0 {
		return nil, nil
	}
	buckets, err := conntrackSize("buckets")
	whole := func(family uint8) error {
		more, _, err := dumpConntrack(conntrackRequest(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, family), addrs)
		found = append(found, more...)
		return err
	}
	if err != nil || entries*bucketsPerEntry <= filterMembers*len(addrs)*buckets {
		return found, whole(unix.AF_UNSPEC)
	}
	six, all := false, false
	for a := range addrs {
		six = six || a.Is6()
		for _, tuple := range []int{nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY} {
			if a.Is6() || all {
				continue
			}
			var more [][]byte
			more, all, err = dumpConntrack(conntrackOf(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, a, tuple), addrs)
			if found = append(found, more...); err != nil {
				return found, err
			}
		}
	}
	if six { // asked for the source fd00::1, Linux 6.18 tells of all connections but those from fd00::1
		err = whole(unix.AF_INET6)
	}
	return found, err
}

// conntrackOf is a request about the connections of which a tuple has the IPv4 address as its source.
func conntrackOf(op, flags int, a netip.Addr, tuple int) *nl.NetlinkRequest {
	req := conntrackRequest(op, flags, unix.AF_INET)
	of := nl.NewRtAttr(unix.NLA_F_NESTED|tuple, nil)
	of.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil).AddRtAttr(nl.CTA_IP_V4_SRC, a.AsSlice())
	req.AddData(of)
	filter := nl.NewRtAttr(unix.NLA_F_NESTED|ctaFilter, nil)
	filter.AddRtAttr(tuple, nl.Uint32Attr(filterSource))
	req.AddData(filter)
	return req
}

// dumpConntrack returns the messages about the connections of the addresses that a request brings. all says that it
// has brought others: the kernel knows no filter.
func dumpConntrack(req *nl.NetlinkRequest, addrs map[netip.Addr]bool) (found [][]byte, all bool, err error) {
	err = req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		if len(msg) > nl.SizeofNfgenmsg && concerns(msg[nl.SizeofNfgenmsg:], addrs) {
			found = append(found, append([]byte(nil), msg...))
		} else {
			all = true
		}
		return true
	})
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // what was listed is flushed
		return found, all, fmt.Errorf("listing tracked connections: %w", err)
	}
	return found, all, nil
}

// conntrackSize reads how large the table of connections is: the count of this network namespace, or the buckets that
// all share.
func conntrackSize(of string) (int, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + of)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// concerns looks for the addresses as the sources of both tuples of an entry:
//
//	CTA_TUPLE_ORIG, CTA_TUPLE_REPLY { CTA_TUPLE_IP { CTA_IP_V4_SRC, CTA_IP_V6_SRC } }
func concerns(entry []byte, addrs map[netip.Addr]bool) bool {
	for _, tuple := range attrs(entry, nl.CTA_TUPLE_ORIG, nl.CTA_TUPLE_REPLY) {
		for _, ips := range attrs(tuple, nl.CTA_TUPLE_IP) {
			for _, ip := range attrs(ips, nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC) {
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
