package podip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime/debug"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
)

// follower begins a Book, feeds it with what the cluster says, and ends it once it is stale.
type follower struct {
	*writer
	announcer *announcer
	reserver  *reserver
	informers cache.Informers
	cached    client.Reader // has Pods
	// eachPod lists the metadata of pods past the cache.
	eachPod func(context.Context, metav1.ListOptions, func(*corev1.Pod) error) error
}

// Start serves pools until ctx ends. It watches PodIPPools once the API server serves them, and everything else once
// there is one.
func (c *follower) Start(ctx context.Context) error {
	for {
		is, pause := c.look(ctx), cluster.LookupEvery
		if is == serving {
			break
		}
		if is == unknown { // until then no pod at all is placed
			pause = time.Second
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
	go c.reflect(ctx, &stayputv1alpha1.PodIPPool{}, &stayputv1alpha1.PodIPPoolList{}, &feed{
		set: func(o client.Object) { c.setPoolLocked(o.(*stayputv1alpha1.PodIPPool)) },
		remove: func(o client.Object, _ string) {
			c.removePoolLocked(o.GetName())
		},
		all: func() []string { return c.poolNamesLocked(false) },
		end: func(name, _ string) { c.removePoolLocked(name) },
		listed: func() {
			if c.served == unknown {
				c.served = idle
			}
			c.answerLocked()
			c.announce()
		},
		c: c.state,
	})
	go c.announcer.announces(ctx)
	go c.reflect(ctx, metadata("Namespace"), metadataList("Namespace"), c.toBeLabelled())
	go c.labels(ctx)
	go c.lookForSpiderpool(ctx)
	go c.reserver.run(ctx)
	for _, known := range []chan struct{}{c.first, c.read} {
		select {
		case <-ctx.Done():
			return nil
		case <-known:
		}
	}
	for ctx.Err() == nil {
		err := c.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		log.FromContext(ctx).Info("Listing pools, their addresses and pods again", "reason", fmt.Sprint(err))
		if !errors.Is(err, errStale) {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	return nil
}

// look finds out whether the API server serves pools.
func (c *follower) look(ctx context.Context) support {
	_, err := c.workloads.Served(stayputv1alpha1.SchemeGroupVersion.WithKind("PodIPPool"))
	if err == nil { // and whether they may be read
		err = c.live.List(ctx, &stayputv1alpha1.PodIPPoolList{}, client.Limit(1))
	}
	c.mu.Lock()
	defer c.unlock()
	switch {
	case err == nil:
		if c.served != serving {
			c.served = unknown // until they are listed
		}
		return serving
	case errors.Is(err, cluster.ErrNotServed), apierrors.IsForbidden(err):
		if c.served != off {
			log.FromContext(ctx).Info("No pools", "reason", err.Error())
		}
		c.served = off
		c.answerLocked()
	default: // also if the API server does not serve RetainedIPs either, as right after its start
		log.FromContext(ctx).Error(err, "Cannot determine whether the cluster has pools")
	}
	return c.served
}

// serve begins a Book and keeps it until it is stale, an error occurs or ctx ends.
func (c *follower) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer c.end(s)

	// 1. What only pools need is listed now, after the audit was read.
	var feeds []*feed
	for _, f := range []struct {
		object client.Object
		list   client.ObjectList
		*feed
	}{
		{&stayputv1alpha1.PodIP{}, &stayputv1alpha1.PodIPList{}, c.addresses(s)},
		{&stayputv1alpha1.PodIPReport{}, &stayputv1alpha1.PodIPReportList{}, c.reports(s)},
		{metadata("Namespace"), metadataList("Namespace"), c.ofNamespaces(s)},
	} {
		f.synced = make(chan struct{})
		feeds = append(feeds, f.feed)
		go c.reflect(ctx, f.object, f.list, f.feed)
	}
	for _, f := range feeds {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.synced:
		}
	}

	// 2. Nodes and pods are in the caches already. What these have may be older than the audit: pods are listed, too.
	for object, handler := range map[client.Object]toolscache.ResourceEventHandler{
		&corev1.Node{}: c.nodes(s), &cluster.Pod{}: c.podEvents(ctx, s),
	} {
		informer, err := c.informers.GetInformer(ctx, object)
		if err != nil {
			return err
		}
		registered, err := informer.AddEventHandler(handler)
		if err != nil {
			return err
		}
		defer func() { _ = informer.RemoveEventHandler(registered) }()
		if !toolscache.WaitForCacheSync(ctx.Done(), registered.HasSynced) {
			return ctx.Err()
		}
	}
	c.findAgents(ctx, s)
	if err := c.listPods(ctx, s); err != nil {
		return err
	}
	c.open(s)
	go c.giveBack(ctx)
	go c.datePods(ctx, s)

	// 3. The mark, and a look at all that waits.
	tick := time.NewTicker(pool.MarkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.stale:
			return errStale
		case <-tick.C:
		}
		if err := c.mark(ctx, s); err != nil && !Changed(err) {
			log.FromContext(ctx).Error(err, "Cannot renew the mark of the PodIPAudit")
		}
		c.findAgents(ctx, s)
		c.mu.Lock()
		s.book.WakeWaiting()
		c.unlock()
	}
}

// giveBack returns memory to the system once everything has been reconciled. The lists of all and the first look leave
// more garbage than what is kept of them, and a controller that then has nothing to do would keep it.
func (c *follower) giveBack(ctx context.Context) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for idle := false; !idle; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c.mu.Lock()
		idle = c.queue != nil && c.queue.Len() == 0 && (c.pods == nil || c.pods.Len() == 0)
		c.unlock()
	}
	debug.FreeOSMemory()
}

// begin reads and marks the audit, and begins a Book by it.
func (c *follower) begin(ctx context.Context) (*session, error) {
	live, err := c.audit(ctx)
	if err != nil {
		return nil, err
	}
	var seen pool.Audit
	c.mu.Lock()
	if c.session != nil {
		seen = c.session.book.Audit()
	}
	c.unlock()
	next, err := c.writeAudit(ctx, pool.Lead(live, seen, c.now().Truncate(time.Microsecond)))
	if err != nil {
		return nil, fmt.Errorf("marking the PodIPAudit: %w", err)
	}
	s := &session{
		book: pool.NewBook(next), invalid: map[pool.UID]error{}, gated: map[pool.UID]*wait{},
		refused: map[pool.UID]time.Time{}, ending: map[pool.UID]struct{}{}, tookBack: map[string]time.Time{},
		expires: map[netip.Addr]time.Time{}, said: map[string]said{}, stale: make(chan struct{}), c: c.state,
	}
	c.mu.Lock()
	defer c.unlock()
	c.session = s
	clear(c.unready) // the next look is for this Book
	signal(c.toReserve)
	for _, o := range c.pools {
		s.book.SetPool(c.poolLocked(o))
	}
	return s, nil
}

// mark renews the mark of the audit, and ends the session if that shows that the Book is stale.
func (c *follower) mark(ctx context.Context, s *session) error {
	live, err := c.audit(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	w := s.book.Lead(live, c.now().Truncate(time.Microsecond)).(pool.WriteAudit)
	c.unlock()
	next, err := c.writeAudit(ctx, w.Audit)
	if err != nil {
		return err
	}
	s.setAudit(next)
	return nil
}

// listPods puts in the pods past the cache that ask for addresses of pools, have some, or are known to. Those from
// before Stayput, and those that lost it, are labelled: from then on the cache has them.
func (c *follower) listPods(ctx context.Context, s *session) error {
	c.mu.Lock()
	s.before, s.ended = map[pool.UID]*pool.Pod{}, map[pool.UID]bool{}
	for _, uid := range s.book.Pods() {
		s.before[uid] = s.book.Pod(uid)
	}
	c.unlock()
	exist, concerned := map[pool.UID]bool{}, []*cluster.Pod{}
	if err := c.eachPod(ctx, metav1.ListOptions{}, func(pod *corev1.Pod) error {
		exist[pod.UID] = true
		if pod := cluster.PodOf(pod); c.concerns(s, pod) {
			concerned = append(concerned, pod)
		}
		return nil
	}); err != nil {
		return err
	}
	for _, listed := range concerned {
		pod, err := c.current(ctx, listed)
		switch {
		case err != nil:
			return fmt.Errorf("reading pod %s/%s: %w", listed.Namespace, listed.Name, err)
		case pod == nil: // it has ended
			delete(exist, listed.UID)
		default:
			s.setPod(pod, true)
		}
	}
	c.mu.Lock()
	known := s.book.Pods()
	s.before, s.ended = nil, nil
	c.unlock()
	for _, uid := range known {
		if !exist[uid] && !c.there(ctx, s, uid) {
			s.removePod(uid, "", "")
		}
	}
	return nil
}

// concerns reports whether a pod, of which only the metadata is known, may have to do with pools.
func (c *follower) concerns(s *session, pod *cluster.Pod) bool {
	c.mu.Lock()
	defer c.unlock()
	return labelled(pod) || s.book.Pod(pod.UID) != nil || s.book.Given(pod.UID) != nil ||
		asks(pod, namespace{}, c.words == serving)
}

func labelled(o client.Object) bool {
	_, is := o.GetLabels()[gate.ManagedLabel]
	return is
}

// current returns a pod as it is by the API server, nil if it has ended: from the cache, if that has the version that
// was listed.
func (c *follower) current(ctx context.Context, listed *cluster.Pod) (*cluster.Pod, error) {
	key, is := client.ObjectKeyFromObject(listed), &cluster.Pod{}
	err := c.cached.Get(ctx, key, is, client.UnsafeDisableDeepCopy)
	if err == nil && is.ResourceVersion == listed.ResourceVersion && is.UID == listed.UID {
		return is, nil
	}
	pod := &corev1.Pod{}
	if err := c.live.Get(ctx, key, pod); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	if pod.UID != listed.UID {
		return nil, nil
	}
	if is = cluster.PodOf(pod); !labelled(is) {
		err = gate.Label(ctx, c.client, pod)
	}
	return is, client.IgnoreNotFound(err)
}

// ended reports whether a pod that the cache has lost has ended. If it has only lost its label, it gets that again: its
// end must be seen.
func (c *follower) ended(ctx context.Context, s *session, pod *cluster.Pod) bool {
	c.mu.Lock()
	known := s.book.Pod(pod.UID) != nil || s.book.Given(pod.UID) != nil
	c.unlock()
	for known {
		is := metadata("Pod")
		err := c.live.Get(ctx, client.ObjectKeyFromObject(pod), is)
		switch {
		case apierrors.IsNotFound(err), err == nil && is.UID != pod.UID:
			return true
		case err == nil && labelled(is):
			return false
		case err == nil:
			if err := gate.Label(ctx, c.client, is); err != nil {
				log.FromContext(ctx).Error(err, "Cannot label pod", "pod", client.ObjectKeyFromObject(pod))
			}
			return false
		}
		log.FromContext(ctx).Error(err, "Cannot determine whether pod has ended", "pod", client.ObjectKeyFromObject(pod))
		select {
		case <-ctx.Done():
			return false
		case <-time.After(time.Second):
		}
	}
	return true
}

// there reports whether a pod that was not listed came while the list was made, or may have.
func (c *follower) there(ctx context.Context, s *session, uid pool.UID) bool {
	c.mu.Lock()
	p := s.book.Pod(uid)
	c.unlock()
	if p == nil {
		return false
	}
	is := metadata("Pod")
	err := c.live.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, is)
	return err == nil && is.UID == uid || err != nil && !apierrors.IsNotFound(err)
}
