package cniconf

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

// The tests mount file systems that are full or read-only.
func TestMain(m *testing.M) { nodetest.Main(m) }

// plugin builds the plugin once for all tests.
var plugin = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "plugin-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, PluginName)
	out, err := exec.Command("go", "build", "-o", path, "../../../cmd/stayput").CombinedOutput()
	if err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	return path, nil
})

// confWorld is a node's CNI directories, a runtime and a keeper.
type confWorld struct {
	t               *testing.T
	k               *Keeper
	o               Options
	dir, conf, bins string
	runtime         Runtime
	runtimeErr      error
	networks        []Occupied
	networksErr     error
	said            []ledger.EventReason
}

func newConfWorld(t *testing.T) *confWorld {
	t.Helper()
	binary, err := plugin()
	must.Do(t, err)
	w := &confWorld{t: t, dir: t.TempDir()}
	w.conf, w.bins = filepath.Join(w.dir, "net.d"), filepath.Join(w.dir, "bin")
	must.Do(t, os.MkdirAll(w.conf, 0o755))
	must.Do(t, os.MkdirAll(w.bins, 0o755))
	w.o = Options{
		ConfDir: w.conf, BinDir: w.bins, CacheDir: filepath.Join(w.dir, "cache"), Install: true, Plugin: binary,
		Limits:   Limits{StateDir: filepath.Join(w.dir, "state")},
		Interval: 1000 * time.Hour, Clock: nodetest.NewClock(), Registry: prometheus.NewRegistry(),
		Errors:   prometheus.NewCounter(prometheus.CounterOpts{Name: "errors"}),
		Runtime:  func(context.Context) (Runtime, error) { return w.runtime, w.runtimeErr },
		Networks: func() ([]Occupied, error) { return w.networks, w.networksErr },
		Publish:  func(e ledger.Event) { w.said = append(w.said, e.Reason) }, Wrote: func() {},
		Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	w.k = New(w.o)
	return w
}

// restart makes another keeper.
func (w *confWorld) restart() {
	w.o.Registry = prometheus.NewRegistry()
	w.k = New(w.o)
}

func (w *confWorld) wantSaid(reasons ...ledger.EventReason) {
	w.t.Helper()
	if !slices.Equal(w.said, reasons) {
		w.t.Errorf("published %v, want %v", w.said, reasons)
	}
}

// seesNode has the keeper see the test's directory as the node's files, with both directories behind links.
func (w *confWorld) seesNode() {
	w.t.Helper()
	for _, dir := range []string{w.conf, w.bins} {
		link := filepath.Join(w.dir, dir)
		must.Do(w.t, os.MkdirAll(filepath.Dir(link), 0o755))
		must.Do(w.t, os.Symlink("/"+filepath.Base(dir), link))
	}
	w.o.Root = w.dir
	w.restart()
}

func (w *confWorld) write(name, data string) {
	w.t.Helper()
	must.Do(w.t, os.WriteFile(filepath.Join(w.conf, name), []byte(data), 0o644))
}

func (w *confWorld) remove(path ...string) {
	w.t.Helper()
	must.Do(w.t, os.Remove(filepath.Join(path...)))
}

// look has the keeper look once and fails the test unless it is in this state then.
func (w *confWorld) look(want State) Status {
	w.t.Helper()
	w.k.observe(w.t.Context())
	s := w.k.Status()
	if s.State != want {
		w.t.Errorf("state %s (%s), want %s", s.State, s.Message, want)
	}
	return s
}

func (w *confWorld) own() string {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.conf, ConflistName))
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	must.Do(w.t, err)
	return string(data)
}

// list is what is in a directory.
func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must.Do(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestItInstallsThePluginAndItsConfiguration(t *testing.T) {
	w := newConfWorld(t)
	w.look(StateNone)
	w.write("10-pods.conflist", bridgeConf)
	s := w.look(StateActive)
	if s.File != ConflistName || s.Network != "pods" || s.Source != "10-pods.conflist" || !s.Plugin.Installed ||
		s.Plugin.Version == "" || s.Plugin.Problem != "" {
		t.Errorf("status %+v", s)
	}
	info, err := os.Stat(filepath.Join(w.bins, PluginName))
	must.Do(t, err)
	if info.Mode().Perm() != 0o755 {
		t.Errorf("the plugin has mode %v", info.Mode())
	}
	if got := list(t, w.bins); !slices.Equal(got, []string{PluginName}) {
		t.Errorf("beside the plugin there are %v", got)
	}
	if !strings.Contains(w.own(), w.o.Limits.StateDir) {
		t.Errorf("the plugin is not told where the agent keeps its state:\n%s", w.own())
	}
	w.wantSaid(EventConfigured)
	if data, err := os.ReadFile(filepath.Join(w.conf, "10-pods.conflist")); err != nil || string(data) != bridgeConf {
		t.Errorf("the source is now %s, %v", data, err)
	}
	if got := Inspect(w.conf, w.bins); got != s {
		t.Errorf("seen from outside it is %+v, want %+v", got, s)
	}
}

// The runtime loads its configuration at every change, and CNI calls wait meanwhile.
func TestNothingIsWrittenWithoutNeed(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	stat := func() (all []fileID) {
		for _, path := range []string{w.conf, filepath.Join(w.conf, ConflistName), filepath.Join(w.bins, PluginName)} {
			id, err := statFile(path)
			must.Do(t, err)
			all = append(all, id)
		}
		return all
	}
	before := stat()
	w.look(StateActive)
	w.restart()
	w.k.observe(t.Context())
	if after := stat(); !slices.Equal(before, after) {
		t.Errorf("%v became %v", before, after)
	}
}

func TestWithoutInstallItOnlyObserves(t *testing.T) {
	w := newConfWorld(t)
	w.o.Install = false
	w.restart()
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateStock)
	if got := list(t, w.conf); !slices.Equal(got, []string{"10-pods.conflist"}) {
		t.Errorf("there are %v", got)
	}
	if got := list(t, w.bins); len(got) != 0 {
		t.Errorf("there are %v", got)
	}
	w.write(ConflistName, ownOf(t, "10-pods.conflist", bridgeConf)) // from when it was to install
	must.Do(t, exec.Command("cp", w.o.Plugin, w.bins).Run())
	if s := w.look(StateActive); !strings.Contains(s.Message, "not kept up to date") {
		t.Errorf("it says %s", s.Message)
	}
	w.remove(w.bins, PluginName)
	w.remove(w.conf, ConflistName)
	w.write("10-pods.conflist", handConf)
	w.look(StateNoPlugin) // no pod can start, and whoever wrote that should hear of it
	if len(w.said) != 0 {
		t.Errorf("it said %v", w.said)
	}
}

func TestAnotherBinaryIsReplacedEvenWhileItRuns(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	target := filepath.Join(w.bins, PluginName)
	sleep, err := exec.LookPath("sleep")
	must.Do(t, err)
	old, err := os.ReadFile(sleep)
	must.Do(t, err)
	must.Do(t, os.WriteFile(target, old, 0o755))
	running := exec.Command(target, "3600")
	for {
		if err = running.Start(); !errors.Is(err, unix.ETXTBSY) {
			break
		}
		running = exec.Command(target, "3600")
	}
	must.Do(t, err)
	defer func() { _ = running.Process.Kill(); _ = running.Wait() }()
	w.look(StateActive)
	want, err := os.ReadFile(w.o.Plugin)
	must.Do(t, err)
	got, err := os.ReadFile(target)
	must.Do(t, err)
	if string(got) != string(want) {
		t.Error("it is still the old one")
	}
	// Somebody breaks it, in place: it is seen and mended.
	must.Do(t, os.Truncate(target, 100))
	w.look(StateActive)
	// Somebody removes it, as a CNI's installer that empties the directory does.
	w.remove(target)
	w.look(StateActive)
}

func TestWithoutAPluginThatRunsNoConfigurationNamesIt(t *testing.T) {
	for name, spoil := range map[string]func(w *confWorld){
		"nothing to install": func(w *confWorld) { w.k.install.source = filepath.Join(w.dir, "none") },
		"no such directory":  func(w *confWorld) { must.Do(w.t, os.RemoveAll(w.bins)) },
		"another program":    func(w *confWorld) { w.k.install.source = "/bin/true" },
		"a mount with noexec": func(w *confWorld) {
			w.mount("noexec")
			must.Do(w.t, os.RemoveAll(filepath.Join(w.bins, PluginName)))
		},
		"a read-only mount": func(w *confWorld) {
			must.Do(w.t, os.RemoveAll(filepath.Join(w.bins, PluginName)))
			w.mount("ro")
		},
		"a full disk": func(w *confWorld) {
			must.Do(w.t, os.RemoveAll(filepath.Join(w.bins, PluginName)))
			w.mount("size=64k")
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.t = t
			w.write("10-pods.conflist", bridgeConf)
			w.look(StateActive) // it has run before: a file of ours that names the plugin is there
			if name == "nothing to install" || name == "another program" {
				w.remove(w.bins, PluginName)
			}
			spoil(w)
			s := w.look(StateNoPlugin)
			if s.Plugin.Problem == "" || w.own() != "" {
				t.Errorf("problem %q, and the configuration is\n%s", s.Plugin.Problem, w.own())
			}
			if line := w.k.Line(); !strings.HasPrefix(line, "degraded: no-plugin: ") || strings.Contains(line, "\n") {
				t.Errorf("/readyz: %s", line)
			}
			again := w.look(StateNoPlugin)
			if again != s {
				t.Errorf("%+v became %+v", s, again)
			}
			w.wantSaid(EventConfigured, EventNotConfigured) // each once
			if name != "no such directory" {
				if got := list(t, w.bins); len(got) != 0 {
					t.Errorf("it left %v", got)
				}
			}
			// It is tried again, and all is well once it can be.
			w.k.install.source = w.o.Plugin
			if strings.Contains(name, "mount") || strings.Contains(name, "disk") {
				must.Do(t, unix.Unmount(w.bins, 0))
			}
			must.Do(t, os.MkdirAll(w.bins, 0o755))
			w.look(StateActive)
		})
	}
}

// mount puts a small file system over the directory of plugins. "ro" is empty.
func (w *confWorld) mount(options string) {
	w.t.Helper()
	flags := uintptr(0)
	switch options {
	case "noexec":
		flags, options = unix.MS_NOEXEC, ""
	case "ro":
		flags, options = unix.MS_RDONLY, ""
	}
	must.Do(w.t, unix.Mount("tmpfs", w.bins, "tmpfs", flags, options))
	w.t.Cleanup(func() { _ = unix.Unmount(w.bins, unix.MNT_DETACH) })
}

// An upgrade that does not fit on the disk is no reason to stop: the plugin from before still runs.
func TestAnOlderPluginServesIfTheNewOneCannotBeInstalled(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	newer := filepath.Join(w.dir, "newer")
	data, err := os.ReadFile(w.o.Plugin)
	must.Do(t, err)
	must.Do(t, os.WriteFile(newer, append(data, "newer"...), 0o755))
	must.Do(t, unix.Mount(w.bins, w.bins, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(w.bins, unix.MNT_DETACH) })
	must.Do(t, unix.Mount("", w.bins, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	w.k.install.source = newer
	s := w.look(StateActive)
	if !strings.Contains(s.Plugin.Problem, "read-only") || w.own() == "" || !strings.Contains(w.k.Line(), "degraded") {
		t.Errorf("problem %q, /readyz %q", s.Plugin.Problem, w.k.Line())
	}
}

func TestWhatAKilledAgentLeftIsSwept(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.write(atomicfile.TempPrefix+"123", "half")
	must.Do(t, os.WriteFile(filepath.Join(w.bins, atomicfile.TempPrefix+"456"), []byte("half"), 0o600))
	w.look(StateActive)
	if got, want := list(t, w.conf), []string{ConflistName, "10-pods.conflist"}; !slices.Equal(got, want) {
		t.Errorf("there are %v", got)
	}
	if got, want := list(t, w.bins), []string{PluginName}; !slices.Equal(got, want) {
		t.Errorf("there are %v", got)
	}
}

func TestADirectoryThatCannotBeWrittenIsReportedAndTriedAgain(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	before := w.own()
	w.write("10-pods.conflist", bridge2Conf)
	must.Do(t, unix.Mount(w.conf, w.conf, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(w.conf, unix.MNT_DETACH) })
	must.Do(t, unix.Mount("", w.conf, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	s := w.look(StateError)
	if !strings.Contains(s.Message, "read-only") || w.own() != before {
		t.Errorf("%+v, and\n%s", s, w.own())
	}
	if n := testutil.ToFloat64(w.o.Errors); n != 1 {
		t.Errorf("counted %v", n)
	}
	must.Do(t, unix.Unmount(w.conf, 0))
	w.look(StateActive)
	if w.own() == before {
		t.Error("the change was never followed")
	}
}

func TestAFullDiskLeavesTheOldConfigurationWhole(t *testing.T) {
	w := newConfWorld(t)
	must.Do(t, unix.Mount("tmpfs", w.conf, "tmpfs", 0, "size=32k"))
	t.Cleanup(func() { _ = unix.Unmount(w.conf, unix.MNT_DETACH) })
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	before := w.own()
	w.write("10-pods.conflist", bridge2Conf)
	w.write("ballast", strings.Repeat("x", 8192)) // 32k in 4k pages: the root, three files, what is left
	for i := range 10 {
		if os.WriteFile(filepath.Join(w.conf, "b"+strings.Repeat("x", i+1)), []byte("x"), 0o644) != nil {
			break
		}
	}
	w.look(StateError)
	if w.own() != before {
		t.Errorf("it is now\n%s", w.own())
	}
	for _, name := range list(t, w.conf) {
		if strings.HasPrefix(name, atomicfile.TempPrefix) {
			t.Errorf("it left %s", name)
		}
		if name[0] == 'b' {
			w.remove(w.conf, name)
		}
	}
	w.look(StateActive)
	if w.own() == before {
		t.Error("the change was never followed")
	}
}

func TestAMissingDirectoryIsAwaited(t *testing.T) {
	w := newConfWorld(t)
	must.Do(t, os.RemoveAll(w.conf))
	w.look(StateError)
	watch, err := fsnotify.NewWatcher()
	must.Do(t, err)
	defer watch.Close()
	if w.k.follow(watch) {
		t.Error("it believes to watch what is not there")
	}
	must.Do(t, os.Mkdir(w.conf, 0o755))
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	if !w.k.follow(watch) {
		t.Error("it does not watch what is there")
	}
}

func TestRemovingTheFileEndsItsHold(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.write("20-calico.conflist", calicoConf)
	w.look(StateActive)
	w.remove(w.conf, "10-pods.conflist")
	if s := w.look(StateHeld); !strings.Contains(s.Message, "remove "+ConflistName) || w.k.Line() != "held: "+s.Message {
		t.Errorf("it says %s, and %s", s.Message, w.k.Line())
	}
	w.remove(w.conf, ConflistName)
	w.look(StateUnsupported)
	if w.own() != "" {
		t.Error("it is there again")
	}
}

// The loop, woken by inotify alone.
func TestChangesAreFollowedAsTheyHappen(t *testing.T) {
	w := newConfWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { w.k.Run(ctx, func(observe func()) { observe() }) })
	defer wg.Wait()
	defer cancel()
	state := func(s State) func() bool { return func() bool { return w.k.Status().State == s } }
	must.Eventually(t, "the first look", state(StateNone))
	w.write("10-pods.conflist", bridgeConf)
	must.Eventually(t, "the file", func() bool { return strings.Contains(w.own(), "10.1.0.0/24") })
	w.write("10-pods.conflist", bridge2Conf)
	must.Eventually(t, "the change", func() bool { return strings.Contains(w.own(), "10.2.0.0/24") })
	w.remove(w.conf, ConflistName)
	must.Eventually(t, "the file to be back", func() bool { return strings.Contains(w.own(), "10.2.0.0/24") })
	w.remove(w.bins, PluginName)
	must.Eventually(t, "the plugin to be back", func() bool {
		_, err := os.Stat(filepath.Join(w.bins, PluginName))
		return err == nil
	})
	w.write("10-pods.conflist", calicoConf)
	must.Eventually(t, "the file to go", func() bool { return w.own() == "" })
	must.Eventually(t, "the word", state(StateUnsupported))
}

func TestAFightOverTheFileDoesNotKeepTheRuntimeBusy(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	for range writeBurst {
		w.look(StateActive)
		w.remove(w.conf, ConflistName)
	}
	s := w.look(StateConflict)
	if !strings.Contains(s.Message, "another program") || w.own() != "" || w.k.Line() != "degraded: conflict: "+s.Message {
		t.Errorf("%+v", s)
	}
}

func TestUninstallTakesOnlyWhatIsItsOwn(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	if removed, err := RemoveConflist(w.conf, w.o.CacheDir); !removed || err != nil {
		t.Errorf("the conflist: %v, %v", removed, err)
	}
	if removed, err := RemovePlugin(w.conf, w.bins, w.o.CacheDir); !removed || err != nil {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
	if got := list(t, w.conf); !slices.Equal(got, []string{"10-pods.conflist"}) {
		t.Errorf("there are %v", got)
	}
	if got := list(t, w.bins); len(got) != 0 {
		t.Errorf("there are %v", got)
	}
	// Again, and where nothing ever was.
	none := filepath.Join(w.dir, "none")
	for conf, bins := range map[string]string{w.conf: w.bins, none: none} {
		if removed, err := RemoveConflist(conf, ""); removed || err != nil {
			t.Errorf("the conflist: %v, %v", removed, err)
		}
		if removed, err := RemovePlugin(conf, bins, ""); removed || err != nil {
			t.Errorf("the plugin: %v, %v", removed, err)
		}
	}
	// Somebody else's.
	w.write(ConflistName, bridge2Conf)
	must.Do(t, os.WriteFile(filepath.Join(w.bins, PluginName), []byte("#!/bin/sh\n"), 0o755))
	if removed, err := RemoveConflist(w.conf, w.o.CacheDir); removed || err != nil {
		t.Errorf("the conflist: %v, %v", removed, err)
	}
	if removed, err := RemovePlugin(w.conf, w.bins, w.o.CacheDir); removed || err == nil {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
	if w.own() != bridge2Conf {
		t.Error("somebody else's conflist was touched")
	}
}

func TestThePluginStaysWhileAConfigurationNamesIt(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	w.write("10-pods.conflist", handConf)
	w.look(StateByHand)
	if w.own() != "" {
		t.Error("two files do the same")
	}
	if removed, err := RemovePlugin(w.conf, w.bins, w.o.CacheDir); removed || err == nil ||
		!strings.Contains(err.Error(), "10-pods.conflist") {
		t.Errorf("%v, %v", removed, err)
	}
}

// multus keeps a copy of the conflist: without the plugin no pod of it could start.
func TestThePluginStaysWhileMultusHasACopyOfTheConflist(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	w.write("00-multus.conf", `{"name":"m","type":"multus","delegates":[`+w.own()+`]}`)
	w.look(StateActive)
	if removed, err := RemoveConflist(w.conf, w.o.CacheDir); !removed || err != nil {
		t.Errorf("the conflist: %v, %v", removed, err)
	}
	if removed, err := RemovePlugin(w.conf, w.bins, w.o.CacheDir); removed || err == nil ||
		!strings.Contains(err.Error(), "restart multus") {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
	w.write("00-multus.conf", `{"name":"m","type":"multus","delegates":[`+bridgeConf+`]}`)
	if removed, err := RemovePlugin(w.conf, w.bins, w.o.CacheDir); !removed || err != nil {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
}

// Otherwise pods would go on starting with stayput behind thin multus, and not at all behind thick multus, until
// somebody restarts it.
func TestMultusIsHandedBackTheConfigurationThatItTakesNext(t *testing.T) {
	const theirs = `"big":12345678901234567890,"kubeconfig":"/etc/cni/net.d/multus.d/multus.kubeconfig"`
	conf := func(name, delegate string) string {
		plugin := `{` + theirs + `,"type":"multus","name":"m","cniVersion":"1.0.0","delegates":[` + delegate + `,` + bridge2Conf + `]}`
		if filepath.Ext(name) == ".conflist" {
			return `{"cniVersion":"1.0.0","name":"m","plugins":[` + plugin + `]}`
		}
		return plugin
	}
	daemons := func(file string) string {
		return `{` + theirs + `,"type":"multus-shim","name":"m","cniVersion":"1.0.0","clusterNetwork":"/host/etc/cni/net.d/` + file + `"}`
	}
	for name, c := range map[string]struct{ file, is, becomes string }{
		"thin":           {"00-multus.conf", conf("00-multus.conf", "OURS"), conf("00-multus.conf", bridgeConf)},
		"thin, as list":  {"00-multus.conflist", conf("00-multus.conflist", "OURS"), conf("00-multus.conflist", bridgeConf)},
		"thick":          {"00-multus.conf", daemons(ConflistName), daemons("10-pods.conflist")},
		"thick, another": {"00-multus.conf", daemons("10-pods.conflist"), ""},
		"by hand":        {"00-multus.conf", conf("00-multus.conf", handConf), ""},
		"not a copy":     {"00-multus.conf", conf("00-multus.conf", bridgeConf), ""},
		"half":           {"00-multus.conf", `{"type":"multus"`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.write("10-pods.conflist", bridgeConf)
			w.write("20-other.conflist", calicoConf)
			w.look(StateActive)
			is := strings.Replace(c.is, "OURS", w.own(), 1)
			w.write(c.file, is)
			hands := func(want string) {
				t.Helper()
				changed, err := HandBackMultus(w.conf)
				data, readErr := os.ReadFile(filepath.Join(w.conf, c.file))
				must.Do(t, errors.Join(err, readErr))
				if changed != (want != is) || !sameJSON(data, want) {
					t.Errorf("changed: %t: %s", changed, data)
				}
			}
			hands(is) // stayput is still there
			_, err := RemoveConflist(w.conf, w.o.CacheDir)
			must.Do(t, err)
			if c.becomes == "" {
				c.becomes = is
			}
			hands(c.becomes)
			is = c.becomes
			hands(is)
			info, err := os.Stat(filepath.Join(w.conf, c.file))
			if must.Do(t, err); info.Mode().Perm() != 0o644 {
				t.Errorf("its mode is %o", info.Mode().Perm())
			}
		})
	}
}

// sameJSON reports whether two objects are the same, or the same text.
func sameJSON(data []byte, want string) bool {
	read := func(data []byte) (m map[string]any) {
		d := json.NewDecoder(bytes.NewReader(data))
		d.UseNumber()
		_ = d.Decode(&m) // nil
		return m
	}
	a, b := read(data), read([]byte(want))
	return a != nil && reflect.DeepEqual(a, b) || string(data) == want
}

func TestWithNothingToReturnToMultusKeepsItsCopy(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	copied := `{"name":"m","type":"multus","delegates":[` + w.own() + `]}`
	w.write("00-multus.conf", copied)
	w.remove(w.conf, "10-pods.conflist")
	_, err := RemoveConflist(w.conf, w.o.CacheDir)
	must.Do(t, err)
	for _, first := range []string{"", handConf, "{"} {
		if first != "" {
			w.write("10-pods.conflist", first)
		}
		if changed, err := HandBackMultus(w.conf); changed || err != nil {
			t.Errorf("before %q: %t, %v", first, changed, err)
		}
	}
}

// flannel ends a container with the configuration that it was added with.
func TestFlannelsNotesNameThePluginThatKeepsTheAddresses(t *testing.T) {
	w := newConfWorld(t)
	notes := filepath.Join(w.dir, "flannel")
	must.Do(t, os.Mkdir(notes, 0o700))
	note := func(id, network, ipam string) {
		must.Do(t, os.WriteFile(filepath.Join(notes, id), []byte(`{"big":12345678901234567890,"ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}]],"type":"`+ipam+`"},"name":"`+network+`","type":"bridge"}`), 0o600))
	}
	read := func(id string) string {
		data, err := os.ReadFile(filepath.Join(notes, id))
		must.Do(t, err)
		return string(data)
	}
	note("a", "cbr0", "host-local")
	note("other", "lan", "host-local")
	note("dhcp", "cbr0", "dhcp")
	must.Do(t, os.WriteFile(filepath.Join(notes, "torn"), []byte(`{"ipam":{"type":"host-local"`), 0o600))
	w.write("10-flannel.conflist", `{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","dataDir":"`+notes+`"}]}`)
	w.look(StateActive)
	if got := read("a"); !strings.Contains(got, `"type":"stayput"`) || !strings.Contains(got, "12345678901234567890") ||
		!strings.Contains(got, `"stateDir":"`+w.o.Limits.StateDir+`"`) {
		t.Errorf("it is %s", got)
	}
	for _, id := range []string{"other", "dhcp", "torn"} {
		if got := read(id); strings.Contains(got, "stayput") {
			t.Errorf("%s is %s", id, got)
		}
	}
	if _, err := RemoveConflist(w.conf, w.o.CacheDir); err != nil {
		t.Error(err)
	}
	note("b", "cbr0", "stayput") // of an ADD that was under way
	if _, err := RemovePlugin(w.conf, w.bins, w.o.CacheDir); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"a", "b"} {
		if got := read(id); !strings.Contains(got, `"type":"host-local"`) {
			t.Errorf("%s is %s", id, got)
		}
	}
	if got := list(t, notes); !slices.Equal(got, []string{"a", "b", "dhcp", "other", "torn"}) {
		t.Errorf("there are %v", got)
	}
}

// multus ends a container with what its ADD delegated to, whatever its configuration says by then.
func TestMultusNotesNameThePluginThatKeepsTheAddresses(t *testing.T) {
	w := newConfWorld(t)
	notes := filepath.Join(w.o.CacheDir, "multus")
	must.Do(t, os.MkdirAll(filepath.Join(notes, "results"), 0o700))
	// As its saveDelegates: the configuration is in Bytes.
	note := func(id string, configs ...string) {
		t.Helper()
		var delegates []string
		for _, config := range configs {
			delegates = append(delegates, `{"Conf":{"ipam":{}},"Name":"","IsFilterV4Gateway":true,"big":12345678901234567890,`+
				`"Bytes":"`+base64.StdEncoding.EncodeToString([]byte(config))+`"}`)
		}
		must.Do(t, os.WriteFile(filepath.Join(notes, id), []byte("["+strings.Join(delegates, ",")+"]"), 0o600))
	}
	read := func(id string) (configs []string) {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(notes, id))
		must.Do(t, err)
		var delegates []struct {
			IsFilterV4Gateway bool
			Bytes             []byte
		}
		must.Do(t, json.Unmarshal(data, &delegates))
		for _, d := range delegates {
			if !d.IsFilterV4Gateway || !strings.Contains(string(data), `"big":12345678901234567890`) {
				t.Errorf("of %s is left %s", id, data)
			}
			configs = append(configs, string(d.Bytes))
		}
		return configs
	}
	const (
		lan = `{"cniVersion":"1.0.0","name":"lan","type":"macvlan","ipam":{"subnet":"10.7.0.0/16","type":"host-local"}}`
		// The daemon notes of the default network's plugins no more than their types: k8snetworkplumbingwg/multus-cni#1449.
		bare = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"ipam":{"type":"host-local"},"type":"bridge"},{"ipam":{},"type":"portmap"}]}`
	)
	stayputs := func(config string) string { return strings.ReplaceAll(config, "host-local", "stayput") }
	w.write("10-pods.conflist", bridgeConf)
	note("thin", bridgeConf, lan)
	note("thick", bare)
	note("dhcp", strings.ReplaceAll(bridgeConf, "host-local", "dhcp"))
	must.Do(t, os.WriteFile(filepath.Join(notes, "torn"), []byte(`[{"Bytes":"`), 0o600))

	// The default network's are Stayput's from now on; of the others, each says in its own configuration whose they are.
	w.look(StateActive)
	for _, id := range []string{"thin", "thick"} {
		if got := read(id)[0]; !strings.Contains(got, `"type":"stayput"`) || strings.Contains(got, "host-local") ||
			!strings.Contains(got, `"stateDir":"`+w.o.Limits.StateDir+`"`) {
			t.Errorf("%s is %s", id, got)
		}
	}
	if got := read("thin")[1]; got != lan {
		t.Errorf("the other network is %s", got)
	}
	if got := read("dhcp")[0]; strings.Contains(got, "stayput") {
		t.Errorf("it is %s", got)
	}

	// No DEL finds the plugin gone, and host-local has the ranges without which its DEL fails.
	note("hand", bridgeConf, stayputs(lan))
	_, err := RemoveConflist(w.conf, w.o.CacheDir)
	must.Do(t, err)
	note("late", stayputs(bare)) // of an ADD that was under way
	_, err = RemovePlugin(w.conf, w.bins, w.o.CacheDir)
	must.Do(t, err)
	for _, id := range []string{"thin", "thick", "hand", "late"} {
		for i, got := range read(id) {
			want := []string{"10.1.0.0/24", "10.7.0.0/16"}[i]
			if strings.Contains(got, `"stayput"`) || !strings.Contains(got, `"type":"host-local"`) || !strings.Contains(got, want) {
				t.Errorf("%s is %s", id, got)
			}
		}
	}
	if got := list(t, notes); !slices.Equal(got, []string{"dhcp", "hand", "late", "results", "thick", "thin", "torn"}) {
		t.Errorf("there are %v", got)
	}
}

// CRI-O ends a container with the configuration that libcni has in its cache since the container was added.
func TestCRIOsCacheNamesThePluginThatKeepsTheAddresses(t *testing.T) {
	w := newConfWorld(t)
	results := filepath.Join(w.o.CacheDir, "results")
	must.Do(t, os.MkdirAll(results, 0o700))
	for _, name := range []string{"bridge", "portmap"} {
		must.Do(t, os.WriteFile(filepath.Join(w.bins, name), nil, 0o755))
	}
	cache := libcni.NewCNIConfigWithCacheDir(nil, w.o.CacheDir, nil)
	note := func(id, network, plugins string) {
		config := base64.StdEncoding.EncodeToString(
			[]byte(`{"cniVersion":"1.0.0","name":"` + network + `","plugins":[` + plugins + `]}`))
		must.Do(t, os.WriteFile(filepath.Join(results, network+"-"+id+"-eth0"), []byte(`{"kind":"cniCacheV1","containerId":"`+
			id+`","config":"`+config+`","ifName":"eth0","networkName":"`+network+`","cniArgs":[["K8S_POD_NAME","web-0"]],`+
			`"capabilityArgs":{"big":12345678901234567890},"result":{"cniVersion":"1.0.0"}}`), 0o600))
	}
	read := func(id, network string) string {
		t.Helper()
		config, rt, err := cache.GetNetworkListCachedConfig(&libcni.NetworkConfigList{Name: network},
			&libcni.RuntimeConf{ContainerID: id, IfName: "eth0"})
		must.Do(t, err)
		if len(rt.Args) != 1 || rt.Args[0][1] != "web-0" {
			t.Errorf("of %s is left %+v", id, rt)
		}
		return string(config)
	}
	const bridge = `{"type":"bridge","mtu":12345678901234567890,"ipam":{"ranges":[],"type":"host-local"}},{"type":"portmap"}`
	note("a", "pods", bridge)
	note("other", "lan", bridge)
	note("dhcp", "pods", `{"type":"bridge","ipam":{"type":"dhcp"}}`)
	note("unknown", "pods", `{"type":"mine","ipam":{"type":"host-local"}}`)
	must.Do(t, os.WriteFile(filepath.Join(results, "pods-torn-eth0"), []byte(`{"kind":"cniCacheV1","con`), 0o600))
	w.write("10-pods.conflist", bridgeConf)

	w.look(StateActive)
	if got := read("a", "pods"); !strings.Contains(got, "host-local") {
		t.Errorf("for a runtime that does not go by it, it is %s", got)
	}
	w.runtime.Name = "cri-o"
	w.restart()
	w.look(StateActive)
	if got := read("a", "pods"); !strings.Contains(got, `"type":"stayput"`) || strings.Contains(got, "host-local") ||
		!strings.Contains(got, `"mtu":12345678901234567890`) ||
		!strings.Contains(got, `"stateDir":"`+w.o.Limits.StateDir+`"`) {
		t.Errorf("it is %s", got)
	}
	for id, network := range map[string]string{"other": "lan", "dhcp": "pods", "unknown": "pods"} {
		if got := read(id, network); strings.Contains(got, "stayput") {
			t.Errorf("%s is %s", id, got)
		}
	}

	// No DEL finds the plugin gone.
	_, err := RemoveConflist(w.conf, w.o.CacheDir)
	must.Do(t, err)
	note("b", "pods", strings.Replace(bridge, "host-local", "stayput", 1)) // of an ADD that was under way
	_, err = RemovePlugin(w.conf, w.bins, w.o.CacheDir)
	must.Do(t, err)
	for _, id := range []string{"a", "b"} {
		if got := read(id, "pods"); !strings.Contains(got, `"type":"host-local"`) || strings.Contains(got, `"stayput"`) {
			t.Errorf("%s is %s", id, got)
		}
	}
	if got := list(t, results); len(got) != 6 {
		t.Errorf("there are %v", got)
	}
}

// Installers write in steps: only what stays is worth an Event.
func TestWhatPassesIsNotAnnounced(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	w.remove(w.conf, "10-pods.conflist")
	w.look(StateHeld)
	w.write("10-pods.conflist", bridgeConf[:30])
	w.look(StateBroken)
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateActive)
	w.wantSaid(EventConfigured)
	w.write("10-pods.conflist", "")
	w.look(StateBroken)
	if again := w.k.observe(t.Context()); again <= 0 || again > lasting {
		t.Errorf("it looks again after %s", again)
	}
	w.k.since = w.k.since.Add(-lasting)
	w.look(StateBroken)
	w.look(StateBroken)
	w.wantSaid(EventConfigured, EventNotConfigured)
}

func TestARuntimeThatLooksElsewhereIsNotGivenAFile(t *testing.T) {
	one, two, any := 1, 2, 0
	for name, c := range map[string]struct {
		runtime func(conf, bins string) Runtime
		state   State
		says    string
	}{
		"as expected": {func(conf, bins string) Runtime { return Runtime{"", conf, []string{bins}, &one} }, StateActive,
			"derived"},
		"by another name": {func(conf, bins string) Runtime {
			return Runtime{"", conf + "/", []string{"/x", bins + "/../bin/"},
				&one}
		}, StateActive, "derived"},
		"says nothing": {func(conf, bins string) Runtime { return Runtime{} }, StateActive, "derived"},
		"another directory": {func(conf, bins string) Runtime { return Runtime{"", "/var/lib/k3s/net.d", []string{bins}, &one} },
			StateError, "/var/lib/k3s/net.d"},
		"other plugins": {func(conf, bins string) Runtime { return Runtime{"", conf, []string{"/x", "/y"}, &one} },
			StateNoPlugin, "/x and /y"},
		"several networks": {func(conf, bins string) Runtime { return Runtime{"", conf, []string{bins}, &two} },
			StateUnsupported, "max_conf_num = 2"},
		"any number of them": {func(conf, bins string) Runtime { return Runtime{"", conf, []string{bins}, &any} },
			StateUnsupported, "max_conf_num = 0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.write("10-pods.conflist", bridgeConf)
			w.runtime = c.runtime(w.conf, w.bins)
			s := w.look(c.state)
			if !strings.Contains(s.Message, c.says) || (w.own() != "") != (c.state == StateActive) {
				t.Errorf("%s, and the file is\n%s", s.Message, w.own())
			}
			// One that is there already, since the runtime was configured again.
			w.write(ConflistName, ownOf(t, "10-pods.conflist", bridgeConf))
			w.look(c.state)
			if (w.own() != "") != (c.state == StateActive) {
				t.Errorf("the file is now\n%s", w.own())
			}
		})
	}
}

func TestTheFirstFileWaitsForTheRuntimesWord(t *testing.T) {
	w := newConfWorld(t)
	w.runtimeErr = errors.New("the runtime is upset")
	w.write("10-pods.conflist", bridgeConf)
	w.look(StateStock)
	if again := w.k.observe(t.Context()); again <= 0 || again > pollEvery || w.own() != "" {
		t.Errorf("it looks again after %s, and the file is\n%s", again, w.own())
	}
	w.runtimeErr = nil
	w.look(StateActive)
	// From then on it follows by itself.
	w.runtimeErr = errors.New("the runtime is upset")
	w.write("10-pods.conflist", bridge2Conf)
	w.look(StateActive)
	if !strings.Contains(w.own(), "10.2.0.0/24") {
		t.Errorf("the file is\n%s", w.own())
	}
}

func TestCalicosFileIsTakenOverOnceTheNodesRangesAreKnown(t *testing.T) {
	const calico = `{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[{"type":"calico","ipam":{"type":"host-local","subnet":"usePodCidr"}}]}`
	w := newConfWorld(t)
	var node []netip.Prefix
	var nodeErr error
	asked := 0
	w.o.PodCIDRs = func(context.Context) ([]netip.Prefix, error) {
		asked++
		return node, nodeErr
	}
	w.restart()
	w.write("10-canal.conflist", calico)
	if s := w.look(StateStock); !strings.Contains(s.Message, "the Node has no podCIDRs") || w.own() != "" {
		t.Errorf("%s, and the file is\n%s", s.Message, w.own())
	}
	if again := w.k.observe(t.Context()); again <= 0 || again > keepSoon || asked != 1 {
		t.Errorf("it looks again after %s and has asked %d times", again, asked)
	}
	node = []netip.Prefix{netip.MustParsePrefix("10.244.7.0/24")}
	w.restart()
	w.look(StateActive)
	if !strings.Contains(w.own(), `"subnet": "10.244.7.0/24"`) {
		t.Errorf("the file is\n%s", w.own())
	}

	// The API server goes away: the file stays, and follows its source.
	nodeErr = errors.New("no API server")
	w.restart()
	before := w.own()
	if w.look(StateActive); w.own() != before {
		t.Errorf("the file was\n%s\nand is\n%s", before, w.own())
	}
	w.write("10-canal.conflist", strings.Replace(calico, `"plugins"`, `"disableCheck":true,"plugins"`, 1))
	w.look(StateActive)
	if own := w.own(); !strings.Contains(own, "disableCheck") || !strings.Contains(own, `"subnet": "10.244.7.0/24"`) {
		t.Errorf("the file is\n%s", own)
	}

	// Calico moves to its own IPAM.
	w.write("10-canal.conflist", calicoConf)
	w.look(StateUnsupported)
	if w.own() != "" {
		t.Errorf("the file is\n%s", w.own())
	}
}

// Ours would be the runtime's first, and pods would silently lose what multus attaches them to.
func TestMultusIsNeverBypassed(t *testing.T) {
	for _, name := range []string{"05-multus.conf", "70-multus.conf"} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.t = t
			w.write(name, `{"cniVersion":"0.3.1","name":"m","type":"multus","delegates":[`+bridgeConf+`]}`)
			if s := w.look(StateUnsupported); !strings.Contains(s.Message, "rename it to 00-multus.conf") || w.own() != "" {
				t.Errorf("%s, and the file is\n%s", s.Message, w.own())
			}
			if line := w.k.Line(); !strings.HasPrefix(line, "degraded: ") {
				t.Errorf("/readyz: %s", line)
			}
			w.wantSaid(EventNotConfigured)
			// It comes to a node that has our file.
			w.remove(w.conf, name)
			w.write("80-pods.conflist", bridgeConf)
			w.look(StateActive)
			w.write(name, `{"cniVersion":"0.3.1","name":"m","type":"multus","delegates":[`+bridgeConf+`]}`)
			w.look(StateUnsupported)
			if w.own() != "" {
				t.Errorf("the file is still\n%s", w.own())
			}
			must.Do(t, os.Rename(filepath.Join(w.conf, name), filepath.Join(w.conf, "00-multus.conf")))
			w.look(StateShadowed) // until multus copies ours
			if w.own() == "" {
				t.Error("there is no file for multus to copy")
			}
		})
	}
}

func TestARuntimeThatDoesNotSayWhereItLooksIsNotGivenAPluginOutOfSight(t *testing.T) {
	w := newConfWorld(t)
	w.seesNode()
	w.runtime.Name = "cri-o"
	w.write("10-pods.conflist", bridgeConf)
	if s := w.look(StateNoPlugin); !strings.Contains(s.Message, "bridge is not in "+w.bins) ||
		!strings.Contains(s.Message, "--cni-bin-dir") {
		t.Errorf("it says %s", s.Message)
	}
	there := filepath.Join(w.dir, "/usr/libexec/cni")
	must.Do(t, os.MkdirAll(there, 0o755))
	must.Do(t, os.WriteFile(filepath.Join(there, "bridge"), nil, 0o755))
	if s := w.look(StateNoPlugin); !strings.Contains(s.Message, "but in /usr/libexec/cni: set --cni-bin-dir to that") {
		t.Errorf("it says %s", s.Message)
	}
	if got := list(t, w.conf); len(got) != 1 {
		t.Errorf("there are %v", got)
	}
	must.Do(t, os.WriteFile(filepath.Join(w.bins, "bridge"), nil, 0o755))
	w.look(StateActive)
	w.remove(w.bins, "bridge") // the runtime has used ours meanwhile
	w.look(StateActive)
}

func TestAnEmptyDirectoryNamesTheOneWithAConfiguration(t *testing.T) {
	w := newConfWorld(t)
	w.seesNode()
	w.look(StateNone)
	there := filepath.Join(w.dir, "/var/lib/rancher/k3s/agent/etc/cni/net.d")
	must.Do(t, os.MkdirAll(there, 0o755))
	w.look(StateNone)
	must.Do(t, os.WriteFile(filepath.Join(there, "10-flannel.conflist"), []byte(bridgeConf), 0o644))
	if s := w.look(StateError); s.Message != "no CNI configuration in "+w.conf+
		", but one in /var/lib/rancher/k3s/agent/etc/cni/net.d (10-flannel.conflist): set --cni-conf-dir to that directory" {
		t.Errorf("it says %s", s.Message)
	}
	w.runtime.ConfDir = w.conf
	w.restart()
	w.look(StateNone) // containerd says that it looks here
}

// A mount stays with the directory that it was made of, whatever the path leads to by now.
func TestADirectoryThatWasReplacedUnderItsMountIsNoticed(t *testing.T) {
	for name, c := range map[string]struct {
		dir   func(*confWorld) string
		state State
	}{
		"the configurations": {func(w *confWorld) string { return w.conf }, StateError},
		"the plugins":        {func(w *confWorld) string { return w.bins }, StateNoPlugin},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.seesNode()
			w.runtime = Runtime{ConfDir: w.conf, BinDirs: []string{"/other", w.bins}}
			w.write("10-pods.conflist", bridgeConf)
			w.look(StateActive)
			link := filepath.Join(w.dir, c.dir(w))
			leads := func(to string) {
				t.Helper()
				w.remove(link)
				if to != "" {
					must.Do(t, os.Symlink(to, link))
				}
			}
			must.Do(t, os.Mkdir(filepath.Join(w.dir, "new"), 0o755))
			for _, to := range []string{"/new", "/nowhere"} {
				leads(to)
				if s := w.look(c.state); !strings.Contains(s.Message,
					c.dir(w)+" is not the directory any more that the agent has mounted") ||
					!strings.HasPrefix(w.k.Line(), Degraded) || w.own() != "" {
					t.Errorf("%s, and the file is\n%s", w.k.Line(), w.own())
				}
			}
			leads("/" + filepath.Base(c.dir(w)))
			w.look(StateActive)
			// What cannot be seen is no reason to act.
			w.k.o.Root = filepath.Join(w.dir, "hidden")
			leads("/new")
			w.look(StateActive)
		})
	}
}

func TestARuntimeThatReconnectsIsAskedAgain(t *testing.T) {
	w := newConfWorld(t)
	reconnected := make(chan struct{})
	asked := make(chan Runtime)
	w.o.Reconnected = reconnected
	w.o.Runtime = func(ctx context.Context) (Runtime, error) {
		select {
		case r := <-asked:
			if r.Name == "away" {
				return r, errors.New("the runtime is starting")
			}
			return r, nil
		case <-ctx.Done():
			return Runtime{}, ctx.Err()
		}
	}
	w.restart()
	w.write("10-pods.conflist", bridgeConf)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { w.k.Run(ctx, func(observe func()) { observe() }) })
	defer wg.Wait()
	defer cancel()
	state := func(s State) func() bool { return func() bool { return w.k.Status().State == s } }
	asked <- Runtime{BinDirs: []string{w.bins}}
	must.Eventually(t, "the file", state(StateActive))
	reconnected <- struct{}{}
	asked <- Runtime{Name: "away"}
	reconnected <- struct{}{}
	asked <- Runtime{BinDirs: []string{"/opt/new/bin"}}
	must.Eventually(t, "another directory", state(StateNoPlugin))
	reconnected <- struct{}{}
	asked <- Runtime{BinDirs: []string{w.bins}}
	must.Eventually(t, "the file again", state(StateActive))
}
