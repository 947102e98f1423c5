//go:build conformance

package conformance

import (
	"context"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// statefulSets are all [Conformance] tests of [sig-apps] StatefulSet. "Scaling should happen" takes a minute, or six on
// a busy machine, when it waits for a pod that its own StatefulSet has already deleted.
var statefulSets = withPrefix("[sig-apps] StatefulSet Basic StatefulSet functionality [StatefulSetBasic] ",
	"Burst scaling should run to completion even with unhealthy pods [Conformance] [Slow]",
	"Scaling should happen in predictable order and halt if any stateful pod is unhealthy [Conformance] [Slow]",
	"Should recreate evicted statefulset [Conformance]",
	"should have a working scale subresource [Conformance]",
	"should list, patch and delete a collection of StatefulSets [Conformance]",
	"should perform canary updates and phased rolling updates of template modifications [Conformance]",
	"should perform rolling updates and roll backs of template modifications [Conformance]",
	"should validate Statefulset Status endpoints [Conformance]",
)

// podNetworking are all [Conformance] tests of [sig-network] Networking. Those of Services need a kube-proxy and are
// not among them.
var podNetworking = withPrefix("[sig-network] Networking Granular Checks: Pods should function for ",
	"intra-pod communication: http [Conformance] [NodeConformance]",
	"intra-pod communication: udp [Conformance] [NodeConformance]",
	"node-pod communication: http [LinuxOnly] [Conformance] [NodeConformance]",
	"node-pod communication: udp [LinuxOnly] [Conformance] [NodeConformance]",
)

func withPrefix(prefix string, names ...string) []string {
	for i := range names {
		names[i] = prefix + names[i]
	}
	return names
}

const retainIP, retention = "stayput.io/retain-ip", "10m"

// annotate adds stayput.io/retain-ip to every StatefulSet's template and to every other pod. The template is the right
// place: the API server calls policies in no particular order, so the gating one may see a pod before it is annotated.
const annotate = `
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: conformance-templates}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules: [{apiGroups: [apps], apiVersions: [v1], operations: [CREATE, UPDATE], resources: [statefulsets]}]
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >-
        has(object.spec.template.metadata) && has(object.spec.template.metadata.annotations) ?
        [JSONPatch{op: "add", path: "/spec/template/metadata/annotations/stayput.io~1retain-ip", value: "10m"}] :
        [JSONPatch{op: "add", path: "/spec/template/metadata/annotations", value: {"stayput.io/retain-ip": "10m"}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: conformance-templates}
spec: {policyName: conformance-templates}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: conformance-pods}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    namespaceSelector:
      matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [stayput-system, kube-system]}]
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >-
        has(object.metadata.annotations) ?
        [JSONPatch{op: "add", path: "/metadata/annotations/stayput.io~1retain-ip", value: "10m"}] :
        [JSONPatch{op: "add", path: "/metadata/annotations", value: {"stayput.io/retain-ip": "10m"}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: conformance-pods}
spec: {policyName: conformance-pods}
`

func TestStatefulSetsConformWithAllAddressesRetained(t *testing.T) {
	product, tests := build(t)
	c := startCluster(t, product, tests)
	pods := watchPods(t, c)
	runKubernetes(t, c, 30*time.Minute, statefulSets)
	seen := pods()
	everyPodKeepsItsAddress(t, c, seen)
	if n := everyStatefulSetsPodComesHome(t, seen); n == 0 {
		t.Error("no pod was ever recreated, so none was seen to come home")
	}
}

func TestPodNetworkingConformsWithAllAddressesRetained(t *testing.T) {
	product, tests := build(t)
	c := startCluster(t, product, tests)
	pods := watchPods(t, c)
	runKubernetes(t, c, 15*time.Minute, podNetworking)
	everyPodKeepsItsAddress(t, c, pods())
}

// startCluster starts a cluster with stayput installed as by users: two controllers, and on every node an agent that
// has made stayput the node's IPAM plugin.
func startCluster(t *testing.T, product lab.Product, tests lab.ConformanceBin) *lab.Cluster {
	t.Helper()
	ctx := testContext(t, patience)
	c, err := lab.StartCluster(ctx, lab.ClusterOptions{Product: product})
	must.Do(t, err)
	must.Close(t, c)
	must.Do(t, c.Install(ctx, lab.InstallOptions{}))
	must.Do(t, c.LoadImage(ctx, tests.Images))
	must.Do(t, c.Control.Install(tests.E2E, e2eTest))
	_, err = c.Kubectl(ctx, annotate, "apply", "-f", "-")
	must.Do(t, err)
	must.Within(t, patience, "the annotating policies to take effect", func() bool { return annotated(ctx, c) })
	return c
}

// annotated reports whether the policies are in effect: all pods and all templates get the annotation.
func annotated(ctx context.Context, c *lab.Cluster) bool {
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Name: "probe", Labels: map[string]string{"a": "b"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "probe", Image: "none"}}},
	}
	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	pod, err := c.Client().CoreV1().Pods("default").Create(ctx, pod, dry)
	if err != nil || pod.Annotations[retainIP] != retention {
		return false
	}
	set, err := c.Client().AppsV1().StatefulSets("default").Create(ctx, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "probe"},
		Spec:       appsv1.StatefulSetSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template},
	}, dry)
	return err == nil && set.Spec.Template.Annotations[retainIP] == retention
}

const e2eTest = "/opt/conformance/e2e.test"

// runKubernetes runs Kubernetes tests on the control plane's machine, which reaches nodes and pods by address and ends
// them with itself.
func runKubernetes(t *testing.T, c *lab.Cluster, patience time.Duration, names []string) {
	t.Helper()
	runSuite(t, c.Control, patience, names, e2eTest,
		"-kubeconfig=/etc/kubernetes/"+lab.Admin+".kubeconfig", "-kubectl-path=/opt/lab/kubernetes/kubectl",
		"-provider=skeleton", "-disable-log-dump")
}
