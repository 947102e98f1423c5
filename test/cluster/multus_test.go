//go:build multus

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestAddressesOfPoolsReachPodsThroughThinMultus(t *testing.T) { throughMultus(t, false) }

func TestAddressesOfPoolsReachPodsThroughThickMultus(t *testing.T) { throughMultus(t, true) }

// twoLinks are a pool of each family for each of the two interfaces, and the network of the second one.
const twoLinks = `
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue}
spec: {mode: L2, subnet: 10.6.0.0/16, addresses: [10.6.168.101-10.6.168.110]}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: blue6}
spec: {mode: L2, subnet: "fd00:6::/64", addresses: ["fd00:6::101-fd00:6::110"]}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: green}
spec: {mode: L2, subnet: 10.7.0.0/16, addresses: [10.7.168.101-10.7.168.110]}
---
apiVersion: stayput.io/v1alpha1
kind: PodIPPool
metadata: {name: green6}
spec: {mode: L2, subnet: "fd00:7::/64", addresses: ["fd00:7::101-fd00:7::110"]}
---
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: vlan20}
spec:
  config: '{"cniVersion": "1.0.0", "name": "vlan20", "type": "macvlan", "master": "uplink0",
    "ipam": {"type": "stayput", "pools": []}}'
`

// podNetworks is multus' annotation for the networks that a pod has besides the default one.
const podNetworks = "k8s.v1.cni.cncf.io/networks"

// throughMultus has pods with two interfaces, each with an address of each family. multus hands no annotations on: the
// plugin has the addresses from the agent.
func throughMultus(t *testing.T, thick bool) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{})
	for _, n := range c.Nodes {
		ipam := lab.RangeIPAM("host-local", n.Pods.String())
		ipam["pools"] = []any{} // its addresses are those of pools
		must.Do(t, n.SetNetworks(testContext(t), lab.Network{Type: "macvlan", Annotations: true, IPAM: ipam}))
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{
		Values: map[string]any{"pools": map[string]any{"enabled": true}},
	}))
	must.Do(t, c.InstallMultus(testContext(t), thick))
	ns := namespace(t, c)
	apply(t, c, ns, strings.Replace(twoLinks, "uplink0", lab.Uplink, 1))
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 2, Unprobed: true, Annotations: map[string]string{
		"stayput.io/pools": "blue,blue6,green@net1,green6@net1", podNetworks: "vlan20",
	}})

	// 1. Each pod has its four addresses, where they belong.
	pods := places(t, c, ns, "web", 2, nil)
	has := bothLinks(t, c, pods)
	for _, addr := range has["web-1"] { // on either link, in either family
		reachesAt(t, c, pods["web-0"], pods["web-1"], addr)
	}

	// 2. It keeps them when all are deleted, also on another node.
	for range 2 {
		from := pods["web-0"].Spec.NodeName
		kubectl(t, c, "cordon", from)
		deletePods(t, c, ns, "web")
		after := places(t, c, ns, "web", 2, pods)
		kubectl(t, c, "uncordon", from)
		if kept := bothLinks(t, c, after); fmt.Sprint(kept) != fmt.Sprint(has) {
			t.Errorf("had %v and has %v", has, kept)
		}
		if after["web-0"].Spec.NodeName == from {
			t.Errorf("web-0 is on the cordoned %s", from)
		}
		pods = after
	}
	for _, addr := range has["web-1"] {
		reachesAt(t, c, pods["web-0"], pods["web-1"], addr)
	}

	// 3. A webhook says what pods want. It does the same to thick multus.
	if !thick {
		fromAWebhook(t, c)
	}

	// 4. With the workload all are free.
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	until(t, "all addresses to be free", func(context.Context) bool { return len(podIPs(t, c)) == 0 })
	until(t, "the pods to go", func(ctx context.Context) bool {
		list, err := c.Client().CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		return err == nil && len(list.Items) == 0
	})
	for _, all := range has {
		for _, addr := range all {
			if addr.Is4() {
				if at := holders(t, c, addr.String()); len(at) > 0 {
					t.Errorf("%s is free, and configured at %v", addr, at)
				}
			}
		}
	}
}

// bothLinks returns the addresses of each pod, and checks that they are on its interfaces, bound, and nobody else's.
func bothLinks(t *testing.T, c *lab.Cluster, pods map[string]*corev1.Pod) map[string][]netip.Addr {
	t.Helper()
	has := map[string][]netip.Addr{}
	for name, pod := range pods {
		var said []v1alpha1.PodIP
		until(t, "the PodIPs of "+name+" to be bound", func(context.Context) bool {
			said = nil
			for _, ip := range podIPs(t, c) {
				if ip.Spec.PodUID == string(pod.UID) && ip.Status.Phase == v1alpha1.PodIPBound &&
					ip.Status.NodeName == pod.Spec.NodeName {
					said = append(said, ip)
				}
			}
			return len(said) == 4
		})
		of := map[string][]string{}
		for _, ip := range said {
			addr, err := v1alpha1.ParsePodIPName(ip.Name)
			must.Do(t, err)
			has[name], of[ip.Spec.Interface] = append(has[name], addr), append(of[ip.Spec.Interface], addr.String())
		}
		slices.SortFunc(has[name], netip.Addr.Compare)
		for _, ifname := range []string{"eth0", "net1"} {
			if len(of[ifname]) != 2 {
				t.Errorf("%s has %v on %s", name, of[ifname], ifname)
			}
			var out []byte
			netns := sandbox(t, c, pod).NetNS
			until(t, "the kernel to have looked for duplicates", func(ctx context.Context) bool { // before, none is used
				var err error
				out, err = c.Node(pod.Spec.NodeName).Run(ctx, "/bin/sh", "-c", "PATH=/sbin:/usr/sbin:$PATH; "+
					"nsenter --net="+netns+" ip -o addr show dev "+ifname)
				must.Do(t, err)
				return !strings.Contains(string(out), "tentative")
			})
			for _, addr := range of[ifname] {
				if !strings.Contains(string(out), " "+addr+"/") {
					t.Errorf("%s of %s is not on %s:\n%s", addr, name, ifname, out)
				}
			}
		}
		if !slices.Contains(has[name], ip(t, pod)) || !strings.HasPrefix(pod.Status.PodIP, "10.6.168.1") {
			t.Errorf("the address of %s is %s", name, pod.Status.PodIP)
		}
		for _, addr := range has[name] {
			if !addr.Is4() {
				continue
			}
			if at := holders(t, c, addr.String()); len(at) != 1 || !strings.HasPrefix(at[0], pod.Spec.NodeName+" ") {
				t.Errorf("%s of %s on %s is configured at %v", addr, name, pod.Spec.NodeName, at)
			}
		}
	}
	return has
}

// late is the annotation that names, in JSON, those that a webhook adds to a pod.
const late = "example.com/late"

// annotate is a webhook that adds annotations to pods.
func annotate(w http.ResponseWriter, r *http.Request) {
	var review admissionv1.AdmissionReview
	var pod corev1.Pod
	err := json.NewDecoder(r.Body).Decode(&review)
	if err == nil {
		err = json.Unmarshal(review.Request.Object.Raw, &pod)
	}
	var add map[string]string
	if text := pod.Annotations[late]; err == nil && text != "" {
		err = json.Unmarshal([]byte(text), &add)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	patch := []any{}
	for key, value := range add {
		patch = append(patch, map[string]any{
			"op": "add", "path": "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1"), "value": value,
		})
	}
	kind := admissionv1.PatchTypeJSONPatch
	review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true, PatchType: &kind}
	review.Response.Patch, _ = json.Marshal(patch) // strings
	review.Request = nil
	_ = json.NewEncoder(w).Encode(review) // the client may be gone
}

// fromAWebhook has a webhook say what pods want, once the policies have looked at them.
func fromAWebhook(t *testing.T, c *lab.Cluster) {
	t.Helper()
	ns := namespace(t, c)
	apply(t, c, ns, strings.Replace(twoLinks[strings.LastIndex(twoLinks, "---"):], "uplink0", lab.Uplink, 1))
	config, _ := serveWebhook(t, c, "127.0.0.1:0", annotate)
	apply(t, c, ns, fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: late}
webhooks:
- name: late.example.com
  clientConfig: %s
  admissionReviewVersions: [v1]
  sideEffects: None
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %s}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
`, config, ns))
	atEnd(t, c, "delete", "mutatingwebhookconfiguration", "late")
	const (
		networks = `"k8s.v1.cni.cncf.io/networks": "vlan20"`
		all      = `"stayput.io/pools": "blue,green@net1"`
	)
	until(t, "the API server to know the webhook", func(ctx context.Context) bool {
		dry := lab.Workload{Kind: "Pod", Name: "dry", Annotations: map[string]string{late: `{"seen": "yes"}`}}
		is, err := c.Client().CoreV1().Pods(ns).Create(ctx, dry.Object(ns).(*corev1.Pod), //nolint:forcetypeassert // it is
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err == nil && is.Annotations["seen"] != ""
	})
	for name, annotations := range map[string]map[string]string{
		"all":     {late: `{` + networks + `, ` + all + `}`}, // no policy has gated it
		"network": {late: `{` + networks + `}`, "stayput.io/pools": "blue,green@net1"},
		"more":    {late: `{` + networks + `, ` + all + `}`, "stayput.io/pools": "blue"},
		"nothing": {late: `{` + networks + `}`, "stayput.io/pools": "blue"},
	} {
		deploy(t, c, ns, lab.Workload{Name: name, Replicas: 1, Annotations: annotations, Unprobed: true})
	}
	has := func(name string) (pod *corev1.Pod, addrs map[string]string) {
		t.Helper()
		pod = ready(t, c, ns, name+"-0")
		until(t, "the PodIPs of "+name+" to be bound", func(context.Context) bool {
			addrs = map[string]string{}
			for _, ip := range podIPs(t, c) {
				if ip.Spec.PodUID == string(pod.UID) && ip.Status.Phase == v1alpha1.PodIPBound {
					addrs[ip.Spec.Interface] = ip.Name
				}
			}
			return len(addrs) == 2
		})
		if pod.Status.PodIP != addrs["eth0"] || !strings.HasPrefix(addrs["eth0"], "10.6.168.1") ||
			!strings.HasPrefix(addrs["net1"], "10.7.168.1") {
			t.Errorf("%s has %s and the PodIPs %v", name, pod.Status.PodIP, addrs)
		}
		for _, addr := range addrs {
			if at := holders(t, c, addr); len(at) != 1 || !strings.HasPrefix(at[0], pod.Spec.NodeName+" ") {
				t.Errorf("%s of %s on %s is configured at %v", addr, name, pod.Spec.NodeName, at)
			}
		}
		return pod, addrs
	}
	for _, name := range []string{"all", "network", "more"} {
		pod, had := has(name)
		kubectl(t, c, "cordon", pod.Spec.NodeName)
		must.Do(t, c.Client().CoreV1().Pods(ns).Delete(testContext(t), pod.Name, metav1.DeleteOptions{}))
		successor(t, c, pod)
		if is, kept := has(name); !maps.Equal(had, kept) || is.Spec.NodeName == pod.Spec.NodeName {
			t.Errorf("%s had %v on %s and has %v on %s", name, had, pod.Spec.NodeName, kept, is.Spec.NodeName)
		}
		kubectl(t, c, "uncordon", pod.Spec.NodeName)
	}
	// Nobody has said of which pool an address for net1 would be, and the network has no others.
	saysOf(t, c, ns, "Pod", "nothing-0", "FailedCreatePodSandBox",
		"no address for interface net1", "vlan20 come from pools")
	if pod := getPod(t, c, ns, "nothing-0"); pod.Status.PodIP != "" {
		t.Errorf("it has %s", pod.Status.PodIP)
	}
	must.Do(t, c.Client().AppsV1().StatefulSets(ns).DeleteCollection(testContext(t), metav1.DeleteOptions{},
		metav1.ListOptions{}))
}
