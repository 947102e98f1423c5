// Package cniconf keeps the CNI configuration of a node: the plugin's binary, and a configuration list of the agent's
// own that names the plugin in host-local's place. It also removes both. Of other programs' files it changes only the
// notes that flannel's plugin, multus and, where CRI-O goes by them, libcni keep of their containers, and at the end
// the copies of the configuration list that others have made, and its source, if others have chained plugins to it.
package cniconf

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
)

// ConflistName is the name of the agent's file. The runtime takes the file that sorts first.
const ConflistName = "00-stayput.conflist"

// confDir is the runtime's configuration directory.
type confDir struct {
	Dir
	path string
}

func readConfDir(path string) (confDir, error) {
	d, err := ReadDir(path)
	return confDir{d, path}, err
}

// own returns the file of the agent's name, nil if there is none, and whether the agent wrote it.
func (d confDir) own() (own *Conf, ours bool) {
	if own = d.Find(ConflistName); own != nil {
		_, ours = own.DerivedFrom()
	}
	return own, ours
}

// first returns the first foreign configuration other than copies: multus' of the one after it, and those of ours.
func (d confDir) first() *Conf {
	for _, f := range d.Files {
		if f.Name == ConflistName {
			continue
		}
		c := d.Conf(f)
		if c.Kind == Multus || c.marker() != nil || c.Kind == Broken && strings.HasPrefix(f.Name, "00-multus") {
			continue
		}
		return c
	}
	return nil
}

// bypassed returns multus' file if the runtime would use it but for ours, which sorts before it: pods would lose the
// networks that multus attaches. Otherwise it returns nil.
func (d confDir) bypassed() *Conf {
	for _, f := range d.Files {
		if f.Name == ConflistName {
			continue
		}
		if c := d.Conf(f); c.Kind == Multus && c.File > ConflistName {
			return c
		}
		return nil
	}
	return nil
}

// State is the state of a node's CNI configuration, also as a metric's label.
type State string

// The states.
const (
	StateActive      State = "active"      // the runtime uses the agent's file
	StateByHand      State = "by-hand"     // another program's file, or a person's, names stayput
	StateStock       State = "stock"       // host-local, which could be replaced
	StateNone        State = "none"        // no network is configured
	StateUnsupported State = "unsupported" // addresses come from elsewhere: pods start as without stayput
	StateBroken      State = "broken"      // the file that counts cannot be loaded
	StateHeld        State = "held"        // the source is gone; the agent's file stays for a while
	StateMultus      State = "multus"      // multus comes first, and its delegate is not on this node
	StateShadowed    State = "shadowed"    // the runtime uses another file than the agent's
	StateConflict    State = "conflict"    // a foreign file has the agent's name, or another program keeps changing ours
	StateNoPlugin    State = "no-plugin"   // the plugin's binary is missing or cannot be run
	StateError       State = "error"       // the directory cannot be read or written
)

var states = []State{
	StateActive, StateByHand, StateStock, StateNone, StateUnsupported, StateBroken,
	StateHeld, StateMultus, StateShadowed, StateConflict, StateNoPlugin, StateError,
}

// Good reports whether addresses are kept in this state, as far as is known.
func (s State) Good() bool {
	return s == StateActive || s == StateByHand || s == StateMultus || s == StateHeld
}

// Status describes a node's CNI configuration.
type Status struct {
	State   State  `json:"state"`
	Message string `json:"message"`
	ConfDir string `json:"confDir"`
	// File is the file that the runtime uses, and Network the network in it.
	File    string `json:"file,omitempty"`
	Network string `json:"network,omitempty"`
	// Source is the file that the agent's is derived from.
	Source string `json:"source,omitempty"`
	// Problem is what is wrong although addresses are kept.
	Problem string       `json:"problem,omitempty"`
	Plugin  PluginStatus `json:"plugin"`
}

// status returns what the runtime makes of the directory, as far as the files say.
func (d confDir) status() Status {
	if len(d.Files) == 0 {
		return Status{State: StateNone, Message: "no network is configured"}
	}
	c := d.Conf(d.Files[0])
	s := Status{File: c.File, Network: c.Network}
	own, ours := d.own()
	if ours {
		s.Source, _ = own.DerivedFrom()
		if left := own.leftOut(); len(left) > 0 {
			s.Problem = fmt.Sprintf("%s names %s, which the runtime does not have: pods start without it; install it, "+
				"or remove it from that file", s.Source, strings.Join(left, " and "))
		}
	}
	switch {
	case own != nil && own.Kind == Broken: // others write it, too, and not all of them rename
		return s.says(StateBroken, "%s: %s: remove it unless a program is writing it", ConflistName, own.Why)
	case own != nil && !ours && own.Kind != ByHand:
		return s.says(StateConflict, "%s was not written by stayput: rename or remove it", ConflistName)
	case ours && c.File == ConflistName && d.bypassed() != nil:
		return s.says(StateUnsupported, "%s sorts before %s, so pods lose the networks that multus attaches: remove it",
			ConflistName, d.bypassed().File)
	case ours && c.File == ConflistName:
		return s.says(StateActive, "%s, derived from %s%s", ConflistName, s.Source, d.keptNetwork(own))
	case c.marker() != nil:
		return s.says(StateActive, "%s, another program's copy of %s", c.File, ConflistName)
	case c.Kind == Multus:
		return d.throughMultus(s, c, ours)
	case ours && c.Kind != ByHand:
		return s.says(StateShadowed, "%s sorts before %s, so the runtime uses it: rename it", c.File, ConflistName)
	}
	switch c.Kind {
	case Broken:
		return s.says(StateBroken, "%s: %s", c.File, c.Why)
	case ByHand:
		return s.says(StateByHand, "%s uses stayput", c.File)
	case Stock:
		return s.says(StateStock, "%s uses host-local", c.File)
	}
	return s.says(StateUnsupported, "%s: %s", c.File, c.Why)
}

// says returns the status with another state and message.
func (s Status) says(state State, format string, args ...any) Status {
	s.State, s.Message = state, fmt.Sprintf(format, args...)
	return s
}

// throughMultus returns the status of the network that multus delegates to. Its file is not edited before the end:
// see HandBackMultus.
func (d confDir) throughMultus(s Status, c *Conf, ours bool) Status {
	const restart = "multus copies the first configuration when it starts: restart its pod on this node"
	first, network := c.Delegate()
	switch {
	case first != nil:
	case strings.Contains(network, "/"):
		return d.throughFile(s, c, filepath.Base(network), ours)
	case network != "":
		return s.says(StateMultus, "%s delegates to the cluster network %s, which is configured elsewhere", c.File, network)
	default:
		return s.says(StateMultus, "%s does not name its delegate; %s once %s exists",
			c.File, restart, ConflistName)
	}
	s.Network = first.Network
	switch {
	case first.Kind == ByHand:
		return s.says(StateActive, "%s delegates to a network that uses stayput", c.File)
	case first.Kind == Stock && ours:
		return s.says(StateShadowed, "%s contains a copy of a network that uses host-local; %s so that it copies %s",
			c.File, restart, ConflistName)
	case first.Kind == Stock:
		return s.says(StateStock, "%s contains a copy of a network that uses host-local", c.File)
	}
	return s.says(StateUnsupported, "%s: delegates[0]: %s", c.File, first.Why)
}

// throughFile returns the status of the file that multus' daemon delegates to. It was the first of the directory when
// the daemon started, and the daemon reads it at every ADD.
func (d confDir) throughFile(s Status, c *Conf, name string, ours bool) Status {
	to := d.Find(name)
	if to == nil {
		return s.says(StateBroken,
			"%s delegates to %s, which does not exist: no pod can start until multus' pod on this node is restarted",
			c.File, name)
	}
	s.Network = to.Network
	switch {
	case to.Kind == ByHand:
		return s.says(StateActive, "%s delegates to %s, which uses stayput", c.File, name)
	case to.Kind == Stock && ours:
		return s.says(StateShadowed, "%s delegates to %s, the first configuration when multus started: "+
			"restart its pod on this node so that it uses %s", c.File, name, ConflistName)
	case to.Kind == Stock:
		return s.says(StateStock, "%s delegates to %s, which uses host-local", c.File, name)
	case to.Kind == Broken:
		return s.says(StateBroken, "%s delegates to %s: %s", c.File, name, to.Why)
	}
	return s.says(StateUnsupported, "%s delegates to %s: %s", c.File, name, to.Why)
}

// plan is what to do about the agent's file: nothing if it neither writes nor removes.
type plan struct {
	write  []byte
	mode   fs.FileMode // of what is written
	remove bool
	status Status        // instead of the directory's, zero if there is none
	again  time.Duration // when to decide again though nothing has changed
}

// memory is what decide remembers from one time to the next.
type memory struct {
	known []string      // the files when the source was last there, or at first
	gone  time.Duration // CLOCK_BOOTTIME when the source was first found missing, 0 if it is there
}

// sourceHold is how long the agent's file outlives its source. Installers remove a file and write it again, with a
// container's start or an image's download in between. Were ours removed meanwhile, pods would start on host-local
// between the return of theirs and of ours.
const sourceHold = 10 * time.Minute

// decide compares the directory with what should be there. It acts only on what is definite: a broken file may be half
// written, and a file that has vanished may come back.
func (d confDir) decide(l Limits, m *memory, now ledger.Instant) plan {
	own, ours := d.own()
	if own != nil && !ours {
		return plan{}
	}
	first := d.first()
	if c := d.bypassed(); c != nil {
		*m = memory{}
		p := plan{remove: own != nil}
		if d.throughMultus(Status{}, c, false).State != StateActive {
			p.status = Status{}.says(StateUnsupported,
				"%s sorts after %s, so pods would lose the networks that multus attaches: "+
					"rename it to 00-multus.conf, or set ipam.type to stayput in its delegate", c.File, ConflistName)
		}
		return p
	}
	if own == nil {
		*m = memory{}
	} else if d.held(own, first, m, now) {
		return m.hold(own, now)
	}
	switch {
	case first == nil || first.Kind == ByHand || first.Kind == Foreign:
		return plan{remove: own != nil}
	case first.Kind == Broken:
		if own == nil {
			return plan{}
		}
		return plan{status: Status{}.says(StateBroken, "%s cannot be loaded, %s is left unchanged: %s",
			first.File, ConflistName, first.Why)}
	case first.File < ConflistName:
		// Ours would not be used.
		return plan{remove: own != nil, status: Status{}.says(StateShadowed,
			"%s sorts before %s, so the runtime would use it: rename it to sort later", first.File, ConflistName)}
	}
	data, err := Derive(d.withCopies(first), l, own)
	switch {
	case errors.Is(err, ErrPodCIDRs):
		return plan{again: keepSoon, status: Status{}.says(StateStock, "%v", err)}
	case err != nil:
		return plan{status: Status{State: StateUnsupported, Message: err.Error()}}
	}
	// What it has of others' may be a secret, and another program may have made it readable.
	mode := first.mode & 0o644
	switch same := own != nil && own.Same(data); {
	case same && own.mode&^mode == 0:
		return plan{}
	case same:
		data = own.data // in the way of the program that wrote it, which else would write it again
	}
	return plan{write: data, mode: mode}
}

// held reports whether the agent's file stays because its source vanished less than sourceHold ago. A file that has
// appeared since ends that; a file that was there all along does not.
func (d confDir) held(own, first *Conf, m *memory, now ledger.Instant) bool {
	var names []string
	for _, f := range d.Files {
		names = append(names, f.Name)
	}
	if source, _ := own.DerivedFrom(); slices.Contains(names, source) {
		*m = memory{known: names}
		return false
	}
	if m.known == nil {
		m.recall(own, now)
	}
	if m.known == nil {
		m.known = names
	}
	if m.gone == 0 {
		m.gone = now.Boot
	}
	if first != nil && !slices.Contains(m.known, first.File) {
		return first.Kind == Broken // half written
	}
	return now.Boot-m.gone < sourceHold
}

// hold keeps the file although its source is gone. It notes in the file since when, for an agent that is started again:
// not at once, since most sources are back within a second, and each write has the runtime reload. A boot begins anew:
// that is when installers run.
func (m *memory) hold(own *Conf, now ledger.Instant) plan {
	source, _ := own.DerivedFrom()
	p := plan{
		again: max(lasting-(now.Boot-m.gone), time.Second),
		status: Status{}.says(StateHeld, "%s was removed; %s is kept for %s in case it returns; remove %[2]s to stop now",
			source, ConflistName, sourceHold),
	}
	if now.Boot-m.gone < lasting {
		return p
	}
	p.again = max(sourceHold-(now.Boot-m.gone), time.Second)
	list, marker := maps.Clone(own.list), maps.Clone(own.marker())
	marker["gone"] = map[string]any{"since": m.gone.String(), "boot": now.BootID, "files": m.known}
	list[derivedKey] = marker
	if data, err := encode(list); err == nil && !own.Same(data) { // decoded values encode
		p.write, p.mode = data, own.mode
	}
	return p
}

// recall reads what hold noted in this boot.
func (m *memory) recall(own *Conf, now ledger.Instant) {
	gone, _ := own.marker()["gone"].(map[string]any)
	text, _ := gone["since"].(string)
	since, err := time.ParseDuration(text)
	if err != nil || gone["boot"] != now.BootID || since > now.Boot {
		return
	}
	m.gone, m.known = since, []string{}
	files, _ := gone["files"].([]any)
	for _, f := range files {
		name, _ := f.(string)
		m.known = append(m.known, name)
	}
}
