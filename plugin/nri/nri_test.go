package nri

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/sirupsen/logrus"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
)

// The counterpart in these tests is the runtime's own half of NRI, in this process, as containerd links it.

func TestMain(m *testing.M) {
	logrus.SetOutput(io.Discard) // of the runtime's half
	os.Exit(m.Run())
}

// runtime is a container runtime as far as NRI is concerned. Its half of NRI only lets connections go when its
// process ends; so there is a socket in front of it whose connections can be cut.
type runtime struct {
	socket string
	pods   []*api.PodSandbox
	r      *adaptation.Adaptation
	front  net.Listener
	mu     sync.Mutex
	conns  []net.Conn
}

func newRuntime(t *testing.T, pods ...*api.PodSandbox) *runtime {
	t.Helper()
	dir, err := os.MkdirTemp("", "nri-") // short: a socket's path has 108 bytes
	must.Do(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	rt := &runtime{socket: filepath.Join(dir, "nri.sock"), pods: pods}
	t.Cleanup(rt.stop)
	return rt
}

func (rt *runtime) start(t *testing.T) {
	t.Helper()
	dir := filepath.Dir(rt.socket)
	r, err := adaptation.New("test", "1.0",
		func(ctx context.Context, cb adaptation.SyncCB) error {
			_, err := cb(ctx, rt.pods, nil)
			return err
		},
		func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil },
		adaptation.WithSocketPath(rt.socket+".inner"),
		adaptation.WithPluginPath(filepath.Join(dir, "plugins")),
		adaptation.WithPluginConfigPath(filepath.Join(dir, "conf.d")))
	must.Do(t, err)
	must.Do(t, r.Start())
	front, err := net.Listen("unix", rt.socket)
	must.Do(t, err)
	rt.r, rt.front = r, front
	go rt.relay(front)
}

func (rt *runtime) relay(front net.Listener) {
	for {
		outer, err := front.Accept()
		if err != nil {
			return
		}
		inner, err := net.Dial("unix", rt.socket+".inner")
		if err != nil {
			outer.Close()
			continue
		}
		rt.mu.Lock()
		rt.conns = append(rt.conns, outer, inner)
		rt.mu.Unlock()
		for _, ends := range [][2]net.Conn{{outer, inner}, {inner, outer}} {
			go func() {
				io.Copy(ends[0], ends[1])
				ends[0].Close()
				ends[1].Close()
			}()
		}
	}
}

// settled returns when the plugin that was synchronized is among those that are called.
func (rt *runtime) settled() { rt.r.BlockPluginSync().Unblock() }

func (rt *runtime) stop() {
	if rt.r == nil {
		return
	}
	rt.front.Close()
	rt.r.Stop()
	rt.r = nil
	rt.mu.Lock()
	defer rt.mu.Unlock()
	for _, c := range rt.conns {
		c.Close()
	}
	rt.conns = nil
}

// call is one call of the Handler.
type call struct {
	what string
	all  []Sandbox
}

// recorder is a Handler.
type recorder struct {
	calls chan call
	slow  chan struct{} // non-nil: RunPodSandbox returns when it is closed
}

func newRecorder() *recorder { return &recorder{calls: make(chan call, 100)} }

func (r *recorder) RunPodSandbox(s Sandbox) {
	r.calls <- call{"run", []Sandbox{s}}
	if r.slow != nil {
		<-r.slow
	}
}
func (r *recorder) StopPodSandbox(s Sandbox)   { r.calls <- call{"stop", []Sandbox{s}} }
func (r *recorder) RemovePodSandbox(s Sandbox) { r.calls <- call{"remove", []Sandbox{s}} }
func (r *recorder) Synchronize(all []Sandbox)  { r.calls <- call{"synchronize", all} }
func (r *recorder) Connected(up bool) {
	if up {
		r.calls <- call{what: "up"}
	} else {
		r.calls <- call{what: "down"}
	}
}

// patience bounds a test that hangs; it is no measure of anything.
const patience = 20 * time.Second

// want waits for these calls, in any order: the runtime synchronizes while the plugin learns that it is connected.
func (r *recorder) want(t *testing.T, whats ...string) map[string]call {
	t.Helper()
	got := map[string]call{}
	for range whats {
		select {
		case c := <-r.calls:
			got[c.what] = c
		case <-time.After(patience):
			t.Fatalf("got %v, want %v", got, whats)
		}
	}
	for _, w := range whats {
		if _, ok := got[w]; !ok {
			t.Fatalf("got %v, want %v", got, whats)
		}
	}
	return got
}

func start(t *testing.T, p *Plugin) (stop func()) {
	t.Helper()
	if p.Log == nil {
		p.Log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { p.Run(ctx); close(done) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(patience):
			t.Error("Run does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// fakeClock passes no time but what Run waits for: it returns at once, and keeps how long it was to be.
type fakeClock struct {
	mu    sync.Mutex
	now   time.Time
	waits []time.Duration
	// hold says which waits do not end.
	hold func(time.Duration) bool
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) After(d time.Duration) <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hold != nil && c.hold(d) {
		return make(chan time.Time)
	}
	c.waits = append(c.waits, d)
	ch := make(chan time.Time, 1)
	ch <- c.now
	return ch
}

var pod = &api.PodSandbox{
	Id: "c1", Name: "web-0", Namespace: "default", Uid: "u1", Annotations: map[string]string{"a": "b"},
	Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "pid"}, {Type: "network", Path: "/run/netns/x"}}},
}

func TestTheHandlerIsToldOfEveryPodAsTheRuntimeDescribesIt(t *testing.T) {
	rt, r := newRuntime(t, pod), newRecorder()
	rt.start(t)
	start(t, &Plugin{Socket: rt.socket, Handler: r})
	synced := r.want(t, "up", "synchronize")["synchronize"]
	if len(synced.all) != 1 || synced.all[0].ID != "c1" {
		t.Errorf("synchronized with %v", synced.all)
	}
	rt.settled()
	ctx := t.Context()
	must.Do(t, rt.r.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: pod}))
	must.Do(t, rt.r.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: pod}))
	must.Do(t, rt.r.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: pod}))
	got := r.want(t, "run", "stop", "remove")["run"].all[0]
	if got.Pod != (ledger.Pod{Namespace: "default", Name: "web-0", UID: "u1"}) || got.Netns != "/run/netns/x" ||
		got.Annotations["a"] != "b" {
		t.Errorf("got %+v", got)
	}
}

func TestItConnectsAgainToARuntimeThatWasRestarted(t *testing.T) {
	rt, r := newRuntime(t), newRecorder()
	rt.start(t)
	start(t, &Plugin{Socket: rt.socket, Handler: r})
	for range 3 {
		r.want(t, "up", "synchronize")
		rt.settled()
		rt.stop()
		r.want(t, "down")
		rt.start(t) // with a new socket under the same name
	}
	r.want(t, "up", "synchronize")
}

func TestItWaitsForARuntimeThatIsNotThereYet(t *testing.T) {
	rt, r := newRuntime(t), newRecorder()
	start(t, &Plugin{Socket: rt.socket, Handler: r})
	rt.start(t)
	r.want(t, "up", "synchronize")
}

func TestAConnectionThatDropsWhileRegisteringIsAbandoned(t *testing.T) {
	rt, r := newRuntime(t), newRecorder()
	// A runtime that dies after Register and before Configure, as the real one can: here it only ever accepts.
	l, err := net.Listen("unix", rt.socket)
	must.Do(t, err)
	accepted := make(chan net.Conn, 10)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	clock := &fakeClock{}
	start(t, &Plugin{Socket: rt.socket, Handler: r, Clock: clock})
	for range 3 { // each time the watchdog bites
		c := <-accepted
		defer c.Close()
	}
	l.Close() // which removes the socket
	rt.start(t)
	// Real time from here: the fake clock's watchdog bites at once.
	clock.mu.Lock()
	clock.hold = func(d time.Duration) bool { return d == startTimeout }
	clock.mu.Unlock()
	r.want(t, "up", "synchronize")
}

func TestStopEndsARegistrationThatHangs(t *testing.T) {
	rt, r := newRuntime(t), newRecorder()
	l, err := net.Listen("unix", rt.socket)
	must.Do(t, err)
	defer l.Close()
	stop := start(t, &Plugin{Socket: rt.socket, Handler: r})
	c, err := l.Accept()
	must.Do(t, err)
	defer c.Close()
	stop()
}

func TestABackoffGrowsAndIsResetByAStableConnection(t *testing.T) {
	clock := &fakeClock{}
	r := newRecorder()
	socket := filepath.Join(t.TempDir(), "none")
	ctx, cancel := context.WithCancel(t.Context())
	const tries = 10
	clock.hold = func(time.Duration) bool {
		if len(clock.waits) >= tries {
			cancel()
			return true
		}
		return false
	}
	p := &Plugin{Socket: socket, Handler: r, Clock: clock, Log: slog.New(slog.DiscardHandler)}
	p.Run(ctx)
	most := firstBackoff
	for i, w := range clock.waits {
		if w < most/2 || w > most {
			t.Errorf("wait %d is %s, want at most %s and at least half of that", i, w, most)
		}
		most = min(2*most, longestBackoff)
	}
	if most != longestBackoff {
		t.Errorf("after %d tries the longest wait is %s", tries, most)
	}

	// A connection that stands for longer than stable, on the fake clock, and is then lost.
	rt := newRuntime(t)
	rt.start(t)
	clock = &fakeClock{}
	clock.waits = nil
	first := make(chan time.Duration, 1)
	clock.hold = func(d time.Duration) bool {
		if d == startTimeout {
			return true
		}
		select {
		case first <- d:
		default:
		}
		return true
	}
	start(t, &Plugin{Socket: rt.socket, Handler: r, Clock: clock})
	r.want(t, "up", "synchronize")
	clock.mu.Lock()
	clock.now = clock.now.Add(stable)
	clock.mu.Unlock()
	rt.settled()
	rt.stop()
	r.want(t, "down")
	if d := <-first; d > firstBackoff {
		t.Errorf("after a stable connection the first wait is %s", d)
	}
}

func TestASlowHandlerDoesNotFailThePodAndThePluginComesBack(t *testing.T) {
	adaptation.SetPluginRequestTimeout(50 * time.Millisecond)
	t.Cleanup(func() { adaptation.SetPluginRequestTimeout(adaptation.DefaultPluginRequestTimeout) })
	rt, r := newRuntime(t), newRecorder()
	r.slow = make(chan struct{})
	rt.start(t)
	start(t, &Plugin{Socket: rt.socket, Handler: r})
	r.want(t, "up", "synchronize")
	rt.settled()
	if err := rt.r.RunPodSandbox(t.Context(), &api.RunPodSandboxRequest{Pod: pod}); err != nil &&
		!errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the pod failed: %v", err)
	}
	close(r.slow)
	r.want(t, "run", "down", "up", "synchronize")
}

func TestItsNameSuitsTheRuntimesConfiguration(t *testing.T) {
	must.Do(t, api.CheckPluginIndex(Index))
	must.Do(t, api.CheckPluginName(Name))
}
