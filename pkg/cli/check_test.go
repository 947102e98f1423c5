package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// aLook is into a node where all is well.
func aLook(change ...func(*inspection.Node)) looked {
	n := &inspection.Node{
		Format: inspection.Format, Version: "v1", Build: "v1", Clock: inspection.Clock{Wall: noon},
		Agent:   inspection.Agent{Ready: true, NRI: "connected", CRI: "ok", Annotations: "ok", API: "ok", GracePeriod: 600},
		Runtime: inspection.Runtime{Sandboxes: 3, Ready: 3},
		CNI: inspection.CNI{
			State: "active", Message: "00-stayput.conflist, derived from 10-flannel.conflist", Good: true,
			File: "00-stayput.conflist", Network: "pods", Installs: true,
			Plugin: inspection.Binary{Path: "/opt/cni/bin/stayput", Version: "v1", SHA256: "1"},
		},
		Networks: []inspection.Network{{
			Name: "pods", RangeSets: []inspection.RangeSet{{Ranges: []inspection.Range{rangeOf("10.1.0.0/29", "10.1.0.1",
				"10.1.0.6", "10.1.0.1")}, Size: 5, Promised: 1, PromiseLimit: 2}},
			Addresses: []inspection.Address{{IP: addr("10.1.0.2"), State: inspection.Bound}},
		}},
	}
	for _, f := range change {
		f(n)
	}
	return looked{node: "node-1", is: n, from: noon.Add(-time.Second), to: noon.Add(time.Second)}
}

func TestEveryFindingSaysWhatToDo(t *testing.T) {
	node := aNode("node-1")
	down := aNode("node-1", func(n *corev1.Node) { n.Status.Conditions = nil })
	for name, test := range map[string]struct {
		node  corev1.Node
		look  looked
		check string
		level Level
		says  string
	}{
		"no agent":         {node, looked{err: ErrNoAgent}, "agent", LevelFail, "no agent of Stayput runs"},
		"the node is down": {down, looked{err: ErrNoAgent}, "agent", LevelWarn, "not Ready"},
		"exec is refused":  {node, looked{err: errors.New("forbidden")}, "agent", LevelFail, "forbidden"},
		"the agent hangs": {node, aLook(func(n *inspection.Node) { n.Agent = inspection.Agent{Error: "timeout"} }), "agent",
			LevelFail, "timeout"},
		"no NRI": {node, aLook(func(n *inspection.Node) { n.Agent.NRI = "degraded: not connected" }), "agent",
			LevelWarn, "NRI is degraded"},
		"no NRI, and an older agent": {node, aLook(func(n *inspection.Node) {
			n.Agent.NRI, n.Agent.Annotations = "degraded: not connected", ""
		}), "agent", LevelFail, "NRI is degraded"},
		"annotations from the list": {node, aLook(func(n *inspection.Node) {
			n.Agent.NRI, n.Agent.Annotations = inspection.NRIOff, inspection.AnnotationsListed
		}), "agent", LevelWarn, "before it is listed"},
		"annotations from nowhere": {node, aLook(func(n *inspection.Node) {
			n.Agent.NRI, n.Agent.Annotations = inspection.NRIOff, "degraded: nothing is listed"
		}), "agent", LevelFail, "reach neither the plugin nor the agent: degraded: nothing is listed"},
		"no CRI": {node, aLook(func(n *inspection.Node) { n.Runtime.Error = "no such socket" }), "agent", LevelFail,
			"no such socket"},
		"no API server": {node, aLook(func(n *inspection.Node) { n.Agent.API = "degraded: refused" }), "agent", LevelFail,
			"degraded: refused"},
		"a newer agent": {node, aLook(func(n *inspection.Node) { n.Format++ }), "agent", LevelWarn, "understands"},
		"host-local counts": {node, aLook(func(n *inspection.Node) {
			n.CNI.State, n.CNI.Good, n.CNI.Message = "stock", false, "10-flannel.conflist gives addresses by host-local"
		}), "CNI configuration", LevelFail, "host-local"},
		"multus comes first": {node, aLook(
			func(n *inspection.Node) { n.CNI.State, n.CNI.Message = "multus", "it cannot be seen" }), "CNI configuration",
			LevelWarn, "cannot be seen"},
		"no annotations": {node, aLook(
			func(n *inspection.Node) { n.CNI.State, n.CNI.WithoutAnnotations = "by-hand", true }), "CNI configuration",
			LevelWarn, "does not hand on"},
		"the plugin is missing": {node, aLook(func(n *inspection.Node) { n.CNI.Plugin.Error = "missing" }), "plugin",
			LevelFail, "no pod can start"},
		"the plugin is older": {node, aLook(func(n *inspection.Node) { n.CNI.Plugin.Version = "v0" }), "plugin", LevelWarn,
			"version v0"},
		"the plugin is another": {node, aLook(func(n *inspection.Node) { n.CNI.Image.SHA256 = "2" }), "plugin", LevelWarn,
			"not the plugin that the agent brought"},
		"no network is read": {node, aLook(func(n *inspection.Node) { n.NetworksError = "record is corrupt" }), "ledger",
			LevelFail, "record is corrupt"},
		"a network is not read": {node, aLook(func(n *inspection.Node) { n.Networks[0].Error = "read-only" }), "ledger",
			LevelFail, "read-only"},
		"an unreadable file": {node, aLook(func(n *inspection.Node) {
			n.Networks[0].Addresses[0].State, n.Networks[0].Violations = inspection.Unreadable,
				[]string{"I5: the file of 10.1.0.2 says nothing"}
		}), "ledger", LevelWarn, "10.1.0.2"},
		"an address of a newer version": {node, aLook(func(n *inspection.Node) {
			n.Networks[0].Addresses[0].State, n.Networks[0].Newer = inspection.Newer, []string{"/the/file has version 2"}
		}), "ledger", LevelFail, "a newer version of Stayput keeps 10.1.0.2"},
		"a record of a newer version": {node, aLook(func(n *inspection.Node) {
			n.Networks[0].Newer = []string{"/the/file has version 2"}
		}), "ledger", LevelFail, "/the/file has version 2"},
		"a network of a newer version": {node, aLook(func(n *inspection.Node) {
			n.Networks[0].Error, n.Networks[0].ErrorNewer = "a newer version of stayput", true
		}), "ledger", LevelFail, "newer version"},
		"a state that is not known": {node,
			aLook(func(n *inspection.Node) { n.CNI.State, n.CNI.Good, n.CNI.Message = "upset", false, "it is upset" }),
			"CNI configuration", LevelFail, "it is upset"},
		"no clock": {node, aLook(func(n *inspection.Node) { n.Clock.Error = "no boot ID" }), "clock",
			LevelFail, "no boot ID"},
		"a violation": {node,
			aLook(func(n *inspection.Node) { n.Networks[0].Violations = []string{"I2: promised to both"} }), "ledger", LevelFail,
			"promised to both"},
		"a leak": {node, aLook(func(n *inspection.Node) {
			n.Networks[0].Leaks = []inspection.Suspicion{{IP: addr("10.1.0.2"), Why: "gone"}}
		}), "ledger", LevelWarn, "10.1.0.2: gone"},
		"a doubled address": {node, aLook(func(n *inspection.Node) {
			n.Networks[0].Doubled = []inspection.Suspicion{{IP: addr("10.1.0.2"), Why: "twice"}}
		}), "ledger", LevelFail, "twice"},
		"the share is used": {node, aLook(func(n *inspection.Node) { n.Networks[0].RangeSets[0].Promised = 2 }),
			"ledger", LevelWarn, "ordinary addresses"},
		"the promises leave too few": {aNode("node-1", func(n *corev1.Node) {
			n.Status.Capacity = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("4")}
		}), aLook(), "range", LevelWarn,
			"of 5 addresses 2 may be promised, so 3 are left for others, fewer than status.capacity.pods of the Node, 4"},
		"the range is full": {node, aLook(func(n *inspection.Node) { n.Networks[0].RangeSets[0].Size = 1 }),
			"ledger", LevelFail, "no pod can start"},
		"a clock that is a bit wrong": {node, aLook(func(n *inspection.Node) { n.Clock.Wall = noon.Add(10 * time.Second) }),
			"clock", LevelWarn, "ahead of"},
		"a clock that is a year wrong": {node, aLook(func(n *inspection.Node) { n.Clock.Wall = noon.AddDate(-1, 0, 0) }),
			"clock", LevelFail, "behind"},
	} {
		found := false
		for _, f := range checkNode(&test.node, test.look, interval{-time.Second, time.Second}) {
			if f.Level == LevelOK {
				continue
			}
			if f.Node != "node-1" || f.Check != test.check || f.Level != test.level || !strings.Contains(f.Text, test.says) {
				t.Errorf("%s: found %+v", name, f)
			}
			if f.Todo == "" {
				t.Errorf("%s: it does not say what to do: %+v", name, f)
			}
			if strings.Contains(name, "newer version") && f.Todo != upgrade {
				t.Errorf("%s: to do is %s", name, f.Todo)
			}
			found = true
		}
		if !found {
			t.Errorf("%s: nothing is found", name)
		}
	}
	all := checkNode(&node, aLook(), interval{-time.Second, time.Second})
	for _, f := range all {
		if f.Level != LevelOK {
			t.Errorf("if all is well: %+v", f)
		}
	}
	if len(all) != 5 {
		t.Errorf("if all is well there are %d findings", len(all))
	}
	off := checkNode(&node, aLook(func(n *inspection.Node) { n.Agent.NRI = inspection.NRIOff }), interval{})
	if f := off[0]; f.Level != LevelOK || f.Text != "v1, connected to CRI and the API server, without NRI" {
		t.Errorf("where NRI is off: %+v", f)
	}
}

// constants are the values of a type of strings in a Go package.
func constants(t *testing.T, dir, of string) (values []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, spec := range g.Specs {
				v := spec.(*ast.ValueSpec)
				if name, ok := v.Type.(*ast.Ident); !ok || name.Name != of {
					continue
				}
				value, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				values = append(values, value)
			}
		}
	}
	if len(values) < 3 {
		t.Fatalf("%s has the constants %q of type %s", dir, values, of)
	}
	return values
}

func TestEveryBadCNIStateSaysWhatToDo(t *testing.T) {
	for _, state := range constants(t, "../node/cniconf", "State") {
		good := cniconf.State(state).Good()
		if _, there := cniTodo[state]; there == (state == "active" || state == "by-hand") {
			t.Errorf("%s: what to do is %q", state, cniTodo[state])
		}
		for _, f := range findCNI(aLook(func(n *inspection.Node) {
			n.CNI.State, n.CNI.Good, n.CNI.Message = state, good,
				"so it is"
		}).is) {
			if f.Todo != cniTodo[state] || (f.Level == LevelFail) == good {
				t.Errorf("%s: %+v", state, f)
			}
		}
	}
}

func TestEveryStateOfAnAddressIsDrawnAndTold(t *testing.T) {
	drawn, told := map[mark]bool{}, map[string]bool{}
	states := constants(t, "../api/inspection", "State")
	for _, state := range states {
		left := int64(60)
		n := aLook(func(n *inspection.Node) {
			a := &n.Networks[0].Addresses[0]
			a.State, a.Promise, a.LeftSeconds = inspection.State(state), &inspection.Promise{Identity: "pod:default/web-0"},
				&left
		}).is
		a := n.Networks[0].Addresses[0]
		drawn[markOf(n.Networks[0].RangeSets[0].Ranges[0], a.IP, a, true)] = true
		told[entryOf(n, a.IP.String())] = true
	}
	if len(drawn) != len(states) || len(told) != len(states) {
		t.Errorf("of %q are drawn %v and told %v", states, drawn, told)
	}
}

func TestAMissingRightIsNamed(t *testing.T) {
	refused := apierrors.NewForbidden(corev1.Resource("nodes"), "", errors.New("no"))
	if err := rightTo("list nodes", refused); !errors.Is(err, errRight) ||
		!strings.Contains(err.Error(), "missing right to list nodes") {
		t.Error(err)
	}
	if err := rightTo("list nodes", ErrNoAgent); err != ErrNoAgent {
		t.Error(err)
	}
	f := findings{check: "gated pods"}
	if f.unread(refused); f.all[0].Level != LevelWarn || f.all[0].Todo != askForIt {
		t.Errorf("found %+v", f)
	}
	one := aNode("node-1")
	if f := checkNode(&one, looked{err: rightTo("create pods/exec", refused)}, interval{})[0]; f.Level != LevelFail ||
		f.Todo != askForIt {
		t.Errorf("found %+v", f)
	}
}

func TestANodeThatIsToHaveNoAgentIsInOrder(t *testing.T) {
	node := aNode("node-1", func(n *corev1.Node) { n.Labels = map[string]string{"stayput.io/agent": "none"} })
	f := checkNode(&node, looked{err: ErrNoAgent}, interval{})
	if len(f) != 1 || f[0].Level != LevelOK || !strings.Contains(f[0].Text, "stayput.io/agent=none") {
		t.Errorf("found %+v", f)
	}
}

func TestClocksDifferOnlyForCertain(t *testing.T) {
	server := interval{-500 * time.Millisecond, 500 * time.Millisecond}
	for _, test := range []struct {
		node, want time.Duration
	}{{0, 0}, {1400 * time.Millisecond, 0}, {3 * time.Second, 1500 * time.Millisecond},
		{-3 * time.Second, -1500 * time.Millisecond}} {
		if got := between(noon.Add(test.node), noon.Add(-time.Second),
			noon.Add(time.Second)).minus(server); got != test.want {
			t.Errorf("a clock off by %s is off by %s for sure", test.node, got)
		}
	}
}

const theReport = `OK    policies: there
WARN  node-1: ledger: a leak
      -> wait
OK    node-1: agent, clock
OK    node-2: agent
FAIL  node-3: agent: none

4 in order, 1 warning, 1 failure
`

func TestAReportIsShortIfAllIsInOrder(t *testing.T) {
	r := &Report{}
	r.add(
		Finding{LevelOK, "", "policies", "there", ""},
		Finding{LevelOK, "node-1", "agent", "well", ""},
		Finding{LevelWarn, "node-1", "ledger", "a leak", "wait"},
		Finding{LevelOK, "node-1", "clock", "right", ""},
		Finding{LevelOK, "node-2", "agent", "well", ""},
		Finding{LevelFail, "node-3", "agent", "none", ""},
	)
	var b strings.Builder
	if err := r.write(&b, false, 80, false); err != nil {
		t.Fatal(err)
	}
	if b.String() != theReport {
		t.Errorf("printed is\n%s", b.String())
	}
	b.Reset()
	if err := r.write(&b, true, 80, false); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "OK    node-1: clock: right\n") {
		t.Errorf("with all of it\n%s", b.String())
	}
}

func TestAgentsOfSeveralVersionsAreFound(t *testing.T) {
	other := aLook(func(n *inspection.Node) { n.Version = "v2" })
	if f := compareVersions([]looked{aLook(), other}); len(f) != 1 || f[0].Level != LevelWarn ||
		!strings.Contains(f[0].Text, "v1 on node-1; v2 on node-1") {
		t.Errorf("found %+v", f)
	}
	if f := compareVersions([]looked{aLook(), aLook(), {err: ErrNoAgent}}); len(f) != 0 {
		t.Errorf("found %+v", f)
	}
}

func TestALeaseThatIsNotRenewedHasNoLeader(t *testing.T) {
	lease := func(holder string, age time.Duration) *coordinationv1.Lease {
		renewed, seconds := metav1.NewMicroTime(noon.Add(-age)), int32(15)
		return &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, RenewTime: &renewed, LeaseDurationSeconds: &seconds,
		}}
	}
	for name, test := range map[string]struct {
		lease *coordinationv1.Lease
		says  string // empty: there is a leader
	}{
		"fresh":                        {lease("a_1", time.Second), ""},
		"as late as clocks may differ": {lease("a_1", 30*time.Second), ""},
		"overdue":                      {lease("a_1", 31*time.Second), "a_1 renewed"},
		"released":                     {lease("", time.Second), "has no holder"},
		"never held":                   {&coordinationv1.Lease{}, "has no holder"},
		"of a holder that never renewed it": {&coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
			HolderIdentity: lease("a_1", 0).Spec.HolderIdentity,
		}}, "has no holder"},
	} {
		if is := staleLease(test.lease, noon); (is == "") != (test.says == "") || !strings.Contains(is, test.says) {
			t.Errorf("%s: %q, want %q", name, is, test.says)
		}
	}
}

func TestARangeIsLargeEnoughIfThePromisesLeaveOneForEveryPod(t *testing.T) {
	pods := func(most string) *corev1.Node {
		n := aNode("node-1", func(n *corev1.Node) {
			n.Status.Capacity = corev1.ResourceList{corev1.ResourcePods: resource.MustParse(most)}
		})
		return &n
	}
	other := func(n *inspection.Node) { n.CNI.Network = "other" }
	for _, test := range []struct {
		pods string
		look looked
		todo string // empty: it is large enough
	}{
		{"3", aLook(), ""},
		{"4", aLook(), "lower promisedShare (agent.promisedShare in the Helm chart) to 0.2, enlarge the range"},
		{"5", aLook(), "enlarge the range (spec.podCIDR of the Node), or lower maxPods of the kubelet"},
		{"6", aLook(), "enlarge the range"},
		{"6", aLook(other), ""},
	} {
		f := findRange(pods(test.pods), test.look.is)
		if (len(f) == 0) != (test.todo == "") || len(f) > 0 && !strings.HasPrefix(f[0].Todo, test.todo) {
			t.Errorf("for %s pods: %+v", test.pods, f)
		}
	}
}

// deployed are the workloads of an installation.
func deployed(controller, agent []string) []client.Object {
	pod := func(args []string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: args}}}}
	}
	at := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: DefaultNamespace, Name: name} }
	return []client.Object{
		&appsv1.Deployment{ObjectMeta: at(controllerDeployment), Spec: appsv1.DeploymentSpec{Template: pod(controller)}},
		&appsv1.DaemonSet{ObjectMeta: at(agentDaemonSet), Spec: appsv1.DaemonSetSpec{Template: pod(agent)}},
	}
}

func TestAPolicyThatIsMissingIsFound(t *testing.T) {
	pooled, nodesOnly := true, false
	// found are the findings without the objects that missing names.
	found := func(args []string, missing func(kind, name string) bool) (bad []Finding) {
		objects := deployed(args, nil)
		if pooled {
			objects = append(objects, aPool())
		}
		for _, p := range policies {
			for _, kind := range []string{p.kind, p.kind + "Binding"} {
				if !missing(kind, p.name) {
					o := &unstructured.Unstructured{}
					o.SetAPIVersion("admissionregistration.k8s.io/v1")
					o.SetKind(kind)
					o.SetName(p.name)
					objects = append(objects, o)
				}
			}
		}
		for _, f := range checkPolicies(t.Context(), aCluster(nothing, objects...), DefaultNamespace,
			asInstalled{nodesOnly: nodesOnly}) {
			if f.Level != LevelOK {
				bad = append(bad, f)
			}
		}
		return bad
	}
	nominating := []string{"--nominate-homes"}
	if bad := found(nominating, func(string, string) bool { return false }); len(bad) > 0 {
		t.Errorf("with all of them: %+v", bad)
	}
	for _, p := range policies {
		for _, kind := range []string{p.kind, p.kind + "Binding"} {
			bad := found(nominating, func(k, n string) bool { return k == kind && n == p.name })
			todo := reinstall
			if slices.Contains(policiesOfPools, p.name) {
				todo = poolsWanted
			}
			if len(bad) != 1 || bad[0].Level != p.missing || bad[0].Todo != todo ||
				!strings.HasPrefix(bad[0].Text, kind+" "+p.name+" is missing: ") {
				t.Errorf("without %s %s: %+v", kind, p.name, bad)
			}
		}
	}
	pooled = false
	if bad := found(nominating, func(_, n string) bool { return slices.Contains(policiesOfPools, n) }); len(bad) > 0 {
		t.Errorf("without pools, and what they take: %+v", bad)
	}
	nodesOnly = true
	if bad := found(nominating, func(_, n string) bool {
		return slices.Contains(policiesOfAgents, n) || slices.Contains(policiesOfPools, n)
	}); len(bad) > 0 {
		t.Errorf("without agents, and what is theirs: %+v", bad)
	}
	nodesOnly = false
	nominations := func(_, name string) bool { return name == policyNominations }
	for _, args := range [][]string{nil, {"--leader-elect"}, {"--nominate-homes=false"}} {
		if bad := found(args, nominations); len(bad) > 0 {
			t.Errorf("of a controller with %v: %+v", args, bad)
		}
	}
}

// What gates pods is said, and what to do if it is nothing or not what it should be.
func TestWhatGatesPodsIsSaid(t *testing.T) {
	object := func(version, kind, name string) client.Object {
		o := &unstructured.Unstructured{}
		o.SetAPIVersion("admissionregistration.k8s.io/" + version)
		o.SetKind(kind)
		o.SetName(name)
		return o
	}
	binding := func(version string) client.Object {
		return object(version, "MutatingAdmissionPolicyBinding", home.PolicyGateRecorded)
	}
	webhook := func(bundle string) client.Object {
		return &admissionregistrationv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook},
			Webhooks: []admissionregistrationv1.MutatingWebhook{{
				Name: "a.stayput.io", ClientConfig: admissionregistrationv1.WebhookClientConfig{CABundle: []byte(bundle)},
			}},
		}
	}
	for name, c := range map[string]struct {
		has    []client.Object
		serves []string // versions with policies
		gate   string
		moves  string // webhookRemovedAfter
		says   string // empty: nothing, the policies are missing
		todo   string
	}{
		"policies": {has: []client.Object{binding("v1")},
			says: "OK policies gate pods (MutatingAdmissionPolicy v1)"},
		"policies in beta": {has: []client.Object{binding("v1beta1")}, serves: []string{"v1beta1"},
			says: "OK policies gate pods (MutatingAdmissionPolicy v1beta1)"},
		"a webhook": {has: []client.Object{webhook("ca")}, serves: []string{}, gate: "Auto",
			says: "OK a webhook in the controllers gates pods"},
		"a webhook that is wanted": {has: []client.Object{webhook("ca")}, gate: "Webhook",
			says: "OK a webhook in the controllers gates pods"},
		"a webhook on a newer server": {has: []client.Object{webhook("ca")}, gate: "Auto",
			says: "WARN a webhook in the controllers gates pods, though", todo: "helm upgrade"},
		"a webhook without a certificate": {has: []client.Object{webhook("")}, serves: []string{}, gate: "Auto",
			says: "FAIL the webhook that is to gate pods has no certificate", todo: "see the controllers' logs"},
		"both": {has: []client.Object{webhook("ca"), binding("v1")}, gate: "Auto",
			says: "WARN policies gate pods, and a webhook", todo: "helm upgrade once more"},
		"a webhook that waits for policies": {has: []client.Object{webhook("ca")}, gate: "Auto", moves: "1h",
			says: "WARN a webhook in the controllers gates pods, though", todo: "wait until every API server has them"},
		"policies that replace it": {has: []client.Object{webhook("ca"), binding("v1")}, gate: "Auto", moves: "1h",
			says: "OK policies gate pods (MutatingAdmissionPolicy v1); the controllers delete the webhook"},
		"templates": {gate: "Template", says: "OK nothing gates pods (gate.mechanism is Template)"},
		"nothing": {serves: []string{}, says: "FAIL nothing gates new pods",
			todo: "helm upgrade, or apply gate-webhook.yaml"},
		"nothing, but it could": {gate: "Auto"},
	} {
		if c.serves == nil {
			c.serves = []string{"v1", "v1beta1"}
		}
		unserved := interceptor.Funcs{Get: func(ctx context.Context, k client.WithWatch, key client.ObjectKey,
			o client.Object, opts ...client.GetOption) error {
			if kind := o.GetObjectKind().GroupVersionKind(); kind.Kind == "MutatingAdmissionPolicyBinding" &&
				!slices.Contains(c.serves, kind.Version) {
				return &meta.NoKindMatchError{GroupKind: kind.GroupKind()}
			}
			return k.Get(ctx, key, o, opts...)
		}}
		found, byPolicies := checkGate(t.Context(),
			interceptor.NewClient(aCluster(nothing, c.has...).(client.WithWatch), unserved),
			asInstalled{gate: c.gate, hookedFor: c.moves})
		if c.says == "" {
			if len(found) > 0 || !byPolicies {
				t.Errorf("%s: %+v", name, found)
			}
			continue
		}
		if len(found) != 1 || !strings.HasPrefix(string(found[0].Level)+" "+found[0].Text, c.says) ||
			!strings.HasPrefix(found[0].Todo, c.todo) || (c.todo == "") != (found[0].Todo == "") ||
			byPolicies != strings.Contains(c.says, "policies gate pods") {
			t.Errorf("%s: %v %+v", name, byPolicies, found)
		}
	}
}

// That what gates pods is there does not say that it does.
func TestThatPodsAreNotGatedIsFoundByADryRun(t *testing.T) {
	for name, c := range map[string]struct {
		gates bool
		err   error
		found bool
	}{
		"gated":     {gates: true},
		"not gated": {found: true},
		"no right":  {err: apierrors.NewForbidden(corev1.Resource("pods"), "", nil)},
	} {
		k := interceptor.NewClient(aCluster(nothing).(client.WithWatch), interceptor.Funcs{
			Create: func(ctx context.Context, k client.WithWatch, o client.Object, opts ...client.CreateOption) error {
				pod := o.(*corev1.Pod)
				if !home.Annotated(pod.Annotations) || pod.Namespace != "default" {
					t.Errorf("%s: nothing gates this pod: %+v", name, pod)
				}
				if c.gates {
					pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates,
						corev1.PodSchedulingGate{Name: stayputv1alpha1.PlacementGate})
				}
				return errors.Join(k.Create(ctx, pod, opts...), c.err)
			},
		})
		f := tryGate(t.Context(), k)
		if (len(f) > 0) != c.found || c.found && (f[0].Level != LevelFail || f[0].Check != "gate" || f[0].Todo == "") {
			t.Errorf("%s: %+v", name, f)
		}
		var pods corev1.PodList
		if err := k.List(t.Context(), &pods); err != nil || len(pods.Items) > 0 {
			t.Errorf("%s: it leaves %+v, %v", name, pods.Items, err)
		}
	}
}

// A webhook that the API server does not reach, or policies that it does not apply, gate nothing.
func TestWhatGatesPodsIsTriedIfItIsThere(t *testing.T) {
	webhook := &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: home.GateWebhook},
		Webhooks: []admissionregistrationv1.MutatingWebhook{{
			Name: "a.stayput.io", ClientConfig: admissionregistrationv1.WebhookClientConfig{CABundle: []byte("ca")},
		}},
	}
	var others []client.Object
	for _, p := range policies {
		for _, kind := range []string{p.kind, p.kind + "Binding"} {
			if !slices.Contains(gatePolicies, p.name) {
				o := &unstructured.Unstructured{}
				o.SetAPIVersion("admissionregistration.k8s.io/v1")
				o.SetKind(kind)
				o.SetName(p.name)
				others = append(others, o)
			}
		}
	}
	for name, c := range map[string]struct {
		namespace string
		is        asInstalled
		has       []client.Object
		tried     bool
	}{
		"a webhook":                   {is: asInstalled{gate: "Webhook"}, has: append(others, webhook), tried: true},
		"none":                        {is: asInstalled{gate: "Webhook"}, has: others},
		"templates have the gate":     {is: asInstalled{gate: "Template"}, has: append(others, webhook)},
		"without agents":              {is: asInstalled{nodesOnly: true, gate: "Webhook"}, has: append(others, webhook)},
		"in the namespace of Stayput": {namespace: "default", is: asInstalled{gate: "Webhook"}, has: append(others, webhook)},
	} {
		tried := false
		k := interceptor.NewClient(aCluster(nothing, c.has...).(client.WithWatch), interceptor.Funcs{
			Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
				tried = true
				return nil
			},
		})
		all := checkCluster(t.Context(), k, cmp.Or(c.namespace, DefaultNamespace), noon, c.is)
		says := slices.ContainsFunc(all, func(f Finding) bool { return strings.HasPrefix(f.Text, "a new pod is not gated") })
		if tried != c.tried || says != c.tried {
			t.Errorf("%s: %v: %+v", name, tried, all)
		}
	}
}

func TestEveryPolicyOfTheChartIsChecked(t *testing.T) {
	files, err := filepath.Glob("../../deploy/chart/templates/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var has, checked []string
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\nkind: (\w+AdmissionPolicy)\nmetadata:\n  name: (\S+)`).
			FindAllStringSubmatch(string(b), -1) {
			has = append(has, m[1]+" "+m[2])
		}
	}
	for _, p := range policies {
		checked = append(checked, p.kind+" "+p.name)
	}
	slices.Sort(has)
	slices.Sort(checked)
	if !slices.Equal(has, checked) {
		t.Errorf("the chart has %q, and checked are %q", has, checked)
	}
}

// manifests are the admission policies of deploy/*.yaml, with their bindings.
func manifests(t *testing.T) (all []*unstructured.Unstructured) {
	t.Helper()
	for _, file := range []string{"install", "gate-policies", "pools", "pools-gate-policies"} {
		b, err := os.ReadFile("../../deploy/" + file + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		for text := range strings.SplitSeq(string(b), "\n---\n") {
			o := &unstructured.Unstructured{}
			if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
				t.Fatal(err)
			}
			if o.GroupVersionKind().Group == "admissionregistration.k8s.io" {
				all = append(all, o)
			}
		}
	}
	return all
}

func TestAPolicyThatGuardsNothingIsFound(t *testing.T) {
	// found are the findings in an installation in a namespace, whose manifests were changed.
	found := func(namespace string, change func(o *unstructured.Unstructured)) (bad []string) {
		objects := []client.Object{aPool()}
		for _, o := range manifests(t) {
			change(o)
			objects = append(objects, o)
		}
		for _, f := range checkPolicies(t.Context(), aCluster(nothing, objects...), namespace, asInstalled{}) {
			if f.Level != LevelOK {
				bad = append(bad, string(f.Level)+" "+f.Text)
			}
		}
		return bad
	}
	if bad := found(DefaultNamespace, func(*unstructured.Unstructured) {}); len(bad) > 0 {
		t.Errorf("as in the manifests: %q", bad)
	}
	moved := strings.Join(found("elsewhere", func(*unstructured.Unstructured) {}), "\n")
	for _, policy := range []string{"MutatingAdmissionPolicy stayput-gate-annotated", "MutatingAdmissionPolicy stayput-gate-recorded",
		"MutatingAdmissionPolicy stayput-gate-pools", "ValidatingAdmissionPolicy stayput-controller",
		"ValidatingAdmissionPolicy stayput-agent", "ValidatingAdmissionPolicy stayput-agent-pools"} {
		want := "FAIL " + policy + " is about accounts of namespace stayput-system, and Stayput is in elsewhere: "
		if !strings.Contains(moved, want) {
			t.Errorf("of %s it does not say that it is about other accounts:\n%s", policy, moved)
		}
	}
	for why, change := range map[string]func(spec map[string]any){
		`denies nothing: its validationActions are ["Audit"]`: func(spec map[string]any) {
			spec["validationActions"] = []any{"Audit"}
		},
		"binds it for some objects only": func(spec map[string]any) {
			spec["matchResources"] = map[string]any{"objectSelector": map[string]any{"matchLabels": map[string]any{"a": "b"}}}
		},
	} {
		bad := found(DefaultNamespace, func(o *unstructured.Unstructured) {
			if o.GetKind() == "ValidatingAdmissionPolicyBinding" && o.GetName() == "stayput-agent" {
				change(o.Object["spec"].(map[string]any))
			}
		})
		if len(bad) != 1 || !strings.HasPrefix(bad[0], "FAIL ValidatingAdmissionPolicyBinding stayput-agent "+why) {
			t.Errorf("if it %s: %q", why, bad)
		}
	}
}

func TestANamespaceThatHasUsedUpItsShareIsNamed(t *testing.T) {
	promised := func(namespaces ...string) func(*inspection.Node) {
		return func(n *inspection.Node) {
			n.Networks[0].Addresses, n.Networks[0].RangeSets[0].PromiseLimit = nil, 4
			for i, of := range namespaces {
				n.Networks[0].Addresses = append(n.Networks[0].Addresses, inspection.Address{
					IP: addr("10.1.0.2"), State: inspection.Retained,
					Promise: &inspection.Promise{Identity: fmt.Sprintf("pod:%s/web-%d", of, i)},
				})
			}
		}
	}
	byHand := func(n *inspection.Node) { n.CNI.Installs = false }
	for name, test := range map[string]struct {
		share string // and behind a semicolon the number
		look  looked
		says  string // empty: nothing is found
	}{
		"less than its share": {"0.4", aLook(promised("a", "b")), ""},
		"its share": {"0.4", aLook(promised("a", "b", "a")),
			"namespace a has used up its share of the promises " +
				"(promisedSharePerNamespace 0.4, promisedLimitPerNamespace 0) on "},
		"less than one":                       {"0.1", aLook(promised("b")), "namespace b has"},
		"more than all may have":              {"1", aLook(promised("a", "a", "a", "a")), "namespace a has"},
		"there is no share":                   {"0", aLook(promised("a", "a", "a")), ""},
		"its number":                          {"0.4;1", aLook(promised("a")), "namespace a has"},
		"its number without a share":          {"0;2", aLook(promised("a", "a")), "namespace a has"},
		"less than its number":                {"0;2", aLook(promised("a")), ""},
		"the agent does not set it":           {"0.4", aLook(promised("a", "a", "a"), byHand), ""},
		"the node does not answer":            {"0.4", looked{node: "node-1", err: ErrNoAgent}, ""},
		"an address that nothing is kept for": {"0.1", aLook(), ""},
	} {
		share, limit, _ := strings.Cut(test.share, ";")
		k := aCluster(nothing, deployed(nil, []string{"serve", "--promised-share-per-namespace=" + share,
			"--promised-limit-per-namespace=" + cmp.Or(limit, "0")})...)
		f := checkShares(t.Context(), k, DefaultNamespace, []looked{test.look})
		if (len(f) == 0) != (test.says == "") ||
			len(f) > 0 && (f[0].Level != LevelWarn || !strings.HasPrefix(f[0].Text, test.says) || f[0].Todo == "") {
			t.Errorf("%s: %+v", name, f)
		}
	}
	if f := checkShares(t.Context(), aCluster(nothing), DefaultNamespace, []looked{aLook(promised("a"))}); len(f) > 0 {
		t.Errorf("without agents: %+v", f)
	}
}
