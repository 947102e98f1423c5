package placement

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

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

// asItIs is for objects that are stripped as they are read: see cluster.Pod.
func asItIs(o any) (any, error) { return o, nil }
