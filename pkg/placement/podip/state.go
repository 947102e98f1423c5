package podip

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// state is what the controller remembers of pools, and the queues of what is to be reconciled when that changes.
type state struct {
	now       func() time.Time
	workloads *cluster.Workloads
	events    events.EventRecorder
	metrics   *metrics
	longest   time.Duration // that an address is kept; 0 is no limit
	toTell    chan struct{} // whether there are pools, perhaps
	toLabel   chan struct{} // namespaces, perhaps
	toReserve chan struct{} // subnets of pools of mode Calico, perhaps
	toDate    chan struct{} // the version of the cluster's pods

	mu     sync.Mutex // guards all below, and sessions
	served support
	// words is whether Spiderpool's words count: where SpiderIPPools may be read.
	words support
	first chan struct{} // closed once there is a pool
	read  chan struct{} // closed once it is known whether Spiderpool's words count
	queue queue
	pods  podQueue
	// unanswered are the pods for which it was not known whether they ask for addresses.
	unanswered map[types.NamespacedName]struct{}
	// pools, namespaces and above outlive a Book. namespaces is nil if they are not known yet.
	pools      map[string]*stayputv1alpha1.PodIPPool
	spider     map[string]*spiderpoolv2beta1.SpiderIPPool
	namespaces map[string]namespace
	above      *utilcache.LRUExpireCache  // the pool.Workload of a ReplicaSet, by ownerKey
	unlabelled map[string]struct{}        // namespaces that the policy has not labelled
	unready    map[string]string          // why pools of mode Calico give nothing, empty if they give; for the session
	session    *session                   // nil if there is no Book
	services   []networkingv1.ServiceCIDR // as they were read at servicesAt
	servicesAt time.Time
	// agents says on which nodes agents are to run: a pod as the template of their DaemonSet, nil if it is not known.
	agents *corev1.Pod
}

func newState(o Options) *state {
	c := &state{
		now: time.Now, workloads: o.Workloads, longest: o.LongestRetention, toTell: make(chan struct{}, 1),
		toLabel: make(chan struct{}, 1), toReserve: make(chan struct{}, 1), toDate: make(chan struct{}, 1),
		unlabelled: map[string]struct{}{}, unready: map[string]string{},
		first: make(chan struct{}), read: make(chan struct{}),
		unanswered: map[types.NamespacedName]struct{}{}, above: utilcache.NewLRUExpireCache(aboveMost),
		pools: map[string]*stayputv1alpha1.PodIPPool{}, spider: map[string]*spiderpoolv2beta1.SpiderIPPool{},
	}
	c.metrics = newMetrics(c)
	return c
}

// aboveMost is more ReplicaSets than have pods with addresses of pools, and aboveKept longer than these are silent.
const (
	aboveMost = 20_000
	aboveKept = 30 * 24 * time.Hour
)

type (
	queue    = workqueue.TypedRateLimitingInterface[pool.Key]
	podQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]
)

// support is what is known of whether there are pools.
type support int

const (
	unknown support = iota // whether the API server serves them
	off                    // it does not
	idle                   // there is none
	serving
)

// ownerKey names the owner of pods. Whoever writes a pod chooses the UID in its owner reference, which may be that of
// an object of another namespace.
type ownerKey struct{ namespace, uid string }

func ownerOf(p *pool.Pod) ownerKey { return ownerKey{p.Namespace, p.Workload.UID} }

// namespace is what matters of one.
type namespace struct {
	labels map[string]string
	asks   map[string]string // those of its annotations by which its pods ask for addresses
}

// unlock enqueues what the changes of the Book have woken, and unlocks mu.
func (c *state) unlock() {
	defer c.mu.Unlock()
	if c.session != nil {
		c.enqueueLocked(c.session.book.Woken(c.now())...)
	}
}

// enqueueLocked enqueues keys. Until there is a Book nothing is decided, but then about everything.
func (c *state) enqueueLocked(keys ...pool.Key) {
	if c.session == nil || !c.session.ready {
		return
	}
	for _, k := range keys {
		switch {
		case k.Kind == pool.KeyPod && c.pods != nil:
			c.pods.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: k.Namespace, Name: k.Name}})
		case k.Kind == pool.KeyPod || c.queue == nil:
		case k.Kind == pool.KeyPool: // whose status counts what happens all the time
			c.queue.AddAfter(k, time.Second)
		default:
			c.queue.Add(k)
		}
	}
}

// announce has the agents told whether there are pools, if that may have changed.
func (c *state) announce() {
	signal(c.toTell)
}

// has is which pools there are: served as agents are told of them, empty if there are none, and calico the subnets of
// those of mode Calico, and addresses outside of these. unread says that such addresses are not known yet.
type has struct {
	served, calico string
	routed, unread bool
}

// hasLocked returns which pools there are.
func (c *state) hasLocked() (is has) {
	served := stayputv1alpha1.ServedPools{Spiderpool: c.words == serving}
	known := c.session != nil && c.session.ready // which PodIPs there are
	var calico []string
	for _, o := range c.pools {
		if o.Spec.Mode == stayputv1alpha1.ModeCalico { // agents know nothing of it, but answer an audit
			calico = append(calico, o.Spec.Subnet)
			is.unread = !known
			if known {
				for _, a := range c.session.book.CalicoPool(o.Name).Outside {
					calico = append(calico, netip.PrefixFrom(a, a.BitLen()).String())
				}
			}
			continue
		}
		is.routed = is.routed || o.Spec.Mode == stayputv1alpha1.ModeRouted
		if p, err := netip.ParsePrefix(o.Spec.Subnet); err == nil { // else it gives nothing
			served.Subnets = append(served.Subnets, p.Masked())
		}
		if a, err := netip.ParseAddr(o.Spec.Gateway); err == nil {
			served.Gateways = append(served.Gateways, a)
		}
	}
	if len(c.pools) > 0 {
		is.served = served.Text()
	}
	slices.Sort(calico)
	is.calico = strings.Join(calico, ",")
	return is
}

// end makes a session unready, so that no further decision is made with it. Its audit is kept: the next one must not be
// older.
func (c *state) end(s *session) {
	c.mu.Lock()
	defer c.unlock()
	s.ready = false
}

// open queues everything.
func (c *state) open(s *session) {
	c.mu.Lock()
	defer c.unlock()
	s.ready = true
	s.book.WakeAll()
	signal(c.toReserve)
	c.announce()
}

// wakeAllLocked wakes everything, if there is a Book.
func (c *state) wakeAllLocked() {
	if c.session != nil {
		c.session.book.WakeAll()
	}
}

func (c *state) setPoolLocked(o *stayputv1alpha1.PodIPPool) {
	o.ManagedFields = nil
	was := c.pools[o.Name]
	if was != nil && was.UID == o.UID && pool.Newer(was.ResourceVersion, o.ResourceVersion) {
		return
	}
	had := c.hasLocked()
	if c.pools[o.Name] = o; c.hasLocked() != had {
		c.announce()
	}
	if c.served != serving {
		c.served = serving
		c.metrics.serves()
		close(c.first)
	}
	c.answerLocked()
	if c.session != nil {
		c.session.book.SetPool(c.poolLocked(o))
	}
	if o.Spec.Mode == stayputv1alpha1.ModeCalico && (was == nil || was.Generation != o.Generation) {
		signal(c.toReserve)
	}
}

func (c *state) removePoolLocked(name string) {
	had := c.hasLocked()
	if delete(c.pools, name); c.hasLocked() != had {
		c.announce()
	}
	if _, known := c.unready[name]; known {
		delete(c.unready, name)
		signal(c.toReserve)
	}
	if c.session != nil {
		c.session.book.RemovePool(name)
	}
	if o := c.spider[name]; o != nil { // its turn again
		c.setPoolLocked(adapt(o))
	}
}

// setNamespaceLocked records a namespace, and makes its gated pods follow it.
func (c *state) setNamespaceLocked(s *session, name string, is namespace) {
	if c.namespaces == nil {
		c.namespaces = map[string]namespace{}
	}
	c.namespaces[name] = is
	c.answerLocked()
	s.book.SetNamespace(name, is.labels)
	for uid := range s.gated { // what they ask for is read again
		if p := s.book.Pod(uid); p != nil && p.Namespace == name {
			c.enqueueLocked(p.Key())
		}
	}
}

// unknownLocked reports whether it is not known yet what the defaults of namespaces are, and whether they count.
func (c *state) unknownLocked() bool {
	return c.served == unknown || c.served != off && c.words == unknown || c.served == serving && c.namespaces == nil
}

// answerLocked wakes the unanswered pods, if it is known now what they ask for.
func (c *state) answerLocked() {
	if c.unknownLocked() || c.pods == nil {
		return
	}
	for pod := range c.unanswered {
		c.pods.Add(reconcile.Request{NamespacedName: pod})
	}
	clear(c.unanswered)
}

// poolLocked reads a pool.
func (c *state) poolLocked(o *stayputv1alpha1.PodIPPool) pool.Pool {
	p := poolOf(o)
	if !isSpider(o) {
		if p.Range.Mode == pool.Calico {
			why, read := c.unready[o.Name]
			if p.Unready = why; !read {
				p.Unready = calico.ErrUnread.Error()
			}
		}
		return p
	}
	if p.Invalid != nil {
		p.Invalid = errors.New(theirFields.Replace(p.Invalid.Error()))
	}
	if err := unserved(c.spider[o.Name]); err != nil {
		p.Invalid = err
	}
	return p
}

// setSpiderIPPoolLocked puts a SpiderIPPool in. One with the name of a PodIPPool gives no address.
func (c *state) setSpiderIPPoolLocked(o *spiderpoolv2beta1.SpiderIPPool) {
	o.ManagedFields = nil
	if was := c.spider[o.Name]; was != nil && was.UID == o.UID && pool.Newer(was.ResourceVersion, o.ResourceVersion) {
		return
	}
	c.spider[o.Name] = o
	if is := c.pools[o.Name]; is == nil || isSpider(is) {
		c.setPoolLocked(adapt(o))
		return
	}
	c.enqueueLocked(pool.KeyOfPool(o.Name))
}

// removeSpiderIPPoolLocked takes a SpiderIPPool out.
func (c *state) removeSpiderIPPoolLocked(name string) {
	delete(c.spider, name)
	if is := c.pools[name]; is != nil && isSpider(is) {
		c.removePoolLocked(name)
	}
}

// poolNamesLocked returns the names of the pools of a kind.
func (c *state) poolNamesLocked(spider bool) (names []string) {
	for name, o := range c.pools {
		if isSpider(o) == spider {
			names = append(names, name)
		}
	}
	return names
}

// putPoolLocked puts in a pool as a write returned it.
func (c *state) putPoolLocked(o client.Object) {
	switch o := o.(type) {
	case *stayputv1alpha1.PodIPPool:
		c.setPoolLocked(o)
	case *spiderpoolv2beta1.SpiderIPPool:
		c.setSpiderIPPoolLocked(o)
	}
}

// setWords notes whether Spiderpool's words count. If that has changed, a new Book is begun: other pods ask.
func (c *state) setWords(count bool) {
	c.mu.Lock()
	defer c.unlock()
	was := c.words
	if c.words = off; count {
		c.words = serving
	}
	if was != c.words {
		c.announce()
	}
	switch {
	case was == unknown:
		close(c.read)
		c.answerLocked()
	case was != c.words && c.session != nil:
		c.session.restartLocked()
	}
}
