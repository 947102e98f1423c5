package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/stayput/stayput/pkg/api/inspection"
	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

func theirPool(name string, change ...func(*spiderpoolv2beta1.SpiderIPPool)) *spiderpoolv2beta1.SpiderIPPool {
	o := &spiderpoolv2beta1.SpiderIPPool{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: spiderpoolv2beta1.SpiderIPPoolSpec{Subnet: "10.6.0.0/16", IPs: []string{"10.6.168.101-10.6.168.110"}}}
	for _, c := range change {
		c(o)
	}
	return o
}

// endpoint is a SpiderEndpoint of a pod with this UID; each IP is INTERFACE ADDRESS POOL.
func endpoint(pod, uid string, ips ...string) *unstructured.Unstructured {
	var all []any
	for _, ip := range ips {
		f := strings.Fields(ip)
		all = append(all, map[string]any{"interface": f[0], "ipv4": f[1], "ipv4Pool": f[2]})
	}
	o := &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{
		"current":             map[string]any{"uid": uid, "node": "node-1", "ips": all},
		"ownerControllerType": "StatefulSet", "ownerControllerName": "web",
	}}}
	o.SetGroupVersionKind(spiderpoolv2beta1.SchemeGroupVersion.WithKind("SpiderEndpoint"))
	o.SetNamespace("default")
	o.SetName(pod)
	return o
}

// theirPod runs with an address of Spiderpool.
func theirPod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	yes := true
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name),
		Annotations:     map[string]string{annotationIPPool: `{"ipv4":["test-ippool"]}`},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "set", Controller: &yes}},
	}, Spec: corev1.PodSpec{NodeName: "node-1"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, c := range change {
		c(p)
	}
	return p
}

func said(done *inspection.Import) (all []string) {
	for _, p := range done.Pools {
		all = append(all, fmt.Sprintf("pool %s: %s %t %s", p.Name, p.Action, p.Done, p.Why))
	}
	for _, i := range done.Items {
		all = append(all, fmt.Sprintf("%s %v of %s: %s %t %s", i.Pod, i.IPs, i.Pool, i.Action, i.Done, i.Why))
	}
	return all
}

func imported(t *testing.T, k client.Client, act, fails bool, want ...string) {
	t.Helper()
	done, failed, err := importIntoPools(t.Context(), k, act)
	if err != nil || (failed != nil || refused(done) != nil) != fails {
		t.Fatal(failed, refused(done), err)
	}
	if is := said(done); !slices.EqualFunc(is, want, strings.HasPrefix) {
		t.Errorf("act %t: it says\n%s\nwant\n%s", act, strings.Join(is, "\n"), strings.Join(want, "\n"))
	}
}

func adoptedIPs(t *testing.T, k client.Client) map[string]stayputv1alpha1.PodIP {
	t.Helper()
	var list stayputv1alpha1.PodIPList
	if err := k.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	all := map[string]stayputv1alpha1.PodIP{}
	for _, ip := range list.Items {
		all[ip.Name] = ip
	}
	return all
}

func TestSpiderpoolsAddressesAreTakenOverIntoPools(t *testing.T) {
	reserved := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"ips": []any{"10.6.168.110"}}}}
	reserved.SetGroupVersionKind(spiderpoolv2beta1.SchemeGroupVersion.WithKind("SpiderReservedIP"))
	reserved.SetName("gateway")
	given := `{"10.6.168.101":{"pod":"default/web-0","podUid":"uid-web-0"},"10.6.168.109":{"pod":"default/x","podUid":"gone"}}`
	k := aCluster(nothing, reserved,
		theirPool("test-ippool", func(o *spiderpoolv2beta1.SpiderIPPool) { o.Status.AllocatedIPs = &given }),
		theirPool("other", func(o *spiderpoolv2beta1.SpiderIPPool) { o.Spec.IPs = []string{"10.6.169.1"} }),
		theirPod("web-0"), theirPod("job-x", func(p *corev1.Pod) { p.Annotations, p.OwnerReferences = nil, nil }),
		theirPod("over-0", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
		theirPod("new-0", func(p *corev1.Pod) { p.Spec.NodeName = "" }),
		endpoint("web-0", "uid-web-0", "eth0 10.6.168.101/16 test-ippool", "net1 10.6.169.1/16 other"),
		endpoint("web-1", "uid-web-1", "eth0 10.6.168.102/16 test-ippool"),
		endpoint("over-0", "uid-over-0", "eth0 10.6.168.103/16 test-ippool"),
		endpoint("new-0", "uid-new-0", "eth0 10.6.168.105/16 test-ippool"),
		endpoint("job-x", "uid-job-x", "eth0 10.6.168.104/16 test-ippool"))
	const unasked = "the pod does not request this pool"
	imported(t, k, false, false, "pool other: Create false", "pool test-ippool: Create false",
		"job-x [10.6.168.104] of test-ippool: Adopt false "+unasked,
		"new-0 [10.6.168.105] of test-ippool: None false the pod has no node yet",
		"over-0 [10.6.168.103] of test-ippool: None false the pod has terminated",
		"web-0 [10.6.168.101] of test-ippool: Adopt false", "web-0 [10.6.169.1] of other: Adopt false "+unasked,
		"web-1 [10.6.168.102] of test-ippool: None false the pod does not exist")
	if is := adoptedIPs(t, k); len(is) > 0 {
		t.Errorf("a plan has made %v", is)
	}
	imported(t, k, true, false, "pool other: Create true", "pool test-ippool: Create true",
		"job-x [10.6.168.104] of test-ippool: Adopt true", "new-0", "over-0",
		"web-0 [10.6.168.101] of test-ippool: Adopt true",
		"web-0 [10.6.169.1] of other: Adopt true", "web-1")
	ips := adoptedIPs(t, k)
	web, job := ips["10.6.168.101"].Spec, ips["10.6.168.104"].Spec
	if len(ips) != 3 || web.AdoptedOn != "node-1" || web.PodUID != "uid-web-0" || web.Pool != "test-ippool" ||
		web.Interface != "eth0" || web.Retention != "while-owned" || web.Workload == nil || web.Workload.Name != "web" ||
		job.Retention != "" ||
		ips["10.6.169.1"].Spec.Interface != "net1" ||
		!slices.Contains(ips["10.6.168.101"].Finalizers, stayputv1alpha1.FinalizerInUse) {
		t.Errorf("there are %+v", ips)
	}
	var p stayputv1alpha1.PodIPPool
	if err := k.Get(t.Context(), types.NamespacedName{Name: "test-ippool"}, &p); err != nil ||
		!slices.Equal(p.Spec.ExcludedAddresses, []string{"10.6.168.110"}) || p.Spec.Mode != stayputv1alpha1.ModeL2 {
		t.Errorf("%+v, %v", p.Spec, err)
	}
	// Again, there is nothing to do.
	imported(t, k, true, false, "pool other: None", "pool test-ippool: None", "job-x [10.6.168.104] of test-ippool: None",
		"new-0", "over-0", "web-0 [10.6.168.101] of test-ippool: None", "web-0 [10.6.169.1] of other: None", "web-1")
}

// A pool is made only if it gives no address away with which a pod runs.
func TestAPoolIsNotTakenOverWithoutItsAddresses(t *testing.T) {
	other := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.6.168.101"},
		Spec: stayputv1alpha1.PodIPSpec{Pool: "x", Namespace: "default", PodName: "other-0", PodUID: "other"}}
	web := endpoint("web-0", "uid-web-0", "eth0 10.6.168.101/16 test-ippool")
	unsupported := theirPool("test-ippool", func(o *spiderpoolv2beta1.SpiderIPPool) { o.Spec.NodeName = []string{"node-1"} })
	given := `{"10.6.168.105":{"pod":"default/web-0","podUid":"uid-web-0"}}`
	unknown := theirPool("test-ippool", func(o *spiderpoolv2beta1.SpiderIPPool) { o.Status.AllocatedIPs = &given })
	for name, test := range map[string]struct {
		objects []client.Object
		want    []string
	}{
		"of another pod": {[]client.Object{theirPool("test-ippool"), other, web}, []string{
			"pool test-ippool: Refuse false an address of pod default/web-0 cannot be taken over",
			"web-0 [10.6.168.101] of test-ippool: Refuse false the address belongs to pod default/other-0"}},
		"an unsupported pool": {[]client.Object{unsupported, web}, []string{
			"pool test-ippool: Refuse false spec.nodeName is not supported",
			"web-0 [10.6.168.101] of test-ippool: Refuse false its pool is refused: spec.nodeName"}},
		"no pool": {[]client.Object{web}, []string{
			"web-0 [10.6.168.101] of test-ippool: Refuse false SpiderIPPool test-ippool does not exist"}},
		"no endpoint": {[]client.Object{unknown, web}, []string{
			"pool test-ippool: Refuse false Spiderpool has assigned 10.6.168.105 to pod default/web-0, but no",
			"web-0 [10.6.168.101] of test-ippool: Adopt true"}},
		"no prefix length": {[]client.Object{theirPool("test-ippool"),
			endpoint("web-0", "uid-web-0", "eth0 10.6.168.101 test-ippool")}, []string{"pool test-ippool: Refuse",
			`web-0 [] of test-ippool: Refuse false its address "10.6.168.101" is not valid`}},
	} {
		t.Run(name, func(t *testing.T) {
			k := aCluster(nothing, append(test.objects, theirPod("web-0"))...)
			imported(t, k, true, true, test.want...)
			var pools stayputv1alpha1.PodIPPoolList
			if err := k.List(t.Context(), &pools); err != nil || len(pools.Items) > 0 {
				t.Errorf("there is %v, %v", pools.Items, err)
			}
		})
	}

	// Also if that turns out only now.
	k := interceptor.NewClient(aCluster(nothing, theirPool("test-ippool"), theirPod("web-0"), web).(client.WithWatch),
		interceptor.Funcs{Create: func(ctx context.Context, k client.WithWatch, o client.Object,
			opts ...client.CreateOption) error {
			if _, ok := o.(*stayputv1alpha1.PodIP); ok {
				return errors.New("it exists")
			}
			return k.Create(ctx, o, opts...)
		}})
	imported(t, k, true, true, "pool test-ippool: Refuse false an address of pod default/web-0",
		"web-0 [10.6.168.101] of test-ippool: Refuse false it exists")
}
