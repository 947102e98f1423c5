package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/test/bench/internal/table"
)

// placeOne creates a gated pod with a known home and returns once its watch showed it ungated with the affinity. It
// returns the time since before the create call, and since the call returned.
func (w *world) placeOne(
	ctx context.Context, events <-chan podEvent, pod *corev1.Pod, home string,
) (whole, rest time.Duration, err error) {
	begin := time.Now()
	if err := w.client.Create(ctx, pod); err != nil {
		return 0, 0, err
	}
	created := time.Now()
	if !gated(pod) {
		return 0, 0, fmt.Errorf("pod %s was not gated", pod.Name)
	}
	e, err := await(ctx, "pod "+pod.Name+" to be ungated", events, func(e podEvent) bool {
		return e.pod.UID == pod.UID && !gated(e.pod)
	})
	if err != nil {
		return 0, 0, err
	}
	if !mustRunOn(e.pod, home) {
		return 0, 0, fmt.Errorf("pod %s was ungated without its home %s", pod.Name, home)
	}
	return e.at.Sub(begin), e.at.Sub(created), nil
}

// gone deletes a pod and waits until the watch showed its deletion.
func (w *world) gone(ctx context.Context, events <-chan podEvent, pod *corev1.Pod) error {
	if err := w.remove(ctx, pod); err != nil {
		return err
	}
	_, err := await(ctx, "pod "+pod.Name+" to be gone", events, func(e podEvent) bool {
		return e.pod.UID == pod.UID && e.kind == watch.Deleted
	})
	return err
}

func measureLatency(ctx context.Context, b *bench) (rows []table.Row, err error) {
	w, err := b.startInstalled(ctx, objectsOnly, twoControllers)
	if err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	const namespace, homes = "latency", 10
	if err := w.namespace(ctx, namespace); err != nil {
		return nil, err
	}
	nodes, err := w.makeNodes(ctx, homes)
	if err != nil {
		return nil, err
	}
	for i, node := range nodes {
		if err := w.makeHome(ctx, w.client, namespace, podName(i), node, addressOf(i), nil); err != nil {
			return nil, err
		}
	}
	events, err := w.watchPods(ctx, namespace)
	if err != nil {
		return nil, err
	}
	const warmUp = 20
	var whole, rest []time.Duration
	for i := range warmUp + b.times(1000) {
		pod := plainPod(namespace, podName(i%homes), asked)
		a, c, err := w.placeOne(ctx, events, pod, nodes[i%homes])
		if err != nil {
			return nil, err
		}
		if i >= warmUp {
			whole, rest = append(whole, a), append(rest, c)
		}
		// The scheduler's share is excluded, and over before the next pod.
		if _, err := await(ctx, "pod "+pod.Name+" to be bound", events,
			func(e podEvent) bool { return e.pod.UID == pod.UID && e.pod.Spec.NodeName != "" }); err != nil {
			return nil, err
		}
		if err := w.gone(ctx, events, pod); err != nil {
			return nil, err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
	}
	const against = "idle cluster, one at a time"
	detail := func(q float64) string {
		return fmt.Sprintf("with the call that creates it; from its return %.2f ms", quantile(q)(ms(rest)))
	}
	return []table.Row{
		{
			What: "created gated -> affinity and ungated, p50", Against: against, Goal: table.Below(20),
			Figure: measured(" ms", quantile(0.5), ms(whole)), Detail: detail(0.5),
		},
		{
			What: "  p99", Against: against, Goal: table.Below(100), Figure: measured(" ms", quantile(0.99), ms(whole)),
			Detail: detail(0.99),
		},
	}, nil
}

func podName(i int) string { return fmt.Sprintf("web-%d", i) }
