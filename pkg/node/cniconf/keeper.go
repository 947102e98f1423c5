package cniconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
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

	// Install has the keeper install Plugin in BinDir and keep its own file in ConfDir; otherwise it only looks.
	Install bool
	Plugin  string

	// These go into the file; zero is left out.
	StateDir         string
	PromisedShare    float64
	LongestRetention time.Duration

	// Interval is the longest time between two looks, jittered.
	Interval time.Duration

	Clock ledger.Clock
	// Runtime asks the runtime for its CNI configuration.
	Runtime func(context.Context) (Runtime, error)
	// Publish is given an Event for every change that lasts, and Wrote is called after every write of the file.
	Publish  func(ledger.Event)
	Wrote    func()
	Log      *slog.Logger
	Registry prometheus.Registerer
}

// Runtime is what the runtime says about its CNI configuration. A zero field it does not say.
type Runtime struct {
	ConfDir    string
	BinDirs    []string
	MaxConfNum *int // how many files it loads, each a network of every pod
}

// The reasons of the Events about a node's CNI configuration.
const (
	EventConfigured    ledger.EventReason = "CNIConfigured"
	EventNotConfigured ledger.EventReason = "CNINotConfigured"
)

// Keeper keeps the plugin's binary and the agent's conflist in place, see conflist.go for what that is. Nobody
// else's file is ever written. It is the only one that writes; it runs in one goroutine, but for the status.
type Keeper struct {
	o       Options
	install *installer // nil: it only looks
	limits  netconf.Limits
	memory  memory
	writes  *rate.Limiter
	metrics *metrics

	runtime   *Runtime // as it last answered; nil: never
	runtimeAt time.Time

	said  Status    // last
	since time.Time // when the state became what it is

	mu     sync.Mutex
	status Status
}

const (
	// keepSoon is when a look that failed is repeated.
	keepSoon = 10 * time.Second
	// lasting is for how long a state has to last that installers go through: half a file, and none.
	lasting = 10 * time.Second
	// keepPause is between two looks, however often files change.
	keepPause = 100 * time.Millisecond
	// pollEvery is how often directories are looked at that cannot be watched.
	pollEvery = 2 * time.Second
	// Each write makes the runtime load its configuration, which makes CNI calls wait: a fight with another program
	// over the file must not become one with the runtime.
	writeEvery, writeBurst = time.Minute, 10
)

type metrics struct {
	config         *prometheus.GaugeVec
	writes, errors prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		config: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stayput_agent_cni_config", Help: "How the node's CNI configuration stands: 1 for the state it is in, 0 for all others.",
		}, []string{"state"}),
		writes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_cni_config_writes_total", Help: "Times the agent wrote or removed its CNI configuration, each of which makes the runtime load it.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stayput_agent_cni_config_errors_total", Help: "Looks at the CNI configuration or the plugin's binary that failed, whole or in part.",
		}),
	}
	r.MustRegister(m.config, m.writes, m.errors)
	return m
}

// New returns a keeper that does nothing before Run.
func New(o Options) *Keeper {
	k := &Keeper{
		o: o, writes: rate.NewLimiter(rate.Every(writeEvery), writeBurst), metrics: newMetrics(o.Registry),
		limits: netconf.Limits{StateDir: o.StateDir, PromisedShare: o.PromisedShare, LongestRetention: o.LongestRetention},
	}
	if o.Install {
		k.install = &installer{source: o.Plugin, dir: o.BinDir}
	}
	return k
}

// Run looks whenever a file has changed, and by the clock, until ctx is done. Each look is made inside of guard.
func (k *Keeper) Run(ctx context.Context, guard func(look func())) {
	var changes <-chan fsnotify.Event
	var lost <-chan error
	watch, err := fsnotify.NewBufferedWatcher(64)
	if err != nil {
		k.o.Log.Warn("No inotify: the CNI configuration is looked at every so often instead; raise fs.inotify.max_user_instances", "every", pollEvery, "err", err)
	} else {
		defer watch.Close()
		changes, lost = watch.Events, watch.Errors
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
		case <-changes:
		case <-lost: //nolint:errcheck // which error does not matter
		case <-timer.C:
		}
		if ctx.Err() != nil {
			return
		}
		for more := true; more; {
			select {
			case <-changes:
			case <-lost: //nolint:errcheck // which error does not matter
			default:
				more = false
			}
		}
		watched := k.follow(watch)
		var again time.Duration
		guard(func() { again = k.look(ctx) })
		wait := k.o.Interval*9/10 + rand.N(k.o.Interval/5+1)
		if again > 0 {
			wait = min(wait, again)
		}
		if !watched {
			wait = min(wait, pollEvery)
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-time.After(keepPause):
		}
	}
}

// follow watches the directories. It is false if one cannot be watched, such as one that does not exist yet. A directory
// that was removed and made again has lost its watch; adding one twice costs nothing.
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

// Status is how the node's CNI configuration stood when the keeper last looked.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// Inspect looks at the node's CNI configuration as it is on disk, without a keeper.
func Inspect(confDir, binDir string) Status {
	s := InspectFiles(confDir, binDir)
	return s.withoutPlugin()
}

// InspectFiles is Inspect for somebody who cannot see whether the plugin is there.
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

// Degraded begins what Line says of a node on which addresses are not kept.
const Degraded = "degraded: "

// Line is what /readyz says.
func (k *Keeper) Line() string {
	s := k.Status()
	if s.State == "" {
		return "not looked at yet"
	}
	line := string(s.State) + ": " + s.Message
	if s.Plugin.Problem != "" && s.State != StateNoPlugin && k.install != nil {
		line += "; plugin: " + s.Plugin.Problem
	}
	if k.install != nil && (!s.State.Good() || s.Plugin.Problem != "") {
		return Degraded + line
	}
	return line
}

// withoutPlugin is the status in view of the binary: a configuration that names a missing plugin starts no pod.
func (s Status) withoutPlugin() Status {
	if !s.Plugin.Installed && (s.State == StateActive || s.State == StateByHand) {
		s.State, s.Message = StateNoPlugin, fmt.Sprintf("%s: %s; no pod can start on this node", s.Plugin.Path, s.Plugin.Problem)
	}
	return s
}

// look keeps the files and says what has changed, once.
func (k *Keeper) look(ctx context.Context) (again time.Duration) {
	s, again, err := k.keep(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil {
		k.metrics.errors.Inc()
	}
	k.mu.Lock()
	was := k.status
	k.status = s
	k.mu.Unlock()
	for _, state := range states {
		v := 0.0
		if state == s.State {
			v = 1
		}
		k.metrics.config.WithLabelValues(string(state)).Set(v)
	}
	if s.State != was.State {
		k.since = time.Now()
	} else if s == k.said {
		return again
	}
	if left := lasting - time.Since(k.since); left > 0 && (s.State == StateBroken || s.State == StateHeld) {
		if again == 0 {
			again = left
		}
		return min(again, left)
	}
	was, k.said = k.said, s
	if s == was {
		return again
	}
	attrs := []any{"state", s.State, "message", s.Message, "file", s.File, "network", s.Network, "source", s.Source, "plugin", s.Plugin.Version, "problem", s.Plugin.Problem}
	if k.install == nil {
		k.o.Log.Info("CNI configuration", attrs...)
		return again
	}
	good := s.State.Good() && s.Plugin.Problem == ""
	if good {
		k.o.Log.Info("CNI configuration", attrs...)
	} else {
		k.o.Log.Warn("CNI configuration", attrs...)
	}
	if s.State == was.State && s.Message == was.Message || s.State == StateNone {
		return again
	}
	e := ledger.Event{Reason: EventConfigured, Message: fmt.Sprintf("CNI configuration: %s: %s", s.State, s.Message)}
	if !good {
		e.Reason = EventNotConfigured
	}
	k.o.Publish(e)
	return again
}

// keep makes the files what they should be. What cannot be read or written is left as it is, and tried again.
func (k *Keeper) keep(ctx context.Context) (s Status, again time.Duration, err error) {
	var did plan
	ready := unknown
	var pluginErr error
	if k.install != nil {
		// The plugin first: a conflist that names a missing one breaks every pod.
		ready, pluginErr = k.install.ensure(ctx)
		if pluginErr == nil {
			pluginErr = atomicfile.Sweep(k.install.dir)
		}
		did, err = k.settle(ready, k.misfit(ctx))
	}
	dir, readErr := readConfDir(k.o.ConfDir)
	if err = errors.Join(err, readErr); err != nil {
		s = Status{State: StateError, Message: err.Error()}
	} else if s = dir.status(); did.status != nil {
		s.State, s.Message = did.status.State, did.status.Message
	}
	s.ConfDir = k.o.ConfDir
	s.Plugin = inspectPlugin(k.o.BinDir)
	if pluginErr != nil {
		s.Plugin.Problem = pluginErr.Error()
	}
	if ready == no && s.State != StateError && s.State != StateUnsupported && s.State != StateNone {
		s.State, s.Message = StateNoPlugin, s.Plugin.Problem
	}
	s = s.withoutPlugin()
	if k.install == nil && s.State == StateActive && s.Source != "" {
		s.Message += ", which --install-cni was for: without it nobody follows the changes of that"
	}
	s.Message, s.Plugin.Problem = oneLine(s.Message), oneLine(s.Plugin.Problem)
	err = errors.Join(err, pluginErr)
	if err != nil {
		again = keepSoon
	} else if did.again > 0 {
		again = did.again
	} else if did.write != nil {
		again = keepSoon // for what an ADD leaves that was under way
	}
	if ready == yes && s.State == StateActive {
		// What cannot be done now is done at the next look, or is reported by the pod's DEL.
		if err := retypeFlannel(dir, netconf.HostLocal, netconf.Type, s.Network); err != nil {
			k.o.Log.Warn("Cannot change what flannel remembers of its containers", "err", err)
			again = keepSoon
		}
	}
	return s, again, err
}

// oneLine is what several errors say.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

// misfit is why the agent's file would do harm, or nothing, with the runtime as it is configured; nil where it
// would not, or where the runtime does not say. A runtime that does not answer starts no pod either.
func (k *Keeper) misfit(ctx context.Context) *Status {
	if k.runtime == nil || time.Since(k.runtimeAt) > k.o.Interval {
		r, err := k.o.Runtime(ctx)
		k.runtimeAt = time.Now()
		if err == nil {
			k.runtime = &r
		} else {
			k.o.Log.Debug("The runtime does not say where it looks for CNI", "err", err)
		}
	}
	if k.runtime == nil {
		return nil
	}
	r := k.runtime
	switch {
	case r.ConfDir != "" && !sameDir(r.ConfDir, k.o.ConfDir):
		return &Status{State: StateError, Message: fmt.Sprintf("the runtime reads %s: expected --cni-conf-dir to be that", r.ConfDir)}
	case len(r.BinDirs) > 0 && !slices.ContainsFunc(r.BinDirs, func(dir string) bool { return sameDir(dir, k.install.dir) }):
		return &Status{State: StateNoPlugin, Message: fmt.Sprintf("the runtime runs the plugins of %s: expected --cni-bin-dir to be that", strings.Join(r.BinDirs, " and "))}
	case r.MaxConfNum != nil && *r.MaxConfNum != 1:
		return &Status{State: StateUnsupported, Message: fmt.Sprintf("the runtime attaches pods to more than one configuration (max_conf_num = %d), so that the agent's would be one more: write \"stayput\" by hand", *r.MaxConfNum)}
	}
	return nil
}

func sameDir(a, b string) bool {
	if filepath.Clean(a) == filepath.Clean(b) {
		return true
	}
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// settle writes or removes the agent's conflist.
func (k *Keeper) settle(ready usable, misfit *Status) (plan, error) {
	dir, err := readConfDir(k.o.ConfDir)
	if err != nil {
		return plan{}, err
	}
	if err := atomicfile.Sweep(k.o.ConfDir); err != nil {
		return plan{}, err
	}
	now, err := k.o.Clock.Now()
	if err != nil {
		return plan{}, err
	}
	p := dir.decide(k.limits, &k.memory, now.Boot)
	_, ours := dir.own()
	path := filepath.Join(k.o.ConfDir, ConflistName)
	switch {
	case ready == no && ours:
		p.remove, p.write = true, nil
	case ready != yes:
		p.write = nil
	}
	switch {
	case misfit != nil && ours:
		p = plan{remove: true, status: misfit}
	case misfit != nil:
		p = plan{status: misfit}
	case k.runtime == nil && !ours && p.write != nil:
		p = plan{again: pollEvery}
	}
	switch {
	case p.write != nil && k.writes.Tokens() < 1:
		return plan{again: writeEvery, status: &Status{
			State: StateConflict, Message: fmt.Sprintf("%s was written %d times in a short while: another program keeps changing or removing it", ConflistName, writeBurst),
		}}, nil
	case p.write != nil:
		if err := (atomicfile.File{Path: path, Mode: 0o644}).Write(bytes.NewReader(p.write)); err != nil {
			return plan{}, err
		}
		k.writes.Allow()
		k.metrics.writes.Inc()
		k.o.Log.Info("Wrote the CNI configuration", "file", path)
		k.o.Wrote() // the pods that run are stayput's from now on
	case p.remove:
		if err := atomicfile.Remove(path); err != nil {
			return plan{}, err
		}
		k.metrics.writes.Inc()
		k.o.Log.Info("Removed the CNI configuration", "file", path)
	}
	return p, nil
}
