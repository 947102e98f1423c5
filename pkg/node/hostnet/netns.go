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

// Open opens the network namespace at path. Any other file is an error: setns would say less about it.
func Open(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	var sf unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &sf); err != nil || sf.Type != unix.NSFS_MAGIC {
		f.Close()
		return nil, fmt.Errorf("%s is not a network namespace", path)
	}
	return f, nil
}

// addrsIn lists the addresses configured in a namespace. With an error it returns what was seen of them.
func addrsIn(ns *os.File) ([]netlink.Addr, error) {
	h, err := netlinkIn(ns)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	return allAddrs(h)
}

// allAddrs asks again if the answer was torn, because addresses changed meanwhile.
func allAddrs(h *netlink.Handle) (seen []netlink.Addr, err error) {
	for range 5 {
		addrs, terr := h.AddrList(nil, netlink.FAMILY_ALL)
		if terr == nil {
			return addrs, nil
		}
		seen, err = append(seen, addrs...), terr
	}
	return seen, fmt.Errorf("listing addresses: %w", err)
}

func addrOf(a netlink.Addr) netip.Addr {
	ip, _ := netip.AddrFromSlice(a.IP)
	return ip.Unmap()
}

// Missing returns those of addrs that are not configured in the namespace at path.
func Missing(path string, addrs []netip.Addr) ([]netip.Addr, error) {
	ns, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	there, err := addrsIn(ns)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool {
		return slices.ContainsFunc(there, func(t netlink.Addr) bool { return addrOf(t) == a })
	}), nil
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
