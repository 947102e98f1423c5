package podip

import (
	"context"
	"errors"
	"reflect"
	"sync"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/node/wake"
)

// listing is whether all pods of the node are known. Its methods may be called with any lock held.
type listing struct {
	mu       sync.Mutex
	complete bool
	again    func() // ends what follows the last list, nil if there was none
}

// reset is for a Keeper that begins.
func (l *listing) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complete, l.again = false, nil
}

// begin notes that a list begins, and how what follows it ends early.
func (l *listing) begin(again func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.again = again
}

// end notes that all pods were listed. It reports whether they were known before.
func (l *listing) end() (before bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, l.complete = l.complete, true
	return before
}

// repeat makes the watch list all pods: what is known of them may be of before a restore.
func (l *listing) repeat() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.complete = false; l.again != nil {
		l.again()
	}
}

func (l *listing) isComplete() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.complete
}

// follower knows the pods of the node, and tells the plugin of the cluster's pools. It has no lock.
type follower struct {
	node    string
	api     api
	grants  grants.Dir
	served  *servedPools
	pods    *podTable
	listing *listing
	// listed are raised by each list, and if the files of pools were lost.
	listed   []wake.Signal
	troubles *troubles
}

// run follows the pods of the node until ctx is done.
func (f *follower) run(ctx context.Context) {
	f.troubles.follow(ctx, "pods", apiwatch.Loop{
		What: "the pods of the node", List: f.list, Watch: f.api.WatchPods, Event: f.event,
	})
}

// list lists the pods of the node. Those that changed, or after an interruption all, are queued.
func (f *follower) list(ctx context.Context, c apiwatch.Cycle) (version string, err error) {
	f.listing.begin(c.Again)
	pods, version, err := f.api.Pods(ctx)
	if err != nil {
		return "", err
	}
	all := map[string]bool{}
	for i := range pods {
		all[string(pods[i].UID)] = true
		f.put(&pods[i])
	}
	// The table is whole before the list counts: who finds it complete relies on that.
	f.pods.replaceAll(all)
	if before := f.listing.end(); c.Interrupted || !before {
		f.pods.enqueueAll()
	}
	for _, s := range f.listed {
		s.Up()
	}
	return version, nil
}

// event takes over what has happened to a pod of the node.
func (f *follower) event(e watch.Event) error {
	p, ok := e.Object.(*Pod)
	switch {
	case !ok:
	case e.Type == watch.Deleted:
		f.pods.vanished(string(p.UID))
	default:
		f.put(p)
	}
	return nil
}

// put records a pod of the node.
func (f *follower) put(p *Pod) {
	if p.Spec.NodeName == "" || p.Spec.NodeName == f.node { // else it is not what was asked for
		f.pods.put(p)
	}
}

// tellServed tells the plugin what pools there are, if that has changed. That there are none goes without saying until
// there were some.
func (f *follower) tellServed() error {
	was, err := f.grants.Served()
	if err != nil && !errors.Is(err, grants.ErrCorrupt) {
		return err
	}
	now := grants.Served{Version: 1, None: true}
	if pools, _ := f.served.get(); pools != nil {
		now = grants.Served{Version: 1, Subnets: pools.Subnets, Gateways: pools.Gateways, More: pools.More,
			Spiderpool: pools.Spiderpool}
	}
	if err == nil && (was == nil && now.None || was != nil && reflect.DeepEqual(*was, now)) {
		return nil
	}
	if err := f.grants.PutServed(now); err != nil || was != nil {
		return err
	}
	for _, s := range f.listed { // the grants may be lost, too
		s.Up()
	}
	return nil
}
