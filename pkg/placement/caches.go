package placement

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// caches is a manager's cache that counts as synced once it has what a gated pod waits for: the pods and the nodes.
// The RetainedIPs, as many as pods and dearer to decode, are read after these and not beside them. Until they are
// there the placer asks the API server for those of one pod. Other reads of what the cache does not have yet wait.
type caches struct {
	cache.Cache
	pods func(selector string) toolscache.ListerWatcher

	mu    sync.Mutex
	first []toolscache.InformerSynced
}

// open makes the cache; it is a cache.NewCacheFunc.
func (c *caches) open(config *rest.Config, o cache.Options) (cache.Cache, error) {
	pods, err := cluster.NewPods(config, o.HTTPClient)
	if err != nil {
		return nil, err
	}
	c.pods, o.NewInformer = pods.ListWatch, c.newInformer
	c.Cache, err = cache.New(config, o)
	return c, err
}

// WaitForCacheSync waits for the pods and the nodes, and reports whether they are there.
func (c *caches) WaitForCacheSync(ctx context.Context) bool {
	c.mu.Lock()
	first := c.first
	c.mu.Unlock()
	return toolscache.WaitForCacheSync(ctx.Done(), first...)
}

// filled waits for all that the cache has so far been asked for, and reports whether it is there.
func (c *caches) filled(ctx context.Context) bool { return c.Cache.WaitForCacheSync(ctx) }

func (c *caches) newInformer(from toolscache.ListerWatcher, of runtime.Object, resync time.Duration,
	indexers toolscache.Indexers) toolscache.SharedIndexInformer {
	var informer toolscache.SharedIndexInformer
	if _, ok := of.(*cluster.Pod); ok {
		informer = newPodInformer(c.pods, resync, indexers)
	} else {
		informer = toolscache.NewSharedIndexInformer(from, of, resync, indexers)
	}
	switch of.(type) {
	case *cluster.Pod, *corev1.Node:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.first = append(c.first, informer.HasSynced)
	case *stayputv1alpha1.RetainedIP:
		return lateInformer{informer, c}
	}
	return informer
}

// lateInformer is an informer that begins once the first ones are synced.
type lateInformer struct {
	toolscache.SharedIndexInformer
	caches *caches
}

// RunWithContext begins to read the cluster when the first informers have, and goes on until ctx ends.
func (i lateInformer) RunWithContext(ctx context.Context) {
	if i.caches.WaitForCacheSync(ctx) {
		i.SharedIndexInformer.RunWithContext(ctx)
	}
}
