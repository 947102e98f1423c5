package retainedip

import (
	"net/netip"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
)

// Phase of a claim.
type Phase string

const (
	PhaseBound    Phase = "Bound"
	PhaseRetained Phase = "Retained"
)

// Claim is what is promised to one pod on this node, and how it stands.
type Claim struct {
	Key    ledger.Key
	Addrs  []netip.Addr
	Phase  Phase
	Policy retention.Policy
	// ContainerID and Pod are of a bound claim, Pod as far as it is known.
	ContainerID string
	Pod         ledger.Pod
	// Bound is when the claim was bound for the last time, zero if it is not known.
	Bound time.Time
	// Since and Expires are of a retained claim; a zero Expires is no end.
	Since, Expires time.Time
}

// Promises are all claims of a node.
type Promises struct {
	// Claims are sorted by network and key.
	Claims []Claim
	// Settled are the networks that are known to have no other claims: their ledgers were read, and have been reconciled
	// with the runtime since they were first seen. A claim of another network that is not among Claims may still turn up.
	Settled []string
}
