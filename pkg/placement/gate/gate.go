// Package gate is the scheduling gate by which pods wait for their placement: what adds it, and how it is removed.
package gate

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// ManagedLabel, with the value Managed, is on every pod that was gated: the write that adds the gate adds it too.
const (
	ManagedLabel = "stayput.io/managed"
	Managed      = "true"
)

// Workloads is the ConfigMap of a namespace that lists the workloads whose pods are gated because a PersistentPodState
// records them.
const Workloads = "stayput-gated-workloads"

// WorkloadsLabel is the label by which the admission policy finds that ConfigMap. Without it pods of recorded workloads start ungated until a leading
// controller, which does so at its start, has added the label.
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

// Placement is what a pod is given as it loses the gate. The zero value gives it nothing.
type Placement struct {
	Annotations map[string]string
	Affinity    home.Affinity
	// Recorded are annotations of the pod's predecessor, which never count against Annotations. If the API server refuses
	// the pod with them, the pod is ungated without them, and Refused, unless it is nil, is called with the reason.
	Recorded map[string]string
	Refused  func(error)
}

// Place removes the gate of a pod, its last, in the same write that gives it the node affinity and annotations that it
// lacks. The lists in node affinity are replaced as a whole, so ours contain the pod's own terms, and with its
// resourceVersion the write fails if the pod is another one or has changed since. A pod without the gate only gets the
// annotations.
func Place(ctx context.Context, c client.Client, pod *corev1.Pod, p Placement) error {
	all := maps.Clone(p.Recorded)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, p.Annotations)
	err := place(ctx, c, pod, all, p.Affinity)
	if !refused(err) || len(p.Recorded) == 0 {
		return err
	}
	why := err
	if err = place(ctx, c, pod, p.Annotations, p.Affinity); err == nil && p.Refused != nil {
		p.Refused(why)
	}
	return err
}

// refused reports whether the API server, or a program that it asks, does not accept a write as it is.
func refused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsRequestEntityTooLargeError(err)
}

func place(ctx context.Context, c client.Client, pod *corev1.Pod, annotations map[string]string,
	affinity home.Affinity) error {
	annotations = maps.Clone(annotations)
	maps.DeleteFunc(annotations, func(k, v string) bool {
		has, ok := pod.Annotations[k]
		return ok && has == v
	})
	var own *corev1.NodeAffinity
	if pod.Spec.Affinity != nil {
		own = pod.Spec.Affinity.NodeAffinity
	}
	spec := map[string]any{}
	if home.Gated(pod) {
		spec["schedulingGates"] = nil
		if !affinity.Empty() {
			if merged := affinity.Merge(own); !equality.Semantic.DeepEqual(own, merged) {
				spec["affinity"] = map[string]any{"nodeAffinity": merged}
			}
		}
	}
	if len(annotations) == 0 && len(spec) <= 1 {
		return Remove(ctx, c, pod)
	}
	patch, err := json.Marshal(map[string]any{"spec": spec, "metadata": map[string]any{
		"uid": pod.UID, "resourceVersion": pod.ResourceVersion, "annotations": annotations,
	}})
	if err != nil {
		return err
	}
	return c.Patch(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}},
		client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.ControllerFieldManager))
}
