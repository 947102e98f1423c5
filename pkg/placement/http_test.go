package placement

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stayput/stayput/test/hoard"
	"github.com/stayput/stayput/test/must"
)

// serve starts a server, changed if change is not nil, and returns its address.
func serve(t *testing.T, h http.Handler, config *tls.Config, change func(*http.Server)) string {
	t.Helper()
	s, err := newServer("test", "127.0.0.1:0", h, config)
	must.Do(t, err)
	if change != nil {
		change(s.Server)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		must.Do(t, <-ended)
	})
	return s.Listener.Addr().String()
}

func TestAClientCannotHoardTheControllersConnections(t *testing.T) {
	hoard.Connections(t, serve(t, metricsHandler(prometheus.NewRegistry()), nil, nil), connections)
}

// An API server asks about several pods by one connection.
func TestARequestThatWaitsHoldsUpNoOtherOfItsConnection(t *testing.T) {
	lends := httptest.NewTLSServer(nil)
	defer lends.Close()
	entered, leave := make(chan struct{}, requestsOfConnection), make(chan struct{})
	at := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/waits" {
			entered <- struct{}{}
			<-leave
		}
		_, _ = io.Copy(io.Discard, r.Body)
	}), &tls.Config{Certificates: lends.TLS.Certificates, NextProtos: []string{"h2"}},
		func(s *http.Server) { s.ReadTimeout = 0 }) // by which it would go on
	dials := 0
	client := &http.Client{Timeout: time.Minute} // bounds a test that hangs
	client.Transport = &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			dials++
			return (&net.Dialer{}).DialContext(ctx, network, address)
		}}
	defer client.CloseIdleConnections()
	post := func(path string) error {
		answer, err := client.Post("https://"+at+path, "application/json", strings.NewReader(strings.Repeat(" ", 1<<20)))
		if err != nil {
			return err
		}
		return answer.Body.Close()
	}
	must.Do(t, post("/"))
	var all sync.WaitGroup
	for range requestsOfConnection - 1 {
		all.Go(func() { _ = post("/waits") })
		<-entered
	}
	err := post("/")
	close(leave)
	all.Wait()
	if err != nil || dials != 1 {
		t.Errorf("by %d connections: %v", dials, err)
	}
}

func TestTheControllersHealthIsThatOfItsCaches(t *testing.T) {
	ready := errors.New("caches have not synced yet")
	h := healthHandler(func(*http.Request) error { return ready })
	get := func(path string) (int, string) {
		r := httptest.NewRecorder()
		h.ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.Code, string(b)
	}
	for _, path := range []string{"/healthz", "/healthz/", "/healthz/ping"} {
		if code, says := get(path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, says)
		}
	}
	if code, says := get("/readyz?verbose"); code != http.StatusInternalServerError ||
		!strings.Contains(says, "caches failed") {
		t.Errorf("before its caches are filled: %d %s", code, says)
	}
	ready = nil
	for _, path := range []string{"/readyz", "/readyz/caches"} {
		if code, says := get(path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, says)
		}
	}
}
