package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The fabric is a bridge in the network namespace of the control plane's machine. Every other machine of the cluster
// has one link to it. It has no link to the machine's own network, so packets cannot leave it.
//
//	172.30.0.1     the control plane, with the pods 10.244.0.0/24 behind it once it is a node
//	172.30.0.10+M  node M, with the pods 10.244.M.0/24 behind it
//	172.30.0.100+N controller N
//	10.96.0.1      the Service kubernetes, an address of the control plane: no kube-proxy is needed for it
const (
	fabricBridge = "fabric"
	fabricBits   = 24
	podBits      = 24
)

var (
	serverIP  = netip.MustParseAddr("172.30.0.1")
	serviceIP = netip.MustParseAddr("10.96.0.1")
)

func nodeIP(m int) netip.Addr       { return netip.AddrFrom4([4]byte{172, 30, 0, byte(10 + m)}) }
func controllerIP(n int) netip.Addr { return netip.AddrFrom4([4]byte{172, 30, 0, byte(100 + n)}) }
func podSubnet(m int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(m), 0}), podBits)
}

// hardwareAddr is the one of the machine with an address in the fabric: locally administered, and the same after every
// boot, as that of a machine is.
func hardwareAddr(ip netip.Addr) net.HardwareAddr {
	return append(net.HardwareAddr{0x02, 0}, ip.AsSlice()...)
}

func network(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// makeFabric makes the bridge in the control plane's machine, and the routes to the nodes' pods.
func makeFabric(pid, nodes int) error {
	// What crosses the fabric is none of the control plane's: its rules for its pods are not for it.
	err := inside(pid, unix.CLONE_NEWNET, func() error {
		return os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte("0"), 0)
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) { // the kernel may lack it
		return err
	}
	return withNetlink(pid, func(h *netlink.Handle) error {
		// A bridge without an address of its own takes the lowest of its ports': the API server would be somewhere else, to
		// the machines that know its address, as often as one of them is switched off or on.
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: fabricBridge, HardwareAddr: hardwareAddr(serverIP)}}
		if err := h.LinkAdd(bridge); err != nil {
			return fmt.Errorf("adding the fabric: %w", err)
		}
		for _, p := range []netip.Prefix{netip.PrefixFrom(serverIP, fabricBits), netip.PrefixFrom(serviceIP, 32)} {
			if err := h.AddrAdd(bridge, &netlink.Addr{IPNet: network(p)}); err != nil {
				return fmt.Errorf("adding %v to the fabric: %w", p, err)
			}
		}
		if err := h.LinkSetUp(bridge); err != nil {
			return err
		}
		return routePods(h, bridge, nodes, 0)
	})
}

// plug connects a machine, by its pid 1, to the fabric. port names the link's end at the fabric; own is the node's
// number, 0 for other machines.
func plug(fabric, pid int, port string, ip netip.Addr, nodes, own int) error {
	err := withNetlink(fabric, func(h *netlink.Handle) error {
		// The link of the machine's last boot may linger: the kernel removes network namespaces asynchronously.
		var missing netlink.LinkNotFoundError
		if old, err := h.LinkByName(port); err == nil {
			if err := h.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
				return err
			}
		} else if !errors.As(err, &missing) {
			return err
		}
		bridge, err := h.LinkByName(fabricBridge)
		if err != nil {
			return err
		}
		veth := &netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: port, MasterIndex: bridge.Attrs().Index},
			PeerName:  Uplink, PeerNamespace: netlink.NsPid(pid), PeerHardwareAddr: hardwareAddr(ip),
		}
		if err := h.LinkAdd(veth); err != nil {
			return fmt.Errorf("plugging %s into the fabric: %w", port, err)
		}
		return setUp(h, port)
	})
	if err != nil {
		return err
	}
	return withNetlink(pid, func(h *netlink.Handle) error {
		uplink, err := h.LinkByName(Uplink)
		if err != nil {
			return err
		}
		if err := h.AddrAdd(uplink, &netlink.Addr{IPNet: network(netip.PrefixFrom(ip, fabricBits))}); err != nil {
			return err
		}
		if err := setUp(h, Uplink); err != nil {
			return err
		}
		// For the Service address; kubelet expects a default route as well.
		if err := h.RouteAdd(&netlink.Route{LinkIndex: uplink.Attrs().Index, Gw: serverIP.AsSlice()}); err != nil {
			return fmt.Errorf("adding the default route: %w", err)
		}
		return routePods(h, uplink, nodes, own)
	})
}

// routePods adds the routes to the pods of all other nodes.
func routePods(h *netlink.Handle, link netlink.Link, nodes, own int) error {
	for m := 1; m <= nodes; m++ {
		if m == own {
			continue
		}
		r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: network(podSubnet(m)), Gw: nodeIP(m).AsSlice()}
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("adding the route to %v: %w", podSubnet(m), err)
		}
	}
	return nil
}

// relay forwards connections to a port of this machine to dial's target until the listener is closed.
func relay(l net.Listener, dial func(context.Context) (net.Conn, error)) {
	for {
		client, err := l.Accept()
		if err != nil {
			return // closed
		}
		go func() {
			defer client.Close()
			server, err := dial(context.Background())
			if err != nil {
				return // the client sees its connection close
			}
			defer server.Close()
			go func() {
				_, _ = io.Copy(server, client)
				_ = server.(*net.TCPConn).CloseWrite()
			}()
			_, _ = io.Copy(client, server)
		}()
	}
}
