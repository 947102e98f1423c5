package route

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

// elementsOf returns how many elements each set of the table has.
func elementsOf(t *testing.T, k *kernel) map[string]int {
	t.Helper()
	c, table, err := sourceTable(k.ns)
	must.Do(t, err)
	sets, err := c.GetSets(table)
	must.Do(t, err)
	n := map[string]int{}
	for _, s := range sets {
		all, err := c.GetSetElements(s)
		must.Do(t, err)
		n[s.Name] = len(all)
	}
	return n
}

func TestSourcesChangeInATableThatIsThere(t *testing.T) {
	k, err := open(Options{Netns: nodetest.Netns(t, t.TempDir(), "node")})
	must.Do(t, err)
	defer k.close()
	cluster := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::/64")}
	all := func(texts ...string) (addrs []netip.Addr) {
		for _, s := range texts {
			addrs = append(addrs, netip.MustParseAddr(s))
		}
		return addrs
	}
	is := all("10.6.0.1", "10.6.0.2")
	must.Do(t, k.keepSources(is, cluster))
	for _, next := range [][]netip.Addr{
		all("10.6.0.1", "10.6.0.2", "10.6.0.3", "fd00:6::1"), all("10.6.0.3", "fd00:6::1"), all("fd00:6::1", "fd00:6::2"),
		all("10.6.0.1"),
	} {
		must.Do(t, k.changeSources(is, next))
		c, table, err := sourceTable(k.ns)
		must.Do(t, err)
		kept, err := sourcesKept(c, table, next, cluster)
		must.Do(t, err)
		n := elementsOf(t, k)
		if !kept || n["here4"] != n["self4"] || n["here6"] != n["self6"] || n["here4"]+n["here6"] != len(next) {
			t.Errorf("after %v to %v: kept %t, elements %v", is, next, kept, n)
		}
		is = next
	}

	// What another program has changed is an error, which changes nothing.
	was := elementsOf(t, k)
	if k.changeSources(all("10.6.0.9"), all("10.6.0.8")) == nil {
		t.Error("an address that is not there was taken away")
	}
	if now := elementsOf(t, k); now["here4"] != was["here4"] {
		t.Errorf("after an error: elements %v, before %v", now, was)
	}
	must.Do(t, k.keepSources(nil, nil))
	if k.changeSources(is, slices.Concat(is, all("10.6.0.2"))) == nil {
		t.Error("a table that is not there was changed")
	}
}
