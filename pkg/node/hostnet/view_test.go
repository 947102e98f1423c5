package hostnet

import (
	"errors"
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
	if _, err := Observe(t.Context(), nil, 0); err == nil {
		t.Error("a view without the runtime's process")
	}
}

// observed takes a view, and has it closed.
func observed(t *testing.T, dir string) *View {
	t.Helper()
	v, err := Observe(t.Context(), []string{dir}, os.Getpid())
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
			if users := observed(t, dir).Users(addr); len(users) != 1 || users[0].Path != path {
				t.Fatalf("mounted: %+v", users)
			}
			kill := keep(t, path)
			nodetest.Unmount(t, path)
			users := observed(t, dir).Users(addr)
			if len(users) != 1 || users[0].Err != nil || !strings.HasPrefix(users[0].Path, "/proc/") {
				t.Errorf("without its mount: %+v", users)
			}
			kill()
			must.Eventually(t, "it is gone", func() bool { return len(observed(t, dir).Users(addr)) == 0 })
		})
	}
}

// A container may make namespaces for itself, and any address in them.
func TestANamespaceThatAUserHasMadeIsKnownByItsProcesses(t *testing.T) {
	addr := netip.MustParseAddr("10.6.0.1")
	cmd := exec.Command("sh", "-c", "ip addr add 10.6.0.1/32 dev lo && exec sleep 1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{Size: 1}}, GidMappings: []syscall.SysProcIDMap{{Size: 1}},
	}
	must.Do(t, cmd.Start())
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	root := nodetest.Netns(t, t.TempDir(), "cni-1") // of the host's user namespace
	nodetest.Configure(t, root, addr)
	nodetest.Process(t, root)
	nodetest.Unmount(t, root)
	var users []*Space
	must.Eventually(t, "both have the address, and ip has ended", func() bool {
		users = observed(t, t.TempDir()).Users(addr)
		return len(users) == 2 && slices.ContainsFunc(users, func(u *Space) bool { return u.Process == cmd.Process.Pid })
	})
	for _, u := range users {
		own := u.Process == cmd.Process.Pid
		if is := u.OwnedBy(func(cgroups string) bool { return cgroups != "" }); is != own {
			t.Errorf("%s is its processes' own: %t, want %t", u.Path, is, own)
		}
		if u.OwnedBy(func(string) bool { return false }) {
			t.Errorf("%s is that of processes in another cgroup", u.Path)
		}
	}
}

func TestANamespaceWhoseAddressesChangeAllTheTimeHidesNoOther(t *testing.T) {
	dir, addr := t.TempDir(), netip.MustParseAddr("10.6.0.1")
	flaps, other := nodetest.Netns(t, dir, "flaps"), nodetest.Netns(t, dir, "other")
	nodetest.Configure(t, other, addr)
	defer nodetest.Flap(t, flaps)()
	for range 20 {
		v := observed(t, dir)
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
