package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// calicosPod runs with an address of Calico.
func calicosPod(name, ip string, change ...func(*corev1.Pod)) *corev1.Pod {
	return theirPod(name, append([]func(*corev1.Pod){func(p *corev1.Pod) {
		p.Annotations, p.Spec.NodeName = nil, "node-1"
		for _, ip := range strings.Fields(ip) {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
		}
	}}, change...)...)
}

// inCalico is a pool of mode Calico.
func inCalico(name, subnet string, change ...func(*stayputv1alpha1.PodIPPool)) *stayputv1alpha1.PodIPPool {
	p := &stayputv1alpha1.PodIPPool{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: stayputv1alpha1.PodIPPoolSpec{Mode: stayputv1alpha1.ModeCalico, Subnet: subnet},
		Status: stayputv1alpha1.PodIPPoolStatus{Conditions: []metav1.Condition{
			{Type: stayputv1alpha1.ConditionReady, Status: metav1.ConditionTrue}}}}
	for _, c := range change {
		c(p)
	}
	return p
}

func anIPPool(name, cidr string) *unstructured.Unstructured {
	o := object("crd.projectcalico.org/v1", "IPPool")
	o.SetName(name)
	o.Object["spec"] = map[string]any{"cidr": cidr}
	return o
}

func fromCalico(t *testing.T, k client.Client, act bool, into ...string) (says []string, failed, err error) {
	t.Helper()
	done, failed, err := importFromCalico(t.Context(), &cluster{Client: k, namespace: "default"}, []string{"web"}, into, act,
		&progress{})
	if err != nil {
		return nil, nil, err
	}
	return said(done), errors.Join(failed, refused(done)), nil
}

func TestCalicosAddressesAreTakenOverOnceTheControllerConfirmsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var made time.Time
		k := interceptor.NewClient(aCluster(nothing, inCalico("blue", "10.244.240.0/24"), inCalico("six", "fd00:1::/64"),
			anIPPool("v4", "10.244.0.0/16"), anIPPool("v6", "fd00::/16"),
			calicosPod("web-0", "10.244.1.5 fd00::5"), calicosPod("web-1", "10.244.1.6 fd00::6"),
			calicosPod("web-10", "10.244.240.7 fd00::7"), calicosPod("db-0", "10.244.1.8", func(p *corev1.Pod) {
				p.OwnerReferences[0].Name = "db"
			})).(client.WithWatch), interceptor.Funcs{
			Create: func(ctx context.Context, k client.WithWatch, o client.Object, opts ...client.CreateOption) error {
				made = time.Now()
				o.SetUID(types.UID("uid-" + o.GetName()))
				return k.Create(ctx, o, opts...)
			},
			// The controller confirms all but an address of web-1 after two minutes.
			Get: func(ctx context.Context, k client.WithWatch, key client.ObjectKey, o client.Object,
				opts ...client.GetOption) error {
				err := k.Get(ctx, key, o, opts...)
				ip, ok := o.(*stayputv1alpha1.PodIP)
				switch {
				case !ok || err != nil || time.Since(made) < 2*time.Minute:
				case ip.Name == "10.244.1.6":
					return apierrors.NewNotFound(stayputv1alpha1.SchemeGroupVersion.WithResource("podips").GroupResource(), ip.Name)
				default:
					ip.Status.Phase, ip.Status.PodUID = stayputv1alpha1.PodIPBound, ip.Spec.PodUID
				}
				return err
			}})
		says := func(act, fails bool, want ...string) {
			t.Helper()
			is, failed, err := fromCalico(t, k, act, "blue", "six")
			if err != nil || (failed != nil) != fails || !slices.EqualFunc(is, want, strings.HasPrefix) {
				t.Errorf("act %t: %v, %v\n%s\nwant\n%s", act, failed, err, strings.Join(is, "\n"), strings.Join(want, "\n"))
			}
		}
		says(false, false, "web-0 [10.244.1.5] of blue: Adopt false", "web-0 [fd00::5] of six: Adopt false",
			"web-1 [10.244.1.6] of blue: Adopt false", "web-1 [fd00::6] of six: Adopt false",
			"web-10 [10.244.240.7] of blue: Adopt false", "web-10 [fd00::7] of six: Adopt false")
		if is := adoptedIPs(t, k); len(is) > 0 {
			t.Errorf("a plan has made %v", is)
		}
		says(true, true, "web-0 [10.244.1.5] of blue: Adopt true", "web-0 [fd00::5] of six: Adopt true",
			"web-1 [10.244.1.6] of blue: Refuse false the pod has ended", "web-1 [fd00::6] of six: Adopt true",
			"web-10 [10.244.240.7] of blue: Adopt true", "web-10 [fd00::7] of six: Adopt true")
		if waited := time.Since(made); waited < 2*time.Minute {
			t.Errorf("it took %s", waited)
		}
		is := adoptedIPs(t, k)["10.244.1.5"].Spec
		if is.AdoptedOn != "node-1" || is.Mode != stayputv1alpha1.ModeCalico || is.Pool != "blue" ||
			is.PodUID != "uid-web-0" ||
			is.Retention != "while-owned" || is.Workload == nil || is.Interface != "eth0" {
			t.Errorf("%+v", is)
		}
		says(true, false, "web-0 [10.244.1.5 fd00::5] of : None false already", "web-1 [10.244.1.6 fd00::6] of : None",
			"web-10")
	})
}

// Without a controller the PodIPs are there, and it says that they do not count yet.
func TestAnImportFromCalicoThatNoControllerConfirmsSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := aCluster(nothing, inCalico("blue", "10.244.240.0/24"), anIPPool("v4", "10.244.0.0/16"),
			calicosPod("web-0", "10.244.1.5"))
		is, failed, err := fromCalico(t, k, true, "blue")
		if err != nil || failed == nil || !strings.Contains(failed.Error(), "1 address is not kept yet") ||
			!slices.Equal(is, []string{"web-0 [10.244.1.5] of blue: Adopt false "}) {
			t.Errorf("%q, %v, %v", is, failed, err)
		}
	})
}

func TestWhatCannotBeTakenOverFromCalicoSaysWhy(t *testing.T) {
	taken := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.244.1.9"},
		Spec: stayputv1alpha1.PodIPSpec{Pool: "blue", Namespace: "default", PodName: "other-0", PodUID: "other"}}
	k := aCluster(nothing, inCalico("blue", "10.244.240.0/24"), inCalico("green", "10.244.241.0/24"),
		anIPPool("v4", "10.244.0.0/16"), taken,
		calicosPod("web-0", "10.0.0.1", func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
		calicosPod("web-1", "10.244.1.1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }),
		calicosPod("web-2", ""),
		calicosPod("web-3", "10.244.1.3 fd00::3"),
		calicosPod("web-4", "10.244.241.4"),
		calicosPod("web-5", "10.99.0.5"),
		calicosPod("web-6", "10.244.1.9"),
		calicosPod("web-7", "10.244.1.7", func(p *corev1.Pod) {
			p.Annotations = map[string]string{stayputv1alpha1.AnnotationAddresses: "[]"}
		}),
		calicosPod("web-x", "10.244.1.8"))
	is, failed, err := fromCalico(t, k, true, "blue")
	if want := []string{
		"web-0 [10.0.0.1] of : Refuse false it has the addresses of its node",
		"web-1 [10.244.1.1] of : Refuse false it does not run", "web-2 [] of : Refuse false it does not run",
		"web-3 [10.244.1.3 fd00::3] of : Refuse false --into names no pool of the family of fd00::3",
		"web-4 [10.244.241.4] of : Refuse false 10.244.241.4 is in the subnet of PodIPPool green",
		"web-5 [10.99.0.5] of : Refuse false 10.99.0.5 is in no IPPool",
		"web-6 [10.244.1.9] of : Refuse false 10.244.1.9 belongs to pod default/other-0",
		"web-7 [10.244.1.7] of : None false it has addresses of pools",
		"web-x [10.244.1.8] of : Refuse false no pod of this name",
	}; err != nil || failed == nil || !slices.EqualFunc(is, want, strings.HasPrefix) {
		t.Errorf("%v, %v\n%s", failed, err, strings.Join(is, "\n"))
	}
	if all := adoptedIPs(t, k); len(all) != 1 {
		t.Errorf("made were %v", all)
	}
}

func TestAnImportFromCalicoNeedsAPoolThatIsReady(t *testing.T) {
	l2 := func(p *stayputv1alpha1.PodIPPool) { p.Spec.Mode = stayputv1alpha1.ModeL2 }
	strict := func(p *stayputv1alpha1.PodIPPool) {
		is := &p.Status.Conditions[0]
		is.Status, is.Message = metav1.ConditionFalse, "Calico's IPAM has strictAffinity"
	}
	objects := []client.Object{inCalico("blue", "10.244.240.0/24"), inCalico("two", "10.244.241.0/24"),
		inCalico("link", "10.6.0.0/24", l2), inCalico("strict", "10.244.242.0/24", strict), inCalico("new", "10.244.243.0/24",
			func(p *stayputv1alpha1.PodIPPool) { p.Status.Conditions = nil }), anIPPool("v4", "10.244.0.0/16")}
	for into, want := range map[string]string{
		"none": "PodIPPool none does not exist", "link": "is of mode L2, not Calico",
		"new": "no controller has reconciled it", "strict": "is not ready: Calico's IPAM has strictAffinity",
		"blue two": "blue and two have addresses of the same family", "blue": "StatefulSet default/web has no pods",
	} {
		if _, _, err := fromCalico(t, aCluster(nothing, objects...), true, strings.Fields(into)...); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("into %s: %v", into, err)
		}
	}
	for n := range 101 {
		objects = append(objects, calicosPod(fmt.Sprintf("web-%d", n), fmt.Sprintf("10.244.1.%d", n)))
	}
	if _, _, err := fromCalico(t, aCluster(nothing, objects...), true, "blue"); err == nil ||
		!strings.Contains(err.Error(), "101 addresses would be reserved one by one") {
		t.Errorf("101 addresses: %v", err)
	}
}

func TestOnlyStatefulSetsHaveAddressesToImportFromCalico(t *testing.T) {
	for arg, ok := range map[string]bool{"statefulset/web": true, "sts/web": true, "deployment/web": false, "web": false,
		"sts/": false, "pod/web-0": false} {
		if is, err := setsNamed([]string{arg}); (err == nil) != ok || ok && !slices.Equal(is, []string{"web"}) {
			t.Errorf("%s: %v, %v", arg, is, err)
		}
	}
	if _, err := setsNamed(nil); err == nil {
		t.Error("none is named, and that is no error")
	}
}
