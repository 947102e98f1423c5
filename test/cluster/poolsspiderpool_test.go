package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// What Spiderpool's manual types (docs/usage/statefulset.md), but for the image.
const (
	spidersPool = `
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderIPPool
metadata:
  name: test-ippool
spec:
  subnet: 10.6.0.0/16
  ips:
    - 10.6.168.101-10.6.168.110
`
	spidersSet = `
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: test-sts
spec:
  replicas: 2
  selector:
    matchLabels:
      app: test-sts
  template:
    metadata:
      annotations:
        ipam.spidernet.io/ippool: |-
            {      
              "ipv4": ["test-ippool"]
            }
        v1.multus-cni.io/default-network: kube-system/macvlan-ens192
      labels:
        app: test-sts
    spec:
      containers:
        - name: test-sts
          image: nginx
          imagePullPolicy: IfNotPresent
`
)

// spiderIPPoolCRD is the part of Spiderpool's definition that an import reads.
const spiderIPPoolCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: spiderippools.spiderpool.spidernet.io}
spec:
  group: spiderpool.spidernet.io
  scope: Cluster
  names: {plural: spiderippools, kind: SpiderIPPool}
  versions:
  - name: v2beta1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

// Pods that run with addresses of Spiderpool, for which the lab has host-local, are taken over into pools: they run on,
// and have the same addresses when they are made again, on other nodes.
func TestPodsOfSpiderpoolMoveToPools(t *testing.T) {
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	ns := namespace(t, c)
	networks := func(ipam func(i int) map[string]any) {
		t.Helper()
		for i, n := range c.Nodes {
			must.Do(t, n.SetNetworks(testContext(t), lab.Network{Type: "macvlan", Annotations: true, IPAM: ipam(i)}))
		}
	}
	networks(func(i int) map[string]any {
		return map[string]any{"type": "host-local", "dataDir": "/var/lib/spiders", "ranges": []any{[]any{map[string]any{
			"subnet": "10.6.0.0/16", "rangeStart": fmt.Sprintf("10.6.168.%d", 101+3*i),
			"rangeEnd": fmt.Sprintf("10.6.168.%d", 103+3*i)}}}}
	})
	apply(t, c, ns, strings.Replace(spidersSet, "nginx", lab.WebImage, 1))
	pods := places(t, c, ns, "test-sts", 2, nil)
	apply(t, c, ns, spiderIPPoolCRD+"---"+spiderEndpointCRD)
	must.Do(t, c.WaitForCRDs(testContext(t)))
	apply(t, c, ns, spidersPool)
	for name, pod := range pods {
		apply(t, c, ns, fmt.Sprintf(`
apiVersion: spiderpool.spidernet.io/v2beta1
kind: SpiderEndpoint
metadata: {name: %s}
status:
  ownerControllerType: StatefulSet
  ownerControllerName: test-sts
  current:
    uid: %s
    node: %s
    ips: [{interface: eth0, ipv4: %s/16, ipv4Pool: test-ippool}]
`, name, pod.UID, pod.Spec.NodeName, pod.Status.PodIP))
	}

	// Their networks become Stayput's, their addresses those of pools; then their words count.
	networks(func(int) map[string]any { return map[string]any{"type": "stayput", "pools": []any{}} })
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	works(t, c, ns, "import", "spiderpool", "--pools", "--dry-run=client")
	if all := podIPs(t, c); len(all) > 0 {
		t.Errorf("a plan has made %v", all)
	}
	works(t, c, ns, "import", "spiderpool", "--pools", "--yes")
	for name, pod := range pods {
		if ip := podIPs(t, c)[pod.Status.PodIP]; ip.Spec.AdoptedOn != pod.Spec.NodeName || ip.Spec.PodUID != string(pod.UID) {
			t.Errorf("the PodIP of %s is %+v", name, ip.Spec)
		}
	}
	kubectl(t, c, "apply", "-f", "../../deploy/pools-spiderpool.yaml")
	holdTheirAddresses(t, c, pods)
	for name, pod := range pods {
		until(t, name+" to be told its address", func(context.Context) bool {
			is := getPod(t, c, ns, name)
			return is.UID == pod.UID && strings.Contains(is.Annotations[v1alpha1.AnnotationAddresses], pod.Status.PodIP+"/16")
		})
	}

	// Made again, they have them on other nodes.
	nodes := map[string]bool{}
	for _, pod := range pods {
		nodes[pod.Spec.NodeName] = true
	}
	for node := range nodes {
		kubectl(t, c, "cordon", node)
	}
	deletePods(t, c, ns, "test-sts")
	after := places(t, c, ns, "test-sts", 2, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	for name, ip := range podIPs(t, c) {
		if ip.Spec.AdoptedOn != "" {
			t.Errorf("PodIP %s is still adopted: %+v", name, ip.Spec)
		}
	}
}
