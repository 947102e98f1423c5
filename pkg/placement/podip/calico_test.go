package podip

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	discoveryfake "k8s.io/client-go/discovery/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/must"
)

var (
	calicoV1 = schema.GroupVersion{Group: "crd.projectcalico.org", Version: "v1"}
	calicoV3 = schema.GroupVersion{Group: "projectcalico.org", Version: "v3"}
)

// calicoAPIs are the API groups that Calico's objects are in, before and after an upgrade, and their kinds.
var calicoAPIs = map[schema.GroupVersion][]string{
	calicoV1: {"IPPool", "IPReservation", "IPAMConfig", "ClusterInformation", "IPAMBlock"},
	calicoV3: {"IPPool", "IPReservation", "IPAMConfiguration", "ClusterInformation", "IPAMBlock"},
}

// installCalico has an API server serve Calico's objects in both groups, and returns what says which one it serves.
func installCalico(t *testing.T, a *api) *clienttesting.Fake {
	t.Helper()
	for gv, kinds := range calicoAPIs {
		for _, kind := range kinds {
			a.Scheme().AddKnownTypeWithName(gv.WithKind(kind), &unstructured.Unstructured{})
			a.Scheme().AddKnownTypeWithName(gv.WithKind(kind+"List"), &unstructured.UnstructuredList{})
		}
		must.Do(t, a.Create(t.Context(), ofCalico(gv, "IPPool", "main", map[string]any{"cidr": "10.244.0.0/16"})))
		must.Do(t, a.Create(t.Context(), ofCalico(gv, kinds[2], "default", map[string]any{"strictAffinity": false})))
	}
	return &clienttesting.Fake{}
}

func serve(served *clienttesting.Fake, gv schema.GroupVersion) {
	served.Resources = []*metav1.APIResourceList{{GroupVersion: gv.String(),
		APIResources: []metav1.APIResource{{Kind: "IPAMBlock", Name: "ipamblocks"}}}}
}

// ofCalico makes an object of Calico's.
func ofCalico(gv schema.GroupVersion, kind, name string, spec map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	o.SetGroupVersionKind(gv.WithKind(kind))
	o.SetName(name)
	return o
}

// Calico's configuration is watched while there is a pool inside its IPAM, and read only if it may have changed.
func TestCalicosConfigurationIsReadOnceItChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before, after := calicoV1, calicoV3
		a := newAPI(t, aPool("blue", "", func(o *stayputv1alpha1.PodIPPool) {
			o.Spec = stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeCalico, Subnet: "10.244.240.0/24"}
		}))
		served := installCalico(t, a)
		serve(served, before)
		lists, moved, watches := 0, false, []watch.Interface{}
		a.WithWatch = interceptor.NewClient(a.WithWatch, interceptor.Funcs{
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption) error {
				gv := list.GetObjectKind().GroupVersionKind().GroupVersion()
				if moved && gv == before {
					return apierrors.NewNotFound(schema.GroupResource{Group: gv.Group}, "")
				}
				if _, of := calicoAPIs[gv]; of {
					lists++
				}
				return c.List(ctx, list, o...)
			},
			Watch: func(ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption) (
				watch.Interface, error) {
				w, err := c.Watch(ctx, list, o...)
				watches = append(watches, w)
				context.AfterFunc(ctx, w.Stop)
				return w, err
			},
		})
		c := control(t, a)
		c.ipam = newIPAM(a, cluster.Over(fakeCache{Reader: a}, a, a, &discoveryfake.FakeDiscovery{Fake: served}))
		go c.follower.reserver.run(t.Context())
		says := func(when string, d time.Duration, want string) {
			t.Helper()
			a.now = a.now.Add(d)
			time.Sleep(d)
			synctest.Wait()
			c.mu.Lock()
			defer c.unlock()
			if is := c.poolLocked(c.pools["blue"]).Unready; (is == "") != (want == "") || !strings.Contains(is, want) {
				t.Fatalf("%s: %q, want %q", when, is, want)
			}
		}
		const settles = calico.ReserveSettles + time.Second
		says("reserved", time.Second, "was reserved in Calico's IPAM just now")
		says("reserved long ago", settles, "")
		lists = 0
		if says("at rest", 2*time.Minute, ""); lists > 0 {
			t.Errorf("at rest it was read %d times", lists)
		}

		changes := func(gv schema.GroupVersion, kind string) {
			t.Helper()
			config := ofCalico(gv, kind, "default", nil)
			for _, c := range []struct {
				field string
				value any
				says  string
			}{
				{"strictAffinity", true, "strictAffinity"}, {"strictAffinity", false, ""},
				{"ipCooldownSeconds", int64(60), "ipCooldownSeconds"}, {"ipCooldownSeconds", int64(0), ""},
			} {
				must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(config), config))
				must.Do(t, unstructured.SetNestedField(config.Object, c.value, "spec", c.field))
				must.Do(t, a.Update(t.Context(), config))
				says(fmt.Sprint(c.field, " ", c.value), 0, c.says)
			}
		}
		changes(before, "IPAMConfig")
		must.Do(t, a.Delete(t.Context(), ofCalico(before, "IPReservation", "stayput-blue", nil)))
		says("without its reservation", 0, "was reserved in Calico's IPAM just now")
		says("with another one", settles, "")

		// An upgrade moves it: the watches end, and nothing is there to be listed.
		moved = true
		serve(served, after)
		for _, w := range watches {
			w.Stop()
		}
		says("moved", cluster.LookupEvery, "was reserved in Calico's IPAM just now")
		says("moved long ago", settles, "")
		changes(after, "IPAMConfiguration")

		// Without a pool nothing of it is watched.
		must.Do(t, a.Delete(t.Context(), aPool("blue", "")))
		c.mu.Lock()
		c.removePoolLocked("blue")
		c.unlock()
		time.Sleep(time.Second)
		reservation := ofCalico(after, "IPReservation", "stayput-blue", nil)
		if err := a.Get(t.Context(), client.ObjectKeyFromObject(reservation), reservation); !apierrors.IsNotFound(err) {
			t.Errorf("the reservation of a pool that is gone: %v", err)
		}
		lists = 0
		if time.Sleep(3 * apiwatch.Timeout); lists > 0 {
			t.Errorf("without a pool it was listed %d times", lists)
		}
	})
}

// An address that was imported with its pod, outside of the pool's subnet, is reserved and announced, and counts two
// minutes after that. Its reservation stays for as long as its PodIP does, also if only another controller knows that.
func TestAnImportedAddressIsReservedAndCountsTwoMinutesLater(t *testing.T) {
	const address = "10.244.1.1"
	ip := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: address, UID: "ip",
		Finalizers: []string{stayputv1alpha1.FinalizerInUse}},
		Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeCalico, Namespace: "default",
			PodName: "web-0", PodUID: "web-0", Interface: "eth0", Retention: "while-owned", AdoptedOn: "node-1"}}
	a := newAPI(t,
		&stayputv1alpha1.PodIPPool{ObjectMeta: metav1.ObjectMeta{Name: "blue", UID: "blue"},
			Spec: stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeCalico, Subnet: "10.244.240.0/24"}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0", UID: "web-0",
			CreationTimestamp: metav1.NewTime(hometest.Noon)}, Spec: corev1.PodSpec{NodeName: "node-1"},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: address}},
		ofCalico(calicoV1, "IPPool", "default", map[string]any{"cidr": "10.244.0.0/16"}),
		ofCalico(calicoV1, "IPAMBlock", "10-244-1-0-26", map[string]any{"cidr": "10.244.1.0/26",
			"allocations": []any{nil, int64(0)}, "attributes": []any{map[string]any{"handle_id": "h",
				"secondary": map[string]any{"namespace": "default", "pod": "web-0", "node": "node-1"}}}}))
	c := control(t, a)
	c.ipam = calico.New(a, func(of schema.GroupVersionKind) (bool, error) {
		return of.Group == calicoV1.Group, nil
	}, c.now)
	reserved := func() (names []string) {
		t.Helper()
		_, _, err := c.follower.reserver.reserve(t.Context(), c.session, []*stayputv1alpha1.PodIPPool{c.pools["blue"]})
		must.Do(t, err)
		config, err := c.ipam.Read(t.Context())
		must.Do(t, err)
		return config.Reservations()
	}
	phase := func() stayputv1alpha1.PodIPPhase {
		t.Helper()
		c.works()
		must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(ip), ip))
		return ip.Status.Phase
	}
	both := []string{"blue", "ip-" + address}
	reserved()
	a.now = a.now.Add(calico.ReserveSettles)
	if reserved(); c.unready["blue"] != "" {
		t.Fatalf("the pool is not ready: %s", c.unready["blue"])
	}
	must.Do(t, a.Create(t.Context(), ip))
	c.looks()
	if is := reserved(); !slices.Equal(is, both) {
		t.Fatalf("reserved are %v", is)
	}
	if is := c.hasLocked().calico; is != "10.244.1.1/32,10.244.240.0/24" {
		t.Errorf("announced is %s", is)
	}
	c.session.ready = false
	if !c.hasLocked().unread {
		t.Error("without PodIPs, what was announced does not stand")
	}
	c.session.ready = true
	a.now = a.now.Add(calico.ReserveSettles - time.Second)
	if reserved(); phase() != "" {
		t.Errorf("before another pod can be known not to get it, it is %s", ip.Status.Phase)
	}
	a.now = a.now.Add(2 * time.Second)
	if reserved(); phase() != stayputv1alpha1.PodIPBound || ip.Status.NodeName != "node-1" || ip.Status.PodUID != "web-0" {
		t.Errorf("%+v", ip.Status)
	}

	// Of the PodIP this controller has not heard, and then it is gone.
	c.session.removeIPLocked(c.session.book.Addresses()[0])
	if is := reserved(); !slices.Equal(is, both) {
		t.Errorf("reserved are %v", is)
	}
	ip.Finalizers = nil
	must.Do(t, a.Update(t.Context(), ip))
	must.Do(t, a.Delete(t.Context(), ip))
	if is := reserved(); !slices.Equal(is, both[:1]) {
		t.Errorf("reserved are %v", is)
	}
}

// An allocation that keeps its pod from starting is freed. If Calico's plugin has noted it on the pod, kubelet pulls
// images, and has not reported the address yet: then it stays, and is asked about no more, though the cache lacks that.
func TestOnlyAnAllocationThatNoADDHasNotedIsFreed(t *testing.T) {
	for name, noted := range map[string]bool{"noted": true, "not noted": false} {
		t.Run(name, func(t *testing.T) {
			const address = "10.244.240.1"
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-x", UID: "web",
				CreationTimestamp: metav1.NewTime(hometest.Noon), Annotations: map[string]string{
					stayputv1alpha1.AnnotationAddresses: `[{"interface":"eth0","pool":"blue","mode":"Calico","address":"` + address +
						`/24"}]`}}, Spec: corev1.PodSpec{NodeName: "node-1"}}
			if noted {
				pod.Annotations["cni.projectcalico.org/podIP"] = address + "/32"
			}
			lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "node-1"},
				Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: hometest.Noon}}}
			block := ofCalico(calicoV1, "IPAMBlock", "10-244-240-0-26", map[string]any{"cidr": "10.244.240.0/26",
				"allocations": []any{nil, int64(0)}, "attributes": []any{map[string]any{"handle_id": "net.1",
					"secondary": map[string]any{"namespace": "default", "pod": "web-x", "node": "node-1"}}}})
			a := newAPI(t, pod, lease, block,
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: corev1.NodeStatus{
					Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}},
				aPool("blue", "", func(o *stayputv1alpha1.PodIPPool) {
					o.Spec = stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeCalico, Subnet: "10.244.240.0/24"}
				}),
				&stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: address, UID: "ip",
					Finalizers: []string{stayputv1alpha1.FinalizerInUse}},
					Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeCalico, Namespace: "default",
						PodName: "web-x", PodUID: "web", Interface: "eth0", Retention: "while-owned"}},
				ofCalico(calicoV1, "IPPool", "default", map[string]any{"cidr": "10.244.0.0/16"}))
			reads := 0
			a.WithWatch = interceptor.NewClient(a.WithWatch, interceptor.Funcs{
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
					opts ...client.GetOption) error {
					if o.GetObjectKind().GroupVersionKind().Kind == "IPAMBlock" {
						reads++
					}
					return c.Get(ctx, key, o, opts...)
				},
			})
			c := control(t, a)
			c.ipam = calico.New(a, func(of schema.GroupVersionKind) (bool, error) {
				return of.Group == calicoV1.Group, nil
			}, c.now)
			_, err := c.ipam.Read(t.Context())
			must.Do(t, err)
			for range 78 { // 13 min
				a.now = a.now.Add(10 * time.Second)
				lease.Spec.RenewTime = &metav1.MicroTime{Time: a.now}
				audit := &stayputv1alpha1.PodIPAudit{}
				must.Do(t, a.Get(t.Context(), client.ObjectKey{Name: stayputv1alpha1.PodIPAuditName}, audit))
				audit.Spec.Mark = metav1.NewMicroTime(a.now)
				must.Do(t, errors.Join(a.Update(t.Context(), lease), a.Update(t.Context(), audit)))
				c.session.setAudit(pool.AuditOf(audit))
				for range 3 { // the first time it may only be found out that the pod has started
					c.line.now, c.line.later = append(c.line.now, c.line.later...), nil
					for len(c.line.now) > 0 {
						must.Do(t, c.step())
					}
				}
			}
			must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(block), block))
			attributes, _, err := unstructured.NestedSlice(block.Object, "spec", "attributes")
			must.Do(t, err)
			if stays := len(attributes) == 1; stays != noted {
				t.Errorf("the allocation stays: %t; %v", stays, block.Object)
			}
			before := reads
			for range 12 {
				a.now = a.now.Add(10 * time.Second)
				c.works()
			}
			if noted && reads > before {
				t.Errorf("Calico's IPAM is asked about a pod that has started, %d times", reads-before)
			}
		})
	}
}

// While a pod with an address of Calico's is being deleted, and at no other time, the controller reads which version
// the cluster's pods have.
func TestTheVersionOfPodsIsReadWhileSomeEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI(t)
		read := 0
		a.WithWatch = interceptor.NewClient(a.WithWatch, interceptor.Funcs{
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption) error {
				pods, ok := list.(*metav1.PartialObjectMetadataList)
				if !ok || pods.Kind != "PodList" || !slices.Contains(o, client.ListOption(client.Limit(1))) {
					return c.List(ctx, list, o...)
				}
				read++
				pods.ResourceVersion = "1000"
				return nil
			},
		})
		c := control(t, a)
		go c.follower.datePods(t.Context(), c.session)
		expect := func(when string, d time.Duration, want int) {
			t.Helper()
			if time.Sleep(d); read != want {
				t.Errorf("%s: read %d times, want %d", when, read, want)
			}
		}
		now := metav1.Now()
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0", UID: "web-0",
			ResourceVersion: "999", Annotations: map[string]string{stayputv1alpha1.AnnotationAddresses: "[" +
				`{"interface":"eth0","pool":"blue","mode":"Calico","address":"10.244.240.1/24"}]`}},
			Spec: corev1.PodSpec{NodeName: "node-1"}}
		c.session.setIP(&stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.244.240.1", UID: "ip"},
			Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeCalico, Namespace: "default",
				PodName: "web-0", PodUID: "web-0", Interface: "eth0"}})
		c.session.setPod(cluster.PodOf(pod), false)
		expect("a pod runs", time.Minute, 0)
		pod.DeletionTimestamp, pod.ResourceVersion = &now, "1000"
		c.session.setPod(cluster.PodOf(pod), false)
		expect("it is being deleted", time.Second, 1)
		expect("it takes a while", 3*pool.DateEvery, 4)
		c.session.removePod("web-0", "node-1", "1001")
		expect("it is gone", time.Minute, 4)
	})
}
