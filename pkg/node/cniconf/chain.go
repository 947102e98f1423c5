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

// merge is a source and the derived file as it is now, with the plugins of both and of the base by key.
type merge struct {
	source, own             map[string]map[string]any
	base                    map[string]map[string]any
	keys, ownKeys, baseKeys []string
	missing                 []string // types that were left out of own
}

func newMerge(source, own *Conf) *merge {
	m := &merge{missing: own.leftOut()}
	m.keys, m.source = keyed(source.list)
	m.ownKeys, m.own = keyed(own.content())
	last, _ := own.marker()["plugins"].([]any)
	copied, _ := own.marker()["copied"].([]any)
	m.baseKeys, m.base = keyed(map[string]any{"plugins": slices.Concat(last, copied)})
	return m
}

// plugin returns what counts of a plugin, nil if that is nothing.
func (m *merge) plugin(key string) map[string]any {
	p, theirs := m.source[key], m.own[key]
	switch {
	case p == nil && (m.base[key] != nil || ipamType(theirs) == netconf.Type):
		return nil // the source has it no more
	case p == nil:
		return theirs
	case gives(p) || !reflect.DeepEqual(m.base[key], p):
		return p
	case theirs == nil && slices.Contains(m.missing, typeOf(p)):
		return p // it was not another program that took it out
	}
	return theirs
}

// merged returns the plugins of the source merged with those of own, the derived file as it is now; own may be nil.
// Those that missing reports are left out, and their types returned in left. What it returns is part of source and own.
func merged(source, own *Conf, missing func(plugin string) bool) (plugins []map[string]any, left []string) {
	m := newMerge(source, own)
	var order []string
	for _, key := range slices.Concat(m.keys, m.ownKeys) {
		p := m.plugin(key)
		list, name := &order, key
		if missing != nil && !gives(p) && missing(typeOf(p)) {
			list, name = &left, typeOf(p)
		}
		if p != nil && !slices.Contains(*list, name) {
			*list = append(*list, name)
		}
	}
	// Some programs insist on being the last.
	if !slices.Equal(m.ownKeys, m.baseKeys) && slices.Equal(slices.Sorted(slices.Values(m.ownKeys)),
		slices.Sorted(slices.Values(order))) {
		order = m.ownKeys
	}
	for _, key := range order {
		plugins = append(plugins, m.plugin(key))
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
// missing, without those that another program has chained to it since.
func (c *Conf) leftOut() (types []string) {
	all, _ := c.marker()["missing"].([]any)
	for _, t := range all {
		if t, ok := t.(string); ok && !slices.Contains(c.Types(), t) {
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
	for _, c := range d.all {
		if c.File != ConflistName && c.marker() != nil {
			all = append(all, c)
		}
	}
	return all
}
