package podip

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/log"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// lookForSpiderpool finds out whether Spiderpool's words count, again and again until ctx ends. While they do, it
// watches SpiderIPPools.
func (c *follower) lookForSpiderpool(ctx context.Context) {
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
			log.FromContext(ctx).Error(err, "Cannot determine whether Spiderpool's annotations apply")
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
func (c *follower) watchSpiderIPPools(ctx context.Context) (stop context.CancelFunc, err error) {
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
		return errors.New("Spiderpool has assigned addresses of it: take them over with kubectl stayput import spiderpool")
	}
	_, err := o.PodIPPoolSpec()
	return err
}

// theirFields names the fields of a SpiderIPPool that those of a PodIPPool are made of.
var theirFields = strings.NewReplacer("spec.addresses", "spec.ips", "spec.excludedAddresses", "spec.excludeIPs",
	"spec.namespaceSelector", "spec.namespaceAffinity", "spec.nodeSelector", "spec.nodeAffinity")

// readsSpiderpool reports whether this controller may list SpiderIPPools. By the same right the policy
// stayput-gate-pools knows whether Spiderpool's words count. While Spiderpool itself serves them they must not.
func (c *follower) readsSpiderpool(ctx context.Context) (bool, error) {
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
