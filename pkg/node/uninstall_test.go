package node

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/pkg/node/uninstall"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/test/nodetest"
)

// shortly is what the tests have for the seconds that a runtime and kubectl need.
const shortly = 100 * time.Millisecond

// running is a whole agent on the world's files.
type running struct {
	*Agent
	end   func()
	ended chan error
}

// installedIn makes an agent that is installed in the cluster, and runs it.
func (w *world) installedIn(c *nodetest.Cluster) *running {
	w.t.Helper()
	a, err := New(Options{
		StateDir: filepath.Join(w.dir, "state"), CNICacheDir: filepath.Join(w.dir, "cni"), CNIConfDir: filepath.Join(w.dir,
			"net.d"),
		CNIBinDir: filepath.Join(w.dir, "bin"),
		NetnsDirs: []string{filepath.Join(w.dir, "netns")}, CRISocket: filepath.Join(w.dir, "cri.sock"),
		API: &rest.Config{Host: c.URL}, NodeName: "n1", Namespace: "stayput-system",
		Clock: w.clock, Publisher: w.said,
		Log: slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo})),
	})
	check(w.t, err)
	a.uninstaller.Reload = shortly
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{a, cancel, make(chan error, 1)}
	over := make(chan struct{})
	go func() { defer close(over); r.ended <- a.Run(ctx) }()
	w.t.Cleanup(func() { cancel(); <-over }) // before its files go
	return r
}

// says asks for /readyz.
func (r *running) says(t *testing.T) string {
	t.Helper()
	rec := httptest.NewRecorder()
	r.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	return rec.Body.String()
}

// ready asks for /readyz, whether the agent serves pods.
func (r *running) ready() bool {
	rec := httptest.NewRecorder()
	r.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	return rec.Code == http.StatusOK
}

// stops ends the agent and returns its last word.
func (r *running) stops() error {
	r.end()
	return <-r.ended
}

// inUse prepares a node with a retained and a bound address that are promised, and an ordinary one.
func (w *world) inUse() (kept, runs, job netip.Addr) {
	w.t.Helper()
	s := w.promises("c1", "kept", ten)
	kept = w.addr("c1")
	w.del(s)
	w.runtime.Forget("c1")
	w.promises("c2", "runs", ten)
	w.promises("c3", "job", nil)
	return kept, w.addr("c2"), w.addr("c3")
}

func (w *world) addr(id string) netip.Addr {
	w.t.Helper()
	addrs, err := w.ledger.Find(ledger.Attachment{ContainerID: id, IfName: "eth0"})
	check(w.t, err)
	return addrs[0]
}

// asHostLocal holds the files of the network against what host-local would have there.
func (w *world) asHostLocal(bound map[netip.Addr]string) {
	w.t.Helper()
	dir := filepath.Join(w.dir, "networks", "pods")
	entries, err := os.ReadDir(dir)
	check(w.t, err)
	for _, e := range entries {
		if e.Name() == "lock" || strings.HasPrefix(e.Name(), "last_reserved_ip.") {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		check(w.t, err)
		info, err := e.Info()
		check(w.t, err)
		a, err := netip.ParseAddr(e.Name())
		if err != nil || bound[a] == "" || string(b) != bound[a]+"\r\neth0" || info.Mode() != 0o600 {
			w.t.Errorf("%s %s %q", e.Name(), info.Mode(), b)
		}
		delete(bound, a)
	}
	for a := range bound {
		w.t.Errorf("%s has no file", a)
	}
}

func (w *world) stateIsGone() {
	w.t.Helper()
	if _, err := os.Stat(filepath.Join(w.dir, "state")); !errors.Is(err, fs.ErrNotExist) {
		names, _ := filepath.Glob(filepath.Join(w.dir, "state", "*"))
		w.t.Errorf("of the state there is %v, %v", names, err)
	}
}

func TestAtAnUninstallationTheNodeIsPutBackAsItWas(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	_, runs, job := w.inUse()
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil && c.Object("runs") != nil })
	c.Uninstall()
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled: stayput was removed") })
	if c.Object("kept") != nil || c.Object("runs") != nil {
		t.Error("there are still RetainedIPs")
	}
	// What the runtime says now changes nothing.
	r.RunPodSandbox(w.sandbox("c4", "late", ten))
	r.Synchronize([]Sandbox{w.sandbox("c5", "later", ten)})
	w.asHostLocal(map[netip.Addr]string{runs: "c2", job: "c3"})
	if err := r.stops(); err != nil {
		t.Errorf("ended with %v", err)
	}
	w.stateIsGone()
	w.asHostLocal(map[netip.Addr]string{runs: "c2", job: "c3"})
}

// As by a GitOps program that prunes it and applies it again.
func TestADeletedConfigMapEndsNoPromise(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	kept, runs, _ := w.inUse()
	conf := filepath.Join(w.dir, "net.d")
	check(t, os.WriteFile(filepath.Join(conf, "10-pods.conflist"), []byte(bridgeConf), 0o644))
	check(t, os.WriteFile(filepath.Join(conf, cniconf.ConflistName), []byte(derivedConf), 0o644))
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil })
	c.AwaitFollower()
	c.Prune()
	check(t, r.stops()) // by SIGTERM, while there is none
	w.stillPromised(r, kept, runs)
	r = w.installedIn(c) // and the next one, while there is none
	eventually(t, "looked", func() bool { return r.reconciler.tried.Load() })
	w.stillPromised(r, kept, runs)
	c.Install("second")
	c.AwaitFollower()
	check(t, r.stops())
	w.stillPromised(r, kept, runs)
	if names := list(t, conf); !slices.Contains(names, cniconf.ConflistName) || c.Object("kept") == nil {
		t.Errorf("there are %v, and the RetainedIP %v", names, c.Object("kept"))
	}
}

const (
	bridgeConf  = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}]}`
	bridge2Conf = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"host-local","subnet":"10.2.0.0/24"}}]}`
	// derivedConf is the agent's file for bridgeConf.
	derivedConf = `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","subnet":"10.1.0.0/24"}}],"stayput.io/derived":{"from":"10-pods.conflist","types":["bridge"]}}`
)

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

// The value agent.cni.install was true once.
func TestWhatAnEarlierAgentInstalledGoesAlsoWhereThisOneInstallsNothing(t *testing.T) {
	binary := filepath.Join(t.TempDir(), cniconf.PluginName)
	if out, err := exec.Command("go", "build", "-o", binary, "../../cmd/stayput").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	somebodys := []byte("#!/bin/sh\n")
	for name, c := range map[string]struct {
		conflist string
		bins     func(w *world, dir string)
		stay     []string // in the two directories
	}{
		"all of it": {derivedConf, func(w *world, dir string) {
			check(t, exec.Command("cp", binary, dir).Run())
		}, []string{"10-pods.conflist"}},
		"but for what somebody else wrote": {bridge2Conf, func(w *world, dir string) {
			check(t, os.WriteFile(filepath.Join(dir, cniconf.PluginName), somebodys, 0o755))
		}, []string{cniconf.ConflistName, "10-pods.conflist", cniconf.PluginName}},
		"but for a plugin on a file system that cannot be written": {derivedConf, func(w *world, dir string) {
			check(t, exec.Command("cp", binary, dir).Run())
			check(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
			w.t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			check(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		}, []string{"10-pods.conflist", cniconf.PluginName}},
	} {
		t.Run(name, func(t *testing.T) {
			w, cl := newWorld(t), nodetest.StartCluster(t)
			cl.Install("first")
			_, runs, job := w.inUse()
			conf, bins := filepath.Join(w.dir, "net.d"), filepath.Join(w.dir, "bin")
			check(t, os.Mkdir(bins, 0o755))
			check(t, os.WriteFile(filepath.Join(conf, "10-pods.conflist"), []byte(bridgeConf), 0o644))
			check(t, os.WriteFile(filepath.Join(conf, cniconf.ConflistName), []byte(c.conflist), 0o644))
			c.bins(w, bins)
			r := w.installedIn(cl)
			eventually(t, "published", func() bool { return cl.Object("kept") != nil })
			cl.Uninstall()
			eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled: stayput was removed") })
			check(t, r.stops())
			if stays := slices.Contains(c.stay, cniconf.PluginName); strings.Contains(r.says(t), "except the plugin") != stays {
				t.Errorf("it says %s", r.says(t))
			}
			if got := append(list(t, conf), list(t, bins)...); !slices.Equal(got, c.stay) {
				t.Errorf("there are %v, want %v", got, c.stay)
			}
			w.stateIsGone()
			w.asHostLocal(map[netip.Addr]string{runs: "c2", job: "c3"})
		})
	}
}

// agent.cni.install is false, and somebody has named the plugin. The agent can do no more, and nobody waits for it.
func TestAConfigurationByHandIsNamedAndHoldsNothingUp(t *testing.T) {
	w, cl := newWorld(t), nodetest.StartCluster(t)
	cl.Install("first")
	w.inUse()
	conf := filepath.Join(w.dir, "net.d")
	check(t, os.WriteFile(filepath.Join(conf, "10-pods.conflist"),
		[]byte(strings.ReplaceAll(bridgeConf, "host-local", "stayput")), 0o644))
	r := w.installedIn(cl)
	eventually(t, "published", func() bool { return cl.Object("kept") != nil })
	cl.Uninstall()
	eventually(t, "said", func() bool {
		return strings.Contains(r.says(t),
			"10-pods.conflist uses the plugin: set ipam.type")
	})
	if r.ready() || cl.Object("kept") != nil {
		t.Errorf("ready: %v, the RetainedIP is %v", r.ready(), cl.Object("kept"))
	}
}

func TestAConfigurationThatCannotBeTakenAwayKeepsThePromises(t *testing.T) {
	w, cl := newWorld(t), nodetest.StartCluster(t)
	cl.Install("first")
	kept, runs, _ := w.inUse()
	conf := filepath.Join(w.dir, "net.d")
	check(t, os.WriteFile(filepath.Join(conf, cniconf.ConflistName), []byte(derivedConf), 0o644))
	check(t, unix.Mount(conf, conf, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(conf, unix.MNT_DETACH) })
	check(t, unix.Mount("", conf, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	r := w.installedIn(cl)
	eventually(t, "published", func() bool { return cl.Object("kept") != nil })
	cl.Uninstall()
	eventually(t, "said", func() bool {
		s := r.says(t)
		return strings.Contains(s, "uninstalling: degraded: removing the CNI configuration") &&
			strings.Contains(s, "read-only")
	})
	w.want(kept, ledger.StateRetained)
	w.want(runs, ledger.StateBound)
	check(t, unix.Unmount(conf, 0)) // and when it can be
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled: stayput was removed") })
	check(t, r.stops())
	w.stateIsGone()
}

// It installs nothing again meanwhile.
func TestAnAgentThatStartsDuringAnUninstallationPutsTheNodeBack(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	_, runs, job := w.inUse()
	c.Uninstall()
	r := w.installedIn(c)
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled") })
	if r.reconciler.tried.Load() {
		t.Error("it has worked before")
	}
	check(t, r.stops())
	w.stateIsGone()
	w.asHostLocal(map[netip.Addr]string{runs: "c2", job: "c3"})
}

func TestWhenTheNodeIsPutBackItStaysSoThoughTheConfigMapIsDeleted(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	_, runs, job := w.inUse()
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil })
	c.Uninstall()
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled") })
	c.Prune()
	c.Answers(func(*http.Request) *metav1.Status { return nodetest.Forbidden() }) // with the same kubectl delete
	c.EndWatches(nil)
	check(t, r.stops())
	w.stateIsGone()
	w.asHostLocal(map[netip.Addr]string{runs: "c2", job: "c3"})
}

func TestAnAPIServerThatFailsKeepsNoNodeFromBeingPutBack(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	_, runs, job := w.inUse()
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil })
	c.AwaitFollower()
	c.Answers(func(*http.Request) *metav1.Status {
		return &metav1.Status{Code: 500, Reason: metav1.StatusReasonInternalError}
	})
	c.Uninstall()
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalling: degraded") })
	eventually(t, "the files to go", func() bool {
		_, err := os.Stat(filepath.Join(w.dir, "state"))
		return errors.Is(err, fs.ErrNotExist)
	})
	w.asHostLocal(map[netip.Addr]string{runs: "c2", job: "c3"})
	if !r.ready() {
		t.Error("it says that the node is done, and has not deleted its RetainedIPs")
	}
	c.Answers(nil)
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled") })
	if r.ready() || c.Object("kept") != nil {
		t.Errorf("ready: %v, the RetainedIP is %v", r.ready(), c.Object("kept"))
	}
}

// stillPromised checks that nothing was freed.
func (w *world) stillPromised(r *running, addrs ...netip.Addr) {
	w.t.Helper()
	list, err := w.ledger.List()
	check(w.t, err)
	for _, a := range addrs {
		if !slices.ContainsFunc(list, func(ad ledger.Address) bool { return ad.Addr == a && ad.Key != nil }) {
			w.t.Errorf("%s is not promised any more", a)
		}
	}
	if said := r.says(w.t); strings.Contains(said, "uninstall") {
		w.t.Errorf("it says %q", said)
	}
}

func TestAnAgentThatNeverSawTheObjectStays(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	kept, runs, _ := w.inUse()
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil })
	wake.Pause(t.Context(), 10*shortly)
	w.stillPromised(r, kept, runs)
	check(t, r.stops())
	w.stillPromised(r, kept, runs)
}

func TestAnUninstallationThatIsWithdrawnBeginsTheAgentAnew(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	w.inUse()
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil })
	c.Uninstall()
	eventually(t, "said", func() bool { return strings.Contains(r.says(t), "uninstalled") })
	c.KeepInstalled()
	if err := <-r.ended; !errors.Is(err, uninstall.ErrNoLonger) {
		t.Fatalf("ended with %v", err)
	}
	r = w.installedIn(c)
	kept := w.promises("c9", "new", ten)
	eventually(t, "published", func() bool { return c.Object("new") != nil })
	w.stillPromised(r, w.addr(kept.ID))
}

func TestWhatOnlyANewerVersionCanReadIsReportedAndKept(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	kept, _, _ := w.inUse()
	r := w.installedIn(c)
	eventually(t, "published", func() bool { return c.Object("kept") != nil && c.Object("runs") != nil })
	check(t, r.stops())
	claims, err := filepath.Glob(filepath.Join(w.dir, "state", "pods-*", "claims", "*"))
	check(t, err)
	for _, path := range append(claims, filepath.Join(w.dir, "networks", "pods", kept.String())) {
		b, err := os.ReadFile(path)
		check(t, err)
		check(t, os.WriteFile(path, []byte(strings.Replace(string(b), `"v":1`, `"v":2`, 1)), 0o644))
	}
	w.clock.Pass(11 * 60e9) // which would be its end
	r = w.installedIn(c)
	eventually(t, "reported", func() bool {
		s := r.says(t)
		return strings.Contains(s, "ledger: degraded: 2 addresses are left unchanged") &&
			strings.Contains(s, "has version 2, this stayput supports versions up to 1")
	})
	asked := c.Count("GET /apis/stayput.io")
	eventually(t, "looked", func() bool { return c.Count("GET /apis/stayput.io") > asked || r.api.Trouble() == "" })
	r.reconciler.now.Up()
	wake.Pause(t.Context(), minPause+10*shortly)
	if c.Object("kept") == nil || c.Object("runs") == nil {
		t.Error("a RetainedIP was deleted though its promise stands")
	}
	w.want(kept, ledger.StateNewer)
}
