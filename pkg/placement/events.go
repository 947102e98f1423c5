package placement

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
)

// regarding reports an Event on a pod and on its controller, which outlives the pod.
func regarding(to events.EventRecorder, pod *corev1.Pod, kind, reason, note string) {
	to.Eventf(pod, nil, kind, reason, "Placing", "%s", note)
	if owner := metav1.GetControllerOf(pod); owner != nil {
		to.Eventf(&corev1.ObjectReference{
			APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: pod.Namespace, Name: owner.Name, UID: owner.UID,
		}, pod, kind, reason, "Placing", "pod %s: %s", pod.Name, note)
	}
}
