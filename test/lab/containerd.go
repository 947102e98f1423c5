package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/test/lab/internal/cgroups"
)

// The sockets of containerd in a node.
const (
	CRISocket = "/run/containerd/containerd.sock"
	NRISocket = "/run/nri/nri.sock"
)

// containerdConfig is containerd's default except for the network, NRI, registries (see StartRegistry), an image that
// is never pulled, and a root without CAP_SYS_RESOURCE, which cannot lower an oom_score_adj. The version of the file is
// containerd's.
func containerdConfig(o NodeOptions) string {
	if o.containerdConfig == 2 {
		return fmt.Sprintf(`version = 2

[plugins.'io.containerd.grpc.v1.cri']
  sandbox_image = '%s'
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true

[plugins.'io.containerd.grpc.v1.cri'.registry]
  config_path = '/etc/containerd/certs.d'

[plugins.'io.containerd.grpc.v1.cri'.cni]
  max_conf_num = %d

[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  base_runtime_spec = '%s'

[plugins.'io.containerd.nri.v1.nri']
  disable = %t
`, PauseImage, o.interfaces(), containerSpecFile, o.NoNRI)
	}
	return fmt.Sprintf(`version = %d

[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '%s'

[plugins.'io.containerd.cri.v1.images'.registry]
  config_path = '/etc/containerd/certs.d'

[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
  max_conf_num = %d

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  sandboxer = 'podsandbox'
  base_runtime_spec = '%s'

[plugins.'io.containerd.nri.v1.nri']
  disable = %t
`, cmp.Or(o.containerdConfig, 4), PauseImage, o.interfaces(), containerSpecFile, o.NoNRI)
}

const containerSpecFile = "/etc/containerd/container.json"

// containerSpec is containerd's base specification of every container: its default, plus a hook that shows the
// container its node's boot ID. That is a file in the node's /proc, and a container has its own /proc.
func containerSpec(ctx context.Context, bin Bin) ([]byte, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(bin.Containerd, "ctr"), "oci", "spec").Output()
	if err != nil {
		return nil, fmt.Errorf("ctr oci spec: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(out, &spec); err != nil {
		return nil, fmt.Errorf("reading the output of ctr oci spec: %w", err)
	}
	// Without a file containerd sets this itself.
	spec.Process.Rlimits, spec.Process.ApparmorProfile, spec.Linux.Seccomp = nil, "", nil
	spec.Hooks = &specs.Hooks{CreateContainer: []specs.Hook{bootIDHook}}
	return json.Marshal(spec)
}

// bootIDHook runs among the node's mounts and in the container's root.
var bootIDHook = specs.Hook{Path: "/usr/bin/mount", Args: []string{
	"mount", "--no-mtab", "--bind", "/proc/sys/kernel/random/boot_id", "proc/sys/kernel/random/boot_id",
}}

func (o NodeOptions) interfaces() int { return max(o.Interfaces, 1) }

// criSocket is the socket of the node's runtime.
func (n *Node) criSocket() string {
	if n.bin.CRIO != "" {
		return CRIOSocket
	}
	return CRISocket
}

// StartContainerd starts containerd, waits until it can run pods and loads the lab's images if they are missing. On a
// node with CRI-O it and the methods below do so with CRI-O.
func (n *Node) StartContainerd(ctx context.Context) error {
	if n.running() {
		return errors.New("containerd is already running")
	}
	program := "/opt/lab/containerd/containerd"
	if n.bin.CRIO != "" {
		program = labCRIO + crioRuntime
	}
	p, err := n.Start("containerd", nil, program)
	if err != nil {
		return err
	}
	conn, err := dialCRI(n.Path(n.criSocket()))
	if err != nil {
		return errors.Join(err, p.Kill())
	}
	n.mu.Lock()
	n.containerd, n.conn = p, conn
	n.mu.Unlock()
	// A containerd that cannot start exits at once: stop waiting for its socket then.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.Done():
			cancel(fmt.Errorf("containerd ended: %w, see its log", p.Wait()))
		case <-ctx.Done():
		}
	}()
	err = n.waitCNI(ctx)
	if err == nil {
		err = n.loadImages(ctx)
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		log, _ := os.ReadFile(p.Log)
		return fmt.Errorf("starting containerd: %w\n%s", err, log)
	}
	return nil
}

func dialCRI(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		// The socket appears within a tenth of a second; by default gRPC retries only after a second.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}))
}

// CRI returns the runtime service of the node's containerd.
func (n *Node) CRI() runtimeapi.RuntimeServiceClient {
	return runtimeapi.NewRuntimeServiceClient(n.client())
}

func (n *Node) client() grpc.ClientConnInterface {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.conn == nil {
		return noConn{}
	}
	return n.conn
}

// noConn stands in for a containerd that is not running.
type noConn struct{}

var errNoContainerd = errors.New("containerd is not running")

func (noConn) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	return errNoContainerd
}

func (noConn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errNoContainerd
}

func (n *Node) running() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.containerd != nil
}

// Containerd returns the running containerd; nil if there is none.
func (n *Node) Containerd() *Process {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.containerd
}

// StopContainerd stops containerd with SIGTERM, as an upgrade does. Pods keep running.
func (n *Node) StopContainerd() error { return n.endContainerd(syscall.SIGTERM) }

// KillContainerd ends containerd with SIGKILL, as a crash does. Pods keep running.
func (n *Node) KillContainerd() error { return n.endContainerd(syscall.SIGKILL) }

func (n *Node) endContainerd(sig syscall.Signal) error {
	n.mu.Lock()
	p, conn := n.containerd, n.conn
	n.containerd, n.conn = nil, nil
	n.mu.Unlock()
	if p == nil {
		return errNoContainerd
	}
	err := p.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	if err == nil {
		<-p.Done()
	}
	return errors.Join(err, conn.Close())
}

// RestartContainerd stops containerd and starts it again.
func (n *Node) RestartContainerd(ctx context.Context) error {
	if err := n.StopContainerd(); err != nil {
		return err
	}
	return n.StartContainerd(ctx)
}

// WipeContainerd loses containerd's entire state: it kills containerd, its shims and the pods, and empties its folders.
// The pods' network namespaces stay mounted, and CNI plugins keep their state. StartContainerd starts afresh.
func (n *Node) WipeContainerd() error {
	if n.running() {
		if err := n.KillContainerd(); err != nil {
			return err
		}
	}
	if err := n.killPods(); err != nil {
		return err
	}
	dirs := []string{"/run/containerd", "/var/lib/containerd"}
	if n.bin.CRIO != "" {
		dirs = crioDirs
	}
	mounts, err := n.mountsBelow(dirs...) // the root file systems of the pods
	if err != nil {
		return err
	}
	err = inside(n.Pid(), unix.CLONE_NEWNS, func() error {
		for _, m := range mounts {
			if err := unix.Unmount(m, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmounting %s: %w", m, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(n.Path(dir))
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := os.RemoveAll(filepath.Join(n.Path(dir), e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// mountsBelow returns the mount points below these folders of the node, the latest first.
func (n *Node) mountsBelow(dirs ...string) ([]string, error) {
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", n.Pid()))
	if err != nil {
		return nil, err
	}
	var mounts []string
	for line := range strings.Lines(string(table)) {
		point := strings.Fields(line)[4]
		for _, dir := range dirs {
			if strings.HasPrefix(point, dir+"/") {
				mounts = append(mounts, point)
			}
		}
	}
	slices.Reverse(mounts)
	return mounts, nil
}

// killPods kills the shims and the pods' processes and waits until they are gone.
func (n *Node) killPods() error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		pids := cgroups.Procs(n.id)
		processes, err := n.Processes()
		if err != nil {
			return err
		}
		for pid, comm := range processes {
			if comm == "containerd-shim" || comm == "conmon" {
				pids = append(pids, pid)
			}
		}
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("pod processes do not exit: %v", pids)
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have exited
		}
	}
}

// WaitCNI waits until containerd has loaded the CNI configurations on the disk.
func (n *Node) WaitCNI(ctx context.Context) error { return n.waitCNI(ctx) }

// waitCNI waits until containerd answers and has loaded the CNI configurations on the disk.
func (n *Node) waitCNI(ctx context.Context) error {
	for {
		r, err := n.CRI().Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
		switch {
		// containerd listens before its CRI plugin has started. Before 2.0 it has no code for that.
		case status.Code(err) == codes.Unavailable || status.Code(err) == codes.Unimplemented:
		case strings.HasSuffix(status.Convert(err).Message(), "server is not initialized yet"):
		case err != nil:
			return err
		case n.bin.CRIO != "":
			return n.crioReads(ctx)
		default:
			loaded, err := n.loadedNetworks(r)
			if err != nil {
				return err
			}
			if loaded {
				return nil
			}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("containerd has not loaded the CNI configuration: %w, it says %s",
				ctx.Err(), r.GetInfo()["lastCNILoadStatus"])
		}
	}
}

// loadedNetworks reports whether containerd with this status has the CNI configurations on the disk.
func (n *Node) loadedNetworks(r *runtimeapi.StatusResponse) (bool, error) {
	loaded, err := loadedConfigs(r)
	if err != nil {
		return false, err
	}
	want, err := n.cniConfigs()
	return slices.Equal(loaded, want), err
}

// loadedConfigs returns the configuration lists that containerd has loaded, in order.
func loadedConfigs(r *runtimeapi.StatusResponse) ([]string, error) {
	var config struct {
		Networks []struct {
			IFName string
			Config struct{ Source string }
		}
	}
	if err := json.Unmarshal([]byte(r.Info["cniconfig"]), &config); err != nil {
		return nil, fmt.Errorf("reading containerd's status: %w", err)
	}
	var sources []string
	for _, w := range config.Networks {
		if w.IFName != "lo" { // containerd's own
			sources = append(sources, w.Config.Source)
		}
	}
	return sources, nil
}

// cniConfigs returns, in order, the configuration lists on the disk for containerd to load.
func (n *Node) cniConfigs() ([]string, error) {
	files, err := os.ReadDir(n.Path(cniDir)) // sorted by name
	if err != nil {
		return nil, err
	}
	var sources []string
	for _, f := range files {
		if len(sources) == n.options.interfaces() {
			break
		}
		if path.Ext(f.Name()) != ".conflist" {
			continue
		}
		data, err := os.ReadFile(path.Join(n.Path(cniDir), f.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue // an agent may have removed it
		}
		if err != nil {
			return nil, err
		}
		sources = append(sources, string(data))
	}
	return sources, nil
}

// loadImages imports the lab's images unless containerd has them, and waits until they appear in CRI.
func (n *Node) loadImages(ctx context.Context) error {
	images := runtimeapi.NewImageServiceClient(n.client())
	has := func(ref string) (bool, error) {
		r, err := images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: ref}})
		return r.GetImage() != nil, err
	}
	imported := false
	for _, ref := range []string{PauseImage, WebImage} {
		for {
			ok, err := has(ref)
			if err != nil {
				return err
			}
			if ok {
				break
			}
			if !imported {
				err := n.importImages(ctx, "/opt/lab/images/"+imagesFile, []string{PauseImage, WebImage})
				if err != nil {
					return fmt.Errorf("importing images: %w", err)
				}
				imported = true
				continue
			}
			// CRI is notified by an event.
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

// importImages loads a docker-archive, a file of the node, of these images.
func (n *Node) importImages(ctx context.Context, archive string, refs []string) error {
	if n.bin.CRIO != "" {
		return n.importIntoCRIO(ctx, archive, refs)
	}
	_, err := n.Run(ctx, "/opt/lab/containerd/ctr", "-n", "k8s.io", "images", "import", archive)
	return err
}
