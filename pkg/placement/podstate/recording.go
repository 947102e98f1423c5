package podstate

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
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
)

// recording keeps the status of the PersistentPodStates of a workload up to date.
type recording struct {
	cache     client.Reader // has Pods
	live      client.Reader
	workloads *cluster.Workloads
	kruise    *openKruise
	events    events.EventRecorder
	status    *statusWriter
}

func (r *recording) setUp(mgr ctrl.Manager) error {
	c, err := controller.NewTyped("recording", mgr,
		controller.TypedOptions[home.Ref]{Reconciler: r, MaxConcurrentReconciles: 8})
	if err != nil {
		return err
	}
	itself := func(_ context.Context, ref home.Ref) []home.Ref { return []home.Ref{ref} }
	return errors.Join(
		cluster.WatchWorkloads(r.workloads, c, itself),
		c.Watch(source.TypedKind(mgr.GetCache(), &kruisev1alpha1.PersistentPodState{},
			handler.TypedEnqueueRequestsFromMapFunc(
				func(_ context.Context, s *kruisev1alpha1.PersistentPodState) []home.Ref {
					return []home.Ref{home.TargetOf(s)}
				}))),
		c.Watch(source.TypedKind(mgr.GetCache(), &cluster.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(ctx context.Context, pod *cluster.Pod) []home.Ref { return targetsOfPod(ctx, r.cache, pod) }), podMoved)),
		cluster.WatchKinds(r.workloads, c,
			func(ctx context.Context, gk schema.GroupKind) []home.Ref { return targetsOfKind(ctx, r.cache, gk) }),
		watchKruise(r.kruise, c, func(ctx context.Context) []home.Ref { return everyState(ctx, r.cache, home.TargetOf) }),
	)
}

// Reconcile updates the status of all objects for one workload.
func (r *recording) Reconcile(ctx context.Context, ref home.Ref) (reconcile.Result, error) {
	if wait := r.status.wait(ref); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	all, err := statesOf(ctx, r.cache, ref)
	if err != nil || len(all) == 0 {
		return reconcile.Result{}, err
	}
	runs, err := r.kruise.runs()
	if err != nil {
		return reconcile.Result{RequeueAfter: unknownPause}, nil
	}
	if runs {
		return r.stepAside(ctx, ref, all)
	}
	for _, s := range all[1:] {
		if err := r.status.write(ctx, ref, s, verdict{conflict: all[0].Name}); err != nil {
			return orLater(err)
		}
	}
	v, err := r.observe(ctx, ref, all[0])
	if err != nil || v == nil {
		return reconcile.Result{}, err
	}
	if err := r.status.write(ctx, ref, all[0], *v); err != nil {
		return orLater(err)
	}
	for _, m := range v.moved {
		r.events.Eventf(v.of.Reference(), m.pod.Brief(), corev1.EventTypeNormal, home.ReasonHomeMoved, "Recording",
			"pod %s is Ready on node %s, its home from now on; it was on node %s before", m.pod.GetName(), m.pod.Node(),
			m.from)
	}
	return reconcile.Result{RequeueAfter: v.retry}, nil
}

// observe returns what the status of the obeyed object should say, nil if that is what it says now, because nothing
// changes while a deleted workload has pods left.
func (r *recording) observe(ctx context.Context, ref home.Ref, s *kruisev1alpha1.PersistentPodState) (*verdict, error) {
	kept := verdict{states: s.Status.PodStates, pods: s.Status.Pods}
	w, err := r.workloads.Get(ctx, ref)
	var missing *cluster.PermissionError
	switch {
	case errors.Is(err, cluster.ErrGone):
		left, err := leftOf(ctx, r.cache, r.live, ref)
		if err != nil || left || generated(s) { // generating deletes what was generated
			return nil, err
		}
		return &verdict{pods: new(int32), recorded: finding{reasonTargetNotFound, fmt.Sprintf("%s not found", ref)}}, nil
	case errors.Is(err, cluster.ErrUnknown):
		return nil, nil // see watchKinds
	case errors.Is(err, cluster.ErrNotTarget):
		kept.degraded, kept.pods = finding{reasonUnsupportedTarget, unsupported(ref)}, nil
		return &kept, nil
	case errors.Is(err, cluster.ErrNotServed):
		kept.degraded = finding{reasonTargetNotServed, err.Error()}
		return &kept, nil
	case errors.As(err, &missing):
		kept.degraded, kept.retry = finding{reasonPermissionMissing, missing.Error()}, cluster.LookupEvery
		return &kept, nil
	case err != nil:
		return nil, err
	}
	pods, err := podsOf(ctx, r.cache, ref)
	if err != nil {
		return nil, err
	}
	nodes := cluster.NewNodes(ctx, r.cache)
	v := recordPods(&s.Spec, w, s.Status.PodStates, pods, nodes)
	return &v, nodes.Err
}

// unsupported returns why nothing is recorded for a workload.
func unsupported(ref home.Ref) string {
	switch ref.Kind {
	case "Deployment", "ReplicaSet":
		return fmt.Sprintf("pods of a %s get new names, so no pod comes back. To share addresses among them, use "+
			"the annotation %s",
			ref.Kind, stayputv1alpha1.AnnotationIdentity)
	}
	return fmt.Sprintf("unknown kind %s: add it to the controller's flag --workload-kinds", ref.GroupKind())
}

// stepAside notes on generated objects why nothing is recorded. The others are OpenKruise's alone.
func (r *recording) stepAside(ctx context.Context, ref home.Ref,
	all []*kruisev1alpha1.PersistentPodState) (reconcile.Result, error) {
	for _, s := range all {
		if !generated(s) || r.status.plain() {
			continue
		}
		err := r.status.write(ctx, ref, s, verdict{states: s.Status.PodStates, pods: s.Status.Pods, degraded: finding{
			reasonOpenKruise, "OpenKruise is running in this cluster and serves PersistentPodStates",
		}})
		if err != nil {
			return orLater(err)
		}
	}
	return reconcile.Result{}, nil
}
