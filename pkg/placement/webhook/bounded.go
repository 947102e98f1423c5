package webhook

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/stayput/stayput/pkg/httplimit"
)

// What the webhook reads at a time. Any machine that reaches its port can send it requests, and each replica must go on
// placing pods.
const (
	// bodyMost is more than the API server accepts of a pod.
	bodyMost = 4 << 20
	// bodiesMost is for all requests together. Each is charged bodyLeast when it begins, and what it sends beyond that
	// once it was read: a request that declares a long body holds no memory for it.
	bodiesMost, bodyLeast = 16 << 20, 64 << 10
	// roomWithin is how long a request waits for others to be answered, bodyWithin how long its body may take.
	roomWithin, bodyWithin = time.Second, 3 * time.Second
)

var errNoRoom = errors.New("too many concurrent requests")

// bounded answers within these bounds. A request beyond them fails, and the API server admits the pod without the gate,
// as if no replica had answered: its failurePolicy is Ignore.
type bounded struct {
	http.Handler
	room *room
}

func (b bounded) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength > bodyMost {
		http.Error(w, "the request body exceeds 4 MiB", http.StatusRequestEntityTooLarge)
		return
	}
	connection := http.NewResponseController(w)
	body := &body{ReadCloser: http.MaxBytesReader(w, r.Body, bodyMost), ctx: r.Context(), room: b.room, reading: true,
		// Connections of tests have no deadlines.
		interrupt: func() { _ = connection.SetReadDeadline(time.Now()) }}
	if remote, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		body.client = httplimit.Client(remote.Addr())
	}
	b.room.enter(body)
	defer b.room.leave(body)
	if body.charge(bodyLeast) != nil {
		http.Error(w, errNoRoom.Error(), http.StatusServiceUnavailable)
		return
	}
	_ = connection.SetReadDeadline(time.Now().Add(bodyWithin))
	r.Body = body
	b.Handler.ServeHTTP(w, r)
}

// room is the memory for the bodies of requests. A client that needs some takes it from a client that has more, whose
// oldest body fails: so a client that fills the room, slowly or not, keeps no other out.
type room struct {
	mu      sync.Mutex
	free    int64
	bodies  []*body       // oldest first
	changed chan struct{} // closed and replaced when memory becomes free
}

func newRoom() *room { return &room{free: bodiesMost, changed: make(chan struct{})} }

// body is the body of a request.
type body struct {
	io.ReadCloser
	ctx       context.Context // of the request
	client    netip.Prefix
	room      *room
	interrupt func() // ends a read that waits for the client
	read      int64  // bytes
	paid      int64  // what it was charged in all

	charged int64 // what it has of the room; this and what follows by the room's lock
	reading bool  // until its end was read; a request that is being answered is not ended
	ended   bool  // its memory went to another client
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read += int64(n)
	if more := b.read - b.paid; more > 0 {
		if full := b.charge(more); full != nil {
			return 0, full
		}
	}
	if err != nil {
		b.room.wasRead(b)
	}
	return n, err
}

// charge takes memory from the room, and waits for it no longer than roomWithin.
func (b *body) charge(n int64) error {
	var within <-chan time.Time
	for {
		changed, err := b.room.take(b, n)
		if err != nil {
			return err
		}
		if changed == nil {
			b.paid += n
			return nil
		}
		if within == nil {
			within = time.After(roomWithin)
		}
		select {
		case <-changed:
		case <-within:
			return errNoRoom
		case <-b.ctx.Done():
			return b.ctx.Err()
		}
	}
}

// take charges a body. If there is no memory it returns what is closed once there may be some. Of the bodies of a
// client only the oldest waits for more while it is read: several would wait for each other.
func (m *room) take(b *body, n int64) (changed <-chan struct{}, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for !b.ended && m.free < n {
		surplus := m.surplusLocked(b, n)
		if surplus == nil {
			break
		}
		surplus.ended = true
		surplus.interrupt()
		m.releaseLocked(surplus)
	}
	switch {
	case b.ended || m.free < n && b.charged > 0 && m.oldestLocked(b.client) != b:
		return nil, errNoRoom
	case m.free < n:
		return m.changed, nil
	}
	m.free -= n
	b.charged += n
	return nil, nil
}

// surplusLocked returns the body that fails for another one: the oldest of the client that has most, if that is more
// than the other's client would have; nil if there is none.
func (m *room) surplusLocked(other *body, n int64) (surplus *body) {
	has := map[netip.Prefix]int64{}
	for _, b := range m.bodies {
		has[b.client] += b.charged
	}
	most := has[other.client] + n
	for _, b := range m.bodies {
		if b.reading && b.charged > 0 && !b.ended && has[b.client] > most {
			surplus, most = b, has[b.client]
		}
	}
	return surplus
}

// oldestLocked returns the oldest body of a client that is read and has memory; nil if there is none.
func (m *room) oldestLocked(client netip.Prefix) *body {
	for _, b := range m.bodies {
		if b.client == client && b.reading && b.charged > 0 {
			return b
		}
	}
	return nil
}

// releaseLocked frees the memory of a body.
func (m *room) releaseLocked(b *body) {
	m.free += b.charged
	b.charged = 0
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *room) enter(b *body) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bodies = append(m.bodies, b)
}

func (m *room) wasRead(b *body) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b.reading = false
}

func (m *room) leave(b *body) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.releaseLocked(b)
	if i := slices.Index(m.bodies, b); i >= 0 {
		m.bodies = slices.Delete(m.bodies, i, i+1)
	}
}
