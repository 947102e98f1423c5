package route

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// A program that masquerades packets of pods knows a pod by the addresses of its node: flannel by its lease, bridge's
// ipMasq by the subnet. The first chain is asked before all of those, and makes packets that are the cluster's own keep
// their source:
//
//	chain sources, of type nat, hook postrouting, priority srcnat - 5
//	  meta mark & 0x6000 != 0 return     kube-proxy (0x4000) and portmap (0x2000) want it masqueraded
//	  saddr 127.0.0.0/8 return           from the node itself to a hostPort
//	  saddr . daddr @self return         a pod to itself by a Service or hostPort
//	  daddr @here snat to saddr          as it is
//	  saddr @here daddr @cluster snat to saddr
//
// A pod asks its node for an address of its own bridge that is not in its subnet. The kernel would tell it, as an ICMP
// redirect, to ask for the address on the bridge itself, and it went on so for minutes after the address has left:
//
//	chain redirects, of type filter, hook output, priority filter
//	  icmp type redirect icmp gateway @here drop
const (
	tableName = "stayput"
	// marks are the bits that ask for masquerade: kube-proxy's masqueradeBit, also in its nftables mode, and
	// portmap's markMasqBit, both by default. It is not read which ones a node has: docs/routed.md says so.
	marks = 0x4000 | 0x2000
)

// sourceTable returns the table, which need not be there, and a connection to the nftables of a network namespace.
func sourceTable(netns *os.File) (*nftables.Conn, *nftables.Table, error) {
	c, err := nftables.New(nftables.WithNetNSFd(int(netns.Fd())))
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	return c, &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}, nil
}

// keepSources makes packets between addresses of pods of this node and the cluster keep their source. Without any
// address there is no table.
func (k *kernel) keepSources(here []netip.Addr, cluster []netip.Prefix) error {
	c, table, err := sourceTable(k.ns)
	if err != nil {
		return err
	}
	is, err := sourcesKept(c, table, here, cluster)
	if errors.Is(err, unix.EOPNOTSUPP) && len(here) == 0 {
		return nil // this kernel has no nftables
	}
	if err != nil {
		return fmt.Errorf("nftables: reading table %s: %w", tableName, err)
	}
	if is {
		return nil
	}
	// In one transaction: there is no moment without it.
	c.AddTable(table)
	c.DelTable(table)
	if len(here) > 0 {
		if err := sources(c, c.AddTable(table), here, cluster); err != nil {
			return fmt.Errorf("nftables: addresses %v of cluster %v: %w", here, cluster, err)
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables: writing table %s: %w", tableName, err)
	}
	return nil
}

// lookForTable has the table written again if it is gone. An error says nothing: the next look at all reports it.
func (t *Table) lookForTable(k *kernel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.kept) == 0 {
		return
	}
	c, table, err := sourceTable(k.ns)
	if err != nil {
		return
	}
	if there, err := hasTable(c, table); err == nil && !there {
		t.chain = true
		t.now.Up()
	}
}

func hasTable(c *nftables.Conn, table *nftables.Table) (bool, error) {
	tables, err := c.ListTablesOfFamily(table.Family)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == table.Name }), err
}

// changeSources changes the sets of the table from was to here. It does not read the table: if another program has
// changed that, it may be an error, which changes nothing.
func (k *kernel) changeSources(was, here []netip.Addr) error {
	c, table, err := sourceTable(k.ns)
	if err != nil {
		return err
	}
	change := func(do func(*nftables.Set, []nftables.SetElement) error, addrs []netip.Addr) error {
		for _, f := range families {
			for set, elements := range map[*nftables.Set][]nftables.SetElement{
				f.hereSet(table): f.addrs(addrs), f.selfSet(table): f.selves(addrs),
			} {
				if len(elements) == 0 { // to delete none is to delete all
					continue
				}
				if err := do(set, elements); err != nil {
					return fmt.Errorf("nftables: set %s: %w", set.Name, err)
				}
			}
		}
		return nil
	}
	if err := errors.Join(change(c.SetDeleteElements, without(was, here)),
		change(c.SetAddElements, without(here, was))); err != nil {
		return err
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables: changing sets of table %s: %w", tableName, err)
	}
	return nil
}

// without returns those of all that others lack.
func without(all, others []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return slices.Contains(others, a) })
}

// rules is how many a chain has.
var rules = map[string]int{"sources": 8, "redirects": 2}

// sourcesKept reports whether the table is as it should be.
func sourcesKept(c *nftables.Conn, table *nftables.Table, here []netip.Addr, cluster []netip.Prefix) (bool, error) {
	there, err := hasTable(c, table)
	if err != nil {
		return false, err
	}
	if !there {
		return len(here) == 0, nil
	}
	if len(here) == 0 {
		return false, nil
	}
	for chain, n := range rules {
		all, err := c.GetRules(table, &nftables.Chain{Name: chain, Table: table})
		if errors.Is(err, unix.ENOENT) {
			return false, nil
		}
		if err != nil || len(all) != n {
			return false, err
		}
	}
	for _, f := range families {
		for name, want := range map[string][]nftables.SetElement{
			"here" + f.suffix: f.addrs(here), "cluster" + f.suffix: f.ranges(cluster),
		} {
			set, err := c.GetSetByName(table, name)
			if errors.Is(err, unix.ENOENT) {
				return false, nil
			}
			if err != nil {
				return false, err
			}
			is, err := c.GetSetElements(set)
			if err != nil {
				return false, err
			}
			if !sameElements(is, want) {
				return false, nil
			}
		}
	}
	return true, nil
}

func sameElements(a, b []nftables.SetElement) bool {
	keys := func(all []nftables.SetElement) (keys []string) {
		for _, e := range all {
			keys = append(keys, fmt.Sprintf("%x %t", e.Key, e.IntervalEnd))
		}
		slices.Sort(keys)
		return slices.Compact(keys)
	}
	return slices.Equal(keys(a), keys(b))
}

// family is what the rules of IPv4 and IPv6 differ in.
type family struct {
	suffix     string
	proto      byte
	size       uint32
	saddr      uint32 // its offset in the packet
	daddr      uint32
	loopback   netip.Prefix
	keyType    nftables.SetDatatype
	secondHalf uint32 // the register behind the register that holds an address
	// Of a redirect: the protocol, the type, and where the address is that it is about.
	icmp, redirect byte
	about          uint32
}

var families = []family{
	{
		suffix: "4", proto: unix.NFPROTO_IPV4, size: 4, saddr: 12, daddr: 16, keyType: nftables.TypeIPAddr,
		loopback: netip.MustParsePrefix("127.0.0.0/8"), secondHalf: unix.NFT_REG32_01,
		icmp: unix.IPPROTO_ICMP, redirect: 5, about: 4,
	},
	{
		suffix: "6", proto: unix.NFPROTO_IPV6, size: 16, saddr: 8, daddr: 24, keyType: nftables.TypeIP6Addr,
		loopback: netip.MustParsePrefix("::1/128"), secondHalf: unix.NFT_REG_2,
		icmp: unix.IPPROTO_ICMPV6, redirect: 137, about: 8,
	},
}

func (f family) has(a netip.Addr) bool { return a.Is4() == (f.size == 4) }

func (f family) hereSet(table *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: table, Name: "here" + f.suffix, KeyType: f.keyType}
}

func (f family) selfSet(table *nftables.Table) *nftables.Set {
	return &nftables.Set{
		Table: table, Name: "self" + f.suffix, Concatenation: true,
		KeyType: nftables.MustConcatSetType(f.keyType, f.keyType),
	}
}

// addrs are the elements of a set of addresses.
func (f family) addrs(all []netip.Addr) (out []nftables.SetElement) {
	for _, a := range all {
		if f.has(a) {
			out = append(out, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	return out
}

// selves are the elements of a set of addresses, each twice.
func (f family) selves(all []netip.Addr) (out []nftables.SetElement) {
	for _, e := range f.addrs(all) {
		out = append(out, nftables.SetElement{Key: append(bytes.Clone(e.Key), e.Key...)})
	}
	return out
}

// ranges are the elements of a set of intervals that has these prefixes, merged ones.
func (f family) ranges(all []netip.Prefix) (out []nftables.SetElement) {
	for _, p := range all {
		if !f.has(p.Addr()) {
			continue
		}
		if n := len(out); n > 0 && out[n-1].IntervalEnd && bytes.Equal(out[n-1].Key, p.Addr().AsSlice()) {
			out = out[:n-1] // it goes on
		} else {
			out = append(out, nftables.SetElement{Key: p.Addr().AsSlice()})
		}
		if next := last(p).Next(); next.IsValid() {
			out = append(out, nftables.SetElement{Key: next.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}

// sources adds the sets and the chains.
func sources(c *nftables.Conn, table *nftables.Table, here []netip.Addr, cluster []netip.Prefix) error {
	priority := *nftables.ChainPriorityNATSource - 5
	chain := c.AddChain(&nftables.Chain{
		Name: "sources", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: &priority,
	})
	redirects := c.AddChain(&nftables.Chain{
		Name: "redirects", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput,
		Priority: nftables.ChainPriorityFilter,
	})
	in := func(chain *nftables.Chain, exprs ...[]expr.Any) {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: slices.Concat(exprs...)})
	}
	rule := func(exprs ...[]expr.Any) { in(chain, exprs...) }
	back := []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}
	zero := []byte{0, 0, 0, 0}
	rule([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: nativeUint32(marks), Xor: zero},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: zero},
	}, back)
	for _, f := range families {
		hereSet, selfSet := f.hereSet(table), f.selfSet(table)
		clusterSet := &nftables.Set{Table: table, Name: "cluster" + f.suffix, KeyType: f.keyType, Interval: true}
		for set, elements := range map[*nftables.Set][]nftables.SetElement{
			hereSet: f.addrs(here), selfSet: f.selves(here), clusterSet: f.ranges(cluster),
		} {
			if err := c.AddSet(set, elements); err != nil {
				return fmt.Errorf("set %s: %w", set.Name, err)
			}
		}
		is := []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.proto}},
		}
		load := func(offset, register uint32) expr.Any {
			return &expr.Payload{
				DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.size,
			}
		}
		among := func(set *nftables.Set) expr.Any {
			return &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID}
		}
		asItIs := []expr.Any{
			load(f.saddr, 1), &expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.proto), RegAddrMin: 1},
		}
		if f.size == 4 {
			rule(is, []expr.Any{
				load(f.saddr, 1),
				&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: []byte{255, 0, 0, 0}, Xor: zero},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: f.loopback.Addr().AsSlice()},
			}, back)
		}
		rule(is, []expr.Any{load(f.saddr, 1), load(f.daddr, f.secondHalf), among(selfSet)}, back)
		rule(is, []expr.Any{load(f.daddr, 1), among(hereSet)}, asItIs)
		rule(is, []expr.Any{load(f.saddr, 1), among(hereSet), load(f.daddr, 1), among(clusterSet)}, asItIs)
		in(redirects, is, []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.icmp}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Len: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.redirect}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: f.about, Len: f.size},
			among(hereSet), &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop},
		})
	}
	return nil
}

// last returns the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// merge returns the prefixes that hold the same addresses, in order and without any that touch and could be one.
func merge(all []netip.Prefix) (out []netip.Prefix) {
	all = slices.Clone(all)
	for i, p := range all {
		all[i] = p.Masked()
	}
	slices.SortFunc(all, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	for _, p := range all {
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
		for n := len(out); n > 1; n = len(out) {
			a, b := out[n-2], out[n-1]
			if a.Bits() != b.Bits() || a.Bits() == 0 {
				break
			}
			both := netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked()
			if both.Addr() != a.Addr() || !both.Contains(b.Addr()) {
				break
			}
			out = append(out[:n-2], both)
		}
	}
	return out
}

func nativeUint32(n uint32) []byte { return binaryutil.NativeEndian.PutUint32(n) }
