package podip

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/test/must"
)

// routes is a route.Table that keeps what it is told.
type routes struct {
	mu     sync.Mutex
	places map[netip.Addr]route.Place
	sets   int
	all    []netip.Prefix
	runs   bool
}

func (r *routes) Run(ctx context.Context) {
	r.does(func() { r.runs = true })
	<-ctx.Done()
	r.does(func() { r.runs = false })
}

func (r *routes) Set(places map[netip.Addr]route.Place) {
	r.does(func() { r.places, r.sets = maps.Clone(places), r.sets+1 })
}
func (r *routes) Put(a netip.Addr, p route.Place) { r.does(func() { r.places[a] = p }) }
func (r *routes) Delete(a netip.Addr)             { r.does(func() { delete(r.places, a) }) }
func (r *routes) SetNetwork(all []netip.Prefix)   { r.does(func() { r.all = all }) }
func (r *routes) Routes() int                     { return 0 }

func (r *routes) does(what func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	what()
}

func (r *routes) says() (said string) {
	r.does(func() {
		if said = fmt.Sprint(r.runs); len(r.places) == 0 {
			return
		}
		for _, a := range slices.SortedFunc(maps.Keys(r.places), netip.Addr.Compare) {
			said += fmt.Sprintf(" %s at %s", a, r.places[a].PodCIDR)
			if r.places[a].Here {
				said += ", here"
			}
		}
	})
	return said
}

// Whatever says that a pod has it: an API server's address is no pool's.
func TestNothingIsRoutedToWhatIsInNoPool(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.podCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
		w.k.SetPools(`{"subnets":["10.7.0.0/16"]}`)
		w.k.SetRouted(true)
		w.c.putRouted(addr(1), "n2", "10.244.2.0/24")
		w.given(2)
		w.runs(2)
		want := func(says string, here int) {
			t.Helper()
			w.pass(time.Second)
			if got := w.routes.says(); got != says {
				t.Errorf("routes: %s, want %s", got, says)
			}
			if is, err := w.k.router.here(); err != nil || len(is) != here {
				t.Errorf("routes here: %v, %v, want %d", is, err, here)
			}
		}
		want("true", 0)
		w.k.SetPools(`{"subnets":["10.6.0.0/16","10.7.0.0/16"]}`)
		want("true 10.6.0.1 at 10.244.2.0/24", 1)
		w.k.SetPools(`{"subnets":["10.7.0.0/16"]}`)
		want("true", 0)
		if said := w.k.Trouble(); said != "" {
			t.Errorf("says %q", said)
		}
	})
}

func TestRoutesFollowWhatTheClusterSays(t *testing.T) {
	inWorld(t, func(w *world) {
		r := w.routes
		want := func(want string) {
			t.Helper()
			w.pass(time.Second)
			if got := r.says(); got != want {
				t.Errorf("routes: %s, want %s", got, want)
			}
		}
		const two, three = "10.244.2.0/24", "10.244.3.0/24"
		w.c.podCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
		w.c.putRouted(addr(1), "n2", two)
		w.c.putRouted(addr(2), "n3", "")
		want("false") // before it is known that there is such a pool
		if n := w.c.count("list routed") + w.c.count("watch routed") + w.c.count("get podCIDRs"); n > 0 {
			t.Errorf("%d requests without a pool of mode Routed", n)
		}
		w.k.SetRouted(true)
		want("true 10.6.0.1 at " + two)
		w.c.putRouted(addr(2), node, "10.244.1.0/24")
		want("true 10.6.0.1 at " + two + " 10.6.0.2 at 10.244.1.0/24, here")
		w.c.putRouted(addr(1), "n3", three)
		want("true 10.6.0.1 at " + three + " 10.6.0.2 at 10.244.1.0/24, here")
		w.c.putRouted(addr(2), node, "") // nobody has it now
		want("true 10.6.0.1 at " + three)
		w.c.putRouted(addr(1), "n3", "fd00::/64") // of the other family
		want("true")
		w.c.putRouted(addr(1), "n3", three)
		want("true 10.6.0.1 at " + three)

		w.c.fail(errDown) // nothing is known: nothing is said
		w.pass(time.Minute)
		want("true 10.6.0.1 at " + three)
		if w.k.Trouble() == "" {
			t.Error("it is not said that the API server is away")
		}
		w.c.fail(nil)
		w.c.putRouted(addr(1), "n2", two)
		w.pass(time.Minute)
		want("true 10.6.0.1 at " + two)

		w.k.SetRouted(false)
		want("false 10.6.0.1 at " + two)
		asked := w.c.count("list routed") + w.c.count("watch routed")
		w.pass(time.Hour)
		if n := w.c.count("list routed") + w.c.count("watch routed") - asked; n > 0 {
			t.Errorf("%d requests once no pool is routed", n)
		}
		w.k.SetRouted(true)
		want("true 10.6.0.1 at " + two)
		w.k.SetPools("")
		want("false 10.6.0.1 at " + two)
	})
}

func TestRoutesAreListedOnceAndWatchedFromThenOn(t *testing.T) {
	inWorld(t, func(w *world) {
		w.k.SetRouted(true)
		w.pass(3*apiwatch.Timeout + time.Minute)
		lists, watches := w.c.count("list routed"), w.c.count("watch routed")
		if lists != 1 || watches != 4 {
			t.Errorf("%d lists and %d watches, want 1 and 4", lists, watches)
		}
		w.c.endWatches()
		w.pass(time.Minute)
		if n := w.c.count("list routed"); n != 2 {
			t.Errorf("%d lists, want one more after an error", n)
		}

		// A backup may have been restored: then a version says nothing, unless the list is newer.
		w.c.putAudit(audit(3, v1alpha1.PodIPAuditRecalling))
		recalls := func(round int64, lists int) {
			t.Helper()
			w.c.putAudit(audit(round, v1alpha1.PodIPAuditRecalling))
			w.pass(time.Second)
			if n := w.c.count("list routed"); n != lists {
				t.Errorf("%d lists as a recall begins, want %d", n, lists)
			}
		}
		recalls(9, 2)
		w.pass(2 * apiwatch.Timeout)
		recalls(12, 3)
	})
}

func TestWhatIsHereIsWhatTheLedgersSay(t *testing.T) {
	inWorld(t, func(w *world) {
		here := func() map[netip.Addr]string {
			t.Helper()
			all, err := w.k.router.here()
			check(t, err)
			return all
		}
		w.k.router.bridge = func(network string) string { return "bridge of " + network }
		w.given(1)
		w.pass(time.Second)
		if got := here(); len(got) > 0 {
			t.Errorf("before it has started %v", got)
		}
		w.runs(1)
		if got, want := here()[addr(1)], "bridge of "+w.net.Name; got != want {
			t.Errorf("the pod is on %q, want %q", got, want)
		}
		w.putIP(addr(1), uid(2), "web-1") // another pod has the address now
		w.k.pods.enqueueAll()
		w.pass(time.Second)
		if got := here(); len(got) > 0 {
			t.Errorf("of a pod that has lost it %v", got)
		}
	})
}

func TestANodesOwnPodCIDRIsFound(t *testing.T) {
	inWorld(t, func(w *world) {
		w.k.SetRouted(true)
		w.pass(time.Second)
		if got := w.k.router.ownPodCIDR(true); got.IsValid() || w.k.Trouble() == "" {
			t.Errorf("%s, and said is %q", got, w.k.Trouble())
		}
		ranges := netip.MustParsePrefix("10.244.9.0/24")
		w.c.mu.Lock()
		w.c.podCIDRs = []netip.Prefix{netip.MustParsePrefix("fd00::/64"), ranges}
		w.c.mu.Unlock()
		w.pass(podCIDRAgain)
		if got := w.k.router.ownPodCIDR(true); got != ranges || w.k.Trouble() != "" {
			t.Errorf("%s, and said is %q", got, w.k.Trouble())
		}
	})
}

func TestFlannelsNetworkIsKnownOnceFlanneldHasSaidIt(t *testing.T) {
	inWorld(t, func(w *world) {
		file := filepath.Join(t.TempDir(), "subnet.env")
		w.k.router.flannelFile = func() string { return file }
		w.k.SetRouted(true)
		want := func(want string) {
			t.Helper()
			w.pass(2 * networkAgain)
			var got string
			w.routes.does(func() { got = fmt.Sprint(w.routes.all) })
			if got != want {
				t.Errorf("the network is %s, want %s", got, want)
			}
		}
		want("[]")
		must.Do(t, os.WriteFile(file, []byte("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\n"), 0o644))
		want("[10.244.0.0/16]")
		must.Do(t, os.Remove(file)) // flanneld begins again
		want("[10.244.0.0/16]")
	})
}

func TestANodeSaysWhichPoolsItCannotServe(t *testing.T) {
	inWorld(t, func(w *world) {
		var mu sync.Mutex
		why := map[v1alpha1.PodIPPoolMode]string{v1alpha1.ModeRouted: "a.conflist: type: expected bridge or ptp"}
		set := func(mode v1alpha1.PodIPPoolMode, s string) {
			mu.Lock()
			defer mu.Unlock()
			why[mode] = s
		}
		says := func(mode v1alpha1.PodIPPoolMode) string {
			mu.Lock()
			defer mu.Unlock()
			return why[mode]
		}
		w.k.reporter.cannotServe = says
		want := func(when, l2, routed string) {
			t.Helper()
			w.c.mu.Lock()
			defer w.c.mu.Unlock()
			if r := w.c.report; r == nil || string(r.Spec.CannotServe["L2"]) != l2 ||
				string(r.Spec.CannotServe["Routed"]) != routed || !r.Spec.Epoch.Equal(micro(5)) {
				t.Errorf("%s: the report is %+v, want %q and %q", when, w.c.report, l2, routed)
			}
		}
		w.c.putAudit(audit(5, v1alpha1.PodIPAuditSettled))
		w.pass(time.Second)
		want("no pool is routed", "", "")
		w.k.SetRouted(true)
		w.pass(time.Second)
		want("its network cannot", "", why[v1alpha1.ModeRouted])

		set(v1alpha1.ModeRouted, "")
		set(v1alpha1.ModeL2, "a.conflist: isGateway: true is not valid")
		w.c.fail(errDown) // whether a cloud has the routes is not known
		w.pass(time.Minute)
		w.c.fail(nil)
		w.pass(time.Minute)
		want("its network can only route", why[v1alpha1.ModeL2], "")

		w.c.mu.Lock()
		w.c.byCloud = true
		w.c.mu.Unlock()
		w.pass(cloudAgain + networkAgain)
		want("a cloud routes", why[v1alpha1.ModeL2], byCloud)
		said := w.c.count("say")
		w.pass(time.Hour)
		if n := w.c.count("say") - said; n > 0 {
			t.Errorf("said %d more times", n)
		}

		w.end()
		set(v1alpha1.ModeL2, "")
		w.starts(-1) // it finds out again, and says nothing else meanwhile
		w.k.reporter.cannotServe = says
		w.pass(time.Minute)
		want("the agent was killed", "", byCloud)
		set(v1alpha1.ModeRouted, strings.Repeat("é", 2000))
		w.k.SetRouted(true)
		w.pass(time.Minute)
		want("a long reason", "", strings.Repeat("é", mostWhy))
	})
}
