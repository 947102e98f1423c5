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
