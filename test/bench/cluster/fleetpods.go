package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/lab"
)

// stage is how far a pod has come.
type stage int

const (
	bound stage = iota + 1
	running
	ended
	gone
)

// prepare makes the pool, and then stops all that would act on the objects.
func (f *fleet) prepare(ctx context.Context) error {
	for range scaleClients {
		c, err := f.newClient()
		if err != nil {
			return err
		}
		f.clients = append(f.clients, c)
	}
	if err := f.namespace(ctx, scaleNamespace); err != nil {
		return err
	}
	for i := range scaleSets / setsOfNamespace {
		if err := f.namespace(ctx, setNamespace(i*setsOfNamespace)); err != nil {
			return err
		}
	}
	if err := f.makePool(ctx, stayputv1alpha1.ModeRouted, fleetSubnet.String()); err != nil {
		return err
	}
	node := f.Nodes[0]
	err := errors.Join(f.controller.Stop(), f.ControllerManager.Stop(), f.Scheduler.Stop(), node.AgentProcess.Stop(),
		node.Kubelet.Stop())
	if err != nil {
		return err
	}
	meta := metav1.ObjectMeta{Name: node.Name}
	err = errors.Join(f.client.Delete(ctx, &corev1.Node{ObjectMeta: meta}),
		f.client.Delete(ctx, &stayputv1alpha1.PodIPReport{ObjectMeta: meta}))
	if err != nil {
		return err
	}
	if err := f.makeModels(ctx); err != nil {
		return err
	}
	return f.makePodIP(ctx)
}

// makePodIP has the API server create a PodIP as controller and agent write it. The first copy replaces it.
func (f *fleet) makePodIP(ctx context.Context) error {
	uid := string(uuid.NewUUID())
	f.podip = &stayputv1alpha1.PodIP{
		ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPName(f.address(0)),
			Finalizers: []string{stayputv1alpha1.FinalizerInUse}},
		Spec: stayputv1alpha1.PodIPSpec{
			Pool: poolName, Mode: stayputv1alpha1.ModeRouted, Namespace: scaleNamespace, PodName: podName(0),
			PodUID: uid, Interface: pool.DefaultInterface, Retention: "while-owned",
			WhenScaled: stayputv1alpha1.PolicyRelease, WhenDeleted: stayputv1alpha1.PolicyRelease,
			Workload: &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: uid},
		},
	}
	if err := f.client.Create(ctx, f.podip, client.FieldOwner(stayputv1alpha1.ControllerFieldManager)); err != nil {
		return err
	}
	status := fmt.Sprintf(`{"apiVersion":"stayput.io/v1alpha1","kind":"PodIP","metadata":{"name":%q},"status":`+
		`{"phase":"Bound","podUID":%q,"nodeName":%q,"podCIDR":%q,"since":"2026-01-01T00:00:00Z"}}`,
		f.podip.Name, uid, fakeNode(0), netip.PrefixFrom(podCIDRs.Addr(), 24))
	return f.client.Status().Patch(ctx, f.podip, client.RawPatch(types.ApplyPatchType, []byte(status)),
		client.FieldOwner(stayputv1alpha1.AgentFieldManager), client.ForceOwnership)
}

// address is the one of the n-th pod of the pool.
func (f *fleet) address(n int) netip.Addr { return addrFrom(fleetSubnet, 256+n) }

// grow puts nodes and pods into etcd, and makes the agents with what they know of their pods. All pods run.
func (f *fleet) grow(ctx context.Context, n int) error {
	begin := time.Now()
	f.nodes, f.sets, f.workloads = n, n, make([]*stayputv1alpha1.WorkloadReference, n)
	for i := range n {
		a, err := f.newAgent(i)
		if err != nil {
			return err
		}
		f.agents = append(f.agents, a)
	}
	err := f.store(ctx, n, func(i int) []client.Object {
		node, set := f.copyNode(i), f.copySet(i)
		node.Labels[corev1.LabelTopologyZone], node.Spec.Unschedulable = fmt.Sprint("zone-", i*10/n), false
		node.Spec.PodCIDR = f.agents[i].podCIDR.String()
		node.Spec.PodCIDRs = []string{node.Spec.PodCIDR}
		f.workloads[i] = &stayputv1alpha1.WorkloadReference{
			APIVersion: "apps/v1", Kind: "StatefulSet", Name: set.Name, UID: string(set.UID),
		}
		return []client.Object{node, set}
	})
	if err != nil {
		return err
	}
	var failed atomic.Pointer[error]
	err = f.store(ctx, f.pods(), func(i int) []client.Object {
		pod, a := f.copyPod(i), f.agents[i/podsOfSet/podsOfSet*podsOfSet+i%podsOfSet]
		objects := []client.Object{pod}
		if pod.Annotations = nil; f.pooled(i) {
			objects = append(objects, f.placed(pod, f.address(f.numberOf(i)), f.workloads[i/podsOfSet], a))
		}
		if _, err := a.add(pod); err != nil {
			failed.Store(&err)
		}
		return objects
	})
	if why := failed.Load(); why != nil {
		err = errors.Join(err, *why)
	}
	if err != nil {
		return err
	}
	err = f.has(ctx, map[client.ObjectList]int{
		&corev1.NodeList{}: n, &appsv1.StatefulSetList{}: n, &corev1.PodList{}: f.pods(),
		&stayputv1alpha1.PodIPList{}: f.pods() / pooledEvery,
	})
	if err != nil {
		return err
	}
	say("fleet: %d nodes and %d pods are there after %.0f s", n, f.pods(), time.Since(begin).Seconds())
	f.moves.reset(n)
	return parallel(ctx, n, 16, func(ctx context.Context, _, i int) error {
		var err error
		f.agents[i].token, err = f.AccountToken(ctx, lab.SystemNamespace, lab.AgentAccount, fakeNode(i))
		return err
	})
}

// pooled reports whether the i-th pod has an address of the pool, and numberOf which one.
func (f *fleet) pooled(i int) bool  { return i/podsOfSet%pooledEvery == 0 }
func (f *fleet) numberOf(i int) int { return i/podsOfSet/pooledEvery*podsOfSet + i%podsOfSet }

// podOfNumber is the reverse of numberOf.
func (f *fleet) podOfNumber(n int) types.NamespacedName {
	namespace, name, _ := podOf(n/podsOfSet*pooledEvery*podsOfSet + n%podsOfSet)
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// placed makes a pod one that runs on a node with an address of the pool, and returns its PodIP.
func (f *fleet) placed(
	pod *corev1.Pod, addr netip.Addr, of *stayputv1alpha1.WorkloadReference, a *agent,
) client.Object {
	pod.Labels[pooledLabel] = "true"
	pod.Annotations = map[string]string{
		stayputv1alpha1.AnnotationPools: poolName,
		stayputv1alpha1.AnnotationAddresses: fmt.Sprintf(`[{"interface":"eth0","pool":%q,"mode":"Routed","address":%q}]`,
			poolName, netip.PrefixFrom(addr, fleetSubnet.Bits())),
	}
	pod.Status.PodIP, pod.Status.PodIPs = addr.String(), []corev1.PodIP{{IP: addr.String()}}
	f.mu.Lock()
	f.stages[pod.UID] = running
	f.mu.Unlock()
	ip := f.podip.DeepCopy()
	ip.Name, ip.UID = stayputv1alpha1.PodIPName(addr), uuid.NewUUID()
	ip.Spec.Namespace, ip.Spec.PodName, ip.Spec.PodUID, ip.Spec.Workload = pod.Namespace, pod.Name, string(pod.UID), of
	ip.Status.PodUID, ip.Status.NodeName, ip.Status.PodCIDR = string(pod.UID), a.name, a.podCIDR.String()
	return ip
}

// follow acts on the pods of the pool until ctx ends.
func (f *fleet) follow(ctx context.Context) error {
	events, err := f.watchPods(ctx, "", client.MatchingLabels{pooledLabel: "true"})
	if err != nil {
		return err
	}
	go func() {
		for e := range events {
			f.react(ctx, e)
		}
	}()
	return nil
}

// reaches notes how far a pod has come, and reports whether that is new.
func (f *fleet) reaches(pod *corev1.Pod, at stage) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	is := f.stages[pod.UID] < at
	if is {
		f.stages[pod.UID] = at
	}
	return is
}

// react does the next step of a pod, unless Stayput has to act first.
func (f *fleet) react(ctx context.Context, e podEvent) {
	pod := e.pod
	var do func(context.Context, *corev1.Pod) error
	switch {
	case e.kind == watch.Deleted:
		if f.reaches(pod, gone) {
			do = f.replace
		}
	case pod.DeletionTimestamp != nil:
		if f.reaches(pod, ended) {
			do = f.terminate
		}
	case gated(pod):
	case pod.Spec.NodeName == "":
		if f.reaches(pod, bound) {
			do = f.bind
		}
	case f.reaches(pod, running):
		do = f.run
	}
	if do == nil {
		return
	}
	go func() {
		if err := do(ctx, pod); err != nil && ctx.Err() == nil {
			say("fleet: pod %s/%s: %v", pod.Namespace, pod.Name, err)
		}
	}()
}

// room waits for room among what is asked of the API server at a time.
func (f *fleet) room(do func() error) error {
	f.busy <- struct{}{}
	defer func() { <-f.busy }()
	return do()
}

func (f *fleet) replace(ctx context.Context, pod *corev1.Pod) error {
	next := plainPod(pod.Namespace, pod.Name, pooled)
	next.Labels, next.OwnerReferences = pod.Labels, pod.OwnerReferences
	return f.room(func() error { return f.client.Create(ctx, next) })
}

func (f *fleet) terminate(ctx context.Context, pod *corev1.Pod) error {
	a := f.agentOf(pod)
	if a != nil {
		if err := a.remove(pod); err != nil {
			return err
		}
		a.look(pod, true)
	}
	return f.room(func() error { return f.remove(ctx, pod) })
}

func (f *fleet) agentOf(pod *corev1.Pod) *agent {
	var i int
	if _, err := fmt.Sscanf(pod.Spec.NodeName, "fake-%d", &i); err != nil {
		return nil
	}
	return f.agents[i]
}

func (f *fleet) bind(ctx context.Context, pod *corev1.Pod) error {
	f.mu.Lock()
	f.next++
	to := f.lost + f.next*7%(f.nodes-f.lost) // not where the last one was, nor all to neighbours
	f.mu.Unlock()
	return f.room(func() error {
		return f.client.SubResource("binding").Create(ctx, pod,
			&corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: fakeNode(to)}})
	})
}

const (
	sandboxAfter = 200 * time.Millisecond // from a pod's binding to its ADD
	kubeletAgain = 12 * time.Second       // if that fails
)

func (f *fleet) run(ctx context.Context, pod *corev1.Pod) error {
	if err := sleep(ctx, sandboxAfter); err != nil {
		return err
	}
	a, waited := f.agentOf(pod), time.Duration(0)
	addr, err := a.add(pod)
	for ; errors.Is(err, ledger.ErrNotGranted); addr, err = a.add(pod) { // as the plugin does, and kubelet
		pause := ledger.Pause
		if waited += pause; waited%ledger.Patience == 0 {
			pause = kubeletAgain
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	a.look(pod, false)
	status := fmt.Sprintf(`{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}],"startTime":%q,"conditions":[`+
		`{"type":"Ready","status":"True"},{"type":"ContainersReady","status":"True"}]}}`, addr, addr,
		time.Now().UTC().Format(time.RFC3339))
	err = f.room(func() error {
		return f.client.SubResource("status").Patch(ctx, pod.DeepCopy(),
			client.RawPatch(types.StrategicMergePatchType, []byte(status)))
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.started[client.ObjectKeyFromObject(pod)]++
	return err
}

// starts is how often a pod has started.
func (f *fleet) starts(name types.NamespacedName) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.started[name]
}

// roll deletes pods of the pool, so many at a time, and waits until their successors run.
func (f *fleet) roll(ctx context.Context, n, atOnce int) error {
	return parallel(ctx, n, atOnce, func(ctx context.Context, worker, i int) error {
		name := f.podOfNumber(f.pods()/pooledEvery - 1 - i) // the first ones are in the zone that will be lost
		was := f.starts(name)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
		if err := f.clients[worker%len(f.clients)].Delete(ctx, pod); err != nil {
			return err
		}
		for since := time.Now(); f.starts(name) == was; {
			if time.Since(since) > 2*patience {
				return fmt.Errorf("pod %s does not start", name)
			}
			if err := sleep(ctx, 20*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	})
}
