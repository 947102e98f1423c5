package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/nodetest"
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

func TestPodsOfANetworkThatStayputHasNotServedYetAreMarked(t *testing.T) {
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
	check(t, w.reconcile())
	if addrs, err := served[0].List(); err != nil || len(addrs) != 1 || addrs[0].Key == nil {
		t.Errorf("%+v, %v", addrs, err)
	}
}

func TestAMissedMarkIsWrittenAndAGoneSandboxsIsDropped(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	w.add(s)
	w.runs(s)
	check(t, w.reconcile())
	marks, err := w.ledger.Marks()
	check(t, err)
	if len(marks) != 1 || marks[0].ContainerID != "c1" {
		t.Fatalf("marks %v", marks)
	}

	w.runtime.Forget("c1")
	check(t, w.reconcile())
	if marks, _ := w.ledger.Marks(); len(marks) != 1 {
		t.Error("the mark of a sandbox was dropped that still has an address: its leak could not be retained")
	}
	w.del(s)
	w.runtime.Fail(nodetest.ErrRuntime)
	if err := w.reconcile(); err == nil {
		t.Error("no error")
	}
	if marks, _ := w.ledger.Marks(); len(marks) != 1 {
		t.Error("a mark was dropped although the runtime did not answer")
	}
	w.runtime.Fail(nil)
	check(t, w.reconcile())
	if marks, _ := w.ledger.Marks(); len(marks) != 0 {
		t.Errorf("marks %v", marks)
	}
}

func TestAMarkIsNotWrittenTwice(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	w.add(s)
	w.runs(s)
	check(t, w.reconcile())
	marks := filepath.Join(w.a.o.StateDir, "*", "marks", "*")
	files, err := filepath.Glob(marks)
	check(t, err)
	if len(files) != 1 {
		t.Fatalf("marks %v", files)
	}
	before, err := os.Stat(files[0])
	check(t, err)
	check(t, w.reconcile())
	after, err := os.Stat(files[0])
	check(t, err)
	if !os.SameFile(before, after) {
		t.Error("the mark was written again: two fsyncs for every pod at every reconciliation")
	}
}

func TestNoMarkIsDroppedWhileANetworkCannotBeRead(t *testing.T) {
	w := newWorld(t)
	s := w.sandbox("c1", "web-0", ten)
	w.add(s)
	other := ledger.New(network(t, "other", filepath.Join(w.dir, "networks"), "198.51.100.0/24"), w.a.ledgers)
	w.addOn(other, s, "net1", nil)
	w.a.RunPodSandbox(s) // marks it in both
	w.del(s)
	w.corrupt()
	check(t, w.reconcile())
	if marks, err := w.ledger.Marks(); err != nil || len(marks) != 1 {
		t.Errorf("marks %v, %v", marks, err)
	}
	_, err := other.Del(ledger.DelRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: "net1"}, Pod: s.Pod})
	check(t, err)
	check(t, w.reconcile())
	if marks, err := other.Marks(); err != nil || len(marks) != 1 {
		t.Errorf("the other network's marks %v, %v: the address may be in the one that cannot be read", marks, err)
	}
}
