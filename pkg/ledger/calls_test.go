package ledger

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/disk"
)

// counted is a file system that notes what is asked of it, but for the lock.
type counted struct {
	disk.FS
	calls []string
}

func (c *counted) note(op, path string) {
	c.calls = append(c.calls, op+" "+filepath.Base(filepath.Dir(path))+"/"+filepath.Base(path))
}

func (c *counted) ReadFile(path string) ([]byte, error) {
	c.note("read", path)
	return c.FS.ReadFile(path)
}

func (c *counted) Mode(path string) (uint32, error) {
	c.note("stat", path)
	return c.FS.Mode(path)
}

func (c *counted) ReadDir(path string) ([]string, error) {
	c.note("list", path)
	return c.FS.ReadDir(path)
}

func (c *counted) WriteFile(path string, data []byte, mode uint32) error {
	c.note("write", path)
	return c.FS.WriteFile(path, data, mode)
}

func (c *counted) Overwrite(path string, data []byte) error {
	c.note("write", path)
	return c.FS.Overwrite(path, data)
}

func (c *counted) SyncFile(path string) error {
	c.note("sync", path)
	return c.FS.SyncFile(path)
}

func (c *counted) SyncDir(path string) error {
	c.note("sync", path)
	return c.FS.SyncDir(path)
}

// An ordinary pod is what a node starts most of. Each call is some microseconds of it: none comes twice, none syncs,
// none lists a directory.
func TestAnOrdinaryPodAsksNoFileTwice(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/24", "fd00::/64"))
	for range 3 { // the marker, the network and the round robin are there
		att, _, err := w.add("warm", ordinary)
		if err != nil {
			t.Fatal(err)
		}
		w.del(att)
	}
	att, ns := w.newContainer(), w.newNetns()
	for _, command := range []string{"ADD", "DEL"} {
		c := &counted{FS: w.fs}
		l := New(w.net, Options{StateDir: "/state", FS: c, Clock: w.clock, Netns: w.netns, Sleep: w.pass})
		var err error
		if command == "ADD" {
			_, err = l.Add(AddRequest{
				Attachment: att, Pod: Pod{Namespace: "default", Name: "job"}, Netns: ns, Policy: ordinary,
			})
		} else {
			_, err = l.Del(DelRequest{Attachment: att})
		}
		if err != nil || len(c.calls) == 0 {
			t.Fatalf("%s: %v, calls %q", command, err, c.calls)
		}
		seen := map[string]int{}
		for _, call := range c.calls {
			seen[call]++
			temporary := strings.HasSuffix(call, "/"+tempName) // of each family
			if op, _, _ := strings.Cut(call, " "); op == "sync" || op == "list" || seen[call] > 1 && !temporary {
				t.Errorf("%s: %s, number %d", command, call, seen[call])
			}
		}
	}
}
