//go:build long

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const versionBefore = "v0.0.9"

// chartBefore creates the chart of an earlier version.
func chartBefore(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must.Do(t, lab.WriteChartBefore(t.Context(), dir, versionBefore))
	return dir
}

// uids returns the names and UIDs of the namespace's RetainedIPs.
func uids(t *testing.T, c *lab.Cluster, ns string) string {
	t.Helper()
	return kubectl(t, c, "get", "retainedips", "-n", ns, "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}{"\n"}{end}`)
}

// traffic is a stream of pods that come and go: those of a StatefulSet are deleted one by one and must come home, those
// of another are rolled again and again, and others are ordinary.
type traffic struct {
	t        *testing.T
	c        *lab.Cluster
	ns       string
	stopping chan struct{}
	group    sync.WaitGroup
	came     atomic.Int64
}

const lanes = 4

// startTraffic returns once the pods of both StatefulSets are Ready.
func startTraffic(t *testing.T, c *lab.Cluster, ns string) *traffic {
	t.Helper()
	tr := &traffic{t: t, c: c, ns: ns, stopping: make(chan struct{})}
	deploy(t, c, ns, lab.Workload{Name: "churn", Replicas: lanes, Annotations: retain("1h")})
	deploy(t, c, ns, lab.Workload{Name: "rolled", Replicas: 3, Annotations: retain("1h")})
	churned, rolled := places(t, c, ns, "churn", lanes, nil), places(t, c, ns, "rolled", 3, nil)
	for _, pod := range churned {
		tr.group.Go(func() { tr.each(func(int) { pod = tr.recreate(pod) }) })
	}
	tr.group.Go(func() {
		tr.each(func(int) {
			kubectl(t, c, "rollout", "restart", "statefulset", "rolled", "-n", ns)
			after := places(t, c, ns, "rolled", 3, rolled)
			tr.same(rolled, after)
			rolled = after
			tr.came.Add(3)
		})
	})
	for lane := range 2 {
		tr.group.Go(func() {
			tr.each(func(i int) { tr.ordinary(fmt.Sprintf("job-%d-%d", lane, i)) })
		})
	}
	tr.group.Go(func() {
		tr.each(func(int) {
			unique(t, c)
			time.Sleep(100 * time.Millisecond)
		})
	})
	t.Cleanup(tr.stop)
	return tr
}

func (tr *traffic) each(f func(i int)) {
	for i := 0; ; i++ {
		select {
		case <-tr.stopping:
			return
		default:
			f(i)
		}
		if tr.t.Failed() {
			return
		}
	}
}

func (tr *traffic) same(before, after map[string]*corev1.Pod) {
	for name, was := range before {
		if is := after[name]; (place{was.Spec.NodeName, was.Status.PodIP}) != (place{is.Spec.NodeName, is.Status.PodIP}) {
			tr.t.Errorf("%s was on %s with %s and is on %s with %s",
				name, was.Spec.NodeName, was.Status.PodIP, is.Spec.NodeName, is.Status.PodIP)
		}
	}
}

// wait waits until ok returns true; if that takes longer than patience, the test fails.
func (tr *traffic) wait(what string, ok func(context.Context) bool) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for !ok(ctx) {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			tr.t.Errorf("waiting for %s: %v", what, ctx.Err())
			return
		}
	}
}

func (tr *traffic) recreate(was *corev1.Pod) (is *corev1.Pod) {
	pods := tr.c.Client().CoreV1().Pods(tr.ns)
	tr.wait(was.Name+" to be deleted", func(ctx context.Context) bool {
		thisOne := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(was.UID))}
		return pods.Delete(ctx, was.Name, thisOne) == nil
	})
	tr.wait("the successor of "+was.Name, func(ctx context.Context) bool {
		var err error
		is, err = pods.Get(ctx, was.Name, metav1.GetOptions{})
		return err == nil && is.UID != was.UID && lab.Ready(is)
	})
	tr.same(map[string]*corev1.Pod{was.Name: was}, map[string]*corev1.Pod{was.Name: is})
	tr.came.Add(1)
	return is
}

func (tr *traffic) ordinary(name string) {
	pods := tr.c.Client().CoreV1().Pods(tr.ns)
	now := int64(1)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &now,
			Containers: []corev1.Container{
				{Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever},
			},
		},
	}
	tr.wait(name+" to be created", func(ctx context.Context) bool {
		_, err := pods.Create(ctx, pod, metav1.CreateOptions{})
		return err == nil
	})
	tr.wait(name+" to run", func(ctx context.Context) bool {
		p, err := pods.Get(ctx, name, metav1.GetOptions{})
		return err == nil && p.Status.Phase == corev1.PodRunning
	})
	tr.wait(name+" to be deleted", func(ctx context.Context) bool {
		return pods.Delete(ctx, name, metav1.DeleteOptions{}) == nil
	})
	tr.came.Add(1)
}

func (tr *traffic) stop() {
	select {
	case <-tr.stopping:
	default:
		close(tr.stopping)
	}
	tr.group.Wait()
}

// more waits until n more pods have come.
func (tr *traffic) more(n int64) {
	tr.t.Helper()
	to := tr.came.Load() + n
	until(tr.t, fmt.Sprintf("%d more pods", n), func(context.Context) bool {
		return tr.came.Load() >= to || tr.t.Failed()
	})
}

// noneFailed checks that no sandbox failed and no address was refused.
func (tr *traffic) noneFailed() {
	tr.t.Helper()
	events, err := tr.c.Client().CoreV1().Events(tr.ns).List(testContext(tr.t),
		metav1.ListOptions{FieldSelector: "type=Warning"})
	must.Do(tr.t, err)
	for _, e := range events.Items {
		switch e.Reason {
		case "FailedCreatePodSandBox", "InvalidAnnotation",
			"IPNotRestored", "IPRetentionRefused", "IPNotConfigured", "Failed":
			tr.t.Errorf("%s: %s: %s", e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
}

// plugins waits until every node has this plugin.
func plugins(t *testing.T, c *lab.Cluster, want string) {
	t.Helper()
	content, err := os.ReadFile(want)
	must.Do(t, err)
	for _, n := range c.Nodes {
		until(t, "the plugin of "+n.Name, func(context.Context) bool {
			is, err := os.ReadFile(n.Path("/opt/cni/bin/stayput"))
			return err == nil && bytes.Equal(is, content)
		})
	}
}

// shape selects the columns of a definition and the properties of its spec.
const shape = "jsonpath-as-json={.spec.versions[0].additionalPrinterColumns[*].name}" +
	"{.spec.versions[0].schema.openAPIV3Schema.properties.spec.properties}"

// allRun reports whether a component has exactly n pods, all Ready and of this version.
func allRun(ctx context.Context, c *lab.Cluster, component, version string, n int) bool {
	pods, err := c.Client().CoreV1().Pods(lab.SystemNamespace).List(ctx,
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	if err != nil || len(pods.Items) != n {
		return false
	}
	for i := range pods.Items {
		if pod := &pods.Items[i]; !lab.Ready(pod) || pod.Spec.Containers[0].Image != lab.ProductImage+":"+version {
			return false
		}
	}
	return true
}

// Helm changes the definitions first, and then agents and controllers at the same time, in no fixed order. Here the
// controllers are held back: at the upgrade, new agents run with old controllers, and at the rollback, old agents with
// new controllers, while pods come and go.
func TestPodsDoNotNoticeAnUpgradeAndItsRollback(t *testing.T) {
	alone(t)
	dir, remove, err := lab.TempDir("release")
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, remove()) })
	before, err := lab.BuildRelease(t.Context(), dir, versionBefore)
	must.Do(t, err)
	now, version, image := builtImage(t)
	chart, err := lab.Chart(t.Context())
	must.Do(t, err)

	c := ownCluster(t, &lab.ClusterOptions{Product: before})
	install := lab.InstallOptions{
		Chart: chartBefore(t), Values: map[string]any{"uninstall": map[string]any{"job": false}},
	}
	must.Do(t, c.Install(testContext(t), install))
	must.Do(t, c.LoadImage(testContext(t), image))
	plugins(t, c, before.Plugin)
	defined := func() string {
		return kubectl(t, c, "get", "crd", "retainedips.stayput.io", "-o", shape) +
			kubectl(t, c, "get", "crd", "persistentpodstates.apps.kruise.io", "-o", shape)
	}
	definedBefore, definedNow := defined(), ""
	for _, file := range []string{"crds.yaml", "persistentpodstates.yaml"} {
		definedNow += kubectl(t, c, "create", "--dry-run=client", "-f", filepath.Join(filepath.Dir(chart), file), "-o", shape)
	}
	if definedBefore == definedNow {
		t.Fatal("the definitions of both versions are the same")
	}
	ns := namespace(t, c)
	tr := startTraffic(t, c, ns)
	tr.more(10)
	const agents, controllers = 3 + 1, 2
	ids := uids(t, c, ns)
	if strings.Count(ids, "\n") != lanes+3 {
		t.Fatalf("RetainedIPs: %s", ids)
	}

	for _, change := range []struct {
		name, from, to, defined string
		plugin                  string
		by                      func(context.Context) error
	}{
		{"upgrade", versionBefore, version, definedNow, now.Plugin, func(ctx context.Context) error {
			return c.Upgrade(ctx, nil)
		}},
		{"rollback", version, versionBefore, definedBefore, before.Plugin, func(ctx context.Context) error {
			if _, err := c.Helm(ctx, "rollback", lab.Release, "--namespace="+lab.SystemNamespace); err != nil {
				return err
			}
			return c.WaitInstalled(ctx)
		}},
	} {
		kubectl(t, c, "rollout", "pause", "deployment", "stayput-controller", "-n", lab.SystemNamespace)
		done := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		began := tr.came.Load()
		go func() { done <- change.by(ctx) }()
		until(t, "the agents of the "+change.name, func(ctx context.Context) bool {
			return allRun(ctx, c, "agent", change.to, agents)
		})
		plugins(t, c, change.plugin)
		rolled := tr.came.Load()
		tr.more(20)
		if is := defined(); is != change.defined {
			t.Errorf("after the %s the definitions are %s, want %s", change.name, is, change.defined)
		}
		if !allRun(ctx, c, "controller", change.from, controllers) {
			t.Errorf("in the middle of the %s the controllers are not all of %s", change.name, change.from)
		}
		mixed := tr.came.Load()
		kubectl(t, c, "rollout", "resume", "deployment", "stayput-controller", "-n", lab.SystemNamespace)
		must.Do(t, <-done)
		until(t, "the controllers of the "+change.name, func(ctx context.Context) bool {
			return allRun(ctx, c, "controller", change.to, controllers)
		})
		finished := tr.came.Load()
		t.Logf("%s: %d pods came while the agents were replaced, %d with controllers of the other version, "+
			"%d while the controllers were replaced", change.name, rolled-began, mixed-rolled, finished-mixed)
		if rolled == began || finished == mixed {
			t.Errorf("during the %s no pod came", change.name)
		}
		tr.more(10)
		if is := uids(t, c, ns); is != ids {
			t.Errorf("after the %s the RetainedIPs are\n%swant\n%s", change.name, is, ids)
		}
	}
	tr.stop()
	t.Logf("%d pods came and went", tr.came.Load())
	tr.noneFailed()
	unique(t, c)

	// After an uninstallation without the Job, the agents keep all promises until stayput is installed again.
	churned := places(t, c, ns, "churn", lanes, nil)
	_, err = c.Uninstall(testContext(t))
	must.Do(t, err)
	until(t, "no pod of stayput to be left", func(context.Context) bool {
		return allRun(t.Context(), c, "agent", "", 0) && allRun(t.Context(), c, "controller", "", 0)
	})
	plugins(t, c, before.Plugin)
	for _, n := range c.Nodes {
		if _, err := os.Stat(n.Path("/etc/cni/net.d/00-stayput.conflist")); err != nil {
			t.Error(err)
		}
	}
	must.Do(t, c.Install(testContext(t), install))
	promised(t, c, churned)
	if is := uids(t, c, ns); is != ids {
		t.Errorf("after the second installation the RetainedIPs are\n%swant\n%s", is, ids)
	}
	deletePods(t, c, ns, "churn")
	cameHome(t, churned, places(t, c, ns, "churn", lanes, churned))
}
