package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/lab"
)

// agent is one of the fleet: all that an agent says to the API server and hears from it, by its own code and with its
// own connection and token, its ledger and its files for the plugin. Left out are the kernel, that is network
// namespaces and routes, the runtime with NRI, the CNI configuration and what keeps addresses of nodes: no pod has one.
type agent struct {
	f       *fleet
	number  int
	name    string
	podCIDR netip.Prefix
	token   string
	ledgers ledger.Options
	network *ledger.Network

	mu        sync.Mutex
	sandboxes map[string]cri.Sandbox
	keeper    *podip.Keeper // nil while the agent is away
	end       func()

	watches atomic.Int64 // begun since the agent's start
}

// watchesOfAgent are those of the installation, RetainedIPs, the node's pods, the audit and PodIPs.
const watchesOfAgent = 5

func (f *fleet) newAgent(i int) (*agent, error) {
	a := &agent{f: f, number: i, name: fakeNode(i), sandboxes: map[string]cri.Sandbox{},
		podCIDR: netip.PrefixFrom(addrFrom(podCIDRs, i<<8), 24)}
	dir := filepath.Join(f.dir, a.name)
	a.ledgers = ledger.Options{StateDir: filepath.Join(dir, "state"), Clock: ledger.SystemClock{}}
	r, err := ledger.NewRange(a.podCIDR, netip.Addr{}, netip.Addr{}, netip.Addr{})
	a.network = &ledger.Network{Name: "pods", DataDir: filepath.Join(dir, "pods"), Ranges: []ledger.RangeSet{{r}}}
	return a, errors.Join(err, os.MkdirAll(a.ledgers.StateDir, 0o755))
}

// start starts the agent. It is up once it has begun its watches.
func (a *agent) start(ctx context.Context) error {
	config, idle, err := a.config()
	if err != nil {
		return err
	}
	api, err := apiserver.New(config, a.name, podip.AddToScheme)
	if err != nil {
		return err
	}
	log, registry := slog.New(&a.f.complaints), prometheus.NewRegistry()
	publisher := retainedip.New(retainedip.Options{API: api, Node: a.name, NamespaceGrace: time.Hour, Log: log,
		Registry: registry, Release: func(retainedip.Name, []ledger.Key, func()) {}})
	follower, err := installation.New(config, lab.SystemNamespace, log)
	if err != nil {
		return err
	}
	keeper := podip.New(podip.Options{
		API: api, Node: a.name, Ledgers: a.ledgers, Runtime: a, Log: log, Registry: registry,
		Kernel: &podip.Kernel{
			Observe: func(context.Context, hostnet.Question) (*hostnet.View, error) { return &hostnet.View{}, nil },
			Lives:   func(ledger.Netns) (bool, error) { return true, nil },
			Down:    func(ledger.Netns) error { return nil },
			Routes:  routes{a},
		},
	})
	ctx, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	for _, loop := range []func(context.Context){publisher.Run, follower.Run, keeper.Run, func(ctx context.Context) {
		for ctx.Err() == nil {
			if s := follower.State(); s.Known {
				keeper.SetRouted(s.Routed)
				keeper.SetPools(s.Pools)
			}
			select {
			case <-ctx.Done():
			case <-follower.Changed():
			}
		}
	}} {
		all.Go(func() { loop(ctx) })
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.keeper, a.end = keeper, func() {
		stop()
		all.Wait()
		idle()
	}
	return nil
}

func (a *agent) stop() {
	a.mu.Lock()
	end := a.end
	a.keeper, a.end = nil, nil
	a.mu.Unlock()
	if end != nil {
		end()
	}
	a.watches.Store(0)
}

// config is how the agent reaches the API server: with one connection for all its clients, as of a process of its own.
func (a *agent) config() (config *rest.Config, idle func(), err error) {
	admin := a.f.RESTConfig()
	tls, err := rest.TLSConfigFor(admin)
	if err != nil {
		return nil, nil, err
	}
	own := utilnet.SetTransportDefaults(&http.Transport{TLSClientConfig: tls, DialContext: admin.Dial})
	return &rest.Config{Host: admin.Host, BearerToken: a.token, Transport: line{own, a}}, own.CloseIdleConnections, nil
}

// line is an agent's connection. It notes what the agent asks.
type line struct {
	http.RoundTripper
	a *agent
}

func (l line) RoundTrip(r *http.Request) (*http.Response, error) {
	f := l.a.f
	f.requests.Add(1)
	watches := strings.Contains(r.URL.RawQuery, "watch=true")
	if r.Method == http.MethodPatch && r.GetBody != nil {
		if rest, ok := strings.CutPrefix(r.URL.Path, "/apis/stayput.io/v1alpha1/podips/"); ok {
			l.a.says(strings.TrimSuffix(rest, "/status"), r)
		}
	}
	answer, err := l.RoundTripper.RoundTrip(r)
	switch {
	case err != nil:
		f.failed.Add(1)
	case answer.StatusCode >= http.StatusBadRequest && answer.StatusCode != http.StatusNotFound:
		f.refused.Add(1)
	case watches:
		l.a.watches.Add(1)
	}
	return answer, err
}

// says notes that other nodes are to route an address to this one, if the agent says so.
func (a *agent) says(name string, r *http.Request) {
	addr, err := netip.ParseAddr(name)
	body, failed := r.GetBody()
	if err != nil || failed != nil {
		return
	}
	var o struct{ Status stayputv1alpha1.PodIPStatus }
	if json.NewDecoder(body).Decode(&o) == nil && o.Status.PodCIDR == a.podCIDR.String() {
		a.f.moves.begin(addr, a.podCIDR)
	}
}

// routes takes the place of the agent's table of routes, and counts its changes.
type routes struct{ a *agent }

func (r routes) Run(ctx context.Context)   { <-ctx.Done() }
func (r routes) SetNetwork([]netip.Prefix) {}
func (r routes) Routes() int               { return 0 }
func (r routes) Delete(netip.Addr)         { r.a.f.events.Add(1) }
func (r routes) Set(all map[netip.Addr]route.Place) {
	for addr, p := range all {
		r.a.f.moves.saw(addr, p.PodCIDR, r.a.number)
	}
}

func (r routes) Put(addr netip.Addr, p route.Place) {
	r.a.f.events.Add(1)
	r.a.f.moves.saw(addr, p.PodCIDR, r.a.number)
}

// Sandboxes, Netns, Stop and PID make it a [podip.Runtime].
func (a *agent) Sandboxes(context.Context) (map[string]cri.Sandbox, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.sandboxes), nil
}

func (a *agent) Netns(context.Context, string) (string, error) { return "", nil }
func (a *agent) Stop(context.Context, string) error            { return nil }
func (a *agent) PID() int                                      { return os.Getpid() }

func sandboxOf(pod *corev1.Pod) cri.Sandbox {
	return cri.Sandbox{ID: string(pod.UID), Ready: true, Annotations: pod.Annotations,
		Pod: ledger.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID)}}
}

// add is what the runtime and the plugin do to start a pod's sandbox. It returns the pod's address of the pool.
func (a *agent) add(pod *corev1.Pod) (netip.Addr, error) {
	s, text := sandboxOf(pod), pod.Annotations[stayputv1alpha1.AnnotationAddresses]
	var addr netip.Addr
	if text != "" {
		var given []pool.Address
		if err := json.Unmarshal([]byte(text), &given); err != nil || len(given) != 1 {
			return addr, fmt.Errorf("pod %s/%s has the addresses %q: %w", pod.Namespace, pod.Name, text, err)
		}
		addr = given[0].Prefix.Addr()
		_, err := ledger.New(a.network, a.ledgers).Add(ledger.AddRequest{
			Attachment: ledger.Attachment{ContainerID: s.ID, IfName: ledger.PodInterface}, Pod: s.Pod,
			Pool: []netip.Addr{addr}, PoolText: text,
		})
		if err != nil {
			return addr, err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sandboxes[s.ID] = s
	return addr, nil
}

// remove is the end of a pod's sandbox.
func (a *agent) remove(pod *corev1.Pod) error {
	s := sandboxOf(pod)
	_, err := ledger.New(a.network, a.ledgers).Del(ledger.DelRequest{
		Attachment: ledger.Attachment{ContainerID: s.ID, IfName: ledger.PodInterface}, Pod: s.Pod})
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.sandboxes, s.ID)
	return err
}

// look has the agent look at a pod, as NRI does.
func (a *agent) look(pod *corev1.Pod, stops bool) {
	a.mu.Lock()
	keeper := a.keeper
	a.mu.Unlock()
	keeper.Look(sandboxOf(pod).Pod, pod.Annotations, stops)
}

// moves are the changes of routes that all agents are to learn.
type moves struct {
	mu     sync.RWMutex
	agents int // that are there
	all    map[netip.Addr]*move
	lag    []float64 // ms, of every hundredth agent or more
	last   []float64 // ms, until all agents had it
}

// move is an address that is at another node.
type move struct {
	to   netip.Prefix
	at   time.Time // when the node's agent said so
	seen []atomic.Uint64
	left atomic.Int64
}

// reset forgets all moves. So many agents are there.
func (m *moves) reset(agents int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all, m.agents, m.lag, m.last = map[netip.Addr]*move{}, agents, nil, nil
}

func (m *moves) begin(addr netip.Addr, to netip.Prefix) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if was := m.all[addr]; was == nil || was.to != to {
		is := &move{to: to, at: time.Now(), seen: make([]atomic.Uint64, scaleNodes/64+1)}
		is.left.Store(int64(m.agents))
		m.all[addr] = is
	}
}

func (m *moves) saw(addr netip.Addr, to netip.Prefix, agent int) {
	m.mu.RLock()
	is, every := m.all[addr], max(1, m.agents/100)
	m.mu.RUnlock()
	if is == nil || is.to != to || is.seen[agent/64].Or(1<<(agent%64))&(1<<(agent%64)) != 0 {
		return
	}
	took := time.Since(is.at).Seconds() * 1e3
	left := is.left.Add(-1)
	if left > 0 && agent%every != 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if agent%every == 0 {
		m.lag = append(m.lag, took)
	}
	if left == 0 {
		m.last = append(m.last, took)
	}
}

// left is how many moves some agent has not learnt of.
func (m *moves) left() (n int) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, is := range m.all {
		if is.left.Load() > 0 {
			n++
		}
	}
	return n
}

// complaints counts what agents warn of. It is a [slog.Handler].
type complaints struct {
	mu  sync.Mutex
	all map[string]int
}

func (c *complaints) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn
}
func (c *complaints) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *complaints) WithGroup(string) slog.Handler      { return c }

func (c *complaints) Handle(_ context.Context, r slog.Record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[r.Message]++
	if n := c.all[r.Message]; n&(n-1) == 0 { // the first, and ever fewer
		text := r.Message
		r.Attrs(func(a slog.Attr) bool {
			text += " " + a.String()
			return true
		})
		say("fleet: an agent warns for the %d. time: %.300s", n, text)
	}
	return nil
}
