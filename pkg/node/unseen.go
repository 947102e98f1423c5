package node

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cri"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/node/wake"
)

// unseen serves, while NRI is off or away, the pods whose annotations CNI did not hand on either: it reads them from
// the runtime's list of sandboxes. That takes longer than NRI, which makes the runtime wait: both containerd and CRI-O
// list a sandbox only once it runs, so some tenths of a second after its ADD. A pod that asks for its address for the
// first time and ends before that asks in vain. A pod that has been promised its address keeps it: a DEL that comes
// before the policy leaves the promise as it was.
type unseen struct {
	now      wake.Signal
	source   *annotationSource
	networks *networks
	list     func(context.Context) (map[string]cri.Sandbox, error)
	netns    func(context.Context, Sandbox) ledger.Netns
	// ran is told of a sandbox what NRI would have told.
	ran  func(Sandbox)
	news *news
	beat *beat
	log  *slog.Logger

	told    map[string]bool // the containers that ran was told of
	blind   time.Time       // since when annotations come from nowhere, zero if they come, or no pod waits for any
	said    bool            // that they come from nowhere
	trouble atomic.Pointer[string]
}

// annotationSource says where annotations come from.
type annotationSource struct {
	nri      *atomic.Bool // whether it is connected
	listOnly atomic.Bool  // CNI has handed on none of the last pod, and NRI is not connected
}

const (
	// A sandbox that is not listed yet is looked for again after unseenFirst, then ever later. Those of a failed ADD are
	// never listed: their addresses leak, and are reclaimed.
	unseenFirst, unseenLast = 50 * time.Millisecond, 5 * time.Second
	// blindFor is how long annotations come from nowhere before that is an Event: a runtime that restarts is longer
	// away than its NRI socket.
	blindFor = time.Minute
)

func (u *unseen) run(ctx context.Context) {
	backoff := unseenFirst
	// The pause: of pods that start together the list tells at once.
	u.now.Loop(ctx, unseenFirst, func(woken bool) (wait time.Duration, waits bool) {
		if woken {
			backoff = unseenFirst
		}
		u.beat.begin()
		defer u.beat.end()
		if waits = u.look(ctx); waits {
			wait, backoff = backoff, min(2*backoff, unseenLast)
		}
		return wait, waits
	})
}

// look tells of those sandboxes that the runtime lists by now. waits: some are left.
func (u *unseen) look(ctx context.Context) (waits bool) {
	if u.source.nri.Load() {
		u.told = nil
		u.source.listOnly.Store(false)
		u.see(nil)
		return false
	}
	open := u.open()
	if len(open) == 0 {
		u.see(nil)
		return false
	}
	list, err := u.list(ctx)
	if ctx.Err() != nil {
		return false
	}
	u.see(err)
	if err != nil {
		return true
	}
	for id, address := range open {
		s, listed := list[id]
		switch {
		case !listed:
			waits = true
			continue
		case s.Ready:
			seen := Sandbox{ID: id, Pod: s.Pod, Annotations: s.Annotations, Netns: address.Netns.Path}
			if seen.Netns == "" {
				seen.Netns = u.netns(ctx, seen).Path
			}
			u.ran(seen)
		}
		u.told[id] = true // once: a bad annotation leaves it open
	}
	return waits
}

// open returns the containers whose policy is undecided and that ran was not told of, by ID, each with one of its
// addresses. A ledger that cannot be read now will be at the next reconciliation.
func (u *unseen) open() map[string]ledger.Address {
	open, told := map[string]ledger.Address{}, map[string]bool{}
	ledgers, _ := u.networks.open()
	for _, l := range ledgers {
		addrs, err := l.List()
		if err != nil {
			u.log.Debug("Cannot read the addresses of a network", "network", l.Network().Name, "err", err)
			continue
		}
		for _, a := range addrs {
			id := a.Attachment.ContainerID
			if a.State != ledger.StateBound || a.Newer != nil || !l.Undecided(a.Attachment) {
				continue
			}
			u.source.noteListed(a)
			if u.told[id] {
				told[id] = true
				continue
			}
			open[id] = a
		}
	}
	u.told = told
	return open
}

// noteListed notes that CNI has handed on none of the annotations of a pod with this address. The plugin knows the pods
// that it gave theirs: it was never handed anything of host-local's from before, or of what is no pod.
func (s *annotationSource) noteListed(a ledger.Address) {
	if !s.nri.Load() && a.Pod.Name != "" {
		s.listOnly.Store(true)
	}
}

// see notes whether annotations come from anywhere: err is the list's.
func (u *unseen) see(err error) {
	said := ""
	if err != nil {
		said = "CNI does not pass pod annotations, NRI is not connected, and the runtime's sandboxes cannot be listed: " +
			err.Error()
	}
	u.trouble.Store(&said)
	switch {
	case err == nil:
		u.blind, u.said = time.Time{}, false
	case u.blind.IsZero():
		u.blind = time.Now()
	case !u.said && time.Since(u.blind) >= blindFor:
		u.said = true
		u.news.publish(ledger.Event{
			Reason:  retainedip.EventAnnotationsUnknown,
			Message: said + ". Addresses of pods that start in the meantime are not retained",
		})
	}
}

// status says how annotations come.
func (u *unseen) status() string {
	if why := u.trouble.Load(); why != nil && *why != "" {
		return degraded + *why
	}
	if u.source.listOnly.Load() && !u.source.nri.Load() {
		return inspection.AnnotationsListed
	}
	return "ok"
}
