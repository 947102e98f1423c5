// Package podip is the agent's half of pools: addresses that belong to a pod and not to its node. It tells the plugin
// which pods have which addresses, and the cluster which pods of this node have theirs, or will never have them again.
//
// # What it promises
//
// What it tells the cluster is a fact. That a pod is gone it says only once the pod is barred from the node for good
// (ledger.Bar), has no address in a ledger whose network namespace is there, no sandbox that runs, and none of its
// addresses is configured in a namespace of the node, mounted or kept by a process. An error of the runtime, the API
// server or a file means wait, and is said on /readyz. It may be killed between any two of its writes: each is made
// again, or was enough.
//
// What it tells the plugin is a fact, too. It notes durably what pools the cluster has (ledger.Serve), and writes the
// addresses of a pod (ledger.Tell) only if their annotation names the guard under which none but the controller can
// have written it, or if the PodIPs are this pod's. An annotation that neither vouches for says nothing to it.
//
// It decides nothing by itself: [pool.Tend] and [pool.Respond] do. Every question that they depend on is asked past all
// caches. While the cluster has no pool it watches and writes nothing.
//
//	podip.go    the loops
//	served.go   what pools there are, for the plugin
//	pods.go     what is known of pods
//	follow.go   the watches of the node's pods and of the PodIPRoll; the files for the plugin
//	discover.go the pods that no watch brings
//	check.go    what is done about a pod
//	report.go   what is said of it
//	answer.go   the answers to rolls
//	sight.go    what is on the machine
//	routed.go   where routed addresses are: for package route
//	trouble.go  what does not work
//	metrics.go  what is counted
//	client.go   the API server
package podip

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
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
	API       *rest.Config
	Node      string // its name in the cluster
	Ledgers   ledger.Options
	NetnsDirs []string // where namespaces are mounted by name
	Runtime   Runtime
	Log       *slog.Logger
	Registry  prometheus.Registerer // of the metrics
	// PodCIDR returns the prefix of this family by which other nodes route to the pods of this one, the zero Prefix if it
	// is not known. It must not wait. If PodCIDR is nil, that of the Node counts, or the first one of Subnets.
	PodCIDR func(is4 bool) netip.Prefix
	// PodCIDRs asks the API server for those of the Node.
	PodCIDRs func(context.Context) ([]netip.Prefix, error)
	// Subnets returns the ranges from which pods of this node have their addresses, if its Node has no podCIDR. A nil
	// Subnets means none.
	Subnets func() []netip.Prefix
	// CannotRoute says why the node's network can have no routed addresses. It returns an empty string if it can or if
	// that is not known. A nil CannotRoute means that it can.
	CannotRoute func() string
	// Serves reports whether pods that start now have their eth0 from the plugin. If not, no pod has an address of a pool
	// only because it runs. A nil Serves means that they have.
	Serves func() bool
	// Bridge returns the name of the bridge that pods of a network are on, empty if they are on none.
	Bridge func(network string) string
}

// Keeper is the agent's half of pools. Its methods may be called from any goroutine; none but Run waits.
type Keeper struct {
	o       Options
	api     api
	log     *slog.Logger
	metrics *metrics
	table   table // nil: the node routes nothing

	// flannelFile is where flanneld says what its network is.
	flannelFile func() string

	rollNow wake.Signal // there may be something to answer
	// listedNow: all pods of the node were listed.
	listedNow wake.Signal
	// routedChanged: areRouted has.
	routedChanged wake.Signal
	machine       *machine
	served        *servedPools
	writing       sync.Mutex // of files by UID: they are of a list, and of what it was followed by
	troubles      *troubles

	mu sync.Mutex
	// areRouted: some are of mode Routed.
	areRouted bool
	podCIDRs  []netip.Prefix // of this node
	// cannotRoute says why pods here cannot have routed addresses, empty if they can, nil if it is not known yet.
	cannotRoute *string
	// queue has the UIDs of subjects that are due, nil unless Run runs.
	queue    workqueue.TypedRateLimitingInterface[string]
	subjects map[string]*subject
	all      map[string]bool // the UIDs of all pods of the node, by their watch
	// listed: all pods of the node are known, since the epoch was begun. epoch is the one that the roll asks for.
	listed bool
	epoch  int64
	relist context.CancelFunc
	// lost is true if bars of this boot may be lost: the plugin is told of a pod only once its PodIPs say the same.
	lost bool
	// reroute has all routed PodIPs listed again, nil if they are not followed.
	reroute context.CancelFunc
	roll    *v1alpha1.PodIPRoll
	// answered is the round that this node has answered, 0 if it is not known, and when it was found out.
	answered   int64
	answeredAt time.Time
	// saidCannot is what the answer says of cannotRoute.
	saidCannot string
}

// table is a [route.Table].
type table interface {
	Run(ctx context.Context)
	Set(places map[netip.Addr]route.Place)
	Put(a netip.Addr, p route.Place)
	Delete(a netip.Addr)
	SetNetwork(all []netip.Prefix)
	Routes() int
}

// New returns a Keeper that does nothing before Run.
func New(o Options) (*Keeper, error) {
	api, err := newServer(o.API, o.Node)
	if err != nil {
		return nil, err
	}
	k := newKeeper(o, api)
	if o.PodCIDR == nil {
		k.o.PodCIDR = k.ownPodCIDR
	}
	k.table = route.New(route.Options{Bound: k.here, Note: k.troubles.note})
	o.Registry.MustRegister(k.metrics)
	return k, nil
}

func newKeeper(o Options, api api) *Keeper {
	k := &Keeper{
		o: o, api: api, log: o.Log, rollNow: wake.New(),
		listedNow: wake.New(), routedChanged: wake.New(),
	}
	k.metrics = newMetrics(k)
	k.troubles = &troubles{log: o.Log, failed: k.metrics.failed, now: map[string]string{}}
	k.machine = newMachine(o)
	k.served = &servedPools{log: o.Log, changed: wake.New()}
	k.flannelFile = func() string {
		return filepath.Join("/proc", strconv.Itoa(o.Runtime.PID()), "root", flannelSubnet)
	}
	return k
}

// SetPools says what pools the cluster has, as the installation says it, empty if it has none.
func (k *Keeper) SetPools(text string) { k.served.set(text) }

// Run works while the cluster has a pool, until ctx is done.
func (k *Keeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		pools, heard := k.served.get()
		var retry <-chan time.Time
		switch {
		case pools != nil:
			k.log.Info("The cluster has pools", "node", k.o.Node)
			k.serve(ctx)
			continue
		case heard:
			err := k.withdraw()
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

// serve works until the cluster has no pool or ctx is done.
func (k *Keeper) serve(ctx context.Context) {
	// Until the plugin knows which node this is, it probes for more addresses than it need.
	k.troubles.note("node", ledger.TellNode(k.o.Ledgers, k.o.Node))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryLast))
	select {
	case <-k.served.changed: // the list of pods begins with it
	default:
	}
	k.mu.Lock()
	k.queue, k.subjects, k.all, k.listed, k.roll, k.answered, k.epoch = queue, map[string]*subject{},
		map[string]bool{}, false, nil, 0, 0
	k.relist, k.reroute = nil, nil
	k.cannotRoute = nil
	k.metrics.serves()
	k.mu.Unlock()
	var wg sync.WaitGroup
	for _, loop := range []func(context.Context){k.followPods, k.followRoll, k.answers, k.discovers,
		k.sweeps, k.routeLoop} {
		wg.Go(func() { loop(ctx) })
	}
	for range workers {
		wg.Go(func() {
			for k.work(ctx, queue) {
			}
		})
	}
	again := time.NewTicker(servedAgain)
	defer again.Stop()
	for are := true; are; {
		select {
		case <-ctx.Done():
			are = false
			continue
		case <-k.served.changed:
			pools, _ := k.served.get()
			are = pools != nil
			k.mu.Lock()
			if k.reroute != nil {
				k.reroute()
			}
			for _, s := range k.subjects {
				if s.claims != "" {
					s.says(s.claims, k.served.vouchesFor(s.claims))
					s.untold = k.lost && s.claims == ""
					k.enqueue(s)
				}
			}
			k.mu.Unlock()
		case <-again.C:
		}
		k.troubles.note("served", k.tellServed())
	}
	k.mu.Lock()
	k.queue = nil
	k.mu.Unlock()
	cancel()
	queue.ShutDown()
	wg.Wait()
	k.troubles.clear()
}

// Trouble is why not all is done, for people, empty if it is.
func (k *Keeper) Trouble() string {
	if k == nil {
		return ""
	}
	return k.troubles.String()
}
