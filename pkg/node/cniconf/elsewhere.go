package cniconf

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
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
		for _, other := range k.others(KnownConfDirs, k.o.ConfDir) {
			if d, err := ReadDir(filepath.Join(k.o.Root, other)); err == nil && len(d.Files) > 0 {
				return s.says(StateError, "no CNI configuration in %s, but one in %s (%s): set --cni-conf-dir to that directory",
					k.o.ConfDir, other, d.Files[0].Name)
			}
		}
	}
	// A runtime that does not find the plugin starts no pod. Where it finds the others it finds this one, and it has
	// found it if the agent's file is there.
	first := dir.first()
	if _, ours := dir.own(); r.Name != crio || ours || first == nil || first.Kind != Stock {
		return s
	}
	types := first.Types()
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
