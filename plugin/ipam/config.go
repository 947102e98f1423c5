package ipam

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
)

// netConf is the configuration that the main plugin hands on: host-local's, with stayput's own keys beside
// them in the ipam section (https://www.cni.dev/plugins/current/ipam/host-local/):
//
//	stateDir          where claims and index lie; default /var/lib/stayput
//	longestRetention  a Go duration; a pod that asks for more gets this
//	promisedShare     the share of each range that may be promised, bound and retained together: more than
//	                  0, at most 1; default 0.5
type netConf struct {
	root, ipam        object
	name, cniVersion  string
	dataDir, stateDir string
}

const annotationsCapability = "io.kubernetes.cri.pod-annotations"

// parseConf decodes stdin as far as every command needs it: the network's name and where its files are. What
// it could decode is returned beside the error.
func parseConf(stdin []byte) (*netConf, *Error) {
	c := &netConf{}
	var err error
	if c.root, err = parseObject(stdin); err != nil {
		return c, errorf(codeDecoding, "the network configuration on stdin does not parse: %v", err)
	}
	if c.cniVersion, err = c.root.str("cniVersion"); err != nil {
		return c, configError(err)
	}
	if c.name, err = c.root.str("name"); err != nil {
		return c, configError(err)
	}
	if !isName(c.name) || len(c.name) > 200 {
		return c, errorf(codeInvalidConfig, "name: %.64q is not valid: expected a network name of letters, digits, _ . and -", c.name)
	}
	ok := false
	if c.ipam, ok, err = c.root.obj("ipam"); err != nil {
		return c, configError(err)
	} else if !ok {
		return c, errorf(codeInvalidConfig, "ipam: missing: expected the section with \"type\": \"stayput\"")
	}
	if c.dataDir, err = c.directory("dataDir"); err != nil {
		return c, configError(err)
	}
	if c.stateDir, err = c.directory("stateDir"); err != nil {
		return c, configError(err)
	}
	return c, nil
}

func configError(err error) *Error { return errorf(codeInvalidConfig, "%v", err) }

func (c *netConf) directory(key string) (string, error) {
	dir, err := c.ipam.str(key)
	if err == nil && dir != "" && (dir[0] != '/' || strings.ContainsRune(dir, 0)) {
		err = c.ipam.wrong(key, "an absolute path", dir)
	}
	return dir, err
}

// bare is the network without ranges and limits, which a DEL can do without.
func (c *netConf) bare() *ledger.Network {
	return &ledger.Network{Name: c.name, DataDir: c.dataDir}
}

func (c *netConf) network() (*ledger.Network, error) {
	n := c.bare()
	if err := c.addRanges(n); err != nil {
		return nil, err
	}
	if err := ledger.ValidateRangeSets(n.Ranges); err != nil {
		return nil, fmt.Errorf("ipam: %w", err)
	}
	s, err := c.ipam.str("longestRetention")
	if err != nil {
		return nil, err
	}
	if s != "" {
		if n.LongestRetention, err = time.ParseDuration(s); err != nil || n.LongestRetention <= 0 {
			return nil, c.ipam.wrong("longestRetention", `a positive Go duration such as "720h"`, s)
		}
	}
	if v, _ := c.ipam.lookup("promisedShare"); v != nil {
		share, ok := v.(float64)
		if !ok || !(share > 0 && share <= 1) {
			return nil, c.ipam.wrong("promisedShare", "a number above 0 and at most 1", v)
		}
		n.PromisedShare = share
	}
	return n, nil
}

// addRanges collects the range sets in host-local's order: runtimeConfig.ipRanges, the old-style single
// range, ipam.ranges.
func (c *netConf) addRanges(n *ledger.Network) error {
	runtime, _, err := c.root.obj("runtimeConfig")
	if err != nil {
		return err
	}
	if err := addRangeSets(n, runtime, "ipRanges"); err != nil {
		return err
	}
	if subnet, err := c.ipam.str("subnet"); err != nil {
		return err
	} else if subnet != "" {
		r, err := parseRange(c.ipam)
		if err != nil {
			return err
		}
		n.Ranges = append(n.Ranges, ledger.RangeSet{r})
	}
	return addRangeSets(n, c.ipam, "ranges")
}

func addRangeSets(n *ledger.Network, o object, key string) error {
	sets, err := o.list(key)
	if err != nil {
		return err
	}
	for i := range sets {
		set := object{o.name(key), map[string]any{"set": sets[i]}}
		ranges, err := set.objs("set")
		if err != nil {
			return fmt.Errorf("%s[%d]: expected a list of ranges", o.name(key), i)
		}
		var rs ledger.RangeSet
		for j, ro := range ranges {
			ro.path = fmt.Sprintf("%s[%d][%d]", o.name(key), i, j)
			r, err := parseRange(ro)
			if err != nil {
				return err
			}
			rs = append(rs, r)
		}
		n.Ranges = append(n.Ranges, rs)
	}
	return nil
}

func parseRange(o object) (ledger.Range, error) {
	s, err := o.str("subnet")
	if err != nil {
		return ledger.Range{}, err
	}
	subnet, err := netip.ParsePrefix(s)
	if err != nil {
		return ledger.Range{}, o.wrong("subnet", "an address with a prefix length such as 10.244.1.0/24", s)
	}
	var addrs [3]netip.Addr
	for i, key := range []string{"rangeStart", "rangeEnd", "gateway"} {
		s, err := o.str(key)
		if err != nil {
			return ledger.Range{}, err
		}
		if s == "" {
			continue
		}
		if addrs[i], err = parseAddr(s); err != nil {
			return ledger.Range{}, o.wrong(key, "an IP address", s)
		}
	}
	r, err := ledger.NewRange(subnet, addrs[0], addrs[1], addrs[2])
	if err != nil {
		return r, fmt.Errorf("%s.%w", o.path, err)
	}
	return r, nil
}

// parseAddr takes an address with or without a prefix length, as host-local does.
func parseAddr(s string) (netip.Addr, error) {
	plain, _, prefixed := strings.Cut(s, "/")
	a, err := netip.ParseAddr(plain)
	if err == nil && prefixed {
		_, err = netip.ParsePrefix(s)
	}
	if err != nil || a.Zone() != "" {
		return a, fmt.Errorf("%.64q is not valid: expected an IP address", s)
	}
	return a.Unmap(), nil
}

// routes are the configured routes with the keys that CNI knows (SPEC 1.1, "Result"); host-local prints all
// of them at every version.
func (c *netConf) routes() ([]map[string]any, error) {
	list, err := c.ipam.objs("routes")
	if err != nil {
		return nil, err
	}
	var out []map[string]any
	for _, r := range list {
		dst, err := r.str("dst")
		if err != nil {
			return nil, err
		}
		if _, err := netip.ParsePrefix(dst); err != nil {
			return nil, r.wrong("dst", "an address with a prefix length such as 0.0.0.0/0", dst)
		}
		route := map[string]any{"dst": dst}
		gw, err := r.str("gw")
		if err != nil {
			return nil, err
		}
		if gw != "" {
			if _, err := parseAddr(gw); err != nil {
				return nil, r.wrong("gw", "an IP address", gw)
			}
			route["gw"] = gw
		}
		for _, key := range []string{"mtu", "advmss", "priority", "table", "scope"} {
			v, _ := r.lookup(key)
			if v == nil {
				continue
			}
			n, ok := v.(float64)
			if !ok || n != float64(int64(n)) {
				return nil, r.wrong(key, "a whole number", v)
			}
			if n != 0 || key == "table" || key == "scope" {
				route[key] = int64(n)
			}
		}
		out = append(out, route)
	}
	return out, nil
}

// policy is what the pod's annotations say; nil where the runtime did not hand them on.
func (c *netConf) policy() (*ledger.Policy, error) {
	runtime, _, err := c.root.obj("runtimeConfig")
	if err != nil {
		return nil, err
	}
	if _, there := runtime.m[annotationsCapability]; !there {
		return nil, nil
	}
	o, _, err := runtime.obj(annotationsCapability)
	if err != nil {
		return nil, err
	}
	annotations := make(map[string]string, len(o.m))
	for k, v := range o.m {
		s, ok := v.(string)
		if !ok {
			return nil, o.wrong(k, "a string", v)
		}
		annotations[k] = s
	}
	p, _, err := ledger.ParseAnnotations(annotations)
	return &p, err
}

// podArgs are the words of CNI_ARGS that the plugin knows.
type podArgs struct {
	pod ledger.Pod
	ip  string
	// noPod says why pod is empty though there are words for it: runtimes other than kubelet's call their
	// sandboxes what they like, which is an error only where something is to be kept for that name.
	noPod error
}

// parseArgs reads CNI_ARGS, "K=V;K2=V2". Unknown words are an error unless IgnoreUnknown says otherwise, as
// for every plugin (cni/pkg/types/args.go).
func parseArgs(args string) (podArgs, error) {
	var p podArgs
	if args == "" {
		return p, nil
	}
	var unknown []string
	ignore, isPod := false, false
	for pair := range strings.SplitSeq(args, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || strings.Contains(value, "=") {
			return p, fmt.Errorf("CNI_ARGS: invalid pair %.64q: expected KEY=VALUE", pair)
		}
		switch key {
		case "IgnoreUnknown":
			ignore = value == "1" || strings.EqualFold(value, "true")
		case "IP":
			p.ip = value
		case "K8S_POD_NAMESPACE":
			p.pod.Namespace, isPod = value, true
		case "K8S_POD_NAME":
			p.pod.Name, isPod = value, true
		case "K8S_POD_UID":
			p.pod.UID = value
		case "K8S_POD_INFRA_CONTAINER_ID":
		default:
			unknown = append(unknown, fmt.Sprintf("%.64q", pair))
		}
	}
	if len(unknown) > 0 && !ignore {
		return p, fmt.Errorf("CNI_ARGS: unknown args %.256s: expected IgnoreUnknown=1 beside them", strings.Join(unknown, ", "))
	}
	if !isPod {
		p.pod = ledger.Pod{}
		return p, nil
	}
	if err := p.pod.Validate(); err != nil {
		p.pod, p.noPod = ledger.Pod{}, fmt.Errorf("CNI_ARGS: %w", err)
	}
	return p, nil
}

// requested are the addresses that the runtime asks for, from all three places that host-local knows.
func (c *netConf) requested(fromArgs string) ([]netip.Addr, error) {
	var out []netip.Addr
	add := func(field, s string) error {
		a, err := parseAddr(s)
		if err != nil {
			return fmt.Errorf("%s: %w", field, err)
		}
		out = append(out, a)
		return nil
	}
	if fromArgs != "" {
		if err := add("CNI_ARGS: IP", fromArgs); err != nil {
			return nil, err
		}
	}
	args, _, err := c.root.obj("args")
	if err != nil {
		return nil, err
	}
	cni, _, err := args.obj("cni")
	if err != nil {
		return nil, err
	}
	runtime, _, err := c.root.obj("runtimeConfig")
	if err != nil {
		return nil, err
	}
	for _, o := range []object{cni, runtime} {
		ips, err := o.strs("ips")
		if err != nil {
			return nil, err
		}
		for _, s := range ips {
			if err := add(o.name("ips"), s); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// prevAddrs are the addresses of prevResult; ok is false where there is none.
func (c *netConf) prevAddrs() (addrs []netip.Addr, ok bool, err error) {
	prev, ok, err := c.root.obj("prevResult")
	if err != nil || !ok {
		return nil, false, err
	}
	ips, err := prev.objs("ips")
	if err != nil {
		return nil, false, err
	}
	for _, ip := range ips {
		s, err := ip.str("address")
		if err != nil {
			return nil, false, err
		}
		a, err := parseAddr(s)
		if err != nil {
			return nil, false, fmt.Errorf("%s: %w", ip.name("address"), err)
		}
		addrs = append(addrs, a)
	}
	return addrs, true, nil
}

// validAttachments is the list that GC keeps; ok is false where the key is missing, and a null is an empty list
// (CNI SPEC 1.1, "GC").
func (c *netConf) validAttachments() (valid []ledger.Attachment, ok bool, err error) {
	const key = "cni.dev/valid-attachments"
	if _, there := c.root.m[key]; !there {
		return nil, false, nil
	}
	list, err := c.root.objs(key)
	if err != nil {
		return nil, false, err
	}
	for _, o := range list {
		id, err := o.str("containerID")
		if err != nil {
			return nil, false, err
		}
		ifname, err := o.str("ifname")
		if err != nil {
			return nil, false, err
		}
		if id == "" || ifname == "" {
			return nil, false, fmt.Errorf("%s: expected containerID and ifname", o.path)
		}
		valid = append(valid, ledger.Attachment{ContainerID: id, IfName: ifname})
	}
	return valid, true, nil
}
