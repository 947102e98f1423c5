package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
	"github.com/stayput/stayput/pkg/pool"
)

// Indexes of the cached RetainedIPs.
const (
	retainedByPod      = "spec.podName"
	retainedByIdentity = "spec.identity"
	retainedByWorkload = "spec.workload" // workloadKey
)

func indexRetainedIPs(ctx context.Context, indexer client.FieldIndexer) error {
	var errs []error
	for field, value := range map[string]func(*stayputv1alpha1.RetainedIP) string{
		retainedByPod:      func(r *stayputv1alpha1.RetainedIP) string { return r.Spec.PodName },
		retainedByIdentity: func(r *stayputv1alpha1.RetainedIP) string { return r.Spec.Identity },
		retainedByWorkload: func(r *stayputv1alpha1.RetainedIP) string {
			if r.Spec.Workload == nil {
				return ""
			}
			return workloadKey(workloadOf(r))
		},
	} {
		errs = append(errs, indexer.IndexField(ctx, &stayputv1alpha1.RetainedIP{}, field, func(o client.Object) []string {
			if r, ok := o.(*stayputv1alpha1.RetainedIP); ok && value(r) != "" {
				return []string{value(r)}
			}
			return nil
		}))
	}
	return errors.Join(errs...)
}

// workloadOf names the workload of a RetainedIP that has one.
func workloadOf(r *stayputv1alpha1.RetainedIP) home.Ref {
	return home.RefOf(r.Spec.Workload.APIVersion, r.Spec.Workload.Kind, r.Namespace, r.Spec.Workload.Name)
}

// workloadKey names a workload within its namespace. A workload that is created again under the same name wants the
// addresses of the old one.
func workloadKey(ref home.Ref) string { return ref.Group + "/" + ref.Kind + "/" + ref.Name }

// releaser notes on every RetainedIP which workload it belongs to and that its pod was bound to its node, and requests
// the release of those that no workload wants any more.
type releaser struct {
	client    client.Client
	cache     client.Reader // has Pods
	reader    client.Reader // past the cache: a release is final
	workloads *cluster.Workloads
	owners    owners
	memory    *memory
	events    events.EventRecorder
	now       func() time.Time
}

func (r *releaser) setUp(mgr ctrl.Manager) error {
	c, err := ctrl.NewControllerManagedBy(mgr).
		Named("release").
		Watches(&stayputv1alpha1.RetainedIP{}, handler.EnqueueRequestsFromMapFunc(
			func(ctx context.Context, o client.Object) []reconcile.Request {
				ip, ok := o.(*stayputv1alpha1.RetainedIP)
				if !ok || r.settled(ctx, ip) {
					return nil
				}
				return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(ip)}}
			})).
		WatchesRawSource(source.Kind[client.Object](mgr.GetCache(), &cluster.Pod{},
			podEvents{handler.EnqueueRequestsFromMapFunc(r.ofPod), r}, ownerMayDiffer)).
		Build(r)
	if err != nil {
		return err
	}
	return cluster.WatchWorkloads(r.workloads, c, r.ofWorkload)
}

// ownerMayDiffer picks the changes by which a pod can get another owner, or a node: its creation, its adoption, its
// binding, its end.
var ownerMayDiffer = predicate.Funcs{
	CreateFunc: func(e event.CreateEvent) bool { return home.Annotated(e.Object.GetAnnotations()) },
	DeleteFunc: func(e event.DeleteEvent) bool { return home.Annotated(e.Object.GetAnnotations()) },
	UpdateFunc: func(e event.UpdateEvent) bool {
		was, okWas := e.ObjectOld.(*cluster.Pod)
		is, okIs := e.ObjectNew.(*cluster.Pod)
		return okWas && okIs && home.Annotated(is.GetAnnotations()) &&
			(was.GetUID() != is.GetUID() || was.Node() != is.Node() ||
				!home.SameOwner(metav1.GetControllerOf(was), metav1.GetControllerOf(is)))
	},
	GenericFunc: func(event.GenericEvent) bool { return false },
}

// settled reports whether the caches say that there is nothing to do for addresses: their pod is on their node, and
// that and its controller are noted. That is so of nearly all whenever the controller starts.
func (r *releaser) settled(ctx context.Context, ip *stayputv1alpha1.RetainedIP) bool {
	var pod cluster.Pod
	key := types.NamespacedName{Namespace: ip.Namespace, Name: ip.Spec.PodName}
	if ip.Spec.Workload == nil || !home.Scheduled(ip) ||
		r.cache.Get(ctx, key, &pod, client.UnsafeDisableDeepCopy) != nil || pod.Node() != ip.Spec.NodeName {
		return false
	}
	owner := metav1.GetControllerOf(&pod)
	return owner != nil && string(owner.UID) == ip.Spec.Workload.UID &&
		(ip.Spec.Retention != stayputv1alpha1.RetentionWhileOwned || ip.Spec.Identity != "" ||
			r.workloads.Numbers(pod.Brief()))
}

func (r *releaser) ofPod(ctx context.Context, o client.Object) []reconcile.Request {
	return r.having(ctx, o.GetNamespace(), client.MatchingFields{retainedByPod: o.GetName()})
}

func (r *releaser) ofWorkload(ctx context.Context, ref home.Ref) []reconcile.Request {
	return r.having(ctx, ref.Namespace, client.MatchingFields{retainedByWorkload: workloadKey(ref)})
}

func (r *releaser) having(ctx context.Context, namespace string, field client.MatchingFields) []reconcile.Request {
	var list stayputv1alpha1.RetainedIPList
	if err := r.client.List(ctx, &list, client.InNamespace(namespace), field, client.UnsafeDisableDeepCopy); err != nil {
		if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Cannot list RetainedIPs", "namespace", namespace)
		}
		return nil
	}
	var all []reconcile.Request
	for i := range list.Items {
		if ip := &list.Items[i]; !r.settled(ctx, ip) {
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(ip)})
		}
	}
	return all
}

// Reconcile reviews one RetainedIP.
func (r *releaser) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var ip stayputv1alpha1.RetainedIP
	if err := r.client.Get(ctx, req.NamespacedName, &ip); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if orphaned, retry, err := r.collect(ctx, &ip); err != nil || orphaned {
		if err != nil {
			err = fmt.Errorf("looking for the Node of RetainedIP %s: %w", req, err)
		}
		return reconcile.Result{RequeueAfter: retry}, err
	}
	if ip.Spec.Release != "" || !ip.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	pod, err := r.podOf(ctx, &ip)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("looking up the pod of RetainedIP %s: %w", req, err)
	}
	news := !home.Scheduled(&ip) && r.memory.scheduled(&ip, pod)
	if news {
		ip.Spec.Scheduled = home.Claimant(&ip)
	}
	switch {
	case pod != nil && metav1.GetControllerOf(pod) != nil:
		return r.withOwner(ctx, &ip, pod, news)
	case news:
		return reconcile.Result{}, r.apply(ctx, &ip, ip.Spec.Workload, false) // which brings it back here
	case pod != nil:
		return reconcile.Result{}, r.reviewUnowned(ctx, &ip, pod)
	}
	return r.withoutPod(ctx, &ip)
}

// orphanedFor is how old a RetainedIP is at least that is deleted because its Node does not exist: a restore may bring
// it before the node joins.
const orphanedFor = 10 * time.Minute

// collect deletes a RetainedIP whose Node does not exist. It reports whether there is none, and when to look again.
// Agents write their Node as the owner, by which Kubernetes deletes theirs; those that were restored from a backup of
// objects have no owner. Nothing is released: if the node comes back, its agent publishes what it keeps.
func (r *releaser) collect(ctx context.Context, cached *stayputv1alpha1.RetainedIP) (orphaned bool, retry time.Duration,
	err error) {
	node := types.NamespacedName{Name: cached.Spec.NodeName}
	if err := r.client.Get(ctx, node, &corev1.Node{}); !apierrors.IsNotFound(err) {
		return false, 0, err
	}
	if left := orphanedFor - r.now().Sub(cached.CreationTimestamp.Time); left > 0 {
		return true, left, nil
	}
	var ip stayputv1alpha1.RetainedIP // the cache has no owners
	if err := r.reader.Get(ctx, client.ObjectKeyFromObject(cached), &ip); err != nil {
		return true, 0, client.IgnoreNotFound(err)
	}
	if len(ip.OwnerReferences) > 0 || ip.Spec.NodeName != node.Name {
		return false, 0, nil
	}
	if err := r.reader.Get(ctx, node, &corev1.Node{}); !apierrors.IsNotFound(err) {
		return false, 0, err
	}
	err = r.client.Delete(ctx, &ip, client.Preconditions{UID: &ip.UID, ResourceVersion: &ip.ResourceVersion})
	if err != nil {
		return true, 0, client.IgnoreNotFound(err)
	}
	log.FromContext(ctx).Info("Deleted RetainedIP: its Node does not exist", "retainedIP", client.ObjectKeyFromObject(&ip),
		"node", node.Name)
	return true, 0, nil
}

// podOf returns the pod of addresses, nil if there is none. The cache may lack a pod that has its addresses, such as
// one from before Stayput.
func (r *releaser) podOf(ctx context.Context, ip *stayputv1alpha1.RetainedIP) (*corev1.Pod, error) {
	live := r.reader
	if ip.Status.Phase == stayputv1alpha1.PhaseRetained {
		live = nil
	}
	pod, err := cluster.PodNamed(ctx, r.cache, live, types.NamespacedName{Namespace: ip.Namespace, Name: ip.Spec.PodName})
	if err != nil || pod == nil {
		return nil, err
	}
	return pod.Brief(), nil
}

// withOwner notes which workload the addresses belong to: the controller of the pod that has them or will get them by
// its name. news: there is more to note. It releases them if nothing would ever end their promise, or if the pod has
// moved.
func (r *releaser) withOwner(ctx context.Context, ip *stayputv1alpha1.RetainedIP, pod *corev1.Pod, news bool) (
	reconcile.Result, error) {
	owner := metav1.GetControllerOf(pod)
	workload, err := r.workloadOf(ctx, ip, owner)
	if err != nil {
		return reconcile.Result{}, err
	}
	why := endless(ip, owner, r.workloads.Numbers(pod))
	if why != "" {
		regarding(r.events, pod, corev1.EventTypeWarning, home.ReasonNotOwned, why)
	}
	if news || ip.Spec.Workload == nil || *ip.Spec.Workload != workload || why != "" {
		return reconcile.Result{}, r.apply(ctx, ip, &workload, why != "")
	}
	return r.moved(ctx, ip, pod)
}

// reviewUnowned reviews the addresses of a pod without a controller. Those of an orphan stay as they are: it may be
// adopted again.
func (r *releaser) reviewUnowned(ctx context.Context, ip *stayputv1alpha1.RetainedIP, pod *corev1.Pod) error {
	why := endless(ip, nil, false)
	if ip.Spec.Workload != nil || why == "" {
		return nil
	}
	if ip.Spec.Identity != "" {
		workload, err := r.ofIdentity(ctx, ip)
		if err != nil {
			return err
		}
		if workload != nil {
			return r.apply(ctx, ip, workload, false)
		}
	}
	if orphan, err := r.orphan(ctx, ip, pod.UID); err != nil || orphan {
		return err
	}
	if err := r.apply(ctx, ip, nil, true); err != nil {
		return err
	}
	regarding(r.events, pod, corev1.EventTypeWarning, home.ReasonNotOwned, why)
	return nil
}

// rooted is for how long a pod must have been Ready on another node before its earlier addresses are released: longer
// than a crash loop's back-off or a rollout that is undone takes to show.
const rooted = 10 * time.Minute

// moved releases addresses if their policy says so and their pod has taken root on another node, which keeps addresses
// for it. The pod would return to that node, so no pod needs these.
func (r *releaser) moved(ctx context.Context, ip *stayputv1alpha1.RetainedIP, pod *corev1.Pod) (
	reconcile.Result, error) {
	if ip.Spec.WhenMoved != stayputv1alpha1.PolicyRelease || ip.Spec.Identity != "" ||
		ip.Status.Phase != stayputv1alpha1.PhaseRetained || pod.Spec.NodeName == ip.Spec.NodeName {
		return reconcile.Result{}, nil
	}
	if left := r.untilRooted(pod); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	if kept, err := r.keptFor(ctx, pod); err != nil || !kept {
		return reconcile.Result{RequeueAfter: cluster.Recheck}, err
	}
	var live corev1.Pod // a release is final
	switch err := r.reader.Get(ctx, client.ObjectKeyFromObject(pod), &live); {
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, nil // its deletion makes the controller look again
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("looking up the pod of RetainedIP %s/%s: %w", ip.Namespace, ip.Name, err)
	case live.UID != pod.UID || r.untilRooted(&live) > 0:
		return reconcile.Result{RequeueAfter: cluster.Recheck}, nil
	}
	if err := r.apply(ctx, ip, ip.Spec.Workload, true); err != nil {
		return reconcile.Result{}, err
	}
	regarding(r.events, pod, corev1.EventTypeNormal, home.ReasonReleased, fmt.Sprintf(
		"releasing %s on node %s: the pod has moved to node %s and is Ready there",
		strings.Join(ip.Status.IPs, ", "), ip.Spec.NodeName, pod.Spec.NodeName))
	return reconcile.Result{}, nil
}

// untilRooted returns when to look whether a pod has taken root; zero or less: it has.
func (r *releaser) untilRooted(pod *corev1.Pod) time.Duration {
	if pod.Spec.NodeName == "" || pod.DeletionTimestamp != nil {
		return cluster.Recheck
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return rooted - r.now().Sub(c.LastTransitionTime.Time)
		}
	}
	return cluster.Recheck
}

// keptFor reports whether the node of a pod keeps the addresses that it has.
func (r *releaser) keptFor(ctx context.Context, pod *corev1.Pod) (bool, error) {
	var list stayputv1alpha1.RetainedIPList
	if err := r.client.List(ctx, &list, client.InNamespace(pod.Namespace), client.MatchingFields{retainedByPod: pod.Name},
		client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	return slices.ContainsFunc(list.Items, func(ip stayputv1alpha1.RetainedIP) bool {
		return ip.Spec.NodeName == pod.Spec.NodeName && ip.Status.Phase == stayputv1alpha1.PhaseBound &&
			ip.Status.PodUID == string(pod.UID) && home.Keeps(&ip, r.now())
	}), nil
}

// withoutPod releases the addresses if their policy says so and their workload no longer wants them.
func (r *releaser) withoutPod(ctx context.Context, ip *stayputv1alpha1.RetainedIP) (reconcile.Result, error) {
	whenScaled := ip.Spec.WhenScaled == stayputv1alpha1.PolicyRelease
	whenDeleted := ip.Spec.WhenDeleted == stayputv1alpha1.PolicyRelease
	switch {
	case ip.Status.Phase != stayputv1alpha1.PhaseRetained:
		return reconcile.Result{}, nil
	case ip.Spec.Workload == nil:
		return r.recall(ctx, ip, whenScaled || whenDeleted)
	case !whenScaled && !whenDeleted:
		return reconcile.Result{}, nil
	}
	w := ip.Spec.Workload
	keep := pool.Keep{WhileOwned: true, Scaled: whenScaled, Deleted: whenDeleted} // the node knows until when
	is, retry, err := r.workloads.Wanted(ctx, ip.Namespace, *w, ip.Spec.PodName, keep,
		func() (cluster.Siblings, error) { return r.siblings(ctx, ip) })
	if cluster.Unreadable(err) {
		r.events.Eventf(ip, nil, corev1.EventTypeWarning, home.ReasonOwnerUnreadable, "Releasing",
			"keeping %s of pod %s, although its workload may be gone: %s", strings.Join(ip.Status.IPs, ", "), ip.Spec.PodName,
			err)
		return reconcile.Result{RequeueAfter: cluster.Recheck}, nil
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("looking up the workload of RetainedIP %s/%s: %w", ip.Namespace, ip.Name, err)
	}
	free, why, _ := keep.Ends(time.Time{}, time.Time{}, is)
	if !free {
		return reconcile.Result{RequeueAfter: retry}, nil
	}
	if err := r.apply(ctx, ip, w, true); err != nil {
		return reconcile.Result{}, err
	}
	about := &corev1.ObjectReference{
		APIVersion: w.APIVersion, Kind: w.Kind, Namespace: ip.Namespace, Name: w.Name, UID: types.UID(w.UID),
	}
	r.events.Eventf(about, ip, corev1.EventTypeNormal, home.ReasonReleased, "Releasing",
		"releasing %s of pod %s of %s %s on node %s: %s",
		strings.Join(ip.Status.IPs, ", "), ip.Spec.PodName, w.Kind, w.Name, ip.Spec.NodeName, why)
	return reconcile.Result{}, nil
}

// recall finds the workload of addresses that have neither a pod nor a workload: the pod ran for a moment only, no
// controller ran while it did, or the object was deleted and the agent published it again, which it does without the
// workload. It is told by the pod, if that was deleted lately, else by the other addresses of a shared identity, else
// by the pod's name, if the workload exists and numbers its pods. Other addresses stay until they expire: an unknown
// owner is no reason to release them. ends: their policy has them end with their workload, or once it is smaller.
func (r *releaser) recall(ctx context.Context, ip *stayputv1alpha1.RetainedIP, ends bool) (reconcile.Result, error) {
	last, known := r.owners.of(ip)
	switch why := endless(ip, last.controller, last.heirs); {
	case !known:
	case why != "" && (last.controller != nil || ip.Spec.Identity == "" && !last.heirs):
		if err := r.apply(ctx, ip, nil, true); err != nil {
			return reconcile.Result{}, err
		}
		r.events.Eventf(ip, nil, corev1.EventTypeWarning, home.ReasonNotOwned, "Releasing", "%s", why)
		return reconcile.Result{}, nil
	case last.controller != nil:
		workload, err := r.workloadOf(ctx, ip, last.controller)
		if err != nil {
			return reconcile.Result{}, err
		}
		return reconcile.Result{}, r.apply(ctx, ip, &workload, false) // which brings it back here
	}
	if !ends {
		return reconcile.Result{}, nil
	}
	if ip.Spec.Identity != "" { // the pod's name does not tell
		workload, err := r.ofIdentity(ctx, ip)
		if err != nil || workload == nil {
			return reconcile.Result{RequeueAfter: cluster.Recheck}, err
		}
		return reconcile.Result{}, r.apply(ctx, ip, workload, false)
	}
	stem, _, ok := home.SplitOrdinal(ip.Spec.PodName)
	if !ok {
		return reconcile.Result{}, nil
	}
	workload, err := r.workloads.Maker(ctx, ip.Namespace, stem)
	switch {
	case errors.Is(err, cluster.ErrUnknown), errors.As(err, new(*cluster.PermissionError)), apierrors.IsForbidden(err):
		log.FromContext(ctx).Info("Keeping addresses of an unknown workload", "err", err)
		return reconcile.Result{RequeueAfter: cluster.Recheck}, nil
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("looking for the workload of RetainedIP %s/%s: %w", ip.Namespace, ip.Name, err)
	case workload == nil:
		return reconcile.Result{RequeueAfter: cluster.Recheck}, nil
	}
	return reconcile.Result{}, r.apply(ctx, ip, workload, false)
}

// siblings returns the pods that have addresses of the same workload.
func (r *releaser) siblings(ctx context.Context, ip *stayputv1alpha1.RetainedIP) (of cluster.Siblings, err error) {
	var list stayputv1alpha1.RetainedIPList
	err = r.client.List(ctx, &list, client.InNamespace(ip.Namespace),
		client.MatchingFields{retainedByWorkload: workloadKey(workloadOf(ip))}, client.UnsafeDisableDeepCopy)
	for i := range list.Items {
		of.All = append(of.All, list.Items[i].Spec.PodName)
		if list.Items[i].Status.Phase == stayputv1alpha1.PhaseBound {
			of.Bound = append(of.Bound, list.Items[i].Spec.PodName)
		}
	}
	return of, err
}

// apply writes the fields of a RetainedIP that the controller owns: spec.scheduled as ip has it, the workload, which is
// nil if it is not known, and whether to release the addresses.
func (r *releaser) apply(ctx context.Context, ip *stayputv1alpha1.RetainedIP, w *stayputv1alpha1.WorkloadReference,
	release bool) error {
	spec := map[string]any{}
	if w != nil {
		spec["workload"] = map[string]any{"apiVersion": w.APIVersion, "kind": w.Kind, "name": w.Name, "uid": w.UID}
	}
	if release {
		spec["release"] = string(stayputv1alpha1.ReleaseNow)
	}
	if ip.Spec.Scheduled != "" {
		spec["scheduled"] = ip.Spec.Scheduled
	}
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind("RetainedIP"))
	object.SetNamespace(ip.Namespace)
	object.SetName(ip.Name)
	object.SetUID(ip.UID)
	object.SetResourceVersion(ip.ResourceVersion)
	err := r.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(object),
		client.ForceOwnership, client.FieldOwner(stayputv1alpha1.ControllerFieldManager))
	if err != nil {
		return fmt.Errorf("applying RetainedIP %s/%s: %w", ip.Namespace, ip.Name, err)
	}
	return nil
}
