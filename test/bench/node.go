package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const agentPath = "/opt/stayput/stayput-agent"

// podNetwork is a node's network. Both IPAM plugins get the full configuration of a node with stayput.
func podNetwork(ipam string) lab.Network {
	return lab.Network{IPAM: lab.RangeIPAM(ipam, "10.88.0.0/16"), Annotations: true}
}

// startNode starts a node with stayput installed.
func (b *bench) startNode(ctx context.Context) (*lab.Node, error) {
	n, err := lab.StartNode(ctx, lab.NodeOptions{
		CNIPlugins: []string{b.product.Plugin}, Networks: []lab.Network{podNetwork("host-local")},
	})
	if err != nil {
		return nil, err
	}
	if err := n.Install(b.product.Agent, agentPath); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// startAgent starts the agent with its default flags and waits until it is connected.
func startAgent(ctx context.Context, n *lab.Node, args ...string) (*lab.Process, error) {
	p, err := n.Start("agent", nil, append([]string{agentPath}, args...)...)
	if err != nil {
		return nil, err
	}
	for {
		log, err := os.ReadFile(p.Log)
		if err != nil {
			return nil, err
		}
		if strings.Contains(string(log[lastStart(log):]), "NRI connected") {
			return p, nil
		}
		select {
		case <-p.Done():
			return nil, fmt.Errorf("the agent ended: %w: %s", p.Wait(), log)
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// lastStart returns the offset at which the last agent's log begins.
func lastStart(log []byte) int { return max(0, strings.LastIndex(string(log), "msg=Running")) }

// runAndStop times RunPodSandbox and StopPodSandbox, without the removal.
func runAndStop(ctx context.Context, n *lab.Node, spec lab.PodSpec) (time.Duration, error) {
	config := n.SandboxConfig(spec)
	begin := time.Now()
	r, err := n.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		return 0, err
	}
	if _, err := n.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: r.PodSandboxId}); err != nil {
		return 0, err
	}
	took := time.Since(begin)
	return took, n.RemovePod(ctx, r.PodSandboxId)
}

// measurePods takes turns between two nodes that differ only in stayput and its agent. Half-way they swap roles.
func measurePods(ctx context.Context, b *bench) (rows []table.Row, err error) {
	var nodes [2]*lab.Node
	for i := range nodes {
		n, err := b.startNode(ctx)
		if err != nil {
			return nil, err
		}
		defer func() {
			if err != nil && ctx.Err() == nil {
				n.WriteLogs(os.Stderr)
			}
			err = errors.Join(err, n.Close())
		}()
		// One pod keeps the bridge's carrier up, as on a real node.
		if _, err := n.RunPod(ctx, lab.PodSpec{Name: "resident"}); err != nil {
			return nil, err
		}
		nodes[i] = n
	}
	number := 0
	ordinaryPod := func() lab.PodSpec {
		number++
		return lab.PodSpec{Name: "pod-" + strconv.Itoa(number), Annotations: ordinary}
	}
	restoredPod := func() lab.PodSpec { return lab.PodSpec{Name: "web-0", Annotations: asked} }

	half := b.times(100)
	times := make([][]time.Duration, 4)
	for role := range nodes {
		ours, theirs := nodes[role], nodes[1-role]
		if err := ours.SetNetworks(ctx, podNetwork("stayput")); err != nil {
			return nil, err
		}
		if err := theirs.SetNetworks(ctx, podNetwork("host-local")); err != nil {
			return nil, err
		}
		agent, err := startAgent(ctx, ours)
		if err != nil {
			return nil, err
		}
		pod := func(n *lab.Node, spec func() lab.PodSpec) func() (time.Duration, error) {
			return func() (time.Duration, error) { return runAndStop(ctx, n, spec()) }
		}
		contestants := []func() (time.Duration, error){
			pod(ours, ordinaryPod), pod(theirs, ordinaryPod), pod(ours, restoredPod), pod(theirs, restoredPod),
		}
		if _, err := turns(ctx, 5, contestants...); err != nil {
			return nil, err
		}
		more, err := turns(ctx, half, contestants...)
		if err != nil {
			return nil, err
		}
		for i := range times {
			times[i] = append(times[i], more[i]...)
		}
		if err := agent.Kill(); err != nil {
			return nil, err
		}
	}
	for i, k := range []struct {
		name string
		goal table.Goal
	}{{"ordinary pod", table.AtMost(1.03)}, {name: "restored pod"}} {
		ours, theirs := times[2*i], times[2*i+1]
		rows = append(rows, table.Row{
			What: "RunPodSandbox + StopPodSandbox, " + k.name, Against: "host-local, no NRI plugin", Goal: k.goal,
			Figure: compared(ours, theirs),
			Detail: ms(median(ours)) + " / " + ms(median(theirs)),
		})
	}
	return rows, nil
}

const (
	residents = 200
	idle      = 60 * time.Second
	// often is a reconciliation interval short enough to measure one reconciliation's cost.
	often = 2 * time.Second
)

// measureAgent observes an idle agent on a node with many pods whose addresses are all retained.
func measureAgent(ctx context.Context, b *bench) (rows []table.Row, err error) {
	n, err := b.startNode(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			n.WriteLogs(os.Stderr)
		}
		err = errors.Join(err, n.Close())
	}()
	if err := n.SetNetworks(ctx, podNetwork("stayput")); err != nil {
		return nil, err
	}
	agent, err := startAgent(ctx, n)
	if err != nil {
		return nil, err
	}
	for i := range residents {
		if _, err := n.RunPod(ctx, lab.PodSpec{Name: fmt.Sprintf("web-%d", i), Annotations: asked}); err != nil {
			return nil, err
		}
	}
	// 1. After 200 pod starts.
	rss, cpu, err := watch(ctx, agent, idle)
	if err != nil {
		return nil, err
	}
	peak, err := memory(agent, "VmHWM:")
	if err != nil {
		return nil, err
	}
	if err := agent.Kill(); err != nil {
		return nil, err
	}
	// 2. After a restart with 200 pods, which Synchronize reports at once.
	if agent, err = startAgent(ctx, n); err != nil {
		return nil, err
	}
	rssAnew, cpuAnew, err := watch(ctx, agent, idle)
	if err != nil {
		return nil, err
	}
	if err := agent.Kill(); err != nil {
		return nil, err
	}
	// 3. With frequent reconciliations, whose share is too rare to show in a minute otherwise.
	if agent, err = startAgent(ctx, n, "--reconcile-interval="+often.String()); err != nil {
		return nil, err
	}
	const while = 30 * time.Second
	_, busy, err := watch(ctx, agent, while)
	if err != nil {
		return nil, err
	}
	each := max(0, busy-cpu*while.Seconds()/idle.Seconds()) / (while.Seconds() / often.Seconds())
	share := (cpu/idle.Seconds() + each/(5*60)) * 100

	against := fmt.Sprintf("%d pods, idle for %.0f s", residents, idle.Seconds())
	return []table.Row{
		{
			What: "agent, RSS", Against: against, Goal: table.AtMost(30),
			Figure: table.Figure{Value: max(rss, rssAnew), Unit: " MiB", N: 1},
			Detail: fmt.Sprintf("%.1f after %d starts (peak %.1f), %.1f after a restart", rss, residents, peak, rssAnew),
		},
		{
			What: "agent, CPU", Against: against, Goal: table.AtMost(0.1),
			Figure: table.Figure{Value: max(cpu, cpuAnew) / idle.Seconds() * 100, Unit: " %", N: 1},
			Detail: fmt.Sprintf("of a core; %.0f ms after %d starts, %.0f ms after a restart", cpu*1e3, residents, cpuAnew*1e3),
		},
		{
			What: "  with a reconciliation every 5 min", Against: against, Goal: table.AtMost(0.1),
			Figure: table.Figure{Value: share, Unit: " %", N: 1},
			Detail: fmt.Sprintf("one takes %.1f ms of CPU", each*1e3),
		},
	}, nil
}

// watch waits until the agent is idle and then observes it for a while. It returns the RSS in MiB, the maximum of one
// sample a second, and the CPU time in seconds.
func watch(ctx context.Context, p *lab.Process, while time.Duration) (rss, cpu float64, err error) {
	wait := func(d time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.Done():
			return fmt.Errorf("the agent ended: %w", p.Wait())
		case <-time.After(d):
			return nil
		}
	}
	// Idle: no tick of CPU time for five seconds. An agent with frequent reconciliations is never idle.
	for last, quiet, looks := -1.0, 0, 0; quiet < 5 && looks < 30; quiet, looks = quiet+1, looks+1 {
		now, err := cpuTime(p)
		if err != nil {
			return 0, 0, err
		}
		if now != last {
			last, quiet = now, 0
		}
		if err := wait(time.Second); err != nil {
			return 0, 0, err
		}
	}
	before, err := cpuTime(p)
	if err != nil {
		return 0, 0, err
	}
	for range int(while.Seconds()) {
		if err := wait(time.Second); err != nil {
			return 0, 0, err
		}
		now, err := memory(p, "VmRSS:")
		if err != nil {
			return 0, 0, err
		}
		rss = max(rss, now)
	}
	after, err := cpuTime(p)
	return rss, after - before, err
}

// cpuTime returns utime and stime of /proc/PID/stat in seconds.
func cpuTime(p *lab.Process) (float64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	var ticks float64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return ticks / 100, nil // USER_HZ is 100 everywhere
}

// memory returns a line of /proc/PID/status in MiB.
func memory(p *lab.Process, name string) (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(status), name)
	var kib float64
	_, err = fmt.Sscan(rest, &kib)
	return kib / 1024, err
}
