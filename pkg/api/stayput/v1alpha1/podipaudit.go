package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// PodIPAudit is what all nodes are asked about the addresses of pools, and how the controller notices that the API
// server was restored from a backup. There is one, of the name cluster. Only the controller writes it.
//
// It is internal: what the controller tells the agents, and may change in any version.
//
// +kubebuilder:object:root=true
// +kubebuilder:ac:generate=false
// +kubebuilder:resource:path=podipaudits,scope=Cluster
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Round",type=integer,JSONPath=`.spec.round`
// +kubebuilder:printcolumn:name="Recalling",type=boolean,JSONPath=`.spec.recalling`
// +kubebuilder:printcolumn:name="Mark",type=string,JSONPath=`.spec.mark`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'cluster'",message="metadata.name: expected cluster"
type PodIPAudit struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PodIPAuditSpec `json:"spec"`
}

// PodIPAuditName is the name of the only PodIPAudit.
const PodIPAuditName = "cluster"

// PodIPAuditSpec is what nodes are asked. Rounds are times in nanoseconds since 1970.
type PodIPAuditSpec struct {
	// round is that of the last question. Each node answers it in its PodIPReport.
	Round int64 `json:"round"`

	// asked are the pods and addresses in question.
	// +optional
	// +listType=map
	// +listMapKey=about
	// +kubebuilder:validation:MaxItems=65536
	Asked []PodIPQuestion `json:"asked,omitempty"`

	// epoch is the last round that all nodes had to answer before any address was given.
	// +optional
	Epoch int64 `json:"epoch,omitempty"`

	// recalling: they still have to.
	// +optional
	Recalling bool `json:"recalling,omitempty"`

	// term changes when a recall begins and when it is over.
	// +optional
	Term int64 `json:"term,omitempty"`

	// mark is renewed every 30 s. If it is old, or of the future, the API server may have forgotten who has which address.
	Mark metav1.MicroTime `json:"mark"`

	// marks counts how often it was. So does a count that is lower than before.
	// +optional
	Marks int64 `json:"marks,omitempty"`
}

// PodIPQuestion asks who has a pod or an address.
type PodIPQuestion struct {
	// about is the UID of a pod, or an address.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	About string `json:"about"`
	// round in which it was asked first.
	Round int64 `json:"round"`
}

// PodIPAuditList is a list of PodIPAudit.
//
// +kubebuilder:object:root=true
type PodIPAuditList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PodIPAudit `json:"items"`
}

// PodIPReport is what a node says to a round of the PodIPAudit. Its name is the node's, and it is owned by the Node.
// Only the node's agent writes it.
//
// It is internal: what an agent tells the controller, and may change in any version.
//
// +kubebuilder:object:root=true
// +kubebuilder:ac:generate=false
// +kubebuilder:resource:path=podipreports,scope=Cluster
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Round",type=integer,JSONPath=`.spec.round`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PodIPReport struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PodIPReportSpec `json:"spec"`
}

// PodIPReportSpec is what a node has.
type PodIPReportSpec struct {
	// round that is answered. The pods that were asked for and are not held here will never have an address here.
	Round int64 `json:"round"`

	// held are all addresses of pools that pods on the node have, or are about to get.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=65536
	Held []PodIPHeld `json:"held,omitempty"`

	// cannotRoute says why pods of the node cannot have addresses of pools with mode Routed. It is empty if they can, or
	// if the node does not know.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	CannotRoute string `json:"cannotRoute,omitempty"`
}

// PodIPHeld is an address that a pod has on a node, by the node's own books.
type PodIPHeld struct {
	// address, without a prefix length.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Address string `json:"address"`
	// podUID is the pod that has it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodUID string `json:"podUID"`
	// namespace of the pod.
	// +kubebuilder:validation:MaxLength=253
	Namespace string `json:"namespace"`
	// podName is its name.
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName"`
	// pool that gave the address.
	// +kubebuilder:validation:MaxLength=253
	Pool string `json:"pool"`
	// mode of the pool.
	Mode PodIPPoolMode `json:"mode"`
	// interface is its name inside the pod.
	// +kubebuilder:validation:MaxLength=64
	Interface string `json:"interface"`
	// identity, network, retention, whenScaled and whenDeleted are as in the spec of a PodIP. The identity is the pod's
	// annotation as it stands, which may be as long as annotations can be: what is held must always be answered.
	// +optional
	// +kubebuilder:validation:MaxLength=262144
	Identity string `json:"identity,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Network string `json:"network,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Retention string `json:"retention,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	WhenScaled string `json:"whenScaled,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	WhenDeleted string `json:"whenDeleted,omitempty"`
}

// PodIPReportList is a list of PodIPReport.
//
// +kubebuilder:object:root=true
type PodIPReportList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PodIPReport `json:"items"`
}
