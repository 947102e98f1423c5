package cniconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
)

// Options are what a Keeper works with.
type Options struct {
	ConfDir, BinDir string // of the runtime
	CacheDir        string // of libcni in the runtime
	// Root is where the node's files are seen, those too that no volume brings into the agent's container.
	Root string

	// Install has the keeper install Plugin in BinDir and keep its own file in ConfDir; otherwise it only observes.
	Install bool
	Plugin  string

	// Limits go into the file.
	Limits Limits

	// Interval is the longest time between two observations, jittered.
	Interval time.Duration

	Clock ledger.Clock
	// Runtime asks the runtime for its CNI configuration. It may have another one once Reconnected wakes the keeper.
	Runtime     func(context.Context) (Runtime, error)
	Reconnected <-chan struct{}
	// Networks returns those that have addresses which are not free, or an error if it does not know them all.
	Networks func() ([]Occupied, error)
	// PodCIDRs asks the API server for the Node's, where a configuration takes its ranges from there.
	PodCIDRs func(context.Context) ([]netip.Prefix, error)
	// Publish is called with an Event for every change that lasts, and Wrote after every write of the file.
	Publish  func(ledger.Event)
	Wrote    func()
	Log      *slog.Logger
	Registry prometheus.Registerer
	// Errors counts failures to read or write the CNI configuration or the plugin's binary.
	Errors prometheus.Counter
}

// Runtime is what the runtime says about its CNI configuration. It does not say the zero fields.
type Runtime struct {
	Name       string // as CRI says it: containerd, cri-o
	ConfDir    string
	BinDirs    []string
	MaxConfNum *int // how many files it loads, each a network of every pod
}

// The reasons of the Events about a node's CNI configuration.
const (
	EventConfigured    ledger.EventReason = "CNIConfigured"
	EventNotConfigured ledger.EventReason = "CNINotConfigured"
)

// Keeper keeps the plugin's binary and the agent's file in place. It runs in one goroutine; Status and Line may be
// called from any.
type Keeper struct {
	o       Options
	install *installer // nil if it only observes
	memory  memory
	writes  *rate.Limiter
	metrics *metrics

	runtime *Runtime  // as it last answered, nil if it never did
	askAt   time.Time // when it is asked again

	podCIDRs    []netip.Prefix // as the API server last answered, nil if it never did
	podCIDRsErr error
	podCIDRsAt  time.Time // when it was asked

	reported Status    // last
	since    time.Time // when the state became what it is

	mu     sync.Mutex
	status Status
}

const (
	// keepSoon is the wait after a failure.
	keepSoon = 10 * time.Second
	// lasting is how long a state that installers go through (half a file, and none) lasts before it is reported.
	lasting = 10 * time.Second
	// keepPause is the least wait, however often files change.
	keepPause = 100 * time.Millisecond
	// pollEvery is the longest wait if a directory cannot be watched.
	pollEvery = 2 * time.Second
	// Each write makes the runtime load its configuration, and CNI calls wait for that: a fight with another program
	// over the file must not stall the runtime.
	writeEvery, writeBurst = time.Minute, 10
)

type metrics struct {
	config     *prometheus.GaugeVec
	incomplete prometheus.Gauge
	writes     prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		config: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stayput_agent_cni_config",
			Help: "State of the node's CNI configuration: 1 for the current state, 0 for all others.",
		}, []string{"state"}),
		incomplete: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stayput_agent_cni_config_incomplete",
			Help: "Whether the CNI configuration leaves out chained plugins that the runtime does not have.",
		}),
		writes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_cni_config_writes_total",
			Help: "Writes and removals of the agent's CNI configuration; each makes the runtime reload.",
		}),
	}
	r.MustRegister(m.config, m.incomplete, m.writes)
	return m
}

func (m *metrics) set(s Status) {
	one := map[bool]float64{true: 1}
	for _, state := range states {
		m.config.WithLabelValues(string(state)).Set(one[state == s.State])
	}
	m.incomplete.Set(one[s.Problem != ""])
}

// New returns a keeper that does nothing before Run.
func New(o Options) *Keeper {
	k := &Keeper{
		o: o, writes: rate.NewLimiter(rate.Every(writeEvery), writeBurst), metrics: newMetrics(o.Registry),
	}
	if o.Install {
		k.install = &installer{source: o.Plugin, dir: o.BinDir}
	}
	return k
}

// Run observes, and writes, whenever a file has changed and at least once per interval, until ctx is done. It calls
// guard for each time.
func (k *Keeper) Run(ctx context.Context, guard func(observe func())) {
	var changes <-chan fsnotify.Event
	var lost <-chan error
	watch, err := fsnotify.NewBufferedWatcher(64)
	if err != nil {
		k.o.Log.Warn("Polling the CNI configuration, inotify is unavailable: raise fs.inotify.max_user_instances",
			"every", pollEvery, "err", err)
	} else {
		defer watch.Close()
		changes, lost = watch.Events, watch.Errors
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for k.woken(ctx, changes, lost, timer.C) {
		again := k.o.Interval*9/10 + rand.N(k.o.Interval/5+1)
		if !k.follow(watch) {
			again = min(again, pollEvery)
		}
		guard(func() { again = sooner(again, k.observe(ctx)) })
		timer.Reset(again)
		select {
		case <-ctx.Done():
		case <-time.After(keepPause):
		}
	}
}

// woken waits for a reason to observe, takes all changes for one, and reports whether ctx is not done.
func (k *Keeper) woken(ctx context.Context, changes <-chan fsnotify.Event, lost <-chan error,
	timer <-chan time.Time) bool {
	select {
	case <-ctx.Done():
	case <-changes:
	case <-lost: //nolint:errcheck // which error does not matter
	case <-k.o.Reconnected:
		k.askAt = time.Time{}
	case <-timer:
	}
	for len(changes) > 0 {
		<-changes
	}
	return ctx.Err() == nil
}

// follow watches the directories and reports whether it could; it cannot watch a directory that does not exist yet. A
// directory that was removed and made again has lost its watch; adding one twice costs nothing.
func (k *Keeper) follow(watch *fsnotify.Watcher) bool {
	if watch == nil {
		return false
	}
	all := watch.Add(k.o.ConfDir) == nil
	if k.install != nil {
		all = watch.Add(k.install.dir) == nil && all
	}
	return all
}

// Status returns what the keeper last observed, zero before the first time.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// Inspect returns the status of the CNI configuration on disk, without a keeper.
func Inspect(confDir, binDir string) Status {
	return InspectFiles(confDir, binDir).withoutPlugin()
}

// InspectFiles is Inspect without a judgement about the plugin, for a caller that may not see BinDir.
func InspectFiles(confDir, binDir string) Status {
	dir, err := readConfDir(confDir)
	s := dir.status()
	if err != nil {
		s = Status{State: StateError, Message: err.Error()}
	}
	s.ConfDir = confDir
	s.Plugin = inspectPlugin(binDir)
	return s
}

// Degraded begins the Line of a node on which addresses are not kept.
const Degraded = "degraded: "

// Line returns the status as a line of /readyz.
func (k *Keeper) Line() string {
	s := k.Status()
	if s.State == "" {
		return "not observed yet"
	}
	line := string(s.State) + ": " + s.Text()
	if s.Plugin.Problem != "" && s.State != StateNoPlugin && k.install != nil {
		line += "; plugin: " + s.Plugin.Problem
	}
	if k.install != nil && !s.good() {
		return Degraded + line
	}
	return line
}

// Text returns the message and the problem.
func (s Status) Text() string {
	if s.Problem == "" {
		return s.Message
	}
	return s.Message + "; " + s.Problem
}

// good reports whether all is as it should be.
func (s Status) good() bool { return s.State.Good() && s.Problem == "" && s.Plugin.Problem == "" }

// withoutPlugin returns the status in view of the binary: with a configuration that names a missing plugin no pod
// starts.
func (s Status) withoutPlugin() Status {
	if !s.Plugin.Installed && (s.State == StateActive || s.State == StateByHand) {
		return s.says(StateNoPlugin, "%s: %s; no pod can start on this node", s.Plugin.Path, s.Plugin.Problem)
	}
	return s
}

// observe keeps the files and reports what has changed, once.
func (k *Keeper) observe(ctx context.Context) (again time.Duration) {
	s, again, err := k.keep(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil {
		k.o.Errors.Inc()
	}
	k.mu.Lock()
	was := k.status
	k.status = s
	k.mu.Unlock()
	k.metrics.set(s)
	if s.State != was.State {
		k.since = time.Now()
	}
	if s == k.reported {
		return again
	}
	if left := lasting - time.Since(k.since); left > 0 && (s.State == StateBroken || s.State == StateHeld) {
		if again == 0 {
			again = left
		}
		return min(again, left)
	}
	k.report(s, k.reported)
	k.reported = s
	return again
}

// report logs a changed status, and publishes an Event if this node's configuration is the keeper's business.
func (k *Keeper) report(s, was Status) {
	level := slog.LevelInfo
	if k.install != nil && !s.good() {
		level = slog.LevelWarn
	}
	k.o.Log.Log(context.Background(), level, "CNI configuration", "state", s.State, "message", s.Text(), "file", s.File,
		"network", s.Network, "source", s.Source, "plugin", s.Plugin.Version, "problem", s.Plugin.Problem)
	if k.install == nil || s.State == StateNone ||
		s.State == was.State && s.Text() == was.Text() {
		return
	}
	e := ledger.Event{Reason: EventConfigured, Message: fmt.Sprintf("CNI configuration: %s: %s", s.State, s.Text())}
	if !s.good() {
		e.Reason = EventNotConfigured
	}
	k.o.Publish(e)
}

// keep makes the files what they should be. What cannot be read or written stays as it is until again.
func (k *Keeper) keep(ctx context.Context) (s Status, again time.Duration, err error) {
	var did plan
	ready := pluginUnknown
	var pluginErr error
	if k.install != nil {
		// The plugin first: a conflist that names a missing one breaks every pod.
		ready, pluginErr = k.install.ensure(ctx)
		if pluginErr == nil {
			pluginErr = atomicfile.Sweep(k.install.dir)
		}
		did, err = k.write(ctx, ready)
	}
	dir, readErr := readConfDir(k.o.ConfDir)
	err = errors.Join(err, readErr)
	s = k.judge(dir, did.status, ready, err, pluginErr)
	err = errors.Join(err, pluginErr)
	switch {
	case err != nil:
		again = keepSoon
	case did.again > 0:
		again = did.again
	case did.write != nil:
		again = keepSoon // for the note of an ADD that was under way
	}
	if ready == pluginRuns && s.State == StateActive {
		if err := k.renote(dir, s.Network); err != nil {
			k.o.Log.Warn("Cannot update cached container configurations", "err", err)
			again = keepSoon
		}
	}
	return s, again, err
}

// judge returns the status of the directory in view of the plan for it, of the binary, and of what has failed.
func (k *Keeper) judge(dir confDir, planned Status, ready pluginState, err, pluginErr error) Status {
	s := dir.status()
	switch {
	case err != nil:
		s = Status{State: StateError, Message: err.Error()}
	case planned.State != "":
		s.State, s.Message = planned.State, planned.Message
	}
	s.ConfDir, s.Plugin = k.o.ConfDir, inspectPlugin(k.o.BinDir)
	if pluginErr != nil {
		s.Plugin.Problem = pluginErr.Error()
	}
	if ready == pluginFails && !slices.Contains([]State{StateError, StateUnsupported, StateNone}, s.State) {
		s.State, s.Message = StateNoPlugin, s.Plugin.Problem
	}
	s = s.withoutPlugin()
	if k.install == nil && s.State == StateActive && s.Source != "" {
		s.Message += ", which is not kept up to date without --install-cni"
	}
	s.Message, s.Plugin.Problem = oneLine(s.Message), oneLine(s.Plugin.Problem)
	return s
}

// renote gives the plugin the DELs of containers from before it.
func (k *Keeper) renote(dir confDir, network string) error {
	notes := dir.notes(k.o.CacheDir)
	if k.runtime == nil || k.runtime.Name != crio {
		notes.results = "" // others do not go by them
	}
	return notes.retype(netconf.HostLocal, netconf.Type, network, k.o.Limits.StateDir)
}

// oneLine returns joined errors as one line.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

// crio is CRI-O's name of itself.
const crio = "cri-o"

// askRuntime asks for the runtime's configuration if that is due, and returns in what time to try again if it does not
// answer. Meanwhile, what it said last counts.
func (k *Keeper) askRuntime(ctx context.Context) (again time.Duration) {
	if left := time.Until(k.askAt); left > keepSoon {
		return 0
	} else if left > 0 {
		return left
	}
	r, err := k.o.Runtime(ctx)
	switch {
	case err == nil:
		k.runtime = &r
		k.askAt = time.Now().Add(k.o.Interval)
		return 0
	case k.runtime == nil:
		again = pollEvery
	default:
		again = keepSoon
		k.askAt = time.Now().Add(again)
	}
	k.o.Log.Debug("Cannot get the CNI configuration from the runtime", "err", err)
	return again
}

// misfit returns why the agent's file would do harm, or nothing, with the directories as they are mounted and the
// runtime as it is configured: a zero Status if the file fits, or the runtime does not say.
func (k *Keeper) misfit() (s Status) {
	const restart = "%s is not the directory any more that the agent has mounted: restart the agent's pod on this node"
	switch {
	case k.moved(k.o.ConfDir):
		return s.says(StateError, restart, k.o.ConfDir)
	case k.moved(k.install.dir):
		return s.says(StateNoPlugin, restart, k.install.dir)
	}
	if k.runtime == nil {
		return s
	}
	return k.misfitOf(*k.runtime)
}

// misfitOf is misfit for how the runtime is configured.
func (k *Keeper) misfitOf(r Runtime) (s Status) {
	is := func(path, mounted string) bool {
		same, known := k.isNode(path, mounted)
		return same || !known && filepath.Clean(path) == filepath.Clean(mounted)
	}
	inUse := func(binDir string) bool { return is(binDir, k.install.dir) }
	switch {
	case r.ConfDir != "" && !is(r.ConfDir, k.o.ConfDir):
		return s.says(StateError, "the runtime reads %s: set --cni-conf-dir to that directory", r.ConfDir)
	case len(r.BinDirs) > 0 && !slices.ContainsFunc(r.BinDirs, inUse):
		return s.says(StateNoPlugin, "the runtime runs plugins from %s: set --cni-bin-dir to that directory",
			strings.Join(r.BinDirs, " and "))
	case r.MaxConfNum != nil && *r.MaxConfNum != 1:
		return s.says(StateUnsupported, "the runtime attaches pods to more than one configuration (max_conf_num = %d), "+
			"and the agent's would be an additional one: set ipam.type to stayput by hand", *r.MaxConfNum)
	}
	return s
}

// podCIDRsTimeout bounds the question for the podCIDRs: files change meanwhile.
const podCIDRsTimeout = 3 * time.Second

// learnPodCIDRs returns the Node's podCIDRs as the API server last said, and an error if it did not when it was asked
// again: another Node of the same name has others.
func (k *Keeper) learnPodCIDRs(ctx context.Context) ([]netip.Prefix, error) {
	fresh := k.o.Interval
	if k.podCIDRsErr != nil {
		fresh = keepSoon
	}
	if !k.podCIDRsAt.IsZero() && time.Since(k.podCIDRsAt) < fresh {
		return k.podCIDRs, k.podCIDRsErr
	}
	ctx, cancel := context.WithTimeout(ctx, podCIDRsTimeout)
	defer cancel()
	all, err := k.o.PodCIDRs(ctx)
	if err == nil && len(all) == 0 {
		err = errors.New("the Node has no podCIDRs")
	}
	if err == nil {
		k.podCIDRs = all
	} else {
		k.o.Log.Debug("Cannot get the Node's podCIDRs", "err", err)
	}
	k.podCIDRsErr, k.podCIDRsAt = err, time.Now()
	return k.podCIDRs, err
}

// sooner returns the shorter of two times, of which 0 is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// plan decides about the agent's file by what the runtime, the API server and the ledgers say.
func (k *Keeper) plan(ctx context.Context, dir confDir) (plan, error) {
	now, err := k.o.Clock.Now()
	if err != nil {
		return plan{}, err
	}
	limits := k.o.Limits
	var wait time.Duration
	limits.Missing, wait = k.missing(dir.own)
	if limits.Network, err = k.inUse(dir); err != nil && limits.Network == nil {
		return plan{}, err
	}
	var unknown error
	if dir.first.WantsPodCIDRs() {
		limits.PodCIDRs, unknown = k.learnPodCIDRs(ctx)
	}
	p := dir.decide(limits, &k.memory, now)
	p.again = sooner(p.again, wait)
	if unknown != nil {
		p.again = keepSoon
		if p.status.State == StateStock {
			p.status.Message += ": " + unknown.Error()
		}
	}
	return p, nil
}

// write writes or removes the agent's file.
func (k *Keeper) write(ctx context.Context, ready pluginState) (plan, error) {
	asked := k.askRuntime(ctx)
	dir, err := readConfDir(k.o.ConfDir)
	if err != nil {
		return plan{}, err
	}
	if err := atomicfile.Sweep(k.o.ConfDir); err != nil {
		return plan{}, err
	}
	p, err := k.plan(ctx, dir)
	if err != nil {
		return plan{}, err
	}
	p.again = sooner(p.again, asked)
	return k.carryOut(k.fit(p, dir, ready, asked))
}

// fit leaves of a plan what does no harm with the plugin and the runtime as they are.
func (k *Keeper) fit(p plan, dir confDir, ready pluginState, asked time.Duration) plan {
	misfit := k.misfit()
	if misfit.State == "" {
		misfit = k.elsewhere(dir)
	}
	switch {
	case misfit.State != "":
		return plan{remove: dir.ours, status: misfit, again: asked}
	case k.runtime == nil && !dir.ours && p.write != nil && ready == pluginRuns:
		return plan{again: pollEvery}
	case ready == pluginFails && dir.ours:
		p.remove, p.write = true, nil
	case ready != pluginRuns:
		p.write = nil
	}
	return p
}

func (k *Keeper) carryOut(p plan) (plan, error) {
	path := filepath.Join(k.o.ConfDir, ConflistName)
	switch {
	case p.write != nil && k.writes.Tokens() < 1:
		return plan{again: writeEvery, status: Status{}.says(StateConflict,
			"%s was written %d times in quick succession: another program keeps changing or removing it",
			ConflistName, writeBurst)}, nil
	case p.write != nil:
		if err := (atomicfile.File{Path: path, Mode: p.mode}).Write(bytes.NewReader(p.write)); err != nil {
			return plan{}, err
		}
		k.writes.Allow()
		k.metrics.writes.Inc()
		k.o.Log.Info("Wrote the CNI configuration", "file", path)
		k.o.Wrote()
	case p.remove:
		if err := atomicfile.Remove(path); err != nil {
			return plan{}, err
		}
		k.metrics.writes.Inc()
		k.o.Log.Info("Removed the CNI configuration", "file", path)
	}
	return p, nil
}
