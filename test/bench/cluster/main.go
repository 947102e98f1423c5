// Command cluster measures stayput on real clusters of the lab and prints a table. It needs root, builds what it
// runs, and exits with 0 whatever the figures are: it is not a test. Missed targets are marked MISSED.
//
// Everything shares the processors of one machine: etcd (without fsync), API server, controller manager, scheduler,
// Stayput's controllers and agents, the nodes and the measuring clients. Times run from before the client's call
// until the client's watch shows the result, without deductions. Contestants take turns in one run, reversing the
// order each time.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

var sections = []table.Section[*bench]{
	{
		Name: "latency", Measure: measureLatency,
		About: "from the creation of a gated pod until it is ungated with its affinity, one at a time",
	},
	{Name: "burst", About: "1,000 gated pods at once, against the scheduler's time for them", Measure: measureBurst},
	{Name: "writes", About: "API writes for the re-creation of a pod", Measure: measureWrites},
	{
		Name: "recreate", Measure: measureRecreate,
		About: "90 pods of a StatefulSet deleted at once, against stock host-local",
	},
	{
		Name: "creates", Measure: measureCreates,
		About: "what a pod's creation costs those who asked for nothing, and others, against no stayput",
	},
	{
		Name: "costs", Measure: measureCosts,
		About: "CPU time for each pod created, of API server, etcd and stayput, against no stayput",
	},
	{Name: "pools", About: "gated pods that get addresses of pools, against pods without", Measure: measurePools},
	{Name: "l2", About: "recreate for pods of a pool on a link that all nodes share", Measure: measureL2},
	{Name: "routed", About: "recreate for pods of a routed pool", Measure: measureRouted},
	{
		Name: "moves", Measure: measureMoves,
		About: "pods with addresses of routed pools: their moves, their network, and what agents do for them",
	},
	{
		Name: calicoSection, Measure: measureCalico,
		About: "pods with addresses of a pool inside Calico's IPAM; only if asked for, since it builds Calico",
	},
	{Name: "scale", About: "the controller with 5,000 nodes, 100,000 pods and as many RetainedIPs", Measure: measureScale},
	{
		Name: "fleet", Measure: measureFleet,
		About: "5,000 agents without kernels, 100,000 pods, 20,000 of them of a routed pool",
	},
}

// bench is shared by the sections.
type bench struct {
	product  lab.Product
	scale    float64
	profiles string // a folder for CPU profiles of the API server, empty if there is none
	// kubernetes is the version in the section creates, empty for that of the tests.
	kubernetes string
}

// times scales a number of runs.
func (b *bench) times(n int) int { return max(2, int(float64(n)*b.scale)) }

// say reports progress.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s bench: %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

func main() { os.Exit(run()) }

func run() int {
	names := table.Names(sections)
	only := flag.String("only", "",
		"comma-separated sections to measure: "+strings.Join(names, ",")+"; NAME=FACTOR gives one its own -scale")
	scale := flag.Float64("scale", 1, "factor for the numbers of runs and, in the sections scale and fleet, of objects")
	profiles := flag.String("profiles", "",
		"an existing folder for CPU profiles of the API server, in costs, fleet, recreate, l2 and routed")
	kubernetes := flag.String("k8s", "", "the version of Kubernetes in the section creates, such as 1.33; pods are gated "+
		"by what that has, in 1.34 and 1.35 by v1beta1 policies, and stayput runs in pods, not as processes")
	flag.Parse()
	chosen, err := choose(names, *only, *scale)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: -only:", err)
		return 2
	}
	if err := (lab.Versions{Kubernetes: *kubernetes}).Check(); err != nil {
		fmt.Fprintln(os.Stderr, "bench: -k8s:", err)
		return 2
	}
	return table.Run("makes namespaces and runs clusters", func(ctx context.Context) error {
		return measure(ctx, &bench{profiles: *profiles, kubernetes: *kubernetes}, chosen)
	})
}

// choose returns the sections to measure, each with its scale.
func choose(names []string, only string, scale float64) (map[string]float64, error) {
	if only == "" {
		only = strings.Join(slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == calicoSection }),
			",")
	}
	chosen := map[string]float64{}
	for one := range strings.SplitSeq(only, ",") {
		name, factor, own := strings.Cut(one, "=")
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("unknown section %q, want one of %s", name, strings.Join(names, ", "))
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

func measure(ctx context.Context, b *bench, chosen map[string]float64) (err error) {
	dir, remove, err := lab.TempDir("bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if b.product, err = lab.BuildWholeProduct(ctx, filepath.Join(dir, "bin")); err != nil {
		return err
	}
	describe(os.Stdout)
	var rows []table.Row
	for _, s := range sections {
		var ok bool
		if b.scale, ok = chosen[s.Name]; !ok {
			continue
		}
		say("%s: %s (load %s)", s.Name, s.About, table.Load())
		more, failed := s.Measure(ctx, b)
		rows = append(rows, more...)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", s.Name, failed))
		}
		if ctx.Err() != nil {
			break
		}
		if len(chosen) > 1 {
			table.Print(os.Stderr, more) // the rest takes long
		}
	}
	table.Print(os.Stdout, rows)
	return err
}

// describe prints the conditions of the measurement.
func describe(w io.Writer) {
	fmt.Fprintf(w, "%s; Kubernetes %s, containerd 2.4.2, all of the cluster and the clients on this machine\n",
		table.Machine(), lab.KubernetesVersion)
	fmt.Fprintln(w, "etcd without fsync; kube-controller-manager without its limit of 20 requests per second, which hides")
	fmt.Fprintln(w, "much of Stayput's cost. ± is the 95 % interval, by resampling; [min max] follows a median.")
}
