//go:build long

package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// poolOf returns the YAML of a pool.
func poolOf(name, addresses string) string {
	return strings.NewReplacer("blue", name, "10.6.168.101-10.6.168.110", addresses).Replace(pool) + "---"
}

// gone deletes the pods of a crowd, and waits until all addresses are free. One request for all would take longer than
// the API server's limit.
func gone(t *testing.T, c *lab.Cluster, ns, name string) {
	t.Helper()
	pods := c.Client().CoreV1().Pods(ns)
	list, err := pods.List(testContext(t), metav1.ListOptions{LabelSelector: "app=" + name})
	must.Do(t, err)
	group, ctx := errgroup.WithContext(testContext(t))
	group.SetLimit(20)
	for i := range list.Items {
		group.Go(func() error { return pods.Delete(ctx, list.Items[i].Name, metav1.DeleteOptions{}) })
	}
	must.Do(t, group.Wait())
	until(t, "all addresses to be free", func(context.Context) bool { return len(podIPs(t, c)) == 0 })
}

// letGo returns, of the pods of a crowd, the address that each was told when it was let go, and the pool that it is of.
// claimed collects the pools of the next n PodIPs, in the order in which these are created.
func claimed(t *testing.T, c *lab.Cluster, n int) func() []string {
	t.Helper()
	w, err := typed(t, c).Watch(t.Context(), &v1alpha1.PodIPList{})
	must.Do(t, err)
	t.Cleanup(w.Stop)
	all := make(chan []string, 1)
	go func() {
		var of []string
		defer func() { all <- of }()
		for e := range w.ResultChan() {
			if ip, ok := e.Object.(*v1alpha1.PodIP); ok && e.Type == watch.Added {
				of = append(of, ip.Spec.Pool)
			}
			if len(of) == n {
				return
			}
		}
	}()
	return func() []string {
		t.Helper()
		select {
		case of := <-all:
			if len(of) != n {
				t.Fatalf("the watch ended after %d PodIPs", len(of))
			}
			return of
		case <-testContext(t).Done():
			t.Fatalf("the watch has not shown %d PodIPs", n)
		}
		return nil
	}
}

func TestManyPodsAtOnceGetAddressesOfPools(t *testing.T) {
	c := ownPools(t)
	ns := namespace(t, c)
	const (
		many   = 1000
		atOnce = 32 // the controller's writes at a time: so many claims may be decided on and not written yet
	)
	apply(t, c, ns, poolOf("first", "10.6.16.1-10.6.17.44")+ // 300
		poolOf("second", "10.6.24.1-10.6.25.44")+ // 300
		poolOf("third", "10.6.32.1-10.6.33.144")+ // 400
		poolOf("ten", "10.6.40.1-10.6.40.10"))
	allHave := func(t *testing.T, name string, n int) map[string]string {
		t.Helper()
		var addrs map[string]netip.Addr
		var of map[string]string
		until(t, fmt.Sprintf("%d pods to be let go", n), func(context.Context) bool {
			addrs, of = letGo(t, c, ns, name)
			return len(addrs) >= n
		})
		claims := podIPs(t, c)
		for name, addr := range addrs {
			if is := claims[addr.String()]; is.Spec.PodName != name || is.Spec.Pool != of[name] {
				t.Errorf("%s was told %s of %s, and the PodIP says %+v", name, addr, of[name], is.Spec)
			}
		}
		if len(claims) != n || len(addrs) != n {
			t.Errorf("%d pods have addresses, %d PodIPs are there, want %d", len(addrs), len(claims), n)
		}
		return of
	}

	t.Run("three pools", func(t *testing.T) {
		// A thousand pods take the last of a thousand addresses, of a pool only if the one before has none left.
		sizes := []struct {
			pool string
			n    int
		}{{"first", 300}, {"second", 300}, {"third", 400}}
		inOrder := claimed(t, c, many)
		crowd(t, c, ns, "three", "first,second,third", 0, many)
		counts := map[string]int{}
		for _, from := range allHave(t, "three", many) {
			counts[from]++
		}
		of := inOrder()
		for i, s := range sizes {
			if counts[s.pool] != s.n {
				t.Errorf("pool %s has given %d addresses, want %d", s.pool, counts[s.pool], s.n)
			}
			if i == 0 {
				continue
			}
			before := sizes[i-1]
			late := 0
			for _, from := range of[slices.Index(of, s.pool):] {
				if from == before.pool {
					late++
				}
			}
			t.Logf("%d of pool %s after the first of pool %s", late, before.pool, s.pool)
			if late >= atOnce {
				t.Errorf("pool %s was touched when %d of pool %s were free", s.pool, late, before.pool)
			}
		}
		gone(t, c, ns, "three")
	})

	t.Run("ten addresses", func(t *testing.T) {
		// Ten addresses for thirty pods: those that wait are told why, and go as addresses are freed, the oldest first.
		const rows = 3
		for row := range rows {
			crowd(t, c, ns, "ten", "ten", 10*row, 10*row+10)
			made := time.Now().Truncate(time.Second) // as the API server writes times
			until(t, "the next second", func(context.Context) bool { return time.Now().Truncate(time.Second).After(made) })
		}
		for row := range rows {
			var has map[string]netip.Addr
			until(t, fmt.Sprintf("row %d to have the addresses", row), func(context.Context) bool {
				has, _ = letGo(t, c, ns, "ten")
				for i := range 10 {
					if _, is := has[fmt.Sprintf("ten-%d", 10*row+i)]; !is {
						return false
					}
				}
				return true
			})
			if len(has) != 10 {
				t.Errorf("%v have addresses: some have overtaken others", slices.Sorted(maps.Keys(has)))
			}
			if row == 0 {
				for _, waits := range []string{"ten-10", "ten-29"} {
					saysOf(t, c, ns, "Pod", waits, "WaitingForAddress", "pool ten has no free address, of 10")
				}
			}
			for name := range has {
				must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), name, metav1.DeleteOptions{}))
			}
		}
		until(t, "all addresses to be free", func(context.Context) bool { return len(podIPs(t, c)) == 0 })
	})

	t.Run("a backup", func(t *testing.T) {
		// Fifty pods run, and a backup is made. Then half of them go, others take addresses, and the other half move.
		const run = 50
		apply(t, c, ns, poolOf("blue", "10.6.168.101-10.6.168.160"))
		deploy(t, c, ns, lab.Workload{Name: "web", Replicas: run, Annotations: pools("blue"), Unprobed: true})
		pods := places(t, c, ns, "web", run, nil)
		eachAtOnePlace(t, c, pods)
		backup := t.TempDir() + "/etcd.db"
		must.Do(t, c.SaveEtcd(testContext(t), backup))
		kubectl(t, c, "scale", "statefulset", "web", "-n", ns, fmt.Sprintf("--replicas=%d", run/2))
		deploy(t, c, ns, lab.Workload{Name: "other", Replicas: run / 2, Annotations: pools("blue"), Unprobed: true})
		others := places(t, c, ns, "other", run/2, nil)
		before, taken := addressesOf(pods), 0
		for _, other := range others {
			if slices.Contains(slices.Collect(maps.Values(before)), other.Status.PodIP) {
				taken++
			}
		}
		if taken == 0 {
			t.Error("no pod has an address that a pod of the backup has")
		}
		deletePods(t, c, ns, "web")
		half := map[string]*corev1.Pod{}
		for i := range run / 2 {
			name := fmt.Sprintf("web-%d", i)
			half[name] = pods[name]
		}
		keptAddresses(t, half, places(t, c, ns, "web", run/2, half))

		// The backup is restored: again fifty pods have fifty addresses, and nobody else has any.
		must.Do(t, c.APIServer.Kill())
		must.Do(t, c.RestoreEtcd(testContext(t), backup, "--bump-revision=1000000000", "--mark-compacted"))
		after := map[string]*corev1.Pod{}
		until(t, "all pods to run, none as the backup has it", func(ctx context.Context) bool {
			list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
			if err != nil {
				return false
			}
			clear(after)
			for i := range list.Items {
				pod := &list.Items[i]
				if lab.Ready(pod) && pod.DeletionTimestamp == nil && !ofTheBackup(pods, pod) {
					after[pod.Name] = pod
				}
			}
			return len(after) == run && len(list.Items) == run
		})
		keptAddresses(t, pods, after)
		eachAtOnePlace(t, c, after)
		if left := gatedPods(t, c); len(left) > 0 {
			t.Errorf("gated: %v", left)
		}
		// The others' addresses are freed once their sandboxes are gone, though only the nodes knew of them.
		until(t, "the others' addresses to be free", func(context.Context) bool { return len(podIPs(t, c)) == run })
		for name, ip := range podIPs(t, c) {
			if pod := after[ip.Spec.PodName]; ip.Status.Conflict != "" || pod == nil || pod.Status.PodIP != name {
				t.Errorf("PodIP %s: %+v", name, ip.Spec)
			}
		}
	})
}

// roomless is how long the controller lets a pod that no node has room for keep an address that others wait for.
const roomless = 10 * time.Minute

func TestAPodWithoutRoomGivesItsAddressToOneThatWaits(t *testing.T) {
	c := ownPools(t)
	ns := namespace(t, c)
	apply(t, c, ns, poolOf("one", "10.6.168.101"))
	const addr = "10.6.168.101"
	hasIt := func() string { return podIPs(t, c)[addr].Spec.PodName }
	deploy(t, c, ns, lab.Workload{Name: "stuck", Replicas: 1, Annotations: pools("one"), Unprobed: true,
		Pod: corev1.PodSpec{NodeSelector: map[string]string{"example.com/runs": "nowhere"}}})
	until(t, "the pod that can run nowhere to be told the address", func(context.Context) bool {
		return hasIt() == "stuck-0" && !isGated(getPod(t, c, ns, "stuck-0"))
	})
	stuck := getPod(t, c, ns, "stuck-0")
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: pools("one"), Unprobed: true})
	saysOf(t, c, ns, "Pod", "web-0", "WaitingForAddress", "pool one has no free address, of 1")

	must.Within(t, roomless+patience, "the pod that waits to have it", func() bool { return hasIt() == "web-0" })
	holdTheirAddresses(t, c, map[string]*corev1.Pod{"web-0": ready(t, c, ns, "web-0")})
	saysOf(t, c, ns, "Pod", "stuck-0", "WaitingForAddress", "no node has had room for the pod", addr)
	until(t, "its successor to wait", func(context.Context) bool {
		pod := getPod(t, c, ns, "stuck-0")
		return pod != nil && pod.UID != stuck.UID && isGated(pod)
	})
}

// ofTheBackup reports whether the cluster has a pod as the backup has it, though it has ended.
func ofTheBackup(of map[string]*corev1.Pod, pod *corev1.Pod) bool {
	was := of[pod.Name]
	return was != nil && was.UID == pod.UID
}

// eachAtOnePlace checks that every pod's address is configured on its node, and no address of a pool at two places or
// where it is nobody's.
func eachAtOnePlace(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	want := map[string]string{}
	for _, pod := range pods {
		want[pod.Status.PodIP] = pod.Spec.NodeName
	}
	if len(want) != len(pods) {
		t.Errorf("%d pods have %d addresses", len(pods), len(want))
	}
	until(t, "the PodIPs to be bound", func(context.Context) bool {
		claims := podIPs(t, c)
		for _, pod := range pods {
			if is := claims[pod.Status.PodIP]; is.Spec.PodUID != string(pod.UID) || is.Status.Phase != v1alpha1.PodIPBound {
				return false
			}
		}
		return true
	})
	at := configuredAt(t, c, "10.6.168.", "16")
	for addr, node := range want {
		if !slices.Equal(at[addr], []string{node}) {
			t.Errorf("%s is that of a pod on %s and configured at %v", addr, node, at[addr])
		}
	}
	for addr, nodes := range at {
		if want[addr] == "" {
			t.Errorf("%s is nobody's and configured at %v", addr, nodes)
		}
	}
}
