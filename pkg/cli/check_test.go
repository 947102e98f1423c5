package cli

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/stayput/stayput/pkg/api/inspection"
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
		"no agent":         {node, looked{err: ErrNoAgent}, "agent", LevelFail, "no Stayput agent is running"},
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
		"a newer agent": {node, aLook(func(n *inspection.Node) { n.Format++ }), "agent", LevelWarn, "supports formats up to"},
		"host-local counts": {node, aLook(func(n *inspection.Node) {
			n.CNI.State, n.CNI.Good, n.CNI.Message = "stock", false, "10-flannel.conflist gives addresses by host-local"
		}), "CNI configuration", LevelFail, "host-local"},
		"multus comes first": {node, aLook(
			func(n *inspection.Node) { n.CNI.State, n.CNI.Message = "multus", "it cannot be seen" }), "CNI configuration",
			LevelWarn, "cannot be seen"},
		"no annotations": {node, aLook(
			func(n *inspection.Node) { n.CNI.State, n.CNI.WithoutAnnotations = "by-hand", true }), "CNI configuration",
			LevelWarn, "does not pass pod annotations on"},
		"the plugin is missing": {node, aLook(func(n *inspection.Node) { n.CNI.Plugin.Error = "missing" }), "plugin",
			LevelFail, "no pod can start"},
		"the plugin is older": {node, aLook(func(n *inspection.Node) { n.CNI.Plugin.Version = "v0" }), "plugin", LevelWarn,
			"version v0"},
		"the plugin is another": {node, aLook(func(n *inspection.Node) { n.CNI.Image.SHA256 = "2" }), "plugin", LevelWarn,
			"not the plugin that the agent installs"},
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
			"2 of 5 addresses may be promised, so 3 are left for other pods, fewer than status.capacity.pods of the Node, 4"},
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

func TestEveryStateOfAnAddressIsTold(t *testing.T) {
	told := map[string]bool{}
	states := constants(t, "../api/inspection", "State")
	for _, state := range states {
		left := int64(60)
		n := aLook(func(n *inspection.Node) {
			a := &n.Networks[0].Addresses[0]
			a.State, a.Promise, a.LeftSeconds = inspection.State(state), &inspection.Promise{Identity: "pod:default/web-0"},
				&left
		}).is
		a := n.Networks[0].Addresses[0]
		told[stateOf(&a)] = true
	}
	if len(told) != len(states) {
		t.Errorf("of %q are told %v", states, told)
	}
}

func TestAMissingRightIsNamed(t *testing.T) {
	refused := apierrors.NewForbidden(corev1.Resource("nodes"), "", errors.New("no"))
	if err := rightTo("list nodes", refused); !errors.Is(err, errRight) ||
		!strings.Contains(err.Error(), "missing permission to list nodes") {
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
	for key, value := range map[string]string{
		"stayput.io/agent": "none", "kubernetes.io/os": "windows", "eks.amazonaws.com/compute-type": "fargate",
		"type": "virtual-kubelet",
	} {
		node := aNode("node-1", func(n *corev1.Node) { n.Labels = map[string]string{key: value} })
		f := checkNode(&node, looked{err: ErrNoAgent}, interval{})
		if len(f) != 1 || f[0].Level != LevelOK || !strings.Contains(f[0].Text, "none is wanted here") {
			t.Errorf("%s=%s: %+v", key, value, f)
		}
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
	if err := r.write(&b, false, 80); err != nil {
		t.Fatal(err)
	}
	if b.String() != theReport {
		t.Errorf("printed is\n%s", b.String())
	}
	b.Reset()
	if err := r.write(&b, true, 80); err != nil {
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
		"overdue":                      {lease("a_1", 31*time.Second), "a_1 last renewed"},
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

func TestAPodWhoseSandboxFailsIsFound(t *testing.T) {
	const why = `plugin type="bridge" failed (add): "cni0" already has an IP address different from 10.244.1.1/24`
	pod := func(name string, change ...func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
			Spec:   corev1.PodSpec{NodeName: "node-1"},
			Status: corev1.PodStatus{Phase: corev1.PodPending, StartTime: &metav1.Time{Time: noon.Add(-2 * time.Minute)}}}
		for _, c := range change {
			c(p)
		}
		return p
	}
	fails := func(name string, since time.Duration) *corev1.Event {
		return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name + "." + since.String()},
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: name, UID: types.UID(name)},
			Reason:         "FailedCreatePodSandBox", Message: why + " after " + since.String(),
			FirstTimestamp: metav1.NewTime(noon.Add(-since)), LastTimestamp: metav1.NewTime(noon.Add(-since))}
	}
	started := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReadyToStartContainers, Status: corev1.ConditionTrue}}
	}
	k := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		pod("web-0"), fails("web-0", 2*time.Minute), fails("web-0", time.Second),
		pod("soon", func(p *corev1.Pod) { p.Status.StartTime.Time = noon.Add(-time.Second) }),
		fails("soon", time.Second),
		pod("started", started), fails("started", time.Hour),
		pod("nowhere", func(p *corev1.Pod) { p.Spec.NodeName, p.Status.StartTime = "", nil }),
		fails("gone", time.Hour), pod("pulls")).
		WithIndex(&corev1.Pod{}, "status.phase", func(o client.Object) []string {
			return []string{string(o.(*corev1.Pod).Status.Phase)}
		}).
		WithIndex(&corev1.Event{}, "reason", func(o client.Object) []string { return []string{o.(*corev1.Event).Reason} }).
		Build()
	var got []string
	for _, f := range checkPending(t.Context(), k, noon) {
		if f.Check == "pod sandboxes" {
			got = append(got, string(f.Level)+" "+f.Text)
		}
	}
	if want := "FAIL pod default/web-0 on node-1 has not started for 2m: " + why + " after 1s"; len(got) != 1 ||
		got[0] != want {
		t.Errorf("found %q, want %q", got, want)
	}
}
