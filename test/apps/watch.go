package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

const (
	writeEvery = 100 * time.Millisecond
	// writeFor is how long a client waits for an answer before it counts the write as failed.
	writeFor = 5 * time.Second
	// askFor is how long it waits for one member, before it asks another.
	askFor = time.Second
)

// watch is the clients of an application, one for each thing that is written.
type watch struct {
	clients int
	stop    context.CancelFunc
	done    sync.WaitGroup

	mu      sync.Mutex
	written map[string][]try
}

// try is a client's write.
type try struct {
	ended time.Time
	err   error
}

// watch starts the clients. They ask the API server where the members are, as DNS would tell them: what they cannot
// write, a client without a memory cannot write either.
func (s *stage) watch(ctx context.Context, a app) *watch {
	ctx, stop := context.WithCancel(ctx)
	w := &watch{clients: len(a.writes), stop: stop, written: map[string][]try{}}
	for _, what := range a.writes {
		w.done.Go(func() {
			for ctx.Err() == nil {
				err := s.writeOnce(ctx, a, what)
				if ctx.Err() == nil {
					w.mu.Lock()
					w.written[what] = append(w.written[what], try{time.Now(), err})
					w.mu.Unlock()
				}
				select {
				case <-time.After(writeEvery):
				case <-ctx.Done():
				}
			}
		})
	}
	return w
}

func (s *stage) writeOnce(ctx context.Context, a app, what string) error {
	ctx, cancel := context.WithTimeout(ctx, writeFor)
	defer cancel()
	members, err := s.membersOf(ctx, a)
	if err != nil {
		return err
	}
	return a.write(ctx, s, running(members), what)
}

// writtenSince waits until every client has had a write succeed that ended after then.
func (w *watch) writtenSince(ctx context.Context, then time.Time) error {
	return lab.Until(ctx, "the clients to write", func() (bool, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, tries := range w.written {
			last := tries[len(tries)-1]
			if last.err != nil || last.ended.Before(then) {
				return false, last.err
			}
		}
		return len(w.written) == w.clients, nil
	})
}

// end stops the clients. It may be called again.
func (w *watch) end() (o outage) {
	w.stop()
	w.done.Wait()
	for _, tries := range w.written {
		o = o.worse(outageOf(tries))
	}
	return o
}

// outage is for how long a client's writes failed.
type outage struct {
	longest time.Duration
	last    error // of a client that cannot write at the end
}

// outageOf returns the longest time between two successful writes, if others failed in between; at the end, the time
// since the last success.
func outageOf(tries []try) (o outage) {
	var good time.Time // the last success, or the first try
	for i, t := range tries {
		if i == 0 {
			good = t.ended
		}
		if t.err != nil {
			o.last = t.err
			if i == len(tries)-1 {
				o.longest = max(o.longest, t.ended.Sub(good))
			}
			continue
		}
		if o.last != nil {
			o.longest = max(o.longest, t.ended.Sub(good))
		}
		good, o.last = t.ended, nil
	}
	return o
}

// worse returns the outage that lasts, and else the longer one.
func (o outage) worse(p outage) outage {
	if (o.last == nil) != (p.last == nil) {
		if o.last != nil {
			return o
		}
		return p
	}
	if o.longest > p.longest {
		return o
	}
	return p
}

func (o outage) String() string {
	switch {
	case o.last != nil:
		return fmt.Sprintf("writes still fail after %.0f s: %v", o.longest.Seconds(), o.last)
	case o.longest == 0:
		return "no write failed"
	}
	return fmt.Sprintf("writes failed for %.1f s", o.longest.Seconds())
}
