package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/ledger"
)

// keeper keeps the plugin's binary and the agent's conflist in place, see conflist.go for what that is. Nobody
// else's file is ever written. It is the only one that writes; it runs in one goroutine, but for the status.
type keeper struct {
	a       *Agent
	dir     string
	install *installer // nil: it only looks
	limits  limits
	memory  memory
	writes  *rate.Limiter

	runtime   runtimeCNI // as it last answered
	runtimeAt time.Time

	pass    sync.Mutex // held while files are written
	stopped bool

	said  CNIStatus // last
	since time.Time // when the state became what it is

	mu     sync.Mutex
	status CNIStatus
}

const (
	// keepSoon is when a look that failed is repeated.
	keepSoon = 10 * time.Second
	// lasting is for how long a state has to last that installers go through: half a file, and none.
	lasting = 10 * time.Second
	// keepPause is between two looks, however often files change.
	keepPause = 100 * time.Millisecond
	// Each write makes the runtime load its configuration, which makes CNI calls wait: a fight with another program
	// over the file must not become one with the runtime.
	writeEvery, writeBurst = time.Minute, 10
)

func newKeeper(a *Agent) *keeper {
	k := &keeper{
		a: a, dir: a.o.CNIConfDir, writes: rate.NewLimiter(rate.Every(writeEvery), writeBurst),
		limits: limits{stateDir: a.o.StateDir, promisedShare: a.o.PromisedShare, longestRetention: a.o.LongestRetention},
	}
	if a.o.InstallCNI {
		k.install = &installer{source: a.o.PluginBinary, dir: a.o.CNIBinDir}
	}
	return k
}

// keepLoop looks whenever a file has changed, and by the clock.
func (a *Agent) keepLoop(ctx context.Context) {
	beat := a.health.loop("cni")
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.keepNow:
		case <-timer.C:
		}
		beat.begin()
		again := a.keeper.keepAndReport(ctx)
		beat.end()
		wait := a.o.Interval*9/10 + rand.N(a.o.Interval/5+1)
		if again > 0 {
			wait = min(wait, again)
		}
		if !a.watch.followConf() {
			wait = min(wait, pollEvery)
		}
		timer.Reset(wait)
		if !pause(ctx, keepPause) {
			return
		}
	}
}

// StopKeeping ends the keeping of plugin and conflist, so that they can be removed; afterwards it only looks.
func (a *Agent) StopKeeping() {
	a.keeper.pass.Lock()
	a.keeper.stopped = true
	a.keeper.pass.Unlock()
	a.keepNow.up()
}

// CNI is how the node's CNI configuration stood when the agent last looked.
func (a *Agent) CNI() CNIStatus {
	a.keeper.mu.Lock()
	defer a.keeper.mu.Unlock()
	return a.keeper.status
}

// InspectCNI looks at the node's CNI configuration as it is on disk, without an agent.
func InspectCNI(o Options) CNIStatus {
	o.setDefaults()
	dir, err := readConfDir(o.CNIConfDir)
	s := dir.status()
	if err != nil {
		s = CNIStatus{State: CNIError, Message: err.Error()}
	}
	s.ConfDir = o.CNIConfDir
	s.Plugin = inspectPlugin(o.CNIBinDir)
	return s.withoutPlugin()
}

// withoutPlugin is the status in view of the binary: a configuration that names a missing plugin starts no pod.
func (s CNIStatus) withoutPlugin() CNIStatus {
	if !s.Plugin.Installed && (s.State == CNIActive || s.State == CNIByHand) {
		s.State, s.Message = CNINoPlugin, fmt.Sprintf("%s: %s; no pod can start on this node", s.Plugin.Path, s.Plugin.Problem)
	}
	return s
}

// keepAndReport says what has changed, once.
func (k *keeper) keepAndReport(ctx context.Context) (again time.Duration) {
	s, again, err := k.keep(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil {
		k.a.metrics.cniErrors.Inc()
	}
	k.mu.Lock()
	was := k.status
	k.status = s
	k.mu.Unlock()
	for _, state := range cniStates {
		v := 0.0
		if state == s.State {
			v = 1
		}
		k.a.metrics.cniConfig.WithLabelValues(string(state)).Set(v)
	}
	if s.State != was.State {
		k.since = time.Now()
	} else if s == k.said {
		return again
	}
	if left := lasting - time.Since(k.since); left > 0 && (s.State == CNIBroken || s.State == CNIHeld) {
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
	if !k.keeping() {
		k.a.log.Info("CNI configuration", attrs...)
		return again
	}
	good := s.State.Good() && s.Plugin.Problem == ""
	if good {
		k.a.log.Info("CNI configuration", attrs...)
	} else {
		k.a.log.Warn("CNI configuration", attrs...)
	}
	if s.State == was.State && s.Message == was.Message || s.State == CNINone {
		return again
	}
	e := ledger.Event{Reason: EventCNIConfigured, Message: fmt.Sprintf("CNI configuration: %s: %s", s.State, s.Message)}
	if !good {
		e.Reason = EventCNINotConfigured
	}
	k.a.publish(e)
	return again
}

func (k *keeper) keeping() bool {
	k.pass.Lock()
	defer k.pass.Unlock()
	return k.install != nil && !k.stopped
}

// keep makes the files what they should be. What cannot be read or written is left as it is, and tried again.
func (k *keeper) keep(ctx context.Context) (s CNIStatus, again time.Duration, err error) {
	k.pass.Lock()
	defer k.pass.Unlock()
	var did plan
	ready := unknown
	var pluginErr error
	if k.install != nil && !k.stopped {
		// The plugin first: a conflist that names a missing one breaks every pod.
		ready, pluginErr = k.install.ensure(ctx)
		if pluginErr == nil {
			pluginErr = atomicfile.Sweep(k.install.dir)
		}
		did, err = k.settle(ready, k.misfit(ctx))
	}
	dir, readErr := readConfDir(k.dir)
	if err = errors.Join(err, readErr); err != nil {
		s = CNIStatus{State: CNIError, Message: err.Error()}
	} else if s = dir.status(); did.status != nil {
		s.State, s.Message = did.status.State, did.status.Message
	}
	s.ConfDir = k.dir
	s.Plugin = inspectPlugin(k.a.o.CNIBinDir)
	if pluginErr != nil {
		s.Plugin.Problem = pluginErr.Error()
	}
	if ready == no && s.State != CNIError && s.State != CNIUnsupported && s.State != CNINone {
		s.State, s.Message = CNINoPlugin, s.Plugin.Problem
	}
	s = s.withoutPlugin()
	if k.install == nil && s.State == CNIActive && s.Source != "" {
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
	if ready == yes && s.State == CNIActive {
		// What cannot be done now is done at the next look, or is reported by the pod's DEL.
		if err := retypeFlannel(dir, stockIPAM, PluginName, s.Network); err != nil {
			k.a.log.Warn("Cannot change what flannel remembers of its containers", "err", err)
			again = keepSoon
		}
	}
	return s, again, err
}

// oneLine is what several errors say.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

// misfit is why the agent's file would do harm, or nothing, with the runtime as it is configured; nil where it
// would not, or where the runtime does not say. A runtime that does not answer starts no pod either.
func (k *keeper) misfit(ctx context.Context) *CNIStatus {
	if !k.runtime.known || time.Since(k.runtimeAt) > k.a.o.Interval {
		r, err := k.a.cri.cni(ctx)
		k.runtimeAt = time.Now()
		if err == nil {
			k.runtime = r
		} else {
			k.a.log.Debug("The runtime does not say where it looks for CNI", "err", err)
		}
	}
	r := k.runtime
	switch {
	case r.confDir != "" && !sameDir(r.confDir, k.dir):
		return &CNIStatus{State: CNIError, Message: fmt.Sprintf("the runtime reads %s: expected --cni-conf-dir to be that", r.confDir)}
	case len(r.binDirs) > 0 && !slices.ContainsFunc(r.binDirs, func(dir string) bool { return sameDir(dir, k.install.dir) }):
		return &CNIStatus{State: CNINoPlugin, Message: fmt.Sprintf("the runtime runs the plugins of %s: expected --cni-bin-dir to be that", strings.Join(r.binDirs, " and "))}
	case r.maxConfNum != nil && *r.maxConfNum != 1:
		return &CNIStatus{State: CNIUnsupported, Message: fmt.Sprintf("the runtime attaches pods to more than one configuration (max_conf_num = %d), so that the agent's would be one more: write \"stayput\" by hand", *r.maxConfNum)}
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
func (k *keeper) settle(ready usable, misfit *CNIStatus) (plan, error) {
	dir, err := readConfDir(k.dir)
	if err != nil {
		return plan{}, err
	}
	if err := atomicfile.Sweep(k.dir); err != nil {
		return plan{}, err
	}
	now, err := k.a.o.Clock.Now()
	if err != nil {
		return plan{}, err
	}
	p := dir.decide(k.limits, &k.memory, now.Boot)
	own := dir.own()
	path := filepath.Join(k.dir, ConflistName)
	switch {
	case ready == no && own != nil && own.ours:
		p.remove, p.write = true, nil
	case ready != yes:
		p.write = nil
	}
	switch {
	case misfit != nil && own != nil && own.ours:
		p = plan{remove: true, status: misfit}
	case misfit != nil:
		p = plan{status: misfit}
	case !k.runtime.known && own == nil && p.write != nil:
		p = plan{again: pollEvery}
	}
	switch {
	case p.write != nil && k.writes.Tokens() < 1:
		return plan{again: writeEvery, status: &CNIStatus{
			State: CNIConflict, Message: fmt.Sprintf("%s was written %d times in a short while: another program keeps changing or removing it", ConflistName, writeBurst),
		}}, nil
	case p.write != nil:
		if err := (atomicfile.File{Path: path, Mode: 0o644}).Write(bytes.NewReader(p.write)); err != nil {
			return plan{}, err
		}
		k.writes.Allow()
		k.a.metrics.cniWrites.Inc()
		k.a.log.Info("Wrote the CNI configuration", "file", path)
		k.a.reconcileNow.up() // the pods that run are stayput's from now on
	case p.remove:
		if err := atomicfile.Remove(path); err != nil {
			return plan{}, err
		}
		k.a.metrics.cniWrites.Inc()
		k.a.log.Info("Removed the CNI configuration", "file", path)
	}
	return p, nil
}

// longestConf is far more than any configuration has.
const longestConf = 1 << 20

// readConfDir reads what runtimes read. A directory that does not exist configures nothing.
func readConfDir(path string) (confDir, error) {
	var err error
	for range 10 { // a file that goes between the listing and its reading is listed again
		var d confDir
		if d, err = readConfDirOnce(path); !errors.Is(err, fs.ErrNotExist) {
			return d, err
		}
		if _, statErr := os.Stat(path); errors.Is(statErr, fs.ErrNotExist) {
			return confDir{}, statErr
		}
	}
	return confDir{}, err
}

func readConfDirOnce(path string) (confDir, error) {
	entries, err := os.ReadDir(path) // sorted by name
	if err != nil {
		return confDir{}, err
	}
	d := confDir{folders: map[string][]confFile{}}
	for _, e := range entries {
		if e.IsDir() {
			inside, err := os.ReadDir(filepath.Join(path, e.Name()))
			if err != nil {
				return confDir{}, err
			}
			for _, f := range inside {
				if filepath.Ext(f.Name()) != ".conf" || f.IsDir() {
					continue
				}
				c, err := readConfFile(filepath.Join(path, e.Name(), f.Name()))
				if err != nil {
					return confDir{}, err
				}
				d.folders[e.Name()] = append(d.folders[e.Name()], c)
			}
			continue
		}
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json":
			c, err := readConfFile(filepath.Join(path, e.Name()))
			if err != nil {
				return confDir{}, err
			}
			d.files = append(d.files, c)
		}
	}
	// Listed, but removed: its mount would show an empty directory for ever.
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return confDir{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Nlink == 0 {
		return confDir{}, fmt.Errorf("%s was removed and, if it is there again, is another directory than the one mounted here: restart the agent", path)
	}
	return d, nil
}

// readConfFile returns an error where the file has gone; what else is wrong with it is its own.
func readConfFile(path string) (confFile, error) {
	f := confFile{name: filepath.Base(path)}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if target, linkErr := os.Readlink(path); linkErr == nil {
			f.err = fmt.Errorf("it links to %s, which does not exist", target)
			return f, nil
		}
		return f, err
	case err != nil:
		f.err = err
	case !info.Mode().IsRegular():
		f.err = errors.New("not a file")
	case info.Size() > longestConf:
		f.err = errors.New("too long for a configuration")
	default:
		if f.data, f.err = os.ReadFile(path); errors.Is(f.err, fs.ErrNotExist) {
			return f, f.err
		}
	}
	return f, nil
}

// flannel's plugin keeps, for each container, the configuration that it was added with, and ends it with that one
// whatever the conflist says by then: without more, containers from before would go to host-local for ever, and
// after the plugin's removal those of stayput could not be ended.
const defaultFlannelDir = "/var/lib/cni/flannel"

// retypeFlannel changes the IPAM plugin in what flannel remembers; network empty is every one.
func retypeFlannel(d confDir, from, to, network string) error {
	dirs := map[string]bool{}
	for _, f := range d.files {
		for _, p := range pluginsOf(d.read(f).list) {
			if typeOf(p) != flannelType {
				continue
			}
			if dir, _ := p["dataDir"].(string); dir != "" {
				dirs[dir] = true
			} else {
				dirs[defaultFlannelDir] = true
			}
		}
	}
	var errs []error
	for dir := range dirs {
		errs = append(errs, retype(dir, from, to, network))
	}
	return errors.Join(errs...)
}

func retype(dir, from, to, network string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if !e.Type().IsRegular() {
			continue
		}
		if strings.HasPrefix(e.Name(), atomicfile.TempPrefix) {
			errs = append(errs, ignoreGone(os.Remove(path)))
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			errs = append(errs, ignoreGone(err))
			continue
		}
		m, err := decode(data)
		if err != nil {
			continue // being written, or none of flannel's
		}
		ipam, _ := m["ipam"].(map[string]any)
		if ipam["type"] != from || network != "" && m["name"] != network {
			continue
		}
		ipam["type"] = to
		if data, err = json.Marshal(m); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, ignoreGone(atomicfile.File{Path: path, Mode: 0o600, MustExist: true}.Write(bytes.NewReader(data))))
	}
	return errors.Join(errs...)
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveConflist takes the agent's file away, so that the runtime uses the one again that it was derived from. It
// comes first when stayput is removed, after [Agent.StopKeeping] where an agent runs. A file of that name that is
// not the agent's stays. It may be run again.
func RemoveConflist(o Options) (removed bool, err error) {
	o.setDefaults()
	dir, err := readConfDir(o.CNIConfDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if own := dir.own(); own != nil && own.ours {
		if err := atomicfile.Remove(filepath.Join(o.CNIConfDir, ConflistName)); ignoreGone(err) != nil {
			return false, err
		}
		removed = true
	}
	return removed, errors.Join(atomicfile.Sweep(o.CNIConfDir), retypeFlannel(dir, PluginName, stockIPAM, ""))
}

// errNotRemoved: no configuration names the plugin's binary, but it is not ours, or cannot be removed.
var errNotRemoved = errors.New("it stays")

// RemovePlugin removes the plugin's binary. It comes last, and does nothing while a configuration names the
// plugin: no pod could start. It may be run again.
func RemovePlugin(o Options) (removed bool, err error) {
	o.setDefaults()
	dir, err := readConfDir(o.CNIConfDir)
	if ignoreGone(err) != nil {
		return false, err
	}
	for _, f := range dir.files {
		if c := dir.read(f); c.kind == byHand {
			return false, fmt.Errorf("%s names the plugin: write host-local there first", filepath.Join(o.CNIConfDir, f.name))
		}
	}
	if s := dir.status(); s.State == CNIActive { // by a copy of the conflist
		return false, fmt.Errorf("%s: restart multus' pod on this node first", s.Message)
	}
	// Once more: an ADD that was under way when the conflist went has left its note since.
	if err := retypeFlannel(dir, PluginName, stockIPAM, ""); err != nil {
		return false, err
	}
	if err := ignoreGone(atomicfile.Sweep(o.CNIBinDir)); err != nil {
		return false, err
	}
	s := inspectPlugin(o.CNIBinDir)
	if !s.Installed {
		if _, err := os.Lstat(s.Path); errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, fmt.Errorf("%s: %s: %w", s.Path, s.Problem, errNotRemoved)
	}
	if err := atomicfile.Remove(s.Path); err != nil {
		return false, fmt.Errorf("%w: %w", errNotRemoved, err)
	}
	return true, nil
}

// line is what /readyz says.
func (k *keeper) line() string {
	k.mu.Lock()
	s := k.status
	k.mu.Unlock()
	if s.State == "" {
		return "not looked at yet"
	}
	line := string(s.State) + ": " + s.Message
	if s.Plugin.Problem != "" && s.State != CNINoPlugin && k.install != nil {
		line += "; plugin: " + s.Plugin.Problem
	}
	if k.install != nil && (!s.State.Good() || s.Plugin.Problem != "") {
		return degraded + line
	}
	return line
}

// confDirs are the directories that the keeper wants to hear of.
func (k *keeper) confDirs() []string {
	dirs := []string{filepath.Clean(k.dir)}
	if k.install != nil {
		dirs = append(dirs, filepath.Clean(k.install.dir))
	}
	return slices.Compact(dirs)
}
