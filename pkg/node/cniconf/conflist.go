// Package cniconf keeps the CNI configuration of a node: it installs the plugin's binary, and a configuration list of
// the agent's own that names it in host-local's place. It takes both away again. No other program's file is ever written,
// but for what flannel remembers of its containers.
package cniconf

import (
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/netconf"
)

// ConflistName is the name of the agent's file. The runtime takes the file that sorts first.
const ConflistName = "00-stayput.conflist"

// confDir is the runtime's configuration directory.
type confDir struct{ netconf.Dir }

func readConfDir(path string) (confDir, error) {
	d, err := netconf.ReadDir(path)
	return confDir{d}, err
}

// own returns the file of the agent's name, nil if there is none, and whether the agent wrote it.
func (d confDir) own() (own *netconf.Conf, ours bool) {
	if own = d.Find(ConflistName); own != nil {
		_, ours = own.DerivedFrom()
	}
	return own, ours
}

// first is the first foreign configuration other than multus', which is a copy of what comes next.
func (d confDir) first() *netconf.Conf {
	for _, f := range d.Files {
		if f.Name == ConflistName {
			continue
		}
		c := d.Conf(f)
		if c.Kind == netconf.Multus || c.Kind == netconf.Broken && strings.HasPrefix(f.Name, "00-multus") {
			continue
		}
		return c
	}
	return nil
}

// bypassed is multus' file where it is the runtime's but for ours, which sorts before it: pods would lose the networks
// that multus gives them.
func (d confDir) bypassed() *netconf.Conf {
	for _, f := range d.Files {
		if f.Name == ConflistName {
			continue
		}
		if c := d.Conf(f); c.Kind == netconf.Multus && c.File > ConflistName {
			return c
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
	if len(d.Files) == 0 {
		return Status{State: StateNone, Message: "no network is configured"}
	}
	c := d.Conf(d.Files[0])
	s := Status{File: c.File, Network: c.Network}
	own, ours := d.own()
	if ours {
		s.Source, _ = own.DerivedFrom()
	}
	say := func(state State, format string, args ...any) Status {
		s.State, s.Message = state, fmt.Sprintf(format, args...)
		return s
	}
	switch {
	case own != nil && !ours && own.Kind != netconf.ByHand:
		return say(StateConflict, "%s has not been written by stayput, which leaves it alone: rename or remove it", ConflistName)
	case ours && c.File == ConflistName && d.bypassed() != nil:
		return say(StateUnsupported, "%s comes before %s, and takes the networks from pods that multus gives them: remove it", ConflistName, d.bypassed().File)
	case ours && c.File == ConflistName:
		return say(StateActive, "%s, derived from %s", ConflistName, s.Source)
	case c.Kind == netconf.Multus:
		return d.throughMultus(s, c, ours)
	case ours && c.Kind != netconf.ByHand:
		return say(StateShadowed, "%s sorts before %s, so that the runtime uses it: rename it", c.File, ConflistName)
	}
	switch c.Kind {
	case netconf.Broken:
		return say(StateBroken, "%s: %s", c.File, c.Why)
	case netconf.ByHand:
		return say(StateByHand, "%s has stayput in it", c.File)
	case netconf.Stock:
		return say(StateStock, "%s gives addresses by host-local", c.File)
	}
	return say(StateUnsupported, "%s: %s", c.File, c.Why)
}

// throughMultus says what is known of the network that multus hands on to. It is never edited.
func (d confDir) throughMultus(s Status, c *netconf.Conf, ours bool) Status {
	const again = "multus copies the first configuration when it starts: restart its pod on this node"
	first, network := c.Delegate()
	if first == nil {
		s.State = StateMultus
		if strings.Contains(network, "/") {
			return d.throughFile(s, c, filepath.Base(network), ours)
		} else if network != "" {
			s.Message = fmt.Sprintf("%s hands on to the cluster network %s; whether that has stayput in it cannot be seen here", c.File, network)
		} else {
			s.Message = fmt.Sprintf("%s does not say what it hands on to; %s after %s was written", c.File, again, ConflistName)
		}
		return s
	}
	s.Network = first.Network
	switch {
	case first.Kind == netconf.ByHand:
		s.State, s.Message = StateActive, fmt.Sprintf("%s hands on to a network with stayput in it", c.File)
	case first.Kind == netconf.Stock && ours:
		s.State, s.Message = StateShadowed, fmt.Sprintf("%s has a copy of a network with host-local; %s, and it copies %s", c.File, again, ConflistName)
	case first.Kind == netconf.Stock:
		s.State, s.Message = StateStock, fmt.Sprintf("%s has a copy of a network with host-local", c.File)
	default:
		s.State, s.Message = StateUnsupported, fmt.Sprintf("%s: delegates[0]: %s", c.File, first.Why)
	}
	return s
}

// throughFile says what is known of the file that multus' daemon hands on to. It was the first one of the directory
// when the daemon started, and is read at every ADD, by its path in the daemon's container.
func (d confDir) throughFile(s Status, c *netconf.Conf, name string, ours bool) Status {
	to := d.Find(name)
	if to == nil {
		s.State = StateBroken
		s.Message = fmt.Sprintf("%s hands on to %s, which is gone; until multus' pod on this node is restarted no pod can start", c.File, name)
		return s
	}
	s.Network = to.Network
	switch {
	case to.Kind == netconf.ByHand:
		s.State, s.Message = StateActive, fmt.Sprintf("%s hands on to %s, which has stayput in it", c.File, name)
	case to.Kind == netconf.Stock && ours:
		s.State, s.Message = StateShadowed, fmt.Sprintf("%s hands on to %s; multus takes the first configuration when it starts: restart its pod on this node, and it takes %s", c.File, name, ConflistName)
	case to.Kind == netconf.Stock:
		s.State, s.Message = StateStock, fmt.Sprintf("%s hands on to %s, which has host-local", c.File, name)
	case to.Kind == netconf.Broken:
		s.State, s.Message = StateBroken, fmt.Sprintf("%s hands on to %s: %s", c.File, name, to.Why)
	default:
		s.State, s.Message = StateUnsupported, fmt.Sprintf("%s hands on to %s: %s", c.File, name, to.Why)
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
func (d confDir) decide(l netconf.Limits, m *memory, now time.Duration) plan {
	own, ours := d.own()
	if own != nil && !ours {
		return plan{}
	}
	first := d.first()
	if c := d.bypassed(); c != nil {
		*m = memory{}
		p := plan{remove: own != nil}
		if d.throughMultus(Status{}, c, false).State != StateActive {
			p.status = &Status{State: StateUnsupported, Message: fmt.Sprintf(
				"%s sorts after %s, which would take the networks from pods that multus gives them: rename it to 00-multus.conf, or write \"stayput\" by hand where it hands on to",
				c.File, ConflistName)}
		}
		return p
	}
	if own == nil {
		*m = memory{}
	} else if source, _ := own.DerivedFrom(); d.held(source, first, m, now) {
		return plan{
			again:  max(sourceHold-(now-m.gone), time.Second),
			status: &Status{State: StateHeld, Message: fmt.Sprintf("%s is gone; %s stays for %s, should it come back; remove %[2]s to end that now", source, ConflistName, sourceHold)},
		}
	}
	switch {
	case first == nil || first.Kind == netconf.ByHand || first.Kind == netconf.Foreign:
		if own == nil {
			return plan{}
		}
		return plan{remove: true}
	case first.Kind == netconf.Broken:
		if own == nil {
			return plan{}
		}
		return plan{status: &Status{State: StateBroken, Message: fmt.Sprintf("%s cannot be loaded, %s stays as it is: %s", first.File, ConflistName, first.Why)}}
	case first.File < ConflistName:
		// Ours would not be used.
		return plan{remove: own != nil, status: &Status{
			State:   StateShadowed,
			Message: fmt.Sprintf("%s sorts before %s, so that the runtime would use it: rename it to sort later", first.File, ConflistName),
		}}
	}
	data, err := netconf.Derive(first, l, own)
	if err != nil {
		return plan{status: &Status{State: StateUnsupported, Message: err.Error()}}
	}
	if own != nil && own.Same(data) {
		return plan{}
	}
	return plan{write: data}
}

// held says whether the agent's file is to stay because its source has vanished a short while ago. A file that has
// appeared since is news, and ends it; one that lay there all along is not.
func (d confDir) held(source string, first *netconf.Conf, m *memory, now time.Duration) bool {
	names := map[string]bool{}
	for _, f := range d.Files {
		names[f.Name] = true
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
	if first != nil && !m.known[first.File] {
		return first.Kind == netconf.Broken // half written
	}
	return now-m.gone < sourceHold
}
