package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/must"
)

const dnsName = "stayput-gate.stayput-system.svc"

// trusts reports whether someone who trusts this authority takes a Secret's certificate for the webhook's at this time.
func trusts(t *testing.T, authority []byte, data map[string][]byte, at time.Time) bool {
	t.Helper()
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	must.Do(t, err)
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		t.Fatalf("no certificates: %s", authority)
	}
	_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: dnsName, Roots: roots, CurrentTime: at})
	return err == nil
}

func TestCertificatesAreRenewedInTime(t *testing.T) {
	now := time.Now()
	made, err := renew(nil, dnsName, now)
	must.Do(t, err)
	if !trusts(t, made[caCertKey], made, now) || !trusts(t, made[caCertKey], made, now.Add(lifetime-time.Hour)) {
		t.Error("the first certificate is not valid")
	}
	for _, later := range []time.Duration{0, lifetime - renewBefore - time.Hour} {
		if again, err := renew(made, dnsName, now.Add(later)); again != nil || err != nil {
			t.Errorf("after %v it is renewed: %v", later, err)
		}
	}

	// A certificate that ends soon, or has ended, is followed by one of the same authority.
	for _, later := range []time.Duration{lifetime - renewBefore + time.Hour, lifetime + time.Hour} {
		next, err := renew(made, dnsName, now.Add(later))
		must.Do(t, err)
		if next == nil || !bytes.Equal(next[caCertKey], made[caCertKey]) ||
			!trusts(t, made[caCertKey], next, now.Add(later+lifetime/2)) {
			t.Errorf("after %v it is not renewed as it should be", later)
		}
	}

	// An authority that ends soon is followed by another one, beside which it is trusted.
	later := now.Add(authorityLifetime - renewBefore + time.Hour)
	last, err := renew(made, dnsName, later.Add(-2*time.Hour))
	must.Do(t, err)
	next, err := renew(last, dnsName, later)
	must.Do(t, err)
	if bytes.Equal(next[caKeyKey], last[caKeyKey]) || trusts(t, last[caCertKey], next, later) {
		t.Error("the authority is the same")
	}
	if !trusts(t, next[caCertKey], next, later) || !trusts(t, next[caCertKey], last, later) {
		t.Error("it takes the other replicas out of service")
	}
	if again, err := renew(next, dnsName, later); again != nil || err != nil {
		t.Errorf("it is renewed again: %v", err)
	}

	// Whatever else there is, is replaced.
	for name, spoil := range map[string]func(map[string][]byte){
		"without a key":            func(d map[string][]byte) { delete(d, corev1.TLSPrivateKeyKey) },
		"with another's key":       func(d map[string][]byte) { d[corev1.TLSPrivateKeyKey] = next[corev1.TLSPrivateKeyKey] },
		"with rubbish":             func(d map[string][]byte) { d[corev1.TLSCertKey] = []byte("rubbish") },
		"of another authority":     func(d map[string][]byte) { d[caCertKey], d[caKeyKey] = next[caCertKey], next[caKeyKey] },
		"without its authority":    func(d map[string][]byte) { delete(d, caCertKey) },
		"with a rubbish authority": func(d map[string][]byte) { d[caCertKey] = []byte("rubbish") },
	} {
		bad := map[string][]byte{}
		for k, v := range made {
			bad[k] = v
		}
		spoil(bad)
		good, err := renew(bad, dnsName, now)
		must.Do(t, err)
		if good == nil || !trusts(t, good[caCertKey], good, now) {
			t.Errorf("a certificate %s stays", name)
		}
	}
	if other, err := renew(made, "stayput-gate.elsewhere.svc", now); other == nil || err != nil {
		t.Errorf("a certificate for another name stays: %v", err)
	}
}

func TestAReplicaServesWhatTheSecretSaysAndTellsTheAPIServer(t *testing.T) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "stayput-system", Name: home.GateWebhook}}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook},
		Webhooks:   []admissionregistrationv1.MutatingWebhook{{Name: "a.stayput.io"}, {Name: "b.stayput.io"}},
	}
	c := fake.NewClientBuilder().WithObjects(secret, config).Build()
	replica := func() *certificates {
		return &certificates{reader: c, writer: c, namespace: secret.Namespace, log: logr.Discard()}
	}
	one, other := replica(), replica()
	if _, err := one.get(nil); err == nil {
		t.Error("it serves without a certificate")
	}
	must.Do(t, one.look(t.Context()))
	must.Do(t, other.look(t.Context()))
	is, err := one.get(nil)
	must.Do(t, err)
	if others, err := other.get(nil); err != nil || !bytes.Equal(is.Leaf.Raw, others.Leaf.Raw) {
		t.Errorf("replicas serve different certificates: %v", err)
	}
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Namespace: secret.Namespace, Name: secret.Name}, secret))
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Name: config.Name}, config))
	for _, w := range config.Webhooks {
		if !bytes.Equal(w.ClientConfig.CABundle, secret.Data[caCertKey]) {
			t.Errorf("%s trusts %s", w.Name, base64.StdEncoding.EncodeToString(w.ClientConfig.CABundle))
		}
	}

	// If the Secret loses all, the replica that has not seen the next one yet is trusted still.
	served := secret.DeepCopy().Data
	secret.Data = nil
	must.Do(t, c.Update(t.Context(), secret))
	must.Do(t, one.look(t.Context()))
	must.Do(t, one.look(t.Context()))
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Namespace: secret.Namespace, Name: secret.Name}, secret))
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Name: config.Name}, config))
	for _, w := range config.Webhooks {
		for name, data := range map[string]map[string][]byte{"the next one": secret.Data, "the one before": served} {
			if !trusts(t, w.ClientConfig.CABundle, data, time.Now()) {
				t.Errorf("%s does not trust %s", w.Name, name)
			}
		}
	}

	// Nor does one lose trust that is not the first: cert-manager adds an authority to those before.
	config.Webhooks[1].ClientConfig.CABundle = slices.Concat(served[caCertKey], secret.Data[caCertKey])
	must.Do(t, c.Update(t.Context(), config))
	served = secret.DeepCopy().Data
	secret.Data = nil
	must.Do(t, c.Update(t.Context(), secret))
	must.Do(t, one.look(t.Context()))
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Namespace: secret.Namespace, Name: secret.Name}, secret))
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Name: config.Name}, config))
	for name, data := range map[string]map[string][]byte{"the next one": secret.Data, "the one before": served} {
		if !trusts(t, config.Webhooks[1].ClientConfig.CABundle, data, time.Now()) {
			t.Errorf("of several, %s is not trusted", name)
		}
	}

	one.changed = time.Now().Add(-othersLook)
	must.Do(t, one.look(t.Context()))
	is, err = one.get(nil)
	must.Do(t, err)
	must.Do(t, c.Get(t.Context(), types.NamespacedName{Name: config.Name}, config))
	for _, w := range config.Webhooks {
		if !bytes.Equal(w.ClientConfig.CABundle, secret.Data[caCertKey]) {
			t.Errorf("%s trusts the one before for ever", w.Name)
		}
	}

	// One from elsewhere is served as it is, and that one is told whom to trust.
	given := replica()
	given.given = true
	secret.Data = nil // as the chart makes it
	must.Do(t, c.Update(t.Context(), secret))
	if err := given.look(t.Context()); !errors.Is(err, errNone) || given.serving.Load() != nil {
		t.Errorf("it does not wait for the certificate: %v", err)
	}
	secret.Data, err = renew(nil, dnsName, time.Now().Add(-lifetime))
	must.Do(t, err)
	must.Do(t, c.Update(t.Context(), secret))
	must.Do(t, given.look(t.Context()))
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	must.Do(t, err)
	if is, err := given.get(nil); err != nil || !bytes.Equal(is.Leaf.Raw, pair.Leaf.Raw) {
		t.Errorf("it serves another one: %v", err)
	}

	// Without a Secret it goes on with what it has.
	must.Do(t, c.Delete(t.Context(), secret))
	must.Do(t, one.look(t.Context()))
	if still, err := one.get(nil); err != nil || still != is {
		t.Errorf("it serves another one: %v", err)
	}
}

func TestTheMetricSaysWhetherAReplicaServes(t *testing.T) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "stayput-system", Name: home.GateWebhook}}
	config := &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook},
		Webhooks:   []admissionregistrationv1.MutatingWebhook{{Name: "a.stayput.io"}},
	}
	var fails error
	c := interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption,
		) error {
			return errors.Join(fails, c.Patch(ctx, o, p, opts...))
		},
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption,
		) error {
			if errors.Is(fails, errUnread) {
				return fails
			}
			return c.Get(ctx, key, o, opts...)
		},
	})
	one := &certificates{reader: c, writer: c, namespace: secret.Namespace, log: logr.Discard()}
	says := func(why, want string) {
		t.Helper()
		one.judge(one.look(t.Context()), time.Now())
		if want != "" {
			want = "# HELP stayput_controller_gate_webhook_ready Whether this replica serves the webhook that gates pods with " +
				"a certificate that the API server trusts. Absent if policies or pod templates gate pods.\n" +
				"# TYPE stayput_controller_gate_webhook_ready gauge\nstayput_controller_gate_webhook_ready " + want + "\n"
		}
		if err := testutil.CollectAndCompare(one, strings.NewReader(want)); err != nil {
			t.Errorf("%s: %v", why, err)
		}
	}
	says("no Secret, as where pod templates have the gate", "")
	must.Do(t, c.Create(t.Context(), secret))
	says("no configuration yet", "")
	must.Do(t, c.Create(t.Context(), config))
	fails = errors.New("no right to change the configuration")
	says("nobody trusts it", "0")
	fails = nil
	says("all is there", "1")
	fails = errUnread
	says("the API server does not answer", "1")
	fails = nil
	must.Do(t, c.Delete(t.Context(), config))
	says("its successor is there", "")

	// With a certificate from elsewhere it is for the one who gives it to renew it.
	one.given = true
	says("given", "1")
	one.judge(nil, time.Now().Add(2*lifetime))
	if works := one.works.Load(); works == nil || *works {
		t.Error("a certificate that has ended is of use")
	}
	must.Do(t, c.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	secret.Data = nil
	must.Do(t, c.Update(t.Context(), secret))
	says("it is gone", "0")
}
