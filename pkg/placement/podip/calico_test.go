package podip

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
	"github.com/stayput/stayput/pkg/placement/calico"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/test/must"
)

// calicoAPIs are the API groups that Calico's objects are in, before and after an upgrade, and their kinds.
var calicoAPIs = map[schema.GroupVersion][]string{
	{Group: "crd.projectcalico.org", Version: "v1"}: {"IPPool", "IPReservation", "IPAMConfig", "ClusterInformation",
		"IPAMBlock"},
	{Group: "projectcalico.org", Version: "v3"}: {"IPPool", "IPReservation", "IPAMConfiguration", "ClusterInformation",
		"IPAMBlock"},
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
		before := schema.GroupVersion{Group: "crd.projectcalico.org", Version: "v1"}
		after := schema.GroupVersion{Group: "projectcalico.org", Version: "v3"}
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
		go c.follower.followsCalico(t.Context())
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
			for _, strict := range []bool{true, false} {
				must.Do(t, a.Get(t.Context(), client.ObjectKeyFromObject(config), config))
				must.Do(t, unstructured.SetNestedField(config.Object, strict, "spec", "strictAffinity"))
				must.Do(t, a.Update(t.Context(), config))
				says("strict, and no more", 0, map[bool]string{true: "strictAffinity"}[strict])
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
