// Package podip is the controller's half of pools: it feeds a [pool.Book] with what the cluster says and carries out
// what the Book decides.
//
//	controller.go  the loops, and what wakes which of them
//	session.go     the Book: begun, fed, and begun again if the API server's data were restored
//	agents.go      on which nodes agents are to run
//	write.go       the writes, each bound to what it was decided on
//	status.go      what pools and addresses say of themselves
//	metrics.go     what is counted of them
//	convert.go     the words of the API and those of package pool
//	spiderpool.go  those of Spiderpool, and its pools
package podip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
)

// Controller gives pods their addresses, and frees these.
//
// Its methods are safe for concurrent use.
type Controller struct {
	client    client.Client
	live      client.WithWatch // past the cache
	cache     client.Reader    // has Pods
	informers cache.Informers
	workloads *cluster.Workloads
	events    events.EventRecorder
	now       func() time.Time
	// uninstalling reports whether stayput is being uninstalled: then package uninstall ungates all pods.
	uninstalling func() bool
	installation types.NamespacedName
	longest      time.Duration // that an address is kept; 0 is no limit
	toTell       chan struct{} // whether there are pools, perhaps
	metrics      *metrics
	// lag is until something is decided again that was decided on old news: ever longer, since an API server that was
	// away needs seconds until its watches bring what has changed meanwhile.
	lag workqueue.TypedRateLimiter[key]

	mu    sync.Mutex
	state state
	// words is whether Spiderpool's words count: where SpiderIPPools may be read.
	words state
	first chan struct{} // closed once there is a pool
	read  chan struct{} // closed once it is known whether Spiderpool's words count
	queue queue
	pods  podQueue
	// unanswered are the pods of which it was not known what they ask for.
	unanswered map[types.NamespacedName]struct{}
	// pools, namespaces and above outlive a Book.
	pools      map[string]*stayputv1alpha1.PodIPPool
	spider     map[string]*spiderpoolv2beta1.SpiderIPPool
	namespaces map[string]namespace     // nil: not known yet
	above      map[string]pool.Workload // of a ReplicaSet, by UID
	guard      string                   // names what guards the addresses of pods, empty if nothing is known to
	session    *session                 // nil: there is no Book
	// agents says on which nodes agents are to run: a pod as the template of their DaemonSet, nil if it is not known.
	agents *corev1.Pod
}

type (
	queue    = workqueue.TypedRateLimitingInterface[key]
	podQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]
)

// key names what is reconciled.
type key struct{ kind, name string }

// The kinds of keys: an address, a pool, and the roll.
const (
	kindAddress = "address"
	kindPool    = "pool"
	kindRoll    = "roll"
)

// state is what is known of pools.
type state int

const (
	unknown state = iota // whether the API server serves them
	off                  // it does not
	idle                 // there is none
	serving
)

// namespace is what matters of one.
type namespace struct {
	labels map[string]string
	asks   map[string]string // those of its annotations by which its pods ask for addresses
}

// Options of the controller of pools.
type Options struct {
	Workloads    *cluster.Workloads
	Uninstalling func() bool
	// Installation is the ConfigMap by which agents know whether there are pools. If it is empty, they are not told.
	Installation types.NamespacedName
	// LongestRetention is how long an address is kept at most once its pod is gone, also while owned; zero is no limit.
	LongestRetention time.Duration
	Registry         prometheus.Registerer // of the metrics
}

// workers is how many decisions are carried out at a time: a write waits for etcd's disk.
const workers = 32

// longestLag is the longest pause between two tries: the watch that brings the news has it tried at once.
const longestLag = time.Second

// planGood is how long a plan may be carried out: after that, decide again.
const planGood = 10 * time.Second

// Add has a manager give pods addresses of pools while it leads.
func Add(mgr ctrl.Manager, o Options) (*Controller, error) {
	live, err := client.NewWithWatch(mgr.GetConfig(), client.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
	})
	if err != nil {
		return nil, err
	}
	c := newController(mgr.GetClient(), live, mgr.GetCache(), mgr.GetCache(), o)
	c.events = cluster.Recorder(mgr.GetEventRecorder(stayputv1alpha1.ControllerFieldManager))
	o.Registry.MustRegister(c.metrics)
	loops, err := builder.TypedControllerManagedBy[key](mgr).Named("pools").
		WatchesRawSource(source.TypedFunc[key](func(_ context.Context, q queue) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.queue = q
			c.enqueueAllLocked()
			return nil
		})).
		WithOptions(controller.TypedOptions[key]{MaxConcurrentReconciles: workers,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[key](5*time.Millisecond, cluster.LongestRetry)}).
		Build(c)
	if err != nil {
		return nil, err
	}
	return c, errors.Join(cluster.WatchWorkloads(o.Workloads, loops, c.ofWorkload), mgr.Add(c))
}

func newController(cl client.Client, live client.WithWatch, cached client.Reader, informers cache.Informers,
	o Options) *Controller {
	c := &Controller{
		client: cl, live: live, cache: cached, informers: informers, workloads: o.Workloads, now: time.Now,
		uninstalling: o.Uninstalling, installation: o.Installation, longest: o.LongestRetention,
		toTell: make(chan struct{}, 1),
		first:  make(chan struct{}), read: make(chan struct{}),
		lag:   workqueue.NewTypedItemExponentialFailureRateLimiter[key](cluster.CacheLag, longestLag),
		pools: map[string]*stayputv1alpha1.PodIPPool{}, spider: map[string]*spiderpoolv2beta1.SpiderIPPool{},
		above: map[string]pool.Workload{},
	}
	c.metrics = newMetrics(c)
	return c
}

func (c *Controller) add(keys ...key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.enqueue(keys...)
}

// enqueue queues a key. Until there is a Book nothing is reconciled, but then all. c.mu is held.
func (c *Controller) enqueue(keys ...key) {
	if c.queue == nil || c.session == nil || !c.session.ready {
		return
	}
	for _, k := range keys {
		if k.kind == kindPool { // whose status counts what happens all the time
			c.queue.AddAfter(k, time.Second)
			continue
		}
		c.queue.Add(k)
	}
}

// enqueuePodLocked enqueues a pod. Until there is a Book nothing is decided, but then about all pods.
func (c *Controller) enqueuePodLocked(pod types.NamespacedName) {
	if c.pods != nil && c.session != nil && c.session.ready && pod.Name != "" {
		c.pods.Add(reconcile.Request{NamespacedName: pod})
	}
}

func (c *Controller) ofWorkload(_ context.Context, ref home.Ref) (all []key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == nil {
		return nil
	}
	for a := range c.session.byWorkload[ref] {
		all = append(all, addressKey(a))
	}
	return all
}

func addressKey(a netip.Addr) key { return key{kindAddress, a.String()} }

// Reconcile does what is due for one key.
func (c *Controller) Reconcile(ctx context.Context, k key) (reconcile.Result, error) {
	if c.uninstalling() {
		return reconcile.Result{RequeueAfter: cluster.Recheck}, nil
	}
	c.mu.Lock()
	s := c.session
	ready := s != nil && s.ready && !s.book.Stale()
	c.mu.Unlock()
	if !ready {
		return reconcile.Result{}, nil // all is queued once there is a Book
	}
	var after time.Duration
	var err error
	switch k.kind {
	case kindAddress:
		var a netip.Addr
		if a, err = netip.ParseAddr(k.name); err == nil {
			after, err = c.review(ctx, s, a)
		}
	case kindPool:
		err = c.seeToPool(ctx, s, k.name)
	case kindRoll:
		err = c.recall(ctx, s)
	}
	if Changed(err) {
		log.FromContext(ctx).V(1).Info("Changed meanwhile, deciding again", "about", k.kind, "name", k.name, "err", err)
		return reconcile.Result{RequeueAfter: c.lag.When(k)}, nil
	}
	c.lag.Forget(k)
	return reconcile.Result{RequeueAfter: after}, err
}

// until returns when to look again at a plan.
func until(plan pool.Plan, now time.Time) time.Duration {
	if plan.Until.IsZero() {
		return 0
	}
	return max(plan.Until.Sub(now), time.Millisecond)
}

// sooner is the shorter of two pauses, of which zero is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// review reviews one address and carries out the plan.
func (c *Controller) review(ctx context.Context, s *session, a netip.Addr) (time.Duration, error) {
	at := c.now()
	wanted, retry := pool.Unknown, time.Duration(0)
	for asked := false; ; {
		var about *pool.PodIP
		c.mu.Lock()
		plan := s.book.Review(a, at, func(p *pool.PodIP) pool.Wanted {
			about = p
			return wanted
		})
		if asked || about == nil {
			s.waitForNodes(a, plan, at)
		}
		name := stayputv1alpha1.PodIPName(a)
		is := s.book.PodIP(a)
		c.mu.Unlock()
		if about != nil && !asked { // past the lock: it may take a while
			asked = true
			wanted, retry = c.wanted(ctx, s, *about)
			continue
		}
		if plan.Remedy != "" && s.firstOf(name, plan.Reason) {
			c.events.Eventf(reference(name, is), nil, corev1.EventTypeWarning, home.ReasonAddressHeld, "Reviewing",
				"%s: %s", plan.Reason, plan.Remedy)
		}
		if err := c.carryOut(ctx, s, plan, at, nil, gate.Placement{}); err != nil {
			return 0, err
		}
		c.sayConflict(s, is, plan)
		again := until(plan, at)
		if len(plan.Writes) == 0 {
			later, err := c.showExpiry(ctx, s, a, plan, at)
			if err != nil {
				return 0, err
			}
			again = sooner(again, later)
		}
		return sooner(retry, again), nil
	}
}

func reference(name string, is *pool.PodIP) *corev1.ObjectReference {
	ref := &corev1.ObjectReference{APIVersion: stayputv1alpha1.SchemeGroupVersion.String(), Kind: "PodIP", Name: name}
	if is != nil {
		ref.UID = types.UID(is.UID)
	}
	return ref
}

// recall asks all nodes which addresses they have, if the API server may have forgotten some.
func (c *Controller) recall(ctx context.Context, s *session) error {
	at := c.now()
	c.mu.Lock()
	plan := s.book.Recall(at)
	c.mu.Unlock()
	if plan.Reason != "" && s.firstOf(kindRoll, plan.Reason) {
		log.FromContext(ctx).Info("Giving no addresses of pools", "reason", plan.Reason, "remedy", plan.Remedy)
	}
	if err := c.carryOut(ctx, s, plan, at, nil, gate.Placement{}); err != nil {
		return err
	}
	if len(plan.Writes) > 0 {
		c.add(key{kindRoll, ""})
	}
	return nil
}

// wanted asks whether the workload of an address wants its pod, and returns when to ask again, zero if only once it
// changes.
func (c *Controller) wanted(ctx context.Context, s *session, p pool.PodIP) (is pool.Wanted, retry time.Duration) {
	var err error
	if p.Workload == (pool.Workload{}) {
		is, retry, err = c.wantedByName(ctx, s, p)
	} else {
		is, retry, err = c.workloads.Wanted(ctx, p.Namespace, stayputv1alpha1.WorkloadReference(p.Workload), p.PodName,
			p.Keep, func() (names []string, _ error) {
				c.mu.Lock()
				defer c.mu.Unlock()
				for a := range s.byWorkload[workloadOf(&p)] {
					names = append(names, s.book.PodIP(a).PodName)
				}
				return names, nil
			})
	}
	if err != nil {
		log.FromContext(ctx).Info("Keeping an address of a workload that cannot be read", "address", p.Addr, "err", err)
	}
	return is, retry
}

// wantedByName is wanted for an address that only a node knew after a restore, which does not know the workload: it is
// that of the pods whose names differ in the ordinal alone, else the one that has their name. That of a shared identity
// stays unknown: its other pods can have the address.
func (c *Controller) wantedByName(ctx context.Context, s *session, p pool.PodIP) (pool.Wanted, time.Duration, error) {
	stem, _, numbered := home.SplitOrdinal(p.PodName)
	if p.Identity != "" || !numbered {
		return pool.Unknown, 0, nil
	}
	var names []string
	var of pool.Workload
	c.mu.Lock()
	for _, uid := range s.book.Pods() {
		pod := s.book.Pod(uid)
		if like, _, ok := home.SplitOrdinal(pod.Name); ok && like == stem && pod.Namespace == p.Namespace {
			names = append(names, pod.Name)
			if pod.Workload.Name == stem {
				of = pod.Workload
			}
		}
	}
	c.mu.Unlock()
	siblings := func() ([]string, error) { return names, nil }
	if of == (pool.Workload{}) {
		return c.workloads.WantedByName(ctx, p.Namespace, p.PodName, p.Keep, siblings)
	}
	is, retry, err := c.workloads.Wanted(ctx, p.Namespace, stayputv1alpha1.WorkloadReference(of), p.PodName, p.Keep,
		siblings)
	return is, cmp.Or(retry, cluster.Recheck), err
}

func workloadOf(p *pool.PodIP) home.Ref {
	return home.RefOf(p.Workload.APIVersion, p.Workload.Kind, p.Namespace, p.Workload.Name)
}

// sayConflict reports, on a pod that was ended because another machine has its address and on the pod's controller, why
// its successor gets another one.
func (c *Controller) sayConflict(s *session, is *pool.PodIP, plan pool.Plan) {
	if is == nil || is.Conflict == "" || len(plan.Writes) == 0 {
		return
	}
	end, ok := plan.Writes[len(plan.Writes)-1].(pool.EndPod)
	if !ok || !s.firstOf(string(end.UID), plan.Reason) {
		return
	}
	note := fmt.Sprintf("%s: %s. No pod gets it until that is checked again", is.Addr, plan.Reason)
	about := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: end.Namespace, Name: end.Name,
		UID: types.UID(end.UID)}
	c.events.Eventf(about, nil, corev1.EventTypeWarning, home.ReasonAddressConflict, "Reviewing", "%s", note)
	if w := is.Workload; w != (pool.Workload{}) {
		owner := &corev1.ObjectReference{APIVersion: w.APIVersion, Kind: w.Kind, Namespace: end.Namespace, Name: w.Name,
			UID: types.UID(w.UID)}
		c.events.Eventf(owner, about, corev1.EventTypeWarning, home.ReasonAddressConflict, "Reviewing", "pod %s: %s",
			end.Name, note)
	}
}
