package pool

import (
	"net/netip"
	"testing"
	"time"
)

// A pod that takes any address is woken when one of its own becomes free, though it waits for none in particular.
func TestAPodThatTakesAnyAddressIsWokenForItsOwn(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Pod)
	}{
		{"of a shared identity", func(p *Pod) { p.Identity = "front" }},
		{"that takes another rather than wait", func(p *Pod) { p.AllocateNew = true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := bookOf(t, Spec{Mode: L2, Subnet: "10.6.0.0/24"})
			a := netip.MustParseAddr("10.6.0.9")
			owner := gatedPod(1)
			owner.Keep = Keep{For: time.Hour}
			c.change(&owner)
			b.SetPodIP(PodIP{Addr: a, UID: "ip", Version: "1", Pool: "p", Namespace: owner.Namespace, PodName: owner.Name,
				Identity: owner.Identity, PodUID: "before", Network: "net", Interface: "eth0", Keep: owner.Keep, Held: true,
				Phase: Bound, StatusUID: "before", Node: "n1", Since: noon})
			p := *b.Pool("p")
			p.Disabled = true
			b.SetPool(p)
			if got, plan := place(t, b, owner, noon); got.IsValid() || plan.Reason == "" {
				t.Fatalf("it gets %s: %+v", got, plan)
			}
			b.Woken(noon)
			ended := *b.PodIP(a)
			ended.Phase, ended.Version = Retained, "2"
			b.SetPodIP(ended)
			woken := false
			for _, k := range b.Woken(noon) {
				woken = woken || k == owner.Key()
			}
			if plan := b.Place(owner.UID, noon); plan.Reason != "" || !woken {
				t.Errorf("woken: %t; %+v", woken, plan)
			}
		})
	}
}
