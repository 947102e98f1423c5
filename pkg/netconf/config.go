// Package netconf reads CNI configurations: the configuration that the IPAM plugin is given on stdin, and the files of
// a runtime's configuration directory. It is the only reader, so that plugin and agent cannot disagree about a network.
//
// Every start of a pod waits for the start of the plugin, which links this package: it imports only what pkg/ledger
// does, and does nothing at start-up.
package netconf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/retention"
)

// Type is ipam.type of a configuration that names stayput, HostLocal that of a configuration whose place stayput can
// take.
const (
	Type      = "stayput"
	HostLocal = "host-local"
)

// AnnotationsCapability asks the runtime for the pod's annotations at every command (containerd, CRI-O).
const AnnotationsCapability = "io.kubernetes.cri.pod-annotations"

// ErrSyntax is wrapped by the error of Parse if the configuration is not a JSON object.
var ErrSyntax = errors.New("invalid network configuration")

// Versions are those of the CNI specification that the plugin speaks, oldest first (CNI SPEC, "Protocol parameters").
var Versions = [...]string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// Config is the configuration that the main plugin hands on: host-local's, with Stayput's own keys beside them in the
// ipam section (https://www.cni.dev/plugins/current/ipam/host-local/):
//
//	stateDir          directory of claims and index; default /var/lib/stayput
//	longestRetention  a Go duration; a pod that asks for more gets this
//	promisedShare     the share of each range that may be promised, bound and retained together: more than
//	                  0, at most 1; default 0.5
//	promisedSharePerNamespace
//	                  the part of it that one namespace may have; default all of it
//	promisedLimit     how many addresses of each range may be promised at most, regardless of the share; default 1024
//	promisedLimitPerNamespace
//	                  how many of them one namespace may have; default all of them
//	pools             names of pools: every address of the network comes from pools, these by default. The
//	                  list may be empty, and the network needs no ranges
type Config struct {
	Name string
	// CNIVersion is what the configuration says, not necessarily one of Versions: Speaks tells. Without one it is 0.1.0.
	CNIVersion        string
	DataDir, StateDir string // empty for the default
	root, ipam        object
}

// Parse decodes a plugin's configuration as far as every command needs it. The Config is never nil: with an error it
// has the fields that were decoded before. ErrSyntax means that stdin is not a JSON object; any other error names a
// field.
func Parse(stdin []byte) (*Config, error) {
	c := &Config{}
	var err error
	if c.root, err = parseObject(stdin); err != nil {
		return c, fmt.Errorf("%w: %v", ErrSyntax, err)
	}
	c.CNIVersion = c.root.version()
	if c.Name, err = c.root.str("name"); err != nil {
		return c, err
	}
	if !ValidNetwork(c.Name) {
		return c, fmt.Errorf("name: %.64q is not valid: expected a network name of letters, digits, _ . and -", c.Name)
	}
	ok := false
	if c.ipam, ok, err = c.root.obj("ipam"); err != nil {
		return c, err
	} else if !ok {
		return c, fmt.Errorf("ipam: missing: expected the section with \"type\": %q", Type)
	}
	if c.DataDir, err = c.directory("dataDir"); err != nil {
		return c, err
	}
	c.StateDir, err = c.directory("stateDir")
	return c, err
}

// Speaks reports whether the plugin speaks a version of CNI.
func Speaks(version string) bool { return slices.Contains(Versions[:], version) }

// version returns the version that a configuration says, JSON if it is no string: a DEL does not depend on it.
func (o object) version() string {
	switch v, _ := o.lookup("cniVersion"); v := v.(type) {
	case nil:
		return Versions[0]
	case string:
		return cmp.Or(v, Versions[0])
	default:
		b, _ := json.Marshal(v)
		return string(b)
	}
}

// ValidName reports whether s is a container ID or network name that CNI allows: [a-zA-Z0-9][a-zA-Z0-9_.\-]*, as
// github.com/containernetworking/cni/pkg/utils checks it by regular expressions, which take time to compile.
func ValidName(s string) bool {
	for i := range len(s) {
		c := s[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '_' && c != '.' && c != '-') {
			return false
		}
	}
	return s != ""
}

// ValidNetwork reports whether a network of that name can have a directory of its own.
func ValidNetwork(name string) bool { return ValidName(name) && len(name) <= 200 }

func (c *Config) directory(key string) (string, error) {
	dir, err := c.ipam.str(key)
	if err == nil && dir != "" && (dir[0] != '/' || strings.ContainsRune(dir, 0)) {
		err = c.ipam.wrong(key, "an absolute path", dir)
	}
	return dir, err
}

// Bare returns the network without ranges and limits, which a DEL can do without.
func (c *Config) Bare() *ledger.Network {
	return &ledger.Network{Name: c.Name, DataDir: c.DataDir}
}

// Network returns the network with its ranges and limits.
func (c *Config) Network() (*ledger.Network, error) {
	n := c.Bare()
	if err := c.addRanges(n); err != nil {
		return nil, err
	}
	_, pooled, err := c.pools()
	if err != nil {
		return nil, err
	}
	if len(n.Ranges) > 0 || !pooled {
		if err := ledger.ValidateRangeSets(n.Ranges); err != nil {
			return nil, fmt.Errorf("ipam: %w", err)
		}
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
	if n.PromisedShare, err = c.share("promisedShare"); err != nil {
		return nil, err
	}
	if n.PromisedSharePerNamespace, err = c.share("promisedSharePerNamespace"); err != nil {
		return nil, err
	}
	if n.PromisedLimit, err = c.limit("promisedLimit"); err != nil {
		return nil, err
	}
	if n.PromisedLimitPerNamespace, err = c.limit("promisedLimitPerNamespace"); err != nil {
		return nil, err
	}
	return n, nil
}

// limit returns how many addresses a limit allows, 0 if the configuration does not say.
func (c *Config) limit(key string) (int64, error) {
	v, _ := c.ipam.lookup(key)
	if v == nil {
		return 0, nil
	}
	n, ok := v.(float64)
	if !ok || n != math.Trunc(n) || !(n >= 1 && n <= math.MaxInt32) {
		return 0, c.ipam.wrong(key, "a whole number above 0", v)
	}
	return int64(n), nil
}

// share returns a share of each range, 0 if the configuration does not say.
func (c *Config) share(key string) (float64, error) {
	v, _ := c.ipam.lookup(key)
	if v == nil {
		return 0, nil
	}
	share, ok := v.(float64)
	if !ok || !(share > 0 && share <= 1) {
		return 0, c.ipam.wrong(key, "a number above 0 and at most 1", v)
	}
	return share, nil
}

// addRanges collects the range sets in host-local's order: runtimeConfig.ipRanges, the old-style single
// range, ipam.ranges.
func (c *Config) addRanges(n *ledger.Network) error {
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
			return fmt.Errorf("%s: expected a list of ranges", o.at(key, i))
		}
		var rs ledger.RangeSet
		for j, ro := range ranges {
			ro.path = o.at(key, i) + "[" + strconv.Itoa(j) + "]"
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

// Routes returns the configured routes with the keys that CNI knows (SPEC 1.1, "Result"), in the result's form. Like
// host-local it returns all of them at every version.
func (c *Config) Routes() ([]map[string]any, error) {
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

// Policy returns what the pod's annotations say, nil if the runtime did not hand them on.
func (c *Config) Policy() (*retention.Policy, error) {
	o, there, err := c.annotations()
	if err != nil || !there {
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
	p, _, err := retention.Parse(annotations)
	return &p, err
}

// annotations returns the pod's annotations; there is false if the runtime did not hand them on.
func (c *Config) annotations() (o object, there bool, err error) {
	runtime, _, err := c.root.obj("runtimeConfig")
	if err != nil {
		return o, false, err
	}
	if _, there = runtime.m[AnnotationsCapability]; !there {
		return o, false, nil
	}
	o, _, err = runtime.obj(AnnotationsCapability)
	return o, true, err
}

// Requested returns the addresses that the runtime asks for, each once, from all three places that host-local knows: IP
// in CNI_ARGS, which is fromArgs, args.cni.ips and runtimeConfig.ips. Multus fills in more than one of them.
func (c *Config) Requested(fromArgs string) ([]netip.Addr, error) {
	var out []netip.Addr
	add := func(field, s string) error {
		a, err := parseAddr(s)
		if err != nil {
			return fmt.Errorf("%s: %w", field, err)
		}
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
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

// PrevAddrs returns the addresses of prevResult; ok is false if there is none.
func (c *Config) PrevAddrs() (addrs []netip.Addr, ok bool, err error) {
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

// ResolvConf returns the path in ipam.resolvConf and the field's name for errors, "" without it.
func (c *Config) ResolvConf() (path, field string, err error) {
	path, err = c.ipam.str("resolvConf")
	return path, c.ipam.name("resolvConf"), err
}

// ValidAttachments returns the list that GC keeps; ok is false if the key is missing, and a null is an empty list
// (CNI SPEC 1.1, "GC").
func (c *Config) ValidAttachments() (valid []ledger.Attachment, ok bool, err error) {
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
