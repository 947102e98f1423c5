package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// The audit log of the cluster with stayput has every request of its agents and controllers, without bodies.
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
	Verb, RequestURI string
	ObjectRef        struct{ Resource, Subresource, Namespace, Name string }
	User             struct {
		Username string
		Extra    map[string][]string
	}
	// RequestReceivedTimestamp is by this machine's clock. The line is written a moment after the answer.
	RequestReceivedTimestamp time.Time
	ResponseStatus           struct{ Code int }
}

func (r request) String() string {
	return strings.Join([]string{r.Verb, r.ObjectRef.Resource, r.ObjectRef.Subresource, r.ObjectRef.Name}, " ")
}

// by reports whether this account of stayput made the request.
func (r request) by(account string) bool {
	return r.User.Username == "system:serviceaccount:"+lab.SystemNamespace+":"+account
}

// audit is what was read of a cluster's audit log, which becomes long: tests ask for it again and again.
var audit struct {
	sync.Mutex
	of       *lab.Cluster
	read     int64 // bytes
	requests []request
}

// requests returns all of Stayput's requests.
func requests(t *testing.T, c *lab.Cluster) []request {
	t.Helper()
	audit.Lock()
	defer audit.Unlock()
	if audit.of != c {
		audit.of, audit.read, audit.requests = c, 0, nil
	}
	f, err := os.Open(c.Control.Path(auditLog))
	must.Do(t, err)
	defer f.Close()
	_, err = f.Seek(audit.read, io.SeekStart)
	must.Do(t, err)
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return slices.Clip(audit.requests) // an incomplete line is still being written
		}
		must.Do(t, err)
		var r request
		must.Do(t, json.Unmarshal(line, &r))
		audit.requests = append(audit.requests, r)
		audit.read += int64(len(line))
	}
}

// calls returns the requests for objects of a namespace as VERB RESOURCE SUBRESOURCE NAME.
func calls(t *testing.T, c *lab.Cluster, namespace string) (all []string) {
	t.Helper()
	for _, r := range requests(t, c) {
		if r.ObjectRef.Namespace == namespace {
			all = append(all, r.String())
		}
	}
	return all
}

// writes returns the calls of an account that changed objects of a namespace since then, except Events. The programs'
// own counters will not do: they rise after the answer and include the objects of other tests.
func writes(t *testing.T, c *lab.Cluster, account, namespace string, since time.Time) (all []string) {
	t.Helper()
	for _, r := range requests(t, c) {
		if r.by(account) && r.ObjectRef.Namespace == namespace && r.ObjectRef.Resource != "events" &&
			slices.Contains([]string{"create", "update", "patch", "delete", "deletecollection"}, r.Verb) &&
			r.RequestReceivedTimestamp.After(since) && r.ResponseStatus.Code < http.StatusBadRequest {
			all = append(all, r.String())
		}
	}
	return all
}

// agentWrites returns the writes of agents.
func agentWrites(t *testing.T, c *lab.Cluster, namespace string, since time.Time) []string {
	t.Helper()
	return writes(t, c, lab.AgentAccount, namespace, since)
}

// logged waits until the audit log has everything that the controller had to do until now.
func logged(t *testing.T, c *lab.Cluster) {
	t.Helper()
	ns := namespace(t, c)
	caughtUp(t, c, ns)
	until(t, "the audit log to have the latest call", func(context.Context) bool {
		return slices.ContainsFunc(calls(t, c, ns), func(call string) bool {
			return strings.HasPrefix(call, "delete persistentpodstates ")
		})
	})
}

func TestAnAgentReadsOnlyItsOwnNodesObjects(t *testing.T) {
	c := installed(t)
	// An agent is ready before its first list is answered, and the log comes later than the answer.
	until(t, "every agent to list and watch its RetainedIPs", func(context.Context) bool {
		asked := map[string]bool{}
		for _, r := range requests(t, c) {
			if r.by(lab.AgentAccount) && r.ObjectRef.Resource == "retainedips" && r.ObjectRef.Namespace == "" {
				asked[askingNode(t, r)+" "+r.Verb] = true
			}
		}
		return !slices.ContainsFunc(c.Nodes, func(n *lab.ClusterNode) bool {
			return !asked[n.Name+" list"] || !asked[n.Name+" watch"]
		})
	})
	for _, r := range requests(t, c) {
		if !r.by(lab.AgentAccount) || r.Verb != "list" && r.Verb != "watch" {
			continue
		}
		uri, err := url.ParseRequestURI(r.RequestURI)
		must.Do(t, err)
		node, selector := askingNode(t, r), uri.Query().Get("fieldSelector")
		switch {
		case r.ObjectRef.Resource == "retainedips" && selector == "spec.nodeName="+node:
		case r.ObjectRef.Resource == "retainedips" && r.Verb == "list" && r.ObjectRef.Namespace == metav1.NamespaceDefault &&
			selector == "metadata.name=none":
			// The agent lists an object that never exists to learn whether the API server went back in time.
		case r.ObjectRef.Resource == "configmaps" && r.ObjectRef.Namespace == lab.SystemNamespace &&
			selector == "metadata.name="+installation.ConfigMap:
		default:
			t.Errorf("the agent of %s: %s %s", node, r.Verb, r.RequestURI)
		}
	}
}

// Without pools.enabled their definitions are not served. The controller asks what is, and nothing of pools.
// For each start of a pod with an address of a pool its node's agent reads PodIP and pod once and writes the status of
// the PodIP once. For its end it reads the PodIP once, or, if the cluster no longer has the pod by then, twice, and the
// pod, and writes once. None of it is on the way from the sandbox to its address.
func TestAPodOfAPoolCostsFewRequests(t *testing.T) {
	aloneAtAll(t)
	c := onOneLink(t, audited)
	must.Do(t, c.Install(testContext(t), lab.InstallOptions{Values: poolsOn}))
	ns := namespace(t, c)
	apply(t, c, ns, pool)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: pools("blue"), Unprobed: true})
	pods := places(t, c, ns, "web", 1, nil)
	holdTheirAddresses(t, c, pods)
	addr := pods["web-0"].Status.PodIP
	// count counts the requests about the pod and its address since then, by agents and the controllers, once all is done.
	count := func(since time.Time) map[string]int {
		t.Helper()
		logged(t, c)
		all := map[string]int{}
		for _, r := range requests(t, c) {
			about := r.ObjectRef.Resource == "podips" && r.ObjectRef.Name == addr ||
				r.ObjectRef.Resource == "pods" && r.ObjectRef.Name == "web-0" && r.ObjectRef.Namespace == ns
			if !about || r.RequestReceivedTimestamp.Before(since) {
				continue
			}
			account := "controller"
			if r.by(lab.AgentAccount) {
				account = "agent"
			}
			all[account+": "+strings.Join([]string{r.Verb, r.ObjectRef.Resource, r.ObjectRef.Subresource}, " ")]++
		}
		return all
	}
	within := func(what string, is map[string]int, most map[string]int) {
		t.Helper()
		t.Logf("%s: %v", what, is)
		for request, n := range is {
			if n > most[request] {
				t.Errorf("%s: %s %d times, want at most %d", what, request, n, most[request])
			}
		}
	}
	within("the first start", count(time.Time{}), map[string]int{
		"agent: get podips ": 1, "agent: get pods ": 1, "agent: patch podips status": 1,
		"controller: create podips ": 1, "controller: patch pods ": 1,
	})

	// Nothing is asked while it runs, nor while its sandbox starts again, which it does without an API server.
	since := time.Now()
	n := c.Node(pods["web-0"].Spec.NodeName)
	was := sandbox(t, c, pods["web-0"])
	must.Do(t, c.APIServer.Stop())
	must.Do(t, n.StopPod(testContext(t), was.ID))
	until(t, "another sandbox with its address", func(ctx context.Context) bool {
		is, err := n.Sandbox(ctx, ns, "web-0")
		return err == nil && is.ID != was.ID && len(is.IPs) == 1 && is.IP().String() == addr
	})
	must.Do(t, c.APIServer.Start(testContext(t)))
	holdTheirAddresses(t, c, places(t, c, ns, "web", 1, nil))
	// Its watch was cut off. Once it has another one it looks at all pods again, which is no part of what follows. Neither
	// is what a controller reads that leads since the outage, and places another pod only once it knows all.
	until(t, "the agent to look at the pod again", func(context.Context) bool {
		return count(since)["agent: get podips "] > 0
	})
	deploy(t, c, ns, lab.Workload{Name: "after", Replicas: 1, Annotations: pools("blue"), Unprobed: true})
	places(t, c, ns, "after", 1, nil)
	within("a sandbox that starts again, and an API server that is back", count(since), map[string]int{
		"agent: get podips ": 2,
	})

	since = time.Now()
	deletePods(t, c, ns, "web")
	after := places(t, c, ns, "web", 1, pods)
	keptAddresses(t, pods, after)
	holdTheirAddresses(t, c, after)
	// Each look reads both, and one that finds the network namespace still there is repeated, which a machine that is
	// busy with other tests does more often.
	within("an end and a start", count(since), map[string]int{
		"agent: get podips ": 3, "agent: get pods ": 2, "agent: patch podips status": 2,
		"controller: patch podips ": 1, "controller: patch podips status": 2, "controller: patch pods ": 1,
		"controller: get pods ": 1, // that the old pod has ended, and not only lost its label
	})

	since = time.Now()
	kubectl(t, c, "delete", "statefulset", "web", "-n", ns)
	until(t, "the address to be free", func(context.Context) bool {
		_, is := podIPs(t, c)[addr]
		return !is
	})
	within("the end", count(since), map[string]int{
		"agent: get podips ": 2, "agent: get pods ": 1, "agent: patch podips status": 1,
		"controller: patch podips status": 1, "controller: delete podips ": 1, "controller: get podips ": 2,
		"controller: update podips ": 1, "controller: get pods ": 2,
	})
}

// askingNode returns the node of the agent that made a request.
func askingNode(t *testing.T, r request) string {
	t.Helper()
	if len(r.User.Extra[nodeOfToken]) != 1 {
		t.Fatalf("the test is wrong: the user of %s is %v", r.RequestURI, r.User.Extra)
	}
	return r.User.Extra[nodeOfToken][0]
}

// nodeOfToken is the key of the node in the user info of a pod's token.
const nodeOfToken = "authentication.kubernetes.io/node-name"

// Of the pod, it owns only its annotation and the node affinity.
func TestTheControllerWritesOnceForAReplacedPod(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 3, Annotations: retain("10m"), Own: requiresNode})
	pods := places(t, c, ns, "web", 3, nil)
	comesTo(t, c, ns, "web", "to record three pods", recordsAll(3))
	known := func() {
		t.Helper()
		for name, pod := range pods {
			shows(t, c, ns, name, pod.Spec.NodeName, "bound", func(r *v1alpha1.RetainedIP) bool {
				return boundTo(pod)(r) && r.Spec.Workload != nil
			})
		}
		logged(t, c)
	}
	known()
	since := time.Now()
	deletePods(t, c, ns, "web")
	pods = places(t, c, ns, "web", 3, pods)
	known()
	all := writes(t, c, lab.ControllerAccount, ns, since)
	slices.Sort(all)
	var want []string
	for i := range 3 {
		want = append(want, fmt.Sprintf("patch pods  web-%d", i))
	}
	if !slices.Equal(all, want) {
		t.Errorf("for three replaced pods the controller wrote %q, want %q", all, want)
	}
	for name, pod := range pods {
		found := 0
		for _, m := range pod.ManagedFields {
			if m.Manager != v1alpha1.ControllerFieldManager {
				continue
			}
			found++
			var fields map[string]map[string]json.RawMessage
			must.Do(t, json.Unmarshal(m.FieldsV1.GetRawBytes(), &fields))
			var owns []string
			for of, each := range fields {
				for field := range each {
					owns = append(owns, of+" "+field)
				}
			}
			slices.Sort(owns)
			if m.Operation != metav1.ManagedFieldsOperationUpdate ||
				!slices.Equal(owns, []string{"f:metadata f:annotations", "f:spec f:affinity"}) {
				t.Errorf("%s: the controller owns by %s %s", name, m.Operation, m.FieldsV1.GetRawBytes())
			}
		}
		if found != 1 {
			t.Errorf("%s has %d entries of the controller: %+v", name, found, pod.ManagedFields)
		}
	}
}

func TestAControllerRestartCausesNoNeedlessWrites(t *testing.T) {
	c := installed(t)
	ns := namespace(t, c)
	deploy(t, c, ns, lab.Workload{
		Name: "web", Replicas: 2, Annotations: retain("while-owned", "stayput.io/when-scaled", "Retain"), Own: requiresNode,
	})
	pods := places(t, c, ns, "web", 2, nil)
	for name, pod := range pods {
		shows(t, c, ns, name, pod.Spec.NodeName, "bound", func(r *v1alpha1.RetainedIP) bool {
			return boundTo(pod)(r) && r.Spec.Workload != nil
		})
	}
	scale(t, c, ns, "web", 1)
	shows(t, c, ns, "web-1", pods["web-1"].Spec.NodeName, "retained", retained)
	comesTo(t, c, ns, "web", "to have one record left", recordsAll(1))
	logged(t, c)
	since := time.Now()
	must.Do(t, c.Controllers.Restart(testContext(t)))
	// A write for a new pod comes after any for the old ones.
	deploy(t, c, ns, lab.Workload{Name: "late", Replicas: 1, Annotations: retain("10m")})
	late := ready(t, c, ns, "late-0")
	shows(t, c, ns, "late-0", late.Spec.NodeName, "assigned to its workload", func(r *v1alpha1.RetainedIP) bool {
		return r.Spec.Workload != nil
	})
	logged(t, c)
	all := writes(t, c, lab.ControllerAccount, ns, since)
	slices.Sort(all)
	want := []string{
		"patch pods  late-0",
		"patch retainedips  " + v1alpha1.RetainedIPName("late-0", late.Spec.NodeName),
	}
	if !slices.Equal(all, want) {
		t.Errorf("the controllers wrote %q, want %q", all, want)
	}
}

// The API server serves leader election, and what a gated pod waits for, before other service accounts' requests.
func TestTheControllersRequestsHaveTheirPriority(t *testing.T) {
	c := beside(t)
	account := func(namespace, name string) string { return "system:serviceaccount:" + namespace + ":" + name }
	controller := account(lab.SystemNamespace, lab.ControllerAccount)
	lease := func(namespace string) string {
		return "/apis/coordination.k8s.io/v1/namespaces/" + namespace + "/leases/" + home.LeaseName
	}
	const pod = "/api/v1/namespaces/default/pods/none"
	leading := priority{"stayput-leader-election", "leader-election"}
	working, others := priority{"stayput-controller", "workload-high"}, priority{"service-accounts", "workload-low"}
	for _, test := range []struct {
		user, verb, path string
		want             priority
	}{
		{controller, http.MethodGet, lease(lab.SystemNamespace), leading},
		{controller, http.MethodPut, lease(lab.SystemNamespace), leading},
		{controller, http.MethodGet, lease("default"), working},
		{controller, http.MethodGet, "/api/v1/pods?limit=1", working},
		{controller, http.MethodPatch, pod, working},
		{controller, http.MethodPatch, pod + "/status", working},
		{controller, http.MethodGet, "/apis", working},
		{account("default", lab.ControllerAccount), http.MethodPatch, pod, others},
		{account(lab.SystemNamespace, lab.AgentAccount), http.MethodGet, lease(lab.SystemNamespace), others},
	} {
		if is := priorityOf(t, c, test.user, test.verb, test.path); is != test.want {
			t.Errorf("%s %s by %s is served as %v, want %v", test.verb, test.path, test.user, is, test.want)
		}
	}

	// And those that the controllers make.
	dispatched := func(of priority) (n float64) {
		series := fmt.Sprintf("apiserver_flowcontrol_dispatched_requests_total{flow_schema=%q,priority_level=%q} ",
			of.schema, of.level)
		for line := range strings.Lines(kubectl(t, c, "get", "--raw", "/metrics")) {
			if value, ok := strings.CutPrefix(line, series); ok {
				_, err := fmt.Sscan(value, &n)
				must.Do(t, err)
			}
		}
		return n
	}
	ns := namespace(t, c)
	led, worked := dispatched(leading), dispatched(working)
	deploy(t, c, ns, lab.Workload{Name: "web", Replicas: 1, Annotations: retain("10m")})
	ready(t, c, ns, "web-0")
	until(t, "the controllers' requests to be dispatched", func(context.Context) bool {
		return dispatched(leading) > led && dispatched(working) > worked
	})
}

// priority is the FlowSchema and the PriorityLevelConfiguration by which the API server serves a request.
type priority struct{ schema, level string }

// priorityOf makes a request as a user, whether it succeeds or not.
func priorityOf(t *testing.T, c *lab.Cluster, user, verb, path string) (is priority) {
	t.Helper()
	config := c.RESTConfigAs(user)
	client, err := rest.HTTPClientFor(config)
	must.Do(t, err)
	req, err := http.NewRequestWithContext(testContext(t), verb, config.Host+path, nil)
	must.Do(t, err)
	answer, err := client.Do(req)
	must.Do(t, err)
	must.Do(t, answer.Body.Close())
	flow := c.Client().FlowcontrolV1()
	schemas, err := flow.FlowSchemas().List(testContext(t), metav1.ListOptions{})
	must.Do(t, err)
	for _, s := range schemas.Items {
		if string(s.UID) == answer.Header.Get(flowcontrolv1.ResponseHeaderMatchedFlowSchemaUID) {
			is.schema = s.Name
		}
	}
	levels, err := flow.PriorityLevelConfigurations().List(testContext(t), metav1.ListOptions{})
	must.Do(t, err)
	for _, l := range levels.Items {
		if string(l.UID) == answer.Header.Get(flowcontrolv1.ResponseHeaderMatchedPriorityLevelConfigurationUID) {
			is.level = l.Name
		}
	}
	return is
}

func TestWithoutPoolsNothingIsAskedOfThem(t *testing.T) {
	goOn := later(t)
	c := installed(t)
	since := time.Now()
	goOn()
	// untilAsked returns all requests until the controllers have asked twice what is served; nil if they have not yet.
	untilAsked := func() []request {
		all, asked := requests(t, c), 0
		for i, r := range all {
			if r.by(lab.ControllerAccount) && r.RequestReceivedTimestamp.After(since) && r.ObjectRef.Resource == "" &&
				strings.HasPrefix(r.RequestURI, "/apis/"+v1alpha1.SchemeGroupVersion.String()) {
				if asked++; asked == 2 {
					return all[:i]
				}
			}
		}
		return nil
	}
	until(t, "two questions what is served", func(context.Context) bool { return untilAsked() != nil })
	for _, r := range untilAsked() {
		if strings.HasPrefix(r.ObjectRef.Resource, "podip") || r.ObjectRef.Resource == "namespaces" ||
			r.by(lab.AgentAccount) && r.ObjectRef.Resource == "pods" {
			t.Errorf("%s: %s %s", r.User.Username, r.Verb, r.RequestURI)
		}
	}
}
