package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
)

// view is one look at every network namespace of the machine: those with a process or a thread in them, and
// those mounted under a name, as we and as the runtime see the mounts. It is taken only when something is
// about to be freed, and it is whole or an error: freeing on half a view could double an address.
type view struct {
	spaces map[nsID]*space
	// roots are where a path is looked up: our own root and the runtime's.
	roots []string
	probe ledger.NetnsProber
}

type nsID struct{ dev, ino uint64 }

type space struct {
	file    *os.File
	process int    // a pid in it; 0: none
	path    string // where it was found
	addrs   map[netip.Addr]bool
}

func idOf(ns ledger.Netns) nsID { return nsID{ns.Dev, ns.Ino} }

// look takes a view. runtimePID is a process that shares the runtime's namespaces: that it shows in our /proc
// is what proves that the pods' processes would.
func look(ctx context.Context, probe ledger.NetnsProber, dirs []string, runtimePID int) (*view, error) {
	if runtimePID <= 0 {
		return nil, errors.New("the runtime's process is not visible: the agent needs the host's PID namespace")
	}
	root := fmt.Sprintf("/proc/%d/root", runtimePID)
	if _, err := os.Stat(root + "/"); err != nil {
		return nil, fmt.Errorf("the runtime's view of the file system: %w", err)
	}
	v := &view{spaces: map[nsID]*space{}, roots: []string{"", root}, probe: probe}
	if err := v.take(ctx, dirs); err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}

func (v *view) take(ctx context.Context, dirs []string) error {
	if err := v.addProcesses(ctx); err != nil {
		return err
	}
	for _, dir := range dirs {
		for _, path := range v.places(dir) {
			if err := v.addMounted(path); err != nil {
				return err
			}
		}
	}
	for _, s := range v.spaces {
		if err := ctx.Err(); err != nil {
			return err
		}
		addrs, err := addrsIn(s.file)
		if err != nil {
			return fmt.Errorf("network namespace %s: %w", s.path, err)
		}
		s.addrs = map[netip.Addr]bool{}
		for _, a := range addrs {
			s.addrs[addrOf(a)] = true
		}
	}
	return nil
}

func (v *view) close() {
	for _, s := range v.spaces {
		s.file.Close()
	}
}

// addProcesses adds the namespace of every thread. A process that ends meanwhile is no error.
func (v *view) addProcesses(ctx context.Context) error {
	pids, err := numbers("/proc")
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return err
		}
		tids, err := numbers(fmt.Sprintf("/proc/%d/task", pid))
		if ended(err) {
			continue
		} else if err != nil {
			return err
		}
		for _, tid := range tids {
			if err := v.addThread(pid, fmt.Sprintf("/proc/%d/task/%d/ns/net", pid, tid)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (v *view) addThread(pid int, path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); ended(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if s := v.spaces[nsID{st.Dev, st.Ino}]; s != nil {
		s.process = pid
		return nil
	}
	f, err := os.Open(path)
	if ended(err) {
		return nil
	} else if err != nil {
		return err
	}
	return v.add(f, path, pid)
}

// addMounted adds the namespaces that are mounted on the files of a directory.
func (v *view) addMounted(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		ns, ok, err := v.probe.Identify(path)
		if err != nil {
			return err
		}
		if !ok || v.spaces[idOf(ns)] != nil {
			continue
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		if err := v.add(f, path, 0); err != nil {
			return err
		}
	}
	return nil
}

func (v *view) add(f *os.File, path string, pid int) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return fmt.Errorf("fstat %s: %w", path, err)
	}
	id := nsID{st.Dev, st.Ino}
	if s := v.spaces[id]; s != nil { // it moved between stat and open
		f.Close()
		s.process = max(s.process, pid)
		return nil
	}
	v.spaces[id] = &space{file: f, process: pid, path: path}
	return nil
}

// ended says that an error of /proc means that the process or thread is no more.
func ended(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}

func numbers(dir string) ([]int, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	var out []int
	for _, n := range names {
		if i, err := strconv.Atoi(n); err == nil {
			out = append(out, i)
		}
	}
	return out, err
}

// places are where a path is looked up. /var/run is commonly an absolute link to /run, which below the
// runtime's root would lead back to ours.
func (v *view) places(path string) []string {
	var all []string
	for _, root := range v.roots {
		all = append(all, root+path)
		if rest, ok := strings.CutPrefix(path, "/var/run/"); ok && root != "" {
			all = append(all, root+"/run/"+rest)
		}
	}
	return all
}

// find says whether the recorded namespace still exists, for us or for the runtime.
func (v *view) find(ns ledger.Netns) (id nsID, there bool, err error) {
	for _, path := range v.places(ns.Path) {
		if id, there, err := findAt(v.probe, path, ns); there || err != nil {
			return id, there, err
		}
	}
	return nsID{}, false, nil
}

// findAt says whether the recorded namespace is at a path.
func findAt(probe ledger.NetnsProber, path string, ns ledger.Netns) (id nsID, there bool, err error) {
	cur, ok, err := probe.Identify(path)
	if err != nil || !ok || ns.Ino != 0 && idOf(cur) != idOf(ns) {
		return nsID{}, false, err
	}
	return idOf(cur), true, nil
}

// user is a namespace other than own in which the address is configured; nil if there is none.
func (v *view) user(a netip.Addr, own nsID) *space {
	for id, s := range v.spaces {
		if id != own && s.addrs[a] {
			return s
		}
	}
	return nil
}
