package cniconf

import (
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
	if len(plugins) > 0 {
		if t := typeOf(plugins[0]); t == "multus" || t == "multus-shim" {
			return Multus, ""
		}
	}
	found := map[Kind]bool{}
	why := ""
	for i, p := range plugins {
		k, reason := classifyPlugin(p)
		found[k] = true
		if k == Foreign && why == "" {
			why = fmt.Sprintf("plugins[%d]: %s", i, reason)
		}
	}
	inFolder := false
	if !inlined(list) {
		name, _ := list["name"].(string)
		for _, f := range d.Folders[name] {
			var p map[string]any
			if f.Err != nil || json.Unmarshal(f.Data, &p) != nil {
				return Broken, "the network's plugin in the folder " + filepath.Join(name, f.Name) + " cannot be read"
			}
			k, reason := classifyPlugin(p)
			inFolder = true
			if k != plain {
				return Foreign, fmt.Sprintf("folder %s: IPAM configuration in a separate file (%s) is not supported",
					name, strings.TrimSpace(f.Name+" "+reason))
			}
		}
	}
	switch {
	case len(plugins) == 0 && !inFolder:
		return Broken, "no plugins"
	case found[ByHand]:
		return ByHand, ""
	case found[Stock] && !found[Foreign]:
		if why := refusal(list); why != "" {
			return Foreign, why
		}
		return Stock, ""
	}
	var types []string
	for _, p := range plugins {
		types = append(types, typeOf(p))
	}
	for i, t := range types { // a known plugin says more than an unknown one that is chained to it
		if t == calicoType && ipamType(plugins[i]) == netconf.HostLocal {
			continue // it is not its own IPAM
		}
		if why := reasons[t]; why != "" {
			return Foreign, t + ": " + why
		}
	}
	if found[Foreign] {
		return Foreign, why
	}
	return Foreign, fmt.Sprintf("none of its plugins (%s) uses host-local", strings.Join(types, ", "))
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
	for _, key := range []string{"type", "ipam", "delegate", "capabilities"} {
		if other := foldedKey(p, key); other != "" {
			return Foreign, fmt.Sprintf("key %q: expected the spelling %q", other, key)
		}
	}
	t := typeOf(p)
	ipam, isObject := p["ipam"].(map[string]any)
	if p["ipam"] != nil && !isObject {
		return Foreign, "ipam: expected an object"
	}
	if other := foldedKey(ipam, "type"); other != "" {
		return Foreign, fmt.Sprintf("ipam: key %q: expected the spelling \"type\"", other)
	}
	by, isString := ipam["type"].(string)
	if _, there := ipam["type"]; there && !isString {
		return Foreign, "ipam.type: expected a string"
	} else if t == flannelType && !there {
		by = netconf.HostLocal // what it takes by default
	}
	switch {
	case by == netconf.Type:
		return ByHand, ""
	case by == "" || by != netconf.HostLocal && !slices.Contains(callers, t) && t != flannelType && reasons[t] == "":
		return plain, ""
	case by != netconf.HostLocal && reasons[t] != "":
		return Foreign, t + ": " + reasons[t]
	case by != netconf.HostLocal:
		return Foreign, fmt.Sprintf("%s uses the IPAM plugin %s, not host-local", t, by)
	case t == flannelType:
		return classifyFlannel(p)
	case t == calicoType:
		return classifyCalico(p)
	case slices.Contains(callers, t):
		return Stock, ""
	case reasons[t] != "":
		return Foreign, t + ": " + reasons[t]
	}
	return Foreign, fmt.Sprintf(
		"unknown plugin %s; if it runs the IPAM plugin in ipam.type, set that to \"stayput\" by hand", t)
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
