//go:build floods

package flood

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// An editor of one namespace, whose pods outlast each start of a controller.
func TestControllersOutliveTheLargestPodsOfATenant(t *testing.T) {
	c := installed(t, lab.ClusterOptions{Nodes: 1}, nil)
	gatesPods(t, c)
	for _, flood := range []struct {
		name  string
		pods  int
		shape func(*corev1.Pod)
	}{
		{"terms of node affinity, each empty", 320, func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
					NodeSelectorTerms: make([]corev1.NodeSelectorTerm, 32_000)}}}
		}},
		{"as many such terms as an object can have", 12, func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
					NodeSelectorTerms: make([]corev1.NodeSelectorTerm, 640_000)}}}
		}},
		{"the name of an owner", 100, func(p *corev1.Pod) {
			yes := true
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "A", UID: "u",
				Name: strings.Repeat("x", 1_300_000), Controller: &yes}}
		}},
		{"what no rule reads", 260, func(p *corev1.Pod) {
			p.Spec.Containers[0].Args = []string{strings.Repeat("x", 1_350_000)}
		}},
	} {
		t.Run(flood.name, func(t *testing.T) {
			t.Cleanup(func() { deleteLarge(t, c, flood.pods) })
			outlived(t, c, func([]corev1.Pod) {
				for i := range flood.pods { // an API server may need a quarter of a minute for one of them
					pod := asking(fmt.Sprint("large-", i))
					flood.shape(pod)
					_, err := c.Client().CoreV1().Pods("default").Create(testContext(t), pod, metav1.CreateOptions{})
					must.Do(t, err)
				}
				placesPods(testContext(t), t, c)
			})
			must.Do(t, c.Controllers.Restart(testContext(t)))
			must.Do(t, c.Controllers.WaitReady(testContext(t)))
			outlived(t, c, func(controllers []corev1.Pod) {
				placesPods(testContext(t), t, c)
				for _, pod := range controllers {
					if n := pod.Status.ContainerStatuses[0].RestartCount; n > 0 {
						t.Errorf("%s started %d times", pod.Name, n+1)
					}
				}
			})
		})
	}
}

// deleteLarge deletes the pods of a flood one by one: an API server that reads all of them at once has no memory left.
func deleteLarge(t *testing.T, c *lab.Cluster, pods int) {
	t.Helper()
	for i := range pods {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := c.Client().CoreV1().Pods("default").Delete(ctx, fmt.Sprint("large-", i),
			metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		cancel()
		must.Do(t, client.IgnoreNotFound(err))
	}
}

// asking is a pod that is gated, and that no node takes: it keeps its size for as long as it is there.
func asking(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"stayput.io/retain-ip": "1m"}},
		Spec: corev1.PodSpec{
			Containers:      []corev1.Container{{Name: "web", Image: lab.WebImage}},
			SchedulingGates: []corev1.PodSchedulingGate{{Name: "example.com/hold"}},
		},
	}
}

// placesPods waits until a pod that asks for its address has been gated and placed.
func placesPods(ctx context.Context, t *testing.T, c *lab.Cluster) {
	t.Helper()
	pod := asking("ordinary")
	pod.Spec.SchedulingGates = nil
	pods := c.Client().CoreV1().Pods("default")
	made, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	must.Do(t, err)
	if !home.Gated(made) {
		t.Fatal("it is not gated")
	}
	must.Do(t, lab.Until(ctx, "an ordinary pod to be placed", func() (bool, error) {
		is, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return !home.Gated(is), nil
	}))
	must.Do(t, pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
	must.Do(t, lab.Until(ctx, "it to be gone", func() (bool, error) {
		list, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + pod.Name})
		return err == nil && len(list.Items) == 0, err
	}))
}
