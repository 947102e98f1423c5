package cluster

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// AddToScheme registers, with the scheme of a cache, nodes as they are, and [Pod] as the type of pods.
func AddToScheme(s *runtime.Scheme) {
	s.AddKnownTypes(corev1.SchemeGroupVersion, &Pod{}, &PodList{}, &corev1.Node{}, &corev1.NodeList{})
	metav1.AddToGroupVersion(s, corev1.SchemeGroupVersion)
}

// Indexes makes indexes of objects in a namespace. Unlike those of the cache's own IndexField they find objects within
// one namespace only, and take half the memory.
func Indexes(c cache.Informers) client.FieldIndexer { return indexes{c} }

type indexes struct{ cache.Informers }

// IndexField makes List with client.InNamespace and client.MatchingFields find objects by a field.
func (i indexes) IndexField(ctx context.Context, of client.Object, field string, extract client.IndexerFunc) error {
	informer, err := i.GetInformer(ctx, of, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	// The names are those that the cache's List asks for.
	return informer.AddIndexers(toolscache.Indexers{"field:" + field: func(o any) ([]string, error) {
		object, ok := o.(client.Object)
		if !ok {
			return nil, fmt.Errorf("an object of type %T", o)
		}
		values := extract(object)
		for i, value := range values {
			values[i] = object.GetNamespace() + "/" + value
		}
		return values, nil
	}})
}
