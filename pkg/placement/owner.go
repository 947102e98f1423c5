package placement

import (
	"context"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// This file finds the workload that addresses belong to.

// owners remembers who controlled the pods that were deleted lately, by their names: the RetainedIP of a pod that ran
// for a moment may be published when the pod is gone, and its workload too. Lost: such addresses are kept for as long
// as those of an unknown workload.
type owners struct{ *utilcache.LRUExpireCache }

// lastOwner is who controlled a pod when it was deleted.
type lastOwner struct {
	controller *metav1.OwnerReference // nil if nothing controlled it
	heirs      bool                   // whether the pod has heirs
}

// ownersKept is longer than an agent is away when it is upgraded, and ownersMost more pods than end in that time.
const (
	ownersKept = 10 * time.Minute
	ownersMost = 10_000
)

func newOwners() owners { return owners{utilcache.NewLRUExpireCache(ownersMost)} }

// of returns who controlled the pod of a RetainedIP when it was deleted, if that is known.
func (o owners) of(ip *stayputv1alpha1.RetainedIP) (last lastOwner, known bool) {
	if value, ok := o.Get(types.NamespacedName{Namespace: ip.Namespace, Name: ip.Spec.PodName}); ok {
		last, known = value.(lastOwner)
	}
	return last, known
}

// podEvents enqueues the RetainedIPs of a pod's name, and remembers the owners of deleted pods.
type podEvents struct {
	handler.EventHandler
	releaser *releaser
}

// Create enqueues nothing for the pods that are there when the controller starts: their RetainedIPs have events of
// their own then.
func (h podEvents) Create(ctx context.Context, e event.CreateEvent,
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	if !e.IsInInitialList {
		h.EventHandler.Create(ctx, e, queue)
	}
}

func (h podEvents) Delete(ctx context.Context, e event.DeleteEvent,
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	if pod, ok := e.Object.(*cluster.Pod); ok {
		h.releaser.remember(pod)
	}
	h.EventHandler.Delete(ctx, e, queue)
}

func (r *releaser) remember(pod *cluster.Pod) {
	r.owners.Add(client.ObjectKeyFromObject(pod),
		lastOwner{metav1.GetControllerOf(pod), r.workloads.Numbers(pod.Brief())}, ownersKept)
}

// workloadOf returns what a pod's controller stands for: for a ReplicaSet its Deployment, which outlives it.
func (r *releaser) workloadOf(ctx context.Context, ip *stayputv1alpha1.RetainedIP,
	owner *metav1.OwnerReference) (stayputv1alpha1.WorkloadReference, error) {
	workload := reference(owner)
	if owner.Kind != "ReplicaSet" || owner.APIVersion != appsv1.SchemeGroupVersion.String() {
		return workload, nil
	}
	if is := ip.Spec.Workload; is != nil && is.Kind == deploymentKind && strings.HasPrefix(owner.Name, is.Name+"-") {
		return *is, nil // looked up before
	}
	set, err := r.metadata(ctx, owner.APIVersion, owner.Kind, ip.Namespace, owner.Name)
	switch {
	case cluster.Absent(err):
		return r.ofGoneReplicaSet(ctx, ip, owner)
	case err != nil:
		return workload, fmt.Errorf("looking up the Deployment of ReplicaSet %s/%s: %w", ip.Namespace, owner.Name, err)
	}
	if above := metav1.GetControllerOf(set); above != nil {
		return reference(above), nil
	}
	return workload, nil
}

const deploymentKind = "Deployment"

// ofGoneReplicaSet returns the Deployment whose name that of a ReplicaSet begins with. Without it the ReplicaSet stands
// for itself: what it made is gone with it.
func (r *releaser) ofGoneReplicaSet(ctx context.Context, ip *stayputv1alpha1.RetainedIP,
	owner *metav1.OwnerReference) (stayputv1alpha1.WorkloadReference, error) {
	workload := reference(owner)
	i := strings.LastIndexByte(owner.Name, '-') // before the hash of the template
	if i <= 0 {
		return workload, nil
	}
	above, err := r.metadata(ctx, owner.APIVersion, deploymentKind, ip.Namespace, owner.Name[:i])
	switch {
	case cluster.Absent(err):
		return workload, nil
	case err != nil:
		return workload, fmt.Errorf("looking up the Deployment of ReplicaSet %s/%s: %w", ip.Namespace, owner.Name, err)
	}
	return stayputv1alpha1.WorkloadReference{APIVersion: owner.APIVersion, Kind: deploymentKind, Name: above.Name,
		UID: string(above.UID)}, nil
}

// metadata reads the metadata of an object past the cache.
func (r *releaser) metadata(ctx context.Context, apiVersion, kind, namespace, name string) (
	*metav1.PartialObjectMetadata, error) {
	o := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: apiVersion, Kind: kind}}
	return o, r.reader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, o)
}

func reference(o *metav1.OwnerReference) stayputv1alpha1.WorkloadReference {
	return stayputv1alpha1.WorkloadReference{APIVersion: o.APIVersion, Kind: o.Kind, Name: o.Name, UID: string(o.UID)}
}

// ofIdentity returns the workload to which the other addresses of a shared identity belong, nil if none is known,
// or several are.
func (r *releaser) ofIdentity(ctx context.Context, ip *stayputv1alpha1.RetainedIP) (
	*stayputv1alpha1.WorkloadReference, error) {
	var list stayputv1alpha1.RetainedIPList
	if err := r.client.List(ctx, &list, client.InNamespace(ip.Namespace),
		client.MatchingFields{retainedByIdentity: ip.Spec.Identity}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	var workload *stayputv1alpha1.WorkloadReference
	for i := range list.Items {
		w := list.Items[i].Spec.Workload
		switch {
		case w == nil:
		case workload != nil && (w.APIVersion != workload.APIVersion || w.Kind != workload.Kind || w.Name != workload.Name):
			return nil, nil
		default:
			workload = w
		}
	}
	return workload, nil
}

// endless returns why nothing would ever end a promise that is to be kept while owned, empty if its workload does.
// heirs: a later pod can have the same name.
func endless(ip *stayputv1alpha1.RetainedIP, owner *metav1.OwnerReference, heirs bool) string {
	const asked = stayputv1alpha1.AnnotationRetainIP + ": " + stayputv1alpha1.RetentionWhileOwned
	switch {
	case ip.Spec.Retention != stayputv1alpha1.RetentionWhileOwned:
		return ""
	case owner == nil:
		return asked + " requires a workload that controls the pod, but the pod has none; the IP is not retained"
	case ip.Spec.Identity == "" && !heirs:
		return fmt.Sprintf("%s requires pods with an ordinal, which pods of a %s do not have, or the annotation %s; "+
			"the IP is not retained", asked, owner.Kind, stayputv1alpha1.AnnotationIdentity)
	}
	return ""
}

// orphan reports whether a workload made a pod that has no controller, or may have. The labels tell, which the cache
// does not keep.
func (r *releaser) orphan(ctx context.Context, ip *stayputv1alpha1.RetainedIP, uid types.UID) (bool, error) {
	pod, err := r.metadata(ctx, "v1", "Pod", ip.Namespace, ip.Spec.PodName)
	switch {
	case cluster.Absent(err):
		return true, nil // its deletion makes the controller look again
	case err != nil:
		return true, fmt.Errorf("looking up the pod of RetainedIP %s/%s: %w", ip.Namespace, ip.Name, err)
	case pod.UID != uid || metav1.GetControllerOf(pod) != nil:
		return true, nil
	}
	for _, label := range []string{appsv1.PodIndexLabel, appsv1.ControllerRevisionHashLabelKey,
		appsv1.DefaultDeploymentUniqueLabelKey} {
		if _, ok := pod.Labels[label]; ok {
			return true, nil
		}
	}
	return false, nil
}
