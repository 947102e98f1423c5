package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// SchemeGroupVersion is the group and version of the objects in this package.
var SchemeGroupVersion = schema.GroupVersion{Group: "apps.kruise.io", Version: "v1alpha1"}

// AddToScheme registers the objects of this package with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(SchemeGroupVersion, &PersistentPodState{}, &PersistentPodStateList{})
	metav1.AddToGroupVersion(s, SchemeGroupVersion)
	return nil
}

// Annotations of a workload for which a PersistentPodState is generated. Lists are separated by commas.
const (
	AnnotationAutoGenerate      = "kruise.io/auto-generate-persistent-pod-state"
	AnnotationRequiredTopology  = "kruise.io/required-persistent-topology"
	AnnotationPreferredTopology = "kruise.io/preferred-persistent-topology"
	AnnotationPodAnnotations    = "kruise.io/persistent-pod-annotations"
)

// PersistentPodState records on which nodes the pods of a workload ran, and brings re-created pods back there.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=persistentpodstates,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:storageversion
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.targetRef.name`
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods`
// +kubebuilder:printcolumn:name="Recorded",type=integer,JSONPath=`.status.recorded`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PersistentPodState struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PersistentPodStateSpec `json:"spec"`
	// +optional
	Status PersistentPodStateStatus `json:"status,omitempty"`
}

// PersistentPodStateSpec selects the pods and what is recorded of them.
//
// +kubebuilder:validation:XValidation:rule="has(self.requiredPersistentTopology) || (has(self.preferredPersistentTopology) && size(self.preferredPersistentTopology) > 0)",message="at least one of requiredPersistentTopology and preferredPersistentTopology is needed"
type PersistentPodStateSpec struct {
	// targetRef names the workload. It is immutable, and a workload can have one PersistentPodState.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.targetRef is immutable: delete the object and make another one"
	// +kubebuilder:validation:XValidation:rule="!self.apiVersion.startsWith('apps/') || !(self.kind in ['Deployment', 'ReplicaSet'])",message="the pods of a Deployment or ReplicaSet have no stable names, so none of them succeeds another: use a StatefulSet"
	TargetReference TargetReference `json:"targetRef"`

	// persistentPodAnnotations are annotations that a pod passes on to its successor.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	PersistentPodAnnotations []PersistentPodAnnotation `json:"persistentPodAnnotations,omitempty"`

	// requiredPersistentTopology lists topology keys, such as kubernetes.io/hostname or topology.kubernetes.io/zone:
	// a re-created pod starts only on a node with the same values as the node of its predecessor.
	// +optional
	RequiredPersistentTopology *NodeTopologyTerm `json:"requiredPersistentTopology,omitempty"`

	// preferredPersistentTopology lists topology keys whose values should be the same, by weight.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	PreferredPersistentTopology []PreferredTopologyTerm `json:"preferredPersistentTopology,omitempty"`

	// persistentPodStateRetentionPolicy says when the record of a pod ends: WhenScaled (the default) once the
	// workload is scaled down below the pod, WhenDeleted once the workload is deleted.
	// +optional
	// +kubebuilder:validation:Enum="";WhenScaled;WhenDeleted
	PersistentPodStateRetentionPolicy RetentionPolicy `json:"persistentPodStateRetentionPolicy,omitempty"`
}

// TargetReference names a workload in the namespace of the object.
type TargetReference struct {
	// apiVersion of the workload, for example apps/v1.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	APIVersion string `json:"apiVersion"`
	// kind of the workload, for example StatefulSet.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Kind string `json:"kind"`
	// name of the workload.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// PreferredTopologyTerm is a weighted preference.
type PreferredTopologyTerm struct {
	// weight of the preference, 1 to 100, as in the pod's own node affinity.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	Weight int32 `json:"weight"`
	// preference lists the preferred topology keys.
	Preference NodeTopologyTerm `json:"preference"`
}

// NodeTopologyTerm is a list of topology keys. OpenKruise's versions differ in its name alone, and convert it by a
// webhook. Here both versions take either name, and the object says it as it was written.
//
// +kubebuilder:validation:XValidation:rule="has(self.keys) != has(self.nodeTopologyKeys)",message="expected either keys, as in apps.kruise.io/v1beta1, or nodeTopologyKeys, as in v1alpha1"
type NodeTopologyTerm struct {
	// nodeTopologyKeys are the keys of node labels.
	// +optional
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=317
	// +listType=atomic
	NodeTopologyKeys []string `json:"nodeTopologyKeys,omitempty"`

	// keys are the same by v1beta1's name.
	// +optional
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=317
	// +listType=atomic
	Keys []string `json:"keys,omitempty"`
}

// Labels returns the keys of node labels, by whichever name they were written.
func (t *NodeTopologyTerm) Labels() []string {
	if len(t.Keys) > 0 {
		return t.Keys
	}
	return t.NodeTopologyKeys
}

// PersistentPodAnnotation is the key of an annotation.
type PersistentPodAnnotation struct {
	// key of the annotation. Those by which a pod asks for its addresses, or is told them, are not passed on.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:XValidation:rule="!['stayput.io/', 'ipam.spidernet.io/', 'io.kubernetes.cri/'].exists(p, self.startsWith(p))",message="the annotation is not passed on, because by it a pod asks for its addresses or is told them: expected a key of your own"
	Key string `json:"key"`
}

// RetentionPolicy says when the record of a pod ends.
type RetentionPolicy string

// The retention policies; the empty one is WhenScaled.
const (
	RetentionWhenScaled  RetentionPolicy = "WhenScaled"
	RetentionWhenDeleted RetentionPolicy = "WhenDeleted"
)

// PersistentPodStateStatus is the record.
type PersistentPodStateStatus struct {
	// observedGeneration is the generation of the spec that the record follows.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// podStates are the records by pod name.
	// +optional
	// +kubebuilder:validation:MaxProperties=65536
	PodStates map[string]PodState `json:"podStates,omitempty"`

	// pods is the number of pods that the workload wants. (Not in OpenKruise.)
	// +optional
	Pods *int32 `json:"pods,omitempty"`

	// recorded is the number of podStates. (Not in OpenKruise.)
	// +optional
	Recorded *int32 `json:"recorded,omitempty"`

	// conditions are Recorded (every pod is recorded), Conflict (an older object for the same target takes
	// precedence) and Degraded (nothing, or less than asked for, is recorded). (Not in OpenKruise.)
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PodState is the record of one pod.
type PodState struct {
	// nodeName is the node on which the pod was last Ready.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`
	// nodeTopologyLabels are the labels of that node that the spec names.
	// +optional
	// +kubebuilder:validation:MaxProperties=512
	NodeTopologyLabels map[string]string `json:"nodeTopologyLabels,omitempty"`
	// annotations are the annotations of the pod that the spec names.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	Annotations map[string]string `json:"annotations,omitempty"`
}

// PersistentPodStateList is a list of PersistentPodState.
//
// +kubebuilder:object:root=true
type PersistentPodStateList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PersistentPodState `json:"items"`
}
