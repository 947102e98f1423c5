package podip

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/apiwatch"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/node/wake"
)

// podCIDRAgain is when a node that has no podCIDR is asked for it again.
const podCIDRAgain = 15 * time.Second

// flannelSubnet is what flanneld writes for its plugin.
const flannelSubnet = "run/flannel/subnet.env"

// errNoPodCIDR is about nodes whose addresses another program gives out.
var errNoPodCIDR = errors.New("the Node has no podCIDR and its network no range: " +
	"other nodes cannot route pool addresses to its pods")

// router tells package route, while the cluster has a pool of mode Routed, where the addresses of such pools are. It
// finds out by which prefixes other nodes route to this one, and whether they can. mu is held for the fields below it,
// and no other lock is taken meanwhile.
type router struct {
	node     string
	api      api
	served   *servedPools
	pods     *podTable
	machine  *machine
	reporter *reporter
	troubles *troubles
	table    Table // nil if the node routes nothing

	// As Options has them.
	subnets func() []netip.Prefix
	bridge  func(network string) string
	// podCIDR returns the prefix by which other nodes route to the pods of this one, the zero Prefix if it is not known.
	// Tests have their own, and their own flannelFile: where flanneld says what its network is.
	podCIDR     func(is4 bool) netip.Prefix
	flannelFile func() string

	changed wake.Signal // enabled has changed

	mu       sync.Mutex
	enabled  bool // whether the cluster has a pool of mode Routed
	podCIDRs []netip.Prefix
	again    func() // lists all PodIPs again, nil if they were never listed; doubt does so if that may be necessary
	doubt    func()
}

func newRouter(o Options) *router {
	r := &router{
		node: o.Node, subnets: o.Subnets,
		bridge: o.Bridge, changed: wake.New(),
		flannelFile: func() string {
			return filepath.Join("/proc", strconv.Itoa(o.Runtime.PID()), "root", flannelSubnet)
		},
	}
	r.podCIDR = r.ownPodCIDR
	return r
}

// enable says whether the cluster has a pool of mode Routed. Once it has none, the routes that are there stay.
func (r *router) enable(enabled bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.enabled != enabled {
		r.enabled = enabled
		r.changed.Up()
	}
}

func (r *router) isEnabled() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.enabled
}

// relist makes the watch list all PodIPs again.
func (r *router) relist() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.again != nil {
		r.again()
	}
}

// routes returns how many there are.
func (r *router) routes() int {
	if r.table == nil {
		return 0
	}
	return r.table.Routes()
}

// run routes addresses while the cluster has a pool of mode Routed, until ctx is done.
func (r *router) run(ctx context.Context) {
	if r.table == nil {
		return
	}
	for ctx.Err() == nil {
		if r.isEnabled() {
			r.work(ctx)
			for _, part := range []string{"routed", "podCIDR", "cloud"} {
				r.troubles.note(part, nil)
			}
			continue
		}
		select {
		case <-ctx.Done():
		case <-r.changed:
		}
	}
}

// work routes addresses until the cluster has no such pool, or ctx is done.
func (r *router) work(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for _, loop := range []func(context.Context){
		r.table.Run, r.followRouted, r.followNetwork, r.learnPodCIDR, r.learnCannotRoute,
	} {
		wg.Go(func() { loop(ctx) })
	}
	for r.isEnabled() && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-r.changed:
		}
	}
	cancel()
	wg.Wait()
}

// doubtPlaces makes the watch list all PodIPs again, unless it is the first one after a list.
func (r *router) doubtPlaces() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.doubt != nil {
		r.doubt()
	}
}

// followRouted tells the routes where each routed address is. The agents of all nodes watch all of them: if each made a
// list of them after each watch, that alone would take an API server several processors.
func (r *router) followRouted(ctx context.Context) {
	r.troubles.follow(ctx, "routed", apiwatch.Loop{
		What: "PodIPs", List: r.listRouted, Watch: r.api.WatchRouted, Event: r.routedEvent, Version: r.api.Version,
	})
}

func (r *router) listRouted(ctx context.Context, c apiwatch.Cycle) (version string, err error) {
	r.mu.Lock()
	// Before the list is read by what pools there are: if these change later, it is read again.
	r.again, r.doubt = c.Again, c.Doubt
	r.mu.Unlock()
	places := map[netip.Addr]route.Place{}
	version, err = r.api.Routed(ctx, func(ip *v1alpha1.PodIP) {
		if a, p, ok := r.placeOf(ip); ok {
			places[a] = p
		}
	})
	if err == nil {
		r.table.Set(places)
	}
	return version, err
}

func (r *router) routedEvent(e watch.Event) error {
	ip, ok := e.Object.(*v1alpha1.PodIP)
	if !ok {
		return nil
	}
	switch a, p, ok := r.placeOf(ip); {
	case !a.IsValid():
	case e.Type == watch.Deleted || !ok:
		r.table.Delete(a)
	default:
		r.table.Put(a, p)
	}
	return nil
}

// placeOf returns where the pod is that has an address, false if that is not known.
func (r *router) placeOf(ip *v1alpha1.PodIP) (a netip.Addr, p route.Place, ok bool) {
	a, err := v1alpha1.ParsePodIPName(ip.Name)
	if err != nil || ip.Spec.Mode != v1alpha1.ModeRouted {
		return netip.Addr{}, p, false
	}
	if !r.served.mayHave(a) {
		return a, p, false
	}
	s := &ip.Status
	cidr, err := netip.ParsePrefix(s.PodCIDR)
	if err != nil || s.PodUID != ip.Spec.PodUID || s.NodeName == "" || cidr.Addr().Is4() != a.Is4() ||
		s.Phase != v1alpha1.PodIPBound {
		return a, p, false
	}
	return a, route.Place{Here: s.NodeName == r.node, PodCIDR: cidr.Masked()}, true
}

// here returns the addresses of pools that pods of this node have by its ledgers, and the bridges that they are on.
func (r *router) here() (map[netip.Addr]string, error) {
	all, err := r.machine.attached(true)
	if err != nil {
		return nil, err
	}
	out, bridges := map[netip.Addr]string{}, map[string]string{}
	for _, b := range all {
		if !r.served.mayHave(b.Addr) {
			continue
		}
		if r.pods.isForeign(b.Pod.UID) {
			continue
		}
		bridge, known := bridges[b.network]
		if !known && r.bridge != nil {
			bridge = r.bridge(b.network)
			bridges[b.network] = bridge
		}
		out[b.Addr] = bridge
	}
	return out, nil
}

// learnPodCIDR finds out by which prefixes other nodes route to the pods of this one: they do not change.
func (r *router) learnPodCIDR(ctx context.Context) {
	for {
		all, err := r.api.PodCIDRs(ctx)
		if err == nil && len(all) == 0 && r.subnets != nil {
			all = r.subnets()
		}
		if err == nil && len(all) == 0 {
			err = errNoPodCIDR
		}
		r.troubles.note("podCIDR", err)
		if err == nil {
			r.mu.Lock()
			r.podCIDRs = all
			r.mu.Unlock()
			r.pods.enqueueAll()
			return
		}
		if !wake.Pause(ctx, podCIDRAgain) {
			return
		}
	}
}

// cloudAgain is when the Node is asked again whether a cloud router has the routes to its pods: the cloud's
// controller may say so after the agent's start.
const cloudAgain = 5 * time.Minute

const byCloud = "a cloud router has the routes to its pods (condition NetworkUnavailable, reason RouteCreated) " +
	"but none to other addresses"

// learnCannotRoute finds out whether pods of the node can have routed addresses.
func (r *router) learnCannotRoute(ctx context.Context) {
	cloud, asked := false, time.Time{}
	for {
		why := r.reporter.cannotServe(v1alpha1.ModeRouted)
		if why == "" && r.machine.now().Sub(asked).Abs() >= cloudAgain {
			routed, err := r.api.RoutedByCloud(ctx)
			if r.troubles.note("cloud", err); err == nil {
				cloud, asked = routed, r.machine.now()
			}
		}
		if why == "" && cloud {
			why = byCloud
		}
		if why != "" || !asked.IsZero() {
			r.reporter.setCannot(v1alpha1.ModeRouted, why)
		}
		if !wake.Pause(ctx, networkAgain) {
			return
		}
	}
}

// ownPodCIDR is podCIDR, but for tests.
func (r *router) ownPodCIDR(is4 bool) netip.Prefix {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.podCIDRs {
		if p.Addr().Is4() == is4 {
			return p
		}
	}
	return netip.Prefix{}
}

// networkAgain is when flannel's file is read again: after a boot flanneld may begin later than the agent.
const networkAgain = 10 * time.Second

// followNetwork tells the routes of flannel's network. What is known of it stays while flanneld is away.
func (r *router) followNetwork(ctx context.Context) {
	for {
		if all := r.network(); all != nil {
			r.table.SetNetwork(all)
		}
		if !wake.Pause(ctx, networkAgain) {
			return
		}
	}
}

// network returns the prefixes of all pods if flannel says so, whose rules masquerade what it does not know.
func (r *router) network() (all []netip.Prefix) {
	b, err := os.ReadFile(r.flannelFile())
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
