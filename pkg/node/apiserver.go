package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
)

// apiServer is the Publisher of a node in a cluster. It keeps one RetainedIP for each pod that the ledgers
// promise an address, and obeys spec.release on it.
//
// The ledgers are right and the objects follow. An object is
//
//   - applied where it differs from what is promised, over the very version that was compared: whoever sets
//     release at the same moment saw the older state, and is answered for that;
//   - deleted where every network that it names was read and has no such promise, or its release is done;
//   - left alone in every other case: an error, a network that was not seen yet, a list that did not come.
//
// Every object is settled by itself, by a queue of its keys, with a back-off of its own. While the watch does
// not stand nothing is written at all: it is the one thing that tries again while the API server is away.
type apiServer struct {
	client  *rest.RESTClient
	node    string
	log     *slog.Logger
	metrics *apiMetrics
	grace   time.Duration // how long a namespace must have been gone
	// release ends claims and calls done when the ledgers have carried it out, before the next PublishClaims.
	release func(key objectKey, claims []ledger.Key, done func())

	backoff wait.Backoff // of the watch

	queue  workqueue.TypedRateLimitingInterface[objectKey]
	events *eventSink
	owner  nodeOwner

	mu       sync.Mutex
	objects  map[objectKey]*object // as the API server has them
	promised map[objectKey]*promised
	settled  map[string]bool         // the networks in which a missing promise is a fact
	released map[objectKey]types.UID // objects whose release is done
	homeless map[objectKey]time.Time // since when an object's namespace has not been found
	pace     map[objectKey]*rate.Limiter
	listedAt string // resource version of the last list
	failing  map[objectKey]error
	up       bool
	trouble  string // why it is not up
}

const (
	// callTimeout is for one request. The API server itself gives up after 60 s; nothing waits for us.
	callTimeout = 10 * time.Second
	listTimeout = 30 * time.Second
	// apiQPS and apiBurst let a node whose pods all stop at once tell so within 2 s.
	apiQPS, apiBurst = 20, 200
	apiWriters       = 2
	// A key that fails is tried again after half a second, then ever later. An API server that refuses for
	// good is asked by 5,000 agents with 100 pods each: that bounds the frequency from above.
	apiRetryFirst, apiRetryLast = 500 * time.Millisecond, time.Minute
	// paceBurst writes of one object are made as they come, more of them only at paceEvery: a pod that crashes
	// in a loop, or somebody who writes against us.
	paceBurst, paceEvery = 6, 2 * time.Second
)

// watchBackoff ends at 5 to 10 s: an API that comes back is used within that time.
var watchBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 5 * time.Second}

const retainedIPs = "retainedips"

func newAPIServer(c *rest.Config, node string, grace time.Duration, m *apiMetrics, log *slog.Logger) (*apiServer, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c = rest.CopyConfig(c)
	c.APIPath, c.GroupVersion = "/apis", &v1alpha1.SchemeGroupVersion
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.ContentType = runtime.ContentTypeJSON
	c.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(apiQPS, apiBurst)
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("API client for %s: %w", c.Host, err)
	}
	p := &apiServer{
		client: client, node: node, log: log, metrics: m, grace: grace,
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.TypedRateLimiter[objectKey](jittered{
			workqueue.NewTypedItemExponentialFailureRateLimiter[objectKey](apiRetryFirst, apiRetryLast)})),
		objects: map[objectKey]*object{}, promised: map[objectKey]*promised{}, released: map[objectKey]types.UID{},
		homeless: map[objectKey]time.Time{}, failing: map[objectKey]error{}, pace: map[objectKey]*rate.Limiter{},
		backoff: watchBackoff, trouble: "not connected yet",
	}
	p.owner = nodeOwner{client: client, node: node}
	p.events = newEventSink(p)
	return p, nil
}

// jittered keeps the keys of a node, and the nodes of a cluster, from trying again in step.
type jittered struct {
	workqueue.TypedRateLimiter[objectKey]
}

func (j jittered) When(k objectKey) time.Duration {
	d := j.TypedRateLimiter.When(k)
	return d/2 + rand.N(d/2+1)
}

// run publishes until ctx is done.
func (p *apiServer) run(ctx context.Context) {
	var wg sync.WaitGroup
	reflector := cache.NewReflectorWithOptions(listWatch{p}, &v1alpha1.RetainedIP{}, objectStore{p}, cache.ReflectorOptions{
		Name: retainedIPs, Backoff: &p.backoff,
	})
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

// PublishClaims takes over what is promised, and has every object looked at that this may concern.
func (p *apiServer) PublishClaims(all Promises) {
	next := promisedBy(all.Claims, p.node, time.Now())
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
	again := !maps.Equal(settled, p.settled)
	p.promised, p.settled = next, settled
	if again {
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

func (p *apiServer) PublishEvent(e ledger.Event) { p.events.put(e) }

// queueAll has everything looked at. A look at what is in order costs no request.
func (p *apiServer) queueAll() {
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

// said is what the API side suffers from, for people; empty: nothing.
func (p *apiServer) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.up {
		return p.trouble
	}
	for _, err := range p.failing {
		return fmt.Sprintf("%d RetainedIPs are not up to date, one of them: %v", len(p.failing), err)
	}
	return ""
}

// work settles one key; false means that there will be no more.
func (p *apiServer) work(ctx context.Context) bool {
	key, ended := p.queue.Get()
	if ended {
		return false
	}
	defer p.queue.Done(key)
	err := p.settle(ctx, key)
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
	if ctx.Err() == nil && !inNoNamespace(err) && (was == nil || was.Error() != err.Error()) {
		p.log.Warn("Cannot bring a RetainedIP up to date, trying again", "object", key.String(), "err", err)
	}
	p.queue.AddRateLimited(key)
	return true
}

// tryLater is not a failure.
type tryLater struct{ after time.Duration }

func (t tryLater) Error() string { return "too early, again after " + t.after.String() }

// settle brings one object and what is promised into agreement, with at most one write.
func (p *apiServer) settle(ctx context.Context, key objectKey) error {
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
			p.release(key, want.claims, func() { p.releaseDone(key, o.uid) })
			return nil
		case requestIsOver:
			p.log.Info("A release was asked for before the pod came back: it is not obeyed", "pod", key.namespace+"/"+want.spec.PodName, "addrs", want.status.IPs)
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

// knows says whether the ledgers that were read would have the promise that an object shows.
func (p *apiServer) knows(o *object) bool {
	for _, a := range o.status.Addresses {
		if !p.settled[a.Network] {
			return false
		}
	}
	return len(p.settled) > 0
}

// releaseDone is called when the ledgers have no such promise any more. One that is published under the same
// name from now on is another one.
func (p *apiServer) releaseDone(key objectKey, uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if uid != "" {
		p.released[key] = uid
	}
	delete(p.promised, key)
	p.queue.Add(key)
}

func (p *apiServer) apply(ctx context.Context, key objectKey, o *object, want *promised, owner types.UID) error {
	if err := p.mayWrite(key); err != nil {
		return err
	}
	body, err := json.Marshal(want.apply(key, o, owner))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	force := true
	var now v1alpha1.RetainedIP
	err = p.client.Patch(types.ApplyPatchType).Namespace(key.namespace).Resource(retainedIPs).Name(key.name).
		VersionedParams(&metav1.PatchOptions{FieldManager: v1alpha1.AgentFieldManager, Force: &force}, metav1.ParameterCodec).
		Body(body).Do(ctx).Into(&now)
	if err := p.wrote(ctx, "apply", key, o, err); err != nil {
		if isNamespace(err) {
			p.namespaceGone(key, want)
		}
		return fmt.Errorf("applying RetainedIP %s: %w", key, err)
	}
	p.mu.Lock()
	delete(p.homeless, key)
	p.mu.Unlock()
	p.keepAnswer(&now, want)
	p.log.Debug("RetainedIP applied", "pod", key.namespace+"/"+want.spec.PodName, "addrs", want.status.IPs, "phase", want.status.Phase, "expires", want.status.Expires)
	return nil
}

func (p *apiServer) delete(ctx context.Context, key objectKey, o *object) error {
	if err := p.mayWrite(key); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	body, err := json.Marshal(metav1.DeleteOptions{
		TypeMeta:      metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"},
		Preconditions: &metav1.Preconditions{UID: &o.uid, ResourceVersion: &o.version},
	})
	if err != nil {
		return err
	}
	err = p.client.Delete().Namespace(key.namespace).Resource(retainedIPs).Name(key.name).Body(body).Do(ctx).Error()
	if isObject(err) {
		err = nil
	}
	if err := p.wrote(ctx, "delete", key, o, err); err != nil {
		return fmt.Errorf("deleting RetainedIP %s: %w", key, err)
	}
	p.forget(key, o.uid)
	p.log.Debug("RetainedIP deleted", "pod", key.namespace+"/"+o.spec.PodName, "addrs", o.status.IPs)
	return nil
}

// isNamespace and isObject say what was not found.
func isNamespace(err error) bool { return missing(err) == "namespaces" }
func isObject(err error) bool    { return missing(err) == retainedIPs }

// missing is the resource of what was not found. An API server that does not (yet, or any longer) know
// RetainedIPs at all answers 404 as well, but with no Status: what the client makes of that has a cause.
func missing(err error) string {
	var s apierrors.APIStatus
	if !errors.As(err, &s) || !apierrors.IsNotFound(err) || s.Status().Details == nil || apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) {
		return ""
	}
	return s.Status().Details.Kind
}

// inNoNamespace says that the namespace of an object is gone or going.
func inNoNamespace(err error) bool {
	return isNamespace(err) || apierrors.HasStatusCause(err, namespaceTerminating)
}

// namespaceTerminating is a constant of k8s.io/api/core/v1, which is large.
const namespaceTerminating metav1.CauseType = "NamespaceTerminating"

// mayWrite is the pace of one object.
func (p *apiServer) mayWrite(key objectKey) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.pace[key]
	if l == nil {
		l = rate.NewLimiter(rate.Every(paceEvery), paceBurst)
		p.pace[key] = l
	}
	if !l.Allow() {
		return tryLater{paceEvery}
	}
	return nil
}

// wrote counts a write. Where it was refused because the object is another by now, that one is fetched.
func (p *apiServer) wrote(ctx context.Context, verb string, key objectKey, o *object, err error) error {
	p.metrics.writes.WithLabelValues(verb, resultOf(err)).Inc()
	if err == nil || o == nil || !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) && !apierrors.IsNotFound(err) && !apierrors.IsBadRequest(err) {
		return err
	}
	var now v1alpha1.RetainedIP
	getErr := p.client.Get().Namespace(key.namespace).Resource(retainedIPs).Name(key.name).Do(ctx).Into(&now)
	switch {
	case getErr == nil && now.ResourceVersion != o.version:
		k, fresh := objectOf(&now)
		p.mu.Lock()
		p.objects[k] = fresh
		p.mu.Unlock()
		return tryLater{0}
	case isObject(getErr):
		p.forget(key, o.uid)
		return tryLater{0}
	}
	return err
}

// namespaceGone ends a promise whose owner is gone for good: the workload lived in a namespace that does not
// exist any more, and the policy says Release for that. Only here can this be known, since no object can be
// there to say it.
func (p *apiServer) namespaceGone(key objectKey, want *promised) {
	now := time.Now()
	p.mu.Lock()
	since, ok := p.homeless[key]
	if !ok {
		p.homeless[key], since = now, now
	}
	p.mu.Unlock()
	if now.Sub(since) < p.grace || want.spec.WhenDeleted != v1alpha1.PolicyRelease || want.status.Phase != v1alpha1.PhaseRetained {
		return
	}
	p.log.Info("The namespace is gone, and with it the workload", "pod", key.namespace+"/"+want.spec.PodName, "addrs", want.status.IPs)
	p.release(key, want.claims, func() { p.releaseDone(key, "") })
}

// keep takes over an object from the watch, unless a newer one is there.
func (p *apiServer) keep(r *v1alpha1.RetainedIP) { p.keepAnswer(r, nil) }

// keepAnswer takes over the answer to an apply. The watch brings the same version once more, before or after.
func (p *apiServer) keepAnswer(r *v1alpha1.RetainedIP, applied *promised) {
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
func (p *apiServer) forget(key objectKey, uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.objects[key]; o != nil && o.uid == uid {
		delete(p.objects, key)
		p.queue.Add(key)
	}
}

// uidOf is the UID of an object, empty where it is not known to be there.
func (p *apiServer) uidOf(key objectKey) types.UID {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.objects[key]; o != nil {
		return o.uid
	}
	return ""
}

// objectStore is where the reflector puts what it is told.
type objectStore struct{ p *apiServer }

func (s objectStore) Add(obj any) error {
	s.p.keep(obj.(*v1alpha1.RetainedIP))
	return nil
}

func (s objectStore) Update(obj any) error { return s.Add(obj) }

func (s objectStore) Delete(obj any) error {
	r := obj.(*v1alpha1.RetainedIP)
	if s.p.uidOf(objectKey{r.Namespace, r.Name}) == r.UID {
		s.p.owner.doubt() // not by us: it may have gone with its Node
	}
	s.p.forget(objectKey{r.Namespace, r.Name}, r.UID)
	return nil
}

func (s objectStore) Replace(list []any, version string) error {
	objects := make(map[objectKey]*object, len(list))
	for _, obj := range list {
		key, o := objectOf(obj.(*v1alpha1.RetainedIP))
		objects[key] = o
	}
	s.p.owner.doubt()
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.objects, s.p.listedAt = objects, version
	return nil
}

func (objectStore) Resync() error { return nil }

// listWatch asks for this node's objects only.
type listWatch struct{ p *apiServer }

// IsWatchListSemanticsUnSupported keeps the reflector from a watch that begins with a consistent list: after an
// outage 5,000 agents would each have the API server ask etcd. An older list is corrected by the watch.
func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

func (l listWatch) selector() string {
	return fields.OneTermEqualSelector("spec.nodeName", l.p.node).String()
}

func (l listWatch) List(o metav1.ListOptions) (runtime.Object, error) {
	return l.ListWithContext(context.Background(), o)
}

func (l listWatch) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return l.WatchWithContext(context.Background(), o)
}

func (l listWatch) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	o.FieldSelector = l.selector()
	list := &v1alpha1.RetainedIPList{}
	// The reflector knows better than to ask again for a version that the API server has not reached.
	if err := l.p.client.Get().Resource(retainedIPs).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Do(ctx).Into(list); err != nil {
		if !isGone(err) {
			l.p.down(fmt.Errorf("listing RetainedIPs: %w", err))
		}
		return nil, err
	}
	return list, nil
}

func (l listWatch) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if err := l.sameHistory(ctx, o.ResourceVersion); err != nil {
		l.p.down(err)
		return nil, err
	}
	o.FieldSelector, o.Watch = l.selector(), true
	w, err := l.p.client.Get().Resource(retainedIPs).VersionedParams(&o, metav1.ParameterCodec).
		Timeout(time.Duration(*o.TimeoutSeconds) * time.Second).Watch(ctx)
	if err != nil {
		if !isGone(err) {
			l.p.down(fmt.Errorf("watching RetainedIPs: %w", err))
		}
		return nil, err
	}
	l.p.nowUp()
	return w, nil
}

func isGone(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }

// sameHistory makes sure that the API server still knows the version that a watch is to go on from. After a
// backup of etcd was restored it does not, and would keep silent until it has come that far again.
func (l listWatch) sameHistory(ctx context.Context, version string) error {
	l.p.mu.Lock()
	fresh := version == l.p.listedAt
	l.p.mu.Unlock()
	if fresh {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	// The cheapest list that says where etcd is: of one object, which need not be there.
	var list v1alpha1.RetainedIPList
	err := l.p.client.Get().Namespace(metav1.NamespaceDefault).Resource(retainedIPs).
		VersionedParams(&metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", "none").String()}, metav1.ParameterCodec).
		Do(ctx).Into(&list)
	if err != nil {
		return fmt.Errorf("asking for the version of the API server: %w", err)
	}
	if c, err := resourceversion.CompareResourceVersion(list.ResourceVersion, version); err == nil && c < 0 {
		l.p.log.Warn("The API server went back in time: a backup was restored", "version", list.ResourceVersion, "seen", version)
		return apierrors.NewResourceExpired("the API server went back in time")
	}
	return nil
}

// down notes that the API server cannot be followed.
func (p *apiServer) down(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	level := slog.LevelDebug
	if p.up || p.trouble != err.Error() {
		level = slog.LevelWarn // the same again is no news
	}
	p.log.Log(context.Background(), level, "The API server cannot be followed, trying again", "err", err)
	p.up, p.trouble = false, err.Error()
	p.metrics.up.Set(0)
}

// nowUp notes that it is, and has everything looked at.
func (p *apiServer) nowUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.up {
		p.log.Info("The API server is followed", "node", p.node)
	}
	p.up, p.trouble = true, ""
	p.metrics.up.Set(1)
	for k := range p.promised {
		p.queue.Forget(k)
	}
	p.queueAll()
}

// resultOf is the label for how a write ended.
func resultOf(err error) string {
	var s apierrors.APIStatus
	switch {
	case err == nil:
		return "ok"
	case !errors.As(err, &s):
		return "unreachable"
	}
	switch s.Status().Code {
	case http.StatusConflict:
		return "conflict"
	case http.StatusUnauthorized, http.StatusForbidden:
		return "forbidden"
	case http.StatusNotFound:
		return "not_found"
	case http.StatusUnprocessableEntity, http.StatusBadRequest:
		return "invalid"
	}
	return "error"
}

// nodeOwner is the Node object that owns the RetainedIPs. Its UID changes when somebody deletes the Node and
// kubelet makes a new one.
type nodeOwner struct {
	client *rest.RESTClient
	node   string

	mu    sync.Mutex
	uid   types.UID
	asked time.Time
	err   error
	stale bool
}

// ownerPause is between two questions for a Node that is not there.
const ownerPause = 3 * time.Second

// doubt has the next get ask again.
func (n *nodeOwner) doubt() {
	n.mu.Lock()
	n.stale = true
	n.mu.Unlock()
}

func (n *nodeOwner) get(ctx context.Context) (types.UID, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.uid != "" && !n.stale {
		return n.uid, nil
	}
	if since := time.Since(n.asked); n.err != nil && since < ownerPause {
		return "", n.err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var meta metav1.PartialObjectMetadata
	b, err := n.client.Get().AbsPath("/api/v1/nodes", n.node).
		SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(b, &meta)
	}
	n.asked, n.err = time.Now(), nil
	if err != nil {
		n.err = fmt.Errorf("Node %s, the owner of its RetainedIPs: %w", n.node, err)
		return "", n.err
	}
	n.uid, n.stale = meta.UID, false
	return n.uid, nil
}
