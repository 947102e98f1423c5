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

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/ledger"
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
		w.wantPhase(1, v1alpha1.PodIPBound)
		if n := w.c.count("get podip"); n != 1 {
			t.Errorf("its grant cost %d reads of its PodIP, want 1", n)
		}
		w.runs(1)
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
		w.wantGranted(1, true)
		if n := w.c.count("get") - reads; n > 0 {
			t.Errorf("a pod that changes, and one that ends for a minute, cost %d reads", n)
		}
		w.stops(1)
		w.lists(1, false)
		w.pass(100 * time.Millisecond)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.wantGranted(1, false)
		p.Labels, p.Status.Phase = nil, "Succeeded"
		w.c.put(p)
		w.pass(time.Second)
		w.c.remove(uid(1))
		w.pass(time.Second)
		w.k.Look(w.name(1), p.Annotations, true) // its sandbox is removed last
		w.pass(time.Second)
		if n := w.c.count("get") - reads; n > 1 {
			t.Errorf("its end cost %d reads, want 1", n)
		}
		w.netns(1)
		if err := w.add(1); !errors.Is(err, ledger.ErrNotGranted) {
			t.Errorf("an ADD after that: %v", err)
		}
		if n := w.c.count("report"); n != 2 {
			t.Errorf("%d reports, want 2", n)
		}
	})
}

// Other nodes route to a pod by the time it starts.
func TestARoutedPodIsNamedWithThePrefixOfItsNode(t *testing.T) {
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
			w.pass(time.Second)
			return p
		}
		p := routed(1)
		w.wantPhase(1, v1alpha1.PodIPBound)
		if got := w.status(1).PodCIDR; got != "10.244.1.0/24" {
			t.Errorf("nodes route by %q", got)
		}
		asked := w.c.count("get")
		w.pass(5 * time.Minute)
		if n := w.c.count("get") - asked; n > 0 {
			t.Errorf("a pod that does not start yet cost %d requests", n)
		}
		if n := w.c.count("report"); n != 1 {
			t.Errorf("%d reports, want 1", n)
		}
		w.c.put(ends(p))
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
		w.wantPhase(3, v1alpha1.PodIPBound)
		route("10.244.7.0/24")
		w.k.pods.enqueueAll() // as the router does
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
		w.lists(1, true)
		w.pass(time.Minute)
		if n := stopped(); n > 0 {
			t.Errorf("%d sandboxes were stopped, though the next one would be no better", n)
		}
		serve(true)
		w.pass(time.Minute)
		if stopped() == 0 {
			t.Error("it goes on with an address that it was not given")
		}
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
		if name, err := w.ledgers.Grants().Node(); err != nil || name != node {
			t.Errorf("the plugin knows this node as %q, %v", name, err)
		}
		conflict(1, "02:00:00:00:00:01")
		w.wantPhase(1, v1alpha1.PodIPBound)
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
		w.c.put(ends(p))
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		conflict(1, "02:00:00:00:00:01") // it comes late
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.c.remove(uid(1))
		w.pass(time.Second)
		conflict(2, "02:00:00:00:00:01") // of which nothing is known yet
		w.given(2)
		w.pass(time.Second)
		w.wantPhase(2, v1alpha1.PodIPBound)
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
				w.wantGranted(1, false)
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

// What is seen while a pod is granted its address proves nothing: it takes one look afterwards, which is dear.
func TestNamespacesAreLookedIntoOnceAndAfterTheGrantIsRevoked(t *testing.T) {
	inWorld(t, func(w *world) {
		w.given(1)
		w.runs(1)
		w.pass(time.Minute)
		see, looks := w.k.machine.observe, 0
		w.k.machine.observe = func(ctx context.Context, q hostnet.Question) (*hostnet.View, error) {
			looks++
			w.wantGranted(1, false)
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
				next, err := w.ledgers.Grants().Begin(uid(2), text(1))
				check(t, err)
				check(t, next.Finish())
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
		w.wantGranted(1, false)
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
		w.wantGranted(1, false)
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
			w.pass(time.Minute)
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
					w.pass(time.Minute)
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
			w.pass(time.Minute)
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
				w.wantGranted(1, false)
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
		w.pass(time.Minute)
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
		w.wantGranted(1, false)
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
		w.pass(time.Minute)
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
		w.wantGranted(1, false)
		w.wantPhase(1, "")
		w.pass(2 * apiwatch.Timeout)
		w.wantGranted(1, true)
		w.runs(1)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPBound)
		w.stops(1)
		p.Status.Phase = "Succeeded"
		w.c.put(p)
		w.pass(2 * apiwatch.Timeout)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.wantGranted(1, false)
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
		w.wantGranted(1, true)
		w.c.remove(uid(1))
		w.c.put(ends(b))
		w.c.fail(nil)
		w.pass(time.Minute)
		w.wantPhase(1, v1alpha1.PodIPRetained)
		w.wantPhase(2, v1alpha1.PodIPBound)
		w.stops(2)
		w.pass(time.Minute)
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
		w.pass(time.Minute)
		w.wantPhase(3, v1alpha1.PodIPBound)
		if said := w.k.Trouble(); said != "" {
			t.Errorf("says %q", said)
		}
	})
}

// The agent was away while its pod was deleted: only its grant, the sandbox, the ledger or its PodIP tells of it.
func TestAnAgentThatWasAwayFinishes(t *testing.T) {
	for name, meanwhile := range map[string]func(*world){
		"the grant tells":   func(w *world) { w.stops(1) },
		"the sandbox tells": func(w *world) { check(t, w.ledgers.Grants().Revoke(uid(1))) },
		"the ledger tells": func(w *world) {
			check(t, w.ledgers.Grants().Revoke(uid(1)))
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
				if name != "the grant tells" {
					w.wantPhase(1, v1alpha1.PodIPBound)
					w.stops(1)
					w.pass(time.Minute)
				}
				w.wantPhase(1, v1alpha1.PodIPRetained)
				w.wantGranted(1, false)
			})
		})
	}
}

// kills runs an agent that is killed after every number of writes, and another one after it.
func TestKilledBetweenAnyTwoWrites(t *testing.T) {
	for writes := 0; ; writes++ {
		done := false
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
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
			w.pass(time.Minute)
			done = w.lives() && w.left >= 0 // before the other one
			again()
			w.wantPhase(2, v1alpha1.PodIPRetained)
			for _, n := range []int{1, 2} {
				if w.file(n) != "" {
					t.Errorf("killed after %d writes: the grant of pod %d stays", writes, n)
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

func (w *world) wantReport(epoch int64, held ...int) {
	w.t.Helper()
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	if w.c.report == nil {
		w.t.Errorf("no report, want that of epoch %d; the agent says %q", epoch, w.k.Trouble())
		return
	}
	var is, want []string
	for _, h := range w.c.report.Spec.Held {
		is = append(is, h.Address+" "+h.PodUID+" "+h.Namespace+"/"+h.PodName+" "+h.Pool)
	}
	for _, n := range held {
		want = append(want, addr(n).String()+" "+uid(n)+" default/"+w.pod(n).Name+" blue")
	}
	if !w.c.report.Spec.Epoch.Equal(micro(epoch)) || !slices.Equal(is, want) {
		w.t.Errorf("reported %v for epoch %v, want %v for epoch %d", is, w.c.report.Spec.Epoch, want, epoch)
	}
}

// The report goes with its Node.
func TestAReportThatIsGoneIsWrittenAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		w.c.putAudit(audit(5, v1alpha1.PodIPAuditRecalling))
		w.pass(time.Second)
		w.wantReport(5)
		w.c.mu.Lock()
		w.c.report, w.c.node = nil, "another"
		w.c.mu.Unlock()
		for range 20 { // marks
			w.pass(30 * time.Second)
			w.c.putAudit(audit(5, v1alpha1.PodIPAuditRecalling))
		}
		w.wantReport(5)
		if w.c.report != nil && w.c.report.OwnerReferences[0].UID != "another" {
			t.Error("it belongs to a Node that is gone")
		}
		said := w.c.count("say")
		for range 100 {
			w.pass(30 * time.Second)
			w.c.putAudit(audit(5, v1alpha1.PodIPAuditRecalling))
		}
		if n := w.c.count("say") - said; n > 0 {
			t.Errorf("answered %d more times", n)
		}
		over := audit(5, v1alpha1.PodIPAuditSettled) // no controller waits for a report any more
		w.c.putAudit(over)
		w.pass(time.Minute)
		reads := w.c.count("get")
		w.pass(time.Hour)
		if n := w.c.count("get") - reads; n > 0 {
			t.Errorf("%d reads in an hour in which nothing happens", n)
		}
	})
}
