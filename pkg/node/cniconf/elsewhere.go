package cniconf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The directories in which runtimes and distributions have CNI's files. They are looked at to say what there is, and
// never written to.
var (
	KnownConfDirs = []string{
		"/etc/cni/net.d", "/var/lib/rancher/k3s/agent/etc/cni/net.d", "/var/snap/microk8s/current/args/cni-network",
		"/etc/kubernetes/cni/net.d", "/run/multus/cni/net.d",
	}
	KnownBinDirs = []string{
		"/opt/cni/bin", "/var/lib/rancher/k3s/data/cni", "/var/lib/rancher/k3s/data/current/bin",
		"/var/snap/microk8s/current/opt/cni/bin", "/home/kubernetes/bin", "/usr/libexec/cni", "/usr/lib/cni",
		"/var/lib/cni/bin",
	}
)

// elsewhere returns why the directories seem to be the wrong ones, or nothing, where the runtime does not say which it
// has.
func (k *Keeper) elsewhere(dir confDir) (s Status) {
	var r Runtime
	if k.runtime != nil {
		r = *k.runtime
	}
	if len(dir.Files) == 0 && r.ConfDir == "" {
		s = k.otherConfDir()
	}
	// A runtime that does not find the plugin starts no pod. Where it finds the others it finds this one, and it has
	// found it if the agent's file is there.
	if s.State == "" && r.Name == crio && !dir.ours && dir.first.is(Stock) {
		s = k.otherBinDir(dir.first.Types())
	}
	return s
}

// otherConfDir is about a node whose configuration is in a known directory other than this one.
func (k *Keeper) otherConfDir() (s Status) {
	for _, other := range k.others(KnownConfDirs, k.o.ConfDir) {
		if d, err := ReadDir(filepath.Join(k.o.Root, other)); err == nil && len(d.Files) > 0 {
			return s.says(StateError, "no CNI configuration in %s, but one in %s (%s): set --cni-conf-dir to that directory",
				k.o.ConfDir, other, d.Files[0].Name)
		}
	}
	return s
}

// otherBinDir is about a node that has the plugins of its configuration elsewhere.
func (k *Keeper) otherBinDir(types []string) (s Status) {
	if holds(k.o.BinDir, types) {
		return s
	}
	for _, other := range k.others(KnownBinDirs, k.o.BinDir) {
		if holds(filepath.Join(k.o.Root, other), types) {
			return s.says(StateNoPlugin, "%s is not in %s, but in %s: set --cni-bin-dir to that directory",
				strings.Join(types, ", "), k.o.BinDir, other)
		}
	}
	return s.says(StateNoPlugin, "%s is not in %s, so the runtime looks for plugins elsewhere: "+
		"set --cni-bin-dir to one of its plugin_dirs", strings.Join(types, ", "), k.o.BinDir)
}

// others returns the known directories but this one; none if the node's files cannot be seen.
func (k *Keeper) others(known []string, own string) (all []string) {
	if k.o.Root == "" {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(known), func(dir string) bool { return filepath.Clean(own) == dir })
}

// holds reports whether one of these programs is in a directory.
func holds(dir string, programs []string) bool {
	return slices.ContainsFunc(programs, func(name string) bool {
		info, err := os.Lstat(filepath.Join(dir, name)) // a link's target may be out of sight
		return err == nil && !info.IsDir()
	})
}

// openNode opens a directory as the node's processes see it, whatever is mounted into the agent's container. It
// returns fs.ErrNotExist if the node has none, and errHidden if the node's files cannot be seen.
func (k *Keeper) openNode(path string) (*os.File, error) {
	root, err := unix.Open(cmp.Or(k.o.Root, "/"), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", errHidden, cause(err).Error()) // that a file is not there means more
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT,
	})
	switch {
	case err == nil:
		return os.NewFile(uintptr(fd), path), nil
	case errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR):
		return nil, &fs.PathError{Op: "open", Path: path, Err: unix.ENOENT}
	}
	return nil, fmt.Errorf("%w: %s", errHidden, cause(err).Error())
}

var errHidden = errors.New("the node's files cannot be seen")

// isNode reports whether a path of the node is the directory that the agent has at mounted. known is false if either
// cannot be seen.
func (k *Keeper) isNode(path, mounted string) (same, known bool) {
	own, err := os.Stat(mounted)
	if err != nil {
		return false, false
	}
	f, err := k.openNode(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, true
	}
	if err != nil {
		return false, false
	}
	defer f.Close()
	info, err := f.Stat()
	return err == nil && os.SameFile(own, info), err == nil
}

// moved reports whether the directory at a path was replaced since the agent has it mounted: what the agent writes
// there reaches no runtime.
func (k *Keeper) moved(path string) bool {
	same, known := k.isNode(path, path)
	return known && !same
}

// missing returns which plugins the runtime does not have, nil if that is not known. Installers replace programs in
// steps: while a directory has changed only just, what own has counts as there; wait is how long that is.
func (k *Keeper) missing(own *Conf) (missing func(plugin string) bool, wait time.Duration) {
	if k.runtime == nil || len(k.runtime.BinDirs) == 0 {
		return nil, 0
	}
	there := map[string]bool{}
	for _, dir := range k.runtime.BinDirs {
		names, changed, err := k.programs(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, 0
		}
		for _, name := range names {
			there[name] = true
		}
		wait = max(wait, lasting-time.Since(changed))
	}
	if wait > 0 {
		for _, p := range pluginsOf(own.content()) {
			there[typeOf(p)] = true
		}
	}
	return func(plugin string) bool { return !there[plugin] }, wait
}

// programs returns what is in a directory of the node's, and when that has last changed.
func (k *Keeper) programs(dir string) (names []string, changed time.Time, err error) {
	f, err := k.openNode(dir)
	if errors.Is(err, errHidden) && filepath.Clean(dir) == filepath.Clean(k.o.BinDir) {
		f, err = os.Open(dir)
	}
	if err != nil {
		return nil, changed, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, changed, err
	}
	names, err = f.Readdirnames(-1)
	return names, info.ModTime(), err
}
