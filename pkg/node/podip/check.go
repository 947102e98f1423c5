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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
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
	grants   grants.Dir
	log      *slog.Logger
	runtime  Runtime
	serves   func() bool // as Options.Serves
	pods     *podTable
	reporter *reporter
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

// errNotGiven is about what an annotation says, and the PodIPs do not.
var errNotGiven = errors.New("the cluster has not assigned these addresses to the pod")

// noAddresses is the grant of a pod that had its addresses before a pool had them: a sandbox of it gets others.
const noAddresses = "[]"

// check does what is to be done about a pod now.
func (k *checker) check(ctx context.Context, uid string) (verdict, error) {
	// 1. Which addresses it has.
	pod, ok := k.pods.due(uid)
	if !ok {
		return settled, nil
	}
	c := &podCheck{checker: k, pod: pod}
	if pod.gone {
		return c.finish()
	}
	if err := grants.ValidPodUID(uid); err != nil { // the plugin refuses such a pod
		k.pods.complain(uid, err)
		return c.finish()
	}
	var err error
	if c.granted, err = k.grants.Granted(uid); err != nil {
		return soon, err
	}
	if c.granted != "" && c.granted != noAddresses {
		c.pod.text = c.granted
	}
	if c.addrs, err = c.pod.addrs(); err != nil {
		k.pods.complain(uid, err)
		return c.finish()
	}

	// 2. Whether it is here.
	if err := c.find(ctx); err != nil {
		return soon, err
	}
	if pod.alive() && c.granted != "" {
		if v, err := c.refuse(ctx); err != nil || v != settled {
			return v, err
		}
		if c.p.netns() && pod.conflicts != nil {
			k.pods.started(uid)
			c.pod.conflicts = nil
		}
		if pod.granted && pod.conflicts == nil {
			return c.keep()
		}
	}

	if !pod.alive() && pod.granted && pod.exists && c.granted != "" && c.p.netns() {
		return pod.ends(c.p), pod.stray(c.p)
	}

	// 3. What the cluster says. It is good for a few seconds.
	c.doubt, c.begun = k.reporter.doubt()
	reading, cancel := context.WithTimeout(ctx, pool.ReadFor)
	defer cancel()
	if err := c.read(reading); err != nil {
		return soon, err
	}

	// 4. What is to be done, in this order.
	if v, err := c.act(reading); err != nil || v == soon {
		return soon, err
	}
	return c.conclude(ctx)
}

// podCheck is one look at a pod and its addresses.
type podCheck struct {
	*checker
	pod     record
	granted string // what the pod is granted, empty if nothing
	addrs   []netip.Addr
	p       presence
	looked  bool // into all namespaces, since nothing is granted
	doubt   pool.Doubt
	begun   int // how many reports were begun before the PodIPs were read
	found   *Pod
	sought  bool // found was read past all caches
	off     *bool
	ips     map[netip.Addr]*v1alpha1.PodIP
	locals  map[netip.Addr]pool.Local
	actions map[netip.Addr]pool.Action
	took    bool // its interfaces were taken down
}

// finish is the end of a pod about which nothing is left to do.
func (c *podCheck) finish() (verdict, error) {
	if !c.pod.exists {
		c.pods.remove(c.pod.uid)
	}
	return settled, nil
}

// keep is the verdict on a pod that has its grant.
func (c *podCheck) keep() (verdict, error) {
	if c.p.netns() {
		c.pod.netns = nil
		for _, b := range c.p.entries {
			c.pod.netns = append(c.pod.netns, b.Netns)
		}
	}
	c.pod.granted = true
	c.pods.settle(c.pod)
	return settled, nil
}

// find finds the pod on the machine. Namespaces are looked into once nothing else knows of a pod that has ended, and it
// has no grant: what is seen before proves nothing.
func (c *podCheck) find(ctx context.Context) (err error) {
	c.p, err = c.machine.find(ctx, c.pod.sought(c.addrs), false)
	if err == nil && !c.pod.alive() && !c.p.netns() && c.granted == "" {
		_, err = c.isThere(ctx)
	}
	return err
}

// read reads the PodIPs past all caches, and what else the decisions depend on, and makes them.
func (c *podCheck) read(ctx context.Context) (err error) {
	c.ips, c.locals = map[netip.Addr]*v1alpha1.PodIP{}, map[netip.Addr]pool.Local{}
	c.actions = map[netip.Addr]pool.Action{}
	given, err := c.pod.given()
	if err != nil {
		return err
	}
	for _, a := range c.addrs {
		if c.ips[a], err = c.api.PodIP(ctx, a); err != nil {
			return err
		}
		l, err := c.local(ctx, a, c.ips[a])
		if err != nil {
			return err
		}
		said := slices.ContainsFunc(given, func(g pool.Address) bool { return g.Prefix.Addr() == a })
		l.Found = !said
		c.locals[a], c.actions[a] = l, pool.NextAction(l)
	}
	return nil
}

// local is what is known of an address of the pod. o is its PodIP, nil if there is none.
func (c *podCheck) local(ctx context.Context, a netip.Addr, o *v1alpha1.PodIP) (l pool.Local, err error) {
	l = pool.Local{
		UID: pool.UID(c.pod.uid), Node: c.node, Exists: c.pod.exists, Ending: c.pod.ending, Terminal: c.pod.terminal,
		Ended: c.pods.hasEnded(c.pod.uid), Doubt: c.doubt, Granted: c.granted != "", Netns: c.p.netns(),
		Conflict: c.pod.conflicts[a],
	}
	if o != nil {
		ip, err := pool.PodIPOf(o, 0)
		if err != nil {
			return l, err
		}
		l.IP = &ip
		if o.Spec.Mode == v1alpha1.ModeRouted {
			l.PodCIDR = c.router.podCIDR(a.Is4())
		}
	}
	if l.LookUp() {
		if err := c.lookUp(ctx, &l, o); err != nil {
			return l, err
		}
	}
	if l.LookUpNode() {
		if c.off == nil {
			off, err := c.api.Off(ctx)
			if err != nil {
				return l, err
			}
			c.off = &off
		}
		l.Off = *c.off
	}
	return l, nil
}

// lookUp reads the pod past all caches. If the watch is behind, what was read counts.
func (c *podCheck) lookUp(ctx context.Context, l *pool.Local, o *v1alpha1.PodIP) (err error) {
	if o != nil && o.Spec.PodUID == c.pod.uid {
		c.pod.learnName(o.Spec.Namespace, o.Spec.PodName)
	}
	if c.pod.name == "" {
		return nil
	}
	if !c.sought {
		if c.found, err = c.api.Pod(ctx, c.pod.namespace, c.pod.name); err != nil {
			return err
		}
		c.sought = true
	}
	if p := c.found; p != nil && string(p.UID) == c.pod.uid {
		l.Here, l.Elsewhere = p.Spec.NodeName == c.node, p.Spec.NodeName != c.node
		if l.Here && !l.Exists {
			l.Exists, l.Ending, l.Terminal = true, p.DeletionTimestamp != nil, p.terminal()
		}
	}
	return nil
}

// any reports whether something is to be done about one of the addresses.
func (c *podCheck) any(what func(pool.Action) bool) bool {
	for _, action := range c.actions {
		if what(action) {
			return true
		}
	}
	return false
}

// act does what is to be done: each before the next. soon says to look again.
func (c *podCheck) act(ctx context.Context) (verdict, error) {
	down := c.any(func(a pool.Action) bool { return a.Down })
	if c.any(func(a pool.Action) bool { return a.Revoke }) || down {
		there, err := c.revoke()
		switch {
		case err != nil || there && !down:
			return soon, err
		case c.any(func(a pool.Action) bool { return a.Grant }):
			return soon, nil // it needs a write for each of its addresses now
		}
	}
	if down && c.pod.name != "" { // the owner of any other is unknown
		if err := c.takeDown(ctx); err != nil || c.took {
			return soon, err
		}
		return settled, nil
	}
	if c.any(func(a pool.Action) bool { return a.Grant }) {
		return c.grant(ctx)
	}
	for _, a := range c.addrs {
		phase := c.actions[a].Report
		if phase == "" {
			continue
		}
		if phase == pool.Retained {
			c.pods.noteEnded(c.pod.uid)
			if there, err := c.isThere(ctx); err != nil || there {
				return soon, err
			}
		}
		if err := c.report(ctx, a, phase); err != nil {
			return soon, conflict(err)
		}
	}
	return settled, nil
}

// conflict is the error of a write, unless the object has changed since it was read.
func conflict(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// revoke ends the pod's grant. It reports whether an ADD has succeeded by then of which the look at the machine does
// not know.
func (c *podCheck) revoke() (there bool, err error) {
	has, err := ledger.Revoke(c.ledgers, c.pod.uid, c.addrs...)
	if err != nil {
		return false, err
	}
	if c.granted != "" {
		c.log.Info("Revoked the grant of a pod", "pod", c.pod.String(), "addrs", c.addrs)
		c.granted, c.looked = "", false
	}
	now, err := c.ledgers.Clock.Now()
	if err != nil || c.p.netns() {
		return false, err
	}
	for _, a := range has {
		if there, err := c.machine.there(a, now.BootID); err != nil || there {
			return there, err
		}
	}
	return false, nil
}

// grant grants the pod its addresses, if it may have all of them: a pending grant, the writes, the grant.
func (c *podCheck) grant(ctx context.Context) (verdict, error) {
	for _, a := range c.addrs {
		if !c.actions[a].Grant {
			return settled, nil
		}
	}
	given, err := c.pod.given()
	if err != nil {
		return soon, err
	}
	for _, a := range given {
		if c.ips[a.Prefix.Addr()].Spec.Mode != a.Mode {
			return settled, nil
		}
	}
	pending, err := c.grants.Begin(c.pod.uid, cmp.Or(c.pod.text, noAddresses))
	if err != nil {
		return soon, err
	}
	if doubt, begun := c.reporter.doubt(); doubt != pool.Sure || begun != c.begun {
		pending.Cancel()
		return soon, nil
	}
	for _, a := range c.addrs {
		if err := c.report(ctx, a, pool.Bound); err != nil {
			pending.Cancel()
			return soon, conflict(err)
		}
	}
	switch err := pending.Finish(); {
	case errors.Is(err, grants.ErrRevoked):
		return soon, nil
	case err != nil:
		return soon, err
	}
	c.granted = cmp.Or(c.pod.text, noAddresses)
	if c.p.netns() {
		return soon, nil // what runs may have been started without the plugin
	}
	return settled, nil
}

// conclude records what was done, once nothing of it failed.
func (c *podCheck) conclude(ctx context.Context) (verdict, error) {
	pod := &c.pod
	switch {
	case pod.alive() && c.granted != "":
		return c.keep()
	case pod.alive():
		c.pods.complain(pod.uid, c.whyNot())
		return later, nil
	case c.p.netns():
		return pod.ends(c.p), pod.stray(c.p)
	}
	if there, err := c.isThere(ctx); err != nil || there {
		return soon, err
	}
	pod.gone = true
	c.pods.settle(*pod)
	return c.finish()
}

// whyNot is why a pod that is to start is granted nothing.
func (c *podCheck) whyNot() error {
	switch {
	case c.doubt != pool.Sure:
		return fmt.Errorf("pod %s waits until the API server's data are known not to be older than what this node has seen: "+
			"see PodIPAudit %s", &c.pod, v1alpha1.PodIPAuditName)
	case c.off != nil && *c.off:
		return fmt.Errorf("pod %s waits until its node is not declared out of service any more", &c.pod)
	}
	return fmt.Errorf("annotation %s of pod %s: %w: %.256q", v1alpha1.AnnotationAddresses, &c.pod, errNotGiven, c.pod.text)
}

// refuse tells the runtime to stop sandboxes of a pod that have been started without the plugin, as on a node whose
// network was there before its agent: they have another address than the pod was given, and kubelet makes them again.
func (c *podCheck) refuse(ctx context.Context) (verdict, error) {
	k, pod, addrs, p := c.checker, &c.pod, c.addrs, c.p
	if c.granted == noAddresses {
		return settled, nil
	}
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

// isThere reports whether the pod is on the machine, now that nothing is granted.
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
	c.pods.setForeign(c.pod.uid, true)
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
