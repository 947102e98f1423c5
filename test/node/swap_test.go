package node

import (
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// stock is network with host-local as IPAM.
func stock(subnets ...string) lab.Network {
	w := network(subnets...)
	w.IPAM["type"] = "host-local"
	return w
}

func setNetwork(t *testing.T, n *lab.Node, w lab.Network) {
	t.Helper()
	must.Do(t, n.SetNetworks(testContext(t), w))
}

func TestPodsOfHostLocalComeBackWithTheirAddressesAfterTheSwap(t *testing.T) {
	const subnet = "10.88.0.0/28"
	without := func(w lab.Network) lab.Network { w.Annotations = false; return w }
	for name, c := range map[string]struct {
		before, after lab.Network
		agent         bool
	}{
		"with agent and annotations":           {stock(subnet), network(subnet), true},
		"with agent alone":                     {without(stock(subnet)), without(network(subnet)), true},
		"with annotations alone":               {stock(subnet), network(subnet), false},
		"with annotations only after the swap": {without(stock(subnet)), network(subnet), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startStayput(t, c.before)
			pod, running, ordinary := runPod(t, n, web(0)), runPod(t, n, web(1)), runPod(t, n, other(1))
			setNetwork(t, n, c.after)
			if c.agent {
				startAgent(t, n)
				// Its first reconciliation adopts them.
				must.Within(t, patience, "the reconciliation", func() bool {
					return strings.Contains(metric(t, n, "stayput_agent_reconcile_duration_seconds_count"), "1") &&
						metric(t, n, "stayput_agent_queue_depth") == "0"
				})
			}
			for _, p := range []lab.Pod{pod, running, ordinary} {
				answers(t, n, p)
				wantState(t, n, p.IP(), p.ID)
			}
			deletePod(t, n, pod)
			wantState(t, n, pod.IP(), retained)
			deletePod(t, n, ordinary)
			wantState(t, n, ordinary.IP(), free)
			for i := range 3 {
				distinct(t, pod, running, runPod(t, n, other(2+i)))
			}
			again := runPod(t, n, web(0))
			sameIP(t, n, again, pod)
			if c.agent { // without it, the node uses the old pod's link-layer address for half a minute
				answers(t, n, again)
			}
			answers(t, n, running)
		})
	}
}

func TestHostLocalTakesOverAfterUninstall(t *testing.T) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/29")) // five addresses
	agent := startAgent(t, n)
	kept, running := runPod(t, n, web(0)), runPod(t, n, web(1))
	deletePod(t, n, kept)

	setNetwork(t, n, stock("10.88.0.0/29"))
	wantState(t, n, kept.IP(), retained)
	o := runPod(t, n, other(0))
	distinct(t, kept, running, o) // host-local does not touch retained addresses
	must.Do(t, agent.Kill())
	out, err := n.Run(testContext(t), agentPath, "uninstall")
	must.Do(t, err)
	for _, want := range []string{
		"msg=Freed network=pods addr=" + kept.IP().String() + "\n",
		`msg="Left bound address, it becomes free when its pod ends" network=pods addr=` + running.IP().String() + "\n",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("uninstall does not say %q: %s", want, out)
		}
	}
	wantState(t, n, kept.IP(), free)
	answers(t, n, running)
	deletePod(t, n, running)
	wantState(t, n, running.IP(), free)
	pods := []lab.Pod{o}
	for i := range 4 {
		pods = append(pods, runPod(t, n, other(1+i)))
	}
	distinct(t, pods...) // all five: nothing leaked
	out, err = n.Run(testContext(t), agentPath, "uninstall")
	if err != nil || len(out) != 0 {
		t.Errorf("a second uninstall: %v, %s", err, out)
	}
}

func TestHostLocalTakesOverWhileTheAgentExpiresWhatIsRetained(t *testing.T) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/29"))
	startAgent(t, n)
	spec := web(0)
	spec.Annotations = asking("3s")
	kept := runPod(t, n, spec)
	deletePod(t, n, kept)
	setNetwork(t, n, stock("10.88.0.0/29"))
	must.Within(t, patience, "the address to expire", func() bool { return state(t, n, kept.IP()) == free })
	var pods []lab.Pod
	for i := range 5 {
		pods = append(pods, runPod(t, n, other(i)))
	}
	distinct(t, pods...)
}

// What host-local allocated meanwhile takes precedence over Stayput's promises.
func TestAnAddressReusedByHostLocalIsNotRestored(t *testing.T) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/29"))
	startAgent(t, n)
	pod := runPod(t, n, web(0))
	setNetwork(t, n, stock("10.88.0.0/29"))
	deletePod(t, n, pod) // host-local's DEL frees it
	wantState(t, n, pod.IP(), free)
	var others []lab.Pod
	for i := range 4 {
		others = append(others, runPod(t, n, other(i)))
	}
	others = append(others, runPod(t, n, other(9))) // the address of web-0 is among them
	deletePod(t, n, others[0])
	setNetwork(t, n, network("10.88.0.0/29"))
	again := runPod(t, n, web(0))
	distinct(t, append(others[1:], again)...)
	deletePod(t, n, again)
	wantState(t, n, again.IP(), retained)
	sameIP(t, n, runPod(t, n, web(0)), again)
}
