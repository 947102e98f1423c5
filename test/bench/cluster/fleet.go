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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
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

// fleet is a cluster of nodes of which there are the objects and the agents. For pods of the pool, this process also is
// all else that acts on them: the StatefulSets' controller, the scheduler, kubelets and the garbage collector of pods.
type fleet struct {
	*landscape
	dir        string
	profiles   string
	agents     []*agent
	lost       int                    // the agents of the first nodes are gone
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

func measureFleet(ctx context.Context, b *bench) (rows []table.Row, err error) {
	w, err := b.startInstalled(ctx, objectsOnly, lab.ProcessOptions{Controllers: 1, Pools: true})
	if err != nil {
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
	defer func() { err = errors.Join(err, f.each(func(a *agent) error { a.stop(); return nil })) }()
	if err := f.prepare(ctx); err != nil {
		return nil, err
	}
	n := max(1, int(scaleNodes*b.scale)/podsOfSet) * podsOfSet
	if err := f.grow(ctx, n); err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context) ([]table.Row, error){
		f.measureStart, f.measureRollout, f.measureUpgrade, f.measureRestore, f.measureLoss,
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

// each calls do for all agents, some at a time.
func (f *fleet) each(do func(*agent) error) error {
	return parallel(context.Background(), len(f.agents), 16, func(_ context.Context, _, i int) error {
		return do(f.agents[i])
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
		"kube-apiserver %.0f MiB (peak %.0f), controller %.0f, agents %.0f; of agents %d requests, %d refused, %d failed; "+
		"load %s",
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

// profile writes CPU profiles of the API server and of this process until end is called, if there is a folder for them.
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
	go func() { // it has no part of what comes after that, and may be lost with the API server
		if err := f.world.profile(ctx, file("kube-apiserver"), 20*time.Second); err != nil {
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
				if !reports.Items[i].Spec.Epoch.Before(audit.Spec.Epoch) {
					left--
				}
			}
		}
		return max(1, left), nil
	})
}

// begin starts agents, or starts them again, so many at a time, and returns how many seconds these took.
func (f *fleet) begin(ctx context.Context, agents []*agent, atOnce int) (each []float64, err error) {
	for some := range slices.Chunk(agents, atOnce) {
		begin := time.Now()
		err := parallel(ctx, len(some), atOnce, func(_ context.Context, _, i int) error {
			some[i].stop()
			return some[i].start(f.life)
		})
		if err == nil {
			err = f.up(ctx, some)
		}
		if err != nil {
			return nil, err
		}
		each = append(each, time.Since(begin).Seconds())
	}
	return each, nil
}

// measureStart starts all agents, and then the controller.
func (f *fleet) measureStart(ctx context.Context) ([]table.Row, error) {
	debug.FreeOSMemory()
	before, err := memory(&lab.Process{Pid: os.Getpid()}, "VmRSS")
	if err != nil {
		return nil, err
	}
	start, err := f.spend(ctx, "agents start", func() error {
		_, err := f.begin(ctx, f.agents, 2*upgradedAt)
		return err
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
		f.seconds(fmt.Sprintf("agents start, %d at a time -> all watch", 2*upgradedAt), start.took, fmt.Sprint(start)),
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

// moved waits until all agents have the routes to the pods that have moved.
func (f *fleet) moved(ctx context.Context) error {
	return f.wait(ctx, "the routes of all agents", func() (int, error) { return f.moves.left(), nil })
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
	s, err := f.spend(ctx, "upgrade of agents", func() (err error) {
		each, err = f.begin(ctx, f.agents[:n], upgradedAt)
		return err
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
