package ledger

import (
	"net/netip"
	"time"
)

// EventReason is a word for what happened, in the form of the reason of a Kubernetes Event.
type EventReason string

const (
	EventRestored    EventReason = "IPRestored"
	EventNotRestored EventReason = "IPNotRestored"
	EventRefused     EventReason = "IPRetentionRefused"
	EventClamped     EventReason = "IPRetentionClamped"
)

// Event is something that the people who own the pod should hear of.
type Event struct {
	Reason      EventReason  `json:"reason"`
	Key         Key          `json:"key"`
	Pod         Pod          `json:"pod"`
	ContainerID string       `json:"containerID,omitempty"`
	Netns       string       `json:"netns,omitempty"`
	Addrs       []netip.Addr `json:"addrs,omitempty"`
	Message     string       `json:"message,omitempty"`
	Time        time.Time    `json:"time"`
}
