package nodetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
)

// ErrRuntime is an error for Runtime.Fail.
var ErrRuntime = errors.New("the runtime is upset")

// Runtime is the part of CRI that the agent calls. A real one cannot be made to list what a test needs, to change it
// between two calls, or to fail.
type Runtime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	mu        sync.Mutex
	sandboxes []*runtimeapi.PodSandbox
	netns     map[string]string
	ips       map[string][]string // of a sandbox
	config    string              // as containerd reports it; empty for another runtime
	name      string              // as Version has it, empty if it has none
	err       error
	says      func(id string, verbose bool) error
}

// StartRuntime serves a runtime on a socket.
func StartRuntime(t testing.TB, socket string) *Runtime {
	t.Helper()
	l, err := net.Listen("unix", socket)
	must.Do(t, err)
	r := &Runtime{netns: map[string]string{}, ips: map[string][]string{}}
	s := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(s, r)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return r
}

func (r *Runtime) ListPodSandbox(
	context.Context, *runtimeapi.ListPodSandboxRequest,
) (*runtimeapi.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &runtimeapi.ListPodSandboxResponse{Items: r.sandboxes}, r.err
}

func (r *Runtime) PodSandboxStatus(
	_ context.Context, q *runtimeapi.PodSandboxStatusRequest,
) (*runtimeapi.PodSandboxStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	if r.says != nil {
		if err := r.says(q.PodSandboxId, q.Verbose); err != nil {
			return nil, err
		}
	}
	network := &runtimeapi.PodSandboxNetworkStatus{}
	for i, ip := range r.ips[q.PodSandboxId] {
		if i == 0 {
			network.Ip = ip
			continue
		}
		network.AdditionalIps = append(network.AdditionalIps, &runtimeapi.PodIP{Ip: ip})
	}
	return &runtimeapi.PodSandboxStatusResponse{
		Status: &runtimeapi.PodSandboxStatus{Id: q.PodSandboxId, Network: network},
		Info: map[string]string{"info": fmt.Sprintf(
			`{"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":%q}]}}}`, r.netns[q.PodSandboxId])},
	}, nil
}

func (r *Runtime) Status(ctx context.Context, q *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	if r.config == "" {
		return r.UnimplementedRuntimeServiceServer.Status(ctx, q)
	}
	return &runtimeapi.StatusResponse{Info: map[string]string{"config": r.config}}, nil
}

// Run makes the runtime list a running sandbox.
func (r *Runtime) Run(id string, pod ledger.Pod, annotations map[string]string, netns string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.netns[id] = netns
	r.sandboxes = append(r.sandboxes, &runtimeapi.PodSandbox{
		Id: id, State: runtimeapi.PodSandboxState_SANDBOX_READY, Annotations: annotations,
		Metadata: &runtimeapi.PodSandboxMetadata{Namespace: pod.Namespace, Name: pod.Name, Uid: pod.UID},
	})
}

// Forget removes a sandbox from the runtime's list.
func (r *Runtime) Forget(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sandboxes = slices.DeleteFunc(r.sandboxes, func(s *runtimeapi.PodSandbox) bool { return s.Id == id })
}

// Fail makes every call fail with err, until Fail(nil).
func (r *Runtime) Fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

// SetAddrs sets the addresses that the runtime reports for a sandbox.
func (r *Runtime) SetAddrs(id string, ips ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ips[id] = ips
}

// SetNetns sets the netns path that the runtime reports for a sandbox.
func (r *Runtime) SetNetns(id, path string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.netns[id] = path
}

// SetConfig makes the runtime report a configuration as containerd does.
func (r *Runtime) SetConfig(config string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.config = config
}

func (r *Runtime) Version(ctx context.Context, q *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.name == "" {
		return r.UnimplementedRuntimeServiceServer.Version(ctx, q)
	}
	return &runtimeapi.VersionResponse{RuntimeName: r.name}, r.err
}

// SetName makes the runtime say its name.
func (r *Runtime) SetName(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.name = name
}

// BeforeStatus calls f before each status of a sandbox, which fails with f's error. Requests for its namespaces are
// verbose.
func (r *Runtime) BeforeStatus(f func(id string, verbose bool) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.says = f
}
