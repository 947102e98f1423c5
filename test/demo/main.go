// Demo shows the main job on a real Kubernetes of three nodes: stateful pods whose node loses its power, that are
// deleted, rolled and drained, while other nodes are emptier than theirs. First without stayput, then with it.
//
//	cluster.go   the cluster and what runs on it
//	act.go       what happens to the pods, and what becomes of their nodes and IPs
//	client.go    the client that notices how long they are away
//	screen.go    how it is told
//
// It exits with 1 if stayput lost a pod's node or IP, or if anything else goes wrong. It needs root and builds what it
// runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab"
)

func main() { os.Exit(run()) }

func run() int {
	keep := flag.Bool("keep", false, "leave the cluster up at the end, until SIGINT or SIGTERM")
	flag.Parse()
	// The lab closes its machines on the first two as well; here they end what waits.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	_, with, err := demo(ctx, newScreen(os.Stdout), *keep)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "demo: ended, the cluster is gone")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	case with.lost():
		return 1
	}
	return 0
}

// patience bounds a story that hangs; it is no measure of anything.
const patience = 6 * time.Minute

// demo tells the whole story and returns what became of the pods. The cluster is gone by then.
func demo(ctx context.Context, out *screen, keep bool) (without, with tally, err error) {
	out.line("Building containerd, etcd, Kubernetes and stayput, unless they are in the cache: minutes the first time.")
	if _, err := lab.BuildCluster(ctx); err != nil {
		return without, with, err
	}
	dir, remove, err := lab.TempDir("product")
	if err != nil {
		return without, with, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	product, err := lab.BuildWholeProduct(ctx, dir)
	if err != nil {
		return without, with, err
	}

	out.start = time.Now()
	out.step("A Kubernetes of three nodes starts")
	out.says(`echoserver   2 pods, of OpenKruise's manual: io.kubernetes.cri/reserved-ip-duration: "10"`)
	out.says(`web          1 pod: stayput.io/retain-ip: 10m`)
	out.says(`client       asks each pod for its name, by its IP, %d times a second`, time.Second/askEvery)
	c, err := lab.StartCluster(ctx, lab.ClusterOptions{Product: product})
	if err != nil {
		return without, with, err
	}
	defer func() {
		if (err != nil || with.lost()) && ctx.Err() == nil {
			err = errors.Join(err, writeLogs(c))
		}
		err = errors.Join(err, c.Close())
	}()
	s := &stage{Cluster: c, out: out}
	if without, with, err = s.story(ctx); err == nil && keep {
		err = s.wait(ctx)
	}
	return without, with, err
}

// story is the same act twice.
func (s *stage) story(ctx context.Context) (without, with tally, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.prepare(ctx); err != nil {
		return without, with, err
	}
	s.out.act("without stayput")
	if without, err = s.act(ctx); err != nil {
		return without, with, err
	}
	if err := s.clear(ctx); err != nil {
		return without, with, err
	}
	s.out.act("with stayput")
	if err := s.install(ctx); err != nil {
		return without, with, err
	}
	if with, err = s.act(ctx); err != nil {
		return without, with, err
	}
	s.out.summary(without, with)
	return without, with, nil
}

// writeLogs keeps what the machines have to say of what went wrong.
func writeLogs(c *lab.Cluster) error {
	name := filepath.Join(os.TempDir(), fmt.Sprintf("stayput-demo-%d.log", os.Getpid()))
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	c.WriteLogs(f)
	fmt.Fprintln(os.Stderr, "demo: the logs of the cluster are in", name)
	return f.Close()
}
