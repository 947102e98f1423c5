package ledger

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stayput/stayput/pkg/disk"
)

// An ADD that is killed behind its index entry leaves an entry of an address that the next one takes.
func TestTheEndOfAnInterfaceLeavesTheOneAloneWhoseNameItsOwnBeginsWith(t *testing.T) {
	short, long := Attachment{"c1", "net1"}, Attachment{"c1", "net10"}
	pod := Pod{Namespace: "default", Name: "web-0"}
	ends := map[string]func(*Ledger) error{
		"DEL":     func(l *Ledger) error { _, err := l.Del(DelRequest{Attachment: long}); return err },
		"GC":      func(l *Ledger) error { return l.Collect([]Attachment{short}) },
		"reclaim": func(l *Ledger) error { _, err := l.Reclaim(long); return err },
	}
	for how, end := range ends {
		t.Run(how, func(t *testing.T) {
			for n := 0; ; n++ {
				w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
				hit := w.killAt(n, func() {
					_, _ = w.ledger().Add(AddRequest{Attachment: long, Pod: pod, Netns: w.newNetns(), Policy: tenMinutes})
				})
				r, err := w.ledger().Add(AddRequest{Attachment: short, Pod: pod, Netns: w.newNetns(), Policy: tenMinutes})
				if err != nil {
					t.Fatalf("killed at %d: %v", n, err)
				}
				if err := end(w.ledger()); err != nil {
					t.Fatal(err)
				}
				if has, err := w.ledger().Find(short); err != nil || !slices.Equal(has, r.Addrs) {
					w.failf("killed at %d: %s had %v and has %v, %v", n, short, r.Addrs, has, err)
				}
				w.check()
				if !hit {
					break
				}
			}
		})
	}
}

func TestAFileOfHostLocalThatNamesNoInterfaceEndsWithItsContainer(t *testing.T) {
	dir := t.TempDir()
	n := testNetwork("10.1.0.0/28", "")
	n.DataDir = filepath.Join(dir, "data")
	l := New(n, Options{StateDir: filepath.Join(dir, "state")})
	for name, content := range map[string]string{"10.1.0.5": "c9", "10.1.0.6": "c8\n", "10.1.0.7": "c7", "10.1.0.8": "c7\r\neth0"} {
		file := filepath.Join(l.dir, name)
		if err := errors.Join(disk.MkdirAll(disk.Local{}, l.dir), os.WriteFile(file, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	left := map[string][]string{
		"c9": {"10.1.0.6", "10.1.0.7", "10.1.0.8"},
		"c8": {"10.1.0.7", "10.1.0.8"},
		"c7": {"10.1.0.7"}, // as host-local: what names the interface comes first
	}
	for _, id := range []string{"c9", "c8", "c7"} {
		if _, err := l.Del(DelRequest{Attachment: Attachment{id, "eth0"}}); err != nil {
			t.Fatal(err)
		}
		slots, err := l.allSlots()
		var addrs []string
		for a := range slots {
			addrs = append(addrs, a.String())
		}
		slices.Sort(addrs)
		if err != nil || !slices.Equal(addrs, left[id]) {
			t.Errorf("after the DEL of %s there are %v, %v", id, addrs, err)
		}
	}
}

func TestWhatCanNameAnInterfaceCanBeReadFromItsFile(t *testing.T) {
	for name, valid := range map[string]bool{
		"eth0": true, "netzwerk-ü": true, "接口0": true, "a\x01b": true, "a\x7f": true, "eth\xff": true, "{": true, "a@b": true,
		"": false, ".": false, "..": false, "a/b": false, "a:b": false, "a b": false, "a\u00a0": false, "\u2003": false,
		"a\x00": false, "a\r\nb": false, "sixteen-letters-": false,
	} {
		if ValidIfName(name) != valid {
			t.Errorf("%q is valid: %t", name, !valid)
		}
		att := Attachment{"c1", name}
		if s := decodeSlot(encodeBound(att)); valid && (s.state != slotBound || s.att != att || !s.boundTo(att)) {
			t.Errorf("%q is read as %+v", name, s)
		}
		e := &entry{att: att, boot: "b", addrs: []netip.Addr{netip.MustParseAddr("10.1.0.5")}}
		if got, err := decodeEntry(e.encode(), "x"); valid && (err != nil || got.att != att) {
			t.Errorf("%q has the entry %+v, %v", name, got, err)
		}
		c := &Claim{Version: recordVersion, Key: NewKey("net", Pod{Namespace: "a", Name: "b"}, *tenMinutes, name),
			Addrs: e.addrs, Policy: *tenMinutes}
		if got, err := decodeClaim(c.encode(), c.Key.hash()); valid && (err != nil || got.Key != c.Key) {
			t.Errorf("%q has the claim %+v, %v", name, got, err)
		}
	}
}
