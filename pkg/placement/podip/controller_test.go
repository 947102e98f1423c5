package podip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	discoveryfake "k8s.io/client-go/discovery/fake"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllertest"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/must"
)

// api stands for the API server. It notes the writes, and can fail them.
type api struct {
	client.WithWatch
	writes []string
	uids   int
	now    time.Time
	// before is called ahead of each write, whose error fails it; lists ahead of each list, and listed after pods were
	// listed, before that is known.
	// away fails lists.
	before func(write string) error
	lists  func(client.ObjectList)
	listed func()
	away   error
	// spiderpool: SpiderIPPools may be listed.
	spiderpool bool
}

func newAPI(t *testing.T, objects ...client.Object) *api {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), stayputv1alpha1.AddToScheme(scheme),
		spiderpoolv2beta1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	a := &api{now: hometest.Noon}
	epoch := stayputv1alpha1.EpochTime(1000)
	audit := &stayputv1alpha1.PodIPAudit{ObjectMeta: metav1.ObjectMeta{Name: stayputv1alpha1.PodIPAuditName},
		Spec: stayputv1alpha1.PodIPAuditSpec{Epoch: &epoch, Term: &epoch, Mark: metav1.NewMicroTime(a.now),
			Phase: stayputv1alpha1.PodIPAuditSettled}}
	base := fake.NewClientBuilder().WithScheme(scheme).
		WithStatusSubresource(&stayputv1alpha1.PodIP{}, &stayputv1alpha1.PodIPPool{}, &spiderpoolv2beta1.SpiderIPPool{}).
		WithObjects(append(objects, audit)...).Build()
	write := func(verb string, o client.Object) error {
		what := fmt.Sprintf("%s %s %s", verb, strings.TrimPrefix(fmt.Sprintf("%T", o), "*"), o.GetName())
		what = strings.NewReplacer("v1alpha1.", "", "v1.", "").Replace(what)
		if a.before != nil {
			if err := a.before(what); err != nil {
				return err
			}
		}
		a.writes = append(a.writes, what)
		return nil
	}
	a.WithWatch = interceptor.NewClient(base, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.CreateOption) error {
			if review, ok := o.(*authorizationv1.SelfSubjectAccessReview); ok {
				for _, of := range []string{"list", "spiderpool.spidernet.io", "spiderippools"} {
					if !strings.Contains(review.Spec.ResourceAttributes.String(), of) {
						t.Errorf("asked for the right to %v", review.Spec.ResourceAttributes)
					}
				}
				review.Status.Allowed = a.spiderpool
				return a.away
			}
			if err := write("create", o); err != nil {
				return err
			}
			a.uids++
			o.SetUID(types.UID(fmt.Sprintf("made-%d", a.uids)))
			o.SetCreationTimestamp(metav1.NewTime(a.now))
			return c.Create(ctx, o, options...)
		},
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.UpdateOption) error {
			if err := write("update", o); err != nil {
				return err
			}
			return c.Update(ctx, o, options...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch,
			options ...client.PatchOption) error {
			if err := write("patch", o); err != nil {
				return err
			}
			return c.Patch(ctx, o, p, options...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.DeleteOption) error {
			if err := write("delete", o); err != nil {
				return err
			}
			return c.Delete(ctx, o, options...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch,
			options ...client.SubResourcePatchOption) error {
			if err := write("patch "+sub, o); err != nil {
				return err
			}
			if o, ok := o.(*stayputv1alpha1.PodIPPool); ok {
				a.countsIn(t, o, p)
			}
			return c.SubResource(sub).Patch(ctx, o, p, options...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if a.lists != nil {
				a.lists(list)
			}
			if a.away != nil {
				return a.away
			}
			err := c.List(ctx, list, options...)
			if _, ok := list.(*corev1.PodList); ok && a.listed != nil {
				a.listed()
			}
			return err
		},
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
			options ...client.GetOption) error {
			cached, ok := o.(*cluster.Pod)
			if !ok {
				return c.Get(ctx, key, o, options...)
			}
			var pod corev1.Pod
			if err := c.Get(ctx, key, &pod, options...); err != nil {
				return err
			}
			*cached = *cluster.PodOf(&pod)
			return nil
		},
	})
	return a
}

// countsIn checks that a status of a pool has all counts, as its definition wants it: the fake does not.
func (a *api) countsIn(t *testing.T, o *stayputv1alpha1.PodIPPool, p client.Patch) {
	t.Helper()
	var is struct {
		Status struct{ Addresses map[string]any }
	}
	text, err := p.Data(o)
	if err == nil {
		err = json.Unmarshal(text, &is)
	}
	if err != nil || len(is.Status.Addresses) != 4 {
		t.Errorf("the API server refuses the status of pool %s: %s (%v)", o.Name, text, err)
	}
}

// IsWatchListSemanticsUnSupported tells reflectors to list before they watch.
func (a *api) IsWatchListSemanticsUnSupported() bool { return true }

// eachPod lists the metadata of pods.
func (a *api) eachPod(ctx context.Context, _ metav1.ListOptions, each func(*corev1.Pod) error) error {
	var list corev1.PodList
	if err := a.List(ctx, &list); err != nil {
		return err
	}
	for _, pod := range list.Items {
		if err := each(&corev1.Pod{ObjectMeta: pod.ObjectMeta}); err != nil {
			return err
		}
	}
	return nil
}

// taken returns the writes since the last call.
func (a *api) taken() []string {
	defer func() { a.writes = nil }()
	return a.writes
}

// line is a queue that a test works off itself. All pods are of the namespace default.
type line struct {
	queue
	now, later []pool.Key
}

func podKey(name string) pool.Key {
	return pool.Key{Kind: pool.KeyPod, Namespace: "default", Name: name}
}

// podLine is the part of a line that has the pods.
type podLine struct {
	podQueue
	of *line
}

func (l podLine) Add(r reconcile.Request) { l.of.Add(podKey(r.Name)) }
func (l podLine) Len() int                { return 0 }

func (l *line) Add(k pool.Key) {
	if !slices.Contains(l.now, k) {
		l.now = append(l.now, k)
	}
}

func (l *line) Len() int { return len(l.now) }

func (l *line) AddAfter(k pool.Key, _ time.Duration) {
	if !slices.Contains(l.later, k) {
		l.later = append(l.later, k)
	}
}

// controlling is a controller that sees what there is when it is told to look.
type controlling struct {
	*Controller
	t     *testing.T
	api   *api
	line  *line
	said  *events.FakeRecorder
	feeds []*feed
	seen  map[types.UID]bool
	nodes map[string]bool
	// home is what a pod is given besides its addresses, or why it is not placed. If it is nil, it is given nothing.
	home func() (gate.Placement, error)
}

type fakeCache struct {
	client.Reader
	cache.Informers
}

func control(t *testing.T, a *api) *controlling {
	t.Helper()
	w := cluster.Over(fakeCache{Reader: a}, a, a, &discoveryfake.FakeDiscovery{Fake: &clienttesting.Fake{}})
	c := &controlling{t: t, api: a, line: &line{}, said: events.NewFakeRecorder(1000), seen: map[types.UID]bool{}}
	c.Controller = New(a, a, a, nil, Options{Workloads: w, Uninstalling: func() bool { return false }})
	c.follower.eachPod = a.eachPod
	c.events, c.now, c.queue = c.said, func() time.Time { return a.now }, c.line
	c.pods = podLine{of: c.line}
	c.setWords(a.spiderpool)
	c.begins()
	return c
}

// begins has the controller begin a Book, and see all.
func (c *controlling) begins() {
	c.t.Helper()
	s, err := c.follower.begin(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	c.feeds = []*feed{
		{c: c.state, set: func(o client.Object) { c.setPoolLocked(o.(*stayputv1alpha1.PodIPPool)) },
			all:    func() []string { return c.poolNamesLocked(false) },
			remove: func(o client.Object, _ string) { c.removePoolLocked(o.GetName()) },
			end:    func(name, _ string) { c.removePoolLocked(name) }},
		c.follower.addresses(s), c.follower.reports(s), c.follower.ofNamespaces(s), c.follower.spiderIPPools(),
	}
	c.nodes = map[string]bool{}
	c.looks()
	c.open(s)
}

// looks has the controller see what there is now.
func (c *controlling) looks() {
	c.t.Helper()
	for i, list := range []client.ObjectList{&stayputv1alpha1.PodIPPoolList{}, &stayputv1alpha1.PodIPList{},
		&stayputv1alpha1.PodIPReportList{}, &corev1.NamespaceList{}, &spiderpoolv2beta1.SpiderIPPoolList{}} {
		if err := c.api.List(c.t.Context(), list); err != nil {
			c.t.Fatal(err)
		}
		items, err := meta.ExtractList(list)
		if err != nil {
			c.t.Fatal(err)
		}
		var all []any
		for _, o := range items {
			all = append(all, o)
		}
		if err := c.feeds[i].Replace(all, "1000000"); err != nil {
			c.t.Fatal(err)
		}
	}
	var nodes corev1.NodeList
	var pods corev1.PodList
	if err := errors.Join(c.api.List(c.t.Context(), &nodes), c.api.List(c.t.Context(), &pods)); err != nil {
		c.t.Fatal(err)
	}
	there := map[string]bool{}
	for i := range nodes.Items {
		there[nodes.Items[i].Name] = true
		c.follower.nodes(c.session).OnUpdate(&corev1.Node{}, &nodes.Items[i])
	}
	for name := range c.nodes {
		if !there[name] {
			c.follower.nodes(c.session).OnDelete(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	c.nodes = there
	exist := map[types.UID]bool{}
	for i := range pods.Items {
		exist[pods.Items[i].UID] = true
		c.follower.podEvents(c.t.Context(), c.session).OnAdd(cluster.PodOf(&pods.Items[i]), false)
	}
	for uid := range c.seen {
		if !exist[uid] {
			c.follower.podEvents(c.t.Context(),
				c.session).OnDelete(cluster.PodOf(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid,
				ResourceVersion: "1"}}))
		}
	}
	c.seen = exist
}

// place does what the loop that places pods does.
func (c *controlling) place(name string) (reconcile.Result, error) {
	var pod cluster.Pod
	key := types.NamespacedName{Namespace: "default", Name: name}
	if err := c.claimer.cache.Get(c.t.Context(), key, &pod); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	core := pod.Core()
	if core.DeletionTimestamp != nil || home.Gated(core) && !home.LastGate(core) {
		return reconcile.Result{}, nil
	}
	claim, err := c.claimer.Claim(c.t.Context(), &pod)
	switch {
	case err != nil || claim == nil:
	case !claim.Ready:
		if note := claim.Note; note != nil && c.session.firstOf(name, note.Text) {
			c.events.Eventf(core, nil, note.Kind, note.Reason, "Placing", "%s", note.Text)
		}
		return reconcile.Result{RequeueAfter: claim.Retry}, nil
	default:
		var to gate.Placement
		if c.home != nil {
			to, err = c.home()
		}
		if err != nil {
			claim.Drop()
			break
		}
		err = claim.CarryOut(c.t.Context(), core, to)
	}
	if Changed(err) {
		return reconcile.Result{RequeueAfter: time.Second}, nil
	}
	return reconcile.Result{}, err
}

// wakesWaiting wakes what waits, as time does.
func (c *controlling) wakesWaiting() {
	c.mu.Lock()
	defer c.unlock()
	c.session.book.WakeWaiting()
}

// step reconciles one key.
func (c *controlling) step() error {
	k := c.line.now[0]
	c.line.now = c.line.now[1:]
	return c.reconcile(k)
}

func (c *controlling) reconcile(k pool.Key) error {
	var result reconcile.Result
	var err error
	if k.Kind == pool.KeyPod {
		result, err = c.place(k.Name)
	} else {
		result, err = c.Reconcile(c.t.Context(), k)
	}
	if result.RequeueAfter > 0 || err != nil {
		c.line.AddAfter(k, result.RequeueAfter)
	}
	return err
}

// works reconciles until nothing is left to do.
func (c *controlling) works() {
	c.t.Helper()
	for idle := 0; idle < 2; idle++ {
		c.looks()
		before := len(c.api.writes)
		c.line.now, c.line.later = append(c.line.now, c.line.later...), nil
		for range 10_000 {
			if len(c.line.now) == 0 {
				break
			}
			if err := c.step(); err != nil {
				c.t.Fatal(err)
			}
		}
		if len(c.api.writes) > before {
			idle = -1
		}
	}
}

// notes returns the Events since the last call.
func (c *controlling) notes() (all []string) {
	for len(c.said.Events) > 0 {
		all = append(all, <-c.said.Events)
	}
	return all
}

func aPool(name, addresses string, change ...func(*stayputv1alpha1.PodIPPool)) *stayputv1alpha1.PodIPPool {
	o := &stayputv1alpha1.PodIPPool{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("of-" + name), Generation: 1},
		Spec: stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeL2, Subnet: "10.6.0.0/16",
			Addresses: []string{addresses}, Gateway: "10.6.0.1"},
	}
	for _, c := range change {
		c(o)
	}
	return o
}

// asking makes a gated pod that asks for addresses of a pool. The one made later is the younger one.
func asking(name, pools string, change ...func(*corev1.Pod)) *corev1.Pod {
	return hometest.Pod(append([]func(*corev1.Pod){func(p *corev1.Pod) {
		p.Name, p.UID = name, types.UID("uid-"+name)
		p.Annotations = map[string]string{stayputv1alpha1.AnnotationPools: pools}
	}}, change...)...)
}

func made(after time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(hometest.Noon.Add(after)) }
}

func (a *api) pod(t *testing.T, name string) (*corev1.Pod, []pool.Address) {
	t.Helper()
	var pod corev1.Pod
	if err := a.Get(t.Context(), types.NamespacedName{Namespace: "default", Name: name}, &pod); err != nil {
		t.Fatal(err)
	}
	var all []pool.Address
	if text := pod.Annotations[stayputv1alpha1.AnnotationAddresses]; text != "" {
		if err := json.Unmarshal([]byte(text), &all); err != nil {
			t.Fatal(err)
		}
	}
	return &pod, all
}

func (a *api) ips(t *testing.T) map[string]stayputv1alpha1.PodIP {
	t.Helper()
	var list stayputv1alpha1.PodIPList
	if err := a.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	all := map[string]stayputv1alpha1.PodIP{}
	for _, o := range list.Items {
		all[o.Name] = o
	}
	return all
}

// consistent checks that no address is given twice, that each pod has what it was told, and that nothing leaks.
func (a *api) consistent(t *testing.T) {
	t.Helper()
	var pods corev1.PodList
	if err := a.List(t.Context(), &pods); err != nil {
		t.Fatal(err)
	}
	ips, told := a.ips(t), map[string]string{}
	for i := range pods.Items {
		pod, has := a.pod(t, pods.Items[i].Name)
		if home.Gated(pod) == (has != nil) {
			t.Errorf("pod %s: gated %t with addresses %v", pod.Name, home.Gated(pod), has)
		}
		for _, h := range has {
			name := stayputv1alpha1.PodIPName(h.Prefix.Addr())
			if other := told[name]; other != "" {
				t.Errorf("%s was given to %s and %s", name, other, pod.Name)
			}
			if told[name] = pod.Name; ips[name].Spec.PodUID != string(pod.UID) {
				t.Errorf("pod %s has %s, which is %q's", pod.Name, name, ips[name].Spec.PodUID)
			}
		}
	}
	for name, ip := range ips {
		if told[name] == "" {
			t.Errorf("%s is %s's, who does not have it", name, ip.Spec.PodName)
		}
	}
}

// informers of nodes and pods, of which there are none.
type informers struct{ cache.Informers }

func (informers) GetInformer(context.Context, client.Object, ...cache.InformerGetOption) (cache.Informer, error) {
	return controllertest.NewFakeInformer(controllertest.Synced), nil
}

// While it is not known whether there are pools, no pod is placed: that must not last.
func TestPoolsAreServedAsSoonAsTheAPIServerAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
			aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
		a.away = errors.New("the API server is away")
		c := unstarted(t, a)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- c.follower.Start(ctx) }()
		synctest.Wait()
		plain := hometest.Pod(func(p *corev1.Pod) { p.Name = "plain" })
		if _, err := c.claimer.asks(t.Context(), plain); !errors.Is(err, ErrUnknown) {
			t.Errorf("it is known whether a pod asks for addresses, though nothing can be: %v", err)
		}
		a.away = nil
		time.Sleep(time.Second)
		synctest.Wait()
		if owns, err := c.claimer.asks(t.Context(), plain); owns || err != nil {
			t.Errorf("an ordinary pod has to wait: owns %t, %v", owns, err)
		}
		if !slices.Contains(c.line.now, podKey("plain")) {
			t.Errorf("it is not woken, only %v", c.line.now)
		}
		c.empties()
		if pod, has := a.pod(t, "web-0"); home.Gated(pod) || len(has) != 1 {
			t.Errorf("gated %t, with %v", home.Gated(pod), has)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// unstarted returns a controller that is to be started, and that works by the queue of the test.
func unstarted(t *testing.T, a *api) *controlling {
	c := &controlling{t: t, api: a, line: &line{}, said: events.NewFakeRecorder(1000)}
	c.Controller = New(a, a, a, informers{}, Options{Workloads: serves(a, "PodIPPool"),
		Uninstalling: func() bool { return false }})
	c.follower.eachPod = a.eachPod
	c.events, c.now, c.queue = c.said, func() time.Time { return a.now }, c.line
	c.pods = podLine{of: c.line}
	return c
}

// empties reconciles until the queue is empty.
func (c *controlling) empties() {
	c.t.Helper()
	for len(c.line.now) > 0 {
		if err := c.step(); err != nil {
			c.t.Error(err)
		}
	}
}

// serves returns workloads of an API server that serves these kinds of ours.
func serves(a *api, kinds ...string) *cluster.Workloads {
	of := &metav1.APIResourceList{GroupVersion: stayputv1alpha1.SchemeGroupVersion.String()}
	for _, kind := range append(kinds, "RetainedIP") {
		of.APIResources = append(of.APIResources, metav1.APIResource{Kind: kind, Name: strings.ToLower(kind) + "s"})
	}
	return cluster.Over(fakeCache{Reader: a}, a, a, &discoveryfake.FakeDiscovery{
		Fake: &clienttesting.Fake{Resources: []*metav1.APIResourceList{of}}})
}

func TestNothingIsAskedOfPoolsThatAreNotServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t)
		lists := 0
		a.lists = func(list client.ObjectList) {
			if _, ok := list.(*stayputv1alpha1.PodIPPoolList); ok {
				lists++
			}
		}
		c := New(a, a, a, informers{}, Options{Workloads: serves(a),
			Uninstalling: func() bool { return false }, Installation: installation})
		go func() { _ = c.follower.Start(t.Context()) }()
		synctest.Wait()
		if owns, err := c.claimer.asks(t.Context(), hometest.Pod()); owns || err != nil {
			t.Errorf("an ordinary pod has to wait: owns %t, %v", owns, err)
		}
		time.Sleep(10 * cluster.LookupEvery)
		synctest.Wait()
		if writes := a.taken(); lists > 0 || len(writes) > 0 {
			t.Errorf("pools were listed %d times, and %q written", lists, writes)
		}
		c.workloads = serves(a, "PodIPPool")
		time.Sleep(cluster.LookupEvery)
		synctest.Wait()
		if lists == 0 {
			t.Error("pools that came later are not listed")
		}
	})
}

// An API server that has just started serves no kinds of ours for a while: its pods are not without pools.
func TestAnAPIServerThatServesNothingYetDoesNotSayThatThereAreNoPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t)
		nothing := cluster.Over(fakeCache{Reader: a}, a, a, &discoveryfake.FakeDiscovery{Fake: &clienttesting.Fake{}})
		c := New(a, a, a, informers{}, Options{Workloads: nothing, Uninstalling: func() bool { return false }})
		go func() { _ = c.follower.Start(t.Context()) }()
		synctest.Wait()
		if _, err := c.claimer.asks(t.Context(), hometest.Pod()); err == nil {
			t.Error("it counts as known whether an ordinary pod asks for addresses")
		}
	})
}

var installation = types.NamespacedName{Namespace: "stayput-system", Name: "stayput-installation"}

// Agents watch the installation, and nothing of pools while it does not say that there are any.
func TestTheInstallationSaysWhetherThereArePools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// As a controller left it that ended before it saw the end of the last pool.
		a := newAPI(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: installation.Namespace,
			Name: installation.Name, Annotations: map[string]string{stayputv1alpha1.AnnotationPools: "true", "other": "x"}}})
		c := New(a, a, a, informers{}, Options{Workloads: serves(a, "PodIPPool"),
			Uninstalling: func() bool { return false }, Installation: installation})
		c.follower.eachPod = a.eachPod
		go func() { _ = c.follower.Start(t.Context()) }()
		says := func(want bool, when string) {
			t.Helper()
			synctest.Wait()
			var is corev1.ConfigMap
			if err := a.Get(t.Context(), installation, &is); err != nil {
				t.Fatal(err)
			}
			value, ok := is.Annotations[stayputv1alpha1.AnnotationPools]
			all := `{"subnets":["10.6.0.0/16"],"gateways":["10.6.0.1"]}`
			if strings.Contains(when, "Calico") { // nodes only answer that they have no address of it
				all = `{}`
			}
			if ok != want || want && value != all || is.Annotations["other"] != "x" {
				t.Errorf("%s: %v", when, is.Annotations)
			}
			value, ok = is.Annotations[stayputv1alpha1.AnnotationRoutedPools]
			if routed := strings.Contains(when, "routed"); ok != routed || routed && value != "true" {
				t.Errorf("%s: routed pools %q, %t", when, value, ok)
			}
		}
		says(false, "without a pool")
		a.taken()
		time.Sleep(10 * pool.MarkEvery)
		if writes := a.taken(); len(writes) > 0 {
			t.Errorf("without a pool, %q were written", writes)
		}

		a.before = func(write string) error {
			if strings.Contains(write, "ConfigMap") {
				a.before = nil
				return errors.New("the API server is away")
			}
			return nil
		}
		calicos := aPool("calicos", "10.6.168.101", func(o *stayputv1alpha1.PodIPPool) {
			o.Spec.Mode, o.Spec.Gateway = stayputv1alpha1.ModeCalico, ""
		})
		if err := a.WithWatch.Create(t.Context(), calicos); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		says(true, "with one of Calico alone, and a write that failed")
		for _, name := range []string{"blue", "green"} {
			if err := a.WithWatch.Create(t.Context(), aPool(name, "10.6.168.101")); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Delete(t.Context(), calicos); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		says(true, "with two pools")
		is := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: installation.Namespace, Name: installation.Name,
			Annotations: map[string]string{"other": "x"}}}
		if err := a.Update(t.Context(), is); err != nil {
			t.Fatal(err)
		}
		time.Sleep(pool.MarkEvery)
		says(true, "after somebody took it away")

		routed := aPool("far", "10.6.168.101", func(o *stayputv1alpha1.PodIPPool) {
			o.Spec.Mode, o.Spec.Gateway = stayputv1alpha1.ModeRouted, ""
		})
		if err := a.WithWatch.Create(t.Context(), routed); err != nil {
			t.Fatal(err)
		}
		says(true, "with a routed one")
		if err := a.Delete(t.Context(), routed); err != nil {
			t.Fatal(err)
		}
		says(true, "without it")

		for i, name := range []string{"blue", "green"} {
			if err := a.Delete(t.Context(), aPool(name, "")); err != nil {
				t.Fatal(err)
			}
			says(i == 0, "without "+name)
		}
	})
}

func TestAPodIsLetGoByOneWriteOnceItsAddressesAreClaimed(t *testing.T) {
	selects := func(o *stayputv1alpha1.PodIPPool) {
		o.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"link": "vlan10"}}
	}
	pod := asking("web-0", "blue,green@net1", func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
				{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpExists}}},
			}}}}
	})
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110", selects),
		aPool("green", "10.6.200.0/24"), pod)
	c := control(t, a)
	c.home = func() (gate.Placement, error) {
		return gate.Placement{Pinned: "node node-1", Home: home.Affinity{Node: "node-1"}}, nil
	}
	a.taken()
	c.looks()
	for len(c.line.now) > 0 {
		if err := c.step(); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"patch PodIPPool blue", "create PodIP 10.6.168.101", "patch PodIPPool green",
		"create PodIP 10.6.200.0", "patch Pod web-0"}
	if is := a.taken(); !slices.Equal(is, want) {
		t.Errorf("writes %q\n want %q", is, want)
	}
	is, has := a.pod(t, "web-0")
	if home.Gated(is) || len(has) != 2 || has[0].Interface != "eth0" || has[1].Interface != "net1" ||
		has[0].Prefix != netip.MustParsePrefix("10.6.168.101/16") || has[0].Gateway.String() != "10.6.0.1" {
		t.Errorf("gated %t with %+v", home.Gated(is), has)
	}
	term := is.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0]
	var keys []string
	for _, e := range append(term.MatchFields, term.MatchExpressions...) {
		keys = append(keys, e.Key)
	}
	if !slices.Equal(keys, []string{"metadata.name", "disk", "link"}) {
		t.Errorf("its nodes are required by %q", keys)
	}
	ip := a.ips(t)["10.6.168.101"]
	if ip.Spec.PodUID != "uid-web-0" || !slices.Contains(ip.Finalizers, stayputv1alpha1.FinalizerInUse) {
		t.Errorf("%+v", ip)
	}
	c.works()
	a.consistent(t)
}

// Each write in turn is the first that is not made.
func TestWhatIsRecordedOfAPredecessorOverrulesNoAddress(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
	c := control(t, a)
	c.home = func() (gate.Placement, error) {
		victims := map[string]string{stayputv1alpha1.AnnotationAddresses: `[{"address":"10.6.168.109/16"}]`}
		return gate.Placement{Annotations: victims, Recorded: victims}, nil
	}
	c.works()
	a.consistent(t)
	if pod, has := a.pod(t, "web-0"); home.Gated(pod) || len(has) != 1 ||
		has[0].Prefix != netip.MustParsePrefix("10.6.168.101/16") {
		t.Errorf("gated %t with %+v", home.Gated(pod), has)
	}
}

// behind is a cache in which a pod is as it was.
type behind struct {
	client.Reader
	pod *corev1.Pod
}

func (b behind) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	if cached, ok := o.(*cluster.Pod); ok && key.Name == b.pod.Name {
		*cached = *cluster.PodOf(b.pod)
		return nil
	}
	return b.Reader.Get(ctx, key, o, options...)
}

func TestThatAPodWasLetGoIsKnownBeforeItsWatchSaysSo(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
	c := control(t, a)
	was, _ := a.pod(t, "web-0")
	c.claimer.cache = behind{a, was}
	c.looks()
	for len(c.line.now) > 0 {
		if err := c.step(); err != nil {
			t.Fatal(err)
		}
	}
	if is, _ := a.pod(t, "web-0"); home.Gated(is) {
		t.Fatal("the test is wrong: the pod is gated still")
	}
	a.taken()
	c.enqueueLocked(podKey("uid-web-0"))
	for len(c.line.now) > 0 {
		if err := c.step(); err != nil {
			t.Error(err)
		}
	}
	if writes := a.taken(); len(writes) > 0 {
		t.Errorf("writes %q about a pod that was let go", writes)
	}
	c.claimer.cache = a
	c.works()
	a.consistent(t)
}

func TestAControllerThatIsKilledBetweenTwoWritesLeavesNothingBehind(t *testing.T) {
	for after := range 12 {
		a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.103"),
			asking("web-0", "blue"), asking("web-1", "blue", made(time.Second)))
		c := control(t, a)
		left := after
		a.before = func(string) error {
			if left--; left < 0 {
				return errors.New("killed")
			}
			return nil
		}
		c.looks()
		for len(c.line.now) > 0 && left >= 0 {
			_ = c.step()
		}
		a.before = nil
		next := control(t, a)
		next.works()
		if _, has := a.pod(t, "web-1"); has == nil {
			t.Fatalf("web-1 waits for ever after %d writes: %q", after, next.notes())
		}
		a.consistent(t)
	}
}

func TestTwoControllersAtOnceGiveNoAddressTwice(t *testing.T) {
	objects := []client.Object{hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110")}
	for i := range 20 {
		objects = append(objects, asking(fmt.Sprintf("web-%d", i), "blue", made(time.Duration(i)*time.Second)))
	}
	a := newAPI(t, objects...)
	both := []*controlling{control(t, a), control(t, a)}
	for i := 0; len(both[0].line.now)+len(both[1].line.now) > 0; i++ {
		if c := both[i%2]; len(c.line.now) > 0 {
			_ = c.step() // of what it saw at first, and what it did itself
		}
	}
	for range 3 {
		for _, c := range both {
			c.works()
		}
	}
	a.consistent(t)
	for i := range 20 {
		pod, _ := a.pod(t, fmt.Sprintf("web-%d", i))
		if home.Gated(pod) && i < 9 {
			t.Errorf("%s waits behind younger ones", pod.Name)
		}
	}
	if n := len(a.ips(t)); n != 10 {
		t.Errorf("%d addresses are given, of 10", n)
	}
}

func TestPodsOfAnExhaustedPoolWaitAndGoTheOldestFirst(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"),
		asking("third", "blue", made(3*time.Second)), asking("second", "blue", made(2*time.Second)),
		asking("first", "blue", made(time.Second)))
	a.now = a.now.Add(time.Minute)
	c := control(t, a)
	c.works()
	says := []string{"2 pods wait for an address", "1 pod waits for an address", ""}
	for i, name := range []string{"first", "second", "third"} {
		pod, has := a.pod(t, name)
		if home.Gated(pod) || len(has) != 1 {
			t.Fatalf("%s waits, though it is the oldest: %q", name, c.notes())
		}
		var blue stayputv1alpha1.PodIPPool
		if err := a.Get(t.Context(), types.NamespacedName{Name: "blue"}, &blue); err != nil {
			t.Fatal(err)
		}
		waits := says[i] != ""
		is := meta.FindStatusCondition(blue.Status.Conditions, stayputv1alpha1.ConditionExhausted)
		if is == nil || (is.Status == metav1.ConditionTrue) != waits || is.Message != says[i] ||
			blue.Status.Addresses != (stayputv1alpha1.PodIPPoolAddresses{Total: 1, Used: 1}) {
			t.Errorf("with %s: exhausted %+v, %+v", name, is, blue.Status.Addresses)
		}
		if notes := c.notes(); i == 0 && (len(notes) == 0 || !strings.Contains(notes[0], "no free address")) {
			t.Errorf("said %q", notes)
		}
		if c.works(); len(c.notes()) > 0 {
			t.Error("it is said again")
		}
		// Nobody asked to keep it, and it never had a node.
		if err := a.Delete(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		c.works()
	}
	a.consistent(t)
	if left := a.ips(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// agent writes what the agent of a node says of an address.
func (a *api) agent(t *testing.T, name string, phase stayputv1alpha1.PodIPPhase, uid, node string) {
	t.Helper()
	ip := a.ips(t)[name]
	since := metav1.NewTime(a.now)
	ip.Status.Phase, ip.Status.PodUID, ip.Status.NodeName, ip.Status.Since = phase, uid, node, &since
	if err := a.Status().Update(t.Context(), &ip); err != nil {
		t.Fatal(err)
	}
}

func bound(t *testing.T, a *api, name, node string) *corev1.Pod {
	t.Helper()
	pod, _ := a.pod(t, name)
	pod.Spec.NodeName = node
	if err := a.Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	return pod
}

func ownedBySet(p *corev1.Pod) {
	yes := true
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "of-web",
		Controller: &yes}}
}

func TestASuccessorHasItsAddressOnceItsNodeSaysThatItIsGone(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"),
		asking("web-0", "blue", hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")))
	c := control(t, a)
	c.works()
	pod := bound(t, a, "web-0", "node-1")
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(pod.UID), "node-1")
	c.works()
	if err := a.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	c.works()
	successor := asking("web-0", "blue", hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h"),
		func(p *corev1.Pod) { p.UID = "successor" })
	if err := a.WithWatch.Create(t.Context(), successor); err != nil {
		t.Fatal(err)
	}
	c.notes()
	c.works()
	is, has := a.pod(t, "web-0")
	if !home.Gated(is) || has != nil {
		t.Fatalf("it has %v while its predecessor may run", has)
	}
	if notes := c.notes(); len(notes) > 0 {
		t.Errorf("of an ordinary wait it says %q", notes)
	}
	a.now = a.now.Add(ordinaryWait)
	c.works()
	if notes := c.notes(); len(notes) != 1 || !strings.Contains(notes[0], "node-1 has not reported yet") {
		t.Errorf("said %q", notes)
	}
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, "uid-web-0", "node-1")
	c.works()
	is, has = a.pod(t, "web-0")
	if home.Gated(is) || len(has) != 1 || has[0].Prefix.Addr().String() != "10.6.168.101" || has[0].Last != "node-1" {
		t.Errorf("gated %t with %+v: %q", home.Gated(is), has, c.notes())
	}
	if ip := a.ips(t)["10.6.168.101"]; ip.Spec.PodUID != string(is.UID) || ip.Spec.Retention != "1h0m0s" {
		t.Errorf("%+v", ip.Spec)
	}
}

// A deletion cannot be taken back, and may be a mistake: it ends no workload.
func TestAPoolThatIsBeingDeletedLeavesItsAddressesToTheirPods(t *testing.T) {
	const addr = "10.6.168.101"
	hour := hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")
	blue := aPool("blue", "10.6.168.101-10.6.168.110")
	a := newAPI(t, hometest.Node("node-1", "a"), blue, asking("web-0", "blue", hour))
	c := control(t, a)
	c.works()
	must.Do(t, a.Delete(t.Context(), blue))
	ends := func() {
		t.Helper()
		pod := bound(t, a, "web-0", "node-1")
		must.Do(t, a.Delete(t.Context(), pod))
		a.agent(t, addr, stayputv1alpha1.PodIPRetained, string(pod.UID), "node-1")
		c.works()
	}
	ends()
	if _, kept := a.ips(t)[addr]; !kept {
		t.Fatal("the address is given up before its pod is created again")
	}

	// Its pod has it again, and no pod gets another one.
	must.Do(t, a.WithWatch.Create(t.Context(), asking("web-0", "blue", hour, func(p *corev1.Pod) { p.UID = "successor" })))
	must.Do(t, a.WithWatch.Create(t.Context(), asking("web-1", "blue", hour, made(time.Second))))
	a.now = a.now.Add(ordinaryWait)
	c.works()
	if pod, has := a.pod(t, "web-0"); home.Gated(pod) || len(has) != 1 || has[0].Prefix.Addr().String() != addr {
		t.Errorf("its pod has %v, gated %t", has, home.Gated(pod))
	}
	if pod, has := a.pod(t, "web-1"); !home.Gated(pod) || has != nil {
		t.Errorf("a new pod has %v, gated %t", has, home.Gated(pod))
	}
	if notes := strings.Join(c.notes(), "\n"); !strings.Contains(notes, "pool blue is being deleted") {
		t.Errorf("said %s", notes)
	}

	// The pool goes with its last address.
	ends()
	must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(blue), blue))
	ready := meta.FindStatusCondition(blue.Status.Conditions, stayputv1alpha1.ConditionReady)
	if ready == nil || ready.Reason != "Deleting" || !strings.Contains(ready.Message, "1 address") {
		t.Errorf("it says %+v", ready)
	}
	a.now = a.now.Add(time.Hour)
	c.open(c.session)
	c.works()
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(blue), blue); !apierrors.IsNotFound(err) {
		t.Errorf("the pool: %v; left are %v", err, a.ips(t))
	}
}

// A pod is kept from the node that was just lost, and is made again if it finds no other one before that is back.
// The kubelet of node-1, which is Ready, rejected the pod.
func TestAPodThatItsHomeRejectedIsNotEndedBecauseThatIsThere(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"), aPool("blue", "10.6.168.101-10.6.168.110"),
		asking("web-0", "blue", ownedBySet, hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")))
	c := control(t, a)
	c.works()
	first := bound(t, a, "web-0", "node-1")
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(first.UID), "node-1")
	c.works()
	if err := a.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(first.UID), "node-1")
	c.works()
	c.home = func() (gate.Placement, error) {
		return gate.Placement{Home: home.Affinity{Without: []string{"node-1"}}, Pinned: home.NotNodes([]string{"node-1"})}, nil
	}
	next := asking("web-0", "blue", ownedBySet, func(p *corev1.Pod) { p.UID = "next" })
	if err := a.WithWatch.Create(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	c.works()
	c.works()
	is, has := a.pod(t, "web-0")
	if is.UID != next.UID || len(has) != 1 || !home.KeptFrom(is, "node-1") {
		t.Errorf("%s has %v and requires %+v: %q", is.UID, has, is.Spec.Affinity, c.notes())
	}
}

func TestASuccessorIsKeptFromALostNodeWhileThatIsLost(t *testing.T) {
	retained := hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")
	one := hometest.Node("node-1", "a")
	a := newAPI(t, one, hometest.Node("node-2", "a"), aPool("blue", "10.6.168.101-10.6.168.110"),
		asking("web-0", "blue", ownedBySet, retained))
	c := control(t, a)
	c.works()
	first := bound(t, a, "web-0", "node-1")
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(first.UID), "node-1")
	c.works()
	if err := errors.Join(a.Delete(t.Context(), one), a.Delete(t.Context(), first)); err != nil {
		t.Fatal(err)
	}
	c.works()
	if err := a.WithWatch.Create(t.Context(), asking("web-0", "blue", ownedBySet, retained, func(p *corev1.Pod) {
		p.UID = "next"
	})); err != nil {
		t.Fatal(err)
	}
	c.works()
	next, has := a.pod(t, "web-0")
	if len(has) != 1 || has[0].Prefix.Addr().String() != "10.6.168.101" || !home.KeptFrom(next, "node-1") ||
		home.KeptFrom(next, "node-2") {
		t.Fatalf("it has %v and requires %+v: %q", has, next.Spec.Affinity, c.notes())
	}
	if err := a.WithWatch.Create(t.Context(), hometest.Node("node-1", "a")); err != nil {
		t.Fatal(err)
	}
	c.works()
	if err := a.Get(t.Context(), client.ObjectKeyFromObject(next), next); !apierrors.IsNotFound(err) {
		t.Errorf("the pod that finds no node is not ended: %v", err)
	}
	if err := a.WithWatch.Create(t.Context(), asking("web-0", "blue", ownedBySet, retained, func(p *corev1.Pod) {
		p.UID = "third"
	})); err != nil {
		t.Fatal(err)
	}
	c.works()
	third, has := a.pod(t, "web-0")
	if len(has) != 1 || has[0].Prefix.Addr().String() != "10.6.168.101" || home.KeptFrom(third, "node-1") {
		t.Errorf("it has %v and requires %+v: %q", has, third.Spec.Affinity, c.notes())
	}
	third.Spec.NodeName = "node-1"
	if err := a.Update(t.Context(), third); err != nil {
		t.Fatal(err)
	}
	c.works()
	if is, _ := a.pod(t, "web-0"); is.UID != third.UID {
		t.Error("a pod that has a node is ended")
	}
}

// What was listed is older than what happens meanwhile: that a pod got a node is not forgotten, nor that it is gone.
func TestAListOfPodsUndoesNoEvent(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"),
		asking("web-1", "blue"))
	c := control(t, a)
	c.works()
	events := c.follower.podEvents(c.t.Context(), c.session)
	a.listed = func() {
		a.listed = nil
		events.OnUpdate(nil, cluster.PodOf(bound(t, a, "web-0", "node-1")))
		pod, _ := a.pod(t, "web-1")
		must.Do(t, a.WithWatch.Delete(t.Context(), pod))
		events.OnDelete(cluster.PodOf(pod))
	}
	if err := c.follower.listPods(t.Context(), c.session); err != nil {
		t.Fatal(err)
	}
	if is := c.session.book.Pod("uid-web-0"); is == nil || is.Node != "node-1" {
		t.Errorf("the node of web-0 is forgotten: %+v", is)
	}
	if is := c.session.book.Pod("uid-web-1"); is != nil {
		t.Errorf("web-1 is back: %+v", is)
	}
}

// The label is anybody's to take off. The watch then says that the pod is deleted.
func TestAPodThatLosesItsLabelHasNotEnded(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
	c := control(t, a)
	c.works()
	pod := bound(t, a, "web-0", "node-1")
	c.looks()
	pod.Labels = nil
	must.Do(t, a.Update(t.Context(), pod))
	events := c.follower.podEvents(t.Context(), c.session)
	events.OnDelete(cluster.PodOf(pod))
	if is := c.session.book.Pod(pod.UID); is == nil || is.Node != "node-1" {
		t.Errorf("it is taken for ended: %+v", is)
	}
	if pod, _ = a.pod(t, "web-0"); !labelled(pod) {
		t.Error("its end will not be seen")
	}
	events.OnDelete(cluster.PodOf(pod)) // what the watch said before it had the label again
	must.Do(t, a.WithWatch.Delete(t.Context(), pod))
	if is := c.session.book.Pod(pod.UID); is == nil {
		t.Error("it is taken for ended although it has the label")
	}
	events.OnDelete(cluster.PodOf(pod))
	if is := c.session.book.Pod(pod.UID); is != nil {
		t.Errorf("its end is not seen: %+v", is)
	}
}

// Of the pods that run already, the caches have none: they are found by their annotations, once.
func TestAPodFromBeforeThatAsksForAddressesIsFoundAndLabelled(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"))
	c := control(t, a)
	asks := asking("web-0", "blue", hometest.Ungated, func(p *corev1.Pod) { p.Spec.NodeName = "node-1" })
	foreign := asking("other", "", hometest.Ungated, func(p *corev1.Pod) { p.Annotations = nil })
	must.Do(t, a.WithWatch.Create(t.Context(), asks))
	must.Do(t, a.WithWatch.Create(t.Context(), foreign))
	c.follower.cached = newAPI(t)
	must.Do(t, c.follower.listPods(t.Context(), c.session))
	if is := c.session.book.Pod(asks.UID); is == nil || is.Node != "node-1" {
		t.Errorf("not found: %+v", is)
	}
	if pod, _ := a.pod(t, "web-0"); !labelled(pod) {
		t.Error("not labelled")
	}
	if pod, _ := a.pod(t, "other"); labelled(pod) || c.session.book.Pod(foreign.UID) != nil {
		t.Error("a foreign pod is followed")
	}
}

// While its watches are behind, an API server that was away is not asked over and over.
func TestWhatIsDecidedOnOldNewsIsTriedEverLater(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
	c := control(t, a)
	c.works()
	pod, _ := a.pod(t, "web-0")
	if err := a.Delete(t.Context(), pod); err != nil { // it never had a node
		t.Fatal(err)
	}
	c.looks()
	refused := 0
	a.before = func(what string) error {
		if !strings.HasPrefix(what, "delete PodIP ") || refused == 10 {
			return nil
		}
		refused++
		return apierrors.NewConflict(schema.GroupResource{Resource: "podips"}, "x", errors.New("changed"))
	}
	k := pool.KeyOfAddress(netip.MustParseAddr("10.6.168.101"))
	last := time.Duration(0)
	for range 10 {
		result, err := c.Reconcile(t.Context(), k)
		if err != nil || result.RequeueAfter <= last && result.RequeueAfter != longestLag {
			t.Fatalf("after %s again in %s: %v", last, result.RequeueAfter, err)
		}
		last = result.RequeueAfter
	}
	if last != longestLag || refused != 10 {
		t.Errorf("again in %s after %d tries", last, refused)
	}
	c.works()
	if left := a.ips(t); len(left) != 0 || c.lag.NumRequeues(k) != 0 {
		t.Errorf("it is there: %v, or the next pause is no short one", left)
	}
}

// A list after a watch that was cut shows the next pod of the name only: to the cache, the one before has changed.
func TestAPodThatWasReplacedUnseenHasEnded(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"),
		asking("web-0", "blue", hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")))
	c := control(t, a)
	c.works()
	pod := bound(t, a, "web-0", "node-1")
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(pod.UID), "node-1")
	c.looks()
	next := pod.DeepCopy()
	next.UID, next.Spec.NodeName, next.ResourceVersion = "next", "", "900000"
	delete(next.Annotations, stayputv1alpha1.AnnotationAddresses)
	c.follower.podEvents(c.t.Context(), c.session).OnUpdate(cluster.PodOf(pod), cluster.PodOf(next))
	if is := c.session.book.Pod(pod.UID); is != nil {
		t.Errorf("it still is one of the cluster's: %+v", is)
	}
	if is := c.session.book.Pod("next"); is == nil {
		t.Error("the next one is not known")
	}
	p := c.session.book.PodIP(netip.MustParseAddr("10.6.168.101"))
	if f := c.session.book.Fence(p, a.now); f.Verdict != pool.Wait {
		t.Errorf("%+v", f)
	}
}

func TestAnAddressThatNobodyNeedsIsFreedWhenItExpires(t *testing.T) {
	forGood := func(retain string) map[string]string {
		return map[string]string{stayputv1alpha1.AnnotationRetainIP: retain,
			stayputv1alpha1.AnnotationWhenScaled: "Retain", stayputv1alpha1.AnnotationWhenDeleted: "Retain"}
	}
	for name, c := range map[string]struct {
		asks    map[string]string
		longest time.Duration
		says    bool
	}{
		"as it asks":                        {asks: forGood("1h")},
		"as it asks, which is less":         {asks: forGood("1h"), longest: 2 * time.Hour},
		"by the longest retention":          {asks: forGood("720h"), longest: time.Hour, says: true},
		"by the longest retention, owned":   {asks: forGood("while-owned"), longest: time.Hour},
		"by the longest retention, unasked": {longest: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			pod := asking("web-0", "blue")
			maps.Copy(pod.Annotations, c.asks)
			yes, one := true, int32(1)
			pod.OwnerReferences = []metav1.OwnerReference{
				{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "web", Controller: &yes},
			}
			set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "web"},
				Spec: appsv1.StatefulSetSpec{Replicas: &one}}
			isFreedAfterAnHour(t, pod, set, c.longest, c.says)
		})
	}
}

func isFreedAfterAnHour(t *testing.T, asks *corev1.Pod, owner client.Object, longest time.Duration, says bool) {
	t.Helper()
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asks, owner)
	c := control(t, a)
	c.longest = longest
	c.workloads.LookUp(t.Context())
	c.begins()
	c.works()
	notes := strings.Join(c.notes(), "\n")
	if strings.Contains(notes, home.ReasonRetentionClamped) != says {
		t.Errorf("says %s", notes)
	}
	pod := bound(t, a, "web-0", "node-1")
	if err := a.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(pod.UID), "node-1")
	ends := a.now.Add(time.Hour)
	if c.works(); a.ips(t)["10.6.168.101"].Status.Expires != nil {
		t.Fatal("it is written at once, though a successor may be about to come")
	}
	a.now = a.now.Add(ordinaryWait)
	c.works()
	if ip := a.ips(t)["10.6.168.101"]; ip.Status.Expires == nil || !ip.Status.Expires.Time.Equal(ends) {
		t.Fatalf("%+v", ip.Status)
	}
	a.now = ends.Add(-time.Second)
	c.open(c.session)
	if c.works(); len(a.ips(t)) != 1 {
		t.Fatal("it is freed too early")
	}
	a.now = a.now.Add(time.Second)
	a.taken()
	c.open(c.session)
	c.works()
	if left := a.ips(t); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
	if is := a.taken(); len(is) < 2 || is[0] != "delete PodIP 10.6.168.101" || is[1] != "update PodIP 10.6.168.101" {
		t.Errorf("writes %q", is)
	}
}

func TestAnAnnotationThatCannotBeReadFreesNothing(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), asking("web-0", "blue"))
	c := control(t, a)
	c.works()
	pod := bound(t, a, "web-0", "node-1")
	for _, text := range []string{`[{"interface":"eth0","address":"10.6.168.105/16"},{"address":7}]`, `x`,
		`[{"interface":"eth0"}]`} {
		pod.Annotations[stayputv1alpha1.AnnotationAddresses] = text
		if err := a.Update(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		c.works()
		if ip, ok := a.ips(t)["10.6.168.101"]; !ok || ip.DeletionTimestamp != nil {
			t.Fatalf("%s: its address is freed: %+v", text, a.ips(t))
		}
		c.begins() // another controller that never saw it otherwise
	}
}

// What was written while nothing guarded the annotation says nothing, whether or not the pod asks for a pool: no
// address is anybody's by it, or is kept from others.
func TestAnAnnotationThatTheControllerHasNotWrittenSaysNothing(t *testing.T) {
	victim := asking("web-0", "blue")
	for name, planted := range map[string]*corev1.Pod{
		"of a pod that asks for nothing": hometest.Pod(), "of one that asks": asking("thief", "blue"),
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.102"), victim.DeepCopy())
			c := control(t, a)
			c.works()
			thief := planted.DeepCopy()
			thief.Name, thief.UID, thief.Spec.NodeName, thief.Spec.SchedulingGates = "thief", "uid-thief", "node-1", nil
			if thief.Annotations == nil {
				thief.Annotations = map[string]string{}
			}
			entry := `{"interface":"eth0","pool":"blue","mode":"L2","address":"10.6.168.%d/16"}`
			thief.Annotations[stayputv1alpha1.AnnotationAddresses] = fmt.Sprintf("["+entry+","+entry+"]", 101, 102)
			if err := a.WithWatch.Create(t.Context(), thief); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				c.looks()
				c.works()
				ips := a.ips(t)
				if ip := ips["10.6.168.101"]; len(ips) != 1 || ip.Spec.PodUID != "uid-web-0" {
					t.Fatalf("the addresses are %+v", ips)
				}
				c.begins() // another controller
			}
			if err := a.WithWatch.Create(t.Context(), asking("web-1", "blue")); err != nil {
				t.Fatal(err)
			}
			c.looks()
			c.works()
			if _, has := a.pod(t, "web-1"); len(has) != 1 || has[0].Prefix.Addr().String() != "10.6.168.102" {
				t.Errorf("the next pod has %v", has)
			}
		})
	}
}

// claimsOnly has web-0 placed, which must end with its claim: the pod stays gated.
func (c *controlling) claimsOnly() {
	c.t.Helper()
	if _, err := c.place("web-0"); err != nil {
		c.t.Fatal(err)
	}
	if !slices.Contains(c.api.writes, "create PodIP 10.6.168.101") {
		c.t.Fatalf("it is not begun: %q", c.api.writes)
	}
	if pod, _ := c.api.pod(c.t, "web-0"); !home.Gated(pod) {
		c.t.Error("the plan is carried out to its end")
	}
}

func TestAPlanThatTookTooLongIsDropped(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"), asking("web-0", "blue"))
	c := control(t, a)
	c.looks()
	a.before = func(write string) error {
		if strings.HasPrefix(write, "create PodIP") {
			a.now = a.now.Add(planGood + time.Second)
		}
		return nil
	}
	c.claimsOnly()
	a.before = nil
	c.works()
	a.consistent(t)
}

// The plan is from before the mark was set, and so may the backup be: what the controller has seen since tells.
func TestAPodIsNotToldOfAnAddressThatARestoreTookBack(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"), asking("web-0", "blue"))
	c := control(t, a)
	c.looks()
	a.before = func(write string) error {
		if !strings.HasPrefix(write, "create PodIP") {
			return nil
		}
		a.before = nil
		var backup, is stayputv1alpha1.PodIPAudit
		name := types.NamespacedName{Name: stayputv1alpha1.PodIPAuditName}
		must.Do(t, a.Get(t.Context(), name, &backup))
		a.now = a.now.Add(pool.MarkEvery)
		must.Do(t, c.follower.mark(t.Context(), c.session))
		a.now = a.now.Add(-pool.MarkEvery)
		must.Do(t, a.Get(t.Context(), name, &is))
		if is.Spec.Marks == backup.Spec.Marks {
			t.Fatal("no mark is set: this shows nothing")
		}
		is.Spec = backup.Spec
		return a.Update(t.Context(), &is)
	}
	c.claimsOnly()
}

func TestAfterARestoreNothingIsGivenUntilAllNodesHaveAnswered(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"))
	c := control(t, a)
	c.works()
	var audit stayputv1alpha1.PodIPAudit
	read := func() {
		t.Helper()
		if err := a.Get(t.Context(), types.NamespacedName{Name: stayputv1alpha1.PodIPAuditName}, &audit); err != nil {
			t.Fatal(err)
		}
	}
	read()
	audit.Spec.Mark = metav1.NewMicroTime(a.now.Add(-time.Minute)) // as in a backup
	if err := a.Update(t.Context(), &audit); err != nil {
		t.Fatal(err)
	}
	if err := a.WithWatch.Create(t.Context(), asking("web-0", "blue")); err != nil {
		t.Fatal(err)
	}
	c.looks()
	if err := c.follower.mark(t.Context(), c.session); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.session.stale:
	default:
		t.Fatal("the restore is not noticed")
	}
	if c.works(); len(a.ips(t)) > 0 {
		t.Fatal("an address is given by what was known before")
	}
	a.now = a.now.Add(ordinaryWait)
	c.begins()
	if c.works(); len(a.ips(t)) > 0 {
		t.Fatal("an address is given before the node has answered")
	}
	if notes := c.notes(); len(notes) == 0 || !strings.Contains(notes[0], "node node-1 has not answered yet") {
		t.Errorf("said %q", notes)
	}
	read()
	report := &stayputv1alpha1.PodIPReport{ObjectMeta: metav1.ObjectMeta{Name: "node-1"},
		Spec: stayputv1alpha1.PodIPReportSpec{Epoch: *audit.Spec.Epoch, Held: []stayputv1alpha1.PodIPHeld{{
			Address: "10.6.168.101", PodUID: "forgotten", Namespace: "default", PodName: "db-0", Pool: "blue",
			Mode: stayputv1alpha1.ModeL2, Interface: "eth0"}}}}
	if err := a.WithWatch.Create(t.Context(), report); err != nil {
		t.Fatal(err)
	}
	c.works()
	if ip := a.ips(t)["10.6.168.101"]; ip.Spec.PodUID != "forgotten" {
		t.Errorf("what the node has is not known: %+v", a.ips(t))
	}
	select {
	case <-c.session.stale:
	default:
		t.Fatal("the recall does not end")
	}
	c.begins()
	c.works()
	if _, has := a.pod(t, "web-0"); len(has) != 1 || has[0].Prefix.Addr().String() == "10.6.168.101" {
		t.Errorf("it has %v: %q", has, c.notes())
	}
}

// Where agents run is what their DaemonSet says, and the operator by a label.
func TestNodesOnWhichNoAgentIsToRunAreNotWaitedFor(t *testing.T) {
	linux := hometest.Node("node-1", "a", func(n *corev1.Node) { n.Labels["pools"] = "yes" })
	agents := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "stayput-system", Name: agentDaemonSet}}
	agents.Spec.Template.Spec.NodeSelector = map[string]string{"pools": "yes"}
	a := newAPI(t, agents, linux, hometest.Node("node-2", "a"), aPool("blue", "10.6.168.101-10.6.168.110"))
	c := control(t, a)
	c.follower.announcer.installation = types.NamespacedName{Namespace: "stayput-system", Name: "stayput-installation"}
	owing := func() (names []string) {
		t.Helper()
		c.looks()
		c.mu.Lock()
		defer c.mu.Unlock()
		audit := c.session.book.Audit()
		audit.Epoch, audit.Recalling = 7000, true
		c.session.book.SetAudit(audit)
		return c.session.book.Unanswered()
	}
	expect := func(when string, want ...string) {
		t.Helper()
		c.follower.findAgents(t.Context(), c.session)
		if got := owing(); !slices.Equal(got, want) {
			t.Errorf("%s: %v owe a report, want %v", when, got, want)
		}
	}
	if got := owing(); len(got) != 2 {
		t.Errorf("before it is known: %v owe a report", got)
	}
	expect("the DaemonSet selects node-1", "node-1")
	agents.Spec.Template.Spec.NodeSelector = nil
	if err := a.Update(t.Context(), agents); err != nil {
		t.Fatal(err)
	}
	expect("it selects all", "node-1", "node-2")
	labelled := hometest.Node("node-2", "a", func(n *corev1.Node) { n.Labels[pool.AgentLabel] = pool.NoAgent })
	if err := a.Update(t.Context(), labelled); err != nil {
		t.Fatal(err)
	}
	expect("an operator says that none is to run on node-2", "node-1")
	if err := a.WithWatch.Create(t.Context(), &stayputv1alpha1.PodIPReport{ObjectMeta: metav1.ObjectMeta{Name: "node-2"},
		Spec: stayputv1alpha1.PodIPReportSpec{Epoch: stayputv1alpha1.EpochTime(1000)}}); err != nil {
		t.Fatal(err)
	}
	expect("one ran there", "node-1", "node-2")
}

// A node does not know of what workload a pod is.
func TestWhatOnlyANodeKnewIsFreedByTheNameOfItsPod(t *testing.T) {
	set := func(name string, replicas int32) client.Object {
		return &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: appsv1.StatefulSetSpec{Replicas: &replicas}}
	}
	orphan := asking("db-1", "blue")
	for name, c := range map[string]struct {
		pod   string
		there []client.Object
		freed bool
	}{
		"there is no such workload":                 {"db-0", []client.Object{set("web", 3)}, true},
		"it wants the pod":                          {"db-0", []client.Object{set("db", 1)}, false},
		"it is smaller":                             {"db-1", []client.Object{set("db", 1)}, true},
		"there is none, but a pod that it has left": {"db-0", []client.Object{orphan}, false},
		"the name tells of none":                    {"db", nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t, append(c.there, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"))...)
			k := control(t, a)
			k.workloads.LookUp(t.Context())
			ip := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.105"},
				Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeL2,
					Namespace: "default", PodName: c.pod, PodUID: "forgotten", Interface: "eth0",
					Retention:  stayputv1alpha1.RetentionWhileOwned,
					WhenScaled: stayputv1alpha1.PolicyRelease, WhenDeleted: stayputv1alpha1.PolicyRelease}}
			if err := a.WithWatch.Create(t.Context(), ip); err != nil {
				t.Fatal(err)
			}
			a.agent(t, ip.Name, stayputv1alpha1.PodIPRetained, "forgotten", "node-1")
			k.works()
			if _, kept := a.ips(t)[ip.Name]; kept == c.freed {
				t.Errorf("kept %t: %+v, %q", kept, a.ips(t), k.notes())
			}
		})
	}
}

func TestPoolsSayWhatIsWrongWithThem(t *testing.T) {
	node := hometest.Node("node-1", "a", func(n *corev1.Node) { n.Spec.PodCIDRs = []string{"10.6.100.0/24"} })
	a := newAPI(t, node, aPool("blue", "10.6.168.101-10.6.168.110"), aPool("green", "10.6.168.110-10.6.168.120"),
		aPool("nodes", "10.6.100.7"), aPool("wrong", "10.7.0.1"),
		aPool("off", "10.6.1.1", func(o *stayputv1alpha1.PodIPPool) {
			o.Spec.Allocation = stayputv1alpha1.AllocationDisabled
		}))
	c := control(t, a)
	c.works()
	var list stayputv1alpha1.PodIPPoolList
	if err := a.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for _, o := range list.Items {
		for _, is := range o.Status.Conditions {
			said[o.Name+" "+is.Type] = string(is.Status) + " " + is.Message
		}
	}
	for what, want := range map[string]string{
		"blue Ready": "True ", "blue Overlaps": "True it shares addresses with pool green", "blue Exhausted": "False ",
		"green Overlaps": "True it shares addresses with pool blue",
		"nodes Overlaps": "True it shares addresses with pods of node node-1", "off Overlaps": "False ",
		"wrong Ready": `False spec.addresses[0]: "10.7.0.1" is not valid: expected addresses in spec.subnet, 10.6.0.0/16`,
		"off Ready":   "False spec.allocation: Disabled, so there are no new allocations",
	} {
		if said[what] != want {
			t.Errorf("%s: %q, want %q", what, said[what], want)
		}
	}
}

func TestAPodIsToldThatItsAddressIsRouted(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), asking("web-0", "far"), aPool("far", "10.6.168.101",
		func(o *stayputv1alpha1.PodIPPool) { o.Spec.Mode, o.Spec.Gateway = stayputv1alpha1.ModeRouted, "" }))
	c := control(t, a)
	c.works()
	pod, has := a.pod(t, "web-0")
	if len(has) != 1 || home.Gated(pod) || has[0].Mode != pool.Routed || has[0].Gateway.IsValid() {
		t.Errorf("it has %v, gated %t: %q", has, home.Gated(pod), c.notes())
	}
	if ip := a.ips(t)["10.6.168.101"]; ip.Spec.Mode != stayputv1alpha1.ModeRouted {
		t.Errorf("its PodIP is %+v", ip.Spec)
	}
}

func TestARoutedPodIsScheduledToNodesThatCanRoute(t *testing.T) {
	const why = "10-lan.conflist: type: expected bridge or ptp"
	cannot := func(node, why string) *stayputv1alpha1.PodIPReport {
		return &stayputv1alpha1.PodIPReport{ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec: stayputv1alpha1.PodIPReportSpec{Epoch: stayputv1alpha1.EpochTime(1000),
				CannotServe: map[string]stayputv1alpha1.PodIPReportCause{
					"Routed": stayputv1alpha1.PodIPReportCause(why)}}}
	}
	other := cannot("node-2", why)
	a := newAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "a"), asking("web-0", "far"),
		cannot("node-1", why), other, aPool("far", "10.6.168.101-10.6.168.110",
			func(o *stayputv1alpha1.PodIPPool) { o.Spec.Mode, o.Spec.Gateway = stayputv1alpha1.ModeRouted, "" }))
	c := control(t, a)
	c.works()
	pod, has := a.pod(t, "web-0")
	if has != nil || !home.Gated(pod) || len(a.ips(t)) > 0 {
		t.Errorf("no node can, and it has %v, gated %t", has, home.Gated(pod))
	}
	if notes := c.notes(); !slices.ContainsFunc(notes, func(n string) bool {
		return strings.Contains(n, "no node, such as node-1, can serve pool far (mode Routed): "+why)
	}) {
		t.Errorf("said is %q", notes)
	}
	if err := a.Get(t.Context(), types.NamespacedName{Name: "node-2"}, other); err != nil {
		t.Fatal(err)
	}
	other.Spec.CannotServe = nil
	if err := a.Update(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	c.line.later = nil // the report alone wakes the pod
	c.works()
	pod, has = a.pod(t, "web-0")
	if len(has) != 1 || home.Gated(pod) {
		t.Fatalf("it has %v, gated %t: %q", has, home.Gated(pod), c.notes())
	}
	terms := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	want := corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{
		{Key: "metadata.name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"node-1"}}}}
	if len(terms) != 1 || !reflect.DeepEqual(terms[0], want) {
		t.Errorf("its affinity is %+v", terms)
	}
}

func TestAPodThatCouldNotBeGatedIsToldItsAddressOnceItHasANode(t *testing.T) {
	late := asking("late", "blue", hometest.Ungated)
	mirror := asking("mirror", "blue", hometest.Ungated, func(p *corev1.Pod) {
		yes := true
		p.Spec.NodeName = "node-1"
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node-1", Controller: &yes}}
	})
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), late, mirror)
	c := control(t, a)
	c.works()
	if _, has := a.pod(t, "late"); has != nil {
		t.Errorf("it has %v before it has a node", has)
	}
	bound(t, a, "late", "node-1")
	c.works()
	if _, has := a.pod(t, "late"); len(has) != 1 {
		t.Errorf("it has %v: %q", has, c.notes())
	}
	if _, has := a.pod(t, "mirror"); has != nil || !slices.ContainsFunc(c.notes(), func(n string) bool {
		return strings.Contains(n, "static pods cannot have addresses of pools")
	}) {
		t.Errorf("a static pod has %v", has)
	}
}

func TestAPoolGivesNothingToAPodThatIsOnANodeOutsideIt(t *testing.T) {
	inB := func(o *stayputv1alpha1.PodIPPool) {
		o.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelTopologyZone: "b"}}
	}
	on := func(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }
	a := newAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "b"),
		aPool("blue", "10.6.168.101-10.6.168.110", inB), asking("outside", "blue", hometest.Ungated, on("node-1")),
		asking("inside", "blue", hometest.Ungated, on("node-2")))
	c := control(t, a)
	c.works()
	if _, has := a.pod(t, "inside"); len(has) != 1 {
		t.Errorf("the pod on node-2 has %v", has)
	}
	_, has := a.pod(t, "outside")
	notes := c.notes()
	if has != nil || len(a.ips(t)) != 1 || !slices.ContainsFunc(notes, func(n string) bool {
		return strings.Contains(n, "pool blue is not available on node node-1, where the pod runs")
	}) {
		t.Errorf("the pod on node-1 has %v of %v: %q", has, a.ips(t), notes)
	}
	var node corev1.Node
	if err := a.Get(t.Context(), types.NamespacedName{Name: "node-1"}, &node); err != nil {
		t.Fatal(err)
	}
	node.Labels[corev1.LabelTopologyZone] = "b"
	if err := a.Update(t.Context(), &node); err != nil {
		t.Fatal(err)
	}
	c.wakesWaiting()
	c.works()
	if _, has := a.pod(t, "outside"); len(has) != 1 {
		t.Errorf("the pod on node-1 has %v once that is in the pool", has)
	}
}

func TestTheDefaultOfANamespaceIsForItsGatedPods(t *testing.T) {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
		Annotations: map[string]string{stayputv1alpha1.AnnotationPools: "blue"}}}
	silent := func(p *corev1.Pod) { p.Annotations = nil }
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), space,
		asking("web-0", "", silent), asking("none", ""), asking("ran", "", silent, hometest.RanOn("node-1")),
		asking("wrong", "blue@"))
	c := control(t, a)
	c.works()
	for name, want := range map[string]int{"web-0": 1, "none": 0, "ran": 0, "wrong": 0} {
		pod, has := a.pod(t, name)
		owns, err := c.claimer.asks(t.Context(), pod)
		if len(has) != want || err != nil || owns != (name == "web-0" || name == "wrong" || name == "ran") {
			t.Errorf("%s has %v, owned %t", name, has, owns)
		}
	}
	if notes := c.notes(); !slices.ContainsFunc(notes, func(n string) bool {
		return strings.Contains(n, "annotation stayput.io/pools") && strings.Contains(n, "expected names of pools")
	}) {
		t.Errorf("said %q", notes)
	}
}

func TestADeletedPoolGoesWithItsLastAddress(t *testing.T) {
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101"), asking("web-0", "blue", ownedBySet))
	c := control(t, a)
	c.works()
	if err := a.Delete(t.Context(), aPool("blue", "")); err != nil {
		t.Fatal(err)
	}
	c.works()
	var blue stayputv1alpha1.PodIPPool
	if err := a.Get(t.Context(), types.NamespacedName{Name: "blue"}, &blue); err != nil {
		t.Fatalf("it is gone before its addresses: %v", err)
	}
	pod, _ := a.pod(t, "web-0")
	if err := a.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	c.works()
	if err := a.Get(t.Context(), types.NamespacedName{Name: "blue"}, &blue); !apierrors.IsNotFound(err) {
		t.Errorf("%v, with %v: %+v", err, a.ips(t), blue)
	}
}

// There may be a hundred thousand of them.
func TestWhatManyPodIPsSayIsKeptOnce(t *testing.T) {
	var once cluster.Interner
	stripped := func() pool.PodIP {
		o := &stayputv1alpha1.PodIP{
			ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.101", ManagedFields: []metav1.ManagedFieldsEntry{{}}},
			Spec: stayputv1alpha1.PodIPSpec{Pool: strings.Clone("blue"), PodUID: strings.Clone("uid"),
				Workload: &stayputv1alpha1.WorkloadReference{UID: strings.Clone("of the set")}},
			Status: stayputv1alpha1.PodIPStatus{PodUID: strings.Clone("uid"), NodeName: strings.Clone("node-1")},
		}
		want, err := pool.PodIPOf(o, 0)
		if err != nil {
			t.Fatal(err)
		}
		stripIP(o, &once)
		is, err := pool.PodIPOf(o, 0)
		if err != nil || !reflect.DeepEqual(is, want) || o.ManagedFields != nil {
			t.Errorf("%+v, want %+v: %v", is, want, err)
		}
		return is
	}
	a, b := stripped(), stripped()
	for _, pair := range [][2]string{{a.Pool, b.Pool}, {a.Workload.UID, b.Workload.UID}, {a.Node, b.Node},
		{string(a.PodUID), string(a.StatusUID)}} {
		if unsafe.StringData(pair[0]) != unsafe.StringData(pair[1]) {
			t.Errorf("%q is kept twice", pair[0])
		}
	}
}

// A pod that no node has room for gives the address that it never used to a pod that waits, one of them at a time.
func TestAPodWithoutRoomDoesNotKeepAnAddressThatOthersWaitFor(t *testing.T) {
	retained := hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")
	refused := func(a *api, name string) {
		t.Helper()
		pod, has := a.pod(t, name)
		if len(has) != 1 {
			t.Fatalf("%s has %v", name, has)
		}
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
			Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available: 1 Insufficient cpu."}}
		if err := a.Status().Update(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	there := func(a *api, name string) bool {
		t.Helper()
		err := a.Get(t.Context(), types.NamespacedName{Namespace: "default", Name: name}, &corev1.Pod{})
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		return err == nil
	}
	passes := func(a *api, c *controlling, d time.Duration) {
		t.Helper()
		for end := a.now.Add(d); a.now.Before(end); {
			a.now = a.now.Add(min(end.Sub(a.now), pool.MarkEvery))
			if err := c.follower.mark(t.Context(), c.session); err != nil {
				t.Fatal(err)
			}
		}
		c.works()
	}
	for _, test := range []struct {
		name       string
		first      []func(*corev1.Pod)
		used       bool // by the pod before
		alone      bool // no other pod waits
		takes      bool
		takesAfter time.Duration
	}{
		{name: "without a retention", first: []func(*corev1.Pod){ownedBySet}, takes: true, takesAfter: refusedMost},
		{name: "with one", first: []func(*corev1.Pod){ownedBySet, retained}, takes: true, takesAfter: refusedMost},
		{name: "not long enough", first: []func(*corev1.Pod){ownedBySet}, takesAfter: refusedMost - time.Second},
		{name: "with one, and used before", first: []func(*corev1.Pod){ownedBySet, retained}, used: true,
			takesAfter: refusedMost},
		{name: "while no pod waits", first: []func(*corev1.Pod){ownedBySet}, alone: true, takesAfter: refusedMost},
		{name: "without a controller", takesAfter: refusedMost},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.101"),
				asking("web-0", "blue", test.first...))
			c := control(t, a)
			c.works()
			if test.used {
				before := bound(t, a, "web-0", "node-1")
				a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(before.UID), "node-1")
				c.works()
				if err := a.Delete(t.Context(), before); err != nil {
					t.Fatal(err)
				}
				a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(before.UID), "node-1")
				if err := a.WithWatch.Create(t.Context(), asking("web-0", "blue", append(test.first,
					func(p *corev1.Pod) { p.UID = "next" })...)); err != nil {
					t.Fatal(err)
				}
				c.works()
			}
			refused(a, "web-0")
			if !test.alone {
				if err := a.WithWatch.Create(t.Context(), asking("other-0", "blue", made(time.Second))); err != nil {
					t.Fatal(err)
				}
			}
			c.works()
			if !there(a, "web-0") {
				t.Fatal("it is ended at once")
			}
			passes(a, c, test.takesAfter)
			if there(a, "web-0") == test.takes {
				t.Errorf("it is ended: %t; %q", !test.takes, c.notes())
			}
			if test.alone {
				return
			}
			if _, has := a.pod(t, "other-0"); (len(has) == 1) != test.takes {
				t.Errorf("the pod that waited has %v: %q", has, c.notes())
			}
		})
	}

	// Of many that have no room, as many give theirs as others wait.
	a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.104"),
		asking("web-0", "blue", ownedBySet), asking("web-1", "blue", ownedBySet),
		asking("web-2", "blue", ownedBySet, retained),
		asking("web-3", "blue", ownedBySet, retained))
	c := control(t, a)
	c.works()
	for i := range 4 {
		refused(a, fmt.Sprintf("web-%d", i))
	}
	for _, name := range []string{"other-0", "other-1"} {
		if err := a.WithWatch.Create(t.Context(), asking(name, "blue", made(time.Second))); err != nil {
			t.Fatal(err)
		}
	}
	c.works()
	for range 8 {
		passes(a, c, refusedMost)
	}
	left := 0
	for i := range 4 {
		if there(a, fmt.Sprintf("web-%d", i)) {
			left++
		}
	}
	_, zero := a.pod(t, "other-0")
	_, one := a.pod(t, "other-1")
	if left != 2 || len(zero) != 1 || len(one) != 1 {
		t.Errorf("%d are left, and those that waited have %v and %v: %q", left, zero, one, c.notes())
	}
}

// web names a second pool as a reserve. No pod has an address of it, so that it is gone at once when it is deleted.
func TestAReserveThatCannotBeHadKeepsNoPodFromItsOwnAddress(t *testing.T) {
	hour := hometest.Annotation(stayputv1alpha1.AnnotationRetainIP, "1h")
	for name, breaks := range map[string]func(*testing.T, *api, *stayputv1alpha1.PodIPPool){
		"it is deleted": func(t *testing.T, a *api, green *stayputv1alpha1.PodIPPool) {
			must.Do(t, a.WithWatch.Delete(t.Context(), green))
		},
		"it is invalid": func(t *testing.T, a *api, green *stayputv1alpha1.PodIPPool) {
			must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(green), green))
			green.Spec.Subnet = "10.6.0.0"
			green.Generation++
			must.Do(t, a.Update(t.Context(), green))
		},
	} {
		t.Run(name, func(t *testing.T) {
			green := aPool("green", "10.6.169.101-10.6.169.110")
			a := newAPI(t, hometest.Node("node-1", "a"), aPool("blue", "10.6.168.101-10.6.168.110"), green,
				asking("web-0", "blue,green", hour))
			c := control(t, a)
			c.works()
			pod := bound(t, a, "web-0", "node-1")
			a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPBound, string(pod.UID), "node-1")
			c.works()
			breaks(t, a, green)
			must.Do(t, a.WithWatch.Delete(t.Context(), pod))
			c.looks()
			c.works()
			a.agent(t, "10.6.168.101", stayputv1alpha1.PodIPRetained, string(pod.UID), "node-1")
			c.works()
			for _, next := range []*corev1.Pod{asking("web-0", "blue,green", hour), asking("web-1", "blue,green", hour)} {
				next.UID = types.UID("next-" + next.Name)
				must.Do(t, a.WithWatch.Create(t.Context(), next))
			}
			c.looks()
			c.works()
			if _, has := a.pod(t, "web-0"); len(has) != 1 || has[0].Prefix.Addr().String() != "10.6.168.101" {
				t.Errorf("the successor has %v: %q", has, c.notes())
			}
			if _, has := a.pod(t, "web-1"); has != nil { // which families the reserve has is not known
				t.Errorf("a new pod has %v", has)
			}
		})
	}
}

// Spiderpool's docs/usage/network-topology.md: one DaemonSet over two zones, each with a pool of its own.
func TestAPodThatHasANodeGetsAnAddressOfAPoolForThatNode(t *testing.T) {
	zone := func(zone string) func(*stayputv1alpha1.PodIPPool) {
		return func(o *stayputv1alpha1.PodIPPool) {
			o.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelTopologyZone: zone}}
		}
	}
	onNode := func(i int) *corev1.Pod {
		name := fmt.Sprintf("ds-%d", i)
		return asking(name, "zone-a,zone-b", hometest.RanOn(fmt.Sprintf("node-%d", i)), starting, made(-time.Minute),
			func(p *corev1.Pod) { p.UID = types.UID(name) })
	}
	a := newAPI(t, hometest.Node("node-1", "a"), hometest.Node("node-2", "b"), hometest.Node("node-3", "c"),
		aPool("zone-a", "10.6.168.101-10.6.168.110", zone("a")), aPool("zone-b", "10.6.169.101-10.6.169.110", zone("b")),
		onNode(1), onNode(2), onNode(3))
	c := control(t, a)
	c.works()
	for name, pool := range map[string]string{"ds-1": "zone-a", "ds-2": "zone-b"} {
		if _, has := a.pod(t, name); len(has) != 1 || has[0].Pool != pool {
			t.Errorf("%s has %v, want an address of %s", name, has, pool)
		}
	}
	if _, has := a.pod(t, "ds-3"); has != nil {
		t.Errorf("ds-3, for whose node there is no pool, has %v", has)
	}
	if notes := strings.Join(c.notes(), " "); !strings.Contains(notes, "not available on node node-3") {
		t.Errorf("said %q", notes)
	}
}
