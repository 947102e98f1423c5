package ipam

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
)

// newest is the version that the plugin speaks if it is not told one.
func newest() string { return netconf.Versions[len(netconf.Versions)-1] }

// atLeast reports whether a version that the plugin speaks is v or newer.
func atLeast(version, v string) bool {
	return slices.Index(netconf.Versions[:], version) >= slices.Index(netconf.Versions[:], v)
}

// The error codes of the CNI SPEC, section "Error", that the plugin answers with.
const (
	codeIncompatibleVersion = 1
	codeInvalidEnv          = 4
	codeDecoding            = 6
	codeInvalidConfig       = 7
	codeInvalidNetns        = 8
	codeTryAgain            = 11
	codeUnavailable         = 50 // of STATUS
	codeInternal            = 999
)

// Error is a CNI error result.
type Error struct {
	CNIVersion string `json:"cniVersion,omitempty"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details,omitempty"`
}

func (e *Error) Error() string {
	if e.Details == "" {
		return e.Msg
	}
	return e.Msg + "; " + e.Details
}

func configError(err error) *Error { return errorf(codeInvalidConfig, "%v", err) }

func errorf(code uint, format string, args ...any) *Error {
	return &Error{Code: code, Msg: "stayput: " + fmt.Sprintf(format, args...)}
}

// result is an IPAM plugin's ADD result (CNI SPEC, "Delegated Plugins (IPAM)"): without interfaces.
type result struct {
	version string
	ips     []ipConfig
	routes  []map[string]any
	dns     *dns
}

type ipConfig struct {
	address netip.Prefix
	gateway netip.Addr
}

type dns struct {
	Nameservers []string `json:"nameservers,omitempty"`
	Domain      string   `json:"domain,omitempty"`
	Search      []string `json:"search,omitempty"`
	Options     []string `json:"options,omitempty"`
}

// add appends an address with its range's prefix length and gateway.
func (r *result) add(set ledger.RangeSet, a netip.Addr) {
	for _, rg := range set {
		if rg.Contains(a) {
			r.ips = append(r.ips, ipConfig{netip.PrefixFrom(a, rg.Subnet.Bits()), rg.Gateway})
		}
	}
}

// addPooled appends addresses of pools with their gateways and routes.
func (r *result) addPooled(addrs []netconf.PoolAddress) {
	for _, a := range addrs {
		r.ips = append(r.ips, ipConfig{a.Prefix, a.Gateway})
		r.routes = append(r.routes, a.Routes...)
	}
}

func (r *result) encode() []byte {
	if !atLeast(r.version, "0.3.0") {
		return r.encodeByFamily()
	}
	type ip struct {
		Version string       `json:"version,omitempty"`
		Address netip.Prefix `json:"address"`
		Gateway netip.Addr   `json:"gateway,omitzero"` // zero of a pool without one
	}
	out := struct {
		CNIVersion string           `json:"cniVersion"`
		IPs        []ip             `json:"ips"`
		Routes     []map[string]any `json:"routes,omitempty"`
		DNS        *dns             `json:"dns,omitempty"`
	}{CNIVersion: r.version, IPs: []ip{}, Routes: r.routes, DNS: r.dns}
	for _, c := range r.ips {
		family := ""
		switch {
		case atLeast(r.version, "1.0.0"):
		case c.address.Addr().Is6():
			family = "6"
		default:
			family = "4"
		}
		out.IPs = append(out.IPs, ip{family, c.address, c.gateway})
	}
	b, _ := json.Marshal(out) // strings, numbers, addresses and lists of them marshal
	return b
}

// encodeByFamily writes a result of CNI before 0.3.0: one address of each family at most, with the routes of its
// family, each with destination and gateway alone.
func (r *result) encodeByFamily() []byte {
	type route struct {
		Dst any `json:"dst"`
		GW  any `json:"gw,omitempty"`
	}
	type family struct {
		IP      netip.Prefix `json:"ip"`
		Gateway netip.Addr   `json:"gateway,omitzero"`
		Routes  []route      `json:"routes,omitempty"`
	}
	out := struct {
		CNIVersion string  `json:"cniVersion"`
		IP4        *family `json:"ip4,omitempty"`
		IP6        *family `json:"ip6,omitempty"`
		DNS        *dns    `json:"dns,omitempty"`
	}{CNIVersion: r.version, DNS: r.dns}
	for _, ip := range r.ips {
		f := &family{IP: ip.address, Gateway: ip.gateway}
		is4 := ip.address.Addr().Is4()
		for _, rt := range r.routes {
			dst, _ := rt["dst"].(string)
			if p, err := netip.ParsePrefix(dst); err == nil && p.Addr().Unmap().Is4() == is4 {
				f.Routes = append(f.Routes, route{dst, rt["gw"]})
			}
		}
		if is4 {
			out.IP4 = f
		} else {
			out.IP6 = f
		}
	}
	b, _ := json.Marshal(out) // strings, addresses and lists of them marshal
	return b
}

// fits returns an error if a result of the version cannot say an address of each range set.
func fits(version string, sets []ledger.RangeSet) error {
	if atLeast(version, "0.3.0") {
		return nil
	}
	count := map[bool]int{}
	for _, set := range sets {
		is4 := set[0].Start.Is4()
		if count[is4]++; count[is4] > 1 {
			return fmt.Errorf("ipam.ranges: %d range sets: cniVersion %s allows one address of each family", len(sets), version)
		}
	}
	return nil
}

// resolvConf returns what ipam.resolvConf names, nil without it.
func resolvConf(c *netconf.Config) (*dns, error) {
	path, field, err := c.ResolvConf()
	if err != nil || path == "" {
		return nil, err
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return parseResolvConf(b), nil
}

// parseResolvConf reads a resolv.conf(5) into a result's dns as host-local does.
func parseResolvConf(data []byte) *dns {
	d := &dns{}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0][0] == '#' || f[0][0] == ';' {
			continue
		}
		switch f[0] {
		case "nameserver":
			d.Nameservers = append(d.Nameservers, f[1])
		case "domain":
			d.Domain = f[1]
		case "search":
			d.Search = append(d.Search, f[1:]...)
		case "options":
			d.Options = append(d.Options, f[1:]...)
		}
	}
	return d
}
