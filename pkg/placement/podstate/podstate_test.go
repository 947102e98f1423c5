package podstate

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/must"
)

// kruise is an informer of OpenKruise's webhooks: of none.
type kruise struct {
	cache.SharedIndexInformer
	synced bool
}

func (k kruise) HasSynced() bool       { return k.synced }
func (k kruise) GetStore() cache.Store { return cache.NewStore(cache.MetaNamespaceKeyFunc) }

func TestTheWorkloadsThatPersistentPodStatesAreForAreFoundInTheCache(t *testing.T) {
	scheme := fake.NewClientBuilder().Build().Scheme()
	must.Do(t, kruisev1alpha1.AddToScheme(scheme))
	state := object("web", 0)
	state.Spec.TargetReference = kruisev1alpha1.TargetReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web"}
	cached := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&state).
		WithIndex(&kruisev1alpha1.PersistentPodState{}, statesByTarget, func(o client.Object) []string {
			return []string{indexKey(home.TargetOf(o.(*kruisev1alpha1.PersistentPodState)))}
		}).Build()
	r := &Records{client: cached, kruise: &openKruise{informer: kruise{synced: true}}}
	for name, c := range map[string]struct {
		namespace string
		owner     metav1.OwnerReference
		want      bool
	}{
		"recorded": {state.Namespace, metav1.OwnerReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web"}, true},
		"of another version of its group": {state.Namespace,
			metav1.OwnerReference{APIVersion: "apps/v2", Kind: "StatefulSet", Name: "web"}, true},
		"of another name": {state.Namespace,
			metav1.OwnerReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "we"}, false},
		"of another group": {state.Namespace,
			metav1.OwnerReference{APIVersion: "a.io/v1", Kind: "StatefulSet", Name: "web"}, false},
		"of another namespace": {"other", metav1.OwnerReference{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web"}, false},
	} {
		if is, err := r.Target(t.Context(), c.namespace, &c.owner); err != nil || is != c.want {
			t.Errorf("a workload %s: %v, %v", name, is, err)
		}
	}
	r.kruise = &openKruise{informer: kruise{}}
	if _, err := r.Target(t.Context(), state.Namespace, &metav1.OwnerReference{}); err == nil {
		t.Error("it is known though OpenKruise may run")
	}
	r = nil // without the definition
	if is, err := r.Target(t.Context(), "any", &metav1.OwnerReference{}); is || err != nil {
		t.Errorf("without PersistentPodStates: %v, %v", is, err)
	}
}
