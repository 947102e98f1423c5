package podip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// This file is for pools of mode Calico: it reserves their subnets in Calico's IPAM, and asks that about addresses.

// newIPAM returns the IPAM of the cluster's Calico.
func newIPAM(live client.Client, workloads *cluster.Workloads) *calico.IPAM {
	return calico.New(live, func(gvk schema.GroupVersionKind) (bool, error) {
		_, err := workloads.Served(gvk)
		if errors.Is(err, cluster.ErrNotServed) || apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	}, time.Now)
}

// reserver reserves the subnets of pools of mode Calico.
type reserver struct{ *writer }

// run keeps the subnets of pools of mode Calico reserved, and says why pods cannot have addresses of one, until ctx
// ends. While there is such a pool it watches Calico's configuration, and reads it once that may be another.
// Unless all is well it also reads it every [cluster.LookupEvery].
func (c *reserver) run(ctx context.Context) {
	reserved := true // something may be, from before
	var watched []schema.GroupVersionKind
	unwatch := func() {}
	defer func() { unwatch() }()
	for {
		c.mu.Lock()
		var pools []*stayputv1alpha1.PodIPPool
		for _, name := range slices.Sorted(maps.Keys(c.pools)) {
			if o := c.pools[name]; o.Spec.Mode == stayputv1alpha1.ModeCalico {
				pools = append(pools, o)
			}
		}
		known, s := c.served == idle || c.served == serving, c.session
		// Until PodIPs are known, so are no addresses that are reserved one by one.
		known = known && (len(pools) == 0 || s != nil && s.ready)
		c.unlock()
		again := time.After(cluster.LookupEvery)
		if known && (reserved || len(pools) > 0) {
			config, left, err := c.reserve(ctx, s, pools)
			if err != nil && len(pools) > 0 && ctx.Err() == nil {
				log.FromContext(ctx).Error(err, "Cannot serve pools of mode Calico")
			}
			reserved = left
			if !left || config != nil && !slices.Equal(config.Kinds, watched) {
				unwatch()
				watched = nil
			}
			if left && config != nil && watched == nil {
				unwatch = c.watchCalico(ctx, config.Kinds)
				watched = config.Kinds
			}
			if config != nil && err == nil && c.settled(s, pools...) {
				again = nil
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-c.toReserve:
		case <-again:
		}
	}
}

// watchCalico signals whenever an object of these kinds may have changed, until it is ended. So does a list of them,
// also if it fails: an upgrade of Calico may have moved them.
func (c *reserver) watchCalico(ctx context.Context, kinds []schema.GroupVersionKind) (end func()) {
	ctx, end = context.WithCancel(ctx)
	for _, kind := range kinds {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		loop := apiwatch.Loop{
			What: kind.Kind,
			List: func(ctx context.Context, _ apiwatch.Cycle) (string, error) {
				err := c.live.List(ctx, list)
				return list.ResourceVersion, err
			},
			Watch: func(ctx context.Context, version string) (watch.Interface, error) {
				seconds := int64(apiwatch.Timeout / time.Second)
				return c.live.Watch(ctx, list, &client.ListOptions{Raw: &metav1.ListOptions{
					ResourceVersion: version, AllowWatchBookmarks: true, TimeoutSeconds: &seconds}})
			},
			Event: func(watch.Event) error { signal(c.toReserve); return nil },
			Note:  func(error) { signal(c.toReserve) },
		}
		go loop.Run(ctx)
	}
	return end
}

// settled reports whether pods get addresses of pools, no ordinary pods have some, and no imported ones are to be
// confirmed, so that nothing is to be read again unless Calico's configuration changes.
func (c *reserver) settled(s *session, pools ...*stayputv1alpha1.PodIPPool) bool {
	c.mu.Lock()
	defer c.unlock()
	for _, o := range pools {
		why, looked := c.unready[o.Name]
		is := s.book.CalicoPool(o.Name)
		if !looked || why != "" || len(is.Strangers)+len(is.Unconfirmed) > 0 {
			return false
		}
	}
	return true
}

// reserve reserves the subnets of pools, and takes back the reservations of pools that are no more. It returns Calico's
// configuration, nil if it is not known, and reports whether any reservations are left. After an error that says
// nothing about Calico, what was known of the pools stands.
func (c *reserver) reserve(ctx context.Context, s *session, pools []*stayputv1alpha1.PodIPPool) (
	config *calico.Config, left bool, err error) {
	config, err = c.ipam.Read(ctx)
	switch {
	case errors.Is(err, calico.ErrNotServed):
		c.setUnready(s, pools, "the API server has no IPAM of Calico: Calico is not installed, or keeps its data in an etcd "+
			"of its own, which is not supported")
		return nil, false, nil
	case apierrors.IsForbidden(err):
		c.setUnready(s, pools, fmt.Sprintf("%v: install stayput with pools.calico=true", err))
		return nil, len(pools) > 0, nil
	case err != nil:
		return nil, true, err
	}
	var errs []error
	var kept []string
	for _, o := range pools {
		why, err := c.prepare(ctx, s, config, o)
		singles, failed := c.adopt(ctx, s, config, o.Name, why == "" && err == nil)
		kept, errs = append(append(kept, o.Name), singles...), append(errs, failed)
		if err != nil && !apierrors.IsForbidden(err) {
			errs = append(errs, err)
			continue
		}
		if err != nil {
			why = fmt.Sprintf("%v: install stayput with pools.calico=true", err)
		}
		c.setUnready(s, []*stayputv1alpha1.PodIPPool{o}, why)
	}
	for _, name := range config.Reservations() {
		if slices.Contains(kept, name) || c.singleHeld(ctx, name) {
			left = true
		} else if err := c.ipam.Unreserve(ctx, config, name); err != nil {
			left, errs = true, append(errs, err)
		}
	}
	return config, left || len(pools) > 0, errors.Join(errs...)
}

// prepare reserves the subnet of a pool and finds out which of its addresses ordinary pods have. why says why pods
// cannot start with addresses of the pool, empty if they can.
func (c *reserver) prepare(ctx context.Context, s *session, config *calico.Config, o *stayputv1alpha1.PodIPPool) (
	why string, err error) {
	r, err := pool.Parse(o.Spec)
	if err != nil {
		return err.Error(), nil
	}
	why = config.Refuses(r.Subnet)
	since := config.Reserved(o.Name, r.Subnet)
	if since.IsZero() {
		if why != "" && !c.inUse(s, o.Name) { // nothing to protect
			return why, nil
		}
		if err := c.ipam.Reserve(ctx, config, o.Name, o.Name, r.Subnet); err != nil {
			return "", err
		}
		since = c.now()
		log.FromContext(ctx).Info("Reserved a subnet in Calico's IPAM", "pool", o.Name, "subnet", r.Subnet)
	}
	if why != "" {
		return why, nil
	}
	if left := since.Add(calico.ReserveSettles).Sub(c.now()); left > 0 {
		time.AfterFunc(left, func() { signal(c.toReserve) })
		return fmt.Sprintf("its subnet was reserved in Calico's IPAM just now, and pods that are starting may still get "+
			"addresses of it: wait until %s", since.Add(calico.ReserveSettles).UTC().Format(time.RFC3339)), nil
	}
	if c.settled(s, o) {
		return "", nil
	}
	at := c.now()
	all, err := c.ipam.Allocated(ctx, r.Subnet)
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	defer c.unlock()
	s.book.SetAllocations(o.Name, all, at)
	return "", nil
}

// adopt reserves the addresses of a pool that are outside of its subnet: its pods had them before (kubectl stayput
// import calico). It returns the names of their reservations. Once no ADD can be under way that began earlier, it finds
// out by Calico's IPAM whether the pods have them.
func (c *reserver) adopt(ctx context.Context, s *session, config *calico.Config, name string, ready bool) (
	reserved []string, err error) {
	c.mu.Lock()
	is := s.book.CalicoPool(name)
	c.unlock()
	outside, unconfirmed := is.Outside, is.Unconfirmed
	var errs []error
	for _, a := range outside {
		single, subnet := calico.SinglePrefix+stayputv1alpha1.PodIPName(a), netip.PrefixFrom(a, a.BitLen())
		since := config.Reserved(single, subnet)
		if since.IsZero() {
			errs, since = append(errs, c.ipam.Reserve(ctx, config, single, name, subnet)), c.now()
		}
		if c.now().Sub(since) < calico.ReserveSettles {
			unconfirmed = slices.DeleteFunc(unconfirmed, func(is netip.Addr) bool { return is == a })
		}
		reserved = append(reserved, single)
	}
	if !ready {
		unconfirmed = nil
	}
	for _, a := range unconfirmed {
		is, err := c.ipam.Observe(ctx, a)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		is.Reserved = true
		c.mu.Lock()
		s.book.SetAllocation(a, is)
		c.enqueueLocked(pool.KeyOfAddress(a))
		c.unlock()
	}
	return reserved, errors.Join(errs...)
}

// singleHeld reports whether a reservation is that of an address which has a PodIP, past the cache: another controller,
// which leads by now, may know of it.
func (c *reserver) singleHeld(ctx context.Context, name string) bool {
	name, single := strings.CutPrefix(name, calico.SinglePrefix)
	return single && !apierrors.IsNotFound(c.live.Get(ctx, types.NamespacedName{Name: name}, &stayputv1alpha1.PodIP{}))
}

// inUse reports whether pods have addresses of a pool, or are promised some.
func (c *reserver) inUse(s *session, name string) bool {
	c.mu.Lock()
	defer c.unlock()
	count := s.book.Count(name, c.now())
	return count.Used+count.OutOfRange > 0
}

// setUnready notes why pools of mode Calico give nothing, for the Book that was looked at: another one begins without
// what this one knows.
func (c *reserver) setUnready(s *session, pools []*stayputv1alpha1.PodIPPool, why string) {
	c.mu.Lock()
	defer c.unlock()
	if c.session != s {
		signal(c.toReserve)
		return
	}
	for _, o := range pools {
		was, known := c.unready[o.Name]
		if c.unready[o.Name] = why; known && was == why || c.pools[o.Name] == nil || s == nil {
			continue
		}
		s.book.SetPool(c.poolLocked(c.pools[o.Name]))
	}
}

// signal delivers a signal, unless one is waiting.
func signal(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// observeAllocation puts into the Book what Calico's IPAM says of an address, if that matters to its review.
func (c *writer) observeAllocation(ctx context.Context, s *session, a netip.Addr) error {
	c.mu.Lock()
	ask := s.book.ToObserve(a, c.now())
	c.unlock()
	if !ask {
		return nil
	}
	return c.observeAnyAllocation(ctx, s, a)
}

// observeAnyAllocation puts into the Book what Calico's IPAM says of an address.
func (c *writer) observeAnyAllocation(ctx context.Context, s *session, a netip.Addr) error {
	is, err := c.ipam.Observe(ctx, a)
	if err != nil {
		return fmt.Errorf("asking Calico's IPAM about %s: %w", a, err)
	}
	c.mu.Lock()
	defer c.unlock()
	s.book.SetAllocation(a, is)
	return nil
}

// datePods reads which version the cluster's pods have while pods of pools of mode Calico are being deleted, until ctx
// ends.
func (c *follower) datePods(ctx context.Context, s *session) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.toDate:
		}
		at, pods := c.now(), metadataList("Pod")
		err := c.live.List(ctx, pods, client.Limit(1))
		if err != nil && ctx.Err() == nil { // then contact with the node tells, later
			log.FromContext(ctx).Error(err, "Cannot read the version of the cluster's pods")
		}
		c.mu.Lock()
		if err == nil {
			s.book.DatePods(pods.ResourceVersion, at)
		}
		c.unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(pool.DateEvery):
		}
		c.mu.Lock()
		if len(s.ending) > 0 {
			signal(c.toDate)
		}
		c.unlock()
	}
}

// readContacts reads when the Leases of nodes were renewed, past the caches.
func (c *writer) readContacts(ctx context.Context, s *session, nodes []string) error {
	var leases coordinationv1.LeaseList
	at := c.now()
	if len(nodes) == 1 {
		var lease coordinationv1.Lease
		name := types.NamespacedName{Namespace: corev1.NamespaceNodeLease, Name: nodes[0]}
		if err := c.live.Get(ctx, name, &lease); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("reading the Lease of node %s: %w", nodes[0], err)
		}
		leases.Items = []coordinationv1.Lease{lease}
	} else if err := c.live.List(ctx, &leases, client.InNamespace(corev1.NamespaceNodeLease)); err != nil {
		return fmt.Errorf("listing the Leases of nodes: %w", err)
	}
	c.mu.Lock()
	defer c.unlock()
	for _, lease := range leases.Items {
		if lease.Spec.RenewTime != nil {
			s.book.SetContact(lease.Name, lease.Spec.RenewTime.Time, at)
		}
	}
	return nil
}

// freeAllocation frees an address in Calico's IPAM.
func (c *writer) freeAllocation(ctx context.Context, s *session, w pool.FreeAllocation) error {
	if err := c.ipam.Free(ctx, w.Addr, w.Allocation); err != nil {
		return err
	}
	log.FromContext(ctx).Info("Freed an address in Calico's IPAM", "address", w.Addr,
		"pod", w.Allocation.Namespace+"/"+w.Allocation.Pod, "node", w.Allocation.Node)
	c.mu.Lock()
	defer c.unlock()
	s.book.SetAllocation(w.Addr, pool.Allocation{At: c.now()})
	return nil
}

// asksCalico puts the annotation by which Calico's plugin gives a pod its addresses among those that it is given.
func asksCalico(annotations map[string]string, addresses []pool.Address) error {
	var asked []string
	for _, a := range addresses {
		if a.Mode == pool.Calico {
			asked = append(asked, a.Prefix.Addr().String())
		}
	}
	if asked == nil {
		return nil
	}
	text, err := json.Marshal(asked)
	annotations[calico.AnnotationAddresses] = string(text)
	return err
}
