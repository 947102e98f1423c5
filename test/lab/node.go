package lab

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/stayput/stayput/test/lab/internal/cgroups"
)

// NodeOptions configure a node. The zero value is a node with NRI and one bridge network, 10.88.0.0/16 by stock
// host-local.
type NodeOptions struct {
	// Name is the host name; "node" if empty.
	Name string
	// Networks is the CNI configuration. Nil means one [Network] with its defaults.
	Networks []Network
	// Interfaces is how many networks, in the order of their file names, a pod is attached to; 1 if 0, containerd's
	// default.
	Interfaces int
	// Runtime is the container runtime, as in Versions, empty if the tests' own.
	Runtime string
	// NoNRI starts the runtime without NRI.
	NoNRI bool
	// CNIPlugins are plugin binaries to install besides the stock ones, such as [Product].Plugin.
	CNIPlugins []string
	// Idle leaves starting containerd to [Node.StartContainerd].
	Idle bool

	containerdConfig int  // version of its configuration file; 4 if 0
	pauses           bool // CRI-O runs the pause of every pod too, which answers requests

	binds   map[string]string   // additional read-only folders: path in the node -> path on the machine
	connect func(pid int) error // connects the node to others, nil if it has only its own wire
}

// Node is a machine with its own disk that can run pods. Its methods may be called concurrently, except those that
// start or stop the node or containerd.
type Node struct {
	id      string // names the folder and the cgroups
	dir     string
	options NodeOptions
	bin     Bin

	close func() error

	networkFiles []string // SetNetworks wrote them

	mu         sync.Mutex
	closed     bool
	release    func() error // of holdInotify; nil before and after
	init       *initProcess // nil while the power is off
	containerd *Process
	conn       *grpc.ClientConn
}

// initProcess is pid 1.
type initProcess struct {
	cmd  *exec.Cmd
	life io.Closer // closing this end of the pipe ends the node
	done chan struct{}
}

// stockCNI are the plugins of the cni component; nodes find them in /opt/cni/bin.
var stockCNI = []string{"bridge", "host-local", "loopback", "macvlan", "portmap", "ptp", "tuning"}

// StartNode boots a node and, unless o.Idle, starts containerd and waits until it can run pods. The caller must close
// the node.
func StartNode(ctx context.Context, o NodeOptions) (*Node, error) {
	if os.Geteuid() != 0 {
		return nil, errNotRoot
	}
	v := Versions{Runtime: o.Runtime}
	bin, err := v.BuildNode(ctx)
	if err != nil {
		return nil, err
	}
	o.containerdConfig, o.pauses = v.containerdConfig(), true
	sweep()
	return startNode(ctx, bin, o)
}

var errNotRoot = errors.New("the lab makes namespaces, mounts and cgroups: run it as root")

func startNode(ctx context.Context, bin Bin, o NodeOptions) (*Node, error) {
	if o.Name == "" {
		o.Name = "node"
	}
	if o.Networks == nil {
		o.Networks = []Network{{}}
	}
	id, err := owned(o.Name)
	if err != nil {
		return nil, err
	}
	n := &Node{id: id, dir: filepath.Join(os.TempDir(), id), options: o, bin: bin}
	n.close = atEnd(n.end)
	if err := n.start(ctx); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *Node) start(ctx context.Context) error {
	release, err := holdInotify()
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.release = release
	n.mu.Unlock()
	if err := n.makeDisk(ctx); err != nil {
		return err
	}
	if err := n.SetNetworks(ctx, n.options.Networks...); err != nil {
		return err
	}
	if err := n.Boot(ctx); err != nil {
		return err
	}
	if n.options.Idle {
		return nil
	}
	return n.StartContainerd(ctx)
}

// binds are the machine's folders mounted read-only into a node.
func (n *Node) binds() map[string]string {
	binds := map[string]string{
		"/usr":                "/usr",
		"/opt/lab/containerd": n.bin.Containerd,
		"/opt/lab/runc":       n.bin.Runc,
		"/opt/lab/cni":        n.bin.CNI,
		"/opt/lab/images":     filepath.Dir(n.bin.Images),
	}
	if n.bin.CRIO != "" {
		binds[strings.TrimSuffix(labCRIO, "/")] = n.bin.CRIO
	}
	maps.Copy(binds, n.options.binds)
	return binds
}

// kubeletSysctls are those that a kubelet sets and that have no network namespace. A node mounts its own files over
// them, so that the machine's values never change.
var kubeletSysctls = map[string]string{
	"vm/overcommit_memory":      "0",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "0",
	"kernel/panic_on_oops":      "0",
	"kernel/keys/root_maxkeys":  "200",
	"kernel/keys/root_maxbytes": "20000",
}

// writeSysctls writes the files of the kubeletSysctls, with their values at boot, and returns their paths.
func (n *Node) writeSysctls() (map[string]string, error) {
	files := map[string]string{}
	for name, value := range kubeletSysctls {
		if !exists(filepath.Join("/proc/sys", name)) {
			continue // not in this kernel
		}
		file := filepath.Join(n.dir, "sysctl", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return nil, err
		}
		files[name] = file
	}
	return files, nil
}

// makeDisk lays out a freshly installed machine's root.
func (n *Node) makeDisk(ctx context.Context) error {
	spec, err := containerSpec(ctx, n.bin)
	if err != nil {
		return err
	}
	dirs := []string{
		"dev", "proc", "run", "sys", "root", "tmp",
		"etc/cni/net.d", "etc/containerd", "etc/nri/conf.d", "opt/cni/bin", "opt/nri/plugins",
		"var/lib/cni", "var/lib/containerd", "var/lib/stayput", "var/log/pods", "var/tmp",
	}
	for target := range n.binds() {
		dirs = append(dirs, target)
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(n.disk(dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.Mkdir(filepath.Join(n.dir, "log"), 0o755); err != nil {
		return err
	}
	// Relative, so that they also resolve from outside.
	links := map[string]string{"var/run": "../run"}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		if exists(filepath.Join("/usr", dir)) {
			links[dir] = "usr/" + dir
		}
	}
	for _, plugin := range stockCNI {
		links["opt/cni/bin/"+plugin] = "../../lab/cni/" + plugin
	}
	for link, target := range links {
		if err := os.Symlink(target, n.disk(link)); err != nil {
			return err
		}
	}
	files := map[string]string{
		"/etc/passwd":                 "root:x:0:0:root:/root:/bin/sh\n",
		"/etc/group":                  "root:x:0:\n",
		"/etc/hosts":                  "127.0.0.1 localhost\n::1 localhost\n",
		"/etc/hostname":               n.options.Name + "\n",
		"/etc/resolv.conf":            "",
		"/etc/containerd/config.toml": containerdConfig(n.options),
		containerSpecFile:             string(spec),
	}
	if n.bin.CRIO != "" {
		own, err := crioFiles(n.options)
		if err != nil {
			return err
		}
		maps.Copy(files, own)
		err = n.replace(crioRunc, 0o755, func(f *os.File) error {
			_, err := f.WriteString(crioRuncScript)
			return err
		})
		if err != nil {
			return err
		}
	}
	for name, content := range files {
		if err := n.WriteFile(name, []byte(content)); err != nil {
			return err
		}
	}
	for _, plugin := range n.options.CNIPlugins {
		if err := n.Install(plugin, path.Join("/opt/cni/bin", filepath.Base(plugin))); err != nil {
			return err
		}
	}
	return nil
}

// disk maps a node's path to its place on the machine.
func (n *Node) disk(name string) string { return filepath.Join(n.dir, "disk", name) }

// Path maps an absolute path of the node to one usable by this process. /run, /proc and /sys exist only while the node
// is up.
func (n *Node) Path(name string) string {
	name = path.Clean(name)
	if rest, ok := strings.CutPrefix(name, "/var/run/"); ok {
		name = "/run/" + rest
	}
	for _, volatile := range []string{"/run", "/proc", "/sys"} {
		if name == volatile || strings.HasPrefix(name, volatile+"/") {
			return fmt.Sprintf("/proc/%d/root%s", n.Pid(), name)
		}
	}
	return n.disk(name)
}

// Pid is the node's pid 1 as seen by this process, 0 while the power is off. /proc/<pid>/ns holds the node's
// namespaces.
func (n *Node) Pid() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.init == nil {
		return 0
	}
	return n.init.cmd.Process.Pid
}

// WriteFile writes a file of the node atomically, creating its folder if needed.
func (n *Node) WriteFile(name string, data []byte) error {
	return n.replace(name, 0o644, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// Install copies an executable of the machine to the node.
func (n *Node) Install(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	return n.replace(to, 0o755, func(f *os.File) error {
		_, err := io.Copy(f, src)
		return err
	})
}

func (n *Node) replace(name string, mode os.FileMode, fill func(*os.File) error) error {
	target := n.Path(name)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	// Otherwise a process forked by another goroutine would hold the file open for writing until its exec, and running it
	// would fail with ETXTBSY.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	// The leading dot and the missing ending keep containerd from taking it for a CNI configuration.
	f, err := os.CreateTemp(filepath.Dir(target), ".lab")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	defer f.Close()
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), target)
}

// Boot switches the power on: a new boot ID, an empty /run, no processes. StartNode does it once; after
// [Node.PowerLoss] it is up to the caller.
func (n *Node) Boot(ctx context.Context) error {
	bootID := filepath.Join(n.dir, "boot_id")
	if err := os.WriteFile(bootID, []byte(newUUID()+"\n"), 0o444); err != nil {
		return err
	}
	sysctls, err := n.writeSysctls()
	if err != nil {
		return err
	}
	orders, err := json.Marshal(map[string]any{
		"Root": n.disk("/"), "Hostname": n.options.Name, "BootID": bootID, "Sysctls": sysctls,
		"Binds": n.binds(), "Cgroup": n.id,
	})
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return errors.New("the node is closed")
	}
	if n.init != nil {
		return errors.New("the node is up")
	}
	cmd := exec.Command(n.bin.NodeInit)
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Setsid:     true, // the terminal's Ctrl-C is for this process only
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("booting %s: %w", n.options.Name, err)
	}
	_, _ = stdin.Write(append(orders, '\n')) // if it fails, so does reading
	line, err := bufio.NewReader(stdout).ReadString('\n')
	p := &initProcess{cmd: cmd, life: stdin, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // killed, hence an error
		close(p.done)
	}()
	if line != "ready\n" {
		_ = cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("booting %s: %w: %s", n.options.Name, err, strings.TrimSpace(stderr.String()))
	}
	n.init = p
	connect := n.options.connect
	if connect == nil {
		connect = addWire
	}
	if err := errors.Join(setUpNetwork(p.cmd.Process.Pid), connect(p.cmd.Process.Pid)); err != nil {
		return fmt.Errorf("booting %s: %w", n.options.Name, err)
	}
	return nil
}

// Uplink is the node's network interface, one end of a veth pair. On a node without a cluster the other end, [Wire], is
// in the node, so that packets cannot leave it. macvlan networks use it as their master.
const (
	Uplink = "uplink"
	Wire   = "wire"
)

// setUpNetwork prepares the network namespace of a node.
func setUpNetwork(pid int) error {
	err := inside(pid, unix.CLONE_NEWNET, func() error {
		// /proc/sys/net shows the reader's network namespace. Without duplicate address detection a bridge's gateway
		// addresses are usable at once, not after a second or two.
		for name, value := range map[string]string{"disable_ipv6": "0", "accept_dad": "0"} {
			for _, conf := range []string{"all", "default"} {
				if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+conf+"/"+name, []byte(value), 0); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return withNetlink(pid, func(h *netlink.Handle) error { return setUp(h, "lo") })
}

// addWire adds a standalone node's interface.
func addWire(pid int) error {
	return withNetlink(pid, func(h *netlink.Handle) error {
		uplink := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: Uplink}, PeerName: Wire}
		if err := h.LinkAdd(uplink); err != nil {
			return fmt.Errorf("adding %s: %w", Uplink, err)
		}
		return errors.Join(setUp(h, Uplink), setUp(h, Wire))
	})
}

// withNetlink runs f with a handle in the process's network namespace.
func withNetlink(pid int, f func(*netlink.Handle) error) error {
	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	return f(h)
}

func setUp(h *netlink.Handle, name string) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("setting %s up: %w", name, err)
	}
	return nil
}

// PowerLoss kills every process of the node at once. Its disk survives; /run and memory are lost. Boot switches it on
// again.
func (n *Node) PowerLoss() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.init == nil {
		return nil
	}
	if n.conn != nil {
		_ = n.conn.Close()
		n.conn = nil
	}
	// The kernel kills a pid namespace's processes along with its pid 1, and the namespaces go with them.
	if err := n.init.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-n.init.done
	_ = n.init.life.Close()
	n.init, n.containerd = nil, nil
	return cgroups.Remove(n.id, 5*time.Second)
}

// Reboot is a power loss, a boot and a start of containerd.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.PowerLoss(); err != nil {
		return err
	}
	if err := n.Boot(ctx); err != nil {
		return err
	}
	return n.StartContainerd(ctx)
}

// Close ends the node and removes everything that belongs to it. It may be called again.
func (n *Node) Close() error { return n.close() }

// removeAll removes a directory in which a copy of a log may still be made.
func removeAll(dir string) (err error) {
	for range 50 {
		if err = os.RemoveAll(dir); !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

func (n *Node) end() error {
	n.mu.Lock()
	n.closed = true
	release := n.release
	n.release = nil
	n.mu.Unlock()
	err := errors.Join(n.PowerLoss(), removeAll(n.dir))
	if release != nil {
		err = errors.Join(err, release())
	}
	return err
}

// Processes returns the processes in the node's pid namespace except pid 1, with the pids that this process sees: pid
// -> command.
func (n *Node) Processes() (map[int]string, error) {
	init := n.Pid()
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", init))
	if err != nil {
		return nil, err
	}
	entries, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	found := map[int]string{}
	for _, entry := range entries {
		// On an error the process has exited.
		if ns, err := os.Readlink(entry + "/ns/pid"); err != nil || ns != own {
			continue
		}
		comm, err := os.ReadFile(entry + "/comm")
		if err != nil {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(entry), "%d", &pid); err == nil && pid != init {
			found[pid] = strings.TrimSpace(string(comm))
		}
	}
	return found, nil
}

func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
