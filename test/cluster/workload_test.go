package cluster

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// deploy applies a workload in a namespace.
func deploy(t *testing.T, c *lab.Cluster, namespace string, w lab.Workload) {
	t.Helper()
	must.Do(t, c.Deploy(testContext(t), namespace, w))
}

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

const (
	hostname = corev1.LabelHostname
	retainIP = v1alpha1.AnnotationRetainIP
)

const (
	auto      = kruisev1alpha1.AnnotationAutoGenerate
	required  = kruisev1alpha1.AnnotationRequiredTopology
	preferred = kruisev1alpha1.AnnotationPreferredTopology
)

// Annotations by which a workload's pods come home without a retention.
var (
	requiresNode = map[string]string{auto: "true", required: hostname}
	prefersNode  = map[string]string{auto: "true", preferred: hostname}
)

// place is where a pod is.
type place struct{ node, ip string }

// places waits until pods 0 to n-1 of a StatefulSet are Ready and replace those before, and returns them.
func places(
	t *testing.T, c *lab.Cluster, ns, name string, n int, before map[string]*corev1.Pod,
) map[string]*corev1.Pod {
	t.Helper()
	pods := map[string]*corev1.Pod{}
	for i := range n {
		pod := fmt.Sprintf("%s-%d", name, i)
		if old := before[pod]; old != nil {
			pods[pod] = successor(t, c, old)
		} else {
			pods[pod] = ready(t, c, ns, pod)
		}
	}
	return pods
}

// cameHome checks that pods have the nodes and addresses of their predecessors.
func cameHome(t *testing.T, before, after map[string]*corev1.Pod) {
	t.Helper()
	for name, was := range before {
		is := after[name]
		if (place{was.Spec.NodeName, was.Status.PodIP}) != (place{is.Spec.NodeName, is.Status.PodIP}) {
			t.Errorf("%s was on %s with %s and is on %s with %s",
				name, was.Spec.NodeName, was.Status.PodIP, is.Spec.NodeName, is.Status.PodIP)
		}
	}
}

// comeHome waits for the successors of all pods of a StatefulSet, and checks that they came home.
func comeHome(
	t *testing.T, c *lab.Cluster, ns, name string, before map[string]*corev1.Pod,
) (after map[string]*corev1.Pod) {
	t.Helper()
	after = places(t, c, ns, name, len(before), before)
	cameHome(t, before, after)
	return after
}

// sameNodes checks that pods have the nodes of their predecessors.
func sameNodes(t *testing.T, before, after map[string]*corev1.Pod) {
	t.Helper()
	for name, was := range before {
		if is := after[name]; is.Spec.NodeName != was.Spec.NodeName {
			t.Errorf("%s was on %s and is on %s", name, was.Spec.NodeName, is.Spec.NodeName)
		}
	}
}

// deletePods deletes all pods of a StatefulSet at once.
func deletePods(t *testing.T, c *lab.Cluster, ns, name string) {
	t.Helper()
	must.Do(t, c.Client().CoreV1().Pods(ns).DeleteCollection(testContext(t), metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: "app=" + name}))
}

// tilted starts the pods of a StatefulSet on two nodes only, so that the scheduler would rather have them on the third,
// emptier one.
func tilted(t *testing.T, c *lab.Cluster, ns string, w lab.Workload) map[string]*corev1.Pod {
	t.Helper()
	kubectl(t, c, "cordon", "node-3")
	defer kubectl(t, c, "uncordon", "node-3")
	deploy(t, c, ns, w)
	pods := places(t, c, ns, w.Name, w.Replicas, nil)
	for _, pod := range pods {
		if pod.Spec.NodeName == "node-3" {
			t.Fatalf("%s is on the node that should be empty", pod.Name)
		}
	}
	return pods
}

// getPod returns a pod, Ready or not, or nil if there is none.
func getPod(t *testing.T, c *lab.Cluster, ns, name string) *corev1.Pod {
	t.Helper()
	pod, err := c.Client().CoreV1().Pods(ns).Get(testContext(t), name, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return pod
}

func isGated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == "stayput.io/placement"
	})
}

// waitsFor waits until the successor of a pod is gated, and an Event says why.
func waitsFor(t *testing.T, c *lab.Cluster, was *corev1.Pod, why string) (waiting *corev1.Pod) {
	t.Helper()
	until(t, "a gated "+was.Name, func(context.Context) bool {
		waiting = getPod(t, c, was.Namespace, was.Name)
		return waiting != nil && waiting.UID != was.UID && isGated(waiting)
	})
	if message := saysOf(t, c, was.Namespace, "Pod", was.Name, "WaitingForHome"); !strings.Contains(message, why) {
		t.Errorf("the Event says %q, not %q", message, why)
	}
	return waiting
}

// soon is longer than a home-wait of 5s, and shorter than the default.
const soon = 30 * time.Second

// wentElsewhere waits until the successor of a pod with a home-wait of 5s is Ready on another node, and checks how long
// it waited and what the Event says.
func wentElsewhere(t *testing.T, c *lab.Cluster, was *corev1.Pod, why string) *corev1.Pod {
	t.Helper()
	after := successor(t, c, was)
	if after.Spec.NodeName == was.Spec.NodeName {
		t.Errorf("%s is at home, which %s", was.Name, why)
	}
	if waited := scheduledAt(after).Sub(after.CreationTimestamp.Time); waited < 4*time.Second || waited > soon {
		t.Errorf("%s waited for %s", was.Name, waited)
	}
	if message := saysOf(t, c, was.Namespace, "Pod", was.Name, "HomeGivenUp"); !strings.Contains(message, why) {
		t.Errorf("the Event says %q", message)
	}
	return after
}

func scheduledAt(pod *corev1.Pod) time.Time {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// named matches a node by its name.
// apartFrom is a term by which pods are on other nodes than those of an app.
func apartFrom(app string) corev1.PodAffinityTerm {
	return corev1.PodAffinityTerm{
		TopologyKey: hostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
	}
}

// rather are terms by which pods prefer a node.
func rather(weight int32, node string) []corev1.PreferredSchedulingTerm {
	return []corev1.PreferredSchedulingTerm{{Weight: weight, Preference: corev1.NodeSelectorTerm{
		MatchExpressions: []corev1.NodeSelectorRequirement{{
			Key: hostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
		}},
	}}}
}

func scale(t *testing.T, c *lab.Cluster, ns, name string, replicas int) {
	t.Helper()
	kubectl(t, c, "scale", "statefulset/"+name, "--replicas="+strconv.Itoa(replicas), "-n", ns)
}

// deployed waits until a Deployment has n Ready pods, none of which is among those before.
func deployed(t *testing.T, c *lab.Cluster, ns, name string, n int, before []*corev1.Pod) (pods []*corev1.Pod) {
	t.Helper()
	until(t, fmt.Sprintf("%d pods of %s", n, name), func(ctx context.Context) bool {
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return false
		}
		pods = nil
		for i := range list.Items {
			pod := &list.Items[i]
			if lab.Ready(pod) && !slices.ContainsFunc(before, func(b *corev1.Pod) bool { return b.UID == pod.UID }) {
				pods = append(pods, pod)
			}
		}
		return len(pods) == n
	})
	return pods
}

// sameTogether checks that pods have the addresses, on the nodes, of those before, whichever has which.
func sameTogether(t *testing.T, before, after []*corev1.Pod) {
	t.Helper()
	at := func(pods []*corev1.Pod) (all []string) {
		for _, pod := range pods {
			all = append(all, pod.Status.PodIP+" on "+pod.Spec.NodeName)
		}
		slices.Sort(all)
		return all
	}
	if !slices.Equal(at(before), at(after)) {
		t.Errorf("the addresses were %v and are %v", at(before), at(after))
	}
}

// gatedPods returns the pods of the cluster with our gate.
func gatedPods(t *testing.T, c *lab.Cluster) (names []string) {
	t.Helper()
	all, err := c.Client().CoreV1().Pods("").List(testContext(t), metav1.ListOptions{})
	must.Do(t, err)
	for i := range all.Items {
		if isGated(&all.Items[i]) {
			names = append(names, all.Items[i].Namespace+"/"+all.Items[i].Name)
		}
	}
	return names
}

func noneGated(t *testing.T, c *lab.Cluster) {
	t.Helper()
	if names := gatedPods(t, c); len(names) > 0 {
		t.Errorf("gated: %v", names)
	}
}

// stream creates pods that ask for their address, one after the other, until the returned function is called. They
// cannot be scheduled: only whether they are gated matters. If one cannot be created, the test fails.
func stream(t *testing.T, c *lab.Cluster, ns string) (end func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	made := 0
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{
					Name: fmt.Sprintf("stream-%d", i), Annotations: retain("10m"),
				},
				Spec: corev1.PodSpec{
					NodeSelector: map[string]string{"no": "node"},
					Containers:   []corev1.Container{{Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever}},
				},
			}
			if _, err := c.Client().CoreV1().Pods(ns).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
				t.Errorf("a pod cannot be created: %v", err)
				return
			}
			made++
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	end = sync.OnceValue(func() int {
		cancel()
		wg.Wait()
		return made
	})
	t.Cleanup(func() { end() })
	return end
}

// untouched checks that pods were neither replaced nor restarted.
func untouched(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	for name, was := range pods {
		is := ready(t, c, was.Namespace, name)
		if is.UID != was.UID || is.Status.PodIP != was.Status.PodIP || is.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s was %s with %s and is %s with %s, restarted %d times",
				name, was.UID, was.Status.PodIP, is.UID, is.Status.PodIP, is.Status.ContainerStatuses[0].RestartCount)
		}
	}
}

func addressesOf(pods map[string]*corev1.Pod) map[string]string {
	all := map[string]string{}
	for name, pod := range pods {
		all[name] = pod.Status.PodIP
	}
	return all
}

func keptAddresses(t *testing.T, was, is map[string]*corev1.Pod) {
	t.Helper()
	for name, addr := range addressesOf(was) {
		if got := addressesOf(is)[name]; got != addr {
			t.Errorf("%s had %s and has %s", name, addr, got)
		}
	}
}
