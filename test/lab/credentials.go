package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"time"
)

// Paths on the control plane's machine.
const (
	serverCertFile  = "/etc/kubernetes/server.crt" // its own authority
	serverKeyFile   = "/etc/kubernetes/server.key"
	accountsKeyFile = "/etc/kubernetes/accounts.key"
	tokensFile      = "/etc/kubernetes/tokens.csv"
)

// Admin is unrestricted.
const Admin = "admin"

// credentials are the API server's own and those it accepts.
type credentials struct {
	cert, key   []byte            // of the API server, PEM
	accountsKey []byte            // signs the tokens of service accounts, PEM
	tokens      map[string]string // user -> static token
	groups      map[string]string
}

func newCredentials(nodes []string) (*credentials, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "lab"},
		DNSNames:     []string{"kubernetes", "kubernetes.default.svc", "localhost"},
		IPAddresses:  []net.IP{serverIP.AsSlice(), serviceIP.AsSlice(), net.IPv4(127, 0, 0, 1)},
		// Tests change a node's clock, never this machine's.
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(1, 0, 0),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	c := &credentials{
		cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}),
		groups: map[string]string{
			Admin: "system:masters", "system:kube-controller-manager": "", "system:kube-scheduler": "",
			proxyUser: "", flannelUser: "system:masters", // its manifest's role needs a ServiceAccount
			canalUser: "", calicoAccount + "node": "", calicoAccount + "cni-plugin": "", calicoAccount + "kube-controllers": "",
		},
		tokens: map[string]string{},
	}
	if c.key, err = pemKey(key); err != nil {
		return nil, err
	}
	if c.accountsKey, err = pemKey(accounts); err != nil {
		return nil, err
	}
	for _, node := range nodes {
		c.groups["system:node:"+node] = "system:nodes"
	}
	for user := range c.groups {
		c.tokens[user] = newUUID()
	}
	return c, nil
}

func pemKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// files returns the files that the control plane reads, by path.
func (c *credentials) files() map[string][]byte {
	var tokens strings.Builder
	for user, token := range c.tokens {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", token, user, user, c.groups[user])
	}
	return map[string][]byte{
		serverCertFile: c.cert, serverKeyFile: c.key, accountsKeyFile: c.accountsKey, tokensFile: []byte(tokens.String()),
	}
}

// kubeconfig returns a kubeconfig for the API server at that address, with a token or a file that holds one.
func (c *credentials) kubeconfig(server string, user map[string]any) []byte {
	data, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "lab",
		"clusters": []any{map[string]any{"name": "lab", "cluster": map[string]any{
			"server": server, "certificate-authority-data": c.cert, // base64: JSON's encoding of bytes
		}}},
		"users":    []any{map[string]any{"name": "lab", "user": user}},
		"contexts": []any{map[string]any{"name": "lab", "context": map[string]any{"cluster": "lab", "user": "lab"}}},
	})
	if err != nil {
		panic(err) // only strings and bytes
	}
	return data
}
