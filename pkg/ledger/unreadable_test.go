package ledger

import (
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
	"github.com/stayput/stayput/test/must"
)

// badBlocks is a disk that has lost what some files said: it cannot read them, nor write a part of them. Their names
// can be removed, and given to other files.
type badBlocks struct {
	*memFS
	lost map[*memNode]bool
}

func (d badBlocks) ReadFile(path string) ([]byte, error) {
	if d.lost[d.walk(path)] {
		return nil, pathError("read", path, unix.EIO)
	}
	return d.memFS.ReadFile(path)
}

func (d badBlocks) Overwrite(path string, data []byte) error {
	if d.lost[d.walk(path)] {
		return pathError("write", path, unix.EIO)
	}
	return d.memFS.Overwrite(path, data)
}

func (d badBlocks) WriteFile(path string, data []byte, mode uint32) error {
	delete(d.lost, d.walk(path)) // it gets other blocks
	return d.memFS.WriteFile(path, data, mode)
}

// recordsOf returns the paths of what is recorded of a pod, by what it is.
func recordsOf(w *world, att Attachment, key Key, addr netip.Addr) map[string]string {
	l := w.ledger()
	return map[string]string{
		"address file": l.slotPath(addr), "index entry": l.inState(indexDir, att.hash()),
		"claim": l.inState(claimsDir, key.hash()), "counts": l.inState(countsName), "marker": l.marker(),
		"last_reserved": l.lastPath(0), "description": l.inState(infoName),
	}
}

// Whatever file it is: other pods start and end, nothing is doubled, and what was promised is kept. The files beside it
// say enough, and so does what was lost once somebody has written it again.
func TestAFileThatTheDiskHasLostStopsNoOtherPodAndDoublesNothing(t *testing.T) {
	for _, what := range []string{
		"address file", "index entry", "claim", "counts", "marker", "last_reserved", "description",
	} {
		for _, state := range []string{"running", "stopped"} {
			for _, then := range []string{"", "host-local was at work", "the marker is lost", "a reboot"} {
				t.Run(strings.Join([]string{what, state, then}, ", "), func(t *testing.T) {
					w := newWorld(t, testNetwork("10.1.0.0/28", ""))
					w.net.PromisedShare = 1
					att, addrs, err := w.add("web-0", tenMinutes)
					must.Do(t, err)
					ns := w.live[att].netns
					if state == "stopped" {
						delete(w.netns, ns.Path)
						w.del(att)
					}
					key := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, "eth0")
					path := recordsOf(w, att, key, addrs[0])[what]
					bad := badBlocks{w.fs, map[*memNode]bool{}}
					if n := w.fs.walk(path); n != nil {
						bad.lost[n] = true
					}
					l := func() *Ledger {
						n := *w.net
						return New(&n, Options{StateDir: "/state", FS: bad, Clock: w.clock, Netns: w.netns,
							Sleep: func(time.Duration) {}})
					}
					add := func(pod string) ([]netip.Addr, error) {
						next, ns := w.newContainer(), w.newNetns()
						r, err := l().Add(AddRequest{Attachment: next, Pod: Pod{Namespace: "default", Name: pod}, Netns: ns,
							Policy: tenMinutes})
						return addrsOf(r), err
					}
					others := func(pods ...string) {
						t.Helper()
						for _, pod := range pods {
							got, err := add(pod)
							if err != nil || slices.Contains(got, addrs[0]) {
								t.Fatalf("%s got %v, %v; %s is web-0's", pod, got, err, addrs[0])
							}
						}
					}
					others("a", "b")
					switch then {
					case "host-local was at work":
						must.Do(t, w.fs.WriteFile("/data/net/10.1.0.14", []byte("c\r\neth0"), modeHostLocal))
					case "the marker is lost":
						must.Do(t, w.fs.Remove("/data/net/"+markerName))
					case "a reboot":
						w.boot(time.Minute)
						state = "stopped"
					}
					others("c", "d")
					_, _, err = l().Expire()
					_, listed := l().List()
					_, checked := l().Check()
					must.Do(t, errors.Join(err, listed, checked, l().Prepare()))
					if state == "running" {
						// The pod is created again before its DEL.
						if got, err := add("web-0"); !errors.Is(err, ErrInUse) && slices.Contains(got, addrs[0]) {
							t.Fatalf("I1: the successor of a running pod got %v", got)
						}
						delete(w.netns, ns.Path)
						_, err := l().Del(DelRequest{Attachment: att})
						must.Do(t, err)
					}
					if a, err := l().List(); err != nil || slices.ContainsFunc(a, func(a Address) bool {
						return a.Addr == addrs[0] && a.State == StateUnreadable
					}) {
						must.Do(t, errors.Join(err, l().Drop(addrs[0]))) // the agent has looked everywhere
					}
					if ended, _, err := l().Expire(); err != nil || len(ended) > 0 {
						t.Fatalf("%v ended, %v", ended, err)
					}
					others("e")
					if got, err := add("web-0"); err != nil || !slices.Equal(got, addrs) {
						t.Errorf("web-0 had %v and got %v, %v", addrs, got, err)
					}
				})
			}
		}
	}
}

// host-local may have written it in this boot, before Stayput's first command.
func TestAFileThatTheDiskHasLostIsTakenAfterARebootToo(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/29", ""))
	_, _, err := w.add("job", ordinary)
	must.Do(t, err)
	w.boot(time.Minute)
	lost := netip.MustParseAddr("10.1.0.4")
	must.Do(t, w.fs.WriteFile("/data/net/"+lost.String(), []byte("c\r\neth0"), modeHostLocal))
	bad := badBlocks{w.fs, map[*memNode]bool{w.fs.walk("/data/net/" + lost.String()): true}}
	l := New(w.net, Options{StateDir: "/state", FS: bad, Clock: w.clock, Netns: w.netns})
	for {
		r, err := l.Add(AddRequest{Attachment: w.newContainer(), Pod: Pod{Namespace: "default", Name: "job"},
			Policy: ordinary})
		if errors.Is(err, ErrFull) {
			return
		}
		must.Do(t, err)
		if slices.Contains(r.Addrs, lost) {
			t.Fatalf("%s was given away", lost)
		}
	}
}

// What is known of the file is its name. It is said as a file that says nothing is.
func TestAFileThatTheDiskHasLostIsSaid(t *testing.T) {
	w, retained, _, _ := inhabited(t)
	l := w.ledger()
	key := NewKey("net", Pod{Namespace: "default", Name: "web-1"}, *tenMinutes, "eth0")
	bad := badBlocks{w.fs, map[*memNode]bool{}}
	for _, path := range []string{l.slotPath(retained[0]), l.inState(claimsDir, key.hash()), l.lastPath(1)} {
		bad.lost[w.fs.walk(path)] = true
	}
	n := *w.net
	said, err := New(&n, Options{StateDir: "/state", FS: bad, Clock: w.clock, Netns: w.netns}).Check()
	must.Do(t, err)
	for _, want := range []string{retained[0].String(), key.hash(), filepath.Base(l.lastPath(1))} {
		if !slices.ContainsFunc(said, func(err error) bool { return strings.Contains(err.Error(), want) }) {
			t.Errorf("%v does not name %s", said, want)
		}
	}
}

// A disk that reads nothing and takes nothing is no reason to remove or to free anything.
func TestADiskThatFailsAltogetherChangesNothing(t *testing.T) {
	w, _, _, _ := inhabited(t)
	w.boot(time.Minute)
	before := w.fs.dump()
	bad := badBlocks{w.fs, map[*memNode]bool{}}
	w.fs.files(func(path string, _ uint32) { bad.lost[w.fs.walk(path)] = true })
	w.fs.before = func(string, string) error { return unix.EIO }
	n := *w.net
	if err := New(&n, Options{StateDir: "/state", FS: bad, Clock: w.clock,
		Netns: w.netns}).Prepare(); !disk.Unreadable(err) {
		t.Errorf("%v, want the disk's error", err)
	}
	w.fs.before = nil
	if after := w.fs.dump(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// What is left in the index of an attachment whose address is free could make it the attachment's again, after a wipe.
func TestDropLeavesNoEntryThatNamesTheAddress(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	att, addrs, err := w.add("job", ordinary)
	must.Do(t, err)
	must.Do(t, w.fs.WriteFile(w.ledger().slotPath(addrs[0]), nil, modeOurs))
	must.Do(t, w.ledger().Prepare())
	if e, err := w.ledger().files.entry(att); e == nil || err != nil {
		t.Fatalf("while the file says nothing: %v, %v", e, err)
	}
	must.Do(t, w.ledger().Drop(addrs[0]))
	if e, err := w.ledger().files.entry(att); e != nil || err != nil {
		t.Errorf("after Drop: %v, %v", e, err)
	}
}
