package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// asker asks the pods over the network who they are.
type asker struct {
	report  *report
	weather *weather
	lives   *lives
	// ask returns what answers at an address, from outside of the nodes.
	ask func(context.Context, netip.Addr) (lab.Answer, error)
	// again is how long to wait before a wrong answer is checked.
	again time.Duration

	mu     sync.Mutex
	silent map[string]time.Time // pods that do not answer, since when
}

const (
	// askEvery is how often some pod is asked.
	askEvery = 200 * time.Millisecond
	// askFor is how long it may take to answer.
	askFor = 2 * time.Second
	// longestSilence is how long a pod that is Ready may not be heard, though nothing around it is broken. The node's
	// neighbours may be out of date for 30 to 70 s if its agent cannot tell them.
	longestSilence = 2 * time.Minute
	// confirmations is how often in a row a wrong answer has to come.
	confirmations = 5
)

// run asks one pod after the other until ctx ends.
func (a *asker) run(ctx context.Context) {
	var open sync.WaitGroup
	defer open.Wait()
	for ctx.Err() == nil {
		pods := a.lives.running()
		for _, pod := range pods {
			open.Go(func() { a.probe(ctx, pod) })
			if !sleep(ctx, askEvery) {
				return
			}
		}
		if len(pods) == 0 && !sleep(ctx, askEvery) {
			return
		}
	}
}

// sleep reports whether d passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// probe asks a pod once; if another one answers, until it is certain which of them is wrong.
func (a *asker) probe(ctx context.Context, pod life) {
	for wrong := 0; ; {
		answer, err := a.once(ctx, pod.ip)
		if ctx.Err() != nil {
			return
		}
		is, there := a.lives.pod(pod.name)
		if !there || is.uid != pod.uid || is.ip != pod.ip || is.deleting || !is.ready {
			a.report.count(tableProbes, "the pod ended meanwhile")
			return
		}
		switch {
		case err != nil:
			a.unheard(pod, err)
			return
		case answer.Name == pod.name && answer.Has(pod.ip):
			a.heard(pod)
			a.report.count(tableProbes, "answered by the right pod")
			return
		}
		// Until kubelet has caught up, a pod shows an address that it has lost.
		if !pod.set.outlasts() && !a.weather.calm(pod.node, theServer) {
			a.report.count(tableProbes, "the API server is behind")
			return
		}
		if wrong++; wrong == confirmations {
			a.report.count(tableProbes, "answered by another pod")
			a.report.violation("answer "+pod.uid+answer.Name, "%s answers at the IP of %s, with the addresses %v",
				answer.Name, &pod, answer.Addrs)
			return
		}
		if !sleep(ctx, a.again) {
			return
		}
	}
}

func (a *asker) once(ctx context.Context, ip netip.Addr) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	return a.ask(ctx, ip)
}

func (a *asker) heard(pod life) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.silent, pod.uid)
}

func (a *asker) unheard(pod life, err error) {
	a.report.count(tableProbes, "not answered")
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.report.now()
	since, before := a.silent[pod.uid]
	switch {
	case !before || a.weather.between(since.Add(-2*askFor), now, pod.node) != "":
		a.silent[pod.uid] = now // while the node is off, no pod of it is asked
	case now.Sub(since) > longestSilence:
		a.report.violation("silence "+pod.uid, "%s is Ready and has not answered for %s: %v", &pod,
			fmt.Sprint(now.Sub(since).Round(time.Second)), err)
	}
}
