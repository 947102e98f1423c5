package cli

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// deployed is the controllers' Deployment.
func deployed(args []string) client.Object {
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: controllerDeployment},
		Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: args}}},
		}},
	}
}

func TestAPolicyThatIsMissingIsFound(t *testing.T) {
	pooled, nodesOnly := true, false
	// found are the findings without the objects that missing names.
	found := func(args []string, missing func(kind, name string) bool) (bad []Finding) {
		objects := []client.Object{deployed(args)}
		if pooled {
			calico := aPool()
			calico.Name, calico.Spec.Mode = "calico", stayputv1alpha1.ModeCalico
			objects = append(objects, aPool(), calico)
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
			switch {
			case slices.Contains(policiesOfPools, p.name):
				todo = poolsWanted
			case slices.Contains(policiesOfCalico, p.name):
				todo = calicoWanted
			}
			if len(bad) != 1 || bad[0].Level != p.missing || bad[0].Todo != todo ||
				!strings.HasPrefix(bad[0].Text, kind+" "+p.name+" is missing: ") {
				t.Errorf("without %s %s: %+v", kind, p.name, bad)
			}
		}
	}
	pooled = false
	ofPools := slices.Concat(policiesOfPools, policiesOfCalico)
	if bad := found(nominating, func(_, n string) bool { return slices.Contains(ofPools, n) }); len(bad) > 0 {
		t.Errorf("without pools, and what they take: %+v", bad)
	}
	nodesOnly = true
	if bad := found(nominating, func(_, n string) bool {
		return slices.Contains(policiesOfAgents, n) || slices.Contains(ofPools, n)
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
			says: "WARN a webhook in the controllers gates pods, although", todo: "run helm upgrade"},
		"a webhook without a certificate": {has: []client.Object{webhook("")}, serves: []string{}, gate: "Auto",
			says: "FAIL the webhook that gates pods has no certificate", todo: "see the controllers' logs"},
		"both": {has: []client.Object{webhook("ca"), binding("v1")}, gate: "Auto",
			says: "WARN policies gate pods, but a webhook does too", todo: "run helm upgrade once more"},
		"templates": {gate: "Template", says: "OK nothing gates pods (gate.mechanism is Template)"},
		"nothing": {serves: []string{}, says: "FAIL nothing gates new pods",
			todo: "run helm upgrade, or apply gate-webhook.yaml"},
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
			asInstalled{gate: c.gate})
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
			if p.kind != "MutatingAdmissionPolicy" {
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
		says := slices.ContainsFunc(all, func(f Finding) bool { return strings.Contains(f.Text, "a new pod is not gated") })
		if tried != c.tried || says != c.tried {
			t.Errorf("%s: %v: %+v", name, tried, all)
		}
	}
}

func TestEveryPolicyOfTheChartIsChecked(t *testing.T) {
	files, err := filepath.Glob("../../deploy/chart/templates/*.yaml") // Calico's are in no manifest
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, "../../deploy/gate-policies.yaml", "../../deploy/pools-gate-policies.yaml")
	var has, checked []string
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\nkind: (\w+AdmissionPolicy)\nmetadata:\n  name: ([a-z-]+)`).
			FindAllStringSubmatch(string(b), -1) {
			has = append(has, m[1]+" "+m[2])
		}
	}
	for _, p := range policies {
		checked = append(checked, p.kind+" "+p.name)
	}
	slices.Sort(has)
	slices.Sort(checked)
	if has = slices.Compact(has); !slices.Equal(has, checked) {
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
		want := "FAIL " + policy + " references service accounts of namespace stayput-system, but Stayput is in elsewhere: "
		if !strings.Contains(moved, want) {
			t.Errorf("of %s it does not say that it is about other accounts:\n%s", policy, moved)
		}
	}
	for why, change := range map[string]func(spec map[string]any){
		`denies nothing: its validationActions are ["Audit"]`: func(spec map[string]any) {
			spec["validationActions"] = []any{"Audit"}
		},
		"binds it only for the objects": func(spec map[string]any) {
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

func TestBesideOpenKruiseTheBindingThatTheControllerDeletesIsNotMissed(t *testing.T) {
	kruise := &unstructured.Unstructured{}
	kruise.SetAPIVersion("admissionregistration.k8s.io/v1")
	kruise.SetKind("MutatingWebhookConfiguration")
	kruise.SetName(home.KruiseWebhooks)
	objects := []client.Object{kruise}
	for _, o := range manifests(t) {
		if o.GetKind() != "ValidatingAdmissionPolicyBinding" || o.GetName() != home.PolicyUniqueTarget {
			objects = append(objects, o)
		}
	}
	bad := func(objects []client.Object) (all []string) {
		for _, f := range checkPolicies(t.Context(), aCluster(nothing, objects...), DefaultNamespace, asInstalled{}) {
			if f.Level != LevelOK {
				all = append(all, string(f.Level)+" "+f.Text)
			}
		}
		return all
	}
	if found := bad(objects); len(found) > 0 {
		t.Errorf("beside OpenKruise: %q", found)
	}
	if found := bad(objects[1:]); len(found) != 1 || !strings.HasPrefix(found[0],
		"WARN ValidatingAdmissionPolicyBinding stayput-unique-target is missing") {
		t.Errorf("without it: %q", found)
	}
}

func TestANamespaceThatLacksItsLabelIsFound(t *testing.T) {
	asks := map[string]string{stayputv1alpha1.AnnotationPools: "blue"}
	objects := []client.Object{aPool(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "plain"}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "labelled", Annotations: asks,
			Labels: map[string]string{stayputv1alpha1.LabelDefaultPools: ""}}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "lacking", Annotations: asks}},
	}
	bad := func(objects []client.Object) (all []string) {
		for _, f := range checkPolicies(t.Context(), aCluster(nothing, objects...), DefaultNamespace, asInstalled{}) {
			if f.Level != LevelOK && strings.HasPrefix(f.Text, "namespace ") {
				all = append(all, string(f.Level)+" "+f.Text+"; "+f.Todo)
			}
		}
		return all
	}
	if found := bad(objects); len(found) > 0 {
		t.Errorf("without the policy: %q", found)
	}
	for _, o := range manifests(t) {
		objects = append(objects, o)
	}
	if found := bad(objects); len(found) != 1 || !strings.HasPrefix(found[0], "FAIL namespace lacking names pools, ") ||
		!strings.HasSuffix(found[0], "kubectl label namespace lacking stayput.io/default-pools=") {
		t.Errorf("found %q", found)
	}
}
