package ledger

import (
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/disk"
)

// Netns names a network namespace in a way that survives the re-use of its path.
type Netns struct {
	Path string `json:"path,omitempty"`
	Dev  uint64 `json:"dev,omitempty"`
	Ino  uint64 `json:"ino,omitempty"`
}

// Liveness is what is known about a network namespace.
type Liveness int

const (
	Unknown Liveness = iota // could not be told: to be treated as alive
	Alive
	Dead
)

// NetnsProber identifies network namespaces.
type NetnsProber interface {
	// Identify returns the namespace now at path. ok is false if there is none.
	Identify(path string) (ns Netns, ok bool, err error)
}

// SystemNetns is the NetnsProber of the machine.
type SystemNetns struct{}

func (SystemNetns) Identify(path string) (Netns, bool, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR:
		return Netns{}, false, nil
	default:
		return Netns{}, false, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	var sf unix.Statfs_t
	if err := disk.Retry(func() error { return unix.Statfs(path, &sf) }); err != nil {
		return Netns{}, false, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	// A leftover mount point whose mount is gone is an ordinary file. Kernels before 3.19 had the
	// namespaces on proc.
	if sf.Type != unix.NSFS_MAGIC && sf.Type != unix.PROC_SUPER_MAGIC {
		return Netns{}, false, nil
	}
	return Netns{Path: path, Dev: st.Dev, Ino: st.Ino}, true, nil
}

// liveness returns whether ns, recorded in the boot bootID, still exists. Only a fact counts as Dead; every
// error is Unknown.
func liveness(p NetnsProber, ns Netns, bootID string, now Instant) Liveness {
	switch {
	case bootID != "" && bootID != now.BootID:
		return Dead
	case ns.Path == "":
		return Unknown
	}
	cur, ok, err := p.Identify(ns.Path)
	switch {
	case err != nil:
		return Unknown
	case !ok:
		return Dead
	case ns.Ino != 0 && (cur.Dev != ns.Dev || cur.Ino != ns.Ino):
		return Dead
	}
	return Alive
}

func (n Netns) same(o Netns) bool { return n.Ino != 0 && n.Dev == o.Dev && n.Ino == o.Ino }
