// Package gate is the scheduling gate by which pods wait for their placement: what adds it, and how it is removed.
package gate

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// Workloads is the ConfigMap of a namespace that lists the workloads whose pods are gated because a PersistentPodState
// records them.
const Workloads = "stayput-gated-workloads"

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
