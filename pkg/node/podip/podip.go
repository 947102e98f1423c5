// Package podip is the agent's half of pools: addresses that belong to a pod and not to its node. It names the node in
// the PodIPs of its pods, then lets the plugin give the addresses, and tells the cluster once pods will never have them
// again.
//
// # What it promises
//
// A pod has an address of a pool only while its PodIP names this node: the plugin gives what is granted, and a grant is
// finished after that write (package grants, pool.MayName).
//
// What it tells the cluster is a fact. That a pod has ended it says only once its grant is revoked (ledger.Revoke), and
// it has no address in a ledger whose network namespace is there, no sandbox that runs, and none of its addresses is
// configured in a namespace of the node, mounted or kept by a process. An error of the runtime, the API server or a
// file means wait, and is reported on /readyz. It may be killed between any two of its writes: each is made again, or
// was enough.
//
// It decides nothing: [pool.NextAction] does. Every fact that it depends on is read past all caches, is good for
// pool.ReadFor, and each write is bound to what was read. Nobody's annotation is believed. While the cluster has no
// pool it watches and writes nothing.
//
// # Who knows what
//
// Each loop is a type with its own state; none touches the fields of another.
//
//	podip.go    Keeper: wiring
//	served.go   servedPools: which pools there are
//	pods.go     podTable: what is known of pods, and which are due
//	follow.go   listing, follower: the watch of the node's pods, and what the plugin is told of the pools
//	discover.go discoverer: pods that no watch brings
//	check.go    checker: what is done about a pod that is due
//	status.go   what is reported of it
//	report.go   reporter: the PodIPAudit, and the node's reports
//	routed.go   router: where routed addresses are, for package route
//	sight.go    machine: what is on the node
//	trouble.go  troubles: what does not work
//	metrics.go  what is counted
//	client.go   the API server
//
// Locks are taken alone, but for that of podTable, which is taken before that of listing.
package podip

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/node/wake"
)

// Runtime is the container runtime, a *cri.Client.
type Runtime interface {
	Sandboxes(ctx context.Context) (map[string]cri.Sandbox, error)
	Netns(ctx context.Context, id string) (string, error)
	Stop(ctx context.Context, id string) error
	PID() int
}

// Options are what a Keeper works with.
type Options struct {
	API       *apiserver.Client // made with AddToScheme
	Node      string            // its name in the cluster
	Ledgers   ledger.Options
	NetnsDirs []string // where namespaces are mounted by name
	Runtime   Runtime
	Log       *slog.Logger
	Registry  prometheus.Registerer // of the metrics
	// Subnets returns the ranges from which pods of this node have their addresses, if its Node has no podCIDR. A nil
	// Subnets means none.
	Subnets func() []netip.Prefix
	// CannotServe says why the node's network can have no addresses of pools of a mode. It returns an empty string if it
	// can or if that is not known. A nil CannotServe means that it can.
	CannotServe func(mode v1alpha1.PodIPPoolMode) string
	// Serves reports whether pods that start now have their eth0 from the plugin. If not, no pod has an address of a pool
	// only because it runs. A nil Serves means that they have.
	Serves func() bool
	// Bridge returns the name of the bridge that pods of a network are on, empty if they are on none.
	Bridge func(network string) string
	// Watched does work of a loop, and notices if that never ends. A nil Watched only does it.
	Watched func(loop string, work func())
	// Kernel is nil for that of the node.
	Kernel *Kernel
}

// Kernel is what a Keeper asks and tells the node's kernel. A benchmark that runs very many Keepers on one machine has
// its own.
type Kernel struct {
	Observe func(context.Context, hostnet.Question) (*hostnet.View, error) // [hostnet.Observe]
	Lives   func(ledger.Netns) (bool, error)                               // [hostnet.Lives]
	Down    func(ledger.Netns) error                                       // [hostnet.Down]
	Routes  Table
}

// Table is the routes of the node, a [route.Table].
type Table interface {
	Run(ctx context.Context)
	Set(places map[netip.Addr]route.Place)
	Put(a netip.Addr, p route.Place)
	Delete(a netip.Addr)
	SetNetwork(all []netip.Prefix)
	Routes() int
}

// Keeper is the agent's half of pools. Its methods may be called from any goroutine; none but Run waits. It wires the
// loops; each loop has its own state and lock.
type Keeper struct {
	node    string
	ledgers ledger.Options
	grants  grants.Dir
	log     *slog.Logger

	// What the loops share.
	metrics  *metrics
	troubles *troubles
	served   *servedPools
	listing  *listing
	pods     *podTable
	machine  *machine

	// The loops.
	follower   *follower
	discoverer *discoverer
	checker    *checker
	reporter   *reporter
	router     *router
}

// New returns a Keeper that does nothing before Run.
func New(o Options) *Keeper {
	k := newKeeper(o, &server{o.API, o.Node})
	if o.Kernel != nil {
		k.router.table = o.Kernel.Routes
	} else {
		k.router.table = route.New(route.Options{Bound: k.router.here, Note: k.troubles.note})
	}
	o.Registry.MustRegister(k.metrics)
	return k
}

// newKeeper returns a Keeper that routes nothing.
func newKeeper(o Options, api api) *Keeper {
	k := &Keeper{node: o.Node, ledgers: o.Ledgers, grants: o.Ledgers.Grants(), log: o.Log}
	k.metrics = newMetrics(k)
	k.troubles = &troubles{log: o.Log, failed: k.metrics.failed, now: map[string]string{}}
	k.served = &servedPools{log: o.Log, changed: wake.New()}
	k.listing = &listing{}
	k.pods = &podTable{listing: k.listing, log: o.Log}
	k.machine = newMachine(o)

	discoverNow, reportNow := wake.New(), wake.New()
	k.follower = &follower{
		node: o.Node, api: api, grants: k.grants, served: k.served, pods: k.pods, listing: k.listing,
		troubles: k.troubles, listed: []wake.Signal{discoverNow, reportNow},
	}
	k.discoverer = &discoverer{
		node: o.Node, api: api, grants: k.grants, pods: k.pods, listing: k.listing, machine: k.machine,
		troubles: k.troubles, now: discoverNow,
	}
	k.reporter = &reporter{
		node: o.Node, api: api, ledgers: o.Ledgers, log: o.Log, pods: k.pods, listing: k.listing,
		machine: k.machine, troubles: k.troubles, now: reportNow, cannotServe: o.CannotServe,
	}
	if o.CannotServe == nil {
		k.reporter.cannotServe = func(v1alpha1.PodIPPoolMode) string { return "" }
	}
	k.router = newRouter(o)
	k.router.api, k.router.served, k.router.pods, k.router.machine = api, k.served, k.pods, k.machine
	k.router.reporter, k.router.troubles = k.reporter, k.troubles
	k.reporter.recalled = func() {
		k.listing.repeat()
		k.router.doubtPlaces()
	}
	k.checker = &checker{
		node: o.Node, api: api, ledgers: o.Ledgers, grants: k.grants, log: o.Log, runtime: o.Runtime, serves: o.Serves,
		pods: k.pods, reporter: k.reporter, machine: k.machine, router: k.router, troubles: k.troubles,
	}
	return k
}

// SetPools says what pools the cluster has, as the installation says it, empty if it has none.
func (k *Keeper) SetPools(text string) { k.served.set(text) }

// SetRouted says whether the cluster has a pool of mode Routed. Once it has none, the routes that are there stay.
func (k *Keeper) SetRouted(enabled bool) { k.router.enable(enabled) }

// Look queues a pod: its sandbox has started or, if stops is true, stops or has gone, which tells nothing of a pod that
// is not known.
func (k *Keeper) Look(pod ledger.Pod, annotations map[string]string, stops bool) {
	if k != nil && grants.ValidPodUID(pod.UID) == nil {
		k.pods.look(pod, annotations, stops)
	}
}

// Conflict notes that a pod could not start, because another machine on the link has an address of it. If the pod is
// not known yet, the next ADD says so again.
func (k *Keeper) Conflict(e ledger.Event) {
	if k != nil && e.MAC != "" {
		k.pods.conflict(e.Pod.UID, e.MAC, e.Addrs)
	}
}

// Trouble is why not all is done, for people, empty if it is.
func (k *Keeper) Trouble() string {
	if k == nil {
		return ""
	}
	return k.troubles.String()
}

// Run works while the cluster has a pool, until ctx is done.
func (k *Keeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		pools, heard := k.served.get()
		var retry <-chan time.Time
		switch {
		case pools != nil:
			k.log.Info("Found pools in the cluster", "node", k.node)
			k.serve(ctx)
			continue
		case heard:
			err := k.follower.tellServed()
			if k.troubles.note("served", err); err != nil {
				retry = time.After(retryLast)
			}
		}
		select {
		case <-ctx.Done():
		case <-k.served.changed:
		case <-retry:
		}
	}
}

// servedAgain is how often the agent checks that what the plugin was told is still there.
const servedAgain = 10 * time.Second

// serve works until the cluster has no pool or ctx is done.
func (k *Keeper) serve(ctx context.Context) {
	// Until the plugin knows which node this is, it probes for more addresses than it need.
	// What another process has begun is begun again.
	k.troubles.note("grants", k.grants.EndPending())
	k.troubles.note("node", k.grants.PutNode(k.node))
	ctx, cancel := context.WithCancel(ctx)
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryLast))
	select {
	case <-k.served.changed: // the list of pods begins with it
	default:
	}
	k.listing.reset()
	k.reporter.reset()
	k.metrics.serves()
	k.pods.begin(queue)
	var wg sync.WaitGroup
	for _, loop := range []func(context.Context){
		k.follower.run, k.reporter.followAudit, k.reporter.run, k.reporter.learnLink, k.discoverer.run, k.discoverer.sweeps,
		k.router.run,
	} {
		wg.Go(func() { loop(ctx) })
	}
	for range workers {
		wg.Go(func() { k.checker.run(ctx, queue) })
	}
	k.tellServed(ctx)
	k.pods.end()
	cancel()
	queue.ShutDown()
	wg.Wait()
	k.troubles.clear()
}

// tellServed tells the plugin and the loops which pools there are, until there are none or ctx is done.
func (k *Keeper) tellServed(ctx context.Context) {
	again := time.NewTicker(servedAgain)
	defer again.Stop()
	for {
		k.troubles.note("served", k.follower.tellServed())
		if pools, _ := k.served.get(); pools == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-k.served.changed:
			k.router.relist()
		case <-again.C:
		}
	}
}
