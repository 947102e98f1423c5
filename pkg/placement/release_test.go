package placement

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	discoveryfake "k8s.io/client-go/discovery/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// indexed registers the indexes of the controller's cache with a fake client.
type indexed struct{ *fake.ClientBuilder }

func (i indexed) IndexField(_ context.Context, o client.Object, field string, extract client.IndexerFunc) error {
	i.WithIndex(o, field, extract)
	return nil
}

// fakeAPI stands for the API server and a cache that is level with it: a loop is led through histories here that
// take outages in a cluster, see test/cluster for the real ones.
func fakeAPI(t *testing.T, objects ...client.Object) client.WithWatch {
	t.Helper()
	b := indexed{fake.NewClientBuilder().WithScheme(Scheme)}
	if err := errors.Join(indexRetainedIPs(t.Context(), b), cluster.IndexNodes(t.Context(), b)); err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		if pod, ok := o.(*corev1.Pod); ok && len(pod.ManagedFields) == 0 {
			// Without an entry of its creation, the fake notes no later ones.
			pod.ManagedFields = []metav1.ManagedFieldsEntry{{
				Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1",
				FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1("{}"),
			}}
		}
	}
	return interceptor.NewClient(b.WithReturnManagedFields().WithObjects(objects...).Build(),
		interceptor.Funcs{Get: getCached})
}

// getCached gets pods as the cache has them, too.
func getCached(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
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
}

// fakeCache is the cache of a fake client.
type fakeCache struct {
	client.Reader
	cache.Informers
}

// What the API server serves beside StatefulSets, as far as a test's releaser has found out.
type serving string

const (
	nothing   serving = "nothing"
	unknown   serving = "unknown"
	forbidden serving = "a kind that the controller may not read"
)

func testReleaser(t *testing.T, c client.WithWatch, other serving) (*releaser, *events.FakeRecorder) {
	t.Helper()
	d := &discoveryfake.FakeDiscovery{Fake: &clienttesting.Fake{}}
	if other == forbidden {
		d.Resources = []*metav1.APIResourceList{{GroupVersion: "apps.kruise.io/v1beta1",
			APIResources: []metav1.APIResource{{Name: "statefulsets", Kind: "StatefulSet"}}}}
	}
	denied := interceptor.NewClient(c,
		interceptor.Funcs{Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			return nil // an access review that allows nothing
		}})
	w := cluster.Over(fakeCache{Reader: c}, c, denied, d)
	if other != unknown {
		w.LookUp(t.Context())
	}
	said := events.NewFakeRecorder(10)
	return &releaser{client: c, cache: c, reader: c, events: said, now: time.Now, workloads: w, owners: newOwners(),
		memory: newMemory(time.Now)}, said
}

// released reconciles until nothing changes any more, and returns the object.
func released(t *testing.T, r *releaser, key types.NamespacedName) *stayputv1alpha1.RetainedIP {
	t.Helper()
	for version := ""; ; {
		if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: key}); err != nil {
			t.Fatal(err)
		}
		ip := &stayputv1alpha1.RetainedIP{}
		if err := r.client.Get(t.Context(), key, ip); err != nil {
			t.Fatal(err)
		}
		if ip.ResourceVersion == version {
			return ip
		}
		version = ip.ResourceVersion
	}
}

// byNode is the owner of what an agent writes.
var byNode = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node-1", UID: "node"}}

func owned(whenScaled string) *stayputv1alpha1.RetainedIP {
	return &stayputv1alpha1.RetainedIP{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0.node-1", UID: "ip", OwnerReferences: byNode},
		Spec: stayputv1alpha1.RetainedIPSpec{NodeName: "node-1", PodName: "web-0",
			Retention:  stayputv1alpha1.RetentionWhileOwned,
			WhenScaled: whenScaled, WhenDeleted: stayputv1alpha1.PolicyRelease},
		Status: stayputv1alpha1.RetainedIPStatus{Phase: stayputv1alpha1.PhaseRetained, IPs: []string{"192.0.2.7"}},
	}
}

func statefulSetOf(name string, replicas int32, annotations map[string]string) *appsv1.StatefulSet {
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("of-" + name)},
		Spec: appsv1.StatefulSetSpec{Replicas: &replicas,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}},
	}
}

var whileOwned = map[string]string{stayputv1alpha1.AnnotationRetainIP: stayputv1alpha1.RetentionWhileOwned}

func TestAnAddressPublishedAgainIsReleasedWithItsWorkload(t *testing.T) {
	ip, set := owned(stayputv1alpha1.PolicyRetain), statefulSetOf("web", 0, whileOwned)
	c := fakeAPI(t, ip, set)
	r, said := testReleaser(t, c, nothing)
	key := client.ObjectKeyFromObject(ip)
	if got := released(t, r, key); got.Spec.Release != "" || got.Spec.Workload == nil ||
		got.Spec.Workload.UID != "of-web" ||
		got.Spec.Workload.Kind != "StatefulSet" {
		t.Fatalf("of a workload that is scaled to zero: %+v, %+v", got.Spec, got.Spec.Workload)
	}
	if err := c.Delete(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	if got := released(t, r, key); got.Spec.Release == "" {
		t.Errorf("its workload is deleted: %+v", got.Spec)
	}
	if note := <-said.Events; !strings.Contains(note, home.ReasonReleased) || !strings.Contains(note, "192.0.2.7") ||
		!strings.Contains(note, "of StatefulSet web on node node-1: its workload is deleted") {
		t.Errorf("said %q", note)
	}
}

func TestAnAddressOfAnUnknownWorkloadStays(t *testing.T) {
	shared := owned(stayputv1alpha1.PolicyRelease)
	shared.Spec.Identity = "front"
	unnumbered := owned(stayputv1alpha1.PolicyRelease)
	unnumbered.Spec.PodName = "web"
	for name, c := range map[string]struct {
		ip    *stayputv1alpha1.RetainedIP
		set   *appsv1.StatefulSet
		other serving
	}{
		"no workload has its name": {owned(stayputv1alpha1.PolicyRelease),
			statefulSetOf("other", 0, whileOwned), nothing},
		"the workload of its name asks for nothing": {owned(stayputv1alpha1.PolicyRelease), statefulSetOf("web", 0, nil),
			nothing},
		"that of a shared identity": {owned(stayputv1alpha1.PolicyRelease), statefulSetOf("web", 0, map[string]string{
			stayputv1alpha1.AnnotationRetainIP: stayputv1alpha1.RetentionWhileOwned, stayputv1alpha1.AnnotationIdentity: "x"}),
			nothing},
		"an identity that is shared": {shared, statefulSetOf("web", 0, whileOwned), nothing},
		"a name without an ordinal":  {unnumbered, statefulSetOf("web", 0, whileOwned), nothing},
		"another kind may have one of its name": {owned(stayputv1alpha1.PolicyRelease), statefulSetOf("web", 0, whileOwned),
			unknown},
		"another kind must not be looked at": {owned(stayputv1alpha1.PolicyRelease), statefulSetOf("web", 0, whileOwned),
			forbidden},
	} {
		t.Run(name, func(t *testing.T) {
			r, said := testReleaser(t, fakeAPI(t, c.ip, c.set), c.other)
			if got := released(t, r, client.ObjectKeyFromObject(c.ip)); got.Spec.Workload != nil || got.Spec.Release != "" ||
				len(said.Events) > 0 {
				t.Errorf("it is now of %+v, released %v, and %d events", got.Spec.Workload, got.Spec.Release, len(said.Events))
			}
		})
	}
}

// asking counts the requests for single objects that pass the cache by.
type asking struct {
	client.Reader
	gets int
}

func (a *asking) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	a.gets++
	return a.Reader.Get(ctx, key, o, options...)
}

func TestAddressesWithoutAPodCostNoRequestsWhileTheirWorkloadWantsThem(t *testing.T) {
	const pods = 3
	shared := func(kind, version string) (all []client.Object) {
		for i := range pods {
			ip := owned(stayputv1alpha1.PolicyRelease)
			ip.Name, ip.Spec.PodName = fmt.Sprintf("web-%d.node-1", i), fmt.Sprint("web-", i)
			ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: version, Kind: kind, Name: "web", UID: "of-web"}
			all = append(all, ip)
		}
		return all
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "of-web"}}
	for name, c := range map[string]struct {
		workload client.Object
		ips      []client.Object
		gets     int
		again    bool
	}{
		"of a StatefulSet, which is watched":  {statefulSetOf("web", pods, nil), shared("StatefulSet", "apps/v1"), 0, false},
		"of a Deployment, which is not":       {deployment, shared("Deployment", "apps/v1"), 1, true},
		"found again by name, but not theirs": {statefulSetOf("web", pods, nil), shared("", ""), 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, o := range c.ips {
				if ip := o.(*stayputv1alpha1.RetainedIP); ip.Spec.Workload.Kind == "" {
					ip.Spec.Workload = nil
				}
			}
			c.workload.SetGeneration(1)
			api := fakeAPI(t, append(c.ips, c.workload, hometest.Node("node-1", "a"))...)
			live := &asking{Reader: api}
			r, _ := testReleaser(t, api, nothing)
			r.reader = live
			r.workloads = cluster.Over(fakeCache{Reader: api}, live, api, &discoveryfake.FakeDiscovery{
				Fake: &clienttesting.Fake{}})
			r.workloads.LookUp(t.Context())
			for _, ip := range c.ips {
				again, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(ip)})
				if err != nil || (again.RequeueAfter > 0) != c.again {
					t.Errorf("%s: again after %s, %v", ip.GetName(), again.RequeueAfter, err)
				}
			}
			if live.gets != c.gets {
				t.Errorf("%d requests for %d addresses, want %d", live.gets, pods, c.gets)
			}
		})
	}
}

func TestAWorkloadOfTheSameNameDecidesOnTheOldOnesAddresses(t *testing.T) {
	ip := owned(stayputv1alpha1.PolicyRelease)
	ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web",
		UID: "before"}
	r, _ := testReleaser(t, fakeAPI(t, ip), nothing)
	of := r.ofWorkload(t.Context(), home.Ref{Group: "apps", Kind: "StatefulSet", Namespace: "default", Name: "web"})
	if want := []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(ip)}}; !slices.Equal(of, want) {
		t.Errorf("its coming concerns %v", of)
	}
	other := home.Ref{Group: "apps.kruise.io", Kind: "StatefulSet", Namespace: "default", Name: "web"}
	if of := r.ofWorkload(t.Context(), other); len(of) > 0 {
		t.Errorf("one of another group concerns %v", of)
	}
}

func TestAddressesWhosePodIsAtHomeAndWhoseOwnerIsNotedAreLeftAlone(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*stayputv1alpha1.RetainedIP, *corev1.Pod)
		moves  bool
	}{
		"noted":           {func(*stayputv1alpha1.RetainedIP, *corev1.Pod) {}, false},
		"not seen there":  {func(ip *stayputv1alpha1.RetainedIP, _ *corev1.Pod) { ip.Spec.Scheduled = "" }, true},
		"not noted":       {func(ip *stayputv1alpha1.RetainedIP, _ *corev1.Pod) { ip.Spec.Workload = nil }, true},
		"another's":       {func(ip *stayputv1alpha1.RetainedIP, _ *corev1.Pod) { ip.Spec.Workload.UID = "before" }, true},
		"without owner":   {func(_ *stayputv1alpha1.RetainedIP, p *corev1.Pod) { p.OwnerReferences = nil }, true},
		"elsewhere":       {func(_ *stayputv1alpha1.RetainedIP, p *corev1.Pod) { p.Spec.NodeName = "node-2" }, true},
		"gone":            {func(_ *stayputv1alpha1.RetainedIP, p *corev1.Pod) { p.Name = "web-1" }, true},
		"without ordinal": {func(_ *stayputv1alpha1.RetainedIP, p *corev1.Pod) { p.OwnerReferences[0].Kind = "Game" }, true},
	} {
		ip, pod := owned(stayputv1alpha1.PolicyRelease), hometest.Pod(hometest.RanOn("node-1"), ownedBySet)
		ip.Spec.Workload = &stayputv1alpha1.WorkloadReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web",
			UID: "of-web"}
		ip.Spec.Scheduled = "pod/web-0"
		c.change(ip, pod)
		r, _ := testReleaser(t, fakeAPI(t, ip, pod), nothing)
		of := r.ofPod(t.Context(), &metav1.PartialObjectMetadata{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0"},
		})
		if moves := len(of) > 0; moves != c.moves {
			t.Errorf("%s: looked at %v", name, moves)
		}
	}
}

func TestThatAPodWasBoundToItsNodeIsNoted(t *testing.T) {
	scheduled := func(to string) func(*stayputv1alpha1.RetainedIP) {
		return func(ip *stayputv1alpha1.RetainedIP) { ip.Spec.Scheduled = to }
	}
	identity := hometest.Annotation(stayputv1alpha1.AnnotationIdentity, "front")
	ofWeb, mirror := of("apps/v1", "StatefulSet", "web"), aPod("web-0", "node-1", of("v1", "Node", "node-1"))
	shares := aPod("web-0", "node-1", ofWeb, clone, identity)
	for name, c := range map[string]struct {
		ip    *stayputv1alpha1.RetainedIP
		pod   *corev1.Pod
		ended *corev1.Pod
		gone  *stayputv1alpha1.RetainedIP
		noted string
	}{
		"it is there":          {addressOf("web-0", bound), aPod("web-0", "node-1", ofWeb), nil, nil, "pod/web-0"},
		"without a controller": {addressOf("web-0", bound, tenMinutes), aPod("web-0", "node-1"), nil, nil, "pod/web-0"},
		"it is elsewhere":      {addressOf("web-0", bound), aPod("web-0", "node-2", ofWeb), nil, nil, ""},
		"it has no node":       {addressOf("web-0", bound), aPod("web-0", "", ofWeb), nil, nil, ""},
		"it is a static pod":   {addressOf("web-0", bound), mirror, nil, nil, ""},
		"there is no pod":      {addressOf("web-0"), nil, nil, nil, ""},
		"it ended there":       {addressOf("web-0"), nil, aPod("web-0", "node-1", ofWeb), nil, "pod/web-0"},
		"it ended there, and its successor is gated": {addressOf("web-0"), aPod("web-0", "", ofWeb),
			aPod("web-0", "node-1", ofWeb), nil, "pod/web-0"},
		"a static pod ended there": {addressOf("web-0"), nil, mirror, nil, ""},
		"of its identity":          {addressOf("web-0", bound, shared), shares, nil, nil, "identity/front"},
		"of another identity":      {addressOf("web-0", bound), shares, nil, nil, ""},
		"it was of another": {addressOf("web-0", bound, scheduled("identity/front")), aPod("web-0", "node-1", ofWeb),
			nil, nil, "pod/web-0"},
		"it was noted": {addressOf("web-0", scheduled("pod/web-0")), nil, nil, nil, "pod/web-0"},
		"it was noted, and is published again": {addressOf("web-0"), nil, nil, addressOf("web-0", scheduled("pod/web-0")),
			"pod/web-0"},
		"it was not noted, and is published again": {addressOf("web-0"), nil, nil, addressOf("web-0"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			objects := []client.Object{c.ip, statefulSetOf("web", 1, whileOwned)}
			if c.pod != nil {
				objects = append(objects, c.pod)
			}
			r, _ := testReleaser(t, fakeAPI(t, objects...), nothing)
			if c.ended != nil {
				r.memory.deleted(c.ended)
			}
			if c.gone != nil {
				r.memory.releases().OnDelete(c.gone)
			}
			if got := released(t, r, client.ObjectKeyFromObject(c.ip)); got.Spec.Scheduled != c.noted {
				t.Errorf("noted is %q", got.Spec.Scheduled)
			}
		})
	}
}

// clone gives a pod annotations of its own.
func clone(p *corev1.Pod) { p.Annotations = maps.Clone(p.Annotations) }

// The RetainedIP of a pod may be seen before the pod's binding is.
func TestABindingHasTheReleaserLook(t *testing.T) {
	gated, bound := cluster.PodOf(aPod("web-0", "")), cluster.PodOf(aPod("web-0", "node-1"))
	for name, c := range map[string]struct {
		was, is *cluster.Pod
		looks   bool
	}{
		"bound": {gated, bound, true}, "nothing new": {bound, bound, false},
		"of no interest": {cluster.PodOf(aPod("web-0", "", bare)), cluster.PodOf(aPod("web-0", "node-1", bare)), false},
	} {
		if looks := ownerMayDiffer.Update(event.UpdateEvent{ObjectOld: c.was, ObjectNew: c.is}); looks != c.looks {
			t.Errorf("%s: looks %v", name, looks)
		}
	}
}

func bare(p *corev1.Pod) { p.Annotations = nil }

// As a backup of objects brings them back: without an owner, and perhaps without the node.
func TestARetainedIPOfANodeThatDoesNotExistIsCollected(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	after := func(d time.Duration, change ...func(*stayputv1alpha1.RetainedIP)) *stayputv1alpha1.RetainedIP {
		ip := owned(stayputv1alpha1.PolicyRetain)
		ip.CreationTimestamp, ip.OwnerReferences = metav1.NewTime(now.Add(-d)), nil
		for _, c := range change {
			c(ip)
		}
		return ip
	}
	ofNode := func(ip *stayputv1alpha1.RetainedIP) { ip.OwnerReferences = byNode }
	released := func(ip *stayputv1alpha1.RetainedIP) { ip.Spec.Release = stayputv1alpha1.ReleaseNow }
	away := interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
		options ...client.GetOption) error {
		if _, ok := o.(*corev1.Node); ok {
			return errors.New("away")
		}
		return c.Get(ctx, key, o, options...)
	}}
	for name, c := range map[string]struct {
		ip           *stayputv1alpha1.RetainedIP
		cached, live []client.Object
		unreadable   bool
		gone         bool
		again        time.Duration
	}{
		"for ten minutes":                    {ip: after(orphanedFor), gone: true},
		"that was to be released":            {ip: after(time.Hour, released), gone: true},
		"for a minute":                       {ip: after(time.Minute), again: 9 * time.Minute},
		"by the cache alone":                 {ip: after(time.Hour), live: []client.Object{node}},
		"but once more":                      {ip: after(time.Hour), cached: []client.Object{node}, live: []client.Object{node}},
		"that an agent wrote":                {ip: after(time.Hour, ofNode)},
		"as far as can be read, and no more": {ip: after(time.Hour), unreadable: true},
	} {
		t.Run(name, func(t *testing.T) {
			k := fakeAPI(t, append(c.cached, c.ip)...)
			r, _ := testReleaser(t, k, nothing)
			r.now = func() time.Time { return now }
			live := fakeAPI(t, append(c.live, c.ip.DeepCopy())...)
			r.reader = live
			if c.unreadable {
				r.reader = interceptor.NewClient(live, away)
			}
			key := client.ObjectKeyFromObject(c.ip)
			result, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: key})
			if (err != nil) != c.unreadable || c.again != 0 && result.RequeueAfter != c.again {
				t.Errorf("again after %s, %v", result.RequeueAfter, err)
			}
			err = k.Get(t.Context(), key, &stayputv1alpha1.RetainedIP{})
			if apierrors.IsNotFound(err) != c.gone {
				t.Errorf("it is gone: %v, want %v", err, c.gone)
			}
		})
	}
}

func TestOfAnOwnerThatCannotBeReadTheAddressIsKeptAndSaid(t *testing.T) {
	clones := stayputv1alpha1.WorkloadReference{APIVersion: "apps.kruise.io/v1alpha1", Kind: "CloneSet", Name: "web"}
	advanced := stayputv1alpha1.WorkloadReference{APIVersion: "apps.kruise.io/v1beta1", Kind: "StatefulSet", Name: "web"}
	for name, c := range map[string]struct {
		of    stayputv1alpha1.WorkloadReference
		other serving
		says  string
	}{
		"of a kind that is not watched": {clones, nothing, `clonesets.apps.kruise.io "web" is forbidden: no right`},
		"of a kind that is":             {advanced, forbidden, "the controller has no permission to get statefulsets"},
		"of a kind that is gone":        {advanced, nothing, "the API server does not serve this kind"},
	} {
		t.Run(name, func(t *testing.T) {
			ip := owned(stayputv1alpha1.PolicyRelease)
			ip.Spec.Identity, ip.Spec.Workload = "web", &c.of
			api := interceptor.NewClient(fakeAPI(t, ip, hometest.Node("node-1", "a")), interceptor.Funcs{
				Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, o client.Object,
					options ...client.GetOption) error {
					if _, ok := o.(*metav1.PartialObjectMetadata); ok {
						return apierrors.NewForbidden(schema.GroupResource{Group: "apps.kruise.io", Resource: "clonesets"}, key.Name,
							errors.New("no right"))
					}
					return api.Get(ctx, key, o, options...)
				}})
			r, said := testReleaser(t, api, c.other)
			if got := released(t, r, client.ObjectKeyFromObject(ip)); got.Spec.Release != "" {
				t.Errorf("released: %+v", got.Spec)
			}
			close(said.Events)
			if note := <-said.Events; !strings.Contains(note, "OwnerUnreadable") || !strings.Contains(note, "192.0.2.7") ||
				!strings.Contains(note, c.says) {
				t.Errorf("said %q", note)
			}
		})
	}
}
