package cluster

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// How much is done at once: most of what tests do is waiting for pods. An idle cluster takes a quarter of a core.
var (
	clusters = make(chan struct{}, 2)
	besides  = make(chan struct{}, 4) // tests on the cluster of installed
)

// take waits for a place, which the test has until it ends. The wait counts in the test's duration: it is logged.
func take(t *testing.T, places chan struct{}) {
	t.Helper()
	began := time.Now()
	places <- struct{}{}
	t.Logf("waited %v for its turn", time.Since(began).Round(time.Second))
	t.Cleanup(func() { <-places })
}

// A stand is where a cluster that tests share runs, one at a time. It has one of the clusters' places.
type stand struct {
	mu      sync.Mutex
	name    string
	cluster *lab.Cluster
	err     error
}

// get returns the cluster with the name, and starts it if another one is running, which it ends. If the test fails, the
// cluster's logs are printed. A cluster that failed to start is kept with its error, to be closed.
func (s *stand) get(t *testing.T, name string, start func() (*lab.Cluster, error)) *lab.Cluster {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.name != name {
		must.Do(t, s.endLocked())
		clusters <- struct{}{}
		s.name = name
		s.cluster, s.err = start()
	}
	must.Do(t, s.err)
	logIfFailed(t, s.cluster)
	return s.cluster
}

func (s *stand) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.endLocked()
}

func (s *stand) endLocked() error {
	if s.name == "" {
		return nil
	}
	ended := s.cluster
	s.name, s.cluster, s.err = "", nil, nil
	defer func() { <-clusters }()
	if ended == nil {
		return nil
	}
	return ended.Close()
}

// common has the clusters of tests that run one after the other, and that of tests beside each other. pooled has the
// cluster of withPools.
var common, pooled stand

// Tests that have announced themselves and not ended: all have before the first one goes on in parallel.
var (
	onCommon, onPooled atomic.Int32
	alones             sync.WaitGroup
)

// announce counts a test among those of a stand, whose cluster the last one of them ends.
func announce(t *testing.T, s *stand, n *atomic.Int32) {
	t.Helper()
	n.Add(1)
	t.Cleanup(func() {
		if n.Add(-1) == 0 {
			must.Do(t, s.end())
		}
	})
}

// goOn lets a test run in parallel, after all tests that have the common cluster for themselves.
func goOn(t *testing.T) {
	t.Helper()
	t.Parallel()
	if onCommon.Load() == 0 {
		must.Do(t, common.end())
	}
}

// beside returns installed's cluster for a test that looks at its namespace only and breaks nothing. It runs in
// parallel with others of its kind, after all tests that have the cluster for themselves.
func beside(t *testing.T) *lab.Cluster {
	t.Helper()
	later(t)()
	return installed(t)
}

// later announces that a test that has the common cluster for itself needs it no more from the call of the returned
// function on, but goes on as if it had called beside.
func later(t *testing.T) (goesOn func()) {
	t.Helper()
	announce(t, &common, &onCommon)
	return func() {
		t.Helper()
		goOn(t)
		take(t, besides)
	}
}

// inTurn marks a test on the cluster of withPools.
func inTurn(t *testing.T) {
	t.Helper()
	announce(t, &pooled, &onPooled)
	goOn(t)
	turn.Lock()
	t.Cleanup(func() {
		if t.Failed() { // the next one shall not suffer for it
			must.Do(t, pooled.end())
		}
		turn.Unlock()
	})
}

var turn sync.Mutex

// alone marks a test with a cluster of its own.
func alone(t *testing.T) {
	t.Helper()
	alones.Add(1)
	t.Cleanup(alones.Done)
	goOn(t)
	take(t, clusters)
}

// aloneAtAll marks a test that counts what a quiet machine does: it runs after all others.
func aloneAtAll(t *testing.T) {
	t.Helper()
	goOn(t)
	alones.Wait()
	for range cap(clusters) {
		take(t, clusters)
	}
}
