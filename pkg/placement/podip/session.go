package podip

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// session is a Book, and what belongs to it. Controller.mu guards it.
type session struct {
	book *pool.Book
	// ready: all has been listed since the Book was begun.
	ready bool
	// invalid says of pods what of their annotations is not valid.
	invalid map[pool.UID]error
	// blocked are the pods that wait, with the addresses that they wait for; on has the same by address.
	blocked map[pool.UID][]netip.Addr
	on      map[netip.Addr]map[pool.UID]struct{}
	// silent are the addresses that wait for what a node says, quarantined those in quarantine.
	silent      map[netip.Addr]silence
	quarantined map[netip.Addr]struct{}
	gated       map[pool.UID]*wait
	// expires is status.expires, if it is not empty.
	expires    map[netip.Addr]string
	byWorkload map[home.Ref]map[netip.Addr]struct{}
	said       map[string]said
	// before has the pods as they were known when all were listed past the cache, and ended those whose end was seen
	// since; both are nil at other times.
	before map[pool.UID]*pool.Pod
	ended  map[pool.UID]bool
	// stale is closed when the Book is good for nothing any more.
	stale chan struct{}
	c     *Controller
}

// errStale ends a session.
var errStale = errors.New("the API server's data were restored, or every node has said what was lost, or other words " +
	"count: beginning again")

// Start serves pools until ctx ends. It watches PodIPPools once the API server serves them, and everything else once
// there is one.
func (c *Controller) Start(ctx context.Context) error {
	for {
		is, pause := c.look(ctx), cluster.LookupEvery
		if is == serving {
			break
		}
		if is == unknown { // until then no pod at all is placed
			pause = time.Second
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
	go c.reflect(ctx, &stayputv1alpha1.PodIPPool{}, &stayputv1alpha1.PodIPPoolList{}, &feed{
		set: func(o client.Object) { c.setPool(o.(*stayputv1alpha1.PodIPPool)) },
		remove: func(o client.Object, _ string) {
			c.removePool(o.GetName())
		},
		all: func() []string { return c.names(false) },
		end: func(name, _ string) { c.removePool(name) },
		listed: func() {
			if c.state == unknown {
				c.state = idle
			}
			c.answerLocked()
			c.announce()
		},
		c: c,
	})
	go c.announces(ctx)
	go c.lookForSpiderpool(ctx)
	for _, known := range []chan struct{}{c.first, c.read} {
		select {
		case <-ctx.Done():
			return nil
		case <-known:
		}
	}
	for ctx.Err() == nil {
		err := c.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		log.FromContext(ctx).Info("Beginning a new book of pools", "reason", fmt.Sprint(err))
		if !errors.Is(err, errStale) {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	return nil
}

// look finds out whether the API server serves pools.
func (c *Controller) look(ctx context.Context) state {
	_, err := c.workloads.Served(stayputv1alpha1.SchemeGroupVersion.WithKind("PodIPPool"))
	if err == nil { // and whether they may be read
		err = c.live.List(ctx, &stayputv1alpha1.PodIPPoolList{}, client.Limit(1))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		if c.state != serving {
			c.state = unknown // until they are listed
		}
		return serving
	case errors.Is(err, cluster.ErrNotServed), apierrors.IsForbidden(err):
		if c.state != off {
			log.FromContext(ctx).Info("No pools", "reason", err.Error())
		}
		c.state = off
		c.answerLocked()
	default: // also if the API server does not serve RetainedIPs either, as right after its start
		log.FromContext(ctx).Error(err, "Cannot find out whether there are pools")
	}
	return c.state
}

// announce has the agents told whether there are pools, if that may have changed.
func (c *Controller) announce() {
	select {
	case c.toTell <- struct{}{}:
	default:
	}
}

// announces tells the agents whether there are pools until ctx ends, by an annotation of the installation: they watch
// that anyway, and nothing of pools before. While there are, it says so again with each mark, lest somebody took the
// annotation away.
func (c *Controller) announces(ctx context.Context) {
	if c.installation.Name == "" {
		return
	}
	tick := time.NewTicker(pool.MarkEvery)
	defer tick.Stop()
	none := false // this was said
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.toTell:
		case <-tick.C:
		}
		err := c.readGuard(ctx)
		c.mu.Lock()
		are, known := c.has(), c.state == idle || c.state == serving
		c.mu.Unlock()
		if !known || are == (has{}) && none {
			continue
		}
		err = errors.Join(err, c.tell(ctx, are))
		if none = are == (has{}) && err == nil; err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Cannot tell the agents whether there are pools")
			time.AfterFunc(time.Second, c.announce)
		}
	}
}

// readGuard finds out, past the cache, by which policy the API server keeps all but this controller from writing the
// addresses of pods. After an error what was known stands.
func (c *Controller) readGuard(ctx context.Context) error {
	guard := ""
	var missing error
	for _, kind := range []string{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} {
		o := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{
			APIVersion: admissionregistrationv1.SchemeGroupVersion.String(), Kind: kind}}
		err := c.live.Get(ctx, types.NamespacedName{Name: stayputv1alpha1.PolicyAddresses}, o)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			missing = err
		} else if err != nil {
			return fmt.Errorf("reading the policy %s: %w", stayputv1alpha1.PolicyAddresses, err)
		}
		guard += "." + string(o.UID)
	}
	if guard = strings.TrimPrefix(guard, "."); missing != nil {
		guard = ""
	}
	c.mu.Lock()
	was := c.guard
	c.guard = guard
	c.mu.Unlock()
	if was != "" && missing != nil {
		log.FromContext(ctx).Error(missing, "Nothing guards the addresses of pods: agents confirm those of each pod",
			"policy", stayputv1alpha1.PolicyAddresses)
	}
	return nil
}

// has is which pools there are: served as agents are told of them, empty if there are none.
type has struct {
	served string
	routed bool
}

// has returns which pools there are. c.mu is held.
func (c *Controller) has() (is has) {
	if len(c.pools) == 0 {
		return is
	}
	served := stayputv1alpha1.ServedPools{Guard: c.guard}
	for _, o := range c.pools {
		is.routed = is.routed || o.Spec.Mode == stayputv1alpha1.ModeRouted
		if p, err := netip.ParsePrefix(o.Spec.Subnet); err == nil { // else it gives nothing
			served.Subnets = append(served.Subnets, p.Masked())
		}
		if a, err := netip.ParseAddr(o.Spec.Gateway); err == nil {
			served.Gateways = append(served.Gateways, a)
		}
	}
	is.served = served.Text()
	return is
}

// tell tells the agents whether there are pools.
func (c *Controller) tell(ctx context.Context, are has) error {
	annotations := map[string]any{stayputv1alpha1.AnnotationPools: nil, stayputv1alpha1.AnnotationRoutedPools: nil}
	if are.served != "" {
		annotations[stayputv1alpha1.AnnotationPools] = are.served
	}
	if are.routed {
		annotations[stayputv1alpha1.AnnotationRoutedPools] = "true"
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.installation.Namespace, Name: c.installation.Name}}
	err = c.client.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner)
	if err = client.IgnoreNotFound(err); err != nil { // it is not there while stayput is being uninstalled
		return fmt.Errorf("patching ConfigMap %s: %w", c.installation, err)
	}
	return nil
}

// serve begins a Book and keeps it until it is stale, an error occurs or ctx ends.
func (c *Controller) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer c.end(s)

	// 1. What only pools need is listed now, after the roll was read.
	var feeds []*feed
	for _, f := range []struct {
		object client.Object
		list   client.ObjectList
		*feed
	}{
		{&stayputv1alpha1.PodIP{}, &stayputv1alpha1.PodIPList{}, c.addresses(s)},
		{&stayputv1alpha1.PodIPAnswer{}, &stayputv1alpha1.PodIPAnswerList{}, c.answers(s)},
		{metadata("Namespace"), metadataList("Namespace"), c.ofNamespaces(s)},
	} {
		f.synced = make(chan struct{})
		feeds = append(feeds, f.feed)
		go c.reflect(ctx, f.object, f.list, f.feed)
	}
	for _, f := range feeds {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.synced:
		}
	}

	// 2. Nodes and pods are in the caches already. What these have may be older than the roll: pods are listed, too.
	for object, handler := range map[client.Object]toolscache.ResourceEventHandler{
		&corev1.Node{}: c.nodes(s), &cluster.Pod{}: c.podEvents(s),
	} {
		informer, err := c.informers.GetInformer(ctx, object)
		if err != nil {
			return err
		}
		registered, err := informer.AddEventHandler(handler)
		if err != nil {
			return err
		}
		defer func() { _ = informer.RemoveEventHandler(registered) }()
		if !toolscache.WaitForCacheSync(ctx.Done(), registered.HasSynced) {
			return ctx.Err()
		}
	}
	c.findAgents(ctx, s)
	if err := c.listPods(ctx, s); err != nil {
		return err
	}
	c.open(s)
	go c.giveBack(ctx)

	// 3. The mark, and a look at all that waits.
	tick := time.NewTicker(pool.MarkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.stale:
			return errStale
		case <-tick.C:
		}
		if err := c.mark(ctx, s); err != nil && !Changed(err) {
			log.FromContext(ctx).Error(err, "Cannot renew the mark of the PodIPRoll")
		}
		c.findAgents(ctx, s)
		c.sweep(s)
	}
}

// giveBack returns memory to the system once everything has been reconciled. The lists of all and the first look leave
// more garbage than what is kept of them, and a controller that then has nothing to do would keep it.
func (c *Controller) giveBack(ctx context.Context) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for idle := false; !idle; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c.mu.Lock()
		idle = c.queue != nil && c.queue.Len() == 0 && (c.pods == nil || c.pods.Len() == 0)
		c.mu.Unlock()
	}
	debug.FreeOSMemory()
}

// begin reads and marks the roll, and begins a Book by it.
func (c *Controller) begin(ctx context.Context) (*session, error) {
	if err := c.readGuard(ctx); err != nil {
		return nil, err
	}
	live, err := c.roll(ctx)
	if err != nil {
		return nil, err
	}
	var seen pool.Roll
	c.mu.Lock()
	if c.session != nil {
		seen = c.session.book.Roll()
	}
	c.mu.Unlock()
	next, err := c.writeRoll(ctx, pool.Lead(live, seen, c.now().Truncate(time.Microsecond)))
	if err != nil {
		return nil, fmt.Errorf("marking the PodIPRoll: %w", err)
	}
	s := &session{
		book: pool.NewBook(next), invalid: map[pool.UID]error{}, blocked: map[pool.UID][]netip.Addr{},
		on: map[netip.Addr]map[pool.UID]struct{}{}, silent: map[netip.Addr]silence{},
		quarantined: map[netip.Addr]struct{}{}, gated: map[pool.UID]*wait{},
		expires: map[netip.Addr]string{}, byWorkload: map[home.Ref]map[netip.Addr]struct{}{}, said: map[string]said{},
		stale: make(chan struct{}), c: c,
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	for _, o := range c.pools {
		s.book.SetPool(c.poolOf(o))
	}
	return s, nil
}

// end has nothing decided by a session any more. Its roll is kept: the next one must not be older.
func (c *Controller) end(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.ready = false
}

// open queues everything.
func (c *Controller) open(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.ready = true
	c.enqueueAllLocked()
}

// enqueueAllLocked enqueues every key, and every pod, the oldest first.
func (c *Controller) enqueueAllLocked() {
	s := c.session
	if s == nil {
		return
	}
	c.enqueue(key{kindRoll, ""})
	for _, a := range s.book.Addresses() {
		c.enqueue(addressKey(a))
	}
	uids := s.book.Pods()
	slices.SortFunc(uids, func(x, y pool.UID) int {
		return cmp.Or(s.book.Pod(x).Created.Compare(s.book.Pod(y).Created), cmp.Compare(x, y))
	})
	for _, uid := range uids {
		s.wakeLocked(uid)
	}
	for name := range c.pools {
		c.enqueue(key{kindPool, name})
	}
}

// sweep queues again what waits. Of the pods that wait for an address to become free it queues those for which there is
// one.
func (c *Controller) sweep(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.enqueue(key{kindRoll, ""})
	for uid := range s.blocked {
		if !s.book.WaitsInLine(uid) {
			s.wakeLocked(uid)
		}
	}
	for a := range s.silent {
		c.enqueue(addressKey(a))
	}
	for name := range c.pools {
		for _, uid := range s.book.Next(name, c.now()) {
			s.wakeLocked(uid)
		}
		c.enqueue(key{kindPool, name})
	}
}

// mark renews the mark of the roll, and ends the session if that shows that the Book is stale.
func (c *Controller) mark(ctx context.Context, s *session) error {
	live, err := c.roll(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	w := s.book.Lead(live, c.now().Truncate(time.Microsecond)).(pool.WriteRoll)
	c.mu.Unlock()
	next, err := c.writeRoll(ctx, w.Roll)
	if err != nil {
		return err
	}
	c.setRoll(s, next)
	return nil
}

func (c *Controller) setRoll(s *session, r pool.Roll) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := s.book.Stale()
	s.book.SetRoll(r)
	if s.book.Stale() && s.ready || s.book.Stale() && !was {
		s.restart()
	}
}

// restart ends the session: nothing is decided by it any more, and another one begins. Controller.mu is held.
func (s *session) restart() {
	s.ready = false
	select {
	case <-s.stale:
	default:
		close(s.stale)
	}
}

// feed puts the objects of one kind into the Book as they are listed and watched, and keeps none of them. Its functions
// are called with Controller.mu held.
type feed struct {
	set func(client.Object)
	// remove is called with the last state of an object and the version of its deletion.
	remove func(o client.Object, version string)
	// all names what there is, and end ends what a list of this version does not have.
	all    func() []string
	end    func(name, version string)
	listed func() // called after a list, unless it is nil
	// strip makes an object small as soon as it is read: a list of all is in memory at once. If nil, it stays as it is.
	strip  func(client.Object)
	synced chan struct{}
	c      *Controller
}

var _ toolscache.TransformingStore = (*feed)(nil)

// Transformer implements [toolscache.TransformingStore].
func (f *feed) Transformer() toolscache.TransformFunc {
	if f.strip == nil {
		return nil
	}
	return func(o any) (any, error) {
		if object, ok := o.(client.Object); ok {
			f.strip(object)
		}
		return o, nil
	}
}

func (f *feed) Add(o any) error {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.put(o.(client.Object))
	return nil
}

func (f *feed) put(o client.Object) {
	if f.strip != nil {
		f.strip(o)
	}
	f.set(o)
}

func (f *feed) Update(o any) error { return f.Add(o) }

func (f *feed) Delete(o any) error {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.remove(o.(client.Object), o.(client.Object).GetResourceVersion())
	return nil
}

// Replace is called with a whole list.
func (f *feed) Replace(list []any, version string) error {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	is := map[string]bool{}
	for _, o := range list {
		is[o.(client.Object).GetName()] = true
		f.put(o.(client.Object))
	}
	for _, name := range f.all() {
		if !is[name] {
			f.end(name, version)
		}
	}
	if f.listed != nil {
		f.listed()
	}
	if f.synced != nil {
		select {
		case <-f.synced:
		default:
			close(f.synced)
		}
	}
	return nil
}

func (f *feed) Resync() error { return nil }

// reflect lists and watches a kind until ctx ends.
func (c *Controller) reflect(ctx context.Context, object client.Object, list client.ObjectList, f *feed) {
	lw := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			page := list.DeepCopyObject().(client.ObjectList)
			return page, c.live.List(ctx, page, &client.ListOptions{Raw: &o, Limit: o.Limit, Continue: o.Continue})
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.live.Watch(ctx, list.DeepCopyObject().(client.ObjectList), &client.ListOptions{Raw: &o})
		},
	}
	toolscache.NewReflector(toolscache.ToListWatcherWithWatchListSemantics(lw, c.live), object, f, 0).RunWithContext(ctx)
}

func metadata(kind string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: kind}}
}

func metadataList(kind string) *metav1.PartialObjectMetadataList {
	return &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: kind + "List"}}
}

// newer reports whether version a is newer than b, if that can be told.
func newer(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order > 0
}

func (c *Controller) setPool(o *stayputv1alpha1.PodIPPool) {
	o.ManagedFields = nil
	was := c.pools[o.Name]
	if was != nil && was.UID == o.UID && newer(was.ResourceVersion, o.ResourceVersion) {
		return
	}
	had := c.has()
	if c.pools[o.Name] = o; c.has() != had {
		c.announce()
	}
	if c.state != serving {
		c.state = serving
		c.metrics.serves()
		close(c.first)
	}
	c.answerLocked()
	s := c.session
	if s == nil {
		return
	}
	before, is := s.book.Pool(o.Name), c.poolOf(o)
	gives := before != nil && before.Invalid == nil
	s.book.SetPool(is)
	c.enqueue(key{kindPool, o.Name})
	if was != nil && was.UID == o.UID && was.Generation == o.Generation && gives == (is.Invalid == nil) &&
		was.DeletionTimestamp.IsZero() == o.DeletionTimestamp.IsZero() {
		return
	}
	for uid := range s.blocked {
		s.wakeLocked(uid)
	}
	for name := range c.pools { // they may overlap
		c.enqueue(key{kindPool, name})
	}
	if o.DeletionTimestamp != nil {
		for _, a := range s.book.Addresses() {
			if ip := s.book.PodIP(a); ip != nil && ip.Pool == o.Name {
				c.enqueue(addressKey(a))
			}
		}
	}
}

func (c *Controller) removePool(name string) {
	had := c.has()
	if delete(c.pools, name); c.has() != had {
		c.announce()
	}
	if c.session != nil {
		c.session.book.RemovePool(name)
	}
	if o := c.spider[name]; o != nil { // its turn again
		c.setPool(adapt(o))
	}
	for other := range c.pools {
		c.enqueue(key{kindPool, other})
	}
}

// addresses feeds PodIPs.
func (c *Controller) addresses(s *session) *feed {
	var once cluster.Interner
	return &feed{c: c,
		strip: func(o client.Object) { stripIP(o.(*stayputv1alpha1.PodIP), &once) },
		set:   func(o client.Object) { s.setIP(o.(*stayputv1alpha1.PodIP)) },
		remove: func(o client.Object, version string) {
			a, err := stayputv1alpha1.ParsePodIPName(o.GetName())
			if is := s.book.PodIP(a); err == nil && is != nil &&
				(is.UID == string(o.GetUID()) || !newer(is.Version, version)) {
				s.removeIP(a)
			}
		},
		all: func() (names []string) {
			for _, a := range s.book.Addresses() {
				if s.book.PodIP(a) != nil {
					names = append(names, stayputv1alpha1.PodIPName(a))
				}
			}
			return names
		},
		end: func(name, version string) {
			a, err := stayputv1alpha1.ParsePodIPName(name)
			if is := s.book.PodIP(a); err == nil && is != nil && !newer(is.Version, version) {
				s.removeIP(a)
			}
		},
	}
}

// setIP puts in a PodIP as it was watched, or as a write returned it.
func (s *session) setIP(o *stayputv1alpha1.PodIP) {
	p, err := ipOf(o, s.c.longest)
	if err != nil {
		return // its definition does not allow such a name
	}
	was := s.book.PodIP(p.Addr)
	if was != nil && newer(was.Version, p.Version) {
		return
	}
	if was != nil {
		s.unindex(was)
	}
	s.book.SetPodIP(p)
	if p.Workload != (pool.Workload{}) {
		of := workloadOf(&p)
		if s.byWorkload[of] == nil {
			s.byWorkload[of] = map[netip.Addr]struct{}{}
		}
		s.byWorkload[of][p.Addr] = struct{}{}
	}
	if delete(s.quarantined, p.Addr); p.Quarantine.Reason != "" {
		s.quarantined[p.Addr] = struct{}{}
	}
	if s.expires[p.Addr] = o.Status.Expires; o.Status.Expires == "" {
		delete(s.expires, p.Addr)
	}
	if was != nil && was.Conflict != "" && p.Conflict == "" {
		s.disputes(p.Pool)
	}
	if was == nil || was.Version != p.Version {
		s.moved(p.Addr, p.Pool)
		s.c.enqueuePodLocked(types.NamespacedName{Namespace: p.Namespace, Name: p.PodName})
	}
	s.wake()
}

func (s *session) unindex(p *pool.PodIP) {
	of := workloadOf(p)
	if delete(s.byWorkload[of], p.Addr); len(s.byWorkload[of]) == 0 {
		delete(s.byWorkload, of)
	}
}

func (s *session) removeIP(a netip.Addr) {
	p := s.book.PodIP(a)
	s.unindex(p)
	s.book.RemovePodIP(a)
	delete(s.expires, a)
	delete(s.silent, a)
	delete(s.quarantined, a)
	delete(s.said, stayputv1alpha1.PodIPName(a))
	if p.Conflict != "" {
		s.disputes(p.Pool)
	}
	s.moved(a, p.Pool)
	s.c.enqueuePodLocked(types.NamespacedName{Namespace: p.Namespace, Name: p.PodName})
	s.wake()
}

// wakeLocked enqueues a pod that the Book has.
func (s *session) wakeLocked(uid pool.UID) {
	if p := s.book.Pod(uid); p != nil {
		s.c.enqueuePodLocked(types.NamespacedName{Namespace: p.Namespace, Name: p.Name})
	}
}

// wake enqueues the pods that wait for an address of a pool and may get one now. Controller.mu is held.
func (s *session) wake() {
	for _, uid := range s.book.Woken(s.c.now()) {
		s.wakeLocked(uid)
	}
}

// moved wakes what an address bears upon.
func (s *session) moved(a netip.Addr, of string) {
	s.c.enqueue(addressKey(a), key{kindPool, of})
	for uid := range s.on[a] {
		s.wakeLocked(uid)
	}
}

// disputes enqueues what waits because a machine answers for too many addresses of a pool: it has one less.
func (s *session) disputes(of string) {
	for _, a := range s.book.Disputed(of) {
		s.c.enqueue(addressKey(a))
	}
}

// answers feeds what nodes answer.
func (c *Controller) answers(s *session) *feed {
	names := map[string]bool{}
	return &feed{c: c,
		set: func(o client.Object) {
			was, is := s.book.Answer(o.GetName()), answerOf(o.(*stayputv1alpha1.PodIPAnswer), c.longest)
			s.book.SetAnswer(is)
			s.nodeSpoke()
			if s.ready && (!names[is.Node] || was.CannotRoute != is.CannotRoute) {
				for uid := range s.blocked {
					s.wakeLocked(uid)
				}
			}
			names[is.Node] = true
		},
		remove: func(o client.Object, _ string) {
			delete(names, o.GetName())
			s.book.RemoveAnswer(o.GetName())
		},
		all: func() []string { return slices.Collect(maps.Keys(names)) },
		end: func(name, _ string) {
			delete(names, name)
			s.book.RemoveAnswer(name)
		},
	}
}

// nodeSpoke wakes all that waits for what nodes say.
func (s *session) nodeSpoke() {
	if !s.ready {
		return
	}
	s.c.enqueue(key{kindRoll, ""})
	for a := range s.silent {
		s.c.enqueue(addressKey(a))
	}
	for _, uids := range s.on {
		for uid := range uids {
			s.wakeLocked(uid)
		}
	}
}

// ofNamespaces feeds the labels of namespaces, and the pools that their pods get addresses of by default.
func (c *Controller) ofNamespaces(s *session) *feed {
	known := map[string]namespace{}
	f := &feed{c: c,
		set: func(o client.Object) {
			is := namespace{o.GetLabels(), pool.OfNamespace(o.GetAnnotations())}
			was, ok := known[o.GetName()]
			known[o.GetName()] = is
			if c.namespaces != nil && ok && maps.Equal(was.asks, is.asks) && maps.Equal(was.labels, is.labels) {
				return
			}
			c.rename(s, o.GetName(), is)
		},
		remove: func(o client.Object, _ string) { delete(known, o.GetName()) },
		all:    func() []string { return slices.Collect(maps.Keys(known)) },
		end:    func(name, _ string) { delete(known, name) },
	}
	return f
}

// rename has the gated pods of a namespace follow it.
func (c *Controller) rename(s *session, name string, is namespace) {
	if c.namespaces == nil {
		c.namespaces = map[string]namespace{}
	}
	c.namespaces[name] = is
	c.answerLocked()
	for uid := range s.blocked {
		if p := s.book.Pod(uid); p != nil && p.Namespace == name {
			again := *p
			again.Namespaced = is.labels
			s.book.SetPod(again)
		}
	}
	for uid := range s.gated { // what they ask for is read again
		if p := s.book.Pod(uid); p != nil && p.Namespace == name {
			s.wakeLocked(uid)
		}
	}
}

// nodes feeds nodes.
func (c *Controller) nodes(s *session) toolscache.ResourceEventHandler {
	set := func(o any) {
		if node, ok := o.(*corev1.Node); ok {
			c.mu.Lock()
			defer c.mu.Unlock()
			s.book.SetNode(nodeOf(node, c.agents))
		}
	}
	back := func(name string) { // Controller.mu is held
		for _, uid := range s.book.Barren(name) {
			s.wakeLocked(uid)
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) {
			set(o)
			c.mu.Lock()
			defer c.mu.Unlock()
			if node, ok := o.(*corev1.Node); ok {
				back(node.Name)
			}
		},
		UpdateFunc: func(was, is any) {
			before, okWas := was.(*corev1.Node)
			after, okIs := is.(*corev1.Node)
			set(is)
			c.mu.Lock()
			defer c.mu.Unlock()
			if okWas && okIs && nodeOf(before, c.agents) != nodeOf(after, c.agents) {
				s.nodeSpoke()
				back(after.Name)
			}
		},
		DeleteFunc: func(o any) {
			if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if node, ok := o.(*corev1.Node); ok {
				c.mu.Lock()
				defer c.mu.Unlock()
				s.book.RemoveNode(node.Name)
				s.nodeSpoke()
			}
		},
	}
}

// podEvents feeds the pods that ask for addresses of pools, or have some.
func (c *Controller) podEvents(s *session) toolscache.ResourceEventHandler {
	set := func(o any) {
		if pod, ok := o.(*cluster.Pod); ok {
			c.setPod(s, pod, false)
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: set,
		UpdateFunc: func(o, is any) {
			was, okWas := o.(*cluster.Pod)
			pod, okIs := is.(*cluster.Pod)
			if okWas && okIs && was.GetUID() != pod.GetUID() { // it was deleted, and made again, while there was no watch
				c.removePod(s, pool.UID(was.GetUID()), was.Node(), false)
			}
			set(is)
		},
		DeleteFunc: func(o any) {
			gone, missed := o.(toolscache.DeletedFinalStateUnknown)
			if missed {
				o = gone.Obj
			}
			if pod, ok := o.(*cluster.Pod); ok {
				c.removePod(s, pool.UID(pod.GetUID()), pod.Node(), !missed)
			}
		},
	}
}

// setPod puts a pod in, if it has to do with pools, and enqueues it if that is news. listed: past the cache.
func (c *Controller) setPod(s *session, pod *cluster.Pod, listed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.setPodLocked(s, pod, listed) {
		s.wakeLocked(pool.UID(pod.GetUID()))
	}
}

// setPodLocked puts a pod in, and reports whether there may be something to do for it. Listed past the cache it counts
// whatever version was known, which a restore may have made the newer one, but not against what has happened since.
func (c *Controller) setPodLocked(s *session, pod *cluster.Pod, listed bool) (news bool) {
	uid := pool.UID(pod.GetUID())
	was := s.book.Pod(uid)
	in, spiderpool := c.namespaces[pod.GetNamespace()], c.words == serving
	if was == nil && !asks(pod, in, spiderpool) && s.book.Given(uid) == nil {
		return false
	}
	core := pod.Core()
	overrules := listed && was == s.before[uid]
	placed := was != nil && was.Version == core.ResourceVersion && was.Has != nil && !was.Gated // see notePlaced
	if core.Spec.HostNetwork || listed && s.ended[uid] || placed ||
		was != nil && !overrules && newer(was.Version, core.ResourceVersion) {
		return false
	}
	current, err := podOf(core, in, spiderpool, c.workloads.Numbers(core), c.longest)
	if pod.TooLong() {
		err = errors.New(cluster.TooLongNote + ": the pod stays gated, without an address")
	}
	if above, ok := c.above[current.Workload.UID]; ok {
		current.Workload = above
	}
	if err == nil && current.Has != nil && !c.vouchedLocked(s, &current, core) {
		current.Has = nil
		err = invalid(stayputv1alpha1.AnnotationAddresses, "the controller has not written it: delete the pod and create it "+
			"again without it")
	}
	if delete(s.invalid, uid); err != nil {
		s.invalid[uid] = err
	}
	if _, says := core.Annotations[stayputv1alpha1.AnnotationAddresses]; says && current.Has == nil {
		return false // what it has is not known: what was known of it stands
	}
	s.book.SetPod(current)
	if err != nil { // it is given nothing, and keeps no other pod from it
		s.book.StopWaiting(uid)
		s.unblock(uid)
	}
	s.wake()
	s.gates(&current, home.LastGate(core), was == nil, c.now())
	if was != nil && (was.Version == current.Version || was.Gated == current.Gated && was.Node == current.Node &&
		was.Ending == current.Ending && was.Over == current.Over && len(was.Has) == len(current.Has) && !current.Gated) {
		return false // a mere change of its status, or none
	}
	if !current.Gated {
		s.unblock(uid)
	}
	c.bears(s, &current)
	return true
}

// vouchedLocked reports whether the addresses that a pod has by its annotation are true: they name the guard that there
// is, or are the pod's by a PodIP. What was written while there was no guard says nothing. Of a pod that is known, what
// is known stands.
func (c *Controller) vouchedLocked(s *session, is *pool.Pod, core *corev1.Pod) bool {
	if was := s.book.Pod(is.UID); was != nil && slices.EqualFunc(was.Has, is.Has, same) && was.Has != nil {
		return true
	}
	var guards []struct{ Guard string }
	err := json.Unmarshal([]byte(core.Annotations[stayputv1alpha1.AnnotationAddresses]), &guards)
	for i, h := range is.Has {
		named := err == nil && c.guard != "" && guards[i].Guard == c.guard
		if ip := s.book.PodIP(h.Prefix.Addr()); !named && (ip == nil || ip.PodUID != is.UID) {
			return false
		}
	}
	return true
}

func same(x, y pool.Address) bool { return x.Prefix == y.Prefix && x.Interface == y.Interface }

// bears wakes the addresses that a pod bears upon.
func (c *Controller) bears(s *session, p *pool.Pod) {
	for _, a := range s.book.About(p) {
		c.enqueue(addressKey(a))
		for uid := range s.on[a] {
			s.wakeLocked(uid)
		}
	}
}

// removePod takes out a pod that the cluster has no more, and had on this node, if that is known; final: as its watch
// says, without a gap.
func (c *Controller) removePod(s *session, uid pool.UID, node string, final bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.ended != nil {
		s.ended[uid] = true
	}
	is := s.book.Pod(uid)
	if is == nil {
		return
	}
	if is.Node == "" && node != "" {
		again := *is
		again.Node = node
		s.book.SetPod(again)
	}
	s.book.RemovePod(uid, final, c.now())
	delete(s.gated, uid)
	s.unblock(uid)
	delete(s.invalid, uid)
	delete(s.said, string(uid))
	c.bears(s, is)
	s.wake()
}

// listPods puts in all pods past the cache.
func (c *Controller) listPods(ctx context.Context, s *session) error {
	c.mu.Lock()
	s.before, s.ended = map[pool.UID]*pool.Pod{}, map[pool.UID]bool{}
	for _, uid := range s.book.Pods() {
		s.before[uid] = s.book.Pod(uid)
	}
	c.mu.Unlock()
	exist := map[pool.UID]bool{}
	list := &corev1.PodList{}
	for {
		next := list.Continue
		list = &corev1.PodList{}
		if err := c.live.List(ctx, list, client.Limit(500), client.Continue(next)); err != nil {
			return fmt.Errorf("listing pods: %w", err)
		}
		for i := range list.Items {
			exist[pool.UID(list.Items[i].UID)] = true
			c.setPod(s, cluster.PodOf(&list.Items[i]), true)
		}
		if list.Continue == "" {
			break
		}
	}
	c.mu.Lock()
	known := s.book.Pods()
	s.before, s.ended = nil, nil
	c.mu.Unlock()
	for _, uid := range known {
		if !exist[uid] && !c.there(ctx, s, uid) {
			c.removePod(s, uid, "", false)
		}
	}
	return nil
}

// there reports whether a pod that was not listed came while the list was made, or may have.
func (c *Controller) there(ctx context.Context, s *session, uid pool.UID) bool {
	c.mu.Lock()
	p := s.book.Pod(uid)
	c.mu.Unlock()
	if p == nil {
		return false
	}
	is := metadata("Pod")
	err := c.live.Get(ctx, types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, is)
	return err == nil && is.UID == types.UID(uid) || err != nil && !apierrors.IsNotFound(err)
}

// wait notes what a pod waits for. Controller.mu is held.
func (s *session) wait(uid pool.UID, plan pool.Plan) {
	s.unblock(uid)
	if plan.Reason == "" {
		return
	}
	s.blocked[uid] = plan.Addrs
	if w := s.gated[uid]; w != nil {
		w.waited = true
	}
	for _, a := range plan.Addrs {
		if s.on[a] == nil {
			s.on[a] = map[pool.UID]struct{}{}
		}
		s.on[a][uid] = struct{}{}
	}
}

func (s *session) unblock(uid pool.UID) {
	for _, a := range s.blocked[uid] {
		if delete(s.on[a], uid); len(s.on[a]) == 0 {
			delete(s.on, a)
		}
	}
	delete(s.blocked, uid)
}

// waitForNodes notes whether an address waits for what nodes say. Controller.mu is held.
func (s *session) waitForNodes(a netip.Addr, plan pool.Plan, now time.Time) {
	was := s.silent[a]
	if delete(s.silent, a); s.book.Settled(a) {
		return
	}
	is := silence{operator: plan.Remedy != ""}
	if s.holds(a) {
		is.of, is.since = s.book.PodIP(a).PodUID, now
		if was.of == is.of {
			is.since = was.since
		}
	}
	s.silent[a] = is
}

// said is what was said of an object last, and when.
type said struct {
	note string
	at   time.Time
}

// firstOf reports whether something is said of an object for the first time since something else was, or again after a
// while.
func (s *session) firstOf(about, note string) bool {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	last, now := s.said[about], s.c.now()
	if last.note == note && now.Sub(last.at) < cluster.SayAgainAfter {
		return false
	}
	s.said[about] = said{note, now}
	return true
}
