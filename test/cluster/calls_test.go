package cluster

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

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

// request is a line of the audit log.
type request struct {
	Verb      string
	ObjectRef struct{ Resource, Subresource, Namespace, Name string }
	User      struct{ Username string }
	// RequestReceivedTimestamp is by the clock of this machine. The line is written a moment after the answer.
	RequestReceivedTimestamp time.Time
	ResponseStatus           struct{ Code int }
}

func (r request) String() string {
	return strings.Join([]string{r.Verb, r.ObjectRef.Resource, r.ObjectRef.Subresource, r.ObjectRef.Name}, " ")
}

// requests are those of stayput that were about objects of a namespace.
func requests(t *testing.T, c *lab.Cluster, namespace string) (all []request) {
	t.Helper()
	f, err := os.Open(c.Control.Path(auditLog))
	check(t, err)
	defer f.Close()
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return all // what is there of a line without an end is still being written
		}
		check(t, err)
		var r request
		check(t, json.Unmarshal(line, &r))
		if r.ObjectRef.Namespace == namespace {
			all = append(all, r)
		}
	}
}

// calls are the requests as VERB RESOURCE SUBRESOURCE NAME.
func calls(t *testing.T, c *lab.Cluster, namespace string) (all []string) {
	t.Helper()
	for _, r := range requests(t, c, namespace) {
		all = append(all, r.String())
	}
	return all
}

// agentWrites are the calls by which agents have changed RetainedIPs of a namespace since then. What the agents
// count themselves does not serve: it is counted after the answer, and has the objects of other tests in it.
func agentWrites(t *testing.T, c *lab.Cluster, namespace string, since time.Time) (all []string) {
	t.Helper()
	const agent = "system:serviceaccount:" + lab.SystemNamespace + ":" + lab.AgentAccount
	for _, r := range requests(t, c, namespace) {
		if r.User.Username == agent && r.ObjectRef.Resource == "retainedips" && slices.Contains([]string{"create", "update", "patch", "delete"}, r.Verb) &&
			r.RequestReceivedTimestamp.After(since) && r.ResponseStatus.Code < http.StatusBadRequest {
			all = append(all, r.String())
		}
	}
	return all
}
