// Chaos breaks a real Kubernetes of three nodes at random, for half an hour: pods, sandboxes, containerd, kubelet,
// agents, the leading controller, the API server, nodes and objects, several at once. Meanwhile it watches whether
// every promise is kept. What is not is a violation, and the exit code 1.
//
//	main.go       the program
//	schedule.go   which faults a seed gives
//	faults.go     carries them out; machine.go is a node with several faults at once
//	session.go    the cluster, the rounds of faults, and who watches; workload.go what runs
//	lives.go      the observer of the API: returns, gates, doubled IPs, releases; watch.go feeds it
//	addresses.go  the observer of the nodes: network namespaces and address files
//	ask.go        the observer of the network: asks the pods who they are
//	weather.go    what is broken when, for promises that depend on it
//	rest.go       what must be true once everything is healed
//	report.go     journal, violations, summary
//
// With -routed it is another cluster, with pods of routed pools beside flanneld and kube-proxy, and other observers:
//
//	routed.go     the cluster, the rounds, and what must be true at rest
//	trouble.go    the faults
//	tenants.go    the observer of the API: whose address it is
//	asking.go     the observer of the network: asks from each node and from a pod of each; test/answers judges
//
// With -calico the pools are of mode Calico, beside Calico's own IPAM: calico.go has what differs from -routed.
//
// The faults between two rests are a round, drawn from the seed alone: the same seed gives the same faults at the same
// times. What they hit depends on how fast the cluster is, so a violation need not come back with its seed.
//
// It needs root and builds what it runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab"
)

func main() { os.Exit(run()) }

func run() int {
	seed := flag.Uint64("seed", 0, "seed of the faults, to repeat a run; 0 takes a new one")
	length := flag.Duration("for", 30*time.Minute, "how long things break; the last rest takes some minutes more")
	routed := flag.Bool("routed", false, "pods of routed pools, beside flanneld and kube-proxy")
	calico := flag.Bool("calico", false, "pods of pools in Calico's IPAM, beside Felix and Calico's controllers")
	flag.Parse()
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	// The lab closes its machines on the first two signals itself; here they end the waiting.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	var of *network
	target := "chaos"
	switch {
	case *routed:
		is := flannels(*seed)
		of, target = &is, "chaos-routed"
	case *calico:
		of, target = &calicos, "chaos-calico"
	}
	failed, err := chaos(ctx, os.Stdout, *seed, *length, target, of)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "chaos: interrupted, the cluster is removed")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "chaos:", err)
		return 1
	case failed:
		return 1
	}
	return 0
}

// trial is a cluster with what runs in it, breaks it and watches it.
type trial interface {
	run(ctx context.Context, seed uint64, length time.Duration) error
	// picture writes the state of the cluster to a file.
	picture(file string) error
	// keepLogs links the logs of all programs into a folder until ctx ends.
	keepLogs(ctx context.Context, dir string)
	close() error
}

// chaos runs the whole and reports whether a promise was broken. If anything went wrong, it leaves a folder with the
// journal, the state at each violation and all logs.
func chaos(
	ctx context.Context, screen io.Writer, seed uint64, length time.Duration, target string, of *network,
) (failed bool, err error) {
	dir, err := os.MkdirTemp("", fmt.Sprintf("stayput-chaos-%d-", seed))
	if err != nil {
		return false, err
	}
	journal, err := os.Create(filepath.Join(dir, "journal"))
	if err != nil {
		return false, err
	}
	defer journal.Close()
	replay := fmt.Sprintf("seed %d", seed)
	r := newReport(screen, journal, replay)
	r.say("%s: repeat it with make %s SEED=%d FOR=%s", replay, target, seed, length)
	defer func() {
		if failed = r.failed() > 0; failed || err != nil && ctx.Err() == nil {
			r.say("FAILED, %s: journal and logs are in %s", replay, dir)
			return
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()

	if _, err := lab.BuildCluster(ctx); err != nil {
		return false, err
	}
	bin, remove, err := lab.TempDir("product")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	product, err := lab.BuildWholeProduct(ctx, bin)
	if err != nil {
		return false, err
	}
	r.start = time.Now()
	r.say("the cluster starts")
	var s trial
	if of != nil {
		s, err = newRouted(ctx, product, r, *of)
	} else {
		s, err = newSession(ctx, product, r)
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err != nil {
		return false, err
	}
	logging, stop := context.WithCancel(ctx)
	var writing sync.WaitGroup
	writing.Go(func() { s.keepLogs(logging, dir) })
	// After a signal the lab ends this process as soon as it has closed its machines.
	context.AfterFunc(ctx, func() {
		if writing.Wait(); r.failed() == 0 {
			_ = os.RemoveAll(dir)
		}
	})
	r.alarm = func(number int, _ string) {
		writing.Go(func() {
			if err := s.picture(filepath.Join(dir, fmt.Sprintf("violation-%d", number))); err != nil {
				r.note("taking a picture: %v", err)
			}
		})
	}
	err = s.run(ctx, seed, length)
	stop()
	writing.Wait()
	r.say("%s ends\n%s", replay, r.summary())
	return false, err
}
