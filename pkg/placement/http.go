package placement

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/stayput/stayput/pkg/httplimit"
)

// addServer has every replica serve h on an address; "0": nowhere. The manager's own servers have no limits.
func addServer(mgr ctrl.Manager, name, address string, h http.Handler) error {
	if address == "0" {
		return nil
	}
	s, err := newServer(name, address, h)
	if err != nil {
		return err
	}
	return mgr.Add(s)
}

// newServer listens on an address.
func newServer(name, address string, h http.Handler) (*manager.Server, error) {
	l, err := httplimit.Listen(address)
	if err != nil {
		return nil, err
	}
	shutdown := time.Second // more than a probe or a scrape takes
	return &manager.Server{Name: name, Server: httplimit.Server(h), Listener: l, ShutdownTimeout: &shutdown}, nil
}

// gatherTimeout is how long a page of metrics may take, Prometheus' default scrape_timeout.
const gatherTimeout = 10 * time.Second

// metricsHandler serves /metrics. A page is complete before the first byte goes out, so that a slow reader occupies no
// place in flight.
func metricsHandler(of prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", http.TimeoutHandler(
		promhttp.HandlerFor(of, promhttp.HandlerOpts{MaxRequestsInFlight: 2}),
		gatherTimeout, "the metrics were not gathered in time"))
	return mux
}

// healthHandler serves /healthz, which a process that lives answers, and /readyz, for which ready decides.
func healthHandler(ready healthz.Checker) http.Handler {
	mux := http.NewServeMux()
	for path, checks := range map[string]map[string]healthz.Checker{
		"/healthz": {"ping": healthz.Ping}, "/readyz": {"caches": ready},
	} {
		h := http.StripPrefix(path, &healthz.Handler{Checks: checks})
		mux.Handle("GET "+path, h)
		mux.Handle("GET "+path+"/", h) // a single check
	}
	return mux
}
