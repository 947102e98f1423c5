package node

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/nodetest"
)

// laterBoot is a clock after a reboot.
type laterBoot struct{ ledger.Clock }

func (c laterBoot) Now() (ledger.Instant, error) {
	now, err := c.Clock.Now()
	now.BootID = "later"
	return now, err
}

// afterPowerLoss lists what the first command of the next boot makes of the network if no address file reached the
// disk.
func (w *world) afterPowerLoss() []ledger.Address {
	w.t.Helper()
	addrs, err := w.ledger.List()
	check(w.t, err)
	for _, a := range addrs {
		check(w.t, os.Remove(filepath.Join(w.net.DataDir, w.net.Name, a.Addr.String())))
	}
	o := w.a.ledgers
	o.Clock = laterBoot{o.Clock}
	l := ledger.New(w.net, o)
	check(w.t, l.Prepare())
	addrs, err = l.List()
	check(w.t, err)
	return addrs
}

func TestAPowerLossPromisesNothingToAPodThatWasRefused(t *testing.T) {
	w := newWorld(t)
	w.net.PromisedShare = 1.0 / 254
	policy, _, err := retention.Parse(ten)
	check(t, err)
	for i, id := range []string{"c1", "c2", "c3"} {
		s := w.sandbox(id, "web-"+id, ten)
		told := &policy
		if i == 2 {
			told = nil
		}
		nodetest.Configure(t, s.Netns, w.addOn(w.ledger, s, "eth0", told)...)
		w.a.RunPodSandbox(s)
		w.settle()
	}
	if addrs := w.afterPowerLoss(); len(addrs) != 1 || addrs[0].Key.Pod != "web-c1" {
		t.Errorf("promised are %+v", addrs)
	}
}

func TestAReleasedPromiseDoesNotComeBackWithAPowerLoss(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	nodetest.Configure(t, s.Netns, w.add(s))
	w.a.RunPodSandbox(s)
	w.settle()
	addrs, err := w.ledger.List()
	check(t, err)
	check(t, w.ledger.Release(*addrs[0].Key))
	w.del(s)
	if addrs := w.afterPowerLoss(); len(addrs) != 0 {
		t.Errorf("promised are %+v", addrs)
	}
}

func TestSandboxesThatComeAndGoLeaveNoFilesWhileTheRuntimeCannotBeAsked(t *testing.T) {
	w := newWorld(t)
	w.runtime.Fail(nodetest.ErrRuntime)
	s := w.sandbox("c0", "web-0", ten)
	w.add(s)
	w.a.RunPodSandbox(s)
	w.settle()
	w.del(s)
	before := w.files()
	for _, id := range []string{"c1", "c2", "c3"} {
		w.clock.Pass(configureTime)
		s.ID = id
		w.add(s)
		w.a.RunPodSandbox(s)
		w.settle()
		w.del(s)
		if err := w.reconcile(); err == nil {
			t.Fatal("the runtime answers")
		}
	}
	if after := w.files(); after != before {
		t.Errorf("%d files became %d", before, after)
	}
}

// files counts the network's files in the state directory.
func (w *world) files() (n int) {
	w.t.Helper()
	dirs, err := filepath.Glob(filepath.Join(w.a.o.StateDir, "pods-*"))
	check(w.t, err)
	check(w.t, filepath.WalkDir(dirs[0], func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return err
	}))
	return n
}
