package hostnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

// flow is a connection that the kernel is to track: who asks whom, and who replies to whom, which differs if an address
// is translated.
type flow struct{ src, dst, replies, to string }

func (f flow) track(h *netlink.Handle, port uint16) error {
	tuple := func(src, dst string, from, to uint16) netlink.IPTuple {
		return netlink.IPTuple{SrcIP: netip.MustParseAddr(src).AsSlice(), DstIP: netip.MustParseAddr(dst).AsSlice(),
			SrcPort: from, DstPort: to, Protocol: unix.IPPROTO_UDP}
	}
	family := netlink.InetFamily(unix.AF_INET)
	if netip.MustParseAddr(f.src).Is6() {
		family = unix.AF_INET6
	}
	return h.ConntrackCreate(netlink.ConntrackTable, family, &netlink.ConntrackFlow{FamilyType: uint8(family),
		Forward: tuple(f.src, f.dst, port, 80), Reverse: tuple(f.replies, f.to, 80, port), TimeOut: 600})
}

// The kernel flushes those of few addresses itself. Kernels before Linux 6.11 do not, and are asked in another way if
// there are many connections.
func TestTheConnectionsOfAddressesAreFlushedAmongFewAndAmongMany(t *testing.T) {
	pods := map[netip.Addr]bool{netip.MustParseAddr("192.0.2.5"): true, netip.MustParseAddr("2001:db8::5"): true}
	stale := []flow{
		{"192.0.2.5", "192.0.2.9", "192.0.2.9", "192.0.2.5"},
		{"192.0.2.8", "192.0.2.5", "192.0.2.5", "192.0.2.8"},
		{"192.0.2.8", "10.96.0.1", "192.0.2.5", "192.0.2.8"},      // by its Service
		{"192.0.2.5", "198.51.100.1", "198.51.100.1", "10.0.0.1"}, // masqueraded
		{"2001:db8::5", "2001:db8::9", "2001:db8::9", "2001:db8::5"},
		{"2001:db8::8", "2001:db8::5", "2001:db8::5", "2001:db8::8"},
	}
	others := []flow{
		{"192.0.2.8", "192.0.2.9", "192.0.2.9", "192.0.2.8"}, {"2001:db8::8", "2001:db8::9", "2001:db8::9", "2001:db8::8"},
	}
	listed := func(addrs map[netip.Addr]bool) error { return flushListed(0, addrs) }
	listedAmongMany := func(addrs map[netip.Addr]bool) error {
		entries, err := conntrackSize("count")
		return errors.Join(err, flushListed(entries, addrs))
	}
	for name, c := range map[string]struct {
		many  bool
		flush func(map[netip.Addr]bool) error
	}{
		"by the kernel": {false, FlushConntrack}, "few": {false, listed}, "many": {true, listedAmongMany},
	} {
		t.Run(name, func(t *testing.T) {
			nodetest.In(t, nodetest.Netns(t, t.TempDir(), "node"), func() error {
				h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
				must.Do(t, err)
				defer h.Close()
				for i, f := range slices.Concat(stale, others) {
					must.Do(t, f.track(h, uint16(1000+i)))
				}
				left := len(others)
				if c.many {
					buckets, err := conntrackSize("buckets")
					must.Do(t, err)
					for i := range filterMembers*len(pods)*buckets/bucketsPerEntry + 1 {
						a := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(10<<24+i)))).String()
						must.Do(t, flow{a, "192.0.2.9", "192.0.2.9", a}.track(h, 2000))
						left++
					}
				}
				must.Do(t, c.flush(pods))
				if is, err := conntrackSize("count"); err != nil || is != left {
					t.Errorf("left are %d, want %d: %v", is, left, err)
				}
				return nil
			})
		})
	}
}

// Linux 6.11 and later flush by the filter, and earlier ones refuse to. Both leave what they cannot flush.
func TestTheKernelFlushesByItsFilter(t *testing.T) {
	var name unix.Utsname
	must.Do(t, unix.Uname(&name))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	must.Do(t, err)
	four, six := netip.MustParseAddr("192.0.2.5"), netip.MustParseAddr("2001:db8::5")
	nodetest.In(t, nodetest.Netns(t, t.TempDir(), "node"), func() error {
		left, err := flushBySource(map[netip.Addr]bool{four: true, six: true})
		if able := major > 6 || major == 6 && minor >= 11; err != nil || left[four] == able || !left[six] {
			t.Errorf("Linux %d.%d left %v, %v", major, minor, left, err)
		}
		return nil
	})
}

// A kernel that knows no filter tells of all connections, at the first request.
func TestAKernelWithoutFiltersIsAskedOnce(t *testing.T) {
	nodetest.In(t, nodetest.Netns(t, t.TempDir(), "node"), func() error {
		h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		must.Do(t, err)
		defer h.Close()
		must.Do(t, flow{"192.0.2.8", "192.0.2.5", "192.0.2.5", "192.0.2.8"}.track(h, 1000))
		must.Do(t, flow{"192.0.2.8", "192.0.2.9", "192.0.2.9", "192.0.2.8"}.track(h, 1001))
		pods := map[netip.Addr]bool{netip.MustParseAddr("192.0.2.5"): true}
		for a := range pods {
			req := conntrackOf(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, a, nl.CTA_TUPLE_ORIG)
			req.Data = req.Data[:1] // as if it had none
			found, all, err := dumpConntrack(req, pods)
			if len(found) != 1 || !all || err != nil {
				t.Errorf("found %d, all %t, %v", len(found), all, err)
			}
		}
		return nil
	})
}
