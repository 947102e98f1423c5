// Demo shows the main job on a real Kubernetes of three nodes: stateful pods lose their node's power, are deleted,
// rolled and drained while other nodes are emptier; first without stayput, then with it. At the end a pod with an
// address of a pool loses its node for good.
//
//	cluster.go   the cluster and its workloads
//	act.go       the steps, and their effects on the pods' nodes and IPs
//	client.go    the client that measures how long pods are away
//	screen.go    the output
//	picture.go   the output as a moving picture
//
// It exits with 1 if a pod lost its node or IP with stayput, or the IP of a pool, or on any other error. It needs root
// and builds what it runs.
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
	svg := flag.String("svg", "", "write the output to this `file`, as a moving picture")
	flag.Parse()
	// The lab closes its machines on the first two signals itself; here they end the waiting.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	out := newScreen(os.Stdout)
	of, err := demo(ctx, out, *keep)
	if err == nil && *svg != "" {
		err = os.WriteFile(*svg, picture(out.shown), 0o644)
	}
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "demo: interrupted, the cluster is removed")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	case of.lost():
		return 1
	}
	return 0
}

// patience bounds a hanging story; it measures nothing.
const patience = 6 * time.Minute

// outcomes are those of the acts.
type outcomes struct{ without, with, pool tally }

// lost reports whether a pod lost what it was promised.
func (o outcomes) lost() bool { return o.with.lost() || o.pool.ips > 0 }

// demo runs the whole story and returns its outcomes. The cluster is gone by then.
func demo(ctx context.Context, out *screen, keep bool) (of outcomes, err error) {
	out.line("Building containerd, etcd, Kubernetes and stayput, unless cached: minutes the first time.")
	if _, err := lab.BuildCluster(ctx); err != nil {
		return of, err
	}
	dir, remove, err := lab.TempDir("product")
	if err != nil {
		return of, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	product, err := lab.BuildWholeProduct(ctx, dir)
	if err != nil {
		return of, err
	}

	out.start = time.Now()
	out.step("A Kubernetes cluster of three nodes starts")
	out.says(`echoserver   2 pods, from OpenKruise's manual: io.kubernetes.cri/reserved-ip-duration: "10"`)
	out.says(`web          1 pod: stayput.io/retain-ip: 10m`)
	out.says(`client       asks each pod's IP for its name, %d times a second`, time.Second/askEvery)
	c, err := lab.StartCluster(ctx, lab.ClusterOptions{Product: product})
	if err != nil {
		return of, err
	}
	defer func() {
		if (err != nil || of.lost()) && ctx.Err() == nil {
			err = errors.Join(err, writeLogs(c))
		}
		err = errors.Join(err, c.Close())
	}()
	s := &stage{Cluster: c, out: out}
	if of, err = s.story(ctx); err == nil && keep {
		err = s.wait(ctx)
	}
	return of, err
}

// story plays the same act twice, and then that of the pool.
func (s *stage) story(ctx context.Context) (of outcomes, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.prepare(ctx); err != nil {
		return of, err
	}
	s.out.act("without stayput")
	if of.without, err = s.act(ctx); err != nil {
		return of, err
	}
	if err := s.clear(ctx); err != nil {
		return of, err
	}
	s.out.act("with stayput")
	if err := s.install(ctx); err != nil {
		return of, err
	}
	if of.with, err = s.act(ctx); err != nil {
		return of, err
	}
	s.out.act("with a pool, whose addresses no node owns")
	if of.pool, err = s.poolAct(ctx); err != nil {
		return of, err
	}
	s.out.summary(of)
	return of, nil
}

// writeLogs saves the logs of all machines.
func writeLogs(c *lab.Cluster) error {
	name := filepath.Join(os.TempDir(), fmt.Sprintf("stayput-demo-%d.log", os.Getpid()))
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	c.WriteLogs(f)
	fmt.Fprintln(os.Stderr, "demo: cluster logs written to", name)
	return f.Close()
}
