package hostnet

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	onlink "github.com/stayput/stayput/pkg/link"
)

// Announce sends a gratuitous ARP or an unsolicited neighbour advertisement for each address, from the interface
// ifname of the namespace at path, and returns the link-layer address that it announced. It is an error as long as
// the main plugin has not configured the addresses, and fs.ErrNotExist once the namespace has gone. A link without
// Ethernet addresses has nothing to announce: nil.
//
// If the namespace has no addresses, it announces them too, and returns ErrNoAddresses as well: a sandboxed runtime
// that has taken them answers for them by the interface's link-layer address. If it has taken the interface, too,
// nothing can be announced.
func Announce(path, ifname string, addrs []netip.Addr) (net.HardwareAddr, error) {
	ns, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	h, err := netlinkIn(ns)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	link, err := h.LinkByName(ifname)
	if none := (netlink.LinkNotFoundError{}); errors.As(err, &none) {
		return nil, fmt.Errorf("%s is gone: %w", ifname, ErrNoAddresses)
	} else if err != nil {
		return nil, err
	}
	not, taken := missing(ns, addrs, func(there configured) bool {
		return there.link == link.Attrs().Index && there.flags&unix.IFA_F_TENTATIVE == 0
	})
	switch {
	case errors.Is(taken, ErrNoAddresses):
	case taken != nil:
		return nil, taken
	case len(not) > 0:
		return nil, fmt.Errorf("%s is not configured on %s yet", not[0], ifname)
	}
	hw := link.Attrs().HardwareAddr
	if link.Attrs().EncapType != "ether" || len(hw) != 6 {
		return nil, taken
	}
	var fd int
	err = onlink.In(ns, func() error {
		// Protocol 0: it only sends.
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	defer unix.Close(fd)
	for _, addr := range addrs {
		frame := onlink.Announcement(onlink.MAC(hw), addr)
		if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index}); err != nil {
			return nil, fmt.Errorf("announcing %s: %w", addr, err)
		}
	}
	return hw, taken
}

// ForgetNeighbours deletes the node's own entries that name another link-layer address than the pod's. What an
// administrator made permanent stays.
func ForgetNeighbours(mac map[netip.Addr]net.HardwareAddr) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	entries, err := h.NeighList(0, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("listing neighbours: %w", err)
	}
	var errs []error
	for _, n := range entries {
		ip, _ := netip.AddrFromSlice(n.IP)
		hw, ok := mac[ip.Unmap()]
		if !ok || bytes.Equal(hw, n.HardwareAddr) || n.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 {
			continue
		}
		if err := h.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("neighbour %s: %w", n.IP, err))
		}
	}
	return errors.Join(errs...)
}
