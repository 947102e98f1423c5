package v1alpha1

import (
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodIP is one address that belongs to a pod and not to a node. Its name is the address, so that only one can exist:
// to create it is to claim the address. To release it, set spec.release or delete the object; both wait until no pod
// can have the address any more.
//
// +kubebuilder:object:root=true
// +kubebuilder:ac:generate=false
// +kubebuilder:resource:path=podips,shortName=pip,categories=stayput,scope=Cluster
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.spec.pool`
// +kubebuilder:selectablefield:JSONPath=`.status.podCIDR`
// +kubebuilder:selectablefield:JSONPath=`.status.nodeName`
// +kubebuilder:selectablefield:JSONPath=`.spec.adoptedOn`
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Namespace",type=string,JSONPath=`.spec.namespace`
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.spec.podName`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.nodeName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.status.expires`
// +kubebuilder:printcolumn:name="Interface",type=string,JSONPath=`.spec.interface`,priority=1
// +kubebuilder:printcolumn:name="Workload",type=string,JSONPath=`.spec.workload.name`,priority=1
// +kubebuilder:printcolumn:name="Conflict",type=string,JSONPath=`.status.conflict`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.contains('.') ? isIP(self.metadata.name) && ip(self.metadata.name).family() == 4 : self.metadata.name.matches('^([0-9a-f]{4}-){7}[0-9a-f]{4}$')",message="metadata.name: expected an IPv4 address, or an IPv6 address as eight groups of four digits joined by -, such as 2001-0db8-0000-0000-0000-0000-0000-0001"
type PodIP struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PodIPSpec `json:"spec"`
	// +optional
	// +kubebuilder:default={phase: Allocated}
	Status PodIPStatus `json:"status,omitempty"`
}

// PodIPSpec says which pod has the address. The controller writes it; administrators may set release.
type PodIPSpec struct {
	// pool is the PodIPPool that gave the address.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.pool is immutable"
	// +kubebuilder:validation:MaxLength=253
	Pool string `json:"pool"`

	// mode is the mode of the pool.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.mode is immutable"
	Mode PodIPPoolMode `json:"mode"`

	// namespace is the namespace of the pods that the address belongs to. It changes only after a restore of a backup, if
	// a pod of another namespace turns out to have the address.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Namespace string `json:"namespace"`

	// podName is the pod that has the address or had it last.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName"`

	// podUID is the pod that the address is given to, or was given to last. It changes only once it is certain that
	// the pod that it names no longer has the address.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodUID string `json:"podUID"`

	// identity is the shared identity (annotation stayput.io/identity) that has the address. It is absent if the address
	// is the pod's own.
	// +optional
	// +kubebuilder:validation:MaxLength=262144
	Identity string `json:"identity,omitempty"`

	// network is the name of the pod's network in the CNI configuration.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Network string `json:"network,omitempty"`

	// interface is the name of the interface inside the pod.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Interface string `json:"interface"`

	// retention is how long the address is kept once the pod is gone: a Go duration, or while-owned. It is absent if the
	// address is free at once.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^(while-owned|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`
	Retention string `json:"retention,omitempty"`

	// whenScaled says what happens to the address when the workload is scaled down below the pod.
	// +optional
	// +kubebuilder:validation:Enum=Retain;Release
	WhenScaled string `json:"whenScaled,omitempty"`

	// whenDeleted says what happens to the address when the workload is deleted.
	// +optional
	// +kubebuilder:validation:Enum=Retain;Release
	WhenDeleted string `json:"whenDeleted,omitempty"`

	// workload is the controller of the pod. It is absent if the pod has none.
	// +optional
	Workload *WorkloadReference `json:"workload,omitempty"`

	// release asks for an end of the retention. With Now the address is free as soon as no pod can have it.
	// +optional
	Release Release `json:"release,omitempty"`

	// adoptedOn is the node on which the pod of podUID had the address before, from another program, so that Stayput does
	// not tell the pod of it. The address stays the pod's until it is certain that the pod no longer has it. It is absent
	// if the pool has given the address.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	AdoptedOn string `json:"adoptedOn,omitempty"`
}

// PodIPPhase is the state of an address.
//
// +kubebuilder:validation:Enum=Allocated;Bound;Retained
type PodIPPhase string

// The phases. Each is about the pod that status.podUID names: if that is not the one of the spec, or none, the address
// is given to a pod that no node may start with it yet.
const (
	PodIPAllocated PodIPPhase = "Allocated" // no node is named
	PodIPBound     PodIPPhase = "Bound"     // the named node may use the address, for that pod
	PodIPRetained  PodIPPhase = "Retained"  // the pod certainly no longer has the address, and will not get it again
)

// PodIPStatus names the node that may use the address. The agent of the pod's node writes it, but for expires: before a
// sandbox of the pod can have the address, and once none can any more. The controller writes it if the node is off for
// good.
type PodIPStatus struct {
	// phase is the state of the address. Bound comes before the pod can have the address. Retained is a promise: the pod
	// of podUID will never again have the address.
	// +optional
	Phase PodIPPhase `json:"phase,omitempty"`

	// podUID is the pod that phase, nodeName and since are about.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PodUID string `json:"podUID,omitempty"`

	// nodeName is the node of that pod.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// since is when the phase began.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// conflict is the MAC address of another machine that has the address on the pod's link, so that the pod cannot start.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Conflict string `json:"conflict,omitempty"`

	// podCIDR is the prefix by which other nodes route to the pods of nodeName, if the address is of mode Routed. While
	// phase is Bound, they route the address in the same way.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="isCIDR(self)",message="status.podCIDR: expected a CIDR"
	PodCIDR string `json:"podCIDR,omitempty"`

	// expires is when the address becomes free. It is absent while a pod has the address, and if it is kept without an
	// end.
	// +optional
	Expires *metav1.Time `json:"expires,omitempty"`
}

// FinalizerInUse is on a PodIP until no pod can have its address any more, and on a PodIPPool while it has PodIPs.
const FinalizerInUse = "stayput.io/in-use"

// PodIPName returns the name of the PodIP of an address: an IPv4 address as it is, an IPv6 address as its eight groups
// of four digits, joined by -.
func PodIPName(a netip.Addr) string {
	if a = a.Unmap().WithZone(""); a.Is4() {
		return a.String()
	}
	return strings.ReplaceAll(a.StringExpanded(), ":", "-")
}

// ParsePodIPName returns the address of the PodIP of this name.
func ParsePodIPName(name string) (netip.Addr, error) {
	a, err := netip.ParseAddr(strings.ReplaceAll(name, "-", ":"))
	if err != nil || PodIPName(a) != name {
		return netip.Addr{}, fmt.Errorf("%q is not the name of a PodIP: expected an IPv4 address, or an IPv6 address as "+
			"eight groups of four digits joined by -, such as 2001-0db8-0000-0000-0000-0000-0000-0001", name)
	}
	return a, nil
}

// PodIPList is a list of PodIP.
//
// +kubebuilder:object:root=true
type PodIPList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PodIP `json:"items"`
}
