package hostnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
)

// View is every network namespace of the machine at one time: those with a process or a thread in them, those that a
// process has open, and those mounted under a name, as we and as the runtime see the mounts. It is taken only when
// something is about to be freed. It has all of them or is an error: freeing on half a view could double an address.
// A namespace whose addresses cannot be listed is in it, with the reason: it may have any address.
//
// A namespace that belongs to a user namespace other than ours, and that no mount keeps, was made by a process for
// itself, as every user may: it is no pod's, unless it is one that the question names. What is configured there is not
// looked at.
//
// Not in it is a namespace that only a socket keeps, a file descriptor under way between two processes, or a mount
// elsewhere than in dirs.
type View struct {
	spaces map[nsID]*Space
	dev    uint64 // of the file system that namespaces are in
	// dirs are where namespaces are mounted by name.
	dirs []string
	// roots are the root directories in which a path is sought: our own and the runtime's.
	roots []string
	addrs map[netip.Addr]bool // that were asked for
	named map[nsID]bool       // namespaces that were asked for
}

// Question is what a View is to answer. It is small whatever pods do: a process may configure as many addresses in its
// namespace as it likes.
type Question struct {
	Addrs []netip.Addr   // for Users
	Netns []ledger.Netns // recorded namespaces of pods, which count whatever they belong to
}

// mostShown is how many addresses of a namespace are known besides those that were asked for.
const mostShown = 64

var errInvisible = errors.New("the runtime's process is not visible: the agent needs the host's PID namespace")

type nsID struct{ dev, ino uint64 }

// Space is one network namespace of a View.
type Space struct {
	Path    string // at which it was found: its mount, if it has one
	Process int    // a PID in it, 0 if there is none
	Err     error  // why not all of its addresses are known

	id      nsID
	file    *os.File // nil if it is foreign
	addrs   map[netip.Addr]bool
	more    bool // it has addresses besides that are not in addrs
	mounted bool
	foreign bool // a process has made it for itself
}

func idOf(ns ledger.Netns) nsID { return nsID{ns.Dev, ns.Ino} }

// Observe takes a view that answers a question, to be closed. dirs are where namespaces are mounted by name. runtimePID
// is a process that shares the runtime's namespaces: that it shows in our /proc proves that the pods' processes would.
func Observe(ctx context.Context, dirs []string, runtimePID int, q Question) (*View, error) {
	if runtimePID <= 0 {
		return nil, errInvisible
	}
	root := fmt.Sprintf("/proc/%d/root", runtimePID)
	if _, err := os.Stat(root + "/"); err != nil {
		return nil, fmt.Errorf("the runtime's view of the file system: %w", err)
	}
	v := &View{spaces: map[nsID]*Space{}, dirs: dirs, roots: []string{"", root}, addrs: map[netip.Addr]bool{},
		named: map[nsID]bool{}}
	for _, a := range q.Addrs {
		v.addrs[a] = true
	}
	for _, ns := range q.Netns {
		v.named[idOf(ns)] = ns.Ino != 0
	}
	if err := v.take(ctx); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

func (v *View) take(ctx context.Context) error {
	var own unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &own); err != nil {
		return err
	}
	v.dev = own.Dev
	if err := v.addProcesses(ctx); err != nil {
		return err
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
		if !s.foreign {
			v.list(s)
		}
	}
	return nil
}

// list notes which addresses are configured in a namespace.
func (v *View) list(s *Space) {
	s.addrs = map[netip.Addr]bool{}
	shown := 0
	err := eachAddr(s.file, func(is configured) {
		switch {
		case s.addrs[is.addr]:
		case v.addrs[is.addr]:
			s.addrs[is.addr] = true
		case shown < mostShown:
			s.addrs[is.addr] = true
			shown++
		default:
			s.more = true
		}
	})
	if err != nil {
		s.Err = fmt.Errorf("network namespace %s: %w", s.Path, err)
	}
}

// Close closes the namespaces. What they were like can still be asked.
func (v *View) Close() {
	for _, s := range v.spaces {
		if s.file != nil {
			s.file.Close()
		}
	}
}

// addProcesses adds the namespace of every thread, and those that processes have open. A process that ends meanwhile
// is no error.
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
			s, err := v.addLink(fmt.Sprintf("/proc/%d/task/%d/ns/net", pid, tid))
			if err != nil {
				return err
			}
			if s != nil && pid != os.Getpid() { // a thread of ours is there to look
				s.Process = pid
			}
		}
		if pid == os.Getpid() { // what we have open we close
			continue
		}
		if err := v.addOpen(pid); err != nil {
			return err
		}
	}
	return nil
}

// addOpen adds the namespaces that a process has open. The name of such a file says nothing once its mount is gone.
func (v *View) addOpen(pid int) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := numbers(dir)
	if isNoProcess(err) {
		return nil
	} else if err != nil {
		return err
	}
	for _, fd := range fds {
		if _, err := v.addLink(fmt.Sprintf("%s/%d", dir, fd)); err != nil {
			return err
		}
	}
	return nil
}

// addLink adds the network namespace to which a link of /proc leads; nil if it leads to none.
func (v *View) addLink(path string) (*Space, error) {
	var st unix.Statx_t // of any file: one of a network file system must not be waited for
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_INO, &st)
	if isNoProcess(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("statx %s: %w", path, err)
	}
	id := nsID{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino}
	if id.dev != v.dev {
		return nil, nil
	}
	if s := v.spaces[id]; s != nil {
		return s, nil
	}
	f, err := openNamespace(path)
	if f == nil || err != nil {
		return nil, err
	}
	if kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("getting the namespace type of %s: %w", path, err)
		}
		return nil, nil
	}
	s, err := v.add(f, path)
	if err == nil && s.file == f && !v.named[s.id] {
		if s.foreign, err = isForeign(f); s.foreign {
			f.Close()
			s.file = nil
		}
	}
	return s, err
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
		if !ok {
			continue
		}
		if s := v.spaces[idOf(ns)]; s != nil && !s.foreign {
			s.mount(path)
			continue
		}
		f, err := openNamespace(path)
		if err != nil {
			return err
		}
		if f == nil {
			continue
		}
		s, err := v.add(f, path)
		if err != nil {
			return err
		}
		s.mount(path)
	}
	return nil
}

// mount notes a mount of the namespace.
func (s *Space) mount(path string) {
	if !s.mounted {
		s.Path, s.mounted = path, true
	}
}

func (v *View) add(f *os.File, path string) (*Space, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("fstat %s: %w", path, err)
	}
	id := nsID{st.Dev, st.Ino}
	if s := v.spaces[id]; s != nil && !s.foreign { // it moved between stat and open
		f.Close()
		return s, nil
	}
	s := &Space{Path: path, id: id, file: f}
	v.spaces[id] = s
	return s, nil
}

// isForeign reports whether a network namespace surely belongs to another user namespace than we are in.
func isForeign(ns *os.File) (bool, error) {
	fd, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_USERNS)
	if err != nil { // the kernel does not say, or it is beyond ours
		return false, nil
	}
	defer unix.Close(fd)
	var owner, own unix.Stat_t
	if err := errors.Join(unix.Fstat(fd, &owner), unix.Stat("/proc/self/ns/user", &own)); err != nil {
		return false, fmt.Errorf("the user namespace of %s: %w", ns.Name(), err)
	}
	return owner.Dev != own.Dev || owner.Ino != own.Ino, nil
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

// Find returns the recorded namespace, as we or the runtime see it; nil if it is gone. A namespace that appeared after
// the view was taken is an error.
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
		return nil, fmt.Errorf("network namespace %s was created after the node was scanned", ns.Path)
	}
	return nil, nil
}

// Sees reports whether the namespace that is at the recorded path now is in the view.
func (v *View) Sees(ns ledger.Netns) (bool, error) {
	cur, ok, err := ledger.SystemNetns{}.Identify(ns.Path)
	return err == nil && ok && v.spaces[idOf(cur)] != nil, err
}

// Has reports whether the recorded namespace is in the view at its mount.
func (v *View) Has(ns ledger.Netns) bool {
	s := v.spaces[idOf(ns)]
	return s != nil && s.mounted
}

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

// Asked reports whether the View was taken to answer for an address. The zero View, of a node without namespaces,
// answers for each.
func (v *View) Asked(a netip.Addr) bool { return v.addrs == nil || v.addrs[a] }

// Users returns every namespace in which an address that was asked for is configured, and those in which it may be:
// their Err is set.
func (v *View) Users(a netip.Addr) (all []*Space) {
	for _, s := range v.spaces {
		if s.addrs[a] || s.Err != nil {
			all = append(all, s)
		}
	}
	return all
}

// Addrs returns addresses that were seen in the namespace. There may be others only if it is an error.
func (s *Space) Addrs() ([]netip.Addr, error) {
	err := s.Err
	if err == nil && s.more {
		err = fmt.Errorf("network namespace %s has more than %d addresses", s.Path, mostShown)
	}
	return slices.SortedFunc(maps.Keys(s.addrs), netip.Addr.Compare), err
}

// Shows reports whether the address was seen in the namespace.
func (s *Space) Shows(a netip.Addr) bool { return s.addrs[a] }

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
			return errors.Join(err, fmt.Errorf("its leftover network namespace %s still exists", ns.Path))
		}
	}
	s.file.Close() // or it would still answer for its addresses
	return nil
}
