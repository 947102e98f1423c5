package route

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// receiveBuffer holds what the kernel says while a device with 10,000 routes goes.
const receiveBuffer = 4 << 20

// kernel is that of the node.
type kernel struct {
	ns     *os.File
	handle *netlink.Handle
}

func open(o Options) (*kernel, error) {
	path := o.Netns
	if path == "" {
		path = "/proc/self/ns/net"
	}
	ns, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("the node's network namespace: %w", err)
	}
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("the node's network namespace: %w", err)
	}
	return &kernel{ns: ns, handle: h}, nil
}

func (k *kernel) close() {
	k.handle.Close()
	k.ns.Close()
}

// subscribe returns what changes until ctx is done. After failed, changes may have been lost.
func (k *kernel) subscribe(
	ctx context.Context, failed func(error),
) (<-chan netlink.RouteUpdate, <-chan netlink.LinkUpdate, error) {
	at := netns.NsHandle(k.ns.Fd())
	routes, links := make(chan netlink.RouteUpdate, 256), make(chan netlink.LinkUpdate, 256)
	err := netlink.RouteSubscribeWithOptions(routes, ctx.Done(), netlink.RouteSubscribeOptions{
		Namespace: &at, ErrorCallback: failed, ReceiveBufferSize: receiveBuffer, ReceiveBufferForceSize: true,
	})
	if err == nil {
		err = netlink.LinkSubscribeWithOptions(links, ctx.Done(), netlink.LinkSubscribeOptions{
			Namespace: &at, ErrorCallback: failed,
		})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("subscribing to changes of routes and links: %w", err)
	}
	return routes, links, nil
}

// list calls each for the routes of the main table that pods' addresses can have, and for the node's own that packets
// can take.
func (k *kernel) list(each func(netlink.Route)) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		err := k.handle.RouteListFilteredIter(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE,
			func(r netlink.Route) bool {
				p, ok := prefixOf(r.Dst)
				ours := r.Protocol == ProtocolPod || r.Protocol == ProtocolAgent
				if ok && (ours && p.IsSingleIP() ||
					!ours && r.Type == unix.RTN_UNICAST && p.Bits() > 0 && !p.IsSingleIP()) {
					each(r)
				}
				return true
			})
		if err != nil {
			return fmt.Errorf("listing routes: %w", err)
		}
	}
	return nil
}

func (k *kernel) add(r netlink.Route) error     { return k.handle.RouteAdd(&r) }
func (k *kernel) replace(r netlink.Route) error { return k.handle.RouteReplace(&r) }

// remove removes a route of this very protocol; it may have gone.
func (k *kernel) remove(r netlink.Route) error {
	dst, _ := prefixOf(r.Dst)
	err := k.handle.RouteDel(&netlink.Route{
		Dst: hostNet(dst.Addr()), Protocol: r.Protocol, Type: r.Type, Table: r.Table, Priority: r.Priority,
		Scope: netlink.SCOPE_NOWHERE,
	})
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// bridge returns the index of the bridge of a name, 0 if there is none that is up.
func (k *kernel) bridge(name string) (int, error) {
	l, err := k.handle.LinkByName(name)
	var none netlink.LinkNotFoundError
	switch {
	case errors.As(err, &none):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("reading bridge %s: %w", name, err)
	case l.Type() != "bridge" || l.Attrs().Flags&net.FlagUp == 0:
		return 0, nil
	}
	return l.Attrs().Index, nil
}
