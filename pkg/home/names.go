package home

import (
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Reasons of the controller's Events about placement and retention.
const (
	ReasonHomeWait          = "WaitingForHome"
	ReasonHomeGivenUp       = "HomeGivenUp"
	ReasonHomeFull          = "HomeHasNoRoom"
	ReasonHomeIgnored       = "HomeIgnored"
	ReasonHomeMoved         = "HomeMoved"
	ReasonRetentionClamped  = "IPRetentionClamped"     // the address of a pool is kept for less than the pod asks
	ReasonNotPlaced         = "PodNotPlaced"           // each try to place a gated pod fails
	ReasonPodTooLong        = "PodTooLong"             // what a pod says of where it may go is not kept
	ReasonNotPassedOn       = "AnnotationsNotPassedOn" // recorded annotations that the API server refuses
	ReasonReleased          = "IPReleaseRequested"
	ReasonNotOwned          = "WhileOwnedWithoutOrdinal"
	ReasonOwnerUnreadable   = "OwnerUnreadable"   // whether a workload still wants an address
	ReasonInvalidAnnotation = "InvalidAnnotation" // the agents' too
	ReasonAddressWait       = "WaitingForAddress" // of a pool
	ReasonAddressHeld       = "AddressHeld"       // a PodIP that needs an operator
	ReasonPoolNotServed     = "PoolNotServed"     // a SpiderIPPool, or a field of it
)

// LeaseName is the Lease in Stayput's namespace that the leading controller holds.
const LeaseName = "stayput-controller"

// LeaderIdentity is the holder of the Lease in the pod of a name and UID. No other identity has a slash: they begin
// with a host name.
func LeaderIdentity(pod string, uid types.UID) string { return pod + "/" + string(uid) }

// LeaderOf returns the pod, or the host, of an identity, and the UID of the pod if the identity names it.
func LeaderOf(identity string) (name string, uid types.UID, isPod bool) {
	name, id, isPod := strings.Cut(identity, "/")
	if !isPod {
		name, _, _ = strings.Cut(identity, "_")
	}
	return name, types.UID(id), isPod
}

// KruiseWebhooks is the MutatingWebhookConfiguration that exists where OpenKruise runs, whose controller then serves
// PersistentPodStates itself.
const KruiseWebhooks = "kruise-mutating-webhook-configuration"

// Admission policies of deploy/chart, whose bindings bear the same names.
const (
	PolicyGateAnnotated = "stayput-gate-annotated"
	PolicyGateRecorded  = "stayput-gate-recorded"
	PolicyGatePools     = "stayput-gate-pools"    // only with pools, as is the next
	PolicyDefaultPools  = "stayput-default-pools" // gates nothing, and keeps a label by which PolicyGatePools does
	// PolicyGateDefaults gates what has its annotations by the namespace's default, which PolicyDefaultRetention labels.
	PolicyGateDefaults     = "stayput-gate-defaults"
	PolicyDefaultRetention = "stayput-default-retention"
	PolicyUniqueTarget     = "stayput-unique-target"
	PolicyRestored         = "stayput-restored" // gates nothing, and is installed where the gating ones are
)

// GatePermission is the ClusterRoleBinding that lets the controller gate pods: without it no policy and no webhook
// does.
const GatePermission = "stayput-gate"

// GatedWorkloads is the ConfigMap of a namespace that lists the workloads whose pods are gated because a
// PersistentPodState records them.
const GatedWorkloads = "stayput-gated-workloads"

// GateWebhook is the name of the webhook that gates pods where no policy can: of its MutatingWebhookConfiguration, its
// Service, and the Secret with its certificate.
const GateWebhook = "stayput-gate"

// PolicyVersions are the versions of admissionregistration.k8s.io that have MutatingAdmissionPolicies, the newest
// first: by default from Kubernetes 1.36 on, and from 1.34 on if v1beta1 is switched on.
var PolicyVersions = []string{"v1", "v1beta1"}
