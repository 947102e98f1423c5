package ledger

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/must"
)

// Who is told of an address that becomes free can still take back what was made for it: nobody else has it yet. A late
// or repeated end tells nothing of what the next attachment has.
func TestTheEndOfAnAttachmentIsToldBeforeItsAddressesAreFree(t *testing.T) {
	ends := map[string]func(l *Ledger, att Attachment) error{
		"DEL":     func(l *Ledger, att Attachment) error { _, err := l.Del(DelRequest{Attachment: att}); return err },
		"Reclaim": func(l *Ledger, att Attachment) error { _, err := l.Reclaim(att); return err },
		"Collect": func(l *Ledger, _ Attachment) error { return l.Collect(nil) },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, testNetwork("", ""))
			att := withPool(w, "web-0", pooledBoth)
			var told []netip.Addr
			refused := errors.New("refused")
			fails := refused
			o := w.options()
			o.Freeing = func(addrs []netip.Addr) error {
				told = append(told, addrs...)
				for _, a := range addrs {
					s, err := w.ledger().slot(a)
					if err != nil || s.state != slotBound || s.att != att {
						t.Errorf("%s is told when it is %+v, %v", a, s, err)
					}
				}
				return fails
			}
			n := *w.net
			l := New(&n, o)
			if err := end(l, att); !errors.Is(err, refused) {
				t.Fatalf("%v; want that it was refused", err)
			}
			if has, err := l.Find(att); err != nil || !slices.Equal(has, pooledBoth) {
				t.Fatalf("after a refusal it has %v, %v; want %v", has, err, pooledBoth)
			}
			fails, told = nil, nil
			must.Do(t, end(l, att))
			if !slices.Equal(told, pooledBoth) {
				t.Errorf("told of %v; want %v", told, pooledBoth)
			}
			told = nil
			delete(w.live, att)
			next := withPool(w, "web-0", pooledBoth)
			if name != "Collect" {
				must.Do(t, end(l, att))
			}
			if has, err := l.Find(next); err != nil || !slices.Equal(has, pooledBoth) || told != nil {
				t.Errorf("after its late end the next one has %v, %v; told of %v", has, err, told)
			}
		})
	}
}

// Killed anywhere, an end leaves no address free of which nobody was told.
func TestAnEndThatIsKilledLeavesNoAddressUntold(t *testing.T) {
	for at := 0; ; at++ {
		w := newWorld(t, testNetwork("", ""))
		att := withPool(w, "web-0", pooledBoth)
		var told []netip.Addr
		o := w.options()
		o.Freeing = func(addrs []netip.Addr) error { told = append(told, addrs...); return nil }
		n := *w.net
		hit := w.killAt(at, func() { _, _ = New(&n, o).Del(DelRequest{Attachment: att}) })
		check := func(when string) (free int) {
			for _, a := range pooledBoth {
				s, err := w.ledger().slot(a)
				must.Do(t, err)
				if s.state != slotFree {
					continue
				}
				free++
				if !slices.Contains(told, a) {
					t.Errorf("killed at operation %d, %s: %s is free and nobody was told", at, when, a)
				}
			}
			return free
		}
		check("at once")
		_, err := New(&n, o).Del(DelRequest{Attachment: att})
		must.Do(t, err)
		if check("repeated") != len(pooledBoth) {
			t.Errorf("killed at operation %d: the repeated DEL leaves addresses", at)
		}
		if !hit {
			break
		}
	}
}

// So is the end of a dead attachment by an ADD that takes its place, of what the new one does not take.
func TestAnAddTellsOfWhatItFreesOfADeadOne(t *testing.T) {
	w := newWorld(t, testNetwork("", ""))
	dead := withPool(w, "web-0", pooledBoth)
	delete(w.netns, w.live[dead].netns.Path)
	var told []netip.Addr
	refused := errors.New("refused")
	fails := refused
	o := w.options()
	o.Freeing = func(addrs []netip.Addr) error { told = append(told, addrs...); return fails }
	n := *w.net
	req := AddRequest{
		Attachment: w.newContainer(), Netns: w.newNetns(), Policy: &retention.Policy{}, Pool: pooledBoth[:1],
		PoolText: "text",
		Pod:      Pod{Namespace: "default", Name: "web-0", UID: uidOf(1)},
	}
	if _, err := New(&n, o).Add(req); !errors.Is(err, refused) {
		t.Fatalf("%v; want that it was refused", err)
	}
	if has, err := w.ledger().Find(dead); err != nil || !slices.Equal(has, pooledBoth) {
		t.Fatalf("after a refusal the dead one has %v, %v; want %v", has, err, pooledBoth)
	}
	if has, err := w.ledger().Find(req.Attachment); !errors.Is(err, ErrUnknownAttachment) {
		t.Fatalf("after a refusal the new one has %v, %v; want none", has, err)
	}
	fails, told = nil, nil
	_, err := New(&n, o).Add(req)
	must.Do(t, err)
	if !slices.Equal(told, pooledBoth[1:]) {
		t.Errorf("told of %v; want %v", told, pooledBoth[1:])
	}
}
