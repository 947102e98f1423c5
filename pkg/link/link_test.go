package link_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

var (
	v4 = netip.MustParseAddr("10.6.168.105")
	v6 = netip.MustParseAddr("fd00:6::105")
)

// wire makes a pod, with an interface that is down, and another machine on its link that has addresses.
func wire(t *testing.T, kind string, addrs ...netip.Addr) (pod, machine string) {
	t.Helper()
	dir := t.TempDir()
	pod, machine = nodetest.Netns(t, dir, "pod"), nodetest.Netns(t, dir, "machine")
	nodetest.In(t, machine, func() error {
		port := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "port"}, PeerName: "eth0"}
		if err := netlink.LinkAdd(port); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(port); err != nil {
			return err
		}
		for _, a := range addrs {
			ip := &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice()), Flags: 0x02} // without DAD of its own
			if err := netlink.AddrAdd(port, ip); err != nil {
				return err
			}
		}
		return nil
	})
	move(t, machine, pod, "eth0")
	if kind != "macvlan" {
		return pod, machine
	}
	node := pod
	nodetest.In(t, node, func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(eth0); err != nil {
			return err
		}
		return netlink.LinkAdd(&netlink.Macvlan{Mode: netlink.MACVLAN_MODE_BRIDGE,
			LinkAttrs: netlink.LinkAttrs{Name: "net1", ParentIndex: eth0.Attrs().Index}})
	})
	pod = nodetest.Netns(t, dir, "inner")
	move(t, node, pod, "net1")
	return pod, machine
}

// move moves a link to another namespace.
func move(t *testing.T, from, to, name string) {
	t.Helper()
	ns, err := os.Open(to)
	must.Do(t, err)
	defer ns.Close()
	nodetest.In(t, from, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(l, int(ns.Fd()))
	})
}

// attrs returns what an interface is, and sets it up or down before.
func attrs(t *testing.T, netns, name string, set func(netlink.Link) error) (is *netlink.LinkAttrs) {
	t.Helper()
	nodetest.In(t, netns, func() error {
		l, err := netlink.LinkByName(name)
		if err == nil && set != nil {
			err = set(l)
		}
		if err == nil {
			l, err = netlink.LinkByName(name)
		}
		if err == nil {
			is = l.Attrs()
		}
		return err
	})
	return is
}

func TestAProbeFindsWhoElseHasAnAddress(t *testing.T) {
	all := []netip.Addr{v4, v6}
	for _, c := range []struct {
		name, kind string
		up         bool
		has        []netip.Addr
		ifname     string
	}{
		{name: "an interface that is up, as that of a bridge", up: true, has: all},
		{name: "one that is down, as macvlan's", kind: "macvlan", ifname: "net1", has: all},
		{name: "one family", kind: "macvlan", ifname: "net1", has: []netip.Addr{v6}},
		{name: "nobody", kind: "macvlan", ifname: "net1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod, machine := wire(t, c.kind, c.has...)
			ifname := cmp.Or(c.ifname, "eth0")
			if c.up {
				attrs(t, pod, ifname, netlink.LinkSetUp)
			}
			for attrs(t, machine, "port", nil).OperState != netlink.OperUp { // else it hears nothing yet
				time.Sleep(time.Millisecond)
			}
			found, asked, err := link.Probe(pod, ifname, all)
			if must.Do(t, err); !asked {
				t.Error("nothing was asked")
			}
			var which []netip.Addr
			port := attrs(t, machine, "port", nil).HardwareAddr.String()
			for _, f := range found {
				if which = append(which, f.Addr); f.MAC.String() != port {
					t.Errorf("%s is that of %s, want %s", f.Addr, f.MAC, port)
				}
			}
			if slices.SortFunc(which, netip.Addr.Compare); !slices.Equal(which, c.has) {
				t.Errorf("found %v, want %v", which, c.has)
			}
			if is := attrs(t, pod, ifname, nil).Flags&net.FlagUp != 0; is != c.up {
				t.Errorf("the interface is up: %t, as before: %t", is, c.up)
			}
			nodetest.In(t, machine, func() error {
				neighbours, err := netlink.NeighList(0, netlink.FAMILY_ALL)
				for _, n := range neighbours {
					if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == v4 || ip == v6 {
						t.Errorf("the probe left a neighbour behind: %v", n)
					}
				}
				return err
			})
		})
	}
}

func TestNothingIsAskedOnALinkWithoutNeighbours(t *testing.T) {
	pod, _ := wire(t, "", v4)
	for _, ifname := range []string{"lo", "missing"} {
		found, asked, err := link.Probe(pod, ifname, []netip.Addr{v4})
		if must.Do(t, err); len(found) > 0 || asked {
			t.Errorf("%s: found %v, asked %t", ifname, found, asked)
		}
	}
	if _, _, err := link.Probe(pod+"-gone", "eth0", []netip.Addr{v4}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a namespace: %v", err)
	}
}

// On a busy machine a prober may not run while its time passes.
func TestAnAnswerIsHeardThoughTheProberWasStoppedMeanwhile(t *testing.T) {
	const env = "STAYPUT_TEST_PROBE"
	if netns := os.Getenv(env); netns != "" {
		found, _, err := link.Probe(netns, "eth0", []netip.Addr{v4})
		must.Do(t, err)
		fmt.Printf("found %d\n", len(found))
		return
	}
	pod, machine := wire(t, "")
	attrs(t, pod, "eth0", netlink.LinkSetUp)
	for attrs(t, machine, "port", nil).OperState != netlink.OperUp {
		time.Sleep(time.Millisecond)
	}
	port := attrs(t, machine, "port", nil)
	arp := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ARP))
	fd := -1
	nodetest.In(t, machine, func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(arp))
		return err
	})
	defer unix.Close(fd)
	must.Do(t, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: arp, Ifindex: port.Index}))

	var out bytes.Buffer
	prober := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	prober.Env, prober.Stdout, prober.Stderr = append(os.Environ(), env+"="+pod), &out, &out
	must.Do(t, prober.Start())
	frame := make([]byte, 128)
	for range 2 { // its two questions
		_, err := unix.Read(fd, frame)
		must.Do(t, err)
	}
	must.Do(t, prober.Process.Signal(unix.SIGSTOP))
	var status unix.WaitStatus
	_, err := unix.Wait4(prober.Process.Pid, &status, unix.WUNTRACED, nil)
	if must.Do(t, err); !status.Stopped() {
		t.Fatalf("it ended before it could be stopped: %s", &out)
	}
	for _, a := range []netip.Addr{v4.Next(), v4.Next(), v4.Next(), v4} { // that of another one may be heard first
		frame := link.Announcement(link.MAC(port.HardwareAddr), a)
		must.Do(t, unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: port.Index}))
	}
	time.Sleep(2 * link.ProbeTime)
	must.Do(t, prober.Process.Signal(unix.SIGCONT))
	must.Do(t, prober.Wait())
	if !strings.Contains(out.String(), "found 1\n") {
		t.Errorf("it says:\n%s", &out)
	}
}
