package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Machine is a machine on the fabric that is none of the cluster's. It notes every ARP packet that it hears.
type Machine struct {
	ns     *os.File
	packet *os.File // the socket that hears them
	fd     int      // the same
	done   chan struct{}

	mu    sync.Mutex
	heard []ARP
}

// ARP is a packet of that protocol by which its sender says that it has an address.
type ARP struct {
	At   time.Time
	MAC  string
	Addr netip.Addr
}

// NewMachine plugs a machine with these addresses into the fabric. The caller must close it.
func (c *Cluster) NewMachine(name string, addrs ...netip.Prefix) (_ *Machine, err error) {
	m := &Machine{done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("plugging in %s: %w", name, err), m.Close())
		}
	}()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		m.ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	err = withNetlink(c.Control.Pid(), func(h *netlink.Handle) error {
		bridge, err := h.LinkByName(fabricBridge)
		if err != nil {
			return err
		}
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MasterIndex: bridge.Attrs().Index},
			PeerName: Uplink, PeerNamespace: netlink.NsFd(m.ns.Fd())}
		if err := h.LinkAdd(veth); err != nil {
			return err
		}
		return setUp(h, name)
	})
	if err != nil {
		return nil, err
	}
	err = m.link(func(h *netlink.Handle, _ netlink.Link) error { return setUp(h, Uplink) })
	if err == nil {
		err = m.SetAddrs(addrs...)
	}
	if err == nil {
		err = m.hear()
	}
	return m, err
}

// Close takes the machine away.
func (m *Machine) Close() error {
	close(m.done)
	if m.packet != nil {
		m.packet.Close()
	}
	if m.ns == nil {
		return nil
	}
	err := m.link(func(h *netlink.Handle, l netlink.Link) error { return h.LinkDel(l) })
	return errors.Join(err, m.ns.Close())
}

// link runs f with the machine's link to the fabric.
func (m *Machine) link(f func(*netlink.Handle, netlink.Link) error) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(m.ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(Uplink)
	if err != nil {
		return err
	}
	return f(h, l)
}

// MAC returns the machine's MAC address.
func (m *Machine) MAC() (mac string, err error) {
	err = m.link(func(_ *netlink.Handle, l netlink.Link) error {
		mac = l.Attrs().HardwareAddr.String()
		return nil
	})
	return mac, err
}

// SetAddrs gives the machine these addresses, and no others.
func (m *Machine) SetAddrs(addrs ...netip.Prefix) error {
	return m.link(func(h *netlink.Handle, l netlink.Link) error {
		had, err := h.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range had {
			if a.IP.IsLinkLocalUnicast() {
				continue
			}
			// The first address of a subnet takes the others with it.
			if gone := h.AddrDel(l, &a); !errors.Is(gone, unix.EADDRNOTAVAIL) {
				err = errors.Join(err, gone)
			}
		}
		for _, a := range addrs {
			err = errors.Join(err, h.AddrAdd(l, &netlink.Addr{IPNet: network(a), Flags: unix.IFA_F_NODAD}))
		}
		return err
	})
}

// SetRoute has the machine send what is for a subnet to this gateway.
func (m *Machine) SetRoute(to netip.Prefix, gateway netip.Addr) error {
	return m.link(func(h *netlink.Handle, l netlink.Link) error {
		return h.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: network(to), Gw: gateway.AsSlice()})
	})
}

// IgnoreRedirects has the machine go on sending to its gateways, whatever these say. A router does so, too.
func (m *Machine) IgnoreRedirects() error {
	return insideNetNS(m.netns(), func() error {
		for _, conf := range []string{"all", Uplink} {
			if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+conf+"/accept_redirects", []byte("0"), 0); err != nil {
				return err
			}
		}
		return nil
	})
}

// Neighbour returns the MAC address that the machine knows of an address, empty if there is none.
func (m *Machine) Neighbour(a netip.Addr) (mac string, err error) {
	err = m.link(func(h *netlink.Handle, l netlink.Link) error {
		all, err := h.NeighList(l.Attrs().Index, netlink.FAMILY_ALL)
		for _, n := range all {
			if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == a && n.HardwareAddr != nil {
				mac = n.HardwareAddr.String()
			}
		}
		return err
	})
	return mac, err
}

// netns is the path of the machine's network namespace.
func (m *Machine) netns() string { return fmt.Sprintf("/proc/self/fd/%d", m.ns.Fd()) }

// Get asks the server of a pod, as [Node.Get] does.
func (m *Machine) Get(ctx context.Context, a netip.Addr) (Answer, error) {
	return (&Node{}).get(ctx, m.netns(), a)
}

// Dial connects from the machine to an address.
func (m *Machine) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return dialIn(ctx, m.netns(), network, address)
}

// Listen listens on an address of the machine.
func (m *Machine) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return listenIn(ctx, m.netns(), network, address)
}

// Heard returns who has said since a time, by any ARP packet, that it has an address: in the order in which they did,
// and again if another one did in between.
func (m *Machine) Heard(a netip.Addr, since time.Time) (macs []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.heard {
		if p.Addr == a && !p.At.Before(since) && (len(macs) == 0 || macs[len(macs)-1] != p.MAC) {
			macs = append(macs, p.MAC)
		}
	}
	return macs
}

// askEvery is how often a machine asks who has an address.
const askEvery = 100 * time.Millisecond

// Asks has the machine ask on the link who has these addresses, over and over. No neighbour's table changes by it.
func (m *Machine) Asks(addrs ...netip.Addr) {
	go func() {
		tick := time.NewTicker(askEvery)
		defer tick.Stop()
		for {
			select {
			case <-m.done:
				return
			case <-tick.C:
			}
			for _, a := range addrs {
				_ = m.ask(a) // it may have been closed
			}
		}
	}()
}

func (m *Machine) ask(a netip.Addr) error {
	return m.link(func(_ *netlink.Handle, l netlink.Link) error {
		own, ip := l.Attrs().HardwareAddr, a.As4()
		f := slices.Concat(bytes.Repeat([]byte{0xff}, 6), own, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, own, make([]byte, 10),
			ip[:])
		return unix.Sendto(m.fd, f, 0, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index})
	})
}

// hear begins to note ARP packets.
func (m *Machine) hear() error {
	err := insideNetNS(m.netns(), func() (err error) {
		m.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return err
	}
	m.packet = os.NewFile(uintptr(m.fd), "packet socket")
	err = m.link(func(_ *netlink.Handle, l netlink.Link) error {
		protocol := binary.NativeEndian.Uint16([]byte{8, 6})
		return unix.Bind(m.fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: l.Attrs().Index})
	})
	if err != nil {
		return err
	}
	go func() {
		frame := make([]byte, 64)
		for {
			n, err := m.packet.Read(frame)
			if err != nil {
				return // closed
			}
			if n < 42 {
				continue
			}
			p := ARP{time.Now(), net.HardwareAddr(frame[22:28]).String(), netip.AddrFrom4([4]byte(frame[28:32]))}
			m.mu.Lock()
			m.heard = append(m.heard, p)
			m.mu.Unlock()
		}
	}()
	return nil
}
