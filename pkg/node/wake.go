package node

import (
	"context"
	"time"
)

// wake is a signal that is never lost and never piles up.
type wake chan struct{}

func newWake() wake { return make(wake, 1) }

func (w wake) up() {
	select {
	case w <- struct{}{}:
	default:
	}
}

// minPause is between two runs of a loop, however often it is woken.
const minPause = time.Second

// pause waits for d, and returns false if ctx is done before.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
