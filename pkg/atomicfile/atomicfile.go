// Package atomicfile replaces files as a whole: a reader, and a machine that lost power, finds the old content or the
// new one, never a part. It is for the agent's own files; those of a network are written by pkg/ledger, which is
// explicit about every fsync.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// TempPrefix begins the name of every temporary file, which lies beside the file that it becomes. It has no extension,
// so no runtime loads it as a CNI configuration, and a leading dot, so no configuration names it as a plugin.
const TempPrefix = ".stayput-"

// File is a file to be replaced.
type File struct {
	Path string
	Mode fs.FileMode
	// Accept may refuse the new content, which is in temp: the old file then stays.
	Accept func(temp string) error
	// MustExist makes Write fail with fs.ErrNotExist if the file does not exist, even if it goes at the last moment:
	// what another program removes stays removed.
	MustExist bool
}

// Write replaces the file with data and returns once content and name are durable. After an error the old file is
// still in place, unless only the last fsync failed; an error of the disk names Path, not the temporary file.
func (f File) Write(data io.Reader) error {
	dir := filepath.Dir(f.Path)
	temp, err := os.CreateTemp(dir, TempPrefix+"*")
	if err != nil {
		return f.failed(err)
	}
	_, err = io.Copy(temp, data)
	if err == nil {
		err = temp.Chmod(f.Mode)
	}
	if err == nil {
		err = temp.Sync()
	}
	err = errors.Join(err, temp.Close())
	if err == nil && f.Accept != nil {
		if err := f.Accept(temp.Name()); err != nil {
			return fmt.Errorf("replacing %s: %w", f.Path, errors.Join(err, os.Remove(temp.Name())))
		}
	}
	switch {
	case err != nil:
	case f.MustExist:
		if err = unix.Renameat2(unix.AT_FDCWD, temp.Name(), unix.AT_FDCWD, f.Path, unix.RENAME_EXCHANGE); err == nil {
			err = os.Remove(temp.Name()) // the old content
		}
	default:
		err = os.Rename(temp.Name(), f.Path)
	}
	if err != nil {
		if e := os.Remove(temp.Name()); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
		return f.failed(err)
	}
	return syncDir(dir)
}

// failed has the same words for the same trouble every time, without the name of the temporary file.
func (f File) failed(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		err = errno
	}
	return fmt.Errorf("writing %s: %w", f.Path, err)
}

// Remove removes a file and returns once that is durable.
func Remove(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// Sweep removes the temporary files that a killed process left in dir. No Write may be under way there.
func Sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), TempPrefix) && e.Type().IsRegular() {
			if err := os.Remove(filepath.Join(dir, e.Name())); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
