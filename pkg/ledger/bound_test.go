package ledger

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

// listed returns the one address that is not free.
func listed(w *world) Address {
	w.t.Helper()
	all, err := w.ledger().List()
	must.Do(w.t, err)
	if len(all) != 1 {
		w.failf("listed are %+v", all)
	}
	return all[0]
}

func TestARebootDoesNotMakeARetentionBeginAnew(t *testing.T) {
	for name, policy := range map[string]*retention.Policy{"one that ends": tenMinutes, "one without an end": forever} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			stopped(w, "web-0", policy)
			since := listed(w).Since
			w.advance(time.Minute)
			w.boot(time.Minute)
			w.prepare()
			if got := listed(w); !got.Since.Equal(since) {
				t.Errorf("retained since %s, after a reboot %s", since, got.Since)
			}
		})
	}
}

func TestWhenAnAddressWasBoundLastIsKeptWithIt(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	boundAt := func(what string, want time.Time) {
		t.Helper()
		if got := listed(w); !got.Bound.Equal(want) {
			t.Errorf("%s: bound at %s, not at %s", what, got.Bound, want)
		}
	}
	stop := func(att Attachment) {
		delete(w.netns, w.live[att].netns.Path)
		w.advance(time.Minute)
		w.del(att)
	}
	first := w.clock.now.Wall
	att, _, _ := w.add("web-0", forever)
	w.advance(time.Minute)
	boundAt("while it runs", first)
	stop(att)
	boundAt("stopped", first)
	w.advance(time.Hour)
	w.boot(time.Minute)
	boundAt("before the first command of a boot", first)
	w.prepare()
	boundAt("after a reboot", first)

	second := w.clock.now.Wall
	w.add("web-0", forever)
	boundAt("after it came back", second)
	w.advance(time.Minute)
	w.boot(time.Minute) // which ends it without a DEL
	w.prepare()
	boundAt("after a power loss", second)

	w.advance(time.Minute)
	w.losePower(time.Minute)
	boundAt("after a power loss that took the file's content", time.Time{})
}

// A power loss takes the time of a record: its address goes on as it was.
func TestARecordThatDoesNotSayWhenItWasBoundIsRead(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", forever)
	is := listed(w)
	path := w.ledger().slotPath(is.Addr)
	b, err := w.fs.ReadFile(path)
	must.Do(t, err)
	older := *decodeSlot(b).retained
	older.Bound = time.Time{}
	must.Do(t, w.fs.WriteFile(path, older.encode(), modeOurs))
	if got := listed(w); !got.Bound.IsZero() || !got.Since.Equal(is.Since) || got.State != StateRetained {
		t.Errorf("%+v", got)
	}
	w.boot(time.Minute)
	w.prepare()
	if got := listed(w); !got.Bound.IsZero() || !got.Since.Equal(is.Since) {
		t.Errorf("after a reboot: %+v", got)
	}
	back := w.clock.now.Wall
	w.add("web-0", forever)
	if got := listed(w); got.Addr != is.Addr || !got.Bound.Equal(back) {
		t.Errorf("after it came back: %+v", got)
	}
}

// A file that is written without the lock while a command runs is in the stamp that the command leaves.
func TestAnAttachmentThatWasSeenIsEndedThoughTheIndexLacksIt(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	w.add("web-0", ordinary)
	foreign, has := Attachment{"foreign", "eth0"}, netip.MustParseAddr("10.1.0.9")
	written := false
	w.fs.before = func(string, string) error {
		if !written {
			written = true
			must.Do(t, w.fs.WriteFile("/data/net/"+has.String(), encodeBound(foreign), modeHostLocal))
		}
		return nil
	}
	w.add("web-1", ordinary)
	w.fs.before = nil
	for _, seen := range []bool{false, true} {
		r, err := w.ledger().Del(DelRequest{Attachment: foreign, Pod: Pod{Namespace: "default", Name: "web-2"},
			Policy: tenMinutes, Seen: seen})
		if err != nil || slices.Contains(r.Addrs, has) != seen {
			t.Errorf("seen: %v: retained %v, %v", seen, r, err)
		}
	}
}
