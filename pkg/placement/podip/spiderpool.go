package podip

// This file serves the words of Spiderpool: its annotations, see package pool, and its SpiderIPPools, each as a
// PodIPPool in c.pools.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// lookForSpiderpool finds out whether Spiderpool's words count, again and again until ctx ends. While they do, it
// watches SpiderIPPools.
func (c *Controller) lookForSpiderpool(ctx context.Context) {
	var stop context.CancelFunc // of the watch
	for {
		pause := cluster.LookupEvery
		is, err := c.readsSpiderpool(ctx)
		switch {
		case err == nil && is && stop == nil:
			stop, err = c.watchSpiderIPPools(ctx)
		case err == nil && !is && stop != nil:
			stop()
			stop = nil
		}
		switch {
		case err == nil:
			c.setWords(is)
		case ctx.Err() == nil:
			log.FromContext(ctx).Error(err, "Cannot find out whether Spiderpool's annotations count")
			pause = time.Second
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// watchSpiderIPPools watches SpiderIPPools and returns once they are listed. Without such a kind it returns nil.
func (c *Controller) watchSpiderIPPools(ctx context.Context) (stop context.CancelFunc, err error) {
	_, err = c.workloads.Served(spiderpoolv2beta1.SchemeGroupVersion.WithKind(spiderIPPool))
	if apierrors.IsNotFound(err) || errors.Is(err, cluster.ErrNotServed) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	ctx, stop = context.WithCancel(ctx)
	f := c.spiderIPPools()
	f.synced = make(chan struct{})
	go c.reflect(ctx, &spiderpoolv2beta1.SpiderIPPool{}, &spiderpoolv2beta1.SpiderIPPoolList{}, f)
	select {
	case <-ctx.Done():
	case <-f.synced:
	}
	return stop, nil
}

// spiderIPPools feeds SpiderIPPools.
func (c *Controller) spiderIPPools() *feed {
	return &feed{c: c,
		set:    func(o client.Object) { c.setSpiderIPPool(o.(*spiderpoolv2beta1.SpiderIPPool)) },
		remove: func(o client.Object, _ string) { c.removeSpiderIPPool(o.GetName()) },
		all:    func() []string { return slices.Collect(maps.Keys(c.spider)) },
		end:    func(name, _ string) { c.removeSpiderIPPool(name) },
	}
}

// spiderIPPool is the kind of a pool in c.pools that is a SpiderIPPool. Of PodIPPools the kind is not known.
const spiderIPPool = "SpiderIPPool"

func isSpider(o *stayputv1alpha1.PodIPPool) bool { return o.Kind == spiderIPPool }

// adapt returns a SpiderIPPool as the PodIPPool that it is served as.
func adapt(o *spiderpoolv2beta1.SpiderIPPool) *stayputv1alpha1.PodIPPool {
	spec, _ := o.PodIPPoolSpec() // see unserved
	p := &stayputv1alpha1.PodIPPool{ObjectMeta: o.ObjectMeta, Spec: spec}
	p.Kind = spiderIPPool
	return p
}

// unserved says why a SpiderIPPool gives no addresses, nil if it does.
func unserved(o *spiderpoolv2beta1.SpiderIPPool) error {
	if o.GivenBySpiderpool() {
		return errors.New("Spiderpool has given addresses of it: take them over with kubectl stayput import spiderpool")
	}
	_, err := o.PodIPPoolSpec()
	return err
}

// theirFields names the fields of a SpiderIPPool that those of a PodIPPool are made of.
var theirFields = strings.NewReplacer("spec.addresses", "spec.ips", "spec.excludedAddresses", "spec.excludeIPs",
	"spec.namespaceSelector", "spec.namespaceAffinity", "spec.nodeSelector", "spec.nodeAffinity")

// poolOf reads a pool. c.mu is held.
func (c *Controller) poolOf(o *stayputv1alpha1.PodIPPool) pool.Pool {
	p := poolOf(o)
	if !isSpider(o) {
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

// setSpiderIPPool puts a SpiderIPPool in. One with the name of a PodIPPool gives no address. c.mu is held.
func (c *Controller) setSpiderIPPool(o *spiderpoolv2beta1.SpiderIPPool) {
	o.ManagedFields = nil
	if was := c.spider[o.Name]; was != nil && was.UID == o.UID && newer(was.ResourceVersion, o.ResourceVersion) {
		return
	}
	c.spider[o.Name] = o
	if is := c.pools[o.Name]; is == nil || isSpider(is) {
		c.setPool(adapt(o))
		return
	}
	c.enqueue(key{kindPool, o.Name})
}

// removeSpiderIPPool takes a SpiderIPPool out. c.mu is held.
func (c *Controller) removeSpiderIPPool(name string) {
	delete(c.spider, name)
	if is := c.pools[name]; is != nil && isSpider(is) {
		c.removePool(name)
	}
}

// names returns the names of the pools of a kind. c.mu is held.
func (c *Controller) names(spider bool) (names []string) {
	for name, o := range c.pools {
		if isSpider(o) == spider {
			names = append(names, name)
		}
	}
	return names
}

// put puts in a pool as a write returned it. c.mu is held.
func (c *Controller) put(o client.Object) {
	switch o := o.(type) {
	case *stayputv1alpha1.PodIPPool:
		c.setPool(o)
	case *spiderpoolv2beta1.SpiderIPPool:
		c.setSpiderIPPool(o)
	}
}

// showSpiderIPPool writes the counts of a SpiderIPPool, and says why it gives nothing.
func (c *Controller) showSpiderIPPool(ctx context.Context, s *session, is pool.Pool, count pool.Count,
	overlaps []string, held string) error {
	c.mu.Lock()
	o := c.spider[is.Name]
	c.mu.Unlock()
	if o == nil {
		return nil
	}
	o = o.DeepCopy()
	switch {
	case is.Invalid != nil:
		c.sayOfSpider(s, o, "it gives no addresses: "+is.Invalid.Error())
	case held != "":
		c.sayOfSpider(s, o, held)
	case len(overlaps) > 0:
		c.sayOfSpider(s, o, "it shares addresses with "+strings.Join(overlaps, ", "))
	case o.Spec.Default != nil && *o.Spec.Default:
		c.sayOfSpider(s, o, "spec.default is not supported: only pods that ask for it get its addresses")
	}
	total, used := most(count.Total), most(count.Used+count.OutOfRange)
	if was := o.Status; was.TotalIPCount != nil && *was.TotalIPCount == total && was.AllocatedIPCount != nil &&
		*was.AllocatedIPCount == used {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": o.UID, "resourceVersion": o.ResourceVersion},
		"status":   map[string]any{"totalIPCount": total, "allocatedIPCount": used},
	})
	if err != nil {
		return err
	}
	if err := c.client.Status().Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner); err != nil {
		return fmt.Errorf("patching the status of SpiderIPPool %s: %w", is.Name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setSpiderIPPool(o)
	return nil
}

// sayOfSpider reports an Event on a SpiderIPPool, once.
func (c *Controller) sayOfSpider(s *session, o *spiderpoolv2beta1.SpiderIPPool, note string) {
	if s.firstOf(spiderIPPool+" "+o.Name, note) {
		c.events.Eventf(o, nil, corev1.EventTypeWarning, home.ReasonPoolNotServed, "Reviewing", "%s", note)
	}
}

// letGo takes our finalizer off a SpiderIPPool that a PodIPPool of the same name has taken the place of.
func (c *Controller) letGo(ctx context.Context, s *session, name string) error {
	c.mu.Lock()
	o, is := c.spider[name], c.pools[name]
	c.mu.Unlock()
	if o == nil || is == nil || isSpider(is) {
		return nil
	}
	o = o.DeepCopy()
	c.sayOfSpider(s, o, "it gives no addresses: there is a PodIPPool of the same name, which counts")
	if !controllerutil.ContainsFinalizer(o, stayputv1alpha1.FinalizerInUse) {
		return nil
	}
	return c.setFinalizer(ctx, o, false)
}

// readsSpiderpool reports whether this controller may list SpiderIPPools. By the same right the policy
// stayput-gate-pools knows whether Spiderpool's words count. While Spiderpool itself serves them they must not.
func (c *Controller) readsSpiderpool(ctx context.Context) (bool, error) {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: "list", Group: spiderpoolv2beta1.SchemeGroupVersion.Group, Resource: "spiderippools",
		},
	}}
	if err := c.live.Create(ctx, review); err != nil {
		return false, fmt.Errorf("asking whether SpiderIPPools may be listed: %w", err)
	}
	return review.Status.Allowed, nil
}

// setWords notes whether Spiderpool's words count. If that has changed, a new Book is begun: other pods ask.
func (c *Controller) setWords(count bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.words
	if c.words = off; count {
		c.words = serving
	}
	switch {
	case was == unknown:
		close(c.read)
		c.answerLocked()
	case was != c.words && c.session != nil:
		c.session.restart()
	}
}
