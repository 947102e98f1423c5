// Bench measures stayput against stock host-local and prints a table of ratios. It needs root, builds what it runs, and
// exits with 0 whatever the figures are: it is not a test.
//
// Every ratio is one of medians of runs in this one process. The contestants take turns, so that other load on the
// machine affects both. A plugin runs as under a runtime: a whole process, started by vfork and exec (syscall.ForkExec,
// equivalent to posix_spawn), with its configuration on a pipe; it is timed from before the fork until it is reaped.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

var sections = []table.Section[*bench]{
	{
		Name: "add", Measure: measureAdd,
		About: "ADD + DEL of an ordinary pod with 0, 100, 1,000 and 10,000 addresses bound",
	},
	{Name: "floor", About: "the same at 0 bound, against starting an empty program twice", Measure: measureFloor},
	{
		Name: "restore", Measure: measureRestore,
		About: "restore ADD + retaining DEL, against host-local's and as many fsyncs",
	},
	{
		Name: "rebuild", Measure: measureRebuild,
		About: "the first command after a switch from host-local and of a boot, with 10,000 and 100,000 addresses",
	},
	{
		Name: "promise", Measure: measurePromise,
		About: "ADD beyond the promised share with 1,100 promises, and the ADD of a new promise with 10,000",
	},
	{Name: "parallel", About: "64 concurrent ADDs in one network", Measure: measureParallel},
	{Name: "routed", About: "a whole ADD of the plugin bridge with a routed address", Measure: measureRouted},
	{Name: "pods", About: "RunPodSandbox + StopPodSandbox on containerd", Measure: measurePods},
	{Name: "agent", About: "the idle agent with 200 pods", Measure: measureAgent},
}

// bench is shared by the sections.
type bench struct {
	product   lab.Product
	bin       lab.Bin
	hostLocal string
	empty     string
	dir       string // on the measured disk
	scale     float64
}

// times scales a number of runs.
func (b *bench) times(n int) int { return max(3, int(float64(n)*b.scale)) }

func main() { os.Exit(run()) }

func run() int {
	names := table.Names(sections)
	only := flag.String("only", "", "comma-separated sections to measure: "+strings.Join(names, ","))
	scale := flag.Float64("scale", 1, "factor for the numbers of runs")
	flag.Parse()
	chosen := names
	if *only != "" {
		chosen = strings.Split(*only, ",")
	}
	for _, c := range chosen {
		if !slices.Contains(names, c) {
			fmt.Fprintf(os.Stderr, "bench: -only: unknown section %q, want one of %s\n", c, strings.Join(names, ", "))
			return 2
		}
	}
	return table.Run("makes namespaces and runs pods", func(ctx context.Context) error {
		return measure(ctx, chosen, *scale)
	})
}

func measure(ctx context.Context, chosen []string, scale float64) (err error) {
	b, remove, err := prepare(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	b.scale = scale
	describe(os.Stdout, b)
	var rows []table.Row
	for _, s := range sections {
		if !slices.Contains(chosen, s.Name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "bench: %s: %s\n", s.Name, s.About)
		more, err := s.Measure(ctx, b)
		if err != nil {
			table.Print(os.Stdout, rows) // those so far took minutes
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		rows = append(rows, more...)
	}
	table.Print(os.Stdout, rows)
	return nil
}

// prepare builds all programs into a folder on the measured disk.
func prepare(ctx context.Context) (b *bench, remove func() error, err error) {
	dir, removeDir, err := lab.TempDir("bench")
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeDir())
		}
	}()
	b = &bench{dir: dir, empty: filepath.Join(dir, "bin", "empty")}
	if b.bin, err = lab.Build(ctx); err != nil {
		return nil, nil, err
	}
	b.hostLocal = filepath.Join(b.bin.CNI, "host-local")
	if b.product, err = lab.BuildProduct(ctx, filepath.Join(dir, "bin")); err != nil {
		return nil, nil, err
	}
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", b.empty,
		"github.com/stayput/stayput/test/bench/empty")
	build.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("building the empty program: %w\n%s", err, out)
	}
	for _, program := range []*string{&b.hostLocal, &b.product.Plugin, &b.empty} {
		if *program, err = installed(*program, filepath.Join(dir, "installed")); err != nil {
			return nil, nil, err
		}
	}
	return b, removeDir, nil
}

// installed copies a program into a folder, as an installer does. A program as the linker leaves it lies in other pages
// of the page cache, and takes up to 8 % longer or shorter to start.
func installed(program, dir string) (string, error) {
	data, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	to := filepath.Join(dir, filepath.Base(program))
	return to, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(to, data, 0o755))
}

// describe prints the conditions of the measurement.
func describe(w io.Writer, b *bench) {
	fmt.Fprintf(w, "%s; files on %s\n", table.Machine(), fileSystem(b.dir))
	fmt.Fprintln(w, "Ratios of medians, contestants taking turns; processes by vfork and exec, configuration on a pipe.")
	fmt.Fprintln(w, "Host-local is v1.9.1, all programs static and stripped. Bound addresses are files as written by")
	fmt.Fprintln(w, "host-local, indexed by stayput before the measurement. ± is the 95 % interval, by resampling.")
}

// fileSystem returns the type of dir's file system.
func fileSystem(dir string) string {
	out, err := exec.Command("stat", "--file-system", "--format=%T", dir).Output()
	if err != nil {
		return "an unknown file system"
	}
	return strings.TrimSpace(string(out))
}
