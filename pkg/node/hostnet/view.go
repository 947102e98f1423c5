package hostnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
)

// View is every network namespace of the machine at one time: those with a process or a thread in them, and those
// mounted under a name, as we and as the runtime see the mounts. It is taken only when something is about to be
// freed, and it is whole or an error: freeing on half a view could double an address.
type View struct {
	spaces map[nsID]*Space
	// dirs are where namespaces are mounted by name.
	dirs []string
	// roots are the root directories in which a path is sought: our own and the runtime's.
	roots []string
}

var errInvisible = errors.New("the runtime's process is not visible: the agent needs the host's PID namespace")

type nsID struct{ dev, ino uint64 }

// Space is one network namespace of a View.
type Space struct {
	Path    string // at which it was found
	Process int    // a PID in it; 0: none

	id    nsID
	file  *os.File
	addrs map[netip.Addr]bool
}

func idOf(ns ledger.Netns) nsID { return nsID{ns.Dev, ns.Ino} }

// Observe takes a view, to be closed. dirs are where namespaces are mounted by name. runtimePID is a process that
// shares the runtime's namespaces: that it shows in our /proc proves that the pods' processes would.
func Observe(ctx context.Context, dirs []string, runtimePID int) (*View, error) {
	return observe(ctx, dirs, runtimePID, true)
}

// ObserveMounted takes a view of the namespaces that are mounted by name alone: those of pods. It costs little, and
// says nothing of a namespace that only processes keep.
func ObserveMounted(ctx context.Context, dirs []string, runtimePID int) (*View, error) {
	return observe(ctx, dirs, runtimePID, false)
}

func observe(ctx context.Context, dirs []string, runtimePID int, processes bool) (*View, error) {
	if runtimePID <= 0 {
		return nil, errInvisible
	}
	root := fmt.Sprintf("/proc/%d/root", runtimePID)
	if _, err := os.Stat(root + "/"); err != nil {
		return nil, fmt.Errorf("the runtime's view of the file system: %w", err)
	}
	v := &View{spaces: map[nsID]*Space{}, dirs: dirs, roots: []string{"", root}}
	if err := v.take(ctx, processes); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

func (v *View) take(ctx context.Context, processes bool) error {
	if processes {
		if err := v.addProcesses(ctx); err != nil {
			return err
		}
	}
	for _, dir := range v.dirs {
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
			return fmt.Errorf("network namespace %s: %w", s.Path, err)
		}
		s.addrs = map[netip.Addr]bool{}
		for _, a := range addrs {
			s.addrs[addrOf(a)] = true
		}
	}
	return nil
}

// Close closes the namespaces. What they were like can still be asked.
func (v *View) Close() {
	for _, s := range v.spaces {
		s.file.Close()
	}
}

// addProcesses adds the namespace of every thread. A process that ends meanwhile is no error.
func (v *View) addProcesses(ctx context.Context) error {
	pids, err := numbers("/proc")
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return err
		}
		tids, err := numbers(fmt.Sprintf("/proc/%d/task", pid))
		if isNoProcess(err) {
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

func (v *View) addThread(pid int, path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); isNoProcess(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if s := v.spaces[nsID{st.Dev, st.Ino}]; s != nil {
		s.Process = pid
		return nil
	}
	f, err := os.Open(path)
	if isNoProcess(err) {
		return nil
	} else if err != nil {
		return err
	}
	return v.add(f, path, pid)
}

// addMounted adds the namespaces that are mounted on the files of a directory.
func (v *View) addMounted(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		ns, ok, err := ledger.SystemNetns{}.Identify(path)
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

func (v *View) add(f *os.File, path string, pid int) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return fmt.Errorf("fstat %s: %w", path, err)
	}
	id := nsID{st.Dev, st.Ino}
	if s := v.spaces[id]; s != nil { // it moved between stat and open
		f.Close()
		s.Process = max(s.Process, pid)
		return nil
	}
	v.spaces[id] = &Space{Path: path, Process: pid, id: id, file: f}
	return nil
}

// isNoProcess reports whether an error of /proc means that the process or thread has ended.
func isNoProcess(err error) bool {
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

// places returns the paths at which path is sought. /var/run is commonly an absolute link to /run, which below the
// runtime's root would lead back to ours.
func (v *View) places(path string) []string {
	var all []string
	for _, root := range v.roots {
		all = append(all, root+path)
		if rest, ok := strings.CutPrefix(path, "/var/run/"); ok && root != "" {
			all = append(all, root+"/run/"+rest)
		}
	}
	return all
}

// Find returns the recorded namespace, as we or the runtime see it; nil if it is gone. One that appeared after the
// view was taken is an error.
func (v *View) Find(ns ledger.Netns) (*Space, error) {
	for _, path := range v.places(ns.Path) {
		id, there, err := at(path, ns)
		if err != nil {
			return nil, err
		}
		if !there {
			continue
		}
		if s := v.spaces[id]; s != nil {
			return s, nil
		}
		return nil, fmt.Errorf("network namespace %s appeared after the node was observed", ns.Path)
	}
	return nil, nil
}

// Sees reports whether the namespace that is at the recorded path now is in the view.
func (v *View) Sees(ns ledger.Netns) (bool, error) {
	cur, ok, err := ledger.SystemNetns{}.Identify(ns.Path)
	return err == nil && ok && v.spaces[idOf(cur)] != nil, err
}

// Has reports whether the recorded namespace is in the view.
func (v *View) Has(ns ledger.Netns) bool { return v.spaces[idOf(ns)] != nil }

// Lives reports whether the recorded namespace is still at its path, as we or the runtime see it.
func Lives(ns ledger.Netns, runtimePID int) (bool, error) {
	if runtimePID <= 0 {
		return false, errInvisible
	}
	v := &View{roots: []string{"", fmt.Sprintf("/proc/%d/root", runtimePID)}}
	for _, path := range v.places(ns.Path) {
		if _, there, err := at(path, ns); err != nil || there {
			return there, err
		}
	}
	return false, nil
}

// Exists reports whether the recorded namespace is still at its path.
func Exists(ns ledger.Netns) (bool, error) {
	_, there, err := at(ns.Path, ns)
	return there, err
}

// at reports whether the recorded namespace is at path. One recorded without an inode is any that is there.
func at(path string, ns ledger.Netns) (id nsID, there bool, err error) {
	cur, ok, err := ledger.SystemNetns{}.Identify(path)
	if err != nil || !ok || ns.Ino != 0 && idOf(cur) != idOf(ns) {
		return nsID{}, false, err
	}
	return idOf(cur), true, nil
}

// User returns a namespace other than own in which the address is configured; nil if there is none.
func (v *View) User(a netip.Addr, own *Space) *Space {
	for _, s := range v.spaces {
		if s != own && s.addrs[a] {
			return s
		}
	}
	return nil
}

// Users returns every namespace in which the address is configured.
func (v *View) Users(a netip.Addr) (all []*Space) {
	for _, s := range v.spaces {
		if s.addrs[a] {
			all = append(all, s)
		}
	}
	return all
}

// Remove ends a namespace that only a mount keeps. The unlink ends the mounts on it in every other mount namespace,
// so that it does not matter whether ours propagates. In ours no mount may be left on it: in a pod the one directory
// of the node is mounted twice, at /run/netns and at /var/run/netns.
func (v *View) Remove(s *Space, ns ledger.Netns) error {
	i := slices.IndexFunc(v.dirs, func(d string) bool { return strings.HasPrefix(ns.Path, d+"/") })
	if i < 0 {
		return fmt.Errorf("its leftover network namespace %s is not in %v: remove it by hand", ns.Path, v.dirs)
	}
	name := strings.TrimPrefix(ns.Path, v.dirs[i])
	for _, dir := range v.dirs {
		path := dir + name
		is, ok, err := ledger.SystemNetns{}.Identify(path)
		if err != nil {
			return err
		}
		if !ok || idOf(is) != idOf(ns) && path != ns.Path {
			continue
		}
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
	}
	if err := os.Remove(ns.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, path := range v.places(ns.Path) {
		if _, there, err := at(path, ns); err != nil || there {
			return errors.Join(err, fmt.Errorf("its leftover network namespace %s is still there", ns.Path))
		}
	}
	s.file.Close() // or it would still answer for its addresses
	return nil
}
