package main

import (
	"context"
	_ "embed"
	"net/netip"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
)

// The workloads.
var (
	//go:embed echoserver.yaml
	echoserver string
	//go:embed web.yaml
	web string
	//go:embed pool.yaml
	poolYAML string
)

// pool is the subnet of poolYAML.
var pool = netip.MustParsePrefix("10.50.0.0/24")

const (
	namespace = "default"
	workloads = "app in (echoserver,web)"
	replicas  = 3       // of both
	single    = "web-0" // the pod of the workload with one replica

	// Both images are the lab's web image under another name.
	firstImage = "cilium/echoserver:latest"
	nextImage  = "cilium/echoserver:next"
)

// stage is the demo's cluster and what runs on it.
type stage struct {
	*lab.Cluster
	out       *screen
	client    client
	installed bool // stayput
	replicas  int  // of all workloads
}

// prepare loads the images and starts the client.
func (s *stage) prepare(ctx context.Context) error {
	for _, n := range s.Nodes {
		for _, image := range []string{firstImage, nextImage} {
			_, err := n.Run(ctx, "/opt/lab/containerd/ctr", "-n", "k8s.io", "images", "tag", lab.WebImage, "docker.io/"+image)
			if err != nil {
				return err
			}
		}
	}
	pod := pinned("client", s.spare().Name, nil)
	if _, err := s.Client().CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return err
	}
	s.client.node = s.spare()
	return lab.Until(ctx, "the client", func() (bool, error) {
		var err error
		s.client.pod, err = s.spare().Sandbox(ctx, namespace, pod.Name)
		return err == nil, err
	})
}

// spare is the node without workloads at first, hence the emptiest one.
func (s *stage) spare() *lab.ClusterNode { return s.Nodes[len(s.Nodes)-1] }

// install installs stayput on the running cluster: its pods keep running.
func (s *stage) install(ctx context.Context) error {
	s.out.step("stayput is installed: an agent with the IPAM plugin on every node, and two controllers")
	s.installed = true
	s.out.command([]string{"kubectl", "apply", "--server-side", "-f", "deploy/crds.yaml", "-f",
		"deploy/persistentpodstates.yaml", "-f", "deploy/install.yaml", "-f", "deploy/gate-policies.yaml"})
	return s.Install(ctx, lab.InstallOptions{Manifests: true})
}

// joinPool switches pools on and gives the single pod an address of one. The echoservers go: they have had their act.
func (s *stage) joinPool(ctx context.Context) error {
	s.out.step("Pools are switched on, and %s gets an IP of one", single)
	if _, err := s.Kubectl(ctx, "", "delete", "statefulset", "echoserver", "--cascade=foreground"); err != nil {
		return err
	}
	s.replicas = 1
	// The client stays where it is.
	if _, err := s.Kubectl(ctx, "", "cordon", s.spare().Name); err != nil {
		return err
	}
	before, err := s.pods(ctx)
	if err != nil {
		return err
	}
	chart, err := lab.Chart(ctx)
	if err != nil {
		return err
	}
	deploy := filepath.Dir(chart)
	s.out.command([]string{"kubectl", "apply", "--server-side", "-f", "deploy/pools-crds.yaml", "-f", "deploy/pools.yaml",
		"-f", "deploy/pools-gate-policies.yaml"})
	_, err = s.Kubectl(ctx, "", "apply", "--server-side", "-f", filepath.Join(deploy, "pools-crds.yaml"),
		"-f", filepath.Join(deploy, "pools.yaml"), "-f", filepath.Join(deploy, "pools-gate-policies.yaml"))
	if err != nil {
		return err
	}
	s.out.command([]string{"kubectl", "apply", "-f", "pool.yaml"})
	err = lab.Until(ctx, "the pool", func() (bool, error) {
		_, err := s.Kubectl(ctx, poolYAML, "apply", "--server-side", "-f", "-")
		return err == nil, err
	})
	if err != nil {
		return err
	}
	s.out.says("web          now with stayput.io/pools: anywhere")
	_, err = s.Kubectl(ctx, "", "patch", "statefulset", "web", "--type=merge", "-p",
		`{"spec":{"template":{"metadata":{"annotations":{"stayput.io/pools":"anywhere"}}}}}`)
	if err != nil {
		return err
	}
	if _, err := s.again(ctx, before, all); err != nil {
		return err
	}
	_, err = s.Kubectl(ctx, "", "uncordon", s.spare().Name)
	return err
}

// deploy starts the workloads on all nodes except the spare one.
func (s *stage) deploy(ctx context.Context) error {
	s.out.step("The workloads start; %s joins once they run", s.spare().Name)
	s.replicas = replicas
	if _, err := s.Kubectl(ctx, "", "cordon", s.spare().Name); err != nil {
		return err
	}
	for _, yaml := range []string{echoserver, web} {
		if _, err := s.Kubectl(ctx, yaml, "apply", "--server-side", "-f", "-"); err != nil {
			return err
		}
	}
	if _, err := s.again(ctx, nil, all); err != nil {
		return err
	}
	_, err := s.Kubectl(ctx, "", "uncordon", s.spare().Name)
	return err
}

// clear removes the workloads.
func (s *stage) clear(ctx context.Context) error {
	_, err := s.Kubectl(ctx, "", "delete", "statefulsets", "--all", "--cascade=foreground")
	return err
}

// pod is a workload's pod.
type pod struct {
	place
	container string
	ready     bool
}

// pods returns the workloads' pods by name.
func (s *stage) pods(ctx context.Context) (map[string]pod, error) {
	list, err := s.Client().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: workloads})
	if err != nil {
		return nil, err
	}
	pods := map[string]pod{}
	for _, p := range list.Items {
		ip, err := netip.ParseAddr(p.Status.PodIP)
		pods[p.Name] = pod{
			place:     place{p.Spec.NodeName, ip},
			container: runs(&p),
			ready:     err == nil && lab.Ready(&p),
		}
	}
	return pods, nil
}

func runs(p *corev1.Pod) string {
	if len(p.Status.ContainerStatuses) == 0 {
		return ""
	}
	return p.Status.ContainerStatuses[0].ContainerID
}

// again waits until all pods are Ready, restarted ones with a new container.
func (s *stage) again(
	ctx context.Context, before map[string]pod, restarted func(node string) bool,
) (map[string]pod, error) {
	var now map[string]pod
	return now, lab.Until(ctx, "the pods to run", func() (bool, error) {
		var err error
		if now, err = s.pods(ctx); err != nil || len(now) < s.replicas {
			return false, err
		}
		for name, p := range now {
			was, ok := before[name]
			if !p.ready || ok && restarted(was.node) && p.container == was.container {
				return false, nil
			}
		}
		return true, nil
	})
}

// load puts ballast for half a node on every home and removes it from other nodes, so that the scheduler prefers any
// other node.
func (s *stage) load(ctx context.Context, homes map[string]pod) error {
	pods := s.Client().CoreV1().Pods(namespace)
	isHome := map[string]bool{}
	for _, p := range homes {
		isHome[p.node] = true
	}
	for _, n := range s.Nodes {
		if !isHome[n.Name] {
			now := int64(0)
			if err := pods.Delete(ctx, "ballast-"+n.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil &&
				!apierrors.IsNotFound(err) {
				return err
			}
			continue
		}
		node, err := s.Client().CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		half := corev1.ResourceList{
			corev1.ResourceCPU:    *resource.NewMilliQuantity(node.Status.Allocatable.Cpu().MilliValue()/2, resource.DecimalSI),
			corev1.ResourceMemory: *resource.NewQuantity(node.Status.Allocatable.Memory().Value()/2, resource.BinarySI),
		}
		_, err = pods.Create(ctx, pinned("ballast", n.Name, half), metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return lab.Until(ctx, "the ballast", func() (bool, error) {
		list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "app=ballast"})
		if err != nil {
			return false, err
		}
		for _, p := range list.Items {
			if !lab.Ready(&p) {
				return false, nil
			}
		}
		return len(list.Items) == len(isHome), nil
	})
}

// pinned returns a pod that only takes up room on its node.
func pinned(kind, node string, room corev1.ResourceList) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: kind + "-" + node, Labels: map[string]string{"app": kind}},
		Spec: corev1.PodSpec{
			NodeName: node,
			Containers: []corev1.Container{{
				Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever,
				Resources: corev1.ResourceRequirements{Requests: room},
			}},
		},
	}
}

// command shows a kubectl command and runs it.
func (s *stage) command(ctx context.Context, args ...string) error {
	s.out.command(append([]string{"kubectl"}, args...))
	_, err := s.Kubectl(ctx, "", args...)
	return err
}

// show is command with kubectl's output.
func (s *stage) show(ctx context.Context, args ...string) error {
	s.out.command(append([]string{"kubectl"}, args...))
	text, err := s.Kubectl(ctx, "", args...)
	s.out.printed(text)
	return err
}

// wait leaves the cluster up for users to explore.
func (s *stage) wait(ctx context.Context) error {
	config, err := s.Kubeconfig()
	if err != nil {
		return err
	}
	s.out.line("")
	s.out.line("The cluster stays up until Ctrl-C or until this make ends, and is then removed completely.")
	s.out.line("In another shell:")
	s.out.line("")
	s.out.line("  export KUBECONFIG=%s", config)
	s.out.line("  export PATH=$PATH:%s", filepath.Dir(s.KubectlPath()))
	s.out.line("  kubectl get pods -o wide; kubectl get retainedips,persistentpodstates")
	<-ctx.Done()
	return nil
}
