package podip

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home/hometest"
	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/test/must"
)

// inCalico is an object of Calico's.
func inCalico(kind, name string, spec map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: "crd.projectcalico.org", Version: "v1", Kind: kind})
	o.SetName(name)
	return o
}

// An address that was imported with its pod, outside of the pool's subnet, is reserved and announced, and counts two
// minutes after that. Its reservation stays for as long as its PodIP does, also if only another controller knows that.
func TestAnImportedAddressIsReservedAndCountsTwoMinutesLater(t *testing.T) {
	const address = "10.244.1.1"
	ip := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: address, UID: "ip",
		Finalizers: []string{stayputv1alpha1.FinalizerInUse}},
		Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Mode: stayputv1alpha1.ModeCalico, Namespace: "default",
			PodName: "web-0", PodUID: "web-0", Interface: "eth0", Retention: "while-owned", Adopted: true}}
	a := newAPI(t,
		&stayputv1alpha1.PodIPPool{ObjectMeta: metav1.ObjectMeta{Name: "blue", UID: "blue"},
			Spec: stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeCalico, Subnet: "10.244.240.0/24"}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0", UID: "web-0",
			CreationTimestamp: metav1.NewTime(hometest.Noon)}, Spec: corev1.PodSpec{NodeName: "node-1"},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: address}},
		inCalico("IPPool", "default", map[string]any{"cidr": "10.244.0.0/16"}),
		inCalico("IPAMBlock", "10-244-1-0-26", map[string]any{"cidr": "10.244.1.0/26",
			"allocations": []any{nil, int64(0)}, "attributes": []any{map[string]any{"handle_id": "h",
				"secondary": map[string]any{"namespace": "default", "pod": "web-0", "node": "node-1"}}}}))
	c := control(t, a)
	c.ipam = calico.New(a, func(of schema.GroupVersionKind) (bool, error) {
		return of.Group == "crd.projectcalico.org", nil
	}, c.now)
	reserved := func() (names []string) {
		t.Helper()
		_, err := c.follower.reserve(t.Context(), c.session, []*stayputv1alpha1.PodIPPool{c.pools["blue"]})
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
