package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

const (
	// pace is how often each vantage asks.
	pace = 50 * time.Millisecond
	// soon is how long an answer may take.
	soon = 500 * time.Millisecond
	// lookAgain is how long the sandbox of a client that was not found is not looked for.
	lookAgain = 2 * time.Second
)

// vantage is from where pods are asked: a node, or an ordinary pod of it.
type vantage struct {
	node   *lab.ClusterNode
	client func(node string) string // the pod, nil if the node itself

	mu      sync.Mutex
	sandbox *lab.Pod // of the client
	looked  time.Time
}

func (v *vantage) String() string {
	if v.client == nil {
		return v.node.Name
	}
	return "a pod of " + v.node.Name
}

// errAbsent: nobody is there who could ask.
var errAbsent = errors.New("nobody asks")

// ask asks whoever answers at an address.
func (v *vantage) ask(ctx context.Context, a netip.Addr) (lab.Answer, error) {
	if v.node.Pid() == 0 {
		return lab.Answer{}, errAbsent
	}
	if v.client == nil {
		return v.node.Get(ctx, a)
	}
	from := v.from(ctx)
	if from == nil {
		return lab.Answer{}, errAbsent
	}
	answer, err := v.node.GetFrom(ctx, *from, a)
	if err != nil {
		v.mu.Lock()
		if time.Since(v.looked) > lookAgain {
			v.sandbox = nil // it may be another one by now
		}
		v.mu.Unlock()
	}
	return answer, err
}

// from returns the client's sandbox, nil if it has none.
func (v *vantage) from(ctx context.Context) *lab.Pod {
	v.mu.Lock()
	defer v.mu.Unlock()
	name := v.client(v.node.Name)
	if v.sandbox != nil && v.sandbox.Name == name {
		return v.sandbox
	}
	if name == "" || time.Since(v.looked) < lookAgain {
		return nil
	}
	v.looked = time.Now()
	is, err := v.node.Sandbox(ctx, namespace, name)
	if err != nil {
		v.sandbox = nil
		return nil
	}
	v.sandbox = &is
	return v.sandbox
}

// asking has every vantage ask 20 times a second, until ctx ends: for an address that has lately moved every other
// time, if there is one.
func (s *routed) asking(ctx context.Context, v *vantage) {
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
func (s *routed) one(ctx context.Context, v *vantage, to netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, soon)
	defer cancel()
	asked := time.Now()
	answer, err := v.ask(ctx, to)
	switch {
	case errors.Is(err, errAbsent):
	case err != nil:
		s.report.count(tableUnheard, "by "+v.String())
	default:
		s.report.count(tableAsked, "answered to "+v.String())
		s.answers.hear(to, v.String(), asked, answer)
	}
}
