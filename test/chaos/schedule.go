package main

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// kind is a kind of fault.
type kind string

const (
	deletePods        kind = "delete pods"
	forceDeletePods   kind = "force-delete pods"
	rollout           kind = "rollout"
	scale             kind = "scale"
	stopSandbox       kind = "stop a sandbox"
	killSandbox       kind = "kill a sandbox"
	crashContainer    kind = "kill a container"
	restartContainerd kind = "restart containerd"
	killContainerd    kind = "kill containerd"
	restartKubelet    kind = "restart kubelet"
	killKubelet       kind = "kill kubelet"
	killAgent         kind = "kill the agent"
	killLeader        kind = "kill the leader"
	restartServer     kind = "restart the API server"
	stopServer        kind = "API server outage"
	losePower         kind = "power loss"
	cordonNode        kind = "cordon"
	drainNode         kind = "drain"
	deleteNode        kind = "delete a Node"
	deleteObjects     kind = "delete RetainedIPs"

	loseNode     kind = "power loss for long, declared"
	killFlanneld kind = "kill flanneld"
	stopFlanneld kind = "flanneld is away"
	newLease     kind = "flannel's lease again"
	loseRoutes   kind = "flannel's device and routes go"
	killProxy    kind = "kill kube-proxy"

	dropNode          kind = "power loss for long, its Node deleted"
	cutNode           kind = "cut off from the control plane"
	killFelix         kind = "kill Felix"
	stopFelix         kind = "Felix is away"
	killCollector     kind = "kill Calico's controllers"
	stopCollector     kind = "Calico's controllers are away"
	deleteReservation kind = "delete an IPReservation"
	touchBlocks       kind = "write all IPAMBlocks"
)

// fault is something that can happen: how often, in parts of the sum, and how long it lasts until it is healed. What
// heals itself lasts no time.
type fault struct {
	kind       kind
	parts      int
	least, max time.Duration
}

// faults of pods whose addresses are their nodes'.
var faults = []fault{
	{deletePods, 7, 0, 0},
	{forceDeletePods, 5, 0, 0},
	{rollout, 3, 0, 0},
	{scale, 5, time.Second, 30 * time.Second},
	{stopSandbox, 4, 0, 0},
	{killSandbox, 4, 0, 0},
	{crashContainer, 2, 0, 0},
	{restartContainerd, 2, 0, 0},
	{killContainerd, 4, 0, 20 * time.Second},
	{restartKubelet, 2, 0, 0},
	{killKubelet, 4, time.Second, 45 * time.Second},
	{killAgent, 5, 0, 0},
	{killLeader, 4, 0, 0},
	{restartServer, 2, 0, 0},
	{stopServer, 2, 2 * time.Second, 25 * time.Second},
	{losePower, 4, 0, 60 * time.Second}, // a node is NotReady after 16 s
	{cordonNode, 3, 5 * time.Second, 50 * time.Second},
	{drainNode, 3, 5 * time.Second, 60 * time.Second},
	{deleteNode, 1, 5 * time.Second, 40 * time.Second},
	{deleteObjects, 4, 0, 0},
}

// routedFaults are those of pods of routed pools.
var routedFaults = []fault{
	{deletePods, 8, 0, 0},
	{forceDeletePods, 5, 0, 0},
	{stopSandbox, 3, 0, 0},
	{killSandbox, 3, 0, 0},
	{killContainerd, 3, 0, 20 * time.Second},
	{killKubelet, 3, time.Second, 45 * time.Second},
	{killAgent, 6, 0, 0},
	{killLeader, 4, 0, 0},
	{restartServer, 2, 0, 0},
	{stopServer, 2, 2 * time.Second, 25 * time.Second},
	{losePower, 3, 0, 60 * time.Second},
	{loseNode, 3, 20 * time.Second, 60 * time.Second},
	{drainNode, 6, 5 * time.Second, 40 * time.Second},
	{killFlanneld, 5, 0, 0},
	{stopFlanneld, 3, time.Second, 40 * time.Second},
	{newLease, 3, 0, 10 * time.Second},
	{loseRoutes, 3, 0, 0},
	{killProxy, 5, 0, 0},
}

// calicoFaults are those of pods of pools of mode Calico.
var calicoFaults = []fault{
	{deletePods, 8, 0, 0},
	{forceDeletePods, 8, 0, 0},
	{stopSandbox, 3, 0, 0},
	{killSandbox, 3, 0, 0},
	{killContainerd, 3, 0, 20 * time.Second},
	{killKubelet, 4, time.Second, 45 * time.Second},
	{killLeader, 4, 0, 0},
	{restartServer, 2, 0, 0},
	{stopServer, 2, 2 * time.Second, 25 * time.Second},
	{losePower, 3, 0, 60 * time.Second},
	{loseNode, 3, 20 * time.Second, 60 * time.Second},
	{dropNode, 3, 20 * time.Second, 60 * time.Second},
	{drainNode, 4, 5 * time.Second, 40 * time.Second},
	{cutNode, 6, 2 * time.Second, 100 * time.Second}, // Calico frees addresses after 40 to 60 s
	{killFelix, 5, 0, 0},
	{stopFelix, 4, time.Second, 40 * time.Second},
	{killCollector, 3, 0, 0},
	{stopCollector, 3, time.Second, 60 * time.Second},
	{deleteReservation, 2, 0, 0},
	{touchBlocks, 5, 0, 0},
}

// step is a fault of the schedule. It is drawn without looking at the cluster, so that a seed always gives the same
// steps; what they hit depends on what there is to hit.
type step struct {
	round, number int
	after         time.Duration // the beginning of the step before
	kind          kind
	lasts         time.Duration
	node, set     int    // of the nodes and workloads
	pick          uint64 // seeds what else is chosen, such as pods
}

func (s step) String() string { return fmt.Sprintf("%d.%d %s", s.round, s.number, s.kind) }

// Between two rounds everything is healed and has to come to rest.
const (
	shortestRound, longestRound = time.Minute, 4 * time.Minute
	// together is the share of steps that begin with the one before.
	together = 0.15
	// meanPause is between the others; combinations come from faults that last longer.
	meanPause, longestPause = 4 * time.Second, 15 * time.Second
)

// drawRound returns the steps of a round.
func drawRound(seed uint64, round, nodes, sets int, faults []fault) (steps []step) {
	rnd := rand.New(rand.NewPCG(seed, uint64(round)))
	length := between(rnd, shortestRound, longestRound)
	sum := 0
	for _, f := range faults {
		sum += f.parts
	}
	for at := time.Duration(0); ; {
		s := step{round: round, number: len(steps) + 1}
		if rnd.Float64() >= together {
			s.after = min(time.Duration(rnd.ExpFloat64()*float64(meanPause)), longestPause)
		}
		part := rnd.IntN(sum)
		for _, f := range faults {
			if part -= f.parts; part < 0 {
				s.kind, s.lasts = f.kind, between(rnd, f.least, f.max)
				break
			}
		}
		s.node, s.set, s.pick = rnd.IntN(nodes), rnd.IntN(sets), rnd.Uint64()
		if at += s.after; at > length {
			return steps
		}
		steps = append(steps, s)
	}
}

func between(rnd *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(rnd.Int64N(int64(most-least)+1))
}
