package spool

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
)

func TestEventsAreTakenOnce(t *testing.T) {
	d := Dir(filepath.Join(t.TempDir(), "state"))
	for _, m := range ledger.Misses() {
		if err := d.Report([]ledger.Event{{Reason: ledger.EventNotRestored, Miss: m, Message: "why"}}); err != nil {
			t.Fatal(err)
		}
		events, err := d.Take()
		if err != nil || len(events) != 1 || events[0].Miss != m || events[0].Message != "why" {
			t.Errorf("%s: took %+v, %v", m, events, err)
		}
	}
	if events, err := d.Take(); err != nil || events != nil {
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
		events, err := d.Take()
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
	left, err := disk.ReadDir(string(d))
	slices.Sort(left)
	if err != nil || !slices.Equal(left, networks) {
		t.Errorf("left are %v, %v", left, err)
	}
}
