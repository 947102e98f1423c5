// Package route is the data plane of routed pools on a node: packets for an address of such a pool go to the node that
// has its pod, and from and to the pod they keep their source. It decides nothing about addresses; it is told where
// each of them is, and makes the kernel agree.
//
// # What it promises
//
//   - On a node that does not have the pod, a route to the address alone goes where the node's own route to the pods of
//     the serving node goes. If the node has no such route, packets are refused and not sent elsewhere, least of all to
//     the node that had the pod before.
//   - Whether a pod of this node has an address is what the node's ledgers say, and nothing else: the API server's data
//     may be older. If a pod has it, the plugin's route to it stays, and comes back if it was lost. If none has, such a
//     route is removed.
//   - Pods beside the pod go on asking the node for it: it does not tell them that they could reach it themselves. So
//     they reach it at its new place once it has left.
//   - Nothing is removed on ignorance: before all places are known, after an error of the kernel or of a ledger, while
//     the route to a node is missing, at the agent's start and at its end, and for a while if no pod seems to have an
//     address: an API server may have forgotten it. [Remove] takes all of it away.
//
// Errors are reported by Options.Note, and all is tried again.
//
//	route.go   what is known, and when the kernel is read
//	decide.go  the route that an address is to have: pure
//	kernel.go  what is read and written
//	source.go  the nftables table that keeps sources, and redirects from being sent
package route

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/node/wake"
)

// The protocol numbers of routes. Routes of the pods of this node are the plugin's.
const (
	ProtocolPod   netlink.RouteProtocol = link.ProtocolPod   // to the pod, by the device where it is
	ProtocolAgent netlink.RouteProtocol = link.ProtocolAgent // to the node that has the pod
)

// Place is where the pod that has an address is.
type Place struct {
	// Here says that the pod is on this node, by the API server.
	Here bool
	// PodCIDR is from what the serving node's pods have their addresses, of the same family. Without it nothing changes.
	PodCIDR netip.Prefix
}

// Options are what a Table works with.
type Options struct {
	// Netns is the node's network namespace, by default the process's own.
	Netns string
	// Bound returns the addresses that pods of this node have by its ledgers, at least those of pools, and the name of
	// the bridge that each is on, empty if on none.
	Bound func() (map[netip.Addr]string, error)
	// Interval is the longest time between two looks at the kernel.
	Interval time.Duration
	// Keep is how long the route to an address stays that no pod has.
	Keep time.Duration
	// Note is told how a part of the work went: routes.events, routes.look, routes.ledger, routes.set or routes.sources.
	// After an error it is tried again. It must not call the Table.
	Note func(part string, err error)
}

const (
	defaultInterval = time.Minute
	defaultKeep     = 10 * time.Minute
	// gather is how long is waited for more changes of routes and links: a device that goes takes many along.
	gather = 20 * time.Millisecond
	retry  = time.Second
	// tableAgain is how often it is checked that the nftables table is there: `nft flush ruleset` takes it along.
	tableAgain = time.Second
)

// Table keeps the routes of a node. Its methods may be called from any goroutine.
type Table struct {
	o   Options
	now wake.Signal // there is something to do

	mu      sync.Mutex
	places  map[netip.Addr]Place
	serving map[netip.Prefix]int // how many places have each PodCIDR
	known   bool                 // places are all that there are
	changed map[netip.Addr]bool  // what is due
	look    bool                 // all of the kernel is
	ask     bool                 // the ledgers are
	chain   bool                 // the nftables table is
	network []netip.Prefix
	// By the last look, and what happened since.
	routes     map[netip.Addr]held            // of pool addresses, ours and the plugin's
	ways       map[wayKey]*netlink.Route      // that these share
	sources    map[netip.Prefix]netlink.Route // the node's own
	bound      map[netip.Addr]string
	unassigned map[netip.Addr]time.Time // since when the address of a route is unassigned
	// kept are the addresses whose sources the nftables table keeps.
	kept []netip.Addr
}

// route is one of the kernel, and which place it is for, zero if it is not known.
type route struct {
	netlink.Route
	serving netip.Prefix
}

// held is a route as it is remembered: there may be very many, and few ways.
type held struct {
	way     *netlink.Route // without the address, nil if there is no route
	serving netip.Prefix
}

func (h held) protocol() netlink.RouteProtocol {
	if h.way == nil {
		return 0
	}
	return h.way.Protocol
}

// wayKey is what is used of a route that is not to be of several.
type wayKey struct {
	protocol                                netlink.RouteProtocol
	scope                                   netlink.Scope
	kind, table, priority, link, mtu, flags int
	gateway, source                         netip.Addr
}

// hold returns what is remembered of a route. t.mu is held.
func (t *Table) hold(r netlink.Route, serving netip.Prefix) held {
	r.Dst = nil
	if r.Via != nil || r.Encap != nil || len(r.MultiPath) > 0 {
		return held{&r, serving}
	}
	key := wayKey{protocol: r.Protocol, scope: r.Scope, kind: r.Type, table: r.Table, priority: r.Priority,
		link: r.LinkIndex, mtu: r.MTU, flags: r.Flags}
	key.gateway, _ = netip.AddrFromSlice(r.Gw)
	key.source, _ = netip.AddrFromSlice(r.Src)
	way := t.ways[key]
	if way == nil {
		way = &r
		t.ways[key] = way
	}
	return held{way, serving}
}

// New returns a Table that does nothing before Run, and before Set.
func New(o Options) *Table {
	if o.Interval == 0 {
		o.Interval = defaultInterval
	}
	if o.Keep == 0 {
		o.Keep = defaultKeep
	}
	return &Table{
		o: o, now: wake.New(),
		places: map[netip.Addr]Place{}, serving: map[netip.Prefix]int{}, changed: map[netip.Addr]bool{},
		routes: map[netip.Addr]held{}, ways: map[wayKey]*netlink.Route{}, sources: map[netip.Prefix]netlink.Route{},
		unassigned: map[netip.Addr]time.Time{},
	}
}

// Set says where all addresses are.
func (t *Table) Set(places map[netip.Addr]Place) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for a := range t.places {
		if _, ok := places[a]; !ok {
			t.put(a, Place{}, false)
		}
	}
	for a, p := range places {
		t.put(a, p, true)
	}
	t.known, t.look, t.ask, t.chain = true, true, true, true
	t.now.Up()
}

// Put says where one address is.
func (t *Table) Put(a netip.Addr, p Place) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.put(a, p, true) {
		t.now.Up()
	}
}

// Delete says that no pod has an address any more.
func (t *Table) Delete(a netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.put(a, Place{}, false) {
		t.now.Up()
	}
}

// put records a place, or that there is none, and reports whether that is new. t.mu is held.
func (t *Table) put(a netip.Addr, p Place, is bool) bool {
	was, ok := t.places[a]
	if ok == is && was == p {
		return false
	}
	if ok {
		if t.serving[was.PodCIDR]--; t.serving[was.PodCIDR] == 0 {
			delete(t.serving, was.PodCIDR)
			t.chain = true
		}
		delete(t.places, a)
	}
	if is {
		if t.serving[p.PodCIDR]++; t.serving[p.PodCIDR] == 1 { // what became of the way there was not followed
			t.look, t.chain = true, true
		}
		t.places[a] = p
	}
	t.changed[a] = true
	if was.Here || p.Here {
		t.ask = true
	}
	return true
}

// SetNetwork says to which destinations packets of pods keep their source, beside the pods of nodes that serve a routed
// address: the network that is all nodes'.
func (t *Table) SetNetwork(all []netip.Prefix) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if all = merge(all); !slices.Equal(t.network, all) {
		t.network, t.chain = all, true
		t.now.Up()
	}
}

// Routes counts the routes of its own that the node has.
func (t *Table) Routes() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.routes {
		if r.protocol() == ProtocolAgent {
			n++
		}
	}
	return n
}

// Run has the kernel agree until ctx is done. It leaves everything as it is then.
func (t *Table) Run(ctx context.Context) {
	for ctx.Err() == nil {
		err := t.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		t.o.Note("routes.events", err)
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// follow has the kernel agree until ctx is done or it no longer says what changes.
func (t *Table) follow(ctx context.Context) error {
	k, err := open(t.o)
	if err != nil {
		return err
	}
	defer k.close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	routes, links, err := k.subscribe(ctx, func(err error) {
		select {
		case failed <- err:
		default:
		}
	})
	if err != nil {
		return err
	}
	t.o.Note("routes.events", nil)
	t.lookAgain() // also for what happened before
	each := time.NewTicker(t.o.Interval)
	defer each.Stop()
	table := time.NewTicker(tableAgain)
	defer table.Stop()
	var soon <-chan time.Time // something has happened
	for {
		happened := false
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return fmt.Errorf("waiting for changes of routes and links: %w", err)
		case u, ok := <-routes:
			happened = ok && t.sawRoute(u)
		case u, ok := <-links:
			happened = ok && t.sawLink(u)
		case <-each.C:
			t.lookAgain()
		case <-table.C:
			t.lookForTable(k)
		case <-t.now:
			if soon = nil; !t.agree(k) {
				soon = time.After(retry)
			}
		case <-soon:
			soon = nil
			t.now.Up()
		}
		if happened && soon == nil {
			soon = time.After(gather)
		}
	}
}

func (t *Table) lookAgain() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look, t.ask, t.chain = true, true, true
	t.now.Up()
}

// sawRoute records a change of a route, and reports whether there is something to do.
func (t *Table) sawRoute(u netlink.RouteUpdate) bool {
	dst, ok := prefixOf(u.Dst)
	if !ok || u.Table != unix.RT_TABLE_MAIN {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !dst.IsSingleIP() {
		if t.serving[dst] == 0 {
			return false
		}
		t.look = true
		return true
	}
	a, gone := dst.Addr(), u.Type == unix.RTM_DELROUTE
	there := t.routes[a].protocol()
	switch {
	case u.Protocol == ProtocolAgent && !gone:
		return false // ours
	case u.Protocol == ProtocolAgent && there != ProtocolAgent:
		return false // taken away by us
	case u.Protocol == ProtocolPod && !gone && there == ProtocolAgent:
		t.look = true // it may be this that ours has replaced
	case u.Protocol == ProtocolPod && !gone:
		t.routes[a] = t.hold(u.Route, netip.Prefix{})
	case u.Protocol == ProtocolPod || u.Protocol == ProtocolAgent:
		if there == u.Protocol {
			delete(t.routes, a)
		}
	default: // of another plugin, to its pod
		if _, ok := t.places[a]; !ok {
			return false
		}
	}
	t.changed[a], t.ask = true, true
	return true
}

// sawLink records a change of a link, and reports whether there is something to do.
func (t *Table) sawLink(u netlink.LinkUpdate) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	index, name := int(u.Index), u.Link.Attrs().Name
	for _, bridge := range t.bound {
		if bridge == name {
			t.look = true
			return true
		}
	}
	for p := range t.serving {
		if r, ok := t.sources[p]; ok && uses(r, index) {
			t.look = true
			return true
		}
	}
	return false
}

func uses(r netlink.Route, index int) bool {
	return r.LinkIndex == index ||
		slices.ContainsFunc(r.MultiPath, func(n *netlink.NexthopInfo) bool { return n.LinkIndex == index })
}

// agree has the kernel agree, and reports whether it does.
func (t *Table) agree(k *kernel) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.known {
		return true
	}
	if t.look {
		err := t.read(k)
		t.o.Note("routes.look", err)
		if err != nil {
			return false
		}
		t.ask = true
		for a := range t.places {
			t.changed[a] = true
		}
		for a := range t.routes {
			t.changed[a] = true
		}
		maps.DeleteFunc(t.unassigned, func(a netip.Addr, _ time.Time) bool {
			return t.routes[a].protocol() != ProtocolAgent
		})
	}
	if t.ask { // after the routes: what the plugin has set up since is in the ledger
		bound, err := t.o.Bound()
		t.o.Note("routes.ledger", err)
		if err != nil {
			return false
		}
		t.bound = bound
	}
	here := t.ask || t.chain // what pods of this node have may have changed
	t.look, t.ask = false, false
	var errs []error
	for a := range t.changed {
		if err := t.apply(k, a); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", a, err))
			t.look = true
			continue
		}
		delete(t.changed, a)
	}
	err := errors.Join(errs[:min(len(errs), 3)]...)
	t.o.Note("routes.set", err)
	if here {
		failed := t.keepSources(k)
		t.o.Note("routes.sources", failed)
		err = errors.Join(err, failed)
	}
	return err == nil
}

// keepSources has the nftables table agree. What the kernel has of it is read at every interval, when the PodCIDRs or
// the network change, and after an error; else the sets are changed by the difference. t.mu is held.
func (t *Table) keepSources(k *kernel) error {
	here := t.here()
	if !t.chain && slices.Equal(here, t.kept) {
		return nil
	}
	if t.chain || len(here) == 0 || len(t.kept) == 0 || k.changeSources(t.kept, here) != nil {
		t.chain = true // until it is written
		if err := k.keepSources(here, t.cluster()); err != nil {
			return err
		}
	}
	t.kept, t.chain = here, false
	return nil
}

// here are the addresses of pods of this node, in order. t.mu is held.
func (t *Table) here() (all []netip.Addr) {
	for a, p := range t.places {
		if p.Here { // also before it has started
			all = append(all, a)
		}
	}
	for a := range t.bound {
		if p, ok := t.places[a]; !p.Here && (ok || t.routes[a].protocol() == ProtocolPod) {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// cluster is where pods are, as far as it is known. t.mu is held.
func (t *Table) cluster() []netip.Prefix {
	all := slices.Clone(t.network)
	for p := range t.serving {
		if p.IsValid() {
			all = append(all, p)
		}
	}
	return merge(all)
}

// read looks at the kernel. t.mu is held.
func (t *Table) read(k *kernel) error {
	was, ways := t.routes, t.ways
	routes, sources := make(map[netip.Addr]held, len(was)), map[netip.Prefix]netlink.Route{}
	t.ways = map[wayKey]*netlink.Route{}
	err := k.list(func(r netlink.Route) {
		dst, ok := prefixOf(r.Dst)
		switch {
		case !ok:
		case r.Protocol == ProtocolPod || r.Protocol == ProtocolAgent:
			routes[dst.Addr()] = t.hold(r, was[dst.Addr()].serving)
		default:
			if other, ok := sources[dst]; !ok || r.Priority < other.Priority {
				sources[dst] = r
			}
		}
	})
	if err != nil {
		t.ways = ways
		return err
	}
	t.routes, t.sources = routes, sources
	return nil
}

// apply has the kernel agree about one address. t.mu is held.
func (t *Table) apply(k *kernel, a netip.Addr) error {
	var f facts
	f.place, f.placed = t.places[a]
	of, has := t.routes[a]
	var there route
	if has {
		there = route{*of.way, of.serving}
		there.Dst = hostNet(a)
		f.there = &there
	}
	if source, ok := t.sources[f.place.PodCIDR]; ok {
		f.source = &source
	}
	bridge := ""
	bridge, f.bound = t.bound[a]
	if f.bound && there.Protocol != ProtocolPod && bridge != "" {
		index, err := k.bridge(bridge)
		if err != nil {
			return err
		}
		f.bridge = index
	}
	f.kept = f.placed || f.bound || !has
	if since, ok := t.unassigned[a]; f.kept {
		delete(t.unassigned, a)
	} else if !ok {
		t.unassigned[a], f.kept = time.Now(), true
	} else {
		f.kept = time.Since(since) < t.o.Keep
	}
	d := decide(a, f)
	switch d.do {
	case remove:
		if err := k.remove(there.Route); err != nil {
			return fmt.Errorf("removing the route: %w", err)
		}
		delete(t.routes, a)
	case set:
		write := k.replace
		if !has { // another one is the plugin's, and has come since
			write = k.add
		}
		switch err := write(d.route); {
		case errors.Is(err, unix.EEXIST):
			return nil // the kernel's event for that route makes this address due again
		case d.route.Protocol == ProtocolPod && (errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENETDOWN)):
			return nil // so does the event for the device
		case err != nil:
			return fmt.Errorf("route: %w", err)
		}
		t.routes[a] = t.hold(d.route, f.place.PodCIDR)
	}
	return nil
}

// Remove takes everything away that a Table has made, on a node whose agent no longer works. The routes of pods that
// run stay: they are the plugin's.
func Remove(o Options) error {
	k, err := open(o)
	if err != nil {
		return err
	}
	defer k.close()
	var ours []netlink.Route
	err = k.list(func(r netlink.Route) {
		if r.Protocol == ProtocolAgent {
			ours = append(ours, r)
		}
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range ours {
		if err := k.remove(r); err != nil {
			errs = append(errs, fmt.Errorf("removing the route to %s: %w", r.Dst, err))
		}
	}
	return errors.Join(append(errs[:min(len(errs), 3)], k.keepSources(nil, nil))...)
}
