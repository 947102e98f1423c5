//go:build long

package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

func TestTheManualOfSpiderpoolsStatefulSet(t *testing.T) {
	alone(t)
	c := onOneLink(t, lab.ClusterOptions{})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{
		Values: map[string]any{"pools": map[string]any{"enabled": true, "spiderpool": true}},
	}))
	ns := namespace(t, c)
	counts := func(allocated, total string) {
		t.Helper()
		want := []string{"test-ippool", "10.6.0.0/16", allocated, total, "false"}
		until(t, fmt.Sprintf("kubectl get spiderippool to print %q", want), func(context.Context) bool {
			head, line, _ := strings.Cut(kubectl(t, c, "get", "spiderippool"), "\n")
			return strings.HasPrefix(head, "NAME") && slices.Equal(strings.Fields(line), want)
		})
	}
	deleteAll := func() {
		t.Helper()
		names := strings.Fields(kubectl(t, c, "get", "pod", "-n", ns, "-l", "app=test-sts", "-o", "name"))
		kubectl(t, c, append([]string{"delete", "-n", ns}, names...)...)
	}

	apply(t, c, ns, spidersPool)
	apply(t, c, ns, strings.Replace(spidersSet, "nginx", lab.WebImage, 1))
	pods := places(t, c, ns, "test-sts", 2, nil)
	holdTheirAddresses(t, c, pods)
	counts("2", "10")

	// All are deleted, and have their addresses again; also on other nodes.
	nodes := map[string]bool{}
	for _, pod := range pods {
		nodes[pod.Spec.NodeName] = true
	}
	for node := range nodes {
		kubectl(t, c, "cordon", node)
	}
	deleteAll()
	after := places(t, c, ns, "test-sts", 2, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	for name, pod := range after {
		if nodes[pod.Spec.NodeName] {
			t.Errorf("%s is on the cordoned %s", name, pod.Spec.NodeName)
		}
	}
	for node := range nodes {
		kubectl(t, c, "uncordon", node)
	}

	// Scaled up, all are deleted again.
	kubectl(t, c, "scale", "statefulset", "test-sts", "-n", ns, "--replicas", "3")
	pods = places(t, c, ns, "test-sts", 3, nil)
	keptAddresses(t, after, pods)
	counts("3", "10")
	deleteAll()
	after = places(t, c, ns, "test-sts", 3, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)

	// Scaled down, the last one's is free.
	kubectl(t, c, "scale", "sts", "test-sts", "-n", ns, "--replicas", "2")
	counts("2", "10")
	pods = places(t, c, ns, "test-sts", 2, nil)
	delete(after, "test-sts-2")
	keptAddresses(t, after, pods)

	// With the StatefulSet go its addresses, and the pool.
	kubectl(t, c, "delete", "statefulset", "test-sts", "-n", ns)
	counts("0", "10")
	if left := podIPs(t, c); len(left) > 0 {
		t.Errorf("left are %v", left)
	}

	// Another pod gets nothing while its words cannot be read.
	apply(t, c, ns, strings.NewReplacer("nginx", lab.WebImage, `["test-ippool"]`, `["test-*"]`,
		"replicas: 2", "replicas: 1").Replace(spidersSet))
	saysOf(t, c, ns, "Pod", "test-sts-0", "InvalidAnnotation", `wildcards such as "test-*" are not supported`)
	if pod := getPod(t, c, ns, "test-sts-0"); !isGated(pod) {
		t.Errorf("it does not wait: %+v", pod.Spec)
	}
	kubectl(t, c, "delete", "statefulset", "test-sts", "-n", ns)
	kubectl(t, c, "delete", "spiderippool", "test-ippool", "--timeout=60s")
}
