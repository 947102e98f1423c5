package lab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bin says where the built components are.
type Bin struct {
	Containerd string // folder with containerd, containerd-shim-runc-v2 and ctr
	Runc       string // folder with runc
	CNI        string // folder with the stock CNI plugins
	NodeInit   string // pid 1 of a node
	Images     string // docker-archive with the pause and the web image
}

// A component is built by one go command into one cache folder, which is keyed by its sources.
type component struct {
	name     string
	dir      string   // below test/lab, where the go command runs
	sources  []string // below test/lab: files and folders that the key is made of
	pkg      string   // "tool": all tools of the go.mod in dir
	tests    bool     // the package's tests are built, not the package
	cgo      bool
	tags     string
	ldflags  string
	parallel int      // most compilers at once; 0: as many as there are processors
	packages []string // Debian packages the build needs
	finish   func(dir string) error
}

// nodeComponents are what a node is made of. The versions are pinned by the go.mod and go.sum of each component.
var nodeComponents = []component{
	{
		name: "containerd", dir: "build/containerd", sources: []string{"build/containerd"}, pkg: "tool",
		tags: "no_zfs no_btrfs no_devmapper",
	},
	{
		// Without seccomp the sandboxes of a kubelet, which asks for RuntimeDefault, would fail.
		name: "runc", dir: "build/runc", sources: []string{"build/runc"}, pkg: "tool",
		cgo: true, tags: "seccomp urfave_cli_no_docs netgo osusergo",
		ldflags:  "-linkmode external -extldflags -static",
		packages: []string{"gcc", "libc6-dev", "libseccomp-dev", "pkg-config"},
	},
	{name: "cni", dir: "build/cni", sources: []string{"build/cni"}, pkg: "tool"},
	{name: "nodeinit", dir: "nodeinit", sources: []string{"nodeinit", "internal/cgroups"}, pkg: "."},
	{name: "images", dir: "podimage", sources: []string{"podimage", "image.go"}, pkg: ".", finish: writeImages},
}

// flannelComponent is flannel's CNI plugin as it was when it moved out of containernetworking/plugins; the module it
// has become since is not to be had from the module proxy. What it does with IPAM is the same in both.
var flannelComponent = component{name: "flannel", dir: "build/flannel", sources: []string{"build/flannel"}, pkg: "tool"}

// BuildFlannel builds flannel's CNI plugin, unless the cache has it, and returns the path of the binary.
func BuildFlannel(ctx context.Context) (string, error) {
	dirs, err := buildAll(ctx, []component{flannelComponent})
	if err != nil {
		return "", err
	}
	return filepath.Join(dirs["flannel"], "flannel"), nil
}

// clusterComponents are what a cluster has besides its nodes.
var clusterComponents = []component{
	{
		name: "etcd", dir: "build/etcd", sources: []string{"build/etcd"}, pkg: "tool",
		finish: func(dir string) error {
			return os.Rename(filepath.Join(dir, "server"), filepath.Join(dir, "etcd"))
		},
	},
	{
		// It takes minutes and, with two compilers at once, 2.4 GB.
		name: "kubernetes", dir: "build/kubernetes", sources: []string{"build/kubernetes"}, pkg: ".", parallel: 2,
		ldflags: kubernetesVersion,
		finish: func(dir string) error {
			for _, program := range kubernetesPrograms {
				if err := os.Symlink("kubernetes", filepath.Join(dir, program)); err != nil {
					return err
				}
			}
			return nil
		},
	},
}

// helmComponents are what renders and installs the chart.
var helmComponents = []component{
	{name: "helm", dir: "build/helm", sources: []string{"build/helm"}, pkg: "tool", parallel: 2},
}

// conformanceComponents are what upstream's own tests need. Few want them, and they take as long as all others.
var conformanceComponents = []component{
	{
		name: "e2e", dir: "build/kubernetes", sources: []string{"build/kubernetes"}, pkg: "k8s.io/kubernetes/test/e2e", tests: true,
		parallel: 2, ldflags: kubernetesVersion,
	},
	{
		name: "agnhost", dir: "build/kubernetes", sources: []string{"build/kubernetes", "conformance.go", "image.go"},
		pkg:      "k8s.io/kubernetes/test/images/agnhost",
		packages: []string{"busybox-static", "curl", "dash", "netcat-openbsd"},
		finish:   writeConformanceImages,
	},
	{name: "crictl", dir: "build/critools", sources: []string{"build/critools"}, pkg: "tool"},
	{
		name: "critest", dir: "build/critools", sources: []string{"build/critools"}, pkg: "sigs.k8s.io/cri-tools/cmd/critest", tests: true,
	},
}

// kubernetesVersion is what Kubernetes' programs say of themselves; its modules do not know it.
const kubernetesVersion = "-X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1" +
	" -X k8s.io/component-base/version.gitMinor=36 -X k8s.io/component-base/version.gitTreeState=clean"

// kubernetesPrograms are the names that the program of the kubernetes component answers to.
var kubernetesPrograms = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"}

// Build builds what a node is made of, unless the cache has it. Several processes may call it at once.
func Build(ctx context.Context) (Bin, error) {
	dirs, err := buildAll(ctx, nodeComponents)
	if err != nil {
		return Bin{}, err
	}
	return Bin{
		Containerd: dirs["containerd"],
		Runc:       dirs["runc"],
		CNI:        dirs["cni"],
		NodeInit:   filepath.Join(dirs["nodeinit"], "nodeinit"),
		Images:     filepath.Join(dirs["images"], imagesFile),
	}, nil
}

// ClusterBin says where the built components of a cluster are.
type ClusterBin struct {
	Bin
	Kubernetes string // folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl
	Etcd       string // folder with etcd, etcdctl and etcdutl
}

// BuildCluster builds what a cluster is made of, nodes included, unless the cache has it. With an empty cache
// that takes five minutes. Several processes may call it at once.
func BuildCluster(ctx context.Context) (ClusterBin, error) {
	bin, err := Build(ctx)
	if err != nil {
		return ClusterBin{}, err
	}
	dirs, err := buildAll(ctx, clusterComponents)
	if err != nil {
		return ClusterBin{}, err
	}
	return ClusterBin{Bin: bin, Kubernetes: dirs["kubernetes"], Etcd: dirs["etcd"]}, nil
}

// ConformanceBin says where upstream's own tests are.
type ConformanceBin struct {
	E2E     string // e2e.test, the tests of Kubernetes
	Images  string // docker-archive with the images that many of them run
	Critest string // critest, the tests of container runtimes
	Crictl  string // crictl
}

// BuildConformance builds upstream's own tests, unless the cache has them. With an empty cache that takes as long as
// [BuildCluster]. Several processes may call it at once.
func BuildConformance(ctx context.Context) (ConformanceBin, error) {
	dirs, err := buildAll(ctx, conformanceComponents)
	if err != nil {
		return ConformanceBin{}, err
	}
	return ConformanceBin{
		E2E:     filepath.Join(dirs["e2e"], "e2e.test"),
		Images:  filepath.Join(dirs["agnhost"], imagesFile),
		Critest: filepath.Join(dirs["critest"], "critest.test"),
		Crictl:  filepath.Join(dirs["crictl"], "crictl"),
	}, nil
}

// BuildHelm builds helm, unless the cache has it, and returns it. With an empty cache that takes some minutes.
func BuildHelm(ctx context.Context) (string, error) {
	dirs, err := buildAll(ctx, helmComponents)
	if err != nil {
		return "", err
	}
	return filepath.Join(dirs["helm"], "helm"), nil
}

// built keeps the folders of components for the next call in this process.
var built struct {
	sync.Mutex
	dirs map[string]string
}

// buildAll returns the folder of each component.
func buildAll(ctx context.Context, components []component) (map[string]string, error) {
	built.Lock()
	defer built.Unlock()
	if built.dirs == nil {
		built.dirs = map[string]string{}
	}
	missing := slices.DeleteFunc(slices.Clone(components), func(c component) bool { return built.dirs[c.name] != "" })
	if len(missing) == 0 {
		return maps.Clone(built.dirs), nil
	}
	root, goVersion, err := moduleRoot(ctx)
	if err != nil {
		return nil, err
	}
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	for _, c := range missing {
		dir, err := c.build(ctx, filepath.Join(root, "test", "lab"), cache, goVersion)
		if err != nil {
			return nil, fmt.Errorf("building %s: %w", c.name, err)
		}
		built.dirs[c.name] = dir
	}
	return maps.Clone(built.dirs), nil
}

// Product says where the binaries of this repository are.
type Product struct {
	Plugin     string // the CNI plugin, stayput
	Agent      string // the daemon, stayput-agent
	Controller string // stayput-controller; "" from BuildProduct
	Kubectl    string // kubectl-stayput; "" from BuildProduct
}

// BuildProduct builds the two programs of a node, stayput and stayput-agent, into dir, as they are released.
func BuildProduct(ctx context.Context, dir string) (Product, error) {
	return makeProduct(ctx, dir, "", "./cmd/stayput ./cmd/stayput-agent")
}

// BuildWholeProduct builds all programs of this repository into dir, as they are released.
func BuildWholeProduct(ctx context.Context, dir string) (Product, error) {
	return makeProduct(ctx, dir, "", "./cmd/...")
}

// BuildRelease builds all programs as those of a release, so that they differ from those of any other.
func BuildRelease(ctx context.Context, dir, version string) (Product, error) {
	return makeProduct(ctx, dir, version, "./cmd/...")
}

// makeProduct builds by the repository's Makefile, which knows how the programs are released. The programs of no
// version know their commit by themselves.
func makeProduct(ctx context.Context, dir, version, programs string) (Product, error) {
	root, _, err := moduleRoot(ctx)
	if err != nil {
		return Product{}, err
	}
	if _, err := exec.LookPath("make"); err != nil {
		if err := Need(ctx, "make"); err != nil {
			return Product{}, err
		}
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return Product{}, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Product{}, err
	}
	cmd := exec.CommandContext(ctx, "make", "--no-print-directory", "build", "GO=go", "BIN="+dir, "PROGRAMS="+programs, "VERSION="+version)
	cmd.Dir = root
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) } // which it hands on to the compiler
	// The flags of a make that has called us are not for this one.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKEOVERRIDES=", "GOFLAGS=", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return Product{}, fmt.Errorf("make build: %w\n%s", err, out)
	}
	program := func(name string) string {
		if path := filepath.Join(dir, name); exists(path) {
			return path
		}
		return ""
	}
	return Product{
		Plugin: program("stayput"), Agent: program("stayput-agent"),
		Controller: program("stayput-controller"), Kubectl: program("kubectl-stayput"),
	}, nil
}

func (c component) build(ctx context.Context, lab, cache, goVersion string) (string, error) {
	key, err := c.key(lab, goVersion)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, c.name+"-"+key)
	if exists(dir) {
		return dir, nil
	}
	unlock, err := lock(cache, c.name, "builds "+c.name)
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) { // another process has built it meanwhile
		return dir, nil
	}
	if err := Need(ctx, c.packages...); err != nil {
		return "", err
	}
	start := time.Now()
	progress("building %s", c.name)
	// A leftover of a build that was killed; nobody else is here while the lock is held.
	tmp := filepath.Join(cache, c.name+".tmp")
	if err := os.RemoveAll(tmp); err != nil {
		return "", err
	}
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return "", err
	}
	args := []string{"build"}
	if c.tests {
		args = []string{"test", "-c"}
	}
	args = append(args,
		"-o", tmp+"/", "-trimpath", "-buildvcs=false", "-tags", c.tags,
		"-ldflags", strings.TrimSpace("-s -w "+c.ldflags),
	)
	if c.parallel > 0 {
		args = append(args, "-p", strconv.Itoa(c.parallel))
	}
	args = append(args, c.pkg)
	if err := goCommand(ctx, filepath.Join(lab, c.dir), c.cgo, args...); err != nil {
		return "", err
	}
	if c.finish != nil {
		if err := c.finish(tmp); err != nil {
			return "", err
		}
	}
	if err := os.Rename(tmp, dir); err != nil {
		return "", err
	}
	progress("built %s in %.1f s", c.name, time.Since(start).Seconds())
	return dir, nil
}

// key is a hash of all that decides what the component becomes.
func (c component) key(lab, goVersion string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%v\n%s\n%s\n", goVersion, c.pkg, c.cgo, c.tags, c.ldflags)
	if c.tests {
		fmt.Fprintln(h, "tests")
	}
	for _, s := range c.sources {
		var files []string
		err := filepath.WalkDir(filepath.Join(lab, s), func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			return "", err
		}
		slices.Sort(files)
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, "%s %d\n%s", filepath.Base(f), len(data), data)
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

func goCommand(ctx context.Context, dir string, cgo bool, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	// The caller's flags and workspace are not part of the key.
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=0")
	if cgo {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", args[0], dir, err, out)
	}
	return nil
}

// moduleRoot returns the folder of this repository's go.mod, seen from the working directory, where go test
// and go run are, and the version of Go.
func moduleRoot(ctx context.Context) (root, goVersion string, err error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD", "GOVERSION").Output()
	if err != nil {
		return "", "", fmt.Errorf("go env: %w", err)
	}
	mod, version, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	root = filepath.Dir(mod)
	if !exists(filepath.Join(root, "test", "lab", "build")) {
		return "", "", errors.New("the lab is built from its sources: run this inside the repository")
	}
	return root, version, nil
}

// cacheDir returns the folder of what was built, made if needed.
func cacheDir() (string, error) {
	base := os.Getenv("STAYPUT_CACHE")
	if base == "" {
		user, err := os.UserCacheDir() // $XDG_CACHE_HOME, else $HOME/.cache
		if err != nil {
			return "", fmt.Errorf("no folder for the cache, set STAYPUT_CACHE: %w", err)
		}
		base = filepath.Join(user, "stayput")
	}
	dir, err := filepath.Abs(filepath.Join(base, "lab"))
	if err != nil {
		return "", err
	}
	return dir, os.MkdirAll(dir, 0o755)
}

// lock keeps other processes and goroutines from what this one does. The kernel releases it if this one dies.
func lock(dir, name, does string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		progress("waiting for another one that %s", does)
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			f.Close()
			return nil, err
		}
	}
	return func() { f.Close() }, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "lab: "+format+"\n", args...)
}
