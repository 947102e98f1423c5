package podip

import (
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/wake"
)

// servedPools is which pools the cluster has, as its installation says it. Its methods may be called with any lock
// held.
type servedPools struct {
	log     *slog.Logger
	changed wake.Signal // raised by set

	mu    sync.Mutex
	pools *v1alpha1.ServedPools // nil if there are none; it is never changed in place
	heard bool                  // whether the installation has said so
}

// set takes over what the installation says, empty if there are no pools.
func (s *servedPools) set(text string) {
	var pools *v1alpha1.ServedPools
	if text != "" {
		var err error
		if pools, err = v1alpha1.ParseServedPools(text); err != nil { // there are some
			s.log.Warn("Cannot read the pools", "err", err)
			pools = &v1alpha1.ServedPools{More: true}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.heard || !reflect.DeepEqual(s.pools, pools) {
		s.pools, s.heard = pools, true
		s.changed.Up()
	}
}

// get returns the pools, nil if there are none, and whether that is known.
func (s *servedPools) get() (pools *v1alpha1.ServedPools, heard bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pools, s.heard
}

// mayHave reports whether an address can be one of a pool, as far as is known. No other address is routed, even if a
// record says that it is a pod's.
func (s *servedPools) mayHave(a netip.Addr) bool {
	pools, _ := s.get()
	return pools == nil || pools.More ||
		slices.ContainsFunc(pools.Subnets, func(p netip.Prefix) bool { return p.Contains(a) })
}
