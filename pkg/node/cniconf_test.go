package node

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/node/internal/nodetest"
)

// plugin builds the plugin once for all tests.
var plugin = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "plugin-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, PluginName)
	out, err := exec.Command("go", "build", "-o", path, "../../cmd/stayput").CombinedOutput()
	if err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	return path, nil
})

// confWorld is a node's CNI directories and a keeper.
type confWorld struct {
	*world
	k          *keeper
	conf, bins string
}

func newConfWorld(t *testing.T) *confWorld {
	t.Helper()
	binary, err := plugin()
	check(t, err)
	w := &confWorld{world: newWorld(t)}
	w.conf, w.bins = filepath.Join(w.dir, "net.d"), filepath.Join(w.dir, "bin")
	check(t, os.MkdirAll(w.bins, 0o755))
	w.a.o.InstallCNI, w.a.o.CNIBinDir, w.a.o.PluginBinary = true, w.bins, binary
	w.a.keeper = newKeeper(w.a)
	w.k = w.a.keeper
	return w
}

func (w *confWorld) write(name, data string) {
	w.t.Helper()
	check(w.t, os.WriteFile(filepath.Join(w.conf, name), []byte(data), 0o644))
}

func (w *confWorld) remove(path ...string) {
	w.t.Helper()
	check(w.t, os.Remove(filepath.Join(path...)))
}

// look has the keeper look once and fails the test unless it is in this state then.
func (w *confWorld) look(want CNIState) CNIStatus {
	w.t.Helper()
	w.k.keepAndReport(w.t.Context())
	s := w.a.CNI()
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
	check(w.t, err)
	return string(data)
}

// list is what is in a directory.
func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (w *confWorld) options() Options {
	return Options{StateDir: w.a.o.StateDir, CNIConfDir: w.conf, CNIBinDir: w.bins}
}

func TestItInstallsThePluginAndItsConfiguration(t *testing.T) {
	w := newConfWorld(t)
	w.look(CNINone)
	w.write("10-pods.conflist", bridgeConf)
	s := w.look(CNIActive)
	if s.File != ConflistName || s.Network != "pods" || s.Source != "10-pods.conflist" || !s.Plugin.Installed || s.Plugin.Version == "" || s.Plugin.Problem != "" {
		t.Errorf("status %+v", s)
	}
	info, err := os.Stat(filepath.Join(w.bins, PluginName))
	check(t, err)
	if info.Mode().Perm() != 0o755 {
		t.Errorf("the plugin has mode %v", info.Mode())
	}
	if got := list(t, w.bins); !slices.Equal(got, []string{PluginName}) {
		t.Errorf("beside the plugin there are %v", got)
	}
	if !strings.Contains(w.own(), w.a.o.StateDir) {
		t.Errorf("the plugin is not told where the agent keeps its state:\n%s", w.own())
	}
	w.wantSaid(EventCNIConfigured)
	if data, err := os.ReadFile(filepath.Join(w.conf, "10-pods.conflist")); err != nil || string(data) != bridgeConf {
		t.Errorf("the source is now %s, %v", data, err)
	}
	if got := InspectCNI(w.options()); got != s {
		t.Errorf("seen from outside it is %+v, want %+v", got, s)
	}
}

// The runtime loads its configuration at every change, and CNI calls wait meanwhile.
func TestNothingIsWrittenWithoutNeed(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	stat := func() (all []fileID) {
		for _, path := range []string{w.conf, filepath.Join(w.conf, ConflistName), filepath.Join(w.bins, PluginName)} {
			id, err := statFile(path)
			check(t, err)
			all = append(all, id)
		}
		return all
	}
	before := stat()
	w.look(CNIActive)
	w.k = newKeeper(w.a) // another agent
	w.k.keepAndReport(t.Context())
	if after := stat(); !slices.Equal(before, after) {
		t.Errorf("%v became %v", before, after)
	}
}

func TestAnAgentThatIsNotToInstallOnlyLooks(t *testing.T) {
	w := newConfWorld(t)
	w.a.o.InstallCNI = false
	w.a.keeper = newKeeper(w.a)
	w.k = w.a.keeper
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIStock)
	if got := list(t, w.conf); !slices.Equal(got, []string{"10-pods.conflist"}) {
		t.Errorf("there are %v", got)
	}
	if got := list(t, w.bins); len(got) != 0 {
		t.Errorf("there are %v", got)
	}
	w.write(ConflistName, ownOf(t, "10-pods.conflist", bridgeConf)) // from when it was to install
	check(t, exec.Command("cp", w.a.o.PluginBinary, w.bins).Run())
	if s := w.look(CNIActive); !strings.Contains(s.Message, "nobody follows") {
		t.Errorf("it says %s", s.Message)
	}
	w.remove(w.bins, PluginName)
	w.remove(w.conf, ConflistName)
	w.write("10-pods.conflist", handConf)
	w.look(CNINoPlugin) // no pod can start, and whoever wrote that should hear of it
	if len(w.said.events) != 0 {
		t.Errorf("it said %v", w.said.events)
	}
}

func TestAnotherBinaryIsReplacedAlsoWhileItRuns(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	target := filepath.Join(w.bins, PluginName)
	sleep, err := exec.LookPath("sleep")
	check(t, err)
	old, err := os.ReadFile(sleep)
	check(t, err)
	check(t, os.WriteFile(target, old, 0o755))
	running := exec.Command(target, "3600")
	for {
		if err = running.Start(); !errors.Is(err, unix.ETXTBSY) {
			break
		}
		running = exec.Command(target, "3600")
	}
	check(t, err)
	defer func() { _ = running.Process.Kill(); _ = running.Wait() }()
	w.look(CNIActive)
	want, err := os.ReadFile(w.a.o.PluginBinary)
	check(t, err)
	got, err := os.ReadFile(target)
	check(t, err)
	if string(got) != string(want) {
		t.Error("it is still the old one")
	}
	// Somebody breaks it, in place: it is seen and mended.
	check(t, os.Truncate(target, 100))
	w.look(CNIActive)
	// Somebody removes it, as a CNI's installer that empties the directory does.
	w.remove(target)
	w.look(CNIActive)
}

func TestWithoutAPluginThatRunsNoConfigurationNamesIt(t *testing.T) {
	for name, spoil := range map[string]func(w *confWorld){
		"nothing to install":  func(w *confWorld) { w.k.install.source = filepath.Join(w.dir, "none") },
		"no such directory":   func(w *confWorld) { check(w.t, os.RemoveAll(w.bins)) },
		"another program":     func(w *confWorld) { w.k.install.source = "/bin/true" },
		"a mount with noexec": func(w *confWorld) { w.mount("noexec"); check(w.t, os.RemoveAll(filepath.Join(w.bins, PluginName))) },
		"a read-only mount":   func(w *confWorld) { check(w.t, os.RemoveAll(filepath.Join(w.bins, PluginName))); w.mount("ro") },
		"a full disk":         func(w *confWorld) { check(w.t, os.RemoveAll(filepath.Join(w.bins, PluginName))); w.mount("size=64k") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.t = t
			w.write("10-pods.conflist", bridgeConf)
			w.look(CNIActive) // it has run before: a file of ours that names the plugin is there
			if name == "nothing to install" || name == "another program" {
				w.remove(w.bins, PluginName)
			}
			spoil(w)
			s := w.look(CNINoPlugin)
			if s.Plugin.Problem == "" || w.own() != "" {
				t.Errorf("problem %q, and the configuration is\n%s", s.Plugin.Problem, w.own())
			}
			if line := w.k.line(); !strings.HasPrefix(line, "degraded: no-plugin: ") || strings.Contains(line, "\n") {
				t.Errorf("/readyz: %s", line)
			}
			again := w.look(CNINoPlugin)
			if again != s {
				t.Errorf("%+v became %+v", s, again)
			}
			w.wantSaid(EventCNIConfigured, EventCNINotConfigured) // each once
			if name != "no such directory" {
				if got := list(t, w.bins); len(got) != 0 {
					t.Errorf("it left %v", got)
				}
			}
			// It is tried again, and all is well once it can be.
			w.k.install.source = w.a.o.PluginBinary
			if strings.Contains(name, "mount") || strings.Contains(name, "disk") {
				check(t, unix.Unmount(w.bins, 0))
			}
			check(t, os.MkdirAll(w.bins, 0o755))
			w.look(CNIActive)
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
	check(w.t, unix.Mount("tmpfs", w.bins, "tmpfs", flags, options))
	w.t.Cleanup(func() { _ = unix.Unmount(w.bins, unix.MNT_DETACH) })
}

// An upgrade that does not fit on the disk is no reason to stop: the plugin from before still runs.
func TestAnOlderPluginServesWhereTheNewOneCannotBeInstalled(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	newer := filepath.Join(w.dir, "newer")
	data, err := os.ReadFile(w.a.o.PluginBinary)
	check(t, err)
	check(t, os.WriteFile(newer, append(data, "newer"...), 0o755))
	check(t, unix.Mount(w.bins, w.bins, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(w.bins, unix.MNT_DETACH) })
	check(t, unix.Mount("", w.bins, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	w.k.install.source = newer
	s := w.look(CNIActive)
	if !strings.Contains(s.Plugin.Problem, "read-only") || w.own() == "" || !strings.Contains(w.k.line(), "degraded") {
		t.Errorf("problem %q, /readyz %q", s.Plugin.Problem, w.k.line())
	}
}

func TestWhatAKilledAgentLeftIsSwept(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.write(atomicfile.TempPrefix+"123", "half")
	check(t, os.WriteFile(filepath.Join(w.bins, atomicfile.TempPrefix+"456"), []byte("half"), 0o600))
	w.look(CNIActive)
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
	w.look(CNIActive)
	before := w.own()
	w.write("10-pods.conflist", bridge2Conf)
	check(t, unix.Mount(w.conf, w.conf, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(w.conf, unix.MNT_DETACH) })
	check(t, unix.Mount("", w.conf, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	s := w.look(CNIError)
	if !strings.Contains(s.Message, "read-only") || w.own() != before {
		t.Errorf("%+v, and\n%s", s, w.own())
	}
	if n := testutil.ToFloat64(w.a.metrics.cniErrors); n != 1 {
		t.Errorf("counted %v", n)
	}
	check(t, unix.Unmount(w.conf, 0))
	w.look(CNIActive)
	if w.own() == before {
		t.Error("the change was never followed")
	}
}

func TestAFullDiskLeavesTheOldConfigurationWhole(t *testing.T) {
	w := newConfWorld(t)
	check(t, unix.Mount("tmpfs", w.conf, "tmpfs", 0, "size=32k"))
	t.Cleanup(func() { _ = unix.Unmount(w.conf, unix.MNT_DETACH) })
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	before := w.own()
	w.write("10-pods.conflist", bridge2Conf)
	w.write("ballast", strings.Repeat("x", 8192)) // 32k in 4k pages: the root, three files, what is left
	for i := range 10 {
		if os.WriteFile(filepath.Join(w.conf, "b"+strings.Repeat("x", i+1)), []byte("x"), 0o644) != nil {
			break
		}
	}
	w.look(CNIError)
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
	w.look(CNIActive)
	if w.own() == before {
		t.Error("the change was never followed")
	}
}

func TestADirectoryThatIsMissingIsWaitedFor(t *testing.T) {
	w := newConfWorld(t)
	check(t, os.RemoveAll(w.conf))
	w.look(CNIError)
	if w.a.watch.followConf() {
		t.Error("it believes to watch what is not there")
	}
	check(t, os.Mkdir(w.conf, 0o755))
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	if !w.a.watch.followConf() {
		t.Error("it does not watch what is there")
	}
}

func TestWhoeverRemovesTheFileEndsItsTimeWithoutASource(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.write("20-calico.conflist", calicoConf)
	w.look(CNIActive)
	w.remove(w.conf, "10-pods.conflist")
	if s := w.look(CNIHeld); !strings.Contains(s.Message, "remove "+ConflistName) {
		t.Errorf("it says %s", s.Message)
	}
	w.remove(w.conf, ConflistName)
	w.look(CNIUnsupported)
	if w.own() != "" {
		t.Error("it is there again")
	}
}

// The loop, woken by inotify alone.
func TestChangesAreFollowedAsTheyHappen(t *testing.T) {
	w := newConfWorld(t)
	w.a.o.Interval = 1000 * time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { w.a.watch.run(ctx) })
	wg.Go(func() { w.a.keepLoop(ctx) })
	defer wg.Wait()
	defer cancel()
	until := func(what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) { // bounds a test that hangs
			if time.Now().After(deadline) {
				t.Fatalf("waited in vain for %s", what)
			}
		}
	}
	state := func(s CNIState) func() bool { return func() bool { return w.a.CNI().State == s } }
	until("the first look", state(CNINone))
	w.write("10-pods.conflist", bridgeConf)
	until("the file", func() bool { return strings.Contains(w.own(), "10.1.0.0/24") })
	w.write("10-pods.conflist", bridge2Conf)
	until("the change", func() bool { return strings.Contains(w.own(), "10.2.0.0/24") })
	w.remove(w.conf, ConflistName)
	until("the file to be back", func() bool { return strings.Contains(w.own(), "10.2.0.0/24") })
	w.remove(w.bins, PluginName)
	until("the plugin to be back", func() bool { _, err := os.Stat(filepath.Join(w.bins, PluginName)); return err == nil })
	w.write("10-pods.conflist", calicoConf)
	until("the file to go", func() bool { return w.own() == "" })
	until("the word", state(CNIUnsupported))
	w.a.StopKeeping()
	w.write("10-pods.conflist", bridgeConf)
	until("the word", state(CNIStock))
	if w.own() != "" {
		t.Error("it writes though it was told to stop")
	}
}

func TestAFightOverTheFileDoesNotKeepTheRuntimeBusy(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	for range writeBurst {
		w.look(CNIActive)
		w.remove(w.conf, ConflistName)
	}
	s := w.look(CNIConflict)
	if !strings.Contains(s.Message, "another program") || w.own() != "" {
		t.Errorf("%+v", s)
	}
}

func TestUninstallTakesOnlyWhatIsItsOwn(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	w.a.StopKeeping()
	if removed, err := RemoveConflist(w.options()); !removed || err != nil {
		t.Errorf("the conflist: %v, %v", removed, err)
	}
	if removed, err := RemovePlugin(w.options()); !removed || err != nil {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
	if got := list(t, w.conf); !slices.Equal(got, []string{"10-pods.conflist"}) {
		t.Errorf("there are %v", got)
	}
	if got := list(t, w.bins); len(got) != 0 {
		t.Errorf("there are %v", got)
	}
	// Again, and where nothing ever was.
	for _, o := range []Options{w.options(), {CNIConfDir: filepath.Join(w.dir, "none"), CNIBinDir: filepath.Join(w.dir, "none")}} {
		if removed, err := RemoveConflist(o); removed || err != nil {
			t.Errorf("the conflist: %v, %v", removed, err)
		}
		if removed, err := RemovePlugin(o); removed || err != nil {
			t.Errorf("the plugin: %v, %v", removed, err)
		}
	}
	// Somebody else's.
	w.write(ConflistName, bridge2Conf)
	check(t, os.WriteFile(filepath.Join(w.bins, PluginName), []byte("#!/bin/sh\n"), 0o755))
	if removed, err := RemoveConflist(w.options()); removed || err != nil {
		t.Errorf("the conflist: %v, %v", removed, err)
	}
	if removed, err := RemovePlugin(w.options()); removed || err == nil {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
	if w.own() != bridge2Conf {
		t.Error("somebody else's conflist was touched")
	}
}

func TestThePluginStaysWhileAConfigurationNamesIt(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	w.write("10-pods.conflist", handConf)
	w.look(CNIByHand)
	if w.own() != "" {
		t.Error("two files do the same")
	}
	if removed, err := RemovePlugin(w.options()); removed || err == nil || !strings.Contains(err.Error(), "10-pods.conflist") {
		t.Errorf("%v, %v", removed, err)
	}
}

// multus keeps a copy of the conflist: without the plugin no pod of it could start.
func TestThePluginStaysWhileMultusHasACopyOfTheConflist(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	w.write("00-multus.conf", `{"name":"m","type":"multus","delegates":[`+w.own()+`]}`)
	w.look(CNIActive)
	if removed, err := RemoveConflist(w.options()); !removed || err != nil {
		t.Errorf("the conflist: %v, %v", removed, err)
	}
	if removed, err := RemovePlugin(w.options()); removed || err == nil || !strings.Contains(err.Error(), "restart multus") {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
	w.write("00-multus.conf", `{"name":"m","type":"multus","delegates":[`+bridgeConf+`]}`)
	if removed, err := RemovePlugin(w.options()); !removed || err != nil {
		t.Errorf("the plugin: %v, %v", removed, err)
	}
}

// flannel ends a container with the configuration that it was added with.
func TestWhatFlannelRemembersGoesToWhoeverKeepsTheAddresses(t *testing.T) {
	w := newConfWorld(t)
	notes := filepath.Join(w.dir, "flannel")
	check(t, os.Mkdir(notes, 0o700))
	note := func(id, network, ipam string) {
		check(t, os.WriteFile(filepath.Join(notes, id), []byte(`{"big":12345678901234567890,"ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}]],"type":"`+ipam+`"},"name":"`+network+`","type":"bridge"}`), 0o600))
	}
	read := func(id string) string {
		data, err := os.ReadFile(filepath.Join(notes, id))
		check(t, err)
		return string(data)
	}
	note("a", "cbr0", "host-local")
	note("other", "lan", "host-local")
	note("dhcp", "cbr0", "dhcp")
	check(t, os.WriteFile(filepath.Join(notes, "torn"), []byte(`{"ipam":{"type":"host-local"`), 0o600))
	w.write("10-flannel.conflist", `{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","dataDir":"`+notes+`"}]}`)
	w.look(CNIActive)
	if got := read("a"); !strings.Contains(got, `"type":"stayput"`) || !strings.Contains(got, "12345678901234567890") {
		t.Errorf("it is %s", got)
	}
	for _, id := range []string{"other", "dhcp", "torn"} {
		if got := read(id); strings.Contains(got, "stayput") {
			t.Errorf("%s is %s", id, got)
		}
	}
	if _, err := RemoveConflist(w.options()); err != nil {
		t.Error(err)
	}
	note("b", "cbr0", "stayput") // of an ADD that was under way
	if _, err := RemovePlugin(w.options()); err != nil {
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

// Installers write in steps: only what stays is worth an Event.
func TestWhatPassesIsNotAnnounced(t *testing.T) {
	w := newConfWorld(t)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	w.remove(w.conf, "10-pods.conflist")
	w.look(CNIHeld)
	w.write("10-pods.conflist", bridgeConf[:30])
	w.look(CNIBroken)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIActive)
	w.wantSaid(EventCNIConfigured)
	w.write("10-pods.conflist", "")
	w.look(CNIBroken)
	if again := w.k.keepAndReport(t.Context()); again <= 0 || again > lasting {
		t.Errorf("it looks again after %s", again)
	}
	w.k.since = w.k.since.Add(-lasting)
	w.look(CNIBroken)
	w.look(CNIBroken)
	w.wantSaid(EventCNIConfigured, EventCNINotConfigured)
}

func TestARuntimeThatLooksElsewhereIsNotGivenAFile(t *testing.T) {
	for name, c := range map[string]struct {
		config string // with the directories as %[1]s and %[2]s
		state  CNIState
		says   string
	}{
		"as expected":         {`{"cni":{"binDirs":[%[2]q],"confDir":%[1]q,"maxConfNum":1}}`, CNIActive, "derived"},
		"containerd 1":        {`{"cni":{"binDir":%[2]q,"confDir":%[1]q,"maxConfNum":1}}`, CNIActive, "derived"},
		"by another name":     {`{"cni":{"binDirs":["/x","%[2]s/../bin/"],"confDir":"%[1]s/","maxConfNum":1}}`, CNIActive, "derived"},
		"says nothing":        {`{}`, CNIActive, "derived"},
		"another directory":   {`{"cni":{"binDirs":[%[2]q],"confDir":"/var/lib/k3s/net.d","maxConfNum":1}}`, CNIError, "/var/lib/k3s/net.d"},
		"other plugins":       {`{"cni":{"binDirs":["/x","/y"],"confDir":%[1]q,"maxConfNum":1}}`, CNINoPlugin, "/x and /y"},
		"several networks":    {`{"cni":{"binDirs":[%[2]q],"confDir":%[1]q,"maxConfNum":2}}`, CNIUnsupported, "max_conf_num = 2"},
		"any number of them":  {`{"cni":{"binDirs":[%[2]q],"confDir":%[1]q,"maxConfNum":0}}`, CNIUnsupported, "max_conf_num = 0"},
		"nothing of networks": {`{"other":1}`, CNIActive, "derived"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newConfWorld(t)
			w.t = t
			w.write("10-pods.conflist", bridgeConf)
			w.runtime.SetConfig(strings.NewReplacer("%[1]q", `"`+w.conf+`"`, "%[2]q", `"`+w.bins+`"`, "%[1]s", w.conf, "%[2]s", w.bins).Replace(c.config))
			s := w.look(c.state)
			if !strings.Contains(s.Message, c.says) || (w.own() != "") != (c.state == CNIActive) {
				t.Errorf("%s, and the file is\n%s", s.Message, w.own())
			}
			// One that is there already, since the runtime was configured anew.
			w.write(ConflistName, ownOf(t, "10-pods.conflist", bridgeConf))
			w.look(c.state)
			if (w.own() != "") != (c.state == CNIActive) {
				t.Errorf("the file is now\n%s", w.own())
			}
		})
	}
}

func TestTheFirstFileWaitsForTheRuntimesWord(t *testing.T) {
	w := newConfWorld(t)
	w.runtime.Fail(nodetest.ErrRuntime)
	w.write("10-pods.conflist", bridgeConf)
	w.look(CNIStock)
	if again := w.k.keepAndReport(t.Context()); again <= 0 || again > pollEvery || w.own() != "" {
		t.Errorf("it looks again after %s, and the file is\n%s", again, w.own())
	}
	w.runtime.Fail(nil)
	w.look(CNIActive)
	// From then on it follows by itself.
	w.runtime.Fail(nodetest.ErrRuntime)
	w.write("10-pods.conflist", bridge2Conf)
	w.look(CNIActive)
	if !strings.Contains(w.own(), "10.2.0.0/24") {
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
			if s := w.look(CNIUnsupported); !strings.Contains(s.Message, "rename it to 00-multus.conf") || w.own() != "" {
				t.Errorf("%s, and the file is\n%s", s.Message, w.own())
			}
			if line := w.k.line(); !strings.HasPrefix(line, "degraded: ") {
				t.Errorf("/readyz: %s", line)
			}
			w.wantSaid(EventCNINotConfigured)
			// It comes to a node that has our file.
			w.remove(w.conf, name)
			w.write("80-pods.conflist", bridgeConf)
			w.look(CNIActive)
			w.write(name, `{"cniVersion":"0.3.1","name":"m","type":"multus","delegates":[`+bridgeConf+`]}`)
			w.look(CNIUnsupported)
			if w.own() != "" {
				t.Errorf("the file is still\n%s", w.own())
			}
			check(t, os.Rename(filepath.Join(w.conf, name), filepath.Join(w.conf, "00-multus.conf")))
			w.look(CNIShadowed) // until multus copies ours
			if w.own() == "" {
				t.Error("there is no file for multus to copy")
			}
		})
	}
}
