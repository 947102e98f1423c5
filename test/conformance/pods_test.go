//go:build conformance

package conformance

import (
	"context"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// life is a pod from its creation to its deletion.
type life struct {
	born, last *corev1.Pod
	end        time.Time // when its deletion was observed; zero before
}

func (l *life) name() types.NamespacedName {
	return types.NamespacedName{Namespace: l.born.Namespace, Name: l.born.Name}
}

// stateful reports whether the pod belongs to a StatefulSet.
func (l *life) stateful() bool {
	owner := metav1.GetControllerOf(l.born)
	return owner != nil && owner.Kind == "StatefulSet"
}

// watchPods observes every pod created from now on. The returned function ends the watch and returns the pods in the
// order of their creation.
func watchPods(t *testing.T, c *lab.Cluster) func() []*life {
	t.Helper()
	pods := c.Client().CoreV1().Pods("")
	ctx, cancel := context.WithCancel(t.Context())
	list, err := pods.List(ctx, metav1.ListOptions{})
	must.Do(t, err)
	w, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: pods.Watch,
	})
	must.Do(t, err)
	var lives []*life
	byUID := map[types.UID]*life{}
	done := make(chan struct{})
	stop := func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	go func() {
		defer close(done)
		for event := range w.ResultChan() {
			pod, ok := event.Object.(*corev1.Pod)
			if !ok {
				if event.Type == watch.Error {
					t.Errorf("watching pods: %v", event.Object)
				}
				continue
			}
			l := byUID[pod.UID]
			switch {
			case event.Type == watch.Added:
				l = &life{born: pod}
				byUID[pod.UID] = l
				lives = append(lives, l)
			case l == nil: // created before the watch
				continue
			case event.Type == watch.Deleted:
				l.end = time.Now()
			}
			l.last = pod
		}
	}()
	return func() []*life {
		stop()
		return lives
	}
}

// everyPodKeepsItsAddress checks that every pod asked for its address to be retained, and that the nodes retain the
// addresses of deleted pods.
func everyPodKeepsItsAddress(t *testing.T, c *lab.Cluster, pods []*life) {
	t.Helper()
	newest := map[types.NamespacedName]*life{}
	for _, l := range pods {
		newest[l.name()] = l
	}
	addresses, kept := 0, 0
	for _, l := range pods {
		pod := l.last
		if l.born.Annotations[retainIP] != retention {
			t.Errorf("%s was created without %s", l.name(), retainIP)
		}
		if pod.Spec.HostNetwork || pod.Status.PodIP == "" {
			continue
		}
		addresses++
		if l != newest[l.name()] || l.end.IsZero() || time.Since(l.end) > 9*time.Minute { // of ten
			continue
		}
		file := path.Join("/var/lib/cni/networks/pods", pod.Status.PodIP)
		data, err := os.ReadFile(c.Node(pod.Spec.NodeName).Path(file))
		record := string(data)
		if !strings.HasPrefix(record, "{") || !strings.Contains(record, pod.Namespace) ||
			!strings.Contains(record, pod.Name) {
			t.Errorf("%s does not keep %s for %s: %q, %v", pod.Spec.NodeName, pod.Status.PodIP, l.name(), record, err)
			continue
		}
		kept++
	}
	t.Logf("%d pods were created, %d had their own address, %d of these are retained", len(pods), addresses, kept)
	if kept == 0 {
		t.Error("no address is retained")
	}
	for _, n := range c.Nodes {
		holds(t, n.Node)
	}
}

// everyStatefulSetsPodComesHome checks that pods of StatefulSets were gated and then placed on their predecessor's node
// with its address. It returns how many came home.
func everyStatefulSetsPodComesHome(t *testing.T, pods []*life) int {
	t.Helper()
	home := map[types.NamespacedName]*corev1.Pod{}
	returned := 0
	for _, l := range pods {
		if !l.stateful() {
			continue
		}
		pod, name := l.last, l.name()
		gate := corev1.PodSchedulingGate{Name: "stayput.io/placement"}
		if l.born.Spec.NodeName == "" && !slices.Contains(l.born.Spec.SchedulingGates, gate) {
			t.Errorf("%s was created without the gate", name)
		}
		if pod.Status.PodIP == "" {
			continue // not started
		}
		if before := home[name]; before != nil {
			if pod.Spec.NodeName != before.Spec.NodeName || pod.Status.PodIP != before.Status.PodIP {
				t.Errorf("%s came back to %s with %s, it was on %s with %s", name,
					pod.Spec.NodeName, pod.Status.PodIP, before.Spec.NodeName, before.Status.PodIP)
			}
			returned++
		}
		home[name] = pod
	}
	t.Logf("%d pods came back to their nodes with their addresses", returned)
	return returned
}
