package netconf

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
)

// AnnotationAddresses has the addresses of pools that the cluster has given to a pod, written by the controller:
//
//	[{"network":"vlan10","interface":"net1","pool":"blue-v4","mode":"L2","address":"10.6.168.105/16",
//	  "gateway":"10.6.0.1","routes":[{"dst":"10.9.0.0/16","gw":"10.6.0.2"}],"last":"node-2"}]
const AnnotationAddresses = "stayput.io/addresses"

// annotationPools is the annotation by which a pod asks for addresses of pools, unless it is empty.
const annotationPools = "stayput.io/pools"

// spiderpoolAnnotations are those by which a pod asks Spiderpool for addresses. Some of them the controller can only
// refuse.
var spiderpoolAnnotations = [...]string{
	"ipam.spidernet.io/ippool", "ipam.spidernet.io/ippools", "ipam.spidernet.io/subnet", "ipam.spidernet.io/subnets",
}

// configSource is kubelet's annotation that says where a pod comes from: "api", or a file or URL for a static pod.
const configSource = "kubernetes.io/config.source"

// Pools is what a configuration and the pod's annotations in it say of pools. The zero Pools: nothing.
type Pools struct {
	// Text is the annotation AnnotationAddresses, empty if there is none.
	Text string
	// Asked says that the pod asks for addresses of pools, maybe for another interface.
	Asked bool
	// AskedSpiderpool says that it does so by Spiderpool's annotations. They count only in a cluster that says so
	// (grants.Served): elsewhere they are Spiderpool's own, or left over.
	AskedSpiderpool bool
	// Network says that the network has no other addresses.
	Network bool
	// Static says that kubelet has the pod from a file or a URL. The cluster can give no address to such a pod.
	Static bool
}

// Pools returns what configuration and annotations say of pools.
func (c *Config) Pools() (p Pools, err error) {
	if _, p.Network, err = c.pools(); err != nil {
		return p, err
	}
	o, there, err := c.annotations()
	if err != nil || !there {
		return p, err
	}
	if v, there := o.m[AnnotationAddresses]; there {
		s, ok := v.(string)
		if !ok || s == "" {
			return p, fmt.Errorf("annotation %s: expected a list of addresses in JSON, as the controller writes it",
				AnnotationAddresses)
		}
		p.Text = s
	}
	asks := func(key string) bool {
		v, there := o.m[key]
		return there && v != ""
	}
	p.Asked = p.Text != "" || asks(annotationPools)
	p.AskedSpiderpool = slices.ContainsFunc(spiderpoolAnnotations[:], asks)
	source, _ := o.m[configSource].(string)
	p.Static = source != "" && source != "api"
	return p, nil
}

// pools returns the pools in the configuration; there says whether it has the key.
func (c *Config) pools() (names []string, there bool, err error) {
	v, _ := c.ipam.lookup("pools")
	names, err = c.ipam.strs("pools")
	return names, v != nil, err
}

// PoolAddress is an address of a pool that an attachment gets.
type PoolAddress struct {
	Prefix  netip.Prefix // with the length of the subnet
	Gateway netip.Addr   // the zero Addr if there is none
	Routes  []map[string]any
	Pool    string
	Last    string // the node on which the address was used last, empty if it is new
	// Routed says that the nodes route the address, which is in no subnet. Prefix is the address alone; it has neither
	// gateway nor routes, which are those of the node that has the pod.
	Routed bool
}

// mostPoolText is how long a text with addresses may be: a pod has few interfaces.
const mostPoolText = 64 << 10

// ParsePoolAddresses returns the addresses that a text, which is from source, gives to an interface of a network: at
// most one of each family. No address and no error: it says nothing of the interface. An error names the field.
func ParsePoolAddresses(source, text, network, ifname string) ([]PoolAddress, error) {
	var list []any
	if len(text) > mostPoolText {
		return nil, fmt.Errorf("%s: %d bytes exceed the limit: expected at most %d", source, len(text), mostPoolText)
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil || list == nil {
		return nil, fmt.Errorf("%s: %.64q is not valid: expected a list of addresses in JSON, as the controller writes it",
			source, text)
	}
	var out []PoolAddress
	elsewhere := ""
	for i, v := range list {
		path := source + ": [" + strconv.Itoa(i) + "]"
		m, ok := v.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("%s: expected an object", path)
		}
		o := object{path, m}
		if mode, _ := o.str("mode"); mode == "Calico" { // another plugin gives it, to another interface
			if on, _ := o.str("interface"); on != ifname {
				continue
			}
		}
		a, of, on, err := parsePoolAddress(o)
		switch {
		case err != nil:
			return nil, err
		case on != ifname:
			continue
		case of != "" && of != network:
			elsewhere = of
			continue
		}
		for _, other := range out {
			if other.Routed != a.Routed {
				return nil, fmt.Errorf("%s.mode: %s and %s have different modes: expected one mode for interface %s",
					path, other.Prefix, a.Prefix, ifname)
			}
			if other.Prefix.Addr().Is4() == a.Prefix.Addr().Is4() {
				return nil, fmt.Errorf("%s.address: %s and %s are of the same family: "+
					"expected one address of each family for interface %s", path, a.Prefix, other.Prefix, ifname)
			}
		}
		out = append(out, a)
	}
	if len(out) == 0 && elsewhere != "" {
		return nil, fmt.Errorf("%s: interface %s has addresses of network %.64q: "+
			"expected network %s, to which it is attached", source, ifname, elsewhere, network)
	}
	return out, nil
}

// MainPlugin is the plugin that gives routed addresses to pods, with the node as their gateway.
type MainPlugin struct {
	Bridge string // of the plugin bridge, empty if it is ptp
}

// ParseMainPlugin is [Config.MainPlugin] of the configuration of a main plugin alone.
func ParseMainPlugin(data []byte) (MainPlugin, error) {
	o, err := parseObject(data)
	if err != nil {
		return MainPlugin{}, err
	}
	return (&Config{root: o}).MainPlugin()
}

// MainPlugin returns the plugin that runs the IPAM plugin, also below flannel's. It is an error, which names the field,
// if its pods cannot have routed addresses.
func (c *Config) MainPlugin() (p MainPlugin, err error) {
	t, err := c.root.str("type")
	if err != nil || t == "ptp" {
		return p, err
	}
	if t != "bridge" {
		return p, c.root.wrong("type", "bridge or ptp, whose pods use their node as gateway", t)
	}
	isGateway, _ := c.root.lookup("isGateway")
	isDefault, _ := c.root.lookup("isDefaultGateway")
	if isGateway != true && isDefault != true {
		return p, c.root.wrong("isGateway", "true, so that the node is the gateway of its pods", isGateway)
	}
	if vlan, _ := c.root.lookup("vlan"); vlan != nil && vlan != 0.0 {
		return p, c.root.wrong("vlan", "none, so that the gateway is on the bridge", vlan)
	}
	p.Bridge, err = c.Bridge()
	return p, err
}

// ParseOnLink is [Config.OnLink] of the configuration of a main plugin alone.
func ParseOnLink(data []byte) error {
	o, err := parseObject(data)
	if err != nil {
		return err
	}
	return (&Config{root: o}).OnLink()
}

// OnLink returns why pods of the main plugin are on no link that nodes share, nil if they are, as far as the
// configuration says. An address of mode L2 would answer on its own node alone there. And bridge and ptp would give the
// node the pool's gateway as an address of its own, though another machine has it: the node loses what it reaches by
// that machine, and no other pod can have the bridge. The error names the field.
func (c *Config) OnLink() error {
	const instead = ". Use a pool of mode Routed, or a network whose pods are on a link that nodes share: macvlan, or a " +
		"bridge with an uplink and another machine as gateway"
	t, err := c.root.str("type")
	switch {
	case err != nil:
		return err
	case t == "ptp" || t == "calico":
		return c.root.wrong("type", "a plugin whose pods are on a link that nodes share"+instead, t)
	case t == "ipvlan":
		mode, err := c.root.str("mode")
		if err == nil && mode != "" && mode != "l2" {
			err = c.root.wrong("mode", "l2, in which pods answer on the link"+instead, mode)
		}
		return err
	case t != "bridge":
		return nil
	}
	for _, key := range []string{"isGateway", "isDefaultGateway"} {
		if v, _ := c.root.lookup(key); v == true {
			return c.root.wrong(key, "false, because the bridge would get the gateway of the pool as its own address"+
				instead, v)
		}
	}
	return nil
}

// Bridge returns the name of the plugin bridge's bridge, whether or not it is the main plugin.
func (c *Config) Bridge() (string, error) {
	name, err := c.root.str("bridge")
	return cmp.Or(name, "cni0"), err
}

func parsePoolAddress(o object) (a PoolAddress, network, ifname string, err error) {
	fail := func(err error) (PoolAddress, string, string, error) { return PoolAddress{}, "", "", err }
	text := map[string]string{}
	for _, key := range []string{"network", "interface", "pool", "mode", "address", "gateway", "last"} {
		if text[key], err = o.str(key); err != nil {
			return fail(err)
		}
	}
	a.Pool, a.Last = text["pool"], text["last"]
	if text["interface"] == "" {
		return fail(o.wrong("interface", "the name of an interface", ""))
	}
	if a.Routed = text["mode"] == "Routed"; !a.Routed && text["mode"] != "L2" {
		return fail(o.wrong("mode", `"L2" or "Routed", the modes that this version of the plugin supports`, text["mode"]))
	}
	if a.Prefix, err = netip.ParsePrefix(text["address"]); err != nil || !usable(a.Prefix.Addr()) || a.Prefix.Bits() == 0 {
		return fail(o.wrong("address", "an address of a host with the prefix length of its subnet, such as 10.6.168.105/16",
			text["address"]))
	}
	is4 := a.Prefix.Addr().Is4()
	if a.Routed {
		a.Prefix = netip.PrefixFrom(a.Prefix.Addr(), a.Prefix.Addr().BitLen())
		if s := text["gateway"]; s != "" {
			return fail(o.wrong("gateway", "none, because the gateway of a routed address is its node", s))
		}
		if l, err := o.list("routes"); err != nil || len(l) > 0 {
			return fail(o.wrong("routes", "none, because a routed address uses the routes of its node's network", l))
		}
	}
	if s := text["gateway"]; s != "" {
		a.Gateway, err = netip.ParseAddr(s)
		if err != nil || !usable(a.Gateway) || !a.Prefix.Contains(a.Gateway) || a.Gateway == a.Prefix.Addr() {
			return fail(o.wrong("gateway", "another address in the subnet of "+a.Prefix.String(), s))
		}
	}
	routes, err := o.objs("routes")
	if err != nil {
		return fail(err)
	}
	for _, r := range routes {
		dst, err := r.str("dst")
		if err != nil {
			return fail(err)
		}
		to, err := netip.ParsePrefix(dst)
		if err != nil || to != to.Masked() || to.Addr().Is4() != is4 || to.Addr().Is4In6() {
			return fail(r.wrong("dst", "a CIDR of the address's family without host bits, such as 10.9.0.0/16", dst))
		}
		route := map[string]any{"dst": to.String()}
		via, err := r.str("gw")
		if err != nil {
			return fail(err)
		}
		if via != "" {
			gw, err := netip.ParseAddr(via)
			if err != nil || gw.Is4() != is4 || gw.Is4In6() || gw.Zone() != "" {
				return fail(r.wrong("gw", "an address of the family of dst", via))
			}
			route["gw"] = gw.String()
		}
		a.Routes = append(a.Routes, route)
	}
	return a, text["network"], text["interface"], nil
}

// usable reports whether a pod can have an address.
func usable(a netip.Addr) bool {
	return !a.IsMulticast() && !a.IsLoopback() && !a.IsUnspecified() && !a.IsLinkLocalUnicast() && !a.Is4In6() &&
		a.Zone() == "" && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}
