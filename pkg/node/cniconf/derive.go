package cniconf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
)

// A derived configuration is another one with stayput in host-local's place:
//
//	{
//	  "cniVersion": …, "name": …, …               as in the source, numbers and unknown keys included
//	  "plugins": [                                 as in the source, merged with what other programs, such as
//	                                               service meshes, change here: see chain.go
//	    { …, "ipam": {…, "type": "stayput"},       host-local's keys stay
//	      "capabilities": {…, "io.kubernetes.cri.pod-annotations": true} }
//	  ],
//	  "stayput.io/derived": {                      known by it; runtimes ignore unknown keys
//	    "from": "10-flannel.conflist",
//	    "plugins": [{"type": "flannel"}, {…}],     the source's when this was written; of those with stayput, the type
//	    "copied": [{…}],                           what copies of this file had besides
//	    "missing": ["istio-cni"],                  types of plugins that were left out: there is no such program
//	    "podCIDRs": ["10.244.1.0/24"],             the Node's, if they were filled in for Calico's plugin
//	    "gone": {"since": "1h2m3s", "boot": "…", "files": […]}  if the source has gone: see held
//	    "note": "…"
//	  }
//	}
//
// It keeps the source's network name: the ledger and every later DEL go by that. For the same reason it keeps the name
// and the data directory that it has if the source gets others while addresses are in use: see Keeper.inUse.
const (
	derivedKey  = "stayput.io/derived"
	derivedNote = "Written by stayput-agent, which rewrites it whenever its source changes: edit that file instead."
)

// Limits are what Derive adds to the IPAM section. Zero fields leave it as it is.
type Limits struct {
	StateDir                  string
	PromisedShare             float64
	PromisedSharePerNamespace float64
	PromisedLimit             int64
	PromisedLimitPerNamespace int64
	LongestRetention          time.Duration
	// PodCIDRs are the Node's, for a source that WantsPodCIDRs, nil if they are not known. Then those that own was given
	// serve: they do not change while the Node exists.
	PodCIDRs []netip.Prefix
	// Network has the name and data directory that stay although the source has others, nil if the source's count.
	Network *ledger.Network
	// Missing reports that the runtime has no such plugin, which Derive then leaves out; nil if that is not known.
	Missing func(plugin string) bool
}

// Derive returns the configuration list derived from a source of kind Stock, in the form drawn above, and merged with
// what other programs have changed in own, the derived file as it is now; own may be nil. It returns ErrPodCIDRs if the
// source needs the Node's podCIDRs, and neither Limits nor own has them.
func Derive(source *Conf, l Limits, own *Conf) ([]byte, error) {
	podCIDRs := l.PodCIDRs
	if len(podCIDRs) == 0 {
		podCIDRs = own.podCIDRs()
	}
	marker := map[string]any{"from": source.File, "plugins": source.base(), "note": derivedNote}
	if source.WantsPodCIDRs() {
		if len(podCIDRs) == 0 {
			return nil, fmt.Errorf("%s: %w", source.File, ErrPodCIDRs)
		}
		marker["podCIDRs"] = podCIDRs
	}
	if len(source.copied) > 0 {
		marker["copied"] = source.copied
	}
	list := maps.Clone(source.list)
	chain, left := merged(source, own, l.Missing)
	if len(left) > 0 {
		marker["missing"] = left
	}
	plugins, err := l.giveAll(chain, podCIDRs)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source.File, err)
	}
	if l.Network != nil {
		list["name"] = l.Network.Name
	}
	list["plugins"], list[derivedKey] = plugins, marker
	data, err := encode(list)
	if err != nil {
		return nil, err
	}
	if _, err := load(File{Name: ".conflist", Data: data}); err != nil {
		return nil, fmt.Errorf("the configuration derived from %s cannot be loaded: %w", source.File, err)
	}
	return data, nil
}

// giveAll returns copies of plugins in which those that Derive gives to stayput run that.
func (l Limits) giveAll(chain []map[string]any, podCIDRs []netip.Prefix) ([]any, error) {
	plugins := []any{}
	for _, p := range chain {
		p := clone(p).(map[string]any)
		if gives(p) {
			if err := l.give(p, podCIDRs); err != nil {
				return nil, err
			}
		}
		plugins = append(plugins, p)
	}
	return plugins, nil
}

// give has a plugin run stayput in host-local's place.
func (l Limits) give(p map[string]any, podCIDRs []netip.Prefix) error {
	ipam := section(p, "ipam")
	ipam["type"] = netconf.Type
	if typeOf(p) == calicoType {
		if err := fillPodCIDRs(ipam, podCIDRs); err != nil {
			return err
		}
	}
	if l.StateDir != "" && l.StateDir != ledger.DefaultStateDir {
		ipam["stateDir"] = l.StateDir
	}
	if l.Network != nil {
		ipam["dataDir"] = l.Network.DataDir
	}
	for key, n := range map[string]string{
		"promisedShare":             strconv.FormatFloat(l.PromisedShare, 'f', -1, 64),
		"promisedSharePerNamespace": strconv.FormatFloat(l.PromisedSharePerNamespace, 'f', -1, 64),
		"promisedLimit":             strconv.FormatInt(l.PromisedLimit, 10),
		"promisedLimitPerNamespace": strconv.FormatInt(l.PromisedLimitPerNamespace, 10),
	} {
		if n != "0" {
			ipam[key] = json.Number(n)
		}
	}
	if l.LongestRetention != 0 {
		ipam["longestRetention"] = l.LongestRetention.String()
	}
	capabilities := section(p, "capabilities")
	if _, there := capabilities[netconf.AnnotationsCapability]; !there {
		capabilities[netconf.AnnotationsCapability] = true
	}
	return nil
}

// section returns an object in the configuration of a plugin, and makes it if it is missing.
func section(p map[string]any, key string) map[string]any {
	s, _ := p[key].(map[string]any)
	if s == nil {
		s = map[string]any{}
		p[key] = s
	}
	return s
}

func clone(v any) any {
	switch v := v.(type) {
	case map[string]any:
		m := make(map[string]any, len(v))
		for k, e := range v {
			m[k] = clone(e)
		}
		return m
	case []any:
		s := make([]any, len(v))
		for i, e := range v {
			s[i] = clone(e)
		}
		return s
	}
	return v
}

// DerivedFrom returns the name of the source; ok is false if the configuration is not a derived one.
func (c *Conf) DerivedFrom() (source string, ok bool) {
	source, ok = c.marker()["from"].(string)
	return source, ok
}

// Same reports whether the configuration equals the one in data, apart from formatting: programs that chain a plugin
// have their own.
func (c *Conf) Same(data []byte) bool {
	if bytes.Equal(c.data, data) {
		return true
	}
	want, err := decode(data)
	if err != nil || c.list == nil {
		return false
	}
	a, errA := encode(c.list)
	b, errB := encode(want)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

// Retype returns the configuration of a plugin with ipam.type changed, or nil if that is not from, the network is
// another one, or data is not a configuration. An empty network is any. Where it puts stayput, it puts stateDir too.
func Retype(data []byte, from, to, network, stateDir string) []byte {
	m, err := decode(data)
	if err != nil || network != "" && m["name"] != network || !retype(m, from, to, stateDir) {
		return nil
	}
	data, _ = json.Marshal(m) // decoded values encode
	return data
}

// RetypeCached returns a file of libcni's cache with ipam.type changed in the configuration that it holds, or nil if
// nothing in it is from, the network is another one, or data is no such file. An empty network is any. Where it puts
// stayput, it puts stateDir too.
func RetypeCached(data []byte, from, to, network, stateDir string) []byte {
	var file map[string]json.RawMessage // the rest stays byte for byte
	var kind string
	var config []byte // base64 in the file
	if json.Unmarshal(data, &file) != nil || json.Unmarshal(file["kind"], &kind) != nil || kind != cachedKind ||
		json.Unmarshal(file["config"], &config) != nil {
		return nil
	}
	if config = Retype(config, from, to, network, stateDir); config == nil {
		return nil
	}
	file["config"], _ = json.Marshal(config) // bytes encode
	data, _ = json.Marshal(file)             // decoded values, too
	return data
}

// RetypeDelegates does the same to what multus notes of a container: the configurations that its ADD delegated to, for
// its DEL. Its daemon notes no more of a list's plugins than their types (k8snetworkplumbingwg/multus-cni#1449), and
// host-local's DEL fails without ranges: a list that has none, and is made host-local's, becomes the one of source, if
// that is of the same network. source may be nil.
func RetypeDelegates(data []byte, from, to, network, stateDir string, source *Conf) []byte {
	var delegates []map[string]json.RawMessage // the rest stays byte for byte
	if json.Unmarshal(data, &delegates) != nil {
		return nil
	}
	changed := false
	for _, d := range delegates {
		var config []byte // base64 in the file
		if json.Unmarshal(d["Bytes"], &config) != nil {
			continue
		}
		if config = Retype(config, from, to, network, stateDir); config == nil {
			continue
		}
		d["Bytes"], _ = json.Marshal(withRanges(config, to, source)) // bytes encode
		changed = true
	}
	if !changed {
		return nil
	}
	data, _ = json.Marshal(delegates) // decoded values encode
	return data
}

// withRanges returns a configuration, or its source in place of a list without the ranges that host-local needs.
func withRanges(config []byte, to string, source *Conf) []byte {
	m, err := decode(config)
	_, isList := m["plugins"]
	if err != nil || !isList || to != netconf.HostLocal || ranged(m) || !source.is(Stock) || source.Network != m["name"] {
		return config
	}
	if data, err := json.Marshal(source.list); err == nil { // decoded values encode
		return data
	}
	return config
}

// retype changes ipam.type in a configuration, of a plugin or a list, and reports whether it has. Of host-local's it
// changes those plugins only in which Derive puts stayput; these get stateDir too.
func retype(m map[string]any, from, to, stateDir string) (changed bool) {
	plugins := pluginsOf(m)
	if _, isList := m["plugins"]; !isList {
		plugins = []map[string]any{m}
	}
	for _, p := range plugins {
		ipam, _ := p["ipam"].(map[string]any)
		if ipam["type"] != from {
			continue
		}
		if from == netconf.HostLocal {
			if k, _ := classifyPlugin(p); k != Stock {
				continue
			}
			if stateDir != "" && stateDir != ledger.DefaultStateDir {
				ipam["stateDir"] = stateDir
			}
		}
		ipam["type"], changed = to, true
	}
	return changed
}

// ranged reports whether a list has ranges of addresses.
func ranged(list map[string]any) bool {
	return slices.ContainsFunc(pluginsOf(list), func(p map[string]any) bool {
		ipam, _ := p["ipam"].(map[string]any)
		return ipam["ranges"] != nil || ipam["subnet"] != nil
	})
}

// cachedKind is libcni's word for its files.
const cachedKind = "cniCacheV1"
