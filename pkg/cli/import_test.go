package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// anEndpoint is a SpiderEndpoint of a pod with two interfaces, one of them with two families.
func anEndpoint(t *testing.T, owner, node, ip string) *spiderEndpoint {
	t.Helper()
	var e spiderEndpoint
	err := json.Unmarshal(fmt.Appendf(nil, `{"metadata":{"name":"web-0"},"status":{"ownerControllerType":%q,"ownerControllerName":"web","current":{"uid":"u","node":%q,
		"ips":[{"interface":"eth0","ipv4":%q,"ipv6":"fd00::5/64","ipv4Pool":"p","vlan":0},{"interface":"net1","ipv4":"10.7.0.5/16"}]}}}`, owner, node, ip), &e)
	if err != nil {
		t.Fatal(err)
	}
	return &e
}

func TestASpiderEndpointIsAPromiseForEachInterface(t *testing.T) {
	all := itemsOf("default", "web-0", anEndpoint(t, "StatefulSet", "node-1", "10.6.0.5/16"), nil, "while-owned")
	if len(all) != 2 || fmt.Sprint(all[0].IPs) != "[10.6.0.5 fd00::5]" || fmt.Sprint(all[1].IPs) != "[10.7.0.5]" ||
		all[0].Interface != "eth0" || all[1].Interface != "net1" {
		t.Fatalf("%+v", all)
	}
	for _, i := range all {
		if i.Namespace != "default" || i.Pod != "web-0" || i.Node != "node-1" || i.Retention != "while-owned" ||
			i.Action != "" {
			t.Errorf("%+v", i)
		}
	}
}

func TestThePodTemplateComesBeforeTheFlag(t *testing.T) {
	e := anEndpoint(t, "StatefulSet", "node-1", "10.6.0.5/16")
	for annotation, want := range map[string]string{"stayput.io/retain-ip: 10m": "10m0s",
		"io.kubernetes.cri/reserved-ip-duration: 20": "20m0s", "stayput.io/retain-ip: while-owned": "while-owned"} {
		key, value, _ := strings.Cut(annotation, ": ")
		if all := itemsOf("default", "web-0", e, map[string]string{key: value}, "1h"); all[0].Retention != want ||
			all[0].Action != "" {
			t.Errorf("%s: %+v", annotation, all[0])
		}
	}
}

func TestASpiderEndpointThatCannotBeTakenOverSaysWhy(t *testing.T) {
	sts := func(node, ip string) *spiderEndpoint { return anEndpoint(t, "StatefulSet", node, ip) }
	for name, test := range map[string]struct {
		pod         string
		e           *spiderEndpoint
		annotations map[string]string
		says        string
	}{
		"of a Deployment": {"web-7d9f-x2x", anEndpoint(t, "Deployment", "node-1", "10.6.0.5/16"), nil,
			"belongs to a Deployment: no pod of this name comes again"},
		"without an ordinal": {"web", sts("node-1", "10.6.0.5/16"), nil, "no pod of this name comes again"},
		"without a node":     {"web-0", sts("", "10.6.0.5/16"), nil, "names no node"},
		"with a bad address": {"web-0", sts("node-1", "10.6.0.5"), nil,
			`its address "10.6.0.5" is not valid: expected one such as 10.6.0.10/16`},
		"with a bad template": {"web-0", sts("node-1", "10.6.0.5/16"), map[string]string{"stayput.io/retain-ip": "true"},
			`"true" is not valid`},
		"of a shared identity": {"web-0", sts("node-1", "10.6.0.5/16"), map[string]string{
			"stayput.io/retain-ip": "10m", "stayput.io/identity": "x",
		},
			"shared identity x"},
	} {
		if all := itemsOf("default", test.pod, test.e, test.annotations, "10m"); all[0].Action != inspection.ActionRefuse ||
			!strings.Contains(all[0].Why, test.says) {
			t.Errorf("%s: %+v", name, all[0])
		}
	}
}

const thePlan = `NAMESPACE   POD     NODE     IP         RETENTION   ACTION   DONE     WHY
default     web-0   node-1   10.1.0.9   10m         Retain   no       the pod is not there
default     web-1   node-1   10.1.0.8   10m         Bind     yes      the pod runs
default     web-2   <none>   <none>     <none>      Refuse   <none>   it names no node
`

func TestAPlanIsATable(t *testing.T) {
	var b strings.Builder
	i := func(pod, node, ip, retention string, action inspection.Action, done bool, why string) inspection.ImportItem {
		item := inspection.ImportItem{
			Namespace: "default", Pod: pod, Node: node, Retention: retention, Action: action, Done: done, Why: why,
		}
		if ip != "" {
			item.IPs = append(item.IPs, addr(ip))
		}
		return item
	}
	err := printTable(&b, importTable(&inspection.Import{Items: []inspection.ImportItem{
		i("web-0", "node-1", "10.1.0.9", "10m", inspection.ActionRetain, false, "the pod is not there"),
		i("web-1", "node-1", "10.1.0.8", "10m", inspection.ActionBind, true, "the pod runs"),
		i("web-2", "", "", "", inspection.ActionRefuse, false, "it names no node"),
	}}), printers.PrintOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != thePlan {
		t.Errorf("printed is\n%s", b.String())
	}
}

func TestWhereTheOwnersOfImportedAddressesWereIsNoted(t *testing.T) {
	unseen := func(r *stayputv1alpha1.RetainedIP) { r.Spec.Scheduled = "" }
	k := aCluster(nothing, aRetainedIP(unseen))
	item := inspection.ImportItem{Namespace: "default", Pod: "web-2", Node: "node-1", Action: inspection.ActionRetain}
	scheduled := func() string {
		var r stayputv1alpha1.RetainedIP
		if err := k.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "web-2.node-1"}, &r); err != nil {
			t.Fatal(err)
		}
		return r.Spec.Scheduled
	}
	if err := noteScheduled(t.Context(), k, []inspection.ImportItem{item}); err != nil || scheduled() != "" {
		t.Errorf("of what was not carried out %q is noted, %v", scheduled(), err)
	}
	item.Done = true
	if err := noteScheduled(t.Context(), k, []inspection.ImportItem{item}); err != nil || scheduled() != "pod/web-2" {
		t.Errorf("noted is %q, %v", scheduled(), err)
	}
	item.Pod = "web-3"
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := noteScheduled(ctx, k, []inspection.ImportItem{item}); err == nil ||
		!strings.Contains(err.Error(), "default/web-3.node-1: the address is kept, but pod web-3 will not be brought") {
		t.Errorf("of one that is not published: %v", err)
	}
}
