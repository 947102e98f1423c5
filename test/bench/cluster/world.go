package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(s))
	utilruntime.Must(stayputv1alpha1.AddToScheme(s))
	utilruntime.Must(kruisev1alpha1.AddToScheme(s))
	return s
}()

// world is a cluster and an administrator's client for it.
type world struct {
	*lab.Cluster
	client client.WithWatch
	pods   []int           // the processes of Stayput's pods, if it was installed with pods
	life   context.Context // ends before the cluster does
	stop   context.CancelFunc
}

// objectsOnly is for clusters whose pods run on no kubelet: one real node without them, and a long grace period for
// Node objects without heartbeats.
var objectsOnly = lab.ClusterOptions{Nodes: 1, NodeMonitorGracePeriod: 24 * time.Hour}

// start starts a cluster.
func (b *bench) start(ctx context.Context, o lab.ClusterOptions) (*world, error) {
	begin := time.Now()
	c, err := lab.StartCluster(ctx, o)
	if err != nil {
		return nil, err
	}
	w := &world{Cluster: c}
	w.life, w.stop = context.WithCancel(ctx)
	if w.client, err = w.newClient(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	say("a cluster of %d nodes started in %.1f s", len(c.Nodes), time.Since(begin).Seconds())
	return w, nil
}

// replicas is the number of controllers in an installation.
const replicas = 2

// startInstalled starts a cluster and installs stayput as processes: they are measured without containers and kubelets,
// which some benchmarks stop.
func (b *bench) startInstalled(ctx context.Context, o lab.ClusterOptions, p lab.ProcessOptions) (*world, error) {
	o.Product, o.IPAM = b.product, "stayput"
	w, err := b.start(ctx, o)
	if err != nil {
		return nil, err
	}
	return w, w.install(ctx, p)
}

// twoControllers are an installation without pools.
var twoControllers = lab.ProcessOptions{Controllers: replicas}

// install installs stayput as processes. On an error it ends the cluster.
func (w *world) install(ctx context.Context, o lab.ProcessOptions) error {
	args := []string{"--log-level=info"} // the product's default; the lab logs more
	if o.Pools {
		args = append(args, "--namespace="+lab.SystemNamespace) // whose ConfigMap says that there are pools
	}
	o.AgentArgs, o.ControllerArgs = args, args
	if err := w.InstallProcesses(ctx, o); err != nil {
		return w.end(ctx, err)
	}
	if o.Controllers > 1 {
		go w.keepControllers()
	}
	return nil
}

// installPods installs stayput as users do, with Helm. On an error it ends the cluster.
func (w *world) installPods(ctx context.Context, values map[string]any) error {
	values["controller"] = map[string]any{"logLevel": "info"}
	if err := w.Install(ctx, lab.InstallOptions{Values: values}); err != nil {
		return w.end(ctx, err)
	}
	for _, n := range append([]*lab.ClusterNode{w.ControlNode}, w.Nodes...) {
		all, err := descendants(n.Pid())
		if err != nil {
			return w.end(ctx, err)
		}
		for pid, p := range all {
			if strings.HasPrefix(p.name, "stayput-") {
				w.pods = append(w.pods, pid)
			}
		}
	}
	return nil
}

// startObjects starts a cluster in which pods do not run, with stayput or without.
func (b *bench) startObjects(ctx context.Context, installed bool) (*world, error) {
	if installed {
		return b.startInstalled(ctx, objectsOnly, twoControllers)
	}
	return b.start(ctx, objectsOnly)
}

// keepControllers restarts controllers that exit, as kubelet would: one that cannot renew its lease exits, which an
// otherwise idle machine never sees.
func (w *world) keepControllers() {
	const backOff = 10 * time.Second
	for sleep(w.life, time.Second) == nil {
		for i, c := range w.ControllerProcesses {
			if c.Process() != nil {
				continue
			}
			say("controller %d has exited and restarts in %v: this run's figures are not those of an idle machine",
				i+1, backOff)
			if sleep(w.life, backOff) != nil {
				return
			}
			if err := c.Start(w.life); err != nil && w.life.Err() == nil {
				say("controller %d: %v", i+1, err)
			}
		}
	}
}

// end closes the cluster. On an error it prints the logs first; it returns the error.
func (w *world) end(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil {
		w.WriteLogs(os.Stderr)
	}
	w.stop()
	return errors.Join(err, w.Close())
}

// newClient returns a client with its own connection.
func (w *world) newClient() (client.WithWatch, error) {
	return client.NewWithWatch(w.RESTConfig(), client.Options{Scheme: scheme})
}

// settle waits until the cluster is idle.
func (w *world) settle(ctx context.Context) error {
	var all []*lab.Process
	for _, s := range []*lab.Service{w.Etcd, w.APIServer, w.ControllerManager, w.Scheduler} {
		if p := s.Process(); p != nil {
			all = append(all, p)
		}
	}
	for _, c := range w.ControllerProcesses {
		if p := c.Process(); p != nil {
			all = append(all, p)
		}
	}
	return settle(ctx, all...)
}

// profile writes a CPU profile of the API server, from now on for some time.
func (w *world) profile(ctx context.Context, file string, during time.Duration) error {
	set, err := kubernetes.NewForConfig(w.RESTConfig())
	if err != nil {
		return err
	}
	data, err := set.RESTClient().Get().AbsPath("/debug/pprof/profile").
		Param("seconds", strconv.Itoa(int(during.Seconds()))).DoRaw(ctx)
	if err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o644)
}

// profileBeside begins a profile, and returns what waits for it.
func (w *world) profileBeside(ctx context.Context, file string, during time.Duration) (wait func() error) {
	profiled := make(chan error, 1)
	go func() { profiled <- w.profile(ctx, file, during) }()
	return func() error { return <-profiled }
}

// namespace creates a namespace and waits until pods can be created in it.
func (w *world) namespace(ctx context.Context, name string) error {
	err := w.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	if err != nil {
		return err
	}
	return until(ctx, "the service account of namespace "+name, func() (bool, error) {
		err := w.client.Get(ctx, types.NamespacedName{Namespace: name, Name: "default"}, &corev1.ServiceAccount{})
		return err == nil, client.IgnoreNotFound(err)
	})
}

// patience bounds what hangs; it measures nothing.
const patience = 5 * time.Minute

// until waits until ok; an error ends it.
func until(ctx context.Context, what string, ok func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		done, err := ok()
		if err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
		if done {
			return nil
		}
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
	}
}

// parallel calls f for 0 to n-1 from that many workers until one fails.
func parallel(ctx context.Context, n, workers int, f func(ctx context.Context, worker, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			for i := range next {
				if err := f(ctx, worker, i); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	for i := range n {
		select {
		case next <- i:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// makeNodes creates healthy-looking Node objects with free resources, and waits until the scheduler may use them.
func (w *world) makeNodes(ctx context.Context, n int) ([]string, error) {
	names := make([]string, n)
	err := parallel(ctx, n, 8, func(ctx context.Context, _, i int) error {
		names[i] = fmt.Sprintf("fake-%04d", i)
		return w.makeNode(ctx, names[i], "zone-a", false)
	})
	return names, err
}

func (w *world) makeNode(ctx context.Context, name, zone string, cordoned bool) error {
	room := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi"),
		corev1.ResourcePods: resource.MustParse("1000"), corev1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
	}
	now := metav1.Now()
	var conditions []corev1.NodeCondition
	for kind, status := range map[corev1.NodeConditionType]corev1.ConditionStatus{
		corev1.NodeReady: corev1.ConditionTrue, corev1.NodeMemoryPressure: corev1.ConditionFalse,
		corev1.NodeDiskPressure: corev1.ConditionFalse, corev1.NodePIDPressure: corev1.ConditionFalse,
	} {
		conditions = append(conditions, corev1.NodeCondition{
			Type: kind, Status: status, Reason: "Bench", Message: "nobody runs this node", LastHeartbeatTime: now,
			LastTransitionTime: now,
		})
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			corev1.LabelHostname: name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
			corev1.LabelTopologyZone: zone,
		}},
		Spec: corev1.NodeSpec{Unschedulable: cordoned},
		Status: corev1.NodeStatus{Capacity: room, Allocatable: room, Conditions: conditions,
			NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v" + lab.KubernetesVersion}},
	}
	if err := w.client.Create(ctx, node); err != nil {
		return err
	}
	// Every new node is tainted until it has been observed as Ready.
	return w.client.Patch(ctx, node, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"taints":null}}`)))
}

// makeHome creates the RetainedIP that makes a node a pod's home, as an agent would have published it. Without a
// workload the pod has none.
func (w *world) makeHome(
	ctx context.Context, c client.Client, namespace, pod, node, ip string, workload *stayputv1alpha1.WorkloadReference,
) error {
	return c.Create(ctx, &stayputv1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pod + "." + node},
		Spec: stayputv1alpha1.RetainedIPSpec{
			NodeName: node, PodName: pod, Retention: "720h0m0s", WhenScaled: stayputv1alpha1.PolicyRetain,
			WhenDeleted: stayputv1alpha1.PolicyRetain, Workload: workload, Scheduled: "pod/" + pod,
		},
		Status: retained(ip),
	})
}

// retained returns the status of an unused address.
func retained(ip string) stayputv1alpha1.RetainedIPStatus {
	since := metav1.Now()
	return stayputv1alpha1.RetainedIPStatus{
		Phase: stayputv1alpha1.PhaseRetained, IPs: []string{ip}, Since: &since,
		Addresses: []stayputv1alpha1.NetworkAddresses{{Network: "pods", Interface: "eth0", IPs: []string{ip}}},
		Expires:   &metav1.Time{Time: since.Add(720 * time.Hour)},
	}
}

// addressOf returns a made-up address.
func addressOf(i int) string { return fmt.Sprintf("10.%d.%d.%d", 100+i>>16, i>>8&255, i&255) }

// asked are the annotations of a pod whose address is to be retained.
var asked = map[string]string{stayputv1alpha1.AnnotationRetainIP: "720h"}

// plainPod returns a pod with the labels of a StatefulSet's, without a StatefulSet.
func plainPod(namespace, name string, annotations map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Annotations: annotations, Labels: map[string]string{
				"app": "bench", appsv1.StatefulSetPodNameLabel: name, appsv1.PodIndexLabel: "0",
				appsv1.ControllerRevisionHashLabelKey: "web-6c5b9f8d7",
			},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever,
			Ports: []corev1.ContainerPort{{ContainerPort: 80, Name: "http"}},
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("16Mi"),
			}},
		}}},
	}
}

func gated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == stayputv1alpha1.PlacementGate
	})
}

// mustRunOn reports whether the pod's node affinity requires that node.
func mustRunOn(pod *corev1.Pod, node string) bool {
	a := pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return false
	}
	for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, e := range slices.Concat(term.MatchExpressions, term.MatchFields) {
			if slices.Equal(e.Values, []string{node}) {
				return true
			}
		}
	}
	return false
}

// podEvent is an event of a watch, and when it arrived.
type podEvent struct {
	kind watch.EventType
	pod  *corev1.Pod
	at   time.Time
}

// watchPods watches the pods of a namespace, or those of them that options select, until ctx ends. The channel is
// closed when the watch ends for good; one that the API server closed because this process read too slowly resumes
// where it was.
func (w *world) watchPods(ctx context.Context, namespace string, o ...client.ListOption) (<-chan podEvent, error) {
	ctx, cancel := context.WithCancel(ctx)
	context.AfterFunc(w.life, cancel)
	o = append(o, client.InNamespace(namespace))
	stream, err := w.client.Watch(ctx, &corev1.PodList{}, o...)
	if err != nil {
		cancel()
		return nil, err
	}
	seen := make(chan podEvent, 100_000) // room for a slow reader
	go func() {
		defer cancel()
		defer close(seen)
		for version := ""; ctx.Err() == nil; {
			for e := range stream.ResultChan() {
				pod, ok := e.Object.(*corev1.Pod)
				if !ok {
					if ctx.Err() == nil {
						say("the watch of namespace %s: %v", namespace, apierrors.FromObject(e.Object))
					}
					return
				}
				version = pod.ResourceVersion
				seen <- podEvent{e.Type, pod, time.Now()}
			}
			if ctx.Err() != nil {
				return
			}
			say("the watch of namespace %s was cut", namespace)
			stream, err = w.client.Watch(ctx, &corev1.PodList{},
				append(o, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: version}})...)
			if err != nil {
				say("the watch of namespace %s: %v", namespace, err)
				return
			}
		}
	}()
	return seen, nil
}

// await reads events until ok, and returns the last one.
func await(ctx context.Context, what string, events <-chan podEvent, ok func(podEvent) bool) (podEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		select {
		case <-ctx.Done():
			return podEvent{}, fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		case e, open := <-events:
			if !open {
				return podEvent{}, fmt.Errorf("waiting for %s: the watch ended", what)
			}
			if ok(e) {
				return e, nil
			}
		}
	}
}

// clear deletes all pods of a namespace at once and waits until the cluster is idle again.
func (w *world) clear(ctx context.Context, namespace string) error {
	err := w.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(namespace), client.GracePeriodSeconds(0))
	if err != nil {
		return err
	}
	err = until(ctx, "the pods to be gone", func() (bool, error) {
		var pods corev1.PodList
		err := w.client.List(ctx, &pods, client.InNamespace(namespace), client.Limit(1))
		return len(pods.Items) == 0, err
	})
	if err != nil {
		return err
	}
	return w.settle(ctx)
}

// remove deletes one pod at once; it may be gone already.
func (w *world) remove(ctx context.Context, pod *corev1.Pod) error {
	err := w.client.Delete(ctx, pod, client.GracePeriodSeconds(0))
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
