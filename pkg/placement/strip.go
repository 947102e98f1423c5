package placement

import (
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// templateAnnotations are those of a pod template that say whether its pods' nodes are recorded.
var templateAnnotations = []string{stayputv1alpha1.AnnotationHome, stayputv1alpha1.AnnotationRetainIP,
	stayputv1alpha1.AnnotationReservedIPDuration, stayputv1alpha1.AnnotationPools}

// stripStatefulSet keeps what the rules need of a StatefulSet.
func stripStatefulSet(o any) (any, error) {
	set, ok := o.(*appsv1.StatefulSet)
	if !ok {
		return o, nil
	}
	set.ManagedFields = nil
	template := corev1.PodTemplateSpec{}
	for _, key := range templateAnnotations {
		if value, ok := set.Spec.Template.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&template.ObjectMeta, key, value)
		}
	}
	set.Spec.Template = template
	set.Spec.VolumeClaimTemplates = nil
	set.Status = appsv1.StatefulSetStatus{}
	return set, nil
}

// stripNode keeps what decides whether a node can take a pod, and which addresses its pods have.
func stripNode(o any) (any, error) {
	node, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	node.ManagedFields, node.Annotations = nil, nil
	node.Spec = corev1.NodeSpec{Unschedulable: node.Spec.Unschedulable, Taints: node.Spec.Taints,
		PodCIDR: node.Spec.PodCIDR, PodCIDRs: node.Spec.PodCIDRs}
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

// retainedIPStripper returns a function that keeps what the rules need of a RetainedIP, of which there may be as many
// as pods, and keeps once what many of them say.
func retainedIPStripper() func(any) (any, error) {
	var once cluster.Interner
	return func(o any) (any, error) {
		ip, ok := o.(*stayputv1alpha1.RetainedIP)
		if !ok {
			return o, nil
		}
		ip.ObjectMeta = metav1.ObjectMeta{
			Namespace: once.One(ip.Namespace), Name: ip.Name, UID: ip.UID, ResourceVersion: ip.ResourceVersion,
			Generation: ip.Generation, CreationTimestamp: ip.CreationTimestamp, DeletionTimestamp: ip.DeletionTimestamp,
		}
		ip.TypeMeta = metav1.TypeMeta{}
		for _, s := range []*string{&ip.Spec.NodeName, &ip.Spec.Identity, &ip.Spec.Retention, &ip.Spec.WhenScaled,
			&ip.Spec.WhenDeleted, &ip.Spec.WhenMoved, (*string)(&ip.Status.Phase)} {
			*s = once.One(*s)
		}
		if strings.HasPrefix(ip.Name, ip.Spec.PodName) {
			ip.Spec.PodName = ip.Name[:len(ip.Spec.PodName)]
		}
		if w := ip.Spec.Workload; w != nil {
			for _, s := range []*string{&w.APIVersion, &w.Kind, &w.Name, &w.UID} {
				*s = once.One(*s)
			}
		}
		ip.Status.Addresses = nil // IPs has them all
		return ip, nil
	}
}

// asItIs is for objects that are stripped as they are read: see cluster.Pod.
func asItIs(o any) (any, error) { return o, nil }
