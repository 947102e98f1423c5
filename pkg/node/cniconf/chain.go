package cniconf

import (
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/stayput/stayput/pkg/netconf"
)

// The plugins of the agent's file are its source's, with stayput in host-local's place. Of those that stayput has no
// part in, programs such as a service mesh change the file that comes first, which is the agent's, or its source, or
// both: what counts is a three-way merge. Its base is the source when the agent last wrote, which the file's marker
// has, so that nothing need be remembered:
//
//	source changed since    what the source has now, also if that is nothing
//	source unchanged        what the file has now, also if that is nothing
//	in neither before       what the file or the source has now

// keyed returns the plugins of a list by type, and their keys in order. A second one of a type has a key of its own.
func keyed(list map[string]any) (keys []string, plugins map[string]map[string]any) {
	plugins = map[string]map[string]any{}
	for _, p := range pluginsOf(list) {
		key := typeOf(p)
		for n := 2; plugins[key] != nil; n++ {
			key = fmt.Sprintf("%s#%d", typeOf(p), n)
		}
		keys, plugins[key] = append(keys, key), p
	}
	return keys, plugins
}

// gives reports whether Derive gives a plugin of the source to stayput.
func gives(p map[string]any) bool {
	k, _ := classifyPlugin(p)
	return k == Stock
}

// base returns the plugins of a source as the marker keeps them: of one that stayput has a part in, its type.
func (c *Conf) base() (plugins []any) {
	all := pluginsOf(c.list)
	for _, p := range all[:len(all)-len(c.copied)] {
		if gives(p) {
			p = map[string]any{"type": typeOf(p)}
		}
		plugins = append(plugins, p)
	}
	return plugins
}

// marker returns what the agent has noted in a derived configuration, empty if the configuration is no such.
func (c *Conf) marker() map[string]any {
	if c == nil {
		return nil
	}
	m, _ := c.list[derivedKey].(map[string]any)
	return m
}

// merged returns the plugins of the source merged with those of own, the derived file as it is now; own may be nil.
// Those whose program missing reports are left out, and named in left. What it returns is part of source and own.
func merged(source, own *Conf, missing func(plugin string) bool) (plugins []map[string]any, left []string) {
	keys, now := keyed(source.list)
	ownKeys, theirs := keyed(own.content())
	last, _ := own.marker()["plugins"].([]any)
	copied, _ := own.marker()["copied"].([]any)
	baseKeys, base := keyed(map[string]any{"plugins": slices.Concat(last, copied)})
	wasLeft := own.leftOut()
	var order []string
	take := func(key string, p map[string]any) {
		switch {
		case p == nil:
		case !gives(p) && missing != nil && missing(typeOf(p)):
			left = append(left, typeOf(p))
		default:
			order, now[key] = append(order, key), p
		}
	}
	for _, key := range keys {
		p := now[key]
		unchanged := base[key] != nil && reflect.DeepEqual(base[key], p)
		if unchanged && !gives(p) && (theirs[key] != nil || !slices.Contains(wasLeft, typeOf(p))) {
			p = theirs[key]
		}
		take(key, p)
	}
	for _, key := range ownKeys {
		if now[key] == nil && base[key] == nil && ipamType(theirs[key]) != netconf.Type {
			take(key, theirs[key])
		}
	}
	// Some programs insist on being the last.
	if !slices.Equal(ownKeys, baseKeys) && slices.Equal(slices.Sorted(slices.Values(ownKeys)),
		slices.Sorted(slices.Values(order))) {
		order = ownKeys
	}
	for _, key := range order {
		plugins = append(plugins, now[key])
	}
	return plugins, left
}

// content returns the list of a derived configuration, nil if the configuration is no such.
func (c *Conf) content() map[string]any {
	if c.marker() == nil {
		return nil
	}
	return c.list
}

// leftOut returns the types of the plugins that were left out of a derived configuration because their program is
// missing.
func (c *Conf) leftOut() (types []string) {
	all, _ := c.marker()["missing"].([]any)
	for _, t := range all {
		if t, ok := t.(string); ok {
			types = append(types, t)
		}
	}
	return types
}

// withCopies returns a source with what copies of the agent's file have besides: some programs chain their plugin to a
// copy of the first file instead of to that.
func (d confDir) withCopies(source *Conf) *Conf {
	with := *source
	_, known := keyed(source.list)
	for _, c := range d.copies() {
		_, base := keyed(c.marker())
		keys, theirs := keyed(c.list)
		for _, key := range keys {
			if p := theirs[key]; known[key] == nil && base[key] == nil && ipamType(p) != netconf.Type {
				with.copied, known[key] = append(with.copied, p), p
			}
		}
	}
	with.list = maps.Clone(source.list)
	with.list["plugins"] = slices.Concat(source.list["plugins"].([]any), with.copied)
	return &with
}

// copies returns other programs' copies of the agent's file.
func (d confDir) copies() (all []*Conf) {
	for _, f := range d.Files {
		if c := d.Conf(f); f.Name != ConflistName && c.marker() != nil {
			all = append(all, c)
		}
	}
	return all
}
