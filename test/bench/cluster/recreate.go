package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

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
	create     float64
	again      []float64
	used       []usage // for again
	nodes, ips int     // kept, out of crowd * deletes
}

// measureRecreate gives each contestant its own cluster, in turns: concurrent clusters would share the processors, and
// a cluster used by both would not be stock.
func measureRecreate(ctx context.Context, b *bench) (rows []table.Row, err error) {
	const ours, stock = 0, 1
	names := [2]string{"stayput", "stock"}
	var again, create [2][]float64
	var nodes, ips [2]int
	var used [2][]usage
	rounds := b.times(5)
	for round := range rounds {
		for turn := range 2 {
			which := (round + turn) % 2
			say("recreate: round %d of %d, %s", round+1, rounds, names[which])
			t, err := b.crowd(ctx, which == ours)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", names[which], err)
			}
			say("recreate: %s: created in %.1f s, again in %.1f s; %d nodes and %d IPs kept of %d", names[which], t.create,
				t.again, t.nodes, t.ips, crowd*deletes)
			create[which], again[which] = append(create[which], t.create), append(again[which], t.again...)
			used[which] = append(used[which], t.used...)
			nodes[which] += t.nodes
			ips[which] += t.ips
		}
	}
	all := rounds * deletes * crowd
	const s = "%.1f s"
	share := table.Figure{Value: float64(ips[ours]) / float64(all) * 100, Unit: " %", N: all}
	return []table.Row{
		{
			What: fmt.Sprintf("%d pods deleted at once -> all new ones Ready", crowd), Against: "stock host-local, no stayput",
			Goal:   table.AtMost(1.05),
			Figure: measured("", ratio, again[ours], again[stock]),
			Detail: extent(s, again[ours]) + " / " + extent(s, again[stock]),
		},
		usedBy(used[ours], used[stock]),
		{
			What: "  with node and IP kept", Against: "all of them", Goal: table.AtLeast(100), Figure: share,
			Detail: fmt.Sprintf("nodes %d, IPs %d of %d; stock: nodes %d, IPs %d", nodes[ours], ips[ours], all, nodes[stock],
				ips[stock]),
		},
		{
			What: "  created -> all Ready", Against: "stock host-local, no stayput",
			Figure: measured("", ratio, create[ours], create[stock]),
			Detail: extent(s, create[ours]) + " / " + extent(s, create[stock]),
		},
		{
			What: "  deleted -> Ready, in times of its own creation", Against: "its own creation",
			Figure: measured("", ratio, again[ours], create[ours]),
			Detail: fmt.Sprintf("stock %.2f", ratio(again[stock], create[stock])),
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
func (b *bench) crowd(ctx context.Context, installed bool) (t crowdTimes, err error) {
	var w *world
	var ofPods map[string]string
	if installed {
		w, err = b.startInstalled(ctx, lab.ClusterOptions{}, replicas)
		ofPods = map[string]string{"stayput.io/retain-ip": "10m"}
	} else {
		w, err = b.start(ctx, lab.ClusterOptions{})
	}
	if err != nil {
		return t, err
	}
	defer func() { err = w.end(ctx, err) }()
	const namespace = "crowd"
	if err := w.namespace(ctx, namespace); err != nil {
		return t, err
	}
	f, err := w.follow(ctx, namespace)
	if err != nil {
		return t, err
	}
	if err := sleep(ctx, 3*time.Second); err != nil { // the cluster has started up
		return t, err
	}
	begin := time.Now()
	if err := w.client.Create(ctx, statefulSet(namespace, "web", crowd, nil, ofPods)); err != nil {
		return t, err
	}
	at, err := f.allReady(ctx, crowd, nil)
	if err != nil {
		return t, err
	}
	t.create = at.Sub(begin).Seconds()
	for range deletes {
		if installed {
			if err := w.published(ctx, namespace, f.ready); err != nil {
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
		begin := time.Now()
		if err := w.deleteAll(ctx, namespace, before); err != nil {
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
		if err != nil {
			return t, err
		}
		t.used = append(t.used, all.sub(idle))
		nodes, ips := kept(before, f.ready)
		t.nodes += nodes
		t.ips += ips
	}
	return t, nil
}
