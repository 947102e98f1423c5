package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

const (
	crowd   = 90 // pods, 30 a node
	deletes = 2  // in the life of one cluster
	// afterwards is how long the cluster's CPU time counts once all pods are Ready.
	afterwards = 5 * time.Second
)

// crowdTimes are a cluster's results, times in seconds.
type crowdTimes struct {
	create           float64
	again            []float64
	used             []usage // for again
	nodes, ips, both int     // kept, out of crowd * deletes
}

// contestant is a kind of cluster, and the pods that are re-created in it.
type contestant struct {
	name  string
	start func(context.Context) (*world, error)
	set   *appsv1.StatefulSet
	// published waits until the API says what the pods have, nil if it never does.
	published func(*world, context.Context, map[string]place) error
}

// match is the result of contestants that took turns, ours first.
type match struct {
	again, create [2][]float64
	used          [2][]usage

	nodes, ips, both [2]int // kept, of all
	all              int
}

const crowdNamespace, ours, stock = "crowd", 0, 1

// compete gives each contestant its own cluster, in turns: concurrent clusters would share the processors, and a
// cluster used by both would not be stock.
func (b *bench) compete(ctx context.Context, section string, both [2]contestant) (m match, err error) {
	rounds := b.times(5)
	for round := range rounds {
		for turn := range 2 {
			which := (round + turn) % 2
			name := both[which].name
			say("%s: round %d of %d, %s", section, round+1, rounds, name)
			t, err := b.crowd(ctx, section, both[which])
			if err != nil {
				return m, fmt.Errorf("%s: %w", name, err)
			}
			say("%s: %s: created in %.1f s, again in %.1f s; %d nodes and %d IPs kept of %d", section, name, t.create,
				t.again, t.nodes, t.ips, crowd*deletes)
			m.create[which], m.again[which] = append(m.create[which], t.create), append(m.again[which], t.again...)
			m.used[which] = append(m.used[which], t.used...)
			m.nodes[which] += t.nodes
			m.ips[which] += t.ips
			m.both[which] += t.both
		}
	}
	m.all = rounds * deletes * crowd
	return m, nil
}

const seconds = "%.1f s"

// againRow compares the times in which all pods are Ready again.
func (m match) againRow(of string) table.Row {
	return table.Row{
		What: fmt.Sprintf("%d pods%s deleted at once -> all new ones Ready", crowd, of), Goal: table.AtMost(1.05),
		Against: "stock host-local, no stayput", Figure: measured("", ratio, m.again[ours], m.again[stock]),
		Detail: extent(seconds, m.again[ours]) + " / " + extent(seconds, m.again[stock]),
	}
}

// keptRow says how many of all pods kept what they should.
func (m match) keptRow(what string, kept int) table.Row {
	share := table.Figure{Value: float64(kept) / float64(m.all) * 100, Unit: " %", N: m.all}
	return table.Row{
		What: what, Against: "all of them", Goal: table.AtLeast(100), Figure: share,
		Detail: fmt.Sprintf("nodes %d, IPs %d of %d; stock: nodes %d, IPs %d", m.nodes[ours], m.ips[ours], m.all,
			m.nodes[stock], m.ips[stock]),
	}
}

func measureRecreate(ctx context.Context, b *bench) (rows []table.Row, err error) {
	m, err := b.compete(ctx, "recreate", [2]contestant{
		{
			name: "stayput",
			start: func(ctx context.Context) (*world, error) {
				return b.startInstalled(ctx, lab.ClusterOptions{}, twoControllers)
			},
			set: lab.Workload{
				Name: "web", Replicas: crowd, Annotations: map[string]string{"stayput.io/retain-ip": "10m"},
			}.StatefulSet(crowdNamespace),
			published: func(w *world, ctx context.Context, ready map[string]place) error {
				return w.published(ctx, crowdNamespace, ready)
			},
		},
		{
			name:  "stock",
			start: func(ctx context.Context) (*world, error) { return b.start(ctx, lab.ClusterOptions{}) },
			set:   lab.Workload{Name: "web", Replicas: crowd}.StatefulSet(crowdNamespace),
		},
	})
	if err != nil {
		return nil, err
	}
	return []table.Row{
		m.againRow(""),
		usedBy(m.used[ours], m.used[stock]),
		m.keptRow("  with node and IP kept", m.both[ours]),
		{
			What: "  created -> all Ready", Against: "stock host-local, no stayput",
			Figure: measured("", ratio, m.create[ours], m.create[stock]),
			Detail: extent(seconds, m.create[ours]) + " / " + extent(seconds, m.create[stock]),
		},
		{
			What: "  deleted -> Ready, in times of its own creation", Against: "its own creation",
			Figure: measured("", ratio, m.again[ours], m.create[ours]),
			Detail: fmt.Sprintf("stock %.2f", ratio(m.again[stock], m.create[stock])),
		},
	}, nil
}

// usedBy compares the CPU time for each pod deleted until it is Ready again, of everything and of each program. It
// settles what the time of a busy machine does not.
func usedBy(ours, stock []usage) table.Row {
	var sums [2][]float64
	names := map[string]bool{}
	for i, all := range [][]usage{ours, stock} {
		for _, u := range all {
			sums[i] = append(sums[i], u.sum()/crowd)
			for name := range u {
				names[name] = true
			}
		}
	}
	of := func(all []usage, name string) float64 {
		var s []float64
		for _, u := range all {
			s = append(s, u[name]/crowd)
		}
		return median(s)
	}
	var detail []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if a, b := of(ours, name), of(stock, name); a >= 0.1 || b >= 0.1 {
			detail = append(detail, fmt.Sprintf("%s %.1f / %.1f", name, a, b))
		}
	}
	return table.Row{
		What: "  CPU time of all programs", Against: "stock host-local, no stayput", Goal: table.AtMost(1.05),
		Figure: measured("", ratio, sums[0], sums[1]),
		Detail: fmt.Sprintf("ms for each pod: %s / %s; %s", extent("%.0f", sums[0]), extent("%.0f", sums[1]),
			strings.Join(detail, ", ")),
	}
}

// crowd runs one cluster's whole life.
func (b *bench) crowd(ctx context.Context, section string, c contestant) (t crowdTimes, err error) {
	w, err := c.start(ctx)
	if err != nil {
		return t, err
	}
	defer func() { err = w.end(ctx, err) }()
	if err := w.namespace(ctx, crowdNamespace); err != nil {
		return t, err
	}
	f, err := w.follow(ctx, crowdNamespace)
	if err != nil {
		return t, err
	}
	if err := sleep(ctx, 3*time.Second); err != nil { // the cluster has started up
		return t, err
	}
	begin := time.Now()
	if err := w.client.Create(ctx, c.set.DeepCopy()); err != nil {
		return t, err
	}
	at, err := f.allReady(ctx, crowd, nil)
	if err != nil {
		return t, err
	}
	t.create = at.Sub(begin).Seconds()
	for range deletes {
		if c.published != nil {
			if err := c.published(w, ctx, f.ready); err != nil {
				return t, err
			}
		}
		// Late DELs of the last sandboxes, and other remaining work.
		if err := sleep(ctx, 5*time.Second); err != nil {
			return t, err
		}
		before := maps.Clone(f.ready)
		idle, err := usageOfAll()
		if err != nil {
			return t, err
		}
		profiled := func() error { return nil }
		if b.profiles != "" {
			file := strings.ReplaceAll(section, " ", "-") + "-" + c.name + ".pprof"
			profiled = w.profileBeside(ctx, filepath.Join(b.profiles, file), 20*time.Second)
		}
		begin := time.Now()
		if err := w.deleteAll(ctx, crowdNamespace, before); err != nil {
			return t, err
		}
		at, err := f.allReady(ctx, crowd, before)
		if err != nil {
			return t, err
		}
		t.again = append(t.again, at.Sub(begin).Seconds())
		// Late DELs, and what is published of the new pods.
		if err := sleep(ctx, afterwards); err != nil {
			return t, err
		}
		all, err := usageOfAll()
		if err := errors.Join(err, profiled()); err != nil {
			return t, err
		}
		t.used = append(t.used, all.sub(idle))
		nodes, ips, both := kept(before, f.ready)
		t.nodes += nodes
		t.ips += ips
		t.both += both
	}
	return t, nil
}
