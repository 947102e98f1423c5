// Package hostnet is what a node's network looks like beneath the runtime: its network namespaces and the addresses
// configured in them, the neighbours that have to learn of an address's new place, and the connections that the
// kernel still tracks for an old one.
//
// It judges nothing: whether an address may be freed is for the caller, who gets a whole View or an error.
package hostnet

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	onlink "github.com/stayput/stayput/pkg/link"
)

// netlinkIn opens a route netlink socket in a namespace.
func netlinkIn(ns *os.File) (h *netlink.Handle, err error) {
	err = onlink.In(ns, func() error {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	return h, err
}

// openNamespace opens the namespace at path, nil if there is none, or another file. What a path of /proc leads to may
// change at any time, and is chosen by the process that it is about: a FIFO would be waited for, and another file asked
// what only namespaces answer. So what is there is held without being opened (O_PATH) until it is known to be a
// namespace, without asking the file system for that, which may be a process of a pod.
func openNamespace(path string) (*os.File, error) {
	var own, is unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, "/proc/self/ns/net", 0, unix.STATX_INO, &own); err != nil {
		return nil, fmt.Errorf("statx of the own network namespace: %w", err)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if isNoProcess(err) {
		return nil, nil
	} else if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_INO, &is)
	if err != nil {
		return nil, &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	if is.Dev_major != own.Dev_major || is.Dev_minor != own.Dev_minor {
		return nil, nil
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(ns), path), nil
}

// Open opens the network namespace at path. Any other file is an error: setns would say less about it.
func Open(path string) (*os.File, error) {
	f, err := openNamespace(path)
	if err == nil && f == nil {
		if _, err = os.Lstat(path); err == nil {
			err = fmt.Errorf("%s is not a network namespace", path)
		}
	}
	return f, err
}

// configured is an address as an interface has it.
type configured struct {
	addr  netip.Addr
	link  int // the index of the interface
	flags uint32
}

// eachAddr calls f for every address that is configured in a namespace, for some of them more than once: it asks again
// if the answer was torn, because addresses changed meanwhile. It keeps none of them: how many there are is up to those
// who are in the namespace. After an error not all were seen.
func eachAddr(ns *os.File, f func(configured)) error {
	var s *nl.NetlinkSocket // only it is made by a thread that is in the namespace
	err := onlink.In(ns, func() (err error) {
		s, err = nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return fmt.Errorf("netlink socket: %w", err)
	}
	defer s.Close()
	if err := s.SetReceiveTimeout(&netlinkTimeout); err != nil {
		return fmt.Errorf("netlink socket: %w", err)
	}
	for range 5 {
		req := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfAddrmsg(unix.AF_UNSPEC))
		req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWADDR, func(msg []byte) bool {
			if a, ok := parseConfigured(msg); ok {
				f(a)
			}
			return true
		})
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("listing addresses: %w", err)
}

// netlinkTimeout is how long the kernel may take for a part of an answer.
var netlinkTimeout = unix.Timeval{Sec: 10}

// parseConfigured reads a message about an address: ifaddrmsg, and its attributes. IPv4 has the address as IFA_LOCAL,
// beside that of the peer.
func parseConfigured(msg []byte) (a configured, ok bool) {
	if len(msg) < unix.SizeofIfAddrmsg {
		return a, false
	}
	head, rest := nl.DeserializeIfAddrmsg(msg), msg[unix.SizeofIfAddrmsg:]
	a.link, a.flags = int(head.Index), uint32(head.Flags)
	for _, flags := range attrs(rest, unix.IFA_FLAGS) {
		if len(flags) == 4 {
			a.flags = nl.NativeEndian().Uint32(flags)
		}
	}
	for _, kind := range []uint16{unix.IFA_LOCAL, unix.IFA_ADDRESS} {
		for _, value := range attrs(rest, kind) {
			if a.addr, ok = netip.AddrFromSlice(value); ok {
				a.addr = a.addr.Unmap()
				return a, true
			}
		}
	}
	return a, false
}

// ErrNoAddresses means that a namespace has no address but the loopback's and link-local ones. So it is before the main
// plugin has configured it, and once a sandboxed runtime such as gVisor has started: that takes over the interfaces, or
// their addresses, and answers for them itself.
var ErrNoAddresses = errors.New("the network namespace has no addresses")

// missing returns those of addrs that are not configured in a namespace. The error may be ErrNoAddresses. Only what
// counts does, if counts is not nil.
func missing(ns *os.File, addrs []netip.Addr, counts func(configured) bool) ([]netip.Addr, error) {
	not, none := slices.Clone(addrs), true
	err := eachAddr(ns, func(there configured) {
		none = none && (there.addr.IsLoopback() || there.addr.IsLinkLocalUnicast())
		if counts == nil || counts(there) {
			not = slices.DeleteFunc(not, func(a netip.Addr) bool { return a == there.addr })
		}
	})
	if err == nil && none {
		err = ErrNoAddresses
	}
	return not, err
}

// Missing returns those of addrs that are not configured in the namespace at path. The error may be ErrNoAddresses.
func Missing(path string, addrs []netip.Addr) ([]netip.Addr, error) {
	ns, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return missing(ns, addrs, nil)
}

// Down takes every interface of a recorded namespace down, but the loopback: nothing in it answers for an address any
// more. If it is no longer at its path, Down returns fs.ErrNotExist: what is there now is another namespace. A
// namespace that was recorded without an inode is identified by its path alone. The host's own namespace is an error.
func Down(is ledger.Netns) error {
	id, there, err := at(is.Path, is)
	if err != nil {
		return err
	}
	gone := fmt.Errorf("network namespace %s: %w", is.Path, fs.ErrNotExist)
	if !there {
		return gone
	}
	ns, err := Open(is.Path)
	if err != nil {
		return err
	}
	defer ns.Close()
	var st, own unix.Stat_t
	if err := errors.Join(unix.Fstat(int(ns.Fd()), &st), unix.Stat("/proc/self/ns/net", &own)); err != nil {
		return fmt.Errorf("network namespace %s: %w", is.Path, err)
	}
	switch (nsID{st.Dev, st.Ino}) {
	case nsID{own.Dev, own.Ino}:
		return fmt.Errorf("network namespace %s is the host's", is.Path)
	case id:
	default:
		return gone
	}
	h, err := netlinkIn(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return fmt.Errorf("listing the interfaces of %s: %w", is.Path, err)
	}
	var errs []error
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 {
			if err := h.LinkSetDown(l); err != nil {
				errs = append(errs, fmt.Errorf("setting %s of %s down: %w", l.Attrs().Name, is.Path, err))
			}
		}
	}
	return errors.Join(errs...)
}
