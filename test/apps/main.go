// Apps runs real software, whose members know each other by address, on a real Kubernetes of three nodes, as the
// manifests in deploy/examples describe it: first without stayput, where it is shown to break, then with it. All pods
// are deleted at once, a rollout restarts them, a node loses power, then all do, a node is drained, and one is lost for
// good, while clients go on writing.
//
//	main.go   the program, and what it prints
//	act.go    what happens to the pods of an application, and what became of it
//	stage.go  the cluster, its volumes and the pods
//	watch.go  the clients, and for how long they failed
//	redis.go  one file for each application
//
// It exits with 1 if an application did not recover or an address was lost with stayput, or if nothing broke without
// it. It needs root and builds what it runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab"
)

func main() { os.Exit(run()) }

func run() int {
	only := flag.String("app", "", "only these applications, with commas in between, of "+names(apps))
	happens := flag.String("step", "", "only the steps that have this in their title, such as drained")
	flag.Parse()
	if flag.Arg(0) == asMember {
		fmt.Fprintln(os.Stderr, "apps:", serveRegistry())
		return 1
	}
	chosen := apps
	if *only != "" {
		chosen = slices.DeleteFunc(slices.Clone(apps), func(a app) bool {
			return !slices.Contains(strings.Split(*only, ","), a.name)
		})
	}
	if len(chosen) == 0 {
		fmt.Fprintf(os.Stderr, "apps: -app is some of %s\n", names(apps))
		return 2
	}
	// The lab closes its machines on the first two signals itself; here they end the waiting.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ok, err := play(ctx, os.Stdout, chosen, *happens)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "apps: interrupted, the cluster is removed")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "apps:", err)
		return 1
	case !ok:
		return 1
	}
	return 0
}

func names(apps []app) string {
	var all []string
	for _, a := range apps {
		all = append(all, a.name)
	}
	return strings.Join(all, ", ")
}

// play plays the applications on one cluster, and reports whether each broke without stayput and did not with it.
func play(ctx context.Context, out io.Writer, apps []app, step string) (ok bool, err error) {
	dir, remove, err := lab.TempDir("product")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	product, err := lab.BuildWholeProduct(ctx, dir)
	if err != nil {
		return false, err
	}
	c, err := lab.StartCluster(ctx, lab.ClusterOptions{Product: product})
	if err != nil {
		return false, err
	}
	s := &stage{Cluster: c, out: out, step: step}
	defer func() {
		if (err != nil || !ok) && ctx.Err() == nil {
			err = errors.Join(err, s.writeLogs())
		}
		err = errors.Join(err, c.Close(), os.RemoveAll(s.networkStorage()))
	}()
	start := time.Now()
	if err := s.prepare(ctx, apps); err != nil {
		return false, err
	}
	fmt.Fprintln(out, "WITHOUT STAYPUT")
	without, err := s.acts(ctx, apps)
	if err != nil {
		return false, err
	}
	fmt.Fprintln(out, "WITH STAYPUT")
	pools := map[string]any{"pools": map[string]any{"enabled": true}}
	if err := s.Install(ctx, lab.InstallOptions{Values: pools}); err != nil {
		return false, err
	}
	if err := s.apply(ctx, "podippool.yaml"); err != nil {
		return false, err
	}
	with, err := s.acts(ctx, apps)
	if err != nil {
		return false, err
	}
	fmt.Fprintln(out)
	ok = true
	for _, a := range apps {
		before, after := without[a.name], with[a.name]
		fmt.Fprintf(out, "%-14s  without stayput %v; with stayput %v\n", a.name, before, after)
		ok = ok && before.broken > 0 && after.broken == 0 && after.lost == 0
	}
	fmt.Fprintf(out, "%-14s  %.0f s\n", "total time", time.Since(start).Seconds())
	return ok, nil
}

// tally counts what became of an application.
type tally struct {
	steps, broken int
	lost          int // addresses
}

func (t tally) String() string {
	return fmt.Sprintf("%d of %d times broken, %d addresses lost", t.broken, t.steps, t.lost)
}
