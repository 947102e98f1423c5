// Package routed gives routed addresses to pods by the real main plugins, on three nodes and an outside that network
// namespaces stand for, and asks from everywhere who answers and whom it saw.
package routed

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

const (
	web4 = "10.50.0.5"
	web6 = "fd00:50::5"
)

// fabric is the nodes 1 to 3, with the pods 10.244.N.0/24 and fd00:10:244:N::/64, and the outside, 0.
type fabric struct {
	t     *testing.T
	dir   string
	bin   string // of the plugins
	nodes [4]string
	main  map[string]any
	only6 bool // pods have no IPv4
	pods  map[string]*pod
}

type pod struct {
	node      int
	ns, name  string
	addrs     []string // of the cluster's annotation; none: an ordinary one
	mode      string   // of their pool, empty for Routed
	gateway   string   // of the pool, if it is not Routed
	result    json.RawMessage
	v4, v6    string
	containID string
}

func (p *pod) uid() string { return fmt.Sprintf("00000000-0000-0000-0000-%012x", len(p.containID)) }

func programs(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	all, err := lab.Build(ctx)
	must.Do(t, err)
	flannel, err := lab.BuildFlannel(ctx)
	must.Do(t, err)
	bandwidth, err := lab.BuildBandwidth(ctx)
	must.Do(t, err)
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", filepath.Join(bin, "stayput"),
		"github.com/stayput/stayput/cmd/stayput")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, path := range map[string]string{
		"bridge": all.CNI + "/bridge", "ptp": all.CNI + "/ptp", "portmap": all.CNI + "/portmap",
		"macvlan": all.CNI + "/macvlan", "flannel": flannel, "bandwidth": bandwidth,
	} {
		must.Do(t, os.Symlink(path, filepath.Join(bin, name)))
	}
	return bin
}

// newFabric joins the nodes by a link, with routes to each other's pods.
func newFabric(t *testing.T, bin string, main map[string]any) *fabric {
	f := &fabric{t: t, dir: t.TempDir(), bin: bin, main: main, pods: map[string]*pod{}}
	link := nodetest.Netns(t, f.dir, "link")
	f.sh(link, "ip link add br0 type bridge; ip link set br0 up")
	for i := range f.nodes {
		f.nodes[i] = nodetest.Netns(t, f.dir, fmt.Sprint("node", i))
	}
	for i, ns := range f.nodes {
		host := i
		if i == 0 {
			host = 100
		}
		f.sh(ns, "for c in all default; do echo 0 >/proc/sys/net/ipv6/conf/$c/accept_dad; done; ip link set lo up")
		f.sh(ns, "ip link add eth0 type veth peer name p%d", i)
		f.move(ns, link, fmt.Sprint("p", i))
		f.sh(link, "ip link set p%d master br0 up", i)
		f.sh(ns, "ip link set eth0 up; ip addr add 10.0.0.%d/24 dev eth0; ip addr add fd00::%d/64 dev eth0 nodad", host, host)
		for j := 1; j <= 3; j++ {
			if j != i {
				f.sh(ns, "ip route add 10.244.%d.0/24 via 10.0.0.%d; ip route add fd00:10:244:%d::/64 via fd00::%d", j, j, j, j)
			}
		}
		if i > 0 {
			f.sh(ns, "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding")
		}
	}
	return f
}

func (f *fabric) sh(ns, format string, args ...any) string {
	f.t.Helper()
	out, err := f.try(ns, format, args...)
	if err != nil {
		f.t.Fatalf("%s: %v\n%s", fmt.Sprintf(format, args...), err, out)
	}
	return out
}

func (f *fabric) try(ns, format string, args ...any) (out string, err error) {
	f.t.Helper()
	var b []byte
	nodetest.In(f.t, ns, func() error {
		b, err = exec.Command("sh", "-ec", fmt.Sprintf(format, args...)).CombinedOutput()
		return nil
	})
	return string(b), err
}

func (f *fabric) move(from, to, name string) {
	f.t.Helper()
	ns, err := os.Open(to)
	must.Do(f.t, err)
	defer ns.Close()
	nodetest.In(f.t, from, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(l, int(ns.Fd()))
	})
}

// conf is the configuration of a node's network for a pod, which its agent grants the pod's addresses.
func (f *fabric) conf(node int, p *pod) map[string]any {
	c := maps.Clone(f.main)
	version := "1.0.0"
	ipam := map[string]any{
		"type":    "stayput",
		"dataDir": fmt.Sprintf("%s/data%d", f.dir, node), "stateDir": fmt.Sprintf("%s/state%d", f.dir, node),
	}
	agent := ledger.Options{StateDir: ipam["stateDir"].(string)}.Grants()
	must.Do(f.t, agent.PutServed(grants.Served{More: true}))
	if c["type"] == "flannel" {
		version = "0.3.1"
		env := fmt.Sprintf("%s/subnet%d.env", f.dir, node)
		must.Do(f.t, os.WriteFile(env, fmt.Appendf(nil, "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.%d.1/24\n"+
			"FLANNEL_IPV6_NETWORK=fd00:10:244::/48\nFLANNEL_IPV6_SUBNET=fd00:10:244:%d::1/64\n"+
			"FLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n",
			node, node), 0o644))
		c["subnetFile"], c["dataDir"] = env, fmt.Sprintf("%s/flannel%d", f.dir, node)
	} else {
		ranges := []any{
			[]any{map[string]any{"subnet": fmt.Sprintf("10.244.%d.0/24", node)}},
			[]any{map[string]any{"subnet": fmt.Sprintf("fd00:10:244:%d::/64", node)}},
		}
		routes := []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}}
		if f.only6 {
			ranges, routes = ranges[1:], routes[1:]
		}
		ipam["ranges"] = ranges
		if c["type"] == "ptp" {
			ipam["routes"] = routes
		}
	}
	c["cniVersion"], c["name"], c["ipam"] = version, "net", ipam
	annotations := map[string]string{}
	if len(p.addrs) > 0 {
		var list []map[string]string
		for _, a := range p.addrs {
			list = append(list, map[string]string{"interface": "eth0", "pool": "blue", "mode": cmp.Or(p.mode, "Routed"),
				"address": a, "gateway": p.gateway})
		}
		b, err := json.Marshal(list)
		must.Do(f.t, err)
		annotations[netconf.AnnotationAddresses] = string(b)
		pending, err := agent.Begin(p.uid(), string(b))
		must.Do(f.t, err)
		must.Do(f.t, pending.Finish())
	}
	c["runtimeConfig"] = map[string]any{lab.AnnotationsCapability: annotations}
	return c
}

// call runs a plugin on a node.
func (f *fabric) call(verb, plugin string, p *pod, conf map[string]any) ([]byte, error) {
	f.t.Helper()
	in, err := json.Marshal(conf)
	must.Do(f.t, err)
	var out, stderr bytes.Buffer
	nodetest.In(f.t, f.nodes[p.node], func() error {
		cmd := exec.Command(filepath.Join(f.bin, plugin))
		cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+p.containID, "CNI_NETNS="+p.ns,
			"CNI_IFNAME=eth0", "CNI_PATH="+f.bin, "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME="+p.name+
				";K8S_POD_UID="+p.uid())
		cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &stderr
		err = cmd.Run()
		return nil
	})
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s%s", plugin, verb, err, out.Bytes(), stderr.Bytes())
	}
	return out.Bytes(), err
}

// chained is the plugins behind the main one, with their configurations.
func (f *fabric) chained(p *pod, conf map[string]any) map[string]map[string]any {
	return map[string]map[string]any{
		"portmap": {
			"cniVersion": conf["cniVersion"], "name": "net", "type": "portmap", "snat": true, "prevResult": p.result,
			"runtimeConfig": map[string]any{"portMappings": []any{map[string]any{"hostPort": 9090, "containerPort": 8080,
				"protocol": "tcp"}}},
		},
		"bandwidth": {
			"cniVersion": conf["cniVersion"], "name": "net", "type": "bandwidth", "prevResult": p.result,
			"runtimeConfig": map[string]any{"bandwidth": map[string]any{
				"ingressRate": 100_000_000, "ingressBurst": 10_000_000, "egressRate": 100_000_000, "egressBurst": 10_000_000}},
		},
	}
}

func (f *fabric) start(node int, name string, addrs ...string) *pod {
	f.t.Helper()
	p := &pod{node: node, name: name, addrs: addrs, containID: fmt.Sprintf("%s-%d-%d", name, node, time.Now().UnixNano())}
	p.ns = nodetest.Netns(f.t, f.dir, p.containID)
	f.sh(p.ns, "ip link set lo up; for c in all default; do echo 0 >/proc/sys/net/ipv6/conf/$c/accept_dad; done")
	conf := f.conf(node, p)
	out, err := f.call("ADD", conf["type"].(string), p, conf)
	must.Do(f.t, err)
	p.result = out
	var r struct {
		IPs []struct{ Address string }
	}
	must.Do(f.t, json.Unmarshal(out, &r))
	for _, ip := range r.IPs {
		if a := netip.MustParsePrefix(ip.Address).Addr(); a.Is4() {
			p.v4 = a.String()
		} else {
			p.v6 = a.String()
		}
	}
	if name == "web" {
		for plugin, conf := range f.chained(p, conf) {
			_, err := f.call("ADD", plugin, p, conf)
			must.Do(f.t, err)
		}
	}
	f.serve(p.ns, name)
	f.pods[name] = p
	return p
}

func (f *fabric) stop(p *pod) {
	f.t.Helper()
	conf := f.conf(p.node, p)
	for plugin, conf := range f.chained(p, conf) {
		_, err := f.call("DEL", plugin, p, conf)
		must.Do(f.t, err)
	}
	for range 2 { // as runtimes do
		_, err := f.call("DEL", conf["type"].(string), p, conf)
		must.Do(f.t, err)
	}
}

// serve answers with a name and who asked.
func (f *fabric) serve(ns, name string) {
	f.t.Helper()
	var l net.Listener
	nodetest.In(f.t, ns, func() (err error) {
		l, err = net.Listen("tcp", "[::]:8080")
		return err
	})
	f.t.Cleanup(func() { l.Close() })
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

// asks expects an answer of a server that saw a source; any source if that is empty.
func (f *fabric) asks(what, ns, addr, server, source string) {
	f.t.Helper()
	if !strings.Contains(addr, "]:") && strings.Count(addr, ":") != 1 {
		addr = net.JoinHostPort(addr, "8080")
	}
	got := ""
	nodetest.In(f.t, ns, func() error {
		c, err := net.DialTimeout("tcp", addr, 5*time.Second)
		if err != nil {
			got = err.Error()
			return nil
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		var b bytes.Buffer
		if _, err := b.ReadFrom(c); err != nil {
			got = err.Error()
			return nil
		}
		got = b.String()
		return nil
	})
	if !strings.HasPrefix(got, server+" saw ") || source != "" && got != server+" saw "+source {
		f.t.Errorf("%s asks %s: %q, want %q", what, addr, got, server+" saw "+source)
	}
}

func TestARoutedAddressIsReachedFromEverywhere(t *testing.T) {
	bin := programs(t)
	for name, main := range map[string]map[string]any{
		"bridge":  {"type": "bridge", "isDefaultGateway": true, "hairpinMode": true, "mtu": 1400},
		"masq":    {"type": "bridge", "isDefaultGateway": true, "hairpinMode": true, "ipMasq": true},
		"ptp":     {"type": "ptp"},
		"ptpmasq": {"type": "ptp", "ipMasq": true},
		"flannel": {"type": "flannel", "delegate": map[string]any{"hairpinMode": true, "isDefaultGateway": true, "ipMasq": false}},
	} {
		t.Run(name, func(t *testing.T) { everywhere(newFabric(t, bin, main), name) })
	}
}

func everywhere(f *fabric, kind string) {
	t := f.t
	f.serve(f.nodes[0], "outside")
	masq, ptp := kind == "masq", strings.HasPrefix(kind, "ptp")
	f.sh(f.nodes[0], "ip route add 10.50.0.0/24 via 10.0.0.2; ip route add fd00:50::/64 via fd00::2")
	for range 2 { // the node's first pod, and one beside others
		web := f.start(2, "web", web4+"/32", web6+"/128")
		if web.v4 != web4 || web.v6 != web6 {
			t.Fatalf("ADD: %s", web.result)
		}
		both := []netip.Addr{netip.MustParseAddr(web4), netip.MustParseAddr(web6)}
		_, err := hostnet.Announce(web.ns, "eth0", both) // as the agent does
		must.Do(t, err)
		for i := 1; i <= 3; i++ {
			if f.pods[fmt.Sprint("a", i)] == nil {
				f.start(i, fmt.Sprint("a", i))
			}
			if i != 2 { // the agents'
				f.sh(f.nodes[i], "ip route replace %s via 10.0.0.2 proto 85; ip route replace %s via fd00::2 proto 85", web4, web6)
			}
		}
		for i := 1; i <= 3; i++ {
			a := f.pods[fmt.Sprint("a", i)]
			from4, from6, saw4, saw6 := a.v4, a.v6, web4, web6
			if masq {
				saw4, saw6 = "10.0.0.2", "fd00::2"
				if i == 2 {
					saw4, saw6 = "10.244.2.1", "fd00:10:244:2::1"
				}
			}
			if masq || kind == "ptpmasq" { // which does not masquerade within the prefix that has address and gateway
				from4, from6 = fmt.Sprint("10.0.0.", i), fmt.Sprint("fd00::", i)
				if i == 2 {
					from4, from6 = "10.244.2.1", "fd00:10:244:2::1"
				}
			}
			f.asks(a.name, a.ns, web4, "web", from4)
			f.asks(a.name, a.ns, web6, "web", from6)
			f.asks("web", web.ns, a.v4, a.name, saw4)
			f.asks("web", web.ns, a.v6, a.name, saw6)
			f.asks(fmt.Sprint("node", i), f.nodes[i], web4, "web", "")
			f.asks(fmt.Sprint("node", i), f.nodes[i], web6, "web", "")
		}
		out4, out6 := web4, web6
		if masq {
			out4, out6 = "10.0.0.2", "fd00::2"
		}
		f.asks("web", web.ns, "10.0.0.100", "outside", out4)
		f.asks("web", web.ns, "fd00::100", "outside", out6)
		if ptp { // portmap takes all of the prefix that has address and gateway for the pod's own
			f.asks("outside", f.nodes[0], "10.0.0.2:9090", "web", "10.244.2.1")
		} else {
			f.asks("outside", f.nodes[0], "10.0.0.2:9090", "web", "10.0.0.100")
			f.asks("web", web.ns, "10.0.0.2:9090", "web", "10.244.2.1")
		}
		if limits := f.limits(2); limits != 2 { // of the veth, and of what stands for it in the other direction
			t.Errorf("%d token buckets limit the bandwidth", limits)
		}
		edges(f, web, masq)
		if kind != "flannel" { // it knows no CHECK
			checks(f, web, !ptp)
		}
		f.stop(web)
		if left := f.sh(f.nodes[2], "ip route show %s; ip -6 route show %s", web4, web6); left != "" {
			t.Errorf("after DEL there is %s", left)
		}
	}
}

// limits counts what limits bandwidth on a node.
func (f *fabric) limits(node int) (n int) {
	f.t.Helper()
	nodetest.In(f.t, f.nodes[node], func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			all, err := netlink.QdiscList(l)
			if err != nil {
				return err
			}
			for _, q := range all {
				if q.Type() == "tbf" {
					n++
				}
			}
		}
		return nil
	})
	return n
}

// edges asks for the first and the last address of what the pod's kernel takes for its subnet: the one is like any
// other for a pool, the other it takes for the broadcast address.
func edges(f *fabric, web *pod, masq bool) {
	for edge, from := range map[string]int{"10.50.0.0": 2, "10.50.0.255": 2, "10.50.1.255": 3} {
		p := f.start(from, "edge", edge+"/32")
		source, back := web4, edge
		if from != web.node {
			f.sh(f.nodes[web.node], "ip route replace %s via 10.0.0.%d proto 85", edge, from)
			if masq { // but within the subnet
				source, back = fmt.Sprint("10.0.0.", web.node), fmt.Sprint("10.0.0.", from)
			}
		}
		f.asks("web", web.ns, edge, "edge", source)
		f.asks("edge at "+edge, p.ns, web4, "web", back)
		f.asks(fmt.Sprint("the node of ", edge), f.nodes[from], edge, "edge", "")
		f.stop(p)
		f.sh(f.nodes[web.node], "ip route flush proto 85")
	}
}

// checks expects that CHECK finds everything as it should be, by the annotation or the grant alone; and, on a bridge,
// that it misses a route.
func checks(f *fabric, web *pod, bridge bool) {
	t := f.t
	annotated := f.conf(2, web)
	granted := f.conf(2, &pod{})
	granted["ipam"].(map[string]any)["pools"] = []any{"blue"}
	all := map[string]map[string]any{"annotation": annotated, "grant": granted}
	check := func(by string) error {
		conf := all[by]
		conf["prevResult"] = web.result
		_, err := f.call("CHECK", conf["type"].(string), web, conf)
		return err
	}
	for by := range all {
		must.Do(t, check(by))
	}
	if !bridge {
		return
	}
	f.sh(f.nodes[2], "ip route del %s", web4)
	for by := range all {
		if err := check(by); err == nil || !strings.Contains(err.Error(), web4) {
			t.Errorf("CHECK by %s misses no route: %v", by, err)
		}
	}
}

// What cannot work is an error that names the field, and leaves nothing.
func TestARoutedAddressThatCannotWorkIsAClearError(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isGateway": true})
	for want, change := range map[string]func(conf, ipam map[string]any){
		`type: "macvlan" is not valid`:  func(conf, _ map[string]any) { conf["type"] = "macvlan" },
		`type: "ipvlan" is not valid`:   func(conf, _ map[string]any) { conf["type"] = "ipvlan" },
		`type: "" is not valid`:         func(conf, _ map[string]any) { delete(conf, "type") },
		`isGateway: false is not valid`: func(conf, _ map[string]any) { conf["isGateway"] = false },
		`vlan: 7 is not valid`:          func(conf, _ map[string]any) { conf["vlan"] = 7 },
		`cniVersion: 0.2.0 is too old`:  func(conf, _ map[string]any) { conf["cniVersion"] = "0.2.0" },
		`ipam.ranges: no range of the family of the routed address fd00:50::5`: func(_, ipam map[string]any) {
			ipam["ranges"] = ipam["ranges"].([]any)[:1]
		},
		`ipam.ranges: no range of the family of the routed address 10.50.0.5`: func(_, ipam map[string]any) {
			delete(ipam, "ranges")
			ipam["pools"] = []any{}
		},
		`ipam.routes[0].gw: 10.244.2.9 is not on the link`: func(_, ipam map[string]any) {
			ipam["routes"] = []any{map[string]any{"dst": "10.9.0.0/16", "gw": "10.244.2.9"}}
		},
		`type: ptp cannot route 10.50.0.5 via the gateway 192.168.2.1`: func(conf, ipam map[string]any) {
			conf["type"] = "ptp"
			ipam["ranges"] = []any{[]any{map[string]any{"subnet": "192.168.2.0/24"}}, ipam["ranges"].([]any)[1]}
		},
	} {
		p := &pod{node: 2, ns: f.nodes[3], name: "web", containID: "c1", addrs: []string{web4 + "/32", web6 + "/128"}}
		conf := f.conf(2, p)
		change(conf, conf["ipam"].(map[string]any))
		_, err := f.call("ADD", "stayput", p, conf)
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), `\"`, `"`), want) {
			t.Errorf("ADD: %v, want %q", err, want)
		}
		for _, dir := range []string{"data2", "state2"} {
			entries, _ := filepath.Glob(filepath.Join(f.dir, dir, "*", "*"))
			entries = slices.DeleteFunc(entries, func(s string) bool { // the agent's
				return filepath.Base(filepath.Dir(s)) == grants.Name
			})
			if len(entries) > 0 {
				t.Errorf("%s: left %v", want, entries)
			}
		}
		if left := f.sh(f.nodes[3], "ip route show proto 84; ip route show 10.244.2.1"); left != "" {
			t.Errorf("%s: left %s", want, left)
		}
	}
}

// An address of mode L2 has a gateway that is another machine, the API server's even. On none of these networks may the
// node get it for its own, and pods that come afterwards start as ever.
func TestANodeNeverTakesTheGatewayOfAPool(t *testing.T) {
	for name, main := range map[string]map[string]any{
		"bridge": {"type": "bridge", "isGateway": true}, "default gateway": {"type": "bridge", "isDefaultGateway": true},
		"ptp": {"type": "ptp"}, "flannel": {"type": "flannel"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t, programs(t), main)
			first := f.start(2, "a0")
			lan := &pod{node: 2, name: "lan", containID: "lan-1", addrs: []string{"172.30.0.201/24"}, mode: "L2",
				gateway: "172.30.0.1"}
			lan.ns = nodetest.Netns(t, f.dir, lan.containID)
			conf := f.conf(2, lan)
			_, err := f.call("ADD", conf["type"].(string), lan, conf)
			if err == nil || !strings.Contains(err.Error(), "172.30.0.201 is an address of mode L2") {
				t.Errorf("ADD: %v", err)
			}
			if has := f.sh(f.nodes[2], "ip addr show"); strings.Contains(has, "172.30.0.") {
				t.Errorf("the node has %s", has)
			}
			_, err = f.call("DEL", conf["type"].(string), lan, conf)
			must.Do(t, err)
			ordinary := f.start(2, "a1")
			f.asks("node2", f.nodes[2], first.v4, "a0", "")
			f.asks("node2", f.nodes[2], ordinary.v4, "a1", "")
		})
	}
}

// A DEL that comes late keeps its hands off the route of the pod that has the address since, and off the agent's.
func TestALateDelLeavesTheRouteOfANewerPod(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isDefaultGateway": true})
	old := f.start(2, "web", web4+"/32", web6+"/128")
	f.stop(old)
	f.start(2, "web", web4+"/32", web6+"/128")
	late := func() {
		conf := f.conf(2, old)
		_, err := f.call("DEL", "bridge", old, conf)
		must.Do(t, err)
	}
	late()
	f.asks("node2", f.nodes[2], web4, "web", "")
	f.asks("node2", f.nodes[2], web6, "web", "")
	f.stop(f.pods["web"])
	f.sh(f.nodes[2], "ip route add %s via 10.0.0.3 proto 85; ip route add %s via fd00::3 proto 85", web4, web6)
	late()
	if is := f.sh(f.nodes[2], "ip route show proto 85; ip -6 route show proto 85"); strings.Count(is, "via") != 2 {
		t.Errorf("the agent's routes are %q", is)
	}
	for _, kind := range []string{"bridge", "ptp"} { // an ADD takes the agent's place
		f.main = map[string]any{"type": kind, "isDefaultGateway": true}
		web := f.start(2, "web", web4+"/32", web6+"/128")
		f.asks("node2", f.nodes[2], web4, "web", "")
		f.asks("node2", f.nodes[2], web6, "web", "")
		f.stop(web)
		f.sh(f.nodes[2], "ip route replace %s via 10.0.0.3 proto 85; ip route replace %s via fd00::3 proto 85", web4, web6)
	}
}

// Without IPv4, pods reach each other all the same.
func TestARoutedAddressOfIPv6AloneIsReached(t *testing.T) {
	bin := programs(t)
	for _, kind := range []string{"bridge", "ptp"} {
		t.Run(kind, func(t *testing.T) {
			f := newFabric(t, bin, map[string]any{"type": kind, "isDefaultGateway": true})
			f.only6 = true
			f.serve(f.nodes[0], "outside")
			f.sh(f.nodes[0], "ip route add fd00:50::/64 via fd00::2")
			f.sh(f.nodes[1], "ip route add %s via fd00::2 proto 85", web6)
			web, a1, a2 := f.start(2, "web", web6+"/128"), f.start(1, "a1"), f.start(2, "a2")
			if web.v4 != "" || web.v6 != web6 {
				t.Fatalf("ADD: %s", web.result)
			}
			for _, a := range []*pod{a1, a2} {
				f.asks(a.name, a.ns, web6, "web", a.v6)
				f.asks("web", web.ns, a.v6, a.name, web6)
			}
			f.asks("web", web.ns, "fd00::100", "outside", web6)
			f.asks("outside", f.nodes[0], web6, "web", "fd00::100")
			f.asks("node2", f.nodes[2], web6, "web", "")
			f.stop(web)
			if left := f.sh(f.nodes[2], "ip -6 route show %s", web6); left != "" {
				t.Errorf("after DEL there is %s", left)
			}
		})
	}
}

// A DEL takes the route away whatever else of the configuration has changed since the ADD.
func TestADelNeedsOnlyTheNameOfTheBridge(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isDefaultGateway": true})
	for key, value := range map[string]any{
		"isDefaultGateway": false, "vlan": 7, "type": "ptp", "cniVersion": "0.2.0", "ipam": nil, "runtimeConfig": nil,
	} {
		web := f.start(2, "web", web4+"/32", web6+"/128")
		conf := f.conf(2, web)
		if key == "ipam" {
			delete(conf["ipam"].(map[string]any), "ranges")
		} else {
			conf[key] = value
		}
		_, err := f.call("DEL", "stayput", web, conf)
		must.Do(t, err)
		if left := f.sh(f.nodes[2], "ip route show proto 84; ip -6 route show proto 84"); left != "" {
			t.Errorf("with another %s DEL leaves %s", key, left)
		}
		f.stop(web)
		f.sh(f.nodes[2], "ip route flush proto 84; ip -6 route flush proto 84")
	}
}

// An ADD that fails leaves the agent's routes: the pod is still, or soon again, on another node.
func TestAnAddThatFailsLeavesTheRoutesOfTheAgent(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isDefaultGateway": true})
	f.start(2, "other") // the bridge
	f.sh(f.nodes[2], "ip route add %s via 10.0.0.3 proto 85; ip route add %s via fd00::3 proto 85", web4, web6)
	p := &pod{node: 2, ns: nodetest.Netns(t, f.dir, "empty"), name: "web", containID: "c1",
		addrs: []string{web4 + "/32", web6 + "/128"}}
	if _, err := f.call("ADD", "stayput", p, f.conf(2, p)); err == nil || !strings.Contains(err.Error(), "eth0") {
		t.Errorf("ADD without an interface: %v", err)
	}
	if is := f.sh(f.nodes[2], "ip route show proto 85; ip -6 route show proto 85"); strings.Count(is, "via") != 2 {
		t.Errorf("the agent's routes are %q", is)
	}
}

// Killed at any system call, an ADD or a DEL leaves nothing on the node that the next DEL does not take away.
func TestKilledAtEveryStepARoutedPodLeavesNothing(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isDefaultGateway": true})
	f.start(2, "other") // the bridge
	for verb, calls := range map[string][]string{
		"ADD": {"openat", "socket", "sendto", "renameat", "setns", "ioctl", "write"},
		"DEL": {"openat", "socket", "sendto", "unlinkat", "ioctl"},
	} {
		for _, call := range calls {
			n := 1
			for ; f.killed(verb, call, n); n++ {
			}
			if n == 1 {
				t.Errorf("no %s was killed at %s", verb, call)
			}
		}
	}
}

// killed kills a command at its nth system call of a name, and reports whether it came so far.
func (f *fabric) killed(verb, call string, n int) bool {
	p := f.injected(verb, call, n, "signal=KILL")
	return p.failed != nil
}

// A system call that fails makes ADD fail cleanly, and DEL leaves no route whose address is free.
func TestFailingAtEveryStepARoutedPodHasAllOrNothing(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isDefaultGateway": true})
	f.start(2, "other") // the bridge
	for verb, calls := range map[string][]string{
		"ADD": {"socket", "sendto", "recvfrom", "setns", "ioctl"}, "DEL": {"socket", "sendto", "recvfrom", "ioctl"},
	} {
		for _, call := range calls {
			n := 1
			for ; ; n++ {
				was := f.injected(verb, call, n, "error=ENOBUFS")
				addresses, all := was.files, was.failed == nil && verb == "ADD"
				switch {
				case all && (was.routes != 2 || addresses != 2):
					t.Errorf("ADD is well without %s %d: %d routes, %d addresses", call, n, was.routes, addresses)
				case verb == "ADD" && was.failed != nil && (was.routes != 0 || addresses != 0):
					t.Errorf("ADD failed at %s %d, and left %d routes, %d addresses", call, n, was.routes, addresses)
				case verb == "DEL" && (was.failed != nil || was.routes > addresses):
					t.Errorf("DEL without %s %d: %v, left %d routes, %d addresses", call, n, was.failed, was.routes, addresses)
				}
				if !was.hit {
					break
				}
			}
			if n == 1 {
				t.Errorf("no %s failed at %s", verb, call)
			}
		}
	}
}

// injury is what was seen of a command at whose system call strace did something: before its DELs.
type injury struct {
	failed        error
	hit           bool // it came so far
	routes, files int
}

// injected lets strace do something at the nth system call of a name of a command. Two DELs then leave nothing.
func (f *fabric) injected(verb, call string, n int, what string) (was injury) {
	t := f.t
	p := &pod{node: 2, name: "web", addrs: []string{web4 + "/32", web6 + "/128"}}
	p.containID = fmt.Sprintf("%s-%s-%d", verb, call, n)
	p.ns = nodetest.Netns(t, f.dir, p.containID)
	f.sh(p.ns, "ip link add eth0 type veth peer name other")
	conf := f.conf(2, p)
	log := filepath.Join(f.dir, "strace")
	script := fmt.Sprintf("#!/bin/sh\nexec strace -qq -f -o %s -e trace=%s -e inject=%s:%s:when=%d %s/stayput\n",
		log, call, call, what, n, f.bin)
	must.Do(t, os.WriteFile(filepath.Join(f.bin, "injected"), []byte(script), 0o755))
	if verb == "DEL" {
		_, err := f.call("ADD", "stayput", p, conf)
		must.Do(t, err)
	}
	look := func() (routes, files int) {
		left := f.sh(f.nodes[2], "ip route show proto 84; ip -6 route show proto 84")
		for _, a := range p.addrs {
			a, _, _ = strings.Cut(a, "/")
			is, err := filepath.Glob(filepath.Join(f.dir, "data2", "net", a))
			must.Do(t, err)
			files += len(is)
		}
		return strings.Count(left, "\n"), files
	}
	_, was.failed = f.call(verb, "injected", p, conf)
	b, err := os.ReadFile(log)
	must.Do(t, err)
	was.hit = bytes.Contains(b, []byte("(INJECTED)"))
	was.routes, was.files = look()
	for range 2 {
		_, err := f.call("DEL", "stayput", p, conf)
		must.Do(t, err)
	}
	if routes, files := look(); routes != 0 || files != 0 {
		t.Errorf("%s with %s at %s %d: left %d routes, %d addresses", verb, what, call, n, routes, files)
	}
	nodetest.Unmount(t, p.ns)
	return was
}

// GC takes the routes of what it ends, and no others.
func TestCollectingTakesTheRoutesAlong(t *testing.T) {
	f := newFabric(t, programs(t), map[string]any{"type": "bridge", "isDefaultGateway": true})
	gone := f.start(2, "gone", web4+"/32", web6+"/128")
	stays := f.start(2, "stays", "10.50.0.6/32", "fd00:50::6/128")
	conf := f.conf(2, stays)
	conf["cniVersion"] = "1.1.0"
	conf["cni.dev/valid-attachments"] = []any{map[string]any{"containerID": stays.containID, "ifname": "eth0"}}
	_, err := f.call("GC", "stayput", gone, conf)
	must.Do(t, err)
	if left := f.sh(f.nodes[2], "ip route show %s; ip -6 route show %s", web4, web6); left != "" {
		t.Errorf("GC left %s", left)
	}
	f.asks("node2", f.nodes[2], "10.50.0.6", "stays", "")
	f.asks("node2", f.nodes[2], "fd00:50::6", "stays", "")
}
