// Package link is what machines on an Ethernet link say to each other of an address: who has it, and who has it now;
// and the routes to addresses that are on no link. The CNI plugin links it.
package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// ProbeTime is how long a host that has an address may take to answer. In the middle of it the question is sent again:
// a link that has just come up may have lost it.
const ProbeTime = 100 * time.Millisecond

// Conflict is an address that another machine on the link has.
type Conflict struct {
	Addr netip.Addr
	MAC  MAC
}

// Probe asks on the link of an interface which hosts have these addresses, and returns those that a host claims within
// [ProbeTime]. No neighbour's table changes. An interface that is down is set up for that and down again afterwards, so
// that the kernel announces what it is given. asked is false on a link without neighbours, or if there is no such
// interface. After an error nothing is known.
func Probe(netns, ifname string, addrs []netip.Addr) (found []Conflict, asked bool, err error) {
	ns, err := os.Open(netns)
	if err != nil {
		return nil, false, err
	}
	defer ns.Close()
	fd := -1
	err = In(ns, func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			err = fmt.Errorf("packet socket: %w", err)
		}
		return err
	})
	if err != nil {
		return nil, false, err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq(ifname)
	if err != nil {
		return nil, false, fmt.Errorf("interface %q: %w", ifname, err)
	}
	switch failed := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); {
	case errors.Is(failed, unix.ENODEV):
		return nil, false, nil
	case failed != nil:
		return nil, false, fmt.Errorf("flags of %s: %w", ifname, failed)
	case ifr.Uint16()&(unix.IFF_NOARP|unix.IFF_LOOPBACK|unix.IFF_POINTOPOINT) != 0:
		return nil, false, nil
	case ifr.Uint16()&unix.IFF_UP == 0:
		if err := setUp(fd, ifname, true); err != nil {
			return nil, false, err
		}
		defer func() { err = errors.Join(err, setUp(fd, ifname, false)) }()
	}
	return probe(fd, ifname, addrs)
}

// mostQueued is more frames than a socket keeps: what comes behind them came after the time.
const mostQueued = 4096

// probe is Probe on an interface that is up.
func probe(fd int, ifname string, addrs []netip.Addr) (found []Conflict, asked bool, err error) {
	ifr, err := unix.NewIfreq(ifname)
	if err != nil {
		return nil, false, err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, ifr); err != nil {
		return nil, false, fmt.Errorf("index of %s: %w", ifname, err)
	}
	index := int(ifr.Uint32())
	own, ok, err := listen(fd, index)
	if err != nil || !ok {
		return nil, false, err
	}
	waits := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	frame := make([]byte, 128)
	var end time.Time
	for times, late := 0, 0; len(found) < len(addrs); {
		// What has come is read before the time is looked at: on a busy machine this may not have run meanwhile.
		left := time.Until(end)
		if left > 0 || late < mostQueued {
			n, err := unix.Read(fd, frame)
			for _, a := range addrs {
				known := slices.ContainsFunc(found, func(c Conflict) bool { return c.Addr == a })
				if mac, ok := has(frame[:max(n, 0)], own, a); ok && !known {
					found = append(found, Conflict{a, mac})
				}
			}
			switch {
			case err == nil:
				if left <= 0 {
					late++
				}
				continue
			case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
				return nil, false, fmt.Errorf("listening on %s: %w", ifname, err)
			}
		}
		if left <= 0 && times == 2 {
			break
		}
		if left <= 0 {
			for _, a := range addrs {
				if err := unix.Sendto(fd, question(own, a), 0, &unix.SockaddrLinklayer{Ifindex: index}); err != nil {
					return nil, false, fmt.Errorf("probing for %s on %s: %w", a, ifname, err)
				}
			}
			times, late, left = times+1, 0, ProbeTime/2
			end = time.Now().Add(left)
		}
		if _, err := unix.Poll(waits, int(left/time.Millisecond)+1); err != nil && !errors.Is(err, unix.EINTR) {
			return nil, false, fmt.Errorf("waiting for replies on %s: %w", ifname, err)
		}
	}
	return found, true, nil
}

// listen makes a socket receive what is sent on an interface, and returns the interface's own address. ok is false if
// it has none of Ethernet. It is one socket for all: to close one takes as long as a tenth of a probe.
func listen(fd, index int) (own MAC, ok bool, err error) {
	// An advertisement goes to all nodes. Whether IPv6 is on or not, this is one.
	mac := groupMAC(allNodes)
	m := unix.PacketMreq{Ifindex: int32(index), Type: unix.PACKET_MR_MULTICAST, Alen: uint16(len(mac))}
	copy(m.Address[:], mac[:])
	if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &m); err != nil {
		return own, false, fmt.Errorf("joining %s: %w", allNodes, err)
	}
	err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: index})
	if err != nil {
		return own, false, fmt.Errorf("listening: %w", err)
	}
	is, err := unix.Getsockname(fd)
	if err != nil {
		return own, false, err
	}
	l, ok := is.(*unix.SockaddrLinklayer)
	if !ok || l.Hatype != unix.ARPHRD_ETHER || int(l.Halen) != len(own) {
		return own, false, nil
	}
	return MAC(l.Addr[:len(own)]), true, nil
}

func networkOrder(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

// setUp sets an interface of the socket's namespace up or down.
func setUp(fd int, ifname string, up bool) error {
	ifr, err := unix.NewIfreq(ifname)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return fmt.Errorf("flags of %s: %w", ifname, err)
	}
	flags := ifr.Uint16() &^ unix.IFF_UP
	if up {
		flags |= unix.IFF_UP
	}
	ifr.SetUint16(flags)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("setting %s up or down: %w", ifname, err)
	}
	return nil
}

// In runs f on a thread in the network namespace ns. Sockets that f makes stay in it. A thread that cannot go back
// ends with its goroutine: no other work ever runs in the wrong namespace.
func In(ns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("entering the network namespace %s: %w", ns.Name(), err)
			return
		}
		err = f()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}
