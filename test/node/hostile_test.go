package node

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const hostileEnv = "STAYPUT_TEST_HOSTILE"

// What a process of a pod can do: without any right, but for the last, which needs its pod's CAP_NET_ADMIN.
const (
	changesDescriptors = "descriptors" // into a network namespace, a pipe that nobody writes to, and a socket, in turn
	makesNamespace     = "addresses"   // with many addresses, all of its node's among them, one of which changes
	fillsNamespace     = "others"      // with as many others
)

// hostile is the main function of a process that does so until it is killed.
func hostile(what string) int {
	err := map[string]func() error{
		changesDescriptors: changeDescriptors, makesNamespace: changeAddresses, fillsNamespace: keepAddresses,
	}[what]()
	fmt.Fprintln(os.Stderr, "hostile:", err)
	return 1
}

func changeDescriptors() error {
	var pipe [2]int
	ns, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	socket, socketErr := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err := errors.Join(err, socketErr, unix.Pipe2(pipe[:], unix.O_CLOEXEC)); err != nil {
		return err
	}
	if err := unix.Close(pipe[1]); err != nil {
		return err
	}
	for first := true; ; first = false {
		for _, from := range []int{ns, pipe[0], ns, socket} {
			for fd := 100; fd < 900; fd++ {
				if err := unix.Dup3(from, fd, unix.O_CLOEXEC); err != nil && !errors.Is(err, unix.EBUSY) {
					return err
				}
			}
		}
		if first {
			fmt.Println("begun")
		}
	}
}

const hostileAddresses = 120_000

func changeAddresses() error {
	first := netip.MustParseAddr("10.88.0.0")
	lo, err := netlink.LinkByName("lo")
	if err := errors.Join(err, addAddresses(first)); err != nil {
		return err
	}
	fmt.Println("begun")
	for a := single(first.Prev()); ; {
		if err := errors.Join(netlink.AddrAdd(lo, a), netlink.AddrDel(lo, a)); err != nil {
			return err
		}
	}
}

func keepAddresses() error {
	if err := addAddresses(netip.MustParseAddr("10.96.0.0")); err != nil {
		return err
	}
	fmt.Println("begun")
	for {
		time.Sleep(time.Hour)
	}
}

// addAddresses adds the addresses from a on. The time that one takes grows with how many its interface has.
func addAddresses(a netip.Addr) error {
	const perLink = 1000
	for i := range hostileAddresses / perLink {
		link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint("br", i)}}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		for range perLink {
			if err := netlink.AddrAdd(link, single(a)); err != nil {
				return err
			}
			a = a.Next()
		}
	}
	return nil
}

func single(a netip.Addr) *netlink.Addr { return &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice())} }

// startHostile starts such a process, as nobody with no capability if it needs none, and waits until it has begun.
func startHostile(t *testing.T, n *lab.Node, what string) {
	t.Helper()
	argv := []string{"/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all",
		"--inh-caps=-all"}
	switch what {
	case makesNamespace:
		argv = append(argv, "/usr/bin/unshare", "--map-root-user", "--net") // its own user namespace, as any user may
	case fillsNamespace:
		argv = []string{"/usr/bin/unshare", "--net"} // as the runtime makes a pod's
	}
	p, err := n.Start(what, []string{hostileEnv + "=" + what}, append(argv, "/opt/hostile")...)
	must.Do(t, err)
	must.Within(t, patience, "a hostile process", func() bool {
		select {
		case <-p.Done():
			t.Fatal("it ended: ", p.Wait())
		default:
		}
		data, err := os.ReadFile(p.Log)
		return err == nil && strings.Contains(string(data), "begun")
	})
}

// The addresses of ended pods are freed by a look into all network namespaces of the node, whatever processes make of
// theirs, and how many addresses these have.
func TestNoProcessOfAPodHoldsUpItsNodesAgent(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	must.Do(t, n.Install(os.Args[0], "/opt/hostile"))
	agent := startAgent(t, n, "--grace-period=1s", "--reconcile-interval=500ms")
	for _, what := range []string{changesDescriptors, makesNamespace, fillsNamespace} {
		startHostile(t, n, what)
	}
	for i := range 5 {
		id := fmt.Sprint("gone-", i)
		netNS, err := n.NewNetNS(testContext(t), id)
		must.Do(t, err)
		_, err = n.CNI(testContext(t), lab.CNICall{Plugin: "bridge", Command: "ADD", ContainerID: id, NetNS: netNS,
			Config: withAnnotations(t, network("10.88.0.0/24"), nil)})
		must.Do(t, err)
		must.Do(t, n.DeleteNetNS(netNS))
		leaked := owned(t, n, id)
		must.Within(t, patience, leaked.String()+" to be free", func() bool { return state(t, n, leaked) == free })
	}
	deletePod(t, n, runPod(t, n, web(0)))
	if health, err := scrape(t, n, "/healthz"); err != nil {
		t.Errorf("%v: %s", err, health)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", agent.Pid))
	must.Do(t, err)
	_, text, _ := strings.Cut(string(status), "VmHWM:")
	var peak int
	_, err = fmt.Sscan(text, &peak)
	must.Do(t, err)
	const limit = 200 << 10 // the chart's, in KiB
	if peak > limit {
		t.Errorf("the agent had %d MiB, and its limit is %d", peak>>10, limit>>10)
	}
	t.Logf("the agent had at most %d MiB", peak>>10)
}
