package ledger

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

// halfway is a disk on which a command can be stopped in the middle of writing its index entry.
type halfway struct {
	disk.Local
	stopped, goOn chan struct{}
}

func (d halfway) WriteFile(path string, data []byte, mode uint32) error {
	if filepath.Base(filepath.Dir(path)) != indexDir {
		return d.Local.WriteFile(path, data, mode)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, fs.FileMode(mode))
	if err != nil {
		return err
	}
	close(d.stopped)
	<-d.goOn
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// watched is a disk that calls back before the index is listed.
type watched struct {
	disk.Local
	before func()
}

func (d watched) ReadDir(path string) ([]string, error) {
	if filepath.Base(path) == indexDir {
		d.before()
	}
	return d.Local.ReadDir(path)
}

func TestAReadLeavesAnEntryThatIsBeingWritten(t *testing.T) {
	for name, read := range map[string]func(*Ledger) error{
		"List":  func(l *Ledger) error { _, err := l.List(); return err },
		"Check": func(l *Ledger) error { _, err := l.Check(); return err },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			on := func(fsys disk.FS) *Ledger {
				n := testNetwork("10.1.0.0/28", "")
				n.DataDir = filepath.Join(dir, "data")
				return New(n, Options{StateDir: filepath.Join(dir, "state"), FS: fsys})
			}
			pod := Pod{Namespace: "default", Name: "web-0"}
			_, err := on(disk.Local{}).Add(AddRequest{Attachment: Attachment{"first", "eth0"}, Pod: pod, Policy: ordinary})
			must.Do(t, err)

			slow := halfway{stopped: make(chan struct{}), goOn: make(chan struct{})}
			second := Attachment{"second", "eth0"}
			added := make(chan error, 1)
			started := false
			must.Do(t, read(on(watched{before: func() {
				if started {
					return
				}
				started = true
				go func() {
					_, err := on(slow).Add(AddRequest{Attachment: second, Pod: Pod{Namespace: "default", Name: "web-1"},
						Policy: ordinary})
					added <- err
				}()
				select {
				case <-slow.stopped:
				case <-time.After(200 * time.Millisecond): // it waits for the lock
				}
			}})))
			close(slow.goOn)
			must.Do(t, <-added)

			_, err = on(disk.Local{}).Find(second)
			must.Do(t, err)
			bad, err := on(disk.Local{}).Check()
			must.Do(t, err)
			if len(bad) > 0 {
				t.Error(bad)
			}
		})
	}
}

func TestReadsChangeNothing(t *testing.T) {
	index := func(w *world) string { return filepath.Join(w.ledger().state, indexDir) }
	for name, prepare := range map[string]func(*world){
		"nothing yet":         func(*world) {},
		"a quiet network":     func(w *world) { w.add("web-1", forever) },
		"the first of a boot": func(w *world) { w.add("web-1", forever); w.boot(time.Minute) },
		"no marker":           func(w *world) { must.Do(w.t, w.fs.Remove("/data/net/"+markerName)) },
		"host-local was at work": func(w *world) {
			must.Do(w.t, w.fs.WriteFile("/data/net/10.1.0.9", []byte("other\r\neth0"), modeHostLocal))
		},
		"the data directory went": func(w *world) { must.Do(w.t, disk.RemoveAll(w.fs, "/data/net")) },
		"the state went":          func(w *world) { must.Do(w.t, disk.RemoveAll(w.fs, "/state")) },
		"a torn entry": func(w *world) {
			att, _, _ := w.add("web-1", forever)
			must.Do(w.t, w.fs.WriteFile(filepath.Join(index(w), att.hash()), []byte("v1 "), modeState))
		},
		"an entry of nothing": func(w *world) {
			must.Do(w.t, w.fs.WriteFile(filepath.Join(index(w), "ab"), nil, modeState))
		},
		"a file that says nothing": func(w *world) { must.Do(w.t, w.fs.WriteFile("/data/net/10.1.0.9", nil, modeHostLocal)) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			if name != "nothing yet" {
				stopped(w, "web-0", tenMinutes)
			}
			prepare(w)
			w.t = t
			w.fs.before = func(op, path string) error {
				if !strings.HasSuffix(path, "/"+lockFile) {
					t.Errorf("%s %s", op, path)
				}
				return nil
			}
			l := w.ledger()
			before, err := l.List()
			must.Do(t, err)
			_, err = l.Check()
			must.Do(t, err)
			_, err = l.Find(Attachment{"unknown", "eth0"})
			if !errors.Is(err, ErrUnknownAttachment) {
				t.Error(err)
			}
			l.Undecided(Attachment{"unknown", "eth0"})
			must.Do(t, l.Status())
			var valid []Attachment
			for _, a := range before {
				valid = append(valid, a.Attachment)
			}
			if !strings.Contains(name, "entry") { // which it removes
				must.Do(t, l.Collect(valid))
			}

			// What they saw is what the next command makes of the files.
			w.fs.before = nil
			must.Do(t, l.Prepare())
			after, err := l.List()
			must.Do(t, err)
			same := func(a, b Address) bool {
				return a.Addr == b.Addr && a.State == b.State && a.Attachment == b.Attachment && a.Pod == b.Pod &&
					a.Boot == b.Boot &&
					(a.Key == nil) == (b.Key == nil) && a.Policy == b.Policy && a.Left == b.Left
			}
			if !slices.EqualFunc(before, after, same) {
				w.failf("listed were\n%+v\nand then\n%+v", before, after)
			}
		})
	}
}

func TestATornEntryOfNobodyIsSweptAway(t *testing.T) {
	for name, sweep := range map[string]func(*Ledger) error{
		"Expire":  func(l *Ledger) error { _, _, err := l.Expire(); return err },
		"Collect": func(l *Ledger) error { return l.Collect(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", ""))
			stopped(w, "web-0", tenMinutes)
			l := w.ledger()
			torn := filepath.Join(l.state, indexDir, Attachment{"victim", "eth0"}.hash())
			must.Do(t, w.fs.WriteFile(torn, nil, modeState))
			must.Do(t, sweep(l))
			if _, err := w.fs.ReadFile(torn); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("it is still there: %v", err)
			}
			w.check()
		})
	}
}

// A power loss can bring back what was written of an attachment that was over: its claim is gone, and the address
// promised to somebody else since.
func TestADeadAttachmentWithoutAClaimLeavesItsAddressToTheClaimThatHasIt(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/29", ""))
	_, addrs, _ := w.add("web-0", tenMinutes)
	l := w.ledger()
	old := &entry{att: Attachment{"old", "eth0"}, boot: w.clock.now.BootID, claim: hashOf("gone"), addrs: addrs}
	must.Do(t, w.fs.WriteFile(l.inState(indexDir, old.att.hash()), old.encode(), modeState))
	must.Do(t, w.fs.WriteFile(l.slotPath(addrs[0]), encodeBound(old.att), modeOurs))
	w.boot(time.Minute)
	for full := false; !full; {
		_, _, err := w.add("job", ordinary)
		full = errors.Is(err, ErrFull)
	}
	if _, got, err := w.add("web-0", tenMinutes); err != nil || !slices.Equal(got, addrs) {
		w.failf("it came back with %v, %v; want %v", got, err, addrs)
	}
	w.check()
}

// hide binds an address without the lock while a command runs, whose stamp then says that the index is complete.
func hide(w *world, a netip.Addr, att Attachment) {
	s, err := w.ledger().begin()
	must.Do(w.t, err)
	must.Do(w.t, w.fs.WriteFile(s.slotPath(a), encodeBound(att), modeHostLocal))
	s.touched, s.trusted = true, true
	s.end()
}

func TestReclaimEndsWhatAStampHides(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	w.add("web-0", ordinary)
	hidden, att := netip.MustParseAddr("10.1.0.9"), Attachment{"hidden", "eth0"}
	hide(w, hidden, att)
	_, err := w.ledger().Reclaim(att)
	must.Do(t, err)
	if _, err := w.fs.ReadFile(w.ledger().slotPath(hidden)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its file: %v", err)
	}
	w.check()
}

func TestExpireCompletesAnIndexThatAStampHides(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	hidden, att := netip.MustParseAddr("10.1.0.9"), Attachment{"hidden", "eth0"}
	hide(w, hidden, att)
	w.advance(11 * time.Minute)
	w.fs.before = func(op, path string) error {
		if filepath.Base(filepath.Dir(path)) == indexDir {
			return unix.ENOSPC
		}
		return nil
	}
	expired, _, err := w.ledger().Expire()
	if !errors.Is(err, unix.ENOSPC) || len(expired) != 1 {
		t.Errorf("on a full disk: expired %v, %v", expired, err)
	}
	w.fs.before = nil
	w.expire()
	_, err = w.ledger().Del(DelRequest{Attachment: att})
	must.Do(t, err)
	if _, err := w.fs.ReadFile(w.ledger().slotPath(hidden)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its file after its DEL: %v", err)
	}
	w.check()
}

func TestWhatARebuildMendsIsNoViolation(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	key := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, "eth0")
	must.Do(t, w.fs.WriteFile(w.ledger().inState(claimsDir, key.hash()), nil, modeDurable))
	w.boot(time.Minute)
	w.check()
	w.prepare()
	w.check()
}
