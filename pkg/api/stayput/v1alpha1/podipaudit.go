package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodIPAudit shows the controller and the agents that the API server was restored from a backup, and asks all nodes
// then which addresses of pools they have. There is one, of the name cluster. Only the controller writes it.
//
// It is internal: what the controller tells the agents, and may change in any version.
//
// The mark is in this object and not in a Lease, because a restore of etcd is noticed by it: an old mark is worth a
// new epoch only if the epoch beside it is of the same moment, which one resourceVersion says of both.
//
// +kubebuilder:object:root=true
// +kubebuilder:ac:generate=false
// +kubebuilder:resource:path=podipaudits,scope=Cluster
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Epoch",type=string,JSONPath=`.spec.epoch`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.spec.phase`
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

// PodIPAuditSpec is what nodes are asked. An epoch is named by the time at which it began. The patterns are what
// clients can read of a time with microseconds: one object that they cannot read fails a whole list.
type PodIPAuditSpec struct {
	// epoch is the last one; absent before the first. Each node reports for it, in its PodIPReport, which addresses it
	// has.
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	Epoch *metav1.MicroTime `json:"epoch,omitempty"`

	// phase is Recalling while all nodes have to report for the epoch before any address is given, taken or freed, else
	// Settled. Any other value counts as Recalling. It is no boolean, so that a later version can name a third state
	// which agents of this one take for the careful one.
	Phase PodIPAuditPhase `json:"phase"`

	// term is when the phase changed last, as an epoch is named.
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	Term *metav1.MicroTime `json:"term,omitempty"`

	// mark is renewed every 30 s. A mark that is older than two minutes, or of the future, means that the API server may
	// have forgotten which pod has which address.
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	Mark metav1.MicroTime `json:"mark"`

	// marks counts how often the mark was renewed. A count that is lower than before means the same as an old mark.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Marks int64 `json:"marks,omitempty"`
}

// PodIPAuditPhase is whether addresses wait for all nodes.
//
// +kubebuilder:validation:Enum=Recalling;Settled
type PodIPAuditPhase string

// The phases of a PodIPAudit.
const (
	PodIPAuditRecalling PodIPAuditPhase = "Recalling" // all nodes have to report for the epoch first
	PodIPAuditSettled   PodIPAuditPhase = "Settled"   // all nodes have
)

// EpochOf returns an epoch in nanoseconds since 1970: 0 if t is nil or zero.
func EpochOf(t *metav1.MicroTime) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// EpochTime returns the time of an epoch in nanoseconds since 1970, which are whole microseconds. It is zero if epoch
// is.
func EpochTime(epoch int64) metav1.MicroTime {
	if epoch == 0 {
		return metav1.MicroTime{}
	}
	return metav1.NewMicroTime(time.Unix(0, epoch))
}

// PodIPAuditList is a list of PodIPAudit.
//
// +kubebuilder:object:root=true
type PodIPAuditList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PodIPAudit `json:"items"`
}

// PodIPReport is what a node says for an epoch of the PodIPAudit. Its name is the node's, and it is owned by the Node.
// Only the node's agent writes it.
//
// It is internal: what an agent tells the controller, and may change in any version.
//
// +kubebuilder:object:root=true
// +kubebuilder:ac:generate=false
// +kubebuilder:resource:path=podipreports,scope=Cluster
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Epoch",type=string,JSONPath=`.spec.epoch`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PodIPReport struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PodIPReportSpec `json:"spec"`
}

// PodIPReportSpec is what a node has.
type PodIPReportSpec struct {
	// epoch is the one that the report is for.
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	Epoch metav1.MicroTime `json:"epoch"`

	// held are all addresses of pools that pods on the node have, or may be started with.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=65536
	Held []PodIPHeld `json:"held,omitempty"`

	// cannotServe says, by the mode of a pool, why pods of the node cannot have addresses of it. A mode is missing if they
	// can, or if the node does not know.
	// +optional
	// +kubebuilder:validation:MaxProperties=8
	CannotServe map[string]PodIPReportCause `json:"cannotServe,omitempty"`
}

// PodIPReportCause is why a node cannot do something, for people.
// +kubebuilder:validation:MaxLength=1024
type PodIPReportCause string

// PodIPHeld is an address that a pod has on a node, by the node's own books.
type PodIPHeld struct {
	// address is the address without a prefix length.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Address string `json:"address"`
	// podUID is the pod that has it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodUID string `json:"podUID"`
	// namespace is the namespace of the pod.
	// +kubebuilder:validation:MaxLength=253
	Namespace string `json:"namespace"`
	// podName is the name of the pod.
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName"`
	// running is true if the pod has a sandbox on the node. Otherwise it may be started with the address.
	// +optional
	Running bool `json:"running,omitempty"`
	// pool is the PodIPPool that gave the address.
	// +kubebuilder:validation:MaxLength=253
	Pool string `json:"pool"`
	// mode is the mode of the pool.
	Mode PodIPPoolMode `json:"mode"`
	// interface is the name of the interface inside the pod.
	// +kubebuilder:validation:MaxLength=64
	Interface string `json:"interface"`
	// identity is as in the spec of a PodIP. It is the pod's annotation as it stands, which may be as long as annotations
	// can be: a node must always be able to report what it has.
	// +optional
	// +kubebuilder:validation:MaxLength=262144
	Identity string `json:"identity,omitempty"`
	// network is as in the spec of a PodIP.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Network string `json:"network,omitempty"`
	// retention is as in the spec of a PodIP.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Retention string `json:"retention,omitempty"`
	// whenScaled is as in the spec of a PodIP.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	WhenScaled string `json:"whenScaled,omitempty"`
	// whenDeleted is as in the spec of a PodIP.
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
