// Package node holds the tests that run on a real node: containerd, runc, NRI and CNI plugins, see package lab.
//
//	lab_test.go      the lab itself, on stock host-local
//	same_test.go     a pod comes back with its address, whatever happened in between
//	never_test.go    what must never happen to an address
//	swap_test.go     from host-local to stayput and back, under running pods
//	cniconf_test.go  the agent installs the plugin and keeps the CNI configuration
//	agent_test.go    the agent's own work: leaks, expiry, peers, metrics
//	hostile_test.go  what processes of pods can do to the agent
//	crio_test.go     what CRI-O alone does
//	runtime_test.go  which tests run on which runtime
//
// Every test has a node of its own, which starts within a second. At the end of a test, the invariants of the node's
// ledger are checked. Tests wait for conditions and assert no times.
//
// # To add a test
//
// Start a node with startStayput, run pods with runPod, end them with deletePod, and check an address with sameIP or
// wantState. Name the test after the behaviour.
package node

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// product is the product under test.
var product lab.Product

func TestMain(m *testing.M) {
	if how := os.Getenv(ownerEnv); how != "" {
		os.Exit(ownNode(how))
	}
	if what := os.Getenv(hostileEnv); what != "" {
		os.Exit(hostile(what))
	}
	if os.Getenv(checkEnv) != "" {
		os.Exit(checkLedgers())
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	flag.Parse()
	dir, remove, err := lab.TempDir("product")
	if err == nil {
		defer remove()
		product, err = lab.BuildProduct(context.Background(), dir)
	}
	if err == nil {
		// Longer than a test has patience for.
		_, err = lab.Versions{Runtime: *runtimeName}.BuildNode(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/node:", err)
		return 1
	}
	if err := leaveOut(); err != nil {
		fmt.Fprintln(os.Stderr, "test/node:", err)
		return 1
	}
	explicit := false
	flag.Visit(func(f *flag.Flag) { explicit = explicit || f.Name == "test.parallel" })
	if !explicit {
		// Tests mostly wait: for a grace period, a predecessor, a boot.
		if err := flag.Set("test.parallel", "4"); err != nil {
			fmt.Fprintln(os.Stderr, "test/node:", err)
			return 1
		}
	}
	return m.Run()
}

// patience bounds a test that hangs; it asserts nothing.
const patience = 2 * time.Minute

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// startNode starts a node for one test. If the test fails, it prints the node's logs.
func startNode(t *testing.T, o lab.NodeOptions) *lab.Node {
	t.Helper()
	o.Runtime = *runtimeName
	n, err := lab.StartNode(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	must.Close(t, n)
	return n
}

// network returns a network whose IPAM is stayput, with the annotations of pods.
func network(subnets ...string) lab.Network {
	return lab.Network{IPAM: lab.RangeIPAM("stayput", subnets...), Annotations: true}
}

const agentPath = "/opt/stayput/stayput-agent"

// startStayput starts a node with stayput installed but no agent. The default network is 10.88.0.0/24.
func startStayput(t *testing.T, networks ...lab.Network) *lab.Node {
	t.Helper()
	if networks == nil {
		networks = []lab.Network{network("10.88.0.0/24")}
	}
	return install(t, lab.NodeOptions{Networks: networks})
}

func install(t *testing.T, o lab.NodeOptions) *lab.Node {
	t.Helper()
	o.CNIPlugins = append(o.CNIPlugins, product.Plugin)
	n := startNode(t, o)
	must.Do(t, n.Install(product.Agent, agentPath))
	t.Cleanup(func() { holds(t, n) })
	return n
}

const checkEnv = "STAYPUT_TEST_CHECK"

// holds checks the invariants of every ledger of a node.
func holds(t *testing.T, n *lab.Node) {
	t.Helper()
	exe, err := os.Executable()
	must.Do(t, err)
	const inside = "/opt/stayput/check"
	must.Do(t, n.Install(exe, inside))
	ctx, cancel := context.WithTimeout(context.Background(), patience) // the test's own has ended
	defer cancel()
	if _, err := n.RunInput(ctx, []string{checkEnv + "=1"}, nil, inside); err != nil {
		t.Errorf("the ledger does not hold: %v", err)
	}
}

// checkLedgers is the main function of a process in a node. The next command completes what a killed one left, so it
// calls List first.
func checkLedgers() int {
	ledgers, err := ledger.Networks(ledger.Options{})
	for _, l := range ledgers {
		_, listErr := l.List()
		bad, checkErr := l.Check()
		err = errors.Join(append(bad, err, listErr, checkErr)...)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// startAgent starts the agent and waits until it is connected to NRI and CRI. It logs to the node's logs.
func startAgent(t *testing.T, n *lab.Node, args ...string) *lab.Process {
	t.Helper()
	p, err := n.Start("agent", nil, append([]string{agentPath, "--log-level=debug", criSocket()}, args...)...)
	must.Do(t, err)
	connected(t, n)
	return p
}

// connected waits until the agent is connected to NRI and CRI.
func connected(t *testing.T, n *lab.Node) {
	t.Helper()
	must.Within(t, patience, "the agent to be connected", func() bool {
		ready, err := scrape(t, n, "/readyz")
		return err == nil && strings.Contains(ready, "nri: connected\ncri: ok\n")
	})
}

// scrape returns a page of the agent's HTTP server, requested from inside the node.
func scrape(t *testing.T, n *lab.Node, page string) (string, error) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return n.Dial(ctx, network, address)
		},
	}}
	req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://127.0.0.1:9463"+page, nil)
	must.Do(t, err)
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// metric returns the value of a series, or "" if there is none.
func metric(t *testing.T, n *lab.Node, series string) string {
	t.Helper()
	page, err := scrape(t, n, "/metrics")
	must.Do(t, err)
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// untilMetric waits until a series has a value.
func untilMetric(t *testing.T, n *lab.Node, series, want string) {
	t.Helper()
	must.Within(t, patience, series+" to be "+want, func() bool { return metric(t, n, series) == want })
}

// web is the pod of most tests, with a retention of ten minutes.
func web(ordinal int) lab.PodSpec {
	return lab.PodSpec{Name: fmt.Sprintf("web-%d", ordinal), Annotations: asking("10m")}
}

func asking(retain string) map[string]string {
	return map[string]string{retention.AnnotationRetainIP: retain}
}

func other(ordinal int) lab.PodSpec { return lab.PodSpec{Name: fmt.Sprintf("other-%d", ordinal)} }

func runPod(t *testing.T, n *lab.Node, spec lab.PodSpec) lab.Pod {
	t.Helper()
	pod, err := n.RunPod(testContext(t), spec)
	must.Do(t, err)
	return pod
}

func deletePod(t *testing.T, n *lab.Node, pod lab.Pod) {
	t.Helper()
	must.Do(t, n.DeletePod(testContext(t), pod.ID))
}

// untilPod runs a pod as kubelet does, with retries.
func untilPod(t *testing.T, n *lab.Node, spec lab.PodSpec) lab.Pod {
	t.Helper()
	ctx := testContext(t)
	for {
		pod, err := n.RunPod(ctx, spec)
		if err == nil {
			return pod
		}
		if ctx.Err() != nil {
			t.Fatalf("the pod does not start: %v", err)
		}
		t.Logf("retrying: %v", err)
		time.Sleep(100 * time.Millisecond)
	}
}

// answers checks that the pod answers the node on all its addresses.
func answers(t *testing.T, n *lab.Node, pod lab.Pod) {
	t.Helper()
	for _, ip := range pod.IPs {
		a, err := n.Get(testContext(t), ip)
		must.Do(t, err)
		if a.Name != pod.Name || !a.Has(ip) {
			t.Errorf("%s answers as %+v, want pod %s", ip, a, pod.Name)
		}
	}
}

// sameIP checks that a pod has all its earlier addresses, in its network namespace, too.
func sameIP(t *testing.T, n *lab.Node, now, before lab.Pod) {
	t.Helper()
	if now.ID == before.ID {
		t.Errorf("%s is the same sandbox as before", now.Name)
	}
	if !slices.Equal(now.IPs, before.IPs) {
		t.Errorf("%s came back with %v, it had %v", now.Name, now.IPs, before.IPs)
	}
	configured, err := n.Addresses(now.NetNS)
	must.Do(t, err)
	for _, ip := range before.IPs {
		if !slices.ContainsFunc(configured["eth0"], func(p netip.Prefix) bool { return p.Addr() == ip }) {
			t.Errorf("%s came back with %v configured, it had %v", now.Name, configured, before.IPs)
		}
	}
}

// distinct checks that no two pods share an address.
func distinct(t *testing.T, pods ...lab.Pod) {
	t.Helper()
	owner := map[netip.Addr]string{}
	for _, p := range pods {
		for _, ip := range p.IPs {
			if o := owner[ip]; o != "" {
				t.Errorf("%s and %s both have %s", o, p.Name, ip)
			}
			owner[ip] = p.Name
		}
	}
}

// The states of an address, besides the container ID of the sandbox that has it.
const (
	free     = "free"
	retained = "retained"
)

// stateIn returns the state of an address in a network, as its file has it.
func stateIn(t *testing.T, n *lab.Node, network string, ip netip.Addr) string {
	t.Helper()
	return stateBelow(t, n, defaultDataDir, network, ip)
}

// defaultDataDir is host-local's.
const defaultDataDir = "/var/lib/cni/networks"

// stateBelow is stateIn for a network with another data directory.
func stateBelow(t *testing.T, n *lab.Node, dataDir, network string, ip netip.Addr) string {
	t.Helper()
	data, err := os.ReadFile(n.Path(path.Join(dataDir, network, ip.String())))
	if errors.Is(err, os.ErrNotExist) {
		return free
	}
	must.Do(t, err)
	if strings.HasPrefix(string(data), "{") {
		return retained
	}
	id, _, _ := strings.Cut(string(data), "\r\n")
	return id
}

// state is stateIn for the network of most tests.
func state(t *testing.T, n *lab.Node, ip netip.Addr) string {
	t.Helper()
	return stateIn(t, n, "pods", ip)
}

func wantState(t *testing.T, n *lab.Node, ip netip.Addr, want string) {
	t.Helper()
	if got := state(t, n, ip); got != want {
		t.Errorf("%s is %s, want %s", ip, got, want)
	}
}

func wantIP(t *testing.T, got netip.Addr, want string) {
	t.Helper()
	if got.String() != want {
		t.Errorf("address %s, want %s", got, want)
	}
}
