package podip

import (
	"context"
	"fmt"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// lookForSpiderpool finds out whether Spiderpool's words count, again and again until ctx ends.
func (c *Controller) lookForSpiderpool(ctx context.Context) {
	for {
		pause := cluster.LookupEvery
		is, err := c.readsSpiderpool(ctx)
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
	case was != c.words && c.session != nil:
		c.session.restart()
	}
}
