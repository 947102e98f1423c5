package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	costBatch = 1000 // pods, for one figure
	costNodes = 8
	costSets  = 100 // with a PersistentPodState each, in createsNamespace
	// costsNamespace is for the pods that no PersistentPodState records.
	costsNamespace = "costs"
)

// cpu is CPU time, in milliseconds.
type cpu struct {
	server    float64 // API server and etcd
	installed float64 // Stayput's controllers and agents
}

func (c cpu) sum() float64 { return c.server + c.installed }

// cpu returns the CPU time that the programs of a cluster have used so far.
func (w *world) cpu() (c cpu, err error) {
	add := func(sum *float64, services ...*lab.Service) {
		for _, s := range services {
			p := s.Process()
			if p == nil {
				err = errors.Join(err, errors.New("a program of the cluster has ended"))
				continue
			}
			t, failed := cpuTime(p)
			*sum += t.Seconds() * 1e3
			err = errors.Join(err, failed)
		}
	}
	add(&c.server, w.APIServer, w.Etcd)
	for _, p := range w.ControllerProcesses {
		add(&c.installed, p.Service)
	}
	for _, n := range w.Nodes {
		if n.AgentProcess != nil {
			add(&c.installed, n.AgentProcess)
		}
	}
	for _, pid := range w.pods {
		t, failed := cpuTimeOf(pid)
		c.installed += t.Seconds() * 1e3
		err = errors.Join(err, failed)
	}
	return c, err
}

// during returns the CPU time that f takes, and how long f took.
func (w *world) during(f func() error) (c cpu, took time.Duration, err error) {
	before, err := w.cpu()
	if err != nil {
		return c, 0, err
	}
	begin := time.Now()
	if err := f(); err != nil {
		return c, 0, err
	}
	took = time.Since(begin)
	after, err := w.cpu()
	return cpu{after.server - before.server, after.installed - before.installed}, took, err
}

// costing measures one cluster.
type costing struct {
	*creator
	installed bool
	homes     []string
}

// newCosting prepares a cluster: as many nodes as homes, which hold an address for each pod that has a home.
func (c *creator) newCosting(ctx context.Context, installed bool) (*costing, error) {
	m := &costing{creator: c, installed: installed}
	var err error
	if err := c.namespace(ctx, costsNamespace); err != nil {
		return nil, err
	}
	if m.homes, err = c.makeNodes(ctx, costNodes); err != nil || !installed {
		return m, err
	}
	return m, parallel(ctx, costBatch, createClients, func(ctx context.Context, worker, i int) error {
		return c.makeHome(ctx, c.clients[worker], costsNamespace, m.name(atHome, i), m.homes[i%costNodes], addressOf(i), nil)
	})
}

// rest stops what would schedule the pods or delete them, and measures the cluster without work.
func (m *costing) rest(ctx context.Context) error {
	if err := errors.Join(m.ControllerManager.Stop(), m.Scheduler.Stop(), sleep(ctx, 10*time.Second)); err != nil {
		return err
	}
	return m.creator.rest(ctx)
}

func (m *costing) name(kind string, i int) string {
	if kind == atHome {
		return fmt.Sprintf("at-home-%d", i)
	}
	return podName(i)
}

// batch creates pods of a kind and returns the CPU time for each of them, until the last is placed and a second longer.
// What the cluster takes when idle does not count: a busy machine may take its time.
func (m *costing) batch(ctx context.Context, kind string) (c cpu, err error) {
	namespace := costsNamespace
	if kind == recorded {
		namespace = createsNamespace
	}
	pods := make([]*corev1.Pod, costBatch)
	for i := range pods {
		pods[i] = m.pod(kind, m.name(kind, i), i)
		pods[i].Namespace = namespace
		pods[i].Spec.SchedulingGates = nil // the controller leaves pods with other gates alone
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	events, err := m.watchPods(watching, namespace)
	if err != nil {
		return c, err
	}
	c, took, err := m.during(func() error {
		if err := parallel(ctx, len(pods), createClients, func(ctx context.Context, worker, i int) error {
			return m.makers[worker].Create(ctx, pods[i])
		}); err != nil {
			return err
		}
		done := map[string]bool{}
		_, err := await(ctx, "all pods to be placed", events, func(e podEvent) bool {
			if e.kind != watch.Deleted && !gated(e.pod) {
				done[e.pod.Name] = true
			}
			return len(done) == len(pods)
		})
		return errors.Join(err, sleep(ctx, time.Second))
	})
	stop()
	if err != nil {
		return c, err
	}
	for i, pod := range pods {
		wasGated := gated(pod)
		if err := m.client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
			return c, err
		}
		if want := m.installed && kind != plainSets; wasGated != want || gated(pod) ||
			mustRunOn(pod, m.homes[i%costNodes]) != (m.installed && kind == atHome) {
			return c, fmt.Errorf("pod %s %s: was gated %t, is gated %t, with affinity %v", pod.Name, kind, wasGated,
				gated(pod), pod.Spec.Affinity)
		}
	}
	each := func(total, idle float64) float64 { return (total - idle*took.Seconds()) / costBatch }
	if err := m.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(namespace),
		client.GracePeriodSeconds(0)); err != nil {
		return c, err
	}
	return cpu{each(c.server, m.idle.server), each(c.installed, m.idle.installed)},
		until(ctx, "the pods to be gone", func() (bool, error) {
			var left corev1.PodList
			err := m.client.List(ctx, &left, client.InNamespace(namespace), client.Limit(1))
			return len(left.Items) == 0, err
		})
}

// measureCosts creates pods with nothing else going on: neither scheduled nor run.
func measureCosts(ctx context.Context, b *bench) (rows []table.Row, err error) {
	const ours, stock = 0, 1
	var both [2]*costing
	for i := range both {
		var w *world
		if w, err = b.startObjects(ctx, i == ours); err != nil {
			return nil, err
		}
		defer func() { err = w.end(ctx, err) }()
		c, err := w.newCreator(ctx, costSets)
		if err != nil {
			return nil, err
		}
		if both[i], err = c.newCosting(ctx, i == ours); err != nil {
			return nil, err
		}
	}
	if err := both[ours].record(ctx); err != nil {
		return nil, err
	}
	for _, m := range both {
		if err := m.rest(ctx); err != nil {
			return nil, err
		}
		say("costs: when idle, per second: %.0f ms API server and etcd, %.0f ms stayput", m.idle.server, m.idle.installed)
	}
	for _, k := range []struct {
		kind string
		goal table.Goal
		more bool // the figure is what stayput adds
	}{
		{plainSets, table.AtMost(0.4), true},
		{annotated, table.AtMost(6.5), false},
		{atHome, table.Goal{}, false},
		{recorded, table.Goal{}, false},
	} {
		var server, installed, sum [2][]float64
		n := b.times(4)
		say("costs: pods %s: %d rounds", k.kind, n)
		for round := range n + 1 {
			for turn := range both {
				which := (round + turn) % 2
				c, err := both[which].batch(ctx, k.kind)
				if err != nil {
					return nil, err
				}
				say("costs: round %d, %s: API server and etcd %.2f ms, stayput %.2f ms",
					round, [...]string{"with stayput", "without"}[which], c.server, c.installed)
				if round > 0 { // the first one warms up
					server[which], installed[which] = append(server[which], c.server), append(installed[which], c.installed)
					sum[which] = append(sum[which], c.sum())
				}
			}
		}
		if b.profiles != "" {
			for which, m := range both {
				file := filepath.Join(b.profiles, strings.NewReplacer(" ", "-", ",", "").Replace(k.kind)+
					[...]string{"", "-without"}[which]+".pprof")
				wait := m.profileBeside(ctx, file, 5*time.Second)
				_, err := m.batch(ctx, k.kind)
				if err := errors.Join(err, wait()); err != nil {
					return nil, err
				}
			}
		}
		row := table.Row{
			What: "CPU for each pod created, " + k.kind, Against: "-", Goal: k.goal,
			Figure: measured(" ms", median, sum[ours]),
			Detail: fmt.Sprintf("API server and etcd %s, stayput %s; without stayput %s", extent("%.2f", server[ours]),
				extent("%.2f", installed[ours]), extent("%.2f", sum[stock])),
		}
		if k.more {
			row.Against = againstNothing
			row.Figure = measured(" ms", func(s ...[]float64) float64 { return median(s[0]) - median(s[1]) },
				sum[ours], sum[stock])
		}
		rows = append(rows, row)
	}
	return rows, nil
}
