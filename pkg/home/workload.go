package home

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Ref names a workload, regardless of the served version of its kind.
type Ref struct{ Group, Kind, Namespace, Name string }

// RefOf returns the Ref of a workload that is named by its API version.
func RefOf(apiVersion, kind, namespace, name string) Ref {
	group, _, versioned := strings.Cut(apiVersion, "/")
	if !versioned {
		group = "" // of the core API
	}
	return Ref{group, kind, namespace, name}
}

// OwnerOf returns the controller of a pod and its UID.
func OwnerOf(pod metav1.Object) (Ref, types.UID, bool) {
	owner := metav1.GetControllerOf(pod)
	if owner == nil {
		return Ref{}, "", false
	}
	return RefOf(owner.APIVersion, owner.Kind, pod.GetNamespace(), owner.Name), owner.UID, true
}

func (r Ref) String() string { return fmt.Sprintf("%s %s/%s", r.GroupKind(), r.Namespace, r.Name) }

// GroupKind returns the kind of the workload.
func (r Ref) GroupKind() schema.GroupKind { return schema.GroupKind{Group: r.Group, Kind: r.Kind} }

// Key returns the name of the workload as an object.
func (r Ref) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: r.Namespace, Name: r.Name}
}

// Workload is what the rules need to know of the owner of pods.
type Workload struct {
	Ref         Ref
	APIVersion  string
	UID         types.UID
	Annotations map[string]string
	// Template is the annotations of its pod template, as far as they are known; those of a kind that is read by its
	// metadata only are not.
	Template map[string]string
	// Replicas is how many pods are wanted: those with the first ordinals from start on that are not reserved.
	Replicas int32
	start    int64
	reserved []ordinals
}

// ordinals are those from the first to the last, both included.
type ordinals struct{ first, last int64 }

// WorkloadOf reads a workload: a *StatefulSet, an unstructured object with the fields of one (OpenKruise's has
// spec.reserveOrdinals too), or mere metadata, which leaves Replicas for the caller to set.
func WorkloadOf(gvk schema.GroupVersionKind, o metav1.Object) (*Workload, error) {
	w := &Workload{
		Ref:        Ref{gvk.Group, gvk.Kind, o.GetNamespace(), o.GetName()},
		APIVersion: gvk.GroupVersion().String(), UID: o.GetUID(), Annotations: o.GetAnnotations(), Replicas: 1,
	}
	switch o := o.(type) {
	case *appsv1.StatefulSet:
		w.Template = o.Spec.Template.Annotations
		if o.Spec.Replicas != nil {
			w.Replicas = *o.Spec.Replicas
		}
		if o.Spec.Ordinals != nil {
			w.start = int64(o.Spec.Ordinals.Start)
		}
	case *unstructured.Unstructured:
		return w, w.read(o.Object)
	}
	return w, nil
}

func (w *Workload) read(o map[string]any) error {
	replicas, found, err := unstructured.NestedInt64(o, "spec", "replicas")
	if err != nil {
		return err
	}
	if found {
		w.Replicas = int32(replicas)
	}
	if w.start, _, err = unstructured.NestedInt64(o, "spec", "ordinals", "start"); err != nil {
		return err
	}
	w.Template, _, err = unstructured.NestedStringMap(o, "spec", "template", "metadata", "annotations")
	if err != nil {
		return err
	}
	reserved, _, err := unstructured.NestedSlice(o, "spec", "reserveOrdinals")
	if err != nil {
		return err
	}
	w.reserved, err = parseReserved(reserved)
	return err
}

// parseReserved reads ordinals and ranges of them: 3, "3", "5-7". The result is sorted and does not overlap.
func parseReserved(list []any) ([]ordinals, error) {
	var all []ordinals
	for _, v := range list {
		first, last, isRange := strings.Cut(fmt.Sprint(v), "-")
		if !isRange {
			last = first
		}
		var r ordinals
		var err, errLast error
		r.first, err = strconv.ParseInt(strings.TrimSpace(first), 10, 32)
		r.last, errLast = strconv.ParseInt(strings.TrimSpace(last), 10, 32)
		if err = errors.Join(err, errLast); err != nil {
			return nil, fmt.Errorf("spec.reserveOrdinals: %v is not valid: %w", v, err)
		}
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b ordinals) int { return int(a.first - b.first) })
	var merged []ordinals
	for _, r := range all {
		if n := len(merged); n > 0 && r.first <= merged[n-1].last+1 {
			merged[n-1].last = max(merged[n-1].last, r.last)
			continue
		}
		merged = append(merged, r)
	}
	return merged, nil
}

// Wants reports whether the workload wants a pod of this name. If the name does not end in an ordinal, numbered is
// false and the size of the workload does not tell.
func (w *Workload) Wants(pod string) (wanted, numbered bool) {
	stem, o, numbered := SplitOrdinal(pod)
	if !numbered || stem != w.Ref.Name {
		return false, false
	}
	return w.wantsOrdinal(o), true
}

func (w *Workload) wantsOrdinal(o int64) bool {
	if o < w.start {
		return false
	}
	before := o - w.start // wanted ordinals below o, if none were reserved
	for _, r := range w.reserved {
		if r.first <= o && o <= r.last {
			return false
		}
		if first, last := max(r.first, w.start), min(r.last, o-1); first <= last {
			before -= last - first + 1
		}
	}
	return before < int64(w.Replicas)
}

// Reference returns the workload as the subject of an Event.
func (w *Workload) Reference() *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: w.APIVersion, Kind: w.Ref.Kind, Namespace: w.Ref.Namespace,
		Name: w.Ref.Name, UID: w.UID}
}

// SplitOrdinal splits the name of a pod into the name of its workload and its ordinal, written as StatefulSet writes
// it: web-01 and web--1 are no pods of web.
func SplitOrdinal(pod string) (workload string, ordinal int64, ok bool) {
	i := strings.LastIndexByte(pod, '-')
	if i <= 0 {
		return "", 0, false
	}
	workload, digits := pod[:i], pod[i+1:]
	ordinal, err := strconv.ParseInt(digits, 10, 32)
	if err != nil || strconv.FormatInt(ordinal, 10) != digits {
		return "", 0, false
	}
	return workload, ordinal, true
}

// SameOwner reports whether two references are of the same controller; nil is none.
func SameOwner(a, b *metav1.OwnerReference) bool {
	return a == b || a != nil && b != nil && a.UID == b.UID
}
