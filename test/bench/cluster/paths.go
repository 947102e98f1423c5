package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const echoPort = "7001"

// measurePaths compares the network between the client's pod and a pod on the first node that has an address of the
// pool with that between the same and an ordinary pod.
func (m *moving) measurePaths(ctx context.Context, b *bench) (rows []table.Row, err error) {
	var pods [2]lab.Pod
	for i, pod := range []*corev1.Pod{
		plainPod(movesNamespace, "routed", pooled), plainPod(movesNamespace, "ordinary", nil),
	} {
		if pods[i], err = m.run(ctx, pod, m.homes[0]); err != nil {
			return nil, err
		}
	}
	against := "an ordinary pod of the same two nodes"

	// 1. Throughput, each way.
	there := end{m.third, m.client}
	for _, e := range []end{there, {m.homes[0], pods[0]}, {m.homes[0], pods[1]}} {
		server, err := e.start("iperf3-"+e.pod.Name, "-s")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, server.Kill()) }()
	}
	for _, what := range []string{"to", "from"} {
		var run [2]func() (float64, error)
		for i, p := range pods {
			from, to := there, end{m.homes[0], p}
			if what == "from" {
				from, to = to, from
			}
			run[i] = func() (float64, error) { return from.throughput(ctx, to.pod.IP()) }
			err := until(ctx, "iperf3 to serve", func() (bool, error) {
				_, err := run[i]()
				return err == nil, nil
			})
			if err != nil {
				return nil, err
			}
		}
		got, err := turns(ctx, "moves: throughput "+what+" pods", b.times(350), run[:]...)
		if err != nil {
			return nil, err
		}
		rows = append(rows, table.Row{
			What: "throughput " + what + " a pod of a routed pool", Against: against, Goal: table.AtLeast(0.98),
			Figure: measured("", ratio, got...),
			Detail: extent("%.2f Gbit/s", got[0]) + " / " + extent("%.2f Gbit/s", got[1]),
		})
	}

	// 2. Latency.
	var trips, connects [2]func() (float64, error)
	for i, p := range pods {
		l, err := m.homes[0].ListenIn(ctx, p, "tcp", ":"+echoPort)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		go echo(l)
		to := net.JoinHostPort(p.IP().String(), echoPort)
		trips[i] = func() (float64, error) { return m.roundTrip(ctx, to) }
		connects[i] = func() (float64, error) { return m.connect(to) }
	}
	for _, k := range []struct {
		what string
		of   [2]func() (float64, error)
	}{{"latency, one byte and back", trips}, {"  a new connection", connects}} {
		got, err := turns(ctx, "moves: "+k.what, b.times(200), k.of[:]...)
		if err != nil {
			return nil, err
		}
		rows = append(rows, table.Row{
			What: k.what, Against: against, Goal: table.AtMost(1.02), Figure: measured("", ratio, got...),
			Detail: extent("%.1f µs", got[0]) + " / " + extent("%.1f µs", got[1]),
		})
	}
	return rows, nil
}

// end is a pod, and the node that it runs on.
type end struct {
	node *lab.ClusterNode
	pod  lab.Pod
}

// iperf is a command in the pod's network.
func (e end) iperf(args ...string) []string {
	return append([]string{"/usr/bin/nsenter", "--net=" + e.pod.NetNS, "--", "/usr/bin/iperf3"}, args...)
}

func (e end) start(log string, args ...string) (*lab.Process, error) {
	return e.node.Start(log, nil, e.iperf(args...)...)
}

// throughput is that of one short connection to a server, in Gbit/s.
func (e end) throughput(ctx context.Context, to netip.Addr) (float64, error) {
	out, err := e.node.Run(ctx, e.iperf("-c", to.String(), "-n", "256M", "-J")...)
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	var said struct {
		End struct {
			Received struct {
				Rate float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	if err := json.Unmarshal(out, &said); err != nil {
		return 0, fmt.Errorf("iperf3: %w: %s", err, out)
	}
	if said.End.Received.Rate == 0 {
		return 0, fmt.Errorf("iperf3 has received nothing: %s", out)
	}
	return said.End.Received.Rate / 1e9, nil
}

// echo sends back what it gets.
func echo(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return // closed
		}
		go func() {
			defer conn.Close()
			_, _ = io.Copy(struct{ io.Writer }{conn}, conn) // not by splice, which is for more than a byte
		}()
	}
}

// roundTrip is the median of a few on one connection, in µs.
func (m *moving) roundTrip(ctx context.Context, to string) (float64, error) {
	conn, err := m.third.DialFrom(ctx, m.client, "tcp", to)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	var took []float64
	b := make([]byte, 1)
	for range 300 {
		begin := time.Now()
		if _, err := conn.Write(b); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(conn, b); err != nil {
			return 0, err
		}
		took = append(took, time.Since(begin).Seconds()*1e6)
	}
	return median(took), nil
}

// connect is the median time to connect, in µs: the first packet of a connection meets the rules for addresses.
func (m *moving) connect(to string) (float64, error) {
	ns, err := os.Open(m.third.Path(m.client.NetNS))
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	var took []float64
	err = link.In(ns, func() error {
		for range 30 {
			begin := time.Now()
			conn, err := net.Dial("tcp", to)
			if err != nil {
				return err
			}
			took = append(took, time.Since(begin).Seconds()*1e6)
			conn.Close()
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return median(took), nil
}

// measureSandboxes compares RunPodSandbox for a pod that has an address of the pool with that for an ordinary one, on
// the second node. The API server has both pods; the benchmark is their kubelet.
func (m *moving) measureSandboxes(ctx context.Context, b *bench) ([]table.Row, error) {
	n := m.homes[1]
	if err := n.Kubelet.Stop(); err != nil {
		return nil, err
	}
	var run [2]func() (float64, error)
	var agent [2][]float64 // its CPU time, also for the sandbox's end
	for i, pod := range []*corev1.Pod{
		plainPod(movesNamespace, "routed-sandbox", pooled), plainPod(movesNamespace, "ordinary-sandbox", nil),
	} {
		pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: n.Name}
		if err := m.world.client.Create(ctx, pod); err != nil {
			return nil, err
		}
		err := until(ctx, "pod "+pod.Name+" to be scheduled", func() (bool, error) {
			err := m.world.client.Get(ctx, client.ObjectKeyFromObject(pod), pod)
			return pod.Spec.NodeName == n.Name, err
		})
		if err != nil {
			return nil, err
		}
		spec := lab.PodSpec{Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID), Annotations: pod.Annotations}
		run[i] = func() (took float64, err error) {
			spec.Attempt++
			cpu, err := cpuTime(n.AgentProcess.Process())
			if err == nil {
				took, err = runSandbox(ctx, n, spec)
			}
			if err != nil {
				return 0, err
			}
			after, err := cpuTime(n.AgentProcess.Process())
			agent[i] = append(agent[i], (after-cpu).Seconds()*1e3)
			return took, err
		}
	}
	for range 5 { // what is done once for a pod or a bridge
		for _, r := range run {
			if _, err := r(); err != nil {
				return nil, err
			}
		}
	}
	got, err := turns(ctx, "moves: sandboxes", b.times(300), run[:]...)
	if err != nil {
		return nil, err
	}
	return []table.Row{{
		What: "RunPodSandbox of a pod of a routed pool", Against: "an ordinary pod of the same bridge",
		Goal: table.AtMost(1.05), Figure: measured("", ratio, got...),
		Detail: extent("%.1f ms", got[0]) + " / " + extent("%.1f ms", got[1]) +
			fmt.Sprintf("; the agent's CPU, with the sandbox's end: %.1f / %.1f ms", median(agent[0]), median(agent[1])),
	}}, nil
}

// runSandbox times RunPodSandbox, in ms, and then takes the sandbox away.
func runSandbox(ctx context.Context, n *lab.ClusterNode, spec lab.PodSpec) (float64, error) {
	config := n.SandboxConfig(spec)
	begin := time.Now()
	r, err := n.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		return 0, err
	}
	took := time.Since(begin)
	return took.Seconds() * 1e3, n.DeletePod(ctx, r.PodSandboxId)
}
