package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

// routedPods are pods of the first two nodes that run by the API server's word alone.
type routedPods struct {
	*moving
	etcd *store
	ips  []*stayputv1alpha1.PodIP
	at   []int // the home of each
}

// addresses says how many pods there are; those that are new are put into etcd.
func (r *routedPods) addresses(ctx context.Context, n int) error {
	first := netip.MustParsePrefix(routedSubnet).Addr().As4()
	for i := len(r.ips); i < n; i++ {
		k := i + 1<<12 // behind those that the pool gives
		a := netip.AddrFrom4([4]byte{first[0], first[1], byte(k >> 8), byte(k)})
		ip := keptPodIP(a, i, "")
		ip.Spec.Mode = stayputv1alpha1.ModeRouted
		ip.Status.Phase, ip.Status.Expires = stayputv1alpha1.PodIPBound, nil
		r.ips, r.at = append(r.ips, ip), append(r.at, i%2)
	}
	return r.put(ctx)
}

// put stores all pods where they are.
func (r *routedPods) put(ctx context.Context) error {
	chunks := (len(r.ips) + mostPuts - 1) / mostPuts
	return parallel(ctx, chunks, scaleClients, func(ctx context.Context, _, chunk int) error {
		var some []client.Object
		for i := chunk * mostPuts; i < min(len(r.ips), (chunk+1)*mostPuts); i++ {
			home := r.homes[r.at[i]]
			r.ips[i].Status.NodeName, r.ips[i].Status.PodCIDR = home.Name, home.Pods.String()
			some = append(some, r.ips[i])
		}
		return r.etcd.put(ctx, some...)
	})
}

// changes are those of a PodIP whose pod moves to the other node: its node says that it is gone, the controller gives
// the address to the next one, and its node names itself before that starts.
func (r *routedPods) changes(i int) []func(context.Context) error {
	ip, from := r.ips[i], r.homes[r.at[i]]
	r.at[i] = 1 - r.at[i]
	home, next := r.homes[r.at[i]], string(uuid.NewUUID())
	patch := func(of client.SubResourceWriter, format string, args ...any) func(context.Context) error {
		return func(ctx context.Context) error {
			o := &stayputv1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: ip.Name}}
			p := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, format, args...))
			if of == nil {
				return r.world.client.Patch(ctx, o, p)
			}
			return of.Patch(ctx, o, p)
		}
	}
	const says = `{"status":{"phase":%q,"podUID":%q,"nodeName":%q,"podCIDR":%q}}`
	status := r.world.client.Status()
	all := []func(context.Context) error{
		patch(status, `{"status":{"phase":%q,"podUID":%q,"nodeName":%q,"podCIDR":null}}`, stayputv1alpha1.PodIPRetained,
			ip.Spec.PodUID, from.Name),
		patch(nil, `{"spec":{"podUID":%q}}`, next),
		patch(status, says, stayputv1alpha1.PodIPBound, next, home.Name, home.Pods),
	}
	ip.Spec.PodUID, ip.Status.PodUID = next, next
	return all
}

// right reports whether the third node has the route to each pod.
func (r *routedPods) right(h *netlink.Handle) (bool, error) {
	routes, err := h.RouteListFiltered(netlink.FAMILY_V4,
		&netlink.Route{Table: unix.RT_TABLE_MAIN, Protocol: link.ProtocolAgent},
		netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return false, err
	}
	to := make(map[string]netip.Addr, len(routes))
	for _, route := range routes {
		if gw, ok := netip.AddrFromSlice(route.Gw); ok && route.Dst != nil {
			to[route.Dst.IP.String()] = gw.Unmap()
		}
	}
	for i, ip := range r.ips {
		if to[ip.Name] != r.homes[r.at[i]].IP {
			return false, nil
		}
	}
	return true, nil
}

// measureRoutes measures the agent of the third node, which serves no address.
func (m *moving) measureRoutes(ctx context.Context, b *bench) (rows []table.Row, err error) {
	agent := m.third.AgentProcess
	// Nobody else acts on what follows.
	for _, s := range []*lab.Service{
		m.ControllerProcesses[0].Service, m.ControllerManager, m.Scheduler, m.homes[0].AgentProcess, m.homes[1].AgentProcess,
		agent,
	} {
		if err := s.Stop(); err != nil {
			return nil, err
		}
	}
	ns, err := netns.GetFromPid(m.third.Pid())
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	r := &routedPods{moving: m, etcd: m.newStore()}
	for _, size := range []struct {
		pods   int
		within float64 // seconds
	}{{1000, 1}, {10_000, 5}} {
		n := b.times(size.pods)
		if err := r.addresses(ctx, n); err != nil {
			return rows, err
		}
		against := fmt.Sprintf("%d pods of routed pools on other nodes", n)
		var used [2][]float64
		const fresh, again = 0, 1
		start := func(how int, before func() error) func() (float64, error) {
			return func() (float64, error) {
				if err := before(); err != nil {
					return 0, err
				}
				if err := settle(ctx, m.APIServer.Process(), m.Etcd.Process()); err != nil {
					return 0, err
				}
				took, err := r.start(ctx, h)
				if err != nil {
					return 0, err
				}
				cpu, err := cpuTime(agent.Process())
				if err != nil {
					return 0, err
				}
				used[how] = append(used[how], cpu.Seconds()*1e3)
				return took.Seconds(), agent.Stop()
			}
		}
		got, err := turns(ctx, "moves: agents start beside "+against, b.times(6),
			start(fresh, func() error {
				_, err := m.third.Run(ctx, "/bin/sh", "-c", fmt.Sprintf(
					"PATH=/sbin:/usr/sbin:$PATH; ip route flush proto %d", link.ProtocolAgent))
				return err
			}),
			start(again, func() error {
				for i := range r.at {
					r.at[i] = 1 - r.at[i]
				}
				return r.put(ctx)
			}))
		if err != nil {
			return rows, err
		}
		for how, what := range []string{"a node's agent starts -> all routes right", "  the same, all moved meanwhile"} {
			rows = append(rows, table.Row{
				What: what, Against: against, Goal: table.Below(size.within), Figure: measured(" s", median, got[how]),
				Detail: extent("%.2f s", got[how]) + ", with " + extent("%.0f ms", used[how]) + " of CPU",
			})
		}
		each, err := r.costs(ctx, b, h)
		if err != nil {
			return rows, err
		}
		for i, what := range []string{
			"  the agent's CPU for a pod that moves alone", fmt.Sprintf("  the same, of %d that move at once", movesOfBatch),
		} {
			rows = append(rows, table.Row{
				What: what, Against: against, Goal: table.Below(0.5), Figure: measured(" ms", median, each[i]),
				Detail: extent("%.3f ms", each[i]),
			})
		}
	}
	return rows, nil
}

// start starts the agent and returns the time until all routes are right.
func (r *routedPods) start(ctx context.Context, h *netlink.Handle) (time.Duration, error) {
	started := make(chan error, 1)
	begin := time.Now()
	go func() { started <- r.third.AgentProcess.Start(ctx) }()
	for {
		looking := time.Now()
		ok, err := r.right(h)
		if err != nil || ok {
			return time.Since(begin), errors.Join(err, <-started)
		}
		if time.Since(begin) > patience {
			return 0, fmt.Errorf("the routes are not right after %v: %w", patience, <-started)
		}
		// To look takes CPU time, too.
		if err := sleep(ctx, max(5*time.Millisecond, 3*time.Since(looking))); err != nil {
			return 0, err
		}
	}
}

const movesOfBatch = 50

// costs returns the agent's CPU time for a pod that moves, in ms, less its idle use, one for each batch: if they move
// one after the other, and if they move at once, as from a node that is drained.
func (r *routedPods) costs(ctx context.Context, b *bench, h *netlink.Handle) (each [2][]float64, err error) {
	const (
		apart = 20 * time.Millisecond // one change wakes the agent, and the next one wakes it again
		still = 5 * time.Second
	)
	if _, err := r.start(ctx, h); err != nil {
		return each, err
	}
	agent := r.third.AgentProcess
	defer func() { err = errors.Join(err, agent.Stop()) }()
	if err := settle(ctx, agent.Process(), r.APIServer.Process()); err != nil {
		return each, err
	}
	used := func(f func() error) (cpu, took time.Duration, err error) {
		begin := time.Now()
		before, err := cpuTime(agent.Process())
		if err == nil {
			err = f()
		}
		if err != nil {
			return 0, 0, err
		}
		after, err := cpuTime(agent.Process())
		return after - before, time.Since(begin), err
	}
	idle, took, err := used(func() error { return sleep(ctx, still) })
	if err != nil {
		return each, err
	}
	share := float64(idle) / float64(took)
	next := 0
	moves := func() [][]func(context.Context) error {
		var all [][]func(context.Context) error
		for range movesOfBatch {
			all = append(all, r.changes(next%len(r.ips)))
			next++
		}
		return all
	}
	alone := func() error {
		tick := time.NewTicker(apart)
		defer tick.Stop()
		for _, of := range moves() {
			for _, change := range of {
				if err := change(ctx); err != nil {
					return err
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
		return nil
	}
	atOnce := func() error {
		all := moves()
		for i := range all[0] {
			err := parallel(ctx, len(all), burstClients, func(ctx context.Context, _, pod int) error { return all[pod][i](ctx) })
			if err != nil {
				return err
			}
		}
		return nil
	}
	for range b.times(6) {
		for how, move := range []func() error{alone, atOnce} {
			cpu, took, err := used(func() error { return errors.Join(move(), sleep(ctx, 200*time.Millisecond)) })
			if err != nil {
				return each, err
			}
			each[how] = append(each[how], (float64(cpu)-share*float64(took))/movesOfBatch/1e6)
			if ok, err := r.right(h); err != nil || !ok {
				return each, fmt.Errorf("a pod that has moved has no route: %w", err)
			}
		}
	}
	return each, nil
}
