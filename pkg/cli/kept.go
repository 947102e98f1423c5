package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// keptIP is what a node or a pool keeps for a pod, as its RetainedIP or its PodIP says.
type keptIP struct {
	client.Object // as it was read

	namespace, pod, identity string
	podUID                   string // of the pod that has the addresses or had them last, or that a pool gave it to
	node                     string // empty if no agent has said that the pod has its address of a pool there
	iface                    string // empty if a node keeps them
	ips, networks            []string

	phase     string
	expires   *metav1.Time // of retained addresses, nil if they are kept without an end, or that is not published yet
	retention string       // empty for until the pod is gone
	workload  *stayputv1alpha1.WorkloadReference

	whenScaled, whenDeleted string

	releasing bool
	conflict  string // which machine keeps the pod from starting, empty if there is none
}

// keptOf returns what an object says, which is a RetainedIP or a PodIP. It sets the object's kind.
func keptOf(o client.Object) *keptIP {
	k := &keptIP{Object: o}
	kind := "RetainedIP"
	switch o := o.(type) {
	case *stayputv1alpha1.RetainedIP:
		k.namespace, k.pod, k.identity = o.Namespace, o.Spec.PodName, o.Spec.Identity
		k.podUID, k.node, k.ips = o.Status.PodUID, o.Spec.NodeName, o.Status.IPs
		for _, a := range o.Status.Addresses {
			k.networks = append(k.networks, a.Network)
		}
		k.phase, k.expires, k.retention = string(o.Status.Phase), o.Status.Expires, o.Spec.Retention
		k.workload, k.whenScaled, k.whenDeleted = o.Spec.Workload, o.Spec.WhenScaled, o.Spec.WhenDeleted
		k.releasing = o.Spec.Release != ""
	case *stayputv1alpha1.PodIP:
		kind = "PodIP"
		k.namespace, k.pod, k.identity = o.Spec.Namespace, o.Spec.PodName, o.Spec.Identity
		k.podUID, k.iface, k.ips, k.networks = o.Spec.PodUID, o.Spec.Interface, []string{o.Name}, []string{o.Spec.Network}
		if a, err := stayputv1alpha1.ParsePodIPName(o.Name); err == nil {
			k.ips[0] = a.String()
		}
		k.phase, k.expires, k.retention = string(stayputv1alpha1.PodIPAllocated), o.Status.Expires, o.Spec.Retention
		k.workload, k.whenScaled, k.whenDeleted = o.Spec.Workload, o.Spec.WhenScaled, o.Spec.WhenDeleted
		k.releasing = o.Spec.Release != "" || o.DeletionTimestamp != nil
		if o.Status.PodUID == o.Spec.PodUID { // otherwise the status is about a pod that had the address before
			k.node, k.phase = o.Status.NodeName, cmp.Or(string(o.Status.Phase), k.phase)
			if o.Status.Conflict != "" {
				k.conflict = fmt.Sprintf("in use by another machine on the link of node %s, with MAC address %s",
					o.Status.NodeName, o.Status.Conflict)
			}
		}
	}
	k.retention = shortDuration(k.retention)
	o.GetObjectKind().SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind(kind))
	return k
}

// retainedIP returns the object if a node keeps the addresses, otherwise nil.
func (k *keptIP) retainedIP() *stayputv1alpha1.RetainedIP {
	r, _ := k.Object.(*stayputv1alpha1.RetainedIP)
	return r
}

// podIP returns the object if a pool keeps the address, otherwise nil.
func (k *keptIP) podIP() *stayputv1alpha1.PodIP {
	p, _ := k.Object.(*stayputv1alpha1.PodIP)
	return p
}

func (k *keptIP) kind() string { return k.GetObjectKind().GroupVersionKind().Kind }

func (k *keptIP) bound() bool    { return k.phase == string(stayputv1alpha1.PhaseBound) }
func (k *keptIP) retained() bool { return k.phase == string(stayputv1alpha1.PhaseRetained) }

// addresses returns the addresses as text.
func (k *keptIP) addresses() string { return strings.Join(k.ips, ", ") }

// keeper names the node or the pool that keeps the addresses.
func (k *keptIP) keeper() string {
	if p := k.podIP(); p != nil {
		return "pool " + p.Spec.Pool
	}
	return "node " + k.node
}

// about names the addresses and what keeps them.
func (k *keptIP) about() string {
	if k.podIP() != nil {
		return k.addresses() + " of " + k.keeper()
	}
	return k.addresses() + " on " + k.keeper()
}

// retainedIPs returns the RetainedIPs of a namespace, or of all if it is empty, sorted as people look for them.
func retainedIPs(ctx context.Context, c client.Client, namespace string) (all []*keptIP, err error) {
	var list stayputv1alpha1.RetainedIPList
	if err := c.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return nil, installed(rightTo("list retainedips", err))
	}
	for i := range list.Items {
		all = append(all, keptOf(&list.Items[i]))
	}
	slices.SortFunc(all, compareKept)
	return all, nil
}

// podIPs returns the PodIPs of the pods of a namespace, or of all if it is empty, sorted as people look for them; none
// if the cluster does not know them.
func podIPs(ctx context.Context, c client.Client, namespace string) (all []*keptIP, err error) {
	var list stayputv1alpha1.PodIPList
	if err := c.List(ctx, &list); err != nil && !meta.IsNoMatchError(err) {
		return nil, rightTo("list podips", err)
	}
	for i := range list.Items {
		if k := keptOf(&list.Items[i]); namespace == "" || k.namespace == namespace {
			all = append(all, k)
		}
	}
	slices.SortFunc(all, compareKept)
	return all, nil
}

func compareKept(a, b *keptIP) int {
	return cmp.Or(strings.Compare(a.namespace, b.namespace), comparePods(a.pod, b.pod), strings.Compare(a.iface, b.iface),
		strings.Compare(a.GetName(), b.GetName()))
}

// keptIPs returns the RetainedIPs, then the PodIPs, of a namespace, or of all if it is empty. If the PodIPs, which
// belong to no namespace, cannot be listed, unseen says why.
func keptIPs(ctx context.Context, c client.Client, namespace string) (all []*keptIP, unseen, err error) {
	all, err = retainedIPs(ctx, c, namespace)
	if err != nil {
		return nil, nil, err
	}
	pooled, unseen := podIPs(ctx, c, namespace)
	return append(all, pooled...), unseen, nil
}

// kept returns what is kept under these names, or for pods that a selector matches, in the cluster's namespace, and an
// error for each name without anything. Without the right to list PodIPs unseen says so.
func (c *cluster) kept(ctx context.Context, names []string, selector string) (
	all []*keptIP, missing []error, unseen, err error) {
	all, unseen, err = keptIPs(ctx, c, c.namespace)
	if err == nil && !errors.Is(unseen, errRight) {
		err = unseen
	}
	if err == nil {
		all, missing, err = matching(ctx, c, all, c.namespace, selector)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	all, lost := pick(all, names)
	for _, name := range lost {
		if unseen != nil {
			missing = append(missing, fmt.Errorf("no node keeps an address for %s in namespace %s; whether a pool does is "+
				"unknown", name, c.namespace))
			continue
		}
		missing = append(missing, fmt.Errorf("no address is kept for %s in namespace %s", name, c.namespace))
	}
	return all, missing, unseen, nil
}

// pick returns what is kept for the named pods, or by objects with these names, in the order of the names. Without
// names it returns all.
func pick(all []*keptIP, names []string) (picked []*keptIP, missing []string) {
	if len(names) == 0 {
		return all, nil
	}
	for _, name := range names {
		found := false
		for _, k := range all {
			if k.pod != name && k.GetName() != name {
				continue
			}
			found = true
			if !slices.Contains(picked, k) {
				picked = append(picked, k)
			}
		}
		if !found {
			missing = append(missing, name)
		}
	}
	return picked, missing
}

// comparePods sorts web-2 before web-10.
func comparePods(a, b string) int {
	stemA, ordinalA, okA := home.SplitOrdinal(a)
	stemB, ordinalB, okB := home.SplitOrdinal(b)
	if okA && okB && stemA == stemB {
		return cmp.Compare(ordinalA, ordinalB)
	}
	return strings.Compare(a, b)
}

// workloads are those for which addresses are kept, by UID. A workload that is gone is nil; an unreadable one is
// missing.
type workloads map[string]*unstructured.Unstructured

func workloadsOf(ctx context.Context, c client.Client, kept []*keptIP) workloads {
	all := workloads{}
	asked := map[string]bool{}
	for _, k := range kept {
		w := k.workload
		if w == nil || asked[w.UID] {
			continue
		}
		asked[w.UID] = true
		o := object(w.APIVersion, w.Kind)
		err := c.Get(ctx, types.NamespacedName{Namespace: k.namespace, Name: w.Name}, o)
		switch {
		case err == nil && string(o.GetUID()) == w.UID:
			all[w.UID] = o
		case err == nil || apierrors.IsNotFound(err):
			all[w.UID] = nil
		}
	}
	return all
}

// wants reports whether a workload wants a pod, if that can be told from the pod's name.
func wants(w *unstructured.Unstructured, pod string) (wanted, known bool) {
	of, err := home.WorkloadOf(w.GroupVersionKind(), w)
	if err != nil {
		return false, false
	}
	return of.Wants(pod)
}

// matching returns what is kept for pods with certain labels or, if a pod is gone, with them in the pod template of its
// workload. unknown says of which pods the workload could not be read.
func matching(ctx context.Context, c client.Client, all []*keptIP, namespace, selector string) (match []*keptIP,
	unknown []error, err error) {
	if selector == "" {
		return all, nil, nil
	}
	s, err := labels.Parse(selector)
	if err != nil {
		return nil, nil, fmt.Errorf("--selector: %w", err)
	}
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return nil, nil, rightTo("list pods", err)
	}
	ofPod := map[types.NamespacedName]labels.Set{}
	for i := range pods.Items {
		ofPod[client.ObjectKeyFromObject(&pods.Items[i])] = pods.Items[i].Labels
	}
	gone := func(k *keptIP) bool {
		_, there := ofPod[types.NamespacedName{Namespace: k.namespace, Name: k.pod}]
		return !there
	}
	ofGone := workloadsOf(ctx, c, slices.DeleteFunc(slices.Clone(all), func(k *keptIP) bool { return !gone(k) }))
	for _, k := range all {
		has := ofPod[types.NamespacedName{Namespace: k.namespace, Name: k.pod}]
		if w := k.workload; gone(k) && w != nil {
			is, known := ofGone[w.UID]
			if !known {
				unknown = append(unknown, fmt.Errorf("unknown whether --selector selects pod %s: its %s %s cannot be read",
					k.pod, w.Kind, w.Name))
				continue
			}
			if is != nil {
				has, _, _ = unstructured.NestedStringMap(is.Object, "spec", "template", "metadata", "labels")
			}
		}
		if s.Matches(has) {
			match = append(match, k)
		}
	}
	return match, unknown, nil
}

// why returns in words why addresses are kept, or will be.
func (k *keptIP) why(all workloads) string {
	if k.podIP() != nil {
		return "of " + k.keeper() + ", " + k.reason(all)
	}
	return k.reason(all)
}

// reason is why without the pool.
func (k *keptIP) reason(all workloads) string {
	w := k.workload
	switch {
	case k.conflict != "":
		return k.conflict
	case k.releasing:
		return "being released"
	case k.retention == "":
		return "until the pod is gone"
	case k.retention != stayputv1alpha1.RetentionWhileOwned && k.retained():
		return k.retention + " after the pod stopped"
	case k.retention != stayputv1alpha1.RetentionWhileOwned:
		return k.retention + " after the pod stops"
	case w == nil:
		return "while owned by a workload, not known yet"
	}
	name := w.Kind + " " + w.Name
	is, known := all[w.UID]
	switch {
	case !known:
		return "while owned by " + name
	case is == nil && k.whenDeleted == stayputv1alpha1.PolicyRetain:
		return name + " is deleted, when-deleted is Retain"
	case is == nil:
		return "while owned by " + name + ", which is deleted"
	}
	wanted, known := wants(is, k.pod)
	_, number, _ := home.SplitOrdinal(k.pod)
	switch {
	case !known:
		return "while owned by " + name
	case wanted:
		return fmt.Sprintf("while owned by %s, ordinal %d wanted", name, number)
	case k.whenScaled == stayputv1alpha1.PolicyRetain:
		return fmt.Sprintf("while owned by %s, ordinal %d not wanted, when-scaled is Retain", name, number)
	}
	return fmt.Sprintf("while owned by %s, ordinal %d not wanted", name, number)
}

// until returns when addresses become free, and how long that is from now.
func (k *keptIP) until(now time.Time) (at, left string) {
	if at = k.expiry(); at == "" {
		at = none
	}
	if left = none; k.expires != nil && k.retained() {
		left = duration.HumanDuration(max(0, k.expires.Sub(now)))
	}
	return at, left
}

// expiresNever is when addresses become free that are kept without an end.
const expiresNever = "never"

// expiry returns when retained addresses become free: a time in RFC 3339, [expiresNever], or empty if that is not known
// or they are not retained. The controller writes the expiry of a PodIP some seconds after its phase.
func (k *keptIP) expiry() string {
	switch {
	case !k.retained():
		return ""
	case k.expires != nil:
		return k.expires.UTC().Format(time.RFC3339)
	case k.retention == stayputv1alpha1.RetentionWhileOwned:
		return expiresNever
	}
	return ""
}
