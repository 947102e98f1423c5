package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/bench/internal/table"
)

const (
	burst        = 1000
	burstNodes   = 100
	burstClients = 16
)

// progress tracks pods from their creation to their binding.
type progress struct {
	begin              time.Time
	created            time.Duration // when the last call returned
	ungated            time.Duration // when the last pod was ungated
	firstBound, bound  time.Duration
	notHome, everGated int
}

func measureBurst(ctx context.Context, b *bench) (rows []table.Row, err error) {
	o := objectsOnly
	// The scheduler's default limit of 50 requests per second would slow it down.
	o.SchedulerArgs = []string{"--kube-api-qps=100000", "--kube-api-burst=100000"}
	w, err := b.startInstalled(ctx, o, twoControllers)
	if err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	const namespace = "burst"
	if err := w.namespace(ctx, namespace); err != nil {
		return nil, err
	}
	nodes, err := w.makeNodes(ctx, burstNodes)
	if err != nil {
		return nil, err
	}
	home := func(i int) string { return nodes[i%burstNodes] }
	err = parallel(ctx, burst, burstClients, func(ctx context.Context, _, i int) error {
		return w.makeHome(ctx, w.client, namespace, podName(i), home(i), addressOf(i), nil)
	})
	if err != nil {
		return nil, err
	}
	annotated := func(i int) *corev1.Pod { return plainPod(namespace, podName(i), asked) }
	// What the scheduler finally sees of an annotated pod, without stayput.
	pinned := func(i int) *corev1.Pod {
		pod := plainPod(namespace, podName(i), nil)
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn,
					Values: []string{home(i)}}},
			}}},
		}}
		return pod
	}

	n := b.times(7)
	var create, ungate, fromLast, bind, ratios, beside, besideBound, without []float64
	for round := range n + 1 { // the first one warms up
		say("burst: round %d of %d", round, n)
		// 1. The controller alone, then the scheduler alone with the same pods.
		if err := w.Scheduler.Stop(); err != nil {
			return nil, err
		}
		if err := w.settle(ctx); err != nil {
			return nil, err
		}
		alone, err := w.runBurst(ctx, namespace, annotated, home, func(p *progress) error {
			if err := w.settle(ctx); err != nil {
				return err
			}
			return w.Scheduler.Start(ctx)
		})
		if err != nil {
			return nil, err
		}
		if alone.everGated != burst {
			return nil, fmt.Errorf("%d of %d pods were gated", alone.everGated, burst)
		}
		// 2. Both at once, as in production; and the same pods without stayput.
		together, err := w.runBurst(ctx, namespace, annotated, home, nil)
		if err != nil {
			return nil, err
		}
		stock, err := w.runBurst(ctx, namespace, pinned, home, nil)
		if err != nil {
			return nil, err
		}
		if round == 0 {
			continue
		}
		binding := alone.bound - alone.firstBound
		create = append(create, alone.created.Seconds())
		ungate = append(ungate, alone.ungated.Seconds())
		fromLast = append(fromLast, (alone.ungated - alone.created).Seconds())
		bind = append(bind, binding.Seconds())
		ratios = append(ratios, alone.ungated.Seconds()/binding.Seconds())
		beside, besideBound = append(beside, together.ungated.Seconds()), append(besideBound, together.bound.Seconds())
		without = append(without, stock.bound.Seconds())
	}
	const s = "%.2f s"
	return []table.Row{
		{
			What:    fmt.Sprintf("%d gated pods at once -> last ungated", burst),
			Against: "the scheduler's first to last bind, after that",
			Goal:    table.AtMost(1.5), Figure: measured("", ratio, ungate, bind),
			Detail: fmt.Sprintf("from the first create call %s, of which until the last call's return %s, then %s; scheduler "+
				"(alone, without a limit of requests) %s; ratios %s",
				extent(s, ungate), extent(s, create), extent(s, fromLast), extent(s, bind), extent("%.2f", ratios)),
		},
		{
			What:    "  with the scheduler beside it -> last bound",
			Against: "the same pods without stayput, pinned in the template",
			Figure:  measured("", ratio, besideBound, without),
			Detail: fmt.Sprintf("last ungated %s, last bound %s; without stayput %s", extent(s, beside), extent(s, besideBound),
				extent(s, without)),
		},
	}, nil
}

// runBurst creates the pods at once and follows them until all are bound. It calls then once all are ungated.
func (w *world) runBurst(
	ctx context.Context, namespace string, pod func(int) *corev1.Pod, home func(int) string, then func(*progress) error,
) (p progress, err error) {
	watching, stop := context.WithCancel(ctx)
	defer stop()
	events, err := w.watchPods(watching, namespace)
	if err != nil {
		return p, err
	}
	homes := map[string]string{}
	for i := range burst {
		homes[podName(i)] = home(i)
	}
	created := make(chan error, 1)
	p.begin = time.Now()
	go func() {
		err := parallel(ctx, burst, burstClients, func(ctx context.Context, _, i int) error {
			return w.client.Create(ctx, pod(i))
		})
		p.created = time.Since(p.begin)
		created <- err
	}()
	ungated, bound, waits := map[types.UID]bool{}, map[types.UID]bool{}, map[types.UID]bool{}
	look := func(e podEvent) {
		switch {
		case gated(e.pod):
			waits[e.pod.UID] = true
		case !ungated[e.pod.UID]:
			ungated[e.pod.UID] = true
			p.ungated = e.at.Sub(p.begin)
			if !mustRunOn(e.pod, homes[e.pod.Name]) {
				p.notHome++
			}
		}
		if e.pod.Spec.NodeName != "" && !bound[e.pod.UID] {
			bound[e.pod.UID] = true
			p.bound = e.at.Sub(p.begin)
			if len(bound) == 1 {
				p.firstBound = p.bound
			}
			if e.pod.Spec.NodeName != homes[e.pod.Name] {
				p.notHome++
			}
		}
	}
	if _, err := await(ctx, "all pods to be ungated", events,
		func(e podEvent) bool { look(e); return len(ungated) == burst }); err != nil {
		return p, err
	}
	if err := <-created; err != nil {
		return p, err
	}
	if then != nil {
		if err := then(&p); err != nil {
			return p, err
		}
	}
	if len(bound) < burst {
		if _, err := await(ctx, "all pods to be bound", events,
			func(e podEvent) bool { look(e); return len(bound) == burst }); err != nil {
			return p, err
		}
	}
	p.everGated = len(waits)
	if p.notHome > 0 {
		return p, fmt.Errorf("%d pods are not on their home node", p.notHome)
	}
	return p, w.clear(ctx, namespace)
}
