package hostnet

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
	"github.com/stayput/stayput/test/nodetest"
)

func TestMain(m *testing.M) { nodetest.Main(m) }

func TestThereIsNoViewWithoutTheHostsProcesses(t *testing.T) {
	if _, err := Observe(t.Context(), nil, 0, Question{}); err == nil {
		t.Error("a view without the runtime's process")
	}
}

// observed takes a view that answers for addresses, and has it closed.
func observed(t *testing.T, dir string, addrs ...netip.Addr) *View {
	t.Helper()
	return answers(t, dir, Question{Addrs: addrs})
}

func answers(t *testing.T, dir string, q Question) *View {
	t.Helper()
	v, err := Observe(t.Context(), []string{dir}, os.Getpid(), q)
	must.Do(t, err)
	v.Close()
	return v
}

func TestANamespaceThatOnlyAProcessKeepsIsInTheView(t *testing.T) {
	for how, keep := range map[string]func(testing.TB, string) func(){
		"the process is in it": nodetest.Process, "the process has it open": nodetest.HoldOpen,
	} {
		t.Run(how, func(t *testing.T) {
			dir, addr := t.TempDir(), netip.MustParseAddr("10.6.0.1")
			path := nodetest.Netns(t, dir, "cni-1")
			nodetest.Configure(t, path, addr)
			if users := observed(t, dir, addr).Users(addr); len(users) != 1 || users[0].Path != path {
				t.Fatalf("mounted: %+v", users)
			}
			kill := keep(t, path)
			nodetest.Unmount(t, path)
			users := observed(t, dir, addr).Users(addr)
			if len(users) != 1 || users[0].Err != nil || !strings.HasPrefix(users[0].Path, "/proc/") {
				t.Errorf("without its mount: %+v", users)
			}
			kill()
			must.Eventually(t, "it is gone", func() bool { return len(observed(t, dir, addr).Users(addr)) == 0 })
		})
	}
}

// A process may make namespaces for itself, with any address in them, and have them open by their descriptors. They are
// no pod's. That of a pod with a user namespace of its own is one of those that runtimes mount, or that was recorded.
func TestANamespaceThatAProcessHasMadeForItselfIsNoPods(t *testing.T) {
	addr, dir := netip.MustParseAddr("10.6.0.1"), t.TempDir()
	cmd := exec.Command("sh", "-c", "ip addr add 10.6.0.1/32 dev lo && exec sleep 1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{Size: 1}}, GidMappings: []syscall.SysProcIDMap{{Size: 1}},
	}
	must.Do(t, cmd.Start())
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	own := fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid)
	defer nodetest.HoldOpen(t, own)() // another process has it open
	must.Eventually(t, "it has the address", func() bool {
		missing, err := Missing(own, []netip.Addr{addr})
		return err == nil && len(missing) == 0
	})
	root := nodetest.Netns(t, t.TempDir(), "cni-1") // of the host's user namespace
	nodetest.Configure(t, root, addr)
	nodetest.Process(t, root)
	nodetest.Unmount(t, root)
	if users := observed(t, dir, addr).Users(addr); len(users) != 1 || users[0].Process == cmd.Process.Pid {
		t.Errorf("the address is used by %+v, want by the other namespace alone", users)
	}

	is, ok, err := ledger.SystemNetns{}.Identify(own)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	users := answers(t, dir, Question{Addrs: []netip.Addr{addr}, Netns: []ledger.Netns{is}}).Users(addr)
	if len(users) != 2 {
		t.Errorf("a recorded one is not among %+v", users)
	}
	mounted := filepath.Join(dir, "cni-2")
	must.Do(t, os.WriteFile(mounted, nil, 0o644))
	must.Do(t, unix.Mount(own, mounted, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(mounted, unix.MNT_DETACH) })
	if users := observed(t, dir, addr).Users(addr); len(users) != 2 {
		t.Errorf("a mounted one is not among %+v", users)
	}
}

// A descriptor may be a namespace when it is looked at, and something else when it is opened. A FIFO would be waited
// for, and a socket cannot be opened at all.
func TestADescriptorThatChangesMeanwhileLeadsToNoNamespace(t *testing.T) {
	dir, addr := t.TempDir(), netip.MustParseAddr("10.6.0.1")
	fifo := filepath.Join(dir, "fifo")
	must.Do(t, unix.Mkfifo(fifo, 0o600))
	path := nodetest.Netns(t, filepath.Join(dir), "cni-1")
	nodetest.Configure(t, path, addr)
	others := map[string]func() (int, error){
		"fifo":   func() (int, error) { return unix.Open(fifo, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0) },
		"file":   func() (int, error) { return unix.Open("/etc/passwd", unix.O_RDONLY|unix.O_CLOEXEC, 0) },
		"socket": func() (int, error) { return unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) },
		"another namespace": func() (int, error) {
			return unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		},
	}
	for name, open := range others {
		fd, err := open()
		must.Do(t, err)
		f, err := openNamespace(fmt.Sprintf("/proc/self/fd/%d", fd))
		if is := name == "another namespace"; err != nil || (f != nil) != is {
			t.Errorf("%s: opened %v, %v", name, f, err)
		}
		if f != nil {
			f.Close()
		}
		must.Do(t, unix.Close(fd))
	}
	if f, err := openNamespace(fifo); f != nil || err != nil { // it has no writer
		t.Errorf("a FIFO by its path: %v, %v", f, err)
	}
	for name := range others {
		if name == "another namespace" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			defer nodetest.Flip(t, name)()
			for range 20 {
				if users := observed(t, dir, addr).Users(addr); len(users) != 1 {
					t.Fatalf("the address is used by %+v", users)
				}
			}
		})
	}
}

// Whoever is in a namespace chooses how many addresses it has.
func TestAViewKeepsNoMoreOfANamespaceThanWasAskedFor(t *testing.T) {
	dir, addr := t.TempDir(), netip.MustParseAddr("10.6.0.1")
	path := nodetest.Netns(t, dir, "cni-1")
	var many []netip.Addr
	for a := netip.MustParseAddr("10.9.0.0"); len(many) < 3000; a = a.Next() {
		many = append(many, a)
	}
	nodetest.Configure(t, path, append(many, addr, netip.MustParseAddr("fd06::1"))...)
	v := observed(t, dir, addr, netip.MustParseAddr("fd06::1"), netip.MustParseAddr("10.6.0.2"))
	if u := v.Users(addr); len(u) != 1 || !u[0].Shows(addr) || !u[0].Shows(netip.MustParseAddr("fd06::1")) ||
		u[0].Shows(netip.MustParseAddr("10.6.0.2")) || len(v.Users(netip.MustParseAddr("10.6.0.2"))) != 0 {
		t.Fatalf("the address is used by %+v", u)
	}
	space := v.Users(addr)[0]
	if all, err := space.Addrs(); err == nil || len(all) > mostShown+2 {
		t.Errorf("%d addresses are kept, %v", len(all), err)
	}
	if v.Asked(many[0]) || !v.Asked(addr) {
		t.Error("it answers for what it was not asked")
	}
}

func TestANamespaceWhoseAddressesChangeAllTheTimeHidesNoOther(t *testing.T) {
	dir, addr := t.TempDir(), netip.MustParseAddr("10.6.0.1")
	flaps, other := nodetest.Netns(t, dir, "flaps"), nodetest.Netns(t, dir, "other")
	nodetest.Configure(t, other, addr)
	defer nodetest.Flap(t, flaps)()
	for range 20 {
		v := observed(t, dir, addr)
		for _, u := range v.Users(addr) {
			if is := u.Path == other; u.Shows(addr) != is || (u.Err == nil) != is {
				t.Fatalf("%s shows %s: %t, error %v", u.Path, addr, u.Shows(addr), u.Err)
			}
		}
		if !slices.ContainsFunc(v.Users(addr), func(u *Space) bool { return u.Path == other }) {
			t.Fatal("the other one is not among its users")
		}
	}
}

func TestOnlyTheRecordedNamespaceIsTakenDown(t *testing.T) {
	dir := t.TempDir()
	path := nodetest.Netns(t, dir, "cni-1")
	is, ok, err := ledger.SystemNetns{}.Identify(path)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	up := func(path string) (is bool) {
		nodetest.In(t, path, func() error {
			l, err := netlink.LinkByName("v0")
			if err == nil {
				is = l.Attrs().RawFlags&unix.IFF_UP != 0
			}
			return err
		})
		return is
	}
	link := func(path string) {
		nodetest.In(t, path, func() error {
			l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"}
			return errors.Join(netlink.LinkAdd(l), netlink.LinkSetUp(l))
		})
	}
	link(path)
	must.Do(t, Down(is))
	if up(path) {
		t.Error("the recorded one is up")
	}
	kill := nodetest.Process(t, path) // or the next one may have its number
	defer kill()
	nodetest.Unmount(t, path)
	nodetest.Netns(t, dir, "cni-1")
	link(path)
	if err := Down(is); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another one at its path: %v", err)
	}
	if !up(path) {
		t.Error("another one at its path was taken down")
	}
	own := filepath.Join(dir, "host")
	must.Do(t, os.WriteFile(own, nil, 0o644))
	must.Do(t, unix.Mount("/proc/self/ns/net", own, "", unix.MS_BIND, ""))
	t.Cleanup(func() { unix.Unmount(own, unix.MNT_DETACH) })
	if err := Down(ledger.Netns{Path: own}); err == nil {
		t.Error("the host's own was taken down")
	}
	must.Do(t, os.WriteFile(filepath.Join(dir, "left"), nil, 0o644))
	if err := Down(ledger.Netns{Path: filepath.Join(dir, "left")}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a mount point without a mount: %v", err)
	}
}

// In a pod the node's directory is mounted at /run/netns and at /var/run/netns, and no unmount comes through to the
// node.
func TestALeftoverNamespaceGoesFromTheNodeThoughTheAgentHasItTwice(t *testing.T) {
	dir := t.TempDir()
	dirs := map[string]string{}
	for _, name := range []string{"node", "run", "var-run"} {
		dirs[name] = filepath.Join(dir, name)
		must.Do(t, os.Mkdir(dirs[name], 0o755))
	}
	must.Do(t, unix.Mount("tmpfs", dirs["node"], "tmpfs", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(dirs["node"], unix.MNT_DETACH)) })
	must.Do(t, unix.Mount("", dirs["node"], "", unix.MS_SHARED, ""))
	left := filepath.Join(dirs["node"], "left")
	must.Do(t, os.WriteFile(left, nil, 0o644))
	mounts := []string{dirs["run"], dirs["var-run"]}

	done := make(chan error)
	mounted := make(chan error)
	go func() { // in a mount namespace of its own, which ends with this thread
		runtime.LockOSThread()
		err := errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""))
		for _, dir := range mounts {
			err = errors.Join(err, unix.Mount(dirs["node"], dir, "", unix.MS_BIND, ""))
		}
		done <- errors.Join(err, unix.Unmount(dirs["node"], unix.MNT_DETACH))
		if err := <-mounted; err != nil {
			done <- err
			return
		}
		v := &View{dirs: mounts, roots: []string{""}}
		ns, ok, err := ledger.SystemNetns{}.Identify(filepath.Join(dirs["var-run"], "left"))
		if err == nil && !ok {
			err = errors.New("the namespace is not visible")
		}
		if err == nil {
			err = v.Remove(&Space{}, ns)
		}
		done <- err
	}()
	must.Do(t, <-done)
	err := unix.Mount("/proc/self/ns/net", left, "", unix.MS_BIND, "")
	mounted <- err
	must.Do(t, err)
	must.Do(t, <-done)
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still on the node: %v", err)
	}
}
