// Package wake is how the agent's loops are woken, and how they wait.
package wake

import (
	"context"
	"time"
)

// Signal wakes a loop that receives from it. It is never lost and never piles up.
type Signal chan struct{}

// New returns a Signal that is not up.
func New() Signal { return make(Signal, 1) }

// Up wakes the loop, now or when it receives next. It does not wait.
func (s Signal) Up() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Loop calls do until ctx is done: at once, whenever s is up, and after the time that do returned last, if timed.
// Between two calls it waits at least for pause. woken says that s was up.
func (s Signal) Loop(ctx context.Context, pause time.Duration, do func(woken bool) (next time.Duration, timed bool)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		woken := false
		select {
		case <-ctx.Done():
			return
		case <-s:
			woken = true
		case <-timer.C:
		}
		next, timed := do(woken)
		timer.Stop()
		if timed {
			timer.Reset(next)
		}
		if !Pause(ctx, pause) {
			return
		}
	}
}

// Pause waits for d, and returns false if ctx is done before.
func Pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
