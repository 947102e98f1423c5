package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The protocols of the routes to addresses of routed pools, by which each side knows its own (rtnetlink(7),
// rtm_protocol).
const (
	// ProtocolPod is for routes on the node that has the pod, to its bridge. The CNI plugin adds them; DEL removes them.
	ProtocolPod = 84
	// ProtocolAgent is for routes on any other node, to the node that has the pod. The agent adds and removes them.
	ProtocolAgent = 85
)

// Serve makes addresses of pods reachable behind a bridge of the caller's namespace: what the node knows of their last
// owner there goes, and each gets a route, in place of one to another node. To repeat it does nothing more.
func Serve(bridge string, addrs []netip.Addr) error {
	c, index, err := dialOf(bridge)
	if err != nil {
		return err
	}
	defer c.close()
	for _, a := range addrs {
		for _, flags := range []uint8{0, unix.NTF_PROXY} {
			if err := c.forget(index, a, flags); err != nil {
				return fmt.Errorf("deleting the neighbour %s on %s: %w", a, bridge, err)
			}
		}
		if err := c.add(index, a, ProtocolPod); err != nil {
			return fmt.Errorf("adding the route to %s on %s: %w", a, bridge, err)
		}
	}
	return nil
}

// Forget removes what the caller's namespace knows of the last owner of addresses behind a bridge: for 30 to 70 s it
// would send to the old one's link-layer address. Without the bridge, or an entry, there is nothing to do.
func Forget(bridge string, addrs []netip.Addr) error {
	c, index, err := dialOf(bridge)
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.close()
	for _, a := range addrs {
		if err := c.forget(index, a, 0); err != nil {
			return fmt.Errorf("deleting the neighbour %s on %s: %w", a, bridge, err)
		}
	}
	return nil
}

// Unserve removes the routes of [Serve], and no others: not that of another device, nor the agent's. What is gone
// already is no error.
func Unserve(bridge string, addrs []netip.Addr) error {
	c, index, err := dialOf(bridge)
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.close()
	return c.removeAll(index, addrs, ProtocolPod)
}

// Yield removes all routes to addresses that the plugin or the agent has added, on any device: ptp adds its own, and
// fails if there is one.
func Yield(addrs []netip.Addr) error {
	c, err := dial()
	if err != nil {
		return err
	}
	defer c.close()
	return errors.Join(c.removeAll(0, addrs, ProtocolPod), c.removeAll(0, addrs, ProtocolAgent))
}

// Served reports whether the route of [Serve] to an address is there.
func Served(bridge string, a netip.Addr) (bool, error) {
	c, index, err := dialOf(bridge)
	if errors.Is(err, unix.ENODEV) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer c.close()
	body := route(a, 0, 0, 0)
	binary.NativeEndian.PutUint32(body[8:], unix.RTM_F_FIB_MATCH)
	reply, err := c.ask(unix.RTM_GETROUTE, 0, append(body, attr(unix.RTA_DST, a.AsSlice())...))
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return false, nil
	}
	if err != nil || len(reply) < unix.SizeofRtMsg {
		return false, err
	}
	if int(reply[1]) != a.BitLen() || reply[5] != ProtocolPod {
		return false, nil
	}
	for b := reply[unix.SizeofRtMsg:]; len(b) >= 4; {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			break
		}
		if binary.NativeEndian.Uint16(b[2:]) == unix.RTA_OIF && n == 8 {
			return int32(binary.NativeEndian.Uint32(b[4:])) == index, nil
		}
		b = b[min(len(b), (n+3)&^3):]
	}
	return false, nil
}

// Local reports whether an address is one of the caller's namespace itself.
func Local(a netip.Addr) (bool, error) {
	c, err := dial()
	if err != nil {
		return false, err
	}
	defer c.close()
	reply, err := c.ask(unix.RTM_GETROUTE, 0, append(route(a, 0, 0, 0), attr(unix.RTA_DST, a.AsSlice())...))
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES),
		errors.Is(err, unix.EINVAL): // no route, or a route that says unreachable, prohibit or blackhole
		return false, nil
	case err != nil:
		return false, fmt.Errorf("the route to %s: %w", a, err)
	case len(reply) < unix.SizeofRtMsg:
		return false, fmt.Errorf("the route to %s: unexpected response of %d bytes", a, len(reply))
	}
	return reply[7] == unix.RTN_LOCAL, nil
}

// Reach sets up an interface of another namespace, which will get addresses, and makes their gateways reachable on it,
// which are in none of its subnets. For an IPv4 address the kernel adds broadcast routes to the first and the last one
// of its subnet, which may be other pods': those by the gateway are there before, and so win.
//
// It is for a process of one command: a thread that cannot go back from the namespace stays the caller's.
func Reach(netns, ifname string, addrs []netip.Prefix, gateways []netip.Addr) error {
	enable := ""
	if slices.ContainsFunc(gateways, netip.Addr.Is6) { // as the main plugin will, later
		enable = "/proc/sys/net/ipv6/conf/" + ifname + "/disable_ipv6"
	}
	c, err := dialIn(netns, enable)
	if err != nil {
		return err
	}
	defer c.close()
	index, err := c.index(ifname)
	if err != nil {
		return err
	}
	if err := setUp(c.fd, ifname, true); err != nil {
		return err
	}
	for i, gw := range gateways {
		if err := c.add(index, gw, unix.RTPROT_BOOT); err != nil {
			return fmt.Errorf("adding the route to the gateway %s on %s: %w", gw, ifname, err)
		}
		for _, a := range edges(addrs[i]) {
			if err := c.addLocal(index, a, gw); err != nil {
				return fmt.Errorf("adding the route to %s via %s on %s: %w", a, gw, ifname, err)
			}
		}
	}
	return nil
}

// edges returns the first and the last address of an address's IPv4 subnet, but for the address itself. Subnets of one
// or two addresses have no broadcast address.
func edges(p netip.Prefix) []netip.Addr {
	if !p.Addr().Is4() || p.Bits() > 30 {
		return nil
	}
	first := p.Masked().Addr()
	b := first.As4()
	n := binary.BigEndian.Uint32(b[:]) | (1<<(32-p.Bits()) - 1)
	binary.BigEndian.PutUint32(b[:], n)
	return slices.DeleteFunc([]netip.Addr{first, netip.AddrFrom4(b)}, func(a netip.Addr) bool { return a == p.Addr() })
}

// conn is a socket of rtnetlink. The library for it takes longer to start than all that the plugin does.
type conn struct{ fd int }

func dial() (conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return conn{-1}, fmt.Errorf("netlink socket: %w", err)
	}
	return conn{fd}, nil
}

// dialOf returns a socket, and the number of a link of the caller's namespace: ENODEV if there is none of that name.
func dialOf(link string) (c conn, index int32, err error) {
	if c, err = dial(); err != nil {
		return c, 0, err
	}
	if index, err = c.index(link); err != nil {
		c.close()
	}
	return c, index, err
}

// dialIn returns a socket in another namespace, in which it also writes 0 to a file unless that is missing or "".
// It goes there on the caller's thread and by bare system calls: goroutines that wait for each other's threads, and the
// runtime's poller, take longer than the rest.
func dialIn(netns, zero string) (c conn, err error) {
	open := func(path string) (int, error) {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fd, fmt.Errorf("opening %s: %w", path, err)
		}
		return fd, nil
	}
	there, err := open(netns)
	if err != nil {
		return conn{-1}, err
	}
	defer unix.Close(there)
	runtime.LockOSThread()
	home, err := open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return conn{-1}, err
	}
	defer unix.Close(home)
	if err := unix.Setns(there, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return conn{-1}, fmt.Errorf("entering the network namespace %s: %w", netns, err)
	}
	if zero != "" {
		err = writeZero(zero)
	}
	if err == nil {
		c, err = dial()
	}
	if back := unix.Setns(home, unix.CLONE_NEWNET); back != nil {
		if err == nil {
			c.close()
		}
		return conn{-1}, fmt.Errorf("leaving the network namespace %s: %w", netns, back)
	}
	runtime.UnlockOSThread()
	return c, err
}

// writeZero sets a sysctl that may be missing, if it is not 0 already: to write it takes the lock of all networking.
func writeZero(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening %s: %w", path, err)
	}
	defer unix.Close(fd)
	b := make([]byte, 8)
	if n, err := unix.Read(fd, b); err == nil && strings.TrimSpace(string(b[:n])) == "0" {
		return nil
	}
	if _, err := unix.Pwrite(fd, []byte("0"), 0); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func (c conn) close() { _ = unix.Close(c.fd) }

// ask sends a request and returns the body of the answer, nil if it is a bare acknowledgement.
func (c conn) ask(kind uint16, flags uint16, body []byte) ([]byte, error) {
	m := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(body))
	binary.NativeEndian.PutUint32(m, uint32(unix.NLMSG_HDRLEN+len(body)))
	binary.NativeEndian.PutUint16(m[4:], kind)
	if kind != unix.RTM_GETROUTE {
		flags |= unix.NLM_F_ACK
	}
	binary.NativeEndian.PutUint16(m[6:], unix.NLM_F_REQUEST|flags)
	if err := unix.Sendto(c.fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	b := make([]byte, 8192)
	n, _, err := unix.Recvfrom(c.fd, b, 0)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(c.fd, b, 0)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("netlink: %w", err)
	case n < unix.NLMSG_HDRLEN+4:
		return nil, fmt.Errorf("netlink: unexpected response of %d bytes", n)
	case binary.NativeEndian.Uint16(b[4:]) != unix.NLMSG_ERROR:
		return b[unix.NLMSG_HDRLEN:n], nil
	}
	if code := int32(binary.NativeEndian.Uint32(b[unix.NLMSG_HDRLEN:])); code != 0 {
		return nil, unix.Errno(-code)
	}
	return nil, nil
}

// index returns the number of a link: requests of netdevice(7) are for any socket.
func (c conn) index(name string) (int32, error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return 0, fmt.Errorf("interface %q: %w", name, err)
	}
	if err := unix.IoctlIfreq(c.fd, unix.SIOCGIFINDEX, ifr); err != nil {
		return 0, fmt.Errorf("interface %s: %w", name, err)
	}
	return int32(ifr.Uint32()), nil
}

// route is the head of a message about the route to one address in the main table.
func route(a netip.Addr, protocol, scope, kind uint8) []byte {
	family := uint8(unix.AF_INET)
	if a.Is6() {
		family = unix.AF_INET6
	}
	return []byte{family, uint8(a.BitLen()), 0, 0, unix.RT_TABLE_MAIN, protocol, scope, kind, 0, 0, 0, 0}
}

// attr is an attribute of four or sixteen bytes.
func attr(kind uint16, value []byte) []byte {
	b := make([]byte, 4, 4+len(value))
	binary.NativeEndian.PutUint16(b, uint16(4+len(value)))
	binary.NativeEndian.PutUint16(b[2:], kind)
	return append(b, value...)
}

func number(n int32) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(n)) }

// add adds or replaces the route to an address on a link.
func (c conn) add(index int32, a netip.Addr, protocol uint8) error {
	body := append(route(a, protocol, unix.RT_SCOPE_LINK, unix.RTN_UNICAST), attr(unix.RTA_DST, a.AsSlice())...)
	body = append(body, attr(unix.RTA_OIF, number(index))...)
	_, err := c.ask(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, body)
	return err
}

// addLocal adds the route to an address by a gateway to the table of local and broadcast addresses, which all look at
// before the others.
func (c conn) addLocal(index int32, a, gateway netip.Addr) error {
	body := route(a, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST)
	body[4] = unix.RT_TABLE_LOCAL
	body = append(body, attr(unix.RTA_DST, a.AsSlice())...)
	body = append(body, attr(unix.RTA_OIF, number(index))...)
	body = append(body, attr(unix.RTA_GATEWAY, gateway.AsSlice())...)
	_, err := c.ask(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, body)
	return err
}

// removeAll removes the routes to addresses by their protocol; index 0 is every device.
func (c conn) removeAll(index int32, addrs []netip.Addr, protocol uint8) error {
	var errs []error
	for _, a := range addrs {
		body := append(route(a, protocol, unix.RT_SCOPE_NOWHERE, 0), attr(unix.RTA_DST, a.AsSlice())...)
		if index != 0 {
			body = append(body, attr(unix.RTA_OIF, number(index))...)
		}
		if _, err := c.ask(unix.RTM_DELROUTE, 0, body); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing the route to %s: %w", a, err))
		}
	}
	return errors.Join(errs...)
}

// forget removes a neighbour, or with NTF_PROXY the promise to answer for it.
func (c conn) forget(index int32, a netip.Addr, flags uint8) error {
	b := make([]byte, 12) // struct ndmsg
	b[0] = route(a, 0, 0, 0)[0]
	copy(b[4:], number(index))
	b[10] = flags
	_, err := c.ask(unix.RTM_DELNEIGH, 0, append(b, attr(unix.NDA_DST, a.AsSlice())...))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
