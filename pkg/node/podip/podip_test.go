package podip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/test/nodetest"
)

// inWorld runs a test in a bubble of time, with an agent.
func inWorld(t *testing.T, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.starts(-1)
		defer func() { w.end() }()
		w.pass(time.Second)
		f(w)
	})
}

func TestWithoutPoolsNothingIsAskedOrWritten(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.pass(time.Second)
		if w.file(1) == "" {
			t.Fatal("with pools nothing was written")
		}
		w.k.SetPools("")
		w.pass(time.Second)
		asked := len(w.c.asked)
		w.given(2)
		w.runs(2)
		w.pass(24 * time.Hour)
		if more := w.c.asked[asked:]; len(more) > 0 {
			t.Errorf("asked %v", more)
		}
		if w.file(2) != "" {
			t.Error("wrote a file")
		}
		if said := w.k.Trouble(); said != "" {
			t.Errorf("says %q", said)
		}
		w.k.SetPools(served)
		w.pass(time.Second)
		if w.file(2) != text(2) {
			t.Error("with pools again it writes nothing")
		}
		w.wantPhase(2, v1alpha1.PodIPBound)
	})
}

func TestAPodIsToldOfAndReported(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.given(1)
		w.pass(time.Second)
		if got := w.file(1); got != text(1) {
			t.Errorf("the file says %q", got)
		}
		w.wantPhase(1, "")
		w.runs(1)
		w.pass(time.Second)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.pass(time.Minute)
		reads := w.c.count("get")
		w.pass(time.Hour)
		if n := w.c.count("get") - reads; n > 0 {
			t.Errorf("a pod that runs cost %d reads in an hour", n)
		}

		p.Labels = map[string]string{"changed": "yes"}
		w.c.put(p)
		w.c.put(ends(p))
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.wantBarred(1, false)
		if n := w.c.count("get") - reads; n > 0 {
			t.Errorf("a pod that changes, and one that ends for a minute, cost %d reads", n)
		}
		w.stops(1)
		w.lists(1, false)
		w.pass(100 * time.Millisecond)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.wantBarred(1, true)
		p.Labels, p.Status.Phase = nil, "Succeeded"
		w.c.put(p)
		w.pass(time.Second)
		w.c.remove(uid(1))
		w.pass(time.Second)
		w.k.Look(w.name(1), p.Annotations, true) // its sandbox is removed last
		w.pass(time.Second)
		if n := w.c.count("get") - reads; n > 0 {
			t.Errorf("its end cost %d reads", n)
		}
		if w.file(1) != "" {
			t.Error("its file is still there")
		}
		w.netns(1)
		if err := w.add(1); !errors.Is(err, ledger.ErrBarred) {
			t.Errorf("an ADD after that: %v", err)
		}
		if n := w.c.count("report"); n != 2 {
			t.Errorf("%d reports, want 2", n)
		}
	})
}

// A PodIP whose status this agent has written is not read again before the next write, unless it has changed since.
func TestAPodIPThatHasChangedSinceItWasReportedIsReadAgain(t *testing.T) {
	for name, c := range map[string]struct {
		change func(ip *v1alpha1.PodIP)
		want   v1alpha1.PodIPPhase
	}{
		"kept for longer":      {func(ip *v1alpha1.PodIP) { ip.Spec.Retention = "1h0m0s" }, v1alpha1.PodIPRetained},
		"given to another pod": {func(ip *v1alpha1.PodIP) { ip.Spec.PodUID = uid(9) }, v1alpha1.PodIPBound},
		"made again": {func(ip *v1alpha1.PodIP) {
			ip.UID, ip.Status = "other", v1alpha1.PodIPStatus{}
		}, v1alpha1.PodIPRetained},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				p := w.bound(1)
				w.c.mu.Lock()
				ip := w.c.ips[addr(1).String()]
				c.change(ip)
				ip.ResourceVersion = w.c.next()
				w.c.mu.Unlock()
				reads := w.c.count("get podip")
				w.c.put(ends(p))
				w.stops(1)
				w.lists(1, false)
				w.pass(time.Second)
				w.wantPhase(1, c.want)
				w.wantBarred(1, true)
				if n := w.c.count("get podip") - reads; n == 0 {
					t.Error("it was not read again")
				}
			})
		})
	}
}

// After a restore a PodIP may have the version of before, and be another pod's.
func TestAfterARecallNoPodIPIsWrittenUnread(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.bound(1)
		w.c.mu.Lock()
		w.c.ips[addr(1).String()].Spec.PodUID = uid(9) // at the same version
		w.c.mu.Unlock()
		w.c.putAudit(audit(7, 7))
		w.pass(time.Second)
		w.c.put(ends(p))
		w.stops(1)
		w.lists(1, false)
		reports := w.c.count("report")
		w.pass(time.Minute)
		w.wantBarred(1, true)
		if n := w.c.count("report") - reports; n > 0 {
			t.Errorf("%d reports of another pod's PodIP", n)
		}
	})
}

// Other nodes route to a pod by the time it reports: its node says that it is there before it starts.
func TestARoutedPodIsReportedBeforeItStarts(t *testing.T) {
	inWorld(t, func(w *world) {
		route := func(cidr string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.cidr = netip.MustParsePrefix(cidr)
		}
		route("10.244.1.0/24")
		routed := func(n int) *Pod {
			p := w.pod(n)
			p.Annotations[v1alpha1.AnnotationAddresses] = strings.ReplaceAll(text(n), `"L2"`, `"Routed"`)
			w.putIP(addr(n), uid(n), p.Name)
			w.c.mu.Lock()
			w.c.ips[addr(n).String()].Spec.Mode = v1alpha1.ModeRouted
			w.c.mu.Unlock()
			w.c.put(p)
			return p
		}
		p := routed(1)
		w.given(2)
		w.pass(time.Second)
		w.wantPhase(1, v1alpha1.PodIPAllocated)
		w.wantPhase(2, "")
		if got := w.status(1).PodCIDR; got != "10.244.1.0/24" {
			t.Errorf("nodes route by %q", got)
		}
		w.wantBarred(1, false)
		asked := w.c.count("")
		w.pass(5 * time.Minute)
		if n := w.c.count("") - asked; n > 0 {
			t.Errorf("a pod that does not start yet cost %d requests", n)
		}
		w.runs(1)
		w.pass(time.Second)
		w.wantPhase(1, v1alpha1.PodIPBound)
		if got := w.status(1).PodCIDR; got != "10.244.1.0/24" {
			t.Errorf("of the pod that runs, nodes route by %q", got)
		}
		if n := w.c.count("report"); n != 2 {
			t.Errorf("%d reports, want 2", n)
		}
		w.c.put(ends(p))
		w.stops(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		if got := w.status(1).PodCIDR; got != "" {
			t.Errorf("of the pod that is gone, nodes route by %q", got)
		}

		// It is not known yet how nodes route to this one.
		w.mu.Lock()
		w.cidr = netip.Prefix{}
		w.mu.Unlock()
		routed(3)
		w.pass(time.Minute)
		w.wantPhase(3, "")
		w.runs(3)
		w.pass(time.Second)
		w.wantPhase(3, v1alpha1.PodIPBound)
		route("10.244.7.0/24")
		w.pass(time.Minute)
		if got := w.status(3).PodCIDR; got != "10.244.7.0/24" {
			t.Errorf("once it is known, nodes route by %q", got)
		}
	})
}

// A node's network may be there before its agent. What starts then has an address of that network.
func TestAPodThatStartedWithoutThePluginStartsAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		serve := func(is bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.foreign = !is
		}
		stopped := func() int {
			w.r.mu.Lock()
			defer w.r.mu.Unlock()
			return len(w.r.stopped)
		}
		serve(false)
		w.given(1)
		other := netip.MustParseAddr("192.0.2.9")
		path := w.netns(1)
		nodetest.Configure(t, path, other)
		ns, _, err := ledger.SystemNetns{}.Identify(path)
		check(t, err)
		_, err = ledger.New(w.net, w.ledgers).Add(ledger.AddRequest{ // as the agent takes over what it finds
			Attachment: ledger.Attachment{ContainerID: "c1", IfName: "eth0"}, Pod: w.name(1), Netns: ns,
			Requested: []netip.Addr{other},
		})
		check(t, err)
		w.k.Look(w.name(1), nil, false)
		w.pass(time.Minute)
		w.wantPhase(1, "") // the runtime was asked before the ledger had it
		w.lists(1, true)
		w.pass(time.Minute)
		w.wantPhase(1, "")
		if n := stopped(); n > 0 {
			t.Errorf("%d sandboxes were stopped, though the next one would be no better", n)
		}
		serve(true)
		w.pass(time.Minute)
		if stopped() == 0 {
			t.Error("it goes on with an address that it was not given")
		}
		w.wantPhase(1, "")
		w.stops(1)
		n := stopped()
		w.runs(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)

		// The ledger of this one is lost.
		w.given(2)
		nodetest.Configure(t, w.netns(2), addr(2))
		w.lists(2, true)
		w.pass(time.Minute)
		w.wantPhase(2, v1alpha1.PodIPBound)
		if more := stopped() - n; more > 0 {
			t.Errorf("%d sandboxes were stopped that have their address", more)
		}
	})
}

func TestAConflictIsReportedUntilThePodStarts(t *testing.T) {
	inWorld(t, func(w *world) {
		conflict := func(n int, mac string) {
			w.k.Conflict(ledger.Event{Reason: ledger.EventConflict, Pod: ledger.Pod{Namespace: "default",
				Name: "web-" + strconv.Itoa(n), UID: uid(n)}, Addrs: []netip.Addr{addr(n)}, MAC: mac})
			w.pass(100 * time.Millisecond)
		}
		p := w.given(1)
		w.pass(time.Second)
		if name, err := w.ledgers.Mailbox().Node(); err != nil || name != node {
			t.Errorf("the plugin knows this node as %q, %v", name, err)
		}
		conflict(1, "02:00:00:00:00:01")
		w.wantPhase(1, v1alpha1.PodIPAllocated)
		if got := w.status(1).Conflict; got != "02:00:00:00:00:01" {
			t.Errorf("the conflict is %q", got)
		}
		reports := w.c.count("report")
		conflict(1, "02:00:00:00:00:01") // as each ADD says it
		w.pass(time.Hour)
		if n := w.c.count("report") - reports; n > 0 {
			t.Errorf("it was reported again %d times", n)
		}
		conflict(1, "02:00:00:00:00:02")
		if got := w.status(1).Conflict; got != "02:00:00:00:00:02" {
			t.Errorf("the conflict is %q", got)
		}

		// It starts, its sandbox crashes, and it ends.
		w.runs(1)
		w.pass(time.Second)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.stops(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		if got := w.status(1).Conflict; got != "" {
			t.Errorf("the conflict is still %q", got)
		}
		check(t, w.ledgers.Mailbox().PutProbed(uid(1), []netip.Addr{addr(1)}))
		w.c.put(ends(p))
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		conflict(1, "02:00:00:00:00:01") // it comes late
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.c.remove(uid(1))
		w.pass(time.Second)
		if probed, err := w.ledgers.Mailbox().Probed(uid(1)); err != nil || probed != nil {
			t.Errorf("of the pod that is gone is still noted %v, %v", probed, err)
		}
		conflict(2, "02:00:00:00:00:01") // of which nothing is known yet
		w.given(2)
		w.pass(time.Second)
		w.wantPhase(2, "")
	})
}

func TestAPodIsGoneOnlyOnceNothingOfItIsThere(t *testing.T) {
	for name, deleted := range map[string]func(*world, *Pod){
		"deleted": func(w *world, p *Pod) { w.c.put(ends(p)) },
		"deleted by force": func(w *world, p *Pod) {
			w.c.remove(uid(1))
		},
		"succeeded": func(w *world, p *Pod) {
			p.Status.Phase = "Succeeded"
			w.c.put(p)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				p := w.given(1)
				w.pass(time.Second)
				w.runs(1)
				w.pass(time.Second)
				w.wantPhase(1, v1alpha1.PodIPBound)
				deleted(w, p)
				still := func(what string) {
					t.Helper()
					w.pass(time.Minute)
					if w.status(1).Phase == v1alpha1.PodIPRetained {
						t.Fatalf("reported gone: %s", what)
					}
				}
				still("its sandbox runs")
				w.lists(1, false)
				still("it has an address in the ledger")
				w.del(1)
				still("its address is configured in a namespace")
				w.r.fail(errors.New("containerd is upset"))
				w.unmount(1)
				still("the runtime does not answer")
				if w.k.Trouble() == "" {
					t.Error("nothing is said of the runtime")
				}
				w.r.fail(nil)
				w.pass(time.Minute)
				w.wantPhase(1, v1alpha1.PodIPRetained)
				w.wantBarred(1, true)
				if said := w.k.Trouble(); said != "" {
					t.Errorf("says %q", said)
				}
			})
		})
	}
}

// A sandbox whose start fails is in neither list while it is undone.
func TestAnUnlistedNamespaceWithTheAddressIsThePods(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.given(1)
		path := w.netns(1)
		nodetest.Configure(t, path, addr(1))
		w.c.put(ends(p))
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.unmount(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
	})
}

// What a process keeps answers, though its mount is gone.
func TestAPodIsGoneOnlyOnceNoProcessKeepsItsNamespace(t *testing.T) {
	for how, keep := range map[string]func(testing.TB, string) func(){
		"a process is in it": nodetest.Process, "a process has it open": nodetest.HoldOpen,
	} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.given(1)
				w.runs(1)
				w.pass(time.Minute)
				kill := keep(t, filepath.Join(w.dir, "netns", "cni-1"))
				w.c.remove(uid(1))
				w.stops(1)
				w.pass(2 * time.Minute)
				w.wantPhase(1, v1alpha1.PodIPBound)
				if said := w.k.Trouble(); !strings.Contains(said, "/proc/") {
					t.Errorf("says %q", said)
				}
				kill()
				w.pass(time.Minute)
				w.wantPhase(1, v1alpha1.PodIPRetained)
			})
		})
	}
}

// A namespace whose addresses change all the time cannot be read: it has those of its own pod, or any.
func TestANamespaceThatCannotBeReadHoldsUpOnlyWhatItMayHave(t *testing.T) {
	inWorld(t, func(w *world) {
		flaps := nodetest.Netns(w.t, filepath.Join(w.dir, "netns"), "flaps")
		see := w.k.machine.observe
		w.k.machine.observe = func(ctx context.Context, q hostnet.Question) (*hostnet.View, error) {
			v, err := see(ctx, q)
			check(t, err)
			s, err := v.Find(ledger.Netns{Path: flaps})
			check(t, err)
			s.Err = fmt.Errorf("network namespace %s: torn", flaps)
			return v, nil
		}
		lists := func(uid string) {
			w.r.mu.Lock()
			defer w.r.mu.Unlock()
			w.r.sandboxes["flaps"] = cri.Sandbox{ID: "flaps", Ready: true,
				Pod: ledger.Pod{Namespace: "default", Name: "flaps", UID: uid}}
			w.r.netns["flaps"] = flaps
		}
		lists(uid(9))
		for n := 1; n <= 3; n++ {
			w.given(n)
			w.runs(n)
		}
		w.pass(time.Minute)
		w.c.remove(uid(1))
		w.stops(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)

		// It is of the pod that has ended.
		lists(uid(2))
		w.c.remove(uid(2))
		w.stops(2)
		w.pass(time.Minute)
		w.wantPhase(2, v1alpha1.PodIPBound)

		// It is nobody's that is known.
		w.r.mu.Lock()
		delete(w.r.sandboxes, "flaps")
		w.r.mu.Unlock()
		w.c.remove(uid(3))
		w.stops(3)
		w.pass(2 * time.Minute)
		w.wantPhase(3, v1alpha1.PodIPBound)
		if said := w.k.Trouble(); !strings.Contains(said, flaps) {
			t.Errorf("says %q", said)
		}
	})
}

// What is seen before a pod is barred proves nothing: it takes one look afterwards, which is dear.
func TestNamespacesAreLookedIntoOnceAndAfterThePodIsBarred(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.pass(time.Minute)
		see, looks := w.k.machine.observe, 0
		w.k.machine.observe = func(ctx context.Context, q hostnet.Question) (*hostnet.View, error) {
			looks++
			w.wantBarred(1, true)
			return see(ctx, q)
		}
		w.c.remove(uid(1))
		w.stops(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		if looks != 1 {
			t.Errorf("looked into all namespaces %d times", looks)
		}
	})
}

// An agent that does not see the namespaces of pods knows nothing.
func TestAnAgentThatIsBlindReportsNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.given(1)
		w.given(2)
		w.runs(1)
		w.runs(2)
		w.pass(time.Second)
		see := w.k.machine.observe
		w.k.machine.observe = func(context.Context, hostnet.Question) (*hostnet.View, error) { return &hostnet.View{}, nil }
		w.c.put(ends(p))
		w.del(1)
		w.r.mu.Lock()
		delete(w.r.sandboxes, "c1")
		w.r.mu.Unlock()
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		if !strings.Contains(w.k.Trouble(), errBlind.Error()) {
			t.Errorf("says %q", w.k.Trouble())
		}
		w.k.machine.observe = see
		w.unmount(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
	})
}

// Two networks may have the same addresses.
func TestAnotherPodsNamespaceIsNotThePods(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.given(1)
		path := w.netns(2)
		nodetest.Configure(t, path, addr(1))
		w.r.mu.Lock()
		w.r.sandboxes["other"] = cri.Sandbox{ID: "other", Ready: true,
			Pod: ledger.Pod{Namespace: "default", Name: "x", UID: "x"}}
		w.r.netns["other"] = path
		w.r.mu.Unlock()
		w.c.put(ends(p))
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
	})
}

// The next pod with the address starts while the agent looks after the one before: the runtime does not list it yet.
func TestThePodThatHasTheAddressNextStaysUp(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.pass(time.Minute)
		var down []string
		w.k.machine.down = func(ns ledger.Netns) error {
			down = append(down, ns.Path)
			return nil
		}
		see, starts := w.k.machine.observe, true
		w.k.machine.observe = func(ctx context.Context, q hostnet.Question) (*hostnet.View, error) {
			if starts {
				starts = false
				w.putIP(addr(1), uid(2), "web-1")
				path := w.netns(2)
				ns, _, err := ledger.SystemNetns{}.Identify(path)
				check(t, err)
				_, err = ledger.New(w.net, w.ledgers).Add(ledger.AddRequest{
					Attachment: ledger.Attachment{ContainerID: "c2", IfName: "eth0"},
					Pod:        ledger.Pod{Namespace: "default", Name: "web-1", UID: uid(2)}, Netns: ns,
					Pool: []netip.Addr{addr(1)}, PoolText: text(1),
				})
				check(t, err)
				nodetest.Configure(t, path, addr(1))
			}
			return see(ctx, q)
		}
		w.c.remove(uid(1))
		w.stops(1)
		w.pass(time.Minute)
		if starts {
			t.Fatal("the agent did not look")
		}
		if len(down) > 0 || len(w.r.stopped) > 0 {
			t.Errorf("took %v down and stopped %v", down, w.r.stopped)
		}
		w.wantBarred(1, true)
		w.wantBarred(2, false)
	})
}

// An entry of the ledger that is nobody's may be the pod's.
func TestAnAddressThatIsBoundToNobodyKnownIsWaitedFor(t *testing.T) {
	inWorld(t, func(w *world) {
		p := w.given(1)
		w.pass(time.Second)
		w.runs(1)
		w.pass(time.Second)
		index, err := filepath.Glob(filepath.Join(w.ledgers.StateDir, "pods-*", "index", "*"))
		check(t, err)
		if len(index) != 1 {
			t.Fatalf("the index has %v", index)
		}
		check(t, os.Remove(index[0]))
		w.r.mu.Lock()
		clear(w.r.sandboxes)
		w.r.mu.Unlock()
		w.unmount(1)
		w.c.put(ends(p))
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.del(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
	})
}

func TestAPodThatHasLostItsAddressIsTakenDown(t *testing.T) {
	up := func(w *world, n int) bool {
		is := false
		nodetest.In(t, filepath.Join(w.dir, "netns", "cni-1"), func() error {
			l, err := netlink.LinkByName("eth0")
			is = err == nil && l.Attrs().RawFlags&1 != 0
			return err
		})
		return is
	}
	runs := func(w *world) *Pod {
		p := w.given(1)
		w.runs(1)
		nodetest.In(t, filepath.Join(w.dir, "netns", "cni-1"), func() error {
			l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}
			if err := netlink.LinkAdd(l); err != nil {
				return err
			}
			return netlink.LinkSetUp(l)
		})
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		if len(w.r.stopped) > 0 || !up(w, 1) {
			t.Fatal("taken down too early")
		}
		return p
	}
	down := func(w *world) {
		t.Helper()
		if len(w.r.stopped) == 0 || up(w, 1) {
			t.Errorf("stopped %v, and the interface is up: %t", w.r.stopped, up(w, 1))
		}
		w.wantBarred(1, true)
	}
	t.Run("the operator said that its node is off", func(t *testing.T) {
		inWorld(t, func(w *world) {
			runs(w)
			w.c.fail(errDown)
			w.pass(time.Minute)
			w.c.remove(uid(1))
			w.putIP(addr(1), uid(2), "web-1")
			w.pass(time.Hour)
			if len(w.r.stopped) > 0 {
				t.Fatal("taken down on ignorance")
			}
			w.c.fail(nil)
			w.pass(20 * time.Second)
			down(w)
			if got := w.status(1).Phase; got != v1alpha1.PodIPBound { // of the other, as far as this node is concerned
				t.Errorf("reported %s of another's", got)
			}
		})
	})
	t.Run("it is deleted by force, and its node said to be off later", func(t *testing.T) {
		for how, say := range map[string]func(*cluster){
			"tainted": func(c *cluster) { c.off = true },
			"deleted": func(c *cluster) { c.node = "" },
		} {
			t.Run(how, func(t *testing.T) {
				inWorld(t, func(w *world) {
					runs(w)
					w.c.remove(uid(1))
					w.pass(time.Hour)
					if len(w.r.stopped) > 0 {
						t.Fatal("taken down without a word of it")
					}
					w.c.mu.Lock()
					say(w.c)
					w.c.mu.Unlock()
					w.pass(20 * time.Second)
					down(w)
				})
			})
		}
	})
	t.Run("its node is said to be off, and it exists", func(t *testing.T) {
		inWorld(t, func(w *world) {
			runs(w)
			w.c.mu.Lock()
			w.c.off = true
			w.c.mu.Unlock()
			w.pass(time.Hour)
			if len(w.r.stopped) > 0 {
				t.Error("taken down though the cluster has it")
			}
		})
	})
	t.Run("a backup has it elsewhere", func(t *testing.T) {
		inWorld(t, func(w *world) {
			p := runs(w)
			w.c.fail(errDown)
			p.Spec.NodeName = "n2"
			w.c.put(p)
			w.c.fail(nil)
			w.pass(20 * time.Second)
			down(w)
		})
	})
}

// takenOver runs pod 1, which another program has started and which was taken over: its PodIP alone tells its address.
func (w *world) takenOver() {
	w.t.Helper()
	p := w.pod(1)
	p.Annotations = nil
	w.c.put(p)
	nodetest.Configure(w.t, w.netns(1), addr(1))
	w.r.mu.Lock()
	w.r.netns["c1"] = filepath.Join(w.dir, "netns", "cni-1")
	w.r.sandboxes["c1"] = cri.Sandbox{ID: "c1", Ready: true, Pod: w.name(1)}
	w.r.mu.Unlock()
	w.putIP(addr(1), uid(1), p.Name)
}

// What one sandbox has is unknown, as it ends between the list and the question.
func TestASandboxThatVanishesKeepsNoOtherUnknown(t *testing.T) {
	inWorld(t, func(w *world) {
		w.takenOver()
		w.r.mu.Lock()
		w.r.sandboxes["c2"] = cri.Sandbox{ID: "c2", Ready: true, Pod: w.name(2)}
		w.r.vanished = map[string]error{"c2": errDown}
		w.r.mu.Unlock()
		w.end()
		w.c.remove(uid(1))
		w.putIP(addr(1), uid(3), "web-1")
		w.starts(-1)
		w.pass(time.Minute)
		w.r.mu.Lock()
		stopped := slices.Clone(w.r.stopped)
		w.r.mu.Unlock()
		if !slices.Contains(stopped, "c1") || slices.Contains(stopped, "c2") {
			t.Errorf("stopped %v, want c1", stopped)
		}
		if said := w.k.Trouble(); !strings.Contains(said, "web-2") {
			t.Errorf("says %q", said)
		}
	})
}

// A pod that another program has started, and that was taken over, has its address by its PodIP alone: no annotation,
// no file and no ledger tells it, if its node was cut off before the controller told them.
func TestAPodThatWasTakenOverIsTakenDownOnceItsAddressIsAnothers(t *testing.T) {
	stopped := func(w *world) bool {
		w.r.mu.Lock()
		defer w.r.mu.Unlock()
		return len(w.r.stopped) > 0
	}
	for how, restarts := range map[string]bool{"the agent runs": false, "the agent starts afterwards": true} {
		t.Run(how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.takenOver()
				w.pass(10 * time.Minute)
				w.c.fail(errDown)
				w.c.remove(uid(1))
				w.putIP(addr(1), uid(2), "web-1")
				w.pass(time.Hour)
				if stopped(w) {
					t.Fatal("taken down on ignorance")
				}
				if restarts {
					w.end()
					w.starts(-1)
				}
				w.c.fail(nil)
				w.pass(30 * time.Second)
				if !stopped(w) {
					t.Error("it goes on answering")
				}
				w.wantBarred(1, true)
			})
		})
	}
	another := func(w *world) { w.putIP(addr(1), uid(2), "web-1") }
	for _, c := range []struct {
		how     string
		unseen  bool // by the watch
		deleted bool
		change  func(*world)
	}{
		{"the cluster has it", false, false, another},
		{"the cluster has it, unseen so far", true, false, another},
		{"its address is its own", false, true, func(*world) {}},
		{"its address is of no pool", false, true, func(w *world) { delete(w.c.ips, addr(1).String()) }},
		{"its address is one of the node", false, true, func(w *world) {
			another(w)
			r, err := ledger.NewRange(netip.MustParsePrefix("10.6.0.0/24"), netip.Addr{}, netip.Addr{}, addr(254))
			check(t, err)
			w.net.Ranges[0][0] = r
			_, err = ledger.New(w.net, w.ledgers).Add(ledger.AddRequest{Attachment: ledger.Attachment{ContainerID: "c1",
				IfName: "eth0"}, Pod: w.name(1), Requested: []netip.Addr{addr(1)}})
			check(t, err)
		}},
	} {
		t.Run(c.how, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.c.stale = c.unseen
				w.takenOver()
				w.pass(time.Second)
				w.c.mu.Lock()
				if c.deleted {
					delete(w.c.pods, uid(1))
				}
				w.c.mu.Unlock()
				c.change(w)
				w.c.endWatches()
				w.pass(time.Hour)
				if stopped(w) {
					t.Error("taken down")
				}
				w.wantBarred(1, false)
			})
		})
	}
}

// A namespace of nerdctl, or of ip netns, may have an address of a pool, too.
func TestOnlyWhatIsKnownToBeThePodsIsTakenDown(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		var down []string
		w.k.machine.down = func(ns ledger.Netns) error {
			down = append(down, ns.Path)
			return hostnet.Down(ns)
		}
		foreign := nodetest.Netns(w.t, filepath.Join(w.dir, "netns"), "nerdctl")
		nodetest.Configure(t, foreign, addr(1))
		w.c.fail(errDown)
		w.c.remove(uid(1))
		w.putIP(addr(1), uid(2), "web-1")
		w.c.fail(nil)
		w.pass(20 * time.Second)
		own := filepath.Join(w.dir, "netns", "cni-1")
		if !slices.Contains(down, own) || slices.ContainsFunc(down, func(path string) bool { return path != own }) {
			t.Errorf("took %v down, want only %s", down, own)
		}
		down = nil
		w.stops(1)
		w.pass(2 * time.Minute)
		if len(down) > 0 {
			t.Errorf("took %v down", down)
		}
		if said := w.k.Trouble(); !strings.Contains(said, foreign) {
			t.Errorf("says %q", said)
		}
		w.wantBarred(1, true)
	})
}

// Its sandbox may have ended, and its namespace not.
func TestThePodsNamespaceIsTakenDownThoughItsSandboxHasEnded(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.pass(time.Minute)
		var down []string
		w.k.machine.down = func(ns ledger.Netns) error {
			down = append(down, ns.Path)
			return nil
		}
		w.lists(1, false)
		w.del(1)
		w.c.remove(uid(1))
		w.putIP(addr(1), uid(2), "web-1")
		w.pass(20 * time.Second)
		if own := filepath.Join(w.dir, "netns", "cni-1"); !slices.Contains(down, own) {
			t.Errorf("took %v down, want %s", down, own)
		}
	})
}

// The sandbox of a pod may be seen before the pod.
func TestAWatchThatLagsEndsNoPod(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.mu.Lock()
		w.c.stale = true
		w.c.mu.Unlock()
		p := w.given(1)
		w.lists(1, false)
		w.pass(time.Minute)
		w.wantBarred(1, false)
		w.runs(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.wantBarred(1, false)
		w.stops(1)
		p.Status.Phase = "Succeeded"
		w.c.put(p)
		w.pass(2 * apiwatch.Timeout)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.wantBarred(1, true)
	})
}

func TestAPartitionDelaysAndLosesNothing(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.given(1), w.given(2)
		w.runs(1)
		w.runs(2)
		w.pass(time.Second)
		w.c.fail(errDown)
		w.pass(time.Minute)
		if w.k.Trouble() == "" {
			t.Error("nothing is said of the API server")
		}
		w.stops(1)
		w.c.put(ends(a)) // by the API server; the agent does not see it
		w.pass(time.Hour)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.wantBarred(1, false)
		w.c.remove(uid(1))
		w.c.put(ends(b))
		w.c.fail(nil)
		w.pass(20 * time.Second)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.wantPhase(2, v1alpha1.PodIPBound)
		w.stops(2)
		w.pass(20 * time.Second)
		w.wantPhase(2, v1alpha1.PodIPRetained)

		w.given(3) // nothing of it changes, but of its PodIP
		w.runs(3)
		w.pass(time.Minute)
		w.wantPhase(3, v1alpha1.PodIPBound)
		w.c.fail(errDown)
		w.c.mu.Lock()
		w.c.ips[addr(3).String()].Status = v1alpha1.PodIPStatus{}
		w.c.mu.Unlock()
		w.c.fail(nil)
		w.pass(20 * time.Second)
		w.wantPhase(3, v1alpha1.PodIPBound)
		if said := w.k.Trouble(); said != "" {
			t.Errorf("says %q", said)
		}
	})
}

// The agent was away while its pod was deleted: only its file, or the sandbox, tells of it.
func TestAnAgentThatWasAwayFinishes(t *testing.T) {
	for name, meanwhile := range map[string]func(*world){
		"the file tells":    func(w *world) { w.stops(1) },
		"the sandbox tells": func(w *world) { check(t, w.ledgers.Mailbox().DeletePod(uid(1))) },
		"the ledger tells": func(w *world) {
			check(t, w.ledgers.Mailbox().DeletePod(uid(1)))
			w.r.mu.Lock()
			clear(w.r.sandboxes)
			w.r.mu.Unlock()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.given(1)
				w.runs(1)
				w.pass(time.Second)
				w.end()
				w.c.remove(uid(1))
				meanwhile(w)
				w.starts(-1)
				w.pass(time.Minute)
				if name != "the file tells" {
					w.wantPhase(1, v1alpha1.PodIPBound)
					w.stops(1)
					w.pass(20 * time.Second)
				}
				w.wantPhase(1, v1alpha1.PodIPRetained)
				w.wantBarred(1, true)
			})
		})
	}
}

func TestOldBarsAreSwept(t *testing.T) {
	inWorld(t, func(w *world) {
		for n := 1; n <= 3; n++ {
			_, err := ledger.Bar(w.ledgers, uid(n))
			check(t, err)
		}
		old := time.Now().Add(-mailbox.BarFor - time.Hour)
		for _, n := range []int{1, 2} {
			path, _ := w.ledgers.Mailbox().PodPath(uid(n))
			check(t, os.Chtimes(path+".barred", old, old))
		}
		path, _ := w.ledgers.Mailbox().PodPath(uid(3))
		check(t, os.Chtimes(path+".barred", time.Now(), time.Now()))
		p := w.given(2) // a Job that is over, say
		p.Status.Phase = "Succeeded"
		w.c.put(p)
		w.pass(sweepEvery + time.Minute)
		w.wantBarred(1, false)
		w.wantBarred(2, true)
		w.wantBarred(3, true)
	})
}

// kills runs an agent that is killed after every number of writes, and another one after it.
func TestKilledBetweenAnyTwoWrites(t *testing.T) {
	for writes := 0; ; writes++ {
		done := false
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.c.putAudit(audit(7, 7))
			p, q := w.given(1), w.given(2)
			w.starts(writes)
			w.pass(time.Second)
			again := func() {
				if !w.lives() {
					w.end()
					w.starts(-1)
				}
				w.pass(time.Second)
			}
			again()
			if w.file(1) != text(1) || w.c.report == nil {
				t.Errorf("killed after %d writes: the file says %q, the report is %v", writes, w.file(1), w.c.report)
			}
			w.runs(1)
			w.runs(2)
			w.pass(time.Second)
			again()
			w.wantPhase(1, v1alpha1.PodIPBound)
			w.c.put(ends(p))
			w.stops(1)
			w.c.remove(string(q.UID))
			w.pass(time.Second)
			again()
			w.wantPhase(1, v1alpha1.PodIPRetained)
			w.wantPhase(2, v1alpha1.PodIPBound)
			w.c.remove(uid(1))
			w.stops(2)
			w.pass(20 * time.Second)
			done = w.lives() && w.left >= 0 // before the other one
			again()
			w.wantPhase(2, v1alpha1.PodIPRetained)
			for _, n := range []int{1, 2} {
				if w.status(n).Phase == v1alpha1.PodIPRetained {
					w.wantBarred(n, true)
				}
				if w.file(n) != "" {
					t.Errorf("killed after %d writes: the file of pod %d stays", writes, n)
				}
			}
			w.end()
		})
		if done || t.Failed() {
			if writes < 10 {
				t.Errorf("there were %d writes only", writes)
			}
			return
		}
	}
}

// micro returns the time of a round in microseconds.
func micro(round int64) *metav1.MicroTime {
	t := v1alpha1.RoundTime(1000 * round)
	return &t
}

// audit has rounds in microseconds.
func audit(round, epoch int64, asked ...string) *v1alpha1.PodIPAudit {
	r := &v1alpha1.PodIPAudit{}
	r.Spec = v1alpha1.PodIPAuditSpec{Round: *micro(round), Epoch: micro(epoch), Term: micro(epoch),
		Phase: v1alpha1.PodIPAuditSettled}
	if round == epoch {
		r.Spec.Phase = v1alpha1.PodIPAuditRecalling
	}
	for _, a := range asked {
		r.Spec.Asked = append(r.Spec.Asked, v1alpha1.PodIPQuestion{About: a, Round: *micro(round)})
	}
	return r
}

func (w *world) wantReport(round int64, held ...int) {
	w.t.Helper()
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if w.c.report == nil {
		w.t.Errorf("no report, want that of round %d; the agent says %q", round, w.k.Trouble())
		return
	}
	var is, want []string
	for _, h := range w.c.report.Spec.Held {
		is = append(is, h.Address+" "+h.PodUID+" "+h.Namespace+"/"+h.PodName+" "+h.Pool)
	}
	for _, n := range held {
		want = append(want, addr(n).String()+" "+uid(n)+" default/"+w.pod(n).Name+" blue")
	}
	if !w.c.report.Spec.Round.Equal(micro(round)) || !slices.Equal(is, want) {
		w.t.Errorf("answered round %v with %v, want round %d with %v", w.c.report.Spec.Round, is, round, want)
	}
}

func TestAfterARestoreOnlyPodsThatTheClusterHasMayStart(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.putAudit(audit(5, 5))
		w.given(1)
		w.given(2)
		w.given(3)
		w.runs(1)
		w.pass(200 * time.Millisecond) // without a back-off
		w.wantReport(5, 1)
		if said := w.k.Trouble(); said != "" {
			t.Errorf("says %q", said)
		}
		checked, _, err := ledger.Epoch(w.ledgers)
		check(t, err)
		if checked != 5000 {
			t.Errorf("checked %d", checked)
		}
		// Its bar may be lost, so its PodIP is asked for, once. Of a pod that comes later none can be.
		if n := w.c.count("get podip " + addr(2).String()); n != 1 || w.file(2) != text(2) {
			t.Errorf("read the PodIP of a pod that has yet to start %d times; its file says %q", n, w.file(2))
		}
		w.given(4)
		w.pass(200 * time.Millisecond)
		if n := w.c.count("get podip " + addr(4).String()); n > 0 || w.file(4) != text(4) {
			t.Errorf("read the PodIP of a pod that came later %d times; its file says %q", n, w.file(4))
		}

		// A backup is restored that lacks pods 2 and 3, of which kubelet knows. What is still on its way must not count.
		w.c.fail(errDown)
		w.pass(time.Minute)
		w.c.mu.Lock()
		delete(w.c.pods, uid(2))
		delete(w.c.pods, uid(3))
		delete(w.c.ips, addr(1).String())
		w.c.mu.Unlock()
		w.c.audit.Spec.Round, w.c.audit.Spec.Epoch = *micro(3), micro(3)
		w.c.report.Spec.Round = *micro(3)
		w.c.fail(nil)
		w.pass(20 * time.Second)
		w.c.putAudit(audit(9, 9))
		w.pass(time.Second)
		w.wantReport(9, 1)
		w.netns(2)
		if err := w.add(2); !errors.Is(err, ledger.ErrUnseen) && !errors.Is(err, ledger.ErrBarred) {
			t.Errorf("a pod that the cluster has forgotten starts: %v", err)
		}
		if w.file(1) != text(1) || w.file(2) != "" {
			t.Errorf("the files say %q and %q", w.file(1), w.file(2))
		}

		// The controller makes the PodIP again, and the recall is over.
		w.putIP(addr(1), uid(1), "web-1")
		over := audit(9, 9)
		over.Spec.Phase, over.Spec.Term = v1alpha1.PodIPAuditSettled, micro(10)
		w.c.putAudit(over)
		w.pass(time.Second)
		w.wantPhase(1, v1alpha1.PodIPBound)
	})
}

// The clock of an earlier leader was ahead: after a restore the next epoch is below the one that the node has begun.
func TestARecallByAClockThatIsBehindTheLastOneIsAnswered(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.putAudit(audit(9, 9))
		w.given(1)
		w.given(2)
		w.runs(1)
		w.pass(time.Second)
		w.wantReport(9, 1)

		w.c.mu.Lock()
		delete(w.c.pods, uid(2))
		w.c.report.Spec.Round = *micro(3)
		w.c.mu.Unlock()
		w.c.putAudit(audit(5, 5))
		w.pass(time.Second)
		w.wantReport(5, 1)
		if w.file(1) != text(1) || w.file(2) != "" {
			t.Errorf("the files say %q and %q", w.file(1), w.file(2))
		}
	})
}

// While the agent begins an epoch it does not believe events of before.
func TestAnEventOfBeforeARecallWritesNoFile(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.pass(time.Second)
		w.c.mu.Lock()
		delete(w.c.pods, uid(1))
		w.c.mu.Unlock()
		for i := range 20 {
			p := w.pod(2)
			w.c.mu.Lock()
			p.ResourceVersion = w.c.next()
			w.c.tell("MODIFIED", p) // of an API server that has forgotten it by now
			w.c.mu.Unlock()
			if i == 10 {
				w.c.putAudit(audit(5, 5))
			}
		}
		w.pass(time.Minute)
		if w.file(1) != "" || w.file(2) != "" {
			t.Errorf("the files say %q and %q", w.file(1), w.file(2))
		}
		w.wantReport(5)
	})
}

func TestPodsThatAreAskedForAreBarredBeforeTheReport(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.pass(time.Second)
		w.c.putAudit(audit(5, 5))
		w.pass(time.Second)
		w.c.putAudit(audit(6, 5, uid(1), uid(2), addr(1).String()))
		w.pass(time.Second)
		w.wantReport(6, 1)
		w.wantBarred(1, false)
		w.wantBarred(2, true)

		// Nothing is said while it is not known.
		for what, broken := range map[string]func(bool){
			"the runtime": func(is bool) {
				w.r.fail(map[bool]error{true: errors.New("upset")}[is])
			},
			"the ledger": func(is bool) {
				files, err := filepath.Glob(filepath.Join(w.ledgers.StateDir, "pods-*", "network*"))
				check(t, err)
				if is {
					check(t, os.Rename(files[0], files[0]+"~"))
					check(t, os.Mkdir(files[0], 0o755))
				} else {
					check(t, os.Remove(filepath.Join(filepath.Dir(files[0]), "network")))
					check(t, os.Rename(filepath.Join(filepath.Dir(files[0]), "network~"),
						filepath.Join(filepath.Dir(files[0]), "network")))
				}
			},
			"the node": func(is bool) {
				w.c.mu.Lock()
				w.c.node = map[bool]types.UID{false: "node-uid"}[is]
				w.c.mu.Unlock()
			},
		} {
			round := v1alpha1.RoundOf(&w.c.report.Spec.Round) / 1000
			broken(true)
			w.c.putAudit(audit(round+1, 5, uid(3)))
			w.pass(time.Minute)
			w.wantReport(round, 1)
			if w.k.Trouble() == "" {
				t.Errorf("nothing is said of %s", what)
			}
			broken(false)
			w.pass(20 * time.Second)
			w.wantReport(round+1, 1)
		}
	})
}

// The report goes with its Node.
func TestAReportThatIsGoneIsWrittenAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.putAudit(audit(5, 5))
		w.pass(time.Second)
		w.wantReport(5)
		w.c.mu.Lock()
		w.c.report, w.c.node = nil, "another"
		w.c.mu.Unlock()
		for range 20 { // marks
			w.pass(30 * time.Second)
			w.c.putAudit(audit(5, 5))
		}
		w.wantReport(5)
		if w.c.report != nil && w.c.report.OwnerReferences[0].UID != "another" {
			t.Error("it belongs to a Node that is gone")
		}
		said := w.c.count("say")
		for range 100 {
			w.pass(30 * time.Second)
			w.c.putAudit(audit(5, 5))
		}
		if n := w.c.count("say") - said; n > 0 {
			t.Errorf("answered %d more times", n)
		}
		over := audit(5, 5) // no controller waits for a report any more
		over.Spec.Phase = v1alpha1.PodIPAuditSettled
		w.c.putAudit(over)
		w.pass(time.Minute)
		reads := w.c.count("get")
		w.pass(time.Hour)
		if n := w.c.count("get") - reads; n > 0 {
			t.Errorf("%d reads in an hour in which nothing happens", n)
		}
	})
}
