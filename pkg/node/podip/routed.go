package podip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/node/wake"
)

// podCIDRAgain is when a node that has no podCIDR is asked for it again.
const podCIDRAgain = 15 * time.Second

// flannelSubnet is what flanneld writes for its plugin.
const flannelSubnet = "run/flannel/subnet.env"

// errNoPodCIDR is about nodes whose addresses somebody else gives out.
var errNoPodCIDR = errors.New("the Node has no podCIDR and the node's network no range: " +
	"other nodes cannot route addresses of pools to its pods")

// SetRouted says whether the cluster has a pool of mode Routed. Once it has none, the routes that are there stay.
func (k *Keeper) SetRouted(are bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.areRouted != are {
		k.areRouted = are
		k.routedChanged.Up()
	}
}

// routeLoop routes addresses while the cluster has a pool of mode Routed.
func (k *Keeper) routeLoop(ctx context.Context) {
	if k.table == nil {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	var stop context.CancelFunc
	for {
		k.mu.Lock()
		are := k.areRouted
		k.mu.Unlock()
		switch {
		case are && stop == nil:
			var working context.Context
			working, stop = context.WithCancel(ctx)
			for _, loop := range []func(context.Context){
				k.table.Run, k.followRouted, k.followNetwork, k.learnPodCIDR, k.seeWhetherRoutes,
			} {
				wg.Go(func() { loop(working) })
			}
		case !are && stop != nil:
			stop()
			stop = nil
			wg.Wait()
			k.troubles.note("routed", nil)
			k.troubles.note("podCIDR", nil)
			k.troubles.note("cloud", nil)
		}
		select {
		case <-ctx.Done():
			if stop != nil {
				stop()
			}
			return
		case <-k.routedChanged:
		}
	}
}

// followRouted tells the routes where each routed address is.
func (k *Keeper) followRouted(ctx context.Context) {
	k.follow(ctx, "routed", func(ctx context.Context, healthy func()) (err error) {
		ctx, cancel := context.WithTimeout(ctx, watchTimeout+time.Minute)
		defer cancel()
		k.mu.Lock()
		k.reroute = cancel // before they are read: what changes later ends this
		k.mu.Unlock()
		served, _ := k.served.get()
		defer func() {
			if is, _ := k.served.get(); is != served { // the list is to be read by it
				err = nil
			}
		}()
		places := map[netip.Addr]route.Place{}
		version, err := k.api.Routed(ctx, func(ip *v1alpha1.PodIP) {
			if a, p, ok := k.placeOf(ip); ok {
				places[a] = p
			}
		})
		if err != nil {
			return err
		}
		k.table.Set(places)
		w, err := k.api.WatchRouted(ctx, version)
		if err != nil {
			return err
		}
		defer w.Stop()
		healthy()
		for e := range w.ResultChan() {
			if err := errWatch(e); err != nil {
				return fmt.Errorf("watching PodIPs: %w", err)
			}
			ip, ok := e.Object.(*v1alpha1.PodIP)
			if !ok || e.Type == watch.Bookmark {
				continue
			}
			switch a, p, ok := k.placeOf(ip); {
			case !a.IsValid():
			case e.Type == watch.Deleted || !ok:
				k.table.Delete(a)
			default:
				k.table.Put(a, p)
			}
		}
		return nil
	})
}

// placeOf returns where the pod is that has an address, false if that is not known.
func (k *Keeper) placeOf(ip *v1alpha1.PodIP) (a netip.Addr, p route.Place, ok bool) {
	a, err := v1alpha1.ParsePodIPName(ip.Name)
	if err != nil || ip.Spec.Mode != v1alpha1.ModeRouted {
		return netip.Addr{}, p, false
	}
	if !k.served.mayHave(a) {
		return a, p, false
	}
	s := &ip.Status
	cidr, err := netip.ParsePrefix(s.PodCIDR)
	if err != nil || s.PodUID != ip.Spec.PodUID || s.NodeName == "" || cidr.Addr().Is4() != a.Is4() ||
		s.Phase != v1alpha1.PodIPAllocated && s.Phase != v1alpha1.PodIPBound {
		return a, p, false
	}
	return a, route.Place{Here: s.NodeName == k.o.Node, PodCIDR: cidr.Masked()}, true
}

// here returns the addresses of pools that pods of this node have by its ledgers, and the bridges that they are on.
func (k *Keeper) here() (map[netip.Addr]string, error) {
	all, err := k.machine.attached(true)
	if err != nil {
		return nil, err
	}
	out, bridges := map[netip.Addr]string{}, map[string]string{}
	for _, b := range all {
		if !k.served.mayHave(b.Addr) {
			continue
		}
		if b.Pod.UID != "" && ledger.ValidPodUID(b.Pod.UID) == nil {
			barred, err := ledger.Barred(k.o.Ledgers, b.Pod.UID)
			if err != nil {
				return nil, err
			}
			if barred {
				continue // it is not its any more
			}
		}
		bridge, known := bridges[b.network]
		if !known && k.o.Bridge != nil {
			bridge = k.o.Bridge(b.network)
			bridges[b.network] = bridge
		}
		out[b.Addr] = bridge
	}
	return out, nil
}

// learnPodCIDR finds out by which prefixes other nodes route to the pods of this one: they do not change.
func (k *Keeper) learnPodCIDR(ctx context.Context) {
	for {
		all, err := k.o.PodCIDRs(ctx)
		if err == nil && len(all) == 0 && k.o.Subnets != nil {
			all = k.o.Subnets()
		}
		if err == nil && len(all) == 0 {
			err = errNoPodCIDR
		}
		k.troubles.note("podCIDR", err)
		if err == nil {
			k.mu.Lock()
			k.podCIDRs = all
			k.enqueueAll()
			k.mu.Unlock()
			return
		}
		if !wake.Pause(ctx, podCIDRAgain) {
			return
		}
	}
}

// cloudAgain is when the Node is asked again whether a cloud's router has the routes to its pods: the cloud's
// controller may say so after the agent's start.
const cloudAgain = 5 * time.Minute

const byCloud = "a cloud's router has the routes to its pods (condition NetworkUnavailable, reason RouteCreated) " +
	"and knows none to other addresses"

// seeWhetherRoutes finds out whether pods of the node can have routed addresses.
func (k *Keeper) seeWhetherRoutes(ctx context.Context) {
	cloud, asked := false, time.Time{}
	for {
		why := ""
		if k.o.CannotRoute != nil {
			why = k.o.CannotRoute()
		}
		if why == "" && k.machine.now().Sub(asked).Abs() >= cloudAgain {
			is, err := k.api.RoutedByCloud(ctx)
			if k.troubles.note("cloud", err); err == nil {
				cloud, asked = is, k.machine.now()
			}
		}
		if why == "" && cloud {
			why = byCloud
		}
		if why != "" || !asked.IsZero() {
			k.setCannotRoute(why)
		}
		if !wake.Pause(ctx, networkAgain) {
			return
		}
	}
}

// mostWhy is the longest PodIPAnswer.spec.cannotRoute, in characters.
const mostWhy = 1024

func (k *Keeper) setCannotRoute(why string) {
	why = strings.ToValidUTF8(why, "?")
	if r := []rune(why); len(r) > mostWhy {
		why = string(r[:mostWhy])
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.cannotRoute == nil || *k.cannotRoute != why {
		k.cannotRoute = &why
		k.rollNow.Up()
	}
}

// ownPodCIDR is Options.PodCIDR by default.
func (k *Keeper) ownPodCIDR(is4 bool) netip.Prefix {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.podCIDRs {
		if p.Addr().Is4() == is4 {
			return p
		}
	}
	return netip.Prefix{}
}

// networkAgain is when flannel's file is read again: after a boot flanneld may begin later than the agent.
const networkAgain = 10 * time.Second

// followNetwork tells the routes of flannel's network. What is known of it stays while flanneld is away.
func (k *Keeper) followNetwork(ctx context.Context) {
	for {
		if all := k.network(); all != nil {
			k.table.SetNetwork(all)
		}
		if !wake.Pause(ctx, networkAgain) {
			return
		}
	}
}

// network returns the prefixes of all pods if flannel says so, whose rules masquerade what it does not know.
func (k *Keeper) network() (all []netip.Prefix) {
	b, err := os.ReadFile(k.flannelFile())
	if err != nil {
		return nil // it is none of flannel's
	}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if key != "FLANNEL_NETWORK" && key != "FLANNEL_IPV6_NETWORK" {
			continue
		}
		for one := range strings.SplitSeq(value, ",") {
			if p, err := netip.ParsePrefix(one); err == nil {
				all = append(all, p)
			}
		}
	}
	return all
}
