package node

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/nodetest"
)

func TestThePromiseIsThereWhenRunPodSandboxReturns(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	w.a.RunPodSandbox(s)
	// The agent dies here, and the runtime hands on no annotations.
	w.del(s)
	w.want(addr, ledger.StateRetained)
}

func TestARunningPodsPolicyIsAPromiseBeforeItsDEL(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	w.a.RunPodSandbox(s)
	w.settle()
	addrs, err := w.ledger.List()
	check(t, err)
	if len(addrs) != 1 || addrs[0].Key == nil || addrs[0].Policy.Duration().String() != "10m0s" {
		t.Errorf("the ledger says %+v", addrs)
	}
	w.wantSaid()
}

func TestAPromiseEndsThatTheTemplateNoLongerMakes(t *testing.T) {
	w := newWorld(t)
	first := w.sandbox("c1", "web-0", ten)
	addr := w.add(first)
	w.a.RunPodSandbox(first)
	w.settle()
	w.del(first)
	w.want(addr, ledger.StateRetained)

	second := w.sandbox("c2", "web-0", nil)
	w.clock.Pass(configureTime) // the first one's link is gone
	if got := w.add(second); got != addr {
		t.Fatalf("got %s, want %s back", got, addr)
	}
	w.a.RunPodSandbox(second)
	w.settle()
	w.del(second)
	w.want(addr, "")
}

func TestABadAnnotationIsReportedAndSetsNothing(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", map[string]string{retention.AnnotationRetainIP: "true"})
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	w.a.RunPodSandbox(s)
	w.settle()
	w.wantSaid(retainedip.EventInvalidAnnotation)
	if e := w.said.events[0]; e.Pod != s.Pod || e.ContainerID != "c1" || e.Message == "" {
		t.Errorf("the event is %+v", e)
	}
	if n := testutil.ToFloat64(w.a.metrics.badAnnotations); n != 1 {
		t.Errorf("counted %v", n)
	}
	// Nor has it decided that nothing is to be retained: a runtime that hands on corrected annotations is heard.
	policy, _, err := retention.Parse(ten)
	check(t, err)
	_, err = w.ledger.Del(ledger.DelRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: "eth0"}, Pod: s.Pod,
		Policy: &policy})
	check(t, err)
	w.want(addr, ledger.StateRetained)
}

func TestAnAddressThatIsNotConfiguredInItsPodIsReported(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", nil)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr.Next())
	w.a.RunPodSandbox(s)
	w.settle()
	w.wantSaid(retainedip.EventNotConfigured)
	nodetest.Configure(t, s.Netns, addr)
	w.a.RunPodSandbox(s)
	w.settle()
	w.wantSaid(retainedip.EventNotConfigured) // no second one
	if n := testutil.ToFloat64(w.a.metrics.verifyFailures); n != 1 {
		t.Errorf("counted %v", n)
	}
}

// gVisor takes the addresses of its sandbox over.
func TestASandboxedRuntimeThatHasTakenTheAddressesIsNoFault(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", nil)
	w.add(s)
	nodetest.Configure(t, s.Netns, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("fe80::1"))
	w.a.RunPodSandbox(s)
	w.settle()
	w.wantSaid()
	if n := testutil.ToFloat64(w.a.metrics.verifyFailures); n != 0 {
		t.Errorf("counted %v", n)
	}
}

func TestEveryInterfaceThatLibcniKnowsIsDecided(t *testing.T) {
	w := newWorld(t)
	other := ledger.New(network(t, "pods-blue", filepath.Join(w.dir, "networks"), "198.51.100.0/24"), w.a.ledgers)
	s := w.sandbox("c1", "web-0", ten)
	w.addOn(w.ledger, s, "eth0", nil)
	w.addOn(w.ledger, s, "net-1", nil)
	w.addOn(other, s, "net2", nil)
	for _, name := range []string{"pods-c1-eth0", "pods-c1-net-1", "pods-blue-c1-net2", "pods-c11-eth0",
		"cni-loopback-c1-lo"} {
		check(t, os.WriteFile(filepath.Join(w.dir, "cni/results", name), nil, 0o600))
	}
	w.a.RunPodSandbox(s)
	w.settle()
	for _, l := range []*ledger.Ledger{w.ledger, other} {
		addrs, err := l.List()
		check(t, err)
		for _, a := range addrs {
			if a.Key == nil {
				t.Errorf("%s of %s is not promised", a.Addr, a.Attachment)
			}
		}
	}
}

func TestEveryInterfaceBehindMultusIsDecided(t *testing.T) {
	w := newWorld(t)
	other := ledger.New(network(t, "blue", filepath.Join(w.dir, "networks"), "198.51.100.0/24"), w.a.ledgers)
	s := w.sandbox("c1", "web-0", ten)
	w.addOn(w.ledger, s, "eth0", nil)
	w.addOn(other, s, "net1", nil)
	check(t, os.MkdirAll(filepath.Join(w.dir, "cni/multus/results"), 0o755))
	for _, name := range []string{"results/multus-cni-network-c1-eth0", "multus/results/pods-c1-eth0",
		"multus/results/blue-c1-net1"} {
		check(t, os.WriteFile(filepath.Join(w.dir, "cni", name), nil, 0o600))
	}
	w.a.RunPodSandbox(s)
	for _, l := range []*ledger.Ledger{w.ledger, other} {
		addrs, err := l.List()
		check(t, err)
		if len(addrs) != 1 || addrs[0].Key == nil {
			t.Errorf("of %s is promised %+v", l.Network().Name, addrs)
		}
	}
}

func TestAPodOnTheHostsNetworkIsLeftAlone(t *testing.T) {
	w := newWorld(t)
	w.add(w.sandbox("c0", "other", nil)) // the network is known
	s := Sandbox{ID: "c1", Pod: ledger.Pod{Namespace: "kube-system", Name: "proxy"}, Annotations: ten}
	w.a.RunPodSandbox(s)
	w.a.Synchronize([]Sandbox{s})
	if n := len(w.a.queue.c); n != 0 {
		t.Errorf("%d queued", n)
	}
}

func TestAFullQueueLeavesThePodToAReconciliation(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", nil)
	for range queueLength {
		w.a.RunPodSandbox(s)
	}
	select {
	case <-w.a.reconciler.now:
		t.Fatal("a reconciliation was asked for before the queue was full")
	default:
	}
	w.a.RunPodSandbox(s)
	select {
	case <-w.a.reconciler.now:
	default:
		t.Error("no reconciliation was asked for")
	}
	if n := testutil.ToFloat64(w.a.metrics.queueDropped); n != 1 {
		t.Errorf("counted %v", n)
	}
}

func TestSynchronizeCatchesUpWithPodsThatStartedUnseen(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	w.a.Synchronize([]Sandbox{s})
	w.settle()
	w.del(s)
	w.want(addr, ledger.StateRetained)
}

func TestNothingIsKeptForANameThatNoPodOfKubernetesHas(t *testing.T) {
	retain := map[string]string{retention.AnnotationRetainIP: "10m"}
	if o := observe(Sandbox{Pod: ledger.Pod{Namespace: "default", Name: "create-PodSandbox"},
		Annotations: retain}); o.err == nil {
		t.Error("it is kept")
	}
	if o := observe(Sandbox{Pod: ledger.Pod{Namespace: "default", Name: "create-PodSandbox"}}); o.err != nil {
		t.Errorf("a sandbox that asks for nothing is an error: %v", o.err)
	}
}
