package node

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/retainedip"
)

// claimsOf is what the books promise. at is the time that what is left of a retention counts from.
func claimsOf(books []book, at time.Time) []retainedip.Claim {
	var claims []retainedip.Claim
	index := map[ledger.Key]int{}
	for _, b := range books {
		for _, ad := range b.addrs {
			if ad.Key == nil {
				continue
			}
			i, known := index[*ad.Key]
			if !known {
				i = len(claims)
				index[*ad.Key] = i
				claims = append(claims, retainedip.Claim{
					Key: *ad.Key, Policy: ad.Policy, Phase: retainedip.PhaseRetained,
					Pod: ledger.Pod{Namespace: ad.Key.Namespace(), Name: ad.Key.Pod},
				})
			}
			c := &claims[i]
			c.Addrs = append(c.Addrs, ad.Addr)
			if ad.Bound.After(c.Bound) {
				c.Bound = ad.Bound
			}
			switch {
			case ad.State == ledger.StateBound: // of any address: the claim is in use
				c.Phase, c.ContainerID = retainedip.PhaseBound, ad.Attachment.ContainerID
				c.Since, c.Expires = time.Time{}, time.Time{}
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
	slices.SortFunc(claims, func(a, b retainedip.Claim) int {
		return cmp.Or(strings.Compare(a.Key.Network, b.Key.Network), strings.Compare(a.Key.String(), b.Key.String()))
	})
	return claims
}

// sameClaims compares as people would: when a claim expires is computed from clocks that run apart.
func sameClaims(a, b []retainedip.Claim) bool {
	return slices.EqualFunc(a, b, func(a, b retainedip.Claim) bool {
		apart := a.Expires.Sub(b.Expires).Abs()
		return a.Key == b.Key && slices.Equal(a.Addrs, b.Addrs) && a.Phase == b.Phase && a.Policy == b.Policy &&
			a.ContainerID == b.ContainerID && a.Pod == b.Pod && a.Bound.Equal(b.Bound) && a.Since.Equal(b.Since) &&
			apart < 2*time.Second
	})
}
