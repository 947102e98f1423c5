package lab

import (
	"bytes"
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

// Bin holds the paths of the built components of a node.
type Bin struct {
	Containerd string // folder with containerd, containerd-shim-runc-v2 and ctr
	Runc       string // folder with runc
	CNI        string // folder with the stock CNI plugins
	NodeInit   string // pid 1 of a node
	Images     string // docker-archive with the pause and the web image
	CRIO       string // folder with crio and copyimg if that is the nodes' runtime
}

// A component is built by one go command into one cache folder keyed by its sources.
type component struct {
	name     string
	dir      string   // below test/lab, where the go command runs
	modfile  string   // in dir, instead of go.mod
	sources  []string // below test/lab: files and folders hashed into the key
	pkg      string   // "tool": all tools of the go.mod in dir
	tests    bool     // build the package's tests, not the package
	cgo      bool
	tags     string
	ldflags  string
	parallel int      // limit of concurrent compilers, 0 if one per processor
	packages []string // Debian packages required by the build
	finish   func(dir string) error
}

// nodeComponents make up a node. The go.mod and go.sum of each component pin its version.
var nodeComponents = []component{
	{
		name: "containerd", dir: "build/containerd", pkg: "tool",
		sources: []string{"build/containerd/go.mod", "build/containerd/go.sum"},
		tags:    "no_zfs no_btrfs no_devmapper",
	},
	{
		// Without seccomp, sandboxes fail under a kubelet: it asks for RuntimeDefault.
		name: "runc", dir: "build/runc", sources: []string{"build/runc"}, pkg: "tool",
		cgo: true, tags: "seccomp urfave_cli_no_docs netgo osusergo",
		ldflags:  "-linkmode external -extldflags -static",
		packages: []string{"gcc", "libc6-dev", "libseccomp-dev", "pkg-config"},
	},
	{name: "cni", dir: "build/cni", sources: []string{"build/cni"}, pkg: "tool"},
	{name: "nodeinit", dir: "nodeinit", sources: []string{"nodeinit", "internal/cgroups"}, pkg: "."},
	{name: "images", dir: "podimage", sources: []string{"podimage", "image.go"}, pkg: ".", finish: writeImages},
}

// flannelComponent is flannel's CNI plugin from before it left containernetworking/plugins: the module proxy lacks
// today's module. Both use IPAM in the same way.
var flannelComponent = component{name: "flannel", dir: "build/flannel", sources: []string{"build/flannel"}, pkg: "tool"}

// flanneldComponent is flannel's daemon. Its backend udp needs C. One of the modules that its clouds need is newer here
// than it asks for: the module proxy lacks that version.
var flanneldComponent = component{
	name: "flanneld", dir: "build/flanneld", sources: []string{"build/flanneld"}, pkg: "tool", parallel: 2,
	cgo: true, tags: "netgo osusergo", ldflags: "-linkmode external -extldflags -static",
	packages: []string{"gcc", "libc6-dev"},
	finish: func(dir string) error {
		return os.Rename(filepath.Join(dir, "flannel"), filepath.Join(dir, "flanneld"))
	},
}

// proxyComponent is kube-proxy. Of the others' compiled packages it takes what it needs.
var proxyComponent = component{
	name: "kube-proxy", dir: "build/kubeproxy", sources: []string{"build/kubeproxy"}, pkg: "tool", parallel: 2,
	ldflags: kubernetesVersion(kubeProxyVersion),
}

// bandwidthComponent is the CNI plugin that limits pods' bandwidth, of the version of the others.
var bandwidthComponent = component{
	name: "bandwidth", dir: "build/cni", sources: []string{"build/cni"},
	pkg: "github.com/containernetworking/plugins/plugins/meta/bandwidth",
}

// clusterComponents make up a cluster, besides its nodes.
var clusterComponents = []component{
	{
		name: "etcd", dir: "build/etcd", sources: []string{"build/etcd"}, pkg: "tool",
		finish: func(dir string) error {
			return os.Rename(filepath.Join(dir, "server"), filepath.Join(dir, "etcd"))
		},
	},
	{
		// Takes minutes and, with two compilers at once, 2.4 GB.
		name: "kubernetes", dir: "build/kubernetes", sources: kubernetesSources, pkg: ".", parallel: 2,
		ldflags: kubernetesVersion(KubernetesVersion), finish: linkKubernetes,
	},
}

// kubernetesSources are those of the version that the tests run; versions.go has others.
var kubernetesSources = []string{
	"build/kubernetes/conformance.go", "build/kubernetes/go.mod", "build/kubernetes/go.sum", "build/kubernetes/main.go",
}

// helmComponent renders and installs the chart.
var helmComponent = component{
	name: "helm", dir: "build/helm", sources: []string{"build/helm"}, pkg: "tool", parallel: 2,
}

// linterComponent is golangci-lint, configured by .golangci.yml.
var linterComponent = component{
	name: "golangci-lint", dir: "build/golangci-lint", sources: []string{"build/golangci-lint"}, pkg: "tool",
}

// conformanceComponents are the upstream test suites. They take as long as all other components.
var conformanceComponents = []component{
	{
		name: "e2e", dir: "build/kubernetes", sources: kubernetesSources,
		pkg: "k8s.io/kubernetes/test/e2e", tests: true, parallel: 2, ldflags: kubernetesVersion(KubernetesVersion),
	},
	{
		name: "agnhost", dir: "build/kubernetes",
		sources:  slices.Concat(kubernetesSources, []string{"conformance.go", "image.go"}),
		pkg:      "k8s.io/kubernetes/test/images/agnhost",
		packages: []string{"busybox-static", "curl", "dash", "netcat-openbsd"},
		finish:   writeConformanceImages,
	},
	{name: "crictl", dir: "build/critools", sources: []string{"build/critools"}, pkg: "tool"},
	{
		name: "critest", dir: "build/critools", sources: []string{"build/critools"},
		pkg: "sigs.k8s.io/cri-tools/cmd/critest", tests: true,
	},
}

// kubernetesVersion are the linker's flags for the version that the Kubernetes programs report; their modules do not
// know it.
func kubernetesVersion(version string) string {
	const variable = "-X k8s.io/component-base/version."
	major, rest, _ := strings.Cut(version, ".")
	minor, _, _ := strings.Cut(rest, ".")
	return variable + "gitVersion=v" + version + " " + variable + "gitMajor=" + major +
		" " + variable + "gitMinor=" + minor + " " + variable + "gitTreeState=clean"
}

// kubernetesPrograms are the names that the kubernetes component's program runs under.
var kubernetesPrograms = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"}

func linkKubernetes(dir string) error {
	for _, program := range kubernetesPrograms {
		if err := os.Symlink("kubernetes", filepath.Join(dir, program)); err != nil {
			return err
		}
	}
	return nil
}

// Each Build function builds what the cache lacks, reports progress on stderr and returns the paths. Processes may call
// them concurrently: the first builds, the others wait.

// Build builds the components of a node.
func Build(ctx context.Context) (Bin, error) {
	dirs, err := buildAll(ctx, nodeComponents...)
	if err != nil {
		return Bin{}, err
	}
	return nodeBin(dirs), nil
}

func nodeBin(dirs map[string]string) Bin {
	return Bin{
		Containerd: dirs["containerd"],
		Runc:       dirs["runc"],
		CNI:        dirs["cni"],
		NodeInit:   filepath.Join(dirs["nodeinit"], "nodeinit"),
		Images:     filepath.Join(dirs["images"], imagesFile),
	}
}

// ClusterBin holds the paths of the built components of a cluster.
type ClusterBin struct {
	Bin
	Kubernetes string // folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl
	Etcd       string // folder with etcd, etcdctl and etcdutl
}

// BuildCluster builds the components of a cluster, nodes included: five minutes on two processors with an empty cache.
func BuildCluster(ctx context.Context) (ClusterBin, error) {
	dirs, err := buildAll(ctx, slices.Concat(nodeComponents, clusterComponents)...)
	if err != nil {
		return ClusterBin{}, err
	}
	return ClusterBin{Bin: nodeBin(dirs), Kubernetes: dirs["kubernetes"], Etcd: dirs["etcd"]}, nil
}

// BuildEverything builds everything the tests need except the upstream test suites.
func BuildEverything(ctx context.Context) error {
	all := slices.Concat(nodeComponents, clusterComponents, []component{helmComponent, flannelComponent, multusComponent})
	_, err := buildAll(ctx, all...)
	return err
}

// ConformanceBin holds the paths of the upstream test suites.
type ConformanceBin struct {
	E2E     string // e2e.test, the Kubernetes tests
	Images  string // docker-archive of the images they run
	Critest string // critest, the container runtime tests
	Crictl  string // crictl
}

// BuildConformance builds the upstream test suites. With an empty cache it takes as long as [BuildCluster].
func BuildConformance(ctx context.Context) (ConformanceBin, error) {
	dirs, err := buildAll(ctx, conformanceComponents...)
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

// BuildFlannelAndProxy builds what only clusters with [ClusterOptions].Flannel or Proxy need.
func BuildFlannelAndProxy(ctx context.Context) error {
	_, err := buildAll(ctx, flannelComponent, flanneldComponent, proxyComponent)
	return err
}

// BuildCanal builds what only clusters with [FlannelOptions].Calico need.
func BuildCanal(ctx context.Context) error {
	_, err := buildAll(ctx, flanneldComponent, calicoComponent)
	return err
}

// BuildCertManager builds cert-manager and returns the path of the docker-archive with its images.
func BuildCertManager(ctx context.Context) (string, error) {
	dirs, err := buildAll(ctx, certManagerComponent)
	return filepath.Join(dirs[certManagerComponent.name], imagesFile), err
}

// BuildHelm builds helm and returns its path.
func BuildHelm(ctx context.Context) (string, error) { return buildProgram(ctx, helmComponent) }

// BuildFlannel builds flannel's CNI plugin and returns its path.
func BuildFlannel(ctx context.Context) (string, error) { return buildProgram(ctx, flannelComponent) }

// BuildBandwidth builds the CNI plugin bandwidth and returns its path.
func BuildBandwidth(ctx context.Context) (string, error) {
	return buildProgram(ctx, bandwidthComponent)
}

// BuildLinter builds golangci-lint and returns its path.
func BuildLinter(ctx context.Context) (string, error) { return buildProgram(ctx, linterComponent) }

// buildProgram builds a component that consists of one program of the same name.
func buildProgram(ctx context.Context, c component) (string, error) {
	dirs, err := buildAll(ctx, c)
	return filepath.Join(dirs[c.name], c.name), err
}

// built remembers the folders of components for later calls in this process.
var built struct {
	sync.Mutex
	dirs map[string]string
}

// buildAll builds the components missing from this process and from the cache, and returns the folders of all.
func buildAll(ctx context.Context, components ...component) (map[string]string, error) {
	built.Lock()
	defer built.Unlock()
	if built.dirs == nil {
		built.dirs = map[string]string{}
	}
	unknown := slices.DeleteFunc(slices.Clone(components), func(c component) bool { return built.dirs[c.name] != "" })
	if len(unknown) == 0 {
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
	lab := filepath.Join(root, "test", "lab")
	dirs := map[string]string{}
	var missing []component
	for _, c := range unknown {
		key, err := c.key(lab, goVersion)
		if err != nil {
			return nil, err
		}
		dirs[c.name] = filepath.Join(cache, c.name+"-"+key)
		if !exists(dirs[c.name]) {
			missing = append(missing, c)
		}
	}
	for i, c := range missing {
		place := fmt.Sprintf("%d of %d", i+1, len(missing))
		if err := c.build(ctx, lab, cache, dirs[c.name], place); err != nil {
			return nil, fmt.Errorf("building %s: %w", c.name, err)
		}
	}
	maps.Copy(built.dirs, dirs)
	return maps.Clone(built.dirs), nil
}

// Product holds the paths of this repository's binaries.
type Product struct {
	Plugin     string // the CNI plugin, stayput
	Agent      string // the daemon, stayput-agent
	Controller string // stayput-controller; "" from BuildProduct
	Kubectl    string // kubectl-stayput; "" from BuildProduct
}

// BuildProduct builds a node's two programs, stayput and stayput-agent, into dir as they are released.
func BuildProduct(ctx context.Context, dir string) (Product, error) {
	return makeProduct(ctx, dir, "", "./cmd/stayput ./cmd/stayput-agent")
}

// BuildWholeProduct builds all programs of this repository into dir as they are released.
func BuildWholeProduct(ctx context.Context, dir string) (Product, error) {
	return makeProduct(ctx, dir, "", "./cmd/...")
}

// BuildRelease is [BuildWholeProduct] with a release's version, so that the programs differ from those of other
// releases.
func BuildRelease(ctx context.Context, dir, version string) (Product, error) {
	return makeProduct(ctx, dir, version, "./cmd/...")
}

// makeProduct builds with the repository's Makefile, which defines how the programs are released. Without a version the
// programs report their commit.
func makeProduct(ctx context.Context, dir, version, programs string) (Product, error) {
	progress("building stayput")
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
	cmd := exec.CommandContext(ctx, "make", "--no-print-directory", "build",
		"GO=go", "BIN="+dir, "PROGRAMS="+programs, "VERSION="+version)
	cmd.Dir = root
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) } // make passes it on to the compiler
	// The flags of an enclosing make are not for this one.
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

// build builds the component into dir, a folder of the cache. place is its position among the components to build.
func (c component) build(ctx context.Context, lab, cache, dir, place string) error {
	unlock, err := lock(cache, c.name, "builds "+c.name)
	if err != nil {
		return err
	}
	defer unlock()
	if exists(dir) { // built by another process in the meantime
		return nil
	}
	if err := Need(ctx, c.packages...); err != nil {
		return err
	}
	start := time.Now()
	progress("building %s (%s)", c.name, place)
	// Left over from a killed build: the lock is held.
	tmp := filepath.Join(cache, c.name+".tmp")
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return err
	}
	args := []string{"build"}
	if c.tests {
		args = []string{"test", "-c"}
	}
	args = append(args,
		"-v", "-o", tmp+"/", "-trimpath", "-buildvcs=false", "-tags", c.tags,
		"-ldflags", strings.TrimSpace("-s -w "+c.ldflags),
	)
	if c.modfile != "" {
		args = append(args, "-modfile="+c.modfile)
	}
	if c.parallel > 0 {
		args = append(args, "-p", strconv.Itoa(c.parallel))
	}
	args = append(args, c.pkg)
	report := func(packages int) {
		progress("building %s (%s): %d packages, %s", c.name, place, packages, time.Since(start).Round(time.Second))
	}
	if err := goCommand(ctx, filepath.Join(lab, c.dir), c.cgo, report, args...); err != nil {
		return err
	}
	if c.finish != nil {
		if err := c.finish(tmp); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	progress("built %s (%s) in %s", c.name, place, time.Since(start).Round(100*time.Millisecond))
	return nil
}

// key returns a hash of everything that determines the built component.
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

// goCommand runs go with -v among args and regularly calls report with the number of packages compiled so far.
func goCommand(ctx context.Context, dir string, cgo bool, report func(packages int), args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	// The caller's flags and workspace are not part of the key.
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=0")
	if cgo {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
	}
	out := compilerOutput{report: report, last: time.Now()}
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s in %s: %w\n%s", args[0], dir, err, &out.said)
	}
	return nil
}

// compilerOutput counts the packages that go lists, one per line, and keeps the rest of the output.
type compilerOutput struct {
	said     bytes.Buffer
	packages int
	report   func(packages int)
	last     time.Time // report
}

func (o *compilerOutput) Write(b []byte) (int, error) {
	for line := range bytes.Lines(b) {
		if bytes.ContainsRune(line, ' ') {
			o.said.Write(line)
		} else {
			o.packages++
		}
	}
	if time.Since(o.last) >= 15*time.Second {
		o.last = time.Now()
		o.report(o.packages)
	}
	return len(b), nil
}

// moduleRoot returns the folder of this repository's go.mod, found from the working directory of go test or go run, and
// the Go version.
func moduleRoot(ctx context.Context) (root, goVersion string, err error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD", "GOVERSION").Output()
	if err != nil {
		return "", "", fmt.Errorf("go env: %w", err)
	}
	mod, version, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	root = filepath.Dir(mod)
	if !exists(filepath.Join(root, "test", "lab", "build")) {
		return "", "", errors.New("the lab is built from source: run this inside the repository")
	}
	return root, version, nil
}

// cacheDir returns the cache folder, creating it if needed.
func cacheDir() (string, error) {
	base := os.Getenv("STAYPUT_CACHE")
	if base == "" {
		user, err := os.UserCacheDir() // $XDG_CACHE_HOME, else $HOME/.cache
		if err != nil {
			return "", fmt.Errorf("no cache folder, set STAYPUT_CACHE: %w", err)
		}
		base = filepath.Join(user, "stayput")
	}
	dir, err := filepath.Abs(filepath.Join(base, "lab"))
	if err != nil {
		return "", err
	}
	return dir, os.MkdirAll(dir, 0o755)
}

// lock excludes other processes and goroutines. If this process dies, the kernel releases the lock.
func lock(dir, name, does string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		progress("waiting for another process that %s", does)
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
