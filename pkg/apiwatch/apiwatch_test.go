package apiwatch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// server is an API server, and what a loop was told of it.
type server struct {
	err    error         // of lists
	hangs  bool          // lists do, until their context ends
	busy   error         // of watches
	busyAt error         // of the version
	takes  time.Duration // a list
	w      *watch.RaceFreeFakeWatcher
	cycles []Cycle
	events []watch.EventType
	notes  []error
	bad    error    // of events
	now    string   // the version, empty if the loop does not ask
	from   []string // the versions of watches
}

// follow runs a test in a bubble of time, with a loop.
func follow(t *testing.T, s *server, test func()) {
	synctest.Test(t, func(t *testing.T) {
		loop := Loop{
			What: "things",
			List: func(ctx context.Context, c Cycle) (string, error) {
				s.cycles = append(s.cycles, c)
				time.Sleep(s.takes)
				if s.hangs {
					<-ctx.Done()
					return "", ctx.Err()
				}
				return "7", s.err
			},
			Watch: func(ctx context.Context, version string) (watch.Interface, error) {
				s.from = append(s.from, version)
				if s.busy != nil {
					return nil, fmt.Errorf("watching: %w", s.busy)
				}
				w := watch.NewRaceFreeFake()
				s.w = w
				context.AfterFunc(ctx, w.Stop)
				return w, ctx.Err()
			},
			Event: func(e watch.Event) error {
				s.events = append(s.events, e.Type)
				return s.bad
			},
			Note: func(err error) { s.notes = append(s.notes, err) },
		}
		if s.now != "" {
			loop.Version = func(ctx context.Context) (string, error) { return s.now, errors.Join(s.err, s.busyAt, ctx.Err()) }
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); loop.Run(ctx) }()
		synctest.Wait()
		test()
		cancel()
		<-done
	})
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestAWatchThatEndsIsFollowedByAList(t *testing.T) {
	s := &server{}
	follow(t, s, func() {
		s.w.Add(&metav1.Status{})
		s.w.Action(watch.Bookmark, &metav1.Status{})
		s.w.Delete(&metav1.Status{})
		pass(Timeout)
		s.w.Stop()
		pass(100 * time.Millisecond)
		if len(s.cycles) != 2 || !s.cycles[0].Interrupted || s.cycles[1].Interrupted {
			t.Errorf("the cycles are %+v", s.cycles)
		}
		if len(s.events) != 2 || s.events[0] != watch.Added || s.events[1] != watch.Deleted {
			t.Errorf("the events are %v", s.events)
		}
		if !slices.Equal(s.from, []string{"7", "7"}) {
			t.Errorf("watches from versions %v", s.from)
		}
	})
	for _, err := range s.notes {
		if err != nil {
			t.Errorf("noted %v", err)
		}
	}
}

func TestAWatchThatEndsAtOnceIsFollowedByAPause(t *testing.T) {
	for name, s := range map[string]*server{
		"of few objects":           {},
		"whose list takes a while": {takes: 2 * shortest},
		"of many objects":          {now: "12"},
	} {
		follow(t, s, func() {
			for range 600 {
				if s.w != nil {
					s.w.Stop()
				}
				pass(100 * time.Millisecond)
			}
			if n := len(s.from); n > 20 || n < 4 {
				t.Errorf("a watch %s: %d in a minute", name, n)
			}
			if n := len(s.cycles); s.now != "" && n != 1 {
				t.Errorf("a watch %s: %d lists", name, n)
			}
		})
	}
}

func TestErrorsAreNotedAndTriedAgainEverLater(t *testing.T) {
	down := errors.New("down")
	s := &server{err: down}
	follow(t, s, func() {
		pass(10 * time.Minute)
		n := len(s.cycles)
		if most := 10*60/10 + 6; n > most || n < 10 {
			t.Errorf("%d cycles in ten minutes", n)
		}
		if s.notes[n-1] != down || !s.cycles[n-1].Interrupted {
			t.Errorf("noted %v of %+v", s.notes[n-1], s.cycles[n-1])
		}
		s.err = nil
		pass(20 * time.Second)
		if last := s.notes[len(s.notes)-1]; last != nil {
			t.Errorf("watching, noted %v", last)
		}

		s.w.Error(&metav1.Status{Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
		pass(time.Second)
		if last := s.notes[len(s.notes)-2]; !apierrors.IsResourceExpired(last) {
			t.Errorf("a version that has expired is noted as %v", last)
		}
		s.bad = down
		s.w.Add(&metav1.Status{})
		pass(10 * time.Millisecond)
		if last := s.notes[len(s.notes)-1]; last != down {
			t.Errorf("an object that cannot be taken over is noted as %v", last)
		}
	})
}

func TestAListThatHangsIsMadeAgain(t *testing.T) {
	s := &server{hangs: true}
	follow(t, s, func() {
		s.hangs = false
		pass(longest + 5*time.Second)
		if len(s.cycles) != 2 || len(s.from) != 1 {
			t.Errorf("%d lists and %d watches, want a second list and a watch", len(s.cycles), len(s.from))
		}
	})
}

func TestAListIsMadeAgainOnceItIsAskedFor(t *testing.T) {
	s := &server{}
	follow(t, s, func() {
		pass(time.Minute)
		s.cycles[0].Again()
		pass(100 * time.Millisecond)
		if len(s.cycles) != 2 || !s.cycles[1].Interrupted {
			t.Fatalf("the cycles are %+v", s.cycles)
		}
		s.cycles[0].Again() // too late
		pass(time.Minute)
		if len(s.cycles) != 2 {
			t.Errorf("the cycles are %+v", s.cycles)
		}
		for _, err := range s.notes {
			if err != nil {
				t.Errorf("noted %v", err)
			}
		}
	})
}

func TestAWatchOfManyObjectsGoesOnWhereItEnded(t *testing.T) {
	version := func(of string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ResourceVersion: of}}
	}
	s := &server{now: "12"}
	follow(t, s, func() {
		ends := func(lists int, from ...string) {
			t.Helper()
			pass(Timeout)
			s.w.Stop()
			pass(100 * time.Millisecond)
			if len(s.cycles) != lists || !slices.Equal(s.from, from) {
				t.Errorf("%d lists, watches from %v; want %d and %v", len(s.cycles), s.from, lists, from)
			}
		}
		s.w.Modify(version("9"))
		ends(1, "7", "9")
		s.w.Action(watch.Bookmark, version("12"))
		ends(1, "7", "9", "12")
		ends(1, "7", "9", "12", "12")
		s.now = "11" // by a backup
		ends(2, "7", "9", "12", "12", "7")
		ends(2, "7", "9", "12", "12", "7", "7")
		s.cycles[1].Again() // also after a watch has gone on
		pass(100 * time.Millisecond)
		if len(s.cycles) != 3 {
			t.Errorf("%d lists, want another one", len(s.cycles))
		}
		for range int(listEvery/Timeout) - 1 {
			ends(3, append(s.from, s.from[len(s.from)-1])...)
		}
		ends(4, append(s.from, "7")...) // though nothing has failed
		s.err = errors.New("down")
		pass(Timeout)
		s.w.Stop()
		pass(100 * time.Millisecond)
		s.err = nil
		pass(10 * time.Second)
		if len(s.cycles) < 5 {
			t.Errorf("%d lists, want one after an error", len(s.cycles))
		}
	})
}

// If each agent listed again because its watch was refused, an API server that all of them ask would be ever busier.
func TestAWatchThatIsRefusedIsNoReasonForAList(t *testing.T) {
	busy := apierrors.NewTooManyRequestsError("busy")
	s := &server{now: "12", busy: busy, busyAt: busy}
	follow(t, s, func() {
		pass(time.Minute)
		if len(s.cycles) != 1 || len(s.from) != 1 || !apierrors.IsTooManyRequests(s.notes[len(s.notes)-1]) {
			t.Errorf("%d lists, watches from %v, noted %v", len(s.cycles), s.from, s.notes)
		}
		if n := len(s.notes); n < 6 || n > 20 {
			t.Errorf("%d requests in a minute", n)
		}
		s.busyAt = nil // of watches only
		pass(time.Minute)
		if n := len(s.from); len(s.cycles) != 1 || n < 4 || n > 12 {
			t.Errorf("%d lists, watches from %v", len(s.cycles), s.from)
		}
		s.busy, s.from = nil, nil
		pass(20 * time.Second)
		if len(s.cycles) != 1 || !slices.Equal(s.from, []string{"7"}) || s.notes[len(s.notes)-1] != nil {
			t.Errorf("%d lists, watches from %v, noted %v", len(s.cycles), s.from, s.notes)
		}
		s.cycles[0].Doubt() // the watch has begun later than the list
		pass(time.Second)
		if len(s.cycles) != 2 {
			t.Errorf("%d lists, want another one", len(s.cycles))
		}
	})
	s = &server{now: "12", busy: busy, busyAt: busy}
	follow(t, s, func() {
		pass(10 * time.Second)
		s.cycles[0].Doubt()
		s.busy, s.busyAt = nil, nil
		pass(20 * time.Second)
		if len(s.cycles) != 2 {
			t.Errorf("%d lists, want another one, which was asked for meanwhile", len(s.cycles))
		}
	})
	s = &server{now: "6", busy: busy, busyAt: busy}
	follow(t, s, func() {
		pass(10 * time.Second)
		s.busy, s.busyAt = nil, nil // and etcd was restored from a backup
		pass(20 * time.Second)
		if len(s.cycles) < 2 {
			t.Errorf("%d lists, watches from %v", len(s.cycles), s.from)
		}
	})
	s = &server{busy: busy} // the list is cheap
	follow(t, s, func() {
		pass(time.Minute)
		if len(s.cycles) < 2 || len(s.cycles) != len(s.from) {
			t.Errorf("%d lists, watches from %v", len(s.cycles), s.from)
		}
	})
}
