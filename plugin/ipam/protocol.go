package ipam

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// The CNI versions that the plugin speaks, oldest first (CNI SPEC, "Protocol parameters").
var supportedVersions = []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// atLeast says whether a supported version is v or newer.
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

func errorf(code uint, format string, args ...any) *Error {
	return &Error{Code: code, Msg: "stayput: " + fmt.Sprintf(format, args...)}
}

// result is an IPAM plugin's ADD result (CNI SPEC, "Delegated Plugins (IPAM)"): without interfaces.
type result struct {
	CNIVersion string            `json:"cniVersion"`
	IPs        []ipConfig        `json:"ips"`
	Routes     []json.RawMessage `json:"routes,omitempty"`
	DNS        *dns              `json:"dns,omitempty"`
}

type ipConfig struct {
	Version string `json:"version,omitempty"` // until 0.4.0: "4" or "6"
	Address string `json:"address"`
	Gateway string `json:"gateway,omitempty"`
}

type dns struct {
	Nameservers []string `json:"nameservers,omitempty"`
	Domain      string   `json:"domain,omitempty"`
	Search      []string `json:"search,omitempty"`
	Options     []string `json:"options,omitempty"`
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

// The words that CNI restricts, checked as github.com/containernetworking/cni/pkg/utils does; its regular
// expressions would be compiled at every start.

// isName is the rule for container IDs and network names: [a-zA-Z0-9][a-zA-Z0-9_.\-]*
func isName(s string) bool {
	for i := range len(s) {
		c := s[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '_' && c != '.' && c != '-') {
			return false
		}
	}
	return s != ""
}

// isIfName is the kernel's rule for interface names.
func isIfName(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsAny(s, "/: \t\n\v\f\r\u0085\u00a0")
}

// isSubdomain is RFC 1123 as Kubernetes reads it, for names of pods; a namespace is one label of it.
func isSubdomain(s string, most int) bool {
	if len(s) > most {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for i := range len(label) {
			c := label[i]
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return false
			}
		}
	}
	return true
}
