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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// retainedIPs returns the RetainedIPs of a namespace, or of all if it is empty, sorted as people look for them.
func retainedIPs(ctx context.Context, c client.Client, namespace string) ([]stayputv1alpha1.RetainedIP, error) {
	var list stayputv1alpha1.RetainedIPList
	if err := c.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return nil, installed(rightTo("list retainedips", err))
	}
	for i := range list.Items {
		list.Items[i].SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind("RetainedIP"))
	}
	slices.SortFunc(list.Items, func(a, b stayputv1alpha1.RetainedIP) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), comparePods(a.Spec.PodName, b.Spec.PodName),
			strings.Compare(a.Spec.NodeName, b.Spec.NodeName))
	})
	return list.Items, nil
}

// kept returns the RetainedIPs and the PodIPs of the namespace that are named, or that a selector matches, and an error
// for each name without one. Without the right to list PodIPs, which belong to no namespace, unseen says so.
func (c *cluster) kept(ctx context.Context, names []string, selector string) (
	ips []stayputv1alpha1.RetainedIP, pooled []stayputv1alpha1.PodIP, missing []error, unseen, err error) {
	ips, err = retainedIPs(ctx, c, c.namespace)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	all, err := podIPs(ctx, c, c.namespace)
	if errors.Is(err, errRight) {
		unseen, err = err, nil
	}
	if err != nil {
		return nil, nil, nil, nil, err
	}
	both, err := matching(ctx, c, append(slices.Clone(ips), retainedAs(all)...), c.namespace, selector)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	both, lost := pick(both, names)
	ips = nil
	for _, r := range both {
		i := slices.IndexFunc(all, func(p stayputv1alpha1.PodIP) bool { return r.UID == p.UID && r.Name == p.Name })
		if i >= 0 {
			pooled = append(pooled, all[i])
		} else {
			ips = append(ips, r)
		}
	}
	for _, name := range lost {
		missing = append(missing, fmt.Errorf("no address is kept for %s in namespace %s", name, c.namespace))
	}
	return ips, pooled, missing, unseen, nil
}

// pick returns the RetainedIPs of the named pods, or with these names, in the order of the names. Without names it
// returns all.
func pick(ips []stayputv1alpha1.RetainedIP, names []string) (picked []stayputv1alpha1.RetainedIP, missing []string) {
	if len(names) == 0 {
		return ips, nil
	}
	seen := map[string]bool{}
	for _, name := range names {
		found := false
		for _, r := range ips {
			if r.Spec.PodName != name && r.Name != name {
				continue
			}
			found = true
			if !seen[r.Name] {
				picked = append(picked, r)
			}
			seen[r.Name] = true
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

// workloads are the workloads of RetainedIPs by UID. One that is gone is nil; one that cannot be read is missing.
type workloads map[string]*unstructured.Unstructured

func workloadsOf(ctx context.Context, c client.Client, ips []stayputv1alpha1.RetainedIP) workloads {
	all := workloads{}
	asked := map[string]bool{}
	for _, r := range ips {
		w := r.Spec.Workload
		if w == nil || asked[w.UID] {
			continue
		}
		asked[w.UID] = true
		o := &unstructured.Unstructured{}
		o.SetAPIVersion(w.APIVersion)
		o.SetKind(w.Kind)
		err := c.Get(ctx, types.NamespacedName{Namespace: r.Namespace, Name: w.Name}, o)
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

// matching returns the RetainedIPs whose pod has certain labels or, if it is gone, the pod template of its workload.
func matching(ctx context.Context, c client.Client, ips []stayputv1alpha1.RetainedIP, namespace, selector string) (
	[]stayputv1alpha1.RetainedIP, error) {
	if selector == "" {
		return ips, nil
	}
	s, err := labels.Parse(selector)
	if err != nil {
		return nil, fmt.Errorf("--selector: %w", err)
	}
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return nil, err
	}
	ofPod := map[types.NamespacedName]labels.Set{}
	for i := range pods.Items {
		ofPod[client.ObjectKeyFromObject(&pods.Items[i])] = pods.Items[i].Labels
	}
	var without []stayputv1alpha1.RetainedIP
	for _, r := range ips {
		if _, there := ofPod[types.NamespacedName{Namespace: r.Namespace, Name: r.Spec.PodName}]; !there {
			without = append(without, r)
		}
	}
	all := workloadsOf(ctx, c, without)
	var match []stayputv1alpha1.RetainedIP
	for _, r := range ips {
		has, there := ofPod[types.NamespacedName{Namespace: r.Namespace, Name: r.Spec.PodName}]
		if w := r.Spec.Workload; !there && w != nil && all[w.UID] != nil {
			has, _, _ = unstructured.NestedStringMap(all[w.UID].Object, "spec", "template", "metadata", "labels")
		}
		if s.Matches(has) {
			match = append(match, r)
		}
	}
	return match, nil
}

// reason returns in words why addresses are kept, or will be.
func reason(r *stayputv1alpha1.RetainedIP, all workloads) string {
	if r.Spec.Release {
		return "being released"
	}
	if r.Spec.Retention != stayputv1alpha1.RetentionWhileOwned {
		if r.Status.Phase == stayputv1alpha1.PhaseBound {
			return r.Spec.Retention + " after the pod stops"
		}
		return r.Spec.Retention + " after the pod stopped"
	}
	w := r.Spec.Workload
	if w == nil {
		return "while owned, by a workload that is not known yet"
	}
	name := w.Kind + " " + w.Name
	is, known := all[w.UID]
	switch {
	case !known:
		return "while owned by " + name
	case is == nil && r.Spec.WhenDeleted == stayputv1alpha1.PolicyRetain:
		return name + " is deleted, when-deleted is Retain"
	case is == nil:
		return "while owned by " + name + ", which is deleted"
	}
	wanted, known := wants(is, r.Spec.PodName)
	_, number, _ := home.SplitOrdinal(r.Spec.PodName)
	switch {
	case !known:
		return "while owned by " + name
	case wanted:
		return fmt.Sprintf("while owned by %s, ordinal %d wanted", name, number)
	case r.Spec.WhenScaled == stayputv1alpha1.PolicyRetain:
		return fmt.Sprintf("while owned by %s, ordinal %d not wanted, when-scaled is Retain", name, number)
	}
	return fmt.Sprintf("while owned by %s, ordinal %d not wanted", name, number)
}

// until returns when addresses become free, and how long that is from now.
func until(r *stayputv1alpha1.RetainedIP, now time.Time) (at, left string) {
	switch {
	case r.Status.Phase != stayputv1alpha1.PhaseRetained:
		return none, none
	case r.Status.Expires == stayputv1alpha1.ExpiresNever:
		return stayputv1alpha1.ExpiresNever, none
	}
	t, err := time.Parse(time.RFC3339, r.Status.Expires)
	if err != nil {
		return r.Status.Expires, none // a later version's
	}
	return r.Status.Expires, duration.HumanDuration(max(0, t.Sub(now)))
}

func workloadName(r *stayputv1alpha1.RetainedIP) string {
	if w := r.Spec.Workload; w != nil {
		return w.Kind + "/" + w.Name
	}
	return none
}

// ipsOf returns the addresses of a RetainedIP as text.
func ipsOf(r *stayputv1alpha1.RetainedIP) string { return strings.Join(r.Status.IPs, ", ") }
