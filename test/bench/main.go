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
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/lab"
)

// row is one line of the table.
type row struct {
	what, against string
	target        float64 // 0: the figure is for information
	unit          string  // of target and figure; empty: a ratio
	figure        float64
	spread        float64 // half of the interval that holds the figure with 95 %; 0: not known
	n             int
	detail        string
}

// section measures some rows.
type section struct {
	name, about string
	measure     func(context.Context, *bench) ([]row, error)
}

var sections = []section{
	{"add", "ADD + DEL of an ordinary pod with 0, 100, 1,000 and 10,000 addresses bound", measureAdd},
	{"floor", "the same at 0 bound against starting an empty program twice", measureFloor},
	{"restore", "restore ADD + retaining DEL against host-local's and as many fsyncs", measureRestore},
	{"parallel", "64 ADDs at once into one network", measureParallel},
	{"pods", "RunPodSandbox + StopPodSandbox on containerd", measurePods},
	{"agent", "the agent with 200 pods, idle", measureAgent},
}

// bench is what the sections share.
type bench struct {
	product   lab.Product
	bin       lab.Bin
	hostLocal string
	empty     string
	dir       string // on the disk that is measured
	scale     float64
}

// times scales a number of runs.
func (b *bench) times(n int) int { return max(3, int(float64(n)*b.scale)) }

func main() { os.Exit(run()) }

func run() int {
	names := make([]string, len(sections))
	for i, s := range sections {
		names[i] = s.name
	}
	only := flag.String("only", "", "comma-separated sections to measure, of "+strings.Join(names, ","))
	scale := flag.Float64("scale", 1, "factor for the numbers of runs")
	flag.Parse()
	chosen := names
	if *only != "" {
		chosen = strings.Split(*only, ",")
	}
	for _, c := range chosen {
		if !slices.Contains(names, c) {
			fmt.Fprintf(os.Stderr, "bench: -only: there is no section %q, only %s\n", c, strings.Join(names, ", "))
			return 2
		}
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "bench: it makes namespaces and runs pods: run it as root")
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := measure(ctx, chosen, *scale)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "bench: interrupted, cleaned up")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func measure(ctx context.Context, chosen []string, scale float64) (err error) {
	b, remove, err := prepare(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	b.scale = scale
	describe(os.Stdout, b)
	var rows []row
	for _, s := range sections {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "bench: %s: %s\n", s.name, s.about)
		more, err := s.measure(ctx, b)
		if err != nil {
			print(os.Stdout, rows) // what there is took minutes
			return fmt.Errorf("%s: %w", s.name, err)
		}
		rows = append(rows, more...)
	}
	print(os.Stdout, rows)
	return nil
}

// prepare builds all programs into a folder of the disk that is measured.
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
	return b, removeDir, nil
}

// describe says what the figures depend on.
func describe(w io.Writer, b *bench) {
	var u unix.Utsname
	_ = unix.Uname(&u) // never fails
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Fprintf(w, "Linux %s, %d CPUs, load %s; files on %s\n", unix.ByteSliceToString(u.Release[:]), cpus(),
		strings.Join(strings.Fields(string(load))[:3], " "), fileSystem(b.dir))
	fmt.Fprintln(w, "Ratios of medians, contestants taking turns; whole processes by vfork and exec, configuration on a "+
		"pipe.")
	fmt.Fprintln(w, "Host-local is v1.9.1, all programs static and stripped. Bound addresses are files as host-local "+
		"writes")
	fmt.Fprintln(w, "them, which stayput indexed once before the measurement. ± is the 95 % interval, by resampling.")
}

func cpus() int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return 0
	}
	return set.Count()
}

// fileSystem is the type of the file system that dir is on.
func fileSystem(dir string) string {
	out, err := exec.Command("stat", "--file-system", "--format=%T", dir).Output()
	if err != nil {
		return "an unknown file system"
	}
	return strings.TrimSpace(string(out))
}

// print prints the table.
func print(w io.Writer, rows []row) {
	if len(rows) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tAGAINST\tTARGET\tFIGURE\tREACHED\tN\tDETAIL")
	for _, r := range rows {
		target, reached := "-", "-"
		if r.target > 0 {
			target, reached = fmt.Sprintf("%.4g%s", r.target, r.unit), "no"
			if r.figure <= r.target {
				reached = "yes"
			}
		}
		figure := fmt.Sprintf("%.3g%s", r.figure, r.unit)
		if r.spread > 0 {
			figure = fmt.Sprintf("%.3f ±%.3f", r.figure, r.spread)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%s\n", r.what, r.against, target, figure, reached, r.n, r.detail)
	}
	_ = t.Flush()
}
