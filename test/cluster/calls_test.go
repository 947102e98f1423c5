package cluster

import (
	"bufio"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
)

// The audit log of the cluster with stayput: every request of its agents and controllers, without bodies.
const (
	auditPolicyFile = "/etc/kubernetes/audit-policy.yaml"
	auditLog        = "/var/log/audit.log"
	auditPolicy     = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: ["system:serviceaccounts:` + lab.SystemNamespace + `"]
- level: None
`
)

var audited = lab.ClusterOptions{
	APIServerArgs: []string{"--audit-policy-file=" + auditPolicyFile, "--audit-log-path=" + auditLog},
	ControlFiles:  map[string][]byte{auditPolicyFile: []byte(auditPolicy)},
}

// calls are the requests of stayput that were about objects of a namespace, as VERB RESOURCE NAME.
func calls(t *testing.T, c *lab.Cluster, namespace string) (all []string) {
	t.Helper()
	f, err := os.Open(c.Control.Path(auditLog))
	check(t, err)
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			Verb      string
			ObjectRef struct{ Resource, Subresource, Namespace, Name string }
		}
		check(t, json.Unmarshal(lines.Bytes(), &e))
		if e.ObjectRef.Namespace == namespace {
			all = append(all, strings.Join([]string{e.Verb, e.ObjectRef.Resource, e.ObjectRef.Subresource, e.ObjectRef.Name}, " "))
		}
	}
	check(t, lines.Err())
	return all
}
