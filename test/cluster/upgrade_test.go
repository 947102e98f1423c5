package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
)

// traffic is pods that come and go: those of a StatefulSet that are deleted one by one and must come home, those of
// one that is rolled again and again, and ordinary ones.
type traffic struct {
	t        *testing.T
	c        *lab.Cluster
	ns       string
	stopping chan struct{}
	group    sync.WaitGroup
	came     atomic.Int64
}

const lanes = 4

// startTraffic returns once everything has begun.
func startTraffic(t *testing.T, c *lab.Cluster, ns string) *traffic {
	t.Helper()
	tr := &traffic{t: t, c: c, ns: ns, stopping: make(chan struct{})}
	apply(t, c, ns, statefulSet("churn", lanes, map[string]string{retainIP: "1h"}))
	apply(t, c, ns, statefulSet("rolled", 3, map[string]string{retainIP: "1h"}))
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
			tr.t.Errorf("%s was on %s with %s and is on %s with %s", name, was.Spec.NodeName, was.Status.PodIP, is.Spec.NodeName, is.Status.PodIP)
		}
	}
}

// wait returns once ok, or when patience ends, which is an error.
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
		return pods.Delete(ctx, was.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(was.UID))}) == nil
	})
	tr.wait("the successor of "+was.Name, func(ctx context.Context) bool {
		var err error
		is, err = pods.Get(ctx, was.Name, metav1.GetOptions{})
		return err == nil && is.UID != was.UID && isReady(is)
	})
	tr.same(map[string]*corev1.Pod{was.Name: was}, map[string]*corev1.Pod{was.Name: is})
	tr.came.Add(1)
	return is
}

func (tr *traffic) ordinary(name string) {
	pods := tr.c.Client().CoreV1().Pods(tr.ns)
	now := int64(1)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		TerminationGracePeriodSeconds: &now,
		Containers:                    []corev1.Container{{Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever}},
	}}
	tr.wait(name+" to be created", func(ctx context.Context) bool {
		_, err := pods.Create(ctx, pod, metav1.CreateOptions{})
		return err == nil
	})
	tr.wait(name+" to run", func(ctx context.Context) bool {
		p, err := pods.Get(ctx, name, metav1.GetOptions{})
		return err == nil && p.Status.Phase == corev1.PodRunning
	})
	tr.wait(name+" to be deleted", func(ctx context.Context) bool { return pods.Delete(ctx, name, metav1.DeleteOptions{}) == nil })
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

// more waits until so many more pods have come.
func (tr *traffic) more(n int64) {
	tr.t.Helper()
	to := tr.came.Load() + n
	until(tr.t, fmt.Sprintf("%d more pods", n), func(context.Context) bool { return tr.came.Load() >= to || tr.t.Failed() })
}

// noneFailed checks that no sandbox could not be made.
func (tr *traffic) noneFailed() {
	tr.t.Helper()
	events, err := tr.c.Client().CoreV1().Events(tr.ns).List(testContext(tr.t), metav1.ListOptions{FieldSelector: "type=Warning"})
	check(tr.t, err)
	for _, e := range events.Items {
		switch e.Reason {
		case "FailedCreatePodSandBox", "InvalidAnnotation", "IPNotRestored", "IPRetentionRefused", "IPNotConfigured", "Failed":
			tr.t.Errorf("%s: %s: %s", e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
}

// plugins checks that every node has this plugin.
func plugins(t *testing.T, c *lab.Cluster, want string) {
	t.Helper()
	content, err := os.ReadFile(want)
	check(t, err)
	for _, n := range c.Nodes {
		until(t, "the plugin of "+n.Name, func(context.Context) bool {
			is, err := os.ReadFile(n.Path("/opt/cni/bin/stayput"))
			return err == nil && bytes.Equal(is, content)
		})
	}
}

func TestAnUpgradeAndItsRollbackAreNotNoticedByPods(t *testing.T) {
	dir, remove, err := lab.TempDir("release")
	check(t, err)
	t.Cleanup(func() { check(t, remove()) })
	next, err := lab.BuildRelease(t.Context(), dir, "v0.1.99")
	check(t, err)
	image, err := lab.BuildImage(t.Context(), next, "v0.1.99")
	check(t, err)

	o := lab.ClusterOptions{}
	c := ownCluster(t, &o)
	check(t, c.Install(testContext(t), lab.InstallOptions{}))
	check(t, c.LoadImage(testContext(t), image))
	plugins(t, c, o.Product.Plugin)
	ns := namespace(t, c)
	tr := startTraffic(t, c, ns)
	tr.more(10)

	check(t, c.Upgrade(testContext(t), map[string]any{"image": map[string]any{"tag": "v0.1.99"}}))
	plugins(t, c, next.Plugin)
	tr.more(40)
	if said := kubectl(t, c, "get", "pods", "-n", lab.SystemNamespace, "-o", "jsonpath={.items[*].spec.containers[*].image}"); bytes.Count([]byte(said), []byte("v0.1.99")) != 3+1+2 {
		t.Errorf("after the upgrade there run %s", said)
	}

	_, err = c.Helm(testContext(t), "rollback", lab.Release, "--namespace="+lab.SystemNamespace, "--force-conflicts")
	check(t, err)
	check(t, c.WaitInstalled(testContext(t)))
	plugins(t, c, o.Product.Plugin)
	tr.more(40)
	tr.stop()
	t.Logf("%d pods came and went", tr.came.Load())
	if tr.came.Load() < 100 {
		tr.t.Errorf("only %d pods came and went", tr.came.Load())
	}
	tr.noneFailed()
	unique(t, c)
}
