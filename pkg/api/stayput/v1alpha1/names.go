package v1alpha1

// Annotations of a pod template. The first six are the node's as well; pkg/ledger parses their values.
const (
	AnnotationRetainIP           = "stayput.io/retain-ip"
	AnnotationWhenScaled         = "stayput.io/when-scaled"
	AnnotationWhenDeleted        = "stayput.io/when-deleted"
	AnnotationIdentity           = "stayput.io/identity"
	AnnotationWhenInUse          = "stayput.io/when-in-use"
	AnnotationReservedIPDuration = "io.kubernetes.cri/reserved-ip-duration"

	// AnnotationHomeWait is how long a pod waits for a home that cannot take it: a Go duration, or
	// [HomeWaitRetention]. The default is [DefaultHomeWait].
	AnnotationHomeWait = "stayput.io/home-wait"
)

// HomeWaitRetention is the value of [AnnotationHomeWait] by which a pod waits as long as its address is kept.
const HomeWaitRetention = "retention"

// PlacementGate is the scheduling gate of a pod whose home the controller has yet to look up.
const PlacementGate = "stayput.io/placement"

// Field managers of server-side apply.
const (
	ControllerFieldManager = "stayput-controller"
	AgentFieldManager      = "stayput-agent"
)

// LabelGenerated marks a PersistentPodState that the controller generated from a workload's annotations.
const LabelGenerated = "stayput.io/generated"

// AnnotationHome is put on a pod whose node affinity the controller has narrowed to a home; its value says which.
const AnnotationHome = "stayput.io/home"

// RetentionWhileOwned is the retention of addresses that are kept while their workload wants the pod.
const RetentionWhileOwned = "while-owned"

// What becomes of addresses when the workload is scaled down below the pod, or deleted.
const (
	PolicyRetain  = "Retain"
	PolicyRelease = "Release"
)
