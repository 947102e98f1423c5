//go:build calico || flannel

package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/answers"
	"github.com/stayput/stayput/test/lab"
)

// clients waits for a client on each node, and returns them by node.
func clients(t *testing.T, c *lab.Cluster, ns string) map[string]*corev1.Pod {
	t.Helper()
	nodes := len(c.Nodes)
	if c.ControlNode != nil {
		nodes++
	}
	all := map[string]*corev1.Pod{}
	until(t, "a client on each node", func(ctx context.Context) bool {
		clear(all)
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=client"})
		if err != nil {
			return false
		}
		for i := range list.Items {
			if pod := &list.Items[i]; lab.Ready(pod) {
				all[pod.Spec.NodeName] = pod
			}
		}
		return len(all) == nodes
	})
	return all
}

// asked is an address of which all nodes, and a pod of each, ask again and again which pod has it.
type asked struct {
	addr  netip.Addr
	judge *answers.Judge

	mu     sync.Mutex
	last   map[string]answered      // to each
	gap    map[string]time.Duration // the longest time without an answer
	wrong  []string
	count  int
	ending context.CancelFunc
	wg     sync.WaitGroup
}

// answered is an answer to a client that asked at a time.
type answered struct {
	asked time.Time
	lab.Answer
}

// askAlways begins to ask who has the address of a pod. Only one of that name may answer, and none after a later one.
func askAlways(t *testing.T, c *lab.Cluster, ns, pod string, addr netip.Addr, every time.Duration) *asked {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	a := &asked{addr: addr, last: map[string]answered{}, gap: map[string]time.Duration{}, ending: cancel}
	told := map[string]bool{}
	a.judge = answers.NewJudge(func(netip.Addr) string { return pod }, func(subject, format string, args ...any) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !told[subject] {
			a.wrong = append(a.wrong, fmt.Sprintf(format, args...))
		}
		told[subject] = true
	})
	t.Cleanup(func() { cancel(); a.wg.Wait() })
	for name, client := range clients(t, c, ns) {
		n := c.Node(name)
		a.from(ctx, &answers.Vantage{Node: n}, every)
		a.from(ctx, &answers.Vantage{Node: n, Client: clientOn(ctx, c, n, client)}, every)
	}
	return a
}

// clientOn returns who the client on a node is: a DaemonSet makes another one when the node or its Node was gone.
func clientOn(ctx context.Context, c *lab.Cluster, n *lab.ClusterNode, client *corev1.Pod) func() (string, string) {
	ns, name, looked := client.Namespace, client.Name, time.Now()
	return func() (string, string) {
		if time.Since(looked) > 2*time.Second {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			looked = time.Now()
			list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{
				LabelSelector: "app=client", FieldSelector: "spec.nodeName=" + n.Name,
			})
			if err == nil && len(list.Items) > 0 {
				name = list.Items[0].Name
			}
		}
		return ns, name
	}
}

// from asks from a vantage until the context ends.
func (a *asked) from(ctx context.Context, v *answers.Vantage, every time.Duration) {
	a.mu.Lock()
	a.last[v.String()] = answered{asked: time.Now()}
	a.mu.Unlock()
	a.wg.Go(func() {
		each := time.NewTicker(every)
		defer each.Stop()
		for ctx.Err() == nil {
			a.one(ctx, v)
			select {
			case <-each.C:
			case <-ctx.Done():
			}
		}
	})
}

func (a *asked) one(ctx context.Context, v *answers.Vantage) {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	now, who := time.Now(), v.String()
	answer, err := v.Ask(ctx, a.addr)
	if err != nil {
		return
	}
	a.judge.Hear(a.addr, who, now, answer)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count++
	a.gap[who] = max(a.gap[who], now.Sub(a.last[who].asked))
	a.last[who] = answered{now, answer}
}

// longest returns the longest time for which a client had no answer, since the last call.
func (a *asked) longest() (who string, gap time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for w, g := range a.gap {
		if g > gap {
			who, gap = w, g
		}
	}
	clear(a.gap)
	return who, gap
}

// lastly returns the last answer to each.
func (a *asked) lastly() map[string]answered {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.last)
}

// reached waits until all that are not on a lost node are answered by a pod, not by one of the same name before it.
func (a *asked) reached(t *testing.T, pod *corev1.Pod, lost ...string) {
	t.Helper()
	began := time.Now()
	var missing []string
	defer func() {
		if len(missing) > 0 {
			t.Logf("%s of %s is not reached from %v", pod.Name, pod.Spec.NodeName, missing)
		}
	}()
	until(t, fmt.Sprintf("all to be answered by %s on %s", pod.Name, pod.Spec.NodeName), func(context.Context) bool {
		missing = nil
		for who, is := range a.lastly() {
			on := who[strings.LastIndex(who, " ")+1:]
			if slices.Contains(lost, on) {
				continue
			}
			if is.asked.Before(began) || is.Name != pod.Name || is.Started.Before(pod.CreationTimestamp.Time) {
				missing = append(missing, who)
			}
		}
		return len(missing) == 0
	})
}

// stop ends the asking, and returns what was wrong with the answers.
func (a *asked) stop(t *testing.T) (wrong []string) {
	t.Helper()
	a.ending()
	a.wg.Wait()
	t.Logf("%d answers", a.count)
	for _, is := range a.judge.Heard(a.addr) {
		t.Logf("%s of %s has answered", is.Pod, is.Started.Format(time.StampMilli))
		for who, asked := range is.Asked {
			t.Logf("  to %s, the last time at %s", who, asked.Format(time.StampMilli))
		}
	}
	return a.wrong
}

// end ends the asking and checks who has answered.
func (a *asked) end(t *testing.T) {
	t.Helper()
	if wrong := a.stop(t); a.count == 0 || len(wrong) > 0 {
		t.Errorf("%d answers, of which some are wrong: %q", a.count, wrong[:min(len(wrong), 5)])
	}
}
