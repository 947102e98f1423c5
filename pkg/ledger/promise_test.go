package ledger

import (
	"testing"
	"time"
)

func TestAWholeIPv6NetworkMayBePromised(t *testing.T) {
	w := newWorld(t, testNetwork("fd00::/64", ""))
	w.net.PromisedShare = 1
	for _, pod := range []string{"web-0", "web-1", "web-2"} {
		w.add(pod, tenMinutes)
	}
	if len(w.promises) != 3 {
		w.failf("%d promises, want 3", len(w.promises))
	}
}

// The pod asks for nothing any more, and its address is outside the ranges by now.
func TestAPromiseThatAPodGivesUpDoesNotComeBackWithAPowerLoss(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/28", ""))
	stopped(w, "web-0", tenMinutes)
	w.fs.lose("all", nil) // nothing: it is durable from now on
	w.net.Ranges = testNetwork("10.2.0.0/28", "").Ranges
	w.add("web-0", ordinary)
	w.losePower(0)
	w.check()
	w.explained()
}

// An ordinary pod gets an address that is promised for longer than it should be, since there is no other.
func TestAnOverduePromiseDoesNotComeBackWithAPowerLossOnceItsAddressIsAnothers(t *testing.T) {
	w := newWorld(t, testNetwork("10.1.0.0/30", ""))
	stopped(w, "web-0", tenMinutes)
	w.fs.lose("all", nil) // nothing: it is durable from now on
	w.advance(11 * time.Minute)
	w.add("job", ordinary)
	w.losePower(0)
	w.check()
	w.explained()
}
