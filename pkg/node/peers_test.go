package node

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/test/nodetest"
)

// The kernel is the peer in these tests: it is the one that has to understand.

var (
	podAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.5"), netip.MustParseAddr("2001:db8::5")}
	oldMAC   = net.HardwareAddr{0x02, 0, 0, 0, 0, 0x99}
)

// pair makes a pod with eth0 and a peer, joined by a cable.
func (w *world) pair() (pod, peer string) {
	w.t.Helper()
	pod, peer = w.netns("pod"), w.netns("peer")
	far, err := hostnet.Open(peer)
	check(w.t, err)
	defer far.Close()
	nodetest.In(w.t, pod, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "eth0"
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(far.Fd())}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		return netlink.LinkSetUp(veth)
	})
	nodetest.In(w.t, peer, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, s := range []string{"192.0.2.1/24", "2001:db8::1/64"} {
			a, err := netlink.ParseAddr(s)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, a); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(link)
	})
	return pod, peer
}

// address gives the pod's eth0 its addresses and returns its link-layer address.
func address(t *testing.T, pod string) (mac net.HardwareAddr) {
	t.Helper()
	nodetest.In(t, pod, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		mac = link.Attrs().HardwareAddr
		for _, s := range []string{"192.0.2.5/24", "2001:db8::5/64"} {
			a, err := netlink.ParseAddr(s)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, a); err != nil {
				return err
			}
		}
		return nil
	})
	return mac
}

// remember gives a namespace neighbour entries of the addresses.
func remember(t *testing.T, netns string, mac net.HardwareAddr, state int) {
	t.Helper()
	nodetest.In(t, netns, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, a := range podAddrs {
			if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: a.AsSlice(), HardwareAddr: mac,
				State: state}); err != nil {
				return err
			}
		}
		return nil
	})
}

// remembered is what a namespace knows of an address; nil if nothing.
func remembered(t *testing.T, netns string, addr netip.Addr) (mac net.HardwareAddr) {
	t.Helper()
	nodetest.In(t, netns, func() error {
		all, err := netlink.NeighList(0, netlink.FAMILY_ALL)
		for _, n := range all {
			if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == addr && n.State != netlink.NUD_FAILED {
				mac = n.HardwareAddr
			}
		}
		return err
	})
	return mac
}

func restoredEvent(netns string) ledger.Event {
	return ledger.Event{
		Reason: ledger.EventRestored, Key: ledger.Key{Network: "pods", IfName: "eth0"}, Pod: ledger.Pod{Namespace: "default",
			Name: "web-0"},
		ContainerID: "c1", Netns: netns, Addrs: podAddrs,
	}
}

func TestPeersLearnOfARestoredAddressesNewPlaceAtOnce(t *testing.T) {
	w := newWorld(t)
	pod, peer := w.pair()
	remember(t, peer, oldMAC, netlink.NUD_STALE)
	mac := address(t, pod)
	eventually(t, "announced", func() bool { // the carrier may still be coming up
		if _, err := hostnet.Announce(pod, "eth0", podAddrs); err != nil {
			t.Log(err)
		}
		for _, a := range podAddrs {
			if !bytes.Equal(remembered(t, peer, a), mac) {
				return false
			}
		}
		return true
	})
}

func TestAnAddressIsAnnouncedOnceTheMainPluginHasConfiguredIt(t *testing.T) {
	w := newWorld(t)
	pod, peer := w.pair()
	remember(t, peer, oldMAC, netlink.NUD_STALE)
	now := time.Now()
	p := &announcement{event: restoredEvent(pod), wait: firstRetry, due: now, giveUp: now.Add(configureTime)}
	pending := w.a.announcer.announceDue([]*announcement{p})
	if len(pending) != 1 || p.made {
		t.Fatal("an address was announced that the pod has not got")
	}
	mac := address(t, pod)
	eventually(t, "the peer knows", func() bool {
		pending = w.a.announcer.announceDue(pending)
		return bytes.Equal(remembered(t, peer, podAddrs[0]), mac) && bytes.Equal(remembered(t, peer, podAddrs[1]), mac)
	})
	eventually(t, "nothing is left to announce",
		func() bool { pending = w.a.announcer.announceDue(pending); return len(pending) == 0 })
}

// gVisor takes the addresses of its sandbox over, and answers for them by the interface's own link-layer address. It
// may do that before the agent has seen one of them there.
func TestTheAddressOfASandboxedRuntimeIsAnnounced(t *testing.T) {
	w := newWorld(t)
	pod, peer := w.pair()
	remember(t, peer, oldMAC, netlink.NUD_STALE)
	var mac net.HardwareAddr
	nodetest.In(t, pod, func() error {
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			mac = link.Attrs().HardwareAddr
		}
		return err
	})
	now := time.Now()
	p := &announcement{event: restoredEvent(pod), wait: firstRetry, due: now, giveUp: now.Add(configureTime)}
	pending := w.a.announcer.announceDue([]*announcement{p})
	if len(pending) != 1 || p.made {
		t.Fatal("it is taken for configured")
	}
	eventually(t, "the peer knows", func() bool {
		pending = w.a.announcer.announceDue(pending)
		return bytes.Equal(remembered(t, peer, podAddrs[0]), mac) && bytes.Equal(remembered(t, peer, podAddrs[1]), mac)
	})
	p.due, p.giveUp = now, now
	pending = w.a.announcer.announceDue(pending)
	if n := testutil.ToFloat64(w.a.metrics.peerErrors); len(pending) != 0 || n != 0 {
		t.Errorf("pending %v, %v errors", pending, n)
	}

	// The interface itself may be gone.
	nodetest.In(t, pod, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	})
	p = &announcement{event: restoredEvent(pod), due: now, giveUp: now}
	if later := w.a.announcer.announceDue([]*announcement{p}); len(later) != 0 ||
		testutil.ToFloat64(w.a.metrics.peerErrors) != 0 {
		t.Errorf("still pending: %v", later)
	}
}

func TestAPodThatNeverGetsItsAddressIsGivenUp(t *testing.T) {
	w := newWorld(t)
	pod, _ := w.pair()
	nodetest.Configure(t, pod, netip.MustParseAddr("192.0.2.99"))
	now := time.Now()
	p := &announcement{event: restoredEvent(pod), due: now, giveUp: now.Add(-time.Second)}
	if later := w.a.announcer.announceDue([]*announcement{p}); len(later) != 0 {
		t.Errorf("still pending: %v", later)
	}
	if n := testutil.ToFloat64(w.a.metrics.peerErrors); n != 1 {
		t.Errorf("counted %v", n)
	}
}

func TestTheNodeForgetsTheOldPodsNeighbourEntriesOnly(t *testing.T) {
	w := newWorld(t)
	_, node := w.pair()
	newMAC := net.HardwareAddr{0x02, 0, 0, 0, 0, 0x01}
	forget := func() {
		nodetest.In(t, node, func() error {
			return hostnet.ForgetNeighbours(map[netip.Addr]net.HardwareAddr{podAddrs[0]: newMAC, podAddrs[1]: newMAC})
		})
	}
	for _, c := range []struct {
		mac   net.HardwareAddr
		state int
		stays bool
	}{
		{oldMAC, netlink.NUD_STALE, false},
		{newMAC, netlink.NUD_STALE, true},
		{oldMAC, netlink.NUD_PERMANENT, true},
	} {
		remember(t, node, c.mac, c.state)
		forget()
		for _, a := range podAddrs {
			if there := remembered(t, node, a) != nil; there != c.stays {
				t.Errorf("%s with %s in state %d stays: %t", a, c.mac, c.state, there)
			}
		}
	}
}

func TestTrackedConnectionsOfARestoredAddressAreFlushedAndNoOthers(t *testing.T) {
	w := newWorld(t)
	flow := func(src, dst string) *netlink.ConntrackFlow {
		a, b := net.ParseIP(src), net.ParseIP(dst)
		if a.To4() != nil {
			a, b = a.To4(), b.To4()
		}
		return &netlink.ConntrackFlow{
			FamilyType: uint8(netlink.FAMILY_V4),
			Forward:    netlink.IPTuple{SrcIP: a, DstIP: b, SrcPort: 4000, DstPort: 80, Protocol: unix.IPPROTO_UDP},
			Reverse:    netlink.IPTuple{SrcIP: b, DstIP: a, SrcPort: 80, DstPort: 4000, Protocol: unix.IPPROTO_UDP},
			TimeOut:    600,
		}
	}
	nodetest.In(t, w.netns("node"), func() error {
		families := map[netlink.InetFamily][]*netlink.ConntrackFlow{
			unix.AF_INET:  {flow("192.0.2.5", "192.0.2.9"), flow("192.0.2.8", "192.0.2.5"), flow("192.0.2.8", "192.0.2.9")},
			unix.AF_INET6: {flow("2001:db8::5", "2001:db8::9"), flow("2001:db8::8", "2001:db8::9")},
		}
		for family, flows := range families {
			for _, f := range flows {
				f.FamilyType = uint8(family)
				if err := netlink.ConntrackCreate(netlink.ConntrackTable, family, f); err != nil {
					return err
				}
			}
		}
		e := restoredEvent("")
		e.Time = w.clock.Wall()
		w.a.announcer.forgetConnections([]ledger.Event{e})
		if n := testutil.ToFloat64(w.a.metrics.peerErrors); n != 0 {
			t.Errorf("%v errors", n)
		}
		for family := range families {
			left, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return err
			}
			if len(left) != 1 {
				t.Errorf("left: %v", left)
			}
		}
		return nil
	})
}

func TestALateReportFlushesNothingOfTheNewPod(t *testing.T) {
	w := newWorld(t)
	e := restoredEvent("")
	e.Time = w.clock.Wall()
	w.clock.Pass(stale + 1)
	nodetest.In(t, w.netns("node"), func() error {
		a, b := net.IP(podAddrs[0].AsSlice()), net.ParseIP("192.0.2.9").To4()
		err := netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, &netlink.ConntrackFlow{
			FamilyType: unix.AF_INET,
			Forward:    netlink.IPTuple{SrcIP: a, DstIP: b, SrcPort: 4000, DstPort: 80, Protocol: unix.IPPROTO_UDP},
			Reverse:    netlink.IPTuple{SrcIP: b, DstIP: a, SrcPort: 80, DstPort: 4000, Protocol: unix.IPPROTO_UDP},
			TimeOut:    600,
		})
		if err != nil {
			return err
		}
		w.a.announcer.forgetConnections([]ledger.Event{e})
		left, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		if len(left) != 1 {
			t.Errorf("left: %v", left)
		}
		return err
	})
}
