package route_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/node/route"
	"github.com/stayput/stayput/test/must"
)

func TestPacketsFollowAPodAndKeepTheirSource(t *testing.T) {
	for _, test := range [][2]string{
		{"host-gw", "iptables"}, {"vxlan", "iptables"}, {"host-gw", "nftables"}, {"vxlan", "nftables"},
	} {
		t.Run(strings.Join(test[:], " "), func(t *testing.T) {
			n := newNodes(t, test[0], test[1])
			tables, _ := n.agents()
			at(tables, 2, (*route.Table).Set)
			n.start(2)
			n.reachable(2)
			n.expect("n3", web4, "web@2 saw "+map[string]string{"host-gw": "10.0.0.3", "vxlan": "10.244.3.0"}[test[0]])
			// Everything else is masqueraded as before.
			n.expect("web@2", netip.MustParseAddr("203.0.113.10"), "ext saw 10.0.0.2")
			n.expect("web@2", netip.MustParseAddr("2001:db8::10"), "ext saw fd00::2")
			n.expect("a2@2", netip.MustParseAddr("203.0.113.10"), "ext saw 10.0.0.2")

			n.stop(2)
			at(tables, 3, put)
			n.start(3)
			n.reachable(3)
			for i := 1; i <= 3; i++ {
				if err := n.trouble(i); err != nil {
					t.Errorf("node %d: %v", i, err)
				}
			}
		})
	}
}

// What kube-proxy or portmap has marked is masqueraded, or an answer would not come back the way that it was asked.
func TestWhatIsMarkedIsMasqueraded(t *testing.T) {
	for _, mark := range []string{"0x4000", "0x2000"} {
		n := newNodes(t, "host-gw", "")
		n.run("n2", "iptables", "-w", "-t", "mangle", "-A", "PREROUTING", "-s", "10.244.2.2", "-j", "MARK", "--or-mark", mark)
		n.run("n2", "iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-m", "mark", "--mark", mark+"/"+mark,
			"-j", "MASQUERADE")
		tables, _ := n.agents()
		at(tables, 2, (*route.Table).Set)
		n.start(2)
		must.Eventually(t, "the table", func() bool { return n.tables(2) > 0 })
		n.expect("a2@2", web4, "web@2 saw 10.244.2.1")
		n.expect("a1@1", web4, "web@2 saw 10.244.1.2")
	}
}

func TestPodsBesideAskTheNodeAndFollow(t *testing.T) {
	n := newNodes(t, "host-gw", "")
	tables, _ := n.agents()
	at(tables, 2, (*route.Table).Set)
	must.Eventually(t, "the table, before the pod is there", func() bool { return n.tables(2) > 0 })
	n.start(2)
	for a, family := range map[netip.Addr]byte{web4: unix.NFPROTO_IPV4, web6: unix.NFPROTO_IPV6} {
		n.talk("a2@2", a, "a redirect that is dropped", func() bool { return n.dropped(2, family) > 0 })
		if known := n.run("a2@2", "ip", "neigh"); strings.Contains(known, a.String()) {
			t.Errorf("a2 asks for %s itself: %s", a, known)
		}
	}
	n.reachable(2)
	n.stop(2)
	at(tables, 3, put)
	n.start(3)
	n.reachable(3)
	n.stop(3)
	at(tables, 2, put)
	n.start(2)
	n.reachable(2)
}

func TestRoutesComeBack(t *testing.T) {
	n := newNodes(t, "vxlan", "iptables")
	tables, _ := n.agents()
	at(tables, 2, (*route.Table).Set)
	n.start(2)
	n.reachable(2)
	for _, event := range []struct {
		what string
		lose func()
	}{
		{"flannel starts again", func() { n.ip("n1", "link del flannel.1"); n.flannel(1) }},
		{"another node's does", func() { n.ip("n3", "link del flannel.1"); n.flannel(3) }},
		{"the bridge blinks", func() {
			n.ip("n2", "link set cni0 down", "link set cni0 up", "addr replace fd00:10:244:2::1/64 dev cni0 nodad")
		}},
		{"somebody removes one", func() { n.ip("n1", fmt.Sprintf("route del %s", web4)) }},
		{"somebody removes the pod's", func() {
			n.ip("n2", fmt.Sprintf("route del %s", web4), fmt.Sprintf("-6 route del %s", web6))
		}},
	} {
		t.Log(event.what)
		event.lose()
		n.reachable(2)
	}
}

// `nft flush ruleset` takes every table. No look at all is due here for an hour.
func TestTheTableOfSourcesComesBack(t *testing.T) {
	n := newNodes(t, "vxlan", "iptables")
	tables, _ := n.agents()
	at(tables, 2, (*route.Table).Set)
	n.start(2)
	n.reachable(2)
	ns, err := os.Open(n.options(2).Netns)
	must.Do(t, err)
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	must.Do(t, err)
	c.FlushRuleset()
	must.Do(t, c.Flush())
	if n.tables(2) != 0 {
		t.Fatal("the table is not gone")
	}
	for end := time.Now().Add(30 * time.Second); n.tables(2) == 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the table does not come back")
		}
	}
}

// The plugin has set up a pod, and its agent is told what was before that.
func TestAnOldWordTakesNothingFromAPod(t *testing.T) {
	n := newNodes(t, "host-gw", "")
	n.start(2)
	tables, stop := n.agents()
	at(tables, 3, (*route.Table).Set) // its status was not written yet
	must.Eventually(t, "others go by the old word", func() bool {
		return strings.Contains(n.run("n1", "ip", "route"), web4.String()+" via 10.0.0.3")
	})
	n.expect("a2@2", web4, "web@2 saw 10.244.2.2")
	at(tables, 2, put)
	n.reachable(2)

	stop() // and the same once more, after its agent has started
	tables, _ = n.agents()
	at(tables, 3, (*route.Table).Set)
	must.Eventually(t, "others go by the old word", func() bool {
		return strings.Contains(n.run("n1", "ip", "route"), web4.String()+" via 10.0.0.3")
	})
	n.expect("a2@2", web4, "web@2 saw 10.244.2.2")
	at(tables, 2, put)
	n.reachable(2)
}

// The ledger freed an address without a DEL that takes its route away.
func TestARouteToNobodyGoes(t *testing.T) {
	n := newNodes(t, "host-gw", "")
	tables, _ := n.agents()
	n.start(2)
	n.start(1) // the old pod, whose node was away
	n.mu.Lock()
	n.blind = true
	n.mu.Unlock()
	at(tables, 2, (*route.Table).Set)
	must.Eventually(t, "a word about the ledger", func() bool { return errors.Is(n.trouble(1), errBlind) })
	if said := n.run("n1", "ip", "route"); !strings.Contains(said, web4.String()+" dev cni0") {
		t.Fatalf("without its ledger the node changed its routes: %s", said)
	}
	n.mu.Lock()
	n.blind = false
	n.mu.Unlock()
	n.ledger(1, false)
	n.reachable(2)
}

func TestARefusalIsBetterThanTheOldNode(t *testing.T) {
	n := newNodes(t, "host-gw", "")
	tables, _ := n.agents()
	at(tables, 2, (*route.Table).Set)
	n.start(2)
	n.reachable(2)
	n.ip("n1", "route del 10.244.3.0/24")
	at(tables, 3, put)
	must.Eventually(t, "a refusal", func() bool {
		return strings.Contains(n.run("n1", "ip", "route"), "unreachable "+web4.String())
	})
	n.stop(2)
	n.start(3)
	n.ip("n1", "route add 10.244.3.0/24 via 10.0.0.3 dev eth0")
	n.reachable(3)
}

func TestRoutesOutliveTheAgentAndNotStayput(t *testing.T) {
	n := newNodes(t, "host-gw", "iptables")
	tables, stop := n.agents()
	at(tables, 2, (*route.Table).Set)
	n.start(2)
	n.reachable(2)
	stop()
	n.reachable(2)
	tables, stop = n.agents() // which know nothing
	n.reachable(2)
	n.stop(2)
	at(tables, 3, (*route.Table).Set)
	n.start(3)
	n.reachable(3)

	// The API server has forgotten it: the pod runs.
	for _, table := range tables {
		table.Set(nil)
	}
	n.ip("n3", "route add 198.51.100.1/32 dev cni0 proto 84") // once it is gone they have all looked
	must.Eventually(t, "a look", func() bool { return !strings.Contains(n.run("n3", "ip", "route"), "198.51.100.1") })
	n.expect("a1@1", web4, "web@3 saw 10.244.1.2")

	// Nobody has it, for long.
	n.stop(3)
	stop()
	n.keep = time.Nanosecond
	tables, stop = n.agents()
	left := func(i int) (found string) {
		node := fmt.Sprintf("n%d", i)
		for line := range strings.Lines(n.run(node, "ip", "route") + n.run(node, "ip", "-6", "route")) {
			if strings.Contains(line, web4.String()) || strings.Contains(line, web6.String()) {
				found += line
			}
		}
		if n.tables(i) > 0 {
			found += "a table"
		}
		return found
	}
	for i, table := range tables {
		must.Eventually(t, "nothing on a node", func() bool {
			table.Set(nil) // two looks
			return left(i+1) == ""
		})
	}
	at(tables, 2, (*route.Table).Set)
	n.start(2)
	n.reachable(2)
	n.stop(2)
	at(tables, 3, put)
	n.start(3)
	n.reachable(3)
	stop()
	n.stop(3)
	for i := 1; i <= 3; i++ {
		must.Do(t, route.Remove(n.options(i)))
		if found := left(i); found != "" {
			t.Errorf("on node %d: %s", i, found)
		}
	}
}
