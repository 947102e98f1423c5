package main

import (
	"net/netip"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// answers judges who answers at the addresses of routed pools. A pod's every sandbox is another incarnation, known by
// its start. Until the one before cannot answer any more, no other starts: so whoever asks after one has started is
// answered by that or by a later one. The methods may be called concurrently, and answers may come in any order.
type answers struct {
	report *report
	// owner returns whose address it is, empty if not known yet.
	owner func(netip.Addr) (pod string)

	mu    sync.Mutex
	heard map[netip.Addr][]*incarnation
}

// incarnation is a sandbox that has answered.
type incarnation struct {
	pod     string
	started time.Time
	asked   time.Time // the last time that somebody asked whom it answered
	who     string    // asked then
}

func newAnswers(r *report, owner func(netip.Addr) string) *answers {
	return &answers{report: r, owner: owner, heard: map[netip.Addr][]*incarnation{}}
}

// hear judges an answer to somebody who asked at a time.
func (a *answers) hear(to netip.Addr, who string, asked time.Time, is lab.Answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	asked = asked.Round(0) // to compare it with what another process has read from the same clock
	if owner := a.owner(to); owner != "" && is.Name != owner || !is.Has(to) {
		a.report.violation("answer at "+to.String()+" of "+is.Name,
			"%s asked %s, the address of %s, and %s answered, with %v", who, to, owner, is.Name, is.Addrs)
	}
	var one *incarnation
	for _, known := range a.heard[to] {
		if known.pod == is.Name && known.started.Equal(is.Started) {
			one = known
		}
	}
	if one == nil {
		one = &incarnation{pod: is.Name, started: is.Started}
		a.heard[to] = append(a.heard[to], one)
		a.report.count(tablePods, "incarnations that answered")
	}
	if asked.After(one.asked) {
		one.asked, one.who = asked, who
	}
	for _, other := range a.heard[to] {
		older, newer := one, other
		if older.started.After(newer.started) {
			older, newer = newer, older
		}
		if older != newer && older.asked.After(newer.started) {
			a.report.violation("superseded at "+to.String()+older.started.String(),
				"%s asked %s at %s and was answered by %s of %s, though %s of %s had started", older.who, to, clock(older.asked),
				older.pod, clock(older.started), newer.pod, clock(newer.started))
		}
	}
}
