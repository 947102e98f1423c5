package node

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// What the agent reports beside the plugin's own events.
const (
	EventExpired           ledger.EventReason = "IPExpired"
	EventReleased          ledger.EventReason = "IPReleased"
	EventReclaimed         ledger.EventReason = "IPReclaimed"
	EventInvalidAnnotation ledger.EventReason = "InvalidAnnotation"
	EventNotConfigured     ledger.EventReason = "IPNotConfigured"
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
	Policy ledger.Policy
	// ContainerID and Pod are of a bound claim, Pod as far as it is known.
	ContainerID string
	Pod         ledger.Pod
	// Since and Expires are of a retained claim; a zero Expires is no end.
	Since, Expires time.Time
}

// Promises are all claims of a node.
type Promises struct {
	// Claims are sorted by network and key.
	Claims []Claim
	// Settled are the networks of which it is known that they have no other claims: their ledgers were read,
	// and have been reconciled with the runtime since they were first seen. A claim of another network that
	// is not among Claims may still turn up.
	Settled []string
}

// Publisher tells the world outside the node. Its methods are called from several goroutines and must not
// block: who writes to a network queues.
type Publisher interface {
	// PublishClaims is given what is promised whenever that has changed. It may keep but not change that.
	PublishClaims(Promises)
	// PublishEvent is given what the owner of a pod should hear of, once.
	PublishEvent(ledger.Event)
}

// publishers publish to all of them.
type publishers []Publisher

func (all publishers) PublishClaims(p Promises) {
	for _, to := range all {
		to.PublishClaims(p)
	}
}

func (all publishers) PublishEvent(e ledger.Event) {
	for _, to := range all {
		to.PublishEvent(e)
	}
}

// LogPublisher writes it all into the log.
type LogPublisher struct{ Log *slog.Logger }

func (p LogPublisher) PublishClaims(all Promises) {
	for _, c := range all.Claims {
		p.Log.Debug("Claim", "key", c.Key.String(), "network", c.Key.Network, "addrs", c.Addrs, "phase", c.Phase, "expires", c.Expires)
	}
}

func (p LogPublisher) PublishEvent(e ledger.Event) {
	level := slog.LevelInfo
	switch e.Reason {
	case ledger.EventNotRestored, ledger.EventRefused, EventInvalidAnnotation, EventNotConfigured, EventReclaimed, cniconf.EventNotConfigured:
		level = slog.LevelWarn
	}
	pod := e.Pod.String()
	if e.Pod.Name == "" && e.Key.Pod != "" {
		pod = e.Key.Namespace() + "/" + e.Key.Pod
	}
	p.Log.Log(context.Background(), level, string(e.Reason), "pod", pod, "sandbox", e.ContainerID, "addrs", e.Addrs, "network", e.Key.Network, "message", e.Message)
}

func (a *Agent) publish(e ledger.Event) { a.o.Publisher.PublishEvent(e) }

// claimsOf is what the books promise. at is the time that what is left of a retention counts from.
func claimsOf(books []book, at time.Time) []Claim {
	byKey := map[ledger.Key]*Claim{}
	var all []*Claim
	for _, b := range books {
		for _, ad := range b.addrs {
			if ad.Key == nil {
				continue
			}
			c := byKey[*ad.Key]
			if c == nil {
				c = &Claim{Key: *ad.Key, Policy: ad.Policy, Phase: PhaseRetained, Pod: ledger.Pod{Namespace: ad.Key.Namespace(), Name: ad.Key.Pod}}
				byKey[*ad.Key] = c
				all = append(all, c)
			}
			c.Addrs = append(c.Addrs, ad.Addr)
			switch {
			case ad.State == ledger.StateBound: // of any address: the claim is in use
				c.Phase, c.ContainerID, c.Since, c.Expires = PhaseBound, ad.Attachment.ContainerID, time.Time{}, time.Time{}
				if ad.Pod.Name != "" {
					c.Pod = ad.Pod
				}
			case c.Phase == PhaseRetained:
				c.Since = ad.Since
				if ad.Ends {
					c.Expires = at.Add(ad.Left)
				}
			}
		}
	}
	claims := make([]Claim, len(all))
	for i, c := range all {
		claims[i] = *c
	}
	slices.SortFunc(claims, func(a, b Claim) int {
		return slices.Compare([]byte(a.Key.Network+"\x00"+a.Key.String()), []byte(b.Key.Network+"\x00"+b.Key.String()))
	})
	return claims
}

// sameClaims compares as people would: when a claim expires is computed from clocks that run apart.
func sameClaims(a, b []Claim) bool {
	return slices.EqualFunc(a, b, func(a, b Claim) bool {
		apart := a.Expires.Sub(b.Expires).Abs()
		return a.Key == b.Key && slices.Equal(a.Addrs, b.Addrs) && a.Phase == b.Phase && a.Policy == b.Policy &&
			a.ContainerID == b.ContainerID && a.Pod == b.Pod && a.Since.Equal(b.Since) && apart < 2*time.Second
	})
}
