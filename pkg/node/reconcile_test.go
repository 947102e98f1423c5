package node

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
)

// hostLocal writes an address file as host-local does.
func (w *world) hostLocal(addr, id string) {
	w.t.Helper()
	dir := filepath.Join(w.net.DataDir, w.net.Name)
	check(w.t, os.MkdirAll(dir, 0o755))
	check(w.t, os.WriteFile(filepath.Join(dir, addr), []byte(id+"\r\neth0"), 0o600))
}

func TestAPodThatRanBeforeStayputIsAdopted(t *testing.T) {
	w := newWorld(t)
	old := w.sandbox("c1", "web-0", ten)
	w.hostLocal("192.0.2.9", "c1")
	w.runs(old)
	w.add(w.sandbox("c2", "other", nil)) // the network's first command by stayput
	check(t, w.reconcile())
	addrs, err := w.ledger.List()
	check(t, err)
	for _, a := range addrs {
		if a.Attachment.ContainerID == "c1" && (a.Pod != old.Pod || a.Netns.Path != old.Netns || a.Key == nil) {
			t.Errorf("adopted as %+v", a)
		}
	}
	w.del(old)
	if a := addrs[len(addrs)-1].Addr; a.String() != "192.0.2.9" {
		t.Errorf("the last address is %s", a)
	} else {
		w.want(a, ledger.StateRetained)
	}
}

func TestPodsOfANetworkThatStayputHasNotServedYetArePromised(t *testing.T) {
	w := newWorld(t)
	conf := `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","dataDir":"` +
		w.net.DataDir + `","stateDir":"` + w.a.o.StateDir + `"}}]}`
	check(t, os.WriteFile(filepath.Join(w.dir, "net.d", "10-pods.conflist"), []byte(conf), 0o644))
	check(t, os.WriteFile(filepath.Join(w.dir, "net.d", "20-other.conf"),
		[]byte(`{"name":"other","ipam":{"type":"host-local"}}`), 0o644))
	check(t, os.WriteFile(filepath.Join(w.dir, "net.d", "30-bad.conf"), []byte(`{`), 0o644))
	old := w.sandbox("c1", "web-0", ten)
	w.hostLocal("192.0.2.9", "c1")
	w.runs(old)
	check(t, w.reconcile())
	// The first command of the network is the DEL of a runtime that hands on no annotations.
	w.del(old)
	addrs, err := w.ledger.List()
	check(t, err)
	if len(addrs) != 1 || addrs[0].State != ledger.StateRetained {
		t.Errorf("the ledger says %+v", addrs)
	}
}

func TestPodsFromBeforeStayputArePromisedBeforeTheFirstCommand(t *testing.T) {
	w := newWorld(t)
	conf := `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","ipam":{"type":"stayput","subnet":"192.0.2.0/24","dataDir":"` + w.net.DataDir + `","stateDir":"` + w.a.o.StateDir + `"}}]}`
	check(t, os.WriteFile(filepath.Join(w.dir, "net.d", "10-pods.conflist"), []byte(conf), 0o644))
	w.hostLocal("192.0.2.9", "c1")
	w.runs(w.sandbox("c1", "web-0", ten))
	check(t, w.reconcile()) // it describes the network
	served, whole := w.a.book.networks.open()
	if !whole || len(served) != 1 || len(served[0].Network().Ranges) != 1 {
		t.Fatalf("the networks are %v", served)
	}
	if addrs, err := served[0].List(); err != nil || len(addrs) != 1 || addrs[0].Key == nil {
		t.Errorf("%+v, %v", addrs, err)
	}
}

func TestANetworkThatNoConfigurationNamesIsForgottenOnceItIsEmptyForLong(t *testing.T) {
	for _, c := range []struct {
		name        string
		named, runs bool
		known       int
	}{{"empty", false, false, 0}, {"a pod runs", false, true, 1}, {"a configuration names it", true, false, 1}} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			if c.named {
				conf := `{"cniVersion":"1.0.0","name":"pods","type":"bridge","ipam":{"type":"stayput","dataDir":"` + w.net.DataDir +
					`","stateDir":"` + w.a.o.StateDir + `"}}`
				check(t, os.WriteFile(filepath.Join(w.dir, "net.d", "10-pods.conf"), []byte(conf), 0o644))
			}
			s := w.sandbox("c1", "web-0", nil)
			w.add(s)
			if c.runs {
				w.runs(s)
			} else {
				w.del(s)
			}
			for _, after := range []time.Duration{23 * time.Hour, 25 * time.Hour} {
				if served, whole := w.a.book.networks.open(); !whole || len(served) != 1 {
					t.Fatalf("before %s the networks are %v", after, served)
				}
				w.clock.SetWall(time.Now().Add(after))
				check(t, w.reconcile())
			}
			if served, whole := w.a.book.networks.open(); !whole || len(served) != c.known {
				t.Errorf("the networks are %v, want %d", served, c.known)
			}
		})
	}
}
