package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Workload describes pods of [WebImage], with the label app, that end within a second: a StatefulSet, whose pods start
// all at once, or another kind. They are spread over the nodes, and probed every second.
type Workload struct {
	Kind        string // StatefulSet if empty; or Deployment, DaemonSet, Pod
	Name        string
	Replicas    int
	Annotations map[string]string // of its pods
	Own         map[string]string // of the workload itself
	Node        string            // the only node for its pods; any if empty
	// Unprobed pods are Ready as soon as they run: a node does not reach its own macvlan.
	Unprobed bool

	// What else its pods and their container have: fields that are not set have the values of all workloads.
	Pod       corev1.PodSpec
	Container corev1.Container
	// Start is the first ordinal of a StatefulSet; Strategy is that of a Deployment.
	Start    int
	Strategy appsv1.DeploymentStrategy
}

// Object returns the workload for a client.
func (w Workload) Object(namespace string) client.Object {
	template, replicas := w.template(), int32(w.Replicas)
	kind := metav1.TypeMeta{APIVersion: "apps/v1", Kind: w.Kind}
	meta := metav1.ObjectMeta{Namespace: namespace, Name: w.Name, Annotations: w.Own}
	selector := &metav1.LabelSelector{MatchLabels: template.Labels}
	switch w.Kind {
	case "Deployment":
		return &appsv1.Deployment{TypeMeta: kind, ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: selector, Template: template, Strategy: w.Strategy,
		}}
	case "DaemonSet":
		return &appsv1.DaemonSet{TypeMeta: kind, ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{
			Selector: selector, Template: template,
		}}
	case "Pod":
		kind.APIVersion, meta.Labels, meta.Annotations = "v1", template.Labels, template.Annotations
		return &corev1.Pod{TypeMeta: kind, ObjectMeta: meta, Spec: template.Spec}
	default:
		return w.StatefulSet(namespace)
	}
}

// StatefulSet is Object of a StatefulSet.
func (w Workload) StatefulSet(namespace string) *appsv1.StatefulSet {
	template, replicas := w.template(), int32(w.Replicas)
	set := &appsv1.StatefulSet{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "StatefulSet"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: w.Name, Annotations: w.Own},
		Spec: appsv1.StatefulSetSpec{
			ServiceName: w.Name, Replicas: &replicas, PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template,
		},
	}
	if w.Start != 0 {
		set.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: int32(w.Start)}
	}
	return set
}

func (w Workload) template() corev1.PodTemplateSpec {
	labels, second := map[string]string{"app": w.Name}, int64(1)
	pod, container := w.Pod, w.Container
	container.Name, container.Image, container.ImagePullPolicy = "web", WebImage, corev1.PullNever
	if !w.Unprobed {
		container.ReadinessProbe = &corev1.Probe{
			PeriodSeconds: 1,
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(80)}},
		}
	}
	pod.Containers = []corev1.Container{container}
	if pod.TerminationGracePeriodSeconds == nil {
		pod.TerminationGracePeriodSeconds = &second
	}
	if w.Node != "" {
		pod.NodeSelector = map[string]string{corev1.LabelHostname: w.Node}
	}
	pod.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
		MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway,
		LabelSelector: &metav1.LabelSelector{MatchLabels: labels},
	}}
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: w.Annotations}, Spec: pod,
	}
}

// Deploy applies a workload in a namespace, on the server and as kubectl does: it fails if somebody else has set one of
// its fields.
func (c *Cluster) Deploy(ctx context.Context, namespace string, w Workload) error {
	object := w.Object(namespace)
	kind := object.GetObjectKind().GroupVersionKind()
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	api := "/apis/apps/v1"
	if kind.Group == "" {
		api = "/api/v1"
	}
	err = c.client.AppsV1().RESTClient().Patch(types.ApplyPatchType).
		AbsPath(api, "namespaces", namespace, strings.ToLower(kind.Kind)+"s", w.Name).
		Param("fieldManager", "kubectl").Body(body).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("applying %s %s/%s: %w", kind.Kind, namespace, w.Name, err)
	}
	return nil
}
