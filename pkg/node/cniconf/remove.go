package cniconf

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/stayput/stayput/pkg/atomicfile"
	"github.com/stayput/stayput/pkg/netconf"
)

// retypeFlannel changes the IPAM plugin in the notes of flannel's plugin for a network, or for all if network is empty.
//
// That plugin notes the configuration of each container's ADD, and its DEL uses the note, not the conflist of that
// time: the DEL of containers from before stayput would go to host-local forever, and after the removal of Stayput's
// plugin, that of its containers would fail.
func retypeFlannel(d confDir, from, to, network, stateDir string) error {
	dirs := map[string]bool{}
	for _, f := range d.Files {
		for _, dir := range d.Conf(f).FlannelDirs() {
			dirs[dir] = true
		}
	}
	var errs []error
	for dir := range dirs {
		errs = append(errs, retypeFiles(dir,
			func(data []byte) []byte { return Retype(data, from, to, network, stateDir) }))
	}
	return errors.Join(errs...)
}

// retypeCache does the same in the cache of libcni, empty for none. CRI-O's DEL uses the configuration that its ADD
// left there, if there is one; containerd's does not.
func retypeCache(cacheDir, from, to, network, stateDir string) error {
	if cacheDir == "" {
		return nil
	}
	return retypeFiles(filepath.Join(cacheDir, "results"),
		func(data []byte) []byte { return RetypeCached(data, from, to, network, stateDir) })
}

// retypeMultus does the same in the notes of multus, which are beside libcni's cache. Its DEL delegates to what its ADD
// did, as flannel's.
func retypeMultus(d confDir, cacheDir, from, to, network, stateDir string) error {
	if cacheDir == "" {
		return nil
	}
	return retypeFiles(filepath.Join(cacheDir, "multus"),
		func(data []byte) []byte { return RetypeDelegates(data, from, to, network, stateDir, d.first()) })
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
// and changes the notes of flannel and multus, and libcni's cache. removed reports whether there was one; a foreign
// file of that name stays. It is the first step of an uninstallation, and may be repeated.
func RemoveConflist(confDir, cacheDir string) (removed bool, err error) {
	dir, err := readConfDir(confDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if _, ours := dir.own(); ours {
		if err := atomicfile.Remove(filepath.Join(confDir, ConflistName)); ignoreMissing(err) != nil {
			return false, err
		}
		removed = true
	}
	return removed, errors.Join(atomicfile.Sweep(confDir), handBackNotes(dir, cacheDir))
}

// handBackNotes changes the notes of ADDs so that none names the plugin.
func handBackNotes(dir confDir, cacheDir string) error {
	return errors.Join(retypeFlannel(dir, netconf.Type, netconf.HostLocal, "", ""),
		retypeMultus(dir, cacheDir, netconf.Type, netconf.HostLocal, "", ""),
		retypeCache(cacheDir, netconf.Type, netconf.HostLocal, "", ""))
}

// HandBackMultus makes multus delegate to the configuration that it takes the next time it starts, where it has a copy
// of the agent's or, thick, its path. The agent's is gone, so that until then no pod could start, or only with the
// plugin there. It does nothing while the agent's is there. changed reports whether a file was changed.
func HandBackMultus(confDir string) (changed bool, err error) {
	dir, err := readConfDir(confDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil || dir.Find(ConflistName) != nil {
		return false, err
	}
	first := dir.first()
	if first == nil || first.Kind == Broken || first.Kind == ByHand {
		return false, nil
	}
	for _, f := range dir.Files {
		data := dir.Conf(f).Redelegate(ConflistName, first)
		if data == nil {
			continue
		}
		path := filepath.Join(confDir, f.Name)
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
	for _, f := range dir.Files {
		if dir.Conf(f).Kind == ByHand {
			return false, fmt.Errorf("%s uses the plugin: set ipam.type to host-local there first",
				filepath.Join(confDir, f.Name))
		}
	}
	if s := dir.status(); s.State == StateActive { // multus has a copy of the conflist
		return false, fmt.Errorf("%s: restart multus' pod on this node first", s.Message)
	}
	// Again, for the note of an ADD that was under way when the conflist went.
	if err := handBackNotes(dir, cacheDir); err != nil {
		return false, err
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
