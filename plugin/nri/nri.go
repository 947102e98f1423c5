// Package nri is the NRI plugin: it keeps a connection to the runtime's NRI socket and hands the pods of every event to
// a Handler. It decides nothing and keeps nothing.
//
// It never holds up a runtime or fails a pod: it answers no event with an error, and a Handler returns within
// milliseconds. While Run runs, a lost connection is made again.
package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/stayput/stayput/pkg/ledger"
)

// The runtime knows the plugin by Name and Index: its configuration would be 10-stayput.conf. Nothing depends on its
// place among other plugins.
const (
	Name  = "stayput"
	Index = "10"
)

// Sandbox is a pod sandbox as the runtime describes it.
type Sandbox struct {
	ID          string // the containerID of CNI
	Pod         ledger.Pod
	Annotations map[string]string
	Netns       string // path; empty for a pod on the host's network and for a pod that has ended
}

// Handler gets the events. The runtime waits for every call, with one lock for the whole node, and drops a plugin that
// takes 2 s: a method must return within milliseconds.
type Handler interface {
	RunPodSandbox(Sandbox)
	StopPodSandbox(Sandbox)
	RemovePodSandbox(Sandbox)
	// Synchronize gets every sandbox at every connection; a sandbox that is being created can be missing.
	Synchronize([]Sandbox)
	// Connected is called when a connection stands and when it is lost.
	Connected(bool)
}

// Clock is what the reconnect loop waits with.
type Clock interface {
	Now() time.Time
	After(time.Duration) <-chan time.Time
}

// SystemClock is the Clock of the machine.
type SystemClock struct{}

func (SystemClock) Now() time.Time                         { return time.Now() }
func (SystemClock) After(d time.Duration) <-chan time.Time { return time.After(d) }

const (
	// startTimeout bounds the registration. The runtime gives up after 5 s, but does not always close the connection.
	startTimeout = 10 * time.Second
	firstBackoff = 100 * time.Millisecond
	// longestBackoff keeps a runtime that was down for an hour from starting pods unseen for long.
	longestBackoff = 5 * time.Second
	// stable is how long a connection must have stood to reset the backoff: a runtime that drops the plugin after
	// every start must not be hammered.
	stable = time.Minute
)

// Plugin is the connection to one runtime.
type Plugin struct {
	Socket  string
	Handler Handler
	Log     *slog.Logger
	Clock   Clock // nil for SystemClock

	up bool // of Run's goroutine
}

// Run connects, and reconnects when the connection is lost, until ctx is done.
func (p *Plugin) Run(ctx context.Context) {
	if p.Clock == nil {
		p.Clock = SystemClock{}
	}
	backoff := firstBackoff
	level := slog.LevelWarn
	for ctx.Err() == nil {
		began := p.Clock.Now()
		err := p.connect(ctx)
		if ctx.Err() != nil {
			return
		}
		lasted := p.Clock.Now().Sub(began)
		if lasted >= stable {
			backoff = firstBackoff
		}
		if p.up {
			p.setUp(false)
			level = slog.LevelWarn
		}
		p.Log.Log(ctx, level, "NRI disconnected, retrying", "socket", p.Socket, "after", backoff, "err", err)
		level = slog.LevelDebug // only the first failure is news
		select {
		case <-ctx.Done():
		case <-p.Clock.After(jitter(backoff)):
		}
		backoff = min(2*backoff, longestBackoff)
	}
}

// jitter keeps plugins of one node from returning in step.
func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

func (p *Plugin) setUp(up bool) {
	p.up = up
	p.Handler.Connected(up)
}

var errLost = errors.New("connection lost")

// connect makes one connection and returns when it is over. Each gets a new stub: a stub whose start failed is
// unusable.
func (p *Plugin) connect(ctx context.Context) error {
	conn, err := (&net.Dialer{Timeout: startTimeout}).DialContext(ctx, "unix", p.Socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	lost := make(chan struct{})
	h := &hooks{handler: p.Handler}
	s, err := stub.New(h,
		stub.WithPluginName(Name), stub.WithPluginIdx(Index), stub.WithConnection(conn),
		stub.WithOnClose(sync.OnceFunc(func() { close(lost) })), stub.WithLogger(logger{p.Log}))
	if err != nil {
		return err
	}
	started := make(chan error, 1)
	go func() { started <- s.Start(ctx) }()
	select {
	case err = <-started:
	case <-p.Clock.After(startTimeout):
		// A Start whose connection dropped between Register and Configure never returns, and the stub offers nothing
		// to end it: both stay behind.
		err = fmt.Errorf("not configured within %s", startTimeout)
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	p.Log.Info("NRI connected", "socket", p.Socket, "nri", s.RuntimeNRIVersion())
	p.setUp(true)
	select {
	case <-lost:
		return errLost
	case <-ctx.Done():
		s.Stop()
		return ctx.Err()
	}
}

// hooks is what the stub calls.
type hooks struct{ handler Handler }

func (h *hooks) Synchronize(
	_ context.Context, pods []*api.PodSandbox, _ []*api.Container,
) ([]*api.ContainerUpdate, error) {
	all := make([]Sandbox, len(pods))
	for i, pod := range pods {
		all[i] = sandbox(pod)
	}
	h.handler.Synchronize(all)
	return nil, nil
}

func (h *hooks) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	h.handler.RunPodSandbox(sandbox(pod))
	return nil
}

func (h *hooks) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	h.handler.StopPodSandbox(sandbox(pod))
	return nil
}

func (h *hooks) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	h.handler.RemovePodSandbox(sandbox(pod))
	return nil
}

func sandbox(pod *api.PodSandbox) Sandbox {
	s := Sandbox{
		ID:          pod.GetId(),
		Pod:         ledger.Pod{Namespace: pod.GetNamespace(), Name: pod.GetName(), UID: pod.GetUid()},
		Annotations: pod.GetAnnotations(),
	}
	for _, ns := range pod.GetLinux().GetNamespaces() {
		if ns.GetType() == "network" {
			s.Netns = ns.GetPath()
		}
	}
	return s
}

// logger is the stub's log. Its steps are of interest only to find a fault in it.
type logger struct{ log *slog.Logger }

func (l logger) at(ctx context.Context, level slog.Level, format string, args []any) {
	if l.log.Enabled(ctx, level) {
		l.log.Log(ctx, level, "NRI stub: "+fmt.Sprintf(format, args...))
	}
}

func (l logger) Debugf(ctx context.Context, format string, args ...any) {
	l.at(ctx, slog.LevelDebug, format, args)
}
func (l logger) Infof(ctx context.Context, format string, args ...any) {
	l.at(ctx, slog.LevelDebug, format, args)
}
func (l logger) Warnf(ctx context.Context, format string, args ...any) {
	l.at(ctx, slog.LevelWarn, format, args)
}
func (l logger) Errorf(ctx context.Context, format string, args ...any) {
	l.at(ctx, slog.LevelWarn, format, args)
}
