package node

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stayput/stayput/pkg/node/cniconf"
)

// stuckAfter is when a loop that works on one thing counts as dead: longer than any sum of its timeouts, the
// plugin's 60 s on a network's lock included.
const stuckAfter = 5 * time.Minute

// degraded begins what /readyz says of a part that does not work as it should.
const degraded = cniconf.Degraded

// health knows what the loops are at. A loop that waits for work is well; nothing ticks for its sake.
type health struct {
	mu    sync.Mutex
	loops []*beat
}

type beat struct {
	name  string
	mu    sync.Mutex
	since time.Time // of the work at hand; zero: it waits
}

func (h *health) loop(name string) *beat {
	b := &beat{name: name}
	h.mu.Lock()
	h.loops = append(h.loops, b)
	h.mu.Unlock()
	return b
}

func (b *beat) begin() { b.set(time.Now()) }
func (b *beat) end()   { b.set(time.Time{}) }

func (b *beat) set(t time.Time) {
	b.mu.Lock()
	b.since = t
	b.mu.Unlock()
}

// stuck names the loops that have been at one thing for too long.
func (h *health) stuck(now time.Time) (names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.loops {
		b.mu.Lock()
		if !b.since.IsZero() && now.Sub(b.since) > stuckAfter {
			names = append(names, b.name)
		}
		b.mu.Unlock()
	}
	return names
}

func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.o.Registry, promhttp.HandlerOpts{MaxRequestsInFlight: 2}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if stuck := a.health.stuck(time.Now()); len(stuck) > 0 {
			http.Error(w, fmt.Sprintf("stuck: %v", stuck), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	// Degraded is ready: an agent without its runtime still expires and counts, and a restart would not help.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if s := a.leaving.Load(); s != nil {
			fmt.Fprintf(w, "ok\n%s\n", *s)
			return
		}
		if !a.reconciled.Load() {
			http.Error(w, "the first reconciliation has not been tried yet", http.StatusServiceUnavailable)
			return
		}
		nri, cri := "connected", "ok"
		if !a.nriUp.Load() {
			nri = degraded + "not connected"
		}
		if s := a.criState.Load(); s != nil && *s != "" {
			cri = degraded + *s
		}
		fmt.Fprintf(w, "ok\nnri: %s\ncri: %s\ncni: %s\n", nri, cri, a.keeper.Line())
		if s := a.newer.Load(); s != nil && *s != "" {
			fmt.Fprintf(w, "ledger: %s%s\n", degraded, *s)
		}
		if a.api == nil {
			return
		}
		if s := a.api.Trouble(); s != "" {
			fmt.Fprintf(w, "api: %s%s\n", degraded, s)
		} else {
			fmt.Fprintln(w, "api: ok")
		}
	})
	return mux
}
