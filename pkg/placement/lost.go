package placement

import (
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
)

// lostNodes are the nodes that the cluster lost lately, by when. Every replica follows them. Lost with the process: the
// scheduler may bind a pod to the node that is gone.
type lostNodes struct {
	now func() time.Time
	mu  sync.Mutex
	at  map[string]time.Time
}

// lostLately is for how long the scheduler may not know that a node is gone. It is short because a node that comes back
// under its name would be kept from a pod for good.
const lostLately = 10 * time.Second

func newLostNodes(now func() time.Time) *lostNodes {
	return &lostNodes{now: now, at: map[string]time.Time{}}
}

// nodes follows the nodes, on every replica.
func (l *lostNodes) nodes() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			if node, ok := o.(*corev1.Node); ok {
				l.mu.Lock()
				defer l.mu.Unlock()
				delete(l.at, node.Name)
			}
		},
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if node, ok := o.(*corev1.Node); ok {
				l.loses(node.Name)
			}
		},
	}
}

// loses notes that the cluster has lost a node. The event source that wakes the pods waiting for the node may hear of
// it first.
func (l *lostNodes) loses(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	maps.DeleteFunc(l.at, func(_ string, at time.Time) bool { return now.Sub(at) > lostLately })
	l.at[node] = now
}

// lostNode reports whether the cluster has lost a node lately.
func (l *lostNodes) lostNode(node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	at, ok := l.at[node]
	return ok && l.now().Sub(at) <= lostLately
}
