package pool

import (
	"cmp"
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
	of map[string][]turn
	in map[UID]queued
	// stirred are the pools that may have an address for a pod now: an address is free, or the line has become shorter.
	stirred map[string]bool
}

// queued is where a pod waits.
type queued struct {
	turn  turn
	pools []string
}

func newLines() lines {
	return lines{of: map[string][]turn{}, in: map[UID]queued{}, stirred: map[string]bool{}}
}

// ahead returns how many pods have waited longer for an address of a pool.
func (l lines) ahead(t turn, pool string) uint64 {
	i, _ := slices.BinarySearchFunc(l.of[pool], t, turn.compare)
	return uint64(i)
}

// join notes that a pod waits for an address of these pools. It waits for none before.
func (l lines) join(t turn, pools []string) {
	if len(pools) == 0 {
		return
	}
	l.in[t.uid] = queued{t, pools}
	for _, pool := range pools {
		if i, found := slices.BinarySearchFunc(l.of[pool], t, turn.compare); !found {
			l.of[pool] = slices.Insert(l.of[pool], i, t)
		}
	}
}

// leave notes that a pod no longer waits for an address, and returns the pools that it waited for.
func (l lines) leave(uid UID) []string {
	q := l.in[uid]
	delete(l.in, uid)
	for _, pool := range q.pools {
		all := l.of[pool]
		if i, found := slices.BinarySearchFunc(all, q.turn, turn.compare); found {
			all = slices.Delete(all, i, i+1)
		}
		if l.of[pool] = all; len(all) == 0 {
			delete(l.of, pool)
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
func (b *Book) StopWaiting(uid UID) {
	b.lines.stir(b.lines.leave(uid)...)
	b.noteWait(uid, Plan{})
}

// Waiting returns the pods that wait for an address of a pool, the oldest first.
func (b *Book) Waiting(pool string) (all []UID) {
	for _, t := range b.lines.of[pool] {
		all = append(all, t.uid)
	}
	return all
}

// next returns the pods in a pool's line for which there is an address now: they are to be placed, the others are not.
func (b *Book) next(pool string, now time.Time) []UID {
	s := b.pools[pool]
	if s == nil || len(b.lines.of[pool]) == 0 {
		return nil
	}
	if held, _ := b.HeldBy(pool); held != "" {
		return nil
	}
	line := b.lines.of[pool]
	all := make([]UID, min(uint64(len(line)), s.left(now)))
	for i := range all {
		all[i] = line[i].uid
	}
	return all
}
