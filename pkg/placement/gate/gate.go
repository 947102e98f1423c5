// Package gate is the scheduling gate by which pods wait for their placement: what adds it, and how it is removed.
package gate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// ManagedLabel, with the value Managed, is on the pods that Stayput serves: what gates a pod, or places one whose
// template has the gate, adds it in the same write, and to pods that cannot be gated, which come with their node, too.
// The controller watches the pods that have it, whatever its value, and the admission policy takes what Stayput wrote
// off their copies. People may take it off a pod, and put it on any: that a pod lacks it says nothing of the pod.
const (
	ManagedLabel = "stayput.io/managed"
	Managed      = "true"
)

// WorkloadsLabel is the label by which the admission policy finds the ConfigMap home.GatedWorkloads. Without it pods of
// recorded workloads start ungated until a leading controller, which does so at its start, has added the label.
const WorkloadsLabel = "stayput.io/gated-workloads"

// WorkloadsKey is the one value of that ConfigMap, the parameter of the admission policy that gates the pods of
// recorded workloads. The API server knows ConfigMaps from its start, unlike custom resources, and one object costs a
// pod's creation the same however many workloads it names.
//
// The value has a line Kind.group.name for each workload, a line break before the first and after every one, so that
// the policy can search for a whole line. A key for each workload would cost more: the API server converts every key
// for every pod.
const WorkloadsKey = "workloads"

// Line is a workload's in the ConfigMap.
func Line(kind, group, name string) string { return kind + "." + group + "." + name }

// Remove ungates a pod; without the gate it does nothing. The patch's tests bind it to this pod and this gate: if
// either has changed since pod was read, the error is Invalid or Conflict.
func Remove(ctx context.Context, c client.Client, pod *corev1.Pod) error {
	i := home.GateOf(pod)
	if i < 0 {
		return nil
	}
	at := fmt.Sprintf("/spec/schedulingGates/%d", i)
	patch, err := json.Marshal([]map[string]any{
		{"op": "test", "path": "/metadata/uid", "value": pod.UID},
		{"op": "test", "path": at + "/name", "value": v1alpha1.PlacementGate},
		{"op": "remove", "path": at},
	})
	if err != nil {
		return err
	}
	return c.Patch(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}},
		client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(v1alpha1.ControllerFieldManager))
}

// Label gives a pod the ManagedLabel. The error is Conflict if it is another pod by now.
func Label(ctx context.Context, c client.Client, pod client.Object) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.GetUID(), "labels": map[string]string{ManagedLabel: Managed},
	}})
	if err != nil {
		return err
	}
	return c.Patch(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.GetNamespace(), Name: pod.GetName()}},
		client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.ControllerFieldManager))
}

// Placement is what a pod is given as it loses the gate. The zero value gives it nothing.
type Placement struct {
	// Annotations and Affinity are what the pod must not start without.
	Annotations map[string]string
	Affinity    home.Affinity
	// Home is the affinity by which the pod comes home, or is kept from nodes, and Pinned what the annotation of that name
	// says of it, empty if the pod is not to have it.
	Home   home.Affinity
	Pinned string
	// HomeOptional lets the pod go without Home if the API server refuses the pod with it.
	HomeOptional bool
	// Recorded are annotations of the pod's predecessor, which never count against the others. The pod goes without them
	// if the API server refuses it with them.
	Recorded map[string]string
	// Missing, unless it is nil, is called with what the pod was ungated without, and why.
	Missing func(Part, error)
}

// Part of a Placement that a pod can do without.
type Part string

// The parts.
const (
	PartHome     Part = "home"
	PartRecorded Part = "recorded annotations"
)

// ErrAffinityRemoved says that the API server accepted a pod with a node affinity and returned it without.
var ErrAffinityRemoved = errors.New("an admission policy or webhook of the cluster removed the node affinity again")

// Place removes the gate of a pod, its last, in the same write that gives it the node affinity and annotations that it
// lacks. The lists in node affinity are replaced as a whole, so ours contain the pod's own terms, and with its
// resourceVersion the write fails if the pod is another one or has changed since. A pod without the gate only gets the
// annotations. An error that is [Refused] says that the API server does not accept any of it.
func Place(ctx context.Context, c client.Client, pod *corev1.Pod, p Placement) error {
	missing := map[Part]error{}
	err := place(ctx, c, pod, p, missing)
	for _, without := range [][]Part{{PartRecorded}, {PartHome}, {PartRecorded, PartHome}} {
		if !Refused(err) {
			break
		}
		if less, ok := p.without(without); ok {
			clear(missing)
			for _, part := range without {
				missing[part] = err
			}
			err = place(ctx, c, pod, less, missing)
		}
	}
	if err != nil {
		return err
	}
	for part, why := range missing {
		if p.Missing != nil {
			p.Missing(part, why)
		}
	}
	return nil
}

// without returns a Placement without some parts, and whether it is one that has them and can do without.
func (p Placement) without(parts []Part) (Placement, bool) {
	for _, part := range parts {
		switch {
		case part == PartRecorded && len(p.Recorded) > 0:
			p.Recorded = nil
		case part == PartHome && p.HomeOptional && !p.Home.Empty():
			p.Home, p.Pinned = home.Affinity{}, ""
		default:
			return p, false
		}
	}
	return p, true
}

// Refused reports whether the API server, or a program that it asks, does not accept a write as it is.
func Refused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsRequestEntityTooLargeError(err)
}

// place makes the write, and notes in missing what of it the API server dropped.
func place(ctx context.Context, c client.Client, pod *corev1.Pod, p Placement, missing map[Part]error) error {
	annotations := maps.Clone(p.Recorded)
	if annotations == nil {
		annotations = map[string]string{}
	}
	if p.Pinned != "" {
		annotations[v1alpha1.AnnotationPinned] = p.Pinned
	}
	maps.Copy(annotations, p.Annotations)
	maps.DeleteFunc(annotations, func(k, v string) bool {
		has, ok := pod.Annotations[k]
		return ok && has == v
	})
	spec, affinity := map[string]any{}, p.Home.And(p.Affinity)
	if home.Gated(pod) {
		spec["schedulingGates"] = nil
		if !affinity.In(pod) {
			spec["affinity"] = map[string]any{"nodeAffinity": affinity.Merge(home.NodeAffinityOf(pod))}
		}
	}
	if len(annotations) == 0 && len(spec) <= 1 {
		return Remove(ctx, c, pod)
	}
	metadata := map[string]any{
		"uid": pod.UID, "resourceVersion": pod.ResourceVersion, "annotations": annotations,
	}
	if _, is := pod.Labels[ManagedLabel]; !is { // by it a copy of the pod is known
		metadata["labels"] = map[string]string{ManagedLabel: Managed}
	}
	patch, err := json.Marshal(map[string]any{"spec": spec, "metadata": metadata})
	if err != nil {
		return err
	}
	is := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}
	err = c.Patch(ctx, is, client.RawPatch(types.MergePatchType, patch),
		client.FieldOwner(v1alpha1.ControllerFieldManager))
	if err == nil && spec["affinity"] != nil && !p.Home.In(is) {
		missing[PartHome] = ErrAffinityRemoved
	}
	return err
}
