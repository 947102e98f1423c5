package placement

import (
	"crypto/tls"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
)

// What a server takes of its clients. A connection takes some 20 KiB, and one to the webhook up to a few small requests
// beside that. Further connections wait until one of them is closed.
const (
	connections = 128
	// requestWithin is how long a client may take to send a request, or to begin one, answerWithin to read the answer too.
	requestWithin = 3 * time.Second
	answerWithin  = 15 * time.Second
	idleFor       = 10 * time.Second
	// requestsOfConnection is for HTTP/2, by which an API server asks about several pods at a time. It opens further
	// connections if that is not enough. Of each so many bytes wait to be read, what a client sends before it knows any
	// limit, and of all together more: one that is not read must not hold up the others.
	requestsOfConnection = 8
	unreadOfRequest      = 64 << 10
	unreadOfConnection   = 2 * requestsOfConnection * unreadOfRequest
)

// addServer has every replica serve h on an address, by TLS unless config is nil; "0": nowhere. The manager's own
// servers have no limits.
func addServer(mgr ctrl.Manager, name, address string, h http.Handler, config *tls.Config) error {
	if address == "0" {
		return nil
	}
	s, err := newServer(name, address, h, config)
	if err != nil {
		return err
	}
	return mgr.Add(s)
}

// newServer listens on an address.
func newServer(name, address string, h http.Handler, config *tls.Config) (*manager.Server, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	l = netutil.LimitListener(l, connections)
	if config != nil {
		l = tls.NewListener(l, config)
	}
	shutdown := time.Second // more than a probe, a scrape or a review takes
	return &manager.Server{Name: name, Listener: l, ShutdownTimeout: &shutdown, Server: &http.Server{
		Handler: h, MaxHeaderBytes: 8 << 10,
		ReadTimeout: requestWithin, WriteTimeout: answerWithin, IdleTimeout: idleFor,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: requestsOfConnection,
			MaxReceiveBufferPerConnection: unreadOfConnection, MaxReceiveBufferPerStream: unreadOfRequest},
	}}, nil
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
