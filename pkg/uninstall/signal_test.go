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
)

// server is an API server with one object, for what the real one does not do at a test's word: to refuse, to end a
// watch, to go back in time. test/cluster has the rest.
type server struct {
	t *testing.T
	*httptest.Server
	mu      sync.Mutex
	uid     types.UID // empty: there is no object
	version int
	refuse  int // status code; 0: it does not
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
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: Name, UID: s.uid, ResourceVersion: strconv.Itoa(s.version)},
	}
}

func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	if want := "metadata.name=" + Name; r.URL.Path != "/api/v1/namespaces/ns/configmaps" || r.URL.Query().Get("fieldSelector") != want {
		s.t.Errorf("asked for %s", r.URL)
	}
	w.Header().Set("Content-Type", "application/json")
	s.mu.Lock()
	if s.refuse != 0 {
		code := s.refuse
		s.mu.Unlock()
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code)})
		return
	}
	if r.URL.Query().Get("watch") == "" {
		s.lists++
		l := metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}}
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

// watched waits until somebody watches.
func (s *server) watched() {
	s.t.Helper()
	eventually(s.t, "a watch", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.watches) > 0
	})
}

// set changes what there is, and says so to those who watch.
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

// silently changes something that nobody is told of.
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

type change struct {
	state State
	uid   types.UID
}

// follow starts a follower and returns it with what it says.
func follow(t *testing.T, s *server, seen Seen) (*Follower, chan change) {
	f, err := New(&rest.Config{Host: s.URL}, "ns", seen, slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	said := make(chan change, 100)
	f.Changed = func(s State, seen Seen) { said <- change{s, seen.UID} }
	go f.Run(t.Context())
	return f, said
}

func next(t *testing.T, said chan change, want change) {
	t.Helper()
	select {
	case got := <-said:
		if got != want {
			t.Fatalf("it says %+v, want %+v", got, want)
		}
	case <-time.After(30 * time.Second): // bounds a test that hangs
		t.Fatalf("it says nothing, want %+v", want)
	}
}

func nothing(t *testing.T, said chan change) {
	t.Helper()
	select {
	case got := <-said:
		t.Fatalf("it says %+v", got)
	default:
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func TestADeletionThatWasWatchedIsTold(t *testing.T) {
	s := start(t)
	s.uid = "a"
	_, said := follow(t, s, Seen{})
	next(t, said, change{Here, "a"})
	s.watched()
	s.set("a") // modified
	s.set("")
	next(t, said, change{Gone, "a"})
	s.set("b")
	next(t, said, change{Here, "b"})
}

func TestADeletionWhileNobodyWatchedIsSeenInTheNextList(t *testing.T) {
	s := start(t)
	s.uid = "a"
	_, said := follow(t, s, Seen{})
	next(t, said, change{Here, "a"})
	s.watched()
	s.silently(func() { s.uid = ""; s.version++ })
	s.endWatches()
	next(t, said, change{Gone, "a"})
}

func TestAnObjectThatAnEarlierProcessSawMayBeGone(t *testing.T) {
	s := start(t)
	_, said := follow(t, s, Seen{"a", "7"})
	next(t, said, change{Gone, "a"})
}

func TestAnObjectThatNobodySawIsNotGone(t *testing.T) {
	s := start(t)
	f, said := follow(t, s, Seen{})
	eventually(t, "the third list", func() bool { s.endWatches(); return s.listed() >= 3 })
	nothing(t, said)
	if state, _ := f.State(); state != Unknown {
		t.Errorf("it is %v", state)
	}
}

func TestNoErrorIsASign(t *testing.T) {
	s := start(t)
	s.uid = "a"
	f, said := follow(t, s, Seen{})
	next(t, said, change{Here, "a"})
	s.watched()
	for _, code := range []int{401, 403, 404, 410, 429, 500, 503} {
		s.silently(func() { s.refuse = code; s.uid = "" })
		s.endWatches()
		for range 3 {
			if got := f.Ask(t.Context()); got != Here {
				t.Errorf("after %d it is %v", code, got)
			}
		}
		nothing(t, said)
	}
	s.silently(func() { s.refuse = 0 })
	next(t, said, change{Gone, "a"})
}

func TestAnAPIServerThatWentBackInTimeIsNoSign(t *testing.T) {
	s := start(t)
	s.uid = "a"
	f, said := follow(t, s, Seen{})
	next(t, said, change{Here, "a"})
	s.watched()
	s.silently(func() { s.uid, s.version = "", 50 })
	s.endWatches()
	next(t, said, change{Unknown, ""})
	// However far it comes from there.
	s.silently(func() { s.version = 5000 })
	if got := f.Ask(t.Context()); got != Unknown {
		t.Errorf("it is %v", got)
	}
	s.set("b") // until it is installed again
	s.endWatches()
	next(t, said, change{Here, "b"})
}

func TestTheDeletionOfAnotherObjectOfThatNameIsNoSign(t *testing.T) {
	s := start(t)
	s.uid = "a"
	f, said := follow(t, s, Seen{})
	next(t, said, change{Here, "a"})
	f.deleted("older")
	nothing(t, said)
}
