// Package node is the agent of one node: the loops around the ledgers of its networks that a CNI plugin, which
// only lives for one command, cannot do.
//
// # What it promises
//
//   - No pod needs it to start or to stop. It is away, late or restarted, and nothing is lost but time: what
//     it keeps is in the files of pkg/ledger, and every loop starts from the world as it is.
//   - The runtime never waits for more than one promise, and half a second: RunPodSandbox queues the rest.
//   - Nothing is freed on ignorance. A leaked address is freed only after two lists of the runtime without its sandbox,
//     a grace period apart, and one view of every network namespace of the machine; any error means wait.
//   - Without NRI, without CRI, without the API server it is degraded, says so on /readyz, and goes on with the rest.
//
// # Its loops
//
// The Agent only wires them and runs them. Each owns its state; a pod's way through them is one:
//
//	nri_hooks.go  what the runtime calls: a promise, and into the queue
//	queue.go      what follows: policy.go sets the policy and verifies the addresses
//	unseen.go     the same for pods that NRI does not report, as far as CRI lists them
//	reconcile.go  agreement with the runtime; reclaim.go ends what leaked, on the word of hostnet's view
//	book.go       what is bound and retained: published, counted, expired at its time, released when asked
//	spool.go      what the plugin reports
//	peers.go      neighbours and connection tracking after a restore
//	watch.go      inotify, which wakes the others
//	cniconf       a package: the plugin's binary and the conflist that names it
//	podip         a package, the largest: addresses of pools, and which pods get them
//	route         a package, which podip runs: routes to addresses of routed pools on other nodes
//	retainedip    a package: RetainedIPs and Events in the cluster, and releases that are asked for there
//	uninstall     a package: puts the node back as it was while stayput is being uninstalled
package node

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/node/uninstall"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/spool"
)

// Options say where everything is. Every zero field has the default of the machine.
type Options struct {
	StateDir    string   // of the ledgers
	CNICacheDir string   // of libcni
	CNIConfDir  string   // of the runtime
	CNIBinDir   string   // of the runtime's CNI plugins
	NetnsDirs   []string // where namespaces are mounted by name
	CRISocket   string
	// NRISocket is for people. Empty: the runtime has no NRI, and none is missing.
	NRISocket string

	// InstallCNI has the agent install PluginBinary as a plugin and keep its own conflist, which gives the plugin
	// these limits; zero is none of it.
	InstallCNI                bool
	PluginBinary              string
	PromisedShare             float64
	PromisedSharePerNamespace float64
	PromisedLimit             int64
	PromisedLimitPerNamespace int64
	LongestRetention          time.Duration

	// GracePeriod is how long the runtime must not have known an attachment before it counts as leaked.
	GracePeriod time.Duration
	// Interval is the maximum time between two reconciliations, jittered.
	Interval time.Duration

	// API is how the API server is reached, nil where there is none. NodeName is the name of the node there, and Namespace
	// the namespace that stayput is installed in. If Namespace is empty, an uninstallation goes unnoticed.
	API       *rest.Config
	NodeName  string
	Namespace string

	Clock     ledger.Clock
	Publisher Publisher
	Log       *slog.Logger
	Registry  *prometheus.Registry
}

// The defaults of Options.
const (
	DefaultCNICacheDir = "/var/lib/cni"
	DefaultCNIConfDir  = "/etc/cni/net.d"
	DefaultCNIBinDir   = "/opt/cni/bin"
	DefaultCRISocket   = "/run/containerd/containerd.sock"
	// DefaultPluginBinary is where the image has it.
	DefaultPluginBinary = "/stayput"
	// DefaultGracePeriod is far longer than the longest ADD, during which the runtime does not list the sandbox.
	DefaultGracePeriod = 10 * time.Minute
	DefaultInterval    = 5 * time.Minute
)

// Agent is the agent of one node. Its hooks may be called from any goroutine, even before Run.
type Agent struct {
	o       Options
	ledgers ledger.Options
	log     *slog.Logger
	metrics *metrics
	health  health
	nriUp   atomic.Bool
	cri     *cri.Client

	hooks      *hooks
	queue      *queue
	reconciler *reconciler
	book       *bookKeeper
	spool      *spoolReader
	unseen     *unseen
	announcer  *announcer
	watch      *watcher
	keeper     *cniconf.Keeper
	// reconnected is up when the runtime may have been started again, with another configuration.
	reconnected wake.Signal
	apiserver   *apiserver.Client     // nil if there is none
	api         *retainedip.Publisher // nil if there is none

	uninstaller *uninstall.Uninstaller // nil if an uninstallation goes unnoticed
	pools       *podip.Keeper          // nil if uninstaller is: from it the agent learns that the cluster has pools
}

func (o *Options) setDefaults() {
	set(&o.StateDir, ledger.DefaultStateDir)
	set(&o.CNICacheDir, DefaultCNICacheDir)
	set(&o.CNIConfDir, DefaultCNIConfDir)
	set(&o.CNIBinDir, DefaultCNIBinDir)
	set(&o.PluginBinary, DefaultPluginBinary)
	set(&o.CRISocket, DefaultCRISocket)
	set(&o.GracePeriod, DefaultGracePeriod)
	set(&o.Interval, DefaultInterval)
	if o.NetnsDirs == nil {
		o.NetnsDirs = []string{"/run/netns", "/var/run/netns"}
	}
	if o.Clock == nil {
		o.Clock = ledger.SystemClock{}
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Publisher == nil {
		o.Publisher = LogPublisher{o.Log}
	}
	if o.Registry == nil {
		o.Registry = prometheus.NewRegistry()
	}
}

// New returns an agent that does nothing yet.
func New(o Options) (*Agent, error) {
	o.setDefaults()
	a := &Agent{
		o: o, log: o.Log,
		ledgers: ledger.Options{StateDir: o.StateDir, Clock: o.Clock},
		metrics: newMetrics(o.Registry, o.NRISocket != ""),
	}
	newLatencyMetrics(o.Registry, spool.Dir(o.StateDir), o.Log)
	if err := a.connect(); err != nil {
		return nil, err
	}
	s := a.shared()
	a.observe(s)
	err := a.joinCluster(s)
	if err == nil {
		a.act(s)
		err = a.watch.start()
	}
	if err != nil {
		a.cri.Close()
		return nil, err
	}
	countCommands(s.reports, o.Log)
	return a, nil
}

// connect prepares the clients of the runtime and, if there is one, of the API server.
func (a *Agent) connect() (err error) {
	a.reconnected = wake.New()
	if a.cri, err = cri.New(a.o.CRISocket); err != nil {
		return err
	}
	a.cri.Restarted = a.reconnected.Up
	if a.o.API == nil {
		return nil
	}
	if a.apiserver, err = apiserver.New(a.o.API, a.o.NodeName, podip.AddToScheme); err != nil {
		a.cri.Close()
	}
	return err
}

// shared is what several loops use.
type shared struct {
	reconcileNow, bookNow, spoolNow, unseenNow wake.Signal

	agreed   *agreement
	reports  spool.Dir
	restored chan []ledger.Event
	news     *news
	networks *networks
	policies *policies
	source   *annotationSource
}

func (a *Agent) shared() *shared {
	o := &a.o
	s := &shared{
		reconcileNow: wake.New(), bookNow: wake.New(), spoolNow: wake.New(), unseenNow: wake.New(),
		agreed: &agreement{}, reports: spool.Dir(o.StateDir), restored: make(chan []ledger.Event, 16),
		news:     &news{publisher: publishers{o.Publisher}, clock: o.Clock, metrics: a.metrics},
		networks: &networks{ledgers: a.ledgers, confDir: o.CNIConfDir, metrics: a.metrics, log: o.Log},
		source:   &annotationSource{nri: &a.nriUp},
	}
	s.policies = &policies{
		networks: s.networks, cacheDir: o.CNICacheDir, news: s.news, hookTimeout: hookTimeout,
		metrics: a.metrics, log: o.Log,
	}
	return s
}

// observe makes the loops that rest on what is shared alone.
func (a *Agent) observe(s *shared) {
	o := &a.o
	a.watch = &watcher{
		stateDir: filepath.Clean(o.StateDir), reports: s.reports, agreed: s.agreed,
		reconcileNow: s.reconcileNow, bookNow: s.bookNow, spoolNow: s.spoolNow, unseenNow: s.unseenNow, log: o.Log,
	}
	a.book = &bookKeeper{
		now: s.bookNow, networks: s.networks, agreed: s.agreed, follow: a.watch.follow,
		news: s.news, beat: a.health.loop("book"), metrics: a.metrics, log: o.Log,
	}
	a.announcer = &announcer{
		restored: s.restored, clock: o.Clock, beat: a.health.loop("peers"), metrics: a.metrics, log: o.Log,
	}
	a.keeper = cniconf.New(cniconf.Options{
		ConfDir: o.CNIConfDir, BinDir: o.CNIBinDir, CacheDir: o.CNICacheDir, Install: o.InstallCNI,
		Plugin: o.PluginBinary, Root: cri.Root,
		Limits: cniconf.Limits{
			StateDir: o.StateDir, PromisedShare: o.PromisedShare,
			PromisedSharePerNamespace: o.PromisedSharePerNamespace, PromisedLimit: o.PromisedLimit,
			PromisedLimitPerNamespace: o.PromisedLimitPerNamespace, LongestRetention: o.LongestRetention,
		},
		Interval: o.Interval, Clock: o.Clock, Runtime: a.cri.CNI, Reconnected: a.reconnected,
		Networks: s.networks.inUse, PodCIDRs: a.podCIDRs,
		Log: o.Log, Registry: o.Registry, Errors: a.metrics.cniConfigErrors,
		Publish: s.news.publish, Wrote: s.reconcileNow.Up, // the pods that run are Stayput's from then on
	})
}

// joinCluster makes what works with the API server, if there is one.
func (a *Agent) joinCluster(s *shared) (err error) {
	o := &a.o
	if a.apiserver == nil {
		return nil
	}
	a.api = retainedip.New(retainedip.Options{
		API: a.apiserver, Node: o.NodeName, NamespaceGrace: o.GracePeriod, Log: o.Log, Registry: o.Registry,
		Release: a.book.release,
	})
	s.news.publisher = publishers{o.Publisher, a.api}
	if o.Namespace == "" {
		return nil
	}
	a.uninstaller, err = uninstall.New(o.API, o.Namespace, uninstall.Options{
		Ledgers: a.ledgers, CNIConfDir: o.CNIConfDir, CNIBinDir: o.CNIBinDir, CNICacheDir: o.CNICacheDir,
		MayLeavePlugin: !o.InstallCNI,
		DeleteObjects:  a.api.DeleteAll, Log: o.Log,
	})
	if err != nil {
		return err
	}
	a.pools = podip.New(podip.Options{
		API: a.apiserver, Node: o.NodeName, Ledgers: a.ledgers, NetnsDirs: o.NetnsDirs, Runtime: a.cri, Log: o.Log,
		Registry: o.Registry, Subnets: a.subnets, Bridge: a.bridge, CannotServe: a.cannotServe,
		Serves: a.serves, Watched: a.health.watched("pools", "pools: namespaces"),
	})
	a.uninstaller.Pools = func(pools string, routed bool) {
		a.pools.SetRouted(routed)
		a.pools.SetPools(pools)
	}
	return nil
}

// act makes the loops that change ledgers, and the hooks.
func (a *Agent) act(s *shared) {
	o := &a.o
	a.queue = newQueue(s.policies, s.reconcileNow, a.health.loop("queue"), a.metrics, o.Log)
	a.reconciler = &reconciler{
		interval: o.Interval, now: s.reconcileNow, cri: a.cri, networks: s.networks, policies: s.policies,
		agreed: s.agreed, spool: s.reports, source: s.source, book: a.book, clock: o.Clock,
		beat: a.health.loop("reconcile"), metrics: a.metrics, log: o.Log,
		reclaimer: &reclaimer{
			grace: o.GracePeriod, netnsDirs: o.NetnsDirs, runtime: a.cri.PID, news: s.news, metrics: a.metrics,
			log: o.Log, suspects: map[suspect]*suspicion{},
		},
		after: []wake.Signal{s.bookNow, s.spoolNow, s.unseenNow}, // a wake-up by inotify may have been lost
	}
	a.spool = &spoolReader{
		spool: s.reports, now: s.spoolNow, news: s.news, restored: s.restored, conflict: a.pools.Conflict,
		beat: a.health.loop("spool"), metrics: a.metrics, log: o.Log,
	}
	a.hooks = &hooks{
		policies: s.policies, queue: a.queue, pools: a.pools, reconcile: s.reconcileNow, book: s.bookNow,
		uninstaller: a.uninstaller, metrics: a.metrics,
	}
	a.unseen = &unseen{
		now: s.unseenNow, source: s.source, networks: s.networks, list: a.reconciler.sandboxes,
		netns: a.reconciler.netnsOf, ran: a.hooks.ran, news: s.news, beat: a.health.loop("unseen"), log: o.Log,
	}
}

// podCIDRs asks the API server for the Node's.
func (a *Agent) podCIDRs(ctx context.Context) ([]netip.Prefix, error) {
	if a.apiserver == nil {
		return nil, errors.New("the agent runs without an API server")
	}
	return a.apiserver.PodCIDRs(ctx)
}

func set[T comparable](v *T, byDefault T) {
	var zero T
	if *v == zero {
		*v = byDefault
	}
}

// Run runs every loop until ctx is done. If stayput is being uninstalled before, it ends them, puts the node back as it
// was and idles; its errors are those of [uninstall.Uninstaller.Run].
func (a *Agent) Run(ctx context.Context) error {
	defer a.cri.Close()
	defer a.watch.close()
	return a.uninstaller.Run(ctx, a.work)
}

// work runs every loop.
func (a *Agent) work(ctx context.Context) {
	var wg sync.WaitGroup
	loops := []func(context.Context){
		a.watch.run, a.queue.run, a.reconciler.run, a.book.run, a.spool.run, a.announcer.run, a.unseen.run,
		a.keep,
	}
	if a.api != nil {
		loops = append(loops, a.api.Run)
	}
	if a.pools != nil {
		loops = append(loops, a.pools.Run)
	}
	for _, loop := range loops {
		wg.Go(func() { loop(ctx) })
	}
	wg.Wait()
}

func (a *Agent) keep(ctx context.Context) {
	beat := a.health.loop("cni")
	a.keeper.Run(ctx, func(look func()) {
		beat.begin()
		defer beat.end()
		look()
	})
}
