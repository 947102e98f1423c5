package node

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/retention"
	"github.com/stayput/stayput/test/nodetest"
)

// The agent promises nothing of an address of a pool, also if the ledger has forgotten that the plugin had decided so.
func TestNothingIsPromisedOfAnAddressOfAPool(t *testing.T) {
	const uid = "6f1c6a5e-8f0e-4d3b-9a55-0d4f6a1c2b3e"
	const text = `[{"interface":"eth0","pool":"blue","mode":"L2","address":"192.0.2.77/24"}]`
	for name, tell := range map[string]func(w *world, s *Sandbox){
		"by its annotation":  func(_ *world, s *Sandbox) { s.Annotations[netconf.AnnotationAddresses] = text },
		"by the grant alone": func(*world, *Sandbox) {},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s := w.sandbox("c1", "web-0", map[string]string{retention.AnnotationRetainIP: "10m"})
			s.Pod.UID = uid
			tell(w, &s)
			pending, err := w.a.ledgers.Grants().Begin(uid, text)
			check(t, err)
			check(t, pending.Finish())
			ns, _, err := ledger.SystemNetns{}.Identify(s.Netns)
			check(t, err)
			pooled := netip.MustParseAddr("192.0.2.77")
			_, err = w.ledger.Add(ledger.AddRequest{Attachment: ledger.Attachment{ContainerID: s.ID, IfName: "eth0"},
				Pod: s.Pod, Netns: ns, Pool: []netip.Addr{pooled}, PoolText: text})
			check(t, err)
			nodetest.Configure(t, s.Netns, pooled)
			index, err := filepath.Glob(filepath.Join(w.a.o.StateDir, "pods-*", "index", "*"))
			check(t, err)
			for _, entry := range index {
				check(t, os.Remove(entry))
			}
			w.runs(s)
			check(t, w.reconcile())
			w.a.RunPodSandbox(s)
			w.settle()
			w.want(pooled, ledger.StateBound)
			w.del(s)
			w.want(pooled, "")
			ordinary := w.sandbox("c2", "web-1", ten) // the control
			w.add(ordinary)
			w.a.RunPodSandbox(ordinary)
			addr := w.addr("c2")
			w.del(ordinary)
			w.want(addr, ledger.StateRetained)
		})
	}
}

func TestTheAgentLearnsOfPoolsByTheInstallation(t *testing.T) {
	w, c := newWorld(t), nodetest.StartCluster(t)
	c.Install("first")
	r := w.installedIn(c)
	eventually(t, "follows the installation", func() bool {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		return len(c.Followers) > 0
	})
	asked := func() int {
		return c.Count("GET /api/v1/pods") + c.Count("GET /apis/stayput.io/v1alpha1/podip")
	}
	if n := asked(); n > 0 {
		t.Errorf("%d requests without a pool", n)
	}
	c.SetPools(true)
	eventually(t, "asks", func() bool { return asked() > 1 && r.pools.Trouble() != "" })
	routed := func() int { return c.Count("GET /apis/stayput.io/v1alpha1/podips") }
	if n := routed(); n > 0 {
		t.Errorf("%d requests for PodIPs without a pool of mode Routed", n)
	}
	c.SetRouted(true)
	eventually(t, "asks where routed addresses are", func() bool { return routed() > 0 })
	c.SetPools(false)
	eventually(t, "stopped", func() bool { return r.pools.Trouble() == "" })
}
