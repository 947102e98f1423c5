package ledger

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"
)

func TestWhatAContainerLeftMovesToTheOneThatUsesIt(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", "fd00::/64"))
	w.netns[theNs.Path] = theNs
	pod := Pod{Namespace: "default", Name: "web-0"}
	from, addrs, err := w.add("web-0", ordinary)
	if err != nil {
		t.Fatal(err)
	}
	move := func(to Attachment, ns Netns, requested ...netip.Addr) (*Result, error) {
		return w.ledger().Move(from,
			AddRequest{Attachment: to, Pod: pod, Netns: ns, Policy: tenMinutes, Requested: requested})
	}
	unchanged := func(err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
		if got, err := w.ledger().Find(from); err != nil || !slices.Equal(got, addrs) {
			t.Errorf("%s has %v, %v", from, got, err)
		}
		if n, err := w.ledger().allClaims(); err != nil || len(n.claims) != 0 {
			t.Errorf("there are claims %v, %v", n, err)
		}
		w.check()
	}
	_, err = move(theAtt, theNs, addrs...)
	unchanged(err, ErrInUse) // it runs
	delete(w.netns, w.live[from].netns.Path)
	_, err = move(theAtt, theNs, addrs[0])
	unchanged(err, ErrUnknownAttachment) // another family than was seen
	_, err = move(theAtt, theNs, addrs[0], netip.MustParseAddr("fd00::77"))
	unchanged(err, ErrUnknownAttachment)
	other, _, err := w.add("job", ordinary)
	if err != nil {
		t.Fatal(err)
	}
	_, err = move(other, w.live[other].netns, addrs...)
	unchanged(err, ErrDuplicate)

	w.net.PromisedShare = 0.000001 // of one address, which is taken
	w.add("web-9", tenMinutes)
	r, err := move(theAtt, theNs, addrs...)
	if err != nil || len(r.Addrs) != 0 || len(r.Events) != 1 || r.Events[0].Reason != EventRefused {
		t.Errorf("at the limit of promises: %+v, %v", r, err)
	}
	if got, err := w.ledger().Find(from); err != nil || !slices.Equal(got, addrs) {
		t.Errorf("%s has %v, %v", from, got, err)
	}
	w.net.PromisedShare = 1

	if r, err = move(theAtt, theNs, addrs...); err != nil || !slices.Equal(r.Addrs, addrs) {
		t.Fatalf("%+v, %v", r, err)
	}
	w.check()
	if _, err = move(theAtt, theNs, addrs...); !errors.Is(err, ErrUnknownAttachment) {
		t.Errorf("once more: %v", err)
	}
	// A late DEL of the old one is none of the new one's business; its own DEL begins the retention.
	if r, err := w.ledger().Del(DelRequest{Attachment: from}); err != nil || len(r.Addrs) != 0 {
		t.Errorf("DEL of the old one: %+v, %v", r, err)
	}
	w.advance(time.Hour)
	if expired, _, err := w.ledger().Expire(); err != nil || len(expired) != 0 {
		t.Errorf("expired %v, %v", expired, err)
	}
	delete(w.netns, theNs.Path)
	if r, err := w.ledger().Del(DelRequest{Attachment: theAtt}); err != nil || !slices.Equal(r.Addrs, addrs) {
		t.Errorf("DEL of the new one: %+v, %v", r, err)
	}
	if _, again, err := w.add("web-0", tenMinutes); err != nil || !slices.Equal(again, addrs) {
		t.Errorf("it came back with %v, %v", again, err)
	}
	w.check()
}

// Who changes files by hand does not take the lock: a command that runs at that moment stamps what it has not seen.
func TestWhatAStampHidesIsFoundByList(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	w.netns[theNs.Path] = theNs
	if _, _, err := w.add("web-0", ordinary); err != nil {
		t.Fatal(err)
	}
	hidden := netip.MustParseAddr("10.1.0.9")
	from := Attachment{ContainerID: "hidden", IfName: "eth0"}
	s, err := w.ledger().begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := w.fs.WriteFile(s.slotPath(hidden), encodeBound(from), 0o600); err != nil {
		t.Fatal(err)
	}
	s.touched, s.trusted = true, true
	s.end()
	if got, err := w.ledger().Find(from); !errors.Is(err, ErrUnknownAttachment) {
		t.Fatalf("nothing is hidden: %v, %v", got, err)
	}

	all, err := w.ledger().List()
	if err != nil || !slices.ContainsFunc(all, func(a Address) bool { return a.Addr == hidden && a.Attachment == from }) {
		t.Fatalf("listed are %v, %v", all, err)
	}
	to := AddRequest{Attachment: theAtt, Pod: Pod{Namespace: "default", Name: "web-9"}, Netns: theNs, Policy: tenMinutes,
		Requested: []netip.Addr{hidden}}
	if r, err := w.ledger().Move(from, to); err != nil || !slices.Equal(r.Addrs, to.Requested) {
		t.Errorf("%+v, %v", r, err)
	}
	w.check()
}
