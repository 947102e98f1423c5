package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// SchemeGroupVersion is the group and version of the objects in this package.
var SchemeGroupVersion = schema.GroupVersion{Group: "stayput.io", Version: "v1alpha1"}

// AddToScheme registers the objects of this package with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(SchemeGroupVersion, &RetainedIP{}, &RetainedIPList{}, &PodIPPool{}, &PodIPPoolList{},
		&PodIP{}, &PodIPList{}, &PodIPAudit{}, &PodIPAuditList{},
		&PodIPReport{}, &PodIPReportList{})
	metav1.AddToGroupVersion(s, SchemeGroupVersion)
	return nil
}

// RetainedIP shows the addresses that a node keeps for a pod and is the home of that pod: the node it comes back
// to. The node's ledger is the authority; its agent publishes it here, and publishes it again if this object is
// deleted. To release the addresses, set spec.release.
//
// There is one object for each pod and node. It is owned by the Node.
//
// There is no status subresource, because the agent applies the whole object: with one, each start of a pod would cost
// one more write, and spec and status could disagree between the two. Admission policies keep other writers from the
// status.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=retainedips,shortName=retip,categories=stayput,scope=Namespaced
// +kubebuilder:selectablefield:JSONPath=`.spec.nodeName`
// +kubebuilder:selectablefield:JSONPath=`.spec.podName`
// +kubebuilder:selectablefield:JSONPath=`.spec.identity`
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="IP",type=string,JSONPath=`.status.ips[0]`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.status.expires`
// +kubebuilder:printcolumn:name="IPs",type=string,JSONPath=`.status.ips`,priority=1
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.spec.podName`,priority=1
// +kubebuilder:printcolumn:name="Workload",type=string,JSONPath=`.spec.workload.name`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type RetainedIP struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec RetainedIPSpec `json:"spec"`
	// status is what the node's ledger says.
	// +optional
	Status RetainedIPStatus `json:"status,omitempty"`
}

// RetainedIPSpec says which pod has the addresses and how long they are kept. The node's agent applies all but release,
// workload and scheduled.
type RetainedIPSpec struct {
	// nodeName is the node that keeps the addresses.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.nodeName is immutable"
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// podName is the pod, in the namespace of this object, that has the addresses or had them last.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName,omitempty"`

	// identity is the shared identity (annotation stayput.io/identity) that has the addresses. It is absent if they are
	// the pod's own.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Identity string `json:"identity,omitempty"`

	// retention is how long the addresses are kept once the pod has stopped: a Go duration, or while-owned.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^(while-owned|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`
	Retention string `json:"retention,omitempty"`

	// whenScaled says what happens to the addresses when the workload is scaled down below the pod.
	// +optional
	// +kubebuilder:validation:Enum=Retain;Release
	WhenScaled string `json:"whenScaled,omitempty"`

	// whenDeleted says what happens to the addresses when the workload is deleted.
	// +optional
	// +kubebuilder:validation:Enum=Retain;Release
	WhenDeleted string `json:"whenDeleted,omitempty"`

	// whenMoved says what happens to the addresses once the pod has been Ready on another node for ten minutes, which
	// keeps addresses for it, too.
	// +optional
	// +kubebuilder:validation:Enum=Retain;Release
	WhenMoved string `json:"whenMoved,omitempty"`

	// release asks for an end of the retention. With Now the addresses are released as soon as no pod uses them. Users
	// may set it; the controller sets it when the workload no longer wants the pod. The agent deletes the object once
	// that is done.
	// +optional
	Release Release `json:"release,omitempty"`

	// workload is the controller of the pod. It is absent if it is not known. Stayput's controller applies it.
	// +optional
	Workload *WorkloadReference `json:"workload,omitempty"`

	// scheduled is what Stayput's controller knows to have been bound to the node: pod/NAME, or identity/NAME of a pod
	// with a shared identity. The node is a home only if it names the pod or identity that has the addresses: what a node
	// says of itself does not attract pods that never ran there. Only Stayput's controller applies it. It sets it while
	// such a pod is bound there, and again, within a day, if the pod has ended or the RetainedIP was deleted and published
	// again.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	Scheduled string `json:"scheduled,omitempty"`
}

// WorkloadReference names a workload in the namespace of the object that has it.
type WorkloadReference struct {
	// apiVersion of the workload, for example apps/v1.
	// +kubebuilder:validation:MaxLength=317
	APIVersion string `json:"apiVersion"`
	// kind of the workload, for example StatefulSet.
	// +kubebuilder:validation:MaxLength=253
	Kind string `json:"kind"`
	// name of the workload.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// uid of the workload: one created later under the same name is another one.
	// +kubebuilder:validation:MaxLength=253
	UID string `json:"uid"`
}

// Release is when addresses are to be released, at the latest.
//
// +kubebuilder:validation:Enum=Now
type Release string

// ReleaseNow releases addresses as soon as no pod can use them.
const ReleaseNow Release = "Now"

// Phase of a RetainedIP.
//
// +kubebuilder:validation:Enum=Bound;Retained
type Phase string

// The phases: an address is Bound while a pod uses it, Retained while it is kept for one.
const (
	PhaseBound    Phase = "Bound"
	PhaseRetained Phase = "Retained"
)

// RetainedIPStatus is the state of the addresses.
type RetainedIPStatus struct {
	// phase is Bound while a pod uses an address of this object, else Retained.
	// +optional
	Phase Phase `json:"phase,omitempty"`

	// ips are all addresses, of every network of the pod.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=64
	IPs []string `json:"ips,omitempty"`

	// addresses are the ips by network and interface.
	// +optional
	// +listType=map
	// +listMapKey=network
	// +listMapKey=interface
	// +kubebuilder:validation:MaxItems=256
	Addresses []NetworkAddresses `json:"addresses,omitempty"`

	// podUID is the pod that uses the addresses or used them last. It is absent if it is not known.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PodUID string `json:"podUID,omitempty"`

	// since is when the phase began.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// lastBoundTime is when a pod got the addresses for the last time, by the clock of the node. Of all nodes that keep
	// addresses of a pod, the node with the latest is its home. It is absent if the node does not know it.
	// +optional
	LastBoundTime *metav1.Time `json:"lastBoundTime,omitempty"`

	// expires is when the addresses become free. It is absent while they are bound, and if they are kept without an end.
	// +optional
	Expires *metav1.Time `json:"expires,omitempty"`
}

// NetworkAddresses are the addresses of one interface of a pod.
type NetworkAddresses struct {
	// network is its name in the CNI configuration.
	// +kubebuilder:validation:MaxLength=253
	Network string `json:"network"`
	// interface is its name inside the pod.
	// +kubebuilder:validation:MaxLength=64
	Interface string `json:"interface"`
	// ips are the addresses, one of each family.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=64
	IPs []string `json:"ips"`
}

// RetainedIPList is a list of RetainedIP.
//
// +kubebuilder:object:root=true
type RetainedIPList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []RetainedIP `json:"items"`
}
