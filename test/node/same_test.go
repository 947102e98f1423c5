package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestAStoppedPodComesBackWithItsAddress(t *testing.T) {
	for _, plugin := range []string{"bridge", "ptp", "macvlan"} {
		t.Run(plugin, func(t *testing.T) {
			t.Parallel()
			w := network("10.88.0.0/24")
			w.Type = plugin
			w.IPAM["routes"] = []any{map[string]any{"dst": "0.0.0.0/0"}} // ptp needs the route to reach other pods
			n := startStayput(t, w)
			startAgent(t, n)
			neighbour := runPod(t, n, other(1))
			pod := runPod(t, n, web(0))
			for range 3 {
				deletePod(t, n, pod)
				wantState(t, n, pod.IP(), retained)
				distinct(t, pod, neighbour, runPod(t, n, other(2+int(pod.Attempt))))
				spec := web(0)
				spec.Attempt = pod.Attempt + 1
				again := runPod(t, n, spec)
				sameIP(t, n, again, pod)
				wantState(t, n, pod.IP(), again.ID)
				a, err := n.GetFrom(testContext(t), neighbour, again.IP())
				must.Do(t, err)
				if a.Name != "web-0" {
					t.Errorf("%s answers as %s", again.IP(), a.Name)
				}
				pod = again
			}
			if plugin != "macvlan" { // whose pods cannot reach their own node
				answers(t, n, pod)
			}
		})
	}
}

func TestAPodWithOpenKruisesAnnotationComesBackWithItsAddress(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	spec := lab.PodSpec{Name: "web-0", Annotations: map[string]string{retention.AnnotationReservedIPDuration: "10"}}
	pod := runPod(t, n, spec)
	deletePod(t, n, pod)
	distinct(t, pod, runPod(t, n, other(1)))
	sameIP(t, n, runPod(t, n, spec), pod)
}

func TestAPodComesBackWithItsAddressAfterTheRangeWrappedAround(t *testing.T) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/28"))
	startAgent(t, n)
	runPod(t, n, other(0))
	pod := runPod(t, n, web(0))
	deletePod(t, n, pod)
	// The others take all free addresses of the 13 ...
	pods := []lab.Pod{pod}
	for i := range 11 {
		pods = append(pods, runPod(t, n, other(1+i)))
	}
	distinct(t, pods...)
	if p, err := n.RunPod(testContext(t), other(12)); err == nil ||
		!strings.Contains(err.Error(), "no IP addresses available") {
		t.Errorf("a pod in a full range: %v, error %v", p.IPs, err)
	}
	// ... and once more, past the retained one.
	for i := range 3 {
		deletePod(t, n, pods[1+i])
	}
	pods = append(pods[:1], pods[4:]...)
	for i := range 3 {
		pods = append(pods, runPod(t, n, other(20+i)))
	}
	distinct(t, pods...)
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	answers(t, n, again)
}

func TestAPodWhosePauseWasKilledComesBackWithItsAddress(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	spec := web(0)
	pod := runPod(t, n, spec)
	spec.UID = pod.UID // kubelet starts a new sandbox of the same pod
	must.Do(t, n.KillPause(testContext(t), pod))
	must.Do(t, n.StopPod(testContext(t), pod.ID))
	distinct(t, pod, runPod(t, n, other(1)))
	spec.Attempt = 1
	again := runPod(t, n, spec)
	sameIP(t, n, again, pod)
	must.Do(t, n.RemovePod(testContext(t), pod.ID)) // kubelet's garbage collection, with one more DEL
	wantState(t, n, pod.IP(), again.ID)
	answers(t, n, again)
}

// When a pod stops that started before containerd's restart, containerd sends no NRI event.
func TestAPodStoppedAfterContainerdWasKilledComesBackWithItsAddress(t *testing.T) {
	t.Parallel()
	byAgent := network("10.88.0.0/24")
	byAgent.Annotations = false
	for name, w := range map[string]lab.Network{"annotations": network("10.88.0.0/24"), "agent": byAgent} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startStayput(t, w)
			startAgent(t, n)
			pod := runPod(t, n, web(0))
			must.Do(t, n.KillContainerd())
			must.Do(t, n.StartContainerd(testContext(t)))
			answers(t, n, pod)
			deletePod(t, n, pod)
			distinct(t, pod, runPod(t, n, other(1)))
			sameIP(t, n, runPod(t, n, web(0)), pod)
		})
	}
}

func TestAPodComesBackWithItsAddressWithoutAnAgent(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	pod := runPod(t, n, web(0))
	deletePod(t, n, pod)
	distinct(t, pod, runPod(t, n, other(1)))
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	// An agent that starts only now changes nothing.
	startAgent(t, n)
	deletePod(t, n, again)
	distinct(t, pod, runPod(t, n, other(2)))
	sameIP(t, n, runPod(t, n, web(0)), pod)
}

func TestTheAgentsMarkAloneRetainsTheAddress(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	w.Annotations = false
	n := startStayput(t, w)
	startAgent(t, n)
	// The agent has not seen the network yet when its first pod starts.
	pod := runPod(t, n, web(0))
	deletePod(t, n, pod)
	wantState(t, n, pod.IP(), retained)
	distinct(t, pod, runPod(t, n, other(1)))
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	ordinary := runPod(t, n, other(2))
	deletePod(t, n, ordinary)
	wantState(t, n, ordinary.IP(), free)
}

func TestAMarkOutlivesTheAgentThatWroteIt(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	w.Annotations = false
	n := startStayput(t, w)
	agent := startAgent(t, n)
	runPod(t, n, other(1)) // the network is known by now
	pod := runPod(t, n, web(0))
	must.Do(t, agent.Kill())
	deletePod(t, n, pod)
	wantState(t, n, pod.IP(), retained)
	distinct(t, pod, runPod(t, n, other(2)))
	again := runPod(t, n, web(0)) // its annotations are unknown, but it has a promise
	sameIP(t, n, again, pod)
	startAgent(t, n)
	deletePod(t, n, again)
	distinct(t, pod, runPod(t, n, other(3)))
	sameIP(t, n, runPod(t, n, web(0)), pod)
}

func TestAnAgentKilledInTheMiddleLosesNothing(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	pod := runPod(t, n, web(0))
	for i := range 6 {
		agent := startAgent(t, n)
		// Kill the agent at various moments while a pod stops, another one starts, and the pod starts.
		killed := make(chan error)
		go func() {
			time.Sleep(time.Duration(i) * 50 * time.Millisecond)
			killed <- agent.Kill()
		}()
		deletePod(t, n, pod)
		o := runPod(t, n, other(i))
		again := runPod(t, n, web(0))
		must.Do(t, <-killed)
		sameIP(t, n, again, pod)
		distinct(t, again, o)
		deletePod(t, n, o)
		wantState(t, n, o.IP(), free)
		pod = again
	}
}

// The CNI plugin of a killed containerd finishes as an orphan; its addresses belong to an unknown sandbox.
func TestContainerdKilledDuringARestoreLosesNothing(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n, "--grace-period=500ms")
	pod := runPod(t, n, web(0))
	deletePod(t, n, pod)
	for i := range 5 {
		failed := make(chan error)
		spec := web(0)
		go func() {
			_, err := n.RunPod(context.WithoutCancel(t.Context()), spec)
			failed <- err
		}()
		time.Sleep(time.Duration(10+30*i) * time.Millisecond)
		must.Do(t, n.KillContainerd())
		<-failed
		must.Do(t, n.StartContainerd(testContext(t)))
		connected(t, n)
		// kubelet removes unknown sandboxes before it starts new ones.
		pods, err := n.Pods(testContext(t))
		must.Do(t, err)
		for _, p := range pods {
			if p.Metadata.Name == "web-0" {
				must.Do(t, n.DeletePod(testContext(t), p.Id))
			}
		}
		// After a kill, old snapshots may block new ones; kubelet retries.
		distinct(t, pod, untilPod(t, n, other(i)))
		again := untilPod(t, n, web(0))
		sameIP(t, n, again, pod)
		deletePod(t, n, again)
	}
}

func TestAPodComesBackWithItsAddressAfterContainerdsStateWasWiped(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n, "--grace-period=1s")
	pod, ordinary := runPod(t, n, web(0)), runPod(t, n, other(1))
	must.Do(t, n.WipeContainerd())
	for _, p := range []lab.Pod{pod, ordinary} {
		if addrs, err := n.Addresses(p.NetNS); err != nil || len(addrs["eth0"]) == 0 {
			t.Fatalf("the network namespace of %s should be left behind: %v, %v", p.Name, addrs, err)
		}
	}
	must.Do(t, n.StartContainerd(testContext(t)))
	distinct(t, pod, runPod(t, n, other(2)))
	again := untilPod(t, n, web(0))
	sameIP(t, n, again, pod)
	answers(t, n, again)
	// The other one is reclaimed, although no pod needs its address.
	must.Within(t, patience, "the address of the ordinary pod to be free", func() bool {
		return state(t, n, ordinary.IP()) == free
	})
	for _, p := range []lab.Pod{pod, ordinary} {
		// CRI-O ends both by its result cache when it starts, unless the agent was faster, and leaves the namespaces.
		addrs, err := n.Addresses(p.NetNS)
		if gone := errors.Is(err, fs.ErrNotExist); !gone && (!onCRIO() || err != nil || len(addrs) > 0) {
			t.Errorf("the network namespace that %s left behind is still there: %v, %v", p.Name, addrs, err)
		}
	}
	if !onCRIO() {
		untilMetric(t, n, "stayput_agent_leftover_namespaces_removed_total", "2")
	}
}

func TestAPodComesBackWithItsAddressAfterAPowerLoss(t *testing.T) {
	for name, c := range map[string]struct{ agent, dels bool }{
		"after DELs of the dead sandboxes": {agent: true, dels: true},
		"without any DEL":                  {agent: true},
		"without any DEL and agent":        {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startStayput(t, network("10.88.0.0/28"))
			if c.agent {
				startAgent(t, n)
			}
			gone := runPod(t, n, web(1))
			deletePod(t, n, gone) // retained when the power goes
			pod, ordinary := runPod(t, n, web(0)), runPod(t, n, other(1))

			must.Do(t, n.PowerLoss())
			must.Do(t, n.Boot(testContext(t)))
			must.Do(t, n.StartContainerd(testContext(t)))
			if c.agent {
				startAgent(t, n)
			}
			if c.dels {
				for _, p := range fromBefore(t, n, 2) {
					must.Do(t, n.StopPod(testContext(t), p.Id))
				}
			}
			distinct(t, pod, gone, runPod(t, n, other(2)))
			spec := web(0)
			spec.UID, spec.Attempt = pod.UID, 1 // restarted in place
			again := runPod(t, n, spec)
			sameIP(t, n, again, pod)
			sameIP(t, n, runPod(t, n, web(1)), gone)
			answers(t, n, again)
			// The late DELs of kubelet's garbage collection.
			must.Do(t, n.RemovePod(testContext(t), pod.ID))
			must.Do(t, n.RemovePod(testContext(t), ordinary.ID))
			wantState(t, n, pod.IP(), again.ID)
			if s := state(t, n, ordinary.IP()); s == ordinary.ID || s == retained {
				t.Errorf("the address of the ordinary pod is still held: %s", s)
			}
		})
	}
}

// fromBefore returns what the runtime knows after a boot of the sandboxes that it had.
func fromBefore(t *testing.T, n *lab.Node, had int) []*runtimeapi.PodSandbox {
	t.Helper()
	pods, err := n.Pods(testContext(t))
	must.Do(t, err)
	if onCRIO() { // which has wiped them, with their DELs
		had = 0
	}
	if len(pods) != had {
		t.Errorf("the runtime knows %d sandboxes from before, want %d", len(pods), had)
	}
	for _, p := range pods {
		if p.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("sandbox of %s is %s", p.Metadata.Name, p.State)
		}
	}
	return pods
}

func TestADualStackPodComesBackWithBothAddresses(t *testing.T) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/24", "fd00:88::/64"))
	startAgent(t, n)
	pod := runPod(t, n, web(0))
	if len(pod.IPs) != 2 || !pod.IPs[0].Is4() || !pod.IPs[1].Is6() {
		t.Fatalf("addresses %v, want one of each family", pod.IPs)
	}
	deletePod(t, n, pod)
	for _, ip := range pod.IPs {
		wantState(t, n, ip, retained)
	}
	distinct(t, pod, runPod(t, n, other(1)))
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	answers(t, n, again)
}

func TestAPodComesBackWithItsAddressInEveryNetwork(t *testing.T) {
	t.Parallel()
	red, blue := network("10.1.0.0/24"), network("10.2.0.0/24")
	red.Name, blue.Name, blue.File = "red", "blue", "20-blue.conflist"
	n := install(t, lab.NodeOptions{Interfaces: 2, Networks: []lab.Network{red, blue}})
	startAgent(t, n)
	addresses := func(p lab.Pod) string {
		addrs, err := n.Addresses(p.NetNS)
		must.Do(t, err)
		return fmt.Sprint(addrs)
	}
	runPod(t, n, other(1))
	pod := runPod(t, n, web(0))
	before := addresses(pod)
	deletePod(t, n, pod)
	runPod(t, n, other(2))
	again := runPod(t, n, web(0))
	if now := addresses(again); now != before || before != "map[eth0:[10.1.0.3/24] eth1:[10.2.0.3/24]]" {
		t.Errorf("the pod came back with %s, it had %s", now, before)
	}
}

// A meta plugin, such as Multus, may add a second interface in the same network.
func TestEveryInterfaceOfAPodInANetworkKeepsItsAddress(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	n := startStayput(t, w)
	startAgent(t, n)
	attach := func(verb string, p lab.Pod) {
		_, err := n.CNI(testContext(t), lab.CNICall{
			Plugin: "bridge", Command: verb, ContainerID: p.ID, NetNS: p.NetNS, IfName: "net1",
			Args:   kubernetesArgs(p),
			Config: withAnnotations(t, w, p.Annotations),
		})
		must.Do(t, err)
	}
	addresses := func(p lab.Pod) string {
		addrs, err := n.Addresses(p.NetNS)
		must.Do(t, err)
		return fmt.Sprint(addrs)
	}
	pod := runPod(t, n, web(0))
	attach("ADD", pod)
	before := addresses(pod)
	attach("DEL", pod)
	deletePod(t, n, pod)
	distinct(t, pod, runPod(t, n, other(1)))
	again := runPod(t, n, web(0))
	attach("ADD", again)
	if now := addresses(again); now != before || before != "map[eth0:[10.88.0.2/24] net1:[10.88.0.3/24]]" {
		t.Errorf("the pod came back with %s, it had %s", now, before)
	}
	attach("DEL", again)
	// The other interface is unaffected.
	wantState(t, n, netip.MustParseAddr("10.88.0.3"), retained)
	wantState(t, n, again.IP(), again.ID)
}

func TestManyPodsAtOnceComeBackWithTheirAddresses(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	// The bridge plugin settles the bridge's link-layer address with the first pod. CRI-O runs CHECK after ADD, which
	// fails if that has changed because of the pods beside it.
	runPod(t, n, other(0))
	const many = 12
	all := func(f func(i int) error) {
		t.Helper()
		errs := make([]error, many)
		var wg sync.WaitGroup
		for i := range many {
			wg.Go(func() { errs[i] = f(i) })
		}
		wg.Wait()
		for _, err := range errs {
			must.Do(t, err)
		}
	}
	ctx := testContext(t)
	start := func() []lab.Pod {
		pods := make([]lab.Pod, many)
		all(func(i int) (err error) {
			pods[i], err = n.RunPod(ctx, web(i))
			return err
		})
		return pods
	}
	pods := start()
	distinct(t, pods...)
	all(func(i int) error { return n.DeletePod(ctx, pods[i].ID) })
	distinct(t, append(pods, runPod(t, n, other(1)))...)
	for i, again := range start() {
		sameIP(t, n, again, pods[i])
	}
}

// Neither CNI nor NRI says what pods want, as behind multus on containerd 1: the runtime's list does.
func TestWithoutNRIAndAnnotationsAPodComesBackWithItsAddress(t *testing.T) {
	t.Parallel()
	silent := lab.Network{IPAM: lab.RangeIPAM("stayput", "10.88.0.0/24")}
	n := install(t, lab.NodeOptions{NoNRI: true, Networks: []lab.Network{silent}})
	_, err := n.Start("agent", nil, agentPath, "--log-level=debug", criSocket(), "--nri-socket=",
		"--reconcile-interval=1h")
	must.Do(t, err)
	says := func(line string) {
		t.Helper()
		must.Within(t, patience, "the agent to say "+line, func() bool {
			ready, err := scrape(t, n, "/readyz")
			return err == nil && strings.Contains(ready, "\nnri: off\ncri: ok\n"+line+"\n")
		})
	}
	says("annotations: ok")
	pod := runPod(t, n, web(0))
	untilMetric(t, n, `stayput_range_promised_addresses{network="pods",range="10.88.0.1-10.88.0.254"}`, "1")
	says("annotations: from the runtime's list alone")
	deletePod(t, n, pod)
	distinct(t, pod, runPod(t, n, other(1)))
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	deletePod(t, n, again) // at once: the promise is there
	distinct(t, pod, runPod(t, n, other(2)))
	sameIP(t, n, runPod(t, n, web(0)), again)
}

func TestWithoutNRIAPodComesBackWithItsAddressAndTheAgentIsDegraded(t *testing.T) {
	t.Parallel()
	n := install(t, lab.NodeOptions{NoNRI: true, Networks: []lab.Network{network("10.88.0.0/24")}})
	_, err := n.Start("agent", nil, agentPath, criSocket())
	must.Do(t, err)
	must.Within(t, patience, "the agent to say that it is degraded", func() bool {
		ready, err := scrape(t, n, "/readyz")
		return err == nil && strings.Contains(ready, "nri: degraded") && strings.Contains(ready, "cri: ok")
	})
	pod := runPod(t, n, web(0))
	deletePod(t, n, pod)
	distinct(t, pod, runPod(t, n, other(1)))
	sameIP(t, n, runPod(t, n, web(0)), pod)
	untilMetric(t, n, `stayput_restores_total{network="pods"}`, "1")
}
