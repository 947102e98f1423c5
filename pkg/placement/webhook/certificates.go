package webhook

import (
	"bytes"
	"context"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	"github.com/prometheus/client_golang/prometheus"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// The keys of the Secret beside those of its TLS pair, as rotator and cert-manager name them.
const (
	caCertKey = "ca.crt"
	caKeyKey  = "ca.key"
)

const (
	authorityName     = "stayput-gate-ca"
	authorityLifetime = 10 * 365 * 24 * time.Hour
	lifetime          = 365 * 24 * time.Hour
	// renewBefore is how long before its end a certificate is renewed.
	renewBefore = 90 * 24 * time.Hour
	// lookEvery is how often a replica looks at the Secret, and at what the API server trusts.
	lookEvery = 30 * time.Second
	// lookAgain is the same after a failure, and at first while the webhook has no configuration to hold the trust: Helm
	// makes it after the Secret and the controllers.
	lookAgain = 2 * time.Second
	// othersLook is how long after this replica the last one has seen the Secret.
	othersLook = 2 * lookEvery
)

// certificates keeps the certificate that the webhook serves, and the API server's trust in it.
//
// rotator, from cert-controller, makes and judges the certificates. Its own loop is not used: that reads every Secret
// of the namespace and every webhook of the cluster, and waits for a mounted file. This one needs the rights to one of
// each, and has a new certificate at once.
type certificates struct {
	reader    client.Reader // from the API server
	writer    client.Writer
	namespace string
	given     bool
	log       logr.Logger

	serving atomic.Pointer[tls.Certificate]
	changed time.Time // when serving did
	// works says whether the API server can be answered, nil if it does not ask.
	works atomic.Pointer[bool]
}

var (
	errNone         = errors.New("no certificate yet")
	errUnconfigured = errors.New("webhook configuration not found")
	errUnread       = errors.New("cannot read from the API server")
)

var worksDesc = prometheus.NewDesc("stayput_controller_gate_webhook_ready",
	"Whether this replica serves the webhook that gates pods with a certificate that the API server trusts. Absent if "+
		"policies or pod templates gate pods.", nil, nil)

// get returns the certificate to serve; it is a tls.Config's GetCertificate.
func (c *certificates) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if is := c.serving.Load(); is != nil {
		return is, nil
	}
	return nil, errNone
}

// Describe implements [prometheus.Collector].
func (*certificates) Describe(to chan<- *prometheus.Desc) { to <- worksDesc }

// Collect implements [prometheus.Collector].
func (c *certificates) Collect(to chan<- prometheus.Metric) {
	works := c.works.Load()
	if works == nil {
		return
	}
	value := 0.0
	if *works {
		value = 1
	}
	to <- prometheus.MustNewConstMetric(worksDesc, prometheus.GaugeValue, value)
}

// judge notes what a look says of the webhook.
func (c *certificates) judge(err error, now time.Time) {
	serving := c.serving.Load()
	switch {
	case errors.Is(err, errUnread):
	case errors.Is(err, errUnconfigured), err == nil && serving == nil:
		c.works.Store(nil)
	default:
		works := err == nil && now.Before(serving.Leaf.NotAfter)
		c.works.Store(&works)
	}
}

// NeedLeaderElection returns false: every replica serves.
func (*certificates) NeedLeaderElection() bool { return false }

// Start looks after the certificate until ctx is done. What fails is logged and tried again: without the webhook pods
// start ungated, without the controller they would wait.
func (c *certificates) Start(ctx context.Context) error {
	logged := ""
	again := lookAgain
	for {
		pause := lookEvery
		err := c.look(ctx)
		c.judge(err, time.Now())
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			logged, again = "", lookAgain
		default:
			pause = again
			if errors.Is(err, errUnconfigured) { // policies may have its place
				again = min(2*again, lookEvery)
			}
			// A conflict: another replica was quicker.
			if err.Error() != logged && !apierrors.IsConflict(err) && !errors.Is(err, errUnconfigured) {
				logged = err.Error()
				c.log.Error(err, "Cannot configure the webhook that gates pods, retrying")
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// look takes over what the Secret says, after it has renewed what is about to end. Without the Secret, or the right to
// read it, there is no webhook.
func (c *certificates) look(ctx context.Context) error {
	var secret corev1.Secret
	err := c.reader.Get(ctx, types.NamespacedName{Namespace: c.namespace, Name: home.GateWebhook}, &secret)
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the webhook's certificate: %w: %w", errUnread, err)
	}
	if c.given && len(secret.Data[corev1.TLSCertKey]) == 0 {
		return errNone
	}
	if !c.given {
		renewed, err := renew(secret.Data, serverName(c.namespace), time.Now())
		if err != nil {
			return fmt.Errorf("creating the webhook's certificate: %w", err)
		}
		if renewed != nil {
			secret.Data = renewed
			if err := c.writer.Update(ctx, &secret); err != nil {
				return fmt.Errorf("writing the webhook's certificate: %w", err)
			}
			c.log.Info("Renewed the webhook's certificate")
		}
	}
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return fmt.Errorf("secret %s/%s: %s and %s: %w", c.namespace, home.GateWebhook, corev1.TLSCertKey,
			corev1.TLSPrivateKeyKey, err)
	}
	is := c.serving.Swap(&pair)
	if is == nil {
		c.log.Info("Serving the webhook that gates pods")
	}
	if is == nil || !bytes.Equal(is.Certificate[0], pair.Certificate[0]) {
		c.changed = time.Now()
	}
	if c.given {
		return nil
	}
	return c.trust(ctx, secret.Data[caCertKey])
}

// trust makes the API server trust the certificates of this authority at the webhook, and for a while those of the
// authorities that it trusted before: other replicas serve such a certificate until they look at the Secret, which may
// have lost that authority.
func (c *certificates) trust(ctx context.Context, authority []byte) error {
	var config admissionregistrationv1.MutatingWebhookConfiguration
	err := c.reader.Get(ctx, types.NamespacedName{Name: home.GateWebhook}, &config)
	if apierrors.IsNotFound(err) { // not yet, or no longer there
		return errUnconfigured
	}
	if err != nil {
		return fmt.Errorf("reading the configuration of the webhook: %w: %w", errUnread, err)
	}
	var ops []map[string]any
	for i := range config.Webhooks {
		w, trusted := &config.Webhooks[i], authority
		switch was := w.ClientConfig.CABundle; {
		case time.Since(c.changed) >= othersLook:
		case bytes.HasPrefix(was, authority):
			trusted = was
		default:
			trusted = slices.Concat(authority, besides(was, authority))
		}
		if bytes.Equal(w.ClientConfig.CABundle, trusted) {
			continue
		}
		at := fmt.Sprintf("/webhooks/%d", i)
		ops = append(ops, map[string]any{"op": "test", "path": at + "/name", "value": w.Name},
			map[string]any{"op": "add", "path": at + "/clientConfig/caBundle", "value": trusted})
	}
	if len(ops) == 0 {
		return nil
	}
	patch, err := json.Marshal(ops)
	if err != nil {
		return err
	}
	of := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook}}
	err = c.writer.Patch(ctx, of, client.RawPatch(types.JSONPatchType, patch),
		client.FieldOwner(v1alpha1.ControllerFieldManager))
	if err != nil {
		return fmt.Errorf("setting the caBundle of the webhook: %w", err)
	}
	return nil
}

// serverName is the name by which the API server knows the webhook.
func serverName(namespace string) string { return home.GateWebhook + "." + namespace + ".svc" }

// renew returns the Secret's data with new certificates for those that are missing, do not fit or end soon; nil if
// there are none of these. An authority that is followed by another one stays trusted: replicas serve what it has
// signed until they have seen the new certificate.
func renew(data map[string][]byte, name string, now time.Time) (map[string][]byte, error) {
	maker := rotator.CertRotator{CAName: authorityName, CAOrganization: "stayput", DNSName: name, ExtKeyUsages: serverAuth}
	valid := func(cert, key []byte, name string, usages *[]x509.ExtKeyUsage) bool {
		ok, err := rotator.ValidCert(data[caCertKey], cert, key, name, usages, now.Add(renewBefore))
		return ok && err == nil
	}
	begin := now.Add(-time.Hour) // others' clocks
	trusted := data[caCertKey]
	authority, err := authorityOf(data)
	switch {
	case err != nil || !valid(first(trusted), data[caKeyKey], authorityName, nil):
		if authority, err = maker.CreateCACert(begin, now.Add(authorityLifetime)); err != nil {
			return nil, err
		}
		trusted = slices.Concat(authority.CertPEM, first(trusted))
	case valid(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], name, serverAuth):
		return nil, nil
	}
	cert, key, err := maker.CreateCertPEM(authority, begin, now.Add(lifetime))
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		caCertKey: trusted, caKeyKey: authority.KeyPEM, corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key,
	}, nil
}

var serverAuth = &[]x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}

// authorityOf returns the authority in the Secret's data.
func authorityOf(data map[string][]byte) (*rotator.KeyPairArtifacts, error) {
	pair, err := tls.X509KeyPair(first(data[caCertKey]), data[caKeyKey])
	if err != nil {
		return nil, err
	}
	key, ok := pair.PrivateKey.(*rsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s: expected an RSA key", caKeyKey)
	}
	return &rotator.KeyPairArtifacts{Cert: pair.Leaf, Key: key, CertPEM: data[caCertKey], KeyPEM: data[caKeyKey]}, nil
}

// first returns the first certificate of a PEM file; nil if there is none.
func first(file []byte) []byte {
	cert, _ := next(file)
	return cert
}

// besides returns the certificates of a PEM file that another one does not have.
func besides(file, other []byte) (certs []byte) {
	for cert, rest := next(file); len(rest) > 0 || cert != nil; cert, rest = next(rest) {
		if !bytes.Contains(other, cert) {
			certs = append(certs, cert...)
		}
	}
	return certs
}

// next returns the first certificate of a PEM file, nil if that is none, and what follows it.
func next(file []byte) (cert, rest []byte) {
	block, rest := pem.Decode(file)
	if block == nil {
		return nil, nil
	}
	if _, err := x509.ParseCertificate(block.Bytes); err != nil { // the API server would refuse it
		return nil, rest
	}
	return pem.EncodeToMemory(block), rest
}
