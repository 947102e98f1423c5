package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/stayput/stayput/test/answers"
	"github.com/stayput/stayput/test/lab"
)

const (
	// pace is how often each vantage asks.
	pace = 50 * time.Millisecond
	// soon is how long an answer may take.
	soon = 500 * time.Millisecond
)

// asking has every vantage ask 20 times a second, until ctx ends: for an address that has lately moved every other
// time, if there is one.
func (s *routed) asking(ctx context.Context, v *answers.Vantage) {
	var open sync.WaitGroup
	defer open.Wait()
	each := time.NewTicker(pace)
	defer each.Stop()
	for n := 0; ; n++ {
		select {
		case <-each.C:
		case <-ctx.Done():
			return
		}
		all, moving := s.tenants.addresses()
		if n%2 == 0 && len(moving) > 0 {
			all = moving
		}
		if len(all) == 0 {
			continue
		}
		to := all[rand.IntN(len(all))]
		open.Go(func() { s.one(ctx, v, to) })
	}
}

// one asks once.
func (s *routed) one(ctx context.Context, v *answers.Vantage, to netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, soon)
	defer cancel()
	asked := time.Now()
	answer, err := v.Ask(ctx, to)
	switch {
	case errors.Is(err, answers.ErrAbsent):
	case err != nil:
		s.report.count(tableUnheard, "by "+v.String())
	default:
		s.report.count(tableAsked, "answered to "+v.String())
		s.hear(to, v, asked, answer)
	}
}

// hear judges an answer.
func (s *routed) hear(to netip.Addr, v *answers.Vantage, asked time.Time, is lab.Answer) {
	if s.answers.Hear(to, v.String(), asked, is) {
		s.report.count(tablePods, "incarnations that answered")
	}
}
