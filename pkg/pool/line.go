package pool

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// older orders pods by their age.
func older(x, y *Pod) int { return cmp.Or(x.Created.Compare(y.Created), cmp.Compare(x.UID, y.UID)) }

// lines are the pods that wait for addresses, by pool.
type lines struct {
	waiters index[string, UID]
	pools   map[UID][]string // that a pod waits for
	// stirred are the pools that may have an address for a pod now: an address is free, or a pod no longer waits.
	stirred map[string]bool
}

// join notes that a pod waits for an address of these pools. It waits for none before.
func (l lines) join(uid UID, pools []string) {
	l.pools[uid] = pools
	for _, pool := range pools {
		l.waiters.add(pool, uid)
	}
}

// leave notes that a pod no longer waits for an address, and returns the pools that it waited for.
func (l lines) leave(uid UID) []string {
	pools := l.pools[uid]
	delete(l.pools, uid)
	for _, pool := range pools {
		l.waiters.remove(pool, uid)
	}
	return pools
}

func (l lines) stir(pools ...string) {
	for _, pool := range pools {
		l.stirred[pool] = true
	}
}

// StopWaiting notes that a pod no longer waits, as it is given nothing.
func (w *waiting) StopWaiting(uid UID) {
	w.lines.stir(w.lines.leave(uid)...)
	w.noteWait(uid, Plan{})
}

// Waiting returns the pods that wait for an address of a pool, the oldest first.
func (w *waiting) Waiting(pool string) []UID {
	return slices.SortedFunc(maps.Keys(w.lines.waiters[pool]), func(x, y UID) int { return older(w.pods[x], w.pods[y]) })
}

// next returns as many of the pods that wait for an address of a pool as it has addresses, the oldest first.
func (w *waiting) next(pool string, now time.Time) []UID {
	s := w.pools[pool]
	if s == nil || len(w.lines.waiters[pool]) == 0 {
		return nil
	}
	all := w.Waiting(pool)
	return all[:min(uint64(len(all)), s.left(now))]
}

// stirPools notes that an address may be free.
func (w *waiting) stirPools(a netip.Addr) {
	for name, s := range w.pools {
		if s.Range.Set.Contains(a) {
			w.lines.stir(name)
		}
	}
}

// Unreserve forgets that an address was about to be claimed: the write failed, and the address is in use by another pod
// or still free.
func (w *waiting) Unreserve(a netip.Addr) {
	for name, s := range w.pools {
		if _, reserved := s.reserved[a]; reserved {
			delete(s.reserved, a)
			w.lines.stir(name)
		}
	}
}
