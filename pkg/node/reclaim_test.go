package node

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
)

// leaked returns a pod's address whose sandbox the runtime does not know, beside another pod that runs.
func leaked(t *testing.T, annotations map[string]string) (w *world, s Sandbox, addr netip.Addr) {
	t.Helper()
	w = newWorld(t)
	w.witness()
	s = w.sandbox("gone", "web-0", annotations)
	return w, s, w.add(s)
}

// witness is a running pod whose namespace shows that the agent sees what the runtime sees.
func (w *world) witness() Sandbox {
	w.t.Helper()
	s := w.sandbox("witness", "other", nil)
	w.add(s)
	w.runtime.runs(s)
	return s
}

// graceTwice passes so much time that two looks would have freed everything that may be freed.
func (w *world) graceTwice() error {
	for range 3 {
		if err := w.reconcile(); err != nil {
			return err
		}
		w.clock.pass(w.a.o.GracePeriod)
	}
	return nil
}

// unmount ends a namespace that no process is in.
func (w *world) unmount(s Sandbox) {
	w.t.Helper()
	ns, ok, err := ledger.SystemNetns{}.Identify(s.Netns)
	if err != nil || !ok {
		w.t.Fatalf("%s: %v, %v", s.Netns, ok, err)
	}
	v := &view{roots: []string{""}, probe: ledger.SystemNetns{}}
	check(w.t, w.a.removeNetns(v, ns))
}

func TestALeakIsReclaimedAfterTwoLooksAGracePeriodApart(t *testing.T) {
	w, s, addr := leaked(t, nil)
	w.unmount(s)
	check(t, w.reconcile())
	w.want(addr, ledger.StateBound)
	w.clock.pass(w.a.o.GracePeriod - time.Second)
	next, err := w.a.reconcile(t.Context())
	check(t, err)
	if next != time.Second {
		t.Errorf("to be looked at again after %s", next)
	}
	w.want(addr, ledger.StateBound)
	w.clock.pass(time.Second)
	check(t, w.reconcile())
	w.want(addr, "")
	w.wantSaid(EventReclaimed)
}

func TestALeakedAddressThatIsPromisedIsRetained(t *testing.T) {
	w, s, addr := leaked(t, ten)
	w.a.RunPodSandbox(s)
	w.unmount(s)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateRetained)
}

func TestASandboxThatTheRuntimeListsAfterAllIsNoSuspectAnyMore(t *testing.T) {
	w, s, addr := leaked(t, nil)
	w.unmount(s)
	check(t, w.reconcile()) // it is being created
	w.runtime.runs(s)
	w.clock.pass(w.a.o.GracePeriod)
	check(t, w.reconcile())
	w.runtime.forgets(s.ID)
	check(t, w.reconcile()) // the count starts here
	w.clock.pass(w.a.o.GracePeriod - time.Second)
	check(t, w.reconcile())
	w.want(addr, ledger.StateBound)
}

func TestAnAddressStaysWhileAProcessIsInItsNamespace(t *testing.T) {
	w, s, addr := leaked(t, nil)
	kill := process(t, s.Netns)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateBound)
	kill()
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestAnAddressStaysWhileAProcessIsInAnUnmountedNamespace(t *testing.T) {
	w, s, addr := leaked(t, nil)
	configure(t, s.Netns, addr)
	kill := process(t, s.Netns)
	w.unmount(s)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateBound)
	kill()
	eventually(t, "reclaimed", func() bool { check(t, w.graceTwice()); return w.state(addr) == "" })
}

func TestALeftoverNamespaceIsRemovedWithItsAddress(t *testing.T) {
	w, s, addr := leaked(t, ten)
	w.a.RunPodSandbox(s)
	configure(t, s.Netns, addr)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateRetained)
	if _, err := os.Lstat(s.Netns); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", s.Netns, err)
	}
	if n := testutil.ToFloat64(w.a.metrics.leftovers); n != 1 {
		t.Errorf("counted %v", n)
	}
	// Its owner need not wait for it any more.
	if got := w.add(w.sandbox("next", "web-0", nil)); got != addr {
		t.Errorf("the owner got %s, want %s", got, addr)
	}
}

func TestANodeWithoutARunningPodReclaimsAsWell(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("gone", "web-0", nil)
	addr := w.add(s)
	w.unmount(s)
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestNothingIsReclaimedWhileTheRuntimeDoesNotAnswer(t *testing.T) {
	w, s, addr := leaked(t, nil)
	w.unmount(s)
	check(t, w.reconcile())
	w.runtime.fails(errRuntime)
	w.clock.pass(w.a.o.GracePeriod)
	if err := w.reconcile(); err == nil || !strings.Contains(err.Error(), errRuntime.Error()) {
		t.Errorf("error %v", err)
	}
	w.want(addr, ledger.StateBound)
}

func TestNothingIsReclaimedWhileNoRunningPodsNamespaceIsVisible(t *testing.T) {
	w := newWorld(t)
	witness := w.witness()
	s := w.sandbox("gone", "web-0", nil)
	addr := w.add(s)
	w.unmount(s)
	w.unmount(witness) // as if the mounts of the host did not reach the agent
	if err := w.graceTwice(); err == nil || !strings.Contains(err.Error(), "mounts are not the host's") {
		t.Errorf("error %v", err)
	}
	w.want(addr, ledger.StateBound)
}

func TestNothingIsReclaimedWithoutTheHostsProcesses(t *testing.T) {
	if _, err := look(t.Context(), ledger.SystemNetns{}, nil, 0); err == nil {
		t.Error("a view without the runtime's process")
	}
}

func TestAContainerOfAnotherToolKeepsItsAddress(t *testing.T) {
	w := newWorld(t)
	w.witness()
	// nerdctl and cnitool name no pod. The namespace of the one has no process, the other's path is not known.
	tool := Sandbox{ID: "cnitool-1", Netns: w.netns("byname")}
	first := w.add(tool)
	unknown := Sandbox{ID: "nerdctl-1", Netns: filepath.Join(w.dir, "none")}
	second := w.add(unknown)
	elsewhere := w.netns("elsewhere")
	configure(t, elsewhere, second)
	check(t, w.graceTwice())
	w.want(first, ledger.StateBound)
	w.want(second, ledger.StateBound)

	w.unmount(tool)
	w.unmount(Sandbox{Netns: elsewhere})
	check(t, w.graceTwice())
	w.want(first, "")
	w.want(second, "")
}

func TestAnUnreadableAddressFileIsDroppedOnceNobodyUsesTheAddress(t *testing.T) {
	w := newWorld(t)
	w.witness()
	addr := netip.MustParseAddr("192.0.2.77")
	check(t, os.WriteFile(filepath.Join(w.net.DataDir, w.net.Name, addr.String()), nil, 0o600))
	user := w.netns("user")
	configure(t, user, addr)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateUnreadable)
	w.unmount(Sandbox{Netns: user})
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestALeftoverOutsideTheNamespaceDirectoriesIsNotTouched(t *testing.T) {
	w, s, addr := leaked(t, nil)
	w.a.o.NetnsDirs = []string{filepath.Join(w.dir, "elsewhere")}
	w.runtime.forgets("witness") // which would not be visible there
	if err := w.graceTwice(); err == nil {
		t.Error("no error")
	}
	w.want(addr, ledger.StateBound)
	if _, err := os.Lstat(s.Netns); err != nil {
		t.Error(err)
	}
}

// In a pod the node's directory is mounted at /run/netns and at /var/run/netns, and no unmount comes through to the
// node.
func TestALeftoverNamespaceGoesFromTheNodeThoughTheAgentHasItTwice(t *testing.T) {
	w := newWorld(t)
	dirs := map[string]string{}
	for _, name := range []string{"node", "run", "var-run"} {
		dirs[name] = filepath.Join(w.dir, name)
		check(t, os.Mkdir(dirs[name], 0o755))
	}
	check(t, unix.Mount("tmpfs", dirs["node"], "tmpfs", 0, ""))
	t.Cleanup(func() { check(t, unix.Unmount(dirs["node"], unix.MNT_DETACH)) })
	check(t, unix.Mount("", dirs["node"], "", unix.MS_SHARED, ""))
	left := filepath.Join(dirs["node"], "left")
	check(t, os.WriteFile(left, nil, 0o644))
	w.a.o.NetnsDirs = []string{dirs["run"], dirs["var-run"]}

	done := make(chan error)
	mounted := make(chan error)
	go func() { // in a mount namespace of its own, which ends with this thread
		runtime.LockOSThread()
		err := errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""))
		for _, dir := range w.a.o.NetnsDirs {
			err = errors.Join(err, unix.Mount(dirs["node"], dir, "", unix.MS_BIND, ""))
		}
		done <- errors.Join(err, unix.Unmount(dirs["node"], unix.MNT_DETACH))
		if err := <-mounted; err != nil {
			done <- err
			return
		}
		v := &view{roots: []string{""}, probe: ledger.SystemNetns{}}
		ns, ok, err := v.probe.Identify(filepath.Join(dirs["var-run"], "left"))
		if err == nil && !ok {
			err = errors.New("the namespace is not visible")
		}
		if err == nil {
			err = w.a.removeNetns(v, ns)
		}
		done <- err
	}()
	check(t, <-done)
	err := unix.Mount("/proc/self/ns/net", left, "", unix.MS_BIND, "")
	mounted <- err
	check(t, err)
	check(t, <-done)
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still on the node: %v", err)
	}
}
