package placement

import (
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/cluster"
)

// templateAnnotations are those of a pod template that say whether its pods' nodes are recorded.
var templateAnnotations = []string{stayputv1alpha1.AnnotationHome, stayputv1alpha1.AnnotationRetainIP,
	stayputv1alpha1.AnnotationReservedIPDuration, stayputv1alpha1.AnnotationPools}

// workloadAnnotations are those of a workload by which a PersistentPodState is generated.
var workloadAnnotations = []string{kruisev1alpha1.AnnotationAutoGenerate, kruisev1alpha1.AnnotationRequiredTopology,
	kruisev1alpha1.AnnotationPreferredTopology, kruisev1alpha1.AnnotationPodAnnotations}

// annotationMost is the longest value of an annotation that is kept: of a longer value only the beginning is kept,
// which is not valid. Otherwise a user who may create workloads could fill the memory of every controller.
const annotationMost = 4 << 10

// pickAnnotations returns the annotations with these keys.
func pickAnnotations(from map[string]string, keys []string) (all map[string]string) {
	for _, key := range keys {
		value, ok := from[key]
		if !ok {
			continue
		}
		if len(value) > annotationMost {
			value = strings.Clone(strings.ToValidUTF8(value[:64], "")) + "… (too long)"
		}
		if all == nil {
			all = map[string]string{}
		}
		all[key] = value
	}
	return all
}

// identify keeps what tells an object from others.
func identify(o metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID(), ResourceVersion: o.GetResourceVersion(),
		Generation: o.GetGeneration(), CreationTimestamp: o.GetCreationTimestamp(),
		DeletionTimestamp: o.GetDeletionTimestamp(),
	}
}

// stripStatefulSet keeps what the rules need of a StatefulSet.
func stripStatefulSet(o any) (any, error) {
	set, ok := o.(*appsv1.StatefulSet)
	if !ok {
		return o, nil
	}
	meta := identify(set)
	meta.Annotations = pickAnnotations(set.Annotations, workloadAnnotations)
	spec := appsv1.StatefulSetSpec{Replicas: set.Spec.Replicas, Ordinals: set.Spec.Ordinals}
	spec.Template.Annotations = pickAnnotations(set.Spec.Template.Annotations, templateAnnotations)
	*set = appsv1.StatefulSet{TypeMeta: set.TypeMeta, ObjectMeta: meta, Spec: spec}
	return set, nil
}

// reservedMost is how many ordinals may be reserved: with more, what the workload wants is not known.
const reservedMost = 1000

// stripRest keeps what the rules need of PersistentPodStates, and of workloads of other kinds than StatefulSets.
func stripRest(o any) (any, error) {
	if s, ok := o.(*kruisev1alpha1.PersistentPodState); ok {
		return stripState(s)
	}
	return stripWorkload(o)
}

// stripWorkload keeps what the rules need of a workload of another kind: see home.WorkloadOf.
func stripWorkload(o any) (any, error) {
	switch o := o.(type) {
	case *metav1.PartialObjectMetadata:
		meta := identify(o)
		meta.Annotations = pickAnnotations(o.Annotations, workloadAnnotations)
		o.ObjectMeta = meta
		return o, nil
	case *unstructured.Unstructured:
		spec := map[string]any{}
		for _, field := range [][]string{{"replicas"}, {"ordinals", "start"}, {"reserveOrdinals"}} {
			value, ok, err := unstructured.NestedFieldNoCopy(o.Object, append([]string{"spec"}, field...)...)
			if list, is := value.([]any); is && len(list) > reservedMost {
				value = []any{"(too many)"}
			}
			if err == nil && ok {
				err = unstructured.SetNestedField(spec, value, field...)
			}
			if err != nil {
				return o, nil // its reader reports the error
			}
		}
		asks, _, err := unstructured.NestedStringMap(o.Object, "spec", "template", "metadata", "annotations")
		if err != nil {
			return o, nil
		}
		if asks = pickAnnotations(asks, templateAnnotations); asks != nil {
			if err := unstructured.SetNestedStringMap(spec, asks, "template", "metadata", "annotations"); err != nil {
				return o, nil
			}
		}
		meta := identify(o)
		meta.Annotations = pickAnnotations(o.GetAnnotations(), workloadAnnotations)
		kept := map[string]any{"apiVersion": o.GetAPIVersion(), "kind": o.GetKind(), "spec": spec}
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&meta)
		if err != nil {
			return o, nil
		}
		kept["metadata"] = fields
		o.Object = kept
		return o, nil
	}
	if o, ok := o.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return o, nil
}

// stripState keeps what the rules need of a PersistentPodState. Users write all of it but the status. A value that is
// too long to be the key of a label or an annotation is dropped.
func stripState(o any) (any, error) {
	s, ok := o.(*kruisev1alpha1.PersistentPodState)
	if !ok {
		return o, nil
	}
	meta := identify(s)
	if value, ok := s.Labels[stayputv1alpha1.LabelGenerated]; ok {
		meta.Labels = map[string]string{stayputv1alpha1.LabelGenerated: value}
	}
	s.ObjectMeta = meta
	for _, field := range []*string{&s.Spec.TargetReference.APIVersion, &s.Spec.TargetReference.Kind,
		&s.Spec.TargetReference.Name} {
		if len(*field) > keyMost {
			*field = ""
		}
	}
	if term := s.Spec.RequiredPersistentTopology; term != nil {
		boundTerm(term, keysMost)
	}
	var preferred []kruisev1alpha1.PreferredTopologyTerm
	for left, terms := keysMost, s.Spec.PreferredPersistentTopology; len(terms) > 0 && left > 0; terms = terms[1:] {
		term := terms[0]
		boundTerm(&term.Preference, left)
		left -= max(1, len(term.Preference.Labels()))
		preferred = append(preferred, term)
	}
	s.Spec.PreferredPersistentTopology = preferred
	var annotations []kruisev1alpha1.PersistentPodAnnotation
	for _, a := range s.Spec.PersistentPodAnnotations {
		if len(a.Key) <= keyMost && len(annotations) < keysMost {
			annotations = append(annotations, a)
		}
	}
	s.Spec.PersistentPodAnnotations = annotations
	for name, state := range s.Status.PodStates {
		state.Annotations = home.BoundRecorded(state.Annotations, slices.Sorted(maps.Keys(state.Annotations)))
		s.Status.PodStates[name] = state
	}
	return s, nil
}

// keyMost is the longest key of a label or an annotation, keysMost how many of one sort count.
const keyMost, keysMost = 253 + 1 + 63, 64

// boundTerm drops the keys that no node can have, and those beyond so many.
func boundTerm(t *kruisev1alpha1.NodeTopologyTerm, most int) {
	for _, keys := range []*[]string{&t.NodeTopologyKeys, &t.Keys} {
		var all []string
		for _, key := range *keys {
			if len(key) <= keyMost && len(all) < most {
				all = append(all, key)
			}
		}
		*keys = all
	}
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

// retainedIPStripper returns a function that keeps what the rules need of a RetainedIP. There may be as many as pods,
// so what many of them say is kept once.
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
