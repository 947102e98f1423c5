package node

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/nodetest"
)

func TestADiskThatCannotBeWrittenIsCountedAndWhatWasMissedIsDoneLater(t *testing.T) {
	w := newWorld(t)
	due := w.retained("c1")
	s := w.sandbox("c2", "web-1", ten)
	addr := w.add(s)
	nodetest.Configure(t, s.Netns, addr)
	check(t, w.a.spool.spool.Report([]ledger.Event{{Reason: ledger.EventRefused, Key: ledger.Key{Network: "pods"}}}))
	check(t, unix.Mount(w.dir, w.dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(w.dir, unix.MNT_DETACH) })
	check(t, unix.Mount("", w.dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	work := func() {
		w.clock.Pass(10 * time.Minute)
		w.a.RunPodSandbox(s)
		w.settle()
		w.a.book.expire()
		w.a.spool.take(t.Context())
	}
	errors := map[string]prometheus.Counter{
		"policy": w.a.metrics.policyErrors, "expire": w.a.metrics.expireErrors, "spool": w.a.metrics.spoolErrors,
	}
	work()
	counted := map[string]float64{}
	for what, c := range errors {
		if counted[what] = testutil.ToFloat64(c); counted[what] == 0 {
			t.Errorf("%s: cannot count the command", what)
		}
	}
	check(t, unix.Unmount(w.dir, 0))
	w.want(due, ledger.StateRetained)
	work()
	for what, c := range errors {
		if n := testutil.ToFloat64(c); n != counted[what] {
			t.Errorf("%s: counted %v, and %v in the end", what, counted[what], n)
		}
	}
	w.want(due, "")
	w.del(s)
	w.want(addr, ledger.StateRetained)
}
