package uninstall

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/test/must"
)

// server is an API server with one object that refuses, ends watches and goes back in time on demand, which a real
// one does not. test/cluster has the rest.
type server struct {
	t *testing.T
	*httptest.Server
	mu      sync.Mutex
	uid     types.UID // empty: there is no object
	version int
	refuse  int // status code, 0 if it does not
	watches map[chan metav1.WatchEvent]bool
	lists   int
}

func start(t *testing.T) *server {
	s := &server{t: t, version: 100, watches: map[chan metav1.WatchEvent]bool{}}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		s.endWatches()
		s.Close()
	})
	return s
}

func (s *server) object() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: ConfigMap, UID: s.uid, ResourceVersion: strconv.Itoa(s.version)},
	}
}

func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	if want := "metadata.name=" + ConfigMap; r.URL.Path != "/api/v1/namespaces/ns/configmaps" ||
		r.URL.Query().Get("fieldSelector") != want {
		s.t.Errorf("asked for %s", r.URL)
	}
	w.Header().Set("Content-Type", "application/json")
	s.mu.Lock()
	if s.refuse != 0 {
		code := s.refuse
		s.mu.Unlock()
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code),
		})
		return
	}
	if r.URL.Query().Get("watch") == "" {
		s.lists++
		l := metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
		}
		l.ResourceVersion = strconv.Itoa(s.version)
		if s.uid != "" {
			l.Items = append(l.Items, *s.object())
		}
		s.mu.Unlock()
		json.NewEncoder(w).Encode(l)
		return
	}
	ch := make(chan metav1.WatchEvent, 10)
	s.watches[ch] = true
	if s.uid != "" && r.URL.Query().Get("resourceVersion") != strconv.Itoa(s.version) { // what came between list and watch
		ch <- metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Object: s.object()}}
	}
	s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e, ok := <-ch:
			if !ok {
				return
			}
			json.NewEncoder(w).Encode(e)
			w.(http.Flusher).Flush()
		}
	}
}

func (s *server) endWatches() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.watches {
		close(ch)
	}
	clear(s.watches)
}

// watched waits for a watch.
func (s *server) watched() {
	s.t.Helper()
	must.Eventually(s.t, "a watch", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.watches) > 0
	})
}

// set changes the object and sends the event to all watches.
func (s *server) set(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	e := metav1.WatchEvent{Type: "ADDED"}
	if uid == "" {
		e.Type = "DELETED"
	} else {
		s.uid = uid
	}
	var err error
	if e.Object.Raw, err = json.Marshal(s.object()); err != nil {
		s.t.Error(err)
	}
	s.uid = uid
	for ch := range s.watches {
		ch <- e
	}
}

// silently changes something without an event.
func (s *server) silently(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *server) listed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lists
}

// observe starts a Signal for the installation as an earlier process knew it.
func observe(t *testing.T, s *server, known Object) *Signal {
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	signal, err := NewSignal(&rest.Config{Host: s.URL}, "ns", known, log)
	if err != nil {
		t.Fatal(err)
	}
	go signal.Run(t.Context())
	return signal
}

// next waits for the next change, which must lead to this.
func next(t *testing.T, signal *Signal, state State, uid types.UID) {
	t.Helper()
	select {
	case <-signal.Changed():
		if got := signal.Status(); got.State != state || got.Object.UID != uid || time.Since(got.Since) > time.Minute {
			t.Fatalf("the status is %+v, want %v of %q, just now", got, state, uid)
		}
	case <-time.After(30 * time.Second): // bounds a test that hangs
		t.Fatalf("no change, want %v of %q", state, uid)
	}
}

func unchanged(t *testing.T, signal *Signal) {
	t.Helper()
	select {
	case <-signal.Changed():
		t.Fatalf("the status became %+v", signal.Status())
	default:
	}
}

func TestAWatchedDeletionIsASignal(t *testing.T) {
	s := start(t)
	s.uid = "a"
	signal := observe(t, s, Object{})
	next(t, signal, Present, "a")
	s.watched()
	s.set("a") // modified
	s.set("")
	next(t, signal, Deleted, "a")
	s.set("b")
	next(t, signal, Present, "b")
}

func TestADeletionBetweenTwoWatchesIsASignal(t *testing.T) {
	s := start(t)
	s.uid = "a"
	signal := observe(t, s, Object{})
	next(t, signal, Present, "a")
	s.watched()
	s.silently(func() { s.uid = ""; s.version++ })
	s.endWatches()
	next(t, signal, Deleted, "a")
}

func TestTheAbsenceOfAnObjectThatAnEarlierProcessKnewIsASignal(t *testing.T) {
	next(t, observe(t, start(t), Object{UID: "a", Version: "7"}), Deleted, "a")
}

func TestTheAbsenceOfAnObjectNeverObservedIsNoSignal(t *testing.T) {
	s := start(t)
	signal := observe(t, s, Object{})
	must.Eventually(t, "the third list", func() bool { s.endWatches(); return s.listed() >= 3 })
	unchanged(t, signal)
	if got := signal.Status(); got.State != Unknown {
		t.Errorf("the status is %+v", got)
	}
}

func TestAnErrorIsNoSignal(t *testing.T) {
	s := start(t)
	s.uid = "a"
	signal := observe(t, s, Object{})
	next(t, signal, Present, "a")
	s.watched()
	for _, code := range []int{401, 403, 404, 410, 429, 500, 503} {
		s.silently(func() { s.refuse = code; s.uid = "" })
		s.endWatches()
		for range 3 {
			if got := signal.Ask(t.Context()); got.State != Present {
				t.Errorf("after %d the status is %+v", code, got)
			}
		}
		unchanged(t, signal)
	}
	s.silently(func() { s.refuse = 0 })
	next(t, signal, Deleted, "a")
}

func TestAnAPIServerRestoredFromABackupIsNoSignal(t *testing.T) {
	s := start(t)
	s.uid = "a"
	signal := observe(t, s, Object{})
	next(t, signal, Present, "a")
	s.watched()
	s.silently(func() { s.uid, s.version = "", 50 })
	s.endWatches()
	next(t, signal, Unknown, "")
	// However far its resource versions get from there.
	s.silently(func() { s.version = 5000 })
	if got := signal.Ask(t.Context()); got.State != Unknown {
		t.Errorf("the status is %+v", got)
	}
	s.set("b") // installed again
	s.endWatches()
	next(t, signal, Present, "b")
}

func TestTheDeletionOfAnotherObjectOfThatNameIsNoSignal(t *testing.T) {
	s := start(t)
	s.uid = "a"
	signal := observe(t, s, Object{})
	next(t, signal, Present, "a")
	signal.deleted("older")
	unchanged(t, signal)
}
