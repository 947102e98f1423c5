package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	movesNamespace = "moves"
	routedSubnet   = "10.50.0.0/16"
)

// moving is a cluster whose nodes route their pods, with a routed pool. Pods with its addresses run on the first two
// nodes; on the third one is a client, an ordinary pod. Addresses are asked for there alone.
type moving struct {
	*world
	homes  []*lab.ClusterNode
	third  *lab.ClusterNode
	client lab.Pod
}

func measureMoves(ctx context.Context, b *bench) (rows []table.Row, err error) {
	if err := lab.Need(ctx, "iperf3"); err != nil {
		return nil, err
	}
	// A long grace period: a part of the measurement does without kubelets.
	o := lab.ClusterOptions{
		Product: b.product, IPAM: "stayput", NodeMonitorGracePeriod: objectsOnly.NodeMonitorGracePeriod,
	}
	w, err := b.start(ctx, o)
	if err != nil {
		return nil, err
	}
	for _, n := range w.Nodes {
		if err := n.SetPodCIDR(ctx); err != nil {
			return nil, w.end(ctx, err)
		}
	}
	if err := w.install(ctx, lab.ProcessOptions{Controllers: 1, Pools: true}); err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()
	if err := w.makePool(ctx, stayputv1alpha1.ModeRouted, routedSubnet, "10.50.0.0/24"); err != nil {
		return nil, err
	}
	if err := w.namespace(ctx, movesNamespace); err != nil {
		return nil, err
	}
	m := &moving{world: w, homes: w.Nodes[:2], third: w.Nodes[2]}
	if err := m.cordon(ctx, m.third, true); err != nil {
		return nil, err
	}
	if m.client, err = m.run(ctx, plainPod(movesNamespace, "client", nil), m.third); err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context, *bench) ([]table.Row, error){
		m.measureGaps, m.measurePaths, m.measureSandboxes, m.measureRoutes, m.measureWatches,
	} {
		more, err := part(ctx, b)
		rows = append(rows, more...)
		if err != nil {
			return rows, err
		}
	}
	return rows, nil
}

// cordon says whether pods may be scheduled to a node.
func (m *moving) cordon(ctx context.Context, n *lab.ClusterNode, is bool) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	return m.world.client.Patch(ctx, node, client.RawPatch(types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, is)))
}

// run runs a pod on a node. One with an address of the pool has to be scheduled.
func (m *moving) run(ctx context.Context, pod *corev1.Pod, on *lab.ClusterNode) (lab.Pod, error) {
	if pod.Annotations == nil {
		pod.Spec.NodeName = on.Name
	} else {
		pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: on.Name}
	}
	if err := m.world.client.Create(ctx, pod); err != nil {
		return lab.Pod{}, err
	}
	err := until(ctx, "pod "+pod.Name+" to be Ready", func() (bool, error) {
		err := m.world.client.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		return lab.Ready(pod), err
	})
	if err != nil {
		return lab.Pod{}, err
	}
	return on.Sandbox(ctx, pod.Namespace, pod.Name)
}

// measureGaps compares how long a client hears nothing of a pod that is drained to another node, and of the same pod
// re-created on its own node. In both cases it is evicted, and keeps its address.
func (m *moving) measureGaps(ctx context.Context, b *bench) ([]table.Row, error) {
	events := m.countPodIPs()
	f, err := m.follow(ctx, movesNamespace)
	if err != nil {
		return nil, err
	}
	const name = "web-0"
	set := lab.Workload{Name: "web", Replicas: 1, Annotations: pooled}.StatefulSet(movesNamespace)
	if err := m.world.client.Create(ctx, set); err != nil {
		return nil, err
	}
	stands := func(before place) error {
		_, err := f.until(ctx, "pod "+name+" to be Ready", func() bool {
			p, ok := f.ready[name]
			return ok && p.uid != before.uid
		})
		if err != nil {
			return err
		}
		return m.publishedPodIPs(ctx, map[string]place{name: f.ready[name]})
	}
	if err := stands(place{}); err != nil {
		return nil, err
	}
	const drained, again = 0, 1
	turn := func(how int) func() (float64, error) {
		return func() (float64, error) {
			was := f.ready[name]
			for _, n := range m.homes {
				if err := m.cordon(ctx, n, (n.Name == was.node) == (how == drained)); err != nil {
					return 0, err
				}
			}
			// The scheduler knows, and nothing of the last move is left to do.
			if err := sleep(ctx, time.Second); err != nil {
				return 0, err
			}
			talk, err := m.listen(ctx, was.ip)
			if err != nil {
				return 0, err
			}
			defer talk.end()
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: movesNamespace, Name: name}}
			if err := m.world.client.SubResource("eviction").Create(ctx, pod, &policyv1.Eviction{}); err != nil {
				return 0, err
			}
			if err := talk.moved(ctx); err != nil {
				return 0, err
			}
			if err := stands(was); err != nil {
				return 0, err
			}
			is := f.ready[name]
			if is.ip != was.ip || (is.node == was.node) != (how == again) {
				return 0, fmt.Errorf("pod %s had %s on %s and has %s on %s", name, was.ip, was.node, is.ip, is.node)
			}
			gap, err := talk.gap()
			return gap.Seconds() * 1e3, err
		}
	}
	var seen []float64
	counted := turn(drained)
	gaps, err := turns(ctx, "moves: gaps", b.times(25), func() (float64, error) {
		before := events.Load()
		gap, err := counted()
		if err == nil { // what is said of the last one may be late
			err = sleep(ctx, 500*time.Millisecond)
		}
		seen = append(seen, float64(events.Load()-before))
		return gap, err
	}, turn(again))
	if err != nil {
		return nil, err
	}
	if err := m.world.client.Delete(ctx, set); err != nil {
		return nil, err
	}
	for _, n := range m.homes {
		if err := m.cordon(ctx, n, false); err != nil {
			return nil, err
		}
	}
	return []table.Row{
		{
			What: "pod of a routed pool drained: gap in its answers", Against: "re-created on its own node",
			Goal: table.AtMost(1.3), Figure: measured("", ratio, gaps...),
			Detail: extent("%.0f ms", gaps[drained]) + " / " + extent("%.0f ms", gaps[again]),
		},
		{
			What: "  watch events for each agent", Against: "none",
			Figure: measured(" a move", median, seen), Detail: extent("%.0f", seen),
		},
	}, nil
}

// countPodIPs counts the events that agents get, while the cluster stands.
func (m *moving) countPodIPs() *atomic.Int64 {
	var n atomic.Int64
	go func() {
		for m.life.Err() == nil {
			stream, err := m.world.client.Watch(m.life, &stayputv1alpha1.PodIPList{},
				client.MatchingFieldsSelector{Selector: podip.RoutedSelector})
			if err != nil {
				say("moves: the watch of PodIPs: %v", err)
				_ = sleep(m.life, time.Second)
				continue
			}
			for e := range stream.ResultChan() {
				if e.Type != watch.Error && e.Type != watch.Bookmark {
					n.Add(1)
				}
			}
		}
	}()
	return &n
}

// turns calls two contestants n times in turns, reversing the order each time, and returns their figures.
func turns(ctx context.Context, what string, n int, contestants ...func() (float64, error)) ([][]float64, error) {
	all := make([][]float64, len(contestants))
	begin := time.Now()
	for i := range n {
		for j := range contestants {
			if i%2 == 1 {
				j = len(contestants) - 1 - j
			}
			if err := ctx.Err(); err != nil {
				return all, err
			}
			figure, err := contestants[j]()
			if err != nil {
				return all, fmt.Errorf("%s: turn %d of %d: %w", what, i+1, n, err)
			}
			all[j] = append(all[j], figure)
		}
	}
	say("%s: %d turns in %.0f s", what, n, time.Since(begin).Seconds())
	return all, nil
}

const (
	// askEvery is how often the client asks, each time on a connection of its own.
	askEvery = 4 * time.Millisecond
	// askFor is shorter than the time after which a lost packet is sent again: a question that is lost stays so.
	askFor = 150 * time.Millisecond
)

// talk is the client's with whoever answers at an address.
type talk struct {
	stop context.CancelFunc
	open sync.WaitGroup

	mu    sync.Mutex
	first string // the process that answers at first
	begun time.Time
	last  time.Time
	next  time.Time // when another one answered first
	late  bool      // the first one answered after that
}

// listen has the client ask until the talk ends, and waits until it is answered.
func (m *moving) listen(ctx context.Context, ip string) (*talk, error) {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return nil, err
	}
	asking, stop := context.WithCancel(ctx)
	t := &talk{stop: stop}
	t.open.Go(func() {
		each := time.NewTicker(askEvery)
		defer each.Stop()
		for asking.Err() == nil {
			t.open.Go(func() {
				if who, at, err := m.ask(asking, addr); err == nil {
					t.heard(who, at)
				}
			})
			select {
			case <-each.C:
			case <-asking.Done():
			}
		}
	})
	err = until(ctx, "an answer of "+ip, func() (bool, error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.first != "", nil
	})
	if err != nil {
		t.end()
	}
	return t, err
}

// ask returns since when the process runs that serves an address, which tells processes apart, and when it answered.
func (m *moving) ask(ctx context.Context, addr netip.Addr) (who string, at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	conn, err := m.third.DialFrom(ctx, m.client, "tcp", netip.AddrPortFrom(addr, 80).String())
	if err != nil {
		return "", at, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(askFor)); err != nil {
		return "", at, err
	}
	if _, err := conn.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		return "", at, err
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", at, err
	}
	answer.Body.Close()
	return answer.Header.Get("Started"), time.Now(), nil
}

func (t *talk) heard(who string, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.first == "" || t.first == who:
		if t.first == "" || at.Before(t.begun) {
			t.begun = at
		}
		t.first = who
		t.late = t.late || !t.next.IsZero() && at.After(t.next)
		if at.After(t.last) {
			t.last = at
		}
	case t.next.IsZero() || at.Before(t.next):
		t.next = at
	}
}

// moved waits until another process answers.
func (t *talk) moved(ctx context.Context) error {
	return until(ctx, "the next pod to answer", func() (bool, error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		return !t.next.IsZero(), nil
	})
}

func (t *talk) end() {
	t.stop()
	t.open.Wait()
}

// gap ends the talk and returns the time from the last answer of the first to the first one of the next.
func (t *talk) gap() (time.Duration, error) {
	t.end()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.late {
		return 0, errors.New("the old pod has answered after the new one")
	}
	return t.next.Sub(t.last), nil
}
