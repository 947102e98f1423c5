// Package podip is the agent's half of pools: addresses that belong to a pod and not to its node. It tells the plugin
// which pods have which addresses, and the cluster which pods of this node have theirs, or will never have them again.
//
// # What it promises
//
// What it tells the cluster is a fact. That a pod is gone it says only once the pod is barred from the node for good
// (ledger.Bar), has no address in a ledger whose network namespace is there, no sandbox that runs, and none of its
// addresses is configured in a namespace of the node, mounted or kept by a process. An error of the runtime, the API
// server or a file means wait, and is said on /readyz. It may be killed between any two of its writes: each is made
// again, or was enough.
//
// What it tells the plugin is a fact, too. It notes durably what pools the cluster has (ledger.Serve), and writes the
// addresses of a pod (ledger.Tell) only if their annotation names the guard under which none but the controller can
// have written it, or if the PodIPs are this pod's. An annotation that neither vouches for says nothing to it.
//
// It decides nothing by itself: [pool.Tend] and [pool.Respond] do. Every question that they depend on is asked past all
// caches. While the cluster has no pool it watches and writes nothing.
//
//	podip.go   the loops, and what is known of pods
//	follow.go  the watches of the node's pods and of the PodIPRoll; the files for the plugin
//	tend.go    what is done about a pod, and said of it
//	answer.go  the answers to rolls
//	sight.go   what is on the machine
//	routed.go  where routed addresses are: for package route
//	metrics.go what is counted
//	client.go  the API server
package podip

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/pkg/node/wake"
	"github.com/stayput/stayput/pkg/pool"
)

// Runtime is the container runtime, a *cri.Client.
type Runtime interface {
	Sandboxes(ctx context.Context) (map[string]cri.Sandbox, error)
	Netns(ctx context.Context, id string) (string, error)
	Stop(ctx context.Context, id string) error
	PID() int
}

// Options are what a Keeper works with.
type Options struct {
	API       *rest.Config
	Node      string // its name in the cluster
	Ledgers   ledger.Options
	NetnsDirs []string // where namespaces are mounted by name
	Runtime   Runtime
	Log       *slog.Logger
	Registry  prometheus.Registerer // of the metrics
	// PodCIDR returns the prefix of this family by which other nodes route to the pods of this one, the zero Prefix if it
	// is not known. It must not wait. If PodCIDR is nil, that of the Node counts, or the first one of Subnets.
	PodCIDR func(is4 bool) netip.Prefix
	// PodCIDRs asks the API server for those of the Node.
	PodCIDRs func(context.Context) ([]netip.Prefix, error)
	// Subnets returns the ranges from which pods of this node have their addresses, if its Node has no podCIDR. A nil
	// Subnets means none.
	Subnets func() []netip.Prefix
	// CannotRoute says why the node's network can have no routed addresses. It returns an empty string if it can or if
	// that is not known. A nil CannotRoute means that it can.
	CannotRoute func() string
	// Serves reports whether pods that start now have their eth0 from the plugin. If not, no pod has an address of a pool
	// only because it runs. A nil Serves means that they have.
	Serves func() bool
	// Bridge returns the name of the bridge that pods of a network are on, empty if they are on none.
	Bridge func(network string) string
}

// Keeper is the agent's half of pools. Its methods may be called from any goroutine; none but Run waits.
type Keeper struct {
	o       Options
	api     api
	log     *slog.Logger
	metrics *metrics
	table   table // nil: the node routes nothing

	// What is asked of the machine; tests have their own.
	observe func(context.Context) (*hostnet.View, error)
	lives   func(ledger.Netns) (bool, error)
	// flannelFile is where flanneld says what its network is.
	flannelFile func() string
	down        func(ledger.Netns) error

	changed wake.Signal // served has changed
	rollNow wake.Signal // there may be something to answer
	// listedNow: all pods of the node were listed.
	listedNow wake.Signal
	// routedChanged: areRouted has.
	routedChanged wake.Signal
	shallow       fresh[*sight]
	deep          fresh[*sight]
	writing       sync.Mutex // of files by UID: they are of a list, and of what it was followed by
	troubled      sync.Mutex
	troubles      map[string]string

	mu sync.Mutex
	// served is what pools there are, nil if there are none; heard: somebody has said so.
	served *v1alpha1.ServedPools
	heard  bool
	// areRouted: some are of mode Routed.
	areRouted bool
	podCIDRs  []netip.Prefix // of this node
	// cannotRoute says why pods here cannot have routed addresses, empty if they can, nil if it is not known yet.
	cannotRoute *string
	// queue has the UIDs of subjects that are due, nil unless Run runs.
	queue    workqueue.TypedRateLimitingInterface[string]
	subjects map[string]*subject
	all      map[string]bool // the UIDs of all pods of the node, by their watch
	// listed: all pods of the node are known, since the epoch was begun. epoch is the one that the roll asks for.
	listed bool
	epoch  int64
	relist context.CancelFunc
	// lost is true if bars of this boot may be lost: the plugin is told of a pod only once its PodIPs say the same.
	lost bool
	// reroute has all routed PodIPs listed again, nil if they are not followed.
	reroute context.CancelFunc
	roll    *v1alpha1.PodIPRoll
	// answered is the round that this node has answered, 0 if it is not known, and when it was found out.
	answered   int64
	answeredAt time.Time
	// saidCannot is what the answer says of cannotRoute.
	saidCannot string
}

// table is a [route.Table].
type table interface {
	Run(ctx context.Context)
	Set(places map[netip.Addr]route.Place)
	Put(a netip.Addr, p route.Place)
	Delete(a netip.Addr)
	SetNetwork(all []netip.Prefix)
	Routes() int
}

// subject is a pod that has, or may have, addresses of pools on this node.
type subject struct {
	uid             string
	namespace, name string
	version         string
	annotations     map[string]string
	labels          map[string]string
	text            string       // of its addresses, which somebody vouches for
	claims          string       // what its annotation says, if that is not known to be true
	bare            []netip.Addr // addresses of which only the ledger tells, or only the pod's network namespace
	// untold: the plugin is to be told of the pod once its PodIPs say the same.
	untold bool
	// conflicts are the MAC addresses of other machines that had an address when the pod was to start. It is never changed
	// in place.
	conflicts map[netip.Addr]string
	// By the watch of the node's pods.
	exists, ending, over bool
	// bound: the cluster knows that the pod has its addresses here. gone: all that is to be done for a pod that is gone
	// was done. Both hold until something of the pod changes that matters, or all are due again; looks counts
	// that.
	bound, gone bool
	// placed: the cluster knows that other nodes are to route to the pod, which has not started. It holds as long.
	placed bool
	looks  int
	// stops: the runtime has said that it stops the sandbox, and not since that it runs another one.
	stops bool
	// ended is when it was found that the pod has ended, zero if it has not, or is about to.
	ended time.Time
	said  string // the last trouble with it
}

// alive reports whether kubelet may start the pod, or has.
func (s *subject) alive() bool { return s.exists && !s.ending && !s.over }

func (s *subject) String() string {
	if s.name == "" {
		return s.uid
	}
	return s.namespace + "/" + s.name + " (" + s.uid + ")"
}

// says notes what an annotation of the pod says. Unless it is vouched for, that is a claim: what the pod is known to
// have stands.
func (s *subject) says(text string, vouched bool) {
	if s.claims = text; vouched || text == s.text {
		s.text, s.claims = text, ""
	}
}

// guardsLocked reports whether a text names the guard that there is, in each entry: only the controller can have
// written it.
func (k *Keeper) guardsLocked(text string) bool {
	if k.served == nil || k.served.Guard == "" {
		return false
	}
	var all []struct{ Guard string }
	return json.Unmarshal([]byte(text), &all) == nil && len(all) > 0 &&
		!slices.ContainsFunc(all, func(a struct{ Guard string }) bool { return a.Guard != k.served.Guard })
}

// given are the addresses of a subject, as the controller has written them.
func (s *subject) given() ([]pool.Address, error) {
	all, err := addressesOf(s.text)
	if err != nil {
		return nil, fmt.Errorf("annotation %s of pod %s: %w", v1alpha1.AnnotationAddresses, s, err)
	}
	return all, nil
}

// addressesOf reads a text with addresses, empty if there are none.
func addressesOf(text string) (all []pool.Address, err error) {
	if text != "" {
		err = json.Unmarshal([]byte(text), &all)
	}
	return all, err
}

// addrs are the addresses of a subject.
func (s *subject) addrs() ([]netip.Addr, error) {
	given, err := s.given()
	all := slices.Clone(s.bare)
	for _, a := range given {
		if !a.Prefix.IsValid() {
			return nil, fmt.Errorf("annotation %s of pod %s: expected an address in each", v1alpha1.AnnotationAddresses, s)
		}
		if !slices.Contains(all, a.Prefix.Addr()) {
			all = append(all, a.Prefix.Addr())
		}
	}
	return all, err
}

const (
	workers = 8
	// A subject that is not settled is due again: after retryFirst, then ever later; one that waits for somebody
	// else every waitAgain.
	retryFirst, retryLast = 50 * time.Millisecond, 15 * time.Second
	waitAgain             = 15 * time.Second
	// runsAgain is for a pod whose sandbox is to end, should the runtime's word not come: NRI may be off.
	runsAgain = 2 * time.Second
	// discoverEvery is between two looks at the node's own books, sweepEvery between two sweeps of old bars.
	discoverEvery, discoverRetry = 5 * time.Minute, 5 * time.Second
	sweepEvery                   = 12 * time.Hour
)

// New returns a Keeper that does nothing before Run.
func New(o Options) (*Keeper, error) {
	api, err := newServer(o.API, o.Node)
	if err != nil {
		return nil, err
	}
	k := newKeeper(o, api)
	if o.PodCIDR == nil {
		k.o.PodCIDR = k.ownPodCIDR
	}
	k.table = route.New(route.Options{Bound: k.here, Note: k.note})
	o.Registry.MustRegister(k.metrics)
	return k, nil
}

func newKeeper(o Options, api api) *Keeper {
	k := &Keeper{
		o: o, api: api, log: o.Log, changed: wake.New(), rollNow: wake.New(),
		listedNow: wake.New(), routedChanged: wake.New(),
		troubles: map[string]string{},
	}
	k.metrics = newMetrics(k)
	k.observe = func(ctx context.Context) (*hostnet.View, error) {
		return hostnet.Observe(ctx, o.NetnsDirs, o.Runtime.PID())
	}
	k.flannelFile = func() string {
		return filepath.Join("/proc", strconv.Itoa(o.Runtime.PID()), "root", flannelSubnet)
	}
	k.lives = func(ns ledger.Netns) (bool, error) { return hostnet.Lives(ns, o.Runtime.PID()) }
	k.down = hostnet.Down
	return k
}

// SetPools says what pools the cluster has, as the installation says it, empty if it has none.
func (k *Keeper) SetPools(text string) {
	var served *v1alpha1.ServedPools
	if text != "" {
		var err error
		if served, err = v1alpha1.ParseServedPools(text); err != nil { // there are some
			k.log.Warn("Cannot read which pools there are", "err", err)
			served = &v1alpha1.ServedPools{More: true}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.heard || !reflect.DeepEqual(k.served, served) {
		k.served, k.heard = served, true
		k.changed.Up()
	}
}

// Run works while the cluster has a pool, until ctx is done.
func (k *Keeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		k.mu.Lock()
		served, heard := k.served, k.heard
		k.mu.Unlock()
		var retry <-chan time.Time
		switch {
		case served != nil:
			k.log.Info("The cluster has pools", "node", k.o.Node)
			k.serve(ctx)
			continue
		case heard:
			err := k.withdraw()
			if k.note("served", err); err != nil {
				retry = time.After(retryLast)
			}
		}
		select {
		case <-ctx.Done():
		case <-k.changed:
		case <-retry:
		}
	}
}

// withdraw tells the plugin that the cluster has no pools, if it has been told of any.
func (k *Keeper) withdraw() error {
	was, err := ledger.PoolsServed(k.o.Ledgers)
	if err == nil && (was == nil || was.None) {
		return nil
	}
	return ledger.Serve(k.o.Ledgers, ledger.Served{None: true})
}

// tellServed tells the plugin what pools there are, if that has changed. If it knows nothing any more, recheck tells
// it.
func (k *Keeper) tellServed() error {
	k.writing.Lock()
	defer k.writing.Unlock()
	was, err := ledger.PoolsServed(k.o.Ledgers)
	if was == nil && (err == nil || errors.Is(err, ledger.ErrCorrupt)) {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.listed = false; k.relist != nil {
			k.relist()
		}
		return nil
	}
	if err != nil {
		return err
	}
	return k.putServedLocked(was)
}

// putServedLocked notes what pools there are, unless it is noted. The lock is k.writing.
func (k *Keeper) putServedLocked(was *ledger.Served) error {
	k.mu.Lock()
	served := k.served
	k.mu.Unlock()
	if served == nil {
		return nil
	}
	is := ledger.Served{Version: 1, Guard: served.Guard, Subnets: served.Subnets, Gateways: served.Gateways,
		More: served.More}
	if was != nil && reflect.DeepEqual(*was, is) {
		return nil
	}
	return ledger.Serve(k.o.Ledgers, is)
}

// servedAgain is how often the agent checks that what the plugin was told is still there.
const servedAgain = 10 * time.Second

// serve works until the cluster has no pool or ctx is done.
func (k *Keeper) serve(ctx context.Context) {
	// Until the plugin knows which node this is, it probes for more addresses than it need.
	k.note("node", ledger.TellNode(k.o.Ledgers, k.o.Node))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryLast))
	select {
	case <-k.changed: // the list of pods begins with it
	default:
	}
	k.mu.Lock()
	k.queue, k.subjects, k.all, k.listed, k.roll, k.answered, k.epoch = queue, map[string]*subject{},
		map[string]bool{}, false, nil, 0, 0
	k.relist, k.reroute = nil, nil
	k.cannotRoute = nil
	k.metrics.serves()
	k.mu.Unlock()
	var wg sync.WaitGroup
	for _, loop := range []func(context.Context){k.followPods, k.followRoll, k.answers, k.discovers,
		k.sweeps, k.routeLoop} {
		wg.Go(func() { loop(ctx) })
	}
	for range workers {
		wg.Go(func() {
			for k.work(ctx, queue) {
			}
		})
	}
	again := time.NewTicker(servedAgain)
	defer again.Stop()
	for are := true; are; {
		select {
		case <-ctx.Done():
			are = false
			continue
		case <-k.changed:
			k.mu.Lock()
			if are = k.served != nil; k.reroute != nil {
				k.reroute()
			}
			for _, s := range k.subjects {
				if s.claims != "" {
					s.says(s.claims, k.guardsLocked(s.claims))
					s.untold = k.lost && s.claims == ""
					k.enqueue(s)
				}
			}
			k.mu.Unlock()
		case <-again.C:
		}
		k.note("served", k.tellServed())
	}
	k.mu.Lock()
	k.queue = nil
	k.mu.Unlock()
	cancel()
	queue.ShutDown()
	wg.Wait()
	k.troubled.Lock()
	clear(k.troubles)
	k.troubled.Unlock()
}

// Look queues a pod: its sandbox has started or, if stops is true, stops or has gone.
func (k *Keeper) Look(pod ledger.Pod, annotations map[string]string, stops bool) {
	if k == nil || ledger.ValidPodUID(pod.UID) != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.queue == nil {
		return
	}
	s := k.subjects[pod.UID]
	if s == nil {
		text := annotations[v1alpha1.AnnotationAddresses]
		if text == "" {
			return
		}
		s = &subject{uid: pod.UID, namespace: pod.Namespace, name: pod.Name, annotations: annotations}
		s.says(text, k.guardsLocked(text))
		k.subjects[pod.UID] = s
	}
	s.stops = stops
	k.enqueue(s)
}

// Conflict notes that a pod could not start, because another machine on the link has an address of it. If the pod is
// not known yet, the next ADD says so again.
func (k *Keeper) Conflict(e ledger.Event) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.subjects[e.Pod.UID]
	if s == nil || e.MAC == "" {
		return
	}
	s.conflicts = maps.Clone(s.conflicts)
	if s.conflicts == nil {
		s.conflicts = map[netip.Addr]string{}
	}
	for _, a := range e.Addrs {
		s.conflicts[a] = e.MAC
	}
	k.enqueue(s)
}

// started forgets the conflicts of a pod that has started since.
func (k *Keeper) started(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.subjects[uid]; s != nil {
		s.conflicts = nil
	}
}

// enqueue queues a subject at once. k.mu is held.
func (k *Keeper) enqueue(s *subject) {
	if k.queue != nil {
		k.queue.Forget(s.uid)
		k.queue.Add(s.uid)
	}
}

// enqueueAll queues every subject. k.mu is held.
func (k *Keeper) enqueueAll() {
	for _, s := range k.subjects {
		s.bound, s.gone, s.placed = false, false, false
		s.looks++
		k.enqueue(s)
	}
}

// note keeps for /readyz how a part of the work went, and logs what is new.
func (k *Keeper) note(part string, err error) {
	k.troubled.Lock()
	defer k.troubled.Unlock()
	if err == nil {
		delete(k.troubles, part)
		return
	}
	if errors.Is(err, context.Canceled) {
		return
	}
	k.metrics.failed(part)
	if k.troubles[part] != err.Error() {
		k.log.Warn("Pools: retrying", "part", part, "err", err)
	}
	k.troubles[part] = err.Error()
}

// Trouble is why not all is done, for people, empty if it is.
func (k *Keeper) Trouble() string {
	if k == nil {
		return ""
	}
	k.troubled.Lock()
	defer k.troubled.Unlock()
	var all []string
	for _, part := range slices.Sorted(maps.Keys(k.troubles)) {
		if said := k.troubles[part]; !slices.Contains(all, said) {
			all = append(all, said)
		}
	}
	if len(all) > 3 {
		all = append(all[:3], fmt.Sprintf("and %d more", len(all)-3))
	}
	return strings.Join(all, "; ")
}

// now is the time for people.
func (k *Keeper) now() time.Time {
	if now, err := k.o.Ledgers.Clock.Now(); err == nil {
		return now.Wall
	}
	return time.Now()
}

// discovers looks for pods in the node's own books, and among those that run, that the cluster may have no more.
func (k *Keeper) discovers(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-k.listedNow:
		}
		listed := k.isListed() // until then not all that the books have can be told from ordinary pods
		err := k.discover(ctx)
		k.note("books", err)
		wait := discoverEvery
		if err != nil || !listed {
			wait = discoverRetry
		}
		timer.Reset(wait)
	}
}

// deletedPods returns the sandboxes of pods that the cluster seems to have no more and that the agent does not know.
func (k *Keeper) deletedPods(s *sight) (all []cri.Sandbox) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, sandbox := range s.sandboxes {
		uid := sandbox.Pod.UID
		if k.listed && !k.all[uid] && k.subjects[uid] == nil && ledger.ValidPodUID(uid) == nil &&
			sandbox.Annotations[v1alpha1.AnnotationAddresses] == "" {
			all = append(all, sandbox)
		}
	}
	return all
}

// addrsOfDeleted returns the addresses of pools that such pods have, by UID. What one of them has may be unknown, as of
// a sandbox that has just gone: the error says so, and the others count.
func (k *Keeper) addrsOfDeleted(ctx context.Context, pods []cri.Sandbox) (map[string][]netip.Addr, error) {
	if len(pods) == 0 {
		return nil, nil
	}
	s, err := k.deep.get(ctx, func() (*sight, error) { return k.look(ctx, true) })
	if err != nil {
		return nil, err
	}
	all := map[string][]netip.Addr{}
	var errs []error
	for _, sandbox := range pods {
		if _, there := s.sandboxes[sandbox.ID]; !there {
			continue
		}
		addrs, err := k.addrsInside(ctx, s, sandbox)
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s, which the cluster has no more: %w", sandbox.Pod, err))
		} else if addrs != nil {
			all[sandbox.Pod.UID] = append(all[sandbox.Pod.UID], addrs...)
		}
	}
	return all, errors.Join(errs...)
}

// addrsInside returns the addresses of pools that a sandbox has. Of a pod that another program has started, and that
// was taken over, neither its sandbox nor a ledger tells one: its network namespace does, and the PodIP.
func (k *Keeper) addrsInside(ctx context.Context, s *sight, sandbox cri.Sandbox) (addrs []netip.Addr, err error) {
	path, err := k.o.Runtime.Netns(ctx, sandbox.ID)
	if err != nil || path == "" { // "": the host's
		return nil, err
	}
	space, err := s.view.Find(ledger.Netns{Path: path})
	if err != nil || space == nil {
		return nil, err
	}
	for _, a := range space.Addrs() {
		ordinary := slices.ContainsFunc(s.bound, func(b bound) bool {
			return b.Attachment.ContainerID == sandbox.ID && b.Addr == a && !b.foreign
		})
		if ordinary || !a.IsGlobalUnicast() {
			continue
		}
		o, err := k.api.PodIP(ctx, a)
		if err != nil {
			return nil, err
		}
		if o != nil {
			addrs = append(addrs, a)
		}
	}
	if addrs == nil {
		return nil, space.Err
	}
	return addrs, nil
}

func (k *Keeper) discover(ctx context.Context) error {
	files, err := ledger.PoolPods(k.o.Ledgers)
	if err != nil {
		return err
	}
	s, err := k.shallow.get(ctx, func() (*sight, error) { return k.look(ctx, false) })
	if err != nil {
		return err
	}
	deleted, blind := k.addrsOfDeleted(ctx, k.deletedPods(s))
	k.mu.Lock()
	defer k.mu.Unlock()
	know := func(uid string) *subject {
		if k.subjects[uid] == nil {
			k.subjects[uid] = &subject{uid: uid}
			k.enqueue(k.subjects[uid])
		}
		return k.subjects[uid]
	}
	for uid, addrs := range deleted {
		know(uid).bare = addrs
	}
	for uid, f := range files {
		if f.Text == "" {
			continue
		}
		if of := know(uid); of.text == "" {
			of.text = f.Text
		}
	}
	for _, sandbox := range s.sandboxes {
		text := sandbox.Annotations[v1alpha1.AnnotationAddresses]
		if text == "" && k.subjects[sandbox.Pod.UID] == nil {
			continue
		}
		of := know(sandbox.Pod.UID)
		if of.text == "" && text != "" {
			of.says(text, k.guardsLocked(text))
		}
		if of.name == "" {
			of.namespace, of.name = sandbox.Pod.Namespace, sandbox.Pod.Name
		}
		if of.annotations == nil {
			of.annotations, of.labels = sandbox.Annotations, sandbox.Labels
		}
	}
	for _, b := range s.bound {
		uid, pod := b.uid(s), b.Pod
		if uid == "" || k.subjects[uid] == nil && (!b.foreign || !k.listed || k.all[uid]) {
			continue // the cluster says that it has none of a pool, or nothing does that it has one
		}
		if pod.Name == "" {
			pod = s.sandboxes[b.Attachment.ContainerID].Pod
		}
		of := know(uid)
		if of.text == "" && b.foreign && !slices.Contains(of.bare, b.Addr) {
			of.bare = append(of.bare, b.Addr)
		}
		if of.name == "" {
			of.namespace, of.name = pod.Namespace, pod.Name
		}
	}
	return blind
}

// sweeps removes old bars.
func (k *Keeper) sweeps(ctx context.Context) {
	for wait := time.Duration(0); wake.Pause(ctx, wait); wait = sweepEvery {
		for !k.isListed() {
			if !wake.Pause(ctx, time.Second) {
				return
			}
		}
		k.note("bars", ledger.SweepBars(k.o.Ledgers, func(uid string) bool {
			k.mu.Lock()
			defer k.mu.Unlock()
			return k.subjects[uid] != nil
		}))
	}
}

func (k *Keeper) isListed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.listed
}
