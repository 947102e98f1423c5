package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

// The full size is that of the section scale. Of every fifth StatefulSet the pods have addresses of a routed pool.
const (
	pooledEvery  = 5
	lostShare    = 0.1  // of the nodes, which are one zone
	rolledShare  = 0.25 // of the pods of the pool
	mostUpgraded = 200  // agents: the next ones cost as much
	upgradedAt   = 10   // a time
	pooledLabel  = "bench.stayput.test/pooled"
)

var (
	fleetSubnet = netip.MustParsePrefix("10.48.0.0/12")
	podCIDRs    = netip.MustParsePrefix("10.128.0.0/9")
)

// addrFrom is the n-th address of a prefix.
func addrFrom(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
	return netip.AddrFrom4(b)
}

// fleet is a cluster of nodes of which there are the objects and the agents. This process also is, for pods of the
// pool, what else acts on them: the StatefulSets' controller, the scheduler, kubelets and the garbage collector of pods.
type fleet struct {
	*landscape
	dir        string
	profiles   string
	agents     []*agent
	lost       int // the agents of the first nodes are gone
	guard      string
	podip      *stayputv1alpha1.PodIP // the model of all
	complaints complaints
	moves      moves

	requests, refused, failed, events atomic.Int64 // of agents

	mu      sync.Mutex
	stages  map[types.UID]stage
	started map[types.NamespacedName]int
	next    int
	busy    chan struct{} // has room for what is done for pods at a time
}

// stage is how far a pod has come.
type stage int

const (
	bound stage = iota + 1
	running
	ended
	gone
)

func measureFleet(ctx context.Context, b *bench) (rows []table.Row, err error) {
	o := objectsOnly
	o.Product, o.IPAM = b.product, "stayput"
	w, err := b.start(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := w.install(ctx, lab.ProcessOptions{Controllers: 1, Pools: true}); err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	f := &fleet{
		landscape: &landscape{world: w, controller: w.ControllerProcesses[0], etcd: w.newStore()}, profiles: b.profiles,
		complaints: complaints{all: map[string]int{}}, stages: map[types.UID]stage{},
		started: map[types.NamespacedName]int{}, busy: make(chan struct{}, 64),
	}
	klog.SetSlogLogger(slog.New(&f.complaints)) // as the agent does
	utilruntime.ErrorHandlers = nil
	// Each real node has a disk of its own.
	if f.dir, err = os.MkdirTemp("/dev/shm", "stayput-fleet-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(f.dir)) }()
	defer f.each(0, func(a *agent) error { a.stop(); return nil })
	if err := f.prepare(ctx); err != nil {
		return nil, err
	}
	n := max(1, int(scaleNodes*b.scale)/podsOfSet) * podsOfSet
	if err := f.grow(ctx, n); err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context) ([]table.Row, error){
		f.measureStart, f.measureList, f.measureRollout, f.measureUpgrade, f.measureRestore, f.measureLoss,
	} {
		more, err := part(ctx)
		rows = append(rows, more...)
		table.Print(os.Stderr, more)
		if err != nil {
			return rows, err
		}
	}
	return rows, nil
}

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
	var installation corev1.ConfigMap
	key := types.NamespacedName{Namespace: lab.SystemNamespace, Name: "stayput-installation"}
	if err := f.client.Get(ctx, key, &installation); err != nil {
		return err
	}
	served, err := stayputv1alpha1.ParseServedPools(installation.Annotations[stayputv1alpha1.AnnotationPools])
	if err != nil {
		return err
	}
	f.guard = served.Guard
	node := f.Nodes[0]
	err = errors.Join(f.controller.Stop(), f.ControllerManager.Stop(), f.Scheduler.Stop(), node.AgentProcess.Stop(),
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
func (f *fleet) placed(pod *corev1.Pod, addr netip.Addr, of *stayputv1alpha1.WorkloadReference, a *agent) client.Object {
	pod.Labels[pooledLabel] = "true"
	pod.Annotations = map[string]string{
		stayputv1alpha1.AnnotationPools: poolName,
		stayputv1alpha1.AnnotationAddresses: fmt.Sprintf(`[{"interface":"eth0","pool":%q,"mode":"Routed","address":%q,`+
			`"guard":%q}]`, poolName, netip.PrefixFrom(addr, fleetSubnet.Bits()), f.guard),
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

// each calls do for the agents from a number on, some at a time.
func (f *fleet) each(from int, do func(*agent) error) error {
	return parallel(context.Background(), len(f.agents)-from, 16, func(_ context.Context, _, i int) error {
		if a := f.agents[from+i]; a != nil {
			return do(a)
		}
		return nil
	})
}

// wait waits until nothing is left, and says how it goes. It fails once nothing has gone on for a while.
func (f *fleet) wait(ctx context.Context, what string, left func() (int, error)) error {
	least, since, said := 0, time.Now(), time.Now()
	for first := true; ; first = false {
		n, err := left()
		switch {
		case err != nil:
			return fmt.Errorf("waiting for %s: %w", what, err)
		case n == 0:
			return nil
		case first || n < least:
			least, since = n, time.Now()
		case time.Since(since) > patience:
			return fmt.Errorf("waiting for %s: %d are left for %v", what, n, patience)
		}
		if time.Since(said) > 30*time.Second {
			said = time.Now()
			say("fleet: waiting for %s: %d are left", what, n)
		}
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// spent is what a part of the measurement took.
type spent struct {
	took                                      time.Duration
	server, etcd, controller, own             time.Duration // CPU
	requests, refused, failed, events         int64         // of agents
	serverRSS, serverPeak, controllerRSS, rss float64       // MiB, afterwards
}

func (s spent) String() string {
	t := s.took.Seconds()
	return fmt.Sprintf("CPU in cores: kube-apiserver %.2f, etcd %.2f, controller %.2f, agents and bench %.2f; RSS: "+
		"kube-apiserver %.0f MiB (peak %.0f), controller %.0f, agents %.0f; agents: %d requests, %d refused, %d failed; load %s",
		s.server.Seconds()/t, s.etcd.Seconds()/t, s.controller.Seconds()/t, s.own.Seconds()/t, s.serverRSS, s.serverPeak,
		s.controllerRSS, s.rss, s.requests, s.refused, s.failed, table.Load())
}

// spend does something and returns what that took. The API server may be another process afterwards.
func (f *fleet) spend(ctx context.Context, name string, do func() error) (s spent, err error) {
	before := map[int]time.Duration{}
	used := func(to *time.Duration, pid int) error {
		is, err := cpuTimeOf(pid)
		*to, before[pid] = is-before[pid], is
		return err
	}
	cpu := func() (err error) {
		for to, p := range map[*time.Duration]*lab.Process{
			&s.server: f.APIServer.Process(), &s.etcd: f.Etcd.Process(), &s.controller: f.controller.Process(),
		} {
			if p != nil {
				err = errors.Join(err, used(to, p.Pid))
			}
		}
		return errors.Join(err, used(&s.own, os.Getpid()))
	}
	count := func(sign int64) {
		s.requests += sign * f.requests.Load()
		s.refused += sign * f.refused.Load()
		s.failed += sign * f.failed.Load()
		s.events += sign * f.events.Load()
	}
	profiled, err := f.profile(ctx, name)
	if err != nil {
		return s, err
	}
	say("fleet: %s (load %s)", name, table.Load())
	count(-1)
	if err := cpu(); err != nil {
		return s, err
	}
	begin := time.Now()
	err = do()
	s.took = time.Since(begin)
	count(1)
	if err := errors.Join(err, cpu(), profiled()); err != nil {
		return s, err
	}
	for _, one := range []struct {
		to   *float64
		of   *lab.Process
		line string
	}{
		{&s.serverRSS, f.APIServer.Process(), "VmRSS"}, {&s.serverPeak, f.APIServer.Process(), "VmHWM"},
		{&s.controllerRSS, f.controller.Process(), "VmRSS"}, {&s.rss, &lab.Process{Pid: os.Getpid()}, "VmRSS"},
	} {
		if one.of != nil {
			if *one.to, err = memory(one.of, one.line); err != nil {
				return s, err
			}
		}
	}
	say("fleet: %s took %.1f s; %v", name, s.took.Seconds(), s)
	return s, nil
}

// profile writes CPU profiles of the API server and of this process, if that is asked for, until it is told to end.
func (f *fleet) profile(ctx context.Context, name string) (end func() error, err error) {
	if f.profiles == "" {
		return func() error { return nil }, nil
	}
	file := func(of string) string {
		return filepath.Join(f.profiles, strings.ReplaceAll(name, " ", "-")+"-"+of+".pprof")
	}
	own, err := os.Create(file("agents"))
	if err != nil {
		return nil, err
	}
	set, err := kubernetes.NewForConfig(f.RESTConfig())
	if err != nil {
		return nil, err
	}
	go func() { // it has no part of what comes after that, and may be lost with the API server
		data, err := set.RESTClient().Get().AbsPath("/debug/pprof/profile").Param("seconds", "20").DoRaw(ctx)
		if err == nil {
			err = os.WriteFile(file("kube-apiserver"), data, 0o644)
		}
		if err != nil {
			say("fleet: the profile of %s: %v", name, err)
		}
	}()
	return func() error { pprof.StopCPUProfile(); return own.Close() }, pprof.StartCPUProfile(own)
}

func (f *fleet) against() string {
	return fmt.Sprintf("%d nodes, %d pods, %d of the pool", f.nodes, f.pods(), f.pods()/pooledEvery)
}

func (f *fleet) seconds(what string, took time.Duration, detail string) table.Row {
	return table.Row{What: what, Against: f.against(), Figure: table.Figure{Value: took.Seconds(), Unit: " s", N: 1},
		Detail: detail}
}

// lags are rows of how far agents were behind.
func (f *fleet) lags(s spent) []table.Row {
	if len(f.moves.last) == 0 {
		return nil
	}
	deliveries := float64(max(1, s.events))
	return []table.Row{
		{What: "  an agent says where a pod is -> another has it, p99", Against: f.against(),
			Figure: table.Figure{Value: quantile(0.99)(f.moves.lag), Unit: " ms", N: len(f.moves.lag)},
			Detail: fmt.Sprintf("p50 %.0f ms; all have it: p50 %.0f ms, p99 %.0f ms, of %d pods that moved",
				median(f.moves.lag), median(f.moves.last), quantile(0.99)(f.moves.last), len(f.moves.last))},
		{What: "  CPU for an event and agent", Against: f.against(),
			Figure: table.Figure{Value: (s.server + s.own).Seconds() * 1e6 / deliveries, Unit: " µs", N: int(s.events)},
			Detail: fmt.Sprintf("all CPU of kube-apiserver %.1f µs, of agents %.1f µs; %.2f events a pod and agent",
				s.server.Seconds()*1e6/deliveries, s.own.Seconds()*1e6/deliveries,
				deliveries/float64(len(f.moves.last))/float64(f.moves.agents))},
	}
}

// up waits until agents have begun all their watches.
func (f *fleet) up(ctx context.Context, agents []*agent) error {
	return f.wait(ctx, "agents to watch", func() (n int, _ error) {
		for _, a := range agents {
			if a.watches.Load() < watchesOfAgent {
				n++
			}
		}
		return n, nil
	})
}

// settled waits until all nodes have answered in an epoch that has begun since.
func (f *fleet) settled(ctx context.Context, since time.Time) error {
	return f.wait(ctx, "the nodes' answers", func() (int, error) {
		var audit stayputv1alpha1.PodIPAudit
		err := f.client.Get(ctx, types.NamespacedName{Name: stayputv1alpha1.PodIPAuditName}, &audit)
		if err != nil || audit.Spec.Epoch == nil || audit.Spec.Epoch.Time.Before(since) {
			return f.nodes + 1, nil // the API server has just started, and the controller has yet to ask
		}
		if audit.Spec.Phase == stayputv1alpha1.PodIPAuditSettled {
			return 0, nil
		}
		if err := sleep(ctx, time.Second); err != nil { // a list of all is dear
			return 0, err
		}
		var reports stayputv1alpha1.PodIPReportList
		left := f.nodes - f.lost
		if f.client.List(ctx, &reports) == nil {
			for i := range reports.Items {
				if !reports.Items[i].Spec.Round.Before(audit.Spec.Epoch) {
					left--
				}
			}
		}
		return max(1, left), nil
	})
}

// measureStart starts all agents, and then the controller.
func (f *fleet) measureStart(ctx context.Context) ([]table.Row, error) {
	debug.FreeOSMemory()
	before, err := memory(&lab.Process{Pid: os.Getpid()}, "VmRSS")
	if err != nil {
		return nil, err
	}
	start, err := f.spend(ctx, "agents start", func() error {
		if err := f.each(0, func(a *agent) error { return a.start(f.life) }); err != nil {
			return err
		}
		return f.up(ctx, f.agents)
	})
	if err != nil {
		return nil, err
	}
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: lab.SystemNamespace, Name: lab.ControllerAccount},
	}
	// No controller ran for long enough: all nodes are asked.
	old := fmt.Sprintf(`{"spec":{"mark":%q}}`, time.Now().Add(-2*pool.MarkLost).UTC().Format(metav1.RFC3339Micro))
	audit := &stayputv1alpha1.PodIPAudit{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPAuditName}}
	err = errors.Join(client.IgnoreNotFound(f.client.Delete(ctx, lease)),
		f.client.Patch(ctx, audit, client.RawPatch(types.MergePatchType, []byte(old))))
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	call, err := f.spend(ctx, "controller starts", func() error {
		if err := f.controller.Start(ctx); err != nil {
			return err
		}
		go f.keepControllers()
		return f.settled(ctx, asked)
	})
	if err != nil {
		return nil, err
	}
	if err := sleep(ctx, 20*time.Second); err != nil {
		return nil, err
	}
	idle, err := f.spend(ctx, "idle", func() error { return sleep(ctx, time.Minute) })
	if err != nil {
		return nil, err
	}
	debug.FreeOSMemory()
	after, err := memory(&lab.Process{Pid: os.Getpid()}, "VmRSS")
	each := float64(f.nodes)
	return []table.Row{
		f.seconds("agents start -> all watch", start.took, fmt.Sprint(start)),
		{What: "  CPU for each: kube-apiserver", Against: f.against(),
			Figure: table.Figure{Value: start.server.Seconds() * 1e3 / each, Unit: " ms", N: f.nodes},
			Detail: fmt.Sprintf("the agent %.1f ms; %.1f requests", start.own.Seconds()*1e3/each, float64(start.requests)/each)},
		f.seconds("controller starts -> all nodes have answered", call.took, fmt.Sprint(call)),
		{What: "an agent, memory", Against: f.against(),
			Figure: table.Figure{Value: (after - before) / each, Unit: " MiB", N: f.nodes},
			Detail: fmt.Sprintf("without its routes, which are %.2f MiB; %d goroutines", f.tableSize(), runtime.NumGoroutine())},
		{What: "  idle, CPU", Against: f.against(),
			Figure: table.Figure{Value: idle.own.Seconds() / idle.took.Seconds() / each * 100, Unit: " % of a core", N: f.nodes},
			Detail: fmt.Sprint(idle)},
	}, err
}

// tableSize is the memory of a table of all routes in MiB, without what it knows of the kernel.
func (f *fleet) tableSize() float64 {
	var before, after runtime.MemStats
	places := map[netip.Addr]route.Place{}
	for i := range f.pods() / pooledEvery {
		places[f.address(i)] = route.Place{PodCIDR: f.agents[i%f.nodes].podCIDR}
	}
	runtime.GC()
	runtime.ReadMemStats(&before)
	t := route.New(route.Options{})
	t.Set(places)
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(t)
	return (float64(after.HeapAlloc) - float64(before.HeapAlloc)) / (1 << 20)
}

// measureList measures what an agent asks for at its start, and whenever its watch has ended: where all addresses are.
func (f *fleet) measureList(ctx context.Context) (rows []table.Row, err error) {
	for _, compressed := range []bool{true, false} {
		config := f.RESTConfig()
		config.DisableCompression = !compressed
		set, err := kubernetes.NewForConfig(config)
		if err != nil {
			return nil, err
		}
		const n = 20
		size := 0
		s, err := f.spend(ctx, "lists of PodIPs", func() error {
			for range n {
				answer, err := set.RESTClient().Get().AbsPath("/apis/stayput.io/v1alpha1/podips").
					Param("fieldSelector", "spec.mode=Routed").DoRaw(ctx)
				if err != nil {
					return err
				}
				size = len(answer)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		rows = append(rows, table.Row{What: fmt.Sprintf("an agent lists PodIPs, compressed %t: kube-apiserver's CPU", compressed),
			Against: f.against(), Figure: table.Figure{Value: s.server.Seconds() * 1e3 / n, Unit: " ms", N: n},
			Detail: fmt.Sprintf("%.1f MiB; reading them %.0f ms; took %.0f ms", float64(size)/(1<<20),
				s.own.Seconds()*1e3/n, s.took.Seconds()*1e3/n)})
	}
	return rows, nil
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
	for ; errors.Is(err, ledger.ErrUnseen); addr, err = a.add(pod) { // as the plugin does, and kubelet
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

// moved waits until all agents have the routes to the pods that have moved.
func (f *fleet) moved(ctx context.Context) error {
	return f.wait(ctx, "the routes of all agents", func() (int, error) { return f.moves.left(), nil })
}

// roll deletes pods of the pool, so many at a time, and waits until their successors run.
func (f *fleet) roll(ctx context.Context, n, atOnce int) error {
	return parallel(ctx, n, atOnce, func(ctx context.Context, worker, i int) error {
		name := f.podOfNumber(i)
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

func (f *fleet) measureRollout(ctx context.Context) ([]table.Row, error) {
	following, stop := context.WithCancel(ctx)
	defer stop()
	if err := f.follow(following); err != nil {
		return nil, err
	}
	f.moves.reset(f.nodes)
	n := int(float64(f.pods()/pooledEvery) * rolledShare)
	atOnce := max(20, n/50)
	var last time.Duration
	begin := time.Now()
	s, err := f.spend(ctx, "rollout", func() error {
		if err := f.roll(ctx, n, atOnce); err != nil {
			return err
		}
		last = time.Since(begin)
		return f.moved(ctx)
	})
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("%d pods of the pool created again, %d at a time -> the last runs", n, atOnce)
	return append([]table.Row{
		f.seconds(what, last, fmt.Sprintf("%.1f a second; all routes after %.1f s; %v", float64(n)/last.Seconds(),
			s.took.Seconds(), s)),
		{What: "  the controller's CPU for a pod", Against: f.against(),
			Figure: table.Figure{Value: s.controller.Seconds() * 1e3 / float64(n), Unit: " ms", N: n}},
	}, f.lags(s)...), nil
}

// measureUpgrade starts agents again, ten at a time.
func (f *fleet) measureUpgrade(ctx context.Context) ([]table.Row, error) {
	n := min(f.nodes, mostUpgraded)
	var each []float64
	s, err := f.spend(ctx, "upgrade of agents", func() error {
		for i := 0; i < n; i += upgradedAt {
			begin, batch := time.Now(), f.agents[i:min(n, i+upgradedAt)]
			err := parallel(ctx, len(batch), upgradedAt, func(_ context.Context, _, i int) error {
				batch[i].stop()
				return batch[i].start(f.life)
			})
			if err != nil {
				return err
			}
			if err := f.up(ctx, batch); err != nil {
				return err
			}
			each = append(each, time.Since(begin).Seconds())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return []table.Row{
		f.seconds(fmt.Sprintf("%d agents upgraded, %d at a time", n, upgradedAt), s.took,
			fmt.Sprintf("%s for %d; all %d would take %.0f s; %v", extent("%.2f s", each), upgradedAt, f.nodes,
				s.took.Seconds()*float64(f.nodes)/float64(n), s)),
		{What: "  CPU for each: kube-apiserver", Against: f.against(),
			Figure: table.Figure{Value: s.server.Seconds() * 1e3 / float64(n), Unit: " ms", N: n},
			Detail: fmt.Sprintf("the agent %.1f ms; %.1f requests", s.own.Seconds()*1e3/float64(n),
				float64(s.requests)/float64(n))},
	}, nil
}

// measureRestore restores etcd from a backup in which only the audit's mark is older.
func (f *fleet) measureRestore(ctx context.Context) ([]table.Row, error) {
	backup := filepath.Join(f.dir, "backup.db")
	if err := f.SaveEtcd(ctx, backup); err != nil {
		return nil, err
	}
	if err := sleep(ctx, pool.MarkLost+10*time.Second); err != nil { // a leader that starts again knows by the mark alone
		return nil, err
	}
	for _, a := range f.agents {
		a.watches.Store(0)
	}
	var away, watch time.Duration
	begin := time.Now()
	s, err := f.spend(ctx, "restore", func() error {
		if err := f.RestoreEtcd(ctx, backup, "--bump-revision=1000000000", "--mark-compacted"); err != nil {
			return err
		}
		away = time.Since(begin)
		if err := f.up(ctx, f.agents); err != nil {
			return err
		}
		watch = time.Since(begin) - away
		return f.settled(ctx, begin)
	})
	if err != nil {
		return nil, err
	}
	return []table.Row{
		f.seconds("etcd restored, API server Ready -> all nodes have answered", s.took-away,
			fmt.Sprintf("the API server was away for %.1f s; all agents watch after %.1f s; %v", away.Seconds(),
				watch.Seconds(), s)),
	}, nil
}

// measureLoss takes a zone away at once, and declares its nodes off.
func (f *fleet) measureLoss(ctx context.Context) ([]table.Row, error) {
	n := int(float64(f.nodes) * lostShare)
	var lost []*corev1.Pod
	var all corev1.PodList
	if err := f.client.List(ctx, &all, client.MatchingLabels{pooledLabel: "true"}); err != nil {
		return nil, err
	}
	for i := range all.Items {
		if a := f.agentOf(&all.Items[i]); a != nil && a.number < n {
			lost = append(lost, &all.Items[i])
		}
	}
	// 1. The nodes are lost, and Kubernetes has noticed.
	f.lost = n
	err := parallel(ctx, n, 16, func(ctx context.Context, _, i int) error {
		f.agents[i].stop()
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fakeNode(i)}}
		return f.client.SubResource("status").Patch(ctx, node, client.RawPatch(types.StrategicMergePatchType,
			[]byte(`{"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}`)))
	})
	if err != nil {
		return nil, err
	}
	following, stop := context.WithCancel(ctx)
	defer stop()
	if err := f.follow(following); err != nil {
		return nil, err
	}
	if err := sleep(ctx, 5*time.Second); err != nil {
		return nil, err
	}

	// 2. An operator declares them off, and Kubernetes ends their pods.
	f.moves.reset(f.nodes - n)
	before := map[types.NamespacedName]int{}
	for _, pod := range lost {
		before[client.ObjectKeyFromObject(pod)] = f.starts(client.ObjectKeyFromObject(pod))
	}
	var last time.Duration
	begin := time.Now()
	s, err := f.spend(ctx, "loss of a zone", func() error {
		err := parallel(ctx, n, 16, func(ctx context.Context, _, i int) error {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fakeNode(i)}}
			taint := fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"value":"nodeshutdown","effect":"NoExecute"}]}}`,
				pool.OutOfService)
			return f.client.Patch(ctx, node, client.RawPatch(types.MergePatchType, []byte(taint)))
		})
		if err != nil {
			return err
		}
		err = parallel(ctx, len(lost), 16, func(ctx context.Context, _, i int) error { return f.remove(ctx, lost[i]) })
		if err != nil {
			return err
		}
		err = f.wait(ctx, "the pods of the zone to run elsewhere", func() (left int, _ error) {
			for name, was := range before {
				if f.starts(name) == was {
					left++
				}
			}
			return left, nil
		})
		if err != nil {
			return err
		}
		last = time.Since(begin)
		return f.moved(ctx)
	})
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("%d nodes declared off -> the last of their %d pods of the pool runs elsewhere", n, len(lost))
	return append([]table.Row{f.seconds(what, last, fmt.Sprintf("all routes after %.1f s; %v", s.took.Seconds(), s))},
		f.lags(s)...), nil
}
