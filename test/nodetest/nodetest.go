// Package nodetest has the fixtures of the tests of pkg/node and its subpackages: network namespaces, a clock that
// tests move, an API server, and a container runtime whose answers tests control.
package nodetest

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
)

// inside tells the test binary that it runs in its own namespaces.
const inside = "STAYPUT_TEST_INSIDE"

// flips tells it that it is a process of Flip.
const flips = "STAYPUT_TEST_FLIPS"

// Main runs the tests in process, mount and network namespaces of their own: the agent inspects every process of the
// machine, refuses to act if it may not, and changes the machine's neighbour tables.
func Main(m *testing.M) {
	if kind := os.Getenv(flips); kind != "" {
		fmt.Fprintln(os.Stderr, "changing descriptors:", flip(kind))
		os.Exit(1)
	}
	if os.Getenv(inside) != "" {
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "mounting /proc:", err)
			os.Exit(1)
		}
		if err := loopbackUp(); err != nil { // for the tests' API server
			fmt.Fprintln(os.Stderr, "loopback:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNET, Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "the tests make namespaces, as root:", err)
		os.Exit(1)
	}
}

func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// Netns creates a network namespace and mounts it in dir, as a runtime does.
func Netns(t testing.TB, dir, name string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	must.Do(t, os.WriteFile(path, nil, 0o644))
	must.Do(t, onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	}))
	t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// The main thread never ends: what onThread runs must not leave it in another namespace.
func init() { runtime.LockOSThread() }

// onThread runs f on a thread of its own.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// In runs f in the namespace at path.
func In(t testing.TB, path string, f func() error) {
	t.Helper()
	ns, err := os.Open(path)
	must.Do(t, err)
	defer ns.Close()
	must.Do(t, onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	}))
}

// Unmount removes a namespace without processes.
func Unmount(t testing.TB, path string) {
	t.Helper()
	must.Do(t, unix.Unmount(path, unix.MNT_DETACH))
	must.Do(t, os.Remove(path))
}

// Configure adds addresses to a namespace, as the main plugin does.
func Configure(t testing.TB, netns string, addrs ...netip.Addr) {
	t.Helper()
	In(t, netns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice())}); err != nil {
				return err
			}
		}
		return nil
	})
}

// Flap keeps changing the addresses of a namespace that has many, so that the kernel never gives a whole list of them,
// until stop is called.
func Flap(t testing.TB, netns string) (stop func()) {
	t.Helper()
	var many []netip.Addr
	for a := netip.MustParseAddr("198.18.0.1"); len(many) < 4000; a = a.Next() {
		many = append(many, a)
	}
	Configure(t, netns, many...)
	done, stopped := make(chan struct{}), make(chan error)
	go In(t, netns, func() error {
		lo, err := netlink.LinkByName("lo")
		a := &netlink.Addr{IPNet: netlink.NewIPNet(many[0].Prev().AsSlice())}
		for ; err == nil; err = netlink.AddrDel(lo, a) {
			select {
			case <-done:
				stopped <- nil
				return nil
			default:
			}
			if err = netlink.AddrAdd(lo, a); err != nil {
				break
			}
		}
		stopped <- err
		return err
	})
	stop = sync.OnceFunc(func() { close(done); must.Do(t, <-stopped) })
	t.Cleanup(stop)
	return stop
}

// HoldOpen has a process open a namespace without being in it; kill ends it.
func HoldOpen(t testing.TB, netns string) (kill func()) {
	t.Helper()
	f, err := os.Open(netns)
	must.Do(t, err)
	defer f.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{f}
	must.Do(t, cmd.Start())
	kill = sync.OnceFunc(func() { cmd.Process.Kill(); cmd.Wait() })
	t.Cleanup(kill)
	return kill
}

// Flip has a process without any right keep changing what its descriptors are: in turn a network namespace, and what
// kind says: a fifo that nobody writes to, a file or a socket. kill ends it.
func Flip(t testing.TB, kind string) (kill func()) {
	t.Helper()
	ready, report, err := os.Pipe()
	must.Do(t, err)
	defer ready.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Dir, cmd.ExtraFiles, cmd.Stderr = append(os.Environ(), flips+"="+kind), "/", []*os.File{report}, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, Pdeathsig: syscall.SIGKILL,
	}
	must.Do(t, cmd.Start())
	must.Do(t, report.Close())
	kill = sync.OnceFunc(func() { cmd.Process.Kill(); cmd.Wait() })
	t.Cleanup(kill)
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		t.Fatal("the process ended: ", err)
	}
	return kill
}

// flip is the process of Flip. Its third descriptor says when it has begun.
func flip(kind string) error {
	var other int
	var err error
	switch kind {
	case "fifo":
		var pair [2]int
		err = unix.Pipe2(pair[:], unix.O_CLOEXEC|unix.O_NONBLOCK)
		other = pair[0]
		_ = unix.Close(pair[1])
	case "socket":
		other, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	default:
		other, err = unix.Open("/etc/passwd", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return err
	}
	ns, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		for _, from := range []int{ns, other} {
			for fd := 100; fd < 300; fd++ {
				if err := unix.Dup3(from, fd, unix.O_CLOEXEC); err != nil && err != unix.EBUSY {
					return err
				}
			}
		}
		if first {
			if _, err := unix.Write(3, []byte{1}); err != nil {
				return err
			}
		}
	}
}

// Process starts a process in a namespace; kill ends it.
func Process(t testing.TB, netns string) (kill func()) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	In(t, netns, cmd.Start)
	kill = sync.OnceFunc(func() { cmd.Process.Kill(); cmd.Wait() })
	t.Cleanup(kill)
	return kill
}

// Clock stands still until a test moves it.
type Clock struct {
	mu  sync.Mutex
	now ledger.Instant
}

// NewClock returns a clock in a machine's first boot.
func NewClock() *Clock {
	return &Clock{
		now: ledger.Instant{Wall: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Boot: time.Hour, BootID: "boot-1"},
	}
}

// Now implements ledger.Clock.
func (c *Clock) Now() (ledger.Instant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now, nil
}

// Wall returns the wall clock's time.
func (c *Clock) Wall() time.Time {
	now, _ := c.Now()
	return now.Wall
}

// Pass moves the clock forward.
func (c *Clock) Pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now.Wall, c.now.Boot = c.now.Wall.Add(d), c.now.Boot+d
}

// SetWall sets the wall clock alone, as an administrator does.
func (c *Clock) SetWall(to time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now.Wall = to
}
