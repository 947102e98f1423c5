package crash

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/must"
)

// node is the machine that a test runs on: files, network namespaces and a boot ID of its own, all in a mount
// namespace of the thread that made it. Only that thread, and what it starts, sees them; see enter.
type node struct {
	root string // a tmpfs
	// disk is the part of root that save and restore are about: networks, state, and run with the
	// containers' network namespaces.
	disk  string
	mntns int
}

const netnsPool = 12

// newNode makes a node and binds the calling goroutine to its thread for good.
func newNode(t *testing.T) *node {
	t.Helper()
	runtime.LockOSThread()
	must.Do(t, unix.Unshare(unix.CLONE_NEWNS))
	must.Do(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	n := &node{root: t.TempDir()}
	must.Do(t, unix.Mount("tmpfs", n.root, "tmpfs", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(n.root, unix.MNT_DETACH)) })
	n.disk = filepath.Join(n.root, "disk")
	must.Do(t, os.MkdirAll(filepath.Join(n.root, "netns"), 0o755))
	n.wipe(t)

	must.Do(t, os.WriteFile(filepath.Join(n.root, "boot_id"), nil, 0o644))
	n.reboot(t, 1)
	must.Do(t, unix.Mount(filepath.Join(n.root, "boot_id"), "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""))
	must.Do(t, os.WriteFile(n.resolvConf(), []byte("nameserver 10.0.0.53\n"), 0o644))

	own, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must.Do(t, err)
	defer unix.Close(own)
	for i := range netnsPool {
		must.Do(t, os.WriteFile(n.namespace(i), nil, 0o644))
		must.Do(t, unix.Unshare(unix.CLONE_NEWNET))
		must.Do(t, unix.Mount("/proc/thread-self/ns/net", n.namespace(i), "", unix.MS_BIND, ""))
	}
	must.Do(t, unix.Setns(own, unix.CLONE_NEWNET))
	n.mntns, err = unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must.Do(t, err)
	t.Cleanup(func() { unix.Close(n.mntns) })
	return n
}

// enter brings another goroutine onto the node, for good.
func (n *node) enter() error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	return unix.Setns(n.mntns, unix.CLONE_NEWNS)
}

func (n *node) networks() string            { return filepath.Join(n.disk, "networks") }
func (n *node) state() string               { return filepath.Join(n.disk, "state") }
func (n *node) netns(ctr string) string     { return filepath.Join(n.disk, "run", ctr) }
func (n *node) namespace(i int) string      { return filepath.Join(n.root, "netns", fmt.Sprint(i)) }
func (n *node) resolvConf() string          { return filepath.Join(n.root, "resolv.conf") }
func (n *node) addressFile(a string) string { return filepath.Join(n.networks(), network, a) }

func bootID(boot int) string { return fmt.Sprintf("%08x-0000-4000-8000-000000000000", boot) }

// reboot gives the node the boot ID of its boot'th boot.
func (n *node) reboot(t testing.TB, boot int) {
	t.Helper()
	must.Do(t, os.WriteFile(filepath.Join(n.root, "boot_id"), []byte(bootID(boot)+"\n"), 0o644))
}

// wipe empties the disk.
func (n *node) wipe(t testing.TB) {
	t.Helper()
	must.Do(t, os.MkdirAll(n.disk, 0o755))
	names, err := os.ReadDir(n.disk)
	must.Do(t, err)
	for _, d := range names {
		must.Do(t, os.RemoveAll(filepath.Join(n.disk, d.Name())))
	}
}

// file is one file of a saved disk.
type file struct {
	path  string // below the disk
	mode  fs.FileMode
	data  string // of a link its target
	mtime time.Time
}

// save returns the disk, parents before their children.
func (n *node) save(t testing.TB) []file {
	t.Helper()
	var files []file
	must.Do(t, filepath.WalkDir(n.disk, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		f := file{path: strings.TrimPrefix(path, n.disk), mode: info.Mode(), mtime: info.ModTime()}
		switch {
		case f.mode.IsRegular():
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			f.data = string(b)
		case f.mode&fs.ModeSymlink != 0:
			if f.data, err = os.Readlink(path); err != nil {
				return err
			}
		}
		files = append(files, f)
		return nil
	}))
	return files
}

// restore makes the disk what save saw. The times of directories are part of it: stayput looks at them.
func (n *node) restore(t testing.TB, files []file) {
	t.Helper()
	n.wipe(t)
	for _, f := range files {
		path := n.disk + f.path
		switch {
		case f.path == "":
		case f.mode.IsDir():
			must.Do(t, os.Mkdir(path, f.mode.Perm()))
		case f.mode.IsRegular():
			must.Do(t, os.WriteFile(path, []byte(f.data), f.mode.Perm()))
			must.Do(t, os.Chmod(path, f.mode)) // the sticky bit too
		default:
			must.Do(t, os.Symlink(f.data, path))
		}
	}
	for _, f := range files {
		if f.mode.IsDir() {
			must.Do(t, os.Chtimes(n.disk+f.path, f.mtime, f.mtime))
		}
	}
}

// times are those of records, and in the file counts the CLOCK_BOOTTIME of the first end (19 digits: there is none).
var times = regexp.MustCompile(`"(since|bound|wall|boottime|left|time|took)":("[^"]*"|[0-9]+)|"ino":[0-9]+` +
	`|^v1 [0-9]{1,18} `)

// mtimes are what a marker says of them, and readings its line that says what the clocks read, behind the boot.
var (
	mtimes   = regexp.MustCompile(`[0-9]{15,}`)
	readings = regexp.MustCompile(`(?m)^(\S+) [0-9]+ [0-9]+ [0-9]+$`)
)

// fingerprint is equal for disks that differ in nothing but when it happened. Of the modification times of the
// directories it tells whether the marker agrees, which is all that a command wants of them.
func fingerprint(files []file) string {
	var b strings.Builder
	for _, f := range files {
		if strings.HasPrefix(f.path, "/state/spool/") && f.mode.IsRegular() {
			// Named after the time.
			f.path = "/state/spool/*"
			if f.data != "" {
				f.data = "event"
			}
		}
		data := times.ReplaceAllString(f.data, "*")
		if strings.HasSuffix(f.path, "/.stayput.boot") || strings.HasSuffix(f.path, "/.stayput.tmp") {
			agrees := map[string]string{}
			for _, d := range files {
				if d.mode.IsDir() {
					agrees[fmt.Sprint(d.mtime.UnixNano())] = "agrees" // two may be of the same tick
				}
			}
			data = readings.ReplaceAllString(data, "$1 reading")
			data = mtimes.ReplaceAllStringFunc(data, func(s string) string { return agrees[s] })
		}
		fmt.Fprintf(&b, "%s %v %q\n", f.path, f.mode, data)
	}
	return b.String()
}

// outcome is how a process ended.
type outcome struct {
	stdout, stderr string
	code           int
	killed         bool
}

// exec runs a program to its end. The caller is on the node.
func (n *node) exec(env []string, stdin []byte, argv ...string) (outcome, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = env
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	o := outcome{stdout: stdout.String(), stderr: stderr.String()}
	if cmd.ProcessState == nil {
		return o, err
	}
	o.code = cmd.ProcessState.ExitCode()
	status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	o.killed = status.Signaled() && status.Signal() == syscall.SIGKILL
	return o, nil
}
