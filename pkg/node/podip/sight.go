package podip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/hostnet"
	"github.com/stayput/stayput/pkg/node/wake"
)

// sight is what is on the machine at one time.
type sight struct {
	sandboxes map[string]cri.Sandbox
	bound     []bound // what a network namespace has that may be there
	view      *hostnet.View
	// after is as bound, read when it is first asked for, after the view: a pod that has a namespace there is in it, or
	// has ended since.
	after func() ([]bound, error)
}

// bound is an address that a ledger says an attachment has.
type bound struct {
	ledger.Address
	network string
	foreign bool // it is in no range of its network: a pool's
}

// uid returns the pod that has the address, by the ledger or else by the runtime.
func (b bound) uid(s *sight) string {
	if b.Pod.UID != "" {
		return b.Pod.UID
	}
	return s.sandboxes[b.Attachment.ContainerID].Pod.UID
}

// fresh shares what is asked at the same time: each question gets an answer that was begun afterwards. Between
// two answers it rests restTimes as long as the last one took, at most restMost: while many pods end, a question is
// always waiting. Nobody waits for longer than lookLimit. While a look does not end, because a file or the runtime does
// not answer, no other one begins.
type fresh[T any] struct {
	// take finds an answer.
	take func(context.Context, hostnet.Question) (T, error)
	// watched is as Options.Watched, for the loop name.
	watched func(loop string, work func())
	name    string

	mu   sync.Mutex
	next *asked[T] // not begun yet
	busy bool      // there is a goroutine that answers
	rest time.Time // the next one begins then
}

const (
	restTimes = 16
	restMost  = time.Second
	// lookLimit is many times what a look takes at a machine that is full of pods.
	lookLimit = time.Minute
)

// errLooks is about a look at the machine that has not ended in time.
var errLooks = errors.New("scanning the node has not ended in time")

// asked is a look that askers wait for.
type asked[T any] struct {
	ctx   context.Context // of the first of them
	about hostnet.Question
	done  chan struct{}
	value T
	err   error
}

// get returns an answer to a question.
func (f *fresh[T]) get(ctx context.Context, q hostnet.Question) (value T, err error) {
	f.mu.Lock()
	a := f.next
	if a == nil {
		a = &asked[T]{ctx: ctx, done: make(chan struct{})}
		f.next = a
	}
	a.about.Addrs = append(a.about.Addrs, q.Addrs...)
	a.about.Netns = append(a.about.Netns, q.Netns...)
	if !f.busy {
		f.busy = true
		go f.answer()
	}
	f.mu.Unlock()
	limit := time.NewTimer(lookLimit)
	defer limit.Stop()
	select {
	case <-a.done:
		return a.value, a.err
	case <-ctx.Done():
		return value, ctx.Err()
	case <-limit.C:
		return value, fmt.Errorf("%w (%s)", errLooks, lookLimit)
	}
}

// answer answers what is asked, until that is nothing.
func (f *fresh[T]) answer() {
	for {
		f.mu.Lock()
		a, rest := f.next, time.Until(f.rest)
		if f.busy = a != nil; a == nil {
			f.mu.Unlock()
			return
		}
		f.mu.Unlock()
		wake.Pause(a.ctx, rest)
		f.mu.Lock()
		f.next = nil
		f.mu.Unlock()
		begin := time.Now()
		f.watched(f.name, func() {
			ctx, cancel := context.WithTimeout(a.ctx, lookLimit)
			defer cancel()
			a.value, a.err = f.take(ctx, a.about)
		})
		end := time.Now()
		f.mu.Lock()
		f.rest = end.Add(min(restTimes*end.Sub(begin), restMost))
		f.mu.Unlock()
		close(a.done)
	}
}

// machine is the node: its sandboxes, ledgers and network namespaces. An error is ignorance: it never means that
// something is not there. What shares answers has a lock, the machine has none.
type machine struct {
	runtime Runtime
	ledgers ledger.Options

	// Tests have their own.
	observe func(context.Context, hostnet.Question) (*hostnet.View, error)
	lives   func(ledger.Netns) (bool, error)
	down    func(ledger.Netns) error

	shallow, deep fresh[*sight]
}

func newMachine(o Options) *machine {
	m := &machine{
		runtime: o.Runtime, ledgers: o.Ledgers,
		observe: func(ctx context.Context, q hostnet.Question) (*hostnet.View, error) {
			return hostnet.Observe(ctx, o.NetnsDirs, o.Runtime.PID(), q)
		},
		lives: func(ns ledger.Netns) (bool, error) { return hostnet.Lives(ns, o.Runtime.PID()) },
		down:  hostnet.Down,
	}
	watched := o.Watched
	if watched == nil {
		watched = func(_ string, work func()) { work() }
	}
	m.shallow.name, m.shallow.watched = "pools", watched
	m.shallow.take = func(ctx context.Context, _ hostnet.Question) (*sight, error) { return m.look(ctx, nil) }
	m.deep.name, m.deep.watched = "pools: namespaces", watched
	m.deep.take = func(ctx context.Context, q hostnet.Question) (*sight, error) { return m.look(ctx, &q) }
	if k := o.Kernel; k != nil {
		m.observe, m.lives, m.down = k.Observe, k.Lives, k.Down
	}
	return m
}

// see returns what is on the machine at a time after the call, with a question also the namespaces that answer it.
func (m *machine) see(ctx context.Context, q *hostnet.Question) (*sight, error) {
	if q == nil {
		return m.shallow.get(ctx, hostnet.Question{})
	}
	return m.deep.get(ctx, *q)
}

// sought is a pod that is sought on the machine.
type sought struct {
	uid   string
	addrs []netip.Addr
	netns []ledger.Netns // that it is known to have had
}

// find finds a pod on the machine, with deep also by the namespaces in which its addresses are configured.
func (m *machine) find(ctx context.Context, pod sought, deep bool) (presence, error) {
	var q *hostnet.Question
	if deep {
		q = &hostnet.Question{Addrs: pod.addrs, Netns: pod.netns}
	}
	s, err := m.see(ctx, q)
	if err != nil {
		return presence{}, err
	}
	return m.presence(ctx, s, pod)
}

// now is the time for people.
func (m *machine) now() time.Time {
	if now, err := m.ledgers.Clock.Now(); err == nil {
		return now.Wall
	}
	return time.Now()
}

// look looks at the machine, see [machine.see].
//
// The runtime is asked before the ledgers: what it does not list yet is in them.
func (m *machine) look(ctx context.Context, q *hostnet.Question) (*sight, error) {
	s := &sight{}
	var err error
	if s.sandboxes, err = m.runtime.Sandboxes(ctx); err != nil {
		return nil, err
	}
	if s.bound, err = m.attached(false); err != nil || q == nil {
		return s, err
	}
	now, err := m.ledgers.Clock.Now()
	if err != nil {
		return nil, err
	}
	if s.view, err = m.observe(ctx, *q); err != nil {
		return nil, err
	}
	s.view.Close()
	s.after = sync.OnceValues(func() ([]bound, error) { return m.attached(false) })
	return s, m.believe(s, now.BootID)
}

// attached returns what a network namespace has that may be there by the ledgers, or of that what is a pool's.
func (m *machine) attached(foreign bool) (all []bound, err error) {
	now, err := m.ledgers.Clock.Now()
	if err != nil {
		return nil, err
	}
	ledgers, err := ledger.Networks(m.ledgers)
	if err = errors.Join(err, ledger.Described(m.ledgers)); err != nil {
		return nil, err
	}
	for _, l := range ledgers {
		addrs, err := l.List()
		if err != nil {
			return nil, fmt.Errorf("network %s: %w", l.Network().Name, err)
		}
		for _, a := range addrs {
			if a.State != ledger.StateBound {
				continue
			}
			in := slices.ContainsFunc(l.Network().Ranges, func(set ledger.RangeSet) bool {
				return slices.ContainsFunc(set, func(r ledger.Range) bool { return r.Contains(a.Addr) })
			})
			if foreign && in {
				continue
			}
			there, err := m.there(a, now.BootID)
			if err != nil {
				return nil, err
			}
			if there {
				all = append(all, bound{Address: a, network: l.Network().Name, foreign: !in})
			}
		}
	}
	return all, nil
}

// there reports whether the network namespace of a bound address may be there. Only a fact says that it is not.
func (m *machine) there(a ledger.Address, boot string) (bool, error) {
	switch {
	case a.Boot != "" && a.Boot != boot:
		return false, nil
	case a.Netns.Path == "":
		return true, nil
	}
	return m.lives(a.Netns)
}

// errBlind is about a view that lacks namespaces: what is not seen may be there.
var errBlind = errors.New("no network namespace of a running pod is visible: " +
	"the agent's mounts are not the host's")

// believe returns why the view cannot be trusted: a pod's namespace that is still there must be in it.
func (m *machine) believe(s *sight, boot string) error {
	known := false
	for _, b := range s.bound {
		if b.Netns.Ino == 0 || b.Boot != boot || b.Pod.Name == "" {
			continue
		}
		if s.view.Has(b.Netns) {
			return nil
		}
		there, err := m.lives(b.Netns)
		if err != nil {
			return err
		}
		known = known || there
	}
	if known {
		return errBlind
	}
	return nil
}

// presence is where a pod is on the machine.
type presence struct {
	sandboxes []string // that run
	ended     []string // sandboxes that do not run, whose namespace may still be there
	entries   []bound
	spaces    []*hostnet.Space // in which one of its addresses is configured, or may be
}

func (p presence) netns() bool { return len(p.sandboxes)+len(p.entries)+len(p.spaces) > 0 }

// strangers are the sandboxes that have none of the addresses by any ledger. They may have others there: what runs when
// the agent comes is taken over.
func (p presence) strangers(addrs []netip.Addr) (ids []string) {
	for _, id := range p.sandboxes {
		if !p.has(id, addrs) {
			ids = append(ids, id)
		}
	}
	return ids
}

// has reports whether a sandbox has one of the addresses by a ledger, or with an empty ID, whether any has.
func (p presence) has(id string, addrs []netip.Addr) bool {
	return slices.ContainsFunc(p.entries, func(b bound) bool {
		return (id == "" || b.Attachment.ContainerID == id) && slices.Contains(addrs, b.Addr)
	})
}

// presence returns where a pod is. A namespace in which one of them is configured is the pod's,
// unless it is another pod's, by the runtime or by a ledger: networks that do not know each other may have the same
// addresses, and the next pod with the address may have started by the time that its namespace was looked into. A
// namespace that cannot be read counts as the pod's, too.
func (m *machine) presence(ctx context.Context, s *sight, pod sought) (p presence, err error) {
	uid, addrs := pod.uid, pod.addrs
	for id, sandbox := range s.sandboxes {
		switch {
		case sandbox.Pod.UID != uid:
		case sandbox.Ready:
			p.sandboxes = append(p.sandboxes, id)
		default:
			p.ended = append(p.ended, id)
		}
	}
	for _, b := range s.bound {
		if of := b.uid(s); of == uid || of == "" && slices.Contains(addrs, b.Addr) {
			p.entries = append(p.entries, b)
		}
	}
	if s.view == nil {
		return p, nil
	}
	for _, a := range addrs {
		if !s.view.Asked(a) { // it has become known since
			return p, fmt.Errorf("%s: the network namespaces of the node have not been searched for it", a)
		}
		for _, u := range s.view.Users(a) {
			if !slices.Contains(p.spaces, u) {
				p.spaces = append(p.spaces, u)
			}
		}
	}
	p.spaces, err = m.withoutOthers(ctx, s, uid, p.spaces)
	return p, err
}

// withoutOthers returns those of the namespaces that are not another pod's.
func (m *machine) withoutOthers(ctx context.Context, s *sight, uid string, users []*hostnet.Space) (
	[]*hostnet.Space, error) {
	if len(users) == 0 {
		return nil, nil
	}
	without := func(other *hostnet.Space) {
		users = slices.DeleteFunc(users, func(u *hostnet.Space) bool { return u == other })
	}
	after, err := s.after()
	if err != nil {
		return nil, err
	}
	for _, b := range after {
		if of := b.uid(s); of == "" || of == uid {
			continue
		}
		if space, err := s.view.Find(b.Netns); err == nil && space != nil {
			without(space)
		}
	}
	for id, sandbox := range s.sandboxes {
		if sandbox.Pod.UID == uid || !sandbox.Ready || len(users) == 0 {
			continue
		}
		path, err := m.runtime.Netns(ctx, id)
		if err != nil {
			return users, err
		}
		if path == "" {
			continue
		}
		space, err := s.view.Find(ledger.Netns{Path: path})
		if err == nil && space != nil { // a namespace that has come since has none of them
			without(space)
		}
	}
	return users, nil
}
