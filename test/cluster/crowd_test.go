//go:build long || calico

package cluster

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	podpool "github.com/stayput/stayput/pkg/pool"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// crowd creates pods at once that run nowhere: no node is what they select. They ask for addresses.
func crowd(t *testing.T, c *lab.Cluster, ns, name, pools string, from, to int) {
	t.Helper()
	group, ctx := errgroup.WithContext(testContext(t))
	group.SetLimit(20)
	for i := from; i < to; i++ {
		group.Go(func() error {
			_, err := c.Client().CoreV1().Pods(ns).Create(ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{
					Name: fmt.Sprintf("%s-%d", name, i), Labels: map[string]string{"app": name},
					Annotations: map[string]string{"stayput.io/pools": pools},
				},
				Spec: corev1.PodSpec{
					NodeSelector: map[string]string{"example.com/runs": "nowhere"},
					Containers:   []corev1.Container{{Name: "web", Image: lab.WebImage, ImagePullPolicy: corev1.PullNever}},
				},
			}, metav1.CreateOptions{})
			return err
		})
	}
	must.Do(t, group.Wait())
}

// The others are gated.
func letGo(t *testing.T, c *lab.Cluster, ns, name string) (addrs map[string]netip.Addr, of map[string]string) {
	t.Helper()
	list, err := c.Client().CoreV1().Pods(ns).List(testContext(t), metav1.ListOptions{LabelSelector: "app=" + name})
	must.Do(t, err)
	addrs, of = map[string]netip.Addr{}, map[string]string{}
	owner := map[netip.Addr]string{}
	for i := range list.Items {
		pod := &list.Items[i]
		if isGated(pod) {
			continue
		}
		var has []podpool.Address
		must.Do(t, json.Unmarshal([]byte(pod.Annotations[v1alpha1.AnnotationAddresses]), &has))
		if len(has) != 1 {
			t.Fatalf("%s was ungated with %+v", pod.Name, has)
		}
		addr := has[0].Prefix.Addr()
		if was := owner[addr]; was != "" {
			t.Errorf("%s and %s were both told %s", was, pod.Name, addr)
		}
		owner[addr], addrs[pod.Name], of[pod.Name] = pod.Name, addr, has[0].Pool
	}
	return addrs, of
}

// configuredAt returns on which nodes each address is configured that begins so and has a prefix of this length.
func configuredAt(t *testing.T, c *lab.Cluster, begins, bits string) map[string][]string {
	t.Helper()
	at := map[string][]string{}
	for _, n := range c.Nodes {
		if n.Pid() == 0 { // it is off
			continue
		}
		out, err := n.Run(testContext(t), "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; for ns in /run/netns/*; do "+
			"nsenter --net=$ns ip -o -4 addr show; done; true")
		must.Do(t, err)
		for word := range strings.FieldsSeq(string(out)) {
			if addr, length, _ := strings.Cut(word, "/"); length == bits && strings.HasPrefix(addr, begins) {
				at[addr] = append(at[addr], n.Name)
			}
		}
	}
	return at
}
