package spool

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/must"
)

// taken returns what was counted, without order.
func taken(t *testing.T, d Dir) []Latency {
	t.Helper()
	all, err := d.TakeLatencies()
	must.Do(t, err)
	return all
}

func TestACommandIsTakenOnceWithItsEndingAndDuration(t *testing.T) {
	d := Dir(t.TempDir())
	must.Do(t, d.MakeLatencies())
	var want []Latency
	for i, e := range Endings() {
		want = append(want, Latency{e, time.Duration(i) * time.Millisecond})
		must.Do(t, d.Observe(e, time.Duration(i)*time.Millisecond))
	}
	must.Do(t, d.MakeLatencies()) // of an agent that starts again
	if got := taken(t, d); !slices.Equal(got, want) {
		t.Errorf("taken %v, want %v", got, want)
	}
	if got := taken(t, d); got != nil {
		t.Errorf("taken %v once more", got)
	}
}

func TestCommandsThatEndAtOnceAreAllCounted(t *testing.T) {
	d := Dir(t.TempDir())
	must.Do(t, d.MakeLatencies())
	const at, each = 16, 50
	var wg sync.WaitGroup
	for range at {
		wg.Go(func() {
			for range each {
				if err := d.Observe(DelFreed, time.Millisecond); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := taken(t, d); len(got) != at*each {
		t.Errorf("%d are taken, want %d", len(got), at*each)
	}
}

func TestWithoutAnAgentNothingIsCountedAndNoFileIsMade(t *testing.T) {
	d := Dir(t.TempDir())
	must.Do(t, d.Observe(AddOrdinary, time.Millisecond))
	if _, err := d.TakeLatencies(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("taking: %v", err)
	}
	if names, err := local.ReadDir(string(d)); err != nil || len(names) > 0 {
		t.Errorf("made %v, %v", names, err)
	}
}

func TestWhatNoAgentTakesIsBounded(t *testing.T) {
	d := Dir(t.TempDir())
	must.Do(t, os.WriteFile(d.LatencyFile(), make([]byte, mostLatencies), 0o600))
	must.Do(t, d.Observe(AddOrdinary, time.Millisecond))
	if info, err := os.Stat(d.LatencyFile()); err != nil || info.Size() != mostLatencies {
		t.Errorf("%v, %v", info, err)
	}
	if got := taken(t, d); got != nil {
		t.Errorf("taken %v", got)
	}
	must.Do(t, d.Observe(AddOrdinary, time.Millisecond))
	if got := taken(t, d); len(got) != 1 {
		t.Errorf("taken %v, want the one after", got)
	}
}

func TestALinkInThePlaceOfTheLatenciesIsNotFollowed(t *testing.T) {
	d := Dir(t.TempDir())
	other := d.path("other")
	must.Do(t, os.WriteFile(other, []byte("x"), 0o600))
	must.Do(t, os.Symlink(other, d.LatencyFile()))
	if err := d.Observe(AddOrdinary, time.Millisecond); !errors.Is(err, unix.ELOOP) {
		t.Errorf("%v", err)
	}
	must.Do(t, d.MakeLatencies())
	must.Do(t, d.Observe(AddOrdinary, time.Millisecond))
	if b, err := os.ReadFile(other); err != nil || string(b) != "x" || len(taken(t, d)) != 1 {
		t.Errorf("%q, %v", b, err)
	}
}
