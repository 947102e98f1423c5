package podstate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/placement/gate"
)

// gateEvery is how often the ConfigMap of a namespace is read again, in case it was changed.
const gateEvery = 10 * time.Minute

// gating tells the admission policy whose pods to gate. Where a webhook gates them, that is for the policies to come.
type gating struct {
	client client.Client
	live   client.Reader // ConfigMaps are not cached: the controller may only read this one by name
	kruise *openKruise
	// uninstalling reports whether stayput is being uninstalled: then package uninstall deletes the ConfigMaps.
	uninstalling func() bool

	mu   sync.Mutex
	said map[string]said // by namespace
}

// said is what a ConfigMap says, and until when that is trusted. Empty: there is none.
type said struct {
	lines string
	until time.Time
}

func (g *gating) setUp(mgr ctrl.Manager) error {
	c, err := controller.NewTyped("gating", mgr,
		controller.TypedOptions[string]{Reconciler: g, MaxConcurrentReconciles: 4})
	if err != nil {
		return err
	}
	namespaceOf := func(s *kruisev1alpha1.PersistentPodState) string { return s.Namespace }
	return errors.Join(
		c.Watch(source.TypedKind(mgr.GetCache(), &kruisev1alpha1.PersistentPodState{},
			handler.TypedEnqueueRequestsFromMapFunc(
				func(_ context.Context, s *kruisev1alpha1.PersistentPodState) []string { return []string{s.Namespace} }),
			stateSpecMoved)),
		watchKruise(g.kruise, c, func(ctx context.Context) []string { return everyState(ctx, g.client, namespaceOf) }),
	)
}

// Reconcile brings the ConfigMap of one namespace up to date.
func (g *gating) Reconcile(ctx context.Context, namespace string) (reconcile.Result, error) {
	if g.uninstalling() {
		return reconcile.Result{}, nil
	}
	runs, err := g.kruise.runs()
	if err != nil {
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	}
	var all kruisev1alpha1.PersistentPodStateList
	if !runs {
		if err := g.client.List(ctx, &all, client.InNamespace(namespace), client.UnsafeDisableDeepCopy); err != nil {
			return reconcile.Result{}, fmt.Errorf("listing the PersistentPodStates of namespace %s: %w", namespace, err)
		}
	}
	lines := gateLines(all.Items)
	is, err := g.says(ctx, namespace)
	if err != nil {
		return reconcile.Result{}, err
	}
	if is != lines {
		if err := g.say(ctx, namespace, lines); err != nil {
			return orLater(err)
		}
	}
	if lines == "" {
		g.forget(namespace)
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: gateEvery}, nil
}

// gateLines names the workloads whose pods are gated because of their PersistentPodStates, empty if there are none. The
// policy leaves annotated pods alone, which are gated anyway.
func gateLines(all []kruisev1alpha1.PersistentPodState) string {
	names := map[string]struct{}{}
	for i := range all {
		ref := home.TargetOf(&all[i])
		names[gate.Line(ref.Kind, ref.Group, ref.Name)] = struct{}{}
	}
	if len(names) == 0 {
		return ""
	}
	return "\n" + strings.Join(slices.Sorted(maps.Keys(names)), "\n") + "\n"
}

// says returns what the ConfigMap of a namespace says, empty if there is none.
func (g *gating) says(ctx context.Context, namespace string) (string, error) {
	g.mu.Lock()
	known, ok := g.said[namespace]
	g.mu.Unlock()
	if ok && time.Now().Before(known.until) {
		return known.lines, nil
	}
	var cm corev1.ConfigMap
	if err := g.live.Get(ctx, client.ObjectKey{Namespace: namespace, Name: home.GatedWorkloads}, &cm); err != nil {
		if !cluster.Absent(err) {
			return "", fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, home.GatedWorkloads, err)
		}
		g.remember(namespace, "")
		return "", nil
	}
	lines := cm.Data[gate.WorkloadsKey]
	if _, labelled := cm.Labels[gate.WorkloadsLabel]; lines == "" || !labelled {
		lines = "nothing" // differs from anything that it should say
	}
	g.remember(namespace, lines)
	return lines, nil
}

// say makes the ConfigMap of a namespace say this, or deletes it if that is empty.
func (g *gating) say(ctx context.Context, namespace, lines string) error {
	g.forget(namespace) // a write that fails may have happened
	if lines == "" {
		cm := &corev1.ConfigMap{}
		cm.Namespace, cm.Name = namespace, home.GatedWorkloads
		if err := client.IgnoreNotFound(g.client.Delete(ctx, cm)); err != nil {
			return fmt.Errorf("deleting ConfigMap %s/%s: %w", namespace, home.GatedWorkloads, err)
		}
		return nil
	}
	err := g.client.Apply(ctx,
		corev1ac.ConfigMap(home.GatedWorkloads, namespace).WithLabels(map[string]string{gate.WorkloadsLabel: ""}).
			WithData(map[string]string{gate.WorkloadsKey: lines}),
		client.ForceOwnership, client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
	if err != nil {
		return fmt.Errorf("applying ConfigMap %s/%s: %w", namespace, home.GatedWorkloads, err)
	}
	g.remember(namespace, lines)
	return nil
}

func (g *gating) remember(namespace, lines string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.said == nil {
		g.said = map[string]said{}
	}
	g.said[namespace] = said{lines, time.Now().Add(gateEvery)}
}

func (g *gating) forget(namespace string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.said, namespace)
}
