package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// ClusterOptions configure a cluster. The zero value is three nodes with stock host-local.
type ClusterOptions struct {
	// Nodes is the number of nodes, named node-1 and so on; 3 if 0.
	Nodes int
	// IPAM is the IPAM plugin in the nodes' CNI configuration, host-local or stayput; host-local if empty.
	IPAM string
	// Versions are other ones than those of the tests.
	Versions Versions
	// UpgradesTo is the version of Kubernetes that [Cluster.UpgradeControlPlane] moves to, such as 1.37.
	UpgradesTo string
	// NoNRI starts the nodes' runtimes without NRI.
	NoNRI bool
	// NoAnnotations leaves the capability for pod annotations out of the CNI configuration.
	NoAnnotations bool
	// Flannel routes between the nodes; if nil, they have routes from the start.
	Flannel *FlannelOptions
	// Calico connects the pods and routes between the nodes, by its own IPAM; nil with Flannel.
	Calico *CalicoOptions
	// Proxy is the mode of the nodes' kube-proxy, iptables or nftables; if empty, there is none.
	Proxy     string
	ProxyArgs []string
	// Product is what [Cluster.Install] and [Cluster.InstallProcesses] install. If IPAM is stayput, its plugin is in the
	// nodes' /opt/cni/bin from the start.
	Product Product
	// NodeMonitorGracePeriod is how long a node may be silent before it becomes NotReady; 16 s if 0.
	NodeMonitorGracePeriod time.Duration
	// Additional flags of the control plane's programs, and additional fields of the kubelet configuration.
	APIServerArgs, ControllerManagerArgs, SchedulerArgs []string
	KubeletConfig                                       map[string]any
	// ControlFiles are additional files of the control plane's machine, by path, for those flags to name.
	ControlFiles map[string][]byte
}

// Cluster is a Kubernetes cluster of lab nodes. fabric.go lists its addresses.
type Cluster struct {
	// Control is the control plane's machine; the fabric is its network namespace.
	Control *Node
	// The services of the control plane.
	Etcd, APIServer, ControllerManager, Scheduler *Service
	// CalicoControllers is Calico's kube-controllers with what frees leaked addresses; nil without
	// [ClusterOptions].Calico.
	CalicoControllers *Service
	// Nodes are node-1, node-2, ...
	Nodes []*ClusterNode
	// ControlNode is the node on the control plane's machine, for pods that tolerate its taint; nil until Install.
	ControlNode *ClusterNode
	// Controllers are the pods of stayput-controller; nil until Install.
	Controllers *Controllers
	// ControllerProcesses are the controllers without a pod, started by StartController.
	ControllerProcesses []*ControllerProcess
	// Published is the chart's reference in a registry, such as oci://…/stayput. If it is set, Install and Upgrade take
	// the repository's version from there, and the nodes pull its image; nothing is loaded into them.
	Published string
	// Dir is a folder for files about the cluster, removed by Close.
	Dir string

	options     ClusterOptions
	made        int    // the number of the newest node
	next        string // folder with the programs of UpgradesTo
	flanneld    string // folder with flanneld
	proxy       string // folder with kube-proxy
	flannel     string // flannel's CNI plugin
	calico      calico
	image       string // of Install
	bin         ClusterBin
	credentials *credentials
	listener    net.Listener // of the relay to the API server
	registry    net.Listener // of the relay to the registry, nil unless StartRegistry was called
	client      *kubernetes.Clientset
	values      map[string]any // of Install's release
	close       func() error
}

// StartCluster starts a cluster and waits until its nodes are Ready. The caller must close it.
func StartCluster(ctx context.Context, o ClusterOptions) (*Cluster, error) {
	if os.Geteuid() != 0 {
		return nil, errNotRoot
	}
	bin, err := o.Versions.Build(ctx)
	if err != nil {
		return nil, err
	}
	next, err := o.next(ctx)
	if err != nil {
		return nil, err
	}
	sweep()
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	if o.IPAM == "" {
		o.IPAM = "host-local"
	}
	if o.NodeMonitorGracePeriod == 0 {
		o.NodeMonitorGracePeriod = 16 * time.Second
	}
	c := &Cluster{options: o, bin: bin, next: next, made: o.Nodes}
	c.close = atEnd(c.end)
	if err := c.needs(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if err := c.start(ctx); err != nil {
		var logs bytes.Buffer
		c.WriteLogs(&logs)
		return nil, errors.Join(fmt.Errorf("starting a cluster: %w\n%s", err, logs.Bytes()), c.Close())
	}
	return c, nil
}

// next returns the folder with the programs of UpgradesTo; "" if there is none.
func (o *ClusterOptions) next(ctx context.Context) (string, error) {
	if o.UpgradesTo == "" {
		return "", nil
	}
	bin, err := Versions{Kubernetes: o.UpgradesTo}.Build(ctx)
	return bin.Kubernetes, err
}

func (c *Cluster) start(ctx context.Context) (err error) {
	var removeDir func() error
	if c.Dir, removeDir, err = TempDir("cluster"); err != nil {
		return err
	}
	end := c.close
	c.close = func() error { return errors.Join(end(), removeDir()) }
	names := []string{controlPlane}
	for i := range c.options.Nodes + spare {
		names = append(names, nodeName(i+1))
	}
	if c.credentials, err = newCredentials(names); err != nil {
		return err
	}
	if c.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	go relay(c.listener, c.dialServer)
	if c.client, err = kubernetes.NewForConfig(c.RESTConfig()); err != nil {
		return err
	}
	if err := c.makeControlPlane(ctx); err != nil {
		return err
	}
	// The API server takes longest; the nodes come up in parallel.
	c.Nodes = make([]*ClusterNode, c.options.Nodes)
	err = together(len(c.Nodes)+1, func(i int) error {
		if i == len(c.Nodes) {
			return c.startControlPlane(ctx)
		}
		var err error
		c.Nodes[i], err = c.makeNode(ctx, i+1)
		return err
	})
	if err != nil {
		return err
	}
	if c.calico.folder != "" {
		if err := c.startCalico(ctx); err != nil {
			return err
		}
	}
	err = together(len(c.Nodes), func(i int) error {
		if err := c.Nodes[i].startKubelet(ctx); err != nil {
			return err
		}
		return c.Nodes[i].startNetwork(ctx)
	})
	if err != nil {
		return err
	}
	for _, n := range c.Nodes {
		if err := c.WaitReady(ctx, n); err != nil {
			return err
		}
	}
	return c.waitDefaultAccount(ctx)
}

// together runs f for 0 to n-1 concurrently and waits for all of them.
func together(n int, f func(i int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// binds are the cluster component folders mounted into every machine.
func (c *Cluster) binds() map[string]string {
	binds := map[string]string{"/opt/lab/kubernetes": c.bin.Kubernetes, "/opt/lab/etcd": c.bin.Etcd}
	if c.next != "" {
		binds[path.Clean(labNext)] = c.next
	}
	if c.flanneld != "" {
		binds["/opt/lab/flanneld"] = c.flanneld
	}
	if c.proxy != "" {
		binds["/opt/lab/kubeproxy"] = c.proxy
	}
	if c.calico.folder != "" {
		binds[path.Clean(labCalico)] = c.calico.folder
	}
	return binds
}

// WaitReady waits until the API server reports the node Ready since the start of its running kubelet.
func (c *Cluster) WaitReady(ctx context.Context, n *ClusterNode) error {
	bootID, err := os.ReadFile(filepath.Join(n.dir, "boot_id"))
	if err != nil {
		return err
	}
	return Until(ctx, n.Name+" to be Ready", func() (bool, error) {
		node, err := c.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		// After a boot the old condition persists until the kubelet or the node lifecycle controller updates it.
		current := node.Status.NodeInfo.BootID == strings.TrimSpace(string(bootID))
		return current && nodeReady(node), nil
	})
}

// WaitNotReady waits until the API server reports the node as lost.
func (c *Cluster) WaitNotReady(ctx context.Context, n *ClusterNode) error {
	return Until(ctx, n.Name+" to be NotReady", func() (bool, error) {
		node, err := c.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		return err == nil && !nodeReady(node), err
	})
}

// nodeReady reports whether pods can be scheduled: the taint is removed a moment after the condition changes.
func nodeReady(node *corev1.Node) bool {
	for _, taint := range node.Spec.Taints {
		if strings.HasPrefix(taint.Key, "node.kubernetes.io/") && taint.Key != corev1.TaintNodeUnschedulable {
			return false
		}
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// waitDefaultAccount waits for the service account that every pod needs, created by the controller manager.
func (c *Cluster) waitDefaultAccount(ctx context.Context) error {
	return Until(ctx, "the default service account", func() (bool, error) {
		_, err := c.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		if err == nil {
			_, err = c.client.CoreV1().ConfigMaps("default").Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
		}
		return err == nil, err
	})
}

// Until calls ok until it returns true or ctx is done. It continues after errors, since the API server may be away, and
// returns the last one.
func Until(ctx context.Context, what string, ok func() (bool, error)) error {
	for {
		asked := time.Now()
		done, err := ok()
		if done {
			return nil
		}
		select {
		case <-time.After(min(max(50*time.Millisecond, 2*time.Since(asked)), time.Second)):
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, errors.Join(ctx.Err(), err))
		}
	}
}

func (c *Cluster) dialServer(ctx context.Context) (net.Conn, error) {
	return c.Control.Dial(ctx, "tcp", net.JoinHostPort(serverIP.String(), serverPort))
}

// RESTConfig lets this process talk to the API server as [Admin], without client-side rate limiting.
func (c *Cluster) RESTConfig() *rest.Config { return c.restConfig(c.credentials.tokens[Admin]) }

func (c *Cluster) restConfig(token string) *rest.Config {
	return &rest.Config{
		Host:            serverURL,
		BearerToken:     token,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.credentials.cert},
		Dial:            func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dialServer(ctx) },
		QPS:             -1,
	}
}

// RESTConfigAs is RESTConfig impersonating another user. The groups of a service account are implied; other claims of a
// token, such as a node name, are missing: see [Cluster.AccountToken].
func (c *Cluster) RESTConfigAs(user string, groups ...string) *rest.Config {
	config := c.RESTConfig()
	if parts := strings.Split(user, ":"); len(parts) == 4 && strings.HasPrefix(user, "system:serviceaccount:") {
		groups = append(groups, "system:serviceaccounts", "system:serviceaccounts:"+parts[2], "system:authenticated")
	}
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return config
}

// Client returns a client that uses RESTConfig.
func (c *Cluster) Client() *kubernetes.Clientset { return c.client }

// kubeconfigFor returns a kubeconfig for a program in the fabric, with the user's static token.
func (c *Cluster) kubeconfigFor(user string) []byte {
	return c.credentials.kubeconfig(serverURL, map[string]any{"token": c.credentials.tokens[user]})
}

// Kubeconfig writes [Admin]'s kubeconfig for programs of this machine, such as kubectl, and returns its path. They
// reach the API server through a loopback port while this process lives and the cluster is open.
func (c *Cluster) Kubeconfig() (string, error) {
	return c.writeKubeconfig("kubeconfig", c.credentials.tokens[Admin])
}

func (c *Cluster) writeKubeconfig(name, token string) (string, error) {
	file := filepath.Join(c.Dir, name)
	data := c.credentials.kubeconfig("https://"+c.listener.Addr().String(), map[string]any{"token": token})
	// Renamed into place: another kubectl may be reading it.
	f, err := os.CreateTemp(c.Dir, ".kubeconfig")
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return file, os.Rename(f.Name(), file)
}

// KubectlPath returns the path of kubectl on this machine.
func (c *Cluster) KubectlPath() string { return filepath.Join(c.bin.Kubernetes, "kubectl") }

// Kubectl runs kubectl as [Admin] and returns its standard output. Errors include its standard error.
func (c *Cluster) Kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	file, err := c.Kubeconfig()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, c.KubectlPath(), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+file, "HOME="+c.Dir) // its cache is removed with the cluster
	cmd.Stdin = strings.NewReader(stdin)
	cmd.WaitDelay = time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err,
			bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// WaitForCRDs waits until the API server serves what all CustomResourceDefinitions define. kubectl wait fails at one
// that is so new that it has no conditions.
func (c *Cluster) WaitForCRDs(ctx context.Context) error {
	return Until(ctx, "all CustomResourceDefinitions to be established", func() (bool, error) {
		_, err := c.Kubectl(ctx, "", "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
		return err == nil, err
	})
}

// Command returns a program of this machine to run in the fabric's network namespace, which reaches nodes and pods by
// address, with [Admin]'s kubeconfig in its environment.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	netns := fmt.Sprintf("--net=/proc/%d/ns/net", c.Control.Pid())
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{netns, "--", name}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Control.Path(controlConfig+Admin+".kubeconfig"))
	cmd.WaitDelay = time.Second
	return cmd
}

// LoadImage loads a docker-archive, a file of this machine, into all nodes.
func (c *Cluster) LoadImage(ctx context.Context, archive string) error {
	nodes := c.allNodes()
	return together(len(nodes), func(i int) error { return nodes[i].LoadImage(ctx, archive) })
}

// allNodes returns Nodes and ControlNode.
func (c *Cluster) allNodes() []*ClusterNode {
	if c.ControlNode == nil {
		return c.Nodes
	}
	return append(slices.Clone(c.Nodes), c.ControlNode)
}

// Node returns the node with that name; nil if there is none.
func (c *Cluster) Node(name string) *ClusterNode {
	for _, n := range c.allNodes() {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// logTail is how many trailing bytes of a log explain a failed test.
const logTail = 8 << 10

// WriteLogs writes the API server's nodes, pods and events and the end of every log, for a failed test.
func (c *Cluster) WriteLogs(w io.Writer) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if c.APIServer != nil && c.APIServer.Process() != nil {
		for _, what := range []string{"nodes", "pods", "events"} {
			args := []string{"get", what, "-A", "-o", "wide", "--request-timeout=3s"}
			if what == "events" {
				args = []string{"get", what, "-A", "--sort-by=.metadata.creationTimestamp", "--request-timeout=3s"}
			}
			out, err := c.Kubectl(ctx, "", args...)
			fmt.Fprintf(w, "--- %s\n%s", what, out)
			if err != nil {
				fmt.Fprintln(w, err)
			}
		}
	}
	for _, m := range c.machines() {
		logs, _ := filepath.Glob(m.LogFile("*"))
		// namespace_pod_uid/container/restart.log
		pods, _ := filepath.Glob(m.disk("/var/log/pods/" + SystemNamespace + "_*/*/*.log"))
		for _, log := range append(logs, pods...) {
			data, err := os.ReadFile(log)
			if err != nil {
				continue
			}
			if len(data) > logTail {
				data = data[len(data)-logTail:]
			}
			fmt.Fprintf(w, "--- %s %s\n%s\n", m.options.Name, strings.TrimPrefix(log, m.dir), data)
		}
	}
}

// machines returns all machines of the cluster, the control plane's last.
func (c *Cluster) machines() []*Node {
	var machines []*Node
	for _, n := range c.Nodes {
		if n != nil && n.Node != nil {
			machines = append(machines, n.Node)
		}
	}
	for _, n := range c.ControllerProcesses {
		machines = append(machines, n.Node)
	}
	if c.Control != nil {
		machines = append(machines, c.Control)
	}
	return machines
}

// Close stops the cluster and removes everything that belongs to it. It may be called again.
func (c *Cluster) Close() error { return c.close() }

func (c *Cluster) end() error {
	var err error
	for _, l := range []net.Listener{c.listener, c.registry} {
		if l == nil {
			continue
		}
		if e := l.Close(); !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	machines := c.machines()
	return errors.Join(err, together(len(machines), func(i int) error { return machines[i].Close() }))
}

// Ready reports whether a pod is Ready and not being deleted.
func Ready(pod *corev1.Pod) bool {
	if pod.DeletionTimestamp != nil {
		return false
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
