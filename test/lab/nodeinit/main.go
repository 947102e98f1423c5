// Nodeinit is pid 1 of a lab node. It is started in fresh namespaces, reads its orders from standard input,
// makes the node's folder its root, says "ready" and then only reaps. When standard input ends, because the
// lab closed the node or died, it kills everything in the node and exits.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab/internal/cgroups"
)

// orders is what the lab writes to standard input as one line of JSON.
type orders struct {
	Root     string            // the node's folder
	Hostname string            //
	BootID   string            // file to show as the boot ID
	Sysctls  map[string]string // path in /proc/sys -> file to show there, which takes what is written
	Binds    map[string]string // path in the node -> path on the machine, read-only
	Cgroup   string            // name of the top-level cgroup to remove at the end
}

func main() {
	in := bufio.NewReader(os.Stdin)
	o, err := setUp(in)
	if err != nil {
		fmt.Fprintln(os.Stderr, "nodeinit:", err)
		os.Exit(1)
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	// The node is not told to stop by signals, and a terminal's must not reach it by mistake.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	closed := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, in)
		close(closed)
	}()
	fmt.Println("ready")
	for {
		select {
		case <-children:
			for reap() {
			}
		case <-closed:
			tearDown(o)
			return
		}
	}
}

func setUp(in *bufio.Reader) (orders, error) {
	var o orders
	line, err := in.ReadBytes('\n')
	if err != nil {
		return o, fmt.Errorf("reading orders: %w", err)
	}
	if err := json.Unmarshal(line, &o); err != nil {
		return o, fmt.Errorf("reading orders: %w", err)
	}
	if os.Getpid() != 1 {
		return o, errors.New("not pid 1: start a node with lab.StartNode")
	}
	if err := syscall.Sethostname([]byte(o.Hostname)); err != nil {
		return o, fmt.Errorf("setting the host name: %w", err)
	}
	return o, enterRoot(o)
}

// enterRoot builds the node's mounts below o.Root and pivots into it.
func enterRoot(o orders) error {
	at := func(path string) string { return filepath.Join(o.Root, path) }
	type mount struct {
		source, target, fstype string
		flags                  uintptr
		data                   string
	}
	mounts := []mount{
		// Nothing mounted from here on may reach the machine, and nothing of the machine's may arrive.
		{"none", "/", "", syscall.MS_REC | syscall.MS_PRIVATE, ""},
		{o.Root, o.Root, "", syscall.MS_BIND, ""},
		{"proc", at("proc"), "proc", 0, ""},
		{o.BootID, at("proc/sys/kernel/random/boot_id"), "", syscall.MS_BIND, ""},
		// A new sysfs shows the interfaces of this network namespace, but comes without the cgroup mounts.
		{"sysfs", at("sys"), "sysfs", 0, ""},
		{"/sys/fs/cgroup", at("sys/fs/cgroup"), "", syscall.MS_BIND | syscall.MS_REC, ""},
		{"/dev", at("dev"), "", syscall.MS_BIND | syscall.MS_REC, ""},
		{"tmpfs", at("run"), "tmpfs", syscall.MS_NOSUID | syscall.MS_NODEV, "mode=755"},
	}
	for name, file := range o.Sysctls {
		mounts = append(mounts, mount{file, at(filepath.Join("proc/sys", name)), "", syscall.MS_BIND, ""})
	}
	for target, source := range o.Binds {
		mounts = append(mounts,
			mount{source, at(target), "", syscall.MS_BIND, ""},
			mount{"none", at(target), "", syscall.MS_BIND | syscall.MS_REMOUNT | syscall.MS_RDONLY, ""})
	}
	for _, m := range mounts {
		if err := syscall.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("mounting %s on %s: %w", m.source, m.target, err)
		}
	}
	// pivot_root(".", ".") stacks the old root over the new one, where it is detached.
	if err := os.Chdir(o.Root); err != nil {
		return err
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching the old root: %w", err)
	}
	// As on a machine: what is mounted later reaches the containers that asked for it.
	if err := syscall.Mount("none", "/", "", syscall.MS_REC|syscall.MS_SHARED, ""); err != nil {
		return fmt.Errorf("sharing the mounts: %w", err)
	}
	return os.Chdir("/")
}

// reap collects one dead child and says whether there was one.
func reap() bool {
	pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
	return pid > 0 || err == syscall.EINTR
}

// tearDown kills what is left and removes the cgroups. The lab does the same when it can; this is for the
// case that it died. The exit of pid 1 then takes the namespaces and their mounts.
func tearDown(o orders) {
	// One kill is enough: a fork that is under way fails when its process is killed.
	_ = syscall.Kill(-1, syscall.SIGKILL)       // ESRCH: nothing was left
	_ = cgroups.Remove(o.Cgroup, 5*time.Second) // what stays is swept by the next run
}
