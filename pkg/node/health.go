package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// stuckAfter is when a loop that works on one thing counts as dead: longer than any sum of its timeouts, the
// plugin's 60 s on a network's lock included.
const stuckAfter = 5 * time.Minute

// gatherTimeout is how long a page of metrics may take, Prometheus' default scrape_timeout.
const gatherTimeout = 10 * time.Second

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
	since time.Time // of the work at hand, zero if it waits
}

func (h *health) loop(name string) *beat {
	b := &beat{name: name}
	h.mu.Lock()
	h.loops = append(h.loops, b)
	h.mu.Unlock()
	return b
}

// watched returns what does work of these loops, and knows what they are at.
func (h *health) watched(names ...string) func(name string, work func()) {
	beats := map[string]*beat{}
	for _, name := range names {
		beats[name] = h.loop(name)
	}
	return func(name string, work func()) {
		beats[name].begin()
		defer beats[name].end()
		work()
	}
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

// Handler serves /healthz, /readyz and /metrics.
func (a *Agent) Handler() http.Handler {
	mux := http.NewServeMux()
	// A page is complete before the first byte goes out, so that a slow reader occupies no place in flight.
	mux.Handle("GET /metrics", http.TimeoutHandler(
		promhttp.HandlerFor(a.o.Registry, promhttp.HandlerOpts{MaxRequestsInFlight: 2}),
		gatherTimeout, "gathering metrics timed out"))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if stuck := a.health.stuck(time.Now()); len(stuck) > 0 {
			http.Error(w, fmt.Sprintf("stuck: %v", stuck), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	// Degraded is ready: an agent without its runtime still expires and counts, and a restart would not help.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		s := a.status()
		code := http.StatusOK
		if !s.Ready {
			code = http.StatusServiceUnavailable
		}
		if r.URL.Query().Get("format") == "json" {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(s)
			return
		}
		w.WriteHeader(code)
		if s.Ready {
			fmt.Fprintln(w, "ok")
		}
		if s.Message != "" {
			fmt.Fprintln(w, s.Message)
		}
		for _, part := range []struct{ name, says string }{
			{"nri", s.NRI}, {"cri", s.CRI}, {"annotations", s.Annotations}, {"cni", s.CNI}, {"ledger", s.Ledger}, {"api", s.API},
		} {
			if part.says != "" {
				fmt.Fprintf(w, "%s: %s\n", part.name, part.says)
			}
		}
	})
	return mux
}

// status is what the agent says of itself, to people and programs.
func (a *Agent) status() inspection.Status {
	if s := a.uninstaller.Status(); s.Message != "" {
		return inspection.Status{Ready: !s.Done, Message: s.Message} // no longer ready, it serves no pod
	}
	if !a.reconciler.tried.Load() {
		return inspection.Status{Message: "no reconciliation yet"}
	}
	cni := a.keeper.Status()
	s := inspection.Status{
		Ready: true, NRI: "connected", CRI: "ok", Annotations: a.unseen.status(),
		CNI: a.keeper.Line(), CNIState: string(cni.State), CNIMessage: cni.Message,
	}
	switch {
	case a.nriUp.Load():
	case a.o.NRISocket == "":
		s.NRI = inspection.NRIOff
	default:
		s.NRI = degraded + "not connected"
		if _, err := os.Stat(a.o.NRISocket); errors.Is(err, fs.ErrNotExist) {
			s.NRI += ", there is no " + a.o.NRISocket
		}
	}
	if why := a.reconciler.criErr.Load(); why != nil && *why != "" {
		s.CRI = degraded + *why
	}
	if why := a.book.newer.Load(); why != nil && *why != "" {
		s.Ledger = degraded + *why
	}
	if a.api != nil {
		s.API = "ok"
		for _, why := range []string{a.pools.Trouble(), a.api.Trouble()} {
			if why != "" {
				s.API = degraded + why
			}
		}
	}
	return s
}
