// Package disk is the way to the files of the state directory and of networks: system calls without package os, behind
// a seam that tests break at every step. What is written is durable only where the caller syncs.
package disk

import (
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// FS is the seam to the disk. Its methods are the steps whose order the ledger's crash argument is about, so that a
// test can fail, tear or reorder each of them. Paths are absolute. Errors satisfy errors.Is with fs.ErrNotExist and the
// unix errno.
type FS interface {
	// ReadFile returns the whole content of a file.
	ReadFile(path string) ([]byte, error)
	// Mode returns the permission bits of a file, as chmod(2) takes them.
	Mode(path string) (uint32, error)
	// ReadDir returns the names in a directory, in no order, without . and ..
	ReadDir(path string) ([]string, error)
	// WriteFile creates path with a mode, or truncates it, and writes data. Nothing is durable before
	// SyncFile and SyncDir of the parent.
	WriteFile(path string, data []byte, mode uint32) error
	// Overwrite writes over the beginning of an existing file in place: its directory does not change.
	Overwrite(path string, data []byte) error
	// SyncFile returns once the content of path is durable.
	SyncFile(path string) error
	// SyncDir returns once every entry made, renamed or removed in path is durable.
	SyncDir(path string) error
	// Rename replaces newpath by oldpath atomically.
	Rename(oldpath, newpath string) error
	// Exchange swaps two files atomically. If the file system cannot, the error satisfies errors.Is with
	// errors.ErrUnsupported and nothing has changed.
	Exchange(path1, path2 string) error
	// Remove unlinks a file; a missing one is an error.
	Remove(path string) error
	// RemoveDir removes an empty directory.
	RemoveDir(path string) error
	// Chmod changes the permission bits.
	Chmod(path string, mode uint32) error
	// Mkdir makes one directory; an existing one is an error that satisfies fs.ErrExist.
	Mkdir(path string) error
	// ChangeTime is the modification time of a file or directory in nanoseconds: that of a file moves when it is written,
	// that of a directory when an entry comes or goes.
	ChangeTime(path string) (int64, error)
	// Lock takes the exclusive flock(2) on path, which it creates if necessary, and blocks until it has it.
	// unlock gives it back.
	Lock(path string) (unlock func(), err error)
}

// Local is the FS of the machine. It speaks to the kernel without package os: the poller that
// os.File registers with is start-up time of every ADD and DEL.
type Local struct {
	// LockTimeout bounds the wait for the lock; OnLockTimeout is called when it has passed and is
	// expected to end the process. Without it the wait has no end.
	LockTimeout   time.Duration
	OnLockTimeout func()
}

func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// Retry repeats a system call that a signal interrupted (the Go runtime preempts with SIGURG).
func Retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Unreadable reports whether an error says that the disk has lost a file or a part of it.
func Unreadable(err error) bool {
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.EUCLEAN) || errors.Is(err, unix.EBADMSG)
}

func open(path string, flags int, perm uint32) (fd int, err error) {
	err = Retry(func() error {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC, perm)
		return err
	})
	return fd, pathError("open", path, err)
}

// maxFile bounds what is read of any file: no record of ours or of host-local comes near it.
const maxFile = 1 << 20

// ReadFile reads a file once more if the disk has lost it: such an error may be a passing one.
func (Local) ReadFile(path string) ([]byte, error) {
	data, err := readFile(path)
	if Unreadable(err) {
		data, err = readFile(path)
	}
	return data, err
}

func readFile(path string) ([]byte, error) {
	fd, err := open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	buf := make([]byte, 0, 1024)
	for {
		var n int
		err := Retry(func() (err error) { n, err = unix.Read(fd, buf[len(buf):cap(buf)]); return err })
		if err != nil {
			return nil, pathError("read", path, err)
		}
		// A read that does not fill the buffer was the last.
		if buf = buf[:len(buf)+n]; len(buf) < cap(buf) || len(buf) > maxFile {
			return buf, nil
		}
		buf = append(buf, 0)[:len(buf)]
	}
}

func (Local) Mode(path string) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, pathError("lstat", path, err)
	}
	return st.Mode & 0o7777, nil
}

func (Local) ReadDir(path string) ([]string, error) {
	fd, err := open(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var names []string
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, pathError("getdents", path, err)
		}
		if n <= 0 {
			return names, nil
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

func write(fd int, path string, data []byte) error {
	for len(data) > 0 {
		n, err := unix.Write(fd, data)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return pathError("write", path, err)
		}
		data = data[n:]
	}
	return nil
}

func (Local) WriteFile(path string, data []byte, mode uint32) error {
	fd, err := open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	if err := write(fd, path, data); err != nil {
		unix.Close(fd)
		return err
	}
	return pathError("close", path, unix.Close(fd))
}

func (Local) Overwrite(path string, data []byte) error {
	fd, err := open(path, unix.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return write(fd, path, data)
}

func syncPath(path string, flags int) error {
	fd, err := open(path, flags, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return pathError("fsync", path, Retry(func() error { return unix.Fsync(fd) }))
}

func (Local) SyncFile(path string) error { return syncPath(path, unix.O_RDONLY|unix.O_NOFOLLOW) }
func (Local) SyncDir(path string) error  { return syncPath(path, unix.O_RDONLY|unix.O_DIRECTORY) }

func (Local) Rename(oldpath, newpath string) error {
	return pathError("rename", newpath, unix.Rename(oldpath, newpath))
}
func (Local) Exchange(path1, path2 string) error {
	err := unix.Renameat2(unix.AT_FDCWD, path1, unix.AT_FDCWD, path2, unix.RENAME_EXCHANGE)
	if err == unix.EINVAL || err == unix.ENOSYS {
		err = errors.ErrUnsupported
	}
	return pathError("exchange", path2, err)
}
func (Local) Remove(path string) error    { return pathError("unlink", path, unix.Unlink(path)) }
func (Local) RemoveDir(path string) error { return pathError("rmdir", path, unix.Rmdir(path)) }
func (Local) Chmod(path string, mode uint32) error {
	return pathError("chmod", path, unix.Chmod(path, mode))
}
func (Local) Mkdir(path string) error { return pathError("mkdir", path, unix.Mkdir(path, 0o755)) }

func (Local) ChangeTime(path string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, pathError("stat", path, err)
	}
	return st.Mtim.Nano(), nil
}

// Lock is host-local's own lock: a flock on the file named lock of the network directory
// (plugins/ipam/host-local/backend/disk/lock.go). Through a link it would make or lock a file outside of the directory.
func (d Local) Lock(path string) (func(), error) {
	for {
		fd, err := open(path, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := d.flock(fd); err != nil {
			unix.Close(fd)
			return nil, pathError("flock", path, err)
		}
		// If the directory was removed while we waited, this lock excludes no other process.
		var held, named unix.Stat_t
		if err := unix.Fstat(fd, &held); err != nil {
			unix.Close(fd)
			return nil, pathError("fstat", path, err)
		}
		err = unix.Lstat(path, &named)
		if err == nil && held.Ino == named.Ino && held.Dev == named.Dev {
			return func() { unix.Close(fd) }, nil
		}
		unix.Close(fd)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, pathError("lstat", path, err)
		}
	}
}

func (d Local) flock(fd int) error {
	err := Retry(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	if d.OnLockTimeout != nil {
		defer time.AfterFunc(d.LockTimeout, d.OnLockTimeout).Stop()
	}
	return Retry(func() error { return unix.Flock(fd, unix.LOCK_EX) })
}

// Replace writes temp, which is on the same file system as path, and renames it to path. A reader of path finds the old
// content or the new one. A power loss may leave neither, see ReplaceSynced.
func Replace(fsys FS, temp, path string, data []byte, mode uint32) error {
	err := fsys.WriteFile(temp, data, mode)
	if err == nil {
		err = fsys.Rename(temp, path)
	}
	return err
}

// ReplaceSynced is Replace, and a power loss too leaves the old content or the new one. Which of them is known after
// SyncDir of the parent.
func ReplaceSynced(fsys FS, temp, path string, data []byte, mode uint32) error {
	err := fsys.WriteFile(temp, data, mode)
	if err == nil {
		err = fsys.SyncFile(temp)
	}
	if err == nil {
		err = fsys.Rename(temp, path)
	}
	return err
}

// WriteFile writes a file as FS.WriteFile does, and makes its missing parents.
func WriteFile(fsys FS, path string, data []byte, mode uint32) error {
	err := fsys.WriteFile(path, data, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if err = MkdirAll(fsys, filepath.Dir(path)); err == nil {
			err = fsys.WriteFile(path, data, mode)
		}
	}
	return err
}

// MkdirAll makes path and its missing parents.
func MkdirAll(fsys FS, path string) error {
	err := fsys.Mkdir(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = MkdirAll(fsys, filepath.Dir(path)); err == nil {
			err = fsys.Mkdir(path)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// RemoveAll removes a directory of plain files and directories, or one file. A missing one is no error.
func RemoveAll(fsys FS, path string) error {
	err := fsys.Remove(path)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	names, dirErr := fsys.ReadDir(path)
	if dirErr != nil {
		return err
	}
	for _, name := range names {
		if err := RemoveAll(fsys, filepath.Join(path, name)); err != nil {
			return err
		}
	}
	return fsys.RemoveDir(path)
}

// SyncPathTo makes every directory entry on the way to path durable: a claim in a directory that a power
// loss takes away was never promised. It does not matter which process made the entries: it may have been killed before
// it could sync.
func SyncPathTo(fsys FS, path string) error {
	for ; path != "/"; path = filepath.Dir(path) {
		if err := fsys.SyncDir(filepath.Dir(path)); err != nil {
			return err
		}
	}
	return nil
}

// SyncAbsence makes durable that path is not there.
func SyncAbsence(fsys FS, path string) error {
	err := fs.ErrNotExist
	for path != "/" && errors.Is(err, fs.ErrNotExist) {
		path = filepath.Dir(path)
		err = fsys.SyncDir(path)
	}
	return err
}
