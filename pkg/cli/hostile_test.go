package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/stayput/stayput/pkg/api/inspection"
	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	spiderpoolv2beta1 "github.com/stayput/stayput/pkg/api/spiderpool/v2beta1"
	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// hostile is what a tenant or a node may have put wherever text goes: it sets colours, by 7 and 8 bit controls, moves
// the cursor, sets the window's title, rings, turns the direction of writing, hides, and begins a line of its own.
const hostile = "evil\x1b[2J\u009b31m\r\b\x00\x1b]0;owned\x07\u202e\u2066\u200b\u2028\u00ad\x7f\nOK    all is well"

// filled returns v with the hostile text in each string that is empty, down to a depth.
func filled[T any](v T) T {
	var fill func(v reflect.Value, depth int)
	fill = func(v reflect.Value, depth int) {
		if _, own := v.Interface().(json.Marshaler); own || depth == 0 { // times, addresses and quantities
			return
		}
		switch v.Kind() {
		case reflect.String:
			if v.String() == "" {
				v.SetString(hostile)
			}
		case reflect.Struct:
			for i := range v.NumField() {
				if v.Type().Field(i).IsExported() {
					fill(v.Field(i), depth-1)
				}
			}
		case reflect.Pointer:
			if v.IsNil() {
				v.Set(reflect.New(v.Type().Elem()))
			}
			fill(v.Elem(), depth)
		case reflect.Slice:
			if v.Len() == 0 && v.Type().Elem().Kind() != reflect.Uint8 {
				v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			}
			for i := range v.Len() {
				fill(v.Index(i), depth-1)
			}
		}
	}
	fill(reflect.ValueOf(&v).Elem(), 5)
	return v
}

// hostileAgent answers each question with hostile text.
type hostileAgent struct{ fails bool }

func (a hostileAgent) Run(_ context.Context, _ string, _ []byte, args ...string) ([]byte, error) {
	if a.fails {
		return nil, fmt.Errorf("the agent said: %s", hostile)
	}
	zoned := addr("fe80::1%" + strings.ReplaceAll(hostile, "%", ""))
	switch args[0] {
	case "inspect":
		return json.Marshal(filled(inspection.Node{Format: 1, Networks: []inspection.Network{
			{Error: " ", Addresses: []inspection.Address{{IP: zoned}, {IP: addr("10.1.0.9"), Promise: &inspection.Promise{}}}}, {},
		}}))
	case "import":
		return json.Marshal(filled(inspection.Import{Items: []inspection.ImportItem{
			{Action: inspection.ActionRetain}, {Action: inspection.ActionRefuse}, {Pod: "web-0", Namespace: "default"}, {},
		}}))
	}
	return json.Marshal(filled(inspection.Release{Items: []inspection.ReleaseItem{{}}}))
}

// hostileObjects are what a cluster has whose tenants and nodes are hostile. The API server checks names.
func hostileObjects() map[string][]client.Object {
	yes, now := true, time.Now()
	named := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: "u", ResourceVersion: "1",
			GenerateName: " ", CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))}
	}
	ours := func(key string) map[string]string { return map[string]string{key: hostile} }
	pod := filled(corev1.Pod{ObjectMeta: named("default", "web-0"), Spec: corev1.PodSpec{NodeName: "node-1"}})
	pod.Annotations = ours(stayputv1alpha1.AnnotationRetainIP)
	for _, key := range []string{stayputv1alpha1.AnnotationIdentity, stayputv1alpha1.AnnotationHomeWait,
		stayputv1alpha1.AnnotationPools, stayputv1alpha1.AnnotationAddresses, stayputv1alpha1.AnnotationPinned} {
		pod.Annotations[key] = hostile
	}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", UID: "w",
		Controller: &yes}}
	pod.DeletionTimestamp = nil
	waiting := pod.DeepCopy()
	waiting.Name, waiting.Spec.NodeName, waiting.Status.Phase = "web-1", "", corev1.PodPending
	waiting.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: stayputv1alpha1.PlacementGate}}
	set := filled(appsv1.StatefulSet{ObjectMeta: named("default", "web")})
	set.Spec.Template.Annotations = pod.Annotations
	retained := filled(*aRetainedIP(func(r *stayputv1alpha1.RetainedIP) {
		r.ObjectMeta, r.Spec = named("default", "web-0.node-1"), stayputv1alpha1.RetainedIPSpec{PodName: "web-0"}
		r.Status = stayputv1alpha1.RetainedIPStatus{Phase: stayputv1alpha1.PhaseRetained}
	}))
	podIP := filled(stayputv1alpha1.PodIP{ObjectMeta: named("", "10.6.168.101"),
		Spec:   stayputv1alpha1.PodIPSpec{Namespace: "default", PodName: "web-0"},
		Status: stayputv1alpha1.PodIPStatus{NodeName: "node-1"}})
	elsewhere := podIP.DeepCopy()
	elsewhere.Name, elsewhere.Spec.Namespace, elsewhere.Spec.PodName = hostile, "", hostile
	for _, o := range []client.Object{&retained, &podIP, elsewhere} {
		o.SetDeletionTimestamp(nil)
	}
	event := func(kind, reason string) *corev1.Event {
		e := filled(corev1.Event{ObjectMeta: named("default", "e"), Reason: reason, Count: 1})
		e.InvolvedObject.Kind, e.InvolvedObject.Name = kind, "web-0"
		e.ReportingController = stayputv1alpha1.AgentFieldManager
		return &e
	}
	lease := filled(coordinationv1.Lease{ObjectMeta: named(DefaultNamespace, home.LeaseName)})
	node := filled(corev1.Node{ObjectMeta: named("", "node-1")})
	ns := filled(corev1.Namespace{ObjectMeta: named("", "default")})
	pool := filled(stayputv1alpha1.PodIPPool{ObjectMeta: named("", "blue")})
	pool.Status.Conditions = []metav1.Condition{
		{Type: stayputv1alpha1.ConditionReady, Status: metav1.ConditionFalse, Message: hostile},
		{Type: stayputv1alpha1.ConditionOverlaps, Status: metav1.ConditionTrue, Message: hostile},
	}
	state := filled(kruisev1alpha1.PersistentPodState{ObjectMeta: named("default", "web")})
	theirs := filled(spiderpoolv2beta1.SpiderIPPool{ObjectMeta: named("", "theirs")})
	endpoint := filled(spiderEndpoint{})
	endpoint.Status.Current.Node = "node-1"
	all := map[string][]client.Object{
		"pods": {&pod, waiting}, "nodes": {&node}, "namespaces": {&ns}, "statefulsets": {&set}, "leases": {&lease},
		"events":      {event("Pod", "Evicted"), event("StatefulSet", ""), event("Pod", "Killing")},
		"retainedips": {&retained}, "podips": {&podIP, elsewhere}, "podippools": {&pool},
		"persistentpodstates": {&state}, "spiderippools": {&theirs}, "spiderendpoints": {aSpiderEndpoint(&endpoint)},
	}
	return all
}

// spiderEndpointObject is a SpiderEndpoint with metadata.
type spiderEndpointObject struct {
	*corev1.Namespace `json:",inline"` // for its metadata
	Status            any              `json:"status"`
}

func aSpiderEndpoint(e *spiderEndpoint) client.Object {
	return &spiderEndpointObject{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0"}},
		e.Status}
}

// hostileServer is an API server that has these objects. It changes none; changes are called with each request to.
func hostileServer(t *testing.T, objects map[string][]client.Object, changes ...func(*http.Request)) (
	kubeconfig string) {
	t.Helper()
	groups := map[string][]string{
		"v1":      {"Pod", "Node", "Namespace", "Event", "ConfigMap"},
		"apps/v1": {"StatefulSet", "Deployment", "DaemonSet"}, "coordination.k8s.io/v1": {"Lease"},
		"stayput.io/v1alpha1":             {"RetainedIP", "PodIP", "PodIPPool", "PodIPAudit", "PodIPReport"},
		"apps.kruise.io/v1alpha1":         {"PersistentPodState"},
		"spiderpool.spidernet.io/v2beta1": {"SpiderIPPool", "SpiderEndpoint", "SpiderReservedIP"},
		"admissionregistration.k8s.io/v1": {"MutatingWebhookConfiguration", "ValidatingAdmissionPolicy"},
		"apiextensions.k8s.io/v1":         {"CustomResourceDefinition"},
	}
	cluster := []string{"Node", "Namespace", "PodIP", "PodIPPool", "PodIPAudit", "PodIPReport", "SpiderIPPool",
		"SpiderReservedIP", "CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingAdmissionPolicy"}
	kinds := map[string]string{} // by resource
	answer := func(w http.ResponseWriter, code int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		if err := json.NewEncoder(w).Encode(v); err != nil {
			t.Error(err)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, map[string]string{"gitVersion": hostile, "major": "1", "minor": "36"})
	})
	mux.HandleFunc("/api", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}})
	})
	list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}}
	for gv, all := range groups {
		resources := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList"}, GroupVersion: gv}
		for _, kind := range all {
			resource := strings.ToLower(kind) + "s"
			if strings.HasSuffix(resource, "ys") {
				resource = strings.TrimSuffix(resource, "ys") + "ies"
			}
			kinds[resource] = kind
			resources.APIResources = append(resources.APIResources, metav1.APIResource{Name: resource, Kind: kind,
				Namespaced: !slices.Contains(cluster, kind), Verbs: metav1.Verbs{"get", "list"}})
		}
		prefix := "/api/v1"
		if group, version, grouped := strings.Cut(gv, "/"); grouped {
			prefix = "/apis/" + gv
			v := metav1.GroupVersionForDiscovery{GroupVersion: gv, Version: version}
			list.Groups = append(list.Groups, metav1.APIGroup{Name: group, Versions: []metav1.GroupVersionForDiscovery{v},
				PreferredVersion: v})
		}
		mux.HandleFunc(prefix, func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, resources) })
		mux.HandleFunc(prefix+"/", func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet {
				for _, changes := range changes {
					changes(r)
				}
			}
			parts := strings.Split(strings.TrimPrefix(r.URL.Path, prefix+"/"), "/")
			if parts[0] == "namespaces" && len(parts) > 2 {
				parts = parts[2:]
			}
			typed := func(o client.Object) client.Object {
				o.GetObjectKind().SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind(kinds[parts[0]]))
				gvk := o.GetObjectKind().GroupVersionKind()
				gvk.Group, gvk.Version, _ = strings.Cut(gv, "/")
				if gvk.Version == "" {
					gvk.Group, gvk.Version = "", gv
				}
				o.GetObjectKind().SetGroupVersionKind(gvk)
				return o
			}
			if r.Method == http.MethodPost {
				answer(w, http.StatusForbidden, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
					Status: "Failure", Code: 403, Reason: metav1.StatusReasonForbidden, Message: hostile})
				return
			}
			if len(parts) == 1 {
				items := []client.Object{}
				for _, o := range objects[parts[0]] {
					items = append(items, typed(o))
				}
				answer(w, 200, map[string]any{"kind": kinds[parts[0]] + "List", "apiVersion": gv, "metadata": map[string]string{},
					"items": items})
				return
			}
			for _, o := range objects[parts[0]] {
				if o.GetName() == parts[1] {
					answer(w, 200, typed(o))
					return
				}
			}
			code, reason := 404, metav1.StatusReasonNotFound
			if parts[0] == "configmaps" && len(objects) > 0 { // an error whose text a hostile webhook or aggregated API chose
				code, reason = 403, metav1.StatusReasonForbidden
			}
			answer(w, code, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
				Code: int32(code), Reason: reason, Message: hostile})
		})
	}
	mux.HandleFunc("/apis", func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, list) })
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c",
		"clusters":[{"name":"c","cluster":{"server":%q}}],"contexts":[{"name":"c","context":{"cluster":"c","user":""}}]}`, server.URL)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestNoVerbPrintsWhatOthersWroteAsItIs(t *testing.T) {
	cases := map[string][]string{
		"get": {"", "-A -o wide", "web-0"}, "why": {"web-0", "web-1"}, "node": {"node-1"},
		"check": {"", "node-1 --verbose", "--preflight"},
		"import": {"openkruise", "openkruise --yes", "spiderpool", "spiderpool --pools", "spiderpool --pools --yes",
			"spiderpool --dry-run=client"},
		"release": {"web-0", "web-0 --yes --timeout=1ms", "web-0 --dry-run=client", "--all", "--all --dry-run=client",
			"--node node-1 --namespace gone --dry-run=client", "--node node-1 --namespace gone"},
		"uninstall": {"--yes --timeout=2s"}, "version": {""}, "completion": nil, "help": nil,
	}
	kubeconfig := hostileServer(t, hostileObjects())
	run := func(agents Agents, args string) {
		cmd := New(Options{Version: "test", Agents: agents})
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		screen, tty := terminal(t, 200) // so that the plans are shown
		if _, err := screen.WriteString("n\n"); err != nil {
			t.Error(err)
		}
		cmd.SetIn(tty)
		cmd.SetArgs(append(strings.Fields(args), "--kubeconfig", kubeconfig, "--cache-dir", t.TempDir()))
		err := cmd.ExecuteContext(t.Context())
		if !strings.Contains(out.String(), "evil") {
			t.Errorf("%s shows nothing of others: %v\n%s", args, err, out.String())
		}
		for n, line := range strings.Split(out.String(), "\n") {
			for _, r := range line {
				if !strconv.IsPrint(r) {
					t.Errorf("%s prints %q in line %d: %q", args, r, n, line)
					break
				}
			}
			if err == nil && strings.HasPrefix(line, "OK    all is well") {
				t.Errorf("%s prints a line that others wrote: %q", args, line)
			}
		}
	}
	for _, verb := range New(Options{}).Commands() {
		if _, ok := cases[verb.Name()]; !ok {
			t.Errorf("verb %s is not tried", verb.Name())
		}
		for _, args := range cases[verb.Name()] {
			run(hostileAgent{}, verb.Name()+" "+args)
		}
	}
	run(hostileAgent{fails: true}, "node node-1")
	run(hostileAgent{fails: true}, "why web-0")
	run(hostileAgent{fails: true}, "check")
}

func TestNoCompletionIsWhatOthersWrote(t *testing.T) {
	kubeconfig := hostileServer(t, hostileObjects())
	for _, verb := range []string{"get", "why", "release", "node"} {
		var out bytes.Buffer
		cmd := New(Options{})
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs([]string{cobra.ShellCompRequestCmd, verb, "--kubeconfig", kubeconfig, "--cache-dir", t.TempDir(), ""})
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Error(err)
		}
		if strings.Contains(out.String(), "evil") {
			t.Errorf("%s is completed by %q", verb, out.String())
		}
	}
}

func TestTextIsMadePrintable(t *testing.T) {
	for text, want := range map[string]string{
		"web-0 … é 漢 \\": "web-0 … é 漢 \\", "\x1b[31m": `\x1b[31m`, "a\nb\tc": `a\nb\tc`,
		"\u009b\u202e\u200b": `\u009b\u202e\u200b`,
		"\x9b\xff":           `\x9b\xff`, "\U000e0041": `\U000e0041`, "\ufffd": "\ufffd", "": "",
	} {
		if got := printable(text); got != want {
			t.Errorf("%q is %q, expected %q", text, got, want)
		}
	}
}
