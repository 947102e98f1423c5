//go:build long || multus

package cluster

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// serveWebhook serves a webhook to a cluster's API server, at an address of 127.0.0.1. It returns the webhook's
// clientConfig; stop ends it.
func serveWebhook(
	t *testing.T, c *lab.Cluster, address string, serve http.HandlerFunc,
) (clientConfig string, stop func()) {
	t.Helper()
	listener, err := c.Control.Listen(testContext(t), "tcp", address)
	must.Do(t, err)
	server := httptest.NewUnstartedServer(serve)
	must.Do(t, server.Listener.Close())
	server.Listener = listener
	server.StartTLS()
	t.Cleanup(server.Close)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	return fmt.Sprintf("{url: %q, caBundle: %s}", server.URL, base64.StdEncoding.EncodeToString(authority)),
		server.Close
}

// conversionReview is the ConversionReview of apiextensions.k8s.io/v1.
type conversionReview struct {
	metav1.TypeMeta `json:",inline"`
	Request         *struct {
		UID               types.UID
		DesiredAPIVersion string
		Objects           []json.RawMessage
	} `json:"request,omitempty"`
	Response struct {
		UID              types.UID         `json:"uid"`
		Result           metav1.Status     `json:"result"`
		ConvertedObjects []json.RawMessage `json:"convertedObjects"`
	} `json:"response"`
}
