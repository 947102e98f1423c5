package cniconf

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/netconf"
)

// notes are where programs note the configuration of each container's ADD, for its DEL, which then does not go by the
// conflist of that time: the DEL of containers from before stayput would go to host-local forever, and after the
// removal of Stayput's plugin, that of its containers would fail. A directory is empty if there is none.
type notes struct {
	flannel []string // of flannel's plugin
	multus  string
	results string // of libcni. CRI-O goes by it, containerd does not
	first   *Conf  // see RetypeDelegates
}

// notes returns all of them, with libcni's cache in cacheDir, empty for none.
func (d confDir) notes(cacheDir string) notes {
	n := notes{first: d.first}
	for _, c := range d.all {
		n.flannel = append(n.flannel, c.FlannelDirs()...)
	}
	slices.Sort(n.flannel)
	n.flannel = slices.Compact(n.flannel) // the agent's file has those of its source
	if cacheDir != "" {
		n.multus, n.results = filepath.Join(cacheDir, "multus"), filepath.Join(cacheDir, "results")
	}
	return n
}

// retype changes the IPAM plugin in the notes of a network, or of all if network is empty.
func (n notes) retype(from, to, network, stateDir string) error {
	errs := []error{
		retypeFiles(n.multus, func(data []byte) []byte {
			return RetypeDelegates(data, from, to, network, stateDir, n.first)
		}),
		retypeFiles(n.results, func(data []byte) []byte { return RetypeCached(data, from, to, network, stateDir) }),
	}
	for _, dir := range n.flannel {
		errs = append(errs, retypeFiles(dir, func(data []byte) []byte { return Retype(data, from, to, network, stateDir) }))
	}
	return errors.Join(errs...)
}

// retypeFiles replaces the content of each file of a directory by what change returns for it, unless that is nil.
func retypeFiles(dir string, change func([]byte) []byte) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if !e.Type().IsRegular() {
			continue
		}
		if strings.HasPrefix(e.Name(), atomicfile.TempPrefix) {
			errs = append(errs, ignoreMissing(os.Remove(path)))
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			errs = append(errs, ignoreMissing(err))
			continue
		}
		if data = change(data); data == nil {
			continue // being written, or another IPAM plugin's
		}
		f := atomicfile.File{Path: path, Mode: 0o600, MustExist: true} // a DEL may remove it at any moment
		errs = append(errs, ignoreMissing(f.Write(bytes.NewReader(data))))
	}
	return errors.Join(errs...)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveConflist hands the configuration back: it removes the agent's file, so that the runtime uses its source again,
// and changes the notes of flannel and multus, libcni's cache and other programs' copies of the file. The source gets
// the plugins that others have chained to the agent's file, without which pods would start past a service mesh: not
// every mesh looks for another file once its own is gone. removed reports whether there was a file; a foreign one of
// that name stays. It is the first step of an uninstallation, and may be repeated.
func RemoveConflist(confDir, cacheDir string) (removed bool, err error) {
	dir, err := readConfDir(confDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if dir.ours {
		if err := dir.handBackChained(); err != nil {
			return false, err
		}
		if err := atomicfile.Remove(filepath.Join(confDir, ConflistName)); ignoreMissing(err) != nil {
			return false, err
		}
		removed = true
	}
	return removed, errors.Join(atomicfile.Sweep(confDir), dir.handBackNotes(cacheDir))
}

// handBackChained makes the plugins of the source, other than those with stayput, what they are in the agent's file.
func (d confDir) handBackChained() error {
	source := d.first
	if !source.is(Stock) {
		return nil
	}
	left := d.own.leftOut()
	plugins, _ := merged(source, d.own, func(plugin string) bool { return slices.Contains(left, plugin) })
	if reflect.DeepEqual(plugins, pluginsOf(source.list)) {
		return nil
	}
	list := maps.Clone(source.list)
	list["plugins"] = plugins
	data, err := encode(list)
	if err != nil {
		return err
	}
	from := filepath.Join(d.path, source.File)
	// A list has a name of its own. Meshes do that, too.
	to := strings.TrimSuffix(from, filepath.Ext(from)) + ".conflist"
	if to != from && d.Find(filepath.Base(to)) != nil {
		return fmt.Errorf("%s has no place for the plugins that are chained to %s, since there is %s: remove one of the two",
			from, ConflistName, filepath.Base(to))
	}
	f := atomicfile.File{Path: to, Mode: source.mode, MustExist: to == from}
	if err := ignoreMissing(f.Write(bytes.NewReader(data))); err != nil || to == from {
		return err
	}
	return ignoreMissing(atomicfile.Remove(from))
}

// handBackNotes changes the notes of ADDs, and copies of the agent's file, so that none names the plugin.
func (d confDir) handBackNotes(cacheDir string) error {
	errs := []error{d.notes(cacheDir).retype(netconf.Type, netconf.HostLocal, "", "")}
	for _, c := range d.copies() {
		list := clone(c.list).(map[string]any)
		retype(list, netconf.Type, netconf.HostLocal, "")
		delete(list, derivedKey)
		data, err := encode(list)
		if err == nil {
			f := atomicfile.File{Path: filepath.Join(d.path, c.File), Mode: c.mode, MustExist: true}
			err = ignoreMissing(f.Write(bytes.NewReader(data)))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// HandBackMultus makes multus delegate to the configuration that it takes the next time it starts, where it has a copy
// of the agent's or, thick, its path. The agent's is gone, so that until then no pod could start, or only with the
// plugin there. It does nothing while the agent's is there. changed reports whether a file was changed.
func HandBackMultus(confDir string) (changed bool, err error) {
	dir, err := readConfDir(confDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil || dir.own != nil {
		return false, err
	}
	if !dir.first.is(Stock, Foreign) {
		return false, nil
	}
	for _, c := range dir.all {
		data := c.Redelegate(ConflistName, dir.first)
		if data == nil {
			continue
		}
		path := filepath.Join(confDir, c.File)
		info, err := os.Stat(path)
		if err == nil {
			err = (atomicfile.File{Path: path, Mode: info.Mode().Perm(), MustExist: true}).Write(bytes.NewReader(data))
		}
		if ignoreMissing(err) != nil {
			return changed, err
		}
		changed = changed || err == nil
	}
	return changed, nil
}

// ErrNotRemoved says that no configuration names the plugin's binary, but that it is not ours or cannot be removed.
var ErrNotRemoved = errors.New("not removed")

// RemovePlugin removes the plugin's binary, unless a configuration names the plugin: no pod could start then. removed
// reports whether there was one; a binary that stays is ErrNotRemoved. It is the last step of an uninstallation, and
// may be repeated.
func RemovePlugin(confDir, binDir, cacheDir string) (removed bool, err error) {
	dir, err := readConfDir(confDir)
	if ignoreMissing(err) != nil {
		return false, err
	}
	// Again, for the note of an ADD that was under way when the conflist went.
	if err := dir.handBackNotes(cacheDir); err != nil {
		return false, err
	}
	if dir, err = readConfDir(confDir); ignoreMissing(err) != nil {
		return false, err
	}
	if i := slices.IndexFunc(dir.all, func(c *Conf) bool { return c.Kind == ByHand }); i >= 0 {
		return false, fmt.Errorf("%s uses the plugin: set ipam.type to host-local there first",
			filepath.Join(confDir, dir.all[i].File))
	}
	if s := dir.status(); s.State == StateActive { // multus has a copy of the conflist
		return false, fmt.Errorf("%s: restart multus' pod on this node first", s.Message)
	}
	if err := ignoreMissing(atomicfile.Sweep(binDir)); err != nil {
		return false, err
	}
	s := inspectPlugin(binDir)
	if !s.Installed {
		if _, err := os.Lstat(s.Path); errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, fmt.Errorf("%s: %s: %w", s.Path, s.Problem, ErrNotRemoved)
	}
	if err := atomicfile.Remove(s.Path); err != nil {
		return false, fmt.Errorf("%w: %w", ErrNotRemoved, err)
	}
	return true, nil
}
