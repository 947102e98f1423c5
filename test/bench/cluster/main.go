// Command cluster measures stayput on real clusters of the lab and prints a table. It needs root, builds what it
// runs, and ends with 0 whatever the figures are: they are figures, not tests. A target that was not reached says
// MISSED.
//
// Everything shares the processors of one machine: etcd (without fsync), API server, controller manager, scheduler,
// stayput's controllers and agents, the nodes, and the clients that measure. Times are from before the client's
// call until the client's watch shows the result, and nothing is subtracted from them. What is compared with a
// peer takes turns with it in one run, each time in the other order.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stayput/stayput/test/lab"
)

// section measures some rows.
type section struct {
	name, about string
	measure     func(context.Context, *bench) ([]row, error)
}

var sections = []section{
	{"latency", "from the creation of a gated pod until it has its affinity and no gate, one at a time", measureLatency},
	{"burst", "1,000 gated pods at once, and what the scheduler then takes for them", measureBurst},
	{"writes", "API writes for the re-creation of a pod", measureWrites},
	{"recreate", "90 pods of a StatefulSet deleted at once, against stock host-local", measureRecreate},
	{
		"creates", "pod creates per second with 1,000 PersistentPodStates, against a cluster without stayput", measureCreates,
	},
	{"scale", "the controller with 5,000 nodes, 100,000 pods and as many RetainedIPs", measureScale},
}

// bench is what the sections share.
type bench struct {
	product lab.Product
	scale   float64
}

// times scales a number of runs.
func (b *bench) times(n int) int { return max(2, int(float64(n)*b.scale)) }

// say tells how far it has come.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s bench: %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

func main() { os.Exit(run()) }

func run() int {
	names := make([]string, len(sections))
	for i, s := range sections {
		names[i] = s.name
	}
	only := flag.String("only", "", "comma-separated sections to measure, of "+strings.Join(names,
		",")+"; NAME=FACTOR gives one a -scale of its own")
	scale := flag.Float64("scale", 1, "factor for the numbers of runs and, in the section scale, of objects")
	flag.Parse()
	chosen, err := choose(names, *only, *scale)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: -only:", err)
		return 2
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "bench: it makes namespaces and runs clusters: run it as root")
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err = measure(ctx, chosen)
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

// choose returns the sections to measure, each with its scale.
func choose(names []string, only string, scale float64) (map[string]float64, error) {
	if only == "" {
		only = strings.Join(names, ",")
	}
	chosen := map[string]float64{}
	for one := range strings.SplitSeq(only, ",") {
		name, factor, own := strings.Cut(one, "=")
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("there is no section %q, only %s", name, strings.Join(names, ", "))
		}
		chosen[name] = scale
		if own {
			var err error
			if chosen[name], err = strconv.ParseFloat(factor, 64); err != nil {
				return nil, err
			}
		}
	}
	return chosen, nil
}

func measure(ctx context.Context, chosen map[string]float64) (err error) {
	dir, remove, err := lab.TempDir("bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	b := &bench{}
	if b.product, err = lab.BuildWholeProduct(ctx, filepath.Join(dir, "bin")); err != nil {
		return err
	}
	describe(os.Stdout)
	var rows []row
	for _, s := range sections {
		var ok bool
		if b.scale, ok = chosen[s.name]; !ok {
			continue
		}
		say("%s: %s (load %s)", s.name, s.about, load())
		more, failed := s.measure(ctx, b)
		rows = append(rows, more...)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", s.name, failed))
		}
		if ctx.Err() != nil {
			break
		}
		if len(chosen) > 1 {
			print(os.Stderr, more) // the rest takes long
		}
	}
	print(os.Stdout, rows)
	return err
}

// describe says what the figures depend on.
func describe(w io.Writer) {
	var u unix.Utsname
	_ = unix.Uname(&u) // never fails
	fmt.Fprintf(w, "Linux %s, %d CPUs, load %s; Kubernetes 1.36.3, containerd 2.4.2, all of the cluster and the clients "+
		"on this machine\n",
		unix.ByteSliceToString(u.Release[:]), cpus(), load())
	fmt.Fprintln(w, "etcd without fsync; kube-controller-manager without its limit of 20 requests per second, which "+
		"would hide")
	fmt.Fprintln(w, "much of what stayput costs. ± is the 95 % interval, by resampling; [least greatest] beside a median.")
}

// load tells a machine that has nothing else to do.
func load() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(data))[:3], " ")
}

func cpus() int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return 0
	}
	return set.Count()
}
