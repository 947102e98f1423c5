package ledger

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/retention"
)

// EventReason is a word for what happened, in the form of the reason of a Kubernetes Event.
type EventReason string

const (
	EventRestored    EventReason = "IPRestored"
	EventNotRestored EventReason = "IPNotRestored"
	EventRefused     EventReason = retention.ReasonRefused
	// EventNamespaceRefused is about one namespace: other namespaces may still be promised addresses.
	EventNamespaceRefused EventReason = retention.ReasonNamespaceRefused
	EventClamped          EventReason = "IPRetentionClamped"
	// EventConflict means that another machine on the link has an address of a pool, so that the ADD failed.
	EventConflict EventReason = "IPConflict"
	// EventPooled means that a pod has got addresses of pools, for which its neighbours may know another link-layer
	// address. It is for the agent alone.
	EventPooled EventReason = "IPPooled"
)

// Miss is why a pod that was promised addresses got others.
type Miss int

const (
	MissOther        Miss = iota
	MissRangeChanged      // they are outside the network's ranges
	MissOtherRequested
	MissRetainedForOther
	MissInUse
	MissAllocateNew // the pod did not want to wait for its predecessor
)

var missWords = [...]string{"other", "range_changed", "other_requested", "retained_for_other", "in_use", "allocate_new"}

// Misses returns every Miss.
func Misses() []Miss {
	return []Miss{MissOther, MissRangeChanged, MissOtherRequested, MissRetainedForOther, MissInUse, MissAllocateNew}
}

// String returns the word for m that metrics and records use.
func (m Miss) String() string { return missWords[m] }

func (m Miss) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads a word that it does not know, such as a later version's, as MissOther.
func (m *Miss) UnmarshalText(b []byte) error {
	*m = Miss(max(0, slices.Index(missWords[:], string(b))))
	return nil
}

// Event is something that the people who own the pod should hear of. Its JSON is a record of the spool.
type Event struct {
	Reason      EventReason  `json:"reason"`
	Key         Key          `json:"key"`
	Pod         Pod          `json:"pod"`
	ContainerID string       `json:"containerID,omitempty"`
	Netns       string       `json:"netns,omitempty"`
	Addrs       []netip.Addr `json:"addrs,omitempty"`
	Message     string       `json:"message,omitempty"`
	Miss        Miss         `json:"miss,omitzero"` // of EventNotRestored
	MAC         string       `json:"mac,omitempty"` // of EventConflict: the machine's
	Time        time.Time    `json:"time"`
}

// clampedEvent says that a pod asked for more than the network allows, which is p.
func clampedEvent(key Key, asked, p retention.Policy) Event {
	return Event{Reason: EventClamped, Key: key,
		Message: fmt.Sprintf("retention %s exceeds the network's maximum, %s", asked.Duration(), p.Duration())}
}
