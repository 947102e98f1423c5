package route_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

// The address of the pod that moves, by family, inside flannel's network and of no node's lease.
var (
	web4 = netip.MustParseAddr("10.244.200.5")
	web6 = netip.MustParseAddr("fd00:10:244:200::5")
	web  = []netip.Addr{web4, web6}
)

func podCIDR(node int, of netip.Addr) netip.Prefix {
	if of.Is4() {
		return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", node))
	}
	return netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%d::/64", node))
}

// nodes are three nodes and a machine outside on one link, joined as flannel does. Node i has 10.0.0.i, and pod a{i}
// with the second address of its podCIDR.
type nodes struct {
	t     testing.TB
	dir   string
	mode  string
	paths map[string]string // of network namespaces

	mu    sync.Mutex
	keep  time.Duration
	bound [4]bool             // which nodes' ledgers have the pod's addresses bound
	blind bool                // no ledger can be read
	wrong [4]map[string]error // with the work on each node
}

func newNodes(t testing.TB, mode, masquerade string) *nodes {
	t.Helper()
	n := &nodes{t: t, dir: t.TempDir(), mode: mode, paths: map[string]string{}}
	n.netns("link", "link add br0 type bridge", "link set br0 up")
	for i, name := range []string{"n1", "n2", "n3", "ext"} {
		host := i + 1
		if name == "ext" {
			host = 100
		}
		n.netns(name, "link set lo up")
		n.wire("link", "p"+name, name, "eth0")
		n.ip("link", "link set p"+name+" master br0", "link set p"+name+" up")
		n.ip(name, "link set eth0 up", fmt.Sprintf("addr add 10.0.0.%d/24 dev eth0", host),
			fmt.Sprintf("addr add fd00::%d/64 dev eth0 nodad", host))
	}
	n.ip("ext", "addr add 203.0.113.10/32 dev lo", "addr add 2001:db8::10/128 dev lo")
	n.serve("ext", "ext")
	for i := 1; i <= 3; i++ {
		n.node(i, masquerade)
	}
	return n
}

// node sets up a node, and its pod.
func (n *nodes) node(i int, masquerade string) {
	name := fmt.Sprintf("n%d", i)
	for _, s := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv4/conf/all/rp_filter"} {
		n.sysctl(name, s, "1")
	}
	n.ip(name, "route add default via 10.0.0.100", "-6 route add default via fd00::100",
		fmt.Sprintf("link add cni0 address 02:43:00:00:00:0%d type bridge", i),
		fmt.Sprintf("addr add 10.244.%d.1/24 dev cni0", i), fmt.Sprintf("addr add fd00:10:244:%d::1/64 dev cni0 nodad", i),
		"link set cni0 up")
	n.flannel(i)
	if masquerade != "" {
		n.masquerade(i, masquerade)
	}
	n.pod(i, fmt.Sprintf("a%d", i), fmt.Sprintf("10.244.%d.2/24", i), fmt.Sprintf("fd00:10:244:%d::2/64", i))
}

// flannel joins a node to the others, as flanneld does at its start.
func (n *nodes) flannel(i int) {
	name := fmt.Sprintf("n%d", i)
	if n.mode == "vxlan" {
		n.ip(name, fmt.Sprintf("link add flannel.1 address 02:42:00:00:00:0%d type vxlan id 1 local 10.0.0.%d dev eth0 "+
			"dstport 8472 nolearning", i, i), fmt.Sprintf("addr add 10.244.%d.0/32 dev flannel.1", i),
			fmt.Sprintf("addr add fd00:10:244:%d::/128 dev flannel.1 nodad", i), "link set flannel.1 up")
	}
	for j := 1; j <= 3; j++ {
		if j == i {
			continue
		}
		if n.mode == "host-gw" {
			n.ip(name, fmt.Sprintf("route add 10.244.%d.0/24 via 10.0.0.%d dev eth0", j, j),
				fmt.Sprintf("-6 route add fd00:10:244:%d::/64 via fd00::%d dev eth0", j, j))
			continue
		}
		mac := fmt.Sprintf("02:42:00:00:00:0%d", j)
		n.run(name, "bridge", "fdb", "add", mac, "dev", "flannel.1", "dst", fmt.Sprintf("10.0.0.%d", j), "self", "permanent")
		n.ip(name, fmt.Sprintf("neigh add 10.244.%d.0 lladdr %s dev flannel.1 nud permanent", j, mac),
			fmt.Sprintf("neigh add fd00:10:244:%d:: lladdr %s dev flannel.1 nud permanent", j, mac),
			fmt.Sprintf("route add 10.244.%d.0/24 via 10.244.%d.0 dev flannel.1 onlink", j, j),
			fmt.Sprintf("-6 route add fd00:10:244:%d::/64 via fd00:10:244:%d:: dev flannel.1 onlink", j, j))
	}
}

// pod starts a pod that serves.
func (n *nodes) pod(i int, name string, addrs ...string) {
	node, ns := fmt.Sprintf("n%d", i), fmt.Sprintf("%s@%d", name, i)
	n.netns(ns, "link set lo up")
	n.wire(node, "v"+name, ns, "eth0")
	n.ip(node, "link set v"+name+" master cni0", "link set v"+name+" up")
	n.ip(ns, "link set eth0 up")
	for _, a := range addrs {
		options := ""
		if strings.Contains(a, ":") {
			options = " nodad"
		}
		n.ip(ns, "addr add "+a+" dev eth0"+options)
	}
	n.ip(ns, fmt.Sprintf("route add 10.244.%d.1/32 dev eth0", i), fmt.Sprintf("route add default via 10.244.%d.1", i),
		fmt.Sprintf("-6 route add fd00:10:244:%d::1/128 dev eth0", i),
		fmt.Sprintf("-6 route add default via fd00:10:244:%d::1 dev eth0", i))
	n.serve(ns, ns)
}

// ledger says whether a node's ledger has the pod's addresses bound.
func (n *nodes) ledger(i int, bound bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.bound[i] = bound
}

// trouble is what is wrong with the work on a node.
func (n *nodes) trouble(i int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return errors.Join(slices.Collect(maps.Values(n.wrong[i]))...)
}

var errBlind = errors.New("no ledger can be read")

func (n *nodes) has(i int) (map[netip.Addr]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.blind {
		return nil, errBlind
	}
	all := map[netip.Addr]string{netip.MustParseAddr("192.0.2.9"): "cni0"} // one of a pool that is not routed
	for _, a := range web {
		if n.bound[i] {
			all[a] = "cni0"
		}
	}
	return all, nil
}

// start starts the pod that moves, as runtime and plugin do.
func (n *nodes) start(i int) {
	n.ledger(i, true)
	n.pod(i, "web", web4.String()+"/32", web6.String()+"/128")
	for _, a := range web {
		n.ip(fmt.Sprintf("n%d", i), fmt.Sprintf("neigh flush to %s dev cni0", a)) // the last pod's
		n.ip(fmt.Sprintf("n%d", i), fmt.Sprintf("route replace %s dev cni0 proto 84", a))
	}
}

// stop stops it.
func (n *nodes) stop(i int) {
	n.del(i)
	n.ip(fmt.Sprintf("n%d", i), "link del vweb")
	nodetest.Unmount(n.t, n.paths[fmt.Sprintf("web@%d", i)])
}

// del is the plugin's DEL, which takes the routes away under the ledger's lock: a list of the ledger waits for both.
func (n *nodes) del(i int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range web {
		family := "-4"
		if a.Is6() {
			family = "-6"
		}
		n.ip(fmt.Sprintf("n%d", i), fmt.Sprintf("%s route flush %s dev cni0 proto 84", family, a)) // it may have gone
	}
	n.bound[i] = false
}

func (n *nodes) netns(name string, commands ...string) {
	n.t.Helper()
	n.paths[name] = nodetest.Netns(n.t, n.dir, name)
	n.sysctl(name, "ipv6/conf/default/accept_dad", "0")
	n.ip(name, commands...)
}

// wire makes a link between two namespaces.
func (n *nodes) wire(from, port, to, name string) {
	n.t.Helper()
	peer, err := os.Open(n.paths[to])
	must.Do(n.t, err)
	defer peer.Close()
	nodetest.In(n.t, n.paths[from], func() error {
		cmd := exec.Command("ip", "link", "add", port, "type", "veth", "peer", "name", name, "netns", "/proc/self/fd/3")
		cmd.ExtraFiles = []*os.File{peer}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("link %s: %w: %s", port, err, out)
		}
		return nil
	})
}

func (n *nodes) ip(ns string, commands ...string) {
	n.t.Helper()
	for _, c := range commands {
		n.run(ns, "ip", strings.Fields(c)...)
	}
}

func (n *nodes) run(ns, name string, args ...string) string {
	n.t.Helper()
	var out []byte
	nodetest.In(n.t, n.paths[ns], func() (err error) {
		if out, err = exec.Command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %s %s: %w: %s", ns, name, strings.Join(args, " "), err, out)
		}
		return nil
	})
	return string(out)
}

func (n *nodes) sysctl(ns, name, value string) {
	n.t.Helper()
	nodetest.In(n.t, n.paths[ns], func() error {
		return os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0)
	})
}

const port = "8080"

// serve answers in a namespace who it is, and whom it saw.
func (n *nodes) serve(ns, name string) {
	n.t.Helper()
	var l net.Listener
	nodetest.In(n.t, n.paths[ns], func() (err error) {
		l, err = net.Listen("tcp", ":"+port)
		return err
	})
	n.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
			fmt.Fprintf(c, "%s saw %s", name, from.Addr().Unmap())
			c.Close()
		}
	}()
}

// ask returns what is answered at an address.
func (n *nodes) ask(ns string, addr netip.Addr) (said string) {
	n.t.Helper()
	nodetest.In(n.t, n.paths[ns], func() error {
		d := net.Dialer{Timeout: time.Second}
		c, err := d.Dial("tcp", net.JoinHostPort(addr.String(), port))
		if err != nil {
			said = err.Error()
			return nil
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		said = string(b)
		return nil
	})
	return said
}

// talk sends datagrams of one flow to an address until something is so.
func (n *nodes) talk(ns string, to netip.Addr, what string, is func() bool) {
	n.t.Helper()
	var c net.Conn
	nodetest.In(n.t, n.paths[ns], func() (err error) {
		c, err = net.Dial("udp", net.JoinHostPort(to.String(), port))
		return err
	})
	defer c.Close()
	must.Eventually(n.t, what, func() bool {
		fmt.Fprint(c, "hello") // nobody listens
		return is()
	})
}

// dropped counts the redirects about pods of a node that it did not send.
func (n *nodes) dropped(i int, family byte) (packets uint64) {
	n.t.Helper()
	ns, err := os.Open(n.options(i).Netns)
	must.Do(n.t, err)
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	must.Do(n.t, err)
	table := &nftables.Table{Name: "stayput", Family: nftables.TableFamilyINet}
	rules, err := c.GetRules(table, &nftables.Chain{Name: "redirects", Table: table})
	must.Do(n.t, err)
	for _, r := range rules {
		of := r.Exprs[1].(*expr.Cmp).Data[0]
		for _, e := range r.Exprs {
			if c, ok := e.(*expr.Counter); ok && of == family {
				packets += c.Packets
			}
		}
	}
	return packets
}

// expect waits until an address answers as it should.
func (n *nodes) expect(ns string, addr netip.Addr, want string) {
	n.t.Helper()
	var said string
	defer func() {
		if n.t.Failed() {
			n.t.Logf("%s asked %s, the last answer: %s, want %s", ns, addr, said, want)
			for i := 1; i <= 3; i++ {
				node := fmt.Sprintf("n%d", i)
				n.t.Log(node, n.run(node, "ip", "route"), n.run(node, "ip", "-6", "route"), n.run(node, "ip", "neigh"))
			}
			n.t.Log(ns, n.run(ns, "ip", "neigh"), n.run(ns, "ip", "route", "get", addr.String()))
		}
	}()
	must.Eventually(n.t, want, func() bool {
		said = n.ask(ns, addr)
		return said == want
	})
}

// agents run the tables of all nodes, until stop.
func (n *nodes) agents() (tables []*route.Table, stop func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	var wg sync.WaitGroup
	for i := 1; i <= 3; i++ {
		t := route.New(n.options(i))
		t.SetNetwork([]netip.Prefix{
			netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48"),
		})
		tables = append(tables, t)
		wg.Go(func() { t.Run(ctx) })
	}
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	n.t.Cleanup(stop)
	return tables, stop
}

func (n *nodes) options(i int) route.Options {
	return route.Options{
		Netns: n.paths[fmt.Sprintf("n%d", i)], Interval: time.Hour, Keep: n.keep,
		Bound: func() (map[netip.Addr]string, error) { return n.has(i) },
		Note: func(part string, err error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.wrong[i] == nil {
				n.wrong[i] = map[string]error{}
			}
			if n.wrong[i][part] = err; err != nil {
				n.t.Log("node", i, part, err)
			}
		},
	}
}

// at says where the pod is.
func at(tables []*route.Table, node int, say func(*route.Table, map[netip.Addr]route.Place)) {
	for i, t := range tables {
		places := map[netip.Addr]route.Place{}
		for _, a := range web {
			places[a] = route.Place{Here: i+1 == node, PodCIDR: podCIDR(node, a)}
		}
		say(t, places)
	}
}

func put(t *route.Table, places map[netip.Addr]route.Place) {
	for a, p := range places {
		t.Put(a, p)
	}
}

// reachable expects everybody to reach the pod on a node, and to be seen as who they are; and so is the pod.
func (n *nodes) reachable(node int) {
	n.t.Helper()
	for i := 1; i <= 3; i++ {
		for _, a := range web {
			pod := podCIDR(i, a).Addr().Next().Next()
			n.expect(fmt.Sprintf("a%d@%d", i, i), a, fmt.Sprintf("web@%d saw %s", node, pod))
			n.expect(fmt.Sprintf("web@%d", node), pod, fmt.Sprintf("a%d@%d saw %s", i, i, a))
		}
	}
}

// tables counts the nftables tables of Stayput on a node.
func (n *nodes) tables(i int) (found int) {
	n.t.Helper()
	ns, err := os.Open(n.options(i).Netns)
	must.Do(n.t, err)
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	must.Do(n.t, err)
	all, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	must.Do(n.t, err)
	for _, t := range all {
		if t.Name == "stayput" {
			found++
		}
	}
	return found
}
