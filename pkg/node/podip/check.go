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
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/pool"
)

const (
	workers = 8
	// A subject that is not settled is due again: after retryFirst, then ever later; one that waits for somebody
	// else every waitAgain.
	retryFirst, retryLast = 50 * time.Millisecond, 15 * time.Second
	waitAgain             = 15 * time.Second
	// runsAgain is for a pod whose sandbox is to end, should the runtime's word not come: NRI may be off.
	runsAgain = 2 * time.Second
)

// verdict is when a subject is due again.
type verdict int

const (
	settled verdict = iota // when something of it changes
	later                  // in a while: it waits for somebody
	soon                   // something is under way
	running                // its sandbox is to end, and the runtime says once it does
)

// checker checks pods that are due, several at a time: what the cluster is to know of them, and what is to be done. It has
// no lock: it has no state.
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

// work looks at one subject, and returns false once there will be no more.
func (k *checker) work(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string]) bool {
	uid, shutdown := queue.Get()
	if shutdown {
		return false
	}
	defer queue.Done(uid)
	v, err := k.tend(ctx, uid)
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

// tend does what is to be done about a pod now.
func (k *checker) tend(ctx context.Context, uid string) (verdict, error) {
	s, ok := k.pods.due(uid)
	if !ok {
		return settled, nil
	}
	if s.gone {
		if s.exists {
			return settled, nil
		}
		return settled, k.follower.forget(uid)
	}
	if s.claims != "" || s.untold {
		switch confirmed, err := k.confirm(ctx, &s); {
		case err != nil:
			return soon, err
		case !confirmed && s.text == "" && s.bare == nil && s.alive():
			k.pods.complain(uid, fmt.Errorf("annotation %s of pod %s: the cluster has not given these addresses to the pod: %.256q",
				v1alpha1.AnnotationAddresses, &s, s.claims))
			return later, nil
		}
	}
	addrs, err := s.addrs()
	if err == nil {
		err = ledger.ValidPodUID(uid)
	}
	if err != nil { // the plugin refuses such a pod
		k.pods.complain(uid, err)
		if !s.exists {
			return settled, k.follower.forget(uid)
		}
		return settled, nil
	}
	barred, err := ledger.Barred(k.ledgers, uid)
	if err != nil {
		return soon, err
	}
	p, err := k.machine.find(ctx, uid, addrs, false)
	if err == nil && !s.alive() && !p.netns() { // namespaces are looked into once nobody else knows of the pod
		p, err = k.machine.find(ctx, uid, addrs, true)
	}
	if err != nil {
		return soon, err
	}
	if s.alive() && !barred {
		if v, err := k.refuse(ctx, &s, addrs, p); err != nil || v != settled {
			return v, err
		}
	}
	if s.alive() && !p.netns() && !barred && s.conflicts == nil && (s.placed || !k.router.routesTo(&s)) {
		return later, nil // it has not started
	}
	if p.netns() && s.conflicts != nil {
		s.conflicts = nil
		k.pods.started(uid)
	}
	if s.bound && s.exists && p.netns() { // nothing is to be said that the cluster does not know
		if s.alive() {
			return settled, nil
		}
		return s.ends(p), s.stray(p)
	}
	c := &care{checker: k, s: s, addrs: addrs, barred: barred, p: p, ended: !s.alive()}
	for _, a := range addrs {
		if v, err := c.address(ctx, a); err != nil || v == soon {
			return soon, err
		}
	}
	switch {
	case c.p.netns() && c.took:
		return soon, nil
	case c.p.netns() && c.ended:
		return s.ends(c.p), s.stray(c.p)
	case c.p.netns() && c.bound == len(addrs):
		s.bound = true
		k.pods.settle(s)
		return settled, nil
	case c.p.netns():
		return later, nil
	case !c.ended:
		s.placed = k.router.routesTo(&s)
		k.pods.settle(s)
		return later, nil
	}
	s.gone = true
	k.pods.settle(s)
	if s.exists {
		return settled, nil
	}
	return settled, k.follower.forget(uid)
}

// confirm finds out whether the cluster has given a pod the addresses that its annotation claims, and if so, tells the
// plugin. Once the pod has ended that is for the agent alone: a PodIP that says so outlives the bar of a pod on this
// node's disk.
func (k *checker) confirm(ctx context.Context, s *subject) (bool, error) {
	text := cmp.Or(s.claims, s.text)
	claimed, err := addressesOf(text)
	if err != nil || len(claimed) == 0 {
		return false, nil // the plugin refuses it
	}
	ended := false
	for _, a := range claimed {
		if !a.Prefix.IsValid() {
			return false, nil
		}
		o, err := k.api.PodIP(ctx, a.Prefix.Addr())
		if err != nil {
			return false, err
		}
		switch {
		case o == nil && s.claims == "": // a backup lacks it, and the controller makes it again
			continue
		case o == nil || o.Spec.PodUID != s.uid:
			return false, nil
		}
		ended = ended || o.Status.PodUID == s.uid && o.Status.Phase == v1alpha1.PodIPRetained
	}
	return k.follower.confirm(s, text, ended)
}

// refuse has the runtime stop sandboxes of a pod that have been started without the plugin, as on a node whose network
// was there before its agent: they have another address than the pod was given, and kubelet makes them again. While it
// would make such a one again, nothing is said of the pod.
func (k *checker) refuse(ctx context.Context, s *subject, addrs []netip.Addr, p presence) (verdict, error) {
	strangers := p.strangers(addrs)
	if len(strangers) == 0 {
		return settled, nil
	}
	deep, err := k.machine.find(ctx, s.uid, addrs, true)
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
		k.log.Warn("Stopped a sandbox that has not got the address of its pod: the node's network was not Stayput's yet",
			"pod", s.String(), "addrs", addrs, "sandbox", id)
		errs = append(errs, k.runtime.Stop(ctx, id))
	}
	return soon, errors.Join(errs...)
}

// ends is the verdict on a pod that has ended and is still there.
func (s *subject) ends(p presence) verdict {
	if len(p.sandboxes) > 0 && !s.stops {
		return running
	}
	return soon
}

// care is one look at a pod and its addresses.
type care struct {
	*checker
	s      subject
	addrs  []netip.Addr
	p      presence
	barred bool
	ended  bool // nobody starts the pod again
	took   bool // its interfaces were taken down
	proved bool // that it is nowhere, after it was barred
	bound  int  // addresses that the cluster knows to be bound
	name   string
}

// address does what is to be done about one address of the pod.
func (c *care) address(ctx context.Context, a netip.Addr) (verdict, error) {
	o, err := c.api.PodIP(ctx, a)
	if err != nil {
		return soon, err
	}
	l := pool.Local{
		UID: pool.UID(c.s.uid), Node: c.node, Exists: c.s.exists, Ending: c.s.ending, Over: c.s.over,
		Netns: c.p.netns(), Barred: c.barred, Conflict: c.s.conflicts[a], IP: ipOf(a, o),
	}
	if o != nil && o.Spec.Mode == v1alpha1.ModeRouted {
		l.PodCIDR = c.router.podCIDR(a.Is4())
	}
	if l.LookUp() {
		if err := c.lookUp(ctx, &l, o); err != nil {
			return soon, err
		}
	}
	if l.LookUpNode() {
		if l.Off, err = c.api.Off(ctx); err != nil {
			return soon, err
		}
	}
	said := 1
	if o != nil && o.Spec.Mode == v1alpha1.ModeRouted && !l.PodCIDR.IsValid() {
		said = 0 // how other nodes route to it is still to be said
	}
	deed := pool.Tend(l)
	if deed.Down && !c.took && c.name != "" && (o != nil || c.s.text != "") { // of none else it is known whose it is
		if err := c.takeDown(ctx); err != nil {
			return soon, err
		}
	}
	if deed.Bar && !c.barred {
		has, err := ledger.Bar(c.ledgers, c.s.uid, c.addrs...)
		if err != nil {
			return soon, err
		}
		c.barred = true
		c.log.Info("Barred a pod that has ended", "pod", c.s.String())
		if there, err := c.any(has); err != nil || there {
			return soon, err
		}
	}
	switch deed.Report {
	case "":
		if l.IP != nil && l.IP.PodUID == l.UID && l.IP.Of == l.UID && l.IP.Node == l.Node && l.IP.Phase == pool.Bound {
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
	return c.report(ctx, o, deed.Report, l)
}

// lookUp reads the pod past all caches. If the watch is behind, what was read counts.
func (c *care) lookUp(ctx context.Context, l *pool.Local, o *v1alpha1.PodIP) error {
	namespace, name := c.s.namespace, c.s.name
	if name == "" && o != nil && o.Spec.PodUID == c.s.uid {
		namespace, name = o.Spec.Namespace, o.Spec.PodName
	}
	if c.name = name; name == "" {
		return nil
	}
	p, err := c.api.Pod(ctx, namespace, name)
	if err != nil {
		return err
	}
	if p == nil || string(p.UID) != c.s.uid {
		return nil
	}
	l.Here, l.Elsewhere = p.Spec.NodeName == c.node, p.Spec.NodeName != c.node
	if l.Here && !l.Exists {
		l.Exists, l.Ending, l.Over = true, p.DeletionTimestamp != nil, p.over()
		c.ended = l.Ending || l.Over
	}
	return nil
}

// any reports whether one of these addresses may be there.
func (c *care) any(has []ledger.Address) (bool, error) {
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
func (c *care) isThere(ctx context.Context) (bool, error) {
	if c.proved {
		return false, nil
	}
	p, err := c.machine.find(ctx, c.s.uid, c.addrs, true)
	if err != nil {
		return false, err
	}
	c.proved = !p.netns()
	return p.netns(), nil
}

// takeDown takes the interfaces down of the network namespaces that are surely the pod's: by the runtime, or by a
// ledger that recorded them. Then it has the runtime stop the pod's sandboxes. A namespace that only has the address
// may be anybody's, and is left alone.
func (c *care) takeDown(ctx context.Context) error {
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
		if b.Pod.UID == c.s.uid && b.Netns.Ino != 0 {
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
		c.log.Warn("Took a pod down that the cluster does not have here any more", "pod", c.s.String(),
			"addrs", c.addrs, "sandboxes", c.p.sandboxes)
	}
	return errors.Join(errs...)
}

// strayAfter is how long a runtime may take to end a namespace of which it says nothing any more.
const strayAfter = time.Minute

// stray returns what keeps a pod that has ended from being gone, if that ends with nothing that the runtime or a ledger
// knows.
func (s *subject) stray(p presence) error {
	if s.ended.IsZero() || time.Since(s.ended) < strayAfter || len(p.sandboxes)+len(p.entries) > 0 || len(p.spaces) == 0 {
		return nil
	}
	u := p.spaces[0]
	if u.Err != nil {
		return fmt.Errorf("pod %s has ended, and may still have its addresses: %w", s, u.Err)
	}
	return fmt.Errorf("pod %s has ended, and an address of it is configured in network namespace %s, of which neither "+
		"the runtime nor the node's records say whose it is: end it by hand", s, u.Path)
}
