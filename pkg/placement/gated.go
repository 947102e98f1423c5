package placement

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// gatedWorkloads is the ConfigMap, one in each namespace with PersistentPodStates, that is the parameter of the
// admission policy which gates the pods of recorded workloads. Its keys are Kind.group.name, its values empty.
// One object costs a pod's creation the same however many workloads it names, and a ConfigMap is known to the API
// server from its start, as a custom resource is not.
const gatedWorkloads = "stayput-gated-workloads"

// gateKey is the key of a workload; false: it is too long for one, and its pods are not gated.
func gateKey(ref workloadRef) (string, bool) {
	key := strings.Join([]string{ref.kind, ref.group, ref.name}, ".")
	return key, len(validation.IsConfigMapKey(key)) == 0
}

// gateEvery is how often the ConfigMap of a namespace is looked at, in case somebody has changed it.
const gateEvery = 10 * time.Minute

// gating says to the admission policy whose pods are to be gated.
type gating struct {
	client  client.Client
	live    client.Reader // ConfigMaps are not cached: the controller may read this one by name alone
	targets *targets
	kruise  *kruise

	mu   sync.Mutex
	said map[string]said // by namespace
}

// said is what a ConfigMap says, and until when that is believed.
type said struct {
	keys  map[string]string
	until time.Time
}

func (g *gating) setUp(mgr ctrl.Manager) error {
	c, err := controller.NewTyped("gating", mgr, controller.TypedOptions[string]{Reconciler: g, MaxConcurrentReconciles: 4})
	if err != nil {
		return err
	}
	namespaceOf := func(s *kruisev1alpha1.PersistentPodState) string { return s.Namespace }
	return errors.Join(
		c.Watch(source.TypedKind(mgr.GetCache(), &kruisev1alpha1.PersistentPodState{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(_ context.Context, s *kruisev1alpha1.PersistentPodState) []string { return []string{s.Namespace} }), stateSpecMoved)),
		watchWorkloads(g.targets, c, func(ctx context.Context, ref workloadRef) []string {
			all, err := statesOf(ctx, g.client, ref)
			if err != nil {
				log.FromContext(ctx).Error(err, "Looking up PersistentPodStates", "workload", ref.String())
			}
			if len(all) == 0 {
				return nil
			}
			return []string{ref.namespace}
		}),
		watchKruise(g.kruise, c, func(ctx context.Context) []string { return everyState(ctx, g.client, namespaceOf) }),
	)
}

// Reconcile sees to the ConfigMap of one namespace.
func (g *gating) Reconcile(ctx context.Context, namespace string) (reconcile.Result, error) {
	on, err := g.kruise.on()
	if err != nil {
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	}
	var all kruisev1alpha1.PersistentPodStateList
	if on {
		if err := g.client.List(ctx, &all, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
			return reconcile.Result{}, fmt.Errorf("listing the PersistentPodStates of namespace %s: %w", namespace, err)
		}
	}
	keys := gateKeys(all.Items, func(ref workloadRef) bool {
		w, err := g.targets.cached(ctx, ref)
		return err == nil && w != nil && w.templateAnnotated
	})
	is, err := g.says(ctx, namespace)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !maps.Equal(is, keys) || (is == nil) != (keys == nil) {
		if err := g.say(ctx, namespace, keys); err != nil {
			return orLater(err)
		}
	}
	if keys == nil {
		g.forget(namespace)
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: gateEvery}, nil
}

// gateKeys are the keys of the workloads whose pods are to be gated because of their PersistentPodStates; nil:
// none. Pods that are annotated are gated for that already. Where it is not known, both may gate.
func gateKeys(all []kruisev1alpha1.PersistentPodState, annotated func(workloadRef) bool) map[string]string {
	var keys map[string]string
	for _, s := range inOrder(all) {
		ref := targetOf(s)
		key, ok := gateKey(ref)
		if !ok || annotated(ref) {
			continue
		}
		if keys == nil {
			keys = map[string]string{}
		}
		keys[key] = ""
	}
	return keys
}

// says returns what the ConfigMap of a namespace says; nil: there is none.
func (g *gating) says(ctx context.Context, namespace string) (map[string]string, error) {
	g.mu.Lock()
	known, ok := g.said[namespace]
	g.mu.Unlock()
	if ok && time.Now().Before(known.until) {
		return known.keys, nil
	}
	var cm corev1.ConfigMap
	if err := g.live.Get(ctx, client.ObjectKey{Namespace: namespace, Name: gatedWorkloads}, &cm); err != nil {
		if !absent(err) {
			return nil, fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, gatedWorkloads, err)
		}
		g.remember(namespace, nil)
		return nil, nil
	}
	keys := cm.Data
	if keys == nil {
		keys = map[string]string{}
	}
	g.remember(namespace, keys)
	return keys, nil
}

// say makes the ConfigMap of a namespace say this; nil: it is not to be there.
func (g *gating) say(ctx context.Context, namespace string, keys map[string]string) error {
	g.forget(namespace) // whatever happens now
	if keys == nil {
		cm := &corev1.ConfigMap{}
		cm.Namespace, cm.Name = namespace, gatedWorkloads
		if err := client.IgnoreNotFound(g.client.Delete(ctx, cm)); err != nil {
			return fmt.Errorf("deleting ConfigMap %s/%s: %w", namespace, gatedWorkloads, err)
		}
		return nil
	}
	err := g.client.Apply(ctx, corev1ac.ConfigMap(gatedWorkloads, namespace).WithData(keys),
		client.ForceOwnership, client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
	if err != nil {
		return fmt.Errorf("applying ConfigMap %s/%s: %w", namespace, gatedWorkloads, err)
	}
	g.remember(namespace, keys)
	return nil
}

func (g *gating) remember(namespace string, keys map[string]string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.said == nil {
		g.said = map[string]said{}
	}
	g.said[namespace] = said{keys, time.Now().Add(gateEvery)}
}

func (g *gating) forget(namespace string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.said, namespace)
}
