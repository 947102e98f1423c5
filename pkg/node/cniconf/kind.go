package cniconf

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stayput/stayput/pkg/netconf"
)

// classify is cautious: a list is Stock only if every plugin of it that has host-local is understood.
func (d Dir) classify(list map[string]any) (Kind, string) {
	plugins := pluginsOf(list)
	if len(plugins) > 0 && slices.Contains([]string{"multus", "multus-shim"}, typeOf(plugins[0])) {
		return Multus, ""
	}
	found, why := classifyAll(plugins)
	inFolder, k, reason := d.classifyFolder(list)
	switch {
	case reason != "":
		return k, reason
	case len(plugins) == 0 && !inFolder:
		return Broken, "no plugins"
	case found[ByHand]:
		return ByHand, ""
	case found[Stock] && !found[Foreign]:
		if why = refusal(list); why == "" {
			return Stock, ""
		}
		return Foreign, why
	}
	// A known plugin says more than an unknown one that is chained to it.
	return Foreign, cmp.Or(known(plugins), why, fmt.Sprintf("none of its plugins (%s) uses host-local",
		strings.Join((&Conf{list: list}).Types(), ", ")))
}

// classifyAll returns which kinds there are among the plugins, and why the first Foreign one is that.
func classifyAll(plugins []map[string]any) (found map[Kind]bool, why string) {
	found = map[Kind]bool{}
	for i, p := range plugins {
		k, reason := classifyPlugin(p)
		if k == Foreign && !found[k] {
			why = fmt.Sprintf("plugins[%d]: %s", i, reason)
		}
		found[k] = true
	}
	return found, why
}

// classifyFolder is about the plugins that libcni adds to a list from the folder of its name: whether there are any,
// and why the list is of kind k if one of them is not plain.
func (d Dir) classifyFolder(list map[string]any) (there bool, k Kind, why string) {
	if inlined(list) {
		return false, 0, ""
	}
	name, _ := list["name"].(string)
	for _, f := range d.Folders[name] {
		var p map[string]any
		if f.Err != nil || json.Unmarshal(f.Data, &p) != nil {
			return true, Broken, "the network's plugin in the folder " + filepath.Join(name, f.Name) + " cannot be read"
		}
		if k, reason := classifyPlugin(p); k != plain {
			return true, Foreign, fmt.Sprintf("folder %s: IPAM configuration in a separate file (%s) is not supported",
				name, strings.TrimSpace(f.Name+" "+reason))
		}
	}
	return len(d.Folders[name]) > 0, 0, ""
}

// known returns what is known of the first of the plugins that has addresses of its own.
func known(plugins []map[string]any) string {
	for _, p := range plugins {
		t := typeOf(p)
		if why := reasons[t]; why != "" && (t != calicoType || ipamType(p) != netconf.HostLocal) {
			return t + ": " + why
		}
	}
	return ""
}

// refusal returns why the plugin would refuse a configuration of kind Stock that host-local may accept, "" if it would
// not: then no pod could start.
func refusal(list map[string]any) string {
	one := []any{list["cniVersion"]}
	several, _ := list["cniVersions"].([]any) // the runtime takes the newest of these that it knows
	for i, v := range slices.Concat(one, several) {
		if v, _ := v.(string); v != "" && !netconf.Speaks(v) {
			key := "cniVersion"
			if i > 0 {
				key = "cniVersions"
			}
			return fmt.Sprintf("%s: %.64q is not supported by the plugin: expected %s to %s",
				key, v, netconf.Versions[0], netconf.Versions[len(netconf.Versions)-1])
		}
	}
	for _, p := range pluginsOf(list) {
		if k, _ := classifyPlugin(p); k != Stock {
			continue
		}
		p = clone(p).(map[string]any)
		section(p, "ipam") // of flannel's it may be missing
		if _, err := parseGiven(list, p); err != nil {
			return err.Error()
		}
	}
	return ""
}

// plain is a plugin without IPAM, such as portmap. It stays as it is.
const plain = Kind(-1)

func classifyPlugin(p map[string]any) (Kind, string) {
	by, wrong := ipamOf(p)
	t := typeOf(p)
	why := reasons[t]
	if why != "" {
		why = t + ": " + why
	}
	isCaller := slices.Contains(callers, t) || t == flannelType
	switch {
	case wrong != "":
		return Foreign, wrong
	case by == netconf.Type:
		return ByHand, ""
	case by == netconf.HostLocal:
		return classifyStock(p, isCaller, why)
	case by == "" || !isCaller && why == "":
		return plain, ""
	}
	return Foreign, cmp.Or(why, fmt.Sprintf("%s uses the IPAM plugin %s, not host-local", t, by))
}

// classifyStock is about a plugin with host-local; why is what is known of one whose addresses cannot be kept.
func classifyStock(p map[string]any, isCaller bool, why string) (Kind, string) {
	switch t := typeOf(p); {
	case t == flannelType:
		return classifyFlannel(p)
	case t == calicoType:
		return classifyCalico(p)
	case isCaller:
		return Stock, ""
	default:
		return Foreign, cmp.Or(why, fmt.Sprintf(
			"unknown plugin %s; if it runs the IPAM plugin in ipam.type, set that to \"stayput\" by hand", t))
	}
}

// ipamOf returns which IPAM plugin a plugin runs, "" if none, or what is wrong about it.
func ipamOf(p map[string]any) (by, wrong string) {
	for _, key := range []string{"type", "ipam", "delegate", "capabilities"} {
		if other := foldedKey(p, key); other != "" {
			return "", fmt.Sprintf("key %q: expected the spelling %q", other, key)
		}
	}
	ipam, isObject := p["ipam"].(map[string]any)
	if p["ipam"] != nil && !isObject {
		return "", "ipam: expected an object"
	}
	if other := foldedKey(ipam, "type"); other != "" {
		return "", fmt.Sprintf("ipam: key %q: expected the spelling \"type\"", other)
	}
	by, isString := ipam["type"].(string)
	if _, there := ipam["type"]; there && !isString {
		return "", "ipam.type: expected a string"
	} else if !there && typeOf(p) == flannelType {
		by = netconf.HostLocal // what it takes by default
	}
	return by, ""
}

// classifyFlannel goes by the plugin that flannel's delegates to, whose IPAM section it makes from its own.
func classifyFlannel(p map[string]any) (Kind, string) {
	delegate, isObject := p["delegate"].(map[string]any)
	if p["delegate"] != nil && !isObject {
		return Foreign, "delegate: expected an object"
	}
	switch t := delegate["type"].(type) {
	case nil:
	case string:
		if !slices.Contains(callers, t) {
			if why := reasons[t]; why != "" {
				return Foreign, fmt.Sprintf("delegate: %s: %s", t, why)
			}
			return Foreign, fmt.Sprintf("delegate: unknown plugin %s", t)
		}
	default:
		return Foreign, "delegate.type: expected a string"
	}
	return Stock, ""
}
