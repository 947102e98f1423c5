package ledger

import (
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// memFS is a FileSystem that can lose what was not fsynced, which no real disk does on request. It keeps,
// for each directory entry and each file's content, every state since the last fsync; a power loss picks one
// of them for each, independently: changes may be dropped and reordered, and unsynced content is torn.
type memFS struct {
	root   *memNode
	mtime  int64      // of the directory that changed last: no two have the same
	clock  *fakeClock // of the files
	locked bool
	// before is called before every operation that changes something. An error fails the operation; a
	// panic is a kill -9.
	before func(op, path string) error
	ops    int
}

type memNode struct {
	dir     map[string][]*memNode // history of each entry, oldest (durable) first; nil is absence
	mtime   int64
	content [][]byte // history, oldest durable
	mode    uint32
	isDir   bool
	sized   bool // only overwritten since the last fsync: old and new have the same length
}

func newMemDir() *memNode { return &memNode{isDir: true, dir: map[string][]*memNode{}, mode: 0o755} }

func newMemFS(clock *fakeClock) *memFS { return &memFS{root: newMemDir(), clock: clock} }

func pathError(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

func (m *memFS) change(op, path string) error {
	m.ops++
	if m.before != nil {
		if err := m.before(op, path); err != nil {
			return pathError(op, path, err)
		}
	}
	return nil
}

func (n *memNode) get(name string) *memNode {
	h := n.dir[name]
	if len(h) == 0 {
		return nil
	}
	return h[len(h)-1]
}

func (m *memFS) set(n *memNode, name string, to *memNode) {
	if n.dir[name] == nil {
		n.dir[name] = []*memNode{nil}
	}
	n.dir[name] = append(n.dir[name], to)
	m.mtime++
	n.mtime = m.mtime
}

func (m *memFS) walk(path string) *memNode {
	n := m.root
	for part := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if part == "" {
			continue
		}
		if n == nil || !n.isDir {
			return nil
		}
		n = n.get(part)
	}
	return n
}

func (m *memFS) parent(path string) (*memNode, string, error) {
	n := m.walk(filepath.Dir(path))
	if n == nil || !n.isDir {
		return nil, "", &fs.PathError{Op: "open", Path: path, Err: unix.ENOENT}
	}
	return n, filepath.Base(path), nil
}

func (m *memFS) file(op, path string) (*memNode, error) {
	n := m.walk(path)
	switch {
	case n == nil:
		return nil, pathError(op, path, unix.ENOENT)
	case n.isDir:
		return nil, pathError(op, path, unix.EISDIR)
	}
	return n, nil
}

func (m *memFS) ReadFile(path string) ([]byte, error) {
	n, err := m.file("open", path)
	if err != nil {
		return nil, err
	}
	return slices.Clone(n.content[len(n.content)-1]), nil
}

func (m *memFS) Mode(path string) (uint32, error) {
	n := m.walk(path)
	if n == nil {
		return 0, pathError("lstat", path, unix.ENOENT)
	}
	return n.mode, nil
}

func (m *memFS) ReadDir(path string) ([]string, error) {
	n := m.walk(path)
	if n == nil {
		return nil, pathError("open", path, unix.ENOENT)
	}
	if !n.isDir {
		return nil, pathError("open", path, unix.ENOTDIR)
	}
	var names []string
	for name := range n.dir {
		if n.get(name) != nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (m *memFS) WriteFile(path string, data []byte, mode uint32) error {
	dir, name, err := m.parent(path)
	if err != nil {
		return err
	}
	if err := m.change("open", path); err != nil {
		return err
	}
	n := dir.get(name)
	if n == nil {
		n = &memNode{content: [][]byte{{}}, mode: mode}
		m.set(dir, name, n)
	} else {
		n.content = append(n.content, []byte{})
	}
	n.sized = false
	n.mtime = m.clock.now.Wall.UnixNano()
	if err := m.change("write", path); err != nil {
		return err
	}
	n.content = append(n.content, slices.Clone(data))
	return nil
}

func (m *memFS) Overwrite(path string, data []byte) error {
	n, err := m.file("open", path)
	if err != nil {
		return err
	}
	if err := m.change("overwrite", path); err != nil {
		return err
	}
	next := slices.Clone(n.content[len(n.content)-1])
	if len(next) < len(data) {
		next = append(next, make([]byte, len(data)-len(next))...)
	}
	n.sized = (len(n.content) == 1 || n.sized) && len(next) == len(n.content[0])
	copy(next, data)
	n.content = append(n.content, next)
	return nil
}

func (m *memFS) SyncFile(path string) error {
	n, err := m.file("open", path)
	if err != nil {
		return err
	}
	if err := m.change("fsync", path); err != nil {
		return err
	}
	n.content = n.content[len(n.content)-1:]
	return nil
}

func (m *memFS) SyncDir(path string) error {
	n := m.walk(path)
	if n == nil || !n.isDir {
		return pathError("open", path, unix.ENOENT)
	}
	if err := m.change("fsyncdir", path); err != nil {
		return err
	}
	for name, h := range n.dir {
		if n.dir[name] = h[len(h)-1:]; h[len(h)-1] == nil {
			delete(n.dir, name)
		}
	}
	return nil
}

func (m *memFS) Rename(oldpath, newpath string) error {
	from, oldname, err := m.parent(oldpath)
	if err != nil {
		return err
	}
	to, newname, err := m.parent(newpath)
	if err != nil {
		return err
	}
	n := from.get(oldname)
	if n == nil {
		return pathError("rename", oldpath, unix.ENOENT)
	}
	if err := m.change("rename", newpath); err != nil {
		return err
	}
	m.set(from, oldname, nil)
	m.set(to, newname, n)
	return nil
}

func (m *memFS) Exchange(path1, path2 string) error {
	dir1, name1, err := m.parent(path1)
	if err != nil {
		return err
	}
	dir2, name2, err := m.parent(path2)
	if err != nil {
		return err
	}
	n1, n2 := dir1.get(name1), dir2.get(name2)
	if n1 == nil || n2 == nil {
		return pathError("exchange", path2, unix.ENOENT)
	}
	if err := m.change("exchange", path2); err != nil {
		return err
	}
	m.set(dir1, name1, n2)
	m.set(dir2, name2, n1)
	return nil
}

func (m *memFS) Remove(path string) error {
	dir, name, err := m.parent(path)
	if err != nil {
		return err
	}
	switch n := dir.get(name); {
	case n == nil:
		return pathError("unlink", path, unix.ENOENT)
	case n.isDir:
		return pathError("unlink", path, unix.EISDIR)
	}
	if err := m.change("unlink", path); err != nil {
		return err
	}
	m.set(dir, name, nil)
	return nil
}

func (m *memFS) RemoveDir(path string) error {
	dir, name, err := m.parent(path)
	if err != nil {
		return err
	}
	if names, err := m.ReadDir(path); err != nil {
		return err
	} else if len(names) > 0 {
		return pathError("rmdir", path, unix.ENOTEMPTY)
	}
	if err := m.change("rmdir", path); err != nil {
		return err
	}
	m.set(dir, name, nil)
	return nil
}

func (m *memFS) Chmod(path string, mode uint32) error {
	n, err := m.file("chmod", path)
	if err != nil {
		return err
	}
	if err := m.change("chmod", path); err != nil {
		return err
	}
	n.mode = mode
	return nil
}

func (m *memFS) Mkdir(path string) error {
	dir, name, err := m.parent(path)
	if err != nil {
		return err
	}
	if dir.get(name) != nil {
		return pathError("mkdir", path, unix.EEXIST)
	}
	if err := m.change("mkdir", path); err != nil {
		return err
	}
	m.set(dir, name, newMemDir())
	return nil
}

func (m *memFS) ChangeTime(path string) (int64, error) {
	n := m.walk(path)
	if n == nil {
		return 0, pathError("stat", path, unix.ENOENT)
	}
	return n.mtime, nil
}

func (m *memFS) Lock(path string) (func(), error) {
	dir, name, err := m.parent(path)
	if err != nil {
		return nil, err
	}
	if dir.get(name) == nil {
		if err := m.change("open", path); err != nil {
			return nil, err
		}
		m.set(dir, name, &memNode{content: [][]byte{{}}, mode: modeHostLocal})
	}
	if m.locked {
		panic("the lock is already held")
	}
	m.locked = true
	return func() { m.locked = false }, nil
}

// lose is a power loss. keep says how: "durable" loses all that was not fsynced, "all" nothing (but every
// attachment), "torn" tears every file whose content was not fsynced, "mixed" picks at random for each.
func (m *memFS) lose(keep string, r *rand.Rand) {
	m.locked = false
	loseNode(m.root, keep, r)
}

func loseNode(n *memNode, keep string, r *rand.Rand) {
	if !n.isDir {
		i := 0
		switch keep {
		case "all":
			i = len(n.content) - 1
		case "torn", "mixed":
			i = r.IntN(len(n.content))
			if keep == "torn" {
				i = len(n.content) - 1
			}
			if len(n.content) > 1 && !n.sized && (keep == "torn" || r.IntN(3) == 0) {
				n.content = [][]byte{tear(n.content[len(n.content)-1], r)}
				return
			}
		}
		n.content = [][]byte{n.content[i]}
		return
	}
	for _, name := range slices.Sorted(maps.Keys(n.dir)) { // in order: a seed stands for one history
		h := n.dir[name]
		i := 0
		switch keep {
		case "all", "torn":
			i = len(h) - 1
		case "mixed":
			i = r.IntN(len(h))
		}
		c := h[i]
		if c == nil {
			delete(n.dir, name)
			continue
		}
		n.dir[name] = []*memNode{c}
	}
	for _, name := range slices.Sorted(maps.Keys(n.dir)) {
		loseNode(n.dir[name][0], keep, r)
	}
}

// sector is what a disk writes whole: 512 bytes or more, of which one holds a bound address file with a container ID of
// 64 digits. The model's names are as much shorter.
const sector = 64

// tear returns what a power loss may leave of a file that one write made and no fsync: whole sectors of it, or zeros.
func tear(b []byte, r *rand.Rand) []byte {
	if n := r.IntN(len(b)/sector + 2); n <= len(b)/sector {
		return b[:n*sector]
	}
	return make([]byte, len(b))
}

// dump shows the tree for a failure.
func (m *memFS) dump() string {
	var b strings.Builder
	var show func(path string, n *memNode)
	show = func(path string, n *memNode) {
		if !n.isDir {
			fmt.Fprintf(&b, "%s %o %.300q\n", path, n.mode, n.content[len(n.content)-1])
			return
		}
		names, _ := m.ReadDir(path)
		for _, name := range names {
			show(filepath.Join(path, name), n.get(name))
		}
	}
	show("/", m.root)
	return b.String()
}

// fakeClock and fakeNetns stand in for what a test cannot set on the machine.
type fakeClock struct{ now Instant }

func (c *fakeClock) Now() (Instant, error) { return c.now, nil }

func (c *fakeClock) advance(d time.Duration) {
	c.now.Boot += d
	c.now.Wall = c.now.Wall.Add(d)
}

type fakeNetns map[string]Netns

func (f fakeNetns) Identify(path string) (Netns, bool, error) {
	ns, ok := f[path]
	return ns, ok, nil
}

// syncAll is what a disk does by itself when it has the time.
func (m *memFS) syncAll(n *memNode) {
	if !n.isDir {
		n.content = n.content[len(n.content)-1:]
	}
	for name, h := range n.dir {
		if last := h[len(h)-1]; last == nil {
			delete(n.dir, name)
		} else {
			n.dir[name] = []*memNode{last}
			m.syncAll(last)
		}
	}
}

// files calls f for every file.
func (m *memFS) files(f func(path string, mode uint32)) {
	var walk func(path string, n *memNode)
	walk = func(path string, n *memNode) {
		if !n.isDir {
			f(path, n.mode)
		}
		for name := range n.dir {
			if sub := n.get(name); sub != nil {
				walk(filepath.Join(path, name), sub)
			}
		}
	}
	walk("/", m.root)
}
