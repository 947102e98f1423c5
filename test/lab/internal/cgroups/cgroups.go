// Package cgroups removes the cgroups of a node, in every hierarchy of cgroup v1 or in the one of v2.
// It serves both the lab and a node's pid 1, and therefore uses the standard library only.
package cgroups

import (
	"bufio"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

const root = "/sys/fs/cgroup"

// Match returns the top-level cgroups whose name matches the pattern, one path per hierarchy.
func Match(pattern string) []string {
	// In v1 every hierarchy is a directory below root, in v2 root is the hierarchy.
	var found []string
	for _, glob := range []string{filepath.Join(root, pattern), filepath.Join(root, "*", pattern)} {
		paths, _ := filepath.Glob(glob) // the pattern is a constant of ours
		found = append(found, paths...)
	}
	return found
}

// Make makes the cgroup /name in every hierarchy, as usable as its parent.
func Make(name string) error {
	tops := []string{root}
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil { // v1
		entries, err := os.ReadDir(root)
		if err != nil {
			return err
		}
		tops = nil
		for _, e := range entries {
			// A symbolic link is another name of a hierarchy.
			if e.IsDir() {
				tops = append(tops, filepath.Join(root, e.Name()))
			}
		}
	}
	for _, top := range tops {
		if err := os.Mkdir(filepath.Join(top, name), 0o755); err != nil && !os.IsExist(err) {
			return err
		}
		// In v1 a new cpuset is empty and takes no process.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(top, file))
			if err != nil {
				continue // another hierarchy
			}
			if err := os.WriteFile(filepath.Join(top, name, file), value, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// Procs returns the processes in the cgroup /name and below, as pids of the reader's pid namespace.
func Procs(name string) []int {
	seen := map[int]bool{}
	var pids []int
	for _, top := range Match(name) {
		_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || d.Name() != "cgroup.procs" {
				return nil // a cgroup may go away while it is looked at
			}
			f, err := os.Open(path)
			if err != nil {
				return nil
			}
			defer f.Close()
			for sc := bufio.NewScanner(f); sc.Scan(); {
				// 0 is a process that the reader's pid namespace does not see.
				if pid, err := strconv.Atoi(sc.Text()); err == nil && pid > 0 && !seen[pid] {
					seen[pid] = true
					pids = append(pids, pid)
				}
			}
			return nil
		})
	}
	return pids
}

// Remove removes the cgroup /name and all below it. The kernel lets go of a dead process's cgroup a moment
// after the process is gone, so Remove tries for up to the given time.
func Remove(name string, patience time.Duration) error {
	var err error
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err = nil
		for _, top := range Match(name) {
			if e := removeTree(top); e != nil {
				err = e
			}
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// removeTree removes directories only, children first: the files in a cgroup cannot be unlinked and go with it.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}
