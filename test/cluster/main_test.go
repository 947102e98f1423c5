// Package cluster holds the tests that run on a real Kubernetes: etcd, API server, controller manager, scheduler
// and nodes with kubelet and containerd, see package lab.
//
//	admission_test.go  and authorization_test.go: a cluster with the manifests of stayput but none of its programs
//	bare_test.go       the lab itself, on stock host-local
//	installed_test.go  the cluster of most tests, with stayput installed from its image
//
// Tests share these clusters, one after the other in the order of the files, and have a namespace each. A test that
// breaks what others need, such as a node, restores it before it ends. A test of the last cluster that looks at its
// namespace only, and breaks nothing, calls beside, and so runs after those, in parallel with others of its kind. A
// test with a cluster of its own calls alone: these run last, in parallel too. Tests wait for conditions and assert no
// times.
//
// # To add a test
//
// Take the cluster with installed or beside, a namespace with namespace, apply YAML with apply, and wait with until.
// Name the test after the behaviour.
package cluster

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	// Tests that may run in parallel wait for others and for a place: see beside and alone.
	if err := flag.Set("test.parallel", "100"); err != nil {
		fmt.Fprintln(os.Stderr, "test/cluster:", err)
		return 1
	}
	code := m.Run()
	ends := []func() error{common.end, pooled.end}
	if built.remove != nil {
		ends = append(ends, built.remove)
	}
	for _, end := range ends {
		if err := end(); err != nil {
			fmt.Fprintln(os.Stderr, "test/cluster:", err)
			code = 1
		}
	}
	return code
}

// patience bounds a test that hangs; it asserts nothing.
const patience = 2 * time.Minute

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// logIfFailed writes the logs of a cluster to the test's output when the test ends, if it has failed.
func logIfFailed(t *testing.T, c *lab.Cluster) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			c.WriteLogs(t.Output())
		}
	})
}

// once returns a function that calls f at its first call. Unlike with sync.OnceFunc, f may end the test although the
// function is also deferred: OnceFunc would panic at the second call and end all tests.
func once(f func()) func() {
	var o sync.Once
	return func() { o.Do(f) }
}

// until waits until ok returns true.
func until(t *testing.T, what string, ok func(context.Context) bool) {
	t.Helper()
	ctx := testContext(t)
	must.Within(t, patience, what, func() bool { return ok(ctx) })
}

// kubectl runs kubectl and returns its output.
func kubectl(t *testing.T, c *lab.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(testContext(t), "", args...)
	must.Do(t, err)
	return out
}

// atEnd runs kubectl when the test ends.
func atEnd(t *testing.T, c *lab.Cluster, args ...string) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := c.Kubectl(ctx, "", args...)
		must.Do(t, err)
	})
}

// apply applies YAML in a namespace.
func apply(t *testing.T, c *lab.Cluster, namespace, yaml string) {
	t.Helper()
	_, err := c.Kubectl(testContext(t), yaml, "apply", "--server-side", "-n", namespace, "-f", "-")
	must.Do(t, err)
}

// namespace creates a namespace for one test, ready for pods, and deletes it without waiting, unless the test did.
func namespace(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	ctx := testContext(t)
	made, err := c.Client().CoreV1().Namespaces().Create(ctx, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	must.Do(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		now := int64(0)
		// With hundreds of pods it can take longer than the API server's limit for a request.
		for ctx.Err() == nil {
			err = c.Client().CoreV1().Pods(made.Name).DeleteCollection(ctx,
				metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
			if !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) {
				break
			}
		}
		must.Do(t, err)
		err = c.Client().CoreV1().Namespaces().Delete(ctx, made.Name, metav1.DeleteOptions{})
		if !apierrors.IsNotFound(err) {
			must.Do(t, err)
		}
	})
	until(t, "the service account of the namespace", func(ctx context.Context) bool {
		_, err := c.Client().CoreV1().ServiceAccounts(made.Name).Get(ctx, "default", metav1.GetOptions{})
		return err == nil
	})
	return made.Name
}

// deploy applies a workload in a namespace.
func deploy(t *testing.T, c *lab.Cluster, namespace string, w lab.Workload) {
	t.Helper()
	must.Do(t, c.Deploy(testContext(t), namespace, w))
}

const (
	hostname = corev1.LabelHostname
	retainIP = v1alpha1.AnnotationRetainIP
)

// retain returns the annotations of pods whose addresses are kept for that long, and more of them by name and value.
func retain(how string, more ...string) map[string]string {
	all := map[string]string{retainIP: how}
	for pair := range slices.Chunk(more, 2) {
		all[pair[0]] = pair[1]
	}
	return all
}

// pools returns the annotations of pods with addresses of pools.
func pools(names string) map[string]string { return map[string]string{v1alpha1.AnnotationPools: names} }

var recreate = appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}

// ready returns the pod once it is Ready.
func ready(t *testing.T, c *lab.Cluster, namespace, name string) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	until(t, name+" to be Ready", func(ctx context.Context) bool {
		var err error
		pod, err = c.Client().CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		return err == nil && lab.Ready(pod)
	})
	return pod
}

// successor returns the pod that replaces the one before, once it is Ready.
func successor(t *testing.T, c *lab.Cluster, before *corev1.Pod) *corev1.Pod {
	t.Helper()
	until(t, "another "+before.Name, func(ctx context.Context) bool {
		pod, err := c.Client().CoreV1().Pods(before.Namespace).Get(ctx, before.Name, metav1.GetOptions{})
		return err == nil && pod.UID != before.UID
	})
	return ready(t, c, before.Namespace, before.Name)
}

// sandbox returns the pod's sandbox in the containerd of its node.
func sandbox(t *testing.T, c *lab.Cluster, pod *corev1.Pod) lab.Pod {
	t.Helper()
	s, err := c.Node(pod.Spec.NodeName).Sandbox(testContext(t), pod.Namespace, pod.Name)
	must.Do(t, err)
	return s
}

// reaches checks that one pod reaches another by its address.
func reaches(t *testing.T, c *lab.Cluster, from, to *corev1.Pod) {
	t.Helper()
	reachesAt(t, c, from, to, ip(t, to))
}

// reachesAt checks that one pod reaches another by one of its addresses.
func reachesAt(t *testing.T, c *lab.Cluster, from, to *corev1.Pod, addr netip.Addr) {
	t.Helper()
	answer, err := c.Node(from.Spec.NodeName).GetFrom(testContext(t), sandbox(t, c, from), addr)
	must.Do(t, err)
	if answer.Name != to.Name || !answer.Has(addr) {
		t.Errorf("%s asks %v, an address of %s, and %s with %v answers", from.Name, addr, to.Name, answer.Name, answer.Addrs)
	}
}

func ip(t *testing.T, pod *corev1.Pod) netip.Addr {
	t.Helper()
	addr, err := netip.ParseAddr(pod.Status.PodIP)
	must.Do(t, err)
	return addr
}
