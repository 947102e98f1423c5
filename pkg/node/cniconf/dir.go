package cniconf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// File is a file of a configuration directory.
type File struct {
	Name string
	Data []byte
	Mode fs.FileMode // its permissions
	Err  error       // of reading it
}

// Dir is a runtime's configuration directory: the files that runtimes read, sorted by name, and for each folder its
// *.conf files, which libcni adds to the network of that name.
type Dir struct {
	Files   []File
	Folders map[string][]File
}

// Find returns the configuration in the file of that name, nil if there is no such file.
func (d Dir) Find(name string) *Conf {
	i := slices.IndexFunc(d.Files, func(f File) bool { return f.Name == name })
	if i < 0 {
		return nil
	}
	return d.Conf(d.Files[i])
}

// longestFile is far more than any configuration has, in bytes.
const longestFile = 1 << 20

// ReadDir reads the files that runtimes read: *.conf, *.conflist and *.json. It returns fs.ErrNotExist if there is no
// such directory; a file that cannot be read has its error in File.Err.
func ReadDir(path string) (Dir, error) {
	var err error
	for range 10 { // again if a file is removed between the listing and its reading
		var d Dir
		if d, err = readDirOnce(path); !errors.Is(err, fs.ErrNotExist) {
			return d, err
		}
		if _, statErr := os.Stat(path); errors.Is(statErr, fs.ErrNotExist) {
			return Dir{}, statErr
		}
	}
	return Dir{}, err
}

func readDirOnce(path string) (d Dir, err error) {
	var folders []string
	if d.Files, folders, err = readFiles(path, ".conf", ".conflist", ".json"); err != nil {
		return Dir{}, err
	}
	d.Folders = map[string][]File{}
	for _, name := range folders {
		if d.Folders[name], _, err = readFiles(filepath.Join(path, name), ".conf"); err != nil {
			return Dir{}, err
		}
	}
	// If the directory was removed, a mount of it stays empty forever.
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Dir{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Nlink == 0 {
		return Dir{}, fmt.Errorf("%s was removed; if it was created again, the agent still has the old directory "+
			"mounted: restart the agent", path)
	}
	return d, nil
}

// readFiles returns the files of a directory with one of these extensions, sorted by name, and its folders.
func readFiles(path string, extensions ...string) (files []File, folders []string, err error) {
	entries, err := os.ReadDir(path)
	for _, e := range entries {
		if e.IsDir() {
			folders = append(folders, e.Name())
		} else if err == nil && slices.Contains(extensions, filepath.Ext(e.Name())) {
			var f File
			f, err = readFile(filepath.Join(path, e.Name()))
			files = append(files, f)
		}
	}
	return files, folders, err
}

// readFile returns fs.ErrNotExist if the file is gone; any other error is in File.Err.
func readFile(path string) (File, error) {
	f := File{Name: filepath.Base(path)}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if target, linkErr := os.Readlink(path); linkErr == nil {
			f.Err = fmt.Errorf("symbolic link to %s, which does not exist", target)
			return f, nil
		}
		return f, err
	case err != nil:
		f.Err = err
	case !info.Mode().IsRegular():
		f.Err = errors.New("not a regular file")
	case info.Size() > longestFile:
		f.Err = errors.New("too large for a configuration")
	default:
		f.Mode = info.Mode().Perm()
		if f.Data, f.Err = os.ReadFile(path); errors.Is(f.Err, fs.ErrNotExist) {
			return f, f.Err
		}
	}
	return f, nil
}
