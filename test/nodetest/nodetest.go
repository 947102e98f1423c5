// Package nodetest is what the tests of pkg/node and of the packages below it share: network namespaces to work in,
// a clock that a test moves, and a container runtime that a test makes list, change and fail.
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

// Main runs the tests in namespaces of their own for processes, mounts and network: the agent looks at every process
// of the machine, refuses to judge where it may not, and changes the machine's neighbours.
func Main(m *testing.M) {
	if os.Getenv(inside) != "" {
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "mounting /proc:", err)
			os.Exit(1)
		}
		if err := loopbackUp(); err != nil { // the tests' API server listens there
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

// Netns makes a network namespace, mounted under a name in dir as a runtime does it.
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

// onThread runs f on a thread that ends afterwards.
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

// Unmount ends a namespace that no process is in.
func Unmount(t testing.TB, path string) {
	t.Helper()
	must.Do(t, unix.Unmount(path, unix.MNT_DETACH))
	must.Do(t, os.Remove(path))
}

// Configure gives a namespace addresses, as the main plugin does.
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

// Process runs a process in a namespace until the returned function ends it.
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

// NewClock returns a clock in the first boot of a machine.
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

// Wall is the time for people.
func (c *Clock) Wall() time.Time {
	now, _ := c.Now()
	return now.Wall
}

// Pass moves the clock.
func (c *Clock) Pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now.Wall, c.now.Boot = c.now.Wall.Add(d), c.now.Boot+d
}

// SetWall moves the wall clock alone, as people do.
func (c *Clock) SetWall(to time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now.Wall = to
}
