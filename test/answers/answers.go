// Package answers judges who answers at the addresses of pods, as clients hear it.
package answers

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// Judge judges answers. A pod's every sandbox is another incarnation, known by its start. Until the one before cannot
// answer any more, no other starts: so a client that asks after one has started is answered by that or by a later one.
// The methods may be called concurrently, and answers may come in any order.
type Judge struct {
	owner func(netip.Addr) (pod string)
	wrong func(subject, format string, args ...any)

	mu    sync.Mutex
	heard map[netip.Addr][]*Incarnation
}

// Incarnation is a sandbox that has answered.
type Incarnation struct {
	Pod     string
	Started time.Time
	// Asked is the last time at which each client asked whom it answered.
	Asked map[string]time.Time
}

// last returns the client that was the last to ask whom it answered, and when.
func (i *Incarnation) last() (who string, asked time.Time) {
	for w, at := range i.Asked {
		if at.After(asked) {
			who, asked = w, at
		}
	}
	return who, asked
}

// NewJudge returns a judge that calls wrong about each answer that should not be; those about one subject are the same.
// owner returns whose address it is, empty if not known yet.
func NewJudge(owner func(netip.Addr) (pod string), wrong func(subject, format string, args ...any)) *Judge {
	return &Judge{owner: owner, wrong: wrong, heard: map[netip.Addr][]*Incarnation{}}
}

// Hear judges an answer to a client that asked at a time, and reports whether that incarnation has not answered before.
func (j *Judge) Hear(to netip.Addr, who string, asked time.Time, is lab.Answer) (first bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	asked = asked.Round(0) // to compare it with what another process has read from the same clock
	if owner := j.owner(to); owner != "" && is.Name != owner || !is.Has(to) {
		j.wrong("answer at "+to.String()+" of "+is.Name,
			"%s asked %s, the address of %s, and %s answered, with %v", who, to, owner, is.Name, is.Addrs)
	}
	var one *Incarnation
	for _, known := range j.heard[to] {
		if known.Pod == is.Name && known.Started.Equal(is.Started) {
			one = known
		}
	}
	if first = one == nil; first {
		one = &Incarnation{Pod: is.Name, Started: is.Started, Asked: map[string]time.Time{}}
		j.heard[to] = append(j.heard[to], one)
	}
	if asked.After(one.Asked[who]) {
		one.Asked[who] = asked
	}
	for _, other := range j.heard[to] {
		older, newer := one, other
		if older.Started.After(newer.Started) {
			older, newer = newer, older
		}
		if client, at := older.last(); older != newer && at.After(newer.Started) {
			j.wrong("superseded at "+to.String()+older.Started.String(),
				"%s asked %s at %s and was answered by %s of %s, though %s of %s had started", client, to, clock(at),
				older.Pod, clock(older.Started), newer.Pod, clock(newer.Started))
		}
	}
	return first
}

// Heard returns the incarnations that have answered at an address, in the order in which they were first heard.
func (j *Judge) Heard(at netip.Addr) (all []Incarnation) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, one := range j.heard[at] {
		is := *one
		is.Asked = maps.Clone(one.Asked)
		all = append(all, is)
	}
	return all
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05.000") }
