package placement

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/home"
)

// stripPod keeps what the loops need of a pod: the cache has every pod of the cluster.
func stripPod(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	pod.ManagedFields = home.PinnedBy(pod)
	spec := corev1.PodSpec{NodeName: pod.Spec.NodeName, HostNetwork: pod.Spec.HostNetwork}
	if pod.Spec.NodeName == "" { // what its placement depends on
		spec.SchedulingGates, spec.Affinity = pod.Spec.SchedulingGates, pod.Spec.Affinity
		spec.NodeSelector, spec.Tolerations = pod.Spec.NodeSelector, pod.Spec.Tolerations
		spec.PreemptionPolicy = pod.Spec.PreemptionPolicy
	}
	status := corev1.PodStatus{Phase: pod.Status.Phase, PodIP: pod.Status.PodIP, Reason: pod.Status.Reason,
		StartTime: pod.Status.StartTime}
	for _, c := range pod.Status.Conditions {
		if c.Type != corev1.PodReady && c.Type != corev1.PodScheduled {
			continue
		}
		kept := corev1.PodCondition{Type: c.Type, Status: c.Status, Reason: c.Reason}
		if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
			kept.Message = c.Message // whether its home is the cause
		}
		status.Conditions = append(status.Conditions, kept)
	}
	if pod.Spec.NodeName == "" {
		status.NominatedNodeName = pod.Status.NominatedNodeName
	}
	pod.Spec, pod.Status = spec, status
	return pod, nil
}

// stripStatefulSet keeps what the rules need of a StatefulSet.
func stripStatefulSet(o any) (any, error) {
	set, ok := o.(*appsv1.StatefulSet)
	if !ok {
		return o, nil
	}
	set.ManagedFields = nil
	set.Spec.Template = corev1.PodTemplateSpec{}
	set.Spec.VolumeClaimTemplates = nil
	set.Status = appsv1.StatefulSetStatus{}
	return set, nil
}

// stripNode keeps what decides whether a node can take a pod.
func stripNode(o any) (any, error) {
	node, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	node.ManagedFields, node.Annotations = nil, nil
	node.Spec = corev1.NodeSpec{Unschedulable: node.Spec.Unschedulable, Taints: node.Spec.Taints}
	var status corev1.NodeStatus
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			status.Conditions = []corev1.NodeCondition{{
				Type: c.Type, Status: c.Status, LastTransitionTime: c.LastTransitionTime,
			}}
		}
	}
	node.Status = status
	return node, nil
}
