package cniconf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/netconf"
)

// Kind classifies a configuration by what stayput can do with it.
type Kind int

// The kinds.
const (
	Broken  Kind = iota // the runtime cannot load it, or it could not be read
	Stock               // host-local, in a place that is understood
	ByHand              // it names stayput already
	Multus              // it delegates to another one, or to a copy of it
	Foreign             // anything else
)

// Conf is the configuration in one file.
type Conf struct {
	File    string // its name
	Kind    Kind
	Why     string         // of Broken and Foreign, for people
	Network string         // its name; empty if Broken
	list    map[string]any // as a configuration list; nil if Broken by its content
	copied  []any          // those of its plugins, the last ones, that are from copies of the agent's file
	data    []byte
	mode    fs.FileMode
}

// callers are the main plugins known to run the IPAM plugin in ipam.type and to hand it all of their configuration:
// those of containernetworking/plugins. flannel does too, by rules of its own.
var callers = []string{"bridge", "dummy", "host-device", "ipvlan", "macvlan", "ptp", "tap", "vlan"}

const flannelType = "flannel"

// reasons are why the addresses of a plugin cannot be kept.
var reasons = map[string]string{
	"antrea":              "antrea-agent runs IPAM itself and refuses every type but host-local and its own",
	"aws-cni":             "the AWS VPC CNI allocates addresses from the VPC through its own daemon",
	"azure-vnet":          "the Azure CNI allocates addresses from the virtual network through its own IPAM",
	"calico":              "Calico manages addresses in its own IPAM",
	"cilium-cni":          "cilium-agent allocates addresses itself",
	"kube-ovn":            "Kube-OVN allocates addresses itself and has its own fixed addresses",
	"ovn-k8s-cni-overlay": "OVN-Kubernetes allocates addresses itself",
	"terway":              "Terway allocates addresses from the VPC through its own daemon",
	"weave-net":           "Weave Net allocates addresses itself",
}

// Conf returns the configuration in a file of the directory, as go-cni, the library of containerd, loads it.
func (d Dir) Conf(f File) *Conf {
	c := &Conf{File: f.Name, data: f.Data, mode: f.Mode}
	err := f.Err
	if err == nil {
		c.list, err = load(f)
	}
	if err != nil {
		c.list, c.Why = nil, err.Error()
		return c
	}
	c.Network, _ = c.list["name"].(string)
	c.Kind, c.Why = d.classify(c.list)
	return c
}

// load decodes a file as a configuration list if libcni loads it. Numbers stay as they are written.
func load(f File) (map[string]any, error) {
	m, err := decode(f.Data)
	if err != nil {
		return nil, err
	}
	data := f.Data
	if filepath.Ext(f.Name) != ".conflist" {
		if _, err := libcni.NetworkPluginConfFromBytes(data); err != nil {
			return nil, err
		}
		list := map[string]any{"plugins": []any{m}}
		for _, key := range []string{"name", "cniVersion"} {
			if v, ok := m[key]; ok {
				list[key] = v
			}
		}
		m = list
		if data, err = json.Marshal(list); err != nil {
			return nil, err
		}
	}
	if _, err := libcni.NetworkConfFromBytes(data); err != nil {
		return nil, err
	}
	if m["name"] == "" {
		return nil, errors.New("name: expected the name of the network")
	}
	return m, nil
}

// inlined reports whether libcni ignores the folder named after the network.
func inlined(list map[string]any) bool {
	switch v := list["loadOnlyInlinedPlugins"].(type) {
	case bool:
		return v
	case string:
		return strings.EqualFold(v, "true")
	}
	return false
}

func decode(data []byte) (map[string]any, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("trailing data: expected a single JSON object")
	}
	if m == nil {
		return nil, errors.New("expected a JSON object")
	}
	return m, nil
}

func encode(m map[string]any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(m)
	return b.Bytes(), err
}

// foldedKey returns a key that encoding/json, and with it most plugins, takes for key although its case differs.
func foldedKey(m map[string]any, key string) string {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if k != key && strings.EqualFold(k, key) {
			return k
		}
	}
	return ""
}

func pluginsOf(list map[string]any) []map[string]any {
	var plugins []map[string]any
	all, _ := list["plugins"].([]any)
	for _, p := range all {
		m, _ := p.(map[string]any)
		plugins = append(plugins, m)
	}
	return plugins
}

func typeOf(p map[string]any) string {
	t, _ := p["type"].(string)
	return t
}

// Types returns the plugins of the configuration by name.
func (c *Conf) Types() (types []string) {
	for _, p := range pluginsOf(c.list) {
		types = append(types, typeOf(p))
	}
	return types
}

// Stayput returns the configuration that stayput is given by the first plugin that names it, as far as the file has it:
// flannel adds the ranges at ADD. It returns nil if no plugin names stayput, and an error of Parse.
func (c *Conf) Stayput() (*netconf.Config, error) {
	p := c.plugin(namesStayput)
	if p == nil {
		return nil, nil
	}
	conf, err := parseGiven(c.list, p)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.File, err)
	}
	return conf, nil
}

// plugin returns the first plugin that is such, nil if there is none.
func (c *Conf) plugin(is func(map[string]any) bool) map[string]any {
	plugins := pluginsOf(c.list)
	if i := slices.IndexFunc(plugins, is); i >= 0 {
		return plugins[i]
	}
	return nil
}

func namesStayput(p map[string]any) bool { return ipamType(p) == netconf.Type }

// Bridge returns the name of the bridge of the pods that stayput has addresses for, empty if they are on none.
func (c *Conf) Bridge() string {
	p := c.plugin(namesStayput)
	if typeOf(p) == flannelType {
		p = delegateOf(p)
	}
	if typeOf(p) != "bridge" {
		return ""
	}
	name, _ := p["bridge"].(string)
	return cmp.Or(name, "cni0")
}

// CannotRoute says why pods of the network cannot have routed addresses, by its main plugin alone. It is empty if they
// can, if only an ADD can tell, or if multus decides for each pod.
func (c *Conf) CannotRoute() string {
	return c.cannot(func(main []byte) error {
		_, err := netconf.ParseMainPlugin(main)
		return err
	})
}

// CannotServeL2 says why pods of the network cannot have addresses of mode L2, as CannotRoute does.
func (c *Conf) CannotServeL2() string { return c.cannot(netconf.ParseOnLink) }

// cannot returns the error that parse returns for the configuration of the main plugin, with the file's name.
func (c *Conf) cannot(parse func(main []byte) error) string {
	switch c.Kind {
	case Broken, Multus:
		return ""
	case Foreign:
		return c.Why
	}
	p := c.plugin(func(p map[string]any) bool {
		return typeOf(p) == flannelType || namesStayput(p) || ipamType(p) == netconf.HostLocal
	})
	if p == nil {
		return ""
	}
	if typeOf(p) == flannelType {
		p = delegateOf(p)
	}
	data, err := json.Marshal(p) // with the numbers that the CNI plugin reads
	if err == nil {
		err = parse(data)
	}
	if err != nil {
		return fmt.Sprintf("%s: %v", c.File, err)
	}
	return ""
}

// delegateOf returns the configuration of the main plugin below flannel's, with what that fills in: see
// flannel_linux.go of github.com/flannel-io/cni-plugin.
func delegateOf(flannel map[string]any) map[string]any {
	given, _ := flannel["delegate"].(map[string]any)
	main := map[string]any{"type": "bridge"}
	maps.Copy(main, given)
	if _, there := main["isGateway"]; !there && main["type"] == "bridge" {
		main["isGateway"] = true
	}
	return main
}

// parseGiven parses what the runtime makes of a plugin of a list.
func parseGiven(list, plugin map[string]any) (*netconf.Config, error) {
	given := maps.Clone(plugin)
	for _, key := range []string{"name", "cniVersion"} {
		if v, ok := list[key]; ok {
			given[key] = v
		}
	}
	data, err := json.Marshal(given)
	if err != nil {
		return nil, err
	}
	return netconf.Parse(data)
}

// WithoutAnnotations reports whether a plugin names stayput but does not ask for the pods' annotations.
func (c *Conf) WithoutAnnotations() bool {
	return slices.ContainsFunc(pluginsOf(c.list), func(p map[string]any) bool {
		return namesStayput(p) && netconf.Section(p, "capabilities")[netconf.AnnotationsCapability] != true
	})
}

// Networks returns the networks, with name and data directory alone, in which stayput may once have kept addresses,
// whichever IPAM plugin they have now.
func (c *Conf) Networks() (networks []*ledger.Network) {
	if !netconf.ValidNetwork(c.Network) {
		return nil
	}
	for _, p := range pluginsOf(c.list) {
		dir := netconf.Text(netconf.Section(p, "ipam"), "dataDir")
		networks = append(networks, &ledger.Network{Name: c.Network, DataDir: dir})
	}
	return networks
}

func ipamType(p map[string]any) string { return netconf.Text(netconf.Section(p, "ipam"), "type") }

// Delegate returns what a configuration of kind Multus delegates to: a copy of another one in the same file, or the
// cluster network, which is a name or a path in the container of multus' daemon. It returns nil and "" if the file does
// not say.
func (c *Conf) Delegate() (first *Conf, clusterNetwork string) {
	plugin := pluginsOf(c.list)[0]
	clusterNetwork, _ = plugin["clusterNetwork"].(string)
	delegates, _ := plugin["delegates"].([]any)
	if len(delegates) == 0 {
		return nil, clusterNetwork
	}
	list, _ := delegates[0].(map[string]any)
	if _, isList := list["plugins"]; !isList {
		list = map[string]any{"name": list["name"], "plugins": []any{list}}
	}
	first = &Conf{File: c.File, list: list}
	first.Network, _ = list["name"].(string)
	first.Kind, first.Why = Dir{}.classify(list)
	return first, ""
}

// Redelegate returns a configuration of kind Multus in which to replaces the derived configuration that it delegates to
// first, or the path of that, whose last element is name. It returns nil if it delegates to something else.
func (c *Conf) Redelegate(name string, to *Conf) []byte {
	if c.Kind != Multus {
		return nil
	}
	m, err := decode(c.data)
	other, toErr := decode(to.data)
	if err != nil || toErr != nil {
		return nil // its kind would be another
	}
	plugin := m
	if _, isList := m["plugins"]; isList {
		plugin = pluginsOf(m)[0]
	}
	delegates, _ := plugin["delegates"].([]any)
	switch first, network := c.Delegate(); {
	case first.marker() != nil:
		delegates[0] = other
	case first == nil && path.Base(network) == name && network != name:
		plugin["clusterNetwork"] = path.Join(path.Dir(network), to.File)
	default:
		return nil
	}
	data, _ := encode(m) // decoded values encode
	return data
}

// defaultFlannelDir is where flannel's plugin keeps its notes.
const defaultFlannelDir = "/var/lib/cni/flannel"

// FlannelDirs returns the directories in which flannel's plugin notes the configuration of each container's ADD.
func (c *Conf) FlannelDirs() (dirs []string) {
	for _, p := range pluginsOf(c.list) {
		if typeOf(p) != flannelType {
			continue
		}
		dir, _ := p["dataDir"].(string)
		dirs = append(dirs, cmp.Or(dir, defaultFlannelDir))
	}
	return dirs
}
