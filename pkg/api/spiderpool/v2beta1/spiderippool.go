package v2beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// SchemeGroupVersion is the group and version of the objects in this package.
var SchemeGroupVersion = schema.GroupVersion{Group: "spiderpool.spidernet.io", Version: "v2beta1"}

// AddToScheme registers the objects of this package with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(SchemeGroupVersion, &SpiderIPPool{}, &SpiderIPPoolList{})
	metav1.AddToGroupVersion(s, SchemeGroupVersion)
	return nil
}

// SpiderIPPool is a set of addresses that belong to pods. Stayput serves it as a PodIPPool of mode L2, unless there is
// a PodIPPool of the same name, or it has a field that Stayput does not support: then it gives no address, and an Event
// says why.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=spiderippools,scope=Cluster,shortName=sp,categories=spiderpool
// +kubebuilder:subresource:status
// +kubebuilder:metadata:labels="app.kubernetes.io/part-of=stayput"
// +kubebuilder:printcolumn:name="VERSION",type=string,JSONPath=`.status.ipVersion`
// +kubebuilder:printcolumn:name="SUBNET",type=string,JSONPath=`.spec.subnet`
// +kubebuilder:printcolumn:name="ALLOCATED-IP-COUNT",type=integer,JSONPath=`.status.allocatedIPCount`
// +kubebuilder:printcolumn:name="TOTAL-IP-COUNT",type=integer,JSONPath=`.status.totalIPCount`
// +kubebuilder:printcolumn:name="DEFAULT",type=boolean,JSONPath=`.spec.default`
// +kubebuilder:printcolumn:name="DISABLE",type=boolean,JSONPath=`.spec.disable`,priority=10
type SpiderIPPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec SpiderIPPoolSpec `json:"spec,omitempty"`
	// +optional
	Status SpiderIPPoolStatus `json:"status,omitempty"`

	// Unreadable says why nothing but the metadata is known, empty if all is.
	Unreadable string `json:"-"`
}

// SpiderIPPoolSpec says which addresses there are, and for whom.
//
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.subnet) || !has(self.gateway) || size(self.gateway) == 0 || (isIP(self.gateway) && cidr(self.subnet).containsIP(self.gateway))",message="gateway: expected an address in subnet"
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.subnet) || !has(self.ips) || self.ips.all(a, a.contains('/') ? !isCIDR(a) || cidr(self.subnet).containsCIDR(a) : a.split('-').all(p, !isIP(p) || cidr(self.subnet).containsIP(p)))",message="ips: expected addresses in subnet"
type SpiderIPPoolSpec struct {
	// ipVersion is the family of subnet.
	// +optional
	// +kubebuilder:validation:Enum=4;6
	IPVersion *int64 `json:"ipVersion,omitempty"`

	// subnet of the pods' link, a CIDR.
	// +kubebuilder:validation:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="isCIDR(self) && cidr(self).masked() == cidr(self)",message="expected a CIDR without host bits, such as 10.6.0.0/16"
	Subnet string `json:"subnet"`

	// ips are addresses and ranges of addresses; without any, the pool gives none.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=79
	// +kubebuilder:validation:items:XValidation:rule="self.contains('/') ? isCIDR(self) : self.split('-').size() <= 2 && self.split('-').all(p, isIP(p))",message="expected an address, a range such as 10.6.168.101-10.6.168.110, or a CIDR"
	// +listType=atomic
	IPs []string `json:"ips,omitempty"`

	// excludeIPs are addresses and ranges that are not given, though they are in ips.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=79
	// +kubebuilder:validation:items:XValidation:rule="self.contains('/') ? isCIDR(self) : self.split('-').size() <= 2 && self.split('-').all(p, isIP(p))",message="expected an address, a range such as 10.6.168.101-10.6.168.110, or a CIDR"
	// +listType=atomic
	ExcludeIPs []string `json:"excludeIPs,omitempty"`

	// gateway of the pods' default route.
	// +optional
	// +kubebuilder:validation:MaxLength=39
	Gateway *string `json:"gateway,omitempty"`

	// routes that pods get.
	// +optional
	// +listType=atomic
	Routes []Route `json:"routes,omitempty"`

	// podAffinity is not supported.
	// +optional
	PodAffinity *metav1.LabelSelector `json:"podAffinity,omitempty"`

	// namespaceAffinity selects the namespaces whose pods get addresses.
	// +optional
	NamespaceAffinity *metav1.LabelSelector `json:"namespaceAffinity,omitempty"`

	// namespaceName names these namespaces. It counts before namespaceAffinity.
	// +optional
	// +listType=atomic
	NamespaceName []string `json:"namespaceName,omitempty"`

	// nodeAffinity selects the nodes that are on the link. Its pods are scheduled to these alone.
	// +optional
	NodeAffinity *metav1.LabelSelector `json:"nodeAffinity,omitempty"`

	// nodeName is not supported.
	// +optional
	// +listType=atomic
	NodeName []string `json:"nodeName,omitempty"`

	// multusName is not supported.
	// +optional
	// +listType=atomic
	MultusName []string `json:"multusName,omitempty"`

	// default is not supported: the default of a namespace is its annotation.
	// +optional
	// +kubebuilder:default=false
	Default *bool `json:"default,omitempty"`

	// disable: no pod gets a new address.
	// +optional
	// +kubebuilder:default=false
	Disable *bool `json:"disable,omitempty"`
}

// Route is a route that pods of a pool get.
type Route struct {
	// dst is where it leads to, a CIDR.
	Dst string `json:"dst"`
	// gw is the next hop.
	Gw string `json:"gw"`
}

// SpiderIPPoolStatus counts.
type SpiderIPPoolStatus struct {
	// allocatedIPs are the addresses that Spiderpool has given, as JSON. Stayput keeps them as PodIPs.
	// +optional
	AllocatedIPs *string `json:"allocatedIPs,omitempty"`

	// totalIPCount is how many addresses the pool has.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TotalIPCount *int64 `json:"totalIPCount,omitempty"`

	// allocatedIPCount is how many of them are in use.
	// +optional
	// +kubebuilder:validation:Minimum=0
	AllocatedIPCount *int64 `json:"allocatedIPCount,omitempty"`

	// ipVersion is the family of spec.subnet. Spiderpool writes it into spec, where people may leave it out here.
	// +optional
	IPVersion *int64 `json:"ipVersion,omitempty"`
}

// SpiderIPPoolList is a list of SpiderIPPool.
//
// +kubebuilder:object:root=true
type SpiderIPPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SpiderIPPool `json:"items"`
}
