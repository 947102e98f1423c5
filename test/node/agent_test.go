package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// attach calls CNI as nerdctl, podman or cnitool do, without a pod.
func attach(t *testing.T, n *lab.Node, verb, plugin, id, netNS string) {
	t.Helper()
	_, err := n.CNI(testContext(t), lab.CNICall{
		Plugin: plugin, Command: verb, ContainerID: id, NetNS: netNS, Config: network("10.88.0.0/24").NetConf(),
	})
	must.Do(t, err)
}

// owned returns the address of a container, as the network's files have it.
func owned(t *testing.T, n *lab.Node, id string) netip.Addr {
	t.Helper()
	files, err := os.ReadDir(n.Path("/var/lib/cni/networks/pods"))
	must.Do(t, err)
	for _, f := range files {
		if ip, err := netip.ParseAddr(f.Name()); err == nil && state(t, n, ip) == id {
			return ip
		}
	}
	t.Fatalf("no address of %s", id)
	return netip.Addr{}
}

func TestOnlyLeakedAddressesAreReclaimed(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n, "--grace-period=1s", "--reconcile-interval=500ms")
	pod := runPod(t, n, web(0))
	stopped := runPod(t, n, web(1))
	deletePod(t, n, stopped)

	// A container of nerdctl with its process's netns.
	p, err := n.Start("nerdctl", nil, "/usr/bin/unshare", "--net", "/bin/sleep", "1000")
	must.Do(t, err)
	var pid int
	own := func() string {
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p.Pid))
		must.Do(t, err)
		return ns
	}
	nodes, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", n.Pid()))
	must.Do(t, err)
	must.Within(t, patience, "the container's network namespace", func() bool { return own() != nodes })
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid))
	must.Do(t, err)
	_, pids, _ := strings.Cut(string(status), "NSpid:")
	pids, _, _ = strings.Cut(pids, "\n")
	_, err = fmt.Sscan(strings.Fields(pids)[1], &pid)
	must.Do(t, err)
	attach(t, n, "ADD", "bridge", "nerdctl", fmt.Sprintf("/proc/%d/ns/net", pid))

	// One of cnitool with a named netns without a process.
	named, err := n.NewNetNS(testContext(t), "cnitool")
	must.Do(t, err)
	attach(t, n, "ADD", "bridge", "cnitool", named)

	// Three leaked ones: their netns is gone, and no DEL comes.
	leak := func(id, plugin, args string, annotations map[string]string) netip.Addr {
		netNS, err := n.NewNetNS(testContext(t), id)
		must.Do(t, err)
		_, err = n.CNI(testContext(t), lab.CNICall{
			Plugin: plugin, Command: "ADD", ContainerID: id, NetNS: netNS, Args: args,
			Config: withAnnotations(t, network("10.88.0.0/24"), annotations),
		})
		must.Do(t, err)
		must.Do(t, n.DeleteNetNS(netNS))
		return owned(t, n, id)
	}
	orphan := leak("orphan", "bridge", "", nil)
	ordinary := leak("ordinary", "stayput", "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=gone", nil)
	promised := leak("promised", "bridge", "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-2", asking("10m"))

	must.Within(t, patience, "the leaked addresses to be reclaimed", func() bool {
		return state(t, n, orphan) == free && state(t, n, ordinary) == free && state(t, n, promised) == retained
	})
	untilMetric(t, n, `stayput_addresses_reclaimed_total{network="pods"}`, "3")
	// By now the others have been suspects for longer, and were checked at least once more.
	reconciled := metric(t, n, "stayput_agent_reconcile_duration_seconds_count")
	must.Within(t, patience, "another reconciliation", func() bool {
		return metric(t, n, "stayput_agent_reconcile_duration_seconds_count") != reconciled
	})
	owned(t, n, "nerdctl")
	owned(t, n, "cnitool")
	wantState(t, n, pod.IP(), pod.ID)
	wantState(t, n, stopped.IP(), retained)
	answers(t, n, pod)
	if addrs, err := n.Addresses(named); err != nil || len(addrs["eth0"]) != 1 {
		t.Errorf("the namespace of cnitool's container has %v: %v", addrs, err)
	}

	again := runPod(t, n, web(2))
	if again.IP() != promised {
		t.Errorf("web-2 came back with %s, it leaked %s", again.IP(), promised)
	}
	attach(t, n, "DEL", "bridge", "cnitool", named)
	attach(t, n, "DEL", "bridge", "nerdctl", fmt.Sprintf("/proc/%d/ns/net", pid))
}

// Peers would use the old pod's link-layer address for half a minute, and here for an hour: only the agent's
// announcement can correct them.
func TestPeersReachARestoredPodAtOnce(t *testing.T) { reachRestored(t, true) }

// Kubelet probes from the node. It does not wait for an agent.
func TestTheNodeReachesARestoredPodAtOnceWithoutAnAgent(t *testing.T) { reachRestored(t, false) }

func reachRestored(t *testing.T, agent bool) {
	t.Parallel()
	n := startStayput(t, network("10.88.0.0/24", "fd00:88::/64"))
	if agent {
		startAgent(t, n)
	}
	peer := runPod(t, n, other(1)) // it also keeps the bridge's carrier
	pod := runPod(t, n, web(0))
	const long = `for f in /proc/sys/net/ipv[46]/neigh/*/base_reachable_time_ms; do echo 3600000 >$f; done`
	_, err := n.Run(testContext(t), "/bin/sh", "-c", long)
	must.Do(t, err)
	_, err = n.Run(testContext(t), "/usr/bin/nsenter", "--net="+peer.NetNS, "/bin/sh", "-c", long)
	must.Do(t, err)
	reach := func(p lab.Pod) {
		t.Helper()
		ctx, cancel := context.WithTimeout(testContext(t), 30*time.Second)
		defer cancel()
		for _, ip := range p.IPs {
			a, err := n.Get(ctx, ip)
			if err != nil || a.Name != p.Name {
				t.Fatalf("the node does not reach %s: %v, %v", ip, a, err)
			}
			if !agent {
				continue
			}
			a, err = n.GetFrom(ctx, peer, ip)
			if err != nil || a.Name != p.Name {
				t.Fatalf("a peer does not reach %s: %v, %v", ip, a, err)
			}
		}
	}
	for range 3 {
		before := mac(t, n, pod)
		reach(pod)
		deletePod(t, n, pod)
		again := runPod(t, n, web(0))
		sameIP(t, n, again, pod)
		if mac(t, n, again) == before {
			t.Fatal("the pod came back with the same link-layer address: this shows nothing")
		}
		reach(again)
		pod = again
	}
}

// mac returns the link-layer address of a pod.
func mac(t *testing.T, n *lab.Node, p lab.Pod) string {
	t.Helper()
	ns, err := netns.GetFromPath(n.Path(p.NetNS))
	must.Do(t, err)
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must.Do(t, err)
	defer h.Close()
	link, err := h.LinkByName("eth0")
	must.Do(t, err)
	return link.Attrs().HardwareAddr.String()
}

func TestRestoresAreInTheMetrics(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	pod := runPod(t, n, web(0))
	ordinary := runPod(t, n, other(1))
	for range 2 {
		deletePod(t, n, pod)
		pod = runPod(t, n, web(0))
	}
	deletePod(t, n, pod)
	untilMetric(t, n, `stayput_restores_total{network="pods"}`, "2")
	untilMetric(t, n, `stayput_plugin_duration_seconds_count{command="add",result="restored"}`, "2")
	untilMetric(t, n, `stayput_addresses{network="pods",state="retained"}`, "1")
	untilMetric(t, n, `stayput_addresses{network="pods",state="bound"}`, "1")
	untilMetric(t, n, "stayput_agent_nri_connected", "1")
	untilMetric(t, n, "stayput_verify_failures_total", "0")
	wantState(t, n, ordinary.IP(), ordinary.ID)
	page, err := scrape(t, n, "/metrics")
	must.Do(t, err)
	problems, err := promlint.New(strings.NewReader(page)).Lint()
	must.Do(t, err)
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "stayput_") {
			t.Errorf("metric %s: %s", p.Metric, p.Text)
		}
	}
	health, err := scrape(t, n, "/healthz")
	if err != nil || health != "ok\n" {
		t.Errorf("/healthz: %q, %v", health, err)
	}
}

func TestTheAgentReconnectsAfterARestartOfContainerd(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	w.Annotations = false // so that only the agent sees annotations
	n := startStayput(t, w)
	startAgent(t, n)
	runPod(t, n, other(1))
	for i, end := range []func() error{n.StopContainerd, n.KillContainerd} {
		must.Do(t, end())
		untilMetric(t, n, "stayput_agent_nri_connected", "0")
		must.Do(t, n.StartContainerd(testContext(t)))
		connected(t, n)
		untilMetric(t, n, "stayput_agent_nri_connections_total", fmt.Sprint(i+2))
		pod := runPod(t, n, web(i))
		deletePod(t, n, pod)
		wantState(t, n, pod.IP(), retained)
		sameIP(t, n, runPod(t, n, web(i)), pod)
	}
}

// By Synchronize, the agent learns of pods that started without it.
func TestTheAgentPromisesToAPodThatStartedWithoutIt(t *testing.T) {
	t.Parallel()
	w := network("10.88.0.0/24")
	w.Annotations = false
	n := startStayput(t, w)
	pod := runPod(t, n, web(0))
	startAgent(t, n)
	must.Within(t, patience, "the promise", func() bool {
		claims, err := os.ReadDir(n.Path(path.Join(stateDir(t, n), "claims")))
		return err == nil && len(claims) == 1
	})
	deletePod(t, n, pod)
	wantState(t, n, pod.IP(), retained)
	sameIP(t, n, runPod(t, n, web(0)), pod)
}

// stateDir returns Stayput's own directory of the only network.
func stateDir(t *testing.T, n *lab.Node) string {
	t.Helper()
	const dir = "/var/lib/stayput"
	entries, err := os.ReadDir(n.Path(dir))
	must.Do(t, err)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "pods-") {
			return path.Join(dir, e.Name())
		}
	}
	t.Fatalf("no directory of the network in %s", dir)
	return ""
}

func TestARetainedAddressExpiresOnTime(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	startAgent(t, n)
	short := web(0)
	short.Annotations = asking("2s")
	pod, long := runPod(t, n, short), runPod(t, n, web(1))
	deletePod(t, n, pod)
	deletePod(t, n, long)
	untilMetric(t, n, `stayput_retentions_expired_total{network="pods"}`, "1")
	wantState(t, n, pod.IP(), free)
	wantState(t, n, long.IP(), retained)
	sameIP(t, n, runPod(t, n, web(1)), long)
	// Every stop restarts the retention.
	pod = runPod(t, n, short)
	deletePod(t, n, pod)
	wantState(t, n, pod.IP(), retained)
	must.Within(t, patience, "the address to expire again", func() bool { return state(t, n, pod.IP()) == free })
}

// The agent frees on its start what expired before.
func TestAnAddressThatExpiredWithoutTheAgentIsFreedOnItsStart(t *testing.T) {
	t.Parallel()
	n := startStayput(t)
	spec := web(0)
	spec.Annotations = asking("100ms")
	pod := runPod(t, n, spec)
	deletePod(t, n, pod)
	time.Sleep(200 * time.Millisecond)
	wantState(t, n, pod.IP(), retained) // it is freed on demand only
	startAgent(t, n)
	must.Within(t, patience, "the address to expire", func() bool { return state(t, n, pod.IP()) == free })
}
