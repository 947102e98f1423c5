package lab

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path"
	"slices"
	"time"
)

// serverPort is 443 because the API server itself holds the kubernetes Service's address: see the fabric.
const serverPort = "443"

var serverURL = "https://" + net.JoinHostPort(serverIP.String(), serverPort)

// controlPlane is the name of the control plane's machine and of its Node.
const controlPlane = "control-plane"

const (
	labKubernetes = "/opt/lab/kubernetes/"
	labNext       = "/opt/lab/kubernetes-next/"
	labEtcd       = "/opt/lab/etcd/"
	etcdDir       = "/var/lib/etcd"
	controlConfig = "/etc/kubernetes/" // + user + ".kubeconfig"
)

// makeControlPlane boots the control plane's machine with the fabric and sets up its services.
func (c *Cluster) makeControlPlane(ctx context.Context) error {
	o := c.options
	control, err := startNode(ctx, c.bin.Bin, NodeOptions{
		Name: controlPlane, Networks: c.podNetworks(podSubnet(0)), Idle: true, binds: c.binds(),
		NoNRI: o.NoNRI, containerdConfig: o.Versions.containerdConfig(),
		connect: func(pid int) error { return makeFabric(pid, c.routedNodes()) },
	})
	if err != nil {
		return err
	}
	c.Control = control
	files := c.credentials.files()
	for _, user := range []string{Admin, "system:kube-controller-manager", "system:kube-scheduler"} {
		files[controlConfig+user+".kubeconfig"] = c.kubeconfigFor(user)
	}
	maps.Copy(files, o.ControlFiles)
	for name, data := range files {
		if err := control.WriteFile(name, data); err != nil {
			return err
		}
	}
	c.Etcd = &Service{node: control, name: "etcd", ready: getFrom(control, "http://127.0.0.1:2379/health"), argv: []string{
		labEtcd + "etcd", "--data-dir=" + etcdDir, "--log-level=warn",
		// Tests cut the power of nodes, never of etcd's machine.
		"--unsafe-no-fsync",
	}}
	c.APIServer = &Service{node: control, name: "kube-apiserver", ready: getFrom(control, serverURL+"/readyz"),
		argv: append([]string{
			labKubernetes + "kube-apiserver",
			"--etcd-servers=http://127.0.0.1:2379",
			"--secure-port=" + serverPort,
			"--advertise-address=" + serverIP.String(),
			"--service-cluster-ip-range=10.96.0.0/16",
			"--endpoint-reconciler-type=" + c.reconciler(),
			"--tls-cert-file=" + serverCertFile,
			"--tls-private-key-file=" + serverKeyFile,
			"--token-auth-file=" + tokensFile,
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-signing-key-file=" + accountsKeyFile,
			"--service-account-key-file=" + accountsKeyFile,
			"--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--allow-privileged",
			"--kubelet-preferred-address-types=InternalIP",
		}, o.APIServerArgs...)}
	c.ControllerManager = &Service{node: control, keep: true, name: "kube-controller-manager", argv: append([]string{
		labKubernetes + "kube-controller-manager",
		"--kubeconfig=" + controlConfig + "system:kube-controller-manager.kubeconfig",
		"--leader-elect=false",
		"--use-service-account-credentials",
		"--service-account-private-key-file=" + accountsKeyFile,
		"--root-ca-file=" + serverCertFile,
		"--flex-volume-plugin-dir=/var/lib/kubernetes/volumeplugins", // the default is in /usr
		"--node-monitor-period=1s",
		// Its controllers start one by one, each creating an account; the default rate limit would make that take seconds.
		"--kube-api-qps=1000", "--kube-api-burst=1000",
		"--node-monitor-grace-period=" + o.NodeMonitorGracePeriod.String(),
	}, o.ControllerManagerArgs...)}
	c.Scheduler = &Service{node: control, keep: true, name: "kube-scheduler", argv: append([]string{
		labKubernetes + "kube-scheduler",
		"--kubeconfig=" + controlConfig + "system:kube-scheduler.kubeconfig",
		"--leader-elect=false",
	}, o.SchedulerArgs...)}
	return nil
}

// ReconfigureAPIServer restarts the API server with other additional flags than those of its ClusterOptions.
func (c *Cluster) ReconfigureAPIServer(ctx context.Context, args ...string) error {
	return c.APIServer.restartAs(ctx, func(argv []string) []string {
		own := argv[:len(argv)-len(c.options.APIServerArgs)]
		c.options.APIServerArgs = args
		return slices.Concat(own, args)
	})
}

// UpgradeControlPlane replaces the control plane's programs by those of the version UpgradesTo, one after the other as
// the version skew policy wants it.
func (c *Cluster) UpgradeControlPlane(ctx context.Context) error {
	for _, s := range []*Service{c.APIServer, c.ControllerManager, c.Scheduler} {
		if err := s.restartAs(ctx, func(argv []string) []string {
			return append([]string{labNext + path.Base(argv[0])}, argv[1:]...)
		}); err != nil {
			return err
		}
	}
	return nil
}

// reconciler is what keeps the endpoints of the Service kubernetes. Without kube-proxy nobody reads them; it would
// refuse the Service's address without any.
func (c *Cluster) reconciler() string {
	if c.options.Proxy != "" {
		return "lease"
	}
	return "none"
}

// getFrom returns a [Service]'s readiness check: one GET of a URL from within a machine.
func getFrom(machine *Node, url string) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // checks readiness, not identity
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return machine.Dial(ctx, network, address)
		},
	}}
	return func(ctx context.Context) error { return getOK(ctx, client, url) }
}

func getOK(ctx context.Context, client *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if resp.StatusCode/100 != 2 { // Felix has no content
		return fmt.Errorf("%s: %s: %s", url, resp.Status, body)
	}
	return nil
}

// SaveEtcd writes a snapshot of etcd to a file of this machine.
func (c *Cluster) SaveEtcd(ctx context.Context, file string) error {
	const snapshot = "/var/tmp/snapshot.db"
	if err := os.RemoveAll(c.Control.Path(snapshot)); err != nil {
		return err
	}
	if _, err := c.Control.Run(ctx, labEtcd+"etcdctl", "snapshot", "save", snapshot); err != nil {
		return err
	}
	return copyFile(c.Control.Path(snapshot), file)
}

// RestoreEtcd replaces etcd's data by a snapshot, as if from a backup. The control plane is down meanwhile, and then
// etcd and the API server run, and of the other services those that ran before. Kubelets, agents and controllers are
// not told. args are for etcdutl snapshot restore: with --bump-revision and --mark-compacted, which etcd's manual
// recommends for Kubernetes, watches notice; without them revisions run backwards.
func (c *Cluster) RestoreEtcd(ctx context.Context, file string, args ...string) error {
	const snapshot = "/var/tmp/restore.db"
	if err := copyFile(file, c.Control.Path(snapshot)); err != nil {
		return err
	}
	run := []*Service{c.Etcd, c.APIServer}
	for _, s := range []*Service{c.ControllerManager, c.Scheduler} {
		if s.wanted() {
			run = append(run, s)
		}
	}
	for _, s := range []*Service{c.Scheduler, c.ControllerManager, c.APIServer, c.Etcd} {
		if err := s.Stop(); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(c.Control.Path(etcdDir)); err != nil {
		return err
	}
	argv := append([]string{labEtcd + "etcdutl", "snapshot", "restore", snapshot, "--data-dir=" + etcdDir}, args...)
	if _, err := c.Control.Run(ctx, argv...); err != nil {
		return err
	}
	return startAll(ctx, run)
}

// startControlPlane starts the services and waits for the API server.
func (c *Cluster) startControlPlane(ctx context.Context) error {
	return startAll(ctx, []*Service{c.Etcd, c.APIServer, c.ControllerManager, c.Scheduler})
}

func startAll(ctx context.Context, services []*Service) error {
	for _, s := range services {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}
