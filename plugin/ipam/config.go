package ipam

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
)

// netConf is the configuration that the main plugin hands on: host-local's, with stayput's own keys beside
// them in the ipam section (https://www.cni.dev/plugins/current/ipam/host-local/).
type netConf struct {
	Name          string    `json:"name"`
	CNIVersion    string    `json:"cniVersion"`
	IPAM          *ipamConf `json:"ipam"`
	RuntimeConfig struct {
		IPRanges    [][]rangeConf   `json:"ipRanges"`
		IPs         []string        `json:"ips"`
		Annotations json.RawMessage `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			IPs []string `json:"ips"`
		} `json:"cni"`
	} `json:"args"`
	PrevResult *struct {
		IPs []struct {
			Address string `json:"address"`
		} `json:"ips"`
	} `json:"prevResult"`
	ValidAttachments json.RawMessage `json:"cni.dev/valid-attachments"`
}

type ipamConf struct {
	rangeConf
	Type       string            `json:"type"`
	Routes     []json.RawMessage `json:"routes"`
	DataDir    string            `json:"dataDir"`
	ResolvConf string            `json:"resolvConf"`
	Ranges     [][]rangeConf     `json:"ranges"`

	// StateDir is where claims and index lie; default /var/lib/stayput.
	StateDir string `json:"stateDir"`
	// LongestRetention is a Go duration; a pod that asks for more gets this.
	LongestRetention string `json:"longestRetention"`
	// PromisedShare is the share of each range that may be promised, bound and retained together: more than 0, at most 1.
	PromisedShare *float64 `json:"promisedShare"`
}

type rangeConf struct {
	RangeStart string `json:"rangeStart"`
	RangeEnd   string `json:"rangeEnd"`
	Subnet     string `json:"subnet"`
	Gateway    string `json:"gateway"`
}

// parseConf decodes stdin as far as every command needs it: the network's name and where its files are.
func parseConf(stdin []byte) (*netConf, *Error) {
	c := &netConf{}
	if err := json.Unmarshal(stdin, c); err != nil {
		return nil, errorf(codeDecoding, "the network configuration on stdin does not parse: %v", err)
	}
	if !isName(c.Name) {
		return c, errorf(codeInvalidConfig, "name: %.64q is not valid: expected a network name of letters, digits, _ . and -", c.Name)
	}
	if c.IPAM == nil {
		return c, errorf(codeInvalidConfig, "ipam: missing: expected the section with \"type\": \"stayput\"")
	}
	for _, d := range []struct{ field, dir string }{{"dataDir", c.IPAM.DataDir}, {"stateDir", c.IPAM.StateDir}} {
		if d.dir != "" && (d.dir[0] != '/' || strings.ContainsRune(d.dir, 0)) {
			return c, errorf(codeInvalidConfig, "ipam.%s: %.64q is not valid: expected an absolute path", d.field, d.dir)
		}
	}
	return c, nil
}

// network is what the ledger needs of the configuration.
func (c *netConf) network() *ledger.Network {
	return &ledger.Network{Name: c.Name, DataDir: c.IPAM.DataDir}
}

// full adds ranges and limits, which a DEL can do without.
func (c *netConf) full() (*ledger.Network, *Error) {
	n := c.network()
	sets := c.IPAM.Ranges
	if c.IPAM.Subnet != "" {
		sets = append([][]rangeConf{{c.IPAM.rangeConf}}, sets...)
	}
	sets = append(c.RuntimeConfig.IPRanges, sets...)
	for i, set := range sets {
		var rs ledger.RangeSet
		for j, rc := range set {
			r, err := rc.parse()
			if err != nil {
				return nil, errorf(codeInvalidConfig, "ipam.ranges[%d][%d]: %v", i, j, err)
			}
			rs = append(rs, r)
		}
		n.Ranges = append(n.Ranges, rs)
	}
	if err := ledger.ValidateRangeSets(n.Ranges); err != nil {
		return nil, errorf(codeInvalidConfig, "ipam: %v", err)
	}
	if s := c.IPAM.LongestRetention; s != "" {
		d, err := time.ParseDuration(s)
		if err != nil || d <= 0 {
			return nil, errorf(codeInvalidConfig, "ipam.longestRetention: %.64q is not valid: expected a positive Go duration such as \"720h\"", s)
		}
		n.LongestRetention = d
	}
	if p := c.IPAM.PromisedShare; p != nil {
		if !(*p > 0 && *p <= 1) {
			return nil, errorf(codeInvalidConfig, "ipam.promisedShare: %v is not valid: expected a number above 0 and at most 1", *p)
		}
		n.PromisedShare = *p
	}
	for i, r := range c.IPAM.Routes {
		if err := checkRoute(r); err != nil {
			return nil, errorf(codeInvalidConfig, "ipam.routes[%d]: %v", i, err)
		}
	}
	return n, nil
}

func (r rangeConf) parse() (ledger.Range, error) {
	subnet, err := netip.ParsePrefix(r.Subnet)
	if err != nil {
		return ledger.Range{}, fmt.Errorf("subnet: %.64q is not valid: expected an address with a prefix length such as 10.244.1.0/24", r.Subnet)
	}
	var addrs [3]netip.Addr
	for i, f := range []struct{ name, value string }{{"rangeStart", r.RangeStart}, {"rangeEnd", r.RangeEnd}, {"gateway", r.Gateway}} {
		if f.value == "" {
			continue
		}
		if addrs[i], err = parseAddr(f.value); err != nil {
			return ledger.Range{}, fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return ledger.NewRange(subnet, addrs[0], addrs[1], addrs[2])
}

// parseAddr takes an address with or without a prefix length, as host-local does.
func parseAddr(s string) (netip.Addr, error) {
	plain, _, _ := strings.Cut(s, "/")
	a, err := netip.ParseAddr(plain)
	if _, perr := netip.ParsePrefix(s); err != nil || a.Zone() != "" || plain != s && perr != nil {
		return a, fmt.Errorf("%.64q is not valid: expected an IP address", s)
	}
	return a.Unmap(), nil
}

func checkRoute(raw json.RawMessage) error {
	var r struct{ Dst, GW string }
	if err := json.Unmarshal(raw, &r); err != nil {
		return fmt.Errorf("expected an object with dst and gw: %w", err)
	}
	if _, err := netip.ParsePrefix(r.Dst); err != nil {
		return fmt.Errorf("dst: %.64q is not valid: expected an address with a prefix length such as 0.0.0.0/0", r.Dst)
	}
	if r.GW != "" {
		if _, err := parseAddr(r.GW); err != nil {
			return fmt.Errorf("gw: %w", err)
		}
	}
	return nil
}

// routes are the configured routes as the version of the result knows them: until 1.0.0 dst and gw alone.
func (c *netConf) routes() []json.RawMessage {
	if atLeast(c.CNIVersion, "1.0.0") {
		return c.IPAM.Routes
	}
	var out []json.RawMessage
	for _, raw := range c.IPAM.Routes {
		var r struct {
			Dst string `json:"dst"`
			GW  string `json:"gw,omitempty"`
		}
		if json.Unmarshal(raw, &r) == nil { // full has parsed it already
			b, _ := json.Marshal(r)
			out = append(out, b)
		}
	}
	return out
}

// policy is what the pod's annotations say; nil where the runtime did not hand them on.
func (c *netConf) policy() (*ledger.Policy, error) {
	raw := c.RuntimeConfig.Annotations
	if raw == nil {
		return nil, nil
	}
	var annotations map[string]string
	if err := json.Unmarshal(raw, &annotations); err != nil {
		return nil, fmt.Errorf("runtimeConfig[\"io.kubernetes.cri.pod-annotations\"]: expected an object of strings: %w", err)
	}
	p, _, err := ledger.ParseAnnotations(annotations)
	return &p, err
}

// podArgs are the words of CNI_ARGS that the plugin knows.
type podArgs struct {
	pod ledger.Pod
	ip  string
}

// parseArgs reads CNI_ARGS, "K=V;K2=V2". Unknown words are an error unless IgnoreUnknown says otherwise, as
// for every plugin (cni/pkg/types/args.go); a pod's name must be one that Kubernetes could have given.
func parseArgs(args string) (podArgs, *Error) {
	var p podArgs
	if args == "" {
		return p, nil
	}
	seen := map[string]bool{}
	var unknown []string
	ignore := false
	for pair := range strings.SplitSeq(args, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || strings.Contains(value, "=") {
			return p, errorf(codeInvalidEnv, "CNI_ARGS: invalid pair %.64q: expected KEY=VALUE", pair)
		}
		seen[key] = true
		switch key {
		case "IgnoreUnknown":
			ignore = value == "1" || strings.EqualFold(value, "true")
		case "IP":
			p.ip = value
		case "K8S_POD_NAMESPACE":
			p.pod.Namespace = value
		case "K8S_POD_NAME":
			p.pod.Name = value
		case "K8S_POD_UID":
			p.pod.UID = value
		case "K8S_POD_INFRA_CONTAINER_ID":
		default:
			unknown = append(unknown, fmt.Sprintf("%.64q", pair))
		}
	}
	if len(unknown) > 0 && !ignore {
		return p, errorf(codeInvalidEnv, "CNI_ARGS: unknown args %v: expected IgnoreUnknown=1 beside them", unknown)
	}
	if !seen["K8S_POD_NAME"] && !seen["K8S_POD_NAMESPACE"] {
		p.pod = ledger.Pod{}
		return p, nil
	}
	if !isSubdomain(p.pod.Namespace, 63) || strings.Contains(p.pod.Namespace, ".") {
		return p, errorf(codeInvalidEnv, "CNI_ARGS: K8S_POD_NAMESPACE: %.64q is not valid: expected a DNS label", p.pod.Namespace)
	}
	if !isSubdomain(p.pod.Name, 253) {
		return p, errorf(codeInvalidEnv, "CNI_ARGS: K8S_POD_NAME: %.64q is not valid: expected a DNS subdomain", p.pod.Name)
	}
	if len(p.pod.UID) > 128 || strings.ContainsFunc(p.pod.UID, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return p, errorf(codeInvalidEnv, "CNI_ARGS: K8S_POD_UID: %.64q is not valid: expected a UID", p.pod.UID)
	}
	return p, nil
}

// requested are the addresses that the runtime asks for, from all three places that host-local knows.
func (c *netConf) requested(fromArgs string) ([]netip.Addr, *Error) {
	var out []netip.Addr
	for _, src := range []struct {
		field string
		ips   []string
	}{{"CNI_ARGS: IP", []string{fromArgs}}, {"args.cni.ips", c.Args.CNI.IPs}, {"runtimeConfig.ips", c.RuntimeConfig.IPs}} {
		for _, s := range src.ips {
			if s == "" && src.field == "CNI_ARGS: IP" {
				continue
			}
			a, err := parseAddr(s)
			if err != nil {
				return nil, errorf(codeInvalidConfig, "%s: %v", src.field, err)
			}
			out = append(out, a)
		}
	}
	return out, nil
}
