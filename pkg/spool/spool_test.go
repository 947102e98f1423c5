package spool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
)

func TestEventsAreTakenOnce(t *testing.T) {
	d := Dir(filepath.Join(t.TempDir(), "state"))
	for _, m := range ledger.Misses() {
		if err := d.Report([]ledger.Event{{Reason: ledger.EventNotRestored, Miss: m, Message: "why"}}); err != nil {
			t.Fatal(err)
		}
		events, _, err := d.Take()
		if err != nil || len(events) != 1 || events[0].Miss != m || events[0].Message != "why" {
			t.Errorf("%s: took %+v, %v", m, events, err)
		}
	}
	if events, _, err := d.Take(); err != nil || events != nil {
		t.Errorf("took %+v, %v once more", events, err)
	}
}

func TestRecordsOfOtherVersionsAreRead(t *testing.T) {
	d := Dir(t.TempDir())
	for record, want := range map[string]ledger.Miss{
		`{"reason":"IPNotRestored","message":"old"}`:                            ledger.MissOther,
		`{"reason":"IPNotRestored","miss":"in_use","later":1}`:                  ledger.MissInUse,
		`{"reason":"IPNotRestored","miss":"a reason of a later version"}`:       ledger.MissOther,
		`{"reason":"IPNotRestored","key":{"network":"a"},"addrs":["10.0.0.1"]}`: ledger.MissOther,
	} {
		if err := os.MkdirAll(d.Events(), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d.Events(), "7"), []byte(record), 0o644); err != nil {
			t.Fatal(err)
		}
		events, _, err := d.Take()
		if err != nil || len(events) != 1 || events[0].Reason != ledger.EventNotRestored || events[0].Miss != want {
			t.Errorf("%s: took %+v, %v", record, events, err)
		}
	}
}

func TestWhatANetworkKeepsIsNotTheSpools(t *testing.T) {
	d := Dir(t.TempDir())
	if err := errors.Join(d.MakeLatencies(), d.Report([]ledger.Event{{Reason: ledger.EventRefused}})); err != nil {
		t.Fatal(err)
	}
	networks := []string{"latency-01234567", "latency.pods-01234567", "latency.tmp-01234567", "spool-01234567"}
	for _, n := range networks {
		if err := os.MkdirAll(filepath.Join(string(d), n, "claims"), 0o755); err != nil {
			t.Fatal(err)
		}
		if d.Keeps(filepath.Join(string(d), n)) {
			t.Errorf("%s is the spool's", n)
		}
	}
	if err := d.Remove(); err != nil {
		t.Fatal(err)
	}
	left, err := local.ReadDir(string(d))
	slices.Sort(left)
	if err != nil || !slices.Equal(left, networks) {
		t.Errorf("left are %v, %v", left, err)
	}
}

// report leaves n events, whose messages are their numbers, as one ADD: with one time.
func report(t *testing.T, d Dir, from, n int) {
	t.Helper()
	var events []ledger.Event
	for i := range n {
		events = append(events, ledger.Event{
			Reason: ledger.EventRefused, Message: strconv.Itoa(from + i), Time: time.Unix(1_700_000_000, 0),
		})
	}
	if err := d.Report(events); err != nil {
		t.Fatal(err)
	}
}

// messages returns those of the events that are taken, in their order.
func messages(t *testing.T, d Dir) (said []string, lost int) {
	t.Helper()
	events, lost, err := d.Take()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		said = append(said, e.Message)
	}
	return said, lost
}

func TestNoEventIsLostBelowTheBound(t *testing.T) {
	d := Dir(t.TempDir())
	for i := 0; i < most; i += 2 { // clamped and restored, of the same ADD
		report(t, d, i, 2)
	}
	said, lost := messages(t, d)
	if len(said) != most || lost != 0 {
		t.Fatalf("%d were taken and %d lost", len(said), lost)
	}
	for i, m := range said {
		if m != strconv.Itoa(i) {
			t.Fatalf("event %d is %s", i, m)
		}
	}
}

func TestBeyondTheBoundTheOldestEventsAreLostAndCounted(t *testing.T) {
	d := Dir(t.TempDir())
	const more = 41
	for i := range most + more {
		report(t, d, i, 1)
	}
	names, err := local.ReadDir(d.Events())
	if err != nil || len(names) != most {
		t.Errorf("there are %d files, %v", len(names), err)
	}
	said, lost := messages(t, d)
	if len(said) != most || said[0] != strconv.Itoa(more) || said[most-1] != strconv.Itoa(most+more-1) || lost != more {
		t.Errorf("%d were taken, from %s to %s, and %d are lost", len(said), said[0], said[len(said)-1], lost)
	}
	report(t, d, 0, 1)
	if said, lost := messages(t, d); len(said) != 1 || lost != 0 {
		t.Errorf("the next time: %v, %d lost", said, lost)
	}
}

func TestEventsThatAreReportedAtOnceAreAllTakenOrCountedAsLost(t *testing.T) {
	for _, each := range []int{10, most / 8} { // within the bound and beyond it
		d := Dir(t.TempDir())
		const at = 16
		var wg sync.WaitGroup
		for i := range at {
			wg.Go(func() {
				for range each {
					if err := d.Report([]ledger.Event{{Reason: ledger.EventRestored, Message: strconv.Itoa(i)}}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		said, lost := messages(t, d)
		if len(said)+lost != at*each || len(said) < min(most, at*each) || len(said) > most+at {
			t.Errorf("of %d events %d were taken and %d lost", at*each, len(said), lost)
		}
	}
}

func TestWhatAKilledProcessLeavesIsRemovedInTheEnd(t *testing.T) {
	d := Dir(t.TempDir())
	report(t, d, 0, 1)
	old := fmt.Sprintf(".%d-1-1", time.Now().Add(-time.Hour).UnixNano())
	fresh := fmt.Sprintf(".%d-1-2", time.Now().Add(time.Hour).UnixNano())
	for _, name := range []string{old, fresh} {
		if err := os.WriteFile(filepath.Join(d.Events(), name), []byte(`{"rea`), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if said, lost := messages(t, d); len(said) != 1 || lost != 0 {
		t.Errorf("taken are %v, %d lost", said, lost)
	}
	if names, err := local.ReadDir(d.Events()); err != nil || !slices.Equal(names, []string{fresh}) {
		t.Errorf("left are %v, %v", names, err)
	}
}
