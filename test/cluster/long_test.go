//go:build long

package cluster

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// Of these tests, make test runs cheaper ones: the webhook alone, and make compat upgrades a real cluster.

// withoutPolicies is an API server as before Kubernetes 1.36.
var withoutPolicies = []string{
	"--runtime-config=admissionregistration.k8s.io/v1/mutatingadmissionpolicies=false," +
		"admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings=false",
	"--disable-admission-plugins=MutatingAdmissionPolicy",
}

// After an upgrade of the cluster the webhook goes on gating pods. The first upgrade of the release brings the policies
// beside it, the next one takes it away: at every moment each pod is gated, once.
func TestPoliciesTakeTheWebhooksPlaceOnceTheReleaseIsUpgraded(t *testing.T) {
	alone(t)
	newer := lab.WebhooksByEndpoint
	c := ownCluster(t, &lab.ClusterOptions{APIServerArgs: slices.Concat(newer, withoutPolicies)})
	// As where the API server reaches no pods.
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: map[string]any{
		"pools": map[string]any{"enabled": true},
		"controller": map[string]any{
			"hostNetwork": true, "ports": map[string]any{"gate": 19443}, "replicas": 1,
			"updateStrategy": map[string]any{"type": "Recreate"},
		},
	}}))
	const hook = "mutatingwebhookconfiguration.admissionregistration.k8s.io/stayput-gate"
	gatedByThe := func(webhook, policies bool, when string) {
		t.Helper()
		is := gatingObjects(t, c)
		if strings.Contains(is, hook) != webhook || strings.Contains(is, "mutatingadmissionpolic") != policies {
			t.Errorf("%s pods are gated by %s", when, is)
		}
	}
	gatedByThe(true, false, "at first")
	ns := namespace(t, c)
	gatesSoon(t, c, ns)
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("10m")})
	recordedOnes := tilted(t, c, ns, lab.Workload{
		Name: "node-only", Replicas: 4, Annotations: map[string]string{"stayput.io/home": "Required"},
	})
	recorded(t, c, ns, "node-only", recordedOnes)

	must.Do(t, c.ReconfigureAPIServer(testContext(t), newer...))
	gatesSoon(t, c, ns)
	gatedByThe(true, false, "after the upgrade of the cluster")
	watch := gatesAlways(t, c, ns)
	must.Do(t, c.Upgrade(testContext(t), nil))
	gatedByThe(true, true, "after one upgrade of the release")
	// Which pods of such a namespace are gated, only policies can tell.
	pooling := namespace(t, c)
	kubectl(t, c, "annotate", "namespace", pooling, "stayput.io/pools=some")
	until(t, "the policies to be in force", func(ctx context.Context) bool {
		pod, err := wouldBe(ctx, c, pooling, nil, nil)
		return err == nil && isGated(pod)
	})
	must.Do(t, c.Upgrade(testContext(t), nil))
	gatedByThe(false, true, "after two")
	t.Logf("%d pods would have been gated meanwhile", watch())
	deletePods(t, c, ns, "web")
	comeHome(t, c, ns, "web", before)
	deletePods(t, c, ns, "node-only")
	sameNodes(t, recordedOnes, places(t, c, ns, "node-only", len(recordedOnes), recordedOnes))
	said, err := c.Uninstall(testContext(t))
	t.Log(said)
	must.Do(t, err)
	gatedByThe(false, false, "after the removal")
}

// From the webhook to policies and back: at every moment each pod is gated, once. One upgrade brings what gates pods
// from now on, the next takes away what did.
func TestPodsAreGatedOnceOnTheWayFromTheWebhookToPoliciesAndBack(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{APIServerArgs: lab.WebhooksByEndpoint})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: gatedBy("Webhook")}))
	ns := namespace(t, c)
	gatesSoon(t, c, ns)
	watch := gatesAlways(t, c, ns)
	for _, step := range []struct{ to, webhook, policies string }{
		{"Policy", "stayput-gate", "stayput-gate-recorded"}, {"Policy", "", "stayput-gate-recorded"},
		{"Webhook", "stayput-gate", "stayput-gate-recorded"}, {"Webhook", "stayput-gate", ""},
	} {
		must.Do(t, c.Upgrade(testContext(t), gatedBy(step.to)))
		is := gatingObjects(t, c)
		if strings.Contains(is, "webhookconfiguration") != (step.webhook != "") ||
			strings.Contains(is, step.policies) != (step.policies != "") && step.policies != "" ||
			strings.Contains(is, "policy") != (step.policies != "") {
			t.Errorf("on the way to %s, pods are gated by %s", step.to, is)
		}
	}
	t.Logf("%d pods would have been gated meanwhile", watch())
}
