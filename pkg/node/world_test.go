package node

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

var check, eventually = must.Do, must.Eventually

// world is a node in temporary directories: real ledgers, real files, real network namespaces and the real
// /proc. Only the runtime is a small server: the real one cannot be made to list what a test needs, to change
// that between two calls or to fail. Its addresses are of documentation prefixes, which nobody else uses.
type world struct {
	t       *testing.T
	dir     string
	clock   *nodetest.Clock
	runtime *nodetest.Runtime
	said    *recorder
	a       *Agent
	net     *ledger.Network
	ledger  *ledger.Ledger
	noNRI   bool // of the next agent
}

func newWorld(t *testing.T) *world {
	t.Helper()
	// Short: a socket's path has 108 bytes.
	dir, err := os.MkdirTemp("", "node-")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	w := &world{t: t, dir: dir, clock: nodetest.NewClock(), said: &recorder{}}
	w.runtime = nodetest.StartRuntime(t, filepath.Join(dir, "cri.sock"))
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
	nri := filepath.Join(w.dir, "nri.sock")
	if w.noNRI {
		nri = ""
	}
	a, err := New(Options{
		StateDir: filepath.Join(w.dir, "state"), CNICacheDir: filepath.Join(w.dir, "cni"), CNIConfDir: filepath.Join(w.dir,
			"net.d"),
		NetnsDirs: []string{filepath.Join(w.dir, "netns")}, CRISocket: filepath.Join(w.dir, "cri.sock"),
		NRISocket: nri,
		Clock:     w.clock, Publisher: w.said,
		Log: slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	check(w.t, err)
	a.queue.policies.hookTimeout = time.Hour // a slow disk is no matter here
	w.t.Cleanup(func() { a.cri.Close(); a.watch.close() })
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

// recorder is a Publisher.
type recorder struct {
	mu      sync.Mutex
	events  []ledger.Event
	claims  [][]retainedip.Claim
	settled [][]string
}

func (r *recorder) PublishEvent(e ledger.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) PublishClaims(p retainedip.Promises) {
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

// netns makes a network namespace, mounted under a name as a runtime does it.
func (w *world) netns(name string) string {
	w.t.Helper()
	return nodetest.Netns(w.t, filepath.Join(w.dir, "netns"), name)
}

// runs makes the runtime list a running sandbox.
func (w *world) runs(s Sandbox) { w.runtime.Run(s.ID, s.Pod, s.Annotations, s.Netns) }

var ten = map[string]string{retention.AnnotationRetainIP: "10m"}

// sandbox is a sandbox with a namespace of its own.
func (w *world) sandbox(id, pod string, annotations map[string]string) Sandbox {
	w.t.Helper()
	return Sandbox{ID: id, Pod: ledger.Pod{Namespace: "default", Name: pod, UID: "uid-" + id}, Annotations: annotations,
		Netns: w.netns(id)}
}

// add is the plugin's ADD for a runtime that hands on no annotations.
func (w *world) add(s Sandbox) netip.Addr { return w.addOn(w.ledger, s, "eth0", nil)[0] }

func (w *world) addOn(l *ledger.Ledger, s Sandbox, ifname string, policy *retention.Policy) []netip.Addr {
	w.t.Helper()
	ns, ok, err := ledger.SystemNetns{}.Identify(s.Netns)
	check(w.t, err)
	if !ok {
		ns = ledger.Netns{}
	}
	r, err := l.Add(ledger.AddRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: ifname}, Pod: s.Pod,
		Netns: ns, Policy: policy})
	check(w.t, err)
	check(w.t, w.a.spool.spool.Report(r.Events))
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
		w.a.queue.policies.apply(<-w.a.queue.c)
	}
}

func (w *world) reconcile() error {
	_, err := w.a.reconciler.reconcile(w.t.Context())
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
