package main

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	recordedWorkloads = 200
	createClients     = 8
	createBatch       = 1200
	createsNamespace  = "creates"
	// unrecordedNamespace has no PersistentPodState.
	unrecordedNamespace = "creates-unrecorded"
	// holdGate keeps pods from being scheduled, with and without stayput.
	holdGate = "bench.stayput.test/hold"
)

// creator creates pods in one cluster.
type creator struct {
	*world
	clients []client.WithWatch // each with its own connection
	makers  []client.WithWatch // the same with the account of the controller that makes the pods of StatefulSets
	sets    []*appsv1.StatefulSet
	idle    cpu // each second
}

func (w *world) newCreator(ctx context.Context, sets int) (*creator, error) {
	c := &creator{world: w, sets: make([]*appsv1.StatefulSet, sets)}
	maker := w.RESTConfig()
	// The controller manager makes the account when it starts.
	err := until(ctx, "the account of the StatefulSets' controller", func() (done bool, err error) {
		maker.BearerToken, err = w.AccountToken(ctx, metav1.NamespaceSystem, "statefulset-controller", "")
		return err == nil, client.IgnoreNotFound(err)
	})
	if err != nil {
		return nil, err
	}
	for range createClients {
		one, err := w.newClient()
		if err != nil {
			return nil, err
		}
		c.clients = append(c.clients, one)
		if one, err = client.NewWithWatch(maker, client.Options{Scheme: scheme}); err != nil {
			return nil, err
		}
		c.makers = append(c.makers, one)
	}
	for _, namespace := range []string{createsNamespace, unrecordedNamespace} {
		if err := w.namespace(ctx, namespace); err != nil {
			return nil, err
		}
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
	replicaSets = "of a Deployment"
	plainSets   = "of a StatefulSet, not annotated" // nor recorded
	annotated   = "of a StatefulSet, annotated"     // not recorded
	atHome      = "of a StatefulSet, annotated, with a home"
	recorded    = "of a StatefulSet with a PersistentPodState"
	ofPool      = "of a StatefulSet, with an address of a pool" // nor recorded
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
	case replicaSets:
		pod.Labels = map[string]string{"app": "bench", appsv1.DefaultDeploymentUniqueLabelKey: "6c5b9f8d7"}
		owned(other, "ReplicaSet")
	case plainSets:
		owned(other, "StatefulSet")
	case annotated, atHome:
		owned(other, "StatefulSet")
		pod.Annotations = asked
	case ofPool:
		owned(other, "StatefulSet")
		pod.Annotations = pooled
	case recorded:
		owned(c.sets[i%len(c.sets)], "StatefulSet")
	}
	return pod
}

// batch creates pods of a kind, many at once, and returns the CPU time for each and the rate, per second.
func (c *creator) batch(
	ctx context.Context, kind, namespace string, options ...client.CreateOption,
) (each cpu, rate float64, err error) {
	pods := make([]*corev1.Pod, createBatch)
	for i := range pods {
		pods[i] = c.pod(kind, podName(i), i)
		pods[i].Namespace = namespace
	}
	makers := c.makers
	if kind == replicaSets {
		makers = c.clients
	}
	used, took, err := c.during(func() error {
		return parallel(ctx, len(pods), createClients, func(ctx context.Context, worker, i int) error {
			return makers[worker].Create(ctx, pods[i], options...)
		})
	})
	if err == nil && len(options) == 0 {
		err = c.clear(ctx, namespace)
	}
	s := took.Seconds()
	each = cpu{(used.server - c.idle.server*s) / createBatch, (used.installed - c.idle.installed*s) / createBatch}
	return each, createBatch / s, err
}

// oneByOne returns how many milliseconds each of some dry-run creates takes.
func (c *creator) oneByOne(ctx context.Context, kind, namespace string) (took []float64, err error) {
	const creates = 40
	for i := range creates {
		pod := c.pod(kind, podName(i), i)
		pod.Namespace = namespace
		begin := time.Now()
		if err := c.makers[0].Create(ctx, pod, client.DryRunAll); err != nil {
			return nil, err
		}
		took = append(took, time.Since(begin).Seconds()*1e3)
	}
	return took, nil
}

// rest waits until the cluster is idle, and measures it without work.
func (c *creator) rest(ctx context.Context) error {
	if err := c.settle(ctx); err != nil {
		return err
	}
	used, took, err := c.during(func() error { return sleep(ctx, 10*time.Second) })
	c.idle = cpu{used.server / took.Seconds(), used.installed / took.Seconds()}
	return err
}

// job returns the rate at which the controller manager creates the pods of a Job, per second.
func (c *creator) job(ctx context.Context) (rate float64, err error) {
	const pods = 300
	watching, stop := context.WithCancel(ctx)
	defer stop()
	events, err := c.watchPods(watching, unrecordedNamespace)
	if err != nil {
		return 0, err
	}
	n := int32(pods)
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: unrecordedNamespace, Name: "job"},
		Spec: batchv1.JobSpec{Parallelism: &n, Completions: &n, Template: corev1.PodTemplateSpec{
			Spec: plainPod(unrecordedNamespace, "", nil).Spec,
		}},
	}
	job.Spec.Template.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: holdGate}}
	job.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	begin := time.Now()
	if err := c.client.Create(ctx, job); err != nil {
		return 0, err
	}
	made := map[types.UID]bool{}
	last, err := await(ctx, "the pods of a Job", events, func(e podEvent) bool {
		made[e.pod.UID] = true
		return len(made) == pods
	})
	if err != nil {
		return 0, err
	}
	if err := c.client.Delete(ctx, job, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		return 0, err
	}
	err = until(ctx, "the Job to be gone", func() (bool, error) {
		err := c.client.Get(ctx, client.ObjectKeyFromObject(job), &batchv1.Job{})
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
	if err != nil {
		return 0, err
	}
	return pods / last.at.Sub(begin).Seconds(), c.settle(ctx)
}

// The contestants of measureCreates: a cluster without stayput, one with it, and one that has pools as well.
const (
	withoutStayput = iota
	withStayput
	withPools
	creatorsInAll
)

// gates are the flags of an API server so that pods are gated by policies, if its version has them only when told to.
// Else it calls a webhook.
func (b *bench) gates() []string {
	switch b.kubernetes {
	case "":
		return nil
	case "1.34", "1.35":
		return lab.BetaPolicies
	default:
		return lab.WebhooksByEndpoint
	}
}

func measureCreates(ctx context.Context, b *bench) (rows []table.Row, err error) {
	var all [creatorsInAll]*creator
	for i := range all {
		o := objectsOnly
		o.Versions.Kubernetes, o.APIServerArgs = b.kubernetes, b.gates()
		if i != withoutStayput {
			o.Product, o.IPAM = b.product, "stayput"
		}
		w, err := b.start(ctx, o)
		if err != nil {
			return nil, err
		}
		switch pools := i == withPools; {
		case i == withoutStayput:
		case b.kubernetes == "":
			err = w.install(ctx, lab.ProcessOptions{Controllers: replicas, Pools: pools})
		default:
			err = w.installPods(ctx, map[string]any{"pools": map[string]any{"enabled": pools}})
		}
		if err != nil {
			return nil, err
		}
		defer func() { err = w.end(ctx, err) }()
		if i == withPools {
			if err := w.makePool(ctx, stayputv1alpha1.ModeL2, "10.6.0.0/16"); err != nil {
				return nil, err
			}
		}
		if all[i], err = w.newCreator(ctx, recordedWorkloads); err != nil {
			return nil, err
		}
		if i != withoutStayput {
			if err := all[i].record(ctx); err != nil {
				return nil, err
			}
		}
		if err := w.settle(ctx); err != nil {
			return nil, err
		}
	}
	if rows, err = compareJobs(ctx, b, all[withPools], all[withoutStayput]); err != nil {
		return rows, err
	}
	for _, c := range all {
		// It would delete the stored pods, which belong to no workload.
		if err := c.ControllerManager.Stop(); err != nil {
			return rows, err
		}
		if err := c.rest(ctx); err != nil {
			return rows, err
		}
	}
	more, err := compareDryRuns(ctx, b, all)
	if rows = append(rows, more...); err != nil {
		return rows, err
	}
	more, err = compareStored(ctx, b, all[withStayput], all[withoutStayput])
	return append(rows, more...), err
}

const againstNothing = "a cluster without stayput"

func compareJobs(ctx context.Context, b *bench, ours, stock *creator) ([]table.Row, error) {
	n := b.times(6)
	say("creates: Jobs: %d rounds (load %s)", n, table.Load())
	var rates [2][]float64
	for round := range n + 1 {
		for turn := range 2 {
			which := (round + turn) % 2
			rate, err := [...]*creator{ours, stock}[which].job(ctx)
			if err != nil {
				return nil, err
			}
			if round > 0 { // the first one warms up
				rates[which] = append(rates[which], rate)
			}
		}
	}
	return []table.Row{{
		What: "pods of a Job per second, pools on", Against: againstNothing, Goal: table.AtLeast(0.95),
		Figure: measured("", ratio, rates[0], rates[1]),
		Detail: extent("%.0f/s", rates[0]) + " / " + extent("%.0f/s", rates[1]),
	}}, nil
}

// compareDryRuns measures what a create costs, and how long it takes.
func compareDryRuns(ctx context.Context, b *bench, all [creatorsInAll]*creator) (rows []table.Row, err error) {
	type sample struct{ server, sum, rate, latency []float64 }
	plain := [2]table.Goal{table.AtMost(1.1), table.AtMost(1.1)}
	type contest struct {
		pods, name string
		in         int
		gated      bool
		goals      [2]table.Goal // of CPU and latency
		namespace  string
		of         [2]sample
	}
	var contests []*contest
	for _, namespace := range []string{createsNamespace, unrecordedNamespace} {
		contests = append(contests,
			&contest{pods: plainSets, name: "plain", in: withStayput, goals: plain, namespace: namespace},
			&contest{pods: annotated, name: "annotated", in: withStayput, gated: true,
				goals: [2]table.Goal{table.AtMost(1.5), table.AtMost(1.2)}, namespace: namespace},
			&contest{pods: plainSets, name: "plain, pools on", in: withPools, goals: plain, namespace: namespace},
			&contest{pods: ofPool, name: "of a pool", in: withPools, gated: true,
				goals: [2]table.Goal{table.AtMost(1.6), table.AtMost(1.2)}, namespace: namespace})
	}
	contests = append(contests,
		&contest{pods: recorded, name: "recorded", in: withStayput, gated: true, namespace: createsNamespace})
	for _, k := range contests {
		for _, in := range []int{k.in, withoutStayput} {
			pod := all[in].pod(k.pods, "probe", 0)
			pod.Namespace = k.namespace
			if err := all[in].makers[0].Create(ctx, pod, client.DryRunAll); err != nil {
				return nil, err
			}
			if want := k.gated && in == k.in; gated(pod) != want {
				return nil, fmt.Errorf("pod %s in cluster %d: gated is %t", k.pods, in, !want)
			}
		}
	}
	n := b.times(10)
	for round := range n + 1 {
		say("creates: dry-run, round %d of %d (load %s)", round, n, table.Load())
		for at := range contests {
			k := contests[at]
			if round%2 == 1 {
				k = contests[len(contests)-1-at]
			}
			for turn := range 2 {
				which := (round + turn) % 2
				c := all[[...]int{k.in, withoutStayput}[which]]
				each, rate, err := c.batch(ctx, k.pods, k.namespace, client.DryRunAll)
				if err != nil {
					return nil, err
				}
				took, err := c.oneByOne(ctx, k.pods, k.namespace)
				if err != nil {
					return nil, err
				}
				if of := &k.of[which]; round > 0 { // the first one warms up
					of.server, of.sum = append(of.server, each.server), append(of.sum, each.sum())
					of.rate, of.latency = append(of.rate, rate), append(of.latency, median(took))
				}
			}
		}
	}
	for _, k := range contests {
		where := "a namespace with PersistentPodStates"
		if k.namespace == unrecordedNamespace {
			where = "a namespace without any"
		}
		ours, stock := k.of[0], k.of[1]
		rows = append(rows, table.Row{
			What: "CPU of a create, " + k.name + ", " + where, Against: againstNothing, Goal: k.goals[0],
			Figure: measured("", ratio, ours.sum, stock.sum),
			Detail: fmt.Sprintf("%s / %s; API server and etcd alone %.3f ms; %.0f/s / %.0f/s", extent("%.3f ms", ours.sum),
				extent("%.3f ms", stock.sum), median(ours.server), median(ours.rate), median(stock.rate)),
		}, table.Row{
			What: "  its latency, one client", Against: againstNothing, Goal: k.goals[1],
			Figure: measured("", ratio, ours.latency, stock.latency),
			Detail: extent("%.2f ms", ours.latency) + " / " + extent("%.2f ms", stock.latency),
		})
	}
	return rows, nil
}

// compareStored measures how fast pods are created, and stored.
func compareStored(ctx context.Context, b *bench, ours, stock *creator) (rows []table.Row, err error) {
	both := [...]*creator{ours, stock}
	for _, k := range []struct{ pods, how string }{
		{replicaSets, "stored"},
		{plainSets, "stored"},
		{annotated, "stored, the controller placing them meanwhile"},
	} {
		var rates, server [2][]float64
		var installed []float64
		n := b.times(12)
		say("creates: pods %s, %s: %d rounds (load %s)", k.pods, k.how, n, table.Load())
		for round := range n + 1 {
			for turn := range both {
				which := (round + turn) % 2
				each, rate, err := both[which].batch(ctx, k.pods, createsNamespace)
				if err != nil {
					return nil, err
				}
				if round > 0 { // the first one warms up
					rates[which] = append(rates[which], rate)
					server[which] = append(server[which], each.server)
					if which == 0 {
						installed = append(installed, each.installed)
					}
				}
			}
		}
		rows = append(rows, table.Row{
			What: fmt.Sprintf("creates of pods per second, %s, %s", k.pods, k.how), Against: againstNothing,
			Goal:   table.AtLeast(0.9),
			Figure: measured("", ratio, rates[0], rates[1]),
			Detail: fmt.Sprintf("%s / %s; until the last create, CPU of API server and etcd per create %.2f ms / %.2f ms, "+
				"of stayput %.2f ms",
				extent("%.0f/s", rates[0]), extent("%.0f/s", rates[1]), median(server[0]), median(server[1]),
				median(installed)),
		})
	}
	return rows, nil
}
