package cluster

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/must"
)

func TestAnObjectOfAKindThatIsNotServedIsNotAbsent(t *testing.T) {
	gone := apierrors.NewNotFound(schema.GroupResource{Group: "apps", Resource: "statefulsets"}, "web")
	notServed := apierrors.NewGenericServerResponse(404, "get",
		schema.GroupResource{Group: "apps.kruise.io", Resource: "statefulsets"}, "web", "404 page not found", 0, true)
	if !apierrors.IsNotFound(notServed) {
		t.Fatal("the test is wrong: both are a 404")
	}
	if !Absent(fmt.Errorf("reading: %w", gone)) || Absent(notServed) || Absent(errors.New("timeout")) || Absent(nil) {
		t.Errorf("absent: %v for an object that is gone, %v for a kind that is not served", Absent(gone), Absent(notServed))
	}
}

// everything is a cache of what a client reads.
type everything struct {
	cache.Cache
	client client.Reader
}

func (e everything) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return e.client.Get(ctx, key, o, opts...)
}

// An author of workloads chooses how many names there are.
func TestWhatIsKnownOfAWorkloadIsForgottenAfterAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheme := runtime.NewScheme()
		must.Do(t, appsv1.AddToScheme(scheme))
		api := fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{
			SubResourceGet: func(_ context.Context, _ client.Client, _ string, _, scale client.Object,
				_ ...client.SubResourceGetOption) error {
				return unstructured.SetNestedField(scale.(*unstructured.Unstructured).Object, int64(3), "spec", "replicas")
			},
		}).Build()
		w := Over(everything{client: api}, api, api, nil)
		delete(w.kinds, advancedStatefulSets.GVK.GroupKind())
		learns := func(name string) {
			set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Generation: 1}}
			must.Do(t, api.Create(t.Context(), set))
			ref := home.Ref{Group: "apps", Kind: "StatefulSet", Namespace: "default", Name: name}
			must.Do(t, w.poll(t.Context(), statefulSets.GVK, ref))
			if replicas, err := w.scaleOf(t.Context(), statefulSets, ref, set); err != nil || replicas != 3 {
				t.Fatalf("%s has %d replicas: %v", name, replicas, err)
			}
			if maker, err := w.Maker(t.Context(), "default", name); err != nil || maker != nil {
				t.Fatalf("%v makes pods that keep their addresses: %v", maker, err)
			}
			must.Do(t, api.Delete(t.Context(), set))
		}
		for i := range 100 {
			learns(fmt.Sprintf("web-%d", i))
		}
		time.Sleep(2 * keptFor)
		learns("last")
		for what, known := range map[string]*utilcache.Expiring{"scale": w.scales, "existence": w.polled, "template": w.others} {
			if known.Len() != 1 {
				t.Errorf("the %s of %d workloads is known, of 101 of which one was there lately", what, known.Len())
			}
		}
	})
}
