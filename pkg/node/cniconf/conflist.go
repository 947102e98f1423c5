// Package cniconf keeps the CNI configuration of a node: it installs the plugin's binary, and a configuration list of
// the agent's own that names it in host-local's place. It takes both away again. No other program's file is ever written,
// but for what flannel remembers of its containers.
package cniconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/stayput/stayput/pkg/ledger"
)

// The agent's own file in the runtime's configuration directory: the first foreign configuration with stayput in
// host-local's place.
//
//	00-stayput.conflist
//	{
//	  "cniVersion": …, "name": …, …               as in the source, numbers and unknown keys included
//	  "plugins": [                                 as in the source, in its order, and behind them what other
//	                                               programs have chained to this file (service meshes do)
//	    { …, "ipam": {…, "type": "stayput"},       host-local's keys stay
//	      "capabilities": {…, "io.kubernetes.cri.pod-annotations": true} }
//	  ],
//	  "stayput.io/derived": {                      makes the file the agent's; runtimes ignore unknown keys
//	    "from": "10-flannel.conflist",
//	    "types": ["flannel", "portmap"],           of the source's plugins: any other was chained by somebody
//	    "note": "…"
//	  }
//	}
//
// It has the source's network name, which the ledger and every later DEL go by.

// ConflistName is the name of the agent's file. The runtime takes the file that sorts first.
const ConflistName = "00-stayput.conflist"

const (
	derivedKey  = "stayput.io/derived"
	derivedNote = "Written by stayput-agent, which writes it anew when the file changes that it is derived from. Change that one."

	stockIPAM             = "host-local"
	annotationsCapability = "io.kubernetes.cri.pod-annotations"
)

// confFile is a file of the configuration directory as it was read.
type confFile struct {
	name string
	data []byte
	err  error // of reading it
}

// confDir is the configuration directory: what runtimes read of it, sorted by name, and for each folder in it its
// *.conf files, which libcni adds to the network of that name.
type confDir struct {
	files   []confFile
	folders map[string][]confFile
}

// kind is what the agent can do with a configuration.
type kind int

const (
	broken  kind = iota // the runtime cannot load it, or it could not be read
	stock               // host-local, in a place that is understood
	byHand              // stayput already
	multus              // it hands on to a copy of another one
	foreign             // anything else
)

// conf is one configuration.
type conf struct {
	name    string // of the file
	kind    kind
	why     string         // of broken and foreign
	list    map[string]any // as a configuration list; nil: broken
	network string
}

// callers are the main plugins known to run the IPAM plugin that ipam.type names and to hand it all of their
// configuration: those of containernetworking/plugins. flannel is one more, which has rules of its own.
var callers = []string{"bridge", "dummy", "host-device", "ipvlan", "macvlan", "ptp", "tap", "vlan"}

const flannelType = "flannel"

// reasons say of a plugin why its addresses cannot be kept.
var reasons = map[string]string{
	"antrea":              "antrea-agent runs IPAM itself and refuses every type but host-local and its own",
	"aws-cni":             "the AWS VPC CNI takes addresses from the VPC by its own daemon",
	"azure-vnet":          "the Azure CNI takes addresses from the virtual network by its own IPAM",
	"calico":              "Calico keeps addresses in its own IPAM, and fills in usePodCidr for host-local alone",
	"cilium-cni":          "cilium-agent hands out addresses itself",
	"kube-ovn":            "Kube-OVN hands out addresses itself; it has fixed addresses of its own",
	"ovn-k8s-cni-overlay": "OVN-Kubernetes hands out addresses itself",
	"terway":              "Terway takes addresses from the VPC by its own daemon",
	"weave-net":           "Weave Net hands out addresses itself",
}

// read says what a file configures, as go-cni, the library of containerd, loads it.
func (d confDir) read(f confFile) conf {
	c := conf{name: f.name}
	if f.err != nil {
		c.why = f.err.Error()
		return c
	}
	list, err := parseConf(f)
	if err != nil {
		c.why = err.Error()
		return c
	}
	c.list = list
	c.network, _ = list["name"].(string)
	c.kind, c.why = d.classify(list)
	return c
}

// parseConf decodes what libcni accepts. Numbers stay as they are written.
func parseConf(f confFile) (map[string]any, error) {
	m, err := decode(f.data)
	if err != nil {
		return nil, err
	}
	if filepath.Ext(f.name) != ".conflist" {
		if err := checkPlugin(m); err != nil {
			return nil, err
		}
		list := map[string]any{"plugins": []any{m}}
		for _, key := range []string{"name", "cniVersion"} {
			if v, ok := m[key]; ok {
				list[key] = v
			}
		}
		m = list
	}
	return m, checkList(m)
}

// checkList refuses what libcni.NetworkConfFromBytes does. That one is not used because it links the tracing
// libraries of whoever runs plugins; a fuzz test holds the two together.
func checkList(m map[string]any) error {
	if name, _ := m["name"].(string); name == "" {
		return errors.New("name: expected the name of the network")
	}
	var versions []any
	for key, v := range m {
		switch key {
		case "cniVersion":
			if _, ok := v.(string); !ok {
				return fmt.Errorf("cniVersion: expected a string")
			}
			if _, listed := m["cniVersions"]; listed {
				versions = append(versions, v)
			}
		case "cniVersions":
			list, ok := v.([]any)
			if !ok {
				return fmt.Errorf("cniVersions: expected a list of versions")
			}
			versions = append(versions, list...)
		case "disableCheck", "disableGC", "loadOnlyInlinedPlugins":
			s, isString := v.(string)
			if _, ok := v.(bool); !ok && (!isString || !strings.EqualFold(s, "true") && !strings.EqualFold(s, "false")) {
				return fmt.Errorf("%s: expected true or false", key)
			}
		}
	}
	for _, v := range versions {
		s, ok := v.(string)
		if !ok {
			return fmt.Errorf("cniVersions: expected a list of versions")
		}
		if _, err := version.GreaterThan(s, version.Current()); err != nil && s != "" {
			return fmt.Errorf("cniVersions: %w", err)
		}
	}
	all, there := m["plugins"]
	if !there {
		if inlined(m) {
			return fmt.Errorf("plugins: expected a list, since loadOnlyInlinedPlugins is true")
		}
		return nil
	}
	plugins, ok := all.([]any)
	if !ok || len(plugins) == 0 {
		return fmt.Errorf("plugins: expected a list of plugins")
	}
	for i, p := range plugins {
		if err := checkPlugin(p); err != nil {
			return fmt.Errorf("plugins[%d]: %w", i, err)
		}
	}
	return nil
}

func checkPlugin(p any) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	var c types.PluginConf
	if err := json.Unmarshal(data, &c); err != nil {
		return err
	}
	if c.Type == "" {
		return fmt.Errorf("type: expected the name of a plugin")
	}
	return nil
}

// inlined says whether libcni leaves the folder alone that is named after the network.
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
		return nil, errors.New("expected one JSON object and nothing behind it")
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

// classify is cautious: a list is stock only if every plugin of it that has host-local is understood.
func (d confDir) classify(list map[string]any) (kind, string) {
	plugins := pluginsOf(list)
	if len(plugins) > 0 {
		if t := typeOf(plugins[0]); t == "multus" || t == "multus-shim" {
			return multus, ""
		}
	}
	found := map[kind]bool{}
	why := ""
	for i, p := range plugins {
		k, reason := classifyPlugin(p)
		found[k] = true
		if k == foreign && why == "" {
			why = fmt.Sprintf("plugins[%d]: %s", i, reason)
		}
	}
	inFolder := false
	if !inlined(list) {
		name, _ := list["name"].(string)
		for _, f := range d.folders[name] {
			var p map[string]any
			if f.err != nil || json.Unmarshal(f.data, &p) != nil {
				return broken, "the network's plugin in the folder " + filepath.Join(name, f.name) + " cannot be read"
			}
			k, reason := classifyPlugin(p)
			inFolder = true
			if k != plain {
				return foreign, fmt.Sprintf("folder %s: addresses are configured in a file of their own there (%s), which is not supported", name, strings.TrimSpace(f.name+" "+reason))
			}
		}
	}
	switch {
	case len(plugins) == 0 && !inFolder:
		return broken, "no plugins in it"
	case found[byHand]:
		return byHand, ""
	case found[stock] && !found[foreign]:
		return stock, ""
	}
	var types []string
	for _, p := range plugins {
		types = append(types, typeOf(p))
	}
	for _, t := range types { // a plugin that is known says more than one chained to it that is not
		if reason := reasons[t]; reason != "" {
			return foreign, t + ": " + reason
		}
	}
	if found[foreign] {
		return foreign, why
	}
	return foreign, fmt.Sprintf("no plugin of it (%s) gives addresses by host-local", strings.Join(types, ", "))
}

// plain is a plugin that gives no addresses, such as portmap: whatever it is, it stays as it is.
const plain = kind(-1)

func classifyPlugin(p map[string]any) (kind, string) {
	for _, key := range []string{"type", "ipam", "delegate", "capabilities"} {
		if other := foldedKey(p, key); other != "" {
			return foreign, fmt.Sprintf("key %q: expected it to be written %q", other, key)
		}
	}
	t := typeOf(p)
	ipam, isObject := p["ipam"].(map[string]any)
	if p["ipam"] != nil && !isObject {
		return foreign, "ipam: expected an object"
	}
	if other := foldedKey(ipam, "type"); other != "" {
		return foreign, fmt.Sprintf("ipam: key %q: expected it to be written \"type\"", other)
	}
	by, isString := ipam["type"].(string)
	if _, there := ipam["type"]; there && !isString {
		return foreign, "ipam.type: expected a string"
	} else if t == flannelType && !there {
		by = stockIPAM // what it takes by default
	}
	switch {
	case by == "stayput":
		return byHand, ""
	case by == "" || by != stockIPAM && !slices.Contains(callers, t) && t != flannelType && reasons[t] == "":
		return plain, ""
	case by != stockIPAM && reasons[t] != "":
		return foreign, t + ": " + reasons[t]
	case by != stockIPAM:
		return foreign, fmt.Sprintf("%s gives addresses by the IPAM plugin %s, not by host-local", t, by)
	case t == flannelType:
		return classifyFlannel(p)
	case slices.Contains(callers, t):
		return stock, ""
	case reasons[t] != "":
		return foreign, t + ": " + reasons[t]
	}
	return foreign, fmt.Sprintf("the plugin %s is not known; if it runs the IPAM plugin that ipam.type names, write \"stayput\" there by hand", t)
}

// classifyFlannel knows that flannel's plugin makes the IPAM section of the plugin it runs from its own one.
func classifyFlannel(p map[string]any) (kind, string) {
	delegate, isObject := p["delegate"].(map[string]any)
	if p["delegate"] != nil && !isObject {
		return foreign, "delegate: expected an object"
	}
	switch t := delegate["type"].(type) {
	case nil:
	case string:
		if !slices.Contains(callers, t) {
			if reason := reasons[t]; reason != "" {
				return foreign, fmt.Sprintf("delegate: %s: %s", t, reason)
			}
			return foreign, fmt.Sprintf("delegate: the plugin %s is not known", t)
		}
	default:
		return foreign, "delegate.type: expected a string"
	}
	return stock, ""
}

// foldedKey returns a key that encoding/json would take for this one in a struct, as most plugins do.
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

// limits are what the agent adds to the IPAM section; what is zero is left as it is.
type limits struct {
	stateDir         string
	promisedShare    float64
	longestRetention time.Duration
}

// derive is the agent's file for a stock configuration. own is the file as it is now, whose chained plugins stay.
func derive(c conf, l limits, own *ownConf) ([]byte, error) {
	list := clone(c.list).(map[string]any)
	plugins, _ := list["plugins"].([]any)
	types := []any{}
	for _, p := range plugins {
		p := p.(map[string]any)
		types = append(types, typeOf(p))
		if k, _ := classifyPlugin(p); k != stock {
			continue
		}
		ipam, _ := p["ipam"].(map[string]any)
		if ipam == nil {
			ipam = map[string]any{}
		}
		p["ipam"] = ipam
		ipam["type"] = "stayput"
		if l.stateDir != "" && l.stateDir != ledger.DefaultStateDir {
			ipam["stateDir"] = l.stateDir
		}
		if l.promisedShare != 0 {
			ipam["promisedShare"] = json.Number(strconv.FormatFloat(l.promisedShare, 'f', -1, 64))
		}
		if l.longestRetention != 0 {
			ipam["longestRetention"] = l.longestRetention.String()
		}
		capabilities, _ := p["capabilities"].(map[string]any)
		if capabilities == nil {
			capabilities = map[string]any{}
		}
		p["capabilities"] = capabilities
		if _, there := capabilities[annotationsCapability]; !there {
			capabilities[annotationsCapability] = true
		}
	}
	list["plugins"] = append(plugins, own.chained(types)...)
	list[derivedKey] = map[string]any{"from": c.name, "types": types, "note": derivedNote}
	data, err := encode(list)
	if err != nil {
		return nil, err
	}
	if _, err := parseConf(confFile{name: ConflistName, data: data}); err != nil {
		return nil, fmt.Errorf("what is derived from %s does not load: %w", c.name, err)
	}
	return data, nil
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

// ownConf is the file of the agent's name as it is there; nil where there is none.
type ownConf struct {
	conf
	ours bool
	from string
	data []byte
}

// own finds the file of the agent's name.
func (d confDir) own() *ownConf {
	i := slices.IndexFunc(d.files, func(f confFile) bool { return f.name == ConflistName })
	if i < 0 {
		return nil
	}
	o := &ownConf{conf: d.read(d.files[i]), data: d.files[i].data}
	marker, _ := o.list[derivedKey].(map[string]any)
	o.from, o.ours = marker["from"].(string)
	return o
}

// chained are the plugins that another program has put into the file: their types were not in what the file was
// derived from, nor are they in what it is to be derived from now.
func (o *ownConf) chained(types []any) []any {
	if o == nil || !o.ours {
		return nil
	}
	marker, _ := o.list[derivedKey].(map[string]any)
	was, _ := marker["types"].([]any)
	var added []any
	for _, p := range pluginsOf(o.list) {
		var t any = typeOf(p)
		if !slices.Contains(was, t) && !slices.Contains(types, t) {
			added = append(added, p)
		}
	}
	return added
}

// says whether the file already is what it should be: programs that chain a plugin write it in their own way.
func (o *ownConf) says(data []byte) bool {
	if bytes.Equal(o.data, data) {
		return true
	}
	want, err := decode(data)
	if err != nil || o.list == nil {
		return false
	}
	a, errA := encode(o.list)
	b, errB := encode(want)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

// first is the first foreign configuration other than multus', which is a copy of what comes next.
func (d confDir) first() *conf {
	for _, f := range d.files {
		if f.name == ConflistName {
			continue
		}
		c := d.read(f)
		if c.kind == multus || c.kind == broken && strings.HasPrefix(f.name, "00-multus") {
			continue
		}
		return &c
	}
	return nil
}

// bypassed is multus' file where it is the runtime's but for ours, which sorts before it: pods would lose the networks
// that multus gives them.
func (d confDir) bypassed() *conf {
	for _, f := range d.files {
		if f.name == ConflistName {
			continue
		}
		if c := d.read(f); c.kind == multus && c.name > ConflistName {
			return &c
		}
		return nil
	}
	return nil
}

// State is a word for how the node's CNI configuration stands.
type State string

// The states.
const (
	StateActive      State = "active"      // the runtime uses the agent's file
	StateByHand      State = "by-hand"     // stayput stands in somebody else's file
	StateStock       State = "stock"       // host-local, which could be replaced
	StateNone        State = "none"        // no network is configured
	StateUnsupported State = "unsupported" // addresses come from elsewhere: pods start as without stayput
	StateBroken      State = "broken"      // the file that counts cannot be loaded
	StateHeld        State = "held"        // the source is gone; the agent's file stays for a while
	StateMultus      State = "multus"      // multus comes first, and it cannot be seen what it hands on to
	StateShadowed    State = "shadowed"    // the runtime uses another file than the agent's
	StateConflict    State = "conflict"    // somebody else's file has the agent's name, or somebody keeps changing it
	StateNoPlugin    State = "no-plugin"   // the plugin's binary is missing or cannot be run
	StateError       State = "error"       // the directory cannot be read or written
)

var states = []State{
	StateActive, StateByHand, StateStock, StateNone, StateUnsupported, StateBroken, StateHeld, StateMultus, StateShadowed, StateConflict, StateNoPlugin, StateError,
}

// Good says whether addresses are kept in this state, as far as it is known.
func (s State) Good() bool {
	return s == StateActive || s == StateByHand || s == StateMultus || s == StateHeld
}

// Status is how the node's CNI configuration stands.
type Status struct {
	State   State  `json:"state"`
	Message string `json:"message"`
	ConfDir string `json:"confDir"`
	// File is the one that the runtime uses, Network the one that pods are in.
	File    string `json:"file,omitempty"`
	Network string `json:"network,omitempty"`
	// Source is what the agent's file is derived from, where there is one.
	Source string       `json:"source,omitempty"`
	Plugin PluginStatus `json:"plugin"`
}

// status says what the runtime makes of the directory.
func (d confDir) status() Status {
	if len(d.files) == 0 {
		return Status{State: StateNone, Message: "no network is configured"}
	}
	c := d.read(d.files[0])
	s := Status{File: c.name, Network: c.network}
	own := d.own()
	if own != nil && own.ours {
		s.Source = own.from
	}
	say := func(state State, format string, args ...any) Status {
		s.State, s.Message = state, fmt.Sprintf(format, args...)
		return s
	}
	switch {
	case own != nil && !own.ours && own.kind != byHand:
		return say(StateConflict, "%s has not been written by stayput, which leaves it alone: rename or remove it", ConflistName)
	case own != nil && own.ours && c.name == ConflistName && d.bypassed() != nil:
		return say(StateUnsupported, "%s comes before %s, and takes the networks from pods that multus gives them: remove it", ConflistName, d.bypassed().name)
	case own != nil && own.ours && c.name == ConflistName:
		return say(StateActive, "%s, derived from %s", ConflistName, own.from)
	case c.kind == multus:
		return d.throughMultus(s, c, own)
	case own != nil && own.ours && c.kind != byHand:
		return say(StateShadowed, "%s sorts before %s, so that the runtime uses it: rename it", c.name, ConflistName)
	}
	switch c.kind {
	case broken:
		return say(StateBroken, "%s: %s", c.name, c.why)
	case byHand:
		return say(StateByHand, "%s has stayput in it", c.name)
	case stock:
		return say(StateStock, "%s gives addresses by host-local", c.name)
	}
	return say(StateUnsupported, "%s: %s", c.name, c.why)
}

// throughMultus says what is known of the network that multus hands on to. It is never edited.
func (d confDir) throughMultus(s Status, c conf, own *ownConf) Status {
	const again = "multus copies the first configuration when it starts: restart its pod on this node"
	plugin := pluginsOf(c.list)[0]
	delegates, _ := plugin["delegates"].([]any)
	if len(delegates) == 0 {
		s.State = StateMultus
		if network, _ := plugin["clusterNetwork"].(string); strings.Contains(network, "/") {
			return d.throughFile(s, c, filepath.Base(network), own)
		} else if network != "" {
			s.Message = fmt.Sprintf("%s hands on to the cluster network %s; whether that has stayput in it cannot be seen here", c.name, network)
		} else {
			s.Message = fmt.Sprintf("%s does not say what it hands on to; %s after %s was written", c.name, again, ConflistName)
		}
		return s
	}
	first, _ := delegates[0].(map[string]any)
	if _, isList := first["plugins"]; !isList {
		first = map[string]any{"name": first["name"], "plugins": []any{first}}
	}
	s.Network, _ = first["name"].(string)
	k, why := confDir{}.classify(first)
	switch {
	case k == byHand:
		s.State, s.Message = StateActive, fmt.Sprintf("%s hands on to a network with stayput in it", c.name)
	case k == stock && own != nil && own.ours:
		s.State, s.Message = StateShadowed, fmt.Sprintf("%s has a copy of a network with host-local; %s, and it copies %s", c.name, again, ConflistName)
	case k == stock:
		s.State, s.Message = StateStock, fmt.Sprintf("%s has a copy of a network with host-local", c.name)
	default:
		s.State, s.Message = StateUnsupported, fmt.Sprintf("%s: delegates[0]: %s", c.name, why)
	}
	return s
}

// throughFile says what is known of the file that multus' daemon hands on to. It was the first one of the directory
// when the daemon started, and is read at every ADD, by its path in the daemon's container.
func (d confDir) throughFile(s Status, c conf, name string, own *ownConf) Status {
	i := slices.IndexFunc(d.files, func(f confFile) bool { return f.name == name })
	if i < 0 {
		s.State = StateBroken
		s.Message = fmt.Sprintf("%s hands on to %s, which is gone; until multus' pod on this node is restarted no pod can start", c.name, name)
		return s
	}
	to := d.read(d.files[i])
	s.Network = to.network
	switch {
	case to.kind == byHand:
		s.State, s.Message = StateActive, fmt.Sprintf("%s hands on to %s, which has stayput in it", c.name, name)
	case to.kind == stock && own != nil && own.ours:
		s.State, s.Message = StateShadowed, fmt.Sprintf("%s hands on to %s; multus takes the first configuration when it starts: restart its pod on this node, and it takes %s", c.name, name, ConflistName)
	case to.kind == stock:
		s.State, s.Message = StateStock, fmt.Sprintf("%s hands on to %s, which has host-local", c.name, name)
	case to.kind == broken:
		s.State, s.Message = StateBroken, fmt.Sprintf("%s hands on to %s: %s", c.name, name, to.why)
	default:
		s.State, s.Message = StateUnsupported, fmt.Sprintf("%s hands on to %s: %s", c.name, name, to.why)
	}
	return s
}

// plan is what to do about the agent's file. Nothing, where both are zero.
type plan struct {
	write  []byte
	remove bool
	status *Status       // what to say instead of what the directory says
	again  time.Duration // when to look again, though nothing has changed
}

// memory is what the keeper remembers from one look at the directory to the next.
type memory struct {
	known map[string]bool // the files when the source was last there, or that were there at the first look
	gone  time.Duration   // CLOCK_BOOTTIME when the source was first seen to be missing; 0: it is there
}

// sourceHold is how long the agent's file outlives the file that it is derived from. Installers remove a file and
// write it again: a container starts in between, or an image is pulled first. Taking ours away meanwhile would
// let pods start on host-local between the return of theirs and of ours.
const sourceHold = 10 * time.Minute

// decide compares the directory with what should be there. It acts only on what is definite: a file that cannot
// be loaded may be half written, and one that has vanished may come back.
func (d confDir) decide(l limits, m *memory, now time.Duration) plan {
	own, first := d.own(), d.first()
	if own != nil && !own.ours {
		return plan{}
	}
	if c := d.bypassed(); c != nil {
		*m = memory{}
		p := plan{remove: own != nil}
		if d.throughMultus(Status{}, *c, nil).State != StateActive {
			p.status = &Status{State: StateUnsupported, Message: fmt.Sprintf(
				"%s sorts after %s, which would take the networks from pods that multus gives them: rename it to 00-multus.conf, or write \"stayput\" by hand where it hands on to",
				c.name, ConflistName)}
		}
		return p
	}
	if own == nil {
		*m = memory{}
	} else if d.held(own.from, first, m, now) {
		return plan{
			again:  max(sourceHold-(now-m.gone), time.Second),
			status: &Status{State: StateHeld, Message: fmt.Sprintf("%s is gone; %s stays for %s, should it come back; remove %[2]s to end that now", own.from, ConflistName, sourceHold)},
		}
	}
	switch {
	case first == nil || first.kind == byHand || first.kind == foreign:
		if own == nil {
			return plan{}
		}
		return plan{remove: true}
	case first.kind == broken:
		if own == nil {
			return plan{}
		}
		return plan{status: &Status{State: StateBroken, Message: fmt.Sprintf("%s cannot be loaded, %s stays as it is: %s", first.name, ConflistName, first.why)}}
	case first.name < ConflistName:
		// Ours would not be used.
		return plan{remove: own != nil, status: &Status{
			State:   StateShadowed,
			Message: fmt.Sprintf("%s sorts before %s, so that the runtime would use it: rename it to sort later", first.name, ConflistName),
		}}
	}
	data, err := derive(*first, l, own)
	if err != nil {
		return plan{status: &Status{State: StateUnsupported, Message: err.Error()}}
	}
	if own != nil && own.says(data) {
		return plan{}
	}
	return plan{write: data}
}

// held says whether the agent's file is to stay because its source has vanished a short while ago. A file that has
// appeared since is news, and ends it; one that lay there all along is not.
func (d confDir) held(source string, first *conf, m *memory, now time.Duration) bool {
	names := map[string]bool{}
	for _, f := range d.files {
		names[f.name] = true
	}
	if names[source] {
		m.known, m.gone = names, 0
		return false
	}
	if m.known == nil {
		m.known = names
	}
	if m.gone == 0 {
		m.gone = now
	}
	if first != nil && !m.known[first.name] {
		return first.kind == broken // half written
	}
	return now-m.gone < sourceHold
}
