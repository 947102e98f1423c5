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
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
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
	"github.com/stayput/stayput/pkg/retention"
)

// Home decides where a gated pod goes, beside where its pools are: last is the node where its address was last, empty
// if it is not known. ok: it can go now; placed is called once it has. Otherwise it is asked again after retry; zero:
// once [Controller.Wake] is called.
type Home func(ctx context.Context, pod *corev1.Pod, last string) (to gate.Placement, placed func(), ok bool,
	retry time.Duration, err error)

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
	home      Home
	disowned  func(types.NamespacedName)
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

type queue = workqueue.TypedRateLimitingInterface[key]

// key names what is reconciled.
type key struct{ kind, name string }

// The kinds of keys: a pod by its UID, an address, a pool, and the roll.
const (
	kindPod     = "pod"
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
	Workloads *cluster.Workloads
	Home      Home
	// Disowned is called with a gated pod that does not ask for addresses of pools any more, nil if nothing is.
	Disowned     func(types.NamespacedName)
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
			c.lookAtAll()
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
		home: o.Home, disowned: o.Disowned, uninstalling: o.Uninstalling, installation: o.Installation,
		longest: o.LongestRetention, toTell: make(chan struct{}, 1),
		first: make(chan struct{}), read: make(chan struct{}),
		lag:   workqueue.NewTypedItemExponentialFailureRateLimiter[key](cluster.CacheLag, longestLag),
		pools: map[string]*stayputv1alpha1.PodIPPool{}, spider: map[string]*spiderpoolv2beta1.SpiderIPPool{},
		above: map[string]pool.Workload{},
	}
	c.metrics = newMetrics(c)
	return c
}

// ErrUnknown says that it is not known yet whether a pod asks for addresses of pools: these have not been read.
var ErrUnknown = errors.New("pools and the defaults of namespaces have not been read yet")

// Owns reports whether a gated pod is placed here and not by its home alone. After an error it must not be placed at
// all. By its namespace's default it goes without only if that is so past the cache: the watch of namespaces may be
// behind that of pods.
func (c *Controller) Owns(ctx context.Context, pod *corev1.Pod) (bool, error) {
	if c == nil || pod.Spec.HostNetwork {
		return false, nil
	}
	owns, byDefault, err := c.owns(pod)
	if owns || !byDefault || err != nil {
		return owns, err
	}
	of := metadata("Namespace")
	switch err := c.live.Get(ctx, types.NamespacedName{Name: pod.Namespace}, of); {
	case apierrors.IsNotFound(err): // the pod goes with it
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading the default of namespace %s: %w", pod.Namespace, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	is := namespace{of.GetLabels(), pool.OfNamespace(of.GetAnnotations())}
	if owns = pool.AsksByDefault(is.asks, c.words == serving); owns && c.session != nil {
		c.rename(c.session, pod.Namespace, is)
	}
	return owns, nil
}

// owns is Owns by the cache, and reports whether the default of the pod's namespace decides.
func (c *Controller) owns(pod *corev1.Pod) (owns, byDefault bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	spiderpool := c.words == serving
	if asks, decides := pool.AsksItself(pod.Annotations, spiderpool); decides {
		return asks, false, nil
	}
	switch {
	case c.state == unknown, c.state != off && c.words == unknown, c.state == serving && c.namespaces == nil:
		return false, true, ErrUnknown
	case c.state == serving:
		return pool.AsksByDefault(c.namespaces[pod.Namespace].asks, spiderpool), true, nil
	}
	return false, false, nil
}

// Wake queues a pod: what its home waited for has changed. It puts in a pod that was seen before it was known
// that its namespace asks for addresses.
func (c *Controller) Wake(ctx context.Context, pod *corev1.Pod) {
	c.mu.Lock()
	s := c.session
	unseen := s != nil && s.book.Pod(pool.UID(pod.UID)) == nil
	c.mu.Unlock()
	if unseen {
		c.setPod(s, cluster.PodOf(pod), false)
		var is cluster.Pod
		err := c.cache.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, &is)
		if apierrors.IsNotFound(err) || err == nil && is.GetUID() != pod.UID { // its end was seen before
			c.removePod(s, pool.UID(pod.UID), "", false)
		}
	}
	c.add(key{kindPod, string(pod.UID)})
}

// Why returns why there can be no addresses at all, empty if there can.
func (c *Controller) Why() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case off:
		return "it asks for addresses of pools, but the cluster has no PodIPPools: install stayput with pools.enabled"
	case idle:
		return "it asks for addresses of pools, but there is no PodIPPool"
	}
	return ""
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
	case kindPod:
		after, err = c.place(ctx, s, pool.UID(k.name))
		c.sayFailure(ctx, s, pool.UID(k.name), err)
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
	if changed(err) {
		log.FromContext(ctx).V(1).Info("Changed meanwhile, deciding again", "about", k.kind, "name", k.name, "err", err)
		return reconcile.Result{RequeueAfter: c.lag.When(k)}, nil
	}
	c.lag.Forget(k)
	return reconcile.Result{RequeueAfter: after}, err
}

// changed reports whether a write failed because what it was decided on has changed.
func changed(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) ||
		errors.Is(err, pool.ErrStale) || errors.Is(err, errOld)
}

// place gives a pod its addresses.
func (c *Controller) place(ctx context.Context, s *session, uid pool.UID) (time.Duration, error) {
	c.mu.Lock()
	known := s.book.Pod(uid)
	given := s.book.Given(uid)
	problem := s.invalid[uid]
	c.mu.Unlock()
	if known == nil && given != nil {
		return 0, c.find(ctx, s, *given)
	}
	if known != nil && known.Has != nil && !known.Gated && known.Node == "" {
		return 0, c.endBarren(ctx, s, known)
	}
	if known == nil || known.Has != nil && !known.Gated || known.Ending || known.Over {
		return 0, nil
	}
	var cached cluster.Pod
	name := types.NamespacedName{Namespace: known.Namespace, Name: known.Name}
	if err := c.cache.Get(ctx, name, &cached); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	pod := cached.Core()
	if pod.UID != types.UID(uid) {
		return 0, nil
	}
	if home.Gated(pod) {
		if known, problem = c.readAgain(s, &cached); known == nil {
			if c.disowned != nil {
				c.disowned(name)
			}
			return 0, nil // it asks for nothing any more
		}
	}
	switch {
	case home.Gated(pod) && !home.LastGate(pod):
		return 0, nil // the end of another gate wakes it
	case problem != nil:
		c.say(s, pod, corev1.EventTypeWarning, home.ReasonInvalidAnnotation, problem.Error())
		return 0, nil
	case !home.Gated(pod) && static(pod):
		c.say(s, pod, corev1.EventTypeWarning, home.ReasonInvalidAnnotation,
			"static pods cannot have addresses of pools, because their node starts them without the API server")
		return 0, nil
	case !home.Gated(pod) && pod.Spec.NodeName == "":
		return 0, nil // once it has a node: the scheduler does not wait for it
	}
	if err := c.findDeployment(ctx, s, known); err != nil {
		return 0, err
	}
	at := c.now()
	c.mu.Lock()
	plan := s.book.Place(uid, at)
	c.mu.Unlock()
	if !home.Gated(pod) {
		outside, err := c.outside(ctx, plan, pod.Spec.NodeName)
		if err != nil || outside != "" {
			c.unreserve(s, plan.Writes)
			plan = pool.Plan{Reason: outside}
		}
		if err != nil {
			return 0, err
		}
	}
	c.mu.Lock()
	s.wait(uid, plan)
	s.wake()
	gated := s.gated[uid]
	c.mu.Unlock()
	retry := until(plan, at)
	if plan.Reason != "" {
		if left := ordinaryWait - at.Sub(pod.CreationTimestamp.Time); plan.Remedy != "" || left <= 0 {
			c.sayPlan(s, pod, plan)
		} else {
			retry = sooner(retry, min(left, ordinaryWait))
		}
	}
	var to gate.Placement
	placed := func() {}
	if i := len(plan.Writes) - 1; i >= 0 && home.Gated(pod) {
		if place, ok := plan.Writes[i].(pool.PlacePod); ok && c.home != nil {
			last := ""
			for _, a := range place.Addresses {
				if last == "" {
					last = a.Last
				}
			}
			var now bool
			var again time.Duration
			var err error
			if to, placed, now, again, err = c.home(ctx, pod, last); err != nil || !now {
				c.unreserve(s, plan.Writes)
				return again, err
			}
		}
	}
	if err := c.carryOut(ctx, s, plan, at, pod, to); err != nil {
		return 0, err
	}
	if len(plan.Writes) > 0 && plan.Reason == "" {
		placed()
		c.metrics.let(gated)
		c.sayClamped(pod)
		log.FromContext(ctx).Info("Gave pod its addresses", "pod", name)
	}
	return retry, nil
}

// sayClamped reports on a pod that asks for a longer retention than there is, as the agents do for addresses of nodes.
func (c *Controller) sayClamped(pod *corev1.Pod) {
	asked, _, err := retention.Parse(pod.Annotations)
	if given, clamped := asked.Clamp(c.longest); err == nil && clamped && !asked.WhileOwned {
		c.events.Eventf(pod, nil, corev1.EventTypeNormal, home.ReasonRetentionClamped, "Retaining",
			"retention %s is longer than the longest, %s", asked.Duration(), given.Duration())
	}
}

// sayFailure reports on a gated pod that it cannot be placed, if that has lasted.
func (c *Controller) sayFailure(ctx context.Context, s *session, uid pool.UID, err error) {
	if s.fails(uid, err) < cluster.SayFailureAfter {
		return
	}
	c.mu.Lock()
	known := s.book.Pod(uid)
	c.mu.Unlock()
	var cached cluster.Pod
	if known == nil ||
		c.cache.Get(ctx, types.NamespacedName{Namespace: known.Namespace, Name: known.Name}, &cached) != nil ||
		!cached.Gated() || cached.GetUID() != types.UID(uid) {
		return
	}
	c.say(s, cached.Core(), corev1.EventTypeWarning, home.ReasonNotPlaced, cluster.NotPlaced(err))
}

// readAgain reads what a gated pod and its namespace ask for now: the API server refuses addresses for a pod that does
// not ask. It returns the pod as the Book has it then, nil if it asks for nothing, and what of its annotations is not
// valid.
func (c *Controller) readAgain(s *session, pod *cluster.Pod) (*pool.Pod, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	uid := pool.UID(pod.GetUID())
	known, in, spiderpool := s.book.Pod(uid), c.namespaces[pod.GetNamespace()], c.words == serving
	if known == nil || newer(known.Version, pod.GetResourceVersion()) { // the Book is ahead of the cache
		return known, s.invalid[uid]
	}
	if !asks(pod, in, spiderpool) {
		s.unblock(uid)
		s.book.StopWaiting(uid)
		return nil, nil
	}
	core := pod.Core()
	is, err := podOf(core, in, spiderpool, c.workloads.Numbers(core), c.longest)
	if pod.TooLong() {
		err = errors.New(cluster.TooLongNote + ": the pod stays gated, without an address")
	}
	is.Workload = known.Workload
	if delete(s.invalid, uid); err != nil {
		s.invalid[uid] = err
	}
	if _, says := core.Annotations[stayputv1alpha1.AnnotationAddresses]; !says || is.Has != nil {
		s.book.SetPod(is)
	}
	return s.book.Pod(uid), err
}

// endBarren ends a pod that was kept from a node because that was lost, and that the scheduler has no room for
// elsewhere, once the node is back: its successor may go there. The pod never ran.
func (c *Controller) endBarren(ctx context.Context, s *session, known *pool.Pod) error {
	var cached cluster.Pod
	err := c.cache.Get(ctx, types.NamespacedName{Namespace: known.Namespace, Name: known.Name}, &cached)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	pod := cached.Core()
	if pod.UID != types.UID(known.UID) || cached.Node() != "" || metav1.GetControllerOf(pod) == nil {
		return nil
	}
	for _, a := range known.Has {
		c.mu.Lock()
		back := slices.Contains(s.book.Barren(a.Last), known.UID)
		c.mu.Unlock()
		if !back || !home.KeptFrom(pod, a.Last) {
			continue
		}
		why := fmt.Sprintf("node %s was lost when the pod was placed, and is back", a.Last)
		plan := pool.Plan{Reason: why, Writes: []pool.Write{pool.EndPod{UID: known.UID, Namespace: known.Namespace,
			Name: known.Name, If: []pool.Check{{There: known}}}}}
		if err := c.carryOut(ctx, s, plan, c.now(), pod, gate.Placement{}); err != nil {
			return err
		}
		c.say(s, pod, corev1.EventTypeNormal, home.ReasonAddressWait,
			why+": the pod was deleted so that its successor may go there")
	}
	return nil
}

// ordinaryWait is how long nothing is written for people about what is soon over as a rule: a pod that is replaced
// waits until the node of its predecessor has said that this is gone, and the address is nobody's for a moment. Two
// Events and two statuses for each such pod would cost more than its address.
const ordinaryWait = 5 * time.Second

// find puts in the pod of an address, which does not ask for any: it is another program's, from which the address was
// taken over.
func (c *Controller) find(ctx context.Context, s *session, p pool.PodIP) error {
	var pod cluster.Pod
	if err := c.cache.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: p.PodName}, &pod); err != nil {
		return client.IgnoreNotFound(err)
	}
	if pod.GetUID() == types.UID(p.PodUID) {
		c.setPod(s, &pod, false)
	}
	return nil
}

// outside says which pool is not for the node of a pod that could not be kept from it, empty if none is. Addresses that
// the pod has already are its own.
func (c *Controller) outside(ctx context.Context, plan pool.Plan, name string) (string, error) {
	if len(plan.Writes) < 2 {
		return "", nil
	}
	place, ok := plan.Writes[len(plan.Writes)-1].(pool.PlacePod)
	if !ok {
		return "", nil
	}
	var node corev1.Node
	if err := c.client.Get(ctx, types.NamespacedName{Name: name}, &node); err != nil {
		return "", fmt.Errorf("reading node %s: %w", name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	taken := map[netip.Addr]bool{}
	for _, w := range plan.Writes {
		switch w := w.(type) {
		case pool.CreateIP:
			taken[w.PodIP.Addr] = true
		case pool.UpdateIP:
			taken[w.PodIP.Addr] = !w.PodIP.Adopted
		}
	}
	for _, a := range place.Addresses {
		o := c.pools[a.Pool]
		if o == nil || o.Spec.NodeSelector == nil || !taken[a.Prefix.Addr()] {
			continue
		}
		selects, err := metav1.LabelSelectorAsSelector(o.Spec.NodeSelector)
		if err != nil {
			return "", err
		}
		if !selects.Matches(labels.Set(node.Labels)) {
			return fmt.Sprintf("pool %s is not for node %s, on which it is", a.Pool, name), nil
		}
	}
	return "", nil
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

// findDeployment has the addresses of a pod belong to the Deployment of its ReplicaSet, which outlives that.
func (c *Controller) findDeployment(ctx context.Context, s *session, p *pool.Pod) error {
	if p.Workload.Kind != "ReplicaSet" || p.Keep == (pool.Keep{}) {
		return nil
	}
	set := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: p.Workload.APIVersion, Kind: "ReplicaSet"}}
	err := c.live.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: p.Workload.Name}, set)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	owner := metav1.GetControllerOf(set)
	if owner == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.above[p.Workload.UID] = pool.Workload{APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name,
		UID: string(owner.UID)}
	if is := s.book.Pod(p.UID); is != nil {
		again := *is
		again.Workload = c.above[p.Workload.UID]
		s.book.SetPod(again)
	}
	return nil
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

// sayPlan reports once why a pod waits.
func (c *Controller) sayPlan(s *session, pod *corev1.Pod, plan pool.Plan) {
	kind, note := corev1.EventTypeNormal, "the pod waits for an address: "+plan.Reason
	if plan.Remedy != "" {
		kind, note = corev1.EventTypeWarning, note+": "+plan.Remedy
	}
	c.say(s, pod, kind, home.ReasonAddressWait, note)
}

// say reports an Event on a pod and on its controller, once.
func (c *Controller) say(s *session, pod *corev1.Pod, kind, reason, note string) {
	if !s.firstOf(string(pod.UID), note) {
		return
	}
	c.events.Eventf(pod, nil, kind, reason, "Placing", "%s", note)
	if owner := metav1.GetControllerOf(pod); owner != nil {
		c.events.Eventf(&corev1.ObjectReference{
			APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID,
		}, pod, kind, reason, "Placing", "pod %s: %s", pod.Name, note)
	}
}
