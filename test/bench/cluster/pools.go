package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	poolNamespace = "pools"
	poolName      = "bench"
	poolPodIPs    = 100_000
)

// pooled are the annotations of a pod that asks for an address of the pool.
var pooled = map[string]string{stayputv1alpha1.AnnotationPools: poolName}

// makePool creates a pool and waits until it gives addresses: every node has to be asked first.
func (w *world) makePool(
	ctx context.Context, mode stayputv1alpha1.PodIPPoolMode, subnet string, addresses ...string,
) error {
	pool := &stayputv1alpha1.PodIPPool{
		ObjectMeta: metav1.ObjectMeta{Name: poolName},
		Spec:       stayputv1alpha1.PodIPPoolSpec{Mode: mode, Subnet: subnet, Addresses: addresses},
	}
	if err := w.client.Create(ctx, pool); err != nil {
		return err
	}
	return until(ctx, "the pool to be Ready", func() (bool, error) {
		err := w.client.Get(ctx, client.ObjectKeyFromObject(pool), pool)
		var audit stayputv1alpha1.PodIPAuditList
		if err == nil {
			err = w.client.List(ctx, &audit)
		}
		return meta.IsStatusConditionTrue(pool.Status.Conditions, stayputv1alpha1.ConditionReady) && len(audit.Items) > 0 &&
			audit.Items[0].Spec.Phase == stayputv1alpha1.PodIPAuditSettled, err
	})
}

// allFree waits until nobody has an address.
func (w *world) allFree(ctx context.Context) error {
	return until(ctx, "all addresses to be free", func() (bool, error) {
		var ips stayputv1alpha1.PodIPList
		err := w.client.List(ctx, &ips, client.Limit(1))
		return len(ips.Items) == 0, err
	})
}

// measurePools measures the controller, on a cluster whose pods run nowhere.
func measurePools(ctx context.Context, b *bench) (rows []table.Row, err error) {
	w, err := b.startInstalled(ctx, objectsOnly, lab.ProcessOptions{Controllers: 1, Pools: true})
	if err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	if err := w.namespace(ctx, poolNamespace); err != nil {
		return nil, err
	}
	if err := w.Scheduler.Stop(); err != nil { // the only node is a real one
		return nil, err
	}
	if err := w.makePool(ctx, stayputv1alpha1.ModeL2, "10.0.0.0/8"); err != nil {
		return nil, err
	}
	events, err := w.watchPods(ctx, poolNamespace)
	if err != nil {
		return nil, err
	}

	// 1. One at a time.
	idle, err := w.giveOneByOne(ctx, events, b.times(500))
	if err != nil {
		return nil, err
	}
	const against = "idle cluster, one at a time"
	rows = append(rows,
		table.Row{What: "created gated -> address and ungated, p50", Against: against, Goal: table.Below(30),
			Figure: measured(" ms", quantile(0.5), ms(idle))},
		table.Row{What: "  p99", Against: against, Goal: table.Below(120), Figure: measured(" ms", quantile(0.99), ms(idle))})

	// 2. A thousand at once.
	var all, without []float64
	for round := range b.times(5) + 1 { // the first one warms up
		say("pools: %d at once, round %d", burst, round)
		took, err := w.giveAtOnce(ctx, pooled)
		if err != nil {
			return rows, err
		}
		plain, err := w.giveAtOnce(ctx, asked)
		if err != nil {
			return rows, err
		}
		if round > 0 {
			all, without = append(all, took), append(without, plain)
		}
	}
	rows = append(rows, table.Row{
		What: fmt.Sprintf("%d pods at once -> last ungated", burst), Against: "the same pods with retain-ip only",
		Goal: table.AtMost(1.5), Figure: measured("", ratio, all, without),
		Detail: extent("%.2f s", all) + " / " + extent("%.2f s", without),
	})

	// 3. Beside very many.
	more, err := w.giveBesideMany(ctx, b, idle)
	return append(rows, more...), err
}

// giveOneByOne creates gated pods and returns how long each waited for its address.
func (w *world) giveOneByOne(ctx context.Context, events <-chan podEvent, n int) (waited []time.Duration, err error) {
	const warmUp = 20
	for i := range warmUp + n {
		pod := plainPod(poolNamespace, podName(i%10), pooled)
		begin := time.Now()
		if err := w.client.Create(ctx, pod); err != nil {
			return nil, err
		}
		if !gated(pod) {
			return nil, fmt.Errorf("pod %s was not gated", pod.Name)
		}
		e, err := await(ctx, "pod "+pod.Name+" to be ungated", events, func(e podEvent) bool {
			return e.pod.UID == pod.UID && !gated(e.pod)
		})
		if err != nil {
			return nil, err
		}
		if e.pod.Annotations[stayputv1alpha1.AnnotationAddresses] == "" {
			return nil, fmt.Errorf("pod %s was ungated without an address", pod.Name)
		}
		if i >= warmUp {
			waited = append(waited, e.at.Sub(begin))
		}
		if err := w.gone(ctx, events, pod); err != nil {
			return nil, err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
	}
	return waited, nil
}

// giveAtOnce creates pods at once and returns after how many seconds the last of them was ungated.
func (w *world) giveAtOnce(ctx context.Context, annotations map[string]string) (took float64, err error) {
	watching, stop := context.WithCancel(ctx)
	defer stop()
	events, err := w.watchPods(watching, poolNamespace)
	if err != nil {
		return 0, err
	}
	created := make(chan error, 1)
	begin := time.Now()
	go func() {
		created <- parallel(ctx, burst, burstClients, func(ctx context.Context, _, i int) error {
			return w.client.Create(ctx, plainPod(poolNamespace, podName(i), annotations))
		})
	}()
	ungated := map[types.UID]bool{}
	last, err := await(ctx, "all pods to be ungated", events, func(e podEvent) bool {
		if !gated(e.pod) {
			ungated[e.pod.UID] = true
		}
		return len(ungated) == burst
	})
	if err != nil {
		return 0, err
	}
	if err := <-created; err != nil {
		return 0, err
	}
	if err := w.clear(ctx, poolNamespace); err != nil {
		return 0, err
	}
	return last.at.Sub(begin).Seconds(), w.allFree(ctx)
}

// giveBesideMany measures what addresses that are kept cost.
func (w *world) giveBesideMany(ctx context.Context, b *bench, idle []time.Duration) ([]table.Row, error) {
	controller := w.ControllerProcesses[0]
	rss := func() (controllers, server float64, err error) {
		if err := controller.Stop(); err != nil {
			return 0, 0, err
		}
		if err := controller.Start(ctx); err != nil {
			return 0, 0, err
		}
		if err := w.allGive(ctx); err != nil {
			return 0, 0, err
		}
		if err := w.settle(ctx); err != nil {
			return 0, 0, err
		}
		if controllers, err = memory(controller.Process(), "VmRSS"); err != nil {
			return 0, 0, err
		}
		server, err = memory(w.APIServer.Process(), "VmRSS")
		return controllers, server, err
	}
	before, serverBefore, err := rss()
	if err != nil {
		return nil, err
	}
	n := max(mostPuts, int(poolPodIPs*b.scale))
	err = w.keepMany(ctx, stayputv1alpha1.ModeL2, netip.MustParseAddr("10.100.0.0"), n, w.Nodes[0].Name)
	if err != nil {
		return nil, err
	}
	say("pools: %d PodIPs are there", n)
	after, serverAfter, err := rss()
	if err != nil {
		return nil, err
	}
	events, err := w.watchPods(ctx, poolNamespace)
	if err != nil {
		return nil, err
	}
	beside, err := w.giveOneByOne(ctx, events, b.times(500))
	if err != nil {
		return nil, err
	}
	against := fmt.Sprintf("%d PodIPs that are kept, not none", n)
	p50 := func(of []time.Duration) float64 { return quantile(0.5)(ms(of)) }
	return []table.Row{
		{What: "controller, RSS", Against: against, Goal: table.Below(150),
			Figure: table.Figure{Value: after - before, Unit: " MiB", N: 1},
			Detail: fmt.Sprintf("%.0f MiB, without them %.0f; kube-apiserver %.0f MiB, without them %.0f", after, before,
				serverAfter, serverBefore)},
		{What: "  created gated -> address and ungated, p50", Against: against, Goal: table.AtMost(1.1),
			Figure: measured("", ratio, ms(beside), ms(idle)),
			Detail: fmt.Sprintf("%.1f / %.1f ms; p99 %.1f ms", p50(beside), p50(idle), quantile(0.99)(ms(beside)))},
	}, nil
}

// allGive waits until a pod gets an address.
func (w *world) allGive(ctx context.Context) error {
	pod := plainPod(poolNamespace, "probe-0", pooled)
	if err := w.client.Create(ctx, pod); err != nil {
		return err
	}
	err := until(ctx, "a pod to get an address", func() (bool, error) {
		err := w.client.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		return !gated(pod), err
	})
	if err != nil {
		return err
	}
	return w.clear(ctx, poolNamespace)
}

// keepMany stores n addresses of the pool, from the first one on, that are kept for pods that are gone: a multiple of
// [mostPuts].
func (w *world) keepMany(
	ctx context.Context, mode stayputv1alpha1.PodIPPoolMode, first netip.Addr, n int, node string,
) error {
	s, from := w.newStore(), binary.BigEndian.Uint32(first.AsSlice())
	return parallel(ctx, n/mostPuts, scaleClients, func(ctx context.Context, _, chunk int) error {
		var some []client.Object
		for k := chunk * mostPuts; len(some) < mostPuts; k++ {
			a, _ := netip.AddrFromSlice(binary.BigEndian.AppendUint32(nil, from+uint32(k)))
			ip := keptPodIP(a, k, node)
			ip.Spec.Mode = mode
			some = append(some, ip)
		}
		return s.put(ctx, some...)
	})
}

// keptPodIP returns an address of the pool that is kept for a pod that is gone.
func keptPodIP(a netip.Addr, i int, node string) *stayputv1alpha1.PodIP {
	now, uid := metav1.Now(), string(uuid.NewUUID())
	return &stayputv1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{
			Name: stayputv1alpha1.PodIPName(a), UID: uuid.NewUUID(), CreationTimestamp: now, Generation: 1,
			Finalizers: []string{stayputv1alpha1.FinalizerInUse},
		},
		Spec: stayputv1alpha1.PodIPSpec{
			Pool: poolName, Mode: stayputv1alpha1.ModeL2, Namespace: poolNamespace, PodName: fmt.Sprintf("kept-%d", i),
			PodUID: uid, Interface: "eth0", Retention: "720h0m0s", WhenScaled: stayputv1alpha1.PolicyRetain,
			WhenDeleted: stayputv1alpha1.PolicyRetain,
		},
		Status: stayputv1alpha1.PodIPStatus{
			Phase: stayputv1alpha1.PodIPRetained, PodUID: uid, NodeName: node, Since: &now,
			Expires: &metav1.Time{Time: now.Add(720 * time.Hour)},
		},
	}
}

// measureL2 measures pods of a pool on a link that all nodes share.
func measureL2(ctx context.Context, b *bench) ([]table.Row, error) {
	return measurePoolRecreate(ctx, b, "L2 pool", stayputv1alpha1.ModeL2, "10.6.0.0/16", "10.6.168.0/24", "macvlan")
}

// measureRouted measures pods of a pool whose addresses the nodes route, on the bridges that they have from the start.
func measureRouted(ctx context.Context, b *bench) ([]table.Row, error) {
	return measurePoolRecreate(ctx, b, "routed pool", stayputv1alpha1.ModeRouted, "10.50.0.0/16", "10.50.168.0/24", "")
}

// measurePoolRecreate is the section recreate for pods of a pool, in networks of the main plugin if it is not empty.
// Kubelets do not probe the pods: a node does not reach its own macvlan.
func measurePoolRecreate(
	ctx context.Context, b *bench, of string, mode stayputv1alpha1.PodIPPoolMode, subnet, addresses, plugin string,
) ([]table.Row, error) {
	unprobed := func(ofPods map[string]string) *appsv1.StatefulSet {
		return lab.Workload{Name: "web", Replicas: crowd, Annotations: ofPods, Unprobed: true}.StatefulSet(crowdNamespace)
	}
	start := func(ctx context.Context, o lab.ClusterOptions, ipam string) (*world, error) {
		w, err := b.start(ctx, o)
		if err != nil {
			return nil, err
		}
		if plugin == "" {
			return w, nil
		}
		for _, n := range w.Nodes {
			err := n.SetNetworks(ctx, lab.Network{Type: plugin, Annotations: true,
				IPAM: lab.RangeIPAM(ipam, n.Pods.String())})
			if err != nil {
				return nil, w.end(ctx, err)
			}
		}
		return w, nil
	}
	m, err := b.compete(ctx, of, [2]contestant{
		{
			name: "stayput",
			start: func(ctx context.Context) (*world, error) {
				w, err := start(ctx, lab.ClusterOptions{Product: b.product, IPAM: "stayput"}, "stayput")
				if err != nil {
					return nil, err
				}
				if err := w.install(ctx, lab.ProcessOptions{Controllers: replicas, Pools: true}); err != nil {
					return nil, err
				}
				if err := w.makePool(ctx, mode, subnet, addresses); err != nil {
					return nil, w.end(ctx, err)
				}
				return w, nil
			},
			set: unprobed(pooled),
			published: func(w *world, ctx context.Context, ready map[string]place) error {
				return w.publishedPodIPs(ctx, ready)
			},
		},
		{
			name: "stock",
			start: func(ctx context.Context) (*world, error) {
				return start(ctx, lab.ClusterOptions{}, "host-local")
			},
			set: unprobed(nil),
		},
	})
	if err != nil {
		return nil, err
	}
	rates := func(took []float64) (all []float64) {
		for _, s := range took {
			all = append(all, crowd/s)
		}
		return all
	}
	return []table.Row{
		m.againRow(" of a " + of),
		usedBy(m.used[ours], m.used[stock]),
		m.keptRow("  with the IP kept, on whichever node", m.ips[ours]),
		{
			What: "  pods started per second, 30 a node", Against: "stock host-local, no stayput", Goal: table.AtLeast(0.95),
			Figure: measured("", ratio, rates(m.create[ours]), rates(m.create[stock])),
			Detail: extent("%.2f", rates(m.create[ours])) + " / " + extent("%.2f", rates(m.create[stock])),
		},
	}, nil
}

// publishedPodIPs waits until each Ready pod's PodIP says that it has the address.
func (w *world) publishedPodIPs(ctx context.Context, ready map[string]place) error {
	return until(ctx, "the PodIPs", func() (bool, error) {
		var list stayputv1alpha1.PodIPList
		if err := w.client.List(ctx, &list); err != nil {
			return false, err
		}
		right := 0
		for _, ip := range list.Items {
			p, ok := ready[ip.Spec.PodName]
			if ok && ip.Status.Phase == stayputv1alpha1.PodIPBound && ip.Status.PodUID == string(p.uid) && ip.Name == p.ip {
				right++
			}
		}
		return right == len(ready), nil
	})
}
