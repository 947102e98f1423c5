package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/cli"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// withoutStayput returns a cluster of three nodes with stock host-local.
func withoutStayput(t *testing.T) *lab.Cluster {
	t.Helper()
	return common.get(t, "without stayput", func() (*lab.Cluster, error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return lab.StartCluster(ctx, lab.ClusterOptions{})
	})
}

func TestTheVerbsReportThatStayputIsNotInstalled(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	for _, args := range [][]string{{"get"}, {"why", "web-0"}, {"release", "web-0", "--yes"}, {"check"}, {"version"}} {
		if s := stayput(t, c, ns, args...); s.code != 1 ||
			!strings.Contains(s.err, "stayput is not installed in this cluster") {
			t.Errorf("%v: %+v", args, s)
		}
	}
}

func TestPreflightTellsOfAClusterWithoutStayput(t *testing.T) {
	c := withoutStayput(t)
	r, code := checked(t, c, "--preflight")
	for _, n := range c.Nodes {
		if level(r, n.Name, "runtime") != cli.LevelOK {
			t.Errorf("of %s it says %+v", n.Name, r)
		}
	}
	if code != 0 || level(r, "", "Kubernetes") != cli.LevelOK || level(r, "", "gate") != cli.LevelOK ||
		level(r, "", "network") != cli.LevelWarn {
		t.Errorf("%d %+v", code, r)
	}

	// A network is known by its DaemonSet and by its settings. That of a cloud comes before a policy engine.
	ns := namespace(t, c)
	set := func(name, node string) string {
		return fmt.Sprintf(`
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: %[1]s}
spec:
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      nodeSelector: {kubernetes.io/hostname: %[2]s}
      containers: [{name: c, image: %[3]s, imagePullPolicy: Never}]
`, name, node, lab.WebImage)
	}
	apply(t, c, ns, set("calico-node", "node-1"))
	kubectl(t, c, "create", "configmap", "calico-config", "-n", "kube-system",
		`--from-literal=cni_network_config={"type": "calico", "mtu": __CNI_MTU__, "ipam": {"type": "host-local"}}`)
	defer kubectl(t, c, "delete", "configmap", "calico-config", "-n", "kube-system")
	until(t, "the network to be told", func(context.Context) bool {
		r, code = checked(t, c, "--preflight")
		return code == 0 && level(r, "", "network") == cli.LevelOK
	})
	if r, code := checked(t, c, "--preflight", "node-1"); code != 0 || r.Warnings+r.Failures != 0 {
		t.Errorf("of node-1 alone it says %d %+v", code, r)
	}
	apply(t, c, ns, set("aws-node", "node-2"))
	until(t, "the cloud's network to be told", func(context.Context) bool {
		r, code = checked(t, c, "--preflight")
		return code == 0 && level(r, "", "network") == cli.LevelWarn
	})

	// What may not be read is a warning.
	kubectl(t, c, "create", "clusterrole", "looker", "--verb=list", "--resource=nodes")
	defer kubectl(t, c, "delete", "clusterrole", "looker")
	kubectl(t, c, "create", "clusterrolebinding", "looker", "--clusterrole=looker", "--user=looker")
	defer kubectl(t, c, "delete", "clusterrolebinding", "looker")
	until(t, "the missing permission to be named", func(context.Context) bool {
		r, code := checked(t, c, "--preflight", "--as=looker")
		return code == 0 && slices.ContainsFunc(r.Findings, func(f cli.Finding) bool {
			return f.Level == cli.LevelWarn && strings.Contains(f.Text, "missing permission to list DaemonSets")
		})
	})
	t.Logf("\n%s", anywhere(t, c, "check", "--preflight").out)
}

func TestPodsOfAStatefulSetReachOneAnotherAcrossNodes(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2})
	a, b := ready(t, c, ns, "web-0"), ready(t, c, ns, "web-1")
	if a.Spec.NodeName == b.Spec.NodeName {
		t.Fatalf("both pods are on %s", a.Spec.NodeName)
	}
	for _, pod := range []*corev1.Pod{a, b} {
		if node := c.Node(pod.Spec.NodeName); !node.Pods.Contains(ip(t, pod)) {
			t.Errorf("%s on %s has the address %v outside %v", pod.Name, node.Name, ip(t, pod), node.Pods)
		}
	}
	reaches(t, c, a, b)
	reaches(t, c, b, a)
}

func TestAPodRunsAgainAfterAPowerLossOfItsNode(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2})
	before, other := ready(t, c, ns, "web-0"), ready(t, c, ns, "web-1")
	node := c.Node(before.Spec.NodeName)
	old := sandbox(t, c, before)

	must.Do(t, node.PowerLoss())
	must.Do(t, c.WaitNotReady(testContext(t), node))
	must.Do(t, node.Boot(testContext(t)))
	must.Do(t, c.WaitReady(testContext(t), node))

	until(t, "a new sandbox of "+before.Name, func(ctx context.Context) bool {
		s, err := node.Sandbox(ctx, ns, before.Name)
		return err == nil && s.ID != old.ID
	})
	after := ready(t, c, ns, before.Name)
	if after.UID != before.UID {
		t.Errorf("the pod was replaced: its node was not away long enough for an eviction")
	}
	reaches(t, c, after, other)
	reaches(t, c, other, after)
}

// As it would if kubelet ran it.
func TestAKilledSchedulerStartsAgain(t *testing.T) {
	c := withoutStayput(t)
	must.Do(t, c.Scheduler.Process().Kill())
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1})
	ready(t, c, ns, "web-0")
}

func TestTheControlPlaneComesBackFromABackup(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1})
	pod := ready(t, c, ns, "web-0")
	backup := t.TempDir() + "/etcd.db"
	must.Do(t, c.SaveEtcd(testContext(t), backup))
	kubectl(t, c, "create", "configmap", "later", "-n", ns)

	must.Do(t, c.APIServer.Kill())
	if _, err := c.Client().CoreV1().Pods(ns).List(testContext(t), metav1.ListOptions{}); err == nil {
		t.Error("the API server answers after it was killed")
	}
	if answer, err := c.Node(pod.Spec.NodeName).Get(testContext(t), ip(t, pod)); err != nil || answer.Name != pod.Name {
		t.Errorf("the pod does not go on without the API server: %v, %v", answer, err)
	}
	must.Do(t, c.RestoreEtcd(testContext(t), backup, "--bump-revision=1000000000", "--mark-compacted"))

	if after := ready(t, c, ns, pod.Name); after.UID != pod.UID {
		t.Error("the pod of the backup was replaced")
	}
	if maps := kubectl(t, c, "get", "configmaps", "-n", ns, "-o", "name"); maps != "configmap/kube-root-ca.crt\n" {
		t.Errorf("after the backup there is %q", maps)
	}
}

func TestAPodReachesTheAPIServerByItsServiceAddress(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1})
	pod := ready(t, c, ns, "web-0")
	conn, err := c.Node(pod.Spec.NodeName).DialFrom(testContext(t), sandbox(t, c, pod), "tcp", "10.96.0.1:443")
	must.Do(t, err)
	must.Do(t, conn.Close())
}

// Agents in containers recognise what dates from an earlier boot by the boot ID.
func TestAContainerSeesTheBootIDOfItsNode(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1})
	pod := ready(t, c, ns, "web-0")
	n := c.Node(pod.Spec.NodeName)
	_, pid, err := n.Container(testContext(t), pod, "web")
	must.Do(t, err)
	const file = "/proc/sys/kernel/random/boot_id"
	inside, err := n.Run(testContext(t), "/usr/bin/cat", fmt.Sprintf("/proc/%d/root%s", pid, file))
	must.Do(t, err)
	ofNode, err := n.Run(testContext(t), "/usr/bin/cat", file)
	must.Do(t, err)
	ofMachine, err := os.ReadFile(file)
	must.Do(t, err)
	if !bytes.Equal(inside, ofNode) || bytes.Equal(inside, ofMachine) {
		t.Errorf("the container sees %s, the node has %s, and the machine %s", inside, ofNode, ofMachine)
	}
}

func TestATokenBoundToAPodNamesItsNode(t *testing.T) {
	c := withoutStayput(t)
	ns := namespace(t, c)
	kubectl(t, c, "create", "serviceaccount", "agent", "-n", ns)
	token, err := c.AccountToken(testContext(t), ns, "agent", "node-2")
	must.Do(t, err)
	review, err := c.Client().AuthenticationV1().TokenReviews().Create(testContext(t), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token},
	}, metav1.CreateOptions{})
	must.Do(t, err)
	if got := review.Status.User.Username; got != "system:serviceaccount:"+ns+":agent" {
		t.Errorf("the user is %q", got)
	}
	if got := review.Status.User.Extra["authentication.kubernetes.io/node-name"]; !slices.Equal(got, []string{"node-2"}) {
		t.Errorf("the node is %q", got)
	}
}

// Sysctls without a namespace that a kubelet sets would stay set on the machine of the tests.
func TestTheMachineKeepsItsSysctls(t *testing.T) {
	c := withoutStayput(t)
	const name = "/proc/sys/vm/overcommit_memory"
	inside, err := c.Nodes[0].Run(testContext(t), "/usr/bin/cat", name)
	must.Do(t, err)
	if strings.TrimSpace(string(inside)) != "1" {
		t.Errorf("kubelet left %s at %q: this test shows nothing", name, inside)
	}
	for file, before := range sysctls {
		after, err := os.ReadFile(file)
		must.Do(t, err)
		if string(after) != before {
			t.Errorf("%s was %q and is %q", file, before, after)
		}
	}
}

// sysctls are the values before this process started any cluster.
var sysctls = func() map[string]string {
	values := map[string]string{}
	for _, file := range []string{
		"/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/panic", "/proc/sys/kernel/panic_on_oops",
	} {
		value, _ := os.ReadFile(file) // after an error, "" differs from any later value
		values[file] = string(value)
	}
	return values
}()
