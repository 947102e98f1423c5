// Compat runs one scenario on the Kubernetes versions and container runtimes that clusters have: the preflight check,
// the quick start of the README, a rollout, a deletion while other nodes are emptier, a power loss, a cordon, a time
// without controllers, the removal, and an upgrade from the version before. Each pair of versions, with or without NRI
// and with what gates pods, is a cell.
//
//	main.go      the program, and what it prints
//	cell.go      the cells, and which of them to run
//	scenario.go  the steps, in their order
//	stage.go     the cluster of a cell, and what the steps ask of it
//	release.go   a release in a registry, and what is installed from there
//
// It exits with 1 if a step of a cell fails; the cell's other steps are left out then. It needs root and builds what it
// runs: minutes for each version of Kubernetes.
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
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab"
)

func main() { os.Exit(run()) }

func run() int {
	var want cell
	flag.StringVar(&want.Kubernetes, "k8s", "", "only cells with this version of Kubernetes, such as 1.33")
	flag.StringVar(&want.Runtime, "runtime", "", "only cells with this runtime, such as containerd-1.7 or crio")
	flag.StringVar(&want.nri, "nri", "", "only cells with NRI on, or off")
	flag.StringVar(&want.gate, "gate", "", "only cells whose pods are gated by v1 or v1beta1 policies, or by a webhook")
	build := flag.Bool("build", false, "build what the cells need, and run none")
	dist := flag.String("release", "", "folder that make release has filled: publish that, and install it from a registry")
	flag.Parse()
	cells, err := choose(want)
	if err != nil {
		fmt.Fprintln(os.Stderr, "compat:", err)
		return 2
	}
	// The lab closes its machines on the first two signals itself; here they end the waiting.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	failed, err := compat(ctx, os.Stdout, cells, *dist, *build)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "compat: interrupted, the cluster is removed")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "compat:", err)
		return 1
	case failed > 0:
		return 1
	}
	return 0
}

// compat runs the cells one after the other and returns how many failed.
func compat(ctx context.Context, out io.Writer, cells []cell, dist string, build bool) (failed int, err error) {
	if build {
		for _, c := range cells {
			if _, err := c.Versions.Build(ctx); err != nil {
				return 0, err
			}
		}
		return 0, nil
	}
	dir, remove, err := lab.TempDir("product")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	var p products
	if dist != "" {
		if p.published, err = newPublished(dist, dir); err != nil {
			return 0, err
		}
		p.now = p.published.product()
	} else if p.now, err = lab.BuildWholeProduct(ctx, filepath.Join(dir, "now")); err != nil {
		return 0, err
	}
	if p.before, err = lab.BuildRelease(ctx, filepath.Join(dir, "before"), versionBefore); err != nil {
		return 0, err
	}
	p.chartBefore = filepath.Join(dir, "chart")
	if err := lab.WriteChartBefore(ctx, p.chartBefore, versionBefore); err != nil {
		return 0, err
	}
	for _, c := range cells {
		start := time.Now()
		err := c.run(ctx, out, p)
		if ctx.Err() != nil {
			return failed, ctx.Err()
		}
		verdict := "every step ok"
		if err != nil {
			failed++
			verdict = "FAILED"
		}
		fmt.Fprintf(out, "%-44s  %s, %.0f s\n", c, verdict, time.Since(start).Seconds())
	}
	if failed > 0 {
		fmt.Fprintf(out, "%d of %d cells FAILED\n", failed, len(cells))
	}
	return failed, nil
}
