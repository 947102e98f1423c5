package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
			"belongs to a Deployment: no pod of this name will be created again"},
		"without an ordinal": {"web", sts("node-1", "10.6.0.5/16"), nil, "no pod of this name will be created again"},
		"without a node":     {"web-0", sts("", "10.6.0.5/16"), nil, "it has no node"},
		"with a bad address": {"web-0", sts("node-1", "10.6.0.5"), nil,
			`its address "10.6.0.5" is not valid: expected an address such as 10.6.0.10/16`},
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
default     web-2   <none>   <none>     <none>      Refuse   <none>   it has no node
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
	err := writeImport(&b, &inspection.Import{Items: []inspection.ImportItem{
		i("web-0", "node-1", "10.1.0.9", "10m", inspection.ActionRetain, false, "the pod is not there"),
		i("web-1", "node-1", "10.1.0.8", "10m", inspection.ActionBind, true, "the pod runs"),
		i("web-2", "", "", "", inspection.ActionRefuse, false, "it has no node"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != thePlan {
		t.Errorf("printed is\n%s", b.String())
	}
}

// claims are what agents say that they took over.
type claims []inspection.ImportItem

func (c claims) Run(context.Context, string, []byte, ...string) ([]byte, error) {
	return json.Marshal(inspection.Import{Items: c})
}

func TestAnImportAloneMakesNoNodeAHome(t *testing.T) {
	unseen := func(name string) func(r *stayputv1alpha1.RetainedIP) {
		return func(r *stayputv1alpha1.RetainedIP) {
			r.Name, r.Spec.PodName, r.Spec.Scheduled = name+".node-1", name, ""
		}
	}
	podOn := func(name, node string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PodSpec{NodeName: node}}
	}
	mirror := podOn("mirror-0", "node-1")
	yes := true
	mirror.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node-1", Controller: &yes}}
	names := []string{"here-0", "elsewhere-0", "gone-0", "mirror-0"}
	objects := []client.Object{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}},
		podOn("here-0", "node-1"), podOn("elsewhere-0", "node-2"), mirror}
	said := claims{}
	for _, name := range names {
		objects = append(objects, aRetainedIP(unseen(name)))
		said = append(said, inspection.ImportItem{Namespace: "default", Pod: name, Action: inspection.ActionRetain,
			Done: true, Why: "the pod is not there"})
	}
	said[0].Action = inspection.ActionBind
	k := aCluster(nothing, objects...)
	done, failed, err := (&takeover{source: sourceOpenKruise}).carryOut(t.Context(), &cluster{Client: k, agents: said},
		true, &progress{})
	if err != nil || failed != nil || len(done.Items) != len(names) {
		t.Fatalf("%+v, %v, %v", done, failed, err)
	}
	for _, i := range done.Items {
		if warns := strings.Contains(i.Why, "no pod of this name is bound to node node-1"); warns == (i.Pod == "here-0") {
			t.Errorf("of %s it says %q", i.Pod, i.Why)
		}
		var r stayputv1alpha1.RetainedIP
		if err := k.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: i.Pod + ".node-1"}, &r); err != nil ||
			r.Spec.Scheduled != "" {
			t.Errorf("RetainedIP of %s: spec.scheduled is %q, %v", i.Pod, r.Spec.Scheduled, err)
		}
	}
}
