package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
)

// PersistentPodState records on which nodes the pods of a workload ran, and brings re-created pods back there.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=persistentpodstates,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.targetRef.name`
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods`
// +kubebuilder:printcolumn:name="Recorded",type=integer,JSONPath=`.status.recorded`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PersistentPodState struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec v1alpha1.PersistentPodStateSpec `json:"spec"`
	// +optional
	Status v1alpha1.PersistentPodStateStatus `json:"status,omitempty"`
}
