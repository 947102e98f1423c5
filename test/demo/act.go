package main

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// place is a pod's node and IP.
type place struct {
	node string
	ip   netip.Addr
}

func (p place) String() string { return p.node + " " + p.ip.String() }

// step is an event in the pods' lives.
type step struct {
	title string
	// restarts reports whether the step restarts the pods of a node.
	restarts func(node string) bool
	run      func(context.Context) error
}

// row is a step's effect on a pod.
type row struct {
	pod           string
	before, after place
	restarted     bool
	away          time.Duration // according to the client
	pool          bool          // its IP is of a pool
}

// kept reports whether the pod has what it was promised.
func (r row) kept() bool { return r.before == r.after || r.pool && r.before.ip == r.after.ip }

func (r row) verdict() string {
	switch {
	case r.kept() && r.before.node != r.after.node:
		return "IP kept"
	case r.before.node != r.after.node:
		return "NODE LOST" // and the IP, which belongs to the node's range
	case r.before.ip != r.after.ip:
		return "IP LOST"
	case r.restarted:
		return "kept"
	}
	return "untouched"
}

func (r row) heard() string {
	switch {
	case !r.kept():
		return "away for good"
	case r.away == 0:
		return "never away"
	}
	return fmt.Sprintf("away %5d ms", r.away.Milliseconds())
}

// tally counts the outcomes of an act.
type tally struct {
	restarts   int
	nodes, ips int // lost
}

func (t *tally) add(rows []row) {
	for _, r := range rows {
		if r.restarted {
			t.restarts++
		}
		if r.before.node != r.after.node {
			t.nodes++
		}
		if r.before.ip != r.after.ip {
			t.ips++
		}
	}
}

func (t tally) lost() bool { return t.nodes+t.ips > 0 }

// ofPool is String for pods that have their IPs on any node.
func (t tally) ofPool() string {
	if t.ips > 0 {
		return fmt.Sprintf("%d nodes lost for good: %d IPs lost", t.nodes, t.ips)
	}
	return fmt.Sprintf("%d node lost for good: every IP kept", t.nodes)
}

func (t tally) String() string {
	if !t.lost() {
		return fmt.Sprintf("%d restarts: every node and IP kept", t.restarts)
	}
	return fmt.Sprintf("%d restarts: %d nodes and %d IPs lost", t.restarts, t.nodes, t.ips)
}

// act starts the workloads and runs every step on them.
func (s *stage) act(ctx context.Context) (tally, error) {
	var t tally
	if err := s.deploy(ctx); err != nil {
		return t, err
	}
	for _, next := range []func(home string) step{s.powerCycle, s.deletion, s.rollout, s.drain} {
		rows, err := s.play(ctx, next)
		if err != nil {
			return t, err
		}
		s.out.table(rows)
		t.add(rows)
	}
	return t, nil
}

// poolAct gives the single pod an address of a pool, and takes its node away for good.
func (s *stage) poolAct(ctx context.Context) (tally, error) {
	var t tally
	if err := s.joinPool(ctx); err != nil {
		return t, err
	}
	rows, err := s.play(ctx, s.nodeLoss)
	if err != nil {
		return t, err
	}
	rows = slices.DeleteFunc(rows, func(r row) bool { return r.pod != single })
	s.out.table(rows)
	t.add(rows)
	return t, nil
}

// play runs one step and waits until all pods run again and the client has an answer from each pod that kept its place.
// home is the node of the single pod and, at first, of one other.
func (s *stage) play(ctx context.Context, next func(home string) step) ([]row, error) {
	ctx, hush := context.WithCancel(ctx)
	defer hush()
	before, err := s.pods(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.load(ctx, before); err != nil {
		return nil, err
	}
	talks := map[string]*talk{}
	for name, p := range before {
		talks[name] = s.client.talk(ctx, name, p.ip)
		if err := talks[name].hear(ctx); err != nil {
			return nil, err
		}
	}

	st := next(before[single].node)
	s.out.step("%s", st.title)
	if err := st.run(ctx); err != nil {
		return nil, err
	}
	after, err := s.again(ctx, before, st.restarts)
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, name := range slices.Sorted(maps.Keys(before)) {
		r := row{pod: name, before: before[name].place, after: after[name].place, restarted: st.restarts(before[name].node)}
		if r.pool = pool.Contains(r.before.ip); r.kept() {
			if r.away, err = talks[name].end(ctx); err != nil {
				return rows, err
			}
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// all is for steps that restart every pod.
func all(string) bool { return true }

func (s *stage) powerCycle(home string) step {
	return step{
		title:    home + " loses power and is switched on again",
		restarts: func(node string) bool { return node == home },
		run: func(ctx context.Context) error {
			node := s.Node(home)
			if err := node.PowerLoss(); err != nil {
				return err
			}
			return node.Boot(ctx)
		},
	}
}

func (s *stage) deletion(string) step {
	return step{title: "The pods are deleted", restarts: all, run: func(ctx context.Context) error {
		return s.command(ctx, "delete", "pods", "--selector", workloads, "--wait=false")
	}}
}

func (s *stage) rollout(string) step {
	return step{title: "A new image is rolled out", restarts: all, run: func(ctx context.Context) error {
		return s.command(ctx, "set", "image", "statefulset", "--all", "*="+nextImage)
	}}
}

func (s *stage) nodeLoss(home string) step {
	return step{
		title:    home + " loses power, and is taken out of the cluster",
		restarts: func(node string) bool { return node == home },
		run: func(ctx context.Context) error {
			if err := s.Node(home).PowerLoss(); err != nil {
				return err
			}
			// The operator's word that nobody answers there any more, then that Kubernetes need not wait for it.
			if err := s.command(ctx, "delete", "node", home); err != nil {
				return err
			}
			if err := s.command(ctx, "delete", "pod", single, "--force"); err != nil {
				return err
			}
			return s.show(ctx, "get", "podips")
		},
	}
}

// maintenance is the least time that a drained node is away.
const maintenance = 2 * time.Second

func (s *stage) drain(home string) step {
	return step{
		title:    home + " is drained for maintenance and comes back",
		restarts: func(node string) bool { return node == home },
		run: func(ctx context.Context) error {
			// Only the workloads: the ballast would not come back.
			if err := s.command(ctx, "drain", home, "--pod-selector", workloads); err != nil {
				return err
			}
			select {
			case <-time.After(maintenance):
			case <-ctx.Done():
				return ctx.Err()
			}
			if s.installed {
				if err := s.show(ctx, "get", "pods", "--selector", workloads); err != nil {
					return err
				}
				if err := s.show(ctx, "get", "retainedips"); err != nil {
					return err
				}
			}
			return s.command(ctx, "uncordon", home)
		},
	}
}
