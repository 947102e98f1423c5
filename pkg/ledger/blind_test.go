package ledger

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// blind is the ledger as a process has it that does not see the network namespaces: a container without mount
// propagation, or a root directory that is not the node's.
func (w *world) blind() *Ledger {
	n := *w.net
	return New(&n, Options{StateDir: "/state", FS: w.fs, Clock: w.clock, Netns: fakeNetns{}, Sleep: w.pass})
}

func TestAProcessThatSeesNoNamespacesFreesNoBoundAddress(t *testing.T) {
	key := NewKey("net", Pod{Namespace: "default", Name: "web-0"}, *forever, "eth0")
	for name, act := range map[string]func(*Ledger) error{
		"release": func(l *Ledger) error { return l.Release(key) },
		"expire": func(l *Ledger) error {
			_, _, err := l.Expire()
			return err
		},
		"uninstall": func(l *Ledger) error {
			freed, err := l.Uninstall()
			if len(freed.Addrs) > 0 || len(freed.InUse) != 2 {
				t.Errorf("uninstall says %+v", freed)
			}
			return err
		},
		"a policy for an older attachment of the pod": func(l *Ledger) error {
			_, err := l.SetPolicy(Attachment{"c1", "eth0"}, Pod{Namespace: "default", Name: "web-0"}, *tenMinutes, Netns{})
			return err
		},
		"a requested move": func(l *Ledger) error {
			addrs, err := l.Find(Attachment{"c3", "eth0"})
			if err != nil {
				return err
			}
			_, err = l.Move(Attachment{"c3", "eth0"}, AddRequest{
				Attachment: theAtt, Pod: Pod{Namespace: "default", Name: "web-1"}, Netns: theNs,
				Policy: tenMinutes, Requested: addrs,
			})
			if !errors.Is(err, ErrInUse) {
				t.Errorf("move: %v", err)
			}
			return nil
		},
		"an ADD of a replacement": func(l *Ledger) error {
			_, err := l.Add(AddRequest{Attachment: theAtt, Pod: Pod{Namespace: "default", Name: "web-0"}, Policy: forever,
				Netns: Netns{Path: theNs.Path}})
			if !errors.Is(err, ErrInUse) {
				t.Errorf("ADD: %v", err)
			}
			return nil
		},
		"an ADD of a replacement that does not wait": func(l *Ledger) error {
			_, err := l.Add(AddRequest{Attachment: theAtt, Pod: Pod{Namespace: "default", Name: "web-0"}, Policy: newOne,
				Netns: Netns{Path: theNs.Path}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
			w.add("web-0", nil)
			att, addrs, err := w.add("web-0", forever) // c3: names and inodes are counted together
			if err != nil || att.ContainerID != "c3" {
				t.Fatal(att, err)
			}
			if err := act(w.blind()); err != nil {
				t.Fatal(err)
			}
			for _, a := range addrs {
				if s, err := w.ledger().slot(a); err != nil || !s.boundTo(att) {
					w.failf("%s is %+v, %v", a, s, err)
				}
			}
			w.advance(time.Hour)
			if r, err := w.ledger().Add(AddRequest{Attachment: Attachment{"later", "eth0"}, Policy: ordinary}); err != nil ||
				slices.ContainsFunc(r.Addrs, isOneOf(addrs)) {
				w.failf("%+v, %v", r, err)
			}
		})
	}
}

func isOneOf[T comparable](s []T) func(T) bool {
	return func(v T) bool { return slices.Contains(s, v) }
}
