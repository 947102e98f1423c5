package route_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/stayput/stayput/test/must"
)

// masquerade adds flannel's rules on a node, in the form that flanneld has been told to use.
func (n *nodes) masquerade(i int, form string) {
	n.t.Helper()
	for _, f := range []struct {
		iptables, lease, network, multicast string
	}{
		{"iptables", fmt.Sprintf("10.244.%d.0/24", i), "10.244.0.0/16", "224.0.0.0/4"},
		{"ip6tables", fmt.Sprintf("fd00:10:244:%d::/64", i), "fd00:10:244::/48", "ff00::/8"},
	} {
		if form == "nftables" {
			n.flannelNFT(i, netip.MustParsePrefix(f.lease), netip.MustParsePrefix(f.network),
				netip.MustParsePrefix(f.multicast))
			continue
		}
		for _, rule := range []string{ // of flannel v0.28, pkg/trafficmngr/iptables
			"-m mark --mark 0x4000/0x4000 -j RETURN", "-s LEASE -d NET -j RETURN", "-s NET -d LEASE -j RETURN",
			"! -s NET -d LEASE -j RETURN", "-s NET ! -d MULTI -j MASQUERADE --random-fully",
			"! -s NET -d NET -j MASQUERADE --random-fully",
		} {
			rule = strings.NewReplacer("LEASE", f.lease, "NET", f.network, "MULTI", f.multicast).Replace(rule)
			n.run(fmt.Sprintf("n%d", i), f.iptables,
				append([]string{"-w", "-t", "nat", "-A", "POSTROUTING"}, strings.Fields(rule)...)...)
		}
	}
}

// flannelNFT adds the rules of flannel v0.28, pkg/trafficmngr/nftables, of one family.
func (n *nodes) flannelNFT(i int, lease, network, multicast netip.Prefix) {
	n.t.Helper()
	ns, err := os.Open(n.paths[fmt.Sprintf("n%d", i)])
	must.Do(n.t, err)
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	must.Do(n.t, err)
	table := &nftables.Table{Name: "flannel-ipv4", Family: nftables.TableFamilyIPv4}
	saddr, daddr := uint32(12), uint32(16)
	if lease.Addr().Is6() {
		table = &nftables.Table{Name: "flannel-ipv6", Family: nftables.TableFamilyIPv6}
		saddr, daddr = 8, 24
	}
	c.AddTable(table)
	chain := c.AddChain(&nftables.Chain{
		Name: "postrtg", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource,
	})
	match := func(op expr.CmpOp, offset uint32, p netip.Prefix) []expr.Any {
		size := p.Addr().BitLen() / 8
		return []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(size)},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(size),
				Mask: net.CIDRMask(p.Bits(), size*8), Xor: make([]byte, size)},
			&expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()},
		}
	}
	back := []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}
	masquerade := []expr.Any{&expr.Masq{FullyRandom: true}}
	const is, not = expr.CmpOpEq, expr.CmpOpNeq
	for _, rule := range [][][]expr.Any{
		{{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
			&expr.Cmp{Op: is, Register: 1, Data: binaryutil.NativeEndian.PutUint32(0x4000)},
		}, back},
		{match(is, saddr, lease), match(is, daddr, network), back},
		{match(is, saddr, network), match(is, daddr, lease), back},
		{match(not, saddr, lease), match(is, daddr, network), back},
		{match(is, saddr, network), match(not, daddr, multicast), masquerade},
		{match(not, saddr, network), match(is, daddr, network), masquerade},
	} {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: slices.Concat(rule...)})
	}
	must.Do(n.t, c.Flush())
}
