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

// The CNI versions that the plugin speaks, oldest first (CNI SPEC, "Protocol parameters").
var supportedVersions = []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// atLeast reports whether a supported version is v or newer.
func atLeast(version, v string) bool {
	return slices.Index(supportedVersions, version) >= slices.Index(supportedVersions, v)
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
	ips     []string // encoded
	routes  []map[string]any
	dns     *dns
}

type dns struct {
	Nameservers []string `json:"nameservers,omitempty"`
	Domain      string   `json:"domain,omitempty"`
	Search      []string `json:"search,omitempty"`
	Options     []string `json:"options,omitempty"`
}

// add appends an address with its range's prefix length and gateway. Until 0.4.0 it also says its family.
func (r *result) add(set ledger.RangeSet, a netip.Addr) {
	for _, rg := range set {
		if !rg.Contains(a) {
			continue
		}
		family := ""
		if !atLeast(r.version, "1.0.0") {
			family = `"version":"4",`
			if a.Is6() {
				family = `"version":"6",`
			}
		}
		prefix := netip.PrefixFrom(a, rg.Subnet.Bits())
		r.ips = append(r.ips, fmt.Sprintf(`{%s"address":"%s","gateway":"%s"}`, family, prefix, rg.Gateway))
	}
}

// encode writes the part that every result has by hand: reflection over structs would cost more than all the rest.
func (r *result) encode() []byte {
	b := fmt.Appendf(nil, `{"cniVersion":"%s","ips":[%s]`, r.version, strings.Join(r.ips, ","))
	if len(r.routes) > 0 {
		routes, _ := json.Marshal(r.routes) // strings and numbers marshal
		b = append(append(b, `,"routes":`...), routes...)
	}
	if r.dns != nil {
		dns, _ := json.Marshal(r.dns)
		b = append(append(b, `,"dns":`...), dns...)
	}
	return append(b, '}')
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

// isIfName is the kernel's rule for interface names.
func isIfName(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\n\v\f\r\u0085\u00a0")
}
