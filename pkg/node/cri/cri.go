// Package cri asks the container runtime, by CRI, which sandboxes it knows, where their network namespaces are, and how
// it is configured. It never acts, but to stop a sandbox that the cluster no longer has.
package cri

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// callTimeout bounds one call. A runtime that is slower is asked again at the next reconciliation.
const callTimeout = 10 * time.Second

// maxMessage is kubelet's limit for CRI messages: a full node with long annotations passes gRPC's default of 4 MiB.
const maxMessage = 16 << 20

// Client is the connection to the container runtime. It is made at the first call and given up when idle.
type Client struct {
	conn    *grpc.ClientConn
	client  runtimeapi.RuntimeServiceClient
	peerPID atomic.Int32
	socket  string
	root    string // where the node's files are seen

	// Restarted is called when another process than before answers on the socket, from any goroutine; nil: nobody asks.
	// Set it before the first call.
	Restarted func()
}

// Root is where a process in the node's PID namespace sees the node's files, also those that no volume brings into its
// container.
const Root = "/proc/1/root"

// KnownSockets are those of runtimes and distributions that serve CRI.
var KnownSockets = []string{
	"/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock", "/var/run/crio/crio.sock", "/run/crio/crio.sock",
	"/run/cri-dockerd.sock",
}

// elsewhere says, if there is no socket where the runtime should have one, where there is.
func (c *Client) elsewhere() string {
	if _, err := os.Stat(c.socket); !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	for _, other := range KnownSockets {
		if info, err := os.Stat(filepath.Join(c.root, other)); err == nil && info.Mode()&fs.ModeSocket != 0 {
			return fmt.Sprintf("%s does not exist, but %s does: set --cri-socket to that", c.socket, other)
		}
	}
	return fmt.Sprintf("%s does not exist", c.socket)
}

// New returns a client of the runtime that listens on a socket.
func New(socket string) (*Client, error) {
	c := &Client{socket: socket, root: Root}
	conn, err := grpc.NewClient("passthrough:///unix",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
			if err == nil {
				pid := peerPID(conn)
				if was := c.peerPID.Swap(pid); was != pid && was != 0 && c.Restarted != nil {
					c.Restarted()
				}
			}
			return conn, err
		}),
		grpc.WithIdleTimeout(time.Minute),
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10),
		// A runtime that restarts is back within seconds; gRPC's own back-off would reach two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
				MaxDelay: 3 * time.Second},
			MinConnectTimeout: callTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, fmt.Errorf("CRI client for %s: %w", socket, err)
	}
	c.conn, c.client = conn, runtimeapi.NewRuntimeServiceClient(conn)
	return c, nil
}

// Close closes the connection. Calls fail from then on.
func (c *Client) Close() { c.conn.Close() }

// PID returns the process that listens on the socket, as our PID namespace sees it; 0 if it does not.
func (c *Client) PID() int { return int(c.peerPID.Load()) }

func peerPID(conn net.Conn) int32 {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if cerr != nil || err != nil {
		return 0
	}
	return cred.Pid
}

// Sandbox is a pod sandbox as the runtime lists it.
type Sandbox struct {
	ID          string // the containerID of CNI
	Pod         ledger.Pod
	Annotations map[string]string
	Labels      map[string]string
	Ready       bool

	// Addrs and AddrsErr are of WithAddrs: the addresses of a sandbox that is ready and not on the host's network, or
	// why they are not known.
	Addrs    []netip.Addr
	AddrsErr error
}

// Sandboxes lists every sandbox that the runtime knows, by ID. A sandbox that is being created is missing.
func (c *Client) Sandboxes(ctx context.Context) (map[string]Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := c.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		if there := c.elsewhere(); there != "" {
			err = fmt.Errorf("%s: %w", there, err)
		}
		return nil, fmt.Errorf("CRI ListPodSandbox: %w", err)
	}
	all := make(map[string]Sandbox, len(r.Items))
	for _, s := range r.Items {
		m := s.GetMetadata()
		all[s.Id] = Sandbox{
			ID: s.Id, Annotations: s.Annotations, Labels: s.Labels,
			Pod:   ledger.Pod{Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUid()},
			Ready: s.State == runtimeapi.PodSandboxState_SANDBOX_READY,
		}
	}
	return all, nil
}

// WithAddrs lists the sandboxes of the runtime on a socket, those that are ready with their addresses.
func WithAddrs(ctx context.Context, socket string) (map[string]Sandbox, error) {
	c, err := New(socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, callTimeout/2)
	defer cancel()
	all, err := c.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for id, s := range all {
		if !s.Ready {
			continue
		}
		// A sandbox that has ended meanwhile has no addresses to compare.
		r, err := c.client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		switch {
		case status.Code(err) == codes.NotFound:
		case err != nil:
			s.AddrsErr = err
		case r.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() != runtimeapi.NamespaceMode_NODE:
			s.Addrs = addrsOf(r.GetStatus().GetNetwork())
		}
		all[id] = s
	}
	return all, ctx.Err()
}

func addrsOf(s *runtimeapi.PodSandboxNetworkStatus) (addrs []netip.Addr) {
	ips := []string{s.GetIp()}
	for _, more := range s.GetAdditionalIps() {
		ips = append(ips, more.GetIp())
	}
	for _, ip := range ips {
		if a, err := netip.ParseAddr(ip); err == nil {
			addrs = append(addrs, a.Unmap())
		}
	}
	return addrs
}

// CNI returns what the runtime says of its CNI configuration: containerd all of it, others only who they are.
func (c *Client) CNI(ctx context.Context) (cniconf.Runtime, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := c.client.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil && status.Code(err) != codes.Unimplemented {
		return cniconf.Runtime{}, fmt.Errorf("CRI Status: %w", err)
	}
	v, err := c.client.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil && status.Code(err) != codes.Unimplemented {
		return cniconf.Runtime{}, fmt.Errorf("CRI Version: %w", err)
	}
	var config struct {
		CNI struct {
			BinDir     string // of containerd 1
			BinDirs    []string
			ConfDir    string
			MaxConfNum *int
		}
	}
	if json.Unmarshal([]byte(r.GetInfo()["config"]), &config) != nil {
		return cniconf.Runtime{Name: v.GetRuntimeName()}, nil
	}
	all := cniconf.Runtime{
		Name: v.GetRuntimeName(), ConfDir: config.CNI.ConfDir, BinDirs: config.CNI.BinDirs,
		MaxConfNum: config.CNI.MaxConfNum,
	}
	if config.CNI.BinDir != "" {
		all.BinDirs = append(all.BinDirs, config.CNI.BinDir)
	}
	return all, nil
}

// Stop stops a sandbox: its containers end, and its network namespace goes. A sandbox that the runtime does not know is
// no error.
func (c *Client) Stop(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := c.client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("CRI StopPodSandbox: %w", err)
	}
	return nil
}

// Netns returns the path of a sandbox's network namespace; empty if that is the host's.
func (c *Client) Netns(ctx context.Context, id string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := c.client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		return "", fmt.Errorf("CRI PodSandboxStatus: %w", err)
	}
	if r.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() == runtimeapi.NamespaceMode_NODE {
		return "", nil
	}
	// containerd and CRI-O both have the OCI spec in here.
	var info struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string }
			}
		}
	}
	if err := json.Unmarshal([]byte(r.Info["info"]), &info); err != nil {
		return "", fmt.Errorf("CRI PodSandboxStatus: verbose info: %w", err)
	}
	for _, ns := range info.RuntimeSpec.Linux.Namespaces {
		if ns.Type == "network" {
			return ns.Path, nil
		}
	}
	return "", nil
}
