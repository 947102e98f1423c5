package node

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
)

// reconcileLoop reconciles at the start, when somebody asks for it, when a suspect is due, and at the interval.
func (a *Agent) reconcileLoop(ctx context.Context) {
	beat := a.health.loop("reconcile")
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.reconcileNow:
		case <-timer.C:
		}
		beat.begin()
		next := a.reconcileAndReport(ctx)
		beat.end()
		a.sweep.Store(true) // what has no address behind it has no time at which it would be noticed
		a.bookNow.up()
		a.spoolNow.up() // a wake-up by inotify may have been lost
		// Jittered, so that the nodes of a cluster that came up together do not work in step.
		wait := a.o.Interval*9/10 + rand.N(a.o.Interval/5+1)
		if next > 0 {
			wait = min(wait, max(next, minPause))
		}
		timer.Reset(wait)
		if !pause(ctx, minPause) {
			return
		}
	}
}

// minPause is between two runs of a loop, however often it is woken.
const minPause = time.Second

// pause waits, or returns false where there is no more to wait for.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (a *Agent) reconcileAndReport(ctx context.Context) (next time.Duration) {
	start := time.Now()
	a.countCommands()
	next, err := a.reconcile(ctx)
	if ctx.Err() != nil {
		return 0
	}
	a.metrics.reconcileDuration.Observe(time.Since(start).Seconds())
	if err != nil {
		a.metrics.reconcileErrors.Inc()
		a.log.Error("Reconciliation failed", "err", err)
	}
	a.reconciled.Store(true)
	return next
}

// countCommands has the plugin count its commands. That cannot keep the agent from anything.
func (a *Agent) countCommands() {
	if err := a.spool.MakeLatencies(); err != nil {
		a.log.Warn("The plugin's commands are not counted", "err", err)
	}
}

// reconcile brings the ledgers and the runtime into agreement: running sandboxes have their policy and their
// marks, sandboxes that are gone have none, and what leaked is reclaimed. next is when a suspect is due.
func (a *Agent) reconcile(ctx context.Context) (next time.Duration, err error) {
	now, err := a.o.Clock.Now()
	if err != nil {
		return 0, err
	}
	epoch := a.agreed.now()
	// This order makes absence evidence: a mark is written after its address file, and an address file is there
	// before the runtime lists the sandbox.
	served, allOpened := a.networks()
	marks, err := marksOf(served)
	if err != nil {
		return 0, err
	}
	books, allRead := a.read(served)
	list, err := a.cri.Sandboxes(ctx)
	a.criAnswered(err)
	if err != nil {
		return 0, err
	}
	ready, adopted := a.adopt(ctx, served, books, list, marks)
	if allOpened && allRead {
		a.dropMarks(books, list, marks)
		if adopted {
			a.agreed.reached(epoch, served)
		}
	}
	known := make(map[string]bool, len(list))
	for id := range list {
		known[id] = true
	}
	due, next := a.suspectAll(books, known, now.Boot)
	if len(due) > 0 {
		err = a.reclaim(ctx, due, ready)
		next = a.o.GracePeriod // those that stayed are looked at again
	}
	return next, err
}

// adopt sees to it that the ledgers know every running sandbox: those that host-local gave an address before
// stayput came, and those that started while the agent was away. It returns the namespaces of those that have one;
// whole says that every policy was set.
func (a *Agent) adopt(ctx context.Context, served []*ledger.Ledger, books []book, list map[string]cri.Sandbox, marks map[*ledger.Ledger]map[string]ledger.Mark) (ready []ledger.Netns, whole bool) {
	unserved := a.configured(served)
	for _, l := range unserved {
		// This describes the network as its first command does, and makes its directories: without that the cluster would
		// learn of the homes of its pods only when the first of them comes or goes.
		if err := l.Prepare(); err != nil {
			a.log.Error("Cannot open a network", "network", l.Network().Name, "err", err)
		}
	}
	unservedMarks, err := marksOf(unserved)
	if err != nil {
		a.log.Error("Cannot read policy marks", "err", err)
	}
	bound := boundTo(books)
	whole = true
	for id, s := range list {
		if ctx.Err() != nil {
			return ready, false
		}
		if !s.Ready {
			continue
		}
		o := observe(Sandbox{ID: s.ID, Pod: s.Pod, Annotations: s.Annotations})
		if o.answers && o.err == nil {
			for _, l := range unserved {
				a.putMissing(l, o, unservedMarks[l])
			}
			for _, l := range served {
				a.putMissing(l, o, marks[l])
			}
		}
		for _, at := range bound[id] {
			ns := at.address.Netns
			if ns.Path == "" {
				path, err := a.cri.Netns(ctx, id)
				if err != nil || path == "" {
					a.log.Warn("The runtime does not say where the pod's network namespace is", o.sandbox.attrs("err", err)...)
				} else if cur, ok, err := a.o.Netns.Identify(path); err == nil && ok {
					ns = cur
				} else {
					ns = ledger.Netns{Path: path} // it counts as not visible
				}
			}
			if ns.Path != "" {
				ready = append(ready, ns)
			}
			if ns.Ino == 0 {
				ns = ledger.Netns{} // never recorded: a path alone would pass for any later namespace there
			}
			if _, ok := a.setPolicy(attached{at.ledger, at.address.Attachment}, o, ns); !ok {
				whole = false
			}
		}
	}
	return ready, whole
}

// boundAddress is one attachment as its first address has it.
type boundAddress struct {
	ledger  *ledger.Ledger
	address ledger.Address
}

// boundTo lists the attachments that have an address, by container ID.
func boundTo(books []book) map[string][]boundAddress {
	bound := map[string][]boundAddress{}
	for _, b := range books {
		seen := map[ledger.Attachment]bool{}
		for _, addr := range b.addrs {
			if addr.State != ledger.StateBound || seen[addr.Attachment] {
				continue
			}
			seen[addr.Attachment] = true
			id := addr.Attachment.ContainerID
			bound[id] = append(bound[id], boundAddress{b.ledger, addr})
		}
	}
	return bound
}

func marksOf(ledgers []*ledger.Ledger) (map[*ledger.Ledger]map[string]ledger.Mark, error) {
	all := map[*ledger.Ledger]map[string]ledger.Mark{}
	var errs []error
	for _, l := range ledgers {
		marks, err := l.Marks()
		errs = append(errs, err)
		all[l] = map[string]ledger.Mark{}
		for _, m := range marks {
			all[l][m.ContainerID] = m
		}
	}
	return all, errors.Join(errs...)
}

// putMissing writes a mark unless it is there already.
func (a *Agent) putMissing(l *ledger.Ledger, o observation, there map[string]ledger.Mark) {
	s, m := o.sandbox, o.mark()
	if was, ok := there[s.ID]; ok && was.Policy == m.Policy && was.UID == m.UID {
		return
	}
	if err := l.PutMark(m); err != nil {
		a.metrics.markErrors.Inc()
		a.log.Error("Cannot write the pod's policy mark", s.attrs("network", l.Network().Name, "err", err)...)
	}
}

// dropMarks removes the marks of sandboxes that are gone. One that still has an address leaked, and its mark
// says what becomes of that.
func (a *Agent) dropMarks(books []book, list map[string]cri.Sandbox, marks map[*ledger.Ledger]map[string]ledger.Mark) {
	bound := boundTo(books)
	for l, all := range marks {
		for id := range all {
			if _, ok := list[id]; ok || bound[id] != nil {
				continue
			}
			if err := l.DropMark(id); err != nil {
				a.log.Warn("Cannot remove a policy mark", "network", l.Network().Name, "sandbox", id, "err", err)
			}
		}
	}
}

// criAnswered keeps for /readyz and the metrics how the last call of the runtime went.
func (a *Agent) criAnswered(err error) {
	said := ""
	a.metrics.criUp.Set(1)
	if err != nil {
		said = err.Error()
		a.metrics.criUp.Set(0)
	}
	a.criState.Store(&said)
}
