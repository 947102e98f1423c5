package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/podip"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const routedPool = `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: far}
spec:
  mode: Routed
  subnet: 10.50.0.0/16
  addresses: [10.50.0.1-10.50.0.80]
`

// everywhere is a DaemonSet of ordinary pods, also on the control plane's node.
func everywhere(name string) lab.Workload {
	return lab.Workload{Kind: "DaemonSet", Name: name, Unprobed: true, Pod: corev1.PodSpec{
		Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
	}}
}

// around is everybody who may ask for a routed address: each node, an ordinary pod of each, and a machine outside of
// the cluster, which sends what is for the pool to one of the nodes.
type around struct {
	t       *testing.T
	c       *lab.Cluster
	ns      string
	outside *lab.Machine
	// direct: that node is the pod's own. kube-proxy would drop what comes by another one, as it sees no answers.
	direct bool
}

// reach waits until all of them but those on a node that is lost are answered by the pod, and checks that it is
// configured in no other place.
func (a around) reach(pod *corev1.Pod, lost string) {
	a.t.Helper()
	addr := ip(a.t, pod)
	list, err := a.c.Client().CoreV1().Pods(a.ns).List(testContext(a.t), metav1.ListOptions{LabelSelector: "app=client"})
	must.Do(a.t, err)
	get := map[string]func(context.Context) (lab.Answer, error){}
	var on []*lab.ClusterNode
	for _, n := range a.c.Nodes {
		if n.Name == lost {
			continue
		}
		on = append(on, n)
		get[n.Name] = func(ctx context.Context) (lab.Answer, error) { return n.Get(ctx, addr) }
		if !a.direct || n.Name == pod.Spec.NodeName {
			must.Do(a.t, a.outside.SetRoute(netip.MustParsePrefix("10.50.0.0/16"), n.IP))
		}
	}
	for i := range list.Items {
		client := &list.Items[i]
		if client.Spec.NodeName == lost || client.DeletionTimestamp != nil {
			continue
		}
		get[client.Name+" on "+client.Spec.NodeName] = func(ctx context.Context) (lab.Answer, error) {
			s, err := a.c.Node(client.Spec.NodeName).Sandbox(ctx, a.ns, client.Name)
			if err != nil {
				return lab.Answer{}, err
			}
			return a.c.Node(client.Spec.NodeName).GetFrom(ctx, s, addr)
		}
	}
	get["the machine outside"] = func(ctx context.Context) (lab.Answer, error) { return a.outside.Get(ctx, addr) }
	for who, get := range get {
		var answer lab.Answer
		until(a.t, fmt.Sprintf("%s to reach %s on %s at %s", who, pod.Name, pod.Spec.NodeName, addr),
			func(ctx context.Context) bool {
				ctx, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				var err error
				answer, err = get(ctx)
				return err == nil
			})
		if answer.Name != pod.Name || !answer.Has(addr) {
			a.t.Errorf("%s asks %s, the address of %s, and %s with %v answers", who, addr, pod.Name, answer.Name, answer.Addrs)
		}
	}
	for _, at := range holdersAmong(a.t, on, addr.String()) {
		if !strings.HasPrefix(at, pod.Spec.NodeName+" ") {
			a.t.Errorf("%s of %s on %s is configured at %s, too", addr, pod.Name, pod.Spec.NodeName, at)
		}
	}
	until(a.t, "the PodIP of "+pod.Name+" to be bound", func(context.Context) bool {
		is := podIPs(a.t, a.c)[addr.String()]
		return is.Spec.PodUID == string(pod.UID) && is.Status.Phase == v1alpha1.PodIPBound &&
			is.Status.NodeName == pod.Spec.NodeName && is.Status.PodUID == string(pod.UID) &&
			is.Status.PodCIDR == a.c.Node(pod.Spec.NodeName).Pods.String()
	})
}

// routes returns the routes of a node to addresses of the pool.
func routes(t *testing.T, n *lab.ClusterNode) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	out, err := n.Run(ctx, "/bin/sh", "-c",
		"PATH=/sbin:/usr/sbin:$PATH; ip route show | grep '10[.]50[.]'; true")
	must.Do(t, err)
	return strings.TrimSpace(string(out))
}

// hearsOfRouted watches PodIPs as agents do. heard ends that and returns which events there were.
func hearsOfRouted(t *testing.T, c *lab.Cluster) (heard func() []watch.EventType) {
	t.Helper()
	w, err := typed(t, c).Watch(t.Context(), &v1alpha1.PodIPList{},
		client.MatchingFieldsSelector{Selector: podip.RoutedSelector})
	must.Do(t, err)
	enough, all := make(chan struct{}), make(chan []watch.EventType, 1)
	go func() {
		defer w.Stop() // only now: it may end in an event that is an error
		var events []watch.EventType
		defer func() { all <- events }()
		for {
			select {
			case e, ok := <-w.ResultChan():
				if !ok {
					return
				}
				events = append(events, e.Type)
			case <-enough:
				return
			}
		}
	}()
	return func() []watch.EventType {
		time.Sleep(time.Second) // for what is on its way
		close(enough)
		return <-all
	}
}

// The network is an ordinary one: a bridge on each node, and routes between the nodes.
func TestARoutedAddressFollowsItsPod(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range c.Nodes {
				t.Logf("%s routes\n%s", n.Name, routes(t, n))
			}
			c.WriteLogs(t.Output())
		}
	})
	for _, n := range c.Nodes[:2] { // the third one's is found out by its network
		kubectl(t, c, "patch", "node", n.Name, "--type=merge", "-p",
			fmt.Sprintf(`{"spec": {"podCIDR": %q, "podCIDRs": [%[1]q]}}`, n.Pods))
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	ns := namespace(t, c)
	all := around{t: t, c: c, ns: ns, outside: machine(t, c, "172.30.0.9")}
	apply(t, c, ns, routedPool)
	deploy(t, c, ns, everywhere("client"))
	until(t, "a client on each node", func(ctx context.Context) bool {
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=client"})
		ready := 0
		for i := range list.Items {
			if lab.Ready(&list.Items[i]) {
				ready++
			}
		}
		return err == nil && ready >= len(c.Nodes)
	})
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: pools("far"), Unprobed: true})
	pod := ready(t, c, ns, "web-0")
	if !strings.HasPrefix(pod.Status.PodIP, "10.50.0.") {
		t.Fatalf("web-0 has %s", pod.Status.PodIP)
	}
	all.reach(pod, "")
	moves := func(elsewhere bool, lost string) {
		t.Helper()
		is := successor(t, c, pod)
		if is.Status.PodIP != pod.Status.PodIP || elsewhere && is.Spec.NodeName == pod.Spec.NodeName {
			t.Fatalf("web-0 had %s on %s and has %s on %s", pod.Status.PodIP, pod.Spec.NodeName, is.Status.PodIP,
				is.Spec.NodeName)
		}
		pod = is
		all.reach(pod, lost)
	}

	// 1. It is deleted.
	deletePods(t, c, ns, "web")
	moves(false, "")

	// 2. Its node is drained, three times in a row. The agents of all nodes hear of each move where it is no more, and
	// where it is.
	heard, want := hearsOfRouted(t, c), []watch.EventType{watch.Added}
	for range 3 {
		node := pod.Spec.NodeName
		kubectl(t, c, "drain", node, "--ignore-daemonsets", "--pod-selector=app=web", "--timeout=60s")
		moves(true, "")
		kubectl(t, c, "uncordon", node)
		want = append(want, watch.Deleted, watch.Added)
	}
	if got := heard(); !slices.Equal(got, want) {
		t.Errorf("of three moves agents hear %v, want %v", got, want)
	}

	// 3. Its node is lost, and comes back.
	lost := c.Node(pod.Spec.NodeName)
	must.Do(t, lost.PowerLoss())
	must.Do(t, c.WaitNotReady(testContext(t), lost))
	kubectl(t, c, "taint", "node", lost.Name, "node.kubernetes.io/out-of-service=:NoExecute")
	moves(true, lost.Name)
	must.Do(t, lost.Boot(testContext(t)))
	kubectl(t, c, "taint", "node", lost.Name, "node.kubernetes.io/out-of-service-")
	must.Do(t, c.WaitReady(testContext(t), lost))
	until(t, "a client on the node that is back", func(ctx context.Context) bool {
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=client",
			FieldSelector: "spec.nodeName=" + lost.Name})
		return err == nil && len(list.Items) == 1 && lab.Ready(&list.Items[0])
	})
	all.reach(pod, "")

	// 4. Twenty leave a node at once.
	for _, n := range c.Nodes[1:] {
		kubectl(t, c, "cordon", n.Name)
	}
	deploy(t, c, ns, lab.Workload{Name: "many", Replicas: 20, Annotations: pools("far"), Unprobed: true})
	many := places(t, c, ns, "many", 20, nil)
	for _, n := range c.Nodes[1:] {
		kubectl(t, c, "uncordon", n.Name)
	}
	kubectl(t, c, "drain", c.Nodes[0].Name, "--ignore-daemonsets", "--pod-selector=app=many", "--timeout=110s")
	after := places(t, c, ns, "many", 20, many)
	keptAddresses(t, many, after)
	for _, one := range after {
		all.reach(one, "")
	}
	kubectl(t, c, "uncordon", c.Nodes[0].Name)

	// 5. A node whose network cannot have such addresses gets no such pod, and one that it has all the same is told why.
	n := c.Nodes[0]
	ipam := lab.RangeIPAM("host-local", n.Pods.String())
	ipam["routes"] = []any{map[string]any{"dst": "0.0.0.0/0"}}
	says := func(what string) {
		t.Helper()
		until(t, n.Name+" to say whether it can route: "+what, func(context.Context) bool {
			is := kubectl(t, c, "get", "podipreport", n.Name, "-o", "jsonpath={.spec.cannotServe.Routed}")
			return what == "" && is == "" || what != "" && strings.Contains(is, what)
		})
	}
	must.Do(t, n.SetNetworks(testContext(t), lab.Network{Type: "macvlan", IPAM: ipam, Annotations: true}))
	says("expected bridge or ptp")
	deploy(t, c, ns, lab.Workload{Name: "choosy", Replicas: 6, Annotations: pools("far"), Unprobed: true})
	for name, one := range places(t, c, ns, "choosy", 6, nil) {
		if one.Spec.NodeName == n.Name {
			t.Errorf("%s is on %s, where it cannot have its address", name, n.Name)
		}
	}
	deploy(t, c, ns, lab.Workload{
		Name: "bound", Replicas: 1, Annotations: pools("far"), Unprobed: true, Pod: corev1.PodSpec{NodeName: n.Name},
	})
	until(t, "an Event that says why bound-0 gets no address", func(context.Context) bool {
		return strings.Contains(kubectl(t, c, "get", "events", "-n", ns, "--field-selector=involvedObject.name=bound-0"),
			"its node "+n.Name+" cannot serve pool far (mode Routed): ")
	})
	must.Do(t, n.SetNetworks(testContext(t), lab.Network{IPAM: ipam, Annotations: true}))
	says("")
	all.reach(ready(t, c, ns, "bound-0"), "")

	// 6. With the pool gone, no node takes an address for that of a pod of its own. Routes to other nodes stay a while.
	kubectl(t, c, "delete", "statefulset", "web", "many", "choosy", "bound", "-n", ns)
	kubectl(t, c, "delete", "podippool", "far", "--timeout=100s")
	for _, n := range c.Nodes {
		until(t, "the pods' routes on "+n.Name+" to go", func(context.Context) bool {
			return !strings.Contains(routes(t, n), "proto 84")
		})
	}
}
