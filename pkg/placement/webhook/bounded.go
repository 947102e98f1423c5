package webhook

import (
	"context"
	"net/http"
	"time"

	"golang.org/x/sync/semaphore"
)

// What the webhook reads at a time. Whoever reaches its port may call it, and each replica must go on placing pods.
const (
	// bodyMost is more than the API server takes of a pod.
	bodyMost = 4 << 20
	// bodiesMost is for all requests together, of which each counts as bodyLeast at least.
	bodiesMost, bodyLeast = 16 << 20, 64 << 10
	// roomWithin is how long a request waits for others to be answered, bodyWithin how long its body may take.
	roomWithin, bodyWithin = time.Second, 3 * time.Second
)

// bounded answers within these bounds. What is beyond them is an error, after which the API server lets the pod in
// without the gate, as if no replica had answered: its failurePolicy is Ignore.
type bounded struct {
	http.Handler
	room *semaphore.Weighted
}

func (b bounded) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	size := r.ContentLength
	if size < 0 { // it does not say
		size = bodyMost
	}
	if size > bodyMost {
		http.Error(w, "the request is longer than 4 MiB", http.StatusRequestEntityTooLarge)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), roomWithin)
	defer cancel()
	room := max(size, bodyLeast)
	if b.room.Acquire(ctx, room) != nil {
		http.Error(w, "too many requests at a time", http.StatusServiceUnavailable)
		return
	}
	defer b.room.Release(room)
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyWithin)) // where the connection has one
	r.Body = http.MaxBytesReader(w, r.Body, size)
	b.Handler.ServeHTTP(w, r)
}
