// Package retainedip publishes what a node's ledgers promise as RetainedIPs in the cluster, sends what is not ordinary
// as Events, and passes on the releases that are asked for there.
//
// The ledgers are right and the objects follow. An object is
//
//   - applied if it differs from what is promised, over the very version that was compared: a user or controller that
//     sets release at the same moment saw the older state, and is answered for that;
//   - deleted if every network that it names was read and has no such promise, or its release is done;
//   - left alone in every other case: an error, a network that was not seen yet, a list that did not come.
//
// A promise's way is one: PublishClaims, the queue of names, sync, at most one write. Every object has a back-off of
// its own. Without a watch nothing is written at all: the watch alone retries while the API server is away.
package retainedip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/apiserver"
)

// Options are what a Publisher works with.
type Options struct {
	API  *apiserver.Client
	Node string // its name in the cluster
	// NamespaceGrace is how long a namespace must not have been found before what its workloads owned is released.
	NamespaceGrace time.Duration
	// Release ends claims, and calls done when the ledgers have carried it out, before the next PublishClaims. Asking
	// again before that changes nothing.
	Release  func(name Name, claims []ledger.Key, done func())
	Log      *slog.Logger
	Registry prometheus.Registerer
}

// Publisher keeps one RetainedIP for each pod that the ledgers promise an address. Its methods may be called from any
// goroutine; none but Run and DeleteAll waits for the API server.
type Publisher struct {
	o       Options
	client  *apiserver.Client
	log     *slog.Logger
	metrics *metrics
	backoff wait.Backoff // of the watch

	queue  workqueue.TypedRateLimitingInterface[Name]
	events *eventSink
	owner  nodeOwner

	mu       sync.Mutex
	objects  map[Name]*object // as the API server has them
	promised map[Name]*promised
	settled  map[string]bool    // the networks in which a missing promise is a fact
	released map[Name]types.UID // objects whose release is done
	homeless map[Name]time.Time // since when an object's namespace has not been found
	pace     map[Name]*rate.Limiter
	listedAt string // resource version of the last list
	failing  map[Name]error
	up       bool
	trouble  string // why it is not up
}

const (
	apiWriters = 2
	// A key that fails is tried again after half a second, then ever later. An API server that refuses for
	// good is asked by 5,000 agents with 100 pods each: that bounds the frequency from above.
	apiRetryFirst, apiRetryLast = 500 * time.Millisecond, time.Minute
	// paceBurst writes of one object are made as they come, more of them only at paceEvery: a pod that crashes
	// in a loop, or another writer that works against us.
	paceBurst, paceEvery = 6, 2 * time.Second
)

// watchBackoff ends at 5 to 10 s: an API that comes back is used within that time.
var watchBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 5 * time.Second}

const retainedIPs = "retainedips"

// New returns a publisher that does nothing before Run.
func New(o Options) *Publisher {
	p := &Publisher{
		o: o, client: o.API, log: o.Log, metrics: newMetrics(o.Registry),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.TypedRateLimiter[Name](jittered{
			workqueue.NewTypedItemExponentialFailureRateLimiter[Name](apiRetryFirst, apiRetryLast)})),
		objects: map[Name]*object{}, promised: map[Name]*promised{}, released: map[Name]types.UID{},
		homeless: map[Name]time.Time{}, failing: map[Name]error{}, pace: map[Name]*rate.Limiter{},
		backoff: watchBackoff, trouble: "not connected yet",
	}
	p.owner = nodeOwner{client: o.API, node: o.Node, log: o.Log}
	p.events = newEventSink(o.API, o.Node, p.metrics, o.Log, p.uidOf)
	return p
}

// jittered keeps the keys of a node, and the nodes of a cluster, from trying again in step.
type jittered struct {
	workqueue.TypedRateLimiter[Name]
}

func (j jittered) When(k Name) time.Duration {
	d := j.TypedRateLimiter.When(k)
	return d/2 + rand.N(d/2+1)
}

// Run publishes until ctx is done.
func (p *Publisher) Run(ctx context.Context) {
	var wg sync.WaitGroup
	reflector := cache.NewReflectorWithOptions(listWatch{p}, &v1alpha1.RetainedIP{}, objectStore{p},
		cache.ReflectorOptions{Name: retainedIPs, Backoff: &p.backoff})
	wg.Go(func() { reflector.RunWithContext(ctx) })
	for range apiWriters {
		wg.Go(func() {
			for p.work(ctx) {
			}
		})
	}
	wg.Go(func() { p.events.run(ctx) })
	<-ctx.Done()
	p.queue.ShutDown()
	wg.Wait()
}

// PublishClaims takes over what is promised, and queues every object that differs.
func (p *Publisher) PublishClaims(all Promises) {
	next := promisedBy(all.Claims, p.o.Node)
	settled := map[string]bool{}
	for _, n := range all.Settled {
		settled[n] = true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.promised
	for k, n := range next {
		if was[k] != nil {
			n.status = after(was[k].status, n.status)
		}
	}
	changed := !maps.Equal(settled, p.settled)
	p.promised, p.settled = next, settled
	if changed {
		p.queueAll()
		return
	}
	if !p.up {
		return // all keys are queued when it is
	}
	for k, n := range next {
		if was[k] == nil || !was[k].same(n) {
			p.queue.Add(k)
		}
	}
	for k := range was {
		if next[k] == nil {
			p.queue.Add(k)
		}
	}
}

// PublishEvent sends e if users should see it, unless too many are waiting.
func (p *Publisher) PublishEvent(e ledger.Event) { p.events.put(e) }

// queueAll queues every name. A name that is in order costs no request.
func (p *Publisher) queueAll() {
	if !p.up {
		return
	}
	for k := range p.promised {
		p.queue.Add(k)
	}
	for k := range p.objects {
		p.queue.Add(k)
	}
}

// Trouble is why objects are not up to date, for people, empty if they are.
func (p *Publisher) Trouble() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.up {
		return p.trouble
	}
	for _, err := range p.failing {
		return fmt.Sprintf("%d RetainedIPs are not up to date, for example: %v", len(p.failing), err)
	}
	return ""
}

// work syncs one object, and returns false once there will be no more.
func (p *Publisher) work(ctx context.Context) bool {
	key, shutdown := p.queue.Get()
	if shutdown {
		return false
	}
	defer p.queue.Done(key)
	err := p.sync(ctx, key)
	var later tryLater
	if errors.As(err, &later) {
		p.queue.AddAfter(key, later.after)
		return true
	}
	p.mu.Lock()
	was := p.failing[key]
	delete(p.failing, key)
	// A promise outlives its namespace; there is nothing wrong with that.
	if err != nil && !inNoNamespace(err) {
		p.failing[key] = err
	}
	p.mu.Unlock()
	if err == nil {
		p.queue.Forget(key)
		return true
	}
	news := was == nil || was.Error() != err.Error()
	if news && ctx.Err() == nil && !inNoNamespace(err) && !errors.Is(err, errNoNode) {
		p.log.Warn("Cannot update RetainedIP, retrying", "object", key.String(), "err", err)
		if apierrors.IsForbidden(err) || errors.Is(err, errSquatted) { // by a quota, say
			p.eventRefused(key, err)
		}
	}
	p.queue.AddRateLimited(key)
	return true
}

// eventRefused tells the owner of a namespace that the API server does not take an object.
func (p *Publisher) eventRefused(key Name, err error) {
	p.mu.Lock()
	want := p.promised[key]
	p.mu.Unlock()
	if want == nil {
		return
	}
	p.PublishEvent(ledger.Event{
		Reason: EventNotPublished, Pod: ledger.Pod{Namespace: key.Namespace, Name: want.spec.PodName},
		Message: fmt.Sprintf(
			"the API server refuses this pod's RetainedIP, so its successor may go to another node: %v", err),
	})
}

// sync brings one object and what is promised into agreement, with at most one write.
func (p *Publisher) sync(ctx context.Context, key Name) error {
	p.mu.Lock()
	if !p.up {
		p.mu.Unlock()
		return nil // all keys are queued when it is
	}
	o, want := p.objects[key], p.promised[key]
	done := o != nil && p.released[key] == o.uid
	known := o != nil && p.knows(o)
	if o == nil && want == nil {
		delete(p.pace, key)
		delete(p.homeless, key)
	}
	if o == nil {
		delete(p.released, key)
	}
	p.mu.Unlock()

	switch {
	case o == nil && want == nil || o != nil && o.deleting:
		return nil
	case done, want == nil && known:
		return p.delete(ctx, key, o)
	case want == nil:
		return nil
	case o != nil && o.release:
		switch want.releaseOf(o) {
		case requestHolds:
			p.o.Release(key, want.claims, func() { p.releaseDone(key, o.uid) })
			return nil
		case requestIsOver:
			p.log.Info("Ignored a release requested before the pod came back",
				"pod", key.Namespace+"/"+want.spec.PodName, "addrs", want.status.IPs)
			return p.delete(ctx, key, o)
		default:
			return nil
		}
	}
	owner, err := p.owner.get(ctx)
	if err != nil {
		return err
	}
	if o != nil && o.shows(want, owner) {
		return nil
	}
	return p.apply(ctx, key, o, want, owner)
}

// knows reports whether a promise that an object shows would be among those published.
func (p *Publisher) knows(o *object) bool {
	for _, a := range o.status.Addresses {
		if !p.settled[a.Network] {
			return false
		}
	}
	return len(p.settled) > 0
}

// releaseDone is called once the ledgers have ended the promise. One published under the same name from then on is
// another.
func (p *Publisher) releaseDone(key Name, uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if uid != "" {
		p.released[key] = uid
	}
	delete(p.promised, key)
	p.queue.Add(key)
}

// namespaceGone ends a promise whose workload went with its namespace, if its policy is Release. Only the agent can
// know: without the namespace there is no object on which a release could be requested.
func (p *Publisher) namespaceGone(key Name, want *promised) {
	now := time.Now()
	p.mu.Lock()
	since, ok := p.homeless[key]
	if !ok {
		p.homeless[key], since = now, now
	}
	p.mu.Unlock()
	if now.Sub(since) < p.o.NamespaceGrace || want.spec.WhenDeleted != v1alpha1.PolicyRelease ||
		want.status.Phase != v1alpha1.PhaseRetained {
		return
	}
	p.log.Info("Releasing, the workload's namespace was deleted",
		"pod", key.Namespace+"/"+want.spec.PodName, "addrs", want.status.IPs)
	p.o.Release(key, want.claims, func() { p.releaseDone(key, "") })
}

// keep takes over an object, unless a newer one is there: from the watch, or as the answer to what was applied. The
// watch brings the same version once more, before or after.
func (p *Publisher) keep(r *v1alpha1.RetainedIP, applied *promised) {
	key, o := objectOf(r)
	o.answer = applied
	p.mu.Lock()
	defer p.mu.Unlock()
	if was := p.objects[key]; was != nil && was.uid == o.uid {
		c, err := resourceversion.CompareResourceVersion(o.version, was.version)
		if err == nil && c < 0 {
			return
		}
		if err == nil && c == 0 && o.answer == nil {
			o.answer = was.answer
		}
	}
	p.objects[key] = o
	p.queue.Add(key)
}

// forget drops an object that is gone.
func (p *Publisher) forget(key Name, uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.objects[key]; o != nil && o.uid == uid {
		delete(p.objects, key)
		p.queue.Add(key)
	}
}

// uidOf returns the UID of an object, empty if none is known.
func (p *Publisher) uidOf(key Name) types.UID {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.objects[key]; o != nil {
		return o.uid
	}
	return ""
}
