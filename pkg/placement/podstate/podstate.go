// Package podstate serves PersistentPodStates, the API of OpenKruise: it generates them from the annotations of
// workloads, records in them where pods are Ready, says whose pods are to be gated because of them, and steps aside
// where OpenKruise serves them itself.
//
// Each loop is a type that owns its state; what they share is read-only: the caches, the workloads, and whether
// OpenKruise runs. While that is unknown no loop does anything.
package podstate

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// Records looks up what is recorded. A nil Records has nothing recorded, because PersistentPodStates cannot be read.
type Records struct {
	client    client.Reader
	workloads *cluster.Workloads
	kruise    *openKruise
}

// Add registers the loops with a manager. If PersistentPodStates cannot be read, the result is nil and the manager ends
// with an error as soon as they can. leads reports whether this replica leads, uninstalling whether stayput is being
// uninstalled.
func Add(ctx context.Context, mgr ctrl.Manager, w *cluster.Workloads, leads, uninstalling func() bool) (*Records,
	error) {
	if ok, err := readable(ctx, mgr.GetAPIReader()); err != nil {
		return nil, err
	} else if !ok {
		mgr.GetLogger().Info("Placing pods without PersistentPodStates, which cannot be read: their CRD is missing, or " +
			"OpenKruise's webhook does not respond")
		return nil, mgr.Add(without{mgr.GetAPIReader()})
	}
	if err := errors.Join(indexPods(ctx, cluster.Indexes(mgr.GetCache())),
		indexStates(ctx, mgr.GetFieldIndexer())); err != nil {
		return nil, err
	}
	k, err := newOpenKruise(mgr)
	if err != nil {
		return nil, err
	}
	to := cluster.Recorder(mgr.GetEventRecorder(stayputv1alpha1.ControllerFieldManager))
	generate := &generating{client: mgr.GetClient(), cache: mgr.GetCache(), live: mgr.GetAPIReader(), workloads: w,
		kruise: k, events: to}
	record := &recording{cache: mgr.GetCache(), live: mgr.GetAPIReader(), workloads: w, kruise: k, events: to,
		status: &statusWriter{client: mgr.GetClient(), now: time.Now}}
	gate := &gating{client: mgr.GetClient(), live: mgr.GetAPIReader(), kruise: k, uninstalling: uninstalling}
	return &Records{mgr.GetClient(), w, k}, errors.Join(
		metrics.Registry.Register(newStateMetrics(mgr.GetClient(), leads)),
		generate.setUp(mgr), record.setUp(mgr), gate.setUp(mgr),
	)
}

// Target reports whether a PersistentPodState is for the workload that owns a pod, by what is cached: its pods are
// gated. An error means that it is not known.
func (r *Records) Target(ctx context.Context, namespace string, owner *metav1.OwnerReference) (bool, error) {
	if r == nil {
		return false, nil
	}
	runs, err := r.kruise.runs()
	if err != nil || runs {
		return false, err
	}
	all, err := statesOf(ctx, r.client, home.RefOf(owner.APIVersion, owner.Kind, namespace, owner.Name))
	return len(all) > 0, err
}

// Of returns what is recorded of a pod, nil if nothing is, as always while OpenKruise runs. An error means that it is
// not known. The result is the cache's own and must not be changed.
func (r *Records) Of(ctx context.Context, pod *corev1.Pod) (*home.Record, error) {
	if r == nil {
		return nil, nil
	}
	runs, err := r.kruise.runs()
	if err != nil {
		return nil, err
	}
	ref, _, ok := r.workloads.Of(pod)
	if runs || !ok {
		return nil, nil
	}
	all, err := statesOf(ctx, r.client, ref)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	return home.RecordIn(all[0], pod.Name), nil
}
