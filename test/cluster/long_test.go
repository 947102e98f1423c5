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

// By default the webhook goes by itself once the cluster has been upgraded: its successor is there before, every pod is
// gated once at every moment, and Helm takes over what it finds.
func TestPoliciesTakeTheWebhooksPlaceByThemselves(t *testing.T) {
	alone(t)
	newer := append(slices.Clone(lab.WebhooksByEndpoint), "--endpoint-reconciler-type=lease")
	older := slices.Concat(newer, withoutPolicies)
	c := ownCluster(t, &lab.ClusterOptions{APIServerArgs: older})
	values := map[string]any{
		"gate":  map[string]any{"webhook": map[string]any{"removeAfter": "15s"}},
		"pools": map[string]any{"enabled": true},
	}
	const (
		hook     = "mutatingwebhookconfiguration.admissionregistration.k8s.io/stayput-gate"
		policies = 8 // with their bindings
	)
	for _, helm := range []string{"uninstalls", "upgrades"} {
		if helm == "upgrades" { // and the API server reaches no pods, as with some providers
			values["controller"] = map[string]any{
				"hostNetwork": true, "ports": map[string]any{"gate": 19443}, "replicas": 1,
				"updateStrategy": map[string]any{"type": "Recreate"},
			}
		}
		must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: values}))
		if is := gatingObjects(t, c); is != hook {
			t.Fatalf("pods are gated by %s", is)
		}
		ns := namespace(t, c)
		gatesSoon(t, c, ns)
		allComeHome := func() {}
		if helm == "uninstalls" { // once is enough
			before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("10m")})
			recordedOnes := tilted(t, c, ns, lab.Workload{
				Name: "node-only", Replicas: 4, Annotations: map[string]string{"stayput.io/home": "Required"},
			})
			recorded(t, c, ns, "node-only", recordedOnes)
			allComeHome = func() {
				deletePods(t, c, ns, "web")
				comeHome(t, c, ns, "web", before)
				until(t, "recorded pods to be gated", func(ctx context.Context) bool {
					pod, err := wouldBe(ctx, c, ns, recordedOnes["node-only-0"].OwnerReferences, nil)
					return err == nil && len(pod.Spec.SchedulingGates) == 1
				})
				deletePods(t, c, ns, "node-only")
				sameNodes(t, recordedOnes, places(t, c, ns, "node-only", len(recordedOnes), recordedOnes))
			}
		}

		// Which pods of such a namespace are gated, only policies can tell.
		pooling := namespace(t, c)
		kubectl(t, c, "annotate", "namespace", pooling, "stayput.io/pools=some")
		must.Do(t, c.ReconfigureAPIServer(testContext(t), newer...))
		until(t, "the policies to be in force", func(ctx context.Context) bool {
			pod, err := wouldBe(ctx, c, pooling, nil, nil)
			return err == nil && isGated(pod)
		})
		watch := gatesAlways(t, c, ns)
		if is := gatingObjects(t, c); strings.Count(is, "mutatingadmissionpolic") != policies || !strings.Contains(is, hook) {
			t.Errorf("policies are in force, and pods are gated by %s", is)
		}
		until(t, "the webhook to go", func(context.Context) bool { return !strings.Contains(gatingObjects(t, c), hook) })
		// The controllers of this release still serve a webhook. That nobody asks them any more does not disturb them.
		must.Do(t, c.Controllers.Restart(testContext(t)))
		t.Logf("%d pods would have been gated meanwhile", watch())
		allComeHome()

		if helm == "upgrades" {
			watch := gatesAlways(t, c, ns)
			must.Do(t, c.Upgrade(testContext(t), values))
			t.Logf("%d pods would have been gated meanwhile", watch())
			is := gatingObjects(t, c)
			if strings.Count(is, "mutatingadmissionpolic") != policies || strings.Contains(is, hook) {
				t.Errorf("after the upgrade of the release pods are gated by %s", is)
			}
			if left := kubectl(t, c, "get", "configmap,secret,role", "-n", lab.SystemNamespace, "-o", "name"); strings.
				Contains(left, "stayput-gate-policies") || strings.Contains(left, "gate-later") {
				t.Errorf("of the move there is left: %s", left)
			}
		}
		said, err := c.Uninstall(testContext(t))
		t.Log(said)
		must.Do(t, err)
		if is := gatingObjects(t, c); is != "" {
			t.Errorf("left: %s", is)
		}
		if helm == "uninstalls" {
			kubectl(t, c, "delete", "namespace", ns, pooling)
			must.Do(t, c.ReconfigureAPIServer(testContext(t), older...))
		}
	}
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
