package lab

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Versions says which Kubernetes and which container runtime a cluster is made of, where those are not the tests' own.
// The zero value is the tests' own.
type Versions struct {
	Kubernetes string // such as 1.33
	Runtime    string // such as containerd-1.7 or crio
}

// kubernetesVersions are the versions besides that of the tests. Each is built from its own go.mod in build/kubernetes,
// made by copying the requirements and replacements of k8s.io/kubernetes and "go mod tidy": 4 to 7 minutes on two
// processors.
var kubernetesVersions = map[string]string{"1.33": "1.33.13", "1.34": "1.34.10", "1.35": "1.35.8", "1.36": "1.36.3"}

// containerdVersions are those besides the tests' own, with the version of their configuration file. The go.mod of each
// in build/containerd pins it.
var containerdVersions = map[string]int{"1.7": 2, "2.0": 3, "2.2": 3}

// What the tests' own components are called among them.
const (
	TestedKubernetes = "1.37"
	TestedRuntime    = "containerd-2.4"
)

// What go.mod in build/kubernetes and in build/kubeproxy pin.
const (
	KubernetesVersion = "1.37.1"
	kubeProxyVersion  = "1.36.3" // the version skew policy allows an older one
)

// Flags of API servers, of [ClusterOptions.APIServerArgs].
var (
	// WebhooksByEndpoint has webhooks called by their Endpoints: the lab has no kube-proxy.
	WebhooksByEndpoint = []string{"--enable-aggregator-routing=true"}
	// BetaPolicies has MutatingAdmissionPolicies served where they are off by default: by 1.34 and 1.35.
	BetaPolicies = []string{"--feature-gates=MutatingAdmissionPolicy=true",
		"--runtime-config=admissionregistration.k8s.io/v1beta1=true"}
)

const (
	containerdPrefix = "containerd-"
	crioRuntime      = "crio"
)

// crioComponent is CRI-O, with pinns, which it starts, and copyimg, by which its tests load images. It needs conmon.
var crioComponent = component{
	name: crioRuntime, dir: "build/crio", sources: []string{"build/crio"}, pkg: "tool", cgo: true,
	tags:     "containers_image_ostree_stub exclude_graphdriver_btrfs btrfs_noversion containers_image_openpgp seccomp",
	packages: []string{"conmon", "gcc", "libc6-dev", "libseccomp-dev", "pkg-config"},
	finish:   compilePinns,
}

func compilePinns(dir string) error {
	ctx := context.Background()
	module, err := moduleDir(ctx, "build/crio", "github.com/cri-o/cri-o/pkg/config")
	if err != nil {
		return err
	}
	sources, err := filepath.Glob(filepath.Join(module, "../../pinns/src/*.c"))
	if err != nil {
		return err
	}
	args := append([]string{"-std=c99", "-Os", "-static", "-o", filepath.Join(dir, "pinns")}, sources...)
	if out, err := exec.CommandContext(ctx, "gcc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("compiling pinns: %w\n%s", err, out)
	}
	return nil
}

// components returns what these versions need besides the tests' own components.
func (v Versions) components() (kubernetes, runtime component, err error) {
	if k := v.Kubernetes; k != "" && k != TestedKubernetes {
		version, ok := kubernetesVersions[k]
		if !ok {
			return kubernetes, runtime, fmt.Errorf("there is no Kubernetes %q: it is %s or one of %s", k, TestedKubernetes,
				strings.Join(slices.Sorted(maps.Keys(kubernetesVersions)), ", "))
		}
		file := filepath.Join("build", "kubernetes", k)
		kubernetes = component{
			name: "kubernetes-" + k, dir: "build/kubernetes", modfile: k + ".mod",
			sources: []string{file + ".mod", file + ".sum", "build/kubernetes/main.go"}, pkg: ".", parallel: 2,
			ldflags: kubernetesVersion(version), finish: linkKubernetes,
		}
	}
	switch name := v.Runtime; {
	case name == "" || name == TestedRuntime:
	case name == crioRuntime:
		runtime = crioComponent
	default:
		version, ok := strings.CutPrefix(name, containerdPrefix)
		if _, known := containerdVersions[version]; !ok || !known {
			return kubernetes, runtime, fmt.Errorf("there is no runtime %q: it is %s, %s or %s with one of %s", name,
				TestedRuntime, crioRuntime, containerdPrefix, strings.Join(slices.Sorted(maps.Keys(containerdVersions)), ", "))
		}
		file := filepath.Join("build", "containerd", version)
		runtime = nodeComponents[0]
		runtime.name, runtime.modfile = name, version+".mod"
		runtime.sources = []string{file + ".mod", file + ".sum"}
	}
	return kubernetes, runtime, nil
}

// Check returns an error if there is no such version.
func (v Versions) Check() error {
	_, _, err := v.components()
	return err
}

// Build builds the components of a cluster of these versions that the cache lacks, see [BuildCluster].
func (v Versions) Build(ctx context.Context) (ClusterBin, error) {
	kubernetes, runtime, err := v.components()
	if err != nil {
		return ClusterBin{}, err
	}
	bin, err := BuildCluster(ctx)
	if err != nil || kubernetes.name+runtime.name == "" {
		return bin, err
	}
	others := slices.DeleteFunc([]component{kubernetes, runtime}, func(c component) bool { return c.name == "" })
	dirs, err := buildAll(ctx, others...)
	if err != nil {
		return ClusterBin{}, err
	}
	bin.Kubernetes = cmp.Or(dirs[kubernetes.name], bin.Kubernetes)
	bin.setRuntime(runtime, dirs)
	return bin, nil
}

// BuildNode builds the components of a node with this runtime that the cache lacks, see [Build].
func (v Versions) BuildNode(ctx context.Context) (Bin, error) {
	_, runtime, err := v.components()
	if err != nil {
		return Bin{}, err
	}
	bin, err := Build(ctx)
	if err != nil || runtime.name == "" {
		return bin, err
	}
	dirs, err := buildAll(ctx, runtime)
	if err != nil {
		return Bin{}, err
	}
	bin.setRuntime(runtime, dirs)
	return bin, nil
}

func (b *Bin) setRuntime(runtime component, dirs map[string]string) {
	if runtime.name == crioRuntime {
		b.CRIO = dirs[crioRuntime]
	} else {
		b.Containerd = cmp.Or(dirs[runtime.name], b.Containerd)
	}
}

// containerdConfig is the version of containerd's configuration file, 0 if the newest.
func (v Versions) containerdConfig() int {
	return containerdVersions[strings.TrimPrefix(v.Runtime, containerdPrefix)]
}
