package podip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/mailbox"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/pool"
)

const (
	// workers is how many pods are checked at a time. Most of them wait for the same look at the machine.
	workers = 64
	// A pod that is not settled is due again: after retryFirst, then ever later; a pod that waits for another program
	// every waitAgain.
	retryFirst, retryLast = 50 * time.Millisecond, 15 * time.Second
	waitAgain             = 15 * time.Second
	// runsAgain is for a pod whose sandbox is to end, should the runtime's word not come: NRI may be off.
	runsAgain = 2 * time.Second
)

// verdict is when a pod is due again.
type verdict int

const (
	settled verdict = iota // when something of it changes
	later                  // in a while: it waits for another program
	soon                   // something is under way
	running                // its sandbox is to end, and the runtime says once it does
)

// checker checks pods that are due, several at a time: what the cluster is to know of them, and what is to be done. It
// has no lock: it has no state.
type checker struct {
	node     string
	api      api
	ledgers  ledger.Options
	log      *slog.Logger
	runtime  Runtime
	serves   func() bool // as Options.Serves
	pods     *podTable
	follower *follower
	machine  *machine
	router   *router
	troubles *troubles
}

// run checks pods until ctx is done and the queue was shut down.
func (k *checker) run(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string]) {
	for k.work(ctx, queue) {
	}
}

// work checks one pod, and returns false once there will be no more.
func (k *checker) work(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string]) bool {
	uid, shutdown := queue.Get()
	if shutdown {
		return false
	}
	defer queue.Done(uid)
	v, err := k.check(ctx, uid)
	if ctx.Err() != nil {
		return true
	}
	k.troubles.note("pod "+uid, err)
	switch {
	case err != nil || v == soon:
		queue.AddRateLimited(uid)
	case v == later:
		queue.Forget(uid)
		queue.AddAfter(uid, waitAgain)
	case v == running:
		queue.Forget(uid)
		queue.AddAfter(uid, runsAgain)
	default:
		queue.Forget(uid)
	}
	return true
}

// errNotGiven is about what an annotation claims, and nothing vouches for.
var errNotGiven = errors.New("the cluster has not assigned these addresses to the pod")

// check does what is to be done about a pod now.
func (k *checker) check(ctx context.Context, uid string) (verdict, error) {
	// 1. Which addresses it has.
	pod, ok := k.pods.due(uid)
	if !ok {
		return settled, nil
	}
	if pod.gone {
		return k.finish(&pod)
	}
	ended := false
	if pod.claimed != "" || pod.unconfirmed {
		var confirmed bool
		var err error
		switch confirmed, ended, err = k.confirm(ctx, &pod); {
		case err != nil:
			return soon, err
		case !confirmed && pod.text == "" && pod.observed == nil && pod.alive():
			k.pods.complain(uid, fmt.Errorf("annotation %s of pod %s: %w: %.256q", v1alpha1.AnnotationAddresses, &pod,
				errNotGiven, pod.claimed))
			return later, nil
		}
	}
	addrs, err := pod.addrs()
	if err == nil {
		err = mailbox.ValidPodUID(uid)
	}
	if err != nil { // the plugin refuses such a pod
		k.pods.complain(uid, err)
		return k.finish(&pod)
	}

	// 2. Whether it is here.
	barred, err := k.ledgers.Mailbox().Barred(uid)
	if err != nil {
		return soon, err
	}
	p, err := k.machine.find(ctx, pod.sought(addrs), false)
	// Namespaces are looked into once nothing else knows of the pod, and it is barred: what is seen before proves nothing.
	looked := err == nil && !pod.alive() && !p.netns() && barred
	if looked {
		p, err = k.machine.find(ctx, pod.sought(addrs), true)
	}
	if err != nil {
		return soon, err
	}
	if pod.alive() && !barred {
		if v, err := k.refuse(ctx, &pod, addrs, p); err != nil || v != settled {
			return v, err
		}
	}

	// 3. Whether the cluster knows it all.
	if pod.alive() && !p.netns() && !barred && !ended && pod.conflicts == nil && (pod.placed || !k.router.routesTo(&pod)) {
		return later, nil // it has not started
	}
	if p.netns() && pod.conflicts != nil {
		pod.conflicts = nil
		k.pods.started(uid)
	}
	if pod.bound && pod.exists && p.netns() {
		if pod.alive() {
			return settled, nil
		}
		return pod.ends(p), pod.stray(p)
	}

	// 4. What is to be done about each address.
	c := &podCheck{checker: k, pod: pod, addrs: addrs, barred: barred, p: p, ended: !pod.alive(), looked: looked}
	for _, a := range addrs {
		if v, err := c.address(ctx, a); err != nil || v == soon {
			return soon, err
		}
	}
	if c.ended && !c.p.netns() {
		if _, err := c.isThere(ctx); err != nil {
			return soon, err
		}
	}
	return c.conclude()
}

// finish is the end of a pod about which nothing is left to do.
func (k *checker) finish(pod *record) (verdict, error) {
	if pod.exists {
		return settled, nil
	}
	return settled, k.follower.forget(pod.uid)
}

// confirm finds out whether the cluster has given a pod the addresses that its annotation claims, and if so, tells the
// plugin. Once the pod has ended that is for the agent alone: a PodIP that says so outlives the bar of a pod on this
// node's disk.
func (k *checker) confirm(ctx context.Context, pod *record) (confirmed, ended bool, err error) {
	text := cmp.Or(pod.claimed, pod.text)
	claimed, err := addressesOf(text)
	if err != nil || len(claimed) == 0 {
		return false, false, nil // the plugin refuses it
	}
	for _, a := range claimed {
		if !a.Prefix.IsValid() {
			return false, false, nil
		}
		o, err := k.api.PodIP(ctx, a.Prefix.Addr())
		if err != nil {
			return false, false, err
		}
		switch {
		case o == nil && pod.claimed == "": // a backup lacks it, and the controller makes it again
			continue
		case o == nil || o.Spec.PodUID != pod.uid:
			return false, false, nil
		}
		ended = ended || o.Status.PodUID == pod.uid && o.Status.Phase == v1alpha1.PodIPRetained
	}
	confirmed, err = k.follower.confirm(pod, text, ended)
	return confirmed, ended, err
}

// refuse tells the runtime to stop sandboxes of a pod that have been started without the plugin, as on a node whose
// network was there before its agent: they have another address than the pod was given, and kubelet makes them again.
// While kubelet would make such a sandbox again, nothing is reported of the pod.
func (k *checker) refuse(ctx context.Context, pod *record, addrs []netip.Addr, p presence) (verdict, error) {
	strangers := p.strangers(addrs)
	switch {
	case len(strangers) == 0 && len(p.entries) > 0 && !p.has("", addrs):
		// One was taken over since the runtime was asked, or the ADD of another network came first, or its last sandbox
		// has ended before its DEL.
		return soon, nil
	case len(strangers) == 0:
		return settled, nil
	}
	deep, err := k.machine.find(ctx, pod.sought(addrs), true)
	if err != nil {
		return soon, err
	}
	if slices.ContainsFunc(deep.spaces, func(u *hostnet.Space) bool { return u.Err != nil }) {
		return later, nil // it may have the address
	}
	if len(deep.spaces) > 0 { // it has the address: it is the ledger that has lost it
		return settled, nil
	}
	if strangers = deep.strangers(addrs); len(strangers) == 0 {
		return soon, nil
	}
	if k.serves != nil && !k.serves() {
		return later, nil
	}
	var errs []error
	for _, id := range strangers {
		k.log.Warn("Stopped sandbox: pod address not assigned, the node's network did not use Stayput yet",
			"pod", pod.String(), "addrs", addrs, "sandbox", id)
		errs = append(errs, k.runtime.Stop(ctx, id))
	}
	return soon, errors.Join(errs...)
}

// ends is the verdict on a pod that has ended and is still there.
func (r *record) ends(p presence) verdict {
	if len(p.sandboxes) > 0 && !r.stops {
		return running
	}
	return soon
}

// podCheck is one look at a pod and its addresses.
type podCheck struct {
	*checker
	pod    record
	addrs  []netip.Addr
	p      presence
	barred bool
	ended  bool // kubelet will not start the pod again
	took   bool // its interfaces were taken down
	looked bool // into all namespaces, after it was barred if it had to be
	bound  int  // addresses that the cluster knows to be bound
	name   string
}

// conclude records what was done, once nothing of it failed.
func (c *podCheck) conclude() (verdict, error) {
	pod := &c.pod
	switch {
	case c.p.netns() && c.took:
		return soon, nil
	case c.p.netns() && c.ended:
		return pod.ends(c.p), pod.stray(c.p)
	case c.p.netns() && c.bound == len(c.addrs):
		pod.bound = true
		pod.netns = nil
		for _, b := range c.p.entries {
			pod.netns = append(pod.netns, b.Netns)
		}
		c.pods.settle(*pod)
		return settled, nil
	case c.p.netns():
		return later, nil
	case !c.ended:
		pod.placed = c.router.routesTo(pod)
		c.pods.settle(*pod)
		return later, nil
	}
	pod.gone = true
	c.pods.settle(*pod)
	return c.finish(pod)
}

// address does what is to be done about one address of the pod. The PodIP that this agent wrote last will do if a
// report comes of it, which is bound to its version; a pod that has ended is barred before its report, whatever its
// PodIP says. Otherwise the PodIP is read past all caches.
func (c *podCheck) address(ctx context.Context, a netip.Addr) (verdict, error) {
	var l pool.Local
	var action pool.Action
	var err error
	o := c.pod.written[a]
	if o != nil && (c.pod.exists || !c.p.netns()) { // if not, it may have to be taken down
		if l, action, err = c.decide(ctx, a, o); err != nil {
			return soon, err
		}
	}
	if action.Report == "" || action.Down {
		if o, err = c.api.PodIP(ctx, a); err != nil {
			return soon, err
		}
		if l, action, err = c.decide(ctx, a, o); err != nil {
			return soon, err
		}
	}
	said := 1
	if o != nil && o.Spec.Mode == v1alpha1.ModeRouted && !l.PodCIDR.IsValid() {
		said = 0 // how other nodes route to it is still to be said
	}
	if action.Down && !c.took && c.name != "" && (o != nil || c.pod.text != "") { // the owner of any other is unknown
		if err := c.takeDown(ctx); err != nil {
			return soon, err
		}
	}
	if action.Bar && !c.barred {
		has, err := ledger.Bar(c.ledgers, c.pod.uid, c.addrs...)
		if err != nil {
			return soon, err
		}
		c.barred = true
		c.log.Info("Barred pod: it has ended", "pod", c.pod.String())
		if there, err := c.any(has); err != nil || there {
			return soon, err
		}
	}
	switch action.Report {
	case "":
		if l.IP != nil && l.IP.PodUID == l.UID && l.IP.StatusUID == l.UID && l.IP.Node == l.Node && l.IP.Phase == pool.Bound {
			c.bound += said
		}
		return settled, nil
	case pool.Retained:
		if there, err := c.isThere(ctx); err != nil || there {
			return soon, err
		}
	case pool.Bound:
		c.bound += said
	}
	return c.report(ctx, a, o, action.Report, l)
}

// decide finds out what else the decision about an address depends on, and makes it. o is its PodIP, nil if there is
// none.
func (c *podCheck) decide(ctx context.Context, a netip.Addr, o *v1alpha1.PodIP) (
	l pool.Local, action pool.Action, err error) {
	l = pool.Local{
		UID: pool.UID(c.pod.uid), Node: c.node, Exists: c.pod.exists, Ending: c.pod.ending, Terminal: c.pod.terminal,
		Netns: c.p.netns(), Barred: c.barred, Conflict: c.pod.conflicts[a],
	}
	if o != nil {
		ip, err := pool.PodIPOf(o, 0)
		if err != nil {
			return l, action, err
		}
		l.IP = &ip
	}
	if o != nil && o.Spec.Mode == v1alpha1.ModeRouted {
		l.PodCIDR = c.router.podCIDR(a.Is4())
	}
	if l.LookUp() {
		if err := c.lookUp(ctx, &l, o); err != nil {
			return l, action, err
		}
	}
	if l.LookUpNode() {
		if l.Off, err = c.api.Off(ctx); err != nil {
			return l, action, err
		}
	}
	return l, pool.NextAction(l), nil
}

// lookUp reads the pod past all caches. If the watch is behind, what was read counts.
func (c *podCheck) lookUp(ctx context.Context, l *pool.Local, o *v1alpha1.PodIP) error {
	namespace, name := c.pod.namespace, c.pod.name
	if name == "" && o != nil && o.Spec.PodUID == c.pod.uid {
		namespace, name = o.Spec.Namespace, o.Spec.PodName
	}
	if c.name = name; name == "" {
		return nil
	}
	p, err := c.api.Pod(ctx, namespace, name)
	if err != nil {
		return err
	}
	if p == nil || string(p.UID) != c.pod.uid {
		return nil
	}
	l.Here, l.Elsewhere = p.Spec.NodeName == c.node, p.Spec.NodeName != c.node
	if l.Here && !l.Exists {
		l.Exists, l.Ending, l.Terminal = true, p.DeletionTimestamp != nil, p.terminal()
		c.ended = l.Ending || l.Terminal
	}
	return nil
}

// any reports whether one of these addresses may be there.
func (c *podCheck) any(has []ledger.Address) (bool, error) {
	now, err := c.ledgers.Clock.Now()
	if err != nil {
		return false, err
	}
	for _, a := range has {
		if there, err := c.machine.there(a, now.BootID); err != nil || there {
			return there, err
		}
	}
	return false, nil
}

// isThere reports whether the pod is on the machine, now that it is barred.
func (c *podCheck) isThere(ctx context.Context) (bool, error) {
	if !c.looked {
		p, err := c.machine.find(ctx, c.pod.sought(c.addrs), true)
		if err != nil {
			return false, err
		}
		c.p, c.looked = p, true
	}
	return c.p.netns(), nil
}

// takeDown takes the interfaces down of the network namespaces that are surely the pod's: by the runtime, or by a
// ledger that recorded them. Then it tells the runtime to stop the pod's sandboxes. A namespace that only has the
// address may belong to any program, and is left alone.
func (c *podCheck) takeDown(ctx context.Context) error {
	var errs []error
	var own []ledger.Netns
	for _, id := range slices.Concat(c.p.sandboxes, c.p.ended) {
		path, err := c.runtime.Netns(ctx, id)
		if err != nil {
			errs = append(errs, err)
		} else if path != "" {
			own = append(own, ledger.Netns{Path: path})
		}
	}
	for _, b := range c.p.entries {
		if b.Pod.UID == c.pod.uid && b.Netns.Ino != 0 {
			own = append(own, b.Netns)
		}
	}
	for _, ns := range own {
		switch err := c.machine.down(ns); {
		case err == nil:
			c.took = true
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, err)
		}
	}
	for _, id := range c.p.sandboxes {
		if err := c.runtime.Stop(ctx, id); err != nil {
			errs = append(errs, err)
		}
		c.took = true
	}
	if c.took {
		c.log.Warn("Stopped pod: the cluster no longer has it on this node", "pod", c.pod.String(),
			"addrs", c.addrs, "sandboxes", c.p.sandboxes)
	}
	return errors.Join(errs...)
}

// strayAfter is how long a runtime may take to end a namespace that it no longer reports.
const strayAfter = time.Minute

// stray returns what keeps a pod that has ended from being gone, if that ends with nothing that the runtime or a ledger
// knows.
func (r *record) stray(p presence) error {
	if r.ended.IsZero() || time.Since(r.ended) < strayAfter || len(p.sandboxes)+len(p.entries) > 0 || len(p.spaces) == 0 {
		return nil
	}
	u := p.spaces[0]
	if u.Err != nil {
		return fmt.Errorf("pod %s has ended but may still have its addresses: %w", r, u.Err)
	}
	return fmt.Errorf("pod %s has ended, but its address is still configured in network namespace %s, whose owner is "+
		"unknown to the runtime and the node's records: remove the namespace by hand", r, u.Path)
}
