package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// The tests in this file cover the lab itself on stock host-local, on which the other tests rely.

func TestAPodAnswersOnItsAddress(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0"})
	answers(t, n, pod)

	addrs, err := n.Addresses(pod.NetNS)
	must.Do(t, err)
	if len(addrs["eth0"]) != 1 || addrs["eth0"][0].Addr() != pod.IP() {
		t.Errorf("addresses in the pod are %v, CRI says %v", addrs, pod.IPs)
	}

	_, err = n.RunContainer(testContext(t), pod, "web")
	must.Do(t, err)
	must.Do(t, n.DeletePod(testContext(t), pod.ID))
	pods, err := n.Pods(testContext(t))
	must.Do(t, err)
	if len(pods) != 0 {
		t.Errorf("after the pod was deleted, %v remain", pods)
	}
	if _, err := os.Stat(n.Path(pod.NetNS)); !os.IsNotExist(err) {
		t.Errorf("after the pod was deleted its network namespace is still there: %v", err)
	}
}

func TestPodsReachEachOther(t *testing.T) {
	for _, plugin := range []string{"bridge", "ptp", "macvlan"} {
		t.Run(plugin, func(t *testing.T) {
			t.Parallel()
			// IPv6 on bridge alone: ptp and macvlan wait for seconds for duplicate address detection.
			subnets := []string{"10.88.0.0/24"}
			if plugin == "bridge" {
				subnets = append(subnets, "fd00:88::/64")
			}
			ipam := lab.RangeIPAM("host-local", subnets...)
			ipam["routes"] = []any{map[string]any{"dst": "0.0.0.0/0"}} // ptp needs the route to reach other pods
			n := startNode(t, lab.NodeOptions{Networks: []lab.Network{{Type: plugin, IPAM: ipam}}})
			a := runPod(t, n, lab.PodSpec{Name: "a"})
			b := runPod(t, n, lab.PodSpec{Name: "b"})
			if len(b.IPs) != len(subnets) {
				t.Fatalf("addresses %v, want one of each of %v", b.IPs, subnets)
			}
			for _, ip := range b.IPs {
				answer, err := n.GetFrom(testContext(t), a, ip)
				must.Do(t, err)
				if answer.Name != "b" {
					t.Errorf("%s answers as %q, want b", ip, answer.Name)
				}
			}
			if plugin != "macvlan" { // whose pods cannot reach their own node
				answers(t, n, b)
			}
		})
	}
}

func TestAPodOnTwoNetworksHasTwoInterfaces(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{Interfaces: 2, Networks: []lab.Network{
		{Name: "red", IPAM: lab.RangeIPAM("host-local", "10.1.0.0/24")},
		{Name: "blue", File: "20-blue.conflist", IPAM: lab.RangeIPAM("host-local", "10.2.0.0/24")},
	}})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0"})
	addrs, err := n.Addresses(pod.NetNS)
	must.Do(t, err)
	if got := fmt.Sprint(addrs); got != "map[eth0:[10.1.0.2/24] eth1:[10.2.0.2/24]]" {
		t.Errorf("addresses are %s", got)
	}
}

func TestASmallRangeFillsUp(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{Networks: []lab.Network{{IPAM: lab.RangeIPAM("host-local", "10.88.0.0/30")}}})
	runPod(t, n, lab.PodSpec{Name: "a"})
	_, err := n.RunPod(testContext(t), lab.PodSpec{Name: "b"})
	if err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
		t.Errorf("a second pod in a range of one address: %v", err)
	}
}

func TestNetworksChangeUnderARunningContainerd(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{})
	must.Do(t, n.SetNetworks(testContext(t), lab.Network{Name: "other", IPAM: lab.RangeIPAM("host-local", "10.9.0.0/24")}))
	wantIP(t, runPod(t, n, lab.PodSpec{Name: "web-0"}).IP(), "10.9.0.2")
}

func TestAnIPAMPluginReceivesThePodsAnnotations(t *testing.T) {
	t.Parallel()
	const script = `#!/bin/sh
cat >/var/log/$CNI_COMMAND
echo '{"cniVersion":"1.0.0","ips":[{"address":"10.88.0.9/24"}]}'
`
	spy := filepath.Join(t.TempDir(), "spy")
	must.Do(t, os.WriteFile(spy, []byte(script), 0o755))
	network := lab.Network{IPAM: map[string]any{"type": "spy"}, Annotations: true}
	n := startNode(t, lab.NodeOptions{CNIPlugins: []string{spy}, Networks: []lab.Network{network}})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0", Annotations: map[string]string{"color": "red"}})
	must.Do(t, n.StopPod(testContext(t), pod.ID))

	for _, command := range []string{"ADD", "DEL"} {
		data, err := os.ReadFile(n.Path("/var/log/" + command))
		must.Do(t, err)
		var conf struct {
			RuntimeConfig map[string]map[string]string
		}
		must.Do(t, json.Unmarshal(data, &conf))
		if conf.RuntimeConfig[lab.AnnotationsCapability]["color"] != "red" {
			t.Errorf("%s does not receive the annotation: %s", command, data)
		}
	}
}

func TestAPluginCanBeCalledAsARuntimeDoes(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{Idle: true})
	netNS, err := n.NewNetNS(testContext(t), "x")
	must.Do(t, err)
	call := lab.CNICall{Plugin: "bridge", ContainerID: "c1", NetNS: netNS, Config: lab.Network{}.NetConf()}
	for _, command := range []string{"ADD", "DEL", "DEL"} {
		call.Command = command
		_, err := n.CNI(testContext(t), call)
		must.Do(t, err)
		_, err = os.Stat(n.Path("/var/lib/cni/networks/pods/10.88.0.2"))
		if held := err == nil; held != (command == "ADD") {
			t.Errorf("after %s the address is held: %v", command, held)
		}
		addrs, err := n.Addresses(netNS)
		must.Do(t, err)
		if there := len(addrs["eth0"]) == 1; there != (command == "ADD") {
			t.Errorf("after %s the interface is there: %v", command, there)
		}
	}
	must.Do(t, n.DeleteNetNS(netNS))
	call.Command, call.Config = "ADD", []byte("{")
	if out, err := n.CNI(testContext(t), call); err == nil || !strings.Contains(string(out), `"code"`) {
		t.Errorf("ADD with a bad configuration: %v, %s", err, out)
	}
}

func TestPodsSurviveTheEndOfContainerd(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0"})
	for name, end := range map[string]func() error{"stop": n.StopContainerd, "kill": n.KillContainerd} {
		must.Do(t, end())
		answers(t, n, pod)
		must.Do(t, n.StartContainerd(testContext(t)))
		status, err := n.PodStatus(testContext(t), pod.ID)
		must.Do(t, err)
		if status.Status.State != runtimeapi.PodSandboxState_SANDBOX_READY {
			t.Errorf("after %s and start the pod is %s", name, status.Status.State)
		}
	}
	must.Do(t, n.DeletePod(testContext(t), pod.ID))
}

func TestAKilledPauseEndsThePodNotItsAddress(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0"})
	must.Do(t, n.KillPause(testContext(t), pod))
	if _, err := os.Stat(n.Path("/var/lib/cni/networks/pods/" + pod.IP().String())); err != nil {
		t.Errorf("the address is gone before any DEL: %v", err)
	}
	must.Do(t, n.DeletePod(testContext(t), pod.ID))
}

func TestWipingContainerdLeavesTheNetworkNamespaces(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0"})
	must.Do(t, n.WipeContainerd())
	processes, err := n.Processes()
	must.Do(t, err)
	if len(processes) != 0 {
		t.Errorf("still running: %v", processes)
	}
	addrs, err := n.Addresses(pod.NetNS)
	must.Do(t, err)
	if len(addrs["eth0"]) == 0 || addrs["eth0"][0].Addr() != pod.IP() {
		t.Errorf("the network namespace of the pod has %v, want %s", addrs, pod.IP())
	}
	must.Do(t, n.StartContainerd(testContext(t)))
	pods, err := n.Pods(testContext(t))
	must.Do(t, err)
	if len(pods) != 0 {
		t.Errorf("containerd still knows %v", pods)
	}
	answers(t, n, runPod(t, n, lab.PodSpec{Name: "web-1"}))
}

func TestPowerLossKeepsTheDiskAndNothingElse(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{})
	pod := runPod(t, n, lab.PodSpec{Name: "web-0"})
	bootID := func() string {
		out, err := n.Run(testContext(t), "/bin/cat", "/proc/sys/kernel/random/boot_id")
		must.Do(t, err)
		return string(out)
	}
	before := bootID()
	must.Do(t, n.WriteFile("/run/x", nil))
	must.Do(t, n.WriteFile("/var/lib/x", nil))
	agent, err := n.Start("agent", nil, "/bin/sleep", "1000")
	must.Do(t, err)

	must.Do(t, n.PowerLoss())
	if agent.Wait() == nil {
		t.Error("a process outlived the power loss")
	}
	must.Do(t, n.Boot(testContext(t)))
	if after := bootID(); after == before || len(after) != len(before) {
		t.Errorf("boot ID %q, before %q", after, before)
	}
	if _, err := os.Stat(n.Path("/run/x")); !os.IsNotExist(err) {
		t.Errorf("a file in /run: %v", err)
	}
	if _, err := os.Stat(n.Path("/var/lib/x")); err != nil {
		t.Errorf("a file on the disk: %v", err)
	}

	must.Do(t, n.StartContainerd(testContext(t)))
	fromBefore(t, n, 1)
	must.Do(t, n.DeletePod(testContext(t), pod.ID))
	answers(t, n, runPod(t, n, lab.PodSpec{Name: "web-0", UID: pod.UID, Attempt: 1}))
}

func TestACommandInANodeRunsThere(t *testing.T) {
	t.Parallel()
	n := startNode(t, lab.NodeOptions{Name: "there", Idle: true})
	out, err := n.Run(testContext(t), "/bin/sh", "-c", "hostname; ls /etc/containerd/config.toml; ls /sys/class/net")
	must.Do(t, err)
	want := []string{"there", "/etc/containerd/config.toml", "lo", lab.Uplink, lab.Wire}
	if got := strings.Fields(string(out)); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := n.Run(testContext(t), "/bin/sh", "-c", "echo oh no >&2; exit 3"); err == nil ||
		!strings.Contains(err.Error(), "exit status 3: oh no") {
		t.Errorf("a failing command: %v", err)
	}

	p, err := n.Start("echo", []string{"COLOR=red"}, "/bin/sh", "-c", "echo $COLOR; exec sleep 1000")
	must.Do(t, err)
	ctx := testContext(t)
	for logged := ""; logged != "red\n"; time.Sleep(time.Millisecond) {
		data, err := os.ReadFile(p.Log)
		must.Do(t, errors.Join(err, ctx.Err()))
		logged = string(data)
	}
	must.Do(t, p.Kill())
	processes, err := n.Processes()
	must.Do(t, err)
	if len(processes) != 0 {
		t.Errorf("after Kill there is %v", processes)
	}
}

func TestTwoNodesRunAtTheSameTime(t *testing.T) {
	t.Parallel()
	a, b := startNode(t, lab.NodeOptions{Name: "a"}), startNode(t, lab.NodeOptions{Name: "b"})
	podA, podB := runPod(t, a, lab.PodSpec{Name: "on-a"}), runPod(t, b, lab.PodSpec{Name: "on-b"})
	if podA.IP() != podB.IP() {
		t.Errorf("addresses %s and %s: the nodes know of each other", podA.IP(), podB.IP())
	}
	answers(t, a, podA)
	answers(t, b, podB)
	must.Do(t, a.PowerLoss())
	answers(t, b, podB)
}

func TestClosingANodeLeavesNothing(t *testing.T) {
	n := startNode(t, lab.NodeOptions{Name: "closed"})
	runPod(t, n, lab.PodSpec{Name: "web-0"})
	pid := n.Pid()
	if len(leftovers("closed")) == 0 {
		t.Fatal("the test is wrong: leftovers finds nothing of a running node")
	}
	must.Do(t, n.Close())
	must.Do(t, n.Close())
	if left := leftovers("closed"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("pid 1 of the node: %v", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must.Do(t, err)
	if strings.Contains(string(mounts), "stayput-lab-") {
		t.Errorf("mounts of a node on the machine:\n%s", mounts)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// leftovers returns the directories and cgroups of nodes with this name.
func leftovers(name string) []string {
	var found []string
	for _, dir := range []string{os.TempDir(), "/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		paths, _ := filepath.Glob(filepath.Join(dir, "stayput-lab-*-"+name))
		found = append(found, paths...)
	}
	return found
}

const ownerEnv = "STAYPUT_TEST_OWNER"

// ownNode is the main function of a process that starts a node with a pod, prints the node's pid, and ends as how says.
func ownNode(how string) int {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := lab.StartNode(ctx, lab.NodeOptions{Name: "orphan-" + how})
	if err == nil {
		_, err = n.RunPod(ctx, lab.PodSpec{Name: "web-0"})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(n.Pid())
	switch how {
	case "exit":
		return 0
	case "panic":
		panic("on purpose")
	}
	select {} // until it is killed
}

func TestANodeDoesNotOutliveItsOwner(t *testing.T) {
	for how, sig := range map[string]syscall.Signal{
		"exit": 0, "panic": 0, "int": syscall.SIGINT, "term": syscall.SIGTERM, "kill": syscall.SIGKILL,
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			owner := exec.CommandContext(testContext(t), os.Args[0])
			owner.Env = append(os.Environ(), ownerEnv+"="+how)
			out, err := owner.StdoutPipe()
			must.Do(t, err)
			var stderr strings.Builder
			owner.Stderr = &stderr
			must.Do(t, owner.Start())
			var node int
			if _, err := fmt.Fscan(bufio.NewReader(out), &node); err != nil {
				t.Fatalf("%v: %s", err, &stderr)
			}
			if sig != 0 {
				must.Do(t, owner.Process.Signal(sig))
			}
			_, _ = io.Copy(io.Discard, out)
			err = owner.Wait()
			if status, ok := owner.ProcessState.Sys().(syscall.WaitStatus); sig != 0 && (!ok || status.Signal() != sig) {
				t.Errorf("the owner ended with %v, want signal %v", err, sig)
			}
			// Once the node's pid 1 has left its namespaces, all its processes are dead. Zombies remain until their
			// new parent, the machine's pid 1, collects them.
			ctx := testContext(t)
			for exists(fmt.Sprintf("/proc/%d/ns/net", node)) {
				time.Sleep(time.Millisecond)
				must.Do(t, ctx.Err())
			}
			left := leftovers("orphan-" + how)
			if sig == syscall.SIGINT || sig == syscall.SIGTERM {
				if len(left) != 0 {
					t.Errorf("left behind: %v", left)
				}
				return
			}
			for _, path := range left {
				if !strings.HasPrefix(path, os.TempDir()) {
					t.Errorf("left behind: %s", path)
				}
			}
			startNode(t, lab.NodeOptions{Name: "next", Idle: true})
			if left := leftovers("orphan-" + how); len(left) != 0 {
				t.Errorf("left behind after the next start: %v", left)
			}
		})
	}
}
