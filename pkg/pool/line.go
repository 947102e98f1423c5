package pool

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// turn is the place of a pod in the line of those that wait for an address of a pool.
type turn struct {
	created time.Time
	uid     UID
}

func turnOf(p *Pod) turn { return turn{p.Created, p.UID} }

// older orders pods by their age.
func older(x, y *Pod) int { return turnOf(x).compare(turnOf(y)) }

func (t turn) compare(o turn) int {
	return cmp.Or(t.created.Compare(o.created), cmp.Compare(t.uid, o.uid))
}

// lines are the pods that wait for addresses, by pool, the oldest first. Each step takes time by the logarithm of their
// number, and moves memory.
type lines struct {
	byPool map[string][]turn
	queued map[UID]queued
	// stirred are the pools that may have an address for a pod now: an address is free, or the line has become shorter.
	stirred map[string]bool
}

// queued is where a pod waits.
type queued struct {
	turn  turn
	pools []string
}

// ahead returns how many pods have waited longer for an address of a pool.
func (l lines) ahead(t turn, pool string) uint64 {
	i, _ := slices.BinarySearchFunc(l.byPool[pool], t, turn.compare)
	return uint64(i)
}

// join notes that a pod waits for an address of these pools. It waits for none before.
func (l lines) join(t turn, pools []string) {
	l.queued[t.uid] = queued{t, pools}
	for _, pool := range pools {
		if i, found := slices.BinarySearchFunc(l.byPool[pool], t, turn.compare); !found {
			l.byPool[pool] = slices.Insert(l.byPool[pool], i, t)
		}
	}
}

// leave notes that a pod no longer waits for an address, and returns the pools that it waited for.
func (l lines) leave(uid UID) []string {
	q := l.queued[uid]
	delete(l.queued, uid)
	for _, pool := range q.pools {
		all := l.byPool[pool]
		if i, found := slices.BinarySearchFunc(all, q.turn, turn.compare); found {
			all = slices.Delete(all, i, i+1)
		}
		if l.byPool[pool] = all; len(all) == 0 {
			delete(l.byPool, pool)
		}
	}
	return q.pools
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
func (w *waiting) Waiting(pool string) (all []UID) {
	for _, t := range w.lines.byPool[pool] {
		all = append(all, t.uid)
	}
	return all
}

// next returns the pods in a pool's line for which there is an address now: they are to be placed, the others are not.
func (w *waiting) next(pool string, now time.Time) []UID {
	s, line := w.pools[pool], w.lines.byPool[pool]
	if s == nil || len(line) == 0 {
		return nil
	}
	if held, _ := w.HeldBy(pool); held != "" {
		return nil
	}
	all := make([]UID, min(uint64(len(line)), s.left(now)))
	for i := range all {
		all[i] = line[i].uid
	}
	return all
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
