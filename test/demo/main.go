// Demo shows the main job on a real containerd: a stateful pod is deleted, other pods come, the pod comes
// back. With stock host-local another pod has its address by then; with stayput it returns to it.
//
// It exits with 1 if stayput did not keep the address. It needs root and builds what it runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// The words of the OpenKruise manual: keep the address of this pod for ten minutes after it is gone.
const (
	annotation = "io.kubernetes.cri/reserved-ip-duration"
	minutes    = "10"
)

// subnet leaves five addresses for pods, so that host-local's round robin soon comes around.
const subnet = "10.88.0.0/29"

func main() { os.Exit(run()) }

func run() int {
	bin := flag.String("bin", "", "folder with stayput and stayput-agent; they are built if it is not given")
	flag.Parse()
	// The lab closes its nodes on these signals as well; here they end what waits.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	kept, err := demo(ctx, *bin, os.Stdout)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "demo: interrupted, cleaned up")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	case !kept:
		fmt.Fprintln(os.Stderr, "demo: stayput lost the address")
		return 1
	}
	return 0
}

// demo says whether the pod kept its address with stayput.
func demo(ctx context.Context, bin string, out io.Writer) (kept bool, err error) {
	if _, err := lab.Build(ctx); err != nil {
		return false, err
	}
	product := lab.Product{Plugin: filepath.Join(bin, "stayput"), Agent: filepath.Join(bin, "stayput-agent")}
	if bin == "" {
		dir, remove, err := lab.TempDir("product")
		if err != nil {
			return false, err
		}
		defer remove()
		if product, err = lab.BuildProduct(ctx, dir); err != nil {
			return false, err
		}
	}
	fmt.Fprintf(out, "Pod default/web-0 asks by annotation:  %s: %q\n", annotation, minutes)
	fmt.Fprintf(out, "The node has containerd, the bridge plugin and %s, which is five addresses for pods.\n", subnet)

	if _, err := round(ctx, "host-local", nil, out); err != nil {
		return false, err
	}
	return round(ctx, "stayput", &product, out)
}

// round tells the story on a fresh node with the given IPAM plugin.
func round(ctx context.Context, ipam string, product *lab.Product, out io.Writer) (kept bool, err error) {
	options := lab.NodeOptions{
		Networks: []lab.Network{{IPAM: lab.RangeIPAM(ipam, subnet), Annotations: true}},
	}
	if product != nil {
		options.CNIPlugins = []string{product.Plugin}
	}
	n, err := lab.StartNode(ctx, options)
	if err != nil {
		return false, err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			n.WriteLogs(os.Stderr)
		}
		err = errors.Join(err, n.Close())
	}()
	if product != nil {
		const agent = "/opt/stayput/stayput-agent"
		if err := n.Install(product.Agent, agent); err != nil {
			return false, err
		}
		if _, err := n.Start("agent", nil, agent); err != nil {
			return false, err
		}
	}

	fmt.Fprintf(out, "\nIPAM by %s\n", ipam)
	s := story{node: n, out: out, start: time.Now()}
	web := lab.PodSpec{Name: "web-0", Annotations: map[string]string{annotation: minutes}}
	s.run(ctx, lab.PodSpec{Name: "other-1"}, nil)
	first := s.run(ctx, web, nil)
	s.get(ctx, first)
	s.delete(ctx, first)
	// They take the other three addresses, one of which becomes free again.
	other := s.run(ctx, lab.PodSpec{Name: "other-2"}, nil)
	for _, name := range []string{"other-3", "other-4"} {
		s.run(ctx, lab.PodSpec{Name: name}, nil)
	}
	s.delete(ctx, other)
	// The next address in turn would be web-0's.
	s.run(ctx, lab.PodSpec{Name: "other-5"}, func(p lab.Pod) string {
		if p.IP() == first.IP() {
			return "has the address of web-0"
		}
		return ""
	})
	again := s.run(ctx, web, func(p lab.Pod) string {
		if p.IP() == first.IP() {
			return "KEPT"
		}
		return "LOST, was " + first.IP().String()
	})
	s.get(ctx, again)
	return s.err == nil && again.IP() == first.IP(), s.err
}

// story does one thing after another to pods and prints a line for each. After an error it does nothing more.
type story struct {
	node  *lab.Node
	out   io.Writer
	start time.Time
	err   error
}

// run runs a pod.
func (s *story) run(ctx context.Context, spec lab.PodSpec, remark func(lab.Pod) string) lab.Pod {
	var pod lab.Pod
	if s.err == nil {
		pod, s.err = s.node.RunPod(ctx, spec)
	}
	if s.err != nil {
		return lab.Pod{IPs: []netip.Addr{{}}}
	}
	note := ""
	if remark != nil {
		note = remark(pod)
	}
	s.line(pod, "runs", note)
	return pod
}

// get checks that the node reaches a pod under its address.
func (s *story) get(ctx context.Context, pod lab.Pod) {
	if s.err != nil {
		return
	}
	answer, err := s.node.Get(ctx, pod.IP())
	if err == nil && answer.Name != pod.Name {
		err = fmt.Errorf("%s is answered by %s, not by %s", pod.IP(), answer.Name, pod.Name)
	}
	if s.err = err; err == nil {
		s.line(pod, "answers", "")
	}
}

func (s *story) delete(ctx context.Context, pod lab.Pod) {
	if s.err != nil {
		return
	}
	if s.err = s.node.DeletePod(ctx, pod.ID); s.err == nil {
		s.line(pod, "deleted", "")
	}
}

func (s *story) line(pod lab.Pod, event, note string) {
	line := fmt.Sprintf("  %5.2f s  %-16s %-8s %-11s %s",
		time.Since(s.start).Seconds(), pod.Namespace+"/"+pod.Name, event, pod.IP(), note)
	fmt.Fprintln(s.out, strings.TrimRight(line, " "))
}
