package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/test/lab/internal/cgroups"
)

// PodSpec is what a kubelet tells the runtime about a pod.
type PodSpec struct {
	Namespace   string // "default" if empty
	Name        string
	UID         string // a new one if empty, as for a recreated pod
	Attempt     uint32
	Annotations map[string]string
	Labels      map[string]string // besides kubelet's own
}

// Pod is a running sandbox.
type Pod struct {
	PodSpec
	ID    string       // of the sandbox; the containerID of CNI
	IPs   []netip.Addr // of the first interface, in the order of CNI's result
	NetNS string       // path in the node

	config *runtimeapi.PodSandboxConfig
}

// IP is the first address of the pod.
func (p Pod) IP() netip.Addr { return p.IPs[0] }

// RunPod runs a sandbox. Its pause process answers HTTP, see [Node.Get].
func (n *Node) RunPod(ctx context.Context, spec PodSpec) (Pod, error) {
	spec = spec.withDefaults()
	config := n.SandboxConfig(spec)
	r, err := n.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		return Pod{}, fmt.Errorf("running pod %s/%s: %w", spec.Namespace, spec.Name, err)
	}
	pod := Pod{PodSpec: spec, ID: r.PodSandboxId, config: config}
	status, err := n.PodStatus(ctx, pod.ID)
	if err != nil {
		return pod, err
	}
	if pod.IPs, err = addressesOf(status); err != nil {
		return pod, err
	}
	pod.NetNS, err = netNSOf(status)
	return pod, err
}

// addressesOf reads the addresses from a sandbox's status.
func addressesOf(status *runtimeapi.PodSandboxStatusResponse) ([]netip.Addr, error) {
	texts := []string{status.Status.GetNetwork().GetIp()}
	for _, more := range status.Status.GetNetwork().GetAdditionalIps() {
		texts = append(texts, more.Ip)
	}
	var ips []netip.Addr
	for _, s := range texts {
		ip, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("status of pod %s/%s: %w", status.Status.Metadata.Namespace, status.Status.Metadata.Name, err)
		}
		ips = append(ips, ip)
	}
	return ips, nil
}

func (s PodSpec) withDefaults() PodSpec {
	if s.Namespace == "" {
		s.Namespace = "default"
	}
	if s.UID == "" {
		s.UID = newUUID()
	}
	return s
}

// SandboxConfig returns RunPod's request, for callers of CRI.
func (n *Node) SandboxConfig(spec PodSpec) *runtimeapi.PodSandboxConfig {
	spec = spec.withDefaults()
	labels := map[string]string{
		"io.kubernetes.pod.namespace": spec.Namespace,
		"io.kubernetes.pod.name":      spec.Name,
		"io.kubernetes.pod.uid":       spec.UID,
	}
	maps.Copy(labels, spec.Labels)
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{
			Namespace: spec.Namespace, Name: spec.Name, Uid: spec.UID, Attempt: spec.Attempt,
		},
		Hostname:     spec.Name,
		LogDirectory: path.Join("/var/log/pods", spec.Namespace+"_"+spec.Name+"_"+spec.UID),
		Labels:       labels,
		Annotations:  spec.Annotations,
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: "/" + n.id,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				// One process namespace per container: kubelet's default.
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
			},
		},
	}
}

// netNSOf reads the network namespace from a verbose status; "" if the sandbox no longer has one.
func netNSOf(status *runtimeapi.PodSandboxStatusResponse) (string, error) {
	var info struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string }
			}
		}
	}
	if err := json.Unmarshal([]byte(status.Info["info"]), &info); err != nil {
		return "", fmt.Errorf("reading the status of a sandbox: %w", err)
	}
	for _, ns := range info.RuntimeSpec.Linux.Namespaces {
		if ns.Type == "network" {
			return ns.Path, nil
		}
	}
	return "", nil
}

// PodStatus returns a sandbox's verbose status: Info holds containerd's own details.
func (n *Node) PodStatus(ctx context.Context, id string) (*runtimeapi.PodSandboxStatusResponse, error) {
	return n.CRI().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
}

// Pods lists the sandboxes, including dead ones.
func (n *Node) Pods(ctx context.Context) ([]*runtimeapi.PodSandbox, error) {
	r, err := n.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	return r.GetItems(), err
}

// StopPod stops a sandbox, which calls CNI DEL.
func (n *Node) StopPod(ctx context.Context, id string) error {
	_, err := n.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

// RemovePod stops a sandbox, which calls CNI DEL again, and removes it.
func (n *Node) RemovePod(ctx context.Context, id string) error {
	_, err := n.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// DeletePod stops and removes a sandbox, as kubelet does for a deleted pod.
func (n *Node) DeletePod(ctx context.Context, id string) error {
	if err := n.StopPod(ctx, id); err != nil {
		return err
	}
	return n.RemovePod(ctx, id)
}

// RunContainer runs a container of [WebImage] in a pod and returns its ID.
func (n *Node) RunContainer(ctx context.Context, pod Pod, name string) (string, error) {
	c, err := n.CRI().CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod.ID, SandboxConfig: pod.config,
		Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: name},
			Image:    &runtimeapi.ImageSpec{Image: WebImage},
			LogPath:  name + ".log",
			Labels:   pod.config.Labels,
			Linux:    &runtimeapi.LinuxContainerConfig{},
		},
	})
	if err != nil {
		return "", fmt.Errorf("creating container %s of pod %s: %w", name, pod.Name, err)
	}
	if _, err := n.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return "", fmt.Errorf("starting container %s of pod %s: %w", name, pod.Name, err)
	}
	return c.ContainerId, nil
}

// KillPause kills a pod's pause process with SIGKILL and waits until containerd has noticed.
func (n *Node) KillPause(ctx context.Context, pod Pod) error {
	// A sandbox's ID is that of its pause container, and containerd names the cgroup after it.
	name := pod.ID
	if n.bin.CRIO != "" {
		name = "crio-" + name
	}
	pids := cgroups.Procs(filepath.Join(n.id, name))
	if len(pids) == 0 {
		return fmt.Errorf("pod %s has no pause process", pod.Name)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("killing the pause process of pod %s: %w", pod.Name, err)
		}
	}
	for {
		status, err := n.PodStatus(ctx, pod.ID)
		if err != nil {
			return err
		}
		if status.Status.State == runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
}

// Addresses returns the addresses configured in a network namespace of the node, by interface, except loopback and
// link-local ones.
func (n *Node) Addresses(netNS string) (map[string][]netip.Prefix, error) {
	return AddressesIn(n.Path(netNS))
}

// AddressesIn is [Node.Addresses] for a namespace by its path on this machine.
func AddressesIn(path string) (map[string][]netip.Prefix, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return nil, err
	}
	found := map[string][]netip.Prefix{}
	for _, link := range links {
		addrs, err := h.AddrList(link, netlink.FAMILY_ALL)
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			ip, _ := netip.AddrFromSlice(a.IP)
			ip = ip.Unmap()
			if ip.IsLoopback() || ip.IsLinkLocalUnicast() {
				continue
			}
			bits, _ := a.Mask.Size()
			found[link.Attrs().Name] = append(found[link.Attrs().Name], netip.PrefixFrom(ip, bits))
		}
	}
	return found, nil
}

// Dial connects from the node to an address.
func (n *Node) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return dialIn(ctx, fmt.Sprintf("/proc/%d/ns/net", n.Pid()), network, address)
}

// DialFrom is Dial from a pod.
func (n *Node) DialFrom(ctx context.Context, from Pod, network, address string) (net.Conn, error) {
	return dialIn(ctx, n.Path(from.NetNS), network, address)
}

// Listen listens on an address of the node.
func (n *Node) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return listenIn(ctx, fmt.Sprintf("/proc/%d/ns/net", n.Pid()), network, address)
}

// ListenIn is Listen in a pod.
func (n *Node) ListenIn(ctx context.Context, pod Pod, network, address string) (net.Listener, error) {
	return listenIn(ctx, n.Path(pod.NetNS), network, address)
}

func listenIn(ctx context.Context, ns, network, address string) (l net.Listener, err error) {
	err = insideNetNS(ns, func() error {
		l, err = new(net.ListenConfig).Listen(ctx, network, address)
		return err
	})
	return l, err
}

func dialIn(ctx context.Context, ns, network, address string) (conn net.Conn, err error) {
	err = insideNetNS(ns, func() error {
		// With a literal address the socket is created on this goroutine and stays in its namespace.
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Answer is a pod's description of itself over HTTP.
type Answer struct {
	Name  string       // host name, which is the pod's name
	Addrs []netip.Addr // all interfaces
	// Started is since when the answering process runs: a pod's sandboxes differ by it.
	Started time.Time
}

// Has reports whether the answering pod has the address.
func (a Answer) Has(ip netip.Addr) bool { return slices.Contains(a.Addrs, ip) }

// Get asks the pod with that address, on its pause process's port, from the node.
//
// The bridge plugin does not announce a pod that takes over another's address: Get waits while the node's neighbour
// table has the old MAC address, half a minute.
func (n *Node) Get(ctx context.Context, ip netip.Addr) (Answer, error) {
	return n.get(ctx, fmt.Sprintf("/proc/%d/ns/net", n.Pid()), ip)
}

// GetFrom is Get from another pod.
func (n *Node) GetFrom(ctx context.Context, from Pod, ip netip.Addr) (Answer, error) {
	return n.get(ctx, n.Path(from.NetNS), ip)
}

func (n *Node) get(ctx context.Context, ns string, ip netip.Addr) (Answer, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		// The transport's own context would let a dial go on once the request is given up: a thread for two minutes.
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return dialIn(ctx, ns, network, address)
		},
	}}
	// The pause process may not be listening yet when RunPodSandbox returns; the connection is refused then.
	var resp *http.Response
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+netip.AddrPortFrom(ip, pausePort).String(), nil)
		if err != nil {
			return Answer{}, err
		}
		resp, err = client.Do(req)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return Answer{}, err
		}
		time.Sleep(time.Millisecond)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, err
	}
	name, rest, _ := strings.Cut(string(body), "\n")
	started, err := time.Parse(time.RFC3339Nano, resp.Header.Get("Started"))
	if err != nil {
		return Answer{}, fmt.Errorf("answer of %s: %w", ip, err)
	}
	a := Answer{Name: name, Started: started}
	for line := range strings.Lines(rest) {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(line))
		if err != nil {
			return a, fmt.Errorf("answer of %s: %w", ip, err)
		}
		a.Addrs = append(a.Addrs, prefix.Addr())
	}
	return a, nil
}
