package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

// readFS counts what is read.
type readFS struct {
	disk.FS
	reads int
}

func (f *readFS) ReadFile(path string) ([]byte, error) {
	f.reads++
	return f.FS.ReadFile(path)
}

func (f *readFS) ReadDir(path string) ([]string, error) {
	names, err := f.FS.ReadDir(path)
	f.reads += len(names)
	return names, err
}

// An ADD must not read more the more is promised, whether it may promise or not.
func TestWhatANewPromiseReadsDoesNotGrowWithTheLedger(t *testing.T) {
	reads := func(promised int, share float64) (n int, refused bool) {
		w := newWorld(t, testNetwork("10.1.0.0/16", ""))
		w.net.PromisedShare = share
		for i := range promised {
			w.add(fmt.Sprintf("web-%d", i), tenMinutes)
		}
		read := &readFS{FS: w.fs}
		ns := w.newNetns()
		r, err := New(w.net, Options{StateDir: "/state", FS: read, Clock: w.clock, Netns: w.netns}).Add(AddRequest{
			Attachment: w.newContainer(), Pod: Pod{Namespace: "default", Name: "late"}, Netns: ns, Policy: tenMinutes})
		must.Do(t, err)
		return read.reads, len(r.Events) > 0 && isRefusal(r.Events[0])
	}
	few, _ := reads(10, 0)
	many, _ := reads(200, 0)
	if many > few {
		t.Errorf("a new promise reads %d of 10 promises and %d of 200", few, many)
	}
	few, refused := reads(10, 10.0/65534)
	many, refusedToo := reads(200, 200.0/65534)
	if !refused || !refusedToo {
		t.Fatal("it was not refused")
	}
	if many > few {
		t.Errorf("a refusal reads %d of 10 promises and %d of 200", few, many)
	}
}

func (w *world) addTo(namespace, pod string) *Result {
	w.t.Helper()
	r, err := w.ledger().Add(AddRequest{
		Attachment: w.newContainer(), Pod: Pod{Namespace: namespace, Name: pod}, Netns: w.newNetns(), Policy: forever})
	must.Do(w.t, err)
	return r
}

func TestANamespaceCannotUseUpWhatIsForAll(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
	w.net.PromisedShare, w.net.PromisedSharePerNamespace = 0.54, 0.25 // 7 and 3 of 13 addresses
	promised := map[string]int{}
	for _, ns := range []string{"greedy", "modest", "late"} {
		for i := range 5 {
			r := w.addTo(ns, fmt.Sprintf("web-%d", i))
			if r.Promised {
				promised[ns]++
				continue
			}
			want := EventNamespaceRefused
			if ns == "late" {
				want = EventRefused
			}
			if len(r.Events) != 1 || r.Events[0].Reason != want {
				t.Errorf("%s/web-%d: %+v, want %s", ns, i, r.Events, want)
			}
			_, err := w.ledger().Del(DelRequest{Attachment: Attachment{fmt.Sprintf("c%d", w.n-1), "eth0"}})
			must.Do(t, err)
		}
	}
	if promised["greedy"] != 3 || promised["modest"] != 3 || promised["late"] != 1 {
		t.Errorf("promised are %v", promised)
	}
	w.check()

	// What a namespace gives back, it may have again.
	must.Do(t, w.ledger().Release(NewKey("net", Pod{Namespace: "greedy", Name: "web-0"}, *forever, "eth0")))
	if r := w.addTo("greedy", "web-9"); !r.Promised {
		t.Errorf("after a release: %+v", r.Events)
	}
	w.check()
}

// Half of a /64, and a quarter of it, are no limit.
func TestWhatIsPromisedOfALargeRangeIsLimitedByNumber(t *testing.T) {
	promised := func(w *world, ns string, pods int) (n int, refused EventReason) {
		for i := range pods {
			r := w.addTo(ns, fmt.Sprintf("web-%d", i))
			if r.Promised {
				n++
				continue
			}
			if len(r.Events) != 1 {
				t.Fatalf("%s/web-%d: %+v", ns, i, r.Events)
			}
			refused = r.Events[0].Reason
		}
		return n, refused
	}
	w := newWorld(t, testNetwork("", "fd00::/64"))
	w.net.PromisedSharePerNamespace = 0.25
	w.net.PromisedLimit, w.net.PromisedLimitPerNamespace = 7, 3
	for _, test := range []struct {
		ns      string
		n       int
		refused EventReason
	}{{"greedy", 3, EventNamespaceRefused}, {"modest", 3, EventNamespaceRefused}, {"late", 1, EventRefused}} {
		if n, refused := promised(w, test.ns, 5); n != test.n || refused != test.refused {
			t.Errorf("%s was promised %d addresses and refused others by %q, want %d and %s",
				test.ns, n, refused, test.n, test.refused)
		}
	}

	// Without numbers in the configuration.
	large := testNetwork("", "fd00::/64")
	if all, of := large.MostPromised(large.Ranges[0]), large.MostPromisedTo(large.Ranges[0]); all != 1024 || of != 1024 {
		t.Errorf("by default %d addresses of a /64 may be promised, %d to a namespace", all, of)
	}
	// The smaller of share and number counts.
	small := testNetwork("10.1.0.0/24", "")
	small.PromisedSharePerNamespace, small.PromisedLimitPerNamespace = 0.25, 256
	if all, of := small.MostPromised(small.Ranges[0]), small.MostPromisedTo(small.Ranges[0]); all != 126 || of != 63 {
		t.Errorf("of a /24 %d may be promised, %d to a namespace", all, of)
	}
}

// An address whose retention is over holds no promise back, though the agent that would end it is away.
func TestWhatIsOverdueIsNotCounted(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	w.net.PromisedShare = 0.16 // 2 of 13
	stopped(w, "web-0", tenMinutes)
	stopped(w, "web-1", tenMinutes)
	if _, _, err := w.add("web-2", tenMinutes); err != nil || len(w.promises) != 2 {
		w.failf("%v, promised are %v", err, w.promises)
	}
	w.advance(11 * time.Minute)
	w.add("web-3", tenMinutes)
	if len(w.promises) != 3 {
		w.failf("promised are %v", w.promises)
	}
	w.check()
}

func TestClaimsOutsideTheRangesAreNotCounted(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	w.net.PromisedShare = 0.16 // 2 of 13
	w.add("web-0", tenMinutes)
	w.add("web-1", tenMinutes)
	w.net = testNetwork("10.9.0.0/28", "")
	w.net.PromisedShare = 0.16
	for _, pod := range []string{"web-2", "web-3"} {
		key := NewKey("net", Pod{Namespace: "default", Name: pod}, *tenMinutes, "eth0")
		if w.add(pod, tenMinutes); w.promises[key] == nil {
			w.failf("%s was promised nothing", pod)
		}
	}
	w.check()
}

// A claim that came or went without the counts (a kill, a hand) is counted as soon as it matters.
func TestCountsThatAreWrongAreNotBelieved(t *testing.T) {
	for name, spoil := range map[string]func(w *world){
		"a claim removed by hand": func(w *world) {
			names, err := w.fs.ReadDir(w.ledger().inState(claimsDir))
			must.Do(w.t, err)
			must.Do(w.t, w.fs.Remove(w.ledger().inState(claimsDir, names[0])))
			_, err = w.ledger().Del(DelRequest{Attachment: Attachment{"nobody", "eth0"}})
			must.Do(w.t, err)
		},
		"a file that says nothing": func(w *world) {
			must.Do(w.t, w.fs.WriteFile(w.ledger().inState(countsName), []byte("v1 0 false\n9 default"), modeState))
		},
		"no file": func(w *world) {
			if err := w.fs.Remove(w.ledger().inState(countsName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				w.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			w.add("web-0", tenMinutes)
			w.add("web-1", tenMinutes)
			spoil(w)
			w.check()
			if r := w.addTo("default", "web-9"); !r.Promised {
				t.Errorf("%+v", r.Events)
			}
			w.check()
		})
	}
}

func FuzzDecodeCounts(f *testing.F) {
	f.Add((&counts{of: map[string]int{"default": 3, "end": 1}, due: never}).encode())
	f.Add([]byte("v1 0 true\nend\nrest"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := decodeCounts(b)
		if c == nil {
			return
		}
		if again := decodeCounts(c.encode()); again == nil || again.all != c.all || again.due != c.due {
			t.Fatalf("%q is written as %q", b, c.encode())
		}
	})
}
