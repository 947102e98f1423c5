package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// The template gets a sysctl that only the kubelet of node-3 allows. The scheduler knows nothing of that.
func TestAHomeWhoseKubeletRefusesASysctlIsGivenUp(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait",
		"5s")})
	was := before["web-0"]
	allowSysctl(t, c.Node("node-3"), "kernel.msgmax")

	kubectl(t, c, "patch", "statefulset", "web", "-n", ns, "-p", `{"spec": {"template": {"spec": {"securityContext":
		{"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]}}}}}`)
	after := successor(t, c, was)
	if after.Spec.NodeName != "node-3" {
		t.Errorf("it is on %s", after.Spec.NodeName)
	}
	for kind, name := range map[string]string{"Pod": "web-0", "StatefulSet": "web"} {
		saysOf(t, c, ns, kind, name, "HomeGivenUp", "node "+was.Spec.NodeName, "SysctlForbidden", "kernel.msgmax")
	}
	shows(t, c, ns, "web-0", was.Spec.NodeName, "retained", retained)
	deletePods(t, c, ns, "web")
	cameHome(t, map[string]*corev1.Pod{"web-0": after}, map[string]*corev1.Pod{"web-0": successor(t, c, after)})
}

// allowSysctl has a node's kubelet allow one, for the time of a test.
func allowSysctl(t *testing.T, n *lab.ClusterNode, sysctl string) {
	t.Helper()
	const file = "/etc/kubernetes/kubelet.json"
	was, err := os.ReadFile(n.Path(file))
	must.Do(t, err)
	var config map[string]any
	must.Do(t, json.Unmarshal(was, &config))
	config["allowedUnsafeSysctls"] = []string{sysctl}
	is, err := json.Marshal(config)
	must.Do(t, err)
	restart := func(config []byte) {
		must.Do(t, n.WriteFile(file, config))
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		must.Do(t, n.Kubelet.Restart(ctx))
	}
	t.Cleanup(func() { restart(was) })
	restart(is)
}

func TestAPolicyThatForbidsNodeAffinityHoldsNoPodUp(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m", "stayput.io/home-wait",
		"5s")})
	_, err := c.Kubectl(testContext(t), fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: %[1]s}
spec:
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %[1]s}}
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE, UPDATE], resources: [pods]}]
  validations:
  - expression: "!has(object.spec.affinity) || !has(object.spec.affinity.nodeAffinity)"
    message: Node affinity cannot be used.
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: %[1]s}
spec: {policyName: %[1]s, validationActions: [Deny]}
`, ns), "apply", "-f", "-")
	must.Do(t, err)
	atEnd(t, c, "delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", ns)
	until(t, "the policy to be in force", func(ctx context.Context) bool {
		_, err := c.Client().CoreV1().Pods(ns).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "probe"},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}},
				Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
					PreferredDuringSchedulingIgnoredDuringExecution: rather(1, "node-3")}}},
		}, metav1.CreateOptions{DryRun: []string{"All"}})
		return err != nil
	})
	deletePods(t, c, ns, "web")
	after := successor(t, c, before["web-0"])
	if after.Spec.Affinity != nil && after.Spec.Affinity.NodeAffinity != nil {
		t.Errorf("it has the node affinity %+v", after.Spec.Affinity.NodeAffinity)
	}
	for kind, name := range map[string]string{"Pod": "web-0", "StatefulSet": "web"} {
		saysOf(t, c, ns, kind, name, "HomeGivenUp", "node "+before["web-0"].Spec.NodeName, "Node affinity cannot be used.")
	}
}
