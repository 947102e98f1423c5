package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// PodIPPool is a set of addresses that belong to pods, on whichever node these run. Pools of one cluster are one
// address space.
//
// +kubebuilder:object:root=true
// +kubebuilder:ac:generate=false
// +kubebuilder:resource:path=podippools,shortName=pippool,categories=stayput,scope=Cluster
// +kubebuilder:subresource:status
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="Mode",type=string,JSONPath=`.spec.mode`
// +kubebuilder:printcolumn:name="Subnet",type=string,JSONPath=`.spec.subnet`
// +kubebuilder:printcolumn:name="Total",type=integer,JSONPath=`.status.addresses.total`
// +kubebuilder:printcolumn:name="Used",type=integer,JSONPath=`.status.addresses.used`
// +kubebuilder:printcolumn:name="Free",type=integer,JSONPath=`.status.addresses.free`
// +kubebuilder:printcolumn:name="Out of range",type=integer,JSONPath=`.status.addresses.outOfRange`,priority=1
// +kubebuilder:printcolumn:name="Allocation",type=string,JSONPath=`.spec.allocation`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PodIPPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec PodIPPoolSpec `json:"spec"`
	// +optional
	Status PodIPPoolStatus `json:"status,omitempty"`
}

// PodIPPoolSpec says which addresses the pool has, for whom, and how packets find them. A change takes no address from
// a pod that has it: what is no longer in the pool, or no longer for a namespace, stays with its pod until that ends.
//
// +kubebuilder:validation:XValidation:rule="self.mode == 'L2' || !(has(self.gateway) || has(self.routes))",message="gateway and routes are for mode L2: otherwise pods use the gateway of the node that they run on"
// +kubebuilder:validation:XValidation:rule="!has(self.gateway) || (isIP(self.gateway) && cidr(self.subnet).containsIP(self.gateway))",message="gateway: expected an address in subnet"
// +kubebuilder:validation:XValidation:rule="!has(self.addresses) || self.addresses.all(a, a.contains('/') ? !isCIDR(a) || cidr(self.subnet).containsCIDR(a) : a.split('-').all(p, !isIP(p) || cidr(self.subnet).containsIP(p)))",message="addresses: expected addresses in subnet"
type PodIPPoolSpec struct {
	// mode is how packets find a pod of the pool. L2: all nodes are on one link, and the pod announces itself there.
	// Routed: every node has a route to the node that serves the pod. Calico: the subnet is part of an IPPool of Calico,
	// whose IPAM gives the pod its address and whose Felix routes to it.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.mode is immutable: make another pool"
	Mode PodIPPoolMode `json:"mode"`

	// subnet is the CIDR of the addresses, of one family: 10.6.0.0/16.
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="spec.subnet is immutable: make another pool"
	// +kubebuilder:validation:XValidation:rule="self.lowerAscii().startsWith('::ffff:') || (isCIDR(self) && cidr(self).masked() == cidr(self))",message="expected a CIDR without host bits, such as 10.6.0.0/16"
	// +kubebuilder:validation:XValidation:rule="!self.lowerAscii().startsWith('::ffff:') && (!isCIDR(self) || cidr(self).ip().family() == 4 || !(cidr('::/8').containsCIDR(self) || cidr(self).containsIP('::')))",message="IPv4-mapped addresses (::ffff:0:0/96) and their neighbours are no addresses of pods: write an IPv4 subnet, such as 10.6.0.0/16"
	Subnet string `json:"subnet"`

	// addresses are what the pool gives: addresses, ranges of them (10.6.168.101-10.6.168.110) and CIDRs. If it is absent,
	// the pool gives the whole subnet but its first and last address and the gateway.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=79
	// +kubebuilder:validation:items:XValidation:rule="self.contains('/') ? isCIDR(self) : self.split('-').size() <= 2 && self.split('-').all(p, isIP(p))",message="expected an address, a range such as 10.6.168.101-10.6.168.110, or a CIDR"
	// +listType=atomic
	Addresses []string `json:"addresses,omitempty"`

	// excludedAddresses are never given. They are written in the same way, and need not be among addresses.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=79
	// +kubebuilder:validation:items:XValidation:rule="self.contains('/') ? isCIDR(self) : self.split('-').size() <= 2 && self.split('-').all(p, isIP(p))",message="expected an address, a range such as 10.6.168.101-10.6.168.110, or a CIDR"
	// +listType=atomic
	ExcludedAddresses []string `json:"excludedAddresses,omitempty"`

	// gateway is the address of the subnet's gateway, for mode L2. It is given to no pod.
	// +optional
	// +kubebuilder:validation:MaxLength=39
	Gateway string `json:"gateway,omitempty"`

	// routes are what pods get beside the route by the gateway, for mode L2.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	Routes []PodIPRoute `json:"routes,omitempty"`

	// namespaceSelector selects the namespaces whose pods may get addresses of the pool; by default all.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(!has(self.matchLabels) || size(self.matchLabels) <= 64) && (!has(self.matchExpressions) || size(self.matchExpressions) <= 64)",message="expected at most 64 labels and 64 expressions"
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`

	// nodeSelector selects the nodes that are on the pool's link; by default all. Pods with addresses of the pool are
	// scheduled to these alone.
	// +optional
	// +kubebuilder:validation:XValidation:rule="(!has(self.matchLabels) || size(self.matchLabels) <= 64) && (!has(self.matchExpressions) || size(self.matchExpressions) <= 64)",message="expected at most 64 labels and 64 expressions"
	NodeSelector *metav1.LabelSelector `json:"nodeSelector,omitempty"`

	// allocation is Enabled if pods that have no address of the pool can get one, Disabled if they cannot. Pods that have
	// one keep it.
	// +optional
	// +kubebuilder:default=Enabled
	Allocation PodIPPoolAllocation `json:"allocation,omitempty"`
}

// PodIPPoolMode is how packets find the pods of a pool.
//
// +kubebuilder:validation:Enum=L2;Routed;Calico
type PodIPPoolMode string

// The modes.
const (
	ModeL2     PodIPPoolMode = "L2"
	ModeRouted PodIPPoolMode = "Routed"
	ModeCalico PodIPPoolMode = "Calico"
)

// PodIPPoolAllocation is whether a pool gives addresses to pods that have none.
//
// +kubebuilder:validation:Enum=Enabled;Disabled
type PodIPPoolAllocation string

// The values of PodIPPoolAllocation; none is AllocationEnabled.
const (
	AllocationEnabled  PodIPPoolAllocation = "Enabled"
	AllocationDisabled PodIPPoolAllocation = "Disabled"
)

// PodIPRoute is a route of a pod.
type PodIPRoute struct {
	// dst is the destination, a CIDR.
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self)",message="expected a CIDR, such as 10.9.0.0/16"
	Destination string `json:"dst"`
	// gw is the next hop, an address.
	// +kubebuilder:validation:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="expected an address"
	Gateway string `json:"gw"`
}

// Conditions of a PodIPPool.
const (
	// ConditionReady: the pool gives addresses. If not, the reason says which field is wrong.
	ConditionReady = "Ready"
	// ConditionOverlaps: the pool shares addresses with another pool, the pods of a node or Services.
	ConditionOverlaps = "Overlaps"
	// ConditionExhausted: pods wait for an address of the pool.
	ConditionExhausted = "Exhausted"
)

// PodIPPoolStatus is what the controller counts.
type PodIPPoolStatus struct {
	// addresses counts the addresses of the pool.
	// +optional
	Addresses PodIPPoolAddresses `json:"addresses,omitempty"`

	// conditions are Ready, Overlaps and Exhausted.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PodIPPoolAddresses counts the addresses of a pool. A count of more than 2^63-1 is shown as 2^63-1.
type PodIPPoolAddresses struct {
	// total is how many the pool may give.
	Total int64 `json:"total"`
	// used is how many of these belong to pods or are kept for them.
	Used int64 `json:"used"`
	// free is how many can be given now.
	Free int64 `json:"free"`
	// outOfRange is how many are kept for their holders though they are no longer among the pool's addresses.
	OutOfRange int64 `json:"outOfRange"`
}

// PodIPPoolList is a list of PodIPPool.
//
// +kubebuilder:object:root=true
type PodIPPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PodIPPool `json:"items"`
}
