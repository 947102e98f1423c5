package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"

	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	recordedWorkloads = 1000
	createClients     = 8
	createBatch       = 600
	createsNamespace  = "creates"
	// holdGate keeps pods from being scheduled, with and without stayput.
	holdGate = "bench.stayput.test/hold"
)

// creator creates pods in one cluster.
type creator struct {
	*world
	clients []client.WithWatch // each with its own connection
	sets    []*appsv1.StatefulSet
}

func (w *world) newCreator(ctx context.Context, sets int) (*creator, error) {
	c := &creator{world: w, sets: make([]*appsv1.StatefulSet, sets)}
	for range createClients {
		one, err := w.newClient()
		if err != nil {
			return nil, err
		}
		c.clients = append(c.clients, one)
	}
	if err := w.namespace(ctx, createsNamespace); err != nil {
		return nil, err
	}
	return c, parallel(ctx, len(c.sets), createClients, func(ctx context.Context, worker, i int) error {
		c.sets[i] = lab.Workload{Name: fmt.Sprintf("set-%d", i)}.StatefulSet(createsNamespace)
		return c.clients[worker].Create(ctx, c.sets[i])
	})
}

// record creates a PersistentPodState for each StatefulSet and waits until the controller has observed all.
func (c *creator) record(ctx context.Context) error {
	begin := time.Now()
	err := parallel(ctx, len(c.sets), createClients, func(ctx context.Context, worker, i int) error {
		return c.clients[worker].Create(ctx, &kruisev1alpha1.PersistentPodState{
			ObjectMeta: metav1.ObjectMeta{Namespace: createsNamespace, Name: c.sets[i].Name},
			Spec: kruisev1alpha1.PersistentPodStateSpec{
				TargetReference: kruisev1alpha1.TargetReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: c.sets[i].Name},
				PreferredPersistentTopology: []kruisev1alpha1.PreferredTopologyTerm{{
					Weight: 100, Preference: kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{corev1.LabelHostname}},
				}},
			},
		})
	})
	if err != nil {
		return err
	}
	say("creates: %d PersistentPodStates made in %.0f s", len(c.sets), time.Since(begin).Seconds())
	return until(ctx, "all PersistentPodStates to be in force", func() (bool, error) {
		pod := c.pod(recorded, "probe", len(c.sets)-1)
		err := c.client.Create(ctx, pod, client.DryRunAll)
		return gated(pod), err
	})
}

// The kinds of pods, with the labels and the owner set by their workloads' controllers.
const (
	bare        = "bare"
	replicaSets = "of a Deployment"
	plainSets   = "of a StatefulSet, not annotated" // nor recorded
	annotated   = "of a StatefulSet, annotated"     // not recorded
	atHome      = "of a StatefulSet, annotated, with a home"
	recorded    = "of a StatefulSet with a PersistentPodState"
)

// pod returns the i-th pod of a kind.
func (c *creator) pod(kind, name string, i int) *corev1.Pod {
	pod := plainPod(createsNamespace, name, nil)
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: holdGate}}
	owned := func(owner metav1.Object, kind string) {
		pod.OwnerReferences = []metav1.OwnerReference{
			*metav1.NewControllerRef(owner, appsv1.SchemeGroupVersion.WithKind(kind)),
		}
	}
	other := &metav1.ObjectMeta{Name: "other", UID: "f2b3c4d5-0000-4000-8000-000000000001"}
	switch kind {
	case bare:
		pod.Labels = nil
	case replicaSets:
		pod.Labels = map[string]string{"app": "bench", appsv1.DefaultDeploymentUniqueLabelKey: "6c5b9f8d7"}
		owned(other, "ReplicaSet")
	case plainSets:
		owned(other, "StatefulSet")
	case annotated, atHome:
		owned(other, "StatefulSet")
		pod.Annotations = asked
	case recorded:
		owned(c.sets[i%len(c.sets)], "StatefulSet")
	}
	return pod
}

// batch returns the rate at which pods of a kind were created, per second.
func (c *creator) batch(ctx context.Context, kind string, options ...client.CreateOption) (float64, error) {
	pods := make([]*corev1.Pod, createBatch)
	for i := range pods {
		pods[i] = c.pod(kind, fmt.Sprintf("pod-%d", i), i)
	}
	begin := time.Now()
	err := parallel(ctx, len(pods), createClients, func(ctx context.Context, worker, i int) error {
		return c.clients[worker].Create(ctx, pods[i], options...)
	})
	took := time.Since(begin)
	if err != nil {
		return 0, err
	}
	if len(options) == 0 {
		err = c.clear(ctx, createsNamespace)
	}
	return createBatch / took.Seconds(), err
}

func measureCreates(ctx context.Context, b *bench) (rows []table.Row, err error) {
	var both [2]*creator
	const ours, stock = 0, 1
	for i := range both {
		var w *world
		if w, err = b.startObjects(ctx, i == ours); err != nil {
			return nil, err
		}
		defer func() { err = w.end(ctx, err) }()
		if both[i], err = w.newCreator(ctx, recordedWorkloads); err != nil {
			return nil, err
		}
	}
	if err := both[ours].record(ctx); err != nil {
		return nil, err
	}
	kinds := []struct {
		pods, how string
		gated     bool
		options   []client.CreateOption
		times     int
	}{
		{bare, "dry-run", false, []client.CreateOption{client.DryRunAll}, 20},
		{replicaSets, "dry-run", false, []client.CreateOption{client.DryRunAll}, 20},
		{plainSets, "dry-run", false, []client.CreateOption{client.DryRunAll}, 20},
		{annotated, "dry-run", true, []client.CreateOption{client.DryRunAll}, 20},
		{recorded, "dry-run", true, []client.CreateOption{client.DryRunAll}, 20},
		{replicaSets, "stored", false, nil, 12},
		{plainSets, "stored", false, nil, 12},
		{annotated, "stored, the controller placing them meanwhile", true, nil, 12},
	}
	for _, k := range kinds {
		for i, c := range both {
			pod := c.pod(k.pods, "probe", 0)
			if err := c.client.Create(ctx, pod, client.DryRunAll); err != nil {
				return nil, err
			}
			if want := k.gated && i == ours; gated(pod) != want {
				return nil, fmt.Errorf("pod %s in cluster %d: gated is %t", k.pods, i, !want)
			}
		}
	}
	for _, c := range both {
		// It would delete the stored pods, which belong to no workload.
		if err := c.ControllerManager.Stop(); err != nil {
			return nil, err
		}
		if err := c.settle(ctx); err != nil {
			return nil, err
		}
	}
	for _, k := range kinds {
		var rates [2][]float64
		n := b.times(k.times)
		say("creates: pods %s, %s: %d rounds", k.pods, k.how, n)
		for round := range n + 1 {
			for turn := range both {
				which := (round + turn) % 2
				rate, err := both[which].batch(ctx, k.pods, k.options...)
				if err != nil {
					return nil, err
				}
				if round > 0 { // the first one warms up
					rates[which] = append(rates[which], rate)
				}
			}
		}
		rows = append(rows, table.Row{
			What: fmt.Sprintf("creates of pods per second, %s, %s", k.pods, k.how), Against: "a cluster without stayput",
			Goal:   table.AtLeast(0.9),
			Figure: measured("", ratio, rates[ours], rates[stock]),
			Detail: extent("%.0f/s", rates[ours]) + " / " + extent("%.0f/s", rates[stock]),
		})
	}
	// The API server's own latency for a pod of a recorded workload, which a batch hides.
	var latency [2][]float64
	for i := range b.times(400) {
		for turn := range both {
			which := (i + turn) % 2
			pod := both[which].pod(annotated, "probe", i)
			begin := time.Now()
			if err := both[which].client.Create(ctx, pod, client.DryRunAll); err != nil {
				return nil, errors.Join(err, ctx.Err())
			}
			latency[which] = append(latency[which], time.Since(begin).Seconds()*1e3)
		}
	}
	rows = append(rows, table.Row{
		What: "  one create, " + annotated + ", dry-run", Against: "a cluster without stayput",
		Figure: measured("", ratio, latency[ours], latency[stock]),
		Detail: fmt.Sprintf("%.2f ms / %.2f ms", median(latency[ours]), median(latency[stock])),
	})
	return rows, nil
}
