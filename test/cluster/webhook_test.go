package cluster

import (
	"bytes"
	"context"
	"crypto/x509"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// gatedBy are values of the chart.
func gatedBy(mechanism string) map[string]any {
	return map[string]any{"gate": map[string]any{"mechanism": mechanism}}
}

// As where the API server has no policies that gate pods.
func TestAWebhookGatesPodsWherePoliciesCannot(t *testing.T) {
	alone(t)
	c := ownCluster(t, &lab.ClusterOptions{APIServerArgs: lab.WebhooksByEndpoint})
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: gatedBy("Webhook")}))
	if is := gatingObjects(t, c); is != "mutatingwebhookconfiguration.admissionregistration.k8s.io/stayput-gate" {
		t.Errorf("pods are gated by %s", is)
	}
	ns := namespace(t, c)
	gatesSoon(t, c, ns)

	// Annotated pods and recorded ones come home.
	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("10m")})
	recordedOnes := tilted(t, c, ns, lab.Workload{
		Name: "node-only", Replicas: 4, Annotations: map[string]string{"stayput.io/home": "Required"},
	})
	recorded(t, c, ns, "node-only", recordedOnes)
	deletePods(t, c, ns, "web")
	before = comeHome(t, c, ns, "web", before)
	until(t, "recorded pods to be gated", func(ctx context.Context) bool {
		pod, err := wouldBe(ctx, c, ns, recordedOnes["node-only-0"].OwnerReferences, nil)
		return err == nil && len(pod.Spec.SchedulingGates) == 1
	})
	deletePods(t, c, ns, "node-only")
	sameNodes(t, recordedOnes, places(t, c, ns, "node-only", len(recordedOnes), recordedOnes))
	// Others are not held up, and what others hold is held by both.
	if pod, err := wouldBe(testContext(t), c, ns, nil, nil); err != nil || len(pod.Spec.SchedulingGates) != 0 {
		t.Errorf("an ordinary pod: %v: %v", pod.Spec.SchedulingGates, err)
	}
	both, err := wouldBe(testContext(t), c, ns, nil, retain("10m"), "example.com/theirs")
	if err != nil || len(both.Spec.SchedulingGates) != 2 || !isGated(both) {
		t.Errorf("a pod with another gate: %v: %v", both.Spec.SchedulingGates, err)
	}

	// While no controller answers, pods start at once. One that lands at home has its address.
	must.Do(t, c.Controllers.Stop(testContext(t)))
	home := before["web-0"].Spec.NodeName
	for _, n := range c.Nodes {
		if n.Name != home {
			kubectl(t, c, "cordon", n.Name)
		}
	}
	kubectl(t, c, "delete", "pod", "web-0", "-n", ns)
	lucky := successor(t, c, before["web-0"])
	if lucky.Spec.NodeName != home || lucky.Status.PodIP != before["web-0"].Status.PodIP || lucky.Spec.Affinity != nil {
		t.Errorf("was on %s with %s, is on %s with %s; affinity %v", home, before["web-0"].Status.PodIP,
			lucky.Spec.NodeName, lucky.Status.PodIP, lucky.Spec.Affinity)
	}
	before["web-0"] = lucky
	for _, n := range c.Nodes {
		kubectl(t, c, "uncordon", n.Name)
	}
	must.Do(t, c.Controllers.Start(testContext(t)))
	gatesSoon(t, c, ns)

	// A certificate that has ended, or is gone, is replaced; and after its restart the API server trusts the same.
	for name, data := range map[string]map[string][]byte{"ended": ended(t), "gone": nil} {
		trusted := trustedAuthority(t, c)
		secrets := c.Client().CoreV1().Secrets(lab.SystemNamespace)
		secret, err := secrets.Get(testContext(t), "stayput-gate", metav1.GetOptions{})
		must.Do(t, err)
		secret.Data = data
		_, err = secrets.Update(testContext(t), secret, metav1.UpdateOptions{})
		must.Do(t, err)
		until(t, "another authority: the certificate is "+name, func(context.Context) bool {
			is := trustedAuthority(t, c)
			return is != "" && is != trusted
		})
		gatesSoon(t, c, ns)
	}
	must.Do(t, c.APIServer.Restart(testContext(t)))
	gatesSoon(t, c, ns)
	deletePods(t, c, ns, "web")
	before = comeHome(t, c, ns, "web", before)

	// An uninstallation leaves no pod gated.
	for _, n := range c.Nodes {
		kubectl(t, c, "cordon", n.Name)
	}
	deletePods(t, c, ns, "web")
	until(t, "all pods to be gated", func(context.Context) bool { return len(gatedPods(t, c)) == len(before) })
	end := stream(t, c, ns)
	until(t, "a stream of pods", func(context.Context) bool { return getPod(t, c, ns, "stream-20") != nil })
	said, err := c.Uninstall(testContext(t))
	t.Log(said)
	must.Do(t, err)
	end()
	until(t, "no pod to be gated", func(context.Context) bool { return len(gatedPods(t, c)) == 0 })
	if is := gatingObjects(t, c); is != "" {
		t.Errorf("left: %s", is)
	}
	_, err = c.Client().CoreV1().Secrets(lab.SystemNamespace).Get(testContext(t), "stayput-gate", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("the Secret is left: %v", err)
	}
}

// gatingObjects returns what stayput has in the cluster that gates pods.
func gatingObjects(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	served := strings.Fields(kubectl(t, c, "api-resources", "--api-group=admissionregistration.k8s.io", "-o", "name"))
	mutating := slices.DeleteFunc(served, func(name string) bool { return !strings.HasPrefix(name, "mutating") })
	return strings.Join(strings.Fields(kubectl(t, c, "get", "-o", "name", "-l", "app.kubernetes.io/part-of=stayput",
		strings.Join(mutating, ","))), " ")
}

// wouldBe returns a pod as the API server would create it.
func wouldBe(ctx context.Context, c *lab.Cluster, ns string, owners []metav1.OwnerReference,
	annotations map[string]string, gates ...string,
) (*corev1.Pod, error) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "would-be-", Annotations: annotations, OwnerReferences: owners},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: lab.WebImage}}},
	}
	if len(owners) > 0 {
		pod.Labels = map[string]string{"statefulset.kubernetes.io/pod-name": "would-be"}
	}
	for _, name := range gates {
		pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: name})
	}
	return c.Client().CoreV1().Pods(ns).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{"All"}})
}

// gatesSoon waits until annotated pods are gated.
func gatesSoon(t *testing.T, c *lab.Cluster, ns string) {
	t.Helper()
	until(t, "annotated pods to be gated", func(ctx context.Context) bool {
		pod, err := wouldBe(ctx, c, ns, nil, retain("10m"))
		return err == nil && isGated(pod)
	})
}

// gatesAlways asks again and again whether annotated pods would be gated, until the returned function is called, which
// returns how often that was.
func gatesAlways(t *testing.T, c *lab.Cluster, ns string) (end func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	n := 0
	wg.Go(func() {
		for ; ctx.Err() == nil; n++ {
			pod, err := wouldBe(ctx, c, ns, nil, retain("10m"))
			if ctx.Err() != nil {
				return
			}
			if err != nil || len(pod.Spec.SchedulingGates) != 1 || !isGated(pod) {
				t.Errorf("at %v a pod would have the gates %v: %v", time.Now(), pod.Spec.SchedulingGates, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	return func() int { cancel(); wg.Wait(); return n }
}

// trustedAuthority returns whom the API server trusts at the webhook.
func trustedAuthority(t *testing.T, c *lab.Cluster) string {
	t.Helper()
	is, err := c.Client().AdmissionregistrationV1().MutatingWebhookConfigurations().Get(testContext(t), "stayput-gate",
		metav1.GetOptions{})
	must.Do(t, err)
	for _, w := range is.Webhooks {
		if !bytes.Equal(w.ClientConfig.CABundle, is.Webhooks[0].ClientConfig.CABundle) {
			return "" // half-way
		}
	}
	return string(is.Webhooks[0].ClientConfig.CABundle)
}

// ended returns a Secret's data with certificates that ended yesterday.
func ended(t *testing.T) map[string][]byte {
	t.Helper()
	yesterday := time.Now().Add(-24 * time.Hour)
	r := rotator.CertRotator{CAName: "stayput-gate-ca", DNSName: "stayput-gate." + lab.SystemNamespace + ".svc"}
	authority, err := r.CreateCACert(yesterday.Add(-time.Hour), yesterday)
	must.Do(t, err)
	r.ExtKeyUsages = &[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	cert, key, err := r.CreateCertPEM(authority, yesterday.Add(-time.Hour), yesterday)
	must.Do(t, err)
	return map[string][]byte{"ca.crt": authority.CertPEM, "ca.key": authority.KeyPEM, "tls.crt": cert, "tls.key": key}
}
