package ledger

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// pick finds the address of one range set: the requested address, else the next free one, else, in a full range, the
// address whose retention has been over for the longest.
func (a *adding) pick(i int, set RangeSet, requested *[]netip.Addr) (netip.Addr, slot, error) {
	for j, addr := range *requested {
		r, ok := set.find(addr)
		if !ok {
			continue
		}
		if set[r].Gateway == addr {
			return addr, slot{}, fmt.Errorf("%w: requested %s is the gateway of %s", ErrNotAvailable, addr, set[r].Subnet)
		}
		s, err := a.slot(addr)
		if err == nil && s.state != slotFree && !a.isOwn(s) {
			if _, over := a.overdue(s); !over {
				err = fmt.Errorf("%w: requested %s is %s", ErrNotAvailable, addr, a.taken(s))
			}
		}
		*requested = slices.Delete(slices.Clone(*requested), j, j+1)
		return addr, s, err
	}
	var found, oldest netip.Addr
	var oldestSlot slot
	var overdue time.Duration
	var failed error
	set.walk(a.last(i), func(addr netip.Addr) bool {
		s, err := a.slot(addr)
		if err != nil {
			failed = err
			return false
		}
		switch s.state {
		case slotFree:
			found = addr
			return false
		case slotRetained:
			if left, over := a.overdue(s); over && left <= overdue {
				oldest, oldestSlot, overdue = addr, s, left
			}
		}
		return true
	})
	switch {
	case failed != nil:
		return found, slot{}, failed
	case found.IsValid():
		return found, slot{}, nil
	case oldest.IsValid():
		return oldest, oldestSlot, nil
	}
	return found, slot{}, fmt.Errorf("%w: range set %d: %s", ErrFull, i, set)
}

// taken says which pod or container has an address that cannot be had. Pods of other namespaces are not named: a user
// who may ask for addresses may not therefore know them.
func (a *adding) taken(s slot) string {
	who := func(namespace, name string) string {
		if namespace != a.Pod.Namespace {
			return "a pod of another namespace"
		}
		return "pod " + name
	}
	switch s.state {
	case slotRetained:
		return "retained for " + who(s.retained.Key.Namespace(), s.retained.Key.Pod)
	case slotBound:
		if e, err := a.entry(s.att); err == nil && e != nil && e.pod.Name != "" {
			return "taken by " + who(e.pod.Namespace, e.pod.Name)
		}
		return "taken by container " + s.att.ContainerID
	}
	return "taken"
}

// overdue reports whether an address is retained for longer than it was promised, and for how long, as a negative
// duration: another pod may have it.
func (t *decision) overdue(s slot) (left time.Duration, over bool) {
	if s.state != slotRetained || !s.retained.expired(t.now) {
		return 0, false
	}
	if _, err := t.claim(s.retained.Key.hash()); errors.Is(err, ErrNewer) {
		return 0, false // it may have another end
	}
	left, _ = s.retained.Expires(t.now)
	return left, true
}

// isOwn reports whether an address is retained for the own claim.
func (a *adding) isOwn(s slot) bool {
	return s.state == slotRetained && a.own != nil && s.retained.Key == a.own.Key
}

// dropExpired ends the expired claims whose addresses are in slots.
func (a *adding) dropExpired(slots []slot, picked []netip.Addr) error {
	seen := map[Key]bool{}
	for _, s := range slots {
		if s.state != slotRetained || a.isOwn(s) || seen[s.retained.Key] {
			continue
		}
		seen[s.retained.Key] = true
		if err := a.dropPromise(s.retained.claim(), picked); err != nil {
			return err
		}
	}
	return nil
}
