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

// flannel's plugin keeps, for each container, the configuration that it was added with, and ends it with that one
// whatever the conflist says by then: without more, containers from before would go to host-local for ever, and
// after the plugin's removal those of stayput could not be ended.
//
// retypeFlannel changes the IPAM plugin in what flannel remembers; network empty is every one.
func retypeFlannel(d confDir, from, to, network string) error {
	dirs := map[string]bool{}
	for _, f := range d.Files {
		for _, dir := range d.Conf(f).FlannelDirs() {
			dirs[dir] = true
		}
	}
	var errs []error
	for dir := range dirs {
		errs = append(errs, retype(dir, from, to, network))
	}
	return errors.Join(errs...)
}

func retype(dir, from, to, network string) error {
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
			errs = append(errs, ignoreGone(os.Remove(path)))
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			errs = append(errs, ignoreGone(err))
			continue
		}
		if data = netconf.Retype(data, from, to, network); data == nil {
			continue // being written, or another IPAM plugin's
		}
		errs = append(errs, ignoreGone(atomicfile.File{Path: path, Mode: 0o600, MustExist: true}.Write(bytes.NewReader(data))))
	}
	return errors.Join(errs...)
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// RemoveConflist takes the agent's file away, so that the runtime uses the one again that it was derived from. It
// comes first when stayput is removed. A file of that name that is
// not the agent's stays. It may be run again.
func RemoveConflist(confDir string) (removed bool, err error) {
	dir, err := readConfDir(confDir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if _, ours := dir.own(); ours {
		if err := atomicfile.Remove(filepath.Join(confDir, ConflistName)); ignoreGone(err) != nil {
			return false, err
		}
		removed = true
	}
	return removed, errors.Join(atomicfile.Sweep(confDir), retypeFlannel(dir, netconf.Type, netconf.HostLocal, ""))
}

// ErrNotRemoved says that no configuration names the plugin's binary, but that it is not ours or cannot be removed.
var ErrNotRemoved = errors.New("it stays")

// RemovePlugin removes the plugin's binary. It comes last, and does nothing while a configuration names the
// plugin: no pod could start. It may be run again.
func RemovePlugin(confDir, binDir string) (removed bool, err error) {
	dir, err := readConfDir(confDir)
	if ignoreGone(err) != nil {
		return false, err
	}
	for _, f := range dir.Files {
		if dir.Conf(f).Kind == netconf.ByHand {
			return false, fmt.Errorf("%s names the plugin: write host-local there first", filepath.Join(confDir, f.Name))
		}
	}
	if s := dir.status(); s.State == StateActive { // by a copy of the conflist
		return false, fmt.Errorf("%s: restart multus' pod on this node first", s.Message)
	}
	// Once more: an ADD that was under way when the conflist went has left its note since.
	if err := retypeFlannel(dir, netconf.Type, netconf.HostLocal, ""); err != nil {
		return false, err
	}
	if err := ignoreGone(atomicfile.Sweep(binDir)); err != nil {
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
