package route_test

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/test/must"
)

// crowd are places of n pods on other nodes.
func crowd(n int) map[netip.Addr]route.Place {
	all := map[netip.Addr]route.Place{}
	for i, a := 0, netip.MustParseAddr("10.99.0.1"); i < n; i, a = i+1, a.Next() {
		all[a] = route.Place{PodCIDR: podCIDR(2+i%2, a)}
	}
	return all
}

// BenchmarkAgentStart is how long a node's routes take to be right after its agent has started: without any, and if
// they are there from the last one.
func BenchmarkAgentStart(b *testing.B) {
	for _, size := range []int{1000, 10000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			n := newNodes(b, "host-gw", "")
			places := crowd(size)
			start := func() time.Duration {
				ctx, cancel := context.WithCancel(b.Context())
				over := make(chan struct{})
				t := route.New(n.options(1))
				begin := time.Now()
				t.Set(places)
				go func() { defer close(over); t.Run(ctx) }()
				for t.Routes() < size {
					time.Sleep(time.Millisecond)
				}
				took := time.Since(begin)
				cancel()
				<-over
				return took
			}
			var fresh, again time.Duration
			for b.Loop() {
				must.Do(b, route.Remove(n.options(1)))
				fresh += start()
				again += start()
			}
			b.ReportMetric(fresh.Seconds()/float64(b.N), "s/fresh")
			b.ReportMetric(again.Seconds()/float64(b.N), "s/again")
		})
	}
}

// BenchmarkMove is the CPU time of a node that serves none of 10,000 addresses for one whose pod moves.
func BenchmarkMove(b *testing.B) {
	n := newNodes(b, "host-gw", "")
	places := crowd(10000)
	t := route.New(n.options(1))
	ctx, cancel := context.WithCancel(b.Context())
	over := make(chan struct{})
	t.Set(places)
	go func() { defer close(over); t.Run(ctx) }()
	defer func() { cancel(); <-over }()
	for t.Routes() < len(places) {
		time.Sleep(time.Millisecond)
	}
	a := netip.MustParseAddr("10.99.0.1")
	before := cpu()
	for i := 0; b.Loop(); i++ {
		t.Put(a, route.Place{PodCIDR: podCIDR(2+i%2, a)})
		time.Sleep(2 * time.Millisecond) // each one alone
	}
	b.ReportMetric((cpu()-before).Seconds()*1000/float64(b.N), "cpu-ms/move")
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
