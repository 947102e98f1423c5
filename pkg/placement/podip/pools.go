package podip

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
)

// reconcilePool writes the status of a pool, and removes the finalizer of one that is being deleted and has no PodIPs.
func (c *Controller) reconcilePool(ctx context.Context, s *session, name string) error {
	at := c.now()
	if err := c.finalizeReplaced(ctx, s, name); err != nil {
		return err
	}
	c.mu.Lock()
	o := c.pools[name]
	if o == nil {
		c.unlock()
		return nil
	}
	o = o.DeepCopy()
	plan := s.book.ReviewPool(name)
	count := s.book.Count(name, at)
	waiting := len(s.book.Waiting(name))
	strangers := len(s.book.CalicoPool(name).Strangers)
	var is pool.Pool
	var others []pool.Pool
	for _, other := range slices.Sorted(maps.Keys(c.pools)) {
		switch p := s.book.Pool(other); {
		case p == nil:
		case other == name:
			is = *p
		default:
			others = append(others, *p)
		}
	}
	c.unlock()
	if is.Name == "" {
		return nil
	}
	if len(plan.Writes) > 0 {
		return c.carryOut(ctx, s, plan, at, nil, gate.Placement{})
	}
	overlaps, err := c.overlaps(ctx, is, others)
	if err != nil {
		return err
	}
	if strangers > 0 {
		overlaps = append(overlaps, fmt.Sprintf("%d ordinary pods of Calico, which keep theirs until they end", strangers))
	}
	if isSpider(o) {
		return c.showSpiderIPPool(ctx, s, is, count, overlaps)
	}
	was := o.DeepCopy()
	o.Status.Addresses = stayputv1alpha1.PodIPPoolAddresses{Total: most(count.Total), Used: most(count.Used),
		Free: most(count.Free), OutOfRange: most(count.OutOfRange)}
	set := func(kind string, yes bool, reason, message string) {
		status := metav1.ConditionFalse
		if yes {
			status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{Type: kind, Status: status, Reason: reason,
			Message: message, ObservedGeneration: o.Generation})
	}
	switch {
	case is.Invalid != nil:
		set(stayputv1alpha1.ConditionReady, false, "Invalid", is.Invalid.Error())
	case is.Deleting:
		set(stayputv1alpha1.ConditionReady, false, "Deleting", plan.Reason)
	case is.Unready != "":
		set(stayputv1alpha1.ConditionReady, false, "CalicoNotReady", is.Unready)
	case is.Disabled:
		set(stayputv1alpha1.ConditionReady, false, "Disabled", "spec.allocation: Disabled, so there are no new allocations")
	default:
		set(stayputv1alpha1.ConditionReady, true, "Ready", "")
	}
	switch waiting {
	case 0:
		set(stayputv1alpha1.ConditionExhausted, false, "NoPodsWaiting", "")
	case 1:
		set(stayputv1alpha1.ConditionExhausted, true, "PodsWaiting", "1 pod waits for an address")
	default:
		set(stayputv1alpha1.ConditionExhausted, true, "PodsWaiting", fmt.Sprintf("%d pods wait for an address", waiting))
	}
	if len(overlaps) > 0 {
		set(stayputv1alpha1.ConditionOverlaps, true, "Overlaps", "it shares addresses with "+strings.Join(overlaps, ", "))
	} else {
		set(stayputv1alpha1.ConditionOverlaps, false, "NoOverlap", "")
	}
	if equality.Semantic.DeepEqual(was.Status, o.Status) {
		return nil
	}
	// All of it, not what differs: a status that does not exist yet needs its zeros, too.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": o.UID, "resourceVersion": o.ResourceVersion}, "status": o.Status,
	})
	if err != nil {
		return err
	}
	if err := c.client.Status().Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner); err != nil {
		return fmt.Errorf("patching the status of PodIPPool %s: %w", name, err)
	}
	c.mu.Lock()
	defer c.unlock()
	c.setPoolLocked(o)
	return nil
}

func most(n uint64) int64 { return int64(min(n, math.MaxInt64)) }

// overlapsMost is how many of them are named.
const overlapsMost = 10

// overlaps names what has addresses of a pool, too.
func (c *Controller) overlaps(ctx context.Context, p pool.Pool, others []pool.Pool) (all []string, err error) {
	if p.Invalid != nil {
		return nil, nil
	}
	for _, other := range others {
		if other.Invalid == nil && p.Range.Set.Overlaps(other.Range.Set) {
			all = append(all, "pool "+other.Name)
		}
	}
	in := func(cidrs []string) bool {
		return slices.ContainsFunc(cidrs, func(text string) bool {
			prefix, err := netip.ParsePrefix(text)
			return err == nil && p.Range.Set.Overlaps(pool.SetOf(prefix))
		})
	}
	var nodes corev1.NodeList
	if err := c.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		if p.Range.Mode == pool.Calico { // whose IPAM uses none of them
			break
		}
		if node := &nodes.Items[i]; in(append(slices.Clone(node.Spec.PodCIDRs), node.Spec.PodCIDR)) {
			all = append(all, "pods of node "+node.Name)
		}
	}
	for _, services := range c.serviceCIDRs(ctx) {
		if in(services.Spec.CIDRs) {
			all = append(all, "Services of ServiceCIDR "+services.Name)
		}
	}
	if n := len(all); n > overlapsMost {
		all = append(all[:overlapsMost], fmt.Sprintf("%d more", n-overlapsMost))
	}
	return all, nil
}

// serviceCIDRs returns the ServiceCIDRs. The status of a pool is reviewed all the time while pods come and go: they are
// read every [pool.MarkEvery].
func (c *Controller) serviceCIDRs(ctx context.Context) []networkingv1.ServiceCIDR {
	c.mu.Lock()
	defer c.unlock()
	if now := c.now(); now.Sub(c.servicesAt) >= pool.MarkEvery {
		c.servicesAt = now
		c.mu.Unlock()
		var list networkingv1.ServiceCIDRList
		err := c.live.List(ctx, &list)
		c.mu.Lock()
		if err == nil { // before Kubernetes 1.33 there are none
			c.services = list.Items
		}
	}
	return c.services
}

// showSpiderIPPool writes the counts of a SpiderIPPool, and says why it gives nothing.
func (c *Controller) showSpiderIPPool(ctx context.Context, s *session, is pool.Pool, count pool.Count,
	overlaps []string) error {
	c.mu.Lock()
	o := c.spider[is.Name]
	c.unlock()
	if o == nil {
		return nil
	}
	o = o.DeepCopy()
	switch {
	case is.Invalid != nil:
		c.sayOfSpider(s, o, "it assigns no addresses: "+is.Invalid.Error())
	case len(overlaps) > 0:
		c.sayOfSpider(s, o, "it shares addresses with "+strings.Join(overlaps, ", "))
	case o.Spec.Default != nil && *o.Spec.Default:
		c.sayOfSpider(s, o, "spec.default is not supported: only pods that request it get its addresses")
	}
	total, used := most(count.Total), most(count.Used+count.OutOfRange)
	if was := o.Status; was.TotalIPCount != nil && *was.TotalIPCount == total && was.AllocatedIPCount != nil &&
		*was.AllocatedIPCount == used {
		return nil
	}
	family := 4
	if is.Range.Subnet.Addr().Is6() {
		family = 6
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": o.UID, "resourceVersion": o.ResourceVersion},
		"status":   map[string]any{"totalIPCount": total, "allocatedIPCount": used, "ipVersion": family},
	})
	if err != nil {
		return err
	}
	if err := c.client.Status().Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner); err != nil {
		return fmt.Errorf("patching the status of SpiderIPPool %s: %w", is.Name, err)
	}
	c.mu.Lock()
	defer c.unlock()
	c.setSpiderIPPoolLocked(o)
	return nil
}

// sayOfSpider reports an Event on a SpiderIPPool, once.
func (c *Controller) sayOfSpider(s *session, o *spiderpoolv2beta1.SpiderIPPool, note string) {
	if s.firstOf(spiderIPPool+" "+o.Name, note) {
		c.events.Eventf(o, nil, corev1.EventTypeWarning, home.ReasonPoolNotServed, "Reviewing", "%s", note)
	}
}

// finalizeReplaced takes our finalizer off a SpiderIPPool that a PodIPPool of the same name has taken the place of.
func (c *Controller) finalizeReplaced(ctx context.Context, s *session, name string) error {
	c.mu.Lock()
	o, is := c.spider[name], c.pools[name]
	c.unlock()
	if o == nil || is == nil || isSpider(is) {
		return nil
	}
	o = o.DeepCopy()
	c.sayOfSpider(s, o, "it assigns no addresses: there is a PodIPPool of the same name, which takes precedence")
	if !controllerutil.ContainsFinalizer(o, stayputv1alpha1.FinalizerInUse) {
		return nil
	}
	return c.setFinalizer(ctx, o, false)
}
