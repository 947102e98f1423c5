package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	rules "github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/lab"
)

// breaker carries out the steps of the schedule.
type breaker struct {
	cluster  *lab.Cluster
	client   client.Client
	machines []*machine
	report   *report
	weather  *weather
	lives    *lives
	// runningOn returns the pods of the workloads that run on a node.
	runningOn func(node string) []string

	open sync.WaitGroup // steps that are not healed yet

	mu     sync.Mutex
	server struct {
		sync.Mutex // held while the API server is started or stopped
		down       int
	}
	undos    map[string]int // such as "uncordon node-1" -> how many open faults it will undo
	rollouts int
	broken   error // of what could not be healed
}

// errNothing: there is nothing that the step could break. The rest of the text says why.
var errNothing = errors.New("nothing to break")

func nothing(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errNothing, fmt.Sprintf(format, args...))
}

// striking bounds one request that breaks something.
const striking = 20 * time.Second

// strike breaks something. heal, if it is not nil, has to be called, whatever the error.
type strike func(ctx context.Context, s step) (what string, heal func(context.Context) error, err error)

// begin carries out a step in the background: wait waits until all of them are healed.
func (b *breaker) begin(ctx context.Context, s step, strike strike) {
	b.open.Go(func() {
		what, heal, err := strike(ctx, s)
		switch {
		case ctx.Err() != nil && heal == nil:
			return
		case errors.Is(err, errNothing):
			b.report.count(tableSkipped, string(s.kind))
			b.report.note("%s: %v", s, err)
		case err != nil:
			// The request may have had its effect all the same, or not.
			b.report.count(tableFaults, string(s.kind))
			b.report.say("%s: %s: %s", s, what, strings.ReplaceAll(err.Error(), "\n", "; "))
		default:
			b.report.count(tableFaults, string(s.kind))
			b.report.say("%s: %s%s", s, what, lasting(s.lasts))
		}
		if heal == nil {
			return
		}
		sleep(ctx, s.lasts)
		if err := heal(ctx); err != nil && ctx.Err() == nil {
			b.fail(fmt.Errorf("healing %s: %w", s, err))
			return
		}
		if s.lasts > 0 {
			b.report.say("%s: healed", s)
		}
	})
}

func lasting(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return fmt.Sprintf(", for %.1fs", d.Seconds())
}

// fail notes that the run cannot go on.
func (b *breaker) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.broken == nil {
		b.broken = err
		b.report.say("cannot go on: %v", err)
	}
}

// wait waits until every step is healed.
func (b *breaker) wait() error {
	b.open.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.broken
}

// strike is what can happen to pods whose addresses are their nodes'.
func (b *breaker) strike(ctx context.Context, s step) (what string, heal func(context.Context) error, err error) {
	rnd := rand.New(rand.NewPCG(s.pick, 0))
	m, set := b.machines[s.node], sets[s.set]
	short, cancel := context.WithTimeout(ctx, striking)
	defer cancel()
	switch s.kind {
	case deletePods, forceDeletePods:
		what, err = b.deletePods(short, set, s.kind == forceDeletePods, rnd)
	case rollout:
		what, err = b.rollOut(short, set)
	case scale:
		return b.scale(short, set, rnd)
	case stopSandbox, killSandbox:
		what, err = b.endSandbox(short, m, s.kind == killSandbox, rnd)
	case crashContainer:
		what, err = b.crash(short, m, rnd)
	case restartContainerd:
		heal, err = m.take(containerd, "containerd restarts", m.StopContainerd)
		return "containerd of " + m.Name, heal, err
	case killContainerd:
		heal, err = m.take(containerd, "containerd was killed", m.KillContainerd)
		return "containerd of " + m.Name, heal, err
	case restartKubelet:
		heal, err = m.take(kubelet, "kubelet restarts", m.Kubelet.Stop)
		return "kubelet of " + m.Name, heal, err
	case killKubelet:
		heal, err = m.take(kubelet, "kubelet was killed", m.Kubelet.Kill)
		return "kubelet of " + m.Name, heal, err
	case losePower:
		heal, err = m.take(power, "without power", m.PowerLoss)
		return m.Name, heal, err
	case killAgent:
		b.weather.strikes(agentOf(m.Name), "was killed", lately)
		what, err = b.killContainer(short, m.ClusterNode, "agent", "")
	case killLeader:
		what, err = b.killLeader(short)
	case restartServer, stopServer:
		heal, err = b.stopServer()
		return "the API server", heal, err
	case cordonNode, drainNode:
		return b.cordon(short, m, s.kind == drainNode)
	case deleteNode:
		return b.deleteNode(short, m)
	case deleteObjects:
		what, err = b.deleteObjects(short, rnd)
	default:
		err = fmt.Errorf("unknown kind of fault %q", s.kind)
	}
	return what, nil, err
}

// unserved returns errNothing while the API server is down.
func (b *breaker) unserved() error {
	if b.weather.between(b.report.now(), b.report.now(), theServer) != "" {
		return nothing("there is no API server")
	}
	return nil
}

func (b *breaker) deletePods(ctx context.Context, set *workload, force bool, rnd *rand.Rand) (string, error) {
	names := b.lives.pods(set)
	if len(names) == 0 {
		return "", nothing("%s has no pods", set.name)
	}
	if err := b.unserved(); err != nil {
		return "", err
	}
	return b.deleteSome(ctx, names, force, rnd)
}

// deleteSome deletes some of the pods.
func (b *breaker) deleteSome(ctx context.Context, names []string, force bool, rnd *rand.Rand) (string, error) {
	rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	if rnd.IntN(3) > 0 { // else all of them
		names = names[:1+rnd.IntN(len(names))]
	}
	slices.Sort(names)
	o := metav1.DeleteOptions{}
	if force {
		now := int64(0)
		o.GracePeriodSeconds = &now
	}
	var errs []error
	for _, name := range names {
		err := b.cluster.Client().CoreV1().Pods(namespace).Delete(ctx, name, o)
		if !apierrors.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return strings.Join(names, " "), errors.Join(errs...)
}

func (b *breaker) rollOut(ctx context.Context, set *workload) (string, error) {
	if err := b.unserved(); err != nil {
		return "", err
	}
	b.mu.Lock()
	b.rollouts++
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"chaos/rollout":"%d"}}}}}`, b.rollouts)
	b.mu.Unlock()
	return set.name, b.client.Patch(ctx, set.object(), client.RawPatch(types.MergePatchType, []byte(patch)))
}

func (b *breaker) scale(ctx context.Context, set *workload, rnd *rand.Rand) (
	what string, heal func(context.Context) error, err error) {
	if err := b.unserved(); err != nil {
		return "", nil, err
	}
	replicas := int32(0)
	if rnd.IntN(2) > 0 {
		replicas = rnd.Int32N(set.replicas)
	}
	heal = b.undo("scale "+set.name, func(ctx context.Context) error { return b.setScale(ctx, set, set.replicas) })
	return fmt.Sprintf("%s to %d", set.name, replicas), heal, b.setScale(ctx, set, replicas)
}

// setScale tells the observers before and after the API server: it may be carried out even if it answers an error.
func (b *breaker) setScale(ctx context.Context, set *workload, replicas int32) error {
	if replicas < set.replicas {
		b.lives.scaled(set, replicas)
	}
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
	err := b.client.Patch(ctx, set.object(), client.RawPatch(types.MergePatchType, patch))
	if err == nil {
		b.lives.scaled(set, replicas)
	}
	return err
}

// undo counts one more fault that do undoes, and returns how to heal it. Of several at once, those with the same what,
// the last one to be healed calls do, until it succeeds.
func (b *breaker) undo(what string, do func(context.Context) error) (heal func(context.Context) error) {
	b.mu.Lock()
	b.undos[what]++
	b.mu.Unlock()
	return func(ctx context.Context) error {
		b.mu.Lock()
		b.undos[what]--
		others := b.undos[what] > 0
		b.mu.Unlock()
		if others {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, healing)
		defer cancel()
		return lab.Until(ctx, "the API server to "+what, func() (bool, error) {
			err := do(ctx)
			return err == nil, err
		})
	}
}

// sandboxes returns what the container runtime of a node says, by ID.
func (b *breaker) sandboxes(ctx context.Context, n *lab.ClusterNode) (map[string]*runtimeapi.PodSandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, striking)
	defer cancel()
	all, err := n.Node.Pods(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]*runtimeapi.PodSandbox{}
	for _, s := range all {
		found[s.Id] = s
	}
	return found, nil
}

func (b *breaker) endSandbox(ctx context.Context, m *machine, kill bool, rnd *rand.Rand) (string, error) {
	if !m.up() {
		return "", nothing("%s is down", m.Name)
	}
	all, err := b.sandboxes(ctx, m.ClusterNode)
	if err != nil {
		return "sandboxes of " + m.Name, err
	}
	var running []*runtimeapi.PodSandbox
	for _, s := range all {
		if s.Metadata.Namespace == namespace && s.State == runtimeapi.PodSandboxState_SANDBOX_READY {
			running = append(running, s)
		}
	}
	if len(running) == 0 {
		return "", nothing("%s runs no pods", m.Name)
	}
	slices.SortFunc(running, func(a, b *runtimeapi.PodSandbox) int {
		return strings.Compare(a.Metadata.Name+a.Id, b.Metadata.Name+b.Id)
	})
	s := running[rnd.IntN(len(running))]
	what := fmt.Sprintf("%s on %s (%.12s)", s.Metadata.Name, m.Name, s.Id)
	if kill {
		return what, b.killPause(ctx, m.ClusterNode, s.Id)
	}
	return what, m.StopPod(ctx, s.Id)
}

// killPause kills the pause process of a sandbox with SIGKILL.
func (b *breaker) killPause(ctx context.Context, n *lab.ClusterNode, id string) error {
	status, err := n.PodStatus(ctx, id)
	if err != nil {
		return err
	}
	var info struct{ Pid int } // as the node sees it
	if err := json.Unmarshal([]byte(status.Info["info"]), &info); err != nil {
		return fmt.Errorf("reading containerd's status of %s: %w", id, err)
	}
	if info.Pid == 0 {
		return nothing("%s has ended", id)
	}
	_, err = n.Run(ctx, "/bin/sh", "-c", fmt.Sprint("kill -KILL ", info.Pid))
	return err
}

// crash kills the container of a pod.
func (b *breaker) crash(ctx context.Context, m *machine, rnd *rand.Rand) (string, error) {
	var here []life
	for _, pod := range b.lives.running() {
		if pod.node == m.Name {
			here = append(here, pod)
		}
	}
	if len(here) == 0 {
		return "", nothing("%s runs no pods", m.Name)
	}
	if !m.up() {
		return "", nothing("%s is down", m.Name)
	}
	return b.killContainer(ctx, m.ClusterNode, "web", here[rnd.IntN(len(here))].name)
}

// killContainer kills a container on a node with SIGKILL, without the help of the API server. Its kubelet restarts it.
func (b *breaker) killContainer(ctx context.Context, n *lab.ClusterNode, container, pod string) (string, error) {
	what := strings.TrimSpace(container + " " + pod + " on " + n.Name)
	labels := map[string]string{"io.kubernetes.container.name": container}
	if pod != "" {
		labels["io.kubernetes.pod.name"] = pod
	}
	list, err := n.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		State:         &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
		LabelSelector: labels,
	}})
	if err != nil {
		return what, nothing("%s: %v", what, err)
	}
	if len(list.Containers) == 0 {
		return what, nothing("%s does not run", what)
	}
	_, err = n.CRI().StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: list.Containers[0].Id})
	return what, err
}

func (b *breaker) killLeader(ctx context.Context) (string, error) {
	if err := b.unserved(); err != nil {
		return "", err
	}
	lease, err := b.cluster.Client().CoordinationV1().Leases(lab.SystemNamespace).Get(ctx, "stayput-controller",
		metav1.GetOptions{})
	if err != nil {
		return "the leader", err
	}
	if lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "" {
		return "", nothing("nobody leads")
	}
	pod, _, _ := rules.LeaderOf(*lease.Spec.HolderIdentity)
	b.weather.strikes(theController, "the leader was killed", lately)
	return b.killContainer(ctx, b.cluster.ControlNode, "controller", pod)
}

func (b *breaker) stopServer() (heal func(context.Context) error, err error) {
	ends := b.weather.begins(theServer, "down")
	b.server.Lock()
	defer b.server.Unlock()
	b.server.down++
	if b.cluster.APIServer.Process() != nil {
		err = b.cluster.APIServer.Kill()
	}
	return func(ctx context.Context) error {
		b.server.Lock()
		defer b.server.Unlock()
		defer ends()
		if b.server.down--; b.server.down > 0 || b.cluster.APIServer.Process() != nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, healing)
		defer cancel()
		// Controllers that lost their lease begin again.
		b.weather.strikes(theController, "the API server was down", lately)
		return b.cluster.APIServer.Start(ctx)
	}, err
}

// cordon cordons a node and, to drain it, evicts the pods of the workloads.
func (b *breaker) cordon(ctx context.Context, m *machine, drain bool) (
	what string, heal func(context.Context) error, err error) {
	if err := b.unserved(); err != nil {
		return "", nil, err
	}
	ends := b.weather.begins(m.Name, "cordoned")
	uncordon := b.undo("uncordon "+m.Name, func(ctx context.Context) error {
		return client.IgnoreNotFound(b.setUnschedulable(ctx, m.Name, false))
	})
	heal = func(ctx context.Context) error {
		defer ends()
		return uncordon(ctx)
	}
	err = b.setUnschedulable(ctx, m.Name, true)
	if drain && err == nil {
		err = b.evict(ctx, b.runningOn(m.Name))
	}
	return m.Name, heal, err
}

// evict evicts pods of the workloads.
func (b *breaker) evict(ctx context.Context, pods []string) error {
	var errs []error
	for _, pod := range pods {
		err := b.cluster.Client().CoreV1().Pods(namespace).EvictV1(ctx, &policyv1.Eviction{
			ObjectMeta: metav1.ObjectMeta{Name: pod, Namespace: namespace},
		})
		if !apierrors.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (b *breaker) setUnschedulable(ctx context.Context, node string, to bool) error {
	patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, to)
	_, err := b.cluster.Client().CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// deleteNode deletes the Node of a node that goes on running. Only a kubelet that starts registers its node.
func (b *breaker) deleteNode(ctx context.Context, m *machine) (
	what string, heal func(context.Context) error, err error) {
	if err := b.unserved(); err != nil {
		return "", nil, err
	}
	ends := b.weather.begins(m.Name, "its Node was deleted")
	gone := b.weather.begins(deletedNode(m.Name), "deleted")
	agentEnds := b.weather.begins(agentOf(m.Name), "its Node was deleted")
	heal = func(ctx context.Context) error {
		defer ends()
		defer gone()
		defer b.weather.strikes(agentOf(m.Name), "its Node was deleted", lately)
		defer agentEnds()
		return m.restartKubelet(ctx)
	}
	err = b.cluster.Client().CoreV1().Nodes().Delete(ctx, m.Name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		err = nil
	}
	return m.Name, heal, err
}

func (b *breaker) deleteObjects(ctx context.Context, rnd *rand.Rand) (string, error) {
	if err := b.unserved(); err != nil {
		return "", err
	}
	var list v1alpha1.RetainedIPList
	if err := b.client.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return "RetainedIPs", err
	}
	if len(list.Items) == 0 {
		return "", nothing("there are no RetainedIPs")
	}
	rnd.Shuffle(len(list.Items), func(i, j int) { list.Items[i], list.Items[j] = list.Items[j], list.Items[i] })
	if rnd.IntN(3) > 0 { // else all of them
		list.Items = list.Items[:1+rnd.IntN(min(4, len(list.Items)))]
	}
	b.weather.strikes(theObjects, "deleted", lately)
	var names []string
	var errs []error
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
		errs = append(errs, client.IgnoreNotFound(b.client.Delete(ctx, &list.Items[i])))
	}
	slices.Sort(names)
	return strings.Join(names, " "), errors.Join(errs...)
}

// whole reports what keeps the cluster from being at rest: nodes that take no pods, workloads without all their pods.
// Empty: nothing.
func (b *breaker) whole(ctx context.Context) (string, error) {
	nodes, err := b.cluster.Client().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	if len(nodes.Items) != len(b.machines)+1 {
		return fmt.Sprintf("%d Nodes", len(nodes.Items)), nil
	}
	for _, n := range nodes.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				return n.Name + " is not Ready", nil
			}
		}
		if n.Spec.Unschedulable {
			return n.Name + " is cordoned", nil
		}
	}
	for _, set := range sets {
		if why, err := b.short(ctx, set); err != nil || why != "" {
			return why, err
		}
	}
	pods, err := b.cluster.Client().CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for i := range pods.Items {
		if pod := &pods.Items[i]; !lab.Ready(pod) {
			return fmt.Sprintf("pod %s on %q is not Ready (%s)", pod.Name, pod.Spec.NodeName, state(pod)), nil
		}
	}
	return "", nil
}

func state(pod *corev1.Pod) string {
	switch {
	case pod.DeletionTimestamp != nil:
		return "being deleted"
	case gated(pod):
		return "gated"
	}
	return string(pod.Status.Phase)
}

// short returns what a workload lacks.
func (b *breaker) short(ctx context.Context, set *workload) (string, error) {
	o := set.object()
	if err := b.client.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
		return "", err
	}
	var generation, observed int64
	var ready, updated, all int32
	switch is := o.(type) {
	case *appsv1.StatefulSet:
		generation, observed, all = is.Generation, is.Status.ObservedGeneration, is.Status.Replicas
		ready, updated = is.Status.ReadyReplicas, is.Status.UpdatedReplicas
	case *appsv1.Deployment:
		generation, observed, all = is.Generation, is.Status.ObservedGeneration, is.Status.Replicas
		ready, updated = is.Status.ReadyReplicas, is.Status.UpdatedReplicas
	}
	if n := set.replicas; generation != observed || ready != n || updated != n || all != n {
		return fmt.Sprintf("%s has %d Ready pods, %d up to date, of %d", set.name, ready, updated, n), nil
	}
	return "", nil
}
