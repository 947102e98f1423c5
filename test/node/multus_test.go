package node

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// multus hands on no annotations, on either runtime. Which networks a pod has is told by its configuration here; by the
// pods' own annotations it is with Kubernetes, see test/cluster.
func TestBehindMultusAPodKeepsTheAddressesOfBothItsInterfaces(t *testing.T) {
	for name, args := range map[string][]string{"by NRI": nil, "by the runtime's list": {"--nri-socket="}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			first := network("10.88.0.0/24")
			second := lab.Network{Name: "blue", IPAM: lab.RangeIPAM("stayput", "10.89.0.0/24")}
			n := install(t, lab.NodeOptions{NoNRI: args != nil, Networks: []lab.Network{first}, Idle: true})
			bin, err := lab.BuildMultus(ctx)
			must.Do(t, err)
			must.Do(t, n.Install(bin.Thin, "/opt/cni/bin/multus"))
			conf, err := json.Marshal(map[string]any{
				"cniVersion": "1.0.0", "name": "multus-cni-network", "plugins": []any{map[string]any{
					"type": "multus", "capabilities": map[string]any{lab.AnnotationsCapability: true},
					"delegates": []any{json.RawMessage(first.Conflist()), json.RawMessage(second.Conflist())},
				}},
			})
			must.Do(t, err)
			must.Do(t, n.WriteFile("/etc/cni/net.d/00-multus.conflist", conf))
			must.Do(t, n.StartContainerd(ctx))
			_, err = n.Start("agent", nil, append([]string{agentPath, "--log-level=debug", "--reconcile-interval=1h",
				criSocket()}, args...)...)
			must.Do(t, err)
			nri := map[bool]string{true: "nri: connected\n", false: "nri: off\n"}[args == nil]
			must.Within(t, patience, "the agent", func() bool {
				ready, err := scrape(t, n, "/readyz")
				return err == nil && strings.Contains(ready, nri+"cri: ok\n")
			})
			promised := func(pods int) {
				t.Helper()
				for network, ranges := range map[string]string{"pods": "10.88.0.1-10.88.0.254", "blue": "10.89.0.1-10.89.0.254"} {
					untilMetric(t, n, fmt.Sprintf(`stayput_range_promised_addresses{network=%q,range=%q}`, network, ranges),
						fmt.Sprint(pods))
				}
			}
			addrs := func(pod lab.Pod) []netip.Addr {
				t.Helper()
				configured, err := n.Addresses(pod.NetNS)
				must.Do(t, err)
				var v4 []netip.Addr
				for _, ifname := range slices.Sorted(maps.Keys(configured)) {
					for _, p := range configured[ifname] {
						if p.Addr().Is4() && !p.Addr().IsLoopback() {
							v4 = append(v4, p.Addr())
						}
					}
				}
				return v4
			}
			pod := runPod(t, n, web(0))
			had := addrs(pod)
			if len(had) != 2 || !strings.HasPrefix(had[0].String(), "10.88.") || !strings.HasPrefix(had[1].String(), "10.89.") {
				t.Fatalf("it has %v", had)
			}
			promised(1)
			for i := range 2 {
				deletePod(t, n, pod)
				between := runPod(t, n, other(i))
				for _, addr := range addrs(between) {
					if slices.Contains(had, addr) {
						t.Errorf("%s has %s", between.Name, addr)
					}
				}
				pod = runPod(t, n, web(0))
				if has := addrs(pod); !slices.Equal(has, had) {
					t.Errorf("it had %v and has %v", had, has)
				}
			}
			promised(1)
		})
	}
}
