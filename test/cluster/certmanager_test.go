//go:build certmanager

package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// certificateFrom are the chart's values for a webhook whose certificate cert-manager makes, or the controllers do.
func certificateFrom(certManager bool, issuerRef map[string]any) map[string]any {
	return map[string]any{"gate": map[string]any{"mechanism": "Webhook", "webhook": map[string]any{
		"certManager": map[string]any{"enabled": certManager, "issuerRef": issuerRef},
	}}}
}

func TestPodsAreGatedByAWebhookWithACertificateOfCertManager(t *testing.T) {
	alone(t)
	c := withCertManager(t)
	ns := namespace(t, c)

	// The controllers are Ready before there is a certificate. Pods are gated once there is.
	kubectl(t, c, "scale", "deployment/cert-manager", "--replicas=0", "-n", lab.CertManagerNamespace)
	kubectl(t, c, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=controller", "-n",
		lab.CertManagerNamespace)
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: certificateFrom(true, map[string]any{})}))
	if pod, err := wouldBe(testContext(t), c, ns, nil, retain("10m")); err != nil || isGated(pod) {
		t.Errorf("without a certificate a pod is gated: %v", err)
	}
	kubectl(t, c, "scale", "deployment/cert-manager", "--replicas=1", "-n", lab.CertManagerNamespace)
	gatesSoon(t, c, ns)
	replicas := servedByAll(t, c)

	// The controllers may read the certificate, and change nothing.
	for verb, want := range map[string]bool{
		"get": true, "update": false, "patch": false, "delete": false, "create": false, "list": false, "watch": false,
	} {
		if is := controllersMay(t, c, verb, "", "secrets", "stayput-gate"); is != want {
			t.Errorf("the controllers may %s the Secret: %t", verb, is)
		}
		if controllersMay(t, c, verb, "admissionregistration.k8s.io", "mutatingwebhookconfigurations", "stayput-gate") {
			t.Errorf("the controllers may %s the webhook's configuration", verb)
		}
	}

	before := tilted(t, c, ns, lab.Workload{Name: "web", Replicas: 6, Annotations: retain("10m")})
	deletePods(t, c, ns, "web")
	before = comeHome(t, c, ns, "web", before)

	// A renewed certificate is served by the same processes, and no pod is missed meanwhile; nor when the Secret is lost.
	for name, replace := range map[string]func(){
		"renewed": func() { renew(t, c) },
		"lost":    func() { kubectl(t, c, "delete", "secret", "stayput-gate", "-n", lab.SystemNamespace) },
	} {
		was := servedBy(t, c)
		watch := gatesAlways(t, c, ns)
		replace()
		until(t, "another certificate: "+name, func(context.Context) bool {
			is := servedBy(t, c)
			return !bytes.Equal(is, was) && is != nil
		})
		t.Logf("%d pods would have been gated while the certificate is %s", watch(), name)
		if is := servedByAll(t, c); fmt.Sprint(is) != fmt.Sprint(replicas) {
			t.Errorf("%s: the controllers were %v and are %v", name, replicas, is)
		}
	}
	deletePods(t, c, ns, "web")
	before = comeHome(t, c, ns, "web", before)

	// An uninstallation leaves no pod gated, and no certificate.
	for _, n := range c.Nodes {
		kubectl(t, c, "cordon", n.Name)
	}
	deletePods(t, c, ns, "web")
	until(t, "all pods to be gated", func(context.Context) bool { return len(gatedPods(t, c)) == len(before) })
	said, err := c.Uninstall(testContext(t))
	t.Log(said)
	must.Do(t, err)
	if gated := gatedPods(t, c); len(gated) > 0 {
		t.Errorf("gated still: %q", gated)
	}
	if is := gatingObjects(t, c); is != "" {
		t.Errorf("left: %s", is)
	}
	nothingIssued(t, c)

	// It can come back with a certificate of its own.
	for _, n := range c.Nodes {
		kubectl(t, c, "uncordon", n.Name)
	}
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: certificateFrom(false, map[string]any{})}))
	gatesSoon(t, c, ns)
}

func TestTheWebhooksCertificateMovesToCertManagerAndBack(t *testing.T) {
	alone(t)
	c := withCertManager(t)
	ns := namespace(t, c)
	apply(t, c, lab.CertManagerNamespace, `
apiVersion: cert-manager.io/v1
kind: ClusterIssuer
metadata: {name: self-signed}
spec: {selfSigned: {}}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {name: internal}
spec:
  isCA: true
  commonName: internal
  secretName: internal
  issuerRef: {kind: ClusterIssuer, name: self-signed}
---
apiVersion: cert-manager.io/v1
kind: ClusterIssuer
metadata: {name: internal}
spec: {ca: {secretName: internal}}
`)
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: certificateFrom(false, map[string]any{})}))
	gatesSoon(t, c, ns)
	web := tilted(t, c, ns, lab.Workload{
		Name: "web", Replicas: 4, Annotations: retain("30m", "stayput.io/home-wait", "30m"),
	})

	own := func() string { return authorityIn(t, c, lab.SystemNamespace, "stayput-gate") }
	internal := func() string { return authorityIn(t, c, lab.CertManagerNamespace, "internal") }
	// cert-manager adds an authority to those that are trusted.
	trusts := func(name string, ok func(own string) bool) {
		t.Helper()
		until(t, "the API server to trust "+name, func(context.Context) bool {
			is := own()
			return is != "" && ok(is) && strings.Contains(trustedAuthority(t, c), is) && servedBy(t, c) != nil
		})
	}
	byInternal := func(is string) bool { return is == internal() }
	moves := func(to map[string]any, certs string) {
		t.Helper()
		// Pods that wait at the gate meanwhile come home afterwards.
		for _, n := range c.Nodes {
			kubectl(t, c, "cordon", n.Name)
		}
		deletePods(t, c, ns, "web")
		until(t, "all pods to be gated", func(context.Context) bool { return len(gatedPods(t, c)) == len(web) })
		must.Do(t, c.Upgrade(testContext(t), to))
		is := strings.ReplaceAll(kubectl(t, c, "get", "certificates,issuers", "-n", lab.SystemNamespace, "-o", "name"),
			".cert-manager.io", "")
		if is = strings.Join(strings.Fields(is), " "); is != certs {
			t.Errorf("there are %q and not %q", is, certs)
		}
		for _, n := range c.Nodes {
			kubectl(t, c, "uncordon", n.Name)
		}
		web = comeHome(t, c, ns, "web", web)
	}

	// All the time each pod is gated. cert-manager may take over the certificate that is there: it replaces that when it
	// renews it.
	watch := gatesAlways(t, c, ns)
	before := own()
	moves(certificateFrom(true, map[string]any{}), "certificate/stayput-gate issuer/stayput-gate")
	kubectl(t, c, "wait", "--for=condition=Ready", "certificate", "--all", "-n", lab.SystemNamespace)
	servedByAll(t, c)
	renew(t, c)
	trusts("cert-manager", func(is string) bool { return is != before })

	moves(certificateFrom(true, map[string]any{"kind": "ClusterIssuer", "name": "internal"}), "certificate/stayput-gate")
	trusts("the ClusterIssuer", byInternal)
	// The upgrade back meets a Secret that cert-manager has made.
	kubectl(t, c, "delete", "secret", "stayput-gate", "-n", lab.SystemNamespace)
	trusts("the ClusterIssuer still", byInternal)

	moves(certificateFrom(false, map[string]any{}), "")
	trusts("the controllers", func(is string) bool { return !byInternal(is) })
	t.Logf("%d pods would have been gated meanwhile", watch())
	deletePods(t, c, ns, "web")
	comeHome(t, c, ns, "web", web)
	if !controllersMay(t, c, "update", "", "secrets", "stayput-gate") {
		t.Error("the controllers cannot renew their certificate")
	}
	_, err := c.Uninstall(testContext(t))
	must.Do(t, err)
	nothingIssued(t, c)
}

// withCertManager starts a cluster with cert-manager.
func withCertManager(t *testing.T) *lab.Cluster {
	t.Helper()
	c := ownCluster(t, &lab.ClusterOptions{APIServerArgs: lab.WebhooksByEndpoint})
	_, err := lab.BuildCertManager(t.Context()) // without a timeout: it compiles
	must.Do(t, err)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, what := range [][]string{
			{"logs", "deployment/cert-manager", "-n", lab.CertManagerNamespace, "--tail=60"},
			{"logs", "deployment/cert-manager-cainjector", "-n", lab.CertManagerNamespace, "--tail=60"},
			{"get", "certificates,issuers,certificaterequests,secrets", "-A", "-o", "yaml"},
			{"get", "mutatingwebhookconfiguration", "stayput-gate", "-o", "yaml", "--show-managed-fields"},
		} {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			out, err := c.Kubectl(ctx, "", what...)
			t.Log(out, err)
		}
	})
	must.Do(t, c.InstallCertManager(testContext(t)))
	return c
}

// renew has cert-manager renew the webhook's certificate, as cmctl renew does.
func renew(t *testing.T, c *lab.Cluster) {
	t.Helper()
	kubectl(t, c, "patch", "certificate", "stayput-gate", "-n", lab.SystemNamespace, "--subresource=status", "--type=json",
		`--patch=[{"op": "add", "path": "/status/conditions/-", "value": {"type": "Issuing", "status": "True",
		"reason": "ManuallyTriggered", "message": "a test renews it"}}]`)
}

// controllersMay reports whether the controllers may do this to an object in their namespace.
func controllersMay(t *testing.T, c *lab.Cluster, verb, group, resource, name string) bool {
	t.Helper()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: "system:serviceaccount:" + lab.SystemNamespace + ":" + lab.ControllerAccount,
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + lab.SystemNamespace,
			"system:authenticated"},
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: lab.SystemNamespace, Verb: verb, Group: group, Resource: resource, Name: name,
		},
	}}
	is, err := c.Client().AuthorizationV1().SubjectAccessReviews().Create(testContext(t), review, metav1.CreateOptions{})
	must.Do(t, err)
	return is.Status.Allowed
}

// authorityIn returns the authority in a Secret.
func authorityIn(t *testing.T, c *lab.Cluster, ns, name string) string {
	t.Helper()
	secret, err := c.Client().CoreV1().Secrets(ns).Get(testContext(t), name, metav1.GetOptions{})
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return string(secret.Data["ca.crt"])
}

// servedBy returns the certificate that all controllers serve, which is the one in the Secret; nil if they do not yet.
func servedBy(t *testing.T, c *lab.Cluster) (is []byte) {
	t.Helper()
	secret, err := c.Client().CoreV1().Secrets(lab.SystemNamespace).Get(testContext(t), "stayput-gate",
		metav1.GetOptions{})
	if err != nil {
		return nil
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil
	}
	pods, err := c.Controllers.Pods(testContext(t))
	must.Do(t, err)
	for i := range pods {
		raw, err := c.Control.Dial(testContext(t), "tcp", pods[i].Status.PodIP+":9443")
		if err != nil {
			return nil
		}
		conn := tls.Client(raw, &tls.Config{InsecureSkipVerify: true}) // compared below
		err = conn.HandshakeContext(testContext(t))
		if err == nil && bytes.Equal(conn.ConnectionState().PeerCertificates[0].Raw, pair.Leaf.Raw) {
			is = pair.Leaf.Raw
		} else {
			is = nil
		}
		conn.Close()
		if is == nil {
			return nil
		}
	}
	return is
}

// servedByAll waits until all controllers serve the Secret's certificate, and returns who they are and how often they
// were restarted.
func servedByAll(t *testing.T, c *lab.Cluster) map[string]int32 {
	t.Helper()
	until(t, "all controllers to serve the certificate", func(context.Context) bool { return servedBy(t, c) != nil })
	pods, err := c.Controllers.Pods(testContext(t))
	must.Do(t, err)
	replicas := map[string]int32{}
	for i := range pods {
		replicas[pods[i].Name] = pods[i].Status.ContainerStatuses[0].RestartCount
	}
	return replicas
}

// nothingIssued waits until there is nothing left that cert-manager has, or is to make.
func nothingIssued(t *testing.T, c *lab.Cluster) {
	t.Helper()
	is := ""
	defer func() {
		if t.Failed() {
			t.Logf("left: %s", is)
		}
	}()
	until(t, "no certificate to be left", func(context.Context) bool {
		is = kubectl(t, c, "get", "certificates,certificaterequests,issuers,secrets", "-n", lab.SystemNamespace, "-o", "name")
		return is == ""
	})
}
