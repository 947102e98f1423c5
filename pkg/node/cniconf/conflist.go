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

// confDir is the runtime's configuration directory, with each of its files classified once.
type confDir struct {
	Dir
	path string
	all  []*Conf // sorted by name

	own  *Conf // the file of the agent's name, nil if there is none
	ours bool  // the agent wrote it
	// first is the first foreign configuration other than copies: multus' of the one after it, and those of ours.
	first *Conf
	// bypassed is multus' file if the runtime would use it but for ours, which sorts before it: pods would lose the
	// networks that multus attaches. Otherwise it is nil.
	bypassed *Conf
}

func readConfDir(path string) (confDir, error) {
	d, err := ReadDir(path)
	return newConfDir(d, path), err
}

func newConfDir(files Dir, path string) confDir {
	d := confDir{Dir: files, path: path}
	var others []*Conf
	for _, f := range files.Files {
		c := files.Conf(f)
		d.all = append(d.all, c)
		if f.Name != ConflistName {
			others = append(others, c)
			continue
		}
		_, d.ours = c.DerivedFrom()
		d.own = c
	}
	if len(others) > 0 && others[0].Kind == Multus && others[0].File > ConflistName {
		d.bypassed = others[0]
	}
	if i := slices.IndexFunc(others, (*Conf).original); i >= 0 {
		d.first = others[i]
	}
	return d
}

// original reports whether the configuration is no copy of another one.
func (c *Conf) original() bool {
	return c.Kind != Multus && c.marker() == nil && (c.Kind != Broken || !strings.HasPrefix(c.File, "00-multus"))
}

// is reports whether there is such a configuration and it is of one of these kinds.
func (c *Conf) is(kinds ...Kind) bool { return c != nil && slices.Contains(kinds, c.Kind) }

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
	if len(d.all) == 0 {
		return Status{State: StateNone, Message: "no network is configured"}
	}
	c := d.all[0]
	s := d.withSource(Status{File: c.File, Network: c.Network})
	if d.own.is(Broken) { // others write it, too, and not all of them rename
		return s.says(StateBroken, "%s: %s: remove it unless a program is writing it", ConflistName, d.own.Why)
	}
	if !d.ours && d.own.is(Stock, Multus, Foreign) {
		return s.says(StateConflict, "%s was not written by stayput: rename or remove it", ConflistName)
	}
	return d.firstStatus(s, c)
}

// firstStatus is the status of the file that the runtime uses.
func (d confDir) firstStatus(s Status, c *Conf) Status {
	switch {
	case d.ours && c == d.own:
		return d.ownStatus(s)
	case c.marker() != nil:
		return s.says(StateActive, "%s, another program's copy of %s", c.File, ConflistName)
	case c.Kind == Multus:
		return d.throughMultus(s, c, d.ours)
	case d.ours && c.Kind != ByHand:
		return s.says(StateShadowed, "%s sorts before %s, so the runtime uses it: rename it", c.File, ConflistName)
	}
	return s.ofKind(c)
}

// withSource adds what the agent's file is derived from, and what it leaves out of that.
func (d confDir) withSource(s Status) Status {
	if !d.ours {
		return s
	}
	s.Source, _ = d.own.DerivedFrom()
	if left := d.own.leftOut(); len(left) > 0 {
		s.Problem = fmt.Sprintf("%s names %s, which the runtime does not have: pods start without it; install it, "+
			"or remove it from that file", s.Source, strings.Join(left, " and "))
	}
	return s
}

// ownStatus is the status of the agent's file, which the runtime uses.
func (d confDir) ownStatus(s Status) Status {
	if d.bypassed != nil {
		return s.says(StateUnsupported, "%s sorts before %s, so pods lose the networks that multus attaches: remove it",
			ConflistName, d.bypassed.File)
	}
	return s.says(StateActive, "%s, derived from %s%s", ConflistName, s.Source, d.keptNetwork())
}

// ofKind is the status of another file that the runtime uses.
func (s Status) ofKind(c *Conf) Status {
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

// throughMultus returns the status of the network that multus delegates to: a copy of it, or its file, which was the
// first of the directory when multus' daemon started, and which that reads at every ADD. Multus' file is not edited
// before the end: see HandBackMultus.
func (d confDir) throughMultus(s Status, c *Conf, ours bool) Status {
	to, network := c.Delegate()
	what := c.File + " delegates to a copy of a network"
	switch {
	case to != nil:
	case strings.Contains(network, "/"):
		what = c.File + " delegates to " + filepath.Base(network)
		if to = d.Find(filepath.Base(network)); to == nil {
			return s.says(StateBroken, "%s, which does not exist: no pod can start until multus' pod on this node is restarted",
				what)
		}
	case network != "":
		return s.says(StateMultus, "%s delegates to the cluster network %s, which is configured elsewhere", c.File, network)
	default:
		return s.says(StateMultus, "%s does not name its delegate; multus copies the first configuration when it starts: "+
			"restart its pod on this node once %s exists", c.File, ConflistName)
	}
	s.Network = to.Network
	return s.delegated(what, to.Kind, to.Why, ours)
}

// delegated returns the status with a network of a kind that multus delegates to.
func (s Status) delegated(what string, kind Kind, why string, ours bool) Status {
	switch {
	case kind == ByHand:
		return s.says(StateActive, "%s, which uses stayput", what)
	case kind == Stock && ours:
		return s.says(StateShadowed, "%s, the first configuration when multus started, which uses host-local: "+
			"restart its pod on this node so that it uses %s", what, ConflistName)
	case kind == Stock:
		return s.says(StateStock, "%s, which uses host-local", what)
	case kind == Broken:
		return s.says(StateBroken, "%s: %s", what, why)
	}
	return s.says(StateUnsupported, "%s: %s", what, why)
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
	switch {
	case d.own != nil && !d.ours:
		return plan{}
	case d.bypassed != nil:
		*m = memory{}
		return d.behindMultus()
	case d.own == nil:
		*m = memory{}
	case d.held(m, now):
		return m.hold(d.own, now)
	}
	return d.follow(l)
}

// follow has the agent's file follow its source.
func (d confDir) follow(l Limits) plan {
	switch first := d.first; {
	case !first.is(Stock, Broken):
		return plan{remove: d.own != nil}
	case first.Kind == Broken && d.own != nil:
		return plan{status: Status{}.says(StateBroken, "%s cannot be loaded, %s is left unchanged: %s",
			first.File, ConflistName, first.Why)}
	case first.Kind == Broken:
		return plan{}
	case first.File < ConflistName: // ours would not be used
		return plan{remove: d.own != nil, status: Status{}.says(StateShadowed,
			"%s sorts before %s, so the runtime would use it: rename it to sort later", first.File, ConflistName)}
	}
	return d.derive(l)
}

// behindMultus takes the agent's file away, which multus' would be used but for.
func (d confDir) behindMultus() plan {
	p := plan{remove: d.own != nil}
	if d.throughMultus(Status{}, d.bypassed, false).State != StateActive {
		p.status = Status{}.says(StateUnsupported,
			"%s sorts after %s, so pods would lose the networks that multus attaches: "+
				"rename it to 00-multus.conf, or set ipam.type to stayput in its delegate", d.bypassed.File, ConflistName)
	}
	return p
}

// derive writes the agent's file if it is not what its source makes it.
func (d confDir) derive(l Limits) plan {
	data, err := Derive(d.withCopies(d.first), l, d.own)
	switch {
	case errors.Is(err, ErrPodCIDRs):
		return plan{again: keepSoon, status: Status{}.says(StateStock, "%v", err)}
	case err != nil:
		return plan{status: Status{State: StateUnsupported, Message: err.Error()}}
	}
	// What it has of others' may be a secret, and another program may have made it readable.
	mode := d.first.mode & 0o644
	switch same := d.own != nil && d.own.Same(data); {
	case same && d.own.mode&^mode == 0:
		return plan{}
	case same:
		data = d.own.data // in the way of the program that wrote it, which else would write it again
	}
	return plan{write: data, mode: mode}
}

// held reports whether the agent's file stays because its source vanished less than sourceHold ago. A file that has
// appeared since ends that; a file that was there all along does not.
func (d confDir) held(m *memory, now ledger.Instant) bool {
	var names []string
	for _, c := range d.all {
		names = append(names, c.File)
	}
	if source, _ := d.own.DerivedFrom(); slices.Contains(names, source) {
		*m = memory{known: names}
		return false
	}
	if m.known == nil {
		m.recall(d.own, now)
	}
	if m.known == nil {
		m.known = names
	}
	if m.gone == 0 {
		m.gone = now.Boot
	}
	if d.first != nil && !slices.Contains(m.known, d.first.File) {
		return d.first.Kind == Broken // half written
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
