package cniconf

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/stayput/stayput/pkg/ledger"
)

// Occupied is a network that has addresses which are not free.
type Occupied struct {
	Name, DataDir string
	Addrs         []netip.Addr
}

// network returns the network of which stayput has the addresses, or would have them instead of host-local, with its
// ranges if the file has them. It returns nil if there is none.
func (c *Conf) network() *ledger.Network {
	p := c.plugin(func(p map[string]any) bool { return gives(p) || namesStayput(p) })
	if p == nil {
		return nil
	}
	p = clone(p).(map[string]any)
	section(p, "ipam") // of flannel's it may be missing
	conf, err := parseGiven(c.list, p)
	if err != nil {
		return nil
	}
	n, err := conf.Network()
	if err != nil {
		n = conf.Bare()
	}
	n.DataDir = filepath.Clean(cmp.Or(n.DataDir, ledger.DefaultDataDir))
	return n
}

func sameNetwork(a, b *ledger.Network) bool { return a.Name == b.Name && a.DataDir == b.DataDir }

// inUse returns the network to keep although the source has another name or data directory, nil if the source's counts:
// addresses of its ranges are in use in that network, and by another name, or in another directory, they would be given
// to other pods. If it is unknown what is in use, the file stays as it is.
func (k *Keeper) inUse(dir confDir) (*ledger.Network, error) {
	if !dir.first.is(Stock) {
		return nil, nil
	}
	var current *ledger.Network
	if dir.ours {
		current = dir.own.network()
	}
	wanted := dir.first.network()
	if wanted == nil || current != nil && sameNetwork(current, wanted) {
		return nil, nil
	}
	all, err := k.o.Networks()
	if err != nil {
		return current, fmt.Errorf("addresses in use: %w", err)
	}
	return inTheWay(all, current, wanted), nil
}

// inTheWay returns the network in use whose addresses wanted may give to others, the current one if it is such, nil if
// there is none.
func inTheWay(all []Occupied, current, wanted *ledger.Network) (keep *ledger.Network) {
	for _, o := range all {
		n := &ledger.Network{Name: o.Name, DataDir: filepath.Clean(cmp.Or(o.DataDir, ledger.DefaultDataDir))}
		isCurrent := current != nil && sameNetwork(n, current)
		if sameNetwork(n, wanted) || !mayGive(wanted, o.Addrs, isCurrent) {
			continue
		}
		if keep == nil || isCurrent {
			keep = n
		}
	}
	return keep
}

// mayGive reports whether a network may give one of these addresses to a pod. If only an ADD can tell its ranges, it
// counts whether the addresses are of the network in whose place it comes.
func mayGive(n *ledger.Network, addrs []netip.Addr, sameRanges bool) bool {
	if len(n.Ranges) == 0 {
		return sameRanges && len(addrs) > 0
	}
	return slices.ContainsFunc(addrs, func(a netip.Addr) bool {
		for _, set := range n.Ranges {
			if slices.ContainsFunc(set, func(r ledger.Range) bool { return r.Contains(a) }) {
				return true
			}
		}
		return false
	})
}

// keptNetwork says, behind the state of own, which network it keeps for the sake of addresses in use, nothing if the
// source has the same.
func (d confDir) keptNetwork() string {
	from, _ := d.own.DerivedFrom()
	source, current := d.Find(from), d.own.network()
	if !source.is(Stock) || current == nil {
		return ""
	}
	wanted := source.network()
	if wanted == nil || sameNetwork(current, wanted) {
		return ""
	}
	return fmt.Sprintf(", with the network %s in %s as long as addresses of it are in use, then %s in %s: "+
		"drain the node, or release what is retained", current.Name, current.DataDir, wanted.Name, wanted.DataDir)
}
