//go:build calico

package node

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// Calico's plugin takes longer to build than the rest of a node: make calico runs this test, make test does not.

// Calico's plugin asks the API server at every command, and the agent asks it for the podCIDR: a stub answers both.
func TestTheAgentTakesOverFromCalicoWithHostLocal(t *testing.T) {
	plugin, err := lab.BuildCalico(t.Context()) // may take as long as the compiler
	must.Do(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	must.Do(t, listener.Close()) // for its port, which the node's network has free as well
	kubeconfig := fmt.Sprintf(`
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u}]
clusters: [{name: c, cluster: {server: "http://%s"}}]
`, listener.Addr())
	c := cni{
		binary: plugin, // the node has no address from which it could ask pods
		conflist: `{"name": "pods", "cniVersion": "0.3.1", "plugins": [
  {"type": "calico", "log_level": "info", "datastore_type": "kubernetes", "nodename": "n1", "mtu": 1450,
   "nodename_file_optional": true, "ipam": {"type": "host-local", "subnet": "usePodCidr"},
   "policy": {"type": "k8s"}, "kubernetes": {"kubeconfig": "/etc/cni/net.d/calico-kubeconfig"}},
  {"type": "portmap", "snat": true, "capabilities": {"portMappings": true}}]}`,
		prepare: func(n *lab.Node) {
			must.Do(t, n.WriteFile("/etc/cni/net.d/calico-kubeconfig", []byte(kubeconfig)))
			inside, err := n.Listen(testContext(t), "tcp", listener.Addr().String())
			must.Do(t, err)
			server := httptest.NewUnstartedServer(http.HandlerFunc(serveCalico))
			must.Do(t, server.Listener.Close())
			server.Listener = inside
			server.Start()
			t.Cleanup(server.Close)
		},
	}
	takesOver(t, c, "--kubeconfig=/etc/cni/net.d/calico-kubeconfig", "--node-name=n1")
}

// serveCalico serves the Node n1, Calico's ClusterInformation, and every namespace and pod that is asked for.
func serveCalico(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	name := parts[len(parts)-1]
	meta := func(namespace, name string) map[string]any {
		return map[string]any{
			"name": name, "namespace": namespace, "uid": "5a6ab1c2-6d1f-4f83-9f4e-3c5e8a0f7d10",
			"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
		}
	}
	var object map[string]any
	switch {
	case strings.HasSuffix(r.URL.Path, "/clusterinformations/default"):
		object = map[string]any{"apiVersion": "crd.projectcalico.org/v1", "kind": "ClusterInformation",
			"metadata": meta("", name), "spec": map[string]any{"datastoreReady": true}}
	case r.URL.Path == "/api/v1/nodes/n1":
		object = map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": meta("", name),
			"spec": map[string]any{"podCIDR": "10.88.0.0/28", "podCIDRs": []string{"10.88.0.0/28"}}}
	case len(parts) == 4 && parts[2] == "namespaces":
		object = map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": meta("", name)}
	case len(parts) >= 6 && parts[4] == "pods": // its status is patched
		object = map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta(parts[3], parts[5]),
			"spec": map[string]any{"nodeName": "n1", "containers": []any{}}}
	default:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}`)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object) // the client may be gone
}
