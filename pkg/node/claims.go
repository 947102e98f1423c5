package node

import (
	"slices"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
)

// claimsOf is what the books promise. at is the time that what is left of a retention counts from.
func claimsOf(books []book, at time.Time) []retainedip.Claim {
	byKey := map[ledger.Key]*retainedip.Claim{}
	var all []*retainedip.Claim
	for _, b := range books {
		for _, ad := range b.addrs {
			if ad.Key == nil {
				continue
			}
			c := byKey[*ad.Key]
			if c == nil {
				c = &retainedip.Claim{Key: *ad.Key, Policy: ad.Policy, Phase: retainedip.PhaseRetained,
					Pod: ledger.Pod{Namespace: ad.Key.Namespace(), Name: ad.Key.Pod}}
				byKey[*ad.Key] = c
				all = append(all, c)
			}
			c.Addrs = append(c.Addrs, ad.Addr)
			switch {
			case ad.State == ledger.StateBound: // of any address: the claim is in use
				c.Phase, c.ContainerID, c.Since, c.Expires = retainedip.PhaseBound, ad.Attachment.ContainerID, time.Time{},
					time.Time{}
				if ad.Pod.Name != "" {
					c.Pod = ad.Pod
				}
			case c.Phase == retainedip.PhaseRetained:
				c.Since = ad.Since
				if ad.Ends {
					c.Expires = at.Add(ad.Left)
				}
			}
		}
	}
	claims := make([]retainedip.Claim, len(all))
	for i, c := range all {
		claims[i] = *c
	}
	slices.SortFunc(claims, func(a, b retainedip.Claim) int {
		return slices.Compare([]byte(a.Key.Network+"\x00"+a.Key.String()), []byte(b.Key.Network+"\x00"+b.Key.String()))
	})
	return claims
}

// sameClaims compares as people would: when a claim expires is computed from clocks that run apart.
func sameClaims(a, b []retainedip.Claim) bool {
	return slices.EqualFunc(a, b, func(a, b retainedip.Claim) bool {
		apart := a.Expires.Sub(b.Expires).Abs()
		return a.Key == b.Key && slices.Equal(a.Addrs, b.Addrs) && a.Phase == b.Phase && a.Policy == b.Policy &&
			a.ContainerID == b.ContainerID && a.Pod == b.Pod && a.Since.Equal(b.Since) && apart < 2*time.Second
	})
}
