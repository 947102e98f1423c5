package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// This file is about addresses of pools. No node owns such an address: the cluster gives it to one pod at a time, and
// that is the promise. So the ledger of a node only says which attachment has it, in ranges or not: it makes no claim,
// counts it to no share, and its DEL, its death and the end of the boot free it. The ledger still keeps to what it
// knows of other pods: an address that is bound to or retained for another pod is given to no pod, even if the cluster
// says so.

// addPooled gives the attachment the addresses that the cluster has given to its pod, and no others. It promises
// nothing: a claim that the pod has from before ends, as does the claim of a pod that no longer asks for anything.
//
// Steps: index entry, address files, then what ends. Killed in between, the entry lets the runtime's DEL undo the rest.
// An address that was retained for the pod itself is bound before its claim goes: by an attachment that does not hold
// the claim, so that an expiry ends this, too.
func (a *adding) addPooled() error {
	if len(a.has) > 0 {
		return duplicate(a.Attachment, a.has[0])
	}
	var slots, overdue []slot
	var ended []*entry
	for _, addr := range a.Pool {
		s, err := a.slot(addr)
		if err != nil {
			return err
		}
		e, err := a.assessPooled(addr, s)
		if err != nil || a.out.waitFor != nil {
			return err
		}
		if e != nil && !slices.ContainsFunc(ended, func(o *entry) bool { return o.att == e.att }) {
			ended = append(ended, e)
		}
		slots, overdue = append(slots, s), append(overdue, s)
	}
	a.out.addrs = a.Pool
	if err := a.dropExpired(overdue, a.Pool); err != nil {
		return err
	}
	a.enter("", a.Pool, true)
	for i, addr := range a.Pool {
		a.bind(addr, slots[i])
	}
	if len(a.net.Ranges) == 0 && !a.last(0).IsValid() {
		a.out.do(setLast{0, a.Pool[0]}) // by which a wipe is noticed: there is none of a range set
	}
	if a.own != nil {
		a.out.do(dropClaim{a.own})
		if err := a.freeAddrs(a.own, a.Pool); err != nil {
			return err
		}
		a.out.do(syncSlots{})
	}
	for _, e := range ended {
		mine, files, err := boundTo(a, e)
		if err != nil {
			return err
		}
		free := slices.DeleteFunc(slices.Clone(mine), func(addr netip.Addr) bool { return slices.Contains(a.Pool, addr) })
		if len(free) > 0 {
			a.out.do(tellFreeing{free})
		}
		for i, addr := range mine {
			if slices.Contains(free, addr) {
				a.out.do(freeSlot{addr, files[i]})
			}
		}
		a.out.do(dropEntry{e})
	}
	return nil
}

// assessPooled finds out whether the attachment can have an address that the cluster says is its pod's. ended is an
// attachment that had it, is dead and has not been DELed. If it is the pod's own and lives, the outcome waits for it.
func (a *adding) assessPooled(addr netip.Addr, s slot) (ended *entry, err error) {
	taken := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s, assigned by the cluster to pod %s, %s", ErrNotAvailable, addr, a.Pod,
			fmt.Sprintf(format, args...))
	}
	for _, set := range a.net.Ranges {
		for _, r := range set {
			if r.Gateway == addr {
				return nil, taken("is the gateway of %s", r.Subnet)
			}
		}
	}
	switch s.state {
	case slotRetained:
		if _, over := a.overdue(s); !over && !a.isOwn(s) {
			return nil, taken("is retained on this node for %s", s.retained.Key)
		}
	case slotBound:
		e, err := a.holder(s.att)
		switch {
		case err != nil:
			return nil, err
		case e == nil:
			return nil, taken("is in use by %s", s.att)
		case !a.alive(e):
			return e, a.claimless(e, addr, taken)
		case e.pod.Name != "" && (e.pod.Namespace != a.Pod.Namespace || e.pod.Name != a.Pod.Name),
			e.att.IfName != "" && e.att.IfName != a.Attachment.IfName:
			return nil, taken("is in use on this node by pod %s, container %s", e.pod, s.att)
		}
		a.out.waitFor = &s.att
	case slotGarbage:
		return nil, fmt.Errorf("%w: the file of %s, assigned by the cluster to pod %s: its owner is unknown", ErrCorrupt,
			addr, a.Pod)
	case slotNewer:
		return nil, a.newer(addr, s)
	}
	return nil, nil
}

// claimless returns an error if another pod than this one is promised what a dead attachment has.
func (a *adding) claimless(e *entry, addr netip.Addr, taken func(string, ...any) error) error {
	if e.claim == "" || a.own != nil && e.claim == a.own.Key.hash() {
		return nil
	}
	cl, err := a.claim(e.claim)
	switch {
	case errors.Is(err, ErrCorrupt):
		return taken("may be promised on this node to pod %s", e.pod)
	case err != nil:
		return err
	case cl != nil && slices.Contains(cl.Addrs, addr):
		return taken("is promised on this node to %s", cl.Key)
	}
	return nil
}
