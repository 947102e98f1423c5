package node

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
)

// A runtime that was started again may look in other directories by now.
func TestTheKeeperAsksARuntimeThatReconnects(t *testing.T) {
	w := newWorld(t)
	for name, reconnect := range map[string]func(){
		"NRI": func() { w.a.Connected(true) }, "CRI": w.a.cri.Restarted,
	} {
		reconnect()
		select {
		case <-w.a.reconnected:
		default:
			t.Errorf("%s: the keeper is not woken", name)
		}
	}
	w.a.Connected(false)
	select {
	case <-w.a.reconnected:
		t.Error("it is asked while it is away")
	default:
	}
}

func TestWhatIsInUseIsKnownOfEveryNetworkOrNotAtAll(t *testing.T) {
	w := newWorld(t)
	networks := w.a.queue.policies.networks
	if all, err := networks.inUse(); len(all) != 0 || err != nil {
		t.Errorf("%v, %v", all, err)
	}
	other := ledger.New(network(t, "other", filepath.Join(w.dir, "networks"), "198.51.100.0/24"), w.a.ledgers)
	for _, l := range []*ledger.Ledger{w.ledger, other} {
		check(t, l.Prepare())
	}
	check(t, os.WriteFile(filepath.Join(w.dir, "networks/pods/192.0.2.7"), []byte("c1\r\neth0"), 0o600))
	all, err := networks.inUse()
	check(t, err)
	for _, o := range all {
		var want []netip.Addr
		if o.Name == "pods" {
			want = []netip.Addr{netip.MustParseAddr("192.0.2.7")}
		}
		if o.DataDir != filepath.Join(w.dir, "networks") || !slices.Equal(o.Addrs, want) {
			t.Errorf("%+v, want %v", o, want)
		}
	}
	if len(all) != 2 {
		t.Errorf("%d networks", len(all))
	}
	descriptions, err := filepath.Glob(filepath.Join(w.dir, "state/other-*/network"))
	check(t, err)
	check(t, os.WriteFile(descriptions[0], []byte("{"), 0o600))
	if all, err := networks.inUse(); err == nil {
		t.Errorf("with one that cannot be read: %v", all)
	}
}
