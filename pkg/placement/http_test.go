package placement

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stayput/stayput/test/hoard"
)

func TestAClientCannotHoardTheControllersConnections(t *testing.T) {
	s, err := newServer("test", "127.0.0.1:0", metricsHandler(prometheus.NewRegistry()), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Start(ctx) }()
	hoard.Connections(t, s.Listener.Addr().String(), connections)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
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
