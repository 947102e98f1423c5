package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/node/cniconf"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const (
	pluginPath  = "/opt/stayput/stayput" // as in the image
	confDir     = "/etc/cni/net.d"
	ownConflist = confDir + "/" + cniconf.ConflistName
	sourceFile  = confDir + "/10-pods.conflist"
	subnetFile  = "/run/flannel/subnet.env"
)

// A cni is a node's network as its administrator configures it.
type cni struct {
	conflist string
	subnets  string // flannel's file, which its daemon writes at every boot
	binary   string // a plugin besides the stock ones
	dataDir  string // host-local's, unless the default
	near     bool   // whether the node itself reaches the pods
	prepare  func(*lab.Node)
}

// cnis returns the supported networks, with their real plugins.
func cnis(t *testing.T) map[string]cni {
	t.Helper()
	flannel, err := lab.BuildFlannel(testContext(t))
	must.Do(t, err)
	const ipam = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/28"}]], ` +
		`"routes": [{"dst": "0.0.0.0/0"}]}`
	const portmap = `{"type": "portmap", "capabilities": {"portMappings": true}}`
	list := func(version, plugin string) string {
		return fmt.Sprintf(`{"cniVersion": %q, "name": "pods", "plugins": [%s, %s]}`, version, plugin, portmap)
	}
	return map[string]cni{
		"bridge": {conflist: list("1.0.0", `{"type": "bridge", "bridge": "cni0", "isGateway": true, `+ipam+`}`), near: true},
		"ptp":    {conflist: list("0.3.1", `{"type": "ptp", "mtu": 1400, `+ipam+`}`), near: true},
		"kind's ptp": { // which loses its files in a reboot
			conflist: list("0.3.1", `{"type": "ptp", "ipMasq": false, "mtu": 1500, `+strings.Replace(ipam, `"ranges"`,
				`"dataDir": "/run/cni-ipam-state", "ranges"`, 1)+`}`),
			dataDir: "/run/cni-ipam-state", near: true,
		},
		"macvlan": {conflist: list("1.0.0", `{"type": "macvlan", "master": "`+lab.Uplink+`", `+ipam+`}`)},
		"flannel": {
			conflist: list("0.3.1", `{"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}}`),
			subnets:  "FLANNEL_NETWORK=10.88.0.0/16\nFLANNEL_SUBNET=10.88.0.1/28\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
			binary:   flannel, near: true,
		},
	}
}

// start starts a node with this network on stock host-local, as before an installation of stayput. Every ADD by
// host-local is recorded.
func (c cni) start(t *testing.T) *lab.Node {
	t.Helper()
	o := lab.NodeOptions{Networks: []lab.Network{}}
	if c.binary != "" {
		o.CNIPlugins = []string{c.binary}
	}
	n := startNode(t, o)
	must.Do(t, n.Install(product.Agent, agentPath))
	must.Do(t, n.Install(product.Plugin, pluginPath))
	t.Cleanup(func() { holds(t, n) })
	const recorder = "#!/bin/sh\n" +
		"[ \"$CNI_COMMAND\" = ADD ] && echo $CNI_CONTAINERID >>/var/log/host-local\n" +
		"exec /opt/lab/cni/host-local\n"
	must.Do(t, n.WriteFile("/opt/stayput/host-local", []byte(recorder)))
	must.Do(t, n.Install(n.Path("/opt/stayput/host-local"), "/opt/cni/bin/host-local"))
	if c.subnets != "" {
		must.Do(t, n.WriteFile(subnetFile, []byte(c.subnets)))
	}
	if c.prepare != nil {
		c.prepare(n)
	}
	must.Do(t, n.WriteFile(sourceFile, []byte(c.conflist)))
	must.Do(t, n.WaitCNI(testContext(t)))
	return n
}

// byHostLocal returns the sandboxes with addresses from host-local.
func byHostLocal(t *testing.T, n *lab.Node) []string {
	t.Helper()
	data, err := os.ReadFile(n.Path("/var/log/host-local"))
	if !errors.Is(err, os.ErrNotExist) {
		must.Do(t, err)
	}
	return strings.Fields(string(data))
}

// startKeeper starts an agent that keeps the CNI configuration, and waits until the runtime uses it.
func startKeeper(t *testing.T, n *lab.Node, args ...string) *lab.Process {
	t.Helper()
	p := startAgent(t, n, append([]string{"--install-cni", "--plugin-binary=" + pluginPath}, args...)...)
	untilCNI(t, n, cniconf.StateActive)
	must.Do(t, n.WaitCNI(testContext(t)))
	return p
}

func untilCNI(t *testing.T, n *lab.Node, want cniconf.State) {
	t.Helper()
	untilMetric(t, n, fmt.Sprintf(`stayput_agent_cni_config{state="%s"}`, want), "1")
}

func TestTheAgentAloneTakesOverFromHostLocalUnderRunningPods(t *testing.T) {
	for name, c := range cnis(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			takesOver(t, c)
		})
	}
}

// takesOver has an agent with these arguments take over a network under running pods, and hand it back.
func takesOver(t *testing.T, c cni, args ...string) {
	t.Helper()
	n := c.start(t)
	pod, running, ordinary := runPod(t, n, web(0)), runPod(t, n, web(1)), runPod(t, n, other(1))
	if got := byHostLocal(t, n); len(got) != 3 {
		t.Fatalf("host-local gave addresses to %v before stayput was installed", got)
	}
	wantState := func(ip netip.Addr, want string) {
		t.Helper()
		if got := stateBelow(t, n, cmp.Or(c.dataDir, defaultDataDir), "pods", ip); got != want {
			t.Errorf("%s is %s, want %s", ip, got, want)
		}
	}
	agent := startKeeper(t, n, args...)
	must.Within(t, patience, "the agent to adopt them", func() bool {
		claims, err := filepath.Glob(n.Path("/var/lib/stayput/pods-*/claims/*"))
		must.Do(t, err)
		return len(claims) == 2
	})
	deletePod(t, n, pod)
	wantState(pod.IP(), retained)
	deletePod(t, n, ordinary)
	wantState(ordinary.IP(), free)
	for i := range 3 {
		distinct(t, pod, running, runPod(t, n, other(2+i)))
	}
	again := runPod(t, n, web(0))
	sameIP(t, n, again, pod)
	if c.near {
		answers(t, n, again)
		answers(t, n, running)
	}

	// Without the agent, the annotations come from the configuration alone.
	must.Do(t, agent.Kill())
	late := runPod(t, n, web(2))
	deletePod(t, n, late)
	wantState(late.IP(), retained)
	sameIP(t, n, runPod(t, n, web(2)), late)
	if got := byHostLocal(t, n); len(got) != 3 {
		t.Errorf("host-local gave addresses to %v, of which only three are from before", got)
	}

	// After the uninstallation, flannel's cached configurations must not refer to a removed plugin.
	_, err := n.Run(testContext(t), agentPath, "uninstall")
	must.Do(t, err)
	must.Do(t, n.WaitCNI(testContext(t)))
	for _, p := range []lab.Pod{again, running} {
		deletePod(t, n, p)
		wantState(p.IP(), free)
	}
	runPod(t, n, other(9))
	if got := byHostLocal(t, n); len(got) != 4 {
		t.Errorf("host-local gave addresses to %v, the last one should be the fourth", got)
	}
	for _, gone := range []string{ownConflist, path.Join("/opt/cni/bin", cniconf.PluginName)} {
		if _, err := os.Stat(n.Path(gone)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", gone, err)
		}
	}
}

// CRI-O asks the plugin for them, by CHECK with the configuration of the pod's start.
func TestARestartedRuntimeKnowsTheAddressesOfPodsFromBeforeASwap(t *testing.T) {
	t.Parallel()
	ctx := testContext(t)
	n := cnis(t)["bridge"].start(t)
	pods := []lab.Pod{runPod(t, n, web(0)), runPod(t, n, other(0))}
	known := func() {
		t.Helper()
		must.Do(t, n.RestartContainerd(ctx))
		for _, pod := range pods {
			status, err := n.PodStatus(ctx, pod.ID)
			must.Do(t, err)
			if is := status.Status.GetNetwork().GetIp(); is != pod.IP().String() {
				t.Errorf("%s has %q, it had %s", pod.Name, is, pod.IP())
			}
		}
	}
	known()
	agent := startKeeper(t, n)
	pods = append(pods, runPod(t, n, web(1)), runPod(t, n, other(1)))
	known()
	must.Do(t, agent.Kill())
	_, err := n.Run(ctx, agentPath, "uninstall")
	must.Do(t, err)
	must.Do(t, n.WaitCNI(ctx))
	known()
}

func TestASourceChangeReachesTheNextPod(t *testing.T) {
	t.Parallel()
	n := cnis(t)["ptp"].start(t)
	startKeeper(t, n)
	before := runPod(t, n, web(0))
	source, err := os.ReadFile(n.Path(sourceFile))
	must.Do(t, err)

	// Half of it, as a program leaves it that does not rename: nothing changes, and pods start.
	own, err := os.ReadFile(n.Path(ownConflist))
	must.Do(t, err)
	must.Do(t, os.WriteFile(n.Path(sourceFile), source[:len(source)/2], 0o644))
	untilCNI(t, n, cniconf.StateBroken)
	runPod(t, n, other(0))
	if now, err := os.ReadFile(n.Path(ownConflist)); err != nil || string(now) != string(own) {
		t.Errorf("the agent's file is now (%v)\n%s", err, now)
	}

	moved := strings.ReplaceAll(string(source), "10.88.0.0/28", "10.88.0.64/28")
	must.Do(t, os.WriteFile(n.Path(sourceFile), []byte(moved), 0o644))
	must.Within(t, patience, "the change", func() bool {
		now, err := os.ReadFile(n.Path(ownConflist))
		return err == nil && strings.Contains(string(now), "10.88.0.64/28")
	})
	must.Do(t, n.WaitCNI(testContext(t)))
	wantIP(t, runPod(t, n, other(1)).IP(), "10.88.0.66")
	answers(t, n, before)
	if got := byHostLocal(t, n); len(got) != 0 {
		t.Errorf("host-local gave addresses to %v", got)
	}
}

func TestAnAgentWithOtherDirectoriesThanTheRuntimeWritesNothing(t *testing.T) {
	t.Parallel()
	n := cnis(t)["bridge"].start(t)
	install := []string{"--install-cni", "--plugin-binary=" + pluginPath}
	for _, c := range []struct {
		flag, dir string
		state     cniconf.State
		says      string
	}{
		{"--cni-conf-dir", "/etc/cni/other", cniconf.StateError, confDir},
		{"--cni-bin-dir", "/opt/cni/other", cniconf.StateNoPlugin, "/opt/cni/bin"},
	} {
		must.Do(t, os.MkdirAll(n.Path(c.dir), 0o755))
		agent := startAgent(t, n, append(install, c.flag+"="+c.dir)...)
		untilCNI(t, n, c.state)
		if ready, err := scrape(t, n, "/readyz"); err != nil || !strings.Contains(ready, c.says) ||
			!strings.Contains(ready, c.flag) {
			t.Errorf("%v: it does not say %s and %s:\n%s", err, c.says, c.flag, ready)
		}
		must.Do(t, agent.Kill())
		for _, dir := range []string{confDir, c.dir} {
			if _, err := os.Stat(n.Path(path.Join(dir, cniconf.ConflistName))); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("there is a file in %s: %v", dir, err)
			}
		}
	}
	runPod(t, n, other(0))
}

// The agent looks once an hour here, but the runtime's return wakes it.
func TestARuntimeThatComesBackWithOtherPluginsIsNotedAtOnce(t *testing.T) {
	t.Parallel()
	ctx := testContext(t)
	n := cnis(t)["bridge"].start(t)
	startKeeper(t, n, "--reconcile-interval=1h")
	pod := runPod(t, n, web(0))
	must.Do(t, n.RestartContainerd(ctx)) // as it was
	untilCNI(t, n, cniconf.StateActive)

	const elsewhere, config = "/opt/cni/elsewhere", "/etc/containerd/config.toml"
	_, err := n.Run(ctx, "/bin/cp", "-r", "/opt/lab/cni", elsewhere)
	must.Do(t, err)
	before, err := os.ReadFile(n.Path(config))
	must.Do(t, err)
	const section = "[plugins.'io.containerd.cri.v1.runtime'.cni]\n"
	other := strings.Replace(string(before), section, section+"  bin_dirs = ['"+elsewhere+"']\n", 1)
	must.Do(t, n.WriteFile(config, []byte(other)))
	must.Do(t, n.RestartContainerd(ctx))
	untilCNI(t, n, cniconf.StateNoPlugin)
	if ready, err := scrape(t, n, "/readyz"); err != nil || !strings.Contains(ready, elsewhere) ||
		!strings.Contains(ready, "--cni-bin-dir") {
		t.Errorf("%v: it does not say what to do:\n%s", err, ready)
	}
	must.Do(t, n.WaitCNI(ctx))
	runPod(t, n, lab.PodSpec{Name: "ordinary"})

	must.Do(t, n.WriteFile(config, before))
	must.Do(t, n.RestartContainerd(ctx))
	untilCNI(t, n, cniconf.StateActive)
	must.Do(t, n.WaitCNI(ctx))
	deletePod(t, n, pod)
	sameIP(t, n, runPod(t, n, web(0)), pod)
}

// If the runtime attaches pods to several networks, each file is one: the agent's would be an additional network.
func TestPodsWithSeveralNetworksGetNoAdditionalOne(t *testing.T) {
	t.Parallel()
	two := stock("10.88.0.0/28")
	two.Name, two.File = "second", "20-second.conflist"
	n := install(t, lab.NodeOptions{Networks: []lab.Network{stock("10.99.0.0/28"), two}, Interfaces: 2})
	must.Do(t, n.Install(product.Plugin, pluginPath))
	startAgent(t, n, "--install-cni", "--plugin-binary="+pluginPath)
	untilCNI(t, n, cniconf.StateUnsupported)
	if _, err := os.Stat(n.Path(ownConflist)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is a file: %v", err)
	}
	pod := runPod(t, n, other(0))
	if configured, err := n.Addresses(pod.NetNS); err != nil || len(configured["eth0"]) == 0 ||
		len(configured["eth1"]) == 0 {
		t.Errorf("the pod has %v, %v", configured, err)
	}
}

// installer rewrites the file slowly, as the shell script of a CNI's init container does at every start.
func installer(t *testing.T, n *lab.Node, conflist string) {
	t.Helper()
	must.Do(t, os.Remove(n.Path(sourceFile)))
	time.Sleep(50 * time.Millisecond)
	f, err := os.Create(n.Path(sourceFile))
	must.Do(t, err)
	defer f.Close()
	for len(conflist) > 0 {
		part := min(len(conflist), 100)
		_, err := f.WriteString(conflist[:part])
		must.Do(t, err)
		conflist = conflist[part:]
		time.Sleep(20 * time.Millisecond)
	}
}

func TestNoPodStartsOnHostLocalWhileAnInstallerRewritesItsFile(t *testing.T) {
	for name, c := range cnis(t) {
		if name != "bridge" && name != "flannel" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := c.start(t)
			startKeeper(t, n)
			kept := runPod(t, n, web(0))
			deletePod(t, n, kept)

			// While pods come and go.
			ctx, stop := context.WithCancel(testContext(t))
			var started atomic.Int64
			var failed error
			var pods sync.WaitGroup
			pods.Go(func() {
				defer stop()
				for ctx.Err() == nil && failed == nil {
					var pod lab.Pod
					if pod, failed = n.RunPod(testContext(t), other(int(started.Load()))); failed == nil {
						failed = n.DeletePod(testContext(t), pod.ID)
						started.Add(1)
					}
				}
			})
			for times := 0; times < 10 || started.Load() < 10 && ctx.Err() == nil; times++ {
				installer(t, n, c.conflist)
			}
			stop()
			pods.Wait()
			must.Do(t, failed)
			untilCNI(t, n, cniconf.StateActive)

			// Over a reboot: the file was removed at shutdown and comes back late; pods start at once, and the agent
			// starts in between.
			must.Do(t, n.PowerLoss())
			must.Do(t, os.Remove(n.Path(sourceFile)))
			must.Do(t, n.Boot(testContext(t)))
			if c.subnets != "" {
				must.Do(t, n.WriteFile(subnetFile, []byte(c.subnets)))
			}
			must.Do(t, n.StartContainerd(testContext(t)))
			before := runPod(t, n, other(1))
			again := runPod(t, n, web(0))
			sameIP(t, n, again, kept)
			startAgent(t, n, "--install-cni", "--plugin-binary="+pluginPath)
			untilCNI(t, n, cniconf.StateHeld)
			must.Do(t, os.WriteFile(n.Path(sourceFile), nil, 0o644))
			during := runPod(t, n, other(2))
			installer(t, n, c.conflist)
			untilCNI(t, n, cniconf.StateActive)
			distinct(t, again, before, during, runPod(t, n, other(3)))
			if got := byHostLocal(t, n); len(got) != 0 {
				t.Errorf("host-local gave addresses to %v", got)
			}
		})
	}
}
