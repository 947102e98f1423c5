package webhook

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/must"
)

const somePolicies = `
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: stayput-gate-annotated}
spec: {policyName: stayput-gate-annotated}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: stayput-gate-annotated}
spec: {reinvocationPolicy: Never}
`

// aSuccessor is one in a cluster with the webhook and, as Helm makes it, the plan for its successor. The API server is
// client-go's fake: what a real one says of rights and versions is tested on clusters.
type aSuccessor struct {
	successor
	all      client.Client
	clock    time.Time
	policies bool  // all API servers have policies
	unknown  error // or it cannot be found out
	ending   bool
}

func newSuccessor(t *testing.T, plan map[string]string) *aSuccessor {
	t.Helper()
	s := &aSuccessor{clock: time.Now()}
	s.all = fake.NewClientBuilder().WithScheme(scheme.Scheme).WithReturnManagedFields().WithObjects(
		&admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: "stayput-system", Name: home.GatePolicies, Annotations: map[string]string{
				helmRelease: "stayput", helmReleaseNamespace: "stayput-system", "else": "where",
			},
		}, Data: plan},
	).Build()
	s.successor = successor{
		client: s.all, reader: s.all, namespace: "stayput-system", log: logr.Discard(),
		havePolicies: func(context.Context) (bool, error) { return s.policies, s.unknown },
		uninstalling: func() bool { return s.ending },
		now:          func() time.Time { return s.clock },
	}
	return s
}

// after looks once, so much later, and returns whether there are the policies, and the webhook.
func (s *aSuccessor) after(t *testing.T, d time.Duration) (policies, hook bool) {
	t.Helper()
	s.clock = s.clock.Add(d)
	_, err := s.look(t.Context())
	if !errors.Is(err, s.unknown) {
		t.Fatal(err)
	}
	there := func(o client.Object, name string) bool {
		err := s.all.Get(t.Context(), client.ObjectKey{Name: name}, o)
		must.Do(t, client.IgnoreNotFound(err))
		return !apierrors.IsNotFound(err)
	}
	policies = there(&admissionregistrationv1.MutatingAdmissionPolicy{}, home.PolicyGateAnnotated)
	if bound := there(&admissionregistrationv1.MutatingAdmissionPolicyBinding{}, home.PolicyGateAnnotated); bound !=
		policies {
		t.Errorf("policy: %v, binding: %v", policies, bound)
	}
	return policies, there(&admissionregistrationv1.MutatingWebhookConfiguration{}, home.GateWebhook)
}

func TestTheWebhookGoesOnceAllAPIServersHavePolicies(t *testing.T) {
	s := newSuccessor(t, map[string]string{policiesKey: somePolicies, removeAfterKey: "1h"})
	wants := func(why string, d time.Duration, policies, hook bool) {
		t.Helper()
		if p, h := s.after(t, d); p != policies || h != hook {
			t.Errorf("%s: there are policies: %v, want %v; the webhook: %v, want %v", why, p, policies, h, hook)
		}
	}
	wants("the old cluster", 0, false, true)
	wants("still the old cluster", 10*time.Hour, false, true)
	s.unknown = errors.New("an API server that does not answer")
	wants("nobody knows", time.Hour, false, true)
	s.policies, s.unknown = true, nil
	wants("an upgraded cluster", time.Hour, true, true)
	wants("not long ago", 59*time.Minute, true, true)
	s.policies = false
	wants("an API server was away and is an old one", time.Minute, true, true)
	s.policies = true
	wants("that one was upgraded", time.Minute, true, true)
	s.unknown = errors.New("an API server that does not answer")
	wants("nobody knows", 59*time.Minute, true, true)
	s.unknown = nil
	wants("known again", time.Minute, true, true)
	wants("for an hour", time.Hour, true, false)
	wants("and ever after", time.Hour, true, false)

	var policy admissionregistrationv1.MutatingAdmissionPolicy
	must.Do(t, s.all.Get(t.Context(), client.ObjectKey{Name: home.PolicyGateAnnotated}, &policy))
	if a := policy.Annotations; a[helmRelease] != "stayput" || a[helmReleaseNamespace] != "stayput-system" || len(a) != 2 {
		t.Errorf("Helm would not take the policy over: annotations %v", a)
	}
	if len(policy.ManagedFields) != 1 || policy.ManagedFields[0].Manager != helmFieldManager {
		t.Errorf("Helm could not change the policy: %v", policy.ManagedFields)
	}
}

func TestNothingSucceedsAWebhookThatIsRemoved(t *testing.T) {
	s := newSuccessor(t, map[string]string{policiesKey: somePolicies, removeAfterKey: "1h"})
	s.policies, s.ending = true, true
	if policies, hook := s.after(t, 0); policies || !hook {
		t.Errorf("during an uninstallation: policies: %v, webhook: %v", policies, hook)
	}
	s.ending = false
	must.Do(t, s.all.Delete(t.Context(),
		&admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook}}))
	if policies, _ := s.after(t, 0); policies {
		t.Error("without a webhook policies were installed")
	}
}

func TestAPlanThatCannotBeReadNamesItsKey(t *testing.T) {
	for want, plan := range map[string]map[string]string{
		`data[removeAfter]: "" is not valid: expected a duration`:     {policiesKey: somePolicies},
		`data[removeAfter]: "soon" is not valid: expected a duration`: {policiesKey: somePolicies, removeAfterKey: "soon"},
		`data[removeAfter]: "-1h" is not valid: expected a duration`:  {policiesKey: somePolicies, removeAfterKey: "-1h"},
		`data[policies.yaml]: no policies`:                            {policiesKey: "---\n", removeAfterKey: "1h"},
		`data[policies.yaml]: `:                                       {policiesKey: "\t", removeAfterKey: "1h"},
	} {
		s := newSuccessor(t, plan)
		s.policies = true
		if _, err := s.look(t.Context()); err == nil ||
			!strings.Contains(err.Error(), "ConfigMap stayput-system/stayput-gate-policies: "+want) {
			t.Errorf("%v: %v, want %s", plan, err, want)
		}
	}
}

// apiServer is one API server of a cluster, by its certificate the same as the others.
func apiServer(t *testing.T, resources ...string) *httptest.Server {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/apis/admissionregistration.k8s.io/v1" || r.Header.Get("Authorization") != "Bearer its-token" {
			http.Error(w, r.URL.Path, http.StatusForbidden)
			return
		}
		list := metav1.APIResourceList{}
		for _, name := range resources {
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: name})
		}
		_ = json.NewEncoder(w).Encode(list)
	}))
	t.Cleanup(s.Close)
	return s
}

func TestEachAPIServerIsAsked(t *testing.T) {
	old := apiServer(t, "mutatingwebhookconfigurations")
	upgraded := []*httptest.Server{
		apiServer(t, "mutatingadmissionpolicies", "mutatingwebhookconfigurations"),
		apiServer(t, "mutatingadmissionpolicies"),
	}
	away := apiServer(t, "mutatingadmissionpolicies")
	away.Close()
	refuses := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(refuses.Close)
	stranger := httptest.NewUnstartedServer(http.NotFoundHandler())
	stranger.TLS = &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return nil, errors.New("none")
	}}
	stranger.StartTLS()
	t.Cleanup(stranger.Close)
	for _, c := range []struct {
		why     string
		servers []*httptest.Server
		want    bool
		wantErr string
	}{
		{"all are upgraded", upgraded, true, ""},
		{"none is", []*httptest.Server{old}, false, ""},
		{"one is not", append(slices.Clone(upgraded), old), false, ""},
		{"one is away", append(slices.Clone(upgraded), away), false, "connection refused"},
		{"one does not know the group", append(slices.Clone(upgraded), refuses), false, "404"},
		{"one is none", append(slices.Clone(upgraded), stranger), false, "tls"},
		{"there is none", nil, false, "has no API server"},
	} {
		of := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}}
		for _, s := range c.servers {
			addr := netip.MustParseAddrPort(s.Listener.Addr().String())
			port := int32(addr.Port())
			of.Ports = append(of.Ports, discoveryv1.EndpointPort{Port: &port})
		}
		if len(c.servers) > 0 {
			of.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"127.0.0.1"}}}
		}
		// None listens there: only the certificate must be right for it.
		config := &rest.Config{Host: "https://example.com:1", BearerToken: "its-token", TLSClientConfig: rest.TLSClientConfig{
			CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: old.Certificate().Raw}),
		}}
		all := apiServers{fake.NewClientBuilder().WithScheme(scheme.Scheme).WithObjects(of).Build(), config}
		is, err := all.havePolicies(t.Context())
		if is != c.want || (err == nil) != (c.wantErr == "") || err != nil && !strings.Contains(err.Error(), c.wantErr) {
			t.Errorf("%s: %v, %v", c.why, is, err)
		}
	}
	none := apiServers{fake.NewClientBuilder().WithScheme(scheme.Scheme).Build(), &rest.Config{}}
	_, err := none.havePolicies(t.Context())
	if !apierrors.IsNotFound(err) {
		t.Errorf("without an EndpointSlice: %v", err)
	}
}
