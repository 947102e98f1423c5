package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement"
	"github.com/stayput/stayput/test/answers"
	"github.com/stayput/stayput/test/lab"
)

// routed is a cluster with pods of routed pools, or of Calico's, what breaks it and what watches it.
type routed struct {
	session
	network
	tenants  *tenants
	answers  *answers.Judge
	vantages []*answers.Vantage
}

// network is what connects the pods, and what can happen to it.
type network struct {
	says    string
	options lab.ClusterOptions
	values  map[string]any // of the chart
	pools   string
	faults  []fault
}

// flannels returns one of flannel's and kube-proxy's ways, by the seed.
func flannels(seed uint64) network {
	o := []lab.ClusterOptions{
		{Flannel: &lab.FlannelOptions{Backend: "vxlan", NFTables: true}, Proxy: "nftables"},
		{Flannel: &lab.FlannelOptions{Backend: "host-gw"}, Proxy: "iptables"},
	}[seed%2]
	return network{
		says:    fmt.Sprintf("flannel with %s, kube-proxy with %s", o.Flannel.Backend, o.Proxy),
		options: o, values: map[string]any{"pools": map[string]any{"enabled": true}}, faults: routedFaults,
		pools: `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: far}
spec: {mode: Routed, subnet: 10.50.0.0/24}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: near}
spec: {mode: Routed, subnet: 10.244.200.0/24}
`,
	}
}

// workloads are the StatefulSets, each with addresses of the pool of its name: near lies in the cluster's network.
var workloads = []string{"far", "near"}

// replicas is how many pods each has.
const replicas = 20

// newRouted starts a cluster with stayput and the workloads. The caller closes it, also after an error.
func newRouted(ctx context.Context, product lab.Product, r *report, n network) (*routed, error) {
	s := &routed{network: n,
		session: session{report: r, weather: &weather{now: r.now}, events: map[types.UID]string{}}}
	r.tables = []string{tableFaults, tableSkipped, tablePods, tableLost, tableAsked, tableUnheard}
	s.tenants = newTenants(r, s.weather)
	s.answers = answers.NewJudge(s.tenants.ownerOf, r.violation)
	r.say("%s", n.says)
	n.options.Product = product
	var err error
	if s.cluster, err = lab.StartCluster(ctx, n.options); err != nil {
		return s, err
	}
	if err := s.cluster.Install(ctx, lab.InstallOptions{Values: n.values}); err != nil {
		return s, err
	}
	s.client, err = client.NewWithWatch(s.cluster.RESTConfig(), client.Options{Scheme: placement.Scheme})
	if err != nil {
		return s, err
	}
	s.breaker = &breaker{
		cluster: s.cluster, client: s.client, report: r, weather: s.weather,
		undos: map[string]int{}, runningOn: s.tenants.runningOn,
	}
	for _, n := range s.cluster.Nodes {
		s.tenants.nodes = append(s.tenants.nodes, n.Name)
		s.breaker.machines = append(s.breaker.machines, &machine{ClusterNode: n, weather: s.weather, down: map[part]int{}})
	}
	for _, n := range s.everywhere() {
		s.vantages = append(s.vantages, &answers.Vantage{Node: n}, &answers.Vantage{Node: n,
			Client: func() (string, string) { return namespace, s.tenants.clientOn(n.Name) }})
	}
	return s, s.deploy(ctx)
}

// everywhere returns the nodes, and the control plane's.
func (s *routed) everywhere() []*lab.ClusterNode {
	return append(slices.Clone(s.cluster.Nodes), s.cluster.ControlNode)
}

func (s *routed) deploy(ctx context.Context) error {
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := s.client.Create(ctx, space); err != nil {
		return err
	}
	if _, err := s.cluster.Kubectl(ctx, s.pools, "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	clients := lab.Workload{Kind: "DaemonSet", Name: clientsLabel, Unprobed: true, Pod: corev1.PodSpec{
		Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
	}}
	if err := s.cluster.Deploy(ctx, namespace, clients); err != nil {
		return err
	}
	for _, name := range workloads {
		w := lab.Workload{
			Name: name, Replicas: replicas, Unprobed: true, Annotations: map[string]string{v1alpha1.AnnotationPools: name},
		}
		if err := s.cluster.Deploy(ctx, namespace, w); err != nil {
			return err
		}
	}
	return nil
}

// watch starts the observers, which end with ctx; wait waits for that.
func (s *routed) watch(ctx context.Context) (wait func()) {
	var all sync.WaitGroup
	here := client.InNamespace(namespace)
	all.Go(func() { follow(ctx, s.client, &corev1.PodList{}, s.tenants.seePod, s.tenants.gonePod, here) })
	all.Go(func() { follow(ctx, s.client, &v1alpha1.PodIPList{}, s.tenants.seeIP, s.tenants.goneIP) })
	all.Go(func() { follow(ctx, s.client, &corev1.EventList{}, s.seeEvent, func(*corev1.Event) {}, here) })
	for _, v := range s.vantages {
		all.Go(func() { s.asking(ctx, v) })
	}
	return all.Wait
}

// run breaks the cluster in rounds until the time is over, and checks after each that all is right.
func (s *routed) run(ctx context.Context, seed uint64, length time.Duration) error {
	observing, stop := context.WithCancel(ctx)
	wait := s.watch(observing)
	defer wait()
	defer stop()
	s.report.say("%d pods start", len(workloads)*replicas)
	if err := s.rest(ctx); err != nil {
		return err
	}
	end := time.Now().Add(length)
	for round := 1; time.Now().Before(end); round++ {
		for _, step := range drawRound(seed, round, len(s.breaker.machines), len(workloads), s.faults) {
			if !sleep(ctx, step.after) || time.Now().After(end) {
				break
			}
			s.breaker.begin(ctx, step, s.strike)
		}
		if err := errors.Join(s.breaker.wait(), ctx.Err()); err != nil {
			return err
		}
		s.report.say("everything is healed: coming to rest")
		if err := s.rest(ctx); err != nil {
			return err
		}
	}
	s.tenants.end()
	return nil
}

// rest waits until the healed cluster is at rest, and then until everybody reaches every pod, and every route is right,
// or all that Calico has allocated.
func (s *routed) rest(ctx context.Context) error {
	if err := s.settle(ctx, s.whole); err != nil {
		return err
	}
	return s.arrive(ctx)
}

// whole reports what keeps the cluster from being at rest: nodes that take no pods, pods that are not Ready, addresses
// that are not theirs. Empty: nothing.
func (s *routed) whole(ctx context.Context) (string, error) {
	nodes, err := s.cluster.Client().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	if n := len(s.everywhere()); len(nodes.Items) != n {
		return fmt.Sprintf("%d Nodes, of %d", len(nodes.Items), n), nil
	}
	for _, n := range nodes.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				return n.Name + " is not Ready", nil
			}
		}
		for _, t := range n.Spec.Taints {
			if n.Name != s.cluster.ControlNode.Name {
				return n.Name + " has the taint " + t.Key, nil
			}
		}
	}
	pods, err := s.cluster.Client().CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	var claims v1alpha1.PodIPList
	if err := s.client.List(ctx, &claims); err != nil {
		return "", err
	}
	bound := map[string]v1alpha1.PodIP{}
	for _, ip := range claims.Items {
		bound[ip.Name] = ip
	}
	count := 0
	for i := range pods.Items {
		pod := &pods.Items[i]
		if !lab.Ready(pod) {
			return fmt.Sprintf("pod %s on %q is not Ready (%s)", pod.Name, pod.Spec.NodeName, state(pod)), nil
		}
		if !slices.Contains(workloads, pod.Labels["app"]) {
			continue
		}
		count++
		if is := bound[pod.Status.PodIP]; is.Spec.PodUID != string(pod.UID) || is.Status.PodUID != string(pod.UID) ||
			is.Status.Phase != v1alpha1.PodIPBound || is.Status.NodeName != pod.Spec.NodeName {
			return fmt.Sprintf("PodIP %s of %s on %s says %+v %+v", pod.Status.PodIP, pod.Name, pod.Spec.NodeName, is.Spec,
				is.Status), nil
		}
	}
	if want := len(workloads) * replicas; count != want || len(bound) != want {
		return fmt.Sprintf("%d pods with %d PodIPs, of %d", count, len(bound), want), nil
	}
	return "", nil
}

// arriving bounds how long it may take at rest until every route is right: agents look by themselves after a minute.
const arriving = 90 * time.Second

// arrive waits until all routes are right, everybody reaches every pod, and no address is at two places. What is not is
// a violation.
func (s *routed) arrive(ctx context.Context) error {
	start := time.Now()
	for {
		wrong, err := s.astray(ctx)
		if err == nil && len(wrong) == 0 {
			s.report.say("everybody reaches every pod, and nothing else is wrong, after %.1fs", time.Since(start).Seconds())
			return nil
		}
		if time.Since(start) > arriving {
			if err != nil {
				return fmt.Errorf("looking at routes: %w", err)
			}
			for _, what := range wrong {
				s.report.violation("astray: "+what, "at rest for %s, and still: %s", arriving, what)
			}
			return nil
		}
		if !sleep(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// astray returns what is wrong with routes, answers and places in a cluster at rest.
func (s *routed) astray(ctx context.Context) (wrong []string, err error) {
	pods, err := s.cluster.Client().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app!=" + clientsLabel,
	})
	if err != nil {
		return nil, err
	}
	served, at, of := map[netip.Addr]netip.Prefix{}, map[netip.Addr]string{}, map[netip.Addr]string{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		a, err := netip.ParseAddr(pod.Status.PodIP)
		if err != nil {
			return []string{pod.Name + " has no address"}, nil
		}
		served[a], at[a] = s.cluster.Node(pod.Spec.NodeName).Pods, pod.Spec.NodeName
		of[a] = pod.Namespace + "/" + pod.Name + " on " + pod.Spec.NodeName
	}
	if s.options.Calico != nil {
		if wrong, err = s.misallocated(ctx, of); err != nil {
			return nil, err
		}
	}
	places := map[netip.Addr][]string{}
	for _, n := range s.everywhere() {
		routes, err := n.Routes()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", n.Name, err)
		}
		if s.options.Calico == nil { // its Felix has routes of its own
			for _, what := range lab.Misrouted(routes, n.Pods, served) {
				wrong = append(wrong, n.Name+": "+what)
			}
		}
		found, err := configured(n.Path(netnsDir))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", n.Name, err)
		}
		for a, in := range found {
			for range in {
				places[a] = append(places[a], n.Name)
			}
		}
	}
	wrong = append(wrong, misplaced(at, places)...)
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, v := range s.vantages {
		all.Go(func() {
			for a := range served {
				what := s.unreached(ctx, v, a)
				if what == "" {
					continue
				}
				mu.Lock()
				wrong = append(wrong, what)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return wrong, ctx.Err()
}

// unreached asks a pod, and returns what is wrong with that.
func (s *routed) unreached(ctx context.Context, v *answers.Vantage, a netip.Addr) string {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	asked := time.Now()
	answer, err := v.Ask(ctx, a)
	if err != nil {
		return fmt.Sprintf("%s does not reach %s: %v", v, a, err)
	}
	s.hear(a, v, asked, answer)
	return ""
}

// misplaced returns the addresses that are not configured in the one pod on the node where they should be.
func misplaced(at map[netip.Addr]string, places map[netip.Addr][]string) (wrong []string) {
	for a, node := range at {
		if !slices.Equal(places[a], []string{node}) {
			wrong = append(wrong, fmt.Sprintf("%s, of a pod on %s, is configured at %v", a, node, places[a]))
		}
	}
	slices.Sort(wrong)
	return wrong
}

// picture writes the state of the cluster to a file.
func (s *routed) picture(file string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	state := []string{
		"nodes -o wide", "pods -A -o wide", "podips -o wide", "podips -o yaml", "pods -n " + namespace + " -o yaml",
		"nodes -o yaml", "events -A --sort-by=.metadata.creationTimestamp",
	}
	if s.options.Calico != nil {
		state = append(state, "ipamblocks,ipreservations,podippools -o yaml")
	}
	for _, args := range state {
		out, err := s.cluster.Kubectl(ctx, "", append([]string{"get", "--request-timeout=5s"}, strings.Fields(args)...)...)
		fmt.Fprintf(f, "--- %s\n%s", args, out)
		if err != nil {
			fmt.Fprintln(f, err)
		}
	}
	for _, n := range s.everywhere() {
		out, err := n.Run(ctx, "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; ip route; ip -d addr; ip neigh; "+
			"ip neigh show proxy; nft list ruleset | grep -v counter; "+
			"for ns in /run/netns/*; do echo $ns; nsenter --net=$ns ip -o -4 addr show; done; true")
		fmt.Fprintf(f, "--- %s, error: %v\n%s\n", n.Name, err, out)
		list, err := s.breaker.sandboxes(ctx, n)
		fmt.Fprintf(f, "--- sandboxes of %s, error: %v\n", n.Name, err)
		for id, is := range list {
			fmt.Fprintln(f, id, is.Metadata, is.State)
		}
	}
	return nil
}
