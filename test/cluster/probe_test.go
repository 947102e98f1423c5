package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// sandbox returns the pod's sandbox in the containerd of its node.
func sandbox(t *testing.T, c *lab.Cluster, pod *corev1.Pod) lab.Pod {
	t.Helper()
	s, err := c.Node(pod.Spec.NodeName).Sandbox(testContext(t), pod.Namespace, pod.Name)
	must.Do(t, err)
	return s
}

// reaches checks that one pod reaches another by its address.
func reaches(t *testing.T, c *lab.Cluster, from, to *corev1.Pod) {
	t.Helper()
	reachesAt(t, c, from, to, ip(t, to))
}

// network is what a node, and pods of it, know of links, routes and neighbours, and which packets the node has dropped
// or passed on to pods, for people.
func network(n *lab.ClusterNode, pods ...lab.Pod) string {
	if n.Pid() == 0 {
		return n.Name + " is off"
	}
	script := "PATH=/sbin:/usr/sbin:/usr/bin:$PATH; ip -d link; ip route; ip neigh; " +
		"iptables-save -c | grep -e DROP -e dispatch"
	for _, pod := range pods {
		script += fmt.Sprintf("; echo %s; nsenter --net=%s sh -c 'ip addr; ip route; ip -6 route; ip neigh'", pod.Name,
			pod.NetNS)
	}
	out, err := n.Run(context.Background(), "/bin/sh", "-c", script)
	return fmt.Sprintf("%s (%v):\n%s", n.Name, err, out)
}

// reachesAt waits until one pod reaches another by one of its addresses. A connection that waits would try ever more
// seldom.
func reachesAt(t *testing.T, c *lab.Cluster, from, to *corev1.Pod, addr netip.Addr) {
	t.Helper()
	const atOnce = 10 * time.Second
	begun, said := time.Now(), false
	asker, asked := sandbox(t, c, from), sandbox(t, c, to)
	var answer lab.Answer
	until(t, fmt.Sprintf("%s to reach %s on %s at %s", from.Name, to.Name, to.Spec.NodeName, addr),
		func(ctx context.Context) bool {
			ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
			defer cancel()
			var err error
			answer, err = c.Node(from.Spec.NodeName).GetFrom(ctx, asker, addr)
			if err != nil && !said && time.Since(begun) > atOnce {
				said = true
				t.Logf("after %s: %v\n%s\n%s", atOnce, err, network(c.Node(from.Spec.NodeName), asker),
					network(c.Node(to.Spec.NodeName), asked))
			}
			return err == nil
		})
	if answer.Name != to.Name || !answer.Has(addr) {
		t.Errorf("%s asks %v, an address of %s, and %s with %v answers", from.Name, addr, to.Name, answer.Name, answer.Addrs)
	}
}

func ip(t *testing.T, pod *corev1.Pod) netip.Addr {
	t.Helper()
	addr, err := netip.ParseAddr(pod.Status.PodIP)
	must.Do(t, err)
	return addr
}

// unique checks that no two running pods share an address, except terminating ones: those may have freed theirs before
// the API server knows that they ended.
func unique(t *testing.T, c *lab.Cluster) {
	t.Helper()
	all, err := c.Client().CoreV1().Pods("").List(testContext(t), metav1.ListOptions{})
	must.Do(t, err)
	owner := map[string]string{}
	for i := range all.Items {
		pod := &all.Items[i]
		if pod.Spec.HostNetwork || pod.DeletionTimestamp != nil || pod.Status.PodIP == "" ||
			pod.Status.Phase != corev1.PodRunning {
			continue
		}
		name := pod.Namespace + "/" + pod.Name
		if was := owner[pod.Status.PodIP]; was != "" {
			t.Errorf("%s and %s both have %s", was, name, pod.Status.PodIP)
		}
		owner[pod.Status.PodIP] = name
	}
}

// podNetworksOf returns the directories of a node's address files.
func podNetworksOf(t *testing.T, n *lab.ClusterNode) []string {
	t.Helper()
	dirs, err := filepath.Glob(n.Path("/var/lib/cni/networks") + "/*")
	must.Do(t, err)
	if len(dirs) == 0 {
		t.Fatalf("%s has no networks", n.Name)
	}
	return dirs
}

// hostLocalAlone checks that a node has nothing of stayput, and that running pods have all its addresses in use.
func hostLocalAlone(t *testing.T, c *lab.Cluster, n *lab.ClusterNode) {
	t.Helper()
	for _, path := range []string{"/etc/cni/net.d/00-stayput.conflist", "/opt/cni/bin/stayput"} {
		if _, err := os.Lstat(n.Path(path)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s still has %s: %v", n.Name, path, err)
		}
	}
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/lib/stayput"} {
		entries, err := os.ReadDir(n.Path(dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		for _, e := range entries {
			if dir == "/var/lib/stayput" || strings.Contains(e.Name(), "stayput") {
				t.Errorf("%s still has %s/%s", n.Name, dir, e.Name())
			}
		}
	}
	var stray []string
	until(t, "the addresses of "+n.Name+" to be those of its pods", func(ctx context.Context) bool {
		stray = nil
		sandboxes, err := n.Node.Pods(ctx)
		if err != nil {
			return false
		}
		for _, dir := range podNetworksOf(t, n) {
			entries, err := os.ReadDir(dir)
			must.Do(t, err)
			for _, e := range entries {
				if e.Name() == "lock" || strings.HasPrefix(e.Name(), "last_reserved_ip.") {
					continue
				}
				if _, err := netip.ParseAddr(e.Name()); err != nil {
					stray = append(stray, e.Name())
					continue
				}
				content, err := os.ReadFile(filepath.Join(dir, e.Name()))
				if errors.Is(err, fs.ErrNotExist) {
					continue
				}
				must.Do(t, err)
				id, _, _ := strings.Cut(string(content), "\r\n")
				if !slices.ContainsFunc(sandboxes, func(s *runtimeapi.PodSandbox) bool { return s.Id == id }) {
					stray = append(stray, e.Name()+": "+string(content))
				}
			}
		}
		if len(stray) > 0 {
			t.Logf("%s: %q", n.Name, stray)
		}
		return len(stray) == 0
	})
}

// promised waits until each pod's address is promised on its node and nowhere else: agents installed again correct the
// objects that an uninstallation by kubectl left.
func promised(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	for name, pod := range pods {
		until(t, "the address of "+name+" to be promised", func(ctx context.Context) bool {
			var all v1alpha1.RetainedIPList
			if err := typed(t, c).List(ctx, &all, client.InNamespace(pod.Namespace)); err != nil {
				return false
			}
			of := slices.DeleteFunc(all.Items, func(r v1alpha1.RetainedIP) bool { return r.Spec.PodName != name })
			return len(of) == 1 && bound(&of[0]) && of[0].Spec.NodeName == pod.Spec.NodeName &&
				of[0].Status.IPs[0] == pod.Status.PodIP
		})
	}
}

// recorded waits until the nodes of all pods are recorded.
func recorded(t *testing.T, c *lab.Cluster, ns, name string, pods map[string]*corev1.Pod) {
	t.Helper()
	until(t, "the nodes of all pods of "+name+" to be recorded", func(context.Context) bool {
		s := stateOf(t, c, ns, name)
		for pod, is := range pods {
			if s == nil || s.Status.PodStates[pod].NodeName != is.Spec.NodeName {
				return false
			}
		}
		return true
	})
}

// retainedIP returns a pod's RetainedIP, or nil if there is none.
func retainedIP(t *testing.T, c *lab.Cluster, ns, pod, node string) *v1alpha1.RetainedIP {
	t.Helper()
	var r v1alpha1.RetainedIP
	key := types.NamespacedName{Namespace: ns, Name: v1alpha1.RetainedIPName(pod, node)}
	err := typed(t, c).Get(testContext(t), key, &r)
	if apierrors.IsNotFound(err) {
		return nil
	}
	must.Do(t, err)
	return &r
}

// shows waits until a pod's RetainedIP exists and ok accepts it. The definition may be missing at first.
func shows(
	t *testing.T, c *lab.Cluster, ns, pod, node, what string, ok func(*v1alpha1.RetainedIP) bool,
) *v1alpha1.RetainedIP {
	t.Helper()
	var r v1alpha1.RetainedIP
	cl := typed(t, c)
	until(t, fmt.Sprintf("the RetainedIP of %s on %s to be %s", pod, node, what), func(ctx context.Context) bool {
		r = v1alpha1.RetainedIP{}
		err := cl.Get(ctx, types.NamespacedName{Namespace: ns, Name: v1alpha1.RetainedIPName(pod, node)}, &r)
		return err == nil && ok(&r)
	})
	return &r
}

func bound(r *v1alpha1.RetainedIP) bool { return r.Status.Phase == v1alpha1.PhaseBound }

func retained(r *v1alpha1.RetainedIP) bool { return r.Status.Phase == v1alpha1.PhaseRetained }

// boundTo accepts a RetainedIP that is bound to this very pod.
func boundTo(pod *corev1.Pod) func(*v1alpha1.RetainedIP) bool {
	return func(r *v1alpha1.RetainedIP) bool { return bound(r) && r.Status.PodUID == string(pod.UID) }
}

// vanishes waits until an object is deleted; another may have its name.
func vanishes(t *testing.T, c *lab.Cluster, was *v1alpha1.RetainedIP) {
	t.Helper()
	cl := typed(t, c)
	until(t, "RetainedIP "+was.Name+" to be deleted", func(ctx context.Context) bool {
		var r v1alpha1.RetainedIP
		err := cl.Get(ctx, client.ObjectKeyFromObject(was), &r)
		return apierrors.IsNotFound(err) || err == nil && r.UID != was.UID
	})
}

// addressFile returns the address file of a RetainedIP in the node's ledger, and whether it exists.
func addressFile(t *testing.T, n *lab.ClusterNode, r *v1alpha1.RetainedIP) (content string, there bool) {
	t.Helper()
	b, err := os.ReadFile(n.Path(filepath.Join("/var/lib/cni/networks", r.Status.Addresses[0].Network, r.Status.IPs[0])))
	if errors.Is(err, fs.ErrNotExist) {
		return "", false
	}
	must.Do(t, err)
	return string(b), true
}

func freed(t *testing.T, n *lab.ClusterNode, r *v1alpha1.RetainedIP) {
	t.Helper()
	until(t, r.Status.IPs[0]+" to be free", func(context.Context) bool {
		_, there := addressFile(t, n, r)
		return !there
	})
}

func setRelease(t *testing.T, c *lab.Cluster, r *v1alpha1.RetainedIP) {
	t.Helper()
	must.Do(t, typed(t, c).Patch(testContext(t), r.DeepCopy(),
		client.RawPatch(types.MergePatchType, []byte(`{"spec":{"release":"Now"}}`))))
}

// stopped scales a StatefulSet of one pod to zero, and returns the pod's RetainedIP once it is retained.
func stopped(t *testing.T, c *lab.Cluster, pod *corev1.Pod) *v1alpha1.RetainedIP {
	t.Helper()
	scale(t, c, pod.Namespace, strings.TrimSuffix(pod.Name, "-0"), 0)
	return shows(t, c, pod.Namespace, pod.Name, pod.Spec.NodeName, "retained", retained)
}

// ask returns the answer of a node's agent to an HTTP GET.
func ask(t *testing.T, n *lab.ClusterNode, path string) string {
	t.Helper()
	cl := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return n.Dial(ctx, network, n.Agent.Address().String())
		},
	}}
	req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://agent"+path, nil)
	must.Do(t, err)
	answer, err := cl.Do(req)
	must.Do(t, err)
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	must.Do(t, err)
	return string(b)
}

// typedClients are the clients of clusters that typed has made: one for each, as it has a connection of its own.
var typedClients sync.Map

// typed returns a client for Stayput's and OpenKruise's kinds.
func typed(t *testing.T, c *lab.Cluster) client.WithWatch {
	t.Helper()
	if w, ok := typedClients.Load(c); ok {
		return w.(client.WithWatch)
	}
	w, err := client.NewWithWatch(c.RESTConfig(), client.Options{Scheme: placement.Scheme})
	must.Do(t, err)
	typedClients.Store(c, w)
	return w
}

// stateOf returns a PersistentPodState, or nil if there is none.
func stateOf(t *testing.T, c *lab.Cluster, ns, name string) *kruisev1alpha1.PersistentPodState {
	t.Helper()
	s := &kruisev1alpha1.PersistentPodState{}
	err := typed(t, c).Get(testContext(t), types.NamespacedName{Namespace: ns, Name: name}, s)
	if apierrors.IsNotFound(err) {
		return nil
	}
	must.Do(t, err)
	return s
}

// comesTo waits until a PersistentPodState exists and ok accepts it.
func comesTo(
	t *testing.T, c *lab.Cluster, ns, name, what string, ok func(*kruisev1alpha1.PersistentPodState) bool,
) *kruisev1alpha1.PersistentPodState {
	t.Helper()
	var s *kruisev1alpha1.PersistentPodState
	defer func() {
		if t.Failed() && s != nil {
			t.Logf("PersistentPodState %s: spec %+v, status %+v", name, s.Spec, s.Status)
		}
	}()
	until(t, "PersistentPodState "+name+" "+what, func(context.Context) bool {
		s = stateOf(t, c, ns, name)
		return s != nil && ok(s)
	})
	return s
}

// recordsAll accepts a PersistentPodState that wants and records n pods.
func recordsAll(n int32) func(*kruisev1alpha1.PersistentPodState) bool {
	return func(s *kruisev1alpha1.PersistentPodState) bool {
		return s.Status.Pods != nil && *s.Status.Pods == n && s.Status.Recorded != nil && *s.Status.Recorded == n &&
			len(s.Status.PodStates) == int(n) && s.Status.ObservedGeneration == s.Generation &&
			isTrue(s, "Recorded", "AllRecorded")
	}
}

func isTrue(s *kruisev1alpha1.PersistentPodState, condition, reason string) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, condition)
	return c != nil && c.Status == metav1.ConditionTrue && c.Reason == reason
}

// untilDeleted waits until there is no such PersistentPodState.
func untilDeleted(t *testing.T, c *lab.Cluster, ns, name string) {
	t.Helper()
	until(t, "PersistentPodState "+name+" to be deleted", func(context.Context) bool {
		return stateOf(t, c, ns, name) == nil
	})
}

// caughtUp waits until the controller has done everything that it had to do until now: it has handled a new object.
func caughtUp(t *testing.T, c *lab.Cluster, ns string) {
	t.Helper()
	name := "caught-up-" + rand.String(6)
	deploy(t, c, ns, lab.Workload{Name: name, Own: prefersNode})
	comesTo(t, c, ns, name, "to be generated", func(*kruisev1alpha1.PersistentPodState) bool { return true })
	kubectl(t, c, "delete", "statefulset", name, "-n", ns)
	untilDeleted(t, c, ns, name)
}

// gates reports whether the pods of a workload are gated because of a PersistentPodState.
func gates(t *testing.T, c *lab.Cluster, ns, key string) bool {
	t.Helper()
	cm, err := c.Client().CoreV1().ConfigMaps(ns).Get(testContext(t), "stayput-gated-workloads", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false
	}
	must.Do(t, err)
	return strings.Contains(cm.Data["workloads"], "\n"+key+"\n")
}

const pool = `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue}
spec:
  mode: L2
  subnet: 10.6.0.0/16
  addresses: [10.6.168.101-10.6.168.110]
`

// podIPs returns the PodIPs by name.
func podIPs(t *testing.T, c *lab.Cluster) map[string]v1alpha1.PodIP {
	t.Helper()
	var list v1alpha1.PodIPList
	must.Do(t, typed(t, c).List(testContext(t), &list))
	all := map[string]v1alpha1.PodIP{}
	for _, ip := range list.Items {
		all[ip.Name] = ip
	}
	return all
}

// holders returns where in the cluster an address is configured: node and network namespace.
func holders(t *testing.T, c *lab.Cluster, addr string) []string {
	t.Helper()
	return holdersAmong(t, c.Nodes, addr)
}

func holdersAmong(t *testing.T, nodes []*lab.ClusterNode, addr string) (all []string) {
	t.Helper()
	for _, n := range nodes {
		out, err := n.Run(testContext(t), "/bin/sh", "-c", "for ns in /run/netns/*; do "+
			"nsenter --net=$ns grep -q -- '|-- "+addr+"$' /proc/self/net/fib_trie && echo $ns; done; true")
		must.Do(t, err)
		for ns := range strings.FieldsSeq(string(out)) {
			all = append(all, n.Name+" "+ns)
		}
	}
	return all
}

// holdTheirAddresses checks that pods have addresses of the pool, that the cluster knows them, and that nobody else has
// one.
func holdTheirAddresses(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) {
	t.Helper()
	unique(t, c)
	for name, pod := range pods {
		addr := pod.Status.PodIP
		if !strings.HasPrefix(addr, "10.6.168.1") {
			t.Errorf("%s has %s", name, addr)
		}
		until(t, "the PodIP of "+name+" to be bound", func(context.Context) bool {
			ip := podIPs(t, c)[addr]
			return ip.Spec.PodUID == string(pod.UID) && ip.Status.Phase == v1alpha1.PodIPBound &&
				ip.Status.NodeName == pod.Spec.NodeName && ip.Status.PodUID == string(pod.UID)
		})
		if at := holders(t, c, addr); len(at) != 1 || !strings.HasPrefix(at[0], pod.Spec.NodeName+" ") {
			t.Errorf("%s of %s on %s is configured at %v", addr, name, pod.Spec.NodeName, at)
		}
	}
}

// machine plugs a machine that is none of the cluster's into the nodes' link.
func machine(t *testing.T, c *lab.Cluster, addrs ...string) *lab.Machine {
	t.Helper()
	m, err := c.NewMachine("machine", prefixes(addrs)...)
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, m.Close()) })
	return m
}

func prefixes(addrs []string) (all []netip.Prefix) {
	for _, a := range addrs {
		all = append(all, netip.PrefixFrom(netip.MustParseAddr(a), 16))
	}
	return all
}

// knows waits until the machine knows whose an address is, and returns the MAC address.
func knows(t *testing.T, m *lab.Machine, a netip.Addr) (mac string) {
	t.Helper()
	until(t, "an answer of "+a.String(), func(ctx context.Context) bool {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := m.Get(ctx, a)
		return err == nil
	})
	mac, err := m.Neighbour(a)
	if must.Do(t, err); mac == "" {
		t.Fatalf("nobody's is %s", a)
	}
	return mac
}
