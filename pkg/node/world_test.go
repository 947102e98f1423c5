package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/pkg/ledger"
)

// inside tells the test binary that it runs in its own namespaces.
const inside = "STAYPUT_TEST_INSIDE"

// TestMain runs the tests in namespaces of their own for processes, mounts and network: the agent looks at
// every process of the machine, refuses to judge where it may not, and changes the machine's neighbours.
func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "mounting /proc:", err)
			os.Exit(1)
		}
		if err := loopbackUp(); err != nil { // the tests' API server listens there
			fmt.Fprintln(os.Stderr, "loopback:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNET, Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "the tests make namespaces, as root:", err)
		os.Exit(1)
	}
}

func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// world is a node in temporary directories: real ledgers, real files, real network namespaces and the real
// /proc. Only the runtime is a small server: the real one cannot be made to list what a test needs, to change
// that between two calls or to fail. Its addresses are of documentation prefixes, which nobody else uses.
type world struct {
	t       *testing.T
	dir     string
	clock   *fakeClock
	runtime *fakeRuntime
	said    *recorder
	a       *Agent
	net     *ledger.Network
	ledger  *ledger.Ledger
}

func newWorld(t *testing.T) *world {
	t.Helper()
	// Short: a socket's path has 108 bytes.
	dir, err := os.MkdirTemp("", "node-")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	w := &world{t: t, dir: dir, clock: newFakeClock(), said: &recorder{}}
	w.runtime = startRuntime(t, filepath.Join(dir, "cri.sock"))
	for _, d := range []string{"netns", "net.d", "cni/results"} {
		check(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	w.a = w.newAgent()
	w.net = network(t, "pods", filepath.Join(dir, "networks"), "192.0.2.0/24")
	w.ledger = ledger.New(w.net, w.a.ledgers)
	return w
}

func (w *world) newAgent() *Agent {
	w.t.Helper()
	a, err := New(Options{
		StateDir: filepath.Join(w.dir, "state"), CNICacheDir: filepath.Join(w.dir, "cni"), CNIConfDir: filepath.Join(w.dir, "net.d"),
		NetnsDirs: []string{filepath.Join(w.dir, "netns")}, CRISocket: filepath.Join(w.dir, "cri.sock"),
		Clock: w.clock, Publisher: w.said,
		Log: slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	check(w.t, err)
	a.markTimeout = time.Hour // a slow disk is no matter here
	w.t.Cleanup(func() { a.cri.close(); a.watch.close() })
	return a
}

func network(t *testing.T, name, dataDir string, subnets ...string) *ledger.Network {
	t.Helper()
	n := &ledger.Network{Name: name, DataDir: dataDir}
	for _, s := range subnets {
		r, err := ledger.NewRange(netip.MustParsePrefix(s), netip.Addr{}, netip.Addr{}, netip.Addr{})
		check(t, err)
		n.Ranges = append(n.Ranges, ledger.RangeSet{r})
	}
	return n
}

// fakeClock stands still until a test moves it.
type fakeClock struct {
	mu  sync.Mutex
	now ledger.Instant
}

func newFakeClock() *fakeClock {
	return &fakeClock{now: ledger.Instant{Wall: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Boot: time.Hour, BootID: "boot-1"}}
}

func (c *fakeClock) Now() (ledger.Instant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now, nil
}

func (c *fakeClock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now.Wall, c.now.Boot = c.now.Wall.Add(d), c.now.Boot+d
}

// recorder is a Publisher.
type recorder struct {
	mu      sync.Mutex
	events  []ledger.Event
	claims  [][]Claim
	settled [][]string
}

func (r *recorder) PublishEvent(e ledger.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) PublishClaims(p Promises) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claims = append(r.claims, p.Claims)
	r.settled = append(r.settled, p.Settled)
}

func (r *recorder) reasons() (all []ledger.EventReason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		all = append(all, e.Reason)
	}
	return all
}

// fakeRuntime is the part of CRI that the agent calls.
type fakeRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	mu        sync.Mutex
	sandboxes []*runtimeapi.PodSandbox
	netns     map[string]string
	ips       map[string][]string // of a sandbox
	config    string              // as containerd says it; empty: it is another runtime
	err       error
	// says, where it is set, may keep the status of a sandbox back; verbose is asked for its namespaces.
	says func(id string, verbose bool) error
}

func startRuntime(t *testing.T, socket string) *fakeRuntime {
	t.Helper()
	l, err := net.Listen("unix", socket)
	check(t, err)
	r := &fakeRuntime{netns: map[string]string{}, ips: map[string][]string{}}
	s := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(s, r)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return r
}

func (r *fakeRuntime) ListPodSandbox(context.Context, *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &runtimeapi.ListPodSandboxResponse{Items: r.sandboxes}, r.err
}

func (r *fakeRuntime) PodSandboxStatus(_ context.Context, q *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	if r.says != nil {
		if err := r.says(q.PodSandboxId, q.Verbose); err != nil {
			return nil, err
		}
	}
	network := &runtimeapi.PodSandboxNetworkStatus{}
	for i, ip := range r.ips[q.PodSandboxId] {
		if i == 0 {
			network.Ip = ip
			continue
		}
		network.AdditionalIps = append(network.AdditionalIps, &runtimeapi.PodIP{Ip: ip})
	}
	return &runtimeapi.PodSandboxStatusResponse{
		Status: &runtimeapi.PodSandboxStatus{Id: q.PodSandboxId, Network: network},
		Info:   map[string]string{"info": fmt.Sprintf(`{"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":%q}]}}}`, r.netns[q.PodSandboxId])},
	}, nil
}

func (r *fakeRuntime) Status(ctx context.Context, q *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	if r.config == "" {
		return r.UnimplementedRuntimeServiceServer.Status(ctx, q)
	}
	return &runtimeapi.StatusResponse{Info: map[string]string{"config": r.config}}, nil
}

// runs makes the runtime list a running sandbox.
func (r *fakeRuntime) runs(s Sandbox) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.netns[s.ID] = s.Netns
	r.sandboxes = append(r.sandboxes, &runtimeapi.PodSandbox{
		Id: s.ID, State: runtimeapi.PodSandboxState_SANDBOX_READY, Annotations: s.Annotations,
		Metadata: &runtimeapi.PodSandboxMetadata{Namespace: s.Pod.Namespace, Name: s.Pod.Name, Uid: s.Pod.UID},
	})
}

func (r *fakeRuntime) forgets(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sandboxes = slices.DeleteFunc(r.sandboxes, func(s *runtimeapi.PodSandbox) bool { return s.Id == id })
}

func (r *fakeRuntime) fails(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

var errRuntime = errors.New("the runtime is upset")

// netns makes a network namespace, mounted under a name as a runtime does it.
func (w *world) netns(name string) string {
	w.t.Helper()
	path := filepath.Join(w.dir, "netns", name)
	check(w.t, os.WriteFile(path, nil, 0o644))
	done := make(chan error)
	home, err := os.Open("/proc/self/ns/net")
	check(w.t, err)
	defer home.Close()
	go func() {
		done <- inNetns(home, func() error { // which takes the thread back
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		})
	}()
	check(w.t, <-done)
	w.t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// in runs f in the namespace at path.
func in(t *testing.T, path string, f func() error) {
	t.Helper()
	ns, err := openNetns(path)
	check(t, err)
	defer ns.Close()
	check(t, inNetns(ns, f))
}

// configure gives the namespace an address, as the main plugin does.
func configure(t *testing.T, netns string, addrs ...netip.Addr) {
	t.Helper()
	in(t, netns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice())}); err != nil {
				return err
			}
		}
		return nil
	})
}

// process runs a process in the namespace until the returned function ends it.
func process(t *testing.T, netns string) (kill func()) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	in(t, netns, cmd.Start)
	kill = sync.OnceFunc(func() { cmd.Process.Kill(); cmd.Wait() })
	t.Cleanup(kill)
	return kill
}

var ten = map[string]string{ledger.AnnotationRetainIP: "10m"}

// sandbox is a sandbox with a namespace of its own.
func (w *world) sandbox(id, pod string, annotations map[string]string) Sandbox {
	w.t.Helper()
	return Sandbox{ID: id, Pod: ledger.Pod{Namespace: "default", Name: pod, UID: "uid-" + id}, Annotations: annotations, Netns: w.netns(id)}
}

// add is the plugin's ADD for a runtime that hands on no annotations.
func (w *world) add(s Sandbox) netip.Addr { return w.addOn(w.ledger, s, "eth0", nil)[0] }

func (w *world) addOn(l *ledger.Ledger, s Sandbox, ifname string, policy *ledger.Policy) []netip.Addr {
	w.t.Helper()
	ns, ok, err := ledger.SystemNetns{}.Identify(s.Netns)
	check(w.t, err)
	if !ok {
		ns = ledger.Netns{}
	}
	r, err := l.Add(ledger.AddRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: ifname}, Pod: s.Pod, Netns: ns, Policy: policy})
	check(w.t, err)
	check(w.t, w.a.spool.Report(r.Events))
	return r.Addrs
}

func (w *world) del(s Sandbox) {
	w.t.Helper()
	_, err := w.ledger.Del(ledger.DelRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: "eth0"}, Pod: s.Pod})
	check(w.t, err)
}

// settle does what is queued.
func (w *world) settle() {
	w.t.Helper()
	for len(w.a.queue.c) > 0 {
		w.a.settle(<-w.a.queue.c)
	}
}

func (w *world) reconcile() error {
	_, err := w.a.reconcile(w.t.Context())
	return err
}

// state of an address; "" if it is free.
func (w *world) state(a netip.Addr) ledger.State {
	w.t.Helper()
	addrs, err := w.ledger.List()
	check(w.t, err)
	for _, ad := range addrs {
		if ad.Addr == a {
			return ad.State
		}
	}
	return ""
}

func (w *world) want(a netip.Addr, state ledger.State) {
	w.t.Helper()
	if got := w.state(a); got != state {
		w.t.Errorf("%s is %q, want %q", a, got, state)
	}
}

func (w *world) wantSaid(reasons ...ledger.EventReason) {
	w.t.Helper()
	if got := w.said.reasons(); !slices.Equal(got, reasons) {
		w.t.Errorf("published %v, want %v", got, reasons)
	}
}

// eventually waits for what another goroutine or the kernel does; patience bounds a test that hangs.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	const patience = 30 * time.Second
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
