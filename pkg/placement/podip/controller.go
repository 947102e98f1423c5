// Package podip is the controller's half of pools: it feeds a [pool.Book] with what the cluster says and carries out
// what the Book decides.
//
//	pods.go        which addresses a pod claims, for the loop that places it; barren.go pods without a node
//	controller.go  the loop that reviews addresses; pools.go pools
//	state.go       all that is remembered, and the queues of what the Book wakes; session.go a Book with what belongs to it
//	follow.go      how a Book is begun, fed by feed.go, and begun again if the API server's data were restored
//	agents.go      on which nodes agents are to run; announce.go what they are told
//	write.go       the writes, each bound to what it was decided on
//	metrics.go     what is counted
//	convert.go     the words of the API and those of package pool; spiderpool.go those of Spiderpool
//
// One mutex, that of state, guards all that changes; no call of the API server is made under it.
package podip

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
)

// Controller reviews addresses and pools, and asks nodes for what only they know. Its parts share one state.
//
// Its methods are safe for concurrent use.
type Controller struct {
	*writer
	follower *follower
	claimer  *Claimer
	// uninstalling reports whether stayput is being uninstalled: then package uninstall takes the finalizers off.
	uninstalling func() bool
	// lag is until something is decided again that was decided on old news: ever longer, since an API server that was
	// away needs seconds until its watches bring what has changed meanwhile.
	lag workqueue.TypedRateLimiter[pool.Key]
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

// longestLag is the longest pause between two tries: the watch that brings the change triggers a try at once.
const longestLag = time.Second

// planGood is how long a plan may be carried out: after that, decide again.
const planGood = 10 * time.Second

// Add has a manager review addresses of pools while it leads, and returns what claims them for pods.
func Add(mgr ctrl.Manager, o Options) (*Claimer, error) {
	live, err := client.NewWithWatch(mgr.GetConfig(), client.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
	})
	if err != nil {
		return nil, err
	}
	pods, err := cluster.NewPods(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return nil, err
	}
	c := New(mgr.GetClient(), live, mgr.GetCache(), mgr.GetCache(), o)
	c.follower.eachPod = pods.EachMetadata
	c.events = cluster.Recorder(mgr.GetEventRecorder(stayputv1alpha1.ControllerFieldManager))
	o.Registry.MustRegister(c.metrics)
	loops, err := builder.TypedControllerManagedBy[pool.Key](mgr).Named("pools").
		WatchesRawSource(source.TypedFunc[pool.Key](func(_ context.Context, q queue) error {
			c.mu.Lock()
			defer c.unlock()
			c.queue = q
			c.wakeAllLocked()
			return nil
		})).
		WithOptions(controller.TypedOptions[pool.Key]{MaxConcurrentReconciles: workers,
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[pool.Key](5*time.Millisecond,
				cluster.LongestRetry)}).
		Build(c)
	if err != nil {
		return nil, err
	}
	return c.claimer, errors.Join(cluster.WatchWorkloads(o.Workloads, loops, c.ofWorkload), mgr.Add(c.follower))
}

// New returns a Controller that has read nothing yet. live reads past the caches; cached has the pods.
func New(cl client.Client, live client.WithWatch, cached client.Reader, informers cache.Informers,
	o Options) *Controller {
	w := &writer{state: newState(o), client: cl, live: live, ipam: newIPAM(live, o.Workloads)}
	return &Controller{
		writer:  w,
		claimer: &Claimer{writer: w, cache: cached},
		follower: &follower{writer: w, informers: informers, cached: cached,
			announcer: &announcer{writer: w, installation: o.Installation}, reserver: &reserver{w}},
		uninstalling: o.Uninstalling,
		lag:          workqueue.NewTypedItemExponentialFailureRateLimiter[pool.Key](cluster.CacheLag, longestLag),
	}
}

// Claims returns what claims addresses for pods.
func (c *Controller) Claims() *Claimer { return c.claimer }

func (c *Controller) ofWorkload(_ context.Context, ref home.Ref) (all []pool.Key) {
	c.mu.Lock()
	defer c.unlock()
	if c.session == nil {
		return nil
	}
	for _, a := range c.session.book.OfWorkload(pool.WorkloadKey(ref)) {
		all = append(all, pool.KeyOfAddress(a))
	}
	return all
}

// Reconcile does what is due for one key.
func (c *Controller) Reconcile(ctx context.Context, k pool.Key) (reconcile.Result, error) {
	if c.uninstalling() {
		return reconcile.Result{}, nil
	}
	c.mu.Lock()
	s := c.session
	ready := s != nil && s.ready && !s.book.Stale()
	c.unlock()
	if !ready {
		return reconcile.Result{}, nil // all is queued once there is a Book
	}
	var after time.Duration
	var err error
	switch k.Kind {
	case pool.KeyAddress:
		var a netip.Addr
		if a, err = netip.ParseAddr(k.Name); err == nil {
			after, err = c.review(ctx, s, a)
		}
	case pool.KeyPool:
		err = c.reconcilePool(ctx, s, k.Name)
	case pool.KeyRecall:
		after, err = c.recall(ctx, s)
	}
	if Changed(err) {
		log.FromContext(ctx).V(1).Info("Changed meanwhile, deciding again", "about", k.Kind, "name", k.Name, "err", err)
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

// sooner is the shorter of two pauses; zero is no pause.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// review reviews one address and carries out the plan.
func (c *Controller) review(ctx context.Context, s *session, a netip.Addr) (time.Duration, error) {
	if err := c.observeAllocation(ctx, s, a); err != nil {
		return 0, err
	}
	at := c.now()
	wanted, retry := pool.Unknown, time.Duration(0)
	for asked := false; ; {
		var about *pool.PodIP
		c.mu.Lock()
		plan := s.book.Review(a, at, func(p *pool.PodIP) pool.Wanted {
			about = p
			return wanted
		})
		name := stayputv1alpha1.PodIPName(a)
		is := s.book.PodIP(a)
		c.unlock()
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
		if plan.Contact != nil {
			if err := c.readContacts(ctx, s, plan.Contact); err != nil {
				return 0, err
			}
		}
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
func (c *Controller) recall(ctx context.Context, s *session) (again time.Duration, err error) {
	at := c.now()
	c.mu.Lock()
	plan := s.book.Recall(at)
	c.unlock()
	if plan.Reason != "" && s.firstOf(string(pool.KeyRecall), plan.Reason) {
		log.FromContext(ctx).Info("Assigning no pool addresses", "reason", plan.Reason, "remedy", plan.Remedy)
	}
	if err := c.carryOut(ctx, s, plan, at, nil, gate.Placement{}); err != nil {
		return 0, err
	}
	if plan.Contact != nil {
		return until(plan, at), c.readContacts(ctx, s, plan.Contact)
	}
	if len(plan.Writes) > 0 {
		c.mu.Lock()
		defer c.unlock()
		c.enqueueLocked(pool.RecallKey)
	}
	return 0, nil
}

// wanted asks whether the workload of an address wants its pod, and returns when to ask again, zero if only once it
// changes.
func (c *Controller) wanted(ctx context.Context, s *session, p pool.PodIP) (is pool.Wanted, retry time.Duration) {
	var err error
	if p.Workload == (pool.Workload{}) {
		is, retry, err = c.wantedByName(ctx, s, p)
	} else {
		is, retry, err = c.workloads.Wanted(ctx, p.Namespace, p.Workload, p.PodName,
			p.Keep, func() (of cluster.Siblings, _ error) {
				c.mu.Lock()
				defer c.unlock()
				for _, a := range s.book.OfWorkload(p.WorkloadKey()) {
					sibling := s.book.PodIP(a)
					of.All = append(of.All, sibling.PodName)
					if sibling.Phase != pool.Retained {
						of.Bound = append(of.Bound, sibling.PodName)
					}
				}
				return of, nil
			})
	}
	if err != nil {
		log.FromContext(ctx).Info("Keeping an address of a workload that cannot be read", "address", p.Addr, "err", err)
	}
	return is, retry
}

// wantedByName is wanted for an address that only a node knew after a restore. The node does not know the workload: it
// is the workload of the pods whose names differ in the ordinal alone, else the workload that has their name. The
// workload of a shared identity stays unknown: the identity's other pods can have the address.
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
	c.unlock()
	siblings := func() (cluster.Siblings, error) { return cluster.Siblings{All: names}, nil }
	if of == (pool.Workload{}) {
		return c.workloads.WantedByName(ctx, p.Namespace, p.PodName, p.Keep, siblings)
	}
	is, retry, err := c.workloads.Wanted(ctx, p.Namespace, of, p.PodName, p.Keep,
		siblings)
	return is, cmp.Or(retry, cluster.Recheck), err
}

// showExpiry writes when an address becomes free, if that has changed. It is not written of an address that a successor
// may take over at once: retry is when to look again.
func (c *Controller) showExpiry(ctx context.Context, s *session, a netip.Addr, plan pool.Plan, at time.Time) (
	retry time.Duration, err error) {
	c.mu.Lock()
	p := s.book.PodIP(a)
	if p == nil {
		c.unlock()
		return 0, nil
	}
	is, shown := *p, s.expires[a]
	settled := s.book.Settled(a)
	c.unlock()
	var expires time.Time
	if settled && !is.Deleting && is.Phase == pool.Retained && is.StatusUID == is.PodUID && plan.Reason != "" {
		expires = plan.Until.Truncate(time.Second)
	}
	if expires.Equal(shown) {
		return 0, nil
	}
	if left := ordinaryWait - at.Sub(is.Since); shown.IsZero() && left > 0 {
		return min(left, ordinaryWait), nil
	}
	var value any
	if !expires.IsZero() {
		value = metav1.NewTime(expires.UTC())
	}
	return 0, c.patchStatus(ctx, s, is, map[string]any{"expires": value})
}
