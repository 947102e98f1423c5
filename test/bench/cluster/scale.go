package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

// The full size. Every StatefulSet has podsOfSet pods, every pod a RetainedIP.
const (
	scaleNodes      = 5000
	scaleSets       = 5000
	podsOfSet       = 20
	setsOfNamespace = 50
	// firstShare of it is measured first.
	firstShare = 0.1

	scaleNamespace = "bench" // of the placed pods
	scaleClients   = 4
	// bookmarks is the share of a core that the API server may use per idle watch: every minute it sends each its resource
	// version.
	bookmarks = 1e-4
	// watchesOfConnection is below the API server's limit for one connection, 250.
	watchesOfConnection = 200
)

// landscape is a cluster full of objects without running pods: no scheduler, no controller manager, no kubelet.
type landscape struct {
	*world
	clients     []client.WithWatch
	nodes, sets int // made so far
	etcd        *store
	models      models
	workloads   []*stayputv1alpha1.WorkloadReference
	watches     []context.CancelFunc
	watching    atomic.Int64 // established watches
	lost        atomic.Int64 // watches that ended or could not be started
	seen        atomic.Int64 // bytes received by watches
	controller  *lab.ControllerProcess
}

func fakeNode(i int) string     { return fmt.Sprintf("fake-%04d", i) }
func setNamespace(s int) string { return fmt.Sprintf("scale-%03d", s/setsOfNamespace) }
func setName(s int) string      { return fmt.Sprintf("set-%04d", s) }

// podOf returns the i-th pod's namespace, name and node. Nodes are assigned in groups of as many StatefulSets as each
// has pods, so that every node has the same number of pods, whatever the size.
func podOf(i int) (namespace, name, node string) {
	set, pod := i/podsOfSet, i%podsOfSet
	return setNamespace(set), fmt.Sprintf("%s-%d", setName(set), pod), fakeNode(set/podsOfSet*podsOfSet + pod)
}

func (l *landscape) pods() int { return l.sets * podsOfSet }

// Every tenth node is in a zone whose nodes are all cordoned.
const (
	cordonedEvery = 10
	closedZone    = "zone-closed"
)

func cordoned(node int) bool { return node%cordonedEvery == cordonedEvery-1 }

// openNode is the n-th schedulable node; openNodes is their number.
func openNode(n int) int            { return n/(cordonedEvery-1)*cordonedEvery + n%(cordonedEvery-1) }
func (l *landscape) openNodes() int { return l.nodes / cordonedEvery * (cordonedEvery - 1) }

// figures are the measurements at one size.
type figures struct {
	setUp                    time.Duration
	watchUp                  time.Duration
	first, calm              time.Duration // from the controller's start to the first placement, and to idle
	calmCPU                  time.Duration
	rss, peak, serverRSS     float64
	latency                  []float64            // ms, of one placement
	cpu, serverCPU           map[string][]float64 // µs for one event, by kind, one for each batch
	bytesPerEvent            float64
	idleCPU                  float64 // share of a core
	nodes, sets, pods, watch int
}

func measureScale(ctx context.Context, b *bench) (rows []table.Row, err error) {
	w, err := b.startInstalled(ctx, objectsOnly, lab.ProcessOptions{Controllers: 1})
	if err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	l := &landscape{world: w, controller: w.ControllerProcesses[0], etcd: w.newStore()}
	for range scaleClients {
		c, err := w.newClient()
		if err != nil {
			return nil, err
		}
		l.clients = append(l.clients, c)
	}
	for i := range scaleSets / setsOfNamespace {
		if err := w.namespace(ctx, setNamespace(i*setsOfNamespace)); err != nil {
			return nil, err
		}
	}
	if err := w.namespace(ctx, scaleNamespace); err != nil {
		return nil, err
	}
	// From now on only Stayput's controller, which is measured, acts on the objects.
	err = errors.Join(l.controller.Stop(), w.ControllerManager.Stop(), w.Scheduler.Stop(), w.Nodes[0].AgentProcess.Stop(),
		w.Nodes[0].Kubelet.Stop())
	if err != nil {
		return nil, err
	}

	var sizes [2]*figures
	for i, share := range []float64{firstShare, 1} {
		groups := func(n float64) int { return max(1, int(n*share*b.scale)/podsOfSet) * podsOfSet }
		if sizes[i], err = l.measureSize(ctx, b, groups(scaleNodes), groups(scaleSets)); err != nil {
			return nil, err
		}
	}
	small, whole := sizes[0], sizes[1]
	size := func(f *figures) string {
		return fmt.Sprintf("%d nodes, %d pods, %d StatefulSets, %d RetainedIPs, %d watches", f.nodes, f.pods, f.sets, f.pods,
			f.watch)
	}
	const s = " s"
	for _, f := range sizes {
		against := size(f)
		rows = append(rows,
			table.Row{What: "controller, RSS", Against: against, Goal: table.AtMost(450),
				Figure: table.Figure{Value: f.rss, Unit: " MiB", N: 1},
				Detail: fmt.Sprintf("peak %.0f MiB; kube-apiserver %.0f MiB; set up in %.0f s, watches in %.1f s", f.peak,
					f.serverRSS, f.setUp.Seconds(), f.watchUp.Seconds())},
			table.Row{What: "  start -> first placement", Against: against, Goal: table.AtMost(10),
				Figure: table.Figure{Value: f.first.Seconds(), Unit: s, N: 1},
				Detail: fmt.Sprintf("at rest after %.1f s and %.1f s of CPU; idle %.2f %% of a core", f.calm.Seconds(),
					f.calmCPU.Seconds(), f.idleCPU*100)},
			table.Row{What: "  one placement, p50", Against: against, Figure: measured(" ms", median, f.latency),
				Detail: fmt.Sprintf("p99 %.1f ms", quantile(0.99)(f.latency))},
		)
	}
	for _, kind := range eventKinds {
		rows = append(rows, table.Row{
			What: "controller's CPU for one " + kind.name, Against: "a tenth of the objects", Goal: table.AtMost(1.25),
			Figure: measured("", ratio, whole.cpu[kind.name], small.cpu[kind.name]),
			Detail: extent("%.0f µs", whole.cpu[kind.name]) + " / " + extent("%.0f µs", small.cpu[kind.name]),
		})
	}
	const update = "RetainedIP update"
	rows = append(rows, table.Row{
		What:    "kube-apiserver's CPU for one " + update,
		Against: fmt.Sprintf("%d watches of agents, not %d", whole.watch, small.watch),
		Figure:  measured("", ratio, whole.serverCPU[update], small.serverCPU[update]),
		Detail: extent("%.0f µs", whole.serverCPU[update]) + " / " + extent("%.0f µs", small.serverCPU[update]) +
			fmt.Sprintf("; the agents received %.0f bytes for each", whole.bytesPerEvent),
	})
	return rows, nil
}

// measureSize grows the cluster to a size, starts the controller and measures.
func (l *landscape) measureSize(ctx context.Context, b *bench, nodes, sets int) (*figures, error) {
	f := &figures{cpu: map[string][]float64{}, serverCPU: map[string][]float64{}}
	begin := time.Now()
	if err := l.grow(ctx, nodes, sets); err != nil {
		return nil, err
	}
	f.setUp = time.Since(begin)
	f.nodes, f.sets, f.pods, f.watch = l.nodes, l.sets, l.pods(), l.nodes
	begin = time.Now()
	if err := l.watchAsAgents(ctx); err != nil {
		return nil, err
	}
	defer l.stopWatches()
	f.watchUp = time.Since(begin)
	server := l.APIServer.Process()
	quiet := 0.1 + bookmarks*float64(l.nodes)
	if err := settleBelow(ctx, quiet, server, l.Etcd.Process()); err != nil {
		return nil, err
	}
	say("scale: %d nodes, %d pods, %d watches are there after %.0f s; %d watches were begun again", f.nodes, f.pods,
		f.watch, f.setUp.Seconds(), l.lost.Load())

	// 1. Its start, with a pod waiting for it.
	events, err := l.watchPods(ctx, scaleNamespace)
	if err != nil {
		return nil, err
	}
	first := plainPod(scaleNamespace, podName(0), asked)
	if err := l.client.Create(ctx, first); err != nil {
		return nil, err
	}
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: lab.SystemNamespace, Name: lab.ControllerAccount},
	}
	if err := client.IgnoreNotFound(l.client.Delete(ctx, lease)); err != nil { // the last controller did not release it
		return nil, err
	}
	begin = time.Now()
	if err := l.controller.Start(ctx); err != nil {
		return nil, err
	}
	controller := l.controller.Process()
	e, err := await(ctx, "the first placement", events, func(e podEvent) bool {
		return e.pod.UID == first.UID && !gated(e.pod)
	})
	if err != nil {
		return nil, err
	}
	f.first = e.at.Sub(begin)
	if !mustRunOn(e.pod, fakeNode(0)) {
		return nil, errors.New("the first pod was ungated without its home")
	}
	if err := settle(ctx, controller); err != nil {
		return nil, err
	}
	f.calm = time.Since(begin)
	if f.calmCPU, err = cpuTime(controller); err != nil {
		return nil, err
	}
	if err := l.gone(ctx, events, first); err != nil {
		return nil, err
	}

	// 2. One placement after another.
	for i := range b.times(200) {
		node := openNode(i % l.openNodes())
		pod := plainPod(scaleNamespace, podName(node), asked)
		whole, _, err := l.placeOne(ctx, events, pod, fakeNode(node))
		if err != nil {
			return nil, err
		}
		f.latency = append(f.latency, whole.Seconds()*1e3)
		if err := l.gone(ctx, events, pod); err != nil {
			return nil, err
		}
	}

	if err := l.wait(ctx); err != nil {
		return nil, err
	}

	// 3. The cost of idling, and of each kind of event.
	if err := settleBelow(ctx, quiet, controller, server); err != nil {
		return nil, err
	}
	idle, serverIdle, err := l.idle(ctx, controller, server)
	if err != nil {
		return nil, err
	}
	f.idleCPU = idle
	for range b.times(3) {
		for _, kind := range eventKinds {
			c, s, err := l.cost(ctx, kind, controller, server, idle, serverIdle, f)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", kind.name, err)
			}
			f.cpu[kind.name], f.serverCPU[kind.name] = append(f.cpu[kind.name], c), append(f.serverCPU[kind.name], s)
		}
	}

	// 4. Memory, once all of that has been processed.
	if f.rss, err = memory(controller, "VmRSS"); err != nil {
		return nil, err
	}
	if f.peak, err = memory(controller, "VmHWM"); err != nil {
		return nil, err
	}
	if f.serverRSS, err = memory(server, "VmRSS"); err != nil {
		return nil, err
	}
	return f, l.controller.Stop()
}

// grow creates what is missing: nodes, the homes of the placed pods, StatefulSets with their pods, each pod Running on
// its node with a bound RetainedIP. The API server creates the first of each kind; the others are copies.
func (l *landscape) grow(ctx context.Context, nodes, sets int) error {
	if l.models.node == nil {
		if err := l.makeModels(ctx); err != nil {
			return err
		}
	}
	fromNode, fromSet := max(1, l.nodes), l.sets
	l.nodes, l.sets = nodes, sets
	l.workloads = append(l.workloads, make([]*stayputv1alpha1.WorkloadReference, sets-len(l.workloads))...)
	err := l.store(ctx, nodes-fromNode, func(i int) []client.Object {
		i += fromNode
		return []client.Object{
			l.copyNode(i), l.copyRetainedIP(scaleNamespace, podName(i), fakeNode(i), nil, retained(addressOf(1<<20+i))),
		}
	})
	if err != nil {
		return err
	}
	err = l.store(ctx, sets-fromSet, func(i int) []client.Object {
		set := l.copySet(fromSet + i)
		l.workloads[fromSet+i] = &stayputv1alpha1.WorkloadReference{
			APIVersion: "apps/v1", Kind: "StatefulSet", Name: set.Name, UID: string(set.UID),
		}
		return []client.Object{set}
	})
	if err != nil {
		return err
	}
	begin, from := time.Now(), fromSet*podsOfSet
	err = l.store(ctx, l.pods()-from, func(i int) []client.Object {
		if i > 0 && i%20_000 == 0 {
			say("scale: %d pods with their RetainedIPs made in %.0f s", i, time.Since(begin).Seconds())
		}
		pod := l.copyPod(from + i)
		since := metav1.Now()
		return []client.Object{pod, l.copyRetainedIP(pod.Namespace, pod.Name, pod.Spec.NodeName,
			l.workloads[(from+i)/podsOfSet],
			stayputv1alpha1.RetainedIPStatus{
				Phase: stayputv1alpha1.PhaseBound, IPs: []string{pod.Status.PodIP}, Since: &since, PodUID: string(pod.UID),
				Addresses: []stayputv1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0",
					IPs: []string{pod.Status.PodIP}}},
			})}
	})
	if err != nil {
		return err
	}
	return l.has(ctx, map[client.ObjectList]int{ // without placed pods and the lab's nodes
		&corev1.NodeList{}: nodes, &appsv1.StatefulSetList{}: sets, &corev1.PodList{}: l.pods(),
		&stayputv1alpha1.RetainedIPList{}: l.pods() + nodes,
	})
}

// has waits until the API server has so many objects of these kinds.
func (l *landscape) has(ctx context.Context, want map[client.ObjectList]int) error {
	for list, n := range want {
		var has int64
		err := until(ctx, "the API server to have all objects", func() (bool, error) {
			err := l.client.List(ctx, list, client.Limit(1))
			if rest := list.GetRemainingItemCount(); rest != nil {
				has = *rest + 1
			}
			return has >= int64(n), err
		})
		if err != nil {
			return fmt.Errorf("%d of %d in %T: %w", has, n, list, err)
		}
	}
	return nil
}

// store stores the objects returned by f for 0 to n-1.
func (l *landscape) store(ctx context.Context, n int, f func(i int) []client.Object) error {
	each := mostPuts / 2 // f returns at most two
	return parallel(ctx, (n+each-1)/each, scaleClients, func(ctx context.Context, _, batch int) error {
		var objects []client.Object
		for i := batch * each; i < min(n, (batch+1)*each); i++ {
			objects = append(objects, f(i)...)
		}
		return l.etcd.put(ctx, objects...)
	})
}

// models are the templates of the copies.
type models struct {
	node *corev1.Node
	set  *appsv1.StatefulSet
	pod  *corev1.Pod
	ip   *stayputv1alpha1.RetainedIP
}

// makeModels has the API server create one object of each kind: a node, which stays, and a StatefulSet's pod with its
// RetainedIP, which are deleted once read.
func (l *landscape) makeModels(ctx context.Context) error {
	if err := l.makeNode(ctx, fakeNode(0), zoneOf(0), false); err != nil {
		return err
	}
	if err := l.makeHome(ctx, l.client, scaleNamespace, podName(0), fakeNode(0), addressOf(1<<20), nil); err != nil {
		return err
	}
	const name = "model"
	set := lab.Workload{Name: name, Replicas: podsOfSet, Annotations: asked}.StatefulSet(scaleNamespace)
	if err := l.client.Create(ctx, set); err != nil {
		return err
	}
	pod := plainPod(scaleNamespace, name+"-0", asked)
	pod.Labels = map[string]string{
		"app": name, appsv1.StatefulSetPodNameLabel: pod.Name, appsv1.PodIndexLabel: "0",
		appsv1.ControllerRevisionHashLabelKey: name + "-5d5f6c7b8d",
	}
	pod.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("StatefulSet")),
	}
	pod.Spec.NodeName, pod.Spec.Hostname, pod.Spec.Subdomain = fakeNode(0), pod.Name, name
	if err := l.client.Create(ctx, pod); err != nil {
		return err
	}
	now := metav1.Now()
	pod.Status.Phase, pod.Status.StartTime = corev1.PodRunning, &now
	for _, kind := range []corev1.PodConditionType{corev1.PodScheduled, corev1.PodInitialized, corev1.ContainersReady,
		corev1.PodReady} {
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{
			Type: kind, Status: corev1.ConditionTrue, LastTransitionTime: now,
		})
	}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: "web", Ready: true, Image: lab.WebImage, ImageID: "sha256:" + strings.Repeat("0", 64),
		ContainerID: "containerd://" + strings.Repeat("0", 64),
		State:       corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
	}}
	if err := l.client.Status().Update(ctx, pod); err != nil {
		return err
	}
	l.models = models{&corev1.Node{}, set.DeepCopy(), pod.DeepCopy(), &stayputv1alpha1.RetainedIP{}}
	if err := l.client.Get(ctx, types.NamespacedName{Name: fakeNode(0)}, l.models.node); err != nil {
		return err
	}
	home := types.NamespacedName{Namespace: scaleNamespace, Name: podName(0) + "." + fakeNode(0)}
	if err := l.client.Get(ctx, home, l.models.ip); err != nil {
		return err
	}
	return errors.Join(l.remove(ctx, pod), l.client.Delete(ctx, set))
}

func zoneOf(node int) string {
	if cordoned(node) {
		return closedZone
	}
	return "zone-open"
}

func (l *landscape) copyNode(i int) *corev1.Node {
	node := l.models.node.DeepCopy()
	node.Name, node.UID = fakeNode(i), uuid.NewUUID()
	node.Labels[corev1.LabelHostname], node.Labels[corev1.LabelTopologyZone] = node.Name, zoneOf(i)
	node.Spec.Unschedulable = cordoned(i)
	return node
}

func (l *landscape) copySet(i int) *appsv1.StatefulSet {
	set := l.models.set.DeepCopy()
	set.Namespace, set.Name, set.UID = setNamespace(i), setName(i), uuid.NewUUID()
	set.Spec.ServiceName = set.Name
	set.Spec.Selector.MatchLabels = map[string]string{"app": set.Name}
	set.Spec.Template.Labels = set.Spec.Selector.MatchLabels
	return set
}

func (l *landscape) copyPod(i int) *corev1.Pod {
	pod, workload := l.models.pod.DeepCopy(), l.workloads[i/podsOfSet]
	pod.Namespace, pod.Name, pod.Spec.NodeName = podOf(i)
	pod.UID = uuid.NewUUID()
	pod.OwnerReferences[0].Name, pod.OwnerReferences[0].UID = workload.Name, types.UID(workload.UID)
	pod.Labels["app"], pod.Labels[appsv1.StatefulSetPodNameLabel], pod.Labels[appsv1.PodIndexLabel] = workload.Name,
		pod.Name, fmt.Sprint(i%podsOfSet)
	pod.Spec.Hostname, pod.Spec.Subdomain = pod.Name, workload.Name
	pod.Status.PodIP, pod.Status.PodIPs = addressOf(i), []corev1.PodIP{{IP: addressOf(i)}}
	return pod
}

func (l *landscape) copyRetainedIP(
	namespace, pod, node string, workload *stayputv1alpha1.WorkloadReference, status stayputv1alpha1.RetainedIPStatus,
) *stayputv1alpha1.RetainedIP {
	ip := l.models.ip.DeepCopy()
	ip.Namespace, ip.Name, ip.UID = namespace, pod+"."+node, uuid.NewUUID()
	ip.Spec.NodeName, ip.Spec.PodName, ip.Spec.Workload, ip.Spec.Scheduled = node, pod, workload, "pod/"+pod
	ip.Status = status
	return ip
}

// The waiter is a pod whose PersistentPodState requires the closed zone: it stays gated, and any node change may
// concern it.
const waiter = "waiter"

// wait creates the waiter unless it exists.
func (l *landscape) wait(ctx context.Context) error {
	pod := plainPod(scaleNamespace, waiter+"-0", map[string]string{stayputv1alpha1.AnnotationHomeWait: "24h"})
	switch err := l.client.Get(ctx, client.ObjectKeyFromObject(pod), pod); {
	case err == nil:
		return nil
	case !apierrors.IsNotFound(err):
		return err
	}
	set := lab.Workload{Name: waiter, Replicas: 1}.StatefulSet(scaleNamespace)
	if err := l.client.Create(ctx, set); err != nil {
		return err
	}
	state := &kruisev1alpha1.PersistentPodState{
		ObjectMeta: metav1.ObjectMeta{Namespace: scaleNamespace, Name: waiter},
		Spec: kruisev1alpha1.PersistentPodStateSpec{
			TargetReference:            kruisev1alpha1.TargetReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: waiter},
			RequiredPersistentTopology: &kruisev1alpha1.NodeTopologyTerm{NodeTopologyKeys: []string{corev1.LabelTopologyZone}},
		},
	}
	if err := l.client.Create(ctx, state); err != nil {
		return err
	}
	record := fmt.Sprintf(`{"status":{"podStates":{%q:{"nodeName":%q,"nodeTopologyLabels":{%q:%q}}}}}`,
		pod.Name, fakeNode(cordonedEvery-1), corev1.LabelTopologyZone, closedZone)
	if err := l.client.Status().Patch(ctx, state, client.RawPatch(types.MergePatchType, []byte(record))); err != nil {
		return err
	}
	if err := sleep(ctx, 3*time.Second); err != nil { // until the record is in the controller's cache
		return err
	}
	pod.Labels = map[string]string{"app": waiter, appsv1.StatefulSetPodNameLabel: pod.Name, appsv1.PodIndexLabel: "0"}
	pod.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("StatefulSet")),
	}
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}
	if err := l.client.Create(ctx, pod); err != nil {
		return err
	}
	if err := sleep(ctx, 3*time.Second); err != nil {
		return err
	}
	if err := l.client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
		return err
	}
	if !gated(pod) {
		return errors.New("the pod whose zone is cordoned was ungated")
	}
	return nil
}

// watchAsAgents starts a watch per node of the node's own RetainedIPs, as its agent does, and waits until each has
// received something.
func (l *landscape) watchAsAgents(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	l.watches = append(l.watches, cancel)
	l.watching.Store(0)
	config := l.RESTConfig()
	var http2 *http.Client
	for i := range l.nodes {
		if i%watchesOfConnection == 0 {
			var err error
			if http2, err = rest.HTTPClientFor(l.RESTConfig()); err != nil {
				return err
			}
		}
		client := http2
		query := url.Values{
			"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {"0"},
			"fieldSelector": {"spec.nodeName=" + fakeNode(i)}, "timeoutSeconds": {"86400"},
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet,
			config.Host+"/apis/stayput.io/v1alpha1/retainedips?"+query.Encode(), nil)
		if err != nil {
			return err
		}
		go l.drain(client, request)
		if i%50 == 49 { // agents start at different times
			if err := sleep(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
	}
	return until(ctx, "the watches to be established", func() (bool, error) {
		return l.watching.Load() == int64(l.nodes), nil
	})
}

// drain reads a watch and discards its events. One that ends, such as when the server is too busy to answer a ping, is
// restarted, as an agent does.
func (l *landscape) drain(client *http.Client, request *http.Request) {
	for request.Context().Err() == nil {
		if err := l.drainOnce(client, request); err != nil {
			l.lost.Add(1)
		}
		_ = sleep(request.Context(), time.Second) // the loop checks the cause
	}
}

func (l *landscape) drainOnce(client *http.Client, request *http.Request) error {
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	buffer := make([]byte, 16<<10)
	stands := false
	defer func() {
		if stands {
			l.watching.Add(-1)
		}
	}()
	for {
		n, err := answer.Body.Read(buffer)
		l.seen.Add(int64(n))
		if n > 0 && !stands {
			stands = true
			l.watching.Add(1)
		}
		if err != nil {
			return err
		}
	}
}

func (l *landscape) stopWatches() {
	for _, stop := range l.watches {
		stop()
	}
	l.watches = nil
}

// eventKind is a kind of event on an object, delivered to the controller. happen causes the n-th of a batch.
type eventKind struct {
	name   string
	happen func(ctx context.Context, l *landscape, c client.Client, n int) error
	done   func(ctx context.Context, l *landscape) error // nil: no cleanup
}

const eventsOfBatch = 400

var eventKinds = []eventKind{
	{"placement of a gated pod", placeEvent, func(ctx context.Context, l *landscape) error {
		return until(ctx, "the pods to be ungated", func() (bool, error) {
			var pods corev1.PodList
			err := l.client.List(ctx, &pods, client.InNamespace(scaleNamespace))
			for i := range pods.Items {
				if p := &pods.Items[i]; gated(p) && p.Name != waiter+"-0" {
					return false, err
				}
			}
			return true, err
		})
	}},
	{"RetainedIP update", func(ctx context.Context, l *landscape, c client.Client, _ int) error {
		namespace, name, node := podOf(rand.IntN(l.pods()))
		o := &stayputv1alpha1.RetainedIP{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "." + node}}
		since := time.Now().Add(-time.Duration(rand.IntN(1e6)) * time.Second).UTC().Format(time.RFC3339)
		return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"status":{"since":"`+since+`"}}`)))
	}, nil},
	{"pod status update", func(ctx context.Context, l *landscape, c client.Client, _ int) error {
		namespace, name, _ := podOf(rand.IntN(l.pods()))
		o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		patch := fmt.Sprintf(`{"status":{"message":"%d"}}`, rand.Int())
		return c.SubResource("status").Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch)))
	}, nil},
	{"heartbeat of a node", func(ctx context.Context, l *landscape, c client.Client, _ int) error {
		o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fakeNode(rand.IntN(l.nodes))}}
		patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","lastHeartbeatTime":%q}]}}`,
			time.Now().Add(time.Duration(rand.IntN(1e6))*time.Second).UTC().Format(time.RFC3339))
		return c.SubResource("status").Patch(ctx, o, client.RawPatch(types.StrategicMergePatchType, []byte(patch)))
	}, nil},
	{"node change that a pod waits for", func(ctx context.Context, l *landscape, c client.Client, _ int) error {
		o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fakeNode(
			rand.IntN(l.nodes/cordonedEvery)*cordonedEvery + cordonedEvery - 1)}}
		patch := fmt.Sprintf(`{"metadata":{"labels":{"bench.stayput.test/changed":"%d"}}}`, rand.Int())
		return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch)))
	}, nil},
	{"StatefulSet change", func(ctx context.Context, l *landscape, c client.Client, _ int) error {
		s := rand.IntN(l.sets)
		o := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: setNamespace(s), Name: setName(s)}}
		patch := fmt.Sprintf(`{"spec":{"minReadySeconds":%d}}`, rand.IntN(1e6))
		return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch)))
	}, nil},
}

// placeEvent creates a gated pod with a home. Its deletion is not part of the cost.
func placeEvent(ctx context.Context, l *landscape, c client.Client, n int) error {
	return c.Create(ctx, plainPod(scaleNamespace, podName(openNode(n)), asked))
}

// idle returns the shares of a core that the controller and the API server use when idle.
func (l *landscape) idle(ctx context.Context, controller, server *lab.Process) (float64, float64, error) {
	const while = 10 * time.Second
	c, s, err := both(controller, server)
	if err != nil {
		return 0, 0, err
	}
	if err := sleep(ctx, while); err != nil {
		return 0, 0, err
	}
	c2, s2, err := both(controller, server)
	return (c2 - c).Seconds() / while.Seconds(), (s2 - s).Seconds() / while.Seconds(), err
}

func both(controller, server *lab.Process) (c, s time.Duration, err error) {
	if c, err = cpuTime(controller); err == nil {
		s, err = cpuTime(server)
	}
	return c, s, err
}

// cost causes a batch of events and returns the CPU time of each in the controller and the API server, in µs, less
// their idle use.
func (l *landscape) cost(
	ctx context.Context, kind eventKind, controller, server *lab.Process, idle, serverIdle float64, f *figures,
) (c, s float64, err error) {
	n := min(eventsOfBatch, l.openNodes())
	c1, s1, err := both(controller, server)
	if err != nil {
		return 0, 0, err
	}
	begin, bytes := time.Now(), l.seen.Load()
	err = parallel(ctx, n, scaleClients, func(ctx context.Context, worker, i int) error {
		return kind.happen(ctx, l, l.clients[worker], i)
	})
	if err != nil {
		return 0, 0, err
	}
	if kind.done != nil {
		if err := kind.done(ctx, l); err != nil {
			return 0, 0, err
		}
	}
	if err := settle(ctx, controller); err != nil {
		return 0, 0, err
	}
	c2, s2, err := both(controller, server)
	if err != nil {
		return 0, 0, err
	}
	took := time.Since(begin).Seconds()
	each := func(used time.Duration, idle float64) float64 {
		return max(0, used.Seconds()-idle*took) / float64(n) * 1e6
	}
	if kind.name == "RetainedIP update" {
		f.bytesPerEvent = float64(l.seen.Load()-bytes) / float64(n)
	}
	if kind.done != nil {
		err = l.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(scaleNamespace),
			client.MatchingLabels{"app": "bench"}, client.GracePeriodSeconds(0))
		if err == nil {
			err = settle(ctx, controller)
		}
	}
	return each(c2-c1, idle), each(s2-s1, serverIdle), err
}
