package node

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/test/nodetest"
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
	w.runs(s)
	return s
}

// graceTwice passes so much time that two looks would have freed everything that may be freed.
func (w *world) graceTwice() error {
	for range 3 {
		if err := w.reconcile(); err != nil {
			return err
		}
		w.clock.Pass(w.a.o.GracePeriod)
	}
	return nil
}

func TestALeakIsReclaimedAfterTwoLooksAGracePeriodApart(t *testing.T) {
	w, s, addr := leaked(t, nil)
	nodetest.Unmount(t, s.Netns)
	check(t, w.reconcile())
	w.want(addr, ledger.StateBound)
	w.clock.Pass(w.a.o.GracePeriod - time.Second)
	next, err := w.a.reconciler.reconcile(t.Context())
	check(t, err)
	if next != time.Second {
		t.Errorf("to be looked at again after %s", next)
	}
	w.want(addr, ledger.StateBound)
	w.clock.Pass(time.Second)
	check(t, w.reconcile())
	w.want(addr, "")
	w.wantSaid(retainedip.EventReclaimed)
}

func TestALeakedAddressThatIsPromisedIsRetained(t *testing.T) {
	w, s, addr := leaked(t, ten)
	w.a.RunPodSandbox(s)
	nodetest.Unmount(t, s.Netns)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateRetained)
}

func TestASandboxThatTheRuntimeListsAfterAllIsNoSuspectAnyMore(t *testing.T) {
	w, s, addr := leaked(t, nil)
	nodetest.Unmount(t, s.Netns)
	check(t, w.reconcile()) // it is being created
	w.runs(s)
	w.clock.Pass(w.a.o.GracePeriod)
	check(t, w.reconcile())
	w.runtime.Forget(s.ID)
	check(t, w.reconcile()) // the count starts here
	w.clock.Pass(w.a.o.GracePeriod - time.Second)
	check(t, w.reconcile())
	w.want(addr, ledger.StateBound)
}

func TestAnAddressStaysWhileAProcessIsInItsNamespace(t *testing.T) {
	w, s, addr := leaked(t, nil)
	kill := nodetest.Process(t, s.Netns)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateBound)
	kill()
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestAnAddressStaysWhileAProcessIsInAnUnmountedNamespace(t *testing.T) {
	w, s, addr := leaked(t, nil)
	nodetest.Configure(t, s.Netns, addr)
	kill := nodetest.Process(t, s.Netns)
	nodetest.Unmount(t, s.Netns)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateBound)
	kill()
	eventually(t, "reclaimed", func() bool { check(t, w.graceTwice()); return w.state(addr) == "" })
}

func TestALeftoverNamespaceIsRemovedWithItsAddress(t *testing.T) {
	w, s, addr := leaked(t, ten)
	w.a.RunPodSandbox(s)
	nodetest.Configure(t, s.Netns, addr)
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
	nodetest.Unmount(t, s.Netns)
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestNothingIsReclaimedWhileTheRuntimeDoesNotAnswer(t *testing.T) {
	w, s, addr := leaked(t, nil)
	nodetest.Unmount(t, s.Netns)
	check(t, w.reconcile())
	w.runtime.Fail(nodetest.ErrRuntime)
	w.clock.Pass(w.a.o.GracePeriod)
	if err := w.reconcile(); err == nil || !strings.Contains(err.Error(), nodetest.ErrRuntime.Error()) {
		t.Errorf("error %v", err)
	}
	w.want(addr, ledger.StateBound)
}

func TestNothingIsReclaimedWhileNoRunningPodsNamespaceIsVisible(t *testing.T) {
	w := newWorld(t)
	witness := w.witness()
	s := w.sandbox("gone", "web-0", nil)
	addr := w.add(s)
	nodetest.Unmount(t, s.Netns)
	nodetest.Unmount(t, witness.Netns) // as if the mounts of the host did not reach the agent
	if err := w.graceTwice(); err == nil || !strings.Contains(err.Error(), "mounts are not the host's") {
		t.Errorf("error %v", err)
	}
	w.want(addr, ledger.StateBound)
}

// The addresses of its namespace cannot be listed while they change all the time.
func TestAPodWhoseAddressesChangeAllTheTimeHoldsUpNoOther(t *testing.T) {
	w := newWorld(t)
	defer nodetest.Flap(t, w.witness().Netns)()
	s := w.sandbox("gone", "web-0", nil)
	addr := w.add(s)
	nodetest.Unmount(t, s.Netns)
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestANamespaceThatCannotBeReadMayHaveEveryAddressUnlessAPodRunsThere(t *testing.T) {
	w := newWorld(t)
	w.netns("nerdctl")
	path := filepath.Join(w.dir, "netns", "nerdctl")
	v, err := hostnet.Observe(t.Context(), []string{filepath.Join(w.dir, "netns")}, os.Getpid(), hostnet.Question{})
	check(t, err)
	defer v.Close()
	u, err := v.Find(ledger.Netns{Path: path})
	check(t, err)
	u.Err = errors.New("torn")
	s := &suspicion{addrs: []netip.Addr{netip.MustParseAddr("192.0.2.9")}}
	for _, c := range []struct {
		known []ledger.Netns
		held  bool
	}{{nil, true}, {[]ledger.Netns{{Path: path}}, false}} {
		_, why, err := judge(v, s, spacesOf(v, c.known))
		if err != nil || (why != "") != c.held {
			t.Errorf("with running pods at %v: %q, %v", c.known, why, err)
		}
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
	nodetest.Configure(t, elsewhere, second)
	check(t, w.graceTwice())
	w.want(first, ledger.StateBound)
	w.want(second, ledger.StateBound)

	nodetest.Unmount(t, tool.Netns)
	nodetest.Unmount(t, elsewhere)
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
	nodetest.Configure(t, user, addr)
	check(t, w.graceTwice())
	w.want(addr, ledger.StateUnreadable)
	nodetest.Unmount(t, user)
	check(t, w.graceTwice())
	w.want(addr, "")
}

func TestALeftoverOutsideTheNamespaceDirectoriesIsNotTouched(t *testing.T) {
	w, s, addr := leaked(t, nil)
	w.a.reconciler.reclaimer.netnsDirs = []string{filepath.Join(w.dir, "elsewhere")}
	w.runtime.Forget("witness") // which would not be visible there
	if err := w.graceTwice(); err == nil {
		t.Error("no error")
	}
	w.want(addr, ledger.StateBound)
	if _, err := os.Lstat(s.Netns); err != nil {
		t.Error(err)
	}
}
