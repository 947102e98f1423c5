package node

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/node/apiserver"
	"github.com/stayput/stayput/pkg/node/retainedip"
	"github.com/stayput/stayput/pkg/spool"
	"github.com/stayput/stayput/test/nodetest"
)

func (w *world) get(path string) (code int, body string) {
	w.t.Helper()
	r := httptest.NewRecorder()
	w.a.Handler().ServeHTTP(r, httptest.NewRequestWithContext(w.t.Context(), http.MethodGet, path, nil))
	b, err := io.ReadAll(r.Body)
	check(w.t, err)
	return r.Code, string(b)
}

func TestItIsReadyOnceItHasTriedToReconcileAndSaysWhatIsDegraded(t *testing.T) {
	w := newWorld(t)
	if code, body := w.get("/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("before: %d %s", code, body)
	}
	w.runtime.Fail(nodetest.ErrRuntime)
	w.a.reconciler.reconcileAndReport(t.Context())
	code, body := w.get("/readyz")
	if code != http.StatusOK || !strings.Contains(body, "nri: degraded") || !strings.Contains(body, "cri: degraded") ||
		!strings.Contains(body, nodetest.ErrRuntime.Error()) {
		t.Errorf("without a runtime: %d %s", code, body)
	}
	w.runtime.Fail(nil)
	w.a.Connected(true)
	w.a.reconciler.reconcileAndReport(t.Context())
	if code, body := w.get("/readyz"); code != http.StatusOK || strings.Contains(body, "degraded") {
		t.Errorf("with one: %d %s", code, body)
	}
	w.a.Connected(false)
	if code, body := w.get("/readyz"); code != http.StatusOK || !strings.Contains(body, "nri: degraded") {
		t.Errorf("without NRI again: %d %s", code, body)
	}
}

func TestItIsHealthyUnlessALoopIsStuck(t *testing.T) {
	w := newWorld(t)
	b := w.a.health.loop("test")
	if code, _ := w.get("/healthz"); code != http.StatusOK {
		t.Errorf("waiting for work: %d", code)
	}
	b.begin()
	if code, _ := w.get("/healthz"); code != http.StatusOK {
		t.Errorf("at work: %d", code)
	}
	b.set(time.Now().Add(-stuckAfter - time.Second))
	if code, body := w.get("/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "test") {
		t.Errorf("stuck: %d %s", code, body)
	}
	b.end()
	w.a.health.watched("looks")("looks", func() {
		b := w.a.health.loops[len(w.a.health.loops)-1]
		b.set(time.Now().Add(-stuckAfter - time.Second))
		if code, body := w.get("/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "looks") {
			t.Errorf("a look that does not end: %d %s", code, body)
		}
	})
	if code, _ := w.get("/healthz"); code != http.StatusOK {
		t.Errorf("waiting again: %d", code)
	}
}

func TestTheMetricsFollowTheConventionsOfPrometheus(t *testing.T) {
	w := newWorld(t)
	api, err := apiserver.New(&rest.Config{Host: "http://192.0.2.1"}, "n1")
	check(t, err)
	retainedip.New(retainedip.Options{API: api, Registry: w.a.o.Registry}) // as in a cluster
	w.retained("c1")                                                       // so that the metrics with labels are there
	w.clock.Pass(configureTime)
	s := w.sandbox("c2", "web-0", nil)
	w.add(s)
	w.a.spool.take(t.Context())
	w.add(w.sandbox("c3", "other", nil))
	check(t, w.a.spool.spool.Observe(spool.DelRetained, 2*time.Millisecond))
	w.a.reconciler.reconcileAndReport(t.Context())
	w.a.book.refresh()
	w.a.StopPodSandbox(s)
	code, text := w.get("/metrics")
	if code != http.StatusOK {
		t.Fatalf("%d %s", code, text)
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	check(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	for _, line := range []string{
		`stayput_agent_nri_hook_duration_seconds_count{hook="StopPodSandbox"} 1`,
		`stayput_agent_nri_hook_duration_seconds_count{hook="RunPodSandbox"} 0`,
		`stayput_addresses{network="pods",state="bound"} 2`,
		`stayput_addresses{network="pods",state="retained"} 0`,
		`stayput_restores_total{network="pods"} 1`,
		`stayput_restore_misses_total{network="pods",reason="range_changed"} 0`,
		`stayput_restore_misses_total{network="pods",reason="other"} 0`,
		`stayput_retentions_refused_total{network="pods"} 0`,
		`stayput_retentions_clamped_total{network="pods"} 0`,
		`stayput_retentions_expired_total{network="pods"} 0`,
		`stayput_retentions_released_total{network="pods"} 0`,
		`stayput_addresses_reclaimed_total{network="pods"} 0`,
		`stayput_range_addresses{network="pods",range="192.0.2.1-192.0.2.254"} 253`,
		`stayput_range_taken_addresses{network="pods",range="192.0.2.1-192.0.2.254"} 2`,
		`stayput_range_promised_addresses{network="pods",range="192.0.2.1-192.0.2.254"} 1`,
		`stayput_range_promisable_addresses{network="pods",range="192.0.2.1-192.0.2.254"} 126`,
		`stayput_verify_failures_total 0`,
		`stayput_invalid_annotations_total 0`,
		`stayput_agent_nri_connected 0`,
		`stayput_agent_nri_connections_total 0`,
		`stayput_agent_cri_up 1`,
		`stayput_agent_reconcile_duration_seconds_count 1`,
		`stayput_agent_errors_total{operation="reconcile"} 0`,
		`stayput_agent_errors_total{operation="cni_config"} 0`,
		`stayput_agent_queue_depth 0`,
		`stayput_agent_leak_suspects 2`,
		`stayput_agent_leak_suspects_held 0`,
		`stayput_agent_api_up 0`,
		`stayput_agent_api_writes_total{result="conflict",verb="apply"} 0`,
		`stayput_plugin_duration_seconds_bucket{command="del",result="retained",le="+Inf"} 1`,
		`stayput_plugin_duration_seconds_sum{command="del",result="retained"} 0.002`,
	} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("no line %q", line)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "stayput_") {
			t.Errorf("%s is not ours", line)
		}
	}
}

func TestTheOldestRetentionAndTheNextExpiryAreThereWhileThereAreAny(t *testing.T) {
	w := newWorld(t)
	const oldest, next = `stayput_oldest_retained_timestamp_seconds{network="pods"} `,
		`stayput_next_expiry_timestamp_seconds{network="pods"} `
	w.a.book.refresh()
	if _, text := w.get("/metrics"); strings.Contains(text, oldest) || strings.Contains(text, next) {
		t.Errorf("nothing is retained, and yet:\n%s", text)
	}
	began := w.clock.Wall()
	w.retained("c1")
	w.clock.Pass(time.Minute)
	w.a.book.refresh()
	_, text := w.get("/metrics")
	for line, want := range map[string]time.Time{oldest: began, next: began.Add(10 * time.Minute)} {
		_, after, found := strings.Cut(text, line)
		value, _, _ := strings.Cut(after, "\n")
		if got, err := strconv.ParseFloat(value, 64); !found || err != nil || got != float64(want.Unix()) {
			t.Errorf("%s%s, want %d: %v", line, value, want.Unix(), err)
		}
	}
}

func TestTheAgentEndsWhenItIsTold(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { w.a.Run(ctx); close(done) }()
	eventually(t, "ready", func() bool { code, _ := w.get("/readyz"); return code == http.StatusOK })
	cancel()
	eventually(t, "ended", func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
}

// stalled is a reader that has taken the headers of its answer and takes nothing more.
type stalled struct {
	header  http.Header
	reached chan<- struct{}
	until   <-chan struct{}
}

func (s stalled) Header() http.Header { return s.header }
func (s stalled) WriteHeader(int)     {}
func (s stalled) Write(b []byte) (int, error) {
	s.reached <- struct{}{}
	<-s.until
	return len(b), nil
}

func TestSlowReadersKeepNobodyFromTheMetrics(t *testing.T) {
	w := newWorld(t)
	handler := w.a.Handler()
	reached, until := make(chan struct{}, 100), make(chan struct{})
	var wg sync.WaitGroup
	t.Cleanup(func() {
		close(until)
		wg.Wait()
	})
	for range 5 {
		wg.Go(func() {
			handler.ServeHTTP(stalled{http.Header{}, reached, until},
				httptest.NewRequestWithContext(context.WithoutCancel(t.Context()), http.MethodGet, "/metrics", nil))
		})
		<-reached
	}
	r := httptest.NewRecorder()
	handler.ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	if r.Code != http.StatusOK {
		t.Errorf("while five readers are slow: %d %s", r.Code, r.Body)
	}
}
