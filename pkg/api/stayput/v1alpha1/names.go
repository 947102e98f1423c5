package v1alpha1

import "github.com/stayput/stayput/pkg/retention"

// Annotations of a pod template. [retention.Parse] reads the first seven.
const (
	AnnotationRetainIP           = retention.AnnotationRetainIP
	AnnotationWhenScaled         = retention.AnnotationWhenScaled
	AnnotationWhenDeleted        = retention.AnnotationWhenDeleted
	AnnotationWhenMoved          = retention.AnnotationWhenMoved
	AnnotationIdentity           = retention.AnnotationIdentity
	AnnotationWhenInUse          = retention.AnnotationWhenInUse
	AnnotationReservedIPDuration = retention.AnnotationReservedIPDuration

	// AnnotationHomeWait is how long a pod waits for a home that cannot take it: a Go duration, 60s by default, or
	// [HomeWaitRetention].
	AnnotationHomeWait = "stayput.io/home-wait"
	// AnnotationHome is whether a pod can start only at the home that keeps its address, while that can take it:
	// [HomeRequired], the default, or [HomePreferred].
	AnnotationHome = "stayput.io/home"
)

// AnnotationPools names the PodIPPools of a pod: names, separated by commas, of which several of one family are an
// order of fallback; POOL@INTERFACE is for another interface than eth0. On a namespace it is the default of its pods;
// empty on a pod, it asks for none. On the ConfigMap stayput-installation it is there while there is a PodIPPool, and
// says which ([ServedPools]): the agents know by that whether there is anything to do.
const AnnotationPools = "stayput.io/pools"

// LabelDefaultPools is on the namespaces whose annotations name pools for their pods, and on no other: by it an
// admission policy finds the pods that it gates. Another policy keeps it.
const LabelDefaultPools = "stayput.io/default-pools"

// PodAnnotations are all annotations by which a pod asks, in the order of docs/annotations.md. The policy
// stayput-advice warns of any other one that looks like these.
var PodAnnotations = []string{
	AnnotationRetainIP, AnnotationHome, AnnotationHomeWait, AnnotationWhenInUse, AnnotationIdentity, AnnotationWhenScaled,
	AnnotationWhenDeleted, AnnotationWhenMoved, AnnotationPools, AnnotationReservedIPDuration,
}

// PolicyAddresses is the name of the admission policy, and of its binding, that lets only the controller write
// [AnnotationAddresses].
const PolicyAddresses = "stayput-addresses"

// AnnotationRoutedPools on the ConfigMap stayput-installation is "true" while there is a PodIPPool of mode Routed: the
// agents know by that whether they are to route.
const AnnotationRoutedPools = "stayput.io/routed-pools"

// AnnotationCalicoSubnets is on the same ConfigMap and names the subnets of all pools of mode Calico, separated by
// commas. The policy stayput-calico-addresses goes by it.
const AnnotationCalicoSubnets = "stayput.io/calico-subnets"

// AnnotationAddresses are the addresses of pools that a pod has, as JSON. Only the controller sets it, once, as it
// removes the gate.
const AnnotationAddresses = "stayput.io/addresses"

// Values of [AnnotationHome].
const (
	HomeRequired  = "Required"
	HomePreferred = "Preferred"
)

// HomeWaitRetention is the value of [AnnotationHomeWait] for a pod that waits as long as its address is kept.
const HomeWaitRetention = "retention"

// PlacementGate is the scheduling gate of a pod that the controller has yet to place.
const PlacementGate = "stayput.io/placement"

// Field managers of server-side apply.
const (
	ControllerFieldManager = "stayput-controller"
	AgentFieldManager      = "stayput-agent"
)

// LabelGenerated marks a PersistentPodState that the controller generated: GeneratedByWorkload for the annotations of a
// workload, GeneratedByHome for the annotation stayput.io/home of its pod template, whose pods go by the name of their
// node and not by its labels.
const (
	LabelGenerated      = "stayput.io/generated"
	GeneratedByWorkload = "true"
	GeneratedByHome     = "home"
)

// AnnotationPinned is put on a pod that the controller has pinned to a home, which is its value.
const AnnotationPinned = "stayput.io/pinned"

// RetentionWhileOwned keeps addresses for as long as their workload wants the pod.
const RetentionWhileOwned = retention.WhileOwned

// What happens to addresses when the workload is scaled down below the pod or deleted, or the pod has moved.
const (
	PolicyRetain  = retention.Retain
	PolicyRelease = retention.Release
)
