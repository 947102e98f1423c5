// Package node is the agent of one node: the loops around the ledgers of its networks that a CNI plugin, which
// only lives for one command, cannot do.
//
// # What it promises
//
//   - No pod needs it to start or to stop. It is away, late or restarted, and nothing is lost but time: what
//     it keeps is in the files of pkg/ledger, and every loop begins by looking at the world as it is.
//   - The runtime never waits for more than a small write: RunPodSandbox leaves the pod's policy mark and
//     queues the rest.
//   - Nothing is freed on ignorance. A leaked address falls only to two successful looks at the runtime, a
//     grace period apart, and one at every network namespace of the machine; any error in them means wait.
//   - Without NRI, without CRI, without the API server it is degraded, says so on /readyz, and goes on with the rest.
//
// # Its loops
//
//	queue.go      what follows RunPodSandbox and Synchronize: policy, verification
//	reconcile.go  agreement with the runtime; reclaim.go ends what leaked, on the word of view.go
//	book.go       what is bound and retained: published, counted, expired at its time, released when asked
//	apiserver.go  RetainedIPs and Events in the cluster, and releases that are asked for there
//	spool.go      what the plugin reports
//	peers.go      neighbours and connection tracking after a restore
//	cniconf       a package: the plugin's binary and the conflist that names it
//	watch.go      inotify, which wakes the others
//	uninstall     a package: puts the node back as it was once stayput is uninstalled
package node

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/node/uninstall"
	"github.com/stayput/stayput/pkg/spool"
)

// Sandbox is a pod sandbox as the runtime describes it.
type Sandbox struct {
	ID          string // the containerID of CNI
	Pod         ledger.Pod
	Annotations map[string]string
	Netns       string       // path; empty for a pod on the host's network and for one that has ended
	Addrs       []netip.Addr // of its first interface, in the order of CNI's result; none where that is not known
}

// Options say where everything is. Every zero field has the default of the machine.
type Options struct {
	StateDir    string   // of the ledgers
	CNICacheDir string   // of libcni
	CNIConfDir  string   // of the runtime
	CNIBinDir   string   // of the runtime's CNI plugins
	NetnsDirs   []string // where namespaces are mounted by name
	CRISocket   string

	// InstallCNI has the agent install PluginBinary as a plugin and keep its own conflist, which gives the plugin
	// these limits; zero is none of it.
	InstallCNI       bool
	PluginBinary     string
	PromisedShare    float64
	LongestRetention time.Duration

	// GracePeriod is how long the runtime must not have known an attachment before it counts as leaked.
	GracePeriod time.Duration
	// Interval is the longest time between two reconciliations, jittered.
	Interval time.Duration

	// API is how the API server is reached, nil where there is none. NodeName is the name of the node there, and
	// Namespace the one that stayput is installed in; empty: an uninstallation goes unnoticed.
	API       *rest.Config
	NodeName  string
	Namespace string

	Clock     ledger.Clock
	Netns     ledger.NetnsProber
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

// Agent is the agent of one node. Its hooks may be called from any goroutine, before Run as well.
type Agent struct {
	o       Options
	ledgers ledger.Options
	spool   spool.Dir
	log     *slog.Logger
	metrics *metrics
	cri     *cri.Client
	queue   *queue
	health  health

	markTimeout time.Duration

	reconcileNow, bookNow, spoolNow wake

	restored chan []ledger.Event // to the peers loop

	nriUp      atomic.Bool
	reconciled atomic.Bool
	newer      atomic.Pointer[string] // what only a newer version can read; nil: never looked
	sweep      atomic.Bool            // the book loop is to expire whatever the clock says
	criState   atomic.Pointer[string] // nil: never asked; empty: it answered

	suspects  map[suspect]*suspicion // of the reconcile loop
	published retainedip.Promises    // as last published, of the book loop
	ended     bool                   // a claim was ended since, of the book loop
	agreed    agreement
	releases  releases

	api *retainedip.Publisher // nil: none

	uninstaller *uninstall.Uninstaller // nil: an uninstallation goes unnoticed

	keeper *cniconf.Keeper
	watch  *watcher
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
	if o.Netns == nil {
		o.Netns = ledger.SystemNetns{}
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
		spool:        spool.Dir(o.StateDir),
		ledgers:      ledger.Options{StateDir: o.StateDir, Clock: o.Clock, Netns: o.Netns},
		markTimeout:  markTimeout,
		reconcileNow: newWake(), bookNow: newWake(), spoolNow: newWake(),
		restored: make(chan []ledger.Event, 16),
		suspects: map[suspect]*suspicion{},
	}
	a.metrics = newMetrics(o.Registry)
	newLatencyMetrics(o.Registry, a.spool, a.log)
	if o.API != nil {
		var err error
		a.api, err = retainedip.New(retainedip.Options{
			API: o.API, Node: o.NodeName, NamespaceGrace: o.GracePeriod, Release: a.release, Log: o.Log, Registry: o.Registry,
		})
		if err != nil {
			return nil, err
		}
		a.o.Publisher = publishers{a.o.Publisher, a.api}
		if o.Namespace != "" {
			a.uninstaller, err = uninstall.New(o.API, o.Namespace, uninstall.Options{
				Ledgers: a.ledgers, CNIConfDir: o.CNIConfDir, CNIBinDir: o.CNIBinDir, MayLeavePlugin: !o.InstallCNI,
				DeleteObjects: a.api.DeleteAll, Log: o.Log,
			})
			if err != nil {
				return nil, err
			}
		}
	}
	a.queue = newQueue(a.metrics)
	var err error
	if a.cri, err = cri.New(o.CRISocket); err != nil {
		return nil, err
	}
	a.keeper = cniconf.New(cniconf.Options{
		ConfDir: o.CNIConfDir, BinDir: o.CNIBinDir, Install: o.InstallCNI, Plugin: o.PluginBinary,
		StateDir: o.StateDir, PromisedShare: o.PromisedShare, LongestRetention: o.LongestRetention,
		Interval: o.Interval, Clock: o.Clock, Runtime: a.cri.CNI, Log: o.Log, Registry: o.Registry,
		Publish: a.publish, Wrote: a.reconcileNow.up, // the pods that run are stayput's from then on
	})
	if a.watch, err = newWatcher(a); err != nil {
		a.cri.Close()
		return nil, err
	}
	return a, nil
}

func set[T comparable](v *T, byDefault T) {
	var zero T
	if *v == zero {
		*v = byDefault
	}
}

// Run runs every loop until ctx is done. If stayput is uninstalled before, it ends them, puts the node back as it was and
// idles; its errors are those of [uninstall.Uninstaller.Run].
func (a *Agent) Run(ctx context.Context) error {
	defer a.cri.Close()
	defer a.watch.close()
	return a.uninstaller.Run(ctx, a.work)
}

// work is every loop.
func (a *Agent) work(ctx context.Context) {
	var wg sync.WaitGroup
	loops := []func(context.Context){a.watch.run, a.queueLoop, a.reconcileLoop, a.bookLoop, a.spoolLoop, a.peersLoop, a.keepLoop}
	if a.api != nil {
		loops = append(loops, a.api.Run)
	}
	for _, loop := range loops {
		wg.Go(func() { loop(ctx) })
	}
	wg.Wait()
}

func (a *Agent) keepLoop(ctx context.Context) {
	beat := a.health.loop("cni")
	a.keeper.Run(ctx, func(look func()) {
		beat.begin()
		defer beat.end()
		look()
	})
}

// Handler serves /healthz, /readyz and /metrics.
func (a *Agent) Handler() http.Handler { return a.handler() }

// Connected tells that the NRI connection stands or was lost.
func (a *Agent) Connected(up bool) {
	a.nriUp.Store(up)
	if up {
		a.metrics.nriConnected.Set(1)
		a.metrics.nriConnections.Inc()
	} else {
		a.metrics.nriConnected.Set(0)
	}
}

// RunPodSandbox is the hook of a sandbox that has just got its addresses. The mark is written before it
// returns: should everything fall over right after, the pod's DEL still knows the policy.
func (a *Agent) RunPodSandbox(s Sandbox) {
	if s.Netns == "" || a.uninstaller.Status() != "" {
		return // on the host's network: CNI had nothing to do with it
	}
	o := observe(s)
	if o.answers && o.err == nil {
		a.markInTime(o)
	}
	a.enqueue(o)
}

// StopPodSandbox is the hook of a sandbox that is about to lose its addresses. It changes no policy.
func (a *Agent) StopPodSandbox(Sandbox) { a.bookNow.up() }

// RemovePodSandbox is the hook of a sandbox that is gone.
func (a *Agent) RemovePodSandbox(Sandbox) { a.bookNow.up() }

// Synchronize is the hook of a new connection: whatever happened while there was none is caught up with. There
// is no time for marks; the queue makes the promises that they stand for.
func (a *Agent) Synchronize(all []Sandbox) {
	if a.uninstaller.Status() != "" {
		return
	}
	for _, s := range all {
		if s.Netns != "" {
			a.enqueue(observe(s))
		}
	}
	a.reconcileNow.up()
}

func (a *Agent) enqueue(o observation) {
	if !a.queue.put(o) {
		a.log.Warn("The queue is full, a reconciliation will do this pod's work", o.sandbox.attrs()...)
		a.reconcileNow.up()
	}
}

func (s Sandbox) attrs(more ...any) []any {
	return append([]any{"pod", s.Pod.String(), "sandbox", s.ID}, more...)
}

// wake is a signal that is never lost and never piles up.
type wake chan struct{}

func newWake() wake { return make(wake, 1) }

func (w wake) up() {
	select {
	case w <- struct{}{}:
	default:
	}
}
